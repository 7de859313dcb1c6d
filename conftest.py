"""Lets the tests run from a bare checkout: there patches/ is made hf_flash2.patches, as package_dir in setup.py does for an install."""

from importlib.util import find_spec
from pathlib import Path

import hf_flash2

if not find_spec("hf_flash2.patches"):
    hf_flash2.__path__.append(str(Path(__file__).parent))

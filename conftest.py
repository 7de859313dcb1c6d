"""Lets the tests run from a bare checkout: patches/ is hf_flash2.patches once installed (package_dir in setup.py), so it is made that here."""

from importlib.util import find_spec
from pathlib import Path

import hf_flash2

if not find_spec("hf_flash2.patches"):
    hf_flash2.__path__.append(str(Path(__file__).parent))

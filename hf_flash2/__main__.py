"""`python -m hf_flash2` is `hf-flash2`."""

import sys

from .cli import main

sys.exit(main())

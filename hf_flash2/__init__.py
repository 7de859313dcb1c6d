"""FlashAttention-2 for Hugging Face Transformers: own CUDA kernels, padding without copies, one library for every torch.

    import hf_flash2
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="hf_flash2")

README.md has the rest.
"""

import importlib

from . import interface
from .collator import PackingBatchSampler, PackingCollator, first_fit
from .functional import flash_attn_func, flash_attn_ranges_func, flash_attn_varlen_func
from .interface import registration_state, set_strict
from .ops import last_backend

__version__ = "0.1.0"

__all__ = [
    "PackingBatchSampler",
    "PackingCollator",
    "first_fit",
    "flash_attn_func",
    "flash_attn_ranges_func",
    "flash_attn_varlen_func",
    "last_backend",
    "patch",
    "patched",
    "registration_state",
    "set_strict",
    "unpatch",
    "verify",
]

interface.register()


def __getattr__(name: str):
    if name in ("patch", "patched", "unpatch", "verify"):  # hf_flash2.patches imports Transformers' models: loaded when asked for
        return getattr(importlib.import_module(".patches", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

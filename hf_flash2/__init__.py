"""FlashAttention-2 for Hugging Face Transformers: own CUDA kernels, padding without copies, one library for every torch.

    import hf_flash2
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="hf_flash2")

README.md has the rest.
"""

import importlib.util
from pathlib import Path

__version__ = "0.1.0"

__all__ = [
    "PackingBatchSampler",
    "PackingCollator",
    "first_fit",
    "flash_attn_func",
    "flash_attn_ranges_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "last_backend",
    "patch",
    "patched",
    "registration_state",
    "set_strict",
    "unpatch",
    "verify",
]

# In a checkout, `patches` lies beside this folder, and setup.py maps it to hf_flash2.patches. This does so where nothing is installed, or
# where Python was started in the checkout, which hides the installed package. It comes before an editable install of another checkout.
_checkout = Path(__file__).resolve().parents[1]
if (_checkout / "patches" / "contract.py").is_file():
    __path__.append(str(_checkout))

OLDEST_TORCH = (2, 6)  # before, Transformers makes no masks of documents, and eager and SDPA let them see each other


def _torch_problem() -> str | None:
    """Why torch cannot be used here and what to do, or None. The package imports all the same, for `hf-flash2 info` and `build`."""
    try:
        import torch

        major, minor = torch.__version__.split(".")[:2]  # no attribute of the empty folder that an uninstall may leave
        if (int(major), int(minor)) < OLDEST_TORCH:
            raise ImportError(f"{torch.__version__} is too old")
    except Exception as error:  # OSError for a missing shared library, and whatever else a broken torch raises
        oldest = ".".join(map(str, OLDEST_TORCH))
        return (
            f"torch cannot be imported ({type(error).__name__}: {error}); install torch {oldest} or newer for this machine: "
            "https://pytorch.org/get-started"
        )
    return None


torch_problem = _torch_problem()
if torch_problem is None:
    from . import flops, registration  # noqa: F401
    from .collator import PackingBatchSampler, PackingCollator, first_fit
    from .functional import flash_attn_func, flash_attn_ranges_func, flash_attn_varlen_func
    from .kvcache import flash_attn_with_kvcache
    from .notices import set_strict
    from .ops import last_backend
    from .registration import registration_state

    registration.register()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str):
    if torch_problem is not None and name in __all__:
        raise ImportError(f"hf_flash2.{name} needs torch: {torch_problem}")
    if name in ("patch", "patched", "unpatch", "verify"):  # hf_flash2.patches imports Transformers' models: loaded when asked for
        try:
            return getattr(importlib.import_module(".patches", __name__), name)
        except ModuleNotFoundError as error:
            if error.name != "transformers":
                raise
            raise ImportError(f"hf_flash2.{name} needs Transformers: pip install transformers") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

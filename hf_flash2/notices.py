"""What the Transformers layer says and remembers: warnings once a process, strict mode, and which route each attention layer took."""

import contextlib
import copy
import logging
import os
from collections import Counter
from collections.abc import Iterator

import torch

from . import ops, tracing

NAME = "hf_flash2"
CALLS = "_hf_flash2_calls"  # attribute that patches/ gives to a module whose calls it counts: its Calls

logger = logging.getLogger(NAME)

_SWITCH = {"": False, "0": False, "no": False, "false": False, "off": False, "1": True, "yes": True, "true": True, "on": True}
_strict: bool | None = None  # what set_strict was given; None = what HF_FLASH2_STRICT says
_noticed: set[str] = set()
_calls: dict[torch.nn.Module, list[str]] | None = None


def set_strict(enabled: bool) -> None:
    """Whether attention that our kernels cannot run raises ValueError instead of going to SDPA with a warning. HF_FLASH2_STRICT=1 does."""
    if not isinstance(enabled, bool):
        raise ValueError(f"set_strict takes True or False, got {enabled!r}")
    global _strict
    _strict = enabled


def is_strict() -> bool:
    """What `set_strict` was given last, or else what HF_FLASH2_STRICT says.

    Raises:
        ValueError: HF_FLASH2_STRICT is neither 0, no, false, off nor 1, yes, true, on.
    """
    if _strict is not None:
        return _strict
    value = os.environ.get("HF_FLASH2_STRICT", "")
    if value.lower() not in _SWITCH:
        raise ValueError(f"HF_FLASH2_STRICT must be 0 or 1, got {value!r}")
    return _SWITCH[value.lower()]


class Calls(Counter[str]):
    """How often the calls of a layer took which route, and the backend that the last one of the op ran on. Not under torch.compile."""

    backend: str | None = None

    def __reduce__(self) -> tuple:  # Counter's keeps the counts alone when a model is copied or saved
        return *super().__reduce__(), vars(self)

    def copy(self) -> "Calls":
        return copy.copy(self)  # for the same reason


@contextlib.contextmanager
def record_calls() -> Iterator[dict[torch.nn.Module, list[str]]]:
    """Collect, per attention module, the route of each call: "dense", "padded", "documents", "context parallel" or "sdpa". Not under
    torch.compile."""
    global _calls
    outer, _calls = _calls, {}
    try:
        yield _calls
    finally:
        _calls = outer


def record(module: torch.nn.Module, route: str) -> None:
    """An attention layer has taken this route. Not under torch.compile."""
    if tracing.is_compiling():
        return
    if _calls is not None:
        _calls.setdefault(module, []).append(route)
    calls: Calls | None = vars(module).get(CALLS)
    if calls is not None:
        calls[route] += 1


def record_backend(module: torch.nn.Module) -> None:
    """The op has run for this attention layer: on which backend. Not under torch.compile."""
    if tracing.is_compiling():  # first: older compilers cannot trace what follows
        return
    calls: Calls | None = vars(module).get(CALLS)
    if calls is not None:
        calls.backend = ops.last_backend()


@torch.compiler.assume_constant_result  # so that a compiled model warns too, while it is being traced
def notice(message: str) -> None:
    """Warn, once a process."""
    if message not in _noticed:
        _noticed.add(message)
        logger.warning(message)

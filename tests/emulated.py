"""The emulated library behind the package's own calls: CPU tensors run the CUDA kernels of csrc, thread by thread, in tests/emulator."""

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from hf_flash2 import functional, kernels, kvcache, native, ops

HOPPER, A100, SMALL, WIDE_HOPPER, WIDEST_HOPPER, BLACKWELL, TURING = range(7)  # the devices that the emulator pretends to have


class _Packer(struct.Struct):
    """A layout of kernels.py with the emulated device in place of the -1 that CPU tensors give."""

    device = HOPPER

    def pack(self, *values) -> bytes:
        position = self.format.index("i") - 1  # the first int32 field; the format starts with the byte order
        assert values[position] == -1
        return super().pack(*values[:position], self.device, *values[position + 1 :])


def load(path: Path) -> ctypes.CDLL:
    """The emulated library, its functions declared."""
    library = ctypes.CDLL(str(path))
    native._declare(library)
    library.emulator_schedule.argtypes = [ctypes.c_uint32, ctypes.c_int]
    library.emulator_schedule.restype = None
    library.emulator_install.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int]
    library.emulator_install.restype = None
    library.emulator_watch.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_size_t]
    library.emulator_watch.restype = None
    library.emulator_watched.argtypes = [ctypes.POINTER(ctypes.c_int)] * 2
    library.emulator_watched.restype = None
    library.emulator_bank_conflicts.restype = ctypes.c_uint64
    library.emulator_tensor_bytes.restype = ctypes.c_uint64
    return library


def poisoned_empty(*size, **options) -> torch.Tensor:
    """torch.empty whose bytes are all 1s: NaN, -1. For results and scratch of kernels, which have to be written before they are read."""
    x = torch.zeros(*size, **options)
    x.view(torch.uint8).fill_(255)
    return x


def poisoned_empty_like(x: torch.Tensor, **options) -> torch.Tensor:
    return poisoned_empty(x.shape, dtype=x.dtype)  # contiguous, as every caller wants it


@contextmanager
def running(monkeypatch, library: ctypes.CDLL, device: int = HOPPER, seed: int = 0, resident: int = 1) -> Iterator[None]:
    """Within: attention on CPU tensors runs on the emulated device. `seed` and `resident` as emulator_schedule takes them."""
    with monkeypatch.context() as patch:
        for layout in ("_FORWARD", "_APPEND", "_ROTARY", "_CROSS_ENTROPY"):
            packer = _Packer(getattr(kernels, layout).format)
            packer.device = device
            patch.setattr(kernels, layout, packer)
        patch.setattr(torch, "empty", poisoned_empty)
        patch.setattr(torch, "empty_like", poisoned_empty_like)
        patch.setattr(native, "library", lambda: library)
        patch.setattr(native, "check_device", lambda index: None)
        patch.setattr(kernels, "_current_stream", lambda index: 0)
        patch.setattr(functional, "_on_gpu", lambda x: True)
        patch.setattr(ops, "plans", {})
        patch.setattr(ops, "_DISPATCHED", (ops._forward_cuda, ops._backward_cuda))  # for what is not planned
        patch.setattr(kvcache, "_OPS", (kernels.append, kvcache._paged_forward_cuda))
        library.emulator_schedule(seed, resident)
        yield

"""The emulated library behind the package's own calls: CPU tensors run the CUDA kernels of csrc, thread by thread, in tests/emulator."""

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_flash2 import native, ops

HOPPER, A100, SMALL = range(3)  # the devices that the emulator pretends to have


class _Packer(struct.Struct):
    """native._FORWARD with a device index where CPU tensors have none."""

    device = HOPPER

    def pack(self, *values) -> bytes:
        return super().pack(*(self.device if value is None else value for value in values))


def load(path: Path) -> ctypes.CDLL:
    """The emulated library, its functions declared."""
    library = ctypes.CDLL(str(path))
    native._declare(library)
    library.emulator_schedule.argtypes = [ctypes.c_uint32, ctypes.c_int]
    library.emulator_schedule.restype = None
    library.emulator_bank_conflicts.restype = ctypes.c_uint64
    return library


@contextmanager
def running(monkeypatch, library: ctypes.CDLL, device: int = HOPPER, seed: int = 0, resident: int = 1) -> Iterator[None]:
    """Within: attention on CPU tensors runs on the emulated device. `seed` and `resident` as emulator_schedule takes them."""
    packer = _Packer(native._FORWARD.format)
    packer.device = device
    with monkeypatch.context() as patch:
        patch.setattr(native, "library", lambda: library)
        patch.setattr(native, "check_device", lambda index: None)
        patch.setattr(native, "_current_stream", lambda index: 0)
        patch.setattr(native, "_FORWARD", packer)
        patch.setitem(ops._BACKENDS, "cpu", ops._BACKENDS["cuda"])
        library.emulator_schedule(seed, resident)
        yield

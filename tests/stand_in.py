"""A stand-in for libhf_flash2.so, for machines without a GPU: answers as api.cpp would and keeps the params that it is called with."""

import ctypes
import functools
import json
import re
from pathlib import Path

from hf_flash2 import kernels, native, ops

PARAMS_H = Path(__file__).resolve().parents[1] / "csrc/params.h"
MISALIGNED = -5  # kErrorMisaligned
C_TYPES = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64, "float": ctypes.c_float}


@functools.cache
def structs() -> dict[str, type[ctypes.Structure]]:
    """The structs of csrc/params.h by name, pointers as numbers."""
    types = dict(C_TYPES)
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)^\}", PARAMS_H.read_text(), re.MULTILINE | re.DOTALL):
        fields = re.findall(r"^\s*(?:const )?(\w+)\s*(\*?)\s*(\w+);", body, re.MULTILINE)
        layout = [(field, ctypes.c_uint64 if star else types[c_type]) for c_type, star, field in fields]
        types[name] = type(name, (ctypes.Structure,), {"_fields_": layout})
    return types


def with_addresses(name: str, params: bytes, addresses: bytes) -> bytes:
    """`name`Params with what `name`Addresses holds in the fields of the same names, which were null."""
    types = structs()
    filled, given = types[f"{name}Params"].from_buffer_copy(params), types[f"{name}Addresses"].from_buffer_copy(addresses)
    assert len(params) == ctypes.sizeof(filled) and len(addresses) == ctypes.sizeof(given)
    _fill(filled, given)
    return bytes(filled)


def _fill(filled: ctypes.Structure, given: ctypes.Structure) -> None:
    for name, _ in given._fields_:
        value, place = getattr(given, name), getattr(filled, name)
        if isinstance(value, ctypes.Structure):
            _fill(place, value)
        elif isinstance(place, ctypes.Structure):  # a tensor's address
            assert not place.data, name
            place.data = value
        else:
            assert not place, name
            setattr(filled, name, value)


def misaligned(params: ctypes.Structure) -> bool:
    return any(getattr(params, name).data % 16 for name in "qkv")


class Library:
    """As if for a GPU of this compute capability and built with these families."""

    WORKSPACE_BYTES = 512

    def __init__(self, families=("sm80", "sm90"), capability=90):
        self.families, self.capability, self.error = families, capability, ""
        # The params of every operation; of forward and backward, the addresses filled in as api.cpp does.
        self.calls: list[bytes] = []

    def install(self, monkeypatch) -> "Library":
        """Make it what `native` has loaded, and CPU tensors packable for it."""
        monkeypatch.setattr(ops, "plans", {})
        monkeypatch.setattr(native, "library", lambda: self)
        monkeypatch.setattr(native, "check_device", functools.cache(native.check_device.__wrapped__))
        monkeypatch.setattr(kernels, "_current_stream", lambda index: 7)
        return self

    def hf_flash2_forward(self, params: bytes, addresses: bytes) -> int:
        filled = with_addresses("HfFlash2Forward", params, addresses)
        if misaligned(structs()["HfFlash2ForwardParams"].from_buffer_copy(filled)):
            return self._fail("address", MISALIGNED)
        self.calls.append(filled)
        return 80

    def hf_flash2_forward_workspace_bytes(self, params: bytes, addresses: bytes) -> int:
        with_addresses("HfFlash2Forward", params, addresses)
        return self.WORKSPACE_BYTES

    def hf_flash2_backward(self, params: bytes, addresses: bytes) -> int:
        self.calls.append(with_addresses("HfFlash2Backward", params, addresses))
        return 80

    def hf_flash2_backward_workspace_bytes(self, params: bytes, addresses: bytes) -> int:
        filled = with_addresses("HfFlash2Backward", params, addresses)
        if misaligned(structs()["HfFlash2BackwardParams"].from_buffer_copy(filled).forward):
            return self._fail("address", MISALIGNED)
        return self.WORKSPACE_BYTES

    def hf_flash2_append(self, params: bytes) -> int:
        self.calls.append(params)
        return 0

    def hf_flash2_rotary(self, params: bytes) -> int:
        self.calls.append(params)
        return 0

    def hf_flash2_cross_entropy(self, params: bytes) -> int:
        self.calls.append(params)
        return 0

    def hf_flash2_build_info(self) -> bytes:
        return json.dumps({"families": self.families}).encode()

    def hf_flash2_check_device(self, index: int) -> int:
        return 1 if self.capability >= 80 else self._fail("the kernels need 8.0 (Ampere) or newer")

    def hf_flash2_forward_family(self, index: int, asked: int) -> int:
        hopper = self.capability == 90 and "sm90" in self.families
        if asked == 90 and not hopper:
            return self._fail("HF_FLASH2_FAMILY=sm90, but the Hopper family cannot run this")
        return 80 if asked == 80 or not hopper else 90

    def hf_flash2_last_error(self) -> bytes:
        return self.error.encode()

    def _fail(self, error: str, code: int = -3) -> int:
        self.error = error
        return code

"""native.py: what the library is asked, and what becomes of its answers. A stand-in answers for libraries and GPUs that are not here."""

import json
import re
import types
from pathlib import Path

import pytest
import torch

from hf_flash2 import native, ops

ROOT = Path(__file__).resolve().parents[1]


class StandInLibrary:
    """The questions of csrc/api.h, answered as api.cpp does for a GPU of this compute capability and a library with these families."""

    def __init__(self, families=("sm80", "sm90"), capability=90):
        self.families, self.capability, self.error = families, capability, ""

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

    def _fail(self, error: str) -> int:
        self.error = error
        return -3


@pytest.fixture
def use_library(monkeypatch):
    """use_library(library): the stand-in is what `native` has loaded."""
    monkeypatch.delenv("HF_FLASH2_FAMILY", raising=False)
    native.check_device.cache_clear()
    yield lambda library: monkeypatch.setattr(native, "library", lambda: library)
    native.check_device.cache_clear()


@pytest.mark.parametrize(
    ("families", "capability", "expected"),
    [
        (("sm80", "sm90"), 90, ["sm80", "sm90"]),
        (("sm80", "sm90"), 89, ["sm80"]),
        (("sm80", "sm90"), 100, ["sm80"]),
        (("sm80",), 90, ["sm80"]),
    ],
)
def test_families_and_expected_backend(use_library, monkeypatch, families, capability, expected):
    """What runs here by the library's word, and the best of it is what a plain call is told to expect."""
    use_library(StandInLibrary(families, capability))
    assert native.families(0) == expected
    assert ops.expected_backend(torch.device("cuda", 0)) == f"cuda-{expected[-1]}"
    for name in expected:
        monkeypatch.setenv("HF_FLASH2_FAMILY", name)
        assert ops.expected_backend(torch.device("cuda", 0)) == f"cuda-{name}"


def test_a_forced_family_that_cannot_run_is_refused_with_the_reason(use_library, monkeypatch):
    use_library(StandInLibrary(capability=80))
    monkeypatch.setenv("HF_FLASH2_FAMILY", "sm90")
    with pytest.raises(native.LibraryError, match="the Hopper family cannot run this"):
        ops.expected_backend(torch.device("cuda", 0))


def test_a_gpu_without_kernels_has_no_backend_to_expect(use_library):
    use_library(StandInLibrary(capability=75))
    with pytest.raises(native.NotAvailableError, match="need 8.0"):
        ops.expected_backend(torch.device("cuda", 0))


def test_every_function_of_the_library_is_declared():
    """ctypes takes an undeclared result for an int; a declared function that is missing makes the library one of another version."""
    declared = {}

    class Recorder:
        def __getattr__(self, name):
            return declared.setdefault(name, types.SimpleNamespace())

    native._declare(Recorder())
    exported = re.findall(r"^HF_FLASH2_API [^;]*?\b(hf_flash2_\w+)\((.*?)\);", (ROOT / "csrc/api.h").read_text(), re.MULTILINE)
    assert set(declared) == {name for name, _ in exported}
    for name, parameters in exported:
        count = 0 if parameters == "void" else len(parameters.split(","))
        assert len(getattr(declared[name], "argtypes", [])) == count, name
        assert hasattr(declared[name], "restype"), name


def test_a_library_of_another_version_is_refused(monkeypatch):
    monkeypatch.setenv("HF_FLASH2_LIBRARY", str(Path(torch.__file__).parent / "lib/libc10.so"))
    native.library.cache_clear()
    try:
        with pytest.raises(native.NotAvailableError, match="hf_flash2_forward.*rebuild it with `hf-flash2 build`"):
            native.library()
    finally:
        native.library.cache_clear()

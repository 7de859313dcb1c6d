"""native.py: what the library is asked, and what becomes of its answers. A stand-in answers for libraries and GPUs that are not here."""

import ctypes
import json
import re
import shutil
import subprocess
import types
from pathlib import Path
from unittest import mock

import pytest
import stand_in
import torch

from hf_flash2 import __version__, native, ops

ROOT = Path(__file__).resolve().parents[1]
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture
def use_library(monkeypatch):
    """use_library(families, capability): such a library on such a GPU is what `native` has loaded."""
    monkeypatch.delenv("HF_FLASH2_FAMILY", raising=False)
    return lambda **properties: stand_in.Library(**properties).install(monkeypatch)


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
    use_library(families=families, capability=capability)
    assert native.families(0) == expected
    assert ops.expected_backend(torch.device("cuda", 0)) == f"cuda-{expected[-1]}"
    for name in expected:
        monkeypatch.setenv("HF_FLASH2_FAMILY", name)
        assert ops.expected_backend(torch.device("cuda", 0)) == f"cuda-{name}"


def test_a_forced_family_that_cannot_run_is_refused_with_the_reason(use_library, monkeypatch):
    use_library(capability=80)
    monkeypatch.setenv("HF_FLASH2_FAMILY", "sm90")
    with pytest.raises(native.LibraryError, match="the Hopper family cannot run this"):
        ops.expected_backend(torch.device("cuda", 0))


def test_the_backend_to_expect_is_that_of_the_current_gpu(use_library, monkeypatch):
    """Where the device names none."""
    use_library()
    monkeypatch.setattr(native, "forward_family", lambda index, asked: {0: 80, 1: 90}[index])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    found = [ops.expected_backend(torch.device(name)) for name in ("cuda", "cuda:0", "cuda:1")]
    assert found == ["cuda-sm90", "cuda-sm80", "cuda-sm90"]


@pytest.mark.parametrize("name", ["meta", "xpu:0", "mps"])
def test_other_devices_have_no_backend_to_expect(name):
    with pytest.raises(ValueError, match=f"attention runs on cuda and cpu, got a tensor or model on {name}; use .*sdpa"):
        ops.expected_backend(torch.device(name))


def test_a_gpu_without_kernels_has_no_backend_to_expect(use_library):
    use_library(capability=75)
    with pytest.raises(native.NotAvailableError, match="need 8.0"):
        ops.expected_backend(torch.device("cuda", 0))


def test_every_function_of_the_library_is_declared():
    """ctypes takes an undeclared result for an int; a declared function that is missing makes the library one of another version."""
    declared = {}

    class Recorder:
        def __getattr__(self, name):
            return declared.setdefault(name, types.SimpleNamespace())

    native._declare(Recorder())
    exported = re.findall(r"^HF_FLASH2_API ([^;]*?) ?\b(hf_flash2_\w+)\((.*?)\);", (ROOT / "csrc/api.h").read_text(), re.MULTILINE)
    assert set(declared) == {name for _, name, _ in exported}
    for result, name, parameters in exported:
        expected = [] if parameters == "void" else [c_type(parameter) for parameter in parameters.split(",")]
        assert getattr(declared[name], "argtypes", []) == expected, name
        assert declared[name].restype is c_type(result), name


def c_type(declaration: str) -> type:
    """What ctypes has to take a parameter or a result of csrc/api.h for; structs are handed over as bytes."""
    return ctypes.c_char_p if "*" in declaration else {"int": ctypes.c_int, "int64_t": ctypes.c_int64}[declaration.split()[0]]


def test_error_codes_are_those_of_the_header():
    """Each is raised, as what it says: one that comes through would be taken for a kernel family."""
    codes = {name: int(code) for name, code in re.findall(r"\b(kError\w+) = (-\d+)", (ROOT / "csrc/params.h").read_text())}
    errors = {"kErrorArgument": ValueError, "kErrorMisaligned": native.MisalignedError}
    for name, code in codes.items():
        with pytest.raises(Exception, match="^its words$") as raised:
            native.checked(mock.Mock(hf_flash2_last_error=lambda: b"its words"), code)
        assert raised.type is errors.get(name, native.LibraryError), name
    assert codes["kErrorWorkspace"] == native.NEEDS_WORKSPACE


@pytest.fixture
def unloaded():
    """`native` has loaded no library, and forgets that of the test."""
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def test_a_library_that_lacks_a_function_is_refused(monkeypatch, unloaded):
    path = Path(torch.__file__).parent / "lib/libc10.so"
    monkeypatch.setenv("HF_FLASH2_LIBRARY", str(path))
    with pytest.raises(native.NotAvailableError, match=f"hf_flash2_forward.*rebuild it with `hf-flash2 build --output {path}`"):
        native.library()


@needs_cc
def test_a_library_is_named_by_a_relative_path_or_cut_off(monkeypatch, tmp_path, unloaded):
    """The loader looks for a name without a folder elsewhere, and it takes a file that has been cut off for whole: the process ends."""
    (tmp_path / "empty.c").write_text("int nothing[100000] = {1};")
    subprocess.run(["cc", "-shared", "-o", tmp_path / "mine.so", tmp_path / "empty.c"], check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_FLASH2_LIBRARY", "mine.so")
    with pytest.raises(native.NotAvailableError, match="mine.so cannot be loaded: .*undefined symbol: hf_flash2_forward;"):
        native.library()
    whole = Path("mine.so").read_bytes()
    monkeypatch.setenv("HF_FLASH2_LIBRARY", "cut_off.so")  # not the one that is loaded: its memory is the file's
    for size in (len(whole) // 3, len(whole) - 1):
        Path("cut_off.so").write_bytes(whole[:size])
        with pytest.raises(native.NotAvailableError, match=f"cut_off.so cannot be loaded: the file has been cut off: {size} of at least"):
            native.library()
    Path("cut_off.so").write_bytes(whole[: len(whole) // 3].ljust(len(whole), b"\0"))  # of the right size, and never written to the end
    with pytest.raises(native.NotAvailableError, match="cut_off.so cannot be loaded: the file was not written to its end, where"):
        native.library()


def test_a_file_that_is_no_library(monkeypatch, tmp_path, unloaded):
    """Nor is one for machines of 32 bits, whose header is another."""
    monkeypatch.setenv("HF_FLASH2_LIBRARY", str(tmp_path / "mine.so"))
    text = b"a text of more than sixty-four bytes, which is as many as the header of a library has\n" * 9
    for content, reason in ((text, "invalid ELF header"), (b"\x7fELF\x01\x01\x01" + text, "wrong ELF class")):
        (tmp_path / "mine.so").write_bytes(content)
        with pytest.raises(native.NotAvailableError, match=f"mine.so cannot be loaded: .*{reason}"):
            native.library()


@pytest.mark.parametrize("named", [None, ""], ids=["unset", "empty"])
def test_what_to_do_where_nothing_is_built(named, monkeypatch, tmp_path, unloaded):
    monkeypatch.delenv("HF_FLASH2_LIBRARY", raising=False)
    if named is not None:
        monkeypatch.setenv("HF_FLASH2_LIBRARY", named)
    monkeypatch.setattr(native, "__file__", str(tmp_path / "checkout/hf_flash2/native.py"))
    with pytest.raises(native.NotAvailableError, match="hf_flash2/.*not exist.*run `hf-flash2 build`, or reinstall.*--no-cache-dir"):
        native.library()
    native.library.cache_clear()
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout/setup.py").touch()
    with pytest.raises(native.NotAvailableError, match=f"run `python -m hf_flash2 build` in {tmp_path}/checkout, .*pip install -e"):
        native.library()


def test_a_library_that_an_older_install_left_behind_is_refused(monkeypatch, tmp_path, unloaded):
    """Or a newer one: pip does not know the file that `hf-flash2 build` wrote. Only where it is named is another version taken."""
    library = mock.MagicMock()
    monkeypatch.setattr(native.ctypes, "CDLL", lambda path: library)
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    monkeypatch.delenv("HF_FLASH2_LIBRARY", raising=False)
    (tmp_path / native.LIBRARY_NAME).touch()
    for other in ("999.0", "0.0.9"):
        library.hf_flash2_build_info.return_value = json.dumps({"version": other}).encode()
        with pytest.raises(native.NotAvailableError, match=f"of hf_flash2 {other}, this is hf_flash2 {__version__}; .*`hf-flash2 build`"):
            native.library()
    monkeypatch.setenv("HF_FLASH2_LIBRARY", str(tmp_path / native.LIBRARY_NAME))
    assert native.library() is library
    native.library.cache_clear()
    monkeypatch.delenv("HF_FLASH2_LIBRARY")
    library.hf_flash2_build_info.return_value = json.dumps({"version": __version__}).encode()
    assert native.library() is library


def test_a_named_library_that_is_not_there(monkeypatch, tmp_path, unloaded):
    """Not by the name of the package's own: a build would go there, and the variable would still be wrong."""
    for path, what in ((tmp_path, "is a folder"), (tmp_path / "nothing.so", "does not exist")):
        monkeypatch.setenv("HF_FLASH2_LIBRARY", str(path))
        with pytest.raises(native.NotAvailableError, match=f"^HF_FLASH2_LIBRARY: {path} {what};.*unset it"):
            native.library()


@pytest.mark.parametrize(("value", "asked"), [(None, False), ("", False), ("eager", True)])
def test_a_variable_that_is_empty_asks_for_nothing(value, asked, monkeypatch):
    monkeypatch.delenv("HF_FLASH2_LOSS", raising=False)
    if value is not None:
        monkeypatch.setenv("HF_FLASH2_LOSS", value)
    assert native.eager_asked("HF_FLASH2_LOSS") == asked

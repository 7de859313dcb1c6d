"""libhf_flash2.so through ctypes: find and load it, ask it about itself and about a device, turn its error codes into exceptions.

Standard library only, so that `hf-flash2 info` can read it where torch cannot be imported. kernels.py makes the calls.
"""

import ctypes
import functools
import json
import os
from pathlib import Path

from . import __version__

LIBRARY_NAME = "libhf_flash2.so"
FAMILIES = {"auto": 0, "sm80": 80, "sm90": 90}
NEEDS_WORKSPACE = -6  # what a forward answers that was not given the scratch it needs


class LibraryError(RuntimeError):
    """The CUDA library refused a call; the message carries its words."""


class MisalignedError(LibraryError):
    """The address of a tensor is no multiple of 16; a copy would do."""


class NotAvailableError(RuntimeError):
    """There is no usable CUDA library for this device; the message says why and what to do."""


def library_path() -> Path:
    """Where the library is looked for: HF_FLASH2_LIBRARY if set, else beside this file."""
    override = os.environ.get("HF_FLASH2_LIBRARY")
    return Path(override) if override else Path(__file__).with_name(LIBRARY_NAME)


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library. Raises NotAvailableError with the reason and the remedy."""
    path, named = library_path(), bool(os.environ.get("HF_FLASH2_LIBRARY"))
    if named and not path.is_file():
        raise NotAvailableError(
            f"HF_FLASH2_LIBRARY: {path} {'is a folder' if path.is_dir() else 'does not exist'}; name a library, such as "
            "`hf-flash2 build --output PATH` makes, or unset it to use the package's own"
        )
    if not path.is_file():
        raise NotAvailableError(f"the CUDA kernels are not built ({path} does not exist); {_how_to_build()}")
    lib = load(path, f"hf-flash2 build --output {path}" if named else "hf-flash2 build")
    version = json.loads(lib.hf_flash2_build_info())["version"]
    if version != __version__ and not named:  # `hf-flash2 build` writes a file that pip does not know: an uninstall leaves it behind
        raise NotAvailableError(f"{path} is of hf_flash2 {version}, this is hf_flash2 {__version__}; rebuild it with `hf-flash2 build`")
    return lib


def _how_to_build() -> str:
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "setup.py").is_file():
        return (
            f"run `python -m hf_flash2 build` in {checkout}, the checkout that Python takes hf_flash2 from; if it is installed, too, "
            "Python was started in the checkout, which hides it: start it in another folder, or install with `pip install -e .`"
        )
    return (
        "run `hf-flash2 build`, or reinstall hf_flash2 on a machine with a C++ compiler and without HF_FLASH2_SKIP_CUDA: "
        "`pip install --no-cache-dir --force-reinstall --no-deps` what it came from; pip may have kept the wheel that it made without"
    )


def load(path: Path, rebuild: str) -> ctypes.CDLL:
    """A library from a file. Raises NotAvailableError with the reason, and `rebuild` as the command to run."""
    try:
        _check_complete(path)
        lib = ctypes.CDLL(str(path.absolute()))  # a name without a folder would be looked for where the system has its libraries
        _declare(lib)
    except (OSError, AttributeError) as error:  # AttributeError: a library of another version lacks a function
        raise NotAvailableError(f"{path} cannot be loaded: {error}; rebuild it with `{rebuild}`") from error
    return lib


def _check_complete(path: Path) -> None:
    """Loading a library that was cut off, as by a full disk, or whose end was never written, as in a crash, would end the process. It ends
    with its section headers (ELF: e_shoff)."""
    with path.open("rb") as file:
        header = file.read(64)
        if len(header) < 64 or header[:5] != b"\x7fELF\x02":
            return  # the loader says what is wrong with it
        offset, size, count = (int.from_bytes(header[begin:end], "little") for begin, end in ((40, 48), (58, 60), (60, 62)))
        end = offset + size * count
        if path.stat().st_size < end:
            raise OSError(f"the file has been cut off: {path.stat().st_size} of at least {end} bytes are there")
        file.seek(offset)
        if not any(file.read(end - offset)):
            raise OSError("the file was not written to its end, where there are zeros alone")


def _declare(lib: ctypes.CDLL) -> None:
    """Argument and return types of csrc/api.h."""
    for name, structs in {"forward": 2, "backward": 2, "append": 1, "rotary": 1, "cross_entropy": 1}.items():
        function = getattr(lib, f"hf_flash2_{name}")
        function.argtypes = [ctypes.c_char_p] * structs
        function.restype = ctypes.c_int
    for function in (lib.hf_flash2_forward_workspace_bytes, lib.hf_flash2_backward_workspace_bytes):
        function.argtypes = [ctypes.c_char_p] * 2
        function.restype = ctypes.c_int64
    lib.hf_flash2_forward_family.argtypes = [ctypes.c_int, ctypes.c_int]
    lib.hf_flash2_forward_family.restype = ctypes.c_int
    lib.hf_flash2_check_device.argtypes = [ctypes.c_int]
    lib.hf_flash2_check_device.restype = ctypes.c_int
    lib.hf_flash2_build_info.restype = ctypes.c_char_p
    lib.hf_flash2_last_error.restype = ctypes.c_char_p


def build_info() -> dict:
    """What the library was built from and for: version, sources (a digest), toolkit, archs, head_dims, families."""
    return json.loads(library().hf_flash2_build_info())


@functools.cache
def check_device(device_index: int) -> None:
    """Raise NotAvailableError unless this CUDA device can run the library. The positive answer costs nothing the second time."""
    lib = library()
    if lib.hf_flash2_check_device(device_index) < 0:
        raise NotAvailableError(last_error(lib))


def reason_unavailable(device_index: int = 0) -> str | None:
    """Why the CUDA kernels cannot run on this device, or None when they can."""
    try:
        check_device(device_index)
    except NotAvailableError as error:
        return str(error)
    return None


# PERF: what os.environ keeps its variables in on Linux. Asking itself for a variable that is not set takes ten times as long, 0.6 us.
_ENVIRONMENT = getattr(os.environ, "_data", None)


def setting(name: str) -> str | None:
    """An environment variable as it is now."""
    if _ENVIRONMENT is not None and name.encode() not in _ENVIRONMENT:
        return None
    return os.environ.get(name)


def eager_asked(name: str) -> bool:
    """Whether an environment variable that may be "eager" or unset asks for torch's functions in place of our kernel."""
    value = setting(name)
    if value not in (None, "", "eager"):
        raise ValueError(f"{name} must be eager or unset, got {value!r}")
    return value == "eager"


def forced_family() -> int:
    """The kernel family named by HF_FLASH2_FAMILY (sm80, sm90, auto), as the library numbers it. Read at every call, for tests."""
    name = setting("HF_FLASH2_FAMILY")
    if not name:
        return FAMILIES["auto"]
    if name not in FAMILIES:
        raise ValueError(f"HF_FLASH2_FAMILY must be one of {', '.join(FAMILIES)}, got {name!r}")
    return FAMILIES[name]


def forward_family(device_index: int, asked: int = FAMILIES["auto"]) -> int:
    """The kernel family that runs a plain forward (no expanded tensors) on this CUDA device when `asked` is asked for.

    Raises NotAvailableError where nothing runs, LibraryError where `asked` does not, each with the library's reason.
    """
    check_device(device_index)
    lib = library()
    return checked(lib, lib.hf_flash2_forward_family(device_index, asked))


def families(device_index: int) -> list[str]:
    """The kernel families of the library that run on this CUDA device."""
    return [name for name in build_info()["families"] if _runs(device_index, name)]


def _runs(device_index: int, family: str) -> bool:
    try:
        forward_family(device_index, FAMILIES[family])
    except LibraryError:
        return False
    return True


_ERRORS = {-2: ValueError, -5: MisalignedError}  # HfFlash2Error of csrc/params.h


def checked(lib: ctypes.CDLL, code: int) -> int:
    """What a function of the library returned, unless that is an error code: then its message, raised."""
    if code < 0:
        raise _ERRORS.get(code, LibraryError)(last_error(lib))
    return code


def last_error(lib: ctypes.CDLL) -> str:
    """Why the last call of this thread failed, in the words of the library."""
    return lib.hf_flash2_last_error().decode()

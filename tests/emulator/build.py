"""Build the emulated library: csrc translated to plain C++, compiled by the host compiler together with the emulator.

The result has the C ABI of libhf_flash2.so (csrc/api.h) and runs on host memory. For tests only; the installed package knows nothing of it.

    python tests/emulator/build.py "*_hdim64_bf16"           prints the path of the library with these units of csrc/instantiate.py
    library = emulator.build(("*_hdim64_bf16",))             the same from Python; tests/test_emulated_kernels.py shows how to call it

Parts: translate.py (CUDA and PTX -> C++ calls) · ptx.h (what each instruction does) · machine.h (threads, barriers, shared memory, copies,
wgmma; its head says what is checked) · include/ (fake CUDA headers) · runtime.cpp (fake CUDA runtime).

A new kernel needs nothing here: the units that csrc/instantiate.py makes are compiled as they are. A new instruction needs a function of
its name in ptx.h. `emulator_schedule(seed, resident)` of the library chooses the order in which warps run and how many thread blocks are in
flight; results must not depend on it. Device 0 pretends to be a Hopper GPU, 1 an A100, 2 one with 99 KB of shared memory, each with 3
multiprocessors; 3 is a Hopper GPU with 16. Objects are kept in the build folder under the hash of what they were made from. Standard
library only.
"""

import argparse
import contextlib
import fcntl
import fnmatch
import hashlib
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEFAULT_FOLDER = ROOT / "build" / "emulator"
# Registers start as garbage (pattern); wrapping and aliasing are what CUDA code counts on.
FLAGS = [
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-fwrapv",
    "-ftrivial-auto-var-init=pattern",
    "-Wno-unknown-pragmas",
]
# As nvcc does it, a product that is added to something is not rounded before, where the host has an instruction for that.
_CPUINFO = Path("/proc/cpuinfo")
_HAS_FMA = platform.machine() == "x86_64" and _CPUINFO.exists() and " fma " in _CPUINFO.read_text()
KERNEL_FLAGS, EMULATOR_FLAGS = ("-O1", "-fexpensive-optimizations", "-ffp-contract=fast", *(["-mfma"] if _HAS_FMA else [])), ("-O3",)


class BuildError(RuntimeError):
    """The host compiler refused something; the message has its words."""


def _find_compiler():
    return _load(ROOT / "hf_flash2" / "build.py").find_host_compiler()


def reason_not_buildable() -> str | None:
    """Why there is no emulator here, or None. A CXX that cannot be found is an error."""
    if sys.platform != "linux":
        return f"the emulator is for Linux, this is {sys.platform}"
    return None if _find_compiler() else "the emulator needs a C++ compiler (CXX, g++ or clang++)"


def _compiler_command() -> list[str]:
    """What a call of the C++ compiler begins with: CXX with its launcher and flags, or g++ or clang++."""
    compiler = _find_compiler()
    if compiler is None:
        raise BuildError(reason_not_buildable())
    return [*compiler.launcher, compiler.program, *compiler.flags]


def build(units: tuple[str, ...], folder: Path = DEFAULT_FOLDER, csrc: Path = ROOT / "csrc", jobs: int | None = None) -> Path:
    """Compile the units of csrc/instantiate.py whose names match one of the patterns; returns the path of the library.

    The other units of the same head dims are there in name only: calling one is an error of the library.
    """
    instantiate = _load(csrc / "instantiate.py")
    chosen = {unit.name for unit in instantiate.units() if any(fnmatch.fnmatch(unit.name, pattern) for pattern in units)}
    if not chosen:
        raise BuildError(f"no unit of csrc/instantiate.py matches {', '.join(units)}")
    head_dims = sorted(set(map(_head_dim, chosen)))
    defines = (
        f'-DHF_FLASH2_HEAD_DIMS="{",".join(map(str, head_dims))}"',
        '-DHF_FLASH2_ARCHS="sm_80,sm_90a"',
        '-DHF_FLASH2_VERSION="emulated"',
    )
    with _lock(folder):
        general = _translate_csrc(csrc, instantiate.headers(), folder / "csrc")
        work = [(source, (*KERNEL_FLAGS, *defines)) for source in general]
        for unit in instantiate.units():
            if _head_dim(unit.name) in head_dims:
                text = unit.source if unit.name in chosen else _stub(unit.source, unit.name)
                source = _write_if_changed(folder / "units" / f"{unit.name}{'' if unit.name in chosen else '_stub'}.cpp", text)
                work.append((source, (*KERNEL_FLAGS, f"-D__CUDA_ARCH__={unit.family.removeprefix('sm')}0")))
        return _compile_all(work, folder, jobs)


def build_file(source: Path, folder: Path = DEFAULT_FOLDER, csrc: Path = ROOT / "csrc") -> Path:
    """The same for a CUDA file of its own, which may include csrc's headers; returns the path of a library with its functions."""
    with _lock(folder):
        general = _translate_csrc(csrc, _load(csrc / "instantiate.py").headers(), folder / "csrc")
        translated = _write_if_changed(folder / "units" / f"{source.stem}.cpp", _translate(source.read_text(), str(source)))
        sources = [translated, *(path for path in general if path.stem == "launch")]
        return _compile_all([(path, (*KERNEL_FLAGS, "-D__CUDA_ARCH__=900")) for path in sources], folder, None)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One build at a time in a folder, whatever number of test processes want one."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile_all(work: list[tuple[Path, tuple[str, ...]]], folder: Path, jobs: int | None) -> Path:
    """Objects of (source, flags) and of the emulator, linked to one library."""
    work = [*work, *((source, EMULATOR_FLAGS) for source in sorted(HERE.glob("*.cpp")))]
    includes = [f"-I{HERE / 'include'}", f"-I{folder / 'csrc'}"]
    with ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(lambda job: _compile(job[0], [*FLAGS, *includes, *job[1]], folder / "objects"), work))
    return _link(objects, folder)


def _translate(text: str, name: str) -> str:
    return _load(HERE / "translate.py").translate(text, name)


def _translate_csrc(csrc: Path, headers: dict[str, str], target: Path) -> list[Path]:
    """csrc and its generated headers as plain C++ under `target`; returns what has to be compiled besides the units."""
    texts = {path.relative_to(csrc): path.read_text() for path in csrc.rglob("*") if path.suffix in (".h", ".cuh", ".cu", ".cpp")}
    texts |= {Path(name): text for name, text in headers.items()}
    sources = []
    for path, text in texts.items():
        compiled = path.suffix in (".cu", ".cpp")
        written = _write_if_changed(target / (path.with_suffix(".cpp") if compiled else path), _translate(text, f"csrc/{path}"))
        if compiled:
            sources.append(written)
    return sorted(sources)


def _stub(source: str, name: str) -> str:
    """A unit whose functions exist but refuse to run."""
    message = f'throw LaunchError(kErrorUnsupported, "{name} is not part of this emulated library");'
    return '#include "errors.h"\n' + re.sub(
        r"^template (?P<function>.*);$", rf"template <> \g<function> {{ {message} }}", source, flags=re.M
    )


def _compile(source: Path, flags: list[str], objects: Path) -> Path:
    """The object of a source, from an earlier build if its preprocessed text and flags are the same."""
    command = [*_compiler_command(), *flags]
    text = _run([*command, "-E", str(source)])
    digest = hashlib.sha256("\0".join([*command, text]).encode()).hexdigest()[:16]
    target = objects / f"{source.stem}-{digest}.o"
    if not target.is_file():
        objects.mkdir(parents=True, exist_ok=True)
        staged = target.with_suffix(f".{os.getpid()}")
        _run([*command, "-c", str(source), "-o", str(staged)])
        staged.replace(target)
    return target


def _link(objects: list[Path], folder: Path) -> Path:
    digest = hashlib.sha256("\0".join(map(str, objects)).encode()).hexdigest()[:16]
    target = folder / f"libhf_flash2_emulated-{digest}.so"
    if not target.is_file():
        staged = target.with_suffix(f".{os.getpid()}")
        _run([*_compiler_command(), "-shared", "-Wl,-z,defs", *map(str, objects), "-o", str(staged)])
        staged.replace(target)
    return target


def _run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise BuildError(f"{' '.join(command)}\n{result.stderr[-4000:]}")
    return result.stdout


def _head_dim(unit_name: str) -> int:
    return int(re.search(r"hdim(\d+)", unit_name)[1])


def _write_if_changed(path: Path, text: str) -> Path:
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return path


def _load(path: Path):
    name = f"hf_flash2_emulator_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the emulated library.")
    parser.add_argument("units", nargs="+", help='patterns of unit names, e.g. "*_hdim64_bf16"')
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--csrc", type=Path, default=ROOT / "csrc")
    parser.add_argument("--jobs", type=int)
    arguments = parser.parse_args()
    print(build(tuple(arguments.units), arguments.folder, arguments.csrc, arguments.jobs))

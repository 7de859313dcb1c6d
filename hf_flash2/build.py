"""Build libhf_flash2.so: find nvcc, write build.ninja, run it, show progress, judge what ptxas said.

Standard library only: setup.py loads this file by path (no torch there yet), `hf-flash2 build` imports it, and
`python hf_flash2/build.py --strict` runs it alone.

Environment:
    HF_FLASH2_NVCC        this nvcc and no other
    CUDA_HOME             the toolkit to use; else the nvidia-cuda-nvcc package of this Python, else nvcc on PATH, else /usr/local/cuda
    CXX                   host C++ compiler, with flags if need be ("g++ -m64"); else g++, clang++ or c++ on PATH
    HF_FLASH2_ARCHS       architectures, e.g. "90" or "80;90+PTX;90a" (the default): machine code for sm_NN, +PTX for newer GPUs as well
    HF_FLASH2_HEAD_DIMS   kernels of these head dims only, e.g. "64,128", for a quick development build
    HF_FLASH2_SKIP_CUDA   1: install without CUDA kernels
    MAX_JOBS              compile jobs at once; else from the cores and the free memory
"""

import argparse
import contextlib
import fcntl
import fnmatch
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

LIBRARY_NAME = "libhf_flash2.so"
DEFAULT_ARCHS = "80;90+PTX;90a"  # sm_80 code runs on every 8.x GPU but not on 9.0; the PTX serves everything newer
MIN_TOOLKIT = (12, 5)  # cudaGetDriverEntryPointByVersion
CGROUPS = Path("/sys/fs/cgroup")
GIB = 1 << 30
BYTES_PER_JOB = 2 * GIB
COMMON_FLAGS = ["-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-Xptxas", "-v"]
# Of host code; that for the GPU is the same with any. PERF: kernels' files, which only launch them, take the host compiler 1.1 s, or 0.7.
HOST_OPTIMISATION = {".cpp": "-O3", ".cu": "-O1"}
# ptxas gave up on something a kernel counts on. C7508: setmaxnreg ignored; C7510 to C7515: wgmma serialised.
PTXAS_MESSAGES = ("C7508", "C7510", "C7511", "C7512", "C7513", "C7514", "C7515")

Say = Callable[[str], None]


def printable(line: str) -> str:
    """As standard output can show it, where names of files may be of any bytes."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return line.encode(encoding, "backslashreplace").decode(encoding)


def _say(line: str) -> None:
    print(printable(line), flush=True)


class BuildError(RuntimeError):
    """The library cannot be built; the message is complete: what failed, its last lines, what to do."""


class UsageError(BuildError):
    """An option or its variable has a value that cannot be."""


class UnusableToolkit(BuildError):
    """An nvcc that will not do: why, and what to do about it where somebody has named it."""

    def __init__(self, why: str, remedy: str):
        super().__init__(f"hf_flash2: {why}; {remedy}")
        self.why = why


# ---- What to build with ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Toolkit:
    """A CUDA compiler. `root` holds bin/nvcc, include/ and lib or lib64; `found` says how it was found."""

    root: Path
    version: str  # e.g. 13.0.88
    found: str


def find_toolkit(unusable: list[UnusableToolkit] | None = None) -> Toolkit | None:
    """The CUDA compiler to use, or None when there is none. Raises UnusableToolkit for one that was named but will not do.

    One that will not do and that nobody has named is passed over; `unusable` collects those.
    """
    named = os.environ.get("HF_FLASH2_NVCC")
    if named:
        return _inspect(Path(named), "HF_FLASH2_NVCC")
    home = os.environ.get("CUDA_HOME")
    if home and (Path(home) / "bin" / "nvcc").is_file():
        return _inspect(Path(home) / "bin" / "nvcc", "CUDA_HOME")
    passed_over = f"; CUDA_HOME={home} has no bin/nvcc" if home else ""  # a runtime-only install, or a slip
    on_path = shutil.which("nvcc")
    candidates = [(Path(entry) / "nvidia" / "cu13" / "bin" / "nvcc", "the nvidia-cuda-nvcc package") for entry in sys.path if entry]
    candidates += [(Path(on_path), "PATH")] if on_path else []
    candidates += [(Path("/usr/local/cuda/bin/nvcc"), "/usr/local/cuda")]
    for nvcc, found in candidates:
        if nvcc.is_file():
            try:
                return _inspect(nvcc, found + passed_over)
            except UnusableToolkit as error:
                if unusable is not None:
                    unusable.append(error)
    return None


def _inspect(nvcc: Path, found: str) -> Toolkit:
    try:
        answers = {"capture_output": True, "text": True, "errors": "surrogateescape"}  # PATH, which it says, may be in any encoding
        version = subprocess.run([nvcc, "--version"], check=True, **answers).stdout
        # nvcc may be a wrapper script or a link: only it knows where it lives.
        dryrun = subprocess.run([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], **answers).stderr
    except (OSError, subprocess.CalledProcessError) as error:
        raise UnusableToolkit(f"{found} names {nvcc}, which does not run: {error}", "point it at a working nvcc or unset it") from error
    number = re.search(r"\bV(\d+\.\d+\.\d+)", version)
    here = re.search(r"_HERE_=(.+)", dryrun)
    if not number or not here:
        raise UnusableToolkit(f"{found} names {nvcc}, which does not answer like nvcc", "point it at a working nvcc or unset it")
    if _version_tuple(number[1]) < MIN_TOOLKIT:
        wanted = ".".join(map(str, MIN_TOOLKIT))
        raise UnusableToolkit(
            f"CUDA toolkit must be at least {wanted}, got {number[1]} from {found} ({nvcc})",
            "name a newer one there or unset it: then the nvidia-cuda-nvcc package is used",
        )
    return Toolkit(Path(here[1].strip()).parent.resolve(), number[1], found)


def _version_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


@dataclass(frozen=True)
class HostCompiler:
    """The C++ compiler that nvcc calls, with flags for each of its calls. `launcher` stood before it in CXX."""

    program: str
    flags: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()

    @property
    def nvcc_flags(self) -> list[str]:
        """-ccbin takes a program and nothing else; -Xcompiler splits at commas, and nvcc hands the rest to a shell."""
        return ["-ccbin", self.program, *(part for flag in self.flags for part in ("-Xcompiler", shlex.quote(flag).replace(",", r"\,")))]


def find_host_compiler() -> HostCompiler | None:
    """CXX, else the first of g++, clang++ and c++ on PATH; None when there is none. A CXX that cannot be found raises BuildError."""
    named = os.environ.get("CXX", "")
    if not named.strip():
        program = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
        return HostCompiler(program) if program else None
    try:
        words = shlex.split(named)
    except ValueError as error:
        raise BuildError(f"hf_flash2: CXX is {named!r}, which cannot be read: {error}; name a C++ compiler or unset it") from error
    count = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))  # of programs; flags are behind them
    program = shutil.which(words[count - 1]) if count else None
    if not program:
        raise BuildError(f"hf_flash2: CXX is {named!r}, but there is no such program; name a C++ compiler that is there or unset it")
    return HostCompiler(program, tuple(words[count:]), tuple(words[: count - 1]))


def find_ninja() -> str | None:
    """The ninja executable: of the ninja package that this Python imports, of its scripts folder (a virtual environment need not be
    activated), or on PATH.

    NOTE: in pip's isolated builds the scripts folder is the user's. What a ninja package before 1.13 has put there imports ninja: that of
    the build, which runs what lies in the scripts folder, itself, and so on without end.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("ninja") or ():
            if file.name == "ninja" and (own := shutil.which(str(file.locate()))):
                return own
    return shutil.which("ninja", path=sysconfig.get_path("scripts")) or shutil.which("ninja")


def reason_not_buildable() -> str | None:
    """Why the CUDA library cannot be built here, as one line that ends with what to do; None when it can."""
    if os.environ.get("HF_FLASH2_SKIP_CUDA", "0").lower() not in ("", "0", "no", "false", "off"):
        return "HF_FLASH2_SKIP_CUDA is set; unset it and run `hf-flash2 build` to get them"
    if sys.platform != "linux":
        return f"the CUDA library is built on Linux only, this is {sys.platform}"
    if not find_host_compiler():
        return "there is no C++ compiler (CXX, g++, clang++); install one, e.g. `apt-get install g++`, and run `hf-flash2 build`"
    unusable: list[UnusableToolkit] = []
    if not find_toolkit(unusable):
        places = "(HF_FLASH2_NVCC, CUDA_HOME, the nvidia-cuda-nvcc package, PATH)"
        none = f"there is no nvcc that will do: {unusable[0].why}" if unusable else f"there is no nvcc {places}"
        return f"{none}; `pip install 'hf_flash2[build]'`, then `hf-flash2 build`"
    if not find_ninja():
        return "there is no ninja; `pip install ninja`, then `hf-flash2 build`"
    return None


# ---- What to build for -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arch:
    """One entry of HF_FLASH2_ARCHS: machine code for sm_<name> and, with ptx, PTX for everything newer."""

    name: str  # "80", "90a"
    ptx: bool = False

    @property
    def family(self) -> str:
        """The kernels it is for: sm90 (wgmma, needs the 'a' target) or sm80 (mma.sync, every GPU)."""
        return "sm90" if self.name.endswith("a") else "sm80"

    @property
    def targets(self) -> list[str]:
        return [f"sm_{self.name}"] + ([f"compute_{self.name}"] if self.ptx else [])

    @property
    def flags(self) -> list[str]:
        return ["-gencode", f"arch=compute_{self.name},code=[{','.join(self.targets)}]"]


def parse_archs(text: str) -> list[Arch]:
    """ "80;90+PTX;90a" as data; separators are ; , and blanks."""
    archs = []
    for entry in filter(None, re.split(r"[;,\s]+", text)):
        match = re.fullmatch(r"(\d{2,3})(a?)(\+PTX)?", entry)
        if not match or int(match[1]) < 80 or (match[2] and match[1] != "90") or (match[2] and match[3]):
            raise UsageError(
                f"hf_flash2: HF_FLASH2_ARCHS or --archs must list compute capabilities from 80 on, 90+PTX for PTX as well, 90a for the "
                f"Hopper kernels; got {entry!r} in {text!r}. The default is {DEFAULT_ARCHS!r}"
            )
        archs.append(Arch(match[1] + match[2], bool(match[3])))
    if not archs:
        raise UsageError(f"hf_flash2: HF_FLASH2_ARCHS or --archs names no architecture, got {text!r}. The default is {DEFAULT_ARCHS!r}")
    return archs


def parse_head_dims(text: str, known: tuple[int, ...]) -> tuple[int, ...]:
    """ "64,128" as data, checked against the head dims there are kernels for; an empty text means all of them."""
    entries = list(filter(None, re.split(r"[;,\s]+", text)))
    unknown = [entry for entry in entries if entry not in map(str, known)]
    if unknown or (text and not entries):
        raise UsageError(
            f"hf_flash2: HF_FLASH2_HEAD_DIMS or --head-dims must be among {', '.join(map(str, known))}; "
            f"got {', '.join(unknown) or repr(text)}"
        )
    return tuple(sorted(set(map(int, entries)))) or known


# ---- How many jobs -----------------------------------------------------------------------------------------------------------------


def choose_jobs() -> tuple[int, str]:
    """(compile jobs at once, the reason): MAX_JOBS, else as many as there are cores and 2 GiB of free memory for."""
    named = os.environ.get("MAX_JOBS")
    if named:
        if not named.isdecimal() or int(named) < 1:
            raise UsageError(f"hf_flash2: MAX_JOBS must be a positive number, got {named!r}")
        return int(named), "MAX_JOBS"
    cores, memory_bytes = usable_cores(), free_memory_bytes()
    jobs = max(1, min(cores, memory_bytes * 8 // 10 // BYTES_PER_JOB))
    return jobs, f"{cores} cores, {memory_bytes / GIB:.0f} GiB free"


def usable_cores() -> int:
    """Cores this process may use: its affinity, cut down to the CPU quotas of its control groups."""
    cores = len(os.sched_getaffinity(0))
    for folder in _cgroup_folders("cpu"):
        quota = _text(folder / "cpu.max") or f"{_text(folder / 'cpu.cfs_quota_us')} {_text(folder / 'cpu.cfs_period_us')}"
        if match := re.fullmatch(r"(\d+) (\d+)", quota):
            cores = min(cores, -(-int(match[1]) // int(match[2])))
    return max(1, cores)


def free_memory_bytes() -> int:
    """Memory that can be had without swapping: what the machine has available, cut down to the limits of the control groups."""
    available = int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
    names = (("memory.max", "memory.current", "inactive_file"), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
    for folder in _cgroup_folders("memory"):
        for limit_name, usage_name, cache_name in names:
            limit, usage = _text(folder / limit_name), _text(folder / usage_name)
            cache = re.search(rf"^{cache_name} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)  # of files, which gives way
            if limit.isdecimal() and usage.isdecimal():
                available = min(available, int(limit) - int(usage) + (int(cache[1]) if cache else 0))
    return max(0, available)


def _cgroup_folders(controller: str) -> list[Path]:
    """Those of this process's control group, version 2 or 1, and of all above it, which may have the limit."""
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            base = CGROUPS / (controller if controllers else "")  # in a container, the group's own folder
            own = base / path.strip("/")
            folders = [folder for folder in (own, *own.parents) if folder.is_relative_to(base)]
            if any((folder / f"{controller}.stat").is_file() for folder in folders):
                return folders
    return []


def _text(path: Path) -> str:
    """What a file holds; nothing where there is none."""
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


# ---- What ptxas said ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelReport:
    """ptxas's words on one kernel for one architecture. `name` is unit:arch:kernel, what the patterns of spills.json match."""

    name: str
    spill_bytes: int
    messages: tuple[str, ...] = ()


def parse_ptxas(unit: str, text: str) -> list[KernelReport]:
    """The kernels that `-Xptxas -v` printed for one compilation unit, with their spills and performance messages."""
    reports: list[KernelReport] = []
    arch, kernel, messages = "", "", []
    for line in text.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)' for '(\w+)'", line):
            kernel, arch = match[1], match[2]
        elif match := re.search(r"Function properties for (\S+)", line):
            kernel = match[1]
        elif any(message in line for message in PTXAS_MESSAGES):
            messages.append(line.strip())
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            reports.append(KernelReport(f"{unit}:{arch}:{kernel}", max(int(match[1]), int(match[2])), tuple(messages)))
            messages = []
    if messages:  # said after the last kernel, or where the format has changed: lost by no means
        reports.append(KernelReport(f"{unit}:{arch}:{kernel}", 0, tuple(messages)))
    return reports


def judge(reports: list[KernelReport], allowed: dict[str, dict], whole: bool = True) -> list[str]:
    """What must not be there: performance messages, spills above their allowance, allowances no kernel needs any more.

    `allowed` is csrc/spills.json: {pattern over unit:arch:kernel: {"bytes": most spilled bytes, "reason": why that is right}}. Not `whole`:
    there may be other architectures, which need some.
    """
    problems = []
    for report in reports:
        problems += [f"{report.name}: {message}" for message in report.messages]
        limit = max((entry["bytes"] for pattern, entry in allowed.items() if fnmatch.fnmatchcase(report.name, pattern)), default=0)
        if report.spill_bytes > limit:
            problems.append(f"{report.name}: spills {report.spill_bytes} bytes of registers, allowed are {limit} (csrc/spills.json)")
    for pattern, entry in allowed.items():
        if not entry.get("reason"):
            problems.append(f"csrc/spills.json: {pattern}: must give a reason")
        matched = [report for report in reports if fnmatch.fnmatchcase(report.name, pattern)]
        if whole and matched and not any(report.spill_bytes for report in matched):
            problems.append(f"csrc/spills.json: {pattern}: nothing spills there any more; remove the line")
    return problems


# ---- The build ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One object file."""

    source: Path
    label: str
    archs: tuple[Arch, ...]
    defines: tuple[str, ...] = ()
    same_ptx: bool = False  # nothing in it asks for the architecture

    @property
    def name(self) -> str:
        return self.source.stem

    @property
    def arch_flags(self) -> list[str]:
        """PERF: half the work of the compiler in front of ptxas, where architectures have the same PTX, which that of the oldest is then.
        From 10.0 on nvcc 13 has another compiler for it."""
        sharing = [arch for arch in self.archs if self.same_ptx and int(arch.name) < 100]
        flags = [flag for arch in self.archs if arch not in sharing for flag in arch.flags]
        if sharing:
            oldest = min(sharing, key=lambda arch: int(arch.name))
            targets = [f"sm_{arch.name}" for arch in sharing]
            if any(arch.ptx for arch in sharing):
                targets.append(f"compute_{oldest.name}")
            flags = ["-gencode", f"arch=compute_{oldest.name},code=[{','.join(targets)}]", *flags]
        return flags


def source_folder() -> Path:
    """csrc/: inside the installed package, or beside it in a checkout."""
    installed = Path(__file__).resolve().with_name("csrc")
    return installed if installed.is_dir() else installed.parents[1] / "csrc"


def digest_of_sources(csrc: Path) -> str:
    """What a library says it was built from."""
    digest = hashlib.sha256()
    for path in sorted(path for path in csrc.rglob("*") if path.suffix in (".cpp", ".cu", ".cuh", ".h", ".py")):
        digest.update(f"{path.relative_to(csrc)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def default_build_folder(csrc: Path) -> Path:
    """build/kernels of the checkout that csrc belongs to, else a folder in the user's cache."""
    if (csrc.parent / "pyproject.toml").is_file():
        return csrc.parent / "build" / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_flash2" / "build"


def _usable_folder(csrc: Path, named: Path | None) -> Path:
    """The build folder, made where it was not there."""
    try:
        folder = (named or default_build_folder(csrc)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lock").touch()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        raise BuildError(
            f"hf_flash2: the build folder cannot be used: {error}; name one that can be written with `hf-flash2 build --build-folder PATH` "
            "or XDG_CACHE_HOME"
        ) from error
    return folder


def build(
    *,
    csrc: Path | None = None,
    build_folder: Path | None = None,
    output: Path | None = None,
    archs: str | None = None,
    head_dims: str | None = None,
    strict: bool = False,
    say: Say = _say,
) -> Path:
    """Compile what has changed and put the library at `output` (default: beside this file). Returns that path.

    archs and head_dims are written as in HF_FLASH2_ARCHS and HF_FLASH2_HEAD_DIMS, which they default to. With `strict`, register spills
    that csrc/spills.json does not allow and ptxas's performance messages are errors; otherwise they are reported only.
    """
    started = time.monotonic()
    csrc = (csrc or source_folder()).resolve()
    if not (csrc / "instantiate.py").is_file():
        raise UsageError(f"hf_flash2: --csrc must be a folder of kernel sources with their instantiate.py, got {csrc}")
    archs_wanted = parse_archs(archs or os.environ.get("HF_FLASH2_ARCHS") or DEFAULT_ARCHS)
    reason = reason_not_buildable()
    if reason:
        raise BuildError(f"hf_flash2: the CUDA kernels cannot be built here: {reason}")
    toolkit, compiler = find_toolkit(), find_host_compiler()
    if compiler.launcher:
        say(f"hf_flash2: CXX names {shlex.join(compiler.launcher)} before the compiler, which is left out: nvcc calls the compiler itself")
    folder = _usable_folder(csrc, build_folder)
    output = (output or Path(__file__).with_name(LIBRARY_NAME)).resolve()
    if output.is_dir():
        raise UsageError(f"hf_flash2: --output must name a file, got the folder {output}; for example {output / LIBRARY_NAME}")
    if output.exists() and not output.is_file():  # /dev/null, which root could replace
        raise UsageError(f"hf_flash2: --output must name a file, got the device {output}")
    jobs_at_once, jobs_reason = choose_jobs()
    with _lock(folder, say) as lock:
        jobs = _plan(csrc, folder, toolkit, archs_wanted, head_dims or os.environ.get("HF_FLASH2_HEAD_DIMS", ""))
        _write_ninja(folder, csrc, toolkit, compiler, jobs)
        targets = " ".join(sorted({target for job in jobs for arch in job.archs for target in arch.targets}))
        say(
            f"hf_flash2: building {len(jobs)} objects for {targets} with nvcc {toolkit.version} ({toolkit.found}), "
            f"{jobs_at_once} at once ({jobs_reason})"
        )
        _run_ninja(folder, jobs_at_once, lock, say)
        reports = [report for job in jobs for report in parse_ptxas(job.name, _log(folder, job.name).read_text(errors="replace"))]
        allowed_file = csrc / "spills.json"
        allowed = json.loads(allowed_file.read_text()) if allowed_file.is_file() else {}
        problems = judge(reports, allowed, whole=archs_wanted == parse_archs(DEFAULT_ARCHS))
        _install(folder / LIBRARY_NAME, output)
    if problems and strict:
        raise BuildError("hf_flash2: the kernels compile, but not as they should:\n  " + "\n  ".join(problems))
    if problems:
        say(f"hf_flash2: findings on the machine code, such as register spills: {len(problems)} (--strict lists them)")
    peak_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    say(
        f"hf_flash2: built {output} ({output.stat().st_size / 1e6:.1f} MB) in {time.monotonic() - started:.0f} s, "
        f"largest compiler process {peak_bytes / GIB:.2f} GiB"
    )
    return output


def _plan(csrc: Path, folder: Path, toolkit: Toolkit, archs: list[Arch], head_dims_text: str) -> list[Job]:
    """Every object to compile: the generated files of kernels, then the sources that lie in csrc itself."""
    instantiate = _load_by_path("hf_flash2_instantiate", csrc / "instantiate.py")
    head_dims = parse_head_dims(head_dims_text, instantiate.HEAD_DIMS)
    of_family = {family: tuple(arch for arch in archs if arch.family == family) for family in ("sm80", "sm90")}
    for name, text in instantiate.headers().items():
        _write_if_changed(folder / "generated" / name, text)
    jobs = []
    for file in instantiate.files(head_dims):
        if of_family[file.family]:
            source = folder / "files" / f"{file.name}.cu"
            _write_if_changed(source, file.source)
            jobs.append(Job(source, file.label, of_family[file.family], same_ptx=file.same_ptx))
    if not jobs:
        raise UsageError(f"hf_flash2: there are no kernels for {', '.join(arch.name for arch in archs)}; use the default {DEFAULT_ARCHS!r}")
    if not of_family["sm80"]:
        raise UsageError("hf_flash2: 90a names the Hopper kernels alone, which leave expanded tensors and more to the others; use '90;90a'")
    built = [target for arch in archs if any(arch in job.archs for job in jobs) for target in arch.targets]
    defines = (
        f'HF_FLASH2_VERSION="{package_version()}"',
        f'HF_FLASH2_ARCHS="{",".join(built)}"',
        f'HF_FLASH2_HEAD_DIMS="{",".join(map(str, head_dims))}"',
    )
    for source in sorted([*csrc.glob("*.cpp"), *csrc.glob("*.cu")]):
        if source.suffix == ".cu":
            jobs.append(Job(source, source.stem, of_family["sm80"], defines))
        else:
            jobs.append(Job(source, source.stem, (), (*defines, f'HF_FLASH2_SOURCES="{digest_of_sources(csrc)}"')))
    return jobs


def _write_ninja(folder: Path, csrc: Path, toolkit: Toolkit, compiler: HostCompiler, jobs: list[Job]) -> None:
    # The commands name the toolkit by a link in the build folder, and its headers as system headers (absent from the depfiles): pip unpacks
    # nvcc into a new temporary folder every time, which must not make every object stale. Its version is part of every command instead.
    link = folder / "toolkit"
    link.unlink(missing_ok=True)
    link.symlink_to(toolkit.root)
    # The sources by a link, too, and all paths from the build folder on: nvcc splits paths at commas and hands them to a shell unquoted.
    # The link is named after the folder, as the same names in another one are other sources.
    sources = folder / f"csrc-{hashlib.sha256(os.fsencode(csrc)).hexdigest()[:8]}"
    sources.unlink(missing_ok=True)
    sources.symlink_to(csrc)
    nvcc = ["toolkit/bin/nvcc", *compiler.nvcc_flags]
    includes = [flag for path in ("include", "include/cccl") if (toolkit.root / path).is_dir() for flag in ("-isystem", f"toolkit/{path}")]
    libraries = [f"-Ltoolkit/{path}" for path in ("lib64", "lib") if (toolkit.root / path).is_dir()]
    compile_flags = [*nvcc, *COMMON_FLAGS, *includes, "-I", sources.name, "-I", "generated", f'-DHF_FLASH2_TOOLKIT="{toolkit.version}"']
    # --exclude-libs hides the static CUDA runtime from the one that torch loads; -z defs finds a missing kernel now and not at load time.
    link_flags = [*nvcc, "-shared", "-cudart", "static", *libraries, "-Xlinker", "--exclude-libs=ALL,-z,defs,-s"]
    lines = [
        "# Written by hf_flash2/build.py.",
        "rule compile",
        f"  command = {_ninja(shlex.join(compile_flags))} $flags -MMD -MF $out.d -c $in -o $out > $out.log 2>&1 "
        "|| { cat $out.log; false; }",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = $label",
        "rule link",
        f"  command = {_ninja(shlex.join(link_flags))} $in -o $out",
        f"  description = link {LIBRARY_NAME}",
    ]

    def inside(source: Path) -> Path:
        return Path(sources.name) / source.relative_to(csrc) if source.is_relative_to(csrc) else source.relative_to(folder)

    for job in jobs:
        flags = [HOST_OPTIMISATION[job.source.suffix], *job.arch_flags]
        flags += [f"-D{define}" for define in job.defines]
        targets = " ".join(target for arch in job.archs for target in arch.targets)
        lines += [
            f"build {_object(job.name)} | {_object(job.name)}.log: compile {_ninja_path(inside(job.source))}",
            f"  flags = {_ninja(shlex.join(flags))}",
            f"  label = {job.label} {targets}".rstrip(),
        ]
    lines.append(f"build {LIBRARY_NAME}: link {' '.join(_object(job.name) for job in jobs)}")
    (folder / "build.ninja").write_text("\n".join(lines) + "\n", errors="surrogateescape")


def _object(name: str) -> str:
    return f"objects/{name}.o"


def _log(folder: Path, name: str) -> Path:
    return folder / f"{_object(name)}.log"


def _ninja(text: str) -> str:
    return text.replace("$", "$$")


def _ninja_path(path: Path) -> str:
    return re.sub(r"([ :$])", r"$\1", str(path))


def _run_ninja(folder: Path, jobs: int, lock: int, say: Say) -> None:
    """Run ninja, pass its progress lines on, and turn a failed command into a BuildError that shows its last lines.

    Ninja and the compilers inherit the file descriptor `lock`: it is held until the last of them has ended, however this process ends.
    """
    command = [find_ninja(), "-C", str(folder), "-j", str(jobs)]
    environment = os.environ | {"NINJA_STATUS": "[%f/%t] "}
    failure: list[str] = []
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment, pass_fds=(lock,)
        )
    except OSError as error:  # such as a script of a Python that is gone
        raise BuildError(f"hf_flash2: {command[0]} does not run: {error.strerror}; `pip install --force-reinstall ninja`") from error
    with process as ninja:
        try:
            for line in map(str.rstrip, ninja.stdout):
                if re.match(r"\[\d+/\d+\] ", line):
                    say(line)
                elif not line.startswith("ninja: Entering directory"):
                    failure.append(line)
        except BaseException:  # an interrupt, or whatever `say` raises
            ninja.terminate()  # ends its compilers, too
            raise
    if ninja.returncode:
        raise BuildError(_failure_report(failure, folder))


def _failure_report(lines: list[str], folder: Path) -> str:
    text = "\n".join(lines)
    hint = next(
        (hint for pattern, hint in HINTS if re.search(pattern, text)), "the whole output lies in the .log files of the build folder"
    )
    shown = [line if len(line) < 2000 else line[:2000] + " …" for line in lines[-25:]]
    command = lines[1] if lines and lines[0].startswith("FAILED") and len(lines) > 26 else ""
    return "\n".join(
        ["hf_flash2: compiling the CUDA kernels failed", *filter(None, [command]), *(f"  | {line}" for line in shown), f"hint: {hint}",
         f"build folder: {folder}; `HF_FLASH2_SKIP_CUDA=1 pip install .` installs without the kernels"]
    )  # fmt: skip


HINTS = (
    (r"unsupported (GNU|clang) version", "this host compiler is too new for nvcc; set CXX to an older one, e.g. CXX=g++-13"),
    (r"Killed|signal 9|[Oo]ut of memory|Cannot allocate", "the machine ran out of memory; compile fewer at once with MAX_JOBS=1"),
    (r"No space left on device", "the disk is full; free some space, or set TMPDIR to a folder on another disk"),
    (
        r"Unsupported gpu architecture|is not defined for option 'gpu-",
        "this toolkit does not know one of the architectures; set HF_FLASH2_ARCHS",
    ),
    (r"cannot find -lcudart|cannot find -lcudadevrt", "the static CUDA runtime is missing; `pip install nvidia-cuda-runtime==13.0.*`"),
    (r"cicc: (not found|No such file)", "nvcc is incomplete; `pip install nvidia-nvvm==13.0.*`"),
    (
        r"fatal error: (crt/|cuda|nv/|cub/|thrust/)",
        "CUDA headers are missing; `pip install nvidia-cuda-crt==13.0.* nvidia-cuda-cccl==13.0.*`",
    ),
    (r"undefined (symbol|reference).*hf_flash2", "csrc/dispatch.h calls a kernel that csrc/instantiate.py does not make"),
)


@contextlib.contextmanager
def _lock(folder: Path, say: Say) -> Iterator[int]:
    """One build at a time in a folder. The system drops the lock when its holders have died, however they die."""
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"hf_flash2: waiting for another build in {folder}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


def _install(library: Path, output: Path) -> None:
    """Copy in one step: a process that has the old library loaded keeps the old file."""
    staged = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, staged)
        os.replace(staged, output)
    except OSError as error:
        with contextlib.suppress(OSError):
            staged.unlink(missing_ok=True)
        raise BuildError(
            f"hf_flash2: {output} cannot be written: {error}; use `hf-flash2 build --output PATH` and set HF_FLASH2_LIBRARY=PATH"
        ) from error


def _write_if_changed(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _load_by_path(name: str, path: Path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def package_version() -> str:
    """hf_flash2.__version__, read without importing the package (which imports torch)."""
    return re.search(r'^__version__ = "(.+)"', Path(__file__).with_name("__init__.py").read_text(), re.MULTILINE)[1]


# ---- Command line ------------------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hf-flash2 build`."""
    parser.add_argument("--archs", type=_not_empty, help=f"as HF_FLASH2_ARCHS (default {DEFAULT_ARCHS})")
    parser.add_argument("--head-dims", type=_not_empty, help="as HF_FLASH2_HEAD_DIMS (default: all)")
    parser.add_argument(
        "--strict", action="store_true", help="fail on register spills not listed in csrc/spills.json and on serialised wgmma"
    )
    parser.add_argument("--if-possible", action="store_true", help="say so and succeed where there is no compiler")
    parser.add_argument("--csrc", type=_path, help="sources (default: those of the package)")
    parser.add_argument("--build-folder", type=_path, help="objects and logs (default: build/kernels, or the user's cache)")
    parser.add_argument("--output", type=_path, help=f"the library (default: {LIBRARY_NAME} in the package)")


def _not_empty(text: str) -> str:
    """As of a shell variable that is not set: it would be the default, or for a path the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty; leave the option out for the default")
    return text


def _path(text: str) -> Path:
    return Path(_not_empty(text))


def run(args: argparse.Namespace) -> int:
    """`hf-flash2 build`: 0 when the library was built, else the reason on stderr and 2 for an option that cannot be, 1 for all else."""
    try:
        reason = reason_not_buildable() if args.if_possible else None
        if reason:
            _say(f"hf_flash2: the CUDA kernels are not built: {reason}")
            return 0
        options = ("csrc", "build_folder", "output", "archs", "head_dims", "strict")
        build(**{option: getattr(args, option) for option in options})
    except BuildError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print("hf_flash2: interrupted; what has been compiled is kept for the next build", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description="Build the CUDA library of hf_flash2.")
    add_arguments(arguments)
    sys.exit(run(arguments.parse_args()))

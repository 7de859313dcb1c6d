"""`hf-flash2 info`: versions, GPUs, the CUDA library, which backend runs for which case and why no better one, state of the registration.

Never fails, on any machine: a section that cannot be read says so in its place, and without torch the rest is there.
"""

import argparse
import ctypes
import importlib.metadata
import json
import os
import platform
import sys
import warnings
from collections.abc import Callable, Collection
from typing import Any

from . import build, native, torch_problem

if torch_problem is None:
    import torch

    from . import support

NO_TORCH = "torch cannot be imported"
PACKAGES = ("torch", "transformers", "peft", "accelerate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hf-flash2 info`."""
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    """Print the report. Always 0, but for cli.py where nobody reads it."""
    report = collect()
    text = json.dumps(report, indent=2) if args.json else render(report)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # stdout may be closed
    print(text.encode(encoding, "backslashreplace").decode(encoding))  # a path need not be text
    return 0


def collect() -> dict[str, Any]:
    """The whole report as plain data. A section that fails is {"error": its message}."""
    sections: dict[str, Callable[[], Any]] = {
        "versions": _versions,
        "torch_problem": lambda: torch_problem,
        "gpu": _gpu,
        "library": _library,
        "backends": _backends,
        "transformers": _registration,
        "environment": lambda: {name: value for name, value in sorted(os.environ.items()) if name.startswith("HF_FLASH2_")},
        "environment_problems": lambda: environment_problems([name for name in os.environ if name.startswith("HF_FLASH2_")]),
    }
    return {name: _guarded(section) for name, section in sections.items()}


def _guarded(section: Callable[[], Any]) -> Any:
    try:
        return section()
    except Exception as error:  # whatever is broken here is what the reader wants to know
        return {"error": f"{type(error).__name__}: {error}"}


def _versions() -> dict[str, str | None]:
    return {
        "hf_flash2": build.package_version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: _installed_version(name) for name in PACKAGES},
    }


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu() -> dict[str, Any]:
    """The NVIDIA driver, what torch sees of the GPUs, and where it sees none, why."""
    driver = _nvidia_driver()
    count, torch_warnings = _device_count()
    devices = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "index": index,
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_gib": round(properties.total_memory / (1 << 30), 1),
                "multiprocessors": properties.multi_processor_count,
                "unavailable": native.reason_unavailable(index),
            }
        )
    return {
        "driver": driver,
        **({} if torch_problem else {"torch_cuda": torch.version.cuda}),
        "devices": devices,
        "none_because": None if devices else _reason_no_device(driver, torch_warnings),
    }


def _device_count() -> tuple[int, list[str]]:
    """GPUs that torch can use, and what it warned of: why CUDA does not start is said in a warning."""
    if torch_problem:
        return 0, []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return count, [str(warning.message) for warning in caught]


def _nvidia_driver() -> dict[str, Any] | None:
    """Driver version, newest CUDA version it supports and GPU names, asked of NVML; None without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    text, number, count = ctypes.create_string_buffer(96), ctypes.c_int(), ctypes.c_uint()
    driver: dict[str, Any] = {"version": None, "cuda": None, "gpus": []}
    if nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0:
        driver["version"] = text.value.decode()
    if nvml.nvmlSystemGetCudaDriverVersion(ctypes.byref(number)) == 0:
        driver["cuda"] = f"{number.value // 1000}.{number.value % 1000 // 10}"
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0 and nvml.nvmlDeviceGetName(handle, text, len(text)) == 0:
            driver["gpus"].append(text.value.decode())
    nvml.nvmlShutdown()
    return driver


def _reason_no_device(driver: dict[str, Any] | None, torch_warnings: list[str]) -> str:
    if driver is None:
        return "no NVIDIA driver answers on this machine"
    if not driver["gpus"]:
        return f"the NVIDIA driver {driver['version']} is there, but it sees no GPU"
    gpus = ", ".join(driver["gpus"])
    if torch_problem:
        return f"{gpus} is there, but {NO_TORCH}"
    if torch.version.cuda is None:
        return f"{gpus} is there, but torch {torch.__version__} is a build without CUDA; install one with CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        return f"{gpus} is there, but CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides it"
    return " ".join(torch_warnings) or f"{gpus} is there, but torch {torch.__version__} cannot use it"


def _library() -> dict[str, Any]:
    path = native.library_path()
    library: dict[str, Any] = {"path": str(path), "exists": path.is_file()}
    try:
        library |= native.build_info()
        library["mb"] = round(path.stat().st_size / 1e6, 1)
        csrc = build.source_folder()
        stale = csrc.is_dir() and library.get("sources") != build.digest_of_sources(csrc)
        library["stale"] = f"it was built from other sources than those in {csrc}; `hf-flash2 build` compiles them" if stale else None
    except native.NotAvailableError as error:
        library["error"] = str(error)
        library["rebuild"] = _how_to_rebuild()
    return library


def _how_to_rebuild() -> str:
    try:
        return build.reason_not_buildable() or "this machine has what builds it"
    except build.BuildError as error:  # HF_FLASH2_NVCC, CUDA_HOME or CXX names what does not work
        return str(error)


def _backends() -> list[dict[str, str | None]]:
    """One row per case: the backend that runs it, or None, and why it is none better."""
    if torch_problem:
        return [_row("any case", None, NO_TORCH)]
    rows = []
    for index in range(_device_count()[0]):
        rows += _cuda_backends(index)
    if not rows:
        reason = native.reason_unavailable(0) if native.library_path().is_file() else None
        rows.append(_row("cuda tensors", None, reason or "torch sees no usable GPU"))
    rows.append(_row("cpu tensors, any floating-point dtype", "cpu-reference", "exact plain PyTorch: the kernels run on GPUs only"))
    return rows


def _cuda_backends(index: int) -> list[dict[str, str | None]]:
    device = f"cuda:{index}"
    reason = native.reason_unavailable(index)
    if reason:
        return [_row(f"{device}, any case", None, reason)]
    library = native.build_info()
    try:
        family, why_not_better = _family_for(index, library["families"])
    except (native.LibraryError, ValueError) as error:  # HF_FLASH2_FAMILY names what does not run here
        return [_row(f"{device}, any case", None, str(error))]
    dtypes = "/".join(str(dtype).removeprefix("torch.") for dtype in support.CUDA_DTYPES)
    built = library["head_dims"]
    served = _row(f"{device}, {dtypes}, head dim up to {max(built)}", f"cuda-{family}", why_not_better)
    refused = {
        f"{device}, float32": support.reason_unsupported("cuda", torch.float32, 128),
        f"{device}, head dim {max(built) + 1} and more": support.reason_unsupported("cuda", torch.bfloat16, max(built) + 1)
        or f"this library holds head dims {', '.join(map(str, built))}; rebuild it without HF_FLASH2_HEAD_DIMS",
        f"{device}, ALiBi": support.reason_unsupported("cuda", torch.bfloat16, 128, alibi_slopes=True),
    }
    return [served, *(_row(case, None, reason) for case, reason in refused.items() if reason)]


def _family_for(index: int, families: list[str]) -> tuple[str, str | None]:
    """(kernel family that runs on this GPU, why it is not a better one)."""
    family = f"sm{native.forward_family(index, native.forced_family())}"
    if native.forced_family():
        return family, f"HF_FLASH2_FAMILY={family} forces it"
    return family, None if "sm90" in families else "this library has no Hopper kernels (sm90)"


def _row(case: str, backend: str | None, why: str | None) -> dict[str, str | None]:
    return {"case": case, "backend": backend, "why_not_better": why}


def _registration() -> dict[str, Any]:
    """Whether Transformers knows attn_implementation="hf_flash2" in this process, and what stands in the way."""
    if torch_problem:
        return {"transformers": _installed_version("transformers"), "registered": False, "problems": [NO_TORCH]}
    from . import registration  # here, so that whatever is wrong with Transformers is this section's error and no more

    return registration.registration_state()


def _strict() -> bool | None:
    if torch_problem:
        return None
    from . import notices  # it needs torch

    return notices.is_strict()


# The variables of this package, and what refuses a wrong value where that is read: most of the build's say so when it builds.
_VARIABLES: dict[str, Callable[[], Any]] = {
    "HF_FLASH2_FAMILY": native.forced_family,
    "HF_FLASH2_LOSS": lambda: native.eager_asked("HF_FLASH2_LOSS"),
    "HF_FLASH2_ROTARY": lambda: native.eager_asked("HF_FLASH2_ROTARY"),
    "HF_FLASH2_STRICT": _strict,
    "HF_FLASH2_ARCHS": lambda: build.parse_archs(os.environ["HF_FLASH2_ARCHS"] or build.DEFAULT_ARCHS),
    **dict.fromkeys(("HF_FLASH2_HEAD_DIMS", "HF_FLASH2_LIBRARY", "HF_FLASH2_NVCC", "HF_FLASH2_SKIP_CUDA"), lambda: None),
    "HF_FLASH2_SHARED_MEMORY_LIMIT": lambda: None,  # of the library, for tests
    **dict.fromkeys(("HF_FLASH2_COMMIT", "HF_FLASH2_EMULATE", "HF_FLASH2_GPU_RECORD"), lambda: None),  # of the tests
    **dict.fromkeys(("HF_FLASH2_RANDOM_CALLS", "HF_FLASH2_RANDOM_SEED"), lambda: None),
}


# Those that a call reads, which raises ValueError where its value cannot be.
OF_CALLS = ("HF_FLASH2_FAMILY", "HF_FLASH2_LOSS", "HF_FLASH2_ROTARY", "HF_FLASH2_STRICT")


def environment_problems(names: Collection[str]) -> list[str]:
    """What is wrong with these variables of the environment, as lines."""
    problems = []
    for name in sorted(os.environ.keys() & set(names)):
        try:
            _VARIABLES[name]()
        except KeyError:
            problems.append(f"{name} is no variable of hf_flash2: {', '.join(_VARIABLES)}")
        except (ValueError, build.UsageError) as error:
            problems.append(str(error).removeprefix("hf_flash2: "))
    return problems


def render(report: dict[str, Any]) -> str:
    """The report as text to paste into an issue."""
    lines = []

    def add(label: str, value: object) -> None:
        lines.append(f"{label:<14} {value}".replace("\n", f"\n{'':<14} "))

    for section in _RENDERERS:
        if isinstance(report[section], dict) and set(report[section]) == {"error"}:
            add(section, f"cannot be read: {report[section]['error']}")
        else:
            _RENDERERS[section](report[section], add)
    for name, value in report["environment"].items():
        add("environment", f"{name}={value}")
    return "\n".join(lines)


def _render_versions(versions: dict[str, str | None], add: Callable[[str, object], None]) -> None:
    for name, version in versions.items():
        add(name, version or "not installed")


def _render_torch_problem(problem: str | None, add: Callable[[str, object], None]) -> None:
    if problem:
        add("problem", problem)


def _render_gpu(gpu: dict[str, Any], add: Callable[[str, object], None]) -> None:
    driver = gpu["driver"]
    add("driver", f"{driver['version']}, CUDA {driver['cuda']}" if driver else "none")
    if "torch_cuda" in gpu:
        add("torch CUDA", gpu["torch_cuda"] or "none (a CPU build of torch)")
    for device in gpu["devices"]:
        add(
            f"GPU {device['index']}",
            f"{device['name']}, compute capability {device['capability']}, {device['memory_gib']} GiB, "
            f"{device['multiprocessors']} multiprocessors",
        )
    if gpu["none_because"]:
        add("GPU", f"none: {gpu['none_because']}")


def _render_library(library: dict[str, Any], add: Callable[[str, object], None]) -> None:
    add("library", library["path"] if library["exists"] else f"{library['path']} (not there)")
    if "error" in library:
        add("", library["error"])
        add("", library["rebuild"])
        return
    head_dims = ", ".join(map(str, library["head_dims"]))
    add("", f"{library['mb']} MB, version {library['version']}, CUDA {library['toolkit']}, {library['archs']}, head dims {head_dims}")
    if library["stale"]:
        add("", library["stale"])


def _render_backends(rows: list[dict[str, str | None]], add: Callable[[str, object], None]) -> None:
    for row in rows:
        why = f" ({row['why_not_better']})" if row["why_not_better"] else ""
        add("backend", f"{row['case']}: {row['backend'] or 'refused'}{why}")


def _render_transformers(state: dict[str, Any], add: Callable[[str, object], None]) -> None:
    where = f"transformers {state['transformers']}" if state["transformers"] else "transformers is not installed"
    add("registered", f"{'yes' if state['registered'] else 'no'}, {where}")
    for problem in state["problems"]:
        add("", problem)


def _render_environment_problems(problems: list[str], add: Callable[[str, object], None]) -> None:
    for problem in problems:
        add("problem", problem)


_RENDERERS = {
    "versions": _render_versions,
    "torch_problem": _render_torch_problem,
    "gpu": _render_gpu,
    "library": _render_library,
    "backends": _render_backends,
    "transformers": _render_transformers,
    "environment_problems": _render_environment_problems,
}

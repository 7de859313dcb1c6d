"""What all tests share: the device and kernel family they run on, and the record of a GPU run."""

import datetime
import gc
import importlib.util
import json
import os
import platform
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from filelock import FileLock

ROOT = Path(__file__).resolve().parent.parent
if importlib.util.find_spec("hf_flash2") is None:  # neither installed nor on PYTHONPATH
    sys.path.insert(0, str(ROOT))

from hf_flash2 import kernels, native  # noqa: E402

# PERF: tensors here are small; threads waiting for each other cost more than they bring (busy 2-core EPYC: 168 s, with one thread 34 s).
torch.set_num_threads(1)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NO_FAMILY = "reference"  # what the CPU runs


def families() -> list[str]:
    """The kernel families that run on this device; the reference backend without a GPU."""
    if DEVICE == "cpu":
        return [NO_FAMILY]
    if native.reason_unavailable(torch.cuda.current_device()) is not None:
        return ["auto"]  # the tests then fail with the library's reason
    return native.families(torch.cuda.current_device())


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU when there is one, else the CPU."""
    return torch.device(DEVICE)


@pytest.fixture(params=families())
def family(request, monkeypatch) -> str:
    """Each kernel family in turn, forced by HF_FLASH2_FAMILY."""
    if request.param != NO_FAMILY:
        monkeypatch.setenv("HF_FLASH2_FAMILY", request.param)
    return request.param


@pytest.fixture
def backward_families(monkeypatch) -> list[str]:
    """Names of the kernel families that ran the backward calls of this test, in order; stays empty on the reference backend."""
    ran, backward = [], kernels.Layout.backward
    names = {number: name for name, number in native.FAMILIES.items()}

    def recorded(*args):
        *gradients, family = backward(*args)
        ran.append(names[family])
        return *gradients, family

    monkeypatch.setattr(kernels.Layout, "backward", recorded)
    return ran


@pytest.fixture
def block_tables(monkeypatch):
    """Arguments of a continuous batch that decodes by block tables, which Transformers does on a GPU alone, and the calls that did."""
    from transformers import ContinuousBatchingConfig
    from transformers.generation.continuous_batching import initialization

    from hf_flash2 import interface

    config = ContinuousBatchingConfig(page_size=128, num_blocks=16, max_batch_tokens=64, max_blocks_per_request=2)
    made = types.SimpleNamespace(calls=0, arguments={"continuous_batching_config": config, "progress_bar": False})
    decode = interface.flash_attn_with_kvcache

    def counted(*args, **options):
        made.calls += 1
        return decode(*args, **options)

    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *_: None)
    monkeypatch.setattr(interface, "flash_attn_with_kvcache", counted)
    return made


def give_back_memory():
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def most_of_the_memory(tmp_path_factory):
    """60 GiB of the GPU's memory, for one test of all processes of a run at a time: with three such tests at once, others find none."""
    of_run = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # a worker's own folder lies in that of the run
        of_run = of_run.parent
    with FileLock(of_run / "most_of_the_memory.lock"):
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < 60 * 2**30:
            pytest.skip("needs 60 GiB of free GPU memory")
        yield
        give_back_memory()


@pytest.fixture(autouse=True)
def leaves_memory_to_others():
    """Gives back what a test has left in torch's allocator, if that is much: the other processes of a run have tests of their own."""
    yield
    if DEVICE == "cuda" and torch.cuda.memory_reserved() > 2 * 2**30:
        give_back_memory()


@pytest.fixture(autouse=True)
def accelerate_forgets():
    """accelerate keeps the device and the dtype that its first use in a process had; the next test may want others."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def record_errors(record_property):
    """Call with {tensor name: error of ours / error of eager}; the largest per module ends in the record of the run."""
    return lambda ratios: record_property("error_ratios", ratios)


def pytest_addoption(parser):
    parser.addoption(
        "--gpu-record",
        default=os.environ.get("HF_FLASH2_GPU_RECORD"),
        metavar="PATH",
        help="write what ran, where and how exact it was to this JSON file (default: HF_FLASH2_GPU_RECORD)",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "big_memory: needs a CUDA device with about 60 GiB of free memory")
    if config.getoption("--gpu-record") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(RunRecord(Path(config.getoption("--gpu-record"))))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers():
    """`-n auto`: one worker per core, each with one thread; in this process on a GPU, whose memory and time several tests measure."""
    return 0 if DEVICE == "cuda" else min(os.cpu_count() or 1, 8)


def pytest_collection_modifyitems(items):
    for item in items:
        if DEVICE == "cpu" and (item.get_closest_marker("gpu") or item.get_closest_marker("big_memory")):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


class RunRecord:
    """Counts outcomes and keeps the largest error ratio of each test module and why tests failed; at the end of the session writes these
    with the versions."""

    def __init__(self, path: Path):
        self.path = path
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}
        self.ratios: dict[str, dict[str, float]] = {}
        self.failures: dict[str, str] = {}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":  # a failing set-up or tear-down counts too
            self.counts[report.outcome] += 1
        if report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            self.failures[report.nodeid] = (crash.message if crash else report.longreprtext)[:1000]
        if report.when != "call":
            return
        module = self.ratios.setdefault(report.nodeid.split("::")[0], {})
        for name, ratios in report.user_properties:
            if name == "error_ratios":
                for tensor, ratio in ratios.items():
                    module[tensor] = max(module.get(tensor, 0.0), ratio)

    def pytest_sessionfinish(self):
        record = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            **environment(),
            **git_state(self.path),
            "tests": self.counts,
            **({"failures": self.failures} if self.failures else {}),
            "largest_error_ours_over_eager": {
                module: {k: round(v, 3) for k, v in ratios.items()} for module, ratios in self.ratios.items() if ratios
            },
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(record, indent=2) + "\n")


def environment() -> dict:
    """GPU, driver and the versions that decide results."""
    transformers = importlib.util.find_spec("transformers") and __import__("transformers").__version__
    return {
        "gpu": torch.cuda.get_device_name() if DEVICE == "cuda" else None,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if DEVICE == "cuda" else None,
        "families": families(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers,
        "python": platform.python_version(),
    }


def git_state(ignored: Path) -> dict:
    """Commit and whether the tree differs from it (the record itself aside). HF_FLASH2_COMMIT names it for a copy without one."""
    commit = _output("git", "rev-parse", "HEAD")
    if commit is None or "HF_FLASH2_COMMIT" in os.environ:
        return {"commit": os.environ.get("HF_FLASH2_COMMIT"), "dirty": None}
    changed = (_output("git", "status", "--porcelain", "--untracked-files=all") or "").splitlines()
    return {"commit": commit, "dirty": any((ROOT / line[3:]).resolve() != ignored.resolve() for line in changed)}


def _output(*command: str) -> str | None:
    """What a command prints, or None when it is missing or fails."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.rstrip() or None
    except (OSError, subprocess.CalledProcessError):
        return None

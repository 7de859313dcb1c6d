"""Where the time of a training step goes: one step under torch.profiler, GPU time by kind of kernel, host time and waits for the host.

Kernels are told apart by their names, in the table below. A name does not say what a matrix product is for, so that of the logits counts
among the matrix products, and so do those of eager attention.
"""

import json
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from .bench_shared import figure, legend_below

ATTENTION, PRODUCTS, ELEMENTWISE = "attention", "matrix products", "norms, rotary, activations"
LOSS, OPTIMIZER, COPIES, OTHER, IDLE = "loss", "optimizer", "copies, gathers", "other", "idle"

# The first rule that matches a kernel's name decides.
RULES: tuple[tuple[str, re.Pattern], ...] = (
    (ELEMENTWISE, re.compile(r"hf_flash2::.*rotary")),
    (LOSS, re.compile(r"hf_flash2::.*cross_entropy")),
    (ATTENTION, re.compile(r"hf_flash2::|flash_(fwd|bwd)_|fmha_cutlass|PyTorchMemEffAttention")),
    (ATTENTION, re.compile(r"cudnn_generated\w*_sdpa_|cudnn::fusion::(compute_dot_do_o|convert_dq)")),
    (OPTIMIZER, re.compile(r"multi_tensor_apply_kernel|[Ff]used_?[Aa]dam")),
    (LOSS, re.compile(r"nll_loss|LogSoftMax|log_softmax|softmax_warp_(forward|backward)<[^>]*, \d+, true")),
    (ATTENTION, re.compile(r"[Ss]oft_?[Mm]ax")),  # eager attention's
    (PRODUCTS, re.compile(r"nvjet_|gemm|gemv|cublas|cutlass::Kernel|cutlass_\w*tensorop|splitKreduce|_xmma_")),
    (COPIES, re.compile(r"^Mem(cpy|set)|direct_copy_kernel|FillFunctor|CatArray|[Gg]ather|[Ss]catter|triu_tril|arange")),
    (COPIES, re.compile(r"index|embedding|at_cuda_detail::cub|cub::|[Ss]ort|krn_partial|compute_grad_weight|sum_and_scatter|nonzero")),
    (ELEMENTWISE, re.compile(r"elementwise_kernel|reduce_kernel|[Ll]ayer_?[Nn]orm|rms_?norm|RMSNorm|GammaBeta|triton_")),
)  # fmt: skip
CATEGORIES = (ATTENTION, PRODUCTS, ELEMENTWISE, LOSS, OPTIMIZER, COPIES, OTHER, IDLE)
WORTH_NAMING = 0.02  # of the step: kernels that no rule knows are listed above this

_GPU_EVENTS = {"kernel", "gpu_memcpy", "gpu_memset"}
_CALLS = {"cuda_runtime", "cuda_driver"}
_HOST_EVENTS = {"cpu_op"} | _CALLS
_WAITS = re.compile(r"Synchronize|Memcpy")  # calls of the runtime that wait for the GPU


def category(kernel: str) -> str:
    """The kind of a kernel."""
    return next((name for name, pattern in RULES if pattern.search(kernel)), OTHER)


@dataclass(frozen=True)
class Breakdown:
    """One step of one arm, in milliseconds.

    The profiler slows the host down, so waits for the host are an upper bound. The step starts with an empty queue, since the one before it
    has been waited for: until the host has got ahead, waits are those of this start.
    """

    preset: str
    arm: str
    step_ms: float  # without the profiler, median
    gpu_ms: dict[str, float]  # by category; idle is what is left of the step
    host_ms: float  # what the host computed and launched, profiler included, waits for the GPU excluded
    waits_ms: float  # the GPU ran nothing, and what came next was not launched yet
    last_wait_ms: float  # when the last of these waits ended, from the start of the step; 0 if there was none
    turnaround_ms: float  # the GPU ran nothing, though what came next was launched
    launches: int
    unknown_ms: dict[str, float]  # kernels without a rule, by name, if they take more than 2 % of the step


def profiled_step(step: Callable[[], Any], synchronize: Callable[[], None]) -> list[dict]:
    """The trace events of one step. The step runs twice: starting the profiler disturbs the first."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    for _ in range(2):
        with profile(activities=activities) as recorded:
            step()
            synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def breakdown(preset: str, arm: str, step_ms: float, events: Iterable[dict]) -> Breakdown:
    """Add up the events of a step.

    Args:
        step_ms: time of the step without the profiler, which slows the host down but not the kernels.
        events: of a Chrome trace: "cat", "name", "ts" and "dur" in microseconds, and "correlation" of a call and of what it launched.
    """
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    kernels = [event for event in spans if event.get("cat") in _GPU_EVENTS]
    by_name = Counter()
    for event in kernels:
        by_name[event["name"]] += event["dur"] / 1e3
    gpu_ms = dict.fromkeys(CATEGORIES, 0.0)
    for name, ms in by_name.items():
        gpu_ms[category(name)] += ms
    gpu_ms[IDLE] = max(0.0, step_ms - _covered_us(kernels) / 1e3)
    host = [event for event in spans if event.get("cat") in _HOST_EVENTS]
    waits, others = _gaps_us(kernels, host)
    return Breakdown(
        preset, arm, step_ms, gpu_ms,
        host_ms=(_extent_us(host) - _waiting_us(host)) / 1e3,
        waits_ms=sum(waits.values()) / 1e3,
        last_wait_ms=max(waits, default=0.0) / 1e3,
        turnaround_ms=sum(others.values()) / 1e3,
        launches=sum(event["cat"] == "kernel" for event in kernels),
        unknown_ms={name: ms for name, ms in by_name.most_common() if category(name) == OTHER and ms > WORTH_NAMING * step_ms},
    )  # fmt: skip


def _covered_us(events: Sequence[dict]) -> float:
    """Time during which at least one of the events runs."""
    start = min((event["ts"] for event in events), default=0.0)
    return _extent_us(events) - sum(event["ts"] - done for event, done in _gaps(events, start))


def _gaps(events: Iterable[dict], start: float) -> Iterator[tuple[dict, float]]:
    """The events before which nothing runs, each with when that began: at the end of all before it, or at `start`."""
    done = start
    for event in sorted(events, key=lambda event: event["ts"]):
        if event["ts"] > done:
            yield event, done
        done = max(done, event["ts"] + event["dur"])


def _gaps_us(work: Sequence[dict], host: Sequence[dict]) -> tuple[dict[float, float], dict[float, float]]:
    """Times when the GPU runs nothing, from the first host event on: waits for the host, and the GPU's own turnaround.

    Each is a length by its end, counted from that first event. A gap is a wait if the call that launched what ends it came back after all
    earlier work was done; so is that before a copy whose call waits for it. A gap that the trace ties to no call is counted as turnaround:
    torch records some of the driver's functions only.
    """
    returned = {_correlation(event): event["ts"] + event["dur"] for event in host if event["cat"] in _CALLS}
    returned.pop(None, None)  # a call that launched nothing
    start = min((event["ts"] for event in host), default=0.0)
    waits, others = {}, {}
    for event, done in _gaps(work, start):
        gaps = waits if returned.get(_correlation(event), done) > done else others
        gaps[event["ts"] - start] = event["ts"] - done
    return waits, others


def _correlation(event: dict) -> int | None:
    return event.get("args", {}).get("correlation")


def _extent_us(events: Sequence[dict]) -> float:
    """From the start of the first to the end of the last."""
    return max((event["ts"] + event["dur"] for event in events), default=0.0) - min((event["ts"] for event in events), default=0.0)


def _waiting_us(events: Sequence[dict]) -> float:
    """What calls of the CUDA runtime spent waiting: synchronisations and copies, and launches into a full queue beyond a usual launch."""
    calls: dict[str, list[float]] = {}
    for event in events:
        if event["cat"] != "cpu_op":
            calls.setdefault(event["name"], []).append(event["dur"])
    waiting = 0.0
    for name, durations in calls.items():
        usual = 0.0 if _WAITS.search(name) else statistics.median(durations)
        waiting += sum(max(0.0, duration - usual) for duration in durations)
    return waiting


def format_breakdown(found: Breakdown) -> str:
    """A line for the terminal, and one for each unknown kernel."""
    parts = ", ".join(f"{name} {ms:.1f}" for name, ms in found.gpu_ms.items() if ms >= 0.05)
    ended = f", none after {found.last_wait_ms:.1f} ms" if found.waits_ms else ""
    waits = f"waits for the host {found.waits_ms:.1f} ms{ended}"
    lines = [f"{found.arm:18}{found.step_ms:9.1f} ms: {parts}; host {found.host_ms:.1f}, {found.launches} kernels; {waits}"]
    return "\n".join(lines + [f"{'':18}no rule for {name[:120]}: {ms:.1f} ms" for name, ms in found.unknown_ms.items()])


def write(path: Path, found: Sequence[Breakdown], environment: dict[str, str]) -> None:
    """The numbers as JSON at `path`, a figure beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    steps = [asdict(step) for step in found]
    path.write_text(json.dumps({"environment": environment, "unit": "ms", "steps": _rounded(steps)}, indent=1) + "\n")
    plot(path.with_suffix(".png"), found, environment)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def plot(path: Path, found: Sequence[Breakdown], environment: dict[str, str]) -> None:
    """A stacked bar per step, a panel per preset; a mark where the host was done."""
    presets = list(dict.fromkeys(step.preset for step in found))
    arms = [sum(step.preset == preset for step in found) for preset in presets]
    colors = dict(zip(CATEGORIES, ("C3", "C0", "C2", "C1", "C4", "C5", "0.45", "0.9"), strict=True))
    size = (10.0, 1.5 + sum(0.62 + 0.42 * count for count in arms))
    options = {"gridspec_kw": {"height_ratios": [0.5 + count for count in arms]}}
    with figure(path, len(presets), 1, size, environment, **options) as (drawn, axes):
        for preset, (panel,) in zip(presets, axes, strict=True):
            steps = [step for step in found if step.preset == preset]
            longest = max(max(step.step_ms, step.host_ms) for step in steps)
            for y, step in enumerate(steps):
                left = 0.0
                for name in CATEGORIES:
                    ms = step.gpu_ms[name]
                    panel.barh(y, ms, left=left, color=colors[name], label=name if y == 0 else None, edgecolor="white", linewidth=0.4)
                    if ms > 0.05 * longest:
                        color = "black" if name == IDLE else "white"
                        panel.text(left + ms / 2, y, f"{ms:.0f}", ha="center", va="center", fontsize=8, color=color)
                    left += ms
                panel.plot([step.host_ms] * 2, [y - 0.4, y + 0.4], color="black", linewidth=2, label="host time" if y == 0 else None)
                panel.text(max(left, step.host_ms) + 0.01 * longest, y, f"{step.step_ms:.0f} ms", va="center", fontsize=9)
            panel.set_yticks(range(len(steps)), [step.arm for step in steps])
            panel.invert_yaxis()
            panel.set_xlim(0, 1.12 * longest)
            panel.set_title(preset, fontsize=10, loc="left")
            panel.grid(axis="x", alpha=0.3)
            panel.set_axisbelow(True)
        axes[-1][0].set_xlabel("GPU time of one step (ms)")
        handles, labels = axes[0][0].get_legend_handles_labels()
        legend_below(drawn, dict(zip(labels, handles, strict=True)), columns=5)

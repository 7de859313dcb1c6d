"""What finetune_lora.py shows and writes: progress, the table of implementations, loss curves, run.json and losses.csv."""

import argparse
import csv
import json
import math
import os
import platform
import resource
import sys
from dataclasses import asdict, dataclass, field
from datetime import date

import accelerate
import peft
import torch
import transformers
from accelerate import Accelerator
from tqdm import tqdm

import hf_flash2

# Curves that coincide must all be visible: wide and pale below, thin and dark above.
STYLES = {
    "eager": {"color": "#f4b266", "linewidth": 6},
    "sdpa": {"color": "#3a7d44", "linewidth": 2.5},
    "hf_flash2": {"color": "#1b1b3a", "linewidth": 1.3, "linestyle": "--"},
    "hf_flash2-packed": {"color": "#c2185b", "linewidth": 1.3, "linestyle": ":"},
}


@dataclass
class Run:
    """What one implementation did."""

    implementation: str
    losses: list[float] = field(default_factory=list)  # one per step, over all processes
    evaluation_before: float = math.nan
    evaluation_after: float = math.nan
    tokens_per_second: float = math.nan  # real tokens: padding does not count
    peak_memory_bytes: int = 0
    backend: str | None = None  # hf_flash2.last_backend(), for hf_flash2
    completion: str = ""
    failure: str | None = None  # why there are no figures


class Progress:
    """A tqdm bar on a terminal, a plain line now and then elsewhere, nothing on other processes."""

    def __init__(self, steps: int, main_process: bool):
        terminal = sys.stderr.isatty()
        self.steps, self.done, self.plain = steps, 0, main_process and not terminal
        self.bar = tqdm(total=steps, unit="step", disable=not (main_process and terminal))

    def step(self, loss: float, tokens_per_second: float) -> None:
        self.done += 1
        self.bar.set_postfix_str(f"loss {loss:.3f}, {tokens_per_second:,.0f} real tokens/s", refresh=False)
        self.bar.update()
        if self.plain and (self.done in (1, self.steps) or self.done % max(1, self.steps // 6) == 0):
            print(f"  step {self.done:>4}/{self.steps}  loss {loss:.3f}  {tokens_per_second:>9,.0f} real tokens/s", flush=True)

    def close(self) -> None:
        self.bar.close()


def table(runs: list[Run], device: torch.device) -> str:
    """The comparison as text; differences are against the first implementation that finished."""
    memory = "peak memory" if device.type == "cuda" else "process peak"
    lines = [f"{'':16} {'first loss':>10} {'last loss':>10} {'unseen':>7} {'off by':>8} {'real tokens/s':>14} {memory:>13}"]
    reference = next((run for run in runs if run.failure is None), None)
    for run in runs:
        if run.failure is not None:
            lines.append(f"{run.implementation:16} {run.failure}")
            continue
        off = "" if run is reference else f"{max(_differences(run, reference)):.1e}"
        lines.append(
            f"{run.implementation:16} {run.losses[0]:10.4f} {run.losses[-1]:10.4f} {run.evaluation_after:7.4f} {off:>8} "
            f"{run.tokens_per_second:14,.0f} {run.peak_memory_bytes / 2**30:9.2f} GiB"
        )
    lines.append("unseen: loss on functions kept apart")
    if reference is not None and len(runs) > 1:
        lines[-1] += f"; off by: largest difference of a step's loss from {reference.implementation}'s"
    return "\n".join(lines)


def write_files(args: argparse.Namespace, accelerator: Accelerator, data: dict[str, object], runs: list[Run]) -> None:
    """run.json with everything needed to repeat the run, losses.csv with one column per implementation."""
    record = {
        "date": date.today().isoformat(),
        "device": _device_name(accelerator.device),
        "processes": accelerator.num_processes,
        "versions": {module.__name__: module.__version__ for module in (hf_flash2, torch, transformers, peft, accelerate)}
        | {"python": platform.python_version()},
        "settings": {key: value for key, value in vars(args).items() if key != "output_dir"},
        "data": data,
        "runs": [asdict(run) for run in runs],
    }
    (args.output_dir / "run.json").write_text(json.dumps(record, indent=2) + "\n")
    finished = [run for run in runs if run.failure is None]
    with (args.output_dir / "losses.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *(run.implementation for run in finished)])
        writer.writerows(zip(range(1, args.steps + 1), *(run.losses for run in finished), strict=bool(finished)))


def plot(args: argparse.Namespace, accelerator: Accelerator, runs: list[Run]) -> str:
    """Draw the loss curves over each other, and the speeds. Returns where, or why not."""
    try:
        import matplotlib
    except ImportError:
        return "not drawn (pip install matplotlib)"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = [run for run in runs if run.failure is None]
    if not runs:
        return "not drawn (no implementation finished)"
    figure, (curves, speeds) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(2, 1), layout="constrained")
    for run in runs:
        off = f" (off by at most {max(_differences(run, runs[0])):.1e})" if run is not runs[0] else ""
        curves.plot(range(1, args.steps + 1), run.losses, label=run.implementation + off, **STYLES[run.implementation])
    curves.set(title="training loss", xlabel="step", ylabel="cross-entropy per token")
    curves.legend(handlelength=4)
    colors = [STYLES[run.implementation]["color"] for run in runs]
    bars = speeds.bar([run.implementation.replace("-", "\n") for run in runs], [run.tokens_per_second for run in runs], color=colors)
    speeds.bar_label(bars, fmt="{:,.0f}")
    speeds.set(title="real tokens per second")
    speeds.margins(y=0.12)
    settings = f"LoRA, {args.model_type} {args.size}, {args.dtype}, {args.batch_size} x up to {args.max_length} tokens a process"
    figure.suptitle(f"{settings}; {describe_machine(accelerator)}; {date.today().isoformat()}", fontsize=9)
    path = args.output_dir / "loss_curves.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return str(path)


def describe_machine(accelerator: Accelerator) -> str:
    processes = f"{accelerator.num_processes} processes, " if accelerator.num_processes > 1 else ""
    versions = f"hf_flash2 {hf_flash2.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{processes}{_device_name(accelerator.device)}, {versions}"


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Of this implementation on a GPU; on a CPU, of the process so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({os.cpu_count()} cores)"


def _differences(run: Run, reference: Run) -> list[float]:
    return [abs(a - b) for a, b in zip(run.losses, reference.losses, strict=True)]

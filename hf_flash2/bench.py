"""`hf-flash2 bench attention`: our kernels, family by family, against torch's SDPA backends on the grid of the FlashAttention papers.

All providers read the same tensors in the same process and take turns call by call, so that clocks and temperature are shared. SDPA is
pinned to one backend at a time, so a name in the table is the kernel that ran. Needs a CUDA device.
"""

import argparse
import contextlib
import csv
import datetime
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import __version__, native
from .functional import flash_attn_func

FLOPS_OF_MODE = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}  # in units of the forward's 4 B H S^2 D
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SDPA_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
OURS, SDPA, EAGER = "hf_flash2", "sdpa", "eager"
WARM_UP_CALLS = 5
MEASURED_MS = 300.0  # GPU time per provider and point; rounds follow from it
MIN_ROUNDS, MAX_ROUNDS = 10, 100
# Zeroed before every timed call: more than any L2, and 0.25 ms on an H200, during which the host queues the call it is about to time.
FLUSH_BYTES = 2**30

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]  # q, k, v [B, S, H, D], causal -> out


@dataclass(frozen=True)
class Point:
    """One problem of the grid: self-attention with as many key heads as query heads."""

    mode: str
    dtype: str
    head_dim: int
    causal: bool
    seqlen: int
    batch: int
    heads: int

    @property
    def tflop(self) -> float:
        """What the papers count: matrix products only, half of them when causal."""
        forward = 4 * self.batch * self.heads * self.seqlen**2 * self.head_dim * (0.5 if self.causal else 1.0)
        return FLOPS_OF_MODE[self.mode] * forward / 1e12


@dataclass(frozen=True)
class Row:
    """One measurement: a line of the CSV."""

    provider: str
    mode: str
    dtype: str
    head_dim: int
    causal: bool
    seqlen: int
    batch: int
    heads: int
    ms: float
    ms_p20: float
    ms_p80: float
    tflops: float
    percent_of_best_rival: float | None  # None for the rivals themselves, and without any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hf-flash2 bench`."""
    parser.add_argument("what", nargs="?", choices=["attention"], default="attention", help="what to time")
    parser.add_argument("--mode", nargs="+", choices=list(FLOPS_OF_MODE), default=["fwd", "bwd"])
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64, 128, 256], metavar="D")
    parser.add_argument("--seqlen", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192, 16384], metavar="S")
    parser.add_argument("--causal", choices=["yes", "no", "both"], default="both")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens in all: batch = tokens / seqlen (default 16384)")
    parser.add_argument("--hidden-size", type=int, default=2048, help="heads = hidden size / head dim (default 2048)")
    parser.add_argument("--eager", action="store_true", help="time eager attention too")
    parser.add_argument("--csv", type=Path, metavar="PATH", help="write one line per measurement")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw TFLOP/s over length (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Time the grid, print it line by line, write what was asked for. Returns the exit code."""
    if not torch.cuda.is_available():
        print("hf-flash2 bench needs a CUDA GPU: the reference backend of a CPU is made to be exact, not fast", file=sys.stderr)
        return 1
    reason = native.reason_unavailable(torch.cuda.current_device())
    if reason is not None:
        print(f"hf-flash2 bench cannot run: {reason}", file=sys.stderr)
        return 1
    points = list(grid(args))
    providers = all_providers(args.eager)
    names = [provider.name for provider in providers]
    environment = describe_environment()
    print(" · ".join(f"{name} {value}" for name, value in environment.items()))
    print(f"TFLOP/s at the median time (p20-p80), {args.dtype}, {args.tokens} tokens in all, hidden size {args.hidden_size}")
    print(f"{'mode':8}{'d':>4} {'mask':7}{'S':>6}  " + "".join(f"{name:>24}" for name in names) + f"{'ours / best rival':>20}")
    rows: list[Row] = []
    for point in points:
        measured = rows_of(point, measure(point, [provider for provider in providers if provider.runs(point.mode)]))
        rows += measured
        print(format_line(point, measured, names), flush=True)
    if args.csv:
        write_csv(args.csv, rows, environment)
        print(f"wrote {args.csv}")
    if args.plot:
        plot(args.plot, rows, environment)
        print(f"wrote {args.plot}")
    return 0


def grid(args: argparse.Namespace) -> Iterator[Point]:
    """The points that the options ask for. A length that does not divide the tokens gets the batch below."""
    causal = {"yes": [True], "no": [False], "both": [False, True]}[args.causal]
    for mode, head_dim, is_causal, seqlen in itertools.product(args.mode, args.head_dim, causal, args.seqlen):
        yield Point(mode, args.dtype, head_dim, is_causal, seqlen, max(1, args.tokens // seqlen), max(1, args.hidden_size // head_dim))


# Providers


@dataclass(frozen=True)
class Provider:
    """One implementation that is timed."""

    name: str
    attend: Attention
    family: str | None = None  # the kernel family that HF_FLASH2_FAMILY has to name while it runs

    def runs(self, mode: str) -> bool:
        """A family without a backward of its own would show another one's under its name."""
        return self.family is None or mode != "bwd" or self.family in native.build_info()["backward_families"]


def all_providers(with_eager: bool) -> list[Provider]:
    """Ours per kernel family that runs on this GPU, then the rivals."""
    providers = [Provider(f"{OURS} {family}", ours, family) for family in native.families(torch.cuda.current_device())]
    providers += [Provider(f"{SDPA} {name}", sdpa(backend)) for name, backend in SDPA_BACKENDS.items()]
    return providers + [Provider(EAGER, eager)] * with_eager


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return flash_attn_func(q, k, v, causal=causal)


def sdpa(backend: SDPBackend) -> Attention:
    """torch's scaled_dot_product_attention held to one backend."""

    def attend(q, k, v, causal):
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal)
        return out.transpose(1, 2)

    return attend


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """What Transformers' eager attention computes."""
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    scores = query @ key.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ value).transpose(1, 2)


@contextlib.contextmanager
def forced(family: str | None) -> Iterator[None]:
    """HF_FLASH2_FAMILY set to this family; None leaves it alone."""
    before = os.environ.get("HF_FLASH2_FAMILY")
    if family is not None:
        os.environ["HF_FLASH2_FAMILY"] = family
    try:
        yield
    finally:
        if family is not None:
            os.environ.pop("HF_FLASH2_FAMILY")
            if before is not None:
                os.environ["HF_FLASH2_FAMILY"] = before


# Measuring


def measure(point: Point, providers: Iterable[Provider]) -> dict[str, torch.Tensor]:
    """Milliseconds of every timed call by provider; one that cannot run the point is left out, with its reason on stderr."""
    shape = (point.batch, point.seqlen, point.heads, point.head_dim)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=DTYPES[point.dtype]) for _ in range(4))
    inputs = tuple(x.requires_grad_(point.mode != "fwd") for x in (q, k, v))
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    calls: dict[Provider, Callable[[], object]] = {}
    slowest = 0.0
    for provider in providers:
        try:
            with forced(provider.family):
                call = timed_call(point, provider.attend, inputs, dout)
                for _ in range(WARM_UP_CALLS):
                    call()
            start, end = time_once(provider, call, flush)
            torch.cuda.synchronize()
            slowest = max(slowest, start.elapsed_time(end))
            calls[provider] = call
        except (RuntimeError, ValueError) as error:  # no such kernel, or out of memory
            print(f"{provider.name} left out at {point}: {str(error).splitlines()[0]}", file=sys.stderr)
    rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, round(MEASURED_MS / slowest))) if calls else 0
    events: dict[str, list] = {provider.name: [] for provider in calls}
    for _ in range(rounds):
        for provider, call in calls.items():
            events[provider.name].append(time_once(provider, call, flush))
    torch.cuda.synchronize()
    return {name: torch.tensor([start.elapsed_time(end) for start, end in pairs]) for name, pairs in events.items()}


def timed_call(point: Point, attend: Attention, inputs: tuple[torch.Tensor, ...], dout: torch.Tensor) -> Callable[[], object]:
    """What is timed. A backward is everything autograd launches for q, k and v."""
    if point.mode == "fwd":
        return lambda: attend(*inputs, point.causal)
    if point.mode == "fwd+bwd":
        return lambda: torch.autograd.grad(attend(*inputs, point.causal), inputs, dout)
    out = attend(*inputs, point.causal)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def time_once(provider: Provider, call: Callable[[], object], flush: torch.Tensor) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Queue one call behind a flush of the L2 cache, between two events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with forced(provider.family):
        flush.zero_()
        start.record()
        call()
        end.record()
    return start, end


def rows_of(point: Point, times: dict[str, torch.Tensor]) -> list[Row]:
    """Statistics of one point."""
    quantiles = {name: torch.quantile(ms, torch.tensor([0.2, 0.5, 0.8])).tolist() for name, ms in times.items()}
    best_rival = min((q[1] for name, q in quantiles.items() if name.startswith(SDPA)), default=None)
    rows = []
    for name, (p20, median, p80) in quantiles.items():
        percent = 100 * best_rival / median if best_rival is not None and name.startswith(OURS) else None
        rows.append(
            Row(name, **asdict(point), ms=median, ms_p20=p20, ms_p80=p80, tflops=point.tflop / median * 1e3, percent_of_best_rival=percent)
        )
    return rows


# Output


def describe_environment() -> dict[str, str]:
    """Where the numbers come from."""
    cudnn = torch.backends.cudnn.version() or 0
    return {
        "gpu": torch.cuda.get_device_name(),
        "hf_flash2": __version__,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": f"{cudnn // 10000}.{cudnn % 10000 // 100}.{cudnn % 100}",
        "date": datetime.date.today().isoformat(),
    }


def format_line(point: Point, rows: Iterable[Row], names: Iterable[str]) -> str:
    """One line of the table: the median as TFLOP/s, with the spread of the middle 60 % of the calls."""
    by_provider = {row.provider: row for row in rows}
    line = f"{point.mode:8}{point.head_dim:>4} {'causal' if point.causal else 'full':7}{point.seqlen:>6}  "
    for name in names:
        row = by_provider.get(name)
        slow, fast = (0, 0) if row is None else (point.tflop / row.ms_p80 * 1e3, point.tflop / row.ms_p20 * 1e3)
        line += f"{'-':>24}" if row is None else f"{f'{row.tflops:.0f} ({slow:.0f}-{fast:.0f})':>24}"
    percents = [f"{row.percent_of_best_rival:.0f} %" for row in by_provider.values() if row.percent_of_best_rival is not None]
    return line + f"{', '.join(percents):>20}"


def write_csv(path: Path, rows: list[Row], environment: dict[str, str]) -> None:
    """Long format: one measurement a line, everything needed to read it beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*Row.__dataclass_fields__, *environment])
        writer.writeheader()
        for row in rows:
            values = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in asdict(row).items()}
            writer.writerow(values | environment)


def plot(path: Path, rows: list[Row], environment: dict[str, str]) -> None:
    """TFLOP/s over length: a panel per mode, mask and head dim, a line per provider, its p20-p80 as a band."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit(f"--plot needs matplotlib: {error}") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lengths = sorted({row.seqlen for row in rows})
    if len(lengths) < 2:
        raise SystemExit(f"--plot needs at least two lengths, got {lengths}: one point is no curve")
    head_dims = sorted({row.head_dim for row in rows})
    lines = sorted({(row.mode, row.causal) for row in rows}, key=lambda line: (list(FLOPS_OF_MODE).index(line[0]), line[1]))
    providers = list(dict.fromkeys(row.provider for row in rows))
    figure, axes = plt.subplots(
        len(lines), len(head_dims), figsize=(1.5 + 3.6 * len(head_dims), 1.3 + 2.6 * len(lines)), sharex=True, sharey="row", squeeze=False
    )
    for (mode, causal), panels in zip(lines, axes, strict=True):
        for head_dim, panel in zip(head_dims, panels, strict=True):
            for provider in providers:
                curve = sorted(
                    (row for row in rows if (row.provider, row.mode, row.causal, row.head_dim) == (provider, mode, causal, head_dim)),
                    key=lambda row: row.seqlen,
                )
                x = [row.seqlen for row in curve]
                style = {"linewidth": 2.2, "marker": "o"} if provider.startswith(OURS) else {"linewidth": 1.3, "marker": "s", "ls": "--"}
                (drawn,) = panel.plot(x, [row.tflops for row in curve], label=provider, markersize=4, **style)
                slow, fast = [row.tflops * row.ms / row.ms_p80 for row in curve], [row.tflops * row.ms / row.ms_p20 for row in curve]
                panel.fill_between(x, slow, fast, color=drawn.get_color(), alpha=0.15, linewidth=0)
            panel.set_title(f"{mode}, {'causal' if causal else 'full'}, head dim {head_dim}", fontsize=10)
            panel.set_xscale("log", base=2)
            panel.set_xticks(lengths, [f"{s // 1024}k" if s >= 1024 else str(s) for s in lengths])
            panel.minorticks_off()
            panel.grid(alpha=0.3)
        panels[0].set_ylabel("TFLOP/s")
        panels[0].set_ylim(0, 1.05 * max(row.tflops for row in rows if (row.mode, row.causal) == (mode, causal)))  # shared by the line
    for panel in axes[-1]:
        panel.set_xlabel("sequence length")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.suptitle(", ".join(f"{name} {value}" if name != "gpu" else value for name, value in environment.items()), fontsize=9, y=0.995)
    figure.legend(handles, labels, loc="lower center", ncols=len(providers), frameon=False)
    figure.tight_layout(rect=(0, 0.3 / figure.get_figheight(), 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)

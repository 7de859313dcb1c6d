"""`hf-flash2 bench attention`: our kernels, family by family, against torch's own and, where it is installed, FlashAttention-4.

    papers   the grid of the FlashAttention papers: 16k tokens in all, hidden size 2048
    gqa      grouped key heads, beside as many key heads as query heads
    ragged   padded batches of log-normal lengths, run padded and packed, beside a dense batch of equal work
    window   sliding windows over a long sequence, beside full causal attention
    small    grids too small to give every multiprocessor of a large GPU a block
    decode   one query, or a few, after many cached keys: a step of generation
    mla      multi-head latent attention: 16 heads with 192 for q and k, 128 for v
    wide     head dims above 256
    dropout  attention with dropout, beside attention without

With --against, other builds of the library stand in the place of the rivals: is a change of the kernels faster?

All implementations read the same tensors in the same process and take turns call by call, in another order each round, so that clocks and
temperature are shared. SDPA is pinned to one backend at a time, so a name in the table is the kernel that ran. TFLOP/s count visible scores
of real tokens only, even of an implementation that computes more; decode is bound by memory and shows GB/s, K and V counted once.
Needs a CUDA device.
"""

import argparse
import contextlib
import ctypes
import itertools
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from . import kernels, native, ops
from .bench_points import DTYPES, PRODUCTS_OF_MODE, SHAPES, Point, Shapes
from .bench_providers import EAGER, FA4, OURS, SDPA, VARLEN, Problem, Provider, Work, all_providers, builds, other_builds
from .bench_shared import (
    describe_environment,
    draw_again,
    figure,
    legend_below,
    middle,
    plot_arguments,
    positive,
    probability,
    reason_no_figure,
    reason_not_writable,
    release_memory,
    write_csv,
)

WARM_UP_CALLS = 5
MEASURED_MS = 300.0  # GPU time per provider and point; rounds follow from it
MIN_ROUNDS, MAX_ROUNDS = 30, 100  # of calls as long as 35 ms, medians of 10 differ by 3 to 10 % from run to run
# Zeroed before every timed call: more than any L2, and 0.25 ms on an H200, during which the host queues the call it is about to time.
FLUSH_BYTES = 2**30
MOST_UPRIGHT_TICKS = 6  # that a panel of a figure has room for
# The same in every figure; builds of --against have what is left.
COLORS = {
    f"{OURS} sm90": "C1", f"{OURS} sm90 packed": "C1", f"{OURS} sm90 padded": "#ffbb78", f"{OURS} sm90 paged": "#a0522d",
    f"{OURS} sm90 deterministic": "#a0522d", f"{OURS} sm80": "C0", f"{OURS} sm80 packed": "C0", f"{OURS} sm80 padded": "#aec7e8",
    f"{OURS} sm80 paged": "#0b3c6f", f"{OURS} sm80 deterministic": "#0b3c6f", f"{SDPA} flash": "C2", f"{SDPA} cudnn": "C3",
    f"{SDPA} cudnn, mask": "C3", f"{SDPA} efficient": "C4", f"{SDPA} efficient, mask": "C4", VARLEN: "C2", FA4: "C5", EAGER: "0.5",
}  # fmt: skip

# ------------------------------------------------------------------------------------------------------------------------------ command


@dataclass(frozen=True)
class Row:
    """One measurement: a line of the CSV."""

    provider: str
    shapes: str
    mode: str
    dtype: str
    head_dim: int
    head_dim_v: int
    causal: bool
    window: int | None
    queries: int | None
    seqlen: int
    batch: int
    fill: float
    heads: int
    heads_k: int
    only_ours: bool
    ms: float
    ms_p20: float
    ms_p80: float
    tflops: float
    gb_per_s: float  # of K and V, read once
    percent_of_best_rival: float | None  # None for the rivals themselves, and without any
    percent_of_baseline: float | None  # TFLOP/s of ours, in those of the same family at the point it is compared with
    dropout: float = 0.0

    def rate(self, ms: float) -> float:
        """What these shapes are shown as, had it taken so long."""
        return {"TFLOP/s": self.tflops, "GB/s": self.gb_per_s}[SHAPES[self.shapes].rate] * self.ms / ms


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hf-flash2 bench attention`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["papers"], help="default: papers")
    parser.add_argument("--mode", nargs="+", choices=list(PRODUCTS_OF_MODE), default=["fwd", "bwd"], help="decode: always fwd")
    parser.add_argument("--head-dim", nargs="+", type=positive, metavar="D", help="default: those of the shapes; mla has its own")
    parser.add_argument("--seqlen", nargs="+", type=positive, metavar="S", help="default: those of the shapes")
    parser.add_argument(
        "--causal",
        choices=["yes", "no", "both"],
        help="default: both for papers, wide and mla, else yes; window and decode are always causal",
    )
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument(
        "--tokens", type=positive, help="papers, mla, wide, dropout, ragged: batch = tokens / seqlen (default 16384, ragged 32768)"
    )
    parser.add_argument(
        "--hidden-size", type=positive, default=2048, help="heads = hidden size / head dim, gqa, small, decode and mla apart (default 2048)"
    )
    parser.add_argument("--fill", type=float, default=0.3, help="ragged: share of real tokens (default 0.3)")
    parser.add_argument("--window", nargs="+", type=positive, default=[128, 1024], help="window: tokens to the left (default 128 1024)")
    parser.add_argument("--dropout", type=probability, default=0.1, metavar="P", help="dropout: its probability (default 0.1)")
    parser.add_argument("--eager", action="store_true", help="time eager attention too")
    parser.add_argument("--deterministic", action="store_true", help="time our backward with deterministic=True, too")
    parser.add_argument(
        "--against",
        nargs="+",
        type=Path,
        default=[],
        metavar="LIBRARY",
        help="time the kernels of these libraries in place of the rivals: other builds (`hf-flash2 build --output LIBRARY`), by file name",
    )
    parser.add_argument("--csv", type=Path, metavar="PATH", help="write one line per measurement, after each point")
    plot_arguments(parser, "the rates, of several shapes at PATH-shapes")


def run(args: argparse.Namespace) -> int:
    """Time the points, print them line by line, write what was asked for. Returns the exit code."""
    if args.from_csv:
        return draw_again(args, Row, plot_shapes)
    reason = (reason_no_figure() if args.plot else None) or reason_not_writable(args.csv, args.plot)
    if reason is not None:
        print(f"hf-flash2 bench attention: {reason}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("hf-flash2 bench attention needs a CUDA GPU: the reference backend of a CPU is made to be exact, not fast", file=sys.stderr)
        return 1
    reason = native.reason_unavailable(torch.cuda.current_device())
    if reason is not None:
        print(f"hf-flash2 bench attention cannot run: {reason}", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    if args.against:
        try:
            providers = builds(other_builds(args.against), args.eager, args.deterministic)
        except (ValueError, native.NotAvailableError, native.LibraryError) as error:
            print(f"hf-flash2 bench attention: --against: {error}", file=sys.stderr)
            return 2
    else:
        providers = all_providers(native.families(torch.cuda.current_device()), args.eager, args.deterministic)
    return benchmark(args, providers, device, CudaClock(device))


def benchmark(args: argparse.Namespace, providers: Sequence["Provider"], device: torch.device, clock: "CudaClock") -> int:
    """`run` on a device and clock. Returns the exit code."""
    try:
        points_of = {name: list(SHAPES[name].points(args)) for name in args.shapes}
        for name, points in points_of.items() if args.plot else ():
            x_axis(SHAPES[name], points)
        without = [name for name, points in points_of.items() if not points]
        if without:
            asked = "these options" if args.seqlen is None else f"--seqlen {' '.join(map(str, args.seqlen))}"
            raise ValueError(f"--shapes {without[0]} has nothing to measure with {asked}")
    except ValueError as error:  # a --fill that no lengths have; a --plot without curves
        print(f"hf-flash2 bench attention: {error}", file=sys.stderr)
        return 2
    environment = describe_environment(device)
    print(" · ".join(f"{name} {value}" for name, value in environment.items()))
    rows: list[Row] = []
    for name, points in points_of.items():
        print(f"\n{name}, {args.dtype}: {SHAPES[name].rate} at the median time (p20-p80)")
        columns = [provider.name for provider in providers if any(provider.takes(point) for point in points)]
        print(format_header(columns, SHAPES[name]))
        measured: dict[Point | None, list[Row]] = {}
        for _, together in itertools.groupby(points, key=lambda point: point.baseline or point):
            for point, times in measure(list(together), providers, device, clock).items():
                measured[point] = rows_of(point, times, measured.get(point.baseline, []))
                rows += measured[point]
                print(format_line(point, measured[point], columns), flush=True)
            if args.csv:
                write_csv(args.csv, Row, rows, environment)
    if not rows:
        print("hf-flash2 bench attention: nothing could be measured, the reasons are above", file=sys.stderr)
        return 1
    if args.csv:
        print(f"wrote {args.csv}")
    if args.plot:
        plot_shapes(args.plot, rows, environment)
    return 0


# ---------------------------------------------------------------------------------------------------------------------------- measuring


class CudaClock:
    """Times calls on the device. The calls of many providers can be queued before the first time is read."""

    def __init__(self, device: torch.device):
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def queue(self, call: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Queue one call behind a flush of the L2 cache, between two events."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.flush.zero_()
        start.record()
        call()
        end.record()
        return start, end

    def milliseconds(self, queued: Iterable[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
        """Wait, and read what `queue` returned."""
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in queued]


def measure(
    points: Sequence[Point], providers: Sequence[Provider], device: torch.device, clock: CudaClock
) -> dict[Point, dict[str, list[float]]]:
    """Milliseconds of every timed call by point and provider, which take turns, call by call: a GPU is as fast as it is warm.

    Each round has an order of its own: long calls that always come behind the same one, which draws more or less power, differ by up to 5 %
    from their own copies.

    A provider that cannot run a point that it takes is left out there, with its reason on stderr.
    """
    problems = {point: Problem(point, device) for point in points}
    calls: dict[tuple[Point, Provider], Callable[[], object]] = {}
    slowest = 0.0
    for point, provider in itertools.product(points, providers):
        if not provider.takes(point):
            continue
        try:
            with forced(provider.family, provider.library):
                call = timed_call(point.mode, provider.prepare(problems[point]))
                with families_that_ran() as ran:
                    for _ in range(WARM_UP_CALLS):
                        call()
                    slowest = max(slowest, *clock.milliseconds([clock.queue(call)]))
            if ran and provider.family not in ran:
                raise RuntimeError(f"HF_FLASH2_FAMILY={provider.family} gave way to {', '.join(sorted(ran))}")
            calls[point, provider] = call
        except expected_errors(provider) as error:
            reason, *_ = str(error).splitlines() or [type(error).__name__]
            print(f"{provider.name} left out at {point}: {reason}", file=sys.stderr)
        if (point, provider) not in calls:
            call = None
            release_memory(device)
    rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, round(MEASURED_MS / max(slowest, 1e-3))))
    queued: dict[tuple[Point, Provider], list] = {timed: [] for timed in calls}
    turns, shuffle = list(calls.items()), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(turns)
        for (point, provider), call in turns:
            with forced(provider.family, provider.library):
                queued[point, provider].append(clock.queue(call))
    times: dict[Point, dict[str, list[float]]] = {point: {} for point in points}
    for (point, provider), timings in queued.items():
        times[point][provider.name] = clock.milliseconds(timings)
    return times


def expected_errors(provider: Provider) -> tuple[type[Exception], ...]:
    """No such kernel, other arguments in this torch, out of memory. Rivals have exceptions of their own."""
    return (Exception,) if provider.family is None else (RuntimeError, ValueError, TypeError)


def timed_call(mode: str, work: Work) -> Callable[[], object]:
    """What is timed. A backward is everything autograd launches for q, k and v."""
    if mode == "fwd":
        return work.attend
    if mode == "fwd+bwd":
        return lambda: torch.autograd.grad(work.attend(), work.inputs, work.dout)
    out = work.attend()
    return lambda: torch.autograd.grad(out, work.inputs, work.dout, retain_graph=True)


@contextlib.contextmanager
def forced(family: str | None, library: ctypes.CDLL | None = None) -> Iterator[None]:
    """HF_FLASH2_FAMILY set to this family, calls going to this library; None leaves either alone."""
    before = os.environ.get("HF_FLASH2_FAMILY")
    if family is not None:
        os.environ["HF_FLASH2_FAMILY"] = family
    try:
        with contextlib.nullcontext() if library is None else in_place(library):
            yield
    finally:
        if family is not None:
            os.environ.pop("HF_FLASH2_FAMILY")
            if before is not None:
                os.environ["HF_FLASH2_FAMILY"] = before


# Of every library but ours: how its calls run, as ops.plans has it for ours. A plan holds the library that it was made with.
_plans_of: dict[ctypes.CDLL, dict] = {}


@contextlib.contextmanager
def in_place(library: ctypes.CDLL) -> Iterator[None]:
    """Another build in the place of our library."""
    own_library, own_plans = native.library, dict(ops.plans)
    native.library = lambda: library
    ops.plans.clear()
    ops.plans.update(_plans_of.get(library, {}))
    try:
        yield
    finally:
        _plans_of[library] = dict(ops.plans)
        ops.plans.clear()
        ops.plans.update(own_plans)
        native.library = own_library


@contextlib.contextmanager
def families_that_ran() -> Iterator[set[str]]:
    """The kernel families of our calls inside the with block: a family without a backward for a head dim gives way to another one."""
    ran: set[str] = set()
    names = {number: name for name, number in native.FAMILIES.items()}
    originals = {name: getattr(kernels.Layout, name) for name in ("forward", "backward")}

    def recorded(original: Callable[..., tuple]) -> Callable[..., tuple]:
        def call(*args: object) -> tuple:
            *results, family = original(*args)
            ran.add(names[family])
            return *results, family

        return call

    for name, original in originals.items():
        setattr(kernels.Layout, name, recorded(original))
    try:
        yield ran
    finally:
        for name, original in originals.items():
            setattr(kernels.Layout, name, original)


def rows_of(point: Point, times: dict[str, list[float]], baseline: Iterable[Row] = ()) -> list[Row]:
    """Statistics of one point; `baseline` are the rows of the point that ours is compared with."""
    statistics = {name: middle(ms) for name, ms in times.items()}
    rivals = {name: median for name, (_, median, _) in statistics.items() if not name.startswith((OURS, EAGER))}
    rows = []
    for name, (p20, median, p80) in statistics.items():
        tflops = point.tflop / median * 1e3
        ours = name.startswith(OURS)
        same = [ms for rival, ms in rivals.items() if rival.split()[1:] == name.split()[1:]]  # of other builds
        best_rival = min(same or rivals.values(), default=None)
        same_family = next((row.tflops for row in baseline if row.provider == family_of(name)), None)
        rows.append(
            Row(
                provider=name, shapes=point.shapes, mode=point.mode, dtype=point.dtype, head_dim=point.head_dim,
                head_dim_v=point.head_dims[1], causal=point.causal, window=point.window, queries=point.queries, seqlen=point.seqlen,
                batch=point.batch, fill=point.fill, heads=point.heads, heads_k=point.heads_k, only_ours=point.only_ours,
                ms=median, ms_p20=p20, ms_p80=p80, tflops=tflops, gb_per_s=point.gigabytes / median * 1e3,
                percent_of_best_rival=100 * best_rival / median if ours and best_rival is not None else None,
                percent_of_baseline=100 * tflops / same_family if ours and same_family is not None else None, dropout=point.dropout,
            )
        )  # fmt: skip
    return rows


def family_of(provider: str) -> str:
    """ "hf_flash2 sm90 packed" -> "hf_flash2 sm90": what runs a dense batch in the same kernel family."""
    return " ".join(provider.split()[:2])


# ------------------------------------------------------------------------------------------------------------------------------- output


def baseline_header(shapes: Shapes) -> str:
    return f"{f'  % of {shapes.baseline}':>26}" if shapes.baseline else ""


def width(provider: str) -> int:
    """Of a provider's column: two blanks before the longest name, "hf_flash2 sm90 deterministic"."""
    return max(24, len(provider) + 2)


def digits(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def format_header(providers: Iterable[str], shapes: Shapes) -> str:
    names = "".join(f"{name:>{width(name)}}" for name in providers)
    return (
        f"{'mode':8}{'d':>8}{'heads':>7} {'mask':12}{'batch':>12}{'fill':>6}{names}{'ours, % of best rival':>24}{baseline_header(shapes)}"
    )


def format_line(point: Point, rows: Iterable[Row], providers: Iterable[str]) -> str:
    """One line of the table: the rate at the median, with the spread of the middle 60 % of the calls."""
    by_provider = {row.provider: row for row in rows}
    heads = f"{point.heads}/{point.heads_k}"
    line = f"{point.mode:8}{point.dims:>8}{heads:>7} {point.mask:12}{point.rows:>12}{point.fill:>6.2f}"
    for name in providers:
        cell = "-"
        if name in by_provider:
            row = by_provider[name]
            median, slow, fast = (digits(row.rate(ms)) for ms in (row.ms, row.ms_p80, row.ms_p20))
            cell = f"{median} ({slow}-{fast})"
        line += f"{cell:>{width(name)}}"
    rival, baseline = (
        ", ".join(f"{percent:.0f}" for percent in percents if percent is not None)
        for percents in (
            [row.percent_of_best_rival for row in by_provider.values()],
            [row.percent_of_baseline for row in by_provider.values()],
        )
    )
    return f"{line}{rival:>24}{baseline:>{len(baseline_header(SHAPES[point.shapes]))}}".rstrip()


def plot_shapes(path: Path, rows: Sequence[Row], environment: dict[str, str]) -> None:
    """A figure per set of shapes: path, or where there are several, path-shapes."""
    names = list(dict.fromkeys(row.shapes for row in rows))
    unknown = next((name for name in names if name not in SHAPES), None)
    if unknown is not None:
        raise ValueError(f"its shapes must be among {', '.join(SHAPES)}, got {unknown}")
    for name in names:
        to = path if len(names) == 1 else path.with_stem(f"{path.stem}-{name}")
        plot(to, [row for row in rows if row.shapes == name], environment)
        print(f"wrote {to}")


def plot(path: Path, rows: Sequence[Row], environment: dict[str, str]) -> None:
    """The rates of one set of shapes: a panel per mode, mask and kind of heads, a line per provider with its p20-p80 as a band."""
    shapes = SHAPES[rows[0].shapes]
    baselines = {row.provider: f"{row.provider}, {shapes.baseline}" for row in rows if row.provider == family_of(row.provider)}
    rows = [row for row in rows if not row.only_ours]
    xs = x_axis(shapes, rows)
    titles = list(dict.fromkeys(map(shapes.panel, rows)))
    lines = sorted({(row.mode, row.causal) for row in rows}, key=lambda line: (list(PRODUCTS_OF_MODE).index(line[0]), line[1]))
    providers = list(dict.fromkeys(row.provider for row in rows))
    size = (1.5 + 3.4 * max(len(titles), 2), 1.6 + 2.6 * len(lines))
    legend = {}
    with figure(path, len(lines), len(titles), size, environment, sharex=True, sharey="row") as (drawn, axes):
        for (mode, causal), panels in zip(lines, axes, strict=True):
            top = 0.0
            for title, panel in zip(titles, panels, strict=True):
                inside = [row for row in rows if (row.mode, row.causal, shapes.panel(row)) == (mode, causal, title)]
                for number, provider in enumerate(providers):
                    curve = [row for row in inside if row.provider == provider]
                    curve.sort(key=lambda row: xs.index(shapes.x(row)))
                    ours = provider.startswith(OURS)
                    style = {"linewidth": 2.2, "marker": "o"} if ours else {"linewidth": 1.3, "marker": "s", "ls": "--"}
                    style |= {"color": COLORS.get(provider, f"C{6 + number % 4}"), "markersize": 4}
                    for part in (list(part) for _, part in itertools.groupby(curve, shapes.joined)):
                        x = [xs.index(shapes.x(row)) for row in part]
                        (line,) = panel.plot(x, [row.rate(row.ms) for row in part], **style)
                        slow, fast = ([row.rate(ms) for row, ms in zip(part, times, strict=True)] for times in spread(part))
                        panel.fill_between(x, slow, fast, color=line.get_color(), alpha=0.15, linewidth=0)
                        legend.setdefault(provider, line)
                        top = max([top, *fast])
                for name, (x, tflops) in baseline_curves(inside, shapes, xs).items():
                    shade = "black" if name == next(iter(baselines)) else "0.55"
                    (line,) = panel.plot(x, tflops, color=shade, linewidth=1.1, ls=":", marker="_")
                    legend.setdefault(baselines[name], line)
                    top = max([top, *tflops])
                panel.set_title(f"{mode}, {'causal' if causal else 'full'}, {title}", fontsize=10)
                panel.set_xticks(range(len(xs)), xs, rotation=90 if len(xs) > MOST_UPRIGHT_TICKS else 0)
                panel.set_xlim(-0.2, len(xs) - 0.8)
                panel.grid(alpha=0.3)
            panels[0].set_ylim(0, 1.05 * top)  # shared by the line
            panels[0].set_ylabel(shapes.rate)
        for panel in axes[-1]:
            panel.set_xlabel(shapes.x_label)
        legend_below(drawn, legend, columns=max(2, int(size[0] / 2.9)))


def x_axis(shapes: Shapes, points: Iterable[Point | Row]) -> list[str]:
    """What stands on the x axis of the figure of these.

    Raises:
        ValueError: too little for curves.
    """
    shown = sorted((point for point in points if not point.only_ours), key=lambda point: (point.seqlen, point.window or 0))
    xs = list(dict.fromkeys(map(shapes.x, shown)))
    if len(xs) < 2:
        raise ValueError(f"--plot needs at least two points on its x axis ({shapes.x_label}), got {xs}: one point is no curve")
    return xs


def spread(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [row.ms_p80 for row in rows], [row.ms_p20 for row in rows]


def baseline_curves(rows: Iterable[Row], shapes: Shapes, xs: list[str]) -> dict[str, tuple[list[int], list[float]]]:
    """By family of ours: where, and how many TFLOP/s it reached at the points that its rows are compared with."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.percent_of_baseline is not None:
            found.setdefault(family_of(row.provider), {})[xs.index(shapes.x(row))] = 100 * row.tflops / row.percent_of_baseline
    return {name: (list(points), list(points.values())) for name, points in found.items()}

"""`hf-flash2 bench attention`: our kernels, family by family, against torch's own and, where it is installed, FlashAttention-4.

    papers   the grid of the FlashAttention papers: 16k tokens in all, hidden size 2048
    gqa      grouped key heads, beside as many key heads as query heads
    ragged   padded batches of log-normal lengths, run padded and packed, beside a dense batch of equal work
    window   sliding windows over a long sequence, beside full causal attention
    small    grids too small to give every multiprocessor of a large GPU a block
    decode   one query, or a few, after many cached keys: a step of generation
    mla      multi-head latent attention: 16 heads with 192 for q and k, 128 for v
    dropout  attention with dropout, beside attention without

With --against, other builds of the library stand in the place of the rivals: is a change of the kernels faster?

All implementations read the same tensors in the same process and take turns call by call, so that clocks and temperature are shared. SDPA
is pinned to one backend at a time, so a name in the table is the kernel that ran. TFLOP/s count visible scores of real tokens only, even of
an implementation that computes more; decode is bound by memory and shows GB/s, K and V counted once. Needs a CUDA device.
"""

import argparse
import contextlib
import ctypes
import importlib.util
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import kernels, native, ops, packing
from .bench_shared import (
    describe_environment,
    draw_again,
    figure,
    legend_below,
    middle,
    plot_arguments,
    positive,
    probability,
    ragged_lengths,
    reason_no_figure,
    release_memory,
    write_csv,
)
from .functional import flash_attn_func, flash_attn_ranges_func, flash_attn_varlen_func
from .kvcache import flash_attn_with_kvcache

# Matrix products over the head dim of q and k (S; in the backward S, dQ, dK) and over that of v (O; in the backward dP, dV).
PRODUCTS_OF_MODE = {"fwd": (1, 1), "bwd": (3, 2), "fwd+bwd": (4, 3)}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OURS, SDPA, VARLEN, FA4, EAGER = "hf_flash2", "sdpa", "torch varlen_attn", "flash-attn 4", "eager"
WARM_UP_CALLS = 5
MEASURED_MS = 300.0  # GPU time per provider and point; rounds follow from it
MIN_ROUNDS, MAX_ROUNDS = 10, 100
# Zeroed before every timed call: more than any L2, and 0.25 ms on an H200, during which the host queues the call it is about to time.
FLUSH_BYTES = 2**30
PAGE_SIZE = 256  # tokens, as Transformers' continuous batching has it
MOST_UPRIGHT_TICKS = 6  # that a panel of a figure has room for
MULTIPROCESSORS, QUERY_ROWS = 132, 128  # of an H200; of a block

# ------------------------------------------------------------------------------------------------------------------------------- points


@dataclass(frozen=True)
class Point:
    """One problem: self-attention over a batch of sequences, padded on the right to rows of seqlen tokens.

    With `queries`, these last tokens of full rows alone attend, to the whole row.
    """

    shapes: str  # the set it belongs to
    mode: str
    dtype: str
    head_dim: int
    causal: bool
    seqlen: int
    lengths: tuple[int, ...]  # real tokens of each row
    heads: int
    heads_k: int
    window: int | None = None  # how many tokens a token sees to its left, itself aside; None = all
    queries: int | None = None  # None = every token
    head_dim_v: int | None = None  # of v and out; None = head_dim
    dropout: float = 0.0
    baseline: "Point | None" = None  # another point that ours is compared with
    only_ours: bool = False  # there to be compared with: no rival is timed

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def head_dims(self) -> tuple[int, int]:
        """Of q and k, and of v."""
        return self.head_dim, self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def fill(self) -> float:
        """Share of real tokens."""
        return sum(self.lengths) / (self.batch * self.seqlen)

    @property
    def kind(self) -> str:
        """What an implementation has to be able to do."""
        if self.fill < 1:
            return "ragged"
        if self.queries is not None:
            return "decode" if self.queries == 1 else "decode, mask"
        if self.dropout > 0:
            return "dropout"
        return "dense" if self.window is None else "window"

    @property
    def tflop(self) -> float:
        """As the papers count: two matrix products over the visible scores, half of them when causal, five in the backward."""
        scores = sum(map(self._visible_scores, self.lengths))
        columns = sum(products * head_dim for products, head_dim in zip(PRODUCTS_OF_MODE[self.mode], self.head_dims, strict=True))
        return 2 * self.heads * columns * scores / 1e12

    @property
    def gigabytes(self) -> float:
        """K and V, once."""
        return sum(self.lengths) * self.heads_k * sum(self.head_dims) * DTYPES[self.dtype].itemsize / 1e9

    def _visible_scores(self, length: int) -> float:
        if self.queries is not None:
            return self.queries * (length - (self.queries - 1) / 2 if self.causal else length)
        if self.window is None:
            return length**2 * (0.5 if self.causal else 1.0)
        left = min(self.window, length - 1)
        return length * (left + 1) - left * (left + 1) / 2

    @property
    def dims(self) -> str:
        return f"{self.head_dim}" if self.head_dim_v is None else f"{self.head_dim}/{self.head_dim_v}"

    @property
    def mask(self) -> str:
        return f"window {self.window}" if self.window is not None else "causal" if self.causal else "full"

    @property
    def rows(self) -> str:
        """The batch as text; queries/keys where they differ."""
        return f"{self.batch} x {self.seqlen}" if self.queries is None else f"{self.batch} x {self.queries}/{self.seqlen}"

    def __str__(self) -> str:
        rest = f" fill {self.fill:.2f}" if self.fill < 1 else f" dropout {self.dropout:g}" if self.dropout > 0 else ""
        return f"{self.mode} d {self.dims} heads {self.heads}/{self.heads_k} {self.mask} {self.rows}{rest}"


def papers(args: argparse.Namespace) -> Iterator[Point]:
    """A length that does not divide the tokens gets the batch below."""
    options = itertools.product(args.mode, args.head_dim or (64, 128, 256), masks(args, (False, True)), seqlens(args, 512, 16384))
    for mode, head_dim, causal, seqlen in options:
        batch, heads = max(1, (args.tokens or 16384) // seqlen), max(1, args.hidden_size // head_dim)
        yield Point("papers", mode, args.dtype, head_dim, causal, seqlen, (seqlen,) * batch, heads, heads)


def gqa(args: argparse.Namespace) -> Iterator[Point]:
    options = itertools.product(args.mode, args.head_dim or (128,), masks(args, (True,)), (64, 32), args.seqlen or (1024, 4096, 16384))
    for mode, head_dim, causal, heads, seqlen in options:
        common = ("gqa", mode, args.dtype, head_dim, causal, seqlen, (seqlen,) * 2, heads)
        every_head = Point(*common, heads_k=heads)
        yield every_head
        yield Point(*common, heads_k=8, baseline=every_head)


def ragged(args: argparse.Namespace) -> Iterator[Point]:
    options = itertools.product(args.mode, args.head_dim or (64, 128), masks(args, (True,)), args.seqlen or (2048, 4096, 8192))
    for mode, head_dim, causal, seqlen in options:
        batch, heads = max(1, (args.tokens or 32768) // seqlen), max(1, args.hidden_size // head_dim)
        lengths = ragged_lengths(batch, seqlen, args.fill)
        mean_square = (sum(n * n for n in lengths) / batch) ** 0.5
        equal_work = max(QUERY_ROWS, round(mean_square / QUERY_ROWS) * QUERY_ROWS)  # full tiles: what a dense batch does best
        common = ("ragged", mode, args.dtype, head_dim, causal)
        dense = Point(*common, equal_work, (equal_work,) * batch, heads, heads, only_ours=True)
        yield dense
        yield Point(*common, seqlen, lengths, heads, heads, baseline=dense)


def window(args: argparse.Namespace) -> Iterator[Point]:
    for mode, head_dim, seqlen in itertools.product(args.mode, args.head_dim or (128,), args.seqlen or (16384,)):
        heads = max(1, args.hidden_size // head_dim)
        common = ("window", mode, args.dtype, head_dim, True, seqlen, (seqlen,), heads, heads)
        causal = Point(*common, only_ours=True)
        yield causal
        for left in args.window:
            yield Point(*common, window=left, baseline=causal)


def small(args: argparse.Namespace) -> Iterator[Point]:
    options = itertools.product(args.mode, args.head_dim or (64, 128), masks(args, (True,)), (4, 8, 16), seqlens(args, 256, 2048))
    for mode, head_dim, causal, heads, seqlen in options:
        if heads * -(-seqlen // QUERY_ROWS) < MULTIPROCESSORS:
            yield Point("small", mode, args.dtype, head_dim, causal, seqlen, (seqlen,), heads, heads)


def decode(args: argparse.Namespace) -> Iterator[Point]:
    options = itertools.product(args.head_dim or (128,), (1, 16), args.seqlen or (1024, 8192, 32768), (1, 8, 32))
    for head_dim, queries, seqlen, batch in options:
        yield Point("decode", "fwd", args.dtype, head_dim, True, seqlen, (seqlen,) * batch, 32, 8, queries=queries)


def mla(args: argparse.Namespace) -> Iterator[Point]:
    for mode, causal, seqlen in itertools.product(args.mode, masks(args, (False, True)), args.seqlen or (4096, 16384)):
        batch = max(1, (args.tokens or 16384) // seqlen)
        yield Point("mla", mode, args.dtype, 192, causal, seqlen, (seqlen,) * batch, 16, 16, head_dim_v=128)


def dropout(args: argparse.Namespace) -> Iterator[Point]:
    options = itertools.product(args.mode, args.head_dim or (64, 128), masks(args, (True,)), args.seqlen or (1024, 4096, 16384))
    for mode, head_dim, causal, seqlen in options:
        batch, heads = max(1, (args.tokens or 16384) // seqlen), max(1, args.hidden_size // head_dim)
        common = ("dropout", mode, args.dtype, head_dim, causal, seqlen, (seqlen,) * batch, heads, heads)
        without = Point(*common, only_ours=True)
        yield without
        yield Point(*common, dropout=args.dropout, baseline=without)


def masks(args: argparse.Namespace, default: tuple[bool, ...]) -> tuple[bool, ...]:
    return {None: default, "yes": (True,), "no": (False,), "both": (False, True)}[args.causal]


def seqlens(args: argparse.Namespace, first: int, last: int) -> Sequence[int]:
    """The lengths asked for; by default each the double of the one before."""
    return args.seqlen or [first << i for i in range((last // first).bit_length())]


@dataclass(frozen=True)
class Shapes:
    """A set of points, and how its figure shows them."""

    points: Callable[[argparse.Namespace], Iterator[Point]]
    panel: Callable[["Row"], str]  # title of the column of panels
    x: Callable[["Row"], str]
    x_label: str
    baseline: str = ""  # what ours is compared with
    rate: str = "TFLOP/s"  # or GB/s


def short(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)


SHAPES = {
    "papers": Shapes(papers, lambda row: f"head dim {row.head_dim}", lambda row: short(row.seqlen), "sequence length"),
    "gqa": Shapes(
        gqa, lambda row: f"{row.heads} / {row.heads_k} heads of {row.head_dim}", lambda row: short(row.seqlen),
        "sequence length", "one key head per query head",
    ),
    "ragged": Shapes(
        ragged, lambda row: f"head dim {row.head_dim}, fill {row.fill:.2f}", lambda row: f"{row.batch} x {short(row.seqlen)}",
        "padded batch", "dense batch of equal work",
    ),
    "window": Shapes(
        window, lambda row: f"head dim {row.head_dim}, {short(row.seqlen)} tokens", lambda row: short(row.window),
        "window, tokens to the left", "full causal",
    ),
    "small": Shapes(small, lambda row: f"{row.heads} heads of {row.head_dim}", lambda row: short(row.seqlen), "sequence length"),
    "decode": Shapes(
        decode, lambda row: f"{row.queries} of {row.heads} / {row.heads_k} heads of {row.head_dim}",
        lambda row: f"{row.batch} x {short(row.seqlen)}", "batch x keys", rate="GB/s",
    ),
    "mla": Shapes(
        mla, lambda row: f"{row.heads} heads of {row.head_dim}, v {row.head_dim_v}", lambda row: short(row.seqlen), "sequence length"
    ),
    "dropout": Shapes(
        dropout, lambda row: f"head dim {row.head_dim}, dropout {row.dropout:g}", lambda row: short(row.seqlen),
        "sequence length", "without dropout",
    ),
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
        "--causal", choices=["yes", "no", "both"], help="default: both for papers and mla, else yes; window and decode are always causal"
    )
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument(
        "--tokens", type=positive, help="papers, mla, dropout, ragged: batch = tokens / seqlen (default 16384, ragged 32768)"
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
    no_figure = reason_no_figure() if args.plot else None
    if no_figure is not None:
        print(f"hf-flash2 bench attention: {no_figure}", file=sys.stderr)
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
    except ValueError as error:  # a --fill that no lengths have
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
    if args.csv:
        print(f"wrote {args.csv}")
    if args.plot:
        plot_shapes(args.plot, rows, environment)
    return 0


# ---------------------------------------------------------------------------------------------------------------------------- providers


class Problem:
    """The tensors of a point, in every form that an implementation may want; each form is made once and shared."""

    def __init__(self, point: Point, device: torch.device):
        self.point, self.device = point, device
        q, dout = (self._random(point.batch, point.queries or point.seqlen, point.heads, columns) for columns in point.head_dims)
        k, v = (self._random(point.batch, point.seqlen, point.heads_k, columns) for columns in point.head_dims)
        self.qkv = self._leaves(q, k, v)  # [B, S or queries, H, D], [B, S, Hk, D], [B, S, Hk, Dv]
        self.dout = dout  # [B, S or queries, H, Dv]

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=DTYPES[self.point.dtype])

    def _leaves(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.detach().requires_grad_(self.point.mode != "fwd") for x in tensors)

    @cached_property
    def real(self) -> torch.Tensor:
        """bool [B, S], False in the padding."""
        return torch.arange(self.point.seqlen, device=self.device) < torch.tensor(self.point.lengths, device=self.device).unsqueeze(1)

    @cached_property
    def packed_qkv(self) -> tuple[torch.Tensor, ...]:
        """[T, H or Hk, D]"""
        return self._leaves(*(x[self.real] for x in self.qkv))

    @cached_property
    def packed_dout(self) -> torch.Tensor:
        return self.dout[self.real]

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """int32 [B + 1]"""
        return torch.tensor([0, *itertools.accumulate(self.point.lengths)], dtype=torch.int32, device=self.device)

    @cached_property
    def padded_batch(self) -> packing.PaddedBatch:
        return packing.padded_batch(self.real, self.point.seqlen, causal=self.point.causal)

    @cached_property
    def pages(self) -> dict[str, torch.Tensor]:
        """q, k and v of full rows as flash_attn_with_kvcache takes them, without gradients: in pages that lie in any order, the last
        `queries` yet to be written."""
        batch, seqlen, new = self.point.batch, self.point.seqlen, self.point.queries
        columns = -(-seqlen // PAGE_SIZE)
        table = torch.randperm(batch * columns, device=self.device).view(batch, columns)
        q, *cached = (x.detach() for x in self.qkv)
        lengths = torch.full((batch,), seqlen - new, dtype=torch.int32, device=self.device)
        given = {"q": q, "cache_seqlens": lengths, "block_table": table.int()}
        for name, x in zip("kv", cached, strict=True):
            rows = F.pad(x, (0, 0, 0, 0, 0, columns * PAGE_SIZE - seqlen)).unflatten(1, (columns, PAGE_SIZE))
            given[f"{name}_cache"] = torch.empty_like(rows.flatten(0, 1))
            given[f"{name}_cache"][table] = rows
            given[name] = x[:, seqlen - new :]
        return given

    @cached_property
    def visible(self) -> torch.Tensor:
        """bool [B or 1, 1, S or queries, S]: padding, causality and window as one mask, as SDPA is given it."""
        seqlen, left = self.point.seqlen, self.point.window
        queries = self.point.queries or seqlen
        visible = torch.ones(queries, seqlen, dtype=torch.bool, device=self.device)
        if self.point.causal:
            visible = visible.tril_(seqlen - queries)
        if left is not None:
            visible = visible.triu_(-left)
        return visible & self.real[:, None, None, :] if self.point.fill < 1 else visible[None, None]


class Work(NamedTuple):
    """One implementation at one problem."""

    attend: Callable[[], torch.Tensor]  # out, in the layout of dout
    inputs: tuple[torch.Tensor, ...]
    dout: torch.Tensor


@dataclass(frozen=True)
class Provider:
    """One implementation that is timed."""

    name: str
    prepare: Callable[[Problem], Work]
    kinds: tuple[str, ...]  # of points that it takes
    family: str | None = None  # of ours: what HF_FLASH2_FAMILY has to name while it runs
    library: ctypes.CDLL | None = None  # another build of ours
    only_backward: bool = False  # nothing else to see in its forward

    def takes(self, point: Point) -> bool:
        return (
            point.kind in self.kinds
            and (self.family is not None or not point.only_ours)
            and not (self.only_backward and (point.mode == "fwd" or point.only_ours))
        )


def all_providers(families: Iterable[str], with_eager: bool, with_deterministic: bool = False) -> list[Provider]:
    """Ours per kernel family, then the rivals."""
    providers = [provider for family in families for provider in our_kernels(OURS, family, with_deterministic)]
    providers += [
        Provider(f"{SDPA} flash", partial(sdpa, SDPBackend.FLASH_ATTENTION), ("dense", "decode", "dropout")),
        Provider(f"{SDPA} cudnn", partial(sdpa, SDPBackend.CUDNN_ATTENTION), ("dense", "decode", "dropout")),
        Provider(f"{SDPA} efficient, mask", partial(masked_sdpa, SDPBackend.EFFICIENT_ATTENTION), ("ragged", "window", "decode, mask")),
        Provider(f"{SDPA} cudnn, mask", partial(masked_sdpa, SDPBackend.CUDNN_ATTENTION), ("ragged", "window", "decode, mask")),
    ]
    if importlib.util.find_spec("torch.nn.attention.varlen"):  # since torch 2.10
        providers.append(Provider(VARLEN, torch_varlen, ("ragged", "window")))
    fa4 = flash_attn_4()
    if fa4 is not None:
        providers.append(Provider(FA4, partial(other_flash, fa4), ("dense",)))
    return providers + [eager_provider()] * with_eager


def eager_provider() -> Provider:
    return Provider(EAGER, eager, ("dense", "ragged", "window", "decode", "decode, mask", "dropout"))


def our_kernels(name: str, family: str, with_deterministic: bool, library: ctypes.CDLL | None = None) -> list[Provider]:
    """Our kernels of a family, of our library or another build."""
    providers = [
        Provider(f"{name} {family}", dense, ("dense", "window", "decode", "decode, mask", "dropout"), family, library),
        Provider(f"{name} {family} padded", padded, ("ragged",), family, library),
        Provider(f"{name} {family} packed", packed, ("ragged",), family, library),
        Provider(f"{name} {family} paged", paged, ("decode", "decode, mask"), family, library),
    ]
    if with_deterministic:
        prepare = partial(dense, deterministic=True)
        providers.append(Provider(f"{name} {family} deterministic", prepare, ("dense", "window"), family, library, only_backward=True))
    return providers


def other_builds(paths: Sequence[Path]) -> list[tuple[str, ctypes.CDLL]]:
    """Libraries by name. Raises ValueError where a name would not tell them apart, native.NotAvailableError where one cannot be loaded."""
    names = [path.stem for path in paths]
    for name in names:
        if names.count(name) > 1 or name.startswith((OURS, EAGER)) or len(name.split()) != 1:
            raise ValueError(f"{name!r} would stand for a column; name each file otherwise, without spaces and not {OURS}...")
    return [(name, native.load(path, f"hf-flash2 build --output {path}")) for name, path in zip(names, paths, strict=True)]


def builds(others: Iterable[tuple[str, ctypes.CDLL]], with_eager: bool = False, with_deterministic: bool = False) -> list[Provider]:
    """Ours, of the family that runs, which HF_FLASH2_FAMILY may name, and the same of other builds."""
    names = {number: name for name, number in native.FAMILIES.items()}
    family = names[native.forward_family(torch.cuda.current_device(), native.forced_family())]
    providers = our_kernels(OURS, family, with_deterministic)
    for name, library in others:
        providers += our_kernels(name, family, with_deterministic, library)
    return providers + [eager_provider()] * with_eager


def dense(problem: Problem, deterministic: bool = False) -> Work:
    point = problem.point
    options = {"causal": point.causal, "window_size": (-1 if point.window is None else point.window, -1), "deterministic": deterministic}
    return Work(lambda: flash_attn_func(*problem.qkv, dropout_p=point.dropout, **options), problem.qkv, problem.dout)


def padded(problem: Problem) -> Work:
    """What attn_implementation="hf_flash2" runs on a padded batch."""
    batch, causal = problem.padded_batch, problem.point.causal
    ranges = (batch.ranges_q, batch.ranges_k, batch.key_mask)
    return Work(lambda: flash_attn_ranges_func(*problem.qkv, *ranges, causal=causal), problem.qkv, problem.dout)


def packed(problem: Problem) -> Work:
    """What a model patched with packed=True runs."""
    cu_seqlens, longest, causal = problem.cu_seqlens, max(problem.point.lengths), problem.point.causal
    sequences = (cu_seqlens, cu_seqlens, longest, longest)
    return Work(lambda: flash_attn_varlen_func(*problem.packed_qkv, *sequences, causal=causal), problem.packed_qkv, problem.packed_dout)


def paged(problem: Problem) -> Work:
    """A step of continuous batching: the last tokens of each row are written into its pages, then attended with all before them."""
    causal = problem.point.causal
    return Work(lambda: flash_attn_with_kvcache(**problem.pages, causal=causal), problem.qkv, problem.dout)


def sdpa(backend: SDPBackend, problem: Problem) -> Work:
    """torch's scaled_dot_product_attention held to one backend. The last token needs no mask."""
    point = problem.point
    grouped = point.heads_k != point.heads
    return _sdpa(backend, problem, dropout_p=point.dropout, is_causal=point.causal and point.queries is None, enable_gqa=grouped)


def masked_sdpa(backend: SDPBackend, problem: Problem) -> Work:
    """The same with padding and window as a boolean mask, as Transformers calls it: key heads repeated, for not every backend groups."""
    return _sdpa(backend, problem, repeats=problem.point.heads // problem.point.heads_k, attn_mask=problem.visible)


def _sdpa(backend: SDPBackend, problem: Problem, repeats: int = 1, **options: object) -> Work:
    def attend() -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in problem.qkv)
        if repeats > 1:
            k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    return Work(attend, problem.qkv, problem.dout)


def torch_varlen(problem: Problem) -> Work:
    """torch's own FlashAttention over packed sequences."""
    from torch.nn.attention.varlen import varlen_attn

    point = problem.point
    left = -1 if point.window is None else point.window
    if "window_size" in inspect.signature(varlen_attn).parameters:
        options = {"window_size": (left, 0 if point.causal else -1)}
    elif left < 0:  # torch 2.10
        options = {"is_causal": point.causal}
    else:
        raise ValueError("varlen_attn of this torch knows no window")
    sequences = (problem.cu_seqlens, problem.cu_seqlens, max(point.lengths), max(point.lengths))
    return Work(lambda: varlen_attn(*problem.packed_qkv, *sequences, **options), problem.packed_qkv, problem.packed_dout)


def flash_attn_4() -> Callable[..., object] | None:
    """flash_attn_func of the flash-attn-4 package, or None. It compiles at the first call of each shape, which takes seconds."""
    try:
        from flash_attn.cute.interface import flash_attn_func as function
    except ImportError:
        return None
    return function


def other_flash(function: Callable[..., object], problem: Problem) -> Work:
    """A function with the signature of ours that returns out, or out and more."""

    def attend() -> torch.Tensor:
        result = function(*problem.qkv, causal=problem.point.causal)
        return result[0] if isinstance(result, tuple) else result

    return Work(attend, problem.qkv, problem.dout)


def eager(problem: Problem) -> Work:
    """What Transformers' eager attention computes."""
    point, hidden = problem.point, ~problem.visible

    def attend() -> torch.Tensor:
        query, key, value = (x.transpose(1, 2).repeat_interleave(point.heads // x.shape[2], 1) for x in problem.qkv)
        scores = (query @ key.transpose(-1, -2) * point.head_dim**-0.5).masked_fill(hidden, float("-inf"))
        probabilities = F.dropout(scores.softmax(-1, dtype=torch.float32).to(query.dtype), point.dropout)
        return (probabilities @ value).transpose(1, 2)

    return Work(attend, problem.qkv, problem.dout)


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
    for _ in range(rounds):
        for (point, provider), call in calls.items():
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
    for name in names:
        to = path if len(names) == 1 else path.with_stem(f"{path.stem}-{name}")
        plot(to, [row for row in rows if row.shapes == name], environment)
        print(f"wrote {to}")


def plot(path: Path, rows: Sequence[Row], environment: dict[str, str]) -> None:
    """The rates of one set of shapes: a panel per mode, mask and kind of heads, a line per provider with its p20-p80 as a band."""
    shapes = SHAPES[rows[0].shapes]
    baselines = {row.provider: f"{row.provider}, {shapes.baseline}" for row in rows if row.provider == family_of(row.provider)}
    rows = [row for row in rows if not row.only_ours]
    xs = list(dict.fromkeys(map(shapes.x, sorted(rows, key=lambda row: (row.seqlen, row.window or 0)))))
    if len(xs) < 2:
        raise SystemExit(f"--plot needs at least two points on its x axis ({shapes.x_label}), got {xs}: one point is no curve")
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
                    x = [xs.index(shapes.x(row)) for row in curve]
                    ours = provider.startswith(OURS)
                    style = {"linewidth": 2.2, "marker": "o"} if ours else {"linewidth": 1.3, "marker": "s", "ls": "--"}
                    (line,) = panel.plot(x, [row.rate(row.ms) for row in curve], color=f"C{number}", markersize=4, **style)
                    slow, fast = ([row.rate(ms) for row, ms in zip(curve, times, strict=True)] for times in spread(curve))
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


def spread(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [row.ms_p80 for row in rows], [row.ms_p20 for row in rows]


def baseline_curves(rows: Iterable[Row], shapes: Shapes, xs: list[str]) -> dict[str, tuple[list[int], list[float]]]:
    """By family of ours: where, and how many TFLOP/s it reached at the points that its rows are compared with."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.percent_of_baseline is not None:
            found.setdefault(family_of(row.provider), {})[xs.index(shapes.x(row))] = 100 * row.tflops / row.percent_of_baseline
    return {name: (list(points), list(points.values())) for name, points in found.items()}

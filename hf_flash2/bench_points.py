"""The problems of `hf-flash2 bench attention`, in named sets, and how a figure shows each set."""

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .bench_shared import ragged_lengths

# Matrix products over the head dim of q and k (S; in the backward S, dQ, dK) and over that of v (O; in the backward dP, dV).
PRODUCTS_OF_MODE = {"fwd": (1, 1), "bwd": (3, 2), "fwd+bwd": (4, 3)}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MULTIPROCESSORS, QUERY_ROWS = 132, 128  # of an H200; of a block
WORK_TOLERANCE = 0.15  # between a ragged batch and the dense one that it stands beside
FLASH_HEAD_DIM = 256  # the most that torch's flash and cuDNN kernels take


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
        if self.window is not None:
            return "window"
        return "wide" if max(self.head_dims) > FLASH_HEAD_DIM else "dense"

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
    return _grid(args, "papers", args.mode, (64, 128, 256), seqlens(args, 512, 16384))


def wide(args: argparse.Namespace) -> Iterator[Point]:
    return _grid(args, "wide", args.mode, (512,), args.seqlen or (1024, 4096, 16384))


def _grid(args: argparse.Namespace, shapes: str, modes: Sequence[str], head_dims: Sequence[int], seqlens: Sequence[int]) -> Iterator[Point]:
    """A length that does not divide the tokens gets the batch below."""
    for mode, head_dim, causal, seqlen in itertools.product(modes, args.head_dim or head_dims, masks(args, (False, True)), seqlens):
        batch, heads = max(1, (args.tokens or 16384) // seqlen), max(1, args.hidden_size // head_dim)
        yield Point(shapes, mode, args.dtype, head_dim, causal, seqlen, (seqlen,) * batch, heads, heads)


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
        equal_work = length_of_equal_work(lengths)
        common = ("ragged", mode, args.dtype, head_dim, causal)
        dense = Point(*common, equal_work, (equal_work,) * batch, heads, heads, only_ours=True)
        yield dense
        yield Point(*common, seqlen, lengths, heads, heads, baseline=dense)


def length_of_equal_work(lengths: Sequence[int]) -> int:
    """Of a dense batch of as many sequences, whose scores are as many to 15 %: of the fullest tiles of 128, 64, ... rows, which are what a
    dense batch does best, that come so near. (Of short sequences a tile of 128 rows each would be several times the work.)"""
    mean_square = sum(n * n for n in lengths) / len(lengths)
    for rows in (QUERY_ROWS >> halved for halved in range(QUERY_ROWS.bit_length())):
        length = max(rows, round(mean_square**0.5 / rows) * rows)
        if abs(length**2 / mean_square - 1) <= WORK_TOLERANCE:
            break
    return length


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
    panel: Callable[[Any], str]  # title of the column of panels, from a measurement (bench_attention.Row)
    x: Callable[[Any], str]
    x_label: str
    baseline: str = ""  # what ours is compared with
    rate: str = "TFLOP/s"  # or GB/s
    joined: Callable[[Any], Any] = lambda row: None  # what neighbours on a curve have in common; else it is interrupted


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
        decode, lambda row: f"{row.queries} {'query' if row.queries == 1 else 'queries'}, {row.heads} / {row.heads_k} x {row.head_dim}",
        lambda row: f"{row.batch} x {short(row.seqlen)}", "batch x keys", rate="GB/s", joined=lambda row: row.seqlen,
    ),
    "mla": Shapes(
        mla, lambda row: f"{row.heads} heads of {row.head_dim}, v {row.head_dim_v}", lambda row: short(row.seqlen), "sequence length"
    ),
    "wide": Shapes(wide, lambda row: f"head dim {row.head_dim}", lambda row: short(row.seqlen), "sequence length"),
    "dropout": Shapes(
        dropout, lambda row: f"head dim {row.head_dim}, dropout {row.dropout:g}", lambda row: short(row.seqlen),
        "sequence length", "without dropout",
    ),
}  # fmt: skip

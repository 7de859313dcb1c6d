"""What `hf-flash2 bench attention` times: our kernels, torch's, FlashAttention-4 and eager attention, each at a given problem."""

import ctypes
import importlib.util
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import native, packing
from .bench_points import DTYPES, Point
from .functional import flash_attn_func, flash_attn_ranges_func, flash_attn_varlen_func
from .kvcache import flash_attn_with_kvcache

OURS, SDPA, VARLEN, FA4, EAGER = "hf_flash2", "sdpa", "torch varlen_attn", "flash-attn 4", "eager"
PAGE_SIZE = 256  # tokens, as Transformers' continuous batching has it


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
        return packing.padded_batch(self.real, self.point.seqlen, same_tokens=self.point.causal)

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
        Provider(f"{SDPA} efficient", partial(sdpa, SDPBackend.EFFICIENT_ATTENTION), ("wide",)),
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
    return Provider(EAGER, eager, ("dense", "ragged", "window", "wide", "decode", "decode, mask", "dropout"))


def our_kernels(name: str, family: str, with_deterministic: bool, library: ctypes.CDLL | None = None) -> list[Provider]:
    """Our kernels of a family, of our library or another build."""
    providers = [
        Provider(f"{name} {family}", dense, ("dense", "window", "wide", "decode", "decode, mask", "dropout"), family, library),
        Provider(f"{name} {family} padded", padded, ("ragged",), family, library),
        Provider(f"{name} {family} packed", packed, ("ragged",), family, library),
        Provider(f"{name} {family} paged", paged, ("decode", "decode, mask"), family, library),
    ]
    if with_deterministic:
        prepare = partial(dense, deterministic=True)
        providers.append(
            Provider(f"{name} {family} deterministic", prepare, ("dense", "window", "wide"), family, library, only_backward=True)
        )
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

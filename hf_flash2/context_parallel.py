"""Attention over sequences that several processes share: torch's context parallelism, as accelerate starts it.

Inside `torch.distributed.tensor.experimental.context_parallel(mesh, buffers=...)` each process has a part of every sequence, and torch has
a function of its own in the place of `F.scaled_dot_product_attention`, which brings the parts together. Any other attention would see the
keys of its own process alone, so ours asks here. Keys and values of all processes are gathered, and each chunk of queries attends to them
up to its own end: no score is computed that causality hides, no partial results have to be merged, and windows, sinks, caps and dropout
are what they are on one GPU. Gathering in place of a ring: Grattafiori et al., The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.2.

The gathered keys and values, [B, S, Hk, D + Dv] of each layer, are kept for its backward; under gradient checkpointing, of one layer at a
time.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from .functional import flash_attn_func

_PLAIN = torch._C._nn.scaled_dot_product_attention
_THEIR_PACKAGE = "torch.distributed.tensor.experimental"


class Shards(NamedTuple):
    """How the tokens of a sequence lie on the processes of a group."""

    group: "dist.ProcessGroup"
    rank: int
    size: int
    balanced: bool  # in 2 n chunks, of which process r has r and 2 n - 1 - r, as equal causal work; else in n, and process r has r

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """The chunks of a process, in its order."""
        return (rank, 2 * self.size - 1 - rank) if self.balanced else (rank,)

    @property
    def chunks(self) -> tuple[int, ...]:
        return self.chunks_of(self.rank)

    @property
    def order(self) -> list[int]:
        """The chunks of all processes, one process after another."""
        return [chunk for rank in range(self.size) for chunk in self.chunks_of(rank)]

    def chunk_tokens(self, tokens: int) -> int:
        """The length of a chunk, where this process has so many tokens. Raises ValueError where they make no whole chunks."""
        if tokens % len(self.chunks):
            raise ValueError(
                f"context parallelism cuts a sequence into {2 * self.size} chunks, two for each process, but this one has {tokens} tokens; "
                f"pad sequences to a multiple of {2 * self.size}"
            )
        return tokens // len(self.chunks)

    def positions(self, tokens: int, device: torch.device) -> torch.Tensor:
        """int64 [tokens]: which tokens of the sequence this process has."""
        length = self.chunk_tokens(tokens)
        return torch.cat([torch.arange(chunk * length, (chunk + 1) * length, device=device) for chunk in self.chunks])


def active() -> Shards | None:
    """How sequences lie on the processes, inside torch's `context_parallel`; None outside.

    Raises:
        ValueError: it is active, and this torch does not show how.
    """
    function = F.scaled_dot_product_attention
    return None if function is _PLAIN else _read(function)


def _read(function) -> Shards | None:
    module = getattr(function, "__module__", None) or ""
    if not module.startswith(_THEIR_PACKAGE):
        return None  # somebody else's function, which is about SDPA alone
    from torch.distributed.device_mesh import DeviceMesh

    meshes = [cell.cell_contents for cell in function.__closure__ or () if isinstance(cell.cell_contents, DeviceMesh)]
    balanced = getattr(getattr(sys.modules[module], "_cp_options", None), "enable_load_balance", None)
    if len(meshes) != 1 or meshes[0].ndim != 1 or not isinstance(balanced, bool):
        raise ValueError(
            f"context parallelism is active, but torch {torch.__version__} does not show over which processes in a way that hf_flash2 "
            'knows; update hf_flash2, or use attn_implementation="sdpa"'
        )
    group = meshes[0].get_group()
    return Shards(group, dist.get_rank(group), dist.get_world_size(group), balanced)


_verified = WeakTensorKeyDictionary()  # position_ids that were found to be cut -> torch's counter of changes in place


def verify_positions(shards: Shards, position_ids: torch.Tensor) -> None:
    """Look whether position_ids [B, tokens] are those of one sequence a row, cut as the tokens are. Synchronises, once per forward.

    Raises:
        ValueError: they are not: they were not cut, or rows hold padding or several documents, which a cut of the tokens does not show.
    """
    if was_cut(position_ids):
        return
    expected = shards.positions(position_ids.shape[1], position_ids.device)
    wrong = (position_ids != expected).nonzero()
    if wrong.numel():
        row, column = wrong[0].tolist()
        raise ValueError(
            f"under context parallelism position_ids have to be 0, 1, 2, ... of each whole sequence, cut as input_ids are: token {column} "
            f"of process {shards.rank} is number {int(expected[column])} of its sequence, but has position "
            f"{int(position_ids[row, column])}; pass torch.arange(S).expand(B, S) as position_ids and among the buffers of "
            "context_parallel. Padding on the left and several documents in a row are not supported there"
        )
    _verified[position_ids] = version_of(position_ids)


def was_cut(position_ids: torch.Tensor | None) -> bool:
    """Whether `verify_positions` has seen this tensor as it is now."""
    if not _verified or not isinstance(position_ids, torch.Tensor) or position_ids not in _verified:
        return False
    return _verified[position_ids] == version_of(position_ids)


def version_of(x: torch.Tensor) -> int | None:
    """torch's counter of changes in place, which tensors of torch.inference_mode do not have: None."""
    return None if x.is_inference() else x._version


def attention(
    shards: Shards, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window_size: tuple[int, int], **options
) -> torch.Tensor:
    """`flash_attn_func` over whole sequences, of which each process has and gets its part.

    Args:
        q: [B, S / n, H, D]; k: [B, S / n, Hk, D]; v: [B, S / n, Hk, Dv] of n processes.
        causal, window_size, options: as of `flash_attn_func`, in positions of the whole sequence.
    Returns:
        out [B, S / n, H, Dv].
    Raises:
        ValueError: queries and keys are not the same tokens, or make no whole chunks.
    """
    tokens = q.shape[1]
    if k.shape[1] != tokens:
        raise ValueError(
            f"under context parallelism queries and keys have to be the same tokens, got {tokens} queries and {k.shape[1]} keys; "
            "without a cache, and not in cross-attention"
        )
    length, whole = shards.chunk_tokens(tokens), tokens * shards.size
    left, right = (window_size[0], 0) if causal else window_size
    # Of each chunk: where the keys end that it sees. Its last query is theirs, or stands so many before.
    ends = [whole if right < 0 else min(whole, (chunk + 1) * length + right) for chunk in shards.chunks]
    gathered = _Gather.apply(shards, ends, k, v)
    outs = []
    for chunk, end, *tensors in zip(shards.chunks, ends, q.split(length, 1), gathered[::2], gathered[1::2], strict=True):
        behind = end - (chunk + 1) * length
        window = (left + behind if left >= 0 else -1, right - behind if right >= 0 else -1)
        outs.append(flash_attn_func(*tensors, window_size=window, **options))
    return torch.cat(outs, 1)


class _Gather(torch.autograd.Function):
    """k and v of all processes in the order of the sequence, [B, S, ...], once for each chunk of this one, up to the end that it sees. The
    gradients of all processes are added in float32."""

    @staticmethod
    def forward(ctx, shards: Shards, ends: list[int], k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wholes = _gather(shards, k, v)
        ctx.shards, ctx.ends, ctx.wholes = shards, ends, [(whole.shape, whole.dtype) for whole in wholes]
        ctx.set_materialize_grads(False)
        return tuple(whole[:, :end] for end in ends for whole in wholes)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor | None):
        parts = [_add_up(shape, ctx.ends, gradients[i::2], dtype) for i, (shape, dtype) in enumerate(ctx.wholes)]
        return None, None, *(part.to(dtype) for part, (_, dtype) in zip(_scatter(ctx.shards, *parts), ctx.wholes, strict=True))


def _gather(shards: Shards, *parts: torch.Tensor) -> list[torch.Tensor]:
    """[B, S / n, ...] -> [B, S, ...]"""
    all_gather = _collective("all_gather_single", "all_gather_into_tensor")
    gathered = [part.new_empty((shards.size, *part.shape)) for part in parts]
    work = [
        all_gather(whole.flatten(0, 1), part.contiguous(), shards.group, async_op=True) for whole, part in zip(gathered, parts, strict=True)
    ]
    wholes = []
    for whole, pending in zip(gathered, work, strict=True):
        pending.wait()
        chunks = dict(zip(shards.order, (chunk for part in whole for chunk in part.chunk(len(shards.chunks), 1)), strict=True))
        wholes.append(torch.cat([chunks[number] for number in range(len(chunks))], 1))
    return wholes


def _add_up(shape: torch.Size, ends: list[int], gradients: tuple[torch.Tensor | None, ...], dtype: torch.dtype) -> torch.Tensor:
    """[B, S, ...] of gradients that begin with the sequence and end at `ends`."""
    device = next(x.device for x in gradients if x is not None)
    total = torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32), device=device)
    for end, gradient in zip(ends, gradients, strict=True):
        if gradient is not None:
            total[:, :end] += gradient
    return total


def _scatter(shards: Shards, *wholes: torch.Tensor) -> list[torch.Tensor]:
    """[B, S, ...] -> [B, S / n, ...], the sum over all processes of this one's part."""
    reduce_scatter = _collective("reduce_scatter_single", "reduce_scatter_tensor")
    parts, work = [], []
    for whole in wholes:
        chunks = whole.chunk(len(shards.order), 1)
        by_rank = torch.cat([chunks[number] for number in shards.order], 1).unflatten(1, (shards.size, -1)).transpose(0, 1).contiguous()
        parts.append(torch.empty_like(by_rank[0]))
        work.append((reduce_scatter(parts[-1], by_rank.flatten(0, 1), group=shards.group, async_op=True), by_rank))
    for pending, _ in work:
        pending.wait()
    return parts


def _collective(name: str, before: str) -> Callable:
    """A function of torch.distributed by its name, or what it was called before torch 2.13, which warns about that."""
    return getattr(dist, name, None) or getattr(dist, before)

"""Blocks of tokens that see all of themselves in causal attention, as those of an image do in Gemma 3, or those of a prefix in PaliGemma.

Causal attention has all that a token of a block sees but for what is behind it in the block. That is attention of its own: the tokens of
all blocks are gathered, each query but the last of its block beside each key but the first, so that query i sees key i and those behind it.
By their softmax_lse the two parts become one (Dao et al., FlashAttention, arXiv 2205.14135, section 3.1: the decomposition of softmax), and
with the softmax_lse of both, each part's backward is that of its keys.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from . import ops
from .functional import check_batch, check_packed, prepare


class Blocks(NamedTuple):
    """The blocks of a batch [B, S]: what their tokens see behind them."""

    queries: tuple[torch.Tensor, torch.Tensor]  # int64 [T], row and column of tokens, one block after another: all of a block but its last
    keys: tuple[torch.Tensor, torch.Tensor]  # all of a block but its first
    cu_seqlens: torch.Tensor  # int32 [blocks + 1]
    max_seqlen: int


def find(block_ids: torch.Tensor, sequences: torch.Tensor, real: torch.Tensor) -> Blocks | None:
    """The blocks of a batch, or None where no token sees one behind it. Synchronises with the host.

    Args:
        block_ids: integer [B, S]: real tokens of a sequence with the same number, 0 or more, are a block, wherever they are.
        sequences: integer [B, S], numbers of the sequences that tokens belong to.
        real: bool [B, S], False = padding, which is in no block.
    """
    tokens = (real & (block_ids >= 0)).flatten().nonzero().flatten()
    if tokens.numel() == 0:
        return None
    ids, sequences = (x.flatten()[tokens].long() for x in (block_ids, sequences))
    numbers, order = (sequences * (ids.max() + 1) + ids).sort(stable=True)
    tokens = tokens[order]
    same = numbers[1:] == numbers[:-1]
    lengths = F.pad(torch.unique_consecutive(numbers, return_counts=True)[1] - 1, (1, 0))
    longest = int(lengths.max())
    if longest == 0:
        return None
    queries, keys = ((x // real.shape[1], x % real.shape[1]) for x in (tokens[:-1][same], tokens[1:][same]))
    return Blocks(queries, keys, lengths.cumsum(0, dtype=torch.int32), longest)


def longest(block_ids: torch.Tensor) -> int:
    """The most tokens from the first of a block to its last, as numbers int [B, S] have them; 0 without any. Synchronises with the host."""
    rows, columns = block_ids.shape
    if block_ids.numel() == 0:
        return 0
    size = int(block_ids.max()) + 1
    if size <= 0:
        return 0
    column = torch.arange(columns, device=block_ids.device).expand(rows, columns)
    number = torch.where(block_ids < 0, size, block_ids.long())
    first = torch.full((rows, size + 1), columns, device=block_ids.device).scatter_reduce(1, number, column, "amin")
    last = torch.full((rows, size + 1), -1, device=block_ids.device).scatter_reduce(1, number, column, "amax")
    return max(0, int((last - first + 1)[:, :size].max()))


def behind(block_ids: torch.Tensor) -> torch.Tensor:
    """bool [B, S, S]: whether a key is behind a query, in its block, by their numbers [B, S]."""
    same = (block_ids[:, :, None] == block_ids[:, None, :]) & (block_ids[:, :, None] >= 0)
    return same.triu(1)


def attention(
    blocks: Blocks,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    documents: tuple[torch.Tensor, torch.Tensor, int, int] | None = None,
    ranges: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor] | None = None,
    **options: Any,
) -> torch.Tensor:
    """Causal attention in which the tokens of a block see all of it. Differentiable.

    Args:
        q: [B, S, H, D]; k, v: [B, S, Hk, D].
        documents: of the flattened batch, what `flash_attn_varlen_func` takes; or ranges, what `flash_attn_ranges_func` takes.
        options: dropout_p, softmax_scale, causal, window_size, softcap, deterministic and s_aux as of these; causal is True. A window does
            not hide what is behind a token in its block.
    Returns:
        out [B, S, H, Dv].
    """
    shape = q.shape[:2]
    if documents is None:
        check, tensors, layout = check_batch, (q, k, v), (*(ranges or (None, None, None)), None, None)
    else:
        cu_seqlens_q, cu_seqlens_k, *longest = documents
        check, tensors, layout = check_packed, tuple(x.flatten(0, 1) for x in (q, k, v)), (cu_seqlens_q, cu_seqlens_k, None, *longest)
    numbers = [options[name] for name in ("dropout_p", "softmax_scale", "causal", "window_size", "softcap")]
    *tensors, sequences, plan, values, padded = prepare(
        check, *tensors, *layout, *numbers, None, options["deterministic"], options["s_aux"]
    )
    first = ops.Dispatched(values) if plan is None else plan
    behind = ops.Dispatched((blocks.max_seqlen, blocks.max_seqlen, first.numbers[2], 0, -1, *first.numbers[5:]))
    rng_state = None if sequences[3] is None else sequences[3].flip(0)  # another mask of dropout
    parts = _Parts(first, behind, shape, blocks, rng_state)
    out = _InParts.apply(parts, *tensors, sequences[4], sequences)
    out = out if out.dim() == 4 else out.unflatten(0, shape)
    return out[..., :padded] if padded else out


class _Parts(NamedTuple):
    first: ops.Plan | ops.Dispatched  # causal
    behind: ops.Dispatched  # what is behind in blocks
    shape: torch.Size  # B, S
    blocks: Blocks
    rng_state: torch.Tensor | None  # of the second


class _InParts(torch.autograd.Function):
    """Both parts as one function: the gradients of the second are added where its tokens are."""

    jvp = staticmethod(ops.refuse_jvp)

    @staticmethod
    def forward(ctx, parts: _Parts, q, k, v, sinks, sequences):
        out, softmax_lse = parts.first.forward(q, k, v, sequences)
        of_blocks = _gathered(parts, q, k, v)
        late, lse_late = parts.behind.forward(*of_blocks, _sequences_behind(parts))
        at = parts.blocks.queries
        rows, lse_rows = _by_token(parts, out), _lse_by_token(parts, softmax_lse)
        early, lse_early, lse_late = rows[at], lse_rows[at], lse_late.transpose(0, 1)
        share = torch.sigmoid(lse_late - lse_early).unsqueeze(-1)
        exact = torch.promote_types(out.dtype, torch.float32)
        rows[at] = torch.lerp(early.to(exact), late.to(exact), share.to(exact)).to(out.dtype)
        lse_rows[at] = torch.logaddexp(lse_early, lse_late)
        ctx.save_for_backward(q, k, v, out, softmax_lse, *sequences)
        ctx.parts = parts
        return out

    @staticmethod
    def backward(ctx, dout):
        parts = ctx.parts
        q, k, v, out, softmax_lse, *sequences = ctx.saved_tensors
        dq, dk, dv, dsinks = parts.first.differentiate(dout, None, q, k, v, out, softmax_lse, sequences)
        at_queries, at_keys = parts.blocks.queries, parts.blocks.keys
        of_blocks = (_by_token(parts, dout)[at_queries], None, *_gathered(parts, q, k, v), _by_token(parts, out)[at_queries])
        lse = _lse_by_token(parts, softmax_lse)[at_queries].transpose(0, 1).contiguous()
        late = parts.behind.differentiate(*of_blocks, lse, _sequences_behind(parts))
        for total, at, part in zip((dq, dk, dv), (at_queries, at_keys, at_keys), late, strict=False):
            rows = _by_token(parts, total)
            rows[at] = rows[at] + part
        return None, dq, dk, dv, None if sequences[4] is None else dsinks, None


def _gathered(parts: _Parts, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of the blocks, [T, H, D] each."""
    queries, keys = parts.blocks.queries, parts.blocks.keys
    return tuple(_by_token(parts, x)[at] for x, at in ((q, queries), (k, keys), (v, keys)))


def _sequences_behind(parts: _Parts) -> tuple:
    return parts.blocks.cu_seqlens, parts.blocks.cu_seqlens, None, parts.rng_state, None


def _by_token(parts: _Parts, x: torch.Tensor) -> torch.Tensor:
    """[B, S, H, D], a view, of that or [B * S, H, D]."""
    return x if x.dim() == 4 else x.unflatten(0, parts.shape)


def _lse_by_token(parts: _Parts, softmax_lse: torch.Tensor) -> torch.Tensor:
    """[B, S, H], a view, of [B, H, S] or [H, B * S]."""
    return softmax_lse.transpose(1, 2) if softmax_lse.dim() == 3 else softmax_lse.unflatten(1, parts.shape).movedim(0, 2)

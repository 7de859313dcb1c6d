"""What `torch.utils.flop_counter.FlopCounterMode` counts for the ops: as for torch's own attention, every pair of a query and a key of its
sequence, seen or masked, two products forward and five backward.
"""

import torch
from torch.utils.flop_counter import register_flop_formula

from . import kvcache, ops  # noqa: F401 - they define them


@register_flop_formula(torch.ops.hf_flash2.flash_attn_forward, get_raw=True)
def forward_flops(q, k, v, seqlens_q, seqlens_k, key_mask, rng_state, sinks, max_seqlen_q, max_seqlen_k, *args, **kwargs) -> int:
    """2 pairs H (D + Dv)."""
    return 2 * _pairs(q, seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k) * (q.shape[-1] + v.shape[-1])


@register_flop_formula(torch.ops.hf_flash2.flash_attn_backward, get_raw=True)
def backward_flops(
    dout, dlse, q, k, v, out, softmax_lse, seqlens_q, seqlens_k, key_mask, rng_state, sinks, max_seqlen_q, max_seqlen_k, *args, **kwargs
) -> int:
    """2 pairs H (3 D + 2 Dv)."""
    return 2 * _pairs(q, seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k) * (3 * q.shape[-1] + 2 * v.shape[-1])


@register_flop_formula(torch.ops.hf_flash2.paged_forward, get_raw=True)
def paged_forward_flops(q, k_cache, v_cache, ranges, block_table, sinks, max_seqlen_k, *args, **kwargs) -> int:
    """As forward_flops, of the tokens that the sequences have in the cache."""
    return 2 * _pairs(q, None, ranges, q.shape[1], max_seqlen_k) * (q.shape[-1] + v_cache.shape[-1])


def _pairs(q, seqlens_q, seqlens_k, max_seqlen_q: int, max_seqlen_k: int) -> int:
    """Pairs of a query and a key, of all query heads. Synchronises with the host; at most as many where lengths cannot be read."""
    batch = q.shape[0] if q.dim() == 4 else seqlens_q.shape[0] - 1
    lengths_q, lengths_k = _lengths(seqlens_q, max_seqlen_q, batch), _lengths(seqlens_k, max_seqlen_k, batch)
    return q.shape[-2] * sum(a * b for a, b in zip(lengths_q, lengths_k, strict=True))


def _lengths(seqlens, most: int, batch: int) -> list[int]:
    if seqlens is None or seqlens.is_meta or type(seqlens) is not torch.Tensor:
        return [most] * batch
    return (seqlens.diff() if seqlens.dim() == 1 else seqlens[1]).tolist()

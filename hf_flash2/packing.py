"""Where each sequence of a batch starts and ends: from a 2-D mask, from position_ids, from a cache. Pure tensors, no Transformers.

A left- or right-padded batch needs no copy: each sequence is a (start, length) range of its row, and the kernels run on the ranges as they
run on packed sequences. Nothing here reads a value back to the host unless its docstring says so.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from . import tracing


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """The sequences of a padded batch, in the form `flash_attn_ranges_func` takes them."""

    ranges_q: torch.Tensor | None  # int32 [2, B]: start, length among the query rows; None = all rows
    ranges_k: torch.Tensor  # int32 [3, B]: start, length, and whether key_mask has to be read
    key_mask: torch.Tensor  # uint8 [B, Sk]


def padded_batch(key_mask: torch.Tensor, seqlen_q: int, q_offset: int | torch.Tensor | None = None, *, same_tokens: bool) -> PaddedBatch:
    """The sequences that a 2-D mask over the keys describes. No host synchronisation.

    Args:
        key_mask: bool [B, Sk], True = a real token.
        seqlen_q: number of query rows Sq.
        q_offset: key column of the first query row; default Sk - Sq (the queries are the last columns, as with a dynamic cache). A static
            cache has empty slots behind the queries: pass how many tokens it held before. An int or a 0-d tensor.
        same_tokens: queries and keys are the same tokens, in order, as where attention is causal: padded query rows are left out, and keys
            behind the last query are not visible. False for encoders and cross-attention, where every query row is computed.

    The range of a sequence spans its first to its last real key; padding in between ("holes") is what key_mask is kept for. The last query
    row of a range lies at the last key of its range, so that bottom-right alignment is exact for any kind of padding.
    """
    seqlen_k = key_mask.shape[1]
    if q_offset is None:
        q_offset = seqlen_k - seqlen_q
    if same_tokens:
        key_mask = key_mask & (torch.arange(seqlen_k, device=key_mask.device) < q_offset + seqlen_q)
    start, end = real_spans(key_mask)
    length = end - start
    holes = key_mask.sum(1) != length
    ranges_k = torch.stack((start, length, holes)).to(torch.int32)
    ranges_q = None
    if same_tokens:
        start_q = (start - q_offset).clamp(0, seqlen_q)
        end_q = (end - q_offset).clamp(0, seqlen_q)
        ranges_q = torch.stack((start_q, end_q - start_q)).to(torch.int32)
    return PaddedBatch(ranges_q, ranges_k, key_mask.contiguous().to(torch.uint8))


def real_spans(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row of a bool mask [B, S] its first True and what is behind its last, int64 [B] each; 0 and 0 where there is none."""
    batch, seqlen = mask.shape
    if seqlen == 0:  # of no columns there is no least
        none = torch.zeros(batch, dtype=torch.int64, device=mask.device)
        return none, none
    column = torch.arange(seqlen, device=mask.device)
    end = torch.where(mask, column + 1, 0).amax(1)
    return torch.where(mask, column, seqlen).amin(1).minimum(end), end


def documents_from_position_ids(position_ids: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """cu_seqlens (int32 [n + 1]) and the longest length of the documents in rows of position_ids that restart; None for one document a row.

    Args:
        position_ids: integer [B, S]. A document starts with each row and wherever the position is the least of its row again. Another
            that jumps or is repeated, as images and speculative tokens have them, starts none; nor does any where all of a row are the
            same.
    Synchronises with the host once.
    """
    least, most = position_ids.amin(1, keepdim=True), position_ids.amax(1, keepdim=True)
    return documents_from_starts(F.pad((position_ids[:, 1:] == least) & (least != most), (1, 0), value=True))


def documents_from_starts(starts: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """The same from the first tokens of the documents, bool [B, S], True in the first column. The rows are packed one after another.

    While compiling, as where layers are compiled one by one, nobody can look: never None then, and the longest length is that of a row.
    """
    first_tokens = starts.flatten().nonzero().flatten()
    compiling = tracing.is_compiling()
    if compiling:
        torch._check(first_tokens.shape[0] >= 1)  # so that a check of cu_seqlens knows that there is a document
    elif first_tokens.shape[0] == starts.shape[0]:
        return None
    cu_seqlens = F.pad(first_tokens, (0, 1), value=starts.numel()).to(torch.int32)
    return cu_seqlens, starts.shape[1] if compiling else int((cu_seqlens[1:] - cu_seqlens[:-1]).max())


def token_indices(mask: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the real tokens of a bool mask [B, S] with row sums int32 [B] are: indices int64 [T] into the flattened rows, cu_seqlens int32
    [B + 1]. Synchronises with the host."""
    return mask.flatten().nonzero().flatten(), F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def pad_input(packed: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """[T, ...] at `token_indices` of [batch, seqlen, ...], zeros in the padding. Differentiable."""
    padded = packed.new_zeros((batch * seqlen, *packed.shape[1:]))
    return padded.index_copy(0, indices, packed).unflatten(0, (batch, seqlen))

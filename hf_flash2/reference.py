"""Exact attention in plain PyTorch operators: the CPU backend and the oracle of the tests.

Same arguments and results as the CUDA kernels, on any device and dtype. Scores are computed in float32 (float64 for float64 inputs) and
materialised, so memory grows with Sq * Sk. Math: Dao, FlashAttention-2 (arXiv 2307.08691), section 2 and algorithm 2 for the backward.
"""

import functools
import math
from collections.abc import Callable

import torch

_PHILOX_ROUNDS = 7  # as in csrc/device/philox.cuh
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK32 = 0xFFFFFFFF


def _without_autocast(function: Callable) -> Callable:
    """A function whose products stay in the dtype of their factors. NOTE: torch.autocast holds inside of operators, too, and would round
    float32 there; a backward, which mostly runs outside of it, would compute other scores than softmax_lse is of."""

    @functools.wraps(function)
    def exact(x: torch.Tensor, *args):
        with torch.autocast(x.device.type, enabled=False):
            return function(x, *args)

    return exact


@_without_autocast
def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seqlens_q: torch.Tensor | None,
    seqlens_k: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    rng_state: torch.Tensor | None,
    sinks: torch.Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    dropout_p: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and softmax_lse of attention; shapes and meaning as in `hf_flash2.ops.forward`."""
    compute = _compute_dtype(q)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    *batch, tokens, heads, _ = q.shape
    lse = torch.full((*batch, heads, tokens), math.inf, dtype=torch.float32, device=q.device)
    for s in _sequences(q, k, seqlens_q, seqlens_k, key_mask):
        scores = _scores(s, s.take(q, s.q_rows), s.take(k, s.k_rows), compute, softmax_scale, window_left, window_right, softcap)
        row_lse = _row_lse(scores, sinks)
        probs = _probabilities(scores, row_lse)
        if dropout_p > 0:
            keep = _keep(s, rng_state, probs, dropout_p)
            probs = probs * keep / (1 - dropout_p)
        value = _grouped_keys(s.take(v, s.k_rows)).to(compute)
        s.put(out, s.q_rows, _ungroup(probs @ value))
        s.put_lse(lse, row_lse.masked_fill(row_lse == -math.inf, math.inf).flatten(-3, -2))
    return out, lse


@_without_autocast
def attention_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    seqlens_q: torch.Tensor | None,
    seqlens_k: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    rng_state: torch.Tensor | None,
    sinks: torch.Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    dropout_p: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """dq, dk, dv by recomputation: dS = P * (dP - delta), delta = rowsum(dout * out) - dlse; and dsinks, None without sinks: a score that
    has no value, so dP = 0."""
    compute = _compute_dtype(q)
    dq, dk, dv = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    dsinks = None if sinks is None else torch.zeros_like(sinks, dtype=compute)
    for s in _sequences(q, k, seqlens_q, seqlens_k, key_mask):
        heads_k = k.shape[-2]
        qs, ks, vs = s.take(q, s.q_rows), s.take(k, s.k_rows), s.take(v, s.k_rows)
        scores = _scores(s, qs, ks, compute, softmax_scale, window_left, window_right, softcap)
        row_lse = _regroup(s.take_lse(softmax_lse), heads_k)
        if compute == torch.float64:
            row_lse = _without_rounding(row_lse, _row_lse(scores, sinks))
        probs = _probabilities(scores, row_lse)
        do = _group(s.take(dout, s.q_rows), heads_k).to(compute)
        delta = (do * _group(s.take(out, s.q_rows), heads_k).to(compute)).sum(-1, keepdim=True)
        if dlse is not None:
            delta = delta - _regroup(s.take_lse(dlse), heads_k).to(compute).unsqueeze(-1)
        dprobs = do @ _grouped_keys(vs).to(compute).transpose(-1, -2)
        dropped = probs
        if dropout_p > 0:
            keep = _keep(s, rng_state, probs, dropout_p)
            dropped, dprobs = probs * keep / (1 - dropout_p), dprobs * keep / (1 - dropout_p)
        dscores = probs * (dprobs - delta) * softmax_scale
        if softcap > 0:  # 1 - tanh^2; masked scores, which are infinite, have no gradient
            dscores = dscores * (1 - (scores.masked_fill(scores.isinf(), 0.0) / softcap).square())
        s.put(dq, s.q_rows, _ungroup(dscores @ _grouped_keys(ks).to(compute)))
        # the query heads of a group share one key head: their gradients add up
        s.put(dk, s.k_rows, (dscores.transpose(-1, -2) @ _group(qs, heads_k).to(compute)).sum(-3).transpose(-2, -3))
        s.put(dv, s.k_rows, (dropped.transpose(-1, -2) @ do).sum(-3).transpose(-2, -3))
        if sinks is not None:
            of_rows = _probabilities(_beside(sinks, row_lse), row_lse).masked_fill(row_lse.isinf().unsqueeze(-1), 0.0) * delta
            dsinks -= of_rows.sum((0, -2, -1)).flatten()
    return dq, dk, dv, None if sinks is None else dsinks.to(sinks.dtype)


def dropout_keep_mask(rng_state: torch.Tensor, batch: range, heads: int, seqlen_q: int, seqlen_k: int, dropout_p: float) -> torch.Tensor:
    """The dropout mask of the CUDA kernels, bool [len(batch), heads, Sq, Sk], True = kept.

    Two Philox 4x32-7 calls. One, keyed by the seed, with counter (pair, offset), gives each pair of rows (row % 8 // 2) and columns (col %
    8 // 2) a stream of four words. One without key, with counter stream ^ (row block, column block, batch * heads + head, 0), gives the
    bits of 16 elements of a 16 x 16 block of scores: a word by row % 2 and col % 2, of which row // 8 % 2 and col // 8 % 2 say the lower
    of two adjacent bytes, read as a number in fp16. Rows and columns count from the start of the sequence. See
    csrc/attention/dropout.cuh.
    """
    device = rng_state.device
    row = torch.arange(seqlen_q, device=device).view(-1, 1)
    col = torch.arange(seqlen_k, device=device).view(1, -1)
    b = torch.arange(batch.start, batch.stop, device=device).view(-1, 1, 1, 1)
    bh = b * heads + torch.arange(heads, device=device).view(-1, 1, 1)
    seed, offset = rng_state[0], rng_state[1]
    pair = (row % 8) // 2 * 4 + (col % 8) // 2
    stream = _philox((pair, offset & _MASK32, (offset >> 32) & _MASK32, 0 * pair), (seed & _MASK32, (seed >> 32) & _MASK32))
    words = _philox((stream[0] ^ (row // 16), stream[1] ^ (col // 16), stream[2] ^ bh, stream[3]), (0, 0))
    even, odd = (torch.where(col % 2 == 0, words[i], words[i + 1]) for i in (0, 2))
    word, turn = torch.where(row % 2 == 0, even, odd), (row // 8 % 2 * 2 + col // 8 % 2) * 8
    bits = (word >> turn | word << (32 - turn)).to(torch.int16).view(torch.float16)
    threshold, keeps_few = dropout_threshold(dropout_p)
    return (bits < threshold) == keeps_few


def dropout_threshold(dropout_p: float) -> tuple[float, bool]:
    """An element is dropped, or if True it is kept, when its number in fp16 is below this: p of all 2**16, or 1 - p."""
    p = torch.tensor(dropout_p, dtype=torch.float32).item()  # which the kernels are given
    keeps_few = p > torch.tensor(0.9, dtype=torch.float32).item()
    below = round((1 - p if keeps_few else p) * 2**16)
    bits = 0xFC00 - below if below <= 0x7C00 else max(below - 0x7C01, 1)  # they ascend from -inf to -0, which is 0, and on
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.float16).item(), keeps_few


class _Sequence:
    """One piece of the batch with the same lengths throughout: a single sequence, or the whole batch when it is dense."""

    def __init__(self, batch: range, q_rows: slice, k_rows: slice, packed: bool, key_mask: torch.Tensor | None):
        self.batch, self.q_rows, self.k_rows, self.packed = batch, q_rows, k_rows, packed
        self.key_mask = key_mask  # bool [len(batch), keys] or None

    def _index(self, rows: slice):
        return (rows,) if self.packed else (slice(self.batch.start, self.batch.stop), rows)

    def take(self, x: torch.Tensor, rows: slice) -> torch.Tensor:
        """[len(batch), rows, heads, D]"""
        return x[self._index(rows)].unsqueeze(0) if self.packed else x[self._index(rows)]

    def put(self, x: torch.Tensor, rows: slice, value: torch.Tensor) -> None:
        x[self._index(rows)] = (value.squeeze(0) if self.packed else value).to(x.dtype)

    def take_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """[len(batch), heads, rows]"""
        return lse[:, self.q_rows].unsqueeze(0) if self.packed else lse[self.batch.start : self.batch.stop, :, self.q_rows]

    def put_lse(self, lse: torch.Tensor, value: torch.Tensor) -> None:
        target = lse[:, self.q_rows] if self.packed else lse[self.batch.start : self.batch.stop, :, self.q_rows]
        target.copy_(value.squeeze(0) if self.packed else value)


def _sequences(q, k, seqlens_q, seqlens_k, key_mask):
    if q.dim() == 3:
        bounds_q, bounds_k = seqlens_q.tolist(), seqlens_k.tolist()
        for b in range(len(bounds_q) - 1):
            rows_q, rows_k = slice(bounds_q[b], bounds_q[b + 1]), slice(bounds_k[b], bounds_k[b + 1])
            if rows_q.stop > rows_q.start:
                yield _Sequence(range(b, b + 1), rows_q, rows_k, True, None)
        return
    batch = q.shape[0]
    if seqlens_q is None and seqlens_k is None:
        yield _Sequence(range(batch), slice(0, q.shape[1]), slice(0, k.shape[1]), False, key_mask)
        return
    ranges_q = [(0, q.shape[1])] * batch if seqlens_q is None else list(zip(*seqlens_q[:2].tolist(), strict=True))
    ranges_k = [(0, k.shape[1])] * batch if seqlens_k is None else list(zip(*seqlens_k[:2].tolist(), strict=True))
    for b, ((start_q, length_q), (start_k, length_k)) in enumerate(zip(ranges_q, ranges_k, strict=True)):
        if length_q > 0:
            rows_q, rows_k = slice(start_q, start_q + length_q), slice(start_k, start_k + length_k)
            yield _Sequence(range(b, b + 1), rows_q, rows_k, False, None if key_mask is None else key_mask[b : b + 1, rows_k])


def _compute_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _group(x: torch.Tensor, heads_k: int) -> torch.Tensor:
    """[B, S, H, D] -> [B, Hk, H / Hk, S, D]: query heads by the key head they share"""
    return x.unflatten(2, (heads_k, -1)).permute(0, 2, 3, 1, 4)


def _ungroup(x: torch.Tensor) -> torch.Tensor:
    """[B, Hk, G, S, D] -> [B, S, H, D]"""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _grouped_keys(x: torch.Tensor) -> torch.Tensor:
    """[B, S, Hk, D] -> [B, Hk, 1, S, D]"""
    return x.transpose(1, 2).unsqueeze(2)


def _regroup(lse: torch.Tensor, heads_k: int) -> torch.Tensor:
    """[B, H, S] -> [B, Hk, G, S]"""
    return lse.unflatten(1, (heads_k, -1))


def _scores(s, q, k, compute, softmax_scale, window_left, window_right, softcap):
    """Masked, scaled and capped scores [B, Hk, G, Sq, Sk]"""
    scores = (_group(q, k.shape[2]).to(compute) * softmax_scale) @ _grouped_keys(k).to(compute).transpose(-1, -2)
    if softcap > 0:
        scores = (scores / softcap).tanh() * softcap
    seqlen_q, seqlen_k = scores.shape[-2:]
    diagonal = torch.arange(seqlen_q, device=q.device).view(-1, 1) + (seqlen_k - seqlen_q)
    key = torch.arange(seqlen_k, device=q.device).view(1, -1)
    if window_right >= 0:
        scores = scores.masked_fill(key > diagonal + window_right, -math.inf)
    if window_left >= 0:
        scores = scores.masked_fill(key < diagonal - window_left, -math.inf)
    if s.key_mask is not None:
        scores = scores.masked_fill(~s.key_mask.view(len(s.batch), 1, 1, 1, -1).bool(), -math.inf)
    return scores


def _row_lse(scores, sinks):
    """logsumexp of the scores and, in rows that see a key, of the sink of their head: [B, Hk, G, Sq]"""
    row_lse = scores.logsumexp(dim=-1)
    if sinks is None:
        return row_lse
    return row_lse.logaddexp(_beside(sinks, row_lse).squeeze(-1)).masked_fill(row_lse == -math.inf, -math.inf)


def _without_rounding(stored, own):
    """The softmax_lse of float64 scores: `own`, of which `stored` is the float32; or where that is of more keys than these, its value."""
    return torch.where(own.isinf(), own, own + (stored.to(own.dtype) - own.float().to(own.dtype)))


def _beside(sinks, row_lse):
    """[H] -> [B, Hk, G, Sq, 1]: a score of each row"""
    return sinks.to(row_lse.dtype).view(1, *row_lse.shape[1:3], 1, 1).expand(*row_lse.shape, 1)


def _probabilities(scores, row_lse):
    """exp(scores - lse), with zeros for rows that see no key (lse is then infinite, of either sign)"""
    finite = row_lse.masked_fill(row_lse.isinf(), 0.0).to(scores.dtype)
    return (scores - finite.unsqueeze(-1)).exp()


def _keep(s, rng_state, probs, dropout_p):
    heads_k, group, seqlen_q, seqlen_k = probs.shape[1:]
    return dropout_keep_mask(rng_state, s.batch, heads_k * group, seqlen_q, seqlen_k, dropout_p).unflatten(1, (heads_k, group))


def _philox(counter, key):
    """Philox 4x32 (Salmon et al., SC 2011) on int64 tensors that hold uint32 values."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_PHILOX_ROUNDS):
        hi0, lo0 = _multiply_high_low(c0, _PHILOX_MULTIPLIERS[0])
        hi1, lo1 = _multiply_high_low(c2, _PHILOX_MULTIPLIERS[1])
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _PHILOX_WEYL[0]) & _MASK32, (k1 + _PHILOX_WEYL[1]) & _MASK32
    return c0, c1, c2, c3


def _multiply_high_low(x: torch.Tensor, multiplier: int):
    """High and low 32 bits of the 64-bit product, without leaving int64's positive range"""
    low_part = (x & 0xFFFF) * multiplier
    high_part = (x >> 16) * multiplier + (low_part >> 16)
    return high_part >> 16, ((high_part & 0xFFFF) << 16) | (low_part & 0xFFFF)

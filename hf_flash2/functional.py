"""Attention functions with flash-attn's names and semantics, and one more for padded batches. The docstrings are the specification.

Everything Python-side that a call needs happens here: argument checks that name value, expectation and remedy, defaults, head-dim padding,
the dropout seed. Then the op of ops.py runs on the backend of the tensors' device.

Shared by all functions below:

* q, k, v: float16 or bfloat16 on CUDA; float32, float64, bfloat16 or float16 on CPU. Any strides; those the kernels cannot read (last
  stride not 1, or not multiples of 8 elements) are copied once.
* heads: the number of query heads is a multiple of the number of key heads; query head h reads key head h // (H / Hk). k and v are never
  repeated.
* head dim: up to 512. That of v and out (Dv) may be another one than that of q and k (D). A multiple of 8 runs as it is, another one is
  zero-padded by one copy.
* causal and window: aligned to the bottom-right corner. Query i of a sequence sees key j if
  i + len_k - len_q - left <= j <= i + len_k - len_q + right, where window_size = (left, right), -1 is unlimited and causal means right = 0.
  A row that sees no key gives out 0 and lse +inf.
* dropout_p: applied to the attention probabilities; the mask comes from torch's generator of the device, so `torch.manual_seed` repeats it.
* softmax_scale: default head_dim ** -0.5.
* deterministic: gradients are bit-equal from run to run; `torch.use_deterministic_algorithms(True)` asks for it too.
* s_aux: attention sinks, [H] of any floating dtype (computed in float32): a logit for each query head that takes its part of the softmax of
  every row, exp(s_aux) beside the sum of exp(scores), and adds nothing to out. softmax_lse counts it. As GPT-OSS has them; with a gradient.
* softcap: scores are capped, softcap * tanh(score * softmax_scale / softcap), before any mask, as in Gemma 2; 0.0 caps nothing.
* alibi_slopes, block_table: accepted for flash-attn's signature, refused with ValueError when set. `kvcache` has a cache in pages.
* return_attn_probs: return (out, softmax_lse, None) instead of out. softmax_lse is float32, natural log. (flash-attn's third value, the
  dropped probabilities, exists for its tests only.) On CUDA gradients are made from it, as in every FlashAttention: where it is huge, they
  are off by up to |softmax_lse| * 1e-7, relatively. Scores beyond 1e9 are more than the kernels' float32 holds apart.

Math: Dao, FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning, arXiv 2307.08691.
"""

import numbers
import operator

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from . import native, ops, tracing
from .support import HEAD_DIM_MULTIPLE, reason_unsupported

_MAX_INT32, _MAX_FLOAT32 = 2**31 - 1, torch.finfo(torch.float32).max  # what the kernels are given
_INTEGERS = (int, torch.SymInt)
_NUMBERS = (*_INTEGERS, float, torch.SymFloat)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: torch.Tensor | None = None,
):
    """Attention over a dense batch.

    Args:
        q: [B, Sq, H, D]; k: [B, Sk, Hk, D]; v: [B, Sk, Hk, Dv]. The others: see the module.
    Returns:
        out [B, Sq, H, Dv], or (out, softmax_lse [B, H, Sq], None).
    Raises:
        ValueError: an argument no kernel accepts, with its value and what to do.
    """
    return _attention(
        check_batch, q, k, v, None, None, None, None, None,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, s_aux,
    )  # fmt: skip


def flash_attn_ranges_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ranges_q: torch.Tensor | None = None,
    ranges_k: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: torch.Tensor | None = None,
):
    """Attention over a padded batch, with no copy and no host synchronisation: padding is skipped, not masked.

    Args:
        q: [B, Sq, H, D]; k: [B, Sk, Hk, D]; v: [B, Sk, Hk, Dv].
        ranges_q: int32 [2, B], (start, length) of each sequence among the Sq rows; None = all rows. Rows outside give out 0, lse +inf.
        ranges_k: int32 [2, B] likewise among the Sk keys; [3, B] with key_mask, the third row non-zero where the mask has to be read.
        key_mask: bool or uint8 [B, Sk], non-zero = visible, for padding inside a range ("holes"); needs ranges_k.
        The others: see the module. Causal and window count positions inside the ranges.
    Returns:
        out [B, Sq, H, Dv], or (out, softmax_lse [B, H, Sq], None).
    Raises:
        ValueError: an argument no kernel accepts, with its value and what to do.

    `hf_flash2.packing.padded_batch` makes the three from a 2-D attention mask, with same_tokens=False for cross-attention.
    """
    if isinstance(key_mask, torch.Tensor) and key_mask.dtype == torch.bool:
        key_mask = key_mask.view(torch.uint8)
    return _attention(
        check_batch, q, k, v, ranges_q, ranges_k, key_mask, None, None,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, s_aux,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
):
    """Attention over packed sequences of different lengths: no padding anywhere.

    Args:
        q: [Tq, H, D]; k: [Tk, Hk, D]; v: [Tk, Hk, Dv]: the tokens of all sequences, one after another.
        cu_seqlens_q: int32 [B + 1] on the device of q, cumulative lengths: sequence b is q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]].
        cu_seqlens_k: int32 [B + 1] likewise for k and v. A sequence may be empty on either side.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths (an int, or a tensor with one element, which costs a synchronisation).
            One that is too small leaves results undefined on CUDA, where to look at the lengths would synchronise; on a CPU it is refused.
        The others: see the module.
    Returns:
        out [Tq, H, Dv], or (out, softmax_lse [H, Tq], None). Rows before the first sequence and behind the last are undefined, in the
        gradients of q, k and v, too.
    Raises:
        ValueError: an argument no kernel accepts, with its value and what to do.
    """
    if block_table is not None:
        raise ValueError("block_table is for flash_attn_with_kvcache; this function takes k and v as plain tensors")
    return _attention(
        check_packed, q, k, v, cu_seqlens_q, cu_seqlens_k, None, _integer(max_seqlen_q), _integer(max_seqlen_k),
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, s_aux,
    )  # fmt: skip


def _attention(
    check, q, k, v, seqlens_q, seqlens_k, key_mask, max_seqlen_q, max_seqlen_k,
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, s_aux,
):  # fmt: skip
    """Every function above."""
    q, k, v, sequences, plan, values, padded = prepare(
        check, q, k, v, seqlens_q, seqlens_k, key_mask, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, s_aux,
    )  # fmt: skip
    if plan is not None and not return_attn_probs and not padded and s_aux is None:
        dense = sequences[0] is sequences[1] is sequences[3] is None
        return plan.attention(q, k, v, ops.DENSE if dense else sequences)
    if plan is not None:
        out, softmax_lse = plan.attention_with_lse(q, k, v, sequences)
    elif ops.is_transformed():
        out, softmax_lse = ops.forward_transformed(q, k, v, sequences, values)
    else:
        out, softmax_lse = ops.forward(q, k, v, *sequences, *values)
    if padded:
        out = out[..., :padded]
    return (out, softmax_lse, None) if return_attn_probs else out


def prepare(
    check, q, k, v, seqlens_q, seqlens_k, key_mask, max_seqlen_q, max_seqlen_k,
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, s_aux,
):  # fmt: skip
    """q, k, v and the sequences as the ops take them, the plan of the call, or None and the op's numbers, and v's head dim where out is
    padded, else 0.

    `check` is what a function above asks of its tensors; max_seqlen_q and _k are None for dense ones.

    PERF: on the host of an H200, checking and packing take longer than a short kernel, so what has passed is not checked again: a call is
    looked up by everything that the checks look at. (But for the values of cu_seqlens, which nobody looks at on a GPU.)
    """
    if not isinstance(deterministic, bool) and deterministic is not None and not _is_truth(deterministic):
        raise ValueError(f"deterministic must be True or False, got {deterministic!r}")
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    key, plan, values, padded = None, None, None, 0
    if not tracing.is_compiling() and _on_gpu(q) and ops.plain(q, k, v) and (s_aux is None or _is_plain(s_aux)):
        try:
            key = (
                check, ops.forms(q, k, v, seqlens_q, seqlens_k, key_mask), max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
                *window_size, softcap, alibi_slopes, deterministic, None if s_aux is None else ops.form(s_aux), native.forced_family(),
                *map(type, (max_seqlen_q, max_seqlen_k, *window_size)),  # 5.0 is no integer, though it equals one
            )  # fmt: skip
            plan, padded = ops.plans.get(key, ops.UNKNOWN)
        except (TypeError, AttributeError, RuntimeError):  # not hashable, no pair, no tensor, no sizes: the checks say what is wrong
            key = None
    if plan is None:
        check(q, k, v, seqlens_q, seqlens_k, key_mask)
        if check is check_batch:
            max_seqlen_q, max_seqlen_k = q.shape[1], k.shape[1]
        else:
            _check_bound("max_seqlen_q", max_seqlen_q, seqlens_q)
            _check_bound("max_seqlen_k", max_seqlen_k, seqlens_k)
        scale, window, dropout_p, softcap = check_numbers(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
        if s_aux is not None:
            check_sinks(s_aux, q)
        padded = v.shape[-1] if q.shape[-1] % HEAD_DIM_MULTIPLE or v.shape[-1] % HEAD_DIM_MULTIPLE else 0
    if padded:
        q, k, v = map(_pad_head_dim, (q, k, v))
    if plan is None:
        if scale <= 0:  # the kernels take the row maximum before scaling
            q, scale, key = q * (-1.0 if scale < 0 else 0.0), -scale or 1.0, None
        values = (max_seqlen_q, max_seqlen_k, scale, *window, dropout_p, softcap, deterministic)
        if key is not None and not any(isinstance(x, torch.Tensor) for x in key):  # the value of a tensor may change
            plan = ops.plan(q, k, v, seqlens_q, seqlens_k, key_mask, *values)
            if plan is not None:
                ops.keep(key, plan, padded)
    # Drawn as a tensor on the device: repeatable under manual_seed and checkpointing, capturable, and never a host synchronisation.
    rng_state = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=q.device) if dropout_p > 0 else None
    if s_aux is not None:
        s_aux = cast_sinks(s_aux, q)
    return q, k, v, (seqlens_q, seqlens_k, key_mask, rng_state, s_aux), plan, values, padded


def _on_gpu(x: torch.Tensor) -> bool:
    return isinstance(x, torch.Tensor) and x.is_cuda


def _is_plain(s_aux: torch.Tensor) -> bool:
    return type(s_aux) in (torch.Tensor, torch.nn.Parameter)


def check_are_tensors(**arguments) -> None:
    for name, x in arguments.items():
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.is_nested or x.layout is not torch.strided:
            remedy = "flash_attn_varlen_func on its values()" if x.is_nested else f"{name}.to_dense()"
            kind = "a nested one" if x.is_nested else "one"
            raise ValueError(f"{name} must be a dense tensor, got {kind} of layout {x.layout}; use {remedy}")


def check_numbers(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes) -> tuple:
    """softmax_scale, window_size, dropout_p and softcap as they are meant, once everything but the layout of the sequences has passed."""
    head_dim, head_dim_v = _check_tensors(q, k, v)
    reason = reason_unsupported(q.device.type, q.dtype, max(head_dim, head_dim_v), alibi_slopes=alibi_slopes)
    if reason is not None:
        raise ValueError(reason)
    cap, p, scale = _real(softcap), _real(dropout_p), softmax_scale
    if cap is None or not 0.0 <= cap <= _MAX_FLOAT32:
        raise ValueError(f"softcap must be a finite number, at least 0 (0 does not cap the scores), got {softcap!r}")
    if p is None or not 0.0 <= p < 1.0:
        raise ValueError(f"dropout_p must be a number, at least 0 and below 1, got {dropout_p!r}")
    if isinstance(scale, torch.Tensor):
        if scale.requires_grad or has_tangent(scale):
            raise ValueError("softmax_scale gets no gradient, got a tensor that requires one; detach it, or multiply q with it")
        scale = softmax_scale = scale.item() if scale.numel() == 1 else scale
    scale = head_dim**-0.5 if scale is None else _real(scale)
    if scale is None or not -_MAX_FLOAT32 <= scale <= _MAX_FLOAT32:
        raise ValueError(f"softmax_scale must be one finite number, or None (head_dim ** -0.5), got {softmax_scale!r}")
    if not _is_truth(causal):
        raise ValueError(f"causal must be True or False, got {causal!r}")
    window = [_integer(x) for x in window_size] if isinstance(window_size, (tuple, list)) else []
    if len(window) != 2 or not all(isinstance(x, _INTEGERS) and x >= -1 for x in window):
        raise ValueError(f"window_size must be two integers (left, right), with -1 for unlimited, got {window_size}")
    left, right = (min(x, _MAX_INT32) for x in window)  # some write "no limit" as a huge one
    return scale, (left, 0 if causal else right), p, float(cap)


def check_sinks(s_aux: torch.Tensor, q: torch.Tensor) -> None:
    heads = q.shape[-2]
    if not isinstance(s_aux, torch.Tensor) or not s_aux.is_floating_point() or tuple(s_aux.shape) != (heads,):
        got = f"{s_aux.dtype} {list(s_aux.shape)}" if isinstance(s_aux, torch.Tensor) else type(s_aux).__name__
        raise ValueError(f"s_aux must be a floating-point tensor of shape [{heads}], a sink for each query head, got {got}")
    if s_aux.device != q.device:
        raise ValueError(f"s_aux must be on {q.device}, as q is, got one on {s_aux.device}; move it there")


def cast_sinks(s_aux: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """As the ops take them."""
    return s_aux.to(torch.float64 if q.dtype == torch.float64 else torch.float32).contiguous()


def check_batch(q, k, v, ranges_q, ranges_k, key_mask) -> None:
    given = {"ranges_q": ranges_q, "ranges_k": ranges_k, "key_mask": key_mask}
    check_are_tensors(q=q, k=k, v=v, **{name: x for name, x in given.items() if x is not None})
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(
            f"q, k, v must have 4 dimensions [batch, seqlen, heads, head_dim], got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}; "
            "for packed [tokens, heads, head_dim] tensors use flash_attn_varlen_func"
        )
    batch, seqlen_q, _, _ = q.shape
    batch_k, seqlen_k, _, _ = k.shape
    if not batch == batch_k == v.shape[0]:
        raise ValueError(f"q, k, v must have the same batch size, got {batch}, {batch_k}, {v.shape[0]}")
    if ranges_q is not None:
        _check_ranges("ranges_q", ranges_q, (2,), batch, seqlen_q, q.device)
    if ranges_k is not None:
        _check_ranges("ranges_k", ranges_k, (2, 3) if key_mask is None else (3,), batch, seqlen_k, q.device)
    if key_mask is not None:
        if ranges_k is None:
            raise ValueError("key_mask needs ranges_k [3, B]; hf_flash2.packing.padded_batch makes both from an attention mask")
        if tuple(key_mask.shape) != (batch, seqlen_k) or key_mask.dtype != torch.uint8 or key_mask.stride(-1) != 1:
            raise ValueError(
                f"key_mask must be a bool or uint8 tensor of shape [{batch}, {seqlen_k}] with last stride 1, "
                f"got {key_mask.dtype} {list(key_mask.shape)}, strides {list(key_mask.stride())}"
            )
        if key_mask.device != q.device:
            raise ValueError(f"key_mask must be on {q.device}, as q is, got one on {key_mask.device}")


def check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, _) -> None:
    check_are_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        raise ValueError(
            f"q, k, v must have 3 dimensions [tokens, heads, head_dim], got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}; "
            "for [batch, seqlen, heads, head_dim] tensors use flash_attn_func"
        )
    _check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q)
    _check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, k)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must describe the same number of sequences, got {cu_seqlens_q.shape[0] - 1} and "
            f"{cu_seqlens_k.shape[0] - 1}"
        )


def _pad_head_dim(x: torch.Tensor) -> torch.Tensor:
    missing = -x.shape[-1] % HEAD_DIM_MULTIPLE
    return F.pad(x, (0, missing)) if missing else x


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[int, int]:
    """The head dims of q (and k) and of v, once everything else about the three tensors fits."""
    shape_q, shape_k, shape_v = q.shape, k.shape, v.shape
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}; cast them to one")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v must be on one device, got {q.device}, {k.device}, {v.device}")
    if shape_k != shape_v and shape_k[:-1] != shape_v[:-1]:
        raise ValueError(f"k and v must have the same shape up to the head dim, got {list(shape_k)} and {list(shape_v)}")
    heads_q, head_dim = shape_q[-2:]
    heads_k = shape_k[-2]
    if head_dim != shape_k[-1]:
        raise ValueError(f"q and k must have the same head dim, got {head_dim} and {shape_k[-1]}")
    if head_dim == 0 or shape_v[-1] == 0:
        raise ValueError(f"the head dim must be at least 1, got {head_dim} of q and k, {shape_v[-1]} of v")
    if heads_k == 0 or heads_q % heads_k:
        raise ValueError(f"the number of query heads must be a multiple of the number of key heads, got {heads_q} and {heads_k}")
    return head_dim, shape_v[-1]


def _check_ranges(name: str, ranges: torch.Tensor, rows: tuple[int, ...], batch: int, tokens: int, device: torch.device) -> None:
    if ranges.dtype != torch.int32 or ranges.dim() != 2 or ranges.shape[0] not in rows or ranges.shape[1] != batch:
        shapes = " or ".join(f"[{r}, {batch}]" for r in rows)
        raise ValueError(f"{name} must be an int32 tensor of shape {shapes}, got {ranges.dtype} {list(ranges.shape)}")
    if ranges.device != device or not ranges.is_contiguous():
        raise ValueError(f"{name} must be contiguous and on {device}, got strides {list(ranges.stride())} on {ranges.device}")
    if has_known_values(ranges):
        for start, length in zip(*ranges[:2].tolist(), strict=True):
            if start < 0 or length < 0 or start + length > tokens:
                raise ValueError(f"{name} must hold (start, length) of rows among the {tokens} given, got ({start}, {length})")


def _check_cu_seqlens(name: str, cu_seqlens: torch.Tensor, x: torch.Tensor) -> None:
    if tracing.is_compiling() and cu_seqlens.dim() == 1:
        torch._check(cu_seqlens.shape[0] >= 2)  # no branch on what nonzero() may have made. No message: torch.export traces none
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"{name} must be an int32 tensor of shape [batch + 1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}; "
            "make it with lengths.cumsum(0, dtype=torch.int32) and a leading 0"
        )
    if cu_seqlens.device != x.device or not cu_seqlens.is_contiguous():
        raise ValueError(f"{name} must be contiguous and on {x.device}, got strides {list(cu_seqlens.stride())} on {cu_seqlens.device}")
    if has_known_values(cu_seqlens):
        check_rises(name, cu_seqlens.tolist(), x.shape[0])


def check_rises(name: str, cu_seqlens: list[int], tokens: int) -> None:
    """Raise ValueError unless the bounds of sequences rise, within that many tokens."""
    if cu_seqlens[0] < 0 or cu_seqlens[-1] > tokens or any(a > b for a, b in zip(cu_seqlens, cu_seqlens[1:], strict=False)):
        raise ValueError(f"{name} must rise, from 0 or more to at most the {tokens} tokens given, got {cu_seqlens}")


def _check_bound(name: str, bound: object, cu_seqlens: torch.Tensor) -> None:
    if tracing.is_compiling() and isinstance(bound, _INTEGERS):
        torch._check(bound >= 0)  # likewise: it may come from a tensor, whose values nobody knows
        return
    if not isinstance(bound, _INTEGERS) or bound < 0 or (type(bound) is int and bound > _MAX_INT32):
        raise ValueError(f"{name} must be an integer, an upper bound of the lengths, at most {_MAX_INT32}, got {bound!r}")
    if has_known_values(cu_seqlens):
        values = cu_seqlens.tolist()
        longest = max(b - a for a, b in zip(values, values[1:], strict=False))
        if longest > bound:
            raise ValueError(f"{name} must be at least the longest sequence, {longest}, got {bound}")


def has_tangent(x: torch.Tensor) -> bool:
    """Whether forward-mode differentiation follows it, which torch.no_grad() does not end."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def has_known_values(x: torch.Tensor) -> bool:
    """Where it costs no synchronisation to look at them."""
    return x.device.type == "cpu" and type(x) is torch.Tensor and not tracing.is_compiling() and not ops.is_transformed()


def _is_truth(x: object) -> bool:
    return (not isinstance(x, torch.Tensor) or x.numel() == 1) and x in (True, False)


def _integer(x: object) -> object:
    """x as an int where it is one of numpy's or a tensor that holds one; else as it is, for the checks to refuse."""
    if isinstance(x, _INTEGERS):
        return x
    if isinstance(x, torch.Tensor):
        return x if x.is_floating_point() or x.numel() != 1 else int(x)
    try:
        return operator.index(x)
    except TypeError:
        return x


def _real(x: object) -> object:
    """x as a float where it is a number of another kind, such as numpy's; None where it is none."""
    return x if isinstance(x, _NUMBERS) else float(x) if isinstance(x, numbers.Real) else None

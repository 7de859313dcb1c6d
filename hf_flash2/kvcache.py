"""Attention on a key/value cache, contiguous or in pages, with flash-attn's name and semantics: for decoding, without gradients.

On a GPU a step is two kernels: the new keys and values are written, then attention reads the cache where it lies; or three, where the
keys of few queries are split, or on Hopper there are more tiles than run at a time, which are counted. Nothing is read back to the host, so
that a CUDA graph can hold a step. Pages: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention,
arXiv 2309.06180.
"""

import numbers

import torch

from . import kernels, ops, reference, tracing
from .functional import cast_sinks, check_are_tensors, check_numbers, check_sinks, flash_attn_ranges_func, has_known_values, has_tangent
from .support import HEAD_DIM_MULTIPLE, PAGE_MULTIPLE

_library = torch.library.Library("hf_flash2", "FRAGMENT")
_library.define(
    "append(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor lengths, Tensor? block_table) -> Tensor ranges",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "paged_forward(Tensor q, Tensor k_cache, Tensor v_cache, Tensor ranges, Tensor block_table, Tensor? sinks, SymInt max_seqlen_k, "
    "float softmax_scale, SymInt window_left, SymInt window_right, float softcap) -> (Tensor out, Tensor softmax_lse)",
    tags=torch.Tag.pt2_compliant_tag,
)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | int | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    s_aux: torch.Tensor | None = None,
):
    """Attention over a cache, and before it new keys and values written into the cache, in place.

    Args:
        q: [B, Sq, H, D].
        k_cache: [B, Sk, Hk, D]; with block_table [pages, page_size, Hk, D], page_size a multiple of 128. v_cache: likewise, Dv. On CUDA
            their head dims and strides are multiples of 8 and their addresses of 16 bytes: a cache is never copied.
        k: [B, S, Hk, D], v: [B, S, Hk, Dv], or neither: written behind what the cache has of each sequence, then part of it.
        cache_seqlens: int32 [B] or one number: tokens in the cache before k and v. Needed with k or block_table; None else: all Sk. A
            length below 0 stands for no sequence, its new tokens are not written. Lengths and pages are checked where that waits for no
            device. On a GPU nobody looks at them: new tokens beyond what the cache can hold are not written, and out of such a sequence is
            undefined.
        block_table: int32 [B, pages of the longest]: the pages where a sequence lies, one after the other. Entries behind its last page are
            not read.
        num_splits: of no effect: whether keys are split among thread blocks follows from the shapes.
        softmax_scale: as in `functional`, but positive.
        The others as in `functional`. causal, window: aligned to the last key, new ones included.
    Returns:
        out [B, Sq, H, Dv], or (out, softmax_lse [B, H, Sq]). A sequence without keys gives out 0 and lse +inf.
    Raises:
        ValueError: an argument no kernel accepts, with its value and what to do; rotary_*, cache_batch_idx, cache_leftpad and alibi_slopes,
            which no kernel has; tensors that require a gradient, outside torch.no_grad(); k and v under torch.func.vmap. With
            torch.compile(fullgraph=True), k_cache and v_cache that are views of one buffer, once its shape is dynamic (by default, that
            is from the second one on).
    """
    refused = {
        "rotary_cos": (rotary_cos, "rotate q and k before"), "rotary_sin": (rotary_sin, "rotate q and k before"),
        "cache_batch_idx": (cache_batch_idx, "index the cache before, or use a block_table"),
        "cache_leftpad": (cache_leftpad, "use flash_attn_ranges_func, whose ranges may begin anywhere"),
    }  # fmt: skip
    for name, (argument, remedy) in refused.items():
        if argument is not None:
            raise ValueError(f"{name} is not supported by flash_attn_with_kvcache; {remedy}")
    new = {name: x for name, x in {"k": k, "v": v}.items() if x is not None}
    if new and ops.is_transformed():
        raise ValueError(
            "flash_attn_with_kvcache writes k and v into its cache, which transforms of torch.func (vmap, grad) do not follow; make the "
            "dimension that vmap takes away part of the batch, or write them into the cache before"
        )
    _check_tensors({"q": q, "k_cache": k_cache, "v_cache": v_cache} | new, block_table)
    scale, window, _, softcap = check_numbers(q, k_cache, v_cache, 0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)
    if scale <= 0:
        raise ValueError(f"softmax_scale must be positive, got {scale}; negate q instead")
    if s_aux is not None:
        check_sinks(s_aux, q)
        _check_takes_no_gradient("s_aux", s_aux)
    capacity, new_tokens = kernels.capacity_of(k_cache, block_table), 0 if k is None else k.shape[1]
    if isinstance(cache_seqlens, numbers.Integral):
        _check_fits(0, int(cache_seqlens), new_tokens, capacity)
    elif not tracing.is_compiling() and q.shape[0] > 0:  # what the lengths are, nobody knows on a GPU
        _check_fits(0, 0, new_tokens, capacity)
    lengths = _check_lengths(cache_seqlens, q.shape[0], q.device, needed=k is not None or block_table is not None)
    if lengths is not None and has_known_values(lengths):
        _check_places(lengths.tolist(), new_tokens, capacity, block_table, k_cache)
    if k is not None and k.shape[1] > 0:
        ranges = _OPS[0](k, v, k_cache, v_cache, lengths, block_table)
    elif lengths is not None:
        ranges = _ranges(lengths, capacity)
    else:
        ranges = None
    if block_table is None:
        options = (0.0, scale, causal, window_size, softcap, None, False, return_softmax_lse, s_aux)
        out = flash_attn_ranges_func(q, k_cache, v_cache, None, ranges, None, *options)
        return out[:2] if return_softmax_lse else out
    sinks = None if s_aux is None else cast_sinks(s_aux, q)
    out, softmax_lse = _OPS[1](q, k_cache, v_cache, ranges, block_table, sinks, capacity, scale, *window, softcap)
    return (out, softmax_lse) if return_softmax_lse else out


def _check_tensors(tensors: dict[str, torch.Tensor], block_table: torch.Tensor | None) -> None:
    check_are_tensors(**tensors)
    for name, x in tensors.items():
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions [batch or pages, tokens, heads, head_dim], got {list(x.shape)}")
        _check_takes_no_gradient(name, x)
    q, k_cache, v_cache = tensors["q"], tensors["k_cache"], tensors["v_cache"]
    on_gpu = k_cache.device.type == "cuda"
    is_traced = tracing.is_compiling()  # then a tensor has no address
    for name in ("k_cache", "v_cache"):
        cache = tensors[name]
        fits = cache.shape[-1] % HEAD_DIM_MULTIPLE == 0 and kernels.is_readable(cache)
        if on_gpu and not (fits and (is_traced or kernels.is_aligned(cache))):
            raise ValueError(
                f"the head dim and the strides of {name} must be multiples of {HEAD_DIM_MULTIPLE}, its last stride 1 and its address a "
                f"multiple of 16 bytes, got {list(cache.shape)} with strides {list(cache.stride())}; allocate such a cache once"
            )
    if block_table is None:
        if not q.shape[0] == k_cache.shape[0] == v_cache.shape[0]:
            raise ValueError(f"q and the cache must have the same batch size, got {q.shape[0]}, {k_cache.shape[0]}, {v_cache.shape[0]}")
    else:
        shape = tuple(block_table.shape) if isinstance(block_table, torch.Tensor) else type(block_table).__name__
        fits = isinstance(shape, tuple) and block_table.dtype == torch.int32 and len(shape) == 2 and shape[0] == q.shape[0]
        if not fits or block_table.stride(1) != 1 or block_table.device != q.device:
            raise ValueError(
                f"block_table must be an int32 tensor of shape [{q.shape[0]}, pages of the longest sequence] on {q.device}, its last "
                f"stride 1, got {getattr(block_table, 'dtype', '')} {shape}"
            )
        if k_cache.shape[1] == 0 or k_cache.shape[1] % PAGE_MULTIPLE:
            raise ValueError(f"pages must hold a multiple of {PAGE_MULTIPLE} tokens, got {k_cache.shape[1]}; 256 is usual")
    if ("k" in tensors) != ("v" in tensors):
        raise ValueError("k and v come together, got one of them")
    if "k" not in tensors:
        return
    for name, cache in (("k", k_cache), ("v", v_cache)):
        new = tensors[name]
        expected = (q.shape[0], tensors["k"].shape[1], *cache.shape[2:])
        if tuple(new.shape) != expected or new.dtype != cache.dtype or new.device != cache.device:
            raise ValueError(
                f"{name} must be {list(expected)} in {cache.dtype} on {cache.device}, like {name}_cache, "
                f"got {list(new.shape)} in {new.dtype} on {new.device}"
            )


def _check_takes_no_gradient(name: str, x: torch.Tensor) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"flash_attn_with_kvcache has no gradient, and {name} requires one; call it under torch.no_grad()")
    if has_tangent(x):
        raise ValueError(f"flash_attn_with_kvcache has no derivative, and {name} has a tangent; unpack it before")


def _check_lengths(cache_seqlens, batch: int, device: torch.device, needed: bool) -> torch.Tensor | None:
    """cache_seqlens as int32 [B]."""
    if cache_seqlens is None:
        if needed:
            raise ValueError("cache_seqlens must be given with k and v or a block_table: int32 [B], the tokens in the cache so far")
        return None
    if isinstance(cache_seqlens, numbers.Integral) and not isinstance(cache_seqlens, bool):  # of numpy, too
        return torch.full((batch,), max(cache_seqlens, -1), dtype=torch.int32, device=device)
    is_tensor = isinstance(cache_seqlens, torch.Tensor)
    if not is_tensor or cache_seqlens.dtype != torch.int32 or tuple(cache_seqlens.shape) != (batch,) or cache_seqlens.device != device:
        got = f"{cache_seqlens.dtype} {list(cache_seqlens.shape)} on {cache_seqlens.device}" if is_tensor else repr(cache_seqlens)
        raise ValueError(f"cache_seqlens must be an int or an int32 tensor of shape [{batch}] on {device}, got {got}")
    return cache_seqlens.contiguous()


def _check_fits(sequence: int, length: int, new: int, capacity: int) -> None:
    if length >= 0 and length + new > capacity:
        raise ValueError(
            f"cache_seqlens and new tokens must be at most the {capacity} tokens that the cache holds of a sequence, got {length} and "
            f"{new} for sequence {sequence}; allocate a longer cache"
        )


def _check_places(lengths: list[int], new: int, capacity: int, block_table: torch.Tensor | None, k_cache: torch.Tensor) -> None:
    """That there are places for the tokens of every sequence, and that those are pages of this cache."""
    pages, page_size = k_cache.shape[:2]
    for sequence, length in enumerate(lengths):
        _check_fits(sequence, length, new, capacity)
        if block_table is None or length < 0:
            continue
        for page in block_table[sequence, : -(-(length + new) // page_size)].tolist():
            if not 0 <= page < pages:
                raise ValueError(f"block_table must hold numbers of the {pages} pages there are, got {page} for sequence {sequence}")


def _ranges(lengths: torch.Tensor, capacity: int) -> torch.Tensor:
    """(0, length) of each sequence, [2, B]"""
    return torch.stack((torch.zeros_like(lengths), lengths.clamp(0, capacity)))


def _append_cpu(k, v, k_cache, v_cache, lengths, block_table):
    seqlen, page_size, capacity = k.shape[1], k_cache.shape[1], kernels.capacity_of(k_cache, block_table)
    keys = lengths.long()[:, None] + torch.arange(seqlen, device=k.device)
    sequences, tokens = ((lengths >= 0)[:, None] & (keys < capacity)).nonzero(as_tuple=True)
    places = keys[sequences, tokens]
    pages = sequences if block_table is None else block_table.long()[sequences, places // page_size]
    for new, cache in ((k, k_cache), (v, v_cache)):
        cache[pages, places % page_size] = new[sequences, tokens]
    return _ranges(torch.where(lengths < 0, 0, lengths.clamp(max=capacity) + seqlen), capacity)


def _append_fake(k, v, k_cache, v_cache, lengths, block_table):
    offsets = {"k_cache": k_cache.storage_offset(), "v_cache": v_cache.storage_offset()}
    unknown = [name for name, x in offsets.items() if isinstance(x, torch.SymInt) and x.node.maybe_as_int() is None]
    if unknown and k_cache.untyped_storage()._cdata == v_cache.untyped_storage()._cdata:
        raise ValueError(
            f"k_cache and v_cache are views of one buffer, and {unknown[-1]} begins at an offset unknown while compiling, "
            f"{offsets[unknown[-1]]}, where torch's inductor writes to another place (pytorch/pytorch#198068); allocate the two apart, or "
            "compile with dynamic=False"
        )
    return lengths.new_empty(2, lengths.shape[0])


def _paged_forward_cuda(q, k_cache, v_cache, ranges, block_table, sinks, max_seqlen_k, softmax_scale, window_left, window_right, softcap):
    q = kernels.readable(q)
    numbers = (q.shape[1], max_seqlen_k, softmax_scale, window_left, window_right, 0.0, softcap, False)
    plan = ops.plan_of(q, k_cache, v_cache, None, ranges, None, numbers, block_table)
    return plan.forward(q, k_cache, v_cache, (None, ranges, None, None, sinks, block_table))


def _paged_forward_cpu(q, k_cache, v_cache, ranges, block_table, sinks, max_seqlen_k, softmax_scale, window_left, window_right, softcap):
    pages = block_table.long().clamp(0, max(k_cache.shape[0] - 1, 0))  # entries that no length reaches may be anything
    keys, values = (cache[pages].flatten(1, 2) for cache in (k_cache, v_cache))
    ops.note_reference()
    return reference.attention_forward(
        q, keys, values, None, ranges, None, None, sinks, softmax_scale, window_left, window_right, 0.0, softcap
    )


def _paged_forward_fake(q, k_cache, v_cache, *_):
    return q.new_empty(ops.out_shape(q, v_cache)), q.new_empty(ops.lse_shape(q), dtype=torch.float32)


for _name, _cuda, _cpu, _fake in (
    ("append", kernels.append, _append_cpu, _append_fake),
    ("paged_forward", _paged_forward_cuda, _paged_forward_cpu, _paged_forward_fake),
):
    _library.impl(_name, _cuda, "CUDA")
    _library.impl(_name, _cpu, "CPU")
    torch.library.register_fake(f"hf_flash2::{_name}", _fake, lib=_library)

_OPS = torch.ops.hf_flash2.append.default, torch.ops.hf_flash2.paged_forward.default

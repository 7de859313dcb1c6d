"""The attention of `attn_implementation="hf_flash2"`: `hf_flash2_attention`, called by every attention layer, and `attend`, its core, which
patches/ call too.

What our kernels cannot run is refused with the reason (ValueError), or, where the model itself asks for it, computed exactly by torch's
SDPA with one warning; `set_strict(True)` turns those warnings into errors. Of what a call of attention goes through, this file,
masks.py, registration.py, shareable.py and, by names of arguments, tracing.py know Transformers, beside patches/.
"""

import functools
import inspect
import sys
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from . import blocks, context_parallel, ops, packing, tracing
from .functional import check_rises, flash_attn_func, flash_attn_ranges_func, flash_attn_varlen_func
from .kvcache import flash_attn_with_kvcache
from .masks import (
    ATTRIBUTE,
    MAYBE_DOCUMENTS,
    UNSAID_WINDOW,
    Documents,
    Sequences,
    attach,
    band,
    holds_blocks,
    holds_documents,
    is_certainly_ours,
    is_spread,
    leaves_window_to_mask,
    set_by_hand,
    window_of,
)
from .notices import is_strict, notice, record, record_backend
from .shareable import reason_not_shareable, reason_rotations_differ
from .support import reason_unsupported

# Keyword arguments that reach every layer and change nothing about attention. Unknown ones are refused: they may.
_HARMLESS = {
    "all_layer_embeddings", "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "encoder_attention_mask",
    "encoder_hidden_states", "grid_thw", "guidance_scale", "ignore_index", "image_sizes", "inputs_embeds", "labels", "layer_idx",
    "logits_indices", "logits_processor_args", "logits_to_keep", "max_length_k", "max_length_q", "mm_token_type_ids", "num_items_in_batch",
    "offset_mapping", "original_sizes", "output_attentions", "output_hidden_states", "output_router_logits", "overflow_to_sample_mapping",
    "past_key_values", "position_embeddings", "position_ids", "return_dict", "return_loss", "return_shared_kv_states", "sentence_embedding",
    "seq_idx", "shift_labels", "special_tokens_mask", "token_embeddings", "token_type_ids", "token_weights_sum", "use_cache",
    "vision_feature_layer", "vision_feature_select_strategy",
}  # fmt: skip
# What no kernel of ours does yet, by the name it arrives under.
UNSUPPORTED = {
    "position_bias": "adds a bias to the attention scores",
    "head_mask": "masks heads",
    "indices": "selects keys",
    "block_indices": "selects keys",
}
# What means nothing without others.
_INCOMPLETE = {
    "block_table": "says where keys lie, without cu_seq_lens_k, which says how many there are",
    "read_index": "says where keys lie, without write_index and cu_seq_lens_k",
}
_BLOCKS = "its mask has blocks of tokens that see all of themselves, as those of images may"
_GIVEN_4D = "a 4-D attention mask was given"
# These layers hand on a window that their masks do not have: that of their model's encoder, as they see all of the context, or whatever
# sliding_window was put into their config, which does not declare one.
_WITHOUT_WINDOW = {"DiffusionGemmaDecoderTextAttention", "OlmoeAttention", "PaddleOCRAttention"}


def hf_flash2_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cache: Any = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """The attention function Transformers calls in every layer.

    Args:
        query: [B, H, Sq, D]; key, value: [B, Hk, Sk, D], any strides.
        attention_mask: what `hf_flash2_mask` returned, or a mask that the model hands on as it came.
        sliding_window: number of tokens a query sees, itself included; None = all.
        is_causal: wins over `module.is_causal`; a mask of ours wins over both, but not over a module.is_causal that somebody has set to
            the other of what its class makes it.
        cache: the paged cache of continuous batching; before Transformers 5.24, whose layers update it themselves.
        s_aux, softcap: attention sinks [H], as GPT-OSS has them, and a cap of the scores, as Gemma 2: `flash_attn_func`.
        kwargs: as in `attend`.
    Returns:
        (out [B, Sq, H, D], None); out is contiguous, as some layers view its heads as one dimension.
    Raises:
        ValueError: an argument that cannot be honoured, by name.
    """
    if not is_paged(cache):  # from Transformers 5.24 on this may be the one that the layer has updated
        cache = None
    if cache is not None or all(name in kwargs for name in ("read_index", "write_index", "cu_seq_lens_k")):  # continuous batching
        if sliding_window is None and leaves_window_to_mask(module.config):
            raise ValueError(
                f"{type(module).__name__} cannot run in continuous batching: {UNSAID_WINDOW}, and there is none; "
                "use generate, or config.sliding_window=None if no sequence is longer than the window"
            )
        key, value = update_paged_cache(module, key, value, cache, kwargs)
        attention_mask = None  # made from the queries' position_ids alone; the lengths that come with the cache say all
    if scaling is None and hasattr(module, "scale_attn_weights"):
        # GPT-2 before Transformers 5 leaves the scale to eager attention and says is_causal=False for every padded batch.
        is_causal = not module.is_cross_attention and getattr(module, "is_causal", True)
        scaling = gpt2_scaling(module)
    if type(module).__name__ in _WITHOUT_WINDOW:
        sliding_window = None
    out = attend(
        module, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attention_mask,
        causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
        scaling=scaling, dropout=dropout, sliding_window=sliding_window, s_aux=s_aux, softcap=softcap, **kwargs,
    )  # fmt: skip
    return out.contiguous(), None


def gpt2_scaling(module: torch.nn.Module) -> float:
    """The factor on the scores of a GPT2Attention, from its flags (Transformers 5 has it as `module.scaling`)."""
    scaling = module.head_dim**-0.5 if module.scale_attn_weights else 1.0
    return scaling / (module.layer_idx + 1) if module.scale_attn_by_inverse_layer_idx else scaling


def attend(
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    causal: bool,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    **kwargs,
) -> torch.Tensor:
    """Attention of one layer, from projections to out: the core of `hf_flash2_attention`, in our layout.

    Args:
        module: the attention layer, for messages, its config and the call record.
        q: [B, Sq, H, D]; k, v: [B, Sk, Hk, D], any strides.
        attention_mask, sliding_window, s_aux, softcap: as in `hf_flash2_attention`.
        causal: aligned to the last real key of each sequence. A mask of ours that knows better wins, and `set_by_hand` over that.
        kwargs: what else Transformers passed. Documents are honoured (cu_seq_lens_q/k with max_length_q/k, or position_ids that restart),
            and pages (block_table with k_cache, v_cache, cu_seq_lens_k), what changes the result and has no kernel is refused, the rest is
            ignored.
    Returns:
        out [B, Sq, H, D], in q's dtype (in the autocast dtype under autocast); padded rows are finite, zero where a kernel leaves them out.
        Inside torch's `context_parallel` all tensors are of this process's part of each sequence.
    """
    pages = None
    if kwargs.get("block_table") is not None:
        pages = [kwargs.pop(name, None) for name in ("block_table", "k_cache", "v_cache")]
    for name, argument in kwargs.items():
        if argument is not None and name not in _HARMLESS:
            _refuse(module, name)
    if pages is not None:
        if kwargs.get("cu_seq_lens_k") is None:
            _refuse(module, "block_table")
        options = {"softmax_scale": scaling, "causal": causal, "softcap": softcap or 0.0, "s_aux": s_aux}
        return _decode_pages(module, q, k, v, *pages, kwargs["cu_seq_lens_k"], sliding_window, options)
    if kwargs.get("output_attentions") or _collects_attentions():
        notice('hf_flash2: no attention probabilities are computed, so output_attentions=True gives none; use attn_implementation="eager"')
    q_dtype = q.dtype
    q, k, v = _in_one_dtype(module, q, k, v)
    if attention_mask is not None and is_spread(attention_mask):
        attention_mask = attention_mask[:, 0, 0]
    known = getattr(attention_mask, ATTRIBUTE, None)
    if known is None and attention_mask is not None and is_certainly_ours(attention_mask, k.shape[1]):  # which has lost its attribute
        known = Sequences.read(attention_mask, q.shape[1], k.shape[1])
        attach(attention_mask, known)
    if isinstance(known, Sequences) and known.causal is not None:  # some layers say is_causal=False because there is a mask
        by_hand = set_by_hand(module)
        causal = known.causal if by_hand is None else by_hand
        attention_mask = None if known.whole and known.block_ids is None else attention_mask
    options = {"dropout_p": dropout, "softmax_scale": scaling, "softcap": softcap or 0.0, "s_aux": s_aux}
    options |= {"deterministic": bool(kwargs.get("deterministic")), "causal": causal, "window_size": window_of(causal, sliding_window)}
    shards = context_parallel.active()
    if shards is not None:
        out = _attend_shards(module, shards, q, k, v, attention_mask, kwargs, options)
    else:
        out = _attend_whole(module, q, k, v, attention_mask, kwargs, sliding_window, options)
    if out.dtype != q_dtype and not _autocasts(out.device.type):
        out = out.to(q_dtype)
    return out


def _collects_attentions() -> bool:
    """Whether Transformers collects `attentions`, also where a config asks for them, or GPT-2 keeps the keyword to itself."""
    if tracing.is_compiling():
        return False
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)  # from 5 on
    return collector is not None and any("attentions" in name for name in collector.get() or ())


def _attend_whole(
    module, q, k, v, attention_mask: torch.Tensor | None, kwargs: dict, sliding_window: int | None, options: dict[str, Any]
) -> torch.Tensor:
    """Of sequences that are here as a whole, by our kernels or, with the reason said, by SDPA."""
    if not tracing.is_compiling() and (
        context_parallel.was_cut(kwargs.get("position_ids"))
        or context_parallel.is_of_more(kwargs.get("cu_seq_lens_q"), q.shape[:2].numel())
    ):
        raise ValueError(
            f"{type(module).__name__} was given parts of sequences outside of context_parallel, where the others cannot be reached; "
            "backward belongs inside, too, as layers with gradient checkpointing run again in it"
        )
    sequences, documents, dense_mask = _layout(module, attention_mask, q, k, kwargs)
    reason = _reason_for_sdpa(q, v, dense_mask)
    has_blocks = sequences is not None and sequences.block_ids is not None
    if reason is None and has_blocks:
        reason = _reason_not_in_blocks(q, options["causal"])
    if reason is None:
        out = _run_kernel(module, q, k, v, sequences, documents, options)
        record_backend(module)
        return out
    softcap = options["softcap"]
    _fall_back(module, reason, capped=bool(softcap))
    if has_blocks:
        dense_mask = sequences.visible(q.shape[1], options["causal"], sliding_window)
        sequences = documents = None
    dropout, scaling, causal, s_aux = (options[name] for name in ("dropout_p", "softmax_scale", "causal", "s_aux"))
    return _sdpa(q, k, v, sequences, documents, dense_mask, dropout, scaling, causal, sliding_window, s_aux, softcap)


def _reason_not_in_blocks(q: torch.Tensor, causal: bool) -> str | None:
    where = {
        "compiled": tracing.is_compiling(), "inside torch.func": ops.is_transformed(), "without values": q.is_meta, "not causal": not causal
    }  # fmt: skip
    return next((f"{_BLOCKS}, and it is {name}" for name, found in where.items() if found), None)


def _run_kernel(module, q, k, v, sequences, documents, options: dict[str, Any]) -> torch.Tensor:
    found = None if sequences is None or sequences.block_ids is None else sequences.blocks()
    ranges = None
    if documents is None and sequences is not None and not sequences.whole:
        padded = sequences.padded(q.shape[1], same_tokens=options["window_size"] != (-1, -1))
        ranges = (padded.ranges_q, padded.ranges_k, padded.key_mask)
    if found is not None:
        record(module, "blocks")
        return blocks.attention(found, q, k, v, documents=documents, ranges=ranges, **options)
    if documents is not None:
        record(module, "documents")
        packed = (x.flatten(0, 1) for x in (q, k, v))
        return flash_attn_varlen_func(*packed, *documents, **options).unflatten(0, q.shape[:2])
    if ranges is not None:
        record(module, "padded")
        return flash_attn_ranges_func(q, k, v, *ranges, **options)
    record(module, "dense")
    return flash_attn_func(q, k, v, **options)


@torch.compiler.disable  # positions are looked at, and collectives are over a group that no graph knows of
def _attend_shards(module, shards: context_parallel.Shards, q, k, v, attention_mask, kwargs: dict, options: dict[str, Any]) -> torch.Tensor:
    documents = _check_shards(module, shards, q, v, attention_mask, options["causal"], kwargs)
    record(module, "context parallel")
    out = context_parallel.attention(shards, q, k, v, documents=documents, **options)
    record_backend(module)
    return out


def _check_shards(
    module, shards: context_parallel.Shards, q, v, attention_mask: torch.Tensor | None, causal: bool, kwargs: dict
) -> context_parallel.RowDocuments | None:
    """Where rows hold several documents, or padding, these; refuses what attention of sequences that several processes share does not do.
    Reasons that every process finds in its own layer come first. Masks and position_ids of all are brought together, so that they agree, by
    the first layer of a forward, which synchronises with the host."""
    position_ids, cu_seqlens = kwargs.get("position_ids"), _given_cu_seqlens(kwargs)
    checkable = isinstance(position_ids, torch.Tensor) and position_ids.dim() == 2
    reason = _reason_for_sdpa(q, v, None)
    is_causal = causal and getattr(module, "is_causal", True)  # accelerate tells every self_attn True
    if reason is None and not (is_causal or checkable or cu_seqlens is not None):
        reason = "its tokens may not be cut, as those of images are not, and it is given no position_ids that would show it"
    if reason is not None:
        _refuse_shards(module, reason)
    masked = attention_mask is not None and attention_mask.dim() == 2
    # Of documents, also where positions only jump, from one chunk to the next, or nobody could look at them while compiling.
    of_documents = attention_mask is not None and (
        holds_documents(attention_mask) or getattr(attention_mask, ATTRIBUTE, None) == MAYBE_DOCUMENTS
    )
    if not (attention_mask is None or masked or of_documents):
        has_blocks = attention_mask is not None and holds_blocks(attention_mask)
        _refuse_shards(module, _BLOCKS if has_blocks else getattr(attention_mask, ATTRIBUTE, _GIVEN_4D))
    config, mask = getattr(module, "config", None), attention_mask if masked else None
    forward = context_parallel.forwards.get(id(config))
    if forward is None or not forward.covers(module, config, position_ids, mask):
        reason = reason_not_shareable(module)
        if reason is not None:
            _refuse_shards(module, reason)
        given = {"cu_seq_lens_q": cu_seqlens is not None, "position_ids": checkable}
        agreement = context_parallel.agree(shards, q.shape[:2], given, masked, of_documents, q.device)
        documents = _documents_of_shards(module, shards, q, mask, agreement, position_ids if checkable else None, cu_seqlens)
        forward = context_parallel.Forward(config, position_ids, agreement, documents, before=forward)
        context_parallel.keep(forward, config)
    forward.add(module, mask)
    return forward.documents


def _documents_of_shards(
    module, shards: context_parallel.Shards, q, mask, agreement: context_parallel.Agreement, position_ids, cu_seqlens
) -> context_parallel.RowDocuments | None:
    """What the layers of a forward have in common. Without a mask of its own, all tokens of a process are real."""
    padded = reason = None
    if agreement.any_masked:
        whole = q.new_ones(q.shape[:2], dtype=torch.bool)
        real = whole if mask is None else Sequences.read(mask, q.shape[1], q.shape[1]).key_mask
        padded = context_parallel.documents_of_mask(shards, real)
    documents = None if position_ids is None else context_parallel.documents_of_positions(shards, position_ids, padded)
    if cu_seqlens is not None and padded is not None:
        reason = "attention_mask has padding, and cu_seq_lens_q/k say where documents are; pass one of the two"
    elif cu_seqlens is not None:
        documents = context_parallel.documents_of_cu_seqlens(shards, *cu_seqlens, *q.shape[:2])
    elif agreement.any_masked:
        if documents is not None:
            reason = (
                "position_ids begin anew, but with an attention_mask each row is one sequence; to keep documents apart leave the mask out"
            )
        documents = padded
    elif agreement.looks_packed and position_ids is None:
        reason = (
            "position_ids look as if there were several documents in a row; if so, pass cu_seq_lens_q and cu_seq_lens_k of the whole "
            "rows, if not, an attention_mask of ones, cut as they are"
        )
    if reason is None:
        largest = context_parallel.largest_positions(shards, position_ids, q.shape[1])
        reason = reason_rotations_differ(getattr(module, "config", None), largest)
    if reason is not None:
        _refuse_shards(module, reason)
    if position_ids is None:
        notice(
            f"hf_flash2: {type(module).__name__} is not told its position_ids, or not as [batch, tokens], so under context parallelism "
            "nothing checks that its model was: without those of the whole rows, cut as input_ids are, each process counts from 0"
        )
    return documents


def _refuse_shards(module: torch.nn.Module, reason: str) -> None:
    raise ValueError(f"{type(module).__name__} cannot run under context parallelism: {reason}")


def _refuse(module: torch.nn.Module, name: str) -> None:
    what = (UNSUPPORTED | _INCOMPLETE).get(name, "may change the result, and hf_flash2 does not know it")
    raise ValueError(
        f"{type(module).__name__} passes {name} to its attention, which {what}; if it came with the batch, leave it out, otherwise "
        'use attn_implementation="eager" for this model'
    )


def _layout(module, attention_mask, q, k, kwargs) -> tuple[Sequences | None, Documents | None, torch.Tensor | None]:
    """Where the sequences are: at most one of (a padded batch, documents, a 4-D mask); with blocks these as the first, too."""
    if attention_mask is None:
        documents = _given_documents(module, q, k, kwargs) or _restarting_documents(module, q, k, kwargs.get("position_ids"))
        return None, documents, None
    if attention_mask.dim() == 4:
        if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
            raise ValueError(
                f"a 4-D attention_mask must be bool (True = visible) or floating point (added to the scores), got {attention_mask.dtype}"
            )
        documents = _given_documents(module, q, k, kwargs)
        if documents is None:
            return None, None, attention_mask
        if getattr(attention_mask, ATTRIBUTE, None) == MAYBE_DOCUMENTS:
            return None, documents, None
        return None, None, _within_documents(attention_mask, documents, q.shape[:2], k.shape[:2])
    if attention_mask.dim() != 2 and not (holds_documents(attention_mask) or holds_blocks(attention_mask)):
        raise ValueError(f"attention_mask must have 2 or 4 dimensions, got {list(attention_mask.shape)}")
    if attention_mask.shape[0] != q.shape[0]:
        raise ValueError(f"attention_mask must have a row for each of the {q.shape[0]} of the batch, got {list(attention_mask.shape)}")
    sequences = Sequences.read(attention_mask, q.shape[1], k.shape[1])
    documents = _given_documents(module, q, k, kwargs)
    if sequences.starts is not None:
        return None if sequences.block_ids is None else sequences, documents or sequences.documents(), None
    if documents is not None:
        if tracing.is_compiling():
            raise ValueError(
                "attention_mask and cu_seq_lens_q/k: which counts depends on the mask's values, unknown while compiling; pass one"
            )
        if not sequences.has_padding():
            return None if sequences.block_ids is None else sequences.within(documents), documents, None
        notice("hf_flash2: attention_mask has padding, so it counts and cu_seq_lens_q/k are not looked at; pass one of the two")
    return sequences, None, None


def _given_cu_seqlens(kwargs: dict) -> tuple[torch.Tensor, torch.Tensor] | None:
    cu_seqlens_q, cu_seqlens_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return None
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise ValueError(f"cu_seq_lens_q and cu_seq_lens_k come together, got only cu_seq_lens_{'q' if cu_seqlens_k is None else 'k'}")
    return cu_seqlens_q, cu_seqlens_k


def _given_documents(module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, kwargs: dict) -> Documents | None:
    given = _given_cu_seqlens(kwargs)
    if given is None:
        return None
    cu_seqlens_q, cu_seqlens_k = given
    _check_not_cut(module, "cu_seq_lens_q", cu_seqlens_q, q.shape[:2])
    _check_not_cut(module, "cu_seq_lens_k", cu_seqlens_k, k.shape[:2])
    if _are_of_other_keys(cu_seqlens_q, cu_seqlens_k, q.shape[:2], k.shape[:2]):
        raise ValueError(
            f"cu_seq_lens_q and cu_seq_lens_k are the same, but {type(module).__name__} has {q.shape[1]} queries and {k.shape[1]} keys "
            f"in each of {q.shape[0]} rows; an adapter with keys of its own before the others (PEFT's prefix tuning) needs padded batches, "
            "layers that are checkpointed need use_cache=False"
        )
    seq_idx = kwargs.get("seq_idx")  # numbers of the same documents, for layers that go by them
    if isinstance(seq_idx, torch.Tensor) and seq_idx.shape != q.shape[:2]:
        raise ValueError(
            f"{type(module).__name__} has tokens {list(q.shape[:2])}, but the seq_idx beside its cu_seq_lens is of {list(seq_idx.shape)}; "
            "an adapter with tokens of its own before the others (PEFT's prompt and p-tuning) needs padded batches"
        )
    max_seqlen_q, max_seqlen_k = kwargs.get("max_length_q"), kwargs.get("max_length_k")
    return Documents(
        cu_seqlens_q.to(torch.int32),
        cu_seqlens_k.to(torch.int32),
        q.shape[0] * q.shape[1] if max_seqlen_q is None else max_seqlen_q,
        k.shape[0] * k.shape[1] if max_seqlen_k is None else max_seqlen_k,
    )


def _are_of_other_keys(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, queries: torch.Size, keys: torch.Size) -> bool:
    """Whether queries and keys have the same bounds, but not as many tokens. Of one tensor, what moves a batch to a GPU makes two, and so
    does what detaches (reentrant checkpointing). Only with gradients are the values of two looked at, which waits for the GPU: continuous
    batching has more keys than queries in every layer."""
    one = cu_seqlens_q is cu_seqlens_k
    if (tracing.is_compiling() and not one) or queries == keys:
        return False
    may_look = torch.is_grad_enabled() and cu_seqlens_q.device == cu_seqlens_k.device
    return one or (may_look and torch.equal(cu_seqlens_q, cu_seqlens_k))


def _check_not_cut(module: torch.nn.Module, name: str, cu_seqlens: torch.Tensor, shape: torch.Size) -> None:
    """Refuse bounds of documents that were cut as if they were rows. Waits for the GPU only in replicas of torch.nn.DataParallel, which
    cuts every tensor of a batch into equal parts, and where there are as many bounds as rows, as accelerate leaves: one more is the least
    where each row is a document or more. While compiling, lengths may be known to the graph alone."""
    is_replica = getattr(module, "_is_replica", False)
    if not is_replica and (tracing.is_compiling() or cu_seqlens.numel() != shape[0]):
        return
    first, end = cu_seqlens[[0, -1]].tolist()
    if (first, end) == (0, shape.numel()):
        return
    if is_replica:
        raise ValueError(
            f"torch.nn.DataParallel cannot divide packed documents among GPUs: this one has {shape.numel()} tokens, and cu_seq_lens from "
            f"{first} to {end}; start a process for each GPU (torchrun, accelerate launch), or show this one a single GPU "
            "(CUDA_VISIBLE_DEVICES)"
        )
    raise ValueError(
        f"{type(module).__name__} was given a batch of packed documents that has been cut: {name} has {shape[0]} bounds, as many as "
        "there are rows, which are not those of all tokens. accelerate cuts the batches of an iterable dataset so, unless Trainer is "
        'given accelerator_config={"dispatch_batches": False}, or Accelerator DataLoaderConfiguration(dispatch_batches=False)'
    )


def _within_documents(mask: torch.Tensor, documents: Documents, queries: torch.Size, keys: torch.Size) -> torch.Tensor:
    """A 4-D mask, bool or additive, that sees nothing of other documents, nor of tokens in none; queries and keys are (B, S)."""

    def numbers(cu_seqlens: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        token = torch.arange(shape.numel(), device=mask.device)
        return torch.bucketize(token, cu_seqlens, right=True).unflatten(0, shape)

    number_q, number_k = numbers(documents.cu_seqlens_q, queries), numbers(documents.cu_seqlens_k, keys)
    same = number_q[:, None, :, None] == number_k[:, None, None, :]
    columns = mask[..., : keys[1]]
    within = columns & same if mask.dtype == torch.bool else columns.masked_fill(~same, float("-inf"))
    return attach(within, getattr(mask, ATTRIBUTE, _GIVEN_4D))


class _LookedAt(NamedTuple):
    """What position_ids held when the first layer of a forward looked at them."""

    documents: Documents | None
    version: int | None  # of the tensor then
    layers: WeakSet[torch.nn.Module]  # those of this forward so far; one that comes again is of another forward


_positions = WeakTensorKeyDictionary()  # not on the tensor: it is the user's, who may save it


def _restarting_documents(module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, position_ids: torch.Tensor | None) -> Documents | None:
    """Documents of one row that its model's masks do not separate but its position_ids do. Synchronises with the host, once per
    forward. While compiling nobody can look: one document, with one warning where it may be several."""
    if position_ids is None or position_ids.dim() != 2 or position_ids.is_meta:
        return None
    compiling = tracing.is_compiling()
    if compiling and tracing.counts_up(position_ids):  # first: a comparison of lengths binds what is compiled to one side of it
        return None
    if not (q.shape[0] == position_ids.shape[0] == 1 and 1 < q.shape[1] == k.shape[1] == position_ids.shape[1]):
        return None
    if getattr(module, "is_cross_attention", False) or "CrossAttention" in type(module).__name__:  # they are of the queries alone
        return None
    if compiling:
        notice(f"hf_flash2: {type(module).__name__} takes its row for one document: {MAYBE_DOCUMENTS}")
        return None
    version = context_parallel.version_of(position_ids)
    known: _LookedAt | None = _positions.get(position_ids)
    if known is None or known.version != version or module in known.layers:
        with torch.inference_mode(False):  # a teacher may look first, and what it finds is saved for the backward of its student
            known = _LookedAt(Documents.same(packing.documents_from_position_ids(position_ids)), version, WeakSet())
        _positions[position_ids] = known
    known.layers.add(module)
    return known.documents


def _in_one_dtype(module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k, v as the kernels take them. Mixed precision brings float32 beside a half type: autocast's dtype wins, then the half type among
    the tensors, then that of a quantised model's config. Genuine float32 stays."""
    dtypes = (q.dtype, k.dtype, v.dtype)
    if dtypes[0] == dtypes[1] == dtypes[2] != torch.float32:
        return q, k, v
    device_type = q.device.type
    half = [dtype for dtype in dtypes if dtype in (torch.float16, torch.bfloat16)]
    target = torch.get_autocast_dtype(device_type) if _autocasts(device_type) else half[0] if half else _quantised_dtype(module)
    if target is None or dtypes == (target,) * 3:
        return q, k, v
    notice(
        f"hf_flash2: q, k, v reach attention as {', '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)} and are cast to "
        f"{str(target).removeprefix('torch.')} (layer norms or adapters in float32, or autocast)"
    )
    return q.to(target), k.to(target), v.to(target)


def _autocasts(device_type: str) -> bool:
    # meta is the device without autocast that models are moved to. is_autocast_available() knows all, but breaks graphs before torch 2.13.
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def _quantised_dtype(module: torch.nn.Module) -> torch.dtype | None:
    config = getattr(module, "config", None)
    dtype = getattr(config, "_pre_quantization_dtype", None)  # Transformers 4
    if dtype is None and hasattr(config, "_is_quantized"):
        dtype = config.dtype
    return dtype if dtype in (torch.float16, torch.bfloat16) else None


def _reason_for_sdpa(q: torch.Tensor, v: torch.Tensor, dense_mask: torch.Tensor | None) -> str | None:
    if dense_mask is not None:
        return getattr(dense_mask, ATTRIBUTE, _GIVEN_4D)
    return reason_unsupported(q.device.type, q.dtype, max(q.shape[-1], v.shape[-1]))


def _fall_back(module: torch.nn.Module, reason: str, capped: bool) -> None:
    if is_strict():
        raise ValueError(f"{type(module).__name__} cannot run on hf_flash2 kernels, and set_strict(True) forbids SDPA: {reason}")
    record(module, "sdpa")
    if not tracing.is_compiling():
        ops.note_sdpa()
    instead = "operators of torch, as scaled_dot_product_attention caps no scores," if capped else "torch's scaled_dot_product_attention"
    notice(f"hf_flash2: {type(module).__name__} runs on {instead} instead of our kernels: {reason}")


def _sdpa(q, k, v, sequences, documents, dense_mask, dropout, scaling, causal, sliding_window, s_aux, softcap) -> torch.Tensor:
    """The same attention, exactly, by torch: [B, Sq, H, D]."""
    if documents is not None:
        return _sdpa_documents(q, k, v, documents, dropout, scaling, causal, sliding_window, s_aux, softcap)
    if sequences is not None:
        dense_mask = sequences.visible(q.shape[1], causal, sliding_window)
    elif dense_mask is None:
        dense_mask = band(q.shape[1], k.shape[1], k.shape[1] - q.shape[1], causal, sliding_window, q.device)
    else:
        dense_mask = dense_mask[..., : k.shape[1]]
        dense_mask = dense_mask if dense_mask.dtype == torch.bool else dense_mask.to(q.dtype)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if s_aux is not None:  # a key and a value of zeros more, whose score is the sink
        if dense_mask.dtype == torch.bool:
            dense_mask = torch.zeros_like(dense_mask, dtype=q.dtype).masked_fill(~dense_mask, float("-inf"))
        rows = (q.shape[0], q.shape[1], q.shape[2])
        sinks = s_aux.to(q.dtype).view(1, -1, 1, 1).expand(*rows, 1)
        dense_mask = torch.cat((dense_mask.expand(*rows, k.shape[2]), sinks), -1)
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    if softcap:
        return _capped(q, k, v, dense_mask, dropout, scaling, softcap).transpose(1, 2)
    gqa = bool(q.shape[1] != k.shape[1])  # a tensor while torch.jit traces
    return F.scaled_dot_product_attention(q, k, v, dense_mask, dropout, scale=scaling, enable_gqa=gqa).transpose(1, 2)


def _capped(q, k, v, mask: torch.Tensor, dropout: float, scaling: float | None, softcap: float) -> torch.Tensor:
    """[B, H, Sq, D] of tensors with heads first and a mask, bool or added to the capped scores."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * (
        q.shape[-1] ** -0.5 if scaling is None else scaling
    )
    scores = torch.tanh(scores / softcap) * softcap
    if mask.dtype != torch.bool:
        scores, mask = scores + mask, mask != float("-inf")
    # Of rows that see nothing, softmax has NaN for gradients, which a sum would hand on.
    scores = scores.masked_fill(~mask, float("-inf"))
    probabilities = scores.softmax(-1).masked_fill((scores == float("-inf")).all(-1, keepdim=True), 0.0)
    return F.dropout(probabilities, dropout).to(v.dtype) @ v


def _sdpa_documents(q, k, v, documents, dropout, scaling, causal, sliding_window, s_aux, softcap) -> torch.Tensor:
    """One document after the other. Reads the lengths, so it synchronises with the host."""
    tokens_q, tokens_k, tokens_v = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v))
    bounds_q, bounds_k = documents.cu_seqlens_q.tolist(), documents.cu_seqlens_k.tolist()
    check_rises("cu_seqlens_q", bounds_q, tokens_q.shape[1])
    check_rises("cu_seqlens_k", bounds_k, tokens_k.shape[1])
    settings = (None, None, None, dropout, scaling, causal, sliding_window, s_aux, softcap)
    pieces = [
        _sdpa(tokens_q[:, q0:q1], tokens_k[:, k0:k1], tokens_v[:, k0:k1], *settings)
        for q0, q1, k0, k1 in zip(bounds_q[:-1], bounds_q[1:], bounds_k[:-1], bounds_k[1:], strict=True)
    ]
    out = F.pad(torch.cat(pieces, 1), (0, 0, 0, 0, bounds_q[0], tokens_q.shape[1] - bounds_q[-1]))  # tokens in no document
    return out.squeeze(0).unflatten(0, q.shape[:2])


def is_paged(cache: Any) -> bool:
    """Whether this is the cache of continuous batching, which is none of Transformers' usual ones."""
    return cache is not None and not isinstance(cache, sys.modules["transformers"].Cache)


def _decode_pages(
    module: torch.nn.Module, q, k, v, block_table, k_cache, v_cache, cu_seq_lens_k, sliding_window: int | None, options: dict
) -> torch.Tensor:
    """A step of continuous batching in which each sequence has one new token: written into the pages and attended from there.

    q [1, T, H, D], k and v [1, T, Hk, D] of T sequences, whose lengths, the new token included, cu_seq_lens_k [T + 1] says; one of 0 stands
    for none. Returns [1, T, H, D].
    """
    if k_cache is None or v_cache is None:
        raise ValueError(
            f"{type(module).__name__} was given a block_table without k_cache and v_cache, which Transformers hands on from 5.23 on; "
            "use ContinuousBatchingConfig(max_blocks_per_request=0)"
        )
    tokens = q.shape[1]
    lengths = (cu_seq_lens_k[1 : tokens + 1] - cu_seq_lens_k[:tokens] - 1).int()
    queries, keys, values = (x.to(k_cache.dtype).squeeze(0).unsqueeze(1) for x in (q, k, v))
    options |= {"cache_seqlens": lengths, "block_table": block_table[:tokens], "window_size": window_of(options["causal"], sliding_window)}
    record(module, "documents")
    try:
        out = flash_attn_with_kvcache(queries, k_cache, v_cache, keys, values, **options)
    except ValueError as error:  # while continuous batching warms up, before it has generated anything
        raise ValueError(
            f"{type(module).__name__} cannot decode from pages: {error}; or use ContinuousBatchingConfig(max_blocks_per_request=0), "
            "which gathers them"
        ) from error
    record_backend(module)
    return out.squeeze(1).unsqueeze(0).to(q.dtype)


@functools.cache
def takes_kwargs(cache_class: type) -> bool:
    """Whether a paged cache finds what it needs in kwargs, and leaves its pages there, as since Transformers 5.23."""
    return "kwargs" in inspect.signature(cache_class.update).parameters


def update_paged_cache(
    module: torch.nn.Module, key: torch.Tensor, value: torch.Tensor, cache: Any, kwargs: dict
) -> tuple[torch.Tensor, torch.Tensor]:
    """Continuous batching: write the new keys and values [1, Hk, T, D] into the paged cache and get back all that the batch reads.

    Leaves in kwargs what describes the sequences, and takes out what only the cache needs. cache=None: the layer has updated it. With a
    block_table nothing is written yet: kwargs have the pages then, and `attend` does both.
    """
    if cache is None:
        pass
    elif takes_kwargs(type(cache)):
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    else:  # Transformers 5.0 to 5.22
        kind = "sliding_attention" if getattr(module, "sliding_window", None) else "full_attention"
        for ours, theirs in (("cu_seq_lens_k", "cu_seq_lens_k"), ("max_length_q", "max_seqlen_q"), ("max_length_k", "max_seqlen_k")):
            given = kwargs.pop(theirs)
            kwargs[ours] = given[kind] if isinstance(given, dict) else given
        key, value = cache.update(
            key_states=key,
            value_states=value,
            layer_idx=module.layer_idx,
            read_index=kwargs["read_index"],
            write_index=kwargs["write_index"],
        )
        key, value = (x.transpose(0, 1).unsqueeze(0) for x in (key, value))
    for name in ("read_index", "write_index"):
        kwargs.pop(name, None)
    return key, value

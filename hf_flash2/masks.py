"""Where the sequences of a forward are: the mask function of `attn_implementation="hf_flash2"`, and what the layers read from its masks.

`hf_flash2_mask`, called once per forward, turns the model's 2-D mask and the pattern that Transformers asks for into a tensor that every
layer understands. `Sequences` is what is in it. A pattern that is none of ours becomes a dense mask, with the reason, for SDPA.
"""

import functools
import inspect
import re
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from . import blocks, notices, packing, tracing

masking_utils: ModuleType | None = None  # of Transformers: registration.py finds it

# -------------------------------------------------------------------------------------------------------------------------------- sequences

# What the mask function gives to the layers is a tensor that says where the sequences are by itself, because models and their hooks move,
# copy and save it:
#   bool  [B, Sk]            True = a real key; the queries are the last columns
#   uint16, uint32 [B, Sk]   the same, where layers may take what the mask is of for something else: _CAUSAL or _BIDIRECTIONAL; one element
#                            for all (strides 0) = nothing is padded
#   uint8 [B, 2 * Sk]        static cache, causal: real keys | columns before the first query
#   uint8 [B, 2, Sk]         documents, no cache: real keys, first token of each document; likewise uint16 or uint32
#   int32 [B, 2 or 3, Sk]    causal, with blocks of tokens that see all of themselves, no cache: real keys, number of the block that each
#                            token belongs to (-1: none), and where there are documents, first token of each
#   bool  [B, 1, Sq, Sk]     no plain pattern: for SDPA
# An attribute on the same tensor, a `Sequences` (a reason for the last form), spares the layers deriving the same again; what detaches
# (reentrant checkpointing) or copies a mask loses it, and a copy has other strides. A model may hand its mask to a decoder that asks for
# one again: then Transformers makes bool of two dimensions, which the first three forms survive.
ATTRIBUTE = "_hf_flash2"
_CAUSAL, _BIDIRECTIONAL = torch.uint16, torch.uint32  # dtypes, as those are known while compiling; of those that no mask of users has
MAYBE_DOCUMENTS = (
    "position_ids may hold several documents and cannot be looked at while compiling; pass attention_mask, or cu_seq_lens_q/k and "
    "max_length_q/k (DataCollatorWithFlattening(return_flash_attn_kwargs=True))"
)
_CUSTOM_PATTERN = "its mask is no plain causal, bidirectional, sliding-window or document pattern"
_WIDE_BLOCKS = "its mask has a block of tokens that see all of themselves which is longer than its sliding window"
_ONE_SHORT = "its layers would leave out the last token on either side of its bidirectional window"
_AS_WIDE = "an attention_mask has to be as wide as input_ids and what a cache holds before them"
UNSAID_WINDOW = "its layers leave their sliding window to the mask"


class Documents(NamedTuple):
    """Packed documents, in the order `flash_attn_varlen_func` takes them."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @classmethod
    def same(cls, found: tuple[torch.Tensor, int] | None) -> "Documents | None":
        """Queries and keys are the same tokens: cu_seqlens and the longest length."""
        return None if found is None else cls(found[0], found[0], found[1], found[1])


class Sequences:
    """The sequences of one forward, as one mask describes them, with what was derived from them so far."""

    def __init__(
        self,
        key_mask: torch.Tensor,
        q_offset: int | torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
        causal: bool | None = None,
        whole: bool = False,
        block_ids: torch.Tensor | None = None,
    ):
        self.key_mask = key_mask  # bool [B, Sk]
        self.q_offset = q_offset  # key column of the first query; None = Sk - Sq
        self.starts = starts  # bool [B, Sk], first tokens of documents, or None
        self.causal = causal  # what the mask function was told; None = not known
        self.whole = whole  # nothing is padded: the mask is there for the sake of `causal`, or of the blocks
        self.block_ids = block_ids  # int [B, Sk], of tokens that see all others with the same number; -1 = none; None = no blocks
        self._derived: dict[Any, Any] = {}

    @classmethod
    def read(cls, mask: torch.Tensor, seqlen_q: int, seqlen_k: int) -> "Sequences":
        """From a mask of ours, or a 2-D one that a model hands on as the user gave it."""
        attached = getattr(mask, ATTRIBUTE, None)
        if isinstance(attached, cls):
            if attached.key_mask.shape[1] != seqlen_k:
                _refuse_width(attached.key_mask.shape[1], seqlen_k)
            return attached
        if holds_documents(mask):
            return cls(mask[:, 0].bool(), 0, mask[:, 1].bool(), _coded(mask))
        if holds_blocks(mask):
            starts = mask[:, 2].bool() if mask.shape[1] == 3 else None
            return cls(mask[:, 0].bool(), 0, starts, causal=True, block_ids=mask[:, 1])
        width = mask.shape[1]
        if _coded(mask) is not None and width == seqlen_k and not any(mask.stride()):
            return cls(mask.bool(), causal=_coded(mask), whole=True)
        if _is_of_static_cache(mask, seqlen_k):
            planes = mask.unflatten(1, (2, seqlen_k)).bool()
            return cls(planes[:, 0], planes[0, 1].sum(), causal=True)
        if width >= seqlen_k:  # a sliding cache holds the last columns
            return cls(mask[:, width - seqlen_k :].bool(), causal=_coded(mask))
        if _runs_in_backward():  # reentrant checkpointing has detached the mask, and a cache has the keys of both runs
            _refuse_width(width, seqlen_k)
        return cls(F.pad(mask.bool(), (0, seqlen_k - width)), width - seqlen_q)  # a static cache: the mask ends with the queries

    def padded(self, seqlen_q: int, same_tokens: bool) -> packing.PaddedBatch:
        """same_tokens: queries and keys are the same tokens and their positions matter, as they do when causal or under a window."""
        return self._once(
            ("padded", seqlen_q, same_tokens),
            lambda: packing.padded_batch(self.key_mask, seqlen_q, self.q_offset, same_tokens=same_tokens),
        )

    def documents(self) -> Documents | None:
        """The documents of the flattened batch, or None when each row is one. Synchronises with the host, once per forward."""
        return self._once("documents", lambda: Documents.same(packing.documents_from_starts(self.starts)))

    def blocks(self) -> blocks.Blocks | None:
        """The blocks of the flattened batch, or None where no token sees one behind it. Synchronises with the host, once per forward."""
        return self._once("blocks", lambda: blocks.find(self.block_ids, self._sequence_numbers(), self.key_mask))

    def within(self, documents: Documents) -> "Sequences":
        """The same of documents that are known by cu_seqlens alone, without padding: no block reaches from one into another."""

        def starting() -> "Sequences":
            starts = torch.zeros(self.key_mask.numel() + 1, dtype=torch.bool, device=self.key_mask.device)
            starts[documents.cu_seqlens_q.long()] = True
            starts = starts[:-1].view(self.key_mask.shape)
            return Sequences(self.key_mask, 0, starts, causal=True, whole=self.whole, block_ids=self.block_ids)

        return self._once(("within", documents.cu_seqlens_q.data_ptr()), starting)

    def _sequence_numbers(self) -> torch.Tensor:
        """int64 [B, Sk]: of the row, or the document, that each token belongs to."""
        if self.starts is not None:
            return self.starts.flatten().cumsum(0).view_as(self.starts)
        rows, columns = self.key_mask.shape
        return torch.arange(rows, device=self.key_mask.device).unsqueeze(1).expand(rows, columns)

    def has_padding(self) -> bool:
        """Synchronises with the host, once per forward."""
        return self._once("padding", lambda: not bool(self.key_mask.all()))

    def _once(self, key: Any, derive: Callable[[], Any]) -> Any:
        if tracing.is_compiling():  # a tensor of the graph must not outlive it; the compiler merges what every layer derives
            return derive()
        if key not in self._derived:
            self._derived[key] = derive()
        return self._derived[key]

    def visible(self, seqlen_q: int, causal: bool, sliding_window: int | None) -> torch.Tensor:
        """bool [B, 1, Sq, Sk]: the same sequences as a dense mask."""
        seqlen_k = self.key_mask.shape[1]
        q_offset = seqlen_k - seqlen_q if self.q_offset is None else self.q_offset
        seen = band(seqlen_q, seqlen_k, q_offset, causal, sliding_window, self.key_mask.device)
        if self.block_ids is not None:  # queries and keys are the same tokens
            numbers = self._sequence_numbers()
            seen = (seen | blocks.behind(self.block_ids)) & (numbers[:, :, None] == numbers[:, None, :])
            return self.key_mask[:, None, None, :] & seen.unsqueeze(1)
        return self.key_mask[:, None, None, :] & seen


def _refuse_width(described: int, seqlen_k: int) -> None:
    raise ValueError(
        f"the mask of this forward describes {described} keys, but the layer has {seqlen_k}; {_AS_WIDE}; a decoder with a cache needs "
        "config.is_decoder=True; layers that are checkpointed need use_cache=False; generate() of an encoder-decoder cuts the mask of the "
        'encoder short under prefill_chunk_size, which such a model does not need; if it is none of these, use attn_implementation="sdpa"'
    )


def _runs_in_backward() -> bool:
    """Whether a layer runs again there, as one that is checkpointed does."""
    return not tracing.is_compiling() and torch._C._current_graph_task_id() != -1


def window_of(causal: bool, sliding_window: int | None) -> tuple[int, int]:
    """A sliding window of w tokens counts the token itself: w - 1 others to the left, and as many to the right when not causal."""
    left = sliding_window - 1 if sliding_window else -1
    return left, 0 if causal else left


def band(seqlen_q: int, seqlen_k: int, q_offset: int | torch.Tensor, causal: bool, sliding_window: int | None, device) -> torch.Tensor:
    """bool [Sq, Sk]: what causality and window let the queries see that start at key column q_offset."""
    distance = torch.arange(seqlen_k, device=device) - torch.arange(seqlen_q, device=device).unsqueeze(1) - q_offset
    left, right = window_of(causal, sliding_window)
    inside = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        inside = inside & (distance >= -left)
    if right >= 0:
        inside = inside & (distance <= right)
    return inside


# --------------------------------------------------------------------------------------------------------------------------------- the mask


def hf_flash2_mask(
    batch_size: int,
    kv_length: int,
    q_length: int | None = None,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: torch.Tensor | None = None,
    cache_position: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor | None:
    """The mask function Transformers calls once per forward and kind of layer. No host synchronisation.

    Args:
        kv_length, kv_offset: keys kv_offset .. kv_offset + kv_length of the sequences take part.
        q_length, q_offset: likewise for the queries (Transformers 5); 4.57 passes cache_position [q_length] instead.
        mask_function: the pattern, as a function of (batch, head, query, key) indices; default causal.
        attention_mask: bool [B, keys seen so far], True = a real token; a mask of ours; or None.
    Returns:
        None when certainly nothing is padded, and no layer may take the pattern for another; else one of the forms listed above
        `ATTRIBUTE`.
    """
    if cache_position is not None:
        q_length, q_offset, device = cache_position.shape[0], cache_position[0], cache_position.device
    else:
        device = kwargs.get("device", "cpu")
    if isinstance(q_offset, torch.Tensor):
        q_offset = q_offset.clone()  # a static cache counts up in place, before the layers derive anything from it
    pattern = _read_pattern(mask_function, attention_mask, q_length, kv_length, kv_offset, kwargs)
    if pattern.half:
        pattern = _Pattern(_CUSTOM_PATTERN)
    # Transformers looks for documents where there is no mask, and numbers them upwards; an overlay of somebody else's (use_vmap) need not.
    if pattern.documents is not None and (attention_mask is not None or (kwargs.get("use_vmap") and not _adds_documents(mask_function))):
        pattern = _Pattern(_CUSTOM_PATTERN)
    if attention_mask is not None and holds_blocks(attention_mask):
        if mask_function in (None, masking_utils.causal_mask_function):
            return attention_mask
        return attach(Sequences.read(attention_mask, q_length, q_length).visible(q_length, True, None), _CUSTOM_PATTERN)
    if attention_mask is not None and holds_documents(attention_mask):
        attached = getattr(attention_mask, ATTRIBUTE, None)
        if pattern.reason is None and isinstance(attached, Sequences) and attached.causal == pattern.causal:
            return attention_mask
        numbers = attention_mask[:, 1].bool().cumsum(1)
        mask_function = masking_utils.and_masks(mask_function, masking_utils.packed_sequence_mask_function(numbers))
        pattern, attention_mask = pattern._replace(documents=numbers), None
    if pattern.block_ids is not None:
        pattern = _of_blocks(pattern, batch_size, attention_mask, q_length, kv_length, kv_offset)
    if pattern.reason is not None:
        queries = {"q_length": q_length, "q_offset": q_offset} if cache_position is None else {"cache_position": cache_position}
        mask = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](
            batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask,
            **queries, **kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
        )  # fmt: skip
        return attach(mask, pattern.reason)
    if pattern.block_ids is not None:
        real = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
        real = real if attention_mask is None else _real_keys(attention_mask, kv_length, kv_offset)
        starts = None if pattern.documents is None else _first_tokens(pattern.documents.expand(batch_size, -1))
        sequences = Sequences(real, 0, starts, causal=True, whole=attention_mask is None, block_ids=pattern.block_ids)
        return mask_of_blocks(sequences)
    agree = _layers_agree(type(kwargs.get("config")), pattern.causal)
    code = None if agree else _CAUSAL if pattern.causal else _BIDIRECTIONAL
    if pattern.documents is not None:
        starts = _first_tokens(pattern.documents.expand(batch_size, -1))
        real = torch.ones_like(starts)
        mask = torch.stack((real, starts), 1)
        return attach(mask.to(torch.uint8 if code is None else code), Sequences(real, 0, starts, pattern.causal))

    # A tensor offset is not read: there may be empty slots behind the queries wherever there is room for them.
    empty_slots = pattern.causal and kv_offset == 0 and kv_length > q_length + (0 if isinstance(q_offset, torch.Tensor) else q_offset)
    if attention_mask is None and not empty_slots:
        if agree:
            return None
        real = torch.ones((), dtype=torch.bool, device=device)
        shape = (batch_size, kv_length)
        return attach(real.to(code).expand(shape), Sequences(real.expand(shape), causal=pattern.causal, whole=True))
    if attention_mask is None:
        key_mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    else:
        if pattern.causal and not isinstance(q_offset, torch.Tensor):
            _check_reaches_queries(attention_mask.shape[1], kv_length, q_offset + q_length)
            if kv_offset + kv_length == q_offset + q_length:  # a dynamic cache: keys end with the queries
                _notice_columns_without_keys(attention_mask.shape[1], kv_length, kv_offset + kv_length)
        key_mask = _real_keys(attention_mask, kv_length, kv_offset)
    if not empty_slots:
        # Not the tensor itself: it would hold itself, and only the garbage collector would free it.
        mask = key_mask.detach() if code is None else key_mask.to(code)
        return attach(mask, Sequences(key_mask, causal=pattern.causal))
    column = torch.arange(kv_length, device=key_mask.device)
    key_mask = key_mask & (column < q_offset + q_length)
    mask = torch.cat((key_mask, (column < q_offset).expand_as(key_mask)), 1).to(torch.uint8)
    return attach(mask, Sequences(key_mask, q_offset, causal=pattern.causal))


def mask_of_blocks(sequences: Sequences) -> torch.Tensor:
    """The form for blocks listed above `ATTRIBUTE`."""
    planes = (sequences.key_mask, sequences.block_ids, sequences.starts)
    return attach(torch.stack([plane.to(torch.int32) for plane in planes if plane is not None], 1), sequences)


def _of_blocks(pattern: "_Pattern", batch_size: int, attention_mask, q_length: int, kv_length: int, kv_offset: int) -> "_Pattern":
    """A pattern with blocks, their numbers one for each of the batch's tokens; another where it cannot be one of ours. Synchronises with
    the host where a block might be longer than a window."""
    ids = pattern.block_ids
    of_all_tokens = kv_offset == 0 and kv_length == q_length == ids.shape[1] and ids.shape[0] in (1, batch_size)
    if not (of_all_tokens and pattern.causal) or (attention_mask is not None and attention_mask.dim() != 2):
        return _Pattern(_CUSTOM_PATTERN)
    ids = ids.expand(batch_size, -1)
    if pattern.narrower is not None and blocks.longest(ids) > pattern.narrower:
        return _Pattern(_WIDE_BLOCKS)
    return pattern._replace(block_ids=ids)


def _first_tokens(numbers: torch.Tensor) -> torch.Tensor:
    """bool [B, S] of the numbers of the documents that tokens belong to."""
    return F.pad(numbers[:, 1:] != numbers[:, :-1], (1, 0), value=True)


def is_certainly_ours(mask: torch.Tensor, seqlen_k: int) -> bool:
    """Whether nobody but the mask function makes such: it is neither the first nor the last of the forms listed above `ATTRIBUTE`."""
    return _coded(mask) is not None or holds_documents(mask) or holds_blocks(mask) or _is_of_static_cache(mask, seqlen_k)


def is_spread(mask: torch.Tensor) -> bool:
    """Whether a model has made [B, 1, 1, Sk] of a mask with a code, as LightGlue does while it swaps the masks of two images."""
    return _coded(mask) is not None and mask.dim() == 4 and mask.shape[1:3] == (1, 1)


def _is_of_static_cache(mask: torch.Tensor, seqlen_k: int) -> bool:
    return mask.dtype == torch.uint8 and mask.dim() == 2 and mask.shape[1] == 2 * seqlen_k


def holds_documents(mask: torch.Tensor) -> bool:
    """Whether it is the form for documents listed above `ATTRIBUTE`."""
    return mask.dim() == 3 and mask.shape[1] == 2 and mask.dtype in (torch.uint8, _CAUSAL, _BIDIRECTIONAL)


def holds_blocks(mask: torch.Tensor) -> bool:
    """Whether it is the form for blocks listed above `ATTRIBUTE`."""
    return mask.dim() == 3 and mask.shape[1] in (2, 3) and mask.dtype == torch.int32


def _coded(mask: torch.Tensor) -> bool | None:
    """Whether a mask with a code is causal, None where it has none."""
    return {_CAUSAL: True, _BIDIRECTIONAL: False}.get(mask.dtype)


def attach(mask: torch.Tensor, attribute: Sequences | str) -> torch.Tensor:
    """The mask, with what it says as Sequences, or why it is for SDPA."""
    setattr(mask, ATTRIBUTE, attribute)
    return mask


def _check_reaches_queries(columns: int, kv_length: int, end: int) -> None:
    """Queries behind the end of a mask would count as padding, whose results nobody wants: whoever gives such a mask wants them."""
    if columns != kv_length and columns < end:
        raise ValueError(
            f"the attention_mask of this forward ends at column {columns}, its queries at {end}; {_AS_WIDE}. generate() "
            "of PEFT's prompt tuning gives such masks where Transformers has renamed past_key_values to cache, and then adds "
            'its prompt at every step; attn_implementation="sdpa" computes what it asks for'
        )


def _notice_columns_without_keys(columns: int, kv_length: int, end: int) -> None:
    """Transformers' own mask functions leave the last ones out, though the keys that are not there may be the first ones."""
    if columns > end and columns != 2 * kv_length:  # as wide is the mask of a static cache, which generate() had made ahead of the model
        notices.notice(  # without the numbers, which grow from step to step
            "hf_flash2: an attention_mask has more columns than there are keys, and the last ones are left out, as Transformers does; "
            f"{_AS_WIDE}. generate() of PEFT's prefix tuning gives such masks where Transformers has renamed past_key_values to cache, and "
            "then runs without its prefix"
        )


def _real_keys(attention_mask: torch.Tensor, kv_length: int, kv_offset: int) -> torch.Tensor:
    """bool [B, kv_length], a new tensor: the columns that the cache still holds, False where the mask ends before it.

    `generate` prepares the masks of static caches ahead of the model, so this may be a mask of ours, with a second half.
    """
    if attention_mask.shape[1] != kv_length:
        attention_mask = attention_mask[:, kv_offset : kv_offset + kv_length]
    return F.pad(attention_mask.bool(), (0, kv_length - attention_mask.shape[1])).contiguous()


class _Pattern(NamedTuple):
    """What a mask function of Transformers means."""

    reason: str | None = None  # why it is no plain pattern
    causal: bool = True
    documents: torch.Tensor | None = None  # [B or 1, S]: number of the document that each token belongs to
    half: bool = False  # a window without its causal side: only beside a causal pattern the one that layers hand on
    block_ids: torch.Tensor | None = None  # [B or 1, S]: of tokens that see all others with the same number; -1 = none
    narrower: int | None = None  # a window that does not bound what tokens of a block see of it, so must not be shorter than any


def _read_pattern(mask_function, attention_mask, q_length: int, kv_length: int, kv_offset: int, kwargs: dict) -> _Pattern:
    if mask_function is None:
        return _Pattern()
    if not tracing.is_compiling():
        return _read_mask_function(mask_function, kv_offset + kv_length, kwargs.get("config"))
    # Dynamo does not show what an inner function closes over (before torch 2.13 not even its name); what the other arguments leave open
    # goes to SDPA.
    if mask_function is masking_utils.causal_mask_function:
        return _Pattern()
    if mask_function is getattr(masking_utils, "bidirectional_mask_function", None):  # absent in Transformers 4.57
        return _Pattern(causal=False)
    if kwargs.get("use_vmap"):
        return _Pattern(_CUSTOM_PATTERN)
    config = kwargs.get("config")
    sliding = kwargs.get("local_size") is not None and getattr(config, "attention_chunk_size", None) is None
    if attention_mask is None and q_length == kv_length and "allow_is_bidirectional_skip" not in kwargs:
        # Causal, and only of what layers do by themselves; before torch 2.13 nobody knows of blocks of images that see each other.
        in_the_mask_alone = (
            not _knows_how_masks_are_made()
            or getattr(mask_function, "__name__", None) == "or_mask"
            or getattr(config, "use_bidirectional_attention", False)
            or getattr(config, "is_causal", True) is False
            or (kwargs.get("local_size") is not None and not (sliding and _hands_on_its_window(type(config))))
        )
        if in_the_mask_alone:
            return _Pattern(_CUSTOM_PATTERN)
        return _Pattern() if tracing.masks_hold_no_documents() else _Pattern(MAYBE_DOCUMENTS)
    # An overlay on the window switches the skips off. So does a static cache; in Transformers 5 (it has use_vmap) only for single tokens,
    # which no overlay concerns.
    skips = kwargs.get("allow_is_causal_skip") or kwargs.get("allow_is_bidirectional_skip")
    if not (sliding and (skips or ("use_vmap" in kwargs and q_length == 1))):
        return _Pattern(_CUSTOM_PATTERN)
    if "allow_is_bidirectional_skip" in kwargs:
        return _Pattern(causal=False) if _adds_the_token_itself(type(config)) else _Pattern(_ONE_SHORT)
    # The source first: a comparison of lengths binds what is exported to one side of it.
    hands_on = _hands_on_its_window(type(config)) or kwargs["local_size"] >= kv_offset + kv_length
    return _Pattern() if hands_on else _Pattern(UNSAID_WINDOW)


@torch.compiler.assume_constant_result
def _knows_how_masks_are_made() -> bool:
    """Whether this Transformers makes masks of nothing but what tracing.py looks at: it cannot see what a new argument adds."""
    makers = (masking_utils.create_causal_mask, masking_utils.create_sliding_window_causal_mask)
    return all(inspect.signature(maker).parameters.keys() <= _ARGUMENTS for maker in makers)


_ARGUMENTS = {  # of Transformers 4.57 to 5.24
    "config", "input_embeds", "inputs_embeds", "attention_mask", "cache", "past_key_values", "cache_position", "position_ids", "layer_idx",
    "allow_is_causal_skip", *tracing.OVERLAYS,
}  # fmt: skip


def _read_mask_function(mask_function: Callable, keys_end: int, config: Any) -> _Pattern:
    if getattr(mask_function, "__module__", None) != masking_utils.__name__:
        return _Pattern(_CUSTOM_PATTERN)
    name, closed_over = _made_by(mask_function)
    match name:
        case "causal_mask_function":
            return _Pattern()
        case "bidirectional_mask_function":
            return _Pattern(causal=False)
        case "sliding_window_overlay" | "sliding_window_bidirectional_overlay":
            window = closed_over["sliding_window"]
            if window >= keys_end:
                return _Pattern(causal=False)
            if config is not None and getattr(config, "sliding_window", None) != window:  # somebody's own, beside what the layers know of
                return _Pattern(_CUSTOM_PATTERN)
            if name == "sliding_window_overlay":
                return _Pattern(causal=False, half=True) if _hands_on_its_window(type(config)) else _Pattern(UNSAID_WINDOW)
            return _Pattern(causal=False) if _adds_the_token_itself(type(config)) else _Pattern(_ONE_SHORT)
        case "and_masks":
            parts = [_read_mask_function(part, keys_end, config) for part in closed_over["mask_functions"]]
            causal = any(part.causal for part in parts)
            with_blocks = [part for part in parts if part.block_ids is not None]
            if len(with_blocks) > 1 or (with_blocks and sum(part.causal for part in parts) > 1):  # which would cut them
                return _Pattern(_CUSTOM_PATTERN)
            return _Pattern(
                next((part.reason for part in parts if part.reason is not None), None),
                causal,
                next((part.documents for part in parts if part.documents is not None), None),
                not causal and any(part.half for part in parts),
                *(with_blocks[0][4:] if with_blocks else ()),
            )
        case "or_masks":
            return _read_union(closed_over["mask_functions"], keys_end, config)
        case "remap_positions_for_packed_sequence":
            within = closed_over["mask_function"]
            pattern = _read_mask_function(within, keys_end, config)
            # Chunks are of positions then, which may be any, and so are the tokens whose blocks it looks up.
            return _Pattern(_CUSTOM_PATTERN) if _is_made_of(within, _CHUNKS) or pattern.block_ids is not None else pattern
        case "packed_sequence_mask_function":
            return _Pattern(causal=False, documents=closed_over["packed_sequence_mask"])
        case _ if name in _CHUNKS and closed_over["chunk_size"] >= keys_end:  # all keys lie in the first chunk
            return _Pattern(causal=False)
    return _Pattern(_CUSTOM_PATTERN)


_CHUNKS = ("chunked_overlay", "_legacy_chunked_overlay")
_REMAPPED = "remap_positions_for_packed_sequence"


def _is_made_of(mask_function: Callable, names: tuple[str, ...]) -> bool:
    """Whether a mask function, or one that has to agree with others in it, is made by one of these."""
    name, closed_over = _made_by(mask_function)
    parts = closed_over["mask_functions"] if name == "and_masks" else (closed_over["mask_function"],) if name == _REMAPPED else ()
    return name in names or any(_is_made_of(part, names) for part in parts)


def _adds_documents(mask_function: Callable) -> bool:
    """Whether the documents of a mask function that was understood are what Transformers itself adds, last, to a pattern within each."""
    name, closed_over = _made_by(mask_function)
    parts = closed_over["mask_functions"] if name == "and_masks" else ()
    if [_made_by(part)[0] for part in parts] != [_REMAPPED, "packed_sequence_mask_function"]:
        return False
    return _read_mask_function(parts[0], sys.maxsize, None).documents is None


def _made_by(mask_function: Callable) -> tuple[str, dict[str, Any]]:
    """The name of the function that is, or made, a mask function of Transformers, and what that closes over."""
    if not isinstance(mask_function, FunctionType):
        return "", {}
    closed_over = dict(zip(mask_function.__code__.co_freevars, (c.cell_contents for c in mask_function.__closure__ or ()), strict=True))
    return mask_function.__qualname__.partition(".")[0], closed_over


def _read_union(mask_functions: tuple[Callable, ...], keys_end: int, config: Any) -> _Pattern:
    """Of a causal pattern and its mirror image, as EmbeddingGemma asks for it: all keys are seen, or those less than a window away; or of a
    causal pattern and blocks of tokens that see all of themselves, as the images of Gemma 3."""
    mask_function, *overlays = mask_functions
    if len(overlays) == 1 and getattr(overlays[0], "__module__", None) == masking_utils.__name__:
        made_by, of_overlay = _made_by(overlays[0])
        pattern = _read_mask_function(mask_function, keys_end, config)
        if made_by == "blockwise_overlay" and pattern.causal and pattern.documents is None and pattern.block_ids is None:
            window = getattr(config, "sliding_window", None) if _is_made_of(mask_function, ("sliding_window_overlay",)) else None
            narrower = window if window is not None and window < keys_end else None
            return pattern._replace(block_ids=of_overlay["block_sequence_ids"], narrower=narrower)
    name, closed_over = _made_by(mask_function)
    parts = closed_over["mask_functions"] if name == "and_masks" else (mask_function,)
    if len(overlays) != 1 or any(getattr(part, "__module__", None) != masking_utils.__name__ for part in parts):
        return _Pattern(_CUSTOM_PATTERN)
    window = getattr(config, "sliding_window", None)
    windows = {made_by: closed_over.get("sliding_window") for made_by, closed_over in map(_made_by, parts)}
    if windows == {"causal_mask_function": None} and _is_always_true(overlays[0]):
        return _Pattern(causal=False)
    is_causal_window = window and windows == {"causal_mask_function": None, "sliding_window_overlay": window}
    if is_causal_window and _is_window_of_both_sides(overlays[0], window):
        return _Pattern(causal=False) if _hands_on_its_window(type(config)) else _Pattern(UNSAID_WINDOW)
    return _Pattern(_CUSTOM_PATTERN)


def _is_always_true(overlay: Callable) -> bool:
    """Whether a mask function says True of indices that it cannot have looked at."""
    if getattr(overlay, "__closure__", ()) is not None:
        return False
    try:
        return bool(overlay(*(_Unseen() for _ in range(4))))
    except Exception:  # it looked at them
        return False


class _Unseen:
    """An index that nothing can be asked of, not even whether it is another."""

    __hash__ = None

    def _raise(self, *_):
        raise TypeError("a mask function looked at an index")

    __eq__ = __ne__ = __bool__ = _raise


def _is_window_of_both_sides(overlay: Callable, window: int) -> bool:
    """Whether it is the function of Transformers' models for distances less than a window."""
    if not getattr(overlay, "__module__", "").startswith("transformers.models."):
        return False
    if _made_by(overlay) != ("_bidirectional_window_overlay", {"sliding_window": window}):
        return False
    seen = [bool(overlay(0, 0, q, k)) for q, k in ((window - 1, 0), (0, window - 1), (window, 0), (0, window))]
    return seen == [True, True, False, False]


@torch.compiler.assume_constant_result
def _layers_agree(config_class: type, causal: bool) -> bool:
    """Whether the layers of these models say by themselves whether they are causal, and never anything else. Those of Gemma, for one, say
    is_causal=False of use_bidirectional_attention, whatever mask the model asks for. False where no layer's source is at hand."""
    return causal in _told_by_layers(_modeling_source(config_class))


@functools.cache
def _told_by_layers(source: str) -> tuple[bool, ...]:
    """The one thing that the layers of a modeling module say of causality, True where they say nothing; nothing where they say now this,
    now that, or there is no source."""
    said = _said_of_causality(source)
    if not source:
        return ()
    if said <= {"True"}:
        return (True,)
    return (False,) if said == {"False"} and "self.is_causal = False" in source else ()


def _said_of_causality(source: str) -> set[str]:
    said = re.findall(r"\bis_causal\b(?:[\"']\]|: [\w |\[\].]+)? ?=\s*([^\n,)#]+)", source)
    return {value.strip() for value in said} - {"self.is_causal"}  # a call that hands on what was said


def set_by_hand(module: torch.nn.Module) -> bool | None:
    """`module.is_causal` where it is not what the layer's class makes it, as a program sets it that turns a decoder into an encoder; None
    where it is, or nobody knows."""
    says = getattr(module, "is_causal", None)
    if not isinstance(says, bool) or getattr(module, "is_cross_attention", False):
        return None
    told = _told_by_class(type(module))
    return None if told is None or says == told else says


@torch.compiler.assume_constant_result
def _told_by_class(layer_class: type) -> bool | None:
    """What the first class of Transformers in a layer's line makes of `is_causal` of all its self-attention, None where it depends."""
    return _made_of_self_attention(layer_class)


@functools.cache  # PERF: every layer asks
def _made_of_self_attention(layer_class: type) -> bool | None:
    said = _said_of_causality(next((_source(c) for c in layer_class.__mro__ if c.__module__.startswith("transformers.")), ""))
    if said == {"False"}:
        return False
    return True if said and said <= {"True", "not is_cross_attention"} else None


@torch.compiler.assume_constant_result
def _adds_the_token_itself(config_class: type) -> bool:
    """Whether the layers of these models give flash attention a bidirectional window as it counts one, with the token itself. The masks of
    Transformers count without: ModernBERT's layers say config.sliding_window + 1, those of Gemma 4's assistant and T5Gemma the same as they
    say of a causal window.
    """
    return re.search(r"sliding_window \+ 1\b", _modeling_source(config_class)) is not None


@torch.compiler.assume_constant_result
def _hands_on_its_window(config_class: type) -> bool:
    """Whether the layers of these models tell the attention function of their window. Those of PhiMoE and Qwen2-MoE do not: theirs is in
    the mask alone. True where no layer's source is at hand."""
    return _calls_with_window(_modeling_source(config_class))


@functools.cache  # PERF: the search takes 0.3 to 1.3 ms, and continuous batching asks in every layer
def _calls_with_window(source: str) -> bool:
    return "attention_interface(" not in source or re.search(_CALL_WITH_WINDOW, source) is not None


def leaves_window_to_mask(config: Any) -> bool:
    """Whether a model with this config has layers with a window that only the mask knows."""
    return bool(getattr(config, "sliding_window", None)) and not _hands_on_its_window(type(config))


CALL_OF_INTERFACE = r"\battention_interface\((?:[^()]|\([^()]*\))*"  # up to any of its arguments
LOOKED_UP_AS_ATTRIBUTE = re.compile(r"\bgetattr\(\s*ALL_ATTENTION_FUNCTIONS\b")  # of a mapping: finds its default, eager, always
_CALL_WITH_WINDOW = re.compile(CALL_OF_INTERFACE + r"\bsliding_window=")


def _modeling_source(config_class: type) -> str:
    """The source of the layers of models with this config: those of the first class in its line that has some, as a program may extend a
    config of Transformers and leave the layers as they are."""
    names = [c.__module__.replace(".configuration_", ".modeling_") for c in config_class.__mro__]
    return next((source for source in map(source_of, names) if "attention_interface(" in source), source_of(names[0]))


def source_of(module_name: str) -> str:
    """The source of a loaded module, or nothing where it cannot be read."""
    module = sys.modules.get(module_name)
    return "" if module is None else _source(module)


@functools.cache  # not of what is not loaded yet
def _source(module_or_class: ModuleType | type) -> str:
    try:
        return inspect.getsource(module_or_class)
    except (OSError, TypeError):
        return ""

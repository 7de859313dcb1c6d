"""The Transformers contract: how `attn_implementation="hf_flash2"` is admitted, masked and computed.

Three parts, top to bottom:

* registration: `register()` puts our attention and mask functions into Transformers' registries and wraps the few functions that would
  refuse our name or accept it for a model we cannot serve;
* `hf_flash2_mask`, called once per forward: turns the model's 2-D mask into the sequences that all layers share;
* `hf_flash2_attention`, called by every attention layer, and `attend`, its core, which patches/ call too.

What our kernels cannot run is refused with the reason (ValueError), or, where the model itself asks for it, computed exactly by torch's
SDPA with one warning; `set_strict(True)` turns those warnings into errors. Only this file and patches/ know Transformers.
"""

import contextlib
import functools
import importlib.util
import inspect
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from . import ops, packing
from .functional import flash_attn_func, flash_attn_ranges_func, flash_attn_varlen_func
from .kvcache import flash_attn_with_kvcache
from .support import reason_unsupported

NAME = "hf_flash2"
PAGED_NAME = f"paged|{NAME}"  # continuous batching of Transformers 5.0 to 5.22
CALLS = "_hf_flash2_calls"  # attribute that patches/ gives to an attention layer: its Calls

logger = logging.getLogger(NAME)

# ---------------------------------------------------------------------------------------------------------------------- notices and records

_SWITCH = {"": False, "0": False, "false": False, "1": True, "true": True}
_strict: bool | None = None  # what set_strict was given; None = what HF_FLASH2_STRICT says
_noticed: set[str] = set()
_calls: dict[torch.nn.Module, list[str]] | None = None


def set_strict(enabled: bool) -> None:
    """Whether attention that our kernels cannot run raises ValueError instead of going to SDPA with a warning. HF_FLASH2_STRICT=1 does."""
    if not isinstance(enabled, bool):
        raise ValueError(f"set_strict takes True or False, got {enabled!r}")
    global _strict
    _strict = enabled


def is_strict() -> bool:
    """What `set_strict` was given last, or else what HF_FLASH2_STRICT says.

    Raises:
        ValueError: HF_FLASH2_STRICT is neither yes nor no.
    """
    if _strict is not None:
        return _strict
    value = os.environ.get("HF_FLASH2_STRICT", "")
    if value.lower() not in _SWITCH:
        raise ValueError(f"HF_FLASH2_STRICT must be 0 or 1, got {value!r}")
    return _SWITCH[value.lower()]


class Calls(Counter[str]):
    """How often the calls of a layer took which route, and the backend that the last one of the op ran on. Not under torch.compile."""

    backend: str | None = None


@contextlib.contextmanager
def record_calls() -> Iterator[dict[torch.nn.Module, list[str]]]:
    """Collect, per attention module, the route of each call: "dense", "padded", "documents" or "sdpa". Not under torch.compile."""
    global _calls
    outer, _calls = _calls, {}
    try:
        yield _calls
    finally:
        _calls = outer


def _record(module: torch.nn.Module, route: str) -> None:
    if torch.compiler.is_compiling():
        return
    if _calls is not None:
        _calls.setdefault(module, []).append(route)
    calls: Calls | None = vars(module).get(CALLS)
    if calls is not None:
        calls[route] += 1


def _record_backend(module: torch.nn.Module) -> None:
    if torch.compiler.is_compiling():  # first: older compilers cannot trace what follows
        return
    calls: Calls | None = vars(module).get(CALLS)
    if calls is not None:
        calls.backend = ops.last_backend()


@torch.compiler.assume_constant_result  # so that a compiled model warns too, while it is being traced
def notice(message: str) -> None:
    """Warn, once a process."""
    if message not in _noticed:
        _noticed.add(message)
        logger.warning(message)


# ----------------------------------------------------------------------------------------------------------------------------- registration

_problems: list[str] = []  # why something of the registration could not be done, in the words of an error message
_transformers: ModuleType | None = None
_masking: ModuleType | None = None  # transformers.masking_utils


def register() -> None:
    """Make Transformers know the name "hf_flash2". Idempotent; never raises: what failed is in `registration_state()` and later errors."""
    global _transformers, _masking
    if _transformers is not None or importlib.util.find_spec("transformers") is None:
        return
    _problems.clear()
    try:
        import transformers
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils, modeling_flash_attention_utils
    except Exception as error:  # noqa: BLE001 - whatever is wrong with transformers, the kernels alone must stay usable
        _problems.append(f"the installed transformers cannot be used: {error}; hf_flash2 needs 4.57 or newer")
        return
    _transformers, _masking = transformers, masking_utils
    for name in (NAME, PAGED_NAME):
        AttentionInterface.register(name, hf_flash2_attention)
        AttentionMaskInterface.register(name, hf_flash2_mask)
    _wrap(modeling_flash_attention_utils, "_lazy_imports", _admitting)
    _wrap(PreTrainedModel, "_check_and_adjust_attn_implementation", _gated)
    _wrap(PreTrainedModel, "get_correct_attn_implementation", _gated)
    _join_trl()


def registration_state() -> dict[str, Any]:
    """What `register` did, as plain data: versions, names, which functions of Transformers are wrapped, and problems in words."""
    if _transformers is None:
        return {"transformers": None, "registered": False, "names": [], "wrapped": {}, "trl": False, "problems": list(_problems)}
    utils, model_class = _transformers.modeling_flash_attention_utils, _transformers.PreTrainedModel
    names = [name for name in (NAME, PAGED_NAME) if _transformers.AttentionInterface._global_mapping.get(name) is hf_flash2_attention]
    wrapped = {
        name: hasattr(getattr(owner, name, None), "_hf_flash2_wraps")
        for owner, name in (
            (utils, "_lazy_imports"),
            (model_class, "_check_and_adjust_attn_implementation"),
            (model_class, "get_correct_attn_implementation"),
        )
    }
    return {
        "transformers": _transformers.__version__,
        "registered": NAME in names,
        "names": names,
        "wrapped": wrapped,
        "trl": _join_trl(),
        "problems": list(_problems),
    }


def _wrap(owner: Any, name: str, wrapper: Any) -> None:
    original = getattr(owner, name, None)
    if original is None:
        _problems.append(
            f"transformers {_transformers.__version__} has no {getattr(owner, '__name__', owner)}.{name}, which hf_flash2 has to wrap; "
            f"update hf_flash2, or use a transformers version it lists"
        )
    elif not hasattr(original, "_hf_flash2_wraps"):
        wrapped = wrapper(original)
        wrapped._hf_flash2_wraps = original
        setattr(owner, name, wrapped)


def _given(function: Callable, position: int, args: tuple, kwargs: dict) -> Any:
    """An argument by its place in the signature of the function, given by position or by name (as ModernBERT of 4.57 does), or None."""
    return args[position] if position < len(args) else kwargs.get(list(inspect.signature(function).parameters)[position])


def _admitting(lazy_imports: Any) -> Any:
    """`_lazy_imports` takes any name with "flash" in it for a kernel of the hub; for ours it has to give our functions."""

    @functools.wraps(lazy_imports)
    def _lazy_imports(*args, **kwargs):
        if _given(lazy_imports, 0, args, kwargs) not in (NAME, PAGED_NAME):
            return lazy_imports(*args, **kwargs)
        utils = sys.modules[lazy_imports.__module__]
        with_kvcache = (_with_kvcache(),) if hasattr(utils, "_flash_with_kvcache_fn") else ()  # absent in Transformers 4
        return (flash_attn_func, flash_attn_varlen_func, *with_kvcache, utils._pad_input, utils._unpad_input)

    return _lazy_imports


def _with_kvcache() -> Any:
    """What continuous batching looks for where it wants to decode by block tables; None where its cache does not hand them on (before
    Transformers 5.23)."""
    from transformers.generation.continuous_batching import PagedAttentionCache

    return flash_attn_with_kvcache if "kwargs" in inspect.signature(PagedAttentionCache.update).parameters else None


def _gated(method: Any) -> Any:
    """A method of PreTrainedModel that admits an implementation: refuse ours, with the reason, for models that it cannot serve."""

    @functools.wraps(method)
    def admit(self, *args, **kwargs):
        if _given(method, 1, (self, *args), kwargs) not in (NAME, PAGED_NAME):
            return method(self, *args, **kwargs)
        is_strict()  # a wrong HF_FLASH2_STRICT is refused here, before any work
        _join_trl()
        reason = reason_model_unsupported(self)
        if reason is not None:
            raise ValueError(f'{type(self).__name__} cannot run with attn_implementation="{NAME}": {reason}')
        try:
            with _among_compatible(self):
                return method(self, *args, **kwargs)
        except (ValueError, ImportError) as error:
            if _problems:
                raise ValueError(f"hf_flash2 is not fully registered: {'; '.join(_problems)}") from error
            raise

    return admit


@contextlib.contextmanager
def _among_compatible(model: torch.nn.Module) -> Iterator[None]:
    """Our name among the implementations that a model says it is compatible with: Transformers takes the first of them for any other."""
    compatible = getattr(model, _COMPATIBLE, None)
    if compatible is None:
        yield
        return
    own = vars(model).get(_COMPATIBLE)
    setattr(model, _COMPATIBLE, [*compatible, NAME, PAGED_NAME])
    try:
        yield
    finally:
        delattr(model, _COMPATIBLE)
        if own is not None:
            setattr(model, _COMPATIBLE, own)


_COMPATIBLE = "_compatible_flash_implementations"


def reason_model_unsupported(model: torch.nn.Module) -> str | None:
    """Why a PreTrainedModel cannot be served, as a sentence that ends with what to do; None when it can."""
    if not getattr(model, "_supports_flash_attn", False):
        others = '"sdpa" or "eager"' if getattr(model, "_supports_sdpa", False) else '"eager"'
        return (
            "Transformers declares no flash attention for it (_supports_flash_attn), as where attention has a position bias or ALiBi, or "
            f'there is none; use {others} (for one part of a composite model: {{"vision_config": "eager", "text_config": "hf_flash2"}})'
        )
    compatible = getattr(model, _COMPATIBLE, None)
    if compatible and NAME not in compatible and not _adds_sinks_alone(type(model)):
        return f'it accepts only {", ".join(compatible)} because of what its attention adds (as sparse patterns); use "eager"'
    if not _calls_the_interface(type(model)):
        return 'its attention layers never call the attention interface of Transformers; use "sdpa" or "eager"'
    return None


@functools.cache
def _calls_the_interface(model_class: type) -> bool:
    """False when the sources of the model define attention layers and none of them uses the interface (as GPT-J, or BERT before 5.0)."""
    own = (c for c in model_class.__mro__ if issubclass(c, _transformers.PreTrainedModel) and c is not _transformers.PreTrainedModel)
    sources = [_source(name) for name in {c.__module__ for c in own}]
    has_attention = any(re.search(r"^class \w*Attention\w*\(nn\.Module\):", source, re.MULTILINE) for source in sources)
    return not has_attention or any("ALL_ATTENTION_FUNCTIONS" in source for source in sources)


@functools.cache
def _adds_sinks_alone(model_class: type) -> bool:
    """Whether sinks are what the layers of a model with a list of compatible implementations hand over besides the usual, as GPT-OSS does.
    What else they might is refused by name when it comes."""
    calls = re.findall(_CALL + r"\)", _source(model_class.__module__))
    beyond = re.compile(rf"\b({'|'.join(_UNSUPPORTED)})=")
    return bool(calls) and all("s_aux=" in call and not beyond.search(call) for call in calls)


@functools.cache
def _source(module_name: str) -> str:
    """The source of a loaded module, or nothing where it cannot be read."""
    try:
        return inspect.getsource(sys.modules[module_name])
    except (KeyError, OSError, TypeError):
        return ""


def _join_trl() -> bool:
    """TRL warns about padding-free training with a name that is not in its set; ours belongs there. Whether it is in."""
    sft_trainer = sys.modules.get("trl.trainer.sft_trainer")
    variants = getattr(sft_trainer, "FLASH_ATTENTION_VARIANTS", None)
    if not isinstance(variants, set):
        return False
    variants.add(NAME)
    return True


# -------------------------------------------------------------------------------------------------------------------------------- sequences

# What the mask function gives to the layers is a tensor that says where the sequences are by itself, because models and their hooks move,
# copy and save it:
#   bool  [B, Sk]         True = a real key; the queries are the last columns
#   uint8 [B, 2 * Sk]     static cache: real keys | columns before the first query
#   uint8 [B, 2, Sk]      documents, no cache: real keys, first token of each document
#   bool  [B, 1, Sq, Sk]  no plain pattern: for SDPA
# An attribute on the same tensor, a `_Sequences` (a reason for the last form), spares the layers deriving the same again. A model may hand
# its mask to a decoder that asks for one again: then Transformers makes bool of two dimensions, which the first two forms survive.
_ATTRIBUTE = "_hf_flash2"
_MAYBE_DOCUMENTS = (
    "position_ids may hold several documents and cannot be looked at while compiling; pass attention_mask, or cu_seq_lens_q/k and "
    "max_length_q/k (DataCollatorWithFlattening(return_flash_attn_kwargs=True))"
)
_CUSTOM_PATTERN = "its mask is no plain causal, bidirectional, sliding-window or document pattern"
_ONE_SHORT = "its layers would leave out the last token on either side of its bidirectional window"
_UNSAID_WINDOW = "its layers leave their sliding window to the mask"
_GIVEN_4D = "a 4-D attention mask was given"


class _Documents(NamedTuple):
    """Packed documents, in the order `flash_attn_varlen_func` takes them."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @classmethod
    def same(cls, found: tuple[torch.Tensor, int] | None) -> "_Documents | None":
        """Queries and keys are the same tokens: cu_seqlens and the longest length."""
        return None if found is None else cls(found[0], found[0], found[1], found[1])


class _Sequences:
    """The sequences of one forward, as one mask describes them, with what was derived from them so far."""

    def __init__(
        self,
        key_mask: torch.Tensor,
        q_offset: int | torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
        causal: bool | None = None,
    ):
        self.key_mask = key_mask  # bool [B, Sk]
        self.q_offset = q_offset  # key column of the first query; None = Sk - Sq
        self.starts = starts  # bool [B, Sk], first tokens of documents, or None
        self.causal = causal  # what the mask function was told; None = not known
        self._derived: dict[Any, Any] = {}

    @classmethod
    def read(cls, mask: torch.Tensor, seqlen_q: int, seqlen_k: int) -> "_Sequences":
        """From a mask of ours, or a 2-D one that a model hands on as the user gave it."""
        attached = getattr(mask, _ATTRIBUTE, None)
        if isinstance(attached, cls):
            if attached.key_mask.shape[1] != seqlen_k:
                raise ValueError(
                    f"the mask of this forward describes {attached.key_mask.shape[1]} keys, but the layer has {seqlen_k}; a decoder with a "
                    'cache needs config.is_decoder=True; if it is one, use attn_implementation="sdpa"'
                )
            return attached
        if _holds_documents(mask):
            return cls(mask[:, 0].bool(), 0, mask[:, 1].bool())
        width = mask.shape[1]
        if mask.dtype == torch.uint8 and width == 2 * seqlen_k:
            planes = mask.unflatten(1, (2, seqlen_k)).bool()
            return cls(planes[:, 0], planes[0, 1].sum())
        if width >= seqlen_k:  # a sliding cache holds the last columns
            return cls(mask[:, width - seqlen_k :].bool())
        return cls(F.pad(mask.bool(), (0, seqlen_k - width)), width - seqlen_q)  # a static cache: the mask ends with the queries

    def padded(self, seqlen_q: int, same_tokens: bool) -> packing.PaddedBatch:
        """same_tokens: queries and keys are the same tokens and their positions matter, as they do when causal or under a window."""
        return self._once(
            ("padded", seqlen_q, same_tokens), lambda: packing.padded_batch(self.key_mask, seqlen_q, self.q_offset, same_tokens)
        )

    def documents(self) -> _Documents | None:
        """The documents of the flattened batch, or None when each row is one. Synchronises with the host, once per forward."""
        return self._once("documents", lambda: _Documents.same(packing.documents_from_starts(self.starts)))

    def has_padding(self) -> bool:
        """Synchronises with the host, once per forward."""
        return self._once("padding", lambda: not bool(self.key_mask.all()))

    def _once(self, key: Any, derive: Callable[[], Any]) -> Any:
        if torch.compiler.is_compiling():  # a tensor of the graph must not outlive it; the compiler merges what every layer derives
            return derive()
        if key not in self._derived:
            self._derived[key] = derive()
        return self._derived[key]

    def visible(self, seqlen_q: int, causal: bool, sliding_window: int | None) -> torch.Tensor:
        """bool [B, 1, Sq, Sk]: the same sequences as a dense mask."""
        seqlen_k = self.key_mask.shape[1]
        q_offset = seqlen_k - seqlen_q if self.q_offset is None else self.q_offset
        return self.key_mask[:, None, None, :] & _band(seqlen_q, seqlen_k, q_offset, causal, sliding_window, self.key_mask.device)


def _window(causal: bool, sliding_window: int | None) -> tuple[int, int]:
    """A sliding window of w tokens counts the token itself: w - 1 others to the left, and as many to the right when not causal."""
    left = sliding_window - 1 if sliding_window else -1
    return left, 0 if causal else left


def _band(seqlen_q: int, seqlen_k: int, q_offset: int | torch.Tensor, causal: bool, sliding_window: int | None, device) -> torch.Tensor:
    """bool [Sq, Sk]: what causality and window let the queries see that start at key column q_offset."""
    distance = torch.arange(seqlen_k, device=device) - torch.arange(seqlen_q, device=device).unsqueeze(1) - q_offset
    left, right = _window(causal, sliding_window)
    band = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        band = band & (distance >= -left)
    if right >= 0:
        band = band & (distance <= right)
    return band


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
        None when certainly nothing is padded; else one of the forms listed above `_ATTRIBUTE`.
    """
    if cache_position is not None:
        q_length, q_offset, device = cache_position.shape[0], cache_position[0], cache_position.device
    else:
        device = kwargs.get("device", "cpu")
    if isinstance(q_offset, torch.Tensor):
        q_offset = q_offset.clone()  # a static cache counts up in place, before the layers derive anything from it
    pattern = _read_pattern(mask_function, attention_mask, q_length, kv_length, kv_offset, kwargs)
    if attention_mask is not None and _holds_documents(attention_mask):
        attached = getattr(attention_mask, _ATTRIBUTE, None)
        if pattern.reason is None and isinstance(attached, _Sequences) and attached.causal == pattern.causal:
            return attention_mask
        numbers = attention_mask[:, 1].cumsum(1)
        mask_function = _masking.and_masks(mask_function, _masking.packed_sequence_mask_function(numbers))
        pattern, attention_mask = pattern._replace(documents=numbers), None
    if pattern.reason is not None:
        queries = {"q_length": q_length, "q_offset": q_offset} if cache_position is None else {"cache_position": cache_position}
        mask = _masking.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](
            batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask,
            **queries, **kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
        )  # fmt: skip
        return _attach(mask, pattern.reason)
    if pattern.documents is not None:
        numbers = pattern.documents.expand(batch_size, -1)
        starts = F.pad(numbers[:, 1:] != numbers[:, :-1], (1, 0), value=True)
        real = torch.ones_like(starts)
        return _attach(torch.stack((real, starts), 1).to(torch.uint8), _Sequences(real, 0, starts, pattern.causal))

    # A tensor offset is not read: there may be empty slots behind the queries wherever there is room for them.
    empty_slots = pattern.causal and kv_offset == 0 and kv_length > q_length + (0 if isinstance(q_offset, torch.Tensor) else q_offset)
    if attention_mask is None and not empty_slots:
        return None
    if attention_mask is None:
        key_mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    else:
        key_mask = _real_keys(attention_mask, kv_length, kv_offset)
    if not empty_slots:
        return _attach(key_mask, _Sequences(key_mask, causal=pattern.causal))
    column = torch.arange(kv_length, device=key_mask.device)
    key_mask = key_mask & (column < q_offset + q_length)
    mask = torch.cat((key_mask, (column < q_offset).expand_as(key_mask)), 1).to(torch.uint8)
    return _attach(mask, _Sequences(key_mask, q_offset, causal=pattern.causal))


def _holds_documents(mask: torch.Tensor) -> bool:
    return mask.dim() == 3 and mask.shape[1] == 2 and mask.dtype == torch.uint8


def _attach(mask: torch.Tensor, attribute: _Sequences | str) -> torch.Tensor:
    setattr(mask, _ATTRIBUTE, attribute)
    return mask


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


def _read_pattern(mask_function, attention_mask, q_length: int, kv_length: int, kv_offset: int, kwargs: dict) -> _Pattern:
    if mask_function is None:
        return _Pattern()
    if not torch.compiler.is_compiling():
        return _read_mask_function(mask_function, kv_offset + kv_length, kwargs.get("config"))
    # Dynamo does not show what an inner function closes over (before torch 2.13 not even its name); what the other arguments leave open
    # goes to SDPA.
    if mask_function is _masking.causal_mask_function:
        return _Pattern()
    if mask_function is getattr(_masking, "bidirectional_mask_function", None):  # absent in Transformers 4.57
        return _Pattern(causal=False)
    if kwargs.get("use_vmap"):
        return _Pattern(_CUSTOM_PATTERN)
    if attention_mask is None and q_length == kv_length:
        return _Pattern(_MAYBE_DOCUMENTS)
    sliding = kwargs.get("local_size") is not None and getattr(kwargs.get("config"), "attention_chunk_size", None) is None
    # An overlay on the window switches the skips off. So does a static cache; in Transformers 5 (it has use_vmap) only for single tokens,
    # which no overlay concerns.
    skips = kwargs.get("allow_is_causal_skip") or kwargs.get("allow_is_bidirectional_skip")
    if not (sliding and (skips or ("use_vmap" in kwargs and q_length == 1))):
        return _Pattern(_CUSTOM_PATTERN)
    config_class = type(kwargs["config"])
    if "allow_is_bidirectional_skip" in kwargs:
        return _Pattern(causal=False) if _adds_the_token_itself(config_class) else _Pattern(_ONE_SHORT)
    sees_all = kwargs["local_size"] >= kv_offset + kv_length
    return _Pattern() if sees_all or _hands_on_its_window(config_class) else _Pattern(_UNSAID_WINDOW)


def _read_mask_function(mask_function: Callable, keys_end: int, config: Any) -> _Pattern:
    if getattr(mask_function, "__module__", None) != _masking.__name__:
        return _Pattern(_CUSTOM_PATTERN)
    closed_over = dict(zip(mask_function.__code__.co_freevars, (c.cell_contents for c in mask_function.__closure__ or ()), strict=True))
    match mask_function.__qualname__.partition(".")[0]:
        case "causal_mask_function":
            return _Pattern()
        case "bidirectional_mask_function":
            return _Pattern(causal=False)
        case "sliding_window_overlay":
            sees_all = closed_over["sliding_window"] >= keys_end
            return _Pattern(causal=False) if sees_all or _hands_on_its_window(type(config)) else _Pattern(_UNSAID_WINDOW)
        case "sliding_window_bidirectional_overlay":
            sees_all = closed_over["sliding_window"] >= keys_end
            return _Pattern(causal=False) if sees_all or _adds_the_token_itself(type(config)) else _Pattern(_ONE_SHORT)
        case "and_masks":
            parts = [_read_mask_function(part, keys_end, config) for part in closed_over["mask_functions"]]
            return _Pattern(
                next((part.reason for part in parts if part.reason is not None), None),
                any(part.causal for part in parts),
                next((part.documents for part in parts if part.documents is not None), None),
            )
        case "remap_positions_for_packed_sequence":
            return _read_mask_function(closed_over["mask_function"], keys_end, config)
        case "packed_sequence_mask_function":
            return _Pattern(causal=False, documents=closed_over["packed_sequence_mask"])
        case "chunked_overlay" | "_legacy_chunked_overlay" if closed_over["chunk_size"] >= keys_end:  # all keys lie in the first chunk
            return _Pattern(causal=False)
    return _Pattern(_CUSTOM_PATTERN)


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
    source = _modeling_source(config_class)
    return "attention_interface(" not in source or re.search(_CALL_WITH_WINDOW, source) is not None


def leaves_window_to_mask(config: Any) -> bool:
    """Whether a model with this config has layers with a window that only the mask knows."""
    return bool(getattr(config, "sliding_window", None)) and not _hands_on_its_window(type(config))


_CALL = r"\battention_interface\((?:[^()]|\([^()]*\))*"  # up to any of its arguments
_CALL_WITH_WINDOW = re.compile(_CALL + r"\bsliding_window=")


def _modeling_source(config_class: type) -> str:
    return _source(config_class.__module__.replace(".configuration_", ".modeling_"))


# ---------------------------------------------------------------------------------------------------------------------------- the attention

# Keyword arguments that reach every layer and change nothing about attention. Unknown ones are refused: they may.
_HARMLESS = {
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "encoder_attention_mask", "encoder_hidden_states", "grid_thw",
    "guidance_scale", "ignore_index", "image_sizes", "inputs_embeds", "labels", "layer_idx", "logits_indices", "logits_processor_args",
    "logits_to_keep", "max_length_k", "max_length_q", "mm_token_type_ids", "num_items_in_batch", "output_attentions",
    "output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings", "position_ids", "return_dict",
    "return_loss", "return_shared_kv_states", "seq_idx", "shift_labels", "token_type_ids", "use_cache", "vision_feature_layer",
    "vision_feature_select_strategy",
}  # fmt: skip
# What no kernel of ours does yet, by the name it arrives under.
_UNSUPPORTED = {
    "position_bias": "adds a bias to the attention scores",
    "head_mask": "masks heads",
    "indices": "selects keys",
    "block_indices": "selects keys",
}


# These layers hand on the window of their model's encoder: their own masks have none, as they see all of the context.
_WITHOUT_WINDOW = {"DiffusionGemmaDecoderTextAttention"}


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
        is_causal: wins over `module.is_causal`; a mask of ours wins over both.
        cache: the paged cache of continuous batching; before Transformers 5.24, whose layers update it themselves.
        s_aux, softcap: attention sinks [H], as GPT-OSS has them, and a cap of the scores, as Gemma 2: `flash_attn_func`.
        kwargs: as in `attend`.
    Returns:
        (out [B, Sq, H, D], None).
    Raises:
        ValueError: an argument that cannot be honoured, by name.
    """
    if not is_paged(cache):  # from Transformers 5.24 on this may be the one that the layer has updated
        cache = None
    if cache is not None or "read_index" in kwargs:  # continuous batching
        if sliding_window is None and leaves_window_to_mask(module.config):
            raise ValueError(
                f"{type(module).__name__} cannot run in continuous batching: {_UNSAID_WINDOW}, and there is none; "
                "use generate, or config.sliding_window=None if no sequence is longer than the window"
            )
        key, value = update_paged_cache(module, key, value, cache, kwargs)
        attention_mask = None  # made from the queries' position_ids alone; the lengths that come with the cache say all
    if scaling is None and hasattr(module, "scale_attn_weights"):
        # GPT-2 before Transformers 5 leaves the scale to eager attention and says is_causal=False for every padded batch.
        is_causal, scaling = not module.is_cross_attention, gpt2_scaling(module)
    if type(module).__name__ in _WITHOUT_WINDOW:
        sliding_window = None
    out = attend(
        module, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attention_mask,
        causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
        scaling=scaling, dropout=dropout, sliding_window=sliding_window, s_aux=s_aux, softcap=softcap, **kwargs,
    )  # fmt: skip
    return out, None


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
        causal: aligned to the last real key of each sequence. A mask of ours that knows better wins.
        kwargs: what else Transformers passed. Documents are honoured (cu_seq_lens_q/k with max_length_q/k, or position_ids that restart),
            and pages (block_table with k_cache, v_cache, cu_seq_lens_k), what changes the result and has no kernel is refused, the rest is
            ignored.
    Returns:
        out [B, Sq, H, D], zero in padded rows, in q's dtype (in the autocast dtype under autocast).
    """
    pages = None
    if kwargs.get("block_table") is not None:
        pages = [kwargs.pop(name, None) for name in ("block_table", "k_cache", "v_cache")]
    for name, argument in kwargs.items():
        if argument is not None and name not in _HARMLESS:
            _refuse(module, name)
    if pages is not None:
        options = {"softmax_scale": scaling, "causal": causal, "softcap": softcap or 0.0, "s_aux": s_aux}
        return _decode_pages(module, q, k, v, *pages, kwargs["cu_seq_lens_k"], sliding_window, options)
    if kwargs.get("output_attentions"):
        notice('hf_flash2: no attention probabilities are computed, so output_attentions=True gives none; use attn_implementation="eager"')
    q_dtype = q.dtype
    q, k, v = _in_one_dtype(module, q, k, v)
    sequences, documents, dense_mask = _layout(module, attention_mask, q, k, kwargs)
    known = getattr(attention_mask, _ATTRIBUTE, None)
    if isinstance(known, _Sequences) and known.causal is not None:  # some layers say is_causal=False because there is a mask
        causal = known.causal
    reason = _reason_for_sdpa(q, v, dense_mask)
    if reason is None:
        options = {"dropout_p": dropout, "softmax_scale": scaling, "softcap": softcap or 0.0, "s_aux": s_aux}
        options["deterministic"] = bool(kwargs.get("deterministic"))
        out = _run_kernel(module, q, k, v, sequences, documents, causal, sliding_window, options)
        _record_backend(module)
    else:
        _fall_back(module, reason, capped=bool(softcap))
        out = _sdpa(q, k, v, sequences, documents, dense_mask, dropout, scaling, causal, sliding_window, s_aux, softcap)
    if out.dtype != q_dtype and not _autocasts(out.device.type):
        out = out.to(q_dtype)
    return out


def _run_kernel(module, q, k, v, sequences, documents, causal, sliding_window, options: dict[str, Any]) -> torch.Tensor:
    options |= {"causal": causal, "window_size": _window(causal, sliding_window)}
    if documents is not None:
        _record(module, "documents")
        packed = (x.flatten(0, 1) for x in (q, k, v))
        return flash_attn_varlen_func(*packed, *documents, **options).unflatten(0, q.shape[:2])
    if sequences is not None:
        _record(module, "padded")
        padded = sequences.padded(q.shape[1], same_tokens=causal or bool(sliding_window))
        ranges = (padded.ranges_q, padded.ranges_k, padded.key_mask)
        return flash_attn_ranges_func(q, k, v, *ranges, **options)
    _record(module, "dense")
    return flash_attn_func(q, k, v, **options)


def _refuse(module: torch.nn.Module, name: str) -> None:
    what = _UNSUPPORTED.get(name, "may change the result, and hf_flash2 does not know it")
    raise ValueError(
        f'{type(module).__name__} passes {name} to its attention, which {what}; use attn_implementation="eager" for this model'
    )


def _layout(module, attention_mask, q, k, kwargs) -> tuple[_Sequences | None, _Documents | None, torch.Tensor | None]:
    """Where the sequences are: at most one of (a padded batch, documents, a 4-D mask)."""
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
        if getattr(attention_mask, _ATTRIBUTE, None) == _MAYBE_DOCUMENTS:
            return None, documents, None
        return None, None, _within_documents(attention_mask, documents, q.shape[:2], k.shape[:2])
    if attention_mask.dim() != 2 and not _holds_documents(attention_mask):
        raise ValueError(f"attention_mask must have 2 or 4 dimensions, got {list(attention_mask.shape)}")
    if attention_mask.shape[0] != q.shape[0]:
        raise ValueError(f"attention_mask must have a row for each of the {q.shape[0]} of the batch, got {list(attention_mask.shape)}")
    sequences = _Sequences.read(attention_mask, q.shape[1], k.shape[1])
    documents = _given_documents(module, q, k, kwargs)
    if sequences.starts is not None:
        return None, documents or sequences.documents(), None
    if documents is not None:
        if torch.compiler.is_compiling():
            raise ValueError(
                "attention_mask and cu_seq_lens_q/k: which counts depends on the mask's values, unknown while compiling; pass one"
            )
        if not sequences.has_padding():
            return None, documents, None
        notice("hf_flash2: attention_mask has padding, so it counts and cu_seq_lens_q/k are not looked at; pass one of the two")
    return sequences, None, None


def _given_documents(module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, kwargs: dict) -> _Documents | None:
    cu_seqlens_q, cu_seqlens_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return None
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise ValueError(f"cu_seq_lens_q and cu_seq_lens_k come together, got only cu_seq_lens_{'q' if cu_seqlens_k is None else 'k'}")
    if getattr(module, "_is_replica", False):  # of torch.nn.DataParallel, which cuts every tensor of a batch into equal parts
        for bounds, tokens in ((cu_seqlens_q, q.shape[:2].numel()), (cu_seqlens_k, k.shape[:2].numel())):
            first, end = bounds[[0, -1]].tolist()  # waits for the GPU, for replicas alone
            if (first, end) != (0, tokens):
                raise ValueError(
                    f"torch.nn.DataParallel cannot divide packed documents among GPUs: this one has {tokens} tokens, and cu_seq_lens from "
                    f"{first} to {end}; start a process for each GPU (torchrun, accelerate launch), or show this one a single GPU "
                    "(CUDA_VISIBLE_DEVICES)"
                )
    max_seqlen_q, max_seqlen_k = kwargs.get("max_length_q"), kwargs.get("max_length_k")
    return _Documents(
        cu_seqlens_q.to(torch.int32),
        cu_seqlens_k.to(torch.int32),
        q.shape[0] * q.shape[1] if max_seqlen_q is None else max_seqlen_q,
        k.shape[0] * k.shape[1] if max_seqlen_k is None else max_seqlen_k,
    )


def _within_documents(mask: torch.Tensor, documents: _Documents, queries: torch.Size, keys: torch.Size) -> torch.Tensor:
    """A 4-D mask, bool or additive, that sees nothing of other documents; queries and keys are (B, S)."""

    def numbers(cu_seqlens: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        token = torch.arange(shape.numel(), device=mask.device)
        return torch.bucketize(token, cu_seqlens[1:], right=True).unflatten(0, shape)

    number_q, number_k = numbers(documents.cu_seqlens_q, queries), numbers(documents.cu_seqlens_k, keys)
    same = number_q[:, None, :, None] == number_k[:, None, None, :]
    columns = mask[..., : keys[1]]
    within = columns & same if mask.dtype == torch.bool else columns.masked_fill(~same, float("-inf"))
    return _attach(within, getattr(mask, _ATTRIBUTE, _GIVEN_4D))


class _LookedAt(NamedTuple):
    """What position_ids held when the first layer of a forward looked at them."""

    documents: _Documents | None
    version: int | None  # torch's counter of changes in place, which tensors of torch.inference_mode do not have
    layers: WeakSet[torch.nn.Module]  # those of this forward so far; one that comes again is of another forward


_positions = WeakTensorKeyDictionary()  # not on the tensor: it is the user's, who may save it


def _restarting_documents(
    module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, position_ids: torch.Tensor | None
) -> _Documents | None:
    """Documents of one row that its model's masks do not separate but its position_ids do. Synchronises with the host, once per forward."""
    if position_ids is None or torch.compiler.is_compiling() or position_ids.dim() != 2 or position_ids.is_meta:
        return None
    if not (q.shape[0] == position_ids.shape[0] == 1 and 1 < q.shape[1] == k.shape[1] == position_ids.shape[1]):
        return None
    version = None if position_ids.is_inference() else position_ids._version
    known: _LookedAt | None = _positions.get(position_ids)
    if known is None or known.version != version or module in known.layers:
        known = _LookedAt(_Documents.same(packing.documents_from_position_ids(position_ids)), version, WeakSet())
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
        return getattr(dense_mask, _ATTRIBUTE, _GIVEN_4D)
    return reason_unsupported(q.device.type, q.dtype, max(q.shape[-1], v.shape[-1]))


def _fall_back(module: torch.nn.Module, reason: str, capped: bool) -> None:
    if is_strict():
        raise ValueError(f"{type(module).__name__} cannot run on hf_flash2 kernels, and set_strict(True) forbids SDPA: {reason}")
    _record(module, "sdpa")
    if not torch.compiler.is_compiling():
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
        dense_mask = _band(q.shape[1], k.shape[1], k.shape[1] - q.shape[1], causal, sliding_window, q.device)
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
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, dense_mask, dropout, scale=scaling, enable_gqa=gqa).transpose(1, 2)


def _capped(q, k, v, mask: torch.Tensor, dropout: float, scaling: float | None, softcap: float) -> torch.Tensor:
    """[B, H, Sq, D] of tensors with heads first and a mask, bool or added to the capped scores."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * (
        q.shape[-1] ** -0.5 if scaling is None else scaling
    )
    scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    probabilities = scores.softmax(-1).masked_fill((scores == float("-inf")).all(-1, keepdim=True), 0.0)
    return F.dropout(probabilities, dropout).to(v.dtype) @ v


def _sdpa_documents(q, k, v, documents, dropout, scaling, causal, sliding_window, s_aux, softcap) -> torch.Tensor:
    """One document after the other. Reads the lengths, so it synchronises with the host."""
    tokens_q, tokens_k, tokens_v = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v))
    bounds_q, bounds_k = documents.cu_seqlens_q.tolist(), documents.cu_seqlens_k.tolist()
    settings = (None, None, None, dropout, scaling, causal, sliding_window, s_aux, softcap)
    pieces = [
        _sdpa(tokens_q[:, q0:q1], tokens_k[:, k0:k1], tokens_v[:, k0:k1], *settings)
        for q0, q1, k0, k1 in zip(bounds_q[:-1], bounds_q[1:], bounds_k[:-1], bounds_k[1:], strict=True)
    ]
    out = torch.cat(pieces, 1)
    return F.pad(out, (0, 0, 0, 0, 0, tokens_q.shape[1] - out.shape[1])).squeeze(0).unflatten(0, q.shape[:2])


def is_paged(cache: Any) -> bool:
    """Whether this is the cache of continuous batching, which is none of Transformers' usual ones."""
    return cache is not None and not isinstance(cache, _transformers.Cache)


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
    options |= {"cache_seqlens": lengths, "block_table": block_table[:tokens], "window_size": _window(options["causal"], sliding_window)}
    _record(module, "documents")
    try:
        out = flash_attn_with_kvcache(queries, k_cache, v_cache, keys, values, **options)
    except ValueError as error:  # while continuous batching warms up, before it has generated anything
        raise ValueError(
            f"{type(module).__name__} cannot decode from pages: {error}; or use ContinuousBatchingConfig(max_blocks_per_request=0), "
            "which gathers them"
        ) from error
    _record_backend(module)
    return out.squeeze(1).unsqueeze(0).to(q.dtype)


def update_paged_cache(
    module: torch.nn.Module, key: torch.Tensor, value: torch.Tensor, cache: Any, kwargs: dict
) -> tuple[torch.Tensor, torch.Tensor]:
    """Continuous batching: write the new keys and values [1, Hk, T, D] into the paged cache and get back all that the batch reads.

    Leaves in kwargs what describes the sequences, and takes out what only the cache needs. cache=None: the layer has updated it. With a
    block_table nothing is written yet: kwargs have the pages then, and `attend` does both.
    """
    if cache is None:
        pass
    elif "kwargs" in inspect.signature(cache.update).parameters:
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

"""How `attn_implementation="hf_flash2"` is admitted: `register()` puts our attention and mask functions into Transformers' registries and
wraps the few functions that would refuse our name, or accept it for a model that we cannot serve.
"""

import contextlib
import functools
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from . import masks
from .functional import flash_attn_func, flash_attn_varlen_func
from .interface import UNSUPPORTED, hf_flash2_attention, takes_kwargs
from .kvcache import flash_attn_with_kvcache
from .masks import CALL_OF_INTERFACE, LOOKED_UP_AS_ATTRIBUTE, hf_flash2_mask, source_of
from .notices import NAME, is_strict

PAGED_NAME = f"paged|{NAME}"  # continuous batching of Transformers 5.0 to 5.22

_problems: list[str] = []  # why something of the registration could not be done, in the words of an error message
_to_wrap: list[tuple[Any, str]] = []  # owners and names of the functions that are wrapped, or should be
_transformers: ModuleType | None = None


def register() -> None:
    """Make Transformers know the name "hf_flash2". Idempotent; never raises: what failed is in `registration_state()` and later errors."""
    global _transformers
    if _transformers is not None:
        return
    _problems.clear()
    try:
        if importlib.util.find_spec("transformers") is None:
            return
        import transformers
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils, modeling_flash_attention_utils
    except Exception as error:  # noqa: BLE001 - whatever is wrong with transformers, the kernels alone must stay usable
        _problems.append(f"the installed transformers cannot be used: {error}; hf_flash2 needs 4.57 or newer")
        return
    _transformers, masks.masking_utils = transformers, masking_utils
    for name in (NAME, PAGED_NAME):
        AttentionInterface.register(name, hf_flash2_attention)
        AttentionMaskInterface.register(name, hf_flash2_mask)
    _wrap(modeling_flash_attention_utils, "_lazy_imports", _admitting)
    _wrap(PreTrainedModel, "_check_and_adjust_attn_implementation", _gated)
    _wrap(PreTrainedModel, "get_correct_attn_implementation", _gated)
    _join_others()


def registration_state() -> dict[str, Any]:
    """What `register` did, as plain data: versions, names, which functions of Transformers are wrapped, and problems in words."""
    if _transformers is None:
        return {"transformers": None, "registered": False, "names": [], "wrapped": {}, "trl": False, "problems": list(_problems)}
    names = [name for name in (NAME, PAGED_NAME) if _transformers.AttentionInterface._global_mapping.get(name) is hf_flash2_attention]
    wrapped = {name: hasattr(getattr(owner, name, None), "_hf_flash2_wraps") for owner, name in _to_wrap}
    return {
        "transformers": _transformers.__version__,
        "registered": NAME in names,
        "names": names,
        "wrapped": wrapped,
        "trl": _join_trl(),
        "problems": list(_problems),
    }


def _wrap(owner: Any, name: str, wrapper: Any) -> None:
    if (owner, name) not in _to_wrap:
        _to_wrap.append((owner, name))
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

    return flash_attn_with_kvcache if takes_kwargs(PagedAttentionCache) else None


def _gated(method: Any) -> Any:
    """A method of PreTrainedModel that admits an implementation: refuse ours, with the reason, for models that it cannot serve."""

    @functools.wraps(method)
    def admit(self, *args, **kwargs):
        if _given(method, 1, (self, *args), kwargs) not in (NAME, PAGED_NAME):
            return method(self, *args, **kwargs)
        is_strict()  # a wrong HF_FLASH2_STRICT is refused here, before any work
        _join_others()
        reason = reason_model_unsupported(self)
        if reason is not None:
            advice = _FOR_PARTS if self.config.sub_configs or self.config.base_config_key else ""  # it has parts, or may be one
            raise ValueError(f'{type(self).__name__} cannot run with attn_implementation="{NAME}": {reason}{advice}')
        try:
            _mind_hooks(self)
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
    if not (getattr(model, "_supports_flash_attn", False) or _is_beyond_flash_for_its_blocks(type(model))):
        others = '"sdpa" or "eager"' if getattr(model, "_supports_sdpa", False) else '"eager"'
        return (
            "Transformers declares no flash attention for it (_supports_flash_attn), as where attention has a position bias or ALiBi, or "
            f"masks of its own, or where there is none; use {others}"
        )
    compatible = getattr(model, _COMPATIBLE, None)
    if compatible and NAME not in compatible and not _adds_sinks_alone(type(model)):
        return f'it accepts only {", ".join(compatible)} because of what its attention adds (as sparse patterns); use "eager"'
    if not _calls_the_interface(type(model)):
        return 'its attention layers never call the attention interface of Transformers; use "sdpa" or "eager"'
    if _always_finds_eager(type(model)):
        return (
            "some of its layers look their attention up as an attribute of Transformers' attention interface, a mapping, and so run eager "
            'attention, with masks that are not for it; use "sdpa" or "eager"'
        )
    return None


_FOR_PARTS = "; of a model made of several, load it so and call hf_flash2.patch(model), which switches those that can"


def _own_classes(model_class: type) -> list[type]:
    base = _transformers.PreTrainedModel
    return [c for c in model_class.__mro__ if issubclass(c, base) and c is not base]


@functools.cache
def _calls_the_interface(model_class: type) -> bool:
    """False when the sources of the model define attention layers and none of them uses the interface (as GPT-J, or BERT before 5.0)."""
    sources = [source_of(name) for name in {c.__module__ for c in _own_classes(model_class)}]
    has_attention = any(re.search(r"^class \w*Attention\w*\(nn\.Module\):", source, re.MULTILINE) for source in sources)
    return not has_attention or any("ALL_ATTENTION_FUNCTIONS" in source for source in sources)


@functools.cache
def _is_beyond_flash_for_its_blocks(model_class: type) -> bool:
    """Whether Transformers takes back, for this model alone, that its kind runs on flash attention, and its masks have blocks of tokens
    that see all of themselves, as images in Gemma 3 (from 5.24 on): other flash attention does without masks, so without these, too."""
    own = _own_classes(model_class)
    says = [vars(c)["_supports_flash_attn"] for c in own if "_supports_flash_attn" in vars(c)]
    if not says or says[0] or not any(says):
        return False
    return _is_made_with(model_class, re.compile("block_sequence_ids"))


@functools.cache
def _always_finds_eager(model_class: type) -> bool:
    """Whether the model makes layers that find eager attention whatever its config names, as those of Kosmos-2.5's vision tower."""
    return _is_made_with(model_class, LOOKED_UP_AS_ATTRIBUTE)


def _is_made_with(model_class: type, pattern: re.Pattern) -> bool:
    """Whether something is in the sources of the classes of a model, or of those in the same modules that it is made of."""
    own = _own_classes(model_class)
    source = "\n".join(source_of(name) for name in {c.__module__ for c in own})
    if pattern.search(source) is None:
        return False
    _, *parts = re.split(r"^class (\w+)", source, flags=re.MULTILINE)
    bodies = dict(zip(parts[::2], parts[1::2], strict=True))
    made, found = set(), {c.__name__ for c in own}
    while found:
        name = found.pop()
        made.add(name)
        found |= set(re.findall(r"\b(\w+)\(", bodies.get(name, ""))) & bodies.keys() - made
    return any(pattern.search(bodies.get(name, "")) for name in made)


@functools.cache
def _adds_sinks_alone(model_class: type) -> bool:
    """Whether sinks are what the layers of a model with a list of compatible implementations hand over besides the usual, as GPT-OSS does.
    What else they might is refused by name when it comes."""
    calls = re.findall(CALL_OF_INTERFACE + r"\)", source_of(model_class.__module__))
    beyond = re.compile(rf"\b({'|'.join(UNSUPPORTED)})=")
    return bool(calls) and all("s_aux=" in call and not beyond.search(call) for call in calls)


def _join_others() -> None:
    """Make known what only a library that is imported later asks: called again with every model that is loaded."""
    _join_trl()
    _join_trainer()
    _join_accelerate()


def _is_ours(module: Any) -> bool:
    """Of a layer, or of a model, whose text alone may be ours: what sees images is another's, where processes share sequences."""
    config = getattr(module, "config", None)
    config = getattr(config, "text_config", None) or config
    return getattr(config, "_attn_implementation", None) == NAME


def _join_trl() -> bool:
    """Where TRL has a set of names, it warns about padding-free training with one that is not in it (1.16 has none). Whether ours is in."""
    sft_trainer = sys.modules.get("trl.trainer.sft_trainer")
    variants = getattr(sft_trainer, "FLASH_ATTENTION_VARIANTS", None)
    if not isinstance(variants, set):
        return False
    variants.add(NAME)
    return True


def _join_trainer() -> None:
    """Trainer, once it is imported, takes "sdpa" alone for context parallelism."""
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if hasattr(trainer, _TRAINERS_CHECK):
        _wrap(trainer, _TRAINERS_CHECK, _sharing)


_TRAINERS_CHECK = "_prepare_context_parallel_inputs"


def _sharing(method: Any) -> Any:
    """The method of Trainer that looks at the implementation: ours brings the parts of a sequence together, too (context_parallel.py)."""

    @functools.wraps(method)
    def prepare(self, model, *args, **kwargs):
        if not _is_ours(model):
            return method(self, model, *args, **kwargs)
        config = model.config
        before, config._attn_implementation_internal = config._attn_implementation_internal, "sdpa"
        try:
            return method(self, model, *args, **kwargs)
        finally:
            config._attn_implementation_internal = before

    return prepare


def _join_accelerate() -> None:
    """accelerate, once it is imported, takes the masks away from models that share sequences, and refuses those with a sliding window."""
    accelerator = sys.modules.get("accelerate.accelerator")
    if hasattr(accelerator, _ACCELERATES_HOOKS):
        _wrap(accelerator, _ACCELERATES_HOOKS, _keeping_masks)
    elif hasattr(accelerator, "ParallelismConfig") and _NO_HOOKS not in _problems:
        _problems.append(_NO_HOOKS)


_ACCELERATES_HOOKS = "_attach_context_parallel_hooks"
_NO_HOOKS = (
    f"this accelerate has no {_ACCELERATES_HOOKS}, which hf_flash2 has to wrap: under context parallelism it may take attention_mask away, "
    "so leave padding out of the rows"
)


def _keeping_masks(attach_hooks: Any) -> Any:
    """The function that does both, for any attention but ours, which knows what to do with masks and windows (context_parallel.py)."""

    @functools.wraps(attach_hooks)
    def attach(model, *args, **kwargs):
        if not _is_ours(model):
            attach_hooks(model, *args, **kwargs)

    return attach


def _mind_hooks(model: torch.nn.Module) -> None:
    """Where accelerate has prepared a model before it becomes ours: let its hooks take masks away from other attention alone."""
    for module in model.modules():
        for key, hook in module._forward_pre_hooks.items():
            if getattr(hook, "__qualname__", "").startswith(_ACCELERATES_HOOKS):
                module._forward_pre_hooks[key] = _unless_ours(hook)


def _unless_ours(hook: Callable) -> Callable:
    def unless_ours(module, args, kwargs):
        return None if _is_ours(module) else hook(module, args, kwargs)

    return unless_ours

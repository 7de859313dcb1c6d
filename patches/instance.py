"""Patching one model: its config is copied and switched, its attention layers are bound, and all of it comes off again."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from .. import ops
from ..masks import LOOKED_UP_AS_ATTRIBUTE, source_of
from ..notices import CALLS, NAME
from ..registration import reason_model_unsupported
from . import gpt2, llama, mistral
from .binding import IMPLEMENTATION, LAYER, OwnConfig, bind, in_place_of, own_configs, restore_configs, switch, unbind, wrapper_of
from .contract import packed_part, reason_loss_is_upstream, reason_not_packable
from .family import Family
from .loss import causal_lm_forward
from .packed import base_forward
from .report import PatchReport

PATCHES: dict[str, Family] = {family.name: family for family in (llama.FAMILY, mistral.FAMILY, gpt2.FAMILY)}

_PATCH = "_hf_flash2_patch"  # attribute of a patched PreTrainedModel: its _Patch


@dataclass
class _Patch:
    configs: list[OwnConfig]
    options: dict[str, bool]  # of `patch`
    implementations: str  # of the model and its parts, once it was patched
    report: PatchReport


def patch(model: nn.Module, *, packed: bool = False, keep_logits: bool = False) -> PatchReport:
    """Let this model's attention run on hf_flash2. Patching it again with the same options changes nothing and returns the same report.

    Works before and after PEFT, accelerate and torch.compile have wrapped the model, and with gradient checkpointing. While it is patched,
    `model.config` is a copy of its own: what you change there is kept by `unpatch`. As its layers hold forwards of their own, a patched
    model that nobody needs any more is freed by the garbage collector, not at once: `del model; gc.collect()`.

    Args:
        packed: run the whole decoder, not attention alone, on the real tokens of padded batches: [B, S] inputs with their attention_mask
            come in, are packed once into [1, T], and hidden states and logits come out [B, S] again, zero in the padding. Of a model that
            sees images or hears, the language model inside. For training, and for evaluation with use_cache=False; calls with a cache run
            padded. Positions are those of the padded batch, on all their axes. In training with
            labels the loss then comes without logits (`output.logits` is None), computed in chunks over the rows that have a label, where
            the head is plain, and the model's own forward is asked for it; `report.loss` says whether.
            Equal to the padded run with two exceptions, both about labels at padding: a token is not predicted from padding before it (the
            first label of a left-padded row, unless it is -100), and labels that padding itself would have to predict do not count. As
            without packed, what a head makes of padding itself is implementation-defined: heads that choose among all positions of a row
            (question answering) are refused.
        keep_logits: with packed, compute logits in training too, and the loss from them, as Transformers does.
    Raises:
        ValueError: the model's attention cannot run on hf_flash2, or its decoder not packed, with the reason; it is then as it was.
        hf_flash2.native.NotAvailableError: the model is on a GPU and the CUDA kernels cannot run there, with the reason.
    """
    for name, option in (("packed", packed), ("keep_logits", keep_logits)):
        if not isinstance(option, bool):
            raise ValueError(f"{name} must be True or False, got {option!r}")
    if keep_logits and not packed:
        raise ValueError("keep_logits=True is about patch(model, packed=True); without packed the logits are always there")
    options = {"packed": packed, "keep_logits": keep_logits}
    target = pretrained_model(model)
    backend = _backend(target)
    existing = vars(target).get(_PATCH)
    if existing is not None and existing.implementations == _implementations(target) and existing.options == options:
        existing.report.expected_backend = backend
        return existing.report
    before = _patches(model)
    unpatch(model)
    previous = _implementations(target)
    configs = own_configs(model)
    try:
        _switch_what_can(target, configs)
        _switch_configs_left_behind(target)
        report = PatchReport(type(target).__name__, "", backend, previous)
        _bind_layers(target, report)
        if packed:
            _bind_decoder(target, keep_logits, report)
    except BaseException:
        _unbind_layers(target)
        restore_configs(model, configs)
        _patch_again(before)
        raise
    setattr(target, _PATCH, _Patch(configs, options, _implementations(target), report))
    return report


def _patches(model: nn.Module) -> list[tuple[PreTrainedModel, _Patch, dict[nn.Module, str]]]:
    """The models inside that are patched, each with its record and the implementations of its modules, which may have been set since."""
    return [(part, vars(part)[_PATCH], _implementations_of_modules(part)) for part in model.modules() if _PATCH in vars(part)]


def _implementations_of_modules(model: nn.Module) -> dict[nn.Module, str]:
    configs = {module: vars(module).get("config") for module in model.modules()}
    return {module: config._attn_implementation for module, config in configs.items() if isinstance(config, PretrainedConfig)}


def _patch_again(before: list[tuple[PreTrainedModel, _Patch, dict[nn.Module, str]]]) -> None:
    """As they were patched before, with the reports that their user holds, which count on."""
    for part, record, implementations in before:
        again, report = patch(part, **record.options), record.report
        for name, calls in report.layers.items():
            setattr(part.get_submodule(name), CALLS, calls)
        if report.forwards is not None:
            setattr(packed_part(part), CALLS, report.forwards)
        report.expected_loss = again.expected_loss
        if again.losses is None or report.losses is None:  # somebody has wrapped the model's forward meanwhile, or no longer does
            report.losses = again.losses
        else:
            setattr(part, CALLS, report.losses)
        vars(part)[_PATCH].report = report
        for module, implementation in implementations.items():
            setattr(module.config, IMPLEMENTATION, implementation)


def unpatch(model: nn.Module) -> None:
    """Undo `patch`: forwards, configs and implementation are the ones from before. Does nothing to a model that is not patched.

    Raises:
        ValueError: the model is a part of a larger one that was patched as a whole (unpatch that before parts are copied or taken out), or
            no model.

    A backward behind it finds other attention where layers with gradient checkpointing run once more: call it before.
    """
    _check_is_module(model)
    patches = [vars(module).pop(_PATCH) for module in model.modules() if _PATCH in vars(module)]
    if not patches and any(LAYER in vars(module) for module in model.modules()):
        raise ValueError(
            f"this {type(model).__name__} was patched as a part of a larger model; call unpatch on that model, before you copy or take out "
            "parts of it"
        )
    for record in patches:
        restore_configs(model, record.configs)
    _unbind_layers(model)


@contextmanager
def patched(model: nn.Module, *, packed: bool = False, keep_logits: bool = False) -> Iterator[PatchReport]:
    """Patch the model inside a with block. At its end, normal or by an exception, the model is as it was before.

    The backward belongs inside: layers with gradient checkpointing run in it once more.
    """
    _check_is_module(model)
    before = _patches(model)
    report = patch(model, packed=packed, keep_logits=keep_logits)
    try:
        yield report
    finally:
        unpatch(model)
        _patch_again(before)


def patch_options(model: nn.Module) -> dict[str, bool]:
    """The options that a patched model was patched with; none for one that is not patched."""
    record = vars(pretrained_model(model)).get(_PATCH)
    return {} if record is None else dict(record.options)


def _check_is_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"{type(model).__name__} {model!r}"
        raise ValueError(f"this takes a model that is loaded, such as LlamaForCausalLM.from_pretrained(...) returns, got {what:.80}")


def pretrained_model(model: nn.Module) -> PreTrainedModel:
    """The outermost Transformers model inside PEFT, DDP, FSDP and torch.compile wrappers."""
    _check_is_module(model)
    found: list[PreTrainedModel] = []
    inside: set[int] = set()  # of those found, whose modules come before what stands beside them
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and id(module) not in inside:
            found.append(module)
            inside |= {id(part) for part in module.modules()}
    if not found:
        raise ValueError(f"there is no Transformers model (PreTrainedModel) inside this {type(model).__name__}; patch the model itself")
    if len(found) > 1:
        names = ", ".join(type(module).__name__ for module in found)
        raise ValueError(f"there are several Transformers models side by side in this {type(model).__name__} ({names}); patch each of them")
    return found[0]


def _submodels(model: PreTrainedModel) -> list[tuple[str, PreTrainedModel]]:
    """The model and the models inside that have a config of their own, such as a vision tower, with their names."""
    found: dict[int, tuple[str, PreTrainedModel]] = {}
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            found.setdefault(id(module.config), (name, module))
    return list(found.values())


def _implementations(model: PreTrainedModel) -> str:
    names = {name: submodel.config._attn_implementation for name, submodel in _submodels(model)}
    if len(set(names.values())) == 1:
        return names[""]
    return ", ".join(f"{implementation} ({name or 'model'})" for name, implementation in names.items())


def _switch_what_can(model: PreTrainedModel, configs: list[OwnConfig]) -> None:
    """The model as a whole, or by sub-config; then, in the same way, each part that this has left as it was."""
    for _, part in _submodels(model):
        if part is model or part.config._attn_implementation != NAME:
            requested = _requested_implementation(part)
            if requested == NAME or NAME in requested.values():
                switch(part, requested, configs)


def _requested_implementation(model: PreTrainedModel) -> str | dict[str, str]:
    """Our name, or by sub-config where a part of the model cannot take it and has to keep what it has. What is asked of the whole ("") is
    asked of the parts without a sub-config, too: of nobody, if one of these cannot take it."""
    parts = {id(submodel.config): submodel for _, submodel in _submodels(model)}
    refused = {part: _reason_refused(submodel) is not None for part, submodel in parts.items()}
    by_key, rest = {}, set(parts)
    for key in model.config.sub_configs:
        config = getattr(model.config, key, None)
        if id(config) in parts:
            by_key[key] = config._attn_implementation if refused[id(config)] else NAME
            rest.discard(id(config))
    if any(refused[part] for part in rest):
        return by_key
    return {"": NAME, **by_key} if set(by_key.values()) - {NAME} else NAME


def _switch_configs_left_behind(model: PreTrainedModel) -> None:
    """Modules keep the config that they were made with when their model is given another, as EncoderDecoderModel gives its encoder: they
    follow that model."""
    parts = _submodels(model)
    of_parts = {id(part.config) for _, part in parts}
    for _, part in parts:
        for module in part.modules():
            config = vars(module).get("config")
            if type(config) is type(part.config) and id(config) not in of_parts:
                setattr(config, IMPLEMENTATION, part.config._attn_implementation)


def _reason_refused(model: PreTrainedModel) -> str | None:
    """Why Transformers or hf_flash2 will not let this (sub-)model switch, or None."""
    # Transformers cannot read the source of a notebook, but a class inherits what it has said of the one that it extends: asked first.
    classes = (base for base in type(model).__mro__ if issubclass(base, PreTrainedModel) and source_of(base.__module__))
    extended = next(classes, PreTrainedModel)
    if extended not in (type(model), PreTrainedModel):
        extended._can_set_attn_implementation()
    if not model._can_set_attn_implementation():
        return f"{type(model).__name__} does not call its attention through Transformers' AttentionInterface"
    return reason_model_unsupported(model)


def _bind_layers(model: PreTrainedModel, report: PatchReport) -> None:
    """Attach to every attention layer whose config now names us, and note the others with the reason: layer by layer where they call
    the attention interface, as a whole part of the model where none does."""
    families = {family.attention: family for family in PATCHES.values()}
    parts = _submodels(model)
    reasons = {id(part.config): _reason_refused(part) for _, part in parts}
    kinds = []
    for name, module in model.named_modules():
        family = families.get(type(module))
        if family is None and not _calls_attention_interface(module):
            continue
        implementation = module.config._attn_implementation
        if implementation != NAME:
            reason = reasons.get(id(module.config)) or "Transformers did not switch it"
            report.skipped[name] = f"stays on {implementation}: {reason}"
            continue
        report.layers[name] = bind(module, None if family is None else family.forward)
        kinds.append("interface" if family is None else family.name)
    if not report.layers:
        reason = reasons.get(id(model.config)) or "none of its modules calls its attention through Transformers' AttentionInterface"
        raise ValueError(
            f"no attention layer of {report.model} can run on hf_flash2: {reason}; keep its attn_implementation={report.previous!r}"
        )
    report.family = " + ".join(dict.fromkeys(kinds))
    for name, part in reversed(parts):  # inner ones first: what holds a listed one need not be listed
        has_attention = any("Attention" in type(module).__name__ for module in part.modules())
        listed = any(layer.startswith(f"{name}.") for layer in (*report.layers, *report.skipped))
        if name and has_attention and reasons[id(part.config)] and not listed:
            report.skipped[name] = f"stays on {part.config._attn_implementation}: {reasons[id(part.config)]}"


def _bind_decoder(model: PreTrainedModel, keep_logits: bool, report: PatchReport) -> None:
    """Attach to the base model, or to the language model inside, and to the causal language model above it where its loss can do without
    logits."""
    base = packed_part(model)
    reason = reason_not_packable(model, [module for module in base.modules() if LAYER in vars(module)])
    if reason is not None:
        raise ValueError(f"{report.model} cannot run packed: {reason}; use patch(model), whose kernels skip the padding in attention")
    report.forwards = bind(base, in_place_of(type(base).forward, base_forward))
    if keep_logits:
        report.expected_loss = "not ours: keep_logits=True"
    elif (reason := reason_loss_is_upstream(model)) is not None:
        report.expected_loss = f"not ours: {reason}"
    elif (wrapper := wrapper_of(model)) is not None:
        report.expected_loss = (
            f"not ours: {wrapper} wraps the model's forward already (patch before that, as before accelerator.prepare, where the wrapper "
            "calls what it wraps)"
        )
    else:
        report.losses = bind(model, in_place_of(type(model).forward, causal_lm_forward))
        report.expected_loss = "in chunks, without logits, in training with labels"


def _unbind_layers(model: nn.Module) -> None:
    for module in model.modules():
        if LAYER in vars(module):
            unbind(module)


def _calls_attention_interface(module: nn.Module) -> bool:
    """Whether the module's forward looks its attention function up by the name in its config, as Transformers' attention classes do, or one
    of a class that it extends, as far as forwards call each other."""
    for owner in type(module).__mro__:
        if "forward" not in vars(owner):
            continue
        code = getattr(inspect.unwrap(vars(owner)["forward"]), "__code__", None)
        names = () if code is None else code.co_names
        if "ALL_ATTENTION_FUNCTIONS" in names:
            return hasattr(module, "config") and not ("getattr" in names and LOOKED_UP_AS_ATTRIBUTE.search(inspect.getsource(code)))
        if "forward" not in names:
            return False
    return False


def _backend(model: PreTrainedModel) -> str:
    """What our op runs on where the model's weights are now; raises where it cannot run."""
    devices = {parameter.device for parameter in model.parameters() if not parameter.is_meta}
    return ", ".join(sorted({ops.expected_backend(device) for device in devices})) or "none yet (no weights loaded)"

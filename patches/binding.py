"""How a patch attaches to one model and comes off again: an own config for the instance, and forwards bound to its attention modules.

Only instance dictionaries change. What stood there before is kept on the object itself, so that a deep copy of a patched model carries its
own record, refers to nothing of the original, and can be unpatched by itself.
"""

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ..notices import CALLS, NAME, Calls

LAYER = "_hf_flash2_layer"  # attribute of a patched module, an attention layer or with packed=True a model above: its BoundLayer
REPLICATE = "_replicate_for_data_parallel"  # how torch.nn.DataParallel copies a module to a device
IMPLEMENTATION = "_attn_implementation_internal"  # where Transformers keeps the implementation in a config; never saved
_SWITCHED = "_attn_was_changed"  # its mark on a config, which set_attn_implementation passes over while it is there


@dataclass
class BoundLayer:
    """What a patched module carries besides its call counter: our forward, and what stood in its place."""

    forward: FunctionType | None  # None when the module is only switched through its config
    previous: Callable | None = None  # the instance attribute that ours replaced; None = there was none, the class's forward ran

    def __deepcopy__(self, memo: dict) -> "BoundLayer":
        return BoundLayer(self.forward, copy.deepcopy(self.previous, memo))

    def __reduce_ex__(self, protocol: int):
        # A bound method is pickled as the name of its function, and would come back as the class's own forward.
        if self.forward is not None:
            raise pickle.PicklingError(
                "a model patched by hf_flash2 cannot be pickled whole; call hf_flash2.unpatch(model) before and hf_flash2.patch(model) "
                "after, or save its state_dict() or save_pretrained(), which hold nothing of the patch"
            )
        return super().__reduce_ex__(protocol)


def bind(module: nn.Module, forward: FunctionType | None) -> Calls:
    """Let `forward` (None: leave the module's own) run for this module alone, and return the record of its calls.

    A module that accelerate has hooked keeps its hook: the hook calls `_old_forward`, and that is what is replaced then.
    """
    layer = BoundLayer(forward)
    if forward is not None:
        slot = _slot(module)
        layer.previous = vars(module).get(slot)
        setattr(module, slot, MethodType(forward, module))
        setattr(module, REPLICATE, MethodType(_replicate, module))
    setattr(module, LAYER, layer)
    setattr(module, CALLS, Calls())
    return vars(module)[CALLS]


def _replicate(module: nn.Module) -> nn.Module:
    """A replica as its class makes it, a copy of the instance's dictionary, whose forward is ours for the replica: not for the original,
    whose weights are on another device. Trainer uses DataParallel by itself where one process sees several GPUs."""
    replica = getattr(type(module), REPLICATE)(module)
    for slot in _slots_of_ours(replica):
        setattr(replica, slot, MethodType(vars(module)[LAYER].forward, replica))
    return replica


def _slots_of_ours(module: nn.Module) -> list[str]:
    """The instance attributes that hold our forward. Hooks may have come or gone since it was bound."""
    forward = vars(module)[LAYER].forward
    return [
        slot for slot in ("forward", "_old_forward") if forward is not None and getattr(vars(module).get(slot), "__func__", None) is forward
    ]


def _slot(module: nn.Module) -> str:
    """The instance attribute that decides which forward runs: below accelerate's hook, where there is one."""
    return "_old_forward" if "_old_forward" in vars(module) else "forward"


def wrapper_of(module: nn.Module) -> str | None:
    """The package whose function an unbound module has as its forward in place of its class's, such as accelerate's autocast or TRL's loss;
    ours would go around it. None where there is none."""
    own = vars(module).get(_slot(module))
    if own is None or getattr(own, "__func__", None) is type(module).forward:
        return None
    function = getattr(own, "__func__", own)
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__  # __module__ may be what functools.wraps put
    return name.partition(".")[0]


def replaced(module: nn.Module) -> Callable | None:
    """The instance attribute that `bind` replaced; None when there was none, or the module is not bound."""
    layer: BoundLayer | None = module.__dict__.get(LAYER)
    return None if layer is None else layer.previous


def in_place_of(class_forward: Callable, forward: Callable) -> FunctionType:
    """`forward` with the signature of the class's own, which Trainer reads to learn which columns of a dataset the model takes.

    NOTE: not as functools.wraps does it: accelerate's unwrap_model follows __wrapped__ and would put the class's forward in our place.
    """

    def bound(module: nn.Module, *args, **kwargs) -> object:
        still_bound = LAYER in module.__dict__  # a wrapper put around ours may outlive `unbind`
        return forward(module, *args, **kwargs) if still_bound else upstream(module, *args, **kwargs)

    bound.__signature__ = inspect.signature(class_forward)
    return bound


def upstream(module: nn.Module, *args, **kwargs) -> object:
    """Run the forward that a module would have without us."""
    previous = replaced(module)
    return type(module).forward(module, *args, **kwargs) if previous is None else previous(*args, **kwargs)


def by_name(module: nn.Module, args: tuple, kwargs: dict) -> dict:
    """The arguments of a call of the module's forward, by their names in its class's forward.

    Raises:
        TypeError: there are more than it takes, or one twice.
    """
    if not args:
        return dict(kwargs)
    _, *named = inspect.signature(type(module).forward).bind_partial(module, *args).arguments.items()
    return dict(**dict(named), **kwargs)


def unbind(module: nn.Module) -> None:
    """Undo `bind`."""
    slots = _slots_of_ours(module)
    layer: BoundLayer = vars(module).pop(LAYER)
    del vars(module)[CALLS]
    vars(module).pop(REPLICATE, None)
    for slot in slots:
        if layer.previous is not None:
            setattr(module, slot, layer.previous)
        elif slot == "forward":
            delattr(module, slot)
        else:  # hooked while it was patched: what the hook would have found without us
            setattr(module, slot, MethodType(type(module).forward, module))


@dataclass
class OwnConfig:
    """A copy of a config that belongs to one model, in place of one that other models may share."""

    own: PretrainedConfig
    original: PretrainedConfig
    attributes: dict[str, object]  # of the copy when it was made; what differs later was changed by the user


def own_configs(root: nn.Module) -> list[OwnConfig]:
    """Give the modules under root shallow copies of their configs, nested configs included."""
    originals: dict[int, PretrainedConfig] = {}

    def collect(config: PretrainedConfig) -> None:
        if id(config) not in originals:
            originals[id(config)] = config
            for value in vars(config).values():
                if isinstance(value, PretrainedConfig):
                    collect(value)

    for module in root.modules():
        for value in vars(module).values():
            if isinstance(value, PretrainedConfig):
                collect(value)
    copies = {key: copy.copy(config) for key, config in originals.items()}
    for config in copies.values():
        _replace(config, copies)
        vars(config).pop(_SWITCHED, None)
    for module in root.modules():
        _replace(module, copies)
    return [OwnConfig(copies[key], original, dict(vars(copies[key]))) for key, original in originals.items()]


def switch(model: PreTrainedModel, implementation: str | dict[str, str], configs: list[OwnConfig]) -> None:
    """set_attn_implementation of a model with own configs, without the marks that it leaves on parts that the model's config does not name:
    it would not switch them another time."""
    model.set_attn_implementation(implementation)
    for config in configs:
        vars(config.own).pop(_SWITCHED, None)


def restore_configs(root: nn.Module, configs: list[OwnConfig]) -> None:
    """Put the original configs back, with the changes that were made to the copies meanwhile (the implementation apart)."""
    originals = {id(config.own): config.original for config in configs}
    implementations = {type(config.own): config.attributes.get(IMPLEMENTATION) for config in configs if _is_switched(config.own)}
    for module in root.modules():  # a layer that was copied meanwhile, as PEFT's layer_replication does it, has a copy of its config
        own = vars(module).get("config")
        if LAYER in vars(module) and type(own) in implementations and id(own) not in originals and _is_switched(own):
            vars(own)[IMPLEMENTATION] = implementations[type(own)]
    for config in configs:
        vars(config.own)[IMPLEMENTATION] = config.attributes.get(IMPLEMENTATION)
        _replace(config.own, originals)
        before = {name: originals.get(id(value), value) for name, value in config.attributes.items()}
        after = vars(config.own)
        changed = {name: value for name, value in after.items() if name not in before or before[name] is not value}
        vars(config.original).update(changed)
        for name in before.keys() - after.keys():
            vars(config.original).pop(name, None)
    for module in root.modules():
        _replace(module, originals)


def _is_switched(config: PretrainedConfig) -> bool:
    return vars(config).get(IMPLEMENTATION) == NAME


def _replace(holder: object, replacements: dict[int, PretrainedConfig]) -> None:
    """Replace the configs that holder refers to by those of the same id."""
    for name, value in vars(holder).items():
        if isinstance(value, PretrainedConfig) and id(value) in replacements:
            vars(holder)[name] = replacements[id(value)]

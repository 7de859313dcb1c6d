"""Which models may share sequences among processes, as far as a layer shows it: by its config, and the source of its model."""

import functools
import inspect
import re
import sys
from typing import Any

import torch

from .masks import source_of

_MIXERS = re.compile("linear|conv|mamba|recurrent|hybrid")  # in the names of types of layers
_DECODERS = ("ForCausalLM", "LMHeadModel")


def reason_not_shareable(module: torch.nn.Module) -> str | None:
    """Why results would be wrong where each process has a part of every sequence, whatever attention does; None where nothing shows it."""
    if _mixes_tokens(getattr(module, "config", None), type(module)):
        return (
            "its model has layers beside attention that mix tokens (convolutions, state spaces, linear attention), and would see those of "
            "one process alone"
        )
    if _numbers_tokens_itself(type(module)):
        return "its model takes no position_ids, and numbers the tokens of each process from 0"
    return None


def reason_rotations_differ(config: Any, largest: list[int]) -> str | None:
    """Why processes would rotate the same positions by different angles, which some models make of the largest position of a forward.

    Args:
        largest: position of each process.
    """
    for kind, rope in _rotations(config):
        limit = getattr(config, "max_position_embeddings", 0)
        if kind == "longrope":
            limit = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None) or limit
        beyond = [position >= limit for position in largest]
        if (kind == "longrope" and any(beyond) and not all(beyond)) or (kind == "dynamic" and any(beyond) and len(set(largest)) > 1):
            return (
                f"its positions are rotated by the largest of a forward (rope_type {kind}, from {limit} on), and those of processes are "
                f"{largest}; use rows of other lengths, or another rope_type"
            )
    return None


def rotates_by_length(config: Any) -> bool:
    """Whether the rotary angles depend on the largest position of a batch, which is that of the last column, padding or not."""
    return any(kind in ("dynamic", "longrope") for kind, _ in _rotations(config))


def rope_parameters(config: Any) -> dict:
    """How a config rotates positions, under the name of Transformers 5 or of 4: one description, or one for each type of layer."""
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def _rotations(config: Any) -> list[tuple[str | None, dict]]:
    """Each with its kind."""
    rope = rope_parameters(config)
    return [(x.get("rope_type", x.get("type")), x) for x in (rope, *rope.values()) if isinstance(x, dict)]


def _mixes_tokens(config: Any, layer_class: type) -> bool:
    """By the types of layers, where a config says all; older lists name the attention of layers that have a state space beside it."""
    of_layers = getattr(config, "layer_types", None)
    if isinstance(of_layers, (list, tuple)) and of_layers:
        return any(_MIXERS.search(str(kind)) for kind in of_layers)
    older = [kind for name in ("layers_block_type", "block_types") for kind in getattr(config, name, None) or ()]
    return any(_MIXERS.search(str(kind)) for kind in older) or _has_state_spaces(layer_class)


@functools.cache
def _has_state_spaces(layer_class: type) -> bool:
    return any("causal_conv1d" in source_of(name) for name in _modules_of(layer_class))


def _modules_of(layer_class: type) -> list[str]:
    """Of Transformers, which a layer, or what it extends, comes from."""
    return [c.__module__ for c in layer_class.__mro__ if c.__module__.startswith("transformers.models.")]


@functools.cache
def _numbers_tokens_itself(layer_class: type) -> bool:
    """As decoders of encoder-decoders do, Bart's for one."""
    modules = _modules_of(layer_class)
    models = [model for name in modules for model in vars(sys.modules[name]).values() if isinstance(model, type)]
    decoders = [model for model in models if model.__module__ in modules and model.__name__.endswith(_DECODERS)]
    return bool(decoders) and not any("position_ids" in inspect.signature(model.forward).parameters for model in decoders)

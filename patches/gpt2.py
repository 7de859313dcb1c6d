"""GPT-2: GPT2Attention.forward goes straight from the fused projection to the op of hf_flash2, self- and cross-attention alike."""

import torch
from torch import nn
from transformers import Cache, EncoderDecoderCache
from transformers.models.gpt2 import modeling_gpt2

from ..interface import attend, gpt2_scaling, is_paged
from .family import Family
from .rotary import update_cache


def attention(
    module: nn.Module,
    hidden_states: torch.Tensor,
    past_key_values: Cache | None = None,
    *,  # the order of what follows differs between versions of Transformers
    cache: Cache | None = None,
    attention_mask: torch.Tensor | None = None,
    encoder_hidden_states: torch.Tensor | None = None,
    encoder_attention_mask: torch.Tensor | None = None,
    cache_position: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """GPT2Attention.forward of Transformers 4.57 to 5.24, on hf_flash2. `cache` is what past_key_values is called there since 5.24.

    NOTE: Transformers 4 decides is_causal by whether there is a mask, and leaves the scale to the attention function.
    """
    cache = past_key_values if cache is None else cache
    if encoder_hidden_states is not None:
        attention_mask = encoder_attention_mask
        q = _heads(module, module.q_attn(hidden_states))
        k, v = _encoder_keys_values(module, encoder_hidden_states, cache, kwargs)
    else:
        q, k, v = (_heads(module, x) for x in module.c_attn(hidden_states).split(module.split_size, dim=-1))
        cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        if cache is not None:
            k, v = update_cache(module, cache, k, v, cache_position, kwargs)
    out = attend(
        module, q, k, v, None if is_paged(cache) else attention_mask,
        causal=encoder_hidden_states is None and getattr(module, "is_causal", True) if is_causal is None else is_causal,
        scaling=gpt2_scaling(module),
        dropout=module.attn_dropout.p if module.training else 0.0, **kwargs,
    )  # fmt: skip
    return module.resid_dropout(module.c_proj(out.flatten(-2))), None


def _heads(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """[B, S, H * D] -> [B, S, H, D], a view"""
    return x.unflatten(-1, (-1, module.head_dim))


def _encoder_keys_values(
    module: nn.Module, encoder_hidden_states: torch.Tensor, cache: Cache | None, kwargs: dict
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the encoder's states [B, Sk, H, D]: computed on the first step of a generation, read from the cache afterwards."""
    if cache is not None and cache.is_updated.get(module.layer_idx):
        layer = cache.cross_attention_cache.layers[module.layer_idx]
        return layer.keys.transpose(1, 2), layer.values.transpose(1, 2)
    k, v = (_heads(module, x) for x in module.c_attn(encoder_hidden_states).split(module.split_size, dim=-1))
    if cache is not None:
        k, v = update_cache(module, cache.cross_attention_cache, k, v, cache_position=None, kwargs=kwargs)
        cache.is_updated[module.layer_idx] = True
    return k, v


FAMILY = Family("gpt2", modeling_gpt2.GPT2Attention, modeling_gpt2.GPT2PreTrainedModel, attention)
apply, revert = FAMILY.apply, FAMILY.revert

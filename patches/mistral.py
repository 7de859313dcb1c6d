"""Mistral: MistralAttention.forward goes straight from projections and rotary embedding to the op of hf_flash2, with its sliding window."""

import torch
from torch import nn
from transformers import Cache
from transformers.models.mistral import modeling_mistral

from .family import Family
from .rotary import rotary_attention


def attention(
    module: nn.Module,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None,
    past_key_values: Cache | None = None,
    cache: Cache | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """MistralAttention.forward of Transformers 4.57 to 5.24, on hf_flash2. `cache` is what past_key_values is called there since 5.24."""
    return rotary_attention(
        module, modeling_mistral.apply_rotary_pos_emb, hidden_states, position_embeddings, attention_mask,
        past_key_values if cache is None else cache,
        sliding_window=getattr(module.config, "sliding_window", None), **kwargs,
    )  # fmt: skip


FAMILY = Family("mistral", modeling_mistral.MistralAttention, modeling_mistral.MistralPreTrainedModel, attention)
apply, revert = FAMILY.apply, FAMILY.revert

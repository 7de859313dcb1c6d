"""The attention forward shared by families with rotary position embeddings: projections, rotation, cache, then straight to our op."""

import inspect
from collections.abc import Callable

import torch
from torch import nn
from transformers import Cache
from transformers.models.llama import modeling_llama

from .. import rotary
from ..interface import attend, is_paged, update_paged_cache


def rotary_attention(
    module: nn.Module,
    apply_rotary_pos_emb: Callable,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None,
    cache: Cache | None,
    sliding_window: int | None,
    cache_position: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention of a module with q_proj, k_proj, v_proj, o_proj.

    Tensors stay in the layout of the projections, [B, S, H, D], which our op takes as it is; upstream transposes to [B, H, S, D] and back.
    The projections are called as modules, so that LoRA, quantised and hooked layers work, and the numbers of heads come from what they
    return, so that tensor-parallel shards do.

    Args:
        hidden_states: [B, S, hidden]; position_embeddings: (cos, sin), each [B, S, D].
        cache: past_key_values, as it was called before Transformers 5.24; or the paged cache of continuous batching.
        cache_position: what Transformers 4 passes, for its static caches.
        is_causal: wins over `module.is_causal`.
    Returns:
        (output [B, S, hidden], None): no attention probabilities exist.
    """
    batch_shape = hidden_states.shape[:-1]
    head_shape = (*batch_shape, -1, module.head_dim)
    q = module.q_proj(hidden_states).view(head_shape)
    k = module.k_proj(hidden_states).view(head_shape)
    v = module.v_proj(hidden_states).view(head_shape)
    cos, sin = position_embeddings
    in_place = not torch.is_grad_enabled() and returns_new_tensors(module.q_proj) and returns_new_tensors(module.k_proj)
    q, k = _rotate(apply_rotary_pos_emb, q, k, cos, sin, in_place)
    if cache is not None:
        k, v = update_cache(module, cache, k, v, cache_position, kwargs, sin=sin, cos=cos)
    out = attend(
        module, q, k, v, None if is_paged(cache) else attention_mask,
        causal=module.is_causal if is_causal is None else is_causal, scaling=module.scaling,
        dropout=module.attention_dropout if module.training else 0.0, sliding_window=sliding_window, **kwargs,
    )  # fmt: skip
    return module.o_proj(out.reshape(*batch_shape, -1)), None


def _rotate(
    apply_rotary_pos_emb: Callable, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, in_place: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k rotated, by our kernel where it takes them and the family's function is the one of Transformers.

    Somebody else's function gets what upstream's forward gives it: Liger's, for one, takes [B, H, S, D] whatever unsqueeze_dim says.
    """
    if not apply_rotary_pos_emb.__module__.startswith("transformers."):
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)
    if rotary.can_fuse(q, k, cos, sin):
        return rotary.apply_rotary(q, k, cos, sin, in_place=in_place)
    return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)


def returns_new_tensors(projection: nn.Module) -> bool:
    """Whether nobody else holds what a projection returns: hooks may keep it, and of other layers (LoRA, quantised) nobody knows."""
    return (
        type(projection) is nn.Linear
        and "forward" not in vars(projection)  # as accelerate's hooks put it
        and not projection._forward_hooks
        and not nn.modules.module._global_forward_hooks
    )


# Whether upstream hands the keyword arguments of the forward to its caches, as since Transformers 5.24.
_HANDS_ON = "cache" in inspect.signature(modeling_llama.LlamaAttention.forward).parameters


def update_cache(
    module: nn.Module,
    cache: Cache,
    k: torch.Tensor,
    v: torch.Tensor,
    cache_position: torch.Tensor | None,
    kwargs: dict,
    **cache_kwargs: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append k and v [B, S, Hk, D] to the cache and return all it holds, [B, Sk, Hk, D]. Caches themselves are [B, Hk, Sk, D].

    Of continuous batching, too: then kwargs say which documents there are, in place of any mask.
    """
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if is_paged(cache):
        k, v = update_paged_cache(module, k, v, cache, kwargs)
    else:
        more = () if cache_position is None else ({"cache_position": cache_position, **cache_kwargs},)  # Transformers 5 needs none of it
        k, v = cache.update(k, v, module.layer_idx, *more, **{"kwargs": kwargs} if _HANDS_ON else {})
    return k.transpose(1, 2), v.transpose(1, 2)

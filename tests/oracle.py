"""What the tests believe: attention as the textbook formula, in plain PyTorch and the dtype of its inputs, differentiated by autograd.

Written apart from hf_flash2/reference.py on purpose, so that one mistake cannot hide in both. Everything is a dense [B, S, H, D] tensor and
one bool mask of visible (query, key) pairs; tests/cases.py turns packed sequences, ranges and windows into that mask.
"""

import math

import torch


def visible_pairs(
    seqlen_q: int,
    seqlen_k: int,
    ranges_q: list[tuple[int, int]],
    ranges_k: list[tuple[int, int]],
    causal: bool,
    window: tuple[int, int],
    key_mask: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """bool [B, Sq, Sk]: row i of sequence b sees column j. Ranges are (start, length); causal and window count from their ends."""
    left, right = window
    if causal:
        right = 0
    start_q, length_q = torch.tensor(ranges_q, device=device).view(-1, 2, 1, 1).unbind(1)
    start_k, length_k = torch.tensor(ranges_k, device=device).view(-1, 2, 1, 1).unbind(1)
    row = torch.arange(seqlen_q, device=device).view(1, -1, 1) - start_q
    col = torch.arange(seqlen_k, device=device).view(1, 1, -1) - start_k
    visible = (row >= 0) & (row < length_q) & (col >= 0) & (col < length_k)
    distance = (col - (length_k - 1)) - (row - (length_q - 1))  # 0 on the diagonal through the bottom-right corner
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    if key_mask is not None:
        visible &= key_mask[:, None, :]
    return visible


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    softmax_scale: float,
    keep: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Eager attention as Transformers writes it: scores and probabilities in the dtype of q, softmax in at least float32.

    Args:
        q [B, Sq, H, D]; k, v [B, Sk, Hk, D]; visible bool [B, Sq, Sk]; keep bool [B, H, Sq, Sk]: probabilities dropout leaves alone;
        sinks [H]: a score more in each row, whose probability is thrown away; softcap: what scores cannot exceed, 0 = nothing.
    Returns:
        out [B, Sq, H, D] with zeros in rows that see no key, and their log-sum-exp [B, H, Sq] (+inf in such rows).
    """
    group = q.shape[2] // k.shape[2]
    query = q.transpose(1, 2)
    key = k.repeat_interleave(group, dim=2).transpose(1, 2)
    value = v.repeat_interleave(group, dim=2).transpose(1, 2)
    scores = query @ key.transpose(-1, -2) * softmax_scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    blind = ~visible.any(-1)[:, None]  # [B, 1, Sq]
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)), -1)
    probs = scores.softmax(-1)[..., : k.shape[1]].to(q.dtype).masked_fill(blind[..., None], 0.0)
    if keep is not None:
        probs = probs * keep / (1 - dropout_p)
    lse = scores.logsumexp(-1).masked_fill(blind, math.inf)
    return (probs @ value).transpose(1, 2), lse


def gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None = None, **kwargs
) -> dict[str, torch.Tensor]:
    """out, lse, dq, dk, dv of `attention` in the dtype of q; with sinks, dsinks in the dtype of these."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    inputs = {"dq": q, "dk": k, "dv": v}
    if kwargs.get("sinks") is not None:
        inputs["dsinks"] = kwargs["sinks"] = kwargs["sinks"].detach().requires_grad_()
    out, lse = attention(q, k, v, **kwargs)
    outputs, grads = [out], [dout]
    if dlse is not None:
        outputs.append(lse)
        grads.append(dlse)
    of_inputs = torch.autograd.grad(outputs, tuple(inputs.values()), grads)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(inputs, of_inputs, strict=True))}

"""Rotary position embedding in one CUDA kernel, bit for bit what eager attention computes in a dozen elementwise ones.

out = x * cos + rotate(x) * sin (RoFormer, arXiv:2104.09864), with every product and sum rounded to the tensors' dtype. For the patched
Llama and Mistral on a GPU; on a CPU, and for what `can_fuse` refuses, they keep the function of Transformers, as they all do under
HF_FLASH2_ROTARY=eager.
"""

import torch

from . import kernels, native, ops, tracing


def can_fuse(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether `apply_rotary` takes these tensors, in eager mode. Compiled models need it not: the compiler fuses the elementwise form."""
    batch, seqlen, _, head_dim = q.shape
    return (
        _on_gpu(q)
        and not native.eager_asked("HF_FLASH2_ROTARY")
        and not tracing.is_compiling()
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.dtype == k.dtype == cos.dtype == sin.dtype
        and (*k.shape[:2], k.shape[3]) == (batch, seqlen, head_dim)
        and ops.plain(q, k, cos)
        and type(sin) is torch.Tensor
        and q.device == k.device == cos.device == sin.device
        and cos.shape == sin.shape
        and cos.dim() == 3
        and cos.shape[0] in (1, batch)
        and cos.shape[1] == seqlen
        and cos.shape[2] % 16 == 0
        and cos.shape[2] <= head_dim
        and head_dim % 8 == 0
        and cos.is_contiguous()
        and sin.is_contiguous()
        and cos.data_ptr() % 16 == sin.data_ptr() % 16 == 0
        and not (cos.requires_grad or sin.requires_grad)
    )


def _on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda


def apply_rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, in_place: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k rotated by their positions. Differentiable in q and k.

    Args:
        q: [B, S, H, D]; k: [B, S, Hk, D], float16 or bfloat16, any strides, D a multiple of 8.
        cos, sin: [B or 1, S, R] of the same dtype, contiguous, as Transformers' rotary modules give them (every angle twice). R, a multiple
            of 16, may be smaller than D: what is beyond is not rotated. Pairs are (i, i + R / 2), as in Llama.
        in_place: q and k may be overwritten. They are where no graph is recorded: autograd takes no function that changes two views, such
            as heads of a projection, at once.
    Returns:
        q and k: new and contiguous, or themselves.
    """
    if in_place and not torch.is_grad_enabled() and all(kernels.is_readable(x) and kernels.is_aligned(x) for x in (q, k)):
        kernels.rotary(q, k, q, k, cos, sin, False)
        return q, k
    return _Rotary.apply(q, k, cos, sin, False)


class _Rotary(torch.autograd.Function):
    """The rotation and its transpose, which are each other's gradient."""

    @staticmethod
    def forward(ctx, q, k, cos, sin, inverse):
        ctx.save_for_backward(cos, sin)
        ctx.inverse = inverse
        q_out, k_out = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
        kernels.rotary(q, k, q_out, k_out, cos, sin, inverse)
        return q_out, k_out

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        return *_Rotary.apply(dq, dk, cos, sin, not ctx.inverse), None, None, None

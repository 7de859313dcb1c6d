"""The cross-entropy of rows of logits with its gradient in their place, in one CUDA kernel that holds nothing else of their size.

loss = log(sum(exp(x))) - x[label], gradient = softmax(x) - one_hot(label), with maximum and sum of a row from one pass (Milakov and
Gimelshein, arXiv:1805.02867). For the packed loss (patches/loss.py). On a CPU, on a GPU that the library does not run on, for what the
kernel does not take, and everywhere under HF_FLASH2_LOSS=eager, torch's functions compute the same from log-probabilities in float32.
"""

import torch

from . import kernels, native


def can_fuse(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `cross_entropy_` is the kernel for logits of this dtype there: then it holds no float32 copy of them.

    NOTE: unlike attention, which says so, this takes torch's functions where the library is missing: float32 models run without it.
    """
    return (
        _on_gpu(device)
        and not native.eager_asked("HF_FLASH2_LOSS")
        and dtype in (torch.bfloat16, torch.float16, torch.float32)
        and native.reason_unavailable(device.index) is None
    )


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def cross_entropy_(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of each row of logits, which become the gradient of their sum. For autograd functions: it records no graph.

    Args:
        logits: [N, C], any float dtype. The gradient is rounded to it; before, all is float32 (float64 for float64).
        labels: int64 [N], each a class, 0 .. C - 1. The kernel makes loss and gradient of a row with another label NaN; torch raises an
            IndexError or a RuntimeError on a CPU, and stops the GPU on one.
    Returns:
        losses: float32 [N] (float64 for float64), bit-equal from run to run.
    """
    if not _kernel_takes(logits, labels):
        log_p = torch.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
        log_p_label = log_p.gather(1, labels[:, None])
        # PERF: exp rounds as it stores, over the logits; the label's value is formed before rounding, as p - 1 cancels.
        torch.exp(log_p, out=logits).scatter_(1, labels[:, None], torch.expm1(log_p_label).to(logits.dtype))
        return -log_p_label.squeeze(1)
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    kernels.cross_entropy(logits, labels, losses)
    return losses


def _kernel_takes(logits: torch.Tensor, labels: torch.Tensor) -> bool:
    rows, columns = logits.shape
    return (
        can_fuse(logits.device, logits.dtype)
        and type(logits) is type(labels) is torch.Tensor
        and logits.stride(1) == 1
        and (rows == 1 or logits.stride(0) >= columns)
        and labels.dtype == torch.int64
        and labels.device == logits.device
        and labels.is_contiguous()
    )

"""What the kernels can do, as data, and the one function that says why not. Read by errors and `info`."""

import torch

MAX_HEAD_DIM = 512
PAGE_MULTIPLE = 128  # tokens of a page of a cache
HEAD_DIM_MULTIPLE = 8  # other head dims are zero-padded once in functional.py
CUDA_DTYPES = (torch.float16, torch.bfloat16)
CPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def reason_unsupported(
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    *,
    alibi_slopes: object = None,
) -> str | None:
    """Why attention with these properties cannot run, as a sentence that ends with what to do; None when it can.

    Looks at values only: whether the CUDA library is there and fits the GPU is `native.reason_unavailable`.
    """
    if device_type not in ("cuda", "cpu"):
        return (
            f"device type must be cuda or cpu, got {device_type}; use attn_implementation='sdpa' "
            "(for tensors: torch's scaled_dot_product_attention)"
        )
    dtypes = CUDA_DTYPES if device_type == "cuda" else CPU_DTYPES
    if dtype not in dtypes:
        names = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        return (
            f"q, k, v must be one of {names} on {device_type}, got {str(dtype).removeprefix('torch.')}; "
            "load the model with dtype=torch.bfloat16, run it under torch.autocast, or cast the tensors"
        )
    if not 0 < head_dim <= MAX_HEAD_DIM:
        return (
            f"head_dim must be between 1 and {MAX_HEAD_DIM}, got {head_dim}; use attn_implementation='sdpa' "
            "(for tensors: torch's scaled_dot_product_attention)"
        )
    if alibi_slopes is not None:
        return (
            "alibi_slopes are not supported; use attn_implementation='eager' "
            "(for tensors: torch's scaled_dot_product_attention, with the bias as attn_mask)"
        )
    return None

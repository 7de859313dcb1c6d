"""The calls into libhf_flash2.so: pack the params structs of csrc/params.h from tensors and run them on the current stream.

Knows nothing of autograd or torch.library; called by ops.py with checked CUDA tensors.
"""

import struct

import torch

from . import native

_DTYPES = {torch.float16: 0, torch.bfloat16: 1}

# Layouts of csrc/params.h, in order. Q = pointer or size, q = int64, i = int32, f = float.
_FORWARD = struct.Struct("=QQ" + 4 * "Qqqq" + "Qqq" + "QQQQ" + "Qq" + "Q" + "iiiiiiiiiiiiiiff")
_BACKWARD_TAIL = struct.Struct("=" + 4 * "Qqqq" + "QQQii")
_BACKWARD_SIZE = 8 + _FORWARD.size + _BACKWARD_TAIL.size


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    seqlens_q: torch.Tensor | None,
    seqlens_k: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    rng_state: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    dropout_p: float,
) -> int:
    """Run the forward kernel on the current stream of q's device, into out and softmax_lse. Returns the kernel family that ran."""
    native.check_device(q.device.index)
    params = _pack_forward(
        q, k, v, out, softmax_lse, seqlens_q, seqlens_k, key_mask, rng_state,
        max_seqlen_q, max_seqlen_k, softmax_scale, window_left, window_right, dropout_p,
    )  # fmt: skip
    return native.checked(native.library(), native.library().hf_flash2_forward(params))


def backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    seqlens_q: torch.Tensor | None,
    seqlens_k: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    rng_state: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    dropout_p: float,
    deterministic: bool,
) -> int:
    """Run the backward kernels on the current stream of q's device, into dq, dk, dv. Returns the kernel family that ran."""
    native.check_device(q.device.index)
    lib = native.library()
    forward_params = _pack_forward(
        q, k, v, out, softmax_lse, seqlens_q, seqlens_k, key_mask, rng_state,
        max_seqlen_q, max_seqlen_k, softmax_scale, window_left, window_right, dropout_p,
    )  # fmt: skip
    tensors = (*_tensor(dout), *_tensor(dq), *_tensor(dk), *_tensor(dv))
    head = struct.pack("=Q", _BACKWARD_SIZE) + forward_params

    def pack(workspace: int, workspace_bytes: int) -> bytes:
        return head + _BACKWARD_TAIL.pack(*tensors, _pointer(dlse), workspace, workspace_bytes, int(deterministic), 0)

    workspace_bytes = native.checked(lib, lib.hf_flash2_backward_workspace_bytes(pack(0, 0)))
    workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=q.device)
    return native.checked(lib, lib.hf_flash2_backward(pack(workspace.data_ptr(), workspace_bytes)))


def _pack_forward(
    q, k, v, out, softmax_lse, seqlens_q, seqlens_k, key_mask, rng_state,
    max_seqlen_q, max_seqlen_k, softmax_scale, window_left, window_right, dropout_p,
) -> bytes:  # fmt: skip
    packed = q.dim() == 3
    batch = seqlens_q.numel() - 1 if packed else q.shape[0]
    pointer_q, pointer_k = _pointer(seqlens_q), _pointer(seqlens_k)
    lse_batch_stride, lse_head_stride = (0, softmax_lse.stride(0)) if packed else softmax_lse.stride()[:2]
    return _FORWARD.pack(
        _FORWARD.size, _current_stream(q.device.index),
        *_tensor(q), *_tensor(k), *_tensor(v), *_tensor(out),
        softmax_lse.data_ptr(), lse_batch_stride, lse_head_stride,
        pointer_q if packed else 0, 0 if packed else pointer_q,
        pointer_k if packed else 0, 0 if packed else pointer_k,
        _pointer(key_mask), key_mask.stride(0) if key_mask is not None else 0,
        _pointer(rng_state),
        q.device.index, _DTYPES[q.dtype], batch, q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1],
        max_seqlen_q, max_seqlen_k, q.shape[0] if packed else 0, k.shape[0] if packed else 0, window_left, window_right,
        native.forced_family(), softmax_scale, dropout_p,
    )  # fmt: skip


def _tensor(x: torch.Tensor) -> tuple[int, int, int, int]:
    strides = x.stride()
    return (x.data_ptr(), 0, strides[0], strides[1]) if len(strides) == 3 else (x.data_ptr(), *strides[:3])


def _pointer(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


# PERF: torch's own raw getter, used by Triton and Inductor, costs 0.1 us; torch.cuda.current_stream makes a Stream object for 2.
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (lambda index: torch.cuda.current_stream(index).cuda_stream)

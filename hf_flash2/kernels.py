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
_ROTARY = struct.Struct("=QQ" + 4 * "Qqqq" + "QQqq" + "iiiiiiiiii")


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
    native.check_device(q.get_device())
    lib = native.library()
    copies: list[torch.Tensor] = []
    params = _pack_forward(
        copies, q, k, v, out, softmax_lse, seqlens_q, seqlens_k, key_mask, rng_state,
        max_seqlen_q, max_seqlen_k, softmax_scale, window_left, window_right, dropout_p,
    )  # fmt: skip
    return native.checked(lib, lib.hf_flash2_forward(params))


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
    """Run the backward kernels on the current stream of q's device, into dq, dk, dv. Returns the kernel family that ran.

    Scratch, from torch's allocator and free again on return: head dim (the greater one, rounded up to the kernel's) + 2 floats a query row
    and head.
    """
    native.check_device(q.get_device())
    lib = native.library()
    if 0 in dout.stride():  # the gradient of a sum; the Hopper kernels cannot read an expanded tensor
        dout = dout.contiguous()
    copies: list[torch.Tensor] = []
    forward_params = _pack_forward(
        copies, q, k, v, out, softmax_lse, seqlens_q, seqlens_k, key_mask, rng_state,
        max_seqlen_q, max_seqlen_k, softmax_scale, window_left, window_right, dropout_p,
    )  # fmt: skip
    tensors = (*_input(dout, copies), *_output(dq), *_output(dk), *_output(dv))
    head = struct.pack("=Q", _BACKWARD_SIZE) + forward_params

    def pack(workspace: int, workspace_bytes: int) -> bytes:
        return head + _BACKWARD_TAIL.pack(*tensors, _pointer(dlse), workspace, workspace_bytes, int(deterministic), 0)

    workspace_bytes = native.checked(lib, lib.hf_flash2_backward_workspace_bytes(pack(0, 0)))
    workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=q.device)
    return native.checked(lib, lib.hf_flash2_backward(pack(workspace.data_ptr(), workspace_bytes)))


def rotary(
    q: torch.Tensor, k: torch.Tensor, q_out: torch.Tensor, k_out: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    interleaved: bool, inverse: bool,
) -> None:  # fmt: skip
    """Run the rotary kernel on the current stream of q's device, into q_out and k_out, which are contiguous. Shapes as in rotary.py."""
    device = q.get_device()
    native.check_device(device)
    lib = native.library()
    copies: list[torch.Tensor] = []
    batch, seqlen, heads_q, head_dim = q.shape
    params = _ROTARY.pack(
        _ROTARY.size, _current_stream(device), *_input(q, copies), *_input(k, copies), *_output(q_out), *_output(k_out),
        cos.data_ptr(), sin.data_ptr(), 0 if cos.shape[0] == 1 else cos.stride(0), cos.stride(1),
        device, _DTYPES[q.dtype], batch, seqlen, heads_q, k.shape[2], head_dim, cos.shape[2], interleaved, inverse,
    )  # fmt: skip
    native.checked(lib, lib.hf_flash2_rotary(params))


def _pack_forward(
    copies, q, k, v, out, softmax_lse, seqlens_q, seqlens_k, key_mask, rng_state,
    max_seqlen_q, max_seqlen_k, softmax_scale, window_left, window_right, dropout_p,
) -> bytes:  # fmt: skip
    """PERF: reading an attribute of a tensor costs the host 0.1 us, packing all 44 fields 0.6: so shapes and strides are read once each."""
    device, pointer_q, pointer_k = q.get_device(), _pointer(seqlens_q), _pointer(seqlens_k)
    if q.dim() == 3:
        total_q, heads_q, head_dim = q.shape
        total_k, heads_k, _ = k.shape
        batch, lse_strides, sequences = seqlens_q.numel() - 1, (0, softmax_lse.stride(0)), (pointer_q, 0, pointer_k, 0)
    else:
        batch, _, heads_q, head_dim = q.shape
        total_q = total_k = 0
        heads_k, lse_strides, sequences = k.shape[2], softmax_lse.stride()[:2], (0, pointer_q, 0, pointer_k)
    return _FORWARD.pack(
        _FORWARD.size, _current_stream(device),
        *_input(q, copies), *_input(k, copies), *_input(v, copies), *_output(out),
        softmax_lse.data_ptr(), *lse_strides, *sequences,
        _pointer(key_mask), 0 if key_mask is None else key_mask.stride(0), _pointer(rng_state),
        device, _DTYPES[q.dtype], batch, heads_q, heads_k, head_dim, v.shape[-1], max_seqlen_q, max_seqlen_k, total_q, total_k,
        window_left, window_right, native.forced_family(), softmax_scale, dropout_p,
    )  # fmt: skip


def _input(x: torch.Tensor, copies: list[torch.Tensor]) -> tuple[int, int, int, int]:
    """A tensor that the kernels read, as HfFlash2Tensor.

    They load 16 bytes at a time, so address and strides must be multiples of 8 elements. True of every projection, cache and split of one
    with a head dim that is a multiple of 8; anything else is copied, and `copies` keeps the copy until the kernel is launched.
    """
    address, strides = x.data_ptr(), x.stride()
    if address % 16 or strides[-1] != 1 or (strides[0] | strides[1] | strides[-2]) % 8:
        copies.append(x.clone(memory_format=torch.contiguous_format))
        return _output(copies[-1])
    if len(strides) == 3:
        return address, 0, strides[0], strides[1]
    return address, strides[0], strides[1], strides[2]


def _output(x: torch.Tensor) -> tuple[int, int, int, int]:
    """A contiguous tensor, as HfFlash2Tensor: address, then batch, token and head stride."""
    strides = x.stride()
    return (x.data_ptr(), 0, strides[0], strides[1]) if len(strides) == 3 else (x.data_ptr(), *strides[:3])


def _pointer(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


# PERF: torch's own raw getter, used by Triton and Inductor, costs 0.1 us; torch.cuda.current_stream makes a Stream object for 2.
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (lambda index: torch.cuda.current_stream(index).cuda_stream)

"""ctypes binding of libhf_flash2.so: find and load it, pack the params structs of csrc/params.h, turn error codes into exceptions.

Knows nothing of autograd or torch.library; called by ops.py with checked CUDA tensors.
"""

import ctypes
import functools
import json
import os
import struct
from pathlib import Path

import torch

LIBRARY_NAME = "libhf_flash2.so"
FAMILIES = {"auto": 0, "sm80": 80, "sm90": 90}
_DTYPES = {torch.float16: 0, torch.bfloat16: 1}

# Layouts of csrc/params.h, in order. Q = pointer or size, q = int64, i = int32, f = float.
_FORWARD = struct.Struct("=QQ" + 4 * "Qqqq" + "Qqq" + "QQQQ" + "Qq" + "Q" + "iiiiiiiiiiiiiiff")
_BACKWARD_TAIL = struct.Struct("=" + 4 * "Qqqq" + "QQQii")
_BACKWARD_SIZE = 8 + _FORWARD.size + _BACKWARD_TAIL.size


class LibraryError(RuntimeError):
    """The CUDA library refused a call; the message carries its words."""


class NotAvailableError(RuntimeError):
    """There is no usable CUDA library for this device; the message says why and what to do."""


def library_path() -> Path:
    """Where the library is looked for: HF_FLASH2_LIBRARY if set, else beside this file."""
    override = os.environ.get("HF_FLASH2_LIBRARY")
    return Path(override) if override else Path(__file__).with_name(LIBRARY_NAME)


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library. Raises NotAvailableError with the reason and the remedy."""
    path = library_path()
    if not path.is_file():
        raise NotAvailableError(
            f"the CUDA kernels are not built ({path} does not exist); run `hf-flash2 build`, or reinstall hf_flash2 on a machine "
            "with a C++ compiler and without HF_FLASH2_SKIP_CUDA"
        )
    try:
        lib = ctypes.CDLL(str(path))
        _declare(lib)
    except (OSError, AttributeError) as error:  # AttributeError: a library of another version lacks a function
        raise NotAvailableError(f"{path} cannot be loaded: {error}; rebuild it with `hf-flash2 build`") from error
    return lib


def _declare(lib: ctypes.CDLL) -> None:
    """Argument and return types of csrc/api.h."""
    for name in ("hf_flash2_forward", "hf_flash2_backward"):
        getattr(lib, name).argtypes = [ctypes.c_char_p]
        getattr(lib, name).restype = ctypes.c_int
    lib.hf_flash2_backward_workspace_bytes.argtypes = [ctypes.c_char_p]
    lib.hf_flash2_backward_workspace_bytes.restype = ctypes.c_int64
    lib.hf_flash2_check_device.argtypes = [ctypes.c_int]
    lib.hf_flash2_check_device.restype = ctypes.c_int
    lib.hf_flash2_build_info.restype = ctypes.c_char_p
    lib.hf_flash2_last_error.restype = ctypes.c_char_p


def build_info() -> dict:
    """What the library was built from and for: version, toolkit, archs, head_dims, families, backward_families."""
    return json.loads(library().hf_flash2_build_info())


@functools.cache
def check_device(device_index: int) -> None:
    """Raise NotAvailableError unless this CUDA device can run the library. The positive answer costs nothing the second time."""
    lib = library()
    if lib.hf_flash2_check_device(device_index) < 0:
        raise NotAvailableError(_last_error(lib))


def reason_unavailable(device_index: int = 0) -> str | None:
    """Why the CUDA kernels cannot run on this device, or None when they can."""
    try:
        check_device(device_index)
    except NotAvailableError as error:
        return str(error)
    return None


def forced_family() -> int:
    """The kernel family named by HF_FLASH2_FAMILY (sm80, sm90, auto), as the library numbers it. Read at every call, for tests."""
    name = os.environ.get("HF_FLASH2_FAMILY", "auto")
    if name not in FAMILIES:
        raise ValueError(f"HF_FLASH2_FAMILY must be one of {', '.join(FAMILIES)}, got {name!r}")
    return FAMILIES[name]


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
    check_device(q.device.index)
    params = _pack_forward(
        q, k, v, out, softmax_lse, seqlens_q, seqlens_k, key_mask, rng_state,
        max_seqlen_q, max_seqlen_k, softmax_scale, window_left, window_right, dropout_p,
    )  # fmt: skip
    return _checked(library(), library().hf_flash2_forward(params))


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
    check_device(q.device.index)
    lib = library()
    forward_params = _pack_forward(
        q, k, v, out, softmax_lse, seqlens_q, seqlens_k, key_mask, rng_state,
        max_seqlen_q, max_seqlen_k, softmax_scale, window_left, window_right, dropout_p,
    )  # fmt: skip
    tensors = (*_tensor(dout), *_tensor(dq), *_tensor(dk), *_tensor(dv))
    head = struct.pack("=Q", _BACKWARD_SIZE) + forward_params

    def pack(workspace: int, workspace_bytes: int) -> bytes:
        return head + _BACKWARD_TAIL.pack(*tensors, _pointer(dlse), workspace, workspace_bytes, int(deterministic), 0)

    workspace_bytes = _checked(lib, lib.hf_flash2_backward_workspace_bytes(pack(0, 0)))
    workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=q.device)
    return _checked(lib, lib.hf_flash2_backward(pack(workspace.data_ptr(), workspace_bytes)))


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
        max_seqlen_q, max_seqlen_k, q.shape[0] if packed else 0, k.shape[0] if packed else 0, window_left, window_right, forced_family(),
        softmax_scale, dropout_p,
    )  # fmt: skip


def _tensor(x: torch.Tensor) -> tuple[int, int, int, int]:
    strides = x.stride()
    return (x.data_ptr(), 0, strides[0], strides[1]) if len(strides) == 3 else (x.data_ptr(), *strides[:3])


def _pointer(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


# PERF: torch's own raw getter, used by Triton and Inductor, costs 0.1 us; torch.cuda.current_stream makes a Stream object for 2.
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (lambda index: torch.cuda.current_stream(index).cuda_stream)


def _checked(lib: ctypes.CDLL, code: int) -> int:
    if code < 0:
        message = _last_error(lib)
        raise ValueError(message) if code == -2 else LibraryError(message)
    return code


def _last_error(lib: ctypes.CDLL) -> str:
    return lib.hf_flash2_last_error().decode()

"""kernels.py without a GPU: what it packs is what csrc/params.h declares, and what it hands over is readable for the kernels."""

import ctypes

import pytest
import stand_in
import torch
import torch.nn.functional as F

from hf_flash2 import kernels

STRUCTS = stand_in.structs()
Forward, Backward = STRUCTS["HfFlash2ForwardParams"], STRUCTS["HfFlash2BackwardParams"]
NUMBERS = {"max_seqlen_q": 5, "max_seqlen_k": 6, "softmax_scale": 0.25, "window_left": 3, "window_right": 0, "dropout_p": 0.5}


@pytest.fixture
def library(monkeypatch) -> stand_in.Library:
    monkeypatch.delenv("HF_FLASH2_FAMILY", raising=False)
    return stand_in.Library().install(monkeypatch)


def plain(struct: ctypes.Structure) -> dict:
    """A struct as nested dicts."""
    values = {name: getattr(struct, name) for name, _ in struct._fields_}
    return {name: plain(value) if isinstance(value, ctypes.Structure) else value for name, value in values.items()}


def operand(x: torch.Tensor) -> dict:
    batch, token, head = (0, *x.stride()[:2]) if x.dim() == 3 else x.stride()[:3]
    return {"data": x.data_ptr(), "batch_stride": batch, "token_stride": token, "head_stride": head}


def expected_forward(q, k, v, out, lse, seqlens_q=None, seqlens_k=None, key_mask=None, rng_state=None, family=0) -> dict:
    packed = q.dim() == 3

    def sequences(x):
        address = 0 if x is None else x.data_ptr()
        return {"cu_seqlens": address if packed else 0, "ranges": 0 if packed else address}

    return {
        "struct_size": ctypes.sizeof(Forward),
        "stream": 7,
        "q": operand(q), "k": operand(k), "v": operand(v), "out": operand(out),
        "softmax_lse": lse.data_ptr(),
        "lse_batch_stride": 0 if packed else lse.stride(0),
        "lse_head_stride": lse.stride(-2),
        "sequences_q": sequences(seqlens_q),
        "sequences_k": sequences(seqlens_k),
        "key_mask": 0 if key_mask is None else key_mask.data_ptr(),
        "key_mask_batch_stride": 0 if key_mask is None else key_mask.stride(0),
        "rng_state": 0 if rng_state is None else rng_state.data_ptr(),
        "device": -1,
        "dtype": {torch.float16: 0, torch.bfloat16: 1}[q.dtype],
        "batch": seqlens_q.numel() - 1 if packed else q.shape[0],
        "heads_q": q.shape[-2], "heads_k": k.shape[-2], "head_dim": q.shape[-1], "head_dim_v": v.shape[-1],
        "total_q": q.shape[0] if packed else 0, "total_k": k.shape[0] if packed else 0,
        "family": family,
        **NUMBERS,
    }  # fmt: skip


def dense(dtype=torch.bfloat16):
    """q as a projection [B, S, H * D], k and v as a cache [B, H, S, D] hands them on, out and lse. v has a head dim of its own."""
    q = torch.randn(2, 5, 4 * 64).to(dtype).view(2, 5, 4, 64)
    k, v = (torch.randn(2, 2, 8, head_dim).to(dtype)[:, :, :6].transpose(1, 2) for head_dim in (64, 40))
    return q, k, v, torch.empty(2, 5, 4, 40, dtype=dtype), torch.empty(2, 4, 5)


def packed():
    q, k, v = (torch.randn(n, heads, head_dim).half() for n, heads, head_dim in ((11, 4, 64), (13, 2, 64), (13, 2, 128)))
    return q, k, v, torch.empty(11, 4, 128, dtype=q.dtype), torch.empty(4, 11)


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


CALLS = {
    "dense": lambda: (dense(), {}),
    "dense float16": lambda: (dense(torch.float16), {}),
    "dropout": lambda: (dense(), {"rng_state": torch.zeros(2, dtype=torch.int64)}),
    "ranges": lambda: (dense(), {"seqlens_q": int32(2, 2), "seqlens_k": int32(2, 2)}),
    "holes": lambda: (dense(), {"seqlens_q": int32(2, 2), "seqlens_k": int32(3, 2), "key_mask": torch.ones(2, 6, dtype=torch.uint8)}),
    "packed": lambda: (packed(), {"seqlens_q": int32(4), "seqlens_k": int32(4)}),
}


@pytest.mark.parametrize("name", CALLS)
def test_forward_params(name, library):
    tensors, others = CALLS[name]()
    arguments = dict.fromkeys(("seqlens_q", "seqlens_k", "key_mask", "rng_state")) | others
    assert kernels.forward(*tensors, **arguments, **NUMBERS) == 80
    (params,) = library.calls
    assert plain(Forward.from_buffer_copy(params)) == expected_forward(*tensors, **others)
    assert len(params) == ctypes.sizeof(Forward)


@pytest.mark.parametrize("name", CALLS)
def test_backward_params(name, library):
    tensors, others = CALLS[name]()
    q, k, v, out, lse = tensors
    arguments = dict.fromkeys(("seqlens_q", "seqlens_k", "key_mask", "rng_state")) | others
    dout, dq, dk, dv, dlse = (torch.empty(x.shape, dtype=x.dtype) for x in (out, q, k, v, lse))
    kernels.backward(dout, dlse, q, k, v, out, lse, dq, dk, dv, **arguments, **NUMBERS, deterministic=True)
    (params,) = library.calls
    actual = plain(Backward.from_buffer_copy(params))
    assert actual.pop("workspace") != 0
    assert actual == {
        "struct_size": len(params),
        "forward": expected_forward(*tensors, **others),
        **{name: operand(x) for name, x in {"dout": dout, "dq": dq, "dk": dk, "dv": dv}.items()},
        "dlse": dlse.data_ptr(),
        "workspace_bytes": library.WORKSPACE_BYTES,
        "deterministic": 1,
        "reserved": 0,
    }


def test_the_family_is_that_of_the_environment_at_each_call(library, monkeypatch):
    tensors = dense()
    for name, number in (("sm90", 90), ("sm80", 80), ("auto", 0)):
        monkeypatch.setenv("HF_FLASH2_FAMILY", name)
        kernels.forward(*tensors, None, None, None, None, **NUMBERS)
        assert Forward.from_buffer_copy(library.calls[-1]).family == number


UNREADABLE = {
    "last stride": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "address": lambda x: F.pad(x, (4, 4))[..., 4:-4],
    "batch stride": lambda x: F.pad(x.flatten(1), (0, 4))[:, :-4].unflatten(1, x.shape[1:]),
    "token stride": lambda x: F.pad(x.flatten(2), (0, 4))[..., :-4].unflatten(2, x.shape[2:]),
    "head stride": lambda x: F.pad(x, (0, 4))[..., :-4],
}


@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.parametrize("which", range(3))
def test_what_the_kernels_cannot_read_is_copied(name, which, library, monkeypatch):
    """The kernel finds an aligned copy with the values of the tensor, alive while it is launched."""
    tensors = list(dense())
    x = tensors[which] = UNREADABLE[name](tensors[which].contiguous())
    found = []

    def launch(params: bytes) -> int:
        given = getattr(Forward.from_buffer_copy(params), "qkv"[which])
        junk = [torch.full(x.shape, 9, dtype=x.dtype) for _ in range(8)]  # what would take the place of a copy already freed
        found.append((plain(given), ctypes.string_at(given.data, x.numel() * x.element_size()), junk))
        return 80

    monkeypatch.setattr(library, "hf_flash2_forward", launch)
    kernels.forward(*tensors, None, None, None, None, **NUMBERS)
    ((given, memory, _),) = found
    assert given["data"] != x.data_ptr() and given["data"] % 16 == 0
    assert [given["batch_stride"], given["token_stride"], given["head_stride"], 1] == list(x.contiguous().clone().stride())
    assert memory == bytes(x.contiguous().view(torch.uint8).flatten().tolist())

"""kernels.py without a GPU: what it packs is what csrc/params.h declares, and what it hands over is readable for the kernels."""

import ctypes

import pytest
import stand_in
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_flash2 import functional, kernels, kvcache, native, ops

STRUCTS = stand_in.structs()
Forward, Backward = STRUCTS["HfFlash2ForwardParams"], STRUCTS["HfFlash2BackwardParams"]
NUMBERS = {
    "max_seqlen_q": 5,
    "max_seqlen_k": 6,
    "softmax_scale": 0.25,
    "window_left": 3,
    "window_right": 0,
    "dropout_p": 0.5,
    "softcap": 2.0,
}


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


def expected_forward(
    q, k, v, out, lse, seqlens_q=None, seqlens_k=None, key_mask=None, rng_state=None, sinks=None, block_table=None, family=0
) -> dict:
    packed = q.dim() == 3

    def sequences(x):
        address = 0 if x is None else x.data_ptr()
        return {"cu_seqlens": address if packed else 0, "ranges": 0 if packed else address}

    return {
        "struct_size": ctypes.sizeof(Forward),
        "stream": 7,
        "workspace": 0,
        "workspace_bytes": 0,
        "q": operand(q), "k": operand(k), "v": operand(v), "out": operand(out),
        "softmax_lse": lse.data_ptr(),
        "lse_batch_stride": 0 if packed else lse.stride(0),
        "lse_head_stride": lse.stride(-2),
        "sequences_q": sequences(seqlens_q),
        "sequences_k": sequences(seqlens_k),
        "key_mask": 0 if key_mask is None else key_mask.data_ptr(),
        "key_mask_batch_stride": 0 if key_mask is None else key_mask.stride(0),
        "rng_state": 0 if rng_state is None else rng_state.data_ptr(),
        "sinks": 0 if sinks is None else sinks.data_ptr(),
        "block_table": 0 if block_table is None else block_table.data_ptr(),
        "block_table_stride": 0 if block_table is None else block_table.stride(0),
        "device": -1,
        "dtype": {torch.float16: 0, torch.bfloat16: 1}[q.dtype],
        "batch": seqlens_q.numel() - 1 if packed else q.shape[0],
        "heads_q": q.shape[-2], "heads_k": k.shape[-2], "head_dim": q.shape[-1], "head_dim_v": v.shape[-1],
        "total_q": q.shape[0] if packed else 0, "total_k": k.shape[0] if packed else 0,
        "family": family,
        "pages": 0 if block_table is None else k.shape[0], "page_size": 0 if block_table is None else k.shape[1],
        "reserved": 0,
        **NUMBERS,
    }  # fmt: skip


def dense(dtype=torch.bfloat16):
    """q as a projection [B, S, H * D], k and v as a cache [B, H, S, D] hands them on. v has a head dim of its own."""
    q = torch.randn(2, 5, 4 * 64).to(dtype).view(2, 5, 4, 64)
    k, v = (torch.randn(2, 2, 8, head_dim).to(dtype)[:, :, :6].transpose(1, 2) for head_dim in (64, 40))
    return q, k, v


def packed():
    return tuple(torch.randn(n, heads, head_dim).half() for n, heads, head_dim in ((11, 4, 64), (13, 2, 64), (13, 2, 128)))


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def planned(tensors, others) -> tuple[kernels.Layout, tuple]:
    """The layout of a call, and its sequences."""
    sequences = tuple(others.get(name) for name in ("seqlens_q", "seqlens_k", "key_mask", "rng_state", "sinks"))
    return kernels.Layout(*tensors, *sequences[:3], **NUMBERS), sequences if others else kernels.DENSE


CALLS = {
    "dense": lambda: (dense(), {}),
    "dense float16": lambda: (dense(torch.float16), {}),
    "dropout": lambda: (dense(), {"rng_state": torch.zeros(2, dtype=torch.int64)}),
    "ranges": lambda: (dense(), {"seqlens_q": int32(2, 2), "seqlens_k": int32(2, 2)}),
    "holes": lambda: (
        dense(),
        {"seqlens_q": int32(2, 2), "seqlens_k": int32(3, 2), "key_mask": torch.ones(2, 9, dtype=torch.uint8)[:, :6]},
    ),
    "packed": lambda: (packed(), {"seqlens_q": int32(4), "seqlens_k": int32(4)}),
    "sinks": lambda: (dense(), {"sinks": torch.zeros(4)}),
}


@pytest.mark.parametrize("name", CALLS)
def test_forward_params(name, library):
    tensors, others = CALLS[name]()
    layout, sequences = planned(tensors, others)
    for call in range(2):  # both from the same layout
        out, lse, family = layout.forward(*tensors, sequences)
        assert family == 80 and out.is_contiguous() and lse.is_contiguous()
        assert plain(Forward.from_buffer_copy(library.calls[call])) == expected_forward(*tensors, out, lse, **others)


def test_paged_params(library):
    """Pages of a cache that are every other one of a larger tensor, and a table with more columns than are handed over."""
    pages = [torch.zeros(14, 128, 2, head_dim).half()[::2] for head_dim in (64, 128)]
    q, ranges, table = torch.zeros(3, 5, 4, 64).half(), int32(2, 3), int32(3, 9)[:, :4]
    layout = kernels.Layout(q, *pages, None, ranges, None, **NUMBERS, block_table=table)
    out, lse, _ = layout.forward(q, *pages, (None, ranges, None, None, None, table))
    expected = expected_forward(q, *pages, out, lse, seqlens_k=ranges, block_table=table)
    assert plain(Forward.from_buffer_copy(library.calls[-1])) == expected
    shifted = torch.zeros(q.numel() + 4).half()[4:].view_as(q)  # no multiple of 16 bytes
    with pytest.raises(native.MisalignedError):
        layout.forward(shifted, *pages, (None, ranges, None, None, None, table))
    again, *copies = layout.aligned(shifted, *pages, (None, ranges, None, None, None, table))
    again.forward(*copies, (None, ranges, None, None, None, table))
    assert plain(Forward.from_buffer_copy(library.calls[-1]))["page_size"] == 128


@pytest.mark.parametrize("paged", (False, True))
def test_append_params(paged, library):
    k, v = torch.zeros(3, 2, 5, 2 * 64).half()[..., :64], torch.zeros(3, 2, 5, 128).half()
    caches = [torch.zeros(7 if paged else 3, 256, 5, head_dim).half() for head_dim in (64, 128)]
    lengths, table = int32(3), int32(3, 9)[:, :4] if paged else None
    ranges = kernels.append(k, v, *caches, lengths, table)
    assert ranges.dtype == torch.int32 and ranges.shape == (2, 3)
    assert plain(STRUCTS["HfFlash2AppendParams"].from_buffer_copy(library.calls[-1])) == {
        "struct_size": ctypes.sizeof(STRUCTS["HfFlash2AppendParams"]), "stream": 7,
        "k": operand(k), "v": operand(v), "k_cache": operand(caches[0]), "v_cache": operand(caches[1]),
        "lengths": lengths.data_ptr(), "ranges": ranges.data_ptr(),
        "block_table": table.data_ptr() if paged else 0, "block_table_stride": 9 if paged else 0,
        "device": -1, "batch": 3, "seqlen": 2, "heads": 5, "head_dim": 64, "head_dim_v": 128,
        "page_size": 256 if paged else 0, "capacity": 4 * 256 if paged else 256,
    }  # fmt: skip


def test_lengths_of_a_cache_with_gaps_between_them(library, monkeypatch):
    """The kernel that writes new keys reads one after the other."""
    read = []

    def append(params: bytes) -> int:
        address = STRUCTS["HfFlash2AppendParams"].from_buffer_copy(params).lengths
        read.extend((ctypes.c_int32 * 2).from_address(address))
        return 0

    monkeypatch.setattr(library, "hf_flash2_append", append)
    monkeypatch.setattr(kvcache, "_OPS", (kernels.append, lambda *_: (None, None)))
    new, cache = torch.zeros(2, 1, 2, 64).half(), torch.zeros(4, 128, 2, 64).half()
    lengths = torch.tensor([3, 99, 4, 99], dtype=torch.int32)[::2]
    kvcache.flash_attn_with_kvcache(new, cache, cache.clone(), new, new, cache_seqlens=lengths, block_table=int32(2, 2))
    assert read == [3, 4]


@pytest.mark.parametrize("name", CALLS)
def test_a_forward_that_needs_a_workspace_gets_one(name, library, monkeypatch):
    """The library says so, once for a layout."""
    tensors, others = CALLS[name]()
    layout, sequences = planned(tensors, others)
    run, refusals = library.hf_flash2_forward, []

    def forward(params: bytes, addresses: bytes) -> int:
        if Forward.from_buffer_copy(params).workspace_bytes >= library.WORKSPACE_BYTES:
            return run(params, addresses)
        refusals.append(params)
        return library._fail("workspace_bytes", native.NEEDS_WORKSPACE)

    monkeypatch.setattr(library, "hf_flash2_forward", forward)
    for _ in range(2):
        out, lse, family = layout.forward(*tensors, sequences)
        params = plain(Forward.from_buffer_copy(library.calls[-1]))
        assert params["workspace"] != 0
        workspace = {"workspace": params["workspace"], "workspace_bytes": library.WORKSPACE_BYTES}
        assert family == 80 and params == expected_forward(*tensors, out, lse, **others) | workspace
    assert len(refusals) == 1
    layout.backward(torch.empty_like(out), None, *tensors, out, lse, sequences, False)
    kept = (*layout._outputs, *layout._gradients, layout._forward[1], *(workspace for _, workspace in layout._backwards.values()))
    held_bytes = [x.untyped_storage().nbytes() for x in kept]  # numbers: to print one of these tensors would read its memory
    assert held_bytes == [0] * 7
    assert [x.numel() for x in kept[5:]] == [library.WORKSPACE_BYTES] * 2
    assert Backward.from_buffer_copy(library.calls[-1]).forward.workspace == 0
    monkeypatch.setattr(library, "WORKSPACE_BYTES", library.WORKSPACE_BYTES + 1)
    with pytest.raises(native.LibraryError, match="workspace_bytes"):  # one that is given all it asks for and asks again
        layout.forward(*tensors, sequences)


@pytest.mark.parametrize("name", CALLS)
def test_backward_params(name, library):
    tensors, others = CALLS[name]()
    layout, sequences = planned(tensors, others)
    out, lse, _ = layout.forward(*tensors, sequences)
    dout, dlse = torch.empty_like(out), torch.empty_like(lse)
    dq, dk, dv, dsinks, family = layout.backward(dout, dlse, *tensors, out, lse, sequences, True)
    assert family == 80 and (dsinks is None) == ("sinks" not in others)
    params = library.calls[-1]
    actual = plain(Backward.from_buffer_copy(params))
    assert actual.pop("workspace") != 0
    assert actual == {
        "struct_size": len(params),
        "forward": expected_forward(*tensors, out, lse, **others),
        **{name: operand(x) for name, x in {"dout": dout, "dq": dq, "dk": dk, "dv": dv}.items()},
        "dlse": dlse.data_ptr(),
        "dsinks": 0 if dsinks is None else dsinks.data_ptr(),
        "workspace_bytes": library.WORKSPACE_BYTES,
        "deterministic": 1,
        "reserved": 0,
    }


def test_the_family_is_that_of_the_environment_at_each_call(library, monkeypatch):
    monkeypatch.setattr(functional, "_on_gpu", lambda x: True)
    for name, number in (("sm90", 90), ("sm80", 80), ("auto", 0), (None, 0), ("sm90", 90), ("", 0)):
        monkeypatch.delenv("HF_FLASH2_FAMILY", raising=False)
        if name is not None:
            monkeypatch.setenv("HF_FLASH2_FAMILY", name)
        functional.flash_attn_func(*dense())
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

    def launch(params: bytes, addresses: bytes) -> int:
        filled = stand_in.with_addresses("HfFlash2Forward", params, addresses)
        given = getattr(Forward.from_buffer_copy(filled), "qkv"[which])
        if given.data % 16:
            return stand_in.MISALIGNED
        junk = [torch.full(x.shape, 9, dtype=x.dtype) for _ in range(8)]  # what would take the place of a copy already freed
        found.append((plain(given), ctypes.string_at(given.data, x.numel() * x.element_size()), junk))
        return 80

    monkeypatch.setattr(library, "hf_flash2_forward", launch)
    ops._forward_cuda(*tensors, *kernels.DENSE, *NUMBERS.values(), False)
    assert (ops.plan(*tensors, None, None, None, *NUMBERS.values(), False) is None) == (name != "address")
    if name == "address":  # its strides are those of a plan
        monkeypatch.setattr(functional, "_on_gpu", lambda x: True)
        functional.flash_attn_func(*tensors)
        assert len(ops.plans) == 2  # that of the op, and that of the function
    assert len(found) == (2 if name == "address" else 1)
    for given, memory, _ in found:
        assert given["data"] != x.data_ptr() and given["data"] % 16 == 0
        assert [given["batch_stride"], given["token_stride"], given["head_stride"], 1] == list(x.contiguous().clone().stride())
        assert memory == bytes(x.contiguous().view(torch.uint8).flatten().tolist())


@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.parametrize("which", ["k", "v"])
def test_new_keys_that_the_kernels_cannot_read_are_copied(name, which, library, monkeypatch):
    new = {key: torch.randn(2, 3, 5, 64).half() for key in "kv"}
    x = new[which] = UNREADABLE[name](new[which])
    found = []

    def append(params: bytes) -> int:
        given = getattr(STRUCTS["HfFlash2AppendParams"].from_buffer_copy(params), which)
        found.append((plain(given), ctypes.string_at(given.data, x.numel() * x.element_size())))
        return 0

    monkeypatch.setattr(library, "hf_flash2_append", append)
    kernels.append(new["k"], new["v"], half(2, 9, 5, 64), half(2, 9, 5, 64), int32(2), None)
    ((given, memory),) = found
    assert given["data"] != x.data_ptr() and given["data"] % 16 == 0 and given == operand(half(2, 3, 5, 64)) | {"data": given["data"]}
    assert memory == memory_of(x)


@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.parametrize("which", range(3))
def test_what_the_kernels_cannot_read_is_copied_for_the_backward_of_the_op(name, which, library):
    tensors = list(dense())
    x = tensors[which] = UNREADABLE[name](tensors[which].contiguous())
    out, lse = torch.empty(2, 5, 40, 4).bfloat16().transpose(2, 3), torch.empty(2, 5, 4).transpose(1, 2)
    ops._backward_cuda(torch.empty(2, 5, 4, 40).bfloat16(), None, *tensors, out, lse, *kernels.DENSE, *NUMBERS.values(), False)
    params = Backward.from_buffer_copy(library.calls[-1]).forward
    given = plain(getattr(params, "qkv"[which]))
    assert given["data"] != x.data_ptr() and given["data"] % 16 == 0
    assert [given["batch_stride"], given["token_stride"], given["head_stride"], 1] == list(x.contiguous().clone().stride())
    assert params.out.data != out.data_ptr() and params.softmax_lse != lse.data_ptr()
    assert (params.out.head_stride, params.lse_head_stride) == (40, 5)


def memory_of(x: torch.Tensor) -> bytes:
    return bytes(x.contiguous().view(torch.uint8).flatten().tolist())


@pytest.mark.parametrize("name", [*UNREADABLE, "expanded"])
def test_gradients_that_the_kernels_cannot_read_are_copied(name, library, monkeypatch):
    """The others are handed over as they are, by the same layout."""
    tensors = dense()
    layout, sequences = planned(tensors, {})
    out, lse, _ = layout.forward(*tensors, sequences)
    unreadable = {**UNREADABLE, "expanded": lambda x: x[:, :1].expand(x.shape)}[name](torch.randn(out.shape).bfloat16())
    of_heads, dlse = torch.randn(2, 4, 5, 40).bfloat16().transpose(1, 2), torch.randn(2, 5, 4).transpose(1, 2)
    found = []

    def launch(params: bytes, addresses: bytes) -> int:
        given = Backward.from_buffer_copy(stand_in.with_addresses("HfFlash2Backward", params, addresses))
        assert ctypes.string_at(given.dlse, dlse.numel() * 4) == memory_of(dlse)
        found.append((plain(given.dout), ctypes.string_at(given.dout.data, out.numel() * 2), given.deterministic))
        return 80

    monkeypatch.setattr(library, "hf_flash2_backward", launch)
    for dout, deterministic in ((of_heads, False), (unreadable, False), (of_heads, True), (unreadable, True)):
        layout.backward(dout, dlse, *tensors, out, lse, sequences, deterministic)
    assert [deterministic for *_, deterministic in found] == [0, 0, 1, 1]
    for as_it_is, (copy, memory, _) in (found[:2], found[2:]):
        assert as_it_is[0] == operand(of_heads)
        assert copy["data"] % 16 == 0 and copy == operand(out) | {"data": copy["data"]}
        assert memory == memory_of(unreadable)


def test_what_fits_a_layout():
    """Tensors with its strides, and results as it made them: of each tensor alone, other strides do not."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in.Library().install(patch)
        layout, _ = planned(dense(), {})
    saved = [*dense(), torch.empty(2, 5, 4, 40), torch.empty(2, 4, 5)]
    assert layout.fits(*saved)
    for i, x in enumerate(saved):
        assert not layout.fits(*saved[:i], F.pad(x, (0, 8))[..., :-8], *saved[i + 1 :])


def test_which_sequences_fit_a_layout():
    """A mask with the strides that the layout was made for; all else contiguous."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in.Library().install(patch)
        tensors, others = CALLS["holes"]()
        layout, sequences = planned(tensors, others | {"rng_state": torch.zeros(2, dtype=torch.int64), "sinks": torch.zeros(4)})
        dense_layout, _ = planned(dense(), {})
    saved = [*tensors, torch.empty(2, 5, 4, 40), torch.empty(2, 4, 5)]
    assert layout.fits(*saved, sequences)
    for i, x in enumerate(sequences):
        other = x.contiguous() if i == 2 else F.pad(x, (0, 1))[..., :-1] if x.dim() > 1 else x.repeat_interleave(2)[::2]
        assert other.stride() != x.stride() and not layout.fits(*saved, (*sequences[:i], other, *sequences[i + 1 :]))
    assert not dense_layout.fits(*saved, (*sequences[:2], sequences[2], None, None))


def test_saved_tensors_may_come_back_anywhere_in_memory(library, monkeypatch):
    """As views of one flat buffer, say."""
    monkeypatch.setattr(functional, "_on_gpu", lambda x: True)
    q, k, v = (torch.randn(2, 5, heads, 64).bfloat16().requires_grad_() for heads in (4, 2, 2))
    given = []

    def launch(params: bytes, addresses: bytes) -> int:
        forward = Backward.from_buffer_copy(stand_in.with_addresses("HfFlash2Backward", params, addresses)).forward
        if any(x.data % 16 for x in (forward.q, forward.k, forward.v, forward.out)):
            return stand_in.MISALIGNED
        given.append(ctypes.string_at(forward.out.data, 2 * 5 * 4 * 64 * 2))
        return 80

    monkeypatch.setattr(library, "hf_flash2_backward", launch)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: F.pad(x.flatten(), (1, 0))[1:].view(x.shape)):
        out = functional.flash_attn_func(q, k, v)
    kept = out.detach().clone()
    out.sum().backward()
    assert given == [memory_of(kept)]


@pytest.mark.parametrize("name", ["seqlens_q", "seqlens_k", "key_mask", "rng_state", "sinks"])
def test_sequences_that_the_kernels_cannot_read_are_copied_for_the_backward_of_the_op(name, library):
    tensors, others = CALLS["holes"]()
    others |= {"rng_state": torch.zeros(2, dtype=torch.int64), "sinks": torch.zeros(4)}
    x = others[name]
    others[name] = torch.stack((x, x), -1)[..., 0]
    out, lse = torch.empty(2, 5, 4, 40).bfloat16(), torch.empty(2, 4, 5)
    ops._backward_cuda(torch.empty_like(out), None, *tensors, out, lse, *others.values(), *NUMBERS.values(), False)
    params = Backward.from_buffer_copy(library.calls[-1]).forward
    addresses = {
        "seqlens_q": params.sequences_q.ranges, "seqlens_k": params.sequences_k.ranges, "key_mask": params.key_mask,
        "rng_state": params.rng_state, "sinks": params.sinks,
    }  # fmt: skip
    assert {key for key, value in others.items() if addresses[key] != value.data_ptr()} == {name}
    assert params.key_mask_batch_stride == (6 if name == "key_mask" else 9)


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


LAUNCHES = {
    "forward": lambda layout: layout.forward(*dense(), kernels.DENSE),
    "backward": lambda layout: layout.backward(
        half(2, 5, 4, 40), None, *dense(), half(2, 5, 4, 40), half(2, 4, 5).float(), kernels.DENSE, False
    ),
    "append": lambda _: kernels.append(half(2, 1, 2, 64), half(2, 1, 2, 64), half(2, 9, 2, 64), half(2, 9, 2, 64), int32(2), None),
    "rotary": lambda _: kernels.rotary(*[half(2, 5, 2, 64)] * 4, *[half(1, 5, 64)] * 2, False),
    "cross_entropy": lambda _: kernels.cross_entropy(half(3, 9), torch.arange(3), torch.zeros(3)),
}
LAUNCHES["backward_workspace_bytes"] = LAUNCHES["backward"]


@pytest.mark.parametrize("name", LAUNCHES)
def test_what_the_library_refuses_is_an_error(name, library, monkeypatch):
    layout, _ = planned(dense(), {})
    monkeypatch.setattr(library, f"hf_flash2_{name}", lambda *_: library._fail("its words", -4))
    with pytest.raises(native.LibraryError, match="its words"):
        LAUNCHES[name](layout)


def test_a_workspace_whose_size_the_library_refuses_to_say(library, monkeypatch):
    layout, sequences = planned(dense(), {})
    monkeypatch.setattr(library, "hf_flash2_forward", lambda *_: library._fail("workspace_bytes", native.NEEDS_WORKSPACE))
    monkeypatch.setattr(library, "hf_flash2_forward_workspace_bytes", lambda *_: library._fail("its words"))
    with pytest.raises(native.LibraryError, match="its words"):
        layout.forward(*dense(), sequences)


@pytest.mark.parametrize("name", ["layout", "append", "rotary", "cross_entropy"])
def test_a_gpu_that_the_library_does_not_run_on_is_refused(name, monkeypatch):
    """Before anything is launched."""
    library = stand_in.Library(capability=75).install(monkeypatch)
    with pytest.raises(native.NotAvailableError, match="the kernels need 8.0"):
        planned(dense(), {}) if name == "layout" else LAUNCHES[name](None)
    assert library.calls == []


def test_a_misaligned_tensor_is_copied_for_the_backward_too(library, monkeypatch):
    monkeypatch.setattr(functional, "_on_gpu", lambda x: True)
    q, k, v = (x.requires_grad_() for x in dense())
    key = F.pad(k, (4, 4))[..., 4:-4]
    functional.flash_attn_func(q, key, v).backward(torch.ones(2, 5, 4, 40, dtype=q.dtype))
    params = Backward.from_buffer_copy(library.calls[-1])
    assert key.data_ptr() % 16 and params.forward.k.data % 16 == 0 and params.forward.q.data == q.data_ptr()
    assert k.grad is not None


def test_calls_of_one_layout_are_planned_once(library, monkeypatch):
    """And whatever a check looks at makes another plan."""
    monkeypatch.setattr(functional, "_on_gpu", lambda x: True)
    q, k, v = (torch.randn(2, 5, heads, 64).bfloat16() for heads in (4, 2, 2))
    planned = []
    plan = ops.plan
    monkeypatch.setattr(ops, "plan", lambda *args: planned.append(args) or plan(*args))

    def plans_of(call) -> int:
        before = len(planned)
        call()
        return len(planned) - before

    attend = functional.flash_attn_func
    assert plans_of(lambda: attend(q, k, v)) == 1
    assert plans_of(lambda: attend(q.clone(), k.clone(), v.clone())) == 0
    assert plans_of(lambda: attend(q, k, v, return_attn_probs=True)) == 0
    lengths = torch.tensor([[0, 0], [5, 3]], dtype=torch.int32)
    others = (
        lambda: attend(q[:1], k[:1], v[:1]),
        lambda: attend(q, k[:, :4], v[:, :4]),
        lambda: attend(q.transpose(0, 1).contiguous().transpose(0, 1), k, v),
        lambda: attend(q.half(), k.half(), v.half()),
        lambda: attend(q, k, v, 0.1),
        lambda: attend(q, k, v, softmax_scale=1.0),
        lambda: attend(q, k, v, causal=True),
        lambda: attend(q, k, v, window_size=[2, -1]),
        lambda: attend(q, k, v, deterministic=True),
        lambda: attend(q, k, v, softcap=30.0),
        lambda: attend(q, k, v, s_aux=torch.zeros(4)),
        lambda: attend(q, k, v, s_aux=torch.zeros(4).bfloat16()),
        lambda: functional.flash_attn_ranges_func(q, k, v, lengths),
        lambda: functional.flash_attn_ranges_func(q, k, v, None, lengths),
    )
    for call in others:
        assert (plans_of(call), plans_of(call)) == (1, 0)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert plans_of(lambda: attend(q, k, v)) == 0  # as with deterministic=True
    monkeypatch.setattr(ops, "_MAX_PLANS", len(ops.plans))
    assert plans_of(lambda: attend(q[:1, :1], k[:1], v[:1])) == 1 and len(ops.plans) == 1


def test_calls_are_told_apart_by_each_of_their_tensors():
    tensors = [torch.empty(2, 4, 4, 64) for _ in range(6)]
    known = ops.forms(*tensors)
    assert ops.forms(*(x.clone() for x in tensors)) == known
    changes = (lambda x: x.half(), lambda x: x.to("meta"), lambda x: x.transpose(1, 2), lambda x: x[:1])
    for i, x in enumerate(tensors):
        for changed in (*(change(x) for change in changes), *([None] if i >= 3 else [])):
            assert ops.forms(*tensors[:i], changed, *tensors[i + 1 :]) != known


def test_calls_are_told_apart_by_their_tables_of_pages(library):
    pages, q, ranges = torch.zeros(7, 128, 2, 64).half(), torch.zeros(3, 5, 4, 64).half(), int32(2, 3)

    def plan(table: torch.Tensor) -> ops.Plan:
        return ops.plan_of(q, pages, pages, None, ranges, None, (*NUMBERS.values(), False), table)

    table = int32(3, 9)
    assert plan(table) is plan(table + 1)
    assert len({plan(table), plan(table[:, :4]), plan(int32(3, 4))}) == 3


WANTED = [("q",), ("k",), ("v",), ("q", "k", "v"), ("s_aux",)]


@pytest.mark.parametrize("result", ["out", "out beside lse", "out with sinks"])
@pytest.mark.parametrize("wanted", WANTED, ids="".join)
def test_planned_calls_have_a_gradient_where_one_is_wanted(wanted, result, library, monkeypatch):
    monkeypatch.setattr(functional, "_on_gpu", lambda x: True)
    tensors = dict(zip("qkv", dense(), strict=True))
    if result == "out with sinks":
        tensors["s_aux"] = torch.zeros(4)
    leaves = [tensors[name].requires_grad_() for name in wanted if name in tensors]

    def call() -> torch.Tensor:
        out = functional.flash_attn_func(**tensors, return_attn_probs=result == "out beside lse")
        return out[0] if result == "out beside lse" else out

    for _ in range(2):  # planned, and looked up
        out = call()
        assert out.requires_grad == bool(leaves)
        with torch.no_grad():
            assert not call().requires_grad
        if leaves:
            gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))
            assert [x.shape for x in gradients] == [x.shape for x in leaves] and len(library.calls[-1]) == ctypes.sizeof(Backward)
    assert len(ops.plans) == 1


def test_planned_calls_have_no_second_derivative(library, monkeypatch):
    monkeypatch.setattr(functional, "_on_gpu", lambda x: True)
    q, k, v = (x.requires_grad_() for x in dense())
    (dq,) = torch.autograd.grad(functional.flash_attn_func(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative.*eager"):
        dq.sum().backward()


class Watching(torch.Tensor):
    """Sees the operations on it."""

    seen: list = []

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return *args[2:5], torch.empty(0)  # dq, dk, dv, dsinks: any will do


def test_the_backward_of_a_planned_call_is_not_hidden_from_who_watches(library, monkeypatch):
    monkeypatch.setattr(functional, "_on_gpu", lambda x: True)
    monkeypatch.setattr(Watching, "seen", [])
    q, k, v = (x.requires_grad_() for x in dense())
    out = functional.flash_attn_func(q, k, v)
    out.backward(torch.Tensor._make_subclass(Watching, torch.ones_like(out)))
    assert Watching.seen == [ops.backward]


@pytest.mark.parametrize("which", range(3))
def test_what_is_plain(which):
    """Nothing that a library of kernels would pass by."""
    tensors = list(dense())
    assert ops.plain(*tensors)
    with FakeTensorMode():
        assert not ops.plain(*tensors)
    within = []
    torch.func.grad(lambda x: within.append(ops.plain(*tensors[:which], x, *tensors[which + 1 :])) or x.sum())(tensors[which])
    assert within == [False]
    tensors[which] = tensors[which].as_subclass(Watching)
    assert not ops.plain(*tensors)


def test_planned_calls_of_head_dims_that_are_padded(library, monkeypatch):
    monkeypatch.setattr(functional, "_on_gpu", lambda x: True)
    q, k, v = (x[..., :13] for x in dense())
    shapes = [functional.flash_attn_func(q, k, v[..., :7]).shape for _ in range(2)]
    assert shapes == [(2, 5, 4, 7)] * 2 and len(ops.plans) == 1


def test_the_backend_of_the_last_call_is_named(library, monkeypatch):
    monkeypatch.setattr(functional, "_on_gpu", lambda x: True)
    for family in (90, 80):
        monkeypatch.setattr(library, "hf_flash2_forward", lambda *structs, family=family: family)
        functional.flash_attn_func(*dense())
        assert ops.last_backend() == f"cuda-sm{family}"


def test_what_is_wrong_is_refused_behind_a_planned_call_too(library, monkeypatch):
    monkeypatch.setattr(functional, "_on_gpu", lambda x: True)
    q, k, v = (torch.randn(2, 5, heads, 64).bfloat16() for heads in (4, 2, 2))
    functional.flash_attn_func(q, k, v)
    for message, call in {
        "one dtype": lambda: functional.flash_attn_func(q, k, v.half()),
        "same head dim": lambda: functional.flash_attn_func(q[..., :32], k, v),
        "same shape up to the head dim": lambda: functional.flash_attn_func(q, k[:, :4], v),
        "multiple of the number of key heads": lambda: functional.flash_attn_func(q[:, :, :3], k, v),
        "dropout_p": lambda: functional.flash_attn_func(q, k, v, 1.5),
        "softcap": lambda: functional.flash_attn_func(q, k, v, softcap=[30.0]),
        "window_size": lambda: functional.flash_attn_func(q, k, v, window_size=(-2, 0)),
        "alibi_slopes": lambda: functional.flash_attn_func(q, k, v, alibi_slopes=torch.ones(4)),
        "s_aux must be": lambda: functional.flash_attn_func(q, k, v, s_aux=torch.ones(2)),
        "3 dimensions": lambda: functional.flash_attn_varlen_func(q, k, v, q.new_zeros(3).int(), q.new_zeros(3).int(), 5, 5),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
    functional.flash_attn_func(q, k, v)
    assert len(ops.plans) == 1


def test_saved_tensors_may_come_back_with_other_strides(library, monkeypatch):
    """Hooks of saved tensors may move them to the CPU and back, say; then the backward reads their strides anew."""
    monkeypatch.setattr(functional, "_on_gpu", lambda x: True)
    q, k, v = (torch.randn(2, heads, 5, 64).bfloat16().transpose(1, 2).requires_grad_() for heads in (4, 2, 2))
    seen = []
    monkeypatch.setattr(ops, "backward", lambda dout, dlse, q, k, v, *_: seen.append(q.stride()) or (q, k, v, None))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.contiguous()):
        functional.flash_attn_func(q, k, v).sum().backward()
    assert seen == [(5 * 4 * 64, 4 * 64, 64, 1)] and not any(len(call) == ctypes.sizeof(Backward) for call in library.calls)
    functional.flash_attn_func(q, k, v).sum().backward()
    assert len(seen) == 1 and Backward.from_buffer_copy(library.calls[-1]).forward.q.head_stride == 5 * 64

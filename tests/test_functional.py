"""functional.py: flash-attn's signatures and semantics, and errors that name the value, the expectation and the remedy."""

import inspect
import math
import re

import numpy as np
import pytest
import torch

from hf_flash2 import flash_attn_func, flash_attn_ranges_func, flash_attn_varlen_func, functional, native, ops

pytestmark = pytest.mark.timeout(60)

DTYPE = torch.bfloat16  # what CPU and GPU both take

# Parameter order and defaults of flash_attn 2.x, then the sinks, under the name that Transformers and builds of FA-3 have for them.
TAIL = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
PACKED = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


@pytest.mark.parametrize(
    ("function", "positional", "tail"),
    [
        (flash_attn_func, ("q", "k", "v"), TAIL | {"s_aux": None}),
        (flash_attn_varlen_func, PACKED, TAIL | {"block_table": None, "s_aux": None}),
    ],
)
def test_signatures_are_those_of_flash_attn(function, positional, tail):
    parameters = inspect.signature(function).parameters
    assert list(parameters) == [*positional, *tail]
    assert {name: parameters[name].default for name in tail} == tail
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())


def qkv(device, shape_q=(2, 5, 4, 16), shape_k=None, dtype=DTYPE):
    shape_k = shape_k or (*shape_q[:-2], shape_q[-2] // 2, shape_q[-1])
    return tuple(torch.randn(shape, device=device).to(dtype) for shape in (shape_q, shape_k, shape_k))


def test_returns_out_alone_or_with_lse(device):
    q, k, v = qkv(device)
    out = flash_attn_func(q, k, v)
    assert out.shape == q.shape
    again, lse, nothing = flash_attn_func(q, k, v, return_attn_probs=True)
    assert torch.equal(again, out)
    assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32
    assert nothing is None
    cu_seqlens = torch.tensor([0, 5, 10], dtype=torch.int32, device=device)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    out, lse, _ = flash_attn_varlen_func(*packed, cu_seqlens, cu_seqlens, 5, 5, return_attn_probs=True)
    assert out.shape == (10, 4, 16)
    assert lse.shape == (4, 10)


def test_deterministic_may_be_none(device):
    """Then torch.use_deterministic_algorithms alone decides."""
    q, k, v = (torch.randn(1, 4, 2, 16, device=device, dtype=torch.bfloat16) for _ in range(3))
    assert torch.equal(flash_attn_func(q, k, v, deterministic=None), flash_attn_func(q, k, v))


@pytest.mark.parametrize("head_dim", (16, 20))
def test_default_scale_is_that_of_the_given_head_dim(head_dim, device):
    """Also where the head dim is zero-padded (20 runs as 24)."""
    q, k, v = qkv(device, (1, 9, 2, head_dim))
    assert torch.equal(flash_attn_func(q, k, v), flash_attn_func(q, k, v, softmax_scale=head_dim**-0.5))
    assert not torch.equal(flash_attn_func(q, k, v), flash_attn_func(q, k, v, softmax_scale=24**-0.5))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), ((24, 8), (16, 40), (16, 12), (20, 16), (20, 20)))
def test_only_a_head_dim_that_is_no_multiple_of_8_is_padded(head_dim, head_dim_v, device, monkeypatch):
    """The ops get the caller's own tensors otherwise: no copy."""
    seen = []
    forward = ops.forward
    monkeypatch.setattr(ops, "forward", lambda *args: seen.append(args) or forward(*args))
    monkeypatch.setattr(functional, "_on_gpu", lambda x: False)  # no plans, which take the tensors as they are
    q, k, _ = qkv(device, (1, 9, 2, head_dim))
    v = torch.randn(1, 9, 1, head_dim_v, device=device).to(DTYPE)
    flash_attn_func(q, k, v)
    for given, passed in zip((q, k, v), seen[0], strict=False):
        assert (passed is given) == (given.shape[-1] % 8 == 0)
        assert passed.shape[-1] == -(-given.shape[-1] // 8) * 8


@pytest.mark.parametrize("head_dim_v", (8, 12, 40))
def test_v_may_have_another_head_dim(head_dim_v, device):
    q, k, _ = qkv(device, (1, 9, 2, 16))
    v = torch.randn(1, 9, 1, head_dim_v, device=device).to(DTYPE).requires_grad_()
    out = flash_attn_func(q, k, v, causal=True)
    assert out.shape == (1, 9, 2, head_dim_v)
    wide = torch.nn.functional.pad(v, (0, 40 - head_dim_v))
    padded = [torch.nn.functional.pad(x, (0, 24)) for x in (q, k)]
    expected = flash_attn_func(*padded, wide, softmax_scale=16**-0.5, causal=True)[..., :head_dim_v]
    torch.testing.assert_close(out, expected, rtol=0, atol=2**-7)
    (dv,) = torch.autograd.grad(out.float().square().sum(), v)
    assert dv.shape == v.shape


def test_causal_means_no_key_on_the_right(device):
    q, k, v = qkv(device)
    expected = flash_attn_func(q, k, v, window_size=(-1, 0))
    assert torch.equal(flash_attn_func(q, k, v, causal=True), expected)
    assert torch.equal(flash_attn_func(q, k, v, causal=True, window_size=(-1, 3)), expected)
    assert not torch.equal(flash_attn_func(q, k, v), expected)


def test_max_seqlen_may_be_a_tensor(device):
    q, k, v = (x.flatten(0, 1) for x in qkv(device))
    cu_seqlens = torch.tensor([0, 5, 10], dtype=torch.int32, device=device)
    expected = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 5, 5)
    longest = torch.tensor(5, device=device)
    assert torch.equal(flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest), expected)


def test_numbers_may_be_of_numpy(device):
    q, k, v = qkv(device)
    torch.manual_seed(0)
    expected = flash_attn_func(q, k, v, 0.5, 0.25, window_size=(2, 1), softcap=8.0)
    torch.manual_seed(0)
    found = flash_attn_func(q, k, v, np.float32(0.5), np.float16(0.25), window_size=(np.int64(2), np.int32(1)), softcap=np.float32(8))
    assert torch.equal(found, expected)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    cu_seqlens = torch.tensor([0, 5, 10], dtype=torch.int32, device=device)
    found = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, np.int64(5), np.int32(5))
    assert torch.equal(found, flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 5, 5))


@pytest.mark.parametrize("dropout_p", (0.0, 0.5))
def test_an_empty_batch_is_no_error(dropout_p, device):
    q, k, v = (x.requires_grad_() for x in qkv(device, (0, 5, 4, 16)))
    out = flash_attn_func(q, k, v, dropout_p)
    assert out.shape == q.shape
    out.sum().backward()
    assert q.grad.shape == q.shape


@pytest.mark.parametrize("asked_by", ("argument", "torch", "nobody"))
def test_deterministic_reaches_the_op(asked_by, device, monkeypatch, request):
    seen = []
    forward, plan = ops.forward, ops.plan
    monkeypatch.setattr(ops, "forward", lambda *args: seen.append(args[-1]) or forward(*args))
    monkeypatch.setattr(ops, "plan", lambda *args: seen.append(args[-1]) or plan(*args))
    monkeypatch.setattr(ops, "plans", {})
    if asked_by == "torch":
        request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
        torch.use_deterministic_algorithms(True)
    flash_attn_func(*qkv(device), deterministic=asked_by == "argument")
    assert set(seen) == {asked_by != "nobody"}


def test_calls_that_cannot_be_planned_are_not_kept(monkeypatch):
    monkeypatch.setattr(functional, "_on_gpu", lambda x: True)
    monkeypatch.setattr(ops, "plan", lambda *args: None)  # as where the kernels need copies
    monkeypatch.setattr(ops, "plans", {})
    flash_attn_func(*qkv("cpu"))
    assert ops.plans == {}


def test_no_generator_is_touched_without_dropout(device):
    before = torch.get_rng_state()
    flash_attn_func(*qkv("cpu"))
    torch.set_rng_state(before)
    q, k, v = qkv("cpu")
    after_inputs = torch.get_rng_state()
    flash_attn_func(q, k, v)
    assert torch.equal(torch.get_rng_state(), after_inputs)


# Errors. Each row: the wrong call, then what the message must contain: the argument, the value, what was expected or what to do.


def dense(**changes):
    """flash_attn_func on good tensors but for `changes`, each a function of the good tensor or a plain value."""

    def call(device):
        q, k, v = qkv(device)
        tensors = {"q": q, "k": k, "v": v}
        arguments = {name: change(tensors[name]) if name in tensors else change for name, change in changes.items()}
        return flash_attn_func(**(tensors | arguments))

    return call


def packed(cu_seqlens_q=(0, 5, 10), cu_seqlens_k=(0, 5, 10), dtype=torch.int32, prepare=lambda x: x, bounds=(5, 5), **options):
    def call(device):
        q, k, v = (x.flatten(0, 1) for x in qkv(device))
        cu_seqlens = [prepare(torch.tensor(c, dtype=dtype, device=device)) for c in (cu_seqlens_q, cu_seqlens_k)]
        return flash_attn_varlen_func(q, k, v, *cu_seqlens, *bounds, **options)

    return call


def packed_but(changed, change):
    """flash_attn_varlen_func on good tensors but for one."""

    def call(device):
        cu_seqlens = torch.tensor((0, 5, 10), dtype=torch.int32, device=device)
        q, k, v = (x.flatten(0, 1) for x in qkv(device))
        arguments = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens.clone()}
        return flash_attn_varlen_func(**arguments | {changed: change(arguments[changed])}, max_seqlen_q=5, max_seqlen_k=5)

    return call


def ranges_but(change):
    """flash_attn_ranges_func on good tensors but for ranges_k."""
    return lambda device: flash_attn_ranges_func(*qkv(device), None, change(torch.tensor(ALL, dtype=torch.int32, device=device)))


def ranges(ranges_q=None, ranges_k=None, key_mask=None, dtype=torch.int32, moved=True):
    def call(device):
        given = [None if r is None else torch.tensor(r, dtype=dtype, device=device) for r in (ranges_q, ranges_k)]
        return flash_attn_ranges_func(*qkv(device), *given, key_mask.to(device) if moved and key_mask is not None else key_mask)

    return call


ALL = [[0, 0], [5, 5]]
WRONG = {
    "dtype": (dense(q=lambda x: x.int(), k=lambda x: x.int(), v=lambda x: x.int()), "q, k, v", "int32", "bfloat16", "cast the tensors"),
    "mixed dtypes": (dense(q=lambda x: x.float()), "q, k, v", "float32", "bfloat16", "cast"),
    "3-D": (dense(q=lambda x: x[0], k=lambda x: x[0], v=lambda x: x[0]), "4 dimensions", "[5, 4, 16]", "flash_attn_varlen_func"),
    "3-D q": (dense(q=lambda x: x[0]), "4 dimensions", "[5, 4, 16], [2, 5, 2, 16]"),
    "3-D k": (dense(k=lambda x: x[0]), "4 dimensions", "[2, 5, 4, 16], [5, 2, 16]"),
    "3-D v": (dense(v=lambda x: x[0]), "4 dimensions", "[2, 5, 2, 16], [5, 2, 16]"),
    "no k": (dense(k=lambda x: None), "k must be a torch.Tensor", "NoneType"),
    "batch": (dense(k=lambda x: x[:1], v=lambda x: x[:1]), "batch", "2, 1, 1"),
    "heads": (dense(k=lambda x: x[:, :, [0, 0, 0]], v=lambda x: x[:, :, [0, 0, 0]]), "heads", "multiple", "4 and 3"),
    "no heads": (dense(k=lambda x: x[:, :, :0], v=lambda x: x[:, :, :0]), "heads", "4 and 0"),
    "keys and values": (dense(v=lambda x: x[:, :3]), "k and v", "[2, 5, 2, 16]", "[2, 3, 2, 16]"),
    "head dims": (dense(k=lambda x: x[..., :8]), "q and k", "head dim", "16 and 8"),
    "wide head": (
        dense(**dict.fromkeys("qkv", lambda x: x.repeat(1, 1, 1, 33))),
        "head_dim",
        "512",
        "528",
        "sdpa",
    ),
    "wide value head": (dense(v=lambda x: x.repeat(1, 1, 1, 33)), "head_dim", "512", "528", "sdpa"),
    "dropout": (dense(dropout_p=1.0), "dropout_p", "below 1", "1.0"),
    "negative dropout": (dense(dropout_p=-0.1), "dropout_p", "at least 0", "-0.1"),
    "window": (dense(window_size=(-2, 0)), "window_size", "-1 for unlimited", "(-2, 0)"),
    "no dropout": (dense(dropout_p=None), "dropout_p", "a number", "None"),
    "one window": (dense(window_size=5), "window_size", "(left, right)", "5"),
    "window of None": (dense(window_size=(None, None)), "window_size", "-1 for unlimited", "(None, None)"),
    "scale": (dense(softmax_scale=math.nan), "softmax_scale", "finite", "nan"),
    "scale of numpy": (dense(softmax_scale=np.float32(math.inf)), "softmax_scale", "finite", "inf"),
    "scale beyond float32": (dense(softmax_scale=1e39), "softmax_scale", "finite", "1e+39"),
    "scale with a gradient": (dense(softmax_scale=torch.ones((), requires_grad=True)), "softmax_scale", "detach"),
    "scale in words": (dense(softmax_scale="x"), "softmax_scale", "one finite number", "'x'"),
    "scales": (dense(softmax_scale=torch.ones(4)), "softmax_scale", "one finite number", "1., 1."),
    "causal in words": (dense(causal="no"), "causal", "True or False", "'no'"),
    "causal for each": (dense(causal=torch.tensor([True, False])), "causal", "True or False", "tensor("),
    "deterministic in words": (dense(deterministic="no"), "deterministic", "True or False", "'no'"),
    "deterministic for each": (dense(deterministic=torch.tensor([True, False])), "deterministic", "True or False", "tensor("),
    "jagged": (
        dense(**dict.fromkeys("qkv", lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged))),
        "q must be a dense tensor",
        "flash_attn_varlen_func",
    ),
    "nested": (
        dense(v=lambda x: torch.nested.nested_tensor(list(x))),
        "v must be a dense tensor",
        "a nested one",
        "flash_attn_varlen_func",
    ),
    "sparse": (dense(q=lambda x: x.to_sparse()), "q must be a dense tensor", "torch.sparse_coo", "to_dense()"),
    "no q": (dense(q=lambda x: None), "q must be a torch.Tensor", "NoneType"),
    "array": (dense(v=lambda x: x.float().cpu().numpy()), "v must be a torch.Tensor", "ndarray"),
    "list of cu_seqlens": (packed(prepare=torch.Tensor.tolist), "cu_seqlens_q must be a torch.Tensor", "list"),
    "list of ranges": (lambda device: flash_attn_ranges_func(*qkv(device), None, ALL), "ranges_k must be a torch.Tensor", "list"),
    "list as mask": (ranges(None, [*ALL, [1, 1]], [[1] * 5] * 2, moved=False), "key_mask must be a torch.Tensor", "list"),
    "no value head dim": (dense(v=lambda x: x[..., :0]), "head dim", "at least 1", "16 of q and k, 0 of v"),
    "no query and key head dim": (dense(q=lambda x: x[..., :0], k=lambda x: x[..., :0]), "head dim", "at least 1", "0 of q and k, 16 of v"),
    "head dim 0": (dense(**dict.fromkeys("qkv", lambda x: x[..., :0])), "head dim", "at least 1", "0"),
    "no bound": (packed(bounds=(None, None)), "max_seqlen_q", "upper bound", "None"),
    "one bound": (packed(bounds=(5, None)), "max_seqlen_k", "upper bound", "None"),
    "fractional bound": (packed(bounds=(5.0, 5)), "max_seqlen_q", "integer", "5.0"),
    "fractional tensor": (packed(bounds=(torch.tensor(3.7), 5)), "max_seqlen_q", "integer", "3.7"),
    "bound beyond 32 bits": (packed(bounds=(2**31, 5)), "max_seqlen_q", "at most 2147483647", "2147483648"),
    "negative bound": (packed(bounds=(-1, 5)), "max_seqlen_q", "-1"),
    "negative softcap": (dense(softcap=-1.0), "softcap", "at least 0", "-1.0"),
    "softcap beyond float32": (dense(softcap=1e39), "softcap", "finite", "1e+39"),
    "infinite softcap": (dense(softcap=math.inf), "softcap", "finite", "inf"),
    "softcap in words": (dense(softcap="x"), "softcap", "number", "'x'"),
    "sinks": (dense(s_aux=torch.zeros(2)), "s_aux", "[4]", "each query head", "float32 [2]"),
    "whole sinks": (dense(s_aux=torch.zeros(4, dtype=torch.int32)), "s_aux", "floating-point", "int32 [4]"),
    "list of sinks": (dense(s_aux=[0.0] * 4), "s_aux", "tensor", "list"),
    "sinks elsewhere": (dense(s_aux=torch.zeros(4, device="meta")), "s_aux", "as q is", "meta"),
    "alibi": (dense(alibi_slopes=torch.ones(4)), "alibi_slopes", "eager"),
    "4-D packed": (
        lambda device: flash_attn_varlen_func(*qkv(device), *[torch.tensor([0, 5], dtype=torch.int32, device=device)] * 2, 5, 5),
        "3 dimensions",
        "[2, 5, 4, 16]",
        "flash_attn_func",
    ),
    **{
        f"packed {name} of another form": (packed_but(name, lambda x: x.unsqueeze(0)), "q, k, v must have 3 dimensions", "flash_attn_func")
        for name in ("q", "k", "v")
    },
    **{
        f"list of packed {name}": (packed_but(name, torch.Tensor.tolist), f"{name} must be a torch.Tensor", "list")
        for name in ("q", "k", "v", "cu_seqlens_k")
    },
    "cu_seqlens elsewhere": (packed_but("cu_seqlens_k", lambda x: x.to("meta")), "cu_seqlens_k", "contiguous and on", "meta"),
    "2-D cu_seqlens": (packed(prepare=lambda x: x[:, None]), "cu_seqlens_q", "[batch + 1]", "[3, 1]"),
    "ranges elsewhere": (ranges_but(lambda x: x.to("meta")), "ranges_k", "contiguous and on", "meta"),
    "ranges with gaps": (ranges_but(lambda x: x.repeat_interleave(2, 1)[:, ::2]), "ranges_k", "contiguous and on", "[4, 2]"),
    "3-D ranges": (ranges_but(lambda x: x[..., None]), "ranges_k", "int32", "[2, 2, 1]"),
    "mask strides": (ranges(None, [*ALL, [1, 1]], torch.ones(5, 2).bool().t()), "key_mask", "last stride 1", "[1, 2]"),
    "cu_seqlens dtype": (packed(dtype=torch.int64), "cu_seqlens_q", "int32", "int64", "cumsum"),
    "cu_seqlens shape": (packed(cu_seqlens_q=(0,)), "cu_seqlens_q", "[batch + 1]", "[1]"),
    "cu_seqlens strides": (packed((0, 9, 5, 9, 10), (0, 9, 5, 9, 10), prepare=lambda x: x[::2]), "cu_seqlens_q", "contiguous", "[2]"),
    "cu_seqlens count": (packed(cu_seqlens_k=(0, 10)), "cu_seqlens_q and cu_seqlens_k", "2 and 1"),
    "block table": (packed(block_table=torch.zeros(1, 1)), "block_table", "flash_attn_with_kvcache"),
    "ranges dtype": (ranges(ALL, ALL, dtype=torch.int64), "ranges_q", "int32", "[2, 2]", "int64"),
    "ranges shape": (ranges(None, [[0], [5]]), "ranges_k", "[2, 2] or [3, 2]", "[2, 1]"),
    "mask without ranges": (ranges(key_mask=torch.ones(2, 5).bool()), "key_mask", "ranges_k", "padded_batch"),
    "mask without its row": (ranges(None, ALL, torch.ones(2, 5).bool()), "ranges_k", "[3, 2]", "[2, 2]"),
    "mask shape": (ranges(None, [*ALL, [1, 1]], torch.ones(2, 4).bool()), "key_mask", "[2, 5]", "[2, 4]"),
    "mask device": (ranges(None, [*ALL, [1, 1]], torch.ones(2, 5, device="meta").bool(), moved=False), "key_mask", "as q is", "meta"),
    "mask dtype": (ranges(None, [*ALL, [1, 1]], torch.ones(2, 5)), "key_mask", "bool or uint8", "float32"),
}
# What is checked on the CPU only, where looking at values costs no synchronisation.
WRONG_VALUES = {
    "cu_seqlens falls": (packed(cu_seqlens_q=(0, 7, 5)), "cu_seqlens_q", "rise", "[0, 7, 5]"),
    "cu_seqlens beyond": (packed(cu_seqlens_k=(0, 5, 11)), "cu_seqlens_k", "10 tokens", "[0, 5, 11]"),
    "bound below a length": (packed(bounds=(5, 4)), "max_seqlen_k", "longest sequence, 5", "4"),
    "range beyond": (ranges(ALL, [[0, 1], [5, 5]]), "ranges_k", "5 given", "(1, 5)"),
    "range below": (ranges([[-1, 0], [5, 5]], ALL), "ranges_q", "(-1, 5)"),
    "range of less than none": (ranges([[0, 0], [5, -1]], ALL), "ranges_q", "(0, -1)"),
    "scale in a tensor": (dense(softmax_scale=torch.tensor(math.nan)), "softmax_scale", "finite", "nan"),
    "cu_seqlens below": (packed(cu_seqlens_k=(-1, 5, 10)), "cu_seqlens_k", "from 0", "[-1, 5, 10]"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_named_where_calls_are_looked_up(monkeypatch):
    """By what it has no sizes for."""
    monkeypatch.setattr(functional, "_on_gpu", lambda x: True)
    q, k, v = qkv(torch.device("cpu"))
    with pytest.raises(ValueError, match="k must be a dense tensor, got a nested one .* use flash_attn_varlen_func"):
        flash_attn_func(q, torch.nested.nested_tensor(list(k)), v)


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_value_expectation_and_remedy(name, device):
    call, *words = WRONG[name]
    check_error(call, words, device)


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_errors_about_values(name):
    call, *words = WRONG_VALUES[name]
    check_error(call, words, torch.device("cpu"))


def check_error(call, words, device):
    with pytest.raises(ValueError) as error:
        call(device)
    missing = [word for word in words if not re.search(re.escape(word), str(error.value))]
    assert not missing, f"{error.value!s} does not say {missing}"
    q, k, v = (x.requires_grad_() for x in qkv(device))
    out = flash_attn_func(q, k, v)
    out.backward(torch.ones_like(out))  # the next correct call works
    assert out.isfinite().all() and q.grad.isfinite().all()


def test_tensors_on_two_devices(device):
    q, k, v = qkv(device)
    with pytest.raises(ValueError, match="q, k, v must be on one device"):
        flash_attn_func(q, k.to("meta"), v)


def test_a_device_without_backend():
    with pytest.raises(ValueError, match="cuda or cpu, got meta.*sdpa"):
        flash_attn_func(*(x.to("meta") for x in qkv("cpu")))


def test_a_missing_library_is_named_with_its_remedy(monkeypatch, tmp_path):
    """What a CUDA tensor meets when the kernels are not built: an error, never another backend."""
    monkeypatch.setenv("HF_FLASH2_LIBRARY", str(tmp_path / "nowhere.so"))
    native.library.cache_clear()
    native.check_device.cache_clear()
    try:
        with pytest.raises(native.NotAvailableError, match="nowhere.so does not exist.*hf-flash2 build"):
            native.library()
        (tmp_path / "nowhere.so").write_text("no library")
        with pytest.raises(native.NotAvailableError, match="cannot be loaded.*hf-flash2 build"):
            native.library()
        assert "cannot be loaded" in native.reason_unavailable()
    finally:
        native.library.cache_clear()
        native.check_device.cache_clear()


def test_an_unknown_family_is_refused(monkeypatch):
    monkeypatch.setenv("HF_FLASH2_FAMILY", "sm42")
    with pytest.raises(ValueError, match="HF_FLASH2_FAMILY must be one of auto, sm80, sm90, got 'sm42'"):
        native.forced_family()


def test_the_module_documents_every_shared_argument():
    for name in TAIL:
        assert name in functional.__doc__ or name == "window_size", name


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_lengths_that_a_graph_makes_itself(backend, device):
    """The longest from cu_seqlens, and these from where documents begin: numbers that nobody knows while compiling."""
    q, k, v = (x.flatten(0, 1).requires_grad_() for x in qkv(device))
    starts = torch.zeros(len(q), dtype=torch.bool, device=device)
    starts[[0, 3, 4]] = True

    def attention(q, k, v, starts):
        cu_seqlens = torch.nn.functional.pad(starts.nonzero().flatten(), (0, 1), value=len(q)).to(torch.int32)
        longest = int(cu_seqlens.diff().max())
        return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True)

    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        out, expected = torch.compile(attention, backend=backend, fullgraph=True)(q, k, v, starts), attention(q, k, v, starts)
    assert torch.equal(out, expected)
    for x, y in zip(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("dynamic", ["bound", "cu_seqlens", "tokens"])
def test_lengths_are_exported(dynamic, strict, device):
    """A bound as an input, one of the tokens there are, and more sequences than in the example."""
    dim = torch.export.Dim

    class Attention(torch.nn.Module):
        def forward(self, q, k, v, cu_seqlens, bound):
            bound = q.shape[0] if dynamic == "tokens" else bound
            return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, bound, bound, causal=True)

    q, k, v = (x.flatten(0, 1) for x in qkv(device))
    cu_seqlens = torch.tensor([0, 3, 5, len(q)], dtype=torch.int32, device=device)
    tokens, batch = (
        ({0: dim("tokens", min=4)} if dynamic == "tokens" else None),
        ({0: dim("batch", min=3)} if dynamic == "cu_seqlens" else None),
    )
    shapes = {"q": tokens, "k": tokens, "v": tokens, "cu_seqlens": batch, "bound": dim.DYNAMIC if dynamic == "bound" else None}
    exported = torch.export.export(Attention(), (q, k, v, cu_seqlens, 9), dynamic_shapes=shapes, strict=strict).module()
    assert torch.equal(exported(q, k, v, cu_seqlens, 9), Attention()(q, k, v, cu_seqlens, 9))


def test_a_tangent_of_the_scale_is_refused(device):
    q, k, v = qkv(device)
    scale = torch.tensor(0.3, device=device)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match="softmax_scale gets no gradient"):
        flash_attn_func(q, k, v, softmax_scale=torch.autograd.forward_ad.make_dual(scale, scale))


def test_a_scale_in_a_tensor_is_read_while_compiling(device):
    q, k, v = qkv(device)
    scale = torch.tensor(0.3, device=device)
    torch.compiler.reset()
    compiled = torch.compile(lambda q, k, v, scale: flash_attn_func(q, k, v, softmax_scale=scale), backend="eager")
    assert torch.equal(compiled(q, k, v, scale), flash_attn_func(q, k, v, softmax_scale=scale.item()))

"""ops.py: the torch.library contract, torch.compile, checkpointing, refusals of autograd, and what a call costs the host."""

import contextlib
import os
import sys
import time
import warnings
from collections import Counter
from functools import partial

import pytest
import stand_in
import torch
from cases import Case, Sample
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hf_flash2 import (
    flash_attn_func,
    flash_attn_ranges_func,
    flash_attn_varlen_func,
    functional,
    kernels,
    last_backend,
    native,
    ops,
    packing,
    reference,
)

pytestmark = pytest.mark.timeout(120)

DTYPE = torch.bfloat16  # what CPU and GPU both take; lse is float32 beside it
FORMS = [
    Case("ops", head_dim=16, lengths_q=(7, 7), causal=True),
    Case("ops", head_dim=16, lengths_q=(3, 7), form="packed", causal=True),
    Case("ops", head_dim=16, lengths_q=(3, 7), form="ranges", padding="left", causal=True),
    Case("ops", head_dim=16, lengths_q=(6, 7), form="ranges", padding="holes", causal=True),
    Case("ops", head_dim=16, lengths_q=(7, 7), dropout_p=0.2),
    Case("ops", head_dim=24, head_dim_v=16, lengths_q=(7, 7), causal=True),
    Case("ops", head_dim=16, head_dim_v=24, lengths_q=(3, 7), form="packed"),
    Case("ops", head_dim=16, head_dim_v=8, lengths_q=(3, 7), form="ranges", padding="left"),
    Case("ops", head_dim=16, lengths_q=(3, 7), form="packed", causal=True, sinks=2.0),
    Case("ops", head_dim=16, lengths_q=(7, 7), causal=True, softcap=2.0),
]
forms = pytest.mark.parametrize("case", FORMS, ids=lambda case: case.id)


@pytest.fixture
def op_calls(monkeypatch):
    """The arguments of each op call, as functional.py makes them where it has no plan."""
    calls = []
    forward = ops.forward
    monkeypatch.setattr(ops, "forward", lambda *args: calls.append(args) or forward(*args))
    monkeypatch.setattr(functional, "_on_gpu", lambda x: False)
    return calls


@forms
def test_opcheck_of_forward(case, device, op_calls):
    sample = Sample(case, DTYPE, device)
    sample.call(*(x.detach().nan_to_num().requires_grad_() for x in sample.inputs()[:3]))
    torch.library.opcheck(torch.ops.hf_flash2.flash_attn_forward.default, op_calls[0])


@forms
def test_opcheck_of_backward(case, device, op_calls):
    sample = Sample(case, DTYPE, device)
    out, lse = sample.call(*(x.detach().nan_to_num() for x in sample.inputs()[:3]))
    dlse = torch.randn_like(lse)
    arguments = op_calls[0]
    for given in (None, dlse):
        of_backward = torch.randn_like(out), given, *arguments[:3], out, lse, *arguments[3:]
        torch.library.opcheck(ops.backward, of_backward)
    dsinks = ops.backward(*of_backward)[3]
    assert (dsinks.dtype, dsinks.shape) == (torch.float32, (case.heads[0],) if case.sinks else (0,))


def padded_attention(q, k, v, mask):
    """What a model's layers do with a padded batch, the ranges included."""
    batch = packing.padded_batch(mask, q.shape[1], same_tokens=True)
    return flash_attn_ranges_func(q, k, v, batch.ranges_q, batch.ranges_k, batch.key_mask, causal=True)


def unpadded_attention(q, k, v, mask):
    return flash_attn_func(q, k, v, causal=True)


def packed_attention(q, k, v, mask):
    tokens = [x.flatten(0, 1) for x in (q, k, v)]
    cu_seqlens = torch.arange(0, (q.shape[0] + 1) * q.shape[1], q.shape[1], dtype=torch.int32, device=q.device)
    return flash_attn_varlen_func(*tokens, cu_seqlens, cu_seqlens, q.shape[1], q.shape[1], causal=True).view_as(q)


def dropped_attention(q, k, v, mask):
    return flash_attn_func(q, k, v, dropout_p=0.3)


def wide_attention(q, k, v, mask):
    """Head dims that have to be zero-padded, another one for v, and lse as a result."""
    out, lse, _ = flash_attn_func(q[..., :13], k[..., :13], v[..., :7], return_attn_probs=True)
    return out * lse.transpose(1, 2).unsqueeze(-1).to(out.dtype)


def sink_attention(q, k, v, mask):
    """Sinks that have a gradient, and hand it on to q."""
    return flash_attn_func(q, k, v, causal=True, s_aux=q.mean((0, 1, 3)))


attentions = pytest.mark.parametrize(
    "attention",
    (padded_attention, unpadded_attention, packed_attention, dropped_attention, wide_attention, sink_attention),
    ids=lambda f: f.__name__,
)


def problem(device, batch=2, seqlen=9):
    q, k, v = (torch.randn(batch, seqlen, heads, 16, device=device, dtype=DTYPE, requires_grad=True) for heads in (4, 2, 2))
    mask = torch.arange(seqlen, device=device) >= torch.tensor([[3], [0]] * (batch // 2), device=device)
    return q, k, v, mask


def run(attention, q, k, v, mask):
    """out, dq, dk, dv, from a fixed seed"""
    torch.manual_seed(4)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, mask)
    out.backward(torch.ones_like(out))
    return out.detach(), *(x.grad for x in leaves)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@attentions
def test_compiles_without_graph_break(attention, device, fresh_compiler):
    """fullgraph=True raises on any break; outputs and gradients are those of eager mode."""
    arguments = problem(device)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(run(compiled, *arguments), run(attention, *arguments), strict=True):
        torch.testing.assert_close(actual, expected)


@attentions
def test_lengths_may_change_without_recompiling(attention, device, fresh_compiler):
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, seqlen in ((6, 9), (6, 17), (8, 33)):  # no size equal to another: the compiler would take that for a rule
        arguments = problem(device, batch, seqlen)
        for actual, expected in zip(run(compiled, *arguments), run(attention, *arguments), strict=True):
            torch.testing.assert_close(actual, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@attentions
@pytest.mark.parametrize("use_reentrant", (True, False))
def test_checkpointing_gives_the_same_gradients(attention, use_reentrant, device):
    *tensors, mask = problem(device)

    def checkpointed(q, k, v, mask):
        return checkpoint(attention, q, k, v, mask, use_reentrant=use_reentrant)

    for actual, expected in zip(run(checkpointed, *tensors, mask), run(attention, *tensors, mask), strict=True):
        torch.testing.assert_close(actual, expected)


def test_second_derivatives_are_refused(device):
    q, k, v, mask = problem(device)
    (dq,) = torch.autograd.grad(unpadded_attention(q, k, v, mask).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative.*eager"):
        dq.sum().backward()


def test_only_the_lse_may_be_used(device):
    """The gradient of lse alone is that of softmax: rows of dq are the mean of keys under the probabilities."""
    q, k, v, _ = problem(device)
    _, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    keys_as_values = flash_attn_func(q, k, k)
    torch.testing.assert_close(dq, keys_as_values * 16**-0.5, atol=1e-2 if torch.bfloat16 == DTYPE else 1e-6, rtol=0)
    assert dk.isfinite().all() and not dv.any()


def test_an_unused_lse_costs_no_gradient(device, monkeypatch):
    """The backward is told that there is none, in place of a tensor of zeros to read."""
    given = []
    for place, name in ((reference, "attention_backward"), (kernels.Layout, "backward")):
        backward = getattr(place, name)

        def spy(*args, backward=backward, dlse=1 if place is reference else 2):
            given.append(args[dlse])
            return backward(*args)

        monkeypatch.setattr(place, name, spy)
    q, k, v, _ = problem(device)
    flash_attn_func(q, k, v).sum().backward()
    flash_attn_func(q, k, v, return_attn_probs=True)[0].sum().backward()
    assert given == [None, None]


def test_forward_mode_differentiation_is_refused(device):
    """On every way to the kernels: a tangent that is lost would be a derivative of zero."""
    q, k, v, _ = problem(device)
    with forward_ad.dual_level():
        q = forward_ad.make_dual(q.detach(), torch.ones_like(q))
        assert not ops.plain(q, k, v)
        for context in (contextlib.nullcontext(), torch.no_grad()):  # which does not end it
            with context, pytest.raises(NotImplementedError, match="no forward-mode derivative.*eager"):
                flash_attn_func(q, k, v)
    assert ops.plain(*(x.detach() for x in (k, k, v)))


def test_a_tangent_of_the_gradient_is_refused(device):
    """One that comes from behind attention, which is not there in its forward."""
    q, k, v, _ = problem(device)
    behind = torch.randn(q.shape[-1], q.shape[-1], device=device, dtype=q.dtype)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative.*eager"):
        out = flash_attn_func(q, k, v) @ forward_ad.make_dual(behind, behind)
        torch.autograd.grad(out.sum(), q)
    out = flash_attn_func(q, k, v)  # planned, on a GPU
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative.*eager"):
        torch.autograd.grad(out, q, forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))

    def gradient(behind):
        return torch.func.grad(lambda q: (flash_attn_func(q, k.detach(), v.detach()) @ behind).sum())(q.detach())

    with pytest.raises(NotImplementedError, match="no forward-mode derivative.*eager"):
        torch.func.jvp(gradient, (behind,), (behind,))


def test_functionalized(device):
    q, k, v, _ = problem(device)
    assert torch.equal(torch.func.functionalize(flash_attn_func)(q, k, v), flash_attn_func(q, k, v))

    def total(q):
        return torch.func.functionalize(flash_attn_func)(q, k.detach(), v.detach()).sum()

    expected = torch.autograd.grad(flash_attn_func(q, k, v).sum(), q)[0]
    assert torch.equal(torch.func.grad(total)(q.detach()), expected)


def test_transforms_of_functions(device):
    """torch.func: gradients of a function, of each sample for one; what there is no derivative for is refused there, too."""
    q, k, v = (torch.randn(3, 2, 5, 2, 16, device=device, dtype=DTYPE) for _ in range(3))

    def loss(q, k, v):
        out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        return (out.float() ** 2).sum() + lse.sum()

    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(sum(loss(*sample) for sample in zip(*leaves, strict=True)), leaves)
    of_each = torch.func.grad(loss, argnums=(0, 1, 2))
    one_by_one = [torch.stack(x) for x in zip(*(of_each(*sample) for sample in zip(q, k, v, strict=True)), strict=True)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")  # the dispatcher runs the op for each sample
        at_once = torch.func.vmap(of_each)(q, k, v)
    for found in (one_by_one, at_once):
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    with pytest.raises(NotImplementedError, match="no second derivative.*eager"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q, k[0], v[0]).sum())(q[0])
    with torch.no_grad(), pytest.raises(NotImplementedError, match="no forward-mode derivative.*eager"):
        torch.func.jvp(lambda q: loss(q, k[0], v[0]), (q[0],), (q[0],))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("each", [False, True])
def test_compiled_transforms_of_functions(each, backend, device):
    q, k, v = (torch.randn(3, 2, 5, 2, 16, device=device, dtype=DTYPE) for _ in range(3))
    sinks = torch.randn(3, 2, device=device)

    def loss(q, k, v, sinks):
        out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True, s_aux=sinks)
        return (out.float() ** 2).sum() + lse.sum()

    gradients = torch.func.grad(loss, argnums=(0, 1, 2, 3))
    run, inputs = (torch.func.vmap(gradients), (q, k, v, sinks)) if each else (gradients, (q[0], k[0], v[0], sinks[0]))
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        found, expected = torch.compile(run, backend=backend, fullgraph=True)(*inputs), run(*inputs)
    for x, y in zip(found, expected, strict=True):
        assert y.any()
        torch.testing.assert_close(x, y)


def test_transforms_of_functions_of_sinks(device):
    q, k, v = (x.detach() for x in problem(device)[:3])
    sinks = torch.randn(4, device=device, requires_grad=True)

    def loss(sinks):
        return (flash_attn_func(q, k, v, causal=True, s_aux=sinks).float() ** 2).sum()

    (expected,) = torch.autograd.grad(loss(sinks), sinks)
    assert expected.any() and torch.equal(torch.func.grad(loss)(sinks.detach()), expected)


class Dropped(torch.autograd.Function):
    """x, without a gradient, which is not the same as one of zeros."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


def test_results_without_a_gradient_hand_none_on(device):
    q, k, v, _ = problem(device)
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    (Dropped.apply(out).sum() + Dropped.apply(lse).sum()).backward()
    assert q.grad is k.grad is v.grad is None


def test_dispatch_modes_see_the_op_and_plain_calls_go_straight(device):
    """What watches operators (FLOP counters, selective checkpointing, fake tensors) must not be passed by."""
    q, k, v, _ = problem(device)
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    expected = flash_attn_func(q, k, v)
    with Watch():
        out = flash_attn_func(q, k, v)
        out.sum().backward()
    assert torch.equal(out, expected)
    assert {ops.forward, ops.backward} <= set(seen)
    real = [x.detach() for x in (q, k, v)]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in real]
        assert flash_attn_func(*fakes).shape == q.shape


def test_selective_checkpointing_keeps_what_attention_returned(device):
    """Policies know attention by its name, as TRL's does: then its forward does not run again in the backward."""
    q, k, v, _ = problem(device)
    runs = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            runs[func] += 1
            return func(*args, **(kwargs or {}))

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if "flash_attn" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    def gradient(**options):
        runs.clear()
        with Count():
            out = checkpoint(lambda q: flash_attn_func(q, k, v).sin(), q, use_reentrant=False, **options)
            return torch.autograd.grad(out.sum(), q)[0], runs[ops.forward]

    expected, twice = gradient()
    found, once = gradient(context_fn=partial(create_selective_checkpoint_contexts, policy))
    assert (twice, once) == (2, 1) and torch.equal(found, expected)


def test_tensors_that_need_no_gradient_get_none(device):
    q, k, v, _ = problem(device)
    out = flash_attn_func(q.detach(), k, v.detach())
    out.sum().backward()
    assert q.grad is None and v.grad is None and k.grad is not None
    assert not flash_attn_func(q.detach(), k.detach(), v.detach()).requires_grad
    with torch.no_grad():
        assert not flash_attn_func(q, k, v).requires_grad


def test_inputs_changed_in_place_are_noticed(device):
    q, k, v, _ = problem(device)
    value = v * 1
    out = flash_attn_func(q, k, value)
    value.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_backend_is_named(device):
    q, k, v, _ = problem(device)
    flash_attn_func(q, k, v)
    assert last_backend() == "cpu-reference" if device.type == "cpu" else last_backend().startswith("cuda-sm")


class PackedCalls(list):
    """The params of each forward, but for addresses, and what it took to pack them."""

    def __init__(self):
        super().__init__()
        self.work = Counter()

    def new_work(self) -> dict[str, int]:
        """Layouts made, sizes of workspaces asked for, and forwards refused for want of one, since the last time."""
        work, self.work = self.work, Counter()
        return work


@pytest.fixture
def packed_calls(monkeypatch) -> PackedCalls:
    """Calls through the dispatcher run on CPU tensors, into a stand-in for the library that needs a workspace for every forward."""
    library = stand_in.Library().install(monkeypatch)
    params_type, run, calls = stand_in.structs()["HfFlash2ForwardParams"], library.hf_flash2_forward, PackedCalls()

    def counted(what, function):
        def call(*args):
            calls.work[what] += 1
            return function(*args)

        return call

    def forward(params: bytes, addresses: bytes) -> int:
        if params_type.from_buffer_copy(params).workspace_bytes:
            calls.append(params)
            return run(params, addresses)
        calls.work["refusals"] += 1
        return library._fail("workspace_bytes", native.NEEDS_WORKSPACE)

    monkeypatch.setattr(library, "hf_flash2_forward", forward)
    for name in ("hf_flash2_forward_workspace_bytes", "hf_flash2_backward_workspace_bytes"):
        monkeypatch.setattr(library, name, counted("sizes", getattr(library, name)))
    monkeypatch.setattr(kernels, "Layout", counted("layouts", kernels.Layout))
    monkeypatch.setattr(ops, "_DISPATCHED", (ops._forward_cuda, ops._backward_cuda))
    monkeypatch.setattr(functional, "_on_gpu", lambda x: False)  # nothing is planned by functional.py
    return calls


@forms
def test_dispatched_calls_of_one_layout_are_packed_once(case, packed_calls):
    """Forward and backward together; and what the library is given is what it is given by a layout made anew."""

    def call():
        sample = Sample(case, DTYPE, "cpu")
        inputs = [x.requires_grad_() for x in sample.inputs()[:3]]
        out, _ = sample.call(*inputs)
        torch.autograd.grad(out, inputs, torch.randn_like(out))

    call()
    assert packed_calls.new_work() == {"layouts": 1, "refusals": 1, "sizes": 2}
    call()
    assert not packed_calls.new_work()
    ops.plans.clear()
    call()
    assert packed_calls.new_work()["layouts"] == 1
    assert len(packed_calls) == 3 and len(set(packed_calls)) == 1


def op_arguments(**changes) -> dict:
    """Of the forward op, by name."""
    q, k, v = (torch.randn(2, tokens, heads, 64).to(DTYPE) for tokens, heads in ((5, 4), (6, 2), (6, 2)))
    sequences = dict.fromkeys(("seqlens_q", "seqlens_k", "key_mask", "rng_state", "sinks"))
    numbers = {
        "max_seqlen_q": 5, "max_seqlen_k": 6, "softmax_scale": 0.125, "window_left": -1, "window_right": -1, "dropout_p": 0.0,
        "softcap": 0.0, "deterministic": False,
    }  # fmt: skip
    arguments = {"q": q, "k": k, "v": v, **sequences, **numbers}
    return arguments | {name: change(arguments[name]) if callable(change) else change for name, change in changes.items()}


def strided(x: torch.Tensor) -> torch.Tensor:
    """x, tokens within heads."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


ALL_ROWS, ALL_KEYS = torch.tensor([[0, 0], [5, 5]], dtype=torch.int32), torch.tensor([[0, 0], [6, 6], [1, 1]], dtype=torch.int32)
MASK = torch.ones(2, 16, dtype=torch.uint8)
HOLES = {"seqlens_k": ALL_KEYS, "key_mask": MASK[:, :6]}
PACKED = dict.fromkeys("qkv", lambda x: x.flatten(0, 1))
LENGTHS = [torch.tensor(lengths, dtype=torch.int32) for lengths in ((0, 10), (0, 4, 10))]
OTHER_LAYOUTS = {  # slices have the strides of the whole
    "batch": ({}, dict.fromkeys("qkv", lambda x: x[:1])),
    "queries": ({}, {"q": lambda x: x[:, :4]}),
    "keys": ({}, dict.fromkeys("kv", lambda x: x[:, :5])),
    "query heads": ({}, {"q": lambda x: x[:, :, :2]}),
    "key heads": ({}, dict.fromkeys("kv", lambda x: x[:, :, :1])),
    "head dim": ({}, dict.fromkeys("qk", lambda x: x[..., :32])),
    "head dim of v": ({}, {"v": lambda x: x[..., :32]}),
    "strides of q": ({}, {"q": strided}),
    "strides of k": ({}, {"k": strided}),
    "strides of v": ({}, {"v": strided}),
    "dtype": ({}, dict.fromkeys("qkv", torch.Tensor.half)),
    "ranges of queries": ({}, {"seqlens_q": ALL_ROWS}),
    "ranges of keys": ({}, {"seqlens_k": ALL_KEYS[:2]}),
    "holes": ({"seqlens_k": ALL_KEYS}, HOLES),
    "strides of the mask": (HOLES, {"seqlens_k": ALL_KEYS, "key_mask": MASK[:, :6].clone()}),
    "packed": ({}, PACKED | dict.fromkeys(("seqlens_q", "seqlens_k"), LENGTHS[0])),
    "packed sequences": tuple(PACKED | dict.fromkeys(("seqlens_q", "seqlens_k"), lengths) for lengths in LENGTHS),
    "max_seqlen_q": ({}, {"max_seqlen_q": 4}),
    "max_seqlen_k": ({}, {"max_seqlen_k": 4}),
    "softmax_scale": ({}, {"softmax_scale": 0.25}),
    "window_left": ({}, {"window_left": 3}),
    "window_right": ({}, {"window_right": 0}),
    "softcap": ({}, {"softcap": 30.0}),
    "dropout_p": ({}, {"dropout_p": 0.5, "rng_state": torch.zeros(2, dtype=torch.int64)}),
    "deterministic": ({}, {"deterministic": True}),
}


@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_dispatched_calls_of_another_layout_are_packed_anew(name, packed_calls):
    """Each row: two calls that differ in this. The second gets params of its own, those that it gets when it is the only one."""
    one, other = (op_arguments(**changes).values() for changes in OTHER_LAYOUTS[name])
    ops.forward(*one)
    packed_calls.new_work()
    ops.forward(*other)
    assert packed_calls.new_work() == {"layouts": 1, "refusals": 1, "sizes": 1}
    for arguments in (one, other):
        ops.forward(*arguments)
    assert not packed_calls.new_work()
    ops.plans.clear()
    ops.forward(*other)
    first, second, first_again, second_again, alone = packed_calls
    assert (first, second) == (first_again, second_again) and second == alone


def test_dispatched_calls_keep_apart_what_the_environment_says(packed_calls, monkeypatch):
    arguments = op_arguments().values()
    family = stand_in.structs()["HfFlash2ForwardParams"].family.offset
    for name, layouts in (("auto", 1), ("sm90", 1), ("sm80", 1), ("auto", 0)):
        monkeypatch.setenv("HF_FLASH2_FAMILY", name)
        ops.forward(*arguments)
        assert packed_calls.new_work()["layouts"] == layouts
        assert packed_calls[-1][family : family + 4] == native.FAMILIES[name].to_bytes(4, "little")


def test_dispatched_backwards_are_as_deterministic_as_asked(packed_calls):
    arguments = op_arguments(q=lambda x: x.requires_grad_())
    params_type = stand_in.structs()["HfFlash2BackwardParams"]
    for deterministic in (False, True, False):
        out, _ = ops.forward(*(arguments | {"deterministic": deterministic}).values())
        out.sum().backward()
        assert params_type.from_buffer_copy(native.library().calls[-1]).deterministic == deterministic


def test_calls_on_two_devices_are_kept_apart():
    tensors = [torch.empty(2, 5, 4, 64, dtype=DTYPE) for _ in range(3)]
    assert ops.forms(*tensors, None, None, None) != ops.forms(*(x.to("meta") for x in tensors), None, None, None)


def test_dispatched_calls_do_not_look_at_values(packed_calls):
    """Of lengths and of the dropout's state: they are read by the kernels."""
    for lengths, state in ((ALL_ROWS, 1), (ALL_ROWS - 1, 2)):
        rng_state = torch.full((2,), state, dtype=torch.int64)
        ops.forward(*op_arguments(seqlens_q=lengths, dropout_p=0.5, rng_state=rng_state).values())
    assert packed_calls.new_work()["layouts"] == 1


def test_layouts_of_dispatched_calls_do_not_pile_up(packed_calls, monkeypatch):
    monkeypatch.setattr(ops, "_MAX_PLANS", 3)
    for length in (1, 2, 3, 4):
        ops.forward(*op_arguments(max_seqlen_q=length).values())
        assert 0 < len(ops.plans) <= 3
    assert packed_calls.new_work()["layouts"] == 4


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", (9, 4000))
def test_compiles_into_a_cuda_graph(tokens, device, fresh_compiler):
    """torch.compile records the kernels while the layouts of the calls are made, and finds nothing left in the memory of its graphs."""
    compiled = torch.compile(unpadded_attention, fullgraph=True, mode="reduce-overhead")
    q, _, _, mask = problem(device)
    k, v = (torch.randn(2, tokens, 2, 16, device=device, dtype=DTYPE) for _ in range(2))
    ops.plans.clear()
    for _ in range(4):  # twice to warm up and to record, then replayed
        torch.compiler.cudagraph_mark_step_begin()
        actual = [x.clone() for x in run(compiled, q, k, v, mask)]
        for mine, expected in zip(actual, run(unpadded_attention, q, k, v, mask), strict=True):
            torch.testing.assert_close(mine, expected)


@pytest.fixture
def plain_call(device, monkeypatch):
    """A call that was made before, as in every step of a decoder. Without a GPU its tensors take the CUDA path all the same, into a library
    that launches nothing."""
    q, k, v = (torch.randn(1, 8, 2, 64, device=device, dtype=DTYPE, requires_grad=True) for _ in range(3))
    if device.type == "cpu":
        stand_in.Library().install(monkeypatch)
        monkeypatch.setattr(native.library(), "hf_flash2_forward", lambda params, addresses: 80)
        monkeypatch.setattr(functional, "_on_gpu", lambda x: True)

    def call():
        return flash_attn_func(q, k, v, causal=True)

    call()
    return call


def test_host_work_of_a_call(plain_call):
    """Lookup, autograd, two new tensors and the launch: 36 function calls, torch's and the interpreter's own counted.

    Calls are counted since they are the same on every machine, busy or not; times are in test_host_time_of_a_call.
    """
    calls = Counter()

    def count(frame, event, function):
        if event in ("call", "c_call"):
            calls[frame.f_code.co_name if event == "call" else function.__qualname__] += 1

    sys.setprofile(count)
    try:
        plain_call()
    finally:
        sys.setprofile(None)
    assert calls["flash_attn_func"] == 1
    assert calls.total() <= 45, calls


def host_microseconds(call, calls=200, rounds=20) -> float:
    """The fastest of several rounds, so that a busy machine does not count."""
    call()
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
        torch.cuda.synchronize()
    return best * 1e6


@pytest.mark.gpu
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="other workers share the host: a time means something only alone")
def test_host_time_of_a_call(plain_call, monkeypatch, capsys):
    """18 us beyond the launch on the host of an H200, of which torch takes 13."""
    launches = []
    library = native.library()
    launch = library.hf_flash2_forward
    with monkeypatch.context() as patch:
        patch.setattr(ops, "plans", {})
        patch.setattr(library, "hf_flash2_forward", lambda *structs: launches.append(structs) or launch(*structs))
        plain_call()
    cost_of_launch = host_microseconds(lambda: launch(*launches[0]))
    cost = host_microseconds(plain_call)
    with torch.no_grad():
        cost_without_grad = host_microseconds(plain_call)
    with capsys.disabled():
        print(
            f" host cost of a call: {cost:.1f} us with autograd, {cost_without_grad:.1f} us without; "
            f"{cost_of_launch:.1f} us of it to launch ",
            end="",
        )
    assert cost - cost_of_launch < 25  # for slow machines

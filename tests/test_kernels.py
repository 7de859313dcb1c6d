"""The attention of the device at hand (CUDA kernels on a GPU, the reference backend on a CPU) against the textbook formula.

The rule of the field: measured against float64, the largest error of ours is at most 2 times that of eager PyTorch in the same dtype for
out, and 3 times for dq, dk, dv.
"""

import functools
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import oracle
import pytest
import torch
from cases import CASES, Case, Sample

from hf_flash2 import flash_attn_func, flash_attn_ranges_func, flash_attn_varlen_func, last_backend, native, ops, packing, reference

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).parent.parent

ALLOWED = {"out": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0, "dsinks": 3.0}
# Where eager happens to be exact (a single visible key) ours still rounds the sums it accumulates: that many units in the last place of the
# accumulator, at the size of the terms (`Sample.sum_sizes`), count as equal. float64 is compared with itself, so all it has is this.
FLOOR_ULPS = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 2, torch.float64: 64}
LSE_TOLERANCE = 2e-5  # the same for log-sum-exp, which is float32 whatever the inputs

ON_GPU = torch.cuda.is_available()
DTYPES = (torch.bfloat16, torch.float16) if ON_GPU else (torch.float32, torch.float64, torch.bfloat16)


def problems() -> list[tuple[Case, torch.dtype]]:
    """All of the table on a GPU. On a CPU what is cheap in every dtype, and packed sequences and ranges of one head dim in float64."""
    if ON_GPU:
        return list(itertools.product(CASES, DTYPES))
    cheap = [case for case in CASES if case.scores * case.head_dim < 12e6]
    ragged = [case for case in CASES if case.form != "dense" and case.head_dim == 64 and case.heads == (4, 2) and not case.dropout_p]
    ragged = [case for case in ragged if case not in cheap and case.window in ((-1, -1), (5, 0), (63, 1))]
    return [*itertools.product(cheap, DTYPES), *((case, torch.float64) for case in ragged)]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def compare(actual: dict, truth: dict, eager: dict, dtype: torch.dtype, sum_sizes: dict[str, float]) -> dict[str, float]:
    """Assert the rule of the field for every tensor; returns error of ours / error of eager."""
    ulp = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    assert torch.equal(actual["lse"].isinf(), truth["lse"].isinf()), "rows without keys have lse +inf, others do not"
    assert not (actual["lse"] == -math.inf).any()
    seen = truth["lse"].isfinite()
    if seen.any():
        difference, size = _largest(actual["lse"][seen].double() - truth["lse"][seen]), _largest(truth["lse"][seen])
        assert difference <= LSE_TOLERANCE * max(1.0, size), f"lse is off by {difference:.2e} at values up to {size:.1f}"
    ratios = {}
    for name in truth.keys() - {"lse"}:
        allowed = ALLOWED[name]
        assert actual[name].shape == truth[name].shape
        assert actual[name].dtype == (torch.promote_types(dtype, torch.float32) if name == "dsinks" else dtype)
        assert actual[name].isfinite().all(), f"{name} has {int((~actual[name].isfinite()).sum())} values that are not finite"
        ours = _largest(actual[name].double() - truth[name])
        theirs = _largest(eager[name].double() - truth[name])
        floor = FLOOR_ULPS[dtype] * ulp * sum_sizes[name]
        assert ours <= allowed * theirs + floor, (
            f"{name} is off by {ours:.3e}, eager by {theirs:.3e}: {ours / max(theirs, floor):.2f} times, at most {allowed} are allowed "
            f"(largest value {_largest(truth[name]):.3f})"
        )
        ratios[name] = ours / max(theirs, floor) if ours else 0.0
    return ratios


def _largest(x: torch.Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def assert_ran_on(family: str, backward_families: list[str]) -> None:
    assert last_backend() == {"reference": "cpu-reference", "auto": last_backend()}.get(family, f"cuda-{family}")
    if family in native.FAMILIES and family != "auto":
        assert backward_families == [family]


def peek_rng_state(device: torch.device, seed: int) -> torch.Tensor:
    """The dropout state of the next call after `torch.manual_seed(seed)`; leaves the generator seeded anew."""
    torch.manual_seed(seed)
    rng_state = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)
    torch.manual_seed(seed)
    return rng_state


def kept_by_next_call(sample: Sample) -> torch.Tensor | None:
    """The dropout mask of the next call, for which it seeds the generator, or None where the case has none."""
    return sample.dropout_keep(peek_rng_state(sample.device, seed=7)) if sample.case.dropout_p else None


def admitted(family: str, sample: Sample, monkeypatch) -> str:
    """The family that runs a sample: the forced one, or, after it refused what is beyond it, the one that the library chooses."""
    if family != "sm90" or not sample.case.beyond_hopper:
        return family
    with pytest.raises(native.LibraryError, match="the Hopper family cannot run this"):
        sample.actual()
    monkeypatch.setenv("HF_FLASH2_FAMILY", "auto")
    return "sm80"


@pytest.mark.parametrize(("case", "dtype"), problems(), ids=lambda value: value.id if isinstance(value, Case) else dtype_name(value))
def test_forward_and_backward(case, dtype, family, device, backward_families, record_errors, monkeypatch):
    sample = Sample(case, dtype, device)
    family = admitted(family, sample, monkeypatch)
    keep = kept_by_next_call(sample)
    actual = sample.actual()
    assert_ran_on(family, backward_families)
    record_errors(compare(actual, sample.expected(torch.float64, keep), sample.expected(dtype, keep), dtype, sample.sum_sizes()))


@pytest.mark.parametrize(
    "case",
    [
        Case("dlse", causal=True),
        Case("dlse", head_dim=128, heads=(8, 2), lengths_q=(1, 64, 0, 150), lengths_k=(7, 64, 3, 90), form="packed", causal=True),
        Case("dlse", head_dim=96, lengths_q=(70, 33), form="ranges", padding="holes", window=(20, 5)),
        Case("dlse", head_dim=256, lengths_q=(70, 33), form="ranges", padding="left"),
        Case("dlse", head_dim=512, lengths_q=(70, 33), form="packed", causal=True),
        Case("dlse", head_dim=64, causal=True, dropout_p=0.3),
        Case("dlse", head_dim=192, causal=True, dropout_p=0.3),
    ],
    ids=lambda case: case.id,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_gradient_of_lse(case, dtype, family, device, record_errors):
    sample = Sample(case, dtype, device)
    keep = kept_by_next_call(sample)
    truth, eager = sample.expected(torch.float64, keep, with_dlse=True), sample.expected(dtype, keep, with_dlse=True)
    record_errors(compare(sample.actual(with_dlse=True), truth, eager, dtype, sample.sum_sizes()))


@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_huge_values_stay_finite(head_dim, family, device):
    """Scores of 1e5: the softmax is one-hot, nothing overflows."""
    q, k, v = (torch.randn(2, 130, 4, head_dim, device=device, dtype=torch.bfloat16) * 300 for _ in range(3))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    grads = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    for x in (out, lse, *grads):
        assert x.isfinite().all()


def large_scores(keys: int, size: float, head_dim: int, device) -> tuple[float, torch.Tensor]:
    """For 70 queries whose scores are a number from `size` to 1.6 times that and a normal one: the error of lse, in units of the last place
    of `size`, and out, where v is 1."""
    q = torch.zeros(1, 70, 1, head_dim, device=device, dtype=torch.bfloat16)
    q[..., 0], q[..., 1] = size * (1 + torch.arange(70, device=device)[:, None] / 128), 1
    k = torch.zeros(1, keys, 1, head_dim, device=device, dtype=torch.bfloat16)
    k[..., 0], k[..., 1] = 1, torch.randn(1, keys, 1, device=device)
    out, lse, _ = flash_attn_func(q, k, torch.ones_like(k), softmax_scale=1.0, return_attn_probs=True)
    truth = q[..., 0].double() + k[..., 1].double().logsumexp(1)
    return _largest(lse[:, 0] - truth[..., 0]) / (torch.finfo(torch.float32).eps * size), out


@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_errors_do_not_grow_with_the_number_of_keys(head_dim, family, device):
    """Nothing is added up at every block of keys: a row maximum that does not move rescales by exactly 1."""
    error, out = large_scores(16384, 1024.0, head_dim, device)
    assert error < 3
    assert torch.equal(out, torch.ones_like(out))


def check_nan_spreads(head_dim: int, device) -> None:
    """Of 300 keys, one of the first or of the last is not a number: so is every query that sees it, and no other."""
    for key in (5, 290):
        q, k, v = (torch.randn(1, 300, 2, head_dim, device=device, dtype=torch.bfloat16) for _ in range(3))
        k[:, key, 0, 0] = math.nan
        out = flash_attn_func(q, k, v, causal=True)
        assert out[:, key:, 0].isnan().all()
        assert out[:, :key].isfinite().all() and out[:, :, 1].isfinite().all()


@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_nan_spreads(head_dim, family, device):
    check_nan_spreads(head_dim, device)


def check_one_key_outweighs_all(head_dim: int, device) -> None:
    """Whatever its block, the most probable key has a probability that rounding leaves alone: where others vanish, out is its value."""
    for score, key in itertools.product((40.0, 200.0), (0, 290)):
        q, k = (torch.zeros(1, 300, 2, head_dim, device=device, dtype=torch.bfloat16) for _ in range(2))
        q[..., 0], k[..., 0] = 1, torch.randn(300, 1, device=device)
        k[:, key, :, 0] = score
        # NOTE: no zero, which what the other keys add would change; torch 2.11 has some among 16-bit normal numbers of the CPU.
        v = torch.randint(1, 100, (1, 300, 2, head_dim), device=device).bfloat16()
        out = flash_attn_func(q, k, v, softmax_scale=1.0)
        assert torch.equal(out, v[:, key : key + 1].expand_as(out))


@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_one_key_outweighs_all(head_dim, family, device):
    check_one_key_outweighs_all(head_dim, device)


def check_scores_of_minus_infinity(head_dim: int, device) -> None:
    """As good as masked, also where those of the first key blocks that are computed, which are the last, are nothing else."""
    q, k, v = (torch.randn(1, n, 2, head_dim, device=device, dtype=torch.bfloat16) for n in (70, 400, 400))
    q[..., 0] = 1
    for seen in (350, 130, 1):
        k[:, seen:, :, 0] = -math.inf
        for out, expected in zip(
            flash_attn_func(q, k, v, return_attn_probs=True)[:2],
            flash_attn_func(q, k[:, :seen], v[:, :seen], return_attn_probs=True)[:2],
            strict=True,
        ):
            torch.testing.assert_close(out, expected, atol=0.02, rtol=0.01)


@pytest.mark.parametrize("head_dim", (64, 128, 192, 256, 512))
def test_scores_of_minus_infinity(head_dim, family, device):
    check_scores_of_minus_infinity(head_dim, device)


BEYOND = {(2**31 - 1, 0): (-1, 0), (2**31 - 1, -1): (-1, -1), (-1, 2**31 - 1): (-1, -1), (2**40, 2**31 - 2): (-1, -1), (59, 99): (-1, -1)}


def check_windows_beyond_every_length(lengths: tuple[int, int], device) -> None:
    q, k, v = (torch.randn(1, n, 2, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for n in (lengths[0], *lengths[1:] * 2))
    results = {}
    for window in {*BEYOND, *BEYOND.values()}:
        out = flash_attn_func(q, k, v, window_size=window, deterministic=True)
        results[window] = (out, *torch.autograd.grad(out.float().square().sum(), (q, k, v)))
    for window, same in BEYOND.items():
        assert all(map(torch.equal, results[window], results[same])), window
    assert not torch.equal(results[-1, 0][0], results[-1, -1][0])


@pytest.mark.parametrize("lengths", ((100, 60), (60, 60)))
def test_windows_beyond_every_length(lengths, family, device):
    """ "No limit", as some configurations write it: a number that other numbers must not be added to."""
    check_windows_beyond_every_length(lengths, device)


def test_softmax_scale_is_used(family, device):
    q, k, v = (torch.randn(1, 50, 2, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    for scale in (0.0, 0.03, -0.2, 1.7):
        out = flash_attn_func(q, k, v, softmax_scale=scale)
        visible = torch.ones(1, 50, 50, dtype=torch.bool, device=device)
        truth, _ = oracle.attention(q.double(), k.double(), v.double(), visible, scale)
        assert _largest(out.double() - truth) < 0.02


def test_gradient_of_a_sum(family, device):
    """out.sum() sends a gradient whose strides are all zero."""
    q, k, v = (torch.randn(2, 70, 2, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    expanded = torch.autograd.grad(flash_attn_func(q, k, v).sum(), (q, k, v))
    out = flash_attn_func(q, k, v)
    plain = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all(torch.equal(a, b) for a, b in zip(expanded, plain, strict=True))


# Whatever the rule is for, it notices. Each row: a case, and how it is called or changed behind the truth's back.

BROKEN = {
    "causal lost": (Case("broken", causal=True), {"causal": False}),
    "causal added": (Case("broken", lengths_q=(64, 64), lengths_k=(70, 70)), {"causal": True}),
    "window one too wide": (Case("broken", lengths_q=(150,), window=(20, 5)), {"window_size": (21, 5)}),
    "window one too narrow": (Case("broken", lengths_q=(150,), window=(20, 5)), {"window_size": (20, 4)}),
    "scale of the padded head dim": (Case("broken", head_dim=63), {"softmax_scale": 64**-0.5}),
    "cap lost": (Case("broken", softcap=2.0), {"softcap": 0.0}),
    "dropout lost": (Case("broken", dropout_p=0.1), {"dropout_p": 0.0}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_rule_notices(name, family, device, monkeypatch):
    case, overrides = BROKEN[name]
    sample = Sample(case, torch.bfloat16, device)
    admitted(family, sample, monkeypatch)
    keep = kept_by_next_call(sample)
    truth, eager = sample.expected(torch.float64, keep), sample.expected(torch.bfloat16, keep)
    compare(sample.actual(), truth, eager, torch.bfloat16, sample.sum_sizes())
    peek_rng_state(device, seed=7)
    with pytest.raises(AssertionError, match="is off by"):
        compare(sample.actual(**overrides), truth, eager, torch.bfloat16, sample.sum_sizes())


def test_the_rule_notices_a_dropped_mask(family, device):
    case = Case("broken", lengths_q=(60, 70), form="ranges", padding="holes", causal=True)
    sample = Sample(case, torch.bfloat16, device)
    truth, eager = sample.expected(torch.float64), sample.expected(torch.bfloat16)
    sample.key_mask = torch.ones_like(sample.key_mask)
    with pytest.raises(AssertionError, match="is off by"):
        compare(sample.actual(), truth, eager, torch.bfloat16, sample.sum_sizes())


# Repeats


REPEATED = [
    Case("repeat", head_dim=64, heads=(8, 2), lengths_q=(300, 300), causal=True),
    Case("repeat", head_dim=128, lengths_q=(513, 513)),
    Case("repeat", head_dim=256, lengths_q=(1, 129, 0, 260), form="packed", causal=True),
    Case("repeat", head_dim=96, heads=(6, 2), lengths_q=(64, 200), form="ranges", padding="holes", causal=True),
    Case("repeat", head_dim=96, lengths_q=(64, 200), form="ranges", padding="left", dropout_p=0.1),
    Case("repeat", head_dim=128, heads=(8, 2), lengths_q=(3, 3), lengths_k=(2000, 2000), causal=True),
    Case("repeat", head_dim=64, heads=(8, 1), lengths_q=(1, 600, 0, 260), form="packed", causal=True, window=(127, -1), sinks=2.0),
    Case("repeat", head_dim=256, heads=(8, 4), lengths_q=(300,), causal=True, softcap=5.0),
    Case("repeat", head_dim=512, heads=(4, 2), lengths_q=(1, 129, 0, 260), form="packed", causal=True),
    Case("repeat", head_dim=512, heads=(10, 5), lengths_q=(700,)),
]


@pytest.mark.parametrize("case", REPEATED, ids=lambda case: case.id)
def test_repeats_are_bit_equal(case, family, device, monkeypatch):
    """All but dq, which may differ by the order in which blocks of keys add to it."""
    sample = Sample(case, torch.bfloat16, device)
    admitted(family, sample, monkeypatch)
    torch.manual_seed(0)
    first = sample.actual()
    for _ in range(50 if ON_GPU else 1):
        torch.manual_seed(0)
        again = sample.actual()
        for name in first.keys() - {"dq"}:
            assert torch.equal(again[name], first[name]), f"{name} differs between two equal calls"


@pytest.mark.parametrize("case", REPEATED, ids=lambda case: case.id)
@pytest.mark.parametrize("asked_by", ("argument", "torch"))
def test_deterministic_repeats_are_bit_equal_in_dq(case, asked_by, family, device, request, monkeypatch):
    sample = Sample(case, torch.bfloat16, device)
    admitted(family, sample, monkeypatch)
    if asked_by == "torch":  # this also fills every torch.empty with NaN
        request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
        torch.use_deterministic_algorithms(True)
    options = {"deterministic": True} if asked_by == "argument" else {}
    torch.manual_seed(0)
    first = sample.actual(**options)
    assert all(first[name].isfinite().all() for name in first.keys() - {"lse"})
    for _ in range(50 if ON_GPU else 1):
        torch.manual_seed(0)
        again = sample.actual(**options)
        for name in first:
            assert torch.equal(again[name], first[name]), f"{name} differs between two equal deterministic calls"


# Dropout


def _uniform(batch: int, seqlen_q: int, seqlen_k: int, heads: int, head_dim: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k whose scores are all equal, so that a probability is zero only where dropout made it so."""
    q = torch.zeros(batch, seqlen_q, heads, head_dim, device=device, dtype=torch.bfloat16)
    return q, q.new_zeros(batch, seqlen_k, heads, head_dim)


def _identity(batch: int, seqlen: int, heads: int, head_dim: int, device) -> torch.Tensor:
    """Row j of every head is the unit vector j: [B, S, H, D] with S <= D."""
    eye = torch.eye(seqlen, head_dim, device=device, dtype=torch.bfloat16)
    return eye[None, :, None].expand(batch, -1, heads, -1).contiguous()


@pytest.mark.parametrize("head_dim", (64, 96, 128, 192, 256))
@pytest.mark.parametrize("dropout_p", (0.1, 0.5, 0.9))
def test_dropout_mask_is_that_of_the_reference(head_dim, dropout_p, family, device):
    """Element by element: with equal scores and v = identity, out shows which probabilities survived the forward."""
    batch, heads, seqlen_q = 3, 5, 147
    q, k = _uniform(batch, seqlen_q, head_dim, heads, head_dim, device)
    v = _identity(batch, head_dim, heads, head_dim, device)
    keep = reference.dropout_keep_mask(peek_rng_state(device, 3), range(batch), heads, seqlen_q, head_dim, dropout_p)
    out = flash_attn_func(q, k, v, dropout_p=dropout_p)
    assert torch.equal(out.transpose(1, 2) != 0, keep)


@pytest.mark.parametrize("head_dim", (64, 96, 128, 192, 256))
def test_dropout_mask_of_the_backward_is_that_of_the_forward(head_dim, family, device):
    """With equal scores and dout = identity, dv shows which probabilities survived the backward."""
    batch, heads, seqlen_k, dropout_p = 3, 5, 147, 0.3
    q, k = _uniform(batch, head_dim, seqlen_k, heads, head_dim, device)
    v = torch.randn_like(k).requires_grad_()
    keep = reference.dropout_keep_mask(peek_rng_state(device, 3), range(batch), heads, head_dim, seqlen_k, dropout_p)
    out = flash_attn_func(q, k, v, dropout_p=dropout_p)
    (dv,) = torch.autograd.grad(out, v, _identity(batch, head_dim, heads, head_dim, device))
    assert torch.equal(dv.permute(0, 2, 3, 1) != 0, keep)


@pytest.mark.parametrize("dropout_p", (0.05, 0.1, 0.5, 0.9))
def test_dropped_fraction(dropout_p, family, device):
    head_dim = 128
    q, k = _uniform(4, 512, head_dim, 8, head_dim, device)
    torch.manual_seed(11)
    out = flash_attn_func(q, k, _identity(4, head_dim, 8, head_dim, device), dropout_p=dropout_p)
    assert (out == 0).float().mean().item() == pytest.approx(dropout_p, abs=0.01)
    assert out.float().sum(-1).mean().item() == pytest.approx(1.0, rel=0.01), "probabilities that stay are scaled by 1 / (1 - p)"


def test_dropout_repeats_under_manual_seed_and_not_without(family, device):
    q, k, v = (torch.randn(2, 100, 4, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    torch.manual_seed(5)
    first, second = flash_attn_func(q, k, v, dropout_p=0.2), flash_attn_func(q, k, v, dropout_p=0.2)
    torch.manual_seed(5)
    assert torch.equal(flash_attn_func(q, k, v, dropout_p=0.2), first)
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], flash_attn_func(q[:1], k[:1], v[:1])[0])


@pytest.mark.gpu
def test_dropout_draws_anew_at_every_replay_of_a_cuda_graph(family, device):
    """Forward and backward of one replay share a mask: with equal scores and v = dout = identity, dv shows the transposed out."""
    size = 64
    q, k = _uniform(1, size, size, 2, size, device)
    v, dout = _identity(1, size, 2, size, device).requires_grad_(), _identity(1, size, 2, size, device)

    def step():
        out = flash_attn_func(q, k, v, dropout_p=0.5)
        return out.detach(), torch.autograd.grad(out, v, dout)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # for the inputs
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, dv = step()
    masks = []
    for _ in range(3):
        graph.replay()
        masks.append(out != 0)
        assert torch.equal(masks[-1], dv.permute(0, 3, 2, 1) != 0)
        assert 0.4 < masks[-1].float().mean() < 0.6
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_dropout_under_checkpointing(use_reentrant, family, device):
    """The forward that checkpointing runs again draws the same mask."""
    q, k, v = (torch.randn(2, 100, 4, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)

    def attend(q, k, v):
        return flash_attn_func(q, k, v, dropout_p=0.2, causal=True, deterministic=True)

    def run(wrapped):
        torch.manual_seed(9)
        for x in (q, k, v):
            x.grad = None
        out = wrapped(q, k, v)
        out.backward(dout)
        return out.detach(), q.grad, k.grad, v.grad

    plain = run(attend)
    checkpointed = run(lambda *args: torch.utils.checkpoint.checkpoint(attend, *args, use_reentrant=use_reentrant))
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))


# Errors


def test_the_next_call_works_after_every_error(family, device):
    sample = Sample(Case("error", lengths_q=(65, 65), causal=True), torch.bfloat16, device)
    expected = sample.actual(deterministic=True)
    q, k, v, _ = sample.inputs()
    packed = q.detach().flatten(0, 1)
    cu_seqlens = torch.tensor([0, 65, 130], dtype=torch.int32, device=device)
    wrong_calls = [
        lambda: flash_attn_func(q.to(torch.int8), k.to(torch.int8), v.to(torch.int8)),
        lambda: flash_attn_func(q, k.half(), v),
        lambda: flash_attn_func(q, k[:, :, :1].expand(-1, -1, 3, -1), v[:, :, :1].expand(-1, -1, 3, -1)),
        lambda: flash_attn_func(q, k[:, :30], v),
        lambda: flash_attn_func(q[0], k[0], v[0]),
        lambda: flash_attn_func(*(torch.zeros(1, 3, 2, 520, device=device, dtype=torch.bfloat16) for _ in range(3))),
        lambda: flash_attn_func(q, k, v, dropout_p=1.0),
        lambda: flash_attn_func(q, k, v, softcap=-30.0),
        lambda: flash_attn_func(q, k, v, window_size=(-2, 0)),
        lambda: flash_attn_varlen_func(packed, packed, packed, cu_seqlens.long(), cu_seqlens.long(), 65, 65),
    ]
    for wrong_call in wrong_calls:
        with pytest.raises(ValueError):
            wrong_call()
        actual = sample.actual(deterministic=True)
        assert all(torch.equal(actual[name], expected[name]) for name in actual)


# Only a GPU has these


@pytest.fixture
def workspaces(device, monkeypatch) -> list[int]:
    """The sizes of scratch that forwards ask for in this test, in bytes, once for each layout: there where keys are split."""
    asked = []
    if device.type == "cuda":
        library = native.library()
        ask = library.hf_flash2_forward_workspace_bytes
        monkeypatch.setattr(ops, "plans", {})
        monkeypatch.setattr(library, "hf_flash2_forward_workspace_bytes", lambda *call: asked.append(ask(*call)) or asked[-1])
    return asked


def check_heads_of_a_group(case, family, device, workspaces) -> None:
    """Whether a tile holds the rows of one head or of a group is not seen in a single bit, unless so many fewer tiles split their keys, or
    the tile of the Hopper family is a small one for one head and a large one for a group (d 64, full: above 64 rows)."""
    sample = Sample(case, torch.bfloat16, device)
    queries = max(case.lengths_q) if case.form == "packed" else sample.seqlen_q
    group = case.heads[0] // case.heads[1]
    other_tiles = family == "sm90" and case.head_dim <= 64 and not case.causal and queries <= 64 < queries * group
    q, k, v = (x.detach() for x in sample.inputs()[:3])
    grouped = sample.call(q, k, v)
    alone = sample.call(q, *(x.repeat_interleave(group, dim=-2) for x in (k, v)))
    if workspaces or other_tiles:
        for x, y in zip(grouped, alone, strict=True):
            error = 1e-5 if x.dtype == torch.float32 else torch.finfo(x.dtype).eps
            torch.testing.assert_close(x, y, rtol=error, atol=error)
    else:
        assert all(map(torch.equal, grouped, alone))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in CASES if case.group == "group"], ids=lambda case: case.id)
def test_heads_of_a_group_are_as_with_keys_of_their_own(case, family, device, workspaces):
    check_heads_of_a_group(case, family, device, workspaces)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in CASES if case.group == "split"], ids=lambda case: case.id)
def test_few_queries_and_many_keys_are_split(case, device, workspaces):
    """What test_forward_and_backward has run of this group did take the way that it is there for."""
    if "sm90" not in native.families(torch.cuda.current_device()):
        pytest.skip("the Hopper family alone splits keys")
    sample = Sample(case, torch.bfloat16, device)
    sample.call(*sample.inputs()[:3])
    assert len(workspaces) == 1 and workspaces[0] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("form", ("dense", "packed", "ranges"))
def test_no_host_synchronisation(form, family, device, request):
    dropout_p = 0.1
    sample = Sample(Case("sync", lengths_q=(65, 30) if form != "dense" else (65, 65), form=form), torch.bfloat16, device)
    q, k, v, dout = sample.inputs()
    cu_seqlens = sample.cu_seqlens(sample.case.lengths_q)

    def attend():
        if form == "dense":
            return flash_attn_func(q, k, v, dropout_p=dropout_p)
        if form == "packed":
            return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 65, 65, dropout_p=dropout_p)
        batch = packing.padded_batch(sample.valid_k, sample.seqlen_q, same_tokens=True)
        return flash_attn_ranges_func(q, k, v, batch.ranges_q, batch.ranges_k, batch.key_mask, dropout_p=dropout_p)

    torch.autograd.grad(attend(), (q, k, v), dout)  # loads the library
    request.addfinalizer(lambda: torch.cuda.set_sync_debug_mode("default"))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    torch.autograd.grad(attend(), (q, k, v), dout)


@pytest.mark.gpu
def test_runs_on_the_current_stream(family, device):
    """Inputs arrive late on a side stream; kernels on any other stream would read NaN."""
    sample = Sample(Case("stream", head_dim=128, lengths_q=(300, 300), causal=True), torch.bfloat16, device)
    expected = sample.actual(deterministic=True)
    source = sample.inputs()
    late = [torch.full_like(x, math.nan).requires_grad_(x.requires_grad) for x in source]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        with torch.no_grad():
            for target, value in zip(late, source, strict=True):
                target.copy_(value)
        q, k, v, dout = late
        out, _ = sample.call(q, k, v, deterministic=True)
        torch.cuda._sleep(20_000_000)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    stream.synchronize()
    for name, actual in {"out": out, "dq": dq, "dk": dk, "dv": dv}.items():
        assert torch.equal(actual, expected[name]), name


@pytest.mark.gpu
def test_two_streams_at_once(family, device):
    """Calls in flight together share no scratch."""
    cases = [Case("stream", head_dim=d, lengths_q=(512,) * 2) for d in (64, 128)]
    cases.append(Case("stream", head_dim=128, lengths_q=(3,) * 2, lengths_k=(4096,) * 2))  # split keys
    samples = [Sample(case, torch.bfloat16, device) for case in cases]
    expected = [sample.actual(deterministic=True) for sample in samples]
    inputs = [sample.inputs() for sample in samples]
    streams = [torch.cuda.Stream() for _ in samples]
    torch.cuda.synchronize()
    results = [[] for _ in samples]
    for _ in range(20):
        for sample, (q, k, v, dout), stream, kept in zip(samples, inputs, streams, results, strict=True):
            with torch.cuda.stream(stream):
                out, _ = sample.call(q, k, v, deterministic=True)
                kept.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
    torch.cuda.synchronize()
    for kept, truth in zip(results, expected, strict=True):
        for tensors in kept:
            for name, actual in zip(("out", "dq", "dk", "dv"), tensors, strict=True):
                assert torch.equal(actual, truth[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("lengths_k", ((1, 300, 0, 64), (2000, 300, 7, 64)), ids=("prompts", "split keys"))
def test_runs_inside_a_cuda_graph(lengths_k, family, device):
    case = Case("graph", head_dim=128, lengths_q=(1, 300, 0, 64), lengths_k=lengths_k, form="packed", causal=True)
    sample = Sample(case, torch.bfloat16, device)
    q, k, v, dout = sample.inputs()
    cu_seqlens = [sample.cu_seqlens(lengths) for lengths in (case.lengths_q, case.lengths_k)]

    def step():
        out = flash_attn_varlen_func(q, k, v, *cu_seqlens, max(case.lengths_q), max(case.lengths_k), causal=True, deterministic=True)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # for the inputs
    with torch.cuda.stream(side):
        expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for x in captured:
        x.detach().fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_the_device_of_its_tensors(family):
    """The current device is the first, the tensors lie on the second."""
    case = Case("device", head_dim=128, lengths_q=(200, 200), causal=True)
    with torch.cuda.device(0):
        sample = Sample(case, torch.bfloat16, "cuda:1")
        compare(sample.actual(), sample.expected(torch.float64), sample.expected(torch.bfloat16), torch.bfloat16, sample.sum_sizes())


@pytest.mark.gpu
def test_more_sequences_than_a_grid_dimension_holds(family, device):
    """70 000 sequences of one token each: out is v, dv is dout."""
    tokens = 70_000
    q, k, v, dout = (torch.randn(tokens, 2, 64, device=device, dtype=torch.bfloat16) for _ in range(4))
    v.requires_grad_()
    cu_seqlens = torch.arange(tokens + 1, dtype=torch.int32, device=device)
    out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 1, 1)
    assert torch.equal(out, v)
    (dv,) = torch.autograd.grad(out, v, dout)
    assert torch.equal(dv, dout)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dims", ((64, 64), (128, 64), (192, 128), (192, 192), (256, 128), (256, 256)), ids=str)
@pytest.mark.parametrize("causal", (False, True))
def test_nothing_before_a_large_tensor_is_read(head_dims, causal, family, device):
    """The tensor maps of sequences begin as far before their data as that is long. Sequences of an odd number of key blocks in a packed
    batch, too large to lie behind something else, have the gradients that they have alone."""
    torch.cuda.empty_cache()
    lengths, heads = (78, 8000, 300, 1100, 640, 100), 32
    cu_seqlens = torch.tensor((0, *lengths), device=device).cumsum(0).int()
    inner = [torch.randn(sum(lengths), heads, head_dims[i], device=device, dtype=torch.bfloat16) for i in (0, 0, 1, 1)]
    q, k, v, dout = (x.requires_grad_() for x in inner)
    out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max(lengths), max(lengths), causal=causal)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    for begin, length in zip(cu_seqlens.tolist(), lengths, strict=False):
        alone = [x[None, begin : begin + length].detach().requires_grad_() for x in (q, k, v)]
        expected = torch.autograd.grad(flash_attn_func(*alone, causal=causal), alone, dout[None, begin : begin + length])
        for actual, of_sequence in zip(gradients, expected, strict=True):
            difference = actual[begin : begin + length].double() - of_sequence[0].double()
            assert difference.norm() < 0.004 * of_sequence.double().norm()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "seqlen", "group", "heads_k", "padded"),
    (
        (128, 16384, 8, 2, False),
        (128, 16384, 4, 2, False),
        (128, 32768, 8, 1, True),
        (128, 1024, 2, 52, False),
        (128, 4096, 7, 4, False),
        (128, 8192, 3, 2, False),
        (128, 2048, 8, 8, False),
        (96, 1024, 4, 36, False),
        (64, 2048, 8, 12, True),
    ),
)
def test_long_groups_have_the_gradients_of_their_heads(head_dim, seqlen, group, heads_k, padded, family, device):
    """On Hopper, tasks have several heads of a group there, in another order and with other stages of dQ: all of them
    (has_very_long_heads), or the first (choose_whole_groups). In the last three cases dQ is rounded beside tasks that leave shares."""
    torch.cuda.empty_cache()
    heads = (heads_k * group, heads_k, heads_k, heads_k * group)
    q, k, v, dout = (torch.randn(2, seqlen, n, head_dim, device=device, dtype=torch.bfloat16).requires_grad_() for n in heads)
    ranges = torch.tensor(((100, 0), (seqlen - 100, seqlen // 3)), dtype=torch.int32, device=device)  # starts, lengths

    def gradients(k, v):
        attend = functools.partial(flash_attn_ranges_func, ranges_q=ranges, ranges_k=ranges) if padded else flash_attn_func
        out = attend(q, k, v, causal=True)
        return torch.autograd.grad(out, (q, k, v), dout)

    dq, *of_keys = gradients(k, v)
    expected_dq, *of_heads = gradients(*(x.detach().repeat_interleave(group, 2).requires_grad_() for x in (k, v)))
    expected = expected_dq, *(x.unflatten(2, (heads_k, group)).double().sum(3) for x in of_heads)
    for actual, all_heads in zip((dq, *of_keys), expected, strict=True):
        assert (actual.double() - all_heads.double()).norm() < 0.004 * all_heads.double().norm()
    _, *again = gradients(k, v)
    assert all(map(torch.equal, again, of_keys))


@pytest.mark.gpu
def test_long_heads_of_256_add_to_dq_in_order(device):
    """With all keys, where that is faster: the same bits, although nobody asks for them."""
    if "sm90" not in native.families(torch.cuda.current_device()):
        pytest.skip("on Hopper")
    q, k, v, dout = (torch.randn(1, 8192, 8, 256, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(4))
    out = flash_attn_func(q, k, v)
    first, *others = (torch.autograd.grad(out, (q, k, v), dout, retain_graph=True) for _ in range(4))
    assert all(map(torch.equal, first * 3, itertools.chain(*others)))


@pytest.mark.big_memory
@pytest.mark.parametrize("form", ("dense", "packed", "short", "short packed", "strided"))
def test_offsets_beyond_2_to_the_31(form, family, device, most_of_the_memory):
    """Tensors of more than 2^31 elements, checked on their last sequence and on one in the middle."""
    head_dim = 128
    if form == "strided":  # few tokens, 2^24 elements apart: q, k, v and dout share the rows of one buffer
        batch, seqlen, heads = 1, 200, 4
        buffer = torch.empty(seqlen, 2**24, device=device, dtype=torch.bfloat16)
        q, k, v, dout = (
            buffer[None, :, i * 4096 : i * 4096 + heads * head_dim].unflatten(-1, (heads, head_dim)).normal_() for i in range(4)
        )
        assert q.stride(1) * seqlen > 2**31
    else:
        # Short ones have a Hopper backward of their own.
        batch, seqlen, heads = (2064, 512, 16) if form in ("dense", "packed") else (8256, 128, 16)
        q, k, v, dout = (torch.empty(batch, seqlen, heads, head_dim, device=device, dtype=torch.bfloat16).normal_() for _ in range(4))
        assert q.numel() > 2**31
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    if form in ("packed", "short packed"):
        cu_seqlens = torch.arange(0, (batch + 1) * seqlen, seqlen, dtype=torch.int32, device=device)
        tokens = [x.flatten(0, 1) for x in (q, k, v)]
        out = flash_attn_varlen_func(*tokens, cu_seqlens, cu_seqlens, seqlen, seqlen, causal=True).view_as(q)
    else:
        out = flash_attn_func(q, k, v, causal=True)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    visible = oracle.visible_pairs(seqlen, seqlen, [(0, seqlen)], [(0, seqlen)], True, (-1, -1), None, device)
    for b in {batch // 2, batch - 1}:
        piece = slice(b, b + 1)
        actual = dict(zip(("out", "dq", "dk", "dv"), (x.detach()[piece] for x in (out, *grads)), strict=True))
        expected = {
            dtype: oracle.gradients(*(x.detach()[piece].to(dtype) for x in (q, k, v, dout)), visible=visible, softmax_scale=head_dim**-0.5)
            for dtype in (torch.float64, torch.bfloat16)
        }
        actual["lse"] = expected[torch.float64]["lse"].float()  # checked elsewhere
        compare(actual, expected[torch.float64], expected[torch.bfloat16], torch.bfloat16, dict.fromkeys(ALLOWED, 0.0))


AT_LOW_ADDRESSES = """
import torch
from hf_flash2 import flash_attn_varlen_func

def gradients(q, k, v, dout, cu_seqlens, longest):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True)
    return torch.autograd.grad(out, (q, k, v), dout)

memory = torch.empty(2**33, device="cuda", dtype=torch.bfloat16)  # 17 GB
print(memory.data_ptr())
for head_dim, lengths in ((64, (100, 110, 90)), (128, (450, 400, 380)), (512, (70, 50, 60))):
    tokens, columns = sum(lengths), 2 * head_dim
    near = [torch.randn(tokens, 2, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    strides = (2**33 // tokens // 8 * 8 - 8, head_dim, 1)
    far = [memory[i * columns:].as_strided(x.shape, strides).copy_(x) for i, x in enumerate(near)]
    cu_seqlens = torch.tensor([0, lengths[0], sum(lengths[:2]), tokens], device="cuda", dtype=torch.int32)
    pairs = zip(gradients(*far, cu_seqlens, max(lengths)), gradients(*near, cu_seqlens, max(lengths)))
    print(max(float((x - y).abs().max()) for x, y in pairs))
"""


@pytest.mark.big_memory
def test_rows_that_span_more_bytes_than_their_address(device, most_of_the_memory):
    """Allocators that reserve addresses begin at 13 GB, and nobody makes a tensor map that begins below 0."""
    setting = "expandable_segments:True"
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": setting, "PYTORCH_CUDA_ALLOC_CONF": setting}
    done = subprocess.run([sys.executable, "-c", AT_LOW_ADDRESSES], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    address, *differences = map(float, done.stdout.split())
    assert len(differences) == 3 and all(difference < 0.05 for difference in differences)
    if address > 2**34:
        pytest.skip(f"this allocator begins at {address:.0f}")

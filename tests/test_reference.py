"""The reference backend by itself: numerical gradients, the three forms of a batch against each other, the dropout generator.

tests/test_kernels.py compares it with the textbook formula, case by case.
"""

import pytest
import torch
from cases import Case, Sample

from hf_flash2 import flash_attn_func, flash_attn_ranges_func, flash_attn_varlen_func, flash_attn_with_kvcache, reference

pytestmark = pytest.mark.timeout(120)


GRADCHECKED = [
    Case("gradcheck", head_dim=3, lengths_q=(5, 5), lengths_k=(7, 7), causal=True),
    Case("gradcheck", head_dim=4, heads=(3, 1), lengths_q=(7, 7), lengths_k=(4, 4), causal=True),
    Case("gradcheck", head_dim=4, lengths_q=(6, 6), window=(2, 1)),
    Case("gradcheck", head_dim=4, lengths_q=(1, 0, 5), lengths_k=(3, 2, 0), form="packed"),
    Case("gradcheck", head_dim=4, lengths_q=(1, 5), lengths_k=(3, 6), form="ranges", padding="left", causal=True),
    Case("gradcheck", head_dim=4, lengths_q=(6, 5), form="ranges", padding="holes"),
    Case("gradcheck", head_dim=4, lengths_q=(6, 6), dropout_p=0.3),
]


@pytest.mark.parametrize("case", GRADCHECKED, ids=lambda case: case.id)
def test_gradients_are_the_slopes_of_the_forward(case):
    sample = Sample(case, torch.float64, "cpu")
    inputs = [x.detach().nan_to_num(0.5).requires_grad_() for x in sample.inputs()[:3]]  # gradcheck cannot see past NaN

    def out(q, k, v):
        torch.manual_seed(1)  # the same dropout mask at every evaluation
        return sample.call(q, k, v)[0]

    assert torch.autograd.gradcheck(out, inputs)


def test_the_forms_of_a_batch_agree():
    """One problem as dense, packed and ranges gives the same numbers."""
    batch, seqlen, heads, head_dim = 3, 20, 4, 16
    q, k, v = (torch.randn(batch, seqlen, heads, head_dim, dtype=torch.float64) for _ in range(3))
    dense = flash_attn_func(q, k, v, causal=True, window_size=(7, 0))
    cu_seqlens = torch.arange(0, (batch + 1) * seqlen, seqlen, dtype=torch.int32)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    packed = flash_attn_varlen_func(*flat, cu_seqlens, cu_seqlens, seqlen, seqlen, causal=True, window_size=(7, 0))
    everything = torch.tensor([[0] * batch, [seqlen] * batch], dtype=torch.int32)
    ranges = flash_attn_ranges_func(q, k, v, everything, everything, causal=True, window_size=(7, 0))
    torch.testing.assert_close(packed.view_as(dense), dense, rtol=0, atol=1e-14)
    torch.testing.assert_close(ranges, dense, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_without_keys_have_no_sink(dtype):
    """Three of seven queries see none of four keys: out and the gradients are those without them, whatever is sent to their lse."""
    q, k, v = (torch.randn(2, length, heads, 16, dtype=dtype, requires_grad=True) for length, heads in ((7, 4), (4, 2), (4, 2)))
    sinks = torch.tensor([-1.0, 0.0, 2.0, 200.0], dtype=dtype, requires_grad=True)
    dout, dlse = torch.randn(2, 7, 4, 16, dtype=dtype), torch.randn(2, 4, 7)
    results = []
    for first in (0, 3):
        out, lse, _ = flash_attn_func(q[:, first:], k, v, causal=True, return_attn_probs=True, s_aux=sinks)
        gradients = torch.autograd.grad((out, lse), (q, k, v, sinks), (dout[:, first:], dlse[..., first:]))
        results.append((out[:, 3 - first :], lse[..., 3 - first :], *gradients))
        if first == 0:
            assert not out[:, :3].any() and (lse[..., :3] == float("inf")).all() and lse[..., 3:].isfinite().all()
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast_around_it_rounds_nothing(dtype):
    """Neither in the forward nor in the backward, inside of it or outside."""
    q, k, v = (torch.randn(2, 20, heads, 16).to(dtype).requires_grad_() for heads in (4, 2, 2))

    def gradients(out):
        return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    expected = flash_attn_func(q, k, v, causal=True)
    found = gradients(expected)
    with torch.autocast("cpu", torch.bfloat16):
        out, again = (flash_attn_func(q, k, v, causal=True) for _ in range(2))
        inside = gradients(again)
    assert torch.equal(out, expected)
    for tensor, one, other in zip(found, gradients(out), inside, strict=True):
        assert torch.equal(tensor, one) and torch.equal(tensor, other)


def test_autocast_around_a_step_from_pages_rounds_nothing():
    q, k_cache, v_cache = torch.randn(2, 1, 4, 16), torch.randn(4, 128, 2, 16), torch.randn(4, 128, 2, 16)
    options = {"cache_seqlens": 100, "block_table": torch.tensor([[2], [0]], dtype=torch.int32)}
    expected = flash_attn_with_kvcache(q, k_cache, v_cache, **options)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(flash_attn_with_kvcache(q, k_cache, v_cache, **options), expected)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    """The published test vectors of Philox 4x32 with 7 rounds (Salmon et al., SC 2011)."""
    words = reference._philox([torch.tensor(c) for c in counter], tuple(torch.tensor(k) for k in key))
    assert tuple(int(word) for word in words) == expected


def _keep(seed=1, offset=2, batch=range(2), heads=3, seqlen_q=70, seqlen_k=90, dropout_p=0.5):
    return reference.dropout_keep_mask(torch.tensor([seed, offset]), batch, heads, seqlen_q, seqlen_k, dropout_p)


def test_dropout_mask_depends_on_position_alone():
    """A shorter sequence, fewer sequences: the same element gets the same fate, so any tiling of the kernels gives one mask."""
    keep = _keep()
    assert torch.equal(_keep(seqlen_q=33, seqlen_k=17), keep[:, :, :33, :17])
    assert torch.equal(_keep(batch=range(1, 2)), keep[1:])


@pytest.mark.parametrize("change", ({"seed": 3}, {"offset": 3}, {"seed": 1 + 2**32}, {"seed": 2**62 + 1}))
def test_dropout_mask_depends_on_the_whole_state(change):
    agreement = (_keep() == _keep(**change)).float().mean().item()
    assert agreement == pytest.approx(0.5, abs=0.02)


def test_dropout_masks_of_heads_and_sequences_are_independent():
    keep = _keep(batch=range(3), heads=4, seqlen_q=128, seqlen_k=128).flatten(0, 1).flatten(1).double()
    correlation = torch.corrcoef(keep) - torch.eye(12, dtype=torch.float64)
    assert correlation.abs().max() < 0.04  # 5 standard deviations at 16384 elements


@pytest.mark.parametrize("axis", (-1, -2))
@pytest.mark.parametrize("distance", (1, 2, 3, 4, 5, 8, 16))
def test_dropout_mask_has_no_pattern_along_rows_and_columns(axis, distance):
    """The elements of one Philox call, and neighbouring calls, are uncorrelated."""
    keep = _keep(seqlen_q=256, seqlen_k=256)
    size = keep.shape[axis]
    same = keep.narrow(axis, 0, size - distance) == keep.narrow(axis, distance, size - distance)
    assert same.float().mean().item() == pytest.approx(0.5, abs=0.005)


@pytest.mark.parametrize("dropout_p", (0.001, 0.1, 0.484, 0.485, 0.5, 0.9, 0.95))
def test_dropout_fraction(dropout_p):
    keep = _keep(batch=range(4), seqlen_q=256, seqlen_k=256, dropout_p=dropout_p)
    assert 1 - keep.double().mean().item() == pytest.approx(dropout_p, abs=0.003)


@pytest.mark.parametrize("dropped", (0, 1, 0x7BFF, 0x7C00, 0x7C01, 0x7C02, 0x7C03, 58000, 60000, 2**16 - 1))
def test_dropout_threshold_is_exact(dropped):
    """Of all numbers in fp16 so many are below it, or not; one more where the second of the two zeros, which are equal, is one too many."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    threshold, keeps_few = reference.dropout_threshold(dropped / 2**16)
    below = int((numbers < threshold).sum())
    assert (2**16 - below if keeps_few else below) == dropped + (dropped == 0x7C01)


def test_dropout_threshold_is_that_of_the_number_in_float32():
    """Rounded to the nearest, and to an even one of two: as the kernels do. Few are kept above 0.9 alone, which the Hopper kernels lack."""
    assert reference.dropout_threshold(4.5 / 2**16 + 1e-13) == reference.dropout_threshold(4 / 2**16)
    assert reference.dropout_threshold(4.75 / 2**16) == reference.dropout_threshold(5 / 2**16)
    assert [reference.dropout_threshold(p)[1] for p in (0.85, 0.9, 0.901)] == [False, False, True]

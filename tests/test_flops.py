"""flops.py: FlopCounterMode counts our ops as it counts torch's attention, and of padded and packed batches the real tokens alone."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from hf_flash2 import flash_attn_func, flash_attn_ranges_func, flash_attn_varlen_func, flash_attn_with_kvcache, ops

HEADS, KEY_HEADS, DIM, DIM_V = 4, 2, 16, 8


def tensors(*shape: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape, heads, dim, requires_grad=True) for heads, dim in ((HEADS, DIM), (KEY_HEADS, DIM), (KEY_HEADS, DIM_V))]


def count(attention, *inputs) -> tuple[int, int]:
    """Of a forward, and of its backward."""
    with FlopCounterMode(display=False) as forward:
        out = attention(*inputs)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def flops_of(pairs: int) -> tuple[int, int]:
    return 2 * pairs * HEADS * (DIM + DIM_V), 2 * pairs * HEADS * (3 * DIM + 2 * DIM_V)


@pytest.mark.parametrize("causal", [False, True])
def test_dense_batches_are_counted_as_torch_counts_its_own(causal):
    found = count(lambda q, k, v: flash_attn_func(q, k, v, causal=causal), *tensors(3, 7))
    assert found == flops_of(3 * 7 * 7)
    q, k, v = (3, HEADS, 7, DIM), (3, HEADS, 7, DIM), (3, HEADS, 7, DIM_V)  # with a key head for each query head, as older versions want it
    assert found == (sdpa_flop_count(q, k, v), sdpa_backward_flop_count(v, q, k, v))


def test_real_tokens_alone_are_counted():
    bounds = torch.tensor([0, 3, 10], dtype=torch.int32)
    packed = count(lambda q, k, v: flash_attn_varlen_func(q, k, v, bounds, bounds, 7, 7), *tensors(10))
    assert packed == flops_of(3 * 3 + 7 * 7)
    ranges = torch.tensor([[2, 0], [5, 4]], dtype=torch.int32)
    padded = count(lambda q, k, v: flash_attn_ranges_func(q, k, v, ranges, ranges), *tensors(2, 7))
    assert padded == flops_of(5 * 5 + 4 * 4)
    holes = torch.tensor([[2, 0], [5, 4], [0, 1]], dtype=torch.int32)
    assert count(lambda q, k, v: flash_attn_ranges_func(q, k, v, None, holes, torch.ones(2, 7).bool()), *tensors(2, 7)) == flops_of(7 * 9)
    keys_alone = count(lambda q, k, v: flash_attn_ranges_func(q, k, v, None, ranges), *tensors(2, 7))
    assert keys_alone == flops_of(7 * 5 + 7 * 4)


def test_tokens_in_pages_are_counted():
    q, pages = torch.randn(2, 3, HEADS, DIM), torch.randn(4, 128, HEADS, DIM)
    lengths, table = torch.tensor([130, 7], dtype=torch.int32), torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        flash_attn_with_kvcache(q, pages, pages, cache_seqlens=lengths, block_table=table)
    assert counter.get_total_flops() == 2 * (3 * 130 + 3 * 7) * HEADS * 2 * DIM


def test_lengths_that_cannot_be_read_count_in_full():
    with FakeTensorMode():
        q, k, v = tensors(2, 7)
        ranges = torch.tensor([[2, 0], [5, 4]], dtype=torch.int32)
        assert count(lambda q, k, v: flash_attn_ranges_func(q, k, v, ranges, ranges), q, k, v) == flops_of(2 * 7 * 7)
        assert count(lambda q, k, v: flash_attn_func(q[:, :3], k, v), q, k, v) == flops_of(2 * 3 * 7)


def test_sequences_without_data_count_in_full():
    """Of a model on the meta device: as many as there are, each with all the tokens that one may have."""
    q, k, v = (x.detach().to("meta").requires_grad_() for x in tensors(10))
    bounds = torch.empty(3, dtype=torch.int32, device="meta")
    found = count(lambda *x: ops.forward(*x, bounds, bounds, None, None, None, 6, 7, 0.25, -1, -1, 0.0, 0.0, False)[0], q, k, v)
    assert found == flops_of(2 * 6 * 7)

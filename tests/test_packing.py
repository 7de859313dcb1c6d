"""packing.py: what ranges, masks and documents say must be exactly what the padded batch meant, for any padding."""

import oracle
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_flash2 import flash_attn_ranges_func, packing

pytestmark = pytest.mark.timeout(60)


def random_masks(count: int, seqlen: int, seed: int) -> torch.Tensor:
    """bool [count, seqlen] of every kind: left, right, both, holes, empty, full, one token."""
    generator = torch.Generator().manual_seed(seed)
    column = torch.arange(seqlen)
    masks = []
    for i in range(count):
        start, end = torch.randint(0, seqlen + 1, (2,), generator=generator).sort().values
        kinds = [
            column < end,
            column >= start,
            (column >= start) & (column < end),
            torch.rand(seqlen, generator=generator) < 0.5,
            torch.zeros(seqlen, dtype=torch.bool),
            torch.ones(seqlen, dtype=torch.bool),
            column == start,
        ]
        masks.append(kinds[i % len(kinds)])
    return torch.stack(masks)


def visible_in(batch: packing.PaddedBatch, seqlen_q: int, causal: bool, window: tuple[int, int]) -> torch.Tensor:
    """The pairs the kernels visit for these ranges: bool [B, Sq, Sk]. The mask is read only where the third row says so."""
    seqlen_k = batch.key_mask.shape[1]
    key_mask = batch.key_mask.bool() | (batch.ranges_k[2] == 0)[:, None]
    ranges_q = [(0, seqlen_q)] * key_mask.shape[0] if batch.ranges_q is None else batch.ranges_q.T.tolist()
    ranges_k = batch.ranges_k[:2].T.tolist()
    return oracle.visible_pairs(seqlen_q, seqlen_k, ranges_q, ranges_k, causal, window, key_mask, torch.device("cpu"))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("seqlen_q", "q_offset"), ((12, None), (5, None), (1, None), (4, 3), (1, 0), (12, 0), (3, torch.tensor(6))))
@pytest.mark.parametrize("window", ((-1, -1), (2, 0), (0, 0), (3, 2)))
@pytest.mark.parametrize("causal", (True, False))
def test_queries_and_keys_of_one_text(seed, seqlen_q, q_offset, window, causal):
    """Real query rows see the real keys that raw columns, causality and window allow: with caches, any padding, any window."""
    seqlen_k = 12
    mask = random_masks(21, seqlen_k, seed)
    batch = packing.padded_batch(mask, seqlen_q, q_offset, same_tokens=True)
    offset = seqlen_k - seqlen_q if q_offset is None else int(q_offset)
    row, col = torch.arange(seqlen_q)[:, None] + offset, torch.arange(seqlen_k)
    left, right = window[0], 0 if causal else window[1]
    allowed = (col < offset + seqlen_q).expand(seqlen_q, -1)  # slots of a static cache behind the last query hold nothing
    if left >= 0:
        allowed = allowed & (col >= row - left)
    if right >= 0:
        allowed = allowed & (col <= row + right)
    expected = mask[:, None, :] & allowed
    real_row = mask[:, offset : offset + seqlen_q]
    actual = visible_in(batch, seqlen_q, causal, window)
    assert torch.equal(actual[real_row], expected[real_row])


@pytest.mark.parametrize("seed", range(5))
def test_every_query_row_of_cross_attention_is_computed(seed):
    mask = random_masks(21, 12, seed)
    batch = packing.padded_batch(mask, seqlen_q=7, same_tokens=False)
    assert batch.ranges_q is None
    assert torch.equal(visible_in(batch, 7, False, (-1, -1)), mask[:, None, :].expand(-1, 7, -1))


def test_padding_is_skipped_and_only_holes_read_the_mask():
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    batch = packing.padded_batch(mask, seqlen_q=4, same_tokens=True)
    assert batch.ranges_k.tolist() == [[2, 0, 0, 0, 0], [2, 2, 3, 0, 4], [0, 0, 1, 0, 0]]
    assert batch.ranges_q.tolist() == [[2, 0, 0, 0, 0], [2, 2, 3, 0, 4]]
    assert batch.ranges_q.dtype == batch.ranges_k.dtype == torch.int32
    assert batch.key_mask.dtype == torch.uint8
    assert batch.ranges_q.is_contiguous() and batch.ranges_k.is_contiguous() and batch.key_mask.is_contiguous()


def test_padded_batch_reads_no_value():
    """A fake tensor has no values: anything that reads one back to the host raises."""
    with FakeTensorMode():
        for same_tokens in (True, False):
            packing.padded_batch(torch.empty(3, 12, dtype=torch.bool), 5, torch.tensor(4), same_tokens=same_tokens)


@pytest.mark.parametrize("same_tokens", (True, False))
@pytest.mark.parametrize("seqlen_q", (0, 3))
def test_a_mask_without_columns_is_of_sequences_without_tokens(seqlen_q, same_tokens):
    """As flash_attn_func takes keys without tokens: no row sees any."""
    batch = packing.padded_batch(torch.empty(2, 0, dtype=torch.bool), seqlen_q, same_tokens=same_tokens)
    assert (batch.ranges_k.tolist(), batch.key_mask.shape) == ([[0, 0]] * 3, (2, 0))
    assert batch.ranges_k.dtype == torch.int32 and batch.key_mask.dtype == torch.uint8
    if same_tokens:
        assert (batch.ranges_q.tolist(), batch.ranges_q.dtype) == ([[seqlen_q] * 2, [0] * 2], torch.int32)
    else:
        assert batch.ranges_q is None
    q, k = torch.randn(2, seqlen_q, 4, 8), torch.empty(2, 0, 4, 8)
    assert torch.equal(flash_attn_ranges_func(q, k, k, batch.ranges_q, batch.ranges_k, batch.key_mask, causal=same_tokens), q * 0)


@pytest.mark.parametrize("padding", ("left", "right", "holes"))
def test_padded_attention_equals_attention_under_a_mask(padding):
    """End to end on values, gradients included, with garbage in the padding."""
    batch, seqlen, heads, head_dim = 4, 23, 4, 8
    generator = torch.Generator().manual_seed(0)
    column = torch.arange(seqlen)
    lengths = torch.tensor([23, 9, 1, 0])[:, None]
    masks = {"left": column >= seqlen - lengths, "right": column < lengths, "holes": random_masks(batch, seqlen, 3)}
    mask = masks[padding]
    q, k, v, dout = (torch.randn(batch, seqlen, heads, head_dim, generator=generator, dtype=torch.float64) for _ in range(4))
    dout = dout * mask[:, :, None, None]
    visible = mask[:, None, :] & torch.ones(seqlen, seqlen, dtype=torch.bool).tril()
    visible = visible & mask[:, :, None]
    expected = oracle.gradients(q, k, v, dout, visible=visible, softmax_scale=head_dim**-0.5)
    sequences = packing.padded_batch(mask, seqlen, same_tokens=True)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = flash_attn_ranges_func(*inputs, sequences.ranges_q, sequences.ranges_k, sequences.key_mask, causal=True)
    grads = torch.autograd.grad(out, inputs, dout)
    torch.testing.assert_close(out[mask], expected["out"][mask], rtol=0, atol=1e-13)
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        torch.testing.assert_close(grad, expected[name], rtol=0, atol=1e-13)


@pytest.mark.parametrize("rows", (1, 3))
@pytest.mark.parametrize("seed", range(10))
def test_documents_are_found(seed, rows):
    """Documents of random lengths fill each row; positions start anywhere."""
    generator = torch.Generator().manual_seed(seed)
    seqlen, lengths, position_ids = 20, [], []
    for _ in range(rows):
        ends = torch.randperm(seqlen - 1, generator=generator)[:4].sort().values + 1
        row = torch.cat((torch.zeros(1, dtype=torch.long), ends, torch.tensor([seqlen]))).diff().tolist()
        first = int(torch.randint(0, 4, (1,), generator=generator))
        lengths += row
        position_ids.append(torch.cat([torch.arange(first, first + n) for n in row]))
    cu_seqlens, longest = packing.documents_from_position_ids(torch.stack(position_ids))
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.diff().tolist() == lengths
    assert longest == max(lengths)


@pytest.mark.parametrize(("rows", "first"), ((1, 0), (1, 5), (3, 0)))
def test_one_document_a_row_is_no_packing(rows, first):
    assert packing.documents_from_position_ids(torch.arange(first, first + 9).expand(rows, -1)) is None
    assert packing.documents_from_position_ids(torch.full((rows, 9), first)) is None  # no positions at all


def test_ranges_of_queries_behind_all_real_tokens_are_empty():
    assert packing.padded_batch(torch.tensor([[1, 0, 0, 0]]).bool(), seqlen_q=2, same_tokens=True).ranges_q.tolist() == [[0], [0]]


@pytest.mark.parametrize("same_tokens", [True, False])
def test_the_mask_of_keys_is_contiguous(same_tokens):
    assert packing.padded_batch(torch.ones(4, 3, dtype=torch.bool).T, 4, same_tokens=same_tokens).key_mask.is_contiguous()


@pytest.mark.parametrize("seed", range(5))
def test_tokens_and_back(seed):
    mask = random_masks(14, 11, seed)
    hidden = torch.randn(14, 11, 3, dtype=torch.float64, requires_grad=True)
    indices, cu_seqlens = packing.token_indices(mask, mask.sum(1, dtype=torch.int32))
    packed = hidden.flatten(0, 1)[indices]
    assert torch.equal(packed, hidden[mask])
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.diff().tolist() == mask.sum(1).tolist()
    padded = packing.pad_input(packed, indices, 14, 11)
    assert torch.equal(padded, hidden * mask[..., None])
    gradient = torch.randn_like(padded)
    assert torch.equal(torch.autograd.grad(padded, hidden, gradient)[0], gradient * mask[..., None])

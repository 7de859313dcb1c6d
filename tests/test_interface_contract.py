"""The attention and the mask function by themselves: arguments honoured or refused, masks of every origin, dtypes, notices."""

import functools
import gc
import importlib
import sys
import weakref
from types import ModuleType, SimpleNamespace

import pytest
import tiny_models as tiny
import torch
import torch.nn.functional as F
from tiny_models import BATCH, DTYPES, SEQLEN, VERSION
from transformers import DynamicCache, MistralConfig, Qwen2MoeConfig, StaticCache, masking_utils
from transformers.models.mistral import modeling_mistral  # noqa: F401 - for the source of its layers

import hf_flash2
from hf_flash2 import interface, masks, packing, tracing

pytestmark = pytest.mark.timeout(60)
DTYPE = DTYPES[0]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}[DTYPE]
NEEDS_5 = pytest.mark.skipif(VERSION < (5, 0), reason="Transformers 5")


class Layer(torch.nn.Module):
    """As much of an attention layer as the attention function looks at."""

    def __init__(self, is_causal: bool = True, **attributes):
        super().__init__()
        self.is_causal, self.layer_idx = is_causal, 0
        for name, value in attributes.items():
            setattr(self, name, value)


def qkv(device, seqlen_q=SEQLEN, seqlen_k=SEQLEN, heads=4, heads_k=2, head_dim=16, dtype=DTYPE, batch=BATCH):
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, heads, seqlen_q, head_dim), (batch, heads_k, seqlen_k, head_dim), (batch, heads_k, seqlen_k, head_dim))
    return [(2 * torch.randn(shape, generator=generator)).to(device, dtype) for shape in shapes]


def expected(q, k, v, visible: torch.Tensor, scaling=None, sinks: torch.Tensor | None = None, softcap: float | None = None) -> torch.Tensor:
    """[B, Sq, H, D], by the formula, in float32 at least. visible: bool, broadcast to [B, H, Sq, Sk]. Rows that see nothing are 0. sinks:
    [H]"""
    dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1).to(dtype) for x in (k, v))
    scores = q.to(dtype) @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = (torch.tanh(scores / softcap) * softcap if softcap else scores).masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)), -1)
    probabilities = scores.softmax(-1).nan_to_num(0.0)
    return (probabilities[..., : v.shape[2]] @ v).transpose(1, 2)


def causal_band(seqlen_q=SEQLEN, seqlen_k=SEQLEN, device="cpu") -> torch.Tensor:
    return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device).tril(seqlen_k - seqlen_q)


def attention(module, q, k, v, mask=None, **kwargs) -> torch.Tensor:
    out, weights = interface.hf_flash2_attention(module, q, k, v, mask, **kwargs)
    assert weights is None
    return out


def assert_close(found, wanted, rows=None) -> None:
    if rows is not None:
        found, wanted = found[rows], wanted[rows]
    torch.testing.assert_close(found.float(), wanted.float(), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.fixture
def notices(caplog):
    """What hf_flash2 has logged so far in this test."""
    hf_flash2.notices._noticed.clear()
    return lambda: [record.message for record in caplog.records if record.name == "hf_flash2"]


# -------------------------------------------------------------------------------------------------------------------------------- arguments


def test_causality_comes_from_the_call_then_from_the_module(device):
    q, k, v = qkv(device)
    causal, full = expected(q, k, v, causal_band(device=device)), expected(q, k, v, torch.tensor(True, device=device))
    assert_close(attention(Layer(), q, k, v), causal)
    assert_close(attention(Layer(is_causal=False), q, k, v), full)
    assert_close(attention(Layer(), q, k, v, is_causal=False), full)
    assert_close(attention(Layer(is_causal=False), q, k, v, is_causal=True), causal)
    assert_close(attention(torch.nn.Identity(), q, k, v), causal)  # nobody says anything


def test_gpt2_of_transformers_4_is_causal_and_scaled(device):
    """It says is_causal=False beside a padding mask, and nothing about its scale."""
    q, k, v = qkv(device, heads_k=4)
    flags = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": True}
    layer = Layer(is_cross_attention=False, head_dim=16, layer_idx=3, **flags)
    mask = tiny.attention_mask("right", device).bool()
    wanted = expected(q, k, v, causal_band(device=device) & mask[:, None, None, :], 16**-0.5 / 4)
    assert_close(attention(layer, q, k, v, mask, is_causal=False), wanted, mask)
    cross = Layer(is_cross_attention=True, head_dim=16, scale_attn_weights=False, scale_attn_by_inverse_layer_idx=False)
    assert_close(attention(cross, q, k, v, None, is_causal=True), expected(q, k, v, torch.tensor(True, device=device), 1.0))


def test_a_mask_of_ours_knows_its_causality_better(device):
    """Moonshine says is_causal=False whenever there is a mask."""
    given = tiny.attention_mask("right", device).bool()
    arguments = mask_arguments(device, SEQLEN, 0, kv_length=SEQLEN, mask_function=masking_utils.causal_mask_function)
    mask = masks.hf_flash2_mask(**arguments, attention_mask=given)
    q, k, v = qkv(device)
    wanted = expected(q, k, v, causal_band(device=device) & given[:, None, None, :])
    assert_close(attention(Layer(), q, k, v, mask, is_causal=False), wanted, given)


@pytest.mark.parametrize("causal", [True, False])
def test_a_mask_of_ours_may_be_spread_over_heads_and_queries(causal, device):
    """As LightGlue does, which swaps the masks of two images; its layers say is_causal=True and see both sides."""
    given = tiny.attention_mask("right", device).bool()
    pattern = getattr(masking_utils, f"{'causal' if causal else 'bidirectional'}_mask_function", None)
    if pattern is None:
        pytest.skip("this Transformers has no bidirectional pattern")
    mask = masks.hf_flash2_mask(**mask_arguments(device, SEQLEN, 0, kv_length=SEQLEN, mask_function=pattern), attention_mask=given)
    q, k, v = qkv(device)
    visible = causal_band(device=device) if causal else torch.tensor(True, device=device)
    found = attention(Layer(), q, k, v, mask.reshape(BATCH, 1, 1, SEQLEN))
    assert_close(found, expected(q, k, v, visible & given[:, None, None, :]), given)


@pytest.mark.parametrize("first", [5, SEQLEN], ids=["two documents", "one"])
def test_a_mask_of_documents_knows_it_too(first, device):
    """Without a cache, Transformers looks for documents in position_ids: mostly there is one, and then no mask is left."""
    number = (torch.arange(SEQLEN, device=device) >= first).int().unsqueeze(0)
    mask_function = masking_utils.and_masks(masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(number))
    mask = masks.hf_flash2_mask(**mask_arguments(device, SEQLEN, 0, kv_length=SEQLEN, mask_function=mask_function))
    q, k, v = qkv(device)
    wanted = expected(q, k, v, causal_band(device=device) & (number[:, None, :, None] == number[:, None, None, :]))
    assert_close(attention(Layer(), q, k, v, mask, is_causal=False), wanted)


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_of_w_tokens_includes_the_token_itself(causal, device):
    q, k, v = qkv(device)
    distance = torch.arange(SEQLEN, device=device) - torch.arange(SEQLEN, device=device).unsqueeze(1)
    visible = (distance > -4) & (distance <= 0 if causal else distance < 4)
    assert_close(attention(Layer(), q, k, v, is_causal=causal, sliding_window=4), expected(q, k, v, visible))
    for padding in ("left", "right", "holes"):
        mask = tiny.attention_mask(padding, device).bool()
        wanted = expected(q, k, v, visible & mask[:, None, None, :])
        assert_close(attention(Layer(), q, k, v, mask, is_causal=causal, sliding_window=4), wanted, mask)


class DiffusionGemmaDecoderTextAttention(Layer):
    """Known by its name."""


def test_a_layer_that_hands_on_the_window_of_an_encoder_has_none(device):
    q, k, v = qkv(device)
    found = attention(DiffusionGemmaDecoderTextAttention(), q, k, v, sliding_window=4)
    assert_close(found, expected(q, k, v, causal_band(device=device)))


def test_queries_are_the_last_keys(device):
    q, k, v = qkv(device, seqlen_q=3)
    assert_close(attention(Layer(), q, k, v), expected(q, k, v, causal_band(3, device=device)))


def test_the_tensors_are_not_copied(device, monkeypatch):
    seen = []
    monkeypatch.setattr(interface, "flash_attn_func", lambda q, k, v, *args, **kwargs: seen.extend((q, k, v)) or torch.zeros_like(q))
    fused = torch.randn(BATCH, SEQLEN, 3, 4, 16, device=device, dtype=DTYPE)  # as GPT-2's c_attn makes them
    q, k, v = (x.transpose(1, 2) for x in fused.unbind(2))
    attention(Layer(), q, k, v)
    assert [x.data_ptr() for x in seen] == [x.data_ptr() for x in (q, k, v)]
    assert all(x.shape == (BATCH, SEQLEN, 4, 16) for x in seen)


@pytest.mark.parametrize(
    ("name", "argument"),
    [("position_bias", torch.zeros(1, 4, SEQLEN, SEQLEN)), ("head_mask", torch.ones(4)), ("sinks", torch.zeros(4)),
     ("indices", torch.zeros(1)), ("something_new", True), ("read_index", torch.zeros(1)), ("block_table", torch.zeros(1, 1))],
)  # fmt: skip
def test_arguments_that_change_the_result_are_refused(name, argument, device):
    q, k, v = qkv(device)
    with pytest.raises(ValueError, match=f"Layer passes {name} to its attention.*leave it out.*eager"):
        attention(Layer(), q, k, v, **{name: argument})
    attention(Layer(), q, k, v, **{name: None})


def on_route(route: str, device) -> tuple[dict, torch.Tensor, torch.Tensor | None]:
    """What a layer is given to be "dense", "padded", of "documents" (in one row), or under a "4-D mask", also of documents; what its
    queries see then; and which rows are real, None for all."""
    visible, rows = causal_band(device=device)[None, None], None
    kwargs: dict = {}
    if "documents" in route:
        bounds = torch.tensor([0, 5, SEQLEN], dtype=torch.int32, device=device)
        kwargs |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": SEQLEN, "max_length_k": SEQLEN}
        number = torch.arange(SEQLEN, device=device) >= 5
        visible = visible & (number[:, None] == number)
    if route == "padded":
        kwargs["mask"] = rows = tiny.attention_mask("left", device).bool()
        visible = visible & rows[:, None, None, :]
    if "4-D" in route:
        batch = 1 if "documents" in route else BATCH
        kwargs["mask"] = visible = visible.expand(batch, 1, SEQLEN, SEQLEN) & (torch.arange(SEQLEN, device=device) != 3)
    return kwargs, visible, rows


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("route", ["dense", "padded", "documents", "4-D mask", "documents under a 4-D mask", "float64 documents"])
def test_sinks_and_caps_hold_on_every_route(route, softcap, device):
    """Kernels, and torch where the mask is no plain pattern, or the dtype (of a GPU) not ours; the gradient of sinks, too."""
    q, k, v = qkv(device, batch=1 if "documents" in route else BATCH)
    if route == "float64 documents":
        q, k, v = (x.double() for x in (q, k, v))
    sinks = torch.tensor([2.0, -1.0, 30.0, 0.5], device=device, dtype=DTYPE).requires_grad_()
    kwargs, visible, rows = on_route(route, device)
    out = attention(Layer(), q, k, v, s_aux=sinks, softcap=softcap, **kwargs)
    wanted = expected(q, k, v, visible, sinks=sinks, softcap=softcap)
    assert_close(out, wanted, rows)
    given = torch.randn_like(wanted) if rows is None else torch.randn_like(wanted) * rows[:, :, None, None]
    found, truth = (torch.autograd.grad(x, sinks, given.to(x.dtype), retain_graph=True)[0] for x in (out, wanted))
    torch.testing.assert_close(found.float(), truth.float(), rtol=3 * TOLERANCE, atol=3 * TOLERANCE)


@pytest.mark.parametrize("head_dim", [4, 16])
@pytest.mark.parametrize("route", ["dense", "padded", "documents", "4-D mask", "capped under a 4-D mask"])
def test_heads_can_be_viewed_as_one_dimension(route, head_dim, device):
    """As the layers of AFMoE, JetMoE and Florence-2 do, also where kernels have been given wider heads, or torch attends."""
    q, k, v = qkv(device, head_dim=head_dim, batch=1 if route == "documents" else BATCH)
    softcap = 3.0 if "capped" in route else None
    kwargs, visible, rows = on_route(route, device)
    out = attention(Layer(), q, k, v, softcap=softcap, **kwargs)
    assert_close(out.view(*out.shape[:2], -1), expected(q, k, v, visible, softcap=softcap).flatten(2), rows)


def pages(device, lengths: list[int]) -> tuple[list[torch.Tensor], dict]:
    """q, k, v of a new token of each sequence, and what continuous batching hands on with them. Lengths include it; 0 is no sequence."""
    tensors = qkv(device, len(lengths), len(lengths), batch=1)
    k_cache, v_cache = (torch.randn(2 * len(lengths), 128, 2, 16, device=device).to(DTYPE) for _ in range(2))
    table = torch.randperm(2 * len(lengths), device=device).view(len(lengths), 2).int()
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    given = {"block_table": table, "k_cache": k_cache, "v_cache": v_cache, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    return tensors, given | {"max_length_q": 1, "max_length_k": 1}


@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}, {"scaling": 0.5}, {"softcap": 3.0}, {"s_aux": None}], ids=str)
def test_a_step_from_pages(options, device):
    """The new tokens are written behind those of their sequences, and each sees all of its own: as much as any other argument lets it."""
    lengths = [7, 130, 0, 256, 128]
    (q, k, v), given = pages(device, lengths)
    more = {name: torch.cat((given[name], given[name][-1:])) for name in ("block_table", "cu_seq_lens_q", "cu_seq_lens_k")}
    if "s_aux" in options:
        options = {"s_aux": torch.tensor([2.0, -1.0, 30.0, 0.5], device=device, dtype=DTYPE)}
    layer = Layer()
    setattr(layer, hf_flash2.notices.CALLS, calls := hf_flash2.notices.Calls())
    out = attention(layer, q, k, v, **given | more, **options)  # tables of more sequences than there are
    assert calls == {"documents": 1} and calls.backend == hf_flash2.last_backend()
    assert out.shape == (1, len(lengths), 4, 16) and not out[:, 2].any()
    for i, length in enumerate(lengths):
        if length == 0:
            continue
        rows = [given[f"{name}_cache"][given["block_table"][i].long()].flatten(0, 1)[:length] for name in "kv"]
        for row, new in zip(rows, (k, v), strict=True):
            assert torch.equal(row[-1], new[0, :, i])
        visible = torch.arange(length, device=device) >= length - options.get("sliding_window", length)
        names = {"scaling": "scaling", "softcap": "softcap", "s_aux": "sinks"}
        others = {theirs: options[ours] for ours, theirs in names.items() if ours in options}
        keys, values = (row.transpose(0, 1).unsqueeze(0) for row in rows)
        assert_close(out[:, i : i + 1], expected(q[:, :, i : i + 1], keys, values, visible, **others))


def test_what_was_read_from_a_paged_cache_needs_no_mask(device):
    """That of its forward is of the queries alone."""
    q, k, v = qkv(device, batch=1, seqlen_q=5)
    bounds_q, bounds_k = (torch.tensor(bounds, dtype=torch.int32, device=device) for bounds in ([0, 2, 5], [0, 7, SEQLEN]))
    given = {"cu_seq_lens_q": bounds_q, "cu_seq_lens_k": bounds_k, "max_length_q": 3, "max_length_k": 7}
    given |= {name: torch.arange(5, device=device) for name in ("read_index", "write_index")}
    mask = torch.ones(1, 5, dtype=torch.bool, device=device)
    found = attention(Layer(config=SimpleNamespace()), q, k, v, mask, **given)
    wanted = [
        expected(q[:, :, q0:q1], k[:, :, k0:k1], v[:, :, k0:k1], causal_band(q1 - q0, k1 - k0, device))
        for q0, q1, k0, k1 in ((0, 2, 0, 7), (2, 5, 7, SEQLEN))
    ]
    assert_close(found, torch.cat(wanted, 1))


class PagedCacheBefore523:
    """Which is given where to read and write, and gives back all that the batch reads, tokens first."""

    def __init__(self, k, v):
        self.read = k[0].transpose(0, 1), v[0].transpose(0, 1)

    def update(self, key_states, value_states, layer_idx, read_index, write_index):
        assert (layer_idx, read_index, write_index) == (0, "read", "write")
        return self.read


@pytest.mark.parametrize("window", [None, 3])
def test_a_paged_cache_that_says_lengths_by_the_type_of_layer(window, device):
    q, k, v = qkv(device, batch=1, seqlen_q=5)
    bounds_q, *bounds_k = (torch.tensor(b, dtype=torch.int32, device=device) for b in ([0, 2, 5], [0, 7, SEQLEN], [0, 4, SEQLEN]))
    kinds = ("full_attention", "sliding_attention")
    given = {"cu_seq_lens_q": bounds_q, "cu_seq_lens_k": dict(zip(kinds, bounds_k, strict=True)), "max_seqlen_q": 3}
    given |= {"max_seqlen_k": dict(zip(kinds, (7, 8), strict=True)), "read_index": "read", "write_index": "write"}
    layer = Layer(config=SimpleNamespace(), sliding_window=window)
    found = attention(layer, q, k[:, :, :5], v[:, :, :5], cache=PagedCacheBefore523(k, v), sliding_window=window, **given)
    end = 4 if window else 7
    for q0, q1, k0, k1 in ((0, 2, 0, end), (2, 5, end, SEQLEN)):
        visible = causal_band(q1 - q0, k1 - k0, device)
        visible = visible.triu(k1 - k0 - (q1 - q0) + 1 - window) if window else visible
        assert_close(found[:, q0:q1], expected(q[:, :, q0:q1], k[:, :, k0:k1], v[:, :, k0:k1], visible))


def test_a_step_from_pages_of_another_dtype(device):
    """A cache in a half type beside a float32 query, as layer norms in float32 leave it."""
    (q, k, v), given = pages(device, [7, 130])
    half = {name: given[name].half() for name in ("k_cache", "v_cache")}
    tensors = [x.half() for x in (q, k, v)]
    wanted = attention(Layer(), *tensors, **given | {name: x.clone() for name, x in half.items()})
    out = attention(Layer(), *(x.float() for x in tensors), **given | half)
    assert out.dtype == torch.float32 and torch.equal(out, wanted.float())


def test_pages_that_cannot_be_decoded_from_say_what_to_do(device):
    (q, k, v), given = pages(device, [3, 4])
    with pytest.raises(ValueError, match=r"Layer was given a block_table without k_cache .*max_blocks_per_request=0"):
        attention(Layer(), q, k, v, **given | {"k_cache": None})
    with pytest.raises(ValueError, match=r"Layer was given a block_table without k_cache and v_cache"):
        attention(Layer(), q, k, v, **given | {"v_cache": None})
    refused = [(128, 520, "head_dim must .* got 520"), (64, 16, "pages must hold a multiple of 128 tokens, got 64")]
    if device.type == "cuda":  # the reference takes any head dim
        refused.append((128, 20, r"the head dim and the strides of k_cache must be multiples of 8.* got \[4, 128, 2, 20\]"))
    for tokens, head_dim, reason in refused:
        caches = {name: torch.zeros(4, tokens, 2, head_dim, device=device, dtype=DTYPE) for name in ("k_cache", "v_cache")}
        new = (torch.zeros(*x.shape[:3], head_dim, device=device, dtype=DTYPE) for x in (q, k, v))
        with pytest.raises(ValueError, match=f"Layer cannot decode from pages: .*{reason}.*max_blocks_per_request=0"):
            attention(Layer(), *new, **given | caches)


def test_harmless_arguments_are_ignored(device):
    q, k, v = qkv(device)
    kwargs = {
        "use_cache": True,
        "output_attentions": False,
        "num_items_in_batch": torch.tensor(3),
        "position_ids": None,
        "cache_position": None,
        "guidance_scale": 5.0,  # Janus, while it generates an image
        "ignore_index": -1,  # of the loss
        "image_sizes": torch.tensor([[16, 16]]),  # InternVL and others
        "original_sizes": torch.tensor([[16, 16]]),  # what the processors of SAM 2 and 3 return beside the pixels
        "offset_mapping": torch.zeros(BATCH, SEQLEN, 2),  # this and the next two: what tokenizers return beside the tokens
        "overflow_to_sample_mapping": torch.arange(BATCH),
        "special_tokens_mask": torch.zeros(BATCH, SEQLEN),
        "token_embeddings": torch.zeros(BATCH, SEQLEN, 8),  # this and the next three: of one model of Sentence Transformers, to the next
        "sentence_embedding": torch.zeros(BATCH, 8),
        "token_weights_sum": torch.zeros(BATCH),
        "all_layer_embeddings": (torch.zeros(BATCH, SEQLEN, 8),),
        "return_shared_kv_states": True,  # Gemma 4, for its assistant
        "vision_feature_layer": [-2],  # Molmo 2
    }
    assert_close(attention(Layer(), q, k, v, **kwargs), expected(q, k, v, causal_band(device=device)))


def test_a_cache_that_the_layer_has_updated_is_ignored(device):
    q, k, v = qkv(device)
    found = attention(Layer(), q, k, v, cache=DynamicCache())
    assert_close(found, expected(q, k, v, causal_band(device=device)))


def test_attention_probabilities_are_not_promised(notices, device):
    q, k, v = qkv(device)
    for _ in range(2):
        attention(Layer(), q, k, v, output_attentions=True)
    [notice] = notices()
    assert 'use attn_implementation="eager"' in notice


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_shapes_on_the_meta_device(dtype):
    q, k, v = (x.to("meta", dtype) for x in qkv("cpu", batch=1))
    out = attention(Layer(), q, k, v, position_ids=torch.arange(SEQLEN, device="meta")[None])
    assert out.shape == q.transpose(1, 2).shape


def test_deterministic_reaches_the_kernel(device, monkeypatch):
    seen = []
    monkeypatch.setattr(interface, "flash_attn_func", lambda q, *args, deterministic, **kwargs: seen.append(deterministic) or q)
    for asked in (True, False, None):
        attention(Layer(), *qkv(device), deterministic=asked)
    assert seen == [True, False, False]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("head_dim", [16, 520], ids=["kernel", "sdpa"])
def test_dropout_is_handed_on(head_dim, softcap, device):
    q, k, v = qkv(device, head_dim=head_dim)
    torch.manual_seed(1)
    dropped = attention(Layer(), q, k, v, dropout=0.5, softcap=softcap)
    assert not torch.allclose(dropped, attention(Layer(), q, k, v, softcap=softcap))
    torch.manual_seed(1)
    assert torch.equal(dropped, attention(Layer(), q, k, v, dropout=0.5, softcap=softcap))


# ------------------------------------------------------------------------------------------------------------------------------------ masks


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
@pytest.mark.parametrize("padding", ["left", "right", "holes", "empty"])
def test_a_mask_the_model_hands_on_as_it_came(padding, dtype, device):
    q, k, v = qkv(device)
    mask = tiny.attention_mask(padding, device)
    wanted = expected(q, k, v, causal_band(device=device) & mask.bool()[:, None, None, :])
    assert_close(attention(Layer(), q, k, v, mask.to(dtype)), wanted, mask.bool())


@pytest.mark.parametrize("padding", ["left", "right", "holes"])
def test_a_mask_shorter_than_a_static_cache(padding, device):
    """It ends with the queries; the slots behind are empty."""
    q, k, v = qkv(device, seqlen_q=3, seqlen_k=SEQLEN + 4)
    mask = tiny.attention_mask(padding, device)
    visible = causal_band(3, device=device) & mask.bool()[:, None, None, :]
    wanted = expected(q, k[:, :, :SEQLEN], v[:, :, :SEQLEN], visible)
    assert_close(attention(Layer(), q, k, v, mask), wanted, mask.bool()[:, -3:])


@pytest.mark.parametrize("keys", [5, SEQLEN // 2], ids=["longer", "twice as long"])
def test_a_mask_longer_than_a_sliding_cache(keys, device):
    q, k, v = qkv(device, seqlen_q=1, seqlen_k=keys)
    mask = tiny.attention_mask("left", device)
    wanted = expected(q, k, v, mask.bool()[:, None, None, -keys:])
    assert_close(attention(Layer(), q, k, v, mask), wanted)


def test_a_mask_of_two_tokens_in_bytes(device):
    """Two columns are no two planes."""
    q, k, v = qkv(device, seqlen_q=2, seqlen_k=2)
    mask = torch.tensor([[0, 1], [1, 1], [0, 1], [1, 0]], dtype=torch.uint8, device=device)
    wanted = expected(q, k, v, causal_band(2, 2, device) & mask.bool()[:, None, None, :])
    assert_close(attention(Layer(), q, k, v, mask), wanted, mask.bool())


def mask_arguments(device, q_length: int, q_offset: int, **others) -> dict:
    """What Transformers passes to a mask function, in the words of its version."""
    if VERSION < (5, 0):
        return {"batch_size": BATCH, "cache_position": torch.arange(q_offset, q_offset + q_length, device=device)} | others
    return {"batch_size": BATCH, "q_length": q_length, "q_offset": torch.tensor(q_offset, device=device), "device": device} | others


class WithoutAttribute:
    """What is left of a mask after a hook has moved it to another device and back."""

    def __new__(cls, mask):
        return mask.clone()


@pytest.mark.parametrize("lost", [False, True], ids=["attribute kept", "attribute lost"])
@pytest.mark.parametrize("padding", ["dense", "left", "right", "holes", "empty"])
@pytest.mark.parametrize(("q_length", "q_offset"), [(SEQLEN, 0), (5, SEQLEN - 5), (1, SEQLEN - 1)])
def test_a_static_cache(q_length, q_offset, padding, lost, device):
    """Right padding in the prompt leaves empty columns before the queries; only the mask of ours says where the queries are."""
    slots = SEQLEN + 6
    given = tiny.attention_mask(padding, device)
    arguments = mask_arguments(device, q_length, q_offset, kv_length=slots, mask_function=masking_utils.causal_mask_function)
    mask = masks.hf_flash2_mask(**arguments, attention_mask=None if given is None else given.bool())
    if lost:
        mask = WithoutAttribute(mask)
        assert not hasattr(mask, masks.ATTRIBUTE)
    q, k, v = qkv(device, seqlen_q=q_length, seqlen_k=slots)
    visible = F.pad(causal_band(SEQLEN, device=device)[q_offset:], (0, 6)).expand(BATCH, 1, -1, -1)
    rows = torch.ones(BATCH, q_length, dtype=torch.bool, device=device)
    if given is not None:
        visible, rows = visible & F.pad(given.bool(), (0, 6))[:, None, None, :], given.bool()[:, q_offset:]
    assert_close(attention(Layer(), q, k, v, mask), expected(q, k, v, visible), rows)


def test_the_offset_of_a_static_cache_may_change_after_the_mask_is_made(device):
    """Its layers count it up in place before the first of them attends."""
    offset = torch.tensor(2, device=device)
    arguments = {"batch_size": BATCH, "q_length": 3, "q_offset": offset, "kv_length": 9, "device": device}
    mask = masks.hf_flash2_mask(**arguments, mask_function=masking_utils.causal_mask_function)
    offset += 3
    q, k, v = qkv(device, seqlen_q=3, seqlen_k=9)
    visible = torch.ones(3, 9, dtype=torch.bool, device=device).tril(2)
    assert_close(attention(Layer(), q, k, v, mask), expected(q, k, v, visible))


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("lost", [False, True], ids=["attribute kept", "attribute lost"])
def test_a_step_that_says_it_is_not_causal_sees_no_empty_slots(lost, tokens, device):
    """As Moonshine does for single tokens; a mask that has been moved has only its columns left."""
    given = tiny.attention_mask("left", device).bool()
    arguments = mask_arguments(device, tokens, 7, kv_length=SEQLEN, mask_function=masking_utils.causal_mask_function)
    mask = masks.hf_flash2_mask(**arguments, attention_mask=given)
    q, k, v = qkv(device, seqlen_q=tokens)
    visible = causal_band(tokens, 7 + tokens, device) & given[:, None, None, : 7 + tokens]
    wanted = expected(q, k[:, :, : 7 + tokens], v[:, :, : 7 + tokens], visible)
    assert_close(attention(Layer(), q, k, v, WithoutAttribute(mask) if lost else mask, is_causal=False), wanted, given[:, 7 : 7 + tokens])


def test_a_mask_of_ours_may_come_back_to_the_mask_function(device):
    """`generate` makes the mask of a static cache ahead of the model, which makes it again from what it is given, as bool."""
    given = tiny.attention_mask("right", device).bool()
    arguments = mask_arguments(device, 2, SEQLEN - 2, kv_length=SEQLEN + 3, mask_function=masking_utils.causal_mask_function)
    once = masks.hf_flash2_mask(**arguments, attention_mask=given)
    twice = masks.hf_flash2_mask(**arguments, attention_mask=WithoutAttribute(once).bool())
    assert torch.equal(once, twice)


@pytest.mark.parametrize("lost", [False, True], ids=["attribute kept", "attribute lost"])
def test_a_sliding_cache_takes_the_columns_it_still_holds(lost, device):
    q, k, v = qkv(device, seqlen_q=2, seqlen_k=6)
    given = tiny.attention_mask("holes", device).bool()
    arguments = mask_arguments(
        device, 2, SEQLEN - 2, kv_length=6, kv_offset=SEQLEN - 6, mask_function=masking_utils.sliding_window_causal_mask_function(5)
    )
    mask = masks.hf_flash2_mask(**arguments, attention_mask=given, config=MistralConfig(sliding_window=5))
    assert torch.equal(mask, given[:, -6:])
    visible = causal_band(2, 6, device) & causal_band(2, 6, device).flip(0, 1) & given[:, None, None, -6:]
    found = attention(Layer(), q, k, v, WithoutAttribute(mask) if lost else mask, sliding_window=5)
    assert_close(found, expected(q, k, v, visible), given[:, -2:])


def test_no_mask_when_nothing_is_padded(device):
    for mask_function in (masking_utils.causal_mask_function, masking_utils.sliding_window_causal_mask_function(3), None):
        arguments = {
            "batch_size": BATCH,
            "q_length": 4,
            "q_offset": 3,
            "kv_length": 7,
            "device": device,
            "config": MistralConfig(sliding_window=3),
        }
        assert masks.hf_flash2_mask(**arguments, mask_function=mask_function) is None
        assert masks.hf_flash2_mask(**arguments | {"kv_length": 5, "kv_offset": 2}, mask_function=mask_function) is None


@pytest.mark.parametrize("config", [None, MistralConfig()], ids=["code in the mask", "no code"])
def test_a_mask_is_freed_at_once(config, device):
    """Programs that train with the garbage collector switched off would else keep those of every step."""
    gc.collect()
    gc.disable()
    try:
        arguments = mask_arguments(device, SEQLEN, 0, kv_length=SEQLEN, mask_function=masking_utils.causal_mask_function)
        mask = masks.hf_flash2_mask(**arguments, attention_mask=tiny.attention_mask("left", device).bool(), config=config)
        attention(Layer(), *qkv(device), mask)
        kept = weakref.ref(mask)
        del mask
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_a_mask_in_small_integers_that_the_model_hands_on_has_no_code(causal, dtype, compiled, device):
    q, k, v = qkv(device)
    call = torch.compile(attention, backend="eager") if compiled else attention
    given = tiny.attention_mask("right", device)
    visible = (causal_band(device=device) if causal else torch.ones(SEQLEN, SEQLEN, dtype=torch.bool, device=device)) & given.bool()[
        :, None, None
    ]
    assert_close(call(Layer(causal), q, k, v, given.to(dtype)), expected(q, k, v, visible), given.bool())


def test_the_mask_the_user_gave_is_neither_changed_nor_marked(device):
    given = tiny.attention_mask("left", device).bool()
    before = given.clone()
    arguments = mask_arguments(device, SEQLEN, 0, kv_length=SEQLEN, mask_function=masking_utils.causal_mask_function)
    mask = masks.hf_flash2_mask(**arguments, attention_mask=given)
    assert torch.equal(given, before) and not hasattr(given, masks.ATTRIBUTE)
    mask.zero_()
    assert torch.equal(given, before)


def test_nothing_of_a_compiled_graph_stays_on_a_mask_made_before(device):
    given = tiny.attention_mask("left", device).bool()
    arguments = mask_arguments(device, 1, 7, kv_length=SEQLEN, mask_function=masking_utils.causal_mask_function)
    mask = masks.hf_flash2_mask(**arguments, attention_mask=given)
    q, k, v = qkv(device, seqlen_q=1)
    layer = Layer()
    compiled = torch.compile(lambda: attention(layer, q, k, v, mask), backend="eager", fullgraph=True)()
    assert getattr(mask, masks.ATTRIBUTE)._derived == {}
    assert_close(compiled, attention(layer, q, k, v, mask))


def test_what_a_mask_says_by_its_strides():
    whole = torch.ones((), dtype=masks._CAUSAL).expand(2, 5)
    assert masks.Sequences.read(whole, 5, 5).whole and masks.Sequences.read(whole[:, :3].detach(), 3, 3).whole
    assert not masks.Sequences.read(whole, 5, 7).whole, "the last two keys are none"
    one_column = torch.tensor([[1], [0]], dtype=torch.uint8).as_strided((2, 1), (1, 0)).to(masks._CAUSAL)
    assert one_column.stride() == (1, 0)
    for mask in (whole.contiguous(), whole.bool(), one_column):
        assert not masks.Sequences.read(mask, mask.shape[1], mask.shape[1]).whole


def test_a_layer_with_other_keys_than_the_mask_is_refused(device):
    arguments = mask_arguments(device, SEQLEN, 0, kv_length=SEQLEN, mask_function=masking_utils.causal_mask_function)
    mask = masks.hf_flash2_mask(**arguments, attention_mask=tiny.attention_mask("left", device).bool())
    q, k, v = qkv(device, seqlen_k=SEQLEN - 2)
    with pytest.raises(ValueError, match="describes 12 keys, but the layer has 10"):
        attention(Layer(), q, k, v, mask)


@pytest.mark.parametrize("columns", [1, SEQLEN - 5, SEQLEN + 1])
def test_a_mask_of_another_width_than_the_tokens_says_how_wide_it_has_to_be(columns, device):
    mask = torch.ones(tiny.BATCH, columns, dtype=torch.int64, device=device)
    mask[0, 0] = 0
    model, inputs = tiny.model("llama", device=device), {"input_ids": tiny.tokens(device), "use_cache": False}
    if VERSION < (5, 0):  # Transformers 4 itself cuts it, or fills it up with zeros, whatever the implementation
        as_wide = torch.nn.functional.pad(mask, (0, SEQLEN - columns))
        assert torch.equal(model(**inputs, attention_mask=mask).logits, model(**inputs, attention_mask=as_wide).logits)
        return
    expected = f"describes {columns} keys, but the layer has {SEQLEN}; an attention_mask has to be as wide as input_ids"
    with pytest.raises(ValueError, match=expected):
        model(**inputs, attention_mask=mask)


@pytest.mark.skipif(VERSION < (5, 0), reason="Transformers 4 fills it up with zeros itself")
@pytest.mark.parametrize("past", [0, 5])
def test_a_mask_that_ends_before_the_last_query_is_refused(past, device):
    """Its queries behind the end would be zero as padding; eager computes them."""
    model, tokens = tiny.model("llama", device=device), tiny.tokens(device)
    mask = tiny.attention_mask("left", device)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        if past:
            model(tokens[:, :past], attention_mask=mask[:, :past], past_key_values=cache)
        with pytest.raises(ValueError, match=f"ends at column {SEQLEN - 2}, its queries at {SEQLEN}; an attention_mask has to be as wide"):
            model(tokens[:, past:], attention_mask=mask[:, :-2], past_key_values=cache)


@pytest.mark.parametrize("cached", ["dynamic", "static"])
@pytest.mark.parametrize("columns", [0, 2])
def test_columns_without_keys_are_left_out_and_said_to_be(columns, cached, notices, device):
    """As eager leaves them out; without a cache they are refused. A static cache has slots for them."""
    model, tokens = tiny.model("llama", device=device), tiny.tokens(device)
    mask = tiny.attention_mask("left", device)
    as_wide = torch.nn.functional.pad(mask, (0, columns), value=1)
    make_cache = {"dynamic": DynamicCache, "static": lambda config: StaticCache(config=config, max_cache_len=SEQLEN + 4)}[cached]
    with torch.no_grad():
        expected = model(tokens, attention_mask=mask, past_key_values=make_cache(config=model.config)).logits
        logits = model(tokens, attention_mask=as_wide, past_key_values=make_cache(config=model.config)).logits
    assert torch.equal(logits, expected)
    said = [notice for notice in notices() if "more columns than there are keys" in notice]
    assert len(said) == (1 if columns and cached == "dynamic" and VERSION >= (5, 0) else 0)


@pytest.mark.skipif(VERSION < (5, 0), reason="Transformers 4 hands the keyword on")
@pytest.mark.parametrize("by_config", [False, True])
def test_attention_probabilities_that_layers_are_not_told_of_are_not_promised(by_config, notices, device):
    """GPT-2 keeps the keyword to itself, and nobody hands on what a config says."""
    model = tiny.model("llama" if by_config else "gpt2", device=device, dtype=DTYPE)
    model(tiny.tokens(device))
    assert not notices()
    if by_config:
        model.config._output_attentions = True
    outputs = model(tiny.tokens(device), **({} if by_config else {"output_attentions": True}))
    assert not outputs.attentions
    assert 'use attn_implementation="eager"' in notices()[0]


def test_ranges_are_derived_once_for_all_layers(device, monkeypatch):
    made = []
    padded_batch = packing.padded_batch
    monkeypatch.setattr(packing, "padded_batch", lambda *args, **kwargs: made.append(1) or padded_batch(*args, **kwargs))
    model = tiny.model("llama", device=device, dtype=DTYPE, num_hidden_layers=4)
    with torch.no_grad():
        model(input_ids=tiny.tokens(device), attention_mask=tiny.attention_mask("left", device))
    assert len(made) == 1


@pytest.mark.parametrize("tokens", [1, SEQLEN])
def test_ranges_of_a_copied_mask_are_derived_once_too(tokens, device, monkeypatch):
    """That of a static cache, as accelerate moves it to another GPU before the first layer."""
    made = []
    padded_batch = packing.padded_batch
    monkeypatch.setattr(packing, "padded_batch", lambda *args, **kwargs: made.append(1) or padded_batch(*args, **kwargs))
    arguments = mask_arguments(device, tokens, 0, kv_length=SEQLEN + 4, mask_function=masking_utils.causal_mask_function)
    mask = WithoutAttribute(masks.hf_flash2_mask(**arguments))
    q, k, v = qkv(device, seqlen_q=tokens, seqlen_k=SEQLEN + 4)
    for _ in range(3):
        attention(Layer(), q, k, v, mask)
    assert len(made) == 1


def test_documents_of_a_copied_mask_are_looked_at_once_too(device, monkeypatch):
    made = []
    find = packing.documents_from_starts
    monkeypatch.setattr(packing, "documents_from_starts", lambda starts: made.append(1) or find(starts))
    number = (torch.arange(SEQLEN, device=device) >= 5).int().unsqueeze(0)
    mask_function = masking_utils.and_masks(masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(number))
    arguments = mask_arguments(device, SEQLEN, 0, kv_length=SEQLEN, mask_function=mask_function, config=MistralConfig())
    mask = WithoutAttribute(masks.hf_flash2_mask(**arguments))
    assert mask.dtype == torch.uint8
    for _ in range(3):
        attention(Layer(), *qkv(device), mask)
    assert len(made) == 1


@pytest.mark.parametrize("padding", ["left", "right", "holes"])
@pytest.mark.parametrize("causal", [True, False])
def test_layers_under_one_mask_may_have_other_windows_and_queries(causal, padding, device):
    """What was derived for one of them is not what another needs."""
    given = tiny.attention_mask(padding, device).bool()
    mask_function = masking_utils.causal_mask_function if causal else getattr(masking_utils, "bidirectional_mask_function", None)
    if mask_function is None:
        pytest.skip("Transformers 5")
    mask = masks.hf_flash2_mask(**mask_arguments(device, SEQLEN, 0, kv_length=SEQLEN, mask_function=mask_function), attention_mask=given)
    q, k, v = qkv(device)
    distance = torch.arange(SEQLEN, device=device) - torch.arange(SEQLEN, device=device).unsqueeze(1)
    full = (distance <= 0 if causal else distance < SEQLEN) & given[:, None, None, :]
    for window, queries in ((None, SEQLEN), (4, SEQLEN), (4, 3), (None, 3)):
        visible = full & (distance.abs() < (window or SEQLEN))
        found = attention(Layer(causal), q[:, :, -queries:], k, v, mask, sliding_window=window)
        assert_close(found, expected(q, k, v, visible)[:, -queries:], given[:, -queries:])


# ------------------------------------------------------------------------------------------------------------------- patterns and 4-D masks


def everything_visible_before(column: int):
    """A prefix that every token sees, as an overlay some models add to the causal pattern."""
    return lambda batch_idx, head_idx, q_idx, kv_idx: kv_idx < column


def image_overlay(image: torch.Tensor):
    """As Gemma 3's, which takes tensors alone."""

    def inner_mask(batch_idx, head_idx, q_idx, kv_idx):
        return image[torch.where(q_idx < SEQLEN, q_idx, 0)] == image[torch.where(kv_idx < SEQLEN, kv_idx, 0)]

    inner_mask.__module__ = "transformers.models.gemma3.modeling_gemma3"
    return inner_mask


PATTERNS = {
    "prefix": lambda device: masking_utils.or_masks(masking_utils.causal_mask_function, everything_visible_before(4)),
    "all keys, by looking": lambda device: masking_utils.or_masks(
        masking_utils.causal_mask_function, lambda batch_idx, head_idx, q_idx, kv_idx: kv_idx >= q_idx - q_idx
    ),
    "all keys but the first query's": lambda device: masking_utils.or_masks(
        masking_utils.causal_mask_function, lambda batch_idx, head_idx, q_idx, kv_idx: torch.as_tensor(q_idx != 0, device=device)
    ),
    "all keys but the first query's, without a closure": lambda device: masking_utils.or_masks(
        masking_utils.causal_mask_function, lambda batch_idx, head_idx, q_idx, kv_idx: torch.as_tensor(q_idx != 0)
    ),
    "a window of images": lambda device: masking_utils.or_masks(
        masking_utils.sliding_window_causal_mask_function(5), image_overlay(torch.arange(SEQLEN, device=device) // 4)
    ),
    "all keys, but no window of theirs": lambda device: masking_utils.or_masks(
        masking_utils.sliding_window_causal_mask_function(5), lambda *indices: torch.tensor(True, device=device)
    ),
    "chunks": lambda device: masking_utils.chunked_causal_mask_function(4, torch.zeros(BATCH, dtype=torch.int64, device=device)),
    "a causal pattern that is no plain function, and a prefix": lambda device: masking_utils.or_masks(
        functools.partial(masking_utils.causal_mask_function), everything_visible_before(4)
    ),
    "overlay on a window": lambda device: masking_utils.and_masks(
        masking_utils.sliding_window_causal_mask_function(5), lambda batch_idx, head_idx, q_idx, kv_idx: kv_idx != 2
    ),
}


@pytest.mark.parametrize("padding", ["dense", "left"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_other_patterns_go_to_sdpa_and_stay_exact(pattern, padding, notices, device):
    mask_function = PATTERNS[pattern](device)
    given = tiny.attention_mask(padding, device)
    flags = {"use_vmap": True} if VERSION >= (5, 0) else {}
    arguments = mask_arguments(device, SEQLEN, 0, kv_length=SEQLEN, mask_function=mask_function, allow_is_causal_skip=False, **flags)
    mask = masks.hf_flash2_mask(**arguments, attention_mask=None if given is None else given.bool())
    index = torch.arange(SEQLEN, device=device)
    visible = torch.stack([
        torch.stack([torch.stack([mask_function(b, 0, row, column) for column in index]) for row in index]) for b in index[:BATCH]
    ]).unsqueeze(1).to(device)  # fmt: skip
    if given is not None:
        visible = visible & given.bool()[:, None, None, :]
    q, k, v = qkv(device)
    for _ in range(2):
        out = attention(Layer(), q, k, v, mask)
    assert_close(out, expected(q, k, v, visible), tiny.real(given, out))
    assert len(notices()) == 1 and "no plain causal" in notices()[0]


def overlay_of(visible: str, module: str, name: str):
    """What makes an overlay of a window, as a module of this name may define it."""
    scope = {"__name__": module}
    exec(f"def {name}(sliding_window):\n    def inner(b, h, q, k):\n        return {visible}\n    return inner", scope)
    return scope[name]


def causal_mask_function(b, h, q, k):
    """Of the same name as that of Transformers, and no token sees itself."""
    return k < q


MISTRAL = MistralConfig(sliding_window=5)
ALL = lambda *indices: torch.tensor(True)  # noqa: E731
UNIONS_AND_WINDOWS = {  # with layers that hand on a window of 5, and use_vmap where an overlay is no function of tensors alone
    "a window, and images that see themselves": lambda w, both, device: (
        masking_utils.or_masks(w(5), image_overlay(torch.arange(SEQLEN, device=device) // 4)),
        False,
    ),
    "a window, and another of two sides": lambda w, both, device: (masking_utils.or_masks(w(7), both(5)), False),
    "all before, and a window of two sides": lambda w, both, device: (
        masking_utils.or_masks(masking_utils.causal_mask_function, both(5)),
        False,
    ),
    "a window, and all": lambda w, both, device: (masking_utils.or_masks(w(5), ALL), True),
    "a window of two sides, and a prefix": lambda w, both, device: (
        masking_utils.or_masks(w(5), both(5), everything_visible_before(3)),
        True,
    ),
    "a window of somebody's causal pattern, and of two sides": lambda w, both, device: (
        masking_utils.or_masks(masking_utils.and_masks(masking_utils.sliding_window_overlay(5), causal_mask_function), both(5)),
        False,
    ),
    "a causal pattern alone": lambda w, both, device: (masking_utils.or_masks(masking_utils.causal_mask_function), False),
    "half a window": lambda w, both, device: (masking_utils.sliding_window_overlay(5), False),
    "half a window beside documents": lambda w, both, device: (
        masking_utils.and_masks(
            masking_utils.sliding_window_overlay(5), masking_utils.packed_sequence_mask_function(torch.zeros(BATCH, SEQLEN, device=device))
        ),
        True,
    ),
    "half a window of all tokens": lambda w, both, device: (
        masking_utils.and_masks(masking_utils.sliding_window_overlay(5), masking_utils.bidirectional_mask_function),
        False,
    ),
    "somebody's own window": lambda w, both, device: (w(3), False),
    "somebody's own, of all tokens but one": lambda w, both, device: (w(SEQLEN - 1), False),
    "chunks, of all tokens but one": lambda w, both, device: (
        masking_utils.chunked_causal_mask_function(SEQLEN - 1, torch.zeros(BATCH, dtype=torch.int64, device=device)),
        True,
    ),
    "a narrower one": lambda w, both, device: (masking_utils.and_masks(w(5), masking_utils.sliding_window_overlay(3)), False),
}


@NEEDS_5
@pytest.mark.parametrize("pattern", UNIONS_AND_WINDOWS)
def test_what_only_looks_like_a_pattern_that_layers_know(pattern, notices, device):
    both = overlay_of("abs(q - k) < sliding_window", "transformers.models.mine.modeling_mine", "_bidirectional_window_overlay")
    mask_function, use_vmap = UNIONS_AND_WINDOWS[pattern](masking_utils.sliding_window_causal_mask_function, both, device)
    arguments = mask_arguments(device, SEQLEN, 0, kv_length=SEQLEN, mask_function=mask_function, config=MISTRAL)
    mask = masks.hf_flash2_mask(**arguments, **({"use_vmap": True, "allow_is_causal_skip": False} if use_vmap else {}))
    assert mask.dim() == 4


@NEEDS_5
@pytest.mark.parametrize(
    ("visible", "module", "name"),
    [
        ("(abs(q - k) < sliding_window) & (k != 1)", "mine", "_bidirectional_window_overlay"),
        ("(abs(q - k) < sliding_window) & (k != 1)", "transformers.models.mine.modeling_mine", "_another_overlay"),
        ("abs(q - k) <= sliding_window", "transformers.models.mine.modeling_mine", "_bidirectional_window_overlay"),
        ("abs(q - k) < sliding_window", "transformers.models.mine.modeling_mine", "_bidirectional_window_overlay"),
    ],
)
def test_a_window_of_two_sides_is_that_of_gemma_alone(visible, module, name, device):
    overlay = overlay_of(visible, module, name)(5)
    mask_function = masking_utils.or_masks(masking_utils.sliding_window_causal_mask_function(5), overlay)
    arguments = mask_arguments(device, SEQLEN, 0, kv_length=SEQLEN, mask_function=mask_function, config=MISTRAL, use_vmap=True)
    mask = masks.hf_flash2_mask(**arguments, allow_is_causal_skip=False)
    plain = visible == "abs(q - k) < sliding_window"
    assert (mask is not None and mask.dim() == 4) != plain
    if plain:
        assert masks._coded(mask) is False
        tiny.model("qwen2_moe")  # whose layers leave their window to the mask
        assert (
            masks.hf_flash2_mask(**arguments | {"config": tiny.config("qwen2_moe", sliding_window=5)}, allow_is_causal_skip=False).dim()
            == 4
        )


@NEEDS_5
@pytest.mark.parametrize(("window", "dims"), [(SEQLEN, 2), (SEQLEN - 1, 4)])
def test_a_window_of_two_sides_is_none_where_layers_see_all_keys(window, dims, device):
    """Layers count the token itself, masks do not: of one token less they would leave out the last, whatever may be skipped."""
    mask_function = masking_utils.sliding_window_bidirectional_overlay(window)
    arguments = mask_arguments(device, SEQLEN, 0, kv_length=SEQLEN, mask_function=mask_function, config=MISTRAL)
    assert masks.hf_flash2_mask(**arguments, allow_is_bidirectional_skip=True).dim() == dims


@NEEDS_5
@pytest.mark.parametrize(("window", "seen"), [(5, 6), (3, 4)])
def test_a_window_of_two_sides_may_be_somebodys_own(window, seen, device):
    """ModernBERT's layers know of theirs alone, here of 5 tokens to either side."""
    tiny.model("modernbert")  # so that the source of its layers is at hand
    config = tiny.config("modernbert", local_attention=10)
    mask_function = masking_utils.sliding_window_bidirectional_mask_function(window)
    arguments = mask_arguments(device, SEQLEN, 0, kv_length=SEQLEN, mask_function=mask_function, config=config, use_vmap=True)
    mask = masks.hf_flash2_mask(**arguments, allow_is_bidirectional_skip=False)
    q, k, v = qkv(device)
    distance = torch.arange(SEQLEN, device=device) - torch.arange(SEQLEN, device=device).unsqueeze(1)
    found = attention(Layer(False), q, k, v, mask, sliding_window=config.sliding_window + 1)
    assert_close(found, expected(q, k, v, distance.abs() < seen))


@pytest.mark.skipif(not hasattr(masking_utils, "remap_positions_for_packed_sequence"), reason="as of Transformers 5.24")
def test_documents_within_those_that_transformers_has_found(device):
    """Somebody's own, of positions: both keep tokens apart."""
    number = torch.tensor([[0] * 6 + [1] * 6], device=device)
    positions, inner = torch.arange(SEQLEN, device=device)[None] % 6, torch.arange(SEQLEN, device=device)[None] // 2
    within = masking_utils.and_masks(masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(inner))
    mask_function = masking_utils.and_masks(
        masking_utils.remap_positions_for_packed_sequence(within, positions), masking_utils.packed_sequence_mask_function(number)
    )
    arguments = mask_arguments(device, SEQLEN, 0, kv_length=SEQLEN, mask_function=mask_function, use_vmap=True) | {"batch_size": 1}
    mask = masks.hf_flash2_mask(**arguments, allow_is_causal_skip=False)
    apart = torch.arange(SEQLEN, device=device) // 2  # documents of two tokens
    assert torch.equal(mask, (causal_band(device=device) & (apart == apart.unsqueeze(1)))[None, None])


@pytest.mark.skipif(not hasattr(masking_utils, "remap_positions_for_packed_sequence"), reason="as of Transformers 5.24")
def test_chunks_of_documents_are_of_positions(device):
    number = torch.tensor([[0] * 6 + [1] * 6], device=device)
    arguments = {"config": SimpleNamespace(attention_chunk_size=32), "attention_mask": None}
    chunks = masking_utils.chunked_causal_mask_function(32, torch.zeros(1, dtype=torch.int64))
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 30, 31, 32, 33, 34, 35]], device=device)
    within = masking_utils.remap_positions_for_packed_sequence(chunks, positions)
    mask_function = masking_utils.and_masks(within, masking_utils.packed_sequence_mask_function(number))
    arguments |= mask_arguments(device, SEQLEN, 0, kv_length=SEQLEN, mask_function=mask_function) | {"batch_size": 1}
    mask = masks.hf_flash2_mask(**arguments, allow_is_causal_skip=False, use_vmap=True)
    assert mask.dim() == 4
    assert mask[0, 0, 7].tolist() == [False] * 6 + [True, True] + [False] * 4
    assert mask[0, 0, 9].tolist() == [False] * 8 + [True, True] + [False] * 2  # another chunk


def test_a_function_of_the_same_name_is_not_the_one_of_transformers(device):
    """Whoever passes it means what it does."""

    def causal_mask_function(batch_idx, head_idx, q_idx, kv_idx):
        return (kv_idx <= q_idx) & (kv_idx != 1)

    causal_mask_function.__qualname__ = "causal_mask_function"
    arguments = mask_arguments(device, SEQLEN, 0, kv_length=SEQLEN, mask_function=causal_mask_function)
    mask = masks.hf_flash2_mask(**arguments)
    q, k, v = qkv(device)
    wanted = expected(q, k, v, causal_band(device=device) & (torch.arange(SEQLEN, device=device) != 1))
    assert_close(attention(Layer(), q, k, v, mask), wanted)


def test_another_pattern_over_a_sliding_cache(device):
    """Which holds the last keys alone: the pattern speaks of all."""
    without_9 = masking_utils.and_masks(masking_utils.sliding_window_causal_mask_function(6), lambda b, h, q_idx, kv_idx: kv_idx != 9)
    arguments = mask_arguments(device, 1, SEQLEN - 1, kv_length=6, kv_offset=SEQLEN - 6, mask_function=without_9)
    mask = masks.hf_flash2_mask(**arguments, attention_mask=torch.ones(BATCH, SEQLEN, dtype=torch.bool, device=device))
    q, k, v = qkv(device, seqlen_q=1, seqlen_k=6)
    assert_close(attention(Layer(), q, k, v, mask), expected(q, k, v, torch.arange(6, 12, device=device) != 9))


@NEEDS_5
def test_documents_without_causality(device):
    number = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2]], device=device)
    separate = masking_utils.packed_sequence_mask_function(number)
    q, k, v = qkv(device, batch=1)
    wanted = expected(q, k, v, number[:, None, :, None] == number[:, None, None, :])
    for mask_function in (separate, masking_utils.and_masks(masking_utils.bidirectional_mask_function, separate)):
        arguments = mask_arguments(device, SEQLEN, 0, kv_length=SEQLEN, mask_function=mask_function) | {"batch_size": 1}
        mask = masks.hf_flash2_mask(**arguments)
        for given in (mask, WithoutAttribute(mask)):
            assert_close(attention(Layer(), q, k, v, given, is_causal=False), wanted)


WHAT_LAYERS_SAY = {  # source of a modeling module -> whether a mask that is causal, or is not, has to say so
    "nothing": ("class Attention: pass", False, True),
    "causal": ("self.is_causal = True", False, True),
    "not causal": ("self.is_causal = False", True, False),
    "causal, which is handed on": ("self.is_causal = True\n    attend(q, is_causal=self.is_causal)", False, True),
    "not causal, which is handed on": ("self.is_causal = False\n    attend(q, is_causal=self.is_causal)", True, False),
    "not causal, in a call": ("attend(q, is_causal=False)", True, True),
    "now this, now that": ("self.is_causal = True\n    self.is_causal = False", True, True),
    "what the config says": ("self.is_causal = config.is_decoder", True, True),
    "what the config says, in a constant": ("self.is_causal = True if config.is_decoder else False", True, True),
    "what the caller says": ("def attend(q, is_causal: bool | None = None): pass", True, True),
    "what the caller says, in other words": ("def attend(q, is_causal: typing.Optional[bool] = None): pass", True, True),
    "not causal, under a name": ('kwargs["is_causal"] = False', True, True),
    "not causal, on the next line": ("attend(q, is_causal=\n    False)", True, True),
    None: (None, True, True),
}


@NEEDS_5
@pytest.mark.parametrize("said", WHAT_LAYERS_SAY)
def test_a_mask_says_what_is_causal_where_layers_may_say_otherwise(said, device, monkeypatch, tmp_path):
    """Without padding there is a mask for that alone."""
    source, *wanted = WHAT_LAYERS_SAY[said]
    name = f"said_{tmp_path.name}.modeling_mine"
    if source is not None:
        (tmp_path / "modeling_mine.py").write_text(source + "\n")
        module = ModuleType(name)
        module.__file__ = str(tmp_path / "modeling_mine.py")
        monkeypatch.setitem(sys.modules, name, module)
    config = type("MineConfig", (), {"__module__": name.replace("modeling", "configuration")})()
    found = []
    for mask_function in (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function):
        arguments = mask_arguments(device, SEQLEN, 0, kv_length=SEQLEN, mask_function=mask_function) | {"q_offset": 0}
        found.append(masks.hf_flash2_mask(**arguments, config=config) is not None)
    assert found == wanted


def test_a_config_that_extends_one_of_transformers_has_its_layers(monkeypatch):
    """Which is written where nothing is said of layers. What is not loaded yet is looked at again."""
    name = Qwen2MoeConfig.__module__.replace(".configuration_", ".modeling_")
    extended = type("Extended", (Qwen2MoeConfig,), {"__module__": __name__})
    with monkeypatch.context() as context:
        context.delitem(sys.modules, name, raising=False)
        assert masks._hands_on_its_window(Qwen2MoeConfig)
    importlib.import_module(name)
    assert [masks._hands_on_its_window(config) for config in (Qwen2MoeConfig, extended)] == [VERSION < (5, 0)] * 2


OVERLAYS_WHILE_COMPILING = {
    "sliding window": {},
    "chunks": {"config": SimpleNamespace(attention_chunk_size=5)},
    "a user's overlay": {"allow_is_causal_skip": False} | ({"use_vmap": True} if VERSION >= (5, 0) else {}),
    "blocks of an image": {"allow_is_causal_skip": False},
}


@pytest.mark.parametrize("overlay", OVERLAYS_WHILE_COMPILING)
def test_patterns_while_compiling(overlay, device, monkeypatch):
    """Dynamo shows nothing of a mask function; whatever might lie over the window goes to SDPA."""
    monkeypatch.setattr(tracing, "is_compiling", lambda: True)
    arguments = {"local_size": 5, "config": SimpleNamespace(), "allow_is_causal_skip": True} | (
        {"use_vmap": False} if VERSION >= (5, 0) else {}
    )
    arguments |= mask_arguments(device, SEQLEN, 0, kv_length=SEQLEN, mask_function=masking_utils.sliding_window_causal_mask_function(5))
    given = tiny.attention_mask("left", device).bool()
    mask = masks.hf_flash2_mask(attention_mask=given, **arguments | OVERLAYS_WHILE_COMPILING[overlay])
    assert mask.dim() == (2 if overlay == "sliding window" else 4)


@NEEDS_5
@pytest.mark.parametrize(("overlay", "dims"), [(False, 2), (True, 4)])
def test_a_step_under_a_window_while_compiling(overlay, dims, device, monkeypatch):
    """Nothing may be skipped, as in a static cache: Transformers asks for vmap where something lies over the window."""
    monkeypatch.setattr(tracing, "is_compiling", lambda: True)
    arguments = {"local_size": 5, "config": SimpleNamespace(), "allow_is_causal_skip": False, "use_vmap": overlay}
    mask_function = masking_utils.sliding_window_causal_mask_function(5)
    arguments |= mask_arguments(device, 1, SEQLEN - 1, kv_length=SEQLEN, mask_function=mask_function)
    mask = masks.hf_flash2_mask(attention_mask=tiny.attention_mask("left", device).bool(), **arguments)
    assert mask.dim() == dims


CAUSAL = masking_utils.causal_mask_function
BESIDE_DOCUMENTS_WHILE_COMPILING = {  # a mask function, what the config says, and whether that is what layers do by themselves
    "nothing": (masking_utils.and_masks(CAUSAL, CAUSAL), {}, True),
    "a union": (masking_utils.or_masks(CAUSAL, everything_visible_before(4)), {}, False),
    "layers that are not causal": (masking_utils.and_masks(CAUSAL, CAUSAL), {"is_causal": False}, False),
}


@pytest.mark.parametrize("name", BESIDE_DOCUMENTS_WHILE_COMPILING)
def test_what_may_be_in_a_mask_beside_documents_while_compiling(name, device, monkeypatch):
    """Though there certainly are none."""
    mask_function, said, plain = BESIDE_DOCUMENTS_WHILE_COMPILING[name]
    monkeypatch.setattr(tracing, "is_compiling", lambda: True)
    monkeypatch.setattr(masks.tracing, "masks_hold_no_documents", lambda: True)
    arguments = mask_arguments(device, SEQLEN, 0, kv_length=SEQLEN, mask_function=mask_function)
    mask = masks.hf_flash2_mask(**arguments, attention_mask=None, config=SimpleNamespace(**said))
    assert mask is None if plain else mask.dim() == 4


@NEEDS_5
@pytest.mark.parametrize(("window", "before", "dims"), [(SEQLEN, 0, 2), (SEQLEN - 1, 0, 4), (SEQLEN, 1, 4), (SEQLEN + 1, 1, 2)])
def test_a_window_that_is_only_in_the_mask_while_compiling(window, before, dims, device, monkeypatch):
    """It is none where it holds all keys, those before the ones that the cache still has, too."""
    tiny.model("qwen2_moe")  # so that the source of its layers is at hand
    monkeypatch.setattr(tracing, "is_compiling", lambda: True)
    mask_function = masking_utils.sliding_window_causal_mask_function(window)
    arguments = mask_arguments(device, SEQLEN, before, kv_length=SEQLEN, kv_offset=before, mask_function=mask_function, local_size=window)
    arguments |= {"config": tiny.config("qwen2_moe", sliding_window=window), "allow_is_causal_skip": True, "use_vmap": False}
    given = F.pad(tiny.attention_mask("left", device).bool(), (before, 0))
    assert masks.hf_flash2_mask(attention_mask=given, **arguments).dim() == dims


def test_one_chunk_is_plainly_causal(device):
    mask_function = masking_utils.chunked_causal_mask_function(SEQLEN, torch.zeros(BATCH, dtype=torch.int64))
    arguments = mask_arguments(device, SEQLEN, 0, kv_length=SEQLEN, mask_function=mask_function)
    assert masks.hf_flash2_mask(**arguments, config=MistralConfig()) is None


@pytest.mark.parametrize("form", ["bool", "float", "double"])
def test_a_4d_mask_goes_to_sdpa_with_one_warning(form, notices, device):
    q, k, v = qkv(device)
    visible = torch.rand(BATCH, 1, SEQLEN, SEQLEN, generator=torch.Generator().manual_seed(0)).to(device) < 0.5
    visible[..., 0] = True
    mask = visible if form == "bool" else torch.zeros(visible.shape, device=device).masked_fill(~visible, torch.finfo(torch.float32).min)
    mask = mask.double() if form == "double" else mask
    longer = F.pad(mask, (0, 3))  # as models slice them: keys beyond the cache do not count
    for given in (mask, longer):
        assert_close(attention(Layer(), q, k, v, given), expected(q, k, v, visible))
    assert len(notices()) == 1 and "Layer" in notices()[0] and "4-D" in notices()[0]


@pytest.mark.parametrize("form", ["bool", "float"])
def test_documents_beside_a_4d_mask(form, device):
    """Both count, also where the first tokens are of no document."""
    q, k, v = qkv(device, batch=1)
    visible = torch.rand(1, 1, SEQLEN, SEQLEN, generator=torch.Generator().manual_seed(0)).to(device) < 0.5
    visible |= torch.eye(SEQLEN, dtype=torch.bool, device=device)
    mask = visible if form == "bool" else torch.zeros(visible.shape, device=device).masked_fill(~visible, torch.finfo(torch.float32).min)
    bounds = torch.tensor([2, 5, SEQLEN], dtype=torch.int32, device=device)
    number = torch.bucketize(torch.arange(SEQLEN, device=device), bounds, right=True)
    found = attention(Layer(), q, k, v, mask, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
    assert_close(found, expected(q, k, v, visible & (number == number.unsqueeze(1))), (number > 0).unsqueeze(0))


def test_documents_beside_a_mask_for_sdpa_leave_it_its_reason(notices, device):
    q, k, v = qkv(device, batch=1)
    bounds = torch.tensor([0, 5, SEQLEN], dtype=torch.int32, device=device)
    mask = masks.attach(causal_band(device=device)[None, None], masks.UNSAID_WINDOW)
    attention(Layer(), q, k, v, mask, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
    assert len(notices()) == 1 and "its layers leave their sliding window to the mask" in notices()[0]


def test_a_4d_mask_of_integers_is_refused(device):
    """1 = visible, or 1 to be added? Eager adds it without a word."""
    q, k, v = qkv(device)
    with pytest.raises(ValueError, match=r"4-D attention_mask must be bool .* got torch.int64"):
        attention(Layer(), q, k, v, torch.ones(BATCH, 1, SEQLEN, SEQLEN, dtype=torch.int64, device=device).tril())


def test_a_mask_of_another_batch_is_refused(device):
    q, k, v = qkv(device)
    with pytest.raises(ValueError, match=r"attention_mask must have a row for each of the 4 of the batch, got \[1, 12\]"):
        attention(Layer(), q, k, v, torch.ones(1, SEQLEN, device=device))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shape, dtype) for shape in ((SEQLEN, SEQLEN), (2 * SEQLEN, SEQLEN)) for dtype in (torch.uint8, torch.int64)]
    + [((2, SEQLEN), torch.int64)],
    ids=str,
)
def test_a_mask_of_another_rank_is_refused(shape, dtype, device):
    """Two planes of bytes are documents, of anything else they are nothing."""
    q, k, v = qkv(device)
    with pytest.raises(ValueError, match=rf"2 or 4 dimensions, got \[4, {shape[0]}, 12\]"):
        attention(Layer(), q, k, v, torch.ones(BATCH, *shape, dtype=dtype, device=device))


@pytest.mark.parametrize(("value", "strict"), [("0", False), ("false", False), ("", False), ("1", True), ("True", True)])
def test_strict_by_the_environment(value, strict, monkeypatch):
    monkeypatch.setattr(hf_flash2.notices, "_strict", None)
    monkeypatch.setenv("HF_FLASH2_STRICT", value)
    assert hf_flash2.notices.is_strict() is strict
    hf_flash2.set_strict(not strict)
    assert hf_flash2.notices.is_strict() is not strict


def test_strict_is_yes_or_no(monkeypatch):
    monkeypatch.setattr(hf_flash2.notices, "_strict", None)
    monkeypatch.setenv("HF_FLASH2_STRICT", "sometimes")
    with pytest.raises(ValueError, match="HF_FLASH2_STRICT must be 0 or 1, got 'sometimes'"):
        tiny.model("llama")
    with pytest.raises(ValueError, match="True or False, got '0'"):
        hf_flash2.set_strict("0")


def test_strict_forbids_sdpa(device, monkeypatch):
    monkeypatch.setattr(hf_flash2.notices, "_strict", None)  # put back behind the test
    q, k, v = qkv(device)
    mask = torch.ones(BATCH, 1, SEQLEN, SEQLEN, dtype=torch.bool, device=device)
    hf_flash2.set_strict(True)
    with pytest.raises(ValueError, match=r"set_strict\(True\) forbids SDPA: a 4-D"):
        attention(Layer(), q, k, v, mask)


@pytest.mark.parametrize("kind", ["dense", "padded", "documents"])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_what_no_kernel_can_run_stays_exact_on_sdpa(kind, window, notices, device):
    """A head dim of 520 fits no kernel, whatever the sequences are."""
    q, k, v = qkv(device, head_dim=520)
    kwargs, mask = {}, None
    visible = causal_band(device=device).expand(BATCH, 1, -1, -1)
    if window:
        visible = visible & torch.ones_like(visible).triu(1 - window)
    rows = torch.ones(BATCH, SEQLEN, dtype=torch.bool, device=device)
    if kind == "padded":
        mask = tiny.attention_mask("holes", device).bool()
        visible, rows = visible & mask[:, None, None, :], mask
    if kind == "documents":
        bounds = torch.tensor([2, 5, 12, 24, 40], dtype=torch.int32, device=device)  # not all tokens: the rest is no document
        kwargs = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 16, "max_length_k": 16}
        number = torch.bucketize(torch.arange(BATCH * SEQLEN, device=device), bounds.long(), right=True)
        q, k, v = (x.transpose(1, 2).reshape(1, BATCH * SEQLEN, -1, 520).transpose(1, 2) for x in (q, k, v))
        visible = causal_band(BATCH * SEQLEN, BATCH * SEQLEN, device) & (number == number.unsqueeze(1))
        if window:
            visible = visible & torch.ones_like(visible).triu(1 - window)
        rows = ((number > 0) & (number < 5)).unsqueeze(0)
    out = attention(Layer(), q, k, v, mask, sliding_window=window, **kwargs)
    assert_close(out, expected(q, k, v, visible), rows)
    assert len(notices()) == 1 and "head_dim must be between 1 and 512, got 520" in notices()[0]


@pytest.mark.parametrize("bounds", [[0, 5, SEQLEN + 1], [0, 6, 4, SEQLEN]], ids=str)
def test_bounds_that_no_document_has_are_refused_on_sdpa_too(bounds, device):
    q, k, v = qkv(device, batch=1, head_dim=520)
    wrong = torch.tensor(bounds, dtype=torch.int32, device=device)
    right = torch.linspace(0, SEQLEN, len(bounds), device=device).int()
    for name, given in {"q": (wrong, right), "k": (right, wrong)}.items():
        with pytest.raises(ValueError, match=rf"cu_seqlens_{name} must rise, .* at most the {SEQLEN} tokens given, got \[0, "):
            attention(Layer(), q, k, v, cu_seq_lens_q=given[0], cu_seq_lens_k=given[1])


# -------------------------------------------------------------------------------------------------------------------------------- documents


@pytest.mark.parametrize("wide", ["queries and keys", "values"])
def test_heads_wider_than_any_kernel_stay_exact_on_sdpa(wide, notices, device):
    (q, k, v), (wide_q, wide_k, wide_v) = qkv(device), qkv(device, head_dim=520)
    q, k, v = (q, k, wide_v) if wide == "values" else (wide_q, wide_k, v)
    assert_close(attention(Layer(), q, k, v), expected(q, k, v, causal_band(device=device)))
    assert hf_flash2.last_backend() == "sdpa"
    assert len(notices()) == 1 and "head_dim must be between 1 and 512, got 520" in notices()[0]


@pytest.mark.parametrize("dtype", dict.fromkeys((DTYPE, torch.bfloat16)), ids=str)
@pytest.mark.parametrize("form", ["bool", "infinite", "float32's least"])
def test_capped_rows_that_see_nothing_are_zero_and_so_are_their_gradients(form, dtype, notices, device):
    """The least float32 is -inf in bfloat16."""
    inputs = [x.to(dtype).requires_grad_() for x in qkv(device)]
    visible = causal_band(device=device).expand(BATCH, 1, -1, -1) & (torch.arange(SEQLEN, device=device) > 1)
    hidden = {"infinite": -torch.inf, "float32's least": torch.finfo(torch.float32).min}.get(form)
    mask = visible if hidden is None else torch.zeros(visible.shape, device=device).masked_fill(~visible, hidden)
    out, wanted = attention(Layer(), *inputs, mask, softcap=3.0), expected(*inputs, visible, softcap=3.0)
    seen = slice(2, None) if (form, dtype) == ("float32's least", torch.float32) else slice(None)
    assert out[:, :2].any() == (seen != slice(None))  # nothing is hidden: all scores are equal
    gradients, wanted_gradients = (torch.autograd.grad(x[:, 2:].float().square().sum(), inputs) for x in (out, wanted))
    if dtype == DTYPE:
        assert_close(out[:, seen], wanted[:, seen])
    for found, exact in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(found, exact, rtol=0, atol=(1e-4 if dtype == torch.float32 else 0.02) * exact.abs().max().item())
    assert "on operators of torch, as scaled_dot_product_attention caps no scores" in notices()[0]


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_float64_stays_float64_on_sdpa(softcap, device):
    q, k, v = (x.double() for x in qkv(device, head_dim=520))
    found = attention(Layer(), q, k, v, softcap=softcap)
    torch.testing.assert_close(found, expected(q, k, v, causal_band(device=device), softcap=softcap), rtol=1e-12, atol=1e-12)


def test_queries_are_the_last_keys_on_sdpa_too(device):
    q, k, v = qkv(device, seqlen_q=3, head_dim=520)
    assert_close(attention(Layer(), q, k, v), expected(q, k, v, causal_band(3, device=device)))


def test_positions_are_looked_at_once_for_all_layers(device, monkeypatch):
    looked = []
    find = packing.documents_from_position_ids
    monkeypatch.setattr(packing, "documents_from_position_ids", lambda ids: looked.append(1) or find(ids))
    q, k, v = qkv(device, batch=1)
    position_ids = torch.arange(5, device=device).repeat(3)[None, :SEQLEN]
    number = torch.arange(SEQLEN, device=device) // 5
    for _ in range(3):
        found = attention(Layer(), q, k, v, position_ids=position_ids)
    assert_close(found, expected(q, k, v, causal_band(device=device) & (number == number.unsqueeze(1))))
    assert len(looked) == 1


class AnyCrossAttention(Layer):
    """Known by its name."""


@pytest.mark.parametrize("layer", [Layer(False, is_cross_attention=True), AnyCrossAttention(False)], ids=["by a flag", "by its name"])
def test_positions_of_queries_say_nothing_of_as_many_other_keys(layer, device):
    q, k, v = qkv(device, batch=1)
    found = attention(layer, q, k, v, position_ids=torch.arange(SEQLEN, device=device)[None] % 5)
    assert_close(found, expected(q, k, v, torch.tensor(True, device=device)))


def test_another_layer_sees_what_has_changed_in_place(device):
    """Without a layer that comes again, the version of the tensor alone says that there is another forward."""
    q, k, v = qkv(device, batch=1)
    position_ids = torch.arange(SEQLEN, device=device)[None].clone()
    attention(Layer(), q, k, v, position_ids=position_ids)
    position_ids.remainder_(5)
    number = torch.arange(SEQLEN, device=device) // 5
    found = attention(Layer(), q, k, v, position_ids=position_ids)
    assert_close(found, expected(q, k, v, causal_band(device=device) & (number == number.unsqueeze(1))))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_positions_may_change_in_place_between_forwards(mode, device, tmp_path):
    """As in a buffer that is used for one batch after another; what was found there is no part of the tensor, which may be saved."""
    layer, number = Layer(), torch.arange(SEQLEN, device=device) // 5
    with mode():
        q, k, v = qkv(device, batch=1)
        position_ids = torch.arange(SEQLEN, device=device)[None].clone()
        one = causal_band(device=device)
        for document, visible in ((number * 0, one), (number, one & (number == number.unsqueeze(1))), (number * 0, one)):
            position_ids.copy_(torch.arange(SEQLEN, device=device) - 5 * document)
            assert_close(attention(layer, q, k, v, position_ids=position_ids), expected(q, k, v, visible))
        torch.save(position_ids, tmp_path / "positions")
    assert torch.equal(torch.load(tmp_path / "positions", weights_only=True), position_ids)


def test_documents_by_cu_seqlens_of_queries_and_keys(device):
    """As vision towers pass them: one row, not causal, lengths as tensors."""
    q, k, v = qkv(device, batch=1)
    bounds = torch.tensor([0, 5, 6, SEQLEN], dtype=torch.int64, device=device)
    lengths = torch.tensor(6)
    kwargs = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": lengths, "max_length_k": lengths}
    number = torch.bucketize(torch.arange(SEQLEN, device=device), bounds[1:], right=True)
    wanted = expected(q, k, v, number == number.unsqueeze(1))
    assert_close(attention(Layer(), q, k, v, is_causal=False, **kwargs), wanted)
    without_lengths = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    assert_close(attention(Layer(), q, k, v, is_causal=False, **without_lengths), wanted)
    rows = (x.transpose(1, 2).reshape(SEQLEN // 2, 2, -1, 16).transpose(1, 2) for x in (q, k, v))  # documents are longer than one
    assert_close(attention(Layer(), *rows, is_causal=False, **without_lengths), wanted.reshape(SEQLEN // 2, 2, -1, 16))


def test_documents_beside_a_mask_without_padding(device):
    q, k, v = qkv(device, batch=1)
    bounds = torch.tensor([0, 5, SEQLEN], dtype=torch.int32, device=device)
    kwargs = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": SEQLEN, "max_length_k": SEQLEN}
    number = torch.bucketize(torch.arange(SEQLEN, device=device), bounds[1:], right=True)
    wanted = expected(q, k, v, causal_band(device=device) & (number == number.unsqueeze(1)))
    mask = torch.ones(1, SEQLEN, dtype=torch.long, device=device)
    assert_close(attention(Layer(), q, k, v, mask, **kwargs), wanted)


@pytest.mark.parametrize("given", ["cu_seq_lens_q", "cu_seq_lens_k"])
def test_bounds_of_documents_come_for_queries_and_keys(given, device):
    q, k, v = qkv(device, batch=1)
    with pytest.raises(ValueError, match=f"cu_seq_lens_q and cu_seq_lens_k come together, got only {given}"):
        attention(Layer(), q, k, v, **{given: torch.tensor([0, SEQLEN], dtype=torch.int32, device=device)})


def test_documents_of_queries_beside_those_of_other_keys(device):
    """Bounds of their own say where keys are, of which there may be more."""
    q, k, v = qkv(device, batch=1, seqlen_q=5)
    bounds = [torch.tensor(b, dtype=torch.int32, device=device) for b in ([0, 2, 5], [0, 7, SEQLEN])]
    found = attention(Layer(is_causal=False), q, k, v, cu_seq_lens_q=bounds[0], cu_seq_lens_k=bounds[1])
    number_q, number_k = (torch.arange(n, device=device) >= b[1] for n, b in zip((5, SEQLEN), bounds, strict=True))
    assert_close(found, expected(q, k, v, number_q[:, None] == number_k))


def test_documents_are_not_divided_by_data_parallel(device):
    q, k, v = qkv(device, batch=1)
    replica = Layer()._replicate_for_data_parallel()
    for first, last in ((0, SEQLEN - 2), (2, SEQLEN), (SEQLEN, 2 * SEQLEN)):
        bounds = torch.tensor([first, first + 5, last], dtype=torch.int32, device=device)
        with pytest.raises(ValueError, match=f"DataParallel cannot divide .* 12 tokens, and cu_seq_lens from {first} to {last};"):
            attention(replica, q, k, v, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
    bounds = torch.tensor([0, SEQLEN], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="this one has 12 tokens, and cu_seq_lens from 0 to 24;"):  # of the keys alone
        attention(replica, q, k, v, cu_seq_lens_q=bounds, cu_seq_lens_k=2 * bounds)
    assert_close(attention(replica, q, k, v, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds), expected(q, k, v, causal_band(device=device)))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_documents_that_were_cut_like_rows_are_refused(rows, device):
    """As accelerate cuts every tensor of a batch from an iterable dataset: to as many as there are rows, from the first or a later on."""
    bounds = torch.tensor([0, 5, 6, SEQLEN, SEQLEN + 4, 2 * SEQLEN, 3 * SEQLEN], dtype=torch.int32, device=device)[: 4 + rows]
    q, k, v = qkv(device, batch=rows)
    for first in range(len(bounds) - rows + 1):
        cut = bounds[first : first + rows]
        with pytest.raises(ValueError, match=f"cut: cu_seq_lens_q has {rows} bounds, as many as .*dispatch_batches"):
            attention(Layer(), q, k, v, cu_seq_lens_q=cut, cu_seq_lens_k=cut)
    whole = torch.tensor([0, rows * SEQLEN], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="cut: cu_seq_lens_k has"):
        attention(Layer(), q, k, v, cu_seq_lens_q=whole, cu_seq_lens_k=cut)
    found = attention(Layer(), q, k, v, cu_seq_lens_q=whole, cu_seq_lens_k=whole)  # few bounds, too: one document over all rows
    q, k, v = (x.transpose(1, 2).flatten(0, 1).unsqueeze(0).transpose(1, 2) for x in (q, k, v))
    assert_close(found.flatten(0, 1), attention(Layer(), q, k, v).flatten(0, 1))


def test_documents_beside_a_mask_while_compiling(device, monkeypatch):
    """Nobody can say then whether the mask has padding."""
    q, k, v = qkv(device, batch=1)
    bounds = torch.tensor([0, 5, SEQLEN], dtype=torch.int32, device=device)
    monkeypatch.setattr(tracing, "is_compiling", lambda: True)
    with pytest.raises(ValueError, match="attention_mask and cu_seq_lens_q/k.*pass one"):
        attention(Layer(), q, k, v, torch.ones(1, SEQLEN, device=device), cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)


def test_a_padding_mask_wins_over_cu_seqlens(notices, device):
    q, k, v = qkv(device)
    mask = tiny.attention_mask("left", device)
    bounds = torch.tensor([0, BATCH * SEQLEN], dtype=torch.int32, device=device)
    kwargs = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 48, "max_length_k": 48}
    wanted = expected(q, k, v, causal_band(device=device) & mask.bool()[:, None, None, :])
    for _ in range(2):
        assert_close(attention(Layer(), q, k, v, mask, **kwargs), wanted, mask.bool())
    [notice] = notices()
    assert "it counts and cu_seq_lens_q/k are not looked at" in notice


@pytest.mark.parametrize(
    "position_ids",
    [[*range(6), *range(20, 20 + SEQLEN - 6)], [0, 1, 2, 2, 2, 2, *range(3, SEQLEN - 3)], [*range(1, 7), *range(4, SEQLEN - 2)]],
    ids=["with a jump", "repeated", "back, but not to the first"],
)
def test_positions_that_do_not_restart_are_one_document(position_ids, device):
    q, k, v = qkv(device, batch=1)
    found = attention(Layer(), q, k, v, position_ids=torch.tensor([position_ids], device=device))
    assert_close(found, expected(q, k, v, causal_band(device=device)))


@pytest.mark.parametrize(
    "position_ids",
    [torch.arange(SEQLEN).expand(3, 1, SEQLEN), torch.arange(SEQLEN), torch.arange(5).repeat(3)[None, : SEQLEN - 2]],
    ids=["3-D", "1-D", "of another length"],
)
def test_position_ids_that_say_nothing_about_documents(position_ids, device):
    q, k, v = qkv(device, batch=1)
    found = attention(Layer(), q, k, v, position_ids=position_ids.to(device))
    assert_close(found, expected(q, k, v, causal_band(device=device)))


@pytest.mark.parametrize("rows", [1, BATCH])
def test_restarting_positions_of_several_rows_are_no_documents(rows, device):
    """Where the mask does not say so: eager attention takes none of them for documents either."""
    q, k, v = qkv(device)
    found = attention(Layer(), q, k, v, position_ids=(torch.arange(SEQLEN, device=device) % 5).expand(rows, -1))
    assert_close(found, expected(q, k, v, causal_band(device=device)))


def test_restarting_positions_beside_a_cache_are_no_documents(device):
    q, k, v = qkv(device, batch=1, seqlen_q=4)
    found = attention(Layer(), q, k, v, position_ids=torch.tensor([[0, 1, 0, 1]], device=device))
    assert_close(found, expected(q, k, v, causal_band(4, device=device)))


@pytest.mark.parametrize("lost", [False, True], ids=["attribute kept", "attribute lost"])
def test_documents_travel_in_the_mask(lost, device):
    number = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2]], device=device).repeat(BATCH, 1)
    number[1] = 0
    separate = masking_utils.packed_sequence_mask_function(number)
    mask_function = masking_utils.and_masks(masking_utils.causal_mask_function, separate)
    mask = masks.hf_flash2_mask(**mask_arguments(device, SEQLEN, 0, kv_length=SEQLEN, mask_function=mask_function))
    q, k, v = qkv(device)
    visible = causal_band(device=device) & (number[:, None, :, None] == number[:, None, None, :])
    with hf_flash2.notices.record_calls() as calls:
        found = attention(layer := Layer(), q, k, v, WithoutAttribute(mask) if lost else mask)
    assert_close(found, expected(q, k, v, visible))
    assert calls[layer] == ["documents"]


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(5, SEQLEN), (SEQLEN, 5)])
def test_documents_of_queries_are_not_those_of_other_keys(queries, keys, moved, device):
    """As PEFT's prefix tuning makes them of a packed batch; what moves one to a GPU makes two tensors of one."""
    q, k, v = qkv(device, batch=1, seqlen_q=queries, seqlen_k=keys)
    bounds = torch.tensor([0, 3, 5], dtype=torch.int32, device=device)
    other = bounds.clone() if moved else bounds
    with pytest.raises(ValueError, match=f"{queries} queries and {keys} keys .* prefix tuning.* needs padded batches"):
        attention(Layer(), q, k, v, cu_seq_lens_q=bounds, cu_seq_lens_k=other, max_length_q=3, max_length_k=3)


@pytest.mark.parametrize("numbers", ["beside padding", "that come back"])
def test_documents_that_somebody_else_lays_over_a_mask(numbers, notices, device):
    """Only where Transformers has found them itself is nothing padded, and every number in one place."""
    padded = numbers == "beside padding"
    if not padded and VERSION < (5, 0):
        pytest.skip("this Transformers does not say who has found them")
    number = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2, *[2 if padded else 0] * 3]], device=device).repeat(BATCH, 1)
    padding = tiny.attention_mask("left", device).bool() if padded else None
    visible = causal_band(device=device) & (number[:, None, :, None] == number[:, None, None, :])
    if padded:
        visible = visible & padding[:, None, None, :]
    overlay = {} if padded else {"use_vmap": True}  # which says that Transformers has not found them; beside padding it never does
    mask_function = masking_utils.and_masks(masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(number))
    arguments = mask_arguments(device, SEQLEN, 0, kv_length=SEQLEN, mask_function=mask_function)
    mask = masks.hf_flash2_mask(**arguments, attention_mask=padding, **overlay)
    q, k, v = qkv(device)
    kept = visible[:, 0].any(-1)  # without padding, all
    assert_close(attention(Layer(), q, k, v, mask), expected(q, k, v, visible), kept)
    assert len(notices()) == 1 and "no plain causal, bidirectional, sliding-window or document pattern" in notices()[0]


# ----------------------------------------------------------------------------------------------------------------------------------- dtypes


def test_float32_beside_a_half_type_is_cast_with_one_notice(notices, device):
    """Rotary embeddings in float32 leave q and k in float32 beside v in bfloat16."""
    q, k, v = qkv(device, dtype=torch.float32)
    wanted = expected(q.bfloat16(), k.bfloat16(), v.bfloat16(), causal_band(device=device))
    for _ in range(2):
        out = attention(Layer(), q, k, v.bfloat16())
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, wanted, rtol=3e-2, atol=3e-2)
    assert len(notices()) == 1 and "float32, float32, bfloat16 and are cast to bfloat16" in notices()[0]


def test_autocast_leaves_another_half_type_alone(notices, device):
    q, k, v = qkv(device, dtype=torch.float16)
    with torch.autocast(device.type, torch.bfloat16):
        out = attention(Layer(), q, k, v)
    assert out.dtype == torch.float16 and notices() == []
    assert torch.equal(out, attention(Layer(), q, k, v))


def test_autocast_decides_the_dtype(notices, device):
    q, k, v = qkv(device, dtype=torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        out = attention(Layer(), q, k, v)
    assert out.dtype == torch.bfloat16
    assert len(notices()) == 1 and "cast to bfloat16" in notices()[0]


@pytest.mark.parametrize(
    "config", [SimpleNamespace(_is_quantized=True, dtype=torch.float16), SimpleNamespace(_pre_quantization_dtype=torch.float16)]
)
def test_a_quantised_model_computes_in_the_dtype_of_its_config(config, device):
    q, k, v = qkv(device, dtype=torch.float32)
    seen = []
    layer = Layer(config=config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "flash_attn_func", lambda q, *args, **kwargs: seen.append(q.dtype) or q)
        assert attention(layer, q, k, v).dtype == torch.float32
    assert seen == [torch.float16]


def test_float32_stays_float32(notices, device):
    """Exactly, on the CPU; through SDPA on a GPU, where no kernel takes it."""
    q, k, v = qkv(device, dtype=torch.float32)
    out = attention(Layer(config=SimpleNamespace()), q, k, v)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected(q, k, v, causal_band(device=device)), rtol=1e-4, atol=1e-4)
    assert len(notices()) == (0 if device.type == "cpu" else 1)


def test_lora_in_mixed_precision(device):
    """bf16 autocast over float32 weights: what Trainer(bf16=True) runs."""
    ours, eager = tiny.twins("llama", device, torch.float32)
    inputs = {"input_ids": tiny.tokens(device), "attention_mask": tiny.attention_mask("left", device), "use_cache": False}
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        truth = eager(**inputs).logits[kept]
        with torch.autocast(device.type, torch.bfloat16):
            found, expected_logits = ours(**inputs).logits[kept], eager(**inputs).logits[kept]
    tiny.assert_as_exact_as_eager(found.bfloat16(), expected_logits, truth)

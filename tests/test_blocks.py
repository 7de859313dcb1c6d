"""Images, and prefixes, that see all of themselves in causal attention: on our kernels, exactly, whatever else the mask has."""

import types

import image_models
import pytest
import tiny_models as tiny
import torch
import transformers
from image_models import KINDS
from tiny_models import BATCH, DTYPES, PADDINGS, SEQLEN
from transformers import masking_utils

import hf_flash2
from hf_flash2 import blocks, context_parallel, interface, masks, notices, registration

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not hasattr(masking_utils, "blockwise_overlay"), reason="this Transformers has no masks of blocks"),
]

DTYPE = DTYPES[0]
WINDOW = 5
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[DTYPE]

# -------------------------------------------------------------------------------------------------------------------------- where they are


def numbered(device, *rows: str) -> torch.Tensor:
    """int64 [B, S] of rows of digits, and of dots for no block."""
    return torch.tensor([[int(token) if token.isdigit() else -1 for token in row] for row in rows], device=device)


IDS = {
    "images": (".0000..111", "22......00", ".........."),  # 22: as wide as nothing else, and no number has to be the next
    "apart": ("0.0.0..1.1", "..0000000.", "1........."),
    "single tokens": (".0.1.2.3..", "..........", "0........1"),
    "prefixes": ("0000......", "00000000..", "0........."),
}


def behind(ids: torch.Tensor, sequences: torch.Tensor, real: torch.Tensor) -> set[tuple[int, int]]:
    """Of the flattened batch: all pairs of a query and a key behind it in its block."""
    flat, numbers, kept = ids.flatten().tolist(), sequences.flatten().tolist(), real.flatten().tolist()
    tokens = range(len(flat))
    return {
        (q, k) for q in tokens for k in tokens[q + 1 :]
        if kept[q] and kept[k] and flat[q] == flat[k] >= 0 and numbers[q] == numbers[k]
    }  # fmt: skip


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("of_documents", [False, True])
@pytest.mark.parametrize("kind", IDS)
def test_find(kind, of_documents, padded, device):
    ids = numbered(device, *IDS[kind])
    rows = torch.arange(3, device=device)[:, None].expand_as(ids)
    sequences = rows * 2 + (torch.arange(10, device=device) >= 5) if of_documents else rows
    real = torch.arange(10, device=device).expand_as(ids) >= 2 * rows if padded else torch.ones_like(ids, dtype=torch.bool)
    wanted = behind(ids, sequences, real)
    found = blocks.find(ids, sequences, real)
    if not wanted:
        assert found is None
        return
    bounds = found.cu_seqlens.tolist()
    queries, keys = (row * 10 + column for row, column in (found.queries, found.keys))
    assert found.cu_seqlens.dtype == torch.int32 and bounds[-1] == queries.numel() == keys.numel()
    lengths = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    assert max(lengths) == found.max_seqlen
    pairs = [
        (q, k)
        for a, b in zip(bounds, bounds[1:], strict=False)
        for i, q in enumerate(queries[a:b].tolist())
        for k in keys[a:b].tolist()[i:]
    ]
    assert len(pairs) == len(set(pairs)) and set(pairs) == wanted


@pytest.mark.parametrize("kind, longest", [("images", 4), ("apart", 7), ("single tokens", 1), ("prefixes", 8)])
def test_longest(kind, longest, device):
    assert blocks.longest(numbered(device, *IDS[kind])) == longest


@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (2, 5)])
def test_nowhere(shape, device):
    none = torch.full(shape, -1, device=device)
    assert blocks.longest(none) == 0
    assert blocks.find(none, torch.zeros_like(none), torch.ones_like(none, dtype=torch.bool)) is None


# ---------------------------------------------------------------------------------------------------------------------- mask and attention


def block_ids(device) -> torch.Tensor:
    """Images of 4 tokens, of 3 and 2 without a word between them, one of a single token, and none."""
    assert (BATCH, SEQLEN) == (4, 12)
    return numbered(device, "..0000......", "00011.....22", ".....0..1...", "............")


def apart(device) -> torch.Tensor:
    return numbered(device, "0.00..0.1.11", "..0.0.......", "..........00", "000000000000")


causal, overlay = masking_utils.causal_mask_function, getattr(masking_utils, "blockwise_overlay", None)


def documents(device) -> torch.Tensor:
    return torch.tensor([[0] * 4 + [1] * 8, [0] * 12, [0] * 6 + [1] * 5 + [2], [0] + [1] * 11], device=device)


def in_documents(pattern, device):
    return masking_utils.and_masks(pattern, masking_utils.packed_sequence_mask_function(documents(device)))


def under_a_window(pattern):
    """As Gemma 3 says it."""
    return masking_utils.and_masks(pattern, masking_utils.sliding_window_overlay(WINDOW))


def beside_a_window(pattern_ids):
    """As PaliGemma 2 says it."""
    return masking_utils.or_masks(masking_utils.sliding_window_causal_mask_function(WINDOW), overlay(pattern_ids))


def with_blocks(ids):
    return masking_utils.or_masks(causal, overlay(ids))


# name -> (the mask function, the window that layers hand on)
PATTERNS = {
    "images": lambda device: (with_blocks(block_ids(device)), None),
    "apart": lambda device: (with_blocks(apart(device)), None),
    "under a window": lambda device: (under_a_window(with_blocks(apart(device))), WINDOW),
    "beside a window": lambda device: (beside_a_window(block_ids(device)), WINDOW),
    "documents": lambda device: (in_documents(with_blocks(apart(device)), device), None),
    "documents under a window": lambda device: (in_documents(under_a_window(with_blocks(block_ids(device))), device), WINDOW),
}


class Layer(torch.nn.Module):
    is_causal, layer_idx = True, 0


def qkv(device, requires_grad: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((BATCH, 4, SEQLEN, 16), (BATCH, 2, SEQLEN, 16), (BATCH, 2, SEQLEN, 16))
    return [(2 * torch.randn(shape, generator=generator)).to(device, DTYPE).requires_grad_(requires_grad) for shape in shapes]


def mask_of(mask_function, device, given: torch.Tensor | None, window: int | None = None, **others) -> torch.Tensor:
    arguments = {"batch_size": BATCH, "q_length": SEQLEN, "kv_length": SEQLEN, "q_offset": 0, "device": device, "use_vmap": False}
    arguments |= {"config": types.SimpleNamespace(sliding_window=window), "allow_is_causal_skip": False, "dtype": DTYPE}
    given = None if given is None else given.bool()
    return masks.hf_flash2_mask(mask_function=mask_function, attention_mask=given, **arguments | others)


def visible(mask_function, given: torch.Tensor | None, device) -> torch.Tensor:
    """bool [B, 1, S, S], by asking for every pair."""
    index = torch.arange(SEQLEN, device=device)
    seen = torch.stack([
        torch.stack([torch.stack([torch.as_tensor(mask_function(b, 0, row, column)) for column in index]) for row in index])
        for b in index[:BATCH]
    ]).unsqueeze(1).to(device)  # fmt: skip
    return seen if given is None else seen & given.bool()[:, None, None, :]


def by_formula(q, k, v, seen: torch.Tensor, sinks: torch.Tensor | None = None, softcap: float | None = None) -> torch.Tensor:
    """[B, S, H, D] in float32 at least."""
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = torch.tanh(scores / softcap) * softcap if softcap else scores
    scores = scores.masked_fill(~seen, -1e30)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)), -1)
    return (scores.softmax(-1)[..., :SEQLEN] @ v).transpose(1, 2)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("lost", [False, True], ids=["attribute kept", "attribute lost"])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_attention_and_its_gradients(pattern, padding, lost, device):
    """lost: as after a hook has moved the mask, or a layer that is checkpointed runs again."""
    mask_function, window = PATTERNS[pattern](device)
    given = tiny.attention_mask(padding, device)
    if "documents" in pattern and given is not None:
        pytest.skip("Transformers looks for documents where there is no mask")
    mask = mask_of(mask_function, device, given, window)
    mask = mask.clone() if lost else mask
    seen, real = visible(mask_function, given, device), tiny.real(given, torch.zeros(BATCH, SEQLEN, device=device))
    as_a_whole = masks.Sequences.read(mask, SEQLEN, SEQLEN).visible(SEQLEN, True, window)
    assert torch.equal(as_a_whole[:, 0][real], seen[:, 0][real])  # for SDPA
    q, k, v = qkv(device, requires_grad=True)
    layer = Layer()
    with notices.record_calls() as calls:
        out, _ = interface.hf_flash2_attention(layer, q, k, v, mask, sliding_window=window)
    assert [*calls.values()] == [["blocks"]]
    wanted = by_formula(q, k, v, seen)
    close(out[real], wanted[real])
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device) * real[:, :, None, None]
    for found, expected in zip(
        torch.autograd.grad((out.float() * weights).sum(), (q, k, v)),
        torch.autograd.grad((wanted * weights).sum(), (q, k, v)),
        strict=True,
    ):
        close(found / expected.abs().max(), expected / expected.abs().max())


@pytest.mark.parametrize("option", ["sinks", "softcap", "deterministic"])
def test_with_other_options(option, device):
    mask_function, _ = PATTERNS["images"](device)
    q, k, v = qkv(device)
    sinks = torch.tensor([0.5, -1.0, 2.0, 3.0], device=device)
    given = {"sinks": {"s_aux": sinks}, "softcap": {"softcap": 3.0}, "deterministic": {"deterministic": True}}[option]
    out, _ = interface.hf_flash2_attention(Layer(), q, k, v, mask_of(mask_function, device, None), **given)
    of_formula = {"sinks": {"sinks": sinks}, "softcap": {"softcap": 3.0}, "deterministic": {}}[option]
    close(out, by_formula(q, k, v, visible(mask_function, None, device), **of_formula))


def test_dropout_is_of_all_keys(device):
    """With values of one, out is the share of the kept probabilities: 1 on average, as it is scaled, for the tokens of images, too."""
    mask_function, _ = PATTERNS["images"](device)
    q, k, v = qkv(device)
    mask = mask_of(mask_function, device, None)
    torch.manual_seed(0)
    outs = torch.stack([interface.hf_flash2_attention(Layer(), q, k, torch.ones_like(v), mask, dropout=0.3)[0] for _ in range(300)]).float()
    assert outs.std(0).min() > 0.05  # nothing is left out
    close_to_one = outs.mean(0)
    torch.testing.assert_close(close_to_one, torch.ones_like(close_to_one), atol=0.25, rtol=0)
    assert abs(float(outs.mean()) - 1) < 0.01


def test_dropout_of_what_is_behind_is_drawn_anew(device):
    """Key i of a query of the second part is that behind its token i: with the same mask, both would be dropped or none."""
    mask_function = with_blocks(torch.zeros(BATCH, SEQLEN, dtype=torch.int64, device=device))
    q, k, v = qkv(device)
    keys = torch.eye(SEQLEN, v.shape[-1], device=device, dtype=DTYPE).expand_as(v)  # out says which were kept
    out, _ = interface.hf_flash2_attention(Layer(), 0 * q, 0 * k, keys, mask_of(mask_function, device, None), dropout=0.5)
    itself, behind = (out.diagonal(offset, 1, 3)[..., : SEQLEN - 1] != 0 for offset in (0, 1))  # [B, H, S - 1]
    assert itself.any() and behind.any() and not torch.equal(itself, behind)


@pytest.mark.skipif(tiny.DTYPES[0] != torch.float32, reason="differences of outs in a half type are rounding")
def test_gradients_under_dropout(device):
    """Of the same masks as out, in both parts: by central differences, in float64."""
    mask = mask_of(PATTERNS["under a window"](device)[0], device, tiny.attention_mask("left", device), WINDOW)
    tensors = [x.double().requires_grad_() for x in qkv(device)]
    weights = torch.randn(BATCH, SEQLEN, 4, 16, generator=torch.Generator().manual_seed(1)).to(device, torch.float64)

    def value(*qkv: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return (interface.hf_flash2_attention(Layer(), *qkv, mask, sliding_window=WINDOW, dropout=0.3)[0] * weights).sum()

    gradients = torch.autograd.grad(value(*tensors), tensors)
    for i, gradient in enumerate(gradients):
        step = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(2)).to(device, torch.float64) * 1e-3
        ahead, back = ([x + sign * step if i == j else x for j, x in enumerate(tensors)] for sign in (1, -1))
        with torch.no_grad():
            assert float(value(*ahead) - value(*back)) / 2 == pytest.approx(float((gradient * step).sum()), rel=1e-3)


@pytest.fixture
def said(caplog):
    """What hf_flash2 has logged so far in this test."""
    notices._noticed.clear()
    return lambda: [record.message for record in caplog.records if record.name == "hf_flash2"]


def assert_exact_by_sdpa(mask_function, mask, window: int | None, said, words: str, device, **given) -> None:
    q, k, v = qkv(device)
    out, _ = interface.hf_flash2_attention(Layer(), q, k, v, mask, sliding_window=window, **given)
    close(out, by_formula(q, k, v, visible(mask_function, None, device)))
    assert len(said()) == 1 and words in said()[0]


def test_a_block_longer_than_a_window_that_does_not_bound_it_goes_to_sdpa(said, device):
    mask_function = beside_a_window(apart(device))
    mask = mask_of(mask_function, device, None, WINDOW)
    assert_exact_by_sdpa(mask_function, mask, WINDOW, said, "longer than its sliding window", device)


@pytest.mark.parametrize("remapped", [False, True])
def test_blocks_that_are_looked_up_by_positions_go_to_sdpa(remapped, said, device):
    """Transformers does so for the windows of Gemma 3, in rows of several documents: another token's block, then."""
    positions = torch.arange(SEQLEN, device=device).expand(BATCH, -1) % 7
    pattern = masking_utils.or_masks(causal, overlay(block_ids(device)))
    if not hasattr(masking_utils, "remap_positions_for_packed_sequence"):
        pytest.skip("this Transformers looks nothing up by positions")
    if remapped:
        mask_function = masking_utils.remap_positions_for_packed_sequence(pattern, positions)
        mask = mask_of(mask_function, device, None)
        assert_exact_by_sdpa(mask_function, mask, None, said, "no plain causal", device)
    else:
        within = masking_utils.remap_positions_for_packed_sequence(causal, torch.arange(SEQLEN, device=device).expand(BATCH, -1))
        mask_function = masking_utils.or_masks(within, overlay(block_ids(device)))
        assert masks.holds_blocks(mask_of(mask_function, device, None))


def test_a_mask_that_a_decoder_asks_for_again(device):
    """PaliGemma hands its mask on to a language model that asks for a causal one."""
    mask = mask_of(PATTERNS["images"](device)[0], device, None)
    again = masks.hf_flash2_mask(
        batch_size=BATCH, q_length=SEQLEN, kv_length=SEQLEN, q_offset=0, device=device, mask_function=causal, attention_mask=mask,
        config=None, dtype=DTYPE, allow_is_causal_skip=True, use_vmap=False,
    )  # fmt: skip
    assert again is mask


# ---------------------------------------------------------------------------------------------------------------------------------- models


def logits(model, **inputs) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).logits


def twins(kind: str, device, **of_text):
    """hf_flash2, eager, eager in float32"""
    ours, eager = (image_models.model(kind, name, device, DTYPE, **of_text) for name in ("hf_flash2", "eager"))
    return ours, eager, tiny.eager_in_float32(eager)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients(kind, padding, device):
    inputs = image_models.batch(kind, device)
    mask = tiny.attention_mask(padding, device)
    kept = tiny.real(mask, inputs["input_ids"])
    inputs |= {"attention_mask": mask, "use_cache": False, "labels": tiny.labels(inputs["input_ids"], mask)}
    models = twins(kind, device)
    with notices.record_calls() as calls:
        results = [logits(each, **inputs)[kept] for each in models]
    tiny.assert_as_exact_as_eager(*results)
    routes = [route for of_layer in calls.values() for route in of_layer]
    plain = {"dense" if mask is None else "padded"} if kind == "gemma4" else set()  # its full attention is causal
    assert set(routes) == {"blocks"} | plain and len(routes) == 2
    assert not torch.allclose(results[2], logits(models[2], **inputs | without_images(kind, inputs))[kept], atol=1e-2)
    ours, eager, exact = (tiny.gradients(each.train(), **inputs) for each in models)
    for name, truth in exact.items():
        tiny.assert_as_exact_as_eager(ours[name], eager[name], truth, factor=3.0, name=name)


def without_images(kind: str, inputs: dict) -> dict:
    """The types of tokens that are all text."""
    name = next(name for name in inputs if name.endswith("token_type_ids"))
    return {name: torch.full_like(inputs[name], kind.startswith("paligemma"))}


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_images_is_as_any_other(kind, device):
    inputs = image_models.batch(kind, device)
    inputs |= without_images(kind, inputs) | {"use_cache": False}
    models = twins(kind, device)
    with notices.record_calls() as calls:
        results = [logits(each, **inputs) for each in models]
    tiny.assert_as_exact_as_eager(*results)
    assert [*calls.values()] == [["dense"]] * 2
    inputs["attention_mask"] = tiny.attention_mask("left", device)
    with notices.record_calls() as calls:
        tiny.assert_as_exact_as_eager(*(logits(each, **inputs)[inputs["attention_mask"].bool()] for each in models))
    assert [*calls.values()] == [["padded"]] * 2


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_layers_run_again(kind, use_reentrant, device):
    inputs = image_models.batch(kind, device)
    mask = tiny.attention_mask("right", device)
    inputs |= {"attention_mask": mask, "use_cache": False, "labels": tiny.labels(inputs["input_ids"], mask)}
    ours = image_models.model(kind, "hf_flash2", device, DTYPE).train()
    wanted = tiny.gradients(ours, **inputs)
    ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    if use_reentrant:
        ours.enable_input_require_grads()
    found = tiny.gradients(ours, **inputs)
    for name, truth in wanted.items():
        tiny.assert_as_exact_as_eager(found[name], truth, truth, name=name)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_generation_token_by_token(kind, cache, device):
    """A static cache has slots behind the queries: there the first step is SDPA's."""
    if kind == "paligemma2" and cache == "static":
        pytest.skip("its model asks the masks that generate() has made for it for their number of dimensions, with eager attention, too")
    ours, eager, _ = twins(kind, device)
    inputs = image_models.batch(kind, device)
    arguments = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "cache_implementation": cache, "disable_compile": True}
    tiny.assert_same_greedy_tokens(ours, eager, **inputs, attention_mask=tiny.attention_mask("left", device), **arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_it_is_exact_too(kind, device):
    inputs = image_models.batch(kind, device) | {"attention_mask": tiny.attention_mask("left", device), "use_cache": False}
    models = twins(kind, device)
    kept = inputs["attention_mask"].bool()
    compiled = torch.compile(models[0], backend="eager")
    tiny.assert_as_exact_as_eager(*(logits(each, **inputs)[kept] for each in (compiled, *models[1:])))


def test_layers_that_are_compiled_one_by_one(said, device):
    ours, eager, exact = twins("gemma3", device)
    inputs = image_models.batch("gemma3", device) | {"use_cache": False}
    for layer in ours.model.language_model.layers:
        layer.compile(backend="eager")
    tiny.assert_as_exact_as_eager(*(logits(each, **inputs) for each in (ours, eager, exact)))
    assert len(said()) <= 1


def test_gradients_of_each_sample(device):
    """Inside torch.func.vmap nobody may ask where the blocks are."""
    ours, eager, _ = twins("gemma3", device)
    ours, eager = ours.float(), eager.float()
    if device.type == "cuda":
        pytest.skip("float32")
    inputs = image_models.batch("gemma3", device)

    def of_each(model):
        weights = {name: x.detach() for name, x in model.named_parameters()}

        def loss(weights, ids, types):
            rows = {"input_ids": ids[None], "token_type_ids": types[None], "use_cache": False}
            return torch.func.functional_call(model, weights, kwargs=rows).logits.square().mean()

        return torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, inputs["input_ids"], inputs["token_type_ids"])

    found, wanted = of_each(ours), of_each(eager)
    for name, truth in wanted.items():
        tiny.assert_as_exact_as_eager(found[name], truth, truth, name=name)


@pytest.mark.parametrize("masked", [False, True])
def test_documents_that_cu_seq_lens_alone_tell_apart(masked, device):
    """Two images side by side, each the end, or the beginning, of a document."""
    models = twins("gemma3", device)
    inputs = image_models.batch("gemma3", device)
    ids, types = (x[1:2] for x in inputs.values())  # tokens 0 .. 7 are of images
    bounds = torch.tensor([0, 4, SEQLEN], dtype=torch.int32, device=device)
    flash = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 8, "max_length_k": 8}
    flash |= {"attention_mask": torch.ones_like(ids)} if masked else {}
    positions = torch.arange(SEQLEN, device=device)[None]  # which do not begin anew
    with notices.record_calls() as calls:
        found = logits(models[0], input_ids=ids, token_type_ids=types, position_ids=positions, use_cache=False, **flash)
    assert [*calls.values()] == [["blocks"]] * 2
    for part in (slice(4), slice(4, SEQLEN)):
        alone = {"input_ids": ids[:, part], "token_type_ids": types[:, part], "position_ids": positions[:, part], "use_cache": False}
        _, eager, exact = (logits(model, **alone) for model in models)
        tiny.assert_as_exact_as_eager(found[:, part], eager, exact)


def test_patched_and_unpatched(device):
    _, eager, exact = twins("gemma3", device)
    inputs = image_models.batch("gemma3", device) | {"use_cache": False}
    before = logits(eager, **inputs)
    report = hf_flash2.patch(eager)
    tiny.assert_as_exact_as_eager(logits(eager, **inputs), before, logits(exact, **inputs))
    assert sorted(report.calls.values()) == [0, 1, 1] and "2 with images or a prefix that see all of themselves" in str(report)
    hf_flash2.unpatch(eager)
    assert torch.equal(logits(eager, **inputs), before)


def test_parts_of_sequences_that_processes_share_are_refused(monkeypatch, device):
    ours = image_models.model("gemma3", "hf_flash2", device, DTYPE)
    monkeypatch.setattr(context_parallel, "active", lambda: object())
    with pytest.raises(ValueError, match="cannot run under context parallelism: its mask has blocks of tokens that see all of themselves"):
        logits(ours, **image_models.batch("gemma3", device), use_cache=False)


def test_what_is_admitted():
    """Where Transformers takes flash attention back for the masks alone, and nowhere else."""
    for name, admitted in {"Gemma3": True, "Gemma4": True, "PaliGemma": True, "Blip2": False}.items():
        model_class = getattr(transformers, f"{name}ForConditionalGeneration", None)
        if model_class is not None and not model_class._supports_flash_attn:
            assert registration._is_beyond_flash_for_its_blocks(model_class) is admitted
    assert not registration._is_beyond_flash_for_its_blocks(transformers.T5ForConditionalGeneration)
    assert not registration._is_beyond_flash_for_its_blocks(transformers.LlamaForCausalLM)

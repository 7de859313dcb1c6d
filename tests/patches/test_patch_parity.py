"""A patched model computes what eager computes: logits and every gradient, for each family and padding; greedy generation token by token.

Errors are measured against float64 and may be a small multiple of eager's own. The last tests break the patch on purpose.
"""

import copy

import pytest
import small_models
import torch
import transformers
from small_models import FAMILIES, PADDINGS
from tiny_models import VERSION, assert_greedy_answer
from transformers import DynamicCache, GenerationConfig

import hf_flash2
from hf_flash2 import patches, rotary

LOGITS_FACTOR, GRADIENTS_FACTOR, FLOOR = 2.0, 3.0, 2e-6  # of eager's error; of the largest value


def results(model, inputs) -> dict[str, torch.Tensor]:
    """Logits of the real tokens, and the gradient of every parameter."""
    real = small_models.real_tokens(inputs)
    logits = model(**inputs, use_cache=False).logits[real]
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to(logits.dtype)
    model.zero_grad()
    (logits * weight).sum().backward()
    return {"logits": logits.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


def assert_as_exact_as_eager(ours: dict, eager: dict, truth: dict) -> None:
    for name, expected in truth.items():
        factor = LOGITS_FACTOR if name == "logits" else GRADIENTS_FACTOR
        error, eager_error = ((x[name].double() - expected).abs().max().item() for x in (ours, eager))
        scale = expected.abs().max().item()
        assert eager_error < 1e-4 * scale, f"{name}: eager itself is off by {eager_error:.2e}, the reference cannot be right"
        allowed = factor * eager_error + FLOOR * scale
        assert error <= allowed, f"{name}: our error is {error:.2e}, eager's is {eager_error:.2e}"


def check(family: str, padding: str) -> patches.PatchReport:
    model = small_models.model(family)
    inputs = small_models.batch(padding)
    exact = copy.deepcopy(model).double()
    if family != "gpt2":  # eager's softmax is float32 even in a float64 model; GPT-2's is not, and Transformers 4 loses its scale on sdpa
        exact.set_attn_implementation("sdpa")
    truth, eager = results(exact, inputs), results(model, inputs)
    report = hf_flash2.patch(model)
    ours = results(model, inputs)
    assert_as_exact_as_eager(ours, eager, truth)
    return report


@pytest.mark.parametrize("padding", [*PADDINGS, "documents"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients(family, padding):
    report = check(family, padding)
    route = padding if padding in ("dense", "documents") else "padded"
    assert [dict(routes) for routes in report.layers.values()] == [{route: 1}] * 2


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("padding", ["dense", "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_generation(family, padding, cache):
    eager, model = small_models.twins(family)
    inputs = small_models.batch(padding)
    options = {"max_new_tokens": 10, "do_sample": False, "cache_implementation": cache, "eos_token_id": None}
    report = hf_flash2.patch(model)
    assert torch.equal(model.generate(**inputs, **options), eager.generate(**inputs, **options))
    assert all(calls == 10 for calls in report.calls.values()), report


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the warm-up on a GPU walks a cache of all its memory in Python: minutes on a large one"
)
@pytest.mark.skipif(VERSION < (5, 0), reason="continuous batching accepts no other implementations before Transformers 5")
@pytest.mark.parametrize("family", FAMILIES)
def test_continuous_batching(family):
    """The paged cache comes to the patched forward, as the usual one does."""
    eager, model = small_models.twins(family)
    report = hf_flash2.patch(model)
    prompts = [[5, 9, 3], [7, 11, 4, 6, 8, 3, 10], [12, 5]]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    answers = model.generate_batch(prompts, generation_config=GenerationConfig(eos_token_id=-1, **options), progress_bar=False)
    for name, prompt in zip(sorted(answers), prompts, strict=True):
        assert_greedy_answer(answers[name].generated_tokens, eager, prompt, **options)
    assert sum(report.calls.values()) > 0


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="where there is a GPU, continuous batching runs on it, and these models are on the CPU"
)
@pytest.mark.skipif(VERSION < (5, 23), reason="before Transformers 5.23 the cache hands no block tables on")
@pytest.mark.parametrize("family", FAMILIES)
def test_continuous_batching_decodes_from_pages(family, block_tables):
    """The pages come to the patched forward. A window of its own has no block tables."""
    eager, model = small_models.twins(family)
    if getattr(model.config, "sliding_window", None):
        pytest.skip("Transformers has no block tables of sliding windows")
    hf_flash2.patch(model)
    prompts = [[5, 9, 3], [7, 11, 4, 6, 8, 3, 10], [12, 5]]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    answers = model.generate_batch(prompts, generation_config=GenerationConfig(eos_token_id=-1, **options), **block_tables.arguments)
    for name, prompt in zip(sorted(answers), prompts, strict=True):
        assert_greedy_answer(answers[name].generated_tokens, eager, prompt, **options)
    assert block_tables.calls > 0


class RecordingCache(DynamicCache):
    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        extra = [sorted(arg) for arg in args]
        vars(self).setdefault("record", []).append((layer_idx, key_states, value_states, extra, sorted(kwargs)))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_is_updated_as_upstream_does(family):
    eager, model = small_models.twins(family)
    hf_flash2.patch(model)
    caches = RecordingCache(), RecordingCache()
    with torch.no_grad():
        for made, cache in zip((eager, model), caches, strict=True):
            made(**small_models.batch("dense"), past_key_values=cache, use_cache=True)
    for (layer, k, v, *more), (our_layer, our_k, our_v, *our_more) in zip(*(cache.record for cache in caches), strict=True):
        assert (our_layer, our_more) == (layer, more)
        torch.testing.assert_close((our_k, our_v), (k, v), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_later_tokens_do_not_change_earlier_ones(family):
    model = small_models.model(family)
    hf_flash2.patch(model)
    inputs = small_models.batch("left")
    changed = copy.deepcopy(inputs)
    changed["input_ids"][:, -3] = 5
    with torch.no_grad():
        before, after = model(**inputs).logits, model(**changed).logits
    assert torch.equal(before[:, :-3], after[:, :-3])
    assert not torch.equal(before[:, -3:], after[:, -3:])


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_dropped_in_training_alone(family):
    model = small_models.model(family, **{"attn_pdrop" if family == "gpt2" else "attention_dropout": 0.5})
    hf_flash2.patch(model)
    for training in (True, False):
        found = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            found.append(model.train(training)(**small_models.batch("left")).logits)
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]) is not training


def test_what_gpt2_adds_to_the_residual_is_dropped_as_upstream_does():
    model = small_models.model("gpt2", resid_pdrop=0.5)
    layer = model.transformer.h[0].attn.train()
    hf_flash2.patch(model)
    zeros = (layer(torch.randn(2, 5, 48))[0] == 0).float().mean()
    assert 0.3 < zeros < 0.7


@pytest.mark.parametrize("family", FAMILIES)
def test_is_causal_of_the_call_wins(family):
    """As models of both directions, made of layers of others, pass it."""
    model = small_models.model(family)
    layer = next(iter(small_models.attention_layers(model).values()))
    x, positions = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(3)), torch.arange(5)[None]
    rotary_embedding = {} if family == "gpt2" else {"position_embeddings": model.model.rotary_emb(x, positions)}
    expected = []
    for length in (5, 1):  # the last token sees all in either direction, the first one all or itself
        part = {name: tuple(y[:, :length] for y in pair) for name, pair in rotary_embedding.items()}
        with hf_flash2.patched(model), torch.no_grad():
            expected.append(layer(x[:, :length], attention_mask=None, **part)[0])
    with hf_flash2.patched(model), torch.no_grad():
        both = layer(x, attention_mask=None, is_causal=False, **rotary_embedding)[0]
    torch.testing.assert_close(both[:, -1], expected[0][:, -1])
    torch.testing.assert_close(expected[0][:, 0], expected[1][:, 0])
    assert not torch.allclose(both[:, 0], expected[0][:, 0], atol=1e-3)


def test_gpt2_cross_attention_with_a_padded_encoder():
    model = small_models.model("gpt2", add_cross_attention=True)
    inputs = small_models.batch("left") | {
        "encoder_hidden_states": torch.randn(small_models.BATCH, 7, 48, generator=torch.Generator().manual_seed(3)),
        "encoder_attention_mask": torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [0] * 2 + [1] * 5, [1] * 7]),
    }
    real = small_models.real_tokens(inputs)
    with torch.no_grad():
        eager, eager_step = model(**inputs).logits[real], _second_step(model, inputs)
        with hf_flash2.patched(model) as report:
            ours, our_step = model(**inputs).logits[real], _second_step(model, inputs)
    # Transformers 4 makes a 4-D mask of the encoder's, which is computed by SDPA
    cross = 0 if transformers.__version__.startswith("4.") else 3
    assert all(calls == (cross if name.endswith("crossattention") else 3) for name, calls in report.calls.items()), report
    torch.testing.assert_close(ours, eager, rtol=0, atol=2e-5 * eager.abs().max().item())
    torch.testing.assert_close(our_step, eager_step, rtol=0, atol=2e-5 * eager.abs().max().item())


def _second_step(model, inputs):
    """Logits of a token that follows on a cache: the encoder's keys and values then come from the cache."""
    cache = model(**inputs, use_cache=True).past_key_values
    encoder_length = inputs["encoder_hidden_states"].shape[1]
    mask = torch.cat((inputs["attention_mask"], torch.ones(small_models.BATCH, 1, dtype=torch.int64)), 1)
    following = {"input_ids": inputs["input_ids"][:, -1:], "attention_mask": mask, "past_key_values": cache}
    output = model(**{**inputs, **following}).logits
    assert cache.cross_attention_cache.get_seq_length() == encoder_length
    return output


BROKEN = {
    "mask dropped": ("llama", "left", lambda mask, options: (None, options)),
    # without the mask, which Transformers 4 gives to dense batches, too: it knows better
    "causal flag lost": ("gpt2", "dense", lambda mask, options: (None, {**options, "causal": False})),
    "window off by one": ("mistral", "dense", lambda mask, options: (mask, {**options, "sliding_window": options["sliding_window"] + 1})),
    "scale of the layer lost": ("gpt2", "dense", lambda mask, options: (mask, {**options, "scaling": None})),
}


@pytest.mark.parametrize("mutation", BROKEN)
def test_parity_fails_when_the_patch_is_broken(mutation, monkeypatch):
    family, padding, breaking = BROKEN[mutation]
    module = patches.gpt2 if family == "gpt2" else patches.rotary
    attend = module.attend

    def broken(layer, q, k, v, mask, **options):
        mask, options = breaking(mask, options)
        return attend(layer, q, k, v, mask, **options)

    monkeypatch.setattr(module, "attend", broken)
    with pytest.raises(AssertionError, match="our error"):
        check(family, padding)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_rotary_kernel_runs_where_it_can_and_the_function_is_transformers_own(family, monkeypatch):
    model = small_models.model(family)
    hf_flash2.patch(model)
    own = getattr(hf_flash2.patches, family).__dict__[f"modeling_{family}"].apply_rotary_pos_emb
    fused = []

    def apply_rotary(q, k, cos, sin, in_place):
        fused.append((q.shape, in_place))
        return own(q, k, cos, sin, unsqueeze_dim=2)

    monkeypatch.setattr(rotary, "apply_rotary", apply_rotary)
    inputs = small_models.batch("right")
    with torch.no_grad():
        expected = model(**inputs).logits
        assert fused == []
        monkeypatch.setattr(rotary, "can_fuse", lambda *tensors: True)
        assert torch.equal(model(**inputs).logits, expected)
        shape = (small_models.BATCH, small_models.LENGTH, 4, 12)
        assert fused == [(shape, True)] * 2
        module = getattr(hf_flash2.patches, family).__dict__[f"modeling_{family}"]
        someone_elses = lambda q, k, cos, sin, position_ids=None, unsqueeze_dim=1: own(q, k, cos, sin)  # noqa: E731 - in the way of Liger's
        monkeypatch.setattr(module, "apply_rotary_pos_emb", someone_elses)
        assert torch.equal(model(**inputs).logits, expected)
    assert len(fused) == 2
    monkeypatch.undo()
    monkeypatch.setattr(rotary, "apply_rotary", apply_rotary)
    monkeypatch.setattr(rotary, "can_fuse", lambda *tensors: True)
    model(**inputs)
    layer = model.model.layers[0].self_attn
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj):
            handle = projection.register_forward_hook(lambda *_: None)
            model(**inputs)
            handle.remove()
    assert fused[2:] == [(shape, False)] * 2 + [(shape, False), (shape, True)] * 2  # gradients; a hook on the first layer


class Keeping(torch.nn.Linear):
    """As quantised layers extend it."""


def test_whose_projections_are_rotated_in_place():
    returns_new_tensors = patches.rotary.returns_new_tensors
    replaced = torch.nn.Linear(4, 4)
    replaced.forward = lambda x: x
    assert [returns_new_tensors(each) for each in (torch.nn.Linear(4, 4), Keeping(4, 4), replaced)] == [True, False, False]
    with torch.nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert not returns_new_tensors(torch.nn.Linear(4, 4))

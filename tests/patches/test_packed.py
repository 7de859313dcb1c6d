"""patch(model, packed=True): padded in, packed through the decoder, padded out, and everything as on eager attention of a padded batch."""

import copy
import dataclasses
import functools
import inspect
import sys
import types
import weakref

import emulated
import pytest
import small_models
import tiny_models
import torch
import torch.nn.functional as F
import transformers
from emulator import build
from hf_flash2.patches import contract, packed
from hf_flash2.patches import loss as packed_loss
from peft import LoraConfig, get_peft_model
from small_models import BATCH, FAMILIES, LENGTH, VOCABULARY, assert_close
from transformers import LlamaForCausalLM, LlamaModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

import hf_flash2
from hf_flash2 import kernels, notices, shareable
from hf_flash2.interface import hf_flash2_attention

PADDINGS = (*small_models.PADDINGS, "empty row")
VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])


def batch(padding: str, seed: int = 1) -> dict[str, torch.Tensor]:
    if padding != "empty row":
        return small_models.batch(padding, seed)
    inputs = small_models.batch("right", seed)
    inputs["attention_mask"][1] = 0
    return inputs


def twins(family: str, **overrides):
    """(eager, patched and packed, its report), in training mode"""
    eager, model = small_models.twins(family, **overrides)
    report = hf_flash2.patch(model, packed=True)
    return eager.train(), model.train(), report


def loss_and_gradients(model, **inputs) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return {"loss": loss.detach(), **small_models.gradients(model)}


def runs_packed(family: str, padding: str) -> bool:
    return padding != "dense" and not (family == "mistral" and padding == "holes")


# --------------------------------------------------------------------------------------------------------------------------------- equality


@pytest.mark.parametrize("checkpointing", ["no checkpointing", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient(family, padding, checkpointing):
    eager, model, report = twins(family)
    inputs = batch(padding)
    expected = loss_and_gradients(eager, **inputs, labels=small_models.labels(inputs))
    if checkpointing != "no checkpointing":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing == "reentrant"})
    assert_close(loss_and_gradients(model, **inputs, labels=small_models.labels(inputs)), expected)
    assert set(report.calls.values()) == ({1} if checkpointing == "no checkpointing" else {2})
    assert report.forwards.get("packed", 0) == runs_packed(family, padding)


@pytest.mark.parametrize("dtype", tiny_models.DTYPES, ids=str)
@pytest.mark.parametrize("padding", ["left", "holes"])
@pytest.mark.parametrize("family", FAMILIES)
def test_as_exact_as_eager_in_every_dtype(family, padding, dtype, device):
    """On a GPU, where there is one, and by its kernels: loss and gradients as close to float32 as eager's in the same dtype."""
    truth = small_models.model(family).to(device).train()
    eager, model = (copy.deepcopy(truth).to(dtype) for _ in range(2))
    report = hf_flash2.patch(model, packed=True)
    inputs = batch(padding) | {"labels": small_models.labels(batch(padding))}
    inputs = {name: x.to(device) for name, x in inputs.items()}
    expected, theirs, ours = (loss_and_gradients(each, **inputs) for each in (truth, eager, model))
    losses = [results.pop("loss").item() for results in (ours, theirs, expected)]
    assert abs(losses[0] - losses[2]) <= 3 * abs(losses[1] - losses[2]) + (1e-3 if dtype != torch.float32 else 1e-5) * losses[2]
    for name, value in expected.items():
        tiny_models.assert_as_exact_as_eager(ours[name], theirs[name], value, factor=3.0, name=name)
    assert report.forwards.get("packed", 0) == runs_packed(family, padding)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_hidden_states_come_out_padded(family, padding):
    eager, model, report = twins(family)
    inputs = batch(padding)
    real = small_models.real_tokens(inputs)
    arguments = {**inputs, "use_cache": False, "output_hidden_states": True}
    with torch.no_grad():
        expected, output = eager.eval()(**arguments), model.eval()(**arguments)
    assert output.logits.shape == (BATCH, LENGTH, VOCABULARY) and len(output.hidden_states) == len(expected.hidden_states)
    for ours, theirs in zip((output.logits, *output.hidden_states), (expected.logits, *expected.hidden_states), strict=True):
        torch.testing.assert_close(ours[real], theirs[real], rtol=0, atol=1e-4)
    assert report.forwards.get("packed", 0) == runs_packed(family, padding)
    if runs_packed(family, padding):
        assert not output.hidden_states[-1][~real].any()


def test_ways_that_a_forward_may_be_called():
    """Without a token, with types of tokens, for a tuple: as eager, and packed or not as the report says."""
    eager, model, report = twins("gpt2")
    eager.eval(), model.eval()
    inputs = batch("right") | {"use_cache": False}
    real = inputs["attention_mask"].bool()
    types = torch.randint(0, VOCABULARY, real.shape)
    calls = {
        "types": ({"token_type_ids": types}, "packed"),
        "a tuple": ({"return_dict": False}, "packed"),
        "nothing": ({"attention_mask": torch.zeros_like(inputs["attention_mask"])}, "without a token"),
    }
    for name, (more, route) in calls.items():
        before = dict(report.forwards)
        with torch.no_grad():
            expected, output = (x.transformer(**inputs | more)[0] for x in (eager, model))
        if name != "nothing":
            torch.testing.assert_close(output[real], expected[real], rtol=0, atol=1e-4, msg=name)
        (taken,) = [key for key, count in report.forwards.items() if count != before.get(key, 0)]
        assert route in taken, (name, taken)
        assert isinstance(model.transformer(**inputs | more), tuple) == (name == "a tuple")


def test_a_config_may_ask_for_tuples():
    eager, model, report = twins("llama")
    inputs = batch("right") | {"use_cache": False}
    real = small_models.real_tokens(inputs)
    for each in (eager, model):
        each.config.return_dict = False
    expected, output = eager.model(**inputs), model.model(**inputs)
    assert isinstance(output, tuple) and len(output) == len(expected) == 1 and report.forwards == {"packed": 1}
    torch.testing.assert_close(output[0][real], expected[0][real], rtol=0, atol=1e-4)
    assert not isinstance(model.model(**inputs, return_dict=True), tuple)


def test_several_hidden_states_of_a_layer_come_out_padded():
    """Gemma 3n has four predictions of each."""
    if not hasattr(transformers, "Gemma3nForCausalLM"):
        pytest.skip("this Transformers has no Gemma 3n")
    torch.manual_seed(0)
    config = transformers.Gemma3nTextConfig(
        vocab_size=VOCABULARY, vocab_size_per_layer_input=VOCABULARY, hidden_size=32, hidden_size_per_layer_input=8, intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16, layer_types=["sliding_attention", "full_attention"],
        num_kv_shared_layers=0, laurel_rank=4, altup_num_inputs=2, activation_sparsity_pattern=[0.0, 0.0], pad_token_id=0,
    )  # fmt: skip
    eager = transformers.Gemma3nForCausalLM._from_config(config, attn_implementation="eager").eval()
    model = copy.deepcopy(eager)
    report = hf_flash2.patch(model, packed=True)
    inputs = batch("right")
    real = small_models.real_tokens(inputs)
    with torch.no_grad():
        expected, output = (x(**inputs, use_cache=False, output_hidden_states=True) for x in (eager, model))
    assert report.forwards["packed"] == 1
    for ours, theirs in zip(output.hidden_states, expected.hidden_states, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours[..., real, :], theirs[..., real, :], rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_cannot_see_each_other(family):
    """Bit for bit: a token of one row changed, and every other row is as it was."""
    _, model, report = twins(family)
    model.eval()
    inputs = batch("left")
    changed = {**inputs, "input_ids": inputs["input_ids"].clone()}
    changed["input_ids"][1, 4] = 3 + (changed["input_ids"][1, 4] - 2) % (VOCABULARY - 3)
    with torch.no_grad():
        before, after = (model(**x, use_cache=False).logits for x in (inputs, changed))
    same = (before == after).all(-1)
    assert same[[0, 2, 3]].all() and same[1, :4].all()
    assert not same[1, 4:].any()
    assert report.forwards == {"packed": 2}


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_are_those_of_the_padded_batch(family):
    """Also given ones: a left-padded batch as tokenizers pad it for generation restarts them at the first real token."""
    eager, model, _ = twins(family)
    inputs = batch("left")
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    labels = small_models.labels(inputs)
    default = loss_and_gradients(model, **inputs, labels=labels)
    assert_close(default, loss_and_gradients(eager, **inputs, labels=labels))
    given = loss_and_gradients(model, **inputs, labels=labels, position_ids=positions)
    assert_close(given, loss_and_gradients(eager, **inputs, labels=labels, position_ids=positions))
    if family == "gpt2":
        assert not torch.allclose(given["loss"], default["loss"])


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_instead_of_tokens(family):
    eager, model, report = twins(family)
    inputs = batch("left")
    ids = inputs.pop("input_ids")
    results = []
    for each in (eager, model):
        embeddings = each.get_input_embeddings()(ids).detach().requires_grad_()
        each(inputs_embeds=embeddings, **inputs, labels=small_models.labels({"input_ids": ids, **inputs})).loss.backward()
        results.append(embeddings.grad[inputs["attention_mask"].bool()])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-5)
    assert report.forwards == {"packed": 1}


def test_classification_heads_see_a_padded_run():
    torch.manual_seed(0)
    eager = transformers.LlamaForSequenceClassification._from_config(small_models.config("llama"), attn_implementation="eager")
    model = copy.deepcopy(eager)
    report = hf_flash2.patch(model, packed=True)
    inputs, labels = batch("right"), torch.tensor([0, 1, 0, 1])
    assert_close(loss_and_gradients(model, **inputs, labels=labels), loss_and_gradients(eager, **inputs, labels=labels))
    assert report.forwards == {"packed": 1}
    assert report.loss == "not ours: it has no language model head"


# ------------------------------------------------------------------------------------------------------------------------------------- loss


def test_no_logits_in_training_with_labels_and_only_there():
    _, model, _ = twins("llama")
    inputs = batch("right")
    labels = small_models.labels(inputs)
    assert model(**inputs, labels=labels).logits is None
    assert model(**inputs, labels=labels, return_dict=True, logits_to_keep=0, output_attentions=False).logits is None
    assert model(**inputs).logits is not None
    assert model(**inputs, logits_to_keep=3).logits.shape[1] == 3
    assert model(**inputs, labels=labels, return_dict=False)[1].shape == (BATCH, LENGTH, VOCABULARY)
    model.eval()
    evaluated = model(**inputs, labels=labels, use_cache=False)
    assert evaluated.logits.shape == (BATCH, LENGTH, VOCABULARY) and evaluated.loss is not None


WITH_LOGITS = {
    "logits": {"logits_to_keep": LENGTH},
    "logits by their places": {"logits_to_keep": torch.arange(LENGTH)},
    "attention": {"output_attentions": True},
    "cross-attention": {"encoder_hidden_states": torch.zeros(BATCH, 3, 48)},
}


@pytest.mark.parametrize("name", WITH_LOGITS)
def test_what_is_asked_for_in_training_beside_the_loss_comes(name):
    eager, model, _ = twins("llama")
    model.set_attn_implementation("eager")  # by it there are probabilities of attention
    inputs = batch("right")
    arguments = {**inputs, "labels": small_models.labels(inputs), **WITH_LOGITS[name]}
    expected, output = eager(**arguments), model(**arguments)
    real = small_models.real_tokens(inputs)
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(output.logits[real], expected.logits[real], rtol=0, atol=1e-4)
    assert len(output.attentions or ()) == len(expected.attentions or ()) == (2 if name == "attention" else 0)


def test_hidden_states_and_the_cache_come_with_a_loss_without_logits():
    eager, model, _ = twins("llama")
    inputs = batch("right")
    arguments = {**inputs, "labels": small_models.labels(inputs)}
    real = small_models.real_tokens(inputs)
    expected, output = (each(**arguments, output_hidden_states=True) for each in (eager, model))
    assert output.logits is None and output.past_key_values is None
    for ours, theirs in zip(output.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(ours[real], theirs[real], rtol=0, atol=1e-4)
    output = model(**arguments, use_cache=True)
    assert output.logits is None and output.hidden_states is None and output.past_key_values.get_seq_length() == LENGTH


def test_logits_are_kept_where_they_are_asked_for():
    eager, model = (twin.train() for twin in small_models.twins("llama"))
    report = hf_flash2.patch(model, packed=True, keep_logits=True)
    inputs = batch("right")
    labels = small_models.labels(inputs)
    output = model(**inputs, labels=labels)
    torch.testing.assert_close(output.loss, eager(**inputs, labels=labels).loss)
    assert output.logits.shape == (BATCH, LENGTH, VOCABULARY)
    assert report.forwards == {"packed": 1} and "keep_logits=True" in report.loss
    with pytest.raises(ValueError, match="keep_logits=True is about patch"):
        hf_flash2.patch(model, keep_logits=True)


@pytest.mark.parametrize("padding", ["right", "dense"])
def test_the_head_runs_on_labelled_rows_only_a_chunk_at_a_time(padding, monkeypatch):
    eager, model, _ = twins("llama")
    inputs = batch(padding)
    labels = small_models.labels(inputs)
    labels[:, :4] = -100  # a prompt
    wanted = int((labels[:, 1:] != -100).sum())
    chunk = 7
    monkeypatch.setattr(packed_loss, "CHUNK_BYTES", 4 * VOCABULARY * chunk)
    rows = []
    model.lm_head.register_forward_hook(lambda module, args, output: rows.append(output.shape[:-1].numel()))
    ours = loss_and_gradients(model, **inputs, labels=labels)
    assert max(rows) == chunk and sum(rows) == 2 * wanted  # once forward, once in the backward
    assert_close(ours, loss_and_gradients(eager, **inputs, labels=labels))


def test_a_head_runs_again_with_the_parameters_it_was_called_with():
    """In the backward, when torch.func.functional_call has given the module its own back."""
    results = []
    for model in twins("llama")[:2]:
        torch.manual_seed(3)
        model.lm_head = torch.nn.Linear(model.lm_head.in_features, VOCABULARY)
        parameters = {name: (1.25 * x.detach()).requires_grad_() for name, x in model.named_parameters()}
        inputs = small_models.batch("left")
        loss = torch.func.functional_call(model, parameters, kwargs=inputs | {"labels": small_models.labels(inputs)}).loss
        own = dict(model.named_parameters())
        loss.backward()
        assert all(x is own[name] and x.grad is None for name, x in model.named_parameters())
        results.append({"loss": loss.detach()} | {name: x.grad for name, x in parameters.items()})
    assert_close(results[1], results[0])


def test_a_head_runs_again_in_the_mode_it_had():
    _, model, _ = twins("llama")
    model.lm_head = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(model.lm_head.in_features, VOCABULARY))
    inputs = small_models.batch("left")
    results = []
    for training in (True, False):
        torch.manual_seed(3)
        loss = model.train()(**inputs, labels=small_models.labels(inputs)).loss
        model.train(training).zero_grad()
        loss.backward()
        assert model.lm_head[0].training is training
        results.append({"loss": loss.detach()} | small_models.gradients(model))
    assert_close(*results)


def chunked_loss_and_gradients(head, hidden_states, rows, labels, factor=1.0, plain=True, **options):
    """Of factor * loss, twice over one graph, in one process with either way to run the head."""
    hidden_states = hidden_states.detach().requires_grad_()
    leaves = [hidden_states, *(p for p in head.parameters() if p.requires_grad)]
    assert packed_loss.is_plain_linear(head, hidden_states) is plain
    loss = factor * packed_loss.chunked_cross_entropy(hidden_states, rows, labels, head, head.out_features, **options)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    again = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) and a.dtype == leaf.dtype for a, b, leaf in zip(first, again, leaves, strict=True))
    return loss.detach(), *first


@pytest.fixture(params=["kernel", "torch"])
def cross_entropy_form(request, monkeypatch):
    """Which of the two computes loss and gradient of logits on the CPU: the kernel, in the emulator, or torch's functions."""
    if request.param == "torch":
        yield request.param
        return
    if build.reason_not_buildable() is not None:
        pytest.skip(build.reason_not_buildable())
    monkeypatch.setattr(packed_loss.cross_entropy, "_on_gpu", lambda device: True)
    with emulated.running(monkeypatch, emulated.load(build.build(("forward_sm80_hdim64_bf16",)))):
        yield request.param


@pytest.mark.parametrize("case", ["plain", "frozen head", "autocast", "bf16", "factor", "items", "one chunk"])
def test_a_linear_head_has_its_gradients_computed_with_the_loss(case, cross_entropy_form, monkeypatch):
    """As exact as a head with a hook, which runs again in the backward: float32 to rounding, bf16 and autocast against float32's result."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if case == "bf16" else torch.float32
    head = torch.nn.Linear(16, 40, bias=False, dtype=dtype)
    head.weight.data *= 8  # probabilities near 0 and 1
    head.requires_grad_(case != "frozen head")
    hidden_states, rows = torch.randn(2, 15, 16, dtype=dtype), torch.tensor([0, 2, 3, 7, 8, 9, 13, 20, 21, 22, 29])
    labels = torch.randint(0, 40, rows.shape)
    options = {"factor": 1 / 3 if case == "factor" else 1.0} | ({"num_items_in_batch": torch.tensor(7)} if case == "items" else {})
    chunk = 40 if case == "one chunk" else 4
    half = cross_entropy_form == "kernel" and case in ("autocast", "bf16")  # no float32 of these logits
    monkeypatch.setattr(packed_loss, "CHUNK_BYTES", (2 if half else 4) * 40 * chunk)
    owner, name = (kernels, "cross_entropy") if cross_entropy_form == "kernel" else (torch, "log_softmax")
    sizes, run = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda x, *args, **kwargs: sizes.append(x.shape[0]) or run(x, *args, **kwargs))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case == "autocast"):
        found = chunked_loss_and_gradients(head, hidden_states, rows, labels, **options)
    assert sizes == ([11] if case == "one chunk" else [4, 4, 3])
    exact = copy.deepcopy(head).float()
    handle = exact.register_forward_hook(lambda *_: None)
    expected = chunked_loss_and_gradients(exact, hidden_states.float(), rows, labels, plain=False, **options)
    assert len(found) == len(expected) == (2 if case == "frozen head" else 3)
    handle.remove()
    for ours, truth in zip(found, expected, strict=True):
        scale = truth.abs().max()
        assert (ours.float() - truth).abs().max() <= scale * (2e-2 if case in ("autocast", "bf16") else 1e-6)


@pytest.mark.parametrize(("chunk", "most"), [(768, 1.2), (96, 2.1), (85, 1.4), (24, 1.4)], ids=("1", "8", "10", "32"))
def test_the_gradient_of_the_head_is_nearly_as_exact_as_eagers_in_any_number_of_chunks(chunk, most, monkeypatch):
    torch.manual_seed(0)
    head = torch.nn.Linear(32, 160, bias=False, dtype=torch.bfloat16)
    hidden_states, labels, rows = torch.randn(1, 768, 32, dtype=torch.bfloat16), torch.randint(0, 160, (768,)), torch.arange(768)
    monkeypatch.setattr(packed_loss, "CHUNK_BYTES", 4 * 160 * chunk)

    def error(gradient):
        return ((gradient.double() - truth).norm() / truth.norm()).item()

    def gradient(head, loss):
        return torch.autograd.grad(loss(head), head.weight)[0]

    def eager(head):
        logits = head(hidden_states[0].to(head.weight.dtype))
        return F.cross_entropy(logits.double() if logits.dtype == torch.float64 else logits.float(), labels)

    truth = gradient(copy.deepcopy(head).double(), eager)
    ours = gradient(head, lambda head: packed_loss.chunked_cross_entropy(hidden_states, rows, labels, head, 160))
    assert error(ours) <= most * error(gradient(head, eager))


def test_a_chunk_is_whole_tiles_where_it_holds_one(monkeypatch):
    rows = {}
    for megabytes in (0, 1, 512):
        monkeypatch.setattr(packed_loss, "CHUNK_BYTES", megabytes * 2**20)
        rows[megabytes] = [packed_loss._chunk_rows(vocabulary * 2) for vocabulary in (5_000, 128_256)]
    assert rows == {0: [1, 1], 1: [104, 4], 512: [53_632, 2048]}


def test_which_heads_are_plain(monkeypatch):
    x = torch.randn(2, 3, 8, requires_grad=True)
    linear = torch.nn.Linear(8, 5, bias=False)
    assert packed_loss.is_plain_linear(linear, x)
    with torch.no_grad():
        assert not packed_loss.is_plain_linear(linear, x)
    hooked, replaced, normed = (copy.deepcopy(linear) for _ in range(3))
    hooked.register_full_backward_hook(lambda *_: None)
    replaced.forward = lambda x: x
    torch.nn.utils.parametrizations.weight_norm(normed)
    sharded = copy.deepcopy(linear)
    sharded.weight = torch.nn.Parameter(linear.weight.detach().as_subclass(type("Sharded", (torch.Tensor,), {})))
    others = {
        "hooked": hooked, "replaced forward": replaced, "parametrised": normed, "of a tensor subclass": sharded,
        "biased": torch.nn.Linear(8, 5), "wrapped": torch.nn.Sequential(linear), "half": copy.deepcopy(linear).half(),
        "of another dtype": copy.deepcopy(linear).bfloat16(), "elsewhere": copy.deepcopy(linear).to("meta"),
    }  # fmt: skip
    assert [name for name, head in others.items() if hasattr(head, "weight") and packed_loss.is_plain_linear(head, x)] == []
    assert not packed_loss.is_plain_linear(others["wrapped"], x)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not packed_loss.is_plain_linear(linear, x)  # hooked, as every module is
    handle.remove()
    assert packed_loss.is_plain_linear(linear, x)
    assert not packed_loss.is_plain_linear(copy.deepcopy(linear).requires_grad_(False), x.detach())
    assert not packed_loss.is_plain_linear(others["half"], x.half())  # whose gradients are scaled
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert packed_loss.is_plain_linear(linear, x.bfloat16()) is (dtype == torch.bfloat16)


class OwnForward(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


SHARDED = ("plain", "bias", "half", "frozen", "own forward", "replaced forward", "more hooks", "other hooks", "inside another", "whole")


STEPS = {"as they are": (), "scaled": (("*", 0.5),), "capped": (("/", 2.0), ("tanh", 1.0), ("*", 2.0))}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("case", SHARDED)
def test_how_often_a_sharded_head_is_called(case, steps, monkeypatch):
    """Once, if its hooks are FSDP's alone: processes have to call it as often as each other, and only its own product may be divided."""
    monkeypatch.setattr(packed_loss, "_is_sharded", lambda module: case != "whole" and isinstance(module, torch.nn.Linear))
    torch.manual_seed(0)
    dtype = torch.float16 if case == "half" else torch.float32
    head = (OwnForward if case == "own forward" else torch.nn.Linear)(8, 5, bias=case == "bias", dtype=dtype)
    head.requires_grad_(case != "frozen")
    head = torch.nn.Sequential(head) if case == "inside another" else head
    calls = []
    (head.register_full_backward_pre_hook if case == "other hooks" else head.register_forward_pre_hook)(lambda *_: calls.append("before"))
    head.register_forward_hook(lambda module, args, output: calls.append(output.shape))
    if case == "more hooks":
        head.register_forward_hook(lambda module, args, output: 3 * output)
    if case == "replaced forward":
        head.forward = lambda x: torch.nn.functional.linear(x, -head.weight)
    own = dict(vars(head))
    monkeypatch.setattr(packed_loss, "CHUNK_BYTES", 4 * 5 * 2)  # two rows
    hidden_states, rows, labels = torch.randn(1, 7, 8, dtype=dtype, requires_grad=True), torch.tensor([0, 2, 3, 5, 6]), torch.arange(5)
    found = packed_loss.chunked_cross_entropy(hidden_states, rows, labels, head, 5, steps=STEPS[steps])
    shapes = [call for call in calls if call != "before"]
    by_itself = case in ("plain", "bias", "half", "frozen")
    assert vars(head) == own and shapes == ([()] if by_itself else [(2, 5), (2, 5), (1, 5)] if case == "whole" else [(5, 5)])
    leaves = [hidden_states, *(p for p in head.parameters() if p.requires_grad)]
    logits = head(hidden_states[0, rows])
    finished = {"as they are": logits, "scaled": logits / 2, "capped": 2 * torch.tanh(logits / 2)}[steps]
    expected = F.cross_entropy(finished.float(), labels)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3 if case == "half" else 1e-5, atol=1e-4 if case == "half" else 1e-6)


class GathersInBackward(torch.autograd.Function):
    """As DeepSpeed's ZeRO-3 hangs it to what a module returns."""

    @staticmethod
    def forward(ctx, output, calls):
        ctx.calls = calls
        return output.detach()

    @staticmethod
    def backward(ctx, grad):
        ctx.calls.append("backward")
        return grad, None


@pytest.mark.parametrize("bias", [False, True])
def test_a_head_of_zero3_is_called_once(bias, monkeypatch):
    """Of heads with other hooks than its own, too. Its backward begins at what the call returns, where the weights are gathered again."""
    monkeypatch.setattr(packed_loss, "CHUNK_BYTES", 4 * 5 * 2)  # two rows
    torch.manual_seed(0)
    head, calls = torch.nn.Linear(8, 5, bias=bias), []
    head.weight.ds_id = 0
    head.register_forward_pre_hook(lambda *_: calls.append("gather"))
    head.register_forward_pre_hook(lambda *_: None)
    head.register_forward_hook(lambda *_: None)
    head.register_forward_hook(lambda module, args, output: GathersInBackward.apply(output, calls))
    hidden_states, rows, labels = torch.randn(1, 7, 8, requires_grad=True), torch.tensor([0, 2, 3, 5, 6]), torch.arange(5)
    leaves = [hidden_states, *head.parameters()]
    expected = F.cross_entropy(F.linear(hidden_states[0, rows], head.weight, head.bias), labels)
    for more in (False, True):
        if more:
            head.register_forward_hook(lambda *_: None)
        calls.clear()
        found = packed_loss.chunked_cross_entropy(hidden_states, rows, labels, head, 5)
        assert calls == ["gather"]
        gradients = torch.autograd.grad(found, leaves)
        assert calls[1:] == (["gather", "backward"] if more else ["backward"])  # it runs once more, or its gradients are there already
        for ours, theirs in zip((found, *gradients), (expected, *torch.autograd.grad(expected, leaves, retain_graph=True)), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_the_loss_of_one_label():
    torch.manual_seed(0)
    head, hidden_states = torch.nn.Linear(8, 5, bias=False), torch.randn(1, 3, 8)
    found = chunked_loss_and_gradients(head, hidden_states, torch.tensor([1]), torch.tensor([4]), factor=1 / 3)
    hidden_states.requires_grad_()
    expected = F.cross_entropy(head(hidden_states[0, 1:2]), torch.tensor([4])) / 3
    for ours, theirs in zip(found, (expected, *torch.autograd.grad(expected, (hidden_states, head.weight))), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("plain", [True, False])
def test_the_loss_of_a_half_model_is_float32(plain):
    torch.manual_seed(0)
    head, hidden_states = torch.nn.Linear(8, 50, bias=not plain, dtype=torch.bfloat16), torch.randn(1, 300, 8, dtype=torch.bfloat16)
    labels = torch.randint(0, 50, (300,))
    loss, *_ = chunked_loss_and_gradients(head, hidden_states, torch.arange(300), labels, plain=plain)
    with torch.no_grad():
        torch.testing.assert_close(loss, F.cross_entropy(head(hidden_states[0]).float(), labels), rtol=1e-5, atol=0)


@pytest.mark.parametrize("items", [40, torch.tensor(40)])
def test_num_items_in_batch_divides_the_sum(items, monkeypatch):
    """A tensor is not read back to the host, which would wait for the whole forward."""
    monkeypatch.setattr(torch.Tensor, "__float__", lambda x: pytest.fail("read back"))
    eager, model, _ = twins("llama")
    inputs = batch("right")
    arguments = {**inputs, "labels": small_models.labels(inputs), "num_items_in_batch": items}
    assert_close(loss_and_gradients(model, **arguments), loss_and_gradients(eager, **arguments))


def test_shifted_labels_and_another_index_to_ignore():
    eager, model, _ = twins("llama")
    inputs = batch("right")
    labels = small_models.labels(inputs)
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    expected = loss_and_gradients(eager, **inputs, labels=labels)
    assert_close(loss_and_gradients(model, **inputs, labels=labels, shift_labels=shifted), expected)
    replaced = labels.masked_fill(labels == -100, -1)
    assert_close(loss_and_gradients(model, **inputs, labels=replaced, ignore_index=-1), expected)


def test_shifted_labels_of_another_shape_go_upstream():
    """Which takes those of all tokens in any shape, and refuses one label less."""
    eager, model, _ = twins("llama")
    inputs = batch("right")
    labels = small_models.labels(inputs)
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100).flatten()
    expected = loss_and_gradients(eager, **inputs, labels=labels)
    assert_close(loss_and_gradients(model, **inputs, labels=labels, shift_labels=shifted), expected)
    with pytest.raises(ValueError, match="batch_size"):
        model(input_ids=inputs["input_ids"], labels=labels, shift_labels=labels[:, 1:].contiguous())


def test_without_any_label():
    """As upstream: the mean of nothing is NaN, a sum over a given number of items is 0 and has zero gradients."""
    _, model, _ = twins("llama")
    inputs = batch("right")
    nothing = torch.full_like(inputs["input_ids"], -100)
    assert model(**inputs, labels=nothing).loss.isnan()
    for items in ({"num_items_in_batch": 8}, {}, {"num_items_in_batch": 0}):
        result = loss_and_gradients(model, **inputs, labels=nothing, **items)
        loss = result.pop("loss")
        assert not loss.any() if items.get("num_items_in_batch") else loss.isnan()
        assert all(not value.any() for value in result.values()), "one batch without a label must not make NaN of the weights"


def test_the_gradients_computed_with_the_loss_are_not_kept_with_it():
    """A loop that holds its loss until the next one, or sums losses up, would hold a gradient of the head for each."""
    _, model, _ = twins("llama")
    inputs = batch("right")
    loss = model(**inputs, labels=small_models.labels(inputs)).loss
    node = loss.grad_fn.next_functions[0][0]
    grad_hidden, grad_weight = map(weakref.ref, node.saved_tensors)
    assert grad_weight().shape == model.lm_head.weight.shape
    loss.backward()
    assert grad_hidden() is None and grad_weight() is None
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_second_derivative_is_refused():
    _, model, _ = twins("llama")
    inputs = batch("right")
    loss = model(**inputs, labels=small_models.labels(inputs)).loss
    (gradient,) = torch.autograd.grad(loss, model.lm_head.weight, create_graph=True)
    with pytest.raises(NotImplementedError, match="packed loss has no second derivative"):
        (loss + gradient.square().sum()).backward()


def test_labels_that_are_left_out_and_counted_are_said_once(monkeypatch, caplog):
    monkeypatch.setattr(notices, "_noticed", set())
    _, model, _ = twins("llama")
    inputs = batch("right")
    labels = small_models.labels(inputs)
    with caplog.at_level("WARNING", logger="hf_flash2"):
        model(**inputs, labels=labels, num_items_in_batch=40)
        model(**inputs, labels=inputs["input_ids"])  # divided by those that count
        assert caplog.records == []
        for _ in range(2):
            model(**inputs, labels=inputs["input_ids"], num_items_in_batch=40)
    [record] = caplog.records
    assert "the packed loss leaves them out" in record.message


@pytest.mark.parametrize("padding", ["left", "holes"])
def test_what_padding_predicts_is_not_counted(padding):
    """The stated difference: a label behind padding, and labels on padding. Without them the loss is that of the labels that are left."""
    _, model, _ = twins("llama")
    inputs = batch(padding)
    every = inputs["input_ids"].clone()
    wanted = loss_and_gradients(model, **inputs, labels=small_models.labels(inputs))
    behind_padding = inputs["attention_mask"].bool() & (small_models.labels(inputs) == -100)
    assert behind_padding[:, 1:].any()
    labels = torch.where(inputs["attention_mask"].bool(), every, -100)
    assert_close(loss_and_gradients(model, **inputs, labels=labels), wanted)


def test_labels_of_another_shape_are_upstreams_error():
    eager, model, _ = twins("llama")
    inputs = batch("right")
    labels = small_models.labels(inputs)[:, 1:]
    for each in (eager, model):
        with pytest.raises(ValueError, match="batch_size"):
            each(**inputs, labels=labels)


def test_a_call_without_tokens_is_upstreams_error():
    _, model, _ = twins("llama")
    inputs = batch("right")
    labels = small_models.labels(inputs)
    del inputs["input_ids"]
    for arguments in ({"labels": labels}, inputs, inputs | {"labels": labels}):
        with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
            model(**arguments)


def test_arguments_by_their_places():
    eager, model, report = twins("llama")
    ids, mask = batch("right").values()
    torch.testing.assert_close(model(ids, mask, labels=ids).loss, model(input_ids=ids, attention_mask=mask, labels=ids).loss)
    assert report.forwards == {"packed": 2}
    for each in (eager.model, model.model):
        with pytest.raises(TypeError, match="input_ids"):
            each(ids, mask, input_ids=ids)
        with pytest.raises(TypeError):
            each(ids, mask, *[None] * 20)


def test_a_loss_function_of_the_user_gets_logits():
    _, model, _ = twins("llama")
    inputs = batch("right")
    seen = []

    def own_loss(logits, labels, vocab_size, **kwargs):
        seen.append(logits.shape)
        return ForCausalLMLoss(logits, labels, vocab_size)

    model.loss_function = own_loss
    assert model(**inputs, labels=small_models.labels(inputs)).logits is not None
    assert seen == [(BATCH, LENGTH, VOCABULARY)]


def test_the_comparison_notices_a_lost_boundary(monkeypatch):
    """Were the rows one long document, losses would differ: the tests above can fail."""
    eager, model, _ = twins("llama")
    inputs = batch("right")
    layout = packed._layout

    def one_document(module, mask):
        found = layout(module, mask)
        ends = found.cu_seqlens[[0, -1]]
        return packed.Packing(found.indices, ends, int(ends[-1]), found.batch, found.seqlen)

    monkeypatch.setattr(packed, "_layout", one_document)
    labels = small_models.labels(inputs)
    with pytest.raises(AssertionError):
        assert_close(loss_and_gradients(model, **inputs, labels=labels), loss_and_gradients(eager, **inputs, labels=labels))


# --------------------------------------------------------------------------------------------------------------------- where it steps aside


def test_generation_runs_padded_and_is_unchanged():
    eager, model, report = twins("llama")
    inputs = batch("left")
    arguments = {**inputs, "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.eval().generate(**arguments), eager.eval().generate(**arguments))
    assert set(report.forwards) == {"with a cache"}


def test_a_cache_is_never_lost():
    _, model, report = twins("llama")
    inputs = batch("right")
    assert model.eval()(**inputs).past_key_values is not None  # the config says use_cache
    assert model.train()(**inputs, use_cache=True).past_key_values is not None
    assert report.forwards == {"with a cache": 2}
    assert model(**inputs).past_key_values is None  # training, and nobody asked
    assert report.forwards["packed"] == 1
    model.config.use_cache = False
    assert model.eval()(**inputs).past_key_values is None
    assert report.forwards == {"with a cache": 2, "packed": 2}


def test_a_cache_that_is_given_is_filled():
    """Whatever use_cache says, as upstream does."""
    _, model, report = twins("llama")
    cache = transformers.DynamicCache()
    model(**batch("right"), past_key_values=cache, use_cache=False)
    assert cache.get_seq_length() == LENGTH and report.forwards == {"with a cache": 1}


@pytest.mark.parametrize(
    "how",
    ["exported", pytest.param("meta", marks=pytest.mark.skipif(VERSION < (5, 0), reason="its models ask for autocast of a meta device"))],
)
def test_masks_and_labels_without_values_run_padded(how):
    eager, model, report = twins("llama")
    inputs = batch("right")
    real = small_models.real_tokens(inputs)
    inputs["labels"] = small_models.labels(inputs)
    if how == "meta":
        outside = {name: x.to("meta") for name, x in inputs.items()}
        found = model.to("meta")(**outside, use_cache=False)
        assert found.loss.is_meta and found.logits.shape == (BATCH, LENGTH, VOCABULARY)
    else:
        exported = torch.export.export(model, (), inputs | {"use_cache": False}, strict=False).module()
        found, expected = (run(**inputs, use_cache=False) for run in (exported, eager))
        torch.testing.assert_close(found.logits[real], expected.logits[real], rtol=0, atol=1e-4)
        torch.testing.assert_close(found.loss, expected.loss)
    assert report.losses == {"from logits": 1}
    assert report.forwards == {"with a mask that has no values": 1}


def test_masks_that_are_not_padding_run_padded():
    eager, model, report = twins("llama")
    inputs = batch("right")
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & inputs["attention_mask"].bool()[:, None, None, :]
    additive = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    arguments = {"input_ids": inputs["input_ids"], "attention_mask": additive, "labels": small_models.labels(inputs)}
    assert_close(loss_and_gradients(model, **arguments), loss_and_gradients(eager, **arguments))
    assert report.forwards == {"with a mask that is not [B, S]": 1}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_implementation_set_later_sees_a_padded_batch(family, implementation):
    """It finds the rows of packed tokens by their positions alone, and would take padding inside one for its end."""
    plain, model, report = twins(family)
    plain.set_attn_implementation(implementation)  # GPT-2's sdpa is not its eager attention before Transformers 5
    model.set_attn_implementation(implementation)
    inputs = batch("holes")
    labels = small_models.labels(inputs)
    assert_close(loss_and_gradients(model, **inputs, labels=labels), loss_and_gradients(plain, **inputs, labels=labels))
    assert report.forwards == {"with another attention": 1}


def test_somebody_elses_function_in_the_registry_sees_a_padded_batch(monkeypatch):
    """As DeepSpeed's Ulysses puts one there, for parts of sequences that processes share."""
    _, model, report = twins("llama")
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "hf_flash2", lambda *args, **kwargs: hf_flash2_attention(*args, **kwargs))
    assert model(**batch("left")).logits.shape == (BATCH, LENGTH, VOCABULARY)
    assert report.forwards == {"with another attention": 1}


ROWS = torch.arange(0, BATCH * LENGTH + 1, LENGTH, dtype=torch.int32)
# name -> (family, what is given more, the route of the call)
MORE_ARGUMENTS = {
    "documents": ("llama", {"cu_seq_lens_q": ROWS, "cu_seq_lens_k": ROWS, "max_length_q": 13, "max_length_k": 13}, "with documents"),
    "an encoder": ("llama", {"encoder_hidden_states": torch.zeros(BATCH, 3, 48)}, "with cross-attention"),
    "router logits": ("llama", {"output_router_logits": True}, "with router logits"),
    "no router logits": ("llama", {"output_router_logits": False}, "packed"),
    "something per token": ("llama", {"mm_token_type_ids": torch.ones(BATCH, LENGTH)}, "with mm_token_type_ids"),
    "vectors per token": ("llama", {"grid_thw": torch.ones(BATCH, LENGTH, 3)}, "with grid_thw"),
    "something per row": ("llama", {"image_sizes": torch.ones(BATCH, 2), "guidance_scale": torch.ones(BATCH)}, "packed"),
    "positions of one row": ("gpt2", {"position_ids": torch.arange(LENGTH)[None] + 3}, "packed"),
    "positions without rows": ("gpt2", {"position_ids": torch.arange(LENGTH) + 3}, "with positions that are not [B, S]"),
    "one position a row": ("gpt2", {"position_ids": torch.arange(BATCH)[:, None]}, "with positions that are not [B, S]"),
}


@pytest.mark.parametrize("name", MORE_ARGUMENTS)
def test_what_else_a_decoder_is_given_decides_whether_it_runs_packed(name):
    family, more, route = MORE_ARGUMENTS[name]
    eager, model, report = twins(family)
    inputs = batch("right") | {"use_cache": False}
    real = small_models.real_tokens(inputs)
    wanted = eager(**inputs, **more if family == "gpt2" else {}).logits  # Llama has no use for any of the others
    torch.testing.assert_close(model(**inputs, **more).logits[real], wanted[real], rtol=0, atol=1e-4)
    assert report.forwards == {route: 1}


@pytest.mark.parametrize("keep_logits", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_transforms_of_functions_run_padded(family, keep_logits):
    """Gradients as a function, and of each row: nobody may ask there how many tokens are real."""
    eager = small_models.model(family)
    model = copy.deepcopy(eager)
    report = hf_flash2.patch(model, packed=True, keep_logits=keep_logits)
    inputs = batch("right")
    rows = inputs | {"labels": small_models.labels(inputs)}

    def gradients(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], ...]:
        parameters = {name: x.detach() for name, x in model.named_parameters()}

        def loss(parameters, rows):
            return torch.func.functional_call(model, parameters, kwargs=rows | {"use_cache": False}).loss

        def loss_of_row(parameters, row):
            return loss(parameters, {name: x[None] for name, x in row.items()})

        of_each = torch.func.vmap(torch.func.grad(loss_of_row), (None, 0))
        return torch.func.grad(loss)(parameters, rows), of_each(parameters, rows)

    for found, wanted in zip(gradients(model), gradients(eager), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert report.forwards == {"inside torch.func": 2}


def test_parts_of_sequences_run_padded(monkeypatch):
    _, model, report = twins("llama")
    monkeypatch.setattr(packed, "context_parallel", types.SimpleNamespace(active=lambda: "processes"))
    model(**batch("right"))
    assert report.forwards == {"with parts of sequences that processes share": 1}


@pytest.mark.parametrize("given", [None, True, False])
@pytest.mark.parametrize("configured", [True, False])
def test_router_logits_and_their_loss_are_those_of_the_padded_batch(configured, given):
    eager = other_model("Mixtral")
    eager.config.output_router_logits = configured
    model = copy.deepcopy(eager)
    report = hf_flash2.patch(model, packed=True)
    inputs = batch("right") | {"use_cache": False, "output_router_logits": given}
    labels = small_models.labels(inputs)
    assert_close(loss_and_gradients(model, **inputs, labels=labels), loss_and_gradients(eager, **inputs, labels=labels))
    assert report.forwards == {"with router logits" if configured and given is None or given else "packed": 1}


@pytest.mark.skipif(VERSION < (5, 0), reason="its outputs have no router_logits")
def test_router_logits_that_no_loss_is_made_of_are_handed_on():
    """Transformers' outputs have them from 5.24 on."""
    torch.manual_seed(0)
    sizes = {
        name: 16 for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "moe_intermediate_size")
    }
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    config = transformers.DeepseekV3Config(**_SIZES | {"num_key_value_heads": 4} | sizes | experts)
    eager = transformers.DeepseekV3ForCausalLM._from_config(config, attn_implementation="eager").train()
    model = copy.deepcopy(eager)
    assert hf_flash2.patch(model, packed=True).loss == IN_CHUNKS
    inputs = batch("right") | {"use_cache": False, "output_router_logits": True}
    expected, found = (each(**inputs, labels=small_models.labels(inputs)) for each in (eager, model))
    assert torch.allclose(found.loss, expected.loss)
    assert found.keys() == expected.keys()


def test_a_mask_that_the_caller_has_made_runs_padded():
    """One for each type of layer, as Qwen 2 takes them, is no tensor."""
    eager = other_model("Qwen2")
    model = copy.deepcopy(eager)
    report = hf_flash2.patch(model, packed=True)
    inputs = batch("right")
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & inputs["attention_mask"].bool()[:, None, None, :]
    additive = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    arguments = {"input_ids": inputs["input_ids"], "attention_mask": {"full_attention": additive}, "labels": small_models.labels(inputs)}
    assert_close(loss_and_gradients(model, **arguments), loss_and_gradients(eager, **arguments))
    assert report.forwards == {"with a mask that is not [B, S]": 1}


def test_a_window_as_long_as_the_rows_counts_no_padding():
    eager, model, report = twins("mistral", sliding_window=LENGTH)
    inputs = batch("holes")
    labels = small_models.labels(inputs)
    assert_close(loss_and_gradients(model, **inputs, labels=labels), loss_and_gradients(eager, **inputs, labels=labels))
    assert report.forwards == {"packed": 1}
    _, model, report = twins("mistral", sliding_window=LENGTH - 1)
    model(**inputs)
    assert report.forwards == {"with padding inside a row, under a sliding window": 1}


def test_a_batch_without_padding_is_left_as_it_is():
    eager, model, report = twins("llama")
    inputs = batch("dense") | {"attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.int64)}
    labels = small_models.labels(inputs)
    assert_close(loss_and_gradients(model, **inputs, labels=labels), loss_and_gradients(eager, **inputs, labels=labels))
    assert report.forwards == {"without padding": 1}


# ------------------------------------------------------------------------------------------------------------------- putting on, taking off


def test_report():
    _, model, report = twins("llama")
    assert str(report).splitlines()[-1] == f"  loss      {IN_CHUNKS}"
    labels = small_models.labels(batch("right"))
    model.eval()(**batch("right"), labels=labels, use_cache=False)
    assert report.loss == "not ours so far: 1 from logits"
    model.train()(**batch("right"))
    model(**batch("right"), labels=labels, use_cache=True)
    model(**batch("right"), labels=labels)
    assert str(report).splitlines()[-2:] == [
        "  decoder   packed: 3 packed, 1 with a cache",
        f"  loss      {IN_CHUNKS}: 2 in chunks, 1 from logits",
    ]
    assert "decoder" not in str(hf_flash2.patch(small_models.model("llama")))


def call_the_decoder_alone(model):
    model.forward = lambda labels, **inputs: types.SimpleNamespace(loss=own_loss(model, labels, **inputs))


def call_the_decoder_if_asked(model):
    """As TRL's trainers do it, which ask."""
    around = model.forward

    def forward(self, *args, its_own_head: bool = True, labels=None, **kwargs):
        if not its_own_head:
            return around(*args, labels=labels, **kwargs)
        return types.SimpleNamespace(loss=own_loss(self, labels, *args, **kwargs))

    model.forward = types.MethodType(functools.wraps(type(model).forward)(forward), model)


def take_the_labels_out(model):
    """As Trainer does for a loss of the user's."""
    around = model.forward

    def forward(labels, **inputs):
        logits = around(**inputs).logits
        return types.SimpleNamespace(loss=ForCausalLMLoss(logits, labels, VOCABULARY))

    model.forward = forward


def own_loss(model, labels, **inputs) -> torch.Tensor:
    return ForCausalLMLoss(model.lm_head(model.base_model(**inputs).last_hidden_state), labels, VOCABULARY)


@pytest.mark.parametrize("with_lora", [False, True])
@pytest.mark.parametrize("go_around", [call_the_decoder_alone, call_the_decoder_if_asked, take_the_labels_out])
def test_a_loss_that_somebody_else_computes_is_not_called_ours(go_around, with_lora):
    eager, model, report = twins("llama")
    go_around(model)
    assert report.loss == IN_CHUNKS
    outer = get_peft_model(model, LoraConfig(target_modules=["q_proj"])).train() if with_lora else model
    inputs = batch("right")
    labels = small_models.labels(inputs)
    torch.testing.assert_close(outer(**inputs, labels=labels).loss, eager(**inputs, labels=labels).loss)
    assert report.forwards == {"packed": 1} and report.losses == {}
    assert report.loss.startswith("not ours so far: ") and report.loss in str(report)
    if go_around is call_the_decoder_if_asked:
        outer(**inputs, labels=labels, its_own_head=False)
        assert report.loss == f"{IN_CHUNKS}: 1 in chunks"
    hf_flash2.unpatch(model)
    outer(**inputs, labels=labels)
    assert report.losses.total() == (go_around is call_the_decoder_if_asked)


@pytest.mark.parametrize("family", FAMILIES)
def test_unpatch_restores_every_attribute(family):
    model = small_models.model(family)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    hf_flash2.patch(model, packed=True)
    hf_flash2.unpatch(model)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_verify_runs_a_packed_model_packed(monkeypatch):
    _, model, report = twins("llama")
    inputs = batch("left")
    assert hf_flash2.verify(model, inputs).ok
    assert report.forwards == {"packed": 1}
    layout = packed._layout
    monkeypatch.setattr(
        packed, "_layout", lambda *args: dataclasses.replace(layout(*args), cu_seqlens=torch.tensor([0, 4, 8, 12, 37]), max_seqlen=25)
    )
    assert not hf_flash2.verify(model, inputs).ok


def test_other_options_patch_anew():
    model = small_models.model("llama").train()
    inputs = batch("right")
    labels = small_models.labels(inputs)
    plain = hf_flash2.patch(model)
    packed = hf_flash2.patch(model, packed=True)
    assert packed is not plain and hf_flash2.patch(model, packed=True) is packed
    assert model(**inputs, labels=labels).logits is None
    with hf_flash2.patched(model, packed=True, keep_logits=True):
        assert model(**inputs, labels=labels).logits is not None
    assert model(**inputs, labels=labels).logits is None
    with hf_flash2.patched(model) as report:
        assert report.forwards is None and model(**inputs, labels=labels).logits is not None
    assert model(**inputs, labels=labels).logits is None


def test_a_deep_copy_stands_alone():
    _, model, report = twins("llama")
    inputs = batch("right")
    clone = copy.deepcopy(model)
    hf_flash2.unpatch(model)
    with torch.no_grad():
        clone.lm_head.weight.zero_()
    labels = small_models.labels(inputs)
    assert clone(**inputs, labels=labels).loss.item() == pytest.approx(torch.tensor(float(VOCABULARY)).log().item())
    assert model(**inputs, labels=labels).logits is not None
    assert report.forwards == {}


def test_a_forward_that_a_wrapper_has_left_behind_is_no_wrapper():
    """accelerate's unwrap_model puts the class's own back, on the instance."""
    model = small_models.model("llama").train()
    model.forward = types.MethodType(type(model).forward, model)
    assert hf_flash2.patch(model, packed=True).loss == IN_CHUNKS
    assert model(**batch("right"), labels=small_models.labels(batch("right"))).logits is None
    hf_flash2.unpatch(model)
    assert model.forward.__func__ is type(model).forward


# ----------------------------------------------------------------------------------------------------------------------------- other models

_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "initializer_range": 0.25, "attention_dropout": 0.0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
IN_CHUNKS = "in chunks, without logits, in training with labels"
# name -> what the report says of the loss
PACKABLE = {
    "Qwen2": IN_CHUNKS, "Qwen3": IN_CHUNKS, "Phi3": IN_CHUNKS, "Olmo2": IN_CHUNKS, "SmolLM3": IN_CHUNKS, "Starcoder2": IN_CHUNKS,
    "Gemma": IN_CHUNKS, "Glm4": IN_CHUNKS,
    "Granite": IN_CHUNKS, "Cohere": IN_CHUNKS, "Mixtral": IN_CHUNKS, "Gemma2": IN_CHUNKS, "Qwen3Moe": IN_CHUNKS,
}  # fmt: skip
if VERSION >= (5, 0):
    PACKABLE["Gemma3"] = IN_CHUNKS
# Of logits, so that without them the loss is another.
OF_LOGITS = {"logits_scaling": 4.0, "logit_scale": 0.3, "final_logit_softcapping": 1.5}
REFUSED = {
    "OPT": "its OPTModel does not make Transformers' causal mask itself",
    "MiniMax": "it has 2 layers, and the attention of 1 runs on hf_flash2",
    "BioGpt": "its BioGptModel uses the attention mask for more"
    if VERSION >= (5, 0)
    else "its BioGptModel does not make Transformers' causal mask itself",
}
if VERSION >= (5, 0):
    REFUSED["StableLm"] = "its StableLmDecoderLayer does not hand on the keyword arguments"
    REFUSED["Phimoe"] = "its layers leave their sliding window to the mask"


def other_model(name: str):
    model_class = getattr(transformers, f"{name}ForCausalLM")
    config = model_class.config_class(**_SIZES, **{"sliding_window": 4} if name == "Phimoe" else {})
    experts = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
    for attribute, value in (experts | {"hidden_dropout_prob": 0.0} | OF_LOGITS).items():
        if hasattr(config, attribute):
            setattr(config, attribute, value)
    torch.manual_seed(0)
    return model_class._from_config(config, attn_implementation="eager").train()


@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_of_the_embedding_see_padded_rows(family):
    """As NEFTune's, whose noise depends on the length of a row."""
    eager, model, report = twins(family)
    seen = []

    def add_to_the_embedding(module, args, output):
        seen.append(output.shape)
        return output + torch.linspace(-1, 1, output.shape[1])[:, None] / output.shape[1] ** 0.5

    for each in (eager, model):
        each.get_input_embeddings().register_forward_hook(add_to_the_embedding)
    inputs = batch("left")
    labels = small_models.labels(inputs)
    assert_close(loss_and_gradients(model, **inputs, labels=labels), loss_and_gradients(eager, **inputs, labels=labels))
    assert report.forwards == {"packed": 1} and seen[0] == seen[1]


def ask_for_gradients(model):
    model.enable_input_require_grads()  # as gradient checkpointing and PEFT do


def add_noise(model):
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: output + 0.1)


@pytest.mark.parametrize(
    ("hook", "route"),
    [
        (ask_for_gradients, "packed"),
        (add_noise, "with a hook on its embedding, beside which it looks tokens up again"),
    ],
)
@pytest.mark.parametrize("family", ["Gemma3n", "Gemma4"])
def test_tokens_that_are_looked_up_again_beside_a_hooked_embedding(family, hook, route):
    """Without input_ids, Gemma 3n leaves its embeddings of each layer out, and Gemma 4 compares what it embedded with its vocabulary."""
    if not hasattr(transformers, f"{family}ForCausalLM"):
        pytest.skip("not in this Transformers")
    text = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0, "sliding_window": 4}
    of_family = {"laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0, 0.0], "intermediate_size": [96, 96]}
    config_class = getattr(transformers, f"{family}TextConfig")
    config = config_class(
        **_SIZES | text | (of_family if family == "Gemma3n" else {}), layer_types=["sliding_attention", "full_attention"]
    )  # fmt: skip
    torch.manual_seed(0)
    eager = getattr(transformers, f"{family}ForCausalLM")._from_config(config, attn_implementation="eager").train()
    with torch.no_grad():
        for weight in eager.parameters():  # some begin as zeros, which would hide others
            weight.normal_(std=0.15)
    model = copy.deepcopy(eager)
    report = hf_flash2.patch(model, packed=True)
    inputs = batch("right") | {"use_cache": False}
    labels = small_models.labels(inputs)
    for each in (eager, model):
        hook(each)
    expected = loss_and_gradients(eager, **inputs, labels=labels)
    assert expected["model.embed_tokens_per_layer.weight"].any()
    assert_close(loss_and_gradients(model, **inputs, labels=labels), expected)
    assert report.forwards == {route: 1}


def test_an_embedding_sees_real_tokens_alone_where_nobody_hooks_its_output():
    _, model, report = twins("llama")
    embedding, inputs, seen = model.get_input_embeddings(), batch("left"), []
    embedding.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    model(**inputs)
    assert seen == [(1, inputs["attention_mask"].sum())]
    embedding.register_forward_hook(lambda *_: pytest.fail("what is embedded already needs no embedding"))
    ids = inputs.pop("input_ids")
    model(inputs_embeds=embedding.weight[ids], **inputs)
    assert report.forwards == {"packed": 2}


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_angles_that_depend_on_the_last_column(rope_type):
    """They are those of the padded batch, whose last columns may be padding alone."""
    parameters = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 6}
    if rope_type == "longrope":
        parameters |= {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    name = "rope_parameters" if VERSION >= (5, 0) else "rope_scaling"
    eager, model, report = twins("llama", **{name: parameters, "max_position_embeddings": 6})
    inputs = batch("right")
    inputs["attention_mask"][:, 5:] = 0
    labels = small_models.labels(inputs)
    assert_close(loss_and_gradients(model, **inputs, labels=labels), loss_and_gradients(eager, **inputs, labels=labels))
    assert report.forwards == {"with columns of padding at the end, where positions are rotated by their number": 1}
    inputs = batch("left")
    labels = small_models.labels(inputs)
    assert_close(loss_and_gradients(model, **inputs, labels=labels), loss_and_gradients(eager, **inputs, labels=labels))
    assert report.forwards["packed"] == 1


def test_angles_of_any_type_of_layer_count():
    """As Gemma 3 has them, one description for each type of layer; the key was "type" once."""
    plain, dynamic = {"rope_type": "default"}, {"rope_type": "dynamic", "factor": 2.0}
    for rope, depends in (
        ({"full_attention": dynamic, "sliding_attention": plain}, True),
        ({"full_attention": plain, "sliding_attention": plain}, False),
        ({"type": "longrope"}, True),
        (None, False),
    ):
        assert shareable.rotates_by_length(types.SimpleNamespace(rope_scaling=rope)) is depends


@pytest.mark.parametrize("name", PACKABLE)
def test_other_decoders_run_packed(name):
    eager = other_model(name)
    model = copy.deepcopy(eager)
    report = hf_flash2.patch(model, packed=True)
    assert PACKABLE[name] in report.loss
    for padding in ("left", "holes"):
        inputs = batch(padding)
        labels = small_models.labels(inputs)
        expected = loss_and_gradients(eager, **inputs, labels=labels, use_cache=False)
        assert_close(loss_and_gradients(model, **inputs, labels=labels, use_cache=False), expected)
    assert report.forwards == {"packed": 2}


class CapsWhatItScales(LlamaForCausalLM):
    """As MuseGlimmer does, but it may be trained by how much."""

    def forward(self, labels=None, **kwargs):
        outputs = self.model(**kwargs)
        hidden_states = outputs.last_hidden_state
        logits = self.lm_head(hidden_states)
        logits = logits * self.multiplier
        logits = torch.tanh(logits)
        if (cap := self.config.get_text_config().cap) is not None:
            logits = logits * cap
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


@pytest.mark.parametrize("head", ["linear", "with a bias", "with LoRA"])
@pytest.mark.parametrize("steps", ["Granite", "Gemma2", "by a number", "trained", "cap set to None since"])
def test_logits_that_are_scaled_or_capped(steps, head):
    """By the numbers that the model has at the call, whatever its head; as exact as eager's in bf16, too."""
    if steps in ("Granite", "Gemma2"):
        eager = other_model(steps)
    else:
        torch.manual_seed(0)
        eager = CapsWhatItScales._from_config(small_models.config("llama", cap=3.0), attn_implementation="eager").train()
        eager.multiplier = 0.4 if steps == "by a number" else torch.nn.Parameter(torch.tensor(0.4))
    if head == "with a bias":
        bias = torch.nn.Linear(eager.lm_head.in_features, VOCABULARY)
        bias.weight = eager.lm_head.weight
        eager.set_output_embeddings(bias)
    if head == "with LoRA":
        eager = get_peft_model(eager, LoraConfig(target_modules=["lm_head", "q_proj"], init_lora_weights=False))
    model = copy.deepcopy(eager)
    report = hf_flash2.patch(model, packed=True)
    if steps == "cap set to None since":
        for each in (eager, model):
            each.config.get_text_config().cap = None
    inputs = batch("right") | {"use_cache": False, "labels": small_models.labels(batch("right"))}
    truth = loss_and_gradients(eager, **inputs)
    assert_close(loss_and_gradients(model, **inputs), truth)
    assert report.losses == {"in chunks": 1}
    theirs, ours = (loss_and_gradients(each.to(torch.bfloat16), **inputs) for each in (eager, model))
    losses = [results.pop("loss").item() for results in (ours, theirs, truth)]
    assert abs(losses[0] - losses[2]) <= 3 * abs(losses[1] - losses[2]) + 1e-3 * losses[2]
    for name, value in truth.items():
        tiny_models.assert_as_exact_as_eager(ours[name], theirs[name], value, factor=3.0, name=name)


@pytest.mark.parametrize("name", ["Granite", "Gemma2"])
def test_a_scale_or_a_cap_leaves_a_linear_head_its_gradients_with_the_loss(name, monkeypatch):
    chunks = []
    monkeypatch.setattr(packed_loss, "CHUNK_BYTES", 4 * VOCABULARY * 6)
    run = packed_loss.cross_entropy.cross_entropy_
    monkeypatch.setattr(packed_loss.cross_entropy, "cross_entropy_", lambda x, labels: chunks.append(x.shape[0]) or run(x, labels))
    eager = other_model(name)
    model = copy.deepcopy(eager)
    hf_flash2.patch(model, packed=True)
    inputs = batch("right") | {"use_cache": False, "labels": small_models.labels(batch("right"))}
    assert_close(loss_and_gradients(model, **inputs), loss_and_gradients(eager, **inputs))
    rows = int((inputs["labels"][:, 1:] != -100).sum())
    assert chunks == [6] * (rows // 6) + ([rows % 6] if rows % 6 else [])


def test_steps_in_one_formula():
    """cap * tanh(scale * logits), or none where there is none."""
    of = packed_loss._scale_and_cap
    assert of(()) == (1.0, None) and of((("/", 8.0), ("*", 2.0))) == (0.25, None)
    assert of((("*", 3.0), ("/", 30.0), ("tanh", 30.0), ("*", 20.0), ("*", 2.0))) == (0.1, 40.0)
    assert of((("tanh", 1.0),)) == (1.0, 1.0)
    assert of((("tanh", 1.0), ("tanh", 1.0))) is None and of((("*", torch.tensor(2.0)),)) is None


@pytest.mark.parametrize("asked", ["by the config", "by the call"])
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_the_loss_of_a_router_comes_from_logits(name, asked):
    eager = other_model(name)
    model = copy.deepcopy(eager)
    report = hf_flash2.patch(model, packed=True)
    inputs = batch("right") | {"use_cache": False, "labels": small_models.labels(batch("right"))}
    if asked == "by the call":
        inputs["output_router_logits"] = True
    for each in (eager, model):
        each.config.output_router_logits = asked == "by the config"
        each.router_aux_loss_coef = 0.5
    assert_close(loss_and_gradients(model, **inputs), loss_and_gradients(eager, **inputs))
    assert report.losses == {"from logits": 1} and report.forwards == {"with router logits": 1}


class AsTransformers(LlamaForCausalLM):
    def forward(self, labels=None, **kwargs):
        outputs = self.model(**kwargs)
        hidden_states = outputs.last_hidden_state
        logits = self.lm_head(hidden_states)
        loss = None
        if labels is not None:
            labels = labels.to(logits.device)
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class AddsToTheOutput(LlamaForCausalLM):
    def forward(self, labels=None, **kwargs):
        outputs = self.model(**kwargs)
        hidden_states = outputs.last_hidden_state
        logits = self.lm_head(hidden_states)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss + 1e-2 * logits.logsumexp(-1).square().mean(), logits=logits)


class AddsUnderAnotherName(LlamaForCausalLM):
    def forward(self, labels=None, **kwargs):
        outputs = self.model(**kwargs)
        hidden_states = outputs.last_hidden_state
        logits = self.lm_head(hidden_states)
        cross_entropy = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=cross_entropy + 1e-2 * hidden_states.square().mean(), logits=logits)


class AddsToTheCall(LlamaForCausalLM):
    def forward(self, labels=None, **kwargs):
        outputs = self.model(**kwargs)
        hidden_states = outputs.last_hidden_state
        logits = self.lm_head(hidden_states)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs) + hidden_states.square().mean()
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class ChangesSomeLogits(LlamaForCausalLM):
    def forward(self, labels=None, **kwargs):
        outputs = self.model(**kwargs)
        hidden_states = outputs.last_hidden_state
        logits = self.lm_head(hidden_states)
        logits[..., :3] = -1e4
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class ScalesTheLogits(LlamaForCausalLM):
    def forward(self, labels=None, **kwargs):
        outputs = self.model(**kwargs)
        hidden_states = outputs.last_hidden_state
        logits = self.lm_head(hidden_states)
        loss = self.loss_function(logits=logits / 4.0, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class ScalesBehindTheLoss(LlamaForCausalLM):
    def forward(self, labels=None, **kwargs):
        outputs = self.model(**kwargs)
        hidden_states = outputs.last_hidden_state
        logits = self.lm_head(hidden_states)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        logits = logits / self.config.rms_norm_eps
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class ScalesTwice(LlamaForCausalLM):
    def forward(self, labels=None, **kwargs):
        outputs = self.model(**kwargs)
        hidden_states = outputs.last_hidden_state
        logits = self.lm_head(hidden_states)
        for _ in range(2):
            logits = logits * self.config.rms_norm_eps
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class AddsALossWithoutRouterLogits(LlamaForCausalLM):
    def forward(self, labels=None, output_router_logits=None, **kwargs):
        output_router_logits = output_router_logits if output_router_logits is not None else self.config.output_router_logits
        outputs = self.model(**kwargs)
        hidden_states = outputs.last_hidden_state
        logits = self.lm_head(hidden_states)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        if output_router_logits:
            pass
        else:
            loss += hidden_states.square().mean()
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class AlwaysAddsTheLossOfARouter(LlamaForCausalLM):
    def forward(self, labels=None, **kwargs):
        output_router_logits = True
        outputs = self.model(**kwargs)
        hidden_states = outputs.last_hidden_state
        logits = self.lm_head(hidden_states)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        if output_router_logits:
            loss += hidden_states.square().mean()
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class ScalesByAnotherNumber(LlamaForCausalLM):
    def forward(self, labels=None, **kwargs):
        outputs = self.model(**kwargs)
        hidden_states = outputs.last_hidden_state
        logits = self.lm_head(hidden_states)
        if self.config.sep_token_id is not None:
            logits = logits * self.config.rms_norm_eps
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class ShiftsTheLabels(LlamaForCausalLM):
    def forward(self, labels=None, **kwargs):
        outputs = self.model(**kwargs)
        hidden_states = outputs.last_hidden_state
        logits = self.lm_head(hidden_states)
        labels = labels.roll(1, 1)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


@pytest.mark.parametrize(
    "model_class",
    [
        AddsToTheOutput, AddsUnderAnotherName, AddsToTheCall, ChangesSomeLogits, ScalesTheLogits, ScalesBehindTheLoss, ScalesTwice,
        ScalesByAnotherNumber, AddsALossWithoutRouterLogits, AlwaysAddsTheLossOfARouter, ShiftsTheLabels,
    ],
)  # fmt: skip
def test_a_forward_that_does_more_to_logits_or_loss_keeps_its_loss(model_class):
    torch.manual_seed(0)
    config = small_models.config("llama", output_router_logits=False, sep_token_id=None)
    eager = model_class._from_config(config, attn_implementation="eager").train()
    model = copy.deepcopy(eager)
    report = hf_flash2.patch(model, packed=True)
    assert report.loss.startswith("not ours: its forward has ")
    inputs = batch("dense") | {"use_cache": False, "labels": batch("dense")["input_ids"]}
    assert_close({"loss": model(**inputs).loss.detach()}, {"loss": eager(**inputs).loss.detach()})


def test_a_forward_of_somebody_else_that_does_no_more_has_its_loss_in_chunks():
    torch.manual_seed(0)
    assert hf_flash2.patch(AsTransformers(small_models.config("llama")), packed=True).loss == IN_CHUNKS


class CallsTheOneItExtends(LlamaForCausalLM):
    def forward(self, **kwargs):
        return super().forward(**kwargs)


class LooksAtTheLoss(LlamaForCausalLM):
    def forward(self, labels=None, **kwargs):
        outputs = self.model(**kwargs)
        hidden_states = outputs.last_hidden_state
        logits = self.lm_head(hidden_states)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        if loss > 1e4:
            raise RuntimeError("diverged")
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class AddsHiddenStates(LlamaForCausalLM):
    def forward(self, labels=None, **kwargs):
        outputs = self.model(**kwargs)
        hidden_states = outputs.last_hidden_state
        hidden_states += outputs.last_hidden_state
        logits = self.lm_head(hidden_states)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class GivesLabelsFirst(LlamaForCausalLM):
    def forward(self, labels=None, **kwargs):
        outputs = self.model(**kwargs)
        hidden_states = outputs.last_hidden_state
        logits = self.lm_head(hidden_states)
        loss = self.loss_function(labels, logits, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class ScalesLogitsInPlace(LlamaForCausalLM):
    def forward(self, labels=None, **kwargs):
        outputs = self.model(**kwargs)
        hidden_states = outputs.last_hidden_state
        logits = self.lm_head(hidden_states)
        logits.mul_(2.0)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class GivesLogitsToAFunction(LlamaForCausalLM):
    def forward(self, labels=None, **kwargs):
        outputs = self.model(**kwargs)
        hidden_states = outputs.last_hidden_state
        logits = self.lm_head(hidden_states)
        torch.tanh_(logits)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class ScalesTheLossItReturns(LlamaForCausalLM):
    def forward(self, labels=None, **kwargs):
        outputs = self.model(**kwargs)
        hidden_states = outputs.last_hidden_state
        logits = self.lm_head(hidden_states)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss * 2, logits=logits)


class NamesLogitsOnTheWay(LlamaForCausalLM):
    def forward(self, labels=None, **kwargs):
        outputs = self.model(**kwargs)
        hidden_states = outputs.last_hidden_state
        logits = self.lm_head(hidden_states)
        if (logits := logits * 2) is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class ChangesSomeHiddenStates(LlamaForCausalLM):
    def forward(self, labels=None, **kwargs):
        outputs = self.model(**kwargs)
        hidden_states = outputs.last_hidden_state
        hidden_states[:, 0] = 0.0
        logits = self.lm_head(hidden_states)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class MakesLogitsElsewhere(LlamaForCausalLM):
    def forward(self, labels=None, **kwargs):
        outputs = self.model(**kwargs)
        hidden_states = outputs.last_hidden_state
        return self.judge(hidden_states, labels)


class AsksWhetherThereIsALoss(LlamaForCausalLM):
    def forward(self, labels=None, **kwargs):
        outputs = self.model(**kwargs)
        hidden_states = outputs.last_hidden_state
        logits = self.lm_head(hidden_states)
        loss: torch.Tensor | None
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = (logits, outputs.past_key_values)
        return (loss, *output) if loss is not None else output


class GivesTheLossMore(LlamaForCausalLM):
    def forward(self, labels=None, **kwargs):
        outputs = self.model(**kwargs)
        hidden_states = outputs.last_hidden_state
        logits = self.lm_head(hidden_states)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, ignore_index=5, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class GivesTheLossMoreByPlace(LlamaForCausalLM):
    def forward(self, labels=None, **kwargs):
        outputs = self.model(**kwargs)
        hidden_states = outputs.last_hidden_state
        logits = self.lm_head(hidden_states)
        loss = self.loss_function(logits, labels, self.config.vocab_size, 7, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class GivesTheLossLess(LlamaForCausalLM):
    """Not what it is divided by."""

    def forward(self, labels=None, **kwargs):
        outputs = self.model(**kwargs)
        hidden_states = outputs.last_hidden_state
        logits = self.lm_head(hidden_states)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class GivesTheLossOthers(LlamaForCausalLM):
    def forward(self, labels=None, others=None, **kwargs):
        outputs = self.model(**kwargs)
        hidden_states = outputs.last_hidden_state
        logits = self.lm_head(hidden_states)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **others)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class GivesTheLossByOneName(LlamaForCausalLM):
    """As Transformers 4 named them."""

    def forward(self, labels=None, **loss_kwargs):
        outputs = self.model(**loss_kwargs)
        hidden_states = outputs.last_hidden_state
        logits = self.lm_head(hidden_states)
        loss = self.loss_function(logits, labels, self.config.vocab_size, **loss_kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


GIVES_THE_LOSS = "its forward has loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size"
# What is seen in the source of a forward, which is not run.
KEEP_THEIR_LOSS = {
    CallsTheOneItExtends: "its forward does not make logits with lm_head",
    LooksAtTheLoss: "its forward has if loss > 10000.0",
    AddsHiddenStates: "its forward has hidden_states += outputs.last_hidden_state",
    GivesLabelsFirst: "its forward has loss = self.loss_function(labels, logits, self.config.vocab_size, **kwargs)",
    GivesTheLossMore: f"{GIVES_THE_LOSS}, ignore_index=5, **kwargs)",
    GivesTheLossMoreByPlace: "its forward has loss = self.loss_function(logits, labels, self.config.vocab_size, 7, **kwargs)",
    GivesTheLossLess: f"{GIVES_THE_LOSS})",
    GivesTheLossOthers: f"{GIVES_THE_LOSS}, **others)",
    GivesTheLossByOneName: None,
    ScalesLogitsInPlace: "its forward has logits.mul_(2.0)",
    GivesLogitsToAFunction: "its forward has torch.tanh_(logits)",
    ScalesTheLossItReturns: "its forward has return CausalLMOutputWithPast(loss=loss * 2, logits=logits)",
    NamesLogitsOnTheWay: "its forward has (logits := ",
    ChangesSomeHiddenStates: "its forward has hidden_states[:, 0] = 0.0",
    MakesLogitsElsewhere: "its forward does not make logits with lm_head",
    AsksWhetherThereIsALoss: None,
}


@pytest.mark.parametrize("model_class", KEEP_THEIR_LOSS)
def test_what_a_forward_does_beside_the_loss_is_seen_in_its_source(model_class):
    reason = KEEP_THEIR_LOSS[model_class]
    found = hf_flash2.patch(model_class(small_models.config("llama")), packed=True).loss
    assert found.startswith(IN_CHUNKS if reason is None else f"not ours: {reason}")


def test_a_loss_function_that_is_there_already_keeps_its_logits():
    model = small_models.model("llama")
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()
    assert hf_flash2.patch(model, packed=True).loss == "not ours: its loss function is its own"


def refusal(model) -> str:
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot run packed: ") as error:
        hf_flash2.patch(model, packed=True)
    return str(error.value)


@pytest.mark.parametrize("missing", ["attention_mask", "position_ids", "inputs_embeds", "cache"])
def test_a_base_model_has_to_take_what_a_packed_batch_needs(missing):
    model = small_models.model("llama")
    signature = inspect.signature(LlamaModel.forward)
    gone = {missing, "past_key_values"} if missing == "cache" else {missing}

    def forward(self, **kwargs):
        raise AssertionError("not run")

    forward.__signature__ = signature.replace(parameters=[x for name, x in signature.parameters.items() if name not in gone])
    model.model.__class__ = type("Lacking", (LlamaModel,), {"forward": forward})
    assert f"the forward of its Lacking has no {missing};" in refusal(model)


create_bidirectional_mask = getattr(transformers.masking_utils, "create_bidirectional_mask", None)  # of Transformers 5


class AlsoChunks(LlamaModel):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, **kwargs):
        masks = [make(self.config, inputs_embeds) for make in (create_causal_mask, create_chunked_causal_mask)]
        return super().forward(input_ids, masks, position_ids, past_key_values, inputs_embeds, **kwargs)


class OnlyBidirectional(LlamaModel):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, **kwargs):
        mask = create_bidirectional_mask(self.config, inputs_embeds, attention_mask)
        return super().forward(input_ids, mask, position_ids, past_key_values, inputs_embeds, **kwargs)


class NegatesTheMask(LlamaModel):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, **kwargs):
        padding = 1 - attention_mask
        causal_mask = create_causal_mask(self.config, inputs_embeds, attention_mask, past_key_values)
        return super().forward(input_ids, causal_mask, position_ids, past_key_values, inputs_embeds, **kwargs), padding


class CutsTheMask(LlamaModel):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, **kwargs):
        last = attention_mask[:, -1]
        causal_mask = create_causal_mask(self.config, inputs_embeds, attention_mask, past_key_values)
        return super().forward(input_ids, causal_mask, position_ids, past_key_values, inputs_embeds, **kwargs), last


class RenamesTheMask(LlamaModel):
    """As OPT's decoder, which counts positions by it."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, **kwargs):
        padding = attention_mask
        causal_mask = create_causal_mask(self.config, inputs_embeds, attention_mask, past_key_values)
        return super().forward(input_ids, causal_mask, position_ids, past_key_values, inputs_embeds, **kwargs), padding


class ComparesTheMask(LlamaModel):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, **kwargs):
        padding = attention_mask == 0
        causal_mask = create_causal_mask(self.config, inputs_embeds, attention_mask, past_key_values)
        return super().forward(input_ids, causal_mask, position_ids, past_key_values, inputs_embeds, **kwargs), padding


class ChoosesByColumn(LlamaModel):
    """As the depth decoders of CSM and Moshi."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, **kwargs):
        codebooks = torch.arange(input_ids.shape[1])
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])
        causal_mask = create_causal_mask(self.config, inputs_embeds, attention_mask, past_key_values)
        return super().forward(input_ids, causal_mask, position_ids, past_key_values, inputs_embeds, **kwargs), codebooks


class CountsFromTwo(LlamaModel):
    """As Kosmos-2.5."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, **kwargs):
        if position_ids is None:
            position_ids = 1 + input_ids.ne(1).cumsum(1)
        causal_mask = create_causal_mask(self.config, inputs_embeds, attention_mask, past_key_values)
        return super().forward(input_ids, causal_mask, position_ids, past_key_values, inputs_embeds, **kwargs)


class ReplacesPositions(LlamaModel):
    """As CSM's depth decoder before Transformers 5."""

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        cache_position=None,
        **kwargs,
    ):
        if cache_position is None:
            cache_position = torch.arange(input_ids.shape[1])
        position_ids = cache_position.unsqueeze(0)
        causal_mask = create_causal_mask(self.config, inputs_embeds, attention_mask, past_key_values)
        return super().forward(input_ids, causal_mask, position_ids, past_key_values, inputs_embeds, **kwargs)


class NamesTheArguments(LlamaDecoderLayer):
    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states, kwargs=kwargs)


class HandsOnOthers(LlamaDecoderLayer):
    def forward(self, hidden_states, position_embeddings=None, **kwargs):
        others = {"position_embeddings": position_embeddings}
        return super().forward(hidden_states, **others)


class KeepsThemToItself(LlamaAttention):
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        return super().forward(hidden_states, position_embeddings, attention_mask)


class MakesTheirName(LlamaDecoderLayer):
    def forward(self, hidden_states, position_embeddings=None, **others):
        kwargs = {"position_embeddings": position_embeddings}
        return super().forward(hidden_states, **kwargs)


# By the class that takes the place of the one of Transformers; none of them is run.
REFUSED_CLASSES = {
    AlsoChunks: "AlsoChunks makes masks other than causal ones with or without a window (create_causal_mask, create_chunked_causal_mask)",
    OnlyBidirectional: "OnlyBidirectional makes masks other than causal ones with or without a window (create_bidirectional_mask)",
    NegatesTheMask: "NegatesTheMask uses the attention mask for more than attention (padding = 1 - attention_mask)",
    CutsTheMask: "CutsTheMask uses the attention mask for more than attention (last = attention_mask[:, -1])",
    RenamesTheMask: "RenamesTheMask uses the attention mask for more than attention (padding = attention_mask)",
    ComparesTheMask: "ComparesTheMask uses the attention mask for more than attention (padding = attention_mask == 0)",
    ChoosesByColumn: "ChoosesByColumn is not seen to number tokens from 0 without position_ids, and by nothing else with them",
    CountsFromTwo: "CountsFromTwo is not seen to number tokens from 0 without position_ids, and by nothing else with them",
    ReplacesPositions: "ReplacesPositions is not seen to number tokens from 0 without position_ids, and by nothing else with them",
    NamesTheArguments: "NamesTheArguments does not hand on the keyword arguments that tell the attention where rows begin",
    HandsOnOthers: "HandsOnOthers does not hand on the keyword arguments that tell the attention where rows begin",
    MakesTheirName: "MakesTheirName does not hand on the keyword arguments that tell the attention where rows begin",
    KeepsThemToItself: "KeepsThemToItself does not hand on the keyword arguments that tell the attention where rows begin",
}


@pytest.mark.parametrize("made", REFUSED_CLASSES)
def test_forwards_that_packing_would_change_are_refused(made):
    model = small_models.model("llama")
    places = {LlamaDecoderLayer: model.model.layers[1], LlamaAttention: model.model.layers[1].self_attn, LlamaModel: model.model}
    places[made.__base__].__class__ = made
    assert REFUSED_CLASSES[made] in refusal(model)


class HandsOnByAnotherName(LlamaDecoderLayer):
    def forward(self, hidden_states, *args, **others):
        return super().forward(hidden_states, *args, **others)


def test_layers_may_name_their_keyword_arguments_as_they_like():
    eager, model = small_models.twins("llama")
    model.model.layers[1].__class__ = HandsOnByAnotherName
    report = hf_flash2.patch(model.train(), packed=True)
    inputs = small_models.batch("right")
    inputs["labels"] = small_models.labels(inputs)
    torch.testing.assert_close(model(**inputs).loss, eager.train()(**inputs).loss)
    assert report.forwards == {"packed": 1}


def numbers_in_one_expression(self, position_ids=None, inputs_embeds=None):
    position_ids = position_ids if position_ids is not None else torch.arange(inputs_embeds.shape[1]).unsqueeze(0)
    return position_ids


def numbers_in_the_other_branch(self, position_ids=None, inputs_embeds=None):
    if position_ids is not None:
        position_ids = position_ids.view(-1, inputs_embeds.shape[1])
    else:
        position_ids = torch.arange(inputs_embeds.shape[1]).unsqueeze(0)
    return position_ids


def numbers_under_two_conditions(self, position_ids=None, inputs_embeds=None):
    if position_ids is None and inputs_embeds is not None:
        position_ids = torch.arange(inputs_embeds.shape[1]).unsqueeze(0)
    return position_ids


def numbers_where_there_are_some(self, position_ids=None, inputs_embeds=None):
    if position_ids is not None:
        position_ids = torch.arange(inputs_embeds.shape[1]).unsqueeze(0)
    return position_ids


@pytest.mark.parametrize(
    ("forward", "plain"),
    [
        (numbers_in_one_expression, True), (numbers_in_the_other_branch, True), (numbers_under_two_conditions, True),
        (numbers_where_there_are_some, False),
    ],
)  # fmt: skip
def test_ways_to_number_tokens_from_zero(forward, plain):
    assert contract._numbers_tokens_from_zero(contract._forward_tree(type("Numbers", (), {"forward": forward}))) is plain


MIXERS = [torch.nn.Conv1d(2, 2, 3), torch.nn.Conv2d(1, 1, 3), torch.nn.GRU(2, 2), torch.nn.BatchNorm1d(2)]


@pytest.mark.parametrize("mixer", MIXERS, ids=lambda mixer: type(mixer).__name__)
def test_what_mixes_tokens_is_refused(mixer):
    model = small_models.model("llama")
    model.model.layers[1].mlp.mixer = mixer
    assert "its layers.1.mlp.mixer mixes neighbouring tokens, which may be of different rows" in refusal(model)


def test_a_second_attention_in_a_layer_is_refused():
    model = small_models.model("llama")
    model.model.layers[1].more = copy.deepcopy(model.model.layers[1].self_attn)
    assert "it has 2 layers, and the attention of 3 runs on hf_flash2" in refusal(model)


@pytest.mark.skipif(VERSION < (5, 0), reason="its depth decoder makes other masks")
def test_a_depth_decoder_of_audio_is_refused():
    """It chooses codebooks by column."""
    from transformers.models.csm.modeling_csm import CsmDepthDecoderConfig, CsmDepthDecoderForCausalLM

    sizes = _SIZES | {"backbone_hidden_size": 32, "num_codebooks": 8}
    model = CsmDepthDecoderForCausalLM._from_config(CsmDepthDecoderConfig(**sizes), attn_implementation="eager")
    with pytest.raises(ValueError, match="its CsmDepthDecoderModel is not seen to number tokens from 0"):
        hf_flash2.patch(model, packed=True)


@pytest.mark.skipif(VERSION < (5, 0), reason="not in Transformers 4.57")
def test_a_model_without_embeddings_of_its_own_runs_packed():
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig, Qwen3OmniMoeCode2WavTransformerModel

    torch.manual_seed(0)
    config = Qwen3OmniMoeCode2WavConfig(**_SIZES | {"sliding_window": 4})
    eager = Qwen3OmniMoeCode2WavTransformerModel._from_config(config, attn_implementation="eager").eval()
    model = copy.deepcopy(eager)
    report = hf_flash2.patch(model, packed=True)
    mask = batch("right")["attention_mask"]
    inputs = {"inputs_embeds": torch.randn(*mask.shape, config.hidden_size), "attention_mask": mask, "use_cache": False}
    expected, found = (x(**inputs).last_hidden_state[mask.bool()] for x in (eager, model))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert report.forwards == {"packed": 1}


def test_heads_that_choose_among_positions_are_refused():
    """A softmax over a row would see the zeros at its padding."""
    model = transformers.LlamaForQuestionAnswering(small_models.config("llama")).eval()
    with pytest.raises(ValueError, match="LlamaForQuestionAnswering cannot run packed: its head chooses among all positions of a row"):
        hf_flash2.patch(model, packed=True)


def test_a_window_that_no_layer_has_is_no_reason():
    eager, model, report = twins("llama", sliding_window=2)
    inputs = batch("right")
    labels = small_models.labels(inputs)
    assert_close(loss_and_gradients(model, **inputs, labels=labels), loss_and_gradients(eager, **inputs, labels=labels))
    assert report.forwards == {"packed": 1}


class CountsTheMask(LlamaModel):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, **kwargs):
        lengths = attention_mask.sum(-1)
        causal_mask = create_causal_mask(self.config, inputs_embeds, attention_mask, past_key_values)
        return super().forward(input_ids, causal_mask, position_ids, past_key_values, inputs_embeds, **kwargs), lengths


def test_a_mask_that_is_counted_is_more_than_a_mask():
    model = small_models.model("llama")
    model.model.__class__ = CountsTheMask
    with pytest.raises(
        ValueError, match=r"its CountsTheMask uses the attention mask for more than attention \(lengths = attention_mask.sum"
    ):
        hf_flash2.patch(model, packed=True)


@pytest.mark.parametrize("name", REFUSED)
def test_decoders_that_cannot_run_packed_are_refused_and_left_alone(name):
    model = other_model(name)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=f"{name}ForCausalLM cannot run packed: {REFUSED[name]}") as refusal:
        hf_flash2.patch(model, packed=True)
    assert "use patch(model)" in str(refusal.value)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


@pytest.mark.parametrize("shape", [(0, 6), (2, 0), (0, 0)])
def test_a_batch_of_nothing_has_no_layout(shape):
    assert packed._layout(small_models.model("llama").model, torch.ones(shape, dtype=torch.int64)) == "without a token"


def test_the_layout_of_a_batch():
    """What the kernels are told, value by value: the reference that runs on a CPU has no use for the longest length."""
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]])
    layout = packed._layout(small_models.model("llama").model, mask)
    assert layout.indices.tolist() == [1, 2, 8, 10, 11]
    assert layout.cu_seqlens.tolist() == [0, 2, 2, 5] and layout.cu_seqlens.dtype == torch.int32
    assert (layout.max_seqlen, layout.batch, layout.seqlen) == (3, 3, 4)
    x = torch.arange(12.0).view(3, 4)
    assert torch.equal(layout.pad(layout.pack(x)), x * mask)


@pytest.mark.skipif(VERSION < (5, 0), reason="its classes have to be in a file")
def test_a_forward_without_a_source_leaves_the_loss_upstream_and_is_not_packed(monkeypatch):
    """A class made by exec, or compiled by Cython."""
    cells = types.ModuleType("cells")
    monkeypatch.setitem(sys.modules, "cells", cells)
    code = """
from transformers import LlamaForCausalLM, LlamaModel

class MyLlamaForCausalLM(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)

class MyLlamaModel(LlamaModel):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, cache=None, **kwargs):
        return super().forward(input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, **kwargs)
"""
    exec(code, vars(cells))
    model = small_models.model("llama")
    model.__class__ = cells.MyLlamaForCausalLM
    report = hf_flash2.patch(model, packed=True)
    assert report.loss == "not ours: the source of its forward cannot be read"
    hf_flash2.unpatch(model)
    model.model.__class__ = cells.MyLlamaModel
    with pytest.raises(ValueError, match="cannot run packed: the source of its forward cannot be read"):
        hf_flash2.patch(model, packed=True)

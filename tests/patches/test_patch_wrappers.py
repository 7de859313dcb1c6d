"""Patched models inside what people wrap around models: PEFT, accelerate's hooks, gradient checkpointing, torch.compile."""

import copy

import pytest
import small_models
import torch
from accelerate import dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from peft import LoraConfig, get_peft_model
from small_models import FAMILIES, assert_close
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_flash2
from hf_flash2 import ops, patches
from hf_flash2.interface import hf_flash2_attention

LORA_TARGETS = {"gpt2": ["c_attn", "c_proj"]}


def with_lora(model, family):
    targets = LORA_TARGETS.get(family, ["q_proj", "k_proj", "v_proj", "o_proj"])
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(target_modules=targets, init_lora_weights=False, fan_in_fan_out=family == "gpt2"))


def loss_and_gradients(model):
    inputs = small_models.batch("left")
    model.zero_grad()
    torch.manual_seed(0)
    logits = model(**inputs).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), small_models.labels(inputs)[:, 1:].flatten())
    loss.backward()
    return {"loss": loss.detach(), **small_models.gradients(model)}


@pytest.mark.parametrize("order", ["patch the wrapper", "patch, then wrap"])
@pytest.mark.parametrize("family", FAMILIES)
def test_lora(family, order):
    plain = small_models.model(family)
    eager = with_lora(copy.deepcopy(plain), family)
    expected = loss_and_gradients(eager)
    if order == "patch the wrapper":
        model = with_lora(plain, family)
        report = hf_flash2.patch(model)
    else:
        report = hf_flash2.patch(plain)
        model = with_lora(plain, family)
    assert_close(loss_and_gradients(model), expected)
    assert set(report.calls.values()) == {1}
    hf_flash2.unpatch(model)
    for name, value in loss_and_gradients(model).items():
        assert torch.equal(value, expected[name])


def test_merging_lora_into_a_patched_model():
    model = with_lora(small_models.model("llama"), "llama").eval()
    inputs, real = small_models.batch("left"), small_models.key_mask("left").bool()
    with torch.no_grad():
        expected = model(**inputs).logits[real]
        hf_flash2.patch(model)
        merged = model.merge_and_unload()
        report = hf_flash2.patch(merged)
        torch.testing.assert_close(merged(**inputs).logits[real], expected, rtol=1e-4, atol=1e-3)
    assert set(report.calls.values()) == {1}
    hf_flash2.unpatch(merged)
    assert merged.config._attn_implementation == "eager"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(family, use_reentrant):
    dropout = {"attn_pdrop": 0.3} if family == "gpt2" else {"attention_dropout": 0.3}
    model = small_models.model(family, **dropout).train()
    report = hf_flash2.patch(model)
    expected = loss_and_gradients(model)
    before = report.calls
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    assert_close(loss_and_gradients(model), expected)
    assert {name: count - before[name] for name, count in report.calls.items()} == dict.fromkeys(
        before, 2
    )  # forward, and once more in backward


class Seen(AlignDevicesHook):
    """A hook as accelerate attaches them, that counts what passes."""

    forwards = 0

    def pre_forward(self, module, *args, **kwargs):
        self.forwards += 1
        return super().pre_forward(module, *args, **kwargs)


def hooked(model) -> list[Seen]:
    hooks = [Seen(execution_device="cpu") for _ in small_models.attention_layers(model)]
    for module, hook in zip(small_models.attention_layers(model).values(), hooks, strict=True):
        add_hook_to_module(module, hook)
    return hooks


@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_attached_before_the_patch_keep_running(family):
    model = small_models.model(family)
    expected = loss_and_gradients(model)
    hooks = hooked(model)
    before = [dict(vars(module)) for module in small_models.attention_layers(model).values()]
    report = hf_flash2.patch(model)
    assert_close(loss_and_gradients(model), expected)
    assert set(report.calls.values()) == {1}
    assert [hook.forwards for hook in hooks] == [1, 1]
    hf_flash2.unpatch(model)
    assert [dict(vars(module)) for module in small_models.attention_layers(model).values()] == before


@pytest.mark.parametrize("family", FAMILIES)
def test_somebody_elses_function_in_the_registry_is_called(family, monkeypatch):
    """As DeepSpeed's Ulysses replaces all of them, to bring the parts of a sequence together around the one that was there."""
    eager, model = small_models.twins(family)
    hf_flash2.patch(model)
    widths = []

    def around(module, query, *args, **kwargs):
        widths.append(query.shape[2])
        return hf_flash2_attention(module, query, *args, **kwargs)

    inputs = small_models.batch("left")
    with monkeypatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "hf_flash2", around)
        real = inputs["attention_mask"].bool()
        assert_close({"logits": model(**inputs).logits[real]}, {"logits": eager(**inputs).logits[real]})
    assert widths == [small_models.LENGTH] * 2
    model(**inputs)
    assert len(widths) == 2


def test_hooks_attached_to_a_patched_model_survive_unpatch():
    model = small_models.model("llama")
    expected = loss_and_gradients(model)
    report = hf_flash2.patch(model)
    hooks = hooked(model)
    assert_close(loss_and_gradients(model), expected)
    assert set(report.calls.values()) == {1}
    hf_flash2.unpatch(model)
    assert torch.equal(loss_and_gradients(model)["loss"], expected["loss"])
    assert [hook.forwards for hook in hooks] == [2, 2]
    forwards = {vars(module)["_old_forward"].__func__ for module in small_models.attention_layers(model).values()}
    assert forwards == {patches.PATCHES["llama"].attention.forward}


def test_hooks_removed_from_a_patched_model():
    model = small_models.model("llama")
    expected = loss_and_gradients(model)
    hooked(model)
    report = hf_flash2.patch(model)
    remove_hook_from_module(model, recurse=True)
    assert_close(loss_and_gradients(model), expected)
    assert set(report.calls.values()) == {1}
    hf_flash2.unpatch(model)
    assert torch.equal(loss_and_gradients(model)["loss"], expected["loss"])
    assert set(report.calls.values()) == {1}


def data_parallel_replica(model: torch.nn.Module) -> torch.nn.Module:
    """What torch.nn.parallel.replicate makes of a model for another GPU, on the CPU: the same calls, its parameters copied."""
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in replicas.items():
        for name, child in module.named_children():
            setattr(replica, name, replicas[child])
        for name, parameter in module._parameters.items():
            setattr(replica, name, None if parameter is None else parameter.detach().clone())
    return replicas[model]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_replica_of_data_parallel_runs_on_its_own_weights(family, packed):
    model = small_models.model(family)
    inputs, real = small_models.batch("left") | {"use_cache": False}, small_models.key_mask("left").bool()
    with torch.no_grad():
        expected = model(**inputs).logits[real]
        report = hf_flash2.patch(model, packed=packed)
        replica = data_parallel_replica(model)
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        assert_close({"logits": replica(**inputs).logits[real]}, {"logits": expected})
    assert set(report.calls.values()) == {1}
    hf_flash2.unpatch(model)
    assert "_replicate_for_data_parallel" not in {name for module in model.modules() for name in vars(module)}


def test_a_dispatched_model():
    model = small_models.model("mistral")
    expected = loss_and_gradients(model)
    model = dispatch_model(model, {"": "cpu"}, force_hooks=True)
    with hf_flash2.patched(model) as report:
        assert_close(loss_and_gradients(model), expected)
    assert set(report.calls.values()) == {1}


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled(family):
    """Patched through the wrapper of torch.compile, after the model has run compiled already; no graph break."""
    torch.compiler.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append([node.target for node in graph.graph.nodes])
        return graph

    model = small_models.model(family)
    expected = loss_and_gradients(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    loss_and_gradients(compiled)
    assert not any(ops.forward in graph for graph in graphs)
    graphs.clear()
    report = hf_flash2.patch(compiled)
    ours = loss_and_gradients(compiled)
    assert_close({name.removeprefix("_orig_mod."): value for name, value in ours.items()}, expected)
    assert [graph.count(ops.forward) for graph in graphs] == [2]
    assert set(report.calls.values()) == {0}  # as documented: not counted inside a graph
    hf_flash2.unpatch(compiled)
    assert torch.equal(loss_and_gradients(model)["loss"], expected["loss"])

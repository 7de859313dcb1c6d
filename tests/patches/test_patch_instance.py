"""patch, unpatch and patched: what they report, that they change one instance alone, and that everything comes off again."""

import contextlib
import copy
import functools
import io
import json
import pickle
import re
import sys
import types

import pytest
import small_models
import tiny_models
import torch
from small_models import FAMILIES
from tiny_models import VERSION
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Blip2Config,
    Blip2ForConditionalGeneration,
    ColPaliConfig,
    ColPaliForRetrieval,
    EncoderDecoderModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PaliGemmaConfig,
    PreTrainedModel,
    SamConfig,
    SamModel,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention

import hf_flash2
from hf_flash2 import native, patches

PATCHES = patches.PATCHES


def snapshot(model) -> list[dict]:
    """The attributes of every module and config, by identity of their values."""
    holders = [*model.modules(), *{id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()]
    return [dict(vars(holder)) for holder in holders]


def assert_same(before: list[dict], after: list[dict]) -> None:
    assert [list(attributes) for attributes in before] == [list(attributes) for attributes in after]
    for old, new in zip(before, after, strict=True):
        assert all(value is new[name] for name, value in old.items()), [name for name, value in old.items() if value is not new[name]]


def is_ours(module) -> bool:
    """Whether the forward of an attention module of one of our families is ours."""
    return any(module.forward.__func__ is family.forward for family in PATCHES.values())


def logits(model, padding="left"):
    with torch.no_grad():
        return model(**small_models.batch(padding)).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_report(family):
    model = small_models.model(family)
    names = list(small_models.attention_layers(model))
    report = hf_flash2.patch(model)
    assert (report.model, report.family, report.backend, report.previous) == (type(model).__name__, family, "cpu-reference", "eager")
    assert (report.found, report.patched, report.skipped) == (2, 2, {})
    assert report.calls == dict.fromkeys(names, 0)
    assert "calls     none yet" in str(report)
    logits(model)
    logits(model, "dense")
    assert report.calls == dict.fromkeys(names, 2)
    for text in (
        f"{type(model).__name__}: 2 of 2 attention layers run on hf_flash2 ({family})",
        "cpu-reference",
        "eager",
        "2 padded, 2 dense",
    ):
        assert text in str(report)


def test_the_report_says_what_ran_when_the_model_has_moved_since():
    with torch.device("meta"):
        model = small_models.model("llama")
    report = hf_flash2.patch(model)
    assert report.backend == "none yet (no weights loaded)"
    model.to_empty(device="cpu")
    twin = copy.deepcopy(model)
    assert hf_flash2.patch(twin).backend == "cpu-reference"  # patched again: looked at again
    logits(model)
    assert report.backend == "cpu-reference" and "backend   cpu-reference" in str(report)


def test_calls_that_fall_back_to_sdpa_are_not_counted_as_ours():
    model = small_models.model("llama")
    report = hf_flash2.patch(model)
    length = small_models.LENGTH
    with torch.no_grad():
        model(**small_models.batch("dense"), attention_mask=torch.ones(1, 1, length, length, dtype=torch.bool).tril())
    assert set(report.calls.values()) == {0}
    assert "2 sdpa (torch's, not ours" in str(report)
    assert hf_flash2.last_backend() == "sdpa"
    logits(model)
    assert hf_flash2.last_backend() == report.backend == "cpu-reference"


@pytest.mark.parametrize("family", FAMILIES)
def test_unpatch_restores_every_attribute(family):
    model = small_models.model(family)
    before, expected = snapshot(model), logits(model)
    hf_flash2.patch(model)
    assert all(is_ours(module) for module in small_models.attention_layers(model).values())
    hf_flash2.unpatch(model)
    assert_same(before, snapshot(model))
    assert torch.equal(logits(model), expected)
    hf_flash2.unpatch(model)  # not patched: nothing to do
    assert_same(before, snapshot(model))


def test_patching_twice_is_patching_once():
    model = small_models.model("llama")
    before = snapshot(model)
    report = hf_flash2.patch(model)
    patched = snapshot(model)
    assert hf_flash2.patch(model) is report
    assert_same(patched, snapshot(model))
    hf_flash2.unpatch(model)
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_other_models_of_the_same_config_and_class_keep_theirs(family):
    config = small_models.config(family, attn_implementation="sdpa")
    one, other = type(small_models.model(family))(config), type(small_models.model(family))(config)
    assert one.config is other.config is config
    one.eval(), other.eval()
    before, class_attributes = snapshot(other), dict(vars(PATCHES[family].attention))
    expected = logits(other)
    hf_flash2.patch(one)
    assert_same(before, snapshot(other))
    assert dict(vars(PATCHES[family].attention)) == class_attributes
    assert (one.config._attn_implementation, config._attn_implementation) == ("hf_flash2", "sdpa")
    assert torch.equal(logits(other), expected)
    report = hf_flash2.patch(other)
    hf_flash2.unpatch(one)
    logits(one), logits(other)
    assert set(report.calls.values()) == {1}
    hf_flash2.unpatch(other)
    assert one.config is other.config is config


def test_changes_of_the_config_survive_unpatch():
    model = small_models.model("llama")
    config = model.config
    hf_flash2.patch(model)
    model.config.use_cache = False
    model.config.task = "new"
    hf_flash2.unpatch(model)
    assert model.config is config
    assert (config.use_cache, config.task, config._attn_implementation) == (False, "new", "eager")
    hf_flash2.patch(model)
    del model.config.task
    config.use_cache = True  # that of other models, meanwhile
    hf_flash2.unpatch(model)
    assert not hasattr(config, "task") and config.use_cache


def test_a_config_inside_the_models_that_no_module_has():
    """That of the decoder, in an encoder which Transformers makes of a config of both."""
    model = tiny_models.model("t5gemma", "eager")
    config, decoder = model.config, model.config.decoder
    hf_flash2.patch(model)
    assert model.config.decoder is not decoder and decoder._attn_implementation == "eager"
    hf_flash2.unpatch(model)
    assert model.config is config and config.decoder is decoder and decoder._attn_implementation == "eager"


def test_an_implementation_set_later_wins():
    model = small_models.model("llama")
    expected = logits(model)
    report = hf_flash2.patch(model)
    model.set_attn_implementation("eager")
    assert torch.equal(logits(model), expected)
    assert set(report.calls.values()) == {0}
    again = hf_flash2.patch(model)
    logits(model)
    assert set(again.calls.values()) == {1}
    hf_flash2.unpatch(model)
    assert model.config._attn_implementation == "eager"


def test_a_forward_that_someone_else_put_on_the_instance():
    model = small_models.model("llama")
    layer = model.model.layers[0].self_attn
    original, calls = layer.forward, []

    def theirs(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    layer.forward = theirs
    before = snapshot(model)
    hf_flash2.patch(model)
    logits(model)
    assert not calls
    model.set_attn_implementation("eager")
    logits(model)
    assert len(calls) == 1
    hf_flash2.unpatch(model)
    assert_same(before, snapshot(model))


@pytest.mark.parametrize(
    "duplicate",
    [
        lambda calls: calls.copy(),
        copy.copy,
        copy.deepcopy,
        lambda calls: pickle.loads(pickle.dumps(calls)),
    ],
)
def test_the_calls_of_a_report_can_be_copied(duplicate):
    """As they are now, to be compared with later."""
    model = small_models.model("llama")
    calls = hf_flash2.patch(model).layers["model.layers.0.self_attn"]
    logits(model)
    found = duplicate(calls)
    logits(model)
    assert (type(found), found, found.backend) == (type(calls), {"padded": 1}, "cpu-reference")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_deep_copy_stands_alone(family):
    model = small_models.model(family)
    report = hf_flash2.patch(model)
    model.eval()
    logits(model)
    assert [calls.backend for calls in hf_flash2.patch(copy.deepcopy(model)).layers.values()] == ["cpu-reference"] * 2
    hf_flash2.unpatch(model)
    report = hf_flash2.patch(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert logits(twin).abs().max() > 0
    assert set(report.calls.values()) == {0}
    assert set(hf_flash2.patch(twin).calls.values()) == {1}
    hf_flash2.unpatch(twin)
    assert twin.config._attn_implementation == "eager"
    assert not any("forward" in vars(module) for module in twin.modules())
    assert all(is_ours(module) for module in small_models.attention_layers(model).values())


def test_a_layer_copied_meanwhile_goes_back_too():
    """PEFT's layer_replication copies layers with their configs."""
    model = small_models.model("llama")
    hf_flash2.patch(model)
    copied = copy.deepcopy(model.model.layers[0])
    model.model.layers.append(copied)
    copied.self_attn.layer_idx = model.config.num_hidden_layers = 2
    hf_flash2.unpatch(model)
    assert [layer.self_attn.config._attn_implementation for layer in model.model.layers] == ["eager"] * 3
    assert not any(is_ours(module) for module in small_models.attention_layers(model).values())


def test_patched_undoes_itself_also_after_an_exception():
    model = small_models.model("gpt2")
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="inside"), hf_flash2.patched(model) as report:
        logits(model)
        assert set(report.calls.values()) == {1}
        raise RuntimeError("inside")
    assert_same(before, snapshot(model))


def test_patched_takes_the_options_of_patch():
    model = small_models.model("llama").train()
    inputs = small_models.batch("right")
    with hf_flash2.patched(model, packed=True, keep_logits=True) as report:
        assert model(**inputs, labels=small_models.labels(inputs)).logits is not None and report.forwards == {"packed": 1}


@pytest.mark.parametrize("packed", [False, True])
def test_any_error_leaves_the_model_as_it_was(packed, monkeypatch):
    model = small_models.model("llama")
    before, bind = snapshot(model), patches.instance.bind

    def interrupted(module, forward):
        if module is (model.model if packed else model.model.layers[1].self_attn):
            raise KeyboardInterrupt
        return bind(module, forward)

    monkeypatch.setattr(patches.instance, "bind", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hf_flash2.patch(model, packed=packed)
    assert_same(before, snapshot(model))


def test_a_report_of_a_packed_model_counts_on():
    model = small_models.model("llama").train()
    report = hf_flash2.patch(model, packed=True)
    inputs = small_models.batch("right")
    with hf_flash2.patched(model):
        pass
    model(**inputs, labels=small_models.labels(inputs))
    assert report.forwards == {"packed": 1} and report.losses == {"in chunks": 1}
    # A patch under a wrapper leaves the loss alone.
    model.forward = lambda forward=model.forward, **inputs: forward(**inputs)
    for wrapped in (True, False):
        with hf_flash2.patched(model):
            pass
        assert model(**inputs, labels=small_models.labels(inputs)).loss is not None
        assert report.forwards == {"packed": 2 if wrapped else 3} and (report.losses is None) == wrapped
        assert report.loss.startswith("not ours: " if wrapped else "in chunks")
        if wrapped:
            del model.forward


def test_patched_leaves_a_patched_model_patched():
    model = small_models.model("gpt2")
    report = hf_flash2.patch(model)
    with hf_flash2.patched(model) as inner:
        assert inner is report
    assert model.config._attn_implementation == "hf_flash2"
    with hf_flash2.patched(model, packed=True) as inner:
        assert inner is not report
    assert hf_flash2.patch(model) is report
    logits(model)
    assert set(report.calls.values()) == {1}


@pytest.mark.parametrize("way", ["patched", "verify", "a patch that fails"])
def test_an_implementation_set_on_a_patched_model_is_there_again(way, monkeypatch):
    model = small_models.model("llama")
    model.set_attn_implementation("sdpa")
    report = hf_flash2.patch(model)
    model.set_attn_implementation("eager")
    expected = logits(model)
    if way == "patched":
        with hf_flash2.patched(model):
            assert model.config._attn_implementation == "hf_flash2"
    elif way == "verify":
        assert hf_flash2.verify(model, small_models.batch("left")).ok
    else:
        monkeypatch.setattr(patches.instance, "reason_not_packable", lambda *_: "a reason")
        with pytest.raises(ValueError, match="cannot run packed"):
            hf_flash2.patch(model, packed=True)
    assert {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")} == {"eager"}
    assert torch.equal(logits(model), expected) and set(report.calls.values()) == {0}
    hf_flash2.unpatch(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("way", [hf_flash2.patch, hf_flash2.patched])
def test_a_patched_model_that_cannot_run_packed_stays_patched(way, monkeypatch):
    monkeypatch.setattr(patches.instance, "reason_not_packable", lambda *_: "a reason")
    model = small_models.model("llama")
    report = hf_flash2.patch(model)
    with pytest.raises(ValueError, match="cannot run packed"), contextlib.ExitStack() as stack:
        made = way(model, packed=True)
        stack.enter_context(made)
    assert model.config._attn_implementation == "hf_flash2"
    logits(model)
    assert hf_flash2.patch(model) is report and set(report.calls.values()) == {1}
    hf_flash2.unpatch(model)
    assert model.config._attn_implementation == "eager"


def test_a_part_stays_patched_where_the_whole_cannot_run_packed(monkeypatch):
    model = small_models.model("llama")
    report = hf_flash2.patch(model.model, packed=True)
    monkeypatch.setattr(patches.instance, "reason_not_packable", lambda whole, _: "a reason" if whole is model else None)
    with pytest.raises(ValueError, match="cannot run packed"):
        hf_flash2.patch(model, packed=True)
    logits(model)
    assert set(report.calls.values()) == {1}
    assert hf_flash2.patch(model.model, packed=True) is report


def test_a_part_that_was_patched_before_the_whole():
    model = small_models.model("llama")
    before = snapshot(model)
    hf_flash2.patch(model.model)
    report = hf_flash2.patch(model)
    logits(model)
    assert (report.model, set(report.calls.values())) == ("LlamaForCausalLM", {1})
    with pytest.raises(ValueError, match="part of a larger model"):
        hf_flash2.unpatch(model.model)
    hf_flash2.unpatch(model)
    assert_same(before, snapshot(model))


def test_nothing_is_saved(tmp_path):
    model = small_models.model("mistral")
    keys = list(model.state_dict())
    model.save_pretrained(tmp_path / "before")
    hf_flash2.patch(model)
    model.save_pretrained(tmp_path / "after")
    saved = [(tmp_path / name / "config.json").read_text() for name in ("before", "after")]
    assert saved[0] == saved[1]
    assert not [name for name in json.loads(saved[1]) if "attn_impl" in name or "hf_flash2" in name]
    assert list(model.state_dict()) == keys
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "after", attn_implementation="eager").eval()
    torch.testing.assert_close(logits(loaded, "dense"), logits(model, "dense"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", ["qwen2", "phi3"])
def test_other_models_are_switched_through_the_interface(model_type):
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(model_type, vocab_size=small_models.VOCABULARY, initializer_range=0.3, pad_token_id=0, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    before, expected, real = snapshot(model), logits(model), small_models.key_mask("left").bool()
    report = hf_flash2.patch(model)
    torch.testing.assert_close(logits(model)[real], expected[real], rtol=1e-4, atol=1e-3)
    assert (report.family, report.patched, set(report.calls.values())) == ("interface", 2, {1})
    hf_flash2.unpatch(model)
    assert_same(before, snapshot(model))


def test_a_part_that_cannot_be_served_is_skipped_with_the_reason(monkeypatch):
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    }
    config = AutoConfig.for_model(
        "llava",
        text_config=small_models.config("llama").to_dict(),
        vision_config=AutoConfig.for_model("clip_vision_model", **vision).to_dict(),
        vision_feature_layer=-1,
    )
    model = AutoModel.from_config(config, attn_implementation="eager")
    tower = next(module for module in model.modules() if type(module).__name__ == "CLIPVisionModel")
    before = snapshot(model)
    report = hf_flash2.patch(model)
    assert (report.family, report.found, report.patched) == ("interface + llama", 4, 4)
    assert model.config.vision_config is tower.config and model.config.vision_config is not config.vision_config
    hf_flash2.unpatch(model)
    assert_same(before, snapshot(model))
    tower.config._attn_implementation = "sdpa"
    assert "eager (model)" in hf_flash2.patch(model).previous and "sdpa (vision_" in hf_flash2.patch(model).previous
    hf_flash2.unpatch(model)
    tower.config._attn_implementation = "eager"

    monkeypatch.setattr(type(tower), "_supports_flash_attn", False)
    report = hf_flash2.patch(model)
    assert (report.family, report.found, report.patched) == ("llama", 4, 2)
    assert all("vision" in name and "stays on eager" in reason and "use" in reason for name, reason in report.skipped.items())
    assert f"skipped   {next(iter(report.skipped))}" in str(report)
    assert model.config._attn_implementation == "hf_flash2"
    assert tower.config._attn_implementation == "eager"
    hf_flash2.unpatch(model)
    assert_same(before, snapshot(model))


UNSUPPORTED = {
    "bloom": ({"hidden_size": 32, "n_layer": 2, "n_head": 2, "vocab_size": 50}, "BloomForCausalLM"),
}
if VERSION < (5, 24):  # then it calls the attention interface
    UNSUPPORTED["gptj"] = ({"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 50, "rotary_dim": 8}, "GPTJForCausalLM")


@pytest.mark.parametrize("model_type", UNSUPPORTED)
def test_models_that_cannot_be_served_are_refused_and_left_alone(model_type):
    sizes, name = UNSUPPORTED[model_type]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))
    before = snapshot(model)
    with pytest.raises(ValueError, match=f"{name}.*use|no attention layer of {name}.*keep its attn_implementation"):
        hf_flash2.patch(model)
    assert_same(before, snapshot(model))


def test_a_module_without_a_transformers_model_is_refused():
    for nothing, what in ((None, "NoneType None"), ("gpt2", "str 'gpt2'"), (torch.nn.Linear, "the class Linear")):
        for call in (hf_flash2.patch, hf_flash2.unpatch):
            with pytest.raises(ValueError, match=f"a model that is loaded, such as .*, got {what}"):
                call(nothing)
    with pytest.raises(ValueError, match="no Transformers model .* inside this Linear"):
        hf_flash2.patch(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("options", [{"packed": "false"}, {"packed": True, "keep_logits": 1}], ids=str)
def test_options_are_yes_or_no(options):
    model = small_models.model("llama")
    with pytest.raises(ValueError, match="must be True or False, got ('false'|1)"):
        hf_flash2.patch(model, **options)
    assert model.config._attn_implementation == "eager"


def test_a_gpu_without_kernels_is_refused_before_anything_changes(monkeypatch):
    model = small_models.model("llama")
    before = snapshot(model)

    def no_kernels(index):
        raise native.NotAvailableError("the CUDA kernels are not built")

    monkeypatch.setattr(native, "check_device", no_kernels)
    monkeypatch.setattr(type(model), "parameters", lambda self: [type("Weight", (), {"is_meta": False, "device": torch.device("cuda", 0)})])
    with pytest.raises(native.NotAvailableError, match="not built"):
        hf_flash2.patch(model)
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("family", FAMILIES)
class TestWholeClass:
    """apply and revert of one family."""

    @pytest.fixture(autouse=True)
    def _revert(self, family):
        yield
        PATCHES[family].revert()

    def test_models_constructed_later_use_ours(self, family):
        before = [dict(vars(owner)) for owner in (PATCHES[family].attention, PATCHES[family].pretrained)]
        module = getattr(patches, family)
        module.apply()
        module.apply()
        model = AutoModelForCausalLM.from_config(small_models.config(family)).eval()
        assert model.config._attn_implementation == "hf_flash2"
        assert all(is_ours(layer) for layer in small_models.attention_layers(model).values())
        module.revert()
        assert before == [dict(vars(owner)) for owner in (PATCHES[family].attention, PATCHES[family].pretrained)]
        later = AutoModelForCausalLM.from_config(small_models.config(family))
        assert later.config._attn_implementation == "sdpa"

    def test_what_came_after_it_is_not_taken_away(self, family, monkeypatch):
        module = getattr(patches, family)
        module.apply()
        for owner, name in ((PATCHES[family].attention, "forward"), (PATCHES[family].pretrained, "get_correct_attn_implementation")):
            with monkeypatch.context() as context:
                context.setattr(owner, name, functools.partialmethod(getattr(owner, name)))
                theirs = vars(owner)[name]
                with pytest.raises(RuntimeError, match=f"{owner.__name__}.{name} is .*which came after"):
                    module.revert()
                assert vars(owner)[name] is theirs
        module.revert()
        assert PATCHES[family].attention.forward is not PATCHES[family].forward

    def test_the_model_computes_what_eager_computes(self, family):
        PATCHES[family].apply()
        eager, model = small_models.twins(family)  # eager by name: that choice is respected
        model.set_attn_implementation("hf_flash2")
        with hf_flash2.notices.record_calls() as calls:
            expected, found = logits(eager), logits(model)
        real = small_models.key_mask("left").bool()
        torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-3)
        assert list(calls.values()) == [["padded"]] * 2

    def test_an_instance_patched_meanwhile(self, family):
        model = small_models.model(family)
        before, expected = snapshot(model), logits(model)
        PATCHES[family].apply()
        report = hf_flash2.patch(model)
        logits(model)
        assert set(report.calls.values()) == {1}
        hf_flash2.unpatch(model)
        assert_same(before, snapshot(model))
        assert torch.equal(logits(model), expected)


class Halved(LlamaAttention):
    """As users extend an attention class."""

    def forward(self, *args, **kwargs):
        out, weights = super().forward(*args, **kwargs)
        return out * 0.5, weights


class OtherConfig(LlamaConfig):
    """Of a layer alone."""


def test_a_layer_with_a_config_of_its_own_stays_as_it_is():
    model = small_models.model("llama")
    layer = model.model.layers[1].self_attn
    layer.config = OtherConfig(**model.config.to_dict(), attn_implementation="eager")
    report = hf_flash2.patch(model)
    assert list(report.layers) == ["model.layers.0.self_attn"]
    assert report.skipped == {"model.layers.1.self_attn": "stays on eager: Transformers did not switch it"}


class WithoutConfig(torch.nn.Module):
    """It takes its attention function from elsewhere."""

    def forward(self, q, k, v):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](self, q, k, v, None)


def test_attention_without_a_config_is_passed_over():
    model = small_models.model("llama")
    model.pooler = WithoutConfig()
    assert len(hf_flash2.patch(model).layers) == 2


class Foreign(LlamaAttention):
    """Its forward calls no one's."""

    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states, None


def test_attention_that_extends_one_which_calls_the_interface():
    model = small_models.model("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = Halved
    inputs = small_models.batch("left")
    expected = model(**inputs).logits
    report = hf_flash2.patch(model)
    found = model(**inputs).logits
    real = small_models.real_tokens(inputs)
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)
    assert list(report.calls.values()) == [1, 1]
    hf_flash2.unpatch(model)
    model.model.layers[0].self_attn.__class__ = Foreign
    assert list(hf_flash2.patch(model).calls) == ["model.layers.1.self_attn"]
    hf_flash2.unpatch(model)
    model.model.layers[1].self_attn.__class__ = Foreign
    with pytest.raises(ValueError, match="no attention layer of LlamaForCausalLM .*: none of its modules calls its attention through"):
        hf_flash2.patch(model)


@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_patched_model_is_not_pickled_but_copied(family, packed):
    """It would come back with the forwards of its classes, and the config of a patched one."""
    model = small_models.model(family)
    hf_flash2.patch(model, packed=packed)
    with pytest.raises(pickle.PicklingError, match=r"call hf_flash2.unpatch\(model\) before"):
        torch.save(model, io.BytesIO())
    inputs = small_models.batch("left")
    assert torch.equal(copy.deepcopy(model)(**inputs).logits, model(**inputs).logits)
    hf_flash2.unpatch(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(**inputs).logits, model(**inputs).logits)


def test_models_side_by_side_are_patched_one_by_one():
    both = torch.nn.ModuleDict({"teacher": small_models.model("llama"), "student": small_models.model("gpt2")})
    for function in (hf_flash2.patch, patches.instance.patch_options):
        with pytest.raises(ValueError, match=r"several .* in this ModuleDict \(LlamaForCausalLM, GPT2LMHeadModel\); patch each of them"):
            function(both)
    reports = [hf_flash2.patch(model) for model in both.values()]
    assert [report.family for report in reports] == ["llama", "gpt2"]
    hf_flash2.unpatch(both)
    assert not any(map(is_ours, both.modules()))


def test_a_model_is_patched_once_where_only_parts_can_be():
    """The vision tower of GOT-OCR2 adds a position bias, so the model as a whole goes on naming eager attention."""
    tower = {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64, "mlp_dim": 32}
    text = {"model_type": "qwen2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 2, "vocab_size": 64}
    config = AutoConfig.for_model("got_ocr2", vision_config=tower | {"global_attn_indexes": [1]}, text_config=text, image_token_id=3)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    report = hf_flash2.patch(model)
    model(input_ids=torch.arange(5, 17)[None])
    assert hf_flash2.patch(model) is report
    assert list(report.calls.values()) == [1, 1]
    ((name, reason),) = report.skipped.items()
    assert "vision_tower" in name and reason.startswith("stays on eager: GotOcr2VisionEncoder does not call")


@pytest.mark.skipif(VERSION < (5, 0), reason="Transformers 4 declares flash attention for no part of it")
def test_layers_that_find_eager_whatever_is_asked_for_stay_on_it():
    """As those of Kosmos-2.5's vision tower, which would add our masks to their scores. Its text, in the same module, is switched."""
    text = {"vocab_size": 99, "embed_dim": 32, "layers": 2, "ffn_dim": 48, "attention_heads": 4, "max_position_embeddings": 64}
    vision = {"hidden_size": 32, "patch_embed_hidden_size": 12, "intermediate_size": 48, "head_dim": 8, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 4, "max_num_patches": 16, "patch_size": 2}
    config = AutoConfig.for_model("kosmos-2.5", text_config=text, vision_config=vision, latent_query_num=4)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    torch.manual_seed(0)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    patches = torch.randn(2, 16, 14)
    patches[..., 0], patches[..., 1] = torch.arange(1, 17) // 4, torch.arange(16) % 4
    patches[1, 10:] = 0  # padding
    is_image = torch.zeros(2, 16, dtype=torch.long)
    is_image[:, 5:9] = 1
    inputs = {"input_ids": torch.randint(3, 80, (2, 16)), "flattened_patches": patches, "image_embeds_position_mask": is_image}
    with torch.no_grad():
        expected = model(**inputs).logits
        report = hf_flash2.patch(model)
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-4, atol=1e-4)
    assert set(report.calls.values()) == {1} and not any(name.startswith("vision_model") for name in report.calls)
    ((name, reason),) = report.skipped.items()
    assert name == "vision_model" and "and so run eager attention" in reason
    hf_flash2.unpatch(model)
    with pytest.raises(ValueError, match="call hf_flash2.patch"):
        model.set_attn_implementation("hf_flash2")


def test_parts_of_parts_are_switched():
    """PaliGemma cannot be as a whole; its text and its vision can, also where it is itself a part, of ColPali."""
    layers = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
    text = layers | {"model_type": "gemma", "vocab_size": 99, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    vision = layers | {"model_type": "siglip_vision_model", "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    inner = PaliGemmaConfig(text_config=text, vision_config=vision, image_token_index=90, projection_dim=32, hidden_size=32)
    model = ColPaliForRetrieval._from_config(ColPaliConfig(vlm_config=inner, embedding_dim=16), attn_implementation="eager").eval()
    model(input_ids=torch.arange(5, 17)[None])  # Transformers leaves marks of its own
    before = snapshot(model)
    report = hf_flash2.patch(model)
    assert (report.found, report.patched) == (4, 4)
    model(input_ids=torch.arange(5, 17)[None])
    route = "padded" if VERSION >= (5, 0) else r"sdpa \(.*\)"  # PaliGemma makes a 4-D mask itself in Transformers 4
    assert re.search(rf"calls     2 {route}; none of 2 layers, as vlm\.\S*vision_tower\S*\.layers\.0\.", str(report))
    hf_flash2.unpatch(model)
    assert_same(before, snapshot(model))


def test_a_model_of_which_no_part_can_be_switched_says_why():
    """And does not send to hf_flash2.patch whoever comes from there."""
    vision = {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "mlp_dim": 32}
    prompt = {"hidden_size": 16, "image_size": 32, "mask_input_channels": 4}
    decoder = {"hidden_size": 16, "mlp_dim": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "iou_head_hidden_dim": 16}
    config = SamConfig(vision_config=vision | {"num_pos_feats": 8}, prompt_encoder_config=prompt, mask_decoder_config=decoder)
    with pytest.raises(ValueError, match="^no attention layer of SamModel can run on hf_flash2: .*position bias") as refused:
        hf_flash2.patch(SamModel._from_config(config, attn_implementation="eager"))
    assert "hf_flash2.patch" not in str(refused.value)


def test_parts_that_have_no_config_of_their_own_in_the_models():
    """T5's encoder and decoder inside BLIP-2 cannot be served, and take what is asked of the model as a whole."""
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
    text = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    config = Blip2Config(
        vision_config=layers | {"image_size": 32, "patch_size": 8},
        qformer_config=layers | {"encoder_hidden_size": 32, "vocab_size": 64},
        text_config=text | {"decoder_start_token_id": 0},
        num_query_tokens=4,
        image_token_index=60,
    )
    model = Blip2ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    tokens = torch.tensor([[60] * 4 + [5, 6, 7]])
    inputs = {"pixel_values": torch.randn(1, 3, 32, 32), "input_ids": tokens, "decoder_input_ids": tokens[:, 4:]}
    with torch.no_grad():
        expected = model(**inputs).logits
        report = hf_flash2.patch(model)
        torch.testing.assert_close(model(**inputs).logits, expected)
    assert [path.split(".")[0] for path in report.calls] == ["vision_model"] * 2 and set(report.calls.values()) == {1}
    assert {path.split(".")[0] for path in report.skipped} == {"qformer", "language_model"} and "language_model" not in report.skipped
    hf_flash2.unpatch(model)
    assert model.config.vision_config._attn_implementation == "eager"


@pytest.mark.skipif(VERSION < (5, 0), reason="the cross-attention of its GPT-2 is given a 4-D mask there")
@pytest.mark.parametrize("previous", ["eager", "sdpa"])
def test_layers_whose_model_was_given_another_config_follow_it(previous):
    """As EncoderDecoderModel gives its encoder: masks are made for what the model is switched to."""
    torch.manual_seed(0)
    encoder = AutoModel.from_config(small_models.config("llama"), attn_implementation=previous)
    decoder = AutoModelForCausalLM.from_config(
        small_models.config("gpt2", add_cross_attention=True, is_decoder=True), attn_implementation=previous
    )
    model = EncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
    inputs = small_models.batch("right")
    inputs["decoder_input_ids"] = inputs["input_ids"][:, :5]
    before, expected = snapshot(model), model(**inputs).logits
    report = hf_flash2.patch(model)
    assert report.skipped == {} and len(report.layers) == 6
    torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-4, atol=1e-5)
    assert all(calls == 1 for calls in report.calls.values())
    hf_flash2.unpatch(model)
    assert_same(before, snapshot(model))
    assert encoder.layers[0].self_attn.config._attn_implementation == previous
    model.set_attn_implementation("sdpa")  # which marks parts as switched, and may leave the mark there
    assert len(hf_flash2.patch(model).layers) == 6


class OfAFile:
    """What a class of a notebook may extend, too."""


@pytest.mark.skipif(VERSION < (5, 0), reason="its classes have to be in a file")
def test_a_class_of_a_notebook_is_patched_as_the_one_that_it_extends(monkeypatch):
    """Transformers cannot read its source, and says of it what it has said of a class that it extends."""
    cells = types.ModuleType("cells")
    monkeypatch.setitem(sys.modules, "cells", cells)
    cells.Mixin = OfAFile
    exec("from transformers import LlamaForCausalLM\nclass Mine(Mixin, LlamaForCausalLM):\n    pass\n", vars(cells))
    monkeypatch.delattr(LlamaForCausalLM, "_can_set_attn_implementation_cached_value", raising=False)
    torch.manual_seed(0)
    model = cells.Mine._from_config(small_models.config("llama"), attn_implementation="eager").eval()
    expected = logits(model)
    report = hf_flash2.patch(model)
    assert len(report.layers) == 2 and report.skipped == {}
    real = small_models.real_tokens(small_models.batch("left"))
    torch.testing.assert_close(logits(model)[real], expected[real], rtol=0, atol=1e-4)


@pytest.mark.skipif(VERSION < (5, 0), reason="its classes have to be in a file")
def test_a_class_of_a_notebook_that_extends_none_says_nothing_of_others(monkeypatch):
    """Transformers would keep its answer about PreTrainedModel, and give it for every model."""
    name = "_can_set_attn_implementation_cached_value"
    cells = types.ModuleType("cells")
    monkeypatch.setitem(sys.modules, "cells", cells)
    vars(cells).update(PreTrainedModel=PreTrainedModel, LlamaConfig=LlamaConfig)
    exec("class Mine(PreTrainedModel):\n    config_class = LlamaConfig\n", vars(cells))
    model = cells.Mine(small_models.config("llama"))
    model.inner = LlamaModel(model.config)
    with contextlib.suppress(ValueError):
        hf_flash2.patch(model)
    assert name not in vars(PreTrainedModel)

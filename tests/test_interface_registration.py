"""Registration: every way in works on the first call of a fresh process, in either import order; what cannot be served is refused."""

import inspect
import json
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
import tiny_models as tiny
import torch
import transformers
from tiny_models import VERSION
from transformers import LlamaForCausalLM

import hf_flash2
from hf_flash2 import notices, registration

pytestmark = pytest.mark.timeout(240)
ROOT = Path(__file__).resolve().parent.parent


def run_in_fresh_process(code: str) -> str:
    """What the code prints last. An error there is the error of the test."""
    finished = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A saved model that ran with our implementation."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = tiny.model("llama")
    model.save_pretrained(folder)
    return folder


IMPORTS = {"before": "import hf_flash2, transformers", "after": "import transformers, transformers.modeling_utils; import hf_flash2"}
WAYS = {
    "from_pretrained": "model = AutoModelForCausalLM.from_pretrained({folder!r}, attn_implementation='hf_flash2')",
    "from_config": "model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained({folder!r}), attn_implementation='hf_flash2')",
    "set_attn_implementation": "model = AutoModelForCausalLM.from_pretrained({folder!r}); model.set_attn_implementation('hf_flash2')",
}


@pytest.mark.parametrize(("order", "way"), [("before", "from_pretrained"), ("after", "from_config"), ("after", "set_attn_implementation")])
def test_first_call_of_a_fresh_process(order, way, checkpoint):
    code = f"""
        {IMPORTS[order]}
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        from hf_flash2 import notices
        {WAYS[way].format(folder=str(checkpoint))}
        with notices.record_calls() as calls:
            model.generate(torch.tensor([[5, 6, 7]]), attention_mask=torch.tensor([[0, 1, 1]]), max_new_tokens=2, do_sample=False)
        print(model.config._attn_implementation, len(calls), {{route for layer in calls.values() for route in layer}})
    """
    assert run_in_fresh_process(code) == "hf_flash2 2 {'padded'}"


def test_without_transformers():
    code = """
        import sys
        sys.modules["transformers"] = None
        import torch, hf_flash2
        q = torch.randn(1, 3, 2, 8)
        state = hf_flash2.registration_state()
        print(hf_flash2.flash_attn_func(q, q, q).shape == q.shape, state["registered"], state["problems"])
    """
    assert run_in_fresh_process(code) == "True False []"


def test_with_a_transformers_that_cannot_be_imported(tmp_path):
    (tmp_path / "transformers.py").write_text("raise RuntimeError('broken install')\n")
    code = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import hf_flash2
        print(hf_flash2.registration_state()["problems"])
    """
    assert "broken install" in run_in_fresh_process(code)


def test_the_name_is_not_saved(checkpoint):
    assert "hf_flash2" not in (checkpoint / "config.json").read_text()
    assert json.loads((checkpoint / "config.json").read_text())["model_type"] == "llama"


def test_registering_twice_wraps_once():
    utils = transformers.modeling_flash_attention_utils
    before = (utils._lazy_imports, transformers.PreTrainedModel.get_correct_attn_implementation)
    registration.register()
    registration._wrap(utils, "_lazy_imports", registration._admitting)
    assert before == (utils._lazy_imports, transformers.PreTrainedModel.get_correct_attn_implementation)


def test_registration_state():
    state = hf_flash2.registration_state()
    assert state["transformers"] == transformers.__version__
    assert (
        state["names"] == ["hf_flash2", "paged|hf_flash2"] == [*filter(transformers.AttentionMaskInterface().__contains__, state["names"])]
    )
    assert state["registered"] and state["problems"] == [] and all(state["wrapped"].values())
    assert {"_lazy_imports", "_check_and_adjust_attn_implementation", "get_correct_attn_implementation"} <= set(state["wrapped"])
    json.dumps(state)


def test_the_import_hook_gives_our_functions_in_the_form_this_version_takes():
    utils = transformers.modeling_flash_attention_utils
    for name in ("hf_flash2", "paged|hf_flash2"):
        functions = utils._lazy_imports(name)
        assert len(functions) == (5 if hasattr(utils, "_flash_with_kvcache_fn") else 4)
        assert functions[:2] == (hf_flash2.flash_attn_func, hf_flash2.flash_attn_varlen_func)


@pytest.mark.skipif(
    not hasattr(transformers.modeling_flash_attention_utils, "_flash_with_kvcache_fn"), reason="this Transformers asks for no such function"
)
def test_a_cache_that_hands_no_block_tables_on_is_not_decoded_from(monkeypatch):
    monkeypatch.setattr(registration, "takes_kwargs", lambda cache_class: False)
    assert transformers.modeling_flash_attention_utils._lazy_imports("hf_flash2")[2] is None


def test_the_import_hook_gives_others_theirs():
    def lazy_imports(implementation, attention_wrapper=None):
        return "theirs", implementation, attention_wrapper

    lazy_imports.__module__ = transformers.modeling_flash_attention_utils.__name__
    admitting = registration._admitting(lazy_imports)
    for name in (None, "flash_attention_2", "somebody/flash-kernel"):
        assert admitting(name, attention_wrapper=1) == ("theirs", name, 1)
        assert admitting(implementation=name) == ("theirs", name, None)


def test_whoever_takes_the_name_after_us_has_it(monkeypatch):
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "hf_flash2", lambda *_: None)
    state = hf_flash2.registration_state()
    assert not state["registered"] and "hf_flash2" not in state["names"]


@pytest.mark.parametrize("kind", [ValueError, ImportError])
def test_a_missing_target_is_explained_when_the_name_is_used(kind, monkeypatch):
    monkeypatch.setattr(registration, "_problems", [])
    registration._wrap(types.SimpleNamespace(__name__="somewhere"), "_lazy_imports", registration._admitting)
    assert "somewhere._lazy_imports" in registration._problems[0]

    def refuses(self, implementation):
        raise kind("not a kernel of the hub")

    with pytest.raises(ValueError, match="not fully registered: transformers .* has no somewhere._lazy_imports"):
        registration._gated(refuses)(tiny.model("llama", "eager"), "hf_flash2")


def test_an_error_of_transformers_is_left_alone():
    """When nothing is amiss with the registration."""

    def refuses(self, implementation):
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="^no such model$"):
        registration._gated(refuses)(tiny.model("llama", "eager"), "hf_flash2")


def test_other_implementations_are_left_alone():
    assert tiny.model("llama", "sdpa").config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="no_such_thing"):
        tiny.model("llama", "no_such_thing")


@pytest.mark.parametrize("name", ["_check_and_adjust_attn_implementation", "get_correct_attn_implementation"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "hf_flash2"])
def test_the_implementation_may_be_given_by_name(name, implementation):
    method = getattr(tiny.model("llama", "eager"), name)
    assert method(**{[*inspect.signature(method).parameters][0]: implementation}) == implementation


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_model_with_a_gate_of_its_own_is_left_alone(implementation):
    """ModernBERT of Transformers 4.57 gives the implementation to the common gate by name."""
    assert tiny.model("modernbert", implementation).config._attn_implementation == implementation


REFUSED = {
    "bloom": "_supports_flash_attn",
    "mpt": "_supports_flash_attn",
    "t5": "_supports_flash_attn",
}
if VERSION < (5, 0):
    REFUSED["bert"] = "_supports_flash_attn"
if VERSION < (5, 24):
    REFUSED["gptj"] = "never call the attention interface"


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_cannot_be_served_are_refused(family):
    with pytest.raises(ValueError, match=f"cannot run with attn_implementation=.*{REFUSED[family]}"):
        tiny.model(family)


def test_the_name_of_continuous_batching_is_refused_and_admitted_as_ours():
    with pytest.raises(ValueError, match="cannot run with attn_implementation=.*_supports_flash_attn"):
        tiny.model("bloom", "eager").get_correct_attn_implementation("paged|hf_flash2")
    assert tiny.model("gpt_oss", "eager").get_correct_attn_implementation("paged|hf_flash2") == "paged|hf_flash2"


def module_of(source: str, monkeypatch, tmp_path) -> str:
    """The name of a loaded module that has this source, for models that say they are of it."""
    module = types.ModuleType(f"modeling_{tmp_path.name}")
    module.__file__ = str(tmp_path / "modeling.py")
    Path(module.__file__).write_text(source)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


def reason_unsupported(name: str, source: str, monkeypatch, tmp_path) -> str | None:
    """Why a model of this name in a module of this source cannot be served."""
    attributes = {"__module__": module_of(source, monkeypatch, tmp_path), "_supports_flash_attn": True}
    mine = type(name, (transformers.PreTrainedModel,), attributes)
    return registration.reason_model_unsupported(mine.__new__(mine))


@pytest.mark.parametrize(
    ("source", "served"),
    [
        ("class MineAttention(nn.Module):\n    pass\n", False),
        ("class MineAttention(nn.Module):\n    functions = ALL_ATTENTION_FUNCTIONS\n", True),
        ("class Mine(MineModel):\n    pass\n", True),  # its layers are somewhere else
    ],
    ids=["own attention", "calls the interface", "no layer"],
)
def test_layers_that_never_call_the_interface(source, served, monkeypatch, tmp_path):
    reason = reason_unsupported("Mine", source, monkeypatch, tmp_path)
    assert reason is None if served else "never call the attention interface" in reason


def test_a_refusal_names_the_way_for_models_made_of_several(monkeypatch):
    with pytest.raises(ValueError, match='use .*"eager"$'):
        tiny.model("bloom")
    for refused in (transformers.CLIPVisionModel, transformers.LlavaForConditionalGeneration):  # a part; the whole
        monkeypatch.setattr(refused, "_supports_flash_attn", False)
        named = f'{refused.__name__} cannot run .* use .*"eager"; of a model made of several, load it so and call hf_flash2.patch'
        with pytest.raises(ValueError, match=named):
            transformers.LlavaForConditionalGeneration._from_config(transformers.LlavaConfig(), attn_implementation="hf_flash2")


LOOKS_UP_AN_ATTRIBUTE = """
class MineAttention(nn.Module):
    def forward(self):
        return ALL_ATTENTION_FUNCTIONS.get_interface("eager", None)


class MineTowerAttention(nn.Module):
    def forward(self):
        return getattr(ALL_ATTENTION_FUNCTIONS, "eager", None)


class MineTower(MinePreTrainedModel):
    def __init__(self):
        self.layers = nn.ModuleList([MineTowerAttention() for _ in range(2)])


class MineText(MinePreTrainedModel):
    def __init__(self):
        self.layer = MineAttention()


class Mine(MinePreTrainedModel):
    def __init__(self):
        self.tower, self.text = MineTower(), MineText()
"""


@pytest.mark.parametrize(("name", "served"), [("MineText", True), ("MineTower", False), ("Mine", False)])
def test_layers_that_find_eager_whatever_is_asked_for(name, served, monkeypatch, tmp_path):
    """They would run it with masks of ours. Only the models that make such layers are refused."""
    reason = reason_unsupported(name, LOOKS_UP_AN_ATTRIBUTE, monkeypatch, tmp_path)
    assert reason is None if served else "and so run eager attention" in reason


def test_models_that_list_what_they_are_compatible_with():
    """Those whose layers add sinks, and nothing that no kernel does, are served; their list stays as it is."""
    model = tiny.model("gpt_oss")
    compatible = type(model)._compatible_flash_implementations if VERSION >= (5, 0) else None
    assert model.config._attn_implementation == "hf_flash2" and "_compatible_flash_implementations" not in vars(model)
    model._compatible_flash_implementations = ["hf_flash2"]  # by whoever has made the model
    model.set_attn_implementation("eager")
    model.set_attn_implementation("hf_flash2")
    assert vars(model)["_compatible_flash_implementations"] == ["hf_flash2"] and model.config._attn_implementation == "hf_flash2"
    assert compatible is None or "hf_flash2" not in compatible


CALLS_OF_LAYERS = {  # source of a modeling module -> whether a model with a list of compatible implementations is served
    "sinks": ("attention_interface(q, s_aux=self.sinks)", True),
    "sinks in every call": ("attention_interface(q, s_aux=self.sinks)\nattention_interface(q, s_aux=None)", True),
    "sinks in one call": ("attention_interface(q, s_aux=self.sinks)\nattention_interface(q)", False),
    "sinks and a bias": ("attention_interface(q, s_aux=self.sinks, position_bias=bias)", False),
    "sinks and sparse blocks": ("attention_interface(q, s_aux=self.sinks, block_indices=indices)", False),
    "no call": ("somebody_elses(q, s_aux=self.sinks)", False),
}


@pytest.mark.parametrize("calls", CALLS_OF_LAYERS)
def test_only_sinks_are_served_beside_a_list_of_compatible_implementations(calls, monkeypatch, tmp_path):
    source, served = CALLS_OF_LAYERS[calls]
    attributes = {"__module__": module_of(source + "\n", monkeypatch, tmp_path), "_compatible_flash_implementations": ["somebody/sparse"]}
    model = type("Mine", (LlamaForCausalLM,), attributes)(tiny.config("llama"))
    reason = registration.reason_model_unsupported(model)
    assert reason is None if served else "accepts only somebody/sparse" in reason


def test_a_model_that_lists_us_is_served():
    model = tiny.model("llama", "eager")
    model._compatible_flash_implementations = ["somebody/sparse", "hf_flash2"]
    assert registration.reason_model_unsupported(model) is None


def test_switching_a_model_that_cannot_be_served():
    model = tiny.model("llama", "eager")
    model._compatible_flash_implementations = ["somebody/sparse"]
    with pytest.raises(ValueError, match="accepts only somebody/sparse because of what its attention adds"):
        model.set_attn_implementation("hf_flash2")
    assert model.config._attn_implementation == "eager" and model._compatible_flash_implementations == ["somebody/sparse"]
    if VERSION >= (5, 24):
        return
    without_interface = tiny.model("gptj", "eager")
    without_interface.set_attn_implementation("hf_flash2")  # Transformers itself warns and changes nothing
    assert without_interface.config._attn_implementation == "eager"


def test_a_subclass_defined_anywhere_is_served():
    class Mine(LlamaForCausalLM):
        __module__ = "__main__"

    assert Mine._from_config(tiny.config("llama"), attn_implementation="hf_flash2").config._attn_implementation == "hf_flash2"


def test_trl_learns_our_name_when_it_is_loaded(monkeypatch):
    trainer = types.ModuleType("trl.trainer.sft_trainer")
    trainer.FLASH_ATTENTION_VARIANTS = {"flash_attention_2"}
    monkeypatch.setitem(sys.modules, "trl.trainer.sft_trainer", trainer)
    tiny.model("llama")
    assert "hf_flash2" in trainer.FLASH_ATTENTION_VARIANTS and hf_flash2.registration_state()["trl"]


def test_a_trl_that_keeps_names_in_another_form_is_left_alone(monkeypatch):
    trainer = types.ModuleType("trl.trainer.sft_trainer")
    trainer.FLASH_ATTENTION_VARIANTS = ("flash_attention_2",)
    monkeypatch.setitem(sys.modules, "trl.trainer.sft_trainer", trainer)
    tiny.model("llama")
    assert trainer.FLASH_ATTENTION_VARIANTS == ("flash_attention_2",) and not hf_flash2.registration_state()["trl"]


def test_a_trainer_of_a_time_before_context_parallelism_lacks_nothing(monkeypatch):
    monkeypatch.setattr(registration, "_problems", [])
    module = types.ModuleType("transformers.trainer")
    module.Trainer = type("Trainer", (), {})
    monkeypatch.setitem(sys.modules, "transformers.trainer", module)
    tiny.model("llama")
    assert hf_flash2.registration_state()["problems"] == []


def test_trainer_and_accelerate_are_joined_when_they_are_loaded(monkeypatch):
    """However late that is: with the next model. What they are given otherwise reaches them as it was."""

    class Trainer:
        def _prepare_context_parallel_inputs(self, model, inputs, *, more):
            return model.config._attn_implementation, inputs, more

    hooked = []
    fakes = {"transformers.trainer": types.ModuleType("transformers.trainer"), "accelerate.accelerator": types.ModuleType("accelerator")}
    fakes["transformers.trainer"].Trainer = Trainer
    fakes["accelerate.accelerator"]._attach_context_parallel_hooks = lambda model, **options: hooked.append((model, options))
    for name, module in fakes.items():
        monkeypatch.setitem(sys.modules, name, module)
    models = {name: tiny.model("llama", name) for name in ("eager", "hf_flash2")}
    for name, model in models.items():
        seen = "sdpa" if name == "hf_flash2" else name
        assert Trainer()._prepare_context_parallel_inputs(model, 1, more=2) == (seen, 1, 2)
        assert model.config._attn_implementation == name
        fakes["accelerate.accelerator"]._attach_context_parallel_hooks(model, more=2)
    assert hooked == [(models["eager"], {"more": 2})]


def test_an_accelerate_that_takes_masks_away_in_another_place_is_told_of(monkeypatch):
    monkeypatch.setattr(registration, "_problems", [])
    accelerator = types.ModuleType("accelerate.accelerator")
    monkeypatch.setitem(sys.modules, "accelerate.accelerator", accelerator)
    tiny.model("llama")
    assert hf_flash2.registration_state()["problems"] == []  # of a time before it knew context parallelism
    accelerator.ParallelismConfig = object
    for _ in range(2):
        tiny.model("llama")
    [problem] = hf_flash2.registration_state()["problems"]
    assert "_attach_context_parallel_hooks" in problem


def test_switching_back_and_forth():
    model = tiny.model("llama", "eager")
    inputs = {"input_ids": tiny.tokens()}
    with notices.record_calls() as calls, torch.no_grad():
        model(**inputs)
        assert not calls
        model.set_attn_implementation("hf_flash2")
        model(**inputs)
        assert len(calls) == 2
        model.set_attn_implementation("sdpa")
        model(**inputs)
        assert all(len(layer) == 1 for layer in calls.values())

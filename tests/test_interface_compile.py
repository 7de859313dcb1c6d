"""Whole models under torch.compile(fullgraph=True): no graph break, and the same result as eager attention.

The "aot_eager" backend traces forward and backward as inductor does, without the minutes inductor takes to compile for a CPU.
"""

import contextlib
import inspect
import threading

import pytest
import tiny_models as tiny
import torch
from test_interface import documents, logits
from tiny_models import BATCH, DTYPES, SEQLEN, VERSION
from torch.utils.flop_counter import FlopCounterMode
from transformers import StaticCache, masking_utils

import hf_flash2.notices

pytestmark = pytest.mark.timeout(300)
DTYPE = DTYPES[0]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def notices(caplog):
    """What hf_flash2 has logged so far in this test."""
    hf_flash2.notices._noticed.clear()
    return lambda: [record.message for record in caplog.records if record.name == "hf_flash2"]


def assert_compiled_matches_eager(family, device, kept=None, eager_inputs=None, dynamic=None, **inputs):
    ours, eager = tiny.twins(family, device, DTYPE)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    found = logits(compiled, **inputs)
    expected, truth = (logits(m, **eager_inputs or inputs) for m in (eager, tiny.eager_in_float32(eager)))
    if kept is not None:
        found, expected, truth = found[kept], expected[kept], truth[kept]
    tiny.assert_as_exact_as_eager(found, expected, truth)


PADDED = [("llama", "left"), ("llama", "right"), ("mistral", "holes"), ("gpt2", "holes")]
if VERSION >= (5, 0):
    PADDED += [("bert", "right"), ("modernbert", "right")]


@pytest.mark.parametrize(("family", "padding"), PADDED)
def test_padded_model(family, padding, device, notices):
    mask = tiny.attention_mask(padding, device)
    inputs = {"input_ids": tiny.tokens(device), "attention_mask": mask} | ({} if "bert" in family else {"use_cache": False})
    assert_compiled_matches_eager(family, device, mask.bool(), **inputs)
    assert notices() == []


def test_numbers_that_the_compiler_leaves_open(device, notices):
    """The scale of a layer, too, under dynamic=True, or where layers differ in it."""
    mask = tiny.attention_mask("left", device)
    inputs = {"input_ids": tiny.tokens(device), "attention_mask": mask, "use_cache": False}
    assert_compiled_matches_eager("llama", device, mask.bool(), dynamic=True, **inputs)
    q = torch.randn(2, 5, 2, 16, device=device).to(DTYPE)
    scaled = torch.compile(lambda scale: hf_flash2.flash_attn_func(q, q, q, softmax_scale=scale), backend="aot_eager", fullgraph=True)
    for scale in (0.1, 0.2, 0.3):
        assert torch.equal(scaled(scale), hf_flash2.flash_attn_func(q, q, q, softmax_scale=scale))
    assert notices() == []


def test_a_bidirectional_window_that_layers_take_for_a_causal_one(device, notices):
    ours, eager = tiny.twins("t5gemma", device, DTYPE)
    mask = tiny.attention_mask("right", device)
    models = (torch.compile(ours, backend="aot_eager", fullgraph=True), eager, tiny.eager_in_float32(eager))
    with torch.no_grad():
        results = [model(input_ids=tiny.tokens(device), attention_mask=mask).last_hidden_state[mask.bool()] for model in models]
    tiny.assert_as_exact_as_eager(*results)
    assert len(notices()) == 1 and "T5GemmaSelfAttention runs on torch's scaled_dot_product_attention" in notices()[0]


@pytest.mark.skipif(VERSION < (5, 0), reason="its layers hand on their window before Transformers 5")
def test_a_window_that_is_only_in_the_mask(device, notices):
    mask = tiny.attention_mask("left", device)
    inputs = {"input_ids": tiny.tokens(device), "attention_mask": mask, "use_cache": False}
    assert_compiled_matches_eager("qwen2_moe", device, mask.bool(), **inputs)
    assert len(notices()) == 1 and "its layers leave their sliding window to the mask" in notices()[0]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_unpadded_model_without_a_mask(family, dynamic, device, notices):
    """Positions that the model counts up itself hold no documents: the kernels run, as they do when it is not compiled."""
    assert_compiled_matches_eager(family, device, input_ids=tiny.tokens(device), use_cache=False, dynamic=dynamic)
    assert notices() == []


def test_unpadded_model_with_a_cache_uses_the_kernel(device, notices):
    assert_compiled_matches_eager("llama", device, input_ids=tiny.tokens(device), use_cache=True)
    assert notices() == []


@pytest.mark.skipif(VERSION < (5, 0), reason="its encoders do not call the attention interface")
@pytest.mark.parametrize("family", ["modernbert", "bert"])
def test_an_unpadded_encoder_without_a_mask(family, device, notices):
    """Its window has two sides, although its model counts positions up as a decoder does."""
    assert_compiled_matches_eager(family, device, input_ids=tiny.tokens(device))
    assert notices() == []


def test_masks_of_a_transformers_with_more_arguments(device, notices, monkeypatch):
    """What a new one lays over the mask cannot be seen while compiling."""
    made = masking_utils.create_causal_mask
    new = inspect.Parameter("segment_ids", inspect.Parameter.KEYWORD_ONLY, default=None)
    known = [p for p in inspect.signature(made).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    later = lambda *args, **kwargs: made(*args, **kwargs)  # noqa: E731
    later.__signature__ = inspect.Signature([*known, new])
    monkeypatch.setattr(masking_utils, "create_causal_mask", later)
    assert_compiled_matches_eager("llama", device, input_ids=tiny.tokens(device), use_cache=False)
    assert len(notices()) == 1 and "no plain causal" in notices()[0]


def test_restarting_positions_do_not_leak_without_the_kwargs(device, notices):
    """Positions that are given cannot be looked at while compiling: exact by SDPA, and said once."""
    batch = documents(device, flash_kwargs=False)
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
    assert_compiled_matches_eager("llama", device, **inputs)
    assert len(notices()) == 1 and "several documents" in notices()[0]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_restarting_positions_where_layers_are_compiled_one_by_one(family, rows, device, notices):
    """The mask is made outside of what is compiled, and the layers see in it where documents begin, forward and backward."""
    ids = tiny.tokens(device, rows)
    positions = torch.cat((torch.arange(5), torch.arange(SEQLEN - 5))).to(device).expand(rows, -1)
    ours, eager = tiny.twins(family, device, DTYPE)
    exact = tiny.eager_in_float32(eager)
    for layer in ours.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    inputs = {"position_ids": positions, "use_cache": False}
    results = []
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):  # which torch 2.13 needs no longer
        for model in (ours, eager, exact):
            found = model(ids, **inputs).logits
            found.float().square().mean().backward()
            results.append((found.detach(), model.model.layers[0].self_attn.q_proj.weight.grad))
    for found, expected, truth in zip(*results, strict=True):
        tiny.assert_as_exact_as_eager(found, expected, truth)
    assert notices() == []


@pytest.mark.skipif(VERSION < (5, 0), reason="its GPT-OSS has no flash attention")
def test_restarting_positions_that_the_mask_does_not_look_at_are_told_of(device, notices):
    """Nobody keeps documents apart then. Positions that the model counts up itself are no matter."""
    ours = tiny.model("gpt_oss", device=device, dtype=DTYPE)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    ids = tiny.tokens(device, 1)
    logits(compiled, input_ids=ids, use_cache=False)
    assert notices() == []
    logits(compiled, input_ids=ids, position_ids=torch.arange(SEQLEN, device=device)[None] % 5, use_cache=False)
    assert len(notices()) == 1 and "takes its row for one document: position_ids may hold several documents" in notices()[0]


def test_documents_with_the_kwargs_use_the_kernel(device, notices):
    batch = documents(device, flash_kwargs=True)
    del batch["labels"]
    plain = {name: batch[name] for name in ("input_ids", "position_ids")}
    assert_compiled_matches_eager("llama", device, eager_inputs=plain | {"use_cache": False}, **batch, use_cache=False)
    assert notices() == []


@pytest.mark.skipif(VERSION < (5, 0), reason="uses the models of Transformers 5")
@pytest.mark.parametrize(("family", "overrides"), [("qwen2_moe", {}), ("gemma2", {"use_bidirectional_attention": True})])
def test_documents_whose_layers_leave_something_to_the_mask(family, overrides, device, notices):
    """A window that layers do not hand on, what is causal against their word: then the mask counts beside cu_seq_lens."""
    batch = documents(device, flash_kwargs=True)
    del batch["labels"]
    ours, eager = tiny.twins(family, device, DTYPE, **overrides)
    found = logits(torch.compile(ours, backend="aot_eager", fullgraph=True), **batch, use_cache=False)
    plain = {name: batch[name] for name in ("input_ids", "position_ids")}
    expected, truth = (logits(model, **plain, use_cache=False) for model in (eager, tiny.eager_in_float32(eager)))
    tiny.assert_as_exact_as_eager(found, expected, truth)
    assert len(notices()) == 1


def test_gradients_of_a_padded_model(device):
    ours, eager = tiny.twins("llama", device, DTYPE)
    mask = tiny.attention_mask("holes", device)
    inputs = {"input_ids": tiny.tokens(device), "attention_mask": mask, "use_cache": False}
    inputs["labels"] = tiny.labels(inputs["input_ids"], mask)
    torch.compile(ours, backend="aot_eager", fullgraph=True)(**inputs).loss.backward()
    eager_grads, truth = tiny.gradients(eager, **inputs), tiny.gradients(tiny.eager_in_float32(eager), **inputs)
    for name, parameter in ours.named_parameters():
        tiny.assert_as_exact_as_eager(parameter.grad, eager_grads[name], truth[name], factor=3.0, name=name)


@pytest.mark.parametrize(("family", "padding"), [("llama", "dense"), ("llama", "right"), ("mistral", "left"), ("mistral", "right")])
def test_decoding_steps_with_a_static_cache(family, padding, device, notices):
    """Prefill in eager mode, steps compiled. Right padding needs the place of the queries in the cache, which only our mask carries."""
    ours, eager = tiny.twins(family, device, DTYPE)
    exact = tiny.eager_in_float32(eager)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    ids = tiny.tokens(device)
    mask = tiny.attention_mask(padding, device, seqlen=6)
    results = []
    for prefill, step in ((ours, compiled), (eager, eager), (exact, exact)):
        cache = StaticCache(config=ours.config, max_cache_len=16)
        out = []
        for start, end in ((0, 6), (6, 7), (7, 8)):
            grown = None if mask is None else torch.cat((mask, mask.new_ones(BATCH, end - 6)), 1)
            extra = {} if VERSION >= (5, 0) else {"cache_position": torch.arange(start, end, device=device)}
            positions = torch.arange(start, end, device=device).expand(BATCH, -1)
            model = prefill if start == 0 else step
            out.append(
                logits(model, input_ids=ids[:, start:end], attention_mask=grown, position_ids=positions, past_key_values=cache, **extra)
            )
        results.append(torch.cat(out[1:], 1))
    tiny.assert_as_exact_as_eager(*results)
    if family == "llama" or VERSION >= (5, 0):  # 4.57 does not tell a window from a window with an overlay: SDPA
        assert notices() == []


def test_generate_with_a_compiled_static_cache(device):
    """`generate` prepares the mask ahead of the model, which makes it once more from what it gets."""
    ours, eager = tiny.twins("llama", device, DTYPE)
    mask = tiny.attention_mask("left", device)
    arguments = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "cache_implementation": "static"}
    ours.forward = torch.compile(ours.forward, backend="aot_eager")
    tiny.assert_same_greedy_tokens(ours, eager, input_ids=tiny.tokens(device), attention_mask=mask, **arguments, disable_compile=True)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, lambda: FlopCounterMode(display=False)], ids=["plain", "counted"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_a_model_is_not_compiled_where_another_thread_compiles(use_cache, mode, device, notices):
    """From torch 2.13 on torch.compiler.is_compiling() is True in both: positions that restart would not be looked at."""
    ours, _ = tiny.twins("llama", device, DTYPE)
    inputs = {"input_ids": tiny.tokens(device)[:1], "position_ids": torch.arange(SEQLEN, device=device)[None] % 5, "use_cache": use_cache}
    alone = logits(ours, **inputs)
    compiling, done = threading.Event(), threading.Event()

    def backend(graph, _):
        compiling.set()
        done.wait(60)
        return graph.forward

    other = threading.Thread(target=lambda: torch.compile(torch.sin, backend=backend)(torch.ones(3)))
    other.start()
    try:
        assert compiling.wait(60)
        with mode():
            found = logits(ours, **inputs)
        assert torch.equal(found, alone) and notices() == []
    finally:
        done.set()
        other.join()


def test_compiled_gradients_of_a_model_as_a_function(device):
    """Dynamo's tensors are wrapped there."""
    ours, _ = tiny.twins("llama", device, torch.float32)
    parameters = {name: x.detach() for name, x in ours.named_parameters()}
    ids = tiny.tokens(device)[:1]

    def loss(parameters):
        return torch.func.functional_call(ours, parameters, (), {"input_ids": ids, "use_cache": False}).logits.sin().sum()

    found, expected = torch.compile(torch.func.grad(loss), backend="aot_eager")(parameters), torch.func.grad(loss)(parameters)
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_traced_with_a_mask(device):
    """What torch.jit.trace records of one padded batch is right for another."""
    ours, eager = tiny.twins("llama", device, torch.float32)

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = ours

        def forward(self, input_ids, attention_mask):
            return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits

    ids = tiny.tokens(device)
    traced = torch.jit.trace(Logits(), (ids, tiny.attention_mask("right", device)))
    for padding in ("left", "holes"):
        mask = tiny.attention_mask(padding, device)
        expected = eager(input_ids=ids, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(traced(ids, mask)[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-4)

"""Packed decoders under what training wraps around them: DDP, FSDP2, accelerate, Trainer, PEFT, torch.compile."""

import copy
import functools
import itertools
import types
from collections import Counter
from functools import partial

import pytest
import ranks
import small_models
import torch
import torch.distributed as dist
from accelerate import Accelerator
from hf_flash2.patches import loss as packed_loss
from hf_flash2.patches.packed import looks_at_rows
from peft import LoraConfig, PolyConfig, get_peft_model
from tiny_models import VERSION
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

import hf_flash2

STEPS = 4
TOLERANCE = 2e-5  # of a loss, float32


def ragged(seed: int, length: int = 24) -> dict[str, torch.Tensor]:
    """A right-padded batch whose number of tokens differs from seed to seed, with labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, small_models.VOCABULARY, (4, length), generator=generator)
    lengths = torch.randint(2, length, (4, 1), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": (torch.arange(length) < lengths).long()}
    return inputs | {"labels": small_models.labels(inputs)}


def train(model, batches, optimizer=None) -> torch.Tensor:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for inputs in batches:
        loss = model(**inputs).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_two_processes_with_ddp_and_fsdp(tmp_path):
    """Patched before and after the wrapping, each rank with batches of its own: the mean of their losses is eager's on both batches."""
    ranks.run("test_packed_training", "distributed_rank", tmp_path)


def distributed_rank(rank: int, folder: str) -> None:
    plain = small_models.model("llama").train()
    eager = copy.deepcopy(plain)
    expected = []
    optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-2)
    for step in range(STEPS):  # both ranks' batches by one process: what their averaged gradients must amount to
        loss = sum(eager(**ragged(2 * step + r)).loss for r in range(2)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.detach())
    for wrap, patch_first, packed in itertools.product((ddp, fsdp2, fsdp1), (True, False), (True, False)):
        model = copy.deepcopy(plain)
        report = hf_flash2.patch(model, packed=packed) if patch_first else None
        wrapped = wrap(model)
        report = report or hf_flash2.patch(wrapped, packed=packed)
        losses = train(wrapped, [ragged(2 * step + rank) for step in range(STEPS)])
        dist.all_reduce(losses)
        torch.testing.assert_close(losses / 2, torch.stack(expected), rtol=TOLERANCE, atol=0)
        assert set(report.calls.values()) == {STEPS}
        if packed:
            assert report.forwards == {"packed": STEPS} and report.losses == {"in chunks": STEPS}


def test_two_processes_whose_head_gathers_its_weights(tmp_path):
    """Sharded apart from the decoder: each process has another number of chunks of labels, and all call the head as often."""
    ranks.run("test_packed_training", "rank_with_sharded_head", tmp_path)


def rank_with_sharded_head(rank: int, folder: str) -> None:
    def batch(rank: int) -> dict[str, torch.Tensor]:
        inputs = ragged(3)
        if rank == 1:  # a few labels, so one chunk
            inputs["labels"] = inputs["labels"].masked_fill(torch.arange(inputs["labels"].shape[1]) > 2, -100)
        return inputs

    def sharded(model, hooked: bool):
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model.lm_head, mesh=mesh)
        if hooked:  # by somebody else
            model.lm_head.register_forward_hook(lambda module, args, output: output)
        return fully_shard(model, mesh=mesh)

    packed_loss.CHUNK_BYTES = 4 * 61 * 5  # five rows
    for hooked, bias in itertools.product((False, True), (False, True)):
        eager = small_models.model("llama").train()
        if bias:
            eager.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, 61))
        packed = copy.deepcopy(eager)
        hf_flash2.patch(packed, packed=True)
        losses = []
        for model in (sharded(eager, hooked), sharded(packed, hooked)):
            loss = model(**batch(rank)).loss
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
        # NOTE: against eager's as they are sharded, too: torch 2.8 adds gradients up where others take their mean.
        for (name, ours), theirs in zip(packed.named_parameters(), eager.parameters(), strict=True):
            close = torch.allclose(ours.grad.full_tensor(), theirs.grad.full_tensor(), rtol=1e-4, atol=2e-6)
            assert close, f"{name}, hooked {hooked}, bias {bias}"


def ddp(model):
    return DistributedDataParallel(model)


def fsdp1(model):
    """With units of the layers and of the base model."""
    units = partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer, LlamaModel})
    return FullyShardedDataParallel(model, auto_wrap_policy=units, device_id=torch.device("cpu"), use_orig_params=True)


def fsdp2(model):
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_accelerate_mixed_precision():
    """Patched before prepare, the loss in chunks runs under its autocast. Patched after, Transformers' own does, and the report says so."""
    eager = small_models.model("llama").train()
    before, after = copy.deepcopy(eager), copy.deepcopy(eager)
    reports = [hf_flash2.patch(before, packed=True)]
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    eager, before, after = (accelerator.prepare(model) for model in (eager, before, after))
    reports.append(hf_flash2.patch(after, packed=True))
    seen = []
    for model in (before, after):
        model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    inputs = ragged(0)
    expected = eager(**inputs).loss
    for model in (before, after):
        output = model(**inputs)
        torch.testing.assert_close(output.loss, expected, rtol=2e-2, atol=0)
        output.loss.backward()
    assert set(seen) == {torch.bfloat16}
    assert [report.forwards["packed"] for report in reports] == [1, 1]
    assert reports[0].losses == {"in chunks": 1} and reports[1].loss.startswith("not ours: accelerate wraps")
    hf_flash2.unpatch(before)  # what accelerate's wrapper still refers to runs as upstream
    assert before(**inputs).logits is not None


class Wrapper:
    def __call__(self, model, *args, **kwargs):
        return type(model).forward(model, *args, **kwargs)


def test_the_report_names_who_wraps_the_forward():
    """As TRL puts a function there that looks like the one that it wraps."""
    model = small_models.model("llama")
    model.forward = functools.update_wrapper(lambda *args, **kwargs: type(model).forward(model, *args, **kwargs), type(model).forward)
    assert model.forward.__module__.startswith("transformers.")
    assert hf_flash2.patch(model, packed=True).loss.startswith(f"not ours: {__name__} wraps the model's forward already")
    hf_flash2.unpatch(model)
    partial_forward = functools.partial(functools.partial(type(model).forward))
    for forward, name in (
        (functools.partial(partial_forward, model), "transformers"),
        (types.MethodType(partial_forward, model), "transformers"),
        (types.MethodType(Wrapper(), model), __name__),
    ):
        model.forward = forward
        assert f"not ours: {name} wraps" in hf_flash2.patch(model, packed=True).loss
        hf_flash2.unpatch(model)


def test_trainer(tmp_path):
    from transformers import Trainer, TrainingArguments

    eager = small_models.model("llama")
    model = copy.deepcopy(eager)
    report = hf_flash2.patch(model, packed=True)
    rows = [dict(zip(ragged(seed), values, strict=True)) for seed in range(3) for values in zip(*ragged(seed).values(), strict=True)]
    losses = []
    for each in (eager, model):
        arguments = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=4, max_steps=3, learning_rate=1e-2, logging_steps=1, report_to=[], use_cpu=True,
            save_strategy="no", disable_tqdm=True, seed=0,
        )  # fmt: skip
        trainer = Trainer(model=each, args=arguments, train_dataset=rows, eval_dataset=rows[:4])
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry] + [trainer.evaluate()["eval_loss"]])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    evaluated = "packed" if VERSION >= (5, 0) else "with a cache"  # Trainer of Transformers 5 evaluates with use_cache=False
    assert report.forwards == Counter(["packed"] * 3 + [evaluated])
    assert report.losses == {"in chunks": 3, "from logits": 1}


INVOCATION = 7  # a token


def adapted(config, rows: int, packed: bool):
    """A Llama with an adapter and its report, in training, and a right-padded batch whose rows have INVOCATION at different places."""
    model = small_models.model("llama")
    report = hf_flash2.patch(model, packed=packed)
    torch.manual_seed(1)
    model = get_peft_model(model, config).train()
    inputs = ragged(0) | {"attention_mask": (torch.arange(24) < torch.tensor([[12], [20], [9], [23]])).long()}
    inputs["input_ids"][torch.arange(4), torch.tensor([4, 9, 2, 15])] = INVOCATION
    inputs["labels"] = small_models.labels(inputs)
    return model, report, {name: x[:rows] for name, x in inputs.items()}


def loss_and_gradients(model, **inputs):
    torch.manual_seed(3)  # the router of Poly draws
    loss = model(**inputs).loss
    loss.backward()
    return {"loss": loss.detach()} | small_models.gradients(model)


ON_THE_HEAD = {"target_modules": ["q_proj", "lm_head"], "task_type": "CAUSAL_LM"}
LORA = ON_THE_HEAD | {"init_lora_weights": False}
POLY = ON_THE_HEAD | {"r": 4, "n_tasks": 3, "n_skills": 2, "n_splits": 1, "init_weights": False}
LOOKS_AT_ROWS = "with an adapter that looks at the rows of a batch"


@pytest.mark.parametrize(
    ("config", "rows", "more"),
    [
        (LoraConfig(**LORA | {"target_modules": ["q_proj"]}, alora_invocation_tokens=[INVOCATION]), 1, {}),
        (LoraConfig(**LORA | {"target_modules": ["q_proj"]}, alora_invocation_tokens=[INVOCATION]), 4, {}),
        (PolyConfig(**POLY), 4, {"task_ids": torch.tensor([0, 1, 2, 1])}),
    ],
    ids=["aLoRA, one row", "aLoRA", "Poly"],
)
def test_adapters_that_look_at_rows_see_the_padded_batch(config, rows, more):
    plain, packed = adapted(config, rows, packed=False), adapted(config, rows, packed=True)
    found, expected = (loss_and_gradients(model, **inputs, **more) for model, _, inputs in (packed, plain))
    small_models.assert_close(found, expected)
    assert packed[1].forwards == {LOOKS_AT_ROWS: 1}


def test_rows_with_an_adapter_each():
    """adapter_names, of the decoder and of its head; PEFT has it for evaluation alone."""
    logits = []
    for packed in (False, True):
        model, report, inputs = adapted(LoraConfig(**LORA), 4, packed)
        torch.manual_seed(2)
        model.add_adapter("b", LoraConfig(**LORA))
        real = inputs["attention_mask"].bool()
        names = ["default", "b", "__base__", "b"]
        with torch.no_grad():
            logits.append(model.eval()(**inputs, adapter_names=names, use_cache=False).logits[real])
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
    assert report.forwards == {LOOKS_AT_ROWS: 1}


def test_whose_hooks_look_at_rows():
    head, hidden = torch.nn.Linear(8, 5), {}
    hook = partial(lambda module, args, hidden: hidden.update(seen=args), hidden=hidden)
    assert not looks_at_rows(head)
    handle = head.register_forward_pre_hook(hook)
    assert not looks_at_rows(head)  # somebody's
    hook.func.__module__ = "peft.tuners.lora.model"
    assert looks_at_rows(head) and looks_at_rows(torch.nn.Sequential(head))
    handle.remove()
    assert not looks_at_rows(head)


@pytest.mark.parametrize("case", ["another adapter", "adapters off"])
def test_a_head_runs_again_with_the_adapter_it_had(case):
    """In the backward, when another may be active."""
    results = []
    for packed in (False, True):
        model, report, inputs = adapted(LoraConfig(**LORA), 4, packed)
        if case == "another adapter":
            torch.manual_seed(2)
            model.add_adapter("b", LoraConfig(**LORA))
            loss = model(**inputs).loss
            model.set_adapter("b")
            loss = loss + model(**inputs).loss
        else:
            model.requires_grad_(True)
            with model.disable_adapter():
                loss = model(**inputs).loss
        before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        loss.backward()
        assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before
        gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        results.append({"loss": loss.detach()} | gradients)
        assert model.active_adapters == ["b" if case == "another adapter" else "default"]
    assert report.forwards["packed"] and any("lm_head" in name for name in results[1])
    assert results[0].keys() == results[1].keys()
    small_models.assert_close(results[1], results[0])


def test_compiled_without_recompiling_for_every_batch():
    torch._dynamo.reset()
    eager, model = small_models.twins("llama")
    report = hf_flash2.patch(model.train(), packed=True)
    compiled = torch.compile(model, backend="aot_eager")
    graphs = []
    for seed in range(6):
        before = counters["stats"]["unique_graphs"]
        inputs = ragged(seed)
        loss = compiled(**inputs).loss
        loss.backward()
        torch.testing.assert_close(loss, eager.train()(**inputs).loss)
        graphs.append(counters["stats"]["unique_graphs"] - before)
    torch._dynamo.reset()
    assert graphs == [1, 1, 0, 0, 0, 0]  # one for the first number of tokens, one for any
    assert report.forwards == {"packed": 6} and report.losses == {"in chunks": 6}


def test_compiled_code_ends_only_where_ours_asks_the_host():
    """What is read from the source of a model is not traced: dozens of frames of inspect and ast were, with a warning."""
    torch._dynamo.reset()
    counters["graph_break"].clear()
    model = small_models.model("llama")
    hf_flash2.patch(model.train(), packed=True)
    torch.compile(model, backend="aot_eager")(**ragged(0)).loss.backward()
    torch._dynamo.reset()
    assert counters["graph_break"] and all("torch.compiler.disable" in reason for reason in counters["graph_break"])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_layers_that_are_compiled_one_by_one(family):
    """As accelerate's compile_regions does it; before the model is patched."""
    torch._dynamo.reset()
    eager, model = small_models.twins(family)
    layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    for i, layer in enumerate(layers):
        layers[i] = torch.compile(layer, backend="aot_eager")
    report = hf_flash2.patch(model.train(), packed=True)
    for seed in range(2):
        inputs = ragged(seed)
        torch.testing.assert_close(model(**inputs).loss, eager.train()(**inputs).loss)
    assert report.forwards == {"packed": 2}
    torch._dynamo.reset()


def test_compiled_with_other_arguments_from_batch_to_batch():
    """cu_seq_lens of one batch are no part of the next."""
    torch._dynamo.reset()
    eager, model = small_models.twins("llama")
    hf_flash2.patch(model.train(), packed=True)
    compiled = torch.compile(model, backend="aot_eager")
    rows = [{"input_ids": row[:length]} for row, length in zip(ragged(0)["input_ids"], (9, 15, 24), strict=False)]
    documents = hf_flash2.PackingCollator(24)(rows)
    whole = {name: documents[name] for name in ("input_ids", "labels")} | {"position_ids": torch.arange(24).repeat(2, 1)}
    whole["attention_mask"] = torch.ones_like(whole["input_ids"])
    for inputs in (documents, whole, documents):
        known_to_eager = {name: x for name, x in inputs.items() if name in whole}
        expected = eager.train()(**known_to_eager, use_cache=False).loss
        torch.testing.assert_close(compiled(**inputs, use_cache=False).loss, expected)
    torch._dynamo.reset()

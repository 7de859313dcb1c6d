"""`hf-flash2 bench train` on its tiny preset, which a CPU runs in seconds: arms, agreement, running out of memory, files, figures."""

import argparse
import contextlib
import csv
import dataclasses
import json
import re
import types

import pytest
import torch
import transformers
from transformers import masking_utils

from hf_flash2 import bench_profile, bench_shared, cli, notices
from hf_flash2 import bench_train as bench
from hf_flash2.bench_shared import write_csv

pytestmark = pytest.mark.timeout(120)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QUICK = ["--preset", "tiny", "--turns", "1", "--steps", "1", "--device", DEVICE]
ENVIRONMENT = {"gpu": "some GPU", "torch": "2.0", "date": "2026-01-01"}


def train(*argv: str) -> int:
    return cli.main(["bench", "train", *QUICK, *argv])


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args([*QUICK, *argv])


def make_training(gradient_checkpointing: bool = False) -> bench.Training:
    preset, device = bench.PRESETS["tiny"], torch.device(DEVICE)
    return bench.Training(bench.build(preset, device, gradient_checkpointing), bench.make_batch(preset, device))


def read(path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@contextlib.contextmanager
def arm_replaced(monkeypatch, arm: str, step):
    """Inside: this arm runs step(training, the real step) in place of its step."""
    real_switched, real_step, current = bench.switched, bench.Training.step, []

    @contextlib.contextmanager
    def switched(model, name):
        current.append(name)
        with real_switched(model, name):
            yield

    with monkeypatch.context() as patch:
        patch.setattr(bench, "switched", switched)
        patch.setattr(bench.Training, "step", lambda self: step(self, real_step) if current[-1:] == [arm] else real_step(self))
        yield


@pytest.mark.parametrize("checkpointing", ([], ["--gradient-checkpointing"]))
def test_every_arm_ends_with_the_same_loss_and_gradient(tmp_path, capsys, checkpointing):
    assert train("--csv", str(tmp_path / "new" / "t.csv"), *checkpointing) == 0
    lines = read(tmp_path / "new" / "t.csv")
    assert [line["arm"] for line in lines] == list(bench.ARMS)
    assert all(line["outcome"] == "ok" and float(line["tokens_per_second"]) > 0 for line in lines)
    assert all(line["real_tokens"] == "128" and line["batch"] == "4" and line["seqlen"] == "64" for line in lines)
    assert {line["gradient_checkpointing"] for line in lines} == {str(bool(checkpointing))}
    assert [bool(line["backend"]) for line in lines] == [False, False, True, True]
    assert {"gpu", "transformers", "torch", "date"} <= lines[0].keys()
    printed = capsys.readouterr().out
    assert "every loss and gradient agrees" in printed
    assert ("say nothing about a GPU" in printed) == (DEVICE == "cpu")


def test_a_model_that_sees_images(tmp_path, capsys):
    """Qwen2.5-VL: images of several sizes, which are no labels, and the tower is trained, too."""
    assert train("--preset", "tiny-vl", "--csv", str(tmp_path / "t.csv")) == 0
    lines = read(tmp_path / "t.csv")
    assert [(line["arm"], line["outcome"], line["real_tokens"]) for line in lines] == [(arm, "ok", "128") for arm in bench.ARMS]
    printed = capsys.readouterr().out
    assert "every loss and gradient agrees" in printed and "tiny-vl: Qwen2.5-VL shape of 0.2 M parameters" in printed
    preset, device = bench.PRESETS["tiny-vl"], torch.device(DEVICE)
    batch = bench.make_batch(preset, device)
    images, real = batch["input_ids"] == preset.image_token, batch["attention_mask"].bool()
    assert (images.sum(1) == batch["image_grid_thw"].prod(1) // 4).all() and len(set(images.sum(1).tolist())) > 1
    assert torch.equal(batch["labels"] != -100, real & ~images) and len(batch["pixel_values"]) == 4 * images.sum()
    training = bench.Training(bench.build(preset, device, False), batch)
    training.step()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in training.parameters if parameter.dim() > 1)
    with bench.switched(training.model, bench.PACKED):
        assert training.model(**batch, use_cache=False).logits is None


def test_images_that_see_all_of_themselves(tmp_path, capsys):
    """Gemma 3: in every arm, and no label is one of theirs."""
    if not hasattr(masking_utils, "blockwise_overlay"):
        pytest.skip("this Transformers has no masks of blocks")
    assert train("--preset", "tiny-gemma3", "--csv", str(tmp_path / "t.csv")) == 0
    assert [(line["arm"], line["outcome"]) for line in read(tmp_path / "t.csv")] == [(arm, "ok") for arm in bench.ARMS]
    printed = capsys.readouterr().out
    assert "every loss and gradient agrees" in printed and "tiny-gemma3: Gemma 3 shape of 0.1 M parameters" in printed
    preset, device = bench.PRESETS["tiny-gemma3"], torch.device(DEVICE)
    batch = bench.make_batch(preset, device)
    images, real = batch["input_ids"] == preset.image_token, batch["attention_mask"].bool()
    assert torch.equal(images, batch["token_type_ids"].bool()) and torch.equal(batch["labels"] != -100, real & ~images)
    with_one = [length >= 16 for length in preset.lengths]
    assert images.sum(1).tolist() == [16 * here for here in with_one] and len(batch["pixel_values"]) == sum(with_one) > 1
    training = bench.Training(bench.build(preset, device, False), batch)
    for arm, route in ((bench.NAME, "blocks"), (bench.PACKED, "blocks")):
        with bench.switched(training.model, arm), notices.record_calls() as calls:
            training.step()
        assert sum(of_layer.count(route) for of_layer in calls.values()) == preset.layers
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in training.parameters if parameter.dim() > 1)


@pytest.mark.skipif(not hasattr(masking_utils, "blockwise_overlay"), reason="this Transformers has no masks of blocks")
def test_the_preset_of_gemma_3_is_of_its_shape():
    preset = bench.PRESETS["gemma3-layers-images"]
    with torch.device("meta"):
        model = bench.build(preset, torch.device("meta"), False).model
    layers = model.language_model.layers
    assert {layer.self_attn.head_dim for layer in layers} == {256}
    assert [layer.self_attn.sliding_window for layer in layers] == [1024, 1024, 1024, 1024, 1024, None] * 2
    assert len(model.vision_tower.encoder.layers) == 27 and model.config.mm_tokens_per_image == 256


def test_compiled_arms(tmp_path, monkeypatch):
    """Each arm is compiled anew: its graph has its own attention, and says what it computed with the other arms."""
    graphs, compile_module = [], torch.nn.Module.compile

    def backend(graph, example_inputs):
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph

    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compile_module(module, backend=backend))
    assert train("--compile", "--turns", "2", "--arms", "sdpa", "hf_flash2", "--csv", str(tmp_path / "t.csv")) == 0
    attention = [[name for name in ("scaled_dot_product", "hf_flash2.flash_attn") if name in " ".join(targets)] for targets in graphs]
    assert [found for found in attention if found] == [["scaled_dot_product"], ["hf_flash2.flash_attn"]] * 2
    lines = read(tmp_path / "t.csv")
    assert [line["compiled"] for line in lines] == ["True", "True"]
    [row, _], _ = bench_shared.read_csv(tmp_path / "t.csv", bench.Row)
    assert ", compiled" in bench.tick({("tiny", "sdpa"): row}, "tiny", ["sdpa"])


def test_the_arms_run_what_they_are_called():
    training = make_training()
    seen = {}
    for arm in bench.ARMS:
        with bench.switched(training.model, arm):
            output = training.model(**training.batch, use_cache=False)
            seen[arm] = (training.model.config._attn_implementation, output.logits is None)
    assert seen == {
        "eager": ("eager", False),
        "sdpa": ("sdpa", False),
        "hf_flash2": ("hf_flash2", False),
        bench.PACKED: ("hf_flash2", True),
    }


def test_steps_leave_the_weights_alone_and_the_optimizer_works():
    training = make_training()
    before = [parameter.clone() for parameter in training.parameters]
    first = training.step()
    assert torch.equal(training.step(), first)
    assert all(torch.equal(parameter, copy) for parameter, copy in zip(training.parameters, before, strict=True))
    states = [training.optimizer.state[parameter] for parameter in training.parameters]
    assert all(state["exp_avg"].abs().sum() > 0 and state["step"] == 3 for state in states)  # 1 was to make the state
    training.forget()
    assert all(parameter.grad is None for parameter in training.parameters)


def test_running_out_of_memory_is_an_outcome(tmp_path, capsys, monkeypatch):
    """The arm is left out of the turns to come, the others go on without its gradients."""
    turns = []

    def out_of_memory(training, step):
        turns.append(1)
        step(training)
        raise torch.OutOfMemoryError("CUDA out of memory")

    with arm_replaced(monkeypatch, "eager", out_of_memory):
        pytest.importorskip("matplotlib")
        files = ["--csv", str(tmp_path / "t.csv"), "--plot", str(tmp_path / "t.png"), "--profile", str(tmp_path / "p.json")]
        assert train("--turns", "2", *files) == 0
    assert len(turns) == 1
    eager, *others = read(tmp_path / "t.csv")
    assert eager["outcome"] == "out of memory" and eager["tokens_per_second"] == eager["loss"] == ""
    assert all(line["outcome"] == "ok" and line["timed_steps"] == "2" for line in others)
    assert float(others[0]["loss_difference"]) == 0.0  # sdpa is what the others are compared with then
    assert "out of memory" in capsys.readouterr().out
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    steps = json.loads((tmp_path / "p.json").read_text())["steps"]
    assert [step["arm"] for step in steps] == list(bench.ARMS[1:]) and all(step["host_ms"] > 0 for step in steps)
    assert all((step["launches"] > 0) == (DEVICE == "cuda") for step in steps)


def test_running_out_of_memory_everywhere(tmp_path, capsys, monkeypatch):
    def out_of_memory(training, step):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(bench.Training, "step", lambda self: out_of_memory(self, None))
    monkeypatch.setattr(bench, "reason_no_figure", lambda: None)  # none is drawn
    assert train("--csv", str(tmp_path / "t.csv"), "--profile", str(tmp_path / "p.json")) == 1
    assert {line["outcome"] for line in read(tmp_path / "t.csv")} == {"out of memory"}
    assert "no arm ran" in capsys.readouterr().out
    assert not (tmp_path / "p.json").exists()


def test_an_arm_does_not_keep_what_it_leaves_behind(monkeypatch):
    """Also not when its step failed half way: gradients are gone, the model is as it was."""
    training = make_training()

    def fails(training, step):
        step(training)
        raise torch.OutOfMemoryError("CUDA out of memory")

    with arm_replaced(monkeypatch, bench.PACKED, fails):
        samples = bench.measure(training, parse("--arms", "sdpa", bench.PACKED))
    assert samples[bench.PACKED].outcome == bench.OUT_OF_MEMORY and samples["sdpa"].outcome == bench.OK
    assert all(parameter.grad is None for parameter in training.parameters)
    assert training.model.config._attn_implementation == "sdpa"
    assert not any("hf_flash2" in name for module in training.model.modules() for name in vars(module))


def test_an_arm_that_computes_something_else_is_found(capsys, monkeypatch):
    def scores_halved(training, step):
        layers = [layer.self_attn for layer in training.model.model.layers]
        for attention in layers:
            attention.scaling /= 2
        try:
            return step(training)
        finally:
            for attention in layers:
                attention.scaling *= 2

    with arm_replaced(monkeypatch, "hf_flash2", scores_halved):
        assert train() == 1
    assert re.search("tiny: the (loss|gradient) of hf_flash2 is", capsys.readouterr().out)


def test_statistics_are_of_real_tokens_and_against_the_first_arm_that_ran():
    batch = {"input_ids": torch.zeros(2, 8), "attention_mask": torch.arange(16).view(2, 8) < 10}
    training = types.SimpleNamespace(batch=batch, size=7, compiled=False)
    samples = {
        "eager": bench.Samples(outcome=bench.OUT_OF_MEMORY, seconds=[1.0], losses=[9.0], gradient_norm=9.0),
        "sdpa": bench.Samples(seconds=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], losses=[2.0, 4.0], gradient_norm=2.0, peak_bytes=3 * 2**30),
        "hf_flash2": bench.Samples(seconds=[0.5], losses=[3.5], gradient_norm=3.0, backend="reference"),
    }
    eager, sdpa, ours = bench.rows_of("tiny", training, parse(), samples)
    assert (eager.outcome, eager.tokens_per_second, eager.step_ms, eager.loss, eager.gradient_ratio) == ("out of memory", *[None] * 4)
    speeds = (sdpa.tokens_per_second_p20, sdpa.tokens_per_second, sdpa.tokens_per_second_p80)
    assert speeds == pytest.approx((10 / 5, 10 / 3.5, 10 / 2)) and sdpa.step_ms == pytest.approx(3500)
    assert (sdpa.loss, sdpa.loss_difference, sdpa.gradient_ratio, sdpa.peak_gib) == (3.0, 0.0, 1.0, 3.0)
    assert (ours.loss_difference, ours.gradient_ratio, ours.peak_gib, ours.backend) == (0.5, 1.5, None, "reference")
    assert (ours.batch, ours.seqlen, ours.real_tokens, ours.parameters, ours.timed_steps) == (2, 8, 10, 7, 1)


def test_a_profile_is_of_the_time_without_the_profiler(monkeypatch):
    training = make_training()
    monkeypatch.setattr(bench_profile, "profiled_step", lambda step, synchronize: [])
    samples = {"sdpa": bench.Samples(seconds=[1.0, 2.0, 6.0]), "eager": bench.Samples(outcome=bench.OUT_OF_MEMORY)}
    assert [(found.arm, found.step_ms) for found in bench.profile("tiny", training, samples)] == [("sdpa", 2000.0)]


def row(arm: str = "sdpa", **changes: object) -> bench.Row:
    plain = bench.Row(
        preset="1b-ragged", arm=arm, outcome="ok", tokens_per_second=1e4, tokens_per_second_p20=9e3, tokens_per_second_p80=1.1e4,
        step_ms=1.0, peak_gib=60.0, loss=12.0, loss_difference=0.0, gradient_norm=1.0, gradient_ratio=1.0, backend=None, batch=16,
        seqlen=2048, real_tokens=10000, parameters=10**9, gradient_checkpointing=False, timed_steps=12,
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, None),
        ({"loss_difference": 0.004, "gradient_ratio": 1.01}, None),
        ({"loss_difference": -0.006}, "loss"),
        ({"loss_difference": float("nan")}, "loss"),
        ({"gradient_ratio": 0.9}, "gradient"),
        ({"gradient_ratio": float("nan")}, "gradient"),
        ({"outcome": "out of memory", "loss_difference": None, "gradient_ratio": None}, None),
    ],
)
def test_disagreement(changes, found):
    reason = bench.disagreement(row(**changes))
    assert reason is None if found is None else f"the {found} of sdpa" in reason


def test_presets_have_the_shapes_they_are_named_after():
    ragged, layers, dense = (bench.PRESETS[name] for name in ("1b-ragged", "7b-layers-ragged", "1b-dense"))
    with torch.device("meta"):
        sizes = [sum(p.numel() for p in bench.build(preset, torch.device("meta"), False).parameters()) for preset in (ragged, layers)]
    assert sizes[0] == 1_235_814_400  # Llama 3.2 1B
    assert sizes[1] == 2 * 32000 * 4096 + 4 * 202_383_360 + 4096  # a layer of Llama 7B has 202 M
    assert (ragged.batch, ragged.seqlen, sum(ragged.lengths)) == (16, 2048, pytest.approx(0.33 * 16 * 2048, rel=1e-3))
    assert (layers.batch, layers.seqlen, sum(layers.lengths)) == (4, 8192, pytest.approx(0.29 * 4 * 8192, rel=1e-3))
    assert dense.lengths == (4096,) * 4


@pytest.mark.skipif("gemma4_text" not in transformers.CONFIG_MAPPING, reason="this Transformers has no Gemma 4")
def test_presets_of_gemma_4_have_its_head_dims():
    for name, tokens in (("gemma4-layers-ragged", 4 * 8192), ("gemma4-layers-dense", 16384)):
        preset = bench.PRESETS[name]
        with torch.device("meta"):
            layers = bench.build(preset, torch.device("meta"), False).model.layers
        assert [layer.self_attn.head_dim for layer in layers] == [256, 256, 256, 256, 256, 512] * 2
        assert [layer.self_attn.sliding_window for layer in layers] == [512, 512, 512, 512, 512, None] * 2
        assert preset.batch * preset.seqlen == tokens and sum(preset.lengths) == pytest.approx(preset.fill * tokens, rel=1e-3)


def test_a_gemma_4_is_refused_where_transformers_has_none(monkeypatch, capsys):
    monkeypatch.setattr("transformers.CONFIG_MAPPING", {})
    assert cli.main(["bench", "train", "--preset", "gemma4-layers-dense", "--device", DEVICE]) == 1
    assert "gemma4-layers-dense needs a Transformers with Gemma 4, found" in capsys.readouterr().err


def test_batch_is_padded_on_the_right_and_labels_are_the_real_tokens():
    preset = bench.PRESETS["tiny"]
    batch = bench.make_batch(preset, torch.device("cpu"))
    for tokens, mask, labels, length in zip(*batch.values(), preset.lengths, strict=True):
        assert mask.tolist() == [1] * length + [0] * (64 - length)
        assert torch.equal(labels[:length], tokens[:length]) and (labels[length:] == -100).all()


def test_plot_and_table(tmp_path):
    pytest.importorskip("matplotlib")
    failed = dict.fromkeys(
        ("tokens_per_second", "tokens_per_second_p20", "tokens_per_second_p80", "step_ms", "peak_gib", "loss", "loss_difference",
         "gradient_norm", "gradient_ratio")
    )  # fmt: skip
    rows = [row("eager", outcome="out of memory", **failed), row("sdpa"), row(bench.PACKED), row("sdpa", preset="1b-dense", peak_gib=None)]
    bench.plot(tmp_path / "t.png", rows, ENVIRONMENT)
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert bench.format_row(rows[0]).split() == ["eager", "out", "of", "memory"]
    assert bench.tick({("1b-ragged", "sdpa"): rows[1]}, "1b-ragged", bench.ARMS) == "1b-ragged\n16 x 2048, 69% padding"
    assert bench.format_row(rows[1]).split()[:5] == ["sdpa", "10,000", "(9,000-11,000)", "1.0", "60.0"]


def test_a_csv_is_drawn_again(tmp_path, capsys, monkeypatch):
    """With what was not measured, too."""
    plots = []
    monkeypatch.setattr(bench, "plot", lambda path, rows, environment: plots.append((path, rows, environment)))
    rows = [row("eager", outcome="out of memory", step_ms=None, backend=None), row("sdpa"), row(bench.PACKED)]
    write_csv(tmp_path / "t.csv", bench.Row, rows, ENVIRONMENT)
    assert train("--from-csv", str(tmp_path / "t.csv"), "--plot", str(tmp_path / "t.png")) == 0
    assert plots == [(tmp_path / "t.png", rows, ENVIRONMENT)]
    assert capsys.readouterr().out == f"wrote {tmp_path / 't.png'}\n"
    assert train("--from-csv", str(tmp_path / "other.csv"), "--plot", str(tmp_path / "t.png")) == 2
    assert capsys.readouterr().out == "" and len(plots) == 1


def test_a_csv_of_other_arms_is_refused(tmp_path, capsys):
    write_csv(tmp_path / "t.csv", bench.Row, [row("sdpa"), row("other")], ENVIRONMENT)
    assert train("--from-csv", str(tmp_path / "t.csv"), "--plot", str(tmp_path / "t.png")) == 2
    said = capsys.readouterr().err
    assert "its arms must be among eager, sdpa" in said and "got other" in said and not (tmp_path / "t.png").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused(capsys):
    assert train("--device", "cuda") == 1
    assert "there is no CUDA GPU" in capsys.readouterr().err

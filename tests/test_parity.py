"""parity.py: good attention passes, and attention that is broken on purpose does not."""

import argparse
import inspect
import json

import pytest
import torch

from hf_flash2 import interface, parity

pytestmark = pytest.mark.timeout(300)


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    parity.add_arguments(parser)
    return parity.run(parser.parse_args(argv))


@pytest.mark.parametrize("padding", parity.PADDINGS)
@pytest.mark.parametrize("model", parity.CONFIGS)
def test_every_model_and_padding(model, padding, device, record_errors):
    result = parity.measure(model, torch.bfloat16, padding, str(device))
    assert result.problems == []
    assert result.verdict == "within eager's own rounding"
    assert result.routes == [{"none": "dense", "documents": "documents"}.get(padding, "padded")] * parity.LAYERS
    record_errors({"logits": result.logits.ratio, "gradients": result.gradients[result.worst_gradient].ratio})


def test_a_seed_repeats_the_answer_and_leaves_nothing_behind(device):
    first, second = (parity.measure("gpt2", torch.bfloat16, "left", str(device), seqlen=32, seed=3) for _ in range(2))
    assert first.logits.eager_max == second.logits.eager_max and torch.get_default_dtype() == torch.float32


def test_both_are_held_against_the_same_model_in_float64(device, monkeypatch):
    runs, results = [], parity.logits_and_gradients

    def recorded(model, *args):
        runs.append((model.dtype, model.config._attn_implementation))
        return results(model, *args)

    monkeypatch.setattr(parity, "logits_and_gradients", recorded)
    parity.measure("llama", torch.bfloat16, "none", str(device), seqlen=32)
    assert runs == [(torch.float64, "sdpa"), (torch.bfloat16, "eager"), (torch.bfloat16, "hf_flash2")]


def errors(eager: float, ours: float) -> parity.Errors:
    return parity.Errors(eager, eager, ours, ours)


def test_the_ratio_of_errors():
    assert [errors(*pair).ratio for pair in ((0.0, 0.0), (0.0, 1e-3), (2.0, 3.0))] == [1.0, float("inf"), 1.5]


def test_the_largest_and_the_mean_error_and_their_line():
    found = parity.compare(torch.zeros(2), torch.tensor([0.0, -1.0]), torch.tensor([3.0, 0.0]))
    assert found == parity.Errors(1.0, 0.5, 3.0, 1.5)
    gradients = {"model.norm": errors(2.0, 5.0)}
    result = parity.Parity("llama", "bfloat16", "none", "cpu", "cpu-reference", ["dense"] * parity.LAYERS, found, gradients)
    line = ["llama", "none", "1.00e+00", "(5.00e-01)", "3.00e+00", "(1.50e+00)", "3.00", "2.50", "norm", *result.verdict.split()]
    assert parity.format_line(result).split() == line


NAN = float("nan")


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ({}, None),
        ({"routes": ["dense"]}, "called hf_flash2 1 times"),
        ({"logits": errors(1.0, 2.0)}, None),
        ({"logits": errors(1.0, 2.1)}, "logits are 2.1"),
        ({"logits": errors(1.0, NAN)}, "logits are nan"),
        ({"gradients": {"a": errors(1.0, 3.0)}}, None),
        ({"gradients": {"a": errors(1.0, 1.0), "b": errors(1.0, 3.1)}}, "gradient of b is 3.1"),
        ({"gradients": {"a": errors(1.0, 1.0), "b": errors(1.0, NAN), "c": errors(1.0, 9.0)}}, "gradient of b is nan"),
        ({"gradients": {"a": errors(1.0, NAN), "b": errors(1.0, 1.0)}}, "gradient of a is nan"),
    ],
)
def test_what_is_not_normal(found, problem):
    values = {"model": "llama", "dtype": "bfloat16", "padding": "none", "device": "cpu", "backend": "cpu-reference"}
    values |= {"routes": ["dense"] * parity.LAYERS, "logits": errors(1.0, 1.0), "gradients": {"a": errors(1.0, 1.0)}}
    problems = parity.Parity(**values | found).problems
    assert problems == [] if problem is None else len(problems) == 1 and problem in problems[0]


def breaking(monkeypatch, name: str, **changes) -> None:
    """Make interface.py call flash_attn_<name>_func with some arguments changed, each by a function of the argument."""
    function = getattr(interface, name)
    signature = inspect.signature(function)

    def broken(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        bound.arguments |= {name: change(bound.arguments[name]) for name, change in changes.items()}
        return function(*bound.args, **bound.kwargs)

    monkeypatch.setattr(interface, name, broken)


def lost(_):
    return None


BREAKS = {
    "causal lost": ("llama", "none", "flash_attn_func", {"causal": lambda _: False, "window_size": lambda w: (w[0], -1)}),
    "mask dropped": ("llama", "left", "flash_attn_ranges_func", dict.fromkeys(("ranges_q", "ranges_k", "key_mask"), lost)),
    "holes filled": ("gpt2", "holes", "flash_attn_ranges_func", {"key_mask": torch.ones_like}),
    "window one too wide": ("mistral", "none", "flash_attn_func", {"window_size": lambda w: (w[0] + 1, w[1])}),
    "window one too narrow": ("mistral", "right", "flash_attn_ranges_func", {"window_size": lambda w: (w[0] - 1, w[1])}),
    "scale lost": ("gpt2", "none", "flash_attn_func", {"softmax_scale": lambda _: 1.0}),
    "key heads swapped": ("llama", "none", "flash_attn_func", {"k": lambda k: k.flip(2)}),
    "documents merged": (
        "llama",
        "documents",
        "flash_attn_varlen_func",
        {
            "cu_seqlens_q": lambda c: c[[0, -1]],
            "cu_seqlens_k": lambda c: c[[0, -1]],
            "max_seqlen_q": lambda _: 4096,
            "max_seqlen_k": lambda _: 4096,
        },
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_broken_attention_is_noticed(name, device, monkeypatch):
    model, padding, function, changes = BREAKS[name]
    breaking(monkeypatch, function, **changes)
    result = parity.measure(model, torch.bfloat16, padding, str(device))
    assert result.problems and result.verdict == "NOT within eager's own rounding"
    assert result.logits.ratio > 3, "the logits alone show it"


def test_wrong_gradients_are_noticed(device, monkeypatch):
    """The forward is right, dk is half as large again."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 1.5

    breaking(monkeypatch, "flash_attn_func", k=Scaled.apply)
    result = parity.measure("llama", torch.float16, "none", str(device))
    assert result.logits.ratio <= parity.ALLOWED_LOGITS
    assert any("gradient" in problem for problem in result.problems)


def test_attention_that_did_not_run_is_noticed(device, monkeypatch):
    monkeypatch.setattr(interface, "_reason_for_sdpa", lambda *_: "a reason")
    result = parity.measure("llama", torch.bfloat16, "none", str(device))
    assert any("handed to SDPA" in problem for problem in result.problems)


def test_command_line(capsys):
    assert run("--model", "gpt2", "--padding", "left", "--device", "cpu", "--seqlen", "40", "--json") == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["ok"] and result["verdict"] == "within eager's own rounding" and result["backend"] == "cpu-reference"
    assert result["ratio_logits"] == pytest.approx(result["logits"]["ours_max"] / result["logits"]["eager_max"])
    assert "transformer.h.0.attn.c_attn.weight" in result["gradients"]


def test_the_seed_of_the_command_line_counts(capsys):
    found = []
    for seed in ("0", "3"):
        run("--padding", "none", "--device", "cpu", "--seqlen", "32", "--seed", seed, "--json")
        found += json.loads(capsys.readouterr().out)
    assert found[0]["logits"] != found[1]["logits"]


def test_the_exit_code_is_1_for_a_difference_that_is_not_normal(capsys, monkeypatch):
    breaking(monkeypatch, "flash_attn_ranges_func", key_mask=lost, ranges_q=lost, ranges_k=lost)
    assert run("--model", "gpt2", "--padding", "left", "--device", "cpu", "--seqlen", "40") == 1
    out = capsys.readouterr().out
    assert "gpt2, left: logits are" in out and "does not explain" in out


@pytest.mark.parametrize(
    "device",
    [pytest.param("cuda", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")), "cuda:99", "cuda:200"],
)
def test_a_device_that_is_not_there(device, capsys):
    """torch makes cuda:-56 of cuda:200, and cuda:0 of cuda:256."""
    assert run("--device", device) == 1
    assert f"device {device} is not there; use --device cpu" in capsys.readouterr().err

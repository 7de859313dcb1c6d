"""The examples: their data, and each of them run as a user would run it, with tiny settings on a CPU."""

import ast
import csv
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import VERSION

import distributed
import finetune_lora
import generate
import long_context
import patch_existing_model
import stdlib_data
from stdlib_data import END_ID, IGNORED, PAD_ID, Example, collate, load_corpus, load_tokenizer, padding_share, tokenize

FAMILIES = ("llama", "mistral", "gpt2")
FINE_TUNE = ["--device", "cpu", "--max-length", "96", "--steps", "6", "--base-steps", "4", "--new-tokens", "20"]


@pytest.fixture(autouse=True)
def surroundings(tmp_path_factory, monkeypatch):
    """The examples write to ./outputs: one folder for the session, so that a tokenizer is trained once."""
    monkeypatch.chdir(tmp_path_factory.getbasetemp())
    monkeypatch.setattr(finetune_lora, "quiet_libraries", lambda: None)  # its log levels would stay for the other tests


def losses(folder: Path) -> dict[str, list[float]]:
    with (folder / "losses.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in rows[0] if name != "step"}


@pytest.mark.parametrize(
    "example", [distributed, finetune_lora, generate, long_context, patch_existing_model], ids=lambda module: module.__name__
)
def test_help_shows_no_default_that_is_none(example, capsys):
    with pytest.raises(SystemExit):
        example.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "usage: " in text and "(default: None)" not in text


# ---------------------------------------------------------------------------------------------------------------------------- data


def test_pairs_are_documented_functions():
    corpus = load_corpus()
    assert len(corpus.train) > 4000
    for pair in corpus.train + corpus.evaluation:
        [function] = ast.parse(pair.prompt + pair.completion).body
        assert ast.get_docstring(function)
        with pytest.raises(SyntaxError):  # a body alone does not parse at the top level, so that the cut is behind the docstring
            ast.parse(pair.completion)
        [documented] = ast.parse(pair.prompt).body
        assert len(documented.body) == 1


def test_form_feeds_do_not_shift_the_cut(tmp_path):
    """Older standard libraries have them between classes; Python counts lines by newlines only."""
    (tmp_path / "old.py").write_text('x = 1\n\f\ndef f(a):\n    """Text."""\n    return a\n')
    assert list(stdlib_data._pairs_of_file(tmp_path / "old.py", Path("old.py"))) == [
        stdlib_data.Pair('def f(a):\n    """Text."""\n', "    return a\n", "old.py:3")
    ]


def test_split_is_disjoint_and_the_same_in_every_process():
    corpus = load_corpus()
    texts = [{pair.prompt + pair.completion for pair in pairs} for pairs in (corpus.train, corpus.evaluation)]
    assert not texts[0] & texts[1]
    assert 0.03 < len(texts[1]) / len(texts[0] | texts[1]) < 0.07
    other = subprocess.run(
        [sys.executable, "-c", "import stdlib_data; print(stdlib_data.load_corpus())"],
        cwd=Path(stdlib_data.__file__).parent,
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == str(corpus)


@pytest.mark.parametrize(("vocab_size", "max_length"), [(2048, 768), (8192, 1024)])  # the demo's settings on a CPU and on a GPU
def test_batches_are_about_70_percent_padding(vocab_size, max_length):
    corpus = load_corpus()
    examples = tokenize(corpus.train, load_tokenizer(corpus, vocab_size), max_length)
    assert 0.65 < padding_share(examples, batch_size=16) < 0.77


def test_tokenizer_gives_the_text_back():
    corpus = load_corpus()
    tokenizer = load_tokenizer(corpus, 2048)
    pair = corpus.evaluation[0]
    [example] = tokenize([pair], tokenizer, 4096)
    assert example.ids[-1] == END_ID
    assert tokenizer.decode(example.ids[: example.prompt_length]) == pair.prompt
    assert tokenizer.decode(example.ids[example.prompt_length :], skip_special_tokens=True) == pair.completion


def test_collate_pads_on_the_right_and_learns_the_completion_only():
    batch = collate([Example([5, 6, 7], 1), Example([8, 9, 10, 11, 12], 3)])
    assert batch["input_ids"].tolist() == [[5, 6, 7, PAD_ID, PAD_ID], [8, 9, 10, 11, 12]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch["labels"].tolist() == [[IGNORED, 6, 7, IGNORED, IGNORED], [IGNORED, IGNORED, IGNORED, 11, 12]]


# ------------------------------------------------------------------------------------------------------------------------ fine-tune


@pytest.mark.parametrize(("model_type", "how"), [("llama", "flag"), ("llama", "patch"), ("mistral", "patch"), ("gpt2", "flag")])
def test_fine_tune_learns_and_follows_eager(model_type, how, tmp_path, capsys):
    finetune_lora.main([*FINE_TUNE, "--model-type", model_type, "--how", how, "--batch-size", "4", "--output-dir", str(tmp_path)])
    printed = capsys.readouterr().out
    curves = losses(tmp_path)
    assert curves["hf_flash2"] == pytest.approx(curves["eager"], abs=1e-4)
    record = json.loads((tmp_path / "run.json").read_text())
    eager, ours = record["runs"]
    assert ours["backend"] == "cpu-reference" and eager["backend"] is None
    assert ours["evaluation_after"] < ours["evaluation_before"] - 0.2
    assert ours["tokens_per_second"] > 0
    assert ours["completion"] == eager["completion"] != ""
    assert (tmp_path / "loss_curves.png").stat().st_size > 10_000
    assert (tmp_path / "adapter-hf_flash2" / "adapter_model.safetensors").is_file()
    assert "within eager's own rounding" in printed
    assert ("2 of 2 attention layers run on hf_flash2" in printed) == (how == "patch")


def test_a_base_model_is_there_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    """Whoever interrupts it while it is saved finds another one made, not half of one loaded."""

    def interrupted(self, folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(finetune_lora.PreTrainedModel, "save_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        finetune_lora.main([*FINE_TUNE, "--base-steps", "1", "--output-dir", str(tmp_path)])
    assert [folder.suffix for folder in tmp_path.glob("base-*")] == [".unfinished"]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_packed_fine_tune_follows_eager(model_type, tmp_path, capsys):
    packed = finetune_lora.PACKED
    finetune_lora.main(
        [*FINE_TUNE, "--model-type", model_type, "--implementation", "eager", packed, "--batch-size", "4", "--output-dir", str(tmp_path)]
    )
    curves = losses(tmp_path)
    assert curves[packed] == pytest.approx(curves["eager"], abs=1e-4)
    assert "  loss      in chunks, without logits" in capsys.readouterr().out
    eager, ours = json.loads((tmp_path / "run.json").read_text())["runs"]
    assert ours["evaluation_after"] == pytest.approx(eager["evaluation_after"], abs=1e-4)
    assert ours["completion"] == eager["completion"] != ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="accelerate gives each process a GPU of its own where there is one")
def test_two_processes_train_as_one(tmp_path):
    """Half the batch in each of two processes gives the losses of one, with gradient checkpointing too."""
    fine_tune = [*FINE_TUNE, "--implementation", "hf_flash2"]
    finetune_lora.main([*fine_tune, "--batch-size", "8", "--output-dir", str(tmp_path / "one")])
    in_two_processes(fine_tune_as, [*fine_tune, "--batch-size", "4", "--gradient-checkpointing", "--output-dir", str(tmp_path / "two")])
    assert json.loads((tmp_path / "two" / "run.json").read_text())["processes"] == 2
    assert losses(tmp_path / "two")["hf_flash2"] == pytest.approx(losses(tmp_path / "one")["hf_flash2"], abs=1e-4)


def fine_tune_as(rank: int, port: int, arguments: list[str]) -> None:
    join(rank, port)
    finetune_lora.main(arguments)


def in_two_processes(function, *arguments: object) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(function, (port, *arguments), nprocs=2)


def join(rank: int, port: int) -> None:
    """Become one of two processes, as `torchrun` and `accelerate launch` start them."""
    import conftest  # noqa: F401 - hf_flash2 from a bare checkout

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="each process takes a GPU of its own where there is one")
def test_distributed_trains_alike_with_every_strategy_and_arm(tmp_path):
    arguments = ["--size", "tiny", "--batch-size", "2", "--max-length", "48", "--steps", "2", "--csv", str(tmp_path / "figures.csv")]
    in_two_processes(run_as, distributed.main, arguments)
    with (tmp_path / "figures.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["strategy"], row["arm"]) for row in rows] == [(s, arm) for s in distributed.STRATEGIES for arm in distributed.ARMS]
    assert all(float(row["loss"]) == pytest.approx(float(rows[0]["loss"]), abs=2e-4) for row in rows)
    assert all(float(row["real_tokens_per_s"]) > 0 for row in rows)


def run_as(rank: int, port: int, main: Callable, arguments: list[str]) -> None:
    join(rank, port)
    main(arguments)
    os._exit(0)  # gloo's threads can abort the interpreter's shutdown, after everything has been written: see tests/ranks.py


@pytest.mark.skipif(torch.cuda.is_available(), reason="each process takes a GPU of its own where there is one")
@pytest.mark.parametrize("documents", ["1", "5"])
def test_long_context_has_the_loss_of_the_whole_row(documents, tmp_path):
    arguments = ["--size", "tiny", "--seqlen", "64", "--steps", "1", "--documents", documents, "--csv", str(tmp_path / "figures.csv")]
    in_two_processes(run_as, long_context.main, arguments)
    with (tmp_path / "figures.csv").open() as file:
        [row] = csv.DictReader(file)
    assert row["arm"] == "hf_flash2" and float(row["tokens_per_s"]) > 0 and 7 < float(row["loss"]) < 9


# -------------------------------------------------------------------------------------------------------------------- patch, generate


@pytest.mark.parametrize("model_type", FAMILIES)
def test_patch_existing_model(model_type, capsys):
    patch_existing_model.main(["--model-type", model_type, "--batch-size", "2"])
    printed = capsys.readouterr().out
    assert "2 of 2 attention layers run on hf_flash2" in printed
    assert "within eager's own rounding" in printed
    assert "bit for bit" in printed


@pytest.mark.parametrize("model_type", FAMILIES)
def test_generate_gives_eagers_tokens(model_type, capsys):
    generate.main(["--model-type", model_type, "--device", "cpu", "--batch-size", "3", "--new-tokens", "6"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("hf_flash2 ") and "tokens/s" in line]
    assert len(lines) == 2  # dynamic and static cache
    assert all("18 of 18 tokens are eager's" in line for line in lines)


@pytest.mark.skipif(VERSION < (5, 0), reason="continuous batching accepts no other implementations before Transformers 5")
@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, continuous batching runs on it")
def test_continuous_generation_gives_eagers_tokens(capsys):
    generate.main(["--model-type", "llama", "--device", "cpu", "--batch-size", "3", "--new-tokens", "6", "--continuous"])
    lines = [line for line in capsys.readouterr().out.splitlines() if " paged " in line]
    assert [line.split()[0] for line in lines] == ["sdpa", "hf_flash2"]
    assert all("18 of 18 tokens are eager's" in line for line in lines)


def test_generation_in_half_precision_is_held_against_eager(capsys, monkeypatch):
    arguments = ["--model-type", "llama", "--device", "cpu", "--batch-size", "3", "--new-tokens", "6", "--dtype", "bfloat16"]
    generate.main(arguments)
    lines = [line for line in capsys.readouterr().out.splitlines() if " cache " in line]
    assert len(lines) == 6 and all(line.endswith("18 of 18 tokens are eager's, up to rounding") for line in lines)
    generated = generate.generate
    monkeypatch.setattr(generate, "generate", lambda *args: (generated(*args)[0].roll(1, 1), 1.0))  # each token a step late
    with pytest.raises(SystemExit, match="does not generate eager's tokens"):
        generate.main(arguments)


# ------------------------------------------------------------------------------------------------------------------------- wrong usage


def test_what_is_given_counts_beside_demo():
    chosen = finetune_lora.parse_args(["--demo", "--device", "cpu", "--steps", "1", "--size", "small"])
    assert (chosen.steps, chosen.size, chosen.max_length, chosen.base_steps) == (1, "small", 768, 50)
    assert chosen.implementation == list(finetune_lora.IMPLEMENTATIONS)
    assert finetune_lora.parse_args(["--device", "cpu"]).max_length == 1024


@pytest.mark.parametrize(
    ("example", "argv", "said"),
    [
        (finetune_lora, ["--steps", "0"], "--steps: must be a number from 1 on, got '0'"),
        (finetune_lora, ["--max-length", "2"], "--max-length: must be a number from 16 on, got '2'"),
        (finetune_lora, ["--seed", "4294967296"], "--seed: must be a number from 0 to 4294967295, got '4294967296'"),
        (finetune_lora, ["--learning-rate", "nan"], "--learning-rate: must be a number above 0, got 'nan'"),
        (finetune_lora, ["--output-dir", "/dev/null/x"], "--output-dir: [Errno 20] Not a directory: '/dev/null/x'"),
        (generate, ["--batch-size", "0"], "--batch-size: must be a number from 1 on, got '0'"),
        (patch_existing_model, ["--device", "cuda"], "--device: torch sees no GPU on this machine"),
        (distributed, ["--csv", "/dev/null/figures.csv"], "--csv: /dev/null/figures.csv cannot be written: /dev/null is no folder"),
        (long_context, ["--arms", "eager"], "--arms: invalid choice: 'eager'"),
        (long_context, ["--arms", "sdpa"], "--arms: torch's sdpa shares sequences on GPUs alone"),
        (distributed, [], "torchrun has to start its processes"),
        (long_context, [], "torchrun has to start its processes"),
    ],
)
def test_wrong_usage_is_said(example, argv, said, capsys, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as caught:
        example.main(argv)
    assert caught.value.code == 2 and said in capsys.readouterr().err

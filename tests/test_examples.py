"""The examples: their data, and each of them run as a user would run it, with tiny settings on a CPU."""

import ast
import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import generate
import patch_existing_model
import stdlib_data
from stdlib_data import END_ID, IGNORED, PAD_ID, Example, collate, load_corpus, load_tokenizer, padding_share, tokenize

EXAMPLES = Path(stdlib_data.__file__).parent
FAMILIES = ("llama", "mistral", "gpt2")
FINE_TUNE = [str(EXAMPLES / "finetune_lora.py"), "--device", "cpu", "--implementation", "eager", "hf_flash2"]
FINE_TUNE += ["--max-length", "96", "--steps", "6", "--base-steps", "4", "--new-tokens", "20"]


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path_factory, monkeypatch):
    """The examples write to ./outputs; one folder for the session, so that a tokenizer is trained once."""
    monkeypatch.chdir(tmp_path_factory.getbasetemp())


def run(launcher: list[str], *arguments: str) -> str:
    """What a command prints; its errors are the test's."""
    paths = [str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *launcher, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def losses(folder: Path) -> dict[str, list[float]]:
    with (folder / "losses.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in rows[0] if name != "step"}


# ---------------------------------------------------------------------------------------------------------------------------- data


def test_pairs_are_documented_functions():
    corpus = load_corpus()
    assert len(corpus.train) > 4000
    for pair in corpus.evaluation:
        [function] = ast.parse(pair.prompt + pair.completion).body
        assert ast.get_docstring(function)
        with pytest.raises(SyntaxError):  # a body alone does not parse at the top level, so that the cut is behind the docstring
            ast.parse(pair.completion)
        [documented] = ast.parse(pair.prompt).body
        assert len(documented.body) == 1


def test_split_is_disjoint_and_the_same_in_every_process():
    corpus = load_corpus()
    texts = [{pair.prompt + pair.completion for pair in pairs} for pairs in (corpus.train, corpus.evaluation)]
    assert not texts[0] & texts[1]
    assert 0.03 < len(texts[1]) / len(texts[0] | texts[1]) < 0.07
    code = "import stdlib_data; print(stdlib_data.load_corpus())"
    assert run(["-c", f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); {code}"]).strip() == str(corpus)


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


@pytest.mark.parametrize("how", ["flag", "patch"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_fine_tune_learns_and_follows_eager(model_type, how, tmp_path):
    printed = run(FINE_TUNE, "--model-type", model_type, "--how", how, "--batch-size", "4", "--output-dir", str(tmp_path))
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


def test_two_processes_train_as_one(tmp_path):
    """Half the batch in each of two processes: the same losses, with and without gradient checkpointing."""
    run(FINE_TUNE, "--batch-size", "8", "--output-dir", str(tmp_path / "one"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    run([*launcher, *FINE_TUNE], "--batch-size", "4", "--gradient-checkpointing", "--output-dir", str(tmp_path / "two"))
    assert json.loads((tmp_path / "two" / "run.json").read_text())["processes"] == 2
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    for name in one:
        assert two[name] == pytest.approx(one[name], abs=1e-4)


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
    assert all("3 of 3 sequences are eager's" in line for line in lines)

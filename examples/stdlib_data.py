"""Real text on every machine: docstring -> code pairs from Python's own standard library, a tokenizer trained on them, ragged batches.

Every function of the standard library that has a docstring becomes one pair: the prompt is its signature and docstring, the completion is
its body. Nothing is downloaded (the sources come with Python, under the PSF licence). The pairs differ a little between Python versions,
so `Corpus.fingerprint` names the text that a run really used.
"""

import ast
import functools
import hashlib
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, END = "<pad>", "<end>"  # token ids 0 and 1
PAD_ID, END_ID = 0, 1
OUTPUTS = Path("outputs")  # what the examples keep between runs
IGNORED = -100  # a label that the loss skips
_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


@dataclass(frozen=True, slots=True)
class Pair:
    """One function of the standard library, in source order: prompt + completion is valid Python."""

    prompt: str  # signature and docstring
    completion: str  # the body behind the docstring
    where: str  # file and line, such as "textwrap.py:381"


@dataclass(frozen=True, slots=True)
class Corpus:
    """The pairs, split by a hash of their text: the split does not depend on their number or order."""

    train: list[Pair]
    evaluation: list[Pair]
    fingerprint: str  # of all text, and so of the split

    def __str__(self) -> str:
        return f"{len(self.train)} training and {len(self.evaluation)} evaluation pairs, fingerprint {self.fingerprint}"


@dataclass(frozen=True, slots=True)
class Example:
    """A tokenized pair. The first `prompt_length` of the ids are the prompt, the last id is END."""

    ids: list[int]
    prompt_length: int


@functools.cache
def load_corpus() -> Corpus:
    """All pairs of the running Python's standard library, about 5 % of them (by hash) for evaluation."""
    pairs = {pair.prompt + pair.completion: pair for pair in _stdlib_pairs()}
    if not pairs:
        raise RuntimeError(f"no Python sources under {_stdlib_folder()}; install the standard library's .py files")
    train, evaluation = [], []
    fingerprint = hashlib.sha256()
    for text in sorted(pairs):
        digest = hashlib.sha256(text.encode()).digest()
        fingerprint.update(digest)
        (evaluation if digest[0] < 0.05 * 256 else train).append(pairs[text])
    return Corpus(train, evaluation, fingerprint.hexdigest()[:12])


def load_tokenizer(corpus: Corpus, vocab_size: int, folder: Path = OUTPUTS) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on the training pairs, kept in `folder` so that the next run finds it."""
    path = folder / f"tokenizer-{vocab_size}-{corpus.fingerprint}.json"
    if not path.is_file():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[PAD, END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator((pair.prompt + pair.completion for pair in corpus.train), trainer)
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(path))
    return PreTrainedTokenizerFast(tokenizer_file=str(path), pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False)


def tokenize(pairs: list[Pair], tokenizer: PreTrainedTokenizerFast, max_length: int) -> list[Example]:
    """Pairs as token ids, cut at max_length. A pair whose prompt leaves no room for a completion is dropped."""
    prompts = tokenizer([pair.prompt for pair in pairs])["input_ids"]
    completions = tokenizer([pair.completion for pair in pairs])["input_ids"]
    examples = []
    for prompt, completion in zip(prompts, completions, strict=True):
        if len(prompt) < max_length:
            examples.append(Example([*prompt, *completion, END_ID][:max_length], len(prompt)))
    return examples


def prompts_only(examples: list[Example]) -> list[Example]:
    """Signature and docstring as text to learn: what the base model of the fine-tune is trained on."""
    return [Example(example.ids[: example.prompt_length], 0) for example in examples]


def collate(examples: list[Example]) -> dict[str, torch.Tensor]:
    """A right-padded batch: input_ids, attention_mask and labels (the completions), each int64 [B, longest]."""
    longest = max(len(example.ids) for example in examples)
    batch = {
        "input_ids": torch.full((len(examples), longest), PAD_ID),
        "attention_mask": torch.zeros((len(examples), longest), dtype=torch.int64),
        "labels": torch.full((len(examples), longest), IGNORED),
    }
    for row, example in enumerate(examples):
        ids, length = torch.tensor(example.ids), len(example.ids)
        batch["input_ids"][row, :length] = ids
        batch["attention_mask"][row, :length] = 1
        batch["labels"][row, example.prompt_length : length] = ids[example.prompt_length :]
    return batch


def padding_share(examples: list[Example], batch_size: int, seed: int = 0) -> float:
    """The share of padding in the batches of one shuffled epoch."""
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed)).tolist()
    lengths = [len(examples[i].ids) for i in order]
    batches = [lengths[i : i + batch_size] for i in range(0, len(lengths), batch_size)]
    return 1 - sum(lengths) / sum(max(batch) * len(batch) for batch in batches)


def _stdlib_folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _stdlib_pairs() -> Iterator[Pair]:
    root = _stdlib_folder()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED_FOLDERS.isdisjoint(relative.parts[:-1]):
            yield from _pairs_of_file(path, relative)


def _lines(text: str) -> list[str]:
    """As the parser counts them: str.splitlines also splits at form feeds, which some modules have between their parts."""
    return [line for line in re.split(r"(?<=\n)", text) if line]


def _pairs_of_file(path: Path, name: Path) -> Iterator[Pair]:
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in old modules
            tree = ast.parse(source)
    except (SyntaxError, ValueError, OSError):  # files kept in the library to be broken, or in other encodings
        return
    lines = _lines(source)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or ast.get_docstring(node) is None or len(node.body) < 2:
            continue
        docstring, first = node.body[0], node.body[1]
        function = _lines(textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])))
        if first.lineno == docstring.end_lineno or function[0][0].isspace():
            continue  # two statements on one line cannot be cut by lines; a string that starts in column 0 cannot be dedented
        cut = docstring.end_lineno - node.lineno + 1
        yield Pair("".join(function[:cut]), "".join(function[cut:]), f"{name.as_posix()}:{node.lineno}")

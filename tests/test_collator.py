"""collator.py: what batches hold, that nothing is lost or overfilled, and that no document sees another, by logits and by gradients."""

import os
import random
import re
import types
from collections import UserDict
from pathlib import Path

import numpy as np
import peft
import pytest
import ranks
import tiny_models as tiny
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from tiny_models import DTYPES
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments

import hf_flash2
from hf_flash2 import PackingBatchSampler, PackingCollator, first_fit, notices

pytestmark = pytest.mark.timeout(120)

README = Path(__file__).resolve().parents[1] / "README.md"
LENGTHS = (7, 1, 12, 4, 9)
TARGETS = sum(n - 1 for n in LENGTHS)  # tokens that another of their document predicts
WIDTH = 16  # of packed rows: the documents above fill two and leave one token to a third


def examples(lengths=LENGTHS) -> list[dict[str, list[int]]]:
    return [{"input_ids": tiny.tokens("cpu", 1, n, seed=n)[0].tolist()} for n in lengths]


COLLATORS = {
    "row": PackingCollator(),
    "rows": PackingCollator(WIDTH),
    "transformers": DataCollatorWithFlattening(return_flash_attn_kwargs=True),
}


def one_by_one(model, lengths=LENGTHS, backward: bool = False) -> torch.Tensor:
    """The loss of all documents over the number of all targets, each document run alone."""
    total, targets = torch.zeros((), device=model.device), sum(n - 1 for n in lengths)
    for example in examples(lengths):
        ids = torch.tensor([example["input_ids"]], device=model.device)
        if ids.shape[1] == 1:  # predicts nothing
            continue
        with torch.set_grad_enabled(backward):
            loss = model(input_ids=ids, labels=ids, num_items_in_batch=targets).loss
        if backward:
            loss.backward()
        total += loss.detach()
    return total


def to(device, batch: dict) -> dict:
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}


def plain(batch: dict) -> dict:
    """The part of a batch that every attention reads."""
    return {name: batch[name] for name in ("input_ids", "position_ids", "labels")}


def owners(collator: str) -> torch.Tensor:
    """[R * L]: the number of the document that each token belongs to, from 1, and 0 in padding. Not from the metadata of the batch."""
    return COLLATORS[collator]([{"input_ids": [number] * n} for number, n in enumerate(LENGTHS, start=1)])["input_ids"].flatten()


# ------------------------------------------------------------------------------------------------------------------------ what batches hold


def test_one_row_without_padding():
    batch = PackingCollator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}, {"input_ids": [9, 10], "labels": [-100, 3]}])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, -100, 3]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1]]
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 2, 2]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 4, 6]
    assert batch["max_length_q"] == batch["max_length_k"] == 3
    assert {name: x.dtype if isinstance(x, torch.Tensor) else type(x) for name, x in batch.items()} == {
        "input_ids": torch.int64, "labels": torch.int64, "position_ids": torch.int64, "seq_idx": torch.int32,
        "cu_seq_lens_q": torch.int32, "cu_seq_lens_k": torch.int32, "max_length_q": int, "max_length_k": int,
    }  # fmt: skip


def test_rows_of_one_length():
    """The longest first, each into the first row with room; what is left is a document of padding."""
    collate = PackingCollator(5, pad_token_id=2, ignore_index=-1)
    batch = collate([{"input_ids": [10, 11]}, {"input_ids": [20, 21, 22, 23]}, {"input_ids": [30]}, {"input_ids": [40, 41]}])
    assert batch["input_ids"].tolist() == [[20, 21, 22, 23, 30], [10, 11, 40, 41, 2]]
    assert batch["labels"].tolist() == [[-1, 21, 22, 23, -1], [-1, 11, -1, 41, -1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0], [0, 1, 0, 1, 0]]
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 0, 1], [2, 2, 3, 3, 4]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 4, 5, 7, 9, 10]
    assert batch["max_length_q"] == 4
    assert collate([{"input_ids": [1]}])["max_length_q"] == 4  # the padding
    assert PackingCollator(1)([{"input_ids": [7]}, {"input_ids": [8]}])["input_ids"].tolist() == [[7], [8]]


@pytest.mark.parametrize("labels", [False, True])
def test_one_row_is_that_of_transformers(labels):
    features = examples()
    if labels:
        features = [f | {"labels": [-100] * (len(f["input_ids"]) // 2) + f["input_ids"][len(f["input_ids"]) // 2 :]} for f in features]
    theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(features)
    ours = PackingCollator()(features)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        if isinstance(expected, torch.Tensor):
            assert torch.equal(ours[name], expected) and ours[name].dtype == expected.dtype, name
        else:
            assert ours[name] == expected and type(ours[name]) is int, name


CONVERSIONS = {
    "list": list,
    "array": np.array,
    "tensor": torch.tensor,
    "of 16 bits": lambda values: np.array(values, dtype=np.uint16),
    "from its end on": lambda values: np.array(values[::-1])[::-1],
    "big-endian": lambda values: np.array(values, dtype=">i8"),
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_padded_examples_of_any_type(convert):
    """A mask takes padding out, wherever it is, with its labels; other keys and examples without a token do not matter."""
    padded = [
        {"input_ids": [0, 0, 5, 6], "attention_mask": [0, 0, 1, 1], "labels": [9, 9, 15, 16]},
        {"input_ids": [0, 0], "attention_mask": [0, 0], "labels": [1, 1]},
        {"input_ids": [7, 8, 0], "attention_mask": [1, 1, 0], "labels": [17, 18, 9]},
    ]
    batch = PackingCollator()([{name: convert(values) for name, values in example.items()} | {"text": "a"} for example in padded])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8]]
    assert batch["labels"].tolist() == [[-100, 16, -100, 18]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 2, 4]


NO_INTEGERS = {
    "nothing": "", "bytes": b"hello", "a set": {9, 1}, "a dict": {7: 0}, "a generator": (x for x in [1]),
    "big-endian floats": np.array([1.0], dtype=">f8"), "words": np.array(["a"]),
}  # fmt: skip


@pytest.mark.parametrize("values", NO_INTEGERS.values(), ids=NO_INTEGERS)
def test_what_is_no_sequence_of_integers(values):
    with pytest.raises(ValueError, match="must be a one-dimensional sequence of integers"):
        PackingCollator()([{"input_ids": [1, 2]}, {"input_ids": values}])


def test_examples_that_are_no_dict_or_have_nothing_under_a_name():
    """As tokenizers give them, and datasets whose other rows have labels."""
    example = UserDict(input_ids=[5, 6], labels=None, attention_mask=None)
    assert PackingCollator()([example])["labels"].tolist() == [[-100, 6]]


def test_columns_that_labels_or_one_document_make_harmless():
    given = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "completion_mask": torch.tensor([0, 1, 1]), "seq_lengths": np.array([3])}
    assert PackingCollator()([given])["labels"].tolist() == [[-100, 6, 7]]


def test_examples_stay_as_they_were():
    example = {"input_ids": torch.tensor([5, 6]), "labels": torch.tensor([5, 6])}
    PackingCollator()([example])
    assert example["labels"].tolist() == [5, 6] and example["input_ids"].tolist() == [5, 6]


def test_truncation_is_asked_for():
    too_long = [{"input_ids": [1, 2]}, {"input_ids": list(range(9)), "attention_mask": [0] + [1] * 8}]
    with pytest.raises(ValueError, match=r"example 1 of the batch has 8 tokens, more than max_length=6; truncate or split .*truncate=True"):
        PackingCollator(6)(too_long)
    batch = PackingCollator(6, truncate=True)(too_long)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6], [1, 2, 0, 0, 0, 0]]
    assert PackingCollator(8)(example for example in too_long)["input_ids"].shape == (2, 8)  # the padding of an example does not count


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([], "without a token, got 0 examples"),
        ({"input_ids": [[1, 2], [3]]}, "takes a list of examples, each a mapping with its input_ids, got one dict"),
        (UserDict(input_ids=[[1, 2], [3]]), "each a mapping with its input_ids, got one UserDict"),
        ([[1, 2], [3]], "takes a list of examples, each a mapping with its input_ids, got a list among them"),
        ([{"input_ids": [1]}, None], "each a mapping with its input_ids, got a NoneType among them"),
        ([{"input_ids": []}], "without a token, got 1 examples"),
        ([{"input_ids": [1]}, {"text": "a"}], r"example 1 of the batch has no input_ids, only \['text'\]"),
        ([{"input_ids": [1, 2], "labels": [1]}], "labels must be as long as input_ids, got 1 and 2 in example 0"),
        ([{"input_ids": [1, 2], "attention_mask": [1, 1, 1]}], "attention_mask must be as long as input_ids, got 3 and 2 in example 0"),
        ([{"input_ids": torch.ones(1, 3, dtype=torch.int64)}], r"input_ids of example 0 .* one-dimensional .* shape \[1, 3\]"),
        ([{"input_ids": [0.5]}], "input_ids of example 0 .* integers, got torch.float32"),
        ([{"input_ids": [1, 2], "completion_mask": [0, 1]}], "example 0 of the batch has completion_mask, .* make labels of it"),
        ([{"input_ids": [1, 2], "seq_lengths": [1, 1]}], "has seq_lengths, several documents in one, .* an example of its own"),
        ([{"input_ids": [1]}, {"input_ids": [1], "pixel_values": torch.ones(1)}], "example 1 of the batch has pixel_values, images"),
        ([{"input_ids": ["a"]}], "input_ids of example 0 .* integers: "),
    ],
)
def test_errors_say_which_example(batch, message):
    with pytest.raises(ValueError, match=message):
        PackingCollator()(batch)


@pytest.mark.parametrize("value", [4.5, 8.0, "8", None, True])
def test_capacities_are_integers(value):
    with pytest.raises(ValueError, match=f"^capacity must be an integer, got {value!r}"):
        first_fit([1, 2], value)
    with pytest.raises(ValueError, match=f"^max_tokens must be an integer, got {value!r}"):
        PackingBatchSampler([1, 2], value)
    for name in ("pad_token_id", "ignore_index"):  # as tokenizers have no pad_token_id
        with pytest.raises(ValueError, match=f"^{name} must be an integer, got {value!r}"):
            PackingCollator(8, **{name: value})
    with pytest.raises(ValueError, match=f"^seed must be an integer, got {value!r}"):
        PackingBatchSampler([1, 2], 8, seed=value)
    if value is not None:
        with pytest.raises(ValueError, match=f"^max_length must be an integer, got {value!r}"):
            PackingCollator(value)
        with pytest.raises(ValueError, match=f"^window must be an integer, got {value!r}"):
            PackingBatchSampler([1, 2], 8, window=value)


def test_integers_of_any_type_are_capacities():
    for eight in (np.int64(8), torch.tensor(8)):
        assert first_fit([8, 1], eight) == [[0], [1]] and list(PackingBatchSampler([8], eight)) == [[0]]
        assert PackingCollator(eight)(examples([3]))["input_ids"].shape == (1, 8)


def test_masks_of_any_number_and_batches_in_an_order_of_their_own():
    packed = PackingCollator()([{"input_ids": [5, 6, 7], "attention_mask": [2, 0, -1]}])
    assert packed["input_ids"].tolist() == [[5, 7]]
    orders = set()
    for seed, epoch in ((0, 0), (0, 1), (5, 0)):  # of full batches, one example each
        sampler = PackingBatchSampler([8] * 9, 8, seed=seed, window=1)
        sampler.set_epoch(epoch)
        orders.add(tuple(index for batch in sampler for index in batch))
    assert len(orders) == 3
    assert PackingBatchSampler([], 8).fill == 0


def test_settings_that_cannot_be():
    with pytest.raises(ValueError, match="max_length must be at least 1, .* got 0"):
        PackingCollator(0)
    with pytest.raises(ValueError, match="truncate=True needs a max_length"):
        PackingCollator(truncate=True)
    with pytest.raises(ValueError, match="truncate must be True or False, got 'no'"):
        PackingCollator(4, truncate="no")


# -------------------------------------------------------------------------------------------------------------------------------- first-fit


def first_fit_by_the_book(lengths: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for items in bins:
            if sum(lengths[i] for i in items) + lengths[index] <= capacity:
                items.append(index)
                break
        else:
            bins.append([index])
    return [sorted(items) for items in bins]


@pytest.mark.parametrize("seed", range(40))
def test_first_fit(seed):
    rng = random.Random(seed)
    capacity = rng.choice((1, 7, 16, 100, 4096))
    shortest = rng.choice((0, 1, capacity // 2, capacity))
    lengths = [rng.randint(shortest, capacity) for _ in range(rng.choice((0, 1, 2, 33, 250)))]
    bins = first_fit(lengths, capacity)
    assert bins == first_fit_by_the_book(lengths, capacity)
    assert sorted(index for items in bins for index in items) == list(range(len(lengths)))
    assert all(items and sum(lengths[i] for i in items) <= capacity for items in bins)


@pytest.mark.parametrize(("lengths", "which"), [([1, 9], r"lengths\[1\] is 9"), ([-1], r"lengths\[0\] is -1")])
def test_first_fit_refuses_what_fits_nowhere(lengths, which):
    with pytest.raises(ValueError, match=which):
        first_fit(lengths, 8)


# ------------------------------------------------------------------------------------------------------------------------ no document leaks


@pytest.mark.parametrize("collator", COLLATORS)
def test_a_token_changes_its_own_document_and_no_other(collator, device):
    """Bit for bit, at every position of every document; and what follows in its own document does change."""
    model = tiny.model("llama", device=device, dtype=DTYPES[0])
    batch, owner = to(device, COLLATORS[collator](examples())), owners(collator).to(device)
    with torch.no_grad(), notices.record_calls() as calls:
        before = model(**batch).logits.flatten(0, 1)
    assert {route for layer in calls.values() for route in layer} == {"documents"}
    for number in owner.unique().tolist():  # the padding of rows is one too
        tokens = (owner == number).nonzero().flatten()
        changed = tokens[len(tokens) // 3]
        ids = batch["input_ids"].flatten().clone()
        ids[changed] = (ids[changed] + 7) % 50 + 3
        with torch.no_grad():
            after = model(**batch | {"input_ids": ids.view_as(batch["input_ids"])}).logits.flatten(0, 1)
        differs = (after != before).any(-1)
        assert differs[tokens].tolist() == (tokens >= changed).tolist()
        assert not differs[owner != number].any(), f"a token of document {number} changed others: {owner[differs].unique().tolist()}"


@pytest.mark.parametrize("implementation", ["hf_flash2", "eager", "sdpa"])
@pytest.mark.parametrize("collator", COLLATORS)
def test_logits_are_those_of_each_document_alone(collator, implementation, device):
    batch, owner = to(device, COLLATORS[collator](examples())), owners(collator).to(device)
    model, eager = tiny.model("llama", implementation, device, DTYPES[0]), tiny.model("llama", "eager", device, DTYPES[0])
    exact = tiny.eager_in_float32(eager)
    inputs = batch if implementation == "hf_flash2" else plain(batch)
    with torch.no_grad():
        packed = model(**inputs, use_cache=False).logits.flatten(0, 1)
        for number, example in enumerate(examples(), start=1):
            alone = torch.tensor([example["input_ids"]], device=device)
            tiny.assert_as_exact_as_eager(packed[owner == number], eager(alone).logits[0], exact(alone).logits[0])


@pytest.mark.parametrize("given", [{}, {"num_items_in_batch": TARGETS}], ids=["mean", "sum over a given count"])
@pytest.mark.parametrize("patched", [False, True], ids=["flag", "patch(packed=True)"])
@pytest.mark.parametrize("collator", COLLATORS)
def test_loss_and_gradients_are_the_sum_over_documents(collator, patched, given, device):
    """Against eager attention, document by document without padding."""
    batch = to(device, COLLATORS[collator](examples()))
    assert batch["input_ids"].shape[0] == (3 if collator == "rows" else 1)
    assert int((batch["labels"] != -100).sum()) == TARGETS
    ours, eager = tiny.twins("llama", device, DTYPES[0])
    exact = tiny.eager_in_float32(eager)
    if patched:
        hf_flash2.patch(ours, packed=True)
    loss = ours.train()(**batch, **given).loss
    loss.backward()
    eager_loss, true_loss = one_by_one(eager, backward=True), one_by_one(exact, backward=True)
    tiny.assert_as_exact_as_eager(loss, eager_loss, true_loss, dtype=DTYPES[0])
    eager_parameters, true_parameters = dict(eager.named_parameters()), dict(exact.named_parameters())
    for name, parameter in ours.named_parameters():
        tiny.assert_as_exact_as_eager(parameter.grad, eager_parameters[name].grad, true_parameters[name].grad, factor=3.0, name=name)


def test_trainer(tmp_path):
    """Three steps on packed rows, with accumulation; the loss evaluated is that of the documents alone, and falls."""
    model = tiny.model("llama")
    lengths = [3 + n % 9 for n in range(24)]
    dataset = examples(lengths)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-3,
        per_device_eval_batch_size=24, logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, data_collator=PackingCollator(WIDTH), train_dataset=dataset, eval_dataset=dataset)
    expected = one_by_one(model, lengths).item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    with notices.record_calls() as calls:
        trainer.train()
    assert {route for layer in calls.values() for route in layer} == {"documents"}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert trainer.evaluate()["eval_loss"] < expected


# ------------------------------------------------------------------------------------------------------------------------ the batch sampler


def random_lengths(count: int, longest: int = 64, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(1, longest) for _ in range(count)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("window", [1, 16, 1000])
def test_batches_hold_every_example_once(window, shuffle):
    lengths = random_lengths(300)
    sampler = PackingBatchSampler(lengths, 128, shuffle=shuffle, window=window)
    batches = list(sampler)
    assert len(sampler) == len(batches)
    assert sorted(index for batch in batches for index in batch) == list(range(300))
    assert all(sum(lengths[index] for index in batch) <= 128 for batch in batches)
    assert sampler.fill == pytest.approx(sum(lengths) / (128 * len(batches)))
    assert sampler.fill > {1: 0.7, 16: 0.95, 1000: 0.98}[window]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_every_epoch_has_as_many_batches(seed, drop_last):
    """Trainer asks once, and leaves out what is more. Uniform lengths, whose packing depends on their order."""
    lengths = [random.Random(1000 * seed + i).randrange(8, 31) for i in range(90)]
    sampler = PackingBatchSampler(lengths, 32, seed=seed, window=10, drop_last=drop_last)
    counts, natural = [], set()
    for epoch in (3, 0, 1, 2, 4, 5):  # resumed in the fourth
        sampler.set_epoch(epoch)
        batches = list(sampler)
        counts.append(len(batches))
        natural.add(len(sampler._pack(epoch, 10)))
        seen = [index for batch in batches for index in batch]
        assert len(seen) == len(set(seen)) and (drop_last or len(seen) == 90)
        assert all(batch and sum(lengths[index] for index in batch) <= 32 for batch in batches)
    assert len(set(counts)) == 1, counts
    assert len(natural) > 1 or seed not in (0, 1, 2)  # the test is of something


def test_what_was_drawn_is_not_the_plan():
    sampler = PackingBatchSampler([3, 4, 5], 12)
    next(iter(sampler)).append(99)
    assert sorted(index for batch in sampler for index in batch) == [0, 1, 2]


def test_order_depends_on_seed_and_epoch_alone():
    lengths = random_lengths(200)
    sampler = PackingBatchSampler(lengths, 128, window=50)
    first = list(sampler)
    random.seed(1), torch.manual_seed(1)
    assert list(sampler) == first == list(PackingBatchSampler(torch.tensor(lengths), 128, window=50))
    of_another_seed = list(PackingBatchSampler(lengths, 128, window=50, seed=3))
    sampler.set_epoch(1)
    second = list(sampler)
    assert len(sampler) == len(second)
    for other in (of_another_seed, second):  # in what shares a batch, not only in the order of the batches
        assert sorted(map(sorted, other)) != sorted(map(sorted, first))
    sampler.set_epoch(0)
    assert list(sampler) == first and len(sampler) == len(first)


def test_long_examples_do_not_come_first():
    """Though first-fit places them first."""
    lengths = random_lengths(200)
    longest = [max(lengths[index] for index in batch) for batch in PackingBatchSampler(lengths, 128)]
    assert longest != sorted(longest, reverse=True)


def test_the_order_of_the_dataset_can_be_kept():
    assert list(PackingBatchSampler([1] * 10, 4, shuffle=False, window=8)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_what_remains_can_be_dropped():
    lengths = random_lengths(300)
    whole, dropped = (PackingBatchSampler(lengths, 128, shuffle=False, window=50, drop_last=drop) for drop in (False, True))
    assert list(dropped) == list(whole)[:-1]
    kept = sum(lengths) - sum(lengths[index] for index in list(whole)[-1])
    assert dropped.fill == pytest.approx(kept / (128 * len(dropped)))
    assert list(PackingBatchSampler([], 128)) == list(PackingBatchSampler([5], 128, drop_last=True)) == []


def test_the_batch_of_what_remains_comes_anywhere_or_not_at_all():
    """All batches are shuffled, and drop_last leaves out that one."""
    whole, dropped = (PackingBatchSampler([4] * 17, 8, drop_last=drop) for drop in (False, True))
    places = set()
    for epoch in range(8):
        whole.set_epoch(epoch)
        dropped.set_epoch(epoch)
        places.add([len(batch) for batch in whole].index(1))
        assert [len(batch) for batch in dropped] == [2] * 8
    assert len(places) > 1


def test_sampler_refuses():
    with pytest.raises(ValueError, match=r"example 1 of the dataset has 9 tokens, expected 1 to max_tokens=8; truncate or split"):
        PackingBatchSampler([3, 9], 8)
    with pytest.raises(ValueError, match=r"example 0 of the dataset has 0 tokens, .*; leave empty examples out"):
        PackingBatchSampler([0], 8)
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got -1"):
        PackingBatchSampler([3], -1)
    with pytest.raises(ValueError, match="window must be at least 1 example, got 0"):
        PackingBatchSampler([3], 8, window=0)
    for name in ("shuffle", "drop_last"):
        with pytest.raises(ValueError, match=f"{name} must be True or False, got 'no'"):
            PackingBatchSampler([3], 8, **{name: "no"})


def test_loader_makes_one_row_of_a_static_shape():
    dataset = examples([3 + n % 9 for n in range(40)])
    loader = DataLoader(
        dataset,
        batch_sampler=PackingBatchSampler([len(example["input_ids"]) for example in dataset], 32),
        collate_fn=PackingCollator(32),
    )
    batches = list(loader)
    assert len(batches) == len(loader)
    assert {tuple(batch["input_ids"].shape) for batch in batches} == {(1, 32)}
    assert sum(int((batch["labels"] != -100).sum()) for batch in batches) == sum(len(example["input_ids"]) - 1 for example in dataset)


def test_the_loop_of_the_readme_has_another_order_every_epoch():
    dataset, taken = examples([3 + n % 9 for n in range(40)]), []
    lengths = [len(example["input_ids"]) for example in dataset]
    blocks = re.findall(r"```python\n(.+?)```", README.read_text(), re.DOTALL)
    [block] = [block.replace("4096", "32") for block in blocks if "PackingBatchSampler" in block]
    names = {"hf_flash2": hf_flash2, "DataLoader": DataLoader, "dataset": dataset, "lengths": lengths, "epochs": 2, "train": taken.append}
    exec(block, names)
    rows = [batch["input_ids"].tolist() for batch in taken]
    half = len(rows) // 2
    assert half and sorted(rows[:half]) != sorted(rows[half:])


def test_trainer_resumes_on_two_processes(tmp_path):
    ranks.run("test_collator", "resume_rank", tmp_path)


class _Recording(Trainer):
    """Trains on packed batches of a sampler, and notes them."""

    def get_train_dataloader(self):
        lengths = [len(example["input_ids"]) for example in self.train_dataset]
        self.sampler, self.taken = PackingBatchSampler(lengths, 32, window=10), []
        return self.accelerator.prepare(DataLoader(self.train_dataset, batch_sampler=self.sampler, collate_fn=self.data_collator))

    def training_step(self, model, inputs, *args):
        self.taken.append(inputs["input_ids"].tolist())
        return super().training_step(model, inputs, *args)


def resume_rank(rank: int, folder: str) -> None:
    """In the middle of the second epoch, with README's callback: the batches that come without a stop."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # accelerate asks for them, though the processes know each other already
    blocks = re.findall(r"```python\n(.+?)```", README.read_text(), re.DOTALL)
    [block] = [block for block in blocks if "EpochOfSampler" in block]

    def train(resumed_from: str | None) -> list[list[list[int]]]:
        options = {"num_train_epochs": 2, "save_steps": 5, "disable_tqdm": True, "report_to": [], "remove_unused_columns": False}
        options |= {"save_only_model": True}  # Trainer cannot read the optimizer of a distributed CPU where torch has CUDA
        arguments = TrainingArguments(f"{folder}/run", use_cpu=True, ddp_backend="gloo", **options)
        dataset = examples([3 + n % 19 for n in range(40)])
        trainer = _Recording(tiny.model("llama", "eager"), arguments, PackingCollator(32), train_dataset=dataset)
        names = {"TrainerCallback": TrainerCallback}
        exec(block, names)
        trainer.add_callback(names["EpochOfSampler"])
        names["sampler"] = types.SimpleNamespace(set_epoch=lambda epoch: trainer.sampler.set_epoch(epoch))
        trainer.train(resume_from_checkpoint=resumed_from)
        return trainer.taken

    taken = train(None)
    half = len(taken) // 2
    middle = 5 * (half // 5 + 1)
    assert half < middle < len(taken) - 1
    assert train(f"{folder}/run/checkpoint-{middle}") == taken[middle:]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("processes", [2, 3])
def test_processes_take_turns_under_accelerate(processes, drop_last):
    """Every process gets the same number of batches, no two the same ones, and the next epoch has another order by itself."""
    sampler_of = {"drop_last": drop_last, "window": 50}
    lengths = random_lengths(301)
    uneven = next(n for n in range(290, 301) if len(PackingBatchSampler(lengths[:n], 128, **sampler_of)) % processes)
    whole = PackingBatchSampler(lengths[:uneven], 128, **sampler_of)
    loaders = [
        prepare_data_loader(
            DataLoader(range(uneven), batch_sampler=PackingBatchSampler(lengths[:uneven], 128, **sampler_of), collate_fn=list),
            num_processes=processes,
            process_index=rank,
        )
        for rank in range(processes)
    ]
    for epoch in range(2):
        whole.set_epoch(epoch)
        expected = list(whole)
        rounds = len(expected) // processes if drop_last else -(-len(expected) // processes)
        shares = [list(loader) for loader in loaders]
        assert [len(share) for share in shares] == [rounds] * processes
        taken = [batch for turn in zip(*shares, strict=True) for batch in turn]
        assert taken == (expected + expected[: processes - 1])[: len(taken)]


def test_an_epoch_resumed_in_the_middle_on_two_processes():
    """As accelerate resumes: each process skips what it has seen. The sampler's own set_epoch counts."""
    lengths = torch.randint(1, 100, (200,), generator=torch.Generator().manual_seed(0))

    def prepared(rank):
        sampler = PackingBatchSampler(lengths, 128)
        loader = prepare_data_loader(
            DataLoader(range(200), batch_sampler=sampler, collate_fn=list), num_processes=2, process_index=rank, put_on_device=False
        )
        return sampler, loader

    for rank in range(2):
        sampler, loader = prepared(rank)
        loader.set_epoch(1)
        whole = list(loader)
        sampler, loader = prepared(rank)
        resumed = skip_first_batches(loader, 20)
        resumed.set_epoch(1)
        sampler.set_epoch(1)
        assert list(resumed) == whole[20:]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig"])
def test_tokens_before_those_of_a_packed_batch_are_refused(kind, packed):
    """PEFT hands cu_seq_lens on as they are, so that every document would begin too early, and the last tokens be in none."""
    model = tiny.model("llama", "eager" if packed else "hf_flash2")
    model = peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4))
    if packed:
        hf_flash2.patch(model, packed=True)
    batch = PackingCollator()([{"input_ids": [5, 6, 7, 8, 9]}, {"input_ids": [8, 3, 4]}])
    with pytest.raises(
        ValueError, match=r"has tokens \[1, 12\], but the seq_idx .* of \[1, 8\]; .*prompt and p-tuning\) needs padded batches"
    ):
        model(**batch, use_cache=False)

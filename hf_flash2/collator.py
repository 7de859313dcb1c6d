"""From examples of any length to full batches without padding: documents side by side, told apart by position_ids and cu_seqlens.

`PackingCollator` is the `collate_fn` of a DataLoader or the `data_collator` of a Trainer, `PackingBatchSampler` chooses which examples go
together, and `first_fit` is the bin packing under both. Any attention of Transformers understands their batches, nothing
here needs ours.
"""

import copy
import operator
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DistributedSampler, Sampler

# Columns that would change the result: what they are, and what to do. The first of them do not count beside labels.
_LIKE_LABELS = ("completion_mask", "assistant_masks", "shift_labels")
_REFUSED = {
    "completion_mask": ("the tokens that are trained on", "make labels of it, -100 elsewhere"),
    "assistant_masks": ("the tokens that are trained on", "make labels of them, -100 elsewhere"),
    "shift_labels": ("what each token predicts", "give labels, which are not shifted"),
    "seq_lengths": ("several documents in one", "give each document as an example of its own"),
    "inputs_embeds": ("embeddings in place of tokens", "give input_ids"),
    "pixel_values": ("images", "use a collator of its model"),
    "input_features": ("audio", "use a collator of its model"),
}
_Document = tuple[torch.Tensor, torch.Tensor]  # input_ids and labels of its real tokens, int64 [length] each


def first_fit(lengths: Sequence[int] | torch.Tensor, capacity: int) -> list[list[int]]:
    """First-fit decreasing: from the longest on, each item goes into the first bin with room for it (D. S. Johnson, 1973).

    Args:
        lengths: n integers from 0 to capacity.
        capacity: what a bin holds.
    Returns:
        The bins in the order they were opened, each the ascending indices of its items. Every index is in one bin; at most one bin is
        less than half full.
    Raises:
        ValueError: a length that fits no bin, with its index; a capacity that is no integer.
    PERF: the first bin with room is found in a binary tree, O(n log n): 100,000 lengths take 0.1 to 0.4 s on one EPYC core.
    """
    lengths, capacity = _integers(lengths, "lengths").tolist(), _integer(capacity, "capacity")
    for index, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            raise ValueError(f"lengths must be from 0 to the capacity, {capacity}; lengths[{index}] is {length}")
    # Any two bins hold more than one capacity together, which bounds their number.
    leaves = 1 << (2 * (sum(lengths) // max(capacity, 1))).bit_length()
    room = [capacity] * (2 * leaves)  # room[leaves + i] is that of bin i, room[node] the larger of room[2 * node] and room[2 * node + 1]
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length, node = lengths[index], 1
        while node < leaves:
            node *= 2
            node += room[node] < length
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(index)
        room[node] -= length
        while node > 1 and room[node // 2] != (most := max(room[node], room[node ^ 1])):
            node //= 2
            room[node] = most
    return [sorted(items) for items in bins]


@dataclass
class PackingCollator:
    """Packs examples into rows of documents that cannot see each other.

    Args:
        max_length: None puts all examples of a batch one after another into one row, without any padding. L packs them into as few rows
            of L tokens as `first_fit` finds, for static shapes; what is left of a row is padding, and a document of its own.
        pad_token_id: fills what is left of a row.
        ignore_index: the label of tokens that the loss leaves out: the first of each document, which would be predicted by another
            document, and padding.
        truncate: cut examples longer than max_length to their first max_length tokens, instead of raising.

    Called with a list of examples, mappings of one-dimensional lists, arrays or tensors:
        input_ids; labels, as long (default: input_ids); attention_mask, as long: where it is 0 a token is left out, so that examples may
        come padded. Other keys are left out, and so are examples without a token. Keys that say what is trained on, or hold what a model
        reads beside tokens, are refused: completion_mask and assistant_masks without labels, several seq_lengths, pixel_values, ...
    Returns a batch of R rows (1 for max_length=None), without an attention_mask:
        input_ids, labels, position_ids: int64 [R, L]; the positions restart at 0 with each document.
        seq_idx: int32 [R, L], the number of the document that each token belongs to, which layers other than attention go by.
        cu_seq_lens_q, cu_seq_lens_k: int32 [documents + 1], where each document starts among the R * L tokens, row after row.
        max_length_q, max_length_k: int, the longest document.
    For decoders of Transformers whose position_ids count from 0: not for those of BART and its kin, which take none, nor for RoBERTa, which
    counts from another number. What mixes tokens beside attention (Mamba, convolutions) has to keep documents apart by seq_idx: Bamba,
    Falcon-H1, LFM2 and others do, or raise an error without the kernels that they need for it (Transformers 5.24); Jamba does not look at
    it, and its documents see each other.
    Under context parallelism max_length has to be a multiple of twice the processes; the cu_seq_lens stay those of whole rows.
    The same examples always give the same batch. NOTE: eager attention and SDPA tell documents apart by position_ids, which Transformers
    looks at only without a cache (with one, their documents see each other): call them with use_cache=False (Trainer does).
    hf_flash2 needs no such care. torch.nn.DataParallel cannot divide these batches: start a process for each GPU. Nor can accelerate, which
    divides what one process reads of an iterable dataset, even for that process alone: Trainer needs
    accelerator_config={"dispatch_batches": False} for that, and hf_flash2 refuses what was cut. Adapters that put tokens of their own
    before the others (PEFT's prompt, prefix and p-tuning) need padded batches.

    Raises:
        ValueError: no tokens, no input_ids, lengths that differ, or an example that is too long, with its place in the batch.
    """

    max_length: int | None = None
    _: KW_ONLY
    pad_token_id: int = 0
    ignore_index: int = -100
    truncate: bool = False

    def __post_init__(self) -> None:
        if _boolean(self.truncate, "truncate") and self.max_length is None:
            raise ValueError("truncate=True needs a max_length to cut to, got max_length=None")
        if self.max_length is not None and _integer(self.max_length, "max_length") < 1:
            raise ValueError(f"max_length must be at least 1, or None for one row of any length, got {self.max_length}")
        for name in ("pad_token_id", "ignore_index"):  # a tokenizer may have no pad_token_id: any token will do, the loss leaves it out
            _integer(getattr(self, name), name)

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor | int]:
        expected = "PackingCollator takes a list of examples, each a mapping with its input_ids, got"
        if isinstance(examples, Mapping):
            raise ValueError(f"{expected} one {type(examples).__name__}")
        examples = list(examples)
        for example in examples:
            if not hasattr(example, "get"):
                raise ValueError(f"{expected} a {type(example).__name__} among them")
        documents = [self._document(index, example) for index, example in enumerate(examples)]
        documents = [(input_ids, labels) for input_ids, labels in documents if len(input_ids)]
        if not documents:
            raise ValueError(f"cannot pack a batch without a token, got {len(examples)} examples; leave empty examples out of the dataset")
        if self.max_length is not None:
            documents = self._full_rows(documents)
        lengths = [len(input_ids) for input_ids, _ in documents]
        cu_seqlens = F.pad(torch.tensor(lengths).cumsum(0, dtype=torch.int32), (1, 0))
        shape = (-1, self.max_length or sum(lengths))
        return {
            "input_ids": torch.cat([input_ids for input_ids, _ in documents]).view(shape),
            "labels": torch.cat([labels for _, labels in documents]).view(shape),
            "position_ids": torch.cat([torch.arange(length) for length in lengths]).view(shape),
            "seq_idx": torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths)).view(shape),
            "cu_seq_lens_q": cu_seqlens,
            "cu_seq_lens_k": cu_seqlens,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
        }

    def _document(self, index: int, example: Mapping[str, Any]) -> _Document:
        if example.get("input_ids") is None:
            raise ValueError(f"example {index} of the batch has no input_ids, only {list(example)}; tokenise the dataset first")
        for name, (what, remedy) in _REFUSED.items():
            column = example.get(name)
            if (
                column is None
                or (name in _LIKE_LABELS and example.get("labels") is not None)
                or (name == "seq_lengths" and len(column) < 2)
            ):
                continue
            raise ValueError(f"example {index} of the batch has {name}, {what}, which PackingCollator leaves out; {remedy}")
        columns = {
            name: _integers(example[name], f"{name} of example {index} of the batch")
            for name in ("input_ids", "labels", "attention_mask")
            if example.get(name) is not None
        }
        input_ids = columns["input_ids"]
        for name, column in columns.items():
            if len(column) != len(input_ids):
                raise ValueError(
                    f"{name} must be as long as input_ids, got {len(column)} and {len(input_ids)} in example {index} of the batch"
                )
        labels = columns.get("labels", input_ids)
        if "attention_mask" in columns:
            real = columns["attention_mask"] != 0
            input_ids, labels = input_ids[real], labels[real]
        if self.max_length is not None and len(input_ids) > self.max_length:
            if not self.truncate:
                raise ValueError(
                    f"example {index} of the batch has {len(input_ids)} tokens, more than max_length={self.max_length}; truncate or split "
                    f"it while tokenising, or let PackingCollator(truncate=True) cut off what is too much"
                )
            input_ids, labels = input_ids[: self.max_length], labels[: self.max_length]
        labels = labels.clone()
        labels[:1] = self.ignore_index
        return input_ids, labels

    def _full_rows(self, documents: list[_Document]) -> list[_Document]:
        """The documents in the order of their rows, with the padding that fills each row to max_length tokens."""
        packed = []
        for row in first_fit([len(input_ids) for input_ids, _ in documents], self.max_length):
            packed += [documents[i] for i in row]
            missing = self.max_length - sum(len(documents[i][0]) for i in row)
            if missing:
                packed.append((torch.full((missing,), self.pad_token_id), torch.full((missing,), self.ignore_index)))
        return packed


class PackingBatchSampler(Sampler[list[int]]):
    """Batches of at most `max_tokens` tokens, nearly full: the `batch_sampler` of a DataLoader whose collate_fn is a `PackingCollator`.

    Args:
        lengths: the number of (real) tokens of every example of the dataset, each from 1 to max_tokens.
        max_tokens: the most tokens of a batch. `PackingCollator(max_length=max_tokens)` then always makes one row, of a static shape.
        shuffle: another order every epoch, of examples and of batches; False goes through the dataset window by window.
        seed: of the order; the order depends on nothing else but the epoch.
        window: how many examples `first_fit` sees at once. Which examples share a batch is chance between windows and a matter of their
            lengths within one, so more fills better. PERF: batches of 4096 are 99.97 % full at 1024 (99.9 % at 128) with log-normal
            lengths of mean 443, 98.3 % (96.0 %) with uniform ones up to 4096.
        drop_last: leave out the last batch, which is filled with what remained; also, under accelerate, what is no full round of processes.

    Every example comes once an epoch, in as many batches as in the first, which Trainer counts on: where another order packs better, some
    batches are divided; where worse, `first_fit` sees more examples at once, or else those that share a batch are the first epoch's.
    Under accelerate prepare the DataLoader as ever: the processes take turns, and unless drop_last the first batches come again until each
    process has as many. Resumed in the middle of an epoch, on several processes, set the epoch of this sampler itself: behind accelerate's
    `skip_first_batches` the loader's set_epoch does not reach it, nor does Trainer's (README has a callback).

    Raises:
        ValueError: a length that no batch holds, with its index; other arguments, with their value.
    """

    def __init__(
        self,
        lengths: Sequence[int] | torch.Tensor,
        max_tokens: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        window: int = 1024,
        drop_last: bool = False,
    ) -> None:
        self.lengths = _integers(lengths, "lengths").tolist()
        max_tokens, window, seed = _integer(max_tokens, "max_tokens"), _integer(window, "window"), _integer(seed, "seed")
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        for index, length in enumerate(self.lengths):
            if not 1 <= length <= max_tokens:
                remedy = "leave empty examples out" if length < 1 else "truncate or split it while tokenising, or raise max_tokens"
                raise ValueError(f"example {index} of the dataset has {length} tokens, expected 1 to max_tokens={max_tokens}; {remedy}")
        if window < 1:
            raise ValueError(f"window must be at least 1 example, got {window}")
        if not 0 <= seed < 2**62:
            raise ValueError(f"seed must be from 0 to 2**62 - 1, got {seed}")
        shuffle, drop_last = _boolean(shuffle, "shuffle"), _boolean(drop_last, "drop_last")
        self.max_tokens, self.shuffle, self.seed, self.window, self.drop_last = max_tokens, shuffle, seed, window, drop_last
        # One process's view of all examples, with an epoch. NOTE: accelerate sets the epoch of `batch_sampler.sampler` and of nothing else.
        self.sampler = DistributedSampler(self.lengths, num_replicas=1, rank=0, shuffle=shuffle, seed=seed)
        self._planned: tuple[int, list[list[int]]] | None = None
        self._first: list[list[int]] | None = None  # of the first epoch, before any are dropped

    def set_epoch(self, epoch: int) -> None:
        """The order of which epoch the next iteration has. accelerate and Trainer call it."""
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        return (list(batch) for batch in self._batches())

    def __len__(self) -> int:
        return len(self._batches())

    @property
    def fill(self) -> float:
        """Tokens of the current epoch's batches over what they could hold."""
        batches = self._batches()
        return sum(self.lengths[index] for batch in batches for index in batch) / max(len(batches) * self.max_tokens, 1)

    def _batches(self) -> list[list[int]]:
        epoch = self.sampler.epoch
        if self._planned is None or self._planned[0] != epoch:
            self._planned = epoch, self._plan(epoch)
        return self._planned[1]

    def _plan(self, epoch: int) -> list[list[int]]:
        if self._first is None:
            self._first = self._pack(0, self.window)
        batches = self._as_many(epoch, self._first)
        if self.drop_last:
            del batches[-1:]
        if self.shuffle:
            random.Random(self.seed + epoch).shuffle(batches)
        return batches

    def _as_many(self, epoch: int, first: list[list[int]]) -> list[list[int]]:
        """The batches of an epoch, as many as those of the first one."""
        window = self.window
        batches = first if epoch == 0 else self._pack(epoch, window)
        while len(batches) > len(first) and window < len(self.lengths):
            window *= 2
            batches = self._pack(epoch, window)
        batches = list(batches if len(batches) <= len(first) else first)
        while len(batches) < len(first):
            longest = max(range(len(batches)), key=lambda i: len(batches[i]))
            batch = batches[longest]
            batches[longest : longest + 1] = batch[: len(batch) // 2], batch[len(batch) // 2 :]
        return batches

    def _pack(self, epoch: int, window: int) -> list[list[int]]:
        """The examples in the order of an epoch, so many at a time."""
        sampler = copy.copy(self.sampler)
        sampler.set_epoch(epoch)
        order = list(sampler)
        batches: list[list[int]] = []
        for start in range(0, len(order), window):
            # The last bin that first-fit opens is the emptiest: it is emptied into the next window.
            candidates = (batches.pop() if batches else []) + order[start : start + window]
            packed = first_fit([self.lengths[index] for index in candidates], self.max_tokens)
            batches += [[candidates[i] for i in items] for items in packed]
        return batches


def _integer(value: Any, name: str) -> int:
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ValueError(f"{name} must be an integer, got {value!r}")


def _boolean(value: Any, name: str) -> bool:
    """Not whatever is true: a config file may say "no"."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def _integers(values: Any, name: str) -> torch.Tensor:
    """int64 [n] from a list, an array or a tensor."""
    try:
        tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        if getattr(getattr(values, "dtype", None), "kind", None) not in ("i", "u"):
            raise ValueError(f"{name} must be a one-dimensional sequence of integers: {error}") from error
        tensor = torch.tensor(values.tolist())  # of an array from its end on, or of bytes in another order
    if tensor.dim() != 1 or (tensor.is_floating_point() and len(tensor)):
        raise ValueError(f"{name} must be a one-dimensional sequence of integers, got {tensor.dtype} of shape {list(tensor.shape)}")
    return tensor.to("cpu", torch.int64)

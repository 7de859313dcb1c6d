"""Attention over sequences that several processes share: torch's context parallelism, as accelerate starts it.

Inside `torch.distributed.tensor.experimental.context_parallel(mesh, buffers=...)` each process has a part of every sequence, and torch has
a function of its own in the place of `F.scaled_dot_product_attention`, which brings the parts together. Any other attention would see the
keys of its own process alone, so ours asks here. Keys and values of all processes are gathered, and each chunk of queries attends to them
up to its own end, in rows of several documents from where its first document begins: no score is computed that causality hides, no
partial results have to be merged, and windows, sinks, caps and dropout are what they are on one GPU. Gathering in place of a ring:
Grattafiori et al., The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.2.

The gathered keys and values, [B, S, Hk, D + Dv] of each layer, are kept for its backward; under gradient checkpointing, of one layer at a
time.
"""

import bisect
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from . import packing
from .functional import flash_attn_func, flash_attn_varlen_func

_PLAIN = torch._C._nn.scaled_dot_product_attention
_THEIR_PACKAGE = "torch.distributed"


class Shards(NamedTuple):
    """How the tokens of a sequence lie on the processes of a group."""

    group: "dist.ProcessGroup"
    rank: int
    size: int
    balanced: bool  # in 2 n chunks, of which process r has r and 2 n - 1 - r, as equal causal work; else in n, and process r has r

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """The chunks of a process, in its order."""
        return (rank, 2 * self.size - 1 - rank) if self.balanced else (rank,)

    @property
    def chunks(self) -> tuple[int, ...]:
        return self.chunks_of(self.rank)

    @property
    def order(self) -> list[int]:
        """The chunks of all processes, one process after another."""
        return [chunk for rank in range(self.size) for chunk in self.chunks_of(rank)]

    def chunk_tokens(self, tokens: int) -> int:
        """The length of a chunk, where this process has so many tokens. Raises ValueError where they make no whole chunks."""
        if tokens % len(self.chunks):
            raise ValueError(
                f"context parallelism cuts a sequence into {2 * self.size} chunks, two for each process, but this one has {tokens} tokens; "
                f"pad sequences to a multiple of {2 * self.size}"
            )
        return tokens // len(self.chunks)

    def positions(self, tokens: int, device: torch.device) -> torch.Tensor:
        """int64 [tokens]: which tokens of the sequence this process has."""
        length = self.chunk_tokens(tokens)
        return torch.cat([torch.arange(chunk * length, (chunk + 1) * length, device=device) for chunk in self.chunks])


def active() -> Shards | None:
    """How sequences lie on the processes, inside torch's `context_parallel`; None outside.

    Raises:
        ValueError: it is active, and this torch does not show how.
    """
    function = F.scaled_dot_product_attention
    return None if function is _PLAIN else _read(function)


def _read(function) -> Shards | None:
    module = getattr(function, "__module__", None) or ""
    if not module.startswith(_THEIR_PACKAGE):
        return None  # somebody else's function, which is about SDPA alone
    from torch.distributed.device_mesh import DeviceMesh

    meshes = [cell.cell_contents for cell in function.__closure__ or () if isinstance(cell.cell_contents, DeviceMesh)]
    balanced = getattr(getattr(sys.modules.get(module), "_cp_options", None), "enable_load_balance", None)
    if len(meshes) != 1 or meshes[0].ndim != 1 or not isinstance(balanced, bool):
        raise ValueError(
            f"context parallelism is active, but torch {torch.__version__} does not show over which processes in a way that hf_flash2 "
            'knows; update hf_flash2, or use attn_implementation="sdpa"'
        )
    group = meshes[0].get_group()
    return Shards(group, dist.get_rank(group), dist.get_world_size(group), balanced)


class Piece(NamedTuple):
    """What a chunk of queries sees of the documents of its row: keys [begin, end), those of its first document from their start on, and the
    sequences of both as `flash_attn_varlen_func` takes them."""

    row: int
    begin: int
    end: int
    cu_seqlens_q: torch.Tensor  # int32, from the first token of the chunk on
    cu_seqlens_k: torch.Tensor  # int32, from `begin` on
    max_seqlen_q: int
    max_seqlen_k: int


class RowDocuments:
    """Where the documents of whole rows begin, some of which hold several, or padding around one."""

    def __init__(self, starts: list[list[int]], tokens: int, reals: list[tuple[int, int]] | None = None):
        self.starts = starts  # of each row, ascending
        self.tokens = tokens  # of a row
        self.reals = reals or [(0, tokens)] * len(starts)  # of each row [first, end), from its first start on; all else is padding
        self._pieces: dict[tuple[Shards, torch.device], list[list[Piece]]] = {}

    def pieces(self, shards: Shards, device: torch.device) -> list[list[Piece]]:
        """For each chunk of this process, that of every row. Made by the first layer that asks."""
        if (shards, device) not in self._pieces:
            length = self.tokens // len(shards.order)
            with torch.inference_mode(False):  # what is kept may be saved for a backward
                self._pieces[shards, device] = [
                    [self._piece(row, chunk * length, (chunk + 1) * length, device) for row in range(len(self.starts))]
                    for chunk in shards.chunks
                ]
        return self._pieces[shards, device]

    def _piece(self, row: int, first: int, end: int, device: torch.device) -> Piece:
        starts = self.starts[row]
        low, high = (min(max(bound, first), end) for bound in self.reals[row])
        if low < high:
            number = bisect.bisect_right(starts, low)
            begin, last = starts[number - 1], high
            bounds = [low, *starts[number : bisect.bisect_left(starts, high)], high]
            # Every document ends in this chunk where its queries do, so that causality is as in whole ones; only the first began before.
            queries, keys = [bound - first for bound in bounds], [0, *(bound - begin for bound in bounds[1:])]
            if low > first:  # padding sees no keys: rows of zeros
                queries, keys = [0, *queries], [0, *keys]
            if high < end:
                queries, keys = [*queries, end - first], [*keys, keys[-1]]
        else:  # nothing else, and a key that no query sees: every process takes part in the backward
            begin, last = first, first + 1
            queries, keys = [0, end - first, end - first], [0, 0, 1]
        cu_seqlens = torch.tensor([queries, keys], dtype=torch.int32).to(device)
        longest = (max(b - a for a, b in itertools.pairwise(lengths)) for lengths in (queries, keys))
        return Piece(row, begin, last, *cu_seqlens, *longest)


class _Seen(NamedTuple):
    """A tensor that said where documents are, and torch's counter of its changes in place then."""

    version: int | None
    tokens: int  # of the whole rows
    largest: list[int]  # position of each process; of position_ids


_seen = WeakTensorKeyDictionary()  # position_ids or cu_seq_lens of this forward -> _Seen


class Forward:
    """What processes have found out together for the layers of one forward of a model: its documents."""

    def __init__(
        self, config: object, position_ids: object, agreement: "Agreement", documents: RowDocuments | None, before: "Forward | None"
    ):
        self.documents = documents
        self._of_masks = agreement.all_masked
        self._layers: WeakSet[torch.nn.Module] = WeakSet()
        self._masks = [] if before is None else [mask for mask in before._masks if mask() is not None]  # two kinds of layers take turns
        self._config, self._positions, self._version = _reference(config), _reference(position_ids), _version_of_any(position_ids)

    def covers(self, module: torch.nn.Module, config: object, position_ids: object, mask: torch.Tensor | None) -> bool:
        """Whether a layer belongs to it, as every process finds alike: one that comes again does not, nor one with other position_ids, nor,
        where all have masks, one with a mask that none had before. (What only some are given must not count.)"""
        if module in self._layers or config is not self._config():
            return False
        if position_ids is not self._positions() or self._version != _version_of_any(position_ids):
            return False
        return not self._of_masks or self._has_had(mask)

    def add(self, module: torch.nn.Module, mask: torch.Tensor | None) -> None:
        self._layers.add(module)
        if mask is not None and not self._has_had(mask):
            self._masks.append(weakref.ref(mask))

    def _has_had(self, mask: torch.Tensor | None) -> bool:
        return any(known() is mask for known in self._masks)


def _reference(x: object) -> Callable[[], object]:
    """Weak."""
    return (lambda: None) if x is None else weakref.ref(x)


def _version_of_any(x: object) -> int | None:
    return version_of(x) if isinstance(x, torch.Tensor) else None


forwards: dict[int, Forward] = {}  # id of a config, which the layers of a model share -> the last one


def keep(forward: Forward, config: object) -> None:
    """In `forwards`, as long as the config is there: what it holds of documents is memory of the device."""
    if config is not None and id(config) not in forwards:
        weakref.finalize(config, forwards.pop, id(config), None)
    forwards[id(config)] = forward


class Agreement(NamedTuple):
    """Of what processes have been given."""

    any_masked: bool
    all_masked: bool
    looks_packed: bool  # to any


def agree(shards: Shards, part: torch.Size, given: dict[str, bool], masked: bool, looks_packed: bool, device: torch.device) -> Agreement:
    """Before anything that only some processes might refuse, or whose collectives would not fit together. Synchronises.

    Args:
        part: (rows, tokens) of this process.
        given: what it has been given, by name, and all others have to be.
    Raises:
        ValueError: in every process alike: parts or what is given are not the same everywhere.
    """
    mine = torch.tensor([*part, *given.values(), masked, looks_packed], dtype=torch.int64, device=device)
    (all_facts,) = _gather_by_rank(shards, mine)
    *parts, all_masked, packed = all_facts.T.tolist()
    for what, found in zip(("rows", "tokens", *given), parts, strict=True):
        if len(set(found)) > 1:
            advice = f"pad sequences to a multiple of {2 * shards.size}" if what == "tokens" else "call the model alike in all of them"
            name = what if what in ("rows", "tokens") else f"whether there is {what}, 1 or 0,"
            raise ValueError(f"under context parallelism {name} of a part must be the same in every process, got {found}; {advice}")
    return Agreement(any(all_masked), all(all_masked), any(packed))


def documents_of_positions(shards: Shards, position_ids: torch.Tensor, padded: RowDocuments | None = None) -> RowDocuments | None:
    """The documents of whole rows, from position_ids [B, tokens] that were cut as the tokens are; None if each row is one sequence. Brings
    those of all processes together and synchronises.

    Args:
        padded: what the attention_mask says of padding. Its positions may be anything, and the first real one, too.
    Raises:
        ValueError: in every process alike: they were not cut, or are not 0, 1, 2, ... of each document; or the tokens make no whole chunks.
    """
    length = shards.chunk_tokens(position_ids.shape[1])
    (whole,) = _gather(shards, position_ids.to(torch.int64))
    rows, size = whole.shape
    reals = [(0, size)] * rows if padded is None else padded.reals
    follows = F.pad(whole[:, 1:] == whole[:, :-1] + 1, (1, 0)) | (whole == 0)
    for row, (first, end) in enumerate([] if padded is None else reals):
        follows[row, : first + 1], follows[row, end:] = True, True
    wrong = (~follows).nonzero()
    advice = (
        "pass those of the whole sequences as position_ids, torch.arange(S).expand(B, S) or from 0 for each document, and among the "
        "buffers of context_parallel; where there is padding on the left, an attention_mask, too"
    )
    if wrong.numel():
        row, token = wrong[0].tolist()
        before = "the first of its sequence" if token == 0 else f"behind one of position {int(whole[row, token - 1])}"
        raise ValueError(
            "under context parallelism position_ids have to be 0, 1, 2, ... of each whole sequence or document, cut as input_ids are: "
            f"token {token} of row {row}, {before}, has position {int(whole[row, token])}; {advice}"
        )
    anew = torch.arange(position_ids.shape[1], device=whole.device).repeat(shards.size)
    if shards.size > 1 and not shards.balanced and (whole == anew).all():  # balanced, they would not have come so far
        raise ValueError(
            f"under context parallelism position_ids count from 0 to {position_ids.shape[1] - 1} in each of {shards.size} processes, as if "
            f"they had not been cut; {advice}"
        )
    starts = [[first] for first, _ in reals]
    for row, token in (whole == 0).nonzero().tolist():
        first, end = reals[row]
        if first < token < end:
            starts[row].append(token)
    documents = RowDocuments(starts, size, reals) if any(len(row) > 1 for row in starts) else None
    of_chunks = whole.unflatten(1, (-1, length)).amax((0, 2)).tolist() if whole.numel() else [-1] * len(shards.order)
    largest = [max(of_chunks[chunk] for chunk in shards.chunks_of(rank)) for rank in range(shards.size)]
    _seen[position_ids] = _Seen(version_of(position_ids), whole.numel(), largest)
    return documents


def documents_of_cu_seqlens(
    shards: Shards, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, rows: int, tokens: int
) -> RowDocuments | None:
    """The same from cu_seq_lens of `rows` whole rows, one after another, of which each process has `tokens` tokens. Synchronises.

    Raises:
        ValueError: they are not the same, do not rise, or are not those of whole rows.
    """
    whole, bounds = tokens * shards.size, cu_seqlens_q.tolist()
    if bounds != cu_seqlens_k.tolist():
        raise ValueError("under context parallelism queries and keys are the same tokens: cu_seq_lens_q and cu_seq_lens_k have to be equal")
    ends = range(0, (rows + 1) * whole, whole)
    if bounds != sorted(bounds) or not set(bounds).issuperset(ends) or (bounds[0], bounds[-1]) != (ends[0], ends[-1]):
        raise ValueError(
            "under context parallelism cu_seq_lens_q and cu_seq_lens_k have to be those of whole rows, rising, with a bound at each of "
            f"{list(ends)}, got {bounds}; pass them as they were before the tokens were cut, not among the buffers of context_parallel"
        )
    starts: list[list[int]] = [[] for _ in range(rows)]
    for bound in sorted(set(bounds[:-1]) - {ends[-1]}):
        starts[bound // whole].append(bound % whole)
    documents = RowDocuments(starts, whole) if any(len(row) > 1 for row in starts) else None
    _seen[cu_seqlens_q] = _Seen(version_of(cu_seqlens_q), rows * whole, [])
    return documents


def documents_of_mask(shards: Shards, real: torch.Tensor) -> RowDocuments | None:
    """Where the real tokens of whole rows are, from the part of this process: `real`, bool [B, tokens], as read from its attention_mask.
    None without padding. Brings the parts of all processes together and synchronises.

    Raises:
        ValueError: in every process alike: there is padding between the real tokens of a row, or the tokens make no whole chunks.
    """
    shards.chunk_tokens(real.shape[1])
    (whole,) = _gather(shards, real.to(torch.uint8))
    whole = whole.bool().cpu()
    reals = list(zip(*(bounds.tolist() for bounds in packing.real_spans(whole)), strict=True))
    for row, (first, end) in enumerate(reals):
        if not whole[row, first:end].all():
            hole = first + int(whole[row, first:end].int().argmin())
            raise ValueError(
                "under context parallelism attention_mask may have padding on either side of a row, but not between its tokens: token "
                f"{hole} of row {row} is padding, and {first} and {end - 1} are real, where the mask was cut as input_ids were"
            )
    size = whole.shape[1]
    return None if all(real == (0, size) for real in reals) else RowDocuments([[first] for first, _ in reals], size, reals)


def was_cut(position_ids: torch.Tensor | None) -> bool:
    """Whether `documents_of_positions` has seen this tensor as it is now."""
    return _known(position_ids) is not None


def largest_positions(shards: Shards, position_ids: torch.Tensor | None, tokens: int) -> list[int]:
    """Of each process: as `documents_of_positions` has found them, or without position_ids those of one sequence a row."""
    if position_ids is not None:
        return _seen[position_ids].largest
    length = shards.chunk_tokens(tokens)
    return [(max(shards.chunks_of(rank)) + 1) * length - 1 for rank in range(shards.size)]


def is_of_more(cu_seqlens: torch.Tensor | None, tokens: int) -> bool:
    """Whether `documents_of_cu_seqlens` has seen this tensor as it is now, and for more tokens than these."""
    known = _known(cu_seqlens)
    return known is not None and known.tokens > tokens


def _known(x: torch.Tensor | None) -> _Seen | None:
    if not _seen or not isinstance(x, torch.Tensor):
        return None
    known: _Seen | None = _seen.get(x)
    version = version_of(x)  # without one it may have been changed since
    return known if known is not None and version is not None and known.version == version else None


def version_of(x: torch.Tensor) -> int | None:
    """torch's counter of changes in place, which tensors of torch.inference_mode do not have: None."""
    return None if x.is_inference() else x._version


def attention(
    shards: Shards,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window_size: tuple[int, int],
    documents: RowDocuments | None = None,
    **options,
) -> torch.Tensor:
    """`flash_attn_func` over whole sequences, of which each process has and gets its part.

    Args:
        q: [B, S / n, H, D]; k: [B, S / n, Hk, D]; v: [B, S / n, Hk, Dv] of n processes.
        causal, window_size, options: as of `flash_attn_func`, in positions of the whole sequence.
        documents: where rows hold several, which do not see each other, or padding, whose rows of out are zero; causal.
    Returns:
        out [B, S / n, H, Dv].
    Raises:
        ValueError: queries and keys are not the same tokens, or make no whole chunks; documents that are not causal.
    """
    tokens = q.shape[1]
    if k.shape[1] != tokens:
        raise ValueError(
            f"under context parallelism queries and keys have to be the same tokens, got {tokens} queries and {k.shape[1]} keys; "
            "without a cache, and not in cross-attention"
        )
    length, whole = shards.chunk_tokens(tokens), tokens * shards.size
    left, right = (window_size[0], 0) if causal else window_size
    if documents is not None:
        if right != 0:
            raise ValueError(
                "under context parallelism only causal attention knows documents in a row, or padding; to both sides each row has to be "
                "one whole sequence"
            )
        return _attend_documents(shards, documents.pieces(shards, q.device), q.split(length, 1), k, v, window_size=(left, 0), **options)
    # Of each chunk: where the keys end that it sees. Its last query is theirs, or stands so many before.
    ends = [whole if right < 0 else min(whole, (chunk + 1) * length + right) for chunk in shards.chunks]
    gathered = _Gather.apply(shards, [(slice(None), slice(end)) for end in ends], k, v)
    outs = []
    for chunk, end, *tensors in zip(shards.chunks, ends, q.split(length, 1), gathered[::2], gathered[1::2], strict=True):
        behind = end - (chunk + 1) * length
        window = (left + behind if left >= 0 else -1, right - behind if right >= 0 else -1)
        outs.append(flash_attn_func(*tensors, window_size=window, **options))
    return torch.cat(outs, 1)


def _attend_documents(shards: Shards, pieces: list[list[Piece]], chunks: Sequence[torch.Tensor], k, v, **options) -> torch.Tensor:
    spans = [(piece.row, slice(piece.begin, piece.end)) for of_chunk in pieces for piece in of_chunk]
    gathered = iter(_Gather.apply(shards, spans, k, v))
    outs = []
    for of_chunk, queries in zip(pieces, chunks, strict=True):
        rows = [
            flash_attn_varlen_func(queries[piece.row], next(gathered), next(gathered), *piece[3:], **options)  # its cu_seqlens and lengths
            for piece in of_chunk
        ]
        outs.append(torch.stack(rows))
    return torch.cat(outs, 1)


_Span = tuple[int | slice, slice]  # rows, and keys of them


class _Gather(torch.autograd.Function):
    """k and v of all processes in the order of the sequence, [B, S, ...], of each span its part. The gradients of all processes are added
    in float32."""

    @staticmethod
    def forward(ctx, shards: Shards, spans: list[_Span], k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wholes = _gather(shards, k, v)
        ctx.shards, ctx.spans, ctx.wholes = shards, spans, [(whole.shape, whole.dtype) for whole in wholes]
        ctx.set_materialize_grads(False)
        return tuple(whole[span] for span in spans for whole in wholes)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor | None):
        parts = [_add_up(shape, ctx.spans, gradients[i::2], dtype) for i, (shape, dtype) in enumerate(ctx.wholes)]
        return None, None, *(part.to(dtype) for part, (_, dtype) in zip(_scatter(ctx.shards, *parts), ctx.wholes, strict=True))


def _gather(shards: Shards, *parts: torch.Tensor) -> list[torch.Tensor]:
    """[B, S / n, ...] -> [B, S, ...]"""
    wholes = []
    for whole in _gather_by_rank(shards, *parts):
        chunks = dict(zip(shards.order, (chunk for part in whole for chunk in part.chunk(len(shards.chunks), 1)), strict=True))
        wholes.append(torch.cat([chunks[number] for number in range(len(chunks))], 1))
    return wholes


def _gather_by_rank(shards: Shards, *parts: torch.Tensor) -> Iterator[torch.Tensor]:
    """[...] -> [n, ...], one after another as they have come."""
    all_gather = _collective("all_gather_single", "all_gather_into_tensor")
    gathered = [part.new_empty((shards.size, *part.shape)) for part in parts]
    work = [
        all_gather(whole.flatten(0, 1), part.contiguous(), shards.group, async_op=True) for whole, part in zip(gathered, parts, strict=True)
    ]
    for whole, pending in zip(gathered, work, strict=True):
        pending.wait()
        yield whole


def _add_up(shape: torch.Size, spans: list[_Span], gradients: tuple[torch.Tensor | None, ...], dtype: torch.dtype) -> torch.Tensor:
    """[B, S, ...] of the gradients of spans."""
    device = next(x.device for x in gradients if x is not None)
    total = torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32), device=device)
    for span, gradient in zip(spans, gradients, strict=True):
        if gradient is not None:
            total[span] += gradient
    return total


def _scatter(shards: Shards, *wholes: torch.Tensor) -> list[torch.Tensor]:
    """[B, S, ...] -> [B, S / n, ...], the sum over all processes of this one's part."""
    reduce_scatter = _collective("reduce_scatter_single", "reduce_scatter_tensor")
    parts, work = [], []
    for whole in wholes:
        chunks = whole.chunk(len(shards.order), 1)
        by_rank = torch.cat([chunks[number] for number in shards.order], 1).unflatten(1, (shards.size, -1)).transpose(0, 1).contiguous()
        parts.append(torch.empty_like(by_rank[0]))
        work.append((reduce_scatter(parts[-1], by_rank.flatten(0, 1), group=shards.group, async_op=True), by_rank))
    for pending, _ in work:
        pending.wait()
    return parts


def _collective(name: str, before: str) -> Callable:
    """A function of torch.distributed by its name, or what it was called before torch 2.13, which warns about that."""
    return getattr(dist, name, None) or getattr(dist, before)

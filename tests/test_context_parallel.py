"""Sequences that several processes share: the op, models inside torch's context_parallel, and what is refused there. On CPUs, by gloo."""

import contextlib
import copy
import gc
import itertools
import re
import types

import pytest
import ranks
import tiny_models
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel as theirs

import hf_flash2
from hf_flash2 import context_parallel, flash_attn_func, interface, masks, registration, shareable
from hf_flash2.context_parallel import Shards

SEQLEN = 24  # a multiple of twice 2 and twice 3 processes
IGNORED = -100

# Arguments of flash_attn_func, with the number of key heads and the head dim of v.
OPTIONS = {
    "causal": {"causal": True},
    "bidirectional": {},
    "window": {"causal": True, "window_size": (5, 0)},
    "window of one chunk": {"causal": True, "window_size": (0, 0)},
    "bidirectional window": {"window_size": (7, 3)},
    "left alone": {"window_size": (2, -1)},
    "right alone": {"window_size": (-1, 9)},
    "softcap, sinks, scale": {"causal": True, "softcap": 2.0, "softmax_scale": 0.3, "sinks": True},
    "grouped heads, v apart": {"causal": True, "heads_k": 2, "head_dim_v": 24},
    "a head dim to be padded": {"causal": True, "head_dim": 20, "head_dim_v": 20},
    "documents": {"causal": True, "documents": [[0, 5, 6, 17], [0]]},
    "documents that begin with chunks": {"causal": True, "documents": [[0, 4, 6, 12, 18], [0, 8, 16, 20]]},
    "documents of one token": {"causal": True, "documents": [[0], list(range(24))]},
    "documents under a window": {"causal": True, "window_size": (4, 0), "documents": [[0, 9], [0, 1, 13]]},
    "padding": {"causal": True, "documents": [[3], [0]], "reals": [(3, 24), (0, 17)]},
    "padding of whole chunks": {"causal": True, "documents": [[13], [7]], "reals": [(13, 14), (7, 8)]},
    "nothing but padding": {"causal": True, "documents": [[0], [2]], "reals": [(0, 0), (2, 24)]},
    "padding under a window": {"causal": True, "window_size": (4, 0), "documents": [[5], [1]], "reals": [(5, 22), (1, 23)], "sinks": True},
    "documents, all else": {
        "causal": True, "documents": [[0, 3, 14], [0, 11, 23]], "softcap": 2.0, "softmax_scale": 0.3, "sinks": True, "heads_k": 2,
        "head_dim_v": 24,
    },
}  # fmt: skip


@pytest.mark.parametrize("processes", [2, 3])
def test_attention_of_shards_is_that_of_whole_sequences(processes, tmp_path):
    ranks.run("test_context_parallel", "attention_rank", tmp_path, processes)


def attention_rank(rank: int, folder: str) -> None:
    """Every case, balanced and not: out and all gradients of this process's part, in float64."""
    for name, case in OPTIONS.items():
        for balanced in (True, False):
            shards = Shards(dist.group.WORLD, rank, dist.get_world_size(), balanced)
            check_attention(shards, **case, what=f"{name}, balanced {balanced}, rank {rank}")


def check_attention(
    shards,
    what,
    documents=None,
    reals=None,
    causal=False,
    window_size=(-1, -1),
    sinks=False,
    heads_k=4,
    head_dim=16,
    head_dim_v=16,
    **options,
) -> None:
    torch.manual_seed(0)
    shapes = [(2, SEQLEN, 4, head_dim), (2, SEQLEN, heads_k, head_dim), (2, SEQLEN, heads_k, head_dim_v)]
    wholes = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    dout = torch.randn(2, SEQLEN, 4, head_dim_v, dtype=torch.float64)
    s_aux = torch.randn(4, dtype=torch.float64, requires_grad=True) if sinks else None
    leaves = wholes + [s_aux] * sinks
    if documents is None:
        expected = flash_attn_func(*wholes, causal=causal, window_size=window_size, s_aux=s_aux, **options)
    else:
        expected = torch.zeros(2, SEQLEN, 4, head_dim_v, dtype=torch.float64)
        for row, starts in enumerate(documents):
            first, end = (0, SEQLEN) if reals is None else reals[row]
            for start, stop in itertools.pairwise([first, *starts[1:], end]):
                one = (x[row : row + 1, start:stop] for x in wholes)
                out = flash_attn_func(*one, causal=causal, window_size=window_size, s_aux=s_aux, **options)
                expected = expected.slice_scatter(expected[row : row + 1].slice_scatter(out, 1, start, stop), 0, row, row + 1)
        documents = context_parallel.RowDocuments(documents, SEQLEN, reals)
    gradients = torch.autograd.grad(expected, leaves, dout)

    mine = shards.positions(SEQLEN // shards.size, torch.device("cpu"))
    parts = [x.detach()[:, mine].requires_grad_() for x in wholes]
    out = context_parallel.attention(shards, *parts, causal, window_size, documents, s_aux=s_aux, **options)
    torch.testing.assert_close(out, expected[:, mine], rtol=1e-9, atol=1e-9, msg=lambda text: f"out, {what}: {text}")
    found = torch.autograd.grad(out, parts + [s_aux] * sinks, dout[:, mine])
    for i, (part, whole) in enumerate(zip(found, gradients, strict=True)):
        if i == 3:  # of a parameter, which processes add up themselves
            dist.all_reduce(part)
        cut = whole if i == 3 else whole[:, mine]
        torch.testing.assert_close(part, cut, rtol=1e-9, atol=1e-9, msg=lambda text, i=i: f"gradient {i}, {what}: {text}")


# --------------------------------------------------------------------------------------------------------------------------------- models

WAYS = {
    "flag": lambda model: model.set_attn_implementation("hf_flash2"),
    "patch": lambda model: hf_flash2.patch(model),
    "packed": lambda model: hf_flash2.patch(model, packed=True),
}
CASES = [("llama", "flag"), ("llama", "patch"), ("llama", "packed"), ("mistral", "patch"), ("gpt2", "flag"), ("gpt2", "patch")]


def test_models_train_on_shared_sequences_as_on_whole_ones(tmp_path):
    ranks.run("test_context_parallel", "models_rank", tmp_path)


def models_rank(rank: int, folder: str) -> None:
    for family, way in CASES:
        for checkpointing in (False, True):
            check_model(family, way, checkpointing, f"{family}, {way}, checkpointing {checkpointing}, rank {rank}", batch)


@pytest.mark.parametrize("processes", [2, 3])
def test_models_train_on_shared_rows_of_documents_as_on_whole_ones(processes, tmp_path):
    ranks.run("test_context_parallel", "documents_rank", tmp_path, processes)


def documents_rank(rank: int, folder: str) -> None:
    """Told apart by position_ids, and by the cu_seq_lens of whole rows. Transformers 4 hands neither to the layers of GPT-2."""
    cases = [
        ("llama", "flag", False), ("llama", "patch", False), ("llama", "packed", False), ("mistral", "patch", False),
        ("llama", "flag", True),
    ]  # fmt: skip
    if not transformers.__version__.startswith("4."):
        cases += [("gpt2", "flag", True), ("gpt2", "patch", True)]
    for family, way, said in cases:
        for checkpointing in (False, True):
            what = f"{family}, {way}, cu_seq_lens {said}, checkpointing {checkpointing}, rank {rank}"
            check_model(family, way, checkpointing, what, packed_batch, said)


@pytest.mark.skipif(tiny_models.VERSION < (5, 0), reason="the layers of its GPT-2 are not told position_ids")
@pytest.mark.parametrize("processes", [2, 3])
def test_a_detached_mask_of_a_part_without_a_boundary(processes, tmp_path):
    """Where documents begin in the first and the last chunk alone, the other processes have masks in which nothing is padded, and layers
    that run again under reentrant checkpointing get those without what they said of themselves."""
    ranks.run("test_context_parallel", "detached_rank", tmp_path, processes)


def detached_rank(rank: int, folder: str) -> None:
    for way in ("flag", "patch"):
        check_model("gpt2", way, "reentrant", f"{way}, rank {rank}", lambda: packed_batch((21, 3, 22, 2)))


@pytest.mark.parametrize("processes", [2, 3])
def test_models_train_on_shared_rows_with_padding_as_on_whole_ones(processes, tmp_path):
    ranks.run("test_context_parallel", "padding_rank", tmp_path, processes)


def padding_rank(rank: int, folder: str) -> None:
    """Of tokens of one process alone, too, which the others have to know of."""
    for family, way in CASES:
        for make in (
            lambda: padded_batch((3, 24), (0, 13)),
            lambda: padded_batch((0, 24), (0, 23)),
            lambda: padded_batch((0, 24), (9, 24)),
        ):
            check_model(family, way, False, f"{family}, {way}, rank {rank}", make)
    check_model("llama", "flag", True, f"checkpointing, rank {rank}", lambda: padded_batch((3, 24), (0, 13)))


def check_model(family: str, way: str, checkpointing: bool | str, what: str, make, said: bool = False) -> None:
    """make: the whole batch. said: our models are given cu_seq_lens, too; eager attention tells documents apart by position_ids alone."""
    eager = tiny_models.model(family, "eager").train()
    model = copy.deepcopy(eager)
    report = WAYS[way](model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": True} if checkpointing == "reentrant" else None)
    whole = {name: x for name, x in make().items() if name not in LENGTHS}
    expected = eager(**whole, use_cache=False).loss
    expected.backward()

    shared = {name: x for name, x in make().items() if said or name not in LENGTHS}
    with sharing(shared, tuple(set(shared) - set(LENGTHS))):
        assert shared["input_ids"].shape == (2, SEQLEN // dist.get_world_size())
        loss = model(**shared, use_cache=False).loss
        labels = (shared["shift_labels"] != IGNORED).sum()
        total = labels.clone()
        dist.all_reduce(total)
        loss = loss * labels / total  # its part of the mean over all: keys get gradients from the losses of others
        loss.backward()
    mean = loss.detach()
    dist.all_reduce(mean)
    torch.testing.assert_close(mean, expected.detach(), rtol=1e-5, atol=1e-5, msg=lambda text: f"loss, {what}: {text}")
    for (name, parameter), other in zip(model.named_parameters(), eager.parameters(), strict=True):
        dist.all_reduce(parameter.grad)
        scale = other.grad.abs().max().item()
        torch.testing.assert_close(
            parameter.grad, other.grad, rtol=0, atol=1e-5 * scale, msg=lambda text, name=name: f"gradient of {name}, {what}: {text}"
        )
    if report is not None:
        routes = {route for calls in report.layers.values() for route in calls}
        assert routes == {"context parallel"}, (routes, what)


def batch() -> dict[str, torch.Tensor]:
    """Whole sequences with all that is cut."""
    ids = torch.randint(3, tiny_models.VOCABULARY, (2, SEQLEN), generator=torch.Generator().manual_seed(1))
    return {
        "input_ids": ids, "labels": ids.clone(), "shift_labels": F.pad(ids[:, 1:], (0, 1), value=IGNORED),
        "position_ids": torch.arange(SEQLEN).expand(2, -1).contiguous(), "attention_mask": torch.ones_like(ids),
    }  # fmt: skip


LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def packed_batch(lengths: tuple[int, ...] = (9, 14, 5, 12, 7, 1)) -> dict[str, torch.Tensor | int]:
    """Rows of documents as PackingCollator makes them, with what each token predicts."""
    generator = torch.Generator().manual_seed(2)
    documents = [{"input_ids": torch.randint(3, tiny_models.VOCABULARY, (n,), generator=generator)} for n in lengths]
    given = hf_flash2.PackingCollator(SEQLEN)(documents)
    assert given["input_ids"].shape == (2, SEQLEN)
    return given | {"shift_labels": F.pad(given["labels"][:, 1:], (0, 1), value=IGNORED)}


def padded_batch(*reals: tuple[int, int]) -> dict[str, torch.Tensor]:
    """As batch(), but of each row only the tokens [first, end) are real; positions count from the first, and are 1 behind the last."""
    given = batch()
    for row, (first, end) in enumerate(reals):
        given["position_ids"][row] = (torch.arange(SEQLEN) - first).clamp(min=0)
        given["position_ids"][row, end:] = 1
        given["attention_mask"][row] = (torch.arange(SEQLEN) >= first) & (torch.arange(SEQLEN) < end)
        given["labels"][row, : first + 1], given["labels"][row, end:] = IGNORED, IGNORED  # padding does not predict the first
    return given | {"shift_labels": F.pad(given["labels"][:, 1:], (0, 1), value=IGNORED)}


@contextlib.contextmanager
def sharing(buffers: dict[str, torch.Tensor], cut: tuple[str, ...] | None = None, restored: bool = False):
    """Inside torch's context_parallel, with these buffers cut in place, and whole again behind it if they are to be."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    chosen = [x for name, x in buffers.items() if cut is None or name in cut]
    with theirs(mesh, buffers=chosen, buffer_seq_dims=[1] * len(chosen), no_restore_buffers=set() if restored else set(chosen)):
        yield


# -------------------------------------------------------------------------------------------------------------------------------- refusals


def test_what_cannot_be_shared_is_refused(tmp_path):
    ranks.run("test_context_parallel", "refusals_rank", tmp_path)


def refusals_rank(rank: int, folder: str) -> None:
    """Every process finds out by itself, so that none waits for another."""
    model = tiny_models.model("llama", "hf_flash2").train()

    def refused(match: str, change, cut: tuple[str, ...] | None = None, **arguments) -> None:
        given = batch()
        change(given)
        with sharing(given, cut), pytest.raises(ValueError, match=match):
            model(**given, **{"use_cache": False} | arguments)

    refused("token 8 of row 1 is padding, and 0 and 23 are real", lambda x: x["attention_mask"][1, 8].zero_())
    # Counted from 0 in each process: chunks 0 and 3 of the first follow each other, and 1 and 2 of the second.
    refused("token 18 of row 0, behind one of position 11, has position 6; pass those", lambda x: x.pop("position_ids"))
    refused("token 0 of row 1, the first of its sequence, has position 3", lambda x: x["position_ids"][1].add_(3))
    documents = torch.cat((torch.arange(3), torch.arange(SEQLEN - 3))).expand(2, -1)
    refused("to keep documents apart leave the mask out", lambda x: x["position_ids"].copy_(documents))

    def four_dimensions(given):
        given["attention_mask"] = torch.ones(2, 1, SEQLEN // 2, SEQLEN // 2, dtype=torch.bool)

    cut = ("input_ids", "labels", "shift_labels", "position_ids")
    refused("a 4-D attention mask was given", four_dimensions, cut)

    def said(bounds_q: list[int], bounds_k: list[int] | None) -> dict:
        longest = {"max_length_q": SEQLEN, "max_length_k": SEQLEN}
        found = {"cu_seq_lens_q": bounds_q, "cu_seq_lens_k": bounds_k}
        return longest | {name: None if x is None else torch.tensor(x, dtype=torch.int32) for name, x in found.items()}

    whole, part = [0, 7, SEQLEN, 2 * SEQLEN], [0, 7, SEQLEN // 2, SEQLEN]
    refused(r"a bound at each of \[0, 24, 48\], got \[0, 7, 12, 24\]", lambda x: x.pop("attention_mask"), **said(part, part))
    refused(r"a bound at each of \[0, 24, 48\], got \[0, 30, 48\]", lambda x: None, **said([0, 30, 48], [0, 30, 48]))
    refused("have to be equal", lambda x: None, **said(whole, [0, 8, SEQLEN, 2 * SEQLEN]))
    refused("got only cu_seq_lens_q", lambda x: None, **said(whole, None))
    refused("attention_mask has padding, and cu_seq_lens_q/k say", lambda x: x["attention_mask"][0, 0].zero_(), **said(whole, whole))

    shards = Shards(dist.group.WORLD, rank, 2, True)
    q, k = torch.randn(1, 4, 2, 16), torch.randn(1, 6, 2, 16)
    with pytest.raises(ValueError, match="got 4 queries and 6 keys"):
        context_parallel.attention(shards, q, k, k, True, (-1, -1))
    with pytest.raises(ValueError, match="two for each process, but this one has 5 tokens"):
        context_parallel.attention(shards, *(torch.randn(1, 5, 2, 16) for _ in range(3)), True, (-1, -1))
    documents = context_parallel.RowDocuments([[0, 3]], 8)
    with pytest.raises(ValueError, match="only causal attention knows documents in a row, or padding"):
        context_parallel.attention(shards, q, q, q, False, (-1, -1), documents)
    # Without two chunks for each process, forgotten position_ids look like documents of one length.
    with pytest.raises(ValueError, match="count from 0 to 4 in each of 2 processes, as if they had not been cut"):
        context_parallel.documents_of_positions(shards._replace(balanced=False), torch.arange(5).expand(3, -1))

    rotation = "rope_parameters" if tiny_models.VERSION >= (5, 0) else "rope_scaling"
    before, longest = getattr(model.config, rotation), model.config.max_position_embeddings
    setattr(model.config, rotation, {"rope_type": "dynamic", "factor": 2.0})
    model.config.max_position_embeddings = SEQLEN - 1
    refused(r"by the largest of a forward \(rope_type dynamic, from 23 on\), and those of processes are \[23, 17\]", lambda x: None)
    setattr(model.config, rotation, before)
    model.config.max_position_embeddings = longest

    # Layers that run again in a backward outside would see their own part alone.
    model.gradient_checkpointing_enable()
    given = batch()
    with sharing(given):
        loss = model(**given, use_cache=False).loss
    with pytest.raises(ValueError, match="outside of context_parallel, where the others cannot be reached; backward belongs inside"):
        loss.backward()
    model(**batch(), use_cache=False).loss.backward()  # whole sequences again


def test_what_processes_have_to_agree_on(tmp_path):
    ranks.run("test_context_parallel", "agreement_rank", tmp_path)


def agreement_rank(rank: int, folder: str) -> None:
    """Where one of them would refuse what the others would take, or their collectives would not fit together, all of them refuse."""
    model = tiny_models.model("llama", "hf_flash2").eval()

    def refused(match: str, model, given: dict[str, torch.Tensor]) -> None:
        with sharing(given), pytest.raises(ValueError, match=match):
            model(**given, use_cache=False)

    # As torch cuts a length that is no multiple of the processes, where it does not refuse it itself.
    odd = {name: batch()[name][:, : 12 - rank] for name in ("input_ids", "position_ids")}
    uneven = r"tokens of a part must be the same in every process, got \[12, 11\]; pad sequences to a multiple of 4"
    with sharing({"cut": torch.zeros(1, SEQLEN)}), pytest.raises(ValueError, match=uneven):
        model(**odd, use_cache=False)
    # A mask that only one has, as a program may leave out masks of ones: in one context, with position_ids that stay.
    whole = {name: x for name, x in padded_batch((0, 20), (0, SEQLEN)).items() if name in ("input_ids", "attention_mask")}
    whole["position_ids"] = batch()["position_ids"]
    mine = Shards(dist.group.WORLD, rank, 2, True).positions(SEQLEN // 2, torch.device("cpu"))
    with torch.no_grad():
        for change in ({"attention_mask": None}, {}):
            expected = model(**whole | change, use_cache=False).logits[:, mine]
            given = {name: x.clone() for name, x in whole.items()}
            with sharing(given):
                masks = given["attention_mask"] if rank == 0 else None  # those of the other are ones
                model(**given | {"attention_mask": None}, use_cache=False)
                found = model(**given | ({"attention_mask": masks} | change), use_cache=False).logits
            real = given["attention_mask"].bool()
            torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)
    # Its layers are not told position_ids, which jump in the part of the first process alone.
    if hasattr(transformers, "GPTBigCodeForCausalLM") and tiny_models.VERSION >= (5, 0):
        sizes = {"vocab_size": tiny_models.VOCABULARY, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 64}
        config = transformers.GPTBigCodeConfig(**sizes)
        blind = transformers.GPTBigCodeForCausalLM._from_config(config, attn_implementation="hf_flash2").eval()
        one_row = {name: batch()[name][:1].clone() for name in ("input_ids", "position_ids")}
        refused("position_ids look as if there were several documents", blind, one_row)
        masked = one_row | {"input_ids": batch()["input_ids"][:1].clone(), "position_ids": torch.arange(SEQLEN)[None]}
        masked["attention_mask"] = torch.ones_like(masked["input_ids"])
        with sharing(masked), torch.no_grad():
            blind(**masked, use_cache=False)


def test_tensors_of_inference_mode_are_looked_at_in_every_forward(tmp_path):
    """As nothing counts how often they have been changed."""
    ranks.run("test_context_parallel", "inference_rank", tmp_path)


@torch.inference_mode()
def inference_rank(rank: int, folder: str) -> None:
    model = tiny_models.model("llama", "hf_flash2").eval()
    ids, positions = batch()["input_ids"][:1], torch.empty(1, SEQLEN, dtype=torch.int64)
    mine = Shards(dist.group.WORLD, rank, 2, True).positions(SEQLEN // 2, torch.device("cpu"))
    for documents in ([SEQLEN], [7, SEQLEN - 7]):
        given = {"input_ids": ids.clone(), "position_ids": positions.copy_(torch.cat([torch.arange(n) for n in documents])[None])}
        expected = model(**{name: x.clone() for name, x in given.items()}, use_cache=False).logits
        with sharing(given, restored=True):
            torch.testing.assert_close(model(**given, use_cache=False).logits, expected[:, mine], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(**given, use_cache=False).logits, expected)  # of the same tensors, whole again


def test_one_row_without_a_mask_is_no_row_of_documents(tmp_path):
    """Transformers takes the jump from one chunk to the next for the end of a document."""
    ranks.run("test_context_parallel", "one_row_rank", tmp_path)


def one_row_rank(rank: int, folder: str) -> None:
    model = tiny_models.model("llama", "hf_flash2").eval()
    given = {name: x[:1].clone() for name, x in batch().items() if name in ("input_ids", "position_ids")}
    expected = model(**given, use_cache=False).logits
    mine = Shards(dist.group.WORLD, rank, 2, True).positions(SEQLEN // 2, torch.device("cpu"))
    with torch.no_grad():
        with sharing(given, restored=True):
            torch.testing.assert_close(model(**given, use_cache=False).logits, expected[:, mine], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model(**given, use_cache=False).logits, expected)  # of the same tensors, whole again


_HYBRID = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    "family, arguments, reason",
    [
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "layers beside attention that mix tokens"),
        ("Lfm2", {"layer_types": ["full_attention", "full_attention"]}, None),
        ("FalconH1", {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16}, "layers beside attention that mix tokens"),
        ("Qwen2", {}, None),
        ("Bart", {"d_model": 64, "decoder_layers": 1, "decoder_attention_heads": 4}, "its model takes no position_ids"),
    ],
)
def test_models_that_share_more_than_attention_are_refused(family, arguments, reason):
    if not hasattr(transformers, f"{family}ForCausalLM"):
        pytest.skip(f"this Transformers has no {family}")
    config = getattr(transformers, f"{family}Config")(**(_HYBRID if family != "Bart" else {}) | arguments)
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(config, attn_implementation="hf_flash2")
    layers = [module for module in model.modules() if type(module).__name__.endswith("Attention")]
    assert layers
    for layer in layers:
        found = shareable.reason_not_shareable(layer)
        assert found is None if reason is None else reason in found
    if reason is not None:
        q = torch.randn(1, 12, 2, 16)
        with pytest.raises(ValueError, match=f"cannot run under context parallelism: .*{reason}"):
            interface._check_shards(layers[0], Shards(None, 0, 2, True), q, q, None, True, {})


def test_rotations_by_length_have_to_be_those_of_all_processes():
    """Of LongRoPE all on one side of its limit; of dynamic NTK, which goes on behind it, all before it, or alike."""

    def reason(rope: dict, *largest: int, **config) -> str | None:
        return shareable.reason_rotations_differ(types.SimpleNamespace(rope_parameters=rope, **config), list(largest))

    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 16}
    assert reason(longrope, 11, 15) is None and reason(longrope, 16, 24) is None
    assert "rope_type longrope" in reason(longrope, 15, 16) and "rope_type longrope" in reason({"full_attention": longrope}, 3, 17)
    dynamic = {"rope_type": "dynamic"}
    assert reason(dynamic, 12, 15, max_position_embeddings=16) is None and reason(dynamic, 19, 19, max_position_embeddings=16) is None
    assert "from 16 on" in reason(dynamic, 20, 24, max_position_embeddings=16)
    assert reason({"rope_type": "yarn"}, 12, 24, max_position_embeddings=16) is None
    for balanced in (True, False):
        shards = Shards(None, 0, 4, balanced)
        parts = [shards._replace(rank=rank).positions(6, torch.device("cpu")) for rank in range(4)]
        assert context_parallel.largest_positions(shards, None, 6) == [int(part.max()) for part in parts]


def test_a_forward_ends_with_other_layers_positions_masks_and_configs():
    """A config may have the id of one that is gone."""
    config, positions, mask = transformers.LlamaConfig(), torch.arange(4)[None], torch.ones(1, 4)
    masked = context_parallel.Agreement(True, True, False)
    first, second = torch.nn.Identity(), torch.nn.Identity()
    forward = context_parallel.Forward(config, positions, masked, None, before=None)
    forward.add(first, mask)
    assert forward.covers(second, config, positions, mask) and not forward.covers(first, config, positions, mask)
    assert not forward.covers(second, transformers.LlamaConfig(), positions, mask)
    assert not forward.covers(second, config, positions.clone(), mask)
    assert not forward.covers(second, config, positions, mask.clone())
    assert context_parallel.Forward(config, positions, masked, None, before=forward).covers(first, config, positions, mask)
    positions.add_(0)
    assert not forward.covers(second, config, positions, mask)


def test_a_forward_is_kept_as_long_as_its_config():
    config = transformers.LlamaConfig()
    key = id(config)
    forward = context_parallel.Forward(config, None, context_parallel.Agreement(False, False, False), None, before=None)
    for _ in range(2):
        context_parallel.keep(forward, config)
    assert context_parallel.forwards[key] is forward
    del config
    gc.collect()
    assert key not in context_parallel.forwards


def test_largest_positions_of_documents(monkeypatch):
    whole = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 0], [0, 1, 2, 0, 1, 2, 3, 0, 1, 0, 1, 2]])
    monkeypatch.setattr(context_parallel, "_gather", lambda *_: (whole,))
    shards, positions = Shards(None, 0, 2, True), whole[:, :6].clone()
    context_parallel.documents_of_positions(shards, positions)
    assert context_parallel.largest_positions(shards, positions, 6) == [5, 4]  # chunks of 3: 0 and 3, 1 and 2


# ----------------------------------------------------------------------------------------------------------------------- how it is found


def test_it_is_active_inside_alone():
    assert context_parallel.active() is None


def test_somebody_elses_sdpa_is_not_context_parallelism(monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: None)
    assert context_parallel.active() is None


def test_a_context_that_does_not_show_its_processes_is_refused(monkeypatch):
    function = types.FunctionType((lambda: None).__code__, {"__name__": "torch.distributed.tensor.experimental._attention"})
    assert function.__module__ == "torch.distributed.tensor.experimental._attention"
    monkeypatch.setattr(F, "scaled_dot_product_attention", function)
    with pytest.raises(ValueError, match="does not show over which processes"):
        context_parallel.active()


@pytest.mark.parametrize("module", ["torch.distributed.tensor.parallel", "torch.distributed.of_tomorrow"])
def test_one_that_torch_has_moved_is_refused_too(module, monkeypatch):
    """Else each process would attend to its own tokens alone."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", types.FunctionType((lambda: None).__code__, {"__name__": module}))
    with pytest.raises(ValueError, match="does not show over which processes"):
        context_parallel.active()


def test_documents_are_cut_as_each_caller_shares_them():
    bounds = torch.tensor([0, 3, 16], dtype=torch.int32)
    for balanced in (True, False, True):
        shards = Shards(None, 0, 2, balanced)
        found = context_parallel.documents_of_cu_seqlens(shards, bounds, bounds, 1, 8)
        wanted = context_parallel.RowDocuments([[0, 3]], 16)
        seen, expected = ([(p.begin, p.end) for p in itertools.chain(*x.pieces(shards, bounds.device))] for x in (found, wanted))
        assert seen == expected
    with pytest.raises(ValueError, match="with a bound at each of"):  # and not those of other rows
        context_parallel.documents_of_cu_seqlens(Shards(None, 0, 2, True), bounds, bounds, 1, 4)
    with torch.inference_mode():
        pieces = context_parallel.RowDocuments([[0, 3]], 16).pieces(Shards(None, 0, 2, True), bounds.device)
    assert not any(piece.cu_seqlens_q.is_inference() for piece in itertools.chain(*pieces))


def documents_of_bounds(*bounds: int) -> context_parallel.RowDocuments | None:
    """Of one row of 24 tokens that two processes share."""
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    return context_parallel.documents_of_cu_seqlens(Shards(None, 0, 2, True), cu_seqlens, cu_seqlens, 1, 12)


def test_documents_begin_where_cu_seq_lens_say():
    assert documents_of_bounds(0, 24) is None
    for bounds in ((0, 7, 24), (0, 7, 24, 24), (0, 7, 7, 24)):  # some are empty
        assert documents_of_bounds(*bounds).starts == [[0, 7]]


@pytest.mark.parametrize("bounds", [(), (0, 15, 7, 24), (0, -3, 24), (-3, 0, 24), (0, 30, 24), (0, 24, 30), (0, 12), (5, 24)], ids=str)
def test_cu_seq_lens_that_are_not_those_of_whole_rows_are_refused(bounds):
    got = re.escape(f"with a bound at each of [0, 24], got {list(bounds)};")
    with pytest.raises(ValueError, match="have to be those of whole rows, rising, " + got):
        documents_of_bounds(*bounds)


def test_positions_that_have_changed_are_looked_at_anew(monkeypatch):
    monkeypatch.setattr(context_parallel, "_gather", lambda shards, x: (x,))
    shards, positions = Shards(None, 0, 1, True), torch.arange(8)[None]
    assert context_parallel.documents_of_positions(shards, positions) is None and context_parallel.was_cut(positions)
    positions[:, 4:] -= 4
    assert not context_parallel.was_cut(positions)
    assert context_parallel.documents_of_positions(shards, positions).starts == [[0, 4]]


def test_where_the_real_tokens_of_whole_rows_are(monkeypatch):
    monkeypatch.setattr(context_parallel, "_gather", lambda shards, x: (x,))
    shards, real = Shards(None, 0, 1, True), torch.tensor([[0, 1, 1, 0, 1, 0], [0] * 6]).bool()
    with pytest.raises(ValueError, match="token 3 of row 0 is padding, and 1 and 4 are real"):
        context_parallel.documents_of_mask(shards, real)
    real[0, 3] = True
    padded = context_parallel.documents_of_mask(shards, real)
    assert padded.reals == [(1, 5), (0, 0)]
    positions = torch.tensor([[9, 7, 8, 9, 10, 3], [5] * 6])  # in the padding anything
    assert context_parallel.documents_of_positions(shards, positions, padded) is None


def test_documents_of_one_length_for_each_process(monkeypatch):
    """Rows look as if they had not been cut then; where work is balanced, uncut ones would look otherwise."""
    whole = torch.arange(8).repeat(1, 2)
    monkeypatch.setattr(context_parallel, "_gather", lambda shards, positions: (whole,))
    found = context_parallel.documents_of_positions(Shards(None, 0, 2, True), torch.arange(8)[None])
    assert found.starts == [[0, 8]]
    with pytest.raises(ValueError, match="as if they had not been cut"):
        context_parallel.documents_of_positions(Shards(None, 0, 2, False), torch.arange(8)[None])
    uncut = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7]])  # of both processes, put together as balanced parts
    monkeypatch.setattr(context_parallel, "_gather", lambda shards, positions: (uncut,))
    with pytest.raises(ValueError, match="have to be 0, 1, 2"):
        context_parallel.documents_of_positions(Shards(None, 0, 2, True), torch.arange(8)[None])


def test_chunks_of_processes():
    four = [Shards(None, rank, 4, True) for rank in range(4)]
    assert [shards.chunks for shards in four] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert four[1].positions(6, torch.device("cpu")).tolist() == [3, 4, 5, 18, 19, 20]
    assert Shards(None, 2, 4, False).positions(3, torch.device("cpu")).tolist() == [6, 7, 8]


def test_pieces_cover_every_query_and_the_keys_they_bring():
    """What lies outside of all sequences is undefined on a GPU, in out and in the gradients of the keys."""
    for shards in [Shards(None, rank, 2, balanced) for rank in (0, 1) for balanced in (True, False)]:
        length = 24 // len(shards.order)
        padded = context_parallel.RowDocuments([[3], [0], [9], [0]], 24, [(3, 17), (0, 24), (9, 10), (0, 0)])
        documents = context_parallel.RowDocuments([[0, 5, 6, 17], [0, 6, 12], [0], [0, 23]], 24)
        for rows in (padded, documents):
            for piece in itertools.chain(*rows.pieces(shards, torch.device("cpu"))):
                for bounds, end, longest in (
                    (piece.cu_seqlens_q.tolist(), length, piece.max_seqlen_q),
                    (piece.cu_seqlens_k.tolist(), piece.end - piece.begin, piece.max_seqlen_k),
                ):
                    assert bounds == sorted(bounds) and (bounds[0], bounds[-1]) == (0, end) and end > 0, (shards, piece)
                    assert longest == max(b - a for a, b in itertools.pairwise(bounds))


def test_trainer_takes_our_name_for_context_parallelism():
    from transformers import Trainer

    registration._join_trainer()
    prepare = getattr(Trainer, "_prepare_context_parallel_inputs", None)
    if prepare is None:
        pytest.skip("this Transformers has no context parallelism in its Trainer")
    parallelism = types.SimpleNamespace(cp_enabled=True, cp_backend="torch", sp_backend="deepspeed", sp_enabled=False)
    accelerator = types.SimpleNamespace(parallelism_config=parallelism, maybe_context_parallel=contextlib.nullcontext)
    trainer = types.SimpleNamespace(accelerator=accelerator)
    for implementation, taken in (("hf_flash2", True), ("sdpa", True), ("eager", False)):
        model = tiny_models.model("llama", implementation)
        inputs = batch()
        del inputs["attention_mask"]
        with contextlib.nullcontext() if taken else pytest.raises(ValueError, match="only with SDPA"):
            _, inputs = prepare(trainer, model, inputs)
            assert "shift_labels" in inputs
        assert model.config._attn_implementation == implementation


def test_accelerate_leaves_masks_and_windows_to_us():
    accelerator = pytest.importorskip("accelerate.accelerator")
    if not hasattr(accelerator, "_attach_context_parallel_hooks"):
        pytest.skip("this accelerate has no context parallelism")

    def hooks(model) -> int:
        accelerator._attach_context_parallel_hooks(model)
        return sum(len(module._forward_pre_hooks) for module in model.modules())

    registration._join_accelerate()
    assert hooks(tiny_models.model("llama", "hf_flash2")) == hooks(tiny_models.model("mistral", "hf_flash2")) == 0
    sdpa = tiny_models.model("llama", "sdpa")
    hf_flash2.patch(sdpa)
    assert hooks(sdpa) == 0
    hf_flash2.unpatch(sdpa)
    assert hooks(sdpa) > 0


@pytest.mark.parametrize("way", ["flag", "patch"])
def test_masks_are_ours_too_where_accelerate_came_first(way):
    """Its hooks are on the layers by then, put there by a function that may not have been wrapped yet."""
    accelerator = pytest.importorskip("accelerate.accelerator")
    if not hasattr(accelerator, "_attach_context_parallel_hooks"):
        pytest.skip("this accelerate has no context parallelism")
    registration._join_accelerate()
    inputs = {"input_ids": tiny_models.tokens(), "attention_mask": tiny_models.attention_mask("left")}
    model, sdpa = tiny_models.model("llama", "sdpa"), tiny_models.model("llama", "sdpa")
    accelerator._attach_context_parallel_hooks._hf_flash2_wraps(model)
    WAYS[way](model)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(model(**inputs).logits[real], sdpa(**inputs).logits[real], rtol=1e-4, atol=1e-4)
    model.set_attn_implementation("sdpa")
    unmasked = sdpa(input_ids=inputs["input_ids"], position_ids=torch.arange(tiny_models.SEQLEN)[None]).logits
    torch.testing.assert_close(model(**inputs).logits, unmasked, rtol=1e-4, atol=1e-4)  # of other attention it takes them still


def test_a_model_whose_text_alone_is_ours_is_known():
    """As one does whose images are seen by another attention."""
    text = types.SimpleNamespace(_attn_implementation="hf_flash2")
    config = types.SimpleNamespace(_attn_implementation_internal="eager", text_config=text)
    model = types.SimpleNamespace(config=config)
    attached, seen = [], []
    registration._keeping_masks(attached.append)(model)
    registration._sharing(lambda trainer, model: seen.append(model.config._attn_implementation_internal))(None, model)
    assert not attached and seen == ["sdpa"] and config._attn_implementation_internal == "eager"
    text._attn_implementation = "sdpa"
    registration._keeping_masks(attached.append)(model)
    assert attached == [model]


def test_a_mask_of_documents_counts_where_positions_cannot_be_seen(monkeypatch):
    """Layers of GPT-2 are not given the position_ids that its masks were made from."""
    monkeypatch.setattr(context_parallel, "agree", lambda *args: context_parallel.Agreement(False, False, args[4]))
    q = torch.randn(1, 12, 2, 16)
    documents = torch.ones(1, 2, 12, dtype=torch.uint8)
    with pytest.raises(ValueError, match="pass cu_seq_lens_q and cu_seq_lens_k of the whole rows, if not, an attention_mask of ones"):
        interface._check_shards(torch.nn.Identity(), Shards(None, 0, 2, True), q, q, documents, True, {})


def test_a_mask_made_while_compiling_says_no_more_than_positions(monkeypatch):
    """Nobody could look at them then; here they are looked at, or cu_seq_lens say, as the mask's own reason advises."""
    monkeypatch.setattr(context_parallel, "agree", lambda *args: context_parallel.Agreement(False, False, args[4]))
    monkeypatch.setattr(context_parallel, "_gather", lambda *_: [torch.arange(24).unsqueeze(0)])  # what two processes would bring together
    layer, q, shards = torch.nn.Identity(), torch.randn(1, 12, 2, 16), Shards(None, 0, 2, True)
    mask = masks.attach(torch.ones(1, 1, 12, 12, dtype=torch.bool), masks.MAYBE_DOCUMENTS)
    given = {"position_ids": shards.positions(12, q.device).unsqueeze(0)}
    assert interface._check_shards(layer, shards, q, q, mask, True, dict(given)) is None
    bounds = torch.tensor([0, 5, 24], dtype=torch.int32)
    given |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    assert interface._check_shards(layer, shards, q, q, mask, True, given).starts == [[0, 5]]
    with pytest.raises(ValueError, match="pass cu_seq_lens_q and cu_seq_lens_k of the whole rows, if not, an attention_mask of ones"):
        interface._check_shards(layer, shards, q, q, mask, True, {})


def test_cu_seqlens_of_whole_rows_are_refused_outside():
    """As layers that run again in a backward outside would bring them, where they know no positions."""
    bounds = torch.tensor([0, 5, 24], dtype=torch.int32)
    said = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 24, "max_length_k": 24}
    assert context_parallel.documents_of_cu_seqlens(Shards(None, 0, 2, True), bounds, bounds, 1, 12).starts == [[0, 5]]
    part, whole = torch.randn(1, 12, 2, 16), torch.randn(1, 24, 2, 16)
    with pytest.raises(ValueError, match="outside of context_parallel, where the others cannot be reached; backward belongs inside"):
        interface.attend(torch.nn.Identity(), part, part, part, None, causal=True, **said)
    out = interface.attend(torch.nn.Identity(), whole, whole, whole, None, causal=True, **said)
    torch.testing.assert_close(out[:, :5], flash_attn_func(*[whole[:, :5]] * 3, causal=True))


def test_bidirectional_layers_have_to_show_that_their_tokens_are_cut(monkeypatch):
    """Those of a vision tower are whole in every process, and would be attended to once for each."""
    q = torch.randn(1, 12, 2, 16)
    shards = Shards(None, 1, 2, True)
    tower = torch.nn.Identity()
    tower.is_causal = False  # whatever accelerate's hook says in its place
    for module, causal in ((torch.nn.Identity(), False), (tower, True)):
        with pytest.raises(ValueError, match="its tokens may not be cut"):
            interface._check_shards(module, shards, q, q, None, causal, {})
    shown = {"position_ids": shards.positions(12, q.device).unsqueeze(0)}
    monkeypatch.setattr(context_parallel, "agree", lambda *_: context_parallel.Agreement(False, False, False))
    monkeypatch.setattr(context_parallel, "_gather", lambda *_: [torch.arange(24).unsqueeze(0)])  # what two processes would bring together
    interface._check_shards(torch.nn.Identity(), shards, q, q, None, False, shown)

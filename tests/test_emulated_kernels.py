"""The CUDA kernels themselves, on the CPU: csrc in the emulator (tests/emulator) against the textbook formula, by the rule of
test_kernels.py.

What a machine without a GPU can say about a kernel: index arithmetic, fragment layouts, swizzles, masks, ranges, the barrier protocol. It
says nothing about speed, nor about what the hardware does that the emulator does not know. Every run has its own order of warps and number
of thread blocks in flight. HF_FLASH2_EMULATE=all runs all of the table that is not too long (3 minutes) in place of a sample of it.
"""

import ctypes
import dataclasses
import itertools
import mmap
import os
import re
import zlib

import emulated
import pytest
import test_kvcache
import torch
from cases import CASES, RANGE_PADDING, USUAL_HEAD_DIMS, Case, Sample, poison
from emulator import build
from test_kernels import (
    check_heads_of_a_group,
    check_nan_spreads,
    check_one_key_outweighs_all,
    check_scores_of_minus_infinity,
    check_windows_beyond_every_length,
    compare,
    kept_by_next_call,
    large_scores,
)

from hf_flash2 import (
    flash_attn_func,
    flash_attn_ranges_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    functional,
    kernels,
    last_backend,
    native,
    ops,
)

pytestmark = [
    pytest.mark.timeout(300, func_only=True),  # of the test: compiling the emulated library, which the first one waits for, takes minutes
    pytest.mark.skipif(build.reason_not_buildable() is not None, reason=str(build.reason_not_buildable())),
]

UNITS = ("*_bf16", "*_hdim64_fp16", "*_sm90_hdim192_fp16")
LONGEST = 60e6  # scores * head dim of a case
EVERY = {"sm80": 9, "sm90": 4}  # of the table; mma.sync has 30 times as many warp operations to emulate as wgmma
CPU = torch.device("cpu")


def problems() -> list[tuple[str, Case]]:
    chosen = []
    for family, every in EVERY.items():
        cases = [case for case in CASES if case.scores * case.head_dim < LONGEST and not (family == "sm90" and case.beyond_hopper)]
        sample = [case for case in cases if case.group != "long"][::every]
        always = [case for case in cases if case.window == (128, 128) and case.lengths_q == (300, 300)]
        always += [
            case for case in cases if (case.group == "value" and case.layout == "wide") or case.group in ("sinks", "softcap", "wide")
        ]
        sample += [case for case in always if case not in sample]
        chosen += [(family, case) for case in (cases if os.environ.get("HF_FLASH2_EMULATE") == "all" else sample)]
    return chosen


@pytest.fixture(scope="session")
def library():
    return emulated.load(build.build(UNITS))


@pytest.fixture
def emulate(library, backward_families, monkeypatch):
    """Call with a family and a sample: out, lse, dq, dk, dv of the emulated kernels."""

    def run(family: str, sample: Sample, device: int = emulated.HOPPER, seed: int = 0, resident: int = 1, **overrides):
        monkeypatch.setenv("HF_FLASH2_FAMILY", family)
        with emulated.running(monkeypatch, library, device, seed, resident):
            actual = sample.actual(**overrides)
        assert last_backend() == f"cuda-{family}" and backward_families[-1] == family
        return actual

    return run


def check(actual: dict, sample: Sample, keep: torch.Tensor | None = None, with_dlse: bool = False) -> None:
    truth, eager = sample.expected(torch.float64, keep, with_dlse), sample.expected(sample.dtype, keep, with_dlse)
    compare(actual, truth, eager, sample.dtype, sample.sum_sizes())


@pytest.mark.parametrize(("family", "case"), problems(), ids=lambda value: value.id if isinstance(value, Case) else value)
def test_forward_and_backward(family, case, emulate):
    sample = Sample(case, torch.bfloat16, CPU)
    keep = kept_by_next_call(sample)
    order = zlib.crc32(case.id.encode())
    check(emulate(family, sample, seed=order % 5, resident=1 + order % 3), sample, keep)


@pytest.mark.parametrize(("queries", "keys"), ((5, 0), (0, 5)))
def test_ranges_of_no_tokens(queries, keys, library, monkeypatch):
    """Where one side has no rows at all, those of the other are padding, and still written."""
    q, k, v = (torch.randn(2, length, 2, 64).to(torch.bfloat16).requires_grad_() for length in (queries, keys, keys))
    empty = torch.zeros(2, 2, dtype=torch.int32)
    with emulated.running(monkeypatch, library):
        out, lse, _ = flash_attn_ranges_func(q, k, v, empty, empty, return_attn_probs=True)
        gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert lse.eq(float("inf")).all() and lse.shape == (2, 2, queries)
    assert [x.shape for x in (out, *gradients)] == [x.shape for x in (q, q, k, v)]
    assert not any(x.any() for x in (out, *gradients))


@pytest.mark.parametrize("device", (emulated.A100, emulated.SMALL, emulated.BLACKWELL), ids=("a100", "99kb", "blackwell"))
@pytest.mark.parametrize("head_dim", (*USUAL_HEAD_DIMS, 512))
def test_tiles_of_smaller_gpus(head_dim, device, emulate):
    sample = Sample(Case("tiles", head_dim=head_dim, heads=(2, 1), lengths_q=(150,), lengths_k=(170,), causal=True), torch.bfloat16, CPU)
    check(emulate("sm80", sample, device), sample)


WIDE = [
    Case("wide", 512, (4, 2), (1, 70, 0, 33), (40, 90, 3, 33), form="packed", window=(31, 5)),
    Case("wide", 512, (2, 1), (70, 40), form="ranges", padding="holes", causal=True, sinks=2.0),
    Case("wide", 512, (2, 1), (50,), (75,), head_dim_v=256, dropout_p=0.3),
    Case("wide", 128, (2, 1), (50,), (75,), head_dim_v=400, causal=True, softcap=5.0, magnitude=2.0),
    Case("wide", 300, (2, 1), (33,), (50,), head_dim_v=257, layout="cache", dropout_p=0.2, softcap=5.0),
]


@pytest.mark.parametrize("device", (emulated.A100, emulated.SMALL), ids=("a100", "99kb"))
@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.id)
def test_gradients_of_wide_heads(case, deterministic, device, emulate):
    """In both tiles of mma.sync, with the same bits in any order of warps, of thread blocks too where that is asked for."""
    sample = Sample(case, torch.bfloat16, CPU)
    keep = kept_by_next_call(sample)
    results = []
    for seed in range(3):
        kept_by_next_call(sample)
        results.append(emulate("sm80", sample, device, seed, 1 + seed, deterministic=deterministic, with_dlse=True))
    check(results[0], sample, keep, with_dlse=True)
    for result in results[1:]:
        assert all(torch.equal(result[name], results[0][name]) for name in ("dk", "dv", *(["dq"] if deterministic else [])))


@pytest.mark.parametrize("device", (emulated.HOPPER, emulated.WIDE_HOPPER, emulated.WIDEST_HOPPER), ids=("3", "16", "48"))
@pytest.mark.parametrize("head_dim_v", (512, 256, 200))
def test_both_tiles_of_wide_heads(head_dim_v, device, emulate):
    """Where there are more tiles than multiprocessors, for one cluster or eight, and few."""
    case = Case("wide", 512, (2, 1), (300, 90), (300, 170), head_dim_v=head_dim_v, form="packed", causal=True)
    sample = Sample(case, torch.bfloat16, CPU)
    check(emulate("sm90", sample, device, resident=3), sample)


@pytest.mark.parametrize(
    ("family", "head_dim", "dropout_p"), (("sm80", 56, 0.0), ("sm80", 56, 0.3), ("sm90", 56, 0.0), ("sm90", 56, 0.3), ("sm90", 192, 0.3))
)
@pytest.mark.parametrize("form", ("dense", "packed", "ranges"))
def test_half_precision_and_gradient_of_lse(family, form, head_dim, dropout_p, emulate):
    case = Case("half", head_dim, lengths_q=(70, 70), form=form, padding="left", causal=True, dropout_p=dropout_p)
    sample = Sample(case, torch.float16, CPU)
    keep = kept_by_next_call(sample)
    check(emulate(family, sample, with_dlse=True), sample, keep, with_dlse=True)


@pytest.mark.parametrize("form", ("dense", "packed", "ranges"))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize(("head_dim", "longest"), ((64, 420), (96, 420), (96, 530), (128, 420), (128, 530), (192, 420)))
def test_thread_blocks_that_walk_over_tiles(head_dim, longest, causal, form, emulate):
    """The Hopper forward and backward have one thread block a multiprocessor: here 3 for up to 32 query and 32 key blocks. Some tiles end
    behind their sequence, one sequence is empty."""
    lengths = (longest, longest) if form == "dense" else (longest, 0, 256, 130)
    sample = Sample(Case("walk", head_dim, heads=(4, 2), lengths_q=lengths, form=form, causal=causal), torch.bfloat16, CPU)
    check(emulate("sm90", sample, resident=3), sample)


@pytest.mark.parametrize("head_dim", (64, 512))
@pytest.mark.parametrize(
    ("lengths", "padding"),
    (((1, 0, 200, 260), "right"), ((64, 260, 130, 260, 9), "mixed"), ((*range(1, 32), 260), "left"), ((*range(1, 33), 260), "left")),
    ids=("last", "two", "of_32", "of_33"),
)
def test_the_longest_sequence_of_a_padded_batch_comes_first(lengths, padding, head_dim, emulate, forward_workspaces):
    """Of up to 32, and no other is lost or comes twice, wherever it lies: rows of out that nobody writes stay NaN."""
    case = Case("longest", head_dim, heads=(2, 1), lengths_q=lengths, form="ranges", padding=padding, causal=True)
    sample = Sample(case, torch.bfloat16, CPU)
    check(emulate("sm90", sample, resident=3), sample)
    assert forward_workspaces == [4]


@pytest.mark.parametrize("head_dim", (64, 128))
def test_a_table_begins_with_the_first_of_the_longest(head_dim, emulate, forward_workspaces):
    """Of 32 sequences, several are the longest: all lanes that write the table have to mean the same one."""
    case = Case("longest", head_dim, heads=(2, 1), lengths_q=(9, 70, 180, 3, 180, 64, 0, 180) * 4, form="ranges", causal=True)
    sample = Sample(case, torch.bfloat16, CPU)
    check(emulate("sm90", sample, emulated.WIDEST_HOPPER, resident=3), sample)
    assert forward_workspaces[0] > 16 + 8 * len(case.lengths_q)


# Some are empty, one has several blocks, or many, not among the first 48; and more than the threads of the kernels that make tables of
# them, 256 and 1024.
SHORT_SEQUENCES = {
    "100": (1, 0, 64, 7) * 12 + (65, 0, 1) * 17 + (380,),
    "101": (1, 0, 64, 7) * 12 + (65, 0, 1) * 17 + (130, 800),
    "1100": (0,) * 250 + (3, 0, 70, 5) * 4 + (0,) * 740 + (150, 1) * 20 + (0,) * 53 + (9,),
    "1101": (0,) * 250 + (3, 0, 70, 5) * 4 + (0,) * 740 + (150, 1) * 20 + (0,) * 53 + (300,),
}


@pytest.mark.parametrize(
    ("number", "head_dim", "heads", "form", "causal", "in_order", "small"),
    (
        ("100", 64, (1, 1), "packed", True, False, True),
        ("100", 64, (2, 1), "ranges", False, False, False),
        ("100", 96, (1, 1), "ranges", True, True, False),
        ("100", 128, (2, 1), "packed", True, True, False),
        ("100", 128, (1, 1), "packed", False, True, True),
        ("101", 64, (1, 1), "packed", False, False, True),
        ("101", 96, (1, 1), "packed", False, False, True),
        ("101", 128, (1, 1), "ranges", True, False, False),
        ("1100", 64, (1, 1), "packed", True, False, True),
        ("1100", 64, (1, 1), "ranges", True, True, True),
        ("1101", 128, (1, 1), "ranges", True, True, False),
    ),
)
def test_tables_of_many_short_sequences(
    number, head_dim, heads, form, causal, in_order, small, emulate, forward_workspaces, backward_workspaces
):
    """No tile is lost or comes twice: rows that nobody writes stay NaN. The table of a forward stands behind its counter. A backward of
    small thread blocks says whose they are, others of short causal sequences have a table of key blocks."""
    lengths = SHORT_SEQUENCES[number]
    case = Case("short", head_dim, heads=heads, lengths_q=lengths, form=form, causal=causal)
    sample = Sample(case, torch.bfloat16, CPU)
    check(emulate("sm90", sample, emulated.WIDEST_HOPPER, resident=3, deterministic=in_order), sample)
    assert forward_workspaces[0] > 16 + 8 * len(lengths)
    assert [takes_small_blocks(x, case, sample.seqlen_q, sample.seqlen_k) for x in backward_workspaces] == [small]


@pytest.mark.parametrize(("sequences", "heads", "small"), ((260, 1, True), (100, 2, False)))
def test_tables_of_sequences_that_end_before_they_begin(sequences, heads, small, library, monkeypatch, backward_workspaces):
    """Wrong cu_seqlens: those before the wrong one keep their places in the table, as it has room for all blocks, and nothing is written
    outside of it."""
    good = torch.arange(sequences + 1, dtype=torch.int32) * 10
    wrong, at = good.clone(), sequences * 3 // 4
    wrong[at] = good[-1]  # the sequence before takes the most tokens there may be, this one less than none
    tokens = int(good[-1])
    q, k, v, dout = (torch.randn(tokens, n, 128).to(torch.bfloat16).requires_grad_() for n in (heads, 1, 1, heads))
    case = Case("wrong", 128, heads=(heads, 1), lengths_q=(10,) * sequences, form="packed", causal=True)
    with emulated.running(monkeypatch, library, emulated.WIDEST_HOPPER, resident=3):
        results = []
        for bounds in (good, wrong):
            out = flash_attn_varlen_func(q, k, v, bounds, bounds, 64, 64, causal=True)
            results.append([x[: good[at - 1]] for x in (out, *torch.autograd.grad(out, (q, k, v), dout))])
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(actual, expected)
    assert [takes_small_blocks(x, case, 64, 64) for x in backward_workspaces] == [small]


@pytest.mark.parametrize(
    ("head_dim", "heads", "queries"),
    ((64, 5, 300), (96, 5, 300), (96, 3, 900), (128, 2, 300), (128, 2, 900), (128, 4, 384), (128, 5, 900), (128, 7, 640), (512, 5, 900)),
)
@pytest.mark.parametrize("device", (emulated.HOPPER, emulated.WIDE_HOPPER), ids=("3", "16"))
def test_pairs_of_tiles_that_make_no_whole_round_come_apart(device, head_dim, heads, queries, emulate):
    """From the middle of a head on, of whole heads, of an odd number of tiles. Most see no keys: that is quick to emulate."""
    case = Case("pairs", head_dim, heads=(heads, 1), lengths_q=(queries,), lengths_k=(150,), causal=True)
    sample = Sample(case, torch.bfloat16, CPU)
    check(emulate("sm90", sample, device, resident=3), sample)


@pytest.mark.parametrize(("head_dim", "queries", "counted"), ((64, 1100, True), (64, 1024, False), (128, 2100, True), (512, 2100, True)))
def test_tiles_of_long_causal_prompts_are_counted(head_dim, queries, counted, emulate, forward_workspaces):
    """Above 16 query blocks a head, of 64 or 128 rows. Most see no keys, as those end with the queries: that is quick to emulate."""
    case = Case("counted", head_dim, heads=(2, 1), lengths_q=(queries, queries), lengths_k=(150, 150), causal=True)
    sample = Sample(case, torch.bfloat16, CPU)
    check(emulate("sm90", sample, resident=3), sample)
    assert forward_workspaces == [4] * counted


@pytest.mark.parametrize("head_dim", (64, 128, 192))
@pytest.mark.parametrize("family", ("sm80", "sm90"))
def test_sequences_in_the_middle_of_the_tokens(family, head_dim, library, monkeypatch):
    """Several blocks of tokens before the first sequence and behind the last change no bit, and nothing is written there."""
    before, behind, lengths = 150, 170, (500, 9, 0, 33, 64)
    bounds = torch.tensor((0, *lengths)).cumsum(0).int()
    inner = [torch.randn(sum(lengths), heads, head_dim).to(torch.bfloat16) for heads in (2, 1, 1, 2)]
    outer = [torch.nn.functional.pad(x, (0, 0, 0, 0, before, behind), value=torch.nan) for x in inner]
    options = {"causal": True, "deterministic": True, "return_attn_probs": True}
    monkeypatch.setenv("HF_FLASH2_FAMILY", family)

    def run(cu_seqlens, q, k, v, dout):
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out, lse, _ = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max(lengths), max(lengths), **options)
        return (out, lse.T, *torch.autograd.grad(out, (q, k, v), dout))

    with emulated.running(monkeypatch, library):
        expected, actual = run(bounds, *inner), run(bounds + before, *outer)
    for x, y in zip(expected, actual, strict=True):
        assert torch.equal(x, y[before:-behind])
        assert y[:before].isnan().all() and y[-behind:].isnan().all()  # as emulated.poisoned_empty() left them


@pytest.mark.parametrize("head_dim", (64, 192, 512))
def test_thread_blocks_that_walk_over_keys_nobody_sees(head_dim, emulate):
    case = Case("unseen", head_dim, heads=(4, 2), lengths_q=(100, 130), lengths_k=(420, 300), window=(63, 0), form="packed")
    sample = Sample(case, torch.bfloat16, CPU)
    check(emulate("sm90", sample, resident=3), sample)


@pytest.mark.parametrize("window", ((-1, 0), (200, 0), (-1, -1)))
@pytest.mark.parametrize(
    ("family", "head_dim"),
    (("sm80", 64), ("sm80", 192), ("sm80", 512), ("sm90", 64), ("sm90", 128), ("sm90", 192), ("sm90", 256), ("sm90", 512)),
)
def test_deterministic_results_do_not_depend_on_the_order(family, window, head_dim, library, monkeypatch):
    """Key blocks that run at once and in any order still add to dq in theirs. Asked not to, they do not."""
    tokens = 450 if head_dim <= 256 else 200
    q, k, v, dout = (torch.randn(1, tokens, heads, head_dim).to(torch.bfloat16) for heads in (2, 1, 1, 2))
    k += 64  # changes no probability, but what key blocks add is large and cancels: the order shows in the last bits of dq
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    monkeypatch.setenv("HF_FLASH2_FAMILY", family)
    # NOTE: the small Hopper has room for one cluster of the backward above head dim 128, which keeps one order.
    device = emulated.WIDE_HOPPER if family == "sm90" and head_dim > 128 else emulated.HOPPER

    def results(seed: int, resident: int, deterministic: bool) -> tuple[torch.Tensor, ...]:
        with emulated.running(monkeypatch, library, device, seed=seed, resident=resident):
            out = flash_attn_func(q, k, v, window_size=window, deterministic=deterministic)
            return out, *torch.autograd.grad(out, (q, k, v), dout)

    expected = results(seed=0, resident=1, deterministic=True)
    schedules = ((1, 4), (2, 2), (3, 4))
    for schedule in schedules:
        assert all(map(torch.equal, results(*schedule, deterministic=True), expected))
    assert not all(torch.equal(results(*schedule, deterministic=False)[1], expected[1]) for schedule in schedules)


@pytest.mark.parametrize("head_dim", (64, 128, 192))
@pytest.mark.parametrize("seed", range(5))
def test_key_blocks_that_write_the_same_queries_at_once(head_dim, seed, emulate):
    """Whichever comes first: the Hopper backward does not clear dq, and its key blocks start at different queries."""
    window = ((-1, -1), (-1, 0), (130, 40))[seed % 3]
    case = Case("at_once", head_dim, heads=(2, 1), lengths_q=(330,), lengths_k=(420,), window=window)
    sample = Sample(case, torch.bfloat16, CPU)
    check(emulate("sm90", sample, seed=seed, resident=2 + seed % 3), sample)


@pytest.mark.parametrize("deterministic", (False, True))
def test_dq_is_cleared_first_where_keys_are_many(deterministic, emulate):
    """The Hopper backward at head dim 64 from 4096 keys on; the second sequence sees nothing."""
    sample = Sample(Case("many_keys", 64, heads=(2, 1), lengths_q=(70, 40), lengths_k=(4096, 0), form="packed"), torch.bfloat16, CPU)
    check(emulate("sm90", sample, resident=4, deterministic=deterministic), sample)


def tiles_of_dq(workspace: int, case: Case) -> tuple[int, int, int]:
    """How many tiles of dq are in the scratch of a Hopper backward of head dims to 128, elements of one, and where their semaphores are."""
    (block_m, _), columns = KERNEL_TILES[case.head_dim], -(-case.head_dim // 64) * 64
    tiles = len(case.lengths_q) * -(-max(case.lengths_q) // block_m) * case.heads[0]
    return tiles, block_m * columns, workspace + tiles * block_m * (columns + 2) * 4


def rounded_beside(workspace: int, case: Case) -> tuple[int, int, int, int]:
    """How many chunks of dq were rounded beside the tasks of a Hopper backward, as its scratch says, and how many there are; thread
    blocks that have rounded, and tasks that have said that their shares are stored."""
    warps = 12  # of a thread block
    tiles, elements, semaphores = tiles_of_dq(workspace, case)
    stored = (ctypes.c_int32 * tiles).from_address(semaphores + 2 * tiles * 4)
    ends = (ctypes.c_int32 * ROUNDING_WARPS).from_address(semaphores + SEMAPHORES * tiles * 4)
    written = [end for end in ends if end != -1]  # scratch is poisoned
    assert len(written) % warps == 0
    count = sum((end - begin) // len(written) for begin, end in enumerate(written))
    return count, tiles * elements // (64 * 32), len(written) // warps, sum(stored)


def watch_what_tasks_say(library, workspace: int, workspace_bytes: int, case: Case, splits: int) -> None:
    """When all tasks of a part have said that they have added to dq, or stored their shares of dk and dv, those have to be as at the end.
    Of sequences of one length that 128 divides, heads up to 128, groups that are split alike."""
    tiles, elements, semaphores = tiles_of_dq(workspace, case)
    heads, heads_k, batch, block_n = *case.heads, len(case.lengths_q), KERNEL_TILES[case.head_dim][1]
    query_blocks, key_blocks, of_part = tiles // (heads * batch), case.lengths_q[0] // block_n, heads // (heads_k * splits)
    said, head_bytes = semaphores + tiles * 4, query_blocks * elements * 4
    share_bytes = key_blocks * block_n * 2 * case.head_dim * 2
    shares = workspace + workspace_bytes - batch * heads_k * splits * share_bytes
    for sequence, head in itertools.product(range(batch), range(heads)):
        first = (head // of_part * of_part * batch + sequence) * query_blocks  # tile of the part
        library.emulator_watch(said + first * 4, key_blocks, workspace + (head * batch + sequence) * head_bytes, head_bytes)
        if splits > 1 and head % of_part == 0:
            share = (sequence * heads + head) // of_part
            library.emulator_watch(said + (tiles + first) * 4, key_blocks, shares + share * share_bytes, share_bytes)


def what_tasks_said(library) -> tuple[int, int]:
    """How much of that has been said, and how much was not so."""
    said, wrong = ctypes.c_int(), ctypes.c_int()
    library.emulator_watched(said, wrong)
    return said.value, wrong.value


ROUNDED_BESIDE = (  # causal, heads, lengths, deterministic, splits of a group
    (False, (16, 16), (384,) * 2, False, 1),
    (False, (16, 16), (384,) * 2, True, 1),
    (True, (8, 8), (512,) * 3, False, 1),
    (True, (8, 8), (512,) * 3, True, 1),
    (True, (16, 8), (384,) * 4, False, 1),
    (True, (16, 8), (384,) * 4, True, 2),
)


@pytest.mark.parametrize(
    ("head_dim", "causal", "heads", "lengths", "deterministic", "splits"),
    (
        *((head_dim, *call) for head_dim in (64, 128) for call in ROUNDED_BESIDE),
        (128, True, (16, 2), (1024,), False, 4),
        *((d, *ROUNDED_BESIDE[i]) for d, i in ((80, 0), (80, 5), (96, 2))),
    ),
)
def test_dq_is_rounded_beside_tasks(
    head_dim, causal, heads, lengths, deterministic, splits, emulate, library, monkeypatch, backward_workspaces
):
    """By thread blocks that do nothing else, while there are tasks; the rest by the last kernel. Groups that are split leave shares of dk
    and dv, which a kernel between the two adds; a task says that they are stored when its thread block has come to the end of the next."""
    case = Case("rounded", head_dim, heads=heads, lengths_q=lengths, causal=causal)
    rounded, said = [], []
    backward = library.hf_flash2_backward

    def recorded(params, addresses):
        workspace = kernels._BACKWARD_ADDRESSES.unpack(addresses)[-1]
        watch_what_tasks_say(library, workspace, backward_workspaces[-1], case, splits)
        result = backward(params, addresses)
        rounded.append(rounded_beside(workspace, case))
        said.append(what_tasks_said(library))
        return result

    monkeypatch.setattr(library, "hf_flash2_backward", recorded)
    sample = Sample(case, torch.bfloat16, CPU)
    check(emulate("sm90", sample, emulated.WIDE_HOPPER, seed=2, resident=16, deterministic=deterministic), sample)
    [(count, chunks, rounding, stored)] = rounded
    tasks = len(lengths) * (lengths[0] // 128) * heads[1] * splits
    assert 0 < count < chunks
    assert stored == (tasks - (16 - rounding) if splits > 1 else 0)
    [(told, wrong)] = said
    assert told > 0 and wrong == 0
    assert [group_splits(x, case, lengths[0], lengths[0]) for x in backward_workspaces] == [splits]


@pytest.mark.parametrize("form", ("packed", "ranges"))
def test_shares_of_sequences_without_queries_beside_rounding(form, emulate):
    """Nothing clears the semaphores of such a sequence: who adds its shares must not ask them. In order, each query head has shares."""
    queries, keys = (0, 5, 64, 0, 129, 77, 256, 0), (7, 0, 64, 0, 200, 31, 256, 130)
    options = {"padding": "mixed"} if form == "ranges" else {}
    case = Case("no_queries", 64, heads=(8, 2), lengths_q=queries, lengths_k=keys, form=form, causal=True, **options)
    sample = Sample(case, torch.bfloat16, CPU)
    for seed in range(3):
        check(emulate("sm90", sample, emulated.WIDE_HOPPER, seed=seed, resident=16, deterministic=True), sample)


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [*((d, torch.bfloat16) for d in (*USUAL_HEAD_DIMS, 80)), (64, torch.float16), (192, torch.float16)]
)
def test_capped_scores_on_every_backward_of_hopper(head_dim, dtype, deterministic, emulate):
    """In order and not, with so many tasks that, of scores without a cap, dq would be rounded beside them."""
    heads, lengths = ((8, 8), (256,) * 4) if head_dim <= 128 else ((4, 2), (200,) * 2)
    sample = Sample(Case("capped", head_dim, heads=heads, lengths_q=lengths, causal=True, softcap=2.0), dtype, CPU)
    check(emulate("sm90", sample, emulated.WIDE_HOPPER, seed=2, resident=16, deterministic=deterministic), sample)


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("seed", range(3))
def test_dq_is_not_rounded_before_all_keys_have_come(head_dim, seed, emulate):
    """Two long tasks are not done when others stand far behind them."""
    case = Case("early", head_dim, heads=(1, 1), lengths_q=(1100,) + (9,) * 62, lengths_k=(250,) + (9,) * 62, form="packed")
    sample = Sample(case, torch.bfloat16, CPU)
    check(emulate("sm90", sample, emulated.WIDE_HOPPER, seed=seed, resident=16), sample)


@pytest.mark.parametrize("family", ("sm80", "sm90"))
@pytest.mark.parametrize("case", [case for case in test_kvcache.CASES if case.name not in ("many", "all-new")], ids=str)
def test_decoding_from_a_cache(family, case, library, monkeypatch):
    """On pages and not; the Hopper family says what it leaves to the other."""
    monkeypatch.setenv("HF_FLASH2_FAMILY", family)
    with emulated.running(monkeypatch, library, seed=3, resident=2):
        if family == "sm90" and case.beyond_hopper:
            with pytest.raises(native.LibraryError, match="the Hopper family cannot run this"):
                test_kvcache.decode(case, torch.bfloat16, CPU)
            return
        actual, truth, eager, sizes = test_kvcache.decode(case, torch.bfloat16, CPU)
    compare(actual, truth, eager, torch.bfloat16, sizes)
    assert last_backend() == f"cuda-{family}"


def test_a_step_without_sequences(library, monkeypatch):
    """Of a server that has nothing to do: an empty tensor has no address."""
    q, cache = torch.randn(0, 1, 2, 64, dtype=torch.bfloat16), torch.randn(3, 128, 2, 64, dtype=torch.bfloat16)
    lengths = torch.zeros(0, dtype=torch.int32)
    with emulated.running(monkeypatch, library), torch.no_grad():
        for pages in (0, 2):
            table = torch.zeros(0, pages, dtype=torch.int32)
            out = flash_attn_with_kvcache(q, cache, cache.clone(), q, q, cache_seqlens=lengths, block_table=table)
            assert out.shape == q.shape
        with pytest.raises(ValueError, match="at most the 0 tokens that the cache holds of a sequence, got 0 and 1 for sequence 0"):
            one, table = torch.randn(1, 1, 2, 64, dtype=torch.bfloat16), torch.zeros(1, 0, dtype=torch.int32)
            flash_attn_with_kvcache(one, cache, cache, one, one, cache_seqlens=torch.zeros(1, dtype=torch.int32), block_table=table)


def test_a_cache_that_is_written_is_not_differentiated_as_it_was(library, monkeypatch):
    q, k_cache, v_cache = (torch.randn(2, n, 2, 64, dtype=torch.bfloat16) for n in (1, 20, 20))
    with emulated.running(monkeypatch, library):
        for cache in (k_cache, v_cache):
            out = flash_attn_func(q.clone().requires_grad_(), k_cache, v_cache)
            before = cache._version
            flash_attn_with_kvcache(q, k_cache, v_cache, q, q, cache_seqlens=3)
            assert cache._version > before
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
        with torch.inference_mode():  # counts nothing
            flash_attn_with_kvcache(q, k_cache.clone(), v_cache.clone(), q, q, cache_seqlens=3)


UNSEEN = [
    Case("unseen", lengths_q=(300,), lengths_k=(40,), causal=True),
    Case("unseen", lengths_q=(40,), lengths_k=(300,), window=(0, 0)),  # a key block without queries
    Case("unseen", lengths_q=(140, 200), lengths_k=(0, 70), form="packed"),
    Case("unseen", lengths_q=(140, 200), lengths_k=(0, 30), form="ranges", padding="left", causal=True),
]


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("head_dim", (64, 128, 192, 512))
@pytest.mark.parametrize("family", ("sm80", "sm90"))
@pytest.mark.parametrize("case", UNSEEN, ids=lambda case: case.id)
def test_queries_and_keys_that_see_nothing(case, family, head_dim, deterministic, emulate):
    """Whole tiles of dq, dk and dv that nobody adds to are zero."""
    sample = Sample(dataclasses.replace(case, head_dim=head_dim, heads=(2, 1)), torch.bfloat16, CPU)
    check(emulate(family, sample, deterministic=deterministic), sample)


@pytest.mark.parametrize("family", ("sm80", "sm90"))
@pytest.mark.parametrize("window", ((-1, 0), (40, 0)))
def test_every_alignment_of_a_limit_with_the_blocks(family, window, emulate):
    """The last key of a row, and the first under a window, on and beside every boundary of key blocks."""
    lengths_k = (*range(61, 71), *range(101, 111), *range(125, 135))
    case = Case("limits", heads=(1, 1), lengths_q=(3,) * len(lengths_k), lengths_k=lengths_k, form="packed", window=window)
    sample = Sample(case, torch.bfloat16, CPU)
    check(emulate(family, sample), sample)


@pytest.mark.parametrize(("head_dim", "window"), ((64, (63, 0)), (128, (-1, 0)), (256, (-1, 0))))
def test_rows_of_a_warpgroup_see_no_key_but_others_of_the_tile_do(head_dim, window, emulate):
    """Warpgroups leave out key blocks that none of their rows sees, down to one: rows without keys have results, too."""
    case = Case("no-keys", head_dim, heads=(1, 1), lengths_q=(130,), lengths_k=(60,), window=window)
    sample = Sample(case, torch.bfloat16, CPU)
    check(emulate("sm90", sample, with_dlse=True), sample, with_dlse=True)


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("head_dim", (*USUAL_HEAD_DIMS, 512))
@pytest.mark.parametrize("heads", ((2, 2), (4, 2)))
@pytest.mark.parametrize("lengths", ((0, 0), (0, 0, 0, 1)), ids=("none", "one"))
def test_padded_batches_of_few_tokens(lengths, heads, head_dim, deterministic, emulate):
    """The last kernel of the backward finds no dq to convert, neither in padding nor where a task has stored it: such thread blocks end at
    once, and only the last one, or those for dk and dv, wait for the kernel before."""
    case = Case("few", head_dim, heads=heads, lengths_q=lengths, form="ranges", padding="mixed", causal=True)
    sample = Sample(case, torch.bfloat16, CPU)
    check(emulate("sm90", sample, resident=3, deterministic=deterministic), sample)


ROUNDING_WARPS = 96  # csrc/attention/workspace.cuh
SEMAPHORES = 4  # of a tile of dQ: Workspace::kSemaphores
# Of the Hopper backward: queries, keys.
KERNEL_TILES = {64: (128, 128), 80: (64, 128), 96: (64, 128), 128: (64, 128), 192: (64, 64), 256: (64, 64), 512: (64, 64)}


def count_blocks(case: Case, lengths: tuple[int, ...], seqlen: int, size: int) -> int:
    """Of all sequences, as the kernels number them."""
    return sum(lengths) // size + len(lengths) if case.form == "packed" else len(lengths) * -(-seqlen // size)


def group_splits(workspace_bytes: int, case: Case, seqlen_q: int, seqlen_k: int) -> float:
    """Among how many tasks a Hopper backward that needs this scratch splits the query heads of a group."""
    head_dim = next(d for d in KERNEL_TILES if d >= max(case.head_dim, case.head_dim_v))
    head_dim_v = 128 if head_dim == 192 and case.head_dim_v <= 128 else head_dim
    (block_m, block_n), columns = KERNEL_TILES[head_dim], -(-head_dim // 64) * 64
    without = (
        count_blocks(case, case.lengths_q, seqlen_q, block_m) * case.heads[0] * (block_m * (columns + 2) + SEMAPHORES) + ROUNDING_WARPS + 1
    ) * 4
    of_split = case.heads[1] * count_blocks(case, case.lengths_k, seqlen_k, block_n) * block_n * (head_dim + head_dim_v) * 2
    return 1 if workspace_bytes == without else (workspace_bytes - -(-without // 128) * 128) / of_split


def record_workspaces(direction: str, library, monkeypatch) -> list[int]:
    """The sizes of scratch that forwards or backwards will ask for in this test, in bytes, one after another."""
    asked, name = [], f"hf_flash2_{direction}_workspace_bytes"
    ask = getattr(library, name)
    monkeypatch.setattr(library, name, lambda *call: asked.append(ask(*call)) or asked[-1])
    return asked


@pytest.fixture
def backward_workspaces(library, monkeypatch) -> list[int]:
    return record_workspaces("backward", library, monkeypatch)


def takes_small_blocks(workspace_bytes: int, case: Case, seqlen_q: int, seqlen_k: int) -> bool:
    """Whether a Hopper backward that needs this scratch is the one of short sequences (csrc/sm90/backward_short.cuh)."""
    queries, keys = count_blocks(case, case.lengths_q, seqlen_q, 64), count_blocks(case, case.lengths_k, seqlen_k, 64)
    without = (queries * case.heads[0] * (64 * 2 + SEMAPHORES) + ROUNDING_WARPS + 1) * 4
    return workspace_bytes == -(-without // 16) * 16 + (queries + keys) * 16 * (case.form == "packed")


MIXED = (1, 0, 64, 7, 65, 130)
SMALL_BLOCKS = (
    Case("small", 64, (1, 1), (*MIXED, 300), form="packed", causal=True),
    Case("small", 64, (6, 2), (*MIXED, 300, 3), form="packed", causal=True),
    Case("small", 64, (2, 2), (*MIXED, 250), form="packed"),
    Case("small", 128, (8, 2), (*MIXED, 200), form="packed", causal=True),
    Case("small", 128, (4, 2), MIXED, MIXED[::-1], form="packed"),
    Case("small", 128, (1, 1), MIXED, (9, 64, 0, 200, 63, 1), form="packed", causal=True),
    Case("small", 96, (1, 1), MIXED, form="ranges", padding="mixed"),
    Case("small", 72, (2, 2), (192, 192), head_dim_v=40),
    Case("small", 40, (1, 1), (192, 192), (100, 100), window=(20, 70)),
    Case("small", 64, (3, 1), (180,) * 4, window=(70, 0)),
    Case("small", 64, (4, 2), MIXED, form="ranges", padding="holes", causal=True),
    Case("small", 128, (2, 2), (70,) * 4, (30, 200, 64, 0), form="ranges", padding="keys"),
    Case("small", 128, (3, 3), (1, 43, 30), form="ranges", padding="left", causal=True),
    Case("small", 64, (1, 1), (130, 130), sinks=1.0, causal=True),
    Case("small", 64, (6, 6), (70, 3, 0, 64) * 16, form="packed", causal=True),  # delta of four heads by one thread block, and of two
    Case("small", 128, (3, 3), (66, 5) * 20, form="packed"),  # of two, and of one
)


@pytest.mark.parametrize("case", SMALL_BLOCKS, ids=lambda case: case.id)
def test_small_thread_blocks(case, emulate, backward_workspaces):
    """Of short sequences: the same bits in any order, with the gradient of lse."""
    sample = Sample(case, torch.bfloat16, CPU)
    first = emulate("sm90", sample, with_dlse=True)
    check(first, sample, with_dlse=True)
    again = emulate("sm90", sample, seed=3, resident=4, with_dlse=True)
    assert all(torch.equal(first[name], again[name]) for name in ("dq", "dk", "dv"))
    assert [takes_small_blocks(x, case, sample.seqlen_q, sample.seqlen_k) for x in backward_workspaces] == [True] * 2


@pytest.mark.parametrize(
    ("case", "taken"),
    (
        (Case("when", 64, (2, 2), (448,), causal=True), True),
        (Case("when", 64, (2, 2), (449,), causal=True), False),
        (Case("when", 64, (2, 2), (320,)), True),
        (Case("when", 64, (2, 2), (321,)), False),
        (Case("when", 128, (2, 2), (384,), causal=True), True),
        (Case("when", 128, (2, 2), (385,), causal=True), False),
        (Case("when", 128, (2, 2), (256,)), True),
        (Case("when", 128, (2, 2), (257,)), False),
        (Case("when", 64, (1, 1), (576,), causal=True), True),  # nine thread blocks begin at once on three multiprocessors
        (Case("when", 64, (1, 1), (577,), causal=True), False),
        (Case("when", 64, (1, 1), (512,)), True),
        (Case("when", 64, (1, 1), (513,)), False),
        (Case("when", 128, (1, 1), (320,)), True),  # six
        (Case("when", 128, (1, 1), (321,)), False),
        (Case("when", 64, (1, 1), (250,), (500,)), True),
        (Case("when", 64, (1, 1), (249,), (500,)), False),  # one of them would have most of the work
        (Case("when", 64, (1, 1), (560 - RANGE_PADDING,), form="ranges", causal=True), True),
        (Case("when", 64, (12, 4), (320,), causal=True), True),  # groups
        (Case("when", 64, (12, 4), (321,), causal=True), False),
        (Case("when", 64, (12, 4), (193,)), False),
        (Case("when", 128, (12, 4), (240,), causal=True), True),
        (Case("when", 128, (12, 4), (241,), causal=True), False),
        (Case("when", 64, (2, 1), (192,), causal=True), False),  # few thread blocks, of groups
        # On average as many as that, or more, by all tokens and sequences.
        (Case("when", 64, (1, 1), (1024, 256, 0, 0), form="packed", causal=True), True),
        (Case("when", 64, (1, 1), (1024, 257, 0, 0), form="packed", causal=True), False),
        (Case("when", 64, (1, 1), (1025,) + (0,) * 9, form="packed", causal=True), False),
        (Case("when", 64, (1, 1), (448, 447), form="packed", causal=True), True),
        (Case("when", 64, (1, 1), (700, 4, 0, 0), form="packed"), True),
        (Case("when", 64, (1, 1), (700, 5, 0, 0), form="packed"), False),
        (Case("when", 64, (1, 1), (704, 0, 0, 0), (5, 700, 0, 0), form="packed"), False),  # of keys
        (Case("when", 96, (1, 1), (768, 0, 0), form="packed", causal=True), True),
        (Case("when", 96, (1, 1), (769, 0, 0), form="packed", causal=True), False),
        (Case("when", 128, (1, 1), (576, 0, 0), form="packed", causal=True), True),
        (Case("when", 128, (1, 1), (577, 0, 0), form="packed", causal=True), False),
        (Case("when", 128, (1, 1), (432, 0, 0), form="packed"), True),
        (Case("when", 128, (1, 1), (433, 0, 0), form="packed"), False),
        (Case("when", 64, (8, 4), (512, 0), form="packed", causal=True), True),  # groups
        (Case("when", 64, (8, 4), (512, 1), form="packed", causal=True), False),
        (Case("when", 128, (8, 4), (448, 0), form="packed", causal=True), True),
        (Case("when", 128, (8, 4), (448, 1), form="packed", causal=True), False),
        (Case("when", 64, (8, 4), (224, 0), form="packed"), True),
        (Case("when", 64, (8, 4), (224, 1), form="packed"), False),
        (Case("when", 64, (2, 2), (512 - RANGE_PADDING,), form="ranges", causal=True), True),
        (Case("when", 64, (2, 2), (513 - RANGE_PADDING,), form="ranges", causal=True), False),
        (Case("when", 64, (2, 2), (257 - RANGE_PADDING,), form="ranges"), False),
        (Case("when", 128, (2, 2), (256 - RANGE_PADDING,), form="ranges", causal=True), True),
        (Case("when", 128, (2, 2), (257 - RANGE_PADDING,), form="ranges", causal=True), False),
        (Case("when", 128, (1, 1), (192,), dropout_p=0.1), False),
        (Case("when", 128, (1, 1), (192,), softcap=5.0), False),
        (Case("when", 192, (1, 1), (64,)), False),
    ),
    ids=lambda value: value.id if isinstance(value, Case) else value,
)
def test_when_thread_blocks_are_small(case, taken, emulate, backward_workspaces):
    sample = Sample(case, torch.bfloat16, CPU)
    keep = kept_by_next_call(sample)
    check(emulate("sm90", sample), sample, keep)
    assert [takes_small_blocks(x, case, sample.seqlen_q, sample.seqlen_k) for x in backward_workspaces] == [taken]


@pytest.fixture
def low_memory():
    """(address, a bfloat16 tensor of two and a half times as many bytes there), as allocators that reserve addresses give the first of all.
    Nothing is there but what is written to."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    no_replace, no_reserve = 0x100000, 0x4000
    for address in (0x10000000, 0x20000000, 0x40000000, 0x80000000):
        size = address * 5 // 2
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_replace | no_reserve
        if libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address:
            yield address, torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.bfloat16)
            libc.munmap(address, size)
            return
    pytest.skip("other things lie at all of these addresses")


@pytest.mark.parametrize(
    ("head_dim", "lengths", "family"),
    ((64, (100, 110, 90), "sm90"), (128, (450, 400, 380), "sm90"), (512, (70, 50, 60), "sm90"), (64, (260, 10), "sm80")),
    ids=("short", "long", "wide", "too_long"),
)
def test_rows_that_span_more_bytes_than_their_address(head_dim, lengths, family, low_memory, library, backward_families, monkeypatch):
    """Nobody is to begin a tensor map of the backward below address 0: it begins as many rows before a tensor as the longest sequence has.
    The same bits then as of rows next to each other. Where one sequence spans too much, mma.sync, though the scratch that was asked for,
    once for each layout, is that of the Hopper kernels."""
    address, memory = low_memory
    tokens, columns = sum(lengths), 2 * head_dim
    stride = address * 2 // tokens // 16 * 8  # in elements: all span twice the address
    x = [torch.randn(tokens, 2, head_dim, dtype=torch.bfloat16) for _ in range(4)]
    far = [memory[i * columns :].as_strided(x[0].shape, (stride, head_dim, 1)) for i in range(4)]
    for wanted, there in zip(x, far, strict=True):
        there.copy_(wanted)
    monkeypatch.setenv("HF_FLASH2_FAMILY", family)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)

    def gradients(q, k, v, dout):
        q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
        out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max(lengths), max(lengths), causal=True)
        return torch.autograd.grad(out, (q, k, v), dout)

    with emulated.running(monkeypatch, library):
        near = gradients(*x)
        monkeypatch.setenv("HF_FLASH2_FAMILY", "auto")
        if family == "sm80":  # of the same strides, where there is room
            gradients(*(torch.empty_strided(there.shape, there.stride(), dtype=there.dtype).copy_(there) for there in far))
        found = gradients(*far)
    if family == "sm90":
        assert all(map(torch.equal, found, near)) and backward_families == ["sm90", "sm90"]
    else:
        torch.testing.assert_close(found, near, rtol=2e-2, atol=2e-2)
        assert backward_families == ["sm80", "sm90", "sm80"]


@pytest.mark.parametrize("name", ("q", "k", "v", "out"))
def test_room_before_each_tensor_of_a_forward(name, library, monkeypatch):
    """As many addresses as a sequence spans, or mma.sync, which has no scratch for shares of split keys. Pages need no room."""
    q, k, table = torch.zeros(1, 1, 8, 128).bfloat16(), torch.zeros(1, 8192, 1, 128).bfloat16(), torch.zeros(1, 64, dtype=torch.int32)
    numbers, pages = (1, 8192, 1.0, -1, -1, 0.0, 0.0), k.view(64, 128, 1, 128)
    monkeypatch.setenv("HF_FLASH2_FAMILY", "auto")
    with emulated.running(monkeypatch, library, emulated.WIDE_HOPPER):
        in_rows = kernels.Layout(q, k, k, None, None, None, *numbers)._forward[0]
        in_pages = kernels.Layout(q, pages, pages, None, torch.zeros(2, 1, dtype=torch.int32), None, *numbers, table)._forward[0]

    def scratch(params: bytes, address: int, *sequences: int) -> int:
        tensors = {"q": 2**40, "k": 2**40, "v": 2**40, "out": 2**40} | {name: address}
        return library.hf_flash2_forward_workspace_bytes(
            params, kernels._FORWARD_ADDRESSES.pack(0, 0, *tensors.values(), 2**40, *sequences)
        )

    span = (k if name in "kv" else q).nbytes
    assert scratch(in_rows, span, *kernels._NO_SEQUENCES) == 0 < scratch(in_rows, span + 16, *kernels._NO_SEQUENCES)
    assert (scratch(in_pages, 16, 0, 0, 0, 2**40, 0, 0, 0, 2**40) > 0) == (name in "kv")


def test_small_thread_blocks_end_together(emulate, monkeypatch):
    """The last two rounds of nine thread blocks each, here nine of 21 sequences, begin with the longest of these."""
    lengths, ordered = (70, 3, 130, 0, 64, 200, 65) * 3, 9
    case = Case("small", 64, (1, 1), lengths, form="packed", causal=True)
    made, empty_like = [], emulated.poisoned_empty_like
    monkeypatch.setattr(emulated, "poisoned_empty_like", lambda x: made.append(empty_like(x)) or made[-1])
    sample = Sample(case, torch.bfloat16, CPU)
    check(emulate("sm90", sample), sample)
    workspace = next(x for x in reversed(made) if x.dtype == torch.uint8)

    starts = [sum(lengths[:batch]) for batch in range(len(lengths))]
    expected = [(0, -1, 0, 0)] * count_blocks(case, lengths, max(lengths), 64)
    in_order = sorted(range(len(lengths) - ordered, len(lengths)), key=lambda batch: lengths[batch] // -64)
    number = starts[-ordered] // 64 + len(lengths) - ordered
    for batch in (*range(len(lengths) - ordered), *in_order):
        first = number if batch in in_order else starts[batch] // 64 + batch
        blocks = -(lengths[batch] // -64)
        expected[first : first + blocks] = [(batch, block, starts[batch], lengths[batch]) for block in range(blocks)]
        number += blocks if batch in in_order else 0
    tables = workspace[-2 * 16 * len(expected) :].view(torch.int32).view(2, -1, 4)
    assert [[tuple(owner) for owner in table] for table in tables.tolist()] == [expected] * 2


@pytest.mark.parametrize(("length", "taken"), ((1024, True), (1025, False)))
def test_longest_sequence_of_small_thread_blocks(length, taken, emulate, backward_workspaces):
    """Where all of them begin at once: 16 or 17 of 48."""
    case = Case("when", 64, (1, 1), (length,), causal=True)
    sample = Sample(case, torch.bfloat16, CPU)
    check(emulate("sm90", sample, emulated.WIDE_HOPPER, resident=16), sample)
    assert [takes_small_blocks(x, case, length, length) for x in backward_workspaces] == [taken]


SPLIT_GROUPS = [  # a case, and among how many tasks a group is split on 16 multiprocessors
    (Case("group", heads=(8, 1), lengths_q=(200, 200), causal=True), 4),
    (Case("group", heads=(8, 1), lengths_q=(70, 0, 200, 33), form="packed", causal=True), 4),
    (Case("group", head_dim=80, heads=(12, 2), lengths_q=(70, 33), lengths_k=(200, 130), form="ranges", padding="left", causal=True), 2),
    (Case("group", head_dim=128, heads=(8, 1), lengths_q=(150,), lengths_k=(300,)), 4),
    (Case("group", head_dim=128, heads=(12, 2), lengths_q=(1, 0, 150, 70), lengths_k=(130, 30, 0, 140), form="packed"), 3),
    (Case("group", head_dim=128, heads=(4, 1), lengths_q=(200,), lengths_k=(270,), window=(60, 10)), 4),
    (Case("group", head_dim=128, heads=(4, 1), lengths_q=(140, 90), form="ranges", padding="holes", causal=True), 4),
    (Case("group", head_dim=192, heads=(4, 1), lengths_q=(100,), lengths_k=(150,), causal=True), 4),
    (Case("group", head_dim=192, heads=(16, 2), lengths_q=(140, 30), lengths_k=(30, 140), form="packed", head_dim_v=128), 4),
    (Case("group", head_dim=256, heads=(2, 1), lengths_q=(140,), causal=True), 2),
    (Case("group", head_dim=512, heads=(4, 1), lengths_q=(100,), lengths_k=(150,), causal=True), 2),
    (Case("group", head_dim=320, heads=(8, 1), lengths_q=(140, 30), lengths_k=(30, 140), form="packed", head_dim_v=512), 4),
]


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize(("case", "splits"), [pytest.param(*problem, id=problem[0].id) for problem in SPLIT_GROUPS])
def test_groups_split_among_tasks(case, splits, deterministic, emulate, backward_workspaces):
    """Every split leaves its share of dk and dv, and the sum has all of them; in any order of tasks it has the same bits."""
    sample = Sample(case, torch.bfloat16, CPU)
    if deterministic and (case.causal or case.window[1] >= 0):
        splits = case.heads[0] // case.heads[1]
    first = emulate("sm90", sample, emulated.WIDE_HOPPER, deterministic=deterministic, with_dlse=True)
    check(first, sample, with_dlse=True)
    for seed in (1, 2):
        again = emulate("sm90", sample, emulated.WIDE_HOPPER, seed, 1 + 3 * seed, deterministic=deterministic, with_dlse=True)
        assert all(torch.equal(again[name], first[name]) for name in ("dk", "dv", *(["dq"] if deterministic else [])))
    assert [group_splits(x, case, sample.seqlen_q, sample.seqlen_k) for x in backward_workspaces] == [splits] * 3


def test_whole_groups_before_split_ones(emulate, backward_workspaces):
    """Of four groups in two sequences the last is split, and leaves shares: all gradients of keys have the same bits in any order."""
    case = Case("group", head_dim=128, heads=(6, 2), lengths_q=(1030, 1030), causal=True)
    sample = Sample(case, torch.bfloat16, CPU)
    first = emulate("sm90", sample, emulated.HOPPER, with_dlse=True)
    check(first, sample, with_dlse=True)
    again = emulate("sm90", sample, emulated.HOPPER, 1, 3, with_dlse=True)
    assert all(torch.equal(again[name], first[name]) for name in ("dk", "dv"))
    assert [group_splits(x, case, 1030, 1030) for x in backward_workspaces] == [3 / 4] * 2


GROUP_CHOICES = {  # heads, head dim, queries, keys, batch, causal: splits of a group on 16 multiprocessors, on average
    "unequal tasks, few": (((8, 1), 128, 1024, 1024, 1, True), 4),
    "long unequal tasks": (((8, 1), 128, 2048, 2048, 1, True), 4),
    "long ones of 4 heads": (((4, 1), 128, 4096, 4096, 1, True), 2),
    "long ones of 2 heads": (((2, 1), 128, 4096, 4096, 1, True), 1),
    "very long ones of 4 heads": (((4, 1), 128, 16384, 16384, 1, True), 1),
    "of 8": (((8, 1), 128, 16384, 16384, 1, True), 2),
    "of 7, which only 7 divides": (((7, 1), 128, 16384, 16384, 1, True), 7),
    "of 4 at head dim 96, not yet very long": (((4, 1), 96, 16384, 16384, 1, True), 4),
    "and of twice the length": (((4, 1), 96, 32768, 32768, 1, True), 1),
    "of 7 at another head dim": (((7, 1), 64, 16384, 16384, 1, True), 1),
    "long ones of 16 heads": (((16, 1), 128, 4096, 4096, 1, True), 4),
    "long ones at another head dim": (((8, 1), 64, 4096, 4096, 1, True), 2),
    "and of 4 heads": (((4, 1), 256, 4096, 4096, 1, True), 1),
    "of 5, which no split makes less without as many shares": (((5, 1), 128, 4096, 4096, 1, True), 1),
    "equal tasks, few": (((8, 1), 128, 1024, 1024, 1, False), 2),
    "equal tasks, each multiprocessor has one": (((8, 1), 128, 2048, 2048, 1, False), 1),
    "a last round with two tasks": (((8, 1), 128, 1024, 1152, 2, False), 4),
    "a group of 7": (((7, 1), 128, 1024, 1024, 1, True), 7),
    "a group of 6": (((6, 1), 128, 1024, 1152, 2, False), 3),
    "equal tasks of two multiprocessors each": (((8, 1), 512, 512, 512, 1, False), 1),
    "and half as many": (((8, 1), 512, 512, 256, 1, False), 2),
    "the last of 4 groups of 3": (((12, 4), 128, 4096, 4096, 1, True), 3 / 4),
    "and over the batch": (((6, 2), 128, 4096, 4096, 2, True), 3 / 4),
    "the last of 4 groups of 7": (((28, 4), 128, 4096, 4096, 1, True), 7 / 4),
    "the last 3 of 12 short ones": (((24, 12), 128, 1024, 1024, 1, True), 6 / 12),
    "all of 11 short ones": (((44, 11), 128, 1024, 1024, 1, True), 2),
    "groups of 8": (((32, 4), 128, 4096, 4096, 1, True), 4),
    "very long ones of 3": (((12, 4), 128, 16384, 16384, 1, True), 1),
    "the last of 5 very long ones of 4": (((20, 5), 128, 16384, 16384, 1, True), 4 / 5),
    "and of yet longer ones": (((20, 5), 128, 24576, 24576, 1, True), 1),
    "at another head dim": (((12, 4), 96, 4096, 4096, 1, True), 3),
    "with all keys": (((12, 4), 128, 4096, 4096, 1, False), 1),
    "no groups": (((4, 4), 128, 2048, 2048, 1, True), 1),
    "one query": (((8, 1), 128, 1, 1024, 1, False), 1),
}


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("name", GROUP_CHOICES)
def test_when_groups_are_split(name, deterministic, library, monkeypatch):
    (heads, head_dim, queries, keys, batch, causal), expected = GROUP_CHOICES[name]
    if deterministic and causal:  # the long tasks come last
        expected = heads[0] // heads[1]
    q, k = (torch.zeros(batch, length, count, head_dim, dtype=torch.bfloat16) for length, count in zip((queries, keys), heads, strict=True))
    monkeypatch.setenv("HF_FLASH2_FAMILY", "auto")
    with emulated.running(monkeypatch, library, emulated.WIDE_HOPPER):
        layout = kernels.Layout(q, k, k, None, None, None, queries, keys, 1.0, -1, 0 if causal else -1, 0.0, 0.0)
    addresses = (0, 0, *[2**40] * 5, *kernels._NO_SEQUENCES, *[2**40] * 4, 0, 0)
    _, workspace = layout._pack_backward(library, (q, q, k, k), addresses, deterministic)
    case = Case("choice", head_dim, heads, (queries,) * batch, (keys,) * batch)
    assert group_splits(workspace.numel(), case, queries, keys) == expected


def test_more_shares_than_thread_blocks_are_refused_before_anything_runs(library, monkeypatch):
    """By what says how much scratch there has to be."""
    monkeypatch.setenv("HF_FLASH2_FAMILY", "auto")
    q = torch.zeros(1, 1, 2 * 34000, 128, dtype=torch.bfloat16)
    k = torch.zeros(2**23 + 2**19, dtype=torch.bfloat16).as_strided((1, 2**20, 34000, 128), (8, 8, 8, 1))
    with emulated.running(monkeypatch, library, emulated.WIDE_HOPPER):
        layout = kernels.Layout(q, k, k, None, None, None, 1, 2**20, 1.0, -1, 0, 0.0, 0.0)
    addresses = (0, 0, *[2**40] * 5, *kernels._NO_SEQUENCES, *[2**40] * 4, 0, 0)
    with pytest.raises(ValueError, match=r"attention backward, sm90, convert: .* must stay below 2\^31, got \d+; give a max_seqlen"):
        layout._pack_backward(library, (q, q, k, k), addresses, True)


IN_ORDER = {  # heads: whether they add in order with all keys, and below a diagonal
    "a head for each of 8 clusters": ((8, 8), (True, True)),
    "or not": ((7, 7), (False, False)),
    "groups, each a task": ((16, 8), (False, True)),
    "groups, two tasks each": ((16, 4), (False, True)),
    "groups, a task for each query head": ((8, 4), (False, False)),
}


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("name", IN_ORDER)
def test_short_wide_heads_add_to_dq_in_order(name, causal, emulate):
    """Where that is faster, above head dim 128: then dq has the same bits in any order of tasks."""
    heads, in_order = IN_ORDER[name]
    sample = Sample(Case("order", 192, heads, (520,), causal=causal), torch.bfloat16, CPU)
    results = [emulate("sm90", sample, emulated.WIDE_HOPPER, seed, 1 + 3 * seed) for seed in (0, 1, 2)]
    check(results[0], sample)
    assert all(torch.equal(result["dq"], results[0]["dq"]) for result in results) == in_order[causal]


TOGETHER = [  # a case, and how many tiles a group has: with each head on its own, together
    (Case("together", heads=(4, 2), lengths_q=(1,), lengths_k=(300,), causal=True), (2, 1)),
    (Case("together", head_dim=128, heads=(8, 2), lengths_q=(3, 3), lengths_k=(300, 300), causal=True), (4, 1)),
    (Case("together", head_dim=128, heads=(8, 1), lengths_q=(70,), lengths_k=(120,), causal=True), (8, 5)),
    (Case("together", head_dim=128, heads=(16, 1), lengths_q=(66,), lengths_k=(300,)), (16, 9)),
    (Case("together", head_dim=192, heads=(8, 1), lengths_q=(17,), lengths_k=(222,), causal=True), (8, 2)),
    (Case("together", heads=(8, 2), lengths_q=(80,), lengths_k=(128,), window=(80, 5)), (8, 5)),  # tiles of 64 rows
    (Case("together", heads=(8, 1), lengths_q=(3, 0, 1), lengths_k=(30, 70, 100), form="packed", causal=True), (8, 1)),
    (Case("together", head_dim=128, heads=(8, 1), lengths_q=(3, 50), lengths_k=(290, 300), form="ranges", padding="left"), (16, 5)),
    (Case("together", head_dim=128, heads=(8, 1), lengths_q=(50,), lengths_k=(300,), form="ranges", padding="holes"), (8, 4)),
    (Case("together", head_dim=128, heads=(3, 1), lengths_q=(1,), lengths_k=(300,)), (1, 1)),  # no power of two
    (Case("together", head_dim=128, heads=(2, 1), lengths_q=(128,), lengths_k=(130,)), (2, 2)),  # whole tiles as they are
    (Case("together", head_dim=128, heads=(2, 1), lengths_q=(1984,), lengths_k=(3,)), (32, 32)),  # 31 of 32: not worth it
]


@pytest.mark.parametrize(("case", "tiles"), [pytest.param(*problem, id=problem[0].id) for problem in TOGETHER])
def test_few_rows_of_a_group_are_computed_together(case, tiles, library, monkeypatch):
    """Fewer tiles, so that K and V are loaded less often, and the very results of each head on its own: of a key head per query head."""
    sample = Sample(case, torch.bfloat16, CPU)
    q, k, v = (x.detach() for x in sample.inputs()[:3])
    group = case.heads[0] // case.heads[1]
    monkeypatch.setenv("HF_FLASH2_FAMILY", "sm90")

    def run(k: torch.Tensor, v: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], int]:
        before = library.emulator_tensor_bytes()
        with emulated.running(monkeypatch, library):
            poison(q, k, v)
            result = sample.call(q, k, v)
        return result, library.emulator_tensor_bytes() - before

    apart, bytes_apart = run(*(x.repeat_interleave(group, dim=-2) for x in (k, v)))
    together, bytes_together = run(k, v)
    assert all(map(torch.equal, together, apart))
    assert bytes_together * tiles[0] == bytes_apart * tiles[1] > 0


TILES = [  # a case, and the rows and keys of its tiles: on both sides of what csrc/sm90/forward_launch.cuh asks for
    (Case("tiles", heads=(1, 1), lengths_q=(320,) * 3), (64, 64)),
    (Case("tiles", heads=(1, 1), lengths_q=(321,) * 3), (192, 128)),
    (Case("tiles", heads=(1, 1), lengths_q=(64,) * 3, lengths_k=(400,) * 3), (64, 64)),  # few queries
    (Case("tiles", heads=(1, 1), lengths_q=(65,) * 3, lengths_k=(400,) * 3), (192, 128)),
    (Case("tiles", heads=(1, 1), lengths_q=(1024, 2), form="packed"), (64, 64)),
    (Case("tiles", heads=(1, 1), lengths_q=(1025, 2), form="packed"), (192, 128)),
    (Case("tiles", heads=(1, 1), lengths_q=(2048,), causal=True), (64, 64)),
    (Case("tiles", heads=(1, 1), lengths_q=(2049,), causal=True), (192, 128)),
    (Case("tiles", heads=(1, 1), lengths_q=(1100,), window=(20, 40)), (64, 64)),
    (Case("tiles", heads=(1, 1), lengths_q=(1100,), window=(983, 40)), (64, 64)),
    (Case("tiles", heads=(1, 1), lengths_q=(1100,), window=(984, 40)), (192, 128)),
    (Case("tiles", heads=(1, 1), head_dim=128, lengths_q=(256,) * 3), (128, 64)),
    (Case("tiles", heads=(1, 1), head_dim=128, lengths_q=(257,) * 3), (64, 64)),  # which fill the fourth tile of 128 rows by a half at most
    (Case("tiles", heads=(1, 1), head_dim=128, lengths_q=(384,) * 3), (128, 128)),
    (Case("tiles", heads=(1, 1), head_dim=128, lengths_q=(448,) * 3), (64, 64)),
    (Case("tiles", heads=(1, 1), head_dim=128, lengths_q=(512,) * 3), (128, 128)),
    (Case("tiles", heads=(1, 1), head_dim=128, lengths_q=(192,) * 3, causal=True), (128, 64)),
    (Case("tiles", heads=(1, 1), head_dim=128, lengths_q=(193,) * 3, causal=True), (64, 64)),
    (Case("tiles", heads=(1, 1), head_dim=128, lengths_q=(448,) * 3, causal=True), (64, 64)),
    (Case("tiles", heads=(1, 1), head_dim=128, lengths_q=(449,) * 3, causal=True), (128, 128)),
    (Case("tiles", heads=(1, 1), head_dim=128, lengths_q=(40, 50, 256), form="packed"), (64, 64)),
    (Case("tiles", heads=(1, 1), head_dim=128, lengths_q=(40, 50, 257), form="packed"), (128, 64)),
    (Case("tiles", heads=(1, 1), head_dim=128, lengths_q=(49, 50, 200), form="packed"), (64, 64)),
    (Case("tiles", heads=(1, 1), head_dim=128, lengths_q=(50, 50, 200), form="packed"), (128, 64)),  # half of the longest on average
    (Case("tiles", heads=(1, 1), head_dim=128, lengths_q=(110, 120, 128), form="packed"), (64, 64)),
    (Case("tiles", heads=(1, 1), head_dim=128, lengths_q=(110, 120, 129), form="packed"), (128, 64)),
    (Case("tiles", heads=(1, 1), head_dim=128, lengths_q=(70, 120, 99), lengths_k=(257, 9, 70), form="packed"), (128, 64)),
    (Case("tiles", heads=(1, 1), head_dim=128, lengths_q=(257, 9, 70), lengths_k=(70, 120, 99), form="packed"), (128, 64)),
    (Case("tiles", heads=(1, 1), head_dim=128, lengths_q=(2, 1024), form="packed"), (128, 64)),
    (Case("tiles", heads=(1, 1), head_dim=128, lengths_q=(2, 1025), form="packed"), (128, 128)),
    (Case("tiles", heads=(1, 1), head_dim=128, lengths_q=(70, 120, 512), form="packed", causal=True), (64, 64)),
    (Case("tiles", heads=(1, 1), head_dim=128, lengths_q=(70, 120, 513), form="packed", causal=True), (128, 64)),
    (Case("tiles", heads=(4, 1), head_dim=128, lengths_q=(30, 20, 7), form="packed"), (128, 64)),  # the rows of a group fill them
    # Of keys alone, some of which are padding: queries fill tiles of 128.
    (Case("tiles", heads=(1, 1), head_dim=128, lengths_q=(200,) * 3, lengths_k=(200, 9, 70), form="ranges", padding="keys"), (128, 64)),
    (Case("tiles", heads=(1, 1), head_dim=128, lengths_q=(200,) * 3, form="ranges", padding="keys", causal=True), (64, 64)),
    (Case("tiles", heads=(1, 1), head_dim=128, lengths_q=(384,) * 3, lengths_k=(384, 9, 70), form="ranges", padding="keys"), (128, 64)),
    (Case("tiles", heads=(1, 1), head_dim=128, lengths_q=(700,), window=(215, 40)), (64, 64)),
    (Case("tiles", heads=(1, 1), head_dim=128, lengths_q=(700,), window=(216, 40)), (128, 128)),
    (Case("tiles", heads=(1, 1), head_dim=80, lengths_q=(256,) * 3), (128, 128)),  # of 384 rows of two large tiles a third would be empty
    (Case("tiles", heads=(1, 1), head_dim=80, lengths_q=(448,) * 3), (64, 64)),
    (Case("tiles", heads=(1, 1), head_dim=80, lengths_q=(576,) * 3), (192, 112)),
    (Case("tiles", heads=(1, 1), head_dim=80, lengths_q=(640,) * 3), (128, 128)),
    (Case("tiles", heads=(1, 1), head_dim=80, lengths_q=(1024,)), (192, 112)),
    (Case("tiles", heads=(1, 1), head_dim=80, lengths_q=(1024,), causal=True), (128, 128)),
    (Case("tiles", heads=(1, 1), head_dim=80, lengths_q=(1025,), causal=True), (192, 112)),
    (Case("tiles", heads=(1, 1), head_dim=80, lengths_q=(70, 120, 512), form="packed"), (64, 64)),
    (Case("tiles", heads=(1, 1), head_dim=80, lengths_q=(70, 120, 513), form="packed"), (192, 112)),
    (Case("tiles", heads=(1, 1), head_dim=80, lengths_q=(576,), dropout_p=0.3), (128, 128)),
    (Case("tiles", heads=(1, 1), head_dim=96, lengths_q=(60,) * 3), (64, 64)),
    (Case("tiles", heads=(1, 1), head_dim=96, lengths_q=(384,) * 3), (128, 128)),
    (Case("tiles", heads=(1, 1), head_dim=96, lengths_q=(448,) * 3), (64, 64)),
    (Case("tiles", heads=(1, 1), head_dim=96, lengths_q=(449,) * 3), (128, 128)),
    (Case("tiles", heads=(1, 1), head_dim=96, lengths_q=(576,) * 3), (128, 128)),
    (Case("tiles", heads=(1, 1), head_dim=96, lengths_q=(192,) * 3, causal=True), (64, 64)),
    (Case("tiles", heads=(1, 1), head_dim=96, lengths_q=(256,) * 2, causal=True), (128, 128)),
    (Case("tiles", heads=(1, 1), head_dim=96, lengths_q=(128,) * 3, causal=True), (64, 64)),  # six tiles are few
    (Case("tiles", heads=(1, 1), head_dim=96, lengths_q=(128,) * 4, causal=True), (128, 128)),
    (Case("tiles", heads=(1, 1), head_dim=96, lengths_q=(128,) * 2), (128, 128)),
    (Case("tiles", heads=(1, 1), head_dim=96, lengths_q=(64,) * 3, lengths_k=(600,) * 3), (64, 64)),  # few, as those of queries
    (Case("tiles", heads=(4, 1), head_dim=96, lengths_q=(2,) * 4, lengths_k=(600,) * 4), (128, 128)),
    (Case("tiles", heads=(1, 1), head_dim=96, lengths_q=(70, 120, 512), form="packed"), (64, 64)),
    (Case("tiles", heads=(1, 1), head_dim=96, lengths_q=(70, 120, 513), form="packed"), (128, 128)),
    (Case("tiles", heads=(1, 1), head_dim=96, lengths_q=(49, 50, 200), form="packed"), (64, 64)),
    (Case("tiles", heads=(1, 1), head_dim=96, lengths_q=(50, 50, 200), form="packed"), (128, 128)),
    (Case("tiles", heads=(1, 1), head_dim=96, lengths_q=(120, 129, 200), form="packed", causal=True), (64, 64)),
    (Case("tiles", heads=(1, 1), head_dim=96, lengths_q=(120, 130, 200), form="packed", causal=True), (128, 128)),
    (Case("tiles", heads=(1, 1), head_dim=96, lengths_q=(235,) * 3, lengths_k=(235, 9, 70), form="ranges", padding="keys"), (64, 64)),
    (Case("tiles", heads=(1, 1), head_dim=96, lengths_q=(236,) * 3, lengths_k=(236, 9, 70), form="ranges", padding="keys"), (128, 128)),
    (Case("tiles", heads=(1, 1), head_dim=96, lengths_q=(700,), window=(215, 40)), (64, 64)),
    (Case("tiles", heads=(1, 1), head_dim=96, lengths_q=(700,), window=(216, 40)), (128, 128)),
]


@pytest.mark.parametrize(("case", "size"), [pytest.param(*problem, id=problem[0].id) for problem in TILES])
def test_sizes_of_tiles(case, size, library, monkeypatch):
    """By what rows fill: seen by what their copies bring, Q once and each block of K and V that a tile sees."""
    rows, keys = size
    sample = Sample(case, torch.bfloat16, CPU)
    monkeypatch.setenv("HF_FLASH2_FAMILY", "sm90")
    before = library.emulator_tensor_bytes()
    with torch.no_grad(), emulated.running(monkeypatch, library):
        sample.call(*sample.inputs()[:3])
    left, right = case.window if not case.causal else (-1, 0)
    group = case.heads[0] // case.heads[1]
    loaded = 0
    for queries, length in zip(case.lengths_q, case.lengths_k, strict=True):
        shift = length - queries
        for begin in range(0, queries * group, rows):
            first = 0 if left < 0 else max(0, begin + shift - left) // keys
            last = length if right < 0 else min(length, begin + rows + shift + right)
            loaded += rows + 2 * keys * (-(-last // keys) - first)
    columns = -(-case.head_dim // 64) * 64  # whole panels
    assert library.emulator_tensor_bytes() - before == loaded * columns * 2


LARGE_TILES = [  # of ragged batches that are long enough for these, of which the table has none that is not too long
    Case("large", 64, (2, 1), (1030, 0, 65, 200), form="packed"),
    Case("large", 64, (1, 1), (70, 1, 300), (1030, 257, 1100), form="packed", window=(1000, 40)),
    Case("large", 64, (1, 1), (1010, 3, 193), form="ranges", padding="mixed"),
    Case("large", 64, (2, 1), (250, 1, 129), (1010, 300, 70), form="ranges", padding="holes"),
    Case("large", 64, (2, 1), (250, 1, 129), (1010, 300, 70), form="ranges", padding="holes", softcap=3.0),
    Case("large", 64, (2, 1), (250, 1, 129), (1010, 300, 70), form="packed", dropout_p=0.3),
    Case("large", 64, (1, 1), (200,) * 2, (400,) * 2, dropout_p=0.3),
    Case("large", 80, (2, 1), (530, 0, 65, 200), form="packed"),
    Case("large", 72, (2, 1), (250, 1, 129), (530, 300, 70), form="ranges", padding="holes", softcap=3.0),
    Case("large", 80, (1, 1), (1100, 3, 193), form="ranges", padding="mixed", causal=True),
    Case("large", 96, (2, 1), (530, 0, 65, 200), form="packed", causal=True),
    Case("large", 96, (2, 1), (250, 1, 129), (510, 300, 70), form="ranges", padding="holes", softcap=3.0),
    Case("large", 128, (2, 1), (1030, 0, 65, 200), form="packed", causal=True),
    Case("large", 128, (1, 1), (1010, 3, 193), form="ranges", padding="mixed"),
    Case("large", 128, (2, 1), (250, 1, 129), (1010, 300, 70), form="ranges", padding="holes", sinks=2.0),
    Case("large", 128, (7, 1), (100,) * 2, (2000, 150), form="ranges", padding="keys"),  # of 14 unequal tiles two make no whole round
]


@pytest.mark.parametrize("case", LARGE_TILES, ids=lambda case: case.id)
def test_large_tiles_of_long_ragged_batches(case, emulate):
    sample = Sample(case, torch.bfloat16, CPU)
    keep = kept_by_next_call(sample)
    check(emulate("sm90", sample, resident=3), sample, keep)


@pytest.fixture
def forward_workspaces(library, monkeypatch) -> list[int]:
    return record_workspaces("forward", library, monkeypatch)


@pytest.fixture
def splits(forward_workspaces):
    """Call with a sample: among how many thread blocks the forwards of this test split its keys, one after another."""

    def of(sample: Sample) -> list[float]:
        case = sample.case
        rows = (sum(case.lengths_q) if case.form == "packed" else sample.batch * sample.seqlen_q) * case.heads[0]
        return [workspace_bytes / (rows * (case.head_dim_v + 1) * 4) for workspace_bytes in forward_workspaces]

    return of


@pytest.mark.parametrize("case", [case for case in CASES if case.group == "split"], ids=lambda case: case.id)
def test_split_keys(case, emulate, splits):
    sample = Sample(case, torch.bfloat16, CPU)
    order = zlib.crc32(case.id.encode())
    check(emulate("sm90", sample, emulated.WIDE_HOPPER, seed=order % 5, resident=1 + order % 3), sample)
    assert [split > 1 for split in splits(sample)] == [True]


def test_split_keys_in_half_precision_and_with_the_gradient_of_lse(emulate, splits):
    sample = Sample(Case("split", lengths_q=(3, 3), lengths_k=(1900, 1900), causal=True), torch.float16, CPU)
    check(emulate("sm90", sample, emulated.WIDE_HOPPER, with_dlse=True), sample, with_dlse=True)
    assert splits(sample) == [4]


@pytest.mark.parametrize("window", ((-1, -1), (-1, 0), (900, 0)))
def test_split_keys_give_the_same_bits_in_any_order(window, emulate, splits):
    sample = Sample(Case("split", 128, (8, 2), lengths_q=(17,), lengths_k=(1100,), window=window), torch.bfloat16, CPU)
    first = emulate("sm90", sample, emulated.WIDE_HOPPER)
    for seed in (1, 2, 3):
        again = emulate("sm90", sample, emulated.WIDE_HOPPER, seed=seed, resident=1 + 5 * seed)
        assert torch.equal(again["out"], first["out"]) and torch.equal(again["lse"], first["lse"])
    assert splits(sample) == [4] * 4


def test_more_shares_of_a_row_than_are_loaded_at_once(emulate, splits):
    """Eight warps have the 47 shares of a row, six each but the last, of which two come in a second turn."""
    sample = Sample(Case("split", 128, (4, 1), lengths_q=(1,), lengths_k=(47 * 64,), sinks=2.0), torch.bfloat16, CPU)
    check(emulate("sm90", sample, emulated.WIDEST_HOPPER), sample)
    assert splits(sample) == [47]


def test_more_pieces_of_a_shared_tile_than_are_loaded_at_once(emulate, forward_workspaces):
    """Two tiles of 18 make no whole round over 16 thread blocks, of which 11 have two of their 22 key blocks each: six pieces a tile."""
    sample = Sample(Case("shared", 128, heads=(9, 1), lengths_q=(200,), lengths_k=(1300,)), torch.bfloat16, CPU)
    check(emulate("sm90", sample, emulated.WIDE_HOPPER), sample)
    assert [size / (128 * (128 + 1) * 4) for size in forward_workspaces] == [11 + 2]


FORWARD_TILES = {64: (192, 128), 96: (128, 128), 128: (128, 128), 192: (128, 128), 256: (128, 80), 512: (128, 64)}  # 192 with 128 of V
SHARED = [  # a case, and how many of its tiles make no whole round over three thread blocks, or, above head dim 256, eight clusters
    (Case("shared", 128, heads=(1, 1), lengths_q=(880,), lengths_k=(1300,)), 1),
    (Case("shared", 128, heads=(1, 1), lengths_q=(640,), lengths_k=(3000,)), 2),  # the second thread block has a piece of both
    (Case("shared", 128, heads=(5, 1), lengths_q=(100, 100), lengths_k=(1290, 1290), sinks=2.0), 1),  # heads and sequences
    (Case("shared", 64, heads=(7, 1), lengths_q=(100,), lengths_k=(1800,)), 1),  # three consumers, of which the last has no rows
    (Case("shared", 96, heads=(7, 7), lengths_q=(100,), lengths_k=(2000,)), 1),
    (Case("shared", 192, heads=(7, 1), lengths_q=(120,), lengths_k=(1100,), head_dim_v=128), 1),
    (Case("shared", 256, heads=(7, 1), lengths_q=(128,), lengths_k=(750,)), 1),
    (Case("shared", 256, heads=(28, 7), lengths_q=(25,), lengths_k=(750,), sinks=2.0), 1),  # the rows of a group in a tile
    (Case("shared", 512, heads=(17, 1), lengths_q=(70,), lengths_k=(260,), sinks=2.0), 1),
]


@pytest.mark.parametrize(("case", "tiles"), [pytest.param(*problem, id=problem[0].id) for problem in SHARED])
def test_tiles_that_make_no_whole_round_are_shared(case, tiles, emulate, forward_workspaces):
    """Their pieces are put together, with the same bits in any order of thread blocks."""
    sample = Sample(case, torch.bfloat16, CPU)
    device, workers = (emulated.HOPPER, 3) if case.head_dim <= 256 else (emulated.WIDE_HOPPER, 8)
    first = emulate("sm90", sample, device, with_dlse=True)
    check(first, sample, with_dlse=True)
    for seed in (1, 2, 3):
        again = emulate("sm90", sample, device, seed, resident=seed)
        assert torch.equal(again["out"], first["out"]) and torch.equal(again["lse"], first["lse"])
    rows, keys = FORWARD_TILES[case.head_dim]
    blocks = tiles * -(-sample.seqlen_k // keys)
    slots = -(-blocks // -(-blocks // workers)) + tiles
    assert [size / (rows * (case.head_dim_v + 1) * 4) for size in forward_workspaces] == [slots] * 4


CHOICES = {  # heads, queries, keys, batch, window: splits on 16 multiprocessors
    "one query": (((8, 1), 1, 64 * 128, 1, (-1, 0)), 16),
    "one query, several sequences": (((8, 1), 1, 64 * 128, 5, (-1, 0)), 3),
    "as many tiles as multiprocessors": (((8, 1), 1, 64 * 128, 16, (-1, 0)), 1),
    "a last round with one tile": (((8, 1), 1, 64 * 128, 17, (-1, 0)), 3),
    "two full rounds": (((8, 1), 1, 64 * 128, 32, (-1, 0)), 1),
    "few keys": (((8, 1), 1, 3 * 64, 1, (-1, 0)), 1),
    "as few as pay": (((8, 1), 1, 3 * 64 + 1, 1, (-1, 0)), 4),
    "shares of 3, not all multiprocessors": (((8, 1), 1, 33 * 64, 1, (-1, 0)), 11),
    "a window": (((8, 1), 1, 64 * 128, 1, (511, 0)), 9),
    "a part of a prompt": (((2, 2), 256, 32 * 128, 1, (-1, 0)), 2),
    "a short prompt": (((2, 2), 512, 512, 1, (-1, 0)), 1),
    "a short prompt, fewer tiles than multiprocessors": (((1, 1), 256, 256, 1, (-1, 0)), 1),
    "a causal prompt, more tiles than multiprocessors": (((3, 3), 1024, 8192, 1, (-1, 0)), 1),
    "the same with all keys": (((3, 3), 1024, 8192, 1, (-1, -1)), 2),
    "no queries": (((8, 1), 0, 64 * 128, 1, (-1, 0)), 1),
}


@pytest.mark.parametrize("name", CHOICES)
def test_when_keys_are_split(name, library, monkeypatch):
    (heads, queries, keys, batch, window), expected = CHOICES[name]
    q, k = (torch.zeros(batch, length, count, 128, dtype=torch.bfloat16) for length, count in zip((queries, keys), heads, strict=True))
    monkeypatch.setenv("HF_FLASH2_FAMILY", "auto")
    with emulated.running(monkeypatch, library, emulated.WIDE_HOPPER):
        params, _ = kernels.Layout(q, k, k, None, None, None, queries, keys, 1.0, *window, 0.0, 0.0)._forward
    addresses = kernels._FORWARD_ADDRESSES.pack(*[2**40] * 7, *kernels._NO_SEQUENCES)
    needed = batch * heads[0] * queries * expected * (128 + 1) * 4 if expected > 1 else 0
    assert library.hf_flash2_forward_workspace_bytes(params, addresses) == needed


def test_a_forward_without_the_workspace_it_needs_does_not_run(library, monkeypatch):
    q, k = (torch.randn(1, length, 1, 128, dtype=torch.bfloat16) for length in (1, 1000))
    out, softmax_lse, workspace = torch.full_like(q, 7), torch.full((1, 1, 1), 7.0), torch.zeros(16 * (128 + 1))
    with emulated.running(monkeypatch, library, emulated.WIDE_HOPPER):
        params, _ = kernels.Layout(q, k, k, None, None, None, 1, 1000, 1.0, -1, -1, 0.0, 0.0)._forward
    tensors = (x.data_ptr() for x in (workspace, q, k, k, out, softmax_lse))
    addresses = kernels._FORWARD_ADDRESSES.pack(0, *tensors, *kernels._NO_SEQUENCES)
    fields = list(kernels._FORWARD.unpack(params))
    for short in (workspace.nbytes, 1, 0):
        fields[3] = workspace.nbytes - short
        ran = library.hf_flash2_forward(kernels._FORWARD.pack(*fields), addresses)
        assert ran == (90 if short == 0 else native.NEEDS_WORKSPACE)
        assert short == 0 or native.last_error(library) == "workspace_bytes is less than hf_flash2_forward_workspace_bytes()"
        assert ((out == 7).all() and (softmax_lse == 7).all()) == (short != 0)


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("family", ("sm80", "sm90"))
def test_errors_do_not_grow_with_the_number_of_keys(family, head_dim, library, monkeypatch):
    """As on a GPU, where products that are added are not rounded: the emulator is compiled for that, too."""
    monkeypatch.setenv("HF_FLASH2_FAMILY", family)
    with emulated.running(monkeypatch, library):
        error, out = large_scores(4096, 4096.0, head_dim, CPU)
    assert error < 3
    assert torch.equal(out, torch.ones_like(out))


@pytest.mark.parametrize("check_keys", (check_nan_spreads, check_one_key_outweighs_all, check_scores_of_minus_infinity))
@pytest.mark.parametrize("head_dim", (64, 128, 512))
@pytest.mark.parametrize("family", ("sm80", "sm90"))
def test_keys_apart(family, head_dim, check_keys, library, monkeypatch):
    monkeypatch.setenv("HF_FLASH2_FAMILY", family)
    with emulated.running(monkeypatch, library):
        check_keys(head_dim, CPU)


@pytest.mark.parametrize("case", [c for c in CASES if c.group == "group" and c.scores * c.head_dim < LONGEST / 4], ids=lambda c: c.id)
def test_heads_of_a_group_are_as_with_keys_of_their_own(case, library, monkeypatch):
    """16 multiprocessors: none of these splits its keys."""
    monkeypatch.setenv("HF_FLASH2_FAMILY", "sm90")
    with emulated.running(monkeypatch, library, emulated.WIDE_HOPPER):
        check_heads_of_a_group(case, "sm90", CPU, workspaces=[])


@pytest.mark.parametrize("lengths", ((100, 60), (60, 60)))
@pytest.mark.parametrize("family", ("sm80", "sm90"))
def test_windows_beyond_every_length(family, lengths, library, monkeypatch):
    monkeypatch.setenv("HF_FLASH2_FAMILY", family)
    with emulated.running(monkeypatch, library):
        check_windows_beyond_every_length(lengths, CPU)


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("head_dim", (64, 192))
@pytest.mark.parametrize("bounds", ((0, 200), (70, 0)))
def test_tokens_but_no_sequence_has_any(bounds, head_dim, deterministic, library, monkeypatch):
    """Of queries, or of keys: what belongs to sequences is zero."""
    cu_seqlens = [torch.tensor([0, bound, bound], dtype=torch.int32) for bound in bounds]
    q, k = (torch.randn(200, 1, head_dim, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    with emulated.running(monkeypatch, library):
        out = flash_attn_varlen_func(q, k, k, *cu_seqlens, *bounds, deterministic=deterministic)
        dq, dk = torch.autograd.grad(out, (q, k), torch.ones_like(out))
    queries, keys = bounds
    assert not any(x.any() for x in (out[:queries], dq[:queries], dk[:keys]))


def test_more_blocks_than_are_counted_in_32_bits(library, monkeypatch):
    """Of 2^17 sequences of one token, none of which is known to be shorter than all."""
    tokens = 1 << 17
    q, cu_seqlens = torch.zeros(tokens, 32, 8, dtype=torch.bfloat16), torch.arange(tokens + 1, dtype=torch.int32)
    sequences = cu_seqlens.data_ptr(), 0, cu_seqlens.data_ptr(), 0, 0, 0, 0, 0  # no mask, dropout, sinks, pages
    message = r"blocks of max_seqlen must stay below 2\^31, got \d+; give a max_seqlen that is closer"
    with emulated.running(monkeypatch, library):
        layout = kernels.Layout(q, q, q, cu_seqlens, cu_seqlens, None, tokens, tokens, 1.0, -1, -1, 0.0, 0.0)
        with pytest.raises(ValueError, match=message):
            layout.forward(q, q, q, (cu_seqlens, cu_seqlens, None, None, None))
        with pytest.raises(ValueError, match=message):
            layout._pack_backward(library, (q, q, q, q), (0, 0, *[2**40] * 5, *sequences, *[2**40] * 4, 0, 0), False)


@pytest.mark.parametrize("form", ("dense", "packed"))
def test_one_token_need_have_no_stride(form, library, monkeypatch):
    """As one of several that are the same has none: the same bits as of one that has."""
    monkeypatch.setenv("HF_FLASH2_FAMILY", "sm90")
    bounds = torch.tensor([0, 1], dtype=torch.int32)
    alike = [torch.randn(2, 64).to(torch.bfloat16).expand(3, 2, 64)[:1] for _ in range(4)]
    alike = [x[None] for x in alike] if form == "dense" else alike
    assert all(x.stride(-3) == 0 for x in alike)
    results = []
    for q, k, v, dout in (alike, [x.clone(memory_format=torch.contiguous_format) for x in alike]):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        with emulated.running(monkeypatch, library):
            out = flash_attn_func(q, k, v) if form == "dense" else flash_attn_varlen_func(q, k, v, bounds, bounds, 1, 1)
            results.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("side", (0, 1))
def test_a_sequence_longer_than_masks_can_count(side, library, monkeypatch):
    """Its first keys would be hidden from its last queries, though nothing limits what these see."""
    lengths = [1, 1]
    for lengths[side], refused in ((2**29, False), (2**29 + 1, True)):
        q, k = (torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16).expand(1, length, 1, 8) for length in lengths)
        with emulated.running(monkeypatch, library):
            layout = kernels.Layout(q[:, :1], k, k, None, None, None, *lengths, 1.0, -1, -1, 0.0, 0.0)
        needed = library.hf_flash2_forward_workspace_bytes(
            layout._forward[0], kernels._FORWARD_ADDRESSES.pack(*[2**40] * 7, *kernels._NO_SEQUENCES)
        )
        assert (needed < 0) == refused
    assert f"max_seqlen_q and max_seqlen_k must be at most 2^29, or closer to the longest sequence if packed, got {2**29 + 1}" in (
        native.last_error(library)
    )


@pytest.mark.parametrize("device", (emulated.A100, emulated.SMALL), ids=("a100", "99kb"))
@pytest.mark.parametrize("head_dim", (*USUAL_HEAD_DIMS, 512))
def test_swizzles_are_free_of_bank_conflicts(head_dim, device, library, emulate):
    before = library.emulator_bank_conflicts()
    emulate("sm80", Sample(Case("banks", head_dim=head_dim, heads=(1, 1), lengths_q=(130,)), torch.bfloat16, CPU), device)
    assert library.emulator_bank_conflicts() == before


@pytest.mark.parametrize("options", ({"softcap": 2.0, "magnitude": 2.0}, {"dropout_p": 0.5}), ids=("softcap", "dropout"))
def test_a_build_of_one_head_dim_takes_smaller_heads(options, backward_families, monkeypatch):
    """With all that they may ask for: the Hopper kernels of head dim 512 have neither caps nor dropout."""
    library = emulated.load(build.build(("*_hdim512_bf16",)))
    sample = Sample(Case("built", 64, (2, 1), (70,), **options), torch.bfloat16, CPU)
    keep = kept_by_next_call(sample)
    monkeypatch.setenv("HF_FLASH2_FAMILY", "auto")
    with emulated.running(monkeypatch, library):
        check(sample.actual(), sample, keep)
    assert last_backend() == "cuda-sm80" and backward_families == ["sm80"]


DISPATCHED = [
    Case("dispatched", heads=(8, 2), lengths_q=(70, 70), causal=True),
    Case("dispatched", lengths_q=(1, 70), lengths_k=(90, 33), form="packed"),
    Case("dispatched", lengths_q=(70, 33), form="ranges", padding="holes", causal=True),
    Case("dispatched", lengths_q=(3, 3), lengths_k=(900, 900)),  # split
]


@pytest.mark.parametrize("case", DISPATCHED, ids=lambda case: case.id)
def test_dispatched_calls_give_the_bits_of_planned_ones(case, library, monkeypatch):
    """The second of two calls too, with other values, from the layout that the first one left."""
    samples = [Sample(case, torch.bfloat16, CPU, seed) for seed in range(2)]
    monkeypatch.setenv("HF_FLASH2_FAMILY", "sm90")
    results = []
    for planned in (True, False):
        with emulated.running(monkeypatch, library, emulated.WIDE_HOPPER), monkeypatch.context() as patch:
            patch.setattr(functional, "_on_gpu", lambda x, planned=planned: planned)
            results.append([sample.actual() for sample in samples])
            assert len(ops.plans) == 1
    for planned, dispatched in zip(*results, strict=True):
        assert all(torch.equal(dispatched[name], planned[name]) for name in planned)


def test_saved_tensors_may_come_back_with_other_strides_and_anywhere(library, monkeypatch):
    """Hooks of saved tensors keep them on the CPU, say, and hand back what they have made of them."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 20, 2, 64).bfloat16().requires_grad_() for _ in range(3))
    key_mask = (torch.rand(2, 40) < 0.5).index_fill(1, torch.tensor([0]), True)[:, :20]
    ranges = torch.tensor([[0, 0], [20, 20], [1, 1]], dtype=torch.int32)

    def moved(x):
        return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)

    results = []
    with emulated.running(monkeypatch, library, emulated.A100):
        for unpack in (lambda x: x, torch.clone, lambda x: x.clone(memory_format=torch.contiguous_format), moved):
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
                out = flash_attn_ranges_func(q, k, v, None, ranges, key_mask)
            results.append(torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))
    assert all(torch.equal(*pair) for result in results[1:] for pair in zip(result, results[0], strict=True))


def test_plans_are_not_for_numbers_that_only_equal_theirs(library, monkeypatch):
    """A call that is wrong on its own is wrong after a right one, too."""
    q = torch.randn(20, 2, 64, dtype=torch.bfloat16)
    cu_seqlens = torch.tensor([0, 20], dtype=torch.int32)
    right = {"max_seqlen_q": 20, "max_seqlen_k": 20, "window_size": (4, 0)}
    wrong = {"max_seqlen_q": 20.0, "max_seqlen_k": 20.0, "window_size": (4, 0.0)}
    with emulated.running(monkeypatch, library):
        flash_attn_varlen_func(q, q, q, cu_seqlens, cu_seqlens, **right)
        assert len(ops.plans) == 1
        for name, value in wrong.items():
            with pytest.raises(ValueError, match=rf"{name} must be .*integer.*got .*\.0"):
                flash_attn_varlen_func(q, q, q, cu_seqlens, cu_seqlens, **right | {name: value})


def test_refusals_reach_python(library, monkeypatch):
    """What the library itself checks, through the same path as on a GPU."""
    q = torch.randn(1, 20, 2, 64, dtype=torch.bfloat16)
    monkeypatch.setenv("HF_FLASH2_FAMILY", "sm90")
    with emulated.running(monkeypatch, library), pytest.raises(native.LibraryError, match="it has no dropout above 0.9"):
        flash_attn_func(q, q, q, dropout_p=0.95)
    with emulated.running(monkeypatch, library), pytest.raises(native.LibraryError, match="it has no dropout of capped scores"):
        flash_attn_func(q, q, q, dropout_p=0.1, softcap=5.0)
    with emulated.running(monkeypatch, library), pytest.raises(ValueError, match="head_dim_v must be a multiple of 8.*got 12"):
        ops._forward_cuda(q, q, q[..., :12], *kernels.DENSE, 20, 20, 0.1, -1, -1, 0.0, 0.0, False)
    with emulated.running(monkeypatch, library, emulated.A100), pytest.raises(native.LibraryError, match="it needs a Hopper GPU"):
        flash_attn_func(q, q, q)


CUDA_12_8, CUDA_13_0, CUDA_13_5 = 12080, 13000, 13050
RUNS = None
# device, driver, toolkit, whether there is PTX, and why the library does not run
INSTALLED = {
    "machine code": (emulated.HOPPER, CUDA_13_0, CUDA_13_0, True, RUNS),
    "machine code of a newer toolkit": (emulated.HOPPER, CUDA_13_0, CUDA_13_5, True, RUNS),
    "PTX of an older toolkit": (emulated.BLACKWELL, CUDA_13_5, CUDA_13_0, True, RUNS),
    "PTX of a newer toolkit": (
        emulated.BLACKWELL,
        CUDA_13_0,
        CUDA_13_5,
        True,
        "built with CUDA 13.5 and has PTX alone for compute capability 12.0; the NVIDIA driver compiles PTX up to CUDA 13.0: update the "
        "driver, or run `HF_FLASH2_ARCHS=120 hf-flash2 build`",
    ),
    "no PTX": (emulated.BLACKWELL, CUDA_13_0, CUDA_13_0, False, "built for sm_80,sm_90a and has no code for compute capability 12.0; run"),
    "old driver": (emulated.HOPPER, CUDA_12_8, CUDA_13_0, True, "supports CUDA 12.8, but libhf_flash2.so was built with CUDA 13.0: update"),
    "no driver": (emulated.HOPPER, 0, CUDA_13_0, True, "no NVIDIA driver is installed"),
    "old GPU": (emulated.TURING, CUDA_13_0, CUDA_13_0, True, "has compute capability 7.5; the kernels need 8.0 (Ampere) or newer: use"),
    "no such GPU": (99, CUDA_13_0, CUDA_13_0, True, "there is no GPU 99 (7 found)"),
}


@pytest.mark.parametrize("name", INSTALLED)
def test_whether_a_gpu_can_run_the_library(name, library, monkeypatch):
    device, driver, toolkit, ptx, reason = INSTALLED[name]
    monkeypatch.setattr(native, "library", lambda: library)
    try:
        library.emulator_install(driver, toolkit, ptx)
        if reason is RUNS:
            native.check_device.__wrapped__(device)
        else:
            with pytest.raises(native.NotAvailableError, match=re.escape(reason)):
                native.check_device.__wrapped__(device)
    finally:
        library.emulator_install(CUDA_13_0, CUDA_13_0, True)

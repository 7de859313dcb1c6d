"""bench_attention without a GPU's clock: points, the counting of FLOPs, providers against each other, statistics, CSV and plots."""

import argparse
import csv
import dataclasses
import itertools
import os
import sys
import types
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend

from hf_flash2 import bench_attention as bench
from hf_flash2 import bench_points, bench_providers, bench_shared, cli, kernels, native, ops
from hf_flash2.bench_shared import ragged_lengths, read_csv, reason_not_writable, write_csv

pytestmark = pytest.mark.timeout(120)

ENVIRONMENT = {"gpu": "some GPU", "torch": "2.0", "date": "2026-01-01"}


class FakeClock:
    """Runs every call, and says that the first one took 1 ms, the next one 2 ms, and so on."""

    def __init__(self):
        self.ticks = itertools.count(1)

    def queue(self, call) -> float:
        call()
        return float(next(self.ticks))

    def milliseconds(self, queued) -> list[float]:
        return list(queued)


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(argv)


def points_of(shapes: str, *argv: str) -> list[bench_points.Point]:
    return list(bench_points.SHAPES[shapes].points(parse(*argv)))


def dense_point(mode="fwd", head_dim=128, causal=False, seqlen=1024, batch=16, heads=16) -> bench_points.Point:
    return bench_points.Point("papers", mode, "bf16", head_dim, causal, seqlen, (seqlen,) * batch, heads, heads)


# ------------------------------------------------------------------------------------------------------------------------------ points


def test_the_default_grid_is_that_of_the_papers():
    points = points_of(*parse().shapes)
    assert len(points) == 2 * 3 * 2 * 6
    assert all(p.batch * p.seqlen == 16384 and p.heads * p.head_dim == 2048 and p.dtype == "bf16" for p in points)
    assert {p.seqlen for p in points} == {512, 1024, 2048, 4096, 8192, 16384}
    assert {p.kind for p in points} == {"dense"}


def test_options_narrow_the_grid():
    points = points_of("papers", "--mode", "fwd+bwd", "--head-dim", "128", "--seqlen", "1024", "--causal", "yes")
    assert points == [dense_point("fwd+bwd", 128, True, 1024, 16, 16)]


def test_grouped_heads_stand_beside_as_many_key_heads():
    points = points_of("gqa", "--mode", "fwd")
    assert {(p.heads, p.heads_k) for p in points} == {(64, 64), (64, 8), (32, 32), (32, 8)}
    assert {p.seqlen for p in points} == {1024, 4096, 16384} and all(p.batch == 2 and p.causal and p.head_dim == 128 for p in points)
    for point in points:
        assert (point.baseline is None) == (point.heads == point.heads_k)
        assert point.baseline is None or (point.baseline in points and point.baseline.tflop == point.tflop)


def test_ragged_batches_stand_beside_a_dense_one_of_equal_work():
    ragged = [point for point in points_of("ragged", "--mode", "fwd") if point.kind == "ragged"]
    assert {(p.batch, p.seqlen, p.head_dim) for p in ragged} == set(
        (batch, seqlen, head_dim) for batch, seqlen in ((16, 2048), (8, 4096), (4, 8192)) for head_dim in (64, 128)
    )
    for point in ragged:
        assert point.fill == pytest.approx(0.3, abs=0.005)
        assert point.baseline.kind == "dense" and point.baseline.only_ours
        assert point.baseline.tflop == pytest.approx(point.tflop, rel=0.15) and point.baseline.seqlen % 128 == 0


@pytest.mark.parametrize("fill", ("0.1", "0.3", "0.7"))
def test_a_dense_batch_beside_short_sequences_has_their_work_too(fill):
    points = points_of("ragged", "--seqlen", "64", "128", "256", "512", "1024", "--tokens", "131072", "--fill", fill)
    for point in (point for point in points if point.baseline is not None):
        assert point.baseline.batch == point.batch and point.baseline.tflop == pytest.approx(point.tflop, rel=0.15)


def test_of_a_work_that_no_full_tile_has_the_dense_batch_has_the_nearest():
    assert [bench_points.length_of_equal_work([n]) for n in (1, 3, 26, 100, 203, 270, 850)] == [1, 3, 24, 96, 192, 256, 896]
    assert bench_points.length_of_equal_work([1, 1, 300]) == 160  # of a root mean square of 173.2


def test_windows_stand_beside_full_causal():
    causal, narrow, wide = points_of("window", "--mode", "fwd")
    assert (narrow.window, wide.window) == (128, 1024) and {p.seqlen for p in (causal, narrow, wide)} == {16384}
    assert narrow.baseline == wide.baseline == causal and causal.only_ours
    assert causal.heads == 16 and causal.batch == 1 and causal.kind == "dense" and narrow.kind == "window"
    assert {point.kind for point in points_of("window", "--head-dim", "512") if point.window is not None} == {"window"}


def test_a_sequence_longer_than_the_tokens_is_one_row():
    """A head wider than the hidden size, one head."""
    for shapes in ("papers", "ragged", "mla", "dropout", "wide"):
        points = points_of(shapes, "--seqlen", "64", "--tokens", "32", "--hidden-size", "16", "--head-dim", "24", "--fill", "1")
        assert {(p.batch, p.heads) for p in points} == {(1, 16 if shapes == "mla" else 1)}, shapes


def test_small_grids_leave_multiprocessors_without_a_block():
    points = points_of("small")
    assert {p.heads for p in points} == {4, 8, 16} and {p.head_dim for p in points} == {64, 128}
    assert max(p.seqlen for p in points) == 2048 and min(p.seqlen for p in points) == 256
    assert all(p.batch == 1 and p.heads * p.seqlen / 128 < 132 for p in points)


def test_wide_heads_are_of_512():
    points = points_of("wide")
    assert {(p.mode, p.head_dim, p.heads, p.kind) for p in points} == {("fwd", 512, 4, "wide"), ("bwd", 512, 4, "wide")}
    assert {(p.batch, p.seqlen) for p in points} == {(16, 1024), (4, 4096), (1, 16384)}


def test_decode_has_few_queries_after_many_keys():
    points = points_of("decode", "--mode", "bwd")
    assert {(p.batch, p.queries, p.seqlen) for p in points} == set(itertools.product((1, 8, 32), (1, 16), (1024, 8192, 32768)))
    assert {(p.mode, p.heads, p.heads_k, p.head_dim, p.causal) for p in points} == {("fwd", 32, 8, 128, True)}
    assert all(p.gigabytes == pytest.approx(p.batch * p.seqlen * 8 * 128 * 2 * 2 / 1e9) for p in points)
    visible = {p.queries: sum(1 for i in range(p.queries) for j in range(1024) if j <= i + 1024 - p.queries) for p in points}
    assert all(p.tflop == pytest.approx(4 * 32 * 128 * visible[p.queries] / 1e12) for p in points if (p.batch, p.seqlen) == (1, 1024))
    assert str(points[-1]) == "fwd d 128 heads 32/8 causal 32 x 16/32768"


@pytest.mark.parametrize(("mode", "factor"), (("fwd", 1.0), ("bwd", 2.5), ("fwd+bwd", 3.5)))
@pytest.mark.parametrize("causal", (True, False))
def test_flops_are_counted_as_in_the_papers(mode, factor, causal):
    point = dense_point(mode, 128, causal, 4096, 4, 16)
    assert point.tflop == pytest.approx(factor * (0.5 if causal else 1) * 4 * 4 * 16 * 4096**2 * 128 / 1e12)


@pytest.mark.parametrize(("mode", "columns"), (("fwd", 192 + 128), ("bwd", 3 * 192 + 2 * 128), ("fwd+bwd", 4 * 192 + 3 * 128)))
def test_latent_attention_has_fewer_columns_of_v(mode, columns):
    points = points_of("mla", "--mode", mode)
    assert {(p.causal, p.batch, p.seqlen) for p in points} == {
        (causal, *size) for causal in (True, False) for size in ((4, 4096), (1, 16384))
    }
    for point in points:
        assert point.heads == point.heads_k == 16 and point.kind == "dense" and "d 192/128 " in str(point)
        assert point.tflop == pytest.approx((0.5 if point.causal else 1) * 2 * point.batch * 16 * point.seqlen**2 * columns / 1e12)


@pytest.mark.parametrize(("left", "lengths"), ((3, (10,)), (20, (10,)), (3, (10, 2)), (0, (7,))))
def test_flops_of_a_window_are_its_visible_area(left, lengths):
    point = bench_points.Point("window", "fwd", "bf16", 16, True, 10, lengths, 2, 2, window=left)
    visible = sum(1 for n in lengths for i in range(n) for j in range(n) if i - left <= j <= i)
    assert point.tflop == pytest.approx(4 * 2 * 16 * visible / 1e12)


def test_padding_is_no_work():
    ragged = bench_points.Point("ragged", "fwd", "bf16", 64, True, 1024, (1024, 100), 8, 8)
    assert ragged.tflop == pytest.approx(0.5 * 4 * 8 * 64 * (1024**2 + 100**2) / 1e12)


@pytest.mark.parametrize(("batch", "seqlen", "fill"), ((16, 2048, 0.33), (4, 8192, 0.29), (8, 64, 1.0), (3, 32, 0.05), (4, 64, 1 / 64)))
def test_lengths_have_the_fill_asked_for(batch, seqlen, fill):
    lengths = ragged_lengths(batch, seqlen, fill)
    assert lengths == ragged_lengths(batch, seqlen, fill) and len(lengths) == batch
    assert min(lengths) >= 1 and max(lengths) <= seqlen
    assert sum(lengths) / (batch * seqlen) == pytest.approx(fill, abs=1 / seqlen)


@pytest.mark.parametrize("fill", ["5", "0", "nan", "0.001"])
def test_an_impossible_fill_is_refused_before_anything_is_timed(fill, capsys):
    args = parse("--shapes", "papers", "ragged", "--seqlen", "64", "--fill", fill)
    assert bench.benchmark(args, [], torch.device("cpu"), None) == 2
    said = capsys.readouterr()
    assert "fill must be between 1 token a row (0.015625) and 1, got " + str(float(fill)) in said.err and not said.out


# --------------------------------------------------------------------------------------------------------------------------- providers

SMALL = {
    "dense": bench_points.Point("papers", "bwd", "bf16", 32, True, 64, (64, 64), 4, 4),
    "full": bench_points.Point("papers", "bwd", "bf16", 32, False, 64, (64, 64), 4, 4),
    "gqa": bench_points.Point("gqa", "bwd", "bf16", 32, True, 64, (64, 64), 4, 2),
    "window": bench_points.Point("window", "bwd", "bf16", 32, True, 64, (64,), 4, 4, window=9),
    "decode": bench_points.Point("decode", "bwd", "bf16", 32, True, 64, (64, 64), 4, 2, queries=1),
    "decode, mask": bench_points.Point("decode", "bwd", "bf16", 32, True, 64, (64, 64), 4, 2, queries=5),
    "ragged": bench_points.Point("ragged", "bwd", "bf16", 32, True, 64, (64, 21, 1), 4, 4),
    "mla": bench_points.Point("mla", "bwd", "bf16", 32, True, 64, (64, 64), 4, 4, head_dim_v=16),
    "ragged full": bench_points.Point("ragged", "bwd", "bf16", 32, False, 64, (64, 21, 1), 4, 4),
}


def providers() -> list[bench_providers.Provider]:
    families = native.families(torch.cuda.current_device()) if torch.cuda.is_available() else ["reference"]
    return bench_providers.all_providers(families, with_eager=True, with_deterministic=True)


def runnable(provider: bench_providers.Provider, device: torch.device) -> bench_providers.Provider:
    """The provider; on a CPU, SDPA's with the math backend."""
    if device.type == "cuda" or not provider.name.startswith(bench_providers.SDPA):
        return provider
    return bench_providers.Provider(provider.name, partial(provider.prepare.func, SDPBackend.MATH), provider.kinds)


@pytest.mark.parametrize("name", SMALL)
def test_every_provider_computes_the_same(name, device, monkeypatch):
    """Output of the real tokens and gradients, against float32 with the mask written out. On a CPU, SDPA runs its math backend."""
    point = SMALL[name]
    problem = bench_providers.Problem(point, device)
    q, k, v = (x.detach().float().requires_grad_() for x in problem.qkv)
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(point.heads // point.heads_k, 2)) * point.head_dim**-0.5
    i, j = torch.arange(64 - q.shape[1], 64, device=device)[:, None], torch.arange(64, device=device)
    left = 64 if point.window is None else point.window
    right = 0 if point.causal else 64
    hidden = (j < i - left) | (j > i + right) | ~problem.real[:, None, None, :]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    truth = torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(point.heads // point.heads_k, 2))
    problem.dout = problem.dout * problem.real[:, -q.shape[1] :, None, None]  # padding outputs differ, and their gradients would too
    gradients = torch.autograd.grad(truth, (q, k, v), problem.dout.float())
    compared = []
    for provider in providers():
        if not provider.takes(point):
            continue
        provider = runnable(provider, device)
        if device.type == "cpu" and provider.name == bench_providers.VARLEN:
            continue
        try:
            with bench.forced(provider.family if device.type == "cuda" else None):
                work = provider.prepare(problem)
                out = work.attend()
                found = () if provider.name.endswith(" paged") else torch.autograd.grad(out, work.inputs, work.dout)
        except RuntimeError as error:
            assert provider.family is None, error  # a rival may not be there
            continue
        packed = out.dim() == 3
        for ours, exact in zip((out, *found), (truth, *gradients)[: 1 + len(found)], strict=True):
            real = problem.real[:, -exact.shape[1] :]
            torch.testing.assert_close(ours.float() if packed else ours.float()[real], exact[real], atol=0.05, rtol=0.05)
        compared.append(provider.name)
    assert len([name for name in compared if name.startswith(bench_providers.OURS)]) >= 1 + (point.kind == "ragged")
    assert bench_providers.EAGER in compared and any(name.startswith(bench_providers.SDPA) for name in compared)


def test_every_provider_drops(device, monkeypatch):
    """With values of 1, out is the probability that was kept, by what was to be kept: 1 in the mean, and not everywhere."""
    point = bench_points.Point("dropout", "bwd", "bf16", 32, True, 64, (64, 64), 4, 4, dropout=0.3)
    problem = bench_providers.Problem(point, device)
    problem.qkv[2].data.fill_(1)
    dropped = []
    for provider in providers():
        if not provider.takes(point):
            continue
        provider = runnable(provider, device)
        with bench.forced(provider.family if device.type == "cuda" else None):
            out = provider.prepare(problem).attend().float()
        assert out.mean().item() == pytest.approx(1, abs=0.05) and out.std() > 0.1, provider.name
        dropped.append(provider.name)
    assert {*dropped} >= {"sdpa flash", "sdpa cudnn", bench_providers.EAGER} and any(
        name.startswith(bench_providers.OURS) for name in dropped
    )


def test_rivals_and_baselines_take_what_they_are_for():
    named = {
        provider.name: provider for provider in bench_providers.all_providers(["sm80", "sm90"], with_eager=False, with_deterministic=True)
    }
    points = SMALL | {"wide": bench_points.Point("wide", "bwd", "bf16", 264, True, 64, (64, 64), 4, 4)}
    taken = {name: {kind for kind, point in points.items() if provider.takes(point)} for name, provider in named.items()}
    dense, ragged = {"dense", "full", "gqa", "mla"}, {"ragged", "ragged full"}
    assert taken["hf_flash2 sm80"] == taken["hf_flash2 sm90"] == dense | {"window", "wide", "decode", "decode, mask"}
    assert taken["hf_flash2 sm90 padded"] == taken["hf_flash2 sm90 packed"] == ragged
    assert taken["hf_flash2 sm90 paged"] == {"decode", "decode, mask"}
    assert taken["hf_flash2 sm90 deterministic"] == dense | {"window", "wide"}
    assert not named["hf_flash2 sm90 deterministic"].takes(dataclasses.replace(SMALL["dense"], mode="fwd"))
    assert taken["sdpa flash"] == taken["sdpa cudnn"] == dense | {"decode"}
    assert taken["sdpa efficient"] == {"wide"}
    assert taken["sdpa efficient, mask"] == taken["sdpa cudnn, mask"] == ragged | {"window", "decode, mask"}
    only_ours = bench_points.Point("window", "fwd", "bf16", 32, True, 64, (64,), 4, 4, only_ours=True)
    assert [name for name, provider in named.items() if provider.takes(only_ours)] == ["hf_flash2 sm80", "hf_flash2 sm90"]


def test_deterministic_backwards_are_asked_for(monkeypatch):
    asked = []
    attend = bench_providers.flash_attn_func
    monkeypatch.setattr(
        bench_providers, "flash_attn_func", lambda *args, **options: asked.append(options["deterministic"]) or attend(*args, **options)
    )
    for provider in bench_providers.all_providers(["reference"], with_eager=False, with_deterministic=True):
        if provider.name.startswith(bench_providers.OURS) and provider.takes(SMALL["dense"]):
            provider.prepare(bench_providers.Problem(SMALL["dense"], torch.device("cpu"))).attend()
    assert asked == [False, True]


@pytest.mark.parametrize("signature", ("window_size", "is_causal"))
def test_both_signatures_of_varlen_attn(signature, monkeypatch):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    calls = []

    def with_window(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size=(-1, -1)):
        calls.append((tuple(q.shape), cu_q.tolist(), max_q, window_size))

    def with_causal(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False):
        calls.append((tuple(q.shape), cu_q.tolist(), max_q, is_causal))

    monkeypatch.setattr(varlen, "varlen_attn", with_window if signature == "window_size" else with_causal)
    bench_providers.torch_varlen(bench_providers.Problem(SMALL["ragged"], torch.device("cpu"))).attend()
    assert calls == [((86, 4, 32), [0, 64, 85, 86], 64, (-1, 0) if signature == "window_size" else True)]
    if signature == "window_size":
        bench_providers.torch_varlen(bench_providers.Problem(SMALL["window"], torch.device("cpu"))).attend()
        assert calls[1][-1] == (9, 0)
    else:
        with pytest.raises(ValueError, match="no window"):
            bench_providers.torch_varlen(bench_providers.Problem(SMALL["window"], torch.device("cpu")))


@pytest.mark.parametrize("and_more", (False, True), ids=("out", "out, lse"))
def test_flash_attention_4_is_timed_where_it_is_installed(and_more, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # as if it were not
    assert bench_providers.FA4 not in {provider.name for provider in bench_providers.all_providers([], with_eager=False)}
    packages = {name: types.ModuleType(name) for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")}
    for name, module in packages.items():
        monkeypatch.setitem(sys.modules, name, module)
    calls = []

    def flash_attn_func(q, k, v, causal=False):
        calls.append(causal)
        return (v, None) if and_more else v

    packages["flash_attn.cute.interface"].flash_attn_func = flash_attn_func
    (fa4,) = (provider for provider in bench_providers.all_providers([], with_eager=False) if provider.name == bench_providers.FA4)
    assert {point.kind for point in SMALL.values() if fa4.takes(point)} == {"dense"}
    problem = bench_providers.Problem(SMALL["dense"], torch.device("cpu"))
    assert fa4.prepare(problem).attend() is problem.qkv[2] and calls == [problem.point.causal]
    (ours, *_) = bench.rows_of(problem.point, {"hf_flash2 sm90": [2.0], "sdpa cudnn": [3.0], bench_providers.FA4: [1.0]})
    assert ours.percent_of_best_rival == pytest.approx(50)


# --------------------------------------------------------------------------------------------------------------------------- measuring


@pytest.fixture
def few_calls(monkeypatch):
    monkeypatch.setattr(bench, "WARM_UP_CALLS", 1)
    monkeypatch.setattr(bench, "MIN_ROUNDS", 3)
    monkeypatch.setattr(bench, "MAX_ROUNDS", 3)
    monkeypatch.setattr(bench, "release_memory", lambda device: None)  # it goes through all objects of the test process, at every point


def measure(point: bench_points.Point, providers: list[bench_providers.Provider]) -> dict[str, list[float]]:
    return bench.measure([point], providers, torch.device("cpu"), FakeClock())[point]


def dense_provider(name: str, attend=None, family=None) -> bench_providers.Provider:
    """Our dense attention under a name; or a function in the place of its call."""

    def prepare(problem):
        work = bench_providers.dense(problem)
        return work if attend is None else work._replace(attend=attend)

    return bench_providers.Provider(name, prepare, ("dense",), family)


def test_providers_take_turns(few_calls, monkeypatch):
    """Once a round, and not always behind the same one."""
    monkeypatch.setattr(bench, "MAX_ROUNDS", 8)
    names = ["first", "second", "third"]
    times = measure(SMALL["dense"], [dense_provider(name) for name in names])
    order = {int(time): name for name, timed in times.items() for time in timed}  # FakeClock counts the calls
    assert sorted(order) == list(range(4, 28))  # 1 to 3 went to the warm-up
    rounds = [[order[turn] for turn in range(begin, begin + 3)] for begin in range(4, 28, 3)]
    assert all(sorted(turns) == sorted(names) for turns in rounds)
    assert {turns[0] for turns in rounds} == set(names)


def test_points_take_turns_with_their_baseline(few_calls):
    """They are compared: a GPU is as fast as it is warm. Those of another baseline come later."""
    args = parse(
        "--shapes", "window", "--seqlen", "64", "32", "--mode", "fwd", "--hidden-size", "16", "--head-dim", "16", "--window", "8", "24"
    )
    queued = []

    class Recording(FakeClock):
        def queue(self, call):
            queued.append(call())
            return super().queue(call)

    provider = bench_providers.Provider(
        "ours", lambda problem: bench_providers.Work(lambda: problem.point, (), problem.dout), ("dense", "window"), "sm90"
    )
    assert bench.benchmark(args, [provider], torch.device("cpu"), Recording()) == 0
    points = list(bench_points.window(args))
    assert [point.window for point in points] == [None, 8, 24] * 2
    for compared in (points[:3], points[3:]):
        for _ in range(1 + bench.MIN_ROUNDS):  # the warm-up first
            turns, queued = queued[:3], queued[3:]
            assert sorted(turns, key=points.index) == compared
    assert not queued


@pytest.mark.parametrize(("slowest_ms", "rounds"), ((0.0, 100), (5.0, 60), (1000.0, 30)))
def test_rounds_follow_from_the_slowest_call(slowest_ms, rounds, monkeypatch):
    monkeypatch.setattr(bench, "release_memory", lambda device: None)
    clock = types.SimpleNamespace(queue=lambda call: call(), milliseconds=list)  # a call says how long it takes
    point = dataclasses.replace(SMALL["dense"], mode="fwd")
    found = [dense_provider(f"takes {ms}", lambda ms=ms: ms) for ms in (slowest_ms, slowest_ms / 20)]
    times = bench.measure([point], found, torch.device("cpu"), clock)[point]
    assert times == {f"takes {ms}": [ms] * rounds for ms in (slowest_ms, slowest_ms / 20)}


@pytest.mark.parametrize(("mode", "attended", "differentiated"), (("fwd", 2, 0), ("bwd", 1, 2), ("fwd+bwd", 2, 2)))
def test_what_a_mode_times(mode, attended, differentiated):
    """Two calls: of the backward alone, the forward runs once, before."""
    x, forwards, backwards = torch.ones(3, requires_grad=True), [], []

    def attend():
        forwards.append(1)
        out = 2 * x
        out.register_hook(lambda _: backwards.append(1))
        return out

    call = bench.timed_call(mode, bench_providers.Work(attend, (x,), torch.full((3,), 5.0)))
    for _ in range(2):
        (result,) = [call()] if mode == "fwd" else call()
        assert result.tolist() == [2.0 if mode == "fwd" else 10.0] * 3
    assert (len(forwards), len(backwards)) == (attended, differentiated)


@pytest.mark.parametrize("error", (torch.OutOfMemoryError("no memory\nmore"), ValueError("no memory"), NotImplementedError("no memory")))
def test_one_that_cannot_run_is_left_out_with_its_reason(few_calls, capsys, error):
    def fails():
        raise error

    times = measure(SMALL["dense"], [dense_provider("broken", fails), dense_provider("good")])
    assert list(times) == ["good"]
    assert capsys.readouterr().err == "broken left out at bwd d 32 heads 4/4 causal 2 x 64: no memory\n"


def test_what_is_wrong_with_ours_is_not_left_out(few_calls, capsys):
    """Where a rival's compiler may raise anything."""

    def fails():
        raise LookupError("wrong")

    def times(family):
        return measure(SMALL["dense"], [dense_provider("broken", fails, family)])

    assert times(None) == {} and "broken left out" in capsys.readouterr().err
    with pytest.raises(LookupError, match="wrong"):
        times("sm90")


@pytest.mark.parametrize("ran", ("sm80", "sm90"))
def test_a_family_that_gives_way_is_left_out(few_calls, capsys, monkeypatch, ran):
    """The Hopper family hands a backward that it does not have to the other one: not to be shown under its name."""
    monkeypatch.setattr(kernels.Layout, "backward", lambda: ("gradients", native.FAMILIES[ran]))
    original = kernels.Layout.backward

    def prepare(problem):
        work = bench_providers.dense(problem)
        inputs = tuple(x.detach().requires_grad_() for x in work.inputs)
        inputs[0].register_hook(lambda _: kernels.Layout.backward() and None)
        return work._replace(attend=lambda: bench_providers.flash_attn_func(*inputs, causal=True), inputs=inputs)

    times = measure(SMALL["dense"], [bench_providers.Provider("hopper", prepare, ("dense",), "sm90")])
    assert list(times) == (["hopper"] if ran == "sm90" else [])
    assert ("HF_FLASH2_FAMILY=sm90 gave way to sm80" in capsys.readouterr().err) == (ran == "sm80")
    assert kernels.Layout.backward is original


@pytest.mark.parametrize("before", (None, "sm80"))
def test_the_family_is_forced_and_put_back(monkeypatch, before):
    monkeypatch.delenv("HF_FLASH2_FAMILY", raising=False)
    if before is not None:
        monkeypatch.setenv("HF_FLASH2_FAMILY", before)
    with bench.forced("sm90"):
        assert os.environ["HF_FLASH2_FAMILY"] == "sm90"
    assert os.environ.get("HF_FLASH2_FAMILY") == before
    with bench.forced(None):
        assert os.environ.get("HF_FLASH2_FAMILY") == before


def test_another_build_is_in_place_for_its_calls_alone(monkeypatch):
    """With plans of its own: they hold the library that made them."""
    mine, other = object(), object()
    monkeypatch.setattr(native, "library", lambda: mine)
    monkeypatch.setattr(ops, "plans", {"key": "mine"})
    for expected in ({}, {"key": "other"}):
        with bench.forced(None, other):
            assert native.library() is other and ops.plans == expected
            ops.plans["key"] = "other"
        assert native.library() is mine and ops.plans == {"key": "mine"}
    with pytest.raises(LookupError), bench.forced("sm90", other):
        raise LookupError
    assert native.library() is mine and ops.plans == {"key": "mine"}


def test_every_call_of_another_build_goes_to_it(few_calls, monkeypatch):
    mine, other, called = object(), object(), []
    monkeypatch.setattr(native, "library", lambda: mine)

    def provider(name, library):
        def prepare(problem):
            work = bench_providers.dense(problem)
            return work._replace(attend=lambda: called.append((name, native.library())) or work.attend())

        return bench_providers.Provider(name, prepare, ("dense",), library=library)

    point = dataclasses.replace(SMALL["dense"], mode="fwd")
    measure(point, [provider("now", None), provider("before", other)])
    assert set(called) == {("now", mine), ("before", other)}
    assert len(called) == 2 * (bench.WARM_UP_CALLS + 1 + bench.MIN_ROUNDS)


def test_every_call_of_a_family_is_held_to_it(few_calls, monkeypatch):
    monkeypatch.delenv("HF_FLASH2_FAMILY", raising=False)
    called = []
    point = dataclasses.replace(SMALL["dense"], mode="fwd")
    families = ("sm80", "sm90", None)
    found = [
        dense_provider(str(name), lambda name=name: called.append((name, os.environ.get("HF_FLASH2_FAMILY"))), name) for name in families
    ]
    measure(point, found)
    assert set(called) == {(name, name) for name in families} and len(called) == 3 * (bench.WARM_UP_CALLS + 1 + bench.MIN_ROUNDS)


KINDS = " padded", " packed", " paged"  # of ours, beside the one for dense batches


def test_other_builds_stand_in_the_place_of_the_rivals(few_calls, monkeypatch):
    """Each is compared with the same kernels: padded with padded, though packed is faster."""
    monkeypatch.setattr(native, "forward_family", lambda index, asked: asked or 90)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.delenv("HF_FLASH2_FAMILY", raising=False)
    found = bench_providers.builds([("before", object())], with_deterministic=True)
    kinds = ["sm90", "sm90 padded", "sm90 packed", "sm90 paged", "sm90 deterministic"]
    assert [provider.name for provider in found] == [f"{build} {kind}" for build in ("hf_flash2", "before") for kind in kinds]
    assert [provider.library is None for provider in found] == [True] * 5 + [False] * 5
    times = {"hf_flash2 sm90 padded": 2.0, "hf_flash2 sm90 packed": 1.0, "before sm90 padded": 3.0, "before sm90 packed": 1.1}
    rows = bench.rows_of(SMALL["ragged"], {name: [ms] * 3 for name, ms in times.items()})
    assert [row.percent_of_best_rival for row in rows] == [pytest.approx(150), pytest.approx(110), None, None]


def test_the_command_takes_other_builds(monkeypatch, capsys):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    timed = []
    monkeypatch.delenv("HF_FLASH2_FAMILY", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(native, "reason_unavailable", lambda index: None)
    monkeypatch.setattr(native, "forward_family", lambda index, asked: asked or 90)
    monkeypatch.setattr(native, "load", lambda path, rebuild: object())
    monkeypatch.setattr(bench, "CudaClock", lambda device: None)
    monkeypatch.setattr(bench, "benchmark", lambda args, providers, device, clock: timed.append([x.name for x in providers]) or 0)
    assert bench.run(parser.parse_args(["--against", "builds/before.so"])) == 0
    assert timed == [[f"{build} sm90{kind}" for build in ("hf_flash2", "before") for kind in ("", *KINDS)]]
    monkeypatch.setenv("HF_FLASH2_FAMILY", "sm80")
    assert bench.run(parser.parse_args(["--against", "before.so", "--eager"])) == 0
    assert [name for name in timed[1] if not name.endswith(KINDS)] == ["hf_flash2 sm80", "before sm80", "eager"]
    assert bench.run(parser.parse_args(["--against", "a/before.so", "b/before.so"])) == 2
    assert "--against: 'before' would stand for a column" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("paths", "reason"),
    (
        (["a/old.so", "b/old.so"], "'old' would stand for a column"),
        (["hf_flash2_old.so"], "name each file otherwise"),
        (["an old one.so"], "without spaces"),
        (["nowhere.so"], "nowhere.so cannot be loaded"),
    ),
)
def test_builds_that_cannot_be_told_apart_or_loaded(paths, reason):
    with pytest.raises((ValueError, native.NotAvailableError), match=reason):
        bench_providers.other_builds([Path(path) for path in paths])


def test_every_set_of_shapes_runs_to_its_csv(few_calls, tmp_path, capsys, monkeypatch):
    """Everything but the clock, on shapes that a CPU can do."""
    small = ["--seqlen", "32", "64", "--tokens", "128", "--hidden-size", "64", "--head-dim", "16", "--window", "8", "24", "--causal", "yes"]
    args = parse(
        "--shapes", *bench_points.SHAPES, "--mode", "bwd", *small, "--csv", str(tmp_path / "b.csv"), "--plot", str(tmp_path / "b.png")
    )
    plots = []
    monkeypatch.setattr(bench, "plot", lambda path, rows, environment: plots.append((path.name, {row.shapes for row in rows})))
    families = ["reference"]  # any value: the reference backend does not read it
    assert bench.benchmark(args, bench_providers.all_providers(families, False), torch.device("cpu"), FakeClock()) == 0
    with (tmp_path / "b.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {line["shapes"] for line in lines} == set(bench_points.SHAPES)
    ours = {f"hf_flash2 reference{kind}" for kind in ("", *KINDS)}
    assert {line["provider"] for line in lines} >= ours | {"sdpa flash"}
    compared = {line["shapes"] for line in lines if line["percent_of_baseline"]}
    assert compared == {"gqa", "ragged", "window", "dropout"}
    assert plots == [(f"b-{name}.png", {name}) for name in bench_points.SHAPES]
    printed = capsys.readouterr().out
    assert "% of dense batch of equal work" in printed and all(f"  {name}  " in printed for name in ours)


def test_what_was_measured_before_an_interrupt_is_in_the_csv(few_calls, tmp_path):
    def prepare(problem):
        if problem.point.seqlen == 64:
            raise KeyboardInterrupt
        return bench_providers.dense(problem)

    small = ["--mode", "fwd", "--seqlen", "32", "64", "--tokens", "64", "--hidden-size", "16", "--head-dim", "16", "--causal", "yes"]
    args = parse(*small, "--csv", str(tmp_path / "b.csv"))
    with pytest.raises(KeyboardInterrupt):
        bench.benchmark(args, [bench_providers.Provider("ours", prepare, ("dense",), "sm90")], torch.device("cpu"), FakeClock())
    (row,), _ = read_csv(tmp_path / "b.csv", bench.Row)
    assert row.seqlen == 32


# --------------------------------------------------------------------------------------------------------------- statistics and output


def measured(point: bench_points.Point) -> list[bench.Row]:
    times = {"hf_flash2 sm80": [1.0, 2.0, 3.0], "sdpa flash": [2.0, 4.0, 6.0], "sdpa cudnn": [1.0, 1.0, 1.0], "eager": [0.1, 0.1, 0.1]}
    return bench.rows_of(point, times)


def test_statistics_and_the_best_rival():
    """The share is that of the fastest of torch's own; eager is no rival."""
    point = dense_point()
    ours, flash, *_ = measured(point)
    assert (ours.ms, ours.ms_p20, ours.ms_p80) == pytest.approx((2.0, 1.4, 2.6))
    assert ours.tflops == pytest.approx(point.tflop / 2e-3)
    assert ours.percent_of_best_rival == pytest.approx(50)
    assert flash.percent_of_best_rival is None
    (ours, _) = bench.rows_of(point, {"hf_flash2 sm80": [2.0], "torch varlen_attn": [3.0]})
    assert ours.percent_of_best_rival == pytest.approx(150)


def test_ours_is_compared_with_the_same_family_at_the_baseline():
    dense, ragged = points_of("ragged", "--mode", "fwd", "--head-dim", "64", "--seqlen", "2048")
    baseline = bench.rows_of(dense, {"hf_flash2 sm80": [2.0], "hf_flash2 sm90": [1.0]})
    sm80, sm90, rival = bench.rows_of(
        ragged, {"hf_flash2 sm80 padded": [2.0], "hf_flash2 sm90 packed": [2.0], "sdpa flash": [1.0]}, baseline
    )
    assert sm80.percent_of_baseline == pytest.approx(100 * ragged.tflop / dense.tflop)
    assert sm90.percent_of_baseline == pytest.approx(50 * ragged.tflop / dense.tflop)
    assert rival.percent_of_baseline is None


def test_csv_and_table(tmp_path):
    points = points_of("papers", "--head-dim", "64", "--seqlen", "512", "1024")
    rows = [row for point in points for row in measured(point)]
    write_csv(tmp_path / "new" / "b.csv", bench.Row, rows, ENVIRONMENT)
    with (tmp_path / "new" / "b.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(rows) == 8 * 4
    assert lines[0] | {"provider": "hf_flash2 sm80", "mode": "fwd", "ms": "2", "gpu": "some GPU", "date": "2026-01-01"} == lines[0]
    assert lines[0] | {"heads": "32", "heads_k": "32", "window": "", "fill": "1", "batch": "32"} == lines[0]
    line = bench.format_line(points[0], measured(points[0]), ["hf_flash2 sm80", "not there", "sdpa cudnn"])
    assert line.split()[:7] == ["fwd", "64", "32/32", "full", "32", "x", "512"]
    ours = measured(points[0])[0]
    assert f" {bench.digits(ours.tflops)} ({bench.digits(ours.rate(2.6))}-{bench.digits(ours.rate(1.4))}) " in line  # slow to fast
    assert line.endswith(" 50") and " - " in line


def test_columns_stand_apart():
    point = points_of("papers", "--head-dim", "64", "--seqlen", "512")[0]
    providers = [provider.name for provider in bench_providers.our_kernels(bench_providers.OURS, "sm90", with_deterministic=True)]
    assert "hf_flash2 sm90 deterministic" in providers
    line = bench.format_line(point, measured(point), providers)
    for shapes in bench_points.SHAPES.values():
        header = bench.format_header(providers, shapes)
        for name in providers:
            end = header.index(f"  {name}  ") + 2 + len(name)
            assert line[end - 1] != " " and line[end] == " "  # its cell ends where the name does
        assert header.endswith(f"  % of {shapes.baseline}" if shapes.baseline else "  ours, % of best rival")


def test_what_is_read_from_a_csv_is_what_was_written(tmp_path):
    points = points_of("papers", "--head-dim", "64", "--seqlen", "512")[:1] + points_of("window", "--mode", "fwd") + points_of("decode")[:2]
    rows = [row for point in points for row in measured(point)]
    write_csv(tmp_path / "b.csv", bench.Row, rows, ENVIRONMENT)
    read, environment = read_csv(tmp_path / "b.csv", bench.Row)
    assert environment == ENVIRONMENT
    assert read == [
        dataclasses.replace(row, **{name: float(f"{x:.5g}") for name, x in dataclasses.asdict(row).items() if isinstance(x, float)})
        for row in rows
    ]
    assert [list(map(type, dataclasses.astuple(row))) for row in read] == [list(map(type, dataclasses.astuple(row))) for row in rows]


def test_a_csv_is_drawn_again_without_a_gpu(tmp_path, capsys, monkeypatch):
    plots = []
    monkeypatch.setattr(bench, "plot", lambda path, rows, environment: plots.append((path.name, rows, environment)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = {name: measured(points_of(name, "--mode", "fwd")[0]) for name in ("window", "papers")}
    write_csv(tmp_path / "one.csv", bench.Row, rows["papers"], ENVIRONMENT)
    write_csv(tmp_path / "two.csv", bench.Row, rows["window"] + rows["papers"], ENVIRONMENT)
    for name in ("one", "two"):
        assert cli.main(["bench", "attention", "--from-csv", str(tmp_path / f"{name}.csv"), "--plot", str(tmp_path / "f.png")]) == 0
    assert [(name, {row.shapes for row in rows}, len(rows), environment) for name, rows, environment in plots] == [
        ("f.png", {"papers"}, 4, ENVIRONMENT),
        ("f-window.png", {"window"}, 4, ENVIRONMENT),
        ("f-papers.png", {"papers"}, 4, ENVIRONMENT),
    ]
    assert f"wrote {tmp_path / 'f-papers.png'}" in capsys.readouterr().out


def test_a_csv_from_before_there_was_dropout_is_read(tmp_path):
    rows = measured(dense_point())
    write_csv(tmp_path / "b.csv", bench.Row, rows, ENVIRONMENT)
    with (tmp_path / "b.csv").open(newline="") as file:
        names, *lines = csv.reader(file)
    at = names.index("dropout")
    older = [",".join(line[:at] + line[at + 1 :]) for line in (names, *lines)]
    (tmp_path / "b.csv").write_text("\n".join(older) + "\n")
    read, environment = read_csv(tmp_path / "b.csv", bench.Row)
    assert environment == ENVIRONMENT and [row.dropout for row in read] == [0.0] * len(rows)


def test_a_csv_that_a_spreadsheet_has_saved_is_read(tmp_path):
    write_csv(tmp_path / "b.csv", bench.Row, measured(dense_point()), ENVIRONMENT)
    written = read_csv(tmp_path / "b.csv", bench.Row)
    (tmp_path / "b.csv").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "b.csv").read_bytes())
    assert read_csv(tmp_path / "b.csv", bench.Row) == written


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text.replace("head_dim_v", "other"), "it has no column head_dim_v"),
        (lambda text: text.replace("some GPU", "another GPU", 1), "it is of more than one run"),
        (lambda text: text.replace(",64,", ",many,", 1), "many"),
        (lambda text: text[: text.rindex(",0.30002,")], "line 5 is cut short"),
        (lambda text: text.splitlines()[0], "it has no lines"),
        (lambda text: text.replace(",ragged,", ",square,"), "its shapes must be among papers, gqa"),
        (lambda text: text.replace(",ragged,", ",window,"), "NoneType"),
        (None, "No such file"),
    ],
)
def test_what_is_no_csv_of_the_benchmark_is_refused(change, reason, tmp_path, capsys):
    path = tmp_path / "b.csv"
    if change is not None:
        write_csv(path, bench.Row, measured(points_of("ragged", "--head-dim", "64")[1]), ENVIRONMENT)
        path.write_text(change(path.read_text()))
    assert cli.main(["bench", "attention", "--from-csv", str(path), "--plot", str(tmp_path / "b.png")]) == 2
    said = capsys.readouterr().err
    assert f"--from-csv {path}" in said and reason in said


def test_a_csv_is_not_drawn_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_shared, "reason_no_figure", lambda: "a figure needs matplotlib")
    write_csv(tmp_path / "b.csv", bench.Row, measured(dense_point()), ENVIRONMENT)
    assert cli.main(["bench", "attention", "--from-csv", str(tmp_path / "b.csv"), "--plot", str(tmp_path / "b.png")]) == 2
    assert "a figure needs matplotlib" in capsys.readouterr().err


def test_the_version_of_cudnn_is_written_as_its_makers_do(monkeypatch):
    versions = {91002: "9.10.2", 90701: "9.7.1", None: "0.0.0"}
    for number, text in versions.items():
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda number=number: number)
        assert bench_shared.describe_environment(torch.device("cpu"))["cudnn"] == text


def test_what_has_no_points_or_no_times_is_no_success(tmp_path, capsys):
    path = tmp_path / "b.csv"
    assert bench.benchmark(parse("--shapes", "small", "--seqlen", "8192", "--csv", str(path)), [], torch.device("cpu"), None) == 2
    assert "--shapes small has nothing to measure with --seqlen 8192" in capsys.readouterr().err
    nobody = [bench_providers.Provider("ours", lambda problem: None, (), "sm90")]
    asked = parse("--seqlen", "512", "--mode", "fwd", "--csv", str(path))
    assert bench.benchmark(asked, nobody, torch.device("cpu"), None) == 1
    said = capsys.readouterr()
    assert "nothing could be measured" in said.err and "wrote" not in said.out


def test_a_figure_has_to_go_somewhere(tmp_path, capsys):
    write_csv(tmp_path / "b.csv", bench.Row, measured(dense_point()), ENVIRONMENT)
    assert cli.main(["bench", "attention", "--from-csv", str(tmp_path / "b.csv")]) == 2
    assert "--plot PATH" in capsys.readouterr().err


def test_nothing_is_written_but_the_figure_of_what_was_measured_before(tmp_path, capsys):
    write_csv(tmp_path / "b.csv", bench.Row, measured(dense_point()), ENVIRONMENT)
    figure = ["--from-csv", str(tmp_path / "b.csv"), "--plot", str(tmp_path / "b.png")]
    for command in (["attention", "--csv"], ["train", "--csv"], ["train", "--profile"]):
        assert cli.main(["bench", *command, str(tmp_path / "other.json"), *figure]) == 2
        assert f"nothing to write to {command[-1]} {tmp_path / 'other.json'}" in capsys.readouterr().err


def test_decode_is_shown_in_gigabytes_per_second():
    point = points_of("decode")[0]
    (row,) = bench.rows_of(point, {"hf_flash2 sm90": [2.0]})
    assert row.gb_per_s == row.rate(2.0) == pytest.approx(point.gigabytes / 2e-3) and row.rate(1.0) == pytest.approx(point.gigabytes / 1e-3)
    line = bench.format_line(point, [row], ["hf_flash2 sm90"]).split()
    assert line[4:8] == ["1", "x", "1/1024", "1.00"] and line[8] == bench.digits(row.gb_per_s)
    (dense,) = bench.rows_of(dense_point(), {"hf_flash2 sm90": [2.0]})
    assert dense.rate(2.0) == dense.tflops


def test_the_x_axis_runs_from_the_shortest_to_the_longest():
    points = points_of("papers", "--seqlen", "2048", "512", "1024")
    assert bench.x_axis(bench_points.SHAPES["papers"], points) == ["512", "1k", "2k"]
    windows = points_of("window", "--window", "1024", "96", "128")
    assert bench.x_axis(bench_points.SHAPES["window"], windows) == ["96", "128", "1k"]


def test_a_baseline_is_drawn_as_it_was_measured():
    dense, ragged = points_of("ragged", "--mode", "fwd", "--head-dim", "64", "--seqlen", "2048")
    baseline = bench.rows_of(dense, {"hf_flash2 sm80": [2.0], "hf_flash2 sm90": [1.0]})
    rows = bench.rows_of(ragged, {"hf_flash2 sm80 padded": [4.0], "hf_flash2 sm90 packed": [3.0], "sdpa flash": [1.0]}, baseline)
    curves = bench.baseline_curves(rows, bench_points.SHAPES["ragged"], ["8 x 1k", "16 x 2k"])
    assert curves == {row.provider: ([1], [pytest.approx(row.tflops)]) for row in baseline}


@pytest.mark.parametrize("shapes", bench_points.SHAPES)
def test_plot(tmp_path, shapes):
    pytest.importorskip("matplotlib")
    providers = bench_providers.all_providers(["sm80", "sm90"], with_eager=False)
    rows: dict[bench_points.Point | None, list[bench.Row]] = {}
    for point in points_of(shapes, "--mode", "fwd"):
        times = {provider.name: [1.0, 2.0] for provider in providers if provider.takes(point)}
        rows[point] = bench.rows_of(point, times, rows.get(point.baseline, []))
    bench.plot(tmp_path / "b.png", [row for measured in rows.values() for row in measured], ENVIRONMENT)
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_a_single_point_is_not_plotted(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="at least two points"):
        bench.plot(tmp_path / "b.png", measured(dense_point()), ENVIRONMENT)
    args = parse("--shapes", "papers", "small", "--seqlen", "256", "--plot", str(tmp_path / "b.png"))
    assert bench.benchmark(args, [], torch.device("cpu"), clock=None) == 2  # before anything is timed
    assert "at least two points" in capsys.readouterr().err


def test_figures_have_a_color_of_their_own_for_each_implementation():
    providers = bench_providers.all_providers(["sm80", "sm90"], with_eager=True, with_deterministic=True)
    for kind in {kind for provider in providers for kind in provider.kinds}:
        names = [provider.name for provider in providers if kind in provider.kinds]
        assert len({bench.COLORS[name] for name in names}) == len(names), kind


@pytest.mark.parametrize(
    ("paths", "reason"),
    [
        (["new/a.csv", "a.png", None], None),
        (["a.csv", "b.png", "a.csv"], "a.csv cannot be written: it is asked for twice"),
        (["."], "cannot be written: Is a directory"),
        (["file/a.csv"], "file is no folder"),
    ],
)
def test_files_that_cannot_be_written_are_found_first(paths, reason, tmp_path):
    (tmp_path / "file").touch()
    found = reason_not_writable(*(path and tmp_path / path for path in paths))
    assert found is None if reason is None else reason in found
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["file"]


@pytest.mark.parametrize("command", [["attention"], ["train", "--arms", "sdpa"], ["attention", "--from-csv", "b.csv"]])
def test_nothing_is_measured_for_files_that_cannot_be_written(command, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "b.csv", bench.Row, measured(dense_point()), ENVIRONMENT)
    assert cli.main(["bench", *command, "--plot", "b.csv/f.png"]) == 2
    assert "b.csv/f.png cannot be written: b.csv is no folder" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_cpu_is_refused(capsys):
    assert cli.main(["bench", "attention"]) == 1
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_the_command_names_its_benchmarks(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench"])
    assert caught.value.code == 2
    assert "attention|train" in capsys.readouterr().err


@pytest.mark.gpu
def test_it_times_every_provider(tmp_path, capsys):
    small = [
        "--mode",
        "fwd",
        "bwd",
        "fwd+bwd",
        "--head-dim",
        "64",
        "--seqlen",
        "512",
        "1024",
        "--tokens",
        "2048",
        "--eager",
        "--causal",
        "yes",
    ]
    assert cli.main(["bench", "attention", "--shapes", *bench_points.SHAPES, *small, "--csv", str(tmp_path / "b.csv")]) == 0
    with (tmp_path / "b.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {line["provider"] for line in lines} >= {
        "hf_flash2 sm80",
        "hf_flash2 sm80 padded",
        "hf_flash2 sm80 packed",
        "hf_flash2 sm80 paged",
        "sdpa flash",
        "eager",
    }
    assert {line["shapes"] for line in lines} == set(bench_points.SHAPES)
    assert all(float(line["ms"]) > 0 for line in lines)
    assert "ours, % of best rival" in capsys.readouterr().out

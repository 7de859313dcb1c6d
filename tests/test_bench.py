"""bench.py without a clock: the grid, the counting of FLOPs, statistics, CSV and plot. The timing itself runs where there is a GPU."""

import argparse
import csv

import pytest
import torch

from hf_flash2 import bench

pytestmark = pytest.mark.timeout(120)

ENVIRONMENT = {"gpu": "some GPU", "torch": "2.0", "date": "2026-01-01"}


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(argv)


def test_the_default_grid_is_that_of_the_papers():
    points = list(bench.grid(parse("attention")))
    assert len(points) == 2 * 3 * 2 * 6
    assert all(p.batch * p.seqlen == 16384 and p.heads * p.head_dim == 2048 and p.dtype == "bf16" for p in points)
    assert {p.seqlen for p in points} == {512, 1024, 2048, 4096, 8192, 16384}


def test_options_narrow_the_grid():
    points = list(bench.grid(parse("attention", "--mode", "fwd+bwd", "--head-dim", "128", "--seqlen", "1024", "--causal", "yes")))
    assert points == [bench.Point("fwd+bwd", "bf16", 128, True, 1024, 16, 16)]


@pytest.mark.parametrize(("mode", "factor"), (("fwd", 1.0), ("bwd", 2.5), ("fwd+bwd", 3.5)))
@pytest.mark.parametrize("causal", (True, False))
def test_flops_are_counted_as_in_the_papers(mode, factor, causal):
    point = bench.Point(mode, "bf16", 128, causal, 4096, 4, 16)
    assert point.tflop == pytest.approx(factor * (0.5 if causal else 1) * 4 * 4 * 16 * 4096**2 * 128 / 1e12)


def measured(point: bench.Point) -> list[bench.Row]:
    times = {"hf_flash2 sm80": [1.0, 2.0, 3.0], "sdpa flash": [2.0, 4.0, 6.0], "sdpa cudnn": [1.0, 1.0, 1.0], "eager": [0.1, 0.1, 0.1]}
    return bench.rows_of(point, {name: torch.tensor(ms) for name, ms in times.items()})


def test_statistics_and_the_best_rival():
    """The share is that of the fastest SDPA backend; eager is no rival."""
    point = bench.Point("fwd", "bf16", 128, False, 1024, 16, 16)
    ours, flash, *_ = measured(point)
    assert (ours.ms, ours.ms_p20, ours.ms_p80) == pytest.approx((2.0, 1.4, 2.6))
    assert ours.tflops == pytest.approx(point.tflop / 2e-3)
    assert ours.percent_of_best_rival == pytest.approx(50)
    assert flash.percent_of_best_rival is None


def test_csv_and_table(tmp_path):
    points = list(bench.grid(parse("attention", "--head-dim", "64", "--seqlen", "512", "1024")))
    rows = [row for point in points for row in measured(point)]
    bench.write_csv(tmp_path / "new" / "b.csv", rows, ENVIRONMENT)
    with (tmp_path / "new" / "b.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(rows) == 8 * 4
    assert lines[0] | {"provider": "hf_flash2 sm80", "mode": "fwd", "ms": "2", "gpu": "some GPU", "date": "2026-01-01"} == lines[0]
    line = bench.format_line(points[0], measured(points[0]), ["hf_flash2 sm80", "not there", "sdpa cudnn"])
    assert line.split()[:4] == ["fwd", "64", "full", "512"]
    assert line.rstrip().endswith("50 %") and " - " in line


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    points = bench.grid(parse("attention", "--head-dim", "64", "128", "--seqlen", "512", "1024", "16384"))
    bench.plot(tmp_path / "b.png", [row for point in points for row in measured(point)], ENVIRONMENT)
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_a_single_point_is_not_plotted(tmp_path):
    pytest.importorskip("matplotlib")
    rows = measured(bench.Point("fwd", "bf16", 128, False, 1024, 16, 16))
    with pytest.raises(SystemExit, match="at least two lengths"):
        bench.plot(tmp_path / "b.png", rows, ENVIRONMENT)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_cpu_is_refused(capsys):
    assert bench.run(parse("attention")) == 1
    assert "needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_it_times_every_provider(tmp_path, capsys):
    arguments = ["--mode", "fwd", "bwd", "fwd+bwd", "--head-dim", "64", "--seqlen", "512", "1024", "--tokens", "2048", "--eager"]
    assert bench.run(parse("attention", *arguments, "--csv", str(tmp_path / "b.csv"))) == 0
    with (tmp_path / "b.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {line["provider"] for line in lines} >= {"hf_flash2 sm80", "sdpa flash", "eager"}
    assert all(float(line["ms"]) > 0 for line in lines)
    assert "ours / best rival" in capsys.readouterr().out

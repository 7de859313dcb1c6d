"""The figures of README.md and docs/FIGURES.md are those of the committed data."""

import itertools
import json
import re
from pathlib import Path

import pytest

from hf_flash2 import bench_attention, bench_providers, bench_train
from hf_flash2.bench_shared import read_csv

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
FIGURES = (ROOT / "docs/FIGURES.md").read_text()
DOCS = ROOT / "docs/h200"
BOTH_DIRECTIONS = pytest.mark.parametrize(("mode", "title"), [("fwd", "Forward: ahead of cuDNN"), ("bwd", "Backward: ahead of cuDNN")])


def table_below(title: str, text: str = FIGURES) -> list[list[str]]:
    """The cells of the first table behind a title, its two lines of header aside, without emphasis."""
    lines = text[text.index(title) :].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    table = list(itertools.takewhile(lambda line: line.startswith("|"), lines[first:]))
    return [[cell.strip() for cell in line.strip("|").replace("**", "").split("|")] for line in table[2:]]


@BOTH_DIRECTIONS
def test_attention_alone(mode, title):
    rows, _ = read_csv(DOCS / "attention.csv", bench_attention.Row)
    speeds: dict[tuple[str, ...], list[str]] = {}
    for row in sorted((row for row in rows if row.mode == mode and "deterministic" not in row.provider), key=lambda row: row.seqlen):
        mask = "causal" if row.causal else "full"
        speeds.setdefault((str(row.head_dim), mask, row.provider), []).append(f"{row.tflops:.0f}")
    assert {tuple(cells[:3]): cells[3:] for cells in table_below(title)} == speeds


def test_attention_beside_cudnn_in_the_readme():
    rows, _ = read_csv(DOCS / "attention.csv", bench_attention.Row)
    tflops = {(row.mode, row.head_dim, row.causal, row.seqlen, row.provider): row.tflops for row in rows}
    measured = []
    for mode, head_dim, causal in itertools.product(("fwd", "bwd"), (64, 128, 256), (False, True)):
        points = [(mode, head_dim, causal, 512 << i) for i in range(6)]
        words = [{"fwd": "forward", "bwd": "backward"}[mode], str(head_dim), "causal" if causal else "full"]
        measured.append(words + [f"{tflops[(*point, 'hf_flash2 sm90')]:.0f} / {tflops[(*point, 'sdpa cudnn')]:.0f}" for point in points])
    assert table_below("**Attention alone**", README) == measured


@BOTH_DIRECTIONS
def test_how_far_ahead(mode, title):
    rows, _ = read_csv(DOCS / "attention.csv", bench_attention.Row)
    ours = [row for row in rows if (row.mode, row.provider) == (mode, "hf_flash2 sm90")]
    ahead = {
        wide: [row.percent_of_best_rival - 100 for row in ours if row.percent_of_best_rival >= 100 and (row.head_dim > 128) == wide]
        for wide in (False, True)
    }
    sentence = FIGURES[FIGURES.index(title) :].split("\n")[0]
    said = re.match(title + r"( everywhere)?, by (\d+) to (\d+) % at d 64 and 128, by (\d+) to (\d+) % at d 256", sentence)
    everywhere, *numbers = said.groups()
    assert [int(number) for number in numbers] == [round(limit) for wide in (False, True) for limit in (min(ahead[wide]), max(ahead[wide]))]
    behind = [row for row in ours if row.percent_of_best_rival < 100]
    assert (everywhere is None) == bool(behind)
    for row in behind:
        mask = "causal" if row.causal else "full"
        assert f"{mask} at {row.seqlen}" in sentence
        assert f"{100 - row.percent_of_best_rival:.0f} % behind at d {row.head_dim}" in sentence


def backward_tflops():
    rows, _ = read_csv(DOCS / "attention.csv", bench_attention.Row)
    return {(row.head_dim, row.causal, row.seqlen, row.provider): row.tflops for row in rows if row.mode == "bwd"}


def test_how_far_ahead_of_flash_attention_2():
    tflops = backward_tflops()
    times = [ours / tflops[(*point, "sdpa flash")] for (*point, provider), ours in tflops.items() if provider == "hf_flash2 sm90"]
    assert f"and {min(times):.1f} to {max(times):.1f} times torch's FlashAttention-2." in FIGURES


def test_grouped_heads_and_ragged_batches_against_rivals():
    rows, _ = read_csv(DOCS / "attention_shapes.csv", bench_attention.Row)
    backward, _ = read_csv(DOCS / "attention_groups.csv", bench_attention.Row)
    ranges = []
    for mode, of in (("fwd", rows), ("bwd", backward)):
        ours = [row for row in of if (row.provider, row.shapes, row.mode) == ("hf_flash2 sm90", "gqa", mode)]
        percent = [row.percent_of_best_rival for row in ours if row.heads > row.heads_k]
        ranges.append(f"{min(percent):.0f} to {max(percent):.0f} %")
    assert f"64/8 and 32/8, d 128, batch 2: {ranges[0]} forward, {ranges[1]} backward" in FIGURES
    masked = [row.tflops for row in rows if row.shapes == "ragged" and row.provider.startswith("sdpa") and row.provider.endswith("mask")]
    assert f"SDPA with a padding mask reaches {min(masked):.0f} to {max(masked):.0f} TFLOP/s." in FIGURES


def test_what_deterministic_mode_keeps():
    tflops = backward_tflops()
    kept: dict[bool, list[float]] = {False: [], True: []}
    for (head_dim, *point, provider), ours in tflops.items():
        if provider == "hf_flash2 sm90 deterministic":
            kept[head_dim > 128].append(100 * ours / tflops[(head_dim, *point, "hf_flash2 sm90")])
    narrow, wide = (f"{min(kept[wide]):.0f} to {max(kept[wide]):.0f} %" for wide in (False, True))
    assert f"it keeps {narrow} of that speed at d 64 and 128, {wide} at d 256." in FIGURES


def test_beside_flash_attention_4():
    rows, _ = read_csv(DOCS / "attention_fa4.csv", bench_attention.Row)
    tflops = {(row.mode, row.head_dim, row.causal, row.seqlen, row.provider): row.tflops for row in rows}
    measured, ahead = [], {"fwd": [], "bwd": []}
    for mode, head_dim, causal in itertools.product(("fwd", "bwd"), (64, 128), (False, True)):
        points = [(mode, head_dim, causal, seqlen) for seqlen in (1024, 4096, 16384)]
        percent = [100 * tflops[(*point, "hf_flash2 sm90")] / tflops[(*point, bench_providers.FA4)] for point in points]
        ahead[mode] += [value - 100 for value in percent]
        words = [{"fwd": "forward", "bwd": "backward"}[mode], str(head_dim), "causal" if causal else "full"]
        measured.append([*words, *(f"{value:.0f}" for value in percent)])
    assert table_below("## FlashAttention-4") == measured
    forward, backward = (f"{min(ahead[mode]):.0f} to {max(ahead[mode]):.0f} %" for mode in ("fwd", "bwd"))
    assert min(map(min, ahead.values())) > 0
    for text in (README, FIGURES):
        assert f"ahead at every point, by {forward} forward and {backward} backward" in text


@pytest.mark.parametrize(
    ("text", "title", "names"),
    [
        (README, "**A training step**", ["train", "train_gemma4", "train_vl", "train_gemma3"]),
        (FIGURES, "## A training step", ["train", "train_gemma4", "train_vl", "train_gemma3"]),
        (README, "**A compiled training step**", ["train_compiled"]),
        (FIGURES, "## A compiled training step", ["train_compiled"]),
    ],
)
def test_a_training_step(text, title, names):
    read = [row for name in names for row in read_csv(DOCS / f"{name}.csv", bench_train.Row)[0]]
    rows = [row for row in read if row.outcome == bench_train.OK]
    measured = [[f"{row.tokens_per_second:,.0f}", f"{row.peak_gib:.1f} GiB", f"{row.step_ms:.0f}"] for row in rows]
    table = table_below(title, text)
    assert [[re.sub(r" \(.+ ×\)", "", speed), memory, ms] for _, _, speed, memory, ms in table] == measured
    baseline = {row.preset: row.tokens_per_second for row in rows if row.arm == "sdpa"}
    for row, cells in zip(rows, table, strict=True):
        said = re.search(r"\((.+) ×\)", cells[2])
        assert said or row.arm != bench_train.PACKED
        if said:
            assert float(said[1]) == pytest.approx(row.tokens_per_second / baseline[row.preset], rel=0.015)


def test_heads_of_512():
    rows, _ = read_csv(DOCS / "attention_wide.csv", bench_attention.Row)
    speeds = {(row.provider, row.mode, row.causal, row.seqlen): row.tflops for row in rows}

    def spread(numbers: list[float], form: str) -> str:
        return f"{min(numbers):{form}} to {max(numbers):{form}}"

    def times(mode: str, provider: str = "hf_flash2 sm90", rival: str = "sdpa efficient") -> list[float]:
        return [speed / speeds[(rival, *point)] for (name, *point), speed in speeds.items() if name == provider and point[0] == mode]

    def tflops(mode: str, causal: bool) -> list[float]:
        return [speed for (name, *point), speed in speeds.items() if name == "hf_flash2 sm90" and point[:2] == [mode, causal]]

    kept = [100 * part for part in times("bwd", "hf_flash2 sm90 deterministic", "hf_flash2 sm90")]
    bullet = " ".join(FIGURES[FIGURES.index("- **Heads of 512**") :].split("\n- ")[0].split())
    for claim in (
        f"forward {spread(times('fwd'), '.1f')} times, {spread(tflops('fwd', False), '.0f')} TFLOP/s full at 1k to 16k, "
        f"{spread(tflops('fwd', True), '.0f')} causal",
        f"backward {spread(times('bwd'), '.1f')} times, {spread(tflops('bwd', False), '.0f')} and {spread(tflops('bwd', True), '.0f')}",
        f"deterministic {spread(kept, '.0f')} % of that",
        f"forward {spread(times('fwd', 'hf_flash2 sm80'), '.1f')} times, backward {spread(times('bwd', 'hf_flash2 sm80'), '.1f')} times",
    ):
        assert claim in bullet


def test_decoding_beside_cudnn():
    rows, _ = read_csv(DOCS / "attention_shapes.csv", bench_attention.Row)
    steps = {(row.provider, row.batch, row.seqlen): row.ms for row in rows if row.shapes == "decode" and row.queries == 1}
    percent: dict[int, list[float]] = {}
    for (provider, batch, seqlen), ms in steps.items():
        if provider == "hf_flash2 sm90":
            percent.setdefault(batch, []).append(100 * steps[("sdpa cudnn", batch, seqlen)] / ms)
    one, eight, many = (f"{min(percent[batch]):.0f} to {max(percent[batch]):.0f}" for batch in (1, 8, 32))
    said = f"32/8 heads, in % of cuDNN: {one} with one sequence, {eight} with 8, {many} with 32."
    assert said in " ".join(FIGURES.split())
    everywhere = [value for values in percent.values() for value in values]
    assert f"after 1k to 32k cached keys: {min(everywhere):.0f} to {max(everywhere):.0f} % of cuDNN." in README


@pytest.mark.parametrize(("text", "title"), [(README, "**Fine-tuning**"), (FIGURES, "## Fine-tuning")], ids=["README", "FIGURES"])
def test_fine_tuning(text, title):
    runs = json.loads((DOCS / "finetune_lora.json").read_text())["runs"]
    assert table_below(title, text) == [
        [run["implementation"].replace("-", " "), f"{run['tokens_per_second']:,.0f}", f"{run['peak_memory_bytes'] / 2**30:.1f} GiB"]
        for run in runs
    ]


def test_generation():
    lines = [line.split() for line in (DOCS / "generate.txt").read_text().splitlines() if "tokens/s" in line]
    speeds = {(implementation, cache): speed for implementation, cache, _, speed, *_ in lines}
    caches = ("dynamic", "static", "paged")
    names = ("eager", "sdpa", "hf_flash2")
    assert table_below("## Generation") == [[name, *(speeds.get((name, cache), "") for cache in caches)] for name in names]
    [said] = re.findall(r"- Generation, 64 left-padded prompts: (.+?\.)\n", README.replace("\n  ", " "))
    in_turn = [(name, cache) for cache in caches for name in ("hf_flash2", "eager", "sdpa")]
    assert re.findall(r"\d[\d,]*\d", said) == [speeds[key] for key in in_turn if key in speeds]


def test_the_gpu_tests_are_those_of_the_record():
    record = json.loads((ROOT / "tests/gpu_run.json").read_text())
    said = f"he tests that ran on one {record['gpu']}, at {record['commit']}:"
    assert said in README and said in FIGURES
    assert record["tests"]["failed"] == 0


@pytest.mark.parametrize(("text", "folder"), [(README, ROOT), (FIGURES, ROOT / "docs")], ids=["README", "FIGURES"])
def test_what_it_links_to_is_there(text, folder):
    paths = [path for path in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in path]
    assert len(paths) > 10
    assert [path for path in paths if not (folder / path).exists()] == []


def test_every_plot_is_shown():
    shown = {(ROOT / "docs" / path).resolve() for path in re.findall(r"!\[[^]]+\]\(([^)]+)\)", FIGURES)}
    assert shown == set((ROOT / "docs").glob("*/*.png"))


def test_the_sections_of_tuning_that_kernels_name_are_there():
    sections = re.findall(r"^#+ (.+)$", (ROOT / "docs/TUNING.md").read_text(), re.MULTILINE)
    code = "".join(re.sub(r"\n *//", "", path.read_text()) for path in sorted((ROOT / "csrc").rglob("*.*")) if path.suffix != ".json")
    named = re.findall(r'TUNING\.md, "([^"]+)"', code)
    assert set(named) - set(sections) == set()
    assert len(named) > 40

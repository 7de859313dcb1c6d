"""Calls drawn at random, for what nobody thought of when the tables of cases.py and test_kvcache.py were written.

They are the same in every run. HF_FLASH2_RANDOM_CALLS=20000 draws so many of each kind, HF_FLASH2_RANDOM_SEED=1 others; a failure names its
call, which those tables can then hold.
"""

import os
import random

import pytest
import torch
from cases import Case, Sample
from test_kernels import DTYPES, ON_GPU, admitted, compare, kept_by_next_call
from test_kvcache import Decoding, check_decoding

pytestmark = pytest.mark.timeout(120)

COUNT = int(os.environ.get("HF_FLASH2_RANDOM_CALLS", 200 if ON_GPU else 40))
SEED = int(os.environ.get("HF_FLASH2_RANDOM_SEED", 0))
MOST_SCORES, LONGEST = (30_000_000, 4000) if ON_GPU else (60_000, 300)
BATCHES = (1, 2, 3, 5, 9, 300) if ON_GPU else (1, 2, 3, 5, 9)  # of 300 short sequences there are more thread blocks than run at once
# Fewer keys than that, or a window that shows a query one, make eager's gradients exact; ours come from a rounded out, as in every
# FlashAttention, and there is no rounding of eager's to measure them by.
FEWEST_KEYS = 8
RISES = (0.0, 0.0, 0.0, 12.0) if ON_GPU else (0.0,)  # float64 is measured by itself, and scores that high leave it a rounding of its own


def drawn(kind: str, number: int) -> random.Random:
    return random.Random(f"{SEED} {kind} {number}")


def head_dims(draw: random.Random) -> tuple[int, int]:
    head_dim = draw.choice((64, 96, 128, 192, 256, draw.randint(1, 256), draw.randrange(8, 257, 8), draw.randint(257, 512)))
    return head_dim, draw.choice((64, 128, draw.randrange(8, 257, 8), 512)) if draw.random() < 0.12 else head_dim


def length(draw: random.Random, least: int, most: int) -> int:
    """Often a whole number of blocks, or one more or less."""
    near = draw.choice((64, 80, 112, 128, 192, 256, 512)) * draw.randint(1, 6) + draw.choice((-1, 0, 1))
    return draw.choice((min(max(near, least), most), draw.randint(least, most), draw.randint(least, min(most, least + 20))))


def lengths(draw: random.Random, batch: int, least: int, most: int) -> tuple[int, ...]:
    return tuple(0 if draw.random() < 0.06 else length(draw, least, most) for _ in range(batch))


def attention_case(number: int) -> Case:
    draw = drawn("attention", number)
    form = draw.choice(("dense", "packed", "ranges"))
    head_dim, head_dim_v = head_dims(draw)
    heads_k, group = draw.choice((1, 1, 2, 3, 4)), draw.choice((1, 1, 2, 3, 4, 5, 8))
    batch = draw.choice(BATCHES)
    most = min(int((MOST_SCORES / (batch * heads_k * group)) ** 0.5), LONGEST)
    few_queries = draw.random() < 0.2
    most_q, most_k = (draw.choice((1, 4, 17)), min(4 * most, LONGEST)) if few_queries else (most, most)
    padding = draw.choice(("right", "left", "mixed", "holes", "keys")) if form == "ranges" else "right"
    equal = few_queries or draw.random() < 0.5
    lengths_k = None if equal and not few_queries else lengths(draw, batch, FEWEST_KEYS, most_k)
    lengths_q = lengths(draw, batch, 1 if lengths_k else FEWEST_KEYS, most_q)
    if form == "dense":
        lengths_q, lengths_k = (length(draw, FEWEST_KEYS, most),) * batch, (length(draw, FEWEST_KEYS, most_k),) * batch
    elif padding == "keys":
        lengths_q, lengths_k = (max(1, *lengths_q),) * batch, lengths_k or lengths(draw, batch, FEWEST_KEYS, most)
    layouts = ["plain"] * 5 + ["kv_packed", "wide", "cache", "misaligned"]
    layouts += ["tail"] if form == "packed" else []
    layout = draw.choice(layouts)
    if layout == "kv_packed" and head_dim != head_dim_v:
        layout = "plain"
    window = (draw.choice((-1, 5, 31, 64, 127, 128, 500)), draw.choice((-1, 0, 5, 64, 100))) if draw.random() < 0.35 else (-1, -1)
    extras = [{}, {}, {}, {"magnitude": 3.0}, {"sinks": 2.0}, {"softcap": draw.choice((2.0, 50.0))}, {"dropout_p": 0.2}]
    extras.append({"rise": draw.choice(RISES)})
    return Case(
        f"random{number}", head_dim, (heads_k * group, heads_k), lengths_q, lengths_k, form, padding, draw.random() < 0.5, window, layout,
        head_dim_v=head_dim_v, **draw.choice(extras),
    )  # fmt: skip


def decoding_case(number: int) -> Decoding:
    draw = drawn("decoding", number)
    head_dim, head_dim_v = (-(-d // 8) * 8 for d in head_dims(draw))
    heads_k, batch = draw.choice((1, 2, 3, 4)), draw.choice((1, 2, 3, 7, 20))
    most = draw.choice((40, 300, LONGEST if batch <= 3 else min(LONGEST, 500)))
    held = tuple(draw.choice((-1, 0)) if draw.random() < 0.1 else length(draw, 0, most) for _ in range(batch))
    new = draw.choice((0, 1, 1, 1, 2, 4, 17, 130)) if max(held) > 0 else draw.choice((1, 4, 130))
    return Decoding(
        f"random{number}", head_dim, (heads_k * draw.choice((1, 2, 3, 4, 7, 8)), heads_k), (*held, length(draw, 1, most)), new,
        draw.choice((new or 1, new or 1, 1, 2, 5, 16, 40)), draw.choice((128, 128, 256, 384, 0)), head_dim_v,
        window=(draw.choice((-1, 5, 64, 130, 700)), draw.choice((-1, 0, 3))) if draw.random() < 0.4 else (-1, -1),
        softcap=draw.choice((0.0, 0.0, 0.0, 5.0)), sinks=draw.random() < 0.2, rise=draw.choice(RISES),
        causal=draw.random() < 0.7,
    )  # fmt: skip


@pytest.mark.parametrize("number", range(COUNT))
def test_attention(number, family, device, record_errors, monkeypatch):
    sample = Sample(attention_case(number), DTYPES[number % len(DTYPES)], device)
    print(sample.case)
    admitted(family, sample, monkeypatch)
    keep = kept_by_next_call(sample)
    deterministic = number % 3 == 0
    actual = sample.actual(deterministic=deterministic)
    record_errors(
        compare(actual, sample.expected(torch.float64, keep), sample.expected(sample.dtype, keep), sample.dtype, sample.sum_sizes())
    )
    kept_by_next_call(sample)
    again = sample.actual(deterministic=deterministic)
    for name in actual.keys() - (set() if deterministic else {"dq"}):
        assert torch.equal(again[name], actual[name]), f"{name} is not the same a second time"


@pytest.mark.parametrize("number", range(COUNT))
def test_decoding(number, family, device, monkeypatch):
    case = decoding_case(number)
    print(repr(case))
    check_decoding(case, DTYPES[number % len(DTYPES)], family, device, monkeypatch)

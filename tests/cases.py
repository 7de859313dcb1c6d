"""The one table of attention problems that every backend is tested on, and how a case becomes tensors.

A case is a batch of sequences (`lengths_q`, `lengths_k`) in one of three forms: dense, packed (cu_seqlens) or ranges into a padded batch.
`Sample` holds it twice: as clean padded tensors for tests/oracle.py, and as the call of the library, where everything that must not be read
is NaN: padding, cache slots behind the sequences, rows behind the last packed token.
"""

import math
import zlib
from dataclasses import dataclass

import oracle
import torch

from hf_flash2 import flash_attn_func, flash_attn_ranges_func, flash_attn_varlen_func, reference

RANGE_PADDING = 21  # rows of padding beside the longest sequence of a "ranges" case
TAIL = 5  # rows behind the last sequence of a "tail" layout


@dataclass(frozen=True)
class Case:
    group: str
    head_dim: int = 64
    heads: tuple[int, int] = (4, 2)  # query, key
    lengths_q: tuple[int, ...] = (129, 129)
    lengths_k: tuple[int, ...] | None = None  # default: lengths_q
    form: str = "dense"  # dense | packed | ranges
    padding: str = "right"  # where a "ranges" case has its padding: right | left | mixed | holes | keys (the queries have none)
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    layout: str = "plain"  # plain | qkv_split | kv_packed | wide | cache | misaligned | expanded_dout | tail
    magnitude: float = 1.0  # standard deviation of q, k, v
    rise: float = 0.0  # by which scores are higher, for every third query and a fourth of it for the next, 128 keys further to the front
    dropout_p: float = 0.0
    head_dim_v: int | None = None  # default: head_dim
    sinks: float = 0.0  # standard deviation of the attention sinks; 0 = none
    softcap: float = 0.0

    def __post_init__(self):
        if self.lengths_k is None:
            object.__setattr__(self, "lengths_k", self.lengths_q)
        if self.head_dim_v is None:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        assert len(self.lengths_q) == len(self.lengths_k)
        assert self.form != "dense" or (len(set(self.lengths_q)) == 1 and len(set(self.lengths_k)) == 1)

    @property
    def id(self) -> str:
        parts = [self.group, f"d{self.head_dim}", "h{}_{}".format(*self.heads), self.form]
        parts += [f"v{self.head_dim_v}"] if self.head_dim_v != self.head_dim else []
        parts.append("x".join(_lengths_name(lengths) for lengths in (self.lengths_q, self.lengths_k)))
        parts += [self.padding] if self.form == "ranges" else []
        parts += ["causal"] if self.causal else []
        parts += ["w{}_{}".format(*self.window)] if self.window != (-1, -1) else []
        parts += [self.layout] if self.layout != "plain" else []
        parts += [f"mag{self.magnitude:g}"] if self.magnitude != 1 else []
        parts += [f"rise{self.rise:g}"] if self.rise else []
        parts += [f"drop{self.dropout_p:g}"] if self.dropout_p else []
        parts += [f"sinks{self.sinks:g}"] if self.sinks else []
        parts += [f"cap{self.softcap:g}"] if self.softcap else []
        return "-".join(parts)

    @property
    def beyond_hopper(self) -> bool:
        """The Hopper family leaves this case to the other one."""
        if self.dropout_p > 0.9 or (self.dropout_p > 0 and self.softcap > 0):
            return True
        if max(self.head_dim, self.head_dim_v) > 256 and (self.dropout_p > 0 or self.softcap > 0):
            return True
        return self.form == "packed" and 0 in (sum(self.lengths_q), sum(self.lengths_k))

    @property
    def scores(self) -> int:
        """How many scores an eager implementation materialises: what a case costs the oracle."""
        return len(self.lengths_q) * self.heads[0] * max(self.lengths_q) * max(self.lengths_k)


def _lengths_name(lengths: tuple[int, ...]) -> str:
    if len(set(lengths)) == 1:
        return f"{lengths[0]}"
    return "_".join(map(str, lengths)) if len(lengths) <= 8 else f"{len(lengths)}ragged"


HEAD_DIMS = (8, 16, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256)
VALUE_HEAD_DIMS = ((192, 128), (128, 64), (64, 128), (256, 128), (72, 24), (176, 120), (136, 200))  # (of q and k, of v)
PADDED_HEAD_DIMS = (1, 5, 33, 63, 100, 129, 255)  # zero-padded to a multiple of 8 by functional.py
USUAL_HEAD_DIMS = (64, 96, 128, 192, 256)
LENGTHS = [(s, s) for s in (1, 3, 63, 64, 65, 127, 128, 129, 300, 1023)]
LENGTHS += [(1, 300), (300, 1), (3, 129), (64, 128), (113, 203), (203, 113), (128, 64), (1, 1023), (1023, 64)]
WINDOWS = [(0, 0), (5, 0), (63, 1), (64, 0), (128, 128), (0, 17), (-1, 5), (5, -1), (300, 2), (1000, 1000)]
RAGGED = (1, 3, 63, 64, 65, 127, 129, 300)
SHORT_Q, SHORT_K = (1, 70, 0, 63), (129, 150, 3, 65)
EMPTY_Q, EMPTY_K = (0, 5, 64, 0, 129, 77), (7, 0, 64, 0, 200, 31)
GROUPS = [(64, (4, 2), 3, 200), (64, (16, 1), 17, 300), (64, (3, 1), 17, 130), (64, (16, 4), 40, 130), (128, (8, 2), 1, 300)]
GROUPS += [(128, (8, 1), 40, 170), (128, (16, 1), 40, 300), (128, (4, 2), 17, 129), (192, (8, 1), 17, 130), (256, (8, 2), 3, 100)]
MANY = (1, 0, 64, 7) * 100 + (65, 0, 1) * 70  # on a Hopper GPU enough for tables of their tiles
SMALL = (1, 0, 3, 63, 64, 65, 128, 129, 250)
SPLIT_Q, SPLIT_K = (1, 11, 0, 2), (2100, 0, 333, 7)
WIDE_HEAD_DIMS = ((512, 512), (320, 320), (264, 264), (512, 256), (128, 400), (300, 257))  # of q and k, of v
CAUSAL = (False, True)


def _table() -> list[Case]:
    cases = []
    for causal in CAUSAL:
        cases += [Case("head_dim", head_dim=d, causal=causal) for d in HEAD_DIMS + PADDED_HEAD_DIMS]
        cases += [
            Case("length", head_dim=d, lengths_q=(sq,) * 2, lengths_k=(sk,) * 2, causal=causal) for d in (64, 128) for sq, sk in LENGTHS
        ]
        cases += [
            Case("heads", head_dim=d, heads=heads, lengths_q=(66,) * 2, lengths_k=(130,) * 2, causal=causal)
            for d in (64, 128)
            for heads in ((14, 2), (32, 8), (8, 1), (5, 5), (1, 1))
        ]
        for d, d_v in VALUE_HEAD_DIMS:
            value = {"head_dim": d, "head_dim_v": d_v, "causal": causal}
            cases += [
                Case("value", **value, heads=(4, 4), lengths_k=(200, 200)),
                Case("value", **value, lengths_q=SHORT_Q, lengths_k=SHORT_K, form="packed", layout="wide"),
                Case("value", **value, lengths_q=SHORT_Q, lengths_k=SHORT_K, form="ranges", padding="mixed"),
            ]
        latent = {"head_dim": 192, "head_dim_v": 128, "causal": causal}
        cases += [
            Case("value", **latent, heads=(6, 2), lengths_q=RAGGED, form="packed"),
            Case("value", **latent, heads=(8, 1), lengths_q=(130,), layout="wide"),
            Case("value", **latent, lengths_q=SHORT_Q, lengths_k=SHORT_K, form="ranges", padding="holes"),
            Case("value", **latent, lengths_q=(150,), layout="qkv_split"),
            Case("value", **latent, lengths_q=(260,), heads=(2, 1), window=(64, 0)),
            Case("value", **latent, lengths_q=(150,), magnitude=20.0),
            Case("value", **latent, dropout_p=0.1),
            Case("value", head_dim=100, head_dim_v=33, causal=causal),
        ]
        for d in USUAL_HEAD_DIMS:
            cases.append(Case("packed", head_dim=d, lengths_q=RAGGED, form="packed", causal=causal))
            cases.append(Case("packed", head_dim=d, lengths_q=RAGGED, lengths_k=RAGGED[::-1], form="packed", causal=causal))
            cases.append(Case("packed", head_dim=d, lengths_q=EMPTY_Q, lengths_k=EMPTY_K, form="packed", causal=causal))
            for padding in ("right", "left", "mixed", "holes"):
                cases.append(Case("ranges", head_dim=d, lengths_q=RAGGED, form="ranges", padding=padding, causal=causal))
        cases += [
            Case("packed", heads=(8, 1), lengths_q=(0, 0), form="packed", causal=causal),
            Case("packed", lengths_q=(40, 0), lengths_k=(0, 0), form="packed", causal=causal),
            Case("packed", lengths_q=RAGGED, form="packed", causal=causal, layout="tail"),
            Case("ranges", lengths_q=(0, 0), form="ranges", causal=causal),
            Case("ranges", lengths_q=EMPTY_Q, lengths_k=EMPTY_K, form="ranges", padding="mixed", causal=causal),
            Case("ranges", lengths_q=(1, 1, 1, 1), lengths_k=(1, 64, 200, 333), form="ranges", padding="mixed", causal=causal),
            Case("ranges", heads=(14, 2), lengths_q=(90, 90, 90), lengths_k=(1, 64, 131), form="ranges", padding="keys", causal=causal),
        ]
        cases += [  # few queries: the Hopper forward computes the rows of a group together
            Case("group", head_dim=d, heads=heads, lengths_q=(sq,) * 2, lengths_k=(sk,) * 2, causal=causal) for d, heads, sq, sk in GROUPS
        ]
        for d, heads in ((64, (8, 1)), (128, (8, 2))):
            cases.append(Case("group", d, heads, lengths_q=(17, 0, 1, 40, 3), lengths_k=(130, 64, 1, 40, 0), form="packed", causal=causal))
            for padding in ("left", "holes", "keys"):
                lengths_q = (17, 17, 17, 17) if padding == "keys" else (1, 3, 17, 40)
                options = {"lengths_q": lengths_q, "lengths_k": (70, 300, 33, 41), "form": "ranges", "padding": padding, "causal": causal}
                cases.append(Case("group", d, heads, **options))
        # Few tiles and many keys, at d 64 more of them: the Hopper forward splits the keys.
        cases += [Case("split", d, lengths_q=(3, 3), lengths_k=(1777 if d == 64 else 777,) * 2, causal=causal) for d in USUAL_HEAD_DIMS]
        cases += [
            Case("split", d, (2, 2), lengths_q=(5,), lengths_k=(801,), head_dim_v=d_v, causal=causal)
            for d, d_v in ((192, 128), (64, 128), (136, 200))
        ]
        for d, heads in ((64, (2, 1)), (128, (2, 1)), (192, (1, 1))):
            cases.append(Case("split", d, heads, SPLIT_Q, SPLIT_K, form="packed", causal=causal))
            for padding in ("left", "mixed", "holes"):
                cases.append(Case("split", d, heads, SPLIT_Q, SPLIT_K, form="ranges", padding=padding, causal=causal))
        cases += [
            Case("split", 128, (8, 2), lengths_q=(1,), lengths_k=(1100,), causal=causal),
            Case("split", 128, (8, 1), SPLIT_Q, SPLIT_K, form="packed", causal=causal),
            Case("split", 128, (2, 1), lengths_q=(130,), lengths_k=(900,), causal=causal),
            Case("split", 64, (1, 1), lengths_q=(300,), lengths_k=(2500,), causal=causal),
            Case("split", 128, (8, 1), lengths_q=(17,), lengths_k=(1024,), causal=causal, layout="cache"),
            Case("split", 256, (8, 1), lengths_q=(1,), lengths_k=(1601,), causal=causal),
            Case("split", 128, (4, 1), lengths_q=(9,), lengths_k=(900,), causal=causal, magnitude=20.0),
            Case("split", 96, (8, 2), (4, 4), (70, 900), form="ranges", padding="keys", causal=causal),
        ]
        for layout in ("qkv_split", "kv_packed", "cache", "misaligned", "expanded_dout"):
            cases.append(Case("layout", head_dim=64, causal=causal, layout=layout))
            cases.append(Case("layout", head_dim=128, lengths_q=RAGGED, form="packed", causal=causal, layout=layout))
            cases.append(Case("layout", head_dim=80, lengths_q=RAGGED, form="ranges", padding="left", causal=causal, layout=layout))
        for magnitude in (3.0, 20.0):
            cases += [Case("magnitude", head_dim=d, causal=causal, magnitude=magnitude, lengths_q=(150,) * 2) for d in USUAL_HEAD_DIMS]
        # Maxima that grow from one block of keys to the next, by more than an exponential may (12) and than a float can (200).
        for rise in (12.0, 200.0):
            cases += [Case("rise", d, (2, 1), (70,), (600,), causal=causal, rise=rise) for d in (64, 72, 96, 128, 192, 256)]
            cases += [
                Case("rise", 192, (2, 2), (70,), (600,), head_dim_v=128, causal=causal, rise=rise),
                Case("rise", 64, (4, 2), (500, 500), (500, 500), causal=causal, rise=rise),
                Case("rise", 64, (8, 1), (17, 17), (600, 600), causal=causal, rise=rise),
                Case("rise", 128, (8, 2), (300, 7), (450, 700), form="packed", causal=causal, layout="tail", rise=rise),
                Case("rise", 80, (4, 2), (70, 1, 200), (300, 700, 200), form="ranges", padding="mixed", causal=causal, rise=rise),
                Case("rise", 128, (2, 1), (200,), (650,), window=(300, 20), causal=causal, layout="cache", rise=rise),
            ]
        for dropout_p in (0.1, 0.5):
            cases += [Case("dropout", head_dim=d, causal=causal, dropout_p=dropout_p) for d in USUAL_HEAD_DIMS]
        cases += [
            Case("dropout", heads=(14, 2), lengths_q=RAGGED, form="packed", causal=causal, dropout_p=0.17),
            Case("dropout", lengths_q=RAGGED, form="ranges", padding="mixed", causal=causal, dropout_p=0.17),
            Case("dropout", lengths_q=(65, 65), lengths_k=(301, 301), causal=causal, dropout_p=0.17, window=(60, 60)),
            Case("dropout", 128, (8, 2), (17, 17), (600, 600), causal=causal, dropout_p=0.3),
            Case("dropout", 64, (4, 2), (200, 90), (700, 333), form="packed", causal=causal, dropout_p=0.17, rise=200.0),
            Case("dropout", 128, (4, 4), (200,), (700,), causal=causal, dropout_p=0.17, rise=12.0),
            Case("dropout", 40, causal=causal, dropout_p=0.95),
        ]
        cases += [
            Case("long", head_dim=128, heads=(4, 1), lengths_q=(2048,), causal=causal),
            Case("long", head_dim=64, heads=(2, 2), lengths_q=(4096,), causal=causal, window=(511, 0) if causal else (700, 300)),
            Case("long", head_dim=128, heads=(8, 2), lengths_q=(1, 1), lengths_k=(4096, 4096), causal=causal),
            Case("long", head_dim=128, heads=(8, 1), lengths_q=(1,), lengths_k=(20001,), causal=causal),
            Case("many", heads=(2, 1), lengths_q=(3, 1, 0, 2) * 40, form="packed", causal=causal),
            # Many tasks of the Hopper backward that have all of some rows of dQ, of sequences too long for small thread blocks.
            Case("lone", 64, (16, 8), (350,) * 22, causal=causal),
            Case("lone", 96, (8, 8), (450,) * 17, causal=causal),
            Case("lone", 128, (8, 8), (400,) * 17, causal=causal),
        ]
        for d in (64, 96, 128):
            cases.append(Case("many", d, (2, 1), (*MANY, 130, 300), form="packed", causal=causal))
            cases.append(Case("many", d, (2, 2), (*MANY, 200), form="ranges", padding="mixed", causal=causal))
        for d in (64, 96, 128):  # small thread blocks of the Hopper backward, as the heads without groups below
            cases.append(Case("many", d, (4, 2), (*MANY, 200), form="packed", causal=causal))
            cases.append(Case("many", d, (3, 1), MANY, form="packed", window=(20, 0 if causal else 9), head_dim_v=d - 24))
        for d in (64, 96, 128):  # heads without groups, whatever their number: small thread blocks of the Hopper backward
            cases.append(Case("small", d, (2, 2), SMALL, form="packed", causal=causal))
            cases.append(Case("small", d, (2, 2), SMALL[:6], SMALL[5::-1], form="packed", causal=causal))
            cases.append(Case("small", d, (1, 1), SHORT_Q, SHORT_K, form="ranges", padding="holes", causal=causal))
            cases.append(Case("small", d, (1, 1), (100, 64), (40, 130), form="packed", window=(30, 0 if causal else 5)))
            cases.append(Case("small", d, (2, 2), (1000, *SMALL[:5] * 2, 0, 0, 0), form="packed", causal=causal))
            cases.append(Case("small", d, (5, 5), MANY, form="packed", causal=causal))  # delta of several heads by one thread block
            longest = 256 - RANGE_PADDING
            padded = {"lengths_q": tuple(min(x, longest) for x in SMALL), "form": "ranges", "causal": causal}
            cases += [Case("small", d, (2, 2), padding=padding, **padded) for padding in ("left", "mixed", "holes")]
        cases += [Case("sinks", d, (8, 2), (150,) * 2, causal=causal, sinks=2.0) for d in USUAL_HEAD_DIMS]
        cases += [
            Case("sinks", 192, head_dim_v=128, lengths_q=RAGGED, form="packed", causal=causal, sinks=2.0),
            Case("sinks", 40, (5, 5), EMPTY_Q, EMPTY_K, form="packed", causal=causal, sinks=2.0),
            Case("sinks", 64, (8, 1), RAGGED, form="packed", causal=causal, window=(127, -1), layout="tail", sinks=2.0),
            Case("sinks", 64, (2, 1), lengths_q=(3, 1, 0, 2) * 12, form="packed", causal=causal, sinks=2.0),
            Case("sinks", 128, (8, 2), lengths_q=(1, 3), lengths_k=(70, 1100), form="ranges", padding="left", causal=causal, sinks=2.0),
            Case("sinks", 64, (8, 1), lengths_q=(1,), lengths_k=(2100,), causal=causal, layout="cache", sinks=2.0),  # keys are split
            Case("sinks", 128, (2, 1), SPLIT_Q, SPLIT_K, form="packed", causal=causal, sinks=2.0),
            Case("sinks", 128, (4, 2), lengths_q=(66,) * 2, lengths_k=(130,) * 2, causal=causal, sinks=60.0),  # alone, or as if not there
            Case("sinks", 128, (4, 2), lengths_q=(66,) * 2, lengths_k=(130,) * 2, causal=causal, magnitude=20.0, sinks=200.0),
            Case("sinks", 64, (4, 2), (70,), (600,), causal=causal, rise=12.0, sinks=5.0),
            Case("sinks", 100, causal=causal, layout="misaligned", sinks=2.0),
            Case("sinks", 64, lengths_q=RAGGED, form="ranges", padding="mixed", causal=causal, dropout_p=0.17, sinks=2.0),
        ]
        cases += [Case("softcap", d, (8, 2), (150,) * 2, causal=causal, magnitude=2.0, softcap=5.0) for d in USUAL_HEAD_DIMS]
        cases += [
            Case("softcap", 192, head_dim_v=128, lengths_q=RAGGED, form="packed", causal=causal, softcap=2.0),
            Case("softcap", 64, (4, 2), EMPTY_Q, EMPTY_K, form="packed", causal=causal, window=(31, -1), softcap=5.0),
            Case("softcap", 64, (2, 1), RAGGED, form="ranges", padding="holes", causal=causal, softcap=5.0),
            Case("softcap", 256, (8, 4), (300,), causal=causal, window=(127, -1), softcap=50.0),
            Case("softcap", 128, (4, 2), (150,) * 2, causal=causal, magnitude=20.0, softcap=50.0),  # most scores are at the cap
            Case("softcap", 96, (4, 2), (150,) * 2, causal=causal, softcap=1e4),  # none is
            Case("softcap", 64, (4, 2), (70,), (600,), causal=causal, rise=12.0, softcap=30.0),
            Case("softcap", 128, (2, 1), (70,), (600,), causal=causal, rise=200.0, softcap=500.0),
            Case("softcap", 256, (8, 1), lengths_q=(1,), lengths_k=(1100,), causal=causal, layout="cache", softcap=5.0),  # keys are split
            Case("softcap", 128, (8, 2), (17, 0, 1, 40), (130, 64, 1, 40), form="packed", causal=causal, softcap=5.0, sinks=2.0),
            Case("softcap", 40, lengths_q=RAGGED, form="ranges", padding="mixed", causal=causal, dropout_p=0.17, softcap=5.0, sinks=2.0),
        ]
        for d, d_v in WIDE_HEAD_DIMS:
            wide = {"head_dim": d, "head_dim_v": d_v, "causal": causal}
            cases += [
                Case("wide", heads=(4, 2), **wide),
                Case("wide", heads=(2, 1), lengths_q=SHORT_Q, lengths_k=SHORT_K, form="packed", **wide),
                Case("wide", heads=(2, 1), lengths_q=SHORT_Q, lengths_k=SHORT_K, form="ranges", padding="mixed", **wide),
            ]
        cases += [
            Case("wide", 512, (2, 2), RAGGED, form="ranges", padding="holes", causal=causal),
            Case("wide", 512, (4, 1), EMPTY_Q, EMPTY_K, form="packed", causal=causal, window=(63, -1)),
            Case("wide", 512, (8, 1), (17, 17), (300, 300), causal=causal),  # the rows of a group in a tile
            Case("wide", 512, (2, 1), (3, 3), (777, 777), causal=causal),  # keys are split
            Case("wide", 512, (2, 1), SPLIT_Q, SPLIT_K, form="packed", causal=causal, sinks=2.0),
            Case("wide", 512, (9, 3), (700,), causal=causal),
            Case("wide", 512, (2, 1), (150,), causal=causal, layout="qkv_split"),
            Case("wide", 512, (4, 2), (70,), causal=causal, layout="expanded_dout", sinks=2.0),
            Case("wide", 300, (2, 1), (70,), (130,), head_dim_v=257, causal=causal, layout="misaligned", window=(40, -1)),
            Case("wide", 512, (2, 1), (17,), (600,), causal=causal, layout="cache", rise=12.0),
            Case("wide", 512, (2, 1), (150,), causal=causal, magnitude=3.0, softcap=5.0),
            Case("wide", 384, (2, 1), RAGGED, form="packed", causal=causal, dropout_p=0.17, layout="tail"),
            Case(
                "wide", 128, (2, 1), (100, 33), head_dim_v=400, form="ranges", padding="holes", causal=causal, dropout_p=0.17, softcap=5.0
            ),
        ]
        # Enough tiles for those of clusters, but for the first two on a GPU.
        cases += [Case("wide", 512, (2, 1), (70,), (300,), causal=causal, rise=rise) for rise in (12.0, 200.0)]
        cases += [
            Case("wide", 512, (12, 4), (600,), (700,), causal=causal, rise=200.0),
            Case("wide", 512, (8, 2), (300, 1, 129, 0, 256, 64), form="packed", causal=causal, sinks=2.0),
            Case("wide", 512, (8, 2), (300, 1, 129, 0, 256, 64), form="ranges", padding="holes", causal=causal, window=(100, -1)),
            Case("wide", 264, (9, 9), (640,), (1000,), head_dim_v=400, causal=causal),
        ]
        for padding in ("right", "mixed", "holes"):
            cases.append(Case("sinks", 128, (4, 2), RAGGED, form="ranges", padding=padding, causal=causal, sinks=2.0))
        cases += [  # enough tiles for the larger ones of the Hopper forward, to 512 tokens and above
            Case("tiles", 128, (16, 8), lengths_q=(longest, longest), causal=causal) for longest in (500, 700)
        ]
        cases += [
            Case("tiles", 128, (16, 4), (longest, 1, 129, 0, 256, 64), form=form, padding="mixed", causal=causal)
            for longest in (300, 600)
            for form in ("packed", "ranges")
        ]
    for window in WINDOWS:
        cases += [Case("window", head_dim=d, lengths_q=(300,) * 2, window=window) for d in USUAL_HEAD_DIMS]
        cases += [
            Case("window", lengths_q=(83,) * 2, lengths_k=(260,) * 2, window=window),
            Case("window", lengths_q=(300,) * 2, lengths_k=(113,) * 2, window=window),
            Case("window", lengths_q=RAGGED, form="packed", window=window),
            Case("window", lengths_q=RAGGED, form="ranges", padding="left", window=window),
            Case("window", lengths_q=RAGGED, form="ranges", padding="holes", window=window),
            Case("window", lengths_q=EMPTY_Q, lengths_k=EMPTY_K, form="packed", window=window),
            Case("window", heads=(8, 1), lengths_q=(40,), lengths_k=(300,), window=window),
        ]
    cases += [  # ragged, and long enough for the largest tiles
        Case("tiles", 64, (12, 6), lengths_q=(1100, 129), form="packed", dropout_p=0.17),
        Case("tiles", 64, (12, 6), lengths_q=(1100, 129), form="ranges", padding="holes"),
        Case("tiles", 128, (12, 6), lengths_q=(1100, 129), form="ranges", padding="holes"),
    ]
    cases += [Case("wide", 512, (2, 1), (130,), (150,), window=window) for window in ((0, 0), (31, 1), (64, 17), (-1, 5))]
    cases += [Case("window", lengths_q=(300,) * 2, causal=True, window=(left, 33)) for left in (0, 31, 64, 200)]  # causal beats right
    for window in ((1200, 0), (900, 500), (-1, 700), (700, -1)):
        cases += [
            Case("split", 128, (4, 2), lengths_q=(5,), lengths_k=(1500,), window=window),
            Case("split", 64, (2, 1), lengths_q=(150,), lengths_k=(1300,), window=window),
            Case("split", 128, (2, 1), SPLIT_Q, SPLIT_K, form="packed", window=window),
            Case("split", 128, (2, 1), SPLIT_Q, SPLIT_K, form="ranges", padding="holes", window=window),
        ]
    # The last key block is whole; the window begins in it for the last of the queries only.
    cases.append(Case("window", heads=(8, 1), lengths_q=(16,), lengths_k=(256,), window=(120, -1)))
    return cases


CASES = _table()
assert len({case.id for case in CASES}) == len(CASES), "two cases are the same"


class Sample:
    """A case as tensors. q, k, v, dout are padded [B, S, H, D] with zeros in the padding; `call` runs the library on garbled copies."""

    def __init__(self, case: Case, dtype: torch.dtype, device: torch.device | str, seed: int = 0):
        self.case, self.dtype, self.device = case, dtype, torch.device(device)
        self.generator = torch.Generator(self.device).manual_seed(zlib.crc32(case.id.encode()) + seed)
        self.batch = len(case.lengths_q)
        self.softmax_scale = case.head_dim**-0.5
        padded_q = case.form == "ranges" and case.padding != "keys"
        self.seqlen_q = max(case.lengths_q) + RANGE_PADDING * padded_q
        self.seqlen_k = max(case.lengths_k) + RANGE_PADDING * (case.form == "ranges")
        self.ranges_q = self._ranges(case.lengths_q, self.seqlen_q)
        self.ranges_k = self._ranges(case.lengths_k, self.seqlen_k)
        self.valid_q, self.valid_k = self._valid(self.ranges_q, self.seqlen_q), self._valid(self.ranges_k, self.seqlen_k)
        self.key_mask = self._key_mask() if case.form == "ranges" and case.padding == "holes" else None
        self.visible = oracle.visible_pairs(
            self.seqlen_q, self.seqlen_k, self.ranges_q, self.ranges_k, case.causal, case.window, self.key_mask, self.device
        )
        heads_q, heads_k = case.heads
        self.q = self._random(self.valid_q, heads_q, case.head_dim) * case.magnitude
        self.k = self._random(self.valid_k, heads_k, case.head_dim) * case.magnitude
        self.v = self._random(self.valid_k, heads_k, case.head_dim_v) * case.magnitude
        if case.rise:
            self._raise_scores()
        self.dout = self._random(self.valid_q, heads_q, case.head_dim_v)
        if case.layout == "expanded_dout":
            self.dout = self._zero_outside(self.dout[:1, :1, :1].expand_as(self.dout), self.valid_q)
        self.sinks = torch.randn(heads_q, device=self.device, generator=self.generator) * case.sinks if case.sinks else None
        self.dlse = torch.randn(self.batch, heads_q, self.seqlen_q, device=self.device, generator=self.generator)
        self.dlse = self.dlse.masked_fill(~self.visible.any(-1)[:, None], 0.0)

    def _ranges(self, lengths: tuple[int, ...], seqlen: int) -> list[tuple[int, int]]:
        padding = self.case.padding if self.case.form == "ranges" else "right"
        fraction = {"right": lambda b: 0.0, "left": lambda b: 1.0, "holes": lambda b: 0.5}.get(padding, lambda b: b % 4 / 3)
        return [(int((seqlen - length) * fraction(b)), length) for b, length in enumerate(lengths)]

    def _valid(self, ranges: list[tuple[int, int]], seqlen: int) -> torch.Tensor:
        start, length = torch.tensor(ranges, device=self.device).view(-1, 2, 1).unbind(1)
        column = torch.arange(seqlen, device=self.device)
        return (column >= start) & (column < start + length)

    def _key_mask(self) -> torch.Tensor:
        """Holes in every second sequence, the first and last key of a range excepted; anything goes outside the ranges."""
        mask = torch.rand(self.batch, self.seqlen_k, device=self.device, generator=self.generator) < 0.6
        mask[1::2] |= self.valid_k[1::2]
        for b, (start, length) in enumerate(self.ranges_k):
            mask[b, [start, start + length - 1] if length else []] = True
        return mask

    def _random(self, valid: torch.Tensor, heads: int, head_dim: int) -> torch.Tensor:
        x = torch.randn(*valid.shape, heads, head_dim, device=self.device, generator=self.generator)
        return self._zero_outside(x, valid).to(self.dtype)

    def _raise_scores(self) -> None:
        size = (self.case.rise / (self.case.head_dim * self.softmax_scale)) ** 0.5
        queries = torch.tensor([1.0, 0.25, 0.0], device=self.device)[torch.arange(self.seqlen_q, device=self.device) % 3]
        keys = torch.arange(self.seqlen_k - 1, -1, -1, device=self.device) // 128
        self.q = self._zero_outside(self.q + size * queries[:, None, None].to(self.dtype), self.valid_q)
        self.k = self._zero_outside(self.k + size * keys[:, None, None].to(self.dtype), self.valid_k)

    @staticmethod
    def _zero_outside(x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(~valid[:, :, None, None], 0.0)

    # The oracle's side

    def expected(self, dtype: torch.dtype, keep: torch.Tensor | None = None, with_dlse: bool = False) -> dict[str, torch.Tensor]:
        """out, lse, dq, dk, dv and, with sinks, dsinks of the textbook formula on the same values, computed in `dtype`."""
        q, k, v, dout = (x.to(dtype) for x in (self.q, self.k, self.v, self.dout))
        lse_dtype = torch.promote_types(dtype, torch.float32)
        return oracle.gradients(
            q, k, v, dout, self.dlse.to(lse_dtype) if with_dlse else None,
            visible=self.visible, softmax_scale=self.softmax_scale, keep=keep, dropout_p=self.case.dropout_p,
            sinks=None if self.sinks is None else self.sinks.to(lse_dtype), softcap=self.case.softcap,
        )  # fmt: skip

    def sum_sizes(self) -> dict[str, float]:
        """How large the terms are that add up to each result: what rounding in the accumulators is relative to.

        The exponential turns one rounding of a score s into |s| roundings of a probability.
        """
        if 0 in (*self.q.shape, *self.k.shape):
            return dict.fromkeys(("out", "dq", "dk", "dv", "dsinks"), 0.0)
        q, k, v, dout = (x.double().abs().max().item() for x in (self.q, self.k, self.v, self.dout))
        exponent = max(1.0, q * k * self.case.head_dim**0.5)
        dprobs = self.dout.double().norm(dim=-1).max().item() * self.v.double().norm(dim=-1).max().item()
        dscores = dprobs * self.softmax_scale
        dsinks = exponent * dprobs * sum(self.case.lengths_q) ** 0.5
        return {"out": exponent * v, "dq": exponent * dscores * k, "dk": exponent * dscores * q, "dv": exponent * dout, "dsinks": dsinks}

    def dropout_keep(self, rng_state: torch.Tensor) -> torch.Tensor:
        """The kernels' dropout mask as bool [B, H, Sq, Sk]: drawn per sequence, placed where the sequence lies."""
        heads = self.case.heads[0]
        keep = torch.ones(self.batch, heads, self.seqlen_q, self.seqlen_k, dtype=torch.bool, device=self.device)
        for b, ((start_q, length_q), (start_k, length_k)) in enumerate(zip(self.ranges_q, self.ranges_k, strict=True)):
            rows, columns = slice(start_q, start_q + length_q), slice(start_k, start_k + length_k)
            piece = reference.dropout_keep_mask(rng_state, range(b, b + 1), heads, length_q, length_k, self.case.dropout_p)
            keep[b, :, rows, columns] = piece[0]
        return keep

    # The library's side

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v, dout in the form and memory layout of the case; NaN wherever the library has no business."""
        q, k, v, dout = (
            self._to_form(x, valid)
            for x, valid in ((self.q, self.valid_q), (self.k, self.valid_k), (self.v, self.valid_k), (self.dout, self.valid_q))
        )
        q, k, v = _LAYOUTS.get(self.case.layout, _plain)(q, k, v)
        if self.case.layout == "expanded_dout":
            dout = self.dout[self.valid_q][0, 0].expand_as(dout)
        assert all(x.stride(-1) == 1 for x in (q, k, v, dout))
        return *(x.detach().requires_grad_() for x in (q, k, v)), dout

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **overrides) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, softmax_lse) of the public function for this case's form."""
        case = self.case
        options = {"dropout_p": case.dropout_p, "causal": case.causal, "window_size": case.window}
        options |= {"softcap": case.softcap, "s_aux": self.sinks, "return_attn_probs": True} | overrides
        if case.form == "dense":
            result = flash_attn_func(q, k, v, **options)
        elif case.form == "packed":
            cu_seqlens = (self.cu_seqlens(case.lengths_q), self.cu_seqlens(case.lengths_k))
            result = flash_attn_varlen_func(q, k, v, *cu_seqlens, max(case.lengths_q), max(case.lengths_k), **options)
        else:
            ranges_q = None if case.padding == "keys" else self._int32(self.ranges_q).T.contiguous()
            ranges_k = self._int32(self.ranges_k).T.contiguous()
            if self.key_mask is not None:
                holes = (self.valid_k & ~self.key_mask).any(1).int()
                ranges_k = torch.cat((ranges_k, holes[None]))
            result = flash_attn_ranges_func(q, k, v, ranges_q, ranges_k, self.key_mask, **options)
        return result[:2]

    def actual(self, with_dlse: bool = False, **overrides) -> dict[str, torch.Tensor]:
        """out, lse, dq, dk, dv, dsinks of the library, back in the oracle's padded form. Output memory is poisoned before each pass."""
        q, k, v, dout = self.inputs()
        inputs = (q, k, v)
        if self.sinks is not None:
            overrides["s_aux"] = self.sinks.to(torch.promote_types(self.dtype, torch.float32), copy=True).requires_grad_()
            inputs += (overrides["s_aux"],)
        poison(q, k, v, dout)
        out, lse = self.call(q, k, v, **overrides)
        outputs, grads = [out], [dout]
        if with_dlse:
            outputs.append(lse)
            grads.append(self.dlse if lse.dim() == 3 else self.dlse.transpose(1, 2)[self.valid_q].T)
        poison(q, k, v, dout)
        dq, dk, dv, *dsinks = torch.autograd.grad(outputs, inputs, grads)
        return {
            "out": self._from_form(out.detach(), self.valid_q),
            "lse": self._lse_from_form(lse.detach()),
            "dq": self._from_form(dq, self.valid_q),
            "dk": self._from_form(dk, self.valid_k),
            "dv": self._from_form(dv, self.valid_k),
            **dict(zip(("dsinks",), dsinks, strict=False)),
        }

    def _to_form(self, x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        if self.case.form == "packed":
            tail = TAIL if self.case.layout == "tail" else 0
            return torch.cat((x[valid], x.new_full((tail, *x.shape[2:]), math.nan)))
        return x.masked_fill(~valid[:, :, None, None], math.nan)

    def _from_form(self, x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        if self.case.form != "packed":
            return x
        padded = x.new_zeros(*valid.shape, *x.shape[1:])
        padded[valid] = x[: int(valid.sum())]
        return padded

    def _lse_from_form(self, lse: torch.Tensor) -> torch.Tensor:
        if self.case.form != "packed":
            return lse
        padded = lse.new_full((*self.valid_q.shape, lse.shape[0]), math.inf)
        padded[self.valid_q] = lse.T[: int(self.valid_q.sum())]
        return padded.transpose(1, 2)

    def cu_seqlens(self, lengths: tuple[int, ...]) -> torch.Tensor:
        return self._int32((0, *lengths)).cumsum(0, dtype=torch.int32)

    def _int32(self, values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def poison(*like: torch.Tensor) -> None:
    """Leave NaN in the memory the allocator will hand out next for tensors of these sizes (and for float32 scratch of them)."""
    sizes = [x.numel() * x.element_size() for x in like] + [x.numel() * 4 for x in like] + [x.numel() * 4 // x.shape[-1] for x in like]
    blocks = [torch.full((size,), 0xFF, dtype=torch.uint8, device=like[0].device) for size in sizes for _ in range(2)]  # 0xFFFF… is NaN
    del blocks


def _plain(q, k, v):
    return q, k, v


def _qkv_split(q, k, v):
    """Views of one fused projection, [..., (H + 2 Hk) D], as GPT-2 makes them."""
    fused = torch.cat([x.flatten(-2) for x in (q, k, v)], dim=-1)
    widths = [x.shape[-2] * x.shape[-1] for x in (q, k, v)]
    return tuple(piece.unflatten(-1, x.shape[-2:]) for piece, x in zip(fused.split(widths, dim=-1), (q, k, v), strict=True))


def _kv_packed(q, k, v):
    """k and v beside each other, [..., 2, Hk, D]."""
    return q, *torch.stack((k, v), dim=-3).unbind(-3)


def _wide(q, k, v):
    """The first columns of rows whose others are NaN, 16-byte aligned: read in place, and nothing behind the head dim."""
    return tuple(torch.cat((x, torch.full_like(x[..., :1], math.nan).expand(*x.shape[:-1], 64)), -1)[..., : x.shape[-1]] for x in (q, k, v))


def _cache(q, k, v):
    """[..., H, S, D] buffers seen as [..., S, H, D]; those of k and v have free slots behind the tokens, as a static cache has."""

    def in_cache(x, slots):
        heads_first = x.transpose(-3, -2)
        buffer = x.new_full((*heads_first.shape[:-2], x.shape[-3] + slots, x.shape[-1]), math.nan)
        buffer[..., : x.shape[-3], :] = heads_first
        return buffer[..., : x.shape[-3], :].transpose(-3, -2)

    return in_cache(q, 0), in_cache(k, 13), in_cache(v, 13)


def _misaligned(q, k, v):
    """Rows 3 elements apart from any 16-byte boundary: the kernels cannot read these, the library copies them."""

    def shifted(x):
        buffer = x.new_full((*x.shape[:-1], x.shape[-1] + 5), math.nan)
        buffer[..., 3 : 3 + x.shape[-1]] = x
        return buffer[..., 3 : 3 + x.shape[-1]]

    return shifted(q), shifted(k), shifted(v)


_LAYOUTS = {"qkv_split": _qkv_split, "kv_packed": _kv_packed, "wide": _wide, "cache": _cache, "misaligned": _misaligned}

"""Decoding from a cache, in pages or not, against the textbook formula; and that the new keys and values, and nothing else, are written."""

import dataclasses
import math

import numpy as np
import oracle
import pytest
import torch
from test_kernels import DTYPES, ON_GPU, compare
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import hf_flash2
from hf_flash2 import flash_attn_with_kvcache, kernels, kvcache, native

pytestmark = pytest.mark.timeout(120)


@dataclasses.dataclass(frozen=True)
class Decoding:
    """A call. lengths: of the sequences in the cache; new: tokens of each that are written, None: k and v are not given."""

    name: str
    head_dim: int = 64
    heads: tuple[int, int] = (4, 2)
    lengths: tuple[int, ...] = (5, 300, 128)
    new: int | None = 1
    queries: int = 1
    page_size: int = 128  # 0: no pages
    head_dim_v: int = 0  # 0: as head_dim
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: bool = False
    rise: float = 0.0  # by which scores are higher, 128 keys further to the front
    causal: bool = True

    @property
    def beyond_hopper(self) -> bool:
        """The Hopper family leaves this case to the other one."""
        widest, values = max(self.head_dim, self.head_dim_v), self.head_dim_v or self.head_dim
        return (self.page_size > 0 and values > 128 and widest <= 192) or (widest > 256 and self.softcap > 0)

    def __str__(self) -> str:
        return self.name


CASES = [
    *(Decoding(f"d{d}", d) for d in (64, 80, 96, 128, 192, 256, 512)),
    Decoding("wide-one-key-head", 512, heads=(4, 1), lengths=(900, 20), new=2, queries=2),
    Decoding("wide-no-pages", 320, lengths=(5, 300), page_size=0),
    Decoding("wide-capped", 512, lengths=(70,), softcap=5.0),
    Decoding("latent", 192, head_dim_v=128),
    Decoding("values-of-200", 64, head_dim_v=200),
    Decoding("values-of-168", 64, head_dim_v=168),
    Decoding("d40", 40, heads=(3, 3)),
    Decoding("large-pages", 128, heads=(8, 2), lengths=(700, 0, 255, 256), page_size=256),
    Decoding("one-key-head", 128, heads=(8, 1), lengths=(1000,)),  # keys are split
    Decoding("many", heads=(8, 4), lengths=tuple(range(0, 400, 10))),
    Decoding("speculative", lengths=(126, 300, 0), new=4, queries=4),
    Decoding("all-new", 128, lengths=(0, 0), new=150, queries=150),
    Decoding("no-new", lengths=(129, 0, 77), new=None),
    Decoding("empty-new", lengths=(129, 0, -1), new=0),
    Decoding("no-pages-empty-new", lengths=(129, 0, -1), new=0, page_size=0),
    Decoding("last-queries", lengths=(129, 40), new=10, queries=3),
    Decoding("not-causal", lengths=(129, 40), new=3, queries=3, causal=False),
    Decoding("nobody", lengths=(-1, 200, -1)),
    Decoding("nobody-of-several", lengths=(-1, 200, -2), new=4, queries=4),
    Decoding("no-pages-nobody-of-several", lengths=(-1, 200, -2), new=4, queries=4, page_size=0),
    Decoding("window", 128, lengths=(700, 20), window=(130, -1)),
    Decoding("sinks", 128, heads=(8, 1), lengths=(700, 20), sinks=True),
    *(Decoding(f"capped-{d}", d, heads=(8, 2), lengths=(700, 20), queries=2, new=2, softcap=5.0) for d in (64, 96, 128, 256)),
    *(Decoding(f"rise-{d}", d, heads=(8, 1), lengths=(700, 300), queries=8, rise=200.0) for d in (64, 128)),
    Decoding("no-pages", 128, lengths=(5, 300, 128), page_size=0),
    Decoding("no-pages-window", 64, lengths=(5, 300, -1), page_size=0, window=(100, -1), softcap=2.0, sinks=True),
]


def decode(case: Decoding, dtype: torch.dtype, device, **overrides) -> tuple[dict, dict, dict, dict]:
    """out and lse of the call, of the formula in float64 and in `dtype`, and the sizes of the sums. Asserts what the cache holds then."""
    generator = torch.Generator().manual_seed(len(case.name) + case.head_dim)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    batch, (heads, heads_k) = len(case.lengths), case.heads
    head_dims = case.head_dim, case.head_dim_v or case.head_dim
    count = case.new or 0
    longest = max(case.lengths) + count
    totals = [0 if length < 0 else length + count for length in case.lengths]
    q = random(batch, case.queries, heads, head_dims[0])
    old = [random(batch, longest, heads_k, d) for d in head_dims]
    new = [random(batch, count, heads_k, d) for d in head_dims]
    if case.rise:  # by the first column, in which all queries are 1
        q[..., 0] = 1
        ahead = (longest - torch.arange(longest, device=device)) / 128 * case.rise * case.head_dim**0.5
        old[0][..., 0] = ahead.to(dtype)[:, None]
    # The sequences as they should be, in a row each; then the cache before the call: what holds no key is NaN.
    rows = [x.clone() for x in old]
    for row, added in zip(rows, new, strict=True):
        for b, length in enumerate(case.lengths):
            row[b, max(length, 0) : totals[b]] = added[b, : totals[b] - max(length, 0)] if length >= 0 else row.new_zeros(())
    if case.page_size:
        columns = -(-longest // case.page_size)
        pages = batch * columns + 3
        table = torch.randperm(pages, generator=generator)[: batch * columns].view(batch, columns).to(torch.int32)
        place = [(int(table[b, t // case.page_size]), t % case.page_size) for b in range(batch) for t in range(longest)]
        caches = [torch.full((pages, case.page_size, heads_k, d), math.nan, dtype=dtype, device=device) for d in head_dims]
        for b, total in enumerate(totals):
            table[b, -(-total // case.page_size) :] = 2**31 - 1  # not to be read
        table = table.to(device)
    else:
        place = [(b, t) for b in range(batch) for t in range(longest)]
        caches = [torch.full((batch, longest + 9, heads_k, d), math.nan, dtype=dtype, device=device) for d in head_dims]
        table = None

    def fill(target: list[torch.Tensor], source: list[torch.Tensor], lengths) -> None:
        held = [(b * longest + t) for b, length in enumerate(lengths) for t in range(max(length, 0))]
        first, second = (torch.tensor([place[i][j] for i in held], dtype=torch.long, device=device) for j in range(2))
        for x, rows_of in zip(target, source, strict=True):
            x[first, second] = rows_of.flatten(0, 1)[torch.tensor(held, dtype=torch.long, device=device)]

    fill(caches, old, case.lengths)
    after = [x.clone() for x in caches]
    fill(after, rows, [t if length >= 0 else 0 for t, length in zip(totals, case.lengths, strict=True)])
    sinks = random(heads).float() if case.sinks else None
    options = {"causal": case.causal, "window_size": case.window, "softcap": case.softcap, "s_aux": sinks, "return_softmax_lse": True}
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    added = {} if case.new is None else dict(zip("kv", new, strict=True))
    with torch.no_grad():
        out, lse = flash_attn_with_kvcache(q, *caches, **added, cache_seqlens=lengths, block_table=table, **options | overrides)
    for name, x, expected in zip("kv", caches, after, strict=True):
        assert torch.equal(x.nan_to_num(9e4), expected.nan_to_num(9e4)), f"the cache of {name} holds something else than what was written"

    ranges_k = [(0, t) for t in totals]
    visible = oracle.visible_pairs(
        case.queries, longest, [(0, case.queries)] * batch, ranges_k, case.causal, case.window, None, torch.device(device)
    )
    scale = case.head_dim**-0.5

    def formula(compute: torch.dtype, values) -> dict:
        k, v = rows[0].to(compute), values.to(compute)
        out, lse = oracle.attention(q.to(compute), k, v, visible, scale, sinks=sinks, softcap=case.softcap)
        return {"out": out, "lse": lse}

    sizes = {"out": formula(torch.float64, rows[1].abs())["out"].abs().max().item()}
    return {"out": out, "lse": lse}, formula(torch.float64, rows[1]), formula(dtype, rows[1]), sizes


# Scores above 1,000 leave float64, which is compared with itself, its own rounding.
PROBLEMS = [(case, dtype) for case in CASES for dtype in DTYPES if not (case.rise and dtype == torch.float64)]


def check_decoding(case: Decoding, dtype: torch.dtype, family: str, device, monkeypatch) -> None:
    """By the rule of the field; what is beyond the Hopper family is refused by it, and run by the other."""
    if family == "sm90" and case.beyond_hopper:
        with pytest.raises(native.LibraryError, match="the Hopper family cannot run this: it(s| has)"):
            decode(case, dtype, device)
        monkeypatch.setenv("HF_FLASH2_FAMILY", "auto")
        family = "sm80"
    actual, truth, eager, sizes = decode(case, dtype, device)
    compare(actual, truth, eager, dtype, sizes)
    assert hf_flash2.last_backend() == {"reference": "cpu-reference"}.get(family, f"cuda-{family}")


@pytest.mark.parametrize(("case", "dtype"), PROBLEMS, ids=str)
def test_decoding(case, dtype, family, device, monkeypatch):
    check_decoding(case, dtype, family, device, monkeypatch)


@pytest.mark.parametrize("broken", [{"causal": False}, {"window_size": (3, -1)}, {"softcap": 3.0}, {"softmax_scale": 1.0}])
def test_a_broken_call_is_found(broken, device):
    case = Decoding("broken", 128, lengths=(129, 40), new=3, queries=3)
    actual, truth, eager, sizes = decode(case, DTYPES[0], device, **broken)
    with pytest.raises(AssertionError, match="is off by"):
        compare(actual, truth, eager, DTYPES[0], sizes)


def tensors(**changed) -> dict:
    """A call that is right, but for what is changed."""
    base = {
        "q": torch.zeros(2, 1, 4, 64), "k_cache": torch.zeros(6, 128, 2, 64), "v_cache": torch.zeros(6, 128, 2, 64),
        "k": torch.zeros(2, 1, 2, 64), "v": torch.zeros(2, 1, 2, 64),
        "cache_seqlens": torch.tensor([3, 4], dtype=torch.int32), "block_table": torch.zeros(2, 3, dtype=torch.int32),
    }  # fmt: skip
    return base | changed


WRONG = {
    "rotary": (tensors(rotary_cos=torch.zeros(1)), "rotary_cos is not supported .* rotate q and k before"),
    "batch index": (tensors(cache_batch_idx=torch.zeros(2)), "cache_batch_idx is not supported .* block_table"),
    "left padding": (tensors(cache_leftpad=torch.zeros(2)), "cache_leftpad is not supported .* flash_attn_ranges_func"),
    "slopes": (tensors(alibi_slopes=torch.zeros(4)), "alibi_slopes are not supported"),
    "k alone": (tensors(v=None), "k and v come together"),
    "v alone": (tensors(k=None), "k and v come together"),
    "no lengths": (tensors(cache_seqlens=None), "cache_seqlens must be given"),
    "lengths of another type": (tensors(cache_seqlens=torch.tensor([3, 4])), r"cache_seqlens must be .* int32 .*got torch.int64 \[2\]"),
    "no lengths for a table": (tensors(k=None, v=None, cache_seqlens=None), "cache_seqlens must be given"),
    "no lengths for new keys": (
        tensors(k_cache=torch.zeros(2, 9, 2, 64), v_cache=torch.zeros(2, 9, 2, 64), cache_seqlens=None, block_table=None),
        "cache_seqlens must be given",
    ),
    "list of lengths": (tensors(cache_seqlens=[3, 4]), r"cache_seqlens must be an int or an int32 tensor .*got \[3, 4\]"),
    "lengths elsewhere": (
        tensors(cache_seqlens=torch.zeros(2, dtype=torch.int32, device="meta")),
        r"cache_seqlens must be .* on cpu, got .* on meta",
    ),
    "truth for a length": (tensors(cache_seqlens=True), "cache_seqlens must be an int or an int32 tensor .*got True"),
    "length beyond the pages": (
        tensors(cache_seqlens=torch.tensor([3, 384], dtype=torch.int32)),
        "at most the 384 tokens that the cache holds of a sequence, got 384 and 1 for sequence 1; allocate a longer cache",
    ),
    "page beyond the last": (
        tensors(block_table=torch.tensor([[0, 9, 9], [6, 9, 9]], dtype=torch.int32)),
        "block_table must hold numbers of the 6 pages there are, got 6 for sequence 1",
    ),
    "page for a new token": (
        tensors(
            block_table=torch.tensor([[0, 9, 9], [1, -1, 9]], dtype=torch.int32), cache_seqlens=torch.tensor([3, 128], dtype=torch.int32)
        ),
        "the 6 pages there are, got -1 for sequence 1",
    ),
    "lengths of another batch": (tensors(cache_seqlens=torch.zeros(3, dtype=torch.int32)), r"cache_seqlens must be .*\[2\]"),
    "table of another type": (tensors(block_table=torch.zeros(2, 3)), "block_table must be an int32 tensor"),
    "table of another batch": (tensors(block_table=torch.zeros(3, 3, dtype=torch.int32)), r"block_table must be .*\[2, pages"),
    "flat table": (tensors(block_table=torch.zeros(2, dtype=torch.int32)), r"block_table must be .* got torch.int32 \(2,\)"),
    "table with gaps": (tensors(block_table=torch.zeros(2, 6, dtype=torch.int32)[:, ::2]), "block_table must be .* its last stride 1"),
    "table elsewhere": (tensors(block_table=torch.zeros(2, 3, dtype=torch.int32, device="meta")), r"block_table must be .* on cpu"),
    "no table": (tensors(block_table=[[0]]), "block_table must be an int32 tensor .* got  list"),
    "small pages": (tensors(k_cache=torch.zeros(6, 64, 2, 64), v_cache=torch.zeros(6, 64, 2, 64)), "a multiple of 128 tokens, got 64"),
    "empty pages": (tensors(k_cache=torch.zeros(6, 0, 2, 64), v_cache=torch.zeros(6, 0, 2, 64)), "a multiple of 128 tokens, got 0"),
    "another batch": (tensors(block_table=None), "q and the cache must have the same batch size, got 2, 6, 6"),
    "three dimensions": (tensors(q=torch.zeros(2, 4, 64)), "q must have 4 dimensions"),
    "no tensor": (tensors(k_cache=3), "k_cache must be a torch.Tensor, got int"),
    "new keys of another shape": (tensors(k=torch.zeros(2, 1, 4, 64)), r"k must be \[2, 1, 2, 64\] .*got \[2, 1, 4, 64\]"),
    "new values of another length": (tensors(v=torch.zeros(2, 2, 2, 64)), r"v must be \[2, 1, 2, 64\]"),
    "new keys of another type": (tensors(k=torch.zeros(2, 1, 2, 64).half()), "k must be .* in torch.float32"),
    "new values of another type": (tensors(v=torch.zeros(2, 1, 2, 64).half()), "v must be .* in torch.float32"),
    "new keys elsewhere": (tensors(k=torch.zeros(2, 1, 2, 64, device="meta")), "k must be .* on cpu, .* on meta"),
    "heads": (tensors(q=torch.zeros(2, 1, 3, 64)), "must be a multiple of the number of key heads"),
    "gradient": (tensors(q=torch.zeros(2, 1, 4, 64, requires_grad=True)), "has no gradient, and q requires one"),
    "gradient of sinks": (tensors(s_aux=torch.zeros(4, requires_grad=True)), "has no gradient, and s_aux requires one"),
    "sinks of another number of heads": (tensors(s_aux=torch.zeros(2)), r"s_aux must be a floating-point tensor of shape \[4\]"),
    "no scale": (tensors(softmax_scale=0.0), "softmax_scale must be positive, got 0.0"),
    "negative scale": (tensors(softmax_scale=-1.0), "softmax_scale must be positive, got -1.0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name):
    arguments, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        flash_attn_with_kvcache(**arguments)


def test_what_requires_a_gradient_is_taken_where_none_is_recorded():
    """As the parameters of a model are under generate()."""
    arguments = tensors(q=torch.randn(2, 1, 4, 64), s_aux=torch.zeros(4))
    with torch.no_grad():
        expected = flash_attn_with_kvcache(**arguments)
        for name in ("q", "s_aux"):
            assert torch.equal(flash_attn_with_kvcache(**arguments | {name: arguments[name].clone().requires_grad_()}), expected)


def test_a_tangent_is_refused():
    """In place of a derivative of zero; torch.no_grad() does not end forward-mode differentiation."""
    with torch.no_grad(), forward_ad.dual_level():
        arguments = tensors()
        flash_attn_with_kvcache(**arguments)
        with pytest.raises(ValueError, match="has no derivative, and q has a tangent"):
            flash_attn_with_kvcache(**arguments | {"q": forward_ad.make_dual(arguments["q"], torch.ones_like(arguments["q"]))})


def test_views_at_an_offset_that_a_graph_does_not_know_are_refused():
    """torch's inductor writes into the first of them then, in silence."""
    torch.compiler.reset()
    arguments = {"backend": "eager", "dynamic": True, "fullgraph": True}
    step = torch.compile(lambda *tensors: flash_attn_with_kvcache(*tensors[:5], cache_seqlens=tensors[5]), **arguments)
    q, new, lengths = torch.randn(2, 1, 4, 64), torch.randn(2, 1, 2, 64), torch.tensor([4, 9], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="views of one buffer, and v_cache begins at an offset unknown while compiling"):
        step(q, *torch.zeros(2, 2, 20, 2, 64).unbind(), new, new, lengths)
    step(q, torch.zeros(3, 2, 20, 2, 64)[1], torch.zeros(3, 2, 20, 2, 64)[2], new, new, lengths)  # of a buffer each


def test_vmap_of_a_step_that_writes_is_refused():
    arguments = tensors()
    q, k, v, k_cache, v_cache = (arguments[name][None] for name in ("q", "k", "v", "k_cache", "v_cache"))
    lengths, table = arguments["cache_seqlens"], arguments["block_table"]

    def step(q, k_cache, v_cache, k=None, v=None):
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table)

    with pytest.raises(ValueError, match="writes k and v into its cache, which transforms of torch.func .* do not follow"):
        torch.func.vmap(step)(q, k_cache, v_cache, k, v)
    assert torch.equal(torch.func.vmap(step)(q, k_cache, v_cache)[0], step(q[0], k_cache[0], v_cache[0]))


def test_a_cache_is_never_copied(device):
    """One that the kernels cannot read is refused where they would read it."""
    arguments = {name: x.to(device, torch.bfloat16) if x.is_floating_point() else x.to(device) for name, x in tensors().items()}
    arguments["k_cache"] = torch.zeros(6, 128, 2, 65, device=device, dtype=torch.bfloat16)[..., :64]
    if ON_GPU:
        with pytest.raises(ValueError, match="strides of k_cache must be multiples of 8"):
            flash_attn_with_kvcache(**arguments)
    else:
        assert kernels.is_readable(arguments["k_cache"]) is False
        flash_attn_with_kvcache(**arguments)


class OfGPU(torch.Tensor):
    """A tensor that says so; operators run where it really is."""

    device = torch.device("cuda:0")


UNREADABLE = {
    "strides": lambda: torch.zeros(6, 128, 2, 65).bfloat16()[..., :64],
    "head dim": lambda: torch.zeros(6, 128, 2, 64).bfloat16()[..., :60],
    "address": lambda: torch.zeros(6 * 128 * 2 * 64 + 4).bfloat16()[4:].view(6, 128, 2, 64),
}


@pytest.mark.parametrize("what", UNREADABLE)
@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_either_cache_is_refused_where_kernels_would_not_read_it(name, what):
    arguments = {name: (x.bfloat16() if x.is_floating_point() else x).as_subclass(OfGPU) for name, x in tensors().items()}
    with pytest.raises(ValueError, match=f"the head dim and the strides of {name} must be multiples of 8"):
        flash_attn_with_kvcache(**arguments | {name: UNREADABLE[what]().as_subclass(OfGPU)})


@pytest.mark.parametrize("paged", [False, True])
def test_a_step_of_a_gpu_is_compiled_without_a_graph_break(paged):
    """A traced tensor has no address that could be looked at."""
    arguments = tensors()
    if not paged:
        del arguments["block_table"]
        arguments |= {name: arguments[name][:2] for name in ("k_cache", "v_cache")}
    with FakeTensorMode():
        types = {name: torch.bfloat16 if x.is_floating_point() else x.dtype for name, x in arguments.items()}
        arguments = {name: torch.empty(x.shape, dtype=types[name], device="cuda") for name, x in arguments.items()}
        torch.compiler.reset()
        step = torch.compile(flash_attn_with_kvcache, backend="eager", fullgraph=True)
        assert step(**arguments).shape == arguments["q"].shape


def test_lengths_may_be_one_number_or_none(device):
    q, k, v = (torch.randn(2, n, 2, 64, device=device).to(DTYPES[0]) for n in (1, 20, 20))
    seven = torch.full((2,), 7, dtype=torch.int32, device=device)
    assert torch.equal(flash_attn_with_kvcache(q, k, v, cache_seqlens=7), flash_attn_with_kvcache(q, k, v, cache_seqlens=seven))
    assert torch.equal(flash_attn_with_kvcache(q, k, v, cache_seqlens=np.int64(7)), flash_attn_with_kvcache(q, k, v, cache_seqlens=seven))
    assert torch.equal(flash_attn_with_kvcache(q, k, v), hf_flash2.flash_attn_func(q, k, v))


def test_lengths_may_lie_apart(device):
    """Kernels read them one after the other."""
    q, k, v = (torch.randn(2, n, 2, 64, device=device).to(DTYPES[0]) for n in (1, 20, 20))
    apart = torch.tensor([7, 1, 20, 1], dtype=torch.int32, device=device)[::2]
    found, expected = (flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths) for lengths in (apart, apart.contiguous()))
    assert torch.equal(found, expected)
    assert kvcache._check_lengths(apart, 2, apart.device, needed=True).is_contiguous()


@pytest.fixture
def nobody_looks(monkeypatch):
    """At lengths and pages, as on a GPU."""
    monkeypatch.setattr(kvcache, "has_known_values", lambda x: False)


def test_tokens_beyond_the_cache_are_left_out(device, nobody_looks):
    k_cache, v_cache = (torch.zeros(1, 8, 2, 64, device=device, dtype=DTYPES[0]) for _ in range(2))
    new = torch.ones(1, 4, 2, 64, device=device, dtype=DTYPES[0])
    six = torch.full((1,), 6, dtype=torch.int32, device=device)
    flash_attn_with_kvcache(new.repeat(1, 1, 2, 1), k_cache, v_cache, new, new, cache_seqlens=six)
    assert k_cache.sum().item() == v_cache.sum().item() == 2 * 2 * 64


def test_a_length_beyond_the_cache_is_all_of_it(device, nobody_looks):
    """However far, so that lengths and new tokens add up to more than 32 bits hold."""
    q, k, v = (torch.randn(2, n, 2, 64, device=device).to(DTYPES[0]) for n in (2, 20, 20))
    beyond = torch.full((2,), 2**31 - 1, dtype=torch.int32, device=device)
    assert torch.equal(flash_attn_with_kvcache(q, k, v, q, q, cache_seqlens=beyond), flash_attn_with_kvcache(q, k, v, cache_seqlens=20))


@pytest.mark.parametrize("lengths", [7, 2**40, np.uint8(255)], ids=str)
def test_a_number_beyond_the_cache_is_refused(lengths, device, nobody_looks):
    """On a GPU, too, as it is on the host."""
    new, caches = torch.zeros(2, 2, 2, 64, device=device, dtype=DTYPES[0]), torch.zeros(2, 2, 8, 2, 64, device=device, dtype=DTYPES[0])
    with pytest.raises(ValueError, match=f"at most the 8 tokens that the cache holds of a sequence, got {lengths} and 2 for sequence 0"):
        flash_attn_with_kvcache(new, *caches, new, new, cache_seqlens=lengths)
    assert not caches.any()
    flash_attn_with_kvcache(new, *caches, new, new, cache_seqlens=6)


def test_no_sequence_is_any_number_below_zero(device):
    """Nothing of it is written, though its new tokens are more than the cache holds."""
    new, caches = torch.ones(2, 10, 2, 64, device=device, dtype=DTYPES[0]), torch.zeros(2, 2, 8, 2, 64, device=device, dtype=DTYPES[0])
    out, lse = flash_attn_with_kvcache(new, *caches, new, new, cache_seqlens=-(2**40), return_softmax_lse=True)
    assert not out.any() and lse.isposinf().all() and not caches.any()


@pytest.mark.parametrize("name", ["append", "paged_forward"])
def test_opcheck(name, device):
    arguments = {name: x.to(device, DTYPES[0]) if x.is_floating_point() else x.to(device) for name, x in tensors().items()}
    q, k_cache, v_cache, k, v, lengths, table = arguments.values()
    ranges = torch.stack((torch.zeros_like(lengths), lengths))
    calls = {
        "append": (k, v, k_cache, v_cache, lengths, table),
        "paged_forward": (q, k_cache, v_cache, ranges, table, None, 384, 0.125, -1, 0, 0.0),
    }
    torch.library.opcheck(getattr(torch.ops.hf_flash2, name).default, calls[name])


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs are of a GPU")
def test_a_captured_step_follows_lengths_and_table(device):
    """As continuous batching replays it: the same tensors with other values."""
    steps = [tensors(cache_seqlens=torch.tensor(n, dtype=torch.int32), block_table=torch.tensor(t, dtype=torch.int32))
             for n, t in (([3, 200], [[0, 1, 2], [3, 4, 5]]), ([130, 0], [[4, 2, 0], [1, 3, 5]]))]  # fmt: skip
    steps = [{name: x.to(device, torch.bfloat16) if x.is_floating_point() else x.to(device) for name, x in step.items()} for step in steps]
    for step in steps:
        for name in ("q", "k", "v", "k_cache", "v_cache"):
            step[name].normal_()
    captured = {name: x.clone() for name, x in steps[0].items()}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        flash_attn_with_kvcache(**captured, causal=True)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_with_kvcache(**captured, causal=True)
    for step in steps:
        for name, x in step.items():
            captured[name].copy_(x)
        graph.replay()
        assert torch.equal(out, flash_attn_with_kvcache(**step, causal=True)) and torch.equal(captured["k_cache"], step["k_cache"])

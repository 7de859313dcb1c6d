"""The cross-entropy of logits and its gradient against float64: by the kernel, in the emulator or on a GPU, and by torch's functions."""

import emulated
import pytest
import stand_in
import torch
from emulator import build

from hf_flash2 import cross_entropy, kernels, native
from hf_flash2.cross_entropy import cross_entropy_

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NOT_FINITE = float("nan"), float("inf"), -float("inf")
no_emulator = not CUDA and build.reason_not_buildable()


@pytest.fixture(scope="module")
def library():
    return None if CUDA else emulated.load(build.build(("forward_sm80_hdim64_bf16",)))


@pytest.fixture(params=[pytest.param("kernel", marks=pytest.mark.skipif(bool(no_emulator), reason=str(no_emulator))), "torch"])
def form(request, monkeypatch):
    """Which of the two computes; what they allocate is NaN until it is written. After the test, that it was the one to compute."""
    calls, run = [], kernels.cross_entropy
    monkeypatch.setattr(kernels, "cross_entropy", lambda *tensors: calls.append(run(*tensors)))
    monkeypatch.setattr(torch, "empty", emulated.poisoned_empty)
    monkeypatch.delenv("HF_FLASH2_LOSS", raising=False)
    if request.param == "torch":
        monkeypatch.setenv("HF_FLASH2_LOSS", "eager")
        yield request.param
    elif CUDA:
        yield request.param
    else:
        monkeypatch.setattr(cross_entropy, "_on_gpu", lambda device: True)
        with emulated.running(monkeypatch, request.getfixturevalue("library"), seed=2, resident=2):
            yield request.param
    assert bool(calls) == (request.param == "kernel")


def problem(dtype: torch.dtype, columns: int, scale: float = 1.0, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that spread the more the later the row, and labels: the first and the last column, the most and the least probable, others."""
    generator = torch.Generator().manual_seed(columns)
    logits = torch.randn(rows, columns, generator=generator) * scale * torch.arange(1, rows + 1)[:, None]
    logits = logits.clamp(-6e4, 6e4).to(dtype)
    labels = torch.randint(columns, (rows,), generator=generator)
    labels[:4] = torch.tensor([0, columns - 1, logits[2].float().argmax(), logits[3].float().argmin()])
    logits[-1, labels[-1]] = logits[-1].max() + 12  # p - 1 is 1e-5 and less
    return logits.to(DEVICE), labels.to(DEVICE)


def truth(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(logits.double(), -1)
    log_p_label = log_p.gather(1, labels[:, None])
    return -log_p_label[:, 0], log_p.exp().scatter_(1, labels[:, None], log_p_label.expm1())


def check(form: str, losses: torch.Tensor, gradient: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
    """Losses to float32's rounding; gradients to that of their dtype, a label's but for what the float32 sum leaves of p - 1.

    torch's own sum on a CPU also loses terms under 2^-25 that come behind a p of almost 1, in the lane that has it: of 128,256 columns
    4.2e-6 in 8 lanes (AVX2), 1.9e-6 in 16 (AVX-512). Allowed is what 8 lanes can lose, an eighth of 1 - p.
    """
    expected_losses, expected = truth(logits, labels)
    lost = 1e-5 if form == "torch" and not CUDA and logits.shape[1] > 100_000 else 0.0
    assert losses.dtype == torch.float32 and losses.shape == labels.shape
    torch.testing.assert_close(losses.double(), expected_losses, rtol=4e-6, atol=4e-6 + lost)
    info = torch.finfo(gradient.dtype)
    allowed = expected.abs() * (0.51 * info.eps + 2e-5) + max(info.smallest_normal * info.eps, 2.0**-126)
    allowed.scatter_add_(1, labels[:, None], torch.full_like(allowed[:, :1], 5e-6 + lost))
    assert gradient.dtype == logits.dtype and ((gradient.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("scale", [1.0, 1e3])
@pytest.mark.parametrize("columns", [1, 8, 33, 1000, 4096 + 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loss_and_gradient(form, dtype, columns, scale):
    """Rows whose ends are not at multiples of 16 bytes among them."""
    logits, labels = problem(dtype, columns, scale)
    gradient = logits.clone()
    check(form, cross_entropy_(gradient, labels), gradient, logits, labels)


@pytest.mark.parametrize("columns", [40_001, 128_256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_many_columns_as_vocabularies_have(form, dtype, columns):
    """Above 64 and above 128 KB a row has more threads. Bit-equal when repeated."""
    logits, labels = problem(dtype, columns, scale=0.5, rows=300 if CUDA else 6)
    gradient = logits.clone()
    losses = cross_entropy_(gradient, labels)
    check(form, losses, gradient, logits, labels)
    again = logits.clone()
    assert torch.equal(cross_entropy_(again, labels), losses) and torch.equal(again, gradient)


@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_a_wider_tensor(form, dtype, shift):
    """What lies between the rows stays as it is, wherever they begin."""
    logits, labels = problem(dtype, 77)
    wide = torch.full((len(labels), 77 + 20), float("nan"), dtype=dtype, device=DEVICE)
    inside = slice(shift, shift + 77)
    wide[:, inside] = logits
    check(form, cross_entropy_(wide[:, inside], labels), wide[:, inside], logits, labels)
    wide[:, inside] = 0
    assert wide.isnan().sum() == len(labels) * 20


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_not_finite(form, dtype):
    """As torch's log_softmax has them: NaN and +inf leave nothing, nor do -inf alone; some of -inf are classes of probability 0."""
    columns = 203
    logits, labels = torch.randn(9, columns).to(dtype), torch.full((9,), 70)
    for row, (value, column) in enumerate((value, column) for value in NOT_FINITE for column in (0, 100)):
        logits[row, column] = value
    logits[6] = -float("inf")
    logits[7, labels[7]] = -float("inf")
    logits[8, torch.arange(columns) != labels[8]] = -float("inf")
    logits, labels = logits.to(DEVICE), labels.to(DEVICE)
    expected_losses, expected = truth(logits, labels)
    gradient = logits.clone()
    losses = cross_entropy_(gradient, labels)
    assert losses.isnan().tolist() == expected_losses.isnan().tolist() == [True] * 4 + [False] * 2 + [True] + [False] * 2
    assert torch.equal(gradient.isnan(), expected.isnan()) and losses[7] == float("inf") and losses[8] == 0 and gradient[8].eq(0).all()
    check(form, losses[4:6], gradient[4:6], logits[4:6], labels[4:6])
    check(form, losses[8:], gradient[8:], logits[8:], labels[8:])
    torch.testing.assert_close(gradient[7].double(), expected[7], rtol=5e-3, atol=1e-7)
    assert gradient[7, 70] == -1


def test_no_rows(form):
    logits, labels = torch.zeros(0, 50, device=DEVICE), torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert cross_entropy_(logits, labels).shape == (0,)


@pytest.mark.parametrize("form", ["kernel"], indirect=True)
@pytest.mark.parametrize("label", [-1, -100, 50, 2**40], ids=str)
def test_a_label_that_is_no_class(form, label):
    """Its row is lost, the others are not, nor is what lies around them."""
    wide = torch.full((7, 50), 5.0, device=DEVICE)
    logits, labels = problem(torch.float32, 50)
    labels[2] = label
    wide[:6] = logits
    losses = cross_entropy_(wide[:6], labels)
    assert losses[2].isnan() and wide[2].isnan().all() and wide[6].eq(5).all()
    others = [0, 1, 3, 4, 5]
    check(form, losses[others], wide[others], logits[others], labels[others])


@pytest.mark.parametrize("form", ["kernel"], indirect=True)
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("overlapping rows", "row stride of logits must be at least the number of columns, 9, got 4"),
        ("labels at an odd address", "address of labels must be a multiple of 8, got one that is not"),
    ],
)
def test_what_the_kernel_cannot_take_is_an_error(form, name, expected):
    logits, labels = problem(torch.float32, 9)
    losses = torch.zeros(6, device=DEVICE)
    wrong_logits = logits.as_strided((6, 9), (4, 1)) if name == "overlapping rows" else logits
    wrong_labels = torch.zeros(13, dtype=torch.int32, device=DEVICE)[1:] if name.startswith("labels") else labels
    with pytest.raises(ValueError, match=expected):
        kernels.cross_entropy(wrong_logits, wrong_labels, losses)
    kernels.cross_entropy(logits, labels, losses)


def test_params_are_those_of_the_header(monkeypatch):
    library = stand_in.Library().install(monkeypatch)
    monkeypatch.setattr(cross_entropy, "_on_gpu", lambda device: True)
    for number, dtype in enumerate((torch.float16, torch.bfloat16, torch.float32)):
        wide, labels = torch.zeros(3, 90, dtype=dtype), torch.arange(3)
        losses = cross_entropy_(wide[:, 10:80], labels)
        params = stand_in.structs()["HfFlash2CrossEntropyParams"].from_buffer_copy(library.calls[-1])
        assert (params.struct_size, params.stream) == (len(library.calls[-1]), 7)
        assert (params.logits, params.labels, params.losses) == (wide[:, 10:].data_ptr(), labels.data_ptr(), losses.data_ptr())
        assert [params.row_stride, params.device, params.dtype, params.rows, params.columns] == [90, -1, number, 3, 70]


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""


def test_float64_stays_float64():
    logits, labels = torch.randn(6, 40, dtype=torch.float64), torch.arange(6)
    gradient = logits.clone()
    losses = cross_entropy_(gradient, labels)
    torch.testing.assert_close(losses, torch.nn.functional.cross_entropy(logits, labels, reduction="none"), rtol=1e-13, atol=0)
    torch.testing.assert_close(gradient, logits.softmax(-1) - torch.nn.functional.one_hot(labels, 40), rtol=1e-12, atol=1e-15)


def test_which_logits_the_kernel_takes(monkeypatch):
    """On a CPU none. On a GPU those of float dtypes but float64, where the library runs."""
    monkeypatch.delenv("HF_FLASH2_LOSS", raising=False)
    logits, labels = problem(torch.bfloat16, 40)
    logits, labels = logits.cpu(), labels.cpu()
    monkeypatch.setattr(native, "reason_unavailable", lambda index: None)
    assert not cross_entropy._kernel_takes(logits, labels)
    assert cross_entropy.can_fuse(torch.device("cuda", 0), torch.bfloat16)
    monkeypatch.setattr(cross_entropy, "_on_gpu", lambda device: True)
    assert cross_entropy._kernel_takes(logits, labels) and cross_entropy._kernel_takes(logits[:1], labels[:1])
    assert cross_entropy._kernel_takes(logits.as_strided((1, 40), (3, 1)), labels[:1])  # the stride of one row is none
    refused = {
        "float64": (logits.double(), labels),
        "strided": (logits[:, ::2], labels),
        "of one row": (logits[:1].expand(6, 40), labels),
        "int32 labels": (logits, labels.int()),
        "strided labels": (logits[:3], labels[::2]),
        "labels elsewhere": (logits, labels.to("meta")),
        "tensor subclasses": (logits.as_subclass(OnGpu), labels),
        "labels of a tensor subclass": (logits, labels.as_subclass(OnGpu)),
    }
    assert [name for name, tensors in refused.items() if cross_entropy._kernel_takes(*tensors)] == []
    monkeypatch.setenv("HF_FLASH2_LOSS", "eager")
    assert not cross_entropy.can_fuse(logits.device, logits.dtype)
    monkeypatch.delenv("HF_FLASH2_LOSS")
    monkeypatch.setattr(native, "reason_unavailable", lambda index: "the CUDA kernels are not built")
    assert not cross_entropy.can_fuse(logits.device, logits.dtype)

"""The rotary kernel against the formula in PyTorch, bit for bit, forward and backward: in the emulator on a CPU, and on a GPU."""

import emulated
import pytest
import stand_in
import torch
from emulator import build
from hf_flash2.patches.rotary import returns_new_tensors
from torch.autograd import forward_ad
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotary

from hf_flash2 import rotary

CUDA = torch.cuda.is_available()


@pytest.fixture(scope="module")
def library():
    return None if CUDA else emulated.load(build.build(("forward_sm80_hdim64_bf16",)))


@pytest.fixture
def device(library, monkeypatch):
    if CUDA:
        yield torch.device("cuda")
        return
    with emulated.running(monkeypatch, library):
        yield torch.device("cpu")


if not CUDA:
    pytestmark = pytest.mark.skipif(build.reason_not_buildable() is not None, reason=str(build.reason_not_buildable()))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[B, S, H, D], operation by operation in x's dtype."""
    rotary_dim = cos.shape[-1]
    cos, sin, turned, rest = cos.unsqueeze(2), sin.unsqueeze(2), x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-second, first), -1) * sin, rest), -1)


def problem(device, dtype, head_dim, rotary_dim, batch=2, seqlen=5, heads=(4, 2), angle_rows=1, paired=True):
    """q and k as a fused projection gives them, and angles that differ from token to token; paired: both of a pair have the same."""
    generator = torch.Generator().manual_seed(0)
    sizes = [heads[0] * head_dim, heads[1] * head_dim, heads[1] * head_dim]
    projection = torch.randn(batch, seqlen, sum(sizes), generator=generator).to(device, dtype)
    q, k, _ = projection.split(sizes, -1)
    angles = 3 * torch.randn(angle_rows, seqlen, rotary_dim // 2 if paired else rotary_dim, generator=generator)
    if paired:
        angles = torch.cat((angles, angles), -1)
    q, k = (x.unflatten(-1, (-1, head_dim)).detach().requires_grad_() for x in (q, k))
    return q, k, angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def outputs_and_gradients(function, q, k) -> list[torch.Tensor]:
    outputs = function()
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, (q, k), gradients)]


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 128), (96, 96), (80, 32), (256, 64), (16, 16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bit_for_bit(device, dtype, head_dim, rotary_dim):
    for angle_rows, heads, paired in ((1, (4, 2), True), (2, (3, 1), False)):
        q, k, cos, sin = problem(device, dtype, head_dim, rotary_dim, heads=heads, angle_rows=angle_rows, paired=paired)
        found = outputs_and_gradients(lambda args=(q, k, cos, sin): rotary.apply_rotary(*args), q, k)
        wanted = outputs_and_gradients(lambda args=(q, k, cos, sin): [rotated(x, *args[2:]) for x in args[:2]], q, k)
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(ours, theirs) and ours.isfinite().all()


def test_what_transformers_computes(device):
    q, k, cos, sin = problem(device, torch.bfloat16, 64, 64)
    found = rotary.apply_rotary(q, k, cos, sin)
    assert all(torch.equal(a, b) for a, b in zip(found, llama_rotary(q, k, cos, sin, unsqueeze_dim=2), strict=True))
    assert not torch.equal(found[0], q)


def test_in_place(device):
    """The same bits, in the place of q and k; where gradients are recorded, or the kernel cannot write the strides, in new tensors."""
    q, k, cos, sin = problem(device, torch.bfloat16, 80, 32)
    expected = [x.detach() for x in rotary.apply_rotary(q, k, cos, sin)]
    recorded = rotary.apply_rotary(q, k, cos, sin, in_place=True)
    assert all(map(torch.equal, recorded, expected)) and not any(x is y for x, y in zip(recorded, (q, k), strict=True))
    with torch.no_grad():
        odd = [torch.nn.functional.pad(x, (0, 4))[..., :-4] for x in (q, k)]
        found = rotary.apply_rotary(*odd, cos, sin, in_place=True)
        assert all(map(torch.equal, found, expected)) and all(map(torch.equal, odd, (q, k)))
        odd = [torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape) for x in (q, k)]  # an address that is no multiple of 16
        assert all(x.data_ptr() % 16 for x in odd)
        assert all(map(torch.equal, rotary.apply_rotary(*odd, cos, sin, in_place=True), expected))
        aligned = q.clone(memory_format=torch.preserve_format), k.clone(memory_format=torch.preserve_format)
        for q, k in ((odd[0], aligned[1]), (aligned[0], odd[1])):  # either both or none
            found = rotary.apply_rotary(q, k, cos, sin, in_place=True)
            assert all(map(torch.equal, found, expected)) and not any(x is y for x, y in zip(found, (q, k), strict=True))
        q, k = aligned
        found = rotary.apply_rotary(q, k, cos, sin)
        assert all(map(torch.equal, found, expected)) and not any(map(torch.equal, found, aligned))
        found = rotary.apply_rotary(q, k, cos, sin, in_place=True)
        assert all(map(torch.equal, found, expected)) and all(x is y for x, y in zip(found, (q, k), strict=True))


def test_whose_output_may_be_overwritten(monkeypatch):
    """That of a plain projection. Whoever watches one finds in his hands what it returned."""
    projection = torch.nn.Linear(8, 8)
    assert returns_new_tensors(projection)
    assert not returns_new_tensors(torch.nn.Sequential(projection))
    handle = projection.register_forward_hook(lambda *_: None)
    assert not returns_new_tensors(projection)
    handle.remove()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not returns_new_tensors(projection)
    handle.remove()
    assert returns_new_tensors(projection)
    monkeypatch.setattr(projection, "forward", projection.forward)
    assert not returns_new_tensors(projection)


def test_an_empty_batch(device):
    q, k, cos, sin = problem(device, torch.bfloat16, 64, 64, seqlen=0)
    assert [x.shape for x in rotary.apply_rotary(q, k, cos, sin)] == [q.shape, k.shape]


def test_what_the_kernel_cannot_take_is_an_error(device):
    q, k, cos, sin = problem(device, torch.bfloat16, 64, 24)
    with pytest.raises(ValueError, match="rotary_dim must be a multiple of 16, at most head_dim, got 24"):
        rotary.apply_rotary(q, k, cos, sin)
    q, k, cos, sin = problem(device, torch.bfloat16, 64, 64)
    assert rotary.apply_rotary(q, k, cos, sin)[0].isfinite().all()


def test_params_are_those_of_the_header(monkeypatch):
    library = stand_in.Library().install(monkeypatch)
    q, k, cos, sin = problem("cpu", torch.bfloat16, 64, 32, angle_rows=2)
    q_out, k_out = rotary.apply_rotary(q, k, cos, sin)
    params = stand_in.structs()["HfFlash2RotaryParams"].from_buffer_copy(library.calls[0])
    assert (params.struct_size, params.stream) == (len(library.calls[0]), 7)
    for name, x in (("q", q), ("k", k), ("q_out", q_out), ("k_out", k_out)):
        packed = getattr(params, name)
        assert (packed.data, packed.batch_stride, packed.token_stride, packed.head_stride) == (x.data_ptr(), *x.stride()[:3])
    assert (params.cos, params.sin, params.angle_batch_stride) == (cos.data_ptr(), sin.data_ptr(), 5 * 32)
    numbers = ("device", "dtype", "batch", "seqlen", "heads_q", "heads_k", "head_dim", "rotary_dim", "inverse")
    assert [getattr(params, name) for name in numbers] == [-1, 1, 2, 5, 4, 2, 64, 32, 0]
    q_out.sum().backward()
    assert stand_in.structs()["HfFlash2RotaryParams"].from_buffer_copy(library.calls[1]).inverse == 1
    rotary.apply_rotary(*problem("cpu", torch.bfloat16, 64, 32))
    assert stand_in.structs()["HfFlash2RotaryParams"].from_buffer_copy(library.calls[2]).angle_batch_stride == 0


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""


def test_which_tensors_are_fused(monkeypatch):
    """On a CPU none. On a GPU those of one half type, aligned, with angles for each token; the rest keeps Transformers' function."""
    q, k, cos, sin = problem("cpu", torch.bfloat16, 64, 64)
    assert not rotary.can_fuse(q, k, cos, sin)
    monkeypatch.setattr(rotary, "_on_gpu", lambda x: True)
    assert rotary.can_fuse(q, k, cos, sin)
    monkeypatch.setenv("HF_FLASH2_ROTARY", "eager")
    assert not rotary.can_fuse(q, k, cos, sin)
    monkeypatch.delenv("HF_FLASH2_ROTARY")
    assert rotary.can_fuse(q, k, cos[..., :32].contiguous(), sin[..., :32].contiguous())
    assert rotary.can_fuse(q, k, *(x.repeat(len(q), 1, 1) for x in (cos, sin)))
    assert rotary.can_fuse(*(x.half() for x in (q, k, cos, sin)))
    refused = {
        "float32": [x.float() for x in (q, k, cos, sin)],
        "angles of another dtype": [q, k, cos.float(), sin.float()],
        "strided angles": [q, k, *(x[..., ::2] for x in (cos, sin))],
        "angles for other tokens": [q, k, cos[:, :3].contiguous(), sin[:, :3].contiguous()],
        "a rotary dim that is no multiple of 16": [q, k, cos[..., :24].contiguous(), sin[..., :24].contiguous()],
        "angles with a gradient": [q, k, cos.clone().requires_grad_(), sin],
        "angles elsewhere": [q, k, *(x.to("meta") for x in (cos, sin))],
        "sines of another shape": [q, k, cos, sin[..., :32].contiguous()],
        "sines of another dtype": [q, k, cos, sin.float()],
        "keys of another dtype": [q, k.half(), cos, sin],
        "fewer keys": [q, k[:, :3], cos, sin],
        "keys of fewer rows": [q, k[:1], cos, sin],
        "keys of another head dim": [q, k[..., :32], cos, sin],
        "sines elsewhere": [q, k, cos, sin.to("meta")],
        "keys elsewhere": [q, k.to("meta"), cos, sin],
        "sines at an odd address": [q, k, cos, torch.cat((sin.new_zeros(1), sin.flatten()))[1:].view(sin.shape)],
        "tensor subclasses": [q.as_subclass(OnGpu), k, cos, sin],
        "keys of a tensor subclass": [q, k.as_subclass(OnGpu), cos, sin],
        "cosines of a tensor subclass": [q, k, cos.as_subclass(OnGpu), sin],
        "sines of a tensor subclass": [q, k, cos, sin.as_subclass(OnGpu)],
        "sines with a gradient": [q, k, cos, sin.clone().requires_grad_()],
        "strided cosines": [q, k, cos[..., ::2], sin[..., :32].contiguous()],
        "strided sines": [q, k, cos[..., :32].contiguous(), sin[..., ::2]],
        "angles at an odd address": [q, k, *(torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape) for x in (cos, sin))],
        "angles of four dims": [q, k, cos[..., None], sin[..., None]],
        "angles of three rows for two": [q, k, cos.repeat(3, 1, 1), sin.repeat(3, 1, 1)],
        "more angles than head_dim": problem("cpu", torch.bfloat16, 64, 80),
        "a head dim that is no multiple of 8": problem("cpu", torch.bfloat16, 60, 48),
    }
    assert [name for name, tensors in refused.items() if rotary.can_fuse(*tensors)] == []
    with torch.no_grad(), forward_ad.dual_level():  # a tangent would be lost
        assert not rotary.can_fuse(forward_ad.make_dual(q, q), k, cos, sin)
    assert torch.func.vmap(lambda q: q * rotary.can_fuse(q, k, cos, sin))(q[None]).sum() == 0

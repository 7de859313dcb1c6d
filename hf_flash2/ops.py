"""The two torch.library operations, `hf_flash2::forward` and `hf_flash2::backward`: schema, backends, fake kernels, autograd.

CUDA tensors run the kernels of libhf_flash2.so, CPU tensors the reference in plain PyTorch. functional.py checks arguments first; calling
an op directly is for tests and for compilers.

q: [B, Sq, H, D], k: [B, Sk, Hk, D], v: [B, Sk, Hk, Dv] -> out [B, Sq, H, Dv]; on CUDA D and Dv are multiples of 8.
Sequences (`seqlens_q`, `seqlens_k`, int32): None = dense [B, S, H, D]; 1-D [B + 1] = cumulative lengths of packed [T, H, D];
2-D [2, B] = (start, length) ranges into dense tensors. With `key_mask` (uint8 [B, Sk], 1 = visible) seqlens_k is [3, B] and its third row
is non-zero for the sequences whose mask has to be read. `rng_state` (int64 [2]) keys the dropout mask.
`softmax_lse` is float32, natural log, [B, H, Sq] or [H, Tq]; +inf for rows that see no key and for rows outside every range.
"""

import torch

from . import kernels, native, reference

_library = torch.library.Library("hf_flash2", "DEF")

_SEQUENCES = "Tensor? seqlens_q, Tensor? seqlens_k, Tensor? key_mask, Tensor? rng_state"
_NUMBERS = (
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, SymInt window_left, SymInt window_right, "
    "float dropout_p, bool deterministic"
)
_library.define(
    f"forward(Tensor q, Tensor k, Tensor v, {_SEQUENCES}, {_NUMBERS}) -> (Tensor out, Tensor softmax_lse)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    f"backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, {_SEQUENCES}, {_NUMBERS})"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=torch.Tag.pt2_compliant_tag,
)

# The backend and kernel family of the last forward of this process, for `last_backend()`.
_last_backend: str | None = None


def last_backend() -> str | None:
    """Which backend the last attention call of this process ran on: "cuda-sm80", "cuda-sm90", "cpu-reference", or None before any call."""
    return _last_backend


def expected_backend(device: torch.device) -> str:
    """Which backend attention on this device will run on, in the words of `last_backend`. Raises where it cannot run, with the reason."""
    if device.type == "cpu":
        return "cpu-reference"
    if device.type != "cuda":
        raise ValueError(f"attention runs on cuda and cpu, got a tensor or model on {device}; use attn_implementation='sdpa' there")
    index = torch.cuda.current_device() if device.index is None else device.index
    return f"cuda-sm{native.forward_family(index, native.forced_family())}"


def _record(backend: str) -> None:
    global _last_backend
    _last_backend = backend


def _out_shape(q: torch.Tensor, v: torch.Tensor) -> tuple[int, ...]:
    return *q.shape[:-1], v.shape[-1]


def _lse_shape(q: torch.Tensor) -> tuple[int, ...]:
    *batch, tokens, heads, _ = q.shape
    return *batch, heads, tokens


def _has_gaps(seqlens: torch.Tensor | None) -> bool:
    """Ranges leave rows that no sequence covers; those rows of a result are zero (lse: +inf)."""
    return seqlens is not None and seqlens.dim() == 2


def _forward_cuda(
    q, k, v, seqlens_q, seqlens_k, key_mask, rng_state,
    max_seqlen_q, max_seqlen_k, softmax_scale, window_left, window_right, dropout_p, deterministic,
):  # fmt: skip
    gaps = _has_gaps(seqlens_q)
    lse_shape = _lse_shape(q)
    if gaps:
        out = q.new_zeros(_out_shape(q, v))
        softmax_lse = torch.full(lse_shape, float("inf"), dtype=torch.float32, device=q.device)
    else:
        like_q = q.shape[-1] == v.shape[-1]  # PERF: empty_like takes 0.6 us less than new_empty
        out = torch.empty_like(q, memory_format=torch.contiguous_format) if like_q else q.new_empty(_out_shape(q, v))
        softmax_lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    family = kernels.forward(
        q, k, v, out, softmax_lse, seqlens_q, seqlens_k, key_mask, rng_state,
        max_seqlen_q, max_seqlen_k, softmax_scale, window_left, window_right, dropout_p,
    )  # fmt: skip
    _record(f"cuda-sm{family}")
    return out, softmax_lse


def _backward_cuda(
    dout, dlse, q, k, v, out, softmax_lse, seqlens_q, seqlens_k, key_mask, rng_state,
    max_seqlen_q, max_seqlen_k, softmax_scale, window_left, window_right, dropout_p, deterministic,
):  # fmt: skip
    dq = q.new_zeros(q.shape) if _has_gaps(seqlens_q) else q.new_empty(q.shape)
    new_key_gradient = k.new_zeros if _has_gaps(seqlens_k) else k.new_empty
    dk, dv = new_key_gradient(k.shape), new_key_gradient(v.shape)
    kernels.backward(
        dout, None if dlse is None else dlse.contiguous(), q, k, v, out, softmax_lse, dq, dk, dv,
        seqlens_q, seqlens_k, key_mask, rng_state,
        max_seqlen_q, max_seqlen_k, softmax_scale, window_left, window_right, dropout_p, deterministic,
    )  # fmt: skip
    return dq, dk, dv


def _forward_cpu(
    q, k, v, seqlens_q, seqlens_k, key_mask, rng_state,
    max_seqlen_q, max_seqlen_k, softmax_scale, window_left, window_right, dropout_p, deterministic,
):  # fmt: skip
    _record("cpu-reference")
    return reference.attention_forward(
        q, k, v, seqlens_q, seqlens_k, key_mask, rng_state, softmax_scale, window_left, window_right, dropout_p
    )


def _backward_cpu(
    dout, dlse, q, k, v, out, softmax_lse, seqlens_q, seqlens_k, key_mask, rng_state,
    max_seqlen_q, max_seqlen_k, softmax_scale, window_left, window_right, dropout_p, deterministic,
):  # fmt: skip
    return reference.attention_backward(
        dout, dlse, q, k, v, out, softmax_lse, seqlens_q, seqlens_k, key_mask, rng_state,
        softmax_scale, window_left, window_right, dropout_p,
    )  # fmt: skip


_library.impl("forward", _forward_cuda, "CUDA")
_library.impl("backward", _backward_cuda, "CUDA")
_library.impl("forward", _forward_cpu, "CPU")
_library.impl("backward", _backward_cpu, "CPU")


@torch.library.register_fake("hf_flash2::forward", lib=_library)
def _forward_fake(q, k, v, *_):
    return q.new_empty(_out_shape(q, v)), q.new_empty(_lse_shape(q), dtype=torch.float32)


@torch.library.register_fake("hf_flash2::backward", lib=_library)
def _backward_fake(dout, dlse, q, k, v, *_):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def attention(*args) -> tuple[torch.Tensor, torch.Tensor]:
    """`forward` by the shortest way: straight to the backend for plain tensors in eager mode, through the dispatcher for everything else
    (torch.compile, fake tensors, dispatch modes, vmap, tensor subclasses).

    PERF: the dispatcher's two keys mean two more passes through Python; on the host of an H200 a call with autograd took 62 us that way.
    """
    q, k, v = args[:3]
    if torch.compiler.is_compiling() or not _plain(q, k, v):
        return forward(*args)
    backend = _BACKENDS["cuda" if q.is_cuda else "cpu"]
    return _apply_attention(backend, q, k, v, args[3:]) if torch.is_grad_enabled() else backend[0](*args)


def _plain(*tensors: torch.Tensor) -> bool:
    """Whether nothing but autograd wants to see operations on these tensors."""
    for x in tensors:
        if type(x) is not torch.Tensor:
            return False
    return torch._C._len_torch_dispatch_stack() == 0 and torch._C._functorch.peek_interpreter_stack() is None


def _below_autograd(op):
    """`op` through the dispatcher's keys below autograd."""

    def run(*args):
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    return run


class _Attention(torch.autograd.Function):
    """forward and backward as one differentiable function.

    PERF: registered by hand under the Autograd key; torch.library.register_autograd costs 47 us a call on the host, this 13 (2-core EPYC).
    """

    @staticmethod
    def forward(ctx, backend, q, k, v, rest):  # few arguments: each costs time
        out, softmax_lse = backend[0](q, k, v, *rest)
        ctx.save_for_backward(q, k, v, out, softmax_lse, *rest[:4])
        ctx.backend, ctx.numbers = backend, rest[4:]
        ctx.set_materialize_grads(False)
        return out, softmax_lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, softmax_lse, *sequences = ctx.saved_tensors
        if dout is None:
            if dlse is None:
                return None, None, None, None, None
            dout = torch.zeros_like(out)
        args = (dout, dlse, q, k, v, out, softmax_lse, *sequences, *ctx.numbers)
        if torch.is_grad_enabled():  # a second derivative is wanted: _AttentionGradient refuses it, if it comes to that
            return None, *backward(*args), None
        backend = ctx.backend if _plain(dout, q, k, v) else _DISPATCHED
        return None, *backend[1](*args), None


# PERF: what _Attention.apply calls in the end; its own checks, 3 us, are about functorch, which _plain excludes.
_apply_attention = super(torch.autograd.Function, _Attention).apply


class _AttentionGradient(torch.autograd.Function):
    """backward, with a clear refusal to be differentiated once more."""

    @staticmethod
    def forward(ctx, *args):
        return _DISPATCHED[1](*args)

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(
            "hf_flash2 attention has no second derivative; use attn_implementation='eager' where gradients of gradients are needed"
        )


def _forward_autograd(*args):
    return _Attention.apply(_DISPATCHED, *args[:3], args[3:]) if torch.is_grad_enabled() else _DISPATCHED[0](*args)


def _backward_autograd(*args):
    return _AttentionGradient.apply(*args) if torch.is_grad_enabled() else _DISPATCHED[1](*args)


_library.impl("forward", _forward_autograd, "Autograd")
_library.impl("backward", _backward_autograd, "Autograd")

forward = torch.ops.hf_flash2.forward.default
backward = torch.ops.hf_flash2.backward.default

# What runs an op below autograd, (forward, backward): by device type for plain tensors, else the dispatcher.
_BACKENDS = {"cuda": (_forward_cuda, _backward_cuda), "cpu": (_forward_cpu, _backward_cpu)}
_DISPATCHED = (_below_autograd(forward), _below_autograd(backward))

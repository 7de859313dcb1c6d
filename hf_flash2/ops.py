"""The two torch.library operations, `hf_flash2::flash_attn_forward` and `.._backward`: schema, backends, fake kernels, autograd.
Policies of selective checkpointing know attention by "flash_attn" in the name of an op, and keep what it returned.

CUDA tensors run the kernels of libhf_flash2.so, CPU tensors the reference in plain PyTorch. functional.py checks arguments first; calling
an op directly is for tests and for compilers. In eager mode, plain CUDA tensors go past the dispatcher: see Plan.

q: [B, Sq, H, D], k: [B, Sk, Hk, D], v: [B, Sk, Hk, Dv] -> out [B, Sq, H, Dv]; on CUDA D and Dv are multiples of 8.
Sequences (`seqlens_q`, `seqlens_k`, int32): None = dense [B, S, H, D]; 1-D [B + 1] = cumulative lengths of packed [T, H, D];
2-D [2, B] = (start, length) ranges into dense tensors. With `key_mask` (uint8 [B, Sk], 1 = visible) seqlens_k is [3, B] and its third row
is non-zero for the sequences whose mask has to be read. `rng_state` (int64 [2]) keys the dropout mask. `sinks` (float32 [H], contiguous): a
logit for each query head that every row counts in its sum, beside its scores; `dsinks` is empty where there are none. softcap 0.0: no cap.
`softmax_lse` is float32, natural log, with the sinks, [B, H, Sq] or [H, Tq]; +inf for rows without keys and for rows outside every range.
"""

import torch
from torch.autograd import forward_ad

from . import kernels, native, reference, tracing
from .kernels import DENSE

_library = torch.library.Library("hf_flash2", "DEF")

_SEQUENCES = "Tensor? seqlens_q, Tensor? seqlens_k, Tensor? key_mask, Tensor? rng_state, Tensor? sinks"
_NUMBERS = (
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, SymInt window_left, SymInt window_right, "
    "float dropout_p, float softcap, bool deterministic"
)
_library.define(
    f"flash_attn_forward(Tensor q, Tensor k, Tensor v, {_SEQUENCES}, {_NUMBERS}) -> (Tensor out, Tensor softmax_lse)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "flash_attn_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    f"{_SEQUENCES}, {_NUMBERS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    tags=torch.Tag.pt2_compliant_tag,
)

# How calls run, by all that this depends on: what functional.py checks, or what a layout is made from, for calls through the dispatcher.
# With it, v's head dim where functional.py has to pad that, else 0.
plans: dict[tuple, tuple["Plan", int]] = {}
UNKNOWN = (None, 0)
_MAX_PLANS = 1024  # where lengths change from batch to batch, there is no end of layouts

# The backend of the last forward of this process, for `last_backend()`: a kernel family, or a name.
_last_backend: int | str | None = None


def last_backend() -> str | None:
    """Which backend the last attention call of this process ran on: "cuda-sm80", "cuda-sm90", "cpu-reference"; "sdpa" where a model's layer
    was left to torch (the warning says why); None before any call."""
    return f"cuda-sm{_last_backend}" if isinstance(_last_backend, int) else _last_backend


def note_sdpa() -> None:
    """A call went to torch's scaled_dot_product_attention in place of the op."""
    global _last_backend
    _last_backend = "sdpa"


def note_reference() -> None:
    """A call ran on the CPU."""
    global _last_backend
    _last_backend = "cpu-reference"


def expected_backend(device: torch.device) -> str:
    """Which backend attention on this device will run on, in the words of `last_backend`. Raises where it cannot run, with the reason."""
    if device.type == "cpu":
        return "cpu-reference"
    if device.type != "cuda":
        raise ValueError(f"attention runs on cuda and cpu, got a tensor or model on {device}; use attn_implementation='sdpa' there")
    index = torch.cuda.current_device() if device.index is None else device.index
    return f"cuda-sm{native.forward_family(index, native.forced_family())}"


def out_shape(q: torch.Tensor, v: torch.Tensor) -> tuple[int, ...]:
    return *q.shape[:-1], v.shape[-1]


def lse_shape(q: torch.Tensor) -> tuple[int, ...]:
    *batch, tokens, heads, _ = q.shape
    return *batch, heads, tokens


def _forward_cuda(q, k, v, seqlens_q, seqlens_k, key_mask, rng_state, sinks, *numbers):
    q, k, v = map(kernels.readable, (q, k, v))
    plan = plan_of(q, k, v, seqlens_q, seqlens_k, key_mask, numbers)
    return plan.forward(q, k, v, (seqlens_q, seqlens_k, key_mask, rng_state, sinks))


def _backward_cuda(dout, dlse, q, k, v, out, softmax_lse, seqlens_q, seqlens_k, key_mask, rng_state, sinks, *numbers):
    q, k, v = map(kernels.readable, (q, k, v))
    tensors = (q, k, v, out.contiguous(), softmax_lse.contiguous())
    if key_mask is not None and key_mask.stride(-1) != 1:
        key_mask = key_mask.contiguous()
    seqlens_q, seqlens_k, rng_state, sinks = (x if x is None else x.contiguous() for x in (seqlens_q, seqlens_k, rng_state, sinks))
    plan = plan_of(q, k, v, seqlens_q, seqlens_k, key_mask, numbers)
    dq, dk, dv, dsinks = plan.backward(dout, dlse, *tensors, (seqlens_q, seqlens_k, key_mask, rng_state, sinks))
    return dq, dk, dv, _no_sinks(q) if dsinks is None else dsinks


def plan_of(q, k, v, seqlens_q, seqlens_k, key_mask, numbers: tuple, block_table=None) -> "Plan":
    """The plan of a call through the dispatcher, q, k and v readable. block_table: of a paged cache (kvcache.py)."""
    pages = None if block_table is None else form(block_table)
    key = (forms(q, k, v, seqlens_q, seqlens_k, key_mask), pages, numbers, native.forced_family())
    found, _ = plans.get(key, UNKNOWN)
    if found is None:
        found = Plan(kernels.Layout(q, k, v, seqlens_q, seqlens_k, key_mask, *numbers[:-1], block_table), numbers)
        keep(key, found)
    return found


def _forward_cpu(
    q, k, v, seqlens_q, seqlens_k, key_mask, rng_state, sinks,
    max_seqlen_q, max_seqlen_k, softmax_scale, window_left, window_right, dropout_p, softcap, deterministic,
):  # fmt: skip
    note_reference()
    return reference.attention_forward(
        q,
        k,
        v,
        seqlens_q,
        seqlens_k,
        key_mask,
        rng_state,
        sinks,
        softmax_scale,
        window_left,
        window_right,
        dropout_p,
        softcap,
    )


def _backward_cpu(
    dout, dlse, q, k, v, out, softmax_lse, seqlens_q, seqlens_k, key_mask, rng_state, sinks,
    max_seqlen_q, max_seqlen_k, softmax_scale, window_left, window_right, dropout_p, softcap, deterministic,
):  # fmt: skip
    dq, dk, dv, dsinks = reference.attention_backward(
        dout, dlse, q, k, v, out, softmax_lse, seqlens_q, seqlens_k, key_mask, rng_state, sinks,
        softmax_scale, window_left, window_right, dropout_p, softcap,
    )  # fmt: skip
    return dq, dk, dv, _no_sinks(q) if dsinks is None else dsinks


def _no_sinks(q: torch.Tensor) -> torch.Tensor:
    """What stands for dsinks where there are none: an op returns tensors."""
    return q.new_empty(0, dtype=torch.float32)


_library.impl("flash_attn_forward", _forward_cuda, "CUDA")
_library.impl("flash_attn_backward", _backward_cuda, "CUDA")
_library.impl("flash_attn_forward", _forward_cpu, "CPU")
_library.impl("flash_attn_backward", _backward_cpu, "CPU")


@torch.library.register_fake("hf_flash2::flash_attn_forward", lib=_library)
def _forward_fake(q, k, v, *_):
    return q.new_empty(out_shape(q, v)), q.new_empty(lse_shape(q), dtype=torch.float32)


@torch.library.register_fake("hf_flash2::flash_attn_backward", lib=_library)
def _backward_fake(dout, dlse, q, k, v, out, softmax_lse, seqlens_q, seqlens_k, key_mask, rng_state, sinks, *_):
    dsinks = _no_sinks(q) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


class Plan:
    """Attention on plain CUDA tensors of one layout with the same numbers, in eager mode: straight to the kernels.

    PERF: the dispatcher's two keys mean two more passes through Python; on the host of an H200 a call with autograd took 62 us that way.
    """

    __slots__ = ("_layout", "numbers")

    def __init__(self, layout: kernels.Layout, numbers: tuple):
        self._layout, self.numbers = layout, numbers

    def attention(self, q, k, v, sequences: kernels.Sequences):
        """out, differentiable; without sinks."""
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return _apply_planned(self, q, k, v, sequences)
        return self.forward(q, k, v, sequences)[0]

    def attention_with_lse(self, q, k, v, sequences: kernels.Sequences):
        """(out, softmax_lse), differentiable, also by sinks."""
        return _apply_with_lse(self, q, k, v, sequences[4], sequences) if torch.is_grad_enabled() else self.forward(q, k, v, sequences)

    def forward(self, q, k, v, sequences):
        try:
            out, softmax_lse, family = self._layout.forward(q, k, v, sequences)
        except native.MisalignedError:
            layout, q, k, v = self._layout.aligned(q, k, v, sequences)
            out, softmax_lse, family = layout.forward(q, k, v, sequences)
        global _last_backend
        _last_backend = family
        return out, softmax_lse

    def backward(self, dout, dlse, q, k, v, out, softmax_lse, sequences):
        """dq, dk, dv, dsinks (None where there are no sinks), below autograd."""
        layout, deterministic = self._layout, self.numbers[-1]
        try:
            return layout.backward(dout, dlse, q, k, v, out, softmax_lse, sequences, deterministic)[:4]
        except native.MisalignedError:
            layout, q, k, v = layout.aligned(q, k, v, sequences)
            return layout.backward(dout, dlse, q, k, v, out, softmax_lse, sequences, deterministic)[:4]

    def differentiate(self, dout, dlse, q, k, v, out, softmax_lse, sequences):
        """The same for autograd."""
        if (
            torch.is_grad_enabled()  # a second derivative is wanted, and refused if it comes to that
            or not plain(dout, q, k)
            or not self._layout.fits(q, k, v, out, softmax_lse, sequences)  # hooks of saved tensors may hand back what they like
        ):
            return backward(dout, dlse, q, k, v, out, softmax_lse, *sequences, *self.numbers)
        return self.backward(dout, dlse, q, k, v, out, softmax_lse, sequences)


def plan(q, k, v, seqlens_q, seqlens_k, key_mask, *numbers) -> Plan | None:
    """How calls on tensors like these run, arguments as of `forward`; None where the kernels would need copies of q, k or v."""
    if not all(map(kernels.is_readable, (q, k, v))):
        return None
    return Plan(kernels.Layout(q, k, v, seqlens_q, seqlens_k, key_mask, *numbers[:-1]), numbers)


def keep(key: tuple, plan: Plan, padded: int = 0) -> None:
    """Add to `plans`."""
    if len(plans) >= _MAX_PLANS:
        plans.clear()
    plans[key] = plan, padded


def forms(q, k, v, seqlens_q, seqlens_k, key_mask) -> tuple:
    """All about the tensors of a call but their values and addresses, to look it up by."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        None if seqlens_q is None else form(seqlens_q), None if seqlens_k is None else form(seqlens_k),
        None if key_mask is None else form(key_mask),
    )  # fmt: skip


def form(x: torch.Tensor) -> tuple:
    """Of one tensor."""
    return x.shape, x.stride(), x.dtype, x.device


def plain(q, k, v) -> bool:
    """Whether nothing but autograd, backward, wants to see operations on these tensors: no fake tensors, dispatch modes, vmap, subclasses,
    tangents of forward-mode differentiation."""
    return type(q) is type(k) is type(v) is torch.Tensor and not (_modes() or _transforms() or forward_ad._current_level >= 0)


def is_transformed() -> bool:
    """Whether this runs inside a transform of torch.func that an operation has to know of: grad, vmap, jvp, but not functionalize. Not
    while compiling, where nobody can ask."""
    innermost = None if tracing.is_compiling() else _transforms()
    return innermost is not None and innermost.key() != torch._C._functorch.TransformType.Functionalize


_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack


def _below_autograd(op):
    """`op` through the dispatcher's keys below autograd."""

    def run(*args):
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    return run


def refuse_jvp(ctx, *_):
    raise NotImplementedError("hf_flash2 attention has no forward-mode derivative; use attn_implementation='eager' where one is needed")


class _Attention(torch.autograd.Function):
    """forward and backward of a Plan as one differentiable function."""

    jvp = staticmethod(refuse_jvp)

    @staticmethod
    def forward(ctx, plan, q, k, v, sequences):  # few arguments: each costs time
        out, softmax_lse = plan.forward(q, k, v, sequences)
        if sequences is DENSE:
            ctx.save_for_backward(q, k, v, out, softmax_lse)
        else:
            ctx.save_for_backward(q, k, v, out, softmax_lse, *sequences)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, softmax_lse, *sequences = ctx.saved_tensors
        dq, dk, dv, _ = ctx.plan.differentiate(dout, None, q, k, v, out, softmax_lse, sequences or DENSE)
        return None, dq, dk, dv, None


class _AttentionWithLse(torch.autograd.Function):
    """The same, of a Plan or Dispatched, with softmax_lse for a second result, and with sinks, which are in `sequences`, too.

    PERF: autograd takes time for each result: one where nobody asks for two. Registered by hand under the Autograd key;
    torch.library.register_autograd costs 47 us a call on the host, this 13 (2-core EPYC).
    """

    generate_vmap_rule = True  # inside torch.func.vmap, of gradients of each sample for one: the dispatcher runs the op for each
    jvp = staticmethod(refuse_jvp)

    @staticmethod
    def forward(plan, q, k, v, sinks, sequences):
        return plan.forward(q, k, v, sequences)

    @staticmethod
    def setup_context(ctx, inputs, output):  # apart: torch.func.grad asks for it
        plan, q, k, v, _, sequences = inputs
        ctx.save_for_backward(q, k, v, *output, *sequences)
        ctx.plan = plan
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, softmax_lse, *sequences = ctx.saved_tensors
        if dout is None:
            if dlse is None:
                return None, None, None, None, None, None
            dout = torch.zeros_like(out)
        dq, dk, dv, dsinks = ctx.plan.differentiate(dout, dlse, q, k, v, out, softmax_lse, sequences)
        return None, dq, dk, dv, None if sequences[4] is None else dsinks, None


# PERF: what Function.apply calls in the end; its own checks, 3 us, are about functorch, which `plain` excludes.
_apply_planned = super(torch.autograd.Function, _Attention).apply
_apply_with_lse = super(torch.autograd.Function, _AttentionWithLse).apply


class Dispatched:
    """What a Plan is for, through the dispatcher's keys below autograd: for all that is not planned."""

    __slots__ = ("numbers",)

    def __init__(self, numbers: tuple):
        self.numbers = numbers

    def forward(self, q, k, v, sequences):
        return _DISPATCHED[0](q, k, v, *sequences, *self.numbers)

    def differentiate(self, dout, dlse, q, k, v, out, softmax_lse, sequences):
        run = backward if _records_gradient() else _DISPATCHED[1]
        if _transforms() is not None:
            run = _AttentionGradient.apply
        return run(dout, dlse, q, k, v, out, softmax_lse, *sequences, *self.numbers)


class _AttentionGradient(torch.autograd.Function):
    """backward, with a clear refusal to be differentiated once more."""

    generate_vmap_rule = True
    jvp = staticmethod(refuse_jvp)

    @staticmethod
    def forward(*args):
        return _DISPATCHED[1](*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(
            "hf_flash2 attention has no second derivative; use attn_implementation='eager' where gradients of gradients are needed"
        )


def _forward_autograd(*args):
    if not torch.is_grad_enabled() and forward_ad._current_level < 0:  # which torch.no_grad() does not end
        return _DISPATCHED[0](*args)
    if _transforms() is None:
        return _AttentionWithLse.apply(Dispatched(args[8:]), *args[:3], args[7], args[3:8])
    # While torch.func.grad is compiled: only the level that this key belongs to records, as for operators of torch.
    from torch._functorch.utils import enable_single_level_autograd_function

    with enable_single_level_autograd_function():
        return _apply_with_lse(Dispatched(args[8:]), *args[:3], args[7], args[3:8])


def _records_gradient() -> bool:
    """Whether derivatives of a gradient may be wanted, which backward refuses if it comes to that; torch.no_grad() ends no forward mode."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0


def _backward_autograd(*args):
    return _AttentionGradient.apply(*args) if _records_gradient() else _DISPATCHED[1](*args)


def forward_transformed(q, k, v, sequences, numbers):
    """`forward` inside torch.func.grad and its like, which take a differentiable function, but not the operation that runs one."""
    return _AttentionWithLse.apply(Dispatched(numbers), q, k, v, sequences[4], sequences)


_library.impl("flash_attn_forward", _forward_autograd, "Autograd")
_library.impl("flash_attn_backward", _backward_autograd, "Autograd")

forward = torch.ops.hf_flash2.flash_attn_forward.default
backward = torch.ops.hf_flash2.flash_attn_backward.default

_DISPATCHED = (_below_autograd(forward), _below_autograd(backward))

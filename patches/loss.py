"""The loss of a causal language model from its last hidden states, a chunk of tokens at a time: all logits never exist at once.

The logits are the largest tensor of a training step: [B, S, vocabulary], in the model's dtype, once more in float32, and their gradients.
Here the head runs on the rows that have a label only, chunk by chunk. For a plain linear head the gradients of a chunk are computed with
its loss, in the place of its logits; any other head (LoRA, quantised, hooked, sharded) runs once more in the backward.
"""

import functools
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions, ModelOutput

from .. import cross_entropy, ops
from ..notices import CALLS, notice
from .binding import by_name, upstream
from .contract import CACHES, logit_steps
from .packed import has_no_values, looks_at_rows, token_shape, wants_router_logits

Steps = tuple[tuple[str, torch.Tensor | float], ...]  # of contract.LogitStep, with the number that the model has now
IN_CHUNKS, FROM_LOGITS = "in chunks", "from logits"  # how a call with labels had its loss, in the report's counter
# Of logits that exist at a time: in their own dtype where our kernel puts the gradient in their place, in float32 where torch's functions
# hold them so too. Half as much would add each chunk's gradient of the head's weights to memory twice as often, for 128k classes and 2048
# columns 1 GB of traffic a time. Capped logits have their tanh beside them, so twice as much.
CHUNK_BYTES = 512 * 2**20
# A gradient of the head's weights in bf16 is rounded with every chunk that is added: to twice eager's error after 8 chunks, 3 to 4 times
# after 32. Of more than so many the sum is float32 until it is complete: 1.4 times, as each product is rounded, too. That takes 8 bytes
# of traffic a weight and chunk more, and 4 of memory.
FEW_CHUNKS = 8
TILE_ROWS = 128  # of a matrix product, for which a tile with fewer rows is as much work
_ATTRIBUTES = ("training", "_active_adapter", "_disable_adapters")  # of a head: the last two are PEFT's


def causal_lm_forward(model: PreTrainedModel, *args, **kwargs) -> ModelOutput | tuple:
    """The forward of a causal language model, without logits where only the loss is needed: in training with labels, outside torch.func."""
    inputs = by_name(model, args, kwargs)
    labels, shift_labels = inputs.get("labels"), inputs.get("shift_labels")
    only_the_loss = (
        model.training and labels is not None and labels.shape == token_shape(inputs) and not inputs.get("output_attentions")
        and (shift_labels is None or shift_labels.shape == labels.shape)
        and inputs.get("return_dict") is not False and inputs.get("encoder_hidden_states") is None
        and isinstance(inputs.get("logits_to_keep", 0), int) and not inputs.get("logits_to_keep")
        and model.loss_function is ForCausalLMLoss and not looks_at_rows(model.get_output_embeddings()) and not ops.is_transformed()
        and not wants_router_logits(model, inputs) and not has_no_values(labels)
    )  # fmt: skip
    if labels is not None:
        _count(model, IN_CHUNKS if only_the_loss else FROM_LOGITS)
    if not only_the_loss:
        return upstream(model, **inputs)
    about_loss = {name: inputs.get(name) for name in ("labels", "shift_labels", "ignore_index", "logits_to_keep", "return_dict")}
    # A new dict: of one that is changed before a graph break Dynamo guards no names, and takes the next batch for one with the same.
    inputs = {name: x for name, x in inputs.items() if name not in about_loss}
    rows, row_labels = labelled_rows(
        labels, inputs.get("attention_mask"), about_loss["shift_labels"], about_loss["ignore_index"],
        counted=inputs.get("num_items_in_batch") is not None,
    )  # fmt: skip
    output = model.base_model(**inputs, return_dict=True)
    loss = chunked_cross_entropy(
        output.last_hidden_state, rows, row_labels, model.get_output_embeddings(), model.config.get_text_config().vocab_size,
        inputs.get("num_items_in_batch"), _steps_of(model),
    )  # fmt: skip
    caches = {name: output.get(name) for name in CACHES if name in CausalLMOutputWithCrossAttentions.__dataclass_fields__}
    result = CausalLMOutputWithCrossAttentions(loss=loss, hidden_states=output.get("hidden_states"), **caches)
    for name in output.keys() - result.__dataclass_fields__.keys() - {"last_hidden_state"}:  # of images: Llava's image_outputs
        setattr(result, name, output[name])
    return result


@torch.compiler.disable  # a graph would count once
def _count(model: PreTrainedModel, route: str) -> None:
    vars(model)[CALLS][route] += 1


@torch.compiler.disable  # the number of labels is a shape, and only the host knows what to do with it
def labelled_rows(
    labels: torch.Tensor,
    attention_mask: torch.Tensor | None,
    shift_labels: torch.Tensor | None = None,
    ignore_index: int | None = None,
    counted: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens of a batch predict a label, and the labels.

    Args:
        labels: int64 [B, S], as Transformers takes them: token i is judged by labels[i + 1]. shift_labels: the same moved already.
        attention_mask: [B, S]; what padding predicts is left out.
        ignore_index: stands for no label; default -100.
        counted: the caller divides by a number of labels of its own; it is told once if that is likely to be another.
    Returns:
        int64 [N] into the flattened batch, and int64 [N]. Synchronises with the host.
    """
    ignore_index = -100 if ignore_index is None else ignore_index
    if shift_labels is None:
        shift_labels = F.pad(labels[:, 1:], (0, 1), value=ignore_index)
    given = labelled = (shift_labels != ignore_index).flatten()
    if isinstance(attention_mask, torch.Tensor) and attention_mask.shape == labels.shape:
        labelled = given & (attention_mask.flatten().to(given.device) != 0)
    rows = labelled.nonzero().flatten()
    if counted and labelled is not given and rows.shape[0] != int(given.sum()):
        notice(
            "hf_flash2: labels stand where padding would have to predict them; the packed loss leaves them out, and num_items_in_batch, "
            "which it is divided by, may count them: the loss is smaller then. Set such labels to -100"
        )
    return rows, shift_labels.flatten()[rows]


@torch.compiler.disable  # a chunk more or less would be another graph
def chunked_cross_entropy(
    hidden_states: torch.Tensor,
    rows: torch.Tensor,
    labels: torch.Tensor,
    head: nn.Module,
    vocabulary: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    steps: Steps = (),
) -> torch.Tensor:
    """The cross-entropy of head(hidden_states), in float32, over some rows, differentiable in the hidden states and the head's parameters.

    Args:
        hidden_states: [B, S, hidden]; rows: int64 [N] into its B * S; labels: int64 [N], every one a class.
        head: from hidden states to logits [..., vocabulary].
        num_items_in_batch: what the sum is divided by, as Transformers' losses take it; None = N.
        steps: what the model makes of the logits before.
    Returns:
        a float32 scalar; NaN when N is 0 and nothing else is given to divide by, as the mean of no rows is.
    """
    hidden_states = hidden_states.flatten(0, 1).index_select(0, rows.to(hidden_states.device))
    labels = labels.to(hidden_states.device)
    scale_and_cap = _scale_and_cap(steps)
    if scale_and_cap is not None and is_plain_linear(head, hidden_states):
        total = _sum_of_linear(hidden_states, labels, head.weight, vocabulary, *scale_and_cap)
    elif _gathers_itself(head):
        total = _sum_in_one_call(hidden_states, labels, head, vocabulary, steps)
    else:
        # Of a head in which something gathers its part, all at once: processes have to call it as often as each other.
        chunk_rows = max(1, labels.shape[0]) if any(map(_is_sharded, head.modules())) else _chunk_rows(vocabulary * 4)
        total = _sum_of_chunks(hidden_states, labels, _as_it_is_now(head), chunk_rows, steps)
    if num_items_in_batch is None:
        num_items_in_batch = labels.shape[0]
    elif isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


def _sum_of_linear(
    hidden_states: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor, vocabulary: int, scale: float, cap: float | None
) -> torch.Tensor:
    dtype = _product_dtype(hidden_states)
    fused = cross_entropy.can_fuse(hidden_states.device, dtype)
    row_bytes = vocabulary * (dtype.itemsize if fused else 4)
    if cap is None and scale != 1.0:  # into the hidden states, which are fewer
        hidden_states = hidden_states * scale
    return _LinearCrossEntropy.apply(hidden_states, weight, labels, _chunk_rows(row_bytes), scale, cap)


def _sum_of_chunks(hidden_states: torch.Tensor, labels: torch.Tensor, head: Callable, chunk_rows: int, steps: Steps) -> torch.Tensor:
    chunks = zip(hidden_states.split(chunk_rows), labels.split(chunk_rows), strict=True)
    return torch.stack([checkpoint(_cross_entropy_sum, *chunk, head, steps, use_reentrant=False) for chunk in chunks]).sum()


@torch.compiler.disable  # it reads the source of a class, which Dynamo would trace, past the cache
def _steps_of(model: PreTrainedModel) -> Steps:
    """What its forward makes of logits: of each step what is done, and by which number the model has now."""
    found = []
    for step in _known_steps(type(model)):
        number = 1.0 if step.number is None else _value(model, step.number)
        if number is not None:
            found.append((step.op, number))
    return tuple(found)


_known_steps = functools.cache(logit_steps)


def _value(model: PreTrainedModel, expression: str) -> torch.Tensor | float | None:
    """Of self.config.logits_scaling."""
    value = model
    for name in expression.split(".")[1:]:
        if name == "get_text_config()":
            value = value.get_text_config()
        else:
            value = getattr(value, name[:-1], None) if name.endswith("?") else getattr(value, name)
    return value


def _scale_and_cap(steps: Steps) -> tuple[float, float | None] | None:
    """The steps as scale * logits, or as cap * tanh(scale * logits); None where they are something else, or have a parameter in them."""
    factors, caps = [1.0], 0
    for op, number in steps:
        if isinstance(number, torch.Tensor):
            return None
        if op == "tanh":
            factors.append(1.0)
            caps += 1
        else:
            factors[-1] = factors[-1] / number if op == "/" else factors[-1] * number
    return None if caps > 1 else (factors[0], factors[1] if caps else None)


def _finish(logits: torch.Tensor, steps: Steps) -> torch.Tensor:
    """As the model's own forward does, in the same dtype."""
    for op, number in steps:
        logits = torch.tanh(logits) if op == "tanh" else logits / number if op == "/" else logits * number
    return logits


def _as_it_is_now(head: nn.Module) -> Callable:
    """The head with the adapters of PEFT, the mode and the tensors that it has now: it runs once more in the backward, when others may be
    active, or off, and when torch.func.functional_call has given the module its own parameters back."""
    then = _state(head)

    def forward(x: torch.Tensor) -> torch.Tensor:
        now = _state(head)
        trained = [(parameter, parameter.requires_grad) for parameter, _ in then[-1]]  # which need not be those that it has now
        _set_state(*then)
        try:
            return head(x)
        finally:
            _set_state(*now[:-1], trained)

    return forward


def _state(head: nn.Module) -> tuple[list[tuple[dict, dict]], list[tuple[dict, dict]], list[tuple[nn.Parameter, bool]]]:
    """What may be another later: attributes of the modules, their parameters and buffers, except where something that gathers parameters
    puts others in their place by itself, and which parameters are trained, as whoever activates an adapter changes that, too."""
    modules = list(head.modules())
    attributes = [(vars(module), {name: vars(module)[name] for name in _ATTRIBUTES if name in vars(module)}) for module in modules]
    own = () if any(map(_is_sharded, modules)) else (tensors for module in modules for tensors in (module._parameters, module._buffers))
    trained = [(parameter, parameter.requires_grad) for parameter in head.parameters()]
    return attributes, [(tensors, dict(tensors)) for tensors in own], trained


def _set_state(attributes: list[tuple[dict, dict]], tensors: list[tuple[dict, dict]], trained: list[tuple[nn.Parameter, bool]]) -> None:
    for of_module, values in attributes:
        of_module.update(values)
    for of_module, values in tensors:
        of_module.clear()
        of_module.update(values)
    for parameter, is_trained in trained:
        if parameter.requires_grad != is_trained:
            parameter.requires_grad_(is_trained)


def _sum_in_one_call(hidden_states: torch.Tensor, labels: torch.Tensor, head: nn.Module, vocabulary: int, steps: Steps) -> torch.Tensor:
    """All chunks inside one call of a head whose hooks, those of FSDP or DeepSpeed, gather its weights: each process has another number of
    chunks, and calls have to be as many everywhere."""
    totals = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        scale_and_cap = _scale_and_cap(steps)
        plain = head.bias is None and type(head.weight) is nn.Parameter and _gives_its_gradient(x, head.weight)
        if plain and scale_and_cap is not None:
            total = _sum_of_linear(x, labels, head.weight, vocabulary, *scale_and_cap)
        else:
            total = _sum_of_chunks(x, labels, partial(nn.Linear.forward, head), _chunk_rows(vocabulary * 4), steps)
        totals.append(total)
        return total

    head.forward = forward
    try:
        output = head(hidden_states)
    finally:
        del head.forward
    # What FSDP returns may be rounded, as logits are; to what DeepSpeed returns hangs what gathers weights in the backward.
    return output if _is_of_zero3(head) else totals[0]


def _is_sharded(module: nn.Module) -> bool:
    """Whether each call of the module gathers its weights from other processes."""
    if _is_of_zero3(module):
        return True
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return isinstance(module, (FSDPModule, FullyShardedDataParallel))


def _is_of_zero3(module: nn.Module) -> bool:
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters(recurse=False))


def _gathers_itself(head: nn.Module) -> bool:
    """Whether the head is a linear layer that fully_shard has made a unit of its own, or of a model under DeepSpeed's ZeRO-3, with no hooks
    but theirs."""
    # FSDP gathers before a call and frees behind it; DeepSpeed does so too, and hangs what does it in the backward to input and output.
    hooks = [len(x) for x in (head._forward_pre_hooks, head._forward_hooks, head._backward_hooks, head._backward_pre_hooks)]
    is_linear = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and "forward" not in head.__dict__
    return is_linear and hooks == ([2, 2, 0, 0] if _is_of_zero3(head) else [1, 1, 0, 0]) and _is_sharded(head)


def _chunk_rows(row_bytes: int) -> int:
    """How many rows of this size a chunk has: whole tiles of the products where it holds one, at least one row."""
    rows = CHUNK_BYTES // row_bytes
    return max(1, rows if rows < TILE_ROWS else rows - rows % TILE_ROWS)


def is_plain_linear(head: nn.Module, hidden_states: torch.Tensor) -> bool:
    """Whether head(x) is a product with head.weight and nothing else, in training, and in a dtype whose gradients need no loss scaling."""
    if type(head) is not nn.Linear:
        return False
    every = nn.modules.module
    hooks = (
        head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks,
        every._global_forward_hooks, every._global_forward_pre_hooks, every._global_backward_hooks, every._global_backward_pre_hooks,
    )  # fmt: skip
    return (
        head.bias is None
        and "forward" not in head.__dict__  # as accelerate's hooks put it
        and not any(hooks)
        and type(head.weight) in (nn.Parameter, torch.Tensor)
        and _gives_its_gradient(hidden_states, head.weight)
    )


def _gives_its_gradient(hidden_states: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether gradients can be computed along with the loss."""
    return (
        weight.device == hidden_states.device
        and torch.is_grad_enabled()
        and (weight.requires_grad or hidden_states.requires_grad)
        and torch.float16 not in (weight.dtype, _product_dtype(hidden_states))
        and (torch.is_autocast_enabled(hidden_states.device.type) or weight.dtype == hidden_states.dtype)
    )


def _product_dtype(x: torch.Tensor) -> torch.dtype:
    """In which a linear layer computes on x."""
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum of the cross-entropy of hidden_states weight^T, with its gradients computed along with it. With a cap, of the logits
    z = cap * tanh(scale * hidden_states weight^T).

    d loss / d logits = softmax(logits) - one_hot(labels), and before the cap cap * scale * (1 - tanh^2) times that.
    """

    @staticmethod
    def forward(ctx, hidden_states, weight, labels, chunk_rows, scale, cap):
        dtype, grad_hidden, grad_weight = _product_dtype(hidden_states), None, None
        if ctx.needs_input_grad[0]:
            grad_hidden = torch.zeros_like(hidden_states)
        if ctx.needs_input_grad[1]:
            few = labels.shape[0] <= FEW_CHUNKS * chunk_rows
            grad_weight = torch.zeros_like(weight, dtype=weight.dtype if few else torch.promote_types(weight.dtype, torch.float32))
        loss = torch.zeros((), dtype=torch.float32, device=hidden_states.device)
        with torch.autocast(hidden_states.device.type, enabled=False):
            columns = weight.to(dtype)
            for begin in range(0, labels.shape[0], chunk_rows):
                rows = slice(begin, begin + chunk_rows)
                x = hidden_states[rows].to(dtype)
                logits = x @ columns.t()
                if cap is not None:  # PERF: in the logits' dtype, as models do it
                    bounded = logits.mul_(scale).tanh_()
                    logits = bounded * cap
                loss += cross_entropy.cross_entropy_(logits, labels[rows]).sum()
                if cap is not None:
                    logits.addcmul_(logits, bounded.square_(), value=-1.0).mul_(scale * cap)
                    del bounded
                if grad_hidden is not None:
                    _add_product(grad_hidden[rows], logits, columns)
                if grad_weight is not None:
                    _add_product(grad_weight, logits.t(), x)
                del logits  # or they would live beside the next ones
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        # Not as attributes: autograd gives these back once they have been used, however long the loss is kept.
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.labels = labels.shape[0]
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        gradients = ctx.saved_tensors
        if ctx.labels > 0:  # else they are zero, and the mean of nothing would make NaN of them, as eager's does not
            # PERF: one pass in float32 arithmetic; a scalar tensor would be rounded to the gradients' dtype first.
            with torch.no_grad():
                factor = grad_loss.reshape(1, 1)
                gradients = [None if x is None else torch.mul(x, factor, out=torch.empty_like(x)) for x in gradients]
        if torch.is_grad_enabled():  # create_graph=True. NOTE: once_differentiable sees no need of an error where grad_loss is a constant
            one = torch.ones((), requires_grad=True)
            gradients = [None if x is None else _OnceDifferentiable.apply(x, one) for x in gradients]
        return *gradients, None, None, None, None


class _OnceDifferentiable(torch.autograd.Function):
    """x, whose derivative is refused."""

    @staticmethod
    def forward(ctx, x, one):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError(
            "the packed loss has no second derivative; unpatch the model and use attn_implementation='eager' where it is needed"
        )


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a b, where the dtypes agree before rounding."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def _cross_entropy_sum(hidden_states: torch.Tensor, labels: torch.Tensor, head: Callable, steps: Steps) -> torch.Tensor:
    logits = _finish(head(hidden_states), steps)
    return F.cross_entropy(logits.float(), labels.to(logits.device), reduction="sum")

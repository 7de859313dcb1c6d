"""The loss of a causal language model from its last hidden states, a chunk of tokens at a time: all logits never exist at once.

The logits are the largest tensor of a training step: [B, S, vocabulary], in the model's dtype, once more in float32, and their gradients.
Here the head runs on the rows that have a label only, chunk by chunk, and again in the backward: one more product with the head's weights
for a peak of one chunk.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions, ModelOutput

from .binding import by_name, upstream
from .packed import token_shape

CHUNK_BYTES = 256 * 2**20  # of float32 logits that exist at a time; a chunk has at least one row


def causal_lm_forward(model: PreTrainedModel, *args, **kwargs) -> ModelOutput | tuple:
    """The forward of a causal language model, without logits where only the loss is needed: in training, with labels."""
    inputs = by_name(model, args, kwargs)
    labels = inputs.get("labels")
    only_the_loss = (
        model.training and labels is not None and labels.shape == token_shape(inputs) and not inputs.get("output_attentions")
        and inputs.get("return_dict") is not False and inputs.get("encoder_hidden_states") is None
        and isinstance(inputs.get("logits_to_keep", 0), int) and not inputs.get("logits_to_keep")
        and model.loss_function is ForCausalLMLoss
    )  # fmt: skip
    if not only_the_loss:
        return upstream(model, **inputs)
    about_loss = {name: inputs.pop(name, None) for name in ("labels", "shift_labels", "ignore_index", "logits_to_keep", "return_dict")}
    rows, row_labels = labelled_rows(labels, inputs.get("attention_mask"), about_loss["shift_labels"], about_loss["ignore_index"])
    output = model.base_model(**inputs, return_dict=True)
    loss = chunked_cross_entropy(
        output.last_hidden_state, rows, row_labels, model.get_output_embeddings(), model.config.vocab_size, inputs.get("num_items_in_batch")
    )
    return CausalLMOutputWithCrossAttentions(
        loss=loss, past_key_values=output.get("past_key_values"), hidden_states=output.get("hidden_states")
    )


@torch.compiler.disable  # the number of labels is a shape, and only the host knows what to do with it
def labelled_rows(
    labels: torch.Tensor, attention_mask: torch.Tensor | None, shift_labels: torch.Tensor | None = None, ignore_index: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens of a batch predict a label, and the labels.

    Args:
        labels: int64 [B, S], as Transformers takes them: token i is judged by labels[i + 1]. shift_labels: the same moved already.
        attention_mask: [B, S]; what padding predicts is not counted.
        ignore_index: stands for no label; default -100.
    Returns:
        int64 [N] into the flattened batch, and int64 [N]. Synchronises with the host.
    """
    ignore_index = -100 if ignore_index is None else ignore_index
    if shift_labels is None:
        shift_labels = F.pad(labels[:, 1:], (0, 1), value=ignore_index)
    counted = shift_labels != ignore_index
    if isinstance(attention_mask, torch.Tensor) and attention_mask.shape == labels.shape:
        counted = counted & attention_mask.bool().to(counted.device)
    rows = counted.flatten().nonzero().flatten()
    return rows, shift_labels.flatten()[rows]


@torch.compiler.disable  # a chunk more or less would be another graph
def chunked_cross_entropy(
    hidden_states: torch.Tensor,
    rows: torch.Tensor,
    labels: torch.Tensor,
    head: nn.Module,
    vocabulary: int,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """The cross-entropy of head(hidden_states), in float32, over some rows, differentiable in the hidden states and the head's parameters.

    Args:
        hidden_states: [B, S, hidden]; rows: int64 [N] into its B * S; labels: int64 [N], every one a class.
        head: from hidden states to logits [..., vocabulary]; called as a module, so that LoRA, quantised and hooked heads work.
        num_items_in_batch: what the sum is divided by, as Transformers' losses take it; None = N.
    Returns:
        a float32 scalar; NaN when N is 0 and nothing else is given to divide by, as the mean of no rows is.
    """
    hidden_states = hidden_states.flatten(0, 1).index_select(0, rows.to(hidden_states.device))
    chunk_rows = max(1, CHUNK_BYTES // (4 * vocabulary))
    sums = [
        checkpoint(_cross_entropy_sum, chunk, chunk_labels.to(chunk.device), head, use_reentrant=False)
        for chunk, chunk_labels in zip(hidden_states.split(chunk_rows), labels.split(chunk_rows), strict=True)
    ]
    if num_items_in_batch is None:
        num_items_in_batch = labels.shape[0]
    elif isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(sums[0].device)
    return torch.stack(sums).sum() / num_items_in_batch


def _cross_entropy_sum(hidden_states: torch.Tensor, labels: torch.Tensor, head: nn.Module) -> torch.Tensor:
    logits = head(hidden_states)
    return F.cross_entropy(logits.float(), labels.to(logits.device), reduction="sum")

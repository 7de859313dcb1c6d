"""`patch(model, packed=True)`: a padded batch comes in, the whole decoder runs on its real tokens, a padded batch goes out.

The forward of the base model (LlamaModel, GPT2Model, ...) gathers the real tokens of [B, S] into one row [1, T] and scatters the hidden
states back, so that everything above it sees a padded run. In training with labels the loss then comes without logits (see `loss`).

What has to be right for the result to be that of the padded run:
* positions are those of the padded run, not restarted: GPT-2's learned positions depend on the padding to the left of them; of several axes
  (Qwen-VL's) all;
* blocks of tokens that see all of themselves, as the images of Gemma 3, go with their tokens: the model above hands on masks that say where
  they are, in place of its own, one for each kind of layer, perhaps;
* the sequences travel in keyword arguments (cu_seq_lens_*, max_length_*), which a checkpointed layer still has when it runs again in the
  backward;
* a window counts padding between the tokens of a row, so such a row runs padded (the kernels read its mask);
* a cache could not be continued from packed keys, so a call that wants one runs padded;
* a part of each sequence, under context parallelism, is not all that attention sees, so it runs padded, too;
* another attention than ours, which the model may have been switched to since, need not know what cu_seq_lens are;
* an adapter that has something for each row of a batch has to see these rows, as has a hook of the embedding;
* inside torch.func.vmap nobody may ask how many real tokens there are, so all its transforms run padded.
"""

import functools
import inspect
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .. import context_parallel, ops, packing
from ..interface import hf_flash2_attention
from ..masks import ATTRIBUTE, Sequences, mask_of_blocks
from ..notices import CALLS, NAME
from ..shareable import rope_parameters, rotates_by_length
from .binding import by_name, upstream
from .contract import CACHES

PACKED = "packed"  # the route, in the report's counter, of a forward that ran packed; the other routes are reasons
_PER_TOKEN = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids", "visual_pos_masks", "per_layer_inputs")
_KNOWN = {*_PER_TOKEN, "attention_mask", "cache_position", "deepstack_visual_embeds"}


@dataclass(frozen=True)
class Packing:
    """The real tokens of a padded batch [batch, seqlen]."""

    indices: torch.Tensor  # int64 [T], of each token in the flattened batch
    cu_seqlens: torch.Tensor  # int32 [batch + 1]
    max_seqlen: int
    batch: int
    seqlen: int

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seqlen, ...] -> [1, T, ...]"""
        return x.flatten(0, 1).index_select(0, self.indices.to(x.device)).unsqueeze(0)

    def pack_masks(
        self, given: torch.Tensor | dict[str, torch.Tensor | None] | None
    ) -> torch.Tensor | dict[str, torch.Tensor | None] | None:
        """Masks of packed tokens; None where their bounds say all."""
        if isinstance(given, dict):
            return {kind: self.pack_masks(mask) for kind, mask in given.items()}
        block_ids = getattr(getattr(given, ATTRIBUTE, None), "block_ids", None)
        if block_ids is None:
            return None
        row = self.indices // self.seqlen
        starts = F.pad(row[1:] != row[:-1], (1, 0), value=True).unsqueeze(0)
        sequences = Sequences(torch.ones_like(starts), 0, starts, causal=True, block_ids=self.pack(block_ids))
        return mask_of_blocks(sequences)

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """[1, T, ...] -> [batch, seqlen, ...], zero in the padding"""
        return packing.pad_input(x.squeeze(0), self.indices.to(x.device), self.batch, self.seqlen)


def base_forward(module: PreTrainedModel, *args, **kwargs) -> ModelOutput | tuple:
    """The forward of a patched base model: upstream's, on packed tokens where the batch has padding to leave out."""
    inputs = by_name(module, args, kwargs)
    mask = inputs.get("attention_mask")
    if mask is None or (isinstance(mask, dict) and all(of_kind is None for of_kind in mask.values())):
        return upstream(module, **inputs)
    packed = pack_inputs(module, inputs)
    if packed is None:
        return upstream(module, **inputs)
    inputs, layout = packed
    return_dict = inputs.pop("return_dict", None)
    output = upstream(module, **inputs, return_dict=True)
    output.last_hidden_state = layout.pad(output.last_hidden_state)
    if output.get("hidden_states") is not None:
        # Gemma 3n has several of each layer, [n, B, S, hidden].
        output.hidden_states = tuple(
            layout.pad(x) if x.dim() == 3 else torch.stack([layout.pad(part) for part in x]) for x in output.hidden_states
        )
    return output if (module.config.return_dict if return_dict is None else return_dict) else output.to_tuple()


@torch.compiler.disable  # the number of real tokens is a shape, and only the host knows what to do with it
def pack_inputs(module: PreTrainedModel, inputs: dict) -> tuple[dict, Packing] | None:
    """The inputs of a base model on packed tokens, and how to get back; None when this call runs padded. Counts which, and why.

    Args:
        inputs: keyword arguments of the base model's forward, with an attention_mask.
    Synchronises with the host.
    """
    given = inputs["attention_mask"]
    real = _real_tokens(given)
    reason = _reason_to_stay_padded(module, inputs, real)
    layout = _layout(module, real) if reason is None else reason
    if isinstance(layout, Packing) and _sees_padding(inputs, real):
        layout = "with images in the padding"
    vars(module)[CALLS][layout if isinstance(layout, str) else PACKED] += 1
    if isinstance(layout, str):
        return None
    if _embeds_padded(module, inputs):
        inputs = {**inputs, "input_ids": None, "inputs_embeds": module.get_input_embeddings()(inputs["input_ids"])}
    device = _tokens(inputs).device
    if inputs.get("position_ids") is None:
        inputs = {**inputs, "position_ids": torch.arange(layout.seqlen, device=device).unsqueeze(0)}
    packed = {name: _pack(layout, name, x) if name in _PER_TOKEN and x is not None else x for name, x in inputs.items()}
    packed.pop("cache_position", None)
    cu_seqlens = layout.cu_seqlens.to(device)
    packed |= {
        "attention_mask": layout.pack_masks(given),
        "use_cache": False, "cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens,
        "max_length_q": layout.max_seqlen, "max_length_k": layout.max_seqlen,
    }  # fmt: skip
    return packed, layout


def _pack(layout: Packing, name: str, x: torch.Tensor) -> torch.Tensor:
    if name == "position_ids" and x.dim() == 3:
        return torch.stack([_pack(layout, name, axis) for axis in x])
    return layout.pack(x.expand(layout.batch, *x.shape[1:]))


def _real_tokens(given: torch.Tensor | dict[str, torch.Tensor | None]) -> torch.Tensor | None:
    """[B, S], non-zero = real, of the mask of a call, or of those that a model above has had made of it, one for each kind of layer; None
    where they say something else than which tokens are real, and which are blocks."""
    masks = [mask for mask in (given.values() if isinstance(given, dict) else [given]) if mask is not None]
    if isinstance(given, torch.Tensor) and given.dim() == 2:
        return given
    known = [getattr(mask, ATTRIBUTE, None) for mask in masks]
    if not all(isinstance(of, Sequences) and of.causal and of.starts is None and of.q_offset in (None, 0) for of in known):
        return None
    real = known[0].key_mask
    return real if all(has_no_values(of.key_mask) or torch.equal(of.key_mask, real) for of in known[1:]) else None


def _reason_to_stay_padded(module: PreTrainedModel, inputs: dict, mask: torch.Tensor | None) -> str | None:
    """Why this call cannot or need not be packed, as the report counts it; None when the mask, of its real tokens, decides."""
    shape, use_cache = token_shape(inputs), inputs.get("use_cache")
    if use_cache is None:  # in training nobody looks at it
        use_cache = not module.training and getattr(module.config, "use_cache", True)
    if use_cache or any(inputs.get(name) is not None for name in CACHES):
        return "with a cache"
    if not isinstance(mask, torch.Tensor) or mask.shape != shape:
        return "with a mask that is not [B, S]"
    if has_no_values(mask):
        return "with a mask that has no values"
    if module.config._attn_implementation != NAME or ALL_ATTENTION_FUNCTIONS[NAME] is not hf_flash2_attention:
        return "with another attention"
    if ops.is_transformed():
        return "inside torch.func"
    if context_parallel.active() is not None:
        return "with parts of sequences that processes share"
    if inputs.get("encoder_hidden_states") is not None:
        return "with cross-attention"
    if looks_at_rows(module):
        return "with an adapter that looks at the rows of a batch"
    if inputs.get("cu_seq_lens_q") is not None:
        return "with documents"
    if wants_router_logits(module, inputs):
        return "with router logits"  # their loss weighs tokens by the padded mask
    if _embeds_padded(module, inputs) and getattr(module, "embed_tokens_per_layer", None) is not None:
        return "with a hook on its embedding, beside which it looks tokens up again"  # Gemma 3n and 4
    positions = inputs.get("position_ids")
    if positions is not None and not _are_positions(module, positions, shape):
        return "with positions that are not [B, S]"
    for name, x in inputs.items():
        tensors = [part for part in (x if isinstance(x, (list, tuple)) else (x,)) if isinstance(part, torch.Tensor) and part.dim() > 0]
        of_tokens = any(part.shape[:2] == shape for part in tensors)
        if name not in _KNOWN and tensors and (of_tokens or name in _own_arguments(type(module))):  # else it may be of rows
            return f"with {name}"
    return None


@functools.cache
def _own_arguments(module_class: type) -> frozenset[str]:
    """What its forward has names for; others that it is handed go on to layers that have no use for them."""
    return frozenset(inspect.signature(module_class.forward).parameters)


def _are_positions(module: PreTrainedModel, x: torch.Tensor, shape: torch.Size) -> bool:
    """[B, S] or [1, S], and where tokens have positions on several axes, before these one more."""
    axes = x.dim() - 2
    return axes in ((0, 1) if "mrope_section" in rope_parameters(module.config) else (0,)) and x.shape[axes + 1] == shape[1]


def _sees_padding(inputs: dict, real: torch.Tensor) -> bool:
    """Whether a token of an image is left out, whose features the layers of Qwen3-VL are given apart, one for each."""
    visual = inputs.get("visual_pos_masks")
    return visual is not None and bool((visual & ~real.bool().to(visual.device)).any())


def _layout(module: PreTrainedModel, mask: torch.Tensor) -> Packing | str:
    """The packing of a 2-D mask, or why there is none."""
    if mask.numel() == 0:
        return "without a token"
    batch, seqlen = mask.shape
    mask = mask.bool()
    lengths = mask.sum(1, dtype=torch.int32)
    first, end = packing.real_spans(mask)
    tokens, longest, holes, last = torch.stack((lengths.sum(), lengths.max(), (end - first > lengths).any(), mask[:, -1].any())).tolist()
    if tokens == mask.numel():
        return "without padding"
    if tokens == 0:
        return "without a token"
    window = getattr(module.config, "sliding_window", None)
    if holes and window is not None and window < seqlen:
        return "with padding inside a row, under a sliding window"
    if not last and rotates_by_length(module.config):
        return "with columns of padding at the end, where positions are rotated by their number"
    return Packing(*packing.token_indices(mask, lengths), longest, batch, seqlen)


def has_no_values(x: torch.Tensor) -> bool:
    """Whether nothing can be made of what is in it, as on the meta device and in torch.export. Of what Dynamo traces, it is not asked."""
    return not torch.compiler.is_dynamo_compiling() and (x.is_meta or isinstance(x, FakeTensor))


def wants_router_logits(model: PreTrainedModel, inputs: dict) -> bool:
    asked = inputs.get("output_router_logits")
    configs = (model.config, model.config.get_text_config())
    return any(getattr(config, "output_router_logits", False) for config in configs) if asked is None else bool(asked)


def _embeds_padded(module: PreTrainedModel, inputs: dict) -> bool:
    """Whether a hook may change what its embedding returns by the length of a row, as NEFTune's noise does. That of gradient checkpointing
    does not."""
    if inputs.get("inputs_embeds") is not None:  # of a model that may have no embeddings
        return False
    hooks = module.get_input_embeddings()._forward_hooks.values()
    return not all(_only_asks_for_gradients(hook) for hook in hooks)


def _only_asks_for_gradients(hook: object) -> bool:
    """Transformers' and PEFT's hook, which sets requires_grad of the embedding's output."""
    library = str(getattr(hook, "__module__", "")).partition(".")[0]
    return library in ("transformers", "peft") and getattr(hook, "__name__", "").startswith("make_inputs_require_grad")


def looks_at_rows(module: nn.Module) -> bool:
    """Whether there is a hook of PEFT's: most are there for one forward and have something for each row, adapter_names, the offsets of
    aLoRA, the task_ids of Poly."""
    parts = [module]
    while parts:  # PERF: as modules(), which takes 2.4 ms of every forward of 32 layers with LoRA, this 1.2
        part = parts.pop()
        for hook in part._forward_pre_hooks.values():
            if str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("peft."):  # func: of a partial
                return True
        parts.extend(child for child in part._modules.values() if child is not None)
    return False


def token_shape(inputs: dict) -> torch.Size | None:
    """[B, S] of the inputs of a model's forward; None where there are none, which upstream's forward says."""
    tokens = _tokens(inputs)
    return None if tokens is None else tokens.shape[:2]


def _tokens(inputs: dict) -> torch.Tensor | None:
    """What the batch is: input_ids [B, S] or inputs_embeds [B, S, hidden]."""
    return inputs.get("inputs_embeds") if inputs.get("input_ids") is None else inputs["input_ids"]

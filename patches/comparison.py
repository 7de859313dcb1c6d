"""Is the difference normal? `verify` runs a model with eager attention and with hf_flash2 and measures both against higher precision."""

import copy
import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from .. import packing
from .contract import gives_keyword_argument
from .instance import patch_options, patched, pretrained_model, unpatch

# What is rounding: the same multiple of eager's mean error that FlashAttention allows its kernels, and more of the maximum, which is one
# value among many that every later layer has amplified.
MEAN_FACTOR, MAX_FACTOR = 2.0, 4.0
# Of fewer values than these, each rounded at random, neither the mean nor the maximum says much.
FEW_VALUES = 256


@dataclass(frozen=True)
class Comparison:
    """The outputs of a model on hf_flash2 and on eager attention in the same dtype, both against higher precision.

    Errors are absolute, over the logits of real tokens; where there are few logits or none, over the last hidden states.

    Attributes:
        dtype, reference_dtype: of the model, and of the reference: float32, or float64 for a float32 model.
        max_error, mean_error: of hf_flash2.
        eager_max_error, eager_mean_error: of eager in the model's dtype.
        tokens: number of real tokens compared.
        idle_layers: patched layers whose op did not run, which makes the comparison worthless.
    """

    dtype: torch.dtype
    reference_dtype: torch.dtype
    max_error: float
    mean_error: float
    eager_max_error: float
    eager_mean_error: float
    tokens: int
    idle_layers: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """Our mean error as a multiple of eager's."""
        if self.eager_mean_error == 0:
            return 1.0 if self.mean_error == 0 else math.inf
        return self.mean_error / self.eager_mean_error

    @property
    def ok(self) -> bool:
        """Every patched layer ran our op, and its error is within eager's own rounding."""
        within = self.mean_error <= MEAN_FACTOR * self.eager_mean_error and self.max_error <= MAX_FACTOR * self.eager_max_error
        return within and not self.idle_layers

    @property
    def verdict(self) -> str:
        if self.idle_layers:
            return f"not verified: the op did not run for {', '.join(self.idle_layers)}"
        if self.ok:
            return f"within eager's own rounding ({self.ratio:.2f} x its mean error)"
        max_ratio = self.max_error / self.eager_max_error if self.eager_max_error else math.inf
        return (
            f"wrong: {self.ratio:.2f} x eager's mean error and {max_ratio:.2f} x its maximum; "
            f"at most {MEAN_FACTOR:.0f} x and {MAX_FACTOR:.0f} x are rounding"
        )

    def __str__(self) -> str:
        dtype, reference = (str(d).removeprefix("torch.") for d in (self.dtype, self.reference_dtype))
        return (
            f"{self.tokens} tokens, {dtype} against {reference}\n"
            f"  hf_flash2  max {self.max_error:.2e}  mean {self.mean_error:.2e}\n"
            f"  eager      max {self.eager_max_error:.2e}  mean {self.eager_mean_error:.2e}\n"
            f"  {self.verdict}"
        )


def verify(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Comparison:
    """Run the model on one batch with eager attention and with hf_flash2, and compare both with a higher precision.

    Args:
        model: as for `patch`; patched or not, it is afterwards as it was before. A patched one is verified as it is patched, packed or
            not. What torch.compile has compiled is run uncompiled.
        batch: keyword arguments of the model's forward, with its 2-D attention_mask (and decoder_attention_mask) if anything is padded.
    Raises:
        ValueError: there is no copy in higher precision to compare with, as the model is quantised or float64; the batch is no mapping or
            has no real token, or packs documents for an encoder; the model's output has nothing to compare; a PEFT adapter puts prompts
            before the model; a forward that was put on the model, as accelerator.prepare does, runs the model itself in a copy of it, too.

    Runs in evaluation mode without gradients. Needs memory for one more copy of the model in the reference dtype.
    """
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"verify takes a batch as the tokenizer gives it, a mapping such as {{'input_ids': ...}}, got {type(batch).__name__}"
        )
    target = pretrained_model(model)
    adapter = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise ValueError(
            f"verify runs the model inside the adapter, and {adapter.peft_type.value} puts its prompts before that; "
            "verify(model.get_base_model(), batch)"
        )
    if target.dtype == torch.float64:
        raise ValueError("verify compares with a higher precision than the model's, and float64 has none; verify(model.float(), batch)")
    if getattr(target.config, "quantization_config", None) is not None:
        raise ValueError(
            "verify needs a copy of the model in higher precision, which a quantised model does not have; verify it unquantised"
        )
    if _has_documents(batch):
        if _is_encoder(target):
            raise ValueError(
                "verify compares with eager attention, whose documents see each other in an encoder such as this one; verify a padded "
                "batch of the same texts"
            )
        if batch.get("position_ids") is None:
            raise ValueError(
                "verify compares with eager attention, which knows of documents by position_ids that restart and does not look at "
                "cu_seq_lens_q/k; pass position_ids, too"
            )
    inputs = {"use_cache": False, **batch} if _takes(target, "use_cache") else dict(batch)
    with patched(target, **patch_options(target)) as report:
        before = report.calls
        output = _output(target, inputs)
        idle = tuple(name for name, count in report.calls.items() if count == before[name])
    eager = copy.deepcopy(target)
    unpatch(eager)
    eager.set_attn_implementation("eager")
    dtype = target.dtype
    reference_dtype = torch.float64 if dtype == torch.float32 else torch.float32
    with _modules_that_run(eager) as ran:
        eager_output = _output(eager, inputs)
    ran_in_original = [name for name in report.layers if name not in idle and ran.isdisjoint(_with_weights(eager.get_submodule(name)))]
    if ran_in_original:
        raise ValueError(
            f"verify compares with a copy of the model, and {', '.join(ran_in_original)} did not run in it: a forward that was put on the "
            "model, as accelerator.prepare does, or on a module inside runs the original's; verify before that, or unwrap the model"
        )
    if hasattr(eager, "set_experts_implementation"):
        eager.set_experts_implementation("eager")  # grouped products know no float64
    for module in eager.modules():
        if getattr(module, "reorder_and_upcast_attn", False):
            module.reorder_and_upcast_attn = False  # GPT-2's order of operations for half types, which float64 does not need, and stops at
    type(eager).to(eager, reference_dtype)  # accelerate's dispatch_model puts a `to` on the original, which would convert that
    reference = _output(eager, _to_dtype(inputs, reference_dtype))
    real = _real_tokens(inputs, reference)
    if not real.any():
        raise ValueError("the batch has no real token to compare: its attention_mask is 0 everywhere")
    if not reference[real].isfinite().all():
        # NOTE: most eager attention has a float32 softmax even in a float64 model, where the mask of a row that is all padding overflows.
        with _SoftmaxAsItIs():
            reference = _output(eager, _to_dtype(inputs, reference_dtype))
    error, eager_error = ((x.to(reference_dtype) - reference)[real].abs() for x in (output, eager_output))
    return Comparison(
        dtype, reference_dtype, error.max().item(), error.mean().item(), eager_error.max().item(), eager_error.mean().item(),
        int(real.sum()), idle,
    )  # fmt: skip


class _SoftmaxAsItIs(TorchFunctionMode):
    """Within it, softmax of float64 is not in float32, whatever dtype it is told."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (F.softmax, torch.softmax, torch.Tensor.softmax) and args and args[0].dtype == torch.float64:
            kwargs = kwargs | {"dtype": None}
        return func(*args, **kwargs)


def _is_encoder(model: nn.Module) -> bool:
    """Whether no attention of the model is causal, nor made of causal masks, in which Transformers knows of documents (EmbeddingGemma)."""
    if getattr(model.config, "use_bidirectional_attention", None):
        return False
    if getattr(model.config, "is_causal", None) is False:
        return True
    causal = [x.is_causal for x in model.modules() if hasattr(x, "is_causal") and not getattr(x, "is_cross_attention", False)]
    return bool(causal) and not any(causal)


def _has_documents(batch: Mapping[str, torch.Tensor]) -> bool:
    position_ids = batch.get("position_ids") if batch.get("attention_mask") is None else None
    if isinstance(position_ids, torch.Tensor) and position_ids.dim() == 2 and len(position_ids) == 1:
        return packing.documents_from_position_ids(position_ids) is not None
    return batch.get("cu_seq_lens_q") is not None


@contextmanager
def _modules_that_run(model: nn.Module) -> Iterator[set[nn.Module]]:
    """Which modules of the model are called inside the with block."""
    ran: set[nn.Module] = set()
    hooks = [module.register_forward_pre_hook(lambda module, _: ran.add(module)) for module in model.modules()]
    try:
        yield ran
    finally:
        for hook in hooks:
            hook.remove()


def _with_weights(layer: nn.Module) -> set[nn.Module]:
    """The modules inside that have weights of their own; where none has, the layer itself."""
    return {module for module in layer.modules() if any(True for _ in module.parameters(recurse=False))} or {layer}


@torch.compiler.set_stance("force_eager")  # calls of our op are not counted else
@torch.no_grad()
def _output(model: nn.Module, inputs: Mapping[str, object]) -> torch.Tensor:
    """Logits or last hidden states [B, S, ...], or what stands in their place, in evaluation mode; the training flags are put back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        output = model(**{**inputs, "return_dict": True})
        x = next((output[name] for name in ("logits", "last_hidden_state", *output) if _is_comparable(output.get(name))), None)
        if x is None:
            raise ValueError(
                f"verify compares logits or hidden states, and {type(output).__name__} has none; verify a part of the model that "
                "returns some"
            )
        if x.numel() < FEW_VALUES and _takes(model, "output_hidden_states"):
            output = model(**{**inputs, "return_dict": True, "output_hidden_states": True})
            x = max((x, *_last_hidden_states(output)), key=torch.Tensor.numel)
    finally:
        for module in training:
            module.training = True
    return x


def _takes(model: nn.Module, argument: str) -> bool:
    """By its name, or among others that the forward hands on, unless that gives one of its own, as T5Gemma's classifier use_cache=False."""
    parameters = inspect.signature(model.forward).parameters
    by_others = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    return argument in parameters or (by_others and not gives_keyword_argument(type(model), argument))


def _is_comparable(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() >= 2


def _last_hidden_states(output: Mapping[str, object]) -> Iterator[torch.Tensor]:
    """Those of a model and of the models inside, as CLIP returns them."""
    for name, value in output.items():
        if isinstance(value, Mapping):
            yield from _last_hidden_states(value)
        elif name.endswith("hidden_states") and isinstance(value, tuple) and value:
            value = value[-1]
        if name.endswith(("hidden_states", "last_hidden_state")) and _is_comparable(value):
            yield value


def _to_dtype(inputs: Mapping[str, object], dtype: torch.dtype) -> dict[str, object]:
    return {name: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in inputs.items()}


def _real_tokens(inputs: Mapping[str, object], output: torch.Tensor) -> torch.Tensor:
    """bool, the leading dimensions of output that hold real tokens: those of an encoder-decoder are its decoder's. A mask may be of
    several rows of output each, as of Musicgen's, one for each codebook."""
    mask = inputs.get("decoder_attention_mask" if any(name.startswith("decoder_") for name in inputs) else "attention_mask")
    rows, columns = output.shape[:2]
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.shape[1] != columns or rows % mask.shape[0]:
        return torch.ones(output.shape[:-1], dtype=torch.bool, device=output.device)
    return mask.to(output.device).bool().repeat_interleave(rows // mask.shape[0], 0)

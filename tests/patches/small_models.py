"""Small models and batches for the tests of patches/, with attention peaked enough that a wrong one shows."""

import copy

import tiny_models
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

VOCABULARY = 61
BATCH, LENGTH = 4, 13
FAMILIES = ("llama", "mistral", "gpt2")
PADDINGS = ("dense", "left", "right", "holes")

_COMMON = {"vocab_size": VOCABULARY, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_ROTARY = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def config(family: str, **overrides):
    if family == "llama":
        return LlamaConfig(**{**_COMMON, **_ROTARY, **overrides})
    if family == "mistral":
        return MistralConfig(**{**_COMMON, **_ROTARY, "sliding_window": 5, **overrides})
    sizes = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}
    no_dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return GPT2Config(**{**_COMMON, **sizes, **no_dropout, "scale_attn_by_inverse_layer_idx": True, **overrides})


def model(family: str, **overrides) -> PreTrainedModel:
    """The same weights every time. Attention is eager, the model in evaluation mode."""
    torch.manual_seed(0)
    classes = {"llama": LlamaForCausalLM, "mistral": MistralForCausalLM, "gpt2": GPT2LMHeadModel}
    made = classes[family]._from_config(config(family, **overrides), attn_implementation="eager")
    return made.eval()


def twins(family: str, **overrides) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Two models with equal weights."""
    one = model(family, **overrides)
    return one, copy.deepcopy(one)


def attention_layers(made: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return {name: module for name, module in made.named_modules() if name.rpartition(".")[2] in ("self_attn", "attn", "crossattention")}


def key_mask(padding: str) -> torch.Tensor:
    """int64 [B, S], 1 = a real token. One sequence is always full."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    for row, missing in enumerate((5, 1, 0, 9)):
        if padding == "left":
            mask[row, :missing] = 0
        elif padding == "right":
            mask[row, LENGTH - missing :] = 0
        elif padding == "holes":
            mask[row, 2 : 2 + missing : 2] = 0
    return mask


def batch(padding: str, seed: int = 1) -> dict[str, torch.Tensor]:
    """Inputs [B, S] with their mask; "dense": without a mask; "documents": [1, B * S], three documents in one row."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    if padding == "documents":
        lengths = (20, 5, BATCH * LENGTH - 25)
        return {"input_ids": ids.view(1, -1), "position_ids": torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)}
    if padding == "dense":
        return {"input_ids": ids}
    mask = key_mask(padding)
    return {"input_ids": ids * mask, "attention_mask": mask}


def real_tokens(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """bool [B, S]"""
    return inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()


def labels(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """As tiny_models.labels, of a batch."""
    return tiny_models.labels(inputs["input_ids"], inputs.get("attention_mask"))


def gradients(made: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By the names of the parameters."""
    return {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}


def assert_close(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Each tensor, up to float32 rounding of its largest value."""
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=2e-5 * value.abs().max().item(), msg=lambda m, n=name: f"{n}: {m}")

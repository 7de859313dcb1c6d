"""Models to run the examples on: random weights in three families and sizes, or any causal model of yours.

The shapes exercise what an attention kernel has to get right: grouped key heads (llama, mistral), a sliding window shorter than the text
(mistral), a fused projection and learned positions (gpt2).
"""

import argparse
import math
from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from stdlib_data import END_ID, PAD_ID, load_corpus, load_tokenizer

MODEL_TYPES = ("llama", "mistral", "gpt2")
# hidden size, layers, query heads, key heads, MLP size, vocabulary
SIZES = {
    "tiny": (128, 2, 4, 2, 384, 2048),  # 0.9 M parameters: seconds on a CPU
    "small": (768, 12, 12, 4, 2048, 8192),  # 90 M
    "1b": (2048, 16, 32, 8, 8192, 8192),  # Llama 3.2 1B's shape: 1.0 B with this vocabulary, 1.2 B with its own
}


def vocab_size(size: str) -> int:
    return SIZES[size][-1]


def make_config(model_type: str, size: str, max_length: int, **overrides: object) -> PretrainedConfig:
    """A configuration of one family and size for sequences of up to max_length tokens. No dropout: runs are to be compared."""
    hidden, layers, heads, heads_k, mlp, vocabulary = SIZES[size]
    common = {
        "vocab_size": vocabulary,
        "pad_token_id": PAD_ID,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "tie_word_embeddings": False,
    } | overrides
    if model_type == "gpt2":
        return GPT2Config(
            n_embd=hidden, n_layer=layers, n_head=heads, n_inner=mlp, n_positions=max_length,
            attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **common,
        )  # fmt: skip
    common |= {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads_k,
        "intermediate_size": mlp,
        "max_position_embeddings": max_length,
    }
    if model_type == "mistral":
        return MistralConfig(sliding_window=max(2, max_length // 4), **common)
    return LlamaConfig(**common)


def at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an option that is a number from `least` on, up to `most`."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            raise argparse.ArgumentTypeError(f"must be a number from {least} {'on' if most is None else f'to {most}'}, got {text!r}")
        return int(text)

    return number


def positive(text: str) -> float:
    """The type of an option that is a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def device_name(text: str) -> str:
    """The type of --device: cpu, or cuda where there is a GPU."""
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch sees no GPU on this machine (`hf-flash2 info` says why)")
    return text


class DefaultsFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """`--help` with the defaults; where that is None, the help text itself says what happens."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `load_model` reads."""
    parser.add_argument("--model", help="folder or hub name of a causal model; default: random weights of --model-type and --size")
    parser.add_argument("--model-type", choices=MODEL_TYPES, default="llama", help="family of a random model")
    parser.add_argument("--size", choices=tuple(SIZES), default="tiny", help="of a random model")
    parser.add_argument(
        "--device", type=device_name, choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu", help="where it runs"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--batch-size", type=at_least(1), default=4, help="texts at once")


def load_model(
    args: argparse.Namespace, attn_implementation: str, max_length: int = 1024
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model that the options ask for, in evaluation mode, and its tokenizer (padding on the left). max_length: of a random model."""
    dtype = getattr(torch, args.dtype or ("float32" if args.device == "cpu" else "bfloat16"))
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, attn_implementation=attn_implementation)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    else:
        torch.manual_seed(0)
        # Larger than usual, so that attention is peaked and an error in it shows.
        initializer_range = 2 * SIZES[args.size][0] ** -0.5
        config = make_config(args.model_type, args.size, max_length, initializer_range=initializer_range)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
        tokenizer = load_tokenizer(load_corpus(), vocab_size(args.size))
    tokenizer.padding_side = "left"
    return model.to(args.device).eval(), tokenizer

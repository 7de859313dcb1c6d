"""`hf-flash2 parity`: is the difference between hf_flash2 and eager attention normal?

Two ways of rounding never agree to the last bit, so the question is put like this: how far is eager attention in the given dtype from the
same model in float64, and how far are we? A small random model answers it, with weights large enough that attention is peaked (at the usual
initialisation it is nearly flat, and a lost mask would hide in the rounding). Logits of real tokens and gradients of every parameter count.

The float64 model runs on torch's SDPA: Transformers' eager attention rounds its softmax to float32 whatever the dtype, and its float64 mask
overflows there.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
import transformers
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, PretrainedConfig

from . import __version__, notices
from .ops import last_backend

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PADDINGS = ("none", "left", "right", "holes", "documents")
ALLOWED_LOGITS, ALLOWED_GRADIENTS = 2.0, 3.0  # times eager's own error: the rule of the kernel tests, for a whole model
VOCABULARY, LAYERS, BATCH = 128, 2, 4
INITIALIZER_RANGE = 0.2
SLIDING_WINDOW = 17
# Of few tokens eager's own error is no measure: a token that sees itself alone gives q and k no gradient, and eager is exact there by luck.
MIN_SEQLEN = 32

_SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
CONFIGS = {  # for sequences of `seqlen` tokens
    "llama": lambda seqlen: LlamaConfig(**_SHAPE, num_key_value_heads=2, initializer_range=INITIALIZER_RANGE),
    "mistral": lambda seqlen: MistralConfig(
        **_SHAPE, num_key_value_heads=1, sliding_window=SLIDING_WINDOW, initializer_range=INITIALIZER_RANGE
    ),
    "gpt2": lambda seqlen: GPT2Config(
        vocab_size=VOCABULARY, n_embd=128, n_layer=LAYERS, n_head=4, n_positions=2 * seqlen, initializer_range=INITIALIZER_RANGE,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """Model inputs and which of the tokens are real."""

    inputs: dict[str, torch.Tensor]
    real: torch.Tensor  # bool [B, S]


@dataclass(frozen=True)
class Errors:
    """Distances from float64 of one tensor, eager's and ours."""

    eager_max: float
    eager_mean: float
    ours_max: float
    ours_mean: float

    @property
    def ratio(self) -> float:
        """Largest error of ours over that of eager; 1 where neither has any."""
        if self.eager_max == 0:
            return 1.0 if self.ours_max == 0 else float("inf")
        return self.ours_max / self.eager_max


@dataclass(frozen=True)
class Parity:
    """The answer for one model, dtype and kind of padding."""

    model: str
    dtype: str
    padding: str
    device: str
    backend: str | None  # what ran ours, as hf_flash2.last_backend() names it
    routes: list[str]  # how each call of an attention layer went: dense, padded, documents, or sdpa when we did not run it
    logits: Errors
    gradients: dict[str, Errors]  # by parameter

    @property
    def worst_gradient(self) -> str:
        return max(self.gradients, key=lambda name: (math.isnan(self.gradients[name].ratio), self.gradients[name].ratio))

    @property
    def problems(self) -> list[str]:
        """Why the difference is not normal; empty when it is."""
        found = []
        if len(self.routes) < LAYERS:
            found.append(f"{LAYERS} attention layers called hf_flash2 {len(self.routes)} times")
        if "sdpa" in self.routes:
            found.append(
                f"attention was handed to SDPA, so nothing was compared: {self.dtype} on {self.device} is not served by the kernels"
            )
        if not self.logits.ratio <= ALLOWED_LOGITS:  # NaN is a problem too
            found.append(f"logits are {self.logits.ratio:.1f} times as far off as eager's, {ALLOWED_LOGITS:g} are normal")
        worst = self.gradients[self.worst_gradient]
        if not worst.ratio <= ALLOWED_GRADIENTS:
            found.append(
                f"the gradient of {self.worst_gradient} is {worst.ratio:.1f} times as far off as eager's, {ALLOWED_GRADIENTS:g} are normal"
            )
        return found

    @property
    def verdict(self) -> str:
        return "NOT within eager's own rounding" if self.problems else "within eager's own rounding"

    def as_dict(self) -> dict:
        """Plain data, for JSON."""
        return asdict(self) | {
            "ratio_logits": self.logits.ratio,
            "ratio_gradients": {name: errors.ratio for name, errors in self.gradients.items()},
            "worst_gradient": self.worst_gradient,
            "verdict": self.verdict,
            "problems": self.problems,
            "ok": not self.problems,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hf-flash2 parity`."""
    parser.add_argument(
        "--model", nargs="+", choices=list(CONFIGS), default=["llama"], help="llama has grouped heads, mistral a sliding window"
    )
    parser.add_argument("--padding", nargs="+", choices=PADDINGS, default=list(PADDINGS), help="default: every kind")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--device", type=_device, default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--seqlen", type=_seqlen, default=96, help=f"length of the longest sequence, at least {MIN_SEQLEN} (default 96)")
    parser.add_argument("--seed", type=_seed, default=0)
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", text):
        raise argparse.ArgumentTypeError(f"must be cpu, cuda or cuda:N, got {text!r}")
    return text


def _seqlen(text: str) -> int:
    if not text.isdecimal() or int(text) < MIN_SEQLEN:
        raise argparse.ArgumentTypeError(f"must be a number from {MIN_SEQLEN} on, got {text!r}: fewer tokens do not show what is normal")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 2**63 - 1, got {text!r}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Compare, print, and return 0 when every difference is normal, else 1."""
    name, _, index = args.device.partition(":")  # torch.device("cuda:256") is cuda:0
    if name == "cuda" and int(index or 0) >= torch.cuda.device_count():
        print(f"hf-flash2 parity: device {args.device} is not there; use --device cpu", file=sys.stderr)
        return 1
    if not args.json:
        print(f"hf_flash2 {__version__}, Transformers {transformers.__version__}, torch {torch.__version__}, {args.dtype} on {args.device}")
        print("largest (mean) error of the logits against float64; errors of gradients as multiples of eager's")
        print(f"{'model':9}{'padding':11}{'eager':22}{'hf_flash2':22}{'ours/eager':>10}  {'worst gradient':48}verdict")
    results = []
    for model in args.model:
        for padding in args.padding:
            result = measure(model, DTYPES[args.dtype], padding, args.device, args.seqlen, args.seed)
            results.append(result)
            if not args.json:
                print(format_line(result), flush=True)
    ok = not any(result.problems for result in results)
    if args.json:
        print(json.dumps([result.as_dict() for result in results], indent=2))
    else:
        for result in results:
            for problem in result.problems:
                print(f"{result.model}, {result.padding}: {problem}")
        backends = ", ".join(sorted({result.backend or "nothing" for result in results}))
        print(f"ran on {backends}: " + ("the differences are normal" if ok else "there is a difference that rounding does not explain"))
    return 0 if ok else 1


def measure(model: str, dtype: torch.dtype, padding: str, device: str = "cpu", seqlen: int = 96, seed: int = 0) -> Parity:
    """Run one random model three times: in float64, eager in `dtype`, hf_flash2 in `dtype`."""
    torch.manual_seed(seed)
    weights = {name: weight.to(dtype) for name, weight in build(model, torch.float32, "eager", "cpu", seqlen).state_dict().items()}
    batch = make_batch(padding, seqlen, seed)
    cotangent = torch.randn(int(batch.real.sum()), VOCABULARY, generator=torch.Generator().manual_seed(seed))

    def results(dtype: torch.dtype, implementation: str) -> dict[str, torch.Tensor]:
        instance = build(model, dtype, implementation, device, seqlen)
        instance.load_state_dict(weights)
        return logits_and_gradients(instance, batch, cotangent)

    truth, eager = results(torch.float64, "sdpa"), results(dtype, "eager")
    with notices.record_calls() as calls:
        ours = results(dtype, notices.NAME)
    errors = {name: compare(truth[name], eager[name], ours[name]) for name in truth}
    return Parity(
        model=model,
        dtype=str(dtype).removeprefix("torch."),
        padding=padding,
        device=device,
        backend=last_backend(),
        routes=[route for routes in calls.values() for route in routes],
        logits=errors.pop("logits"),
        gradients=errors,
    )


def build(model: str, dtype: torch.dtype, implementation: str, device: str, seqlen: int) -> torch.nn.Module:
    """A small random model. Made in its dtype rather than cast to it, so that buffers which belong in float32 stay there."""
    with default_dtype(dtype):
        config: PretrainedConfig = CONFIGS[model](seqlen)
        return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).to(device).eval()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def make_batch(padding: str, seqlen: int, seed: int) -> Batch:
    """Random tokens: a padded batch with a 2-D mask, or documents one after another in one row with position_ids that restart."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([seqlen, max(1, seqlen // 2), max(1, seqlen // 3), 1])[:BATCH, None]
    column = torch.arange(seqlen)
    if padding == "documents":
        position_ids = torch.cat([torch.arange(n) for n in lengths.flatten().tolist()])[None]
        tokens = torch.randint(VOCABULARY, position_ids.shape, generator=generator)
        return Batch({"input_ids": tokens, "position_ids": position_ids}, torch.ones_like(tokens, dtype=torch.bool))
    real = {
        "none": (column < seqlen).expand(BATCH, -1),
        "right": column < lengths,
        "left": column >= seqlen - lengths,
        "holes": (torch.rand(BATCH, seqlen, generator=generator) < 0.6) & (column < lengths + seqlen // 4),
    }[padding]
    inputs = {"input_ids": torch.randint(VOCABULARY, real.shape, generator=generator)}
    return Batch(inputs if padding == "none" else inputs | {"attention_mask": real.long()}, real)


def logits_and_gradients(model: torch.nn.Module, batch: Batch, cotangent: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits of the real tokens, as "logits", and the gradient of every parameter for a fixed gradient of these logits; in float64."""
    device = next(model.parameters()).device
    inputs = {name: tensor.to(device) for name, tensor in batch.inputs.items()}
    logits = model(**inputs, use_cache=False).logits[batch.real.to(device)]
    logits.backward(cotangent.to(device, logits.dtype))
    gradients = {name: parameter.grad.double() for name, parameter in model.named_parameters()}
    return {"logits": logits.detach().double()} | gradients


def compare(truth: torch.Tensor, eager: torch.Tensor, ours: torch.Tensor) -> Errors:
    off_eager, off_ours = (eager - truth).abs(), (ours - truth).abs()
    return Errors(off_eager.max().item(), off_eager.mean().item(), off_ours.max().item(), off_ours.mean().item())


def format_line(result: Parity) -> str:
    """One line of the table."""
    logits, worst = result.logits, result.worst_gradient
    eager = f"{logits.eager_max:.2e} ({logits.eager_mean:.2e})"
    ours = f"{logits.ours_max:.2e} ({logits.ours_mean:.2e})"
    gradient = f"{result.gradients[worst].ratio:.2f} {worst.removeprefix('model.').removeprefix('transformer.')}"
    return f"{result.model:9}{result.padding:11}{eager:22}{ours:22}{result.logits.ratio:>10.2f}  {gradient:48}{result.verdict}"

"""`hf-flash2 bench train`: one optimisation step of a model of the shape of a Llama, a Gemma 4, a Qwen2.5-VL or a Gemma 3 that sees images,
in bf16, by attention implementation.

A step is forward, loss, backward and AdamW. The learning rate is 0: the optimizer does all its work and the weights stay as they are, so
every arm computes the same loss at every step, and the losses can be compared. Weights, optimizer and batch are shared by the arms, which
differ in the attention implementation alone and take turns in one process. A turn is one untimed step, in which the allocator's cache,
emptied between turns, fills again, and a few timed ones. An arm that runs out of memory says so and is left out from then on.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from . import bench_profile, native
from .bench_shared import (
    SEED,
    as_title,
    describe_environment,
    draw_again,
    figure,
    legend_below,
    middle,
    path_ending_in,
    plot_arguments,
    positive,
    ragged_lengths,
    reason_no_figure,
    reason_not_writable,
    release_memory,
    write_csv,
)
from .notices import NAME
from .ops import last_backend

PACKED = f"{NAME} packed"
ARMS = ("eager", "sdpa", NAME, PACKED)
OK, OUT_OF_MEMORY = "ok", "out of memory"
GIB = 2**30
# Labels are random, so the loss of another function would differ by about 2 nats a token, that is 2 / sqrt(N) in the mean over N tokens.
# Rounding in bf16 makes up less than a tenth of that, and 0.5 % of the gradient's norm; attention scores off by 10 % make up 15 % of it.
LOSS_TOLERANCE = 0.5  # / sqrt(N)
GRADIENT_TOLERANCE = 0.05


@dataclass(frozen=True)
class Preset:
    """A model's shape and a batch of it, padded on the right."""

    hidden: int
    layers: int
    heads: int
    heads_k: int
    mlp: int
    vocabulary: int
    tied: bool  # embeddings and head share their weights
    batch: int
    seqlen: int
    fill: float  # share of real tokens
    head_dims: tuple[int, int] | None = None  # of a Gemma 4, layers with a sliding window and the others
    tower: dict[str, object] | None = None  # of a Qwen2.5-VL or a Gemma 3: its vision tower, as its config says it
    image: int = 0  # of a Gemma 3: tokens of an image, which see all of themselves; behind each are three times as many of text

    @property
    def family(self) -> str:
        """A Llama, unless something else is said."""
        return "Gemma 4" if self.head_dims else "Gemma 3" if self.image else "Qwen2.5-VL" if self.tower else "Llama"

    @property
    def image_token(self) -> int:
        return self.vocabulary - 1

    @property
    def lengths(self) -> tuple[int, ...]:
        return ragged_lengths(self.batch, self.seqlen, self.fill)


_LLAMA_1B = (2048, 16, 32, 8, 8192, 128256, True)  # Llama 3.2 1B
# Twelve layers of Gemma 4 E4B, two of them without a window. Not tied: its embeddings are scaled, and with random weights the model would
# predict the token that it is given, at a loss of 38.
_GEMMA4_LAYERS = (2560, 12, 8, 2, 10240, 32000, False)
_QWEN_VL_3B = (2048, 36, 16, 2, 11008, 151936, True)
_GEMMA3_LAYERS = (2560, 12, 8, 4, 10240, 32000, False)  # of Gemma 3 4B, two of them without a window; not tied, as Gemma 4's
_SIGLIP = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 896, "patch_size": 14,
}  # fmt: skip
_TINY = (64, 2, 4, 2, 128, 256, True)
_TINY_TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64, "fullatt_block_indexes": [1]}
_TINY_SIGLIP = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
}  # fmt: skip
PRESETS = {
    "1b-ragged": Preset(*_LLAMA_1B, batch=16, seqlen=2048, fill=0.33),
    "7b-layers-ragged": Preset(4096, 4, 32, 32, 11008, 32000, False, batch=4, seqlen=8192, fill=0.29),  # four layers of Llama 7B
    "1b-dense": Preset(*_LLAMA_1B, batch=4, seqlen=4096, fill=1.0),
    "gemma4-layers-ragged": Preset(*_GEMMA4_LAYERS, batch=4, seqlen=8192, fill=0.29, head_dims=(256, 512)),
    "gemma4-layers-dense": Preset(*_GEMMA4_LAYERS, batch=1, seqlen=16384, fill=1.0, head_dims=(256, 512)),
    # Qwen2.5-VL 3B, an image in each row.
    "qwen2.5-vl-ragged": Preset(*_QWEN_VL_3B, batch=4, seqlen=2048, fill=0.4, tower={"hidden_size": 1280, "out_hidden_size": 2048}),
    "gemma3-layers-images": Preset(*_GEMMA3_LAYERS, batch=4, seqlen=4096, fill=0.4, tower=_SIGLIP, image=256),
    "tiny": Preset(*_TINY, batch=4, seqlen=64, fill=0.5),  # seconds on a CPU
    "tiny-vl": Preset(*_TINY, batch=4, seqlen=64, fill=0.5, tower=_TINY_TOWER),
    # As wide as its window: padding that sees nothing is NaN to SDPA on a GPU, at head dim 16, and then all is.
    "tiny-gemma3": Preset(*_TINY, batch=4, seqlen=64, fill=0.5, tower=_TINY_SIGLIP, image=16),
}


@dataclass(frozen=True)
class Row:
    """One arm at one preset: a line of the CSV."""

    preset: str
    arm: str
    outcome: str
    tokens_per_second: float | None  # real tokens, at the median step
    tokens_per_second_p20: float | None
    tokens_per_second_p80: float | None
    step_ms: float | None
    peak_gib: float | None  # None without a GPU too
    loss: float | None
    loss_difference: float | None  # from the first arm that ran
    gradient_norm: float | None
    gradient_ratio: float | None  # to that of the first arm that ran
    backend: str | None  # of hf_flash2, as last_backend() names it
    batch: int
    seqlen: int
    real_tokens: int
    parameters: int
    gradient_checkpointing: bool
    timed_steps: int
    compiled: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hf-flash2 bench train`."""
    gpu = torch.cuda.is_available()
    parser.add_argument("--preset", nargs="+", choices=list(PRESETS), default=[*PRESETS][:3] if gpu else ["tiny"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=", ".join(f'"{arm}"' for arm in ARMS))
    parser.add_argument("--turns", type=positive, default=4, help="of each arm (default 4)")
    parser.add_argument("--steps", type=positive, default=3, help="timed steps in a turn, behind one that is not timed (default 3)")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="non-reentrant, of every layer")
    parser.add_argument("--compile", action="store_true", help="the model under torch.compile, compiled anew in every turn")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if gpu else "cpu")
    parser.add_argument("--csv", type=Path, metavar="PATH", help="write one line per arm, after each preset")
    plot_arguments(parser, "real tokens/s and peak memory")
    parser.add_argument(
        "--profile",
        type=path_ending_in(".json"),
        metavar="PATH.json",
        help="profile one more step per arm: GPU time by kind of kernel, waits for the host; PATH.png beside it (needs matplotlib)",
    )


def run(args: argparse.Namespace) -> int:
    """Measure the presets, print a line per arm, write what was asked for. Returns the exit code: 1 where arms disagree."""
    if args.from_csv:
        failed = draw_again(args, Row, plot)
        if not failed:
            print(f"wrote {args.plot}")
        return failed
    figures = [args.plot, args.profile and args.profile.with_suffix(".png")]
    reason = (reason_no_figure() if any(figures) else None) or reason_not_writable(args.csv, args.profile, *figures)
    if reason is not None:
        print(f"hf-flash2 bench train: {reason}", file=sys.stderr)
        return 2
    try:
        import transformers  # here and below: the benchmark of the kernels alone does not need it
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        print("hf-flash2 bench train needs Transformers: pip install transformers", file=sys.stderr)
        return 1
    device = torch.device(args.device)
    if device.type == "cuda":
        reason = native.reason_unavailable(torch.cuda.current_device()) if torch.cuda.is_available() else "there is no CUDA GPU"
        if reason is not None:
            print(f"hf-flash2 bench train cannot run: {reason}", file=sys.stderr)
            return 1
    for name in args.preset:
        if PRESETS[name].family == "Gemma 4" and "gemma4_text" not in transformers.CONFIG_MAPPING:
            print(f"hf-flash2 bench train: {name} needs a Transformers with Gemma 4, found {transformers.__version__}", file=sys.stderr)
            return 1
    environment = describe_environment(device) | {"transformers": transformers.__version__}
    print(as_title(environment))
    if device.type == "cpu":
        print("a CPU runs the reference backend, which is made to be exact: these figures say nothing about a GPU")
        if args.profile:
            print("--profile is of a GPU's kernels: here there are none, and all of a step counts as idle")
    rows: list[Row] = []
    profiles: list[bench_profile.Breakdown] = []
    for name in args.preset:
        preset = PRESETS[name]
        training = Training(build(preset, device, args.gradient_checkpointing), make_batch(preset, device), args.compile)
        print(describe(name, training, args), flush=True)
        samples = measure(training, args)
        measured = rows_of(name, training, args, samples)
        print("\n".join([format_header(), *map(format_row, measured)]), flush=True)
        rows += measured
        if args.csv:
            write_csv(args.csv, Row, rows, environment)
        if args.profile:
            for found in profile(name, training, samples):
                print(bench_profile.format_breakdown(found), flush=True)
                profiles.append(found)
        if profiles:
            bench_profile.write(args.profile, profiles, environment)
        del training
        release_memory(device)
    if args.plot:
        plot(args.plot, rows, environment)
    for path in filter(None, (args.csv, args.plot, *((args.profile, args.profile.with_suffix(".png")) if profiles else ()))):
        print(f"wrote {path}")
    if not any(row.outcome == OK for row in rows):
        print("no arm ran: there is nothing to compare")
        return 1
    disagreements = list(filter(None, map(disagreement, rows)))
    print("\n".join(disagreements) or "every loss and gradient agrees with that of the first arm that ran")
    return 1 if disagreements else 0


# ----------------------------------------------------------------------------------------------------------------------------- a preset


@dataclass
class Samples:
    """What the turns of one arm gave so far."""

    outcome: str = OK
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradient_norm: float | None = None
    peak_bytes: int = 0
    backend: str | None = None


def measure(training: "Training", args: argparse.Namespace) -> dict[str, Samples]:
    """Let the arms take turns."""
    samples = {arm: Samples() for arm in args.arms}
    for _ in range(args.turns):
        for arm, found in samples.items():
            if found.outcome != OK:
                continue
            try:
                take_turn(training, arm, args.steps, found)
            except torch.OutOfMemoryError:
                found.outcome = OUT_OF_MEMORY
            training.forget()  # behind the except block, which holds what the failed step held
    return samples


def profile(name: str, training: "Training", samples: dict[str, Samples]) -> Iterator[bench_profile.Breakdown]:
    """Where the time of a step goes, for each arm that ran."""
    for arm, found in samples.items():
        if found.outcome == OK:
            with switched(training.model, arm):
                training.begin()
                events = bench_profile.profiled_step(training.step, training.synchronize)
            training.forget()
            yield bench_profile.breakdown(name, arm, 1e3 * middle(found.seconds)[1], events)


def build(preset: Preset, device: torch.device, gradient_checkpointing: bool) -> torch.nn.Module:
    """A model with random weights, in training mode."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(SEED)
    auto = AutoModelForImageTextToText if preset.tower else AutoModelForCausalLM
    with torch.device(device):
        model = auto.from_config(_config(preset), dtype=torch.bfloat16, attn_implementation="sdpa").train()
    if preset.head_dims:
        # Normed q and k of weight 1 make scores of up to 100, and what bf16 rounds away turns the gradient around, in eager too.
        for attention in (layer.self_attn for layer in model.model.layers):
            for norm in (attention.q_norm, attention.k_norm):
                torch.nn.init.constant_(norm.weight, (2 / attention.head_dim**0.5) ** 0.5)  # scores of a standard deviation of 2
    if preset.image:  # zeros, which no checkpoint has: their norm would be divided by
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=preset.tower["hidden_size"] ** -0.5)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _config(preset: Preset):
    from transformers import AutoConfig

    sizes = {
        "hidden_size": preset.hidden, "num_hidden_layers": preset.layers, "num_attention_heads": preset.heads,
        "num_key_value_heads": preset.heads_k, "intermediate_size": preset.mlp, "vocab_size": preset.vocabulary,
        "tie_word_embeddings": preset.tied, "max_position_embeddings": preset.seqlen,
        "initializer_range": _spread(preset, preset.hidden), "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if preset.tower:
        tower = {"initializer_range": _spread(preset, preset.tower["hidden_size"]), **preset.tower}
    if preset.image:
        # A window of Gemma 3's; scores of a standard deviation of 2.
        sizes |= {"head_dim": max(16, preset.hidden // 10), "sliding_window": 4 * preset.image}
        sizes |= {"query_pre_attn_scalar": sizes["head_dim"] // 4}
        return AutoConfig.for_model(
            "gemma3", text_config=sizes, vision_config=tower | {"vision_use_head": False}, mm_tokens_per_image=preset.image,
            image_token_id=preset.image_token, boi_token_index=None, eoi_token_index=None, tie_word_embeddings=preset.tied,
        )  # fmt: skip
    if preset.tower:
        half = preset.hidden // preset.heads // 2  # pairs of a head: a quarter of them turns with time, the rest with height and width
        rope = {"rope_type": "default", "type": "default", "mrope_section": [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8]}
        return AutoConfig.for_model(
            "qwen2_5_vl", text_config=sizes | {"rope_scaling": rope}, vision_config=tower, tie_word_embeddings=preset.tied,
            image_token_id=preset.image_token,
        )  # fmt: skip
    if preset.head_dims:
        head_dim, global_head_dim = preset.head_dims
        sizes |= {
            "head_dim": head_dim, "global_head_dim": global_head_dim, "sliding_window": 512, "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        }  # fmt: skip
        return AutoConfig.for_model("gemma4_text", **sizes)
    return AutoConfig.for_model("llama", **sizes)


def _spread(preset: Preset, hidden: int) -> float:
    """Of random weights: larger than usual, so that attention is peaked, and the loss depends on it. Half that where a decoder follows a
    tower: twice as much, and 68 layers make of what bf16 rounds away 0.04 to 0.1 of the loss, in SDPA too, in place of 0.001."""
    return (1 if preset.tower else 2) * hidden**-0.5


def make_batch(preset: Preset, device: torch.device) -> dict[str, torch.Tensor]:
    """Random tokens, every real one a label, as a collator gives them. Tokens of images are none: with a tower each row begins with a
    square image, two thirds of it, or has one of `Preset.image` tokens before three times as many of text, as long as there is room."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(preset.image_token if preset.tower else preset.vocabulary, (preset.batch, preset.seqlen), generator=generator)
    column, lengths = torch.arange(preset.seqlen), torch.tensor(preset.lengths).unsqueeze(1)
    real = column < lengths
    images, of_images = torch.zeros_like(real), {}
    if preset.image:
        images = (column % (4 * preset.image) < preset.image) & (column // preset.image * preset.image + preset.image <= lengths)
        side = preset.tower["image_size"]
        pixels = torch.randn(int(images.sum()) // preset.image, 3, side, side, generator=generator)
        of_images = {"pixel_values": pixels.bfloat16(), "token_type_ids": images.long()}
    elif preset.tower:
        sides = (lengths * 2 / 3).sqrt().long()  # in tokens, of four patches each
        images = column < sides**2
        grids = torch.cat((torch.ones_like(sides), 2 * sides, 2 * sides), dim=1)
        pixels = torch.randn(int(grids.prod(1).sum()), 3 * 2 * 14 * 14, generator=generator)
        of_images = {"pixel_values": pixels.bfloat16(), "image_grid_thw": grids, "mm_token_type_ids": images.long()}
    tokens = tokens.where(~images, preset.image_token)
    batch = {"input_ids": tokens.where(real, 0), "attention_mask": real.long(), "labels": tokens.where(real & ~images, -100)}
    return {name: tensor.to(device) for name, tensor in (batch | of_images).items()}


class Training:
    """Model, optimizer and batch that all arms share."""

    def __init__(self, model: torch.nn.Module, batch: dict[str, torch.Tensor], compiled: bool = False):
        self.model, self.batch, self.compiled = model, batch, compiled
        self.device = batch["input_ids"].device
        self.parameters = list(model.parameters())
        self.size = sum(parameter.numel() for parameter in self.parameters)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, fused=True)
        for parameter in self.parameters:  # the optimizer's state is there before the first arm's memory is measured
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.forget()

    def begin(self) -> None:
        """The step of an arm that is not timed."""
        if self.compiled:
            torch.compiler.reset()  # of many arms and turns Dynamo would keep the first few, and run the others uncompiled
            self.model.compile()
        self.step()

    def step(self) -> torch.Tensor:
        """One optimisation step. Returns the loss; the gradients stay."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(**self.batch, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def gradient_norm(self) -> float:
        return torch.stack([torch.linalg.vector_norm(x.grad, dtype=torch.float32) for x in self.parameters]).norm().item()

    def forget(self) -> None:
        """Leave nothing of this arm to the next: no gradients, no cached memory."""
        self.optimizer.zero_grad(set_to_none=True)
        release_memory(self.device)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def take_turn(training: Training, arm: str, steps: int, samples: Samples) -> None:
    """One untimed step of an arm, then the timed ones."""
    on_gpu = training.device.type == "cuda"
    with switched(training.model, arm):
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        training.begin()
        samples.gradient_norm = training.gradient_norm()
        for _ in range(steps):
            training.synchronize()
            start = time.perf_counter()
            loss = training.step()
            training.synchronize()
            samples.seconds.append(time.perf_counter() - start)
            samples.losses.append(loss.item())
        if on_gpu:
            samples.peak_bytes = max(samples.peak_bytes, torch.cuda.max_memory_allocated())
        samples.backend = last_backend() if arm.startswith(NAME) else None


@contextlib.contextmanager
def switched(model: torch.nn.Module, arm: str) -> Iterator[None]:
    """The model with the attention implementation of an arm."""
    import hf_flash2  # its patch functions are loaded when they are asked for

    if arm == PACKED:
        with hf_flash2.patched(model, packed=True):
            yield
    else:
        model.set_attn_implementation(arm)
        yield


# -------------------------------------------------------------------------------------------------------------------------------- results


def rows_of(name: str, training: Training, args: argparse.Namespace, samples: dict[str, Samples]) -> list[Row]:
    """Statistics of one preset."""
    batch, seqlen = training.batch["input_ids"].shape
    real_tokens = int(training.batch["attention_mask"].sum())
    losses = {arm: sum(found.losses) / len(found.losses) for arm, found in samples.items() if found.outcome == OK}
    first = next(iter(losses), None)
    rows = []
    for arm, found in samples.items():
        ran = found.outcome == OK
        fast, median, slow = middle(found.seconds) if ran else (None, None, None)
        rows.append(
            Row(
                preset=name, arm=arm, outcome=found.outcome,
                tokens_per_second=real_tokens / median if ran else None,
                tokens_per_second_p20=real_tokens / slow if ran else None,
                tokens_per_second_p80=real_tokens / fast if ran else None,
                step_ms=1e3 * median if ran else None,
                peak_gib=found.peak_bytes / GIB if ran and found.peak_bytes else None,
                loss=losses.get(arm), loss_difference=losses[arm] - losses[first] if ran else None,
                gradient_norm=found.gradient_norm if ran else None,
                gradient_ratio=found.gradient_norm / samples[first].gradient_norm if ran else None, backend=found.backend,
                batch=batch, seqlen=seqlen, real_tokens=real_tokens, parameters=training.size,
                gradient_checkpointing=args.gradient_checkpointing, timed_steps=len(found.seconds), compiled=training.compiled,
            )
        )  # fmt: skip
    return rows


def disagreement(row: Row) -> str | None:
    """Why this arm seems to have computed another function than the first one, or None."""
    allowed = LOSS_TOLERANCE * row.real_tokens**-0.5
    if row.outcome != OK:
        return None
    if not abs(row.loss_difference) <= allowed:  # NaN is none of the two
        return f"{row.preset}: the loss of {row.arm} is {row.loss_difference:+.4f} off, rounding explains {allowed:.4f}"
    if not abs(row.gradient_ratio - 1) <= GRADIENT_TOLERANCE:
        return (
            f"{row.preset}: the gradient of {row.arm} is {row.gradient_ratio:.3f} times as long, rounding explains {GRADIENT_TOLERANCE:.0%}"
        )
    return None


def describe(name: str, training: Training, args: argparse.Namespace) -> str:
    """One line about a preset."""
    mask = training.batch["attention_mask"]
    size = f"{training.size / 1e9:.2f} B" if training.size > 1e8 else f"{training.size / 1e6:.1f} M"
    options = ", gradient checkpointing" * args.gradient_checkpointing + ", compiled" * training.compiled
    return (
        f"\n{name}: {PRESETS[name].family} shape of {size} parameters, {mask.shape[0]} x {mask.shape[1]} tokens, "
        f"{int(mask.sum())} of them real, bf16, AdamW{options}; {args.turns} turns of {args.steps} timed steps"
    )


def format_header() -> str:
    return (
        f"{'arm':18}{'real tokens/s (p20-p80)':>28}{'ms/step':>10}{'peak GiB':>10}{'loss':>10}{'difference':>12}{'gradient':>10}  backend"
    )


def format_row(row: Row) -> str:
    """One line of the table."""
    if row.outcome != OK:
        return f"{row.arm:18}{row.outcome:>28}"
    speed = f"{row.tokens_per_second:,.0f} ({row.tokens_per_second_p20:,.0f}-{row.tokens_per_second_p80:,.0f})"
    peak = "-" if row.peak_gib is None else f"{row.peak_gib:.1f}"
    numbers = f"{row.step_ms:>10.1f}{peak:>10}{row.loss:>10.4f}{row.loss_difference:>+12.4f}{row.gradient_norm:>10.4g}"
    return f"{row.arm:18}{speed:>28}{numbers}  {row.backend or '-'}"


def plot(path: Path, rows: Sequence[Row], environment: dict[str, str]) -> None:
    """Real tokens/s and peak memory: a group of bars per preset, a bar per arm.

    Raises:
        ValueError: an arm that is none.
    """
    presets, arms = (list(dict.fromkeys(names)) for names in ([row.preset for row in rows], [row.arm for row in rows]))
    unknown = next((arm for arm in arms if arm not in ARMS), None)
    if unknown is not None:
        raise ValueError(f"its arms must be among {', '.join(ARMS)}, got {unknown}")
    by_key = {(row.preset, row.arm): row for row in rows}
    quantities = (
        ("real tokens/s", lambda row: row.tokens_per_second, "{:,.0f}"),
        ("peak memory (GiB)", lambda row: row.peak_gib, "{:.1f}"),
    )
    colors = dict(zip(ARMS, ("0.55", "C0", "C1", "C3"), strict=True))
    width = 0.8 / len(arms)
    size = (max(8.0, 3.0 + 2.9 * len(presets)), 7.2)
    with figure(path, 2, 1, size, environment, sharex=True) as (drawn, axes):
        for (label, value, style), (panel,) in zip(quantities, axes, strict=True):
            top = max((value(row) or 0.0 for row in rows), default=0.0) or 1.0
            for number, arm in enumerate(arms):
                for x, preset in enumerate(presets):
                    row = by_key.get((preset, arm))
                    if row is None:
                        continue
                    center, height = x + (number - (len(arms) - 1) / 2) * width, value(row)
                    end = height or 0.0
                    panel.bar(center, end, 0.92 * width, color=colors[arm], label=arm if x == 0 else None)
                    if label.startswith("real") and height is not None:
                        errors = [[height - row.tokens_per_second_p20], [row.tokens_per_second_p80 - height]]
                        end = row.tokens_per_second_p80
                        panel.errorbar(center, height, yerr=errors, color="black", capsize=2, linewidth=1)
                    text = style.format(height) if height is not None else "not measured" if row.outcome == OK else row.outcome
                    rotation = 0 if height is not None else 90
                    panel.text(center, end + 0.02 * top, text, ha="center", va="bottom", fontsize=8, rotation=rotation)
            panel.set_ylabel(label)
            panel.set_ylim(0, 1.15 * top)
            panel.yaxis.set_major_formatter("{x:,.0f}")
            panel.grid(axis="y", alpha=0.3)
            panel.set_axisbelow(True)
        axes[-1][0].set_xticks(range(len(presets)), [tick(by_key, preset, arms) for preset in presets])
        handles, labels = axes[0][0].get_legend_handles_labels()
        legend_below(drawn, dict(zip(labels, handles, strict=True)), columns=len(arms))


def tick(rows: dict[tuple[str, str], Row], preset: str, arms: Iterable[str]) -> str:
    """What stands below the bars of a preset."""
    row = next(rows[preset, arm] for arm in arms if (preset, arm) in rows)
    fill = row.real_tokens / (row.batch * row.seqlen)
    padding = f"{1 - fill:.0%} padding" if fill < 1 else "no padding"
    options = ", checkpointing" * row.gradient_checkpointing + ", compiled" * row.compiled
    return f"{preset}\n{row.batch} x {row.seqlen}, {padding}{options}"

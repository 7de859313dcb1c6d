"""Fine-tune with LoRA on real, ragged text, with one attention implementation after another, and lay the loss curves over each other.

    python examples/finetune_lora.py --demo                                  # what `make demo` runs: small on a CPU, 1 B on a GPU
    python examples/finetune_lora.py --implementation hf_flash2 --how patch  # one implementation, by hf_flash2.patch(model)
    accelerate launch --num_processes 2 examples/finetune_lora.py --size 1b
    torchrun --nproc_per_node 2 examples/finetune_lora.py                    # two processes on a CPU (accelerate launch needs MPI for that)

What it does, in order:

1. Data (stdlib_data.py): signature + docstring -> body, from Python's own standard library. Nothing is downloaded.
2. A base model. There is no pretrained one without a download, and LoRA on random weights learns next to nothing. So the script first
   trains all weights of a random model on signatures and docstrings (with sdpa), once, and keeps it in the output folder.
3. For each implementation: the same base, the same initial LoRA weights, the same batches. LoRA on the attention projections, with the
   embeddings and the output layer trained in full (the base has met most tokens of code rarely or never), learns to write the bodies.
   The adapter is saved, loaded into a fresh base, checked to give the same logits, and completes a function it has not seen.
4. The comparison (finetune_report.py): table, loss curves (PNG), run.json and losses.csv.

Runs on one or more processes; --batch-size is per process, and two processes of 8 train exactly as one of 16.
"""

import argparse
import contextlib
import gc
import hashlib
import itertools
import json
import logging
import math
import shutil
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import accelerate
import peft
import torch
import transformers
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import hf_flash2
from demo_models import MODEL_TYPES, SIZES, DefaultsFormatter, at_least, make_config, positive, vocab_size
from finetune_report import Progress, Run, describe_machine, peak_memory_bytes, plot, reset_peak_memory, table, write_files
from stdlib_data import OUTPUTS, Corpus, Example, collate, load_corpus, load_tokenizer, padding_share, prompts_only, tokenize

PACKED = "hf_flash2-packed"  # hf_flash2.patch(model, packed=True): not attention alone, the whole decoder skips the padding
IMPLEMENTATIONS = ("eager", "sdpa", "hf_flash2", PACKED)
WARMUP_STEPS = 3  # left out of tokens per second
EVALUATION_EXAMPLES = 32
# Per family: the attention projections that get LoRA, and the embeddings and output layer that are trained in full.
LLAMA_TARGETS = (["q_proj", "k_proj", "v_proj", "o_proj"], ["embed_tokens", "lm_head"])
LORA_TARGETS = {"llama": LLAMA_TARGETS, "mistral": LLAMA_TARGETS, "gpt2": (["c_attn", "attn.c_proj"], ["wte", "lm_head"])}


@dataclass
class Job:
    """What every stage of the fine-tune needs to know."""

    args: argparse.Namespace
    accelerator: Accelerator
    corpus: Corpus
    tokenizer: PreTrainedTokenizerFast
    train: list[Example]
    evaluation: list[Example]

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.args.dtype)

    def say(self, text: object) -> None:
        if self.accelerator.is_main_process:
            print(text, flush=True)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    accelerator = Accelerator(cpu=args.device == "cpu" or not torch.cuda.is_available())
    quiet_libraries()
    args.dtype = args.dtype or ("float32" if accelerator.device.type == "cpu" else "bfloat16")
    job = prepare_job(args, accelerator)
    share = padding_share(job.train, args.batch_size)
    job.say(describe_machine(accelerator))
    job.say(f"data: {job.corpus}; batches of {args.batch_size} are {share:.0%} padding")

    base = make_base(job)
    if {"hf_flash2", PACKED} & set(args.implementation):
        check_parity(job, base)
    runs = []
    for implementation in args.implementation:
        runs.append(fine_tune(job, base, implementation))
        release_memory(accelerator)

    if accelerator.is_main_process:
        data = {"train": len(job.corpus.train), "evaluation": len(job.corpus.evaluation), "fingerprint": job.corpus.fingerprint}
        write_files(args, accelerator, data | {"padding_share": share}, runs)
        job.say("\n" + table(runs, accelerator.device))
        job.say(f"\ncurves: {plot(args, accelerator, runs)}")
        job.say(f"figures: {args.output_dir}/run.json, losses.csv; adapters: {args.output_dir}/adapter-*")
    accelerator.wait_for_everyone()
    accelerator.end_training()


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=DefaultsFormatter)
    parser.add_argument("--demo", action="store_true", help="every implementation, with defaults that suit this machine")
    parser.add_argument("--implementation", nargs="+", choices=IMPLEMENTATIONS, default=["eager", "hf_flash2"], help="one after the other")
    parser.add_argument("--how", choices=("flag", "patch"), default="flag", help="attn_implementation= at load, or hf_flash2.patch(model)")
    parser.add_argument("--model-type", choices=MODEL_TYPES, default="llama", help="family of the model")
    parser.add_argument("--size", choices=tuple(SIZES), default="tiny", help="of the model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="auto: a GPU where there is one")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="of every layer, without reentrance")
    parser.add_argument("--batch-size", type=at_least(1), default=16, help="per process")
    parser.add_argument("--max-length", type=at_least(16), default=1024, help="longer pairs are cut")
    parser.add_argument("--steps", type=at_least(1), default=40, help="of the LoRA fine-tune")
    parser.add_argument("--learning-rate", type=positive, default=3e-3, help="of the LoRA fine-tune")
    parser.add_argument("--base-steps", type=at_least(1), default=60, help="of the base model's training")
    parser.add_argument("--base-learning-rate", type=positive, default=3e-3, help="of the base model's training")
    parser.add_argument("--lora-rank", type=at_least(1), default=16, help="of every adapted projection")
    parser.add_argument("--new-tokens", type=at_least(1), default=48, help="generated at the end")
    parser.add_argument("--seed", type=at_least(0, 2**32 - 1), default=0, help="of weights and batches")
    parser.add_argument("--output-dir", type=Path, default=OUTPUTS / "finetune_lora", help="base model, adapters, figures")
    args = parser.parse_args(argv)
    if args.demo:
        parser.set_defaults(**demo_settings(args.device == "cpu" or not torch.cuda.is_available()))
        args = parser.parse_args(argv)  # what was given counts
    try:
        args.output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output-dir: {error}")
    return args


def demo_settings(on_cpu: bool) -> dict[str, object]:
    """The defaults of `--demo`: all implementations, within a few minutes on this machine."""
    every = {"implementation": list(IMPLEMENTATIONS)}
    if on_cpu:
        return every | {"size": "tiny", "max_length": 768, "steps": 40, "base_steps": 50}
    roomy = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory > 64 * 2**30
    sizes = {"size": "1b", "batch_size": 16} if roomy else {"size": "small", "batch_size": 8}
    return every | sizes | {"learning_rate": 5e-4, "base_learning_rate": 3e-4}


def prepare_job(args: argparse.Namespace, accelerator: Accelerator) -> Job:
    corpus = load_corpus()
    with accelerator.main_process_first():
        tokenizer = load_tokenizer(corpus, vocab_size(args.size), args.output_dir)
    train, evaluation = (tokenize(pairs, tokenizer, args.max_length) for pairs in (corpus.train, corpus.evaluation))
    return Job(args, accelerator, corpus, tokenizer, train, evaluation)


# ----------------------------------------------------------------------------------------------------------------------- base model


def make_base(job: Job) -> Path:
    """The folder of a base model trained with these settings, made if it is not there yet."""
    args, accelerator = job.args, job.accelerator
    settings = [args.model_type, args.size, args.dtype, args.max_length, args.batch_size * accelerator.num_processes]
    settings += [args.base_steps, args.base_learning_rate, args.seed, job.corpus.fingerprint]
    # GPT-2 has a position for each token, those that it is to write at the end included.
    positions = args.max_length + (args.new_tokens if args.model_type == "gpt2" else 0)
    settings += [positions] if positions != args.max_length else []
    folder = args.output_dir / f"base-{hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]}"
    if (folder / "config.json").is_file():
        job.say(f"base model: found in {folder}")
        return folder
    accelerate.utils.set_seed(args.seed)
    model = AutoModelForCausalLM.from_config(make_config(args.model_type, args.size, positions), attn_implementation="sdpa")
    job.say(f"\n== base model: {args.model_type} {args.size}, all {model.num_parameters() / 1e6:.1f} M weights, signatures and docstrings")
    losses, _ = train(job, model, prompts_only(job.train), args.base_steps, args.base_learning_rate)
    if accelerator.is_main_process:
        unfinished = folder.with_name(f"{folder.name}.unfinished")  # until all of it is there
        job.tokenizer.save_pretrained(unfinished)
        model.to(job.dtype).save_pretrained(unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    accelerator.wait_for_everyone()
    job.say(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; saved in {folder}")
    del model
    release_memory(accelerator)
    return folder


def load_base(job: Job, base: Path, implementation: str) -> PreTrainedModel:
    """The base with an attention implementation asked for by the flag; what is to be patched starts as eager."""
    name = "eager" if patch_options(job, implementation) is not None else implementation
    return AutoModelForCausalLM.from_pretrained(base, dtype=job.dtype, attn_implementation=name).to(job.device)


def patch_options(job: Job, implementation: str) -> dict[str, bool] | None:
    """With what hf_flash2.patch is called for an implementation; None where the flag does it."""
    if implementation == PACKED:
        return {"packed": True}
    return {} if job.args.how == "patch" and implementation == "hf_flash2" else None


def check_parity(job: Job, base: Path) -> None:
    """Is our difference from eager normal? Both against higher precision, on a ragged batch; stops the run if it is not."""
    batch = to_device(collate(job.evaluation[:4]), job.device)
    comparison = hf_flash2.verify(load_base(job, base, "eager"), {key: batch[key] for key in ("input_ids", "attention_mask")})
    job.say(f"\n== parity of the base's logits on a ragged batch: {comparison}")
    if not comparison.ok:
        raise SystemExit(f"hf_flash2 does not agree with eager attention: {comparison.verdict}")


# ----------------------------------------------------------------------------------------------------------------------- fine-tune


def fine_tune(job: Job, base: Path, implementation: str) -> Run:
    """LoRA on the base with one implementation: train, measure, save the adapter, reload it, generate."""
    args, device = job.args, job.device
    run = Run(implementation)
    model = add_lora(job, load_base(job, base, implementation))
    trained, total = model.get_nb_trainable_parameters()
    job.say(f"\n== LoRA with {implementation}: {trained / 1e6:.2f} M of {total / 1e6:.1f} M weights are trained")
    options = patch_options(job, implementation)
    report = None if options is None else hf_flash2.patch(model, **options)
    reset_peak_memory(device)
    try:
        run.evaluation_before = evaluation_loss(job, model)
        run.losses, run.tokens_per_second = train(job, model, job.train, args.steps, args.learning_rate)
        run.peak_memory_bytes = peak_memory_bytes(device)
        run.evaluation_after = evaluation_loss(job, model)
        check_is_finite(run.evaluation_after, "after training", args.learning_rate)
    except torch.OutOfMemoryError:
        run.failure = f"out of memory at batch {args.batch_size} x {args.max_length}"
        job.say(f"  {run.failure}")
        return run
    job.say(f"loss on unseen functions {run.evaluation_before:.4f} -> {run.evaluation_after:.4f}")
    if implementation in ("hf_flash2", PACKED):
        run.backend = hf_flash2.last_backend()
        job.say(report or f"attention ran on {run.backend}")
    if job.accelerator.is_main_process:
        reloaded = round_trip(job, model, base, implementation)
        run.completion = complete(job, reloaded)
    job.accelerator.wait_for_everyone()
    return run


def add_lora(job: Job, model: PreTrainedModel) -> peft.PeftModel:
    """LoRA on the attention, seeded so that every implementation starts from the same weights."""
    accelerate.utils.set_seed(job.args.seed)
    low_rank, in_full = LORA_TARGETS[job.args.model_type]
    lora = peft.LoraConfig(
        r=job.args.lora_rank,
        lora_alpha=2 * job.args.lora_rank,
        target_modules=low_rank,
        modules_to_save=in_full,
        fan_in_fan_out=job.args.model_type == "gpt2",  # GPT-2's Conv1D keeps its weights transposed
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(model, lora)
    if job.args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def round_trip(job: Job, model: peft.PeftModel, base: Path, implementation: str) -> peft.PeftModel:
    """Save the adapter, load it into a fresh base, and insist that the logits are the same."""
    folder = job.args.output_dir / f"adapter-{implementation}"
    model.save_pretrained(folder)
    fresh = peft.PeftModel.from_pretrained(load_base(job, base, implementation), folder)
    options = patch_options(job, implementation)
    if options is not None:
        hf_flash2.patch(fresh, **options)
    batch = to_device(collate(job.evaluation[:4]), job.device)
    with torch.no_grad():
        difference = (model.eval()(**batch).logits - fresh.eval()(**batch).logits).abs().max().item()
    if difference != 0:
        raise RuntimeError(f"the adapter reloaded from {folder} gives other logits than the trained model: they differ by {difference:.3g}")
    job.say(f"adapter saved in {folder}; reloaded into a fresh base, its logits are equal")
    return fresh


@torch.no_grad()
def complete(job: Job, model: peft.PeftModel) -> str:
    """What the model writes after the signature and docstring of a short function it has not seen."""
    prompt = next(pair.prompt for pair in job.corpus.evaluation if pair.prompt.startswith("def ") and pair.prompt.count("\n") == 2)
    cut = {"truncation": True, "max_length": job.args.max_length}
    inputs = job.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False, **cut).to(job.device)
    # Greedy, with what keeps a very young model from stopping at once or repeating itself.
    options = {"min_new_tokens": min(16, job.args.new_tokens), "do_sample": False, "repetition_penalty": 1.3}
    tokens = model.generate(**inputs, max_new_tokens=job.args.new_tokens, **options)
    completion = job.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    shown = [f"  | {line}" for line in prompt.splitlines()] + [f"  > {line}" for line in completion.splitlines()[:6]]
    job.say("\n".join(["completion of an unseen function (a model this young writes the shape of Python, not its sense):", *shown]))
    return completion


# ----------------------------------------------------------------------------------------------------------------------- training


def train(job: Job, model: nn.Module, examples: list[Example], steps: int, learning_rate: float) -> tuple[list[float], float]:
    """AdamW for a number of steps, on the same batches whatever the implementation.

    Returns the loss of each step and the real tokens per second, both over all processes.
    """
    accelerator = job.accelerator
    if len(examples) < job.args.batch_size * accelerator.num_processes:
        raise SystemExit(f"there are {len(examples)} examples of this length, fewer than a batch of each process; lower --batch-size")
    shuffle = torch.Generator().manual_seed(job.args.seed)
    loader = DataLoader(examples, job.args.batch_size, shuffle=True, drop_last=True, generator=shuffle, collate_fn=collate)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, weight_decay=0.0)
    model, optimizer, loader = accelerator.prepare(model.to(job.device).train(), optimizer, loader)
    losses, tokens, seconds = [], [], []
    progress = Progress(steps, accelerator.is_main_process)
    for step, batch in enumerate(itertools.islice(forever(loader), steps)):
        started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / (0.1 * steps))
        counts = torch.stack((batch["attention_mask"].sum(), target_count(batch)))
        real_tokens, targets = accelerator.reduce(counts, reduction="sum").tolist()
        with autocast(job):
            # The mean over the targets of all processes. DDP averages gradients, so each process divides by its share of them.
            loss = model(**batch, use_cache=False, num_items_in_batch=targets / accelerator.num_processes).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())  # waits for the device
        seconds.append(time.perf_counter() - started)
        tokens.append(real_tokens)
        check_is_finite(losses[-1], f"at step {step + 1}", learning_rate)
        progress.step(losses[-1], real_tokens / seconds[-1])
    progress.close()
    measured = slice(min(WARMUP_STEPS, steps - 1), None)
    return losses, sum(tokens[measured]) / sum(seconds[measured])


def check_is_finite(loss: float, when: str, learning_rate: float) -> None:
    if not math.isfinite(loss):
        raise RuntimeError(f"the loss is {loss} {when}; lower the learning rate ({learning_rate:g})")


@torch.no_grad()
def evaluation_loss(job: Job, model: nn.Module) -> float:
    """Mean loss over the bodies of a fixed set of unseen functions."""
    model.eval()
    examples = job.evaluation[:EVALUATION_EXAMPLES]
    total = targets = 0.0
    for first in range(0, len(examples), job.args.batch_size):
        batch = to_device(collate(examples[first : first + job.args.batch_size]), job.device)
        count = target_count(batch).item()
        with autocast(job):
            total += model(**batch, use_cache=False).loss.item() * count
        targets += count
    return total / targets


def target_count(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """How many tokens the loss is a mean of; nothing predicts the first one."""
    return (batch["labels"][:, 1:] >= 0).sum()


def autocast(job: Job) -> contextlib.AbstractContextManager:
    """In bfloat16 runs the products of float32 weights (the base in training, LoRA) are bfloat16 too."""
    return torch.autocast(job.device.type, job.dtype) if job.dtype != torch.float32 else contextlib.nullcontext()


def forever(loader: DataLoader) -> Iterator[dict[str, torch.Tensor]]:
    while True:
        yield from loader


def to_device(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def release_memory(accelerator: Accelerator) -> None:
    accelerator.free_memory()
    gc.collect()
    if accelerator.device.type == "cuda":
        torch.cuda.empty_cache()


def quiet_libraries() -> None:
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


if __name__ == "__main__":
    main()

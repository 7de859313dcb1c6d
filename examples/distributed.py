"""Train a Llama on several GPUs, each process with a ragged batch of its own: DDP and FSDP2, by attention implementation.

    torchrun --nproc_per_node 2 examples/distributed.py              # two GPUs: the shape of Llama 3.2 1B
    torchrun --nproc_per_node 2 examples/distributed.py --size tiny  # two processes on a CPU

A model is patched before it is wrapped, and that is all there is to it. Random weights and random tokens: what is measured is speed and
memory, and that every way computes the same loss.
"""

import argparse
import statistics
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_flash2
import processes
from demo_models import SIZES, at_least, make_config, vocab_size

STRATEGIES = ("ddp", "fsdp2")
PACKED = "hf_flash2 packed"
ARMS = ("sdpa", "hf_flash2", PACKED)
WARMUP_STEPS = 2
FIELDS = ("strategy", "arm", "real_tokens_per_s", "step_ms", "peak_gib", "loss")


def make_model(args: argparse.Namespace, arm: str, device: torch.device) -> PreTrainedModel:
    """The same random weights in every process and for every arm."""
    torch.manual_seed(0)
    config = make_config("llama", args.size, args.max_length, initializer_range=0.03)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
            attn_implementation="sdpa" if arm == "sdpa" else "hf_flash2",
        )
    if arm == PACKED:
        hf_flash2.patch(model, packed=True)
    return model.train()


def wrap(model: PreTrainedModel, strategy: str, device: torch.device) -> torch.nn.Module:
    if strategy == "ddp":
        return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def make_batch(args: argparse.Namespace, rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Random tokens padded on the right: a few long examples, many short ones, other lengths in every process."""
    generator = torch.Generator().manual_seed(rank)
    shares = torch.empty(args.batch_size).log_normal_(-1.3, 0.7, generator=generator).clamp(0.02, 1.0)
    lengths = shares.mul(args.max_length).int().clamp(min=2)
    ids = torch.randint(vocab_size(args.size), (args.batch_size, args.max_length), generator=generator)
    real = torch.arange(args.max_length) < lengths.unsqueeze(1)
    batch = {"input_ids": ids.where(real, 0), "attention_mask": real.long(), "labels": ids.where(real, -100)}
    return {name: x.to(device) for name, x in batch.items()}


def train(args: argparse.Namespace, rank: int, device: torch.device) -> Iterator[dict[str, object]]:
    """A row of figures for every strategy and arm: tokens of all processes together, memory of the fullest, the mean of their losses."""
    batch = make_batch(args, rank, device)
    totals = batch["attention_mask"].sum().float()
    dist.all_reduce(totals)
    for strategy in args.strategy:
        for arm in args.arms:
            model = wrap(make_model(args, arm, device), strategy, device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds = []
            for _ in range(WARMUP_STEPS + args.steps):
                processes.synchronize(device)
                start = time.perf_counter()
                loss = model(**batch, use_cache=False).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                processes.synchronize(device)
                seconds.append(time.perf_counter() - start)
            mean_loss = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean_loss)
            step = statistics.median(seconds[WARMUP_STEPS:])
            figures = (
                strategy,
                arm,
                round(totals.item() / step),
                round(1e3 * step, 1),
                processes.peak_gib(device),
                round(mean_loss.item(), 4),
            )
            yield dict(zip(FIELDS, figures, strict=True))
            del model, optimizer, loss
            if device.type == "cuda":
                torch.cuda.empty_cache()


def main(arguments: list[str] | None = None) -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", nargs="+", choices=STRATEGIES, default=list(STRATEGIES), help="default: both")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=", ".join(f'"{arm}"' for arm in ARMS))
    parser.add_argument("--size", choices=SIZES, default="1b" if on_gpu else "tiny", help="of the model (default here %(default)s)")
    parser.add_argument("--batch-size", type=at_least(1), default=16 if on_gpu else 4, help="examples a process (default here %(default)s)")
    parser.add_argument(
        "--max-length", type=at_least(2), default=2048 if on_gpu else 128, help="tokens of a padded example (default here %(default)s)"
    )
    parser.add_argument("--steps", type=at_least(1), default=8, help=f"timed steps, behind {WARMUP_STEPS} that are not (default 8)")
    parser.add_argument("--csv", type=processes.new_file, metavar="PATH", help="write the table there, too")
    args = parser.parse_args(arguments)
    device = processes.join(parser, "distributed.py")
    rank = dist.get_rank()
    if rank == 0:
        print(f"{processes.where()}: {args.size}, {args.batch_size} x {args.max_length} tokens each")
        print(f"{'':8}{'':18}{'real tokens/s':>14}{'ms/step':>10}{'peak GiB':>10}{'loss':>10}")
    rows = []
    for row in train(args, rank, device):
        rows.append(row)
        if rank == 0:
            print("{:8}{:18}{:>14,}{:>10}{:>10}{:>10}".format(*row.values()), flush=True)
    if rank == 0 and args.csv:
        processes.write_csv(args.csv, FIELDS, rows)
    processes.leave()


if __name__ == "__main__":
    main()

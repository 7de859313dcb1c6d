"""Train a Llama on sequences that several GPUs share: torch's context parallelism with FSDP2, by attention implementation.

    torchrun --nproc_per_node 2 examples/long_context.py              # two GPUs: the shape of Llama 3.2 1B on 64k tokens
    torchrun --nproc_per_node 2 examples/long_context.py --size tiny  # two processes on a CPU
    torchrun --nproc_per_node 2 examples/long_context.py --documents 8  # a row of eight documents, which do not see each other

Each process has a part of every sequence; attention alone needs the others. Nothing but the flag is about hf_flash2. With accelerate,
`accelerator.maybe_context_parallel(...)` takes the place of `context_parallel(mesh, ...)`. Random weights and random tokens: what is
measured is speed and memory, and that every way computes the loss that one process has for the whole sequence.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_flash2
import processes
from demo_models import SIZES, at_least, make_config, vocab_size

IGNORED = -100
ARMS = ("sdpa", "hf_flash2")
WARMUP_STEPS = 2
FIELDS = ("arm", "tokens_per_s", "step_ms", "peak_gib", "loss")


def make_model(args: argparse.Namespace, arm: str, device: torch.device) -> PreTrainedModel:
    """The same random weights in every process and for every arm."""
    torch.manual_seed(0)
    config = make_config("llama", args.size, args.seqlen, initializer_range=0.03)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=arm)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # its name in Transformers 5.24, and before
    return model.train()


def make_batch(args: argparse.Namespace, device: torch.device) -> dict[str, torch.Tensor]:
    """A whole row, the same in every process: [1, S]. What each token predicts is known before it is cut, and so is its position."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size(args.size), (args.seqlen,), generator=generator)
    lengths = torch.rand(args.documents, generator=generator) + 0.2
    ends = (lengths.cumsum(0) / lengths.sum() * args.seqlen).round().int().tolist()
    documents = ids.tensor_split(ends[:-1])
    batch = hf_flash2.PackingCollator()([{"input_ids": document} for document in documents])
    batch = {name: batch[name].to(device) for name in ("input_ids", "labels", "position_ids")}
    batch["shift_labels"] = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    if args.documents == 1:  # without a mask Transformers takes positions that jump, from chunk to chunk, for those of several documents
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return batch


def whole_loss(args: argparse.Namespace, device: torch.device) -> float:
    """Of one process that has the whole row, before any step."""
    model = make_model(args, "sdpa", device)
    with torch.no_grad():
        return model(**make_batch(args, device), use_cache=False).loss.item()


def train(args: argparse.Namespace, mesh: DeviceMesh, arm: str, device: torch.device) -> dict[str, object]:
    """The figures of an arm: tokens of all processes together, memory of the fullest, the first loss."""
    model = make_model(args, arm, device)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, losses = [], []
    for _ in range(WARMUP_STEPS + args.steps):
        batch = make_batch(args, device)
        processes.synchronize(device)
        start = time.perf_counter()
        buffers = list(batch.values())
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)):
            loss = model(**batch, use_cache=False).loss  # batch holds this process's part of the sequence now
            loss.backward()  # inside: checkpointed layers run again in it
        optimizer.step()
        optimizer.zero_grad()
        processes.synchronize(device)
        seconds.append(time.perf_counter() - start)
        labels = (batch["shift_labels"] != IGNORED).sum()
        total = torch.stack((loss.detach() * labels, labels.float()))
        dist.all_reduce(total)
        losses.append((total[0] / total[1]).item())
    step = statistics.median(seconds[WARMUP_STEPS:])
    figures = (arm, round(args.seqlen / step), round(1e3 * step, 1), processes.peak_gib(device), round(losses[0], 4))
    return dict(zip(FIELDS, figures, strict=True))


def main(arguments: list[str] | None = None) -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=ARMS,
        metavar="ARM",
        help="sdpa and hf_flash2; sdpa shares whole sequences alone, on GPUs alone",
    )
    parser.add_argument("--size", choices=SIZES, default="1b" if on_gpu else "tiny", help="of the model (default here %(default)s)")
    parser.add_argument(
        "--seqlen",
        type=at_least(2),
        default=65536 if on_gpu else 256,
        help="tokens of the row, of all processes (default here %(default)s)",
    )
    parser.add_argument("--documents", type=at_least(1), default=1, help="that the row holds (default 1: it is one sequence)")
    parser.add_argument("--steps", type=at_least(1), default=5, help=f"timed steps, behind {WARMUP_STEPS} that are not (default 5)")
    parser.add_argument("--csv", type=processes.new_file, metavar="PATH", help="write the table there, too")
    args = parser.parse_args(arguments)
    chunks = 2 * int(os.environ.get("WORLD_SIZE", 1))
    if args.seqlen % chunks:
        parser.error(f"--seqlen: must be a multiple of {chunks}, two chunks for each process, got {args.seqlen}")
    if args.documents * 8 > args.seqlen:
        parser.error(f"--documents: at most {args.seqlen // 8}, an eighth of the tokens, got {args.documents}")
    shared_by = ARMS if on_gpu and args.documents == 1 else ("hf_flash2",)
    args.arms = args.arms or list(shared_by)
    if not set(args.arms) <= set(shared_by):
        parser.error("--arms: torch's sdpa shares sequences on GPUs alone, and whole ones alone")

    device = processes.join(parser, "long_context.py")
    rank = dist.get_rank()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
    reference = whole_loss(args, device)
    if rank == 0:
        what = "one sequence" if args.documents == 1 else f"{args.documents} documents in a row"
        print(f"{processes.where()}: {args.size}, {what} of {args.seqlen} tokens")
        print(f"loss of the whole row in one process: {reference:.4f}")
        print(f"{'':12}{'tokens/s':>10}{'ms/step':>10}{'peak GiB':>10}{'loss':>10}")
    rows = []
    for arm in args.arms:
        rows.append(train(args, mesh, arm, device))
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if rank == 0:
            print("{:12}{:>10,}{:>10}{:>10}{:>10.4f}".format(*rows[-1].values()), flush=True)
    if rank == 0 and args.csv:
        processes.write_csv(args.csv, FIELDS, rows)
    if not all(abs(row["loss"] - reference) <= (2e-3 if on_gpu else 1e-4) for row in rows):  # NaN is not
        raise SystemExit(f"the losses are not that of the whole row, {reference:.4f}")
    processes.leave()


if __name__ == "__main__":
    main()

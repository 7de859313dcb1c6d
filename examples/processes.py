"""What the examples of several processes share: how a process that torchrun started joins the others, waits for them, and reports."""

import argparse
import csv
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist


def join(parser: argparse.ArgumentParser, script: str) -> torch.device:
    """Become one of the processes that torchrun started: the device of this one. Without torchrun, an error of the parser says how."""
    if "LOCAL_RANK" not in os.environ:
        parser.error(f"torchrun has to start its processes: torchrun --nproc_per_node 2 examples/{script}")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    return device


def leave() -> None:
    dist.barrier()  # no process leaves while another still needs it
    dist.destroy_process_group()


def where() -> str:
    """How many processes there are, and on what."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{dist.get_world_size()} processes, {name}, torch {torch.__version__}"


def new_file(text: str) -> Path:
    """The type of --csv: a file that can be written, its folder made where it is missing."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except FileExistsError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {path.parent} is no folder") from error
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror}") from error
    return path


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def peak_gib(device: torch.device) -> float:
    """Of the fullest GPU, since its count was reset; 0 on a CPU."""
    peak = torch.tensor(float(torch.cuda.max_memory_allocated() if device.type == "cuda" else 0), device=device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return round(peak.item() / 2**30, 1)


def write_csv(path: Path, fields: Sequence[str], rows: Sequence[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(rows)

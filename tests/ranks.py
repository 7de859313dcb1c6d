"""Several processes on this machine, joined by gloo, for the tests of distributed training."""

import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist


def run(module: str, function: str, folder: Path, processes: int = 2) -> None:
    """Run module.function(rank, folder) of a test file in processes that can talk to each other; raises what one printed that failed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    arguments = f"{module}.{function}, {{}}, {processes}, {str(folder)!r}"
    code = f"import conftest, ranks, {module}; ranks.join({arguments})"  # conftest: from a bare checkout
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code.format(rank)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(processes)
    ]
    try:
        for process in running:
            output, _ = process.communicate(timeout=200)
            assert process.returncode == 0, output
    finally:
        for process in running:  # that wait for one that failed
            process.kill()


def join(function, rank: int, processes: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))  # as torchrun says it
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=processes)
    function(rank, folder)
    dist.barrier()  # no rank leaves while another still needs it
    os._exit(0)  # gloo's threads can hang the interpreter's shutdown: seen once, on a busy machine, after everything had been checked

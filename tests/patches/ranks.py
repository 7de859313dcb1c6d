"""Two processes on this machine, joined by gloo, for the tests of distributed training."""

import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist


def run_two(module: str, function: str, folder: Path) -> None:
    """Run module.function(rank, folder) of this folder's tests in two processes that can talk to each other; raises what either printed."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    code = f"import conftest, ranks, {module}; ranks.join({module}.{function}, {{}}, {str(folder)!r})"  # conftest: from a bare checkout
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code.format(rank)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output


def join(function, rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    function(rank, folder)
    dist.barrier()  # neither rank leaves while the other still needs it
    os._exit(0)  # gloo's threads can hang the interpreter's shutdown: seen once, on a busy machine, after everything had been checked

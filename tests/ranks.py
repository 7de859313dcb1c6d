"""Several processes on this machine, joined by gloo, for the tests of distributed training."""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch.distributed as dist

SECONDS = 200  # that all ranks may take


def run(module: str, function: str, folder: Path, processes: int = 2) -> None:
    """Run module.function(rank, folder) of a test file in processes that can talk to each other; raises what they printed if one fails.

    A rank has passed when it says so in a file, and none ends by itself: what gloo does at the end of a process, and to the peers that see
    it, is not what is tested, and has hung after everything had been checked.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    arguments = f"{module}.{function}, {{}}, {processes}, {str(folder)!r}"
    code = f"import conftest, ranks, {module}; ranks.join({arguments})"  # conftest: from a bare checkout
    outputs = [folder / f"output-{rank}" for rank in range(processes)]
    passed = [folder / f"passed-{rank}" for rank in range(processes)]
    running = []
    try:
        for rank, path in enumerate(outputs):
            command = [sys.executable, "-X", "faulthandler", "-c", code.format(rank)]
            with path.open("w") as output:
                running.append(subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT))
        end = time.monotonic() + SECONDS
        while not all(path.exists() for path in passed):
            status = [process.poll() for process in running]  # None: runs; negative: the signal that ended it
            if any(code is not None for code in status) or time.monotonic() > end:
                printed = "\n".join(f"rank {rank}, exit status {status[rank]}:\n{path.read_text()}" for rank, path in enumerate(outputs))
                raise AssertionError(f"{module}.{function} has not passed in all ranks\n{printed}")
            time.sleep(0.02)
    finally:
        for process in running:
            process.kill()
            process.communicate()


def join(function, rank: int, processes: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))  # as torchrun says it
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=processes)
    function(rank, folder)
    (Path(folder) / f"passed-{rank}").touch()
    sys.stdin.read()  # until run kills this process, or has ended itself
    os._exit(0)

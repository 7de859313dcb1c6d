"""The command line: `hf-flash2 info | build | parity | bench | run`, also as `python -m hf_flash2`.

Each command is a module with add_arguments(parser) and run(args) -> exit code, imported only when it is the one asked for.
Exit codes: 0 all right, 1 a problem was found, 2 wrong usage, 141 nobody reads the output any more.
"""

import argparse
import os
import signal
import sys
from importlib import import_module

from . import __version__, torch_problem

COMMANDS = {
    "info": "versions, GPUs, the CUDA library, and which backend runs for which case",
    "build": "compile the CUDA library of this package",
    "parity": "compare hf_flash2 with eager attention and say whether the difference is normal",
    "bench": "time attention kernels, or a training step, against torch's",
    "run": "another program, with hf_flash2 imported first",
}
NEED_TORCH = ("parity", "bench", "run")


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code. `argv` defaults to the arguments of the process."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="hf-flash2", description="FlashAttention-2 for Hugging Face Transformers.")
    parser.add_argument("--version", action="version", version=f"hf_flash2 {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    for name, summary in COMMANDS.items():
        subparser = commands.add_parser(name, help=summary, description=f"hf-flash2 {name}: {summary}.")
        if argv[:1] == [name]:
            if name in NEED_TORCH and torch_problem is not None:
                print(f"hf-flash2 {name} needs torch: {torch_problem}", file=sys.stderr)
                return 1
            try:
                command = import_module(f"hf_flash2.{name}")
            except ModuleNotFoundError as error:
                if error.name != "transformers":
                    raise
                print(f"hf-flash2 {name} needs Transformers: pip install transformers", file=sys.stderr)
                return 1
            command.add_arguments(subparser)
            subparser.set_defaults(run=command.run)
    is_program = argv[:1] == ["run"] and len(argv) > 1 and not argv[1].startswith("-")
    args = parser.parse_args(argv[:2] if is_program else argv)
    if is_program:  # argparse would take the first "--" away from what is the program's
        args.arguments = argv[2:]
        return args.run(args)
    if args.command in NEED_TORCH:
        from . import info

        if problems := info.environment_problems(info.OF_CALLS):
            print(f"hf-flash2 {args.command}: {problems[0]}", file=sys.stderr)
            return 2
    try:
        code = args.run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # who reads has what it wanted, as `head` has; nothing may be written at the end, either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code


if __name__ == "__main__":
    sys.exit(main())

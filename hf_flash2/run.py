"""`hf-flash2 run PROGRAM ...`: another Python program in this process, with hf_flash2 imported first.

For programs whose options name the attention implementation, and which nobody can make import a package: lm_eval, `transformers serve`.
Launchers start processes of their own, which know nothing of this one: `torchrun ... -m hf_flash2 run train.py` in place of
`hf-flash2 run torchrun ... train.py`, which says so. TRL's command starts one, too: `hf-flash2 run trl.scripts.sft` for `trl sft`.
"""

import argparse
import importlib.util
import os
import runpy
import sys
from importlib.metadata import entry_points

# What starts Python again for the program that it is given, with the option for one that is a module.
_LAUNCHERS = {
    "torchrun": "-m", "torch.distributed.run": "-m", "torch.distributed.launch": "-m", "accelerate launch": "-m", "accelerate-launch": "-m",
    "accelerate.commands.launch": "-m", "deepspeed": "--module",
}  # fmt: skip
_TRL = ("distillation", "dpo", "grpo", "kto", "reward", "rloo", "sft")  # commands of trl, which are modules as well


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hf-flash2 run`."""
    parser.add_argument("program", metavar="PROGRAM", help="the name of a command that pip installed, of a module, or a file ending in .py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="are handed on to it")


def run(args: argparse.Namespace) -> int:
    """Run the program as its own command would. Returns its exit code, unless it raises SystemExit itself; 2 where there is none."""
    advice = {name: f"{name} ... {module} hf_flash2 run PROGRAM ..." for name, module in _LAUNCHERS.items()}
    for name in _TRL:
        module = f"run trl.scripts.{name} ..."
        advice[f"trl {name}"] = f"hf-flash2 {module}, or accelerate launch ... -m hf_flash2 {module}"
    for name in (args.program, " ".join((args.program, *args.arguments[:1]))):
        if name in advice and "hf_flash2" not in args.arguments:
            print(
                f"hf-flash2 run: {name} starts processes of its own, which do not import hf_flash2 for that; to have them do so: "
                f"{advice[name]}",
                file=sys.stderr,
            )
    sys.argv = [args.program, *args.arguments]
    if args.program.endswith(".py") and os.path.isfile(args.program):
        sys.path.insert(0, os.path.dirname(os.path.abspath(args.program)))  # as Python does for a file
        runpy.run_path(args.program, run_name="__main__")
        return 0
    commands = entry_points(group="console_scripts", name=args.program)
    if commands:
        return next(iter(commands)).load()() or 0
    sys.path.insert(0, os.getcwd())  # as python -m does
    if _is_module(args.program):
        runpy.run_module(args.program, run_name="__main__", alter_sys=True)
        return 0
    print(f"hf-flash2 run: {args.program!r} is no command that pip installed, no module and no file ending in .py", file=sys.stderr)
    return 2


def _is_module(name: str) -> bool:
    try:
        found = importlib.util.find_spec(name)
        is_package = found is not None and found.submodule_search_locations is not None
        return importlib.util.find_spec(f"{name}.__main__") is not None if is_package else found is not None
    except (ImportError, ValueError):  # a part of the name is none, or it is no name
        return False

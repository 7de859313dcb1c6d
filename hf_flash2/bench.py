"""`hf-flash2 bench attention | train`: the benchmarks, a module each.

attention   our kernels, family by family, against torch's own, over several kinds of shapes
train       one optimisation step of a Llama- or Gemma-4-shaped model, by attention implementation
"""

import argparse

from . import bench_attention, bench_train

BENCHMARKS = {"attention": bench_attention, "train": bench_train}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hf-flash2 bench`."""
    benchmarks = parser.add_subparsers(dest="what", required=True, metavar="|".join(BENCHMARKS))
    for name, module in BENCHMARKS.items():
        summary = (module.__doc__ or ": ").split(": ", 1)[1].split(".\n", 1)[0]  # python -OO has no docstrings
        subparser = benchmarks.add_parser(name, help=" ".join(summary.split()), description=module.__doc__)
        module.add_arguments(subparser)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark that was asked for. Returns the exit code."""
    return BENCHMARKS[args.what].run(args)

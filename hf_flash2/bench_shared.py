"""What the benchmarks share: lengths of a ragged batch, options, statistics, where the numbers come from, CSV files, figures."""

import argparse
import contextlib
import csv
import datetime
import gc
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch

from . import __version__

LOG_NORMAL_SIGMA = 0.8  # of the logarithm of a length: instruction data lies between 0.7 and 1
SEED = 0


def positive(text: str) -> int:
    """The number of a command-line option that must be at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number from 1 on, got {text!r}")
    return int(text)


def probability(text: str) -> float:
    """The number of a command-line option that must lie between 0 and 1, both excluded."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number between 0 and 1, got {text!r}")


def ragged_lengths(batch: int, seqlen: int, fill: float, seed: int = SEED) -> tuple[int, ...]:
    """Log-normal lengths of `batch` sequences padded to seqlen, which cuts the longest; real tokens are the share `fill` of them all.

    Raises:
        ValueError: no lengths between 1 and seqlen have this fill.
    """
    if not 1 / seqlen <= fill <= 1:
        raise ValueError(f"fill must be between 1 token a row ({1 / seqlen:g}) and 1, got {fill}")
    factors = (LOG_NORMAL_SIGMA * torch.randn(batch, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).exp()
    low, high = 0.0, seqlen / factors.min().item()  # of the median length; tokens grow with it
    for _ in range(60):
        median = (low + high) / 2
        lengths = (median * factors).round().clamp(1, seqlen)
        low, high = (median, high) if lengths.sum() < fill * batch * seqlen else (low, median)
    return tuple(int(n) for n in (high * factors).round().clamp(1, seqlen))


def middle(samples: Sequence[float]) -> tuple[float, float, float]:
    """20th percentile, median and 80th percentile."""
    return tuple(torch.quantile(torch.tensor(samples, dtype=torch.float64), torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist())


def describe_environment(device: torch.device) -> dict[str, str]:
    """Where the numbers come from."""
    cudnn = torch.backends.cudnn.version() or 0
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else f"no GPU ({platform.machine()} CPU)",
        "hf_flash2": __version__,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": f"{cudnn // 10000}.{cudnn % 10000 // 100}.{cudnn % 100}",
        "date": datetime.date.today().isoformat(),
    }


def release_memory(device: torch.device) -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def as_title(environment: dict[str, str]) -> str:
    """The environment in one line."""
    return ", ".join(value if name == "gpu" else f"{name} {value}" for name, value in environment.items())


def write_csv(path: Path, row_type: type, rows: Sequence[Any], environment: dict[str, str]) -> None:
    """Long format: one measurement (a dataclass of row_type) a line, everything needed to read it beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*(field.name for field in fields(row_type)), *environment])
        writer.writeheader()
        for row in rows:
            values = {name: f"{value:.5g}" if isinstance(value, float) else value for name, value in asdict(row).items()}
            writer.writerow(values | environment)


def read_csv(path: Path, row_type: type) -> tuple[list[Any], dict[str, str]]:
    """What write_csv wrote: the rows, and the environment, which has to be one for all.

    Raises:
        ValueError: it is not such a file.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:  # a spreadsheet may have put a mark before it
        lines = list(csv.DictReader(file))
    if not lines:
        raise ValueError("it has no lines")
    newer = {field.name for field in fields(row_type) if field.default is not MISSING}  # columns that an older file may lack
    types = {name: kind for name, kind in get_type_hints(row_type).items() if name in lines[0] or name not in newer}
    missing = next((name for name in types if name not in lines[0]), None)
    if missing is not None:
        raise ValueError(f"it has no column {missing}")
    short = next((number for number, line in enumerate(lines, start=2) if None in line.values()), None)
    if short is not None:
        raise ValueError(f"line {short} is cut short")
    environments = [{name: value for name, value in line.items() if name not in types} for line in lines]
    different = next((environment for environment in environments if environment != environments[0]), None)
    if different is not None:
        raise ValueError(f"it is of more than one run: {as_title(environments[0])}; {as_title(different)}")
    return [row_type(**{name: read_value(line[name], kind) for name, kind in types.items()}) for line in lines], environments[0]


def read_value(text: str, kind: Any) -> Any:
    """A value of a dataclass as write_csv writes it; kind: bool, int, float, str, or one of them or None."""
    options = get_args(kind) or (kind,)
    if text == "" and type(None) in options:
        return None
    return text == "True" if options[0] is bool else options[0](text)


def path_ending_in(*suffixes: str) -> Callable[[str], Path]:
    """The type of an option that names a file which cannot be of any kind."""

    def path(text: str) -> Path:
        if Path(text).suffix not in suffixes:
            raise argparse.ArgumentTypeError(f"must end in {', '.join(suffixes)}, got {text!r}")
        return Path(text)

    return path


def reason_no_figure() -> str | None:
    """Why nothing can be drawn here, or None: to be asked before anything is measured."""
    try:
        import matplotlib.pyplot  # noqa: F401
    except Exception as error:  # not there, broken, or given a wrong MPLBACKEND
        return f"a figure needs matplotlib: pip install matplotlib ({error})"
    return None


def reason_not_writable(*paths: Path | None) -> str | None:
    """Why one of these files cannot be written, or None: to be asked before anything is measured. Makes their folders."""
    given = [path for path in paths if path is not None]
    for path in given:
        if given.count(path) > 1:
            return f"{path} cannot be written: it is asked for twice"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not path.exists()
            path.open("a").close()
            if is_new:
                path.unlink()
        except FileExistsError:
            return f"{path} cannot be written: {path.parent} is no folder"
        except OSError as error:
            return f"{path} cannot be written: {error.strerror}"
    return None


def plot_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds --plot, and --from-csv for draw_again()."""
    parser.add_argument("--plot", type=path_ending_in(".png", ".pdf", ".svg"), metavar="PATH", help=f"draw {what} (needs matplotlib)")
    parser.add_argument("--from-csv", type=Path, metavar="PATH", help="draw the --plot of a file of --csv; nothing is measured")


def draw_again(args: argparse.Namespace, row_type: type, plot: Callable[[Path, list[Any], dict[str, str]], None]) -> int:
    """--from-csv: the figure of rows that were measured before. Returns the exit code: 2, with the reason on stderr, where it cannot be."""
    try:
        if args.plot is None:
            raise ValueError("--plot PATH has to say where the figure goes")
        for option in ("csv", "profile"):
            if getattr(args, option, None) is not None:
                raise ValueError(f"nothing is measured, so there is nothing to write to --{option} {getattr(args, option)}")
        rows, environment = read_csv(args.from_csv, row_type)
        reason = reason_no_figure() or reason_not_writable(args.plot)
        if reason is not None:
            raise ValueError(reason)
        plot(args.plot, rows, environment)
    except (OSError, ValueError, TypeError, ArithmeticError) as error:  # the latter of numbers that nothing was measured as
        print(f"--from-csv {args.from_csv}: {error}", file=sys.stderr)
        return 2
    return 0


@contextlib.contextmanager
def figure(path: Path, rows: int, columns: int, size: tuple[float, float], environment: dict[str, str], **options: Any) -> Iterator[tuple]:
    """A matplotlib figure and its axes [rows][columns], titled with the environment, saved at the end of the with block."""
    reason = reason_no_figure()
    if reason is not None:
        raise SystemExit(reason)
    import matplotlib  # here: what is only measured does not need it

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, **options)
    drawn.suptitle(as_title(environment), fontsize=9, y=1 - 0.08 / size[1], va="top")
    try:
        yield drawn, axes
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path, dpi=150)
    finally:
        plt.close(drawn)


def legend_below(drawn: Any, legend: dict[str, Any], columns: int) -> None:
    """Put a legend (label -> what was drawn) below the panels of a figure, and lay them out."""
    columns = min(columns, len(legend))
    height = drawn.get_figheight()
    drawn.legend(legend.values(), legend.keys(), loc="lower center", ncols=columns, frameon=False, fontsize=9)
    drawn.tight_layout(rect=(0, (0.15 + 0.19 * -(-len(legend) // columns)) / height, 1, 1))

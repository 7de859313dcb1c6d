"""The command line: dispatch, exit codes, and `info`, which must work on any machine, broken ones included."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch

import hf_flash2
from hf_flash2 import bench_attention, build, cli, info, native, run

ROOT = Path(__file__).resolve().parents[1]
needs_compiler = pytest.mark.skipif(build.reason_not_buildable() is not None, reason=f"{build.reason_not_buildable()}")


def read_info(capsys) -> dict:
    assert cli.main(["info", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def no_library(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_FLASH2_LIBRARY", str(tmp_path / "absent.so"))
    native.library.cache_clear()
    native.check_device.cache_clear()
    yield tmp_path / "absent.so"
    native.library.cache_clear()
    native.check_device.cache_clear()


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["info", "--no-such-option"], ["build", "--archs"]])
def test_wrong_usage_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "usage: hf-flash2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        *((["parity", "--seqlen", n], f"--seqlen: must be a number from 32 on, got '{n}'") for n in ("31", "1", "0", "-3", "x")),
        (["parity", "--device", "foo"], "--device: must be cpu, cuda or cuda:N, got 'foo'"),
        (["parity", "--device", "meta"], "--device: must be cpu, cuda or cuda:N, got 'meta'"),
        *((["parity", "--seed", n], f"--seed: must be a number from 0 to 2**63 - 1, got '{n}'") for n in (str(2**63), "-1", "x")),
        (["bench", "train", "--turns", "0"], "--turns: must be a number from 1 on, got '0'"),
        (["bench", "train", "--steps", "-1"], "--steps: must be a number from 1 on, got '-1'"),
        (["bench", "attention", "--seqlen", "512", "0"], "--seqlen: must be a number from 1 on, got '0'"),
        (["bench", "attention", "--window", "-5"], "--window: must be a number from 1 on, got '-5'"),
        *((["bench", "attention", "--dropout", p], f"--dropout: must be a number between 0 and 1, got '{p}'") for p in ("0", "1", "x")),
        (["bench", "attention", "--plot", "rates.xyz"], "--plot: must end in .png, .pdf, .svg, got 'rates.xyz'"),
        (["bench", "train", "--plot", "rates"], "--plot: must end in .png, .pdf, .svg, got 'rates'"),
        *((["build", f"--{name}", ""], f"--{name}: must not be empty") for name in ("archs", "head-dims", "build-folder", "output")),
    ],
)
def test_a_value_that_cannot_be_is_wrong_usage(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--archs", "75", "must list compute capabilities from 80 on"),
        ("--csrc", "no/such/folder", "must be a folder of kernel sources"),
        pytest.param("--head-dims", "72", "must be among ", marks=needs_compiler),
    ],
)
def test_a_build_option_that_cannot_be_is_wrong_usage(option, value, message, tmp_path, capsys):
    assert cli.main(["build", option, value, "--build-folder", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert message in said and value in said


def test_every_command_of_the_readme_is_right_usage(monkeypatch):
    text = (ROOT / "README.md").read_text()
    quoted = re.findall(r"`hf-flash2 ([^`]+)`", text) + [line.split("#")[0] for line in re.findall(r"^hf-flash2 (.+)$", text, re.MULTILINE)]
    for name in cli.COMMANDS:
        monkeypatch.setattr(cli.import_module(f"hf_flash2.{name}"), "run", lambda args: 7)
    assert len(quoted) > 10
    assert {argv: cli.main(shlex.split(argv)) for argv in quoted} == dict.fromkeys(quoted, 7)


def test_help_lists_every_command_without_importing_it(capsys, monkeypatch):
    monkeypatch.setattr(cli, "import_module", lambda name: pytest.fail(f"{name} was imported"))
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("info", "build", "parity", "bench"))


@pytest.mark.parametrize("name", ["parity", "bench"])
def test_command_gets_its_arguments_and_gives_the_exit_code(monkeypatch, name):
    command = types.ModuleType(name)
    command.add_arguments = lambda parser: parser.add_argument("--count", type=int)
    command.run = lambda args: args.count
    monkeypatch.setitem(sys.modules, f"hf_flash2.{name}", command)
    assert cli.main([name, "--count", "7"]) == 7


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_who_hangs_up_ends_it_quietly(unbuffered):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "hf_flash2", "info"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": unbuffered})
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_bench_needs_no_docstrings(monkeypatch, capsys):
    """python -OO takes them away."""
    monkeypatch.setattr(bench_attention, "__doc__", None)
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "attention", "--help"])
    assert caught.value.code == 0
    assert "--seqlen" in capsys.readouterr().out


def test_build_that_cannot_be_done_exits_with_1(monkeypatch, capsys):
    monkeypatch.setenv("HF_FLASH2_SKIP_CUDA", "1")
    assert cli.main(["build"]) == 1
    assert "HF_FLASH2_SKIP_CUDA" in capsys.readouterr().err


@pytest.mark.parametrize("strict", ["0", "sometimes"])  # whatever the environment says: info is there to show it
def test_python_dash_m_runs_info(strict):
    environment = os.environ | {"HF_FLASH2_STRICT": strict}
    done = subprocess.run([sys.executable, "-m", "hf_flash2", "info", "--json"], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["versions"]["hf_flash2"] == build.package_version()
    assert report["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert not [name for name, section in report.items() if isinstance(section, dict) and set(section) == {"error"}]


def test_info_shows_what_is_no_text():
    environment = os.environb | {b"HF_FLASH2_LIBRARY": b"/tmp/\xff.so", b"PYTHONIOENCODING": b"utf-8:strict"}
    done = subprocess.run([sys.executable, "-m", "hf_flash2", "info"], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "/tmp/\\udcff.so" in done.stdout, done.stderr


def test_info_without_a_stdout():
    done = subprocess.run(f"exec {sys.executable} -m hf_flash2 info >&-", shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- run ---------------------------------------------------------------------------------------------------------------------------


def run_program(*argv: str, folder: Path) -> subprocess.CompletedProcess:
    as_a_command = "import sys; sys.path.remove(''); from hf_flash2.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", as_a_command, "run", *argv]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=60)


PROGRAM = """
import os, sys
os.chdir("/")
from this import CODE  # what lies beside it comes before the standard library
print(__name__, sys.argv[1:], "hf_flash2" in sys.modules)
{end}
"""


@pytest.mark.parametrize(("end", "code"), [("sys.exit(sys.modules[__name__].CODE)", 7), ("", 0)])
@pytest.mark.parametrize("how", ["file", "module"])
def test_run_runs_a_file_or_a_module_as_python_would(how, end, code, tmp_path):
    folder = tmp_path / "programs" if how == "file" else tmp_path
    folder.mkdir(exist_ok=True)
    (folder / "this.py").write_text("CODE = 7")
    (folder / "program.py").write_text(PROGRAM.format(end=end))
    done = run_program("programs/program.py" if how == "file" else "program", "--", "--help", "-x", "3", folder=tmp_path)
    assert (done.returncode, done.stdout) == (code, "__main__ ['--', '--help', '-x', '3'] True\n"), done.stderr


def test_run_runs_a_command_that_pip_installed(tmp_path):
    (tmp_path / "pluggy.py").write_text("raise SystemExit('what lies in the folder hides what pytest imports')")
    (tmp_path / "pytest").write_text("raise SystemExit('a file is run by a name that ends in .py')")
    done = run_program("pytest", "--version", folder=tmp_path)
    assert done.returncode == 0 and f"pytest {pytest.__version__}" in done.stdout + done.stderr


def test_the_exit_code_of_a_command_is_that_of_run(monkeypatch):
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    command = types.SimpleNamespace(load=lambda: lambda: 3 if sys.argv == ["tool", "serve", "--port", "1"] else 4)
    monkeypatch.setattr(run, "entry_points", lambda group, name: [command] if (group, name) == ("console_scripts", "tool") else [])
    assert cli.main(["run", "tool", "serve", "--port", "1"]) == 3


@pytest.mark.parametrize("program", ["no_such_program", "no.such.module", "absent.py", "..", "", "a_folder", "a_folder.py"])
def test_run_of_what_is_not_there_is_wrong_usage(program, monkeypatch, capsys, tmp_path):
    for folder in ("a_folder", "a_folder.py"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(["run", program]) == 2
    assert f"hf-flash2 run: {program!r} is no command that pip installed, no module and no file ending in .py" in capsys.readouterr().err


def test_run_of_a_launcher_says_that_its_processes_do_not_import_it(tmp_path):
    """And how they do, which is done here as it says."""
    (tmp_path / "program.py").write_text("import sys; print(sys.argv[1:], 'hf_flash2' in sys.modules)")
    launcher, advice = ["torchrun", "--standalone"], ["-m", "hf_flash2", "run"]
    done = run_program(*launcher, "program.py", "3", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "['3'] False\n"), done.stderr
    assert f"do so: torchrun ... {' '.join(advice)} PROGRAM ...\n" in done.stderr
    done = run_program(*launcher, *advice, "program.py", "3", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "['3'] True\n"), done.stderr
    assert "do so:" not in done.stderr


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["accelerate", "launch", "train.py"], "accelerate launch ... -m hf_flash2 run PROGRAM ..."),
        (["torch.distributed.run", "train.py"], "torch.distributed.run ... -m hf_flash2 run PROGRAM ..."),
        (["deepspeed", "train.py"], "deepspeed ... --module hf_flash2 run PROGRAM ..."),
        (["trl", "sft"], "hf-flash2 run trl.scripts.sft ..., or accelerate launch ... -m hf_flash2 run trl.scripts.sft ..."),
        (["trl", "env"], ""),
        (["accelerate", "env"], ""),
        (["tool", "torchrun"], ""),
        (["accelerate"], ""),
    ],
)
def test_only_launchers_are_said_to_start_processes(argv, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    command = types.SimpleNamespace(load=lambda: lambda: None)
    monkeypatch.setattr(run, "entry_points", lambda group, name: [command])
    assert cli.main(["run", *argv]) == 0
    heard = capsys.readouterr().err
    assert heard.endswith(f"do so: {said}\n") if said else not heard


# ---- Without torch -----------------------------------------------------------------------------------------------------------------

# What may stand where torch should be: source of torch/__init__.py (None: nothing), what the report quotes of it.
TORCH_PROBLEMS = {
    "shared library missing": ("raise OSError('libcudart.so.13: cannot open shared object file')", "OSError: libcudart.so.13: cannot open"),
    "extension broken": ("raise ImportError('Failed to load C extensions:\\n    more')", "ImportError: Failed to load C extensions:"),
    "too old": ("__version__ = '2.5.1+cu124'", "ImportError: 2.5.1+cu124 is too old"),
    "folder left by an uninstall": ("", "AttributeError: module 'torch' has no attribute '__version__'"),
    "absent": (None, "ModuleNotFoundError: No module named 'torch'"),
}
ENTRIES = {"module": ["-m", "hf_flash2"], "console script": ["-c", "import sys; from hf_flash2.cli import main; sys.exit(main())"]}


@pytest.fixture(params=TORCH_PROBLEMS)
def without_torch(request, tmp_path):
    """(run(*arguments of python), what the import of torch says): processes in which torch cannot be imported."""
    source, message = TORCH_PROBLEMS[request.param]
    if source is not None:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch/__init__.py").write_text(source)
    hidden = ["-S"] if source is None else []  # no site-packages

    def run(*arguments):
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        return subprocess.run([sys.executable, *hidden, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)

    return run, message


@pytest.mark.parametrize("entry", ENTRIES)
def test_info_without_torch(without_torch, entry):
    run, message = without_torch
    done = run(*ENTRIES[entry], "info", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert message in report["torch_problem"] and "install torch" in report["torch_problem"]
    assert report["versions"]["hf_flash2"] == build.package_version()
    assert report["library"]["path"] and report["gpu"]["devices"] == []
    assert report["backends"] == [{"case": "any case", "backend": None, "why_not_better": "torch cannot be imported"}]
    assert report["transformers"]["registered"] is False
    assert not [name for name, section in report.items() if isinstance(section, dict) and set(section) == {"error"}]
    text = run(*ENTRIES[entry], "info")
    assert (text.returncode, text.stderr) == (0, "")
    assert f"problem        torch cannot be imported ({message}" in text.stdout


@pytest.mark.parametrize("command", ["parity", "bench", "run"])
def test_commands_that_need_torch_say_so_without_it(without_torch, command):
    run, message = without_torch
    done = run("-m", "hf_flash2", command)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"hf-flash2 {command} needs torch: torch cannot be imported") and message in done.stderr
    assert "Traceback" not in done.stderr and "install torch" in done.stderr


@pytest.mark.parametrize("command", ["parity", "bench train"])
def test_commands_that_need_transformers_say_so_without_it(command, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "hf_flash2.parity", raising=False)
    assert cli.main(command.split()) == 1
    assert capsys.readouterr().err == f"hf-flash2 {command} needs Transformers: pip install transformers\n"


def test_another_module_that_is_missing_is_not_taken_for_transformers(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("No module named 'yaml'", name="yaml")

    monkeypatch.setattr(cli, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match="yaml"):
        cli.main(["parity"])


def test_public_names_without_torch_say_why(without_torch):
    run, message = without_torch
    for statement in ("from hf_flash2 import flash_attn_func", "import hf_flash2; hf_flash2.patch", "from hf_flash2 import *"):
        error = run("-c", statement).stderr.split("\nImportError: ")[-1]
        assert error.startswith("hf_flash2.") and "needs torch: torch cannot be imported" in error and message in error
    assert run("-c", "import hf_flash2; assert not hasattr(hf_flash2, 'no_such_name')").returncode == 0


@pytest.mark.parametrize(("missing", "error"), (("transformers", ImportError), ("yaml", ModuleNotFoundError)))
def test_patch_without_transformers_says_what_it_needs(missing, error, monkeypatch):
    def not_there(name, package):
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(hf_flash2.importlib, "import_module", not_there)
    with pytest.raises(error) as raised:
        hf_flash2.patch  # noqa: B018
    needs = "hf_flash2.patch needs Transformers: pip install transformers"
    assert type(raised.value) is error and (str(raised.value) == needs) == (missing == "transformers")


def test_library_and_driver_are_reported_without_torch(monkeypatch, capsys, gpu_machine):
    monkeypatch.setattr(info, "torch_problem", "torch cannot be imported (OSError: planted)")
    monkeypatch.delattr(info, "torch")
    report = read_info(capsys)
    assert report["library"]["toolkit"] == "13.0.88"
    assert report["gpu"]["driver"] == H200 and report["gpu"]["none_because"] == "NVIDIA H200 is there, but torch cannot be imported"
    assert cli.main(["info"]) == 0
    assert "driver         580.95.05, CUDA 13.0" in capsys.readouterr().out


# ---- Without a library -------------------------------------------------------------------------------------------------------------


def test_info_without_a_library_says_how_to_get_one(no_library, capsys, monkeypatch):
    report = read_info(capsys)
    assert report["library"]["exists"] is False and "hf-flash2 build" in report["library"]["error"]
    assert any(row["backend"] == "cpu-reference" for row in report["backends"])
    assert cli.main(["info"]) == 0
    assert str(no_library) in capsys.readouterr().out


def test_info_with_a_file_that_is_no_library(no_library, capsys):
    no_library.write_text("not a library")
    report = read_info(capsys)
    assert "cannot be loaded" in report["library"]["error"] and report["library"]["rebuild"]


def test_info_with_a_compiler_that_is_not_there(no_library, capsys, monkeypatch):
    monkeypatch.delenv("HF_FLASH2_SKIP_CUDA", raising=False)
    monkeypatch.setenv("CXX", "g++-99")
    library = read_info(capsys)["library"]
    assert str(no_library) in library["error"] and "CXX is 'g++-99'" in library["rebuild"]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("HF_FLASH2_LOSS", "foo", "HF_FLASH2_LOSS must be eager or unset, got 'foo'"),
        ("HF_FLASH2_ROTARY", "foo", "HF_FLASH2_ROTARY must be eager or unset, got 'foo'"),
        ("HF_FLASH2_STRICT", "maybe", "HF_FLASH2_STRICT must be 0 or 1, got 'maybe'"),
        ("HF_FLASH2_ARCHS", "70", "HF_FLASH2_ARCHS or --archs must list compute capabilities from 80 on"),
        ("HF_FLASH2_FAMILY", "sm100", "HF_FLASH2_FAMILY must be one of auto, sm80, sm90, got 'sm100'"),
        ("HF_FLASH2_STIRCT", "1", "HF_FLASH2_STIRCT is no variable of hf_flash2: HF_FLASH2_FAMILY, "),
    ],
)
def test_info_finds_slips_in_variables(name, value, said, capsys, monkeypatch):
    assert cli.main(["info"]) == 0
    assert said not in capsys.readouterr().out
    monkeypatch.setenv(name, value)
    assert cli.main(["info"]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["parity"], ["bench", "train"]])
@pytest.mark.parametrize("name", info.OF_CALLS)
def test_a_variable_that_a_call_would_refuse_is_wrong_usage(name, argv, capsys, monkeypatch):
    monkeypatch.setattr(cli.import_module(f"hf_flash2.{argv[0]}"), "run", lambda args: 0)
    monkeypatch.setenv("HF_FLASH2_ARCHS", "70")  # of a build, which is none of this
    monkeypatch.delenv(name, raising=False)
    assert cli.main(argv) == 0
    monkeypatch.setenv(name, "maybe")
    assert cli.main(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"hf-flash2 {argv[0]}: {name} must be ") and said.endswith(", got 'maybe'\n")


def test_info_knows_every_variable_there_is():
    """What the sources read, tests and library included."""
    texts = [path.read_text() for pattern in ("hf_flash2/*.py", "tests/*.py", "csrc/*.cpp") for path in ROOT.glob(pattern)]
    read = {name for text in texts for name in re.findall(r"""(?:environ(?:\.get\(|\[)|getenv\()"(HF_FLASH2_\w+)""", text)}
    assert {"HF_FLASH2_SHARED_MEMORY_LIMIT", "HF_FLASH2_RANDOM_SEED", "HF_FLASH2_ARCHS"} <= read <= set(info._VARIABLES)


def test_a_figure_that_cannot_be_drawn_is_refused_before_anything_is_measured(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    for arguments in (["train", "--plot", "t.png"], ["train", "--profile", "t.json"], ["attention", "--plot", "t.png"]):
        assert cli.main(["bench", *arguments]) == 2
        assert "a figure needs matplotlib: pip install matplotlib" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"hf_flash2 {hf_flash2.__version__}\n"


def test_dir_lists_what_is_loaded_when_asked_for():
    assert set(hf_flash2.__all__) <= set(dir(hf_flash2))


@pytest.mark.parametrize("section", ["_versions", "_gpu", "_library", "_backends", "_registration"])
def test_info_survives_any_broken_section(section, capsys, monkeypatch):
    def broken():
        raise OSError("planted")

    monkeypatch.setattr(info, section, broken)
    report = read_info(capsys)
    assert [value for value in report.values() if value == {"error": "OSError: planted"}]
    assert cli.main(["info"]) == 0
    assert "cannot be read: OSError: planted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"transformers": "5.23.0", "registered": True, "problems": []}, "registered     yes, transformers 5.23.0"),
        ({"transformers": "9.0.0", "registered": False, "problems": ["no such hook"]}, "no such hook"),
        ({"transformers": None, "registered": False, "problems": []}, "registered     no, transformers is not installed"),
    ],
)
def test_registration_is_shown(monkeypatch, capsys, state, expected):
    monkeypatch.setattr(info, "_registration", lambda: state)
    assert read_info(capsys)["transformers"] == state
    assert cli.main(["info"]) == 0
    assert expected in capsys.readouterr().out


# ---- Machines this one is not ------------------------------------------------------------------------------------------------------

H200 = {"version": "580.95.05", "cuda": "13.0", "gpus": ["NVIDIA H200"]}


@pytest.fixture
def gpu_machine(monkeypatch):
    """A machine with one Hopper GPU and a full library; what it says can be changed."""
    properties = types.SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=141 << 30, multi_processor_count=132)
    built = {"version": "0.1.0", "toolkit": "13.0.88", "archs": "sm_80,sm_90,compute_90", "head_dims": [64, 80, 96, 128, 192, 256, 512]}
    built["sources"] = build.digest_of_sources(build.source_folder())
    machine = types.SimpleNamespace(reason=None, built=built | {"families": ["sm80"]})
    monkeypatch.setattr(info, "_nvidia_driver", lambda: H200)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(native, "reason_unavailable", lambda index=0: machine.reason)
    monkeypatch.setattr(native, "build_info", lambda: machine.built)
    monkeypatch.setattr(native, "forward_family", lambda index, asked: asked or int(machine.built["families"][-1].removeprefix("sm")))
    monkeypatch.setattr(native, "library_path", lambda: Path(__file__))
    return machine


def test_gpu_backends_and_why_no_better_one(gpu_machine, capsys):
    rows = {row["case"]: row for row in read_info(capsys)["backends"]}
    served = rows["cuda:0, float16/bfloat16, head dim up to 512"]
    assert served["backend"] == "cuda-sm80" and "no Hopper kernels" in served["why_not_better"]
    assert rows["cuda:0, float32"]["backend"] is None and "float16, bfloat16" in rows["cuda:0, float32"]["why_not_better"]
    assert "sdpa" in rows["cuda:0, head dim 513 and more"]["why_not_better"]


def test_every_gpu_has_its_own_reason(gpu_machine, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(native, "reason_unavailable", lambda index=0: f"reason of {index}")
    first, second = read_info(capsys)["gpu"]["devices"]
    named = {"name": "NVIDIA H200", "capability": "9.0", "memory_gib": 141.0, "multiprocessors": 132}
    assert first == named | {"index": 0, "unavailable": "reason of 0"}
    assert second == named | {"index": 1, "unavailable": "reason of 1"}


class Nvml:
    """Of three GPUs, one of which has no handle."""

    def __init__(self, init: int = 0):
        self.init, self.shut = init, 0

    def nvmlInit_v2(self) -> int:
        return self.init

    def nvmlSystemGetDriverVersion(self, text, size) -> int:
        text.value = b"580.95.05"
        return 0

    def nvmlSystemGetCudaDriverVersion(self, number) -> int:
        number._obj.value = 12080
        return 0

    def nvmlDeviceGetCount_v2(self, count) -> int:
        count._obj.value = 3
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle) -> int:
        handle._obj.value = index + 1
        return 15 if index == 1 else 0

    def nvmlDeviceGetName(self, handle, text, size) -> int:
        text.value = b"GPU %d" % handle.value
        return 0

    def nvmlShutdown(self) -> int:
        self.shut += 1
        return 0


def test_what_the_driver_says(monkeypatch):
    nvml = Nvml()
    monkeypatch.setattr(info.ctypes, "CDLL", lambda name: nvml)
    assert info._nvidia_driver() == {"version": "580.95.05", "cuda": "12.8", "gpus": ["GPU 1", "GPU 3"]}
    assert nvml.shut == 1
    monkeypatch.setattr(info.ctypes, "CDLL", lambda name: Nvml(init=9))
    assert info._nvidia_driver() is None


def test_a_library_of_other_sources_is_told(gpu_machine, capsys):
    assert read_info(capsys)["library"]["stale"] is None
    gpu_machine.built["sources"] = "0123456789ab"
    assert read_info(capsys)["library"]["stale"].startswith("it was built from other sources than those in ")
    assert cli.main(["info"]) == 0
    assert "other sources" in capsys.readouterr().out


def test_forced_family_and_narrowed_library_are_shown(gpu_machine, monkeypatch, capsys):
    gpu_machine.built |= {"head_dims": [64, 128], "families": ["sm80", "sm90"]}
    rows = {row["case"]: row for row in read_info(capsys)["backends"]}
    assert rows["cuda:0, float16/bfloat16, head dim up to 128"]["backend"] == "cuda-sm90"
    assert "HF_FLASH2_HEAD_DIMS" in rows["cuda:0, head dim 129 and more"]["why_not_better"]
    monkeypatch.setenv("HF_FLASH2_FAMILY", "sm80")
    report = read_info(capsys)
    assert "HF_FLASH2_FAMILY=sm80 forces it" in report["backends"][0]["why_not_better"]
    assert report["environment"]["HF_FLASH2_FAMILY"] == "sm80"


def test_a_forced_family_that_is_none_is_shown(gpu_machine, monkeypatch, capsys):
    monkeypatch.setenv("HF_FLASH2_FAMILY", "sm42")
    assert "must be one of auto, sm80, sm90" in read_info(capsys)["backends"][0]["why_not_better"]


def test_a_forced_family_that_cannot_run_is_shown(gpu_machine, monkeypatch, capsys):
    def refuse(index, asked):
        raise native.LibraryError("it needs a Hopper GPU")

    monkeypatch.setattr(native, "forward_family", refuse)
    row = read_info(capsys)["backends"][0]
    assert row == {"case": "cuda:0, any case", "backend": None, "why_not_better": "it needs a Hopper GPU"}


@pytest.mark.parametrize(
    "reason",
    ["the NVIDIA driver supports CUDA 12.4, but libhf_flash2.so was built with CUDA 13.0: update the driver", "compute capability 7.5"],
)
def test_a_gpu_the_library_cannot_use_is_told_from_no_gpu(gpu_machine, capsys, reason):
    gpu_machine.reason = reason
    report = read_info(capsys)
    assert report["gpu"]["devices"][0]["unavailable"] == reason
    assert report["backends"][0] == {"case": "cuda:0, any case", "backend": None, "why_not_better": reason}
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert reason in text and "NVIDIA H200" in text and "none:" not in text


@pytest.mark.parametrize(
    ("driver", "torch_cuda", "visible", "expected"),
    [
        (None, None, None, "no NVIDIA driver"),
        (H200 | {"gpus": []}, "13.0", None, "sees no GPU"),
        (H200, None, None, "a build without CUDA; install one with CUDA"),
        (H200, "13.0", "", "CUDA_VISIBLE_DEVICES='' hides it"),
        (H200, "13.0", None, "driver on your system is too old"),
    ],
)
def test_no_usable_gpu_names_the_cause(monkeypatch, capsys, driver, torch_cuda, visible, expected):
    def is_available():
        if torch_cuda:
            warnings.warn("The NVIDIA driver on your system is too old (found version 12040)", stacklevel=1)
        return False

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(info, "_nvidia_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    gpu = read_info(capsys)["gpu"]
    assert gpu["devices"] == [] and expected in gpu["none_because"]

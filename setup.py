"""Packaging: the Python files, the C++ sources and, where a compiler is at hand, the CUDA library built from them.

Imports no torch and nothing of the package: hf_flash2/build.py is standard library only and loaded by path. The library is plain C behind
ctypes, so one wheel serves every Python and every torch: it is tagged py3-none-<platform>, or py3-none-any when it holds no library.
"""

import importlib.util
import shutil
import sys
from pathlib import Path

import setuptools

if int(setuptools.__version__.split(".")[0]) < 77:  # as pyproject.toml requires; --no-build-isolation takes what is there
    sys.exit(f"\nhf_flash2: setuptools must be 77 or newer, got {setuptools.__version__}; `pip install 'setuptools>=77'`\n")

from setuptools import Extension, setup  # noqa: E402
from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402
from setuptools.command.build_py import build_py  # noqa: E402

ROOT = Path(__file__).resolve().parent


def load_by_path(name: str, path: Path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


build = load_by_path("hf_flash2_build", ROOT / "hf_flash2" / "build.py")


def say(line: str) -> None:
    """Print to the terminal: pip hides the output of a build that takes minutes, which looks like a hang."""
    print(build.printable(line), flush=True)
    if not sys.stdout.isatty():
        try:
            with open("/dev/tty", "w", errors="backslashreplace") as terminal:
                terminal.write(f"\n{line}")
        except OSError:  # no terminal: a log file or CI, where `pip install -v` shows the lines above
            pass


class BuildPython(build_py):
    def run(self):
        if pure_python_reason:
            say(f"hf_flash2: installing without CUDA kernels (pure Python): {pure_python_reason}")
        # NOTE: setuptools copies over what an install from this folder left here before, and would ship what is no source any more.
        left_here = (Path(self.build_lib) / "hf_flash2").resolve()
        if left_here != Path(__file__).resolve().with_name("hf_flash2"):  # build_py --build-lib .
            shutil.rmtree(left_here, ignore_errors=True)
        super().run()


class BuildLibrary(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        try:
            build.build(output=Path(self.get_ext_fullpath(ext.name)), say=say)
        except build.BuildError as error:
            sys.exit(f"\n{error}\n")  # the message is the whole story, a traceback would bury it


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


try:
    pure_python_reason = build.reason_not_buildable()
except build.BuildError as error:
    sys.exit(f"\n{error}\n")

# csrc travels along, so that `hf-flash2 build` works from an installed package too.
source_packages = ["hf_flash2.csrc", *(f"hf_flash2.csrc.{folder.name}" for folder in (ROOT / "csrc").iterdir() if any(folder.glob("*.*h")))]

setup(
    packages=["hf_flash2", "hf_flash2.patches", *source_packages],
    package_dir={"hf_flash2.csrc": "csrc", "hf_flash2.patches": "patches"},
    package_data={package: ["*.h", "*.cuh", "*.cu", "*.cpp", "*.json"] for package in source_packages},
    ext_modules=[] if pure_python_reason else [Extension("hf_flash2.libhf_flash2", sources=[])],
    cmdclass={"build_py": BuildPython, "build_ext": BuildLibrary, "bdist_wheel": Wheel},
)

"""Who may import whom: the layers of the package on its syntax trees, the layers of csrc on its #include lines.

Imports inside functions count too, except where a rule says "at import". Each rule is also shown to catch a planted breach.
"""

import ast
import posixpath
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Modules of the package that each module may import. Not listed: __init__, and the commands (cli, info, parity, run, __main__),
# which may use all.
MAY_IMPORT = {
    "build": set(),
    "reference": set(),
    "tracing": set(),
    "packing": {"tracing"},
    "collator": set(),
    "support": set(),
    "native": {"__version__"},
    "kernels": {"native"},
    "ops": {"kernels", "native", "reference", "tracing"},
    "flops": {"kvcache", "ops"},
    "rotary": {"ops", "kernels", "native", "tracing"},
    "cross_entropy": {"kernels", "native"},
    "functional": {"ops", "support", "native", "tracing"},
    "context_parallel": {"functional", "packing"},
    "kvcache": {"functional", "ops", "kernels", "reference", "support", "tracing"},
    "notices": {"ops", "tracing"},
    "blocks": {"functional", "ops"},
    "masks": {"blocks", "notices", "packing", "tracing"},
    "shareable": {"masks"},
    "interface": {
        "blocks",
        "context_parallel",
        "shareable",
        "masks",
        "notices",
        "packing",
        "functional",
        "kvcache",
        "support",
        "ops",
        "tracing",
    },
    "registration": {"interface", "masks", "notices", "functional", "kvcache"},
    "bench": {"bench_attention", "bench_train"},
    "bench_attention": {"bench_points", "bench_providers", "bench_shared", "ops", "kernels", "native"},
    "bench_points": {"bench_shared"},
    "bench_providers": {"bench_points", "functional", "kvcache", "packing", "native"},
    "bench_train": {"bench_shared", "bench_profile", "notices", "native", "ops"},
    "bench_profile": {"bench_shared"},
    "bench_shared": {"__version__"},
    "patches": {
        "registration",
        "interface",
        "masks",
        "notices",
        "packing",
        "context_parallel",
        "shareable",
        "ops",
        "rotary",
        "cross_entropy",
    },
}
STANDARD_LIBRARY_ONLY = {"build", "native"}
TORCH_ONLY = {
    "reference",
    "packing",
    "tracing",
    "collator",
    "support",
    "kernels",
    "ops",
    "flops",
    "rotary",
    "cross_entropy",
    "functional",
    "kvcache",
    "blocks",
    "context_parallel",
    "shareable",
    "notices",
}
KNOW_TRANSFORMERS = {"registration", "interface", "masks", "patches", "parity", "bench_train"}

# Folders of csrc that a file of each folder may include ("." = csrc itself).
MAY_INCLUDE = {
    "device": {"device"},
    "attention": {"device", "attention", "."},
    "sm80": {"device", "attention", "sm80", "."},
    "sm90": {"device", "attention", "sm90", "."},
}
ABOVE_THE_KERNELS = {"api.h", "dispatch.h"}  # of csrc itself: they call the kernels, so no kernel includes them
FOREIGN_HEADERS = re.compile(r"^(torch|ATen|c10|pybind11|cute|cutlass)/|^Python\.h")


def python_files() -> dict[str, str]:
    files = [*ROOT.glob("hf_flash2/*.py"), *ROOT.glob("patches/**/*.py")]
    return {str(path.relative_to(ROOT)): path.read_text() for path in files}


def csrc_files() -> dict[str, str]:
    files = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cuh", ".cu", ".cpp")]
    return {str(path.relative_to(ROOT / "csrc")): path.read_text() for path in files}


def imports(path: str, text: str, at_import_only: bool = False) -> set[str]:
    """Full dotted names of everything a file imports; `from . import x` counts as the module x."""
    package = ["hf_flash2", *(Path(path).parts[:-1] if path.startswith("patches") else ())]
    found = set()
    nodes = list(ast.parse(text).body) if at_import_only else list(ast.walk(ast.parse(text)))
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, [base, node.module]))
            found |= {f"{source}.{alias.name}" for alias in node.names} if source == "hf_flash2" else {source}
    return found


def module_of(path: str) -> str:
    return "patches" if path.startswith("patches") else Path(path).stem


def python_breaches(files: dict[str, str]) -> list[str]:
    breaches = []
    for path, text in sorted(files.items()):
        module, names = module_of(path), imports(path, text)
        inner = {name.split(".")[1] for name in names if name.startswith("hf_flash2.")}
        outer = {name.split(".")[0] for name in names} - {"hf_flash2"} - sys.stdlib_module_names
        if module in MAY_IMPORT:
            breaches += [f"{path} imports {name}" for name in sorted(inner - MAY_IMPORT[module] - {module})]
        if module in TORCH_ONLY:
            breaches += [f"{path} imports {name}" for name in sorted(outer - {"torch"})]
        if module in STANDARD_LIBRARY_ONLY:
            breaches += [f"{path} imports {name}" for name in sorted(outer)]
        if "transformers" in outer and module not in KNOW_TRANSFORMERS:
            breaches.append(f"{path} imports transformers")
        at_import = {name for name in imports(path, text, at_import_only=True) if name.startswith("hf_flash2.patches")}
        if at_import and module != "patches":
            breaches.append(f"{path} loads patches at import")
    return breaches


def csrc_breaches(files: dict[str, str]) -> list[str]:
    breaches = []
    for path, text in sorted(files.items()):
        folder = path.split("/")[0] if "/" in path else "."
        for line in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.MULTILINE):
            if FOREIGN_HEADERS.match(line):
                breaches.append(f"{path} includes {line}")
            target = line if line in files else posixpath.normpath(posixpath.join(posixpath.dirname(path), line))
            if target not in files or folder not in MAY_INCLUDE:
                continue
            target_folder = target.split("/")[0] if "/" in target else "."
            if target_folder not in MAY_INCLUDE[folder] or target in ABOVE_THE_KERNELS:
                breaches.append(f"{path} includes {target}")
    return breaches


def test_python_layers():
    assert python_breaches(python_files()) == []


def test_every_allowance_is_used():
    used = {module: set() for module in MAY_IMPORT}
    for path, text in python_files().items():
        if (module := module_of(path)) in used:
            used[module] |= {name.split(".")[1] for name in imports(path, text) if name.startswith("hf_flash2.")} - {module}
    assert used == MAY_IMPORT


def test_the_order_of_the_readme():
    """Its layout lists modules so that each imports those below it, and leaves none out but the commands behind cli.py."""
    layout = (ROOT / "README.md").read_text().split("Imports point downwards:")[1].split("\npatches/ ")[0]
    listed = re.findall(r"^  (\w+)\.py ", layout, re.MULTILINE)
    modules = {name for name in MAY_IMPORT if not name.startswith(("bench", "patches"))}
    assert set(listed) == modules | {"cli"}
    for number, module in enumerate(listed[1:], 1):
        assert MAY_IMPORT[module] & modules <= set(listed[number + 1 :]), f"{module} imports what stands above it"


def test_csrc_layers():
    assert csrc_breaches(csrc_files()) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("hf_flash2/build.py", "import torch"),
        ("hf_flash2/build.py", "def f():\n    from . import native"),
        ("hf_flash2/reference.py", "from .ops import last_backend"),
        ("hf_flash2/packing.py", "import numpy"),
        ("hf_flash2/ops.py", "from . import functional"),
        ("hf_flash2/functional.py", "import transformers"),
        ("hf_flash2/native.py", "import hf_flash2.interface"),
        ("hf_flash2/native.py", "import torch"),
        ("hf_flash2/interface.py", "from . import patches"),
        ("hf_flash2/info.py", "from transformers import AttentionInterface"),
        ("hf_flash2/__init__.py", "from .patches import patch"),
        ("patches/llama.py", "from .. import native"),
        ("patches/llama.py", "from hf_flash2.reference import attention_forward"),
    ],
)
def test_python_breach_is_caught(path, text):
    assert len(python_breaches({path: text})) >= 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("hf_flash2/build.py", "import re, pathlib"),
        ("hf_flash2/__init__.py", "def patch(model):\n    from .patches import patch"),
        ("patches/llama.py", "from . import report\nfrom ..rotary import apply_rotary\nimport transformers"),
    ],
)
def test_what_is_allowed_passes(path, text):
    assert python_breaches({path: text}) == []


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("sm80/forward.cuh", "sm90/launch.cuh"),
        ("sm90/forward.cuh", "../sm80/forward.cuh"),
        ("device/mma.cuh", "attention/mask.cuh"),
        ("attention/mask.cuh", "sm80/forward.cuh"),
        ("sm80/forward.cuh", "dispatch.h"),
        ("api.cpp", "torch/extension.h"),
        ("sm90/forward.cuh", "cute/tensor.hpp"),
    ],
)
def test_csrc_breach_is_caught(path, include):
    known = dict.fromkeys(("sm80/forward.cuh", "sm90/launch.cuh", "attention/mask.cuh", "device/mma.cuh", "dispatch.h"), "")
    files = known | {path: f'#pragma once\n#include "{include}"\n'}
    assert csrc_breaches(files) == [f"{path} includes {include.removeprefix('../')}"]

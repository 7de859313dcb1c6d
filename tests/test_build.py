"""hf_flash2/build.py: finding the compiler, reading the environment, the gate on ptxas's words, incremental builds, error reports."""

import argparse
import ctypes
import errno
import fcntl
import fnmatch
import io
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import threading
import time
import zipfile
from pathlib import Path

import pytest

from hf_flash2 import build

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ("HF_FLASH2_NVCC", "CUDA_HOME", "CXX", "HF_FLASH2_ARCHS", "HF_FLASH2_HEAD_DIMS", "HF_FLASH2_SKIP_CUDA", "MAX_JOBS")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


def make_executable(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def make_nvcc(root: Path, version: str = "13.0.88") -> Path:
    """A stand-in toolkit whose nvcc answers --version and --dryrun."""
    script = f'case "$1" in --version) echo "release, V{version}";; *) echo "#$ _HERE_={root}/bin" >&2;; esac'
    return make_executable(root / "bin" / "nvcc", script)


@pytest.fixture
def only_these_toolkits(monkeypatch, tmp_path):
    """No nvcc on PATH or among the packages, whatever this machine has."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'path' / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "packages")])
    is_file = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda self: not str(self).startswith("/usr/local/cuda") and is_file(self))
    if shutil.which("nvcc"):
        pytest.skip("nvcc lies in /usr/bin here")


# ---- Finding nvcc ------------------------------------------------------------------------------------------------------------------


def test_nvcc_search_order(only_these_toolkits, monkeypatch, tmp_path):
    """HF_FLASH2_NVCC beats CUDA_HOME beats the PyPI package beats PATH; each is taken away in turn."""
    assert build.find_toolkit() is None
    places = {
        "PATH": tmp_path / "path",
        "the nvidia-cuda-nvcc package": tmp_path / "packages" / "nvidia" / "cu13",
        "CUDA_HOME": tmp_path / "home",
        "HF_FLASH2_NVCC": tmp_path / "named",
    }
    for found, root in places.items():
        nvcc = make_nvcc(root)
        if found in ("CUDA_HOME", "HF_FLASH2_NVCC"):
            monkeypatch.setenv(found, str(root if found == "CUDA_HOME" else nvcc))
        assert build.find_toolkit() == build.Toolkit(root, "13.0.88", found)


def test_nvcc_behind_a_wrapper_is_found_where_it_lives(only_these_toolkits, monkeypatch, tmp_path):
    real = make_nvcc(tmp_path / "toolkit")
    monkeypatch.setenv("HF_FLASH2_NVCC", str(make_executable(tmp_path / "wrapper" / "nvcc", f'exec {real} "$@"')))
    assert build.find_toolkit().root == tmp_path / "toolkit"


def test_cuda_home_without_a_compiler_is_passed_over(only_these_toolkits, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "runtime_only"))
    make_nvcc(tmp_path / "path")
    assert build.find_toolkit().found == f"PATH; CUDA_HOME={tmp_path / 'runtime_only'} has no bin/nvcc"


@pytest.mark.parametrize("script", [None, "exit 1", "echo hello"], ids=["missing", "failing", "no nvcc"])
def test_named_nvcc_that_does_not_work_is_an_error(only_these_toolkits, monkeypatch, tmp_path, script):
    make_nvcc(tmp_path / "path")  # must not be taken in its place
    named = tmp_path / "broken" / "nvcc"
    if script:
        make_executable(named, script)
    monkeypatch.setenv("HF_FLASH2_NVCC", str(named))
    with pytest.raises(build.BuildError, match=f"HF_FLASH2_NVCC names {named}.*unset it"):
        build.find_toolkit()


def test_old_toolkit(only_these_toolkits, monkeypatch, tmp_path):
    """Named, it is an error; found by chance, the reason not to build, unless another is found."""
    make_nvcc(tmp_path / "path", "11.8.89")
    assert build.find_toolkit() is None
    monkeypatch.setattr(build, "find_host_compiler", lambda: build.HostCompiler("g++"))
    nvcc = tmp_path / "path" / "bin" / "nvcc"
    assert f"no nvcc that will do: CUDA toolkit must be at least 12.5, got 11.8.89 from PATH ({nvcc});" in build.reason_not_buildable()
    make_nvcc(tmp_path / "packages" / "nvidia" / "cu13", "12.4.131")
    assert "got 12.4.131 from the nvidia-cuda-nvcc package" in build.reason_not_buildable()  # the first that was found
    make_nvcc(tmp_path / "packages" / "nvidia" / "cu13")
    assert build.find_toolkit().version == "13.0.88"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "path"))
    with pytest.raises(build.BuildError, match=r"at least 12.5, got 11.8.89 from CUDA_HOME"):
        build.find_toolkit()


def test_the_oldest_toolkit_that_will_do(only_these_toolkits, tmp_path):
    make_nvcc(tmp_path / "path", "12.5.40")
    assert build.find_toolkit().version == "12.5.40"


def test_ninja_of_this_python_is_taken_before_one_on_path(monkeypatch, tmp_path):
    """That of the package it imports first: in pip's isolated builds its scripts folder may have one that would run itself without end. A
    virtual environment need not be activated."""
    imported, own, on_path = (make_executable(tmp_path / folder / "ninja", "") for folder in ("build/bin", "scripts", "path"))
    packages = tmp_path / "build" / "packages"
    (packages / "ninja-1.13.0.dist-info").mkdir(parents=True)
    (packages / "ninja-1.13.0.dist-info" / "METADATA").write_text("Name: ninja\nVersion: 1.13.0\n")
    (packages / "ninja-1.13.0.dist-info" / "RECORD").write_text("../bin/ninja,,\nninja/__init__.py,,\n")
    monkeypatch.setattr(sys, "path", [str(packages)])
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(own.parent) if name == "scripts" else None)
    monkeypatch.setenv("PATH", str(on_path.parent))
    for ninja in (imported, own, on_path):
        assert os.path.samefile(build.find_ninja(), ninja)
        ninja.unlink()
    assert build.find_ninja() is None


# ---- Finding the host compiler -----------------------------------------------------------------------------------------------------


@pytest.fixture
def compilers(monkeypatch, tmp_path):
    """{name: path} of the only programs on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return {name: str(make_executable(tmp_path / "bin" / name, "")) for name in ("ccache", "clang++", "g++")}


@pytest.mark.parametrize(
    ("cxx", "program", "flags", "launcher"),
    [
        ("", "g++", (), ()),
        ("clang++", "clang++", (), ()),
        ("g++ -m64 -Wa,-q '-Dx=a b'", "g++", ("-m64", "-Wa,-q", "-Dx=a b"), ()),
        ("ccache clang++ -m64", "clang++", ("-m64",), ("ccache",)),
    ],
)
def test_cxx_is_split_into_launcher_program_and_flags(compilers, monkeypatch, cxx, program, flags, launcher):
    monkeypatch.setenv("CXX", cxx)
    assert build.find_host_compiler() == build.HostCompiler(compilers[program], flags, launcher)


def test_flags_of_the_host_compiler_reach_it_through_nvcc():
    compiler = build.HostCompiler("/usr/bin/g++", ("-m64", "-Wa,-q", "-Dx=a b"))
    assert compiler.nvcc_flags == ["-ccbin", "/usr/bin/g++", "-Xcompiler", "-m64", "-Xcompiler", r"-Wa\,-q", "-Xcompiler", "'-Dx=a b'"]


@pytest.mark.parametrize("cxx", ["g++-99", "ccache g++-99", "-m64", "g++ 'open"])
def test_named_host_compiler_that_cannot_be_found_is_an_error(compilers, monkeypatch, cxx):
    """A pure Python install in silence is not what was asked for."""
    monkeypatch.setenv("CXX", cxx)
    for look in (build.find_host_compiler, build.reason_not_buildable):
        with pytest.raises(build.BuildError, match=f"CXX is {re.escape(repr(cxx))}.* or unset it"):
            look()
    monkeypatch.setenv("HF_FLASH2_SKIP_CUDA", "1")
    assert "HF_FLASH2_SKIP_CUDA" in build.reason_not_buildable()


# ---- When nothing is built ---------------------------------------------------------------------------------------------------------


def test_reason_not_buildable_names_what_is_missing(only_these_toolkits, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_FLASH2_SKIP_CUDA", "1")
    assert "HF_FLASH2_SKIP_CUDA" in build.reason_not_buildable()
    monkeypatch.setenv("HF_FLASH2_SKIP_CUDA", "no")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert "C++ compiler" in build.reason_not_buildable()
    monkeypatch.setenv("CXX", str(make_executable(tmp_path / "c++", "")))
    assert "nvcc" in build.reason_not_buildable()
    make_nvcc(tmp_path / "path")
    monkeypatch.setattr(build, "find_ninja", lambda: None)
    assert "ninja" in build.reason_not_buildable()
    monkeypatch.setattr(build, "find_ninja", lambda: "ninja")
    assert build.reason_not_buildable() is None


@pytest.mark.parametrize(("value", "skips"), [("1", True), ("yes", True), ("", False), ("0", False), ("No", False), ("OFF", False)])
def test_values_that_skip_the_kernels(monkeypatch, value, skips):
    monkeypatch.setenv("HF_FLASH2_SKIP_CUDA", value)
    monkeypatch.setattr(sys, "platform", "darwin")
    reason = "HF_FLASH2_SKIP_CUDA is set" if skips else "the CUDA library is built on Linux only, this is darwin"
    assert build.reason_not_buildable().startswith(reason)


def test_if_possible_succeeds_without_a_compiler(monkeypatch, capsys):
    monkeypatch.setenv("HF_FLASH2_SKIP_CUDA", "1")
    assert build_main("--if-possible") == 0
    assert capsys.readouterr().out.startswith("hf_flash2: the CUDA kernels are not built: HF_FLASH2_SKIP_CUDA is set")
    assert build_main() == 1


def build_main(*arguments: str) -> int:
    parser = build.argparse.ArgumentParser()
    build.add_arguments(parser)
    return build.run(parser.parse_args(arguments))


# ---- Architectures, head dims, jobs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", [("90", "sm80", ["sm_90"])]),
        ("80;90a", [("80", "sm80", ["sm_80"]), ("90a", "sm90", ["sm_90a"])]),
        ("80, 120+PTX", [("80", "sm80", ["sm_80"]), ("120", "sm80", ["sm_120", "compute_120"])]),
        (build.DEFAULT_ARCHS, [("80", "sm80", ["sm_80"]), ("90", "sm80", ["sm_90", "compute_90"]), ("90a", "sm90", ["sm_90a"])]),
    ],
)
def test_archs(text, expected):
    assert [(arch.name, arch.family, arch.targets) for arch in build.parse_archs(text)] == expected


def test_arch_flags():
    assert build.Arch("90", ptx=True).flags == ["-gencode", "arch=compute_90,code=[sm_90,compute_90]"]
    assert build.Arch("90a").flags == ["-gencode", "arch=compute_90a,code=[sm_90a]"]


@pytest.mark.parametrize("text", ["75", "sm_90", "80a", "90a+PTX", "90+ptx", "8.0", ";"])
def test_archs_that_cannot_be(text):
    with pytest.raises(build.BuildError, match="HF_FLASH2_ARCHS .*got.*The default is"):
        build.parse_archs(text)


def test_head_dims():
    assert build.parse_head_dims("", (64, 128)) == (64, 128)
    assert build.parse_head_dims("128 64", (64, 96, 128)) == build.parse_head_dims("64,128,64", (64, 96, 128)) == (64, 128)
    with pytest.raises(build.BuildError, match="must be among 64, 128; got 80"):
        build.parse_head_dims("64,80", (64, 128))
    with pytest.raises(build.BuildError, match="must be among 64, 128; got ','"):
        build.parse_head_dims(",", (64, 128))


@pytest.mark.parametrize(("cores", "free_gib", "jobs"), [(16, 64, 16), (16, 10, 4), (2, 64, 2), (8, 1, 1)])
def test_jobs_from_cores_and_free_memory(monkeypatch, cores, free_gib, jobs):
    monkeypatch.setattr(build, "usable_cores", lambda: cores)
    monkeypatch.setattr(build, "free_memory_bytes", lambda: free_gib * build.GIB)
    assert build.choose_jobs()[0] == jobs


def test_max_jobs_is_honoured(monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "7")
    assert build.choose_jobs() == (7, "MAX_JOBS")
    for value in ("many", "0"):  # 0 would be any number of jobs to ninja
        monkeypatch.setenv("MAX_JOBS", value)
        with pytest.raises(build.BuildError, match=f"MAX_JOBS must be a positive number, got '{value}'"):
            build.choose_jobs()


@pytest.mark.parametrize(
    ("files", "cores", "free"),
    [
        ({"cpu.max": "150000 100000", "memory.max": "3000", "memory.current": "1000"}, 2, 2000),
        (
            {"cpu.cfs_quota_us": "100000", "cpu.cfs_period_us": "100000", "memory.limit_in_bytes": "5000", "memory.usage_in_bytes": "6000"},
            1,
            0,
        ),
        ({"cpu.max": "max 100000", "memory.max": "max", "memory.current": "1000"}, None, None),
        ({}, None, None),
        ({"memory.max": "3000", "memory.current": "2500", "memory.stat": "anon 500\nfile 2000\ninactive_file 1900"}, None, 2400),
        (
            {
                "memory.limit_in_bytes": "3000",
                "memory.usage_in_bytes": "2500",
                "memory.stat": "inactive_file 9\ntotal_inactive_file 1900",
            },
            None,
            2400,
        ),
    ],
    ids=["version 2", "version 1", "unlimited", "none", "files in memory", "files in memory, version 1"],
)
def test_control_group_limits(monkeypatch, files, cores, free, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "job").mkdir()  # the limit of a job is above the group of its step
    (tmp_path / "job" / "cpu.max").write_text("max 100000")
    (tmp_path / "job" / "memory.max").write_text("max")
    monkeypatch.setattr(build, "_cgroup_folders", lambda controller: [tmp_path / "job", tmp_path])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert build.usable_cores() == (cores or 64)
    assert build.free_memory_bytes() == free if free is not None else build.free_memory_bytes() > 1 << 20


@pytest.mark.parametrize(
    ("groups", "folders"),
    [
        ("0::/slice/job/step", ["slice/job/step", "slice/job", "slice", "."]),
        ("12:cpuset:/x\n4:memory:/slice/job\n0::/y", ["memory/slice/job", "memory/slice", "memory"]),
        ("4:cpu:/x", []),
        ("", []),
    ],
    ids=["version 2", "version 1", "of another controller", "none"],
)
def test_control_groups_of_this_process(monkeypatch, groups, folders, tmp_path):
    for folder in ("memory", "."):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "memory.stat").touch()
    texts = {"/proc/self/cgroup": groups}
    monkeypatch.setattr(build, "_text", lambda path: texts.get(str(path), ""))
    monkeypatch.setattr(build, "CGROUPS", tmp_path)
    assert build._cgroup_folders("memory") == [tmp_path / folder for folder in folders]


def test_the_group_of_cpu_is_not_that_of_cpuset(monkeypatch, tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.stat").touch()
    monkeypatch.setattr(build, "_text", lambda path: "12:cpuset:/x\n4:cpuacct,cpu:/job" if path.name == "cgroup" else "")
    monkeypatch.setattr(build, "CGROUPS", tmp_path)
    assert build._cgroup_folders("cpu") == [tmp_path / "cpu" / "job", tmp_path / "cpu"]


# ---- The gate on what ptxas said ---------------------------------------------------------------------------------------------------

PTXAS_LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z7forwardPf' for 'sm_80'
ptxas info    : Function properties for _Z7forwardPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
ptxas info    : Compiling entry function '_Z8backwardPf' for 'sm_80'
ptxas info    : Function properties for _Z8backwardPf
    96 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
"""


def test_ptxas_log_is_read():
    assert build.parse_ptxas("unit", PTXAS_LOG) == [
        build.KernelReport("unit:sm_80:_Z7forwardPf", 0),
        build.KernelReport("unit:sm_80:_Z8backwardPf", 32),
    ]


@pytest.mark.parametrize(("stores", "loads"), [(24, 32), (32, 24), (0, 32), (32, 0)])
def test_stores_and_loads_are_spills_of_the_function_that_has_them(stores, loads):
    """A function that a kernel calls comes before it."""
    helper = f"Function properties for _Z6helper\n 16 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads\n"
    log = PTXAS_LOG.replace("ptxas info    : Function properties for _Z7", f"{helper}ptxas info    : Function properties for _Z7")
    assert build.parse_ptxas("unit", log)[:2] == [
        build.KernelReport("unit:sm_80:_Z6helper", 32),
        build.KernelReport("unit:sm_80:_Z7forwardPf", 0),
    ]


def test_unlisted_spill_fails():
    problems = build.judge(build.parse_ptxas("unit", PTXAS_LOG), {})
    assert problems == ["unit:sm_80:_Z8backwardPf: spills 32 bytes of registers, allowed are 0 (csrc/spills.json)"]


@pytest.mark.parametrize(
    ("pattern", "entry", "problem"),
    [
        ("unit:sm_80:*backward*", {"bytes": 32, "reason": "measured faster"}, None),
        ("unit:sm_80:*backward*", {"bytes": 31, "reason": "measured faster"}, "spills 32 bytes of registers, allowed are 31"),
        ("unit:sm_90:*backward*", {"bytes": 32, "reason": "measured faster"}, "spills 32 bytes of registers, allowed are 0"),
        ("unit:sm_80:*backward*", {"bytes": 32}, "must give a reason"),
        ("unit:sm_80:*", {"bytes": 32, "reason": "measured faster"}, None),
    ],
)
def test_allowance(pattern, entry, problem):
    problems = build.judge(build.parse_ptxas("unit", PTXAS_LOG), {pattern: entry})
    assert (problem in problems[0]) if problem else not problems


def test_allowance_that_nothing_needs_must_go():
    allowed = {"*backward*": {"bytes": 32, "reason": "r"}, "*forward*": {"bytes": 8, "reason": "r"}}
    assert build.judge(build.parse_ptxas("unit", PTXAS_LOG), allowed) == [
        "csrc/spills.json: *forward*: nothing spills there any more; remove the line"
    ]


def test_the_largest_of_several_allowances_holds():
    allowed = {pattern: {"bytes": size, "reason": "r"} for pattern, size in (("unit:*", 8), ("*backward*", 32), ("*:sm_80:*", 16))}
    assert build.judge(build.parse_ptxas("unit", PTXAS_LOG), allowed) == []


def test_kernels_that_were_not_built_may_need_an_allowance():
    """A build of one head dim says nothing of what spills at others."""
    allowed = {"*backward*": {"bytes": 32, "reason": "r"}, "other:*": {"bytes": 8, "reason": "r"}}
    assert build.judge(build.parse_ptxas("unit", PTXAS_LOG), allowed) == []


def test_other_architectures_may_need_an_allowance():
    """A build for Hopper alone says nothing of what spills on others."""
    allowed = {"*backward*": {"bytes": 32, "reason": "r"}, "*forward*": {"bytes": 8, "reason": "r"}}
    assert build.judge(build.parse_ptxas("unit", PTXAS_LOG), allowed, whole=False) == []


@pytest.mark.parametrize("message", build.PTXAS_MESSAGES)
@pytest.mark.parametrize("line", [2, 9])
def test_performance_messages_fail(message, line):
    """Planted before a kernel's properties and at the very end."""
    lines = PTXAS_LOG.splitlines()
    lines.insert(line, f"ptxas info    : ({message}) Potential Performance Loss: wgmma.mma_async instructions are serialized")
    problems = build.judge(build.parse_ptxas("unit", "\n".join(lines)), {"*backward*": {"bytes": 32, "reason": "r"}})
    assert len(problems) == 1 and message in problems[0]


def test_committed_allowances_are_complete():
    """An allowance of a unit that does not exist would allow nothing, and nobody would miss it."""
    instantiate = build._load_by_path("committed_instantiate", ROOT / "csrc" / "instantiate.py")
    files = [file.name for file in instantiate.files()]
    for pattern, entry in json.loads((ROOT / "csrc" / "spills.json").read_text()).items():
        assert entry["bytes"] > 0 and len(entry["reason"]) > 20, pattern
        assert fnmatch.filter(files, pattern.split(":")[0]), pattern
        assert set(map(int, re.findall(r"(?<=kernelILi)\d+", pattern))) <= set(instantiate.HEAD_DIMS), pattern


@pytest.mark.parametrize("head_dims", [(64,), (96, 128, 512), (64, 80, 96, 128, 192, 256, 512)])
def test_every_unit_is_in_one_file(head_dims):
    instantiate = build._load_by_path("committed_instantiate", ROOT / "csrc" / "instantiate.py")
    units, files = instantiate.units(head_dims), instantiate.files(head_dims)
    assert len({file.name for file in files}) == len(files)
    assert sorted(text for file in files for text in file.source.split("#include")[1:]) == sorted(
        unit.source.removeprefix("#include") for unit in units
    )
    assert {unit.head_dim for unit in units} == set(head_dims)
    for file in files:
        assert file.source.count(f"hf_flash2::{file.family} {{") == file.source.count("#include"), file.name


def test_files_are_named_after_what_is_compiled_in_them():
    """Those of the Hopper kernels that take longest are of one dtype each, those of mma.sync of two head dims."""
    instantiate = build._load_by_path("committed_instantiate", ROOT / "csrc" / "instantiate.py")
    assert [(file.name, file.label, file.same_ptx) for file in instantiate.files((64, 96, 192))] == [
        *(
            (*names, False)
            for direction in ("backward", "forward")
            for names in (
                (f"{direction}_sm90_hdim192_bf16", f"{direction} d192 bf16"),
                (f"{direction}_sm90_hdim192_fp16", f"{direction} d192 fp16"),
                (f"{direction}_sm90_hdim96", f"{direction} d96"),
                (f"{direction}_sm90_hdim64", f"{direction} d64"),
            )
        ),
        ("backward_sm80_hdim128_192", "backward d192", False),
        ("backward_sm80_hdim64_96", "backward d64 d96", False),
        ("forward_sm80_hdim128_192", "forward d192", True),
        ("forward_sm80_hdim64_96", "forward d64 d96", True),
    ]


@pytest.mark.parametrize("head_dims", [(64,), (64, 80, 96, 128, 192, 256, 512)])
def test_every_source_is_compiled_for_the_architectures_of_its_kernels(tmp_path, head_dims):
    toolkit = build.Toolkit(Path("/cuda"), "13.0.88", "a test")
    jobs = build._plan(ROOT / "csrc", tmp_path, toolkit, build.parse_archs(build.DEFAULT_ARCHS), ",".join(map(str, head_dims)))
    defined = ["HF_FLASH2_VERSION", "HF_FLASH2_ARCHS", "HF_FLASH2_HEAD_DIMS"]
    found = {job.source.name: ([arch.name for arch in job.archs], [define.split("=")[0] for define in job.defines]) for job in jobs}
    assert len(found) == len(jobs)
    expected = {path.name: (["80", "90"], defined) for path in (ROOT / "csrc").glob("*.cu")}
    expected |= {path.name: ([], [*defined, "HF_FLASH2_SOURCES"]) for path in (ROOT / "csrc").glob("*.cpp")}
    generated = {name: (["90a"] if "_sm90_" in name else ["80", "90"], []) for name in found.keys() - expected.keys()}
    assert found == expected | generated and len(generated) >= 4
    assert 'HF_FLASH2_ARCHS="sm_80,sm_90,compute_90,sm_90a"' in jobs[-1].defines
    same_ptx = {job.name for job in jobs if job.same_ptx}
    assert same_ptx and same_ptx == {Path(name).stem for name in generated if name.startswith("forward_sm80_")}


@pytest.mark.parametrize(
    "archs, flags",
    [
        ("80;90+PTX", ["arch=compute_80,code=[sm_80,sm_90,compute_80]"]),
        ("90;86", ["arch=compute_86,code=[sm_90,sm_86]"]),
        ("90+PTX", ["arch=compute_90,code=[sm_90,compute_90]"]),
        ("100+PTX;90;80", ["arch=compute_80,code=[sm_90,sm_80]", "arch=compute_100,code=[sm_100,compute_100]"]),
        ("120", ["arch=compute_120,code=[sm_120]"]),
    ],
)
def test_what_has_the_same_ptx_everywhere_is_compiled_to_that_of_the_oldest(archs, flags):
    job = build.Job(Path("x.cu"), "x", tuple(build.parse_archs(archs)), same_ptx=True)
    assert job.arch_flags == [part for flag in flags for part in ("-gencode", flag)]
    assert build.Job(Path("x.cpp"), "x", (), same_ptx=True).arch_flags == []
    assert build.Job(Path("x.cu"), "x", job.archs).arch_flags == [flag for arch in job.archs for flag in arch.flags]


# ---- Where things lie --------------------------------------------------------------------------------------------------------------


def test_sources_lie_in_the_package_or_beside_it(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "__file__", str(tmp_path / "hf_flash2" / "build.py"))
    assert build.source_folder() == tmp_path / "csrc"
    (tmp_path / "hf_flash2" / "csrc").mkdir(parents=True)
    assert build.source_folder() == tmp_path / "hf_flash2" / "csrc"


def test_objects_lie_in_the_checkout_or_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    csrc = tmp_path / "checkout" / "csrc"
    csrc.mkdir(parents=True)
    assert build.default_build_folder(csrc) == tmp_path / "home" / ".cache" / "hf_flash2" / "build"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert build.default_build_folder(csrc) == tmp_path / "cache" / "hf_flash2" / "build"
    (tmp_path / "checkout" / "pyproject.toml").touch()
    assert build.default_build_folder(csrc) == tmp_path / "checkout" / "build" / "kernels"


@pytest.mark.parametrize("name", ["api.cpp", "rotary.cu", "sm80/gemm.cuh", "params.h", "instantiate.py"])
def test_every_source_is_in_the_digest(tmp_path, name):
    source = tmp_path / name
    source.parent.mkdir(exist_ok=True)
    digests = {build.digest_of_sources(tmp_path)}
    for text in ("one", "two"):
        source.write_text(text)
        digests.add(build.digest_of_sources(tmp_path))
    source.rename(source.with_stem("renamed"))
    digests.add(build.digest_of_sources(tmp_path))
    assert len(digests) == 4
    (tmp_path / "notes.txt").touch()
    assert build.digest_of_sources(tmp_path) in digests


def test_options_come_before_their_variables(monkeypatch, tmp_path):
    asked = []

    def plan(csrc, folder, toolkit, archs, head_dims):
        asked.append(([arch.name for arch in archs], head_dims))
        raise build.BuildError("enough")

    monkeypatch.setattr(build, "_plan", plan)
    monkeypatch.setattr(build, "reason_not_buildable", lambda: None)
    monkeypatch.setattr(build, "find_toolkit", lambda: build.Toolkit(Path("/cuda"), "13.0.88", "a test"))
    monkeypatch.setattr(build, "find_host_compiler", lambda: build.HostCompiler("g++"))

    def ask(**options):
        with pytest.raises(build.BuildError, match="enough"):
            build.build(csrc=ROOT / "csrc", build_folder=tmp_path, output=tmp_path / "lib.so", **options)

    ask()
    monkeypatch.setenv("HF_FLASH2_ARCHS", "90")
    monkeypatch.setenv("HF_FLASH2_HEAD_DIMS", "64")
    ask()
    ask(archs="80", head_dims="128")
    assert asked == [(["80", "90", "90a"], ""), (["90"], "64"), (["80"], "128")]


# ---- Real builds of a stand-in source tree -----------------------------------------------------------------------------------------

INSTANTIATE = """
from dataclasses import dataclass
HEAD_DIMS = (64, 128)

@dataclass(frozen=True)
class File:
    name: str
    label: str
    family: str
    same_ptx: bool
    source: str

def files(head_dims=HEAD_DIMS):
    source = '#include "kernel.cuh"\\ntemplate __global__ void kernel<{}>(float*);\\n'
    return [File(f"forward_sm80_hdim{d}", f"forward d{d}", "sm80", d == 128, source.format(d)) for d in head_dims]

def headers():
    return {"generated.cuh": "constexpr int kGenerated = 1;"}
"""
KERNEL = """
#pragma once
#include "generated.cuh"
template <int N> __global__ void kernel(float* p) { p[threadIdx.x] += N * kGenerated; }
"""
API = """
#include <cuda_runtime.h>
extern "C" __attribute__((visibility("default"))) const char* info() {
  int count = 0;
  cudaGetDeviceCount(&count);
  return HF_FLASH2_VERSION " " HF_FLASH2_TOOLKIT " " HF_FLASH2_ARCHS " " HF_FLASH2_HEAD_DIMS " " HF_FLASH2_SOURCES;
}
"""
# 64 live accumulators in the 32 registers that two blocks of 1024 threads leave
SPILLING_KERNEL = """#pragma once
template <int N> __global__ void __launch_bounds__(1024, 2) kernel(float* p) {
  float a[N];
  for (int i = 0; i < N; i++) a[i] = p[i * threadIdx.x];
  __syncthreads();
  for (int i = 0; i < N; i++) for (int j = 0; j < N; j++) a[i] = a[i] * a[j] + 1;
  for (int i = 0; i < N; i++) p[i * threadIdx.x + i] = a[i];
}
"""

needs_compiler = pytest.mark.skipif(build.reason_not_buildable() is not None, reason=f"{build.reason_not_buildable()}")


NAME = 'a b\'s, $c: "d"'


class Tree:
    """A source tree in a folder with what a shell, nvcc and ninja mind in its name, and what building it said."""

    def __init__(self, folder: Path):
        self.csrc, self.output, self.folder = folder / NAME / "csrc", folder / "lib.so", folder / NAME / "build"
        self.csrc.mkdir(parents=True)
        for name, text in {"instantiate.py": INSTANTIATE, "kernel.cuh": KERNEL, "api.cpp": API}.items():
            (self.csrc / name).write_text(text)

    def build(self, archs: str = "80", **options) -> list[str]:
        lines: list[str] = []
        build.build(csrc=self.csrc, build_folder=self.folder, output=self.output, archs=archs, say=lines.append, **options)
        return lines

    def info(self) -> str:
        copy = self.output.with_name(f"{time.monotonic_ns()}.so")  # the loader caches by file
        shutil.copy(self.output, copy)
        library = ctypes.CDLL(str(copy))
        library.info.restype = ctypes.c_char_p
        return library.info().decode()


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


@needs_compiler
def test_build_shows_progress_and_rebuilds_only_what_changed(tree):
    lines = tree.build()
    progress = [line for line in lines if line.startswith("[")]
    assert sorted(line.split("] ")[1] for line in progress) == [
        "api", "forward d128 sm_80", "forward d64 sm_80", "link libhf_flash2.so"
    ]  # fmt: skip
    assert [line.split("]")[0] for line in progress] == [f"[{i}/4" for i in range(1, 5)]
    built = re.fullmatch(r"hf_flash2: built .* \((\d+\.\d) MB\) in \d+ s, largest compiler process (\d+\.\d\d) GiB", lines[-1])
    assert float(built[1]) == pytest.approx(tree.output.stat().st_size / 1e6, abs=0.06) and 0.01 < float(built[2]) < 16
    version = build.package_version()
    assert tree.info() == f"{version} {build.find_toolkit().version} sm_80 64,128 {build.digest_of_sources(tree.csrc)}"

    def compiled() -> list[str]:
        return sorted(line.split("] ")[1] for line in tree.build() if line.startswith("["))

    assert compiled() == []
    time.sleep(0.01)
    (tree.csrc / "kernel.cuh").write_text(KERNEL + "// changed\n")
    assert compiled() == ["api", "forward d128 sm_80", "forward d64 sm_80", "link libhf_flash2.so"]  # api: digest_of_sources
    time.sleep(0.01)
    (tree.csrc / "api.cpp").write_text(API + "// changed\n")
    assert compiled() == ["api", "link libhf_flash2.so"]


@needs_compiler
def test_a_file_of_the_same_ptx_has_machine_code_for_each_architecture(tree):
    """d 128 is said to be one, d 64 is not."""
    tree.build(archs="80;90+PTX")
    logs = {path.name: path.read_text() for path in (tree.folder / "objects").glob("forward_*.log")}
    assert len(logs) == 2 and all(re.findall(r"for '(\w+)'", text) == ["sm_80", "sm_90"] for text in logs.values()), logs
    commands = (tree.folder / "build.ninja").read_text()
    assert "arch=compute_80,code=[sm_80,sm_90,compute_80]" in commands and "arch=compute_90,code=[sm_90,compute_90]" in commands


@needs_compiler
def test_kernels_that_are_said_to_have_the_same_ptx_everywhere_have_it(tmp_path):
    """CUDA's headers, too, ask for the architecture: where they answer differently, an older one's code is not what was measured."""
    instantiate = build._load_by_path("committed_instantiate", ROOT / "csrc" / "instantiate.py")
    toolkit, same = build.find_toolkit(), [file for file in instantiate.files((64,)) if file.same_ptx]
    assert same
    includes = [flag for path in ("include", "include/cccl") for flag in ("-isystem", str(toolkit.root / path))]
    for file in same:
        (tmp_path / f"{file.name}.cu").write_text(file.source)
        texts = {}
        for arch in build.parse_archs(build.DEFAULT_ARCHS):
            if arch.family == file.family:
                output = tmp_path / f"{arch.name}.ptx"
                options = ["-ptx", "-std=c++17", "-arch", f"compute_{arch.name}", *includes, "-I", ROOT / "csrc", "-o", output]
                subprocess.run([toolkit.root / "bin" / "nvcc", *options, tmp_path / f"{file.name}.cu"], check=True)
                # but for their target and the names of what a file keeps to itself, which have the number of a process in them
                texts[arch.name] = re.sub(rf"\.target sm_{arch.name}\b|\w*_GLOBAL__N_\w*", "", output.read_text())
        assert len(texts) == 2 and texts["80"] == texts["90"], file.name


@needs_compiler
def test_toolkit_in_another_place_leaves_the_objects_fresh(tree, monkeypatch, tmp_path):
    """pip unpacks nvcc into a new temporary folder for every isolated build."""
    tree.build(head_dims="64")
    dependencies = subprocess.run([build.find_ninja(), "-C", tree.folder, "-t", "deps"], capture_output=True, text=True).stdout
    assert "kernel.cuh" in dependencies and "cuda_runtime" not in dependencies
    toolkit = build.find_toolkit()
    (tmp_path / "elsewhere").symlink_to(toolkit.root)
    monkeypatch.setattr(build, "find_toolkit", lambda *_: build.Toolkit(tmp_path / "elsewhere", toolkit.version, "a test"))
    assert [line for line in tree.build(head_dims="64") if line.startswith("[")] == []
    monkeypatch.setattr(build, "find_toolkit", lambda *_: build.Toolkit(toolkit.root, "99.0.0", "a test"))
    assert len([line for line in tree.build(head_dims="64") if line.startswith("[")]) == 3  # another version compiles everything anew


def test_names_that_the_terminal_cannot_show_are_escaped(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    build._say("pf\xe4d \udce4")
    sys.stdout.seek(0)
    assert sys.stdout.read() == "pf\\xe4d \\udce4\n"


def test_second_build_in_a_folder_waits_and_says_so(tmp_path):
    said: list[str] = []
    first_done = threading.Event()
    entered_early = []

    def second() -> None:
        with build._lock(tmp_path, said.append):
            entered_early.append(not first_done.is_set())

    thread = threading.Thread(target=second)
    with build._lock(tmp_path, said.append):
        thread.start()
        while not said and thread.is_alive():
            time.sleep(0.01)
        first_done.set()
    thread.join(10)
    assert entered_early == [False] and said == [f"hf_flash2: waiting for another build in {tmp_path}"]


def is_locked(folder: Path) -> bool:
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def until(condition) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_a_build_that_is_killed_keeps_the_folder_locked_until_its_compilers_have_ended(tmp_path):
    """Else the next build would run beside them, and link what they write."""
    ninja = make_executable(tmp_path / "ninja", f"echo '[1/2] compile'; until [ -e {tmp_path}/end ]; do sleep 0.05; done")
    script = f"""
from hf_flash2 import build
build.find_ninja = lambda: {str(ninja)!r}
with build._lock(build.Path({str(tmp_path)!r}), print) as lock:
    build._run_ninja(build.Path({str(tmp_path)!r}), 1, lock, lambda line: print(line, flush=True))
"""
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "[1/2] compile\n"
        process.kill()
        process.wait()
        assert is_locked(tmp_path)
        (tmp_path / "end").touch()
        assert until(lambda: not is_locked(tmp_path))


def test_an_interrupted_build_ends_its_compilers(tmp_path, monkeypatch):
    ninja = make_executable(tmp_path / "ninja", f"echo $$ > {tmp_path}/pid; echo '[1/2] compile'; exec sleep 60")
    monkeypatch.setattr(build, "find_ninja", lambda: str(ninja))

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    started = time.monotonic()
    with build._lock(tmp_path, print) as lock, pytest.raises(KeyboardInterrupt):
        build._run_ninja(tmp_path, 1, lock, interrupt)
    assert time.monotonic() - started < 30
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


@pytest.mark.parametrize(("content", "why"), [("#!/gone/python", "No such file"), ("\x7fELF", "Exec format error")])
def test_a_ninja_that_does_not_run_is_named(tmp_path, monkeypatch, content, why):
    """A script of a Python that is gone, or a program for another machine."""
    ninja = make_executable(tmp_path / "ninja", "")
    ninja.write_text(content)
    monkeypatch.setattr(build, "find_ninja", lambda: str(ninja))
    with build._lock(tmp_path, print) as lock, pytest.raises(build.BuildError, match=f"{ninja} does not run: {why}.*install"):
        build._run_ninja(tmp_path, 1, lock, print)


def test_an_interrupt_is_no_traceback(monkeypatch, capsys):
    def interrupted(**options):
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "build", interrupted)
    assert build.run(arguments()) == 130
    assert capsys.readouterr().err == "hf_flash2: interrupted; what has been compiled is kept for the next build\n"


def arguments(*argv: str):
    parser = argparse.ArgumentParser()
    build.add_arguments(parser)
    return parser.parse_args(argv)


def test_a_build_folder_that_cannot_be_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(build.BuildError, match=r"the build folder cannot be used: .*file.*--build-folder PATH"):
        build._usable_folder(ROOT / "csrc", tmp_path / "file")

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(build.BuildError, match="home directory.*XDG_CACHE_HOME"):
        build._usable_folder(tmp_path / "csrc", None)


@needs_compiler
def test_narrowed_build_says_so_in_the_library(tree):
    tree.build(archs="90+PTX", head_dims="64")
    assert tree.info().split()[2:4] == ["sm_90,compute_90", "64"]
    with pytest.raises(build.BuildError, match="there are no kernels for 90a"):
        tree.build(archs="90a")
    (tree.csrc / "spills.json").write_text(json.dumps({"forward_sm80_hdim64:*": {"bytes": 8, "reason": "a test"}}))
    tree.build(archs="90+PTX", head_dims="64", strict=True)  # another architecture may spill
    with pytest.raises(build.BuildError, match="forward_sm80_hdim64:.*: nothing spills there any more"):
        tree.build(archs=build.DEFAULT_ARCHS, head_dims="64", strict=True)


@needs_compiler
def test_the_hopper_kernels_alone_are_refused_before_anything_is_compiled(tmp_path):
    with pytest.raises(build.BuildError, match="names the Hopper kernels alone.*use '90;90a'"):
        build.build(archs="90a", head_dims="64", build_folder=tmp_path, output=tmp_path / "library.so")
    assert not list(tmp_path.rglob("*.o"))


@needs_compiler
def test_a_library_that_would_take_the_place_of_a_folder_or_a_device_is_refused(tree):
    """root may replace /dev/null."""
    tree.output.mkdir()
    with pytest.raises(build.UsageError, match="--output must name a file, got the folder"):
        tree.build()
    tree.output.rmdir()
    os.mkfifo(tree.output)
    with pytest.raises(build.UsageError, match=f"--output must name a file, got the device {tree.output}"):
        tree.build()
    assert tree.output.is_fifo()


@needs_compiler
def test_library_hides_the_cuda_runtime(tree):
    tree.build(head_dims="64")
    symbols = subprocess.run(["nm", "-D", "--defined-only", tree.output], capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in symbols.splitlines()] == ["info"]


@needs_compiler
def test_spill_fails_a_strict_build_and_is_reported_by_the_default_one(tree):
    (tree.csrc / "kernel.cuh").write_text(SPILLING_KERNEL)
    with pytest.raises(build.BuildError, match=r"forward_sm80_hdim64:sm_80:\S+: spills \d+ bytes"):
        tree.build(head_dims="64", strict=True)
    assert any("findings on the machine code, such as register spills: 1 " in line for line in tree.build(head_dims="64"))
    (tree.csrc / "spills.json").write_text(json.dumps({"forward_sm80_hdim64:sm_80:*": {"bytes": 100000, "reason": "a test"}}))
    assert not any("findings" in line for line in tree.build(head_dims="64", strict=True))


@needs_compiler
def test_cxx_with_launcher_and_flags_builds(tree, monkeypatch):
    monkeypatch.setenv("CXX", f"no-launcher {build.find_host_compiler().program} -DPLANTED='a, b' -O1")
    (tree.csrc / "api.cpp").write_text("#ifndef PLANTED\n#error the flag is lost\n#endif\n" + API)
    assert "no-launcher before the compiler, which is left out" in tree.build(head_dims="64")[0]


@needs_compiler
def test_compile_error_shows_last_lines_and_a_hint(tree):
    (tree.csrc / "kernel.cuh").write_text(KERNEL.replace("+= N", "+= missing_name"))
    with pytest.raises(build.BuildError) as caught:
        tree.build(head_dims="64")
    message = str(caught.value)
    assert 'identifier "missing_name" is undefined' in message and "nvcc" in message and "hint: " in message and len(message) < 6000
    (tree.csrc / "kernel.cuh").write_text(KERNEL)
    tree.build(head_dims="64")  # the next correct build works


@needs_compiler
def test_missing_kernel_is_found_by_the_linker(tree):
    (tree.csrc / "api.cpp").write_text(
        API.replace("int count = 0;", "int count = 0; extern void hf_flash2_no_such_kernel(); hf_flash2_no_such_kernel();")
    )
    with pytest.raises(build.BuildError, match=r"undefined reference(.|\n)*hint: csrc/dispatch.h calls a kernel"):
        tree.build(head_dims="64")


@needs_compiler
def test_unknown_architecture_has_its_hint(tree):
    with pytest.raises(build.BuildError, match="hint: this toolkit does not know one of the architectures"):
        tree.build(archs="999", head_dims="64")


@pytest.mark.parametrize(
    ("output", "hint"),
    [
        ("nvcc error : 'cicc' died due to signal 9 (Kill signal)", "MAX_JOBS=1"),
        ("#error -- unsupported GNU version! gcc versions later than 15", "set CXX to an older one"),
        ("#error -- unsupported clang version! clang version must be less than 21", "set CXX to an older one"),
        ("sh: 1: cicc: not found", "nvidia-nvvm"),
        ("x.cu:1:10: fatal error: crt/host_config.h: No such file or directory", "nvidia-cuda-crt"),
        ("x.cu:1:10: fatal error: cuda/std/array: No such file or directory", "nvidia-cuda-cccl"),
        ("fatal error: No space left on device", "disk is full"),
        ("/usr/bin/ld: cannot find -lcudart_static", "nvidia-cuda-runtime"),
    ],
)
def test_hints_for_known_causes(output, hint):
    report = build._failure_report(["FAILED: objects/a.o", "nvcc a.cu", *(f"line {i}" for i in range(100)), output], Path("/x"))
    assert hint in report and output in report and "nvcc a.cu" in report and "line 10\n" not in report


def test_output_that_cannot_be_written_names_the_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(build.BuildError, match="--output PATH"):
        build._install(tmp_path / "file", tmp_path / "file" / "lib.so")


def test_a_copy_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(source, target):
        Path(target).write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(build.shutil, "copy2", full)
    with pytest.raises(build.BuildError, match="No space left"):
        build._install(tmp_path / "file", tmp_path / "new" / "lib.so")
    assert list((tmp_path / "new").iterdir()) == []


# ---- Packaging ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [True, pytest.param(False, marks=needs_compiler)], ids=["pure", "with library"])
def test_wheel(tmp_path, skip):
    """pip's own route, without isolation: tag, contents, and the one line that tells of a pure install."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "build", "*.so", "*.egg-info", "__pycache__"))
    for name, text in {"instantiate.py": INSTANTIATE, "kernel.cuh": KERNEL, "api.cpp": API}.items():
        for old in (copy / "csrc").glob("*.cu"):
            old.unlink()
        (copy / "csrc" / name).write_text(text)
    sources = {f"hf_flash2/{path.relative_to(copy)}" for name in ("csrc", "patches") for path in (copy / name).rglob("*") if path.is_file()}
    for folder in ("lib", f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"):  # of an install before: no source any more
        (copy / "build" / folder / "hf_flash2" / "csrc").mkdir(parents=True)
        for name in ("removed.py", "csrc/removed.cuh"):
            (copy / "build" / folder / "hf_flash2" / name).touch()
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-v",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(tmp_path),
        str(copy),
    ]
    environment = os.environ | {"HF_FLASH2_SKIP_CUDA": str(int(skip)), "HF_FLASH2_ARCHS": "80"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    version = build.package_version()
    names = zipfile.ZipFile(wheel).namelist()
    assert ("hf_flash2/libhf_flash2.so" in names) is not skip
    assert sources | {"hf_flash2/build.py"} <= set(names)
    assert not [name for name in names if "__pycache__" in name or "removed" in name or name.startswith(("tests/", "build/"))]
    said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if "installing without CUDA kernels" in line]
    if skip:
        assert wheel.name == f"hf_flash2-{version}-py3-none-any.whl"
        assert len(said) == 1 and "HF_FLASH2_SKIP_CUDA" in said[0]
    else:
        assert re.fullmatch(rf"hf_flash2-{version}-py3-none-linux_\w+\.whl", wheel.name) and not said


def test_a_build_into_the_checkout_leaves_its_sources_there(tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "build", "*.so", "*.egg-info", "__pycache__"))
    command = [sys.executable, "setup.py", "build_py", "--build-lib", "."]
    done = subprocess.run(command, cwd=copy, env=os.environ | {"HF_FLASH2_SKIP_CUDA": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in (ROOT / "hf_flash2").glob("*.py")} <= {path.name for path in (copy / "hf_flash2").iterdir()}


def test_a_checkout_has_its_patches(tmp_path):
    """Without an install, and where Python runs in the checkout, which hides an installed package."""
    script = (
        "import sys; sys.meta_path = [finder for finder in sys.meta_path if 'editable' not in str(finder).lower()]; "
        "import hf_flash2, hf_flash2.patches; print(hf_flash2.patches.__file__, callable(hf_flash2.patch))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(ROOT / "patches" / "__init__.py"), "True"]


def test_another_checkout_has_its_own_patches(tmp_path):
    """Where one is installed as editable, whose finder would answer for hf_flash2.patches, too."""
    for folder in ("hf_flash2", "patches"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    script = "import hf_flash2.patches; print(hf_flash2.__file__, hf_flash2.patches.__file__)"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(tmp_path / folder / "__init__.py") for folder in ("hf_flash2", "patches")]


@pytest.mark.parametrize("version", ["65.5.0", "75.8.2", "76.1.0"])
def test_setuptools_that_is_too_old_is_named(tmp_path, version):
    """Without build isolation nobody reads what pyproject.toml requires; 65 has no bdist_wheel, 75 refuses the license of the project."""
    (tmp_path / "setuptools.py").write_text(f'__version__ = "{version}"')
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, ROOT / "setup.py", "--version"], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip() == f"hf_flash2: setuptools must be 77 or newer, got {version}; `pip install 'setuptools>=77'`"
    (tmp_path / "setuptools.py").write_text('__version__ = "77.0.3"')
    done = subprocess.run([sys.executable, ROOT / "setup.py", "--version"], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert "cannot import name 'Extension'" in done.stderr  # of the stand-in: the version will do


@needs_compiler
def test_what_cannot_be_built_ends_an_install_with_its_message(tmp_path):
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", tmp_path, "--build-temp", tmp_path]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"HF_FLASH2_ARCHS": "75"}, capture_output=True, text=True)
    assert done.returncode == 1 and "got '75' in '75'" in done.stderr and "Traceback" not in done.stderr


def test_build_requirements_and_build_extra_agree():
    text = (ROOT / "pyproject.toml").read_text()
    required, extra = (re.search(rf"^{name} = \[(.+?)^\]", text, re.MULTILINE | re.DOTALL)[1] for name in ("requires", "build"))
    lines = {line.strip() for line in required.splitlines() if line.strip()} - {'"setuptools>=77",'}
    assert lines == {line.strip() for line in extra.splitlines() if line.strip()}
    assert len([line for line in lines if "nvidia" in line and "==13.0.*" in line]) == 5


def test_build_module_and_setup_import_no_torch():
    code = "import sys, runpy; sys.modules['torch'] = None; runpy.run_path('hf_flash2/build.py'); print('fine')"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "fine", done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_sets_up_once_at_a_time_and_again_where_the_clone_has_moved(tmp_path, monkeypatch):
    """Two at once cleared each other's .venv; that of a copy ran the code of the clone that it was copied from."""
    monkeypatch.delenv("MAKEFLAGS", raising=False)  # of the make that runs the tests
    clone, log = tmp_path / "a clone", tmp_path / "log"
    clone.mkdir()
    for name in ("Makefile", "pyproject.toml", "setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, clone)
    python = make_executable(
        tmp_path / "python",
        f"""case "$*" in
        *"import torch"*) exit 1;;
        *"-m venv"*) echo begins >> {log}; sleep 0.5; rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python; echo ends >> {log};;
        esac""",
    )
    make = ["make", "build", f"PYTHON={python}"]

    def set_ups() -> list[str]:
        lines = log.read_text().split()
        log.write_text("")
        return lines

    both = [subprocess.Popen(make, cwd=clone, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert set_ups() == ["begins", "ends"]
    moved = clone.rename(tmp_path / "moved")
    for expected in (["begins", "ends"], []):
        subprocess.run(make, cwd=moved, stdout=subprocess.DEVNULL, check=True)
        assert set_ups() == expected
    (moved / ".venv/bin/python").unlink()
    (moved / ".venv/bin/python").symlink_to("/gone/python")
    subprocess.run(make, cwd=moved, stdout=subprocess.DEVNULL, check=True)
    assert set_ups() == ["begins", "ends"]

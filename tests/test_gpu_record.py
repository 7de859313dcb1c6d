"""The record of a run that --gpu-record writes (conftest.py)."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import conftest
import pytest

ROOT = Path(__file__).resolve().parent.parent
TESTS = """
import pytest


def test_passes(record_errors):
    record_errors({"out": 1.25, "dq": 0.5})


def test_passes_with_smaller_errors(record_errors):
    record_errors({"out": 0.75, "dq": 1.0004})


@pytest.mark.parametrize("x", (1, 2))
def test_fails(x):
    assert x == 1, f"got {x}"


@pytest.fixture
def broken():
    raise RuntimeError("no such thing")


def test_does_not_begin(broken):
    pass


def test_is_skipped():
    pytest.skip("not here")


@pytest.mark.gpu
def test_is_not_begun():
    pass


@pytest.fixture
def leaves_something_behind():
    yield
    raise RuntimeError("left")


def test_does_not_end(leaves_something_behind):
    pass
"""


def test_record_counts_and_says_why_tests_failed(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "--rootdir", tmp_path, "--gpu-record", tmp_path / "record.json", tmp_path]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stdout + run.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["tests"] == {"passed": 4, "failed": 3, "skipped": 2}
    failed = ("test_fails[2]", "test_does_not_begin", "test_does_not_end")
    assert list(record["failures"]) == [f"test_some.py::{name}" for name in failed]
    assert record["failures"]["test_some.py::test_fails[2]"].startswith("AssertionError: got 2")
    assert record["failures"]["test_some.py::test_does_not_begin"] == "RuntimeError: no such thing"
    assert record["largest_error_ours_over_eager"] == {"test_some.py": {"out": 1.25, "dq": 1.0}}


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_a_tree_is_dirty_where_it_differs_from_its_commit(tmp_path, monkeypatch):
    """The record itself aside, which the run writes."""
    monkeypatch.delenv("HF_FLASH2_COMMIT", raising=False)
    monkeypatch.setattr(conftest, "ROOT", tmp_path)
    record = tmp_path / "tests" / "gpu_run.json"
    record.parent.mkdir()
    assert conftest.git_state(record) == {"commit": None, "dirty": None}
    as_someone = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], [*as_someone, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    commit = conftest.git_state(record)["commit"]
    assert len(commit) == 40 and conftest.git_state(record) == {"commit": commit, "dirty": False}
    record.touch()
    assert conftest.git_state(record) == {"commit": commit, "dirty": False}
    (tmp_path / "new.py").touch()
    assert conftest.git_state(record) == {"commit": commit, "dirty": True}
    monkeypatch.setenv("HF_FLASH2_COMMIT", "named")
    assert conftest.git_state(record) == {"commit": "named", "dirty": None}

"""The record of a run that --gpu-record writes (conftest.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = """
import pytest


def test_passes(record_errors):
    record_errors({"out": 1.25})


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
"""


def test_record_counts_and_says_why_tests_failed(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "--rootdir", tmp_path, "--gpu-record", tmp_path / "record.json", tmp_path]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stdout + run.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["tests"] == {"passed": 2, "failed": 2, "skipped": 1}
    assert list(record["failures"]) == ["test_some.py::test_fails[2]", "test_some.py::test_does_not_begin"]
    assert record["failures"]["test_some.py::test_fails[2]"].startswith("AssertionError: got 2")
    assert record["failures"]["test_some.py::test_does_not_begin"] == "RuntimeError: no such thing"
    assert record["largest_error_ours_over_eager"] == {"test_some.py": {"out": 1.25}}

"""A fault of the GPU takes down the test that made it, and no other."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

FAULTY = """
import pytest, torch
from pkv._triton import tl, triton

@triton.jit
def far_kernel(x):
    tl.store(x + 2**40, 1)

@pytest.mark.parametrize("number", range(4))
def test_one_of_four_faults(number):
    if number == 1:
        far_kernel[(1,)](torch.zeros(1, device="cuda"))
        torch.cuda.synchronize()
    assert torch.ones(3, device="cuda").sum() == 3
"""


def run_faulty(tmp_path, *options):
    folder = tmp_path / "faulty"
    folder.mkdir()
    (folder / "conftest.py").write_text("from tests.conftest import *\n")
    (folder / "test_faulty.py").write_text(FAULTY)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"),
               f"--rootdir={tmp_path}", *options, str(folder)]  # fmt: skip
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=280).stdout


@pytest.mark.gpu
def test_a_fault_takes_down_one_test(tmp_path):
    pytest.importorskip("xdist", reason="needs pytest-xdist")
    said = run_faulty(tmp_path, "-n", "1")
    assert "3 passed" in said, said
    assert "test_one_of_four_faults[1]" in said
    assert "illegal memory access" in said or "unspecified launch failure" in said


@pytest.mark.gpu
def test_without_a_process_to_go_on_in_the_run_ends_and_says_why(tmp_path):
    said = run_faulty(tmp_path, "-p", "no:xdist")
    assert "has left the GPU unusable for this process" in said, said
    assert "1 passed" in said

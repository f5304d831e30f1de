"""compute-sanitizer finds nothing: no access outside of memory, and no race in shared memory, in any stage.

Run as a script, this file is what is watched: every own stage on small batches of all dtypes, on a GPU, held against
the reference. PyTorch's allocator is off there, so that a pointer that leaves its tensor leaves its allocation.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch
from cases import CASES, DEVICE, DTYPES, Case, batch, known

import pkv
from pkv._triton import INTERPRETED
from tests.conftest import ROOT

OWN = [stage for stage in pkv.STAGES if stage not in ("reference", "adaptive", "flashinfer")]
BATCHES = [case for case in CASES if case.name != "one-long-63-short"] + [
    Case("rows-of-many-runs", [2000, 5, 0, 700], n_q_heads=8, head_dim=128),
    Case("heads-of-four-warps", [130, 17], n_q_heads=32, n_kv_heads=1, head_dim=256),
]


def watched(stages: list[str]) -> int:
    """Decode every batch in every dtype with these stages; how many results were right.

    AssertionError where there is nothing to watch: the tools find no fault in kernels that a CPU interprets.
    """
    assert DEVICE.type == "cuda", "torch finds no GPU under the tool"
    assert not INTERPRETED, "kernels are interpreted"
    n_right = 0
    for stage in stages:
        for case in BATCHES:
            for dtype in DTYPES.values():
                q, cache = batch(case, dtype)
                wanted, _ = pkv.decode(q, cache, stage="reference", return_lse=True)
                out, _ = pkv.decode(q, cache, stage=stage, return_lse=True, **known(stage, case.options))
                torch.testing.assert_close(out, wanted, atol=0.03, rtol=0.03)
                n_right += 1
    return n_right


def test_a_run_that_watches_nothing_fails(monkeypatch):
    """Interpreted kernels, as where the driver does not start under the tool, are right and have no hazards."""
    monkeypatch.setattr(sys.modules[__name__], "INTERPRETED", True)
    with pytest.raises(AssertionError, match=r"no GPU under the tool|interpreted"):
        watched([])


@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("stage", OWN)
def test_nothing_is_found(stage, tool):
    found = shutil.which("compute-sanitizer")
    if found is None:
        pytest.skip("compute-sanitizer is not installed; it comes with CUDA's toolkit")
    command = [found, "--tool", tool, "--error-exitcode", "99", sys.executable, __file__, stage]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert f"{len(BATCHES) * len(DTYPES)} right" in done.stdout
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "RACECHECK SUMMARY: 0 hazards" in done.stdout


if __name__ == "__main__":
    print(watched(sys.argv[1:]), "right")

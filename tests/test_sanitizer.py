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
from cases import CASES, DEVICE, Case, batch, known

import pkv
from pkv._triton import INTERPRETED, tl, triton
from tests.conftest import ROOT

OWN = [stage for stage in pkv.STAGES if stage not in ("reference", "adaptive", "flashinfer")]
BATCHES = [
    *CASES,
    Case("rows-of-many-runs", [2000, 5, 0, 700], n_q_heads=8, head_dim=128),
    Case("heads-of-four-warps", [130, 17], n_q_heads=32, n_kv_heads=1, head_dim=256),
]
# fp32 has a tile loop of its own; fp16 and bf16 share one, so they take turns
WATCHED = [
    (case, dtype)
    for number, case in enumerate(BATCHES)
    for dtype in (torch.float32, (torch.float16, torch.bfloat16)[number % 2])
]

WINDOWED = [
    (Case("windows", [100, 0, 7, 300, 64], page_size=page_size), dtype, window)
    for page_size, dtype, window in (
        (4, torch.float16, 33), (16, torch.float32, 20), (64, torch.bfloat16, 1), (1, torch.float32, 100),
    )
]  # fmt: skip


def watched(stages: list[str]) -> int:
    """Decode every batch with these stages; how many results were right.

    AssertionError where there is nothing to watch: the tools find no fault in kernels that a CPU interprets.
    """
    assert DEVICE.type == "cuda", "torch finds no GPU under the tool"
    assert not INTERPRETED, "kernels are interpreted"
    n_right = 0
    for stage in stages:
        for case, dtype in WATCHED:
            q, cache = batch(case, dtype)
            wanted, _ = pkv.decode(q, cache, stage="reference", return_lse=True)
            out, _ = pkv.decode(q, cache, stage=stage, return_lse=True, **known(stage, case.options))
            torch.testing.assert_close(out, wanted, atol=0.03, rtol=0.03)
            n_right += 1
        for case, dtype, window in WINDOWED:
            q, cache = batch(case, dtype)
            for row, length in enumerate(case.lengths):  # pages before the window are gone
                cache.block_table[row, : max(0, length - window) // case.page_size] = -1
            features = {"window": window, "soft_cap": 5.0, "return_lse": True}
            wanted, _ = pkv.decode(q, cache, stage="reference", **features)
            out, _ = pkv.decode(q, cache, stage=stage, **features)
            torch.testing.assert_close(out, wanted, atol=0.03, rtol=0.03)
            n_right += 1
    return n_right


def read_beyond_the_pool() -> None:
    """A page id that does not exist, in a row that is read; decode() on a GPU looks at no values unless asked to."""
    q, cache = batch(Case("one", [40]), torch.float16)
    cache.block_table[0, 1] = cache.n_pages + 1000
    pkv.decode(q, cache, stage="row_local")
    torch.cuda.synchronize()


@triton.jit
def racing_kernel(out):
    """All warps of a program write one word of shared memory, and read it, with no barrier between."""
    threads = tl.arange(0, 128)
    words = tl.inline_asm_elementwise(
        "{ .reg .u32 word; mov.u32 word, global_smem; st.shared.u32 [word], $1; ld.shared.u32 $0, [word]; }",
        "=r,r", [threads], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(out + tl.sum(words, 0) % 2, 1)  # a sum over warps takes shared memory


def race() -> None:
    racing_kernel[(1,)](torch.zeros(2, dtype=torch.int32, device=DEVICE), num_warps=4)
    torch.cuda.synchronize()


PLANTED = {"memcheck": read_beyond_the_pool, "racecheck": race}
FOUND = {"memcheck": "Invalid __global__ read", "racecheck": "hazard"}


def test_a_run_that_watches_nothing_fails(monkeypatch):
    """Interpreted kernels, as where the driver does not start under the tool, are right and have no hazards."""
    monkeypatch.setattr(sys.modules[__name__], "INTERPRETED", True)
    with pytest.raises(AssertionError, match=r"no GPU under the tool|interpreted"):
        watched([])


def under(tool: str, what: str) -> subprocess.CompletedProcess[str]:
    """This file run as a script under one of compute-sanitizer's tools."""
    found = shutil.which("compute-sanitizer")
    if found is None:
        pytest.skip("compute-sanitizer is not installed; it comes with CUDA's toolkit")
    command = [found, "--tool", tool, "--error-exitcode", "99", sys.executable, __file__, what]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": paths}
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.gpu
@pytest.mark.parametrize("tool", PLANTED)
def test_a_planted_fault_is_found(tool):
    done = under(tool, f"planted-{tool}")
    assert done.returncode != 0, (done.stdout + done.stderr)[-4000:]
    assert FOUND[tool] in done.stdout
    assert "SUMMARY: 0 " not in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("stage", OWN)
@pytest.mark.parametrize("tool", PLANTED)  # one tool after the other: the second finds all kernels compiled
def test_nothing_is_found(stage, tool):
    done = under(tool, stage)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert f"{len(WATCHED) + len(WINDOWED)} right" in done.stdout
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "RACECHECK SUMMARY: 0 hazards" in done.stdout


if __name__ == "__main__":
    if sys.argv[1].startswith("planted-"):
        PLANTED[sys.argv[1].removeprefix("planted-")]()
    else:
        print(watched(sys.argv[1:]), "right")

"""What only a GPU can show: real sizes, CUDA graphs, no hidden synchronisation, a bounded number of compiled variants.

`make test-gpu`, or `python -m pytest -m gpu tests/test_gpu.py` where nothing can be installed.
"""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys

import pytest
import torch
from cases import DEVICE, DTYPES, Case, batch, decode, options_of, stages

import pkv
from pkv import _triton
from pkv.bench.accuracy import Yardstick
from pkv.bench.loads.traces import TRACES, make_trace, steps_of
from pkv.kernels import merging
from pkv.stages import s1_split_kv, s2_row_local, s3_workqueue, s4_adaptive, s5_stream_k, x_flashinfer
from tests.conftest import ROOT

pytestmark = pytest.mark.gpu

LARGE = pytest.mark.xdist_group("large")  # tests that take GiB: one after another, whatever the number of processes
FLOATS16 = {name: DTYPES[name] for name in ("fp16", "bf16")}
RAGGED = [65536, 9000, 2100, 12000, 0, 1, 30000, 4096]


def llama(lengths, dtype=torch.float16, *, n_heads=(32, 8), head_dim=128, page_size=16, max_pages=None, seed=0):
    """q and a cache of random pages made on the GPU: ids shuffled, NaN in unused slots, junk in unused entries."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    n_used = [-(-length // page_size) for length in lengths]
    n_pages = sum(n_used) + 3

    def randn(*shape):
        return torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype)

    k, v = (randn(n_pages, page_size, n_heads[1], head_dim) for _ in "kv")
    order = torch.randperm(n_pages, generator=generator, device=DEVICE).to(torch.int32)
    table = torch.full((len(lengths), max_pages or max(n_used) + 1), 2**31 - 1, dtype=torch.int32, device=DEVICE)
    first = 0
    for row, n in enumerate(n_used):
        table[row, :n] = order[first : first + n]
        if lengths[row] % page_size:
            last = int(order[first + n - 1])
            k[last, lengths[row] % page_size :] = v[last, lengths[row] % page_size :] = math.nan
        first += n
    unmapped = order[first:].long()
    k[unmapped] = v[unmapped] = math.nan
    cache = pkv.PagedKVCache(k, v, table, torch.tensor(lengths, dtype=torch.int32, device=DEVICE))
    return randn(len(lengths), n_heads[0], head_dim), cache


def assert_accurate(q, cache, out, lse, stage=""):
    accuracy = Yardstick(q, cache).measure(out, lse, rounds_weights=stage in ("flashinfer", "adaptive"))
    assert accuracy.ok, accuracy


def assert_equal(want, got):
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b)


def variants(kernel):
    """How many times a kernel was compiled in this process."""
    return sum(len(entry[0]) for entry in kernel.device_caches.values())


def need_memory(gib):
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gib:
        pytest.skip(f"needs {gib} GiB of GPU memory, {free:.1f} are free")


# --- real sizes ---


@pytest.mark.parametrize("dtype", FLOATS16)
@pytest.mark.parametrize("lengths", [[65536], RAGGED], ids=["one-row-of-64k", "ragged"])
@pytest.mark.parametrize("stage", stages())
def test_llama_3_8b(stage, lengths, dtype):
    q, cache = llama(lengths, DTYPES[dtype])
    assert_accurate(q, cache, *decode(q, cache, stage), stage=stage)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", stages())
def test_many_ragged_rows(stage, dtype):
    q, cache = llama([(37 * row) % 1500 for row in range(200)], DTYPES[dtype], n_heads=(8, 2))
    out, lse = decode(q, cache, stage)
    assert_accurate(q, cache, out, lse, stage=stage)
    assert_equal((out, lse), decode(q, cache, stage))


@LARGE
@pytest.mark.parametrize("trace", TRACES)
def test_every_stage_on_the_traces(trace):
    """Three steps of each trace at the paper's shape: 8 rows, or 1 of bucketed."""
    need_memory(8)
    n_requests, max_active = (16, 1) if trace == "bucketed" else (24, 8)
    steps = steps_of(make_trace(trace, 20260623, n_requests, max_active), max_active, 48)
    wrong = {}
    for number in (0, 23, 47):
        q, cache = llama(steps[number])
        yardstick = Yardstick(q, cache)
        for stage in pkv.STAGES:
            if stage == "flashinfer" and x_flashinfer.unavailable():
                continue
            for options in ({}, {"policy": "cost", "gpu": "rtx3060"}) if stage == "adaptive" else ({},):
                made = pkv.plan(steps[number], pkv.Shape.of(q, cache), stage=stage, **options)
                found = yardstick.measure(*pkv.run(q, cache, made), rounds_weights=made.variant == "tensor-core")
                if not found.ok:
                    wrong[number, stage, made.stage] = found
    assert not wrong


def test_adaptive_without_flashinfer(monkeypatch):
    """Hidden, as where it is not installed: the same results by a stage of ours, and one warning."""
    monkeypatch.setattr(s4_adaptive, "_failed", {})
    monkeypatch.setattr(s4_adaptive, "_warned", set())
    monkeypatch.setattr(x_flashinfer, "imported", lambda: "FlashInfer is not installed: pip install flashinfer-python")
    q, cache = llama([9000, 300, 0, 5000])
    with pytest.warns(UserWarning, match="takes workqueue in place of flashinfer.*not installed") as caught:
        result = pkv.decode(q, cache, stage="adaptive", return_lse=True)
    assert len(caught) == 1
    assert_accurate(q, cache, *result)
    assert_equal(result, pkv.decode(q, cache, stage="workqueue", return_lse=True))


GROUPS = {
    "stage": "test_stage[", "head-dims": "a7", "heads": "a8", "pages": "a9", "strides": "a5",
    "the-rest": "not a4 and not a5 and not a7 and not a8 and not a9 and not test_stage[",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_the_cases_of_the_cpu_run_here_too(group):
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "tests/test_stages.py", "-k", GROUPS[group]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("hypothesis") is None, reason="needs hypothesis")
def test_the_merge_cases_of_the_cpu_run_here_too():
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "tests/test_merging.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]


# --- graphs and synchronisation ---


def test_a_captured_decode_replays_while_lengths_change():
    capacity = [2048, 2048, 2048, 2048]
    q, cache = llama(capacity)
    out = torch.empty_like(q)
    pkv.decode(q, cache, out=out)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = pkv.decode(q, cache, out=out, return_lse=True)
    for lengths in (capacity, [1, 17, 2048, 300], [0, 0, 5, 0], [0, 0, 0, 0], [2047, 16, 0, 1], capacity):
        cache.lengths.copy_(torch.tensor(lengths))
        q.normal_()
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_accurate(q, cache, out, lse)
        assert_equal((out, lse), pkv.decode(q, cache, return_lse=True))


@pytest.mark.parametrize("stage", [None, *(name for name in pkv.STAGES if "dynamic" in options_of(name))])
def test_decode_never_waits_for_the_gpu(stage):
    q, cache = llama(RAGGED)
    want = pkv.decode(q, cache, stage=stage, return_lse=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = pkv.decode(q, cache, stage=stage, return_lse=True)
        cache.lengths.clamp_(max=1000)
        shorter = pkv.decode(q, cache, stage=stage, return_lse=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_equal(want, got)
    assert_accurate(q, cache, *shorter, stage=stage)


def test_a_decode_loop_that_appends():
    k, v = (torch.randn(3, 40, 2, 64, device=DEVICE, dtype=torch.float16) for _ in "kv")
    cache = pkv.PagedKVCache.from_dense(k, v, [40, 0, 15], n_pages=20)
    q = torch.randn(3, 8, 64, device=DEVICE, dtype=torch.float16)
    for step in range(20):
        cache.append(k[:, step], v[:, step])
        assert_accurate(q, cache, *pkv.decode(q, cache, return_lse=True))
        assert_accurate(q, cache, *pkv.decode(q, cache, stage="length_buckets", return_lse=True))
    assert cache.lengths.tolist() == [60, 20, 35]


@pytest.mark.parametrize("stage", stages())
def test_d2_compiled_variants_do_not_grow(stage):
    """A decode loop over 1 to 40 rows and lengths from 1 to 300, in one cache."""
    q, cache = llama([300] * 40, n_heads=(8, 2), head_dim=64)
    kernels = {
        "split_kv_kernel": s1_split_kv.split_kv_kernel,
        "row_local_kernel": s2_row_local.row_local_kernel,
        "workqueue_kernel": s3_workqueue.workqueue_kernel,
        "stream_k_kernel": s5_stream_k.stream_k_kernel,
        "merge_runs_kernel": s5_stream_k.merge_runs_kernel,
        "merge_kernel": merging.merge_kernel,
    }
    before = {name: variants(kernel) for name, kernel in kernels.items()}
    for n_rows in range(1, 41):
        table, lengths = cache.block_table[:n_rows], cache.lengths[:n_rows]
        rows = pkv.PagedKVCache(cache.k_pages, cache.v_pages, table, lengths)
        for length in range(1, 301, 23):
            lengths.fill_(length)
            lengths[n_rows // 2] = 1
            pkv.decode(q[:n_rows], rows, stage=stage)
    torch.cuda.synchronize()
    grown = {name: variants(kernel) - before[name] for name, kernel in kernels.items()}
    assert all(n <= 6 for n in grown.values()), grown


# --- A4, A13, A15: what the interpreter cannot show ---


@LARGE
@pytest.mark.parametrize("stage", stages())
def test_a4_page_ids_beyond_int32(stage):
    """Page 131,072 of 16 x 8 x 128 elements is the first whose offset exceeds 2**31."""
    need_memory(6)
    pages = torch.empty(131_074, 16, 8, 128, dtype=torch.float16, device=DEVICE)
    pages[:6] = pages[131_068:] = torch.randn(6, 16, 8, 128, device=DEVICE).half()
    q = torch.randn(2, 32, 128, device=DEVICE).half()
    table = torch.tensor([[0, 1, 4], [5, 0, 0]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([40, 16], dtype=torch.int32, device=DEVICE)
    want = decode(q, pkv.PagedKVCache(pages, pages, table, lengths), stage, splits=2)
    got = decode(q, pkv.PagedKVCache(pages, pages, table + 131_068, lengths), stage, splits=2)
    assert_equal(want, got)
    assert want[0].isfinite().all()


@pytest.mark.parametrize("stage", stages())
def test_a13_many_rows_and_heads(stage):
    """2,050 rows of 32 KV heads: 65,600 programs would exceed grid axes 1 and 2."""
    pages = torch.randn(2050, 1, 32, 16, device=DEVICE).half()
    order = torch.randperm(2050, device=DEVICE).to(torch.int32)[:, None]
    lengths = torch.ones(2050, dtype=torch.int32, device=DEVICE)
    q = torch.randn(2050, 32, 16, device=DEVICE).half()
    out, lse = decode(q, pkv.PagedKVCache(pages, pages, order, lengths), stage)
    for half in (slice(0, 1025), slice(1025, 2050)):
        part = pkv.PagedKVCache(pages, pages, order[half], lengths[half])
        assert_equal((out[half], lse[half]), decode(q[half], part, stage))
    torch.testing.assert_close(out, pages[order[:, 0].long(), 0])  # one token: its V


@pytest.mark.parametrize("num_warps", [1, 2, 4])
def test_a15_the_merge_of_128_splits(num_warps, monkeypatch):
    """Some Triton releases miscompile a reduction over states with a base offset inside the offset tensor."""
    monkeypatch.setattr(_triton, "_compiled", {})  # where what was compiled for another number of warps is kept
    monkeypatch.setattr(merging, "MOST_WARPS", num_warps)
    monkeypatch.setattr(merging, "PROGRAM_ELEMENTS", 512)
    q, cache = llama([20_548], torch.bfloat16, n_heads=(16, 4))
    out, lse = decode(q, cache, "split_kv", splits=128)
    assert float((out.double() - Yardstick(q, cache).out).abs().max()) < 1e-2
    assert_accurate(q, cache, out, lse)


# --- A5 on a GPU: strides choose another compiled variant ---


@pytest.mark.parametrize("stage", stages())
def test_a5_strides(stage):
    from test_stages import LAYOUTS, assert_same

    q, cache = batch(Case("strided", [20, 7, 333], n_q_heads=8))
    want = decode(q, cache, stage)
    for change in LAYOUTS.values():
        pages = change(cache.k_pages, cache.v_pages)
        strided = pkv.PagedKVCache(*pages, cache.block_table, cache.lengths)
        if stage == "adaptive":  # which takes a stage of ours where FlashInfer cannot read the pages
            assert_accurate(q, cache, *decode(q, strided, stage), stage=stage)
        elif stage != "flashinfer" or x_flashinfer.unfit(*pages, "cuda-core") is None:
            assert_same(stage, want, decode(q, strided, stage))


def test_an_unaligned_cache_takes_the_variant_without_the_promise():
    """The promise of 16-byte rows would fault here: a misaligned address ends the process."""
    q, cache = batch(Case("shifted", [333, 20], n_q_heads=8))
    want = decode(q, cache, "split_kv", splits=2)
    for shift in range(1, 8):
        k, v = (
            torch.cat([x.flatten()[:shift], x.flatten()])[shift:].view(x.shape) for x in (cache.k_pages, cache.v_pages)
        )
        other = pkv.PagedKVCache(k, v, cache.block_table, cache.lengths)
        assert_equal(want, decode(q, other, "split_kv", splits=2))


# --- devices ---


def test_cpu_tensors_beside_this_gpu():
    k = torch.zeros(1, 5, 2, 64, dtype=torch.float16)
    cache = pkv.PagedKVCache.from_dense(k, k, [5])
    q = torch.zeros(1, 4, 64, dtype=torch.float16)
    with pytest.raises(TypeError, match="the tensors lie on 'cpu', but kernels are compiled for the GPU"):
        pkv.decode(q, cache, stage="split_kv")
    assert pkv.decode(q, cache, stage="reference").shape == (1, 4, 64)


def test_mixed_devices():
    q, cache = batch(Case("mixed", [5, 17]))
    with pytest.raises(ValueError, match=r"q lies on cpu, the cache on cuda"):
        pkv.decode(q.cpu(), cache)
    with pytest.raises(ValueError, match=r"block_table is on cpu"):
        pkv.PagedKVCache(cache.k_pages, cache.v_pages, cache.block_table.cpu(), cache.lengths)
    with pytest.raises(ValueError, match=r"lengths is on cpu"):
        pkv.PagedKVCache(cache.k_pages, cache.v_pages, cache.block_table, cache.lengths.cpu())
    with pytest.raises(ValueError, match=r"out is .* on cpu"):
        pkv.decode(q, cache, out=q.cpu())


@pytest.mark.gpu(n=2)
@pytest.mark.parametrize("stage", stages())
def test_a14_tensors_on_another_gpu_than_the_current_one(stage):
    q, cache = batch(Case("ragged", [40, 0, 333]))
    want = decode(q, cache, stage, splits=2)
    other = torch.device("cuda", 1)
    moved = cache.to(other)
    out, lse = decode(q.to(other), moved, stage, splits=2)
    assert torch.cuda.current_device() == 0
    assert out.device == lse.device == other
    assert_equal(want, (out.to(DEVICE), lse.to(DEVICE)))
    with pytest.raises(ValueError, match=r"q lies on cuda:0, the cache on cuda:1"):
        decode(q, moved, stage)

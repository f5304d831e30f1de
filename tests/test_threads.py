"""Threads that change, read and decode one cache, and forks of the process while they do."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from textwrap import dedent

import pytest
import torch
from cases import DEVICE

import pkv

N_THREADS, N_APPENDS = 4, 300
FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes fork on POSIX only")


def token(value):
    return torch.full((1, 1, 16), float(value), device=DEVICE)


def at_once(*jobs):
    """Run them in threads that begin together; their results, or the first error."""
    barrier = threading.Barrier(len(jobs))

    def run(job):
        barrier.wait()
        return job()

    with ThreadPoolExecutor(len(jobs)) as threads:
        return [future.result() for future in [threads.submit(run, job) for job in jobs]]


@pytest.mark.parametrize("repeat", range(3))
def test_threads_append_each_to_its_own_row(repeat):
    k = torch.zeros(N_THREADS, 2, 1, 16, device=DEVICE)
    cache = pkv.PagedKVCache.from_dense(k, k, [2] * N_THREADS, page_size=4, n_pages=400)

    def grow(row):
        for step in range(N_APPENDS):
            cache.append(token(1000 * row + step), token(step), rows=[row])

    at_once(*(lambda row=row: grow(row) for row in range(N_THREADS)))
    assert cache.lengths.tolist() == cache.host_lengths.tolist() == [2 + N_APPENDS] * N_THREADS
    assert cache.version == N_THREADS * N_APPENDS
    for row in range(N_THREADS):
        assert torch.equal(cache.gather(row)[0][2:, 0, 0].cpu(), 1000.0 * row + torch.arange(N_APPENDS))
    cache.validate()


def test_threads_add_fork_free_append_and_read_at_once():
    """No page gets lost, and none belongs to two rows; what is read is always of one moment."""
    cache = pkv.PagedKVCache.empty(200, 4, 1, 16, 12, dtype=torch.float32, device=DEVICE)
    cache.add(token(7).repeat(5, 1, 1), token(7).repeat(5, 1, 1))
    done = threading.Event()

    def come_and_go(value):
        for step in range(60):
            n_tokens = 1 + (step * 5 + value) % 9
            tokens = token(value).repeat(n_tokens, 1, 1)
            row = cache.add(tokens, tokens)
            cache.append(token(value), token(value), rows=[row])
            child = cache.fork(row)
            cache.append(token(value), token(value), rows=[child])
            for mine, length in ((row, n_tokens + 1), (child, n_tokens + 2)):
                k, _ = cache.gather(mine)
                assert (len(k), k.unique().tolist()) == (length, [value])
            cache.free(row)
            cache.free(child)

    def watch():
        while not done.is_set():
            cache.validate()
            indptr, _, last = (x.cpu() for x in cache.to_csr())
            assert ((indptr.diff() > 0) == (last > 0)).all()
            with cache.unchanged():
                assert cache.host_lengths.tolist() == cache.lengths.tolist()
                twin = copy.deepcopy(cache)
                again = pickle.loads(pickle.dumps(cache))
            for other in (twin, again):
                other.append(token(1), token(1), rows=[0])  # refused if its parts were of two moments
                assert other.lengths[0] == 6

    def change():
        try:
            at_once(*(lambda value=value: come_and_go(value) for value in (1, 2, 3)))
        finally:
            done.set()

    at_once(change, watch)
    assert cache.active_rows == [0]
    assert cache.n_free_pages == 198
    assert len({*cache._pool.free_pages, *cache.block_table[0, :2].tolist()}) == 200


@pytest.mark.parametrize("stage", ["reference", "row_local", "split_kv"])
def test_a_decode_sees_one_moment_while_others_append(stage):
    """Every result is that of some length: the ramp's middle, and never a plan of one length over another."""
    if stage != "reference" and DEVICE.type == "cuda":
        pytest.skip("streams of threads are the caller's to order on a GPU")
    k = torch.zeros(1, 6, 1, 16, device=DEVICE)
    v = torch.arange(6.0, device=DEVICE).view(1, 6, 1, 1).expand(1, 6, 1, 16).contiguous()
    cache = pkv.PagedKVCache.from_dense(k, v, [6], page_size=4, n_pages=40)
    q = torch.zeros(1, 1, 16, device=DEVICE)
    turns = threading.Semaphore(0)

    def grow():
        for length in range(6, 60):
            turns.acquire()
            cache.append(token(0), token(length))

    def look():
        results = []
        try:
            for _ in range(9):
                turns.release(6)  # appends that come while this decodes, however fast either thread is
                out, lse = pkv.decode(q, cache, stage=stage, return_lse=True, check=True)
                results.append((round(lse.exp().item()), out[0, 0, 0].item()))
        finally:
            turns.release(54)
        return results

    _, results = at_once(grow, look)
    assert all(middle == pytest.approx((length - 1) / 2, abs=1e-3) for length, middle in results)


# --- forks ---

FORKING = """
import os, threading, time, torch
import pkv

k = torch.arange(400.0).view(1, 400, 1, 1).expand(1, 400, 1, 16).contiguous()
cache = pkv.PagedKVCache.from_dense(torch.zeros_like(k), k, [400], n_pages=60, max_rows=3)
q = torch.zeros(3, 1, 16)


def in_a_child(do):
    '''What do() returns in a fork of this process, which is ended if it hangs.'''
    ours, its = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # the child has none of torch's own threads
        try:
            os.write(its, repr(do()).encode())
        except BaseException as error:
            os.write(its, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(its)
    for _ in range(400):
        if os.waitpid(child, os.WNOHANG)[0]:
            break
        time.sleep(0.05)
    else:
        os.kill(child, 9)
        return "hangs"
    return os.read(ours, 10000).decode()
"""


@FORKS
@pytest.mark.skipif(DEVICE.type != "cpu", reason="interprets only where there is no GPU")
def test_a_fork_while_another_thread_decodes_in_the_interpreter(fresh):
    """The child decodes by every stage, though the parent's thread is in the midst of a launch, its first one, even."""
    code = """
    few = pkv.PagedKVCache.from_dense(torch.zeros(1, 20, 1, 16), k[:, :20], [20])
    stages = ["row_local", "split_kv", "workqueue", "length_buckets", "reference"]
    decoded = lambda: [round(pkv.decode(q[:1], few, stage=stage)[0, 0, 0].item(), 2) for stage in stages]
    stop, answers = threading.Event(), []

    def decode_on():
        while not stop.is_set():
            pkv.decode(q, cache, stage="row_local")

    thread = threading.Thread(target=decode_on)
    thread.start()
    for pause in (0.1, 0.11, 0.12, 0.13):
        time.sleep(pause)
        answers.append(in_a_child(decoded))
    stop.set()
    thread.join()
    print(set(answers), len(answers))
    """
    want = str([9.5] * 5)
    assert fresh(FORKING + dedent(code), timeout=200).out.strip() == f"{{{want!r}}} 4"


@FORKS
def test_a_fork_while_another_thread_imports_or_computes(fresh, tmp_path):
    """As first launches and printed plans do; either holds a lock of Python's own, which the child needs."""
    (tmp_path / "late.py").write_text("import time\ntime.sleep(1.0)\nvalue = 3")
    code = f"""
    pkv.__path__.append({str(tmp_path)!r})
    thread = threading.Thread(target=lambda: __import__("pkv.late"))
    thread.start()
    time.sleep(0.3)
    print(in_a_child(lambda: __import__("pkv.late").late.value))

    inside, go_on = threading.Event(), threading.Event()
    plan = pkv.plan([5, 40], pkv.Shape(4, 2, 16, 16, "float32"))
    property_of = vars(type(plan))["counters"]
    whole = property_of.func
    property_of.func = lambda plan: (inside.set(), go_on.wait(), whole(plan))[-1]
    other = pkv.plan([5], pkv.Shape(4, 2, 16, 16, "float32"))
    thread = threading.Thread(target=lambda: plan.counters)
    thread.start()
    inside.wait()
    property_of.func = whole
    print(in_a_child(lambda: other.counters.launches))
    go_on.set()
    """
    assert fresh(FORKING + dedent(code)).out.splitlines() == ["3", "1"]


@FORKS
def test_a_fork_by_the_thread_that_holds_a_lock(fresh):
    """It holds it in the child, too, and gives it back there."""
    code = """
    with cache.unchanged():
        child = os.fork()
        cache.append(k[0, :1], k[0, :1], rows=[0])
    cache.append(k[0, :1], k[0, :1], rows=[0])
    if child == 0:
        os._exit(int(cache.lengths[0]) - 400)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), cache.lengths.tolist())
    """
    assert fresh(FORKING + dedent(code)).out.strip() == "2 [402, 0, 0]"


@FORKS
@pytest.mark.parametrize("moment", ["_write", "_publish"])
def test_a_fork_in_the_midst_of_a_change_is_told_so(fresh, moment):
    """Half a change is in the child for ever: its copy of the cache is refused, others go on."""
    code = f"""
    other = pkv.PagedKVCache.from_dense(k, k, [5], n_pages=60)
    inside, go_on = threading.Event(), threading.Event()
    whole = pkv.PagedKVCache.{moment}

    def halfway(self, *args):
        inside.set()
        go_on.wait()
        return whole(self, *args)

    pkv.PagedKVCache.{moment} = halfway
    thread = threading.Thread(target=lambda: cache.append(k[0, :1], k[0, :1], rows=[0]))
    thread.start()
    inside.wait()
    pkv.PagedKVCache.{moment} = whole
    print(in_a_child(lambda: cache.append(k[0, :1], k[0, :1], rows=[0])))
    print(in_a_child(lambda: pkv.decode(q, cache, stage="reference")))
    print(in_a_child(lambda: (other.append(k[0, :1], k[0, :1]), other.lengths.tolist())[1]))
    go_on.set()
    thread.join()
    print(cache.lengths.tolist())
    """
    refused, undecoded, others, lengths = fresh(FORKING + dedent(code)).out.splitlines()
    for told in (refused, undecoded):
        assert told.startswith("ValueError: this process was forked while another thread was changing the cache")
    assert others == "[6]"
    assert lengths == "[401, 0, 0]"

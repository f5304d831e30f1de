"""A captured CUDA graph replays rightly whatever became of the plan, the cache's wrapper and what was remembered.

Without a GPU, a driver that only counts stands for CUDA's.
"""

from __future__ import annotations

import ctypes
import gc
import random
import weakref

import pytest
import torch
from cases import DEVICE, Case, batch, marks_of, options_of

import pkv
from pkv import _triton, decoding
from pkv.bench.accuracy import Yardstick
from pkv.kernels.uploads import UPLOADS
from pkv.runtime import graphs

GPU = torch.device("cuda", 0)
PLANNED_ON_GPU = [stage for stage, module in pkv.STAGES.items() if module.PLANNED_ON == "gpu"]
ON_HOST = ["length_buckets", "workqueue"]


class Thing:
    """Something that can be kept, and seen to be gone."""


class CountingDriver:
    """CUDA's driver, as far as captures need it: one graph per stream, which posts its user objects when destroyed."""

    def __init__(self) -> None:
        self.owned: dict[int, list[tuple[ctypes.c_void_p, ctypes.c_void_p]]] = {}
        self.made: list[tuple[ctypes.c_void_p, ctypes.c_void_p]] = []

    def cuStreamGetCaptureInfo_v2(self, stream, status, number, graph, *_):
        number._obj.value, graph._obj.value = 100 + stream.value, stream.value
        return 0

    def cuUserObjectCreate(self, user_object, pointer, destructor, n_references, flags):
        self.made.append((pointer, destructor))
        user_object._obj.value = len(self.made)
        assert (n_references, flags) == (1, 1)
        return 0

    def cuGraphRetainUserObject(self, graph, user_object, n_references, flags):
        self.owned.setdefault(graph.value, []).append(self.made[user_object.value - 1])
        assert (n_references, flags) == (1, 1)
        return 0

    def destroy(self, graph: int) -> None:
        for pointer, destructor in self.owned.pop(graph):
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(destructor.value)(pointer)


@pytest.fixture
def driver(monkeypatch):
    counting = CountingDriver()
    monkeypatch.setattr(graphs, "_kept", {})
    monkeypatch.setattr(graphs, "_driver", lambda: counting)
    return counting


def capture_on(monkeypatch, stream):
    current = type("Stream", (), {"cuda_stream": stream})()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)


def test_what_a_graph_reads_is_kept_until_it_is_destroyed(driver, monkeypatch):
    things = [Thing() for _ in range(3)]
    alive = [weakref.ref(thing) for thing in things]
    for stream, thing in ((1, things[0]), (2, things[1]), (2, things[1]), (2, things[2])):
        capture_on(monkeypatch, stream)
        graphs.keep_for_replays(thing, GPU)
    assert [len(owned) for owned in driver.owned.values()] == [1, 1], "a graph owns one object, however much it reads"
    del things, thing
    gc.collect()
    assert all(ref() is not None for ref in alive)
    driver.destroy(2)
    graphs.forget_graphs_that_are_gone()
    gc.collect()
    assert [ref() is not None for ref in alive] == [True, False, False]
    driver.destroy(1)
    capture_on(monkeypatch, 3)
    graphs.keep_for_replays(Thing(), GPU)  # looks, too
    gc.collect()
    assert alive[0]() is None


@pytest.mark.parametrize("lacks", ["cuStreamGetCaptureInfo_v2", "driver"])
def test_where_the_driver_cannot_tell_it_is_kept_for_good(driver, monkeypatch, lacks):
    monkeypatch.delattr(CountingDriver, "cuStreamGetCaptureInfo_v2") if lacks != "driver" else monkeypatch.setattr(
        graphs, "_driver", lambda: None
    )
    capture_on(monkeypatch, 1)
    thing = Thing()
    alive = weakref.ref(thing)
    graphs.keep_for_replays(thing, GPU)
    graphs.forget_graphs_that_are_gone()
    del thing
    gc.collect()
    assert alive() is not None


@pytest.mark.parametrize("stage", PLANNED_ON_GPU)
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "these-lengths"])
def test_stages_planned_on_the_gpu_read_no_array_of_the_plan(stage, dynamic, monkeypatch):
    """So a captured graph needs no plan to live on."""
    case = Case("ragged", [70, 0, 5, 33], n_q_heads=2, n_kv_heads=1)
    q, cache = batch(case)
    options = {"splits": 3} if "splits" in options_of(stage) else {}
    made = pkv.plan(case.lengths, pkv.Shape.of(q, cache), stage, dynamic=dynamic, gpu="rtx3060", **options)
    monkeypatch.setattr("pkv.kernels.uploads.Uploads", lambda *_: pytest.fail("an array of the plan is read"))
    result = pkv.run(q, cache, made)
    accuracy = Yardstick(q, cache).measure(*result)
    assert accuracy.ok, accuracy


@pytest.mark.parametrize("stage", ON_HOST)
def test_a_plan_that_is_not_on_the_gpu_yet_is_refused_while_a_graph_is_captured(stage, monkeypatch):
    q, cache = batch(Case("ragged", [40, 5, 70]))
    monkeypatch.setattr("pkv.kernels.uploads.is_capturing", lambda device: True)
    monkeypatch.setattr("pkv.kernels.uploads.keep_for_replays", lambda what, device: kept.append(what))
    kept = []
    made = pkv.plan([40, 5, 70], pkv.Shape.of(q, cache), stage)
    with pytest.raises(RuntimeError, match=r"not on \w+ yet.*run it once with pkv\.run, then capture"):
        pkv.run(q, cache, made)
    assert not kept
    monkeypatch.setattr("pkv.kernels.uploads.is_capturing", lambda device: False)
    want = pkv.run(q, cache, made)
    monkeypatch.setattr("pkv.kernels.uploads.is_capturing", lambda device: True)
    assert all(torch.equal(a, b) for a, b in zip(want, pkv.run(q, cache, made), strict=True))
    assert kept
    assert {id(x) for x in kept} == {id(UPLOADS.known(made)[q.device].packed)}, "all of the plan's memory"


@pytest.mark.parametrize("stage", ["length_buckets", "workqueue"])
def test_decode_with_a_stage_planned_on_the_host_cannot_be_captured(stage, monkeypatch):
    """It would replay this step's plan for ever."""
    q, cache = batch(Case("ragged", [40, 5, 70]))
    monkeypatch.setattr(decoding, "is_capturing", lambda device: True)
    with pytest.raises(
        RuntimeError, match=rf"stage '{stage}' is planned on the host.*capture a stage that is planned on"
    ):
        pkv.decode(q, cache, stage=stage)


def test_tables_of_many_widths_share_a_few_plans_and_kernels():
    """A table that is wider at each step: what is looked up for a launch, and the plan, do not follow its width."""
    widths = range(1, 40_000, 7)
    assert len({decoding.rounded_up(16 * width) for width in widths}) < 200
    assert all(1 <= decoding.rounded_up(16 * width) / (16 * width) <= 17 / 16 for width in widths)


# --- on a GPU ---


def in_all_free_memory():
    """Small int32 tensors of ones, as somebody else's, in all that torch has to hand out of what was given back."""
    return [torch.ones(128, dtype=torch.int32, device=DEVICE) for _ in range(5000)]


def churn(generator):
    """A few tensors of ones, in whatever memory was given back."""
    return [torch.ones(generator.randrange(1, 3000), dtype=torch.int32, device=DEVICE) for _ in range(8)]


def captured(call):
    """(graph, what `call` returned in it), after a first call that compiles."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def assert_replays_rightly(graph, result, q, cache):
    for tensor in result:
        tensor.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    accuracy = Yardstick(q, cache).measure(*result)
    assert accuracy.ok, accuracy


RAGGED = Case("ragged", [700, 0, 5, 1033], n_q_heads=8, n_kv_heads=2)


@pytest.mark.gpu
@pytest.mark.parametrize("stage", PLANNED_ON_GPU)
def test_a_graph_outlives_its_plan(stage):
    q, cache = batch(RAGGED)

    def capture():
        plan = pkv.plan([2048] * 4, pkv.Shape.of(q, cache), stage, dynamic=True)
        return captured(lambda: pkv.run(q, cache, plan))

    graph, result = capture()
    gc.collect()
    kept = in_all_free_memory()
    assert_replays_rightly(graph, result, q, cache)
    del kept


@pytest.mark.gpu
@pytest.mark.parametrize("stage", PLANNED_ON_GPU)
def test_a_graph_outlives_what_decode_remembers(stage):
    """300 other shapes push the plan out of what decode() keeps."""
    q, cache = batch(RAGGED)
    graph, result = captured(lambda: pkv.decode(q, cache, stage=stage, return_lse=True))
    page = torch.zeros(1, 16, 2, 64, dtype=q.dtype, device=DEVICE)
    for n_rows in range(1, 301):
        table = torch.zeros(n_rows, 1, dtype=torch.int32, device=DEVICE)
        other = pkv.PagedKVCache(page, page, table, torch.ones(n_rows, dtype=torch.int32, device=DEVICE))
        pkv.decode(torch.zeros(n_rows, 8, 64, dtype=q.dtype, device=DEVICE), other, stage=stage)
    gc.collect()
    kept = in_all_free_memory()
    assert_replays_rightly(graph, result, q, cache)
    del kept


@pytest.mark.gpu
@pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=marks_of(stage)) for stage in ("length_buckets", "workqueue", "flashinfer")]
)
def test_a_plan_of_the_host_lives_as_long_as_the_graph(stage):
    q, cache = batch(RAGGED)

    def capture():
        plan = pkv.plan(RAGGED.lengths, pkv.Shape.of(q, cache), stage)
        pkv.run(q, cache, plan)  # brings it to the GPU
        return captured(lambda: pkv.run(q, cache, plan)), weakref.ref(plan)

    graphs.forget_graphs_that_are_gone()
    n_graphs = len(graphs._kept)
    (graph, result), plan = capture()
    gc.collect()
    assert plan() is None, "only what the graph reads is kept"
    assert len(graphs._kept) == n_graphs + 1
    kept = in_all_free_memory()
    yardstick = Yardstick(q, cache)
    for _ in range(3):
        for tensor in result:
            tensor.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        accuracy = yardstick.measure(*result, rounds_weights=stage == "flashinfer")
        assert accuracy.ok, accuracy
    del graph, result, kept
    gc.collect()
    torch.cuda.synchronize()
    graphs.forget_graphs_that_are_gone()
    assert len(graphs._kept) == n_graphs, "the graph is gone, and so is what it read"


@pytest.mark.gpu
def test_a_hundred_captures_replay_rightly_whatever_was_dropped():
    """Plans, wrappers of caches and what decode() remembers go; their memory is handed out again at every replay."""
    generator = random.Random(1)
    stages = [*PLANNED_ON_GPU, "length_buckets", "workqueue"]
    n_wrong = n_replays = 0
    for number in range(100):
        stage = stages[number % len(stages)]
        lengths = [generator.choice([0, 1, 16, 100, 777, 1500]) for _ in range(generator.randrange(1, 9))]
        q, made = batch(Case("", lengths, n_q_heads=8, n_kv_heads=2), seed=number)
        tensors = made.k_pages, made.v_pages, made.block_table, made.lengths
        want = pkv.decode(q, made, stage=stage, return_lse=True)

        def capture(q, tensors, stage, lengths):
            cache = pkv.PagedKVCache(*tensors, host_lengths=lengths)
            if pkv.STAGES[stage].PLANNED_ON == "gpu" and len(lengths) % 2:
                return captured(lambda: pkv.decode(q, cache, stage=stage, return_lse=True))
            dynamic = {"dynamic": True} if pkv.STAGES[stage].PLANNED_ON == "gpu" else {}
            most = [cache.capacity] * len(lengths) if dynamic else lengths
            plan = pkv.plan(most, pkv.Shape.of(q, cache), stage, **dynamic)
            return captured(lambda: pkv.run(q, cache, plan))

        graph, result = capture(q, tensors, stage, lengths)
        decoding._capacity_plan.cache_clear()
        del made
        gc.collect()
        for _ in range(20):
            kept = churn(generator)
            for tensor in result:
                tensor.fill_(torch.nan)
            graph.replay()
            right = [torch.allclose(a.double(), b.double(), 1e-3, 1e-3, equal_nan=False) for a, b in zip(result, want)]
            n_wrong += not all(right)
            n_replays += 1
            del kept
    print(f"{n_wrong} of {n_replays} replays are wrong")
    assert (n_wrong, n_replays) == (0, 2000)


@pytest.mark.gpu
@pytest.mark.parametrize("stage", ["length_buckets", "workqueue"])
def test_a_plan_of_one_stream_may_be_dropped_while_another_still_runs_it(stage):
    q, cache = batch(RAGGED)
    plan = pkv.plan(RAGGED.lengths, pkv.Shape.of(q, cache), stage)
    pkv.run(q, cache, plan)  # uploads it on this stream
    torch.ones(1, dtype=torch.int32, device=DEVICE)  # CUDA waits for all streams when it first loads a kernel
    torch.cuda.synchronize()
    size = UPLOADS.known(plan)[q.device].packed.numel()
    other, dropped = torch.cuda.Stream(), weakref.ref(plan)
    gc.collect()  # takes long, so it is done before
    with torch.cuda.stream(other):
        torch.cuda._sleep(4_000_000_000)  # some 2 s
        result = pkv.run(q, cache, plan)
    del plan
    assert dropped() is None
    others = [torch.ones(size, dtype=torch.int32, device=DEVICE) for _ in range(50)]
    is_busy = not other.query()
    torch.cuda.synchronize()
    assert is_busy, "the other stream was done before the memory could be handed out"
    accuracy = Yardstick(q, cache).measure(*result)
    assert accuracy.ok, accuracy
    del others


@pytest.mark.gpu
@pytest.mark.parametrize("stage", PLANNED_ON_GPU)
def test_a_table_of_another_width_at_each_step_compiles_and_plans_nothing_new(stage):
    q, cache = batch(RAGGED)
    wide = torch.zeros(4, 6000, dtype=torch.int32, device=DEVICE)
    wide[:, : cache.max_pages] = cache.block_table
    want = pkv.decode(q, cache, stage=stage)

    def at_width(width):
        return pkv.PagedKVCache(cache.k_pages, cache.v_pages, wide[:, :width].contiguous(), cache.lengths)

    for width in (4097, 4096 + 16):  # a table's rows are 16 bytes apart, or not
        pkv.decode(q, at_width(width), stage=stage)
    looked_up, planned = len(_triton._compiled), decoding._capacity_plan.cache_info().misses
    for width in range(4097, 5300):
        got = pkv.decode(q, at_width(width), stage=stage)
    assert len(_triton._compiled) == looked_up
    assert decoding._capacity_plan.cache_info().misses - planned <= 6
    torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)

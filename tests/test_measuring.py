"""Only what is right is timed, all engines in turn, and a sweep keeps what it has. Times here are made up."""

from __future__ import annotations

import gc
import json
from itertools import count, pairwise
from types import SimpleNamespace

import pytest
import torch

import pkv
from pkv.bench import timing
from pkv.bench.accuracy import Accuracy
from pkv.bench.engines.engine import Engine, Ready
from pkv.bench.engines.registry import find_engines
from pkv.bench.loads.grids import Load, Step, grid, load
from pkv.bench.measuring import checking, sweep
from pkv.bench.measuring.measurement import measure
from pkv.bench.records.records import RecordError, Run, append, read_records

CPU = torch.device("cpu")
SHAPE = pkv.Shape(4, 2, 16, 4, "float32")
LOAD = Load("two steps", SHAPE, (Step((9, 0, 3), 3), Step((10, 1, 4), 1)))


class FakeClock:
    """Runs what it times, and says that each takes longer than the last."""

    def __init__(self):
        self.calls = []
        self.us = count(100)
        self.is_queued = True

    def gpu_us(self, call, enqueue_us=0.0):
        self.calls.append(call)
        call()
        return float(next(self.us)), 7.0, self.is_queued

    def host_us(self, call):
        call()
        return 50.0


def engine(name, run, why_not=lambda batch: None, check=None, settings=None):
    """An engine whose plan is the batch."""
    return Engine(
        name, "made for a test", "pkv", why_not,
        lambda batch: Ready(lambda: batch, run, settings or {}, check=check),
    )  # fmt: skip


def reference(batch):
    return pkv.run(batch.q, batch.cache, pkv.plan(batch.lengths, batch.shape, "reference"))


def with_lengths(batch, change):
    """The same pages, and lengths that are off."""
    lengths = [change(length) for length in batch.lengths]
    table = torch.nn.functional.pad(batch.cache.block_table, (0, 1))
    there = torch.tensor(lengths, dtype=torch.int32)
    cache = pkv.PagedKVCache(batch.cache.k_pages, batch.cache.v_pages, table, there)
    return pkv.run(batch.q, cache, pkv.plan(lengths, batch.shape, "reference"))


def measured(*engines, load=LOAD, rounds=4, clock=None, **options):
    return measure(load, engines, CPU, "a run", clock or FakeClock(), rounds, **options)


def test_a_right_engine_has_a_time_for_each_step():
    found = measured(engine("right", reference, settings={"splits": 4}))
    (right,) = found.timings
    assert not found.wrong
    assert right.gpu_us == (101.5, 105.5), "medians of 100..103, and of 104..107"
    assert right.gpu_us_p5[0] < right.gpu_us[0] < right.gpu_us_p95[0]
    assert (right.plan_us, right.wall_us, right.enqueue_us) == ((50.0, 50.0), (50.0, 50.0), (7.0, 7.0))
    assert right.max_err <= right.tolerance
    assert right.settings == {"splits": 4}
    assert 0 < right.noise < 0.1


@pytest.mark.parametrize("change", [lambda n: max(0, n - 1), lambda n: n + 1], ids=["one less", "one more"])
def test_a_mask_that_is_off_by_one_has_no_time(change):
    wrong = engine("off by one", lambda batch: with_lengths(batch, change))
    found = measured(engine("right", reference), wrong)
    assert [of_engine.engine for of_engine in found.timings] == ["right"]
    assert "out is off by" in found.wrong["off by one"]


def test_an_engine_that_goes_wrong_while_it_is_timed_has_no_time():
    calls = count()

    def run(batch):
        out, lse = reference(batch)
        return (out if next(calls) < 3 else out + 1), lse

    assert "after 4 rounds" in measured(engine("tired", run)).wrong["tired"]


def test_an_engine_that_hands_back_an_old_result_has_no_time():
    kept = []

    def run(batch):
        if not kept:
            kept.append(reference(batch))
        return kept[0]

    one_step = Load("x", SHAPE, LOAD.steps[:1])
    assert "out is off by nan" in measured(engine("lazy", run), load=one_step).wrong["lazy"]


@pytest.mark.parametrize("what", ["q", "k_pages", "v_pages"])
@pytest.mark.parametrize("place", [0, 1])
def test_an_engine_that_writes_to_its_inputs_has_no_time_and_harms_no_other(what, place):
    def run(batch):
        result = reference(batch)
        (batch.q if what == "q" else getattr(batch.cache, what)).mul_(0.5)
        return result

    engines = [engine("right", reference)]
    engines.insert(place, engine("vandal", run))
    found = measured(*engines)
    assert [timing.engine for timing in found.timings] == ["right"]
    assert "writes to q, or to the pages" in found.wrong["vandal"]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda batch: batch.q.copy_(batch.q.flip(0)),
        lambda batch: batch.q.copy_(batch.q.flip(2)),
        lambda batch: batch.cache.k_pages.copy_(batch.cache.k_pages.flip(0)),
        lambda batch: batch.cache.block_table.zero_(),
        lambda batch: batch.cache.lengths.zero_(),
        lambda batch: batch.lengths.clear(),
    ],
    ids=["rows", "dims", "pages", "table", "lengths", "host lengths"],
)
def test_whatever_an_engine_spoils_it_is_named_at_once(spoil, place):
    def run(batch):
        result = reference(batch)
        spoil(batch)
        return result

    engines = [engine("right", reference)]
    engines.insert(place, engine("vandal", run))
    found = measured(*engines)
    assert [timing.engine for timing in found.timings] == ["right"]
    assert found.wrong["vandal"].startswith("it writes to q, or to the pages")


@pytest.mark.parametrize("first_bad", range(1, 9))
@pytest.mark.parametrize("error", [RuntimeError("late. More."), torch.OutOfMemoryError("CUDA out of memory.")])
def test_an_engine_that_raises_late_harms_no_other(first_bad, error):
    calls = count()

    def run(batch):
        if next(calls) >= first_bad:
            raise error
        return reference(batch)

    found = measured(engine("late", run), engine("right", reference))
    timed = {timing.engine: timing for timing in found.timings}
    assert len(timed["right"].gpu_us) == 2
    if isinstance(error, torch.OutOfMemoryError):
        assert "memory" in timed["late"].refused
    else:
        assert found.wrong["late"].startswith("raised RuntimeError: late")


def test_an_engine_whose_result_changes_shape_or_that_cannot_say_why_not():
    calls = count()

    def run(batch):
        out, lse = reference(batch)
        return (out if next(calls) < 2 else out[:1]), lse

    def why_not(batch):
        raise KeyError("what")

    found = measured(engine("shrinks", run), engine("mute", reference, why_not), engine("right", reference))
    assert [timing.engine for timing in found.timings] == ["right"]
    assert set(found.wrong) == {"shrinks", "mute"}


def test_launches_that_were_not_queued_in_time_are_flagged():
    clock = FakeClock()
    clock.is_queued = False
    (right,) = measured(engine("right", reference), clock=clock).timings
    assert right.flags == ("launching outlasted the GPU's sleep 8 times, so gaps between kernels may be in gpu_us",)


@pytest.mark.parametrize(("value", "is_doubtful"), [("1", True), ("0", False), ("", False), (None, False)])
def test_times_are_doubtful_where_each_launch_blocks(value, is_doubtful, monkeypatch):
    """Nothing is queued then, so the gaps between launches are in what the events say."""
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", value)
    (right,) = measured(engine("right", reference)).timings
    assert [flag.partition(" is set")[0] for flag in right.flags] == ["CUDA_LAUNCH_BLOCKING"] * is_doubtful


@pytest.mark.parametrize("is_enabled", [True, False])
def test_garbage_collection_is_as_it_was(is_enabled):
    def run(batch):
        raise KeyboardInterrupt

    try:
        gc.enable() if is_enabled else gc.disable()
        measured(engine("right", reference))
        assert gc.isenabled() == is_enabled
        with pytest.raises(KeyboardInterrupt):
            measured(engine("stops", run))
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()


def test_a_wrong_lse_is_wrong():
    def run(batch):
        out, lse = reference(batch)
        return out, lse / 0.6931

    assert "lse by" in measured(engine("base 2", run)).wrong["base 2"]
    assert not measured(engine("none", lambda batch: (reference(batch)[0], None))).wrong, "without lse, out alone"


def test_nan_is_wrong():
    assert measured(engine("nan", lambda batch: (reference(batch)[0] * torch.nan, None))).wrong


def test_what_an_engine_raises_is_its_own_affair():
    def run(batch):
        raise RuntimeError("no such kernel. More.")

    found = measured(engine("broken", run), engine("right", reference))
    assert found.wrong == {"broken": "raised RuntimeError: no such kernel"}
    assert len(found.timings) == 1


def test_a_refusal_is_kept_whichever_step_it_is_for():
    def why_not(batch):
        return "takes no empty rows" if 0 in batch.lengths else None

    for steps in (LOAD.steps, LOAD.steps[::-1]):
        found = measured(engine("picky", reference, why_not), load=Load("x", SHAPE, steps))
        (picky,) = found.timings
        assert picky.refused == "takes no empty rows"
        assert picky.gpu_us == ()


def test_too_little_memory_is_a_refusal(monkeypatch):
    def run(batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    (starved,) = measured(engine("starved", run)).timings
    assert "memory" in starved.refused

    def no_batch(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(checking, "poisoned_batch", no_batch)
    (right,) = measured(engine("right", reference)).timings
    assert "no engine fits" in right.refused


def test_engines_take_turns_in_an_order_that_rotates():
    order = []

    def noting(name):
        def run(batch):
            order.append(name)
            return reference(batch)

        return run

    class OnlyGpu(FakeClock):
        def gpu_us(self, call, enqueue_us=0.0):
            order.append("|")
            return super().gpu_us(call)

        def host_us(self, call):
            return 1.0

    one_step = Load("x", SHAPE, LOAD.steps[:1])
    measured(*(engine(name, noting(name)) for name in "abc"), load=one_step, rounds=3, clock=OnlyGpu())
    timed = [name for before, name in pairwise(order) if before == "|"]
    assert "".join(timed) == "abcbcacab"


def test_reading_faster_than_the_memory_is_flagged():
    n_bytes = LOAD.kv_bytes
    for peak, is_flagged in ((n_bytes / 200 / 1000, True), (n_bytes / 50 / 1000, False), (None, False)):
        (right,) = measured(engine("right", reference), peak_gb_per_s=peak).timings
        assert bool(right.flags) == is_flagged
    assert "above the card's" in measured(engine("r", reference), peak_gb_per_s=1e-9).timings[0].flags[0]


def test_an_engine_that_is_no_attention_is_judged_by_its_own_check():
    def run(batch):
        return torch.ones(3), None

    right = engine("stream", run, check=lambda result: Accuracy(0.0, 0.0, 0.0, 0.0))
    wrong = engine("stream", run, check=lambda result: Accuracy(1.0, 0.0, 0.0, 0.0))
    assert measured(right).timings
    assert measured(wrong).wrong


@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_steps_without_a_token(lengths):
    found = measured(engine("right", reference), load=Load("nothing", SHAPE, (Step(lengths),)))
    assert not found.wrong
    assert len(found.timings) == 1


def test_noise_covers_the_same_engine_timed_twice():
    assert timing.noise([100.0] * 20) == pytest.approx(0.005), "only the clock's resolution"
    drifting = [100.0, 110.0] * 10  # even rounds differ from odd ones
    assert timing.noise(drifting) > 10 / 105
    assert timing.noise([0.0] * 4) is timing.noise([100.0] * 3) is None, "too little to tell"
    assert measured(engine("right", reference), rounds=3).timings[0].noise is None
    rng = torch.Generator().manual_seed(0)
    misses = 0
    for _ in range(200):  # two medians of 20 normal times each: how often do they differ by more than their noise?
        one, other = (100 + 2 * torch.randn(20, generator=rng) for _ in range(2))
        gap = abs(float(one.median() / other.median()) - 1)
        misses += gap > max(timing.noise(one.tolist()), timing.noise(other.tolist()))
    assert misses <= 2


# --- sweeps, on a machine without a GPU: the clock and the head of the run are made up


@pytest.fixture
def fake_gpu(monkeypatch):
    """sweep() as on a GPU called toy."""
    names = count()
    here = SimpleNamespace(n_sms=28, triton="3.7")

    def run_of(grid_name, device, floor_us, settings):
        gpu = {"title": "toy", "arch": 86, "n_sms": here.n_sms, "peak_gb_per_s": None}
        versions = {"triton": here.triton}
        name = f"run {next(names)}"
        return Run(name, grid_name, "2026-01-01T00:00:00Z", gpu, versions, None, False, floor_us, settings)

    class Watch(FakeClock):
        floor_us = 1.5

        def __init__(self, device):
            super().__init__()

    monkeypatch.setattr(sweep, "Stopwatch", Watch)
    monkeypatch.setattr(sweep, "run_of", run_of)
    return here


@pytest.fixture
def toy_grid(monkeypatch):
    """A grid of three small loads."""
    loads = tuple(Load(f"load {n}", SHAPE, (Step((n + 1, 5)),)) for n in range(3))
    monkeypatch.setattr(sweep, "grid", lambda name: loads)
    return loads


def plan_of(loads, file, *engines):
    return sweep.Sweep("toy", loads, engines, rounds=2, file=file)


def test_a_sweep_writes_each_load_as_soon_as_it_is_measured(fake_gpu, toy_grid, tmp_path):
    file = tmp_path / "records.jsonl"
    running = sweep.sweep(plan_of(toy_grid, file, engine("right", reference)), CPU)
    for n in range(1, 4):
        next(running)
        records = read_records([file])
        assert [of_load.load for of_load in records.timings] == [f"load {k}" for k in range(n)]
    assert records.runs["run 0"].floor_us == 1.5


def test_a_killed_sweep_is_taken_up_where_it_stopped(fake_gpu, toy_grid, tmp_path):
    file, right = tmp_path / "records.jsonl", engine("right", reference)
    running = sweep.sweep(plan_of(toy_grid, file, right), CPU)
    next(running)
    running.close()
    whole = file.read_text()
    with file.open("a") as half:
        half.write('{"schema": 1, "kind": "ti')
    assert len(read_records([file]).timings) == 1, "half a line is left out"

    todo = sweep.resume(file, lambda names: [right], CPU)
    assert [of_load.name for of_load in todo.loads] == ["load 1", "load 2"]
    list(sweep.sweep(todo, CPU))
    assert file.read_text().startswith(whole), "what was there stays"
    records = read_records([file])
    assert [of_load.load for of_load in records.timings] == ["load 0", "load 1", "load 2"]
    assert [of_load.run for of_load in records.timings] == ["run 0", "run 2", "run 2"]
    assert not sweep.resume(file, lambda names: [right], CPU).loads


def test_a_load_that_lacks_an_engine_is_measured_again(fake_gpu, toy_grid, tmp_path):
    file = tmp_path / "records.jsonl"
    right, wrong = engine("right", reference), engine("wrong", lambda batch: (batch.q, None))
    for _, of_load, found in sweep.sweep(plan_of(toy_grid, file, right, wrong), CPU):
        assert list(found.wrong) == ["wrong"], of_load
    assert {of_load.engine for of_load in read_records([file]).timings} == {"right"}, "a wrong engine has no record"
    assert len(sweep.resume(file, lambda names: [right, wrong], CPU).loads) == 3


def test_resume_refuses_another_card(fake_gpu, toy_grid, tmp_path):
    file, right = tmp_path / "records.jsonl", engine("right", reference)
    next(sweep.sweep(plan_of(toy_grid, file, right), CPU))
    fake_gpu.n_sms = 132
    with pytest.raises(RecordError, match="28 SMs, and this is toy with 132"):
        sweep.resume(file, lambda names: [right], CPU)


def test_resume_refuses_other_versions(fake_gpu, toy_grid, tmp_path):
    file, right = tmp_path / "records.jsonl", engine("right", reference)
    next(sweep.sweep(plan_of(toy_grid, file, right), CPU))
    fake_gpu.triton = "3.8"
    with pytest.raises(RecordError, match=r"other versions \(triton 3.7 -> 3.8\): start a new file"):
        sweep.resume(file, lambda names: [right], CPU)


def test_resume_refuses_engines_and_loads_that_are_gone(fake_gpu, toy_grid, tmp_path, monkeypatch):
    file, right = tmp_path / "records.jsonl", engine("right", reference)
    next(sweep.sweep(plan_of(toy_grid, file, right), CPU))
    with pytest.raises(RecordError, match="cannot go on with this version of pkv: engine 'right' does not exist"):
        sweep.resume(file, find_engines, CPU)
    text = file.read_text()
    file.write_text(text.replace('"engines"', '"motors"'))
    with pytest.raises(RecordError, match="cannot go on with this version of pkv: 'engines'"):
        sweep.resume(file, lambda names: [right], CPU)


@pytest.mark.parametrize("content", [b"a letter without an end", b"\x89PNG\n\x1a\n\x00", b"line\nhalf", b""])
def test_resume_leaves_what_it_refuses_as_it_was(fake_gpu, content, tmp_path):
    file = tmp_path / "precious"
    file.write_bytes(content)
    with pytest.raises(RecordError):
        sweep.resume(file, lambda names: [], CPU)
    assert file.read_bytes() == content
    for there_is_none in (tmp_path, tmp_path / "none"):
        with pytest.raises(RecordError, match="cannot read"):
            sweep.resume(there_is_none, lambda names: [], CPU)


def test_a_whole_last_line_that_lacks_its_end_is_kept(fake_gpu, toy_grid, tmp_path):
    file, right = tmp_path / "records.jsonl", engine("right", reference)
    next(sweep.sweep(plan_of(toy_grid, file, right), CPU))
    text = file.read_text()
    file.write_text(text.rstrip("\n"))
    list(sweep.sweep(sweep.resume(file, lambda names: [right], CPU), CPU))
    assert file.read_text().startswith(text)


@pytest.mark.parametrize(
    "tail", ["1", '{"schema":1,"kind":"time","run":"gone","load":"x","engine":"y","refused":"z"}', "[" * 100_000]
)
def test_a_last_line_that_the_file_cannot_hold_goes(fake_gpu, toy_grid, tail, tmp_path):
    file, right = tmp_path / "records.jsonl", engine("right", reference)
    next(sweep.sweep(plan_of(toy_grid, file, right), CPU))
    text = file.read_text()
    file.write_text(text + tail)
    list(sweep.sweep(sweep.resume(file, lambda names: [right], CPU), CPU))
    assert file.read_text().startswith(text + '{"schema"')
    assert len(read_records([file]).timings) == 3


@pytest.mark.parametrize("rounds", ['"20"', "0", "true", "2.5"])
def test_resume_refuses_rounds_that_are_none(fake_gpu, toy_grid, rounds, tmp_path):
    file, right = tmp_path / "records.jsonl", engine("right", reference)
    next(sweep.sweep(plan_of(toy_grid, file, right), CPU))
    file.write_text(file.read_text().replace('"rounds": 2', f'"rounds": {rounds}'))
    with pytest.raises(RecordError, match="cannot go on with this version of pkv: it names 1 engines and rounds = "):
        sweep.resume(file, lambda names: [right], CPU)


def test_a_finished_file_is_not_added_to(fake_gpu, toy_grid, tmp_path):
    file, right = tmp_path / "records.jsonl", engine("right", reference)
    list(sweep.sweep(plan_of(toy_grid, file, right), CPU))
    text = file.read_text()
    list(sweep.sweep(sweep.resume(file, lambda names: [right], CPU), CPU))
    assert file.read_text() == text


def test_resume_refuses_a_file_without_a_run(tmp_path):
    file = tmp_path / "empty.jsonl"
    file.touch()
    with pytest.raises(RecordError, match="no run to go on with"):
        sweep.resume(file, lambda names: [], CPU)


def test_only_picks_loads_by_name():
    assert [of_load.name for of_load in sweep.loads_of("smoke", "bimodal")] == ["bimodal(4,16k)", "bimodal(8,16k)"]
    with pytest.raises(ValueError, match="no load of grid 'smoke' has 'x' in its name"):
        sweep.loads_of("smoke", "x")


# --- loads


def test_loads_are_what_their_names_say():
    assert load("bimodal", 5, 16384).steps[0].lengths == (16384, 2048, 2048, 2048, 16384)
    assert load("zipf", 100, 65536).steps[0].lengths[98:] == (1024, 1024)
    assert load("one_long", 3, 65536).steps[0].lengths == (65536, 512, 512)
    assert max(load("short", 200).steps[0].lengths) <= 2048
    assert min(load("uniform", 200, 16384).steps[0].lengths) >= 16384 // 8
    assert load("uniform", 8, 16384) == load("uniform", 8, 16384), "the same seed draws the same"
    with pytest.raises(ValueError, match="choose one of equal"):
        load("even", 1, 1)


def test_grids_hold_what_was_asked():
    for name in ("smoke", "paper", "full", "growth"):
        names = [of_load.name for of_load in grid(name)]
        assert len(names) == len(set(names))
    assert len(grid("smoke")) == 6
    assert len(grid("paper")) == 75
    assert 100 <= len(grid("full")) <= 130
    assert max(of_load.kv_bytes for of_load in grid("full")) <= 16e9
    assert max(of_load.kv_bytes for of_load in grid("paper")) < 2e9, "the paper's grid fits a 12 GB card"
    assert {of_load.n_rows for of_load in grid("full")} == {1, 2, 4, 8, 16, 32, 64, 128, 256}
    shapes = {of_load.shape for of_load in grid("full")}
    assert {shape.group for shape in shapes} == {1, 4, 8}
    assert {shape.page_size for shape in shapes} == {1, 16, 32, 64, 128}
    assert {shape.head_dim for shape in shapes} == {64, 128, 256}
    with pytest.raises(ValueError, match="choose one of smoke"):
        grid("huge")
    for of_load in grid("full"):
        assert of_load.shape.kv_dtype == of_load.shape.dtype, "the cache has q's dtype, as its name says no other"
        assert ("bfloat16" in of_load.name) == (of_load.shape.dtype == torch.bfloat16)


def test_a_paper_load_has_the_steps_of_its_trace():
    (one,) = [of_load for of_load in grid("paper") if of_load.name == "trace bimodal B8 seed 20260623"]
    assert sum(step.weight for step in one.steps) == 48
    assert one.kv_bytes / 2**20 == pytest.approx(550.5, abs=0.5), "paper.md's useful KV of a step"


def test_a_line_is_json_of_its_schema(tmp_path):
    file = tmp_path / "a.jsonl"
    append(file, [LOAD], "r")
    assert json.loads(file.read_text())["schema"] == 1

"""`pkv demo`: every stage on a poisoned batch. A wrong stage must show."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

import pkv
from pkv.bench.loads.batches import UNMAPPED, bytes_needed, poisoned_batch
from pkv.cli import main
from pkv.commands import demo, limits, output

SHAPE = pkv.Shape(4, 2, 16, 4, "float32")
KEYS = {
    "stage", "max_err", "tolerance", "ok", "max_err_lse", "tolerance_lse", "launches", "items", "programs", "kv_mib",
    "time_ms", "time_kind",
}  # fmt: skip
CPU = torch.device("cpu")
SMALL = "--shape toy --lengths 20,0,37"


def as_json(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict]:
    code = main(["demo", "--json", *argv])
    return code, json.loads(capsys.readouterr().out)


def test_the_default_demo_is_small_and_right(capsys):
    code, found = as_json(capsys)
    assert sum(result["programs"] for result in found["stages"]) < 500, "each takes the interpreter some milliseconds"
    assert code == 0
    assert set(found) >= {"stages", "device", "shape", "lengths", "seed"}
    assert [result["stage"] for result in found["stages"]] == [name for name in pkv.STAGES if name != "flashinfer"]
    assert found["left_out"] == {"flashinfer": "FlashInfer needs a CUDA GPU, and torch sees none"}
    for result in found["stages"]:
        assert set(result) >= KEYS
        assert result["ok"]
        assert 0 < result["max_err"] <= result["tolerance"]
        assert result["max_err_lse"] <= result["tolerance_lse"]
        assert result["error"] is None
    if pkv.INTERPRETED:
        assert (found["device"], found["shape"]) == ("cpu", "toy")
        assert {result["time_kind"] for result in found["stages"]} == {"interpreter: not a speed"}
    assert 0 in found["lengths"]
    split = next(result for result in found["stages"] if result["stage"] == "split_kv")
    assert split["launches"] == 2, "the batch shows a merge"
    _, n_kv_heads, head_dim, _ = demo.SHAPES[found["shape"]]
    assert split["kv_mib"] == pytest.approx(sum(found["lengths"]) * 2 * n_kv_heads * head_dim * 2 / 2**20)


def test_the_table(capsys):
    assert main(["demo", *SMALL.split()]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert max(map(len, lines)) <= 100
    for name in pkv.STAGES:
        [line] = [line for line in lines if line.startswith(f"{name} ")]
        assert " ok " in line or "left out: FlashInfer needs a CUDA GPU" in line
    if pkv.INTERPRETED:
        assert "interpreter: not a speed" in out
    assert lines[-1] == f"all {len(pkv.STAGES) - 1} stages ok"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_dtype(dtype, capsys):
    code, found = as_json(capsys, *SMALL.split(), "--dtype", dtype, "--stage", "split_kv")
    assert code == 0
    assert found["dtype"] == dtype


def test_stages_are_chosen_and_a_seed_decides(monkeypatch, capsys):
    batches = []
    monkeypatch.setattr(demo, "poisoned_batch", lambda *given: batches.append(poisoned_batch(*given)) or batches[-1])
    argv = [*SMALL.split(), "--stage", "reference", "--stage", "length_buckets", "--stage", "reference"]
    _, first = as_json(capsys, *argv, "--seed", "7")
    _, again = as_json(capsys, *argv, "--seed", "7")
    _, other = as_json(capsys, *argv, "--seed", "8")
    assert [result["stage"] for result in first["stages"]] == ["reference", "length_buckets"]
    assert first["seed"] == 7
    assert other["seed"] == 8
    queries = [q for q, _ in batches]
    assert torch.equal(queries[0], queries[1])
    assert (queries[0] - queries[2]).abs().max() > 0.1
    assert first["stages"][0]["max_err"] == again["stages"][0]["max_err"]


@pytest.mark.parametrize("lengths", ["0", "0,0", "1", "16", "17,17"])
def test_batches_at_the_edge(lengths, capsys):
    code, found = as_json(capsys, "--shape", "toy", "--lengths", lengths)
    assert code == 0, found


def test_llama_sizes_on_any_machine(capsys):
    code, found = as_json(capsys, "--shape", "llama3-8b", "--lengths", "17", "--stage", "split_kv")
    assert (code, found["shape"]) == (0, "llama3-8b")
    assert found["stages"][0]["programs"] == 8


@pytest.mark.skipif(not pkv.INTERPRETED, reason="on a GPU FlashInfer may run")
def test_a_stage_in_flashinfers_place_has_its_own_counters(capsys):
    shape = pkv.Shape(8, 2, 64, 16, "float16")
    made = pkv.plan([100, 0, 37, 16, 250, 1], shape, "adaptive")
    assert made.fallback, "the default batch is one that FlashInfer would take"
    code, found = as_json(capsys, "--shape", "toy", "--lengths", "100,0,37,16,250,1", "--stage", "adaptive")
    ran = pkv.plan([100, 0, 37, 16, 250, 1], shape, made.fallback)
    (result,) = found["stages"]
    assert code == 0
    assert ran.n_items != made.n_items
    assert (result["items"], result["launches"], result["programs"]) == (
        ran.n_items, ran.counters.launches, ran.counters.programs,
    )  # fmt: skip


def off_by_a_little(q, cache, plan, scale, out, lse, values=None):
    pkv.STAGES["reference"].launch(q, cache, plan, scale, out, lse)
    out[-1, -1, -1] += 0.1


def nan(q, cache, plan, scale, out, lse, values=None):
    pkv.STAGES["reference"].launch(q, cache, plan, scale, out, lse)
    out[0, 0, 0] = torch.nan


def wrong_lse(q, cache, plan, scale, out, lse, values=None):
    pkv.STAGES["reference"].launch(q, cache, plan, scale, out, lse)
    lse[0, 0] += 0.01


def nothing(q, cache, plan, scale, out, lse, values=None):
    lse.fill_(-torch.inf)


def crash(q, cache, plan, scale, out, lse, values=None):
    raise RuntimeError("the kernel\nfell over")


@pytest.mark.parametrize("sabotage", [off_by_a_little, nan, wrong_lse, nothing, crash], ids=lambda f: f.__name__)
def test_a_wrong_stage_shows(sabotage, monkeypatch, capsys):
    monkeypatch.setattr(pkv.STAGES["split_kv"], "launch", sabotage)
    argv = [*SMALL.split(), "--stage", "split_kv", "--stage", "reference"]
    assert main(["demo", *argv]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^split_kv .* NO( |$)", out, re.MULTILINE)
    assert " ok " in out, "the other stage still runs"
    assert "1 of 2 stages NOT ok" in out
    code, found = as_json(capsys, *argv)
    assert code == 1
    assert [result["ok"] for result in found["stages"]] == [False, True]
    if sabotage is nan:
        assert found["stages"][0]["max_err"] is None
    if sabotage is crash:
        assert found["stages"][0]["error"] == "RuntimeError: the kernel fell over"
        assert "split_kv raised RuntimeError: the kernel fell over" in out


@pytest.fixture
def on_a_cpu(monkeypatch):
    """A machine without a GPU, where nothing may begin."""
    monkeypatch.setattr(demo, "kernel_device", lambda: CPU)
    for name in ("poisoned_batch", "Yardstick", "try_stage"):
        monkeypatch.setattr(demo, name, lambda *given, name=name: pytest.fail(f"{name}() was called: it has begun"))


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["demo", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_what_would_take_the_interpreter_long_is_refused_with_the_estimate(on_a_cpu, capsys):
    error = refused(capsys, "--shape", "llama3-8b", "--lengths", "65536,9000,2100")
    assert "--lengths" in error
    assert " min in Triton's interpreter" in error
    assert "--shape toy" in error
    assert "GPU" in error


def test_what_does_not_fit_memory_is_refused(on_a_cpu, capsys):
    for stages in ([], ["--stage", "reference"]):
        error = refused(capsys, "--lengths", "2000000000", *stages)
        assert "GiB" in error
        assert error.endswith(": shorten them\n"), "--shape toy is the default"
    assert "take --shape toy" in refused(capsys, "--lengths", "2000000000", "--shape", "llama3-8b")


def test_what_takes_long_at_toy_size_is_not_told_to_take_it(on_a_cpu, capsys):
    assert "--shape toy" not in refused(capsys, "--lengths", "200000")


@pytest.mark.skipif(not pkv.INTERPRETED, reason="kernels are compiled here, nothing is estimated")
def test_the_estimate_is_of_the_programs_and_tiles_that_run(steps):
    shape = pkv.Shape(8, 2, 64, 16, "float16")
    q, cache = poisoned_batch([300, 40], shape, 0, CPU)
    plan = pkv.plan([300, 40], shape, "row_local", splits=1)
    pkv.run(q, cache, plan)
    n_programs = len(steps.tiles)
    n_tiles = (sum(steps.tiles) - n_programs) / 2  # K and V of each are loaded, and each program's queries
    assert (n_programs, n_tiles) == (2 * 2, 2 * (19 + 3))
    seconds = n_programs * limits.SECONDS_PER_PROGRAM + n_tiles * limits.SECONDS_PER_TILE
    assert limits.interpreted_seconds(plan) == pytest.approx(seconds)


def test_reference_costs_the_interpreter_nothing():
    assert limits.interpreted_seconds(pkv.plan([10**6], SHAPE, "reference")) == 0


@pytest.mark.parametrize("lengths", [[5, 0, 8, 1], [0, 0], [3], [4, 4], []], ids=str)
def test_the_batch_is_nan_wherever_no_token_lies(lengths):
    q, cache = poisoned_batch(lengths, SHAPE, 3, CPU)
    cache.validate()
    assert q.shape == (len(lengths), 4, 16)
    assert not q.isnan().any()
    held = torch.zeros(cache.n_pages, 4, dtype=torch.bool)
    for row, length in enumerate(lengths):
        for token in range(length):
            page, slot = cache.block_table[row, token // 4], token % 4
            assert not held[page, slot], "no slot is shared"
            held[page, slot] = True
    assert (~held).all(dim=1).sum() >= UNMAPPED
    for pages in (cache.k_pages, cache.v_pages):
        assert torch.equal(pages.isnan().all(dim=(2, 3)), ~held)
        assert torch.equal(pages.isnan().any(dim=3).any(dim=2), ~held)
    n_used = -(-np.array(lengths, dtype=int) // 4)
    for row, n_pages in enumerate(n_used):
        unused = cache.block_table[row, n_pages:].long()
        assert len(unused) > 0
        assert cache.k_pages[unused].isnan().all(), "a table entry past the row points at poison"


def test_page_ids_are_shuffled():
    _, cache = poisoned_batch([64], SHAPE, 0, CPU)
    ids = cache.block_table[0, :16].tolist()
    assert ids != sorted(ids)


def test_memory_is_estimated_above_what_the_batch_takes():
    _, cache = poisoned_batch([100, 7], SHAPE, 0, CPU)
    assert bytes_needed([100, 7], SHAPE) > 0.9 * 2 * cache.k_pages.nbytes
    assert bytes_needed([], SHAPE) == 0


def test_columns_line_up():
    lines = output.table(["stage", "n"], [["split_kv", "12"], ["x", "7"]]).splitlines()
    assert lines == ["stage      n", "split_kv  12", "x          7"]


def test_long_lists_are_cut():
    assert demo.short_list([1, 2]) == "1,2"
    assert demo.short_list([5] * 64) == "5,5,5,5,5,5,5,5,5,5,5,5,... (64 rows)"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("lengths", ["65536", "65536,9000,2100,12000,0,1,30000,4096"], ids=["one-64k", "ragged"])
def test_real_sizes_on_a_gpu(lengths, dtype, capsys):
    code, found = as_json(capsys, "--shape", "llama3-8b", "--lengths", lengths, "--dtype", dtype)
    assert code == 0, found
    assert found["device"] != "cpu"
    assert all(result["time_ms"] > 0 for result in found["stages"])
    assert {result["time_kind"] for result in found["stages"]} == {demo.GPU_TIME}

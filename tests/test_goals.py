"""Goals: what counts for each, on results by hand; and the page is what its command writes."""

from __future__ import annotations

import math

import goalspage
import pytest
from goals import ENGINE, TRITON_PEERS, Goal, goals, over_in_wall, over_peers, values_of
from write import goals_page

from pkv.bench.records.results import Result
from pkv.bench.records.shipped import shipped_records
from tests.conftest import ROOT


def result(engine, gpu_us, wall_us=0.0, plan_us=0.0, load="equal(1,4k)", gb=0.3, flags=(), family="flashinfer"):
    return Result(load, engine, family, gb * 1e9, plan_us, gpu_us, wall_us, 0.01, flags)


def of_load(ours=100.0, our_wall=150.0, load="equal(1,4k)", gb=0.3, **others):
    """{engine: Result}; others: {name: (GPU us, wall us)} with _ for -."""
    made = {ENGINE: result(ENGINE, ours, our_wall, load=load, gb=gb, family="pkv")}
    for name, (gpu_us, wall_us) in others.items():
        engine = name.replace("_", "-")
        family = {"stream": "torch"}.get(engine, "triton" if engine in TRITON_PEERS else "flashinfer")
        made[engine] = result(engine, gpu_us, wall_us, load=load, gb=gb, family=family)
    return made


def test_the_worst_load_decides_or_the_mean():
    values = {"a": 1.3, "b": 0.9, "c": 0.95}
    every, mean = Goal("w", "x", 1.0, values), Goal("w", "x", 1.0, values, of_mean=True)
    assert (every.is_met, every.reached, list(every.misses)) == (False, 0.9, ["b", "c"])
    assert mean.is_met
    assert mean.reached == pytest.approx((1.3 * 0.9 * 0.95) ** (1 / 3))
    assert mean.misses == {}
    assert Goal("w", "x", 0.9, values).is_met, "as much as asked for is enough"


def test_a_goal_of_no_load_is_not_met():
    assert math.isnan(Goal("w", "x", 1.0, {}).reached)
    assert not Goal("w", "x", 0.0, {}).is_met


def test_loads_without_a_value_or_too_small_do_not_count():
    """They are no part of what is reached, but it is said how many there are of those without a value."""
    no_time_of_ours = {name: made for name, made in of_load(xqa=(5.0, 5.0)).items() if name != ENGINE}
    results = {"a": of_load(gb=0.3), "b": of_load(gb=0.1), "c": {}, "d": of_load(gb=0.3), "e": no_time_of_ours}
    found = values_of(results, lambda of: None if of is results["d"] else 2.0, from_bytes=0.2e9)
    assert found == {"a": 2.0, "d": None, "e": None}
    for goal in (Goal("w", "x", 1.0, found), Goal("w", "x", 1.0, found, of_mean=True)):
        assert (goal.is_met, goal.reached, goal.n_unknown) == (True, 2.0, 2)
    assert math.isnan(Goal("w", "x", 1.0, {"a": None}).reached)


@pytest.mark.parametrize(
    ("vllm", "stream", "expected"),
    [(150.0, 50.0, 1.5), (110.0, 92.0, 1.2), (110.0, 91.0, 1.1), (150.0, 95.0, 1.5)],
    ids=["faster", "near-the-memory", "neither", "both"],
)
def test_of_triton_kernels_the_best_counts_or_what_memory_allows(vllm, stream, expected):
    of = of_load(vllm=(vllm, 0), sglang=(900.0, 0), sglang_64=(vllm + 50, 0), stream=(stream, 0))
    assert over_peers(of) == pytest.approx(expected)


def test_wall_times_are_compared_with_the_fastest_by_wall():
    of = of_load(our_wall=100.0, fa2_tensor_core=(50.0, 400.0), fa2_cuda_core=(500.0, 300.0))
    assert over_in_wall(of, ("fa2-tensor-core", "fa2-cuda-core", "batch-attention")) == 3.0
    assert over_in_wall(of, ("xqa",)) is None
    doubtful = of | {"xqa": result("xqa", 1.0, 10.0, flags=("doubtful",))}
    assert over_in_wall(doubtful, ("xqa",)) is None
    assert over_in_wall(of | {"xqa": result("xqa", 1.0, 0.0)}, ("xqa",)) is None, "no time was seen"
    our_own = of | {ENGINE: result(ENGINE, 1.0, 10.0, flags=("doubtful",))}
    assert over_in_wall(our_own, ("fa2-tensor-core",)) is None


def test_each_goal_is_of_the_grid_that_it_names():
    """A rival that is fast in one grid alone spoils the goals of that grid and no others."""

    def grid(rival_us):
        rivals = dict.fromkeys(("fa2_tensor_core", "fa2_cuda_core", "batch_attention", "xqa", "vllm", "sglang"), (rival_us, 900.0))  # fmt: skip # noqa: E501
        return {name: of_load(load=name, gb=1.5, stream=(99.0, 0), **rivals)
                for name in ("trace bimodal B8 seed 20260623", "trace zipf B8 seed 20260623")}  # fmt: skip

    good, bad = grid(300.0), grid(50.0)
    assert all(goal.is_met for goal in goals(good, good, good))
    for grids, where in (((bad, good, good), "132 SMs, full"), ((good, good, bad), "28 SMs, paper")):
        missed = [goal for goal in goals(*grids) if not goal.is_met]
        assert {goal.where for goal in missed} == {where}
        assert len(missed) >= 4


def test_the_page_is_what_the_command_writes():
    assert (ROOT / "docs" / "goals.md").read_text() == goals_page(), f"run: {goalspage.COMMAND}"


def test_the_page_names_what_is_missed():
    runs = [*shipped_records().runs.values()][:1]
    many = {f"load {n}": 0.5 + n / 100 for n in range(15)} | {"fine": 2.0}
    page = goalspage.page_of([Goal("here", "of all", 1.0, many), Goal("there", "of one", 1.0, {"a": 3.0})], runs)
    assert "1 of 2 goals met" in " ".join(page.split())
    assert "| here | of all | 1.00 | 0.500 | 1 of 16 | **no** |" in page
    assert "| there | of one | 1.00 | 3.000 | 1 of 1 | yes |" in page
    assert "load 0 0.500; load 1 0.510;" in " ".join(page.split())
    assert "and 3 others" in " ".join(page.split())
    assert "fine" not in page.partition("## Not met")[2]


def test_the_page_says_why_whatever_is_missed():
    """A mean that is too low, no load at all, a load that is missed by less than a digit, loads without a value."""
    runs = [*shipped_records().runs.values()][:1]
    missed = [
        Goal("here", "in the mean", 1.1, {"a": 1.0996}, of_mean=True), Goal("here", "of none", 1.0, {}),
        Goal("here", "by little", 0.9, {"a": 0.8999, "b": 1.0, "c": None}),
    ]  # fmt: skip
    page = goalspage.page_of(missed, runs)
    assert "(at least 1.10): the mean is 1.099." in page
    assert "(at least 1.00): no load is known." in page
    assert "(at least 0.90): a 0.899." in page
    assert "| here | by little | 0.90 | 0.899 | 1 of 2, 1 unknown | **no** |" in page
    assert "| here | of none | 1.00 | none | 0 of 0 | **no** |" in page


def test_a_grid_where_ours_is_missing_on_a_load_is_judged_all_the_same():
    of = of_load(our_wall=100.0, gb=1.5, stream=(99.0, 0), xqa=(300.0, 900.0), vllm=(300.0, 900.0))
    grid = {"equal(1,4k)": of, "equal(2,4k)": {name: made for name, made in of.items() if name != ENGINE}}
    short = [goal for goal in goals(grid, grid, grid) if "below 200 us, over xqa" in goal.what]
    assert [(goal.reached, goal.n_unknown) for goal in short] == [(9.0, 0)]
    assert all(goal.n_unknown for goal in goals(grid, grid, grid) if goal.known and "200 us" not in goal.what)

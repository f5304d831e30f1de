"""The simulator: hand-worked steps, and what holds of every timeline."""

import dataclasses
import itertools

import cases
import numpy as np
import pytest

import pkv
from pkv.cards.simulation import SPAN, simulate
from pkv.plans.facts import Merging
from pkv.plans.fields import Launch
from pkv.plans.gpu import Costs, GpuProfile
from pkv.plans.plan import Plan

SHAPE = pkv.Shape(n_q_heads=32, n_kv_heads=8, head_dim=128, page_size=16, dtype="float16")
COSTS = Costs(memory_gb_per_s=300, program_gb_per_s=12, item_us=3, launch_us=5, step_us=10, flashinfer_plan_us=70)
GPU = GpuProfile("test", arch=86, n_sms=28, costs=COSTS)
# one head of 500 bytes a token: 200 tokens are 100 kB
TINY = pkv.Shape(n_q_heads=1, n_kv_heads=1, head_dim=125, page_size=16, dtype="float16")
TOY = GpuProfile("toy", arch=86, n_sms=1, costs=Costs(40, 25, item_us=2, launch_us=1))
STAGES = [stage for stage in pkv.STAGES if stage not in ("reference", "adaptive")]


def queue(programs: list[list[int]], shape=TINY, gpu=TOY, resident=2, **changes) -> Plan:
    """A plan without merges in which program p does items of programs[p] tokens, a row each."""
    lengths = [n for program in programs for n in program]
    rows = np.arange(len(lengths))
    fields = dict(
        stage="test",
        shape=shape,
        lengths=lengths,
        items=np.stack([rows, np.zeros_like(rows), lengths], axis=1),
        program_offsets=np.cumsum([0, *map(len, programs)]),
        partial_offsets=np.arange(len(lengths) + 1),
        launches=(Launch("decode", tuple(rows.tolist()), 0, len(programs)),),
        tile=16,
        gpu=gpu,
        programs_per_sm=resident,
    )
    return Plan(**(fields | changes)).validate()


def random_plan(seed: int) -> Plan:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, rng.choice([40, 3000, 60_000]), size=rng.integers(1, 13))
    if seed % 7 == 0:
        lengths[:] = 0
    stage = STAGES[seed % len(STAGES)]
    options = cases.known(stage, {"splits": int(rng.integers(1, 25)), "tile": 32})
    return pkv.plan(lengths, SHAPE, stage=stage, gpu=GPU, **options)


def several_items_a_program(seed: int) -> Plan:
    """The items of a random plan, dealt to fewer programs, in random order."""
    plan = random_plan(3 * seed + 1)
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.sort(rng.integers(0, plan.n_items + 1, size=9)), [plan.n_items]])
    rows = tuple(range(plan.n_rows))
    launches = (Launch("decode", rows, 0, 10), Launch("merge", rows, n_splits=plan.n_items))
    order = rng.permutation(plan.n_items)
    return dataclasses.replace(
        plan, stage="test", launches=launches, program_offsets=offsets, item_order=order
    ).validate()


PLANS = [random_plan(seed) for seed in range(40)] + [several_items_a_program(seed) for seed in range(10)]


def bytes_of(timeline) -> np.ndarray:
    """Bytes per span, counted anew: K and V of the item's tokens, or the states that a merge moves."""
    plan, spans = timeline.plan, timeline.spans
    sizes = np.append(plan.items[:, 2] - plan.items[:, 1], 0)[spans["item"]]
    per_head = 2 * plan.shape.head_dim * plan.shape.dtype.itemsize
    full = [[int(e > b) for r, b, e in plan.items if r == row] for row in range(plan.n_rows)]
    states = np.array([sum(mine) if len(mine) > 1 else 0 for mine in full])[spans["row"]]
    moved = 2 * states * (plan.shape.head_dim + 1) * 4
    if plan.merging is Merging.BY_CUT:  # each of a row's n - 1 cuts moves an equal part, for all heads of a grid head
        cuts = np.array([max(len(mine) - 1, 1) for mine in full])[spans["row"]]
        moved = moved * plan.shape.n_q_heads / plan.shape.grid_heads / cuts
    return np.where(spans["item"] < 0, moved, sizes * per_head)


# --- worked by hand


def test_two_programs_share_the_memory_and_one_alone_is_capped():
    both = simulate(queue([[200], [200]]), TOY)
    # 1 us launch, 2 us start-up, 100 kB each at 20 GB/s
    assert both.spans["begin_us"].tolist() == [1, 1]
    assert both.spans["end_us"].tolist() == [8, 8]
    assert simulate(queue([[200]]), TOY).spans["end_us"].tolist() == [1 + 2 + 4]
    assert both.gpu_ms == 0.008


def test_the_first_free_slot_takes_the_next_program_in_grid_order():
    timeline = simulate(queue([[100], [300], [50], [50]]), TOY)
    spans = timeline.spans
    # both read at 20 until program 0 has its 50 kB (5.5); program 1 then reads at 25 while program 2 starts up (2 us:
    # 50 of its remaining 100 kB), then both at 20 until program 2 has 25 kB (8.75); program 1 ends alone, at 25: 9.75
    assert spans["program"].tolist() == [0, 1, 2, 3]
    assert spans["slot"].tolist() == [0, 1, 0, 0]
    assert spans["begin_us"].tolist() == [1, 1, 5.5, 8.75]
    assert spans["end_us"].tolist() == pytest.approx([5.5, 9.75, 8.75, 11.75])
    assert timeline.busy_us.tolist() == [pytest.approx(11.75 - 3 - 1)]  # none reads from 9.75 to 10.75
    assert timeline.tail_idle == pytest.approx(1 - 7.75 / 11.75)


def test_a_program_does_its_items_one_after_another():
    timeline = simulate(queue([[200, 0, 100], [0]]), TOY)
    spans = {int(span["item"]): (span["begin_us"], span["end_us"], span["slot"]) for span in timeline.spans}
    assert spans[0] == (1, 7, 0)
    assert spans[1] == (7, 9, 0)
    assert spans[2] == (9, 13, 0)
    assert spans[3] == (1, 3, 1)


def test_slots_fill_breadth_first_and_heads_run_fastest():
    gpu = dataclasses.replace(TOY, n_sms=3)
    shape = dataclasses.replace(TINY, n_q_heads=2, n_kv_heads=2)
    spans = simulate(queue([[16], [16], [16], [16]], shape=shape), gpu).spans
    assert spans["program"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert spans["head"].tolist() == [0, 1] * 4
    assert spans["sm"].tolist()[:6] == [0, 1, 2, 0, 1, 2]
    assert spans["slot"].tolist()[:6] == [0, 0, 0, 1, 1, 1]


def test_launches_follow_one_another_and_merges_read_states():
    plan = pkv.plan([64, 32], TINY, stage="length_buckets", splits=2, tile=16, gpu=TOY)
    timeline = simulate(plan, TOY)
    state = 2 * 2 * 126 * 4 / 25e3  # us: two states, written and read
    decode = [2 + n * 500 / 20e3 for n in (16, 32)]
    expected, now = [], 0.0
    for us in (decode[0], 2 + state, decode[1], 2 + state):
        expected.append([now + 1, now + 1 + us])
        now += 1 + us
    assert timeline.launch_us.tolist() == [pytest.approx(pair) for pair in expected]
    assert timeline.spans["item"].tolist() == [2, 3, -1, 0, 1, -1]
    assert timeline.spans["row"].tolist() == [1, 1, 1, 0, 0, 0]


def test_the_cuts_of_a_row_share_its_merge():
    """Units: 4 for the start, then 12 tiles of 8,000 bytes, in 4 runs of 4: three items, two cuts."""
    alone = dataclasses.replace(TOY, costs=Costs(40, 40, 2, 1))  # one program draws all there is, so it plans for four
    plan = pkv.plan([192], TINY, stage="stream_k", tile=16, gpu=alone)
    assert plan.n_programs == 4
    assert np.diff(plan.items[:, 1:], axis=1).ravel().tolist() == [64, 64, 64]
    timeline = simulate(plan, TOY)
    part = 3 * 2 * 126 * 4 / 2  # bytes: of three states, written and read, each cut has half
    assert timeline.spans["item"].tolist() == [0, 1, 2, -1, -1]
    # three programs share 40 GB/s; then two do
    assert timeline.launch_us.tolist() == [
        pytest.approx([1, 3 + 3 * 32 / 40]),
        pytest.approx([4 + 3 * 32 / 40, 6 + 3 * 32 / 40 + 2 * part / 40e3]),
    ]
    per_row = simulate(dataclasses.replace(plan, stage="test"), TOY)
    assert per_row.makespan_us - timeline.makespan_us == pytest.approx(2 * part * (1 / 25e3 - 1 / 40e3))


def test_a_row_that_is_whole_has_one_merge_program_that_moves_nothing():
    """Of a dynamic plan any row may be split, so the merge is launched."""
    plan = pkv.plan([5, 0, 192], TINY, stage="stream_k", tile=16, gpu=TOY, dynamic=True)
    timeline = simulate(plan, TOY)
    merges = timeline.spans[timeline.spans["item"] < 0]
    n_items = np.diff(plan.partial_offsets).tolist()
    assert n_items[:2] == [1, 0]
    assert n_items[2] > 2
    assert np.bincount(merges["row"]).tolist() == [1, 1, n_items[2] - 1]
    assert (merges["end_us"] - merges["begin_us"])[merges["row"] < 2] == pytest.approx(TOY.costs.item_us)


def test_what_a_step_costs_before_its_first_launch():
    plan = queue([[200]], shape=SHAPE, gpu=GPU)
    ours = simulate(plan, GPU)
    theirs = simulate(dataclasses.replace(plan, stage="flashinfer"), GPU)
    assert ours.gpu_ms == pytest.approx((10 + ours.launch_us[-1, 1]) / 1000)
    assert theirs.gpu_ms - ours.gpu_ms == pytest.approx(0.07)


# --- what holds of every plan


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.stage}-{plan.n_rows}-{plan.n_items}")
def test_invariants(plan):
    timeline = simulate(plan, GPU)
    spans, costs = timeline.spans, COSTS
    assert spans.dtype == SPAN
    assert (np.diff(spans["begin_us"]) >= 0).all()
    assert (spans["end_us"] - spans["begin_us"] >= costs.item_us - 1e-9).all()
    # every item once per head, every merged row once per query head, or once per cut and head
    decoded = spans[spans["item"] >= 0]
    keys = sorted(zip(decoded["item"].tolist(), decoded["head"].tolist(), strict=True))
    assert keys == [(item, head) for item in range(plan.n_items) for head in range(SHAPE.grid_heads)]
    merged = [row for launch in plan.launches if launch.kernel == "merge" for row in launch.rows]
    programs = {row: SHAPE.n_q_heads for row in merged}
    if plan.merging is Merging.BY_CUT:
        programs = {row: max(np.diff(plan.partial_offsets)[row] - 1, 1) * SHAPE.grid_heads for row in merged}
    assert np.bincount(spans["row"][spans["item"] < 0], minlength=plan.n_rows).tolist() == [
        programs.get(row, 0) for row in range(plan.n_rows)
    ]
    # no slot does two things at once; a program's spans run in the order of its items, in one slot
    for index, launch in enumerate(plan.launches):
        mine = spans[spans["launch"] == index]
        begin, end = timeline.launch_us[index]
        assert (mine["begin_us"] >= begin).all()
        assert (mine["end_us"] <= end + 1e-9).all()
        resident = GPU.limits.programs_per_sm if launch.kernel == "merge" else plan.programs_per_sm
        assert (mine["slot"] < resident).all()
        assert (mine["sm"] < GPU.n_sms).all()
        for key in (("sm", "slot"), ("program", "head")):
            order = np.lexsort((mine["begin_us"], mine[key[1]], mine[key[0]]))
            ordered = mine[order]
            same = (ordered[key[0]][1:] == ordered[key[0]][:-1]) & (ordered[key[1]][1:] == ordered[key[1]][:-1])
            assert (ordered["begin_us"][1:] >= ordered["end_us"][:-1] - 1e-9)[same].all()
            if key == ("program", "head") and launch.kernel == "decode":
                assert (ordered["sm"][1:] == ordered["sm"][:-1])[same].all()
                position = np.argsort(np.arange(plan.n_items) if plan.item_order is None else plan.item_order)
                assert (np.diff(position[ordered["item"]])[same] == 1).all()
    assert (timeline.launch_us[1:, 0] >= timeline.launch_us[:-1, 1] + costs.launch_us - 1e-9).all()
    assert 0 <= timeline.tail_idle <= 1
    # neither the memory nor a program is faster than it can be
    sizes = bytes_of(timeline)
    kv_bytes = sizes[spans["item"] >= 0].sum()
    assert kv_bytes == plan.lengths.sum(dtype=np.int64) * SHAPE.kv_bytes_per_token
    assert timeline.makespan_us >= sizes.sum() / (costs.memory_gb_per_s * 1000)
    assert timeline.makespan_us >= sizes.max(initial=0) / (costs.program_gb_per_s * 1000)


@pytest.mark.parametrize(
    "plan",
    [plan for plan in PLANS if plan.lengths.any()],
    ids=lambda plan: f"{plan.stage}-{plan.n_rows}-{plan.n_items}",
)
def test_the_area_under_each_programs_rate_is_its_bytes(plan):
    timeline = simulate(plan, GPU)
    sizes = bytes_of(timeline)
    begins, ends = timeline.spans["begin_us"] + COSTS.item_us, timeline.spans["end_us"]
    reads = sizes > 0
    times = np.unique(np.concatenate([begins[reads], ends[reads]]))
    n_reading = (begins[reads][None] <= times[:-1, None]).sum(1) - (ends[reads][None] <= times[:-1, None]).sum(1)
    rate = np.minimum(COSTS.program_gb_per_s, COSTS.memory_gb_per_s / np.maximum(n_reading, 1)) * 1000
    read = np.concatenate([[0], np.cumsum(rate * np.diff(times))])
    area = np.interp(ends[reads], times, read) - np.interp(begins[reads], times, read)
    assert area == pytest.approx(sizes[reads], rel=1e-6)
    assert ends[~reads] == pytest.approx(begins[~reads])


@pytest.mark.parametrize("field", ["memory_gb_per_s", "program_gb_per_s"])
def test_more_bandwidth_is_never_slower(field):
    gains = []
    for plan in PLANS:
        # while the memory is the limit, a greedier program only moves start-ups about: no more are lost than it has
        # items, and one for the merge that follows
        n_starts = int(np.diff(plan.program_offsets).max(initial=1)) + 1
        slack = n_starts * COSTS.item_us / 1000 if field == "program_gb_per_s" else 1e-9
        times = []
        for factor in (1, 1.01, 1.5, 4):
            costs = dataclasses.replace(COSTS, **{field: getattr(COSTS, field) * factor})
            times.append(simulate(plan, dataclasses.replace(GPU, costs=costs)).gpu_ms)
        assert all(later <= earlier + slack for earlier, later in itertools.pairwise(times))
        gains.append(times[0] / times[3])
    assert max(gains) > 1.4  # where it is the limit, it does count


def test_the_order_of_equal_items_does_not_matter():
    plan = pkv.plan([4096] * 6, SHAPE, stage="split_kv", splits=8, tile=32, gpu=GPU)
    rng = np.random.default_rng(0)
    want = simulate(plan, GPU)
    for _ in range(3):
        mixed = simulate(dataclasses.replace(plan, item_order=rng.permutation(plan.n_items)), GPU)
        assert mixed.gpu_ms == want.gpu_ms
        assert mixed.tail_idle == want.tail_idle
        for name in ("begin_us", "end_us", "sm", "slot"):
            assert (mixed.spans[name] == want.spans[name]).all()


def test_the_same_plan_gives_the_same_timeline():
    plan = PLANS[5]
    assert simulate(plan, GPU).spans.tobytes() == simulate(plan, GPU).spans.tobytes()


# --- nothing to do, and what cannot be done


@pytest.mark.parametrize("stage", STAGES)
def test_no_rows_take_no_time(stage):
    timeline = simulate(pkv.plan([], SHAPE, stage=stage, gpu=GPU), GPU)
    assert timeline.gpu_ms == 0
    assert len(timeline.spans) == 0
    assert timeline.tail_idle == 0
    assert timeline.busy_us.tolist() == [0] * 28
    assert "0 ms" in str(timeline)


@pytest.mark.parametrize("stage", STAGES)
def test_rows_without_tokens_cost_their_launches_only(stage):
    plan = pkv.plan([0, 0, 0], SHAPE, stage=stage, gpu=GPU)
    timeline = simulate(plan, GPU)
    n = len(plan.launches)
    fixed = COSTS.step_us + (COSTS.flashinfer_plan_us if stage == "flashinfer" else 0)
    n_at_work = n - (stage == "stream_k")  # no run has an item, so only its merge starts up, which writes the rows
    expected = (fixed + n * COSTS.launch_us + n_at_work * COSTS.item_us) / 1000 if n else 0
    assert timeline.gpu_ms == pytest.approx(expected)
    assert timeline.tail_idle == (1 if n else 0)


def test_what_cannot_be_simulated_says_why():
    plan = pkv.plan([5, 40], SHAPE, stage="split_kv", gpu=GPU)
    with pytest.raises(ValueError, match=r"gpu = 'unmeasured' has no costs.*pass gpu='rtx3060'"):
        simulate(plan, GpuProfile("unmeasured", 90, 132))
    with pytest.raises(ValueError, match=r"'reference' has no kernel.*plan another stage"):
        simulate(pkv.plan([5, 40], SHAPE, stage="reference"), GPU)
    with pytest.raises(ValueError, match="gpu = 'rtx9999' is not a known profile"):
        simulate(plan, "rtx9999")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"memory_gb_per_s": 0}, ValueError, r"memory_gb_per_s = 0 must lie in 1e-06 .. 1e\+09"),
        ({"program_gb_per_s": -1.0}, ValueError, r"program_gb_per_s = -1.0 must lie in 1e-06 .. 1e\+09"),
        ({"item_us": -0.5}, ValueError, r"item_us = -0.5 must lie in 0 .. 1e\+09"),
        ({"launch_us": float("nan")}, ValueError, r"launch_us = nan must lie in 0 .. 1e\+09"),
        ({"step_us": "4"}, TypeError, "step_us must be a number, got str"),
    ],
)
def test_costs_that_make_no_sense_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(COSTS, **changes)


def test_the_text_names_each_launch_and_who_ends_it():
    lines = str(simulate(queue([[100], [300], [50], [50]]), TOY)).splitlines()
    assert lines[0] == (
        "Timeline of stage test on toy: 0.01175 ms, of which 0 us before the first launch; 1 SM, 34.0% idle"
    )
    assert lines[2].split() == ["decode", "1.0", "11.8", "4", "row", "3,", "head", "0,", "on", "SM", "0"]

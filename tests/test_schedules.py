"""Row-local bounds and the queue: worked examples, and bits that must not change with who does what."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from cases import DEVICE, Case, assert_ramp, batch, decode, ramp
from hypothesis import given, settings
from hypothesis import strategies as st

import pkv
from pkv.bench.accuracy import Yardstick
from pkv.plans.fields import Launch
from pkv.stages import s2_row_local, s3_workqueue
from pkv.stages.s2_row_local import own_items
from pkv.stages.s3_workqueue import equal_splits, longest_first, requeue

SHAPE = pkv.Shape(4, 2, 64, 16, "float16")
LENGTHS = [0, 5, 40, 100, 17, 16, 1]


def plan(stage, lengths=LENGTHS, **options):
    return pkv.plan(lengths, SHAPE, stage=stage, gpu="rtx3060", **options)


def assert_equal(want, got):
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b)


# --- row-local bounds ---


def test_a_row_is_cut_by_its_own_length():
    made = plan("row_local", [5, 40, 200, 0], splits=2)
    assert made.items.tolist() == [
        [0, 0, 5], [0, 16, 16], [1, 0, 16], [1, 16, 40], [2, 0, 96], [2, 96, 200], [3, 0, 0], [3, 0, 0],
    ]  # fmt: skip
    assert made.partial_offsets.tolist() == [0, 2, 4, 6, 8]
    assert [(launch.kernel, launch.n_splits) for launch in made.launches] == [("decode", 2), ("merge", 2)]


def test_a_row_of_few_tiles_has_its_empty_splits_last():
    made = plan("row_local", [33, 200], splits=5)
    assert made.items[:5].tolist() == [[0, 0, 16], [0, 16, 32], [0, 32, 33], [0, 48, 48], [0, 48, 48]]
    assert made.counters.empty_programs == 2 * SHAPE.n_kv_heads


def test_bounds_are_those_of_the_published_rule():
    """Split s of S covers the tiles [n * s // S, n * (s + 1) // S), as far as each gets one."""
    for n_tiles in range(1, 60):
        for splits in range(1, 40):
            items = own_items(np.array([n_tiles * 16], dtype=np.int32), splits, 16)
            tiles = [(n_tiles * s // splits * 16, n_tiles * (s + 1) // splits * 16) for s in range(splits)]
            held = [(begin, end) for begin, end in tiles if begin < end]
            assert [(b, e) for _, b, e in items.tolist() if b < e] == held


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 9)), max_size=8), st.sampled_from([16, 32]))
def test_splits_may_differ_by_row(rows, tile):
    lengths = np.array([length for length, _ in rows], dtype=np.int32)
    splits = np.array([max(n, 1) if length else n for length, n in rows], dtype=np.int64)
    items = own_items(lengths, splits, tile)
    assert np.bincount(items[:, 0], minlength=len(rows)).tolist() == splits.tolist()
    for row, length in enumerate(lengths.tolist()):
        alone = own_items(lengths[row : row + 1], int(splits[row]), tile)[:, 1:]
        assert items[items[:, 0] == row][:, 1:].tolist() == alone.tolist()
        assert (alone[:, 1] - alone[:, 0]).sum() == length


def test_empty_splits_leave_before_they_read(monkeypatch):
    """Of 3 x 5 programs per KV head, only those with tokens load a query and attend."""
    if DEVICE.type != "cpu":
        pytest.skip("counts calls in the interpreter")
    loads = []
    load_query = s2_row_local.load_query.fn if hasattr(s2_row_local.load_query, "fn") else s2_row_local.load_query
    monkeypatch.setattr(s2_row_local, "load_query", lambda *args: (loads.append(args), load_query(*args))[1])
    q, cache = batch(Case("short-rows", [33, 100, 1]))
    made = pkv.plan([33, 100, 1], pkv.Shape.of(q, cache), stage="row_local", splits=5)
    want = pkv.run(q, cache, pkv.plan([33, 100, 1], pkv.Shape.of(q, cache), stage="reference"))
    got = pkv.run(q, cache, made)
    torch.testing.assert_close(got, want, rtol=0, atol=4e-3)
    assert len(loads) == 2 * (3 + 5 + 1)


# --- the queue ---


def test_the_queue_holds_only_tokens():
    made = plan("workqueue", [5, 40, 0], splits=2, ordering="as_listed")
    assert made.items.tolist() == [[0, 0, 5], [1, 0, 16], [1, 16, 40]]
    assert made.partial_offsets.tolist() == [0, 1, 3, 3]
    assert made.item_order is None
    assert made.counters.empty_programs == 0
    assert made.launches == (Launch("decode", (0, 1, 2), 0, 3), Launch("merge", (1, 2), n_splits=2))
    assert plan("workqueue", [5, 40, 0], splits=2, ordering="longest_first").item_order.tolist() == [2, 1, 0]


# The merge of 17 states has another block than that of 16. Fast are each way to queue, and each number of splits.
@pytest.mark.parametrize(
    ("drop_empty", "ordering", "splits"),
    [
        *((False, None, splits) for splits in (1, 2)),
        (True, None, 7),
        *((True, "longest_first", splits) for splits in (1, 17)),
        *(pytest.param(False, None, splits, marks=pytest.mark.slow) for splits in (7, 17)),
        *(pytest.param(True, None, splits, marks=pytest.mark.slow) for splits in (1, 2, 17)),
        *(pytest.param(True, "longest_first", splits, marks=pytest.mark.slow) for splits in (2, 7)),
    ],
)
def test_row_local_through_the_queue_is_bit_equal(splits, drop_empty, ordering):
    q, cache = batch(Case("through-the-queue", LENGTHS, n_kv_heads=1))
    cut = pkv.plan(LENGTHS, pkv.Shape.of(q, cache), stage="row_local", splits=splits)
    queued = requeue(cut, drop_empty=drop_empty, ordering=ordering).validate()
    n_dropped = int((cut.items[:, 1] == cut.items[:, 2]).sum()) if drop_empty else 0
    assert queued.n_items == cut.n_items - n_dropped
    assert splits == 1 or cut.counters.empty_programs > 0
    want = pkv.run(q, cache, cut)
    assert_equal(want, pkv.run(q, cache, queued))
    if drop_empty:
        assert_equal(want, decode(q, cache, "workqueue", splits=splits))


@pytest.mark.parametrize("stage", ["split_kv", "length_buckets", "row_local", "workqueue"])
@pytest.mark.parametrize("splits", [1, 3])
def test_the_queue_runs_any_plan(stage, splits):
    lengths = [40, 0, 100, 40, 7]
    q, cache = batch(Case("any-plan", lengths, n_kv_heads=1))
    other = pkv.plan(lengths, pkv.Shape.of(q, cache), stage=stage, splits=splits)
    want = pkv.run(q, cache, other)
    assert_equal(want, pkv.run(q, cache, dataclasses.replace(other, stage="workqueue")))  # its own launches
    assert_equal(want, pkv.run(q, cache, requeue(other)))  # in two
    assert len(requeue(other).launches) <= 2


def test_a_program_may_have_several_items():
    """Equal runs that cross rows: the form of a stream-K plan."""
    q, cache = batch(Case("several", LENGTHS, n_kv_heads=1))
    made = pkv.plan(LENGTHS, pkv.Shape.of(q, cache), stage="workqueue", splits=3)
    want = pkv.run(q, cache, made)
    offsets = np.array([0, 2, 2, made.n_items - 1, made.n_items])
    decode_all, merge = made.launches
    launches = (dataclasses.replace(decode_all, end=4), merge)
    several = dataclasses.replace(made, program_offsets=offsets, launches=launches).validate()
    got = pkv.run(q, cache, several)
    if DEVICE.type != "cpu":  # where such programs have more warps, which sum in another order
        assert Yardstick(q, cache).measure(*got).ok
        want = got
    assert_equal(want, got)
    halves = (dataclasses.replace(decode_all, end=2), dataclasses.replace(decode_all, begin=2, end=4), merge)
    assert_equal(want, pkv.run(q, cache, dataclasses.replace(several, launches=halves).validate()))


def test_a_row_without_an_item_is_still_written():
    q, cache = ramp([0, 9, 0, 40])
    for options in ({}, {"splits": 1}, {"splits": 3}):
        assert_ramp(*decode(q, cache, "workqueue", **options), [0, 9, 0, 40])
    made = plan("workqueue", [0, 9], splits=1)
    assert [launch.kernel for launch in made.launches] == ["decode", "merge"]
    with pytest.raises(ValueError, match=r"row 0 has no item and no merge launch: its result is never written"):
        dataclasses.replace(made, launches=made.launches[:1]).validate()


def test_requeue_keeps_the_order_of_what_it_keeps():
    made = plan("row_local", [33, 200], splits=5)
    order = np.array([9, 4, 0, 3, 8, 2, 7, 1, 6, 5], dtype=np.int32)
    kept = requeue(dataclasses.replace(made, item_order=order), drop_empty=True)
    wanted = [made.items[i].tolist() for i in order if made.items[i, 1] < made.items[i, 2]]
    assert kept.items[kept.item_order].tolist() == wanted


# --- how rows are cut, and who is first ---


def test_longest_first_is_stable():
    items = np.array([[0, 0, 16], [1, 0, 40], [2, 0, 16], [3, 0, 40], [4, 0, 1]], dtype=np.int32)
    assert longest_first(items).tolist() == [1, 3, 0, 2, 4]
    assert longest_first(items[:0]).tolist() == []


@given(st.lists(st.integers(0, 5000), max_size=40), st.integers(0, 300))
@settings(deadline=None)
def test_equal_splits(n_tiles, n_programs):
    tiles = np.array(n_tiles, dtype=np.int64)
    splits = equal_splits(tiles, n_programs)
    room = max(n_programs, 1)
    while room < 2 * np.count_nonzero(tiles):
        room *= 2
    assert ((splits == 0) == (tiles == 0)).all()
    assert (splits <= tiles).all()
    assert splits.sum() <= room
    share = int(np.ceil(tiles / np.maximum(splits, 1)).max(initial=0))
    if share > s3_workqueue.MIN_TILES_PER_SPLIT:  # a shorter share would not fit
        assert np.ceil(tiles / (share - 1)).sum() > room


@pytest.mark.parametrize("wrong", ["shortest_first", 3, True, ["as_listed"]])
def test_an_unknown_ordering_is_named(wrong):
    with pytest.raises((ValueError, TypeError), match=r"ordering .*as_listed, longest_first"):
        plan("workqueue", ordering=wrong)


def test_order_is_kept_where_all_programs_start_at_once():
    """Longest first only where some must wait: reading the order takes time."""
    card, lengths = pkv.cards.known.load_gpu("rtx3060"), [3000, 100, 700]
    assert pkv.plan(lengths, SHAPE, stage="workqueue", gpu=card).item_order is None
    waiting = pkv.plan(lengths, SHAPE, stage="workqueue", splits=80, gpu=card)
    assert waiting.n_items > 28 * 8 // 2
    assert waiting.item_order.tolist() == longest_first(waiting.items).tolist()


def test_requeued_plans_are_of_their_lengths_only():
    """A dynamic plan serves any lengths, as its kernel reads them; the queue's reads the plan."""
    q, cache = batch(Case("requeued", [40, 7]))
    cut = pkv.plan([64, 64], pkv.Shape.of(q, cache), stage="row_local", splits=2, dynamic=True)
    pkv.run(q, cache, cut)
    with pytest.raises(
        ValueError, match=r"plan is stale or of another cache: row 0 has 40 tokens, it was planned for 64"
    ):
        pkv.run(q, cache, requeue(cut))


def test_only_tiles_of_ours_can_be_requeued():
    for stage, page_size in (("reference", 16), ("flashinfer", 48)):
        made = pkv.plan([40, 7], pkv.Shape(4, 2, 64, page_size, "float16"), stage=stage, gpu="rtx3060")
        with pytest.raises(ValueError, match=r"tile = \d+ must be one of 16, 32, 64"):
            requeue(made)


@pytest.mark.parametrize("stage", ["split_kv", "row_local"])
def test_what_these_kernels_do_not_read_must_be_as_they_do_it(stage):
    """Their programs find their own items: an order, or several items each, would be ignored, and counted wrongly."""
    q, cache = batch(Case("ignored", [40, 7]))
    made = pkv.plan([40, 7], pkv.Shape.of(q, cache), stage=stage, splits=2)
    turned = dataclasses.replace(made, item_order=np.array([3, 2, 1, 0]))
    several = dataclasses.replace(made, program_offsets=np.array([0, 2, 2, 3, 4]))
    for other in (turned, several):
        with pytest.raises(ValueError, match=r"one item each"):
            pkv.run(q, cache, other)
    rows = tuple(dataclasses.replace(launch, rows=(1, 0)) for launch in made.launches)
    if stage == "row_local":
        with pytest.raises(ValueError, match=r"must name all rows in order"):
            pkv.run(q, cache, dataclasses.replace(made, launches=rows))


@pytest.mark.parametrize("stage", ["split_kv", "row_local"])
def test_more_splits_than_the_kernels_can_cut_are_refused(stage):
    made = pkv.STAGES[stage].plan(np.array([70_001 * 16], dtype=np.int32), SHAPE, splits=70_001, gpu="rtx3060")
    assert "more than 65536" in pkv.STAGES[stage].fault_of_items(made) or "at most 65536" in pkv.STAGES[
        stage
    ].fault_of_items(made)

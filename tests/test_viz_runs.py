"""The picture of runs: the cuts of the plan's items, lanes of equal length, a state where a row is cut."""

import dataclasses
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from drawings import LLAMA, SVG, assert_legible, ragged

import pkv
from pkv import viz
from pkv.cards.known import load_gpu
from pkv.stages.s5_stream_k_runs import RULES
from pkv.viz import schedules, widgets
from pkv.viz.runs import MOST_LANES, lanes_of, merges_of
from pkv.viz.svg import SMALL

CARD = load_gpu("rtx3060")


def with_programs(lengths, n_programs, stage="stream_k", **options):
    """A plan for a card with so many places; without costs a card takes 4 programs of this shape per SM."""
    card = dataclasses.replace(CARD, n_sms=2 * n_programs, costs=None)
    return pkv.plan(lengths, LLAMA, stage=stage, tile=16, gpu=card, **options)


BATCHES = {
    "toy": ([5, 140, 40], 3),
    "empty-rows": ([0, 5, 0, 0, 300, 0], 2),
    "one-row": ([65536], 14),
    "one-tile": ([1], 9),
    "nothing": ([0, 0], 4),
    "no-rows": ([], 4),
    "ragged": (ragged(12), 7),
    "many-rows": (ragged(64), 98),
    "many-programs": ([65536] + [512] * 7, 200),
    "start-cut": ([16 * 8, 16 * 8, 16 * 8], 5),
}


def drawn():
    for name, (lengths, n_programs) in BATCHES.items():
        yield name, viz.draw_runs(with_programs(lengths, n_programs))
        for stage in ("workqueue", "row_local", "split_kv", "length_buckets"):
            yield f"{name}-{stage}", viz.draw_runs(with_programs(lengths, n_programs, stage))


def test_by_hand():
    """[5, 140, 40] in tiles of 16: 5, 13 and 7 units, 25 in all; three runs of 9."""
    plan = with_programs([5, 140, 40], 3)
    assert plan.n_programs == 3
    lanes = lanes_of(plan)
    assert [[(piece.row, piece.n_units, piece.item) for piece in lane.pieces] for lane in lanes] == [
        [(0, 4, -1), (0, 1, 0), (1, 4, -1)],
        [(1, 9, 1)],
        [(2, 4, -1), (2, 3, 2)],
    ]
    assert [(lane.began, lane.ends_after) for lane in lanes] == [(None, None)] * 3
    assert merges_of(plan, lanes) == {}


@pytest.mark.parametrize("name", BATCHES)
def test_lanes_are_the_plans_items(name):
    plan = with_programs(*BATCHES[name])
    lanes = lanes_of(plan)
    assert [len(lane.pieces) > 0 for lane in lanes] == [True] * len(lanes)
    found = [(lane.program, piece) for lane in lanes for piece in lane.pieces if piece.item >= 0]
    assert [piece.item for _, piece in found] == list(range(plan.n_items))
    for program, piece in found:
        row, begin, end = plan.items[piece.item].tolist()
        assert piece.row == row
        assert piece.n_units == -(-end // plan.tile) - begin // plan.tile
        assert plan.program_offsets[program] <= piece.item < plan.program_offsets[program + 1]
    n_units = [lane.n_units for lane in lanes]
    assert len(set(n_units[:-1])) <= 1
    assert n_units[-1:] <= n_units[:1] or len(n_units) == 1
    starts = sum(piece.n_units for lane in lanes for piece in lane.pieces if piece.item < 0)
    assert starts == RULES.START_UNITS * np.count_nonzero(plan.lengths)


@pytest.mark.parametrize("name", BATCHES)
def test_states_and_slices_are_the_kernels(name):
    """States: items of rows with several, at slot 2p + 1 where the item is its row's first; cuts: those inside rows."""
    plan = with_programs(*BATCHES[name])
    lanes = lanes_of(plan)
    program = np.repeat(np.arange(plan.n_programs), np.diff(plan.program_offsets))
    row_items = np.diff(plan.partial_offsets)
    want = {
        int(2 * program[item] + (begin == 0))
        for item, (row, begin, _) in enumerate(plan.items.tolist())
        if row_items[row] > 1
    }
    found = {2 * lane.program for lane in lanes if lane.began is not None}
    found |= {2 * lane.program + 1 for lane in lanes if lane.ends_after is not None}
    assert found == want
    slices = sorted(merges_of(plan, lanes).values())
    rows = [row for row, n in enumerate(row_items) if n > 1]
    assert slices == sorted(
        f"row {r}: slice {s + 1} of {row_items[r] - 1}" for r in rows for s in range(row_items[r] - 1)
    )


def test_pictures_are_sound_legible_and_the_same_every_time():
    again = dict(drawn())
    for name, picture in drawn():
        assert picture == again[name], name
        root = ElementTree.fromstring(picture.svg)
        assert root.find(f"{SVG}title").text == picture.alt
        assert len(picture.svg) < 150_000, name
        assert min(map(float, re.findall(r'font-size="([\d.]+)"', picture.svg))) >= SMALL
        assert_legible(picture, name)


def test_a_dot_for_every_state_and_lanes_of_equal_width():
    plan = with_programs([300, 300], 4)
    picture = viz.draw_runs(plan)
    (dots,) = re.findall(r'data-key="states" d="([^"]+)"', picture.svg)
    assert dots.count("M") == np.diff(plan.partial_offsets)[np.diff(plan.partial_offsets) > 1].sum()
    spans = {}
    for x, y, width in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v[\d.]+h-", picture.svg):
        spans[round(float(y))] = max(spans.get(round(float(y)), 0), float(x) + float(width))
    assert "row 0: slice 1 of " in picture.alt
    ends = [end for y, end in sorted(spans.items()) if y > 150]
    assert max(ends[:-1]) - min(ends[:-1]) < 1.5


@pytest.mark.parametrize(
    ("plan", "claim"),
    [
        (with_programs([5, 140, 40], 3),
         "stream_k: 3 runs of 9 units cross 3 rows, so no program outlasts the others."),
        (with_programs([65536], 14), "stream_k: 14 runs of 293 units hold 1 row, so no program outlasts the others."),
        (with_programs([1], 9), "stream_k: 2 runs of 4 units hold 1 row, so no program outlasts the others."),
        (with_programs([0, 0], 4), "stream_k: no row has a token, so no program has a part of the line."),
        (with_programs([1600, 160], 1, "row_local", splits=1),
         "row_local: 2 programs with 14 to 104 units of 2 rows; the longest has 1.8 times the mean."),
        (with_programs([160, 160], 1, "row_local", splits=1),
         "row_local: 2 programs with 14 units of 2 rows, nearly equal."),
    ],
)  # fmt: skip
def test_claims_follow_the_plan(plan, claim):
    assert viz.draw_runs(plan).alt.startswith(claim)


def test_what_is_left_out_is_said():
    assert "7 programs find nothing left: no run is shorter than 4 units." in viz.draw_runs(with_programs([1], 9)).alt
    assert f"The first {MOST_LANES} of 200 lanes are drawn." in viz.draw_runs(with_programs([65536] * 2, 200)).alt
    picture = viz.draw_runs(with_programs([16, 320], 4, "row_local", splits=4))
    assert "3 programs without a token are left out." in picture.alt


def test_only_a_plan_can_be_drawn():
    with pytest.raises(TypeError, match=r"plan must be a pkv\.Plan, got list"):
        viz.draw_runs([5, 40])


@pytest.mark.parametrize("raggedness", schedules.RAGGEDNESS)
@pytest.mark.parametrize(("rows", "longest"), [(1, 16), (8, 4096), (16, 65536)])
@pytest.mark.parametrize("programs", [1, 14, 32])
def test_sliders_give_as_many_programs_as_they_say(rows, longest, raggedness, programs):
    for stage in schedules.CUT:
        (picture,) = schedules.runs_of(rows, longest, raggedness, programs, stage)
        assert picture.alt.startswith(f"{stage}: ")
        if stage == "stream_k" and longest == 65536:
            assert picture.alt.startswith(f"stream_k: {programs} run")


def test_sliders_show_their_first_picture(monkeypatch, capsys):
    monkeypatch.setattr(widgets, "display", None)
    widgets.explore_runs(rows=2, longest=64, raggedness="equal", programs=2)
    assert capsys.readouterr().out.startswith("stream_k: 2 runs of 8 units hold 2 rows")

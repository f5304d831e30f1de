"""Pictures are true to the plan, cache, states or shape that they draw."""

import dataclasses
import itertools
import math
import re

import numpy as np
import pytest
import torch
from drawings import LLAMA, PLANS, cache_of, plan_of, rects, texts

import pkv
from pkv import viz
from pkv.plans.fields import Launch
from pkv.viz import widgets
from pkv.viz.programs import deal
from pkv.viz.svg import PALETTE


@pytest.mark.parametrize("name", ["toy", "buckets-8", "dynamic", "reference"])
def test_each_item_is_a_box_and_each_empty_one_a_dashed_square(name):
    plan = PLANS[name]
    svg = viz.plan_svg(plan)
    filled = int((plan.items[:, 1] < plan.items[:, 2]).sum())
    assert len(rects(svg, fill_opacity=".5")) == filled
    assert len(rects(svg, stroke_dasharray="3 2")) == plan.n_items - filled


def test_box_lies_at_its_tokens():
    svg = viz.plan_svg(plan_of([3, 10, 40], splits=2))
    boxes = [(float(box.get("x")), float(box.get("width"))) for box in rects(svg, fill_opacity=".5")]
    scale = boxes[-1][1] / 24
    starts = [(x - boxes[0][0]) / scale for x, _ in boxes]
    assert starts == pytest.approx([0, 0, 0, 16], abs=0.2)
    assert [width / scale for _, width in boxes] == pytest.approx([3, 10, 16, 24], abs=0.2)


def test_neighbours_differ_without_colour():
    """Of two neighbouring boxes one is hatched, or they are labelled."""
    labels = [text for *_, text in texts(viz.draw_plan(PLANS["toy"]))]
    assert {"0:3", "0:10", "0:16", "16:40"} <= set(labels)
    svg = viz.plan_svg(plan_of([640], splits=14))
    assert len(rects(svg, fill="url(#hatch)")) >= 6


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dynamic", "upper bounds"),
        ("no-rows", "nothing is launched"),
        ("toy", "32 programs are empty"),
        ("4000-items-in-a-row", "1 row becomes 4,000 items"),
        ("256-rows", "One bar per row"),
        ("1000-rows", "stands for 4 rows"),
        ("reference", "without a launch"),
    ],
)
def test_words_say_what_the_picture_shows(name, words):
    if name == "toy":
        words = f"{PLANS[name].counters.empty_programs} programs are empty"
    assert words in viz.draw_plan(PLANS[name]).alt


def test_many_items_of_a_row_are_joined_and_counted():
    picture = viz.draw_plan(PLANS["4000-items-in-a-row"])
    assert len(rects(picture.svg, fill_opacity=".5")) == 1
    assert "4,000 items" in [text for *_, text in texts(picture)]


@pytest.mark.parametrize("name", ["ragged-8", "buckets-8", "stream-k-8"])
def test_programs_are_dealt_in_turn(name):
    plan = PLANS[name]
    for launch in (launch for launch in plan.launches if launch.kernel == "decode"):
        dealt = deal(plan, launch)
        n_programs = (launch.end - launch.begin) * LLAMA.grid_heads
        assert list(zip(dealt.sms, dealt.levels)) == [(p % 28, p // 28) for p in range(n_programs)]
        tokens = np.zeros(plan.n_rows, dtype=int)
        for row, of_part in itertools.chain.from_iterable(dealt.parts):
            tokens[row] += of_part
        served = np.isin(np.arange(plan.n_rows), launch.rows)
        assert tokens.tolist() == (plan.lengths * served * LLAMA.grid_heads).tolist()


def test_a_program_that_reads_several_rows_has_a_box_for_each():
    """Two tiles of row 0, then one of row 1: each as wide as its tokens."""
    one = {"launches": (Launch("decode", (0, 1), 0, 1),), "program_offsets": [0, 2]}
    plan = dataclasses.replace(plan_of([32, 16], stage="workqueue", splits=1), **one).validate()
    (dealt,) = [deal(plan, launch) for launch in plan.launches]
    assert dealt.parts == [[(0, 32), (1, 16)]] * LLAMA.grid_heads
    picture = viz.draw_programs(plan)
    wide, narrow = rects(picture.svg, fill_opacity=".5")[:2]
    assert float(wide.get("width")) == pytest.approx(2 * float(narrow.get("width")), rel=1e-3)
    assert float(wide.get("x")) + float(wide.get("width")) == pytest.approx(float(narrow.get("x")), rel=1e-3)
    assert "a program that reads several rows" in picture.alt
    assert "several rows" not in viz.draw_programs(PLANS["ragged-8"]).alt


def test_programs_without_an_item_are_not_drawn_as_items():
    """stream_k launches as many programs as the card holds, however little there is to read."""
    plan = plan_of([16], stage="stream_k")
    assert plan.counters.empty_programs > 0
    assert "programs are empty" in viz.draw_plan(plan).alt
    for picture in (viz.draw_plan(plan), viz.draw_queue(plan)):
        assert "Dashed" not in picture.alt
        assert not rects(picture.svg, stroke_dasharray="3 2")
    assert "runs" in [text for *_, text in texts(viz.draw_queue(plan))]
    assert len(rects(viz.draw_programs(plan).svg, stroke_dasharray="3 2")) == plan.counters.empty_programs


@pytest.mark.parametrize(("splits", "idle"), [(1, 20), (2, 12), (3, 4), (4, 0)])
def test_idle_sms_are_counted(splits, idle):
    title = viz.draw_programs(plan_of([65536], splits=splits)).alt
    assert (f"{idle} of 28 SMs get no token" if idle else "each of the 28 SMs gets work") in title


@pytest.mark.parametrize("lengths", [[65536, 9000, 2100, 700], [40] * 3, [16, 300]], ids=str)
@pytest.mark.parametrize("stage", ["split_kv", "length_buckets"])
def test_each_row_begins_in_the_first_colour(lengths, stage):
    """Also where a row has fewer tiles than splits, and so an empty item before its first token."""
    svg = viz.plan_svg(plan_of(lengths, stage=stage, splits=8))
    for y in {box.get("y") for box in rects(svg, fill_opacity=".5")}:
        first = min(rects(svg, fill_opacity=".5", y=y), key=lambda box: float(box.get("x")))
        assert first.get("fill") == PALETTE[0]


def test_launches_are_counted_and_named_alike_in_both_pictures():
    plan = plan_of([900, 120, 40], stage="length_buckets", splits=2)
    drawn, programs = viz.draw_plan(plan), viz.draw_programs(plan)
    for picture in (drawn, programs):
        assert "48 programs, 6 launches (3 decode, 3 merge)" in picture.alt
    assert "Launch 5+6: launch 5 of the plan decodes row 0, launch 6 merges it." in drawn.alt
    assert [text for *_, text in texts(drawn) if text.startswith("launch ")][:3] == [
        "launch 5+6",
        "launch 3+4",
        "launch 1+2",
    ]
    names = [text for *_, text in texts(programs) if text.startswith("launch ") and "row" in text]
    assert names == ["launch 1, row 2", "launch 3, row 1", "launch 5, row 0"]


def points_of(d):
    """Points along a path of M, C and V commands, close together."""
    x = y = 0.0
    for command, numbers in re.findall(r"([MCV])([^MCV]*)", d):
        values = [float(number) for number in numbers.split()]
        if command == "M":
            x, y = values
        elif command == "V":
            for step in range(41):
                yield x, y + (values[0] - y) * step / 40
            y = values[0]
        else:
            (x1, y1, x2, y2, x3, y3) = values
            for step in range(41):
                t = step / 40
                a, b, c, e = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3
                yield a * x + b * x1 + c * x2 + e * x3, a * y + b * y1 + c * y2 + e * y3
            x, y = x3, y3


@pytest.mark.parametrize(("rows", "longest", "page_size"), list(itertools.product((3, 6), (12, 40), (1, 2, 4, 16))))
def test_lines_cross_no_box_and_no_label(rows, longest, page_size):
    (picture,) = widgets.pages_of(rows, longest, page_size)
    areas = []
    for box in rects(picture.svg, fill_opacity=".5") + rects(picture.svg, stroke_dasharray="3 2"):
        x, y, width, height = (float(box.get(name)) for name in ("x", "y", "width", "height"))
        areas.append((x, x + width, y, y + height))
    areas += [(left, right, y - 8, y) for left, right, y, text in texts(picture) if "row" in text or "free" in text]
    ways = re.findall(r'<path d="(M[^"]*C[^"]*)" stroke="#', picture.svg)
    assert ways
    for way in ways:
        for x, y in points_of(way):
            for left, right, top, bottom in areas:
                assert not (left + 1 < x < right - 1 and top + 1 < y < bottom - 1), (way, left, top)


def test_page_picture_names_the_slot_that_holds_the_token():
    cache = cache_of([3, 10], seed=3, n_pages=6)
    page = int(cache.block_table[1, 2])
    picture = viz.draw_pages(cache, highlight=(1, 9))
    assert f"block_table[1, 9 // 4] = {page}, slot 9 % 4 = 1" in picture.alt
    assert "4 of 6 pages hold them, 3 slots of 16 unused" in picture.alt
    assert len(rects(picture.svg, fill="url(#unused)")) == 3


def test_a_page_of_slots_too_narrow_to_draw_ends_where_its_unused_part_ends():
    """40 of 64 slots hold tokens; the page beside it, which is free, is as wide."""
    picture = viz.draw_pages(cache_of([40], page_size=64, n_pages=2))
    (unused,), (free,) = rects(picture.svg, fill="url(#unused)"), rects(picture.svg, stroke_dasharray="3 2")
    assert float(unused.get("width")) == pytest.approx(float(free.get("width")) * 24 / 64, rel=0.01)


def test_page_picture_of_shared_pages():
    cache = cache_of([8], n_pages=4, max_rows=2)
    cache.fork(0)
    picture = viz.draw_pages(cache)
    assert picture.alt.startswith("2 rows share pages: 2 pages of 4 hold 16 tokens")
    assert "page 0: row 0, 1" in picture.svg


def states_of(cuts):
    return [viz.Part(b, e, (b + e - 1) / 2, math.log(e - b)) for b, e in itertools.pairwise(cuts)]


def test_every_order_of_the_exact_merge_ends_in_the_same_state():
    parts = states_of([0, 4, 5, 8, 10])
    for order in itertools.permutations(range(4)):
        _, out, lse = viz.merge_steps(parts, order)[-1]
        assert (out, lse) == (pytest.approx(4.5), pytest.approx(math.log(10)))
    assert "all end at out 4.5" in viz.draw_merge(parts, [(0, 1, 2, 3), (3, 1, 0, 2)]).alt


@pytest.mark.parametrize("way", [way for way in viz.WAYS if way != "exact merge"])
def test_every_wrong_way_is_seen_to_be_wrong(way):
    parts = [*states_of([0, 4, 8, 10]), viz.Part(10, 10, math.nan, -math.inf)]
    members = (0, 1, 2, 3) if "empty" in way else (0, 1, 2)
    _, out, lse = viz.merge_steps(parts, members, way)[-1]
    assert not (math.isclose(out, 4.5, rel_tol=1e-3) and math.isclose(lse, math.log(10)))
    assert "✗" in viz.draw_merge(parts[: len(members)], [members], way).svg


def test_log2_read_as_ln_is_in_every_picture_what_the_lesson_computes():
    """All states come in base 2, so weights w count as w ** (1 / ln 2), in any order."""
    parts = states_of([0, 4, 8, 10])
    weights = [(part.end - part.begin) ** (1 / math.log(2)) for part in parts]
    want = sum(weight * part.out for weight, part in zip(weights, parts)) / sum(weights)
    for order in itertools.permutations(range(3)):
        assert viz.merge_steps(parts, order, "log2 read as ln")[-1][1] == pytest.approx(want)


def test_a_merge_drawn_in_part_does_not_give_away_its_end():
    picture = viz.draw_merge(states_of([0, 4, 8, 10]), [(0, 1, 2)], n_steps=2)
    assert "2 of 3 states taken: so far out 3.5" in picture.alt
    assert "4.5" not in picture.svg


def test_empty_part_is_neutral():
    parts = [viz.Part(0, 0, math.nan, -math.inf), *states_of([0, 4])]
    assert viz.merge_steps(parts, (0, 1))[-1][1:] == (1.5, pytest.approx(math.log(4)))


def test_arithmetic_intensity_is_the_group():
    for n_kv_heads in (32, 8, 4, 1):
        shape = pkv.Shape(32, n_kv_heads, 128, 16, torch.float16)
        assert viz.flop_per_byte(shape) == shape.group
    fp32 = pkv.Shape(32, 8, 128, 16, torch.float32)
    assert viz.flop_per_byte(fp32) == 2
    assert viz.flop_per_token(fp32) == 4 * 32 * 128


def test_roofline():
    pytest.importorskip("matplotlib", reason="the lessons extra draws the roofline")
    shapes = {"G = 1": pkv.Shape(8, 8, 64, 16, torch.float16), "G = 8": pkv.Shape(8, 1, 64, 16, torch.float16)}
    picture = viz.draw_roofline(shapes)
    assert picture == viz.draw_roofline(shapes)
    assert not re.search(r"20\d\d-\d\d-\d\d", picture.svg), "a date would change with every run"
    assert "18 to 26 times left of the ridge" in picture.alt
    for name in ("rtx3060", "h200"):
        roofs = viz.roofs_of(name)
        assert f"ridge at {roofs.ridge:.0f} flop/byte" in picture.alt
        assert roofs.attainable(roofs.ridge) == roofs.tflop_per_s
        assert roofs.attainable(1) == roofs.gb_per_s / 1e3

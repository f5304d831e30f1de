"""Pictures of schedules: true to their timeline, plan or numbers, legible, and readable without colour."""

import itertools
import math
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from drawings import LLAMA, SVG, assert_legible, texts

import pkv
from pkv import viz
from pkv.cards.known import load_gpu
from pkv.cards.simulation import SPAN, Timeline, simulate
from pkv.plans.fields import Launch
from pkv.plans.gpu import Costs, GpuProfile
from pkv.plans.plan import Plan
from pkv.stages.s4_adaptive import explain
from pkv.viz import lanes, queue, rowstyles, timelines
from pkv.viz.svg import SMALL, WIDTH

ROOT = Path(__file__).resolve().parents[1]
# made up: what is drawn must not depend on what a card is found to cost
HOME = GpuProfile("home", 86, 28, Costs(300.0, 6.0, 1.5, 5.0, step_us=10.0))
LARGE = GpuProfile("large", 90, 132, Costs(4000.0, 20.0, 1.5, 3.0))
ONE_LONG = [16384, 1500, 700, 2000, 200, 950, 1200, 400]
RAGGED_300 = [(7919 * (row + 1)) % 9000 for row in range(300)]


def plan_of(lengths, stage="workqueue", gpu=HOME, **options):
    return pkv.plan(lengths, LLAMA, stage=stage, gpu=gpu, **options)


def played(lengths, stage="workqueue", gpu=HOME, **options):
    return simulate(plan_of(lengths, stage, gpu, **options), gpu)


TIMELINES = {
    "split_kv": played(ONE_LONG, "split_kv", splits=8),
    "row_local": played(ONE_LONG, "row_local", splits=8),
    "workqueue": played(ONE_LONG, splits=8),
    "unsplit": played(ONE_LONG, splits=1),
    "buckets": played(ONE_LONG, "length_buckets", splits=8),
    "no-rows": played([], splits=8),
    "all-empty": played([0, 0], "split_kv", splits=2),
    "one-token": played([1]),
    "one-row": played([16384], splits=14),
    "one-program": played([40], splits=1),
    "300-rows": played(RAGGED_300, splits=4),
    "1280-programs": played([65536, 9000] * 4, splits=20),
    "132-sms": played(RAGGED_300[:64], gpu=LARGE, splits=20),
    "one-sm": played([400, 30], gpu=GpuProfile("tiny", 86, 1, HOME.costs), splits=2),
    "too-many-pieces": played([64, 4096] * 150, "row_local", splits=20),
}
CELLS = [
    (
        n_rows,
        longest,
        raggedness,
        ["split_kv", "workqueue", "mine"][(n_rows.bit_length() + longest.bit_length()) % 3],
        margin,
    )
    for raggedness, margin in (("equal", 0.02), ("one long", 2.4), ("ragged", None))
    for n_rows in (1, 4, 64)
    for longest in (1000, 4096, 65536)
    if (n_rows, longest) != (64, 65536)
]
BARS = [
    (policy, trace, 0.02 * number, 0.01 + 0.05 * number)
    for trace in ("bimodal", "uniform")
    for number, policy in enumerate(["policy cost", "always split_kv", "a policy with a name that is long & <odd>"])
]
CANDIDATES = {"split_kv": {"reading": 0.31, "launches": 0.012}, "workqueue": {"reading": 0.2, "merge": 0.02}}


def every_picture():
    for name, timeline in TIMELINES.items():
        yield f"timeline-{name}", lambda timeline=timeline: viz.draw_timeline(timeline)
    four = [TIMELINES[name] for name in ("split_kv", "row_local", "workqueue", "unsplit")]
    yield "timelines-four", lambda: viz.draw_timelines(four)
    yield "timelines-mixed", lambda: viz.draw_timelines([TIMELINES[name] for name in ("buckets", "no-rows", "132-sms")])
    for name in ("split_kv", "row_local", "workqueue", "buckets", "no-rows", "all-empty", "one-token", "300-rows"):
        yield f"queue-{name}", lambda plan=TIMELINES[name].plan: viz.draw_queue(plan)
    yield "queue-short-rows", lambda: viz.draw_queue(plan_of([200, 16, 0, 5, 3000], "row_local", splits=20))
    yield "queue-reference", lambda: viz.draw_queue(pkv.plan([5], LLAMA, stage="reference", gpu=HOME))
    for name, lengths, splits in [
        ("one-long", ONE_LONG, 8), ("short", [200, 16, 0, 5, 3000], 20), ("no-rows", [], 4), ("all-empty", [0, 0], 4),
        ("300", RAGGED_300, 100),
    ]:  # fmt: skip
        yield f"rectangle-{name}", lambda a=lengths, b=splits: viz.draw_rectangle(rectangles_of(a, b))
    yield "regimes", lambda: viz.draw_regimes(CELLS)
    yield "regimes-one", lambda: viz.draw_regimes(CELLS[:1])
    yield "regimes-wide", lambda: viz.draw_regimes([(2, 2**power, "equal", "workqueue", 0.5) for power in range(24)])
    yield "regret", lambda: viz.draw_regret(BARS)
    yield "regret-none", lambda: viz.draw_regret([("cost", "bimodal", 0.0)])
    yield "choice", lambda: viz.draw_choice(explain(ONE_LONG, LLAMA, policy="cost", gpu=HOME))
    yield "candidates", lambda: viz.draw_candidates(CANDIDATES, "workqueue")


def rectangles_of(lengths, splits):
    return [plan_of(lengths, stage, splits=splits) for stage in ("split_kv", "row_local", "workqueue")]


PICTURES = dict(every_picture())


def boxes_of(picture, key):
    """(x, y, width, height) of every piece drawn with this key; the legend's swatches too."""
    for node in ElementTree.fromstring(picture.svg).iter(f"{SVG}path"):
        if node.get("data-key") == str(key):
            for path in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h", node.get("d")):
                yield tuple(map(float, path))


def pieces_drawn(picture, key):
    """The boxes of a timeline, without the legend's swatch, which is 18 by 11."""
    return [box for box in boxes_of(picture, key) if box[2:] != (18, 11)]


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_deterministic_sound_and_small(name):
    picture = PICTURES[name]()
    assert picture == PICTURES[name]()
    root = ElementTree.fromstring(picture.svg)
    assert picture.alt
    assert root.find(f"{SVG}title").text == picture.alt
    assert len(picture.svg) < 250_000
    assert len(list(root.iter())) < 2500
    assert not re.search(
        r"\b(nan|inf)\b", re.sub(r"<text.*?</text>|<title>.*?</title>|aria-label=\S+", "", picture.svg)
    )
    assert min(map(float, re.findall(r'font-size="([\d.]+)"', picture.svg))) >= SMALL


@pytest.mark.parametrize("name", PICTURES)
def test_texts_stay_inside_and_apart(name):
    assert_legible(PICTURES[name](), name)


def test_pieces_of_a_row_last_as_long_as_its_spans():
    """Every key's drawn time, added up, is the timeline's; joined gaps and rounding are below a pixel a piece."""
    timeline = TIMELINES["split_kv"]
    picture = viz.draw_timeline(timeline)
    scale = (WIDTH - timelines.LEFT - timelines.RIGHT) / (timeline.gpu_ms * 1000)
    keys, spans = lanes.span_keys(timeline), timeline.spans
    assert set(keys) == {*range(8), rowstyles.EMPTY, rowstyles.MERGE}
    for key in [*range(8), rowstyles.EMPTY]:
        mine = spans[keys == key]
        boxes = pieces_drawn(picture, key)
        drawn, lasts = sum(box[2] for box in boxes) / scale, (mine["end_us"] - mine["begin_us"]).sum()
        assert drawn == pytest.approx(lasts, abs=0.31 / scale * len(mine))
        first = min(box[0] for box in boxes)
        assert (first - timelines.LEFT) / scale == pytest.approx(timeline.fixed_us + mine["begin_us"].min(), abs=0.02)
        last = max(box[0] + box[2] for box in boxes)
        assert (last - timelines.LEFT) / scale == pytest.approx(
            timeline.fixed_us + mine["end_us"].max(), abs=0.31 / scale
        )


def test_a_piece_lies_in_its_sms_lane():
    timeline = TIMELINES["unsplit"]
    picture = viz.draw_timeline(timeline)
    names = {text: y for _, _, y, text in texts(picture) if text.startswith("SM ")}
    for row in range(8):
        sms = {f"SM {sm}" for sm in timeline.spans["sm"][timeline.spans["row"] == row]}
        near = {
            min(names, key=lambda name: abs(names[name] - 4 - (y + h / 2))) for _, y, _, h in pieces_drawn(picture, row)
        }
        assert near == sms


def spans_by_hand(*spans, launches=1):
    """A timeline of a plan of 2 rows on 2 SMs: (launch, item, sm, slot, begin, end), item -1 for a merge."""
    plan = Plan(
        "by_hand", LLAMA, [20, 40], [[0, 0, 16], [0, 16, 20], [1, 0, 40]], [0, 1, 2, 3], [0, 2, 3],
        (*[Launch("decode", (0, 1), 0, 3)] * launches, Launch("merge", (0,), n_splits=2)),
        16, GpuProfile("two", 86, 2), 2,
    )  # fmt: skip
    found = np.zeros(len(spans), dtype=SPAN)
    for span, (launch, item, sm, slot, begin, end) in zip(found, spans, strict=True):
        row = 0 if item < 0 else int(plan.items[item, 0])
        for name, value in zip(SPAN.names, (launch, max(item, 0), 0, item, row, sm, slot, begin, end), strict=True):
            span[name] = value
    last = max(span[5] for span in spans)
    ends = [max((span[5] for span in spans if span[0] == index), default=last) for index in range(launches + 1)]
    begins = [min((span[4] for span in spans if span[0] == index), default=last) for index in range(launches + 1)]
    gpu = GpuProfile("two", 86, 2, HOME.costs)
    timeline = Timeline(plan, gpu, (), (), np.array([begins, ends]).T, 0.0)
    vars(timeline)["spans"] = found  # in the place of those that it would find
    return timeline


def test_spans_of_a_row_are_joined_over_gaps_that_cannot_be_seen():
    spans = [(0, 0, 0, 0, 0, 10), (0, 1, 0, 0, 10.05, 20), (0, 0, 0, 0, 25, 30), (0, 2, 0, 0, 30, 40)]
    pieces = lanes.pieces_of(spans_by_hand(*spans), [0, 1], gap_us=0.1)
    assert [(piece.key, piece.begin_us, piece.end_us, piece.n_spans) for piece in pieces] == [
        (0, 0.0, 20.0, 2),
        (0, 25.0, 30.0, 1),
        (1, 30.0, 40.0, 1),
    ]


def test_spans_of_another_launch_slot_or_sm_are_not_joined():
    for other in [(1, 0, 0, 0, 10, 20), (0, 0, 0, 1, 10, 20), (0, 0, 1, 0, 10, 20), (0, 2, 0, 0, 10, 20)]:
        pieces = lanes.pieces_of(spans_by_hand((0, 0, 0, 0, 0, 10), other, launches=2), [0, 1], gap_us=0.1)
        assert [piece.n_spans for piece in pieces] == [1, 1], other


def test_merges_of_a_launch_fill_the_lane_whatever_their_slots():
    spans = [(0, 0, 0, 1, 0, 10), (1, -1, 0, 0, 10, 12), (1, -1, 0, 5, 10, 13), (1, -1, 0, 3, 11, 12)]
    *_, merges = lanes.pieces_of(spans_by_hand(*spans), [0, 1], gap_us=0.1)
    assert merges == (0, 0, 1, rowstyles.MERGE, 10.0, 13.0, 3)


def test_sms_that_are_not_drawn_leave_no_piece():
    timeline = TIMELINES["132-sms"]
    sms = lanes.shown_sms(timeline)
    assert len(sms) == len(set(sms)) == 28
    decode = timeline.spans[timeline.spans["item"] >= 0]
    assert int(decode["sm"][decode["end_us"].argmax()]) in sms
    pieces = lanes.pieces_of(timeline, sms, 0.0)
    assert sum(piece.n_spans for piece in pieces) == np.isin(timeline.spans["sm"], sms).sum()
    assert "Drawn: 28 of 132 SMs" in viz.draw_timeline(timeline).alt


def test_too_many_pieces_become_a_count_that_keeps_the_time():
    timeline = TIMELINES["too-many-pieces"]
    assert lanes.pieces_of(timeline, lanes.shown_sms(timeline), 0.0) is None
    assert "filled as high as the number of programs that run" in viz.draw_timeline(timeline).alt
    for sm in (0, 27):
        mine = timeline.spans[(timeline.spans["sm"] == sm) & (timeline.spans["item"] >= 0)]
        counts = lanes.running(timeline, sm, timeline.makespan_us)
        spent = counts.sum() * timeline.makespan_us / len(counts)
        assert spent == pytest.approx((mine["end_us"] - mine["begin_us"]).sum())
        assert counts.max() <= timeline.plan.programs_per_sm + 1e-6


@pytest.mark.parametrize("name", ["split_kv", "row_local", "workqueue", "unsplit", "buckets", "132-sms"])
def test_claim_has_the_timelines_own_numbers(name):
    timeline = TIMELINES[name]
    want = f"{timeline.gpu_ms * 1000:,.0f} us, {timeline.gpu.n_sms} SMs {timeline.tail_idle:.0%} idle"
    assert viz.draw_timeline(timeline).alt.startswith(f"{timeline.plan.stage}: {want}")


def test_claim_names_the_row_that_is_read_alone():
    timeline = TIMELINES["unsplit"]
    spans = timeline.spans
    alone = spans["end_us"].max() - spans["end_us"][spans["row"] != 0].max()
    assert alone > 0.5 * timeline.makespan_us
    assert f"for the last {alone:,.0f} us only row 0 is read, by 8 programs" in viz.draw_timeline(timeline).alt


@pytest.mark.parametrize(("part", "words"), [(0.5, "programs."), (1, "programs."), (2, "programs in turn.")])
def test_claim_says_when_programs_take_turns(part, words):
    """As many splits as 28 SMs hold at once, half as many and twice as many; each has 8 programs, one a KV head."""
    fitting = 28 * played([65536]).plan.programs_per_sm // 8
    timeline = played([16, 65536], splits=int(part * fitting), ordering="as_listed")
    assert f"only row 1 is read, by {8 * int(part * fitting)} {words}" in viz.draw_timeline(timeline).alt


def test_claim_counts_only_the_programs_that_still_run():
    spans = [(0, 0, 0, 0, 0, 10), (0, 2, 1, 0, 0, 12), (0, 1, 0, 0, 10, 30)]
    assert "for the last 18 us only row 0 is read, by 1 program." in viz.draw_timeline(spans_by_hand(*spans)).alt


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("buckets", "its 16 launches follow one another"),
        ("one-program", "20 SMs get no program"),
        ("no-rows", "nothing is launched"),
        ("1280-programs", "1,280"),
        ("one-sm", "1 SM "),
    ],
)
def test_claim_says_what_ends_the_step(name, words):
    if name == "1280-programs":
        words = "all programs end together"
    assert words in viz.draw_timeline(TIMELINES[name]).alt


def test_a_step_that_takes_no_time_can_be_drawn():
    gpu = GpuProfile("free", 86, 2, Costs(300.0, 6.0, 0.0, 0.0))
    timeline = played([0, 0], "split_kv", gpu=gpu, splits=1)
    assert timeline.gpu_ms == 0
    assert "split_kv: 0 us" in viz.draw_timeline(timeline).alt


def test_each_lane_shows_its_idle_share():
    timeline = TIMELINES["unsplit"]
    shares = [text for left, _, _, text in texts(viz.draw_timeline(timeline)) if left > 640 and text.endswith("%")]
    assert shares == [f"{1 - busy / timeline.makespan_us:.0%}" for busy in timeline.busy_us]


def test_stacked_timelines_share_one_axis():
    first, second = TIMELINES["workqueue"], TIMELINES["unsplit"]
    assert second.gpu_ms > 2 * first.gpu_ms
    picture = viz.draw_timelines([first, second])
    edges = sorted(box[0] + box[2] for key in (rowstyles.MERGE, 0) for box in pieces_drawn(picture, key))
    scale = (edges[-1] - timelines.LEFT) / (second.gpu_ms * 1000)
    ends = [box[0] + box[2] for box in pieces_drawn(picture, rowstyles.MERGE)]
    assert (max(ends) - timelines.LEFT) / scale == pytest.approx(first.gpu_ms * 1000, rel=0.01)
    assert picture.alt.startswith(f"workqueue is done first: {first.gpu_ms * 1000:,.0f} us, against workqueue")
    assert picture.svg.count(">us<") == 1


def test_timelines_of_one_stage_can_be_told_apart():
    first, second = TIMELINES["workqueue"], TIMELINES["unsplit"]
    picture = viz.draw_timelines([second, first], ["whole rows", "cut"])
    words = f"cut is done first: {first.gpu_ms * 1000:,.0f} us, against whole rows {second.gpu_ms * 1000:,.0f}."
    assert picture.alt.startswith(f"{words} whole rows: {second.gpu_ms * 1000:,.0f} us, 28 SMs")
    assert [text.split(":")[0] for *_, text in texts(picture) if "28 SMs" in text] == ["whole rows", "cut"]
    assert viz.draw_timelines([first], ["cut"]).alt.startswith(f"cut: {first.gpu_ms * 1000:,.0f} us, 28 SMs")


def test_timelines_of_different_rows_have_a_legend_each():
    batches = [TIMELINES[name] for name in ("buckets", "no-rows", "132-sms")]
    picture = viz.draw_timelines(batches)
    words = [text for *_, text in texts(picture)]
    assert {"row 0: 16,384", "8,193 to 16,384 tokens"} <= set(words)
    assert words.count("merge") == 2
    ordered = sorted(f"{timeline.gpu_ms * 1000:,.0f}" for timeline in (batches[0], batches[2]))
    assert picture.alt.startswith(f"workqueue is done first: {ordered[0]} us, against length_buckets {ordered[1]}.")


def test_one_timeline_with_work_is_compared_with_nothing():
    nothing, only = TIMELINES["no-rows"], TIMELINES["one-row"]
    assert viz.draw_timelines([nothing, only]).alt.startswith(f"workqueue: {only.gpu_ms * 1000:,.0f} us, 28 SMs")
    assert viz.draw_timelines([nothing, nothing]).alt.startswith("workqueue: nothing is launched")


def grey(colour, opacity=1.0):
    """Luma, 0 black to 255, on white paper."""
    red, green, blue = (int(colour[index : index + 2], 16) for index in (1, 3, 5))
    return (1 - opacity) * 255 + opacity * (0.299 * red + 0.587 * green + 0.114 * blue)


def test_eight_rows_merges_and_empty_items_differ_without_colour():
    looks = {key: rowstyles.style_of(key) for key in [*range(8), rowstyles.MERGE, rowstyles.EMPTY]}
    for (a, first), (b, second) in itertools.combinations(looks.items(), 2):
        shades = [grey(look.colour, rowstyles.OPACITY if key >= 0 else 1.0) for key, look in ((a, first), (b, second))]
        assert first.texture != second.texture or abs(shades[0] - shades[1]) > 25, (a, b)
    assert len(set(rowstyles.STYLES)) == len(rowstyles.STYLES) == 14
    textures = [style.texture for style in rowstyles.STYLES]
    assert rowstyles.style_of(rowstyles.EMPTY).texture not in textures, "an item without a token looks like no row"


@pytest.mark.parametrize("n_rows", [15, 300])
def test_many_rows_share_styles_by_length(n_rows):
    lengths = np.array([*RAGGED_300[:n_rows], 0], dtype=np.int32)
    keys, names = rowstyles.keys_of(lengths)
    assert dict(names).keys() == set(keys.tolist())
    for length, key in zip(lengths.tolist(), keys.tolist(), strict=True):
        words = dict(names)[key].replace(",", "").removesuffix("s").removesuffix(" token")
        least, most = map(int, words.replace("up to", "0 to").split(" to "))
        assert least <= length <= most
    assert keys[lengths.argmax()] == 0


def test_keys_of_any_lengths():
    assert rowstyles.keys_of(np.array([], dtype=np.int32))[1] == []
    keys, names = rowstyles.keys_of(np.array([0] * 20, dtype=np.int32))
    assert (set(keys.tolist()), names) == ({0}, [(0, "up to 1 token")])
    keys, names = rowstyles.keys_of(np.array([2**31 - 64] + [1] * 20, dtype=np.int32))
    assert set(keys.tolist()) == {0, 13}
    assert names[-1] == (13, f"up to {2**18:,} tokens")


def test_tape_holds_every_tile_in_program_order():
    plan = plan_of(ONE_LONG, splits=8, ordering="longest_first")
    (launch,) = (launch for launch in plan.launches if launch.kernel == "decode")
    tape = queue.tape_of(plan, launch, 2.0)
    assert [stretch.row for stretch in tape] == plan.items[plan.item_order, 0].tolist()
    assert [stretch.n_tiles for stretch in tape] == sorted((s.n_tiles for s in tape), reverse=True)
    assert sum(stretch.n_tiles for stretch in tape) == sum(-(-length // plan.tile) for length in ONE_LONG)
    assert all(stretch.width == 2.0 * stretch.n_tiles for stretch in tape)
    assert all(a.x + a.width == pytest.approx(b.x) for a, b in itertools.pairwise(tape))


@pytest.mark.parametrize("name", ["queue-row_local", "queue-workqueue", "queue-split_kv", "queue-300-rows"])
def test_tape_is_as_long_as_its_tiles(name):
    """On the drawn tape a row's share of the length is its share of the tiles."""
    stage = name.removeprefix("queue-")
    timeline = TIMELINES[stage]
    picture = PICTURES[name]()
    keys, tiles = rowstyles.keys_of(timeline.plan.lengths)[0], queue.tiles_of(timeline.plan)
    drawn = {key: sum(box[2] for box in boxes_of(picture, key) if box[3] == queue.TAPE) for key in set(keys.tolist())}
    scale = sum(drawn.values()) / tiles.sum()
    for key, width in drawn.items():
        mine = tiles[keys[timeline.plan.items[:, 0]] == key]
        assert width / scale == pytest.approx(mine.sum(), abs=0.02 * mine.sum() + 0.3 / scale * len(mine))


def test_empty_items_are_ticks_and_counted():
    plan = plan_of([200, 16, 3000], "row_local", splits=20)
    n_empty = int((plan.items[:, 1] >= plan.items[:, 2]).sum())
    picture = viz.draw_queue(plan)
    ticks = [text for *_, text in texts(picture) if text.startswith("×")]
    assert sum(int(text[1:]) for text in ticks) == n_empty == 7 + 19
    assert picture.svg.count('stroke-dasharray="3 2"/>') == 2
    assert f"60 items, {n_empty} of them are empty; the others hold" in picture.alt
    assert "find no token; ×19: 19 of them, one after another." in picture.alt
    assert "one after another" not in viz.draw_queue(plan_of([0, 64], "row_local", splits=1)).alt


def test_a_tape_says_whether_it_is_a_grid_or_a_queue_and_how_often_an_item_is_launched():
    names = {
        stage: {text for *_, text in texts(viz.draw_queue(plan_of([200, 3000], stage, splits=4)))} & {"grid", "queue"}
        for stage in ("split_kv", "row_local", "workqueue")
    }
    assert names == {"split_kv": {"grid"}, "row_local": {"grid"}, "workqueue": {"queue"}}
    assert "8 KV heads: each item is launched once per KV head," in viz.draw_queue(plan_of([200])).alt
    wide = pkv.plan([200], pkv.Shape(256, 2, 128, 16, "float16"), stage="workqueue", gpu=HOME)
    times = wide.shape.grid_heads // 2
    assert times > 1
    assert f"2 KV heads: each item is launched {times} times per KV head," in viz.draw_queue(wide).alt


def test_programs_of_several_items_are_told():
    plan = plan_of([64, 64], "split_kv", splits=2)
    together = Plan(
        "by_hand", LLAMA, plan.lengths, plan.items, [0, 3, 4], plan.partial_offsets,
        (Launch("decode", (0, 1), 0, 2), plan.launches[1]), plan.tile, plan.gpu, 2,
    )  # fmt: skip
    picture = viz.draw_queue(together)
    assert picture.alt.startswith("by_hand: 4 items in 2 programs, none is empty; each holds")
    tape = queue.tape_of(together, together.launches[0], 1.0)
    assert [stretch.opens_program for stretch in tape] == [True, False, False, True]


def subpaths(picture, name):
    nodes = [node for node in ElementTree.fromstring(picture.svg).iter() if node.get("data-cells") == name]
    return sum(node.get("d").count("M") for node in nodes)


@pytest.mark.parametrize(("lengths", "splits"), [(ONE_LONG, 8), ([200, 16, 0, 5, 3000], 20), ([64, 64], 1)])
def test_rectangle_counts_what_is_launched_held_and_dropped(lengths, splits):
    plans = rectangles_of(lengths, splits)
    picture = viz.draw_rectangle(plans)
    n_empty = [int((plan.items[:, 1] >= plan.items[:, 2]).sum()) for plan in plans]
    n_cells = len(lengths) * splits
    assert subpaths(picture, "empty") == sum(n_empty)
    assert subpaths(picture, "held") == sum(plan.n_items for plan in plans) - sum(n_empty)
    assert subpaths(picture, "dropped") == sum(n_cells - plan.n_items for plan in plans)
    assert len(list(boxes_of(picture, 0))) == subpaths(picture, "held")
    assert n_empty[2] == 0
    if n_empty[1]:
        assert f"row_local launches {n_empty[1]} empty, workqueue drops {n_empty[1]}" in picture.alt


def test_cells_are_filled_as_far_as_they_hold_tokens():
    (plan,) = rectangles_of([160, 48], 2)[:1]
    widths = [box[2] for box in boxes_of(viz.draw_rectangle([plan]), 0)]
    sizes = [end - begin for _, begin, end in plan.items.tolist() if begin < end]
    assert widths == pytest.approx([max(widths) * size / max(sizes) for size in sizes], rel=0.01)


def test_the_filled_part_of_a_cell_is_visible_however_thin():
    """One token beside a thousand is 1.5 wide, of which white edges would leave next to nothing."""
    (plan,) = rectangles_of([16000, 1], 1)[:1]
    picture = viz.draw_rectangle([plan])
    assert min(box[2] for box in boxes_of(picture, 0)) == 1.5
    assert 'stroke="#fff"' not in picture.svg


def test_regimes_show_every_cell_once():
    picture = viz.draw_regimes(CELLS, "Predicted, not measured.")
    assert ". Predicted, not measured. A letter is" in picture.alt
    assert "=: " not in picture.alt
    words = [text for *_, text in texts(picture)]
    counts = {stage: sum(cell[3] == stage for cell in CELLS) for stage in ("split_kv", "workqueue", "mine")}
    for stage, letter in (("split_kv", "S"), ("workqueue", "W"), ("mine", "M")):
        assert words.count(letter) == counts[stage] + 1, "each cell, and the legend"
    assert words.count("+2%") == sum(cell[4] == 0.02 for cell in CELLS)
    assert words.count("×3.4") == sum(cell[4] == 2.4 for cell in CELLS)
    assert picture.svg.count('stroke-dasharray="3 2"/>') == 3, "the cell that is not known, in each panel"
    first = max(counts, key=counts.get)
    assert picture.alt.startswith(f"{first} is best in {counts[first]} of {len(CELLS)} cells")
    assert "one long, 4 rows, longest 4,096: " in picture.alt


def test_a_margin_that_rounds_to_nothing_is_a_tie():
    cells = [(rows, 64, "equal", "workqueue", margin) for rows, margin in ((1, 0.0), (2, 0.004), (4, 0.006))]
    picture = viz.draw_regimes(cells)
    words = [text for *_, text in texts(picture)]
    assert (words.count("="), words.count("+1%"), words.count("+0%")) == (2, 1, 0)
    assert "=: the second best takes as long" in picture.alt


def test_letters_of_all_stages_differ():
    stages = [*pkv.STAGES, "stream_k", "adaptive", "flashinfer", "mine", "sum", "workqueue2", "***"]
    looks = viz.regimes._looks_of(list(dict.fromkeys(stages)))
    letters = [letter for letter, _ in looks.values()]
    assert len(set(letters)) == len(letters)


def test_regret_bars_are_as_long_as_the_means():
    picture = viz.draw_regret(BARS)
    boxes = sorted((y, width) for _, y, width, _ in boxes_of(picture, 0))
    means = [mean for _, _, mean, _ in BARS]
    (*_, line) = re.findall(r'd="M([\d.]+) [\d.]+H([\d.]+)M', picture.svg)
    to_worst = float(line[1]) - float(line[0])
    scale = to_worst / (0.11 - 0.04)
    assert [width for _, width in boxes] == pytest.approx([max(mean * scale, 0.3) for mean in means], abs=0.05)
    words = [text for *_, text in texts(picture)]
    assert words.count("4.0%, worst 11.0%") == 2
    assert picture.alt.startswith("policy cost has the least regret: 0.0% over 2 traces; a policy with a name")


def test_regret_of_a_policy_missing_on_a_trace_is_no_winner():
    bars = [("cost", "bimodal", 0.1), ("cost", "zipf", 0.1), ("paper", "zipf", 0.0)]
    assert viz.draw_regret(bars).alt.startswith("cost has the least regret: 10.0% over 2 traces.")
    assert viz.draw_regret([*bars[:1], *bars[2:]]).alt.startswith("No policy was tried on every trace")


def test_candidates_add_up_and_the_choice_is_named():
    picture = viz.draw_candidates(CANDIDATES, "workqueue")
    words = [text for *_, text in texts(picture)]
    assert {"0.322 ms", "0.22 ms", "→ workqueue", "split_kv"} <= set(words)
    assert picture.alt.startswith("workqueue is chosen: 0.22 ms; the next, split_kv, takes 0.322, 46% more.")
    wrong = viz.draw_candidates(CANDIDATES, "split_kv").alt
    assert wrong.startswith("split_kv is chosen: 0.322 ms, though workqueue would take 0.22.")
    tie = viz.draw_candidates({"a": {"reading": 0.2}, "b": {"reading": 0.2001}}, "a").alt
    assert tie.startswith("a is chosen: 0.2 ms; the next, b, takes 0.2001, the same within 1%.")
    widths = [box[2] for key in (0, 1, 2) for box in boxes_of(picture, key) if box[3] == 15]
    assert sum(widths) / max(widths) == pytest.approx((0.322 + 0.22) / 0.31, rel=0.01)


def test_reading_is_plain_and_its_neighbours_in_a_bar_look_different_in_grey():
    terms = ["step", "launches", "start_up", "reading", "tail", "merge"]  # as in a prediction
    picture = viz.draw_candidates({"a": {term: 0.1 for term in terms}}, "a")
    places = {key: box[0] for key in range(6) for box in boxes_of(picture, key) if box[3] == 15}
    order = sorted(places, key=places.get)
    reading = order[terms.index("reading")]
    assert rowstyles.style_of(reading).texture == "plain"
    for key in (order[terms.index("start_up")], order[terms.index("tail")]):
        assert rowstyles.style_of(key).texture != "plain"
    assert "start-up 0.1, reading 0.1" in picture.alt


def test_choice_shows_the_rule_and_who_cannot():
    picture = viz.draw_choice(explain(ONE_LONG, LLAMA, policy="paper", gpu=HOME))
    assert picture.alt.startswith("workqueue is chosen: ")
    assert "Policy paper on home: 8 rows are at least 8." in picture.alt
    single = pkv.Shape(32, 8, 128, 16, "float32")
    found = explain(ONE_LONG, single, policy="cost", gpu=HOME)
    picture = viz.draw_choice(found)
    (reason,) = (entry.why_not for entry in found.candidates if entry.why_not)
    assert f"flashinfer cannot: {reason}." in picture.alt
    times = {entry.stage: entry.prediction.gpu_ms for entry in found.candidates if entry.prediction}
    words = [text for *_, text in texts(picture)]
    assert {f"{ms:.4g} ms" for ms in times.values()} <= set(words)
    assert f"→ {found.chosen}" in words
    assert "start-up" in words
    assert "merge" in words


@pytest.mark.parametrize("lengths", [[8192], [16384] * 4, ONE_LONG])
def test_bars_of_a_choice_count_what_the_policy_counts(lengths):
    """With FlashInfer's planning in its bar, one row of 8,192 tokens would be a choice against its own numbers."""
    found = explain(lengths, LLAMA, policy="cost", gpu="rtx3060")
    picture = viz.draw_choice(found)
    assert picture.alt.startswith(f"{found.chosen} is chosen: ")
    assert "though" not in picture.alt
    planning = load_gpu("rtx3060").costs.flashinfer_plan_us
    assert f"Not counted: flashinfer's own planning, {planning:.0f} us a step." in picture.alt


@pytest.mark.parametrize(
    ("draw", "error", "words"),
    [
        (lambda: viz.draw_timeline(TIMELINES["unsplit"].plan), TypeError, "got Plan: pass pkv.simulate(plan)"),
        (lambda: viz.draw_timelines([]), ValueError, "such as [pkv.simulate(plan)]"),
        (lambda: viz.draw_timelines(TIMELINES["unsplit"]), ValueError, "must be a list of one or more timelines"),
        (lambda: viz.draw_timelines([TIMELINES["unsplit"]], []), ValueError, "names = [] must be a list of 1 string,"),
        (lambda: viz.draw_timelines([TIMELINES["unsplit"]], "a"), ValueError, "names = 'a' must be a list of 1 string"),
        (lambda: viz.draw_timelines([TIMELINES["unsplit"]], [3]), ValueError, "names = [3] must be a list of 1 string"),
        (lambda: viz.plot_timeline(None), TypeError, "got NoneType: pass pkv.simulate(plan)"),
        (lambda: viz.draw_queue([1, 2]), TypeError, "plan must be a pkv.Plan, got list"),
        (lambda: viz.draw_rectangle([]), TypeError, "must be a list of one or more plans"),
        (lambda: viz.draw_rectangle(plan_of([5])), TypeError, "must be a list of one or more plans"),
        (lambda: viz.draw_rectangle([plan_of([5]), plan_of([6])]), ValueError, "make them all from the same lengths"),
        (lambda: viz.draw_regimes([]), ValueError, "cells is empty: pass at least one, such as (8, 65536"),
        (lambda: viz.draw_regimes(["workqueue"]), TypeError, "cells[0] = 'workqueue' must be (n_rows, longest"),
        (lambda: viz.draw_regimes([(8, 64, "equal")]), TypeError, "cells[0] = (8, 64, 'equal') must be"),
        (lambda: viz.draw_regimes([(0, 64, "equal", "split_kv")]), ValueError, "cells[0].n_rows = 0 is too small"),
        (lambda: viz.draw_regimes([(8, 6.4, "equal", "split_kv")]), TypeError, "cells[0].longest must be an int"),
        (lambda: viz.draw_regimes([(8, 64, "equal", None)]), TypeError, "cells[0].stage must be a word, got None"),
        (lambda: viz.draw_regimes([(8, 64, "equal", "a", -0.1)]), ValueError, "cells[0].margin = -0.1 must be 0 or"),
        (lambda: viz.draw_regimes([(8, 64, "equal", "a", math.nan)]), ValueError, "cells[0].margin = nan must be 0"),
        (lambda: viz.draw_regimes([(8, 64, "equal", "a")] * 2), ValueError, "cells[1] is a second one for equal, 8"),
        (lambda: viz.draw_regret([]), ValueError, "bars is empty: pass at least one, such as ('cost'"),
        (lambda: viz.draw_regret([("cost", "zipf")]), TypeError, "bars[0] = ('cost', 'zipf') must be (policy, trace"),
        (lambda: viz.draw_regret([("", "zipf", 0.1)]), TypeError, "bars[0].policy must be a word, got ''"),
        (lambda: viz.draw_regret([("cost", "zipf", "a")]), TypeError, "bars[0].mean must be a number, got str"),
        (lambda: viz.draw_regret([("cost", "zipf", -0.1)]), ValueError, "bars[0].mean = -0.1 must be 0 or more"),
        (lambda: viz.draw_regret([("cost", "zipf", 0.2, 0.1)]), ValueError, "bars[0].worst = 0.1 is below its mean"),
        (lambda: viz.draw_regret([("cost", "zipf", 0.2)] * 2), ValueError, "bars[1] is a second one for policy 'cost'"),
        (lambda: viz.draw_choice(plan_of([5])), TypeError, "got Plan: pass pkv.explain(lengths, shape)"),
        (
            lambda: viz.draw_choice(explain([5], LLAMA, gpu=GpuProfile("new", 90, 132))),
            ValueError,
            "gpu 'new' has no costs: explain for one that has",
        ),
        (lambda: viz.draw_candidates({}, "a"), ValueError, "chosen = 'a' must be one of the candidates: there is none"),
        (lambda: viz.draw_candidates(CANDIDATES, "a"), ValueError, "chosen = 'a' must be one of the candidates: split"),
        (lambda: viz.draw_candidates({"a": {"b": -1}}, "a"), ValueError, "candidates['a']['b'] = -1 must be 0 or"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_refused_by_name(draw, error, words):
    with pytest.raises(error, match=re.escape(words)):
        draw()


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib", reason="the lessons extra draws figures")


def words_of(figure):
    found = [figure._suptitle.get_text().replace("\n", " ")]
    for axes in figure.axes:
        found += [text.get_text() for text in axes.texts] + [axes.get_title(loc="left")]
    return found


@pytest.mark.parametrize("name", TIMELINES)
def test_figure_of_a_timeline_shows_the_same_time(name, matplotlib, tmp_path):
    timeline = TIMELINES[name]
    figure = viz.plot_timeline(timeline)
    assert viz.draw_timeline(timeline).alt.startswith(words_of(figure)[0])
    figure.savefig(tmp_path / "timeline.png", dpi=50)
    (axes,) = figure.axes
    if name == "split_kv":
        (row_0,) = (shape for shape in axes.collections if shape.get_label() == "row 0: 16,384")
        mine = timeline.spans[(timeline.spans["row"] == 0) & (timeline.spans["item"] >= 0)]
        drawn = sum(path.vertices[:, 0].max() - path.vertices[:, 0].min() for path in row_0.get_paths())
        assert drawn == pytest.approx((mine["end_us"] - mine["begin_us"]).sum(), rel=0.01)
        assert axes.get_xlim() == (0, timeline.gpu_ms * 1000)
        assert {int(path.vertices[:, 1].min()) for path in row_0.get_paths()} == set(mine["sm"].tolist())


def test_figures_of_regimes_and_regret_show_the_same_values(matplotlib, tmp_path):
    regimes, regret = viz.plot_regimes(CELLS, "Costs $5, not $6."), viz.plot_regret(BARS)
    assert regimes._supxlabel.get_text() == "Costs $5, not $6."
    for figure, picture in ((regimes, viz.draw_regimes(CELLS)), (regret, viz.draw_regret(BARS))):
        assert picture.alt.startswith(words_of(figure)[0])
        figure.savefig(tmp_path / "figure.pdf")
    letters = [text.split("\n")[0] for text in words_of(regimes)]
    assert letters.count("S") == sum(cell[3] == "split_kv" for cell in CELLS)
    assert words_of(regret).count("4.0%, worst 11.0%") == 2
    widths = [patch.get_width() for axes in regret.axes for patch in axes.patches]
    assert widths == pytest.approx([100 * mean for _, _, mean, _ in BARS])


def test_only_figures_need_matplotlib():
    code = """
import sys
sys.modules.update(dict.fromkeys(["matplotlib", "ipywidgets", "IPython", "flashinfer"]))
from pkv import viz
bars = [("cost", "zipf", 0.1)]
print(viz.draw_regret(bars).alt[:20])
try:
    viz.plot_regret(bars)
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "cost has the least r"
    assert "pip install matplotlib" in done.stdout

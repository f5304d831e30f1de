"""Pictures: deterministic, legible, and true to the plan, cache or states that they draw."""

import itertools
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

import pkv
from pkv import viz
from pkv.viz.__main__ import draw_readme
from pkv.viz.programs import deal
from pkv.viz.svg import WIDTH

ROOT = Path(__file__).resolve().parents[1]
LLAMA = pkv.Shape(n_q_heads=32, n_kv_heads=8, head_dim=128, page_size=16, dtype=torch.float16)
SVG = "{http://www.w3.org/2000/svg}"


def plan_of(lengths, stage="split_kv", **options):
    return pkv.plan(lengths, LLAMA, stage=stage, gpu="rtx3060", **options)


def ragged(n_rows):
    return [(7919 * (row + 1)) % 9000 for row in range(n_rows)]


PLANS = {
    "no-rows": plan_of([]),
    "all-empty": plan_of([0, 0]),
    "one-token": plan_of([1]),
    "toy": plan_of([3, 10, 40], splits=2),
    "ragged-8": plan_of([65536, 9000, 2100, 12000, 0, 1, 30000, 4096], splits=14),
    "buckets-8": plan_of([900, 120, 40, 300, 0, 1, 500, 77], stage="length_buckets"),
    "reference": plan_of([3, 10], stage="reference"),
    "4000-items-in-a-row": plan_of([65536], splits=4000),
    "dynamic": plan_of([64, 64], splits=2, dynamic=True),
    "17-rows": plan_of(ragged(17), splits=3),
    "64-rows": plan_of(ragged(64), splits=20),
    "256-rows": plan_of(ragged(256), splits=20),
    "1000-rows": plan_of(ragged(1000), splits=4),
    "longest-possible": plan_of([2**31 - 1, 5], splits=3),
}


def cache_of(lengths, page_size=4, **options):
    zeros = torch.zeros(len(lengths), max([1, *lengths]), 1, 16)
    return pkv.PagedKVCache.from_dense(zeros, zeros, lengths, page_size=page_size, **options)


def texts(picture):
    """(left, right, y, text) of every text, its width estimated as a browser would need it."""
    for node in ElementTree.fromstring(picture.svg).iter(f"{SVG}text"):
        x, size = float(node.get("x")), float(node.get("font-size"))
        width = len(node.text) * size * 0.6
        left = x - {"start": 0, "middle": width / 2, "end": width}[node.get("text-anchor", "start")]
        yield left, left + width, float(node.get("y")), node.text


def every_picture():
    for name, plan in PLANS.items():
        yield f"plan-{name}", lambda plan=plan: viz.draw_plan(plan)
        yield f"programs-{name}", lambda plan=plan: viz.draw_programs(plan)
    for lengths, page_size in [
        ([3, 10], 4),
        ([0, 0], 4),
        ([], 4),
        ([70, 33, 16, 100], 16),
        ([1700, 3], 64),
        ([9] * 9, 1),
    ]:
        yield f"pages-{lengths[:4]}-{page_size}", lambda a=lengths, b=page_size: viz.draw_pages(cache_of(a, b, seed=1))
    parts = [viz.Part(0, 4, 1.5, math.log(4)), viz.Part(4, 10, 6.5, math.log(6)), viz.Part(10, 10, math.nan, -math.inf)]
    for way in viz.WAYS:
        yield f"merge-{way}", lambda way=way: viz.draw_merge(parts, [(0, 1, 2), (2, 1, 0)], way)


PICTURES = dict(every_picture())


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_deterministic_sound_and_small(name):
    picture = PICTURES[name]()
    assert picture == PICTURES[name]()
    root = ElementTree.fromstring(picture.svg)
    assert root.tag == f"{SVG}svg"
    assert picture.alt
    assert root.find(f"{SVG}title").text == picture.alt
    assert len(picture.svg) < 250_000
    assert not re.search(r'"(nan|inf|-inf)"', picture.svg), "a coordinate is not a number"


@pytest.mark.parametrize("name", PICTURES)
def test_texts_stay_inside_and_apart(name):
    picture = PICTURES[name]()
    height = float(ElementTree.fromstring(picture.svg).get("height"))
    lines: dict[float, list[tuple[float, float, str]]] = {}
    for left, right, y, text in texts(picture):
        assert left > -2, f"cut on the left: {text}"
        assert right < WIDTH + 2, f"cut on the right: {text}"
        assert 0 < y < height, f"below the picture: {text}"
        lines.setdefault(y, []).append((left, right, text))
    for line in lines.values():
        for (_, right, text), (left, _, following) in itertools.pairwise(sorted(line)):
            assert left > right - 4, f"{text!r} runs into {following!r}"


def rects(svg, **attributes):
    found = ElementTree.fromstring(svg).iter(f"{SVG}rect")
    return [
        node for node in found if all(node.get(name.replace("_", "-")) == want for name, want in attributes.items())
    ]


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
        ("4000-items-in-a-row", "1 row become 4,000 items"),
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


@pytest.mark.parametrize("name", ["ragged-8", "buckets-8"])
def test_programs_are_dealt_in_turn(name):
    plan = PLANS[name]
    for launch in (launch for launch in plan.launches if launch.kernel == "decode"):
        dealt = deal(plan, launch)
        n_programs = (launch.end - launch.begin) * LLAMA.grid_heads
        assert list(zip(dealt.sms, dealt.levels)) == [(p % 28, p // 28) for p in range(n_programs)]
        assert set(dealt.rows) == set(launch.rows)


@pytest.mark.parametrize(("splits", "idle"), [(1, 20), (2, 12), (3, 4), (4, 0)])
def test_idle_sms_are_counted(splits, idle):
    title = viz.draw_programs(plan_of([65536], splits=splits)).alt
    assert (f"{idle} of 28 SMs get no token" if idle else "each of the 28 SMs gets work") in title


def test_page_picture_names_the_slot_that_holds_the_token():
    cache = cache_of([3, 10], seed=3, n_pages=6)
    page = int(cache.block_table[1, 2])
    picture = viz.draw_pages(cache, highlight=(1, 9))
    assert f"block_table[1, 9 // 4] = {page}, slot 9 % 4 = 1" in picture.alt
    assert "4 of 6 pages hold them, 3 slots of 16 unused" in picture.alt
    assert len(rects(picture.svg, fill="url(#unused)")) == 3


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


def test_picture_is_an_image_with_words():
    bundle = viz.draw_plan(PLANS["toy"])._repr_mimebundle_()
    assert sorted(bundle) == ["text/html", "text/plain"]
    assert re.fullmatch(
        r'<img alt="[^"]+" [^>]*src="data:image/svg\+xml;base64,[A-Za-z0-9+/=]+"/>', bundle["text/html"]
    )


def test_plan_draws_itself_in_a_notebook(monkeypatch):
    formatters = pytest.importorskip("IPython.core.formatters", reason="the lessons extra brings IPython")
    shell = SimpleNamespace(display_formatter=formatters.DisplayFormatter())
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    assert viz.register()
    data, _ = shell.display_formatter.format(PLANS["toy"])
    assert data["text/plain"] == str(PLANS["toy"])
    assert data["text/html"] == viz.draw_plan(PLANS["toy"]).html()


def test_outside_a_notebook_nothing_is_registered(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert not viz.register()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not viz.register()


def test_drawing_needs_no_optional_package():
    """Plans, pages and merges are plain text; only the roofline asks for matplotlib, and says so."""
    code = """
import sys
sys.modules.update(dict.fromkeys(["matplotlib", "ipywidgets", "IPython", "flashinfer"]))
import torch, pkv
from pkv import viz
shape = pkv.Shape(8, 2, 64, 4, torch.float16)
plan = pkv.plan([3, 10], shape, splits=1, gpu="rtx3060")
print(viz.draw_plan(plan).alt[:17], "|", len(viz.draw_programs(plan).svg) > 500)
try:
    viz.draw_roofline({"G = 4": shape})
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "split_kv: 2 rows  | True"
    assert "pip install matplotlib" in done.stdout


def test_readme_picture_is_the_one_that_the_command_draws():
    saved = (ROOT / "docs" / "plan.svg").read_text()
    assert saved == draw_readme().svg, "run: python -m pkv.viz docs/plan.svg"
    ElementTree.fromstring(saved)

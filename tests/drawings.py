"""Pictures that several tests look at, and what can be read from their SVG."""

import itertools
import math
from xml.etree import ElementTree

import torch

import pkv
from pkv import viz
from pkv.viz import widgets
from pkv.viz.svg import WIDTH
from pkv.wording.checks import LONGEST_ROW

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
    "stream-k-8": plan_of([65536, 9000, 2100, 12000, 0, 1, 30000, 4096], stage="stream_k"),
    "stream-k-short": plan_of([5, 40], stage="stream_k"),
    "reference": plan_of([3, 10], stage="reference"),
    "4000-items-in-a-row": plan_of([65536], splits=4000),
    "dynamic": plan_of([64, 64], splits=2, dynamic=True),
    "17-rows": plan_of(ragged(17), splits=3),
    "64-rows": plan_of(ragged(64), splits=20),
    "256-rows": plan_of(ragged(256), splits=20),
    "1000-rows": plan_of(ragged(1000), splits=4),
    "longest-possible": plan_of([LONGEST_ROW, 5], splits=3),
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


def assert_legible(picture, name=""):
    """All texts of a picture lie inside it and apart; a line of letters is about 9 pixels high."""
    height = float(ElementTree.fromstring(picture.svg).get("height"))
    found = sorted(texts(picture), key=lambda text: text[2])
    for left, right, y, text in found:
        assert left > -2, f"{name}: cut on the left: {text}"
        assert right < WIDTH + 2, f"{name}: cut on the right: {text}"
        assert 8 < y < height, f"{name}: outside the picture: {text}"
    for (left, right, y, text), (other_left, other_right, other_y, other) in itertools.combinations(found, 2):
        if other_y - y < 9:
            assert left > other_right - 4 or other_left > right - 4, f"{name}: {text!r} and {other!r} overlap"


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
        ([40, 20, 13, 10, 8, 6], 4),
        ([40, 20, 13, 10, 8, 6], 1),
    ]:
        yield f"pages-{lengths[:4]}-{page_size}", lambda a=lengths, b=page_size: viz.draw_pages(cache_of(a, b, seed=1))
    parts = [viz.Part(0, 4, 1.5, math.log(4)), viz.Part(4, 10, 6.5, math.log(6)), viz.Part(10, 10, math.nan, -math.inf)]
    for way in viz.WAYS:
        yield f"merge-{way}", lambda way=way: viz.draw_merge(parts, [(0, 1, 2), (2, 1, 0)], way)
    narrow = [widgets.part_of(begin, end) for begin, end in [(0, 4), (4, 7), (7, 9), (9, 10), (10, 10)]]
    yield "merge-narrow", lambda: viz.draw_merge(narrow, [(0, 1, 2, 3, 4)], "empty state multiplied", 2)


PICTURES = dict(every_picture())


def rects(svg, **attributes):
    found = ElementTree.fromstring(svg).iter(f"{SVG}rect")
    return [
        node for node in found if all(node.get(name.replace("_", "-")) == want for name, want in attributes.items())
    ]

"""What the sliders call, and what shows where ipywidgets is missing."""

import itertools
import math

import pytest

from pkv.viz import WAYS, Part, widgets

PARTS = [Part(b, e, (b + e - 1) / 2, math.log(e - b)) for b, e in itertools.pairwise([0, 4, 7, 9, 10])]


class Shown:
    """Stands for a notebook's output: what was displayed, and what became of it."""

    def __init__(self):
        self.outputs = []

    def display(self, value, display_id=False):
        self.outputs.append(value)
        return Handle(self.outputs, len(self.outputs) - 1) if display_id else None


class Handle:
    def __init__(self, outputs, index):
        self.outputs, self.index = outputs, index

    def update(self, value, raw=False):
        self.outputs[self.index] = value


@pytest.fixture
def shown(monkeypatch):
    shown = Shown()
    monkeypatch.setattr(widgets, "display", shown.display)
    return shown


EXPLORERS = {
    "pages": widgets.explore_pages,
    "plan": widgets.explore_plan,
    "merge": lambda: widgets.explore_merge(PARTS),
}


@pytest.mark.parametrize("rows", [1, 3, 6])
@pytest.mark.parametrize("longest", [1, 12, 40])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_pages_of_every_position(rows, longest, page_size):
    (picture,) = widgets.pages_of(rows, longest, page_size)
    n_tokens = sum(widgets.ragged_lengths(rows, longest))
    assert f"{n_tokens:,} token" in picture.alt


@pytest.mark.parametrize("stage", ["split_kv", "length_buckets"])
@pytest.mark.parametrize(("rows", "longest", "splits"), [(1, 256, 1), (16, 256, 32), (4, 8192, 4), (16, 65536, 32)])
def test_plan_of_every_position(rows, longest, splits, stage):
    plan, programs = widgets.plan_of(rows, longest, splits, stage)
    assert f"{rows * splits:,} item" in plan.alt
    assert programs.alt.startswith(f"{stage}: {rows * splits * 8:,} program")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", widgets.ORDERS)
def test_merge_of_every_position(order, way):
    for steps in (1, 2, 4):
        (picture,) = widgets.merge_of(PARTS, order, way, steps)
        assert ("the end is out 4.5, lse 2.303" in picture.alt) == (way == "exact merge")
    assert ("✓" in picture.svg) == (way == "exact merge")
    assert ("✗" in picture.svg) == (way != "exact merge")


@pytest.mark.parametrize("name", EXPLORERS)
def test_first_picture_shows_before_the_sliders(shown, name):
    pytest.importorskip("ipywidgets", reason="the lessons extra brings ipywidgets")
    EXPLORERS[name]()
    *pictures, box = shown.outputs
    assert all(picture.alt for picture in pictures)
    assert box.children[0].value == "", "the live picture comes with the first move"


def test_moving_a_slider_replaces_the_first_picture(shown):
    pytest.importorskip("ipywidgets", reason="the lessons extra brings ipywidgets")
    widgets.explore_plan(rows=4, longest=8192, splits=4)
    live, rows, longest, splits, stage = shown.outputs[-1].children
    splits.value = 5
    assert [output["text/html"] for output in shown.outputs[:-1]] == ["", ""]
    assert live.value == "".join(picture.html() for picture in widgets.plan_of(4, 8192, 5, "split_kv"))
    stage.value, longest.value, rows.value = "length_buckets", 1024, 2
    assert live.value == "".join(picture.html() for picture in widgets.plan_of(2, 1024, 5, "length_buckets"))


def test_every_choice_of_the_merge_draws(shown):
    pytest.importorskip("ipywidgets", reason="the lessons extra brings ipywidgets")
    widgets.explore_merge(PARTS)
    live, order, way, steps = shown.outputs[-1].children
    for values in itertools.product(order.options, way.options, (1, 4)):
        order.value, way.value, steps.value = values
        assert live.value.startswith("<img")


def test_without_ipywidgets_the_picture_shows_and_a_line_says_what_to_install(shown, monkeypatch, capsys):
    monkeypatch.setattr(widgets, "ipywidgets", None)
    widgets.explore_pages()
    assert len(shown.outputs) == 1
    assert shown.outputs[0].alt.startswith("3 rows")
    assert "pip install 'ipywidgets" in capsys.readouterr().out


def test_in_a_plain_script_the_words_are_printed(monkeypatch, capsys):
    monkeypatch.setattr(widgets, "display", None)
    widgets.explore_pages()
    assert capsys.readouterr().out.startswith("3 rows, 22 tokens")


def test_an_error_in_a_callback_is_shown():
    def fails(rows):
        raise ValueError(f"rows = {rows} <too many>")

    assert widgets.as_html(fails, {"rows": 9}) == "<pre>ValueError: rows = 9 &lt;too many&gt;</pre>"

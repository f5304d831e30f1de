"""What the sliders call, and what shows where ipywidgets is missing."""

import dataclasses
import itertools
import re
from pathlib import Path

import pytest

from pkv.cards.known import load_gpu
from pkv.plans.gpu import Costs
from pkv.viz import WAYS, schedules, widgets

LESSONS = sorted((Path(__file__).resolve().parents[1] / "lessons" / "src").glob("[0-9]*.py"))


class Shown:
    """Stands for a notebook's output: what was displayed, and what became of it."""

    def __init__(self):
        self.outputs = []

    def display(self, value, display_id=False, raw=False):
        self.outputs.append(value)
        return Handle(self.outputs, len(self.outputs) - 1) if display_id else None


class Handle:
    def __init__(self, outputs, index):
        self.outputs, self.index = outputs, index

    def update(self, value, raw=False):
        self.outputs[self.index] = value


def controls_of(shown):
    """The explorer's controls, found as a page would find them: by the model's id."""
    ipywidgets = pytest.importorskip("ipywidgets", reason="the lessons extra brings ipywidgets")
    view = shown.outputs[-1]["application/vnd.jupyter.widget-view+json"]
    return ipywidgets.widgets.widget._instances[view["model_id"]].children


@pytest.fixture
def shown(monkeypatch):
    shown = Shown()
    monkeypatch.setattr(widgets, "display", shown.display)
    return shown


EXPLORERS = {
    "pages": widgets.explore_pages,
    "plan": widgets.explore_plan,
    "merge": widgets.explore_merge,
    "schedule": widgets.explore_schedule,
    "policy": widgets.explore_policy,
    "runs": widgets.explore_runs,
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


@pytest.fixture
def made_up_costs(monkeypatch):
    """What sliders show must not depend on what the card is found to cost."""
    card = dataclasses.replace(load_gpu("rtx3060"), costs=Costs(300.0, 6.0, 1.5, 5.0, step_us=10.0))
    monkeypatch.setattr(schedules, "load_gpu", {"rtx3060": card}.__getitem__)


@pytest.mark.parametrize("stage", schedules.PLAYED)
@pytest.mark.parametrize("raggedness", schedules.RAGGEDNESS)
@pytest.mark.parametrize(
    ("rows", "longest", "splits", "sms"), [(1, 256, 1, 4), (8, 16384, 8, 28), (16, 65536, 32, 132)]
)
def test_schedule_of_every_position(rows, longest, raggedness, splits, sms, stage, made_up_costs):
    (picture,) = widgets.schedule_of(rows, longest, raggedness, splits, sms, stage)
    assert re.match(rf"{stage}: [\d,]+ us, {sms} SMs \d+% idle; ", picture.alt)


def test_more_splits_leave_a_long_row_alone_for_less_time(made_up_costs):
    alone = []
    for splits in (1, 2, 8):
        (picture,) = widgets.schedule_of(8, 16384, "one long", splits, 28, "workqueue")
        alone.append(int(re.search(r"for the last ([\d,]+) us only row 0 is read", picture.alt)[1].replace(",", "")))
    assert alone == sorted(alone, reverse=True)
    assert alone[0] > 2 * alone[-1]


@pytest.mark.parametrize("policy", ["paper", "cost"])
@pytest.mark.parametrize("raggedness", schedules.RAGGEDNESS)
@pytest.mark.parametrize(("rows", "longest"), [(1, 256), (1, 65536), (8, 16384), (64, 65536)])
def test_policy_of_every_position(rows, longest, raggedness, policy, made_up_costs):
    (picture,) = widgets.policy_of(rows, longest, raggedness, policy)
    assert f"Policy {policy} on rtx3060: " in picture.alt
    chosen = picture.alt.split(" is chosen")[0]
    times = {name: float(ms) for name, ms in re.findall(r"(\w+): ([\d.e-]+) ms \(", picture.alt)}
    assert len(times) >= 4
    if policy == "cost":
        assert times[chosen] <= 1.011 * min(times.values()), "within 1%, of times with four digits"


def test_lengths_by_raggedness():
    assert schedules.lengths_of(4, 12, "ragged") == [12, 6, 4, 3]
    assert schedules.lengths_of(3, 4096, "equal") == [4096] * 3
    assert schedules.lengths_of(3, 4096, "one long") == [4096, 512, 512]
    assert schedules.lengths_of(3, 256, "one long") == [256] * 3
    with pytest.raises(ValueError, match="raggedness = 'none' must be one of 'equal', 'ragged', 'one long'"):
        schedules.lengths_of(3, 256, "none")
    with pytest.raises(ValueError, match="policy = 'best' must be one of 'paper', 'cost'"):
        schedules.policy_of(3, 256, "equal", "best")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", widgets.ORDERS)
def test_merge_of_every_position(order, way):
    for steps in (1, 2, 4):
        (picture,) = widgets.merge_of(widgets.CUTS, order, way, steps)
        assert picture.svg.count(">take ") + picture.svg.count(">+ ") == steps
        at_end = steps == 4
        assert ("states taken: so far" in picture.alt) != at_end
        assert ("the end is out 4.5, lse 2.303" in picture.alt) == (at_end and way == "exact merge")
        assert ("✓" in picture.svg) == (at_end and way == "exact merge")
        assert ("✗" in picture.svg) == (at_end and way != "exact merge")


def test_answers_in_the_lessons():
    """Lesson 00 asks for page sizes, lesson 01 for splits and for the ways that depend on the order."""

    def good_sizes(rows, longest):
        for size in (1, 2, 3, 4, 8, 16):
            n_pages = [-(-length // size) for length in widgets.ragged_lengths(rows, longest)]
            n_unused = sum(n_pages) * size - sum(widgets.ragged_lengths(rows, longest))
            n_entries = rows * max(n_pages)
            (picture,) = widgets.pages_of(rows, longest, size)
            assert f"{n_unused} slot{'' if n_unused == 1 else 's'} of" in picture.alt
            assert f"= {n_entries} entries" in picture.alt
            if n_unused <= 10 and n_entries <= 60:
                yield size, n_unused, n_entries

    assert list(good_sizes(4, 40)) == [(3, 7, 56), (4, 5, 40)]
    assert list(good_sizes(6, 37)) == []

    for splits, stage in [(2, "split_kv"), (3, "length_buckets")]:
        assert "SMs get no token" in widgets.plan_of(2, 8192, splits, stage)[1].alt
    plan, programs = widgets.plan_of(2, 8192, 3, "split_kv")
    assert "48 programs" in plan.alt
    assert "8 programs are empty" in plan.alt
    assert "each of the 28 SMs gets work" in programs.alt
    plan, programs = widgets.plan_of(2, 8192, 4, "length_buckets")
    assert "4 launches (2 decode, 2 merge); none is empty" in plan.alt
    assert "each of the 28 SMs gets work" in programs.alt

    ends = {way: {widgets.merge_of(widgets.CUTS, order, way, 4)[0].alt for order in widgets.ORDERS} for way in WAYS}
    assert [way for way, found in ends.items() if len(found) > 1] == ["average of the outs"]


def slider_cells():
    for path in LESSONS:
        for cell in path.read_text().split("\n# %%"):
            if "widgets.explore_" in cell:
                yield pytest.param(cell.partition("\n")[2], id=cell.split("widgets.explore_")[1].split("(")[0])


@pytest.mark.parametrize("source", list(slider_cells()))
def test_a_slider_cell_runs_alone(source, monkeypatch, capsys):
    monkeypatch.setattr(widgets, "display", None)
    exec(source, {})
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", EXPLORERS)
def test_first_picture_shows_before_the_sliders(shown, name):
    pytest.importorskip("ipywidgets", reason="the lessons extra brings ipywidgets")
    EXPLORERS[name]()
    *pictures, _ = shown.outputs
    assert all(picture.alt for picture in pictures)


def test_sliders_have_a_word_for_a_page_that_cannot_show_them(shown):
    pytest.importorskip("ipywidgets", reason="the lessons extra brings ipywidgets")
    widgets.explore_pages()
    assert shown.outputs[-1]["text/plain"] == widgets.NOT_LIVE
    assert "application/vnd.jupyter.widget-view+json" in shown.outputs[-1]


def test_moving_a_slider_updates_the_outputs_that_are_saved(shown):
    pytest.importorskip("ipywidgets", reason="the lessons extra brings ipywidgets")
    widgets.explore_plan(rows=4, longest=8192, splits=4)
    rows, longest, splits, stage = controls_of(shown)
    splits.value = 5
    assert shown.outputs[:-1] == [picture._repr_mimebundle_() for picture in widgets.plan_of(4, 8192, 5, "split_kv")]
    stage.value, longest.value, rows.value = "length_buckets", 1024, 2
    want = [picture._repr_mimebundle_() for picture in widgets.plan_of(2, 1024, 5, "length_buckets")]
    assert shown.outputs[:-1] == want


def test_sliders_of_schedules_update_their_picture(shown, made_up_costs):
    pytest.importorskip("ipywidgets", reason="the lessons extra brings ipywidgets")
    widgets.explore_schedule(sms=20)
    rows, longest, raggedness, splits, sms, stage = controls_of(shown)
    assert sms.options == (4, 14, 20, 28, 56, 132)
    stage.value, raggedness.value, splits.value, sms.value = "row_local", "ragged", 4, 28
    want = widgets.schedule_of(rows.value, longest.value, "ragged", 4, 28, "row_local")
    assert shown.outputs[:-1] == [picture._repr_mimebundle_() for picture in want]
    assert set(stage.options) == set(schedules.PLAYED)


def test_sliders_of_policies_update_their_picture(shown, made_up_costs):
    pytest.importorskip("ipywidgets", reason="the lessons extra brings ipywidgets")
    widgets.explore_policy()
    rows, longest, _, policy = controls_of(shown)
    rows.value, longest.value, policy.value = 1, 65536, "paper"
    assert shown.outputs[0]["text/plain"].startswith("length_buckets is chosen")


def test_a_number_between_the_choices_becomes_one_more(shown):
    pytest.importorskip("ipywidgets", reason="the lessons extra brings ipywidgets")
    widgets.explore_pages(page_size=5)
    assert controls_of(shown)[2].options == (1, 2, 3, 4, 5, 8, 16)
    widgets.explore_plan(longest=300)
    longest = controls_of(shown)[1]
    assert (longest.value, longest.options[:3]) == (300, (256, 300, 1024))


def test_a_slider_starts_at_the_picture_that_shows(shown):
    pytest.importorskip("ipywidgets", reason="the lessons extra brings ipywidgets")
    widgets.explore_plan(rows=16, longest=65536, splits=32, stage="length_buckets")
    values = [control.value for control in controls_of(shown)]
    assert values == [16, 65536, 32, "length_buckets"]
    assert shown.outputs[:2] == widgets.plan_of(*values)


def test_every_choice_of_the_merge_draws(shown):
    pytest.importorskip("ipywidgets", reason="the lessons extra brings ipywidgets")
    widgets.explore_merge()
    order, way, steps = controls_of(shown)
    for values in itertools.product(order.options, way.options, (1, 4)):
        order.value, way.value, steps.value = values
        assert shown.outputs[0]["text/html"].startswith("<img")


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


@pytest.mark.parametrize(
    ("explore", "options", "error", "words"),
    [
        (widgets.explore_plan, {"rows": 20}, ValueError, "rows = 20 must lie in 1 .. 16"),
        (widgets.explore_plan, {"rows": 0}, ValueError, "rows = 0 must lie in 1 .. 16"),
        (widgets.explore_plan, {"longest": 100}, ValueError, "longest = 100 must lie in 256 .. 65536"),
        (widgets.explore_plan, {"splits": 33}, ValueError, "splits = 33 must lie in 1 .. 32"),
        (widgets.explore_plan, {"stage": "reference"}, ValueError, "stage = 'reference' must be one of 'split_kv', "),
        (widgets.explore_plan, {"stage": None}, ValueError, "stage = None must be one of 'split_kv', "),
        (widgets.explore_plan, {"rows": "4"}, TypeError, "rows must be an int in 1 .. 16, got str"),
        (widgets.explore_plan, {"splits": 2.5}, TypeError, "splits must be an int in 1 .. 32, got float"),
        (widgets.explore_schedule, {"rows": 17}, ValueError, "rows = 17 must lie in 1 .. 16"),
        (widgets.explore_schedule, {"sms": 2}, ValueError, "sms = 2 must lie in 4 .. 132"),
        (widgets.explore_schedule, {"stage": "reference"}, ValueError, "stage = 'reference' must be one of 'split_kv'"),
        (widgets.explore_schedule, {"raggedness": 1}, ValueError, "raggedness = 1 must be one of 'equal', 'ragged'"),
        (widgets.explore_policy, {"policy": "best"}, ValueError, "policy = 'best' must be one of 'paper', 'cost'"),
        (widgets.explore_policy, {"rows": 128}, ValueError, "rows = 128 must lie in 1 .. 64"),
        (widgets.explore_pages, {"rows": 7}, ValueError, "rows = 7 must lie in 1 .. 6"),
        (widgets.explore_pages, {"longest": 50}, ValueError, "longest = 50 must lie in 1 .. 40"),
        (widgets.explore_pages, {"longest": -1}, ValueError, "longest = -1 must lie in 1 .. 40"),
        (widgets.explore_pages, {"page_size": 17}, ValueError, "page_size = 17 must lie in 1 .. 16"),
        (widgets.explore_merge, {"cuts": [0, 4, 10]}, ValueError, "cuts = [0, 4, 10] must be the bounds of four"),
        (widgets.explore_merge, {"cuts": [0, 1, 2, 3, 4, 5]}, ValueError, "must be the bounds of four states"),
        (widgets.explore_merge, {"cuts": [0, 4, 3, 9, 10]}, ValueError, "none smaller than the one before"),
        (widgets.explore_merge, {"cuts": [-1, 4, 7, 9, 10]}, ValueError, "token numbers from 0 on"),
        (widgets.explore_merge, {"cuts": [3, 3, 3, 3, 3]}, ValueError, "a token between first and last"),
        (widgets.explore_merge, {"cuts": []}, ValueError, "such as [0, 4, 7, 9, 10]"),
        (widgets.explore_merge, {"cuts": [0, 1.5, 2, 3, 4]}, TypeError, "cuts must be integers"),
    ],
)
@pytest.mark.parametrize("has_page", [False, True])
def test_a_start_outside_a_slider_is_refused_by_name(explore, options, error, words, has_page, monkeypatch):
    monkeypatch.setattr(widgets, "display", (lambda *_, **__: pytest.fail("drawn")) if has_page else None)
    with pytest.raises(error, match=re.escape(words)):
        explore(**options)


def test_an_error_in_a_callback_is_shown():
    def fails(rows):
        raise ValueError(f"rows = {rows} <too many>")

    error, blank = widgets.bundles(fails, {"rows": 9}, 2)
    assert error == {
        "text/html": "<pre>ValueError: rows = 9 &lt;too many&gt;</pre>",
        "text/plain": "ValueError: rows = 9 <too many>",
    }
    assert blank == {"text/html": "", "text/plain": ""}

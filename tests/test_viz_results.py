"""Pictures of results: true to their numbers, legible, the same every time, and drawn only of what there is."""

import argparse
import itertools
import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from drawings import SVG, assert_legible, texts
from recordfiles import ENGINES, H200, SLICE, run_of, timing_of, write_records

from pkv import viz
from pkv.bench.loads.grids import SHAPE, Load, Step, grid, load, trace_load
from pkv.bench.records import shipped
from pkv.bench.records.records import Records, append, read_records
from pkv.commands import CommandError, plot
from pkv.viz import paperfigures
from pkv.viz.figures import FIGURES, Missing
from pkv.viz.resultsbars import draw_charges, draw_ladder, draw_machines
from pkv.viz.resultscales import Scale, spread, times_in_words
from pkv.viz.resultscurves import draw_growth, draw_layers
from pkv.viz.resultsratios import draw_ratios, draw_stream
from pkv.viz.resultsrows import APART, MOST_LOADS, draw_bounds, draw_one_row, thinned
from pkv.viz.svg import SMALL

TRACES = [trace_load(name, rows, 20260623) for name in ("bimodal", "zipf", "bucketed") for rows in (1, 8)]
RATIOS = {"ours": {"a": 1.2, "b": 1.25}, "a name that is long & <odd>": {"a": 0.5, "b": 0.05}, "less": {"a": 9.0}}
MANY = {f"engine {number}": {str(n): 0.02 * (n + 1) * (1 + number / 9) for n in range(100)} for number in range(18)}
CURVES = {f"engine {number}": [(2.0**n, 5.0 + number * n**2) for n in range(11)] for number in range(18)}
DRAWN = {
    "ratios": lambda: draw_ratios(RATIOS, "the rival", "A note."),
    "ratios-one": lambda: draw_ratios({"ours": {"a": 1.0}}, "the rival"),
    "ratios-many": lambda: draw_ratios(MANY, "the rival"),
    "stream": lambda: draw_stream({"ours": [(1e6, 0.4), (3e8, 0.95), (1e9, 1.02)], "other": [(3e8, 0.2)]}),
    "stream-one": lambda: draw_stream({"ours": [(1e6, 0.4)]}),
    "layers": lambda: draw_layers({"ours": [(1, 90.0), (80, 88.0)], "theirs": [(1, 400.0), (80, 89.0)]}),
    "layers-same": lambda: draw_layers({"a": [(1, 90.0), (80, 90.0)], "b": [(1, 90.0), (80, 90.0)]}),
    "growth": lambda: draw_growth({"ours": [(1, 0.0), (1024, 0.2)], "b": [(1, 9.0), (1024, 900.0)]}, {"b": [(1, 0.0)]}),
    "growth-many": lambda: draw_growth(CURVES, CURVES),
    "ladder": lambda: draw_ladder({"zipf B8": {"split_kv": 90.0, "workqueue": 60.0}, "b": {"split_kv": 9.0}}),
    "one_row": lambda: draw_one_row({"ours": [(8e3, 0.6), (6e4, 0.9)], "a longer name": [(8e3, 0.5), (6e4, 0.9)]}),
    "one_row-one": lambda: draw_one_row({"ours": [(1, 1.2)]}, "A note."),
    "one_row-many": lambda: draw_one_row(
        {f"engine {e}": [(2.0**n, 1 / (n + e + 1)) for n in range(18)] for e in range(18)}
    ),
    "bounds": lambda: draw_bounds({"one_long(64,64k)": {"split_kv": 900.0, "row_local": 90.0, "workqueue": 80.0}}),
    "bounds-same": lambda: draw_bounds({"a": {"split_kv": 1.0, "row_local": 1.0}}),
    "bounds-many": lambda: draw_bounds(
        {
            f"bimodal({n},128k) head_dim 256": {"split_kv": 9.0 + n, "row_local": 20.0, "workqueue": 8.0}
            for n in range(90)
        }
    ),
    "machines": lambda: draw_machines({"zipf B8": {"a card": 1.1, "other": 2.0}, "b": {"a card": 0.4}}, "the rival"),
    "charges": lambda: draw_charges({"zipf B8": {"its plan": 9.1, "no plan": 0.9}}, "the rival", "A note."),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two machines on the paper's traces, and the other grids on one."""
    folder = tmp_path_factory.mktemp("records")
    return [
        write_records(folder / "paper.jsonl", run_of("p", "paper"), TRACES),
        write_records(folder / "slice.jsonl", run_of("q", "paper", SLICE), TRACES, {"fa2-tensor-core": 2.3}),
        write_records(folder / "growth.jsonl", run_of("g", "growth", H200), grid("growth")[::5]),
        write_records(folder / "full.jsonl", run_of("f", "full", H200), grid("full")[::3]),
    ]


def of_records(files):
    records = read_records(files)
    return plot.drawn_of(records, list(FIGURES))[0]


def every_picture(files):
    return {name: draw() for name, draw in DRAWN.items()} | of_records(files)


def test_pictures_are_sound_legible_and_the_same_every_time(files):
    again = every_picture(files)
    for name, picture in every_picture(files).items():
        assert picture == again[name], name
        root = ElementTree.fromstring(picture.svg)
        assert root.find(f"{SVG}title").text == picture.alt
        assert len(picture.svg) < 250_000, name
        assert len(list(root.iter())) < 2500, name
        drawn = re.sub(r"<text.*?</text>|<title>.*?</title>|aria-label=\S+", "", picture.svg)
        assert not re.search(r"\b(nan|inf)\b", drawn), name
        assert min(map(float, re.findall(r'font-size="([\d.]+)"', picture.svg))) >= SMALL


def test_texts_stay_inside_and_apart(files):
    for name, picture in every_picture(files).items():
        assert_legible(picture, name)


def test_every_figure_is_drawn_of_each_machine_and_grid_that_has_it(files):
    assert sorted(of_records(files)) == sorted(
        [
            *(
                f"{name}-full-nvidia-h200-132-sms"
                for name in ("ratios", "stream", "layers", "gains", "regimes", "bounds")
            ),
            *(
                f"{name}-paper-nvidia-h200-{n_sms}-sms"
                for name in ("ratios", "stream", "layers", "ladder", "gains", "regret", "charges", "one_row", "bounds")
                for n_sms in (132, 28)
            ),
            "growth-growth-nvidia-h200-132-sms",
            "machines",
        ]
    )


def places(picture):
    """(x, y) of the middle of every dot, path by path."""
    for node in ElementTree.fromstring(picture.svg).iter(f"{SVG}path"):
        if node.get("stroke-opacity") == ".55":
            yield [(float(x), float(y)) for x, y in re.findall(r"M([\d.]+) ([\d.]+)h", node.get("d"))]


def test_dots_lie_at_their_ratios():
    picture = draw_ratios({"ours": {"a": 2.0, "b": 1.0, "c": 0.5}}, "the rival")
    ((two, one, half),) = places(picture)
    assert two[0] - one[0] == pytest.approx(one[0] - half[0], abs=0.1)
    assert two[0] > one[0]
    (level,) = re.findall(r'd="M([\d.]+) [^"]*" stroke="#1a1a1a" fill="none" stroke-dasharray', picture.svg)
    assert float(level) == pytest.approx(one[0], abs=0.1)


def test_dots_of_the_stream_rise_with_their_part():
    picture = draw_stream({"ours": [(3e8, 0.25), (6e8, 0.5), (12e8, 1.0)]})
    ((_, low), (_, middle), (_, high)) = next(iter(places(picture)))
    assert low - middle == pytest.approx((middle - high) / 2, abs=0.1)


@pytest.mark.parametrize(
    ("draw", "claim"),
    [
        (lambda: draw_ratios({"a": {"x": 2.0, "y": 0.5}, "b": {"x": 1.2, "y": 1.2}}, "R"),
         "b is 1.20× as fast as R over 2 loads, on none slower"),
        (lambda: draw_ratios({"a": {"x": 9.0}, "b": {"x": 1.2, "y": 0.8}}, "R"),  # a refused y
         "b is 0.98× as fast as R over 2 loads, on 1 slower"),
        (lambda: draw_stream({"a": [(1e6, 0.1), (3e8, 0.9), (4e8, 0.8)], "b": [(1e6, 0.9), (3e8, 0.2), (4e8, 0.2)]}),
         "a comes nearest to the stream: 85% of its rate from 256 MB on, at least 80%"),
        (lambda: draw_stream({"a": [(1e6, 0.1)]}), "a comes nearest to the stream: 10% of its rate on all loads"),
        (lambda: draw_layers({"a": [(1, 50.0), (80, 40.0)], "b": [(1, 90.0), (80, 30.0)]}),
         "a is the cheapest with 1 layer, b with 80; with 1 b costs 3.00× as much as with 80"),
        (lambda: draw_layers({"a": [(1, 50.0), (80, 40.0)], "b": [(1, 90.0), (80, 41.0)], "c": [(1, 8e3), (80, 800.0)],
                              "d": [(1, 90.0), (80, 42.0)]}, most=3),
         "a is the cheapest with 1 layer and with 80; with 1 c costs 10× as much as with 80. "),
        (lambda: draw_layers({"a": [(1, 50.0), (80, 49.0)]}), "a is the cheapest with 1 layer and with 80. "),
        (lambda: draw_growth({"a": [(1, 2.0), (64, 640.0)], "b": [(64, 0.0)]}, {"a": [(1, 1.0)]}),
         "At 64 rows the host plans 640 us for a, and 1 us or less for b"),
        (lambda: draw_ladder({"x": {"a": 100.0, "b": 75.0}, "y": {"a": 100.0, "b": 50.0}}),
         "b is the fastest on 2 of 2 traces, 25% to 50% shorter than a"),
        (lambda: draw_ladder({"x": {"a": 100.0, "b": 175.0}}), "a is the fastest on 1 of 1 trace. "),
        (lambda: draw_machines({"x": {"m": 1.5, "n": 0.8}, "y": {"m": 2.0}}, "R"),
         "Over R: 1.50× to 2.00× on m, 0.80× on n"),
        (lambda: draw_one_row({"a": [(9000, 0.5), (64000, 0.75)], "b": [(64000, 0.9)], "c": [(64000, 0.25)]}),
         "One row alone: a reaches 50% of a plain read with 9,000 tokens, 75% with 64,000; there b 90%, and c 25%. "),
        (lambda: draw_one_row({"a": [(9000, 0.5)], "b": [(64000, 0.9)]}),
         "One row alone: a reaches 50% of a plain read with 9,000 tokens. "),
        (lambda: draw_bounds({"x": {"a": 100.0, "b": 50.0}, "y": {"a": 100.0, "b": 125.0}, "z": {"a": 1.0, "b": 1.0}}),
         "b is faster than a on 1 of 3 loads, 2.00× on x; slower on 1, 0.80× on y. "),
        (lambda: draw_bounds({"x": {"a": 100.0, "b": 100.5}, "y": {"a": 100.0, "b": 99.5}}),
         "b is faster than a on 0 of 2 loads, on none slower by over 1%. "),
        (lambda: draw_charges({"x": {"m": 1.5, "n": 0.8}, "y": {"m": 2.0}}, "R"),
         "Over R: 1.50× to 2.00× with m, 0.80× with n"),
    ],
)  # fmt: skip
def test_claims_follow_the_numbers(draw, claim):
    assert draw().alt.startswith(claim)


def test_layers_that_the_title_names_have_a_curve():
    """Of all engines the cheapest with many layers are drawn, and whatever the title says something of."""
    costs = {f"e{n}": [(1, 90.0 + n), (80, 40.0 + n)] for n in range(9)}
    costs |= {"few": [(1, 50.0), (80, 49.9)], "falls": [(1, 8e3), (80, 400.0)]}
    picture = draw_layers(costs, "A note.", most=5)
    claim = "few is the cheapest with 1 layer, e0 with 80; with 1 falls costs 20× as much as with 80. "
    assert picture.alt.startswith(claim)
    assert "5 of 11 engines: the cheapest with 80 layers, and those named above. A note. " in picture.alt
    names = {text for *_, text in texts(picture)}
    assert {"e0", "e1", "e2", "few", "falls"} <= names
    assert not names & {"e3", "e8"}
    assert draw_layers(costs, "A note.", most=11) == draw_layers(costs, "A note.")


def test_bars_are_as_long_as_their_values():
    picture = draw_machines({"x": {"m": 1.0, "n": 2.0}}, "R")
    widths = [float(w) for w in re.findall(r'data-key="\d+" d="M[\d.]+ [\d.]+h([\d.]+)v', picture.svg)]
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.001)
    assert {"1.00×", "2.00×", "m", "n", "x"} <= {text for *_, text in texts(picture)}


def test_lines_of_one_row_rise_with_their_part():
    picture = draw_one_row({"ours": [(1000, 0.25), (2000, 0.5), (4000, 1.0)]})
    (path,) = re.findall(r'd="M([\d. L]+)" stroke="#0072B2"', picture.svg)
    (x0, y0), (x1, y1), (x2, y2) = (map(float, point.split()) for point in path.split("L"))
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.1)
    assert y0 - y1 == pytest.approx((y1 - y2) / 2, abs=0.1)


def test_marks_keep_apart_and_hold_both_ends():
    points = [(float(x), float(-x)) for x in range(0, 201, 5)]
    kept = thinned(points)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert min(b[0] - a[0] for a, b in itertools.pairwise(kept)) >= APART
    assert len(kept) > 5
    assert thinned(points[:1]) == points[:1]


def test_a_line_of_bounds_ends_left_where_it_loses():
    picture = draw_bounds({"x": {"a": 100.0, "b": 50.0}, "y": {"a": 100.0, "b": 200.0}})
    lines = re.findall(r'd="M([\d.]+) [\d.]+H([\d.]+)" stroke="#0072B2"', picture.svg)
    (level, win), (same, loss) = (map(float, line) for line in lines)
    assert level == same
    assert win - level == pytest.approx(level - loss, abs=0.1)
    assert win > level


def test_of_many_loads_both_ends_are_shown():
    found = draw_bounds({f"load {n}": {"a": 100.0, "b": 50.0 + n} for n in range(90)})
    shown = [text for *_, text in texts(found) if text.startswith("load ")]
    assert len(shown) == MOST_LOADS
    assert (shown[0], shown[-1]) == ("load 0", "load 89")
    assert "Of 90 loads those at both ends." in found.alt


def test_one_row_takes_steps_of_one_row_and_the_usual_shape(tmp_path):
    loads = [load("equal", 1, 1024 * n) for n in (4, 16, 64)]
    others = [load("equal", 8, 262144), load("equal", 1, 262144, replace(SHAPE, head_dim=64))]
    picture = FIGURES["one_row"](read_records([write_records(tmp_path / "a", loads=loads + others)]))

    def part(tokens):
        megabytes = tokens * SHAPE.kv_bytes_per_token / 1e6
        return (4 + 0.24 * megabytes) / (1.05 * (6 + 0.32 * megabytes))  # see ENGINES

    few, many = f"{part(4096):.0%}", f"{part(65536):.0%}"
    assert f"split_kv reaches {few} of a plain read with 4,096 tokens, {many} with 65,536; " in picture.alt


def test_bounds_average_seeds_and_leave_out_what_has_one_row(tmp_path):
    loads = [trace_load("bimodal", rows, seed) for rows in (1, 8) for seed in (20260623, 20260624)]
    records = read_records([write_records(tmp_path / "a", loads=loads)])
    picture = FIGURES["bounds"](records)
    us = {
        stage: sum(records.mean(records.latest()[made.name, stage]) for made in loads[2:]) / 2
        for stage in ("split_kv", "row_local")
    }
    assert " of 1 load, " in picture.alt
    ratio = times_in_words(us["split_kv"] / us["row_local"])
    assert f"bimodal B8: split_kv {us['split_kv']:.0f} us, row_local {ratio}, workqueue " in picture.alt


def test_names_at_the_ends_of_lines_stay_apart_and_in_order():
    ends = [((0.0, y), number, str(number)) for number, y in enumerate([300.0, 299.0, 120.0, 121.0, 122.0, 20.0])]
    found = spread(ends, 20.0, 300.0)
    heights = [height for *_, height in found]
    assert [name for _, _, name, _ in found] == ["5", "2", "3", "4", "1", "0"]
    assert min(b - a for a, b in itertools.pairwise(heights)) >= 14
    assert max(heights) <= 300


def test_ticks_are_round_and_few():
    for least, most in ((0.001, 5000), (0.9, 1.1), (1, 1024), (55, 60), (3, 4)):
        found = Scale(least, most, 0, 100).ticks(7)
        assert len(found) <= 8, (least, most)
        assert all(least <= tick <= most for tick in found)
    assert times_in_words(123.4) == "123×"


@pytest.mark.parametrize(
    ("draw", "error", "words"),
    [
        (lambda: draw_ratios({}, "R"), ValueError, "ratios is empty: pass at least one entry"),
        (lambda: draw_ratios([1], "R"), TypeError, "ratios must be a dict, got list"),
        (lambda: draw_ratios({"a": {}}, "R"), ValueError, "a is empty"),
        (lambda: draw_ratios({"a": {"x": 0.0}}, "R"), ValueError, "ratios['a']['x'] = 0.0 must be above 0, and finite"),
        (lambda: draw_ratios({"a": {"x": "1"}}, "R"), TypeError, "ratios['a']['x'] must be a number, got str"),
        (lambda: draw_stream({"a": [(1, float("inf"))]}), ValueError, "points['a'][0][1] = inf must be above 0"),
        (lambda: draw_stream({"a": [3]}), TypeError, "points['a'][0] = 3 must be a pair of numbers, such as"),
        (lambda: draw_layers({"a": []}), ValueError, "costs['a'] is empty: pass at least one pair"),
        (lambda: draw_growth({"a": [(1, -3.0)]}, {"a": [(1, 1.0)]}), ValueError, "plan_us['a'][0][1] = -3.0 must be"),
        (lambda: draw_growth({"a": [(1, 3.0)]}, {}), ValueError, "workspace is empty"),
        (lambda: draw_ladder({"x": {"a": float("nan")}}), ValueError, "times['x']['a'] = nan must be above 0"),
        (lambda: draw_machines({"x": {}}, "R"), ValueError, "ratios['x'] is empty"),
        (lambda: draw_one_row({}), ValueError, "parts is empty"),
        (lambda: draw_one_row({"a": [(0, 0.5)]}), ValueError, "parts['a'][0][0] = 0 must be above 0"),
        (lambda: draw_bounds({}), ValueError, "times is empty"),
        (lambda: draw_bounds({"x": {"a": 1.0, "b": 0.0}}), ValueError, "times['x']['b'] = 0.0 must be above 0"),
        (lambda: draw_bounds({"x": {"a": 1.0}}), ValueError, "times['x'] has one engine, 'a': pass at least two"),
        (lambda: draw_bounds({"x": {"a": 1.0, "b": 1.0}, "y": {"a": 1.0}}), ValueError, "times['y'] lacks 'b'"),
        (lambda: draw_charges({"x": {"a": 0}}, "R"), ValueError, "ratios['x']['a'] = 0 must be above 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(draw, error, words):
    with pytest.raises(error, match=re.escape(words)):
        draw()


def test_the_map_takes_lengths_from_the_names_and_flashinfer_as_one(tmp_path):
    loads = [
        load(kind, rows, longest) for kind in ("uniform", "bimodal") for rows in (2, 8) for longest in (4096, 16384)
    ]
    file = write_records(tmp_path / "a", run_of(grid_name="full"), loads, {"batch-attention": 0.1, "adaptive": 0.01})
    picture = FIGURES["regimes"](read_records([file]))
    assert picture.alt.startswith("flashinfer is best in 8 of 8 cells. ")
    assert "uniform, 8 rows, longest 4,096: flashinfer ×" in picture.alt
    assert "adaptive" not in picture.alt


def test_layers_keep_to_loads_that_all_curves_have(tmp_path):
    run = run_of()
    write_records(tmp_path / "a", run, grid("smoke")[:5], engines=[name for name in ENGINES if name != "vllm"])
    write_records(tmp_path / "a", run, grid("smoke")[5:])
    picture = FIGURES["layers"](read_records([tmp_path / "a"]))
    assert "Geometric means over 6 loads" in picture.alt
    assert "vllm" not in picture.alt


HOT = ("too fast",)


def with_doubts(path, engine, loads, run):
    """All engines on the loads, and one of them again on the first: twenty times as fast, with a flag."""
    write_records(path, run, loads)
    append(path, [timing_of(loads[0], engine, run.run, 0.05, flags=HOT)], run.run)
    return read_records([path])


@pytest.mark.parametrize(
    ("name", "engine", "of"),
    [
        ("ratios", "workqueue", "paper"), ("stream", "workqueue", "paper"), ("layers", "workqueue", "paper"),
        ("ladder", "workqueue", "paper"), ("regret", "workqueue", "paper"), ("charges", "workqueue", "paper"),
        ("one_row", "split_kv", "paper"), ("bounds", "workqueue", "paper"), ("machines", "workqueue", "paper"),
        ("regimes", "workqueue", "full"), ("growth", "workqueue", "growth"),
    ],
)  # fmt: skip
def test_a_doubtful_time_is_in_no_figure_and_the_note_says_so(name, engine, of, tmp_path):
    loads = list(grid(of)[40:60] if of == "full" else grid(of))
    if of == "paper":
        loads = [trace_load(trace, 8, 20260623) for trace in ("bimodal", "zipf")]
        loads = [*(load("equal", 1, 1024 * n) for n in (4, 8, 16, 64) if name == "one_row"), *loads]
    records = with_doubts(tmp_path / "a", engine, loads, run_of("a", of))
    picture = FIGURES[name](records)
    assert f"Left out as doubtful: {engine} on 1 load." in picture.alt
    others = replace(
        records,
        timings=tuple(timing for timing in records.timings if (timing.load, timing.engine) != (loads[0].name, engine)),
    )
    without = FIGURES[name](others)
    assert picture.alt.replace(f" Left out as doubtful: {engine} on 1 load.", "") == without.alt
    assert "doubtful" not in without.alt


def test_runs_that_differ_are_named_in_a_figure(tmp_path):
    write_records(tmp_path / "a", run_of("a", "paper"), TRACES)
    newer = run_of("b", "paper", commit="ffff", gpu=run_of().gpu | {"driver": "580.1"})
    write_records(tmp_path / "a", newer, TRACES, engines=["workqueue"])
    records = read_records([tmp_path / "a"])
    said = "Of 2 runs, which differ in commit (5b9849f, ffff), driver (None, 580.1)."
    for name in ("ratios", "stream", "layers", "ladder", "regret", "charges", "bounds"):
        assert f"NVIDIA H200, 132 SMs; grid paper. {said}" in FIGURES[name](records).alt, name
    assert f"NVIDIA H200, 132 SMs: {said}" in FIGURES["machines"](records).alt


def test_a_figure_of_doubtful_times_alone_says_what_it_lacks(tmp_path):
    run, made = run_of(), load("bimodal", 8, 16384)
    append(tmp_path / "a", [run, made], run.run)
    append(tmp_path / "a", [timing_of(made, name, flags=HOT) for name in ENGINES], run.run)
    with pytest.raises(Missing, match=r"ratios needs times of .*; left out as doubtful: split_kv on 1 load, "):
        FIGURES["ratios"](read_records([tmp_path / "a"]))


ODD_LOADS = {
    "no rows": (SHAPE, ()),
    "one without a token": (SHAPE, (0,)),
    "three": (SHAPE, (0, 0, 0)),
    "another shape": (replace(SHAPE, head_dim=512), (5, 5)),
}


@pytest.mark.parametrize(
    ("shape", "lengths"),
    [
        pytest.param(*load, id=name, marks=[] if name in ("three", "another shape") else [pytest.mark.slow])
        for name, load in ODD_LOADS.items()
    ],
)
def test_odd_loads_keep_no_figure_from_its_others(shape, lengths, files, tmp_path):
    """Without a token, or in a shape that no stage has: beside usual loads, and alone."""
    names = ("bimodal(7,16k)", "equal(7,1k)", "trace bimodal B8 seed 20260624")
    odd = [Load(name, shape, (Step(lengths),)) for name in names]
    for number, file in enumerate(files):
        records = read_records([file])
        (run,) = records.runs.values()
        both = write_records(tmp_path / f"both {number}", run, [*records.loads.values(), *odd])
        assert of_records([both]).keys() >= of_records([file]).keys()
        of_records([write_records(tmp_path / f"alone {number}", run, odd)])


@pytest.mark.parametrize(
    ("name", "engines", "words"),
    [
        ("ratios", ["workqueue"], "ratios needs times of an engine of FlashInfer's"),
        ("stream", ["workqueue"], "stream needs times of the engine stream"),
        ("layers", ["stream"], "layers needs a load that several engines did"),
        ("regimes", ["workqueue"], "regimes needs loads of several sizes"),
        ("growth", ["workqueue"], "growth needs pkv bench --grid growth"),
        ("ladder", ["workqueue"], "ladder needs split_kv, "),
        ("regret", ["workqueue"], "regret needs split_kv, "),
        ("one_row", ["workqueue"], "one_row needs split_kv and stream"),
        ("bounds", ["split_kv", "row_local"], "bounds needs split_kv and row_local on loads of several rows"),
        ("charges", ["workqueue"], "charges needs workqueue, length_buckets and fa2-tensor-core"),
        ("machines", ["workqueue"], "machines needs workqueue, length_buckets and fa2-tensor-core"),
    ],
)
def test_a_figure_without_its_data_says_what_it_needs(name, engines, words, tmp_path):
    file = write_records(tmp_path / "a", loads=[load("equal", 1, 64)], engines=engines)
    with pytest.raises(Missing, match=re.escape(words)):
        FIGURES[name](read_records([file]))
    with pytest.raises(CommandError, match=re.escape(words)):
        run_plot(file, "--figure", name, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def run_plot(*words):
    parser = argparse.ArgumentParser()
    plot.add_arguments(parser)
    return plot.execute(parser.parse_args([str(word) for word in words]))


def test_plot_writes_the_same_bytes_and_says_what_it_wrote(files, tmp_path, capsys):
    for folder in ("one", "two"):
        assert run_plot(*files[:2], "--out", tmp_path / folder) == 0
    out = capsys.readouterr().out
    written = sorted((tmp_path / "one").iterdir())
    assert len(written) == 19
    for file in written:
        assert f"{file}\n  " in out
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()
    assert "not drawn: growth needs " in out
    assert "not drawn: regimes needs loads of several sizes" in out


def test_plot_one_figure_tables_and_json(files, tmp_path, capsys):
    run_plot(files[0], "--figure", "ladder", "--out", tmp_path, "--json")
    found = json.loads(capsys.readouterr().out)
    (file,) = found["written"]
    assert file == str(tmp_path / "ladder-paper-nvidia-h200-132-sms.svg")
    assert found["missing"] == {}
    run_plot(files[0], "--table", "--out", tmp_path / "none")
    assert "x best of FlashInfer" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()
    with pytest.raises(CommandError, match="--table prints all tables"):
        run_plot(files[0], "--table", "--json")


def test_plot_stays_in_its_folder_and_writes_each_part_once(tmp_path):
    """No name in a record leads elsewhere; two that differ in odd letters only have two files."""
    run = run_of("a", "my_grid", ("../NVIDIA Ä100", 4))
    write_records(tmp_path / "a", run, [load("bimodal", 8, 16384)])
    other = run_of("b", "my-grid", ("NVIDIA  100", 4))
    write_records(tmp_path / "b", other, [load("bimodal", 8, 16384)])
    records = read_records([tmp_path / "a", tmp_path / "b"])
    end = "-my-grid-nvidia-100-4-sms"
    assert list(plot.allowed(records, "stream")) == [end, f"{end}-other"]
    odd = Records({"a": replace(run, grid="/../../../x\ud800")}, records.loads, records.timings[:13])
    assert list(plot.allowed(odd, "stream")) == ["-x-nvidia-100-4-sms"]
    run_plot(tmp_path / "a", tmp_path / "b", "--figure", "stream", "--out", tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [f"stream{end}-other.svg", f"stream{end}.svg"]


def test_plot_says_where_it_cannot_write(files, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandError, match=r"cannot write .*pass --out DIR"):
        run_plot(files[0], "--figure", "ladder", "--out", tmp_path / "file")


def test_plot_names_a_file_that_it_cannot_read(files, tmp_path):
    for words in ((tmp_path / "none",), (files[0], tmp_path / "none", "--table")):
        with pytest.raises(CommandError, match=re.escape(f"cannot read {tmp_path / 'none'}: No such file")):
            run_plot(*words)


def test_pkvs_own_records_are_the_default(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    with pytest.raises(CommandError, match="pkv ships no records: name a file"):
        run_plot("--table")
    (tmp_path / "a.jsonl").write_bytes(files[0].read_bytes())
    run_plot("--table")
    assert "NVIDIA H200, 132 SMs, grid paper" in capsys.readouterr().out


def test_the_regret_picture_says_what_its_times_are(files):
    picture = of_records(files[:1])["regret-paper-nvidia-h200-132-sms"]
    assert "Measured GPU times, planning not counted. " in picture.alt
    assert "NVIDIA H200, 132 SMs; grid paper." in picture.alt
    assert viz.draw_regret([("cost", "zipf", 0.1)]).alt == viz.draw_regret([("cost", "zipf", 0.1)], "").alt


def test_measured_regret_is_told_by_batch_size(files, monkeypatch):
    card, _ = paperfigures.card_of(read_records(files[:1]))
    monkeypatch.setattr(paperfigures, "card_of", lambda records: (card, ()))
    picture = of_records(files[:1])["regret-paper-nvidia-h200-132-sms"]
    assert " over 2 batch sizes; " in picture.alt.split(". ")[0]
    assert {"1 row", "8 rows"} <= {text for *_, text in texts(picture)}


def test_regret_is_judged_by_loads_that_no_cost_was_fitted_to(files, monkeypatch):
    records = read_records(files[:1])
    card, _ = paperfigures.card_of(records)
    fitted = {made.name for made in TRACES if made.n_rows == 1}
    monkeypatch.setattr(paperfigures, "card_of", lambda records: (card, fitted))
    picture = FIGURES["regret"](records)
    assert "Without 3 loads that the costs were fitted to. NVIDIA H200" in picture.alt
    assert {"1 row", "8 rows"} & {text for *_, text in texts(picture)} == {"8 rows"}


def test_regret_says_where_all_loads_were_fitted_to():
    names = [made.name for made in TRACES]
    assert paperfigures.judged_by(TRACES, names) == (TRACES, "The costs were fitted to these loads. ")
    assert paperfigures.judged_by(TRACES, ()) == (TRACES, "")


def test_charges_count_a_plan_for_nobody_one_or_both(tmp_path):
    """By hand: the engines' formula in recordfiles.py, on one row that is one step."""
    made = load("equal", 1, 8192)
    one_row = Load("trace bucketed B1 seed 20260623", made.shape, made.steps, 20260623)
    picture = FIGURES["charges"](read_records([write_records(tmp_path / "a", run_of("a", "paper"), [one_row])]))
    megabytes = made.kv_bytes / 1e6
    ours, theirs = 14 + 0.33 * megabytes, 6 + 0.30 * megabytes
    plan, their_plan = 60 * (1 + 1 / 64), 300 * (1 + 1 / 64)
    wanted = ((theirs + their_plan) / ours, (theirs + their_plan) / (ours + plan), theirs / ours)
    said = zip(wanted, ("its plan alone", "both plans", "no plan"), strict=True)
    claim = ", ".join(f"{times_in_words(ratio)} with {words}" for ratio, words in said)
    assert picture.alt.startswith(f"Over FlashInfer's tensor-core kernel: {claim}. ")
    assert "bucketed B1, length_buckets" in picture.alt

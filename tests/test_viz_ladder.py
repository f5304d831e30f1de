"""What each stage gains: marks and verdicts true to the times, losses and noise like gains, stages that nobody timed.

And the page of four machines, which holds what the command writes.
"""

import dataclasses
import re
from pathlib import Path
from xml.etree import ElementTree

import machinespage
import pytest
import recordfiles
from drawings import SVG, assert_legible
from machinespage import LOADS, page_of
from recordfiles import H200, SLICE, run_of, timing_of, write_records

from pkv.bench.loads.grids import grid, load, trace_load
from pkv.bench.records import fourmachines
from pkv.bench.records.records import append, read_records
from pkv.bench.records.results import results_of
from pkv.bench.records.shipped import shipped_records
from pkv.viz.figures import FIGURES, Missing
from pkv.viz.ladder import LADDER, Gain, claim, counts_of, draw_gains
from pkv.viz.ladderfigures import by_kind, gain_of
from pkv.viz.resultscurves import growth_claim
from pkv.viz.svg import SMALL

ROOT = Path(__file__).resolve().parents[1]
TRACES = [trace_load(name, rows, 20260623) for name in ("bimodal", "zipf", "bucketed") for rows in (1, 4, 8)]
WITHOUT = [name for name in recordfiles.ENGINES if name != "stream_k"]
FAST = ("pkv", 0.25, 5.0, 0.3, 4_000)  # as recordfiles.ENGINES: of a stage that plans nothing


@pytest.fixture(autouse=True)
def with_stream_k(monkeypatch):
    monkeypatch.setitem(recordfiles.ENGINES, "stream_k", FAST)


def recorded(path, loads=TRACES, run=None, engines=None, **options):
    engines = [*WITHOUT, "stream_k"] if engines is None else engines
    return read_records([write_records(path, run or run_of("p", "paper"), loads, engines=engines, **options)])


MANY = {
    f"a load of a long name ({n},128k)": {s: Gain(0.05 * (n + 1) * (k + 1), 0.05) for k, s in enumerate(LADDER)}
    for n in range(24)
}
DRAWN = {
    "one": lambda: draw_gains({"": {"x": {"stream_k": Gain(1.0)}}}, "the rival", "A claim"),
    "many": lambda: draw_gains({"": MANY}, "the rival", "A claim", "A note.", {"mean": {"stream_k": "1.2×"}}),
    "four": lambda: draw_gains(dict.fromkeys(("one card", "two", "a third card", "4"), MANY), "the rival", "A claim"),
    "gaps": lambda: draw_gains({"a": {"x": {"workqueue": Gain(2.0)}}, "b": MANY}, "the rival", "A claim"),
}


def every_picture(tmp_path):
    yield from ((name, draw()) for name, draw in DRAWN.items())
    yield "paper", FIGURES["gains"](recorded(tmp_path / "a"))
    yield "full", FIGURES["gains"](recorded(tmp_path / "b", grid("full")[::3], run_of("f", "full")))
    yield "growth", FIGURES["growth"](recorded(tmp_path / "c", grid("growth")[::2], run_of("g", "growth")))
    yield "before", FIGURES["gains"](recorded(tmp_path / "d", engines=WITHOUT))
    yield "page", page_of(read_records([tmp_path / "a"]))[1]


def test_pictures_are_sound_and_legible(tmp_path):
    for name, picture in every_picture(tmp_path):
        root = ElementTree.fromstring(picture.svg)
        assert root.find(f"{SVG}title").text == picture.alt
        assert len(picture.svg) < 150_000, name
        assert min(map(float, re.findall(r'font-size="([\d.]+)"', picture.svg))) >= SMALL
        assert_legible(picture, name)


def centre_of(picture, colour):
    """Where the marks of a colour lie: the middle of each path's first point and its width."""
    return [float(x) for x in re.findall(rf'd="M([\d.]+) [\d.]+[al][^"]*" fill="{colour}"', picture.svg)]


def test_marks_lie_at_their_ratios():
    """In the colour of the first stage, a circle whose left end is where its path begins."""
    of = {"a": {"split_kv": Gain(0.5)}, "b": {"split_kv": Gain(1.0)}, "c": {"split_kv": Gain(2.0)}}
    picture = draw_gains({"": of}, "R", "A claim")
    loss, same, gain = centre_of(picture, "#0072B2")[:3]
    assert same - loss == pytest.approx(gain - same, abs=0.1)
    assert gain > same


def test_a_loss_is_told_like_a_gain_and_noise_is_neither():
    of = [Gain(1.03, 0.02), Gain(1.015, 0.02), Gain(0.985, 0.02), Gain(0.97, 0.02), Gain(1.0, 0.0)]
    assert [(gain.is_gain, gain.is_loss) for gain in of] == [
        (True, False), (False, False), (False, False), (False, True), (False, False),
    ]  # fmt: skip
    assert counts_of(of) == "faster on 1, slower on 1, within noise on 3"
    found = {"x": {"workqueue": Gain(2.0), "stream_k": Gain(0.5)}, "y": {"workqueue": Gain(2.0)}}
    assert claim(found, "R") == "stream_k is 0.50× as fast as R over 1 load: faster on 0, slower on 1"


def test_gains_are_the_best_rivals_time_over_the_stages(tmp_path):
    made = load("equal", 8, 16384)
    records = recorded(tmp_path / "a", [made], slower={"batch-attention": 0.9, "stream_k": 2.0})
    us = {timing.engine: timing.gpu_us[0] for timing in records.timings if timing.refused is None}
    picture = FIGURES["gains"](records)
    ratio = us["batch-attention"] / us["stream_k"]
    assert us["stream"] < us["batch-attention"] < us["fa2-tensor-core"]
    assert f"stream_k {ratio:.2f}×" in picture.alt
    assert picture.alt.startswith(f"stream_k is {ratio:.2f}× as fast as the best of FlashInfer over 1 load: ")
    assert "the host plans a step: split_kv not at all, length_buckets 68 us" in picture.alt
    assert f"the best of FlashInfer {210 * 1.125:.0f} us" in picture.alt


def test_noise_is_the_larger_of_both(tmp_path):
    records = recorded(tmp_path / "a", TRACES[:1])
    of_load = dict(next(iter(results_of(records).values())))
    of_load["stream_k"] = dataclasses.replace(of_load["stream_k"], noise=0.07)
    assert gain_of(of_load, "stream_k").noise == 0.07
    assert gain_of(of_load, "workqueue").noise == 0.01
    others = {"batch-attention": 0.05, "fa2-cuda-core": 0.2}  # the first is the fastest of FlashInfer's here
    noisy = {name: dataclasses.replace(of_load[name], noise=noise) for name, noise in others.items()}
    assert gain_of(of_load | noisy, "workqueue").noise == 0.05
    assert gain_of(of_load, "stream_k", "fa2-tensor-core").ratio == pytest.approx(
        of_load["fa2-tensor-core"].gpu_us / of_load["stream_k"].gpu_us
    )
    assert gain_of(of_load, "stream_k", "nobody") is None
    assert gain_of(of_load, "nobody") is None


def test_records_without_a_stage_are_drawn_without_it(tmp_path):
    picture = FIGURES["gains"](recorded(tmp_path / "a", engines=WITHOUT))
    assert picture.alt.startswith("workqueue is ")
    assert "stream_k" not in picture.alt
    with pytest.raises(Missing, match=r"gains needs split_kv, .* and an engine of FlashInfer's"):
        FIGURES["gains"](recorded(tmp_path / "b", engines=["workqueue", "stream"]))


def test_doubtful_times_are_left_out_and_that_is_said(tmp_path):
    run, made = run_of(), load("bimodal", 8, 16384)
    append(tmp_path / "a", [run, made, *(timing_of(made, name) for name in WITHOUT)], run.run)
    append(tmp_path / "a", [timing_of(made, "stream_k", flags=("hot",))], run.run)
    picture = FIGURES["gains"](read_records([tmp_path / "a"]))
    assert picture.alt.startswith("workqueue is ")
    assert "Left out as doubtful: stream_k on 1 load." in picture.alt


def test_of_many_loads_kinds_are_drawn():
    found = {f"equal({n},4k)": {"a": Gain(2.0), "b": Gain(0.5)} for n in (1, 2)}
    found |= {"equal(4,4k)": {"a": Gain(9.0)}, "equal(1,64k) head_dim 64": {"a": Gain(3.0, 0.5)}}
    kinds = by_kind(found)
    assert {kind: set(of) for kind, of in kinds.items()} == {"equal, 2 loads": {"a", "b"}, "head_dim 64, 1 load": {"a"}}
    assert [gain.ratio for of in kinds.values() for gain in of.values()] == pytest.approx([2.0, 0.5, 3.0])
    assert kinds["head_dim 64, 1 load"]["a"].noise == 0.5


def test_growth_says_what_stream_k_needs(tmp_path):
    picture = FIGURES["growth"](recorded(tmp_path / "a", grid("growth")[::2], run_of("g", "growth")))
    assert "and 5.1 us for stream_k, whose memory grows 1,024×. " in picture.alt
    records = recorded(tmp_path / "b", grid("growth")[::2], run_of("g", "growth"))
    flat = [
        dataclasses.replace(timing, workspace_bytes=4_000_000) if timing.engine == "stream_k" else timing
        for timing in records.timings
    ]
    picture = FIGURES["growth"](dataclasses.replace(records, timings=tuple(flat)))
    assert "for stream_k, whose memory does not grow. " in picture.alt
    assert "plan and one layer, from idle to idle, us" in picture.svg


def test_growth_is_from_one_row_to_the_most():
    plans = {"stream_k": [(1.0, 1.0), (4.0, 1.0), (1024.0, 1.0)], "workqueue": [(1.0, 300.0), (1024.0, 700.0)]}
    for middle, last, said in ((5e6, 4e6, "does not grow"), (4e6, 8e6, "grows 2.00×")):
        sizes = {"stream_k": [(1.0, 4e6), (4.0, middle), (1024.0, last)]}
        assert growth_claim(plans, sizes).endswith(f"for stream_k, whose memory {said}")


# --- the page of four machines ---


def test_the_page_is_what_the_command_writes():
    page, picture = page_of(shipped_records())
    assert (ROOT / "docs" / "machines.md").read_text() == page, f"run: {machinespage.COMMAND}"
    assert (ROOT / "docs" / "machines.svg").read_text() == picture.svg, f"run: {machinespage.COMMAND}"


@pytest.fixture
def both(tmp_path):
    write_records(tmp_path / "whole", run_of("p", "paper", H200), TRACES, engines=[*WITHOUT, "stream_k"])
    write_records(tmp_path / "slice", run_of("q", "paper", SLICE), TRACES, {"fa2-tensor-core": 2.0}, WITHOUT)
    return read_records([tmp_path / "whole", tmp_path / "slice"])


def test_the_machines_are_four_and_their_ratios_those_of_the_data(both):
    published, simulated, few, many = fourmachines.four_machines(both)
    assert (few.name, many.name) == ("H200, 28 SMs", "H200, 132 SMs")
    assert set(published.ratios) == {"bimodal B8", "uniform B8", "zipf B8", "bucketed B1"}
    assert published.ratios["bimodal B8"]["workqueue"] > published.less_planning["bimodal B8"]["workqueue"] > 1
    assert set(simulated.ratios) == set(LOADS)
    assert all(set(of) == set(fourmachines.STAGES) for of in simulated.ratios.values())
    us = {timing.engine: both.mean(timing) for timing in both.on(28).timings if timing.load == TRACES[2].name}
    assert few.ratios["bimodal B8"]["workqueue"] == pytest.approx(us["fa2-tensor-core"] / us["workqueue"])
    assert "stream_k" not in few.ratios["bimodal B8"]
    assert "stream_k" in many.ratios["bimodal B8"]


def test_the_page_holds_every_ratio_and_says_who_does_best(both):
    page, _ = page_of(both)
    *_, few, many = fourmachines.four_machines(both)
    line = next(line for line in page.splitlines() if line.startswith("| bimodal B8 | workqueue |"))
    assert f"{few.ratios['bimodal B8']['workqueue']:.2f}×" in line
    assert "**H200, 132 SMs**: `stream_k` does best" in page
    assert "**H200, 28 SMs**: `workqueue` does best" in page
    cells = next(line for line in page.splitlines() if line.startswith("| zipf B4 | stream_k |")).split("|")
    assert cells[5].strip() == ""
    assert cells[6].strip() == f"**{many.ratios['zipf B4']['stream_k']:.2f}×**"
    assert max(len(line) for line in page.splitlines() if not line.startswith(("|", "!", "<"))) <= 125

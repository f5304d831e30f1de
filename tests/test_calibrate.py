"""Calibration: costs that are known come back, loads held out only judge, and profiles of the user's own are found."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import pkv
from pkv.bench.fit import calibration, costfit
from pkv.bench.fit.calibration import (
    ENGINES,
    LOADS,
    QUICK_LOADS,
    Calibration,
    best_tile,
    calibrate,
    engines_with,
    plan_as,
    role_of,
)
from pkv.bench.fit.costfit import fit, predicted_us
from pkv.bench.loads.grids import SHAPE, grid, load
from pkv.bench.measuring import live
from pkv.bench.records.records import Records, Run, Timing, append, read_records
from pkv.bench.records.regret import chosen_by, measured_regrets, taken_of
from pkv.bench.records.tiles import as_served, tile_of
from pkv.cards.files import write_own
from pkv.cards.known import gpu_for, load_gpu
from pkv.cli import Parser
from pkv.commands import CommandError
from pkv.commands import calibrate as command
from pkv.kernels.configs import choose_tile
from pkv.plans.gpu import TILES, Costs, GpuProfile
from pkv.plans.plan import Plan
from pkv.stages.s4_adaptive import CANDIDATES, OWN, cheapest, explain

TRUTH = Costs(
    4300, 17, item_us=2.5, launch_us=1, step_us=4, flashinfer_program_gb_per_s=40, flashinfer_item_us=4,
    merge_gb_per_s=40, sm_gb_per_s=100,
)  # fmt: skip
CARD = GpuProfile("card", 90, 132)
BARE = (*CANDIDATES, "row_local:splits=4")
FEW = (
    load("equal", 1, 4096), load("equal", 1, 65536), load("bimodal", 4, 16384), load("bimodal", 8, 16384),
    load("one_long", 40, 16384), load("short", 16),
)  # fmt: skip
OWN_FILE = {"title": "NVIDIA H200", "arch": 90, "n_sms": 132, "costs": dataclasses.asdict(TRUTH), "tile": 32}


def run_on(n_sms=132, title="NVIDIA H200", run="r1"):
    gpu = {"title": title, "arch": 90, "n_sms": n_sms}
    return Run(run, "calibration", "2026-11-29T00:00:00Z", gpu, {"triton": "3.7"}, "abc", False, 3.0, {})


def records_of(loads=FEW, engines=BARE, card=CARD, noise=0.01, of_tile=None):
    """What a card with TRUTH for costs would have measured; of_tile: {tile: times as long}, as settings say."""
    rng = np.random.default_rng(0)
    timings = []
    for each in loads:
        for engine in engines:
            plans = [plan_as(engine, step.lengths, each, card) for step in each.steps]
            factor = of_tile[plans[0].tile] if of_tile and plans[0].stage in OWN else 1.0
            us = tuple(predicted_us(plan, TRUTH) * np.exp(rng.normal(0, noise)) * factor for plan in plans)
            zeros = (0.0,) * len(us)
            settings = {"tile": plans[0].tile} if of_tile else {}
            timings.append(
                Timing("r1", each.name, engine, "pkv", zeros, us, us, us, zeros, zeros, noise=0.01, settings=settings)
            )  # fmt: skip
    return Records({"r1": run_on()}, {each.name: each for each in loads}, tuple(timings))


@pytest.fixture(scope="module")
def records() -> Records:
    return records_of()


@pytest.fixture(scope="module")
def found(records) -> Calibration:
    return calibrate(records, CARD)


@pytest.fixture
def fitted(records, found, monkeypatch) -> None:
    """The command finds what `found` is, without another fit: a test that takes this proves what is done with it."""

    def same(asked, card):
        assert asked.timings == records.timings, "other times want a fit"
        return dataclasses.replace(found, profile=dataclasses.replace(found.profile, name=card.name))

    monkeypatch.setattr(command, "calibrate", same)


# --- the fit


def test_costs_that_are_known_come_back(found):
    exact = calibrate(records_of(noise=0), CARD).profile.costs
    for name, value in dataclasses.asdict(TRUTH).items():
        if value and not name.endswith("_us"):
            is_weak = name in ("merge_gb_per_s", "sm_gb_per_s")  # little of a time depends on them
            assert getattr(exact, name) == pytest.approx(value, rel=0.2 if is_weak else 0.01), name
            rel = 0.2 if is_weak else 0.02
            assert getattr(found.profile.costs, name) == pytest.approx(value, rel=rel), f"{name}, times 1% off"
    # two launches, their start-ups and a step are hard to tell apart where most plans have two launches
    for costs, rel in ((exact, 0.03), (found.profile.costs, 0.1)):
        fixed = [2 * each.launch_us + 2 * each.item_us + each.step_us for each in (costs, TRUTH)]
        assert fixed[0] == pytest.approx(fixed[1], rel=rel)
        assert costs.item_us == pytest.approx(2.5, rel=0.3)
    assert found.profile.name == "card"


@pytest.mark.slow
def test_where_a_fit_ends_is_not_decided_by_rounding(monkeypatch):
    """Times, and where the fit begins, moved as another processor's sums move them, and far more.

    Of rows like these, row_local deals programs whose slots come out even.
    """
    ragged = (
        [61520, 8768, 3968, 2864], [61518, 8766, 3966, 2862, 34542, 2942, 3534, 2910],
        [61540, 3988, 2884, 34564, 3556, 35651, 9459, 7923], [61551, 3999, 34575, 3567, 9470, 7934, 7614, 6093],
    )  # fmt: skip
    rng, begin = np.random.default_rng(0), costfit.start_of
    plans = [plan_as(stage, lengths, FEW[0], CARD) for lengths in (*ragged, [8192], [4000]) for stage in CANDIDATES]
    timed = [(plan, predicted_us(plan, TRUTH) * np.exp(rng.normal(0, 0.02))) for plan in plans]
    found = dataclasses.asdict(fit(timed))

    def nudged(value):
        return value * (1 + 1e-9 * rng.normal())

    monkeypatch.setattr(costfit, "start_of", lambda timed: {name: nudged(v) for name, v in begin(timed).items()})
    again = dataclasses.asdict(fit([(plan, nudged(us)) for plan, us in timed]))
    assert again.pop("programs_per_sm") is found.pop("programs_per_sm") is None
    assert again == pytest.approx(found, rel=2e-4), "4 digits are stored"


def test_what_one_sm_reads_shows_where_sms_are_few():
    """Four splits of a row on 28 SMs: 32 programs, so four SMs have two, and are the last to end."""
    slow_sm = dataclasses.replace(TRUTH, sm_gb_per_s=20.0)
    few = GpuProfile("few", 90, 28)
    plans = [plan_as(f"{stage}:splits={n}", [length] * rows, FEW[0], few)
             for stage in ("row_local", "workqueue") for n in (2, 4, 5, 9) for length, rows in ((8192, 1), (65536, 2), (4000, 5))]  # fmt: skip # noqa: E501
    fitted = fit([(plan, predicted_us(plan, slow_sm)) for plan in plans])
    assert fitted.sm_gb_per_s == pytest.approx(20, rel=0.01)
    assert fitted.program_gb_per_s == pytest.approx(17, rel=0.01)


def test_loads_held_out_are_predicted_though_nothing_was_fitted_to_them(records, found):
    held_out, fitted = found.loads("held out"), found.loads("fit")
    assert len(held_out) == 2
    assert len(fitted) == 4
    assert found.errors()["held out"]["median"] <= 0.03
    assert found.errors()["fit"] == {
        "rows": 4 * len(BARE),
        "median": round(float(np.median([abs(r.error) for r in found.residuals if r.role == "fit"])), 4),
        "worst": round(max(abs(r.error) for r in found.residuals if r.role == "fit"), 4),
    }
    moved = tuple(
        dataclasses.replace(t, gpu_us=tuple(3 * us for us in t.gpu_us)) if t.load in held_out else t
        for t in records.timings
    )
    again = calibrate(dataclasses.replace(records, timings=moved), CARD)
    assert again.profile == found.profile
    assert again.errors()["held out"]["median"] == pytest.approx(2 / 3, abs=0.05)


@pytest.mark.slow  # a fit of its own; test_a_gpu_is_measured fits without FlashInfer, too
def test_without_flashinfer_its_costs_are_left_out():
    own = [engine for engine in BARE if engine != "flashinfer"]
    costs = calibrate(records_of(engines=own), CARD).profile.costs
    assert costs.flashinfer_program_gb_per_s is None
    assert costs.flashinfer_item_us is None
    assert costs.program_gb_per_s == pytest.approx(17, rel=0.1)


def test_too_few_times_are_refused(records):
    few = dataclasses.replace(records, timings=records.timings[:6])
    with pytest.raises(ValueError, match=r"6 times of pkv's stages are too few to fit 9 costs: measure more loads"):
        calibrate(few, CARD)
    stopped = tuple(dataclasses.replace(t, gpu_us=(float("inf"),)) for t in records.timings)
    with pytest.raises(ValueError, match="a GPU time must be a finite number of us"):
        calibrate(dataclasses.replace(records, timings=stopped), CARD)


def test_engines_that_are_no_stages_are_left_out(records):
    other = dataclasses.replace(records.timings[0], engine="vllm", gpu_us=(1e6,))
    refused = dataclasses.replace(records.timings[1], gpu_us=(), refused="too large")
    rows = calibration.rows_of(dataclasses.replace(records, timings=(*records.timings, other, refused)), CARD)
    assert len(rows) == len(records.timings) - 1
    assert "vllm" not in {row.engine for row in rows}


# --- roles


def test_roles_are_chosen_before_any_time_is_looked_at():
    roles = role_of(grid("paper"))
    assert {role for name, role in roles.items() if name.endswith("20260623")} == {"fit"}
    assert {role for name, role in roles.items() if not name.endswith("20260623")} == {"held out"}
    for loads in (LOADS, QUICK_LOADS):
        roles = role_of(loads)
        assert role_of(reversed(loads)) == roles
        ordered = sorted(loads, key=lambda each: each.kv_bytes)
        assert [roles[each.name] for each in ordered[:4]] == ["fit", "held out", "fit", "fit"]
        assert list(roles.values()).count("held out") == round(len(loads) / 3)


def test_of_a_loads_many_steps_three_are_fitted_and_all_judge():
    made = next(each for each in grid("paper") if each.name == "trace bimodal B8 seed 20260623")
    assert len(made.steps) > 3
    rows = calibration.rows_of(records_of([made], ["row_local"]), CARD)
    assert sum(row.fitted for row in rows) == 3
    assert len(rows) == len(made.steps)
    profile = dataclasses.replace(CARD, costs=TRUTH)
    (residual,) = calibration.residuals_of(rows, profile)
    weights = [step.weight for step in made.steps]
    assert residual.measured_us == pytest.approx(np.average([row.us for row in rows], weights=weights))


# --- the tile


def test_another_tile_is_taken_only_where_it_gains_more_than_the_noise():
    faster = {"workqueue:tile=32": 0.95, "row_local:tile=32": 0.97, "workqueue:tile=64": 1.5, "row_local:tile=64": 1.5}
    loads = FEW[:2]
    usual = {f"{stage}:tile={tile}": stage for stage in calibration.TILED for tile in (32, 64)}

    def times(factors):
        made = records_of(loads, ["workqueue", "row_local"], noise=0)
        tiled = [
            dataclasses.replace(t, engine=engine, gpu_us=tuple(us * factors[engine] for us in t.gpu_us))
            for t in made.timings
            for engine, stage in usual.items()
            if t.engine == stage
        ]
        return dataclasses.replace(made, timings=(*made.timings, *tiled))

    tile, ratios, noise = best_tile(times(faster))
    assert (tile, noise) == (32, 0.01)
    assert ratios == pytest.approx({16: 1.0, 32: (0.95 * 0.97) ** 0.5, 64: 1.5})
    assert best_tile(times(faster | {"workqueue:tile=32": 1.02}))[0] == 16, "a gain of 0.5%, the noise is 1%"
    assert best_tile(records_of(loads, ["workqueue"]))[:2] == (16, {16: 1.0})


GAIN_OF_32 = {16: 1.0, 32: 0.9, 64: 0.95}


@pytest.mark.parametrize(
    ("loads", "before"),
    [
        pytest.param(QUICK_LOADS, 64, id="quick-64"),
        *(pytest.param(QUICK_LOADS, tile, marks=pytest.mark.slow, id=f"quick-{tile}") for tile in TILES if tile != 64),
        pytest.param(LOADS, 32, marks=pytest.mark.slow, id="all-32"),
    ],
)
def test_calibrating_again_finds_the_same_whatever_tile_the_profile_has_by_then(loads, before):
    """What is timed names its tile, in two sweeps; there are times enough of the best one to fit, --quick too."""
    card = dataclasses.replace(CARD, tile=before)
    first = records_of(loads, ENGINES, card, 0, GAIN_OF_32)
    assert best_tile(first)[:2] == (32, pytest.approx(GAIN_OF_32, rel=0.04))  # plans of other tiles are cut otherwise
    second = records_of(loads, engines_with(32), card, 0, GAIN_OF_32)
    both = dataclasses.replace(first, timings=first.timings + second.timings)
    found = calibrate(both, CARD)
    assert found.profile.tile == 32
    assert {residual.engine for residual in found.residuals} == {
        "flashinfer", "row_local:tile=32", "workqueue:tile=32", *engines_with(32),
    }  # fmt: skip
    assert found.errors()["fit"]["median"] <= 0.02
    assert found.profile.costs.program_gb_per_s == pytest.approx(17 / 0.9, rel=0.05)
    served = as_served(both, 32)
    judged = {route for route, *_ in measured_regrets(served, found.profile, found.loads("held out"))}
    assert judged >= {f"always {stage}" for stage in CANDIDATES}


def test_a_bare_name_means_the_tile_that_its_record_says():
    wide = dataclasses.replace(CARD, tile=32)
    engines = (*CANDIDATES, "row_local:tile=16", "workqueue:tile=16", "row_local:tile=64", "workqueue:tile=64")
    made = records_of(FEW, engines, wide, 0, GAIN_OF_32)
    assert best_tile(made)[:2] == (32, pytest.approx(GAIN_OF_32, rel=0.05))
    found = calibrate(made, CARD)
    assert {residual.engine for residual in found.residuals} == set(CANDIDATES)
    assert found.profile.costs.program_gb_per_s == pytest.approx(17 / 0.9, rel=0.05)
    bare = {t.load: t.gpu_us for t in as_served(made, 16).timings if t.engine == "row_local"}
    assert bare == {t.load: t.gpu_us for t in made.timings if t.engine == "row_local:tile=16"}
    timing = dataclasses.replace(made.timings[0], engine="row_local", settings={"tile": 48})
    for wrong in (timing, dataclasses.replace(timing, settings={"tile": "16"})):
        with pytest.raises(
            ValueError, match=rf"row_local on {re.escape(timing.load)}: its tile = .* must be one of 16"
        ):
            tile_of(wrong)


def test_plans_take_the_profiles_tile_where_its_kernels_are_those_it_was_found_with():
    wide = GpuProfile("wide", 90, 132, tile=32)
    for stage in OWN:
        made = pkv.plan([900, 40], SHAPE, stage=stage, gpu=wide)
        assert made.tile == 32
        assert made.validate() is made
        assert Plan.from_json(made.to_json()) == made
        assert pkv.plan([900, 40], SHAPE, stage=stage, gpu=wide, tile=16).tile == 16
    for shape in (pkv.Shape(32, 8, 256, 16, "float16"), pkv.Shape(32, 8, 128, 16, "float32"), pkv.Shape(64, 2, 128, 16, "float16")):  # fmt: skip # noqa: E501
        assert choose_tile(None, shape, wide) == 16
    assert pkv.plan([900, 40], SHAPE, stage="row_local", gpu=wide, dynamic=True).tile == 32
    with pytest.raises(ValueError, match="tile = 48 must be one of 16, 32, 64"):
        GpuProfile("odd", 90, 132, tile=48)


def test_a_plan_written_before_profiles_had_tiles_is_read():
    made = json.loads(pkv.plan([900, 40], SHAPE, stage="row_local", gpu=CARD).to_json())
    del made["gpu"]["tile"]
    assert Plan.from_json(json.dumps(made)).gpu == CARD


# --- regret by measured times


def test_measured_regret_of_a_choice_is_its_time_over_the_best(records):
    profile = dataclasses.replace(CARD, costs=TRUTH)
    found = {(route, group): (mean, worst) for route, group, mean, worst in measured_regrets(records, profile, [FEW[3].name])}  # fmt: skip # noqa: E501
    times = {t.engine: t.gpu_us[0] for t in records.timings if t.load == FEW[3].name and ":" not in t.engine}
    assert len(found) == 2 + len(CANDIDATES)
    for (route, _), (mean, worst) in found.items():
        kind, name = route.split()
        stage = name if kind == "always" else chosen_by(name, [FEW[3]], profile, list(times))[FEW[3].name, 0]
        assert mean == worst == pytest.approx(times[stage] / min(times.values()) - 1)
    assert min(mean for mean, _ in found.values()) == 0


def test_the_papers_policy_is_timed_with_the_papers_splits_where_it_was():
    """On records where the engine `adaptive` takes half of the queue's time, nothing else is without regret."""
    profile = dataclasses.replace(CARD, costs=TRUTH)
    made = records_of(FEW[2:4], CANDIDATES)
    own = [
        dataclasses.replace(timing, engine="adaptive", gpu_us=tuple(us / 2 for us in timing.gpu_us))
        for timing in made.timings
        if timing.engine == "workqueue"
    ]
    both = dataclasses.replace(made, timings=made.timings + tuple(own))
    names = [each.name for each in FEW]
    regrets = {(route, group): mean for route, group, mean, _ in measured_regrets(both, profile, names)}
    assert {route for (route, _), mean in regrets.items() if mean == 0} == {"policy paper"}
    assert regrets["always workqueue", FEW[3].name] == pytest.approx(1.0)
    without = {(route, group): mean for route, group, mean, _ in measured_regrets(made, profile, names)}
    assert without["policy paper", FEW[3].name] == without["always workqueue", FEW[3].name]


def test_records_older_than_a_stage_are_judged_by_the_stages_that_they_hold():
    """Policy cost then takes the cheapest of those, though it would take the new one, here ahead by 3% and more."""
    profile = dataclasses.replace(CARD, costs=TRUTH)
    made = records_of(FEW[1:3], [stage for stage in CANDIDATES if stage != "stream_k"])
    routes = {route for route, *_ in measured_regrets(made, profile, [each.name for each in FEW])}
    assert routes == {
        "policy paper",
        "policy cost",
        *(f"always {stage}" for stage in CANDIDATES if stage != "stream_k"),
    }
    for each in FEW[1:3]:
        found = explain(each.steps[0].lengths, each.shape, policy="cost", gpu=profile)
        ms = {entry.stage: entry.prediction.kernels_ms for entry in found.candidates}
        assert taken_of(found, CANDIDATES) == found.chosen == "stream_k"
        del ms["stream_k"]
        assert taken_of(found, list(ms)) == cheapest(ms)
    with_some = records_of(FEW[1:2], CANDIDATES)
    both = dataclasses.replace(made, timings=made.timings + with_some.timings)
    judged = {group for _, group, *_ in measured_regrets(both, profile, [each.name for each in FEW])}
    assert judged == {FEW[1].name}, "on the other load the new stage was not timed"


def test_policies_take_their_fallback_where_flashinfer_was_not_timed():
    own = [engine for engine in CANDIDATES if engine != "flashinfer"]
    profile = dataclasses.replace(CARD, costs=TRUTH)
    made = records_of(FEW[2:4], own)
    assert {route for route, *_ in measured_regrets(made, profile, [each.name for each in FEW])} == {
        "policy paper", "policy cost", *(f"always {stage}" for stage in own),
    }  # fmt: skip
    assert set(chosen_by("paper", FEW[2:3], profile, own).values()) == {"workqueue"}
    assert measured_regrets(records_of(FEW[:1], own[:2]), profile, [FEW[0].name]) == []


# --- the command


def execute(*words):
    parser = Parser(prog="pkv calibrate")
    command.add_arguments(parser)
    return command.execute(parser.parse_args([str(word) for word in words]))


@pytest.fixture
def file(tmp_path, records):
    path = tmp_path / "times.jsonl"
    append(path, [*records.runs.values(), *records.loads.values(), *records.timings], "r1")
    assert read_records([path]).timings == records.timings
    return path


def test_from_records_to_a_profile_that_is_used(cache, file, capsys, found):
    write_own("nvidia-h200-132-sms", OWN_FILE)  # an older one, which this process has taken already
    assert gpu_for("NVIDIA H200", 90, 132).tile == 32
    assert execute("--from", file) == 0
    printed = capsys.readouterr().out
    stored = cache / "gpus" / "nvidia-h200-132-sms.json"
    assert str(stored) in printed
    profile = gpu_for("NVIDIA H200", 90, 132)
    assert profile == dataclasses.replace(found.profile, name="nvidia-h200-132-sms")
    for name, (unit, _) in command.MEANINGS.items():
        value = getattr(profile.costs, name)
        if value is not None:
            assert any(line.split()[:3] == [name, f"{value:g}", unit] for line in printed.splitlines()), name
    assert "tile 16: no other was timed" in printed
    for residual in found.residuals:
        assert any(
            line.startswith(f"{residual.load}, {residual.engine} ") and line.endswith(f"{residual.error:+.1%}  {residual.role.rjust(8)}")  # noqa: E501
            for line in printed.splitlines()
        )  # fmt: skip
    assert f"held out: {2 * len(BARE)} times, median error" in printed
    assert "policy cost" in printed
    assert pkv.explain([9000, 100], SHAPE, policy="cost", gpu=profile.name).gpu == profile
    fields = json.loads(stored.read_text())
    assert fields["schema"] == 1
    assert fields["costs_source"]["times"] == "times.jsonl"
    assert fields["costs_source"]["fitted_loads"] == found.loads("fit")
    assert fields["costs_source"]["errors"] == found.errors()


def test_json_holds_all_of_it(cache, file, capsys, found, fitted):
    assert execute("--from", file, "--json", "--name", "mine") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["file"] == str(cache / "gpus" / "mine.json")
    assert len(told["residuals"]) == len(found.residuals)
    assert told["not_measured"] == list(found.not_measured)
    assert told["costs"] == {k: v for k, v in dataclasses.asdict(found.profile.costs).items() if v is not None}
    assert {entry["route"] for entry in told["regret"]} >= {"policy cost", "policy paper"}


def test_a_profile_says_the_command_as_it_was_typed_without_folders_of_this_machine(
    cache, file, fitted, monkeypatch, capsys
):
    def said(*words):
        assert execute(*words, "--json") == 0
        source = json.loads(capsys.readouterr().out)["costs_source"]
        return source["command"], source["times"]

    assert said("--from", file) == ("pkv calibrate --from times.jsonl", "times.jsonl")
    monkeypatch.chdir(file.parent.parent)
    near = Path(file.parent.name) / file.name
    out = Path("of a card.json")
    assert said("--from", near, "--name", "mine", "--out", out) == (
        f"pkv calibrate --from {near} --out 'of a card.json' --name mine", str(near)
    )  # fmt: skip


def test_out_keeps_what_a_shipped_profile_says(cache, file, tmp_path, capsys, found, fitted):
    out = tmp_path / "h200.json"
    before = json.loads((Path(pkv.__file__).parent / "data" / "gpus" / "h200.json").read_text())
    out.write_text(json.dumps(before | {"costs": {"old": 1}, "tile": 64}))
    assert execute("--from", file, "--out", out) == 0
    after = json.loads(out.read_text())
    kept = ("title", "arch", "n_sms", "nominal_gb_per_s", "nominal_fp16_tflop_per_s", "source")
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert Costs(**after["costs"]) == found.profile.costs
    assert after["tile"] == 16
    assert after["costs_source"]["command"] == "pkv calibrate --from times.jsonl --out h200.json"
    assert not (cache / "gpus").exists()
    text = out.read_text()
    assert execute("--from", file, "--out", out) == 0
    assert out.read_text() == text, "the same records give the same profile"


def test_what_cannot_be_calibrated_is_one_line(cache, file, tmp_path, records):
    cases = {
        (): "calibrate measures a GPU, and there is none here: take times from records with --from FILE",
        ("--from", tmp_path / "none.jsonl"): "cannot read",
        ("--from", file, "--name", "../x"): "name = '../x' must be small letters",
        ("--from", file, "--name", "h200"): "--name h200 ships with pkv, and yours would hide it: choose another",
        ("--from", file, "--quick"): "--quick says how to measure, and --from takes times that were measured",
    }
    other = tmp_path / "h100.json"
    other.write_text(json.dumps({"title": "NVIDIA H100", "arch": 90, "n_sms": 114}))
    cases["--from", file, "--out", other] = "is of a card of arch 90 with 114 SMs"
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    cases["--from", file, "--out", broken] = "is no profile"
    cases["--from", file, "--out", tmp_path / "no" / "folder.json"] = "cannot write to"
    both = tmp_path / "both.jsonl"
    append(both, [*records.runs.values(), *records.loads.values(), *records.timings], "r1")
    append(both, [run_on(28, run="r2")], "r2")
    cases["--from", both] = "times of 2 cards (NVIDIA H200 with 132 SMs, NVIDIA H200 with 28 SMs): a profile is of one"
    few = tmp_path / "few.jsonl"
    append(few, [*records.runs.values(), *records.loads.values(), *records.timings[:3]], "r1")
    cases["--from", few] = "cannot calibrate: 3 times of pkv's stages are too few"
    for words, message in cases.items():
        with pytest.raises(CommandError) as raised:
            execute(*words)
        assert message in str(raised.value)
        assert "\n" not in str(raised.value)
    assert not (cache / "gpus").exists()


@pytest.mark.parametrize("title", ["NVIDIA \u00c4100", "GPU (engineering sample)", "\u5361"])
def test_a_card_of_any_title_gets_a_profile(cache, tmp_path, records, fitted, title):
    path = tmp_path / "odd.jsonl"
    odd = dataclasses.replace(run_on(), gpu={"title": title, "arch": 90, "n_sms": 132})
    append(path, [odd, *records.loads.values(), *records.timings], "r1")
    assert execute("--from", path) == 0
    (stored,) = (cache / "gpus").iterdir()
    name = {"N": "nvidia-100-132-sms", "G": "gpu-engineering-sample-132-sms"}.get(title[0], "gpu-132-sms")
    assert stored.name == f"{name}.json"
    assert gpu_for(title, 90, 132) == load_gpu(name)


def test_the_command_that_is_printed_can_be_typed(cache, file, fitted, tmp_path, capsys):
    """Of a file with spaces in its name, and of one whose name is a shipped profile's."""
    for out, name in ((tmp_path / "Out Dir (x).json", "out-dir-x"), (tmp_path / "h200.json", "my-h200")):
        times = file.rename(tmp_path / f"times of {name}.jsonl")
        assert execute("--from", times, "--out", out) == 0
        words = shlex.split(capsys.readouterr().out.splitlines()[-1].partition(": ")[2])
        assert words == ["pkv", "calibrate", "--from", str(times), "--name", name]
        assert execute(*words[2:]) == 0
        assert load_gpu(name).costs is not None
        capsys.readouterr()
        file = times


@pytest.mark.slow
def test_a_cost_that_no_time_depends_on_is_not_said_to_be_measured():
    """Rows that are never split: nothing merges, so no time can tell what merging costs."""
    loads = [load("short", rows) for rows in (16, 24, 32, 48, 64, 96, 128, 192)]
    made = records_of(
        loads, ["row_local:splits=1", "split_kv:splits=1", "workqueue:splits=1", "length_buckets:splits=1"]
    )
    found = calibrate(made, CARD)
    assert "merge_gb_per_s" in found.not_measured
    assert "program_gb_per_s" not in found.not_measured
    lines = {line.split()[0]: line for line in command.as_text(found, []).splitlines() if line.strip()}
    for name in command.MEANINGS:
        if name in lines:
            assert (", but no time here depends on it" in lines[name]) == (name in found.not_measured)


def test_what_is_wrong_with_out_or_name_shows_before_anything_is_measured(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "measured", lambda quick: pytest.fail("it measured"))
    broken = tmp_path / "broken.json"
    broken.write_text("[]")
    for words in (["--name", "A B"], ["--name", "h200"], ["--out", broken], ["--out", tmp_path / "no" / "x.json"]):
        with pytest.raises(CommandError):
            execute(*words)


@pytest.mark.parametrize("with_flashinfer", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_gpu_is_measured(cache, monkeypatch, capsys, with_flashinfer):
    """The sweep is a stand-in, all that follows is not."""
    asked = []

    def sweep(todo, device, on_load):
        asked.append(todo)
        measured = records_of(FEW, [engine.name for engine in todo.engines], of_tile=GAIN_OF_32)
        for each in FEW:
            on_load(each.name)
            timings = tuple(
                dataclasses.replace(t, gpu_us=(), refused="no nvcc")
                if t.engine == "flashinfer" and not with_flashinfer
                else t
                for t in measured.timings
                if t.load == each.name
            )
            yield (
                run_on(),
                each,
                SimpleNamespace(timings=timings, wrong={"row_local": "off by 1"} if each == FEW[0] else {}),
            )

    monkeypatch.setattr(command, "sweep", sweep)
    monkeypatch.setattr(command, "QUICK_LOADS", FEW)
    monkeypatch.setattr(live, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert execute("--quick") == 0
    said = capsys.readouterr()
    assert asked[0].loads == FEW
    assert asked[0].rounds == calibration.QUICK_ROUNDS
    assert [[engine.name for engine in todo.engines] for todo in asked] == [list(ENGINES), list(engines_with(32))]
    assert "row_local is left out: off by 1" in said.err
    assert "always split_kv" in said.out
    assert ("without FlashInfer's costs: no nvcc" in said.err) == (not with_flashinfer)
    assert ("flashinfer_item_us " in said.out) == with_flashinfer
    stored = json.loads((cache / "gpus" / "nvidia-h200-132-sms.json").read_text())
    assert stored["tile"] == 32
    assert stored["costs_source"]["times"] == command.MEASURED_HERE
    assert stored["costs_source"]["command"] == "pkv calibrate --quick"

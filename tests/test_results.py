"""What is derived from records can be done by hand; tables and comparisons say what they left out."""

import argparse
import json
import re

import pytest
from recordfiles import ENGINES, H200, OLD, SLICE, refusal_of, run_of, timing_of, write_records

from pkv.bench.loads import published
from pkv.bench.loads.grids import Load, Step, grid, load, trace_load
from pkv.bench.records import beside
from pkv.bench.records.records import Records, append, read_records
from pkv.bench.records.results import (
    differing,
    flagged,
    geomean,
    group_of,
    grouped,
    machine_of,
    of_stream,
    over,
    over_flashinfer,
    parts,
    refusals,
    results_of,
    sound,
)
from pkv.bench.records.summaries import always, measured_regret, summaries
from pkv.cards import files as profiles
from pkv.cards.files import read_shipped
from pkv.cards.known import forget_profiles
from pkv.commands import CommandError, compare
from pkv.commands.sides import Side
from pkv.commands.tables import as_table, over_all, published_beside

PLAIN = load("bimodal", 8, 16384)
TRACES = [trace_load("bimodal", 8, seed) for seed in (20260623, 20260624, 20260625)]


def timed(path, times, run=None, made=PLAIN, **changes):
    """Records of one load: {engine: (plan us, gpu us)}, given for each of its steps alike."""
    run = run or run_of()
    n_steps = len(made.steps)
    timings = [
        timing_of(made, engine, run.run, plan_us=(plan,) * n_steps, gpu_us=(gpu,) * n_steps, **changes)
        for engine, (plan, gpu) in times.items()
    ]
    append(path, [run, made, *timings], run.run)
    return read_records([path])


BY_HAND = {
    "row_local": (0.0, 80.0),
    "fa2-tensor-core": (320.0, 88.0),
    "batch-attention": (100.0, 100.0),
    "stream": (0.0, 60.0),
    "vllm": (0.0, 160.0),
}


def test_ratios_by_hand(tmp_path):
    of_load = results_of(timed(tmp_path / "a", BY_HAND))[PLAIN.name]
    assert over_flashinfer(of_load, "row_local") == 88 / 80
    assert over_flashinfer(of_load, "row_local", 1) == 200 / 80  # with its plan batch-attention is FlashInfer's best
    assert over_flashinfer(of_load, "row_local", 80) == (88 + 4) / 80
    assert over_flashinfer(of_load, "batch-attention") == 0.88
    assert over(of_load, "row_local", ["batch-attention"]) == 100 / 80
    assert of_stream(of_load, "row_local") == 0.75
    assert over(of_load, "xqa", ["stream"]) is None
    assert over(of_load, "vllm", ["xqa"]) is None
    assert of_load["fa2-tensor-core"].layer_us(8) == 128
    assert of_load["row_local"].gb_per_s == pytest.approx(PLAIN.kv_bytes / 80 / 1e3)


def test_one_load_is_a_line_for_each_engine(tmp_path):
    lines = as_table(timed(tmp_path / "a", BY_HAND)).splitlines()
    assert lines[0] == "NVIDIA H200, 132 SMs, grid smoke"
    found = {line.split()[0]: line.split()[1:] for line in lines[4:]}
    assert list(found) == ["stream", "row_local", "fa2-tensor-core", "batch-attention", "vllm"]
    assert found["fa2-tensor-core"][0:2] == ["320.0", "88.0"]
    assert found["fa2-tensor-core"][-4:] == ["408.0", "128.0", "98.0", "92.0"]
    assert found["row_local"][3:5] == ["1.10", "75%"]
    assert found["stream"][3] == "-"


def test_geometric_means_leave_out_what_is_not_known():
    assert geomean([1.0, 4.0, None]) == 2.0
    assert geomean([None]) is None


def test_a_summary_counts_the_loads_that_an_engine_did(tmp_path):
    other = load("equal", 1, 4096)
    timed(tmp_path / "a", BY_HAND)
    timed(tmp_path / "a", {"row_local": (0.0, 10.0), "fa2-tensor-core": (20.0, 5.0)}, made=other)
    append(tmp_path / "a", [refusal_of(other, "batch-attention", "too short")], "one")
    records = read_records([tmp_path / "a"])
    found = {made.engine: made for made in summaries(results_of(records))}
    assert "stream" not in found
    ours = found["row_local"]
    assert ours.n_loads == 2
    assert ours.over_best == pytest.approx((88 / 80 * 5 / 10) ** 0.5)
    assert ours.worst == (0.5, other.name)
    assert ours.layers[1] == pytest.approx((200 / 80 * 25 / 10) ** 0.5)
    assert ours.over_each == {
        "fa2-tensor-core": pytest.approx((1.1 * 0.5) ** 0.5), "batch-attention": pytest.approx(1.25)
    }  # fmt: skip
    assert ours.stream == 0.75
    assert found["batch-attention"].n_loads == 1
    assert refusals(records) == {"batch-attention": {"too short": [other.name]}}
    text = as_table(records)
    assert f"batch-attention left out on {other.name}: too short" in text


HOT = ("reads 9000 GB/s, above the card's 4800: some of it came from a cache",)


def with_a_doubt(path, engine, gpu_us=40.0):
    """BY_HAND, and a doubtful time of one engine."""
    timed(path, BY_HAND)
    return timed(path, {engine: (0.0, gpu_us)}, flags=HOT)


def test_a_doubtful_rival_is_not_the_best_of_flashinfer(tmp_path):
    of_load = results_of(with_a_doubt(tmp_path / "a", "fa2-tensor-core"))[PLAIN.name]
    assert of_load["fa2-tensor-core"].flags == HOT
    assert over_flashinfer(of_load, "row_local") == 100 / 80  # batch-attention's
    assert over_flashinfer(of_load, "fa2-tensor-core") is None
    assert over(of_load, "row_local", ["fa2-tensor-core"]) is None
    of_load = results_of(with_a_doubt(tmp_path / "b", "stream", 60.0))[PLAIN.name]
    assert of_stream(of_load, "row_local") is None


def test_tables_print_flags_and_make_no_ratio_of_them(tmp_path):
    records = with_a_doubt(tmp_path / "a", "row_local")
    assert flagged(records) == {"row_local": {HOT[0]: [PLAIN.name]}}
    text = as_table(records)
    line = next(line for line in text.splitlines() if line.startswith("row_local "))
    assert [*line.split()[2:3], *line.split()[4:6]] == ["40.0", "-", "-"]
    said = f"row_local is doubtful on bimodal(8,16k): {HOT[0]}\nno ratio is made of a doubtful time"
    assert text.endswith(said)
    other = load("equal", 1, 4096)
    records = timed(tmp_path / "a", {"row_local": (0.0, 10.0), "fa2-tensor-core": (20.0, 5.0)}, made=other)
    (ours,) = (made for made in summaries(results_of(records)) if made.engine == "row_local")
    assert (ours.n_loads, ours.over_best, ours.worst) == (1, 0.5, (0.5, other.name))
    text = as_table(records)
    assert said in text
    lines = [line.split()[1:3] for line in text.splitlines() if line.startswith("row_local ")]
    assert ["40.0", "10.0"] in lines
    assert ["-", "0.50"] in lines


def test_a_mean_over_seeds_has_the_doubts_of_all(tmp_path):
    for made, flags in zip(TRACES, ((), HOT, HOT), strict=True):
        timed(tmp_path / "a", {"workqueue": (0.0, 100.0)}, made=made, flags=flags)
        timed(tmp_path / "a", {"fa2-tensor-core": (0.0, 200.0)}, made=made)
    records = read_records([tmp_path / "a"])
    of_group = grouped(results_of(records))["bimodal B8"]
    assert of_group["workqueue"].flags == HOT
    assert over_flashinfer(of_group, "workqueue") is None
    line = re.search(r"^bimodal B8 workqueue .*", as_table(records), re.MULTILINE)[0]
    assert line.split()[-1] == "-"


def test_what_is_sound_is_told_by_the_last_time_of_a_machine_and_grid(tmp_path):
    records = with_a_doubt(tmp_path / "a", "row_local")
    kept = sound(records)
    assert "row_local" not in results_of(kept)[PLAIN.name], "nor the sound time before it"
    assert len(kept.timings) == len(BY_HAND) - 1
    assert [(timing.engine, timing.flags) for timing in kept.doubtful] == [("row_local", HOT)]
    both = timed(tmp_path / "a", {"row_local": (0.0, 500.0)}, run_of("two", machine=SLICE))
    assert [timing.run for timing in sound(both).timings if timing.engine == "row_local"] == ["two"]
    assert sound(timed(tmp_path / "b", BY_HAND)) == timed(tmp_path / "c", BY_HAND)


def test_a_time_of_0_makes_no_ratio(tmp_path):
    records = timed(tmp_path / "a", BY_HAND)
    none = Records(
        records.runs, records.loads, tuple(timing_of(PLAIN, name, gpu_us=(0.0,)) for name in BY_HAND)
    )  # no file holds it
    of_load = results_of(records)[PLAIN.name] | {
        "fa2-tensor-core": results_of(none)[PLAIN.name]["fa2-tensor-core"],
        "vllm": results_of(none)[PLAIN.name]["vllm"],
    }
    assert over_flashinfer(of_load, "row_local") == 100 / 80
    assert over_flashinfer(of_load, "vllm") is None
    assert over(of_load, "row_local", ["vllm"]) is None
    a, b = (Side(name, of, (of,)) for name, of in (("A", records), ("B", none)))
    changes, alone, skipped = compare.changes_of(a, b)
    assert not changes
    assert alone == {"A": [], "B": []}
    assert skipped == [f"bimodal(8,16k) {name} (B: a time of 0)" for name in BY_HAND]


def test_runs_that_differ_are_named_above_a_table(tmp_path):
    records = timed(tmp_path / "a", BY_HAND)
    assert differing(records) == ""
    gpu = run_of().gpu | {"driver": "580.1", "power_limit_w": 500.0}
    versions = run_of().versions | {"torch": "9"}
    newer = run_of("two", commit="ffff", changed=True, versions=versions, gpu=gpu)
    records = timed(tmp_path / "a", {"row_local": (0.0, 50.0)}, newer)
    said = (
        "Of 2 runs, which differ in commit (ffff with changes, 5b9849f), driver (580.1, None), "
        "power limit (500.0, None), torch (9, 2.11.0)."
    )
    assert differing(records) == said
    assert as_table(records).splitlines()[:3] == ["NVIDIA H200, 132 SMs, grid smoke", said, ""]
    records = timed(tmp_path / "a", BY_HAND, newer)
    assert differing(records) == "", "times of the first run no longer count"


def test_a_profile_of_the_users_own_changes_no_published_time(tmp_path, monkeypatch):
    rows = [row for row in published.published() if row.log == "seed_20260623_bimodal_b8.txt"]
    beside._simulated_ms.cache_clear()
    before = [beside._simulated_ms(row.configuration) for row in rows]
    monkeypatch.setenv("PKV_CACHE", str(tmp_path))
    fields = read_shipped(published.GPU)
    profiles.write_own(published.GPU, fields | {"costs": fields["costs"] | {"memory_gb_per_s": 1.0}})
    forget_profiles()
    beside._simulated_ms.cache_clear()
    try:
        assert [beside._simulated_ms(row.configuration) for row in rows] == before
        assert rows
    finally:
        beside._simulated_ms.cache_clear()
        forget_profiles()


def test_an_engine_that_refuses_after_all_has_no_time(tmp_path):
    timed(tmp_path / "a", BY_HAND)
    append(tmp_path / "a", [refusal_of(PLAIN, "vllm", "gone")], "one")
    records = read_records([tmp_path / "a"])
    assert "vllm" not in results_of(records)[PLAIN.name]
    assert refusals(records) == {"vllm": {"gone": [PLAIN.name]}}


def test_machines_are_never_mixed(tmp_path):
    timed(tmp_path / "a", BY_HAND)
    records = timed(tmp_path / "a", {"row_local": (0.0, 500.0)}, run_of("two", machine=SLICE))
    with pytest.raises(ValueError, match="records are of 2 machines"):
        results_of(records)
    found = {key: results_of(part) for key, part in parts(records).items()}
    assert found["NVIDIA H200, 132 SMs", "smoke"][PLAIN.name]["row_local"].gpu_us == 80
    assert found["NVIDIA H200, 28 SMs", "smoke"][PLAIN.name]["row_local"].gpu_us == 500
    assert as_table(records).count("grid smoke") == 2
    assert machine_of(run_of(machine=OLD)) == "NVIDIA GeForce RTX 3060, 28 SMs"


def test_seeds_are_averaged_only_where_an_engine_did_all(tmp_path):
    for number, made in enumerate(TRACES):
        times = {"workqueue": (9.0, 100.0 + 10 * number), "fa2-tensor-core": (0.0, 120.0)}
        timed(tmp_path / "a", times if number else times | {"vllm": (0.0, 70.0)}, made=made)
    (group,) = grouped(results_of(read_records([tmp_path / "a"]))).items()
    assert group[0] == "bimodal B8"
    assert set(group[1]) == {"workqueue", "fa2-tensor-core"}
    assert group[1]["workqueue"].gpu_us == pytest.approx(110)
    assert group_of("uniform(8,16k) page 1 seed 3") == "uniform(8,16k) page 1"


def test_the_published_times_of_the_same_seeds_stand_beside(tmp_path):
    for made in TRACES:  # the third seed was never published
        timed(tmp_path / "a", {"workqueue": (0.0, 100.0 + made.seed % 10), "fa2-tensor-core": (0.0, 200.0)}, made=made)
    results = results_of(read_records([tmp_path / "a"]))
    groups, times = published_beside(results)
    assert groups["bimodal B8"]["workqueue"].gpu_us == pytest.approx(103.5)
    rows = [
        row.gpu_ms
        for row in published.published()
        if re.fullmatch(r"seed_2026062[34]_bimodal_b8.txt", row.log) and row.configuration.engine == "workqueue"
    ]
    assert len(rows) == 2
    assert times["bimodal B8", "workqueue"][0] == pytest.approx(sum(rows) / 2)
    assert times["bimodal B8", "workqueue"][1] == pytest.approx(sum(rows) / 2, rel=0.12)
    text = as_table(read_records([tmp_path / "a"]))
    (line,) = (line for line in text.splitlines() if line.startswith("bimodal B8 workqueue"))
    assert line.split()[3] == f"{sum(rows) / 2:.3f}"
    assert line.split()[-1] == f"{200 / 103.5:.2f}"


def test_many_loads_are_put_together_by_their_kind(tmp_path):
    records = read_records([write_records(tmp_path / "a", run_of(grid_name="full"))])
    text = as_table(records)
    assert re.search(r"^engine +equal +bimodal +uniform +zipf +one_long +short$", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("name", ["smoke", "paper", "growth"])
def test_tables_fit_a_terminal_and_hold_every_load(name, tmp_path):
    text = as_table(read_records([write_records(tmp_path / "a", run_of(grid_name=name))]))
    assert max(map(len, text.splitlines())) <= 120
    for group in {group_of(made.name) for made in grid(name)}:
        assert group in text
    assert "xqa left out on " in text


def test_a_table_of_some_loads(tmp_path):
    records = read_records([write_records(tmp_path / "a")])
    assert "bimodal(8,16k), us" in as_table(records, [PLAIN.name])
    with pytest.raises(ValueError, match="records hold no timing of these loads"):
        as_table(records, ["other"])


def test_regret_by_hand(tmp_path):
    made = Load("trace two B2 seed 1", PLAIN.shape, (Step((16, 32), 3), Step((64, 80), 1)))
    times = {"row_local": (100.0, 50.0), "workqueue": (80.0, 60.0), "split_kv": (40.0, 90.0)}
    timings = [timing_of(made, name, plan_us=(0.0, 0.0), gpu_us=gpu) for name, gpu in times.items()]
    append(tmp_path / "a", [run_of(), made, *timings], "one")
    records = read_records([tmp_path / "a"])
    choices = {
        "always workqueue": always(made, "workqueue"),
        "best of two": {(made.name, 0): "workqueue", (made.name, 1): "row_local"},
    }
    found = {route: (mean, worst) for route, _, mean, worst in measured_regret(records, choices, ["row_local"])}
    assert found == {"always workqueue": (pytest.approx(0.05), pytest.approx(0.2)), "best of two": (0.0, 0.0)}
    found = {route: values for route, *values in measured_regret(records, choices, ["split_kv"])}
    assert found["best of two"] == ["two B2", pytest.approx(0.75), pytest.approx(1.0)]
    some = {"a": {(made.name, 1): "row_local"}, "b": always(made, "workqueue")}
    assert measured_regret(records, some, [])[1][2:] == (pytest.approx(0.2), pytest.approx(0.2))
    with pytest.raises(ValueError, match="choices take xqa on trace two B2 seed 1, which was not timed"):
        measured_regret(records, {"a": always(made, "xqa")}, [])


def run_command(command, *words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.execute(parser.parse_args([str(word) for word in words]))


@pytest.mark.parametrize(
    ("noise", "factor", "verdict"),
    [(0.02, 1.05, "slower"), (0.02, 0.95, "faster"), (0.02, 1.03, "within noise"), (0.02, 0.97, "within noise"),
     (0.0, 1.001, "slower"), (None, 1.5, "noise not known")],
)  # fmt: skip
def test_a_change_beyond_the_noise_of_both(noise, factor, verdict, tmp_path, capsys):
    timed(tmp_path / "a", {"vllm": (0.0, 100.0)}, noise=0.02 if noise is None else noise)
    timed(tmp_path / "b", {"vllm": (0.0, 100.0 * factor)}, noise=noise)
    assert run_command(compare, tmp_path / "a", tmp_path / "b", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    (change,) = found["changes"]
    assert change["verdict"] == verdict
    assert change["ratio"] == pytest.approx(factor)
    assert found["summary"][verdict] == 1
    assert found["differences"] == []


def test_compare_says_what_differs_and_what_only_one_has(tmp_path, capsys):
    timed(tmp_path / "a", {"vllm": (0.0, 100.0), "row_local": (0.0, 50.0)})
    newer = run_of(
        "two", machine=OLD, commit="fffffff", versions=run_of().versions | {"triton": "3.7.1", "sglang": "1"}
    )
    timed(tmp_path / "b", {"vllm": (0.0, 200.0), "workqueue": (0.0, 50.0)}, newer)
    append(tmp_path / "b", [refusal_of(PLAIN, "row_local", "no GPU", "two")], "two")
    assert run_command(compare, tmp_path / "a", tmp_path / "b") == 0
    out = capsys.readouterr().out
    assert out.startswith("GPU differs: NVIDIA H200 with 132 SMs in A, NVIDIA GeForce RTX 3060 with 28 SMs in B\n")
    assert "commit differs: 5b9849f in A, fffffff in B" in out
    assert "version of triton differs: 3.6.0 in A, 3.7.1 in B" in out
    assert "version of sglang differs: None in A, 1 in B" in out
    assert re.search(r"^bimodal\(8,16k\), vllm +100.0 +200.0 +2.000 +2.0%  slower$", out, re.MULTILINE)
    assert "of 1 in both: 1 slower; GPU time B / A, geometric mean: 2.000" in out
    assert "only in A: bimodal(8,16k) row_local (B: no GPU)" in out
    assert "only in B: bimodal(8,16k) workqueue" in out


def test_compare_shows_the_rarer_direction_and_not_every_lonely_engine(tmp_path, capsys):
    changes = [compare.Change("m", f"load {n}", "vllm", 100.0, 200.0 if n else 98.0, 0.01) for n in range(60)]
    text = compare.as_text(changes)
    assert re.search(r"^load 0, vllm .* 0.980 .* faster$", text, re.MULTILINE), "59 larger ones do not crowd it out"
    assert text.endswith("... and 20 more, in --json")
    unknown = compare.as_text([compare.Change("m", "load", "vllm", 100.0, 50.0, None)])
    assert re.search(r"^load, vllm +100.0 +50.0 +0.500 +-  noise not known$", unknown, re.MULTILINE)
    write_records(tmp_path / "a", loads=grid("smoke"))
    write_records(tmp_path / "b", loads=grid("smoke"), engines=["vllm"])
    assert run_command(compare, tmp_path / "a", tmp_path / "b") == 0
    n_alone = 6 * (len(ENGINES) - 1)
    assert f", and {n_alone - 6} more, in --json" in capsys.readouterr().out


def test_the_summary_has_the_three_times_apart(tmp_path):
    records = timed(tmp_path / "a", {"vllm": (30.0, 100.0), "row_local": (5.0, 50.0)})
    found = {summary.engine: summary for summary in summaries(results_of(records))}
    assert (found["vllm"].plan_us, found["vllm"].gpu_us) == (30.0, 100.0)
    wall_us = results_of(records)[PLAIN.name]["vllm"].wall_us
    assert found["vllm"].wall_us == wall_us > 0
    assert re.search(rf"^vllm +1 +100.0 +30.0 +{wall_us:.1f} ", over_all(list(found.values())), re.MULTILINE)


def test_the_summary_of_doubtful_times_has_dashes(tmp_path):
    records = timed(tmp_path / "a", {"vllm": (30.0, 100.0)}, flags=("doubtful",))
    (line,) = over_all(summaries(results_of(records))).splitlines()[1:]
    assert line.split()[:5] == ["vllm", "0", "-", "-", "-"]


def test_compare_lists_what_it_does_not_compare(tmp_path, capsys):
    timed(tmp_path / "a", BY_HAND)
    with_a_doubt(tmp_path / "b", "vllm", 1.0)
    run_command(compare, tmp_path / "a", tmp_path / "b", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["not_compared"] == [f"bimodal(8,16k) vllm (B: {HOT[0]})"]
    assert "vllm" not in {change["engine"] for change in found["changes"]}
    assert found["summary"]["faster"] == 0
    run_command(compare, tmp_path / "b", tmp_path / "a")
    out = capsys.readouterr().out
    assert "of 4 in both: 4 within noise" in out
    assert f"\nnot compared: bimodal(8,16k) vllm (A: {HOT[0]})" in out


def test_compare_matches_machines_by_name_where_there_are_several(tmp_path, capsys):
    for name, factor in (("a", 1.0), ("b", 2.0)):
        timed(tmp_path / name, {"vllm": (0.0, 100.0)}, run_of(f"{name}1", machine=H200))
        timed(tmp_path / name, {"vllm": (0.0, 300.0 * factor)}, run_of(f"{name}2", machine=SLICE))
    run_command(compare, tmp_path / "a", tmp_path / "b", "--json")
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert [(change["machine"], change["ratio"]) for change in changes] == [
        ("NVIDIA H200, 132 SMs", 1.0), ("NVIDIA H200, 28 SMs", 2.0)
    ]  # fmt: skip


def test_a_load_that_changed_is_not_compared(tmp_path, capsys):
    timed(tmp_path / "a", BY_HAND)
    timed(tmp_path / "b", BY_HAND, made=Load(PLAIN.name, PLAIN.shape, (Step((5,)),)))
    run_command(compare, tmp_path / "a", tmp_path / "b")
    out = capsys.readouterr().out
    assert "load bimodal(8,16k) has other steps or another shape in B: it is not compared" in out
    assert "the files have no load and engine in common" in out


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot read"), ("", "no timing in"), ("{}\n", "has no schema number"), ('{"schema": 9}\n', "in schema 9")],
)
def test_a_bad_file_is_one_line_that_names_it(content, words, tmp_path):
    good, bad = write_records(tmp_path / "good", loads=[PLAIN]), tmp_path / "bad"
    if content is not None:
        bad.write_text(content)
    for files in ((good, bad), (bad, good)):
        with pytest.raises(CommandError, match=re.escape(str(bad))) as found:
            run_command(compare, *files)
        assert words in str(found.value)
        assert "\n" not in str(found.value)


def test_compare_writes_nothing(tmp_path, capsys):
    files = [write_records(tmp_path / name, loads=[PLAIN]) for name in "ab"]
    before = [file.read_bytes() for file in files]
    run_command(compare, *files)
    assert "of 12 in both: 12 within noise; GPU time B / A, geometric mean: 1.000" in capsys.readouterr().out
    assert [file.read_bytes() for file in files] == before
    assert len(list(tmp_path.iterdir())) == 2

"""Records survive a killed sweep, refuse what they cannot hold, and say which line they cannot read."""

import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from recordfiles import SLICE, refusal_of, run_of, timing_of, write_records

import pkv
from pkv.bench.loads.grids import Load, Step, load, trace_load
from pkv.bench.measuring.sweep import end_last_line
from pkv.bench.records import records
from pkv.bench.records.records import RecordError, Run, Timing, append, read_records

ROOT = Path(__file__).resolve().parents[1]
TRACE = trace_load("bimodal", 8, 20260623)
PLAIN = load("bimodal", 8, 16384)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    "run", [run_of(), run_of(commit=None, changed=True, settings={}, cpu="", platform="")], ids=["full", "bare"]
)
def test_what_is_written_is_read_again(run, tmp_path):
    file = tmp_path / "a.jsonl"
    one, other = (
        timing_of(TRACE, "workqueue"),
        timing_of(TRACE, "vllm", noise=None, flags=("hot",), settings={"a": [1]}),
    )
    refused = refusal_of(PLAIN, "xqa", "needs pages of 32 tokens")
    append(file, [run], run.run)
    append(file, [TRACE, one, other], run.run)
    append(file, [PLAIN, refused], run.run)
    found = read_records([file])
    assert found.runs == {run.run: run}
    assert found.loads == {TRACE.name: TRACE, PLAIN.name: PLAIN}
    assert found.timings == (one, other, refused)


def test_the_mean_of_a_trace_weighs_its_steps(tmp_path):
    made = Load("two", PLAIN.shape, (Step((16, 32), 3), Step((64,), 1)))
    append(tmp_path / "a", [run_of(), made, timing_of(made, "stream", gpu_us=(10.0, 30.0))], "one")
    found = read_records([tmp_path / "a"])
    assert found.mean(found.timings[0]) == 15.0


def test_the_latest_timing_counts_and_machines_are_told_apart(tmp_path):
    write_records(tmp_path / "a", loads=[PLAIN])
    write_records(tmp_path / "b", run_of("two", machine=SLICE), loads=[PLAIN], slower={"workqueue": 2.0})
    found = read_records([tmp_path / "a", tmp_path / "b"])
    assert found.latest()[PLAIN.name, "workqueue"].run == "two"
    assert {timing.run for timing in found.on(132).timings} == {"one"}
    assert found.on(28).latest()[PLAIN.name, "xqa"].refused == "needs pages of 32 tokens"
    assert not found.on(7).timings


def test_a_killed_sweep_loses_the_line_that_it_wrote_and_no_other(tmp_path):
    file = write_records(tmp_path / "a", loads=[PLAIN])
    whole = file.read_bytes()
    complete = read_records([file])
    for cut in (1, 40, len(whole.splitlines()[-1])):
        file.write_bytes(whole[:-cut])
        found = read_records([file])
        assert found.timings == complete.timings[:-1]
        with pytest.raises(RecordError, match="ends within a line: `pkv bench --resume`"):
            append(file, [complete.timings[-1]], "one")
        end_last_line(file)
        if cut > 1:  # a line that only lacks its end is kept
            append(file, [complete.timings[-1]], "one")
        assert file.read_bytes() == whole
    end_last_line(file)
    assert file.read_bytes() == whole


def test_appending_keeps_what_is_there(tmp_path):
    file = write_records(tmp_path / "a", loads=[PLAIN])
    before = file.read_bytes()
    append(file, [timing_of(PLAIN, "vllm")], "one")
    assert file.read_bytes().startswith(before)
    assert file.read_bytes().count(b"\n") == before.count(b"\n") + 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"plan_us": (math.nan,)},
            "plan_us[0] = nan must be a number, 0 or more (of 'vllm' on 'bimodal(8,16k)')",
        ),
        ({"gpu_us": (math.nan,)}, "gpu_us[0] = nan must be a number above 0"),
        ({"gpu_us": (0.0,)}, "gpu_us[0] = 0.0 must be a number above 0, from 1e-06 on: a time of 0 is no time"),
        ({"plan_us": (math.inf,)}, "plan_us[0] = inf must be at most"),
        ({"wall_us": (-1.0,)}, "wall_us[0] = -1.0 must be"),
        ({"gpu_us_p5": (np.float32(3),)}, "gpu_us_p5[0] = "),
        ({"noise": math.nan}, "noise = nan must be"),
        ({"max_err": math.inf}, "max_err = inf must be"),
        ({"workspace_bytes": True}, "workspace_bytes = True must be"),
        ({"settings": {"best": math.nan}}, "not JSON compliant"),
        ({"family": 3}, "family = 3 must be text"),
        ({"flags": "hot"}, "flags = 'hot' must be a list"),
    ],
)
def test_what_is_no_number_is_never_written(change, words, tmp_path):
    file = tmp_path / "a"
    with pytest.raises(ValueError, match=re.escape(words)):
        append(file, [run_of(), PLAIN, timing_of(PLAIN, "vllm", **change)], "one")
    assert not file.exists()


def changed_line(tmp_path, number, change):
    """A good file of which one line is changed; `change` gets its entry and gives another, or a text."""
    file = write_records(tmp_path / "a", loads=[PLAIN])
    lines = file.read_text().splitlines()
    made = change(json.loads(lines[number]))
    lines[number] = made if isinstance(made, str) else json.dumps(made)
    file.write_text("\n".join(lines) + "\n")
    return file


def without(*names):
    return lambda entry: {name: value for name, value in entry.items() if name not in names}


@pytest.mark.parametrize(
    ("number", "change", "words"),
    [
        (
            0,
            lambda e: e | {"schema": 2},
            "line 1 is written in schema 2, and this pkv reads up to 1: update pkv to read",
        ),
        (3, lambda e: e | {"schema": 99}, "line 4 is written in schema 99"),
        (0, lambda e: e | {"schema": 0}, "line 1 has no schema number"),
        (0, lambda e: e | {"schema": True}, "line 1 has no schema number"),
        (0, without("schema"), "line 1 has no schema number: records come from `pkv bench --record FILE`"),
        (2, lambda e: [1], "line 3 has no schema number"),
        (2, lambda e: '{"schema": 1, "kind": ', "line 3 is not JSON (Expecting value)"),
        (2, lambda e: "", "line 3 is not JSON"),
        (2, lambda e: json.dumps(e).replace("[0.0]", "[NaN]"), "line 3 is not JSON (NaN is no number)"),
        (1, lambda e: e | {"kind": "lad"}, "line 2: kind = 'lad' must be one of run, load, time"),
        (0, without("grid"), "line 1: field 'grid' is missing; docs/records.md lists the fields"),
        (0, lambda e: e | {"gpu": {"title": "x"}}, "line 1: field 'gpu.n_sms' is missing"),
        (
            0,
            lambda e: e | {"gpu": {"title": "x", "n_sms": "28"}},
            "line 1: gpu.n_sms = '28' must be a whole number, 1 or more",
        ),
        (1, without("steps"), "line 2: field 'steps' is missing"),
        (1, lambda e: e | {"shape": {"n_q_heads": 3}}, "line 2: field 'shape.n_kv_heads' is missing"),
        (2, lambda e: e | {"run": "two"}, "line 3: run 'two' or load 'bimodal(8,16k)' has no line before this one"),
        (2, lambda e: e | {"load": "other"}, "line 3: run 'one' or load 'other' has no line before"),
        (2, lambda e: e | {"gpu_us": []}, "line 3: gpu_us must have 1 entry, one per step of the load"),
        (2, lambda e: e | {"gpu_us": [1.0, 2.0]}, "line 3: gpu_us must have 1 entry"),
        (2, lambda e: e | {"gpu_us": ["7"]}, "line 3: gpu_us[0] = '7' must be a number"),
        (2, lambda e: e | {"noise": -1}, "line 3: noise = -1 must be a number, 0 or more (of 'split_kv' on"),
        (2, lambda e: e | {"gpu_us": [0]}, "line 3: gpu_us[0] = 0 must be a number above 0"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(number, change, words, tmp_path):
    with pytest.raises(RecordError, match=re.escape(words)) as found:
        read_records([changed_line(tmp_path, number, change)])
    assert str(tmp_path / "a") in str(found.value)
    assert "\n" not in str(found.value)


ODD = [None, True, -1, 0, 1e308, 1e-320, 3.5, "x", [], {}, [1], {"a": 1}, "\ud800", "a\nb", "", 10**400]
# by number of the line: a path to each field, and the odd values that it may hold
FITS = {
    0: {
        "run": ["x"], "grid": ["x"], "date": ["x", "\ud800", "a\nb", ""], "gpu": [], "gpu.title": ["x"], "gpu.arch": [],
        "gpu.n_sms": [], "gpu.peak_gb_per_s": [None, 0, 1e-320, 3.5], "gpu.memory_gb": [None, 0, 1e-320, 3.5],
        "versions": [{}], "versions.torch": [None, "x", "\ud800", "a\nb", ""],
        "commit": [None, "x", "\ud800", "a\nb", ""], "changed": [True], "floor_us": [0, 1e-320, 3.5],
        "settings": [{}, {"a": 1}], "cpu": ["x", "\ud800", "a\nb", ""],
    },
    1: {
        "load": ["x"], "seed": [0], "shape": [], "shape.head_dim": [], "shape.dtype": [], "steps": [], "steps.0": [],
        "steps.0.lengths": [[], [1]], "steps.0.lengths.0": [0], "steps.0.weight": [],
    },
    2: {
        "run": ["x"], "load": ["x"], "engine": ["x"], "family": ["x", "\ud800", "a\nb", ""], "gpu_us": [[1]],
        "gpu_us.0": [3.5], "gpu_us_p5.0": [0, 1e-320, 3.5], "plan_us.0": [0, 1e-320, 3.5], "wall_us": [[1]],
        "noise": [None, 0, 1e-320, 3.5], "workspace_bytes": [None, 0], "flags": [[]], "settings": [{}, {"a": 1}],
        "refused": [None, "x", "\ud800", "a\nb", ""],
    },
}  # fmt: skip


@pytest.mark.parametrize(("number", "path"), [(number, path) for number, of in FITS.items() for path in of])
def test_a_field_of_a_wrong_type_is_named(number, path, tmp_path):
    """By file, line and field, in one line: nothing of it gets further."""
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for odd in ODD:

        def change(entry, odd=odd):
            inner = entry
            for part in parents:
                inner = inner[part]
            inner[last] = odd
            return entry

        file = changed_line(tmp_path, number, change)
        try:
            read_records([file])
            refusal = ""
        except RecordError as error:
            refusal = str(error)
        file.unlink()
        fits = any(type(odd) is type(fit) and odd == fit for fit in FITS[number][path])
        if fits and path in ("run", "load"):
            assert not refusal or "has no line before this one" in refusal
        elif fits:
            assert not refusal, (odd, refusal)
        else:
            named = path.split(".")[0] if last != "dtype" else "(shape.)?dtype"
            assert re.search(rf"{file}, line {number + 1}: (field ')?{named}\b", refusal), (odd, refusal)
            assert "\n" not in refusal
            assert len(refusal) < 400


def test_a_grid_is_no_path(tmp_path):
    words = "line 1: grid = '/../../x' must be small letters, digits, '_' and '-'"
    with pytest.raises(RecordError, match=re.escape(words)):
        read_records([changed_line(tmp_path, 0, lambda entry: entry | {"grid": "/../../x"})])
    with pytest.raises(ValueError, match="grid = 'a/b' must be"):
        append(tmp_path / "b", [run_of(grid_name="a/b")], "one")


def test_a_field_of_a_later_version_is_passed_over(tmp_path):
    for number, change in (
        (2, lambda entry: entry | {"energy_mj": [3.0]}),
        (1, lambda entry: entry | {"shape": entry["shape"] | {"sink": "x"}}),
    ):
        file = changed_line(tmp_path, number, change)
        assert read_records([file]) == read_records([write_records(tmp_path / "b", loads=[PLAIN])])
        file.unlink()
        (tmp_path / "b").unlink()


def test_a_field_that_has_its_default_may_be_left_out(tmp_path):
    def change(entry):
        del entry["seed"], entry["shape"]["kv_dtype"], entry["steps"][0]["weight"]
        return entry

    assert read_records([changed_line(tmp_path, 1, change)]).loads == {PLAIN.name: PLAIN}


def test_one_name_is_one_load_and_one_run(tmp_path):
    file = write_records(tmp_path / "a", loads=[PLAIN])
    other = replace(PLAIN, steps=(Step((5, 5)),))
    with pytest.raises(RecordError, match=re.escape("load 'bimodal(8,16k)' has other steps or another shape")):
        read_records([file, write_records(tmp_path / "b", run_of("two"), loads=[other])])
    with pytest.raises(RecordError, match="run 'one' was described otherwise before"):
        read_records([file, write_records(tmp_path / "c", run_of(commit="other"), loads=[PLAIN])])
    assert len(read_records([file, file]).runs) == 1


@pytest.mark.parametrize("kind", ["missing", "folder", "bytes"])
def test_a_file_that_cannot_be_read_is_named(kind, tmp_path):
    file = tmp_path / "a"
    if kind == "folder":
        file.mkdir()
    elif kind == "bytes":
        file.write_bytes(b"\xff\xfe\n")
    with pytest.raises(RecordError, match=re.escape(f"cannot read {file}: ")):
        read_records([file])


def test_an_empty_file_holds_nothing(tmp_path):
    (tmp_path / "a").write_text("")
    assert read_records([tmp_path / "a"]) == records.Records({}, {}, ())


def test_the_schema_is_documented_field_by_field():
    text = (ROOT / "docs" / "records.md").read_text()
    assert f"schema {records.SCHEMA}" in text
    known = {field.name for kind in (Run, Timing) for field in fields(kind)}
    known |= {"schema", "kind", "seed", "shape", "steps", "lengths", "weight"}
    missing = sorted(name for name in known if f"| `{name}` |" not in text)
    assert not missing
    documented = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert documented <= known | {"title", "arch", "n_sms"}


def test_the_document_reads_a_file_as_it_says(tmp_path, monkeypatch, capsys):
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "records.md").read_text(), re.DOTALL)[1]
    write_records(tmp_path / "sweep.jsonl", loads=[PLAIN])
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/records.md", "exec"), {})
    assert "bimodal(8,16k) workqueue" in capsys.readouterr().out


def test_shapes_survive(tmp_path):
    shape = pkv.Shape(8, 2, 64, 32, "bfloat16")
    made = load("equal", 2, 64, shape)
    append(tmp_path / "a", [run_of(), made], "one")
    assert read_records([tmp_path / "a"]).loads[made.name].shape == shape

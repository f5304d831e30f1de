"""`pkv bench`: what it prints without a GPU, which words it takes, and, on one, that it measures and records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import pkv
from pkv.bench.engines import registry as engines
from pkv.bench.engines.engine import Ready
from pkv.bench.loads.grids import SHAPE
from pkv.bench.measuring import live
from pkv.bench.measuring.sweep import loads_of
from pkv.bench.records.records import read_records
from pkv.cli import main
from pkv.commands import CommandError, bench, schedules

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="what it says where there is no GPU")


@NO_GPU
def test_without_a_gpu_it_checks_schedules_and_counts(capsys):
    assert main(["bench", "--only", "bimodal(8"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("no GPU: schedules are checked, nothing is timed\n")
    assert "bimodal(8,16k)" in text
    for stage in pkv.STAGES:
        assert (f"\n{stage} " in text) == (stage != "reference")


@NO_GPU
def test_without_a_gpu_json_has_the_counters_of_every_load(capsys):
    assert main(["bench", "--grid", "smoke", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["timed"] is False
    assert found["why"] == "no GPU: schedules are checked, nothing is timed"
    assert len(found["loads"]) == 6
    queue = found["loads"][2]["stages"]["workqueue"]
    wanted = pkv.plan([16384 if row % 4 == 0 else 2048 for row in range(8)], loads_of("smoke")[2].shape, "workqueue")
    assert queue["programs"] == wanted.counters.programs
    assert queue["useful_kv_mib"] == wanted.counters.useful_kv_mib == 176


@NO_GPU
def test_a_paper_load_counts_the_mean_of_its_steps(capsys):
    assert main(["bench", "--grid", "paper", "--only", "bimodal B8 seed 20260623", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["loads"]
    assert found["stages"]["workqueue"]["useful_kv_mib"] == pytest.approx(550.475, abs=0.05), "paper.md: 550.5"


@NO_GPU
def test_a_plan_that_is_not_sound_is_an_error(monkeypatch, capsys):
    def plan(lengths, shape, stage):
        made = pkv.plan(lengths, shape, stage)
        object.__setattr__(made, "items", made.items[:-1])
        return made

    monkeypatch.setattr(schedules, "plan", plan)
    assert main(["bench", "--only", "equal(1"]) == 1
    assert "equal(1,16k): row_local has a plan that is not sound: " in capsys.readouterr().err


@NO_GPU
def test_a_stage_that_refuses_a_shape_says_so(capsys):
    assert main(["bench", "--grid", "full", "--only", "equal(1,64k) head_dim 256", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["loads"]
    assert found["stages"]["row_local"]["launches"] >= 1


@NO_GPU
def test_without_a_gpu_only_stages_that_are_named_are_counted(capsys):
    assert main(["bench", "--only", "equal(1", "--engines", "row_local, workqueue:splits=20,tile=32,vllm"]) == 0
    text = capsys.readouterr().out
    assert "planned for rtx3060, 28 SMs" in text
    assert "not counted, as they have no plan of pkv's: workqueue:splits=20,tile=32, vllm" in text
    assert "\nrow_local " in text
    assert "\nsplit_kv " not in text
    assert main(["bench", "--engines", "stream"]) == 2
    assert "only plans can be checked, those of split_kv, length_buckets" in capsys.readouterr().err


@NO_GPU
def test_an_engine_may_have_several_options(capsys):
    """The example of --help."""
    assert main(["bench", "--only", "equal(1", "--engines", "row_local, workqueue:splits=20,tile=32", "--json"]) == 0
    assert bench.names_of("a:b=1,c=2,d, e:f=3") == ["a:b=1,c=2", "d", "e:f=3"]
    (queue,) = engines.find_engines(["workqueue: splits=20, tile=32"])
    assert queue.name == "workqueue:splits=20,tile=32"
    assert bench.names_of(None) == engines.DEFAULT_ENGINES


@NO_GPU
@pytest.mark.parametrize("words", ["--record", "--record x.jsonl", "--resume x.jsonl"])
def test_without_a_gpu_there_is_nothing_to_record(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *words.split()]) == 2
    assert "nothing to record: no time is taken without a GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--engines nope", "engine 'nope' does not exist; choose of reference, split_kv"),
        ("--engines row_local:splits=0", "splits"),
        ("--engines row_local:colour=2", "takes splits=VALUE"),
        ("--only nothing", "no load of grid 'smoke' has 'nothing' in its name"),
        ("--grid huge", "invalid choice: 'huge'"),
        ("--rounds 0", "must be at least 1"),
        ("--engines ''", "engine \"''\" does not exist"),
        ("--resume x --rounds 3 --grid paper", "leave out --grid, --rounds"),
        ("--resume x --record", "leave out --record"),
    ],
)
def test_bad_words_are_one_line(words, says, capsys):
    assert main(["bench", *words.split()]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_help_lists_every_engine(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in engines.ENGINES)


# --- on a GPU


@pytest.mark.gpu
def test_a_sweep_on_a_gpu(tmp_path, capsys):
    file = tmp_path / "smoke.jsonl"
    words = ["bench", "--only", "equal(1", "--engines", "row_local,workqueue,gather-sdpa,stream,empty", "--rounds", "3"]
    assert main([*words, "--record", str(file), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["loads"]
    assert [engine["engine"] for engine in found["engines"]] == words[4].split(",")
    records = read_records([file])
    assert len(records.timings) == 5
    assert all(timing.gpu_us[0] > 0 and timing.wall_us[0] > 0 for timing in records.timings)
    (run,) = records.runs.values()
    assert run.gpu["title"] == torch.cuda.get_device_name()
    assert run.versions["triton"]

    assert main([*words, "--record", str(file)]) == 2, "a file that is there is not overwritten"
    assert "--resume" in capsys.readouterr().err
    assert main(["bench", "--resume", str(file)]) == 0
    assert "nothing is left to measure" in capsys.readouterr().out
    assert main(["plot", str(file), "--table"]) == 0
    assert main(["compare", str(file), str(file)]) == 0


@pytest.mark.parametrize("asked", ["there.jsonl", ".", "none/a.jsonl"])
def test_a_new_file_is_new_and_in_a_folder(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.jsonl").write_text("kept")
    if asked == ".":
        made = bench.new_file(Path(asked), "smoke", "a-card")
        assert made.name.startswith("smoke-a-card-")
        assert made.read_text() == ""
    else:
        with pytest.raises(CommandError, match=r"name another file|is no folder"):
            bench.new_file(Path(asked), "smoke", "a-card")
    with pytest.raises(CommandError, match="is a folder: name a file in it"):
        bench.new_file(tmp_path, "smoke", "a-card")
    assert (tmp_path / "there.jsonl").read_text() == "kept"


@pytest.mark.gpu
def test_a_wrong_engine_has_no_record_on_a_gpu(tmp_path, capsys, monkeypatch):
    right = engines.ENGINES["row_local"]

    def prepare(batch):
        ready = right.prepare(batch)

        def run(planned):
            out, lse = ready.run(planned)
            return out * 1.01, lse

        return Ready(ready.plan, run)

    wrong = type(right)("wrong", "a percent too much", "pkv", right.why_not, prepare)
    monkeypatch.setitem(engines.ENGINES, "wrong", wrong)
    file = tmp_path / "a.jsonl"
    words = ["bench", "--only", "equal(1", "--engines", "row_local,wrong", "--rounds", "2", "--record", str(file)]
    assert main(words) == 1
    assert "wrong gets no record: out is off by" in capsys.readouterr().err
    assert [timing.engine for timing in read_records([file]).timings] == ["row_local"]


@pytest.mark.gpu
def test_lessons_time_a_step_on_a_gpu():
    with torch.device("cuda"):  # as the lessons have it
        text = live.time_engines([900, 30], SHAPE, ["row_local", "gather-sdpa", "reference", "stream"], rounds=2)
    first, *lines = text.splitlines()
    assert first.startswith("2 rows, 930 tokens on ")
    assert [line.split()[0] for line in lines] == ["row_local", "gather-sdpa", "reference", "stream"]
    assert "left out: it is the fp64 specification" in lines[2]
    assert lines[3].endswith("100% of a plain read")


@NO_GPU
def test_lessons_time_nothing_without_a_gpu():
    assert not live.can_time()
    with pytest.raises(RuntimeError, match="there is no GPU"):
        live.time_engines([900], SHAPE, ["row_local"])

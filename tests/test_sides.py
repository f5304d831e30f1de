"""`pkv compare` with several runs a side: what two runs of one commit differ by is noise, too."""

import argparse
import json

import pytest
from recordfiles import run_of, timing_of

from pkv.bench.loads.grids import grid
from pkv.bench.records.records import append
from pkv.commands import CommandError, compare

PLAIN = grid("smoke")[0]


def file_of(path, us: float | None, run: str, noise: float | None = 0.01, **changes):
    """Records of one run of two engines on one load; vllm takes `us`, or was not timed."""
    timings = [
        timing_of(PLAIN, engine, run, gpu_us=(each,) * len(PLAIN.steps), noise=noise)
        for engine, each in (("vllm", us), ("row_local", 50.0))
        if each is not None
    ]
    append(path, [run_of(run, **changes), PLAIN, *timings], run)
    return path


def executed(*words) -> None:
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    assert compare.execute(parser.parse_args([*map(str, words)])) == 0


def compared(capsys, *words) -> dict:
    executed(*words, "--json")
    return json.loads(capsys.readouterr().out)


def change_of(found: dict, engine: str = "vllm") -> dict:
    (change,) = [change for change in found["changes"] if change["engine"] == engine]
    return change


@pytest.fixture
def files(tmp_path):
    """Four runs of one commit that lie 6% apart, while timings within a run differ by 1%."""
    times = {"a1": 100.0, "a2": 106.0, "b1": 107.0, "b2": 101.0}
    return {name: file_of(tmp_path / name, us, name) for name, us in times.items()}


def test_a_shift_between_two_runs_of_one_commit_is_noise(files, capsys):
    alone = compared(capsys, files["a1"], files["b1"])
    assert change_of(alone)["verdict"] == "slower", "one run a side knows no better"
    found = compared(capsys, files["a1"], files["a2"], "--with", files["b1"], files["b2"])
    change = change_of(found)
    assert change["verdict"] == "within noise"
    assert (change["a_us"], change["b_us"]) == pytest.approx(((100 * 106) ** 0.5, (107 * 101) ** 0.5))
    assert change["noise"] == pytest.approx(0.06 + 107 / 101 - 1)
    assert found["summary"]["runs"] == {"A": 2, "B": 2}
    assert found["differences"] == []


def test_the_spread_of_one_side_stands_for_the_other(files, capsys):
    found = compared(capsys, files["a1"], files["a2"], "--with", files["b1"])
    assert change_of(found)["noise"] == pytest.approx(0.12)
    assert found["summary"]["runs"] == {"A": 2, "B": 1}
    assert change_of(found, "row_local")["noise"] == pytest.approx(0.02), "its runs lie nearer than its timings"


def test_a_change_beyond_the_spread_of_runs_is_real(files, tmp_path, capsys):
    slow = [file_of(tmp_path / f"c{n}", us, f"c{n}") for n, us in enumerate((130.0, 133.0))]
    assert change_of(compared(capsys, files["a1"], files["a2"], "--with", *slow))["verdict"] == "slower"
    assert change_of(compared(capsys, *slow, "--with", files["a1"], files["a2"]))["verdict"] == "faster"


def test_runs_that_know_no_noise_of_their_own_have_that_between_them(tmp_path, capsys):
    files = [file_of(tmp_path / f"{n}", us, f"r{n}", None) for n, us in enumerate((100.0, 104.0, 103.0))]
    assert change_of(compared(capsys, files[0], files[2]))["verdict"] == "noise not known"
    assert change_of(compared(capsys, files[0], files[1], "--with", files[2]))["verdict"] == "within noise"


def test_what_counts_as_noise_is_said(files, capsys):
    executed(files["a1"], files["b1"])
    one = capsys.readouterr().out
    assert "Two runs of one commit may differ by more" in one
    assert "pkv compare A A2 --with B B2" in one
    executed(files["a1"], files["a2"], "--with", files["b1"])
    several = capsys.readouterr().out
    assert "or runs of a side (2 of A, 1 of B), whichever is more" in several
    assert "may differ by more" not in several


def test_a_time_that_only_one_run_of_a_side_has_is_compared(files, tmp_path, capsys):
    without = file_of(tmp_path / "without", None, "without")
    found = compared(capsys, files["a1"], without, "--with", files["b1"], files["b2"])
    assert change_of(found)["a_us"] == 100.0
    assert found["alone"] == {"A": [], "B": []}


def test_runs_of_several_commits_on_a_side_are_told(files, tmp_path, capsys):
    other = file_of(tmp_path / "other", 100.0, "other", commit="fffffff")
    found = compared(capsys, files["a1"], other, "--with", files["b1"])
    assert found["differences"][0] == (
        "runs of A are of several commits (5b9849f, fffffff): what they differ by is more than noise"
    )


def test_one_run_given_twice_is_refused(files, tmp_path, capsys):
    copy = tmp_path / "copy"
    copy.write_bytes(files["a1"].read_bytes())
    for second in (copy, files["a1"]):
        with pytest.raises(CommandError, match=r"A: .*a1 and .* hold the same run a1: give files of two runs"):
            compared(capsys, files["a1"], second, "--with", files["b1"])
    assert compared(capsys, files["a1"], files["a1"])["summary"]["within noise"] == 2, "a file is equal to itself"


@pytest.mark.parametrize("names", [["a1"], ["a1", "a2", "b1"]])
def test_files_that_are_no_pair_are_refused(names, files, capsys):
    with pytest.raises(CommandError, match=f"two files are compared, not {len(names)}: give two, or several a side"):
        compared(capsys, *(files[name] for name in names))

"""The command `pkv`: its arguments, exit codes, and what reaches stdout and stderr. Also `plan` and `lab`."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

import pkv
from pkv.bench.loads.traces import Request, make_trace, steps_of
from pkv.bench.records.regret import regrets
from pkv.cards.costs import predict
from pkv.cards.files import write_own
from pkv.cards.known import load_gpu
from pkv.cli import COMMANDS, main
from pkv.commands import demo, lab, output

ROOT = Path(__file__).resolve().parents[1]
COUNTERS = [field.name for field in dataclasses.fields(pkv.Counters)]


def python_m_pkv(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`python -m pkv` as a user types it, on a machine without a GPU."""
    variables = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    variables |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), **env}
    command = [sys.executable, "-m", "pkv", *args]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240)


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that bad input gives."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pkv: error: ")
    assert err.count("\n") == 1, err
    return err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("plan", ["--lengths", "--trace", "required"]),
        ("simulate --json", ["--lengths", "--trace", "required", "pkv simulate --help"]),
        ("plan --lengths 5 --trace zipf", ["--trace", "not allowed with", "--lengths"]),
        ("plan --lengths 5 --seed 1", ["--seed belongs to a trace, and --lengths is one step", "give --trace"]),
        ("plan --lengths 5 --requests 1", ["--requests belongs to a trace"]),
        ("plan --lengths 5 --max-active 8", ["--max-active belongs to a trace"]),
        ("simulate --lengths 5 --steps 48", ["--steps belongs to a trace"]),
        ("plan --trace zipff", ["'zipff' is neither a file nor one of uniform, bimodal", "did you mean zipf?"]),
        ("plan --trace nowhere/to/be.csv", ["'nowhere/to/be.csv' is neither a file nor one of"]),
        (f"plan --trace {'x' * 5000}", ["is neither a file nor one of"]),
        ("plan --trace tests", ["--trace tests cannot be read", "directory"]),
        ("plan --trace README.md --seed 1", ["--seed means nothing", "README.md"]),
        ("plan --trace README.md", ["--trace README.md line 1: column prompt_len is missing", "found # pkv"]),
        ("plan --trace zipf --seed -1", ["--seed", "0 .. 2**63 - 1"]),
        ("plan --trace zipf --requests 0", ["--requests", "'0' must lie in 1 .. 100000"]),
        ("plan --trace zipf --requests 100001", ["--requests", "must lie in 1 .. 100000"]),
        ("plan --trace zipf --steps 0", ["--steps", "'0' must lie in 1 .. 100000"]),
        ("plan --trace zipf --steps 1_0", ["--steps", "'1_0'", "whole number"]),
        ("plan --trace zipf --max-active 0", ["--max-active", "at least 1"]),
        ("plan --trace zipf --max-active 2 3", ["unexpected '3'"]),
        ("plan --trace zipf --page-size 2147483647", ["--trace zipf: prompt_len = 2147483647 is too large"]),
        ("plan --trace zipf --tile 8", ["tile = 8", "16, 32, 64"]),
        ("plan --trace zipf --stage split_kv --ordering as_listed", ["'split_kv'", "no option 'ordering'"]),
        ("simulate --trace zipf --stage row_local --policy paper", ["'row_local'", "no option 'policy'"]),
        ("plan --lengths 5 --stage workqueue --ordering random", ["--ordering", "'random'", "longest_first"]),
        ("plan --lengths 5 --policy best", ["--policy", "'best'", "paper"]),
        ("plan --max-actives 5", ["--max-actives: did you mean --max-active?"]),
        ("simulate --lengths 5 --stage reference", ["'reference' has no kernel", "plan another stage"]),
        ("simulate --trace zipf --stage reference", ["'reference' has no kernel"]),
        ("explain", ["--lengths", "--trace", "required", "pkv explain --help"]),
        ("explain --lengths 5 --stage split_kv", ["unknown option --stage", "pkv explain --help"]),
        ("explain --lengths 5 --splits 4", ["unknown option --splits"]),
        ("explain --lengths 5 --policy best", ["--policy", "'best'", "paper"]),
        ("explain --lengths 5 --steps 48", ["--steps belongs to a trace"]),
        ("explain --trace zipf --head-dim 512", ["512"]),
        ("plan --lengths 5,x,7", ["--lengths", "'x' (entry 2 of '5,x,7')", "such as 5,40,1000"]),
        ("plan --lengths 5,,7", ["--lengths", "'' (entry 2"]),
        ("plan --lengths 1.5", ["--lengths", "'1.5' (entry 1"]),
        ("plan --lengths 1_000", ["--lengths", "'1_000' (entry 1", "whole number"]),
        ("plan --lengths 5,\uff13\uff12", ["--lengths", "(entry 2", "whole number"]),
        ("plan --lengths \u0663", ["--lengths", "(entry 1", "whole number"]),
        ("plan --lengths \u00b2", ["--lengths", "(entry 1", "whole number"]),
        ("plan --lengths +5", ["--lengths", "'+5' (entry 1", "whole number"]),
        ("plan --lengths 0x10", ["--lengths", "'0x10' (entry 1", "whole number"]),
        ("plan --lengths -3,5", ["--lengths", "'-3' (entry 1", "0 .. 2**31 - 1"]),
        ("plan --lengths 7,2147483648", ["--lengths", "'2147483648' (entry 2"]),
        ("plan --lengths 5 --stage splitkv", ["--stage", "'splitkv'", "split_kv"]),
        ("plan --lengths 5 --splits 0", ["--splits", "at least 1"]),
        ("plan --lengths 5 --splits two", ["--splits", "'two'"]),
        ("plan --lengths 5 --splits 1_0", ["--splits", "'1_0'", "whole number"]),
        ("plan --lengths 5 --splits \uff14", ["--splits", "whole number"]),
        ("plan --lengths 5 --page-size 1_6", ["--page-size", "'1_6'", "whole number"]),
        ("plan --lengths 5 --head-dim 99999999999999999999", ["--head-dim", "at most 2**31 - 1"]),
        ("plan --lengths 5 --stage reference --page-size 2147483648", ["--page-size", "at most 2**31 - 1"]),
        ("plan --lengths 5 --tile 8", ["tile = 8", "16, 32, 64"]),
        ("plan --lengths 5 --stage reference --tile 16", ["'reference'", "no option 'tile'"]),
        ("plan --lengths 5 --splits 4", ["'stream_k'", "no option 'splits'"]),
        ("plan --lengths 5 --heads 32", ["--heads", "'32'", "such as 32,8"]),
        ("plan --lengths 5 --heads 6,4", ["--heads", "multiple"]),
        ("plan --lengths 5 --heads 0,0", ["--heads", "at least 1"]),
        ("plan --lengths 5 --heads 3_2,8", ["--heads", "'3_2,8'", "such as 32,8"]),
        ("plan --lengths 5 --heads 999999999,1", ["--heads", "'999999999,1': at most 65536 heads"]),
        ("plan --lengths 5 --heads 1,999999999", ["--heads", "'1,999999999': at most 65536 heads"]),
        ("plan --lengths 5 --heads 65537,65537 --stage reference", ["--heads", "at most 65536 heads"]),
        ("plan --lengths 5 --head-dim 512", ["head_dim = 512", "stage='reference'"]),
        ("plan --lengths 5 --gpu rtx9999", ["--gpu", "'rtx9999'", "rtx3060"]),
        ("plan --lengths 5 --dtype int8", ["--dtype", "'int8'", "float16"]),
        ("plan --len 5", ["--len: did you mean --lengths?", "pkv plan --help"]),
        ("plan --lengthz 5", ["--lengthz: did you mean --lengths?", "pkv plan --help"]),
        ("plan -lengths 5", ["-lengths: did you mean --lengths?"]),
        ("plan --lengthz=5 --json", ["--lengthz: did you mean --lengths?"]),
        ("plan --lengths 5 --frob", ["unknown option --frob (see `pkv plan --help`)"]),
        ("--frob plan --lengths 5", ["unknown option --frob (see `pkv --help`)"]),
        ("plan --lengths 5 40", ["'40'", "with commas", "--lengths 5,40", "pkv plan --help"]),
        ("plan --lengths 5, 40, 7", ["with commas, no spaces", "--lengths 5,40,7"]),
        ("plan --lengths 5 5 --splits 5", ["--lengths 5,5"]),
        ("plan --lengths=5 40", ["--lengths 5,40"]),
        ("plan --lengths 5 --heads 32 8 --json", ["--heads 32,8"]),
        ("demo --lengths 5 40", ["--lengths 5,40", "pkv demo --help"]),
        ("plan --lengths 5 --splits 2 3", ["unexpected '3' (see `pkv plan --help`)"]),
        ("plan --lengths 5 --json 40", ["unexpected '40' (see"]),
        ("plan 5,40", ["unexpected '5,40'"]),
        ("demo 5", ["unexpected '5'", "pkv demo --help"]),
        ("demo --seed -1", ["--seed", "-1", "0 .."]),
        ("demo --seed -5", ["--seed", "-5", "0 .. 2**63 - 1"]),
        ("demo --seed 99999999999999999999999", ["--seed", "0 .. 2**63 - 1"]),
        ("demo --seed \uff13", ["--seed", "whole number"]),
        ("demo --seed 1_0", ["--seed", "whole number"]),
        ("demo --seed 9223372036854775808", ["--seed", "0 .. 2**63 - 1"]),
        ("demo --shape gpt", ["--shape", "'gpt'", "llama3-8b"]),
        ("demo --seed x", ["--seed", "'x'"]),
        ("check ex77", ["task 'ex77' does not exist", "choose one of ex00_1"]),
        ("check --seed x", ["--seed", "'x'"]),
        ("check --sed 5", ["--sed: did you mean --seed?", "pkv check --help"]),
        ("hint", ["required: ID", "pkv hint --help"]),
        ("hint ex00_1 ex00_2", ["ex00_2"]),
        ("progress ex00", ["unexpected 'ex00'"]),
        ("reset", ["required: EXERCISE"]),
        ("reset ex77", ["exercise 'ex77' does not exist: choose one of ex00"]),
        ("start", ["required: DIR"]),
        ("start .", ["holds lessons and exercises already: name another folder"]),
        ("frobnicate", ["'frobnicate'", "doctor"]),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(argv, words, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    error = error_of(capsys, *argv.split())
    for word in words:
        assert word in error


@pytest.mark.parametrize("option", ["--lengths", "--splits", "--heads"])
@pytest.mark.parametrize("n_digits", [40, 5000])
def test_a_number_of_any_size_gets_a_short_line(option, n_digits, capsys):
    digits = "9" * n_digits
    error = error_of(capsys, "plan", "--lengths", "5", option, digits + (",1" if option == "--heads" else ""))
    assert option in error
    assert "whole number" not in error, "it is one"
    assert len(error) < 300


def test_spaces_and_zeros_around_a_number_do_no_harm(capsys):
    assert main(["plan", "--json", "--lengths", "5, 040,1" + "0" * 3, "--heads", "32, 8"]) == 0
    assert json.loads(capsys.readouterr().out)["lengths"] == [5, 40, 1000]


def test_the_most_heads_still_plan(capsys):
    assert main(["plan", "--lengths", "5", "--heads", "65536,65536"]) == 0


def test_an_error_with_a_line_break_stays_one_line(capsys):
    assert "--frob\\n" in error_of(capsys, "plan", "--frob\n", "--lengths", "5")


def test_no_lengths_at_all_are_named_too(capsys):
    assert "--lengths" in error_of(capsys, "plan", "--lengths", "")


def test_bad_input_gets_no_traceback_from_a_shell():
    done = python_m_pkv("plan", "--lengths", "5,x", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("pkv: error: ")
    assert "Traceback" not in done.stderr


def test_a_fault_of_pkv_itself_is_not_hidden(monkeypatch):
    def fault(args):
        raise ZeroDivisionError

    monkeypatch.setattr(COMMANDS["plan"], "execute", fault)
    with pytest.raises(ZeroDivisionError):
        main(["plan", "--lengths", "5"])


def test_ctrl_c_ends_silently(monkeypatch, capsys):
    def stop(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(COMMANDS["plan"], "execute", stop)
    assert main(["plan", "--lengths", "5"]) == 130
    assert capsys.readouterr() == ("", "")


def test_version_and_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"pkv {pkv.__version__}\n"
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^    {name}\b", out, re.MULTILINE) for name in COMMANDS)
    for name in COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    "command", ["demo", "plan", "simulate", "explain", "check", "hint", "progress", "reset", "start"]
)
def test_help_names_every_default(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    out = " ".join(capsys.readouterr().out.split())
    listed = re.split(r" (?=--?[a-z])", out.partition("options:")[2])[1:]
    silent = [text for text in listed if "default" not in text and not text.startswith(("-h", "--help", "--json"))]
    required = ["--lengths", "--trace"] if command in ("plan", "simulate", "explain") else []
    assert [text.split()[0] for text in silent] == required, "one of them is"
    if command == "demo":
        assert all(",".join(map(str, lengths)) in out for lengths in demo.LENGTHS.values())


def shell(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **env}
    command = ["bash", "-c", script.replace("pkv", f'"{sys.executable}" -m pkv', 1)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)


def few_fast(*words: str) -> list[Any]:
    """The first two are fast: what a command says, and what argparse does. Each starts a process."""
    return [*words[:2], *(pytest.param(each, marks=pytest.mark.slow) for each in words[2:])]


@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "words", few_fast("plan --lengths 5", "plan --help", "plan --lengths 5 --json", "--version", "")
)
def test_output_that_cannot_be_written_is_one_line_and_an_error(words, unbuffered):
    done = shell(f"pkv {words} > /dev/full", PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 2
    assert re.fullmatch(r"pkv: error: could not write to stdout \(No space left on device\).*\n", done.stderr)


def test_many_lines_that_cannot_be_written_are_one_line_too():
    done = shell(f"pkv plan --json --lengths {','.join(['5'] * 5000)} > /dev/full")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    "words", few_fast("plan --lengths 5", "plan --help", "plan --lengths 5 --json", "--version", "doctor")
)
def test_a_closed_stdout_is_one_line_and_an_error(words):
    done = shell(f"pkv {words} >&-")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"pkv: error: stdout is closed.*\n", done.stderr)


def test_a_closed_stderr_changes_no_exit_code():
    for closed in ("2>&-", "2> /dev/full"):
        done = shell(f"pkv plan --lengths 5,x {closed}")
        assert (done.stdout, done.stderr) == ("", "")
        assert done.returncode != 0
    assert shell("pkv demo --json --lengths 5 --stage reference 2>&-").returncode == 0


def test_what_a_terminal_cannot_write_is_spelled_out(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    output.say("a → \ud800")
    assert written.getvalue() == b"a \\u2192 \\ud800\n"


def test_a_reader_that_stops_reading_is_no_error():
    lengths = ",".join(["5"] * 20_000)
    script = f'"{sys.executable}" -m pkv plan --json --lengths {lengths} | head -c 10; echo " ${{PIPESTATUS[0]}}"'
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout == '{"stage":  141\n'


def test_plan_prints_the_plan(capsys):
    options = "--lengths 5,40,1000 --gpu rtx3060"
    assert main(["plan", *options.split()]) == 0
    shape = pkv.Shape(32, 8, 128, 16, "float16")
    made = pkv.plan([5, 40, 1000], shape, gpu="rtx3060")
    assert made.stage == "stream_k", "as decode() takes"
    idle = pkv.simulate(made).tail_idle
    assert capsys.readouterr().out == f"{made}\n  tail_idle {idle:.3g}, simulated on rtx3060\n"


@pytest.fixture
def unmeasured(cache) -> str:
    """The name of a card without costs: a profile of the user's own, as all that ship have some."""
    write_own("unmeasured", {"title": "NVIDIA H100", "arch": 90, "n_sms": 114})
    return "unmeasured"


@pytest.mark.parametrize("stage", list(pkv.STAGES))
def test_plan_as_json(stage, capsys, unmeasured):
    options = (
        f"--lengths 5,0,100 --stage {stage} --gpu {unmeasured} --heads 4,2 --head-dim 64 --page-size 8 --dtype bfloat16"
    )
    assert main(["plan", "--json", *options.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    made = pkv.plan([5, 0, 100], pkv.Shape(4, 2, 64, 8, "bfloat16"), stage, gpu=unmeasured)
    assert set(found) == {"stage", "lengths", "items", "gpu", "plan", "tail_idle", *COUNTERS}
    assert (found["gpu"], found["tail_idle"]) == (unmeasured, None), "nobody knows what things cost there"
    assert (found["stage"], found["lengths"], found["items"]) == (made.stage, [5, 0, 100], made.n_items)
    assert [found[name] for name in COUNTERS] == [getattr(made.counters, name) for name in COUNTERS]
    assert pkv.Plan.from_json(json.dumps(found["plan"])) == made


def test_plan_of_one_step_says_how_idle_the_sms_are(capsys):
    options = "plan --lengths 5,100 --stage workqueue --gpu rtx3060"
    made = pkv.plan([5, 100], pkv.Shape(32, 8, 128, 16, "float16"), "workqueue", gpu="rtx3060")
    idle = pkv.simulate(made, "rtx3060").tail_idle
    assert main([*options.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tail_idle"] == pytest.approx(idle)
    assert main(options.split()) == 0
    assert f"tail_idle {idle:.3g}" in capsys.readouterr().out


def test_plan_takes_every_option(capsys):
    options = "--lengths 100 --stage split_kv --splits 3 --tile 32 --heads 12,12"
    assert main(["plan", "--json", *options.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["items"], found["plan"]["tile"], found["plan"]["shape"]["n_kv_heads"]) == (3, 32, 12)


TRACE = "--trace bimodal --requests 5 --max-active 2 --steps 7 --stage workqueue --tile 32 --gpu rtx3060"


def by_hand(**options: Any) -> list[pkv.Plan]:
    """The plans of TRACE, without the command."""
    steps = steps_of(make_trace("bimodal", 20260623, 5, 2), 2, 7)
    shape = pkv.Shape(32, 8, 128, 16, "float16")
    return [pkv.plan(lengths, shape, "workqueue", tile=32, gpu="rtx3060", **options) for lengths in steps]


def test_plan_of_a_trace_has_the_means_of_its_steps(capsys):
    assert main(["plan", *TRACE.split(), "--ordering", "as_listed", "--splits", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    facts = {"stage": "workqueue", "trace": "bimodal", "seed": 20260623, "requests": 5, "max_active": 2, "steps": 7}
    facts["never_active"] = 3
    assert set(found) == {*facts, "gpu", "tail_idle", *COUNTERS}
    assert {name: found[name] for name in facts} == facts
    assert found["gpu"] == "rtx3060"
    plans = by_hand(ordering="as_listed", splits=3)
    for name in COUNTERS:
        assert found[name] == pytest.approx(fmean(getattr(made.counters, name) for made in plans), rel=1e-12)
    assert found["tail_idle"] == pytest.approx(fmean(pkv.simulate(made).tail_idle for made in plans), rel=1e-12)
    assert 0 < found["tail_idle"] < 1


@pytest.mark.parametrize("command", ["plan", "simulate", "explain"])
def test_every_third_step_is_a_sample_of_the_steps(command, capsys):
    words = TRACE.replace("--stage workqueue --tile 32", "") if command == "explain" else TRACE
    assert main([command, *words.split(), "--every", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["every"]) == (7, 3)
    if command == "explain":
        assert found["steps_with_tokens"] == 3
        plans = [pkv.plan(made.lengths, made.shape, "row_local", gpu="rtx3060") for made in by_hand()[::3]]
        simulated = fmean(pkv.simulate(made).gpu_ms for made in plans)
        assert found["stages"]["row_local"]["simulated_ms"] == pytest.approx(simulated, rel=1e-12)
    else:
        for name in COUNTERS:
            assert found[name] == pytest.approx(fmean(getattr(made.counters, name) for made in by_hand()[::3]))
    assert main([command, *words.split(), "--every", "3"]) == 0
    assert "7 steps)\none of every 3 steps: 3\n" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["plan", "simulate", "explain"])
def test_a_trace_by_the_clock_is_the_trace_of_its_steps(command, capsys, tmp_path):
    path, clock = tmp_path / "steps.csv", tmp_path / "clock.csv"
    path.write_text("prompt_len,decode_len,arrival\n3000,4,0\n64,3,2\n900,2,7\n")
    clock.write_text("seconds,prompt_len,decode_len\n0.00,3000,4\n0.14,64,3\n0.36,900,2\n")
    found = []
    for words in ([str(path)], [str(clock), "--steps-per-second", "20"]):
        assert main([command, "--trace", *words, "--gpu", "rtx3060", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert (found[1].pop("steps_per_second"), found[1].pop("trace")) == (20, str(clock))
    assert found[0].pop("trace") == str(path)
    assert found[0] == found[1]
    assert "--steps-per-second 20" in error_of(capsys, command, "--trace", str(clock))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--lengths 5 --every 2", "--every belongs to a trace"),
        ("--lengths 5 --steps-per-second 2", "--steps-per-second belongs to a trace"),
        ("--trace zipf --steps-per-second 2", "trace zipf counts steps: drop it"),
        ("--trace zipf --every 0", "'0' must lie in 1 .. 100000"),
        ("--trace zipf --steps-per-second 0", "'0' must be a number above 0"),
        ("--trace zipf --steps-per-second 1e3", "'1e3' must be a number above 0, at most 1,000,000, such as 20"),
    ],
)
def test_a_sample_or_a_rate_that_means_nothing_is_refused(words, error, capsys):
    assert error in error_of(capsys, "plan", *words.split())


@pytest.mark.parametrize("command", ["plan", "simulate", "explain"])
def test_of_a_trace_nothing_is_made_that_only_a_drawing_needs(command, capsys, monkeypatch):
    def refuse(*arguments):
        raise AssertionError("nobody asked who ran where")

    monkeypatch.setattr("pkv.cards.simulation._spans_of", refuse)
    assert main([command, "--trace", "uniform", "--steps", "2", "--gpu", "rtx3060"]) == 0


def test_a_long_trace_says_how_long_it_will_take(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    clock = iter(range(0, 10_000, 2))
    monkeypatch.setattr("pkv.commands.means.time", SimpleNamespace(monotonic=lambda: next(clock)))  # 2 s a step
    assert main(["plan", "--trace", "uniform", "--steps", "130"]) == 0
    shown = capsys.readouterr().err.split("\r\x1b[K")
    assert len(shown) == 132, "a line a step: none ends within a second"
    assert shown[1].endswith("] step 1 of 130")
    assert shown[11].endswith("] step 11 of 130, 4 min left")
    assert shown[-2].endswith("] step 130 of 130, 2 s left")
    assert max(map(len, shown)) < 79


def test_simulate_has_the_numbers_of_plan_and_the_time(capsys):
    assert main(["plan", *TRACE.split(), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert main(["simulate", *TRACE.split(), "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert simulated.pop("gpu_ms") == pytest.approx(fmean(pkv.simulate(made).gpu_ms for made in by_hand()), rel=1e-12)
    assert simulated == planned


@pytest.mark.parametrize("stage", [stage for stage in pkv.STAGES if stage != "reference"])
def test_simulate_one_step(stage, capsys):
    words = f"simulate --lengths 5,0,3000 --stage {stage} --heads 4,2"
    made = pkv.plan([5, 0, 3000], pkv.Shape(4, 2, 128, 16, "float16"), stage, gpu="rtx3060")
    timeline = pkv.simulate(made)
    assert main([*words.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    head = {"stage": made.stage, "lengths": [5, 0, 3000], "items": made.n_items, "gpu": "rtx3060"}
    numbers = dataclasses.asdict(made.counters) | {"tail_idle": timeline.tail_idle, "gpu_ms": timeline.gpu_ms}
    planning = load_gpu("rtx3060").costs.flashinfer_plan_us / 1000
    if made.stage == "flashinfer":
        numbers["flashinfer_plan_ms"] = planning
    assert found == head | numbers | {"plan": made.to_dict()}
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"stage {stage} on 3 rows, 3,005 tokens\nsimulated on rtx3060\n")
    assert out.endswith(f"\n{timeline}\n")
    assert re.search(rf"^gpu_ms +{timeline.gpu_ms:.3f}$", out, re.MULTILINE)
    assert (f"\nof this, {planning:.3f} ms FlashInfer's planning\n" in out) == (made.stage == "flashinfer")


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_a_trace_as_a_table(command, capsys):
    assert main([command, *TRACE.split()]) == 0
    out = capsys.readouterr().out
    trace = "trace bimodal (seed 20260623, 5 requests, at most 2 active, 7 steps)"
    assert out.startswith(f"stage workqueue on {trace}\n")
    assert "rtx3060" in out
    names = re.findall(r"^(\w+) +[0-9.,]+$", out, re.MULTILINE)
    assert names == [*COUNTERS, "tail_idle", *(["gpu_ms"] if command == "simulate" else [])]


@pytest.mark.parametrize("reason", ["no costs", "no kernel"])
def test_what_no_clock_knows_is_null_in_json_and_a_dash_in_a_table(reason, capsys, unmeasured):
    words = "plan --trace zipf --steps 3"
    words += f" --gpu {unmeasured}" if reason == "no costs" else " --gpu rtx3060 --stage reference"
    assert main([*words.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tail_idle"] is None
    assert main(words.split()) == 0
    assert re.search(r"^tail_idle +-$", capsys.readouterr().out, re.MULTILINE)


def test_a_gpu_without_costs_cannot_be_simulated(capsys, unmeasured):
    error = error_of(capsys, "simulate", "--lengths", "5", "--gpu", unmeasured)
    assert "'unmeasured' has no costs" in error
    assert error.endswith(": take --gpu rtx3060\n")


def test_planning_is_in_the_mean_of_the_steps_that_flashinfer_plans(capsys, tmp_path):
    path = tmp_path / "gap.csv"
    path.write_text("prompt_len,decode_len,arrival\n4095,1,1\n")  # a step without rows, and one with
    words = ["--trace", str(path), "--stage", "flashinfer", "--gpu", "rtx3060"]
    assert main(["simulate", *words, "--json"]) == 0
    planning = load_gpu("rtx3060").costs.flashinfer_plan_us / 1000
    assert json.loads(capsys.readouterr().out)["flashinfer_plan_ms"] == pytest.approx(planning / 2)
    assert main(["simulate", *words]) == 0
    assert f"\nof this, {planning / 2:.3f} ms FlashInfer's planning\n" in capsys.readouterr().out
    assert main(["plan", *words, "--json"]) == 0
    assert "flashinfer_plan_ms" not in json.loads(capsys.readouterr().out), "a plan has no time"


@pytest.mark.parametrize("command", ["plan", "simulate", "explain"])
def test_requests_that_are_never_active_are_told(command, capsys, tmp_path):
    path = tmp_path / "three.csv"
    path.write_text("prompt_len,decode_len,arrival\n" + "64,3,0\n" * 3)
    for words, note in [
        ("--max-active 2", "1 of 3 requests was never active: raise --max-active"),
        ("--max-active 1", "2 of 3 requests were never active: raise --max-active"),
        ("--max-active 3", ""),
    ]:
        argv = [command, "--trace", str(path), *words.split(), "--gpu", "rtx3060"]
        assert main(argv) == 0
        out = capsys.readouterr().out
        assert (f"\n{note}\n" if note else "3 steps)\n") in out
        assert ("never active" in out) == bool(note)
        assert main([*argv, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["never_active"] == int(note[0] if note else 0)
    path.write_text("prompt_len,decode_len,arrival\n64,3,0\n64,3,0\n64,3,9\n")
    assert main([command, "--trace", str(path), "--max-active", "1", "--steps", "2", "--gpu", "rtx3060"]) == 0
    note = "2 of 3 requests were never active: raise --max-active and --steps"
    assert f"\n{note}\n" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_help_explains_every_number(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    _, _, glossary = capsys.readouterr().out.partition("what the counters count")
    explained = re.findall(r"^  (\w+)  +\S", glossary, re.MULTILINE)
    assert explained == [*COUNTERS, "tail_idle", *(["gpu_ms", "flashinfer_plan_ms"] if command == "simulate" else [])]


def test_steps_without_rows_count_in_the_means_but_not_as_idle(capsys, tmp_path):
    path = tmp_path / "gaps.csv"
    path.write_text("prompt_len,decode_len,arrival\n4095,2,1\n")  # steps of 0, 1, 1 rows
    assert main(["simulate", "--trace", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: found[name] for name in ("trace", "seed", "requests", "steps")} == {
        "trace": str(path), "seed": None, "requests": 1, "steps": 3,
    }  # fmt: skip
    shape = pkv.Shape(32, 8, 128, 16, "float16")
    two = [pkv.simulate(pkv.plan([length], shape, gpu="rtx3060")) for length in (4095, 4096)]
    assert found["useful_kv_mib"] == pytest.approx((4095 + 4096) * 4096 / 2**20 / 3)
    assert found["gpu_ms"] == pytest.approx(sum(timeline.gpu_ms for timeline in two) / 3)
    assert found["tail_idle"] == pytest.approx(sum(timeline.tail_idle for timeline in two) / 2)


def test_a_trace_file_gives_its_own_defaults(capsys, tmp_path):
    path = tmp_path / "two.json"
    path.write_text(json.dumps([vars(Request(64, 3, 0)), vars(Request(80, 2, 4))]))
    found = {}
    for words in ("", "--requests 1", "--steps 2 --max-active 1"):
        assert main(["plan", "--trace", str(path), *words.split(), "--json"]) == 0
        found[words] = json.loads(capsys.readouterr().out)
    facts = ("requests", "max_active", "steps")
    assert [[entry[name] for name in facts] for entry in found.values()] == [[2, 8, 6], [1, 8, 3], [2, 1, 2]]
    assert found["--requests 1"]["useful_kv_mib"] == pytest.approx(65 * 4096 / 2**20)
    assert main(["plan", "--trace", str(path)]) == 0
    assert f"trace {path} (2 requests, at most 8 active, 6 steps)" in capsys.readouterr().out
    assert "--requests 3: " in (error := error_of(capsys, "plan", "--trace", str(path), "--requests", "3"))
    assert "has 2" in error
    assert "entry 1: " in error_of(capsys, "plan", "--trace", str(bad_trace(tmp_path)))


def bad_trace(folder: Path) -> Path:
    path = folder / "bad.json"
    path.write_text('[{"prompt_len": -1, "decode_len": 1, "arrival": 0}]')
    return path


def test_a_file_of_no_requests_is_a_step_without_rows(capsys, tmp_path):
    path = tmp_path / "none.csv"
    path.write_text("prompt_len,decode_len,arrival\n")
    assert main(["simulate", "--trace", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["steps"], found["launches"], found["gpu_ms"]) == (0, 1, 0, 0)
    assert found["tail_idle"] is None


def test_a_trace_that_lasts_too_long_asks_how_many_steps(capsys, tmp_path):
    path = tmp_path / "late.csv"
    path.write_text("prompt_len,decode_len,arrival\n64,1,2000000\n")
    assert "lasts 2000001 steps: say how many with --steps" in error_of(capsys, "plan", "--trace", str(path))
    assert main(["plan", "--trace", str(path), "--steps", "2"]) == 0


def test_steps_show_on_a_terminal_only_and_in_one_line(monkeypatch, capsys):
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        assert main(["plan", "--trace", "uniform", "--steps", "130"]) == 0
        err = capsys.readouterr().err
        assert bool(err) == is_terminal
    shown = err.split("\r\x1b[K")
    assert 20 <= len(shown) <= 45, "not a line for each of 130 steps"
    assert max(map(len, shown)) < 79
    assert shown[1].endswith("step 1 of 130")
    assert shown[-1] == "", "and the last one is taken away"


@pytest.mark.parametrize("policy", [None, "paper", "cost"])
def test_explain_one_step(policy, capsys):
    words = f"explain --lengths 5,0,20000 --heads 16,4 --gpu rtx3060 {f'--policy {policy}' if policy else ''}"
    found = pkv.explain([5, 0, 20000], pkv.Shape(16, 4, 128, 16, "float16"), gpu="rtx3060", policy=policy)
    assert main(words.split()) == 0
    assert capsys.readouterr().out == f"{found}\n"
    assert main([*words.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"lengths": [5, 0, 20000]} | found.to_dict()


def test_explain_a_trace(capsys, tmp_path):
    path = tmp_path / "varied.csv"  # steps of 1, 8, 1 rows and one of none
    lines = ["prompt_len,decode_len,arrival", "20000,3,0", *(f"{3000 * row},1,1" for row in range(1, 8)), "0,1,3"]
    path.write_text("\n".join(lines))
    assert main(["explain", "--trace", str(path), "--gpu", "rtx3060", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)

    shape = pkv.Shape(32, 8, 128, 16, "float16")
    steps = [[20000], [20001, *(3000 * row for row in range(1, 8))], [20002]]
    simulated: dict[str, list[float]] = {}
    predicted: dict[str, list[float]] = {}
    for lengths in steps:
        by_policy = {name: pkv.explain(lengths, shape, policy=name, gpu="rtx3060") for name in ("paper", "cost")}
        routes = {entry.stage: entry.plan for entry in by_policy["cost"].candidates}
        routes |= {name: explanation.plan for name, explanation in by_policy.items()}
        for name, made in routes.items():
            prediction = predict(made, "rtx3060")
            simulated.setdefault(name, []).append(pkv.simulate(made).gpu_ms - prediction.plan)
            predicted.setdefault(name, []).append(prediction.gpu_ms - prediction.plan)
            assert (prediction.plan > 0) == (made.stage == "flashinfer"), "a plan on the host serves every layer"
    best = [min(times[step] for times in simulated.values()) for step in range(3)]

    assert set(found) == {
        "trace", "seed", "requests", "max_active", "steps", "never_active", "gpu", "steps_with_tokens", "stages",
        "policies",
    }  # fmt: skip
    assert (found["steps"], found["steps_with_tokens"]) == (4, 3)
    assert set(found["stages"]) | {"paper", "cost"} == set(simulated)
    for name, numbers in (found["stages"] | found["policies"]).items():
        own = [mine / least - 1 for mine, least in zip(simulated[name], best, strict=True)]
        assert numbers["predicted_ms"] == pytest.approx(fmean(predicted[name])), name
        assert numbers["simulated_ms"] == pytest.approx(fmean(simulated[name])), name
        assert numbers["mean_regret"] == pytest.approx(fmean(own), abs=1e-9), name
        assert numbers["worst_regret"] == pytest.approx(max(own), abs=1e-9), name
        assert numbers["worst_regret"] >= numbers["mean_regret"] >= 0
    by_route = {f"always {name}": numbers for name, numbers in found["stages"].items()}
    by_route |= {f"policy {name}": numbers for name, numbers in found["policies"].items()}
    for regret in regrets(steps, shape):
        numbers = by_route.pop(regret.route)
        assert (regret.mean, regret.worst) == pytest.approx((numbers["mean_regret"], numbers["worst_regret"]))
        assert regret.taken == numbers.get("chosen", {regret.route.removeprefix("always "): 3})
    assert by_route == {}, "the same routes and the same measure as in pkv.bench.records.regret"
    assert found["policies"]["paper"]["chosen"] == {"length_buckets": 2, "workqueue": 1}
    assert sum(found["policies"]["cost"]["chosen"].values()) == 3

    assert main(["explain", "--trace", str(path), "--gpu", "rtx3060"]) == 0
    out = capsys.readouterr().out
    assert "policy paper takes length_buckets 2 times, workqueue once\n" in out
    row = re.search(r"^always flashinfer +([0-9.]+) +([0-9.]+) +([0-9.]+)% +([0-9.]+)%$", out, re.MULTILINE)
    numbers = found["stages"]["flashinfer"]
    assert [float(cell) for cell in row.groups()] == pytest.approx(
        [numbers["predicted_ms"], numbers["simulated_ms"], 100 * numbers["mean_regret"], 100 * numbers["worst_regret"]],
        abs=0.06,
    )
    for policy in ("paper", "cost"):
        words = ["explain", "--trace", str(path), "--gpu", "rtx3060", "--policy", policy, "--json"]
        assert main(words) == 0
        one = json.loads(capsys.readouterr().out)
        assert set(one["policies"]) == {policy}
        times = [entry["simulated_ms"] for entry in one["stages"].values()]
        assert times == [entry["simulated_ms"] for entry in found["stages"].values()], "by themselves, in any case"


def test_explain_a_trace_without_costs_tells_the_choice_and_no_time(capsys, unmeasured):
    words = f"explain --trace bimodal --steps 4 --gpu {unmeasured}"
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    assert re.search(r"^always workqueue +- +- +- +-$", out, re.MULTILINE)
    assert out.endswith(
        "policy paper takes workqueue 4 times\nno times: the costs of unmeasured are not known, or no step has tokens\n"
    )
    assert main([*words.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["policies"]["paper"] == {"chosen": {"workqueue": 4}} | dict.fromkeys(found["stages"]["workqueue"])
    assert "'unmeasured' has no costs" in error_of(capsys, *words.split(), "--policy", "cost")


def test_a_route_that_cannot_be_planned_is_one_line(capsys, monkeypatch):
    def refuse(*arguments):
        raise ValueError("exceeds a grid")

    monkeypatch.setattr(COMMANDS["explain"], "routes_of", refuse)
    assert "exceeds a grid" in error_of(capsys, "explain", "--trace", "zipf", "--gpu", "rtx3060")


def test_explain_a_trace_of_nothing(capsys, tmp_path):
    path = tmp_path / "none.csv"
    path.write_text("prompt_len,decode_len,arrival\n0,1,0\n")
    assert main(["explain", "--trace", str(path), "--gpu", "rtx3060"]) == 0
    out = capsys.readouterr().out
    assert "0 of 1 step has tokens" in out
    assert "policy paper takes nothing\n" in out


def test_explain_leaves_out_what_a_backend_cannot_do(capsys):
    words = "explain --trace zipf --steps 2 --dtype float32 --gpu rtx3060"
    assert main([*words.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["stages"].pop("flashinfer").values()) == {None}, "FlashInfer has no fp32 decode"
    assert all(numbers["simulated_ms"] > 0 for numbers in found["stages"].values())


def test_json_has_neither_nan_nor_infinity(capsys):
    output.print_json({"a": [float("nan"), (float("inf"), 1.5)], "b": {"c": float("-inf"), "d": "nan"}})
    assert json.loads(capsys.readouterr().out) == {"a": [None, [None, 1.5]], "b": {"c": None, "d": "nan"}}


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A folder with lesson 00, as the clone that pkv is imported from, and no exercises: nobody works in one."""
    lesson = tmp_path / lab.FIRST_LESSON
    lesson.parent.mkdir()
    lesson.touch()
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(lab, "CLONE", tmp_path)
    monkeypatch.setattr(lab, "find_spec", lambda name: name)  # installed
    monkeypatch.setattr(lab, "is_root", lambda: False)
    monkeypatch.setattr(lab, "learners", list)
    return tmp_path


@pytest.fixture
def executed(monkeypatch):
    commands: list[list[str]] = []

    def execv(program: str, command: list[str]) -> None:
        assert program == command[0]
        commands.append(command)
        raise SystemExit(0)  # execv does not return

    monkeypatch.setattr(os, "execv", execv)
    return commands


@pytest.mark.parametrize(
    ("words", "passed_on"),
    [
        ([], []),
        (["--"], []),
        (["--", "--no-browser", "--port", "9000"], ["--no-browser", "--port", "9000"]),
        (["--ip=0.0.0.0", "--port", "8888", "--no-browser"], ["--ip=0.0.0.0", "--port", "8888", "--no-browser"]),
        (["--no-browser", "--", "--debug"], ["--no-browser", "--", "--debug"]),
    ],
)
def test_lab_starts_at_lesson_00_and_passes_the_rest_on(words, passed_on, clone, executed, capsys):
    with pytest.raises(SystemExit):
        main(["lab", *words])
    [command] = executed
    assert command[:3] == [sys.executable, "-m", "jupyterlab"]
    assert command[3:5] == [f"--ServerApp.root_dir={clone}", f"--LabApp.default_url=/lab/tree/{lab.FIRST_LESSON}"]
    assert command[5] == f"--ServerApp.contents_manager_class={lab.FILES}"
    assert command[6:] == passed_on
    assert capsys.readouterr().out == f"JupyterLab at {clone / lab.FIRST_LESSON}; Ctrl-C ends it\n"


@pytest.mark.parametrize("given", [[], ["--allow-root"], ["--allow-root=True", "--no-browser"], ["--no-browser"]])
def test_lab_as_root_tells_jupyterlab_that_it_is_meant(given, clone, executed, monkeypatch, capsys):
    monkeypatch.setattr(lab, "is_root", lambda: True)
    with pytest.raises(SystemExit):
        main(["lab", *given])
    [command] = executed
    says_so = given[:1] == [] or not given[0].startswith("--allow-root")
    assert command[6:] == ["--allow-root"] * says_so + given
    assert ("gets --allow-root" in capsys.readouterr().out) == says_so


def test_lab_takes_the_current_folder_where_the_package_has_no_lessons(clone, executed, monkeypatch, tmp_path):
    monkeypatch.setattr(lab, "CLONE", tmp_path / "site-packages")
    monkeypatch.chdir(clone)
    with pytest.raises(SystemExit):
        main(["lab"])
    assert executed[0][3] == f"--ServerApp.root_dir={clone}"


def test_lab_without_lessons_says_where_it_looked(monkeypatch, tmp_path, capsys, executed):
    monkeypatch.setattr(lab, "CLONE", tmp_path)
    monkeypatch.setattr(lab, "learners", list)
    monkeypatch.chdir(tmp_path)
    error = error_of(capsys, "lab")
    assert f"beside the package or in {tmp_path}: `pkv start DIR`" in error
    assert executed == []


def test_lab_without_jupyterlab_says_what_to_install(clone, monkeypatch, capsys, executed):
    monkeypatch.setattr(lab, "find_spec", lambda name: None)
    error = error_of(capsys, "lab")
    assert f"{sys.executable} -m pip install -e '{clone}[lessons]'" in error
    assert "without PY=" in error
    (clone / "pyproject.toml").unlink()  # an installed pkv
    error = error_of(capsys, "lab")
    assert error.endswith(f"install it: {sys.executable} -m pip install jupyterlab ipywidgets matplotlib\n")
    assert executed == []


def test_progress_shows_on_a_terminal_only(monkeypatch, capsys):
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        progress = output.Progress(2)
        progress.step("split_kv")
        progress.end()
        out, err = capsys.readouterr()
        assert out == ""
        assert ("[#.] split_kv" in err) == is_terminal
        assert bool(err) == is_terminal

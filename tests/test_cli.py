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

import pytest

import pkv
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
        ("plan", ["--lengths", "required"]),
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
        ("frobnicate", ["'frobnicate'", "doctor"]),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(argv, words, capsys):
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
    assert all(f"\n    {name} " in out for name in ("doctor", "demo", "plan", "lab"))
    for name in COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("command", ["demo", "plan"])
def test_help_names_every_default(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    out = " ".join(capsys.readouterr().out.split())
    listed = re.split(r" (?=--?[a-z])", out.partition("options:")[2])[1:]
    silent = [text for text in listed if "default" not in text and not text.startswith(("-h", "--help", "--json"))]
    assert [text.split()[0] for text in silent] == (["--lengths"] if command == "plan" else []), "plan requires it"
    if command == "demo":
        assert all(",".join(map(str, lengths)) in out for lengths in demo.LENGTHS.values())


def shell(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **env}
    command = ["bash", "-c", script.replace("pkv", f'"{sys.executable}" -m pkv', 1)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["plan --lengths 5", "plan --lengths 5 --json", "--version", "plan --help", ""])
def test_output_that_cannot_be_written_is_one_line_and_an_error(words, unbuffered):
    done = shell(f"pkv {words} > /dev/full", PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 2
    assert re.fullmatch(r"pkv: error: could not write to stdout \(No space left on device\).*\n", done.stderr)


def test_many_lines_that_cannot_be_written_are_one_line_too():
    done = shell(f"pkv plan --json --lengths {','.join(['5'] * 5000)} > /dev/full")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("words", ["plan --lengths 5", "plan --lengths 5 --json", "--version", "plan --help", "doctor"])
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
    options = "--lengths 5,40,1000 --splits 4 --gpu rtx3060"
    assert main(["plan", *options.split()]) == 0
    shape = pkv.Shape(32, 8, 128, 16, "float16")
    assert capsys.readouterr().out == f"{pkv.plan([5, 40, 1000], shape, splits=4, gpu='rtx3060')}\n"


@pytest.mark.parametrize("stage", list(pkv.STAGES))
def test_plan_as_json(stage, capsys):
    options = f"--lengths 5,0,100 --stage {stage} --gpu h200 --heads 4,2 --head-dim 64 --page-size 8 --dtype bfloat16"
    assert main(["plan", "--json", *options.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    made = pkv.plan([5, 0, 100], pkv.Shape(4, 2, 64, 8, "bfloat16"), stage, gpu="h200")
    assert set(found) == {"stage", "lengths", "items", "plan", *COUNTERS}
    assert (found["stage"], found["lengths"], found["items"]) == (stage, [5, 0, 100], made.n_items)
    assert [found[name] for name in COUNTERS] == [getattr(made.counters, name) for name in COUNTERS]
    assert pkv.Plan.from_json(json.dumps(found["plan"])) == made


def test_plan_takes_every_option(capsys):
    options = "--lengths 100 --stage split_kv --splits 3 --tile 32 --heads 12,12"
    assert main(["plan", "--json", *options.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["items"], found["plan"]["tile"], found["plan"]["shape"]["n_kv_heads"]) == (3, 32, 12)


def test_json_has_neither_nan_nor_infinity(capsys):
    output.print_json({"a": [float("nan"), (float("inf"), 1.5)], "b": {"c": float("-inf"), "d": "nan"}})
    assert json.loads(capsys.readouterr().out) == {"a": [None, [None, 1.5]], "b": {"c": None, "d": "nan"}}


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A folder with lesson 00, as the clone that pkv is imported from; what `lab` would become is kept."""
    lesson = tmp_path / lab.FIRST_LESSON
    lesson.parent.mkdir()
    lesson.touch()
    monkeypatch.setattr(lab, "CLONE", tmp_path)
    monkeypatch.setattr(lab, "find_spec", lambda name: name)  # installed
    monkeypatch.setattr(lab, "is_root", lambda: False)
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
    assert command[5:] == passed_on
    assert capsys.readouterr().out == f"JupyterLab at {clone / lab.FIRST_LESSON}; Ctrl-C ends it\n"


@pytest.mark.parametrize("given", [[], ["--allow-root"], ["--allow-root=True", "--no-browser"], ["--no-browser"]])
def test_lab_as_root_tells_jupyterlab_that_it_is_meant(given, clone, executed, monkeypatch, capsys):
    monkeypatch.setattr(lab, "is_root", lambda: True)
    with pytest.raises(SystemExit):
        main(["lab", *given])
    [command] = executed
    says_so = given[:1] == [] or not given[0].startswith("--allow-root")
    assert command[5:] == ["--allow-root"] * says_so + given
    assert ("gets --allow-root" in capsys.readouterr().out) == says_so


def test_lab_takes_the_current_folder_where_the_package_has_no_lessons(clone, executed, monkeypatch, tmp_path):
    monkeypatch.setattr(lab, "CLONE", tmp_path / "site-packages")
    monkeypatch.chdir(clone)
    with pytest.raises(SystemExit):
        main(["lab"])
    assert executed[0][3] == f"--ServerApp.root_dir={clone}"


def test_lab_without_lessons_says_where_it_looked(monkeypatch, tmp_path, capsys, executed):
    monkeypatch.setattr(lab, "CLONE", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert "in a clone" in error_of(capsys, "lab")
    assert executed == []


def test_lab_without_jupyterlab_says_what_to_install(clone, monkeypatch, capsys, executed):
    monkeypatch.setattr(lab, "find_spec", lambda name: None)
    error = error_of(capsys, "lab")
    assert f"{sys.executable} -m pip install -e '{clone}[lessons]'" in error
    assert "without PY=" in error
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

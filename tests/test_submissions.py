"""`pkv grade`: a folder of submissions becomes a line of CSV for each, whatever is in it."""

import csv
import io
import json
import os
import zipfile

import pytest

from pkv.cli import main
from pkv.commands.grade import default_jobs, harmless
from pkv.course.answering import LARGEST, Stop
from pkv.course.catalogue import all_tasks
from pkv.course.coursefiles import file_names, material
from pkv.course.forks import Server, Source
from pkv.course.gradebook import Grader
from pkv.course.home import unsolved
from pkv.course.submissions import Submission, submissions_in

FIRST = "ex00_paged_kv_cache.py"
SOLUTION = (material("solutions") / FIRST).read_text()
TASKS = [task for task in all_tasks() if task.exercise == "ex00"]
MOST = sum(task.points for task in TASKS)
RIGHT = "    return -(-length // page_size)\n"


@pytest.fixture(autouse=True)
def first_exercise_only(monkeypatch):
    """Of the whole course only exercise 00 is asked: what is tested here is the same for all."""
    for module in ("gradebook", "submissions"):
        monkeypatch.setattr(f"pkv.course.{module}.all_tasks", lambda: TASKS)
    monkeypatch.setattr("pkv.commands.grade.all_tasks", lambda: TASKS)


def put(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def zipped(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)


def graded(capsys, folder, *options):
    """The lines of the CSV, by name."""
    capsys.readouterr()
    assert main(["grade", str(folder), "--seed", "3", *options]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [line["name"] for line in lines] == sorted(line["name"] for line in lines)
    return {line["name"]: line for line in lines}


def test_every_submission_gets_its_line_whatever_the_others_do(tmp_path, monkeypatch, capsys):
    bad = SOLUTION + "\nimport os, pathlib, shutil, sys, time\n"
    put(tmp_path / "solved", {FIRST: SOLUTION})
    put(tmp_path / "skeleton", {FIRST: unsolved()[FIRST]})
    put(tmp_path / "a mutant, with a comma", {FIRST: SOLUTION.replace(RIGHT, RIGHT.replace("-(-length", "(length"))})
    put(tmp_path / "hangs", {FIRST: SOLUTION.replace(RIGHT, "    while True: pass\n")})
    put(tmp_path / "hangs-at-import", {FIRST: SOLUTION + "\nwhile True: pass\n"})
    put(tmp_path / "exits", {FIRST: bad + "os._exit(0)\n"})
    put(tmp_path / "deletes", {FIRST: bad + "shutil.rmtree(pathlib.Path(__file__).parent)\n", "notes.txt": "mine"})
    put(tmp_path / "syntax", {FIRST: "def f(:\n"})
    put(tmp_path / "nothing", {"notes.txt": "I was ill"})
    put(tmp_path / "=1+1", {FIRST: unsolved()[FIRST]})
    put(tmp_path / "Grüße 名 ø", {FIRST: SOLUTION})
    put(tmp_path / "line\nbreak", {FIRST: SOLUTION})
    waits, ask = [], Server.ask
    monkeypatch.setattr(Server, "ask", lambda self, *given: waits.append(given[-1]) or ask(self, *given))
    lines = graded(capsys, tmp_path, "--seconds", "2")
    assert set(waits) == {2}, "what never ends costs no more"
    assert {name: (line["points"], line["solved"]) for name, line in lines.items()} == {
        "solved": (f"{MOST}", "5"), "skeleton": ("0", "0"), "a mutant, with a comma": (f"{MOST - 2}", "4"),
        "hangs": (f"{MOST - 2}", "4"), "hangs-at-import": ("0", "0"), "exits": ("0", "0"), "deletes": (f"{MOST}", "5"),
        "syntax": ("0", "0"), "nothing": ("0", "0"), "'=1+1": ("0", "0"), "Grüße 名 ø": (f"{MOST}", "5"),
        "line break": (f"{MOST}", "5"),
    }  # fmt: skip
    assert {line["most"] for line in lines.values()} == {f"{MOST}"}
    notes = {name: line["note"] for name, line in lines.items() if line["note"]}
    assert notes == {
        "hangs": "ex00_1: no answer within 2 s: does a loop ever end?",
        "hangs-at-import": f"importing {FIRST} takes longer than 2 s",
        "exits": f"importing {FIRST} ended its process (exit code 0)",
        "syntax": f"{FIRST}, line 1: invalid syntax",
        "nothing": "has no exercise file, such as ex00_paged_kv_cache.py",
    }
    assert lines["solved"]["ex00_4"] == "4"
    assert lines["skeleton"]["ex00_4"] == "not started"
    assert lines["a mutant, with a comma"]["ex00_1"] == "runs"
    assert lines["syntax"]["ex00_1"] == "broken"
    assert lines["nothing"]["ex00_1"] == "missing"
    assert sorted(path.name for path in (tmp_path / "deletes").iterdir()) == [FIRST, "notes.txt"]


def test_where_a_file_does_not_run_its_other_tasks_are_not_asked(monkeypatch):
    asked = []

    def ask_source(task, source, specs, seconds):
        asked.append(task.id)
        return [Stop("broken", "the file does not run", of_file=True)]

    monkeypatch.setattr("pkv.course.gradebook.ask_source", ask_source)
    line = Grader(1).grade(Submission("ada", {"ex00": Source(FIRST, b"")}))
    assert asked == [TASKS[0].id]
    assert {mark.state for mark in line.marks} == {"broken"}
    assert line.note == "the file does not run"


def test_as_json_each_task_says_what_is_wrong(tmp_path, capsys):
    put(tmp_path / "ada", {FIRST: SOLUTION.replace(RIGHT, "    return length // page_size\n")})
    assert main(["grade", str(tmp_path), "--seed", "3", "--json", "--out", str(tmp_path / "points.csv")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["seed"], [one["name"] for one in found["submissions"]]) == (3, ["ada"])
    task = found["submissions"][0]["tasks"]["ex00_1"]
    assert (task["points"], task["most"], task["state"], task["diagnosis"]) == (0, 2, "runs", "floor")
    assert "rounds down" in task["text"]
    assert (tmp_path / "points.csv").read_text().splitlines()[1].startswith(f"ada,{MOST - 2},{MOST},4,runs,2,")


@pytest.mark.slow
def test_one_seed_gives_everyone_the_same_numbers(tmp_path, capsys):
    put(tmp_path / "ada", {FIRST: SOLUTION.replace(RIGHT, "    return length * 7\n")})
    said = []
    for _ in range(2):
        main(["grade", str(tmp_path), "--seed", "5", "--json", "--jobs", "1"])
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def names(submissions):
    return {one.name: sorted(one.files) for one in submissions}


def texts(submission):
    return {exercise: source.text.decode() for exercise, source in submission.files.items()}


def test_folders_zips_and_files_are_submissions(tmp_path):
    put(tmp_path / "hopper", {FIRST: "1"})
    put(tmp_path / "moodle_12_file_", {"work/deep/ex00 (1).py": "2"})
    put(tmp_path / "moodle_13_file_", {})
    zipped(tmp_path / "moodle_13_file_/work.zip", {"work/" + FIRST: "3"})
    zipped(tmp_path / "lovelace.zip", {"my work/exercises/" + FIRST: "4", "my work/lessons/ex00.py": "no"})
    put(tmp_path, {"turing_ex00.py": "5", "noether.py": SOLUTION, "scores.csv": "", ".hidden.py": ""})
    put(tmp_path / "__MACOSX", {FIRST: ""})
    found = submissions_in(tmp_path)
    assert names(found) == {
        "hopper": ["ex00"], "moodle_12_file_": ["ex00"], "moodle_13_file_": ["ex00"], "lovelace": ["ex00"],
        "turing": ["ex00"], "noether": ["ex00"],
    }  # fmt: skip
    firsts = {one.name: texts(one)["ex00"][0] for one in found}
    assert [firsts[name] for name in ("hopper", "moodle_12_file_", "moodle_13_file_", "lovelace")] == [
        "1",
        "2",
        "3",
        "4",
    ]
    assert (firsts["turing"], firsts["noether"]) == ("5", SOLUTION[0])


def test_of_a_clone_the_exercises_are_taken_and_not_the_solutions(tmp_path):
    clone = {
        f"exercises/{FIRST}": "mine", f"exercises/{FIRST.replace('.py', '-Copy1.py')}": "a copy",
        f"solutions/{FIRST}": "theirs", "pkv/course/graders/ex00.py": "the grader", "tests/mutants/ex00.py": "wrong",
        ".ipynb_checkpoints/ex00_paged_kv_cache.py": "old",
    }  # fmt: skip
    put(tmp_path / "a" / "clone", clone)
    put(tmp_path / "a" / "other", {f"exercises/deeper/{FIRST}": "mine"})
    zipped(tmp_path / "a" / "zip.zip", {f"clone-main/{name}": text for name, text in clone.items()})
    assert [texts(one) for one in submissions_in(tmp_path / "a")] == [{"ex00": "mine"}] * 3
    assert [(one.name, texts(one)) for one in submissions_in(tmp_path / "a" / "clone")] == [("clone", {"ex00": "mine"})]


def test_files_of_one_folder_are_the_folders_own(tmp_path):
    put(tmp_path / "mine", {FIRST: "1"})
    assert names(submissions_in(tmp_path / "mine")) == {"mine": ["ex00"]}


def test_links_are_not_followed(tmp_path):
    put(tmp_path / "linked", {})
    os.symlink(material("solutions") / FIRST, tmp_path / "linked" / FIRST)
    os.symlink(material("solutions"), tmp_path / "all")
    put(tmp_path / "inner", {})
    os.symlink(material("solutions"), tmp_path / "inner" / "exercises")
    with zipfile.ZipFile(tmp_path / "zip.zip", "w") as archive:
        link = zipfile.ZipInfo(FIRST)
        link.external_attr = 0o120777 << 16
        archive.writestr(link, str(material("solutions") / FIRST))
    found = {one.name: one for one in submissions_in(tmp_path)}
    assert isinstance(found["linked"].files["ex00"], Stop)
    assert "is a link" in found["linked"].files["ex00"].text
    assert "is a link" in found["all"].note
    assert found["inner"].files == found["zip"].files == {}


def test_names_in_a_zip_lead_nowhere(tmp_path):
    zipped(tmp_path / "evil.zip", {f"../../{FIRST}": "x", "/etc/cron.d/ex00.py": "y", f"..\\{FIRST}": "z"})
    before = sorted(tmp_path.rglob("*"))
    (one,) = submissions_in(tmp_path)
    assert isinstance(one.files["ex00"], Source)
    assert "/" not in one.files["ex00"].name
    assert sorted(tmp_path.rglob("*")) == before


def test_what_cannot_be_read_is_said(tmp_path):
    put(tmp_path, {"broken.zip": "no zip", "large_ex00.py": b"#" * (LARGEST + 1)})
    zipped(tmp_path / "bomb.zip", {FIRST: "#" * (LARGEST + 1)})
    put(tmp_path / "a" / FIRST, {"not a file": ""})
    found = {one.name: one for one in submissions_in(tmp_path)}
    assert "the zip cannot be read" in found["broken"].note
    assert "larger than 1 MiB" in found["large"].files["ex00"].text
    assert "larger than 1 MiB" in found["bomb"].files["ex00"].text
    assert found["a"].files == {}


@pytest.mark.parametrize("text", ["=1", "+1", "-1", "@x", "\t=1", "\r=1"])
def test_no_cell_is_a_formula(text):
    assert harmless(text) == f"'{text}"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["nowhere"], "nowhere is no folder"),
        (["."], "holds no submission"),
        ([".", "--out", "nowhere/points.csv"], "no such folder"),
        ([".", "--seconds", "0"], "must be at least 1"),
    ],
)
def test_what_cannot_be_graded_is_an_error(words, error, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["grade", *words]) == 2
    assert error in capsys.readouterr().err


def test_progress_is_shown_on_a_terminal(tmp_path, monkeypatch, capsys):
    put(tmp_path / "ada", {"notes.txt": ""})
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert main(["grade", str(tmp_path), "--seed", "1"]) == 0
    assert "] ada" in capsys.readouterr().err


def test_all_exercises_have_names_that_submissions_are_known_by():
    assert FIRST in file_names().values()


@pytest.mark.parametrize(("n_processors", "jobs"), [(1, 1), (2, 2), (8, 8), (64, 8)])
def test_as_many_are_graded_at_once_as_there_are_processors_up_to_eight(n_processors, jobs, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(n_processors)))
    assert default_jobs() == jobs

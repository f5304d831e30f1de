"""The pytest plugin: what it grades, when it collects graders, what it writes. Few runs: each takes seconds."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from pkv.course.answering import Stop
from pkv.course.catalogue import all_tasks, find_task
from pkv.course.checking import as_text, report_apart
from pkv.course.coursefiles import material
from pkv.course.grading import Grading, texts_of
from pkv.course.home import unsolved
from pkv.course.judging import stopped
from pkv.course.points import Graded, results_json, table
from pkv.course.tasks import GPU_OPTIONAL

ROOT = Path(__file__).resolve().parents[1]
FIRST = "ex00_paged_kv_cache.py"
TASKS = [task for task in all_tasks() if task.exercise == "ex00"]
MOST = sum(task.points for task in TASKS)

# Runs of pytest in one process, each with a configuration of its own: torch is imported once. No submission is loaded
# here, so that none is seen in an old form.
RUNS = """
import contextlib, io, json, os, sys, pytest
for words in json.loads(sys.argv[1]):
    os.chdir(words[0])
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = pytest.main([*words[1:], "-p", "no:cacheprovider"])
    print(json.dumps([int(code), said.getvalue()]))
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """As much of a fresh clone as pytest looks at, with one other test, and untouched exercises."""
    folder = tmp_path_factory.mktemp("clone") / "pkv"
    for name in ("pyproject.toml", "conftest.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "tests" / "exercises", folder / "tests" / "exercises")
    shutil.copytree(ROOT / "solutions", folder / "solutions")
    (folder / "tests" / "test_other.py").write_text("def test_other():\n    assert True\n")
    (folder / "exercises").mkdir()
    for name, text in unsolved().items():
        (folder / "exercises" / name).write_text(text, encoding="utf-8")
    return folder


def run(*runs):
    """(exit code, what was printed) of each run: a folder to work in, then pytest's words."""
    variables = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    variables.pop("PKV_HOME", None)
    words = json.dumps([[str(word) for word in one] for one in runs])
    done = subprocess.run(
        [sys.executable, "-c", RUNS, words], env=variables, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_graders_are_collected_only_when_asked_for(clone):
    found = run(
        [clone],
        [clone, "tests"],
        [clone, "."],
        [clone, "tests", "-k", "property"],
        [clone, "tests/exercises", "--collect-only", "-q"],
        [clone, "--impl", "solutions", "--collect-only", "-q"],
        [clone, "--impl", "solutions", "-k", "ex00_3", "--collect-only", "-q"],
        [clone, "--points-json", clone / "unwritten.json", "--collect-only", "-q"],
    )
    n_tests = sum(len(task.properties) + 1 for task in all_tasks())
    n_of_task = len(find_task("ex00_3").properties) + 1
    for code, said in found[:3]:
        assert code == 0, said
        assert "1 passed" in said
        assert "pkv: grading" not in said
    assert (found[3][0], "no tests ran" in found[3][1] or "1 deselected" in found[3][1]) == (5, True)
    assert [said.count("::test_property[") for _, said in found[4:]] == [n_tests, n_tests, n_of_task, n_tests]
    assert not (clone / "unwritten.json").exists()


def test_a_wrong_way_to_ask_says_the_right_one(clone):
    found = run(
        [clone, "exercises"],
        [clone, f"solutions/{FIRST}"],
        [clone / "exercises"],
        [clone / "solutions"],
        [clone, "tests", "--impl", "solutions"],
        [clone, "tests/test_other.py", "--seed", "3"],
        [clone, "--impl", "nowhere"],
        [clone, "--impl", "solutions", "--points-json", "nowhere/points.json"],
    )
    assert [code for code, _ in found] == [4] * len(found)
    words = [
        "pytest --impl exercises", "pytest --impl solutions", "pytest --impl exercises", "pytest --impl solutions",
        "--impl asks for graders: name tests/exercises", "--seed asks for graders", "--impl nowhere: no such folder",
        "nowhere/points.json: there is no such folder",
    ]  # fmt: skip
    for (_, said), expected in zip(found, words, strict=True):
        assert expected in said


def test_a_fresh_clone_has_no_points(clone, tmp_path):
    ((code, said),) = run(
        [clone, "tests/exercises", "--points-json", tmp_path / "r.json", "--junitxml", tmp_path / "j.xml", "-k", "ex00"]
    )
    assert code == 1
    header = re.search(r"pkv: grading exercises \((.*)\), seed (\d+) \(--seed \2 repeats its numbers\)", said)
    assert header[1] == str(clone / "exercises")
    assert f"sum       0 of {MOST}" in said
    results = json.loads((tmp_path / "r.json").read_text())
    assert results["score"] == 0
    assert [test["status"] for test in results["tests"]] == ["failed"] * len(TASKS)
    assert all("not started" in test["output"] for test in results["tests"])
    assert results["extra_data"]["seed"] == int(header[2])
    cases = ElementTree.parse(tmp_path / "j.xml").findall(".//testcase")
    properties = [{one.get("name"): one.get("value") for one in case.findall(".//property")} for case in cases]
    assert {one["task"]: one["points"] for one in properties} == {task.id: str(task.points) for task in TASKS}
    assert all(case.find("failure") is not None for case in cases)


@pytest.mark.slow
def test_solutions_have_all_points_with_one_worker_or_two(clone, tmp_path):
    common = [clone, "--impl", "solutions", "--seed", "7", "-k", "ex00"]
    found = run(
        [*common, "--points-json", tmp_path / "one.json"],
        [*common, "--points-json", tmp_path / "two.json", "-n", "2", "--junitxml", tmp_path / "two.xml"],
    )
    for code, said in found:
        assert code == 0, said
        assert "pkv: grading solutions" in said
        assert f"sum      {MOST} of {MOST}" in said
    assert (tmp_path / "one.json").read_text() == (tmp_path / "two.json").read_text()
    assert json.loads((tmp_path / "one.json").read_text())["score"] == MOST
    seeds = {one.get("value") for one in properties_in(tmp_path / "two.xml") if one.get("name") == "seed"}
    assert seeds == {"7"}, "all workers grade with the same numbers"


def properties_in(file):
    return ElementTree.parse(file).findall(".//testcase/properties/property")


@pytest.mark.slow
def test_passes_are_counted_against_an_expected_number(clone, tmp_path):
    """A submission by path, one that ends early, one that skips, an empty folder, a part of a task."""
    text = (material("solutions") / FIRST).read_text()
    for name, more in {
        "good": "",
        "ends": "\nimport os\nos._exit(0)\n",
        "skips": "\nimport pytest\npytest.skip()\n",
    }.items():
        (tmp_path / name / "exercises").mkdir(parents=True)
        (tmp_path / name / "exercises" / FIRST).write_text(text + more)
    (tmp_path / "empty").mkdir()
    common = [clone, "tests/exercises", "-k", "ex00", "-q", "--impl"]
    found = run(
        [clone, "-k", "ex00", "-q", f"--impl={tmp_path / 'good'}"],
        [*common, tmp_path / "ends"],
        [*common, tmp_path / "skips"],
        [*common, tmp_path / "empty"],
        [clone, "--impl", tmp_path / "good", "tests/exercises/test_tasks.py::test_property[ex00_1-0]"],
    )
    assert [code for code, _ in found] == [0, 1, 1, 1, 1]
    points = [re.search(r"sum +(\d+) of", said)[1] for _, said in found]
    assert points == [f"{MOST}", "0", "0", "0", "0"]
    assert "importing ex00_paged_kv_cache.py ended its process" in found[1][1]
    assert f"{FIRST} is not there" in found[3][1]
    assert "1 passed" in found[4][1]


def test_where_a_file_does_not_run_its_other_tasks_are_not_asked(tmp_path, monkeypatch):
    asked = []

    def report_of(task, folder, seed):
        asked.append(task.id)
        stop = Stop("broken", "the file does not run", of_file=True)
        return dataclasses.replace(stopped(task, stop, seed), stop=stop)

    monkeypatch.setattr("pkv.course.checking.report_apart", report_of)
    grading = Grading.__new__(Grading)
    grading.reports, grading.folder, grading.seed = {}, tmp_path, 1
    reports = [grading.report(task) for task in TASKS]
    assert asked == [TASKS[0].id]
    assert {report.text for report in reports} == {"the file does not run"}


def test_texts_of_which_the_same_is_said_are_one():
    first, second, third, *_ = (f"ex00_1 {prop.name}: " for prop in TASKS[0].properties)
    texts = [
        f"{first}wrong\nhint 1 of 3",
        f"{second}the same",
        f"{third}the same",
        "ex00_1: not started",
        "ex00_1: not started",
    ]
    assert texts_of(TASKS[0], texts) == (texts[0], "2 properties: the same", texts[3])


def test_a_task_for_a_gpu_does_not_count_without_one(monkeypatch):
    monkeypatch.setattr("pkv.course.points.GPU_VISIBLE", False)
    optional = dataclasses.replace(TASKS[0], tag=GPU_OPTIONAL)
    graded = [Graded(optional, False), Graded(TASKS[1], True)]
    assert "it does not count" in table(graded)
    results = results_json(graded)
    assert [(test["score"], test["max_score"]) for test in results["tests"]] == [(0, 0), (2, 2)]
    assert "status" not in results["tests"][0]
    assert "it does not count" in results["tests"][0]["output"]
    monkeypatch.setattr("pkv.course.points.GPU_VISIBLE", True)
    assert results_json(graded)["tests"][0]["max_score"] == 2


@pytest.mark.gpu
@pytest.mark.parametrize("task", all_tasks(), ids=lambda task: task.id)
def test_on_a_gpu_answers_come_from_forks_too(task):
    """The preloaded process must not have used CUDA before it forks."""
    report = report_apart(task, material("solutions"), 1, seconds=120)
    assert report.is_correct, as_text(report)


def test_gradescope_can_read_the_results():
    """The keys that its specification has, and no others."""
    graded = [Graded(TASKS[0], True), Graded(TASKS[1], False, ("wrong", "wrong again"))]
    results = json.loads(json.dumps(results_json(graded, {"seed": 1})))
    assert results.keys() <= {"score", "tests", "extra_data", "output", "visibility", "stdout_visibility"}
    for test in results["tests"]:
        assert test.keys() <= {"score", "max_score", "status", "name", "number", "output", "output_format", "tags",
                               "visibility", "extra_data"}  # fmt: skip
        assert test["status"] in ("passed", "failed")
    assert results["tests"][1]["output"] == "wrong\nwrong again"

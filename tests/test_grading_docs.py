"""docs/grading.md: its commands exist and parse, its workflow is one, its points are those of the tasks."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from pkv.cli import parse
from pkv.course.catalogue import all_tasks
from pkv.course.entries import STATES
from pkv.course.gradebook import MISSING, NOT_COUNTED
from pkv.course.points import NO_GPU
from pkv.course.tasks import CPU

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "grading.md").read_text()
BLOCKS = [(kind, block) for kind, block in re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)]
WORKFLOW = yaml.safe_load(next(block for kind, block in BLOCKS if kind == "yaml"))
STEPS = WORKFLOW["jobs"]["grade"]["steps"]
GRADED = {step["id"]: step["with"] for step in STEPS if "command-grader" in step.get("uses", "")}
LINES = [line for kind, block in BLOCKS if kind == "sh" for line in block.splitlines()]
LINES += [step["command"].partition("&& ")[2] for step in GRADED.values()]


@pytest.mark.parametrize("block", [block for kind, block in BLOCKS if kind == "sh"], ids=lambda block: "script")
def test_a_script_is_one(block):
    assert subprocess.run(["bash", "-n"], input=block, text=True, check=False).returncode == 0


def words_of(begin):
    """The words of each command that begins so, without its comment."""
    lines = [line.partition("  #")[0].partition(" || ")[0] for line in LINES if line.startswith(begin)]
    return [shlex.split(line.removeprefix(begin)) for line in lines]


@pytest.mark.parametrize("words", words_of(".venv/bin/pkv "), ids=" ".join)
def test_a_command_of_pkv_parses(words):
    assert parse(words).command == "grade"


@pytest.mark.parametrize("words", words_of(".venv/bin/python -m pytest "), ids=" ".join)
def test_a_command_of_pytest_parses(words, request):
    config = request.config
    found = config._parser.parse_known_args(words)
    assert found.file_or_dir == ["tests/exercises"]
    assert (ROOT / "tests" / "exercises").is_dir()
    unknown = config._parser.parse_known_and_unknown_args(words)[1]
    assert unknown == []


def test_commands_are_there():
    assert len(words_of(".venv/bin/pkv ")) >= 2
    assert len(words_of(".venv/bin/python -m pytest ")) >= 14


def test_the_set_up_is_makes():
    makefile = (ROOT / "Makefile").read_text()
    assert [line for line in LINES if line.startswith("make ")]
    for line in [line for line in (*LINES, *(step.get("run", "") for step in STEPS)) if line.startswith("make ")]:
        assert " setup " in line
        assert "TORCH_INDEX=" in line
    assert re.search(r"^setup:", makefile, re.MULTILINE)
    assert "TORCH_INDEX" in makefile


def test_the_workflow_has_a_step_for_each_exercise_with_its_points():
    """As they count on a machine without a GPU, which runners are."""
    for exercise in {task.exercise for task in all_tasks()}:
        points = sum(task.points for task in all_tasks() if task.exercise == exercise and task.tag == CPU)
        assert GRADED[exercise]["max-score"] == points, f"{exercise} has {points} points: say so in docs/grading.md"
        assert GRADED[exercise]["command"].endswith(f"-k {exercise}")
    reporter = STEPS[-1]
    assert reporter["with"]["runners"].split(",") == list(GRADED)
    assert reporter["env"] == {f"{name.upper()}_RESULTS": f"${{{{ steps.{name}.outputs.result }}}}" for name in GRADED}


def test_states_of_the_table_are_those_of_the_command():
    table = re.findall(r"^\| `([\w ]+)` \|", TEXT, re.MULTILINE)
    assert set(table) == {*STATES[:3], MISSING, NOT_COUNTED}
    assert "does not count" in NO_GPU

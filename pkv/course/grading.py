"""The pytest plugin that grades exercises.

    pytest tests/exercises                     grade exercises/ (the learner's folder)
    pytest tests/exercises --impl solutions    grade the solutions
    pytest tests/exercises --impl PATH         grade a submission: any folder with exercise files
    pytest tests/exercises -k ex03_2           one task

One test for each property of each task. Plain `pytest` collects none of them. A task has its points if every one of its
tests has passed: passes are counted, so that a skip, an early exit or an empty folder is worth nothing.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from pkv.course.home import learners_folder, material
from pkv.course.points import Graded, results_json, table

GRADERS = "exercises"  # the folder beside this plugin's conftest.py
STATE = pytest.StashKey["Grading"]()


class Grading:
    """What is graded in this run, and the reports so far."""

    def __init__(self, config: pytest.Config) -> None:
        asked = config.getoption("--impl")
        self.name = asked or "exercises"
        self.folder = folder_of(asked)
        given = config.getoption("--seed")
        self.seed = random.SystemRandom().randrange(1_000_000) if given is None else given
        self.reports: dict[str, Any] = {}
        self.passed: dict[str, int] = {}
        self.texts: dict[str, list[str]] = {}

    def report(self, task: Any) -> Any:
        """The report of a task, made once."""
        from pkv.course.checking import report_apart

        if task.id not in self.reports:
            self.reports[task.id] = report_apart(task, self.folder, self.seed)
        return self.reports[task.id]


def folder_of(asked: str | None) -> Path:
    """The folder that --impl names: the learner's exercises, the solutions, or a path."""
    if asked in (None, "exercises"):
        return learners_folder() / "exercises"
    if asked == "solutions":
        return material("solutions")
    folder = Path(asked).resolve()
    if not folder.is_dir():
        raise pytest.UsageError(
            f"--impl {asked}: no such folder; name one with exercise files, or exercises, or solutions"
        )
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    group = parser.getgroup("pkv", "grading of pkv's exercises")
    group.addoption("--impl", metavar="FOLDER", help="what to grade: exercises (default), solutions, or a folder")
    group.addoption("--seed", type=int, metavar="N", help="repeat the numbers of an earlier run (its header says them)")
    group.addoption("--points-json", metavar="FILE", help="write points, as Gradescope's results.json")


def pytest_configure(config: pytest.Config) -> None:
    """Decide what is graded, with which numbers; --impl alone asks for the graders."""
    config.addinivalue_line("markers", "task(id): a property of an exercise's task")
    if config.getoption("--seed") is None and hasattr(config, "workerinput"):
        config.option.seed = config.workerinput["pkv_seed"]  # all workers grade with the same numbers
    config.stash[STATE] = Grading(config)
    if config.getoption("--impl") and not given_paths(config):
        config.args[:] = [str(graders(config))]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All of xdist's workers grade with the same numbers."""
    node.workerinput["pkv_seed"] = node.config.stash[STATE].seed


def graders(config: pytest.Config) -> Path:
    """The folder of the graders."""
    return config.rootpath / "tests" / GRADERS


def given_paths(config: pytest.Config) -> bool:
    """Were paths named on the command line?"""
    return config.args_source is pytest.Config.ArgsSource.ARGS


def is_grading(config: pytest.Config) -> bool:
    """Are graders asked for, by path or by --impl?"""
    named = [config.invocation_params.dir / arg.partition("::")[0] for arg in config.args]
    return any(path.resolve().is_relative_to(graders(config)) for path in named)


def pytest_report_header(config: pytest.Config) -> str | None:
    """What is graded."""
    if not is_grading(config):
        return None
    state = config.stash[STATE]
    return f"pkv: grading {state.name} ({state.folder}), seed {state.seed} (--seed {state.seed} repeats its numbers)"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """test_property(task, index) becomes one test for each property, named by the task: -k ex03_2 chooses."""
    if {"task", "index"} <= set(metafunc.fixturenames):
        from pkv.course.tasks import all_tasks

        wanted = [(task, index) for task in all_tasks() for index in range(n_tests(task))]
        marks = [
            pytest.param(task, index, id=f"{task.id}-{index}", marks=pytest.mark.task(task.id))
            for task, index in wanted
        ]
        metafunc.parametrize(("task", "index"), marks)


def n_tests(task: Any) -> int:
    """Its properties, and that it is the author's own work."""
    return len(task.properties) + 1


@pytest.fixture
def grading(request: pytest.FixtureRequest) -> Grading:
    """What is being graded."""
    return request.config.stash[STATE]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Points and task go into JUnit's XML."""
    from pkv.course.tasks import find_task

    for item in items:
        marker = item.get_closest_marker("task")
        if marker:
            task = find_task(marker.args[0])
            item.user_properties += [
                ("task", task.id),
                ("title", task.title),
                ("points", task.points),
                ("tag", task.tag),
            ]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The table of points, and the file of them."""
    if hasattr(config, "workerinput") or not is_grading(config):
        return
    graded = points_of(terminalreporter.stats)
    terminalreporter.section("points")
    terminalreporter.write_line(table(graded))
    file = config.getoption("--points-json")
    if file:
        Path(file).write_text(json.dumps(results_json(graded), indent=1) + "\n", encoding="utf-8")


def points_of(stats: dict[str, list[Any]]) -> list[Graded]:
    """What each task has earned: all of its points if as many of its tests have passed as it has, else none."""
    from pkv.course.tasks import all_tasks

    passed: dict[str, set[str]] = {}
    texts: dict[str, list[str]] = {}
    for outcome, reports in stats.items():
        for report in reports:
            task_id = dict(getattr(report, "user_properties", [])).get("task")
            if task_id is None:
                continue
            if outcome == "passed" and report.when == "call":
                passed.setdefault(task_id, set()).add(report.nodeid)
            elif outcome in ("failed", "error"):
                texts.setdefault(task_id, []).append(str(report.longrepr).strip())
    return [
        Graded(task, len(passed.get(task.id, ())) == n_tests(task), tuple(dict.fromkeys(texts.get(task.id, ()))))
        for task in all_tasks()
    ]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run in which graders were asked for and none has run is no success."""
    config = session.config
    if hasattr(config, "workerinput") or not is_grading(config) or exitstatus != 0:
        return
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    graded = points_of(reporter.stats) if reporter else []
    asked = {marker.args[0] for item in session.items if (marker := item.get_closest_marker("task"))}
    if any(not one.is_correct and one.counts for one in graded if one.task.id in asked):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED

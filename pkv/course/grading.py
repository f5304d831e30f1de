"""The pytest plugin that grades exercises.

    pytest tests/exercises                     grade exercises/ (the learner's folder)
    pytest tests/exercises --impl solutions    grade the solutions
    pytest tests/exercises --impl PATH         grade a submission: any folder with exercise files
    pytest tests/exercises -k ex03_2           one task

One test for each property of each task. Plain `pytest` collects none of them. A task has its points if every one of its
tests has passed: passes are counted, so that a skip, an early exit or an empty folder is worth nothing.
"""

import importlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from pkv.course.catalogue import all_tasks, find_task
from pkv.course.coursefiles import material
from pkv.course.home import learners_folder
from pkv.course.points import Graded, results_json, table
from pkv.course.tasks import Task

GRADERS = "tests/exercises"
STATE = pytest.StashKey["Grading"]()
OPTIONS = ("--impl", "--seed", "--points-json")
ANSWERS = ("exercises", "solutions")  # folders of answers: pytest has nothing to collect there


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    group = parser.getgroup("pkv", "grading of pkv's exercises")
    group.addoption("--impl", metavar="FOLDER", help="what to grade: exercises (default), solutions, or a folder")
    group.addoption("--seed", type=int, metavar="N", help="repeat the numbers of an earlier run (its header says them)")
    group.addoption("--points-json", metavar="FILE", help="write points, as Gradescope's results.json")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Are graders asked for, of what, and with which numbers? --impl alone asks for them."""
    config.addinivalue_line("markers", "task(id): a property of an exercise's task")
    given = [option for option in OPTIONS if config.getoption(option) is not None]
    if given and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args[:] = [str(config.rootpath / GRADERS)]
    for path in paths_of(config):
        for name in ANSWERS:
            if path.is_relative_to(config.rootpath / name):
                raise pytest.UsageError(f"{name}/ holds answers, and no tests. Grade it: pytest --impl {name}")
    if is_grading(config):
        config.stash[STATE] = Grading(config)
        config.pluginmanager.register(config.stash[STATE], "pkv-grading")
    elif given:
        raise pytest.UsageError(f"{given[0]} asks for graders: name {GRADERS}, or no path at all")


def paths_of(config: pytest.Config) -> list[Path]:
    """What is to be collected."""
    return [(config.invocation_params.dir / arg.partition("::")[0]).resolve() for arg in config.args]


def is_grading(config: pytest.Config) -> bool:
    """Are graders asked for?"""
    return any(path.is_relative_to(config.rootpath / GRADERS) for path in paths_of(config))


def folder_of(asked: str | None) -> Path:
    """The folder that --impl names: the learner's exercises, the solutions, or a path; or exercises/ in there."""
    if asked in (None, "exercises"):
        return learners_folder() / "exercises"
    if asked == "solutions":
        return material("solutions")
    folder = Path(asked or "").resolve()
    if not folder.is_dir():
        raise pytest.UsageError(
            f"--impl {asked}: no such folder; name one with exercise files, or exercises, or solutions"
        )
    return folder if list(folder.glob("ex*.py")) or not (folder / "exercises").is_dir() else folder / "exercises"


class Grading:
    """What is graded in this run, and how: the hooks of a run that grades."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.name = config.getoption("--impl") or "exercises"
        self.folder = folder_of(config.getoption("--impl"))
        self.file = config.getoption("--points-json")
        if self.file and not Path(self.file).absolute().parent.is_dir():
            raise pytest.UsageError(f"--points-json {self.file}: there is no such folder to write it into")
        told = getattr(config, "workerinput", None)  # to a worker of pytest-xdist
        self.is_worker = told is not None
        given = told["pkv_seed"] if told else config.getoption("--seed")
        self.seed = random.SystemRandom().randrange(1_000_000) if given is None else given
        self.reports: dict[str, Any] = {}
        self.passed: dict[str, set[str]] = {}
        self.texts: dict[str, list[str]] = {}

    def report(self, task: Task) -> Any:
        """The report of a task, made once. Where a file does not run, its other tasks are not asked."""
        from pkv.course.checking import report_apart
        from pkv.course.judging import stopped

        if task.id not in self.reports:
            of_file = [r for r in self.reports.values() if r.task.exercise == task.exercise and r.stop]
            dead = next((r.stop for r in of_file if r.stop.of_file), None)
            self.reports[task.id] = (
                stopped(task, dead, self.seed) if dead else report_apart(task, self.folder, self.seed)
            )
        return self.reports[task.id]

    def graded(self) -> list[Graded]:
        """What each task has earned: its points if as many of its tests have passed as it has. Of -k only those."""
        option = self.config.option
        is_part = option.keyword or option.markexpr or option.deselect or getattr(option, "lf", False)
        is_part = is_part or any("::" in arg for arg in self.config.args)
        return [
            Graded(
                task, len(self.passed.get(task.id, ())) == n_tests(task),
                texts_of(task, self.texts.get(task.id, [])),
            )
            for task in all_tasks()
            if not is_part or task.id in self.passed or task.id in self.texts
        ]  # fmt: skip

    def pytest_report_header(self) -> str:
        """What is graded."""
        return f"pkv: grading {self.name} ({self.folder}), seed {self.seed} (--seed {self.seed} repeats its numbers)"

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """All of xdist's workers grade with the same numbers."""
        node.workerinput["pkv_seed"] = self.seed

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """A task's tests go to one worker, so that it is judged once."""
        if config.getvalue("dist") != "load":
            return None
        scheduler: Any = importlib.import_module("xdist.scheduler").LoadScopeScheduling

        class ByTask(scheduler):  # type: ignore[misc]  # xdist has no types
            def _split_scope(self, nodeid: str) -> str:
                return nodeid.rpartition("-")[0]

        return ByTask(config, log)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count what has passed."""
        task_id = dict(report.user_properties).get("task")
        if not isinstance(task_id, str):
            return
        if report.passed and report.when == "call":
            self.passed.setdefault(task_id, set()).add(report.nodeid)
        elif report.failed:
            self.texts.setdefault(task_id, []).append(str(report.longrepr).strip())

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the points; a run in which not all has passed is no success, whatever the reason."""
        if self.is_worker:
            return
        graded = self.graded()
        if exitstatus == pytest.ExitCode.OK and any(one.counts and not one.is_correct for one in graded):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.file and not self.config.option.collectonly:
            results = results_json(graded, {"graded": self.name, "seed": self.seed})
            Path(self.file).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The table of points."""
        if not self.is_worker and not self.config.option.collectonly:
            terminalreporter.section("points")
            terminalreporter.write_line(table(self.graded()))


def texts_of(task: Task, texts: list[str]) -> tuple[str, ...]:
    """What was said of a task's properties, each text once."""
    from pkv.course.judging import OWN_WORK, folded

    names = [f"{task.id} {name}: " for name in (*(prop.name for prop in task.properties), OWN_WORK)]
    heads = [next(filter(text.startswith, names), "") for text in dict.fromkeys(texts)]
    said = folded([(head, text.removeprefix(head)) for head, text in zip(heads, dict.fromkeys(texts))])
    return tuple(f"{who}: {text}" if who.endswith("properties") else f"{who}{text}" for who, text in said)


def n_tests(task: Task) -> int:
    """Its properties, and that it is the author's own work."""
    return len(task.properties) + 1


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """test_property(task, index) becomes one test for each property, named by the task: -k ex03_2 chooses."""
    if {"task", "index"} <= set(metafunc.fixturenames):
        marks = [
            pytest.param(task, index, id=f"{task.id}-{index}", marks=pytest.mark.task(task.id))
            for task in all_tasks()
            for index in range(n_tests(task))
        ]
        metafunc.parametrize(("task", "index"), marks)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Points and task go into JUnit's XML."""
    for item in items:
        marker = item.get_closest_marker("task")
        if marker:
            task = find_task(marker.args[0])
            facts = {"task": task.id, "title": task.title, "points": task.points, "tag": task.tag}
            item.user_properties += (facts | {"seed": item.config.stash[STATE].seed}).items()


@pytest.fixture
def grading(request: pytest.FixtureRequest) -> Grading:
    """What is being graded."""
    return request.config.stash[STATE]

"""check() and hint() in a notebook, and the same for the command line: one line a property, then what to do next."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pkv._triton import INTERPRETED
from pkv.course import progress
from pkv.course.answering import Answer, Refused, Stop, answers, function_of, names_used
from pkv.course.forks import ask_apart, names_apart
from pkv.course.hints import hints_of, next_hint
from pkv.course.home import learners_folder
from pkv.course.judging import BROKEN, CORRECT, NOT_STARTED, Line, Report, judge
from pkv.course.tasks import Spec, Task, file_of, find_task

TICK, CROSS = "✓", "✗"


def check(task_id: str, function: Callable[..., Any] | None = None, *, seed: int | None = None) -> None:
    """Print whether a task's answer is right, property by property, and what is wrong with it.

    task_id: as "ex03_2". The exercise file is read afresh, so that what was saved last is judged. function: one written
    in the notebook, tried in its place; only the file counts for progress. seed: repeats an earlier check's numbers.
    """
    task = find_task(task_id)
    report = report_here(task, seed, function)
    print(as_text(report))
    if function is None:
        keep(report)
    elif report.is_correct:
        print(f"Keep it: write it into {progress.file_name(task)}, then check({task_id!r}). Only the file counts.")


def hint(task_id: str) -> None:
    """Print the next hint of a task: the idea, then the shape of the answer, then the steps."""
    print(next_hint(task_id))


def show_progress() -> None:
    """Print how far you are, task by task, and what comes next."""
    print(progress.as_text())


def report_here(task: Task, seed: int | None = None, function: Any = None) -> Report:
    """Judge in this process: at once, and an endless loop can be interrupted."""
    seed = new_seed() if seed is None else seed
    try:
        found = function_of(task, learners_folder() / "exercises") if function is None else function
    except Refused as refused:
        return stopped(task, refused.stop, seed)

    def ask(specs: list[Spec]) -> list[Answer | Stop]:
        return list(answers(task, found, specs))

    return judge(task, ask, seed, names_used(found))


def report_apart(task: Task, folder: Path, seed: int, seconds: float | None = None) -> Report:
    """Judge the answer in a folder, asked in a process of its own."""
    return judge(task, lambda specs: ask_apart(task, folder, specs, seconds), seed, names_apart(task, folder))


def stopped(task: Task, stop: Stop, seed: int) -> Report:
    """The report of a task that cannot be asked."""
    lines = tuple(Line(prop.name, False, stop.text) for prop in task.properties)
    return Report(task, stop.state, lines, seed, text=stop.text)


def keep(report: Report) -> None:
    """Write a report's state into the learner's progress."""
    state = report.state
    if state == CORRECT and not INTERPRETED:
        state = "correct on GPU"
    progress.note(report.task.id, state=state)


def as_text(report: Report) -> str:
    """A report as a learner reads it."""
    task = report.task
    if report.state == NOT_STARTED:
        return (
            f"{task.id}: not started. Open {progress.file_name(task)} and write {task.function} "
            f"(about {task.lines} lines), save, then check again. hint({task.id!r}) helps."
        )
    if report.state == BROKEN:
        return f"{task.id}: {report.text}"
    lines = [f"{task.id} {task.title}"]
    lines += [
        f"  {TICK if line.holds else CROSS} {line.name}{': ' + line.text if line.text else ''}" for line in report.lines
    ]
    if report.is_correct:
        return "\n".join([*lines, "  correct"])
    return "\n".join([*lines, f"  hint({task.id!r}) helps; seed={report.seed} repeats these numbers"])


def failure(report: Report, line: Line) -> str:
    """What a grader says of a property that does not hold: the same words, and the next hint."""
    if report.state == NOT_STARTED:
        return as_text(report)
    known = hints_of(report.task.id)
    helps = f"\nhint 1 of {len(known)}: {known[0]}" if known else ""
    return f"{report.task.id} {line.name}: {line.text or report.text}{helps}"


def new_seed() -> int:
    """A seed for fresh numbers."""
    return random.SystemRandom().randrange(1_000_000)


def exercise_file(task: Task) -> Path:
    """Where the learner writes the answer."""
    return file_of(learners_folder() / "exercises", task.exercise)

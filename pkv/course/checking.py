"""check() and hint() in a notebook, and the same for the command line: one line a property, then what to do next."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pkv._triton import GPU_VISIBLE, tl
from pkv.course import progress
from pkv.course.answering import BROKEN, NOT_STARTED, Answer, Question, Stop, answers, function_in, function_of
from pkv.course.catalogue import file_of, find_task
from pkv.course.children import ask_child
from pkv.course.comparing import brief
from pkv.course.forks import AGAIN, ask_apart, names_apart
from pkv.course.hints import hints_of, next_hint
from pkv.course.home import learners_folder
from pkv.course.judging import RUNS, Report, folded, judge
from pkv.course.points import NO_GPU, counts_here
from pkv.course.printed import last_lines
from pkv.course.racing import ON_GPU, Race, race
from pkv.course.sources import names_used
from pkv.course.tasks import GPU_OPTIONAL, Spec, Task
from pkv.course.telling import Line, show

TICK, CROSS = "✓", "✗"
COMPILES_LATER = "correct (in the interpreter; a GPU has not compiled it yet)"


def check(task_id: str, function: Callable[..., Any] | None = None, *, seed: int | None = None) -> None:
    """Print whether a task's answer is right, property by property, and what is wrong with it.

    task_id: as "ex03_2". The exercise file is read afresh, so that what was saved last is judged. function: one written
    in the notebook, tried in its place; only the file counts for progress. seed: repeats an earlier check's numbers.
    """
    task = find_task(task_id)
    if function is not None and not callable(function):
        raise TypeError(f"function must be a function to try in place of {task.function}, got {brief(function)}")
    if isinstance(function, type(tl.sum)):
        raise TypeError(f"function must not be a kernel: pass what launches it, check({task_id!r}, {task.function})")
    report = report_here(task, seed, function)
    print(as_text(report))
    if function is None:
        raced = race_of(report)
        if raced:
            print(f"  {raced.text}")
        keep(report, raced)
    elif report.is_correct:
        print(f"Keep it: write it into {progress.file_name(task)}, then check({task_id!r}). Only the file counts.")


def hint(task_id: str) -> None:
    """Print the next hint of a task: the idea, then the shape of the answer, then the steps."""
    print(next_hint(task_id))


def show_progress() -> None:
    """Print how far you are, task by task, and what comes next."""
    print(progress.as_text())


def report_here(task: Task, seed: int | None = None, function: Any = None, seconds: float | None = None) -> Report:
    """Judge the learner's file, or a function, asked in a fork of this process: whatever ends there, this goes on.

    A fork cannot use a GPU that this process has used: a kernel is asked in a process of its own there, or, if it is a
    function of the notebook, in this one.
    """
    seed, question = new_seed() if seed is None else seed, Question.of(task)
    compiles = GPU_VISIBLE and (task.kernel or task.tag == GPU_OPTIONAL)
    if function is None:
        path = file_of(learners_folder() / "exercises", task.exercise)
        used, name, load = names_apart(task, path.parent), path.name, lambda: function_in(question, path)
    else:
        used, name, load = names_used(function), "", lambda: function

    def ask(specs: list[Spec], seconds: float = seconds or task.seconds) -> list[Answer | Stop]:
        if compiles:
            return list(answers(task, function, specs))
        return ask_child(question, load, [task.arguments(spec) for spec in specs], name, seconds)

    with torch.device("cpu"):  # lessons make the GPU the default; cases say themselves what lies there
        if compiles and function is None:
            return report_apart(task, path.parent, seed, seconds)
        return judge(task, ask, seed, used, again=lambda specs: ask(specs, AGAIN))


def report_apart(task: Task, folder: Path, seed: int, seconds: float | None = None) -> Report:
    """Judge the answer in a folder, asked in a process of its own."""
    return judge(
        task, lambda specs: ask_apart(task, folder, specs, seconds), seed, names_apart(task, folder),
        again=lambda specs: ask_apart(task, folder, specs, AGAIN),
    )  # fmt: skip


def race_of(report: Report) -> Race | None:
    """The answer in the learner's file, timed beside the solution where it is correct, on a GPU."""
    if not (ON_GPU and report.is_correct and report.task.race):
        return None
    with torch.device("cpu"):
        return race(report.task, function_of(report.task, learners_folder() / "exercises"))


def keep(report: Report, raced: Race | None = None) -> None:
    """Write the state that a report shows into the learner's progress."""
    state = report.state
    if report.is_correct and ON_GPU:
        state = progress.FAST_ENOUGH if raced and raced.is_fast_enough else progress.CORRECT_ON_GPU
    elif report.is_correct and not counts_here(report.task):
        state = RUNS
    progress.reached(report.task, state)


def as_text(report: Report, in_shell: bool = False) -> str:
    """A report as a learner reads it, in a notebook or in a shell."""
    task = report.task
    helps = f"`pkv hint {task.id}`" if in_shell else f"hint({task.id!r})"
    again = f"--seed {report.seed}" if in_shell else f"seed={report.seed}"
    if report.state == NOT_STARTED:
        last = "delete the line that raises, save" if task.kernel else "save"
        return (
            f"{task.id}: not started. Open {progress.file_name(task)} and write {task.writes} ({task.about}), {last}, "
            f"then check again. {helps} helps."
        )
    if report.state == BROKEN:
        is_asked = report.stop is not None and report.stop.asked
        lines = [f"{task.id}: {report.text}", *words(report), *printed(report)]
        return "\n".join([*lines, f"  {helps} helps"] if is_asked else lines)
    lines = [f"{task.id} {task.title}", *property_lines(report)]
    if report.is_correct:
        return "\n".join([*lines, *printed(report), f"  {verdict_on(task)}"])
    return "\n".join([*lines, *words(report), *printed(report), f"  {helps} helps; {again} repeats these numbers"])


def property_lines(report: Report) -> list[str]:
    """One line a property; one for all of which the same is said."""
    said = folded([(line.name, line.text) for line in report.lines])
    return [f"  {CROSS} {names}: {text}" if text else f"  {TICK} {names}" for names, text in said]


def words(report: Report) -> list[str]:
    """What the words of the inputs mean, each once."""
    return [f"    {text}" for text in dict.fromkeys(text for line in report.lines for text in line.words)]


def printed(report: Report) -> list[str]:
    """What the answer has printed, in lines, for the input that is shown; for the first one where all is right."""
    lines = last_lines(report.printed)
    where = f", for {show(report.shown)}" if report.shown else ""
    return [f"  printed{where}:", *(f"    {line}" for line in lines)] if lines else []


def verdict_on(task: Task) -> str:
    """What is said of a correct answer: how far that goes here."""
    if not counts_here(task):
        return f"correct, as far as a CPU can tell; it {NO_GPU}"
    return COMPILES_LATER if task.kernel and not ON_GPU else "correct"


def failure(report: Report, line: Line) -> str:
    """What a grader says of a property that does not hold: the same words, and with the first one the next hint."""
    if report.state == NOT_STARTED:
        return as_text(report)
    first = next(one for one in report.lines if not one.holds)
    if line is not first and line.text == first.text:  # as where no question is answered
        return f'{report.task.id} {line.name}: the same as under "{first.name}"'
    known = hints_of(report.task.id) if line is first else ()
    helps = f"\nhint 1 of {len(known)}: {known[0]}" if known else ""
    means = "".join(f"\n    {text}" for text in line.words)
    return f"{report.task.id} {line.name}: {line.text or report.text}{means}{helps}"


def new_seed() -> int:
    """A seed for fresh numbers."""
    return random.SystemRandom().randrange(1_000_000)

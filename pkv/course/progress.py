"""How far a learner is: what every check and hint has noted, as a table, and what comes next.

A task is not started, is broken, runs, is correct, is correct on a GPU, or is fast enough there. Only the file in
exercises/ counts, never a function tried in a notebook. What was reached on a GPU stays reached where the answer is
checked again without one and holds; a check that fails takes the state back.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from pkv._triton import GPU_VISIBLE
from pkv.course import entries
from pkv.course.catalogue import FIRST_IN_LESSON, all_tasks, find_task, in_lessons, name_of_file
from pkv.course.entries import STATES, Entries, Entry
from pkv.course.home import learners_folder
from pkv.course.points import counts_here
from pkv.course.tasks import Task

CORRECT, CORRECT_ON_GPU, FAST_ENOUGH = STATES[-3:]
IN_INTERPRETER = "correct (interpreter)"
MEANS = {  # of states that do not say it themselves
    STATES[1]: "it does not import, or ends without an answer",
    STATES[2]: "it gives answers, and some of them are wrong",
    IN_INTERPRETER: "no GPU has compiled it yet",
}


def read() -> Entries:
    """All entries; a task without one is not started."""
    return entries.read(learners_folder())


def entry_of(task_id: str) -> Entry:
    """The entry of one task."""
    return read().get(task_id, Entry())


def note(task_id: str, **changes: Any) -> None:
    """Keep what has changed of one task: state=, hints=."""
    change_entry(find_task(task_id), lambda entry: dataclasses.replace(entry, **changes))


def reached(task: Task, state: str) -> None:
    """Keep the state that a check has found."""

    def changed(entry: Entry) -> Entry:
        stays = state == CORRECT and entry.state in (CORRECT_ON_GPU, FAST_ENOUGH)
        return entry if stays else dataclasses.replace(entry, state=state)

    change_entry(task, changed)


def took_hint(task: Task, of: int) -> int:
    """Keep that one more hint was read, if there is another; how many of them were read before."""
    before = 0

    def changed(entry: Entry) -> Entry:
        nonlocal before
        before = min(entry.hints, of)
        return dataclasses.replace(entry, hints=before + 1) if before < of else entry

    change_entry(task, changed)
    return before


def change_entry(task: Task, changed: Callable[[Entry], Entry]) -> None:
    """Keep what `changed` makes of one task's entry."""
    entries.change(learners_folder(), lambda known: known | {task.id: changed(known.get(task.id, Entry()))})


def start_over(exercise: str) -> None:
    """The tasks of an exercise are not started again; which hints were read stays."""
    ids = {task.id for task in all_tasks() if task.exercise == exercise}

    def changed(known: Entries) -> Entries:
        return known | {name: dataclasses.replace(known[name], state=STATES[0]) for name in ids & known.keys()}

    entries.change(learners_folder(), changed)


def state_of(task: Task, known: Entries) -> str:
    """The state as it is shown, which also says what a GPU has still to do."""
    entry = known.get(task.id, Entry())
    if not entry.is_done and not counts_here(task):
        return "needs a GPU"
    return IN_INTERPRETER if entry.state == CORRECT and task.kernel else entry.state


def next_step(known: Entries) -> str:
    """What to do next, in a sentence."""
    todo = [task for task in in_lessons() if not known.get(task.id, Entry()).is_done]
    for task in filter(counts_here, todo):
        first = ", with which its lesson begins" if task.id in FIRST_IN_LESSON else ""
        return f"next: {task.id}, {task.title} ({task.about} of {task.writes} in {file_name(task)}){first}"
    if todo:
        return "all is done but what needs a GPU"
    slow = [task.id for task in in_lessons() if GPU_VISIBLE and task.race and state_of(task, known) != FAST_ENOUGH]
    return f"next: make {slow[0]} fast enough, on this GPU" if slow else "all is done"


def file_name(task: Task) -> str:
    """The exercise file of a task, as a learner sees it."""
    return f"exercises/{name_of_file(task.exercise)}"


def as_json() -> dict[str, Any]:
    """Progress as one object."""
    known = read()
    tasks = [
        {"task": task.id, "title": task.title, "points": task.points, "tag": task.tag}
        | dataclasses.asdict(known.get(task.id, Entry()))
        | {"state": state_of(task, known)}
        for task in all_tasks()
    ]
    return {"folder": str(learners_folder()), "solved": n_solved(known), "tasks": tasks, "next": next_step(known)}


def n_solved(known: Entries) -> int:
    """How many tasks are correct."""
    return sum(known.get(task.id, Entry()).is_done for task in all_tasks())


def as_text() -> str:
    """Progress as a table."""
    known = read()
    lines = [f"{'task':8}{'state':22}{'hints':>5}  what"]
    states = {task.id: state_of(task, known) for task in all_tasks()}
    for task in all_tasks():
        n_hints = known.get(task.id, Entry()).hints
        lines.append(f"{task.id:8}{states[task.id]:22}{n_hints or '-':>5}  {task.title}")
    lines += [f"{state}: {means}" for state, means in MEANS.items() if state in states.values()]
    return "\n".join([*lines, f"{n_solved(known)} of {len(all_tasks())} solved; {next_step(known)}"])

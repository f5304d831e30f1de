"""How far a learner is: one file in the learner's folder, written by every check and hint.

A task is not started, runs, is correct, is correct on a GPU, or is fast enough there. Only the file in exercises/
counts, never a function tried in a notebook. What was reached stays reached as long as the answer is checked again and
holds: a check that fails takes the state back.
"""

import contextlib
import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pkv.course.home import learners_folder
from pkv.course.tasks import Task, all_tasks, find_task

FILE = ".pkv-progress.json"
STATES = ("not started", "broken", "runs", "correct", "correct on GPU", "fast enough")


@dataclass(frozen=True)
class Entry:
    """What is known of one task. state: one of STATES; hints: how many were read."""

    state: str = "not started"
    hints: int = 0

    @property
    def is_done(self) -> bool:
        return STATES.index(self.state) >= STATES.index("correct")


def read() -> dict[str, Entry]:
    """All entries; what is not in the file, or not to be read, is not started."""
    try:
        found = json.loads((learners_folder() / FILE).read_text(encoding="utf-8"))
        return {task_id: entry_from(found[task_id]) for task_id in found if isinstance(found[task_id], dict)}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def entry_from(found: dict[str, Any]) -> Entry:
    """An entry from a file that anyone may have edited."""
    state, hints = found.get("state"), found.get("hints")
    return Entry(state if state in STATES else "not started", hints if isinstance(hints, int) and hints >= 0 else 0)


def entry_of(task_id: str) -> Entry:
    """The entry of one task."""
    return read().get(task_id, Entry())


def note(task_id: str, **changes: Any) -> None:
    """Write what has changed. A folder that cannot be written to costs the progress, not the check."""
    find_task(task_id)
    entries = read()
    entries[task_id] = dataclasses.replace(entries.get(task_id, Entry()), **changes)
    file = learners_folder() / FILE
    text = json.dumps({name: dataclasses.asdict(entries[name]) for name in sorted(entries)}, indent=1)
    with contextlib.suppress(OSError):
        beside = file.with_suffix(f".{os.getpid()}")
        beside.write_text(text + "\n", encoding="utf-8")
        beside.replace(file)  # whole, or not at all


def next_step(entries: dict[str, Entry]) -> str:
    """What to do next, in a sentence."""
    todo = [task for task in all_tasks() if not entries.get(task.id, Entry()).is_done]
    if not todo:
        return "All tasks are solved."
    task = todo[0]
    return f"next: {task.id}, {task.title} (about {task.lines} lines of {task.function} in {file_name(task)})"


def file_name(task: Task) -> str:
    """The exercise file of a task, as a learner sees it."""
    from pkv.course.tasks import file_of

    return f"exercises/{file_of(learners_folder() / 'exercises', task.exercise).name}"


def as_json() -> dict[str, Any]:
    """Progress as one object."""
    entries = read()
    tasks = [
        {"task": task.id, "title": task.title, "points": task.points, "tag": task.tag}
        | dataclasses.asdict(entries.get(task.id, Entry()))
        for task in all_tasks()
    ]
    done = [entries.get(task.id, Entry()).is_done for task in all_tasks()]
    return {"folder": str(learners_folder()), "solved": sum(done), "tasks": tasks, "next": next_step(entries)}


def as_text() -> str:
    """Progress as a table."""
    entries = read()
    lines = [f"{'task':8}{'state':16}{'hints':>5}  what"]
    for task in all_tasks():
        entry = entries.get(task.id, Entry())
        lines.append(f"{task.id:8}{entry.state:16}{entry.hints or '-':>5}  {task.title}")
    solved = sum(entries.get(task.id, Entry()).is_done for task in all_tasks())
    return "\n".join([*lines, f"{solved} of {len(all_tasks())} solved; {next_step(entries)}"])


def folder_file() -> Path:
    """Where progress is kept."""
    return learners_folder() / FILE

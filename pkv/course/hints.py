"""Hints in three levels: the idea, the shape of the answer, the steps. They lie in hints/, a file for each exercise.

## ex00_1
1. the idea
2. the shape of the answer
3. the steps
"""

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

from pkv.course import progress
from pkv.course.catalogue import find_task, name_of_file
from pkv.course.coursefiles import material
from pkv.course.home import learners_folder

LEVELS = 3
FOLDER = Path(__file__).resolve().parent / "hints"


@dataclass(frozen=True)
class Hint:
    """One hint of a task. level: 1, 2, ...; of: how many there are; solution: its file, after the last hint only."""

    task: str
    level: int
    of: int
    text: str
    solution: str | None = None

    def __str__(self) -> str:
        said = [f"hint {self.level} of {self.of}: {self.text}"] if self.of else []
        if self.solution:
            said.append(f"There are no more hints. A solution is {find_task(self.task).writes} in {self.solution}")
        return "\n".join(said)


@functools.cache
def hints_of(task_id: str) -> tuple[str, ...]:
    """The hints of a task, the mildest first."""
    text = (FOLDER / f"{find_task(task_id).exercise}.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(task_id)}\s*$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if section is None:
        return ()
    parts = re.split(r"^\d\. ", section[1], flags=re.MULTILINE)[1:]
    return tuple(" ".join(part.split()) if "```" not in part else part.strip() for part in parts)


def next_hint(task_id: str) -> Hint:
    """The next hint that the learner has not seen, which is noted; after the last, that and where the solution is."""
    known = hints_of(task_id)
    seen = progress.took_hint(find_task(task_id), len(known))
    if seen == len(known):
        return Hint(task_id, seen, len(known), known[-1] if known else "", solution_file(task_id))
    return Hint(task_id, seen + 1, len(known), known[seen])


def solution_file(task_id: str) -> str:
    """Where a task's solution is: from the learner's folder if it lies there, as in a clone."""
    file = material("solutions") / name_of_file(find_task(task_id).exercise)
    if file.is_relative_to(learners_folder()):
        return os.path.relpath(file, learners_folder())
    return str(file)

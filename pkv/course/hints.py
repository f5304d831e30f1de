"""Hints in three levels: the idea, the shape of the answer, the steps. They lie in hints/, a file for each exercise.

## ex00_1
1. the idea
2. the shape of the answer
3. the steps
"""

import functools
import re
from pathlib import Path

from pkv.course import progress
from pkv.course.tasks import find_task

LEVELS = 3
FOLDER = Path(__file__).resolve().parent / "hints"


@functools.cache
def hints_of(task_id: str) -> tuple[str, ...]:
    """The hints of a task, the mildest first."""
    text = (FOLDER / f"{find_task(task_id).exercise}.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(task_id)}\s*$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if section is None:
        return ()
    parts = re.split(r"^\d\. ", section[1], flags=re.MULTILINE)[1:]
    return tuple(" ".join(part.split()) if "```" not in part else part.strip() for part in parts)


def next_hint(task_id: str) -> str:
    """The next hint that the learner has not seen, which is recorded; after the last, where the solution is."""
    task, known = find_task(task_id), hints_of(task_id)
    seen = progress.entry_of(task_id).hints
    if seen >= len(known):
        last = f"hint {len(known)} of {len(known)}: {known[-1]}\n" if known else ""
        return (
            f"{last}There are no more hints. solutions/ has a solution, in the file of the same name: {task.function}."
        )
    progress.note(task_id, hints=seen + 1)
    return f"hint {seen + 1} of {len(known)}: {known[seen]}"

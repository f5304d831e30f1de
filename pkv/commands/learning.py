"""What the learner's commands share: the folder, tasks by name, and a file that cannot be written."""

import contextlib
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from pkv.commands import CommandError
from pkv.course.catalogue import all_tasks, find_tasks
from pkv.course.home import learners_folder
from pkv.course.tasks import Task


def folder() -> Path:
    """The learner's folder; the error says how to get one."""
    try:
        return learners_folder()
    except FileNotFoundError as error:
        raise CommandError(str(error)) from None


def tasks_of(names: list[str]) -> list[Task]:
    """Tasks, each once, by id ("ex03_2") or exercise ("ex03"); all of them where none is named."""
    if not names:
        return list(all_tasks())
    try:
        return list(dict.fromkeys(task for name in names for task in find_tasks(name)))
    except ValueError as error:
        raise CommandError(str(error)) from None


@contextlib.contextmanager
def writing(where: Path, remedy: str) -> Iterator[None]:
    """In here files are written: what the system refuses is one line."""
    try:
        yield
    except OSError as error:
        said = f"cannot write in {where} ({error.strerror}): {remedy}" if error.errno else str(error)
        raise CommandError(said) from None


def as_typed() -> str:
    """How `pkv` is typed here: by its name only where the shell finds this one."""
    found = shutil.which("pkv")
    if found is not None and Path(found).parent == Path(sys.executable).parent:
        return "pkv"
    return f"{shlex.quote(sys.executable)} -m pkv"

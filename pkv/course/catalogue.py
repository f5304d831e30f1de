"""All tasks: in order, by name, and the files that hold them."""

import functools
from pathlib import Path

from pkv.course.coursefiles import file_names
from pkv.course.tasks import Task

FIRST_IN_LESSON = {"ex01_3"}  # elsewhere lessons come to tasks in the order of their numbers


@functools.cache
def all_tasks() -> tuple[Task, ...]:
    """Every task, in the course's order."""
    # not sooner: a process that asks an answer imports this module, and must not hold any right one
    from pkv.course.graders import ex00, ex01, ex02, ex03, ex04, ex05

    return tuple(task for module in (ex00, ex01, ex02, ex03, ex04, ex05) for task in module.TASKS)


def in_lessons() -> list[Task]:
    """Every task, in the order in which lessons come to them."""
    return sorted(all_tasks(), key=lambda task: (task.exercise, task.id not in FIRST_IN_LESSON))


def find_task(task_id: str) -> Task:
    """The task of that id; ValueError lists those that there are."""
    found = [task for task in all_tasks() if task.id == task_id]
    if not found:
        near = [task.id for task in all_tasks() if str(task_id).startswith(task.exercise)]
        names = near or [task.id for task in all_tasks()]
        raise ValueError(f"task {task_id!r} does not exist; choose one of {', '.join(names)}")
    return found[0]


def find_tasks(name: str) -> list[Task]:
    """The task of an id, "ex03_2", or all of an exercise, "ex03"."""
    return [task for task in all_tasks() if task.exercise == name] or [find_task(name)]


def name_of_file(exercise: str) -> str:
    """The name of an exercise's file, "ex00_paged_kv_cache.py"."""
    return file_names().get(exercise, f"{exercise}.py")


def file_of(folder: Path, exercise: str) -> Path:
    """The file of an exercise in a folder: by its name, or else one that begins like it ("ex00_mine.py", "ex00.py")."""
    named = folder / name_of_file(exercise)
    if named.is_file():  # beside a copy of it, such as JupyterLab's ex00_paged_kv_cache-Copy1.py
        return named
    found = sorted(path for path in folder.glob(f"{exercise}*.py") if path.stem.partition("_")[0] == exercise)
    return found[0] if found else named

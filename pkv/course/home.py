"""Where a learner works: the folder with exercises/ in it, begun and restored from what the course brings.

The learner's folder is PKV_HOME, or else the nearest one, from the working folder up, whose exercises/ is of this
course, or else this clone. What an exercise was at the beginning is made from its solution, so that it is known also in
a clone whose exercises are solved by now.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from pkv.course.catalogue import file_of
from pkv.course.coursefiles import LESSONS, PACKAGE, file_names, material
from pkv.course.skeletons import skeleton

STARTED = ("lessons", "exercises")  # what a learner's own copy holds
PROGRESS = ".pkv-progress.json"


def unsolved() -> dict[str, str]:
    """Every exercise as the course brings it: {file name: text}."""
    folder = material("solutions")
    return {name: skeleton((folder / name).read_text(encoding="utf-8")) for name in file_names().values()}


def learners_folder() -> Path:
    """The folder that holds the learner's exercises/. FileNotFoundError says how to get one."""
    if given := os.environ.get("PKV_HOME"):
        return told(Path(given).expanduser())
    here = Path.cwd()
    for folder in (here, *here.parents, PACKAGE.parent):
        if is_learners(folder):
            return folder
    raise FileNotFoundError(
        f"no exercises in {here} or above: `pkv start DIR` makes a folder with lessons and exercises; work inside it"
    )


def told(folder: Path) -> Path:
    """The folder that PKV_HOME names, if it will do."""
    if (folder / "exercises").is_dir():
        return folder.resolve()
    if not folder.is_dir():
        fault = "which is no folder"
    elif is_learners(folder.parent) and folder.name == "exercises":
        fault = f"whose parent, {folder.parent}, is meant"
    else:
        fault = "which has no folder exercises"
    raise FileNotFoundError(f"PKV_HOME is {folder}, {fault}: set it to a folder that `pkv start` made, or unset it")


def is_learners(folder: Path) -> bool:
    """Does it hold exercises of this course? Another project's exercises/ is none of ours."""
    exercises = folder / "exercises"
    if not exercises.is_dir():
        return False
    return (folder / PROGRESS).exists() or any((exercises / name).is_file() for name in file_names().values())


def start(folder: Path) -> list[str]:
    """Put lessons and exercises into a folder; the names of the files. FileExistsError where it holds either."""
    there = [part for part in STARTED if (folder / part).exists()]
    if there:
        raise FileExistsError(f"{folder} holds {' and '.join(there)} already: name another folder")
    files = {f"lessons/{path.name}": path.read_bytes() for path in sorted(material("lessons").glob(LESSONS))}
    if not files:
        raise FileNotFoundError(f"this installation of pkv brings no lessons: there are none in {material('lessons')}")
    files |= {f"exercises/{name}": text.encode() for name, text in unsolved().items()}
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:  # all of it, or nothing
        half_made = Path(tempfile.mkdtemp(prefix=".pkv-start-", dir=folder))
        stack.callback(shutil.rmtree, half_made, ignore_errors=True)
        for name, content in files.items():
            (half_made / name).parent.mkdir(exist_ok=True)
            (half_made / name).write_bytes(content)
        for part in STARTED:
            (half_made / part).rename(folder / part)
        if not (folder / PROGRESS).exists():  # by which the folder is known, whatever becomes of the files
            (folder / PROGRESS).write_text("{}\n", encoding="utf-8")
    return list(files)


def restore(exercise: str) -> tuple[Path, Path | None]:
    """Write an exercise of the learner's folder as the course brings it; that file, and where the old text is now.

    None: there was no file, or it was as it is. ValueError lists the exercises there are.
    """
    names = file_names()
    if exercise not in names:
        choice = f"choose one of {', '.join(names)}"
        if exercise.partition("_")[0] in names:
            choice = f"a whole file is restored, such as {exercise.partition('_')[0]}"
        raise ValueError(f"exercise {exercise!r} does not exist: {choice}")
    folder = learners_folder() / "exercises"
    old, new, text = file_of(folder, exercise), folder / names[exercise], unsolved()[names[exercise]].encode()
    kept = None
    if old.is_file():
        if old == new and old.read_bytes() == text:
            return new, None
        kept = keep_beside(old)
    half_written = new.with_name(f".{new.name}.{os.getpid()}")
    half_written.write_bytes(text)
    half_written.replace(new)
    if old != new:
        old.unlink(missing_ok=True)
    return new, kept


def keep_beside(file: Path, ending: str = "") -> Path:
    """A copy beside a file, under the first free number: NAME.1, which no longer counts as an exercise."""
    for number in range(1, 10_000):
        copy = file.with_name(f"{file.name}{ending}.{number}")
        with contextlib.suppress(FileExistsError), copy.open("xb") as stream:
            stream.write(file.read_bytes())
            return copy
    raise FileExistsError(f"{file.parent} has copies of {file.name} up to number {number}: delete some")

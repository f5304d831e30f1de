"""A folder of submissions, as course platforms hand them out: who sent which exercise files.

A submission is a folder, a zip, or loose files. Files are read as text, never imported, unpacked or followed: what a
submission holds is its author's, names and links too.

    hopper/ex00_paged_kv_cache.py                       a folder (Gradescope, Moodle, a clone made by GitHub Classroom)
    lovelace.zip                                        a zip, at whatever depth its files lie
    turing_ex00_paged_kv_cache.py  turing_ex01.py       loose files, together by what stands before ex00
"""

import os
import re
import stat
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pkv.course.answering import BROKEN, LARGEST, Refused, Stop, read
from pkv.course.catalogue import all_tasks
from pkv.course.forks import Source
from pkv.course.replies import shown

EXERCISE = re.compile(r"(?<![A-Za-z0-9])ex\d\d(?!\d)", re.IGNORECASE)
NOT_ANSWERS = {"solutions", "tests", "pkv", "lessons", "__MACOSX", "__pycache__"}  # of a whole clone
MOST_FILES = 20_000  # that one submission may have

Files = dict[str, Callable[[], bytes]]  # path in the submission -> its content; Refused where there is none


@dataclass(frozen=True)
class Submission:
    """Who sent it, its files, and what is to be said of it. files: exercise -> its source, or why there is none."""

    name: str
    files: dict[str, Source | Stop] = field(default_factory=dict)
    note: str = ""


def submissions_in(folder: Path) -> list[Submission]:
    """Every submission in a folder, by name; the folder itself where it holds exercises, as a learner's does."""
    if any(is_exercise(path.name) for path in folder.glob("exercises/*.py")):
        return [submission(shown(folder.resolve().name), files_of_folder(folder))]
    found: list[Submission] = []
    loose: dict[str, Files] = {}
    for entry in sorted(folder.iterdir()):
        name = shown(entry.name)
        if entry.name.startswith(".") or entry.name in NOT_ANSWERS:
            continue
        if entry.is_symlink():
            found.append(Submission(name, note="is a link, which is not followed"))
        elif entry.is_dir():
            found.append(submission(name, files_of_folder(entry)))
        elif entry.suffix.lower() == ".zip":
            found.append(of_zip(entry))
        elif entry.suffix.lower() == ".py":
            loose.setdefault(author_of(entry, folder), {})[entry.name] = reader(entry)
    return sorted([*found, *(submission(name, files) for name, files in loose.items())], key=lambda one: one.name)


def author_of(file: Path, folder: Path) -> str:
    """Whose a loose file is: what stands before ex00; nothing there: the folder's; no ex00: its own."""
    name = EXERCISE.search(file.stem)
    before = file.stem[: name.start()].strip(" _-.") if name else file.stem
    return shown(before or folder.resolve().name)


def submission(name: str, files: Files, note: str = "") -> Submission:
    """A submission of all its files: one is chosen for each exercise."""
    chosen = chosen_of(files)
    if not chosen and not note:
        note = "has no exercise file, such as ex00_paged_kv_cache.py"
    return Submission(name, {exercise: source_of(path, files) for exercise, path in chosen.items()}, note)


def source_of(path: str, files: Files) -> Source | Stop:
    """The text of a file, or why there is none."""
    try:
        return Source(re.sub(r"[^\w.-]", "_", path.rpartition("/")[2]), files[path]())
    except Refused as refused:
        return refused.stop


def chosen_of(files: Files) -> dict[str, str]:
    """The file of each exercise: best one in a folder exercises, then the least deep, then the shortest name.

    By the file's name; a file that no name tells is known by the functions in it.
    """
    chosen: dict[str, str] = {}
    answers = [path for path in files if path.lower().endswith(".py") and not NOT_ANSWERS & {*path.split("/")[:-1]}]
    for path in sorted(
        answers, key=lambda path: ("exercises" not in path.split("/"), path.count("/"), len(path), path)
    ):
        exercise = is_exercise(path.rpartition("/")[2])
        if exercise:
            chosen.setdefault(exercise, path)
    unnamed = [path for path in answers if not is_exercise(path.rpartition("/")[2])]
    for path in unnamed if len(unnamed) <= len(exercises()) else ():
        source = source_of(path, files)
        exercise = exercise_of_text(source.text) if isinstance(source, Source) else None
        if exercise:
            chosen.setdefault(exercise, path)
    return dict(sorted(chosen.items()))


def exercises() -> list[str]:
    """All exercises that have tasks."""
    return list(dict.fromkeys(task.exercise for task in all_tasks()))


def is_exercise(name: str) -> str | None:
    """The exercise that a file's name tells."""
    found = EXERCISE.search(name)
    return found[0].lower() if found and found[0].lower() in exercises() else None


def exercise_of_text(text: bytes) -> str | None:
    """The exercise most of whose functions a file has."""
    defined = set(re.findall(rb"^def (\w+)", text, re.MULTILINE))
    counts = {
        exercise: sum(task.function.encode() in defined for task in all_tasks() if task.exercise == exercise)
        for exercise in exercises()
    }
    best = max(counts, key=lambda exercise: counts[exercise])
    return best if counts[best] else None


def files_of_folder(folder: Path) -> Files:
    """Every Python file in a folder; those of a zip in it where there is no other."""
    found: Files = {}
    zips: list[Path] = []
    for n_seen, (where, folders, names) in enumerate(os.walk(folder)):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in NOT_ANSWERS)
        for name in sorted(names):
            path = Path(where, name)
            if name.lower().endswith(".py"):
                found[path.relative_to(folder).as_posix()] = reader(path)
            elif name.lower().endswith(".zip"):
                zips.append(path)
        if n_seen > MOST_FILES:
            break
    if not found:
        for path in zips:
            found |= files_of_zip(path)
    return found


def reader(path: Path) -> Callable[[], bytes]:
    """What reads a file, which must be one and no link."""

    def content() -> bytes:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise Refused(Stop(BROKEN, f"{shown(path.name)} is a link, which is not followed", True))
        return read(path)

    return content


def of_zip(path: Path) -> Submission:
    """The submission of a zip."""
    try:
        return submission(shown(path.stem), files_of_zip(path))
    except (zipfile.BadZipFile, OSError, NotImplementedError) as error:
        return Submission(shown(path.stem), note=f"the zip cannot be read: {shown(error)}")


def files_of_zip(path: Path) -> Files:
    """Every Python file in a zip, of which nothing is unpacked."""
    found: Files = {}
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist()[:MOST_FILES]:
            name = entry.filename.replace("\\", "/")
            is_plain = stat.S_IFMT(entry.external_attr >> 16) in (0, stat.S_IFREG)
            if is_plain and name.lower().endswith(".py") and not any(part.startswith(".") for part in name.split("/")):
                found[name] = zip_reader(path, entry)
    return found


def zip_reader(path: Path, entry: zipfile.ZipInfo) -> Callable[[], bytes]:
    """What reads a file in a zip, as far as an exercise file may go."""

    def content() -> bytes:
        name = shown(entry.filename.rpartition("/")[2])
        try:
            with zipfile.ZipFile(path) as archive, archive.open(entry) as stream:
                text = stream.read(LARGEST + 1)
        except Exception as error:  # encrypted, damaged, packed in an unknown way
            raise Refused(Stop(BROKEN, f"{name} in the zip cannot be read: {shown(error)}", True)) from None
        if len(text) > LARGEST:
            raise Refused(Stop(BROKEN, f"{name} is larger than {LARGEST >> 20} MiB", True))
        return text

    return content

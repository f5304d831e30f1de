"""Where a learner works: the folder with exercises/ in it, and what the course brings.

The learner's folder is PKV_HOME, or else the folder with exercises/ that is nearest above the working folder, or else
this clone. An installed pkv without a clone brings lessons, exercises and solutions in its own folder.
"""

import os
import shutil
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
PARTS = ("lessons", "exercises", "solutions")
STARTED = ("lessons", "exercises")  # what a learner's own copy holds
FIRST = "ex00_paged_kv_cache.py"


def material(part: str) -> Path:
    """The folder of what the course brings: "lessons", "exercises" as they were, or "solutions"."""
    brought = PACKAGE / "course" / "material" / part
    return brought if brought.is_dir() else PACKAGE.parent / part


def learners_folder() -> Path:
    """The folder that holds the learner's exercises/. FileNotFoundError says how to get one."""
    if "PKV_HOME" in os.environ:
        return Path(os.environ["PKV_HOME"]).resolve()
    here = Path.cwd().resolve()
    for folder in (here, *here.parents):
        if (folder / "exercises" / FIRST).is_file():
            return folder
        if (folder / FIRST).is_file():  # in exercises/ itself, by whatever name
            return folder.parent
    if (PACKAGE.parent / "exercises" / FIRST).is_file():
        return PACKAGE.parent
    raise FileNotFoundError("no exercises here: `pkv start DIR` makes a folder with lessons and exercises to work in")


def start(folder: Path) -> list[str]:
    """Copy lessons and exercises into a new folder; the names of what was copied. FileExistsError where one is there."""
    there = [part for part in STARTED if (folder / part).exists()]
    if there:
        raise FileExistsError(f"{folder} holds {' and '.join(there)} already: name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    ignored = shutil.ignore_patterns("src", "build.py", "__pycache__", ".*")
    for part in STARTED:
        shutil.copytree(material(part), folder / part, ignore=ignored)
    return sorted(str(path.relative_to(folder)) for part in STARTED for path in (folder / part).iterdir())

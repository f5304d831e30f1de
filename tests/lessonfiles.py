"""Which text of a lesson or an exercise the tests judge. Whoever works through one changes it, and that is no fault.

as it was staged or committed                          -> the file
changed, and lessons/src/NAME.py too: a lesson in work -> the file
changed or deleted, its source as committed: a reader  -> what git has
no git                                                 -> the file

An exercise, made from solutions/NAME.py, is judged alike.
"""

from __future__ import annotations

import subprocess
import warnings
from pathlib import Path


def git(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(root), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=60)
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, "", "git is not installed")


def edited_by_reader(root: Path, path: str, source: str) -> bool:
    """Does `path` differ from what is staged, while `source`, from which it is made, is as committed?"""
    differs = 1  # of git diff --quiet: 0 means equal, more that git cannot tell
    if git(root, "diff", "--quiet", "--", path).returncode != differs:
        return False
    return git(root, "diff", "--quiet", "HEAD", "--", source).returncode == 0


def judged_text(root: Path, name: str) -> str:
    """The notebook to judge, as text; a warning where that is not the file."""
    return judged(root, f"lessons/{name}.ipynb", f"lessons/src/{name}.py")


def judged_exercise(root: Path, name: str) -> str:
    """The same of an exercise file, which is made from its solution: a reader solves it."""
    return judged(root, f"exercises/{name}", f"solutions/{name}")


def judged(root: Path, path: str, source: str) -> str:
    """The file, or what git has of it where a reader has changed it."""
    if edited_by_reader(root, path, source):
        staged = git(root, "show", f":{path}")
        if staged.returncode == 0:
            warnings.warn(
                f"{path} holds your own edits, so the committed one was tested instead. They stay yours; "
                f"`git checkout {path}` restores it, `git add {path}` has yours tested",
                stacklevel=3,
            )
            return staged.stdout
    return (root / path).read_text(encoding="utf-8")


def without_source(root: Path, names: list[str]) -> list[str]:
    """Notebooks in git that no source describes. One that git does not know is a reader's own."""
    known = git(root, "ls-files", "lessons/*.ipynb").stdout.split("\n")
    return sorted({Path(line).stem for line in known if line} - set(names))

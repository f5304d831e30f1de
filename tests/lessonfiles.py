"""Which text of a lesson the tests judge. Whoever works through a lesson changes its notebook, and that is no fault.

as it was staged or committed                          -> the file
changed, and lessons/src/NAME.py too: a lesson in work -> the file
changed or deleted, its source as committed: a reader  -> what git has
no git                                                 -> the file
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


def edited_by_reader(root: Path, name: str) -> bool:
    """Does lessons/NAME.ipynb differ from what is staged, while lessons/src/NAME.py is as committed?"""
    differs = 1  # of git diff --quiet: 0 means equal, more that git cannot tell
    if git(root, "diff", "--quiet", "--", f"lessons/{name}.ipynb").returncode != differs:
        return False
    return git(root, "diff", "--quiet", "HEAD", "--", f"lessons/src/{name}.py").returncode == 0


def judged_text(root: Path, name: str) -> str:
    """The notebook to judge, as text; a warning where that is not the file."""
    path = f"lessons/{name}.ipynb"
    if edited_by_reader(root, name):
        staged = git(root, "show", f":{path}")
        if staged.returncode == 0:
            warnings.warn(
                f"{path} holds your own edits, so the committed one was tested instead. They stay yours; "
                f"`git checkout {path}` restores the lesson, `git add {path}` has yours tested",
                stacklevel=2,
            )
            return staged.stdout
    return (root / path).read_text(encoding="utf-8")


def without_source(root: Path, names: list[str]) -> list[str]:
    """Notebooks in git that no source describes. One that git does not know is a reader's own."""
    known = git(root, "ls-files", "lessons/*.ipynb").stdout.split("\n")
    return sorted({Path(line).stem for line in known if line} - set(names))

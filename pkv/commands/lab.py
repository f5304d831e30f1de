"""`pkv lab`: JupyterLab at lesson 00, run by the Python that runs pkv, so that lessons find what is installed here."""

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from pkv.commands import CommandError
from pkv.commands.output import say
from pkv.course.home import learners_folder

HELP = "open JupyterLab at the lessons"
FIRST_LESSON = "lessons/00_paged_kv_cache.ipynb"
FILES = "pkv.course.labfiles.LessonFiles"
CLONE = Path(__file__).resolve().parents[2]  # of an editable install; elsewhere it has no lessons


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.epilog = "Any other arguments are JupyterLab's own, such as: pkv lab -- --no-browser --port 9000"


def execute(args: argparse.Namespace) -> int:
    """Become JupyterLab."""
    root = find_root([*learners(), CLONE, Path.cwd()])
    if find_spec("jupyterlab") is None:
        is_clone = (CLONE / "pyproject.toml").is_file()
        wanted = f"-e '{CLONE}[lessons]'" if is_clone else "jupyterlab ipywidgets matplotlib"
        raise CommandError(
            f"JupyterLab is not installed for {sys.executable}: "
            + ("`make lab` without PY= puts it into .venv; or install it: " if is_clone else "install it: ")
            + f"{sys.executable} -m pip install {wanted}"
        )
    extra = args.extra[1:] if args.extra[:1] == ["--"] else args.extra
    if is_root() and not any(word.startswith("--allow-root") for word in extra):
        extra = ["--allow-root", *extra]
        say("You are root, which JupyterLab refuses unless told that it is meant: it gets --allow-root")
    command = [
        sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={root}",
        f"--LabApp.default_url=/lab/tree/{FIRST_LESSON}", f"--ServerApp.contents_manager_class={FILES}", *extra,
    ]  # fmt: skip
    say(f"JupyterLab at {root / FIRST_LESSON}; Ctrl-C ends it")
    os.execv(command[0], command)  # in our place, so that Ctrl-C is JupyterLab's


def is_root() -> bool:
    """As in most containers. Windows has no such user."""
    return hasattr(os, "geteuid") and os.geteuid() == 0


def learners() -> list[Path]:
    """The learner's folder, where check() in a lesson will look; none where there are no exercises yet."""
    try:
        return [learners_folder()]
    except FileNotFoundError as error:
        if os.environ.get("PKV_HOME"):
            raise CommandError(str(error)) from None
        return []


def find_root(folders: list[Path]) -> Path:
    """The first of `folders` that holds the lessons."""
    for folder in folders:
        if (folder / FIRST_LESSON).is_file():
            return folder
    raise CommandError(
        f"found no {FIRST_LESSON} beside the package or in {folders[-1]}: `pkv start DIR` makes a folder with the "
        "lessons; run `pkv lab` inside it"
    )

"""`pkv start`: a learner's own copy of lessons and exercises, so that no update of pkv collides with their work."""

import argparse
import os
import shlex
from pathlib import Path

from pkv.commands.arguments import add_json
from pkv.commands.learning import as_typed, writing
from pkv.commands.output import print_json, say
from pkv.course import home
from pkv.wording.counts import count_of

HELP = "make a folder of your own with the lessons and exercises"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder that has no lessons or exercises yet")
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Copy, and say what to do next."""
    folder = args.folder.expanduser()
    with writing(folder, "name another folder"):
        files = home.start(folder)
    folder = folder.resolve()
    if args.json:
        print_json({"folder": str(folder), "files": files})
        return 0
    n_lessons = sum(name.startswith("lessons/") for name in files)
    say(
        f"{folder}: {count_of(n_lessons, 'lesson')} and {count_of(len(files) - n_lessons, 'exercise')}\nNext:\n\n"
        f"  cd {shlex.quote(str(folder))}\n  {as_typed()} lab\n\n"
        "Lessons say what to write where in exercises/. To see whether it is right, without a notebook, type there:\n\n"
        f"  {as_typed()} check ex00_1\n\n"
        "and in the same way hint, progress and reset."
        + (f"\nBut PKV_HOME names {os.environ['PKV_HOME']}, and goes first: unset it" if is_elsewhere(folder) else "")
    )
    return 0


def is_elsewhere(folder: Path) -> bool:
    """Does PKV_HOME name another folder?"""
    given = os.environ.get("PKV_HOME", "")
    return given != "" and Path(given).expanduser().resolve() != folder

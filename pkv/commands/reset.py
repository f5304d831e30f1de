"""`pkv reset`: one exercise file as it was at the beginning. What was in it is kept beside it."""

import argparse

from pkv.commands import CommandError
from pkv.commands.arguments import add_json
from pkv.commands.learning import folder, writing
from pkv.commands.output import print_json, say
from pkv.course import home, progress

HELP = "restore an exercise file; your text is kept beside it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("exercise", metavar="EXERCISE", help="an exercise, such as ex03")
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Restore the file; its tasks are not started again."""
    where = folder() / "exercises"
    try:
        with writing(where, "make room there, or allow it"):
            file, kept = home.restore(args.exercise)
    except ValueError as error:
        raise CommandError(str(error)) from None
    progress.start_over(args.exercise)
    if args.json:
        print_json({"file": str(file), "kept": str(kept) if kept else None})
    elif kept:
        say(f"{file} is as at the beginning. Your text is kept in {kept.name}, beside it.")
    else:
        say(f"{file} is as at the beginning. There was no text of yours to keep.")
    return 0

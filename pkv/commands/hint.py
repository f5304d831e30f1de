"""`pkv hint`: the next of a task's three hints, which counts as read; after the last, where a solution is."""

import argparse
from dataclasses import asdict

from pkv.commands import CommandError
from pkv.commands.arguments import add_json
from pkv.commands.learning import folder
from pkv.commands.output import print_json, say
from pkv.course.catalogue import find_task
from pkv.course.hints import next_hint

HELP = "print the next hint of a task: the idea, then the shape of the answer, then the steps"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("task", metavar="ID", help="a task, such as ex03_2")
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Print one hint."""
    folder()
    try:
        task = find_task(args.task)
    except ValueError as error:
        raise CommandError(str(error)) from None
    hint = next_hint(task.id)
    if args.json:
        print_json(asdict(hint))
    else:
        say(str(hint))
    return 0

"""`pkv progress`: how far you are, task by task, and what comes next: what checks have noted. It checks nothing."""

import argparse

from pkv.commands.arguments import add_json
from pkv.commands.learning import folder
from pkv.commands.output import print_json, say
from pkv.course import progress

HELP = "show which tasks you have solved, how many hints you took, and what comes next"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Print the table."""
    home = folder()
    if args.json:
        print_json(progress.as_json())
    else:
        say(f"{home}\n\n{progress.as_text()}")
    return 0

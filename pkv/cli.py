"""The command `pkv` (= `python -m pkv`): which commands there are, and how each one ends.

Exit codes: 0 done, 1 a check failed (`demo`: a stage is wrong; `doctor`: kernels do not run), 2 bad input.
"""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from pkv.commands import CommandError, demo, doctor, lab, plan

COMMANDS = {"doctor": doctor, "demo": demo, "plan": plan, "lab": lab}
SIGNAL_EXIT = 128  # the shell's exit code for a program that a signal ended is this plus the signal
SIGINT, SIGPIPE = 2, 13


class Parser(argparse.ArgumentParser):
    """argparse, with an error in one line, and `-3,5` read as a value: it is a bad one, and the error should say so."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options, allow_abbrev=False)  # type: ignore[arg-type]
        self._negative_number_matcher = re.compile(r"^-\.?\d")

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see `{self.prog} --help`)")


def make_parser() -> Parser:
    """All commands and their arguments."""
    parser = Parser(prog="pkv", description="Paged decode attention, stage by stage.")
    version = importlib.import_module("pkv").__version__
    parser.add_argument("--version", action="version", version=f"pkv {version}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        summary = command.HELP[0].upper() + command.HELP[1:] + "."
        command.add_arguments(commands.add_parser(name, help=command.HELP, description=summary))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    parser = make_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    is_lab = words[:1] == ["lab"] and words[1:2] not in (["-h"], ["--help"])
    n_own = 1 if is_lab else len(words)  # the rest is JupyterLab's
    try:
        args = parser.parse_args(words[:n_own])
        args.extra = words[n_own:]
        if args.command is None:
            parser.print_help()
            return 0
        code = COMMANDS[args.command].execute(args)
        sys.stdout.flush()
        return code
    except CommandError as error:
        print(f"pkv: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return SIGNAL_EXIT + SIGINT
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SIGNAL_EXIT + SIGPIPE

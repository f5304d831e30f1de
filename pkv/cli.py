"""The command `pkv` (= `python -m pkv`): which commands there are, and how each one ends.

Exit codes: 0 done, 1 a check failed (`demo`: a stage is wrong; `doctor`: kernels do not run; `check`: an answer is not
correct, or not there), 2 bad input, or what is to be written cannot be.
"""

import argparse
import difflib
import importlib
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from pkv.commands import (
    CommandError,
    bench,
    calibrate,
    check,
    compare,
    demo,
    doctor,
    explain,
    grade,
    hint,
    lab,
    plan,
    plot,
    progress,
    reset,
    simulate,
    start,
)
from pkv.commands.output import CLOSED, complain, drop_stdout, say

COMMANDS = {
    "doctor": doctor,
    "demo": demo,
    "plan": plan,
    "simulate": simulate,
    "explain": explain,
    "bench": bench,
    "calibrate": calibrate,
    "compare": compare,
    "plot": plot,
    "start": start,
    "lab": lab,
    "check": check,
    "hint": hint,
    "progress": progress,
    "reset": reset,
    "grade": grade,
}
SIGNAL_EXIT = 128  # the shell's exit code for a program that a signal ended is this plus the signal
SIGINT, SIGPIPE = 2, 13


class Parser(argparse.ArgumentParser):
    """argparse, with an error in one line, and `-3,5` read as a value: it is a bad one, and the error should say so."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options, allow_abbrev=False)  # type: ignore[arg-type]
        self._negative_number_matcher = re.compile(r"^-\.?\d")

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see `{self.prog} --help`)")

    def _print_message(self, message: str, file: object = None) -> None:
        """Help and version. argparse would not tell if they could not be written."""
        say(message, end="")

    def check_words(self, words: list[str]) -> None:
        """Before argparse looks: of a misspelt option it says only that the right one is missing."""
        option, values = "", list[str]()
        for word in [*words, "--"]:
            name, _, value = word.partition("=")
            if not word.startswith("-") or self._negative_number_matcher.match(word):
                values.append(word)
                continue
            self.refuse_unknown(name)
            self.refuse_surplus(option, values)
            option, values = name, [value] if value else []

    def refuse_unknown(self, option: str) -> None:
        known = list(self._option_string_actions)
        if option not in (*known, "--"):
            written = f"--{option.lstrip('-')}"
            longer = [name for name in known if name.startswith(written)]
            similar = longer or difflib.get_close_matches(written, known, n=1, cutoff=0.7)
            self.error(f"unknown option {option}" + (f": did you mean {similar[0]}?" if similar else ""))

    def refuse_surplus(self, option: str, values: list[str]) -> None:
        """Every option takes one value, or none, or either. Where that is a list, its commas are missing."""
        if any(not isinstance(action, argparse._SubParsersAction) for action in self._get_positional_actions()):
            return  # a command that takes files may have them anywhere
        action = self._option_string_actions.get(option)
        n_wanted = 1 if action and action.nargs in (None, "?") else 0
        if len(values) <= n_wanted:
            return
        hint = ""
        if action and "," in str(action.metavar):
            joined = ",".join(value.strip(",") for value in values)
            hint = f": separate with commas, no spaces, as in {option} {joined}"
        self.error(f"unexpected {values[n_wanted]!r}{hint}")


def make_parser() -> tuple[Parser, dict[str, Parser]]:
    """All commands and their arguments, and the parser of each command."""
    parser = Parser(prog="pkv", description="Paged decode attention, stage by stage.")
    version = importlib.import_module("pkv").__version__
    parser.add_argument("--version", action="version", version=f"pkv {version}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        summary = command.HELP[0].upper() + command.HELP[1:] + "."
        command.add_arguments(commands.add_parser(name, help=command.HELP, description=summary))
    return parser, dict(commands.choices)


def parse(words: list[str]) -> argparse.Namespace:
    """The command and its arguments."""
    parser, commands = make_parser()
    n_before = next((n for n, word in enumerate(words) if not word.startswith("-")), len(words))
    parser.check_words(words[:n_before])
    if n_before < len(words) and words[n_before] in commands:
        commands[words[n_before]].check_words(words[n_before + 1 :])
    return parser.parse_args(words)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    if sys.stdout is None:
        complain(f"pkv: error: {CLOSED}")
        return 2
    words = list(sys.argv[1:] if argv is None else argv)
    is_lab = words[:1] == ["lab"] and words[1:2] not in (["-h"], ["--help"])
    n_own = 1 if is_lab else len(words)  # the rest is JupyterLab's
    try:
        args = parse(words[:n_own])
        args.extra = words[n_own:]
        if args.command is None:
            make_parser()[0].print_help()
            return 0
        return COMMANDS[args.command].execute(args)
    except CommandError as error:
        complain(f"pkv: error: {error}")
        return 2
    except KeyboardInterrupt:
        return SIGNAL_EXIT + SIGINT
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        drop_stdout()
        return SIGNAL_EXIT + SIGPIPE

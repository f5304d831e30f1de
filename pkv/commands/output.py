"""What a command prints: tables for people, one JSON object for programs, progress for a terminal.

>>> print(table(["stage", "items"], [["split_kv", "12"], ["row_local", "7"]]))
stage      items
split_kv      12
row_local      7
"""

import contextlib
import json
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

from pkv.commands import CommandError

MOST_MARKS = 40  # of a progress bar
CLOSED = "stdout is closed, so there is nowhere to print to: run pkv with stdout open, or send it to a file"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in [header, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def print_json(value: Any) -> None:
    """One JSON object on stdout. JSON knows neither NaN nor infinity: they become null."""
    say(json.dumps(_finite(value), allow_nan=False))


def say(text: str, end: str = "\n") -> None:
    """Print to stdout, and know that it arrived: a CommandError if the disk is full, say."""
    if sys.stdout is None:
        raise CommandError(CLOSED)
    encoding = sys.stdout.encoding or "utf-8"  # what it cannot say is spelled out
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_stdout()
        raise CommandError(f"could not write to stdout ({error.strerror}): send it where there is room") from None


def drop_stdout() -> None:
    """What is still to be written has nowhere to go; Python would try once more as it ends, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(line: str) -> None:
    """Print one line to stderr, if there is one."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(line.replace("\n", "\\n"), file=sys.stderr, flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Progress:
    """A line on stderr that says what is going on; nothing where stderr is no terminal."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.shown = sys.stderr is not None and sys.stderr.isatty()

    def step(self, what: str) -> None:
        """`what` begins, as the next of `total` steps."""
        self.done += 1
        self.show(what)

    def show(self, what: str) -> None:
        """Say something else of the same step."""
        if self.shown:
            n_marks = min(self.total, MOST_MARKS)
            n_full = self.done * n_marks // self.total
            bar = "#" * n_full + "." * (n_marks - n_full)
            print(f"\r\x1b[K[{bar}] {what}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Take the line away."""
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

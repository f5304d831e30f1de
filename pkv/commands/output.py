"""What a command prints: tables for people, one JSON object for programs, progress for a terminal.

>>> print(table(["stage", "items"], [["split_kv", "12"], ["row_local", "7"]]))
stage      items
split_kv      12
row_local      7
"""

import json
import math
import sys
from collections.abc import Sequence
from typing import Any


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
    print(json.dumps(_finite(value), allow_nan=False))


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
        self.shown = sys.stderr.isatty()

    def step(self, what: str) -> None:
        """`what` begins, as the next of `total` steps."""
        self.done += 1
        if self.shown:
            bar = "#" * self.done + "." * (self.total - self.done)
            print(f"\r\x1b[K[{bar}] {what}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Take the line away."""
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

"""What is known of each task, in one file of the learner's folder, so kept that nothing is lost.

Two notebooks may write at once: a change is read, made and written under a lock. Of a damaged file a copy is kept, and
what can be read of it goes on. In a folder that cannot be written to, entries last as long as this process. Each of
these is said once.
"""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pkv.course.home import PROGRESS, keep_beside

try:
    import fcntl
except ImportError:  # Windows: two writers at once may lose one change
    fcntl = None  # type: ignore[assignment]

STATES = ("not started", "broken", "runs", "correct", "correct on GPU", "fast enough")
_said: set[str] = set()
_unwritten: dict[Path, "Entries"] = {}


@dataclass(frozen=True)
class Entry:
    """What is known of one task. state: one of STATES; hints: how many were read."""

    state: str = "not started"
    hints: int = 0

    @property
    def is_done(self) -> bool:
        return STATES.index(self.state) >= STATES.index("correct")


Entries = dict[str, Entry]


def read(folder: Path) -> Entries:
    """All entries of a folder. A task without one is not started."""
    try:
        entries, is_damaged = loaded(folder / PROGRESS)
    except OSError as error:
        tell(f"progress cannot be read: {error.strerror}: {folder / PROGRESS}")
        entries, is_damaged = {}, False
    if is_damaged:
        change(folder, lambda known: known)
    return entries | _unwritten.get(folder, {})


def change(folder: Path, changed: Callable[[Entries], Entries]) -> None:
    """Keep what `changed` makes of the entries that there are, which nobody else changes meanwhile."""
    entries: Entries = {}
    file = folder / PROGRESS
    try:
        with locked(folder):
            entries, is_damaged = loaded(file)
            if is_damaged:
                kept = keep_beside(file, ".damaged")
                tell(f"{file} was damaged: what could be read of it goes on, and all of it is kept as {kept.name}")
            write(file, changed(entries | _unwritten.get(folder, {})))
            _unwritten.pop(folder, None)
    except OSError as error:
        _unwritten[folder] = changed(entries | _unwritten.get(folder, {}))
        tell(f"progress is not kept: {error.strerror}: {folder}")


def loaded(file: Path) -> tuple[Entries, bool]:
    """What can be read of a file, and whether that is not all of it."""
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}, False
    except (ValueError, RecursionError):
        return {}, True
    if not isinstance(found, dict):
        return {}, True
    entries = {name: entry for name, value in found.items() if (entry := entry_from(value))}
    return entries, len(entries) < len(found)


def entry_from(found: Any) -> Entry | None:
    """An entry out of a file that anyone may have edited; None where it is none."""
    if not isinstance(found, dict):
        return None
    state, hints = found.get("state", "not started"), found.get("hints", 0)
    is_count = isinstance(hints, int) and not isinstance(hints, bool) and hints >= 0
    return Entry(state, hints) if state in STATES and is_count else None


def write(file: Path, entries: Entries) -> None:
    """Write the file: the whole of it, or none."""
    text = json.dumps({name: dataclasses.asdict(entries[name]) for name in sorted(entries)}, indent=1)
    half_written = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        half_written.write_text(text + "\n", encoding="utf-8")
        half_written.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            half_written.unlink()
        raise


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Nobody else changes the folder's entries meanwhile. The lock is the folder's own: there is no file to be left."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network drives have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def tell(text: str) -> None:
    """Say it on stderr, once: stdout may have to be one JSON object."""
    if text not in _said and sys.stderr is not None:
        _said.add(text)
        print(f"pkv: {text}", file=sys.stderr)

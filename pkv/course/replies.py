"""What comes back from the process that answers: read in time, part by part, and never trusted."""

import os
import select
import signal
import time
from typing import Any

from pkv.course.answering import BROKEN, NOT_STARTED, Answer, Stop, too_late
from pkv.course.packing import HEAD, LARGEST, packed, unpacked
from pkv.course.preloaded import LOADED
from pkv.course.printed import SIZE
from pkv.course.tasks import Raised

STARTING = 120.0  # seconds that a process may take to start, on a machine that is busy
DONE, ENDED, LATE, LARGE = "done", "ended", "late", "large"
OUTSIDE = "maybe it reads or writes outside of its arrays: is an offset wrong, or a mask missing?"
WHY = {"SIGKILL": "out of memory?", "SIGSEGV": OUTSIDE, "SIGBUS": OUTSIDE, "SIGABRT": OUTSIDE}
MOST_TEXT = 300  # letters of what an answer says of itself


def listen(pipe: int, n_answers: int, seconds: float) -> tuple[list[bytes], str]:
    """What comes through the pipe, part by part, and why no more came. Time runs from the first part."""
    parts: list[bytes] = []
    data = bytearray()
    end = time.monotonic() + STARTING
    while len(parts) < n_answers + 2:
        left = end - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            return parts, LATE
        got = os.read(pipe, 1 << 20)
        if not got:
            return parts, ENDED
        data += got
        while len(data) >= HEAD.size:
            size = HEAD.size + HEAD.unpack_from(data)[0]
            if size > LARGEST:
                return parts, LARGE
            if len(data) < size:
                break
            if not parts:
                end = time.monotonic() + seconds
            parts.append(bytes(data[:size]))
            del data[:size]
    return parts, DONE


def answers_of(
    parts: list[bytes], why: str, status: int | None, n_answers: int, name: str, seconds: float
) -> list[Answer | Stop]:
    """Answers out of what came, and a Stop where there are fewer than questions."""
    values = [opened(part) for part in parts]
    is_loaded = len(parts) > 1 and parts[1] == packed(LOADED)
    found = [answer_in(value, is_loaded) for value in values[2 if is_loaded else 1 :]]
    found = found[: next((n for n, one in enumerate(found, 1) if isinstance(one, Stop)), n_answers)]
    if len(found) == n_answers or (found and isinstance(found[-1], Stop)):
        return found
    ended = "its process ended before it answered" if is_loaded else f"importing {name} ended its process"
    ended = ended if parts else "its process did not start"
    text = {
        LATE: too_late(seconds) if is_loaded else f"importing {name} takes longer than {seconds:g} s",
        LARGE: f"an answer is too large: more than {LARGEST >> 20} MiB",
    }.get(why, f"{ended} ({how(status)})")  # fmt: skip
    return [*found, Stop(BROKEN, text, not is_loaded, is_loaded)]


def opened(part: bytes) -> Any:
    """One value out of its bytes; None where that is nothing that packed() makes."""
    try:
        return unpacked(part)
    except ValueError:
        return None


def answer_in(value: Any, asked: bool = True) -> Answer | Stop:
    """An answer out of what described() made of it, or of what somebody else wrote into the pipe."""
    try:
        if "stop" in value:
            state, text, of_file = value["stop"]
            return Stop(state if state == NOT_STARTED else BROKEN, shown(text), of_file is True, asked)
        if "raised" in value:
            kind, text, line, means = value["raised"]
            found = Raised(shown(kind), shown(text), line if isinstance(line, int) else None, shown(means))
            return Answer(found, printed=str(value["printed"])[-SIZE:])
        return Answer(value["value"], value["changed"] and shown(value["changed"]), str(value["printed"])[-SIZE:])
    except (TypeError, ValueError, KeyError, RuntimeError):  # "x" in a tensor is a RuntimeError
        return Stop(BROKEN, "the answer cannot be read")


def shown(text: Any) -> str:
    """A text of an answer's own, as a message shows it: one line, not too long, no control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text)[:MOST_TEXT])


def how(status: int | None) -> str:
    """How a process ended."""
    if status is None:
        return "and took its parent along"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal has none
        name = f"signal {-code}"
    return f"killed by {name}: {WHY[name]}" if name in WHY else f"killed by {name}"

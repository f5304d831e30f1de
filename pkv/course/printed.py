"""What an answer prints while it is asked: the last of it, in memory that outlives the process that answers."""

import io
import mmap

MOST_LINES = 20
SIZE = 1 << 13  # bytes that are kept


class Printed(io.TextIOBase):
    """A stream that keeps the end of what is written to it. Made before a fork, it is read on the other side."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, SIZE)
        self.kept = b""

    def write(self, text: str) -> int:
        """Add a text."""
        self.kept = (self.kept + str(text)[-SIZE:].encode(errors="replace"))[-SIZE:]
        self.memory[:] = self.kept.ljust(SIZE, b"\0")
        return len(text)

    def taken(self) -> str:
        """What was printed since it was last taken."""
        text = self.memory[:].rstrip(b"\0").decode(errors="replace")
        self.kept = b""
        self.memory[:] = bytes(SIZE)
        return text


def last_lines(text: str) -> list[str]:
    """The last lines of what was printed, as a message shows them; "..." stands for those before."""
    lines = [
        "".join(letter if letter.isprintable() else " " for letter in line.expandtabs())
        for line in text.rstrip().splitlines()
    ]
    return lines if len(lines) <= MOST_LINES else ["...", *lines[-MOST_LINES:]]

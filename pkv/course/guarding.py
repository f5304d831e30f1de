"""What a process that answers may not do: look at right answers, harm files, leave processes, use up the machine.

It is a fence, not a wall: Python code that means to gets over it, and over any other that is made of Python. Against
mistakes it is enough, and cheating takes longer than the exercise. docs/grading.md says what to do beyond it.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pkv._triton import GPU_VISIBLE
from pkv.course.coursefiles import PACKAGE, material

MEMORY = 1 << 30  # bytes that an answer may take, besides those of the process before it
LARGEST_FILE = 64 << 20
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
STARTS = (
    "os.fork",
    "os.forkpty",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "subprocess.Popen",
    "pty.spawn",
)
SIGNALS = ("os.kill", "os.killpg", "signal.pthread_kill")
# What changes files: where in the event's arguments the paths stand, and the open folder that each starts from.
CHANGES: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.remove": ((0, 1),), "os.rmdir": ((0, 1),), "os.mkdir": ((0, 2),), "os.rename": ((0, 2), (1, 3)),
    "os.link": ((0, 2), (1, 3)), "os.symlink": ((1, 2),), "os.truncate": ((0, None),), "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),), "os.utime": ((0, 3),), "shutil.rmtree": ((0, 1),),
}  # fmt: skip
Places = dict[str, tuple[tuple[int, int | None], ...]]


def guard(folder: Path) -> None:
    """From now on this process may write in `folder` only, not look at right answers, and start nothing."""
    hidden = tuple(map(with_end, (PACKAGE / "course", material("solutions"), PACKAGE.parent / "tests")))
    compiles = GPU_VISIBLE  # Triton's compiler starts programs, and keeps what it made in the user's folder
    refused = SIGNALS if compiles else SIGNALS + STARTS
    sys.addaudithook(make_hook(hidden, with_end(folder), refused, {} if compiles else CHANGES, os.getpid()))


def with_end(folder: Path) -> str:
    """A folder's real path, up to and with the last slash."""
    return f"{os.path.realpath(folder)}/"


def make_hook(
    hidden: tuple[str, ...], own: str, refused: tuple[str, ...], changes: Places, pid: int
) -> Callable[[str, tuple[Any, ...]], None]:
    """What Python calls before it opens a file, starts a process, and so on. It refuses by an exception.

    All that it uses is in its closure: the answer can change any module.
    """
    real, is_folder, text, paths = os.path.realpath, os.path.isdir, os.fsdecode, (str, bytes, os.PathLike)
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    mine, processes = f"/proc/{pid}/", tuple(f"/proc/{digit}" for digit in range(10))

    def place(path: Any, folder: Any = -1) -> str:
        if isinstance(folder, int) and folder >= 0:
            return f"{real(f'/proc/self/fd/{folder}/{text(path)}')}/"
        return f"{real(text(path))}/"

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], paths):
            where = place(args[0])
            if where.startswith(own):
                return
            if where.startswith(hidden) or (where.startswith(processes) and not where.startswith(mine)):
                raise PermissionError("an answer may not look at graders and solutions")
            if changes and not where.startswith("/dev/") and (args[2] or 0) & writing:
                raise PermissionError(f"an answer may not write {where[:-1]}")
            if is_folder(where):  # files would be opened from there
                raise PermissionError(f"an answer may not open {where[:-1]}")
        elif event in refused:
            raise PermissionError(f"{event}: an answer may neither start nor signal other processes")
        elif event in changes:
            for number, folder in changes[event]:
                path = args[number]
                if isinstance(path, paths):
                    where = place(path, -1 if folder is None else args[folder])
                    if not where.startswith(own):
                        raise PermissionError(f"{event}: an answer may not change {where[:-1]}")

    return hook


def limit_memory() -> None:
    """Memory and files have an end; where memory runs out all the same, this process goes, and not its judge."""
    with contextlib.suppress(OSError):  # not Linux, or not allowed
        Path("/proc/self/oom_score_adj").write_text("1000")
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    if not GPU_VISIBLE:  # CUDA reserves far more addresses than it uses
        with contextlib.suppress(OSError, ValueError):
            now = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))


def die_with_parent() -> None:
    """Whoever started this process takes it along."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def inherit_orphans() -> None:
    """Processes whose parents end below this one become its own children, so that it can end them."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def prctl(option: int, value: int) -> None:
    """Linux's prctl; nothing elsewhere."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)

"""An answer asked in a process of its own: whatever it does there, it cannot pass, stop or change its judge.

Arguments are made here and sent there (preloaded.py), so that the process that answers holds no right answer. Answers
come back one by one through a pipe, as bytes that hold numbers and no code (packing.py). What does not come in time, or
not at all, is said; it never counts as right.
"""

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from pkv.course.answering import Answer, Question, Refused, Stop, read
from pkv.course.catalogue import file_of
from pkv.course.coursefiles import PACKAGE
from pkv.course.preloaded import SIZE, STATUS, Request
from pkv.course.replies import ENDED, STARTING, answers_of, listen
from pkv.course.sending import sent
from pkv.course.sources import names_in
from pkv.course.tasks import Spec, Task

AGAIN = 1.0  # seconds for a smaller input, while the smallest that fails is looked for
_of_thread = threading.local()


@dataclass(frozen=True)
class Source:
    """An exercise file as it was handed in."""

    name: str
    text: bytes


def ask_apart(task: Task, folder: Path, specs: list[Spec], seconds: float | None = None) -> list[Answer | Stop]:
    """The answers of the task's function in `folder` to each spec; a Stop where there is none, and nothing after it."""
    try:
        return ask_source(task, source_of(task, folder), specs, seconds)
    except Refused as refused:
        return [refused.stop]


def names_apart(task: Task, folder: Path) -> set[str]:
    """The names that the task's function uses; none where it cannot be read."""
    try:
        return names_of_source(task, source_of(task, folder))
    except Refused:
        return set()


def source_of(task: Task, folder: Path) -> Source:
    """The exercise file of a task in a folder. Refused where there is none."""
    path = file_of(folder, task.exercise)
    return Source(path.name, read(path))


def names_of_source(task: Task, source: Source) -> set[str]:
    """As names_apart(), of a file's text. What cannot be parsed does not run either."""
    try:
        return names_in(source.text.decode("utf-8-sig", "replace").replace("\r\n", "\n"), task.function)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()


def ask_source(task: Task, source: Source, specs: list[Spec], seconds: float | None = None) -> list[Answer | Stop]:
    """As ask_apart(), of a file's text."""
    arguments = tuple(task.arguments(spec) for spec in specs)
    request = Request(source.name, source.text, Question.of(task), arguments)
    return server().ask(sent(request), len(specs), source.name, task.seconds if seconds is None else seconds)


def server() -> "Server":
    """This thread's preloaded process, started when it is first needed."""
    if not hasattr(_of_thread, "server"):
        _of_thread.server = Server()
    found: Server = _of_thread.server
    return found


def close_server() -> None:
    """End this thread's preloaded process, if there is one."""
    if hasattr(_of_thread, "server"):
        _of_thread.server.close()
        del _of_thread.server


class Server:
    """A preloaded process, and the socket through which it is asked. It ends when the socket is closed."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start it; some seconds pass until it answers."""
        self.folder = tempfile.TemporaryDirectory(prefix="pkv-answers-", ignore_cleanup_errors=True)
        self.control, its = socket.socketpair()
        given = os.environ.get("PYTHONPATH")
        paths = [str(PACKAGE.parent), *map(os.path.abspath, given.split(os.pathsep) if given else [])]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
            "MALLOC_ARENA_MAX": "2",  # each thread would reserve 64 MiB, which the limit of memory counts
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # CUDA must not be in use before it forks
        }  # fmt: skip
        runs = f"from pkv.course.preloaded import serve; serve({its.fileno()}, {self.folder.name!r})"
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", runs],
            pass_fds=[its.fileno()], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd="/",
            start_new_session=True,  # Ctrl-C is for the judge
        )  # fmt: skip
        its.close()
        atexit.register(self.close)

    def ask(self, request: bytes, n_answers: int, name: str, seconds: float) -> list[Answer | Stop]:
        """The answers to a request, as many as come."""
        reading, writing = os.pipe()
        try:
            try:
                socket.send_fds(self.control, [SIZE.pack(len(request))], [writing])
                self.control.sendall(request)
            finally:
                os.close(writing)
            parts, why = listen(reading, n_answers, seconds)
        except OSError:
            parts, why = [], ENDED
        finally:
            os.close(reading)
        return answers_of(parts, why, self.finish(), n_answers, name, seconds)

    def finish(self) -> int | None:
        """End the request; its process's exit status, or None where the server was lost: there is a new one then."""
        with contextlib.suppress(OSError):
            self.control.settimeout(STARTING)
            self.control.sendall(b".")
            told = self.control.recv(STATUS.size)
            if len(told) == STATUS.size:
                self.control.settimeout(None)
                status: int = STATUS.unpack(told)[0]
                return status
        self.close()
        self.start()
        return None

    def close(self) -> None:
        """End it."""
        atexit.unregister(self.close)
        self.control.close()
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()

"""The process that answers are asked in: a Python that has loaded torch, Triton and pkv, and no right answer, once.

For each request it forks: some milliseconds. The fork writes the exercise file into a folder of its own, loads it, asks
its function, and writes each answer into the pipe that came with the request. When the judge has read enough, the fork
ends, and everything that it started, and the folder is removed. CUDA is first used in forks, because it survives none.
"""

import contextlib
import dataclasses
import gc
import os
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

import pkv.course
from pkv.course.answering import BROKEN, Answer, Question, Refused, Stop, ask, function_in, redirected
from pkv.course.guarding import die_with_parent, guard, inherit_orphans, limit_memory
from pkv.course.meaning import first_line, raised
from pkv.course.packing import TooLarge, packed
from pkv.course.printed import Printed
from pkv.course.sending import GRADERS, received
from pkv.course.tasks import Raised

SIZE, STATUS = struct.Struct("<Q"), struct.Struct("<i")
STARTED, LOADED = {"started": True}, {"loaded": True}  # what comes before the answers
PATIENCE = 0.1  # seconds that a process gets to end by itself

Write = Callable[[Any], None]


@dataclass(frozen=True)
class Request:
    """A file's name and text, what is asked of it, and the arguments of each question."""

    name: str
    text: bytes
    question: Question
    arguments: tuple[tuple[Any, ...], ...]


def serve(number: int, base: str) -> None:
    """Answer request after request from the socket of that number, until the judge is gone; base: where to write."""
    control = socket.socket(fileno=number)
    forget_graders()
    inherit_orphans()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where the judge ignores it, so would this, and learn no status
    torch.set_num_threads(1)  # a fork has lost the threads of its parent's pool
    try:
        answer_requests(control, base)
    finally:  # the judge may have been killed
        shutil.rmtree(base, ignore_errors=True)


def answer_requests(control: socket.socket, base: str) -> None:
    """Read a request, fork, wait until the judge has read enough, clean up; again."""
    while True:
        head, pipes, _, _ = socket.recv_fds(control, SIZE.size, 1)
        if len(head) < SIZE.size:
            return
        data = read_all(control, SIZE.unpack(head)[0])
        folder = Path(tempfile.mkdtemp(dir=base))
        child = os.fork()
        if child == 0:
            work(data, folder, pipes[0])
        os.close(pipes[0])
        control.recv(1)
        status = end_of(child)
        shutil.rmtree(folder, ignore_errors=True)
        control.sendall(STATUS.pack(status))


def forget_graders() -> None:
    """Files with right answers that were imported along are here no more."""
    for name in [name for name in sys.modules if GRADERS.match(name)]:
        del sys.modules[name]
    vars(pkv.course).pop("graders", None)
    gc.collect()  # functions hold on to one another


def read_all(control: socket.socket, size: int) -> bytes:
    """So many bytes."""
    data = bytearray()
    while len(data) < size:
        part = control.recv(min(size - len(data), 1 << 20))
        if not part:
            sys.exit(0)
        data += part
    return bytes(data)


def work(data: bytes, folder: Path, pipe: int) -> NoReturn:
    """What a fork does. It never comes back."""
    try:
        write = alone(pipe)
        os.chdir(folder)
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        write(STARTED)
        try:
            request = received(data)
        except Exception as error:  # a fault of the grader
            write(described(Stop(BROKEN, f"the question cannot be read: {type(error).__name__}: {error}")))
            os._exit(0)
        path = folder / request.name
        path.write_bytes(request.text)
        guard(folder)
        answer_all(request.question, lambda: function_in(request.question, path), request.arguments, write)
    except BaseException:
        os._exit(1)
    os._exit(0)


def alone(pipe: int) -> Write:
    """Take a fork away from its parent: no files or streams but the pipe, memory with an end. What writes into that."""
    os.setsid()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.closerange(3, pipe)
    os.closerange(pipe + 1, 1 << 12)
    limit_memory()

    own = os.getpid()

    def write(value: Any) -> None:
        if os.getpid() != own:  # a fork that the answer has made goes on here, too
            os._exit(0)
        rest = memoryview(packed(value))
        while rest:
            rest = rest[os.write(pipe, rest) :]

    return write


def answer_all(
    question: Question, load: Callable[[], Any], arguments: Sequence[tuple[Any, ...]], write: Write,
    printed: Printed | None = None,
) -> None:  # fmt: skip
    """Load the function, ask it every question, write every answer. What importing prints belongs to the first one."""
    printed = printed or Printed()
    try:
        try:
            with redirected(printed):
                function = load()
        except Refused as refused:
            write(described(refused.stop))
            return
        except BaseException as error:
            write(described(Stop(BROKEN, f"the file does not import: {type(error).__name__}", True)))
            return
        write(LOADED)
        for given in arguments:
            answer = answer_to(question, function, given, printed)
            try:
                write(described(answer))
            except TooLarge as error:
                answer = Stop(BROKEN, f"an answer is too large: {error}")
                write(described(answer))
            except (ValueError, TypeError, RuntimeError) as error:  # an int of 10,000 digits, a nested tensor
                answer = Stop(BROKEN, f"an answer cannot be sent: {type(error).__name__}: {first_line(error)}")
                write(described(answer))
            if isinstance(answer, Stop):
                return
    except MemoryError:
        write(described(Stop(BROKEN, "it takes too much memory")))


def answer_to(question: Question, function: Any, arguments: tuple[Any, ...], printed: Printed) -> Answer | Stop:
    """One answer. Here KeyboardInterrupt, pytest's Skipped and the like are the answer's own."""
    try:
        return ask(question, function, arguments, printed)
    except BaseException as error:
        return Answer(raised(error, function), printed=printed.taken())


def described(answer: Answer | Stop) -> dict[str, Any]:
    """An answer as plain values."""
    if isinstance(answer, Stop):
        return {"stop": [answer.state, answer.text, answer.of_file]}
    if isinstance(answer.value, Raised):
        return {"raised": list(dataclasses.astuple(answer.value)), "printed": answer.printed}
    return {"value": answer.value, "changed": answer.changed, "printed": answer.printed}


def patiently(child: int) -> tuple[int, int]:
    """Give a process PATIENCE to end by itself: (its number, or 0 where it has not; its exit status)."""
    end = time.monotonic() + PATIENCE
    done = status = 0
    while not done and time.monotonic() < end:
        done, status = waited(child, os.WNOHANG)
        time.sleep(0.002)
    return done, status


def waited(child: int, options: int) -> tuple[int, int]:
    """os.waitpid(); a process that is gone has ended with 0."""
    try:
        return os.waitpid(child, options)
    except ChildProcessError:
        return child, 0


def end_of(child: int) -> int:
    """The exit status of a process, which is killed if it does not end; everything that it started dies with it."""
    _, status = patiently(child)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    while True:
        for process in children():
            os.kill(process, signal.SIGKILL)
        try:
            process, its_status = os.waitpid(-1, 0)
        except ChildProcessError:
            return status
        status = its_status if process == child else status


def children() -> list[int]:
    """The processes whose parent is this one: the fork, and what it left behind."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(word) for word in listed.read_text(encoding="utf-8").split()] if listed.exists() else []

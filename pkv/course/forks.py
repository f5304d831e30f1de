"""An answer asked in a process of its own: whatever it does there, it cannot pass, stop or change its judge.

Without a GPU the process is a fork of this one, which has imported torch, Triton and pkv already: some milliseconds.
With a GPU it is a new Python, because CUDA does not survive a fork: some seconds. Answers come back one by one through
a pipe, as plain tensors and numbers (loaded with weights_only, so that they cannot carry code). What does not come in
time, or not at all, is said; it never counts as right.
"""

import contextlib
import io
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pkv._triton import GPU_VISIBLE
from pkv.course.answering import Answer, Refused, Stop, answers, function_of, names_used
from pkv.course.tasks import Raised, Spec, Task, find_task

HEAD = struct.Struct("<Q")
LARGEST = 1 << 28  # bytes of one answer


def ask_apart(task: Task, folder: Path, specs: list[Spec], seconds: float | None = None) -> list[Answer | Stop]:
    """The answers of the task's function in `folder` to each spec; a Stop where there is none, and nothing after it."""
    limit = task.seconds if seconds is None else seconds
    work = (lambda write: answer_all(task, folder, specs, write)) if not GPU_VISIBLE else None
    return read_answers(*(forked(work) if work else spawned(task, folder, specs)), limit)


def names_apart(task: Task, folder: Path, seconds: float = 10.0) -> set[str]:
    """The names in the source of the task's function; none where it cannot be loaded."""

    def work(write: Callable[[Any], None]) -> None:
        write({"value": sorted(names_used(function_of(task, folder)))})

    if GPU_VISIBLE:  # reading a source needs no device
        try:
            return names_used(function_of(task, folder))
        except Refused:
            return set()
    (answer, *_) = read_answers(*forked(work), seconds) or [Stop("broken", "")]
    return set(answer.value) if isinstance(answer, Answer) and isinstance(answer.value, list) else set()


def answer_all(task: Task, folder: Path, specs: list[Spec], write: Callable[[Any], None]) -> None:
    """What runs in the other process: load, ask, write each answer."""
    try:
        for answer in answers(task, function_of(task, folder), specs):
            write(packed(answer))
    except Refused as refused:
        write(packed(refused.stop))


def packed(answer: Answer | Stop) -> dict[str, Any]:
    """An answer as plain values."""
    if isinstance(answer, Stop):
        return {"stop": [answer.state, answer.text]}
    if isinstance(answer.value, Raised):
        return {"raised": [answer.value.kind, answer.value.text, answer.value.line]}
    return {"value": answer.value, "changed": answer.changed}


def unpacked(found: dict[str, Any]) -> Answer | Stop:
    """What packed() packed."""
    if "stop" in found:
        state, text = found["stop"]
        return Stop(state if state == "not started" else "broken", str(text))
    if "raised" in found:
        return Answer(Raised(*found["raised"]))
    return Answer(found["value"], found.get("changed"))


def writer(pipe: int) -> Callable[[Any], None]:
    """write(value): one length, then its bytes."""

    def write(value: Any) -> None:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        data = HEAD.pack(buffer.tell()) + buffer.getvalue()
        while data:
            data = data[os.write(pipe, data) :]

    return write


def forked(work: Callable[[Callable[[Any], None]], None]) -> tuple[int, int]:
    """Run work(write) in a fork; its process id, and the pipe to read from."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    try:
        os.close(reading)
        os.setsid()  # what it starts dies with it
        for name in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM):
            signal.signal(name, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        first_to_be_killed()
        torch.set_num_threads(1)  # a fork has lost the threads of its parent's pool
        work(writer(writing))
    except BaseException:
        os._exit(1)
    os._exit(0)


def first_to_be_killed() -> None:
    """Where memory runs out, this process goes, and not its judge."""
    with contextlib.suppress(OSError):  # not Linux, or not allowed
        Path("/proc/self/oom_score_adj").write_text("1000")


def spawned(task: Task, folder: Path, specs: list[Spec]) -> tuple[int, int]:
    """The same in a new Python process, which may use the GPU."""
    reading, writing = os.pipe()
    request = pickle.dumps((task.id, str(folder), specs))
    child = subprocess.Popen(
        [sys.executable, "-m", "pkv.course.forks", str(writing)],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        pass_fds=[writing], start_new_session=True,
    )  # fmt: skip
    os.close(writing)
    assert child.stdin is not None
    child.stdin.write(request)
    child.stdin.close()
    child.returncode = 0  # it is reaped in read_answers
    return child.pid, reading


def read_answers(child: int, pipe: int, seconds: float) -> list[Answer | Stop]:
    """All that comes through the pipe in time; then the process, and what it started, is gone."""
    end = time.monotonic() + seconds
    found: list[Answer | Stop] = []
    data, ended = b"", False
    try:
        while not ended:
            left = end - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                return [*found, Stop("broken", f"no answer within {seconds:g} s: does a loop ever end?")]
            part = os.read(pipe, 1 << 20)
            ended, data = not part, data + part
            while len(data) >= HEAD.size and len(data) >= HEAD.size + (size := HEAD.unpack_from(data)[0]):
                body, data = data[HEAD.size : HEAD.size + size], data[HEAD.size + size :]
                found.append(opened(body))
            if len(data) > LARGEST:
                return [*found, Stop("broken", "the answer is too large")]
    finally:
        os.close(pipe)
        status = end_of(child)
    if status != 0:
        why = "a signal" if os.WIFSIGNALED(status) else f"exit code {os.waitstatus_to_exitcode(status)}"
        found.append(Stop("broken", f"its process ended before it answered ({why})"))
    return found


def opened(body: bytes) -> Answer | Stop:
    """One answer out of its bytes."""
    try:
        return unpacked(torch.load(io.BytesIO(body), weights_only=True))
    except Exception as error:
        return Stop("broken", f"the answer cannot be read: {type(error).__name__}")


def end_of(child: int) -> int:
    """Wait for a process that has closed its pipe, or kill it; everything that it started dies."""
    status = 0
    for _ in range(50):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    if not done:
        _, status = os.waitpid(child, 0)
    return status


def main(pipe: int) -> None:
    """python -m pkv.course.forks PIPE: what spawned() starts."""
    task_id, folder, specs = pickle.load(sys.stdin.buffer)  # from our own parent
    first_to_be_killed()
    answer_all(find_task(task_id), Path(folder), specs, writer(pipe))


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""An answer asked in a fork of this process, which outlives whatever the answer does there.

So a notebook asks: at once, and also functions that were written in it, which no other process could load. Unlike in a
preloaded process (forks.py) nothing is refused: what runs is the learner's own.
"""

import contextlib
import dataclasses
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from pkv.course.answering import Answer, Question, Stop
from pkv.course.preloaded import STARTED, alone, answer_all, patiently, waited
from pkv.course.printed import Printed
from pkv.course.replies import answers_of, listen

Load = Callable[[], Any]


def ask_child(
    question: Question, load: Load, arguments: Sequence[tuple[Any, ...]], name: str, seconds: float
) -> list[Answer | Stop]:
    """The answers of the function that load() gives; a Stop, with what was printed before it, where one is missing."""
    printed = Printed()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a notebook has threads; the fork uses nothing of theirs
        child = os.fork()
    if child == 0:
        work(question, load, arguments, writing, printed)
    os.close(writing)
    try:
        parts, why = listen(reading, len(arguments), seconds)
    finally:
        os.close(reading)
        status = end_of(child)
    given = answers_of(parts, why, status, len(arguments), name, seconds)
    if given and isinstance(given[-1], Stop):
        given[-1] = dataclasses.replace(given[-1], printed=printed.taken())
    return given


def work(question: Question, load: Load, arguments: Sequence[tuple[Any, ...]], pipe: int, printed: Printed) -> NoReturn:
    """What the fork does. It never comes back."""
    try:
        write = alone(pipe)
        torch.set_num_threads(1)  # a fork has lost the threads of its parent's pool
        write(STARTED)
        answer_all(question, load, arguments, write, printed)
    except BaseException:
        os._exit(1)
    os._exit(0)


def end_of(child: int) -> int:
    """The exit status of a process, which is killed if it does not end, with those that it started.

    0 where this process ignores SIGCHLD: then nobody learns it.
    """
    done, status = patiently(child)
    for kill in (os.killpg,) if done else (os.killpg, os.kill):  # it may not have a group of its own yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)
    return status if done else waited(child, 0)[1]

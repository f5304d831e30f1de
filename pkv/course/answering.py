"""An answer file read afresh, and its functions asked.

A file is loaded by its path, never by sys.path, and under a new name each time, so that what was edited is what runs,
kernels too. What comes back are values, never verdicts: who judges may be another process.
"""

import contextlib
import importlib.util
import inspect
import itertools
import linecache
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pkv.course.catalogue import file_of
from pkv.course.comparing import agree, plain
from pkv.course.meaning import first_line, place_of, raised
from pkv.course.printed import Printed
from pkv.course.tasks import Spec, Task

NOT_STARTED, BROKEN = "not started", "broken"
LARGEST = 1 << 20  # bytes of an exercise file
_numbers = itertools.count()


@dataclass(frozen=True)
class Stop:
    """Why there is no answer at all. state: NOT_STARTED or BROKEN; text: what to do; of_file: no task has any.

    asked: the function was asked, and did not end; printed: what it has printed by then.
    """

    state: str
    text: str
    of_file: bool = False
    asked: bool = False
    printed: str = ""


@dataclass(frozen=True)
class Answer:
    """What a function gave for one spec. changed: the argument that it overwrote; printed: the last of its lines."""

    value: Any
    changed: str | None = None
    printed: str = ""


@dataclass(frozen=True)
class Question:
    """What has to be known of a task to ask it: not the right answer. names: of the arguments; refused: shortcuts."""

    task: str
    function: str
    names: tuple[str, ...]
    call: Callable[..., Any] | None
    refused: frozenset[str]

    @classmethod
    def of(cls, task: Task) -> "Question":
        """The question of a task."""
        names = tuple(inspect.signature(task.right).parameters)
        return cls(task.id, task.function, names, task.call, frozenset(task.forbidden))


class Refused(Exception):
    """Raised with a Stop: the function cannot be asked."""

    def __init__(self, stop: Stop) -> None:
        super().__init__(stop.text)
        self.stop = stop


class Shortcut(Exception):
    """An answer calls what would give it ready-made."""


class NothingReadyMade(TorchFunctionMode):
    """While it is entered, torch's functions of some names raise Shortcut, from wherever they are called."""

    def __init__(self, refused: frozenset[str]) -> None:
        super().__init__()
        self.refused = refused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self.refused:
            raise Shortcut(f"{func.__name__}: write it yourself")
        return func(*args, **(kwargs or {}))


def read(path: Path) -> bytes:
    """What an exercise file holds. Refused where there is none, or it is no exercise file."""
    if not path.is_file():
        restores = f"`pkv reset {path.stem.partition('_')[0]}` restores it"
        raise Refused(Stop(BROKEN, f"{path.name} is not there: {restores}", True))
    try:
        with path.open("rb") as stream:
            text = stream.read(LARGEST + 1)
    except OSError as error:
        raise Refused(Stop(BROKEN, f"{path.name} cannot be read: {error.strerror}", True)) from None
    if len(text) > LARGEST:
        raise Refused(Stop(BROKEN, f"{path.name} is larger than {LARGEST >> 20} MiB", True))
    return text


def load(path: Path) -> Any:
    """The module of a file, as it is now. Refused where there is none, or it does not run."""
    text = read(path)
    name = f"_pkv_answers_{next(_numbers)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    linecache.cache.pop(str(path), None)  # Triton reads a kernel's source through it
    try:
        # not the loader: its byte code in __pycache__ is taken for new after an edit within the same second
        exec(compile(text, str(path), "exec"), module.__dict__)
    except SyntaxError as error:
        raise Refused(Stop(BROKEN, f"{path.name}, line {error.lineno}: {error.msg}", True)) from None
    except (Exception, SystemExit) as error:
        raise Refused(Stop(BROKEN, f"{path.name} does not import: {said(error, path)}", True)) from None
    finally:
        sys.modules.pop(name, None)
    return module


def function_of(task: Task, folder: Path) -> Any:
    """The task's function, from its file in a folder."""
    return function_in(Question.of(task), file_of(folder, task.exercise))


def function_in(question: Question, path: Path) -> Any:
    """The function that is asked, from a file; its specification gives no answers any more."""
    module = load(path)
    function = getattr(module, question.function, None)
    if not callable(function):
        text = f"{path.name} has no function {question.function}: task {question.task} is asked there"
        raise Refused(Stop(BROKEN, text))
    specification = module.__dict__.get(f"{question.function}_spec")
    if isinstance(specification, types.FunctionType) and not specification.__closure__:
        specification.__code__ = no_specification.__code__  # under whatever other name it is known, too
    return function


def no_specification(*args: Any, **named: Any) -> None:
    """What a specification does while its task is judged. It knows no module but what it imports."""
    from pkv.course.answering import Shortcut

    raise Shortcut("calls its own specification: write it yourself")


def answers(task: Task, function: Any, specs: list[Spec]) -> Iterator[Answer | Stop]:
    """The function's answer to each spec, in order; a Stop ends it."""
    question = Question.of(task)
    for spec in specs:
        answer = ask(question, function, task.arguments(spec))
        yield answer
        if isinstance(answer, Stop):
            return


def ask(question: Question, function: Any, arguments: tuple[Any, ...], printed: Printed | None = None) -> Answer | Stop:
    """One answer. What the function raises is its answer, but for the NotImplementedError of the skeleton.

    printed: takes what the function prints.
    """
    printed = printed or Printed()
    before = plain(list(arguments))
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # an answer that divides by 0 and then masks is right, whoever asks
            for context in (torch.no_grad(), redirected(printed), NothingReadyMade(question.refused)):
                stack.enter_context(context)
            value = plain((question.call or simply)(function, *arguments))
    except NotImplementedError as error:
        if str(error).startswith(f"{question.task}:"):
            return Stop(NOT_STARTED, str(error))
        return Answer(raised(error, function), printed=printed.taken())
    except MemoryError:
        return Stop(BROKEN, "it takes too much memory")
    except (Exception, SystemExit) as error:
        return Answer(raised(error, function), printed=printed.taken())
    return Answer(value, changed_argument(question.names, before, plain(list(arguments))), printed.taken())


@contextlib.contextmanager
def redirected(printed: Printed) -> Iterator[None]:
    """What Python prints goes there."""
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        yield


def simply(function: Callable[..., Any], *arguments: Any) -> Any:
    """How a function is called, where its task does not say otherwise."""
    return function(*arguments)


def too_late(seconds: float) -> str:
    """What is said of an answer that has not come in time."""
    return f"no answer within {seconds:g} s: does a loop ever end?"


def changed_argument(names: tuple[str, ...], before: list[Any], after: list[Any]) -> str | None:
    """The name of the first argument that is not what it was."""
    for name, old, new in zip(names, before, after, strict=False):
        if not agree(old, new, 0.0):
            return name
    return None


def said(error: BaseException, path: Path) -> str:
    """An exception in a line: its kind, its text, where in the file."""
    _, line = place_of([error], str(path))
    return f"{type(error).__name__}: {first_line(error)}{f' (line {line})' if line else ''}"

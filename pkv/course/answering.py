"""An answer file read afresh, and its functions asked.

A file is loaded by its path, never by sys.path, and under a new name each time, so that what was edited is what runs,
kernels too. What comes back are values, never verdicts: who judges may be another process.
"""

import ast
import contextlib
import importlib.util
import inspect
import itertools
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pkv.course.comparing import agree, plain
from pkv.course.tasks import Raised, Spec, Task, file_of

_numbers = itertools.count()


@dataclass(frozen=True)
class Stop:
    """Why there is no answer at all. state: "not started" or "broken"; text: what to do."""

    state: str
    text: str


@dataclass(frozen=True)
class Answer:
    """What a function gave for one spec. changed: the argument that it overwrote."""

    value: Any
    changed: str | None = None


class Refused(Exception):
    """Raised with a Stop: the function cannot be asked."""

    def __init__(self, stop: Stop) -> None:
        super().__init__(stop.text)
        self.stop = stop


def load(path: Path) -> Any:
    """The module of a file, as it is now. Refused where there is none, or it does not run."""
    if not path.is_file():
        raise Refused(
            Stop("broken", f"{path.name} is not there: `pkv reset {path.stem.partition('_')[0]}` restores it")
        )
    linecache.cache.pop(str(path), None)  # Triton reads a kernel's source through it
    name = f"_pkv_answers_{next(_numbers)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        # not the loader: its byte code in __pycache__ is taken for new after an edit within the same second
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
    except SyntaxError as error:
        raise Refused(Stop("broken", f"{path.name}, line {error.lineno}: {error.msg}")) from None
    except Exception as error:
        raise Refused(Stop("broken", f"{path.name} does not import: {said(error, path)}")) from None
    finally:
        sys.modules.pop(name, None)
    return module


def function_of(task: Task, folder: Path) -> Any:
    """The task's function, from its file in a folder."""
    path = file_of(folder, task.exercise)
    module = load(path)
    function = getattr(module, task.function, None)
    if not callable(function):
        raise Refused(Stop("broken", f"{path.name} has no function {task.function}: task {task.id} is asked there"))
    return function


def answers(task: Task, function: Any, specs: list[Spec]) -> Iterator[Answer | Stop]:
    """The function's answer to each spec, in order; a Stop ends it."""
    for spec in specs:
        answer = ask(task, function, spec)
        yield answer
        if isinstance(answer, Stop):
            return


def ask(task: Task, function: Any, spec: Spec) -> Answer | Stop:
    """One question. What the function raises is its answer, but for the NotImplementedError of the skeleton."""
    arguments = task.arguments(spec)
    before = plain(list(arguments))
    call: Callable[..., Any] = task.call or (lambda function, *given: function(*given))
    try:
        with torch.no_grad(), contextlib.redirect_stdout(None):
            value = plain(call(function, *arguments))
    except NotImplementedError as error:
        if str(error).startswith(task.id):
            return Stop("not started", str(error))
        return Answer(raised(error, function))
    except (Exception, SystemExit) as error:
        return Answer(raised(error, function))
    return Answer(value, changed_argument(task, before, plain(list(arguments))))


def changed_argument(task: Task, before: list[Any], after: list[Any]) -> str | None:
    """The name of the first argument that is not what it was."""
    names = list(inspect.signature(task.right).parameters)
    for name, old, new in zip(names, before, after, strict=False):
        if not agree(old, new, 0.0):
            return name
    return None


def raised(error: BaseException, function: Any) -> Raised:
    """An exception, with the line of the answer file that it came from."""
    path = getattr(inspect.unwrap(getattr(function, "fn", function)), "__code__", None)
    file = path.co_filename if path is not None else ""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    text = str(error).strip().splitlines()
    return Raised(type(error).__name__, text[0][:200] if text else "", lines[-1] if lines else None)


def said(error: BaseException, path: Path) -> str:
    """An exception in a line: its kind, its text, where in the file."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    where = f" (line {lines[-1]})" if lines else ""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200] if text else ''}{where}"


def names_used(function: Any) -> set[str]:
    """Every name in the source of a function, and of those of its file that it uses; none where it is unknown."""
    fn = inspect.unwrap(getattr(function, "fn", function))
    try:
        source, _ = inspect.findsource(fn)
        tree = ast.parse("".join(source))
    except (OSError, TypeError, SyntaxError):
        return set()
    parts = {
        node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    imported = {
        alias.asname or alias.name: f"{getattr(node, 'module', None) or ''}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    used: set[str] = set()
    todo = [fn.__name__]
    while todo:
        node = parts.pop(todo.pop(), None)
        if node is None:
            continue
        for inner in ast.walk(node):
            names = []
            if isinstance(inner, ast.Name):
                names = [inner.id, *imported.get(inner.id, "").split(".")]
            elif isinstance(inner, ast.Attribute):
                names = [inner.attr]
            elif isinstance(inner, ast.Import | ast.ImportFrom):
                names = [part for alias in inner.names for part in alias.name.split(".")]
                names += (getattr(inner, "module", None) or "").split(".")
            used.update(names)
            todo.extend(names)
    return used - {""}

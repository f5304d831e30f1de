"""Questions on their way to the process that answers them: all of the arguments, and none of the right answers.

Arguments are pickled. A function or class of a grader's file, such as a task's `call`, goes as its code, with what it
uses: the process that answers must never import that file.
"""

import importlib
import io
import marshal
import pickle
import re
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

GRADERS = re.compile(r"pkv\.course\.graders(\.\w+)?$")  # files with right answers in them


def sent(value: Any) -> bytes:
    """A value as bytes, for received() in another process."""
    stream = io.BytesIO()
    Sender(stream).dump(value)
    return stream.getvalue()


def received(data: bytes) -> Any:
    """What sent() sent, without importing a grader's file."""
    return Receiver(io.BytesIO(data)).load()


class Sender(pickle.Pickler):
    """Pickles, with functions and classes of graders by value, and modules by name."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ModuleType):
            return importlib.import_module, (value.__name__,)
        if isinstance(value, FunctionType) and GRADERS.match(value.__module__):
            used = {name: value.__globals__[name] for name in names_of(value.__code__) if name in value.__globals__}
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            inside = (used, cells, value.__defaults__, value.__kwdefaults__)
            return function_of_code, (marshal.dumps(value.__code__),), inside, None, None, fill
        if isinstance(value, type) and GRADERS.match(value.__module__):
            own = {name: entry for name, entry in vars(value).items() if name not in ("__dict__", "__weakref__")}
            return type, (value.__name__, value.__bases__, {}), own, None, None, fill_class
        return NotImplemented


class Receiver(pickle.Unpickler):
    """Unpickles what a Sender has pickled; refuses what would bring right answers along."""

    def find_class(self, module: str, name: str) -> Any:
        if GRADERS.match(module):
            raise pickle.UnpicklingError(f"{module}.{name} would bring the grader's file along")
        return super().find_class(module, name)


def names_of(code: CodeType) -> set[str]:
    """The names that a code looks up, and the codes inside of it."""
    inner = (names_of(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def function_of_code(data: bytes) -> FunctionType:
    """A function of its code, which knows nothing yet."""
    code = marshal.loads(data)
    cells = tuple(CellType() for _ in code.co_freevars)
    return FunctionType(code, {"__builtins__": __builtins__}, code.co_name, None, cells)


def fill(function: FunctionType, inside: tuple[dict[str, Any], list[Any], Any, Any]) -> None:
    """Give a function what it uses: globals, the variables around it, and defaults."""
    used, cells, function.__defaults__, function.__kwdefaults__ = inside
    function.__globals__.update(used)
    for cell, value in zip(function.__closure__ or (), cells, strict=True):
        cell.cell_contents = value


def fill_class(made: type, own: dict[str, Any]) -> None:
    """Give a class its methods and whatever else it holds."""
    for name, entry in own.items():
        setattr(made, name, entry)

"""What Python's message means for the line that it comes from, in a sentence, and what stood in that line.

TypeError: 'int' object is not iterable, line 214: a kernel reads memory with tl.load(pointer + offset), not with
[...]; there offsets is a pointer to int32, row is a number (int32)
"""

import ast
import inspect
import linecache
import re
import traceback
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch

from pkv._triton import tl
from pkv.course.tasks import Raised

MOST_NAMES, MOST_LETTERS = 4, 200
NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
POINTER = "a kernel reads memory with tl.load(pointer + offset), not with [...]"
ONLY_TL = "inside of a kernel only tl's functions work, not those of torch, numpy or math"
BLOCK = "a block's numbers are not taken out by [...], which only adds axes: tl.sum, tl.max and tl.where go over all"
ONE_ASSIGNMENT = "Multiple assignments are not supported"
OF_TORCH = re.compile(r"\b(?:torch|np|numpy|math)\.(\w+)\(")
CALL = re.compile(  # of a function with arguments that it does not take
    r"TypeError: (?:.*\.)?([^\s.]+)\(\) (takes .* positional|missing \d|got (an|multiple)|received an invalid)"
)
SENTENCES = (  # what "kind: text" looks like, and what that means; of several the first
    (r"cannot be interpreted as an integer|slice indices must be integers|list indices must be integers",
     "a count or an index is an int: / gives a float, // an int"),
    (r"NoneType", "something is None: does what gives it lack a `return`?"),
    (r"object is not iterable|must be an iterable|cannot unpack", "one value stands where several are taken apart"),
    (r"object is not subscriptable|invalid index|too many indices", "it has fewer axes than are indexed"),
    (r"object is not callable", "what is called here is no function: is a name used twice, or an operator missing?"),
    (r"has no len\(\)", "it is one value, and no list"),
    (r"Boolean value of Tensor|truth value of an array", "`if`, `and` and max() want one truth, and here are many: "
     "torch.where, & and torch.maximum go number by number"),
    (r"only integer tensors of a single element|tensors used as indices", "what is used as an index must be an int, or "
     "a tensor of them: .long()"),
    (r"size of tensor a|must match the (size|existing size)|shapes? .*(mismatch|cannot be)|expanded size|broadcast|"
     "must be equal to|incompatible dimensions", "shapes do not fit: axes are compared from the last one on, and "
     "[:, None] or [None, :] adds one"),
    (r"must have the same dtype|expected scalar type|to have the same dtype", "two dtypes meet: .to(...) makes one"),
    (r"Expected reduction dim|zero-size array|argument is empty|empty sequence", "there is nothing to take the largest "
     "of, or the smallest: it is empty"),
    (r"pop from (an )?empty", "there is nothing left to take: it is empty"),
    (r"Dimension out of range", "it has no such axis: n axes are 0 to n - 1, or from the end -1 to -n"),
    (ONE_ASSIGNMENT, "a kernel takes one assignment a line: a = c, and in the next line b = c"),
    (r"^IndexError", "an index goes past the end: n entries are 0 to n - 1"),
    (r"^KeyError", "there is no entry of that name"),
    (r"^UnboundLocalError", "it is used before it is given a value: on every way through the function?"),
    (r"^NameError", "nothing in the file has that name there"),
    (r"^ZeroDivisionError", "it divides by 0: what of a row without tokens?"),
    (r"^RecursionError", "it calls itself without end"),
    (r"must be of type tl.constexpr|power of 2", "a block's shape is known before the kernel runs: a tl.constexpr, and "
     "a power of two"),
    (r"Unsupported ptr type|invalid operands of type pointer", "memory is read at a pointer plus an offset"),
)  # fmt: skip


def raised(error: BaseException, function: Any) -> Raised:
    """An exception as an answer, with the line of the answer file that it came from, and what that means there."""
    code = getattr(inspect.unwrap(getattr(function, "fn", function)), "__code__", None)
    file = code.co_filename if code is not None else ""
    errors = unwrapped(error)
    frame, line = place_of(errors, file)
    if ONE_ASSIGNMENT in first_line(errors[0]):
        frame, line = None, line_of_two(file) or line
    return Raised(type(errors[0]).__name__, first_line(errors[0]), line or None, meaning(errors[0], frame, file, line))


def unwrapped(error: BaseException) -> list[BaseException]:
    """What a kernel has raised, and what wraps it: Triton's interpreter does so for each function it came through."""
    errors = [error]
    while type(errors[0]).__name__ == "InterpreterError" and errors[0].__cause__ is not None:
        errors.insert(0, errors[0].__cause__)
    return errors


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, and where that announces the next ones, these; "" where it has none."""
    try:
        lines = [line.strip() for line in str(error).strip().splitlines()]
    except Exception:  # its __str__ is the answer's own
        return ""
    text = " ".join(lines) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}..."


def place_of(errors: list[BaseException], file: str) -> tuple[FrameType | None, int]:
    """The last place of a file that an exception came through: that of the first which came through any."""
    for error in errors:
        places = [place for place in traceback.walk_tb(error.__traceback__) if place[0].f_code.co_filename == file]
        if places:
            return places[-1]
    return None, 0


def line_of_two(file: str) -> int | None:
    """Where a kernel of a file has a = b = c. Triton reads a kernel before it runs, and does not say where."""
    try:
        nodes = [*ast.walk(ast.parse("".join(linecache.getlines(file))))]
    except SyntaxError:  # a notebook's cell may hold more than Python
        return None
    kernels = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.decorator_list]
    lines = [
        node.lineno for one in kernels for node in ast.walk(one) if isinstance(node, ast.Assign) and node.targets[1:]
    ]
    return lines[0] if lines else None


def meaning(error: BaseException, frame: FrameType | None, file: str, line: int) -> str:
    """What an exception means, and what the names are in the line that it comes from; "" where none is known.

    Whatever the answer's own values do when they are looked at, this raises nothing.
    """
    try:
        text = linecache.getline(file, line)
        values = values_in(text, frame) if frame else {}
        there = ", ".join(f"{name} is {what}" for name, value in values.items() if (what := described(value)))
        message = f"{type(error).__name__}: {error}"
        said = of_kernel(message, frame, values, text) or of_call(message, frame) or of_python(message)
    except Exception:
        return ""
    return "; ".join(filter(None, [said, there and f"there {there}"]))


def of_kernel(message: str, frame: FrameType | None, values: dict[str, Any], line: str) -> str:
    """What a message means in a kernel's line; "" where it is none, or the message says the same as elsewhere."""
    if any(is_pointer(value) and re.search(rf"\b{name}\[", line) for name, value in values.items()):
        return POINTER
    if frame is None or not any(is_of_triton(value, "tensor") for value in frame.f_locals.values()):
        return ""
    of_torch = OF_TORCH.search(line) or re.match(r"TypeError: (\w+)\(\).*(be Tensor, not|combination of arg)", message)
    if of_torch or any(isinstance(value, torch.Tensor) for value in values.values()):
        return ONLY_TL + (f": use tl.{of_torch[1]}" if of_torch and hasattr(tl, of_torch[1]) else "")
    is_indexed = any(re.search(rf"\b{name}\[", line) for name, value in values.items() if is_of_triton(value, "tensor"))
    if is_indexed and re.search(r"'int' object is not iterable|unsupported tensor index", message):
        return BLOCK
    if "operand type(s) for @" in message:
        is_given = "multiply" in frame.f_globals
        return f"a kernel has no @: use {'the given multiply' if is_given else 'tl.dot'}(a, b)"
    return ""


def of_call(message: str, frame: FrameType | None) -> str:
    """What is said of a call with other arguments than a function takes: the exercise's own, or another."""
    found = CALL.match(message)
    if not found:
        return ""
    if frame is None:
        return f"the exercise calls {found[1]}() with other arguments than stand in its head, which must stay as it is"
    return f"{found[1]}() is called with other arguments than it takes"


def of_python(message: str) -> str:
    """What a message means anywhere; "" of one that is not in the list."""
    return next((means for pattern, means in SENTENCES if re.search(pattern, message)), "")


def values_in(line: str, frame: FrameType) -> dict[str, Any]:
    """The variables of a line, in order."""
    names = dict.fromkeys(NAME.findall(line.partition("#")[0]))
    found = {name: frame.f_locals[name] for name in names if name in frame.f_locals}
    return dict([pair for pair in found.items() if not isinstance(pair[1], ModuleType | FunctionType)][:MOST_NAMES])


def is_of_triton(value: Any, name: str) -> bool:
    """Is it Triton's value of that name? Triton may not be there."""
    return type(value).__module__.startswith("triton.language") and type(value).__name__ == name


def is_pointer(value: Any) -> bool:
    """Is it a kernel's pointer, or a block of them?"""
    return is_of_triton(value, "tensor") and bool(value.type.scalar.is_ptr())


def described(value: Any) -> str:
    """A value by its type and shape."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if is_of_triton(value, "constexpr"):
        return f"the constant {value.value}"
    if is_of_triton(value, "tensor"):
        kind, shape = value.type.scalar, [int(getattr(size, "value", size)) for size in value.shape]
        of = f"to {kind.element_ty}" if is_pointer(value) else f"of {kind}"
        if shape:
            return f"a block {shape} {'of pointers ' if is_pointer(value) else ''}{of}"
        return f"a pointer {of}" if is_pointer(value) else f"a number ({kind})"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)[:40]
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return f"of type {type(value).__name__}"

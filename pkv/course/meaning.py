"""What Python's message means for the line that it comes from, in a sentence, and what stood in that line.

TypeError: 'int' object is not iterable, line 214: a kernel reads memory with tl.load(pointer + offset), not with
[...]; there offsets is a pointer to int32, row is a number (int32)
"""

import linecache
import re
import traceback
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch

MOST_NAMES = 4
NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
POINTER = "a kernel reads memory with tl.load(pointer + offset), not with [...]"
SENTENCES = (  # what "kind: text" looks like, and what that means; of several the first
    (r"^TypeError: .* takes .* positional|^TypeError: .*(missing \d+ required|unexpected keyword)",
     "a function is called with other arguments than stand in its head: the exercise's own head must stay as it is"),
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
     "must be equal to", "shapes do not fit: axes are compared from the last one on, and [:, None] adds one"),
    (r"must have the same dtype|expected scalar type|to have the same dtype", "two dtypes meet: .to(...) makes one"),
    (r"^IndexError", "an index goes past the end: n entries are 0 to n - 1"),
    (r"^KeyError", "there is no entry of that name"),
    (r"^UnboundLocalError", "it is used before it is given a value: on every way through the function?"),
    (r"^NameError", "nothing in the file has that name there"),
    (r"^ZeroDivisionError", "it divides by 0: what of a row without tokens?"),
    (r"^RecursionError", "it calls itself without end"),
    (r"must be of type tl.constexpr|power of 2", "a block's shape is known before the kernel runs: a tl.constexpr, and "
     "a power of two"),
    (r"Unsupported ptr type|invalid operands of type pointer", "memory is read at a pointer plus an offset"),
    (r"must be Tensor, not tensor", "inside of a kernel only tl's functions work, not torch's"),
)  # fmt: skip


def meaning(error: BaseException, file: str) -> str:
    """What an exception means, and what the names are in the line of `file` that it comes from; "" where none is known.

    Whatever the answer's own values do when they are looked at, this raises nothing.
    """
    try:
        frame, line = place_of(error, file)
        values = values_in(linecache.getline(file, line), frame) if frame else {}
        there = ", ".join(f"{name} is {what}" for name, value in values.items() if (what := described(value)))
        said = sentence(f"{type(error).__name__}: {error}", values, linecache.getline(file, line))
    except Exception:
        return ""
    return "; ".join(filter(None, [said, there and f"there {there}"]))


def sentence(message: str, values: dict[str, Any], line: str) -> str:
    """What a message means; "" of one that is not in the list."""
    indexed = [name for name, value in values.items() if is_pointer(value) and re.search(rf"\b{name}\[", line)]
    if indexed:
        return POINTER
    return next((means for pattern, means in SENTENCES if re.search(pattern, message)), "")


def place_of(error: BaseException, file: str) -> tuple[FrameType | None, int]:
    """The last place of a file that an exception came through."""
    places = [place for place in traceback.walk_tb(error.__traceback__) if place[0].f_code.co_filename == file]
    return places[-1] if places else (None, 0)


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

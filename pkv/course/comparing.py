"""Are two answers the same, and if not, where do they differ first?

Answers are nests of numbers, texts, lists and tensors. Ints are equal or not; floats may differ by a tolerance, NaN is
equal to nothing (agree() takes it for equal to itself: two wrong answers may be wrong alike).
"""

import math
import numbers
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from pkv.course.tasks import Raised
from pkv.wording.counts import count_of

MOST_SHOWN = 12  # numbers of a tensor that a message shows
LONGEST, LARGEST = 400, 10**100  # letters of a value in a message; an int that is shown by its digits
COMPARED = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip


class AsTuple(list[Any]):
    """A list to whoever compares it, and shown as the tuple that it was."""


def plain(value: Any) -> Any:
    """A value as nests of lists, numbers, texts and tensors on the CPU: all that an answer is compared by.

    A class of the answer's own stays behind with all that it says of itself: how it is equal, or what its shape is.
    """
    if isinstance(value, torch.Tensor):
        return plain_tensor(value)
    if isinstance(value, np.ndarray):
        value = np.array(value)
        value = value.astype(np.float64) if value.dtype == np.longdouble else value
        return plain_tensor(torch.from_numpy(value)) if value.dtype.kind in "biuf" else plain(value.tolist())
    if isinstance(value, np.generic):
        return float(value) if isinstance(value, np.longdouble) else plain(value.item())
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, dict):
        return {str.__str__(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return (AsTuple if isinstance(value, tuple) else list)(plain(item) for item in value)
    return f"<{type(value).__name__}>"


def plain_tensor(value: torch.Tensor) -> Any:
    """A tensor of torch's own class, of numbers that lie there one by one; else a text that says what it is."""
    with torch._C.DisableTorchFunctionSubclass():
        made = value.detach()
        made = made.to_dense() if made.layout != torch.strided else made
        made = made.cpu().resolve_neg().clone(memory_format=torch.contiguous_format)
    if type(made) is not torch.Tensor:
        return f"<{type(value).__name__}>"
    if made.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return made.long()
    return f"<a tensor of {str(made.dtype).removeprefix('torch.')}>" if made.dtype not in COMPARED else made


def agree(right: Any, got: Any, tolerance: float) -> bool:
    """The same answer, wrong or not: NaN agrees with NaN, an exception with one of its kind."""
    if isinstance(right, Raised) or isinstance(got, Raised):
        return isinstance(right, Raised) and isinstance(got, Raised) and right.kind == got.kind
    return difference(right, got, tolerance, (), nan_is_equal=True) is None


def difference(
    right: Any, got: Any, tolerance: float, axes: tuple[str, ...] = (), where: str = "", nan_is_equal: bool = False
) -> str | None:
    """None if `got` is right; else where it first differs, what was expected and what came. Both are plain()."""
    at = f"{where}: " if where else ""
    if isinstance(right, torch.Tensor):
        return tensor_difference(right, got, tolerance, axes, at, nan_is_equal)
    if isinstance(right, list) and is_state(right) and isinstance(got, torch.Tensor):
        return f"{at}expected out and lse, got {brief(got)}"
    if isinstance(got, torch.Tensor) and isinstance(right, list | int | float):
        got = got.tolist()
    if isinstance(right, list):
        if not isinstance(got, list):
            return f"{at}expected {brief(right)}, got {brief(like(right, got))}"
        if not axes and is_short(right):
            same = len(right) == len(got) and not any(
                difference(mine, yours, tolerance, (), where, nan_is_equal) for mine, yours in zip(right, got)
            )
            return None if same else f"{at}expected {brief(right)}, got {brief(like(right, got))}"
        names = parts_of(right, axes)
        for index, (mine, yours) in enumerate(zip(right, got, strict=False)):
            inner = f"{where}, {names(index)}" if where else names(index)
            fault = difference(mine, yours, tolerance, axes if is_state(right) else axes[1:], inner, nan_is_equal)
            if fault:
                return fault
        if len(right) != len(got):
            entries = count_of(len(right), "entry")
            return f"{at}expected {entries}, {brief(right)}, got {len(got)}, {brief(like(right, got))}"
        return None
    if isinstance(right, dict):
        if not isinstance(got, dict):
            return f"{at}expected {brief(right)}, got {brief(got)}"
        if right.keys() != got.keys():
            return f"{at}expected the keys {named(right)}, got {named(got)}"
        for key in right:
            fault = difference(right[key], got[key], tolerance, (), f"{where}, {key}" if where else key, nan_is_equal)
            if fault:
                return fault
        return None
    if isinstance(right, float) and isinstance(got, int | float) and not isinstance(got, bool):
        same = right == got or abs(right - float_of(got)) <= tolerance * max(abs(right), 1e-12)
        same = same or (nan_is_equal and math.isnan(right) and math.isnan(float_of(got)))
        return None if same else f"{at}expected {brief(right)}, got {brief(got)}"
    same = right == got and isinstance(right, bool) == isinstance(got, bool)
    return None if same else f"{at}expected {brief(right)}, got {brief(got)}"


def float_of(value: int | float) -> float:
    """A number as a float; an int that is none is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value > 0 or -1)


def is_short(right: list[Any]) -> bool:
    """A few numbers: a message shows all of them, where their places have no name."""
    return len(right) <= MOST_SHOWN and all(isinstance(item, int | float) for item in right)


def is_state(right: list[Any]) -> bool:
    """A pair (out, lse)."""
    return len(right) == 2 and all(isinstance(part, torch.Tensor) for part in right)


def parts_of(right: list[Any], axes: tuple[str, ...]) -> Any:
    """How the entries of a list are called: (out, lse) by those names, others by their axis."""
    if is_state(right):
        return ("out", "lse").__getitem__
    name = axes[0] if axes else "entry"
    return lambda index: f"{name} {index}"


def tensor_difference(
    right: torch.Tensor, got: Any, tolerance: float, axes: tuple[str, ...], at: str, nan_is_equal: bool
) -> str | None:
    """As difference(), of tensors: shapes first, then what is no number, then the largest error."""
    if isinstance(got, list | int | float):
        got = tensor_of(got)
    if not isinstance(got, torch.Tensor):
        return f"{at}expected a tensor {list(right.shape)}, got {brief(got)}"
    if right.shape != got.shape:
        return f"{at}expected shape {list(right.shape)}, got {list(got.shape)}"
    if right.is_floating_point() or got.is_floating_point():
        mine, yours = right.double(), got.double()
    else:
        mine, yours = right.long(), got.long()
    both_nan = mine.isnan() & yours.isnan() if nan_is_equal else torch.zeros_like(mine, dtype=torch.bool)
    wrong = ~(((mine - yours).abs() <= allowed_of(right, tolerance)) | (mine == yours) | both_nan)
    if not wrong.any():
        return None
    index = tuple(int(i) for i in wrong.nonzero()[0])
    place = ", ".join(f"{name} {i}" for name, i in zip(names_of(axes, right.dim()), index))
    place = f"{place}: " if place else ""
    share = f" ({int(wrong.sum())} of {wrong.numel()} numbers differ)" if wrong.numel() > 1 else ""
    return f"{at}{place}expected {brief(right[index].item())}, got {brief(got[index].item())}{share}"


def tensor_of(value: Any) -> Any:
    """A tensor of a nest of lists, numbers and tensors; the value itself where it is none."""

    def numbers_of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.tolist()
        return [numbers_of(item) for item in value] if isinstance(value, list) else value

    nest = numbers_of(value)
    try:
        made = torch.tensor(nest)
        return torch.tensor(nest, dtype=torch.float64) if made.is_floating_point() else made
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return value


def allowed_of(right: torch.Tensor, tolerance: float) -> torch.Tensor:
    """How far each number may be off: relative to the largest right one of its line (the last axis), or to 1."""
    if not right.is_floating_point() or not right.numel():
        return torch.zeros(())
    sizes = right.double().abs().nan_to_num(nan=0.0, posinf=0.0)
    return tolerance * (sizes.amax(-1, keepdim=True) if right.dim() else sizes).clamp_min(1.0)


def names_of(axes: tuple[str, ...], n: int) -> list[str]:
    """Names of n axes: those given, then numbers."""
    return [axes[i] if i < len(axes) else f"axis {i}, index" for i in range(n)]


def like(right: Any, got: Any) -> Any:
    """An answer to be shown beside the right one: its lists as tuples where the right ones are."""
    if not isinstance(right, list) or not isinstance(got, list) or not right:
        return got
    return type(right)(like(right[min(index, len(right) - 1)], item) for index, item in enumerate(got))


def brief(value: Any) -> str:
    """A value as a message shows it: in some hundred letters, all of which can be printed."""
    text = whole(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def whole(value: Any) -> str:
    """As brief(), whatever its length."""
    if isinstance(value, Raised):
        return f"{value.kind}: {value.text}" if value.text else value.kind
    if isinstance(value, torch.Tensor):
        if value.numel() <= MOST_SHOWN:
            return whole(value.tolist())
        return f"a tensor {list(value.shape)}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        shown = ", ".join(whole(item) for item in value[:MOST_SHOWN]) + (", ..." if len(value) > MOST_SHOWN else "")
        if isinstance(value, AsTuple):
            return f"({shown},)" if len(value) == 1 else f"({shown})"
        return f"[{shown}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{named([key])}: {whole(item)}" for key, item in value.items()) + "}"
    if isinstance(value, int) and abs(value) > LARGEST:  # Python makes no digits of more than some thousand
        return f"an int of {count_of(value.bit_length(), 'bit')}"
    return repr(value)


def named(keys: Iterable[str]) -> str:
    """The keys of a dict in a row. They are the answer's own."""
    names = ["".join(letter if letter.isprintable() else " " for letter in key[:LONGEST]) for key in keys]
    return ", ".join(names[:MOST_SHOWN]) + (", ..." if len(names) > MOST_SHOWN else "")

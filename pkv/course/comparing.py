"""Are two answers the same, and if not, where do they differ first?

Answers are nests of numbers, texts, lists and tensors. Ints are equal or not; floats may differ by a tolerance, NaN is
equal to nothing (agree() takes it for equal to itself: two wrong answers may be wrong alike).
"""

import math
import numbers
from typing import Any

import numpy as np
import torch

from pkv.course.tasks import Raised

MOST_SHOWN = 12  # numbers of a tensor that a message shows


def plain(value: Any) -> Any:
    """A value as nests of lists, numbers, texts and tensors on the CPU: all that an answer is compared by."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy()) if value.dtype.kind in "biuf" else plain(value.tolist())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain(item) for item in value]
    return f"<{type(value).__name__}>"


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
    if isinstance(got, torch.Tensor) and isinstance(right, list | int | float):
        got = got.tolist()
    if isinstance(right, list):
        if not isinstance(got, list):
            return f"{at}expected {brief(right)}, got {brief(got)}"
        names = parts_of(right, axes)
        for index, (mine, yours) in enumerate(zip(right, got, strict=False)):
            inner = f"{where}, {names(index)}" if where else names(index)
            fault = difference(mine, yours, tolerance, axes if is_state(right) else axes[1:], inner, nan_is_equal)
            if fault:
                return fault
        if len(right) != len(got):
            return f"{at}expected {len(right)} entries, {brief(right)}, got {len(got)}, {brief(got)}"
        return None
    if isinstance(right, dict):
        if not isinstance(got, dict) or right.keys() != got.keys():
            return f"{at}expected {brief(right)}, got {brief(got)}"
        for key in right:
            fault = difference(right[key], got[key], tolerance, (), f"{where}, {key}" if where else key, nan_is_equal)
            if fault:
                return fault
        return None
    if isinstance(right, float) and isinstance(got, int | float) and not isinstance(got, bool):
        same = right == got or abs(right - got) <= tolerance * max(abs(right), 1e-12)
        same = same or (nan_is_equal and math.isnan(right) and math.isnan(got))
        return None if same else f"{at}expected {brief(right)}, got {brief(got)}"
    same = right == got and isinstance(right, bool) == isinstance(got, bool)
    return None if same else f"{at}expected {brief(right)}, got {brief(got)}"


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
        try:
            got = torch.tensor(got)
        except (TypeError, ValueError):
            return f"{at}expected a tensor {list(right.shape)}, got {brief(got)}"
    if not isinstance(got, torch.Tensor):
        return f"{at}expected a tensor {list(right.shape)}, got {brief(got)}"
    if right.shape != got.shape:
        return f"{at}expected shape {list(right.shape)}, got {list(got.shape)}"
    mine, yours = right.double(), got.double()
    both_nan = mine.isnan() & yours.isnan() if nan_is_equal else torch.zeros_like(mine, dtype=torch.bool)
    finite = mine[mine.isfinite()].abs()
    allowed = tolerance * max(finite.max().item() if finite.numel() else 0.0, 1.0) if right.is_floating_point() else 0.0
    error = (mine - yours).abs()
    wrong = ~((error <= allowed) | (mine == yours) | both_nan)
    if not wrong.any():
        return None
    index = tuple(int(i) for i in wrong.nonzero()[0])
    place = ", ".join(f"{name} {i}" for name, i in zip(names_of(axes, right.dim()), index))
    place = f"{place}: " if place else ""
    share = f" ({int(wrong.sum())} of {wrong.numel()} numbers differ)" if wrong.numel() > 1 else ""
    return f"{at}{place}expected {brief(mine[index].item())}, got {brief(yours[index].item())}{share}"


def names_of(axes: tuple[str, ...], n: int) -> list[str]:
    """Names of n axes: those given, then numbers."""
    return [axes[i] if i < len(axes) else f"axis {i}, index" for i in range(n)]


def brief(value: Any) -> str:
    """A value as a message shows it."""
    if isinstance(value, Raised):
        return f"{value.kind}: {value.text}" if value.text else value.kind
    if isinstance(value, torch.Tensor):
        if value.numel() <= MOST_SHOWN:
            return brief(value.tolist())
        return f"a tensor {list(value.shape)}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        shown = ", ".join(brief(item) for item in value[:MOST_SHOWN])
        return f"[{shown}{', ...' if len(value) > MOST_SHOWN else ''}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {brief(item)}" for key, item in value.items()) + "}"
    return repr(value)

"""Checks of arguments, shared by several files. Each error names the argument and says what to pass instead."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence, Set, ValuesView
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from pkv.runtime.tracers import refuse_tracers

LONGEST_ROW = 2**31 - 64  # tokens: the end of a row's last tile is an int32 too
MOST_SPLITS = 2**16  # per row; kernels cut rows in 32-bit arithmetic
LARGEST_INT = 2**63 - 1
SHORT_NAMES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
Ints: TypeAlias = Sequence[int] | Iterator[int] | ValuesView[int] | np.ndarray | Tensor


def at_least(minimum: int, name: str, value: int) -> int:
    """Return `value` as an int; TypeError if it is not an int, ValueError if it is below `minimum`."""
    value = as_int(name, value)
    if value < minimum:
        raise ValueError(f"{name} = {value} is too small: pass {minimum} or more")
    return value


def as_int(name: str, value: Any) -> int:
    """Return `value` as an int; TypeError if it is not an int. Floats, even whole ones, and bools are refused."""
    is_bool = isinstance(value, (bool, np.bool_)) or (isinstance(value, Tensor) and value.dtype == torch.bool)
    try:
        if not is_bool:
            return int(operator.index(value))
    except (TypeError, RuntimeError):  # a value without an index, or a tensor of other numbers
        pass
    kind = type(value).__name__
    raise TypeError(f"{name} must be an int, got {f'a {kind} of {value.dtype}' if isinstance(value, Tensor) else kind}")


def host_ints(name: str, values: Ints) -> np.ndarray:
    """Return `values` as a new int64 array [n]. Waits for a tensor on a GPU, and reads an iterator to its end."""
    if isinstance(values, (Iterator, ValuesView)):
        values = list(values)
    array = _as_array(name, values)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {list(array.shape)}, expected a flat list of ints, one per row")
    kind = array.dtype.kind
    if kind in "OUS" or (kind == "f" and all(type(value) is int for value in values)):
        # not ints, or ints that do not fit 64 bits, which numpy makes objects or floats
        exact: Any = [as_int(f"{name}[{row}]", value) for row, value in enumerate(values)]
        too_large = [row for row, value in enumerate(exact) if not -LARGEST_INT <= value <= LARGEST_INT]
    elif kind == "b" or (kind in "iu" and isinstance(values, (list, tuple)) and bool in set(map(type, values))):
        raise TypeError(f"{name} must be integers, got bool")  # numpy reads [True, 5] as [1, 5]
    elif array.size and kind not in "iu":  # numpy reads an empty list as floats
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    else:
        exact = array
        too_large = np.flatnonzero(array > LARGEST_INT).tolist() if kind == "u" else []
    for row in too_large[:1]:
        raise ValueError(f"{name}[{row}] = {exact[row]} does not fit into 64 bits: no row is so long")
    return np.array(exact, dtype=np.int64)


def _as_array(name: str, values: Ints) -> np.ndarray:
    """Convert values to a numpy array; TypeError for values without an order, floats of torch, or ragged lists."""
    if isinstance(values, Tensor):
        refuse_tracers(name, **{name: values})
        if values.is_floating_point():  # numpy does not know bfloat16
            raise TypeError(f"{name} must be integers, got {str(values.dtype).removeprefix('torch.')}")
        return values.detach().cpu().numpy()
    if isinstance(values, (str, bytes, Set, Mapping)):
        raise TypeError(f"{name} must be a flat list of ints, one per row, got a {type(values).__name__}")
    try:
        return np.asarray(values)
    except ValueError:  # lists of unequal lengths
        raise TypeError(f"{name} must be a flat list of ints, one per row") from None


def check_tensor(
    name: str,
    x: Tensor,
    shape: Sequence[int | str],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> None:
    """Check a tensor's shape (a word stands for any size), dtype and device (None for any)."""
    refuse_tracers(name, **{name: x})
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {type(x).__name__}: make one with torch.tensor(...)")
    if x.ndim != len(shape) or any(want != size for want, size in zip(shape, x.shape) if not isinstance(want, str)):
        raise ValueError(f"{name} has shape {list(x.shape)}, expected [{', '.join(map(str, shape))}]")
    if dtype is not None and x.dtype != dtype:
        raise TypeError(f"{name} is {x.dtype}, expected {dtype}: pass {name}.to({dtype})")
    if x.is_neg() or x.layout != torch.strided:
        kind, remedy = ("lazily negated", "resolve_neg") if x.is_neg() else ("sparse", "to_dense")
        raise ValueError(f"{name} is {kind}, but kernels read its memory directly: pass {name}.{remedy}()")
    if device is not None and x.device != device:
        raise ValueError(f"{name} is on {x.device}, the others on {device}: pass {name}.to({str(device)!r})")


def dtype_named(dtype: Any) -> torch.dtype:
    """Return torch's dtype for a dtype of torch's or numpy's, or a name; TypeError if it is not a floating-point dtype.

    torch.float16, "float16", "torch.float16", "fp16", np.float16 and np.dtype("float16") all give torch.float16.
    """
    name: Any = dtype
    if not isinstance(dtype, (str, torch.dtype)) and isinstance(dtype, (type, np.dtype)):
        with suppress(TypeError):  # not a type of numpy's
            name = np.dtype(dtype).name
    if isinstance(name, str):
        name = getattr(torch, SHORT_NAMES.get(name, name.removeprefix("torch.")), None)
    if not isinstance(name, torch.dtype) or not name.is_floating_point:
        raise TypeError(f'dtype = {dtype!r} must be a floating-point dtype of torch: torch.float16, or "float16"')
    return name

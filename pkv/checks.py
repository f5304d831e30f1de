"""Checks of arguments that several files make. Each error names the argument and says what to pass instead."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

LONGEST_ROW = 2**31 - 64  # tokens: the end of a row's last tile is an int32 too
MOST_SPLITS = 2**16  # of a row; kernels cut rows in 32-bit arithmetic
Ints: TypeAlias = Sequence[int] | np.ndarray | Tensor


def at_least(minimum: int, name: str, value: int) -> int:
    """`value` as an int; TypeError if it is none, ValueError if it is too small."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    value = int(operator.index(value))
    if value < minimum:
        raise ValueError(f"{name} = {value} is too small: pass {minimum} or more")
    return value


def host_ints(name: str, values: Ints) -> np.ndarray:
    """`values` as a new int64 array of one dimension; a tensor on a GPU is waited for."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    try:
        array = np.asarray(values)
    except ValueError:  # lists of unequal lengths
        raise TypeError(f"{name} must be a flat list of ints, one per row") from None
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {list(array.shape)}, expected a flat list of ints, one per row")
    if array.size and array.dtype.kind not in "iu":  # numpy takes an empty list for floats
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    return array.astype(np.int64)


def check_tensor(
    name: str,
    x: Tensor,
    shape: Sequence[int | str],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> None:
    """Check shape (a word stands for any size), dtype and device (None for any)."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {type(x).__name__}: make one with torch.tensor(...)")
    if x.ndim != len(shape) or any(want != size for want, size in zip(shape, x.shape) if not isinstance(want, str)):
        raise ValueError(f"{name} has shape {list(x.shape)}, expected [{', '.join(map(str, shape))}]")
    if dtype is not None and x.dtype != dtype:
        raise TypeError(f"{name} is {x.dtype}, expected {dtype}: pass {name}.to({dtype})")
    if x.is_neg() or x.layout != torch.strided:
        remedy = f"{name}.resolve_neg()" if x.is_neg() else f"{name}.to_dense()"
        raise ValueError(f"{name} is no plain tensor, and kernels read memory as it is: pass {remedy}")
    if device is not None and x.device != device:
        raise ValueError(f"{name} is on {x.device}, the others on {device}: pass {name}.to({str(device)!r})")

"""What the engines of others share: reasons why they cannot do a batch, and a step's numbers brought to the GPU.

lengths = staging(3, device)         pinned memory on the host, and its place on the GPU: made once
lengths.send([5, 40, 7])             written and copied, once a step; the GPU's tensor
"""

import functools
import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pkv.bench.engines.engine import Batch


@dataclass(frozen=True)
class Staging:
    """int32 numbers on their way to a device: `host` is pinned where the device is a GPU, so no copy waits for it."""

    host: torch.Tensor
    there: torch.Tensor

    def fill(self, values: Sequence[int] | npt.NDArray[Any]) -> torch.Tensor:
        """Write the numbers on the host; for a library that copies them itself."""
        self.host.numpy()[:] = values
        return self.host

    def send(self, values: Sequence[int] | npt.NDArray[Any]) -> torch.Tensor:
        """Write the numbers and queue their copy; the tensor on the device."""
        return self.there.copy_(self.fill(values), non_blocking=True)


def staging(size: int, device: torch.device) -> Staging:
    """Room for `size` numbers."""
    host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
    return Staging(host, torch.zeros(size, dtype=torch.int32, device=device))


def page_counts(batch: Batch) -> npt.NDArray[np.int64]:
    """Pages of each row."""
    return -(-np.array(batch.lengths, dtype=np.int64) // batch.shape.page_size)


def has_empty_rows(batch: Batch) -> str | None:
    """The reason of an engine that gives no defined result for a row without tokens; None where all have some."""
    if not batch.lengths:
        return "the batch has no row"
    if 0 not in batch.lengths:
        return None
    return f"row {batch.lengths.index(0)} has no tokens, and what its kernel leaves there is not defined"


def not_on_gpu(batch: Batch) -> str | None:
    """The reason of an engine that runs on a GPU only."""
    device = batch.q.device
    return None if device.type == "cuda" else f"it runs on a CUDA GPU only, and the batch lies on {device}"


def not_half(batch: Batch) -> str | None:
    """The reason of an engine whose kernels take 16-bit numbers only."""
    half = (torch.float16, torch.bfloat16)
    if batch.shape.dtype in half and batch.shape.kv_dtype == batch.shape.dtype:
        return None
    return f"its kernels take float16 or bfloat16, not {str(batch.shape.dtype).removeprefix('torch.')}"


@functools.cache
def entry_point(module: str, function: str, argument: str, package: str) -> Any:
    """`function` of `module`, or (a str) why there is none. argument: one that the versions known here take.

    A broken install may raise anything on import.
    """
    try:
        found = getattr(importlib.import_module(module), function)
        known = inspect.signature(found).parameters
    except Exception as error:
        top = module.split(".")[0]
        if isinstance(error, ModuleNotFoundError) and error.name == top:
            return f"{package} is not installed: pip install {top}, or put its kernels on PYTHONPATH"
        first = (str(error).strip().splitlines() or [""])[0]
        return f"importing {function} from {package} fails ({type(error).__name__}: {first})"
    if argument not in known:
        return f"this version of {package} has another {function}: it takes no {argument}"
    return found

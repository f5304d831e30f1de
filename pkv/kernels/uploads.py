"""The arrays of a plan on a GPU, where kernels read them."""

from typing import Any

import numpy as np
import torch

from pkv.plans.fields import Int32Array, Launch
from pkv.plans.plan import Plan
from pkv.runtime.graphs import is_capturing, keep_for_replays
from pkv.runtime.memory import Memory

UPLOADS = Memory()  # of a plan: {(name, device): a tensor, or the stream that it was copied on}


def uploaded(plan: Plan, name: "str | tuple[int, ...]", device: torch.device) -> torch.Tensor:
    """One of the plan's arrays on `device`, or a launch's row numbers; all are copied there at once, and kept.

    It is for kernels that are launched on the current stream: as long as those may read it, it stays, though the plan
    be dropped. RuntimeError while a CUDA graph is captured, if the arrays are not there yet.
    """
    there = UPLOADS.of(plan)
    if (name, device) not in there:
        _upload(plan, device, there)
    found: torch.Tensor = there[name, device]
    if is_capturing(device):
        keep_for_replays(there["packed", device], device)
    elif device.type == "cuda" and torch.cuda.current_stream(device) != there["stream", device]:
        found.record_stream(torch.cuda.current_stream(device))
    return found


def uploaded_rows(plan: Plan, launch: Launch, device: torch.device) -> torch.Tensor | None:
    """The launch's row numbers on `device`, or None where they are all rows in order."""
    return None if len(launch.rows) == plan.n_rows else uploaded(plan, launch.rows, device)


def _upload(plan: Plan, device: torch.device, there: dict[Any, Any]) -> None:
    """One copy for all arrays. Each begins at a multiple of 16 bytes, so that kernels find all aligned alike."""
    if is_capturing(device):
        raise RuntimeError(
            f"this plan of stage {plan.stage!r} is not on {device} yet, and cannot be copied there while a CUDA graph "
            "is captured: make it with pkv.plan, run it once with pkv.run, then capture pkv.run with it"
        )
    names = ("items", "program_offsets", "partial_offsets", "item_order")
    arrays: dict[Any, Int32Array] = {name: getattr(plan, name) for name in names if getattr(plan, name) is not None}
    arrays |= {launch.rows: np.array(launch.rows, dtype=np.int32) for launch in plan.launches}
    begins = np.cumsum([0] + [-(-array.size // 4) * 4 for array in arrays.values()])
    packed = np.zeros(begins[-1], dtype=np.int32)
    for array, begin in zip(arrays.values(), begins, strict=False):
        packed[begin : begin + array.size] = array.ravel()
    copied = torch.from_numpy(packed).to(device)
    if device.type == "cuda":
        there["stream", device] = torch.cuda.current_stream(device)
    there["packed", device] = copied
    for (name, array), begin in zip(arrays.items(), begins, strict=False):
        there[name, device] = copied[begin : begin + array.size].view(array.shape)

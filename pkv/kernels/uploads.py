"""Uploads: a plan's arrays, copied to the GPU once so that kernels can read them."""

from typing import Any

import numpy as np
import torch

from pkv.plans.fields import Int32Array, Launch
from pkv.plans.plan import Plan
from pkv.runtime.graphs import is_capturing, keep_for_replays
from pkv.runtime.memory import Memory

UPLOADS = Memory()  # for each plan: {(name, device): a tensor, or the stream that it was copied on}


def uploaded(plan: Plan, name: "str | tuple[int, ...]", device: torch.device) -> torch.Tensor:
    """Return one of the plan's arrays, or a launch's row numbers, on `device`. All are copied at once and kept.

    Use the tensor in kernels that are launched on the current stream. It stays as long as they may read it, even if the
    plan is dropped. RuntimeError while a CUDA graph is captured, if the arrays are not there yet.
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
    """Return the launch's row numbers, int32, on `device`; None if they are all rows in order."""
    return None if len(launch.rows) == plan.n_rows else uploaded(plan, launch.rows, device)


def _upload(plan: Plan, device: torch.device, there: dict[Any, Any]) -> None:
    """Copy all arrays at once. Each begins at a multiple of 16 bytes, so that all have the same alignment."""
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

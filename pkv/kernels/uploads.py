"""Uploads: a plan's arrays, copied to the GPU once so that kernels can read them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from pkv.plans.fields import Int32Array, Launch
from pkv.plans.plan import Plan
from pkv.runtime.graphs import is_capturing, keep_for_replays
from pkv.runtime.memory import Memory

UPLOADS = Memory()  # for each plan: {device: the Uploads there}
NAMES = ("items", "program_offsets", "partial_offsets", "item_order")


class Uploads:
    """A plan's arrays on one device, by name, and the row numbers of its launches, by the launch's rows.

    packed: the memory that holds them all. stream: the one that they were copied on, None on a CPU.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        arrays: dict[Any, Int32Array] = {name: getattr(plan, name) for name in NAMES if getattr(plan, name) is not None}
        arrays |= {launch.rows: np.array(launch.rows, dtype=np.int32) for launch in plan.launches}
        begins = np.cumsum([0] + [-(-array.size // 4) * 4 for array in arrays.values()])  # multiples of 16 bytes
        packed = np.zeros(begins[-1], dtype=np.int32)
        for array, begin in zip(arrays.values(), begins, strict=False):
            packed[begin : begin + array.size] = array.ravel()
        self.packed = torch.from_numpy(packed).to(device)
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.arrays: Mapping[Any, torch.Tensor] = {
            name: self.packed[begin : begin + array.size].view(array.shape)
            for (name, array), begin in zip(arrays.items(), begins, strict=False)
        }

    def rows_of(self, launch: Launch, n_rows: int) -> torch.Tensor | None:
        """Return the launch's row numbers, int32; None if they are all n_rows rows in order."""
        return None if len(launch.rows) == n_rows else self.arrays[launch.rows]


def uploaded(plan: Plan, device: torch.device) -> Uploads:
    """Return the plan's arrays on `device`; all are copied at once and kept.

    Use them in kernels that are launched on the current stream. They stay as long as those may read them, even if the
    plan is dropped. RuntimeError while a CUDA graph is captured, if the arrays are not there yet.
    """
    there = UPLOADS.of(plan)
    found: Uploads | None = there.get(device)
    if is_capturing(device):
        if found is None:
            raise RuntimeError(
                f"this plan of stage {plan.stage!r} is not on {device} yet, and cannot be copied there while a CUDA "
                "graph is captured: make it with pkv.plan, run it once with pkv.run, then capture pkv.run with it"
            )
        keep_for_replays(found.packed, device)
    elif found is None:
        found = there.setdefault(device, Uploads(plan, device))
    elif found.stream is not None and torch.cuda.current_stream(device) != found.stream:
        found.packed.record_stream(torch.cuda.current_stream(device))
    return found

"""A Plan: what pkv.plan makes, and everything else (launching, timing, drawing, simulating) only reads.

fields.py says what a plan holds. Here it is checked, counted, compared, printed and written.
"""

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from pkv.plans.as_json import fields_from_json, plan_to_dict
from pkv.plans.counters import Counters, count
from pkv.plans.fields import Int32Array, Launch, PlanFields
from pkv.plans.printing import as_table
from pkv.plans.soundness import first_fault
from pkv.runtime.graphs import is_capturing, keep_for_replays
from pkv.runtime.locks import renew_properties
from pkv.wording import count_of


@renew_properties
@dataclass(frozen=True, eq=False)
class Plan(PlanFields):
    """Who does which tiles of one decode step. Made by a stage's plan(); see the module's text for the arrays.

    lengths int32 [n_rows] tokens; items int32 [n_items, 3] = (row, begin, end); program_offsets int32 [n_programs + 1];
    partial_offsets int32 [n_rows + 1]; item_order int32 [n_items] or None (as listed); launches in order; tile in
    tokens; gpu and programs_per_sm as planned for. With `dynamic` the lengths are upper bounds, and the kernels read
    the true ones on the GPU: such a plan serves every step and can be captured in a CUDA graph. variant: which of a
    stage's kernels, where it has several. A plan that stage adaptive chose carries the winner's stage, an explanation,
    and as `fallback` the stage of ours that run() takes where the winner turns out not to work here. family, grid_order
    and merging: whose kernels run it, and how they share the work.
    """

    _kept: dict[Any, Any] = field(init=False, default_factory=dict, repr=False)  # what running it makes once
    _is_sound: bool = field(init=False, default=False, repr=False)  # made by pkv.plan, or checked since

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: without what running the plan has made, such as tensors on a GPU."""
        return {**self.__dict__, "_kept": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    @cached_property
    def counters(self) -> Counters:
        return count(self)

    def tensor(self, name: "str | tuple[int, ...]", device: torch.device) -> torch.Tensor:
        """One of the arrays on `device`, or a launch's row numbers; all are copied there at once, and kept.

        It is for kernels that are launched on the current stream: as long as those may read it, it stays, though the
        plan be dropped. RuntimeError while a CUDA graph is captured, if the arrays are not there yet.
        """
        if (name, device) not in self._kept:
            self._upload(device)
        found: torch.Tensor = self._kept[name, device]
        if is_capturing(device):
            keep_for_replays(self._kept["packed", device], device)
        elif device.type == "cuda" and torch.cuda.current_stream(device) != self._kept["stream", device]:
            found.record_stream(torch.cuda.current_stream(device))
        return found

    def rows_tensor(self, launch: Launch, device: torch.device) -> torch.Tensor | None:
        """The launch's row numbers on `device`, or None where they are all rows in order."""
        return None if len(launch.rows) == self.n_rows else self.tensor(launch.rows, device)

    def _upload(self, device: torch.device) -> None:
        """One copy for all arrays. Each begins at a multiple of 16 bytes, so that kernels find all aligned alike."""
        if is_capturing(device):
            raise RuntimeError(
                f"this plan of stage {self.stage!r} is not on {device} yet, and cannot be copied there while a CUDA "
                "graph is captured: make it with pkv.plan, run it once with pkv.run, then capture pkv.run with it"
            )
        names = ("items", "program_offsets", "partial_offsets", "item_order")
        arrays: dict[Any, Int32Array] = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        arrays |= {launch.rows: np.array(launch.rows, dtype=np.int32) for launch in self.launches}
        begins = np.cumsum([0] + [-(-array.size // 4) * 4 for array in arrays.values()])
        packed = np.zeros(begins[-1], dtype=np.int32)
        for array, begin in zip(arrays.values(), begins, strict=False):
            packed[begin : begin + array.size] = array.ravel()
        there = torch.from_numpy(packed).to(device)
        if device.type == "cuda":
            self._kept["stream", device] = torch.cuda.current_stream(device)
        self._kept["packed", device] = there
        for (name, array), begin in zip(arrays.items(), begins, strict=False):
            self._kept[name, device] = there[begin : begin + array.size].view(array.shape)

    def validate(self) -> "Plan":
        """Return self if each token of each row is covered exactly once and all arrays agree, else ValueError."""
        fault = first_fault(self)
        if fault:
            raise ValueError(f"plan of stage {self.stage!r}: {fault}")
        return self

    def diff(self, other: "Plan") -> list[str]:
        """What differs, one readable line each; empty for equal plans."""
        if not isinstance(other, Plan):
            raise TypeError(f"other must be a pkv.Plan, got {type(other).__name__}")
        lines = []
        others = other.to_dict()
        for name, mine in self.to_dict().items():
            theirs = others[name]
            if mine == theirs:
                continue
            if isinstance(mine, list) and isinstance(theirs, list):
                if len(mine) != len(theirs):
                    lines.append(f"{name}: {len(mine)} against {count_of(len(theirs), 'entry')}")
                first = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
                if first is not None:
                    lines.append(f"{name}[{first}]: {mine[first]} against {theirs[first]}")
            else:
                lines.append(f"{name}: {mine} against {theirs}")
        return lines

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.stage, self.shape, self.items.tobytes(), self.lengths.tobytes()))

    def to_dict(self) -> dict[str, Any]:
        """The plan in JSON's types."""
        return plan_to_dict(self)

    def to_json(self) -> str:
        """The plan as JSON; from_json gives an equal plan back."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The inverse of to_json; ValueError where `text` is no plan, of a newer format, or does not validate."""
        fields = fields_from_json(text)
        launches = tuple(Launch(**launch) for launch in fields.pop("launches"))
        return cls(launches=launches, **fields).validate()

    def __str__(self) -> str:
        return as_table(self)

"""A Plan: who does which tiles, as data.

Every stage turns row lengths into a Plan; everything else (launching, timing, drawing, simulating) only reads it.

An **item** is (row, begin, end): the half-open token range [begin, end) of one row. KV heads are a grid axis, so each
item is n_kv_heads work units. Items are ordered by row, and an item's partial state lies at the item's own index:
row r owns the items partial_offsets[r] .. partial_offsets[r + 1]. A row with one item is written directly, not merged.
Program p does the items item_order[program_offsets[p] : program_offsets[p + 1]].

Lengths [5, 40] in tiles of 16, two splits of the longest row (3 tiles):
items (0, 0:5), (0, 16:16) empty, (1, 0:16), (1, 16:40); partial_offsets [0, 2, 4].
"""

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pkv.cards.known import GpuProfile
from pkv.checks import LONGEST_ROW, Ints, host_ints
from pkv.plans.as_json import fields_from_json, plan_to_dict
from pkv.plans.counters import Counters, count
from pkv.plans.shape import Shape
from pkv.plans.soundness import as_table, first_fault
from pkv.runtime.graphs import is_capturing, keep_for_replays
from pkv.runtime.locks import renew_properties
from pkv.wording import count_of

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Launch:
    """One kernel launch. A decode launch runs the programs [begin, end) for every KV head, a merge launch its rows."""

    kernel: str  # "decode" or "merge"
    rows: tuple[int, ...]  # rows it works on, in order
    begin: int = 0
    end: int = 0
    n_splits: int = 0  # decode: items of each of these rows, 0 where they differ; merge: the most that a row has


@renew_properties
@dataclass(frozen=True, eq=False)
class Plan:
    """Who does which tiles of one decode step. Made by a stage's plan(); see the module's text for the arrays.

    lengths int32 [n_rows] tokens; items int32 [n_items, 3] = (row, begin, end); program_offsets int32 [n_programs + 1];
    partial_offsets int32 [n_rows + 1]; item_order int32 [n_items] or None (as listed); launches in order; tile in
    tokens; gpu and programs_per_sm as planned for. With `dynamic` the lengths are upper bounds, and the kernels read
    the true ones on the GPU: such a plan serves every step and can be captured in a CUDA graph. variant: which of a
    stage's kernels, where it has several. A plan that stage adaptive chose carries the winner's stage, an explanation,
    and as `fallback` the stage of ours that run() takes where the winner turns out not to work here.
    """

    stage: str
    shape: Shape
    lengths: Int32Array
    items: Int32Array
    program_offsets: Int32Array
    partial_offsets: Int32Array
    launches: tuple[Launch, ...]
    tile: int
    gpu: GpuProfile
    programs_per_sm: int
    item_order: Int32Array | None = None
    dynamic: bool = False
    variant: str = ""
    explanation: str = ""
    fallback: str | None = None
    _kept: dict[Any, Any] = field(init=False, default_factory=dict, repr=False)  # what running it makes once
    _is_sound: bool = field(init=False, default=False, repr=False)  # made by pkv.plan, or checked since

    def __post_init__(self) -> None:
        for name in ("lengths", "items", "program_offsets", "partial_offsets", "item_order"):
            array = getattr(self, name)
            if array is not None:
                array = np.array(array, dtype=np.int32)
                array.setflags(write=False)
                object.__setattr__(self, name, array)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: without what running the plan has made, such as tensors on a GPU."""
        return {**self.__dict__, "_kept": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    @property
    def n_rows(self) -> int:
        return len(self.lengths)

    @property
    def n_items(self) -> int:
        return len(self.items)

    @property
    def n_programs(self) -> int:
        """Programs per KV head."""
        return len(self.program_offsets) - 1

    @cached_property
    def needs_partials(self) -> bool:
        """True where some row is split, so that states must be kept and merged."""
        return any(launch.kernel == "merge" for launch in self.launches)

    @cached_property
    def has_tokens(self) -> bool:
        """False where no row has any: then there is nothing to launch."""
        return bool(self.lengths.any())

    @cached_property
    def least_bound(self) -> int:
        """The least of the lengths: with `dynamic`, no row of at most so many tokens can exceed the plan."""
        return int(self.lengths.min(initial=LONGEST_ROW))

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


def int_lengths(lengths: Ints) -> Int32Array:
    """Row lengths as an int32 array; a GPU tensor is copied once. Errors name the row.

    >>> int_lengths([5, 40]).tolist()
    [5, 40]
    """
    array = host_ints("lengths", lengths)
    for row in np.flatnonzero((array < 0) | (array > LONGEST_ROW))[:1]:
        raise ValueError(f"lengths[{row}] = {array[row]} must lie in 0 .. {LONGEST_ROW} (tokens of row {row})")
    return array.astype(np.int32)


def offsets_of(counts: npt.NDArray[np.int64]) -> Int32Array:
    """Where each of so many begins, and where the last ends.

    >>> offsets_of(np.array([1, 2, 0])).tolist()
    [0, 1, 3, 3]
    """
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)

"""The fields of a plan: arrays that say which program does which tokens of which row.

A stage turns row lengths into a Plan. Everything else (launching, timing, drawing, simulating) only reads it.

An **item** is (row, begin, end): the half-open token range [begin, end) of one row. KV heads are a grid axis, so each
item is n_kv_heads work units. Items are ordered by row, and an item's partial state lies at the item's own index:
row r owns the items partial_offsets[r] .. partial_offsets[r + 1]. A row with one item is written directly, not merged.
Program p does the items item_order[program_offsets[p] : program_offsets[p + 1]].

Lengths [5, 40] in tiles of 16, two splits of the longest row (3 tiles):
items (0, 0:5), (0, 16:16) empty, (1, 0:16), (1, 16:40); partial_offsets [0, 2, 4].
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pkv.plans.facts import FACTS, Facts, Family, GridOrder, Merging
from pkv.plans.gpu import GpuProfile
from pkv.plans.shape import Shape
from pkv.plans.spans import spans_of
from pkv.runtime.locks import renew_properties
from pkv.wording.checks import LONGEST_ROW, Ints, host_ints

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Launch:
    """One kernel launch: a decode launch runs programs [begin, end) for every KV head, a merge launch merges rows."""

    kernel: str  # "decode" or "merge"
    rows: tuple[int, ...]  # the rows that it works on, in order
    begin: int = 0
    end: int = 0
    n_splits: int = 0  # decode: items in each of these rows, 0 if rows differ; merge: the most items that a row has


@renew_properties
@dataclass(frozen=True, eq=False)
class PlanFields:
    """The fields of a Plan, without its methods; see Plan for what each field means."""

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

    def __post_init__(self) -> None:
        for name in ("lengths", "items", "program_offsets", "partial_offsets", "item_order"):
            array = getattr(self, name)
            if array is not None:
                array = np.array(array, dtype=np.int32)
                array.setflags(write=False)
                object.__setattr__(self, name, array)

    @property
    def facts(self) -> Facts:
        """What readers must know of the plan's stage; the usual facts if no stage of that name is known."""
        return FACTS.get(self.stage, Facts())

    @property
    def family(self) -> Family:
        """Whose kernels run the plan."""
        return self.facts.family

    @property
    def grid_order(self) -> GridOrder:
        """Which programs of a decode launch are neighbours in its grid."""
        return self.facts.grid_order

    @property
    def merging(self) -> Merging:
        """How a merge launch divides its work among programs."""
        return self.facts.merging

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
        """True if some row is split, so that partial states must be kept and merged."""
        return any(launch.kernel == "merge" for launch in self.launches)

    @cached_property
    def has_tokens(self) -> bool:
        """True if some row has tokens; otherwise there is nothing to launch."""
        return bool(self.lengths.any())

    @cached_property
    def spans(self) -> npt.NDArray[np.int64]:
        """The tokens of each row that are read, begin and end, int64 [n_rows, 2]: with a window only its last ones."""
        return spans_of(self.lengths, self.shape.features)

    @cached_property
    def item_tokens(self) -> npt.NDArray[np.int64]:
        """The tokens that each item reads, int64 [n_items]; it may begin before the span, where its first tile does."""
        rows, begins, ends = self.items.astype(np.int64).T
        return np.maximum(ends - np.maximum(begins, self.spans[rows, 0]), 0)

    @cached_property
    def least_bound(self) -> int:
        """The smallest of the lengths, in tokens: a dynamic plan covers any batch whose rows have at most as many."""
        return int(self.lengths.min(initial=LONGEST_ROW))


def int_lengths(lengths: Ints) -> Int32Array:
    """Return row lengths as an int32 array [n_rows]; a GPU tensor is copied once. Errors name the row.

    >>> int_lengths([5, 40]).tolist()
    [5, 40]
    """
    array = host_ints("lengths", lengths)
    for row in np.flatnonzero((array < 0) | (array > LONGEST_ROW))[:1]:
        raise ValueError(f"lengths[{row}] = {array[row]} must lie in 0 .. {LONGEST_ROW} (tokens of row {row})")
    return array.astype(np.int32)


def offsets_of(counts: npt.NDArray[np.int64]) -> Int32Array:
    """Return offsets [n + 1] from counts [n]: group i is offsets[i] : offsets[i + 1].

    >>> offsets_of(np.array([1, 2, 0])).tolist()
    [0, 1, 3, 3]
    """
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)

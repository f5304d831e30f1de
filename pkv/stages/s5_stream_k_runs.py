"""The equal runs of stage stream_k, cut in Python for the host and in Triton for the kernels.

All rows' tiles lie in one line, each row's preceded by START_UNITS; run r has the units [r * share, (r + 1) * share).
Both halves of this file compute the same numbers; tests compare them.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pkv._triton import tl, triton
from pkv.kernels.masks import visible_tiles_of
from pkv.plans.features import PLAIN, Features
from pkv.plans.fields import Int32Array
from pkv.plans.spans import visible_tiles


class Rules(NamedTuple):
    """The rules by which the line is cut; a unit is the work of one tile.

    START_UNITS: the cost of a row beyond its tiles. LEAST_UNITS: the least units of a run; the partial state of a
    shorter one would cost more than it saves. SCAN_ROWS: lengths that a program reads at a time. WIDE: count in 64
    bits, which takes longer.
    """

    START_UNITS: int = 4
    LEAST_UNITS: int = 4
    SCAN_ROWS: int = 128
    WIDE: bool = False


RULES = Rules()
MOST_NARROW = 2**31 - 2**16  # units that are counted in 32 bits, with room to round up to whole runs


def rules_for(n_rows: int, capacity: int, tile: int, rules: Rules = RULES) -> Rules:
    """Return the rules, WIDE if n_rows rows of up to `capacity` tokens may have more units than 32 bits can count."""
    most = n_rows * (-(-capacity // tile) + rules.START_UNITS)
    return rules if most <= MOST_NARROW else rules._replace(WIDE=True)


def line_of(
    lengths: Int32Array, n_programs: int, tile: int, rules: Rules = RULES, features: Features = PLAIN
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
    """Return (tiles of each row [n_rows], units of each row [n_rows], units of a run)."""
    _, n_tiles = visible_tiles(lengths, tile, features)
    units = np.where(n_tiles > 0, n_tiles + rules.START_UNITS, 0)
    return n_tiles, units, max(-(-int(units.sum()) // max(n_programs, 1)), rules.LEAST_UNITS)


def cut_runs(
    lengths: Int32Array, n_programs: int, tile: int, rules: Rules = RULES, features: Features = PLAIN
) -> tuple[Int32Array, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return (items [n_items, 3], items per program [n_programs], items per row [n_rows]), as the kernel finds them.

    >>> items, program_items, row_items = cut_runs(np.array([5, 40], dtype=np.int32), 2, 16, Rules(0, 1))
    >>> items.tolist(), program_items.tolist(), row_items.tolist()
    ([[0, 0, 5], [1, 0, 16], [1, 16, 40]], [2, 1], [1, 2])
    """
    n_tiles, units, share = line_of(lengths, n_programs, tile, rules, features)
    first_tile = np.cumsum(units) - n_tiles  # on the line
    first_run, last_run = first_tile // share, (first_tile + n_tiles - 1) // share
    row_items = np.where(n_tiles > 0, last_run - first_run + 1, 0)
    rows = np.repeat(np.arange(len(lengths)), row_items)
    run = first_run[rows] + np.arange(len(rows)) - (np.cumsum(row_items) - row_items)[rows]
    seen = visible_tiles(lengths, tile, features)[0][rows]  # the row's tiles before its window are not on the line
    begins = (seen + np.maximum(run * share - first_tile[rows], 0)) * tile
    ends = np.minimum((seen + (run + 1) * share - first_tile[rows]) * tile, lengths[rows])
    items = np.stack([rows, begins, ends], axis=1).astype(np.int32)
    return items, np.bincount(run, minlength=n_programs), row_items


@triton.jit
def units_of(rows, index, n_rows, SHAPE: tl.constexpr, RULES: tl.constexpr):
    """Return the units of each row; 0 for a row without tokens, or past the last row. rows: RowArgs, or CacheArgs."""
    lengths = rows.lengths
    tokens = tl.load(lengths.ptr + index.to(tl.int64) * lengths.strides[0], mask=index < n_rows, other=0)
    _, n_tiles = visible_tiles_of(tokens, rows.masks, SHAPE)
    units = tl.where(n_tiles > 0, n_tiles + RULES.START_UNITS, 0)
    return units.to(tl.int64) if RULES.WIDE else units


@triton.jit
def find_share(rows, n_rows, n_programs, SHAPE: tl.constexpr, RULES: tl.constexpr):
    """Return (units of all rows, units of a run)."""
    total = tl.cast(0, tl.int64 if RULES.WIDE else tl.int32)
    for first in range(0, n_rows, RULES.SCAN_ROWS):
        total += tl.sum(units_of(rows, first + tl.arange(0, RULES.SCAN_ROWS), n_rows, SHAPE, RULES), 0)
    return total, tl.maximum(tl.cdiv(total, n_programs), RULES.LEAST_UNITS)


@triton.jit
def find_row(rows, n_rows, unit, SHAPE: tl.constexpr, RULES: tl.constexpr):
    """Return (the row that holds a unit of the line, units before that row)."""
    row = 0
    before = tl.cast(0, tl.int64 if RULES.WIDE else tl.int32)
    scanned = before
    for first in range(0, n_rows, RULES.SCAN_ROWS):
        units = units_of(rows, first + tl.arange(0, RULES.SCAN_ROWS), n_rows, SHAPE, RULES)
        is_before = scanned + tl.cumsum(units, 0) <= unit
        row += tl.sum(is_before.to(tl.int32), 0)
        before += tl.sum(tl.where(is_before, units, 0), 0)
        scanned += tl.sum(units, 0)
    return row, before


@triton.jit
def find_item(rows, row, before, unit, stop, SHAPE: tl.constexpr, RULES: tl.constexpr):
    """Find what the run [unit, stop) has of a row, in tiles that the row's query sees, counted from `seen`.

    Returns (first tile, end tile, tiles of the row, seen, the row's length in tokens, unit after the row).
    """
    length = tl.load(rows.lengths.ptr + row.to(tl.int64) * rows.lengths.strides[0])
    seen, n_tiles = visible_tiles_of(length, rows.masks, SHAPE)
    first_tile = before + RULES.START_UNITS
    first = tl.maximum(unit - first_tile, 0).to(tl.int32)
    end = tl.minimum(stop - first_tile, n_tiles).to(tl.int32)
    return first, end, n_tiles, seen, length, tl.where(n_tiles > 0, first_tile + n_tiles, before)

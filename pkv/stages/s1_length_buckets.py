"""Stage 1, length buckets: rows of equal length share a launch, so every bound is exact, at one launch per length.

The kernel is split_kv's. In a bucket every row is the longest, so no split is empty, as long as the row has a tile for
each split. The price is one decode and one merge launch per distinct length: eight rows of eight lengths cost 16
launches where split_kv needs 2.

Lengths [40, 5, 40], tile 16, splits 2: buckets 5 (row 1) and 40 (rows 0 and 2). With a window, rows that see equally
many tokens share a bucket; their tiles may differ by one, because a window may begin anywhere in a tile.
"""

import numpy as np

from pkv.plans.facts import Facts
from pkv.plans.fields import Int32Array, Launch, offsets_of
from pkv.plans.gpu import GpuProfile
from pkv.plans.plan import Plan
from pkv.plans.shape import Shape
from pkv.plans.spans import spans_of
from pkv.stages.s1_split_kv import (
    PARTS,
    default_splits,
    fault_of_items,
    indices_of,
    launch,
    launcher,
    launches_of,
    most_tiles,
    split_items,
)
from pkv.stages.sizing import sizes_for

__all__ = ["FACTS", "PARTS", "PLANNED_ON", "fault_of_items", "launch", "launcher", "plan"]

PLANNED_ON = "host"
FACTS = Facts()


def plan(
    lengths: Int32Array,
    shape: Shape,
    *,
    splits: int | None = None,
    tile: int | None = None,
    gpu: "str | GpuProfile | None" = None,
) -> Plan:
    """Plan one bucket per distinct length, shortest first; `splits` per row (default: a bucket fills the GPU once)."""
    profile, tile, resident = sizes_for(gpu, tile, shape)
    n_rows = len(lengths)
    seen = np.diff(spans_of(lengths, shape.features))[:, 0]
    buckets = [np.flatnonzero(seen == n_tokens) for n_tokens in np.unique(seen)]
    row_splits = np.ones(n_rows, dtype=np.int64)
    for rows in buckets:
        n_tiles = most_tiles(lengths[rows], tile, shape.features)
        if n_tiles:
            row_splits[rows] = splits or default_splits(len(rows), shape, n_tiles, profile.n_sms, resident)
    partial_offsets = offsets_of(row_splits)

    items = np.empty((partial_offsets[-1], 3), dtype=np.int32)
    order: list[int] = []
    launches: list[Launch] = []
    for rows in buckets:
        n_splits = int(row_splits[rows[0]])
        mine = indices_of(rows, partial_offsets, n_splits)
        items[mine] = split_items(lengths[rows], n_splits, tile, shape.features)
        items[mine, 0] = np.repeat(rows, n_splits)
        launches += launches_of(tuple(rows.tolist()), len(order), n_splits)
        order += mine.tolist()
    return Plan(
        stage="length_buckets",
        shape=shape,
        lengths=lengths,
        items=items,
        program_offsets=np.arange(len(items) + 1, dtype=np.int32),
        partial_offsets=partial_offsets,
        item_order=np.array(order, dtype=np.int32),
        launches=tuple(launches),
        tile=tile,
        gpu=profile,
        programs_per_sm=resident,
    )

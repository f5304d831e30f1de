"""Stage 2, row-local bounds: every row is cut by its own length, so that its splits divide its tokens evenly.

The grid, rows x KV heads x splits, and the two launches are split_kv's. Only the bounds differ: split s of S covers the
tiles [n * s // S, n * (s + 1) // S) of the row's own n tiles. So a short row keeps S programs busy with a little work
each, where split_kv leaves most of them without a token. A row with fewer tiles than splits gets one tile per split.
The splits after its last tile are empty: they write a neutral state and exit early.

Lengths [5, 40], tile 16, splits 2: row 0 has 1 tile, row 1 has 3, so the items are
(0, 0:5), (0, 16:16) empty, (1, 0:16), (1, 16:40). Lengths [40, 200]: (0, 0:16), (0, 16:40), (1, 0:96), (1, 96:200).

The kernel needs nothing from the host: with `dynamic=True` one plan serves every step, also inside a captured CUDA
graph.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pkv._triton import launch_kernel, tl, triton
from pkv.kernels.launching import KernelArgs, launch_by
from pkv.kernels.masks import visible_tiles_of
from pkv.kernels.tile import load_query, store_empty, store_state
from pkv.plans.facts import Facts
from pkv.plans.features import PLAIN, Features
from pkv.plans.fields import Int32Array
from pkv.plans.gpu import GpuProfile
from pkv.plans.plan import Plan
from pkv.plans.shape import Shape
from pkv.plans.spans import visible_tiles
from pkv.stages.s1_split_kv import (
    MIN_TILES_PER_SPLIT,
    default_splits,
    fault_of_cut,
    items_of_programs,
    most_tiles,
    rectangle,
)
from pkv.stages.sizing import sizes_for
from pkv.wording.checks import MOST_SPLITS

PLANNED_ON = "gpu"
FACTS = Facts()
PARTS = ("attend_tokens", "merge")
# The best average over 18 batches, on an H200 and on 28 of its SMs (data/results/default_cuts.json). With splits that
# fill the GPU only once, a row of 64k tokens among 63 short ones takes 5 to 7 times as long.
OVERSUBSCRIPTION, LEAST_SPLITS = 3, 12


def plan(
    lengths: Int32Array,
    shape: Shape,
    *,
    splits: int | None = None,
    tile: int | None = None,
    gpu: "str | GpuProfile | None" = None,
    dynamic: bool = False,
) -> Plan:
    """Plan `splits` splits per row (default: see ragged_splits); dynamic: the lengths are upper bounds."""
    profile, tile, resident = sizes_for(gpu, tile, shape, "row_local")
    n_rows = len(lengths)
    n_tiles = most_tiles(lengths, tile, shape.features)
    n_splits = splits or ragged_splits(n_rows, shape, n_tiles, profile.n_sms, resident)
    if n_tiles == 0:
        n_splits = 1  # nothing to cut
    items = own_items(lengths, n_splits, tile, shape.features)
    return rectangle("row_local", lengths, shape, items, n_splits, tile, profile, resident, dynamic)


def ragged_splits(n_rows: int, shape: Shape, n_tiles: int, n_sms: int, resident: int) -> int:
    """Return the splits per row: enough to fill the GPU once, and for several rows three times that, at least 12.

    The lengths may be ragged, which is not known in advance. If one row holds most of the tokens, too few splits keep
    its programs busy after all others have ended. Splits that turn out not to be needed cost little. n_tiles: of the
    longest row.

    >>> ragged_splits(8, Shape(32, 8, 128, 16, "float16"), n_tiles=4096, n_sms=132, resident=9)
    48
    """
    once = default_splits(n_rows, shape, n_tiles, n_sms, resident)
    if n_rows < 2:
        return once
    return max(once, min(max(OVERSUBSCRIPTION * once, LEAST_SPLITS), n_tiles // MIN_TILES_PER_SPLIT))


def own_items(
    lengths: Int32Array, n_splits: "int | npt.NDArray[np.int64]", tile: int, features: Features = PLAIN
) -> Int32Array:
    """Cut rows by their own lengths into n_splits items each (one number, or one per row), empty ones last.

    >>> own_items(np.array([40, 5], dtype=np.int32), 2, 16).tolist()
    [[0, 0, 16], [0, 16, 40], [1, 0, 5], [1, 16, 16]]
    """
    first_tiles, n_tiles = visible_tiles(lengths, tile, features)
    splits = np.broadcast_to(np.asarray(n_splits, dtype=np.int64), n_tiles.shape)
    rows = np.repeat(np.arange(len(lengths)), splits)
    first = np.cumsum(splits) - splits
    split = np.arange(len(rows)) - first[rows]  # number of the split within its row
    cuts, tiles, length = np.maximum(np.minimum(splits, n_tiles), 1)[rows], n_tiles[rows], lengths[rows]
    begins = (first_tiles[rows] + tiles * np.minimum(split, cuts) // cuts) * tile
    ends = np.minimum((first_tiles[rows] + tiles * np.minimum(split + 1, cuts) // cuts) * tile, length)
    return np.stack([rows, begins, np.maximum(begins, ends)], axis=1).astype(np.int32)


def fault_of_items(plan: Plan) -> str | None:
    """Say where the plan's items differ from those that the kernel cuts; None if they agree."""
    for launch in plan.launches:
        if not 1 <= launch.n_splits <= MOST_SPLITS or launch.rows != tuple(range(plan.n_rows)):
            return f"a {launch.kernel} launch must name all rows in order, and their splits, at most {MOST_SPLITS}"
    if not plan.launches:
        return None
    if not np.array_equal(items_of_programs(plan), np.arange(plan.n_items)):
        return "its programs do not have one item each, as listed"
    n_splits = plan.launches[0].n_splits
    cut = own_items(plan.lengths, n_splits, plan.tile, plan.shape.features)
    return fault_of_cut(list(range(plan.n_rows)), plan.items, cut, n_splits)


@triton.jit(do_not_specialize=["n_splits"])
def row_local_kernel(q, cache, result, partials, n_splits, qk_scale, ATTEND: tl.constexpr, SHAPE: tl.constexpr):
    """One program per (row, split, KV head): find my tokens, attend, store a state."""
    GRID_HEADS: tl.constexpr = SHAPE.N_KV_HEADS * SHAPE.HEAD_BLOCKS
    if SHAPE.EARLY_MERGE:
        tl.extra.cuda.gdc_launch_dependents()
    grid_head = tl.program_id(0) % GRID_HEADS
    split = tl.program_id(0) // GRID_HEADS % n_splits
    row = tl.program_id(0) // GRID_HEADS // n_splits
    # which tokens are mine: this split's share of my own row
    length = tl.load(cache.lengths.ptr + row.to(tl.int64) * cache.lengths.strides[0])
    first, n_tiles = visible_tiles_of(length, cache.masks, SHAPE)
    n_cuts = tl.maximum(tl.minimum(n_tiles, n_splits), 1)
    begin = (first + first_tile(tl.minimum(split, n_cuts), n_cuts, n_tiles)) * SHAPE.BLOCK_N
    end = (first + first_tile(tl.minimum(split + 1, n_cuts), n_cuts, n_tiles)) * SHAPE.BLOCK_N
    end = tl.minimum(end, length)
    if begin >= end and n_splits > 1:  # nothing to read: not even the query
        store_empty(partials, row * n_splits + split, grid_head, SHAPE, True)
    else:
        query = load_query(q, row, grid_head, SHAPE)
        out, lse = ATTEND(query, cache, row, grid_head, begin, end, qk_scale, SHAPE)
        if n_splits == 1:
            store_state(result, row, grid_head, out, lse, SHAPE, False)
        else:
            store_state(partials, row * n_splits + split, grid_head, out, lse, SHAPE, True)


@triton.jit
def first_tile(split, n_splits, n_tiles):
    """Return n_tiles * split // n_splits without a 64-bit division, which may spill registers; n_splits <= 2**16."""
    remainder = (n_tiles % n_splits).to(tl.uint32) * split.to(tl.uint32)
    return n_tiles // n_splits * split + (remainder // n_splits.to(tl.uint32)).to(tl.int32)


def launcher(plan: Plan, capacity: int) -> Callable[[KernelArgs], None]:
    """Make the function that runs the plan's launches in order: decode, then merge if rows are split.

    It may be called any number of times.
    """
    grid = plan.n_programs * plan.shape.grid_heads

    def launch_all(args: KernelArgs) -> None:
        for step in plan.launches:
            if step.kernel == "merge":
                args.merge(step, None, None)
                continue
            launch_kernel(
                row_local_kernel, grid,
                (args.q, args.cache, args.result, args.partials, step.n_splits, args.qk_scale, args.attend),
                (args.shape,), args.signature, num_warps=args.num_warps,
            )  # fmt: skip

    return launch_all


launch = launch_by(launcher)

"""Stage 1, split-KV: cut every row into as many splits as the longest row gets, so that few rows still fill the GPU.

The grid is rows x KV heads x splits. Bounds come from the longest row's tiles, so a short row's later splits hold no
token. Their programs start, find nothing, write an empty state and exit. In the plan they are empty items.

Lengths [5, 40], tile 16, splits 2: the longest row has 3 tiles, cut 0:1 and 1:3, so the items are
(0, 0:5), (0, 16:16) empty, (1, 0:16), (1, 16:40). With a window, a row's tiles are those that the window touches.

The kernel finds the longest row itself, from the lengths on the GPU, so it needs nothing from the host. With
`dynamic=True` one plan serves every step while lengths change, also inside a captured CUDA graph.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pkv._triton import launch_kernel, tl, triton
from pkv.kernels.launching import KernelArgs, launch_by
from pkv.kernels.masks import visible_tiles_of
from pkv.kernels.tile import load_query, store_state
from pkv.kernels.uploads import uploaded
from pkv.plans.facts import Facts
from pkv.plans.features import PLAIN, Features
from pkv.plans.fields import Int32Array, Launch
from pkv.plans.gpu import GpuProfile
from pkv.plans.plan import Plan
from pkv.plans.shape import Shape
from pkv.plans.spans import visible_tiles
from pkv.stages.sizing import even_programs, sizes_for
from pkv.wording.checks import MOST_SPLITS

PLANNED_ON = "gpu"
FACTS = Facts()
PARTS = ("attend_tokens", "merge")
MIN_TILES_PER_SPLIT = 2  # a shorter split costs more in its partial state than it saves


def plan(
    lengths: Int32Array,
    shape: Shape,
    *,
    splits: int | None = None,
    tile: int | None = None,
    gpu: "str | GpuProfile | None" = None,
    dynamic: bool = False,
) -> Plan:
    """Plan `splits` splits per row (default: enough to fill the GPU once); dynamic: the lengths are upper bounds."""
    profile, tile, resident = sizes_for(gpu, tile, shape)
    n_rows = len(lengths)
    n_tiles = most_tiles(lengths, tile, shape.features)
    n_splits = splits or default_splits(n_rows, shape, n_tiles, profile.n_sms, resident)
    if n_tiles == 0:
        n_splits = 1  # nothing to cut
    items = split_items(lengths, n_splits, tile, shape.features)
    return rectangle("split_kv", lengths, shape, items, n_splits, tile, profile, resident, dynamic)


def rectangle(
    stage: str, lengths: Int32Array, shape: Shape, items: Int32Array, n_splits: int, tile: int, gpu: GpuProfile,
    resident: int, dynamic: bool,
) -> Plan:  # fmt: skip
    """Make the plan of a grid of rows x splits: n_splits items per row, one program per item, in two launches."""
    n_rows = len(lengths)
    return Plan(
        stage=stage,
        shape=shape,
        lengths=lengths,
        items=items,
        program_offsets=np.arange(n_rows * n_splits + 1, dtype=np.int32),
        partial_offsets=np.arange(n_rows + 1, dtype=np.int32) * n_splits,
        launches=launches_of(tuple(range(n_rows)), 0, n_splits),
        tile=tile,
        gpu=gpu,
        programs_per_sm=resident,
        dynamic=dynamic,
    )


def most_tiles(lengths: Int32Array, tile: int, features: Features = PLAIN) -> int:
    """Return the tiles of the row that has most of them."""
    return int(visible_tiles(lengths, tile, features)[1].max(initial=0))


def default_splits(n_rows: int, shape: Shape, n_tiles: int, n_sms: int, resident: int) -> int:
    """Return the number of splits per row that fills the GPU once, with at least MIN_TILES_PER_SPLIT tiles in each.

    n_tiles: of the longest row.

    >>> default_splits(1, Shape(32, 8, 128, 16, "float16"), n_tiles=512, n_sms=28, resident=9)
    28
    """
    programs = n_sms * even_programs(resident)
    return max(1, min(programs // max(n_rows * shape.grid_heads, 1), n_tiles // MIN_TILES_PER_SPLIT))


def split_items(lengths: Int32Array, n_splits: int, tile: int, features: Features = PLAIN) -> Int32Array:
    """Cut rows like the longest one, of n tiles: split s of S covers its tiles [n * s // S, n * (s + 1) // S).

    Returns the items, int32 [n_rows * S, 3].
    """
    first, n_tiles = visible_tiles(lengths, tile, features)
    bounds = int(n_tiles.max(initial=0)) * np.arange(n_splits + 1, dtype=np.int64) // n_splits
    rows = np.repeat(np.arange(len(lengths)), n_splits)
    begins = (first[:, None] + bounds[:-1]).ravel() * tile
    ends = np.minimum((first[:, None] + bounds[1:]).ravel() * tile, np.repeat(lengths, n_splits))
    return np.stack([rows, begins, np.maximum(begins, ends)], axis=1).astype(np.int32)


def indices_of(rows: npt.NDArray[np.int64], partial_offsets: Int32Array, n_splits: int) -> npt.NDArray[np.int64]:
    """Return the indices of the items of some rows, each of n_splits items, row after row."""
    return (partial_offsets[rows][:, None] + np.arange(n_splits)).ravel()


def fault_of_items(plan: Plan) -> str | None:
    """Say where the plan's items differ from those that the kernel cuts; None if they agree."""
    for launch in plan.launches:
        if not 1 <= launch.n_splits <= MOST_SPLITS:
            return f"a {launch.kernel} launch has no splits, or more than {MOST_SPLITS}"
        rows = np.array(launch.rows, dtype=np.int64)
        lengths = plan.lengths[rows]
        cut = split_items(lengths, launch.n_splits, plan.tile, plan.shape.features)
        planned = plan.items[indices_of(rows, plan.partial_offsets, launch.n_splits)]
        fault = fault_of_cut(rows.tolist(), planned, cut, launch.n_splits)
        if fault:
            return fault
        mine = indices_of(rows, plan.partial_offsets, launch.n_splits)
        if launch.kernel == "decode" and not np.array_equal(items_of_programs(plan)[launch.begin : launch.end], mine):
            return (
                f"the programs {launch.begin}:{launch.end} do not have one item each, in the order of the launch's rows"
            )
    return None


def items_of_programs(plan: Plan) -> npt.NDArray[np.int64]:
    """Return the item of each program; -1 for all programs if some program has no item, or several."""
    if not np.array_equal(plan.program_offsets, np.arange(plan.n_items + 1)):
        return np.full(plan.n_programs, -1)
    return np.arange(plan.n_items) if plan.item_order is None else plan.item_order.astype(np.int64)


def fault_of_cut(rows: list[int], planned: Int32Array, cut: Int32Array, n_splits: int) -> str | None:
    """Say which of these rows (of n_splits items each) is the first whose planned items are not the kernel's."""
    by_row = (len(rows), n_splits, 3)
    for row, mine, kernels in zip(rows, planned.reshape(by_row), cut.reshape(by_row), strict=True):
        if (mine[:, 1:] != kernels[:, 1:]).any():
            return f"row {row} is planned as {mine[:, 1:].tolist()}, the kernel cuts {kernels[:, 1:].tolist()}"
    return None


def launches_of(rows: tuple[int, ...], first_program: int, n_splits: int) -> tuple[Launch, ...]:
    """Make the decode launch of rows that are cut into n_splits each, and the merge launch if n_splits is above 1."""
    if not rows:
        return ()
    decode = Launch("decode", rows, first_program, first_program + len(rows) * n_splits, n_splits)
    return (decode, Launch("merge", rows, n_splits=n_splits)) if n_splits > 1 else (decode,)


@triton.jit(do_not_specialize=["n_rows", "n_splits"])
def split_kv_kernel(
    q, cache, result, partials, partial_offsets, row_ids, n_rows, n_splits, qk_scale,
    ATTEND: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """One program per (row, split, KV head): find my tokens, attend, store a state.

    row_ids and partial_offsets None: all rows in order, of n_splits items each.
    """
    # who am I: KV heads run fastest, so neighbouring programs read neighbouring memory
    GRID_HEADS: tl.constexpr = SHAPE.N_KV_HEADS * SHAPE.HEAD_BLOCKS
    if SHAPE.EARLY_MERGE:
        tl.extra.cuda.gdc_launch_dependents()
    grid_head = tl.program_id(0) % GRID_HEADS
    split = tl.program_id(0) // GRID_HEADS % n_splits
    row = tl.program_id(0) // GRID_HEADS // n_splits
    longest = longest_row(cache, row_ids, n_rows, SHAPE)
    if row_ids is not None:
        row = tl.load(row_ids + row)
    # which tokens are mine: this split's share of the longest row, as far as my row reaches
    n_tiles = tl.cdiv(longest, SHAPE.BLOCK_N).to(tl.int64)
    begin = (n_tiles * split // n_splits * SHAPE.BLOCK_N).to(tl.int32)
    end = (n_tiles * (split + 1) // n_splits * SHAPE.BLOCK_N).to(tl.int64)
    length = tl.load(cache.lengths.ptr + row.to(tl.int64) * cache.lengths.strides[0])
    if cache.masks.window is not None:  # counted from the first tile that my row's window touches
        first, _ = visible_tiles_of(length, cache.masks, SHAPE)
        begin, end = begin + first * SHAPE.BLOCK_N, end + first * SHAPE.BLOCK_N
    end = tl.minimum(end, length.to(tl.int64)).to(tl.int32)
    # the maths, the same in every stage
    query = load_query(q, row, grid_head, SHAPE)
    out, lse = ATTEND(query, cache, row, grid_head, begin, end, qk_scale, SHAPE)
    if n_splits == 1:
        store_state(result, row, grid_head, out, lse, SHAPE, False)
    else:
        first = row * n_splits if partial_offsets is None else tl.load(partial_offsets + row)
        store_state(partials, first + split, grid_head, out, lse, SHAPE, True)


@triton.jit
def longest_row(cache, row_ids, n_rows, SHAPE: tl.constexpr):
    """Find the greatest length among the launch's rows, in tokens; with a window, in the tokens of its tiles."""
    lengths = cache.lengths
    longest = 0
    for first in range(0, n_rows, 128):
        index = first + tl.arange(0, 128)
        rows = index
        if row_ids is not None:
            rows = tl.load(row_ids + index, mask=index < n_rows, other=0)
        row_lengths = tl.load(lengths.ptr + rows.to(tl.int64) * lengths.strides[0], mask=index < n_rows, other=0)
        if cache.masks.window is not None:
            row_lengths = visible_tiles_of(row_lengths, cache.masks, SHAPE)[1] * SHAPE.BLOCK_N
        longest = tl.maximum(longest, tl.max(row_lengths, 0))
    return longest


def launcher(plan: Plan, capacity: int) -> Callable[[KernelArgs], None]:
    """Make the function that runs the plan's launches in order: decode, then merge if rows are split.

    It may be called any number of times. A launch of all rows reads no array of the plan, so a captured graph of it
    needs none.
    """
    reads_arrays = any(len(launch.rows) != plan.n_rows for launch in plan.launches)

    def launch_all(args: KernelArgs) -> None:
        there = uploaded(plan, args.device) if reads_arrays else None
        for step in plan.launches:
            row_ids = None if there is None else there.rows_of(step, plan.n_rows)
            offsets = None if there is None or row_ids is None else there.arrays["partial_offsets"]
            if step.kernel == "merge":
                args.merge(step, offsets, row_ids)
                continue
            launch_kernel(
                split_kv_kernel, (step.end - step.begin) * plan.shape.grid_heads,
                (args.q, args.cache, args.result, args.partials, offsets, row_ids,
                 len(step.rows), step.n_splits, args.qk_scale, args.attend),
                (args.shape,), args.signature.plus(row_ids is None), num_warps=args.num_warps,
            )  # fmt: skip

    return launch_all


launch = launch_by(launcher)

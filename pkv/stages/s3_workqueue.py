"""Stage 3, the compact workqueue: a list of items that all hold tokens, and one program for each item.

The host writes the list, and the kernel only reads it: program p takes item item_order[p], a (row, begin, end). So no
program is launched without work, rows may be cut into different numbers of splits, and any program may take any item.
A step is two launches: decode, and a merge for the rows that were split. The price is planning on the host, with one
copy of the list to the GPU, whenever a length changes.

Lengths [5, 40, 0], tile 16, splits 2: items (0, 0:5), (1, 0:16), (1, 16:40); row_local launches 6 programs per KV head
for the same tokens, the queue 3. Longest first, the programs take the items 2, 1, 0.

The kernel runs the plan of any stage: `requeue(plan)` hands it over, with its empty items or without.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pkv._triton import launch_kernel, tl, triton
from pkv.kernels.configs import MOST_WARPS, choose_tile
from pkv.kernels.launching import KernelArgs, launch_by
from pkv.kernels.tile import load_query, store_state
from pkv.kernels.uploads import uploaded
from pkv.plans.facts import Facts
from pkv.plans.fields import Int32Array, Launch, offsets_of
from pkv.plans.gpu import GpuProfile
from pkv.plans.plan import Plan
from pkv.plans.shape import Shape
from pkv.plans.spans import visible_tiles
from pkv.stages.s1_split_kv import MIN_TILES_PER_SPLIT
from pkv.stages.s2_row_local import own_items
from pkv.stages.sizing import even_programs, sizes_for

PLANNED_ON = "host"
FACTS = Facts()
PARTS = ("attend_tokens", "merge", "plan")


def plan(
    lengths: Int32Array,
    shape: Shape,
    *,
    splits: int | None = None,
    tile: int | None = None,
    ordering: str | None = None,
    gpu: "str | GpuProfile | None" = None,
) -> Plan:
    """Plan `splits` splits per row, but no more than the row has tiles (default: see equal_splits).

    ordering: one of ORDERINGS (default: as_listed if all programs can start at once, else longest_first).
    """
    profile, tile, resident = sizes_for(gpu, tile, shape, "workqueue")
    n_places = profile.n_sms * even_programs(resident) // shape.grid_heads
    _, n_tiles = visible_tiles(lengths, tile, shape.features)
    if splits is None:
        row_splits = equal_splits(n_tiles, n_places)
    else:
        row_splits = np.minimum(n_tiles, splits)
    items = own_items(lengths, row_splits, tile, shape.features)
    if ordering is None:  # if all programs start at once, the order does not matter, and reading it takes time
        ordering = "as_listed" if len(items) <= n_places else "longest_first"
    return queue_of(items, row_splits, lengths, shape, tile, profile, resident, ordering, splits or 0)


def queue_of(
    items: Int32Array, row_items: npt.NDArray[np.int64], lengths: Int32Array, shape: Shape, tile: int, gpu: GpuProfile,
    resident: int, ordering: str, most_items: int = 0, stage: str = "workqueue",
) -> Plan:  # fmt: skip
    """Make the plan of these items, one program each, in two launches. row_items [n_rows]: the items of each row.

    stage: the stage that cut the items; the queue's kernel runs those of any.
    """
    return Plan(
        stage=stage,
        shape=shape,
        lengths=lengths,
        items=items,
        program_offsets=np.arange(len(items) + 1, dtype=np.int32),
        partial_offsets=offsets_of(row_items),
        item_order=find_ordering(ordering)(items),
        launches=queue_launches(row_items, len(items), most_items),
        tile=tile,
        gpu=gpu,
        programs_per_sm=resident,
    )


def equal_splits(n_tiles: npt.NDArray[np.int64], n_places: int) -> npt.NDArray[np.int64]:
    """Return the splits of each row [n_rows], for the shortest share of tiles whose items still fit n_places programs.

    All rows use one share, so every program gets about the same work: a row with ten times the tiles gets ten times the
    splits. If rows are many, the items may fill a multiple of n_places, at least two per row on average. Otherwise the
    longest row would keep its programs busy after all others have ended.

    >>> equal_splits(np.array([4, 40, 0]), 11).tolist()
    [1, 10, 0]
    """
    n_rows = int(np.count_nonzero(n_tiles))
    room = max(n_places, 1)
    while room < 2 * n_rows:
        room *= 2
    shortest, longest = MIN_TILES_PER_SPLIT, max(int(n_tiles.max(initial=0)), MIN_TILES_PER_SPLIT)
    while shortest < longest:
        share = (shortest + longest) // 2
        n_items = int((-(-n_tiles // share)).sum())
        shortest, longest = (share + 1, longest) if n_items > room else (shortest, share)
    return -(-n_tiles // shortest)


def as_listed(items: Int32Array) -> Int32Array | None:
    """Order items as listed: program p takes item p."""
    return None


def longest_first(items: Int32Array) -> Int32Array | None:
    """Order items by falling number of tokens, equal ones as listed: the items that start last should be short.

    >>> longest_first(np.array([[0, 0, 5], [1, 0, 16], [1, 16, 40]], dtype=np.int32)).tolist()
    [2, 1, 0]
    """
    return np.argsort(items[:, 1] - items[:, 2], kind="stable").astype(np.int32)


ORDERINGS = {"as_listed": as_listed, "longest_first": longest_first}


def find_ordering(name: str) -> Callable[[Int32Array], Int32Array | None]:
    """Return the ordering of that name; ValueError lists the known names."""
    if not isinstance(name, str) or name not in ORDERINGS:
        raise ValueError(f"ordering = {name!r} does not exist; choose one of {', '.join(ORDERINGS)}")
    return ORDERINGS[name]


def queue_launches(row_items: npt.NDArray[np.int64], n_programs: int, most_items: int) -> tuple[Launch, ...]:
    """Make one decode launch of all programs, and one merge launch of the rows that are split or have no item."""
    decode = Launch("decode", tuple(range(len(row_items))), 0, n_programs)
    merged = tuple(np.flatnonzero(row_items != 1).tolist())
    most_items = max(most_items, int(row_items.max(initial=0)))
    merge = Launch("merge", merged, n_splits=most_items)
    return tuple(launch for launch in (decode, merge) if launch.rows and (n_programs or launch.kernel == "merge"))


def requeue(plan: Plan, *, drop_empty: bool = False, ordering: str | None = None) -> Plan:
    """Turn another stage's plan into one for the queue's kernel: one item per program, in two launches.

    drop_empty: leave out items without a token. ordering: one of ORDERINGS; None keeps the plan's own order. ValueError
    if the plan's tile is not one that pkv's kernels take (reference, and flashinfer with some page sizes).
    """
    choose_tile(plan.tile, plan.shape, plan.gpu)
    is_kept = plan.items[:, 1] < plan.items[:, 2] if drop_empty else np.ones(plan.n_items, dtype=bool)
    items = plan.items[is_kept]
    row_items = np.bincount(items[:, 0], minlength=plan.n_rows)
    if ordering is not None:
        order = find_ordering(ordering)(items)
    elif plan.item_order is not None:
        kept = plan.item_order[is_kept[plan.item_order]]
        order = (np.cumsum(is_kept) - 1)[kept].astype(np.int32)
    else:
        order = None
    return dataclasses.replace(
        plan,
        stage="workqueue",
        items=items,
        program_offsets=np.arange(len(items) + 1, dtype=np.int32),
        partial_offsets=offsets_of(row_items),
        item_order=order,
        launches=queue_launches(row_items, len(items), int(np.diff(plan.partial_offsets).max(initial=0))),
        dynamic=False,
        variant="",
        explanation="",
        fallback=None,
    )


def fault_of_items(plan: Plan) -> None:
    """Return None: the kernel reads the items, whatever they are."""


@triton.jit(do_not_specialize=["first_program"])
def workqueue_kernel(
    q, cache, result, partials, partial_offsets, items, program_offsets, item_order, first_program, qk_scale,
    ATTEND: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """One program per (queue entry, KV head): read who I am, attend, store a state."""
    GRID_HEADS: tl.constexpr = SHAPE.N_KV_HEADS * SHAPE.HEAD_BLOCKS
    if SHAPE.EARLY_MERGE:
        tl.extra.cuda.gdc_launch_dependents()
    grid_head = tl.program_id(0) % GRID_HEADS
    program = first_program + tl.program_id(0) // GRID_HEADS
    if program_offsets is None:  # one item each
        attend_item(
            program, grid_head, q, cache, result, partials, partial_offsets, items, item_order, qk_scale, ATTEND, SHAPE
        )
    else:
        for entry in range(tl.load(program_offsets + program), tl.load(program_offsets + program + 1)):
            attend_item(
                entry, grid_head, q, cache, result, partials, partial_offsets, items, item_order, qk_scale,
                ATTEND, SHAPE,
            )  # fmt: skip


@triton.jit
def attend_item(
    entry, grid_head, q, cache, result, partials, partial_offsets, items, item_order, qk_scale,
    ATTEND: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """Do one entry of the queue. The only item of its row is the result, others are partial states."""
    index = entry
    if item_order is not None:
        index = tl.load(item_order + entry)
    row = tl.load(items + 3 * index)
    # An item begins at a tile: this changes nothing but what the compiler knows, and shortens the loop by a sixth.
    begin = tl.load(items + 3 * index + 1) // SHAPE.BLOCK_N * SHAPE.BLOCK_N
    end = tl.load(items + 3 * index + 2)
    query = load_query(q, row, grid_head, SHAPE)
    out, lse = ATTEND(query, cache, row, grid_head, begin, end, qk_scale, SHAPE)
    if tl.load(partial_offsets + row + 1) - tl.load(partial_offsets + row) == 1:
        store_state(result, row, grid_head, out, lse, SHAPE, False)
    else:
        store_state(partials, index, grid_head, out, lse, SHAPE, True)


def warps_of_several(num_warps: int, block_h: int) -> int:
    """Return the warps of a program that may do several items: its loop takes registers, so 32 heads double them."""
    return min(2 * num_warps, MOST_WARPS) if block_h > 16 else num_warps


def launcher(plan: Plan, capacity: int) -> Callable[[KernelArgs], None]:
    """Make the function that runs the plan's launches in order: decode, then merge if rows are split.

    It may be called any number of times.
    """
    one_each = plan.n_programs == plan.n_items and bool((np.diff(plan.program_offsets) == 1).all())

    def launch_all(args: KernelArgs) -> None:
        there = uploaded(plan, args.device)
        program_offsets = None if one_each else there.arrays["program_offsets"]
        item_order = there.arrays.get("item_order")
        num_warps = args.num_warps if one_each else warps_of_several(args.num_warps, args.shape.BLOCK_H)
        for step in plan.launches:
            if step.kernel == "merge":
                args.merge(step, there.arrays["partial_offsets"], there.rows_of(step, plan.n_rows))
                continue
            launch_kernel(
                workqueue_kernel, (step.end - step.begin) * plan.shape.grid_heads,
                (args.q, args.cache, args.result, args.partials, there.arrays["partial_offsets"],
                 there.arrays["items"], program_offsets, item_order, step.begin, args.qk_scale, args.attend),
                (args.shape,), args.signature.plus((one_each, item_order is None)), num_warps=num_warps,
            )  # fmt: skip

    return launch_all


launch = launch_by(launcher)

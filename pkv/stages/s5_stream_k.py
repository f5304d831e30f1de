"""Stage 5, stream-K: every program gets an equal run of work, and finds it on the GPU, from the lengths alone.

Lay all rows' tiles in one line, each row preceded by START_UNITS for the time until its first tile has been loaded. Cut
the line into as many equal **runs** as there are programs: program p has the units [p * share, (p + 1) * share). A run
may begin in the middle of one row and end in the middle of another. So all programs stay busy until the same moment,
even with ragged rows or few rows, and there is no last wave. Rows that lie in one run are written directly. The cut
between runs p - 1 and p splits at most one row, so a program has at most two partial states, whatever the lengths.

Lengths [5, 40], tile 16, START_UNITS 1, 3 programs: row 0 has 1 + 1 units, row 1 has 1 + 3, so a run has 2 units:

    units    s 0    | s 1     | 1 1        s: the start of a row; a number: a tile of that row
    items    (0, 0:5) (1, 0:16) (1, 16:40)

The merge is divided as evenly: each cut that splits a row merges an equal slice of the row's result.

The host only knows the number of programs. So a call needs no plan, the workspace does not depend on the lengths, and a
captured CUDA graph replays correctly while rows grow, come, go or become empty. plan() computes the same runs on the
CPU, for people, simulation and costs.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pkv._triton import INTERPRETED, launch_kernel, tl, triton
from pkv.kernels.configs import next_power_of_two
from pkv.kernels.launching import KernelArgs, launch_by
from pkv.kernels.masks import visible_tiles_of
from pkv.kernels.merging import merge_items, merge_options
from pkv.kernels.tile import RowArgs, load_query, store_empty, store_state
from pkv.plans.facts import Facts, Merging
from pkv.plans.fields import Int32Array, Launch, offsets_of
from pkv.plans.gpu import GpuProfile
from pkv.plans.plan import Plan
from pkv.plans.shape import Shape
from pkv.stages.s3_workqueue import queue_launches
from pkv.stages.s5_stream_k_runs import cut_runs, find_item, find_row, find_share, rules_for
from pkv.stages.sizing import reading_programs, sizes_for

PLANNED_ON = "gpu"
FACTS = Facts(merging=Merging.BY_CUT)
PARTS = ("attend_tokens",)  # not "merge": this stage merges by the cuts between runs


def plan(
    lengths: Int32Array,
    shape: Shape,
    *,
    tile: int | None = None,
    gpu: "str | GpuProfile | None" = None,
    dynamic: bool = False,
) -> Plan:
    """Plan the runs that the kernel will compute from these lengths; with dynamic=True they are upper bounds."""
    profile, tile, resident = sizes_for(gpu, tile, shape, "stream_k")
    n_programs = max(1, profile.n_sms * reading_programs(profile, resident) // shape.grid_heads) if len(lengths) else 0
    items, program_items, row_items = cut_runs(lengths, n_programs, tile, features=shape.features)
    return Plan(
        stage="stream_k",
        shape=shape,
        lengths=lengths,
        items=items,
        program_offsets=offsets_of(program_items),
        partial_offsets=offsets_of(row_items),
        launches=run_launches(row_items, n_programs, dynamic),
        tile=tile,
        gpu=profile,
        programs_per_sm=resident,
        dynamic=dynamic,
    )


def run_launches(row_items: npt.NDArray[np.int64], n_programs: int, dynamic: bool) -> tuple[Launch, ...]:
    """Make the decode launch of all runs, and the merge of rows that are split or empty; dynamic: of all rows."""
    if not dynamic:
        return queue_launches(row_items, n_programs, 0)
    rows = tuple(range(len(row_items)))
    return (Launch("decode", rows, 0, n_programs), Launch("merge", rows, n_splits=n_programs)) if rows else ()


def fault_of_items(plan: Plan) -> str | None:
    """Say where the plan's items differ from those that the kernel finds; None if they agree."""
    items, program_items, row_items = cut_runs(plan.lengths, plan.n_programs, plan.tile, features=plan.shape.features)
    if not np.array_equal(np.diff(plan.partial_offsets), row_items) or not np.array_equal(plan.items, items):
        return "its items are not the equal runs that the kernel cuts"
    if not np.array_equal(np.diff(plan.program_offsets), program_items) or plan.item_order is not None:
        return "its programs do not have the items of their runs, in order"
    if plan.launches != run_launches(row_items, plan.n_programs, plan.dynamic):
        return "its launches must be one of all programs, and one of the rows that are split or empty"
    return None


@triton.jit(do_not_specialize=["n_rows", "n_programs"])
def stream_k_kernel(
    q, cache, result, partials, n_rows, n_programs, qk_scale,
    ATTEND: tl.constexpr, SHAPE: tl.constexpr, RULES: tl.constexpr,
):  # fmt: skip
    """One program per (run, KV head): find my run, then do its rows one after another."""
    GRID_HEADS: tl.constexpr = SHAPE.N_KV_HEADS * SHAPE.HEAD_BLOCKS
    grid_head = tl.program_id(0) % GRID_HEADS
    program = tl.program_id(0) // GRID_HEADS
    if SHAPE.EARLY_MERGE:
        tl.extra.cuda.gdc_launch_dependents()
    total, share = find_share(cache, n_rows, n_programs, SHAPE, RULES)
    unit = program * share
    stop = tl.minimum(unit + share, total)
    if unit < stop:
        row, before = find_row(cache, n_rows, unit, SHAPE, RULES)
        while unit < stop:
            first, end, n_tiles, seen, length, after = find_item(cache, row, before, unit, stop, SHAPE, RULES)
            if first < end:
                # Addresses that depend on the row's place are computed again for each row: kept from row to row, they
                # would take a hundred registers.
                head = tl.where(before >= 0, grid_head, 0)
                query = load_query(q, row, head, SHAPE)
                begin = (seen + first) * SHAPE.BLOCK_N
                stop_token = tl.minimum((seen + end) * SHAPE.BLOCK_N, length)
                out, lse = ATTEND(query, cache, row, head, begin, stop_token, qk_scale, SHAPE)
                if (first == 0) & (end == n_tiles):
                    store_state(result, row, head, out, lse, SHAPE, False)
                else:  # a run has at most one row that began before it, and one that ends after it
                    slot = 2 * program + (first == 0).to(tl.int32)
                    store_state(partials, slot, head, out, lse, SHAPE, False)
            unit = tl.maximum(unit, after)
            before = after
            row += 1


@triton.jit
def merge_slices(
    partials, result, row, grid_head, first_run, n_items, rank, n_ranks,
    SHAPE: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Cut a row's result into slices and merge the slices rank, rank + n_ranks, ...

    BLOCK_S states of one slice fit registers.
    """
    SLICE: tl.constexpr = 2048 // BLOCK_S  # elements
    DIMS: tl.constexpr = SLICE if SLICE < SHAPE.BLOCK_D else SHAPE.BLOCK_D
    HEADS: tl.constexpr = SLICE // DIMS if SLICE // DIMS < SHAPE.BLOCK_H else SHAPE.BLOCK_H
    OWN_HEADS: tl.constexpr = SHAPE.GROUP if SHAPE.GROUP < SHAPE.BLOCK_H else SHAPE.BLOCK_H
    PER_HEAD: tl.constexpr = SHAPE.BLOCK_D // DIMS
    for slice in range(rank, tl.cdiv(OWN_HEADS, HEADS) * PER_HEAD, n_ranks):
        own_heads = slice // PER_HEAD * HEADS + tl.arange(0, HEADS)
        in_group = grid_head % SHAPE.HEAD_BLOCKS * SHAPE.BLOCK_H + own_heads
        exists = (own_heads < OWN_HEADS) & (in_group < SHAPE.GROUP)
        heads = grid_head // SHAPE.HEAD_BLOCKS * SHAPE.GROUP + in_group
        dims = slice % PER_HEAD * DIMS + tl.arange(0, DIMS)
        merge_items(partials, result, row, heads, exists, dims, 2 * first_run, n_items, SHAPE, BLOCK_S, True)


@triton.jit(do_not_specialize=["n_rows", "n_programs"])
def merge_runs_kernel(
    rows, partials, result, n_rows, n_programs,
    SHAPE: tl.constexpr, RULES: tl.constexpr, MOST_ITEMS: tl.constexpr,
):  # fmt: skip
    """One program per (cut, KV head): the cut before run r splits at most one row; merge my slices of that row.

    A row in n runs has n - 1 cuts, so the more items a row has, the more programs merge them. Rows without tokens are
    in no run: program r writes those among the rows r, r + n_programs, ...
    """
    GRID_HEADS: tl.constexpr = SHAPE.N_KV_HEADS * SHAPE.HEAD_BLOCKS
    grid_head = tl.program_id(0) % GRID_HEADS
    run = tl.program_id(0) // GRID_HEADS
    total, share = find_share(rows, n_rows, n_programs, SHAPE, RULES)
    unit = run * share
    row, before = find_row(rows, n_rows, unit, SHAPE, RULES)
    is_cut = (unit < total) & (unit > before + RULES.START_UNITS)
    first_run = ((before + RULES.START_UNITS) // share).to(tl.int32)
    n_items = 0
    if is_cut:
        length = tl.load(rows.lengths.ptr + row.to(tl.int64) * rows.lengths.strides[0])
        _, n_tiles = visible_tiles_of(length, rows.masks, SHAPE)
        n_items = ((before + RULES.START_UNITS + n_tiles - 1) // share).to(tl.int32) - first_run + 1
    for other in range(run, n_rows, n_programs):
        if tl.load(rows.lengths.ptr + tl.cast(other, tl.int64) * rows.lengths.strides[0]) <= 0:
            store_empty(result, tl.cast(other, tl.int64), grid_head, SHAPE, False)
    if SHAPE.EARLY_MERGE:  # all work above needs no partial state, so it need not wait for the runs
        tl.extra.cuda.gdc_wait()
    if is_cut:
        rank, n_ranks = run - first_run - 1, n_items - 1
        if n_items <= 4:
            merge_slices(partials, result, row, grid_head, first_run, n_items, rank, n_ranks, SHAPE, 4)
        elif n_items <= 32:
            merge_slices(partials, result, row, grid_head, first_run, n_items, rank, n_ranks, SHAPE, 32)
        else:  # all at once: a loop would wait for memory at every turn
            merge_slices(partials, result, row, grid_head, first_run, n_items, rank, n_ranks, SHAPE, MOST_ITEMS)


def launched_programs(plan: Plan) -> tuple[int, int]:
    """Return the programs to launch per grid head: (runs, merges). On a GPU it is all of them.

    Only the GPU knows which programs have work. In the interpreter, where a program without work takes some ms, it is
    the programs that have work by the plan.
    """
    if not INTERPRETED or plan.dynamic:
        return plan.n_programs, plan.n_programs
    n_runs = int(np.flatnonzero(np.diff(plan.program_offsets))[-1]) + 1
    return n_runs, min(plan.n_programs, max(n_runs, plan.n_rows))


def launcher(plan: Plan, capacity: int) -> Callable[[KernelArgs], None]:
    """Make the function that decodes all runs, then merges the rows that are cut. It may be called any number of times.

    Of the plan it reads the numbers of rows, programs and launches only. capacity: tokens that a row of the cache's
    table has room for.
    """
    sizes = plan.n_rows, plan.n_programs
    rules = rules_for(plan.n_rows, capacity, plan.tile)
    n_runs, n_mergers = (n * plan.shape.grid_heads for n in launched_programs(plan))
    most_items = min(max(next_power_of_two(plan.n_programs), 64), 256)
    has_merge = len(plan.launches) > 1

    def launch_both(args: KernelArgs) -> None:
        launch_kernel(
            stream_k_kernel, n_runs,
            (args.q, args.cache, args.result, args.partials, *sizes, args.qk_scale, args.attend),
            (args.shape, rules), args.signature, num_warps=args.num_warps,
        )  # fmt: skip
        if has_merge:
            launch_kernel(
                merge_runs_kernel, n_mergers,
                (RowArgs(args.cache.lengths, args.cache.masks), args.partials, args.result, *sizes),
                (args.shape, rules, most_items), args.signature, num_warps=1, **merge_options(args.shape),
            )  # fmt: skip

    return launch_both


launch = launch_by(launcher)

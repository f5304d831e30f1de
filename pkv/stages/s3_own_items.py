"""The workqueue of a user's own items, listed by `pkv.Parts(plan=...)` and checked before anything runs.

The user's function gets the lengths, [5, 40] for example, and the shape. For tiles of 16 it may return [(0, 0, 5),
(1, 0, 32), (1, 32, 40)], or a Plan of any stage for those lengths, whose items the queue then takes.
"""

import operator
import weakref
from typing import Any

import numpy as np
import torch

from pkv.kernels.parts import Cut
from pkv.plans.fields import Int32Array
from pkv.plans.gpu import DEFAULT_TILE, GpuProfile
from pkv.plans.plan import Plan
from pkv.plans.shape import Shape
from pkv.plans.soundness import first_fault
from pkv.runtime.memory import Memory
from pkv.stages.s3_workqueue import queue_of, requeue
from pkv.stages.sizing import sizes_for
from pkv.wording.checks import LONGEST_ROW
from pkv.wording.counts import count_of

MADE_BY = Memory()  # for each plan: {"cut": returns the function that listed its items}


def plan_of_items_by(
    cut: Cut,
    lengths: Int32Array,
    shape: Shape,
    *,
    splits: int | None = None,
    tile: int | None = None,
    ordering: str | None = None,
    gpu: "str | GpuProfile | None" = None,
) -> Plan:
    """Make the plan of the items that `cut` lists; ValueError names parts.plan, row and token if they are wrong.

    tile: 16 by default on every card, because `cut` is not told the tile. ordering: see workqueue; None: as listed, or
    as the returned Plan says.

    >>> shape = Shape(4, 2, 64, 4, "float16")
    >>> cut = lambda lengths, shape: [(0, 0, 5), (1, 0, 32), (1, 32, 40)]
    >>> plan_of_items_by(cut, np.array([5, 40], dtype=np.int32), shape, gpu="rtx3060").partial_offsets.tolist()
    [0, 1, 3]
    """
    if splits is not None:
        raise ValueError("splits= has no effect because parts.plan cuts the rows: pass splits= or parts.plan, not both")
    found = cut(lengths.tolist(), shape)
    if isinstance(found, Plan):
        made = queue_of_plan(found, lengths, shape, tile, ordering)
    else:
        profile, tile, resident = sizes_for(gpu, DEFAULT_TILE if tile is None else tile, shape, "workqueue")
        items = items_array(found, len(lengths))
        row_items = np.bincount(items[:, 0], minlength=len(lengths))
        made = queue_of(items, row_items, lengths, shape, tile, profile, resident, ordering or "as_listed")
    fault = first_fault(made)
    if fault:
        raise ValueError(f"parts.plan: {fault}")
    try:
        MADE_BY.of(made)["cut"] = weakref.ref(cut)  # weak, because `cut` may hold the plan
    except TypeError:  # not every object has weak references
        MADE_BY.of(made)["cut"] = lambda: cut
    return made


def check_made_by(cut: Cut, plan: Plan) -> None:
    """Raise ValueError unless plan_of_items_by(cut) made the plan: running any other would ignore parts.plan."""
    made_by = MADE_BY.known(plan).get("cut")
    if made_by is None or made_by() is not cut:
        raise ValueError(
            "plan was not made by parts.plan: make it with pkv.plan(lengths, shape, stage='workqueue', parts=parts), "
            "or pass parts without a plan"
        )


def queue_of_plan(found: Plan, lengths: Int32Array, shape: Shape, tile: int | None, ordering: str | None) -> Plan:
    """Turn a plan that parts.plan returned into one for the queue's kernel."""
    if found.shape != shape:
        raise ValueError(f"parts.plan returned a plan for another shape ({found.shape}), not for {shape}")
    if not np.array_equal(found.lengths, lengths):
        where = f"lengths has {count_of(len(lengths), 'row')}, its plan {found.n_rows}"
        if found.n_rows == len(lengths):
            row = np.flatnonzero(found.lengths != lengths)[0]
            where = f"row {row} has {count_of(lengths[row], 'token')}, in its plan {found.lengths[row]}"
        raise ValueError(f"parts.plan returned a plan for other lengths: {where}")
    if tile not in (None, found.tile):
        raise ValueError(
            f"parts.plan returned a plan in tiles of {found.tile}, but tile = {tile}: leave out tile=, or plan in it"
        )
    if found.stage == "workqueue" and ordering is None and not found.dynamic:
        return found
    fault = first_fault(found)
    try:
        if fault:
            raise ValueError(fault)
        return requeue(found, ordering=ordering)
    except ValueError as error:
        raise ValueError(
            f"parts.plan returned a plan of stage {found.stage!r} that the queue cannot run: {error}"
        ) from None


def items_array(found: Any, n_rows: int) -> Int32Array:
    """Return the items of parts.plan as int32 [n_items, 3]; raise unless their rows exist and are in order."""
    if isinstance(found, torch.Tensor):
        found = found.detach().cpu().numpy()
    try:
        entries = list(found)
    except TypeError:
        raise TypeError(
            f"parts.plan returned {type(found).__name__}: it must return items (row, begin, end), or a pkv.Plan"
        ) from None
    items = np.empty((len(entries), 3), dtype=np.int64)
    last_row = 0
    for index, entry in enumerate(entries):
        row, begin, end = items[index] = ints_of(index, entry)
        if not 0 <= row < n_rows:
            raise ValueError(f"parts.plan: item {index} is of row {row}, tokens {begin}:{end}; rows are 0:{n_rows}")
        if row < last_row:
            raise ValueError(
                f"parts.plan: item {index}, tokens {begin}:{end} of row {row}, comes after one of row {last_row}: "
                "list the items row by row"
            )
        if not 0 <= begin <= end <= LONGEST_ROW:
            raise ValueError(
                f"parts.plan: item {index} of row {row} has the tokens {begin}:{end}: "
                f"it must hold 0 <= begin <= end <= {LONGEST_ROW}"
            )
        last_row = row
    return items.astype(np.int32)


def ints_of(index: int, entry: Any) -> tuple[int, int, int]:
    """Return one item as three ints; ValueError names the item that is something else."""
    try:
        row, begin, end = (operator.index(value) for value in entry if not isinstance(value, bool))
    except (TypeError, ValueError):
        raise ValueError(f"parts.plan: item {index} is {entry!r}, not three ints (row, begin, end)") from None
    return row, begin, end

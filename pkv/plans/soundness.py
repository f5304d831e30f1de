"""Checks of a plan: its items cover every token of every row exactly once, and its arrays agree with each other."""

import numpy as np
import numpy.typing as npt

from pkv.plans.facts import Family
from pkv.plans.fields import Launch, PlanFields
from pkv.wording.counts import count_of


def first_fault(plan: PlanFields) -> str | None:
    """Return the first fault of a plan, in words; None if it has none."""
    checks = (_fault_of_sizes, _fault_of_offsets, _fault_of_coverage, _fault_of_launches)
    return next((fault for fault in (check(plan) for check in checks) if fault), None)


def _fault_of_sizes(plan: PlanFields) -> str | None:
    if plan.lengths.ndim != 1 or plan.items.ndim != 2 or plan.items.shape[1] != 3:
        return f"lengths {plan.lengths.shape} must be [n_rows] and items {plan.items.shape} [n_items, 3]"
    if plan.tile < 1 or plan.programs_per_sm < 1:
        return f"tile {plan.tile} and programs_per_sm {plan.programs_per_sm} must be at least 1"
    for row in np.flatnonzero(plan.lengths < 0):
        return f"lengths[{row}] = {plan.lengths[row]} is negative"
    return None


def _fault_of_offsets(plan: PlanFields) -> str | None:
    for name, n_entries in (("partial_offsets", plan.n_rows + 1), ("program_offsets", None)):
        offsets = getattr(plan, name)
        if offsets.ndim != 1 or len(offsets) == 0 or (n_entries and len(offsets) != n_entries):
            return f"{name} has shape {offsets.shape}, expected ({n_entries or 'n_programs + 1'},)"
        if offsets[0] != 0 or offsets[-1] != plan.n_items or (np.diff(offsets) < 0).any():
            return f"{name} must rise from 0 to n_items = {plan.n_items}"
    if plan.item_order is not None and sorted(plan.item_order.tolist()) != list(range(plan.n_items)):
        return "item_order must name every item exactly once"
    return None


def _fault_of_coverage(plan: PlanFields) -> str | None:
    for row, (first, length) in enumerate(plan.spans.tolist()):
        covered = first // plan.tile * plan.tile
        for index in range(plan.partial_offsets[row], plan.partial_offsets[row + 1]):
            item_row, begin, end = plan.items[index].tolist()
            if item_row != row:
                return f"item {index} belongs to row {item_row}, but lies among the items of row {row}"
            if begin > end:
                return f"item {index} of row {row} ends before it begins ({begin}:{end})"
            if begin % plan.tile:
                return f"item {index} of row {row} begins at {begin}, not at a multiple of the tile {plan.tile}"
            if begin == end:
                continue
            if begin < covered and covered <= first:
                return f"item {index} of row {row} begins at {begin}, before the first tile of its window, {covered}"
            if begin != covered:
                word = "lost" if begin > covered else "done twice"
                return f"tokens {min(begin, covered)}:{max(begin, covered)} of row {row} are {word} at item {index}"
            covered = end
        if covered != length:
            return f"row {row} has {count_of(length, 'token')}, its items end at {covered}"
    return None


def _fault_of_launches(plan: PlanFields) -> str | None:
    items_per_row = np.diff(plan.partial_offsets)
    to_decode = items_per_row.copy()  # for each row, the items that no launch has decoded yet
    order = np.arange(plan.n_items) if plan.item_order is None else plan.item_order
    merged: set[int] = set()
    n_programs = 0
    for launch in plan.launches:
        if launch.kernel not in ("decode", "merge"):
            return f"unknown kernel {launch.kernel!r} (decode or merge)"
        if not set(launch.rows) <= set(range(plan.n_rows)) or len(set(launch.rows)) < len(launch.rows):
            return f"a {launch.kernel} launch names rows twice, or outside 0:{plan.n_rows}"
        fault = _fault_of_splits(launch, items_per_row)
        if fault:
            return fault
        if launch.kernel == "merge":
            for row in launch.rows:
                if to_decode[row] or row in merged:
                    return f"row {row} is merged {'twice' if row in merged else 'before it is decoded'}"
            merged |= set(launch.rows)
            continue
        programs = f"{launch.begin}:{launch.end}"
        if launch.begin != n_programs:
            return f"the decode launch of programs {programs} must begin at program {n_programs}"
        n_expected = launch.n_splits * max(len(launch.rows), 1)
        if launch.n_splits and launch.end - launch.begin != n_expected:
            return (
                f"the decode launch of programs {programs} must have {n_expected} programs, n_splits = "
                f"{launch.n_splits} for each of its {count_of(len(launch.rows), 'row')}"
            )
        if not launch.begin <= launch.end <= plan.n_programs:
            return f"the decode launch of programs {programs} ends outside 0:{plan.n_programs}"
        n_programs = launch.end
        mine = order[plan.program_offsets[launch.begin] : plan.program_offsets[launch.end]]
        to_decode -= np.bincount(plan.items[mine, 0], minlength=plan.n_rows).astype(to_decode.dtype)
        for row in set(plan.items[mine, 0].tolist()) - set(launch.rows):
            return f"the decode launch of programs {programs} has items of row {row}, which it does not name"
    if not plan.launches and (plan.family is Family.TORCH or not plan.lengths.any()):
        return None  # PyTorch needs no launch of pkv's, and rows without tokens need none at all
    if n_programs != plan.n_programs:
        return f"decode launches cover the programs 0:{n_programs} of 0:{plan.n_programs}"
    for row in set(np.flatnonzero(items_per_row > 1).tolist()) - merged:
        return f"row {row} is split but never merged"
    for row in set(np.flatnonzero(items_per_row == 0).tolist()) - merged:
        return f"row {row} has no item and no merge launch: its result is never written"
    return None


def _fault_of_splits(launch: Launch, items_per_row: npt.NDArray[np.int32]) -> str | None:
    """Return the first row whose items do not fit the launch, in words; None if all fit.

    A merge launch reads at most n_splits states of a row. A decode launch whose n_splits is not 0 needs exactly
    n_splits items in each row.
    """
    for row in launch.rows:
        n_items = items_per_row[row]
        if launch.kernel == "merge" and n_items > launch.n_splits:
            most = count_of(launch.n_splits, "split")
            return f"row {row} has {count_of(n_items, 'item')}, but its merge launch reads at most {most}"
        if launch.kernel == "decode" and launch.n_splits not in (0, n_items):
            return (
                f"row {row} has {count_of(n_items, 'item')}, "
                f"but its decode launch has {count_of(launch.n_splits, 'split')} per row"
            )
    return None

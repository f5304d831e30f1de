"""The rectangle of rows x splits that a grid launches, against what its cells hold: tokens, nothing, or no program.

Lengths [5, 40], tile 16, two splits: split_kv and row_local launch 2 x 2 cells. Row 0 has one tile, so its second cell
is launched and holds no token. The workqueue drops that cell: three are left.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pkv.plans.plan import Plan
from pkv.viz.rowstyles import Patches
from pkv.viz.svg import FAINT, GREY, SMALL, WIDTH, Picture, Sheet
from pkv.wording.counts import count_of

LEFT, RIGHT = 112, 112
MOST_ROWS = 20
MOST_COLUMNS = 48


class Cells(NamedTuple):
    """What is drawn of one plan, [rows, columns]: tokens held, and whether a program is launched for nothing."""

    tokens: npt.NDArray[np.int64]
    is_empty: npt.NDArray[np.bool_]


def draw_rectangle(plans: Sequence[Plan]) -> Picture:
    """Plans of the same rows below one another: each cell filled as far as it holds tokens, dashed if it holds none."""
    plans = _checked(plans)
    n_splits = max((most_items(plan) for plan in plans), default=0)
    title, notes = _claim(plans, n_splits), _notes(plans, n_splits)
    sheet = Sheet()
    sheet.heading(title, notes)
    if plans[0].n_rows:
        all_cells = [cells_of(plan, n_splits) for plan in plans]
        most = max(int(cells.tokens.max(initial=0)) for cells in all_cells)
        for plan, cells in zip(plans, all_cells, strict=True):
            _draw_cells(sheet, plan, cells, max(1, most))
    return sheet.finish(f"{title}. {' '.join(notes)}")


def _checked(plans: Sequence[Plan]) -> list[Plan]:
    if not isinstance(plans, list | tuple) or not plans or not all(isinstance(plan, Plan) for plan in plans):
        raise TypeError("plans must be a list of one or more plans, such as [pkv.plan(lengths, shape, ...)]")
    for plan in plans[1:]:
        if plan.lengths.tolist() != plans[0].lengths.tolist():
            raise ValueError(
                f"plans are of different rows: {plan.stage} has lengths {_few(plan)}, {plans[0].stage} "
                f"{_few(plans[0])}: make them all from the same lengths"
            )
    return list(plans)


def _few(plan: Plan) -> str:
    shown = ", ".join(map(str, plan.lengths[:6].tolist()))
    return f"[{shown}{', ...' if plan.n_rows > 6 else ''}]"


def most_items(plan: Plan) -> int:
    """The most items that a row of the plan has."""
    return int(np.diff(plan.partial_offsets).max(initial=0))


def cells_of(plan: Plan, n_splits: int) -> Cells:
    """The plan's items in a rectangle of n_splits columns: a row's items in order from the left."""
    row = plan.items[:, 0]
    column = np.arange(plan.n_items) - plan.partial_offsets[row]
    tokens = np.zeros((plan.n_rows, n_splits), dtype=np.int64)
    is_empty = np.zeros((plan.n_rows, n_splits), dtype=bool)
    tokens[row, column] = plan.item_tokens
    is_empty[row, column] = plan.items[:, 1] >= plan.items[:, 2]
    return Cells(tokens, is_empty)


def _draw_cells(sheet: Sheet, plan: Plan, cells: Cells, most: int) -> None:
    n_rows, n_columns = min(plan.n_rows, MOST_ROWS), min(cells.tokens.shape[1], MOST_COLUMNS)
    pitch, width = min(17.0, max(13.0, 170 / n_rows)), min(60.0, (WIDTH - LEFT - RIGHT) / max(1, n_columns))
    sheet.y += 14
    sheet.text(8, sheet.y, _line(plan), weight="bold")
    sheet.y += 6
    held, outlines, empty, dropped = Patches(), "", "", ""
    for row in range(n_rows):
        y, height = sheet.y + row * pitch, pitch - 3
        sheet.text(LEFT - 8, y + height / 2 + 4, f"row {row}: {plan.lengths[row]:,}", size=SMALL, anchor="end")
        for column in range(n_columns):
            x, tokens = LEFT + column * width + 1, int(cells.tokens[row, column])
            box = f"M{x:.5g} {y:.5g}h{width - 2:.4g}v{height:.4g}h-{width - 2:.4g}z"
            if cells.is_empty[row, column]:
                empty += box
            elif tokens:
                outlines += box
                held.add(0, x, y, max(1.5, (width - 2) * tokens / most), height)
            else:
                dropped += f"M{x + width / 2 - 2.5:.5g} {y + height / 2:.5g}h3"
        n_empty, n_items = int(cells.is_empty[row].sum()), int(np.diff(plan.partial_offsets)[row])
        words = f"{n_empty} of {n_items} empty" if n_empty else count_of(n_items, "item")
        sheet.text(LEFT + n_columns * width + 8, y + height / 2 + 4, words, size=SMALL, fill=GREY)
    held.draw(sheet, edges=False)
    for name, path, look in (
        ("held", outlines, f'stroke="{FAINT}"'),
        ("empty", empty, f'stroke="{GREY}" stroke-dasharray="3 2"'),
        ("dropped", dropped, f'stroke="{GREY}"'),
    ):
        if path:
            sheet.shapes.append(f'<path data-cells="{name}" d="{path}" fill="none" {look}/>')
    sheet.y += n_rows * pitch


def _line(plan: Plan) -> str:
    if not plan.n_items:
        return f"{plan.stage}: no item, so nothing is launched"
    n_empty = int((plan.items[:, 1] >= plan.items[:, 2]).sum())
    empty = f"{n_empty:,} without a token" if n_empty else "each with tokens"
    return f"{plan.stage}: {count_of(plan.n_items, 'item')} launched, {empty}"


def _claim(plans: Sequence[Plan], n_splits: int) -> str:
    """How many cells the rectangle has, and how many each stage launches for nothing or drops."""
    n_cells = plans[0].n_rows * n_splits
    if not n_cells:
        return "No rows, so there is no rectangle"
    parts = []
    for plan in plans:
        n_empty = int((plan.items[:, 1] >= plan.items[:, 2]).sum())
        found = [f"launches {n_empty:,} empty" if n_empty else "", f"drops {n_cells - plan.n_items:,}"]
        kept = [words for words in found if words and not words.endswith(" 0")]
        parts.append(f"{plan.stage} {' and '.join(kept) if kept else 'fills all'}")
    rows = count_of(plans[0].n_rows, "row")
    return f"{rows} x {count_of(n_splits, 'split')} are {count_of(n_cells, 'cell')}: {', '.join(parts)}"


def _notes(plans: Sequence[Plan], n_splits: int) -> list[str]:
    n_rows = plans[0].n_rows
    if not n_rows:
        return []
    notes = [
        "A cell is an item, filled as far as it holds tokens; full is the largest item of all. Dashed: launched, holds "
        "no token. Only a dash: not launched."
    ]
    drawn = [f"the first {MOST_ROWS} of {n_rows} rows"] * (n_rows > MOST_ROWS)
    drawn += [f"the first {MOST_COLUMNS} of {n_splits} splits"] * (n_splits > MOST_COLUMNS)
    if drawn:
        notes.append(f"Drawn: {' and '.join(drawn)}.")
    return [" ".join(notes)]

"""Which stage is best where: a map over rows, length and raggedness, with a letter in every cell.

Four cells, 1 and 8 rows of 4,096 and 65,536 tokens: a panel of 2 x 2, and each cell says whose it is and by how much
the second best would be slower. The values may come from predictions or from records: the map does not care.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pkv.viz.svg import EDGE, GREY, PALETTE, SMALL, WIDTH, Picture, Sheet, text_width
from pkv.wording.checks import at_least
from pkv.wording.counts import count_of

LEFT, GAP, CELL_HEIGHT = 44, 18, 34
LEAST_CELL = 40.0  # pixels: room for a margin such as +12%
# letter, colour: the same stage looks alike in every map
LOOKS = {
    "reference": ("R", "#bdbdbd"),
    "split_kv": ("S", PALETTE[4]),
    "length_buckets": ("B", PALETTE[1]),
    "row_local": ("L", PALETTE[6]),
    "workqueue": ("W", PALETTE[2]),
    "flashinfer": ("F", PALETTE[0]),
    "adaptive": ("A", PALETTE[3]),
    "stream_k": ("K", PALETTE[5]),
}


class Cell(NamedTuple):
    """One point of the map. margin: how much slower the second best is, 0.12 for 12%; None where there is no second."""

    n_rows: int
    longest: int
    raggedness: str
    stage: str
    margin: float | None = None


class Regimes(NamedTuple):
    """The map as values: axes, panels, each cell by (raggedness, n_rows, longest), letters and colours, the claim."""

    n_rows: list[int]
    longest: list[int]
    panels: list[str]
    cells: dict[tuple[str, int, int], Cell]
    looks: dict[str, tuple[str, str]]
    claim: str


def draw_regimes(cells: Iterable[Sequence[Any]], note: str = "") -> Picture:
    """The map of the best stage, a panel for each raggedness. Cells may be tuples in the order of Cell's fields.

    note: what else to say below the claim, such as "Predicted, not measured."
    """
    regimes = regimes_of(cells)
    notes = [note] if note else []
    notes += [
        "A letter is the best stage, the number below it how much slower the second best is. Upwards: rows. To the "
        "right: tokens of the longest row."
    ]
    n_places = len(regimes.panels) * len(regimes.n_rows) * len(regimes.longest)
    if len(regimes.cells) < n_places:
        notes.append("Dashed: not known.")
    if any(is_tie(cell) for cell in regimes.cells.values()):
        notes.append("=: the second best takes as long, within half a percent.")
    sheet = Sheet()
    sheet.heading(regimes.claim, [" ".join(notes)])
    _draw_legend(sheet, regimes)
    n_columns = len(regimes.longest)
    per_line = max(1, min(len(regimes.panels), int((WIDTH - 8) / (LEFT + GAP + LEAST_CELL * n_columns))))
    cell = min(76.0, ((WIDTH - 8) / per_line - LEFT - GAP) / n_columns)
    for first in range(0, len(regimes.panels), per_line):
        top = sheet.y
        for number, panel in enumerate(regimes.panels[first : first + per_line]):
            _draw_panel(sheet, regimes, panel, LEFT + number * (LEFT + GAP + cell * n_columns), top, cell)
        sheet.y = top + CELL_HEIGHT * len(regimes.n_rows) + 50
    words = "; ".join(
        f"{where.raggedness}, {count_of(where.n_rows, 'row')}, longest {where.longest:,}: {where.stage}"
        + (f" {margin_in_words(where)}" if where.margin is not None else "")
        for where in regimes.cells.values()
    )
    return sheet.finish(f"{regimes.claim}. {' '.join(notes)} {words}.")


def regimes_of(cells: Iterable[Sequence[Any]]) -> Regimes:
    """The cells sorted and checked; ValueError names the cell that is wrong or there twice."""
    found: dict[tuple[str, int, int], Cell] = {}
    for number, values in enumerate(cells):
        cell = _checked(number, values)
        place = (cell.raggedness, cell.n_rows, cell.longest)
        if place in found:
            raise ValueError(
                f"cells[{number}] is a second one for {cell.raggedness}, {count_of(cell.n_rows, 'row')}, longest "
                f"{cell.longest}: pass one"
            )
        found[place] = cell
    if not found:
        raise ValueError("cells is empty: pass at least one, such as (8, 65536, 'one long', 'workqueue', 0.12)")
    counts: dict[str, int] = {}
    for cell in found.values():
        counts[cell.stage] = counts.get(cell.stage, 0) + 1
    stages = sorted(counts, key=lambda stage: -counts[stage])
    wins = ", ".join(f"{stage} in {counts[stage]}" for stage in stages[1:])
    claim = f"{stages[0]} is best in {counts[stages[0]]} of {count_of(len(found), 'cell')}" + f", {wins}" * bool(wins)
    return Regimes(
        n_rows=sorted({cell.n_rows for cell in found.values()}),
        longest=sorted({cell.longest for cell in found.values()}),
        panels=list(dict.fromkeys(cell.raggedness for cell in found.values())),
        cells=found,
        looks=_looks_of(stages),
        claim=claim,
    )


def _checked(number: int, values: Sequence[Any]) -> Cell:
    if isinstance(values, str) or not isinstance(values, Sequence) or not 4 <= len(values) <= 5:
        raise TypeError(
            f"cells[{number}] = {values!r} must be (n_rows, longest, raggedness, stage, margin), such as "
            "(8, 65536, 'one long', 'workqueue', 0.12)"
        )
    cell = Cell(*values)
    for name in ("raggedness", "stage"):
        if not isinstance(getattr(cell, name), str) or not getattr(cell, name):
            raise TypeError(f"cells[{number}].{name} must be a word, got {getattr(cell, name)!r}")
    margin = None if cell.margin is None else float(cell.margin)
    if margin is not None and not (math.isfinite(margin) and margin >= 0):
        raise ValueError(f"cells[{number}].margin = {margin} must be 0 or more: how much slower the second best is")
    return cell._replace(
        n_rows=at_least(1, f"cells[{number}].n_rows", cell.n_rows),
        longest=at_least(0, f"cells[{number}].longest", cell.longest),
        margin=margin,
    )


def _looks_of(stages: Sequence[str]) -> dict[str, tuple[str, str]]:
    """A letter and a colour for each stage; a stage that is not ours gets the first letter that is free."""
    looks = {stage: LOOKS[stage] for stage in stages if stage in LOOKS}
    taken = {letter for letter, _ in LOOKS.values()}
    for stage in stages:
        if stage not in looks:
            free = [letter for letter in f"{stage.upper()}ABCDEFGHIJKLMNOPQRSTUVWXYZ" if letter.isalnum()]
            letter = next((letter for letter in free if letter not in taken), "?")
            looks[stage] = (letter, "#e0e0e0")
            taken.add(letter)
    return looks


def is_tie(cell: Cell) -> bool:
    """Is the second best as good, in whole percent?"""
    return cell.margin is not None and f"{cell.margin:.0%}" == "0%"


def margin_in_words(cell: Cell) -> str:
    """+12%; = where that would be +0%, x 3.4 where it would be 100% or more; nothing where it is not known."""
    if cell.margin is None:
        return ""
    if is_tie(cell):
        return "="
    return f"+{cell.margin:.0%}" if cell.margin < 0.995 else f"×{1 + cell.margin:.3g}"


def tokens_in_words(tokens: int) -> str:
    """Tokens as short as they can be written.

    >>> tokens_in_words(65536), tokens_in_words(2**21), tokens_in_words(1000)
    ('64K', '2M', '1,000')
    """
    for size, unit in ((2**20, "M"), (2**10, "K")):
        if tokens and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens:,}"


def _draw_legend(sheet: Sheet, regimes: Regimes) -> None:
    x = 8.0
    for stage, (letter, colour) in regimes.looks.items():
        width = 26 + text_width(stage, SMALL) + 10
        if x + width > WIDTH - 8 and x > 8:
            x, sheet.y = 8.0, sheet.y + 22
        _fill(sheet, x, sheet.y, 18, 16, colour)
        sheet.text(x + 9, sheet.y + 12, letter, anchor="middle", weight="bold", size=SMALL)
        sheet.text(x + 24, sheet.y + 12, stage, size=SMALL, fill=GREY)
        x += width
    sheet.y += 30


def _fill(sheet: Sheet, x: float, y: float, width: float, height: float, colour: str) -> None:
    place = f'x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}"'
    sheet.shapes.append(f'<rect {place} fill="{colour}" fill-opacity=".45" stroke="{EDGE}" stroke-width=".6"/>')


def _draw_panel(sheet: Sheet, regimes: Regimes, panel: str, left: float, top: float, cell: float) -> None:
    sheet.text(left, top + 8, panel, weight="bold")
    top += 18
    for line, n_rows in enumerate(reversed(regimes.n_rows)):
        y = top + line * CELL_HEIGHT
        sheet.text(left - 6, y + CELL_HEIGHT / 2 + 4, f"{n_rows:,}", size=SMALL, fill=GREY, anchor="end")
        for column, longest in enumerate(regimes.longest):
            x, found = left + column * cell, regimes.cells.get((panel, n_rows, longest))
            if found is None:
                sheet.hollow(x + 1, y + 1, cell - 2, CELL_HEIGHT - 2)
                continue
            letter, colour = regimes.looks[found.stage]
            _fill(sheet, x, y, cell, CELL_HEIGHT, colour)
            margin = margin_in_words(found)
            margin = margin if text_width(margin, SMALL) < cell else ""
            sheet.text(x + cell / 2, y + (15 if margin else 22), letter, anchor="middle", weight="bold", size=13)
            if margin:
                sheet.text(x + cell / 2, y + 29, margin, anchor="middle", size=SMALL)
    y = top + CELL_HEIGHT * len(regimes.n_rows) + 14
    names = [tokens_in_words(longest) for longest in regimes.longest]
    step = -(-int(text_width(max(names, key=len), SMALL) + 4) // int(cell))  # leave out names that would meet
    for column, name in list(enumerate(names))[::step]:
        sheet.text(left + (column + 0.5) * cell, y, name, size=SMALL, fill=GREY, anchor="middle")
    sheet.text(left - 6, y, "rows", size=SMALL, fill=GREY, anchor="end")

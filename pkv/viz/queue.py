"""A plan's items as its programs take them: one tape, cut into items, each as wide as it has tiles.

Lengths [5, 40], tile 16, workqueue with two splits: the tape holds 2 and 1 tiles of row 1, and 1 tile of row 0. An item
without a token has no tile: it is a dashed tick, a program that is launched for nothing. Where every program has its
place in a grid of rows and splits, the tape is called grid, where programs have equal runs of all tiles, runs, else
queue.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pkv.plans.fields import Launch
from pkv.plans.plan import Plan
from pkv.viz.rowstyles import Patches, draw_legend, keys_of
from pkv.viz.svg import GREY, INK, SMALL, WIDTH, Picture, Sheet, text_width
from pkv.wording.counts import count_of, verb

LEFT, RIGHT = 78, 12
ROOM = WIDTH - LEFT - RIGHT
TAPE, LINE = 20, 30  # height of the tape, and from one line of it to the next
MOST_LINES = 8  # of one launch's tape
MOST_LAUNCHES = 12
TICK = 6.0  # width of an item without a token
NAMES = {"split_kv": "grid", "row_local": "grid", "stream_k": "runs"}  # of a stage's tape
LABEL_ROOM = 24.0  # an item of the usual size gets so many pixels while lines last


class Stretch(NamedTuple):
    """One item on the tape, or several without a token in a row of them: its place in pixels from the tape's start."""

    row: int
    x: float
    width: float
    n_items: int
    n_tiles: int
    opens_program: bool


def draw_queue(plan: Plan) -> Picture:
    """The items of every decode launch in the order in which programs take them, each as wide as its tiles."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a pkv.Plan, got {type(plan).__name__}: pass what pkv.plan(...) gives")
    launches = [(number, launch) for number, launch in enumerate(plan.launches, 1) if launch.kernel == "decode"]
    scale = _scale(plan, len(launches))
    tapes = [tape_of(plan, launch, scale) for _, launch in launches[:MOST_LAUNCHES]]
    title, notes = _claim(plan), _notes(plan, len(launches), tapes)
    sheet = Sheet()
    sheet.heading(title, notes)
    keys, names = keys_of(plan.lengths)
    if launches:
        draw_legend(sheet, names, WIDTH - 8)
    sheet.y += 4
    alone = NAMES.get(plan.stage, "queue")
    for (number, _), tape in zip(launches, tapes):
        _draw_tape(sheet, tape, keys, f"launch {number}" if len(launches) > 1 else alone)
    return sheet.finish(f"{title}. {' '.join(notes)}")


def tiles_of(plan: Plan) -> np.ndarray:
    """Tiles that each item reads."""
    first = plan.items[:, 1].astype(np.int64) // plan.tile
    return np.where(plan.items[:, 1] < plan.items[:, 2], -(-plan.items[:, 2].astype(np.int64) // plan.tile) - first, 0)


def _scale(plan: Plan, n_launches: int) -> float:
    """Pixels per tile: so that most items have room for a label, on MOST_LINES lines at most."""
    tiles = tiles_of(plan)
    filled = tiles[tiles > 0]
    if not len(filled):
        return 1.0
    most_lines = max(1, MOST_LINES // max(1, min(n_launches, MOST_LAUNCHES)))
    n_empty = min(len(tiles) - len(filled), plan.n_rows)  # neighbours share a tick
    room = max(0.3, most_lines * 0.97 - n_empty * (TICK + 3) / ROOM) * ROOM
    return float(min(LABEL_ROOM / np.median(filled), room / filled.sum()))


def tape_of(plan: Plan, launch: Launch, scale: float) -> list[Stretch]:
    """The launch's items in program order. Neighbours without a token share one tick."""
    order = np.arange(plan.n_items) if plan.item_order is None else plan.item_order
    tiles, x = tiles_of(plan), 0.0
    tape: list[Stretch] = []
    for program in range(launch.begin, launch.end):
        for place in range(plan.program_offsets[program], plan.program_offsets[program + 1]):
            item = int(order[place])
            row, n_tiles = int(plan.items[item, 0]), int(tiles[item])
            if n_tiles == 0 and tape and tape[-1].n_tiles == 0:
                tape[-1] = tape[-1]._replace(n_items=tape[-1].n_items + 1)
                continue
            width = n_tiles * scale if n_tiles else TICK
            tape.append(Stretch(row, x, width, 1, n_tiles, place == plan.program_offsets[program]))
            x += width
    return _make_room(tape)


def _make_room(tape: list[Stretch]) -> list[Stretch]:
    """Ticks that stand for several items get room for their number."""
    moved, shift = [], 0.0
    for stretch in tape:
        extra = text_width(f"×{stretch.n_items}", SMALL) + 6 if stretch.n_items > 1 else 2.0 * (stretch.n_tiles == 0)
        moved.append(stretch._replace(x=stretch.x + shift, width=stretch.width + extra))
        shift += extra
    return moved


def _draw_tape(sheet: Sheet, tape: list[Stretch], keys: npt.NDArray[np.int64], name: str) -> None:
    """The tape in lines like text; an item that reaches past a line's end goes on in the next."""
    sheet.text(LEFT - 6, sheet.y + 14, name, size=SMALL, fill=GREY, anchor="end")
    top, wide, thin = sheet.y, Patches(), Patches()  # edges would hide the thin ones
    labels, bounds = [], []
    end = 0.0
    for stretch in tape:
        line, x = divmod(stretch.x, ROOM)
        y, rest, is_first = top + line * LINE, stretch.width, True
        if stretch.n_tiles == 0:
            x = min(x, ROOM - stretch.width)
            sheet.hollow(LEFT + x + 1, y + 2, TICK - 2, TAPE - 4)
            if stretch.n_items > 1:
                sheet.text(LEFT + x + TICK, y + 14, f"×{stretch.n_items}", size=SMALL, fill=GREY)
            rest = 0.0
        while rest > 1e-6:
            width = min(rest, ROOM - x)
            (wide if width > 2.5 else thin).add(int(keys[stretch.row]), LEFT + x, y, width, TAPE)
            if is_first and width > 5:
                bounds.append(f"M{LEFT + x:.5g} {y - (3 if stretch.opens_program else 0):.5g}v{TAPE + 3}")
            if text_width(f"{stretch.row}", SMALL) < width - 3:
                labels.append((LEFT + x + width / 2, y + 14, f"{stretch.row}"))
            rest, x, y, is_first = rest - width, 0.0, y + LINE, False
        end = max(end, stretch.x + stretch.width)
    wide.draw(sheet)
    thin.draw(sheet, edges=False)
    if bounds:
        sheet.path("".join(bounds), INK, 0.8)
    for x, y, text in labels:
        sheet.text(x, y, text, size=SMALL, anchor="middle", halo=True)
    sheet.y = top + max(1.0, np.ceil(end / ROOM - 1e-6)) * LINE


def _claim(plan: Plan) -> str:
    tiles = tiles_of(plan)
    filled = tiles[tiles > 0]
    if not plan.launches:
        return f"{plan.stage}: no launch, so no program takes an item"
    n_empty = plan.n_items - len(filled)
    head = f"{plan.stage}: {count_of(plan.n_items, 'item')}"
    head += f" in {count_of(plan.n_programs, 'program')}" if plan.n_programs != plan.n_items else ""
    if not len(filled):
        return f"{head}, none of them with a token"
    sizes = f"{filled.min():,} to " * bool(filled.min() < filled.max()) + count_of(int(filled.max()), "tile")
    if not n_empty:
        return f"{head}, none is empty; each holds {sizes}"
    return f"{head}, {n_empty:,} of them {verb(n_empty, 'are')} empty; the others hold {sizes} each"


def _notes(plan: Plan, n_launches: int, tapes: list[list[Stretch]]) -> list[str]:
    if not n_launches:
        return []
    notes = [
        f"From left to right, line after line: what the programs take, in the order of the grid. Width: the item's "
        f"tiles of {count_of(plan.tile, 'token')}; number: its row. A line above the tape: a program begins. "
        f"{_heads(plan)}, in neighbouring programs."
    ]
    if any(stretch.n_tiles == 0 for tape in tapes for stretch in tape):
        joined = max(stretch.n_items for tape in tapes for stretch in tape)
        several = f"; ×{joined}: {joined} of them, one after another" if joined > 1 else ""
        notes.append(f"Dashed: programs that are launched and find no token{several}.")
    if n_launches > MOST_LAUNCHES:
        notes.append(f"The first {MOST_LAUNCHES} of {n_launches} decode launches are drawn.")
    return [" ".join(notes)]


def _heads(plan: Plan) -> str:
    """How often an item is launched; more than once per KV head where a group of query heads is cut."""
    shape = plan.shape
    heads = count_of(shape.n_kv_heads, "KV head")
    if shape.grid_heads == shape.n_kv_heads:
        return f"{heads}: each item is launched once per KV head"
    return f"{heads}: each item is launched {count_of(shape.grid_heads // shape.n_kv_heads, 'time')} per KV head"

"""The line of all rows' tiles, broken where one program's part ends and the next one's begins: a lane for each program.

Lengths [5, 140], tile 16, two runs: row 0 has 4 start units and 1 tile, row 1 has 4 and 9, so a run has 9 of the 18
units. Run 0 ends with the start of row 1, run 1 has its 9 tiles. Three runs of 6 cut row 1's tiles into 3 and 6.

Any plan is a way to cut the same line. stream_k's runs are equal, so its lanes end together; those of others end where
their items do.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pkv.plans.facts import Merging
from pkv.plans.plan import Plan
from pkv.stages.s5_stream_k_runs import RULES, line_of
from pkv.viz.rowstyles import Patches, draw_legend, keys_of
from pkv.viz.svg import FAINT, GREY, INK, SMALL, WIDTH, Picture, Sheet, text_width
from pkv.wording.counts import count_of, verb

LEFT, MERGE_ROOM, STATE_ROOM = 66.0, 146.0, 34.0
MOST_LANES = 96
MOST_HEIGHT, PITCHES = 560.0, (5.0, 22.0)
LABELLED = 13.0  # a lane so high has room for words


class Piece(NamedTuple):
    """A stretch of a lane, in units: tiles of a row, or its start units; item -1 for the latter."""

    row: int
    n_units: int
    item: int


class Lane(NamedTuple):
    """What one program has of the line; of a stream_k run, the rows of its two partial states, where it has them.

    began: a row that began before the run. ends_after: one that begins in it and goes on after it.
    """

    program: int
    pieces: list[Piece]
    began: int | None = None
    ends_after: int | None = None

    @property
    def n_units(self) -> int:
        return sum(piece.n_units for piece in self.pieces)


def draw_runs(plan: Plan) -> Picture:
    """Each program's part of the line, a lane each: start units hollow, tiles in the colour of their row.

    Of stage stream_k also the partial states, a dot where a row is cut, and which slice of which row's merge each cut
    does. TypeError for anything but a plan.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a pkv.Plan, got {type(plan).__name__}: pass what pkv.plan(...) gives")
    lanes = lanes_of(plan)
    title, notes = claim(plan, lanes), _notes(plan, lanes)
    sheet = Sheet()
    sheet.heading(title, notes)
    keys, names = keys_of(plan.lengths)
    if lanes:
        draw_legend(sheet, names, WIDTH - 8)
        _draw_lanes(sheet, plan, lanes[:MOST_LANES], keys)
    words = [f"{said}." for said in merges_of(plan, lanes).values()][:MOST_LANES]
    return sheet.finish(" ".join([f"{title}.", *notes, *words]))


def lanes_of(plan: Plan) -> list[Lane]:
    """The programs that have a part of the line, in their order. Programs after the line's end have none."""
    return _runs_of(plan) if plan.merging is Merging.BY_CUT else _programs_of(plan)


def _runs_of(plan: Plan) -> list[Lane]:
    """The equal runs, as stream_k cuts them."""
    n_tiles, units, share = line_of(plan.lengths, plan.n_programs, plan.tile, features=plan.shape.features)
    total, ends = int(units.sum()), np.cumsum(units)
    lanes = []
    for run in range(-(-total // share)):
        unit, stop = run * share, min((run + 1) * share, total)
        pieces: list[Piece] = []
        row, item = int(np.searchsorted(ends, unit, side="right")), int(plan.program_offsets[run])
        began = row if unit > ends[row] - n_tiles[row] else None
        while unit < stop:
            end, tile_0 = int(ends[row]), int(ends[row] - n_tiles[row])
            if unit < min(tile_0, stop):
                pieces.append(Piece(row, min(tile_0, stop) - unit, -1))
                unit = min(tile_0, stop)
            if unit < stop and units[row]:
                pieces.append(Piece(row, min(end, stop) - unit, item))
                unit, item = min(end, stop), item + 1
            row += 1
        last = pieces[-1].row
        goes_on = pieces[-1].item >= 0 and stop < ends[last] and last != began
        lanes.append(Lane(run, pieces, began, last if goes_on else None))
    return lanes


def _programs_of(plan: Plan) -> list[Lane]:
    """Programs of other stages: their items' tiles, and a row's start before its first one."""
    order = np.arange(plan.n_items) if plan.item_order is None else plan.item_order
    lanes = []
    for program in range(plan.n_programs):
        pieces: list[Piece] = []
        for item in order[plan.program_offsets[program] : plan.program_offsets[program + 1]].tolist():
            row, begin, end = plan.items[item].tolist()
            if begin < end:
                pieces += [Piece(row, RULES.START_UNITS, -1)] if begin == 0 else []
                pieces.append(Piece(row, -(-end // plan.tile) - begin // plan.tile, item))
        if pieces:
            lanes.append(Lane(program, pieces))
    return lanes


def merges_of(plan: Plan, lanes: list[Lane]) -> dict[int, str]:
    """For each run that begins inside a row's tiles, which slice of that row's result the cut before it merges."""
    n_cuts, ranks = dict[int, int](), {}
    for lane in lanes:
        if lane.began is not None:
            ranks[lane.program] = (lane.began, n_cuts.get(lane.began, 0))
            n_cuts[lane.began] = n_cuts.get(lane.began, 0) + 1
    return {run: f"row {row}: slice {rank + 1} of {n_cuts[row]}" for run, (row, rank) in ranks.items()}


def claim(plan: Plan, lanes: list[Lane]) -> str:
    """How evenly the line is dealt out."""
    if not lanes:
        return f"{plan.stage}: no row has a token, so no program has a part of the line"
    sizes = np.array([lane.n_units for lane in lanes])
    rows = count_of(len({piece.row for lane in lanes for piece in lane.pieces}), "row")
    if plan.merging is Merging.BY_CUT:
        crossing = any(len({piece.row for piece in lane.pieces}) > 1 for lane in lanes)
        n_runs, n_units = count_of(len(lanes), "run"), count_of(int(sizes[0]), "unit")
        head = f"{plan.stage}: {n_runs} of {n_units} {verb(len(lanes), 'cross' if crossing else 'hold')} {rows}"
        return f"{head}, so no program outlasts the others" if len(lanes) > 1 else head
    spread = f"{sizes.min():,} to {sizes.max():,} units" if sizes.min() < sizes.max() else count_of(sizes.max(), "unit")
    head = f"{plan.stage}: {count_of(len(lanes), 'program')} with {spread} of {rows}"
    over = sizes.max() / sizes.mean()
    return f"{head}; the longest has {over:.1f} times the mean" if over >= 1.05 else f"{head}, nearly equal"


def _notes(plan: Plan, lanes: list[Lane]) -> list[str]:
    if not lanes:
        return []
    idle = plan.n_programs - len(lanes)
    what = "run" if plan.merging is Merging.BY_CUT else "program"
    notes = [
        f"A lane is a {what}, from left to right. A unit: a tile of {count_of(plan.tile, 'token')}, in its row's "
        f"colour; hollow: the {RULES.START_UNITS} units that a row's start counts for."
    ]
    if plan.merging is Merging.BY_CUT:
        if lanes[-1].n_units < lanes[0].n_units:
            notes.append(f"The last run has the {count_of(lanes[-1].n_units, 'unit')} that are left.")
        n_states = sum((lane.began is not None) + (lane.ends_after is not None) for lane in lanes)
        if n_states:
            notes.append(
                f"A dot, with its number: a partial state, where a row is cut; {n_states:,} in all, at most two of a "
                f"program.{' Right: what the cut before a run merges.' * (pitch_of(lanes) >= LABELLED)}"
            )
        if idle:
            notes.append(f"{count_of(idle, 'program')} {verb(idle, 'find')} nothing left: no run is shorter than "
                         f"{RULES.LEAST_UNITS} units.")  # fmt: skip
    elif idle:
        notes.append(f"{count_of(idle, 'program')} without a token {verb(idle, 'are')} left out.")
    notes.append(
        f"Each lane is launched {count_of(plan.shape.grid_heads, 'time')}, for "
        f"{count_of(plan.shape.n_kv_heads, 'KV head')}."
    )
    if len(lanes) > MOST_LANES:
        notes.append(f"The first {MOST_LANES} of {len(lanes):,} lanes are drawn.")
    return [" ".join(notes)]


def pitch_of(lanes: list[Lane]) -> float:
    """Pixels from lane to lane."""
    return float(np.clip(MOST_HEIGHT / len(lanes), *PITCHES))


def _draw_lanes(sheet: Sheet, plan: Plan, lanes: list[Lane], keys: npt.NDArray[np.int64]) -> None:
    merges = merges_of(plan, lanes)
    has_states = any(lane.began is not None or lane.ends_after is not None for lane in lanes)
    pitch = pitch_of(lanes)
    is_labelled = pitch >= LABELLED
    left = LEFT + STATE_ROOM * has_states
    right = WIDTH - 12 - STATE_ROOM * has_states - MERGE_ROOM * bool(merges and is_labelled)
    scale = (right - left) / max(lane.n_units for lane in lanes)
    height = pitch - (5 if is_labelled else 1)
    sheet.y += 16
    if merges and is_labelled:
        sheet.text(right + STATE_ROOM, sheet.y - 6, "merge", size=SMALL, fill=GREY)
    wide, thin = Patches(), Patches()
    labels, dots = [], []
    for number, lane in enumerate(lanes):
        y, x = sheet.y + number * pitch, left
        if is_labelled or number % 10 == 0:
            name = f"{'run' if plan.merging is Merging.BY_CUT else 'prog.'} {lane.program}"
            name = name if text_width(name, SMALL) < LEFT - 8 else f"{lane.program}"
            sheet.text(LEFT - 8, y + height / 2 + 4, name, size=SMALL, fill=GREY, anchor="end")
        for piece in lane.pieces:
            width = piece.n_units * scale
            if piece.item < 0:
                _draw_start(sheet, x, y, width, height, piece.n_units)
            else:
                (wide if width > 2.5 and height > 5 else thin).add(int(keys[piece.row]), x, y, width, height)
                if is_labelled and text_width(f"{piece.row}", SMALL) < width - 3:
                    labels.append((x + width / 2, y + height / 2 + 4, f"{piece.row}"))
            x += width
        for has, place, slot, anchor in (
            (lane.began is not None, left - 6, 2 * lane.program, "end"),
            (lane.ends_after is not None, x + 6, 2 * lane.program + 1, "start"),
        ):
            if has:
                dots.append((place, y + height / 2))
                if is_labelled:
                    aside = -6 if anchor == "end" else 6
                    sheet.text(place + aside, y + height / 2 + 4, f"{slot}", size=SMALL, anchor=anchor)
        if lane.program in merges and is_labelled:
            sheet.text(right + STATE_ROOM, y + height / 2 + 4, merges[lane.program], size=SMALL)
    wide.draw(sheet)
    thin.draw(sheet, edges=False)
    if dots:
        path = "".join(f"M{x:.5g} {y:.5g}h.01" for x, y in dots)
        radius = min(3.4, height / 2.2)
        sheet.shapes.append(
            f'<path data-key="states" d="{path}" stroke="{INK}" stroke-width="{2 * radius:.3g}" stroke-linecap="round" '
            'fill="none"/>'
        )
    for x, y, text in labels:
        sheet.text(x, y, text, size=SMALL, anchor="middle", halo=True)
    sheet.y += len(lanes) * pitch + 4


def _draw_start(sheet: Sheet, x: float, y: float, width: float, height: float, n_units: int) -> None:
    """Start units: a hollow box each where there is room, else one for all."""
    n_boxes = n_units if width / n_units >= 4 and height > 5 else 1
    path = "".join(
        f"M{x + box * width / n_boxes + 0.5:.5g} {y + 0.5:.5g}h{width / n_boxes - 1:.4g}v{height - 1:.4g}"
        f"h-{width / n_boxes - 1:.4g}z"
        for box in range(n_boxes)
        if width / n_boxes > 1.2
    )
    if path:
        sheet.path(path, GREY if width / n_boxes >= 4 else FAINT, 0.8)

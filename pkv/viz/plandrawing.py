"""A plan drawn: one band per row along the token axis, one box per item, a dashed square per empty item.

Lengths [5, 40], tile 16, two splits: row 0 has the box 0:5 and one dashed square, row 1 the boxes 0:16 and 16:40.
"""

import itertools

import numpy as np

from pkv.plans.plan import Plan
from pkv.viz.svg import FAINT, GREY, PALETTE, SMALL, WIDTH, Picture, Sheet, text_width, token_ticks
from pkv.wording.counts import count_of, verb

LEFT, RIGHT = 112, 158  # margins for the row's name and for its count of items
MOST_DETAILED_ROWS = 16
MOST_BANDS = 256
EMPTY = 9  # side of the square that stands for an empty item


def plan_svg(plan: Plan) -> str:
    """The plan as SVG text."""
    return draw_plan(plan).svg


def draw_plan(plan: Plan) -> Picture:
    """Who reads which tokens. Up to 16 rows in detail, up to 256 as plain bars, more of them in groups."""
    sheet = Sheet()
    title = claim(plan)
    axis = Axis(plan)
    if plan.n_rows <= MOST_DETAILED_ROWS:
        draw, notes = _detailed_rows, _notes(plan) + _notes_on_boxes(plan, axis)
    elif plan.n_rows <= MOST_BANDS:
        draw, notes = (
            _plain_rows,
            [*_notes(plan), "One bar per row. White gaps: bounds between items, where they are wide enough."],
        )
    else:
        draw, notes = _grouped_rows, [*_notes(plan), f"Each bar stands for {-(-plan.n_rows // MOST_BANDS)} rows in order: dark as far as the shortest, light as far as the longest."]  # fmt: skip  # noqa: E501
    sheet.heading(title, notes)
    if plan.n_rows:
        top = sheet.y
        draw(sheet, plan, axis)
        axis.draw(sheet, top)
    return sheet.finish(f"{title}. {' '.join(notes)}")


class Axis:
    """Tokens to pixels, and the ticks below the bands."""

    def __init__(self, plan: Plan) -> None:
        self.longest = int(plan.lengths.max(initial=0))
        self.tile = plan.tile
        self.end = max(1, -(-self.longest // plan.tile) * plan.tile)
        self.scale = (WIDTH - LEFT - RIGHT) / self.end

    def x(self, token: float) -> float:
        return LEFT + token * self.scale

    def draw(self, sheet: Sheet, top: float) -> None:
        y = sheet.y + 2
        grid = [] if self.tile * self.scale < 12 else [self.x(token) for token in range(0, self.end + 1, self.tile)]
        # the grid lies under the boxes
        sheet.shapes[:0] = [f'<path d="M{x:.5g} {top:.5g}V{y:.5g}" stroke="{FAINT}"/>' for x in grid]
        sheet.line(LEFT, y, self.x(self.end), y, GREY)
        n_fitting = int((WIDTH - LEFT - RIGHT) / (text_width(f"{self.end:,}", 11) + 12))
        for token in token_ticks(self.end, min(8, n_fitting)):
            sheet.line(self.x(token), y, self.x(token), y + 5, GREY)
            sheet.text(self.x(token), y + 18, f"{token:,}", size=SMALL, fill=GREY, anchor="middle")
        sheet.text(LEFT - 14, y + 18, "tokens", size=SMALL, fill=GREY, anchor="end")
        sheet.y = y + 22


def claim(plan: Plan) -> str:
    """What the picture shows, in one sentence with the plan's own numbers."""
    if not plan.n_rows:
        return f"{plan.stage}: no rows, so nothing is launched"
    n_empty = plan.counters.empty_programs
    rows = f"{count_of(plan.n_rows, 'row')} {verb(plan.n_rows, 'become')}"
    head = f"{plan.stage}: {rows} {count_of(plan.n_items, 'item')}"
    programs = f"{count_of(plan.counters.programs, 'program')}, {launches_in_words(plan)}"
    if not plan.launches:
        return f"{head}, computed row by row without a launch"
    empty = f"{count_of(n_empty, 'program')} {verb(n_empty, 'are')} empty" if n_empty else "none is empty"
    return f"{head}, {programs}; {empty}"


def launches_in_words(plan: Plan) -> str:
    """How many kernels are launched, and of which kind, where there are two."""
    n_merges = sum(launch.kernel == "merge" for launch in plan.launches)
    kinds = f" ({len(plan.launches) - n_merges} decode, {n_merges} merge)" if n_merges else ""
    return count_of(len(plan.launches), "launch") + kinds


def _notes(plan: Plan) -> list[str]:
    resident, heads = plan.programs_per_sm * plan.gpu.n_sms, plan.shape.grid_heads
    notes = [
        f"{count_of(heads, 'program')} per item{', one for each KV head' if plan.shape.head_blocks == 1 else ''}. "
        f"Tiles of {count_of(plan.tile, 'token')}. "
        f"Planned for {plan.gpu.name}: {count_of(plan.gpu.n_sms, 'SM')} {verb(plan.gpu.n_sms, 'hold')} "
        f"{count_of(resident, 'program')} at once."
    ]
    if not plan.launches:
        notes = []
    if plan.shape.features.window is not None:
        window = count_of(plan.shape.features.window, "token")
        notes.append(f"Window: a query sees its row's last {window}. Nothing before them is read (grey line).")
    if plan.dynamic:
        notes.append("The lengths drawn are upper bounds: the kernels read the true lengths when they run.")
    return notes


def _colour_keys(plan: Plan) -> np.ndarray:
    """An item's colour: its place among its row's items with tokens, or its program where programs take several."""
    per_program = np.diff(plan.program_offsets)
    if (per_program > 1).any():
        keys = np.empty(plan.n_items, dtype=np.int64)
        order = np.arange(plan.n_items) if plan.item_order is None else plan.item_order
        keys[order] = np.repeat(np.arange(plan.n_programs), per_program)
        return keys
    filled_before = np.concatenate([[0], np.cumsum(plan.items[:, 1] < plan.items[:, 2])])
    return filled_before[:-1] - np.repeat(filled_before[plan.partial_offsets[:-1]], np.diff(plan.partial_offsets))


def _label_of(plan: Plan, axis: Axis) -> str:
    """What boxes are labelled with, where it fits: their token range if it fits most of them, else their number."""
    filled = [(b, e) for _, b, e in plan.items.tolist() if b < e]
    n_fitting = sum(text_width(f"{b:,}:{e:,}", 11) <= (e - b) * axis.scale for b, e in filled)
    return "range" if n_fitting > len(filled) // 2 else "number"


def _notes_on_boxes(plan: Plan, axis: Axis) -> list[str]:
    if not plan.n_items:
        return []
    label = {
        "range": "A box is an item, with its tokens begin:end if they fit.",
        "number": "A box is an item, with its number if it fits.",
    }
    key = "program" if (np.diff(plan.program_offsets) > 1).any() else "place in the row"
    notes = [label[_label_of(plan, axis)] + f" Colour: its {key}."]
    number, name = next(((n, name) for n, name in enumerate(_launch_names(plan)) if "+" in name), (0, ""))
    if name:
        first, second = name.removeprefix("launch ").split("+")
        notes[0] += f" L{name[1:]}: launch {first} of the plan decodes row {number}, launch {second} merges it."
    if (plan.items[:, 1] == plan.items[:, 2]).any():
        notes[0] += " Dashed square: an empty item, which starts, finds no token and leaves."
    return notes


def _launch_names(plan: Plan) -> list[str]:
    """For each row the launches that serve it, where there are several decode launches; else empty."""
    names: list[list[str]] = [[] for _ in range(plan.n_rows)]
    if sum(launch.kernel == "decode" for launch in plan.launches) < 2:
        return [""] * plan.n_rows
    for number, launch in enumerate(plan.launches, 1):
        for row in launch.rows:
            names[row].append(str(number))
    return [f"launch {'+'.join(numbers)}" for numbers in names]


def _detailed_rows(sheet: Sheet, plan: Plan, axis: Axis) -> None:
    height, gap = 26, 8
    label, keys, launches = _label_of(plan, axis), _colour_keys(plan), _launch_names(plan)
    for row, length in enumerate(plan.lengths.tolist()):
        y, middle = sheet.y, sheet.y + height / 2 + 4
        first, last = plan.partial_offsets[row : row + 2].tolist()
        sheet.row_name(LEFT - 8, middle, f"row {row}: {length:,}")
        seen_from = int(plan.spans[row, 0])
        if seen_from:
            sheet.line(axis.x(0), y + height / 2, axis.x(seen_from), y + height / 2, GREY)
        filled = [
            (i, max(b, seen_from), e) for i, (_, b, e) in enumerate(plan.items[first:last].tolist(), first) if b < e
        ]
        if len(filled) > 1 and (filled[-1][2] - filled[0][1]) * axis.scale < 4 * len(filled):
            x = axis.x(filled[0][1])
            width = axis.x(filled[-1][2]) - x
            sheet.box(x, y, width, height, 0)
            text = count_of(len(filled), "item")
            inside = text_width(text, 11) < width
            sheet.text(x + width / 2 if inside else x + width + 6, middle, text, size=SMALL,
                       anchor="middle" if inside else "start", halo=True)  # fmt: skip
        else:
            for index, begin, end in filled:
                x, width = axis.x(begin), (end - begin) * axis.scale
                sheet.box(x + 0.75, y, width - 1.5, height, int(keys[index]))
                text = f"{begin:,}:{end:,}" if label == "range" else f"{index}"
                if text_width(text, SMALL) <= width - 4:
                    sheet.text(x + width / 2, middle, text, size=SMALL, anchor="middle", halo=True)
        _empty_marks(
            sheet, axis, [b for _, b, e in plan.items[first:last].tolist() if b == e], y + (height - EMPTY) / 2, length
        )
        n_empty = last - first - len(filled)
        right = [launches[row] or count_of(last - first, "item"), f"{n_empty} empty" if n_empty else ""]
        sheet.text(WIDTH - RIGHT + 22, middle, ", ".join(filter(None, right)), size=SMALL, fill=GREY)
        sheet.y += height + gap


def _empty_marks(sheet: Sheet, axis: Axis, begins: list[int], y: float, length: int) -> None:
    """A dashed square where each empty item begins; those that would overlap share one, with their number."""
    free_from = axis.x(length) + 3
    positions = [max(axis.x(begin), free_from) for begin in begins]
    together = any(b - a < EMPTY + 3 for a, b in itertools.pairwise(positions))
    for x in positions[:1] if together else positions:
        x = min(x, axis.x(axis.end) + 3)
        sheet.hollow(x, y, EMPTY, EMPTY)
        if together:
            sheet.text(x + EMPTY + 4, y + EMPTY, f"×{len(begins)}", size=SMALL, halo=True)


def _plain_rows(sheet: Sheet, plan: Plan, axis: Axis) -> None:
    pitch = max(2.0, min(14.0, 480 / plan.n_rows))
    height = pitch - 0.6 if pitch < 5 else pitch - 2
    bounds = []
    step = next(s for s in (1, 2, 4, 8, 16, 32, 64) if s * pitch >= 14)
    for row, length in enumerate(plan.lengths.tolist()):
        y, x_begin, x_end = sheet.y, axis.x(int(plan.spans[row, 0])), axis.x(length)
        if x_begin > LEFT:
            sheet.line(LEFT, y + height / 2, x_begin, y + height / 2, GREY)
        if row % step == 0:
            sheet.text(LEFT - 8, y + min(height, 8) + 2, f"row {row}: {length:,}", size=SMALL, anchor="end")
        sheet.shapes.append(
            f'<path d="M{x_begin:.5g} {y:.5g}H{x_end:.5g}v{height:.3g}H{x_begin:.5g}z" '
            f'fill="{PALETTE[0]}" fill-opacity=".6"/>'
        )
        begins = plan.items[plan.partial_offsets[row] : plan.partial_offsets[row + 1]]
        begins = begins[begins[:, 1] < begins[:, 2], 1]
        if len(begins) > 1 and np.diff(begins).min() * axis.scale >= 3:
            bounds += [f"M{axis.x(begin):.4g} {y:.5g}v{height:.3g}" for begin in begins[1:].tolist()]
        if row % step == 0:
            n_items = int(plan.partial_offsets[row + 1] - plan.partial_offsets[row])
            sheet.text(WIDTH - RIGHT + 22, y + min(height, 8) + 2, count_of(n_items, "item"), size=SMALL, fill=GREY)
        sheet.y += pitch
    if bounds:
        sheet.path("".join(bounds), "#fff", 1.2)


def _grouped_rows(sheet: Sheet, plan: Plan, axis: Axis) -> None:
    size = -(-plan.n_rows // MOST_BANDS)
    groups = [plan.spans[first : first + size] for first in range(0, plan.n_rows, size)]
    pitch = max(2.0, 480 / len(groups))
    for number, group in enumerate(groups):
        for (begin, end), opacity in ((group[group[:, 1].argmax()], 0.3), (group[group[:, 1].argmin()], 0.5)):
            left, right = axis.x(int(begin)), axis.x(int(end))
            sheet.shapes.append(
                f'<path d="M{left:.5g} {sheet.y:.5g}H{right:.5g}v{pitch:.3g}H{left:.5g}z" '
                f'fill="{PALETTE[0]}" fill-opacity="{opacity}"/>'
            )
        if number % 8 == 0:
            sheet.text(LEFT - 8, sheet.y + 8, f"row {number * size}", size=SMALL, anchor="end")
        sheet.y += pitch

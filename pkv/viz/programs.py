"""A plan's programs dealt to SMs: which SM would take which program, if they were dealt round like cards.

This is a picture of assignment, not of time: a GPU gives the next program to whichever SM is free first. But it shows
what no schedule can repair: fewer programs than SMs leave SMs without work.

One row, 8 KV heads, one split: 8 programs, so 20 of 28 SMs get nothing.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from pkv.plans.fields import Launch
from pkv.plans.plan import Plan
from pkv.viz.plandrawing import launches_in_words
from pkv.viz.svg import GREY, SMALL, WIDTH, Picture, Sheet, text_width
from pkv.wording.counts import count_of, verb

LEFT = 84  # room for the words beside the line of those that reside at once
LEVEL = 17  # height of one program, so that its row can be read
MOST_LAUNCHES = 8
MOST_LEVELS = 16


@dataclass(frozen=True)
class Deal:
    """One decode launch, dealt: for each program its parts, whether it has tokens, its SM and its level in the stack.

    parts: (row, tokens) of each row that it reads, in order; of a program without a token, none.
    """

    parts: list[list[tuple[int, int]]]
    has_tokens: np.ndarray
    sms: np.ndarray
    levels: np.ndarray


def deal(plan: Plan, launch: Launch) -> Deal:
    """Deal the programs of a decode launch to the SMs in order. KV heads run fastest, as in the kernels."""
    heads = plan.shape.grid_heads
    order = np.arange(plan.n_items) if plan.item_order is None else plan.item_order
    offsets = plan.program_offsets[launch.begin : launch.end + 1]
    parts: list[list[tuple[int, int]]] = []
    for first, last in itertools.pairwise(offsets.tolist()):
        tokens: dict[int, int] = {}
        for row, begin, end in plan.items[order[first:last]].tolist():
            if begin < end:
                tokens[row] = tokens.get(row, 0) + end - begin
        parts += [list(tokens.items())] * heads
    index = np.arange(len(parts))
    has_tokens = np.array([bool(mine) for mine in parts], dtype=bool)
    return Deal(parts, has_tokens, index % plan.gpu.n_sms, index // plan.gpu.n_sms)


def draw_programs(plan: Plan) -> Picture:
    """Every decode launch of the plan over the SMs of the card that it was made for."""
    n_sms = plan.gpu.n_sms
    launches = [(number, launch) for number, launch in enumerate(plan.launches, 1) if launch.kernel == "decode"]
    deals = [deal(plan, launch) for _, launch in launches]
    busy = [len(np.unique(dealt.sms[dealt.has_tokens])) for dealt in deals]
    title = _claim(plan, busy, sum(int(dealt.has_tokens.sum()) for dealt in deals))
    at_once = f"{count_of(plan.programs_per_sm, 'program')} {verb(plan.programs_per_sm, 'reside')}"
    notes = [
        f"Assignment, not time: programs dealt to the SMs of {plan.gpu.name} in turn. A box is a program, its number "
        f"its row. Up to {at_once} on an SM at once; those above wait."
    ]
    if any(len(mine) > 1 for dealt in deals for mine in dealt.parts):
        notes.append("Several boxes on one place: a program that reads several rows, each as wide as its tokens.")
    if any(not dealt.has_tokens.all() for dealt in deals):
        notes.append("Dashed box: a program without a token.")
    if len(plan.launches) > len(launches):
        notes.append("Programs of merge launches are not drawn.")
    if len(launches) > MOST_LAUNCHES:
        notes.append(f"The first {MOST_LAUNCHES} of {len(launches)} decode launches are drawn.")
    highest = max((int(dealt.levels.max(initial=0)) + 1 for dealt in deals), default=0)
    if highest > MOST_LEVELS:
        notes.append(f"An SM gets up to {highest} programs; the first {MOST_LEVELS} are drawn.")
    sheet = Sheet()
    sheet.heading(title, [" ".join(notes)])
    for (number, launch), dealt in zip(launches[:MOST_LAUNCHES], deals):
        rows = count_of(len(launch.rows), "row") if len(launch.rows) > 8 else f"row {', '.join(map(str, launch.rows))}"
        _draw_deal(sheet, dealt, n_sms, plan.programs_per_sm, f"launch {number}, {rows}" if len(deals) > 1 else "")
    if deals:
        width = (WIDTH - LEFT - 8) / n_sms
        step = 1 if width > 20 else 4 if width > 8 else 16
        for sm in range(0, n_sms, step):
            sheet.text(LEFT + (sm + 0.5) * width, sheet.y + 12, f"{sm}", size=SMALL, fill=GREY, anchor="middle")
        sheet.text(LEFT - 8, sheet.y + 12, "SM", size=SMALL, fill=GREY, anchor="end")
        sheet.y += 16
    return sheet.finish(f"{title}. {' '.join(notes)}")


def _claim(plan: Plan, busy: list[int], n_with_tokens: int) -> str:
    n_sms = plan.gpu.n_sms
    if not busy:
        return f"{plan.stage}: no launch, so no SM gets a program"
    n_programs = plan.n_programs * plan.shape.grid_heads
    n_empty = n_programs - n_with_tokens
    head = f"{plan.stage}: {count_of(n_programs, 'program')}"
    head += f", {n_empty:,} of them without a token" if n_empty else ""
    idle = n_sms - min(busy)
    all_busy = f"each of the {count_of(n_sms, 'SM')} gets work" if n_sms > 1 else "the one SM gets work"
    found = f"{idle} of {count_of(n_sms, 'SM')} {verb(idle, 'get')} no token to read" if idle else all_busy
    if len(busy) == 1:
        return f"{head}: {found}"
    return f"{head}, {launches_in_words(plan)}; in the smallest decode launch, {found}"


def _draw_deal(sheet: Sheet, dealt: Deal, n_sms: int, resident: int, name: str) -> None:
    n_levels = min(MOST_LEVELS, int(dealt.levels.max(initial=0)) + 1)
    width = (WIDTH - LEFT - 8) / n_sms
    gap = 2.0 if width > 10 else 0.8
    n_drawn = n_levels if name else max(n_levels, min(resident, 10))  # room for the line of those that reside at once
    if name:
        sheet.text(LEFT, sheet.y + 9, name, size=SMALL, fill=GREY)
        sheet.y += 13
    base = sheet.y + n_drawn * LEVEL + 4
    for parts, sm, level in zip(dealt.parts, dealt.sms.tolist(), dealt.levels.tolist()):
        if level >= n_levels:
            continue
        x, y = LEFT + sm * width + gap / 2, base - (level + 1) * LEVEL
        if not parts:
            sheet.hollow(x, y + 2, width - gap, LEVEL - 4)
        scale = (width - gap) / max(1, sum(tokens for _, tokens in parts))
        for row, tokens in parts:
            part = tokens * scale
            sheet.box(x, y + 1, part, LEVEL - 2, row)
            if text_width(f"{row}", SMALL) < part + gap:
                sheet.text(x + part / 2, y + LEVEL - 4, f"{row}", size=SMALL, anchor="middle", halo=True)
            x += part
    if resident <= n_drawn:
        line = base - resident * LEVEL
        sheet.halo_line(LEFT - 4, WIDTH - 8, line)
        sheet.text(LEFT - 8, line + 4, f"{resident} at once", size=SMALL, anchor="end")
    sheet.line(LEFT, base + 1, WIDTH - 8, base + 1, GREY)
    for sm in range(n_sms + 1):
        sheet.line(LEFT + sm * width, base - 3, LEFT + sm * width, base + 1, GREY)
    sheet.y = base + 10

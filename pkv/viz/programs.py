"""A plan's programs dealt to SMs: which SM would take which program, if they were dealt round like cards.

This is a picture of assignment, not of time: a GPU gives the next program to whichever SM is free first. But it shows
what no schedule can repair: fewer programs than SMs leave SMs without work.

One row, 8 KV heads, one split: 8 programs, so 20 of 28 SMs get nothing.
"""

from dataclasses import dataclass

import numpy as np

from pkv.plans import Launch, Plan
from pkv.viz.svg import GREY, INK, WIDTH, Picture, Sheet, count_of

LEFT = 40
MOST_LAUNCHES = 8
MOST_LEVELS = 24


@dataclass(frozen=True)
class Deal:
    """One decode launch, dealt: for each program its row, whether it has tokens, its SM and its level in the stack."""

    rows: np.ndarray
    has_tokens: np.ndarray
    sms: np.ndarray
    levels: np.ndarray


def deal(plan: Plan, launch: Launch) -> Deal:
    """Deal the programs of a decode launch to the SMs in order. KV heads run fastest, as in the kernels."""
    heads = plan.shape.grid_heads
    order = np.arange(plan.n_items) if plan.item_order is None else plan.item_order
    sizes = plan.items[:, 2] - plan.items[:, 1]
    begins = plan.program_offsets[launch.begin : launch.end]
    ends = plan.program_offsets[launch.begin + 1 : launch.end + 1]
    rows = np.array([plan.items[order[b], 0] if b < e else -1 for b, e in zip(begins, ends)], dtype=np.int64)
    tokens = np.array([sizes[order[b:e]].sum() for b, e in zip(begins, ends)], dtype=np.int64)
    index = np.arange(len(rows) * heads)
    return Deal(np.repeat(rows, heads), np.repeat(tokens > 0, heads), index % plan.gpu.n_sms, index // plan.gpu.n_sms)


def draw_programs(plan: Plan) -> Picture:
    """Every decode launch of the plan over the SMs of the card that it was made for."""
    n_sms = plan.gpu.n_sms
    launches = [launch for launch in plan.launches if launch.kernel == "decode"]
    deals = [deal(plan, launch) for launch in launches]
    busy = [len(np.unique(dealt.sms[dealt.has_tokens])) for dealt in deals]
    title = _claim(plan, busy, sum(int(dealt.has_tokens.sum()) for dealt in deals))
    notes = [
        f"Assignment, not time: programs dealt to the SMs of {plan.gpu.name} in turn. A box is a program with its row. "
        f"Up to {plan.programs_per_sm} reside on an SM at once (dashed line); those above it wait."
    ]
    if any(not dealt.has_tokens.all() for dealt in deals):
        notes.append("Dashed box: a program without a token.")
    if len(launches) > MOST_LAUNCHES:
        notes.append(f"The first {MOST_LAUNCHES} of {len(launches)} launches are drawn.")
    highest = max((int(dealt.levels.max(initial=0)) + 1 for dealt in deals), default=0)
    if highest > MOST_LEVELS:
        notes.append(f"An SM gets up to {highest} programs; the first {MOST_LEVELS} are drawn.")
    sheet = Sheet()
    sheet.heading(title, notes)
    for number, dealt in enumerate(deals[:MOST_LAUNCHES], 1):
        name = f"decode launch {number}: row {', '.join(str(row) for row in launches[number - 1].rows)}"
        _draw_deal(sheet, dealt, n_sms, plan.programs_per_sm, name if len(deals) > 1 else "")
    if deals:
        width = (WIDTH - LEFT - 8) / n_sms
        step = 1 if width > 20 else 4 if width > 8 else 16
        for sm in range(0, n_sms, step):
            sheet.text(LEFT + (sm + 0.5) * width, sheet.y + 12, f"{sm}", size=11, fill=GREY, anchor="middle")
        sheet.text(LEFT - 8, sheet.y + 12, "SM", size=11, fill=GREY, anchor="end")
        sheet.y += 16
    return sheet.finish(f"{title}. {' '.join(notes)}")


def _claim(plan: Plan, busy: list[int], n_with_tokens: int) -> str:
    n_sms = plan.gpu.n_sms
    if not busy:
        return f"{plan.stage}: no launch, so no SM gets a program"
    n_programs = plan.n_programs * plan.shape.grid_heads
    head = f"{plan.stage}: {count_of(n_programs, 'program')}"
    if len(busy) > 1:
        idle = n_sms - min(busy)
        smallest = f"{idle} of {n_sms} SMs get no token to read" if idle else f"each of the {n_sms} SMs gets work"
        return f"{head} in {len(busy)} launches; in the smallest, {smallest}"
    idle, n_empty = n_sms - busy[0], n_programs - n_with_tokens
    head += f", {n_empty:,} of them without a token" if n_empty else ""
    return f"{head}: " + (
        f"{idle} of {n_sms} SMs get no token to read" if idle else f"each of the {n_sms} SMs gets work"
    )


def _draw_deal(sheet: Sheet, dealt: Deal, n_sms: int, resident: int, name: str) -> None:
    n_levels = min(MOST_LEVELS, int(dealt.levels.max(initial=0)) + 1)
    width = (WIDTH - LEFT - 8) / n_sms
    height = 18 if n_levels <= 12 else 12
    n_drawn = n_levels if name else max(n_levels, min(resident, 4))  # room for the line of those that reside at once
    base = sheet.y + n_drawn * height + 6 + (10 if name else 0)
    for row, has_tokens, sm, level in zip(
        dealt.rows.tolist(), dealt.has_tokens.tolist(), dealt.sms.tolist(), dealt.levels.tolist()
    ):
        if level >= n_levels:
            continue
        x, y = LEFT + sm * width + 1, base - (level + 1) * height
        if has_tokens:
            sheet.box(x, y + 1, width - 2, height - 2, row)
            if width > 18:
                sheet.text(
                    x + width / 2 - 1,
                    y + height - 5,
                    f"{row}",
                    size=10 if height > 12 else 8.5,
                    anchor="middle",
                    halo=True,
                )
        else:
            sheet.hollow(x + 1, y + 2, width - 4, height - 4)
    if resident <= n_drawn:
        line = base - resident * height
        sheet.line(LEFT, line, WIDTH - 8, line, INK, "6 4")
    sheet.line(LEFT, base + 1, WIDTH - 8, base + 1, GREY)
    for sm in range(n_sms + 1):
        sheet.line(LEFT + sm * width, base - 3, LEFT + sm * width, base + 1, GREY)
    if name:
        sheet.text(LEFT, sheet.y + 4, name, size=11, fill=GREY)
    sheet.y = base + 10

"""Timelines drawn: a lane per SM, time from left to right, work in the colour of its row, and idle time left white.

Two rows of one item each on 2 SMs: the long row's piece fills its SM's lane to the end, the short row's ends early, and
the white beside it is what the schedule wastes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pkv.cards.simulation import Timeline
from pkv.viz.lanes import MOST_PIECES, Piece, pieces_of, running, shown_sms, slots_in_use
from pkv.viz.rowstyles import EMPTY, MERGE, OPACITY, STYLES, Patches, draw_legend, keys_of
from pkv.viz.svg import FAINT, GREY, INK, PALETTE, SMALL, WIDTH, Picture, Sheet, text_width
from pkv.viz.timeclaims import checked_names, checked_timelines, claim, comparison

LEFT, RIGHT = 58, 62  # margins for an SM's number and for its idle share
LABEL_HEIGHT = 10  # of a slot that has room for its row's number
MOST_LABELS = 400


class Chart(NamedTuple):
    """One timeline in a picture: which SMs, what they do piece by piece, how high a lane is, and pixels per us."""

    timeline: Timeline
    sms: list[int]
    pieces: list[Piece] | None
    pitch: float
    scale: float

    def x(self, us: float) -> float:
        """Where a time of the timeline lies; the fixed cost comes before its time 0."""
        return LEFT + (self.timeline.fixed_us + us) * self.scale


def draw_timeline(timeline: Timeline) -> Picture:
    """Which SM reads which row when. Up to 28 SMs, of more a sample; times in us, from when the step begins."""
    return draw_timelines([timeline])


def draw_timelines(timelines: Sequence[Timeline], names: Sequence[str] | None = None) -> Picture:
    """Several timelines below one another on one time axis, so that lengths compare. names: by default the stages'."""
    timelines = checked_timelines(timelines)
    names = checked_names(names, timelines)
    alone, step_us = len(timelines) == 1, max(timeline.gpu_ms * 1000 for timeline in timelines)
    scale = (WIDTH - LEFT - RIGHT) / max(step_us, 1e-9)
    charts = [_chart(timeline, scale, len(timelines)) for timeline in timelines]
    title, notes = claim(timelines[0], names[0]) if alone else comparison(timelines, names), _notes(charts)
    sheet = Sheet()
    sheet.heading(title, notes)
    same_rows = len({chart.timeline.plan.lengths.tobytes() for chart in charts}) == 1
    if same_rows:
        draw_legend(sheet, _legend(charts), WIDTH - 8)
    top = sheet.y + 8
    for chart, name in zip(charts, names, strict=True):
        _draw_chart(sheet, chart, None if alone else name, not same_rows)
    if step_us:
        _draw_axis(sheet, top, step_us, scale)
    words = [] if alone else [f"{claim(*pair)}." for pair in zip(timelines, names, strict=True)]
    return sheet.finish(" ".join([f"{title}.", *words, *notes]))


def _notes(charts: Sequence[Chart]) -> list[str]:
    timelines = [chart.timeline for chart in charts]
    if not any(len(timeline.spans) for timeline in timelines):
        return []
    names = list(dict.fromkeys(timeline.gpu.name for timeline in timelines))
    notes = [
        f"Simulated on {' and '.join(names)}, not measured. A lane is an SM, divided among the programs that run on it "
        "at once. White, up to the last line: idle. At the right: the share of the time from the first launch on in "
        "which the SM reads nothing; a start-up is not reading."
    ]
    if any(timeline.fixed_us for timeline in timelines):
        notes.append("Hatched: what the step costs before its first launch.")
    sampled = next((chart for chart in charts if len(chart.sms) < chart.timeline.gpu.n_sms), None)
    if sampled is not None:
        every = f"{len(sampled.sms)} of {sampled.timeline.gpu.n_sms} SMs, evenly spaced, with the one that reads last"
        notes.append(f"Drawn: {every}; the claim is about all.")
    if any(chart.pieces is None for chart in charts):
        notes.append("Too many pieces to draw: a lane is filled as high as the number of programs that run.")
    return [" ".join(notes)]


def _legend(charts: Sequence[Chart]) -> list[tuple[int, str]]:
    """What the styles of these charts mean; all charts have the same rows."""
    drawn = {piece.key for chart in charts for piece in chart.pieces or []}
    rows = keys_of(charts[0].timeline.plan.lengths)[1]
    beside = [(EMPTY, "an item without a token"), (MERGE, "merge")]
    return [entry for entry in rows + beside if entry[0] in drawn]


def _chart(timeline: Timeline, scale: float, n_charts: int) -> Chart:
    sms = shown_sms(timeline)
    used = max(slots_in_use(timeline), default=1)
    most, pitch = (560, min(22, max(14, LABEL_HEIGHT * used + 3))) if n_charts == 1 else (230, 16)
    pieces = pieces_of(timeline, sms, 0.3 / scale, MOST_PIECES // n_charts)
    return Chart(timeline, sms, pieces, max(5.0, min(pitch, most / len(sms))), scale)


def _draw_chart(sheet: Sheet, chart: Chart, name: str | None, has_legend: bool) -> None:
    timeline, pitch = chart.timeline, chart.pitch
    sheet.y += 8
    if name is not None:
        sheet.y += 12
        sheet.text(8, sheet.y, claim(timeline, name), size=SMALL, weight="bold")
        sheet.y += 6
    if not len(timeline.spans):
        return
    if has_legend:
        draw_legend(sheet, _legend([chart]), WIDTH - 8)
    _name_launches(sheet, chart)
    top, right = sheet.y, chart.x(timeline.makespan_us)
    for lane in range(len(chart.sms) + 1):
        sheet.line(LEFT, top + lane * pitch, right, top + lane * pitch)
    if timeline.fixed_us:
        sheet.unused(LEFT, top, timeline.fixed_us * chart.scale, pitch * len(chart.sms))
    if chart.pieces is None:
        _draw_counts(sheet, chart, top)
    else:
        _draw_pieces(sheet, chart, chart.pieces, top)
    bottom = top + pitch * len(chart.sms)
    for us in [*timeline.launch_us[:, 0].tolist(), timeline.makespan_us]:
        sheet.line(chart.x(us), top - 3, chart.x(us), bottom + 3, INK)
    _name_lanes(sheet, chart, top)
    sheet.y = bottom + 4


def _draw_pieces(sheet: Sheet, chart: Chart, pieces: Sequence[Piece], top: float) -> None:
    patches, labels, lowest = Patches(), [], chart.pitch
    named = len(chart.timeline.plan.lengths) <= len(STYLES)
    for lane, slot, n_slots, key, begin, end, _ in pieces:
        x, width, height = chart.x(begin), (end - begin) * chart.scale, (chart.pitch - 1) / n_slots
        y, lowest = top + lane * chart.pitch + 0.5 + slot * height, min(lowest, height)
        patches.add(key, x, y, width, height)
        if named and key >= 0 and height >= LABEL_HEIGHT and text_width(f"{key}", SMALL) < width - 2:
            labels.append((x + width / 2, y + height / 2 + 4, f"{key}"))
    patches.draw(sheet, edges=lowest > 3)
    for x, y, text in labels[:MOST_LABELS]:
        sheet.text(x, y, text, size=SMALL, anchor="middle", halo=True)


def _draw_counts(sheet: Sheet, chart: Chart, top: float) -> None:
    """How many programs decode on each SM, as an outline; a merge launch fills its lane while it lasts."""
    timeline, end_us = chart.timeline, chart.timeline.makespan_us
    counts = [running(timeline, sm, end_us) for sm in chart.sms]
    most, patches = max(float(numbers.max()) for numbers in counts) or 1.0, Patches()
    outline = ""
    for lane, (sm, numbers) in enumerate(zip(chart.sms, counts, strict=True)):
        base, unit = top + (lane + 1) * chart.pitch - 0.5, (chart.pitch - 1) / most
        width = end_us / len(numbers) * chart.scale
        steps = "".join(f"V{base - number * unit:.5g}h{width:.4g}" for number in numbers.tolist())
        outline += f"M{chart.x(0):.5g} {base:.5g}{steps}V{base:.5g}z"
        merges = timeline.spans[(timeline.spans["sm"] == sm) & (timeline.spans["item"] < 0)]
        for launch in np.unique(merges["launch"]).tolist():
            mine = merges[merges["launch"] == launch]
            begin, end = mine["begin_us"].min(), mine["end_us"].max()
            patches.add(MERGE, chart.x(begin), base - chart.pitch + 1, (end - begin) * chart.scale, chart.pitch - 1)
    sheet.shapes.append(f'<path d="{outline}" fill="{PALETTE[0]}" fill-opacity="{OPACITY:g}"/>')
    patches.draw(sheet)


def _name_launches(sheet: Sheet, chart: Chart) -> None:
    """Above each launch's line its number and kind, or its number, or nothing, as there is room."""
    launches, begins = chart.timeline.plan.launches, [*chart.timeline.launch_us[:, 0].tolist()]
    sheet.y += 12
    ends = [*begins[1:], chart.timeline.makespan_us]
    free_from = 0.0
    for number, (launch, begin, end) in enumerate(zip(launches, begins, ends, strict=True), 1):
        room = (end - begin) * chart.scale if number < len(launches) else WIDTH - chart.x(begin)
        long = f"{number} {launch.kernel}"
        name = long if text_width(long, SMALL) < room else f"{number}"
        if chart.x(begin) >= free_from:
            sheet.text(chart.x(begin), sheet.y, name, size=SMALL, fill=GREY)
            free_from = chart.x(begin) + text_width(name, SMALL) + 4
    if launches:
        sheet.text(LEFT - 8, sheet.y, "launch", size=SMALL, fill=GREY, anchor="end")
    sheet.y += 5


def _name_lanes(sheet: Sheet, chart: Chart, top: float) -> None:
    """Each SM's number, and its idle share; every second, fourth, ... where lanes are low."""
    timeline, step = chart.timeline, next(step for step in (1, 2, 4, 8) if step * chart.pitch >= 12)
    for lane, sm in enumerate(chart.sms):
        y = top + (lane + 0.5) * chart.pitch + 4
        if lane % step == 0:
            idle = 1 - timeline.busy_us[sm] / max(timeline.makespan_us, 1e-9)
            sheet.text(LEFT - 8, y, f"SM {sm}", size=SMALL, fill=GREY, anchor="end")
            sheet.text(WIDTH - 8, y, f"{idle:.0%}", size=SMALL, fill=GREY, anchor="end")


def _draw_axis(sheet: Sheet, top: float, step_us: float, scale: float) -> None:
    y, grid = sheet.y + 2, []
    sheet.line(LEFT, y, LEFT + step_us * scale, y, GREY)
    for tick in time_ticks(step_us):
        x = LEFT + tick * scale
        grid.append(f'<path d="M{x:.5g} {top:.5g}V{y:.5g}" stroke="{FAINT}" stroke-dasharray="2 3"/>')
        sheet.line(x, y, x, y + 5, GREY)
        sheet.text(x, y + 18, f"{tick:,.6g}", size=SMALL, fill=GREY, anchor="middle")
    sheet.shapes[:0] = grid  # under the pieces
    sheet.text(LEFT - 14, y + 18, "us", size=SMALL, fill=GREY, anchor="end")
    sheet.text(WIDTH - 8, y + 18, "idle", size=SMALL, fill=GREY, anchor="end")
    sheet.y = y + 22


def time_ticks(end: float, n_most: int = 8) -> list[float]:
    """Round times from 0 to `end`, at most n_most steps apart.

    >>> time_ticks(512.0)
    [0.0, 100.0, 200.0, 300.0, 400.0, 500.0]
    """
    power = 10.0 ** np.floor(np.log10(end / n_most))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * n_most >= end)
    return [float(tick) for tick in np.arange(0, end * (1 + 1e-9), step)]

"""Engines against a rival, and against a streaming read of the same bytes: a dot for every load.

Ratios are the rival's time over the engine's, so 1.25 says that the engine takes 20% less. An engine with 2.0 on a load
and 0.5 on another has a geometric mean of 1.
"""

import statistics
from collections.abc import Mapping, Sequence

from pkv.viz.resultscales import draw_level, draw_ratio_axis, points_of, positive, scale_of, some, times_in_words
from pkv.viz.svg import FAINT, GREY, INK, PALETTE, SMALL, WIDTH, Picture, Sheet, text_width
from pkv.wording.counts import count_of

PITCH = 24  # pixels from engine to engine
NUMBERS = 192.0  # room for values behind the dots
COLUMNS, PANEL = 3, 96
LARGE = 256e6  # bytes: from here on start-up hardly counts


def draw_ratios(ratios: Mapping[str, Mapping[str, float]], rival: str, note: str = "") -> Picture:
    """How much faster than `rival` each engine is: {engine: {load: rival's time / engine's}}, a dot for every load.

    Engines come in the order of their geometric means; note: what else to say below the claim.
    """
    checked = {
        engine: {load: positive(f"ratios[{engine!r}][{load!r}]", ratio) for load, ratio in some(engine, of).items()}
        for engine, of in some("ratios", ratios).items()
    }
    means = {engine: statistics.geometric_mean(of.values()) for engine, of in checked.items()}
    ordered = sorted(means, key=lambda engine: -means[engine])
    title = ratio_claim(checked, rival)
    notes = [
        f"A dot is a load: the time of {rival} over the engine's, to the right of the line where the engine is faster. "
        "Bar: the geometric mean."
    ]
    notes += [note] if note else []
    sheet = Sheet()
    sheet.heading(title, [" ".join(notes)])
    left = min(220.0, max(text_width(engine, 12) for engine in ordered) + 20)
    values = [ratio for of in checked.values() for ratio in of.values()]
    scale = scale_of([*values, 1.0], left + 8, WIDTH - NUMBERS, room=1.05)
    top = sheet.y + 14
    bottom = top + PITCH * len(ordered)
    draw_ratio_axis(sheet, scale, top, bottom)
    draw_level(sheet, scale.at(1.0), top, bottom, "as fast")
    for line, engine in enumerate(ordered):
        y = top + PITCH * (line + 0.5)
        sheet.text(left - 8, y + 4, engine, anchor="end")
        sheet.shapes.append(_dots([(scale.at(r), y + _aside(n)) for n, r in enumerate(checked[engine].values())]))
        for colour, width in (("#fff", 5.5), (INK, 2.6)):
            sheet.path(f"M{scale.at(means[engine]):.5g} {y - 9:.5g}v18", colour, width)
        sheet.text(WIDTH - NUMBERS + 12, y + 4, ratio_in_words(checked[engine], means[engine]), size=SMALL)
    sheet.y = bottom + 20
    words = "; ".join(f"{engine}: {ratio_in_words(checked[engine], means[engine])}" for engine in ordered)
    return sheet.finish(f"{title}. {' '.join(notes)} {words}.")


def ratio_claim(ratios: Mapping[str, Mapping[str, float]], rival: str) -> str:
    """Which engine is the fastest over all loads, and on how many of them it is not."""
    means = {engine: statistics.geometric_mean(of.values()) for engine, of in ratios.items()}
    most = max(len(of) for of in ratios.values())
    whole = [engine for engine, of in ratios.items() if len(of) == most]  # who refuses loads is not the fastest there
    best = max(whole, key=lambda engine: means[engine])
    behind = sum(ratio < 1 for ratio in ratios[best].values())
    where = "on none slower" if not behind else f"on {behind:,} slower"
    return f"{best} is {times_in_words(means[best])} as fast as {rival} over {count_of(most, 'load')}, {where}"


def ratio_in_words(of: Mapping[str, float], mean: float) -> str:
    """Mean, worst, and how many loads those are."""
    return f"{times_in_words(mean)}, least {times_in_words(min(of.values()))} ({len(of):,})"


def _aside(number: int) -> float:
    return (number * 7 % 5 - 2) * 2.2  # dots of like value lie beside one another


def _dots(places: Sequence[tuple[float, float]], radius: float = 2.4) -> str:
    path = "".join(f"M{x:.5g} {y:.4g}h.01" for x, y in places)  # a line of no length, with round ends: few bytes a dot
    return (
        f'<path d="{path}" stroke="{PALETTE[0]}" stroke-width="{2 * radius}" stroke-linecap="round" '
        'stroke-opacity=".55" fill="none"/>'
    )


def draw_stream(points: Mapping[str, Sequence[tuple[float, float]]], note: str = "") -> Picture:
    """How near each engine comes to a streaming read: {engine: [(bytes of K and V, part of the stream's rate)]}.

    One plane for each engine, a dot for each load: to the right more bytes, upwards a larger part.
    """
    checked = {engine: points_of(f"points[{engine!r}]", of) for engine, of in some("points", points).items()}
    means = {engine: statistics.fmean(part for _, part in _large(of)) for engine, of in checked.items()}
    ordered = sorted(means, key=lambda engine: -means[engine])
    title = stream_claim(checked)
    notes = ["A dot is a load. Upwards: part of the rate of a kernel that only reads as many bytes; dashes: 90%."]
    notes += [note] if note else []
    sheet = Sheet()
    sheet.heading(title, [" ".join(notes)])
    megabytes = [x / 1e6 for of in checked.values() for x, _ in of]
    most = max(1.0, *(part for of in checked.values() for _, part in of))
    width = (WIDTH - 16) / COLUMNS
    top = sheet.y
    for number, engine in enumerate(ordered):
        x, y = 8 + number % COLUMNS * width, top + number // COLUMNS * (PANEL + 62)
        scale = scale_of(megabytes, x + 40, x + width - 22, room=1.1)
        sheet.text(x + 36, y + 8, engine, weight="bold")
        floor, height = y + 20 + PANEL, PANEL / most
        for part in (0.0, 0.5, 1.0):
            sheet.line(
                x + 36, floor - part * height, x + width - 16, floor - part * height, GREY if not part else FAINT
            )
            sheet.text(x + 32, floor - part * height + 4, f"{part:.0%}", size=SMALL, fill=GREY, anchor="end")
        sheet.line(x + 36, floor - 0.9 * height, x + width - 16, floor - 0.9 * height, INK, "4 3")
        for tick in scale.ticks(4):
            sheet.text(scale.at(tick), floor + 15, f"{tick:,g}", size=SMALL, fill=GREY, anchor="middle")
        sheet.shapes.append(_dots([(scale.at(n / 1e6), floor - part * height) for n, part in checked[engine]]))
        if number + COLUMNS >= len(ordered):
            sheet.text(x + width - 16, floor + 30, "MB of K and V", size=SMALL, fill=GREY, anchor="end")
    sheet.y = top + -(-len(ordered) // COLUMNS) * (PANEL + 62) - 16
    words = "; ".join(
        f"{engine}: {means[engine]:.0%} on {count_of(len(_large(checked[engine])), 'load')}" for engine in ordered
    )
    return sheet.finish(f"{title}. {' '.join(notes)} Means of the large loads: {words}.")


def stream_claim(points: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Which engine comes nearest on large loads, and how near."""
    most = max(len(of) for of in points.values())
    whole = {engine: _large(of) for engine, of in points.items() if len(of) == most}
    means = {engine: statistics.fmean(part for _, part in of) for engine, of in whole.items()}
    best = max(means, key=lambda engine: means[engine])
    parts, bytes_ = [part for _, part in whole[best]], min(x for x, _ in whole[best])
    where = f"from {LARGE / 1e6:.0f} MB on" if bytes_ >= LARGE else "on all loads"
    return f"{best} comes nearest to the stream: {means[best]:.0%} of its rate {where}, at least {min(parts):.0%}"


def _large(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Those of LARGE bytes or more; all, where none is."""
    return [point for point in points if point[0] >= LARGE] or points

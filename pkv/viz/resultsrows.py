"""One row alone against a plain read of it, and ragged rows cut by two rules.

A row of 8,192 tokens that takes 20 us, and 12 us to read once: 60% of a plain read. A batch that takes 100 us cut like
its longest row and 50 us with row-local bounds: 2.00×, to the right of the line.
"""

from collections.abc import Mapping, Sequence

from pkv.viz.resultscales import (
    RADIUS,
    draw_curve,
    draw_level,
    mark,
    name_ends,
    points_of,
    positive,
    room_for,
    scale_of,
    some,
    times_in_words,
    us_in_words,
)
from pkv.viz.svg import FAINT, GREY, INK, PALETTE, SMALL, WIDTH, Picture, Sheet, text_width
from pkv.wording.counts import count_of

LEFT, HEIGHT, MOST_TICKS = 50, 300, 6
APART = 26.0  # pixels from mark to mark of a line
TIE = 0.01  # two times closer than that are as good as equal
PITCH, COLUMN = 22, 70
MOST_LOADS = 24  # in one picture; of more, those at both ends


def draw_one_row(parts: Mapping[str, Sequence[tuple[float, float]]], note: str = "") -> Picture:
    """How near to a plain read each engine comes with one row: {engine: [(tokens, part of the plain read's rate)]}.

    To the right longer rows, upwards a larger part. The claim is about the first engine. note: what else to say below.
    """
    checked = {engine: points_of(f"parts[{engine!r}]", of) for engine, of in some("parts", parts).items()}
    title = one_row_claim(checked)
    notes = ["One row is live. Upwards: part of the rate of a kernel that only reads as many bytes, once."]
    notes += [note] if note else []
    sheet = Sheet()
    sheet.heading(title, [" ".join(notes)])
    right, top = WIDTH - room_for(list(checked)), sheet.y + 8
    bottom = top + HEIGHT
    across = scale_of([x for of in checked.values() for x, _ in of], LEFT + 8, right - 8, room=1.0001)
    most = max(1.0, *(part for of in checked.values() for _, part in of))

    def height(part: float) -> float:
        return bottom - HEIGHT * part / most

    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        sheet.line(LEFT, height(part), right, height(part), FAINT if part else GREY)
        sheet.text(LEFT - 6, height(part) + 4, f"{part:.0%}", size=SMALL, fill=GREY, anchor="end")
    ticks = [2.0**power for power in range(21) if across.least <= 2.0**power <= across.most]
    for tick in ticks[:: -(-len(ticks) // MOST_TICKS) or 1]:
        sheet.line(across.at(tick), bottom, across.at(tick), bottom + 4, GREY)
        sheet.text(across.at(tick), bottom + 17, f"{tick:,.0f}", size=SMALL, fill=GREY, anchor="middle")
    sheet.text(right, bottom + 33, "tokens", size=SMALL, fill=GREY, anchor="end")
    ends = []
    for number, (engine, of) in enumerate(checked.items()):
        drawn = [(across.at(x), height(part)) for x, part in of]
        draw_curve(sheet, number, drawn, thinned(drawn))
        ends.append((drawn[-1], number, engine))
    name_ends(sheet, ends, right, top, bottom)
    sheet.y = bottom + 40
    words = "; ".join(f"{engine}: {_ends_in_words(of)}" for engine, of in checked.items())
    return sheet.finish(f"{title}. {' '.join(notes)} {words}.")


def one_row_claim(parts: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """What the first engine reaches with the shortest and the longest row, and what the others reach with that."""
    first, *others = parts
    head = f"One row alone: {first} reaches {_ends_in_words(parts[first])}"
    longest = {engine: parts[engine][-1][1] for engine in others if parts[engine][-1][0] == parts[first][-1][0]}
    if not longest:
        return head
    best, least = (pick(longest, key=lambda engine: longest[engine]) for pick in (max, min))
    tail = f"{best} {longest[best]:.0%}"
    return f"{head}; there {tail}" + (f", and {least} {longest[least]:.0%}" if least != best else "")


def _ends_in_words(of: Sequence[tuple[float, float]]) -> str:
    (few, low), (many, high) = of[0], of[-1]
    head = f"{low:.0%} of a plain read with {few:,.0f} tokens"
    return head if few == many else f"{head}, {high:.0%} with {many:,.0f}"


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points of a line that get a mark: the first, the last, and between them those that lie APART."""
    kept = [points[0]]
    for point in points[1:-1]:
        if point[0] - kept[-1][0] >= APART and points[-1][0] - point[0] >= APART:
            kept.append(point)
    return kept + list(points[1:][-1:])


def draw_bounds(times: Mapping[str, Mapping[str, float]], note: str = "") -> Picture:
    """What the second engine is worth against the first: {load: {engine: us}}, a line for each load.

    Of others that a load has, a mark is drawn beside. Loads come in the order of what the second gains.
    """
    checked = {
        load: {
            engine: positive(f"times[{load!r}][{engine!r}]", us) for engine, us in some(f"times[{load!r}]", of).items()
        }
        for load, of in some("times", times).items()
    }
    first, second, *others = _engines_of(checked)
    title = bounds_claim(checked)
    ordered = sorted(checked, key=lambda load: checked[load][second] / checked[load][first])
    shown = ordered if len(ordered) <= MOST_LOADS else ordered[: MOST_LOADS // 2] + ordered[-MOST_LOADS // 2 :]
    notes = [f"A line is a load: {first}'s time over another stage's, to the right where that one is faster."]
    notes += [f"Of {len(ordered)} loads those at both ends."] if len(shown) < len(ordered) else []
    notes += [note] if note else []
    sheet = Sheet()
    sheet.heading(title, [" ".join(notes)])
    left = max(text_width(load, 12) for load in shown) + 20
    right = WIDTH - COLUMN * (2 + len(others)) - 8
    ratios = {load: {e: checked[load][first] / us for e, us in checked[load].items()} for load in shown}
    scale = scale_of([ratio for of in ratios.values() for ratio in of.values()], left + 10, right - 10, room=1.03)
    top = sheet.y + 18
    bottom = top + PITCH * len(shown)
    for tick in scale.ticks(5):
        sheet.line(scale.at(tick), top, scale.at(tick), bottom)
        sheet.text(scale.at(tick), bottom + 15, f"{tick:g}×", size=SMALL, fill=GREY, anchor="middle")
    draw_level(sheet, scale.at(1.0), top, bottom, f"{first}")
    for column, engine in enumerate((first, second, *others)):
        x = right + COLUMN * (column + 1)
        sheet.text(x, sheet.y + 4, engine, size=SMALL, fill=GREY, anchor="end")
        if column:
            mark(sheet, 2 * (column - 1), x - RADIUS - 2, sheet.y - 12)
    for line, load in enumerate(shown):
        y = top + PITCH * (line + 0.5)
        sheet.text(left - 8, y + 4, load, anchor="end")
        sheet.path(f"M{scale.at(1.0):.5g} {y:.5g}H{scale.at(ratios[load][second]):.5g}", PALETTE[0], 2.4)
        for number, engine in reversed(list(enumerate((second, *others)))):
            if engine in ratios[load]:
                mark(sheet, 2 * number, scale.at(ratios[load][engine]), y)
        sheet.text(right + COLUMN, y + 4, us_in_words(checked[load][first]), size=SMALL, anchor="end")
        for column, engine in enumerate((second, *others), 2):
            if engine in ratios[load]:
                words = times_in_words(ratios[load][engine])
                sheet.text(right + COLUMN * column, y + 4, words, size=SMALL, fill=INK, anchor="end")
    sheet.y = bottom + 20
    said = "; ".join(
        f"{load}: {first} {us_in_words(checked[load][first])}"
        + "".join(f", {engine} {times_in_words(ratio)}" for engine, ratio in ratios[load].items() if engine != first)
        for load in shown
    )
    return sheet.finish(f"{title}. {' '.join(notes)} {said}.")


def _engines_of(times: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The engines of the first load; ValueError where another lacks one of the two that are compared."""
    (load, of), *_ = times.items()
    if len(of) < 2:
        raise ValueError(f"times[{load!r}] has one engine, {next(iter(of))!r}: pass at least two")
    for other, engines in times.items():
        for engine in list(of)[:2]:
            if engine not in engines:
                raise ValueError(f"times[{other!r}] lacks {engine!r}: pass its time, or leave the load out")
    return list(of)


def bounds_claim(times: Mapping[str, Mapping[str, float]]) -> str:
    """On how many loads the second engine is faster than the first, on how many slower, and by how much at most."""
    first, second = list(next(iter(times.values())))[:2]
    gains = {load: of[first] / of[second] for load, of in times.items()}
    best, worst = (pick(gains, key=lambda load: gains[load]) for pick in (max, min))
    wins, losses = sum(gain > 1 + TIE for gain in gains.values()), sum(gain < 1 - TIE for gain in gains.values())
    head = f"{second} is faster than {first} on {wins} of {count_of(len(gains), 'load')}"
    head += f", {times_in_words(gains[best])} on {best}" if wins else ""
    if not losses:
        return f"{head}, on none slower by over {TIE:.0%}"
    return f"{head}; slower on {losses}, {times_in_words(gains[worst])} on {worst}"

"""What pictures of results share: scales with round ticks, marks that differ in shape, lines with names at their ends.

On a scale from 1 to 100 over 200 pixels 10 lies in the middle; its ticks are 1, 10 and 100.
"""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pkv.viz.svg import GREY, INK, PALETTE, SMALL, Sheet, text_width

RADIUS = 3.6
LABEL_PITCH = 14.0  # pixels between names at the ends of lines


class Scale(NamedTuple):
    """A logarithmic scale: `least` lies at pixel `begin`, `most` at `end`."""

    least: float
    most: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        """The pixel of a value; one beyond the scale lies at its end."""
        inside = min(max(value, self.least), self.most)
        return self.begin + (self.end - self.begin) * math.log(inside / self.least) / math.log(self.most / self.least)

    def ticks(self, n_most: int = 8) -> list[float]:
        """Round values on the scale, at most about n_most: powers of ten, and between them as many as fit.

        >>> Scale(1, 100, 0, 200).ticks(), Scale(0.4, 1.2, 0, 200).ticks()
        ([1, 2, 5, 10, 20, 50, 100], [0.4, 0.5, 0.7, 1])
        """
        powers = range(math.floor(math.log10(self.least)), math.ceil(math.log10(self.most)) + 1)
        for digits in ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1, 3), (1,)):
            found = [digit * 10**power if power >= 0 else digit / 10**-power for power in powers for digit in digits]
            found = [value for value in found if self.least <= value * 1.0001 and value <= self.most * 1.0001]
            if len(found) <= n_most:
                break
        return found


def scale_of(values: Sequence[float], begin: float, end: float, room: float = 1.08) -> Scale:
    """The scale that holds all values, with a little room on both sides."""
    least, most = min(values) / room, max(values) * room
    return Scale(least, most, begin, end)


def positive(name: str, value: Any) -> float:
    """A number above 0; an error names the argument."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not 0 < float(value) < math.inf:
        raise ValueError(f"{name} = {value} must be above 0, and finite")
    return float(value)


def points_of(name: str, points: Any) -> list[tuple[float, float]]:
    """(x, y) pairs of numbers above 0, sorted by x; an error names the one that is wrong."""
    found = []
    for number, point in enumerate(points):
        if isinstance(point, str) or not isinstance(point, Sequence) or len(point) != 2:
            raise TypeError(f"{name}[{number}] = {point!r} must be a pair of numbers, such as (8, 120.5)")
        x, y = (positive(f"{name}[{number}][{place}]", value) for place, value in enumerate(point))
        found.append((x, y))
    if not found:
        raise ValueError(f"{name} is empty: pass at least one pair of numbers, such as (8, 120.5), or leave it out")
    return sorted(found)


def some(name: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values; TypeError where they are no mapping, ValueError where there are none."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{name} must be a dict, got {type(values).__name__}")
    if not values:
        raise ValueError(f"{name} is empty: pass at least one entry")
    return values


def times_in_words(ratio: float) -> str:
    """A ratio in about three digits.

    >>> times_in_words(1.0849), times_in_words(0.057), times_in_words(23.4)
    ('1.08×', '0.057×', '23×')
    """
    return f"{ratio:.2f}×" if 0.1 <= ratio < 9.995 else f"{ratio:.2g}×" if ratio < 99.5 else f"{ratio:,.0f}×"


def us_in_words(us: float) -> str:
    """A time in about three digits.

    >>> us_in_words(0.25), us_in_words(83.94), us_in_words(1234.5)
    ('0.25 us', '83.9 us', '1,234 us')
    """
    return f"{us:.2g} us" if us < 1 else f"{us:.3g} us" if us < 999.5 else f"{us:,.0f} us"


def mark(sheet: Sheet, number: int, x: float, y: float) -> None:
    """A mark in the shape and colour of series `number`; shapes differ where colours are alike in grey."""
    colour, r = PALETTE[number % len(PALETTE)], RADIUS
    shapes = (
        f"M{x - r:.5g} {y:.5g}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z",
        f"M{x - r:.5g} {y - r:.5g}h{2 * r}v{2 * r}h{-2 * r}z",
        f"M{x:.5g} {y - r - 0.6:.5g}l{r + 0.6} {2 * r}h{-2 * r - 1.2}z",
        f"M{x:.5g} {y - r - 1:.5g}l{r + 1} {r + 1}l{-r - 1} {r + 1}l{-r - 1} {-r - 1}z",
        f"M{x:.5g} {y + r + 0.6:.5g}l{r + 0.6} {-2 * r}h{-2 * r - 1.2}z",
    )
    fill = colour if (number // len(shapes)) % 2 == 0 else "#fff"
    ring = INK if fill == colour else colour
    sheet.shapes.append(
        f'<path d="{shapes[number % len(shapes)]}" fill="{fill}" stroke="{ring}" '
        f'stroke-width="{0.7 if fill == colour else 2}"/>'
    )


def draw_curves(
    sheet: Sheet,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    place: tuple[float, float, float],
    names: tuple[str, str],
    ticks: Sequence[float] = (),
) -> None:
    """A line for each name, on logarithmic scales, from sheet.y down; its name stands where it ends.

    place: left, right and height of the plane. names: of the x and of the y axis. ticks: x values to name.
    """
    left, right, height = place
    top, bottom = sheet.y + 18, sheet.y + 18 + height
    sheet.text(left, sheet.y + 8, names[1], size=SMALL, fill=GREY)
    everything = [point for points in curves.values() for point in points]
    across = scale_of([x for x, _ in everything], left + 8, right - 8, room=1.0001)
    up = scale_of([y for _, y in everything], bottom - 8, top + 8, room=1.02)
    for y in up.ticks(7):
        sheet.line(left, up.at(y), right, up.at(y))
        sheet.text(left - 6, up.at(y) + 4, f"{y:,g}", size=SMALL, fill=GREY, anchor="end")
    for x in ticks or across.ticks():
        if across.least <= x <= across.most:
            sheet.line(across.at(x), bottom, across.at(x), bottom + 4, GREY)
            sheet.text(across.at(x), bottom + 17, f"{x:,g}", size=SMALL, fill=GREY, anchor="middle")
    sheet.line(left, bottom, right, bottom, GREY)
    sheet.text(right, bottom + 33, names[0], size=SMALL, fill=GREY, anchor="end")
    ends = []
    for number, (name, points) in enumerate(curves.items()):
        if not points:
            continue  # its mark stays free, as in a picture beside
        drawn = [(across.at(x), up.at(y)) for x, y in points]
        draw_curve(sheet, number, drawn, drawn)
        ends.append((drawn[-1], number, name))
    name_ends(sheet, ends, right, top, bottom)
    sheet.y = max(bottom + 40, sheet.y)


def draw_curve(
    sheet: Sheet, number: int, points: Sequence[tuple[float, float]], marked: Sequence[tuple[float, float]]
) -> None:
    """A line through places on the sheet in the colour of series `number`, and its mark at some of them."""
    sheet.path("M" + "L".join(f"{x:.5g} {y:.5g}" for x, y in points), PALETTE[number % len(PALETTE)], 1.6)
    for x, y in marked:
        mark(sheet, number, x, y)


def name_ends(
    sheet: Sheet, ends: Sequence[tuple[tuple[float, float], int, str]], right: float, top: float, bottom: float
) -> None:
    """The name of each curve beside its end, (place, number, name), to the right of a plane."""
    for (x, y), number, name, label in spread(ends, top, bottom):
        sheet.line(x + 6, y, right + 8, label, GREY)
        mark(sheet, number, right + 14, label)
        sheet.text(right + 22, label + 4, name, size=SMALL)


def spread(
    ends: Sequence[tuple[tuple[float, float], int, str]], top: float, bottom: float
) -> list[tuple[tuple[float, float], int, str, float]]:
    """The ends of lines, upper ones first, each with the height of its name: apart, and near its line."""
    ordered = sorted(ends, key=lambda end: (end[0][1], end[1]))
    labels: list[float] = []
    for (_, y), _, _ in ordered:
        labels.append(max(y, labels[-1] + LABEL_PITCH if labels else top))
    beyond = max(0.0, labels[-1] - bottom) if labels else 0.0
    for number in reversed(range(len(labels))):  # those below the plane move up, and push others
        highest = labels[number + 1] - LABEL_PITCH if number + 1 < len(labels) else bottom
        labels[number] = min(labels[number], highest if beyond else labels[number])
    return [(*end, label) for end, label in zip(ordered, labels, strict=True)]


def room_for(names: Sequence[str]) -> float:
    """Pixels that names at the ends of lines take, with their marks."""
    return 30 + max(text_width(name, SMALL) for name in names)


def draw_ratio_axis(sheet: Sheet, scale: Scale, top: float, bottom: float, n_most: int = 8) -> None:
    """Upright lines at round ratios, each with its number below."""
    for tick in scale.ticks(n_most):
        sheet.line(scale.at(tick), top, scale.at(tick), bottom)
        sheet.text(scale.at(tick), bottom + 15, f"{tick:g}×", size=SMALL, fill=GREY, anchor="middle")


def draw_level(sheet: Sheet, x: float, top: float, bottom: float, words: str) -> None:
    """An upright line that values are held against, and what it means."""
    sheet.line(x, top, x, bottom, INK, "4 3")
    sheet.text(x, top - 4, words, size=SMALL, fill=GREY, anchor="middle")

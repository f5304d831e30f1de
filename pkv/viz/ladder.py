"""What each stage gains over a rival, load by load: the same attention, other work assignment, a mark for each stage.

A load that row_local does in 80 us, workqueue in 70 us and the rival in 77 us: marks at 0.96 and 1.10. Where times are
known to within 2%, 0.99 is neither a gain nor a loss. A loss is drawn like a gain, to the left of the line.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pkv.bench.records.results import geomean
from pkv.stages.s4_adaptive import OWN
from pkv.viz.resultscales import draw_level, draw_ratio_axis, mark, positive, scale_of, some, times_in_words
from pkv.viz.svg import GREY, SMALL, WIDTH, Picture, Sheet, text_width
from pkv.wording.counts import count_of

LADDER = tuple(OWN)
PITCH, APART, TABLE_PITCH = 19.0, 14.0, 17.0
TIE = 0.01  # where noise is not known


class Gain(NamedTuple):
    """A rival's time over a stage's, and how far apart two measurements of the same may lie: 0.02 for 2%."""

    ratio: float
    noise: float = TIE

    @property
    def is_gain(self) -> bool:
        return self.ratio > 1 + self.noise

    @property
    def is_loss(self) -> bool:
        return self.ratio * (1 + self.noise) < 1


Gains = Mapping[str, Mapping[str, Gain]]  # by load and stage


def newest(found: Gains) -> str:
    """The last stage of the ladder that any load has."""
    there = {stage for of in found.values() for stage in of}
    return [stage for stage in LADDER if stage in there][-1]


def claim(found: Gains, rival: str) -> str:
    """What the newest stage gains in the mean, and on how many loads it does and does not."""
    stage = newest(found)
    of = [gains[stage] for gains in found.values() if stage in gains]
    words = f"{stage} is {times_in_words(geomean(gain.ratio for gain in of) or 1.0)} as fast as {rival}"
    return f"{words} over {count_of(len(of), 'load')}: {counts_of(of)}"


def won_and_lost(of: Sequence[Gain]) -> tuple[int, int]:
    """On how many loads there is a gain, and on how many a loss."""
    return sum(gain.is_gain for gain in of), sum(gain.is_loss for gain in of)


def counts_of(of: Sequence[Gain]) -> str:
    """On how many loads there is a gain, a loss, or neither.

    >>> counts_of([Gain(1.2), Gain(0.995), Gain(0.8)])
    'faster on 1, slower on 1, within noise on 1'
    """
    gained, lost = won_and_lost(of)
    words = [f"faster on {gained}", f"slower on {lost or 'none'}"]
    return ", ".join(words + [f"within noise on {len(of) - gained - lost}"] * (gained + lost < len(of)))


def summary_of(found: Gains) -> dict[str, dict[str, str]]:
    """Columns of the table below the marks: {heading: {stage: words}}."""
    columns: dict[str, dict[str, str]] = {"mean": {}, "least": {}, "faster / slower": {}}
    for stage in LADDER:
        of = [gains[stage] for gains in found.values() if stage in gains]
        if of:
            columns["mean"][stage] = times_in_words(geomean(gain.ratio for gain in of) or 1.0)
            columns["least"][stage] = times_in_words(min(gain.ratio for gain in of))
            won, lost = won_and_lost(of)
            columns["faster / slower"][stage] = f"{won} / {lost} of {len(of)}"
    return columns


def draw_gains(
    panels: Mapping[str, Gains],
    rival: str,
    title: str,
    note: str = "",
    columns: Mapping[str, Mapping[str, str]] | None = None,
) -> Picture:
    """A plane for each panel, a line for each load, a mark for each stage at the rival's time over the stage's own.

    columns: a table below, {heading: {stage: words}}; stages without a mark come last.
    """
    checked = {
        panel: {
            load: {stage: _checked(f"panels[{panel!r}][{load!r}][{stage!r}]", gain) for stage, gain in of.items()}
            for load, of in found.items()
        }
        for panel, found in some("panels", panels).items()
    }
    loads = list(dict.fromkeys(load for found in sorted(checked.values(), key=len, reverse=True) for load in found))
    every = [gain for found in checked.values() for of in found.values() for gain in of.values()]
    if not every:
        raise ValueError(
            "panels hold no gain: pass at least one, such as {'a card': {'zipf B8': {'stream_k': Gain(1.2)}}}"
        )
    notes = [
        f"A line is a load, a mark a stage: the time of {rival} over its own, to the right of the line where it is "
        "faster. Grey: as far as noise alone may move the last stage."
    ]
    notes += [note] if note else []
    sheet = Sheet()
    sheet.heading(title, [" ".join(notes)])
    left = max(text_width(load, SMALL) for load in loads) + 14
    width = (WIDTH - left - 8) / len(checked)
    top = sheet.y + (30 if len(checked) > 1 else 14)
    bottom = top + PITCH * len(loads)
    for line, load in enumerate(loads):
        sheet.text(left - 8, top + PITCH * (line + 0.5) + 4, load, size=SMALL, anchor="end")
    for number, (panel, found) in enumerate(checked.items()):
        begin = left + number * width
        if panel:
            sheet.text(begin + width / 2, sheet.y + 2, panel, size=SMALL, weight="bold", anchor="middle")
        _draw_plane(sheet, found, loads, [gain.ratio for gain in every], (begin, begin + width - APART, top, bottom))
    sheet.y = bottom + 26
    stages = {
        stage: None for stage in LADDER if any(stage in of for found in checked.values() for of in found.values())
    }
    _draw_table(sheet, list(stages), columns or {})
    said = "; ".join(
        f"{panel + ', ' if panel else ''}{load}: "
        + ", ".join(f"{stage} {times_in_words(gain.ratio)}" for stage, gain in of.items())
        for panel, found in checked.items()
        for load, of in found.items()
    )
    table = "; ".join(
        f"{name}: " + ", ".join(f"{s} {w}" for s, w in of.items()) for name, of in (columns or {}).items()
    )
    return sheet.finish(" ".join(filter(None, [f"{title}.", *notes, f"{said}.", f"{table}." if table else ""])))


def _checked(name: str, gain: Gain) -> Gain:
    return Gain(positive(f"{name}.ratio", gain.ratio), gain.noise)


def _draw_plane(
    sheet: Sheet, found: Gains, loads: Sequence[str], values: Sequence[float], place: tuple[float, float, float, float]
) -> None:
    begin, end, top, bottom = place
    scale = scale_of([*values, 1.0], begin + 6, end - 6, room=1.03)
    draw_ratio_axis(sheet, scale, top, bottom, 8 if end - begin > 300 else 3)
    for line, load in enumerate(loads):
        of = found.get(load, {})
        y = top + PITCH * (line + 0.5)
        if of:
            noise = of[max(of, key=LADDER.index)].noise
            x = scale.at(1 / (1 + noise))
            sheet.shapes.append(
                f'<path data-key="noise" d="M{x:.5g} {y - 6:.5g}H{scale.at(1 + noise):.5g}v12H{x:.5g}z" '
                'fill="#e4e4e4"/>'
            )
    draw_level(sheet, scale.at(1.0), top, bottom, "as fast")
    for line, load in enumerate(loads):
        for number, stage in enumerate(LADDER):
            if stage in found.get(load, {}):
                mark(sheet, number, scale.at(found[load][stage].ratio), top + PITCH * (line + 0.5))


def _draw_table(sheet: Sheet, stages: Sequence[str], columns: Mapping[str, Mapping[str, str]]) -> None:
    names = list(dict.fromkeys([*stages, *(name for of in columns.values() for name in of)]))
    x = 24 + max(text_width(name, SMALL) for name in names) + 14
    places = []
    for heading, of in columns.items():
        x += max(text_width(words, SMALL) for words in (heading, *of.values())) + 14
        places.append(x)
        sheet.text(x, sheet.y + 8, heading, size=SMALL, fill=GREY, anchor="end")
    sheet.y += TABLE_PITCH if columns else 0
    for name in names:
        if name in LADDER:
            mark(sheet, LADDER.index(name), 14, sheet.y + 5)
        sheet.text(24, sheet.y + 9, name, size=SMALL)
        for x, of in zip(places, columns.values(), strict=True):
            if name in of:
                sheet.text(x, sheet.y + 9, of[name], size=SMALL, anchor="end")
        sheet.y += TABLE_PITCH

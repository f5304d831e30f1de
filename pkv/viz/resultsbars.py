"""Bars in groups, for results: what each stage takes on each trace, and a ratio by machine or by who pays for plans.

Two groups, bimodal and zipf, of two bars each: four bars, the names to the left, the values behind them.
"""

from collections.abc import Callable, Mapping, Sequence

from pkv.viz.resultscales import positive, some, times_in_words, us_in_words
from pkv.viz.rowstyles import Patches
from pkv.viz.svg import INK, SMALL, WIDTH, Picture, Sheet, text_width
from pkv.wording.counts import count_of

BAR, PITCH = 15, 21
NUMBERS = 130.0  # room for the values behind the longest bar
MOST_LEFT = 270.0
Groups = Mapping[str, Mapping[str, float]]


def draw_ladder(times: Groups, note: str = "") -> Picture:
    """What a step takes, stage by stage: {trace: {engine: us}}; changes are against the first engine."""
    checked = groups_of("times", times)
    title = ladder_claim(checked)
    notes = [f"us of GPU time a step; in brackets, against {_first(checked)}."]
    notes += [note] if note else []

    def words(trace: str, engine: str) -> str:
        us, first = checked[trace][engine], next(iter(checked[trace].values()))
        change = f" ({us / first - 1:+.0%})" if engine != next(iter(checked[trace])) else ""
        return f"{us_in_words(us)}{change}"

    return _draw(checked, title, notes, words)


def ladder_claim(times: Groups) -> str:
    """Which engine is the fastest on most traces, and how much shorter than with the first a step gets by it."""
    n_best: dict[str, int] = {}
    for of in times.values():
        best = min(of, key=lambda engine: of[engine])
        n_best[best] = n_best.get(best, 0) + 1
    best = max(n_best, key=lambda engine: n_best[engine])
    head = f"{best} is the fastest on {n_best[best]} of {count_of(len(times), 'trace')}"
    first = _first(times)
    saved = [1 - of[best] / of[first] for of in times.values() if best in of and first in of]
    return head if best == first or not saved else f"{head}, {_range(saved)} shorter than {first}"


def draw_machines(ratios: Groups, rival: str, note: str = "") -> Picture:
    """One ratio on several machines: {trace: {machine: time of `rival` over ours}}; above 1 we are faster."""
    return _draw_ratios(ratios, rival, "on", note)


def draw_charges(ratios: Groups, rival: str, note: str = "") -> Picture:
    """One ratio, by who pays for planning: {trace: {who pays: time of `rival` over ours}}; above 1 we are faster."""
    return _draw_ratios(ratios, rival, "with", note)


def _draw_ratios(ratios: Groups, rival: str, preposition: str, note: str) -> Picture:
    """Ratios to a rival, a bar each; the title says from which to which they go for each bar's name."""
    checked = groups_of("ratios", ratios)
    title = f"Over {rival}: {_spans(checked, preposition)}"
    notes = [f"The time of {rival} over that of the schedule named with the trace; beyond the line it is faster."]
    notes += [note] if note else []
    return _draw(checked, title, notes, lambda trace, name: times_in_words(checked[trace][name]), level=1.0)


def groups_of(name: str, groups: Groups) -> dict[str, dict[str, float]]:
    """The groups, checked: numbers above 0, and in each group at least one."""
    return {
        group: {
            bar: positive(f"{name}[{group!r}][{bar!r}]", value) for bar, value in some(f"{name}[{group!r}]", of).items()
        }
        for group, of in some(name, groups).items()
    }


def _draw(
    groups: Groups, title: str, notes: Sequence[str], words: Callable[[str, str], str], level: float | None = None
) -> Picture:
    sheet = Sheet()
    sheet.heading(title, [" ".join(notes)])
    names = list(dict.fromkeys(bar for of in groups.values() for bar in of))
    left = min(MOST_LEFT, max(text_width(name, 12) for name in names) + 20)
    most = max(level or 0.0, *(value for of in groups.values() for value in of.values()))
    scale, patches = (WIDTH - left - NUMBERS) / most, Patches()
    spans: list[tuple[float, float]] = []
    values: list[tuple[float, float, str]] = []
    for group, of in groups.items():
        sheet.text(8, sheet.y + 10, group, weight="bold")
        sheet.y += 18
        first = sheet.y
        for bar, value in of.items():
            sheet.text(left - 8, sheet.y + 12, bar, anchor="end")
            patches.add(names.index(bar) % 14, left, sheet.y, value * scale, BAR)
            values.append((left + value * scale + 8, sheet.y + 12, words(group, bar)))
            sheet.y += PITCH
        spans.append((first - 4, sheet.y - 2))
        sheet.y += 6
    patches.draw(sheet)
    for begin, end in spans:
        sheet.line(left, begin, left, end, INK)
        if level is not None:
            sheet.line(left + level * scale, begin, left + level * scale, end, INK, "4 3")
    for x, y, said_of_bar in values:  # above the level, which may cross them
        sheet.text(x, y, said_of_bar, size=SMALL, halo=level is not None)
    said = "; ".join(
        f"{group}: " + ", ".join(f"{bar} {words(group, bar)}" for bar in of) for group, of in groups.items()
    )
    return sheet.finish(f"{title}. {' '.join(notes)} {said}.")


def _spans(ratios: Groups, joint: str) -> str:
    found: dict[str, list[float]] = {}
    for of in ratios.values():
        for bar, ratio in of.items():
            found.setdefault(bar, []).append(ratio)
    return ", ".join(
        f"{times_in_words(min(values))} to {times_in_words(max(values))} {joint} {bar}"
        if len(values) > 1
        else f"{times_in_words(values[0])} {joint} {bar}"
        for bar, values in found.items()
    )


def _first(groups: Groups) -> str:
    return next(iter(next(iter(groups.values()))))


def _range(parts: Sequence[float]) -> str:
    least, most = f"{min(parts):.0%}", f"{max(parts):.0%}"
    return least if least == most else f"{least} to {most}"

"""Bars that compare choices: how far each policy is from the best, and what each candidate is predicted to take.

Regret of a choice = its time / the best candidate's - 1, so 0 is the best there is. Two bars for one trace, 0.02 and
0.4: choosing by cost is 2% slower than the best of all, always taking the same stage 40%.
"""

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pkv.viz.rowstyles import STYLES, Patches, draw_legend
from pkv.viz.svg import FAINT, GREY, INK, SMALL, WIDTH, Picture, Sheet, text_width
from pkv.wording.counts import count_of

BAR, PITCH = 15, 21
MOST_LEFT = 220.0  # room for names
NUMBERS = 150.0  # room for the values behind the longest bar


class Bar(NamedTuple):
    """Regret of one policy on one trace: the mean over its steps and the worst step, as fractions (0.12 for 12%)."""

    policy: str
    trace: str
    mean: float
    worst: float | None = None


def draw_regret(bars: Iterable[Sequence[Any]], note: str = "", of: str = "trace") -> Picture:
    """Regret of each policy, trace by trace: bar to the mean, line to the worst. Bars may be tuples in Bar's order.

    note: what else to say below the claim, such as what the times are of. of: what the bars are grouped by, in a word.
    """
    checked = regrets_of(bars)
    title = regret_claim(checked, of)
    has_worst = any(bar.worst is not None for bar in checked)
    notes = [
        "Regret: how much slower than the best candidate of each step. Zero is best. Bar: the mean over the steps."
    ]
    notes += ["Line: the worst step."] if has_worst else []
    notes += [note] if note else []
    sheet = Sheet()
    sheet.heading(title, [" ".join(notes)])
    left = _left_of([bar.policy for bar in checked])
    most = max(max(bar.mean, bar.worst or 0.0) for bar in checked)
    scale = (WIDTH - left - NUMBERS) / max(most, 1e-9)
    top, patches = sheet.y, Patches()
    for trace in dict.fromkeys(bar.trace for bar in checked):
        sheet.text(8, sheet.y + 10, trace, weight="bold")
        sheet.y += 18
        for bar in (bar for bar in checked if bar.trace == trace):
            y, end = sheet.y, left + max(bar.mean, bar.worst or 0.0) * scale
            sheet.text(left - 8, y + 12, _cut(bar.policy, left), anchor="end")
            patches.add(0, left, y, bar.mean * scale, BAR)
            if bar.worst is not None:
                mean, worst = left + bar.mean * scale, left + bar.worst * scale
                sheet.path(f"M{mean:.5g} {y + BAR / 2:.5g}H{worst:.5g}M{worst:.5g} {y + 3:.5g}v9", INK, 1.4)
            sheet.text(end + 8, y + 12, regret_in_words(bar), size=SMALL)
            sheet.y += PITCH
        sheet.y += 6
    patches.draw(sheet, edges=False)
    sheet.line(left, top + 14, left, sheet.y - 4, GREY)
    words = "; ".join(f"{bar.trace}, {bar.policy}: {regret_in_words(bar)}" for bar in checked)
    return sheet.finish(f"{title}. {' '.join(notes)} {words}.")


def regrets_of(bars: Iterable[Sequence[Any]]) -> list[Bar]:
    """The bars, checked; ValueError names the bar that is wrong or there twice."""
    checked: list[Bar] = []
    for number, values in enumerate(bars):
        if isinstance(values, str) or not isinstance(values, Sequence) or not 3 <= len(values) <= 4:
            example = "('cost', 'bimodal', 0.01, 0.08)"
            raise TypeError(f"bars[{number}] = {values!r} must be (policy, trace, mean, worst), such as {example}")
        bar = Bar(*values)
        for name in ("policy", "trace"):
            if not isinstance(getattr(bar, name), str) or not getattr(bar, name):
                raise TypeError(f"bars[{number}].{name} must be a word, got {getattr(bar, name)!r}")
        mean = _fraction(f"bars[{number}].mean", bar.mean)
        worst = None if bar.worst is None else _fraction(f"bars[{number}].worst", bar.worst)
        if worst is not None and worst < mean:
            raise ValueError(f"bars[{number}].worst = {worst:g} is below its mean {mean:g}: no worst step can be")
        if any((bar.policy, bar.trace) == other[:2] for other in checked):
            raise ValueError(f"bars[{number}] is a second one for policy {bar.policy!r} on {bar.trace!r}: pass one")
        checked.append(bar._replace(mean=mean, worst=worst))
    if not checked:
        raise ValueError("bars is empty: pass at least one, such as ('cost', 'bimodal', 0.01, 0.08)")
    return checked


def regret_claim(bars: Sequence[Bar], of: str = "trace") -> str:
    """Which policy is nearest to the best over all traces, and which one is farthest. of: another word for a trace."""
    means: dict[str, list[float]] = {}
    for bar in bars:
        means.setdefault(bar.policy, []).append(bar.mean)
    n_traces = len({bar.trace for bar in bars})
    complete = {policy: sum(found) / n_traces for policy, found in means.items() if len(found) == n_traces}
    if not complete:
        return f"No policy was tried on every {of}"
    ordered = sorted(complete, key=lambda policy: complete[policy])
    head = f"{ordered[0]} has the least regret: {complete[ordered[0]]:.1%} over {count_of(n_traces, of)}"
    return head if len(ordered) == 1 else f"{head}; {ordered[-1]} has {complete[ordered[-1]]:.1%}"


def draw_candidates(candidates: Mapping[str, Mapping[str, float]], chosen: str, notes: Sequence[str] = ()) -> Picture:
    """What each candidate is predicted to take: {name: {term: ms}}, a bar each, and the one that was chosen."""
    times = {
        name: {term: _fraction(f"candidates[{name!r}][{term!r}]", ms) for term, ms in terms.items()}
        for name, terms in candidates.items()
    }
    if chosen not in times:
        raise ValueError(f"chosen = {chosen!r} must be one of the candidates: {', '.join(times) or 'there is none'}")
    totals = {name: math.fsum(terms.values()) for name, terms in times.items()}
    named = dict.fromkeys(term for found in times.values() for term in found)
    terms = [term for term in named if any(found.get(term) for found in times.values())]
    if len(terms) > len(STYLES):
        raise ValueError(f"candidates have {len(terms)} terms: at most {len(STYLES)} can be told apart")
    title = _choice_claim(totals, chosen)
    notes = [" ".join(["Predicted, not measured. A bar: what a step takes, term by term. Arrow: the choice.", *notes])]
    sheet = Sheet()
    sheet.heading(title, notes)
    # the style of most of a bar is plain, and the tail beside it is not
    keys = {term: key for key, term in enumerate(sorted(terms, key=lambda term: term != "reading"))}
    draw_legend(sheet, [(keys[term], _spelled(term)) for term in terms], WIDTH - 8)
    sheet.y += 6
    left, patches = _left_of([f"→ {name}" for name in times]), Patches()
    scale = (WIDTH - left - NUMBERS) / max(1e-9, *totals.values())
    for name in sorted(times, key=lambda name: totals[name]):
        x = left
        weight = "bold" if name == chosen else "normal"
        sheet.text(left - 8, sheet.y + 12, _cut(f"{'→ ' * (name == chosen)}{name}", left), anchor="end", weight=weight)
        for term in terms:
            width = times[name].get(term, 0.0) * scale
            if width:
                patches.add(keys[term], x, sheet.y, width, BAR)
            x += width
        sheet.text(x + 8, sheet.y + 12, f"{totals[name]:.4g} ms", size=SMALL, weight=weight)
        sheet.y += PITCH
    patches.draw(sheet)
    sheet.line(left, sheet.y - PITCH * len(times) - 2, left, sheet.y - 2, FAINT)
    words = "; ".join(
        f"{name}: {totals[name]:.4g} ms ({', '.join(f'{_spelled(term)} {ms:.4g}' for term, ms in found.items() if ms)})"
        for name, found in times.items()
    )
    return sheet.finish(f"{title}. {' '.join(notes)} {words}.")


def _choice_claim(totals: Mapping[str, float], chosen: str) -> str:
    others = sorted((ms, name) for name, ms in totals.items() if name != chosen)
    head = f"{chosen} is chosen: {totals[chosen]:.4g} ms"
    if not others:
        return f"{head}, the only candidate"
    ms, name = others[0]
    if ms < totals[chosen]:
        return f"{head}, though {name} would take {ms:.4g}"
    if ms - totals[chosen] < 0.01 * totals[chosen]:
        return f"{head}; the next, {name}, takes {ms:.4g}, the same within 1%"
    behind = f", {ms / totals[chosen] - 1:.0%} more" if totals[chosen] else ""
    return f"{head}; the next, {name}, takes {ms:.4g}{behind}"


def _spelled(term: str) -> str:
    return term.replace("_", "-")


def _fraction(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} = {value} must be 0 or more, and finite")
    return float(value)


def regret_in_words(bar: Bar) -> str:
    """A bar's values, in percent."""
    return f"{bar.mean:.1%}" if bar.worst is None else f"{bar.mean:.1%}, worst {bar.worst:.1%}"


def _left_of(names: Sequence[str]) -> float:
    return min(MOST_LEFT, max(text_width(name, 12) for name in names) + 20)


def _cut(name: str, left: float) -> str:
    """The name as far as there is room."""
    room = int((left - 12) / (12 * 0.62))
    return name if len(name) <= room else f"{name[: room - 1]}…"

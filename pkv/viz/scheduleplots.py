"""The same three pictures for papers and slides: timeline, regimes and regret as matplotlib Figures.

Each takes what its twin in SVG takes, and shows the same values: draw_timeline, draw_regimes, draw_regret.
`plot_timeline(pkv.simulate(plan)).savefig("timeline.pdf")` writes a file.
"""

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pkv.cards.simulation import Timeline
from pkv.viz.bars import regret_claim, regret_in_words, regrets_of
from pkv.viz.lanes import pieces_of, running, shown_sms
from pkv.viz.plots import add_boxes, name_below, new_figure
from pkv.viz.regimes import margin_in_words, regimes_of, tokens_in_words
from pkv.viz.rowstyles import EMPTY, MERGE, OPACITY, keys_of, style_of
from pkv.viz.svg import GREY, INK, PALETTE
from pkv.viz.timeclaims import checked_timelines, claim

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HATCHES = {
    "plain": "",
    "sparse": "//",
    "dense": "//////",
    "white": "////",
    "checked": "....",
}  # rowstyles.TEXTURES in matplotlib's words


def plot_timeline(timeline: Timeline) -> "Figure":
    """draw_timeline as a Figure: a lane per SM, time in us, work in the colour of its row."""
    (timeline,) = checked_timelines([timeline])
    sms, step_us = shown_sms(timeline), timeline.gpu_ms * 1000
    with new_figure(7.2, 1.6 + 0.16 * len(sms), claim(timeline)) as figure:
        axes = figure.add_subplot()
        axes.set_xlabel(f"us, simulated on {timeline.gpu.name}")
        axes.set_ylim(len(sms), 0)
        step = -(-len(sms) // 28)
        axes.set_yticks(np.arange(0.5, len(sms), step), [f"SM {sm}" for sm in sms[::step]], fontsize=8)
        if not len(timeline.spans):
            return figure
        axes.set_xlim(0, step_us)
        if timeline.fixed_us:
            axes.axvspan(0, timeline.fixed_us, facecolor="#f4f4f4", edgecolor="#999999", hatch="xx", linewidth=0)
        pieces = pieces_of(timeline, sms, step_us / 2000)
        if pieces is None:
            _plot_counts(axes, timeline, sms)
        boxes: dict[int, list[tuple[float, float, float, float]]] = {}
        for lane, slot, n_slots, key, begin, end, _ in pieces or []:
            boxes.setdefault(key, []).append(
                (timeline.fixed_us + begin, lane + 0.03 + 0.94 * slot / n_slots, end - begin, 0.94 / n_slots)
            )
        for key, found in sorted(boxes.items(), key=lambda entry: (entry[0] < 0, entry)):
            style = style_of(key)
            edge = INK if style.texture in ("sparse", "dense", "checked") else "#ffffff"  # the colour of the hatch too
            look = {
                "hatch": HATCHES[style.texture],
                "edgecolor": edge,
                "linewidth": 0.2,
                "label": _name_of(timeline, key),
            }
            add_boxes(axes, found, facecolor=style.colour, alpha=OPACITY if key >= 0 else 1.0, **look)
        for us in [*timeline.launch_us[:, 0].tolist(), timeline.makespan_us]:
            axes.axvline(timeline.fixed_us + us, color=INK, linewidth=0.8)
        name_below(figure)
    return figure


def _plot_counts(axes: Any, timeline: Timeline, sms: Sequence[int]) -> None:
    """How many programs decode on each SM, where they are too many to be drawn one by one."""
    counts = [running(timeline, sm, timeline.makespan_us) for sm in sms]
    most = max(float(numbers.max()) for numbers in counts) or 1.0
    for lane, numbers in enumerate(counts):
        times = timeline.fixed_us + np.linspace(0.0, timeline.makespan_us, len(numbers) + 1)
        axes.stairs(
            lane + 1 - 0.94 * numbers / most, times, baseline=lane + 1, fill=True, color=PALETTE[0], alpha=OPACITY
        )


def _name_of(timeline: Timeline, key: int) -> str:
    beside = {MERGE: "merge", EMPTY: "an item without a token"}
    return beside[key] if key < 0 else dict(keys_of(timeline.plan.lengths)[1])[key]


def plot_regimes(cells: Iterable[Sequence[Any]], note: str = "") -> "Figure":
    """draw_regimes as a Figure: a panel for each raggedness, a letter and a colour for the best stage, and the note."""
    regimes = regimes_of(cells)
    n_columns, n_lines = len(regimes.longest), len(regimes.n_rows)
    per_line = max(1, min(len(regimes.panels), 14 // n_columns))
    n_panels = -(-len(regimes.panels) // per_line)
    with new_figure(7.2, 1.2 + n_panels * (0.7 + 0.36 * n_lines), regimes.claim) as figure:
        grid = figure.subplots(n_panels, per_line, squeeze=False).ravel()
        for axes in grid[len(regimes.panels) :]:
            axes.set_visible(False)
        for axes, panel in zip(grid, regimes.panels):
            axes.set(xlim=(0, n_columns), ylim=(0, n_lines), xlabel="tokens of the longest row", ylabel="rows")
            axes.set_title(panel, loc="left", fontsize=10)
            axes.set_xticks(np.arange(n_columns) + 0.5, [tokens_in_words(n) for n in regimes.longest], fontsize=8)
            axes.set_yticks(np.arange(n_lines) + 0.5, [f"{n:,}" for n in regimes.n_rows], fontsize=8)
            boxes: dict[str, list[tuple[float, float, float, float]]] = {stage: [] for stage in regimes.looks}
            for cell in (cell for cell in regimes.cells.values() if cell.raggedness == panel):
                x, y = regimes.longest.index(cell.longest), regimes.n_rows.index(cell.n_rows)
                boxes[cell.stage].append((x, y, 1.0, 1.0))
                text = "\n".join(filter(None, [regimes.looks[cell.stage][0], margin_in_words(cell)]))
                axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=8, parse_math=False)
            for stage, (letter, colour) in regimes.looks.items():
                look = {"facecolor": colour, "alpha": 0.45, "edgecolor": GREY, "linewidth": 0.5}
                add_boxes(axes, boxes[stage], label=f"{letter} {stage}", **look)
        if note:
            caption = "\n".join(textwrap.wrap(note, 100))
            figure.supxlabel(caption, x=0.01, ha="left", fontsize=8, color=GREY, parse_math=False)
        name_below(figure)
    return figure


def plot_regret(bars: Iterable[Sequence[Any]]) -> "Figure":
    """draw_regret as a Figure: in percent, a bar to the mean and a line to the worst step; zero is best."""
    checked = regrets_of(bars)
    traces = list(dict.fromkeys(bar.trace for bar in checked))
    groups = [[bar for bar in checked if bar.trace == trace] for trace in traces]
    with new_figure(7.2, 1.0 + sum(0.3 + 0.24 * len(group) for group in groups), regret_claim(checked)) as figure:
        ratios = [len(group) + 1 for group in groups]
        grid = figure.subplots(
            len(groups), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": ratios}
        ).ravel()
        for axes, trace, group in zip(grid, traces, groups):
            means = [bar.mean * 100 for bar in group]
            worst = [(bar.mean if bar.worst is None else bar.worst) * 100 for bar in group]
            beyond = [high - mean for high, mean in zip(worst, means)]
            places = range(len(group))
            axes.barh(places, means, xerr=[[0.0] * len(group), beyond], color=PALETTE[0], alpha=OPACITY, capsize=3)
            for place, bar, high in zip(places, group, worst):
                look = {"textcoords": "offset points", "va": "center", "fontsize": 8}
                axes.annotate(regret_in_words(bar), (high, place), xytext=(6, 0), **look)
            axes.set_yticks(places, [bar.policy for bar in group], fontsize=8, parse_math=False)
            axes.invert_yaxis()
            axes.set_xlim(0, 1.3 * max(0.1, *(100 * max(bar.mean, bar.worst or 0.0) for bar in checked)))
            axes.set_title(trace, loc="left", fontsize=10, parse_math=False)
        grid[-1].set_xlabel("regret in %: bar to the mean, line to the worst step")
    return figure

"""docs/goals.md: what stream_k is meant to reach on an H200, and what the records that ship say.

    python docs/write.py goals.md

Goals were set before the kernels were written. Each is judged by records alone, and one that is missed names its loads.
"""

import math
from collections.abc import Sequence
from decimal import ROUND_FLOOR, Decimal

from goals import ENGINE, Goal
from machinespage import prose

from pkv.bench.records.records import Run
from pkv.bench.records.results import commit_of, machine_of
from pkv.wording.counts import count_of

COMMAND = "python docs/write.py goals.md"
MOST_NAMED = 12  # loads that miss a goal


def page_of(goals: Sequence[Goal], runs: Sequence[Run]) -> str:
    """The page. runs: those that the goals' records are of."""
    n_met = sum(goal.is_met for goal in goals)
    missed = [goal for goal in goals if not goal.is_met]
    parts = [
        "# Goals",
        f"<!-- Written by `{COMMAND}` from pkv's records; whoever edits this file edits in vain. -->",
        prose(
            f"What `{ENGINE}`, the stage that `decode()` takes, was meant to reach before it was written, and what it "
            f"reaches: {n_met} of {count_of(len(goals), 'goal')} met. A ratio is the other's time over ours, on one "
            "machine, with both sides charged alike: above 1 we are faster. *Reached* is the worst load's, or the "
            "geometric mean where the goal says so; a load is unknown where an engine refuses it, or a time is "
            f"doubtful. [records.md](records.md) says how times are taken; "
            f"`{COMMAND}` writes this page."
        ),
        prose(f"Records: {'; '.join(sorted({words_of(run) for run in runs}))}."),
        table(goals),
        "## Not met",
        "\n".join(prose(misses_of(goal), "- ") for goal in missed) if missed else "None.",
    ]
    return "\n\n".join(parts) + "\n"


def words_of(run: Run) -> str:
    """Which machine, grid and commit a run is of."""
    return f"{machine_of(run)}, `{run.grid}`, commit {commit_of(run)[:7]}, {run.date[:10]}"


def table(goals: Sequence[Goal]) -> str:
    """A line for each goal."""
    lines = ["| where | goal | at least | reached | loads | met |", "|---|---|---|---|---|---|"]
    for goal in goals:
        n_loads = len(goal.known)
        loads = f"{n_loads}" if goal.of_mean else f"{n_loads - len(goal.misses)} of {n_loads}"
        loads += f", {goal.n_unknown} unknown" if goal.n_unknown else ""
        met = "yes" if goal.is_met else "**no**"
        lines.append(f"| {goal.where} | {goal.what} | {goal.least:.2f} | {digits(goal.reached)} | {loads} | {met} |")
    return "\n".join(lines)


def misses_of(goal: Goal) -> str:
    """A missed goal, and its worst loads."""
    named = [f"{load} {digits(value)}" for load, value in list(goal.misses.items())[:MOST_NAMED]]
    left = len(goal.misses) - len(named)
    more = f"; and {count_of(left, 'other')}" if left > 0 else ""
    if not goal.known:
        named = ["no load is known"]
    elif goal.of_mean:
        named = [f"the mean is {digits(goal.reached)}"]
    return f"**{goal.where}, {goal.what}** (at least {goal.least:.2f}): {'; '.join(named)}{more}."


def digits(value: float) -> str:
    """Three digits, cut and not rounded: what misses a goal shall not look as if it met it.

    >>> digits(0.8999), digits(1.13), digits(float("nan"))
    ('0.899', '1.130', 'none')
    """
    if math.isnan(value):
        return "none"
    return str(Decimal(repr(value)).quantize(Decimal("0.001"), ROUND_FLOOR))

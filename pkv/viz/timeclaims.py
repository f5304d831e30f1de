"""What a timeline shows, in one sentence with its own numbers.

One row of 16,384 tokens and seven short ones, each a single item, on 28 SMs: 8 programs read the long row while all
others have long ended. So the sentence says for how long only row 0 is read, and by how many programs.
"""

from collections.abc import Sequence

import numpy as np

from pkv.cards.costs import slots_per_sm
from pkv.cards.simulation import Timeline
from pkv.wording.counts import count_of, verb

LONE = 0.05  # of the step: a row that is read alone for longer is the claim


def checked_timelines(timelines: Sequence[Timeline]) -> list[Timeline]:
    """The timelines, if that is what they are."""
    if not isinstance(timelines, list | tuple) or not timelines:
        raise ValueError("timelines must be a list of one or more timelines, such as [pkv.simulate(plan)]")
    for timeline in timelines:
        if not isinstance(timeline, Timeline):
            raise TypeError(
                f"a timeline must be what pkv.simulate gives, got {type(timeline).__name__}: pass pkv.simulate(plan)"
            )
    return list(timelines)


def checked_names(names: Sequence[str] | None, timelines: Sequence[Timeline]) -> list[str]:
    """A name for each timeline: as given, or the stage's."""
    if names is None:
        return [timeline.plan.stage for timeline in timelines]
    is_fit = isinstance(names, list | tuple) and len(names) == len(timelines)
    if not is_fit or not all(isinstance(name, str) for name in names):
        raise ValueError(f"names = {names!r} must be a list of {count_of(len(timelines), 'string')}, one per timeline")
    return list(names)


def claim(timeline: Timeline, name: str | None = None) -> str:
    """What a timeline shows, in one sentence with its own numbers: how long, how much of it idle, and why."""
    name, n_sms = timeline.plan.stage if name is None else name, timeline.gpu.n_sms
    if not len(timeline.spans):
        return f"{name}: nothing is launched, so no SM has work"
    idle = f"{count_of(n_sms, 'SM')} {timeline.tail_idle:.0%} idle"
    return f"{name}: {timeline.gpu_ms * 1000:,.0f} us, {idle}; {_reason(timeline)}"


def _reason(timeline: Timeline) -> str:
    """What ends the step: several launches in turn, a row read alone, SMs without work, or a common end."""
    decode = timeline.spans[timeline.spans["item"] >= 0]
    if len(np.unique(decode["launch"])) > 1:
        return f"its {count_of(len(timeline.plan.launches), 'launch')} follow one another"
    end, row = decode["end_us"].max(), int(decode["row"][decode["end_us"].argmax()])
    others_end = decode["end_us"][decode["row"] != row].max(initial=0.0)
    if others_end and end - others_end > LONE * timeline.makespan_us:
        last = decode[(decode["row"] == row) & (decode["end_us"] > others_end)]
        programs = count_of(len(np.unique(last[["program", "head"]])), "program")
        launch = timeline.plan.launches[int(last["launch"][0])]
        n_slots = timeline.gpu.n_sms * slots_per_sm(timeline.plan, launch, timeline.gpu)
        in_turn = " in turn" if len(last) > n_slots else ""
        return f"for the last {end - others_end:,.0f} us only row {row} is read, by {programs}{in_turn}"
    ends = np.zeros(timeline.gpu.n_sms)
    np.maximum.at(ends, decode["sm"], decode["end_us"])
    n_without = int((ends == 0).sum())
    if n_without:
        return f"{count_of(n_without, 'SM')} {verb(n_without, 'get')} no program"
    spread = end - ends.min()
    if spread < timeline.makespan_us / 100:
        return "all programs end together" if timeline.gpu.n_sms > 1 else "the one SM has all programs"
    return f"each SM has work until {spread:,.0f} us before the last program ends"


def comparison(timelines: Sequence[Timeline], names: Sequence[str]) -> str:
    """Who is first, and by how much the others are behind."""
    pairs = list(zip(timelines, names, strict=True))
    ordered = sorted((pair for pair in pairs if len(pair[0].spans)), key=lambda pair: pair[0].gpu_ms)
    if len(ordered) < 2:
        return claim(*(ordered or pairs)[0])
    first, name = ordered[0]
    others = ", ".join(f"{other} {timeline.gpu_ms * 1000:,.0f}" for timeline, other in ordered[1:])
    return f"{name} is done first: {first.gpu_ms * 1000:,.0f} us, against {others}"

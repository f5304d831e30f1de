"""A policy's choice drawn: what pkv.explain found, as bars of predicted time, with the rule that decided.

Planning on the host is left out of the bars, as the policies leave it out, and a line says how much it is. Where
FlashInfer cannot do a shape there are four bars, and a line says why there is no fifth.
"""

from pkv.stages.s4_adaptive import Explanation
from pkv.viz.bars import draw_candidates
from pkv.viz.svg import Picture


def draw_choice(explanation: Explanation) -> Picture:
    """What pkv.explain found: the candidates' predicted times, the choice, and the rule that decided."""
    if not isinstance(explanation, Explanation):
        found = type(explanation).__name__
        raise TypeError(f"explanation must be what pkv.explain gives, got {found}: pass pkv.explain(lengths, shape)")
    found = explanation.to_dict()
    times = {  # the tail is a difference, which may round to just below 0
        entry["stage"]: {term: max(0.0, ms) for term, ms in entry["terms_ms"].items() if term != "plan"}
        for entry in found["candidates"]
        if entry["terms_ms"] is not None
    }
    if not times:
        raise ValueError(
            f"explanation has no predicted times, for gpu {found['gpu']!r} has no costs: explain for one that has, "
            "such as pkv.explain(lengths, shape, gpu='rtx3060')"
        )
    notes = [f"Policy {found['policy']} on {found['gpu']}: {found['rule']}."]
    planning = {entry["stage"]: entry["terms_ms"]["plan"] for entry in found["candidates"] if entry["terms_ms"]}
    notes += [
        f"Not counted: {stage}'s own planning, {ms * 1000:.0f} us a step." for stage, ms in planning.items() if ms
    ]
    notes += [f"{entry['stage']} cannot: {entry['why_not']}." for entry in found["candidates"] if entry["why_not"]]
    return draw_candidates(times, found["chosen"], notes)

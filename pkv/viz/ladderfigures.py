"""What each stage gains over the best of FlashInfer, from records: see pkv/viz/figures.py; drawn by pkv/viz/ladder.py.

On the loads of one kind a stage is 0.5 and 2 times as fast as FlashInfer: 1 time in the geometric mean.
"""

import re
from collections.abc import Iterable, Mapping

from pkv.bench.records.records import Records
from pkv.bench.records.results import FLASHINFER, Result, Results, geomean, grouped, over, results_of
from pkv.stages import STAGES
from pkv.viz.ladder import LADDER, TIE, Gain, Gains, claim, draw_gains, summary_of
from pkv.viz.needs import Missing, where
from pkv.viz.svg import Picture
from pkv.wording.counts import count_of

MOST_LOADS = 24  # of more, kinds of loads are drawn
BEST = "the best of FlashInfer"


def gains(records: Records) -> Picture:
    """What each stage gains over the best of FlashInfer, load by load, and what its planning costs the host."""
    results = grouped(results_of(records))
    found = {
        load: {stage: gain for stage in LADDER if (gain := gain_of(of_load, stage)) is not None}
        for load, of_load in results.items()
    }
    found = {load: of for load, of in found.items() if of}
    if not found:
        raise Missing(f"gains needs {', '.join(LADDER)} and an engine of FlashInfer's: pkv bench --record FILE")
    shown = found if len(found) <= MOST_LOADS else by_kind(found)
    note = f"GPU time of a layer, planning not counted. {where(records)}."
    if shown is not found:
        note = f"Geometric means of {count_of(len(found), 'load')}, by kind. {note}"
    columns = summary_of(found) | {"the host plans a step": plans_of(results, found)}
    return draw_gains({"": shown}, BEST, claim(found, BEST), note, columns)


def gain_of(of_load: Mapping[str, Result], stage: str, rival: str | None = None) -> Gain | None:
    """Of a stage over a rival, or over the best of FlashInfer; None where one of both is missing."""
    rivals = [made for made in of_load.values() if (made.engine == rival if rival else made.family == FLASHINFER)]
    ratio = over(of_load, stage, [made.engine for made in rivals])
    if ratio is None:
        return None
    best = min((made for made in rivals if made.gpu_us and not made.flags), key=lambda made: made.gpu_us)
    known = [made.noise for made in (of_load[stage], best) if made.noise is not None]
    return Gain(ratio, max(known, default=TIE))


def by_kind(found: Gains) -> dict[str, dict[str, Gain]]:
    """Geometric means over the loads of each kind that all its stages did, with the largest noise of these.

    >>> kinds = by_kind({"equal(1,4k)": {"a": Gain(0.5)}, "equal(8,4k)": {"a": Gain(2.0)}, "short(8)": {"a": Gain(1)}})
    >>> kinds["equal, 2 loads"]["a"].ratio, list(kinds)
    (1.0, ['equal, 2 loads', 'short, 1 load'])
    """
    kinds: dict[str, list[Mapping[str, Gain]]] = {}
    for load, of in found.items():
        name, _, variant = re.sub(r"\([^)]*\)", "|", load).partition("|")
        kinds.setdefault(variant.strip() or name, []).append(of)
    means = {}
    for kind, members in kinds.items():
        stages = dict.fromkeys(stage for of in members for stage in of)
        whole = [of for of in members if len(of) == len(stages)]
        means[f"{kind}, {count_of(len(whole), 'load')}"] = {
            stage: Gain(geomean(of[stage].ratio for of in whole) or 1.0, max(of[stage].noise for of in whole))
            for stage in (stages if whole else ())
        }
    return {kind: of for kind, of in means.items() if of}


def plans_of(results: Results, loads: Iterable[str]) -> dict[str, str]:
    """What planning on the host takes, over these loads: of each stage, and of FlashInfer's fastest there."""
    found: dict[str, list[float]] = {}
    for load in loads:
        of_load = results[load]
        for stage in LADDER:
            if stage in of_load:
                found.setdefault(stage, []).append(of_load[stage].plan_us)
        rivals = [made for made in of_load.values() if made.family == FLASHINFER]
        found.setdefault(BEST, []).append(min(rivals, key=lambda made: made.gpu_us).plan_us)
    words = {}
    for engine, us in found.items():
        on_gpu = engine in STAGES and STAGES[engine].PLANNED_ON == "gpu"
        least, most = f"{min(us):,.0f}", f"{max(us):,.0f}"
        words[engine] = "not at all" if on_gpu else f"{least} us" if least == most else f"{least} to {most} us"
    return words

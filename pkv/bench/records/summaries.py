"""One line an engine: what it does over all loads of a grid, who pays for plans, and what a choice costs in hindsight.

On two loads an engine is 1.2 x and 0.9 x the best of FlashInfer: its geometric mean is 1.04 x, its worst 0.9 x. A route
that takes it on both, where the second load's best candidate takes 90 us and it 100 us, has regrets of 0 and 11%.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pkv.bench.loads.grids import Load
from pkv.bench.records.records import Records
from pkv.bench.records.results import (
    FLASHINFER,
    LAYERS,
    Result,
    Results,
    engines_of,
    geomean,
    group_of,
    of_stream,
    over,
    over_flashinfer,
)


@dataclass(frozen=True)
class Summary:
    """An engine over all loads that it did without a doubt: geometric means, and how many loads those are.

    gpu_us, plan_us, wall_us: medians over these loads, of a layer, a plan, and both from idle to idle.
    over_best: over the best of FlashInfer by GPU time; worst: the least of it, and on which load. layers: the same with
    both plans charged, by number of layers. over_each: over each of FlashInfer's engines. stream: part of the stream.
    """

    engine: str
    family: str
    n_loads: int
    gpu_us: float
    plan_us: float
    wall_us: float
    over_best: float | None
    worst: tuple[float, str] | None
    layers: dict[int, float | None]
    over_each: dict[str, float | None]
    stream: float | None


def summaries(results: Results) -> list[Summary]:
    """Of every engine that computes attention, the fastest by over_best first."""
    engines = engines_of(results)
    rivals = [name for name, family in engines.items() if family == FLASHINFER]
    found = []
    for engine, family in engines.items():
        done = {load: of for load, of in results.items() if engine in of and not of[engine].flags}
        ratios = {load: over_flashinfer(of_load, engine) for load, of_load in done.items()}
        known = [(ratio, load) for load, ratio in ratios.items() if ratio is not None]
        made = Summary(
            engine, family, len(done),
            *medians_of([of[engine] for of in done.values()]),
            geomean(ratios.values()), min(known, default=None),
            {n: geomean(over_flashinfer(of_load, engine, n) for of_load in done.values()) for n in LAYERS},
            {rival: geomean(over(of_load, engine, [rival]) for of_load in done.values()) for rival in rivals},
            geomean(of_stream(of_load, engine) for of_load in done.values()),
        )  # fmt: skip
        found.append(made)
    return sorted(found, key=lambda made: -(made.over_best or 0.0))


def medians_of(results: Sequence[Result]) -> tuple[float, float, float]:
    """Of GPU time, plan and wall; NaN of nothing."""
    if not results:
        return math.nan, math.nan, math.nan
    gpu, plan, wall = zip(*((made.gpu_us, made.plan_us, made.wall_us) for made in results), strict=True)
    return statistics.median(gpu), statistics.median(plan), statistics.median(wall)


def who_pays(of_load: Mapping[str, Result], engine: str, rival: str) -> dict[str, float]:
    """The rival's time over the engine's in a model of one layer, by whose plan is counted."""
    ours, theirs = of_load[engine], of_load[rival]
    return {
        "its plan alone": theirs.layer_us(1) / ours.layer_us(),
        "both plans": theirs.layer_us(1) / ours.layer_us(1),
        "no plan": theirs.layer_us() / ours.layer_us(),
    }


Choices = Mapping[tuple[str, int], str]  # which engine is taken, by load and index of the step


def measured_regret(
    records: Records,
    choices: Mapping[str, Choices],
    candidates: Sequence[str],
    group: Callable[[str], str] = group_of,
) -> list[tuple[str, str, float, float]]:
    """What routes cost in hindsight: (route, group of loads, mean, worst), fit for pkv.viz.draw_regret.

    choices: of each route, the engine that it takes at a step. A step's regret is the GPU time of that engine over the
    least of all candidates, less 1; what a route takes counts as a candidate. Means weigh steps as the load does. Steps
    count that every route names. group: what a load counts to. ValueError where an engine that is taken was not timed.
    """
    timings = {key: timing for key, timing in records.latest().items() if timing.refused is None}
    named = set.intersection(*(set(chosen) for chosen in choices.values())) if choices else set()
    found: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for load, step in sorted(named):
        taken = {route: chosen[load, step] for route, chosen in choices.items()}
        if missing := sorted({engine for engine in taken.values() if (load, engine) not in timings}):
            raise ValueError(
                f"choices take {missing[0]} on {load}, which was not timed: time it, or leave the load out"
            )
        there = {*taken.values(), *(engine for engine in candidates if (load, engine) in timings)}
        times = {engine: timings[load, engine].gpu_us[step] for engine in there}
        for route, engine in taken.items():
            regret = times[engine] / min(times.values()) - 1
            found.setdefault((route, group(load)), []).append((regret, records.loads[load].steps[step].weight))
    return [
        (route, name, float(np.average([r for r, _ in seen], weights=[n for _, n in seen])), max(r for r, _ in seen))
        for (route, name), seen in found.items()
    ]


def always(load: Load, engine: str) -> dict[tuple[str, int], str]:
    """The choices of a route that takes the same engine at every step of a load."""
    return {(load.name, step): engine for step in range(len(load.steps))}

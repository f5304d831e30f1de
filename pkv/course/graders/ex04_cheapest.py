"""How exercise 04 is judged: the choice by predicted times."""

import math
import random
from collections.abc import Callable
from typing import Any

from pkv.course.graders.batches import fails_for_lack
from pkv.course.tasks import Case, Mistake, Property, Raised, Spec, Task

NAN, INF = math.nan, math.inf
STAGES = ("workqueue", "flashinfer", "stream_k", "row_local", "split_kv")  # not in the order of their names
Times = dict[str, float]


def take(
    times: Times, alike: float, *,
    can: Callable[[float], bool] = math.isfinite,
    most: Callable[[float, float], float] = lambda least, alike: (1 + alike) * least,
    strict: bool = False, of: Callable[[list[str], Times], str] = lambda stages, times: stages[0],
) -> str | None:  # fmt: skip
    """Of the stages that can run and are alike the first; the options are mistakes."""
    able = [stage for stage in times if can(times[stage])]
    if not able:
        return None
    least = min(times[stage] for stage in able)
    bound = most(least, alike)
    stages = [stage for stage in able if times[stage] < bound or times[stage] == (least if strict else bound)]
    return of(stages, times)


def first_or_least(times: Times, alike: float) -> str | None:
    """The most preferred where it is alike, else the least."""
    able = {stage: time for stage, time in times.items() if math.isfinite(time)}
    first = next(iter(able), None)
    if first is None or able[first] <= (1 + alike) * min(able.values()):
        return first
    return min(able, key=lambda stage: able[stage])


def in_passing(times: Times, alike: float) -> str | None:
    """Pass over the stages, and change to one that is better by more than alike."""
    best = None
    for stage, time in times.items():
        if math.isfinite(time) and (best is None or time * (1 + alike) < times[best]):
            best = stage
    return best


def is_poisoned(case: Case, got: Any) -> bool:
    """No answer, or a nan, where a nan is among the times."""
    times = case.spec["times"]
    return any(map(math.isnan, times.values())) and (
        got is None or isinstance(got, Raised) or math.isnan(times.get(got, 0) if isinstance(got, str) else 0)
    )


def timed(*found: tuple[list[float], float]) -> list[Spec]:
    """Specs of cheapest."""
    return [{"times": dict(zip(STAGES, times)), "alike": alike} for times, alike in found]


def least(rng: random.Random) -> list[Spec]:
    """Stages far apart; the least first, between, last, and of equals the first."""
    far = rng.sample([10.0, 20.0, 40.0, 80.0, 160.0], 5)
    return timed(([3.0], 0.01), ([9.0, 5.0], 0.01), ([9.0, 5.0, 7.0, 5.0], 0.0), (far, 0.5), (far[::-1], 0.01))


def near(rng: random.Random) -> list[Spec]:
    """Some alike, the first of them not always the first of all; some just not."""
    some = [([5.0, 4.5], 0.25), ([9.0, 4.5, 4.0], 0.25), ([3.3, 3.15, 3.0], 0.12), ([5.2, 4.9, 4.0], 0.25)]
    some += [([1.02, 0.9, 1.0], 0.25), ([50.2, 50.0], 0.001), ([0.5, 0.52, 0.4], 0.28), ([100.0, 93.0, 85.0], 0.1)]
    some += [([50.2, 50.0], 0.5), ([1.9, 1.0], 0.5), ([4.1, 4.9, 4.0], 0.25), ([3.5, 2.5, 2.9, 2.0, 2.2], 0.5)]
    base = rng.uniform(5, 50)
    return timed(*some, ([base * 1.2, base * 1.009, base, base * 1.004], 0.01), ([base * 1.011, base], 0.01))


NONE_CAN = [([], 0.01), ([NAN], 0.01), ([INF], 0.01), ([INF, NAN, INF], 0.01)]
CANNOT = [([NAN, 4.0], 0.01), ([9.0, NAN, 4.0, INF], 0.01), ([INF, 4.2, 4.0], 0.1), ([NAN, INF, 5.0], 0.25)]

EX04_5 = Task(
    id="ex04_5",
    title="the cheapest stage, or one alike",
    function="cheapest",
    lines=5,
    points=2,
    arguments=lambda spec: (dict(spec["times"]), spec["alike"]),
    right=take,
    shortcuts=("pkv",),
    properties=(
        Property("the least time, where no other is alike", least),
        Property("of stages alike the first", near),
        Property("just (1 + alike) times the least is alike", lambda rng: timed(([5.0, 4.0], 0.25), ([3.0, 2.0], 0.5))),
        Property("0 is a time", lambda rng: timed(([0.0], 0.01), ([2.0, 0.0], 0.5), ([3.0, 0.0, 1.0], rng.random()))),
        Property("a stage that cannot run is not taken", lambda rng: timed(*CANNOT)),
        Property("None where no stage can run", lambda rng: timed(*NONE_CAN)),
    ),
    mistakes=(
        Mistake("zero", "takes a time of 0 for none, or divides by it", shows=lambda case, got: 0.0 in case.spec[
            "times"].values() and (got is None or got in case.spec["times"] or "zero" in getattr(got, "text", ""))),
        Mistake("least_alone", "takes the least time though a preferred stage is alike",
                lambda times, alike: take(times, 0.0)),
        Mistake("added", "adds alike to the least time: it is a part of it",
                lambda *a: take(*a, most=lambda least, alike: least + alike)),
        Mistake("percent", "takes alike for per cent: 0.01 is 1%",
                lambda *a: take(*a, most=lambda least, alike: least * (1 + alike / 100))),
        Mistake("of_its_own", "takes alike of a stage's own time: it counts from the least",
                lambda *a: take(*a, most=lambda least, alike: least / (1 - alike))),
        Mistake("strict", "does not take just (1 + alike) times the least for alike: at most includes it",
                lambda times, alike: take(times, alike, strict=alike > 0)),
        Mistake("last", "takes the last of those alike: the first is preferred",
                lambda *a: take(*a, of=lambda stages, times: stages[-1])),
        Mistake("by_name", "goes by the names: the order of the dict says what is preferred",
                lambda *a: take(*a, of=lambda stages, times: min(stages))),
        Mistake("slowest", "takes the slowest of those alike: the first is preferred",
                lambda *a: take(*a, of=lambda stages, times: max(stages, key=lambda stage: times[stage]))),
        Mistake("first_or_least", "asks only the first stage whether it is alike: the second may be",
                first_or_least),
        Mistake("in_passing", "compares with the best so far: alike counts from the least of all", in_passing),
        Mistake("first", "takes the first stage, whatever the times", lambda times, alike: next(iter(times), None)),
        Mistake("first", "takes the first stage that can run, whatever the times",
                lambda times, alike: take(times, INF)),
        Mistake("dearest", "takes the largest time", lambda *a: take(
            *a, of=lambda stages, times: max((s for s in times if math.isfinite(times[s])), key=lambda s: times[s]))),
        Mistake("inf_taken", "takes a stage that cannot run: where all are inf the answer is None",
                lambda *a: take(*a, can=lambda time: not math.isnan(time))),
        Mistake("nan", "is led astray by nan, which is neither less nor more: leave it out first", shows=is_poisoned),
        Mistake("none_able", "fails where no stage can run: the answer is None",
                shows=lambda case, got: case.right is None and (fails_for_lack(got) or not isinstance(got, Raised))),
        Mistake("time", "gives a number: the stage's name is asked for",
                shows=lambda case, got: isinstance(got, int | float)),
    ),
)  # fmt: skip

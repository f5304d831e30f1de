"""How exercise 04 is judged: what a choice costs in hindsight."""

import math
import random
import statistics
from collections.abc import Callable
from typing import Any

from pkv.course.graders.batches import fails_for_lack
from pkv.course.graders.ex04_cheapest import NAN, STAGES, Times
from pkv.course.tasks import Mistake, Property, Raised, Spec, Task, Unfit


def able(step: Times) -> list[float]:
    """The times of those that could run."""
    return [time for time in step.values() if not math.isnan(time)]


def least_of(step: Times) -> float:
    """The best stage's time."""
    return min(able(step))


def mean_regret(times: list[Times], chosen: list[str]) -> float:
    """As asked."""
    return statistics.fmean(regrets(times, chosen)) if times else 0.0


def regrets(times: list[Times], chosen: list[str], best: Callable[[Times], float] = least_of) -> list[float]:
    """Of each step."""
    return [step[stage] / best(step) - 1 for step, stage in zip(times, chosen)]


def regrets_against(times: list[Times], chosen: list[str], one: Times) -> float:
    """The mean regret, where all steps have the best time of one."""
    return statistics.fmean(regrets(times, chosen, lambda step: least_of(one)))


def of_first_stages(times: list[Times], chosen: list[str]) -> float:
    """Against what was taken, and the stages that the first step has."""
    known = [{name: t for name, t in step.items() if name in times[0] or name == c} for step, c in zip(times, chosen)]
    return mean_regret(known, chosen)


def of_each(combine: Callable[[list[float]], float], best: Callable[[Times], float] = least_of) -> Callable[..., float]:
    """A wrong answer from the steps' regrets."""
    return lambda times, chosen: combine(regrets(times, chosen, best)) if times else 0.0


def totals(times: list[Times], chosen: list[str]) -> float:
    """All time over all least time."""
    taken = sum(step[stage] for step, stage in zip(times, chosen))
    return taken / sum(map(least_of, times)) - 1 if times else 0.0


def fixed_stage(times: list[Times], chosen: list[str]) -> list[float]:
    """The times of the stage that is best on the whole."""
    sums = {stage: sum(step.get(stage, NAN) for step in times) for stage in {name for step in times for name in step}}
    whole = {stage: total for stage, total in sums.items() if not math.isnan(total)} or sums
    best = min(sorted(whole), key=lambda stage: whole[stage])
    return [step.get(best, NAN) for step in times]


def against_fixed(times: list[Times], chosen: list[str]) -> float:
    """Against one stage for all steps."""
    if not times:
        return 0.0
    fixed = fixed_stage(times, chosen)
    return statistics.fmean(step[stage] / best - 1 for step, stage, best in zip(times, chosen, fixed))


def against_others(times: list[Times], chosen: list[str]) -> float:
    """Against the best of what was not taken."""
    others = [{name: time for name, time in step.items() if name != taken} for step, taken in zip(times, chosen)]
    found = [step[taken] / min(able(other)) - 1 for step, taken, other in zip(times, chosen, others)]
    return statistics.fmean(found) if times else 0.0


def is_lost(got: Any) -> bool:
    """No number at all."""
    return got is None or (isinstance(got, float) and math.isnan(got))


def regret_specs(*found: list[tuple[str, Times]]) -> list[Spec]:
    """Specs of regret: at each step what was taken, and the times."""
    return [{"times": [times for _, times in steps], "chosen": [stage for stage, _ in steps]} for steps in found]


def step(taken: int, *times: float) -> tuple[str, Times]:
    """One step: what was taken, and what the stages took; -1 leaves one out."""
    return STAGES[taken], {stage: time for stage, time in zip(STAGES, times) if time != -1}


def one_step(rng: random.Random) -> list[Spec]:
    """One step; the best one, and others, taken."""
    return regret_specs(*([step(taken, 10, 11, 16)] for taken in (1, 0, 2)), [step(0, rng.randrange(30, 90), 20)])


def some_steps(rng: random.Random) -> list[Spec]:
    """Short and long steps, the regret large in the short ones."""
    drawn = [step(rng.randrange(3), *(rng.randrange(20, 90) * 4**i for _ in range(3))) for i in range(5)]
    return regret_specs(
        [step(1, 100, 110), step(0, 30, 20)], [step(0, 1000, 990), step(0, 3, 2), step(1, 50, 50)], drawn
    )


def changing(rng: random.Random) -> list[Spec]:
    """The best changes from step to step."""
    mixed = [step(1, 10, 20), step(1, 60, 50), step(2, 90, 70, 80), step(0, 20, 40)]
    return regret_specs([step(0, 10, 20), step(0, 30, 20)], mixed)


def unable(rng: random.Random) -> list[Spec]:
    """Stages without a time, and with nan for one, before others and after."""
    return regret_specs(
        [step(1, NAN, 12, 10)],
        [step(1, -1, 12, 10)],
        [step(0, 10), step(0, 30, 20)],
        [step(0, 15, NAN, 10), step(1, -1, 4, NAN, 2), step(1, 9, 8, NAN)],
    )


def regret_arguments(spec: Spec) -> tuple[Any, ...]:
    """What is taken has a time at every step."""
    if len(spec["times"]) != len(spec["chosen"]):
        raise Unfit
    return [dict(step) for step in spec["times"]], list(spec["chosen"])


EX04_6 = Task(
    id="ex04_6",
    title="regret",
    function="regret",
    lines=4,
    points=2,
    arguments=regret_arguments,
    right=mean_regret,
    shortcuts=("pkv",),
    properties=(
        Property("one step: its time over the least, less 1", one_step),
        Property("the mean counts short and long steps alike", some_steps),
        Property("each step has its own best stage", changing),
        Property("a stage that could not run is not the best", unable),
        Property("no steps: 0", lambda rng: regret_specs([])),
    ),
    mistakes=(
        Mistake("totals", "divides all time by all least time, so that long steps decide: a mean of the steps' regrets",
                totals),
        Mistake("fixed_best", "compares with the stage that is best on the whole: each step has its own best",
                against_fixed),
        Mistake("first_best", "compares with the best time of the first step: each step has its own best",
                lambda times, chosen: regrets_against(times, chosen, times[0]) if times else 0.0),
        Mistake("first_stages", "looks only for stages that the first step has: a later step may have others",
                of_first_stages),
        Mistake("ratio", "does not take 1 off: the best choice has regret 0",
                lambda *a: mean_regret(*a) + bool(a[0])),
        Mistake("percent", "is in per cent: 0.1 is 10%", lambda *a: 100 * mean_regret(*a)),
        Mistake("of_the_taken", "divides what was lost by the time taken: by the least time",
                of_each(lambda found: statistics.fmean(regret / (1 + regret) for regret in found))),
        Mistake("upside_down", "divides the least time by the time taken: the other way round",
                of_each(lambda found: statistics.fmean(1 / (1 + regret) - 1 for regret in found))),
        Mistake("difference", "gives a time lost, not a part", lambda *a: statistics.fmean(
            step[stage] - least_of(step) for step, stage in zip(*a)) if a[0] else 0.0),
        Mistake("sum", "adds up the steps' regrets: their mean", of_each(sum)),
        Mistake("worst", "gives the worst step's regret: the mean", of_each(max)),
        Mistake("median", "gives the median: the mean", of_each(statistics.median)),
        Mistake("geometric", "gives the geometric mean of ratios: the mean of regrets",
                of_each(lambda found: statistics.geometric_mean([1 + regret for regret in found]) - 1)),
        Mistake("wrong_choices", "counts wrong choices: what they cost is asked for",
                of_each(lambda found: statistics.fmean(regret > 0 for regret in found))),
        Mistake("only_wrong", "leaves steps without regret out of the mean: they count, with 0",
                of_each(lambda found: statistics.fmean([regret for regret in found if regret > 0] or [0.0]))),
        Mistake("others_alone", "compares with the best of the other stages: with the best of all", against_others),
        Mistake("mean_of_all", "compares with the mean of the stages: with the best",
                of_each(statistics.fmean, lambda step: statistics.fmean(able(step)))),
        Mistake("nan", "is led astray by nan, which is neither less nor more: leave it out first",
                shows=lambda case, got: is_lost(got) and any(map(math.isnan, case.spec["times"][0].values()))),
        Mistake("missing", "fails where a stage has no time: it could not run at that step",
                shows=lambda case, got: isinstance(got, Raised) and got.kind == "KeyError"),
        Mistake("no_steps", "fails without steps: nothing was lost, so 0",
                shows=lambda case, got: not case.spec["times"] and (fails_for_lack(got) or is_lost(got))),
    ),
)  # fmt: skip

"""How ex03_6 is judged: when the last program ends, which shows why the longest items go first."""

import random
from typing import Any

from pkv.course.graders.batches import fails_for_lack
from pkv.course.tasks import Mistake, Property, Spec, Task, Unfit


def makespan_arguments(spec: Spec) -> tuple[Any, ...]:
    """durations, n_places."""
    if spec["n_places"] < 1 or min(spec["durations"], default=1) < 0:
        raise Unfit
    return list(spec["durations"]), spec["n_places"]


def makespan_right(durations: list[int], n_places: int) -> int:
    """Places by when they are free, the first of them taken each time."""
    ends = [0] * n_places
    for duration in durations:
        ends = sorted([ends[0] + duration, *ends[1:]])
    return ends[-1]


def makespan_specs(*cases: tuple[list[int], int]) -> list[Spec]:
    """Durations and places."""
    return [{"durations": durations, "n_places": n_places} for durations, n_places in cases]


def drawn_specs(rng: random.Random) -> list[Spec]:
    """Programs of very unequal durations, more of them than places."""
    sizes = ((5, 2), (7, 3), (12, 4), (30, 7))
    return makespan_specs(*(([rng.choice([1, 2, 3, 9, 20]) for _ in range(n)], places) for n, places in sizes))


def ends_of_places(durations: list[int], n_places: int) -> list[int]:
    """When each place is free again."""
    ends = [0] * n_places
    for duration in durations:
        ends[ends.index(min(ends))] += duration
    return ends


def in_waves(durations: list[int], n_places: int) -> int:
    """n_places programs start together when all of the last n_places have ended."""
    return sum(max(durations[i : i + n_places]) for i in range(0, len(durations), n_places))


def in_shares(durations: list[int], n_places: int) -> int:
    """Each place gets the next ceil(n / n_places) programs."""
    share = max(-(-len(durations) // n_places), 1)
    return max((sum(durations[i : i + share]) for i in range(0, len(durations), share)), default=0)


def in_ticks(durations: list[int], n_places: int) -> int:
    """Time goes on in steps of 1, of which every program takes one at least."""
    return makespan_right([max(duration, 1) for duration in durations], n_places)


EX03_6 = Task(
    id="ex03_6",
    title="when the last program ends",
    function="makespan",
    lines=5,
    points=2,
    arguments=makespan_arguments,
    right=makespan_right,
    properties=(
        Property("places for all: the longest program decides", lambda rng: makespan_specs(([7], 1), ([2, 9, 4], 5))),
        Property("a program starts where one ends first", lambda rng: makespan_specs(
            ([1, 1, 3], 2), ([3, 1, 1], 2), ([2, 3, 2, 2], 2), ([4, 1, 1, 2, 5], 2), ([1] * 7 + [8], 7),
            ([0, 3, 0], 2), ([0], 1), ([0, 0, 2, 0, 1], 1))
            + drawn_specs(rng)),
        Property("no program at all", lambda rng: makespan_specs(([], 3))),
    ),
    mistakes=(
        Mistake("sorted_first", "starts the longest first: programs start in the order of the list",
                lambda n, k: makespan_right(sorted(n, reverse=True), k)),
        Mistake("shortest_first", "starts the shortest first: programs start in the order of the list",
                lambda n, k: makespan_right(sorted(n), k)),
        Mistake("in_turn", "gives program p to place p % n_places: it goes to the place that is free first",
                lambda n, k: max(sum(n[place::k]) for place in range(k))),
        Mistake("in_shares", "deals out equal numbers of programs: each goes to the place free first", in_shares),
        Mistake("in_waves", "waits for all places: one program starts as soon as one place is free", in_waves),
        Mistake("in_waves", "takes all programs for as long as the longest: one starts as soon as one place is free",
                lambda n, k: -(-len(n) // k) * max(n, default=0)),
        Mistake("ticks", "lets a program of duration 0 take a step of time: it ends when it starts", in_ticks),
        Mistake("even", "divides all work evenly: a program runs on one place", lambda n, k: sum(n) / k),
        Mistake("even", "divides all work evenly: a program runs on one place", lambda n, k: -(-sum(n) // k)),
        Mistake("even", "divides all work evenly: a program runs on one place",
                lambda n, k: max(sum(n) / k, max(n, default=0))),
        Mistake("even", "divides all work evenly: a program runs on one place",
                lambda n, k: max(-(-sum(n) // k), max(n, default=0))),
        Mistake("one_place", "runs one program after the other", lambda n, k: sum(n)),
        Mistake("longest", "takes the longest program for all: places may have to do several",
                lambda n, k: max(n, default=0)),
        Mistake("first_free", "gives when a place is free first, not when the last program ends",
                lambda n, k: min(ends_of_places(n, k))),
        Mistake("last_listed", "gives when the program that is listed last ends: another one may end later",
                lambda n, k: min(ends_of_places(n[:-1], k)) + sum(n[-1:])),
        Mistake("last_start", "gives when the last program starts, not when all have ended",
                lambda n, k: min(ends_of_places(n[:-1], k))),
        Mistake("no_programs", "fails without programs: they end at 0",
                shows=lambda case, got: not case.arguments[0] and fails_for_lack(got)),
    ),
)  # fmt: skip

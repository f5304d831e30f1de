"""Is a correct kernel fast enough? Timed on a larger case beside the solution, in turn, on a GPU only.

Each call begins with a cold L2, as everywhere in pkv.bench. A median of at most 1.5 times the solution's is enough.

>>> Race(mine_us=60.0, solutions_us=42.0, fault=None).text
'fast enough: 60.0 us, the solution 42.0 us'
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pkv._triton import GPU_VISIBLE, INTERPRETED
from pkv.bench.timing import Stopwatch, spread
from pkv.course.answering import function_of, simply
from pkv.course.comparing import difference, plain
from pkv.course.coursefiles import material
from pkv.course.graders.batches import DEVICE
from pkv.course.tasks import Task

Timer = Callable[[Callable[[], Any]], float]  # us of one call
ENOUGH = 1.5  # times the solution's
ROUNDS = 20
ON_GPU = GPU_VISIBLE and not INTERPRETED


@dataclass(frozen=True)
class Race:
    """Medians in us. fault: what is wrong with the answer to the larger case; then no time counts."""

    mine_us: float
    solutions_us: float
    fault: str | None

    @property
    def is_fast_enough(self) -> bool:
        return self.fault is None and self.mine_us <= ENOUGH * self.solutions_us

    @property
    def text(self) -> str:
        """Both times and the verdict, in a line."""
        if self.fault:
            return f"not timed: on a larger case it is wrong: {self.fault}"
        times = f"{self.mine_us:.1f} us, the solution {self.solutions_us:.1f} us"
        if self.is_fast_enough:
            return f"fast enough: {times}"
        return f"not fast enough yet: {times}; {ENOUGH:g} times that is enough"


def race(task: Task, function: Any, timer: Timer | None = None) -> Race | None:
    """Time a correct answer beside the solution; None for a task without a race, or without a GPU to run it on."""
    if task.race is None or not (ON_GPU or timer):
        return None
    calls = [call_of(task, function), call_of(task, function_of(task, material("solutions")))]
    try:
        mine, right = (plain(call()) for call in calls)  # compiles, too
        fault = difference(right, mine, task.tolerance, task.axes)
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    if fault:
        return Race(0.0, 0.0, fault)
    time_us = timer or gpu_timer()
    times: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        for call, mine_or_its in zip(calls, times, strict=True):
            mine_or_its.append(time_us(call))
    return Race(spread(times[0]).median, spread(times[1]).median, None)


def call_of(task: Task, function: Any) -> Callable[[], Any]:
    """A call of a function on the larger case, with arguments of its own."""
    assert task.race is not None
    return functools.partial(task.race_call or task.call or simply, function, *task.arguments(task.race))


def gpu_timer() -> Timer:
    """The GPU's time of what a call launches."""
    stopwatch = Stopwatch(DEVICE)
    return lambda call: stopwatch.gpu_us(call)[0]

"""Three times of one decode step, never mixed: the host plans it, the GPU runs it, and both from idle to idle.

    the GPU    flush L2 | sleep            | event | kernels of one layer | event
    the host   queues all of it while the GPU sleeps, so launching from Python leaves no gap between the events

Before every timed call L2 is filled with other bytes, as a model's other layers would do it: by reading them, since
bytes that are written would wait there to be written back, at the cost of the call that is timed. The first call, which
compiles, is never timed. A time is the median of many rounds, in each of which every engine has its turn.

>>> spread([90.0, 91.0, 92.0, 93.0, 120.0])
Spread(median=92.0, p5=90.2, p95=114.6)
"""

import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

FLUSH_BYTES = 256 * 2**20  # more than any card's L2
LEAST_SLEEP_US = 100.0
RESOLUTION_US = 0.5  # of CUDA's events, says the manual of its runtime
SURE = 3.0  # standard errors
FEWEST = 4  # times, to tell how far they scatter


@dataclass(frozen=True)
class Spread:
    """Median, 5th and 95th percentile of some times, in us."""

    median: float
    p5: float
    p95: float


class Stopwatch:
    """Times calls on one CUDA device, in us."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.to_flush = room_to_flush(device)
        n_cycles = 2_000_000
        self.cycles_per_us = 1.0
        slept_us = min(self._events_us(lambda: torch.cuda._sleep(n_cycles)) for _ in range(3))
        self.cycles_per_us = n_cycles / slept_us
        self.idle_us = 0.0
        self.idle_us = statistics.median(self.host_us(_nothing) for _ in range(50))
        self.floor_us = statistics.median(self.gpu_us(_nothing)[0] for _ in range(50))  # what events say of nothing

    def gpu_us(self, call: Callable[[], Any], enqueue_us: float = 0.0) -> tuple[float, float, bool]:
        """(what the GPU takes for the kernels that `call` launches, what the host takes to launch them, is it sure?)

        From a cold L2. enqueue_us: how long the host is known to take. If it took longer than the GPU slept, the time
        is taken once more; if again, as where `call` itself waits for the GPU, the host's gaps may be in it.
        """
        for _ in range(2):
            slept_us = LEAST_SLEEP_US + 2 * enqueue_us
            self.flush()
            torch.cuda._sleep(int(slept_us * self.cycles_per_us))
            gpu_us, enqueue_us = self._events(call)
            torch.cuda.synchronize(self.device)
            if enqueue_us < slept_us:
                break
        return gpu_us(), enqueue_us, enqueue_us < slept_us

    def host_us(self, call: Callable[[], Any]) -> float:
        """From an idle GPU, cold L2, until all is done that `call` does and queues; waiting for nothing is free."""
        self.flush()
        return max(0.0, self._host_us(call) - self.idle_us)

    def flush(self) -> None:
        """Fill L2 with bytes that no engine reads."""
        self.to_flush.sum()

    def _host_us(self, call: Callable[[], Any]) -> float:
        torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        call()
        torch.cuda.synchronize(self.device)
        return 1e6 * (time.perf_counter() - began)

    def _events(self, call: Callable[[], Any]) -> tuple[Callable[[], float], float]:
        """Put events around what `call` queues; they tell, once the GPU has come to them. And how long `call` took."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        began = time.perf_counter()
        call()
        took_us = 1e6 * (time.perf_counter() - began)
        end.record()
        return (lambda: 1000 * begin.elapsed_time(end)), took_us

    def _events_us(self, call: Callable[[], Any]) -> float:
        elapsed_us, _ = self._events(call)
        torch.cuda.synchronize(self.device)
        return elapsed_us()


@functools.cache
def room_to_flush(device: torch.device) -> torch.Tensor:
    """Bytes that no engine reads, one piece for all stopwatches of a device."""
    return torch.zeros(FLUSH_BYTES // 8, dtype=torch.int64, device=device)


def _nothing() -> None:
    pass


def launches_block() -> bool:
    """True where CUDA_LAUNCH_BLOCKING makes the host wait for each kernel: nothing is queued, and gaps are timed."""
    return os.environ.get("CUDA_LAUNCH_BLOCKING", "") not in ("", "0")


def spread(times: Sequence[float]) -> Spread:
    """The spread of at least one time."""
    p5, median, p95 = np.percentile(times, (5, 50, 95))
    return Spread(float(median), float(p5), float(p95))


def noise(times: Sequence[float]) -> float | None:
    """How far the median of the same engine, timed again, may be from this one: a part of it. None: too few to tell.

    Times of one engine, in the order taken. Two estimates, and the larger counts: the difference between the medians of
    the odd and of the even rounds, which is the same engine timed twice; and SURE standard errors of a difference of
    two medians, from the quartiles. The clock's resolution comes on top.

    >>> round(noise([100.0, 104.0] * 10), 3)
    0.044
    """
    values = np.asarray(times, dtype=np.float64)
    median = float(np.median(values))
    if len(values) < FEWEST or not median:
        return None
    twice = abs(float(np.median(values[::2]) - np.median(values[1::2])))
    low, high = np.percentile(values, (25, 75))
    # of normal times: deviation = quartiles' distance / 1.349, standard error of a median = 1.253 deviation / sqrt(n)
    error = 1.253 * float(high - low) / 1.349 / len(values) ** 0.5
    return (max(twice, SURE * 2**0.5 * error) + RESOLUTION_US) / median

"""Engines on a load: each is checked against fp64, and only what is right is timed.

    batch -> every engine: can it? -> prepare, plan, run once -> right? -> rounds: plan, GPU and wall of each in turn

All engines have the same process, the same q and the same cache, of which slots without a token hold large values. What
one engine raises, now or while it is timed, is its own affair.
"""

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from pkv.bench.engines.engine import Engine, Ready
from pkv.bench.loads.grids import Load, Step
from pkv.bench.measuring.checking import Judge, Verdicts, first_sentence
from pkv.bench.records.records import Timing
from pkv.bench.timing import launches_block, noise, spread

ROUNDS = 20  # of GPU times; of host times half as many


class Clock(Protocol):
    """What measuring needs of a Stopwatch."""

    def gpu_us(self, call: Callable[[], Any], enqueue_us: float = 0.0) -> tuple[float, float, bool]: ...

    def host_us(self, call: Callable[[], Any]) -> float: ...


@dataclass
class Times:
    """The times of one engine on one step, in the order taken."""

    max_err: float
    tolerance: float
    workspace_bytes: int
    settings: dict[str, Any]
    plan_us: list[float] = field(default_factory=list)
    gpu_us: list[float] = field(default_factory=list)
    enqueue_us: list[float] = field(default_factory=list)
    n_late: int = 0  # rounds in which launching outlasted the GPU's sleep, so that gaps may be in gpu_us
    wall_us: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Measured:
    """Timings, and why some engines have none: {engine: what was wrong}."""

    timings: tuple[Timing, ...]
    wrong: dict[str, str]


def measure(
    load: Load,
    engines: Sequence[Engine],
    device: torch.device,
    run: str,
    clock: Clock,
    rounds: int = ROUNDS,
    peak_gb_per_s: float | None = None,
) -> Measured:
    """Time every engine on every step of a load. An engine that is wrong, or raises, on one step has no timing.

    run: the id that timings carry. peak_gb_per_s: the card's; an engine that seems to read faster is flagged.
    """
    said = Verdicts()
    by_step = []
    for step in load.steps:
        left = [engine for engine in engines if engine.name not in said]
        by_step.append(measure_step(load, step, left, device, clock, rounds, said))
    timings = []
    for engine in engines:
        if engine.name in said.refused:
            timings.append(Timing(run, load.name, engine.name, engine.family, refused=said.refused[engine.name]))
        elif engine.name not in said.wrong:
            of_steps = [times[engine.name] for times in by_step]
            timings.append(timing_of(engine, load, of_steps, run, peak_gb_per_s))
    return Measured(tuple(timings), said.wrong)


def measure_step(
    load: Load, step: Step, engines: Sequence[Engine], device: torch.device, clock: Clock, rounds: int, said: Verdicts
) -> dict[str, Times]:
    """The times of one step by engine; `said` learns why others have none."""
    try:
        judge = Judge(load, step, device)
    except torch.OutOfMemoryError as error:
        said.refused |= dict.fromkeys([engine.name for engine in engines], f"no engine fits: {first_sentence(error)}")
        return {}
    running: dict[str, tuple[Ready, Times]] = {}  # they hold much memory, so they end with the step
    for engine in engines:
        with said.of(engine.name):
            reason = engine.why_not(judge.batch)
            if reason is None:
                running[engine.name] = first_run(engine, judge)
            else:
                said.refused[engine.name] = reason
    with without_garbage_collection():
        take_turns(running, clock, rounds, said)
    for name, (ready, _) in running.items():  # over whatever so many calls left behind
        if name not in said:
            with said.of(name):
                judge.check(ready, ready.run(ready.plan()))
        if name in said.wrong:
            said.wrong[name] += f", after {rounds} rounds"
    return {name: times for name, (_, times) in running.items() if name not in said}


def first_run(engine: Engine, judge: Judge) -> tuple[Ready, Times]:
    """Prepare, plan and run once, untimed, and check."""
    device = judge.batch.q.device
    before = allocated_bytes(device, begin=True)
    ready = engine.prepare(judge.batch)
    result = ready.run(ready.plan())
    used = allocated_bytes(device) - before - sum(tensor.nbytes for tensor in result if tensor is not None)
    accuracy = judge.check(ready, result)
    return ready, Times(accuracy.max_err, accuracy.tolerance, max(0, used), dict(ready.settings))


def take_turns(running: Mapping[str, tuple[Ready, Times]], clock: Clock, rounds: int, said: Verdicts) -> None:
    """Time each engine once a round, in an order that rotates; host times in every second round."""
    names, planned = list(running), dict[str, Any]()
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)] if names else ():
            if name in said:
                continue
            ready, times = running[name]
            with said.of(name):
                if name not in planned:
                    planned[name] = ready.plan()
                known_us = float(np.median(times.enqueue_us)) if times.enqueue_us else 0.0
                gpu_us, enqueue_us, is_queued = clock.gpu_us(partial(ready.run, planned[name]), known_us)
                times.gpu_us.append(gpu_us)
                times.enqueue_us.append(enqueue_us)
                times.n_late += not is_queued
                if turn % 2 == 0:
                    times.plan_us.append(clock.host_us(ready.plan))
                    times.wall_us.append(clock.host_us(partial(plan_and_run, ready)))


def plan_and_run(ready: Ready) -> None:
    """A step of one layer."""
    ready.run(ready.plan())


def timing_of(engine: Engine, load: Load, times: Sequence[Times], run: str, peak_gb_per_s: float | None) -> Timing:
    """Medians of each step, and what they say together."""
    gpu = [spread(of_step.gpu_us) for of_step in times]
    weights = [step.weight for step in load.steps]
    mean_us = float(np.average([of_step.median for of_step in gpu], weights=weights))
    of_steps = [noise(taken.gpu_us) for taken in times]
    noise_us = [of_step.median * part for of_step, part in zip(gpu, of_steps, strict=True) if part is not None]
    return Timing(
        run=run,
        load=load.name,
        engine=engine.name,
        family=engine.family,
        plan_us=medians(of_step.plan_us for of_step in times),
        gpu_us=rounded(of_step.median for of_step in gpu),
        gpu_us_p5=rounded(of_step.p5 for of_step in gpu),
        gpu_us_p95=rounded(of_step.p95 for of_step in gpu),
        enqueue_us=medians(of_step.enqueue_us for of_step in times),
        wall_us=medians(of_step.wall_us for of_step in times),
        noise=round(float(np.average(noise_us, weights=weights)) / mean_us, 4) if None not in of_steps else None,
        max_err=max(of_step.max_err for of_step in times),
        tolerance=max(of_step.tolerance for of_step in times),
        workspace_bytes=max(of_step.workspace_bytes for of_step in times),
        flags=flags_of(load, mean_us, sum(taken.n_late for taken in times), peak_gb_per_s),
        settings=times[-1].settings,
    )


def flags_of(load: Load, gpu_us: float, n_late: int, peak_gb_per_s: float | None) -> tuple[str, ...]:
    """What makes a time doubtful."""
    flags = []
    gb_per_s = load.kv_bytes / gpu_us / 1000 if gpu_us else math.inf
    if peak_gb_per_s is not None and load.kv_bytes and gb_per_s > peak_gb_per_s:
        flags.append(
            f"{gb_per_s:.0f} GB/s is above the card's {peak_gb_per_s:.0f}: not all bytes were read from memory"
        )
    if n_late:
        flags.append(f"launching outlasted the GPU's sleep {n_late} times, so gaps between kernels may be in gpu_us")
    if launches_block():
        flags.append("CUDA_LAUNCH_BLOCKING is set, so gaps between kernels are in gpu_us: unset it and measure again")
    return tuple(flags)


def medians(times: Iterable[Sequence[float]]) -> tuple[float, ...]:
    """The median of each step's times."""
    return rounded(float(np.median(of_step)) for of_step in times)


def rounded(values: Iterable[float]) -> tuple[float, ...]:
    """To what a clock can tell: 0.01 us."""
    return tuple(round(value, 2) for value in values)


def allocated_bytes(device: torch.device, begin: bool = False) -> int:
    """GPU memory that torch holds: the most since `begin`, or at `begin` what it holds now. 0 on a CPU."""
    if device.type != "cuda":
        return 0
    if begin:
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    return torch.cuda.max_memory_allocated(device)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Python collects before, not while, times are taken."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

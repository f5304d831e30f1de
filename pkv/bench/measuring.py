"""Engines on a load: each is checked against fp64, and only what is right is timed.

    batch -> every engine: can it? -> prepare, plan, run once -> right? -> rounds: plan, GPU and wall of each in turn

All engines have the same process, the same q and the same cache, of which slots without a token hold large values.
"""

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from pkv.accuracy import Accuracy, Yardstick
from pkv.bench.batches import poisoned_batch
from pkv.bench.engine import Batch, Engine, Ready
from pkv.bench.loads import Load, Step
from pkv.bench.records import Timing
from pkv.bench.timing import noise, spread
from pkv.gpus import gpu_of

ROUNDS = 20  # of GPU times; of host times half as many
UNUSED = 1000.0  # in slots without a token: large enough to show in a result, and a score of it no infinity


class Clock(Protocol):
    """What measuring needs of a Stopwatch."""

    def gpu_us(self, call: Callable[[], Any], enqueue_us: float = 0.0) -> tuple[float, float]: ...

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
    by_step: list[dict[str, Times]] = []
    refused: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for step in load.steps:
        left = [engine for engine in engines if engine.name not in refused | wrong]
        times, refused_here, wrong_here = measure_step(load, step, left, device, clock, rounds)
        by_step.append(times)
        refused |= refused_here
        wrong |= wrong_here
    timings = []
    for engine in engines:
        if engine.name in refused:
            timings.append(Timing(run, load.name, engine.name, engine.family, refused=refused[engine.name]))
        elif engine.name not in wrong:
            of_steps = [times[engine.name] for times in by_step]
            timings.append(timing_of(engine, load, of_steps, run, peak_gb_per_s))
    return Measured(tuple(timings), wrong)


def measure_step(
    load: Load, step: Step, engines: Sequence[Engine], device: torch.device, clock: Clock, rounds: int
) -> tuple[dict[str, Times], dict[str, str], dict[str, str]]:
    """(times, refusals, faults) by engine, of one step."""
    try:
        q, cache = poisoned_batch(list(step.lengths), load.shape, load.seed, device, unused=UNUSED)
        yardstick = Yardstick(q, cache)
    except torch.OutOfMemoryError as error:
        return {}, dict.fromkeys([engine.name for engine in engines], f"no engine fits: {first_sentence(error)}"), {}
    batch = Batch(q, cache, list(step.lengths), load.shape, gpu_of(device))
    ready: dict[str, Ready] = {}  # they hold much memory, so they end with the step
    times: dict[str, Times] = {}
    refused: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for engine in engines:
        reason = engine.why_not(batch)
        if reason is not None:
            refused[engine.name] = reason
            continue
        try:
            ready[engine.name], times[engine.name] = first_run(engine, batch, yardstick)
        except torch.OutOfMemoryError as error:
            refused[engine.name] = f"needs more memory than the GPU has left: {first_sentence(error)}"
        except WrongResult as error:
            wrong[engine.name] = str(error)
        except Exception as error:  # whatever a peer raises, the others still run
            wrong[engine.name] = f"raised {type(error).__name__}: {first_sentence(error)}"
    with without_garbage_collection():
        take_turns([(made, times[name]) for name, made in ready.items() if name in times], clock, rounds)
    for name in times:  # over whatever so many calls left behind
        fault = fault_of(ready[name], ready[name].run(ready[name].plan()), yardstick)[1]
        if fault:
            wrong[name] = f"{fault}, after {rounds} rounds"
    return times, refused, wrong


def first_sentence(error: Exception) -> str:
    """What an error says, in one short line."""
    return " ".join(str(error).split()).partition(". ")[0][:300]


class WrongResult(Exception):
    """An engine whose result is not attention, to within its rounding."""


def first_run(engine: Engine, batch: Batch, yardstick: Yardstick) -> tuple[Ready, Times]:
    """Prepare, plan and run once, untimed; WrongResult says by how much a result is off."""
    before = allocated_bytes(batch.q.device, begin=True)
    ready = engine.prepare(batch)
    result = ready.run(ready.plan())
    used = allocated_bytes(batch.q.device) - before - sum(x.nbytes for x in result if x is not None)
    accuracy, fault = fault_of(ready, result, yardstick)
    if fault:
        raise WrongResult(fault)
    return ready, Times(accuracy.max_err, accuracy.tolerance, max(0, used), dict(ready.settings))


def fault_of(
    ready: Ready, result: tuple[torch.Tensor, torch.Tensor | None], yardstick: Yardstick
) -> tuple[Accuracy, str | None]:
    """How far a result is off, and in words where that is too far."""
    out, lse = result
    if ready.check is not None:
        accuracy = ready.check(result)
    else:
        known = yardstick.lse if lse is None else lse  # an engine without lse is judged by out alone
        accuracy = yardstick.measure(out, known, ready.rounds_weights)
    if accuracy.ok:
        return accuracy, None
    off = f"out is off by {accuracy.max_err:.2e} from fp64, {accuracy.tolerance:.2e} allowed"
    if not accuracy.max_err_lse <= accuracy.tolerance_lse:
        off += f"; lse by {accuracy.max_err_lse:.2e}, {accuracy.tolerance_lse:.2e} allowed"
    return accuracy, off


def take_turns(engines: Sequence[tuple[Ready, Times]], clock: Clock, rounds: int) -> None:
    """Time each engine once a round, in an order that rotates; host times in every second round."""
    planned = [ready.plan() for ready, _ in engines]
    for turn in range(rounds):
        for place in range(len(engines)):
            which = (place + turn) % len(engines)
            (ready, times), plan = engines[which], planned[which]
            known_us = float(np.median(times.enqueue_us)) if times.enqueue_us else 0.0
            gpu_us, enqueue_us = clock.gpu_us(partial(ready.run, plan), known_us)
            times.gpu_us.append(gpu_us)
            times.enqueue_us.append(enqueue_us)
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
    noise_us = [of_step.median * noise(taken.gpu_us) for of_step, taken in zip(gpu, times, strict=True)]
    flags = []
    gb_per_s = load.kv_bytes / mean_us / 1000 if mean_us else math.inf
    if peak_gb_per_s is not None and gb_per_s > peak_gb_per_s:
        flags.append(f"reads {gb_per_s:.0f} GB/s, above the card's {peak_gb_per_s:.0f}: some of it came from a cache")
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
        noise=round(float(np.average(noise_us, weights=weights)) / mean_us, 4) if mean_us else 0.0,
        max_err=max(of_step.max_err for of_step in times),
        tolerance=max(of_step.tolerance for of_step in times),
        workspace_bytes=max(of_step.workspace_bytes for of_step in times),
        flags=tuple(flags),
        settings=times[-1].settings,
    )


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
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

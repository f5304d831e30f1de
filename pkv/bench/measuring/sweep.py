"""A sweep: every load of a grid, one after another, each written down as soon as it is measured.

A sweep that is killed keeps what it has; resume() finds which loads its file lacks, and sweep() goes on with those.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pkv.bench.engines.engine import Engine
from pkv.bench.loads.grids import Load, grid
from pkv.bench.measuring.measurement import ROUNDS, Measured, measure
from pkv.bench.records.provenance import run_of
from pkv.bench.records.records import RecordError, Records, Run, append, read_records
from pkv.bench.timing import FLUSH_BYTES, Stopwatch


@dataclass(frozen=True)
class Sweep:
    """What to measure, and where to write it. file: None for nowhere."""

    grid: str
    loads: tuple[Load, ...]
    engines: tuple[Engine, ...]
    rounds: int = ROUNDS
    file: Path | None = None
    only: str = ""  # the loads of the grid whose names hold this

    def settings(self) -> dict[str, Any]:
        """What a run keeps of how it was made, enough to go on with it."""
        names = [engine.name for engine in self.engines]
        return {
            "engines": names,
            "rounds": self.rounds,
            "only": self.only,
            "flush": f"reads {FLUSH_BYTES // 2**20} MiB",
        }


def loads_of(name: str, only: str = "") -> tuple[Load, ...]:
    """The loads of a grid whose names hold `only`; ValueError where none does, or there is no such grid."""
    found = tuple(load for load in grid(name) if only in load.name)
    if not found:
        raise ValueError(
            f"no load of grid {name!r} has {only!r} in its name; it has {', '.join(x.name for x in grid(name))}"
        )
    return found


def sweep(
    plan: Sweep, device: torch.device, on_load: Callable[[str], None] = lambda name: None
) -> Iterator[tuple[Run, Load, Measured]]:
    """Measure load by load. on_load is told of each before it begins. A load that does not fit in memory says so."""
    watch = Stopwatch(device)
    run = run_of(plan.grid, device, watch.floor_us, plan.settings())
    head = [run]
    for load in plan.loads:
        on_load(load.name)
        measured = measure(load, plan.engines, device, run.run, watch, plan.rounds, run.gpu["peak_gb_per_s"])
        if plan.file is not None and measured.timings:
            append(plan.file, [*head, load, *measured.timings], run.run)
            head = []
        yield run, load, measured
        torch.cuda.empty_cache()  # pages of the next load have other sizes


def resume(file: Path, find_engines: Callable[[Sequence[str]], list[Engine]], device: torch.device) -> Sweep:
    """What is left of the sweep that wrote `file`; RecordError, with the file as it was, where it cannot go on here.

    What it still measures stands beside what the file has, so card, versions and commit must be the same.
    """
    records = read_records([file])
    if not records.runs:
        raise RecordError(f"{file} holds no run to go on with: start one with `pkv bench --record FILE`")
    first = next(iter(records.runs.values()))
    check_same(file, first, run_of(first.grid, device, 0.0, {}))
    try:
        names, only, rounds = (first.settings[name] for name in ("engines", "only", "rounds"))
        engines = tuple(find_engines(names))
        if not engines or type(rounds) is not int or rounds < 1:
            raise ValueError(f"it names {len(engines)} engines and rounds = {rounds!r}")
        loads = tuple(load for load in loads_of(first.grid, only) if not is_finished(load, names, records))
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{file} cannot go on with this version of pkv: {error}") from None
    end_last_line(file)
    return Sweep(first.grid, loads, engines, rounds, file, only)


def is_finished(load: Load, engines: Sequence[str], records: Records) -> bool:
    """Every engine has a timing or a refusal; one that was wrong has none, and is tried again."""
    latest = records.latest()
    return all((load.name, engine) in latest for engine in engines)


def check_same(file: Path, there: Run, here: Run) -> None:
    """RecordError unless both runs are of the same card, versions and commit."""
    cards = [f"{run.gpu['title']} with {run.gpu['n_sms']} SMs" for run in (there, here)]
    if cards[0] != cards[1]:
        raise RecordError(f"{file} was measured on {cards[0]}, and this is {cards[1]}: start a file of its own for it")
    facts = [run.versions | {"commit of pkv": run.commit, "changed since": str(run.changed)} for run in (there, here)]
    changed = [
        f"{name} {facts[0].get(name)} -> {facts[1].get(name)}"
        for name in facts[1]
        if facts[0].get(name) != facts[1][name]
    ]
    if changed:
        raise RecordError(f"{file} was measured with other versions ({', '.join(changed)}): start a new file")


def end_last_line(file: Path) -> None:
    """Where a sweep was killed while it wrote: what is next begins on a line of its own, and half a line goes."""
    text = file.read_bytes()
    end = text.rfind(b"\n") + 1
    if end == len(text):
        return
    with file.open("ab") as stream:
        stream.write(b"\n")
    try:
        read_records([file])
    except (RecordError, RecursionError):  # it is no line, or none that the file can hold
        os.truncate(file, end)

"""A sweep: every load of a grid, one after another, each written down as soon as it is measured.

A sweep that is killed keeps what it has; resume() finds which loads its file lacks, and sweep() goes on with those.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pkv.bench.engine import Engine
from pkv.bench.loads import Load, grid
from pkv.bench.measuring import ROUNDS, Measured, measure
from pkv.bench.provenance import run_of
from pkv.bench.records import RecordError, Records, Run, append, cut_off_part_of_a_line, read_records
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
    if plan.file is not None:
        append(plan.file, [run], run.run)
    for load in plan.loads:
        on_load(load.name)
        measured = measure(load, plan.engines, device, run.run, watch, plan.rounds, run.gpu["peak_gb_per_s"])
        if plan.file is not None and measured.timings:
            append(plan.file, [load, *measured.timings], run.run)
        yield run, load, measured
        torch.cuda.empty_cache()  # pages of the next load have other sizes


def resume(file: Path, find_engines: Callable[[Sequence[str]], list[Engine]], device: torch.device) -> Sweep:
    """What is left of the sweep that wrote `file`; RecordError where that cannot go on here."""
    cut_off_part_of_a_line(file)
    records = read_records([file])
    if not records.runs:
        raise RecordError(f"{file} holds no run to go on with: start one with `pkv bench --record {file}`")
    first = next(iter(records.runs.values()))
    check_same_card(file, first, device)
    names, only = first.settings["engines"], first.settings["only"]
    loads = tuple(load for load in loads_of(first.grid, only) if not is_finished(load, names, records))
    return Sweep(first.grid, loads, tuple(find_engines(names)), first.settings["rounds"], file, only)


def is_finished(load: Load, engines: Sequence[str], records: Records) -> bool:
    """Every engine has a timing or a refusal; one that was wrong has none, and is tried again."""
    latest = records.latest()
    return all((load.name, engine) in latest for engine in engines)


def check_same_card(file: Path, run: Run, device: torch.device) -> None:
    """RecordError unless the run was taken on a card like `device`."""
    card = torch.cuda.get_device_properties(device)
    here, there = (card.name, card.multi_processor_count), (run.gpu["title"], run.gpu["n_sms"])
    if here != there:
        raise RecordError(
            f"{file} was measured on {there[0]} with {there[1]} SMs, and this is {here[0]} with {here[1]}: "
            "start a file of its own for this card"
        )

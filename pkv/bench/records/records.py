"""Records of measurements: JSON lines, one file a sweep, appended to and never rewritten.

Three kinds of lines, each with its "kind" and the "schema" that it is written in; docs/records.md lists the fields.

    {"schema": 1, "kind": "run", "run": "...", "date": "...", "gpu": {...}, ...}       where, and with what
    {"schema": 1, "kind": "load", "load": "bimodal(8,16k)", "steps": [...], ...}        what was decoded
    {"schema": 1, "kind": "time", "engine": "workqueue", "gpu_us": [88.1], ...}         how long it took

A time is a list with a median for each step of the load. A line is either whole or, where a sweep was killed while it
wrote, the file's last one and without its end: readers leave that out, and `--resume` cuts it off.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from pkv.bench.loads.grids import Load, Step
from pkv.bench.records.fields import check
from pkv.plans.shape import Shape
from pkv.wording.counts import count_of

SCHEMA = 1
KINDS = ("run", "load", "time")
TIMES = ("plan_us", "gpu_us", "gpu_us_p5", "gpu_us_p95", "enqueue_us", "wall_us")


class RecordError(ValueError):
    """A file that is no record, or one that this version of pkv cannot read; the message says what to do."""


@dataclass(frozen=True)
class Run:
    """Where and with what the times were taken.

    grid: its name. date: UTC, to the second. gpu: title, arch, n_sms, memory_gb, peak_gb_per_s (None where the driver
    does not tell), and what it read of clocks, power limit and driver. versions: of python, torch, cuda, triton,
    flashinfer and the other peers, None where missing. commit: pkv's, None outside a clone; changed: whether its files
    differed from the commit. floor_us: between two events with nothing between. settings: the sweep's.
    """

    run: str
    grid: str
    date: str
    gpu: dict[str, Any]
    versions: dict[str, str | None]
    commit: str | None
    changed: bool
    floor_us: float
    settings: dict[str, Any]
    cpu: str = ""
    platform: str = ""


@dataclass(frozen=True)
class Timing:
    """One engine on one load: lists have an entry per step of the load, medians unless they say otherwise, us.

    plan_us: the host plans one step, copies included. gpu_us: the GPU runs one layer (gpu_us_p5, gpu_us_p95: spread).
    enqueue_us: the host launches one layer. wall_us: plan and one layer, from idle to idle.
    noise: gpu_us of the same engine timed again differs by less than this part of it (0.01: 1%).
    max_err, tolerance: largest over the steps, against fp64. workspace_bytes: the most GPU memory that torch allocated
    beyond q, the cache and out. flags: what makes the number doubtful. settings: what the engine chose.
    refused: why the engine cannot do the load; all numbers are missing then.
    """

    run: str
    load: str
    engine: str
    family: str = ""
    plan_us: tuple[float, ...] = ()
    gpu_us: tuple[float, ...] = ()
    gpu_us_p5: tuple[float, ...] = ()
    gpu_us_p95: tuple[float, ...] = ()
    enqueue_us: tuple[float, ...] = ()
    wall_us: tuple[float, ...] = ()
    noise: float | None = None
    max_err: float | None = None
    tolerance: float | None = None
    workspace_bytes: int | None = None
    flags: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None


@dataclass(frozen=True)
class Records:
    """What files of records hold together: runs by id, loads by name, timings in the order in which they were taken.

    doubtful: timings with flags that were left out of `timings`, see pkv.bench.records.results.sound.
    """

    runs: dict[str, Run]
    loads: dict[str, Load]
    timings: tuple[Timing, ...]
    doubtful: tuple[Timing, ...] = ()

    def mean(self, timing: Timing, name: str = "gpu_us") -> float:
        """Mean of a step, weighted as the load says; name: plan_us, gpu_us, enqueue_us or wall_us."""
        weights = [step.weight for step in self.loads[timing.load].steps]
        return float(np.average(getattr(timing, name), weights=weights))

    def latest(self) -> dict[tuple[str, str], Timing]:
        """{(load, engine): the timing taken last}, refusals included."""
        return {(timing.load, timing.engine): timing for timing in self.timings}

    def on(self, n_sms: int) -> "Records":
        """Those taken with so many SMs."""
        runs = {name: run for name, run in self.runs.items() if run.gpu["n_sms"] == n_sms}
        return Records(runs, self.loads, tuple(timing for timing in self.timings if timing.run in runs))


def read_records(paths: Iterable[str | os.PathLike[str]]) -> Records:
    """Read files of records; RecordError names the file and the line that cannot be read."""
    runs: dict[str, Run] = {}
    loads: dict[str, Load] = {}
    timings: list[Timing] = []
    for path in paths:
        for number, line in enumerate(whole_lines(Path(path)), 1):
            where = f"{path}, line {number}"
            entry = parsed(line, where)
            try:
                check(entry)
                if entry["kind"] == "run":
                    made = run_of(entry, runs)
                    runs[made.run] = made
                elif entry["kind"] == "load":
                    loads[entry["load"]] = load_of(entry, loads)
                else:
                    timings.append(timing_of(entry, runs, loads))
            except KeyError as error:
                raise RecordError(f"{where}: field {error} is missing; docs/records.md lists the fields") from None
            except (TypeError, ValueError) as error:
                raise RecordError(f"{where}: {error}") from error
    return Records(runs, loads, tuple(timings))


def whole_lines(path: Path) -> list[str]:
    """The lines of a file that were written to their end; RecordError where it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise RecordError(f"cannot read {path}: {reason}") from None
    return text.split("\n")[:-1]


def parsed(line: str, where: str) -> dict[str, Any]:
    """A line as a dict whose schema and kind are known."""
    origin = "records come from `pkv bench --record FILE`"
    try:
        entry = json.loads(line, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{where} is not JSON ({getattr(error, 'msg', error)}): {origin}") from None
    if not isinstance(entry, dict) or type(entry.get("schema")) is not int or entry["schema"] < 1:
        raise RecordError(f"{where} has no schema number: {origin}")
    if entry["schema"] > SCHEMA:
        raise RecordError(
            f"{where} is written in schema {entry['schema']}, and this pkv reads up to {SCHEMA}: update pkv to read it"
        )
    if entry.get("kind") not in KINDS:
        raise RecordError(f"{where}: kind = {entry.get('kind')!r} must be one of {', '.join(KINDS)}")
    return entry


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def known(kind: type, entry: dict[str, Any]) -> dict[str, Any]:
    """The fields that a dataclass has; JSON's lists become tuples. KeyError where one without a default is missing."""
    needed = [made.name for made in fields(kind) if made.default is MISSING and made.default_factory is MISSING]
    found = {made.name: entry[made.name] for made in fields(kind) if made.name in entry or made.name in needed}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def run_of(entry: dict[str, Any], runs: dict[str, Run]) -> Run:
    """The run of a line; ValueError where its id means another one already."""
    made = Run(**known(Run, entry))
    if runs.get(made.run, made) != made:
        raise ValueError(f"run {made.run!r} was described otherwise before: an id must name one run")
    return made


def load_of(entry: dict[str, Any], loads: dict[str, Load]) -> Load:
    """The load of a line; ValueError where its name means another one already."""
    steps = tuple(Step(**known(Step, step)) for step in entry["steps"])
    made = Load(entry["load"], Shape(**known(Shape, entry["shape"])), steps, entry.get("seed", 0))
    if loads.get(made.name, made) != made:
        raise ValueError(f"load {made.name!r} has other steps or another shape than before")
    return made


def timing_of(entry: dict[str, Any], runs: dict[str, Run], loads: dict[str, Load]) -> Timing:
    """The timing of a line; ValueError where its run or load is not known, or times are missing."""
    timing = Timing(**known(Timing, entry))
    if timing.run not in runs or timing.load not in loads:
        raise ValueError(f"run {timing.run!r} or load {timing.load!r} has no line before this one")
    if timing.refused is None:
        n_steps = len(loads[timing.load].steps)
        for name in TIMES:
            if len(getattr(timing, name)) != n_steps:
                raise ValueError(f"{name} must have {count_of(n_steps, 'entry')}, one per step of the load")
    return timing


def line_of(value: Run | Load | Timing, run: str = "") -> str:
    """The line that a value is written as; run: the id, of a load. A field that has its default is left out."""
    if isinstance(value, Load):
        entry: dict[str, Any] = {
            "kind": "load", "run": run, "load": value.name, "seed": value.seed, "shape": value.shape.to_dict(),
            "steps": [{"lengths": list(step.lengths), "weight": step.weight} for step in value.steps],
        }  # fmt: skip
    else:
        entry = {"kind": "run" if isinstance(value, Run) else "time"}
        for made in fields(value):
            default = {} if made.default_factory is dict else made.default
            entry |= {} if getattr(value, made.name) == default else {made.name: getattr(value, made.name)}
    check(entry)
    return json.dumps({"schema": SCHEMA} | entry, allow_nan=False) + "\n"


def append(path: Path, values: Sequence[Run | Load | Timing], run: str) -> None:
    """Add lines, on the disk when this returns; ValueError, and nothing written, where a value cannot be a line."""
    text = "".join(line_of(value, run) for value in values)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                raise RecordError(f"{path} ends within a line: `pkv bench --resume` cuts that off")
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())

"""`pkv bench`: time every stage beside its peers, on loads that are named, and keep what was found as records.

An engine is first checked against fp64; one that is wrong gets no time and no record. Without a GPU the schedules are
checked and counted, and nothing is timed; with --parts, the engines that run them are checked on small rows in place of
that. Exit code 1 if an engine, or a schedule, was wrong.
"""

import argparse
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pkv.bench.engines.engine import Engine
from pkv.bench.engines.registry import DEFAULT_ENGINES, ENGINES, find_engines
from pkv.bench.loads.grids import GRIDS, Load
from pkv.bench.measuring.live import can_time
from pkv.bench.measuring.measurement import ROUNDS
from pkv.bench.measuring.parts import LENGTHS, LOADS, beside, check_small, read_parts, runs
from pkv.bench.measuring.sweep import Sweep, loads_of, resume, sweep
from pkv.bench.records.records import RecordError, Records, Run, Timing
from pkv.cards.known import gpu_of
from pkv.commands import CommandError, arguments
from pkv.commands.output import Progress, complain, print_json, say, table
from pkv.commands.schedules import check_schedules
from pkv.commands.tables import as_table
from pkv.wording.counts import count_of, verb

HELP = "time every stage and its peers on a grid of loads, each checked against fp64 first"
GRID = "smoke"
NO_TIMES = "no GPU: your parts are checked, nothing is timed"
EPILOG = """\
grids:
  smoke    6 loads, under a minute once FlashInfer's kernels are built
  paper    the paper's traces x 1, 4, 8 rows x 5 seeds; fits a 12 GB card
  full     some 110 loads, 1 to 256 rows, up to 128k tokens, and other shapes
  growth   1 to 1024 rows of 1k: what planning on the host and workspace cost
engines (a stage may have options, as in workqueue:splits=20,tile=32):
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--grid", choices=list(GRIDS), metavar="NAME", help=f"{', '.join(GRIDS)} (default {GRID})")
    parser.add_argument("--engines", metavar="NAME,NAME", help="only these (default: all but reference and empty)")
    parser.add_argument(
        "--parts", type=Path, metavar="FILE",
        help="also time stages with your own parts: a Python file with parts = pkv.Parts(...)",
    )  # fmt: skip
    parser.add_argument("--only", metavar="TEXT", help="only loads whose names hold this, as in 'B8 seed'")
    parser.add_argument("--rounds", type=arguments.at_least_1, metavar="N", help=f"times per engine (default {ROUNDS})")
    parser.add_argument(
        "--record", nargs="?", type=Path, const=Path(), metavar="FILE",
        help="write records (default: a file named by grid, card and date)",
    )  # fmt: skip
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on with the sweep that wrote this file")
    arguments.add_json(parser)
    arguments.add_epilog(parser, EPILOG + "\n".join(f"  {name:<16} {engine.what}" for name, engine in ENGINES.items()))


def execute(args: argparse.Namespace) -> int:
    """Measure and print, or, without a GPU, check and count."""
    given = [f"--{name}" for name in ("grid", "engines", "only", "rounds", "record") if getattr(args, name) is not None]
    if args.resume and given:
        raise CommandError(f"--resume goes on as the sweep began: leave out {', '.join(given)}")
    if args.parts and (args.record or args.resume):
        raise CommandError(
            "records say what was timed, and a file of yours is no part of them: leave out --record and --resume, or "
            "--parts (with --json, times go to standard output)"
        )
    grid, only = args.grid or GRID, args.only or ""
    try:
        parts = read_parts(args.parts) if args.parts else {}
        engines = find_engines(beside(names_of(args.engines), parts), parts)
        loads = loads_of(grid, only)
    except (ValueError, TypeError) as error:
        raise CommandError(str(error)) from None
    if parts and not can_time():
        return check_parts([engine for engine in engines if runs(parts, engine.name)], args.json)
    if not can_time():
        if args.record or args.resume:
            raise CommandError("nothing to record: no time is taken without a GPU; leave out --record and --resume")
        return check_schedules(grid, loads, names_of(args.engines), args.json)
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        if args.resume:
            todo = resume(args.resume, find_engines, device)
        else:
            file = None if args.record is None else new_file(args.record, grid, gpu_of(device).name)
            todo = Sweep(grid, loads, tuple(engines), args.rounds or ROUNDS, file, only)
        return run_sweep(todo, device, args.json)
    except RecordError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"cannot write records to {error.filename}: {error.strerror}") from None


def check_parts(engines: Sequence[Engine], as_json: bool) -> int:
    """Engines with somebody else's parts, on small rows in Triton's interpreter; 1 if one is wrong."""
    checked: list[dict[str, Any]] = []
    for engine in engines:
        for load in LOADS:
            times, wrong = check_small(engine, load, torch.device("cpu"))
            errors = {} if times is None else {"max_err": times.max_err, "tolerance": times.tolerance}
            checked.append({"engine": engine.name, "dtype": load.name} | errors | ({"wrong": wrong} if wrong else {}))
    if as_json:
        print_json({"timed": False, "why": NO_TIMES, "lengths": LENGTHS, "checked": checked, "record": None})
    else:
        rows = [
            [
                of["engine"],
                of["dtype"],
                *(f"{of[name]:.1e}" if name in of else "-" for name in ("max_err", "tolerance")),
            ]
            for of in checked
        ]
        about = f"rows of {', '.join(map(str, LENGTHS))} tokens, against fp64"
        say(f"{NO_TIMES}\n{about}\n\n{table(['engine', 'dtype', 'max error', 'allowed'], rows)}")
    found = [f"{of['engine']} {of['dtype']}: {of['wrong']}" for of in checked if "wrong" in of]
    for line in found:
        complain(line)
    return 1 if found else 0


def names_of(engines: str | None) -> Sequence[str]:
    """The engines that an option names. A comma before OPTION= belongs to the engine: each option follows one.

    >>> names_of("row_local, workqueue:splits=20,tile=32,vllm")
    ['row_local', 'workqueue:splits=20,tile=32', 'vllm']
    """
    if engines is None:
        return DEFAULT_ENGINES
    return [name.strip() for name in re.split(r",(?!\s*\w+=)", engines)]


def new_file(asked: Path, grid: str, gpu: str) -> Path:
    """Where --record writes; a file that is there already is never added to by accident."""
    file = asked if asked.name else Path(f"{grid}-{gpu}-{time.strftime('%Y%m%d-%H%M%S')}.jsonl")
    if file.is_dir():
        raise CommandError(f"{file} is a folder: name a file in it")
    if file.exists():
        raise CommandError(f"{file} exists: name another file, or go on with it by --resume {file}")
    if not file.parent.is_dir():
        raise CommandError(f"{file.parent} is no folder: make it first, or name a file elsewhere")
    file.touch()  # that it can be written shows now, not after the first load
    return file


def run_sweep(todo: Sweep, device: torch.device, as_json: bool) -> int:
    """Load by load; the table at the end, and every wrong engine at once."""
    progress = Progress(len(todo.loads))
    runs: dict[str, Run] = {}
    loads: dict[str, Load] = {}
    timings: list[Timing] = []
    wrong: list[dict[str, str]] = []
    began = time.monotonic()

    def on_load(name: str) -> None:
        left_s = (time.monotonic() - began) / progress.done * (len(todo.loads) - progress.done) if progress.done else 0
        progress.step(
            f"{name}, {progress.done + 1} of {len(todo.loads)}" + (f", {left_s:.0f} s left" if left_s else "")
        )

    try:
        for run, load, measured in sweep(todo, device, on_load):
            runs[run.run], loads[load.name] = run, load
            timings += measured.timings
            for engine, reason in measured.wrong.items():
                wrong.append({"load": load.name, "engine": engine, "reason": reason})
                progress.end()
                complain(f"{load.name}: {engine} gets no record: {reason}")
    finally:
        progress.end()
    records = Records(runs, loads, tuple(timings))
    if as_json:
        print_json(as_dict(records, wrong) | {"grid": todo.grid, "record": str(todo.file) if todo.file else None})
    elif timings:
        say(as_table(records))
    if not as_json:
        kept = f"; records are in {todo.file}" if todo.file else ""
        if not todo.loads:
            ended = "nothing is left to measure"
        elif wrong:
            all_of_them = count_of(len(wrong) + len(timings), "result")
            ended = f"{len(wrong)} of {all_of_them} {verb(len(wrong), 'were')} wrong, without a time: see above"
        else:
            ended = "every time is of a result checked against fp64"
        say(ended + kept)
    return 1 if wrong else 0


def as_dict(records: Records, wrong: list[dict[str, str]]) -> dict[str, Any]:
    """All that was found, for programs: per load and engine the means of a step, us."""
    loads = []
    for load in records.loads.values():
        engines: list[dict[str, Any]] = []
        for timing in records.timings:
            if timing.load != load.name:
                continue
            if timing.refused is not None:
                engines.append({"engine": timing.engine, "refused": timing.refused})
                continue
            times = {name: records.mean(timing, name) for name in ("plan_us", "gpu_us", "enqueue_us", "wall_us")}
            rest = ("noise", "max_err", "tolerance", "workspace_bytes", "flags", "settings")
            engines.append({"engine": timing.engine} | times | {name: getattr(timing, name) for name in rest})
        sizes = {"rows": load.n_rows, "longest": load.longest, "kv_mib": load.kv_bytes / 2**20}
        loads.append({"load": load.name} | sizes | {"engines": engines})
    run = next(iter(records.runs.values()), None)
    return {"timed": True, "run": None if run is None else vars(run), "loads": loads, "wrong": wrong}

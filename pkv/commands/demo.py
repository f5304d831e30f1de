"""`pkv demo`: run every stage on one ragged batch, and hold each result against fp64.

Page ids are shuffled, a row is empty, and every slot and page that no token lies in is NaN. Exit code 1 if a stage is
wrong. On a CPU the time is that of Triton's interpreter, which says nothing about speed.
"""

import argparse
import textwrap
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pkv._triton import triton
from pkv.bench.accuracy import Yardstick
from pkv.bench.loads.batches import poisoned_batch
from pkv.cache.paged import PagedKVCache
from pkv.commands.arguments import DTYPES, add_json, lengths_of, seed_of
from pkv.commands.limits import refuse_what_does_not_fit, refuse_what_takes_long
from pkv.commands.machine import device_label
from pkv.commands.output import Progress, print_json, say, table
from pkv.commands.selftest import kernel_device
from pkv.decoding import plan, run
from pkv.plans.shape import Shape
from pkv.stages import STAGES, x_flashinfer
from pkv.stages.s4_adaptive import IN_ITS_PLACE
from pkv.stages.x_flashinfer_rules import why_not
from pkv.wording.counts import count_of

HELP = "run every stage on one ragged batch, and check each against fp64"
SHAPES = {"toy": (8, 2, 64, 16), "llama3-8b": (32, 8, 128, 16)}  # query heads, KV heads, head_dim, page size
SHAPE_ON = {"cpu": "toy", "cuda": "llama3-8b"}
LENGTHS = {"cpu": [100, 0, 37, 16, 250, 1], "cuda": [65536, 9000, 2100, 12000, 0, 1, 30000, 4096]}
INTERPRETED_TIME = "interpreter: not a speed"
GPU_TIME = "median of CUDA graph replays, cold L2, without planning"
HOST_TIME = "median, cold L2, without planning, launches from Python included"


@dataclass
class Result:
    """One stage on the batch; a stage that raised has its error instead of numbers."""

    stage: str
    max_err: float
    tolerance: float
    ok: bool
    max_err_lse: float
    tolerance_lse: float
    launches: int
    items: int
    programs: int
    kv_mib: float
    time_ms: float
    time_kind: str
    error: str | None = None
    note: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    on_cpu, on_gpu = (",".join(map(str, LENGTHS[device])) for device in ("cpu", "cuda"))
    parser.add_argument(
        "--lengths", type=lengths_of, metavar="N,N,...",
        help=f"tokens of each row (default on a CPU: {on_cpu}; on a GPU: {on_gpu})",
    )  # fmt: skip
    parser.add_argument(
        "--shape", choices=list(SHAPES), metavar="NAME",
        help=f"{', '.join(SHAPES)} (default on a CPU: {SHAPE_ON['cpu']}; on a GPU: {SHAPE_ON['cuda']})",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=DTYPES, default=DTYPES[0], metavar="NAME", help=f"{', '.join(DTYPES)} (default {DTYPES[0]})"
    )
    parser.add_argument(
        "--stage", choices=list(STAGES), action="append", metavar="NAME",
        help=f"only this one (may be repeated): {', '.join(STAGES)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=seed_of, default=0, metavar="N", help="of the random tokens and pages (default 0)"
    )
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Run, check, print; 1 if a stage is wrong."""
    device = kernel_device()
    shape_name = args.shape or SHAPE_ON[device.type]
    shape = Shape(*SHAPES[shape_name], args.dtype)
    lengths = LENGTHS[device.type] if args.lengths is None else args.lengths
    missing = {} if args.stage else {"flashinfer": x_flashinfer.unavailable() or why_not(shape)}
    left_out = {name: reason for name, reason in missing.items() if reason}
    names = [name for name in dict.fromkeys(args.stage or STAGES) if name not in left_out]
    smaller = "" if shape_name == "toy" else ", take --shape toy"
    refuse_what_does_not_fit(lengths, shape, device, f"shorten them{smaller}")
    if device.type == "cpu":
        remedy = f"shorten them{smaller}, run fewer stages (--stage), or use a machine with a GPU"
        refuse_what_takes_long({name: plan(lengths, shape, name) for name in names}, remedy)

    progress = Progress(len(names) + 1)
    try:
        progress.step("the batch, and its result in fp64")
        q, cache = poisoned_batch(lengths, shape, args.seed, device)
        yardstick = Yardstick(q, cache)
        results = []
        for name in names:
            progress.step(name)
            results.append(try_stage(name, q, cache, yardstick, lengths, shape))
    finally:
        progress.end()

    facts = {"device": device_label(), "shape": shape_name, "dtype": args.dtype, "lengths": lengths, "seed": args.seed}
    if args.json:
        print_json({"stages": [vars(result) for result in results], "left_out": left_out, **facts})
    else:
        say(as_text(results, left_out, shape, facts))
    return 0 if all(result.ok for result in results) else 1


def try_stage(
    name: str, q: torch.Tensor, cache: PagedKVCache, yardstick: Yardstick, lengths: list[int], shape: Shape
) -> Result:
    """Plan, run, check, time. Whatever a stage raises is its result: the others still run."""
    kind = INTERPRETED_TIME if q.device.type == "cpu" else GPU_TIME
    try:
        made = plan(lengths, shape, name)
        out = torch.full_like(q, torch.nan)  # what a stage leaves unwritten shows
        begin = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _, lse = run(q, cache, made, out=out)
        wall_ms = 1000 * (time.perf_counter() - begin)
        found = yardstick.measure(out, lse, rounds_weights=made.variant == "tensor-core")
        time_ms = wall_ms
        if q.device.type != "cpu":
            time_ms, kind = gpu_ms(lambda: run(q, cache, made, out=out))
    except Exception as error:
        nan = float("nan")
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Result(name, nan, nan, False, nan, nan, 0, 0, 0, nan, nan, kind, reason)
    made = IN_ITS_PLACE.known(made).get("plan", made)  # where FlashInfer does not work, what ran in its place
    counters = made.counters
    return Result(
        stage=name,
        max_err=found.max_err,
        tolerance=found.tolerance,
        ok=found.ok,
        max_err_lse=found.max_err_lse,
        tolerance_lse=found.tolerance_lse,
        launches=counters.launches,
        items=made.n_items,
        programs=counters.programs,
        kv_mib=counters.useful_kv_mib + counters.padded_kv_mib,
        time_ms=time_ms,
        time_kind=kind,
        note=" ".join(str(warning.message) for warning in caught),
    )


def gpu_ms(step: Callable[[], Any]) -> tuple[float, str]:
    """Milliseconds of a step that has run before, and what kind of time that is.

    A small step takes the GPU less time than Python takes to launch it, so it is recorded in a CUDA graph and replayed.
    L2 is overwritten before each replay, as other layers would.
    """
    graph = torch.cuda.CUDAGraph()
    kind = GPU_TIME
    try:
        with torch.cuda.graph(graph):
            step()
        step = graph.replay
    except RuntimeError:  # a stage that waits for the GPU cannot be recorded
        kind = HOST_TIME
    return float(triton.testing.do_bench(step, warmup=25, rep=100, return_mode="median")), kind


def row_of(result: Result) -> list[str]:
    """A line of the table; of a stage that raised there is nothing to tell but that."""
    if result.error:
        return [result.stage, "raised", "", "NO", "", "", "", ""]
    return [
        result.stage,
        f"{result.max_err:.1e}/{result.tolerance:.1e}",
        f"{result.max_err_lse:.1e}/{result.tolerance_lse:.1e}",
        "ok" if result.ok else "NO",
        str(result.launches),
        str(result.items),
        f"{result.kv_mib:.2f}",
        f"{result.time_ms:.0f}" if result.time_kind == INTERPRETED_TIME else f"{result.time_ms:.3f}",
    ]


def stages_of(kind: str, results: list[Result]) -> str:
    """Which stages were timed so, where not all were."""
    names = [result.stage for result in results if result.time_kind == kind]
    return "" if len(names) == len(results) else f" ({', '.join(names)})"


def short_list(lengths: list[int]) -> str:
    """The first dozen, and how many there are."""
    shown = ",".join(map(str, lengths[:12]))
    return shown if len(lengths) <= 12 else f"{shown},... ({len(lengths)} rows)"


def as_text(results: list[Result], left_out: dict[str, str], shape: Shape, facts: dict[str, Any]) -> str:
    """The table, and what it is about."""
    header = ["stage", "error/allowed", "lse error/allowed", "ok", "launches", "items", "KV MiB", "time ms"]
    rows = [row_of(result) for result in results]
    wrong = [result for result in results if not result.ok]
    stages = count_of(len(results), "stage")
    notes = [f"{name} is left out: {reason}" for name, reason in left_out.items()]
    notes += [f"{result.stage}: {result.note}" for result in results if result.note]
    return "\n".join(
        [
            f"{facts['shape']} on {facts['device']}: {shape}",
            f"lengths {short_list(facts['lengths'])}; seed {facts['seed']}; shuffled pages, NaN in unused slots",
            "",
            table(header, rows),
            "",
            "error: largest difference to fp64",
            *(f"time: {kind}{stages_of(kind, results)}" for kind in dict.fromkeys(r.time_kind for r in results)),
            *(textwrap.fill(note, 98) for note in notes),
            *(f"{result.stage} raised {result.error}" for result in wrong if result.error),
            f"{len(wrong)} of {stages} NOT ok" if wrong else "all " * (len(results) > 1) + f"{stages} ok",
        ]
    )

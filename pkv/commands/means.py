"""What a stage costs step by step: each step planned, counted and played, and the means of it all."""

import argparse
import dataclasses
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from pkv.commands import CommandError
from pkv.commands.arguments import OPTIONS
from pkv.commands.output import Progress, table
from pkv.commands.steps import Steps
from pkv.decoding import plan
from pkv.plans import Plan
from pkv.shapes import Shape
from pkv.simulation import Timeline, simulate

MOST_MARKS = 40  # of a progress bar


def shape_from(args: argparse.Namespace) -> Shape:
    """The shape that the arguments mean."""
    n_q_heads, n_kv_heads = args.heads
    try:
        return Shape(n_q_heads, n_kv_heads, args.head_dim, args.page_size, args.dtype)
    except (ValueError, TypeError) as error:
        raise CommandError(str(error)) from None


def plan_of(lengths: Sequence[int], args: argparse.Namespace) -> Plan:
    """The plan that the arguments mean; an option that the stage does not have is an error, not ignored."""
    options = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    try:
        return plan(lengths, shape_from(args), args.stage, **options)
    except (ValueError, TypeError) as error:
        raise CommandError(str(error)) from None
    except MemoryError:
        raise CommandError("the plan does not fit this machine's memory: take fewer --splits or rows") from None


def timeline_of(made: Plan) -> Timeline | None:
    """The plan played on its own GPU; None where nobody knows that GPU's costs, or there is no kernel to play."""
    return None if made.gpu.costs is None or made.stage == "reference" else simulate(made, made.gpu)


def numbers_of(made: Plan, timeline: Timeline | None) -> dict[str, Any]:
    """The counters, and what the timeline adds: NaN where it is not known, or no time passes."""
    nan = float("nan")
    idle = timeline.tail_idle if timeline is not None and len(timeline.spans) else nan
    gpu_ms = nan if timeline is None else timeline.gpu_ms
    return dataclasses.asdict(made.counters) | {"tail_idle": idle, "gpu_ms": gpu_ms}


def means_of(steps: Steps, args: argparse.Namespace) -> dict[str, float]:
    """Means over the steps; tail_idle over those in which anything runs, NaN where it is not known."""
    progress = StepProgress(len(steps.lengths))
    sums: dict[str, list[float]] = {}
    try:
        for lengths in steps.lengths:
            progress.step()
            made = plan_of(lengths, args)
            for name, value in numbers_of(made, timeline_of(made)).items():
                sums.setdefault(name, []).append(value)
    finally:
        progress.end()
    sums["tail_idle"] = [value for value in sums["tail_idle"] if value == value]
    return {name: fmean(values) if values else float("nan") for name, values in sums.items()}


class StepProgress:
    """Progress over any number of steps: the bar stays short."""

    def __init__(self, n_steps: int) -> None:
        self.n_steps, self.n_done = n_steps, 0
        self.bar = Progress(min(n_steps, MOST_MARKS))

    def step(self) -> None:
        """The next step begins."""
        if self.n_done * self.bar.total // self.n_steps >= self.bar.done:
            self.bar.step(f"step {self.n_done + 1} of {self.n_steps}")
        self.n_done += 1

    def end(self) -> None:
        """Take the line away."""
        self.bar.end()


def as_lines(numbers: dict[str, Any], heading: str) -> str:
    """The numbers as a table; what is not known has a dash."""
    rows = [[name, "-" if value != value else f"{value:,.3f}"] for name, value in numbers.items()]
    return table(["", heading], rows)

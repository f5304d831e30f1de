"""What a stage costs step by step: each step planned, counted and played, and the means of it all."""

import argparse
import dataclasses
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from pkv.cards.costs import before_us
from pkv.cards.simulation import Timeline, simulate
from pkv.commands import CommandError
from pkv.commands.arguments import OPTIONS
from pkv.commands.output import MOST_MARKS, Progress, table
from pkv.commands.steps import Steps
from pkv.decoding import plan
from pkv.plans.facts import Family
from pkv.plans.features import Features
from pkv.plans.plan import Plan
from pkv.plans.shape import Shape

SECONDS_BETWEEN = 1.0  # two lines of progress that show the same bar
PLANNING = "flashinfer_plan_ms"  # only of steps that FlashInfer plans; part of gpu_ms
GLOSSARY = """\
what the counters count, for one step of one layer; sizes in MiB:
  launches         decode and merge kernels
  programs         launched, over all KV heads
  empty_programs   programs without a token
  waves            programs / (SMs x programs that reside on one SM)
  cta_per_sm       items with tokens x KV heads / SMs
  useful_kv_mib    K and V of all tokens that a query sees
  padded_kv_mib    K and V read beyond those
  merge_state_mib  states of all items with tokens, of unsplit rows too
  merge_moved_mib  states written and read, of split rows only
  tail_idle        share of the SMs' time, from the first launch on, in which
                   they read nothing and merge nothing; simulated"""
TIME_GLOSSARY = """
  gpu_ms           the whole step, fixed costs included; simulated
  flashinfer_plan_ms  how much of gpu_ms is FlashInfer's planning, if any"""


def shape_from(args: argparse.Namespace) -> Shape:
    """The shape that the arguments mean."""
    n_q_heads, n_kv_heads = args.heads
    try:
        features = Features(window=args.window)
        return Shape(n_q_heads, n_kv_heads, args.head_dim, args.page_size, args.dtype, features=features)
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
    return None if made.gpu.costs is None or made.family is Family.TORCH else simulate(made, made.gpu)


def numbers_of(made: Plan, timeline: Timeline | None) -> dict[str, Any]:
    """The counters, and what the timeline adds: NaN where it is not known, or no time passes."""
    nan = float("nan")
    idle = timeline.tail_idle if timeline is not None and timeline.has_work else nan
    gpu_ms = nan if timeline is None else timeline.gpu_ms
    return dataclasses.asdict(made.counters) | {"tail_idle": idle, "gpu_ms": gpu_ms}


def planning_ms(timeline: Timeline) -> float:
    """How much of the timeline's gpu_ms is FlashInfer's own planning."""
    return before_us(timeline.plan, timeline.gpu.needed_costs())[0] / 1000


def means_of(steps: Steps, args: argparse.Namespace) -> dict[str, float]:
    """Means over the steps; tail_idle over those in which anything runs, NaN where it is not known. PLANNING if any."""
    progress = StepProgress(len(steps.lengths))
    sums: dict[str, list[float]] = {}
    planning: list[float] = []
    try:
        for lengths in steps.lengths:
            progress.step()
            made = plan_of(lengths, args)
            timeline = timeline_of(made)
            for name, value in numbers_of(made, timeline).items():
                sums.setdefault(name, []).append(value)
            planning.append(0.0 if timeline is None else planning_ms(timeline))
    finally:
        progress.end()
    if any(planning):
        sums[PLANNING] = planning
    sums["tail_idle"] = [value for value in sums["tail_idle"] if value == value]
    return {name: fmean(values) if values else float("nan") for name, values in sums.items()}


class StepProgress:
    """Progress over any number of steps: the bar stays short, and is not written more often than can be read."""

    def __init__(self, n_steps: int) -> None:
        self.n_steps, self.n_done = n_steps, 0
        self.bar = Progress(min(n_steps, MOST_MARKS))
        self.begun = self.shown = time.monotonic()

    def step(self) -> None:
        """The next step begins."""
        now = time.monotonic()
        is_next_mark = self.n_done * self.bar.total // self.n_steps >= self.bar.done
        if is_next_mark or now - self.shown > SECONDS_BETWEEN:
            (self.bar.step if is_next_mark else self.bar.show)(self.words(now - self.begun))
            self.shown = now
        self.n_done += 1

    def words(self, seconds: float) -> str:
        """Which step it is, and, once that can be known, how long the others will take; seconds: since the first."""
        step = f"step {self.n_done + 1:,} of {self.n_steps:,}"
        if not self.n_done or seconds < SECONDS_BETWEEN:
            return step
        left = seconds / self.n_done * (self.n_steps - self.n_done)
        return f"{step}, {left / 60:.0f} min left" if left > 90 else f"{step}, {left:.0f} s left"

    def end(self) -> None:
        """Take the line away."""
        self.bar.end()


def as_lines(numbers: dict[str, Any], heading: str) -> str:
    """The numbers as a table; what is not known has a dash."""
    rows = [[name, "-" if value != value else f"{value:,.3f}"] for name, value in numbers.items()]
    return table(["", heading], rows)

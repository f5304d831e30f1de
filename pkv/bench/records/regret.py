"""What a choice costs: the regret of policies and of fixed routes, on seeds that nothing was calibrated on.

A route is a way to serve a step: a stage that is always taken, or a policy that takes one. Its regret in a step is its
time over the time of the step's best route, less 1; the best is known only in hindsight. Times are of the kernels
alone: planning on the host is charged to nobody. regrets() and held_out() take them from pkv.simulate: that tells how
good a choice is as long as the simulator is right, which pkv.bench.fit.paper holds against measured times. What it does
not see, only measured_regrets() finds, which takes times from records.

A step in which the queue takes 100 us, FlashInfer 110 us and row_local 120 us: always the queue has a regret of 0,
always FlashInfer 10%, a policy that takes row_local 20%.

Calibration: the published thresholds and split counts were found on seed 20260622, and so is splits_for() here; the
costs were fitted to times of seed 20260623. Routes are judged on seeds 20260624 to 27.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from pkv.bench.loads.grids import Load
from pkv.bench.loads.published import runs_of
from pkv.bench.loads.traces import make_trace, steps_of
from pkv.bench.records.records import Records
from pkv.bench.records.summaries import Choices, always, measured_regret
from pkv.cards.costs import before_us, predict
from pkv.cards.known import resolve_gpu
from pkv.cards.simulation import simulate
from pkv.decoding import plan as plan_step
from pkv.plans.fields import int_lengths
from pkv.plans.gpu import GpuProfile
from pkv.plans.plan import Plan
from pkv.plans.shape import Shape
from pkv.stages.s4_adaptive import CANDIDATES, OWN, PAPER_SPLITS, POLICIES, Explanation, by_paper, cheapest, explain
from pkv.stages.x_flashinfer_rules import why_not

CALIBRATION_SEED, JUDGED_SEEDS = 20260622, (20260624, 20260625, 20260626, 20260627)
SPLITS = (8, 12, 16, 20, 24, 28, 32)
PAPERS_POLICY = "adaptive"  # the engine


@dataclass(frozen=True)
class Regret:
    """One route on some steps: mean and worst regret (0.1 is 10%), mean ms of a step, steps by the stage taken."""

    route: str
    mean: float
    worst: float
    ms: float
    taken: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Route:
    """What a route makes of one step: its plan, and the predicted and simulated ms of its kernels."""

    plan: Plan
    predicted_ms: float
    simulated_ms: float


def kernels_ms(plan: Plan, gpu: GpuProfile) -> float:
    """The simulated time of a step's kernels, without FlashInfer's planning, which published times hold."""
    planning_us, _ = before_us(plan, gpu.needed_costs())
    return simulate(plan, gpu).gpu_ms - planning_us / 1000


def routes_of(lengths: Sequence[int], shape: Shape, gpu: GpuProfile, splits: int | None = None) -> dict[str, Route]:
    """Every route of a step. splits: those of a queue whose splits were calibrated; None leaves that route out.

    A policy that takes a stage as it cuts by default is that stage's Route itself, so nothing is played twice.
    """

    def route(stage: str, splits: int | None = None) -> Route:
        options: dict[str, Any] = {} if splits is None else {"splits": splits}
        made = plan_step(lengths, shape, stage=stage, gpu=gpu, **options)
        return Route(made, predict(made, gpu).kernels_ms, kernels_ms(made, gpu))

    stages = {stage: route(stage) for stage in CANDIDATES if stage != "flashinfer" or why_not(shape) is None}
    routes = {f"always {stage}": found for stage, found in stages.items()}
    if splits is not None:
        routes["workqueue, calibrated splits"] = route("workqueue", splits=splits)
    papers = by_paper(int_lengths(lengths), shape, gpu, compare=False).chosen
    routes["policy paper"] = route(papers, splits=PAPER_SPLITS[papers]) if papers in PAPER_SPLITS else stages[papers]
    routes["policy cost"] = stages[cheapest({stage: found.predicted_ms for stage, found in stages.items()})]
    return routes


def regrets(
    steps: Sequence[Sequence[int]], shape: Shape, gpu: "str | GpuProfile" = "rtx3060", splits: int | None = None
) -> list[Regret]:
    """The regret of every route over the steps that have tokens, least mean first; see routes_of() for splits."""
    profile = resolve_gpu(gpu)
    sums: dict[str, Regret] = {}
    n_steps = 0
    for lengths, n in runs_of([list(step) for step in steps if any(step)]):
        routes = routes_of(lengths, shape, profile, splits)
        best = min(found.simulated_ms for found in routes.values())
        n_steps += n
        for route, found in routes.items():
            old = sums.get(route, Regret(route, 0.0, 0.0, 0.0))
            ms, stage = found.simulated_ms, found.plan.stage
            regret = ms / best - 1
            taken = old.taken | {stage: old.taken.get(stage, 0) + n}
            sums[route] = Regret(route, old.mean + n * regret, max(old.worst, regret), old.ms + n * ms, taken)
    means = [Regret(r.route, r.mean / n_steps, r.worst, r.ms / n_steps, r.taken) for r in sums.values()]
    return sorted(means, key=lambda regret: regret.mean)


def splits_for(trace: str, shape: Shape, n_requests: int, max_active: int, n_steps: int, gpu: str = "rtx3060") -> int:
    """Which of SPLITS serves the queue best on the calibration seed of a trace."""
    profile = resolve_gpu(gpu)
    runs = runs_of(steps_of(make_trace(trace, CALIBRATION_SEED, n_requests, max_active), max_active, n_steps))

    def total(splits: int) -> float:
        plans = ((plan_step(step, shape, stage="workqueue", splits=splits, gpu=profile), n) for step, n in runs)
        return sum(kernels_ms(made, profile) * n for made, n in plans)

    return min(SPLITS, key=total)


def held_out(
    trace: str, shape: Shape, n_requests: int, max_active: int, n_steps: int, gpu: str = "rtx3060"
) -> list[Regret]:
    """Every route on the judged seeds of a trace, with splits calibrated on another seed."""
    splits = splits_for(trace, shape, n_requests, max_active, n_steps, gpu)
    traces = [make_trace(trace, seed, n_requests, max_active) for seed in JUDGED_SEEDS]
    steps = [step for requests in traces for step in steps_of(requests, max_active, n_steps)]
    return regrets(steps, shape, gpu, splits)


def measured_regrets(
    records: Records, profile: GpuProfile, loads: Collection[str]
) -> list[tuple[str, str, float, float]]:
    """Every route's regret by measured times: (route, group of loads, mean, worst), worst routes last.

    loads: names of those to judge by; profile: the card of the records, with the costs that policy "cost" is to choose
    by. Routes are both policies and every stage that is always taken. FlashInfer's count where it was timed on all
    loads.
    """
    timed = {key for key, timing in records.latest().items() if timing.refused is None}
    judged = [records.loads[name] for name in comparable(timed, [name for name in records.loads if name in loads])]
    choices, stages = choices_of(timed, judged, profile, POLICIES)
    return sorted(measured_regret(records, choices, stages), key=lambda entry: (entry[1], entry[2]))


def choices_of(
    timed: Collection[tuple[str, str]], loads: Sequence[Load], profile: GpuProfile, policies: Sequence[str]
) -> tuple[dict[str, Choices], list[str]]:
    """(what each route takes, the stages that were timed on all loads). timed: (load, engine).

    A policy takes a stage, as that cuts rows by default. But the paper's queue has splits of the paper's own, so its
    policy is the engine that ran with them, where that was timed.
    """

    def always_taking(engine: str) -> Choices:
        return {key: name for load in loads for key, name in always(load, engine).items()}

    stages = [stage for stage in CANDIDATES if all((load.name, stage) in timed for load in loads)]
    choices: dict[str, Choices] = {f"policy {policy}": chosen_by(policy, loads, profile, stages) for policy in policies}
    if "policy paper" in choices and all((load.name, PAPERS_POLICY) in timed for load in loads):
        choices["policy paper"] = always_taking(PAPERS_POLICY)
    return choices | {f"always {stage}": always_taking(stage) for stage in stages}, stages


def comparable(timed: Collection[tuple[str, str]], loads: Sequence[str]) -> list[str]:
    """The loads that each stage of ours was timed on, of the stages that were timed at all.

    timed: (load, stage). Records may be older than a stage, so none needs to hold all; but none of the loads will do
    where the paper's own stages were not timed, which its policy chooses from.

    >>> comparable({("a", "workqueue"), ("a", "length_buckets"), ("b", "workqueue")}, ["a", "b"])
    ['a']
    """
    own = [stage for stage in OWN if any((load, stage) in timed for load in loads)]
    return [load for load in loads if all((load, stage) in timed for stage in (*own, *PAPER_SPLITS))]


def chosen_by(
    policy: str, loads: Sequence[Load], profile: GpuProfile, stages: Sequence[str]
) -> dict[tuple[str, int], str]:
    """The stage that a policy takes at each step where there are only those in `stages`."""
    chosen = {}
    for load in loads:
        for number, step in enumerate(load.steps):
            if any(step.lengths):
                found = explain(step.lengths, load.shape, policy=policy, gpu=profile)
                chosen[load.name, number] = taken_of(found, stages)
    return chosen


def taken_of(found: Explanation, stages: Collection[str]) -> str:
    """What a policy takes, where there are only the stages in `stages`."""
    if found.chosen in stages:
        return found.chosen
    if found.policy == "paper":
        return found.fallback
    predicted = {entry.stage: entry.prediction.kernels_ms for entry in found.candidates if entry.prediction}
    return cheapest({stage: ms for stage, ms in predicted.items() if stage in stages})

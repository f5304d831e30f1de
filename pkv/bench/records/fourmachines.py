"""What each stage gains over FlashInfer's tensor-core kernel on four machines, on the paper's traces.

The paper's RTX 3060 as published and as simulated, 28 SMs of an H200, and a whole one. On each machine a ratio: the
time of FlashInfer's kernel over the stage's. Published 2.4 ms and 2.2 ms are 1.09; less FlashInfer's planning, which
is fitted, 2.3 over 2.2, 1.05. Simulated and recorded times are of the kernels alone.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pkv.bench.loads.grids import PAPER_RUNS, PAPER_SEEDS, PAPER_TRACES, trace_load
from pkv.bench.loads.published import GPU, published
from pkv.bench.records.beside import RIVAL_HERE, RIVAL_PUBLISHED
from pkv.bench.records.records import Records
from pkv.bench.records.results import Result, grouped, machine_of, parts, results_of
from pkv.cards.costs import predict
from pkv.cards.files import read_shipped
from pkv.cards.known import profile_of
from pkv.cards.simulation import simulate
from pkv.decoding import plan as plan_step
from pkv.plans.gpu import GpuProfile
from pkv.stages.s4_adaptive import OWN

PUBLISHED, SIMULATED = "RTX 3060, published", "RTX 3060, simulated"
STAGES = tuple(OWN)


@dataclass(frozen=True)
class Machine:
    """Ratios by load and stage. noise: of a ratio, 0 where it is not known; less_planning: of the published ones."""

    name: str
    ratios: dict[str, dict[str, float]]
    noise: dict[str, dict[str, float]] = field(default_factory=dict)
    less_planning: dict[str, dict[str, float]] = field(default_factory=dict)


def four_machines(records: Records) -> list[Machine]:
    """The paper's card, published and simulated, then every machine that recorded the paper's grid, few SMs first."""
    found = [as_published(), as_simulated()]
    there = {machine: part for (machine, grid), part in parts(records).items() if grid == "paper"}
    n_sms = {machine: next(iter(part.runs.values())).gpu["n_sms"] for machine, part in there.items()}
    for machine in sorted(there, key=lambda machine: n_sms[machine]):
        found.append(as_recorded(there[machine]))
    return [machine for machine in found if machine.ratios]


def card() -> tuple[GpuProfile, dict[str, Any]]:
    """The shipped profile of the paper's card, whatever the user's own of that name says, and all its fields."""
    fields = read_shipped(GPU)
    return profile_of(GPU, fields), fields


def as_published() -> Machine:
    """Means over the published seeds."""
    planning_ms = card()[0].needed_costs().flashinfer_plan_us / 1000
    times: dict[str, dict[str, list[float]]] = {}
    for row in published():
        made = row.configuration
        if row.log.startswith("seed_"):
            of_load = times.setdefault(f"{made.trace} B{made.max_active}", {})
            of_load.setdefault(made.engine, []).append(row.gpu_ms)
    means = {load: {engine: float(np.mean(ms)) for engine, ms in of.items()} for load, of in times.items()}

    def over_rival(less_ms: float) -> dict[str, dict[str, float]]:
        return {
            load: {stage: (of[RIVAL_PUBLISHED] - less_ms) / of[stage] for stage in STAGES if stage in of}
            for load, of in means.items()
            if RIVAL_PUBLISHED in of
        }

    return Machine(PUBLISHED, over_rival(0.0), less_planning=over_rival(planning_ms))


def n_published_seeds() -> int:
    """How many seeds were published."""
    return len({row.configuration.seed for row in published() if row.log.startswith("seed_")})


@functools.cache
def as_simulated() -> Machine:
    """Every stage with its own cut, on the costs of the paper's kernels; means over the paper's seeds."""
    profile, fields = card()
    error = float(fields["costs_source"]["errors"]["judge"]["median"])
    ratios = {}
    for rows in PAPER_RUNS:
        for trace in PAPER_TRACES:
            us = {stage: _simulated_us(trace, rows, stage, profile) for stage in ("flashinfer", *STAGES)}
            ratios[f"{trace} B{rows}"] = {stage: us["flashinfer"] / us[stage] for stage in STAGES}
    noise = {load: dict.fromkeys(of, error) for load, of in ratios.items()}
    return Machine(SIMULATED, ratios, noise)


def _simulated_us(trace: str, rows: int, stage: str, profile: GpuProfile) -> float:
    total = 0.0
    for seed in PAPER_SEEDS:
        load = trace_load(trace, rows, seed)
        made = [plan_step(step.lengths, load.shape, stage=stage, gpu=profile) for step in load.steps]
        us = [1000 * (simulate(plan, profile).gpu_ms - predict(plan, profile).plan) for plan in made]
        total += float(np.average(us, weights=[step.weight for step in load.steps]))
    return total / len(PAPER_SEEDS)


def as_recorded(records: Records) -> Machine:
    """Measured on one machine; means over the seeds in its records."""
    ratios: dict[str, dict[str, float]] = {}
    noise: dict[str, dict[str, float]] = {}
    for load, of in grouped(results_of(records)).items():
        if RIVAL_HERE in of:
            for stage in STAGES:
                if stage in of:
                    ratios.setdefault(load, {})[stage] = of[RIVAL_HERE].gpu_us / of[stage].gpu_us
                    noise.setdefault(load, {})[stage] = _noise(of[RIVAL_HERE], of[stage])
    return Machine(machine_of(next(iter(records.runs.values()))).removeprefix("NVIDIA "), ratios, noise)


def _noise(*results: Result) -> float:
    return max((made.noise for made in results if made.noise is not None), default=0.0)

"""Fit a card's costs to measured GPU times of plans.

The fit makes the sum of squared log ratios of predicted over measured small; a ratio beyond FAR counts less than its
square, so that a time which the model cannot explain does not bend all costs.

Not every cost shows in every record's times. The slopes' singular values at the optimum, of the H200's records: 10 for
the memory's rate; 1.1 to 0.4 for the rates of a program and an SM, a FlashInfer item, and item_us + launch_us; then
0.11 for step_us, 0.03 for item_us against launch_us, 0.02 for the rate of FlashInfer's programs, 0.005 for a merge's.
On 28 of its SMs: 9 to 0.5 for the rates of memory and programs, FlashInfer's too, launch_us, and a FlashInfer item;
0.13 for step_us; 0.017 and less for item_us and the rates of a merge and an SM. What is below PRIOR stays near where
the fit began: that moves no time, and holds the others still.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pkv.bench.fit.least_squares import Floats, least_squares, rounded
from pkv.cards.costs import predict
from pkv.plans.facts import Family
from pkv.plans.gpu import Costs
from pkv.plans.plan import Plan

ALWAYS = ("memory_gb_per_s", "sm_gb_per_s", "program_gb_per_s", "merge_gb_per_s", "item_us", "launch_us", "step_us")
OF_FLASHINFER = ("flashinfer_program_gb_per_s", "flashinfer_item_us")
FAR = 0.1  # log ratio
PRIOR = (
    0.03  # a cost lies within a factor of e of where the fit begins as surely as a time within 3% of what is predicted
)
Timed = Sequence[tuple[Plan, float]]  # a plan, and us on the GPU


def fit(timed: Timed) -> Costs:
    """The costs that fit the times best; always the same for the same times.

    ValueError where there are too few of them, or one is no time.
    """
    names = [*ALWAYS, *(OF_FLASHINFER if any(plan.family is Family.FLASHINFER for plan, _ in timed) else ())]
    if len(timed) < 2 * (len(names) + 1):
        raise ValueError(
            f"{len(timed)} times of pkv's stages are too few to fit {len(names)} costs: measure more loads, or more "
            "stages on each"
        )
    if any(not 0 < us < np.inf for _, us in timed):
        raise ValueError("a GPU time must be a finite number of us above 0: measure that load again")
    start = start_of(timed)
    begin = np.log([start[name] for name in names])

    def costs_at(point: Floats) -> dict[str, Any]:
        return dict(zip(names, np.exp(point).tolist(), strict=True))

    def residuals(point: Floats) -> Floats:
        costs = Costs(**costs_at(point))
        log_ratios = np.log([predicted_us(plan, costs) / us for plan, us in timed])
        return np.concatenate([log_ratios, PRIOR * (point - begin)])

    best = costs_at(least_squares(residuals, begin, FAR))
    stored: dict[str, Any] = {name: rounded(value) for name, value in best.items()}
    return Costs(**stored)


def start_of(timed: Timed) -> dict[str, float]:
    """Where the fit begins: rates as the fastest step has them, the rest as on any card."""
    n_sms = timed[0][0].gpu.n_sms
    memory = 1.1 * max(kv_bytes(plan) / us / 1000 for plan, us in timed)
    program = memory / n_sms / 2
    return {
        "memory_gb_per_s": memory,
        "program_gb_per_s": program,
        "merge_gb_per_s": 2 * program,
        "item_us": 2.0,
        "launch_us": 2.0,
        "step_us": 3.0,
        "flashinfer_program_gb_per_s": 2 * program,
        "flashinfer_item_us": 3.0,
        "sm_gb_per_s": 2 * memory / n_sms,
    }


def kv_bytes(plan: Plan) -> float:
    """K and V of a step."""
    return float(plan.lengths.sum(dtype=np.int64)) * plan.shape.kv_bytes_per_token


def predicted_us(plan: Plan, costs: Costs) -> float:
    """A step's kernels, without FlashInfer's planning: GPU times hold none."""
    return 1000 * predict(plan, replace(plan.gpu, costs=costs)).kernels_ms

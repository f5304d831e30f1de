"""Fit a card's costs to measured GPU times of plans.

The fit makes the sum of squared log ratios of predicted over measured small; a ratio beyond FAR counts less than its
square, so that a time which the model cannot explain does not bend all costs. Of a cost that no time depends on, it
returns where it began.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pkv.bench.fitting import Floats, least_squares, rounded
from pkv.costs import predict
from pkv.gpus import Costs
from pkv.plans import Plan

ALWAYS = ("memory_gb_per_s", "sm_gb_per_s", "program_gb_per_s", "merge_gb_per_s", "item_us", "launch_us", "step_us")
OF_FLASHINFER = ("flashinfer_program_gb_per_s", "flashinfer_item_us")
FAR = 0.1  # log ratio
PRIOR = 0.003  # how strongly a cost is held where the fit began, against one time's log ratio
Timed = Sequence[tuple[Plan, float]]  # a plan, and us on the GPU


def fit(timed: Timed) -> Costs:
    """The costs that fit the times best; always the same for the same times.

    ValueError where there are too few of them, or one is no time.
    """
    names = [*ALWAYS, *(OF_FLASHINFER if any(plan.stage == "flashinfer" for plan, _ in timed) else ())]
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
        return np.concatenate([softened(log_ratios), PRIOR * (point - begin)])

    best = costs_at(least_squares(residuals, begin))
    stored: dict[str, Any] = {name: rounded(value) for name, value in best.items()}
    return Costs(**stored)


def softened(ratios: Floats) -> Floats:
    """Log ratios whose squares grow, beyond FAR, only as the ratios do.

    >>> softened(np.array([0.01, -0.1, 1.0])).round(3).tolist()
    [0.01, -0.091, 0.425]
    """
    return np.sign(ratios) * FAR * np.sqrt(2 * (np.sqrt(1 + (ratios / FAR) ** 2) - 1))


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

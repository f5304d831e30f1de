"""Fit a profile's costs to published times, and say how far the simulator is from them.

python -m pkv.bench.fit.paper rtx3060            # fit, and print every row: published, simulated, error
python -m pkv.bench.fit.paper rtx3060 --write    # and store costs and errors in pkv/data/gpus/rtx3060.json

Six costs are fitted, to make the sum of squared log ratios of simulated over published small on the rows whose role is
"fit" (pkv/bench/loads/published.py); step_us stays 0, where a fit would put it.

The slopes' singular values there are 3.0 for the rate of a program, 1.5 for the memory's, 0.4 for FlashInfer's planning
and 0.15 for the rate of its programs, but 0.09 for item_us and 0.01 for launch_us, where times are told to 3%: of those
two any other value that leaves the times as they are would do as well.
"""

import argparse
import json
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from pkv.bench.fit.least_squares import Floats, least_squares, rounded
from pkv.bench.loads.published import (
    GPU,
    PROGRAMS_PER_SM,
    ROLES,
    Configuration,
    Row,
    isolated_ms,
    mean_of_steps,
    published,
    simulated_ms,
)
from pkv.cards.costs import predict
from pkv.cards.known import load_gpu
from pkv.cards.simulation import simulate
from pkv.plans.gpu import Costs, GpuProfile

START = {
    "memory_gb_per_s": 310.0,
    "program_gb_per_s": 6.0,
    "item_us": 2.0,
    "launch_us": 4.0,
    "flashinfer_plan_us": 80.0,
    "flashinfer_program_gb_per_s": 20.0,
}
CLEAR_GAP = 1.05  # two engines of one log that are less apart may come in either order
PROFILE = Path(__file__).parents[2] / "data" / "gpus" / f"{GPU}.json"


def fit(rows: tuple[Row, ...]) -> Costs:
    """The costs that fit the published times of the rows to fit best; always the same for the same rows."""
    rows = tuple(row for row in rows if row.role == "fit")

    def costs_at(point: Floats) -> Costs:
        return Costs(**dict(zip(START, np.exp(point).tolist(), strict=True)), programs_per_sm=PROGRAMS_PER_SM)

    def log_ratios(point: Floats) -> Floats:
        times = simulated(rows, costs_at(point))
        return np.log([times[row.configuration] / row.gpu_ms for row in rows])

    best = least_squares(log_ratios, np.log(list(START.values())))
    fitted = costs_at(best)
    return Costs(**{name: rounded(getattr(fitted, name)) for name in START}, programs_per_sm=PROGRAMS_PER_SM)


def with_costs(costs: Costs) -> GpuProfile:
    """The card with these costs in place of its own."""
    card = load_gpu(GPU)
    return GpuProfile(card.name, card.arch, card.n_sms, costs)


def simulated(rows: tuple[Row, ...], costs: Costs) -> dict[Configuration, float]:
    """Simulated mean ms of each configuration among the rows."""
    profile = with_costs(costs)
    return {c: simulated_ms(c, profile) for c in dict.fromkeys(row.configuration for row in rows)}


def errors(rows: tuple[Row, ...], times: dict[Configuration, float]) -> dict[str, dict[str, float]]:
    """{role: rows, median and worst error}: an error is |simulated / published - 1|."""
    found = {}
    for role in ROLES:
        mine = [abs(times[row.configuration] / row.gpu_ms - 1) for row in rows if row.role == role]
        found[role] = {"rows": len(mine), "median": round(float(np.median(mine)), 4), "worst": round(max(mine), 4)}
    return found


def clear_orders(rows: tuple[Row, ...], times: dict[Configuration, float]) -> list[tuple[Row, Row, bool]]:
    """(faster, slower, is it so when simulated?) of any two engines of one log that are clearly apart."""
    pairs = []
    for one, other in combinations(rows, 2):
        faster, slower = sorted((one, other), key=lambda row: row.gpu_ms)
        if one.log == other.log and slower.gpu_ms > CLEAR_GAP * faster.gpu_ms:
            pairs.append((faster, slower, times[faster.configuration] < times[slower.configuration]))
    return pairs


def as_text(rows: tuple[Row, ...], costs: Costs) -> str:
    """Everything that one would ask of a fit, as a table."""
    times = simulated(rows, costs)
    lines = [f"{name:>28} {value}" for name, value in asdict(costs).items()]
    lines.append(f"{'log':<36} {'engine':<15} {'splits':>6} {'published':>9} {'simulated':>9} {'error':>7}  role")
    for row in sorted(rows, key=lambda row: ROLES.index(row.role)):
        c, ms = row.configuration, times[row.configuration]
        lines.append(
            f"{row.log.removesuffix('.txt'):<36} {c.engine:<15} {c.splits or '':>6} {row.gpu_ms:>9.3f} {ms:>9.3f} "
            f"{ms / row.gpu_ms - 1:>+7.1%}  {row.role}"
        )
    for role, found in errors(rows, times).items():
        lines.append(f"{role:>6}: {found['rows']} rows, median error {found['median']:.2%}, worst {found['worst']:.2%}")
    orders = clear_orders(rows, times)
    lines.append(
        f"engines of one log more than 5% apart: {sum(right for *_, right in orders)} of {len(orders)} in order"
    )
    for tokens, published_ms, ms in isolated_ms(with_costs(costs)):
        error = f"{ms / published_ms - 1:+.1%}"
        lines.append(f"isolated, one row of {tokens}: published {published_ms:.3f} ms, simulated {ms:.3f}, {error}")
    for run in beyond(with_costs(costs)):
        c = run.configuration
        lines.append(
            f"{c.trace}, {c.max_active} active, {c.engine:<10}: {run.gpu_ms:.3f} ms simulated, "
            f"{run.kernels_ms:.3f} without planning, SMs {run.idle:.1%} idle"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Unpublished:
    """What the model says of a run without a published time, as means per step.

    kernels_ms: without FlashInfer's planning. idle: the share of the SMs' time in which they read nothing.
    """

    configuration: Configuration
    gpu_ms: float
    kernels_ms: float
    idle: float


def beyond(profile: GpuProfile) -> list[Unpublished]:
    """Bimodal rows at 4 active requests, of which there is no log, and at 8; FlashInfer, then the queue."""
    found = []
    for max_active, splits in ((4, 28), (8, 20)):
        base = Configuration("bimodal", 20260623, 24, max_active, 48, "flashinfer")
        for c in (base, replace(base, engine="workqueue", splits=splits)):
            ms = simulated_ms(c, profile)
            planning = mean_of_steps(c, lambda plan: predict(plan, profile).plan)
            idle = mean_of_steps(c, lambda plan: simulate(plan, profile).tail_idle)
            found.append(Unpublished(c, ms, ms - planning, idle))
    return found


def stored(rows: tuple[Row, ...], costs: Costs) -> dict[str, Any]:
    """What the profile keeps: the costs, and where they come from."""
    times = simulated(rows, costs)
    return {
        "costs": {name: value for name, value in asdict(costs).items() if value is not None},
        "costs_source": {
            "times": "pkv/data/paper/rtx3060_published.csv",
            "fitted_rows": sorted({f"{row.log} {row.configuration.engine}" for row in rows if row.role == "fit"}),
            "errors": errors(rows, times),
            "command": "python -m pkv.bench.fit.paper rtx3060 --write",
        },
    }


def main(argv: list[str] | None = None) -> None:
    """The command above; argv: its arguments, None for the process's own."""
    parser = argparse.ArgumentParser(prog="python -m pkv.bench.fit.paper", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("profile", choices=[GPU], help="the card; only this one has published times")
    parser.add_argument("--write", action="store_true", help=f"store the costs in {PROFILE.name}")
    arguments = parser.parse_args(argv)
    rows = published()
    costs = fit(rows)
    print(as_text(rows, costs))
    if arguments.write:
        fields = json.loads(PROFILE.read_text(encoding="utf-8")) | stored(rows, costs)
        PROFILE.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

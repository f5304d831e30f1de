"""Calibrate a GPU: from measured times of pkv's own stages, and FlashInfer's, to the costs that predict them.

    records of LOADS x ENGINES -> which tile -> costs fitted on some loads -> errors on the others -> profile

Which loads are fitted is decided before any fit, by a rule that looks at no time. Of the paper's runs the first seed is
fitted, and the other seeds are **held out**: they only judge. Other loads are put in the order of their K and V bytes,
and every third is held out. A row is one engine on one step; of a load's many steps three are fitted, and all judge.

>>> [load.name for load in LOADS][:3]
['equal(1,4k)', 'equal(1,64k)', 'bimodal(8,16k)']
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pkv.bench.costfit import fit, predicted_us
from pkv.bench.loads import PAPER_SEEDS, Load, load
from pkv.bench.records import Records
from pkv.decoding import plan as plan_step
from pkv.gpus import DEFAULT_TILE, TILES, GpuProfile
from pkv.plans import Plan
from pkv.stages.s4_adaptive import CANDIDATES

LOADS = (
    load("equal", 1, 4096),
    load("equal", 1, 65536),
    load("bimodal", 8, 16384),
    load("uniform", 8, 32768),
    load("short", 64),
    load("one_long", 64, 16384),  # FlashInfer keeps the long row whole, which shows what one of its programs reads
    load("equal", 1, 16384),
    load("zipf", 8, 65536),
    load("bimodal", 4, 16384),
    load("equal", 4, 32768),
    load("uniform", 32, 8192),
    load("short", 128),
)
QUICK_LOADS = LOADS[:6]
TILED = ("row_local", "workqueue")  # the stages that tiles are compared on
ENGINES = (*CANDIDATES, "row_local:splits=4", *(f"{stage}:tile={tile}" for tile in TILES[1:] for stage in TILED))
ROUNDS, QUICK_ROUNDS = 20, 10
HELD_OUT_EVERY = 3
FITTED_STEPS = 3  # of one load
ROLES = ("fit", "held out")


@dataclass(frozen=True)
class Row:
    """One engine on one step of a load: the plan that ran, us on the GPU, and what the step is for."""

    load: str
    engine: str
    plan: Plan
    us: float
    weight: int
    role: str
    fitted: bool


@dataclass(frozen=True)
class Residual:
    """One engine on one load, mean of a step in us: measured and predicted."""

    load: str
    engine: str
    role: str
    measured_us: float
    predicted_us: float

    @property
    def error(self) -> float:
        return self.predicted_us / self.measured_us - 1


@dataclass(frozen=True)
class Calibration:
    """What was found. tile_times: {tile: its time over tile 16's, geometric mean}; noise: of one such time."""

    profile: GpuProfile
    residuals: tuple[Residual, ...]
    tile_times: dict[int, float]
    noise: float

    def errors(self) -> dict[str, dict[str, float]]:
        """{role: rows, median and worst |error|}, roles without rows left out."""
        found = {}
        for role in ROLES:
            mine = [abs(residual.error) for residual in self.residuals if residual.role == role]
            if mine:
                found[role] = {
                    "rows": len(mine),
                    "median": round(float(np.median(mine)), 4),
                    "worst": round(max(mine), 4),
                }
        return found

    def loads(self, role: str) -> list[str]:
        """The loads of a role, in order."""
        return sorted({residual.load for residual in self.residuals if residual.role == role})


def calibrate(records: Records, card: GpuProfile) -> Calibration:
    """The profile of `card` with the tile and the costs that fit the records' times; the same records give the same.

    ValueError where the records hold too few times of pkv's stages, on loads to fit, for so many costs.
    """
    tile, tile_times, noise = best_tile(records)
    card = replace(card, tile=tile, costs=None)
    rows = rows_of(records, card)
    costs = fit([(row.plan, row.us) for row in rows if row.fitted])
    profile = replace(card, costs=costs)
    return Calibration(profile, tuple(residuals_of(rows, profile)), tile_times, noise)


def role_of(loads: Iterable[Load]) -> dict[str, str]:
    """{load: "fit" or "held out"}, by the rule of this file."""
    loads = list(loads)
    seeded = {each.name: ROLES[each.seed != PAPER_SEEDS[0]] for each in loads if each.seed in PAPER_SEEDS}
    others = sorted((each for each in loads if each.name not in seeded), key=lambda each: (each.kv_bytes, each.name))
    return seeded | {each.name: ROLES[n % HELD_OUT_EVERY == 1] for n, each in enumerate(others)}


def rows_of(records: Records, card: GpuProfile) -> list[Row]:
    """All steps that stages were timed on with the card's tile, FlashInfer's among them; empty steps are left out."""
    timings = [timing for timing in records.latest().values() if timing.refused is None]
    roles = role_of(records.loads[name] for name in dict.fromkeys(timing.load for timing in timings))
    rows = []
    for timing in timings:
        steps = records.loads[timing.load].steps
        chosen = set(np.linspace(0, len(steps) - 1, min(FITTED_STEPS, len(steps))).round().astype(int).tolist())
        for number, (step, us) in enumerate(zip(steps, timing.gpu_us, strict=True)):
            plan = plan_as(timing.engine, step.lengths, records.loads[timing.load], card)
            if plan is None or not plan.launches or not us or (plan.stage != "flashinfer" and plan.tile != card.tile):
                continue
            role = roles[timing.load]
            rows.append(
                Row(timing.load, timing.engine, plan, us, step.weight, role, role == "fit" and number in chosen)
            )
    return rows


def plan_as(engine: str, lengths: Sequence[int], of: Load, card: GpuProfile) -> Plan | None:
    """The plan that an engine runs, from its name; None where it is none of the stages that costs are about."""
    stage, _, words = engine.partition(":")
    if stage not in CANDIDATES:
        return None
    options: dict[str, Any] = dict(word.split("=") for word in words.split(",") if word)
    numbers = {name: int(value) if value.isdecimal() else value for name, value in options.items()}
    return plan_step(lengths, of.shape, stage=stage, gpu=card, **numbers)


def best_tile(records: Records) -> tuple[int, dict[int, float], float]:
    """(tile, {tile: time over the default's}, noise): another than the default only where it gains more than noise."""
    timings = {key: timing for key, timing in records.latest().items() if timing.refused is None}
    ratios: dict[int, list[float]] = {}
    noises: list[float] = []
    for (name, engine), timing in timings.items():
        stage, _, words = engine.partition(":tile=")
        usual = timings.get((name, stage))
        if stage in TILED and words.isdecimal() and usual is not None:
            ratios.setdefault(int(words), []).append(records.mean(timing) / records.mean(usual))
            noises += [timing.noise or 0.0, usual.noise or 0.0]
    times = {DEFAULT_TILE: 1.0} | {tile: float(np.exp(np.mean(np.log(ratios[tile])))) for tile in sorted(ratios)}
    noise = float(np.median(noises)) if noises else 0.0
    fastest = min(times, key=times.__getitem__)
    return (fastest if times[fastest] < 1 - noise else DEFAULT_TILE), times, noise


def residuals_of(rows: Sequence[Row], profile: GpuProfile) -> list[Residual]:
    """Means of each load and engine, weighted as the load says."""
    assert profile.costs is not None
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.load, row.engine), []).append(row)
    found = []
    for (name, engine), mine in groups.items():
        weights = [row.weight for row in mine]
        predicted = np.average([predicted_us(row.plan, profile.costs) for row in mine], weights=weights)
        measured = np.average([row.us for row in mine], weights=weights)
        found.append(Residual(name, engine, mine[0].role, float(measured), float(predicted)))
    return found

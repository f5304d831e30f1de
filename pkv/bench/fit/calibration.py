"""Calibrate a GPU: from measured times of pkv's own stages, and FlashInfer's, to the costs that predict them.

    records of LOADS x ENGINES -> which tile -> costs fitted on some loads -> errors on the others -> profile

Which loads are fitted is decided before any fit, by a rule that looks at no time. Of the paper's runs the first seed is
fitted, and the other seeds are **held out**: they only judge. Other loads are put in the order of their K and V bytes,
and every third is held out. A row is one engine on one step; of a load's many steps three are fitted, and all judge.

ENGINES name their tiles, for a bare name leaves it to the profile that the card has yet. Once the best tile is known,
the other stages are timed with it.

>>> [load.name for load in LOADS][:3]
['equal(1,4k)', 'equal(1,64k)', 'bimodal(8,16k)']
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pkv.bench.fit.costfit import ALWAYS, OF_FLASHINFER, fit, predicted_us
from pkv.bench.loads.grids import PAPER_SEEDS, Load, load
from pkv.bench.records.records import Records
from pkv.bench.records.tiles import TILED, best_tile, named, tile_of
from pkv.decoding import plan as plan_step
from pkv.plans.facts import Family
from pkv.plans.gpu import TILES, Costs, GpuProfile
from pkv.plans.plan import Plan
from pkv.stages.s4_adaptive import CANDIDATES, OWN

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
ENGINES = ("flashinfer", *(f"{stage}:tile={tile}" for tile in TILES for stage in TILED))  # they find the tile
ROUNDS, QUICK_ROUNDS = 20, 10
HELD_OUT_EVERY = 3
FITTED_STEPS = 3  # of one load
ROLES = ("fit", "held out")
NUDGE, NUDGE_US, NO_EFFECT = 0.05, 0.1, 1e-4  # a part of a rate, a time; and the part of a plan's time that is none


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
    """What was found. tile_times: {tile: its time over tile 16's, geometric mean}; noise: of one such time.

    not_measured: costs that no fitted time depends on, where they stand.
    """

    profile: GpuProfile
    residuals: tuple[Residual, ...]
    tile_times: dict[int, float]
    noise: float
    not_measured: tuple[str, ...] = ()

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
    fitted = [row for row in rows if row.fitted]
    costs = fit([(row.plan, row.us) for row in fitted])
    profile = replace(card, costs=costs)
    without = tuple(without_effect([row.plan for row in fitted], costs))
    return Calibration(profile, tuple(residuals_of(rows, profile)), tile_times, noise, without)


def engines_with(tile: int) -> tuple[str, ...]:
    """What to time with the tile that ENGINES have found: the stages that are not among them, and another cut."""
    others = (f"{stage}:tile={tile}" for stage in OWN if stage not in TILED)
    return (*others, f"row_local:splits=4,tile={tile}")


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
        tile = tile_of(timing) if named(timing.engine)[0] in OWN else None
        for number, (step, us) in enumerate(zip(steps, timing.gpu_us, strict=True)):
            plan = plan_as(timing.engine, step.lengths, records.loads[timing.load], card, tile)
            if plan is None or not plan.launches or not us or (plan.family is Family.PKV and plan.tile != card.tile):
                continue
            role = roles[timing.load]
            rows.append(
                Row(timing.load, timing.engine, plan, us, step.weight, role, role == "fit" and number in chosen)
            )
    return rows


def plan_as(engine: str, lengths: Sequence[int], of: Load, card: GpuProfile, tile: int | None = None) -> Plan | None:
    """The plan that an engine ran, from its name; None where it is none of the stages that costs are about.

    tile: of a stage of ours, None: as its name says, else the card's.
    """
    stage, options = named(engine)
    if stage not in CANDIDATES:
        return None
    tiled = {"tile": tile} if stage in OWN and tile is not None else {}
    return plan_step(lengths, of.shape, stage=stage, gpu=card, **options | tiled)


def without_effect(plans: Sequence[Plan], costs: Costs) -> list[str]:
    """The fitted costs that can be changed a little without changing a plan's time: rates that nothing reaches, say."""
    found = []
    times = np.array([predicted_us(plan, costs) for plan in plans])
    for name in (*ALWAYS, *OF_FLASHINFER):
        value = getattr(costs, name)
        if value is None:
            continue
        steps = (value * NUDGE, -value * NUDGE) if name.endswith("gb_per_s") else (NUDGE_US,)
        moved = [[predicted_us(plan, replace(costs, **{name: value + step})) for plan in plans] for step in steps]
        if np.abs(np.array(moved) / times - 1).max() < NO_EFFECT:
            found.append(name)
    return found


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

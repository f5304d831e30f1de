"""Figures of the paper's traces: what stages buy, on which machine, who pays for plans, what choices cost.

Each takes the records of one machine and grid, `machines` those of all machines; see pkv/viz/figures.py.
"""

from collections.abc import Collection, Mapping

from pkv.bench.loads.grids import SHAPE, Load
from pkv.bench.records.beside import RIVAL_HERE, RIVAL_PUBLISHED, published_beside
from pkv.bench.records.records import Records
from pkv.bench.records.regret import choices_of, comparable
from pkv.bench.records.results import TRACE, Result, differing, grouped, parts, results_of
from pkv.bench.records.summaries import measured_regret, who_pays
from pkv.cards.files import read_shipped, shipped_names
from pkv.cards.known import profile_of
from pkv.plans.gpu import GpuProfile
from pkv.stages.s4_adaptive import OWN, POLICIES
from pkv.viz.bars import draw_regret
from pkv.viz.needs import Missing, doubts, where
from pkv.viz.resultsbars import draw_charges, draw_ladder, draw_machines
from pkv.viz.svg import Picture
from pkv.wording.counts import count_of

LADDER = (*OWN, RIVAL_HERE)


def ladder(records: Records) -> Picture:
    """What each stage buys on the paper's traces with eight rows."""
    found = {
        group: {engine: of_group[engine].gpu_us for engine in LADDER if engine in of_group}
        for group, of_group in grouped(results_of(records)).items()
        if group.endswith(" B8")
    }
    found = {group: times for group, times in found.items() if LADDER[0] in times and len(times) > 1}
    if not found:
        raise Missing(f"ladder needs {', '.join(LADDER)} on pkv bench --grid paper --record FILE")
    return draw_ladder(found, f"Means over seeds, planning not counted. {where(records)}.")


def machines(records: Records) -> Picture:
    """The paper's schedules over FlashInfer's tensor-core kernel: as published, simulated, and on each machine."""
    found: dict[str, dict[str, float]] = {}
    mixed: dict[tuple[str, str], str] = {}
    for (machine, grid), part in parts(records).items():
        groups, times = published_beside(results_of(part))
        for (group, engine), (published_ms, simulated_ms) in times.items():
            of_group: Mapping[str, Result] = groups[group]
            ours = as_published(group)
            if engine != ours or engine not in of_group or RIVAL_HERE not in of_group:
                continue
            rival_ms, rival_simulated_ms = times[group, RIVAL_PUBLISHED]
            bars = found.setdefault(f"{group}, {engine}", {})
            bars["RTX 3060, published"] = rival_ms / published_ms
            bars["RTX 3060, simulated"] = rival_simulated_ms / simulated_ms
            mixed[machine, grid] = differing(part)
            bars[machine.removeprefix("NVIDIA ")] = of_group[RIVAL_HERE].gpu_us / of_group[engine].gpu_us
    if not found:
        raise Missing(
            f"machines needs workqueue, length_buckets and {RIVAL_HERE} on pkv bench --grid paper --record FILE"
        )
    planning = "Published and simulated times of FlashInfer hold its planning, those measured here do not."
    notes = [
        "Means over the published seeds.",
        planning,
        *(f"{machine}: {said}" for (machine, _), said in mixed.items() if said),
    ]
    notes += [f"{left_out}."] if (left_out := doubts(records)) else []
    return draw_machines(found, "FlashInfer's tensor-core kernel", " ".join(notes))


def charges(records: Records) -> Picture:
    """The paper's schedules over FlashInfer's tensor-core kernel, in a model of one layer, by whose plan is counted."""
    groups, times = published_beside(results_of(records))
    found = {
        f"{group}, {ours}": who_pays(of_group, ours, RIVAL_HERE)
        for group, of_group in groups.items()
        if (ours := as_published(group)) in of_group and RIVAL_HERE in of_group and (group, ours) in times
    }
    if not found:
        raise Missing(
            f"charges needs workqueue, length_buckets and {RIVAL_HERE} on pkv bench --grid paper --record FILE"
        )
    note = f"A plan serves all layers of a step; here there is one. Means over the published seeds. {where(records)}."
    return draw_charges(found, "FlashInfer's tensor-core kernel", note)


def as_published(group: str) -> str:
    """The stage that the paper's best time of a trace comes from."""
    return "length_buckets" if group.endswith(" B1") else "workqueue"


def regret(records: Records) -> Picture:
    """How much slower than the best stage of each step every policy is, and every stage that is always taken.

    By loads that no cost was fitted to, where there are any.
    """
    timed = {key for key, timing in records.latest().items() if timing.refused is None}
    traces = {name: load for name, load in records.loads.items() if TRACE.fullmatch(name) and load.shape == SHAPE}
    loads = [traces[name] for name in comparable(timed, list(traces)) if traces[name].kv_bytes]
    if not loads:
        raise Missing(f"regret needs {', '.join(OWN)} on pkv bench --grid paper --record FILE")
    profile, fitted = card_of(records)
    loads, left_out = judged_by(loads, fitted)
    choices, stages = choices_of(timed, loads, profile, POLICIES if profile.costs else POLICIES[:1])

    def rows_of(load: str) -> str:
        return count_of(records.loads[load].n_rows, "row")

    note = f"Measured GPU times, planning not counted. {left_out}{where(records)}."
    return draw_regret(measured_regret(records, choices, stages, rows_of), note, of="batch size")


def judged_by(loads: list[Load], fitted: Collection[str]) -> tuple[list[Load], str]:
    """The loads that no cost was fitted to, or all where there is no other; and which those are, in words."""
    others = [load for load in loads if load.name not in fitted]
    if not others:
        return loads, "The costs were fitted to these loads. "
    n_fitted = len(loads) - len(others)
    return others, f"Without {count_of(n_fitted, 'load')} that the costs were fitted to. " if n_fitted else ""


def card_of(records: Records) -> tuple[GpuProfile, frozenset[str]]:
    """The shipped profile of the card that records were taken on, and the loads that its costs were fitted to."""
    gpu = next(iter(records.runs.values())).gpu
    for name in shipped_names():  # not the user's own: the same records give the same picture everywhere
        fields = read_shipped(name)
        is_like = all(fields[key] == gpu.get(key) for key in ("arch", "n_sms"))
        if is_like and fields["title"].startswith(gpu["title"]):
            return profile_of(name, fields), frozenset(fields.get("costs_source", {}).get("fitted_loads", ()))
    return GpuProfile(gpu["title"], gpu["arch"], gpu["n_sms"]), frozenset()

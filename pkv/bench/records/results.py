"""What records say: the numbers that are derived from them, and stored nowhere.

On a load `row_local` runs 80 us and has nothing to plan, FlashInfer's fastest kernel runs 88 us and plans for 320 us.
row_local is then 1.1 x the best of FlashInfer by GPU time. With its plan, which serves all layers of a step, FlashInfer
costs 408 us a layer in a model of one layer and 92 us in one of 80: row_local is 5.1 x and 1.15 x.

A ratio is always the other's time over the engine's own, so above 1 the engine is the faster one. Ratios compare what
was timed on the same machine and load. An engine that refuses a load is left out there, and `refusals` says why. A time
with flags is doubtful: it is kept, and no ratio is made of it.
"""

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pkv.bench.records.records import Records, Run, Timing
from pkv.wording.counts import count_of

LAYERS = (1, 8, 32, 80)  # of models in use; a plan serves all layers of a step
STREAM, NO_ATTENTION = "stream", ("stream", "empty")
FLASHINFER = "flashinfer"  # the family of FlashInfer's engines
TRACE = re.compile(r"trace (\w+) B(\d+) seed (\d+)")


@dataclass(frozen=True)
class Result:
    """One engine on one load: means of its steps, in us. noise, flags: see Timing; None where noise is not known."""

    load: str
    engine: str
    family: str
    kv_bytes: float
    plan_us: float
    gpu_us: float
    wall_us: float
    noise: float | None = None
    flags: tuple[str, ...] = ()

    def layer_us(self, n_layers: int | None = None) -> float:
        """Cost of a layer, with its share of the plan among n_layers; None: GPU time alone."""
        return self.gpu_us + (0.0 if n_layers is None else self.plan_us / n_layers)

    @property
    def gb_per_s(self) -> float:
        """Bytes of K and V over GPU time, 10**9 a second; 0 where no time was seen."""
        return self.kv_bytes / self.gpu_us / 1e3 if self.gpu_us else 0.0


Results = Mapping[str, Mapping[str, Result]]  # by load and engine


def results_of(records: Records) -> dict[str, dict[str, Result]]:
    """{load: {engine: Result}}, of each the timing taken last; ValueError where the records are of several machines."""
    if len(machines := {machine_of(records.runs[timing.run]) for timing in records.timings}) > 1:
        raise ValueError(
            f"records are of {len(machines)} machines ({'; '.join(sorted(machines))}): pass one's, see parts"
        )
    found: dict[str, dict[str, Result]] = {}
    for (load, engine), timing in records.latest().items():
        if timing.refused is None:
            plan_us, gpu_us, wall_us = (records.mean(timing, name) for name in ("plan_us", "gpu_us", "wall_us"))
            kv_bytes = records.loads[load].kv_bytes
            made = Result(load, engine, timing.family, kv_bytes, plan_us, gpu_us, wall_us, timing.noise, timing.flags)
            found.setdefault(load, {})[engine] = made
    return found


def refusals(records: Records) -> dict[str, dict[str, list[str]]]:
    """{engine: {reason: the loads that it refuses for it}}."""
    found: dict[str, dict[str, list[str]]] = {}
    for (load, engine), timing in records.latest().items():
        if timing.refused is not None:
            found.setdefault(engine, {}).setdefault(timing.refused, []).append(load)
    return found


def flagged(records: Records) -> dict[str, dict[str, list[str]]]:
    """{engine: {flag: the loads on which its time is doubtful for it}}."""
    found: dict[str, dict[str, list[str]]] = {}
    for (load, engine), timing in records.latest().items():
        for flag in timing.flags:
            found.setdefault(engine, {}).setdefault(flag, []).append(load)
    return found


def sound(records: Records) -> Records:
    """Without the doubtful: an engine on a load whose last time there, on that machine and grid, has flags."""

    def place_of(timing: Timing) -> tuple[str, ...]:
        run = records.runs[timing.run]
        return machine_of(run), run.grid, timing.load, timing.engine

    last = {place_of(timing): timing for timing in records.timings}
    kept = tuple(timing for timing in records.timings if not last[place_of(timing)].flags)
    return replace(records, timings=kept, doubtful=tuple(timing for timing in last.values() if timing.flags))


def differing(records: Records) -> str:
    """What the runs do not have in common besides load and engine: a sentence, or "" where they have all of it.

    Commit, changed files, versions, driver and power limit of the runs whose times count. Ratios mix them.
    """
    runs = {timing.run: records.runs[timing.run] for timing in records.latest().values()}.values()
    facts: dict[str, list[str]] = {}
    for run in runs:
        facts.setdefault("commit", []).append(commit_of(run))
        facts.setdefault("driver", []).append(str(run.gpu.get("driver")))
        facts.setdefault("power limit", []).append(str(run.gpu.get("power_limit_w")))
    for name in dict.fromkeys(name for run in runs for name in run.versions):
        facts[name] = [str(run.versions.get(name)) for run in runs]
    said = [f"{name} ({', '.join(dict.fromkeys(of))})" for name, of in facts.items() if len(set(of)) > 1]
    return f"Of {len(runs)} runs, which differ in {', '.join(said)}." if said else ""


def commit_of(run: Run) -> str:
    """The commit in words, and whether files differed from it."""
    return f"{run.commit or 'outside a clone'}{' with changes' if run.changed else ''}"


def machine_of(run: Run) -> str:
    """The card, and how many of its SMs there were: "NVIDIA H200, 132 SMs"."""
    return f"{run.gpu['title']}, {count_of(run.gpu['n_sms'], 'SM')}"


def parts(records: Records) -> dict[tuple[str, str], Records]:
    """{(machine, grid): what was timed there}, in the order of the runs. What is compared should come from one part."""
    found: dict[tuple[str, str], list[Timing]] = {}
    for timing in records.timings:
        run = records.runs[timing.run]
        found.setdefault((machine_of(run), run.grid), []).append(timing)
    return {key: only(records, timings) for key, timings in found.items()}


def only(records: Records, timings: Sequence[Timing]) -> Records:
    """These timings, with the runs and loads that they name."""
    runs = {timing.run: records.runs[timing.run] for timing in timings}
    loads = {timing.load: records.loads[timing.load] for timing in timings}
    return Records(runs, loads, tuple(timings))


def over(
    of_load: Mapping[str, Result], engine: str, rivals: Iterable[str], n_layers: int | None = None
) -> float | None:
    """The fastest rival's cost of a layer over the engine's own; None where one of both is missing or doubtful."""
    known = {name: made.layer_us(n_layers) for name, made in of_load.items() if made.gpu_us and not made.flags}
    costs = [known[rival] for rival in rivals if rival in known]
    return min(costs) / known[engine] if costs and engine in known else None


def over_flashinfer(of_load: Mapping[str, Result], engine: str, n_layers: int | None = None) -> float | None:
    """`over` the best of FlashInfer's engines, at that number of layers; a doubtful one is not the best."""
    return over(of_load, engine, [made.engine for made in of_load.values() if made.family == FLASHINFER], n_layers)


def of_stream(of_load: Mapping[str, Result], engine: str) -> float | None:
    """The part that the engine reaches of the streaming read's rate, 1 for as fast."""
    return over(of_load, engine, [STREAM])


def geomean(values: Iterable[float | None]) -> float | None:
    """Of those that are known; None where none is.

    >>> geomean([0.5, 2.0, None]), geomean([])
    (1.0, None)
    """
    known = [value for value in values if value is not None]
    return statistics.geometric_mean(known) if known else None


def engines_of(results: Results, attention_only: bool = True) -> dict[str, str]:
    """{engine: family} of all that did a load, in the order of the records."""
    found = {made.engine: made.family for of_load in results.values() for made in of_load.values()}
    return {name: family for name, family in found.items() if not (attention_only and name in NO_ATTENTION)}


def group_of(load: str) -> str:
    """A load without its seed: what is averaged over seeds.

    >>> group_of("trace bimodal B8 seed 20260623"), group_of("uniform(8,16k) seed 3"), group_of("equal(1,4k)")
    ('bimodal B8', 'uniform(8,16k)', 'equal(1,4k)')
    """
    trace = TRACE.fullmatch(load)
    return f"{trace[1]} B{trace[2]}" if trace else re.sub(r" seed \d+$", "", load)


def grouped(results: Results) -> dict[str, dict[str, Result]]:
    """Means over seeds: {group: {engine: Result}}, of engines that did every seed of the group."""
    groups: dict[str, list[Mapping[str, Result]]] = {}
    for load, of_load in results.items():
        groups.setdefault(group_of(load), []).append(of_load)
    return {
        group: {
            engine: _mean(group, [of_load[engine] for of_load in members])
            for engine in dict.fromkeys(name for of_load in members for name in of_load)
            if all(engine in of_load for of_load in members)
        }
        for group, members in groups.items()
    }


def _mean(group: str, results: Sequence[Result]) -> Result:
    def mean(name: str) -> float:
        return statistics.fmean(getattr(made, name) for made in results)

    known = [made.noise for made in results if made.noise is not None]
    noise = max(known) if len(known) == len(results) else None
    kv_bytes, plan_us, gpu_us, wall_us = (mean(name) for name in ("kv_bytes", "plan_us", "gpu_us", "wall_us"))
    flags = tuple(dict.fromkeys(flag for made in results for flag in made.flags))
    return Result(group, results[0].engine, results[0].family, kv_bytes, plan_us, gpu_us, wall_us, noise, flags)

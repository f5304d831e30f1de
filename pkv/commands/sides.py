"""One side of `pkv compare`: a file of records, or several, each of another run of the same commit.

An engine timed again within a run differs by its noise; the same engine in another run differs by more, for memory,
clocks and neighbours are others. Two runs of 100 and 104 us: a side of 102 us, with 4% between its runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pkv.bench.records.records import Records
from pkv.bench.records.results import Result, geomean, parts, refusals, results_of
from pkv.commands import CommandError
from pkv.commands.tables import records_of

Place = tuple[str, str]  # a load and an engine


@dataclass(frozen=True)
class Timed:
    """GPU us of one engine on one load in each run of a side. noise: within a run, the largest; None: not known."""

    us: tuple[float, ...]
    noise: float | None

    @property
    def mean_us(self) -> float:
        """The geometric mean over runs."""
        return self.us[0] if len(self.us) == 1 else geomean(self.us) or 0.0

    @property
    def spread(self) -> float | None:
        """By what part the slowest run takes longer than the fastest; None for one run, of which nobody knows."""
        return max(self.us) / min(self.us) - 1 if len(self.us) > 1 else None


@dataclass(frozen=True)
class Side:
    """name: "A" or "B". records: of all files together; runs: of each file."""

    name: str
    records: Records
    runs: tuple[Records, ...]

    def refused(self) -> dict[Place, str]:
        """Why an engine was refused on a load."""
        return {
            (load, engine): reason
            for engine, of_engine in refusals(self.records).items()
            for reason, loads in of_engine.items()
            for load in loads
        }

    def results(self) -> dict[str, dict[Place, list[Result]]]:
        """{machine: {(load, engine): of each run that has one}}, whatever the grid that the load was timed in."""
        found: dict[str, dict[Place, list[Result]]] = {}
        for run in self.runs:
            own: dict[str, dict[Place, Result]] = {}  # of two grids in one file, the later one counts
            for (machine, _), part in parts(run).items():
                for load, of_load in results_of(part).items():
                    own.setdefault(machine, {}).update({(load, engine): made for engine, made in of_load.items()})
            for machine, of_machine in own.items():
                for place, made in of_machine.items():
                    found.setdefault(machine, {}).setdefault(place, []).append(made)
        return found


def side_of(name: str, files: Sequence[Path]) -> Side:
    """What the files of a side hold; CommandError where one cannot be read, or holds what another holds too."""
    runs = tuple(records_of([file]) for file in files)
    seen: dict[str, Path] = {}
    for file, run in zip(files, runs, strict=True):
        for word in run.runs:
            if word in seen:
                raise CommandError(f"{name}: {seen[word]} and {file} hold the same run {word}: give files of two runs")
            seen[word] = file
    return Side(name, records_of(files) if len(files) > 1 else runs[0], runs)


def doubt_of(made: Sequence[Result], name: str) -> str:
    """Why a time says nothing, "" where it does, in each run; name: of its side."""
    doubts = ["; ".join(each.flags) or "a time of 0" for each in made if each.flags or not each.gpu_us]
    return f"{name}: {doubts[0]}" if doubts else ""


def timed(made: Sequence[Result]) -> Timed:
    """The times of one engine on one load, of the runs of a side."""
    noises = [each.noise for each in made if each.noise is not None]
    return Timed(tuple(each.gpu_us for each in made), max(noises) if len(noises) == len(made) else None)


def noise_of(a: Timed, b: Timed) -> float | None:
    """By what part times of A and of B may differ although nothing has changed; None where that is not known.

    Of each side the larger of what timings in a run differ by, and its runs. Of a side of one run that is as much as
    between the runs of the other; where both have one, only what is within a run is known.

    >>> noise_of(Timed((100.0, 125.0), 0.01), Timed((90.0,), 0.02))
    0.5
    >>> noise_of(Timed((100.0,), 0.01), Timed((90.0,), 0.02)), noise_of(Timed((100.0,), None), Timed((90.0,), 0.02))
    (0.03, None)
    """
    spreads = [side.spread for side in (a, b) if side.spread is not None]
    if not spreads:
        return None if a.noise is None or b.noise is None else a.noise + b.noise
    return sum(max(side.noise or 0.0, max(spreads) if side.spread is None else side.spread) for side in (a, b))

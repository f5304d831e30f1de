"""`pkv compare A B`: what became faster or slower from one file of records to another, beyond the noise of both.

GPU time of B over that of A: 100 us and 90 us is 0.90. Where the same engine, timed again, differs by 2% in A and by 3%
in B, what lies within 5% is noise.
"""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

from pkv.bench.records import Records, Run
from pkv.bench.results import Result, commit_of, geomean, parts, refusals, results_of
from pkv.commands import arguments
from pkv.commands.output import print_json, say, table
from pkv.commands.tables import records_of

HELP = "compare two files of records: what became faster or slower, beyond the noise of both"
VERDICTS = ("faster", "slower", "within noise", "noise not known")
SHOWN, SHOWN_ALONE = 40, 6  # lines of a table, and entries of a list; --json has all


@dataclass(frozen=True)
class Change:
    """GPU us of one engine on one load in A and in B; noise: of both together, None where one is not known."""

    machine: str
    load: str
    engine: str
    a_us: float
    b_us: float
    noise: float | None

    @property
    def ratio(self) -> float:
        return self.b_us / self.a_us

    @property
    def verdict(self) -> str:
        if self.noise is None:
            return VERDICTS[3]
        if self.ratio > 1 + self.noise:
            return VERDICTS[1]
        return VERDICTS[0] if self.ratio < 1 / (1 + self.noise) else VERDICTS[2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("a", type=Path, metavar="A", help="records, as pkv bench writes them")
    parser.add_argument("b", type=Path, metavar="B", help="records to hold against them")
    arguments.add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Print what differs: where the files come from, engine by engine and load by load, and what is in no pair."""
    a, b = records_of([args.a]), records_of([args.b])
    said, (changes, alone, skipped) = differences(a, b), changes_of(a, b)
    counts = {verdict: sum(change.verdict == verdict for change in changes) for verdict in VERDICTS}
    mean = geomean(change.ratio for change in changes)
    if args.json:
        found = [asdict(change) | {"ratio": change.ratio, "verdict": change.verdict} for change in changes]
        summary = counts | {"mean_ratio": mean}
        print_json({"differences": said, "summary": summary, "changes": found, "alone": alone, "not_compared": skipped})
        return 0
    blocks = ["\n".join(said)] if said else []
    if shown := [change for change in changes if change.verdict != VERDICTS[2]]:
        blocks.append(as_text(shown))
    counted = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    blocks.append(
        f"of {len(changes)} in both: {counted}; GPU time B / A, geometric mean: {mean:.3f}" if mean
        else "the files have no load and engine in common"
    )  # fmt: skip
    blocks += ["\n".join(f"not compared: {words}" for words in skipped)] if skipped else []
    for name, of in alone.items():
        more = f", and {len(of) - SHOWN_ALONE} more, in --json" if len(of) > SHOWN_ALONE else ""
        blocks += [f"only in {name}: {', '.join(of[:SHOWN_ALONE])}{more}"] if of else []
    say("\n\n".join(blocks))
    return 0


def as_text(changes: list[Change]) -> str:
    """A line for each change beyond noise, the largest first; of many, the rarer direction is not crowded out."""
    largest_first = sorted(changes, key=lambda change: -max(change.ratio, 1 / change.ratio))
    directions = [[change for change in largest_first if change.verdict == verdict] for verdict in VERDICTS[:2]]
    rare, common = sorted(directions, key=len)
    kept = rare[: SHOWN // 2] + common[: SHOWN - len(rare[: SHOWN // 2])]
    kept += [change for change in largest_first if change.noise is None][: SHOWN - len(kept)]
    ordered = [change for change in largest_first if change in kept]
    rows = [
        [
            f"{change.load}, {change.engine}",
            *(f"{value:.{digits}f}" for value, digits in ((change.a_us, 1), (change.b_us, 1), (change.ratio, 3))),
            "-" if change.noise is None else f"{change.noise:.1%}",
            change.verdict,
        ]
        for change in ordered
    ]
    lines = table(["load, engine", "A us", "B us", "B / A", "noise A + B", ""], rows)
    return lines if len(ordered) == len(changes) else f"{lines}\n... and {len(changes) - len(ordered)} more, in --json"


def differences(a: Records, b: Records) -> list[str]:
    """What besides time differs between two files, in words: machines, versions, commits."""
    said = []
    for name, of in (
        ("GPU", machine_words),
        ("commit", lambda run: {commit_of(run)}),
        ("grid", lambda run: {run.grid}),
    ):
        found = [", ".join(sorted({word for run in records.runs.values() for word in of(run)})) for records in (a, b)]
        if found[0] != found[1]:
            said.append(f"{name} differs: {found[0] or 'none'} in A, {found[1] or 'none'} in B")
    names = dict.fromkeys(name for records in (a, b) for run in records.runs.values() for name in run.versions)
    for name in names:
        versions = [{str(run.versions.get(name)) for run in records.runs.values()} for records in (a, b)]
        if versions[0] != versions[1]:
            ours, theirs = (", ".join(sorted(found)) for found in versions)
            said.append(f"version of {name} differs: {ours} in A, {theirs} in B")
    for load in sorted(a.loads.keys() & b.loads.keys()):
        if a.loads[load] != b.loads[load]:
            said.append(f"load {load} has other steps or another shape in B: it is not compared")
    return said


def machine_words(run: Run) -> set[str]:
    """Which GPU, with how many SMs, clocks and power."""
    beside = [f"{name} {value}" for name, value in sorted(run.gpu.items()) if name in ("power_limit_w", "driver")]
    return {", ".join([f"{run.gpu['title']} with {run.gpu['n_sms']} SMs", *beside])}


def changes_of(a: Records, b: Records) -> tuple[list[Change], dict[str, list[str]], list[str]]:
    """Every (load, engine) of both; what only A or only B has; and, of what both have, whose times say nothing.

    The latter two are words, "load engine", with the reason of a refusal, or of a doubt. Loads that differ are in none.
    Files of one machine each are compared whatever the machines; of several, those of the same name are.
    """
    ours, theirs = results_by_machine(a), results_by_machine(b)
    if len(ours) == len(theirs) == 1:
        theirs = {next(iter(ours)): next(iter(theirs.values()))}
    refused = {"A": reasons(a), "B": reasons(b)}
    same = {load for load in a.loads.keys() & b.loads.keys() if a.loads[load] == b.loads[load]}
    changes: list[Change] = []
    alone: dict[str, list[str]] = {"A": [], "B": []}
    skipped: list[str] = []
    for machine in dict.fromkeys([*ours, *theirs]):
        timed_a, timed_b = ours.get(machine, {}), theirs.get(machine, {})
        for load, engine in dict.fromkeys([*timed_a, *timed_b]):
            one, other = timed_a.get((load, engine)), timed_b.get((load, engine))
            if one is None or other is None:
                has, lacks = ("B", "A") if one is None else ("A", "B")
                why = refused[lacks].get((load, engine))
                alone[has].append(f"{load} {engine}" + (f" ({lacks}: {why})" if why else ""))
            elif load in same and (doubt := doubt_of(one, "A") or doubt_of(other, "B")):
                skipped.append(f"{load} {engine} ({doubt})")
            elif load in same:
                noise = None if one.noise is None or other.noise is None else one.noise + other.noise
                changes.append(Change(machine, load, engine, one.gpu_us, other.gpu_us, noise))
    return changes, alone, skipped


def doubt_of(made: Result, name: str) -> str:
    """Why a time says nothing, "" where it does; name: of its file."""
    return f"{name}: {'; '.join(made.flags) or 'a time of 0'}" if made.flags or not made.gpu_us else ""


def reasons(records: Records) -> dict[tuple[str, str], str]:
    """{(load, engine): why it was refused}."""
    return {
        (load, engine): reason
        for engine, of_engine in refusals(records).items()
        for reason, loads in of_engine.items()
        for load in loads
    }


def results_by_machine(records: Records) -> dict[str, dict[tuple[str, str], Result]]:
    """{machine: {(load, engine): Result}}, whatever the grid that the load was timed in."""
    found: dict[str, dict[tuple[str, str], Result]] = {}
    for (machine, _), part in parts(records).items():
        for load, of_load in results_of(part).items():
            found.setdefault(machine, {}).update({(load, engine): made for engine, made in of_load.items()})
    return found

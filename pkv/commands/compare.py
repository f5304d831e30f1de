"""`pkv compare A B`: what became faster or slower from one file of records to another, beyond the noise of both.

GPU time of B over that of A: 100 us and 90 us is 0.90. Where the same engine, timed again, differs by 2% in A and by 3%
in B, what lies within 5% is noise. That is the noise within a run. Two runs of one commit differ by more, and by how
much only several runs tell: `pkv compare A A2 --with B B2`.
"""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

from pkv.bench.records.records import Run
from pkv.bench.records.results import commit_of, geomean
from pkv.commands import CommandError, arguments
from pkv.commands.output import print_json, say, table
from pkv.commands.sides import Side, doubt_of, noise_of, side_of, timed

HELP = "compare two files of records: what became faster or slower, beyond the noise of both"
VERDICTS = ("faster", "slower", "within noise", "noise not known")
SHOWN, SHOWN_ALONE = 40, 6  # lines of a table, and entries of a list; --json has all


@dataclass(frozen=True)
class Change:
    """GPU us of one engine on one load in A and in B; noise: of both together (sides.noise_of), None: not known."""

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
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="A B",
        help="two files of records, as pkv bench writes them; or, before --with, those of several runs of A",
    )  # fmt: skip
    parser.add_argument(
        "--with", dest="others", type=Path, nargs="+", metavar="B",
        help="files of several runs of B: what runs of a side differ by counts as noise (default: the second file)",
    )  # fmt: skip
    arguments.add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Print what differs: where the files come from, engine by engine and load by load, and what is in no pair."""
    if args.others is None and len(args.files) != 2:
        raise CommandError(
            f"two files are compared, not {len(args.files)}: give two, or several a side, A A2 --with B B2"
        )
    a, b = (
        side_of("A", args.files[:1] if args.others is None else args.files),
        side_of("B", args.others or args.files[1:]),
    )
    said, (changes, alone, skipped) = differences(a, b), changes_of(a, b)
    counts = {verdict: sum(change.verdict == verdict for change in changes) for verdict in VERDICTS}
    mean = geomean(change.ratio for change in changes)
    if args.json:
        found = [asdict(change) | {"ratio": change.ratio, "verdict": change.verdict} for change in changes]
        runs = {side.name: len(side.runs) for side in (a, b)}
        summary = counts | {"mean_ratio": mean, "runs": runs}
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
    blocks += [noise_in_words(a, b)] if changes else []
    blocks += ["\n".join(f"not compared: {words}" for words in skipped)] if skipped else []
    for name, of in alone.items():
        more = f", and {len(of) - SHOWN_ALONE} more, in --json" if len(of) > SHOWN_ALONE else ""
        blocks += [f"only in {name}: {', '.join(of[:SHOWN_ALONE])}{more}"] if of else []
    say("\n\n".join(blocks))
    return 0


def noise_in_words(a: Side, b: Side) -> str:
    """What is counted as noise, and what is not."""
    if len(a.runs) == len(b.runs) == 1:
        return (
            "noise is what timings within a run differ by. Two runs of one commit may differ by more, which only\n"
            "several runs a side tell: pkv compare A A2 --with B B2"
        )
    return (
        f"noise is what timings within a run differ by, or runs of a side ({len(a.runs)} of A, {len(b.runs)} of B), "
        "whichever is more"
    )


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


def differences(of_a: Side, of_b: Side) -> list[str]:
    """What besides time differs between two sides, and between runs of one, in words: machines, versions, commits."""
    a, b = of_a.records, of_b.records
    said = []
    for side in (of_a, of_b):
        commits = {commit_of(run) for run in side.records.runs.values()}
        if len(side.runs) > 1 and len(commits) > 1:
            words = ", ".join(sorted(commits))
            said.append(f"runs of {side.name} are of several commits ({words}): what they differ by is more than noise")
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


def changes_of(a: Side, b: Side) -> tuple[list[Change], dict[str, list[str]], list[str]]:
    """Every (load, engine) of both; what only A or only B has; and, of what both have, whose times say nothing.

    The latter two are words, "load engine", with the reason of a refusal, or of a doubt. Loads that differ are in none.
    Sides of one machine each are compared whatever the machines; of several, those of the same name are.
    """
    ours, theirs = a.results(), b.results()
    if len(ours) == len(theirs) == 1:
        theirs = {next(iter(ours)): next(iter(theirs.values()))}
    refused = {side.name: side.refused() for side in (a, b)}
    loads_a, loads_b = a.records.loads, b.records.loads
    same = {load for load in loads_a.keys() & loads_b.keys() if loads_a[load] == loads_b[load]}
    changes: list[Change] = []
    alone: dict[str, list[str]] = {"A": [], "B": []}
    skipped: list[str] = []
    for machine in dict.fromkeys([*ours, *theirs]):
        timed_a, timed_b = ours.get(machine, {}), theirs.get(machine, {})
        for load, engine in dict.fromkeys([*timed_a, *timed_b]):
            one, other = timed_a.get((load, engine), []), timed_b.get((load, engine), [])
            if not one or not other:
                has, lacks = ("B", "A") if not one else ("A", "B")
                why = refused[lacks].get((load, engine))
                alone[has].append(f"{load} {engine}" + (f" ({lacks}: {why})" if why else ""))
            elif load in same and (doubt := doubt_of(one, "A") or doubt_of(other, "B")):
                skipped.append(f"{load} {engine} ({doubt})")
            elif load in same:
                before, after = timed(one), timed(other)
                noise = noise_of(before, after)
                changes.append(Change(machine, load, engine, before.mean_us, after.mean_us, noise))
    return changes, alone, skipped

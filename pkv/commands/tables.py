"""Results as tables of text: `pkv bench` ends with them, and `pkv plot --table` prints them of files.

Of one load a line for each engine. Of many what each engine takes, what it is over the best of FlashInfer, and one line
an engine over all of them. A ratio is FlashInfer's time over the engine's: above 1 the engine is the faster one.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from pkv.bench.records.beside import RIVAL_HERE, RIVAL_PUBLISHED, published_beside
from pkv.bench.records.records import RecordError, Records, read_records
from pkv.bench.records.results import (
    LAYERS,
    NO_ATTENTION,
    Result,
    Results,
    differing,
    engines_of,
    flagged,
    geomean,
    grouped,
    of_stream,
    over,
    over_flashinfer,
    parts,
    refusals,
    results_of,
)
from pkv.bench.records.summaries import Summary, summaries
from pkv.commands import CommandError
from pkv.commands.output import table
from pkv.wording.counts import count_of

WIDEST = 110  # letters: loads that would make a line longer go into the next block
MOST_GROUPS = 20  # more are put together by their kind
Cell = Callable[[Mapping[str, Result], str], str]  # what stands in the column of a load, in the line of an engine


def records_of(files: Sequence[Path]) -> Records:
    """What the files hold; a CommandError names the file that cannot be read, or says that there is no timing."""
    try:
        records = read_records(files)
    except RecordError as error:
        raise CommandError(str(error)) from None
    if not records.timings:
        raise CommandError(f"no timing in {', '.join(map(str, files))}: `pkv bench --record FILE` adds them")
    return records


def as_table(records: Records, loads: Collection[str] | None = None) -> str:
    """All that was timed, or only these loads: a section for each machine and grid; ValueError where that is none."""
    sections = []
    for (machine, grid), part in parts(records).items():
        kept = tuple(timing for timing in part.timings if loads is None or timing.load in loads)
        if kept:
            part = Records(part.runs, part.loads, kept)
            head = "\n".join(filter(None, [f"{machine}, grid {grid}", differing(part)]))
            sections.append(f"{head}\n\n{_section(part)}")
    if not sections:
        raise ValueError("records hold no timing" + (" of these loads" if loads is not None else ""))
    return "\n\n\n".join(sections)


def _section(part: Records) -> str:
    results = results_of(part)
    blocks = []
    if len(results) == 1:
        ((load, of_load),) = results.items()
        blocks.append(f"{load}, us\n{one_load(of_load)}")
    elif results:
        groups = grouped(results)
        if len(groups) <= MOST_GROUPS:
            blocks += [f"GPU us of a layer, mean over seeds\n{_blocks(groups, _gpu_us)}"]
            blocks += [f"x best of FlashInfer, by GPU time\n{_blocks(groups, _over_best(None))}"]
            blocks += [f"the same with both plans charged to one layer\n{_blocks(groups, _over_best(1))}"]
        else:
            blocks += [f"x best of FlashInfer by GPU time, geometric mean\n{by_kind(results)}"]
        found = summaries(results)
        blocks += [
            f"x best of FlashInfer over all loads, geometric means; its share of the plan charged\n{over_all(found)}"
        ]
        blocks += (
            [f"x each engine of FlashInfer, by GPU time\n{over_each(found)}"] if found and found[0].over_each else []
        )
        if rows := beside_published(results):
            blocks += [f"the paper's traces on its RTX 3060 (ms of a step) and here (us of a layer)\n{rows}"]
    blocks += filter(None, [flagged_in_words(part), refused_in_words(part)])
    return "\n\n".join(blocks)


def one_load(of_load: Mapping[str, Result]) -> str:
    """A line for each engine, the fastest first."""
    rows = []
    for engine, made in sorted(of_load.items(), key=lambda entry: entry[1].gpu_us):
        ratio = None if engine in NO_ATTENTION else over_flashinfer(of_load, engine)
        cells = [f"{made.plan_us:.1f}", f"{made.gpu_us:.1f}", f"{made.wall_us:.1f}", _times(ratio)]
        cells += [_part(of_stream(of_load, engine)), f"{made.gb_per_s:,.0f}"]
        rows.append([engine, *cells, *(f"{made.layer_us(n):.1f}" for n in LAYERS)])
    layers = [count_of(n, "layer") for n in LAYERS]
    return table(["engine", "plan", "GPU", "wall", "x FlashInfer", "% of stream", "GB/s", *layers], rows)


def over_all(found: list[Summary]) -> str:
    """A line for each engine, the fastest first."""
    rows = [
        [
            made.engine,
            str(made.n_loads),
            *(f"{us:.1f}" if us == us else "-" for us in (made.gpu_us, made.plan_us, made.wall_us)),
        ]
        + [_times(made.over_best), _times(made.worst[0] if made.worst else None)]
        + [_times(made.layers[n]) for n in LAYERS]
        + [_part(made.stream)]
        for made in found
    ]
    layers = [f"plan/{n}" for n in LAYERS]
    return table(
        ["engine", "loads", "GPU us", "plan us", "wall us", "x FlashInfer", "worst", *layers, "% of stream"], rows
    )


def over_each(found: list[Summary]) -> str:
    """Geometric means over each of FlashInfer's engines, in the order of the summaries."""
    rivals = list(found[0].over_each)
    return table(
        ["engine", *rivals], [[made.engine, *(_times(made.over_each[name]) for name in rivals)] for made in found]
    )


def by_kind(results: Results) -> str:
    """Geometric means over loads of one kind: the word before their sizes."""
    kinds: dict[str, list[str]] = {}
    for load in results:
        kinds.setdefault(load.split("(")[0], []).append(load)
    rows = [
        [engine, *(_times(geomean(over_flashinfer(results[load], engine) for load in of)) for of in kinds.values())]
        for engine in engines_of(results)
    ]
    return table(["engine", *kinds], rows)


def _blocks(groups: Results, cell: Cell) -> str:
    """Engines by loads, a few loads beside one another."""
    engines, blocks = list(engines_of(groups, attention_only=False)), [list[str]()]
    for name in groups:
        width = sum(max(7, len(shown)) + 2 for shown in [*blocks[-1], name])
        if blocks[-1] and width + max(map(len, engines), default=0) > WIDEST:
            blocks.append([])
        blocks[-1].append(name)
    lines = [[[engine, *(cell(groups[name], engine) for name in shown)] for engine in engines] for shown in blocks]
    return "\n\n".join(table(["engine", *shown], rows) for shown, rows in zip(blocks, lines, strict=True))


def beside_published(results: Results) -> str:
    """The published RTX 3060 times of the same traces and seeds, the simulator's, and those here; "" without any."""
    groups, times = published_beside(results)
    rows = []
    for (group, engine), (published_ms, simulated_ms) in times.items():
        rival_ms, rival_simulated_ms = times[group, RIVAL_PUBLISHED]
        name = RIVAL_HERE if engine == RIVAL_PUBLISHED else engine
        here = groups[group].get(name)
        cells = [f"{published_ms:.3f}", f"{simulated_ms:.3f}", f"{here.gpu_us:.1f}" if here else "-"]
        cells += [_times(rival_ms / published_ms), _times(rival_simulated_ms / simulated_ms)]
        cells += [_times(over(groups[group], name, [RIVAL_HERE]))]
        rows.append([f"{group} {engine}", *cells])
    header = ["trace, engine", "rtx3060 published", "simulated", "here", "x: published", "simulated", "here"]
    return table(header, rows) if rows else ""


def refused_in_words(records: Records) -> str:
    """Which engines are left out, where and why; "" where none is."""
    return _in_words(refusals(records), "left out on")


def flagged_in_words(records: Records) -> str:
    """Which times are doubtful, where and why; "" where none is."""
    said = _in_words(flagged(records), "is doubtful on")
    return f"{said}\nno ratio is made of a doubtful time" if said else ""


def _in_words(reasons: Mapping[str, Mapping[str, Sequence[str]]], what: str) -> str:
    """A line for each engine and reason."""
    lines = []
    for engine, of_engine in reasons.items():
        for reason, loads in of_engine.items():
            where = loads[0] if len(loads) == 1 else f"{len(loads)} loads, such as {loads[0]}"
            lines.append(f"{engine} {what} {where}: {reason}")
    return "\n".join(lines)


def _gpu_us(of_load: Mapping[str, Result], engine: str) -> str:
    return f"{of_load[engine].gpu_us:.1f}" if engine in of_load else "-"


def _over_best(n_layers: int | None) -> Cell:
    def cell(of_load: Mapping[str, Result], engine: str) -> str:
        return _times(None if engine in NO_ATTENTION else over_flashinfer(of_load, engine, n_layers))

    return cell


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _part(part: float | None) -> str:
    return "-" if part is None else f"{part:.0%}"

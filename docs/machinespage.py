"""docs/machines.md and its figure: what each stage gains over FlashInfer on four machines, from records and data.

    python docs/write.py machines.md      # writes the page, and docs/machines.svg beside it

Every number and every "who gains most" comes from pkv/bench/records/fourmachines.py, so the page stays true when
records change.
"""

import textwrap
from collections.abc import Sequence

from pkv.bench.loads.grids import PAPER_RUNS, PAPER_SEEDS, PAPER_TRACES
from pkv.bench.records.fourmachines import PUBLISHED, SIMULATED, STAGES, Machine, card, four_machines, n_published_seeds
from pkv.bench.records.records import Records
from pkv.bench.records.regret import PAPERS_POLICY
from pkv.bench.records.results import geomean, grouped, over, results_of, sound
from pkv.bench.records.results import parts as parts_of
from pkv.viz.ladder import Gain, counts_of, draw_gains
from pkv.viz.paperfigures import card_of
from pkv.viz.resultscales import times_in_words
from pkv.viz.svg import Picture
from pkv.wording.counts import count_of

RIVAL = "FlashInfer's tensor-core kernel"
COMMAND = "python docs/write.py machines.md"
LOADS = tuple(f"{trace} B{rows}" for rows in PAPER_RUNS for trace in PAPER_TRACES)


def page_of(records: Records) -> tuple[str, Picture]:
    """The page, and the figure that it shows as machines.svg."""
    kept = sound(records)
    found = four_machines(kept)
    picture = draw_machines(found)
    parts = [
        "# Four machines",
        f"<!-- Written by `{COMMAND}` from pkv's records and data; whoever edits this file edits in vain. -->",
        prose(
            f"What does each stage gain over {RIVAL}, and on which machine? Here are the paper's traces with 1, 4 and "
            "8 rows (B1, B4, B8), on the paper's RTX 3060 as published and as simulated, on 28 SMs of an H200, and on "
            "the whole of it. A number is the kernel's time over the stage's: above 1 the stage is faster. "
            f"`{COMMAND}` writes this page."
        ),
        f"![{picture.alt.split('. ')[0]}](machines.svg)",
        "\n".join(prose(words, "- ") for words in sentences(found)),
        "## What can be compared",
        "\n".join(prose(words, "- ") for words in caveats(kept)),
        "## All of them",
        prose(
            "Bold: the fastest stage on that machine and load, or several that are alike to two digits. Published, in "
            "brackets: less FlashInfer's planning."
        ),
        table(found),
    ]
    return "\n\n".join(parts) + "\n", picture


def prose(words: str, bullet: str = "") -> str:
    """Lines of at most 125 characters, those of a bullet indented."""
    return textwrap.fill(words, 125, initial_indent=bullet, subsequent_indent=" " * len(bullet), break_on_hyphens=False)


def draw_machines(found: Sequence[Machine]) -> Picture:
    """A plane for each machine."""
    panels = {
        machine.name: {
            load: {stage: Gain(ratio, machine.noise.get(load, {}).get(stage, 0.0)) for stage, ratio in of.items()}
            for load, of in ((load, machine.ratios[load]) for load in LOADS if load in machine.ratios)
        }
        for machine in found
    }
    note = (
        f"Means over seeds. {PUBLISHED}: with FlashInfer's planning, as the paper counts; the others: kernels alone. "
        f"{SIMULATED}: not measured; grey there is the simulator's median error."
    )
    columns = {
        machine.name: {stage: times_in_words(mean) for stage in STAGES if (mean := mean_of(machine, stage)) is not None}
        for machine in found
        if len(machine.ratios) == len(LOADS)
    }
    return draw_gains(panels, RIVAL, claim(found), note, {f"mean on {name}": of for name, of in columns.items()})


def mean_of(machine: Machine, stage: str) -> float | None:
    """Geometric mean over the machine's loads; None where the stage lacks one."""
    ratios = [of.get(stage) for of in machine.ratios.values()]
    return geomean(ratios) if all(ratios) else None


def best_of(machine: Machine) -> str:
    """The stage with the largest mean on the machine."""
    means = {stage: mean for stage in STAGES if (mean := mean_of(machine, stage)) is not None}
    return max(means, key=lambda stage: means[stage])


def claim(found: Sequence[Machine]) -> str:
    """Which stage gains most on each machine that has all loads, and how much in the mean."""
    words = []
    for machine in found:
        if len(machine.ratios) == len(LOADS):
            best = best_of(machine)
            words.append(f"{best} {times_in_words(mean_of(machine, best) or 1.0)} on {machine.name}")
    return f"The best stage over {RIVAL}: {'; '.join(words)}"


def sentences(found: Sequence[Machine]) -> list[str]:
    """One for each machine: which stage gains most in the mean, how often it does not, and where it gains least."""
    said = []
    for machine in found:
        best = best_of(machine)
        gains = {
            load: Gain(of[best], machine.noise.get(load, {}).get(best, 0.0)) for load, of in machine.ratios.items()
        }
        least = min(gains, key=lambda load: gains[load].ratio)
        most = max(gains, key=lambda load: gains[load].ratio)
        spread = f"{times_in_words(gains[least].ratio)} ({least}) to {times_in_words(gains[most].ratio)} ({most})"
        mean = times_in_words(mean_of(machine, best) or 1.0)
        words = (
            f"**{machine.name}**: `{best}` does best, {mean} in the mean of {count_of(len(gains), 'load')}, {spread}"
        )
        less = [of[best] for of in machine.less_planning.values() if best in of]
        if less:
            words += f"; less FlashInfer's planning {times_in_words(min(less))} to {times_in_words(max(less))}"
        said.append(f"{words}; {counts_of(list(gains.values()))}.")
    return said


def caveats(records: Records) -> list[str]:
    """What these numbers have in common, and what they do not."""
    profile, fields = card()
    costs, error = profile.needed_costs(), fields["costs_source"]["errors"]["judge"]
    runs = records.runs.values()
    versions = {
        name: " and ".join(sorted({str(run.versions.get(name)) for run in runs})) for name in ("flashinfer", "triton")
    }
    rates = [f"RTX 3060 {costs.memory_gb_per_s / profile.n_sms:.0f}"]
    for (machine, grid), part in parts_of(records).items():
        known = card_of(part)[0]
        if grid == "paper" and known.costs is not None:
            rates.append(f"{machine.removeprefix('NVIDIA ')} {known.costs.memory_gb_per_s / known.n_sms:.0f}")
    together = profile.n_sms * (costs.programs_per_sm or 1) * costs.program_gb_per_s
    return [
        "**The schedules can be compared.** Row lengths are the same on all, drawn from the same seeds, and so are the "
        "rules by which stages and FlashInfer cut rows. With 28 SMs both cut them for 28.",
        "**Ratios can be compared, times cannot.** Each ratio is of two times on one machine.",
        f"**The memory is not the same.** GB/s for each SM: {'; '.join(rates)}. Where an SM has much bandwidth, an "
        "idle one costs more; so 28 SMs of an H200 show what schedules do, and not what an RTX 3060 would gain.",
        "**The kernels are not the same.** Published and simulated are the paper's CUDA kernels and FlashInfer 0.2.5. "
        f"An SM holds {costs.programs_per_sm} of the paper's programs, and all of them together read at most "
        f"{together:.0f} of the {costs.memory_gb_per_s:.0f} GB/s, which FlashInfer's can use up. Recorded are pkv's "
        f"kernels (Triton {versions['triton']}) and FlashInfer {versions['flashinfer']}. Published splits are the "
        "paper's, all others the stages' own.",
        "**Planning is counted in one column.** Published times of FlashInfer hold its planning in every step, and the "
        "paper's own lists were made beforehand. The number in brackets takes its planning off, "
        f"{costs.flashinfer_plan_us:.0f} us as fitted. The other columns are of the kernels alone, on both sides.",
        "**Simulated is not measured.** On published times that it was not fitted to, the simulator is "
        f"{error['median']:.1%} off in the median and {error['worst']:.1%} at worst. A ratio closer to 1 than that "
        "says nothing. `split_kv`, `row_local` and `stream_k` nobody has timed on an RTX 3060.",
        *papers_queue(records),
        f"**Means are of seeds**: {len(PAPER_SEEDS)} simulated and recorded, {n_published_seeds()} published.",
    ]


def papers_queue(records: Records) -> list[str]:
    """The paper's policy over stream_k where it takes the queue, by machine: it is no stage of the table."""
    said = []
    for (machine, grid), part in parts_of(records).items():
        if grid != "paper":
            continue
        eight = {load: of for load, of in grouped(results_of(part)).items() if load.endswith(" B8")}
        ratios = [over(of, PAPERS_POLICY, ["stream_k"]) for of in eight.values()]
        known = [ratio for ratio in ratios if ratio is not None]
        if known:
            said.append(f"{times_in_words(min(known))} to {times_in_words(max(known))} on {machine}")
    if not said:
        return []
    return [
        "**Stages cut rows by their own rules here.** The paper's policy, recorded as `adaptive`, takes the queue for "
        f"8 rows, with 24 splits a row. Over `stream_k` that is {'; '.join(said)}."
    ]


def table(found: Sequence[Machine]) -> str:
    """A line for each load and stage, a column for each machine."""
    lines = [
        f"| load | stage | {' | '.join(machine.name for machine in found)} |",
        f"|---|---|{'---|' * len(found)}",
    ]
    for load in LOADS:
        for stage in STAGES:
            cells = [cell_of(machine, load, stage) for machine in found]
            if any(cells):
                lines.append(f"| {load} | {stage} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell_of(machine: Machine, load: str, stage: str) -> str:
    """The ratio, bold where it is the machine's largest on the load; nothing where there is none."""
    of = machine.ratios.get(load, {})
    if stage not in of:
        return ""
    words = times_in_words(of[stage])
    words = f"**{words}**" if words == times_in_words(max(of.values())) else words
    less = machine.less_planning.get(load, {})
    return f"{words} ({times_in_words(less[stage])})" if stage in less else words

"""What `pkv bench` can tell without a GPU: that every schedule is sound, and what it costs, counted.

Of two rows of 16k and six of 2k, length_buckets has 4 launches (two lengths, each decoded and merged), the queue 2.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pkv.bench.engines.registry import DEFAULT_ENGINES
from pkv.bench.loads.grids import Load
from pkv.cards.known import gpu_of
from pkv.commands import CommandError
from pkv.commands.output import Progress, complain, print_json, say, table
from pkv.decoding import plan
from pkv.stages import STAGES

NO_GPU = "no GPU: schedules are checked, nothing is timed"
COUNTERS = ("launches", "programs", "empty_programs", "useful_kv_mib", "merge_state_mib")


def check_schedules(grid: str, loads: Sequence[Load], engines: Sequence[str], as_json: bool) -> int:
    """Plan every step with every stage among the engines, check and count; 1 if a plan is not sound.

    CommandError where none of them is a stage, or the profile of the GPU to plan for cannot be read.
    """
    try:
        gpu = gpu_of(None)  # else every stage would refuse every load, for the same reason
    except ValueError as error:
        raise CommandError(str(error)) from None
    stages = [name for name in engines if name in STAGES and name != "reference"]
    if not stages:
        others = ", ".join(name for name in STAGES if name != "reference")
        raise CommandError(f"without a GPU only plans can be checked, those of {others}: name one of these")
    counted: list[dict[str, Any]] = []
    wrong: list[str] = []
    progress = Progress(len(loads))
    try:
        for load in loads:
            progress.step(load.name)
            found = {stage: counters_of(load, stage) for stage in stages}
            counted.append({"load": load.name, "rows": load.n_rows, "longest": load.longest, "stages": found})
            wrong += [f"{load.name}: {stage} {of['wrong']}" for stage, of in found.items() if "wrong" in of]
    finally:
        progress.end()
    if as_json:
        head = {"timed": False, "why": NO_GPU, "grid": grid, "gpu": gpu.name}
        print_json(head | {"loads": counted, "record": None, "wrong": wrong})
    else:
        about = f"planned for {gpu.name}, {gpu.n_sms} SMs; each plan reads every token once; columns: `pkv plan --help`"
        asked = () if tuple(engines) == DEFAULT_ENGINES else engines
        left = [name for name in asked if name not in stages and name != "reference"]
        about += f"\nnot counted, as they have no plan of pkv's: {', '.join(left)}" if left else ""
        say("\n\n".join([f"{NO_GPU}\n{about}", *(as_text(entry) for entry in counted)]))
    for words in wrong:
        complain(words)
    return 1 if wrong else 0


def counters_of(load: Load, stage: str) -> dict[str, Any]:
    """Means of a step's counters; or why the stage refuses the load, or what is wrong with its plan.

    A sound plan reads each token of each row once.
    """
    found = []
    for step in load.steps:
        try:
            made = plan(step.lengths, load.shape, stage)
        except ValueError as error:
            return {"refused": str(error)}
        try:
            found.append(made.validate().counters)
        except ValueError as error:
            return {"wrong": f"has a plan that is not sound: {error}"}
    weights = [step.weight for step in load.steps]
    return {name: float(np.average([getattr(c, name) for c in found], weights=weights)) for name in COUNTERS}


def as_text(entry: dict[str, Any]) -> str:
    """One load: a line a stage, and below it why others have none."""
    stages: dict[str, dict[str, Any]] = entry["stages"]
    counted = {stage: found for stage, found in stages.items() if "launches" in found}
    rows = [[stage, *(f"{found[name]:,.1f}" for name in COUNTERS)] for stage, found in counted.items()]
    notes = [f"{stage}: {' '.join(found.values())}" for stage, found in stages.items() if stage not in counted]
    return "\n".join([entry["load"], table(["stage", *COUNTERS], rows), *notes])

"""The records that ship with pkv: pkv/data/results/*.jsonl, made by `pkv bench --record` and read like any others.

`shipped_part("paper", 132)` holds what a grid took on the card with so many SMs.
"""

import functools
from importlib import resources
from pathlib import Path

from pkv.bench.records.records import RecordError, Records, read_records
from pkv.bench.records.results import parts

FOLDER = Path(str(resources.files("pkv"))) / "data" / "results"


def shipped_files() -> list[Path]:
    """The files; RecordError where there are none."""
    found = sorted(FOLDER.glob("*.jsonl"))
    if not found:
        raise RecordError("pkv ships no records: name a file, such as one that `pkv bench --record FILE` writes")
    return found


@functools.cache
def shipped_records() -> Records:
    """All of them."""
    return read_records(shipped_files())


def shipped_part(grid: str, n_sms: int) -> Records:
    """Those of one grid, on the card with so many SMs; RecordError lists what there is."""
    there = parts(shipped_records())
    for (_, of_grid), part in there.items():
        if of_grid == grid and all(run.gpu["n_sms"] == n_sms for run in part.runs.values()):
            return part
    known = ", ".join(f"{of_grid} on {machine}" for machine, of_grid in there)
    raise RecordError(f"no shipped record of grid {grid!r} with {n_sms} SMs; there is {known}")

"""What figures of records need, and where their records come from: shared by all that draw of records."""

from pkv.bench.records import Records
from pkv.bench.results import machine_of


class Missing(ValueError):
    """Records do not hold what a figure needs; the message says what that is."""


def where(records: Records) -> str:
    """Machine and grid of records that are of one of both."""
    run = next(iter(records.runs.values()))
    return f"{machine_of(run)}; grid {run.grid}"

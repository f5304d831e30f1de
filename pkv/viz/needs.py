"""What figures of records need, and where their records come from: shared by all that draw of records."""

from pkv.bench.records.records import Records
from pkv.bench.records.results import differing, machine_of
from pkv.wording.counts import count_of


class Missing(ValueError):
    """Records do not hold what a figure needs; the message says what that is."""


def where(records: Records) -> str:
    """Machine and grid of records that are of one of both; what its runs differ in, and which times are left out."""
    run = next(iter(records.runs.values()))
    said = [f"{machine_of(run)}; grid {run.grid}", differing(records).removesuffix("."), doubts(records)]
    return ". ".join(filter(None, said))


def doubts(records: Records) -> str:
    """Which times are left out because they are doubtful; "" where none is."""
    loads: dict[str, int] = {}
    for timing in records.doubtful:
        loads[timing.engine] = loads.get(timing.engine, 0) + 1
    engines = ", ".join(f"{engine} on {count_of(n, 'load')}" for engine, n in loads.items())
    return f"Left out as doubtful: {engines}" if engines else ""

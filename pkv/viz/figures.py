"""What is drawn of records: FIGURES, by name. Each takes the records of one machine and grid, and makes one claim.

`machines` takes those of all machines together. Where records lack what a figure needs, it raises Missing and says so.
Doubtful times are left out, and the picture says which.
"""

import functools
import math
import re
from collections.abc import Callable

from pkv.bench.loads.grids import SHAPE
from pkv.bench.records.records import Records
from pkv.bench.records.results import (
    FLASHINFER,
    LAYERS,
    engines_of,
    geomean,
    of_stream,
    over_flashinfer,
    results_of,
    sound,
)
from pkv.bench.records.shipped import shipped_part, shipped_records
from pkv.viz.ladderfigures import gains
from pkv.viz.needs import Missing, doubts, where
from pkv.viz.paperfigures import charges, ladder, machines, regret
from pkv.viz.regimes import draw_regimes
from pkv.viz.resultscurves import draw_growth, draw_layers
from pkv.viz.resultsratios import draw_ratios, draw_stream
from pkv.viz.rowfigures import bounds, one_row
from pkv.viz.svg import Picture
from pkv.wording.counts import count_of

SIZES = re.compile(
    r"(\w+)\((\d+)(?:,(\d{1,9})(k?))?\)"
)  # a load of one step in the usual shape: bimodal(8,16k), short(8)
SHORT = 2048  # the most tokens of a row of the load `short`
OF_GROWTH = (
    "stream_k", "split_kv", "length_buckets", "row_local", "workqueue", "adaptive:policy=cost",
    "fa2-tensor-core", "batch-attention", "xqa", "vllm", "sglang",
)  # fmt: skip
MOST_CURVES = 10  # more lines in one plane cannot be told apart
NEARLY_ALL = 0.8  # of the loads: an engine that did fewer says too little about a mean


def ratios(records: Records) -> Picture:
    """How much faster than the best of FlashInfer each engine is, load by load."""
    results = results_of(records)
    found: dict[str, dict[str, float]] = {}
    for engine in engines_of(results):
        for load, of_load in results.items():
            if (ratio := over_flashinfer(of_load, engine)) is not None:
                found.setdefault(engine, {})[load] = ratio
    if not found:
        raise Missing(
            "ratios needs times of an engine of FlashInfer's: pkv bench --record FILE, with FlashInfer installed"
        )
    return draw_ratios(found, "the best of FlashInfer", f"GPU time of a layer, planning not counted. {where(records)}.")


def stream(records: Records) -> Picture:
    """How near to a streaming read of the same bytes each engine comes."""
    results = results_of(records)
    found: dict[str, list[tuple[float, float]]] = {}
    for engine in engines_of(results):
        for of_load in results.values():
            if (part := of_stream(of_load, engine)) is not None and of_load[engine].kv_bytes:
                found.setdefault(engine, []).append((of_load[engine].kv_bytes, part))
    if not found:
        raise Missing("stream needs times of the engine stream: pkv bench --engines stream,... --record FILE")
    return draw_stream(found, f"GPU time of a layer. {where(records)}.")


def layers(records: Records) -> Picture:
    """What a layer costs when 1, 8, 32 or 80 layers share a plan: geometric means over loads that all engines did.

    An engine that did fewer than NEARLY_ALL of the loads has no part in it.
    """
    results = results_of(records)
    engines = list(engines_of(results))
    n_done = {engine: sum(engine in of_load for of_load in results.values()) for engine in engines}
    kept = [engine for engine in engines if n_done[engine] >= NEARLY_ALL * max(n_done.values())]
    common = [of_load for of_load in results.values() if all(engine in of_load for engine in kept)]
    if len(kept) < 2 or not common:
        raise Missing("layers needs a load that several engines did: pkv bench --record FILE")

    def cost(engine: str, n_layers: int) -> float:
        return geomean(of_load[engine].layer_us(n_layers) for of_load in common) or math.nan

    curves = {engine: [(n, cost(engine, n)) for n in LAYERS] for engine in kept}
    return draw_layers(curves, f"Geometric means over {count_of(len(common), 'load')}. {where(records)}.", MOST_CURVES)


def regimes(records: Records) -> Picture:
    """Which stage is best by rows and longest row, for each kind of load; FlashInfer's engines count as one."""
    cells = []
    for load, of_load in results_of(records).items():
        sizes, made = SIZES.fullmatch(load), records.loads[load]
        best: dict[str, float] = {}
        for engine, result in of_load.items():
            name = FLASHINFER if result.family == FLASHINFER else engine
            if engine in engines_of({load: of_load}) and not name.startswith("adaptive"):
                best[name] = min(result.gpu_us, best.get(name, math.inf))
        if sizes is None or made.shape != SHAPE or not best or not made.n_rows:
            continue
        first, *others = sorted(best, key=lambda name: best[name])
        margin = best[others[0]] / best[first] - 1 if others else None
        longest = int(sizes[3]) * (1024 if sizes[4] else 1) if sizes[3] else SHORT  # drawn rows may all be shorter
        cells.append((made.n_rows, longest, sizes[1], first, margin))
    if len({cell[:2] for cell in cells}) < 3:
        raise Missing("regimes needs loads of several sizes, such as those of pkv bench --grid full --record FILE")
    return draw_regimes(sorted(cells), f"Measured GPU time of a layer, planning not counted. {where(records)}.")


def growth(records: Records) -> Picture:
    """How planning on the host, the time from idle to idle, and memory grow with the number of rows."""
    plans: dict[str, list[tuple[float, float]]] = {}
    walls: dict[str, list[tuple[float, float]]] = {}
    sizes: dict[str, list[tuple[float, float]]] = {}
    there = engines_of(results_of(records))
    shown = [engine for engine in OF_GROWTH if engine in there] or list(there)[:MOST_CURVES]
    for (load, engine), timing in records.latest().items():
        n_rows = records.loads[load].n_rows
        if SIZES.fullmatch(load) and timing.refused is None and engine in shown and n_rows:
            plans.setdefault(engine, []).append((n_rows, records.mean(timing, "plan_us")))
            walls.setdefault(engine, []).append((n_rows, records.mean(timing, "wall_us")))
            if timing.workspace_bytes is not None:
                sizes.setdefault(engine, []).append((n_rows, float(timing.workspace_bytes)))
    is_growth = {run.grid for run in records.runs.values()} == {"growth"}
    if not is_growth or not sizes or len({n_rows for points in plans.values() for n_rows, _ in points}) < 3:
        raise Missing("growth needs pkv bench --grid growth --record FILE")
    return draw_growth(plans, sizes, f"Rows of 1,024 tokens. {where(records)}.", walls)


Figure = Callable[[Records], Picture]


def of_sound(figure: Figure) -> Figure:
    """The figure, drawn without doubtful times."""

    @functools.wraps(figure)
    def drawn(records: Records) -> Picture:
        kept = sound(records)
        try:
            return figure(kept)
        except Missing as error:
            raise Missing("; ".join(filter(None, [str(error), doubts(kept).lower()]))) from None

    return drawn


FIGURES: dict[str, Figure] = {
    figure.__name__: of_sound(figure)
    for figure in (ratios, stream, layers, regimes, growth, ladder, gains, regret, charges, machines, one_row, bounds)
}
OF_ALL_MACHINES = ("machines",)


def draw_recorded(figure: str, grid: str = "paper", n_sms: int = 132) -> Picture:
    """A figure of the records that ship with pkv; ValueError where there is no such figure, or no such record.

    n_sms: of the card, 132 for the whole H200, 28 for a slice of it. `machines` is of all of them.
    """
    if figure not in FIGURES:
        raise ValueError(f"figure = {figure!r} does not exist; choose one of {', '.join(FIGURES)}")
    return FIGURES[figure](shipped_records() if figure in OF_ALL_MACHINES else shipped_part(grid, n_sms))

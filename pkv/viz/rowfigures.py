"""Figures of records that are about rows: one row alone, and rows of unequal length, cut by two rules.

Each takes the records of one machine and grid; see figures.py.
"""

import statistics

from pkv.bench.loads.grids import SHAPE
from pkv.bench.records.records import Records
from pkv.bench.records.results import STREAM, grouped, only, results_of
from pkv.viz.needs import Missing, where
from pkv.viz.resultsrows import draw_bounds, draw_one_row
from pkv.viz.svg import Picture

OWN = "split_kv"
# of FlashInfer's all but fa3, which is made for prompts; SGLang's with three caps on the number of splits
ONE_ROW = (OWN, "fa2-tensor-core", "fa2-cuda-core", "batch-attention", "xqa", "vllm", "sglang", "sglang-32",
           "sglang-64", "gather-sdpa")  # fmt: skip
BOUNDS = (OWN, "row_local", "workqueue")
LEAST_LENGTHS = 3


def one_row(records: Records) -> Picture:
    """How near to a plain read each engine comes while a single row is live, by the row's length."""
    found: dict[int, dict[str, list[float]]] = {}
    for (name, engine), timing in records.latest().items():
        load = records.loads[name]
        if timing.refused is not None or load.shape != SHAPE:
            continue
        for step, us in zip(load.steps, timing.gpu_us, strict=True):
            if len(step.lengths) == 1 and step.lengths[0] and us:
                found.setdefault(step.lengths[0], {}).setdefault(engine, []).append(us)
    parts: dict[str, list[tuple[float, float]]] = {}
    for n_tokens, times in sorted(found.items()):
        for engine in ONE_ROW:
            if engine in times and STREAM in times:
                part = statistics.fmean(times[STREAM]) / statistics.fmean(times[engine])
                parts.setdefault(engine, []).append((float(n_tokens), part))
    parts = {engine: parts[engine] for engine in ONE_ROW if len(parts.get(engine, ())) >= LEAST_LENGTHS}
    if OWN not in parts:
        raise Missing(f"one_row needs {OWN} and {STREAM} on pkv bench --grid paper --record FILE")
    return draw_one_row(parts, f"GPU time of a layer, planning not counted. {where(records)}.")


def bounds(records: Records) -> Picture:
    """What row-local bounds are worth against cuts like the longest row's, load by load, and what the queue is."""
    alone = {name for name, load in records.loads.items() if load.n_rows == 1}  # cut alike by all
    results = grouped(results_of(only(records, [timing for timing in records.timings if timing.load not in alone])))
    times = {
        group: {engine: of_group[engine].gpu_us for engine in BOUNDS if engine in of_group}
        for group, of_group in results.items()
    }
    times = {group: of for group, of in times.items() if all(engine in of for engine in BOUNDS[:2])}
    if not times:
        raise Missing(f"bounds needs {BOUNDS[0]} and {BOUNDS[1]} on loads of several rows: pkv bench --record FILE")
    note = f"Every stage with its own number of splits. GPU time of a layer, planning not counted. {where(records)}."
    return draw_bounds(times, note)

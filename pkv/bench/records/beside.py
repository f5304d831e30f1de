"""Measured times beside the paper's published ones, of the same traces and seeds, and beside the simulator's of these.

The published bimodal B8 took 2.2 ms on an RTX 3060 with the queue, the simulator says about as much, and an H200 takes
some 0.17 ms: what can be compared is each machine's ratio to FlashInfer.
"""

import functools

from pkv.bench.loads import published
from pkv.bench.records.results import Result, Results, group_of, grouped
from pkv.cards.files import read_shipped
from pkv.cards.known import profile_of

RIVAL_PUBLISHED = "flashinfer"  # what the published logs call FlashInfer's tensor-core kernel
RIVAL_HERE = "fa2-tensor-core"


def published_beside(
    results: Results,
) -> tuple[dict[str, dict[str, Result]], dict[tuple[str, str], tuple[float, float]]]:
    """Results of the traces and seeds that were published, and {(group, engine): (published ms, simulated ms)}.

    Both are means over the seeds that are in the results. FlashInfer's published times hold its planning, and so do the
    simulated ones.
    """
    seeds: dict[str, dict[str, Result]] = {}
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in published.published():
        made = row.configuration
        load = f"trace {made.trace} B{made.max_active} seed {made.seed}"
        if row.log.startswith("seed_") and load in results:
            seeds[load] = dict(results[load])
            found.setdefault((group_of(load), made.engine), []).append((row.gpu_ms, _simulated_ms(made)))
    return grouped(seeds), {
        key: (sum(ms for ms, _ in of) / len(of), sum(ms for _, ms in of) / len(of)) for key, of in found.items()
    }


@functools.cache
def _simulated_ms(configuration: published.Configuration) -> float:
    card = profile_of(published.GPU, read_shipped(published.GPU))  # whatever the user's own of that name says
    return published.simulated_ms(configuration, card)

"""What stream_k is meant to reach, and what the records that ship say: a goal is about each load, or about their mean.

Over two loads stream_k is 1.3 x and 0.9 x a rival. A goal of 1.0 on every load is then met on one of two; a goal of
1.05 in the mean is met, since the geometric mean is 1.08.

>>> every = Goal("here", "rival", 1.0, {"a": 1.3, "b": 0.9})
>>> every.is_met, every.reached, every.misses
(False, 0.9, {'b': 0.9})
>>> mean = Goal("here", "rival", 1.05, {"a": 1.3, "b": 0.9}, of_mean=True)
>>> mean.is_met, round(mean.reached, 2), mean.misses
(True, 1.08, {})

A load without a value, where an engine refuses it or a time is doubtful, counts for nothing, and is counted.

>>> Goal("here", "rival", 1.0, {"a": 1.3, "b": None}).n_unknown
1
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from pkv.bench.records.results import Result, Results, grouped, of_stream, over, over_flashinfer

ENGINE = "stream_k"
DEFAULT_DECODE = "fa2-cuda-core"  # what FlashInfer's wrapper runs where nothing is asked of it
TENSOR_CORE, PERSISTENT, UNPLANNED = "fa2-tensor-core", "batch-attention", "xqa"
TRITON_PEERS = ("vllm", "sglang", "sglang-32", "sglang-64")
MB, GB = 1e6, 1e9
SHORT_US = 200.0  # a step in which the host's part counts
Value = Callable[[Mapping[str, Result]], float | None]


@dataclass(frozen=True)
class Goal:
    """At least `least`, on every load or in the mean.

    where: which records. what: in words. values: of each load that the goal is about; None where it is not known.
    """

    where: str
    what: str
    least: float
    values: Mapping[str, float | None]
    of_mean: bool = False

    @property
    def known(self) -> dict[str, float]:
        """The values that are known."""
        return {load: value for load, value in self.values.items() if value is not None}

    @property
    def n_unknown(self) -> int:
        """Loads without a value."""
        return len(self.values) - len(self.known)

    @property
    def reached(self) -> float:
        """The mean, or the value of the worst load."""
        values = self.known.values()
        if not values:
            return math.nan
        return statistics.geometric_mean(values) if self.of_mean else min(values)

    @property
    def is_met(self) -> bool:
        """NaN, of no load, meets nothing."""
        return self.reached >= self.least

    @property
    def misses(self) -> dict[str, float]:
        """The loads that are below, the worst first; a goal in the mean names none."""
        below = {} if self.of_mean else {load: value for load, value in self.known.items() if value < self.least}
        return dict(sorted(below.items(), key=lambda entry: entry[1]))


def goals(full: Results, paper: Results, few_sms: Results) -> list[Goal]:
    """All goals, on the grids `full` and `paper` of the whole card, and `paper` of a slice with few SMs."""
    return [*on_the_card(full), *on_few_sms(few_sms), *peers_and_steps(full, paper, few_sms)]


def on_the_card(full: Results) -> Iterator[Goal]:
    """GPU time on loads of every kind."""
    where = "132 SMs, full"
    best = values_of(full, lambda of: over_flashinfer(of, ENGINE))
    yield Goal(where, "GPU time over the best of FlashInfer", 1.0, best)
    yield Goal(where, "the same, in the mean", 1.08, best, of_mean=True)
    default = values_of(full, lambda of: over(of, ENGINE, [DEFAULT_DECODE]))
    yield Goal(where, "over FlashInfer's default decode, in the mean", 1.5, default, of_mean=True)
    for least, size, words in ((0.90, 256 * MB, "256 MB"), (0.95, GB, "1 GB")):
        part = values_of(full, lambda of: of_stream(of, ENGINE), from_bytes=size)
        yield Goal(where, f"part of a plain read's rate, from {words} of K and V", least, part)


def on_few_sms(paper: Results) -> Iterator[Goal]:
    """GPU time where a bad schedule costs most."""
    where = "28 SMs, paper"
    eight = {load: of for load, of in grouped(paper).items() if load.endswith("B8")}
    tensor_core = values_of(eight, lambda of: over(of, ENGINE, [TENSOR_CORE]))
    yield Goal(where, "over FlashInfer's tensor-core kernel, 8 rows, mean over seeds", 2.0, tensor_core)
    bimodal = {load: value for load, value in tensor_core.items() if load.startswith("bimodal")}
    yield Goal(where, "the same, bimodal", 2.3, bimodal)
    persistent = values_of(paper, lambda of: over(of, ENGINE, [PERSISTENT]))
    large = values_of(paper, lambda of: over(of, ENGINE, [PERSISTENT]), from_bytes=64 * MB)
    yield Goal(where, "over BatchAttention, from 64 MB of K and V", 1.2, large)
    yield Goal(where, "over BatchAttention, in the mean", 1.3, persistent, of_mean=True)
    part = values_of(paper, lambda of: of_stream(of, ENGINE))
    part = {load: value for load, value in part.items() if " B8 " in load}
    yield Goal(where, "part of a plain read's rate, 8 rows", 0.88, part)


def peers_and_steps(full: Results, paper: Results, few_sms: Results) -> Iterator[Goal]:
    """Triton kernels in use; and whole steps, with what the host plans and launches."""
    for where, results in (("132 SMs, full", full), ("132 SMs, paper", paper), ("28 SMs, paper", few_sms)):
        peers = values_of(results, over_peers)
        yield Goal(where, "over the best of vLLM's and SGLang's Triton kernels, or 92% of a plain read", 1.2, peers)
    where = "132 SMs, full"
    for rivals, words in (
        ((DEFAULT_DECODE, TENSOR_CORE, PERSISTENT), "the best of FlashInfer's kernels that it plans"),
        ((UNPLANNED,), "xqa, which FlashInfer does not plan"),
    ):
        wall = values_of(full, lambda of, rivals=rivals: over_in_wall(of, rivals))  # type: ignore[misc]
        short = {load: value for load, value in wall.items() if is_short(full[load])}
        yield Goal(where, f"one eager layer, plan and wait included, GPU time below 200 us, over {words}", 2.0, short)
        yield Goal(where, f"the same, every load, over {words}", 1.0, wall)
    layers = values_of(full, lambda of: over_flashinfer(of, ENGINE, 32))
    yield Goal(
        where, "GPU time and plan, shared by 32 layers, over the best of FlashInfer, in the mean", 1.05, layers, True
    )


def is_short(of_load: Mapping[str, Result]) -> bool:
    """A load on which our GPU time is below SHORT_US, as far as it is known."""
    return ENGINE in of_load and of_load[ENGINE].gpu_us < SHORT_US


def values_of(results: Results, value: Value, from_bytes: float = 0.0) -> dict[str, float | None]:
    """The value of each load of at least so many bytes; None where it is not known."""
    sizes = {load: max((made.kv_bytes for made in of.values()), default=-1.0) for load, of in results.items()}
    return {load: value(of) if ENGINE in of else None for load, of in results.items() if sizes[load] >= from_bytes}


def over_peers(of_load: Mapping[str, Result]) -> float | None:
    """Over the best of TRITON_PEERS; where that is less than 1.2, but 92% of a plain read are reached, as 1.2."""
    ratio, part = over(of_load, ENGINE, TRITON_PEERS), of_stream(of_load, ENGINE)
    return max(ratio, 1.2) if ratio is not None and part is not None and part >= 0.92 else ratio


def over_in_wall(of_load: Mapping[str, Result], rivals: tuple[str, ...]) -> float | None:
    """The least of the rivals' times from idle to idle over ours."""
    sound = {name: made.wall_us for name, made in of_load.items() if made.wall_us and not made.flags}
    times = [sound[rival] for rival in rivals if rival in sound]
    return min(times) / sound[ENGINE] if times and ENGINE in sound else None

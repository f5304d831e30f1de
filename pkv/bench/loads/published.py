"""The paper's published RTX 3060 times, and the steps that they belong to.

pkv/data/paper/rtx3060_published.csv has a row per log and engine: the mean GPU time of the decode steps of one trace.
The trace is drawn again here, and each step planned as that engine planned it; pkv.simulate then gives its time. The
published harness timed every step alone, from an idle GPU, and FlashInfer's plan() runs inside the timed step, while
the paper's own work lists were built beforehand. So a simulated step of FlashInfer's holds flashinfer_plan_us.

Rows have roles, chosen before any fit. **fit**: seed 20260623, and of the split sweeps the two counts 16 and 36.
**judge**: seed 20260624, the sweep over query heads per KV head, and the split counts 24 and 28. **again**: the other
rows of the sweeps, which time a fitted configuration once more and so show how far two measurements lie apart.
"""

import csv
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np

from pkv.bench.loads.traces import make_trace, steps_of
from pkv.cards.simulation import simulate
from pkv.decoding import plan as plan_step
from pkv.plans.gpu import GpuProfile
from pkv.plans.plan import Plan
from pkv.plans.shape import Shape

GPU = "rtx3060"
ROLES = ("fit", "judge", "again")
FITTED_LOGS = "seed_20260623_"
FITTED_SWEEPS = {
    ("split_sensitivity_bimodal_b8_s16.txt", "workqueue"),
    ("split_sensitivity_bucketed_b1_s36.txt", "length_buckets"),
}
TILE = 32  # tokens, in the paper's kernels
PROGRAMS_PER_SM = 2  # of the paper's kernels: each takes 39,936 bytes of an SM's 102,400 of shared memory


@dataclass(frozen=True)
class Configuration:
    """What was run: a trace, and who planned its steps. splits: per row; None for FlashInfer, which decides itself."""

    trace: str
    seed: int
    requests: int
    max_active: int
    steps: int
    engine: str
    splits: int | None = None
    q_heads: int = 32
    kv_heads: int = 8

    @property
    def shape(self) -> Shape:
        return Shape(self.q_heads, self.kv_heads, head_dim=128, page_size=16, dtype="float16")  # type: ignore[arg-type]


@dataclass(frozen=True)
class Row:
    """One published row: gpu_ms is the mean of its steps, useful_kv_mib their K and V (2**20 bytes)."""

    log: str
    configuration: Configuration
    gpu_ms: float
    useful_kv_mib: float
    role: str


@functools.cache
def published() -> tuple[Row, ...]:
    """All rows, in the order of the file."""
    lines = table("rtx3060_published.csv")
    configurations = [_configuration(line) for line in lines]
    to_fit = [line["log"].startswith(FITTED_LOGS) or (line["log"], line["engine"]) in FITTED_SWEEPS for line in lines]
    fitted = {configuration for configuration, fit in zip(configurations, to_fit, strict=True) if fit}
    return tuple(
        Row(
            log=line["log"],
            configuration=configuration,
            gpu_ms=float(line["gpu_ms"]),
            useful_kv_mib=float(line["useful_kv_mib"]),
            role="fit" if fit else "again" if configuration in fitted else "judge",
        )
        for line, configuration, fit in zip(lines, configurations, to_fit, strict=True)
    )


def table(name: str) -> list[dict[str, str]]:
    """The lines of one of pkv/data/paper's files."""
    text = (resources.files("pkv") / "data" / "paper" / name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def _configuration(line: dict[str, str]) -> Configuration:
    numbers = ("seed", "requests", "max_active", "steps", "q_heads", "kv_heads")
    return Configuration(
        trace=line["trace"],
        engine=line["engine"],
        splits=int(line["splits"]) if line["splits"] else None,
        **{name: int(line[name]) for name in numbers},
    )


@functools.cache
def plans_of(configuration: Configuration) -> tuple[tuple[Plan, int], ...]:
    """(plan, how many steps it stands for), in order.

    While the same requests are live, every row grows by a token a step and the time with it, evenly: the step in the
    middle stands for them all.
    """
    c = configuration
    requests = make_trace(c.trace, c.seed, c.requests, c.max_active, c.shape.page_size)
    return tuple((plan_as(c, lengths), n) for lengths, n in runs_of(steps_of(requests, c.max_active, c.steps)))


def runs_of(steps: Sequence[list[int]]) -> list[tuple[list[int], int]]:
    """Steps in which the same rows grow by a token each: (the lengths in the middle, number of steps).

    >>> runs_of([[5, 9], [6, 10], [7, 11], [8], [9], []])
    [([6, 10], 3), ([9], 2)]
    """
    runs: list[list[list[int]]] = []
    for step in steps:
        if runs and step and step == [length + 1 for length in runs[-1][-1]]:
            runs[-1].append(step)
        elif step:
            runs.append([step])
    return [(run[len(run) // 2], len(run)) for run in runs]


def plan_as(configuration: Configuration, lengths: Sequence[int]) -> Plan:
    """The step as the configuration's engine plans it: FlashInfer's for tensor cores, the paper's for its kernels."""
    c = configuration
    if c.engine == "flashinfer":
        return plan_step(lengths, c.shape, stage="flashinfer", kernel="tensor-core", gpu=GPU)
    return plan_step(lengths, c.shape, stage=c.engine, splits=c.splits, tile=TILE, gpu=GPU)


def simulated_ms(configuration: Configuration, profile: GpuProfile) -> float:
    """Mean time of a step, played."""
    return mean_of_steps(configuration, lambda plan: simulate(plan, profile).gpu_ms)


def mean_of_steps(configuration: Configuration, measure: Callable[[Plan], float]) -> float:
    """The mean over all steps of what `measure` says of a step's plan."""
    plans = plans_of(configuration)
    return float(np.average([measure(plan) for plan, _ in plans], weights=[n for _, n in plans]))


def isolated_ms(profile: GpuProfile) -> list[tuple[int, float, float]]:
    """(tokens, published ms, simulated ms) of one row alone with FlashInfer's tensor-core kernel, its plan() not timed.

    None of them is fitted: they were taken on a pool of pages with holes, the traces on one without.
    """
    alone = Configuration("one row", 0, 1, 1, 1, "flashinfer")
    lines = [line for line in table("rtx3060_isolated.csv") if line["method"] == "flashinfer-0.2.5 tensor-core"]
    return [
        (n, float(line["ms"]), simulate(plan_as(alone, [n]), profile).makespan_us / 1000)
        for line in lines
        for n in [int(line["context"])]
    ]

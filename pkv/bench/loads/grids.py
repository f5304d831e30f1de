"""Loads: what a benchmark decodes, by names that mean the same everywhere, and the grids that gather them.

A load has B rows, and L tokens in the longest.

>>> load("zipf", 4, 16384).steps[0].lengths
(16384, 8192, 5461, 4096)
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from pkv.bench.loads.published import runs_of
from pkv.bench.loads.traces import make_trace, steps_of
from pkv.plans.shape import Shape

SHAPE = Shape(n_q_heads=32, n_kv_heads=8, head_dim=128, page_size=16, dtype="float16")  # type: ignore[arg-type]
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LONGEST = (4096, 16384, 65536, 131072)
MOST_KV_BYTES = 16 * 10**9
SHORT_ROW = 512


@dataclass(frozen=True)
class Step:
    """One decode step: tokens per row, and how many steps of a trace it stands for."""

    lengths: tuple[int, ...]
    weight: int = 1


@dataclass(frozen=True)
class Load:
    """A shape and steps to decode. The name says all of it, so two loads of one name are the same."""

    name: str
    shape: Shape
    steps: tuple[Step, ...]
    seed: int = 0

    @property
    def n_rows(self) -> int:
        return max((len(step.lengths) for step in self.steps), default=0)

    @property
    def longest(self) -> int:
        return max((max(step.lengths, default=0) for step in self.steps), default=0)

    @property
    def kv_bytes(self) -> float:
        """K and V of a step, weighted mean."""
        tokens = [sum(step.lengths) for step in self.steps]
        weights = [step.weight for step in self.steps]
        return float(np.average(tokens, weights=weights)) * self.shape.kv_bytes_per_token if tokens else 0.0


def equal(n_rows: int, longest: int, seed: int) -> list[int]:
    """All rows have L tokens."""
    return [longest] * n_rows


def uniform(n_rows: int, longest: int, seed: int) -> list[int]:
    """Any length from L / 8 to L."""
    drawn: list[int] = np.random.default_rng(seed).integers(longest // 8, longest + 1, n_rows).tolist()
    return drawn


def bimodal(n_rows: int, longest: int, seed: int) -> list[int]:
    """Every fourth row has L tokens, the others L / 8."""
    return [longest if row % 4 == 0 else longest // 8 for row in range(n_rows)]


def zipf(n_rows: int, longest: int, seed: int) -> list[int]:
    """L, L / 2, L / 3, ..., and at least L / 64."""
    return [max(longest // 64, longest // (row + 1)) for row in range(n_rows)]


def one_long(n_rows: int, longest: int, seed: int) -> list[int]:
    """One row of L tokens, the others of 512."""
    return [longest if row == 0 else min(SHORT_ROW, longest) for row in range(n_rows)]


def short(n_rows: int, longest: int, seed: int) -> list[int]:
    """Any length from 256 to 2048; there is no L."""
    drawn: list[int] = np.random.default_rng(seed).integers(256, 2049, n_rows).tolist()
    return drawn


LOADS: dict[str, Callable[[int, int, int], list[int]]] = {
    "equal": equal,
    "uniform": uniform,
    "bimodal": bimodal,
    "zipf": zipf,
    "one_long": one_long,
    "short": short,
}


def load(kind: str, n_rows: int, longest: int = 0, shape: Shape = SHAPE, seed: int = 0) -> Load:
    """One step of a load of LOADS; ValueError lists them. longest: ignored by `short`.

    >>> load("equal", 2, 65536).name, load("short", 4).name
    ('equal(2,64k)', 'short(4)')
    """
    if kind not in LOADS:
        raise ValueError(f"load = {kind!r} does not exist; choose one of {', '.join(LOADS)}")
    sizes = f"{n_rows}" if kind == "short" else f"{n_rows},{tokens(longest)}"
    lengths = LOADS[kind](n_rows, longest, seed)
    return Load(named(f"{kind}({sizes})", shape, seed), shape, (Step(tuple(lengths)),), seed)


def tokens(n: int) -> str:
    """
    >>> tokens(16384), tokens(1000)
    ('16k', '1000')
    """
    return f"{n // 1024}k" if n and n % 1024 == 0 else str(n)


def named(name: str, shape: Shape, seed: int = 0) -> str:
    """The name, and what differs from SHAPE and seed 0."""
    heads = shape.n_q_heads, shape.n_kv_heads
    parts = [
        name,
        "" if heads == (SHAPE.n_q_heads, SHAPE.n_kv_heads) else f"heads {heads[0]},{heads[1]}",
        "" if shape.head_dim == SHAPE.head_dim else f"head_dim {shape.head_dim}",
        "" if shape.page_size == SHAPE.page_size else f"page {shape.page_size}",
        "" if shape.dtype == SHAPE.dtype else str(shape.dtype).removeprefix("torch."),
        f"seed {seed}" if seed else "",
    ]
    return " ".join(filter(None, parts))


PAPER_TRACES = ("bimodal", "uniform", "zipf", "bucketed", "homogeneous")
PAPER_SEEDS = (20260623, 20260624, 20260625, 20260626, 20260627)
PAPER_RUNS = {1: (16, 64), 4: (24, 48), 8: (24, 48)}  # most active rows: (requests, steps)


def trace_load(trace: str, max_active: int, seed: int) -> Load:
    """One of the paper's runs. While the same rows are live, the step in the middle stands for them all."""
    n_requests, n_steps = PAPER_RUNS[max_active]
    runs = runs_of(steps_of(make_trace(trace, seed, n_requests, max_active), max_active, n_steps))
    steps = tuple(Step(tuple(lengths), n) for lengths, n in runs)
    return Load(f"trace {trace} B{max_active} seed {seed}", SHAPE, steps, seed)


def smoke() -> Iterable[Load]:
    """Six cells that differ in all that matters: one row, few ragged ones, many, one long among short."""
    yield load("equal", 1, 16384)
    yield load("bimodal", 4, 16384)
    yield load("bimodal", 8, 16384)
    yield load("zipf", 8, 65536)
    yield load("one_long", 64, 65536)
    yield load("short", 128)


def paper() -> Iterable[Load]:
    """The paper's five traces, with one, four and eight active rows, on five seeds."""
    for max_active, trace, seed in itertools.product(PAPER_RUNS, PAPER_TRACES, PAPER_SEEDS):
        yield trace_load(trace, max_active, seed)


VARIANTS = (
    {"n_q_heads": 8},
    {"n_q_heads": 64},
    {"page_size": 1},
    {"page_size": 32},
    {"page_size": 64},
    {"page_size": 128},
    {"head_dim": 64},
    {"head_dim": 256},
    {"dtype": "bfloat16", "kv_dtype": "bfloat16"},
)


def full() -> Iterable[Load]:
    """Every second of B x load x L that fits in MOST_KV_BYTES, `short` for every B, and a handful of other shapes."""
    for longest in LONGEST:
        yield load("equal", 1, longest)
    kinds = ("equal", "uniform", "bimodal", "zipf")
    cells = itertools.product(enumerate(ROWS[1:]), enumerate(LONGEST), enumerate(kinds))
    for (nth_rows, n_rows), (nth_longest, longest), (nth_kind, kind) in cells:
        made = load(kind, n_rows, longest)
        if (nth_rows + nth_longest + nth_kind) % 2 == 0 and made.kv_bytes <= MOST_KV_BYTES:
            yield made
    for n_rows in ROWS[3:]:
        for longest in (65536, 131072):
            yield load("one_long", n_rows, longest)
    for n_rows in ROWS:
        yield load("short", n_rows)
    for changed in VARIANTS:
        shape = replace(SHAPE, **changed)
        for kind, n_rows, longest in (("equal", 1, 65536), ("bimodal", 8, 16384), ("uniform", 32, 16384)):
            yield load(kind, n_rows, longest, shape)


def growth() -> Iterable[Load]:
    """One to 1024 rows of 1k: how planning on the host and workspace grow with the batch."""
    for power in range(11):
        yield load("equal", 2**power, 1024)


GRIDS: dict[str, Callable[[], Iterable[Load]]] = {"smoke": smoke, "paper": paper, "full": full, "growth": growth}


@functools.cache
def grid(name: str) -> tuple[Load, ...]:
    """The loads of a grid; ValueError lists the grids there are."""
    if name not in GRIDS:
        raise ValueError(f"grid = {name!r} does not exist; choose one of {', '.join(GRIDS)}")
    return tuple(GRIDS[name]())

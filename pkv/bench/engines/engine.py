"""What an engine is to a benchmark: something that prepares, plans and runs one decode step.

    engine.why_not(batch)       -> a reason, where it cannot do this batch; None if it can
    engine.prepare(batch)       -> Ready: what is done once for a model (compile, allocate, bring the page table in the
                                   form that it reads); never timed
    ready.plan()                -> what must be done once per step, for all its layers, copies to the GPU included
    ready.run(planned)          -> out [n_rows, n_q_heads, head_dim] and lse, or None where it gives none: one layer

Row lengths are known on the host, to all engines alike.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pkv.bench.accuracy import Accuracy
from pkv.cache.paged import PagedKVCache
from pkv.plans.gpu import GpuProfile
from pkv.plans.shape import Shape


@dataclass(frozen=True)
class Batch:
    """One decode step on a device. Slots past a row's length hold large finite values, which no result may show."""

    q: torch.Tensor
    cache: PagedKVCache
    lengths: list[int]
    shape: Shape
    gpu: GpuProfile

    @property
    def kv_bytes(self) -> int:
        return sum(self.lengths) * self.shape.kv_bytes_per_token


@dataclass(frozen=True)
class Ready:
    """An engine made ready for a batch.

    settings: what it chose, for the record. rounds_weights: see Yardstick.measure. check: judges a result of run() that
    is no attention (`stream`); None: the result is measured against fp64.
    """

    plan: Callable[[], Any]
    run: Callable[[Any], tuple[torch.Tensor, torch.Tensor | None]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    rounds_weights: bool = False
    check: Callable[[tuple[torch.Tensor, torch.Tensor | None]], Accuracy] | None = None


def nothing_to_plan() -> None:
    """plan() of an engine that needs nothing from the host."""


@dataclass(frozen=True)
class Engine:
    """A name, what it is in a few words, and the two functions above. family: pkv, flashinfer, triton or torch."""

    name: str
    what: str
    family: str
    why_not: Callable[[Batch], str | None]
    prepare: Callable[[Batch], Ready]

"""The stages, in reading order, and the protocol that each stage follows.

A stage is a module with all the names of `Stage`. Stages differ in which program does which tiles. The attention maths
(kernels/tile.py) and the merge (kernels/merging.py) are the same in all stages.
"""

from collections.abc import Callable
from typing import Protocol

from pkv.kernels.launching import KernelArgs
from pkv.plans.facts import FACTS, Facts
from pkv.plans.plan import Plan
from pkv.stages import (
    s0_reference,
    s1_length_buckets,
    s1_split_kv,
    s2_row_local,
    s3_workqueue,
    s4_adaptive,
    s5_stream_k,
    x_flashinfer,
)


class Stage(Protocol):
    """The names that a module must have to be a stage. A new stage is a file, and a line in STAGES."""

    @property
    def PLANNED_ON(self) -> str:
        """ "gpu": the kernels find their work from the lengths on the GPU; "host": plan() must know the lengths."""

    @property
    def FACTS(self) -> Facts:
        """Facts that readers of its plans need: whose kernels run them, their grid's order, how they merge."""

    @property
    def PARTS(self) -> tuple[str, ...]:
        """The parts (see pkv.Parts) that a user can replace; if there are any, launch() takes parts= too."""

    @property
    def plan(self) -> Callable[..., Plan]:
        """(lengths int32 [n_rows], shape, *, options) -> Plan. A pure function on the CPU, without Triton or a GPU."""

    @property
    def launch(self) -> Callable[..., None]:
        """(q, cache, plan, scale, out, lse, values=): run the plan, fill out [n_rows, n_q_heads, head_dim] and lse.

        lse is fp32 [n_rows, n_q_heads]. values: what the plan's features need, see Values."""

    @property
    def fault_of_items(self) -> Callable[[Plan], str | None]:
        """(plan): say where the plan's items differ from those that the kernel will find; None if they agree.

        It is None too if the kernel reads the items."""


class KernelStage(Stage, Protocol):
    """A stage of pkv's kernels, which can launch them for other tensors of the same kind, as a Step does."""

    @property
    def launcher(self) -> Callable[[Plan, int], Callable[[KernelArgs], None]]:
        """(plan, capacity of the cache in tokens per row): make the function that launches the kernels at each call."""


STAGES: dict[str, Stage] = {
    "reference": s0_reference,
    "split_kv": s1_split_kv,
    "length_buckets": s1_length_buckets,
    "row_local": s2_row_local,
    "workqueue": s3_workqueue,
    "adaptive": s4_adaptive,
    "stream_k": s5_stream_k,
    "flashinfer": x_flashinfer,
}
LAUNCHED: dict[str, KernelStage] = {
    "split_kv": s1_split_kv,
    "length_buckets": s1_length_buckets,
    "row_local": s2_row_local,
    "workqueue": s3_workqueue,
    "stream_k": s5_stream_k,
}
TAKES: dict[str, tuple[str, ...]] = {name: stage.PARTS for name, stage in STAGES.items()}
FACTS.update({name: stage.FACTS for name, stage in STAGES.items()})

"""The stages, in reading order, and what every stage is.

A stage is a module with all that `Stage` names. Stages differ in who does which tiles; the attention maths
(kernels/tile.py) and the merge (kernels/merging.py) are the same in all.
"""

from collections.abc import Callable
from typing import Protocol

from pkv.kernels.launching import KernelArgs
from pkv.plans.fields import Family
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
    """What a module must have to be a stage; a new one is a file, and a line in STAGES."""

    @property
    def PLANNED_ON(self) -> str:
        """ "gpu": its kernels find their work from the lengths on the GPU; "host": plan() must know the lengths."""

    @property
    def FAMILY(self) -> Family:
        """Whose kernels it launches."""

    @property
    def PARTS(self) -> tuple[str, ...]:
        """Which parts of others (pkv.Parts) can take the place of ours; where any can, launch() takes parts= too."""

    @property
    def plan(self) -> Callable[..., Plan]:
        """(lengths int32 [n_rows], shape, *, options) -> Plan. Pure, on the CPU; needs neither Triton nor a GPU."""

    @property
    def launch(self) -> Callable[..., None]:
        """(q, cache, plan, scale, out, lse): run the plan. Fills out [n_rows, n_q_heads, head_dim] and lse (fp32)
        [n_rows, n_q_heads]."""

    @property
    def fault_of_items(self) -> Callable[[Plan], str | None]:
        """(plan): where its items are not those that the kernel will find; None if they agree, or the kernel reads
        them."""


class RepeatedStage(Stage, Protocol):
    """A stage whose launch can be repeated for other tensors of the same kind, without looking at the plan again."""

    @property
    def arguments(self) -> Callable[..., KernelArgs]:
        """(q, cache, plan, scale, out, lse): what its kernels are launched with."""

    @property
    def launcher(self) -> Callable[[Plan, int], Callable[[KernelArgs], None]]:
        """(plan, capacity of the cache in tokens a row): what launches them, as often as it is called."""


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
REPEATED: dict[str, RepeatedStage] = {"stream_k": s5_stream_k}
TAKES: dict[str, tuple[str, ...]] = {name: stage.PARTS for name, stage in STAGES.items()}

"""The stages, in reading order, and what every stage is.

A stage is a module with

    PLANNED_ON                      "gpu": its kernels find their work from the lengths on the GPU; "host": plan() must
                                    know the lengths
    plan(lengths, shape, *, ...)    int32 lengths -> Plan; pure, on the CPU, needs neither Triton nor a GPU
    launch(q, cache, plan, scale, out, lse)
                                    run the plan: fills out [n_rows, n_q_heads, head_dim] and
                                    lse [n_rows, n_q_heads] (fp32)

and, where its kernel finds its tokens without reading the plan's items,

    fault_of_items(plan)            where the items are not those that the kernel will find, or None

and, where somebody else's parts (pkv.Parts) can take the place of ours in it,

    PARTS                           their names; launch() then takes parts= too

Stages differ in who does which tiles; the attention maths (tile.py) and the merge (merging.py) are the same in all.
"""

from typing import Any, Protocol

import torch

from pkv.cache.paged import PagedKVCache
from pkv.plans.plan import Int32Array, Plan
from pkv.plans.shape import Shape
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
    """The contract above, for the type checker."""

    PLANNED_ON: str

    @staticmethod
    def plan(lengths: Int32Array, shape: Shape, **options: Any) -> Plan: ...

    @staticmethod
    def launch(
        q: torch.Tensor, cache: PagedKVCache, plan: Plan, scale: float, out: torch.Tensor, lse: torch.Tensor
    ) -> None: ...


STAGES: dict[str, Any] = {
    "reference": s0_reference,
    "split_kv": s1_split_kv,
    "length_buckets": s1_length_buckets,
    "row_local": s2_row_local,
    "workqueue": s3_workqueue,
    "adaptive": s4_adaptive,
    "stream_k": s5_stream_k,
    "flashinfer": x_flashinfer,
}
TAKES: dict[str, tuple[str, ...]] = {name: getattr(module, "PARTS", ()) for name, module in STAGES.items()}

"""Counters of a plan: launches, programs, waves and bytes, counted from the plan without running it."""

from dataclasses import dataclass

import numpy as np

from pkv.plans.fields import PlanFields

MIB = 2**20


@dataclass(frozen=True)
class Counters:
    """The counts of one decode step of one layer, made without running it. Sizes are in MiB (2**20 bytes).

    launches: decode and merge kernels launched. programs: programs launched over all KV heads (times Shape.head_blocks
    if a group is cut); empty_programs: those without a token. waves: programs / (SMs x programs that reside on one SM),
    both as the plan says; a simulation may count on fewer (Costs.programs_per_sm).
    cta_per_sm: non-empty items x KV heads / SMs (the paper's measure).
    useful_kv_mib: K and V of all tokens that a query sees; padded_kv_mib: bytes of K and V that are read beyond those.
    merge_state_mib: non-empty items x n_q_heads x (2 + head_dim) x 4 bytes, the paper's measure, which includes rows
    that are not split; merge_moved_mib: what is really moved, (1 + head_dim) x 4 bytes per head, written once and read
    once, split rows only.
    """

    launches: int
    programs: int
    empty_programs: int
    waves: float
    cta_per_sm: float
    useful_kv_mib: float
    padded_kv_mib: float
    merge_state_mib: float
    merge_moved_mib: float


def count(plan: PlanFields) -> Counters:
    """Count a plan; see Counters for the definitions."""
    shape = plan.shape
    sizes = plan.item_tokens
    order = np.arange(plan.n_items) if plan.item_order is None else plan.item_order
    tokens_before = np.concatenate([[0], np.cumsum(sizes[order])])
    empty_programs = int((np.diff(tokens_before[plan.program_offsets]) == 0).sum())
    items_per_row = np.diff(plan.partial_offsets)
    in_split_row = items_per_row[plan.items[:, 0]] > 1
    n_full = int((sizes > 0).sum())
    n_moved = int(((sizes > 0) & in_split_row).sum())
    return Counters(
        launches=len(plan.launches),
        programs=plan.n_programs * shape.grid_heads,
        empty_programs=empty_programs * shape.grid_heads,
        waves=plan.n_programs * shape.grid_heads / (plan.gpu.n_sms * plan.programs_per_sm),
        cta_per_sm=n_full * shape.n_kv_heads / plan.gpu.n_sms,
        useful_kv_mib=int(np.diff(plan.spans).sum()) * shape.kv_bytes_per_token / MIB,
        padded_kv_mib=0.0,  # loads are masked: no stage of pkv's reads beyond a row's span
        merge_state_mib=n_full * shape.n_q_heads * (2 + shape.head_dim) * 4 / MIB,
        merge_moved_mib=2 * n_moved * shape.n_q_heads * (1 + shape.head_dim) * 4 / MIB,
    )

"""Stage 0, reference: attention in PyTorch, row by row through the block table. It specifies every other stage.

For row r with L tokens, query head h and KV head j = h // G:

    token t  = slot t % page_size of page table[r, t // page_size]
    score[t] = scale * q[r, h] . k[t, j]          t = 0 .. L - 1
    out      = sum_t softmax(score)[t] * v[t, j]
    lse      = log(sum_t exp(score[t]))           natural logarithm
    L = 0:     out = 0, lse = -inf

A window w leaves only the tokens t = max(0, L - w) .. L - 1. A soft-cap c makes every score c * tanh(score / c).

Lengths [5, 40] give the items (0, 0:5), (1, 0:40): one per row, and no kernel launch of pkv's.
"""

import numpy as np
import torch

from pkv.cache.paged import PagedKVCache
from pkv.cards.known import resolve_gpu
from pkv.plans.facts import Facts, Family
from pkv.plans.features import NO_VALUES, Values
from pkv.plans.fields import Int32Array
from pkv.plans.gpu import GpuProfile
from pkv.plans.plan import Plan
from pkv.plans.shape import Shape

PLANNED_ON = "host"
FACTS = Facts(family=Family.TORCH)
PARTS: tuple[str, ...] = ()


def plan(lengths: Int32Array, shape: Shape, *, gpu: "str | GpuProfile | None" = None) -> Plan:
    """Plan one item per row, which holds the whole row."""
    n_rows = len(lengths)
    rows = np.arange(n_rows)
    return Plan(
        stage="reference",
        shape=shape,
        lengths=lengths,
        items=np.stack([rows, np.zeros_like(rows), lengths], axis=1),
        program_offsets=np.arange(n_rows + 1, dtype=np.int32),
        partial_offsets=np.arange(n_rows + 1, dtype=np.int32),
        launches=(),
        tile=1,
        gpu=resolve_gpu(gpu),
        programs_per_sm=1,
    )


def fault_of_items(plan: Plan) -> None:
    """Return None: whatever the items are, each row is attended to as a whole."""


@torch.no_grad()
def launch(
    q: torch.Tensor, cache: PagedKVCache, plan: Plan, scale: float, out: torch.Tensor, lse: torch.Tensor,
    values: Values = NO_VALUES,
) -> None:  # fmt: skip
    """Fill out [n_rows, n_q_heads, head_dim] and lse [n_rows, n_q_heads] row by row. Rows not in use have no tokens."""
    out.zero_()
    lse.fill_(-torch.inf)
    for row in cache.active_rows:
        # this reads n_kv_heads * head_dim * L elements of K and as many of V, whatever the number of query heads
        k, v = cache.gather(row, plan.shape.features.window)  # [tokens that are seen, n_kv_heads, head_dim]
        out[row], lse[row] = attend_row(q[row], k, v, scale, values.soft_cap)


def attend_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, soft_cap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of one token over one row: q [n_q_heads, head_dim], k and v [L, n_kv_heads, head_dim].

    The arithmetic is fp64 whatever the inputs: a specification should not round, nor follow autocast or TF32. Returns
    out [n_q_heads, head_dim] and lse [n_q_heads], both fp64. No tokens, or only scores of -inf, give out 0, lse -inf.
    """
    n_q_heads, head_dim = q.shape
    n_tokens, n_kv_heads, _ = k.shape
    if n_tokens == 0:  # the softmax of no scores is undefined
        out = q.new_zeros(n_q_heads, head_dim, dtype=torch.float64)
        return out, q.new_full((n_q_heads,), -torch.inf, dtype=torch.float64)
    grouped = q.double().reshape(n_kv_heads, n_q_heads // n_kv_heads, head_dim)  # head h is [h // G, h % G]
    with torch.autocast(q.device.type, enabled=False):
        scores = scale * torch.einsum("jgd,tjd->jgt", grouped, k.double())  # 2 * n_q_heads * L * head_dim flop
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.softmax(scores, dim=-1)
        out = torch.einsum("jgt,tjd->jgd", weights, v.double())  # as many again
    out = torch.where((lse == -torch.inf)[..., None], 0.0, out)
    return out.reshape(n_q_heads, head_dim), lse.reshape(n_q_heads)

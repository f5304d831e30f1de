"""The one exact merge of partial states.

A state summarises some tokens of a row: out = sum(exp(score) * v) / sum(exp(score)), lse = log(sum(exp(score))).
States of disjoint token sets combine exactly:

    lse = log(sum_i exp(lse_i))            out = sum_i exp(lse_i - lse) * out_i

The state of no tokens is (anything, -inf): its weight is exp(-inf) = 0 and its out is never read, so it is neutral
whatever memory holds. Ten states of one token each merge to the state of ten tokens, in any order and grouping.
"""

from collections.abc import Sequence

import torch

from pkv._triton import tl, triton
from pkv.tile import KernelShape, StateArgs

State = tuple[torch.Tensor, torch.Tensor]
BLOCK_S = 16  # states loaded at once


def merge(states: Sequence[State]) -> State:
    """Merge states of disjoint token sets into one, exactly; empty states are neutral.

    states: pairs (out [..., head_dim], lse [...]) of equal shapes, lse in natural log (base-2 values of other engines
    times ln 2). Returns (out, lse) in out's dtype and fp32 (fp64 for fp64 input); all empty: out 0, lse -inf.
    Raises ValueError for no states or unequal shapes.

    >>> out, lse = merge([(torch.ones(1, 1), torch.zeros(1)), (torch.zeros(1, 1), torch.full((1,), -torch.inf))])
    >>> out.item(), lse.item()
    (1.0, 0.0)
    """
    states = list(states)
    if not states:
        raise ValueError("states is empty: merge needs at least one (out, lse) pair")
    for index, (out, lse) in enumerate(states):
        if out.shape != states[0][0].shape or lse.shape != out.shape[:-1]:
            raise ValueError(
                f"states[{index}]: out {list(out.shape)} and lse {list(lse.shape)} do not fit; "
                f"every out must be {list(states[0][0].shape)} and every lse {list(states[0][0].shape[:-1])}"
            )
        if out.device != states[0][0].device or lse.device != out.device:
            raise ValueError(f"states[{index}] lies on {out.device} / {lse.device}, states[0] on {states[0][0].device}")
    wide = torch.promote_types(states[0][0].dtype, torch.float32)
    outs = torch.stack([out.to(wide) for out, _ in states])
    lses = torch.stack([lse.to(wide) for _, lse in states])
    largest = lses.amax(0)
    # with every state empty, -inf - -inf would be NaN: any finite base gives weights exp(-inf) = 0
    base = torch.where(largest == -torch.inf, 0.0, largest)
    weights = torch.exp(lses - base)
    total = weights.sum(0)
    # 0 * NaN is NaN: what an empty state holds must not be multiplied, but replaced
    outs = torch.where((weights == 0.0)[..., None], 0.0, outs)
    out = (outs * weights[..., None]).sum(0) / torch.where(total == 0.0, 1.0, total)[..., None]
    return out.to(states[0][0].dtype), base + torch.log(total)


@triton.jit
def merge_kernel(partials, result, partial_offsets, row_ids, SHAPE: tl.constexpr, BLOCK_S: tl.constexpr):
    """One program per (row, query head): merge the row's items. A row with one item was written already."""
    N_Q_HEADS: tl.constexpr = SHAPE.GROUP * SHAPE.N_KV_HEADS
    head = tl.program_id(0) % N_Q_HEADS
    row = tl.program_id(0) // N_Q_HEADS
    if row_ids is not None:
        row = tl.load(row_ids + row)
    begin = tl.load(partial_offsets + row)
    end = tl.load(partial_offsets + row + 1)
    if end - begin != 1:
        BLOCK_D: tl.constexpr = SHAPE.BLOCK_D
        dims = tl.arange(0, BLOCK_D)
        in_dim = dims < SHAPE.HEAD_DIM
        # Scalar offsets go onto the pointer first: some Triton releases miscompile a reduction whose base offset sits
        # inside the [BLOCK_S, BLOCK_D] offset tensor.
        outs_ptr = partials.out.ptr + begin.to(tl.int64) * partials.out.strides[0] + head * partials.out.strides[1]
        lses_ptr = partials.lse.ptr + begin.to(tl.int64) * partials.lse.strides[0] + head
        acc = tl.zeros([BLOCK_D], tl.float32)
        running_max = float("-inf")
        running_sum = 0.0
        for first in range(0, end - begin, BLOCK_S):
            states = first + tl.arange(0, BLOCK_S)
            lses = tl.load(
                lses_ptr + states.to(tl.int64) * partials.lse.strides[0], mask=states < end - begin, other=float("-inf")
            )
            # an empty state's out was never written, so it is not read either
            mask = (lses > float("-inf"))[:, None] & in_dim[None, :]
            outs = tl.load(
                outs_ptr + states.to(tl.int64)[:, None] * partials.out.strides[0] + dims[None, :], mask=mask, other=0.0
            )
            new_max = tl.maximum(running_max, tl.max(lses, 0))
            base = tl.where(new_max == float("-inf"), 0.0, new_max)  # -inf - -inf would be NaN
            weights = tl.exp2((lses - base) * 1.4426950408889634)
            correction = tl.exp2((running_max - base) * 1.4426950408889634)
            acc = acc * correction + tl.sum(outs * weights[:, None], 0)
            running_sum = running_sum * correction + tl.sum(weights, 0)
            running_max = new_max
        is_empty = running_sum == 0.0
        total = tl.where(is_empty, 1.0, running_sum)
        lse = tl.where(is_empty, float("-inf"), running_max + tl.log2(total) / 1.4426950408889634)
        stride_row, stride_head, stride_dim = result.out.strides
        out_ptr = result.out.ptr + row.to(tl.int64) * stride_row + head.to(tl.int64) * stride_head
        tl.store(out_ptr + dims * stride_dim, (acc / total).to(result.out.ptr.dtype.element_ty), mask=in_dim)
        tl.store(result.lse.ptr + row.to(tl.int64) * result.lse.strides[0] + head, lse)


def launch_merge(
    partials: StateArgs,
    result: StateArgs,
    partial_offsets: torch.Tensor,
    row_ids: torch.Tensor | None,
    n_rows: int,
    shape: KernelShape,
) -> None:
    """Merge the partials of `n_rows` rows (row_ids int32 on the same device, or None for all in order) into result."""
    grid = (n_rows * shape.GROUP * shape.N_KV_HEADS,)
    merge_kernel[grid](partials, result, partial_offsets, row_ids, shape, BLOCK_S, num_warps=4)

"""The exact merge of partial states, in torch and as a kernel.

A state summarises some tokens of a row: out = sum(exp(score) * v) / sum(exp(score)), lse = log(sum(exp(score))).
States of disjoint token sets combine exactly:

    lse = log(sum_i exp(lse_i))            out = sum_i exp(lse_i - lse) * out_i

The state of no tokens is (anything, -inf). Its weight is exp(-inf) = 0 and its out is never read, so it is neutral,
whatever its memory holds. Ten states of one token each merge to the state of ten tokens, in any order and grouping.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pkv._triton import Signature, launch_kernel, tl, triton
from pkv.kernels.configs import next_power_of_two
from pkv.kernels.tile import KernelShape, StateArgs

State = tuple[torch.Tensor, torch.Tensor]
# A row's states are loaded at once if they fit, since a loop would wait for memory at every turn. Many states are
# divided among programs by dims. On an H200 the merge of 148 splits of one row takes 4 us, up to 22 with small blocks.
SMALLEST_BLOCK_S, LARGEST_BLOCK_S = 16, 256
PROGRAM_ELEMENTS = 2048  # state elements per warp
MOST_DIM_BLOCKS = 4
MOST_WARPS = 4


def merge(states: Sequence[State]) -> State:
    """Merge partial states of disjoint token sets into one, exactly; empty states are neutral.

    states: pairs (out [..., head_dim], lse [...]) of equal shapes, lse in natural log (multiply base-2 values of other
    engines by ln 2). A state is empty if its lse is -inf, whatever its out holds, or if its lse is +inf and its out 0,
    which is FlashAttention's mark. Any other lse of +inf is an overflow and gives NaN, and so does an lse of NaN.
    Returns out [..., head_dim] in out's dtype and lse [...] in fp32 (fp64 for fp64 input). If all states are empty, out
    is 0 and lse -inf. Gradients flow.
    Raises ValueError for no states or unequal shapes.

    >>> out, lse = merge([(torch.ones(1, 1), torch.zeros(1)), (torch.zeros(1, 1), torch.full((1,), -torch.inf))])
    >>> out.item(), lse.item()
    (1.0, 0.0)
    """
    states = list(states)
    if not states:
        raise ValueError("states is empty: merge needs at least one (out, lse) pair")
    for index, state in enumerate(states):
        if len(state) != 2 or not all(isinstance(x, torch.Tensor) and x.is_floating_point() for x in state):
            raise TypeError(f"states[{index}] must be a pair (out, lse) of floating-point tensors")
        out, lse = state
        if out.dtype != states[0][0].dtype:
            raise TypeError(f"states[{index}]: out is {out.dtype}, states[0] has {states[0][0].dtype}: convert one")
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
    lses = torch.where((lses == torch.inf) & (outs == 0.0).all(-1), -torch.inf, lses)
    largest = lses.amax(0)
    # if every state is empty, -inf - -inf would be NaN; with any finite base the weights are exp(-inf) = 0
    base = torch.where(largest == -torch.inf, 0.0, largest)
    weights = torch.exp(lses - base)
    total = weights.sum(0)
    # 0 * NaN is NaN: the out of an empty state must be replaced, not multiplied
    outs = torch.where((weights == 0.0)[..., None], 0.0, outs)
    out = (outs * weights[..., None]).sum(0) / torch.where(total == 0.0, 1.0, total)[..., None]
    return out.to(states[0][0].dtype), base + torch.log(total)


@triton.jit
def merge_items(
    partials, result, row, heads, exists, dims, first, n_items,
    SHAPE: tl.constexpr, BLOCK_S: tl.constexpr, OF_RUNS: tl.constexpr,
):  # fmt: skip
    """Merge a row's items into its result, for query heads [H] (where `exists`) and dims [D].

    The items' states lie at first, first + 1, ... in the partials. OF_RUNS: they lie at first + 1, + 2, + 4, + 6, ...,
    and none is empty. A run has two places for states: the first for a row that began before the run, the second for a
    row that ends after it.
    """
    H: tl.constexpr = heads.shape[0]
    D: tl.constexpr = dims.shape[0]
    in_dim = dims < SHAPE.HEAD_DIM
    # Scalar offsets go onto the pointer first: some Triton releases miscompile a reduction whose base offset sits
    # inside the offset tensor.
    out_stride, head_stride, _ = partials.out.strides
    outs_ptr = partials.out.ptr + first.to(tl.int64) * out_stride
    lses_ptr = partials.lse.ptr + first.to(tl.int64) * partials.lse.strides[0]
    acc = tl.zeros([H, D], tl.float32)
    running_max = tl.full([H], float("-inf"), tl.float32)
    running_sum = tl.zeros([H], tl.float32)
    for begin in range(0, n_items, BLOCK_S):
        items = begin + tl.arange(0, BLOCK_S)
        slots = (2 * items + (items == 0).to(tl.int32) if OF_RUNS else items).to(tl.int64)
        mask = (items < n_items)[:, None] & exists[None, :]
        lses = tl.load(
            lses_ptr + slots[:, None] * partials.lse.strides[0] + heads[None, :], mask=mask, other=float("-inf")
        )
        if not OF_RUNS:  # an empty item's out may hold anything, so it is not read
            mask = lses > float("-inf")
        out_offsets = slots[:, None, None] * out_stride + heads[None, :, None] * head_stride + dims[None, None, :]
        outs = tl.load(outs_ptr + out_offsets, mask=mask[:, :, None] & in_dim[None, None, :], other=0.0)
        new_max = tl.maximum(running_max, tl.max(lses, 0))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)  # -inf - -inf would be NaN
        weights = tl.exp2((lses - base[None, :]) * 1.4426950408889634)
        correction = tl.exp2((running_max - base) * 1.4426950408889634)
        acc = acc * correction[:, None] + tl.sum(outs * weights[:, :, None], 0)
        running_sum = running_sum * correction + tl.sum(weights, 0)
        running_max = new_max
    is_empty = running_sum == 0.0
    total = tl.where(is_empty, 1.0, running_sum)
    lse = tl.where(is_empty, float("-inf"), running_max + tl.log2(total) / 1.4426950408889634)
    stride_row, stride_head, stride_dim = result.out.strides
    out_ptrs = result.out.ptr + row.to(tl.int64) * stride_row + heads.to(tl.int64)[:, None] * stride_head
    out_ptrs += dims.to(tl.int64)[None, :] * stride_dim
    out = (acc / total[:, None]).to(result.out.ptr.dtype.element_ty)
    tl.store(out_ptrs, out, mask=exists[:, None] & in_dim[None, :])
    tl.store(result.lse.ptr + row.to(tl.int64) * result.lse.strides[0] + heads, lse, mask=exists)


@triton.jit(do_not_specialize=["n_splits"])
def merge_kernel(
    partials, result, partial_offsets, row_ids, n_splits,
    SHAPE: tl.constexpr, BLOCK_S: tl.constexpr, DIM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program per (row, query head, block of dims): merge the row's items. A row with one item is done already.

    partial_offsets None: every row has n_splits items.
    """
    N_Q_HEADS: tl.constexpr = SHAPE.GROUP * SHAPE.N_KV_HEADS
    BLOCK_D: tl.constexpr = SHAPE.BLOCK_D // DIM_BLOCKS
    dims = tl.program_id(0) % DIM_BLOCKS * BLOCK_D + tl.arange(0, BLOCK_D)
    heads = tl.program_id(0) // DIM_BLOCKS % N_Q_HEADS + tl.arange(0, 1)
    row = tl.program_id(0) // DIM_BLOCKS // N_Q_HEADS
    if row_ids is not None:
        row = tl.load(row_ids + row)
    if SHAPE.EARLY_MERGE:
        tl.extra.cuda.gdc_wait()
    if partial_offsets is None:
        first = row * n_splits
        n_items = n_splits
    else:
        first = tl.load(partial_offsets + row)
        n_items = tl.load(partial_offsets + row + 1) - first
    if n_items != 1:
        merge_items(partials, result, row, heads, heads >= 0, dims, first, n_items, SHAPE, BLOCK_S, False)


def launch_merge(
    partials: StateArgs,
    result: StateArgs,
    partial_offsets: torch.Tensor | None,
    row_ids: torch.Tensor | None,
    n_rows: int,
    most_items: int,
    shape: KernelShape,
    signature: Signature | None = None,
) -> None:
    """Merge the partials of `n_rows` rows (row_ids int32 on the same device, or None for all in order) into result.

    most_items: the most items that a row should have; rows with more are merged correctly, but slower. partial_offsets:
    where each row's items begin, int32 [n_rows + 1] on the same device; None: each row has most_items items, row after
    row. signature: see launch_kernel.
    """
    block_s, dim_blocks, num_warps = merge_sizes(most_items, shape)
    launch_kernel(
        merge_kernel, n_rows * shape.GROUP * shape.N_KV_HEADS * dim_blocks,
        (partials, result, partial_offsets, row_ids, most_items), (shape, block_s, dim_blocks),
        None if signature is None else signature.plus((partial_offsets is None, row_ids is None)),
        num_warps=num_warps, **merge_options(shape),
    )  # fmt: skip


def merge_sizes(most_items: int, shape: KernelShape) -> tuple[int, int, int]:
    """Return the sizes of a merge of most_items: (states loaded at once, programs per head, warps per program).

    The programs of one head divide its dims.
    """
    block_s = min(max(next_power_of_two(most_items), SMALLEST_BLOCK_S), LARGEST_BLOCK_S)
    dim_blocks = min(max(block_s * shape.BLOCK_D // PROGRAM_ELEMENTS, 1), MOST_DIM_BLOCKS)
    return block_s, dim_blocks, min(max(block_s * shape.BLOCK_D // dim_blocks // PROGRAM_ELEMENTS, 1), MOST_WARPS)


def merge_by_part(
    merge: Callable[..., Any], partials: StateArgs, result: StateArgs, partial_offsets: torch.Tensor
) -> None:
    """Let the user's `merge` (see pkv.Parts) merge all rows of the partials into result."""
    returned = merge(partials.out.ptr, partials.lse.ptr, partial_offsets, result.out.ptr, result.lse.ptr)
    if returned is not None:
        raise TypeError(
            f"parts.merge returned {type(returned).__name__}: it must write out and lse in place (out[row] = ...), and "
            "return None"
        )


def merge_options(shape: KernelShape) -> dict[str, bool]:
    """Return the launch options of every merge kernel."""
    return {"launch_pdl": True} if shape.EARLY_MERGE else {}

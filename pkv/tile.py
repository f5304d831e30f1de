"""The only attention maths on the GPU: load a query, attend to a range of tokens, store the resulting state.

Every stage decides *which* (row, KV head, token range) a program takes; what it then does is written here, once.

A **tile** is BLOCK_N consecutive tokens of one row. A **state** is the exact summary of some tokens of a row, one per
query head: `out` (their softmax-weighted mean of V) and `lse` (the log of the sum of exp(score), natural). While tokens
are being read it is kept as running maximum, running sum and accumulator, in base 2 (`exp2` is one instruction).

One program serves the G = n_q_heads / n_kv_heads query heads that share a KV head, so K and V are read once per group.
The G heads are padded to BLOCK_H >= 16 rows, the smallest `tl.dot`, and head_dim to a power of two. A group of more
than 32 heads is cut into HEAD_BLOCKS blocks, each a program of its own, because a larger accumulator does not fit
registers. fp32 operands of a tensor-core product do not fit at all: there a program serves one query head
(BLOCK_H = 1), and the two products are written out as multiply and sum.
"""

from typing import Any, NamedTuple

from pkv._triton import tl, triton

LOG2_E = 1.4426950408889634


class Strided(NamedTuple):
    """A pointer and the strides of its axes, in elements: (page, token, head, dim) or (index, head, dim)."""

    ptr: Any
    strides: tuple[Any, ...]


class CacheArgs(NamedTuple):
    """What a kernel needs of a PagedKVCache. `lengths` has one stride, `table` two: (row, column)."""

    k: Strided
    v: Strided
    table: Strided
    lengths: Strided


class StateArgs(NamedTuple):
    """Where states go: `out` [index, n_q_heads, head_dim] and `lse` [index, n_q_heads] (its head stride is 1)."""

    out: Strided
    lse: Strided


class KernelShape(NamedTuple):
    """Compile-time sizes. Nothing that changes from step to step (lengths, number of rows) is among them."""

    GROUP: int  # query heads per KV head
    N_KV_HEADS: int
    HEAD_DIM: int
    PAGE_SIZE: int
    HEAD_BLOCKS: int  # programs that share a group
    BLOCK_H: int  # query heads per program: GROUP / HEAD_BLOCKS, padded to a power of two >= 16; 1 for fp32
    BLOCK_D: int  # HEAD_DIM, padded likewise
    BLOCK_N: int  # tokens per tile
    STAGES: int  # tiles in flight
    ALIGNED: bool  # all K and V rows start at multiples of 16 bytes
    WIDEN: bool  # interpreter only: it computes wrongly on bfloat16, so widen right after each load


@triton.jit
def my_heads(grid_head, SHAPE: tl.constexpr):
    """Query heads [BLOCK_H] of one program, and which of them exist. grid_head counts KV heads x HEAD_BLOCKS."""
    in_group = grid_head % SHAPE.HEAD_BLOCKS * SHAPE.BLOCK_H + tl.arange(0, SHAPE.BLOCK_H)
    return grid_head // SHAPE.HEAD_BLOCKS * SHAPE.GROUP + in_group, in_group < SHAPE.GROUP


@triton.jit
def load_query(q, row, grid_head, SHAPE: tl.constexpr):
    """The program's query heads, [BLOCK_H, BLOCK_D]; padding is zero."""
    heads, exists = my_heads(grid_head, SHAPE)
    dims = tl.arange(0, SHAPE.BLOCK_D)
    stride_row, stride_head, stride_dim = q.strides
    offsets = heads.to(tl.int64)[:, None] * stride_head + dims.to(tl.int64)[None, :] * stride_dim
    mask = exists[:, None] & (dims < SHAPE.HEAD_DIM)[None, :]
    query = tl.load(q.ptr + row.to(tl.int64) * stride_row + offsets, mask=mask, other=0.0)
    return query.to(tl.float32) if SHAPE.WIDEN else query


@triton.jit
def find_pages(table_row, start, end, column_stride, SHAPE: tl.constexpr, MASKED: tl.constexpr):
    """Page ids and slots of tile [start, start + BLOCK_N), shaped to broadcast to [n_pages_of_tile, tokens_per_page].

    A page size that is a power of two divides a tile or is divided by it, so each page id is loaded once.
    Any other page size takes the second path: one page id per token, found by division.
    """
    POWER_OF_TWO: tl.constexpr = (SHAPE.PAGE_SIZE & (SHAPE.PAGE_SIZE - 1)) == 0
    if not POWER_OF_TWO:
        tokens = start + tl.arange(0, SHAPE.BLOCK_N)[:, None]
        first_token = tokens
        slots = tokens % SHAPE.PAGE_SIZE
    elif SHAPE.PAGE_SIZE < SHAPE.BLOCK_N:
        first_token = start + (tl.arange(0, SHAPE.BLOCK_N // SHAPE.PAGE_SIZE) * SHAPE.PAGE_SIZE)[:, None]
        slots = tl.arange(0, SHAPE.PAGE_SIZE)[None, :]
    else:
        first_token = start
        slots = start % SHAPE.PAGE_SIZE + tl.arange(0, SHAPE.BLOCK_N)[None, :]
    pointers = table_row + (first_token // SHAPE.PAGE_SIZE).to(tl.int64) * column_stride
    if MASKED:  # the table may hold anything past the row's last page
        pages = tl.load(pointers, mask=first_token < end, other=0)
    else:
        pages = tl.load(pointers)
    return pages.to(tl.int64), slots.to(tl.int64)


@triton.jit
def load_tile(pages, slots, kv_head, tokens_left, side, SHAPE: tl.constexpr, MASKED: tl.constexpr):
    """One tile of K or V, [BLOCK_N, BLOCK_D]; tokens past `tokens_left` and padded dims are zero."""
    stride_page, stride_token, stride_head, stride_dim = side.strides
    dims = tl.arange(0, SHAPE.BLOCK_D)
    # page * stride exceeds 32 bits in caches beyond 2^31 elements: pages and slots are int64
    offsets = tl.reshape(pages * stride_page + slots * stride_token, [SHAPE.BLOCK_N])
    offsets += kv_head.to(tl.int64) * stride_head
    if SHAPE.ALIGNED:
        # The reshape hides from the compiler that rows start at multiples of 16 bytes. Without this promise it
        # silently replaces asynchronous 16-byte copies (cp.async) by scalar loads.
        offsets = tl.multiple_of(offsets, 16 // (side.ptr.dtype.element_ty.primitive_bitwidth // 8))
    pointers = side.ptr + offsets[:, None] + dims.to(tl.int64)[None, :] * stride_dim
    EXACT: tl.constexpr = SHAPE.BLOCK_D == SHAPE.HEAD_DIM
    if MASKED:
        mask = (tl.arange(0, SHAPE.BLOCK_N) < tokens_left)[:, None] & (dims < SHAPE.HEAD_DIM)[None, :]
        tile = tl.load(pointers, mask=mask, other=0.0)
    elif EXACT:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(dims < SHAPE.HEAD_DIM)[None, :], other=0.0)
    return tile.to(tl.float32) if SHAPE.WIDEN else tile


@triton.jit
def attend_tile(query, cache, row, kv_head, start, end, qk_scale, acc, running_max, running_sum,
                SHAPE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Fold the tokens [start, min(start + BLOCK_N, end)) of a row into the running state."""
    table_row = cache.table.ptr + row.to(tl.int64) * cache.table.strides[0]
    pages, slots = find_pages(table_row, start, end, cache.table.strides[1], SHAPE, MASKED)
    k = load_tile(pages, slots, kv_head, end - start, cache.k, SHAPE, MASKED)  # [BLOCK_N, BLOCK_D]
    v = load_tile(pages, slots, kv_head, end - start, cache.v, SHAPE, MASKED)  # [BLOCK_N, BLOCK_D]
    if SHAPE.BLOCK_H == 1:
        scores = tl.sum(query[:, None, :] * k[None, :, :], 2) * qk_scale  # [1, BLOCK_N]
    else:
        scores = tl.dot(query, tl.trans(k)) * qk_scale  # [BLOCK_H, BLOCK_N]
    if MASKED:
        scores = tl.where((tl.arange(0, SHAPE.BLOCK_N) < end - start)[None, :], scores, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(scores, 1))
    base = tl.where(new_max == float("-inf"), 0.0, new_max)  # all scores -inf so far: -inf - -inf would be NaN
    weights = tl.exp2(scores - base[:, None])  # [BLOCK_H, BLOCK_N]
    correction = tl.exp2(running_max - base)
    running_sum = running_sum * correction + tl.sum(weights, 1)
    acc = acc * correction[:, None]
    if SHAPE.BLOCK_H == 1:
        acc += tl.sum(weights[:, :, None] * v[None, :, :], 1)  # [1, BLOCK_D]
    else:
        acc = tl.dot(weights.to(v.dtype), v, acc)  # [BLOCK_H, BLOCK_D]
    return acc, new_max, running_sum


@triton.jit
def attend_tokens(query, cache, row, grid_head, begin, end, qk_scale, SHAPE: tl.constexpr):
    """State of the tokens [begin, end) of `row` for one program's heads; `begin` is a multiple of BLOCK_N.

    qk_scale = scale * log2(e). Returns out [BLOCK_H, BLOCK_D] and lse [BLOCK_H], fp32; no tokens give (0, -inf).
    """
    BLOCK_H: tl.constexpr = SHAPE.BLOCK_H
    BLOCK_D: tl.constexpr = SHAPE.BLOCK_D
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    running_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_H], tl.float32)
    kv_head = grid_head // SHAPE.HEAD_BLOCKS
    full_end = begin + tl.maximum(end - begin, 0) // SHAPE.BLOCK_N * SHAPE.BLOCK_N
    for start in tl.range(begin, full_end, SHAPE.BLOCK_N, num_stages=SHAPE.STAGES):
        acc, running_max, running_sum = attend_tile(
            query, cache, row, kv_head, start, end, qk_scale, acc, running_max, running_sum, SHAPE, False,
        )  # fmt: skip
    if full_end < end:  # only the last tile of a row needs masks
        acc, running_max, running_sum = attend_tile(
            query, cache, row, kv_head, full_end, end, qk_scale, acc, running_max, running_sum, SHAPE, True,
        )  # fmt: skip
    is_empty = running_sum == 0.0
    total = tl.where(is_empty, 1.0, running_sum)
    lse = tl.where(is_empty, float("-inf"), (running_max + tl.log2(total)) / 1.4426950408889634)
    return acc / total[:, None], lse


@triton.jit
def store_state(state, index, grid_head, out, lse, SHAPE: tl.constexpr, IS_PARTIAL: tl.constexpr):
    """Write the program's state at `index`: a row of the result, or an item of the partials.

    Of an empty partial only lse is written: the merge reads no more of it.
    """
    heads, exists = my_heads(grid_head, SHAPE)
    dims = tl.arange(0, SHAPE.BLOCK_D)
    stride_index, stride_head, stride_dim = state.out.strides
    pointers = state.out.ptr + index.to(tl.int64) * stride_index
    pointers += heads.to(tl.int64)[:, None] * stride_head + dims.to(tl.int64)[None, :] * stride_dim
    is_kept = exists & (lse > float("-inf")) if IS_PARTIAL else exists
    mask = is_kept[:, None] & (dims < SHAPE.HEAD_DIM)[None, :]
    tl.store(pointers, out.to(state.out.ptr.dtype.element_ty), mask=mask)
    tl.store(state.lse.ptr + index.to(tl.int64) * state.lse.strides[0] + heads, lse, mask=exists)


@triton.jit
def store_empty(partials, index, grid_head, SHAPE: tl.constexpr):
    """The state of no tokens, as a partial: lse -inf is all that the merge reads of it."""
    heads, exists = my_heads(grid_head, SHAPE)
    lse = tl.full([SHAPE.BLOCK_H], float("-inf"), tl.float32)
    tl.store(partials.lse.ptr + index.to(tl.int64) * partials.lse.strides[0] + heads, lse, mask=exists)

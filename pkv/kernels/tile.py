"""The attention maths of every kernel: load a query, attend to a range of tokens, store the resulting state.

A stage decides *which* (row, KV head, token range) a program takes. What the program then does is written here, once.

A **tile** is BLOCK_N consecutive tokens of one row. A **state** is the exact summary of some tokens of a row, one per
query head: `out`, their softmax-weighted mean of V, and `lse`, the natural log of the sum of exp(score). While a
program reads tokens, it keeps the state as running maximum, running sum and accumulator, in base 2 (`exp2` is one
instruction).

One program serves the G = n_q_heads / n_kv_heads query heads that share a KV head, so K and V are read once per group.
Tokens are the long side of both products, heads the short one: scores [BLOCK_N, BLOCK_H] = K q, out [BLOCK_D, BLOCK_H]
= V^T weights. A tensor core multiplies 16 rows by 8 columns, so heads are padded to 8 and not to 16, which halves the
work. A group of more than 32 heads is cut into HEAD_BLOCKS blocks, one program each, because a larger accumulator does
not fit registers. The fp32 operands of a tensor-core product do not fit at all: in fp32 a program serves one query head
(BLOCK_H = 1), and the two products are written out as multiply and sum.
"""

from typing import Any, NamedTuple

from pkv._triton import tl, triton
from pkv.kernels.masks import NO_MASKS, Masks, first_visible, scores_of

LOG2_E = 1.4426950408889634


class Strided(NamedTuple):
    """A pointer and the strides of its axes, in elements: (page, token, head, dim) or (index, head, dim)."""

    ptr: Any
    strides: tuple[Any, ...]


class CacheArgs(NamedTuple):
    """The tensors of a PagedKVCache that kernels read, and which of its tokens a query sees.

    `lengths` has one stride, `table` two: (row, column).
    """

    k: Strided
    v: Strided
    table: Strided
    lengths: Strided
    masks: Masks = NO_MASKS


class RowArgs(NamedTuple):
    """The part of CacheArgs that says how many tokens each row has, and which of them a query sees."""

    lengths: Strided
    masks: Masks = NO_MASKS


class StateArgs(NamedTuple):
    """The memory of states: `out` [index, n_q_heads, head_dim] and `lse` [index, n_q_heads] (its head stride is 1)."""

    out: Strided
    lse: Strided


class KernelShape(NamedTuple):
    """The compile-time sizes of a kernel. What changes from step to step (lengths, number of rows) is not here."""

    GROUP: int  # query heads per KV head
    N_KV_HEADS: int
    HEAD_DIM: int
    PAGE_SIZE: int
    HEAD_BLOCKS: int  # programs that share a group
    BLOCK_H: int  # query heads per program: GROUP / HEAD_BLOCKS, padded to a power of two >= 8; 1 for fp32
    BLOCK_D: int  # HEAD_DIM, padded to a power of two >= 16
    BLOCK_N: int  # tokens per tile
    STAGES: int  # tiles in flight
    ALIGNED: bool  # all K and V rows start at multiples of 16 bytes
    WHOLE_TILES: bool  # a page holds whole tiles
    EARLY_MERGE: bool  # the merge is launched before the decode kernel ends, and waits for it on the GPU
    INTERPRETED: bool  # Triton's interpreter miscomputes bfloat16, so kernels widen it right after each load


@triton.jit
def my_heads(grid_head, SHAPE: tl.constexpr):
    """Return one program's query heads [BLOCK_H], and which of them exist. grid_head counts KV heads x HEAD_BLOCKS."""
    in_group = grid_head % SHAPE.HEAD_BLOCKS * SHAPE.BLOCK_H + tl.arange(0, SHAPE.BLOCK_H)
    return grid_head // SHAPE.HEAD_BLOCKS * SHAPE.GROUP + in_group, in_group < SHAPE.GROUP


@triton.jit
def state_pointers(state, index, grid_head, SHAPE: tl.constexpr):
    """Return pointers [BLOCK_D, BLOCK_H] to a program's part of a state, or of q, and which of them exist."""
    heads, exists = my_heads(grid_head, SHAPE)
    dims = tl.arange(0, SHAPE.BLOCK_D)
    stride_index, stride_head, stride_dim = state.strides
    offsets = dims.to(tl.int64)[:, None] * stride_dim + heads.to(tl.int64)[None, :] * stride_head
    return state.ptr + index.to(tl.int64) * stride_index + offsets, (dims < SHAPE.HEAD_DIM)[:, None] & exists[None, :]


@triton.jit
def load_query(q, row, grid_head, SHAPE: tl.constexpr):
    """Load the program's query heads, [BLOCK_D, BLOCK_H]; padding is zero."""
    pointers, exists = state_pointers(q, row, grid_head, SHAPE)
    query = tl.load(pointers, mask=exists, other=0.0)
    return query.to(tl.float32) if SHAPE.INTERPRETED else query


@triton.jit
def find_pages(table_row, column_stride, start, end, SHAPE: tl.constexpr, MASKED: tl.constexpr, low=None):
    """Find the page id and the slot of each token [BLOCK_N] of the tile [start, start + BLOCK_N).

    If a page holds whole tiles, return those of the first token only. A page id is loaded once if the tile is a
    multiple of the page or the page of the tile, else once per token. low: the first token that is seen, if some are
    not; pages before it may be gone.
    """
    if SHAPE.WHOLE_TILES:
        pages = tl.load(table_row + tl.cast(start // SHAPE.PAGE_SIZE, tl.int64) * column_stride)
        slots = start % SHAPE.PAGE_SIZE
    else:
        BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
        PER_PAGE: tl.constexpr = SHAPE.PAGE_SIZE if BLOCK_N % SHAPE.PAGE_SIZE == 0 else 1
        first_tokens = start + tl.arange(0, BLOCK_N // PER_PAGE) * PER_PAGE
        pointers = table_row + (first_tokens // SHAPE.PAGE_SIZE).to(tl.int64) * column_stride
        if MASKED:  # the table may hold anything past the row's last page
            is_read = first_tokens < end
            if low is not None:
                is_read = is_read & (first_tokens + PER_PAGE > low)
            ids = tl.load(pointers, mask=is_read, other=0)
        else:
            ids = tl.load(pointers)
        pages = tl.reshape(tl.broadcast_to(ids[:, None], [BLOCK_N // PER_PAGE, PER_PAGE]), [BLOCK_N])
        slots = (start + tl.arange(0, BLOCK_N)) % SHAPE.PAGE_SIZE
    # page * stride exceeds 32 bits in caches beyond 2^31 elements
    return tl.cast(pages, tl.int64), tl.cast(slots, tl.int64)


@triton.jit
def load_tile(pages, slots, kv_head, tokens_left, side,
              SHAPE: tl.constexpr, MASKED: tl.constexpr, TURNED: tl.constexpr, tokens_gone=None):  # fmt: skip
    """Load one tile of K or V, [BLOCK_N, BLOCK_D], or TURNED [BLOCK_D, BLOCK_N]; tokens past `tokens_left` are zero.

    So are the first `tokens_gone`, and padding. V is loaded transposed if the product needs it so: Triton does not copy
    a tile asynchronously that it has to transpose itself.
    """
    stride_page, stride_token, stride_head, stride_dim = side.strides
    UNIT: tl.constexpr = 16 // (side.ptr.dtype.element_ty.primitive_bitwidth // 8)  # elements in 16 bytes
    TOKENS: tl.constexpr = 1 if TURNED else 0  # the axis of tokens
    tokens = tl.expand_dims(tl.arange(0, SHAPE.BLOCK_N), 1 - TOKENS)
    dims = tl.expand_dims(tl.arange(0, SHAPE.BLOCK_D), TOKENS)
    begin = kv_head.to(tl.int64) * stride_head
    if SHAPE.WHOLE_TILES:  # one number changes from tile to tile, not one per token
        begin += pages * stride_page + slots * stride_token
        offsets = tokens.to(tl.int64) * stride_token
    else:
        offsets = tl.expand_dims(pages * stride_page + slots * stride_token, 1 - TOKENS)
    if SHAPE.ALIGNED:
        # Arithmetic hides from the compiler that rows start at multiples of 16 bytes. Without this promise it silently
        # replaces asynchronous 16-byte copies (cp.async) by scalar loads.
        begin, offsets = tl.multiple_of(begin, UNIT), tl.multiple_of(offsets, [UNIT, UNIT])
    pointers = side.ptr + begin + (offsets + dims.to(tl.int64) * stride_dim)
    EXACT: tl.constexpr = SHAPE.BLOCK_D == SHAPE.HEAD_DIM
    if MASKED:
        is_read = tokens < tokens_left
        if tokens_gone is not None:
            is_read = is_read & (tokens >= tokens_gone)
        tile = tl.load(pointers, mask=is_read & (dims < SHAPE.HEAD_DIM), other=0.0)
    elif EXACT:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=dims < SHAPE.HEAD_DIM, other=0.0)
    return tile.to(tl.float32) if SHAPE.INTERPRETED else tile


@triton.jit
def attend_tile(query, cache, row, kv_head, start, end, qk_scale, acc, running_max, sums,
                SHAPE: tl.constexpr, MASKED: tl.constexpr, low=None):  # fmt: skip
    """Fold the tokens [start, min(start + BLOCK_N, end)) of a row, from `low` on, into the running state."""
    table_row = cache.table.ptr + row.to(tl.int64) * cache.table.strides[0]
    tokens_gone = None
    if low is not None:
        tokens_gone = low - start
    pages, slots = find_pages(table_row, cache.table.strides[1], start, end, SHAPE, MASKED, low)
    k = load_tile(pages, slots, kv_head, end - start, cache.k, SHAPE, MASKED, False, tokens_gone)  # [BLOCK_N, BLOCK_D]
    ONE_HEAD: tl.constexpr = SHAPE.BLOCK_H == 1
    v = load_tile(pages, slots, kv_head, end - start, cache.v, SHAPE, MASKED, not ONE_HEAD, tokens_gone)
    if ONE_HEAD:  # V as K, and the products as sums over their last and their middle axis: no registers are spilled so
        products = tl.trans(tl.sum(tl.trans(query)[:, None, :] * k[None, :, :], 2))  # [BLOCK_N, 1]
    else:
        products = tl.dot(k, query)  # [BLOCK_N, BLOCK_H]
    scores = scores_of(products, qk_scale, cache.masks)
    if MASKED:
        tokens = tl.arange(0, SHAPE.BLOCK_N)
        is_seen = tokens < end - start
        if low is not None:
            is_seen = is_seen & (tokens >= tokens_gone)
        scores = tl.where(is_seen[:, None], scores, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(scores, 0))
    base = tl.where(new_max == float("-inf"), 0.0, new_max)  # all scores -inf so far: -inf - -inf would be NaN
    weights = tl.exp2(scores - base[None, :])  # [BLOCK_N, BLOCK_H]
    correction = tl.exp2(running_max - base)[None, :]
    sums = sums * correction + weights
    acc = acc * correction
    if ONE_HEAD:
        acc += tl.trans(tl.sum(tl.trans(weights)[:, :, None] * v[None, :, :], 1))  # [BLOCK_D, 1]
    else:
        acc = tl.dot(v, weights.to(v.dtype), acc)  # [BLOCK_D, BLOCK_H]
    return acc, new_max, sums


@triton.jit
def attend_tokens(query, cache, row, grid_head, begin, end, qk_scale, SHAPE: tl.constexpr):
    """Compute the state of the tokens [begin, end) of `row` for one program's heads; `begin` is a multiple of BLOCK_N.

    qk_scale = scale * log2(e). Returns out [BLOCK_D, BLOCK_H] and lse [BLOCK_H], fp32; no tokens give (0, -inf).
    """
    BLOCK_H: tl.constexpr = SHAPE.BLOCK_H
    BLOCK_D: tl.constexpr = SHAPE.BLOCK_D
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    acc = tl.zeros([BLOCK_D, BLOCK_H], tl.float32)
    running_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_N, BLOCK_H], tl.float32)  # one per place in a tile: added up once, at the end
    kv_head = grid_head // SHAPE.HEAD_BLOCKS
    full_begin = begin
    full_end = begin + tl.maximum(end - begin, 0) // BLOCK_N * BLOCK_N
    if cache.masks.window is not None:  # a tile that the window cuts needs masks
        length = tl.load(cache.lengths.ptr + row.to(tl.int64) * cache.lengths.strides[0])
        low = first_visible(length, cache.masks)
        full_begin = tl.maximum(begin, tl.cdiv(low, BLOCK_N) * BLOCK_N)
        full_end = tl.maximum(full_begin, full_end)
    for start in tl.range(full_begin, full_end, BLOCK_N, num_stages=SHAPE.STAGES):
        acc, running_max, sums = attend_tile(
            query, cache, row, kv_head, start, end, qk_scale, acc, running_max, sums, SHAPE, False,
        )  # fmt: skip
    if cache.masks.window is not None:  # one loop over tiles at both ends: two would spill registers
        n_masked = (full_begin - begin) // BLOCK_N + tl.cdiv(tl.maximum(end - full_end, 0), BLOCK_N)
        for i in tl.range(0, n_masked, num_stages=1):
            start = begin + i * BLOCK_N
            start += tl.where(start >= full_begin, full_end - full_begin, 0)
            acc, running_max, sums = attend_tile(
                query, cache, row, kv_head, start, end, qk_scale, acc, running_max, sums, SHAPE, True, low,
            )  # fmt: skip
    elif full_end < end:  # only the last tile of a row needs masks
        acc, running_max, sums = attend_tile(
            query, cache, row, kv_head, full_end, end, qk_scale, acc, running_max, sums, SHAPE, True,
        )  # fmt: skip
    running_sum = tl.sum(sums, 0)
    is_empty = running_sum == 0.0
    total = tl.where(is_empty, 1.0, running_sum)
    lse = tl.where(is_empty, float("-inf"), (running_max + tl.log2(total)) / 1.4426950408889634)
    return acc / total[None, :], lse


@triton.jit
def store_state(state, index, grid_head, out, lse, SHAPE: tl.constexpr, IS_PARTIAL: tl.constexpr):
    """Write the program's state at `index`: a row of the result, or an item of the partials.

    For an empty partial state only lse is written: the merge does not read its out.
    """
    pointers, mask = state_pointers(state.out, index, grid_head, SHAPE)
    if IS_PARTIAL:
        mask = mask & (lse > float("-inf"))[None, :]
    tl.store(pointers, out.to(state.out.ptr.dtype.element_ty), mask=mask)
    heads, exists = my_heads(grid_head, SHAPE)
    tl.store(state.lse.ptr + index.to(tl.int64) * state.lse.strides[0] + heads, lse, mask=exists)


@triton.jit
def store_empty(state, index, grid_head, SHAPE: tl.constexpr, IS_PARTIAL: tl.constexpr):
    """Write the state of no tokens: out 0, lse -inf."""
    BLOCK_H: tl.constexpr = SHAPE.BLOCK_H
    BLOCK_D: tl.constexpr = SHAPE.BLOCK_D
    lse = tl.full([BLOCK_H], float("-inf"), tl.float32)
    store_state(state, index, grid_head, tl.zeros([BLOCK_D, BLOCK_H], tl.float32), lse, SHAPE, IS_PARTIAL)

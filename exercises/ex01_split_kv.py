"""Exercise 01: splits, states and the exact merge. Lesson 01 explains them; check("ex01_1") in a notebook judges them.

Write the functions that raise NotImplementedError, where the lesson names them. Each says what it takes and gives, with
an example worked by hand. Below it stands its specification, NAME_spec: short, plain and slow. Yours must give the same
without using it.

The last two are Triton kernels. A kernel cannot raise, so the function that launches it does: write the kernel, then
delete the line that raises.
"""

import torch

import pkv
from pkv._triton import tl, triton
from pkv.tile import find_pages, load_tile


def merge_two(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """ex01_1: the state of two sets of tokens that have none in common, from the state of each. About 6 lines.

    out_a, out_b [n_heads, head_dim]; lse_a, lse_b [n_heads]. Returns out [n_heads, head_dim] and lse [n_heads], fp32:
    lse = ln(exp(lse_a) + exp(lse_b)), out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b. An lse may be as large
    as a thousand, or as small as minus a thousand: exp of it is infinite, or 0, and yet the result is not. A state of
    no tokens has lse -inf, and its out may hold anything, NaN too: it changes nothing. Two such: out 0, lse -inf. Each
    head is a matter of its own: one may be empty where the next is not.

    By hand: 3 tokens of value 1 and 1 token of value 5, all scores 0. The states are (1, ln 3) and (5, ln 1), so
    lse = ln(3 + 1) = ln 4 and out = 3/4 * 1 + 1/4 * 5 = 2.
    """
    raise NotImplementedError("ex01_1: merge_two is not written yet (about 6 lines)")


def merge_two_spec(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Head by head, those states that have tokens, with torch's own softmax and logsumexp, in fp64."""
    out, lse = torch.zeros_like(out_a), torch.full_like(lse_a, -torch.inf)
    for head in range(len(lse)):
        pairs = (out_a[head], lse_a[head]), (out_b[head], lse_b[head])
        states = [(one_out, one_lse) for one_out, one_lse in pairs if one_lse > -torch.inf]
        if states:
            lses = torch.stack([one_lse for _, one_lse in states]).double()
            out[head] = lses.softmax(0) @ torch.stack([one_out for one_out, _ in states]).double()
            lse[head] = lses.logsumexp(0)
    return out, lse


def merge_many(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """ex01_2: the same of any number of states, at once. About 5 lines; no loop over states.

    outs [n_states, n_heads, head_dim]; lses [n_states, n_heads]; n_states is at least 1. Returns out [n_heads,
    head_dim] and lse [n_heads], fp32: lse = ln of the sum of exp(lses), out = the sum of exp(lses - lse) * outs. Any of
    them may be empty (lse -inf, out whatever it holds), or all.

    By hand: the states of the tokens 0:4, 4:8 and 8:10 of lesson 01 are (1.5, ln 4), (5.5, ln 4) and (8.5, ln 2). So
    lse = ln(4 + 4 + 2) = ln 10 and out = (4 * 1.5 + 4 * 5.5 + 2 * 8.5) / 10 = 4.5, the mean of 0 .. 9.
    """
    raise NotImplementedError("ex01_2: merge_many is not written yet (about 5 lines)")


def merge_many_spec(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One state after another: merging is associative."""
    out, lse = torch.zeros_like(outs[0]), torch.full_like(lses[0], -torch.inf)
    for one_out, one_lse in zip(outs, lses):
        out, lse = merge_two_spec(out, lse, one_out, one_lse)
    return out, lse


def split_bounds(longest: int, length: int, n_splits: int, tile: int) -> list[tuple[int, int]]:
    """ex01_3: the token range (begin, end) of each split of one row, cut like the longest row. About 6 lines.

    longest: tokens of the longest row, which has n tiles of `tile` tokens, the last maybe part-filled. length: those of
    this row, at most as many. Split s of S covers the tiles from n * s // S to n * (s + 1) // S, as far as the row
    reaches. It begins at a tile's first token; if it has no tokens it is (begin, begin), also past the row's end.

    By hand, tile 16, 2 splits, longest 40: it has 3 tiles, so the splits cover tiles 0:1 and 1:3, that is tokens 0:16
    and 16:48. The longest row is cut [(0, 16), (16, 40)], a row of 10 tokens [(0, 10), (16, 16)].
    """
    raise NotImplementedError("ex01_3: split_bounds is not written yet (about 6 lines)")


def split_bounds_spec(longest: int, length: int, n_splits: int, tile: int) -> list[tuple[int, int]]:
    """Count the row's tokens in each split's tiles."""
    n_tiles = len({token // tile for token in range(longest)})
    bounds = []
    for split in range(n_splits):
        first, last = n_tiles * split // n_splits, n_tiles * (split + 1) // n_splits
        n_tokens = sum(first <= token // tile < last for token in range(length))
        bounds.append((first * tile, first * tile + n_tokens))
    return bounds


@triton.jit
def load_kv(cache, row, kv_head, start, end, SHAPE: tl.constexpr):
    """Given: the tile [start, start + BLOCK_N) of a row: k [BLOCK_N, BLOCK_D] and v, turned, [BLOCK_D, BLOCK_N].

    The block table says which pages. Tokens from `end` on are zero, and so are dims past head_dim.
    """
    table_row = cache.table.ptr + row.to(tl.int64) * cache.table.strides[0]
    pages, slots = find_pages(table_row, cache.table.strides[1], start, end, SHAPE, True)
    k = load_tile(pages, slots, kv_head, end - start, cache.k, SHAPE, True, False)
    v = load_tile(pages, slots, kv_head, end - start, cache.v, SHAPE, True, True)
    return k, v


@triton.jit
def multiply(a, b):
    """Given: a [M, K] times b [K, N], in fp32: on tensor cores, or where b has one column as a plain sum."""
    if b.shape[1] == 1:
        product = tl.sum(a * tl.trans(b), 1)[:, None]
    else:
        product = tl.dot(a, b.to(a.dtype))
    return product


@triton.jit
def attend_split(query, cache, row, grid_head, begin, end, qk_scale, SHAPE: tl.constexpr):
    """ex01_4: the state of the tokens [begin, end) of a row, tile by tile. About 18 lines, with load_kv and multiply.

    One program serves one KV head: number grid_head // SHAPE.HEAD_BLOCKS, because a KV head with many query heads has
    several programs, HEAD_BLOCKS of them. query [BLOCK_D, BLOCK_H] holds the program's query heads as columns, fp16 or
    fp32 as K and V are; with fp32 each query head has a program of its own.

    Returns out [BLOCK_D, BLOCK_H] and lse [BLOCK_H], both fp32. The scores of a tile [BLOCK_N, BLOCK_H] are
    qk_scale * (k . query). qk_scale = scale * log2(e), so that exp2(score) is the weight; lse is natural, therefore
    divided by log2(e) = 1.4426950408889634. Keep per head the largest score so far, the sum of the weights and the
    weighted sum of v, all fp32, all relative to that largest score: when it grows, what was summed before shrinks by
    exp2(old - new). Divide once, at the end. begin is a multiple of BLOCK_N; `end` need not be: a token that is not
    there has score -inf, not 0. No tokens (end <= begin): out 0, lse -inf.

    By hand, one head, tiles of 2 tokens, scores 1, 3 | 4 and values 10, 20 | 30. Tile 0: largest 3, weights 1/4 and 1,
    sum 5/4, weighted sum 2.5 + 20 = 22.5. Tile 1: largest 4, so both shrink by 1/2: sum 5/8 + 1 = 13/8, weighted sum
    11.25 + 30 = 41.25. out = 41.25 / (13/8) = 25.38, lse = (4 + log2(13/8)) / log2(e) = 3.258.
    """
    BLOCK_D: tl.constexpr = SHAPE.BLOCK_D  # a GPU wants sizes of new tensors so
    BLOCK_H: tl.constexpr = SHAPE.BLOCK_H
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    # ex01_4: yours, about 18 lines


def attend_split_spec(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, begin: int, end: int, qk_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens at once, in fp64: query [head_dim, n_heads]; k, v [length, head_dim] of the program's KV head."""
    if end <= begin:
        return torch.zeros_like(query), query.new_full(query.shape[1:], -torch.inf)
    scores = qk_scale * (k[begin:end].double() @ query.double())  # [n_tokens, n_heads], in base 2
    weights = torch.exp2(scores - scores.amax(0))
    out = v[begin:end].double().T @ weights / weights.sum(0)
    lse = (scores.amax(0) + weights.sum(0).log2()) / 1.4426950408889634
    return out.to(query.dtype), lse.to(query.dtype)


def own_loop() -> pkv.Parts:
    """ex01_4: your kernel as a part of the library: pkv.decode(q, cache, stage="split_kv", parts=own_loop()).

    The kernel of split_kv then calls attend_split in the place of pkv.tile.attend_tokens, in every program. Given: when
    attend_split is written, only delete the line that raises.
    """
    raise NotImplementedError("ex01_4: write attend_split (about 18 lines), then delete this line")
    return pkv.Parts(attend_tokens=attend_split)


@triton.jit
def merge_rows_kernel(
    partial_out, partial_lse, offsets, out, lse, n_heads, head_dim, stride_row, stride_head, stride_dim,
    BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """ex01_5: merge the states of one row, for one query head: program (row, head). About 22 lines.

    See merge_rows for what lies where. Loop over the states, BLOCK_S at a time or one by one. Keep the largest lse so
    far, the sum of the weights exp(lse - largest) and the weighted sum of the outs, as the tile loop does. head_dim may
    be less than BLOCK_D.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    dims = tl.arange(0, BLOCK_D)
    # ex01_5: yours, about 22 lines


def merge_rows_spec(
    partial_out: torch.Tensor, partial_lse: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Row by row."""
    for row in range(len(out)):
        first, last = int(offsets[row]), int(offsets[row + 1])
        if first == last:
            out[row], lse[row] = 0.0, -torch.inf
        elif last - first > 1:
            out[row], lse[row] = merge_many_spec(partial_out[first:last], partial_lse[first:last])


def merge_rows(
    partial_out: torch.Tensor, partial_lse: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """ex01_5: launch the merge of all rows: pkv.decode(q, cache, stage="split_kv", parts=pkv.Parts(merge=merge_rows)).

    partial_out [n_partials, n_heads, head_dim] and partial_lse [n_partials, n_heads], fp32 and contiguous, hold all
    states; those of row r lie at offsets[r] : offsets[r + 1] (offsets [n_rows + 1], int32). Writes in place: out
    [n_rows, n_heads, head_dim], of any dtype and strides, and lse [n_rows, n_heads], fp32 and contiguous. An empty
    state (lse -inf) may hold any out. A row of no states, or of empty ones only, is out 0, lse -inf. A row of exactly
    one state is left alone: its program has written the result already, and the partials hold nothing of it. Behind
    the last state the memory of the partials may end: nothing is read there.

    By hand, offsets [0, 3, 3, 4]: row 0 merges the states 0, 1 and 2; row 1 has none, so it is (0, -inf); row 2 has one
    and is left alone.

    Given: when merge_rows_kernel is written, only delete the line that raises.
    """
    raise NotImplementedError("ex01_5: write merge_rows_kernel (about 22 lines), then delete this line")
    n_rows, n_heads, head_dim = out.shape
    merge_rows_kernel[(n_rows, n_heads)](
        partial_out, partial_lse, offsets, out, lse, n_heads, head_dim, *out.stride(),
        BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_S=16,
    )  # fmt: skip

"""Exercise 03: a compact queue. Lesson 03 explains it; check("ex03_1") in a notebook judges it.

Write the functions that raise NotImplementedError, where the lesson names them. Each says what it takes and gives, with
an example worked by hand. Below it stands its specification, NAME_spec: short, plain and slow. Yours must give the same
without using it.

The examples share one batch: rows of 5, 40 and 0 tokens, tiles of 16 tokens, 2 splits per row.
"""

import itertools

import torch

from pkv import PagedKVCache, Shape, merge
from pkv._triton import INTERPRETED, tl, triton
from pkv.cards.known import load_gpu
from pkv.kernels.configs import choose_config
from pkv.kernels.launching import kernel_cache, kernel_shape, strided
from pkv.tile import LOG2_E, StateArgs, attend_tokens, load_query, store_state

Item = tuple[int, int, int]  # row, and the tokens begin:end of it


def build_queue(lengths: list[int], n_splits: int, tile: int) -> list[Item]:
    """ex03_1: the items of a batch that hold tokens, as a list of (row, begin, end). About 8 lines.

    A row of `length` tokens has n = ceil(length / tile) tiles; the last one may be part-filled. Split s of n_splits
    takes the tiles [n * s // n_splits, n * (s + 1) // n_splits) of it. An item is the tokens of one split: begin and
    end count the row's own tokens, and end is the first token that is not in it. Splits without tiles are left out, so
    a row without tokens has no item. Items are ordered by row, then by begin. No rows: no items.

    By hand, lengths [5, 40, 0], 2 splits, tiles of 16: row 0 has 1 tile; its split 0 takes the tiles 0:0, none, its
    split 1 the tiles 0:1. Row 1 has 3 tiles; its splits take 0:1 and 1:3. Row 2 has none. So the list is
    [(0, 0, 5), (1, 0, 16), (1, 16, 40)].
    """
    items = []
    for row, length in enumerate(lengths):
        n_tiles = -(-length // tile)
        for split in range(n_splits):
            first, last = n_tiles * split // n_splits, n_tiles * (split + 1) // n_splits
            if first < last:
                items.append((row, first * tile, min(last * tile, length)))
    return items


def build_queue_spec(lengths: list[int], n_splits: int, tile: int) -> list[Item]:
    """Token by token: which split has the tile that it lies in?"""
    items = []
    for row, length in enumerate(lengths):
        n = len({token // tile for token in range(length)})
        for s in range(n_splits):
            mine = [t for t in range(length) if n * s // n_splits <= t // tile < n * (s + 1) // n_splits]
            items += [(row, mine[0], mine[-1] + 1)] if mine else []
    return items


def partial_offsets(items: list[Item], n_rows: int) -> list[int]:
    """ex03_2: where each row's states begin, n_rows + 1 numbers. About 4 lines.

    Item i leaves its state at index i. Items are ordered by row, so those of row r lie at offsets[r] : offsets[r + 1].
    Rows without items have such a range too, an empty one, wherever they stand in the batch. No rows: [0].

    By hand, items [(0, 0, 5), (1, 0, 16), (1, 16, 40)], 3 rows: row 0 has item 0, row 1 the items 1 and 2, row 2 none.
    So the offsets are [0, 1, 3, 3].
    """
    counts = [0] * n_rows
    for row, _, _ in items:
        counts[row] += 1
    return [0, *itertools.accumulate(counts)]


def partial_offsets_spec(items: list[Item], n_rows: int) -> list[int]:
    """For each row, count the items of all rows before it."""
    return [sum(item[0] < row for item in items) for row in range(n_rows + 1)]


def longest_first(items: list[Item]) -> list[int]:
    """ex03_3: the order in which to start items, so that what starts last is short. One or two lines.

    order[e] is the index of the item that is started as number e: first the one with the most tokens, last the one with
    the fewest; among equal ones the one that is listed first. Every index occurs once. `items` stays as it is, and may
    be empty.

    By hand, items [(0, 0, 5), (1, 0, 16), (1, 16, 40)] have 5, 16 and 24 tokens: the order is [2, 1, 0].
    """
    return sorted(range(len(items)), key=lambda index: items[index][1] - items[index][2])


def longest_first_spec(items: list[Item]) -> list[int]:
    """Again and again, take the longest of those that are left."""
    left, order = list(range(len(items))), []
    while left:
        longest = max(left, key=lambda index: items[index][2] - items[index][1])  # the first of equal ones
        order.append(longest)
        left.remove(longest)
    return order


@triton.jit
def queue_kernel(q, cache, result, partials, offsets, items, order, qk_scale, SHAPE: tl.constexpr):
    """ex03_4: one program per (entry, KV head): find my item, attend to its tokens, store the state.

    offsets, items and order point to int32. Entry e of the order is the item order[e]. Row, begin and end of item i lie
    side by side at items + 3 * i. Row r has the items offsets[r] : offsets[r + 1]. Programs 0 ... GRID_HEADS - 1 serve
    entry 0, a KV head each; the next GRID_HEADS programs serve entry 1, and so on.

    If an item is the only one of its row, its state is the result: it is stored at its row. If not, it is a partial
    state, and is stored at its item's index. pkv.tile has all that you need:

    load_query(q, row, kv_head, SHAPE) -> query
    attend_tokens(query, cache, row, kv_head, begin, end, qk_scale, SHAPE) -> out, lse
    store_state(result, row, kv_head, out, lse, SHAPE, False)
    store_state(partials, index, kv_head, out, lse, SHAPE, True)
    """
    # given
    GRID_HEADS: tl.constexpr = SHAPE.N_KV_HEADS * SHAPE.HEAD_BLOCKS  # programs per entry: a KV head each
    # yours
    kv_head = tl.program_id(0) % GRID_HEADS
    index = tl.load(order + tl.program_id(0) // GRID_HEADS)
    row = tl.load(items + 3 * index)
    begin = tl.load(items + 3 * index + 1)
    end = tl.load(items + 3 * index + 2)
    query = load_query(q, row, kv_head, SHAPE)
    out, lse = attend_tokens(query, cache, row, kv_head, begin, end, qk_scale, SHAPE)
    if tl.load(offsets + row + 1) - tl.load(offsets + row) == 1:
        store_state(result, row, kv_head, out, lse, SHAPE, False)
    else:
        store_state(partials, index, kv_head, out, lse, SHAPE, True)


def decode_queue(
    q: torch.Tensor, cache: PagedKVCache, items: list[Item], offsets: list[int], order: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """ex03_4: attention of all rows by a queue: launch the kernel, then merge the rows that were split. About 10 lines,
    all in queue_kernel above: what stands below is given. Delete the line that raises when you have written the kernel.

    q [n_rows, n_q_heads, head_dim], fp16; items as build_queue gives them for tiles of TILE tokens; offsets as
    partial_offsets gives them; order: which items to do, and in which order they start, each at most once. An item that
    the order leaves out is not done and adds nothing. Returns out, as q, and lse [n_rows, n_q_heads], fp32, over the
    tokens of the items that were done; where there are none, out is 0 and lse -inf. Scores are scaled by
    1 / sqrt(head_dim).

    By hand, items [(0, 0, 5), (1, 0, 16), (1, 16, 40)], offsets [0, 1, 3, 3], order [2, 1, 0], 2 KV heads: programs 0
    and 1 do item 2 and store partial state 2, programs 2 and 3 item 1 and partial state 1, programs 4 and 5 item 0 and
    the result of row 0. Then states 1 and 2 are merged into the result of row 1. Row 2 has none.
    """
    # given
    shape = Shape.of(q, cache)
    known = kernel_cache(cache)
    config = choose_config(shape, load_gpu("rtx3060"), TILE, known.aligned)
    out, lse = empty_states(len(q), q, q.dtype)
    partial_out, partial_lse = empty_states(len(items), q, torch.float32)
    if order:
        queue_kernel[(len(order) * shape.grid_heads,)](
            strided(q), known.args,
            StateArgs(strided(out), strided(lse)), StateArgs(strided(partial_out), strided(partial_lse)),
            on_device(offsets, q), on_device(items, q), on_device(order, q), shape.head_dim**-0.5 * LOG2_E,
            kernel_shape(shape, config, known.aligned, INTERPRETED, False), num_warps=config.num_warps,
        )  # fmt: skip
    for row, (first, last) in enumerate(itertools.pairwise(offsets)):
        if last - first > 1:
            merged_out, lse[row] = merge(list(zip(partial_out[first:last], partial_lse[first:last])))
            out[row] = merged_out.to(out.dtype)
    return out, lse


def decode_queue_spec(
    q: torch.Tensor, cache: PagedKVCache, items: list[Item], offsets: list[int], order: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row by row: which of its tokens are to be done? Then softmax over those, in fp64."""
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, device=q.device)
    for row in range(len(q)):
        k, v = (side.double().repeat_interleave(q.shape[1] // side.shape[1], 1) for side in cache.gather(row))
        tokens = [t for index in order for t in range(*items[index][1:]) if items[index][0] == row]
        if tokens:
            scores = torch.einsum("hd,thd->ht", q[row].double(), k[tokens]) * q.shape[2] ** -0.5
            out[row] = torch.einsum("ht,thd->hd", scores.softmax(1), v[tokens])
            lse[row] = scores.logsumexp(1)
    return out, lse


TILE = 16  # tokens per tile of the kernel: every item begins at a multiple of it
SPARE = 128  # states behind those that are used: a wrong index falls there, and not into other memory


def empty_states(n: int, q: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Given: n states of no tokens, out 0 [n, n_q_heads, head_dim] and lse -inf [n, n_q_heads]."""
    out = torch.zeros(n + SPARE, *q.shape[1:], dtype=dtype, device=q.device)
    lse = torch.full((n + SPARE, q.shape[1]), -torch.inf, device=q.device)
    return out[:n], lse[:n]


def on_device(numbers: list[int] | list[Item], q: torch.Tensor) -> torch.Tensor:
    """Given: numbers as int32, one after the other, where q is; zeros lie behind them, for a wrong index."""
    flat = torch.tensor(numbers, dtype=torch.int32).flatten()
    return torch.cat([flat, flat.new_zeros(8 * SPARE)]).to(q.device)


def counters(
    items: list[Item], lengths: list[int], n_q_heads: int, n_kv_heads: int, head_dim: int, bytes_per_number: int,
    n_sms: int, programs_per_sm: int,
) -> dict[str, float]:  # fmt: skip
    """ex03_5: what one step with these items costs, counted without running it. About 14 lines.

    items: a stage's items, one program each per KV head, ordered by row. The queue has only items that hold tokens;
    other stages have empty ones, too (begin == end). There may be no items, and no rows. Returns a dict of

    launches: one to decode, if there are items at all; one to merge, if some row has not exactly one item (also a row
        without any: its result must be written)
    programs: of the decode launch; empty_programs: those of them without tokens
    waves: programs over the programs that all SMs hold at once (n_sms SMs, programs_per_sm on each); not rounded
    cta_per_sm: programs with tokens, per SM
    useful_kv_mib: K and V of all tokens, each of which takes bytes_per_number for each number of a KV head
    merge_state_mib: the states of all items with tokens, as the paper counts them: for each query head 2 + head_dim
        numbers of 4 bytes, whether the row was split or not
    MiB are 2**20 bytes.

    By hand, items [(0, 0, 5), (1, 0, 16), (1, 16, 40)], lengths [5, 40, 0], 8 query heads, 2 KV heads, head_dim 64,
    2 bytes, 28 SMs of 2 programs: 2 launches; 3 * 2 = 6 programs, none empty; 6 / 56 waves; 6 / 28 CTA per SM;
    45 * 2 * 2 * 64 * 2 = 23,040 bytes of K and V are 0.02197 MiB; 3 * 8 * 66 * 4 = 6,336 bytes of states 0.00604 MiB.
    """
    n_full = sum(begin < end for _, begin, end in items)
    rows = [row for row, _, _ in items]
    is_merged = any(rows.count(row) != 1 for row in range(len(lengths)))
    kv_bytes = sum(lengths) * 2 * n_kv_heads * head_dim * bytes_per_number
    return {
        "launches": (len(items) > 0) + is_merged,
        "programs": len(items) * n_kv_heads,
        "empty_programs": (len(items) - n_full) * n_kv_heads,
        "waves": len(items) * n_kv_heads / (n_sms * programs_per_sm),
        "cta_per_sm": n_full * n_kv_heads / n_sms,
        "useful_kv_mib": kv_bytes / 2**20,
        "merge_state_mib": n_full * n_q_heads * (2 + head_dim) * 4 / 2**20,
    }


def counters_spec(
    items: list[Item], lengths: list[int], n_q_heads: int, n_kv_heads: int, head_dim: int, bytes_per_number: int,
    n_sms: int, programs_per_sm: int,
) -> dict[str, float]:  # fmt: skip
    """Count programs and bytes one by one."""
    programs = [end - begin for _, begin, end in items for _kv_head in range(n_kv_heads)]  # tokens of each
    items_of_row = [[item for item in items if item[0] == row] for row in range(len(lengths))]
    per_token = sum(bytes_per_number for _side in "kv" for _head in range(n_kv_heads) for _dim in range(head_dim))
    per_state = sum(4 for _head in range(n_q_heads) for _number in range(2 + head_dim))
    return {
        "launches": sum([bool(items), any(len(mine) != 1 for mine in items_of_row)]),
        "programs": len(programs),
        "empty_programs": programs.count(0),
        "waves": len(programs) / sum(programs_per_sm for _sm in range(n_sms)),
        "cta_per_sm": sum(tokens > 0 for tokens in programs) / n_sms,
        "useful_kv_mib": sum(per_token for length in lengths for _token in range(length)) / 1024 / 1024,
        "merge_state_mib": sum(per_state for _, begin, end in items if begin < end) / 1024 / 1024,
    }


def makespan(durations: list[int], n_places: int) -> int:
    """ex03_6: when the last program has ended, if a GPU has places for n_places programs. About 5 lines.

    Programs start in the order of the list, each as soon as a place is free: the first n_places of them at time 0,
    every other one in the place that is free first. durations[p] is how long program p takes. Without programs it is 0.

    By hand, 2 places: durations [1, 1, 3] end at 4: the third one starts at 1. Longest first, [3, 1, 1] end at 3: while
    the long one runs, the other place does both short ones.
    """
    free_at = [0] * n_places
    for duration in durations:
        place = free_at.index(min(free_at))
        free_at[place] += duration
    return max(free_at)


def makespan_spec(durations: list[int], n_places: int) -> int:
    """Keep the ends of the programs that are running; when all places are taken, wait for the first of them."""
    now, ends = 0, []
    for duration in durations:
        if len(ends) == n_places:
            now = min(ends)
            ends.remove(now)
        ends.append(now + duration)
    return max(ends, default=0)

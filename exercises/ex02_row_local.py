"""Exercise 02: row-local bounds. Lesson 02 explains them; check("ex02_1") in a notebook judges it.

Write the functions that raise NotImplementedError, where the lesson names them. Each says what it takes and gives, with
an example worked by hand. Below it stands its specification, NAME_spec: short, plain and slow. Yours must give the same
without using it.
"""

from itertools import pairwise

import torch

from pkv._triton import tl, triton


def row_bounds(length: int, n_splits: int, tile: int) -> list[tuple[int, int]]:
    """ex02_1: the tokens (begin, end) of each split of one row, cut by the row's own length. About 5 lines.

    The row has n tiles, the last of them maybe part-filled. A tile is never cut, so c = min(n, n_splits) splits have
    tokens, and they come first: split s < c covers the tiles from n * s // c up to, and without, n * (s + 1) // c. It
    begins at its first tile's first token. It ends where the next split begins, the last one at `length`. The other
    splits are empty: for them begin and end are both n * tile.

    By hand, tile 16: 40 tokens in 2 splits are 3 tiles, cut 0:1 and 1:3, so [(0, 16), (16, 40)]. 33 tokens in 5 splits
    are 3 tiles as well, one for each of 3 splits: [(0, 16), (16, 32), (32, 33), (48, 48), (48, 48)].
    """
    raise NotImplementedError("ex02_1: row_bounds is not written yet (about 5 lines)")


def row_bounds_spec(length: int, n_splits: int, tile: int) -> list[tuple[int, int]]:
    """Token by token: each lies in a tile, and each tile in a split."""
    n_tiles = len({token // tile for token in range(length)})
    n_cuts = min(n_tiles, n_splits)
    bounds = []
    for split in range(n_splits):
        mine = [
            token
            for token in range(length)
            if split < n_cuts and n_tiles * split // n_cuts <= token // tile < n_tiles * (split + 1) // n_cuts
        ]
        bounds.append((mine[0], mine[-1] + 1) if mine else (n_tiles * tile, n_tiles * tile))
    return bounds


def empty_items(lengths: list[int], n_splits: int, tile: int) -> tuple[int, int]:
    """ex02_2: how many cells of the rectangle rows x splits hold no token: (by split_kv, by row-local bounds).

    About 6 lines. By split_kv all rows are cut like the longest one, of N tiles: split s covers the tiles from
    N * s // n_splits up to, and without, N * (s + 1) // n_splits of every row, as far as the row reaches. Row-local
    bounds are those of row_bounds. No rows: (0, 0).

    By hand, tile 16, 2 splits, lengths [5, 33, 200]: 1, 3 and 13 tiles. split_kv cuts 13 tiles 0:6 and 6:13, so the
    second split of the first two rows holds none: 2. Row-local bounds leave only the row of 1 tile a split without a
    token: 1. The answer is (2, 1).
    """
    raise NotImplementedError("ex02_2: empty_items is not written yet (about 6 lines)")


def empty_items_spec(lengths: list[int], n_splits: int, tile: int) -> tuple[int, int]:
    """Look at every token: a cell that none of them lies in is empty."""
    longest = len({token // tile for token in range(max(lengths, default=0))})
    split_kv = row_local = 0
    for length in lengths:
        for split in range(n_splits):
            begin, end = longest * split // n_splits, longest * (split + 1) // n_splits
            split_kv += not any(begin <= token // tile < end for token in range(length))
        row_local += sum(begin == end for begin, end in row_bounds_spec(length, n_splits, tile))
    return split_kv, row_local


def state_of_range(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, begin: int, end: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """ex02_3: the partial state that one split leaves: attention over the tokens begin:end of one row. About 9 lines.

    q [n_q_heads, head_dim]; k, v [length, n_kv_heads, head_dim]: all slots of the row, of which only begin:end may be
    read: the others may hold NaN. Returns out [n_q_heads, head_dim] and lse [n_q_heads], as attend_row of exercise 00
    gives them for a row of these tokens alone. A state is fp32, and all of it computed in fp32, also where q, k and v
    are fp16: states get merged, and each rounding would stay. An empty range, begin == end, which may lie past the
    row's end, gives the neutral state: out 0, lse -inf.

    By hand: q = 0 and v[t] = t. Tokens 2:6 give out (2 + 3 + 4 + 5) / 4 = 3.5 and lse = ln 4; 48:48 gives 0 and -inf.
    """
    raise NotImplementedError("ex02_3: state_of_range is not written yet (about 9 lines)")


def state_of_range_spec(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, begin: int, end: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Head by head and token by token, in fp64."""
    n_q_heads, head_dim = q.shape
    out, lse = torch.zeros(n_q_heads, head_dim), torch.full((n_q_heads,), -torch.inf)
    for head in range(n_q_heads) if begin < end else ():
        kv_head = head // (n_q_heads // k.shape[1])
        scores = torch.stack([scale * (q[head].double() @ k[token, kv_head].double()) for token in range(begin, end)])
        out[head] = scores.softmax(0) @ v[begin:end, kv_head].double()
        lse[head] = scores.logsumexp(0)
    return out, lse


def merge_rows(outs: torch.Tensor, lses: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """ex02_4: the states of a whole batch merged, row by row. About 11 lines; a loop over rows is fine.

    Each item is a state. outs [n_items, n_q_heads, head_dim]; lses [n_items, n_q_heads], natural; offsets [n_rows + 1],
    int32: row r has the items from offsets[r] up to, and without, offsets[r + 1]: many, one, or none. Returns out
    [n_rows, n_q_heads, head_dim] and lse [n_rows, n_q_heads], fp32 as these. An item is empty for the heads whose lse
    is -inf, all of them or some. Nobody has written its out there: it holds anything, NaN and inf too, and must not
    count. A row without items, or with empty ones only, has out 0 and lse -inf. A batch may have no rows (offsets [0]):
    out and lse then have none. An lse may be a few hundred, either way: exp of it is infinite, or 0.

    By hand: outs [2, 6, NaN, 7], lses [ln 1, ln 3, -inf, -inf], offsets [0, 3, 4, 4]. Row 0 has three items, one of
    them empty: out (1 * 2 + 3 * 6) / 4 = 5, lse ln 4. Row 1 has an empty one, row 2 has none: out 0, lse -inf.
    """
    raise NotImplementedError("ex02_4: merge_rows is not written yet (about 11 lines)")


def merge_rows_spec(outs: torch.Tensor, lses: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row by row and head by head: the items that hold tokens, weighted by softmax, in fp64."""
    n_rows = len(offsets) - 1
    out, lse = torch.zeros(n_rows, *outs.shape[1:]), torch.full((n_rows, lses.shape[1]), -torch.inf)
    for row, (first, last) in enumerate(pairwise(offsets.tolist())):
        for head in range(lses.shape[1]):
            mine = [item for item in range(first, last) if lses[item, head] > -torch.inf]
            if mine:
                out[row, head] = lses[mine, head].double().softmax(0) @ outs[mine, head].double()
                lse[row, head] = lses[mine, head].double().logsumexp(0)
    return out, lse


@triton.jit(do_not_specialize=["n_splits"])
def bounds_kernel(lengths_ptr, bounds_ptr, n_splits, TILE: tl.constexpr):
    """ex02_5: one program finds the bounds of one split of one row, from the row's length on the GPU. About 10 lines.

    The programs of a row follow one another: row 0's splits 0, 1, ..., then row 1's. Program p loads the length of its
    row, finds begin and end as row_bounds does, and stores them at elements 2 * p and 2 * p + 1 of bounds. An empty
    split stores its bounds like any other. Rows may have up to 2 billion tokens: a number of tiles times a number of
    splits then takes more than 32 bits, so make one of them int64 with .to(tl.int64) before you multiply.

    By hand, TILE 16, 5 splits, lengths [40, 33]: program 7 is split 2 of row 1, and stores 32 and 33.
    """
    # ex02_5: yours, about 10 lines
    pass


def bounds_on_gpu(lengths: torch.Tensor, n_splits: int, tile: int) -> torch.Tensor:
    """ex02_5: launches bounds_kernel. The launch is given: delete the line that raises when the kernel is written.

    lengths [n_rows], int32, on the GPU; returns [n_rows, n_splits, 2], int32: (begin, end) of each split of each row.
    The host does not look at the lengths, no .tolist() and no .max().item(): that would make it wait for the GPU.
    """
    raise NotImplementedError("ex02_5: write bounds_kernel (about 10 lines), then delete this line")
    bounds = lengths.new_full((len(lengths), n_splits, 2), -1)  # what no program writes stays -1
    bounds_kernel[(len(lengths) * n_splits,)](lengths, bounds, n_splits, tile)
    return bounds


def bounds_on_gpu_spec(lengths: torch.Tensor, n_splits: int, tile: int) -> torch.Tensor:
    """In PyTorch: the same for all rows and splits at once, in int64."""
    n_tiles = (-(-lengths.long() // tile))[:, None]
    n_cuts = n_tiles.clamp(1, n_splits)
    cuts = n_tiles * torch.arange(n_splits + 1, device=lengths.device).minimum(n_cuts) // n_cuts * tile
    begins, ends = cuts[:, :-1], cuts[:, 1:].minimum(lengths[:, None])
    return torch.stack([begins, ends.maximum(begins)], dim=2).int()

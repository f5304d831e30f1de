"""Exercise 05: equal runs, planned on the GPU. Lesson 05 explains it; check("ex05_1") in a notebook judges it.

Write the functions that raise NotImplementedError, where the lesson names them. Each says what it takes and gives, with
an example worked by hand. Below it stands its specification, NAME_spec: short, plain and slow. Yours must give the same
without using it.

The rule here is the plain one: all tiles in one line, runs of equally many tiles. The library's stage stream_k adds
three things to it: start units before each row, a least run, and a share that is rounded up.
"""

from collections.abc import Callable
from itertools import groupby, pairwise

import torch

import pkv
from pkv._triton import tl, triton

Item = tuple[int, int, int]  # row, begin token, end token


def tile_line(lengths: torch.Tensor, tile: int) -> torch.Tensor:
    """ex05_1: where each row begins on the line of all rows' tiles, and where the line ends. About 2 lines; no loop.

    lengths [n_rows], int32; returns [n_rows + 1], int32: entry r is the number of tiles before row r, the last one is
    the number of all tiles. A row of `length` tokens takes length / tile tiles, rounded up; an empty row takes none,
    and so begins where the next row does. No rows: [0]. No tile holds tokens of two rows. A row may have up to 2**31 -
    64 tokens, all rows together fewer than 2**31 tiles.

    By hand, tile 16: lengths [5, 0, 40] take 1, 0 and 3 tiles, so the line is [0, 1, 1, 4].
    """
    n_tiles = (lengths.long() + tile - 1) // tile
    return torch.nn.functional.pad(n_tiles.cumsum(0), (1, 0)).int()


def tile_line_spec(lengths: torch.Tensor, tile: int) -> torch.Tensor:
    """Row by row: a row begins where the one before it ends."""
    line = [0]
    for length in lengths.tolist():
        line.append(line[-1] + len(range(0, length, tile)))
    return torch.tensor(line, dtype=torch.int32)


def run_bounds(n_tiles: int, n_programs: int) -> list[int]:
    """ex05_2: cut a line of n_tiles tiles into n_programs equal runs. One line.

    Returns n_programs + 1 ints: program p has the tiles [bounds[p], bounds[p + 1]). bounds[p] is n_tiles * p /
    n_programs, rounded down. So runs differ by one tile at most, and the larger ones are spread over the line. With
    more programs than tiles some runs are empty.

    By hand: 10 tiles, 4 programs: 10 * p / 4 = 0, 2.5, 5, 7.5, 10, so [0, 2, 5, 7, 10]. 2 tiles, 3 programs: [0, 0, 1,
    2].
    """
    return [n_tiles * program // n_programs for program in range(n_programs + 1)]


def run_bounds_spec(n_tiles: int, n_programs: int) -> list[int]:
    """Every program puts n_tiles into a bag; whenever there are n_programs in it, they make a tile."""
    bounds, tile, in_bag = [0], 0, 0
    for _ in range(n_programs):
        made, in_bag = divmod(in_bag + n_tiles, n_programs)
        tile += made
        bounds.append(tile)
    return bounds


def items_of_run(begin: int, end: int, lengths: list[int], tile: int) -> list[Item]:
    """ex05_3: what a run has of which rows: the tiles [begin, end) of the line as items. About 8 lines.

    Returns a list of (row, begin token, end token), one for each row of which the run has tiles, in the order of rows.
    Tokens are counted from the row's first one. A row's last tile ends with the row. Empty rows are in no item. A run
    without tiles (begin == end) has none.

    By hand, tile 16, lengths [5, 0, 40]: tile 0 is row 0's, tiles 1 to 3 are row 2's. The run [0, 2) has (0, 0, 5) and
    (2, 0, 16); the run [2, 4) has (2, 16, 40).
    """
    items, before = [], 0  # tiles before the row
    for row, length in enumerate(lengths):
        n_tiles = -(-length // tile)
        first, stop = max(begin - before, 0), min(end - before, n_tiles)  # tiles of the row
        if first < stop:
            items.append((row, first * tile, min(stop * tile, length)))
        before += n_tiles
    return items


def items_of_run_spec(begin: int, end: int, lengths: list[int], tile: int) -> list[Item]:
    """Write the line down, token by token and tile by tile; then read the run's tiles off it."""
    line = [
        (row, range(length)[first : first + tile])
        for row, length in enumerate(lengths)
        for first in range(0, length, tile)
    ]
    items = []
    for row, tiles in groupby(line[begin:end], key=lambda of_row: of_row[0]):
        tokens = [token for _, tokens in tiles for token in tokens]
        items.append((row, tokens[0], tokens[-1] + 1))
    return items


def slots_of_rows(lengths: list[int], tile: int, n_programs: int) -> list[list[int]]:
    """ex05_4: which partial states each row is merged from. About 8 lines; use the two functions before this one.

    The line is cut into n_programs equal runs. A program that has a whole row writes its result, without a state. Of a
    row that it has in part, it leaves a state in one of its two slots: slot 2p for a row that began before its run,
    slot 2p + 1 for a row that begins in its run and goes on after it. A row that began before the run and goes on after
    it takes slot 2p.

    Returns a list for each row: the slots of its states, in the order of their tokens. It is empty for rows that are
    not merged: those that one program has whole, and those without tokens.

    By hand, tile 16, lengths [5, 40, 70], 3 programs: 1, 3 and 5 tiles, so runs of 3. Program 0 has row 0 whole, and
    two tiles of row 1, which goes on: slot 1. Program 1 has the last tile of row 1: slot 2, and the first two of row 2:
    slot 3. Program 2 has the rest of row 2: slot 4. So [[], [1, 2], [3, 4]].
    """
    slots: list[list[int]] = [[] for _ in lengths]
    n_tiles = sum(-(-length // tile) for length in lengths)
    for program, (begin, end) in enumerate(pairwise(run_bounds(n_tiles, n_programs))):
        for row, first_token, end_token in items_of_run(begin, end, lengths, tile):
            if (first_token, end_token) != (0, lengths[row]):
                slots[row].append(2 * program + (first_token == 0))
    return slots


def slots_of_rows_spec(lengths: list[int], tile: int, n_programs: int) -> list[list[int]]:
    """Write down the row and the program of every tile. A row of several programs has a state of each of them."""
    row_of = [row for row, length in enumerate(lengths) for _ in range(0, length, tile)]
    runs = pairwise(run_bounds_spec(len(row_of), n_programs))
    program_of = [program for program, (begin, end) in enumerate(runs) for _ in range(begin, end)]
    slots = []
    for row in range(len(lengths)):
        programs = sorted({program for program, of_row in zip(program_of, row_of, strict=True) if of_row == row})
        slots.append([2 * program + (program == programs[0]) for program in programs] if len(programs) > 1 else [])
    return slots


@triton.jit
def tiles_of(lengths, rows, n_rows, TILE: tl.constexpr):
    """How many tiles rows have, in 64 bits. rows: a block of row numbers; one past the last row has none."""
    tokens = tl.load(lengths + rows, mask=rows < n_rows, other=0).to(tl.int64)
    return tl.cdiv(tokens, TILE)


@triton.jit(do_not_specialize=["n_rows", "n_programs"])
def plan_kernel(lengths, plan, n_rows, n_programs, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """ex05_5: one program for each run: it finds in `lengths` where its run begins, and writes its line of `plan`."""
    program = tl.program_id(0)
    total = tl.cast(0, tl.int64)  # tiles of all rows
    for first in range(0, n_rows, BLOCK):
        total += tl.sum(tiles_of(lengths, first + tl.arange(0, BLOCK), n_rows, TILE), 0)
    begin = total * program // n_programs
    n_tiles = total * (program + 1) // n_programs - begin
    row = 0
    before, scanned = tl.cast(0, tl.int64), tl.cast(0, tl.int64)  # tiles before the row; of the blocks before this one
    for first in range(0, n_rows, BLOCK):
        tiles = tiles_of(lengths, first + tl.arange(0, BLOCK), n_rows, TILE)
        is_before = scanned + tl.cumsum(tiles, 0) <= begin  # these rows end before the run begins
        row += tl.sum(is_before.to(tl.int32), 0)
        before += tl.sum(tl.where(is_before, tiles, 0), 0)
        scanned += tl.sum(tiles, 0)
    tl.store(plan + 3 * program, row)
    tl.store(plan + 3 * program + 1, (begin - before) * TILE)
    tl.store(plan + 3 * program + 2, n_tiles)


def plan_on_gpu(lengths: torch.Tensor, n_programs: int, tile: int) -> torch.Tensor:
    """ex05_5: where each program's run begins, found on the GPU from the lengths alone. About 16 lines of plan_kernel.

    lengths [n_rows], int32, contiguous. Returns plan [n_programs, 3], int32: the row of the run's first tile, the first
    token of that tile in its row, and the number of tiles of the run. From there a program can walk on by itself, row
    by row. Runs are cut as in ex05_2. Of a run without tiles only the number, 0, is read.

    The host reads no lengths, and neither does PyTorch: no .item(), .tolist(), .cpu() or .cumsum(), so that the launch
    can be captured in a CUDA graph and replayed for other lengths. There may be more rows than BLOCK: look at BLOCK of
    them at a time. What lies in memory after the last row is not a length, and not to be read (tiles_of knows). All
    rows together have fewer than 2**31 tiles, but tiles * programs may need 64 bits.

    The kernel is given its launch: write plan_kernel, and delete the line here that raises.

    By hand, tile 16, lengths [5, 0, 70], 2 programs: 1, 0 and 5 tiles, 3 for each. Program 0 begins with row 0, token
    0: [0, 0, 3]. Program 1 begins with tile 3 of the line. Rows 0 and 1 end before it, after 1 tile, so it is tile 2 of
    row 2: [2, 32, 3].
    """
    # given
    plan = torch.empty(n_programs, 3, dtype=torch.int32, device=lengths.device)
    plan_kernel[(n_programs,)](lengths, plan, len(lengths), n_programs, TILE=tile, BLOCK=128)
    return plan


def plan_on_gpu_spec(lengths: torch.Tensor, n_programs: int, tile: int) -> torch.Tensor:
    """The same on the host: the first item of every run."""
    of_rows = lengths.tolist()
    plan = []
    for begin, end in pairwise(run_bounds_spec(int(tile_line_spec(lengths, tile)[-1]), n_programs)):
        row, token, _ = (items_of_run_spec(begin, end, of_rows, tile) or [(0, 0, 0)])[0]
        plan.append([row, token, end - begin])
    return torch.tensor(plan, dtype=torch.int32, device=lengths.device)


def capture(q: torch.Tensor, cache: pkv.PagedKVCache) -> Callable[[], torch.Tensor]:
    """ex05_6: pkv.decode captured once in a CUDA graph. About 8 lines. It counts only where there is a GPU.

    q [n_rows, n_q_heads, head_dim]. Returns a function replay() without arguments, which returns out, as pkv.decode(q,
    cache) would give it for what q, the lengths and the pages hold *when replay() is called*: whoever calls it has
    written new queries into q, and longer rows into the cache, in place. replay() only replays: it calls neither
    pkv.decode nor anything else that launches kernels from the host.

    A graph records launches with the addresses of their arguments. So out must stay where it is: every replay writes
    the same tensor. Kernels are compiled at their first call, which cannot be captured: call pkv.decode once before. A
    stage that is planned on the host would record the plan of today's lengths.

    By hand: q = 0, and the value of token t is t. With 3 tokens out is 1; write 5 into cache.lengths, and replay()
    gives (0 + 1 + 2 + 3 + 4) / 5 = 2.
    """
    out = torch.empty_like(q)
    pkv.decode(q, cache, out=out)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pkv.decode(q, cache, out=out)

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


def capture_spec(q: torch.Tensor, cache: pkv.PagedKVCache) -> Callable[[], torch.Tensor]:
    """Without a graph: decode anew at every call."""
    return lambda: pkv.decode(q, cache)

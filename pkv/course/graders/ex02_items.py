"""How task 2 of exercise 02 is judged: the items that hold no token, by split_kv's bounds and by row-local ones."""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from pkv.course.graders.batches import fails_for_lack
from pkv.course.graders.ex02_bounds import Bounds, larger_first, row_bounds
from pkv.course.tasks import Mistake, Property, Spec, Task, Unfit
from pkv.stages.s1_split_kv import split_items

Counts = tuple[int, int]


def n_empty(bounds: Bounds) -> int:
    """Ranges without a token."""
    return sum(begin >= end for begin, end in bounds)


def of_split_kv(lengths: list[int], n_splits: int, tile: int) -> int:
    """Empty items by split_kv's bounds: the library's own."""
    items = split_items(np.array(lengths, dtype=np.int64), n_splits, tile)
    return n_empty([(begin, end) for _, begin, end in items.tolist()])


def of_row_local(lengths: list[int], n_splits: int, tile: int) -> int:
    """Empty items by row-local bounds: the library's own."""
    return sum(n_empty(row_bounds(length, n_splits, tile)) for length in lengths)


def empty_items(lengths: list[int], n_splits: int, tile: int) -> Counts:
    """Both counts."""
    return of_split_kv(lengths, n_splits, tile), of_row_local(lengths, n_splits, tile)


def by_end(n: int, begin: int, end: int) -> bool:
    """Is a split of the longest row's tiles begin:end without a tile in a row of n?"""
    return min(n, end) <= begin


def of_cuts(
    cut: Callable[[int, int], list[int]], unit: int | None = None, is_empty: Callable[..., bool] = by_end
) -> Callable[[list[int], int, int], Counts]:
    """Both counts where split_kv cuts the longest row otherwise; unit: tokens of what is cut (default: the tile)."""

    def counts(lengths: list[int], n_splits: int, tile: int) -> Counts:
        tiles = [-(-length // (unit or tile)) for length in lengths]
        cuts = cut(max(tiles, default=0), n_splits)
        split_kv = sum(is_empty(n, begin, end) for n in tiles for begin, end in pairwise(cuts))
        return split_kv, of_row_local(lengths, n_splits, tile)

    return counts


def even_cuts(n: int, n_splits: int) -> list[int]:
    """n * s // S."""
    return [n * split // n_splits for split in range(n_splits + 1)]


def whole_tiles(lengths: list[int], n_splits: int, tile: int) -> Counts:
    """Tiles that are part-filled are not seen."""
    return empty_items([length // tile * tile for length in lengths], n_splits, tile)


def negative(lengths: list[int], n_splits: int, tile: int) -> Counts:
    """Rows of more tiles than splits are set off against others."""
    return of_split_kv(lengths, n_splits, tile), sum(n_splits - -(-length // tile) for length in lengths)


def longest_skipped(lengths: list[int], n_splits: int, tile: int) -> Counts:
    """split_kv's are counted in rows that have fewer tiles than the longest."""
    tiles = [-(-length // tile) for length in lengths]
    cuts = even_cuts(max(tiles, default=0), n_splits)
    shorter = [n for n in tiles if n < max(tiles)]
    split_kv = sum(by_end(n, begin, end) for n in shorter for begin, end in pairwise(cuts))
    return split_kv, of_row_local(lengths, n_splits, tile)


def arguments(spec: Spec) -> tuple[Any, ...]:
    """lengths, n_splits, tile."""
    if min(spec["n_splits"], spec["tile"]) < 1:
        raise Unfit
    return list(spec["lengths"]), spec["n_splits"], spec["tile"]


def by_hand(*cases: tuple[list[int], int]) -> list[Spec]:
    """Cases (lengths, n_splits) of tiles of 16."""
    return [{"lengths": lengths, "n_splits": n_splits, "tile": 16} for lengths, n_splits in cases]


def ragged(rng: random.Random, least: int, most: int) -> list[Spec]:
    """Batches of one long row and others of so many tiles as there are splits, times least to most, / 4."""
    found = []
    for n_splits in (2, 3, rng.randrange(4, 8)):
        tile = rng.choice([3, 4, 16])
        rows = [n_splits * rng.randrange(least, most) * tile // 4 + rng.randrange(-1, 2) for _ in range(4)]
        longest = n_splits * rng.randrange(6, 12) * tile + rng.randrange(tile)
        found.append({"lengths": [max(rows[0], 1), longest, *rows[1:]], "n_splits": n_splits, "tile": tile})
    return found


EX02_2 = Task(
    id="ex02_2",
    title="items without a token",
    function="empty_items",
    lines=6,
    points=2,
    arguments=arguments,
    right=empty_items,
    shortcuts=("pkv",),
    properties=(
        Property(
            "rows of enough tiles: row-local bounds leave no item empty",
            lambda rng: by_hand(([80], 4), ([200, 33], 2), ([112, 208], 2), ([999, 96, 160], 6)) + ragged(rng, 4, 20),
        ),
        Property(
            "rows of fewer tiles than splits",
            lambda rng: by_hand(([5], 2), ([5, 33, 200], 2), ([33, 40, 5], 5)) + ragged(rng, 1, 4),
        ),
        Property(
            "a row that ends just where a split of the longest begins",
            lambda rng: by_hand(([64, 128], 2), ([65, 128], 2), ([63, 128, 96, 97], 4), ([64, 127], 2)),
        ),
        Property("rows without tokens, and no rows", lambda rng: by_hand(([0], 2), ([0, 40, 0], 3), ([], 4))),
    ),
    mistakes=(
        Mistake("same_rule", "cuts like the longest row in both counts: row-local bounds look at the row's own tiles",
                lambda *a: (of_split_kv(*a), of_split_kv(*a))),
        Mistake("same_rule", "cuts each row by itself in both counts: split_kv cuts all rows like the longest",
                lambda *a: (of_row_local(*a), of_row_local(*a))),
        Mistake("swapped", "gives the counts in the wrong order: split_kv's comes first",
                lambda *a: (of_row_local(*a), of_split_kv(*a))),
        Mistake("filled", "counts the items that hold tokens: the empty ones are asked for",
                lambda lengths, s, tile: tuple(len(lengths) * s - n for n in empty_items(lengths, s, tile))),
        Mistake("negative", "lets a row of more tiles than splits count below 0", negative),
        Mistake("by_tokens", "cuts the longest row's tokens, not its tiles", of_cuts(even_cuts, unit=1)),
        Mistake("by_tokens", "cuts rows' tokens, not their tiles", lambda lengths, s, tile: empty_items(lengths, s, 1)),
        Mistake("rounded_up", "gives each split ceil(N / n_splits) tiles of the longest row: cut at N * s // n_splits",
                of_cuts(lambda n, s: [min(-(-n // s) * i, n) for i in range(s + 1)])),
        Mistake("rounded_down", "gives each split N // n_splits tiles of the longest row: the remainder is lost",
                of_cuts(lambda n, s: [n // s * i for i in range(s)] + [n])),
        Mistake("rounded_down", "gives each split N // n_splits tiles of the longest row: the remainder is lost",
                of_cuts(lambda n, s: [n // s * i for i in range(s + 1)])),
        Mistake("larger_first", "gives the first splits of the longest row a tile more: cut at N * s // n_splits",
                of_cuts(larger_first)),
        Mistake("late", "takes an item for filled where the row ends at its first token: ends are half-open",
                of_cuts(even_cuts, is_empty=lambda n, begin, end: begin == end or n < begin)),
        Mistake("late", "takes an item for filled where begin and end are equal: it holds no token",
                of_cuts(even_cuts, is_empty=lambda n, begin, end: min(n, end) < begin)),
        Mistake("outside_only", "does not count splits that get no tile of the longest row itself",
                of_cuts(even_cuts, is_empty=lambda n, begin, end: n <= begin < end)),
        Mistake("outside_only", "compares only where a split begins: one that gets no tile of the longest row is empty "
                "as well", of_cuts(even_cuts, is_empty=lambda n, begin, end: n <= begin)),
        Mistake("longest_skipped", "does not count the longest row's own empty items: it has some where it has fewer "
                "tiles than splits", longest_skipped),
        Mistake("whole_tiles", "rounds the number of tiles down: a part-filled tile holds tokens", whole_tiles),
        Mistake("empty_rows_skipped", "leaves out rows without tokens: all their items are empty",
                lambda lengths, s, tile: empty_items([length for length in lengths if length], s, tile)),
        Mistake("no_rows", "fails for a batch without rows: it has no item",
                shows=lambda case, got: not case.spec["lengths"] and fails_for_lack(got)),
    ),
)  # fmt: skip

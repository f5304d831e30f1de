"""How task 1 of exercise 02 is judged, and what people get wrong about the bounds of a row."""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from pkv.course.graders.batches import fails_for_lack, rounded_up
from pkv.course.tasks import Mistake, Property, Spec, Task, Unfit
from pkv.stages.s2_row_local import own_items

Bounds = list[tuple[int, int]]
Rule = Callable[[int, int, int], Bounds]  # (length, n_splits, tile)


def row_bounds(length: int, n_splits: int, tile: int) -> Bounds:
    """The library's own items of one row."""
    return [(begin, end) for _, begin, end in own_items(np.array([length], dtype=np.int64), n_splits, tile).tolist()]


def cuts_of(n_tiles: int, n_splits: int) -> list[int]:
    """Where splits begin, in tiles, and the last one ends."""
    n_cuts = max(min(n_tiles, n_splits), 1)
    return [n_tiles * min(split, n_cuts) // n_cuts for split in range(n_splits + 1)]


def by_cuts(cut: Callable[[int, int], list[int]] = cuts_of, n_tiles: Callable[[int, int], int] = rounded_up) -> Rule:
    """The rule that cuts a row of n_tiles(length, tile) tiles as told; ends are clipped at the row's length."""

    def rule(length: int, n_splits: int, tile: int) -> Bounds:
        cuts = cut(n_tiles(length, tile), n_splits)
        return [(a * tile, max(a * tile, min(b * tile, length))) for a, b in pairwise(cuts)]

    return rule


def by_range(change: Callable[..., tuple[Any, Any]]) -> Rule:
    """The right rule, with each range changed: change(begin, end, length, tile)."""
    return lambda length, n_splits, tile: [
        change(*bounds, length, tile) for bounds in row_bounds(length, n_splits, tile)
    ]


def larger_first(n_tiles: int, n_splits: int) -> list[int]:
    """Cuts where the first splits have a tile more."""
    return [n_tiles // n_splits * split + min(split, n_tiles % n_splits) for split in range(n_splits + 1)]


def larger_last(n_tiles: int, n_splits: int) -> list[int]:
    """Cuts where each split takes its share of what is left, rounded down."""
    cuts = [0]
    for others in range(min(n_tiles, n_splits), 0, -1):
        cuts.append(cuts[-1] + (n_tiles - cuts[-1]) // others)
    return cuts + [n_tiles] * (n_splits + 1 - len(cuts))


SAYS = {
    "scattered": "scatters the empty splits: they come last, after one split for each tile (c = min(n, n_splits))",
    "by_tokens": "cuts tokens, not tiles: a split must begin at a tile's first token",
    "remainder_lost": "gives each split n // n_splits tiles: the remainder is read by nobody",
    "remainder_last": "gives the whole remainder to the last split: cut at n * s // c, so that shares differ by a tile",
    "rounded_up": "gives each split ceil(n / n_splits) tiles, so the last ones get few, or none: cut at n * s // c",
    "larger_first": "gives the larger shares to the first splits: n * s // c spreads them over the row",
    "larger_last": "gives the larger shares to the last splits: n * s // c spreads them over the row",
    "rounded": "rounds n * s / c to the nearest tile: it is rounded down, //",
    "float_share": "multiplies a rounded share: n / c * s may be just below a whole tile; use // on ints",
    "unclipped": "lets the last range run to the end of its tile: tokens past `length` are nobody's",
    "floor": "counts whole tiles only: the part-filled last one is read by nobody",
    "tile_too_many": "counts a tile too many where the last one is just full",
    "backwards": "ends empty splits before they begin: clipped at `length`, an end must not fall below its begin",
    "empty_at_length": "puts empty splits at `length`: they lie at the end of the last tile, n * tile",
    "empty_at_zero": "puts empty splits at token 0: they lie at the end of the last tile, n * tile",
    "inclusive": "names the last token as the end: a range is half-open, its end is the token after",
    "counts": "gives (begin, number of tokens): the second is the end",
    "in_tiles": "gives numbers of tiles: begin and end count tokens",
}
RULES: tuple[tuple[str, Rule], ...] = (
    ("scattered", by_cuts(lambda n, s: [n * i // s for i in range(s + 1)])),
    ("by_tokens", lambda length, s, tile: [(length * i // s, length * (i + 1) // s) for i in range(s)]),
    ("remainder_lost", by_cuts(lambda n, s: [n // (min(n, s) or 1) * min(i, n) for i in range(s + 1)])),
    ("remainder_lost", by_cuts(lambda n, s: [n // s * i for i in range(s + 1)])),
    ("remainder_last", by_cuts(lambda n, s: [n // (min(n, s) or 1) * i if i < min(n, s) else n for i in range(s + 1)])),
    ("remainder_last", by_cuts(lambda n, s: [n // s * i for i in range(s)] + [n])),
    ("rounded_up", by_cuts(lambda n, s: [min(-(-n // s) * i, n) for i in range(s + 1)])),
    ("rounded_up", by_cuts(lambda n, s: [-(-n // s) * i for i in range(s + 1)])),
    ("larger_first", by_cuts(larger_first)),
    ("larger_last", by_cuts(larger_last)),
    ("rounded", by_cuts(lambda n, s: [round(n * min(i, n) / (min(n, s) or 1)) for i in range(s + 1)])),
    ("float_share", by_cuts(lambda n, s: [int(n / (min(n, s) or 1) * min(i, n)) for i in range(s + 1)])),
    ("float_share", by_cuts(lambda n, s: [int(n / min(n, s) * i) if i < min(n, s) else n for i in range(s + 1)])),
    ("unclipped", by_range(lambda begin, end, length, tile: (begin, -(-end // tile) * tile))),
    ("floor", by_cuts(n_tiles=lambda length, tile: length // tile)),
    ("tile_too_many", by_cuts(n_tiles=lambda length, tile: length // tile + 1)),
    ("backwards", by_range(lambda begin, end, length, tile: (begin, min(end, length)))),
    ("empty_at_length", by_range(lambda b, e, length, tile: (b, e) if b < e else (length, length))),
    ("empty_at_zero", by_range(lambda b, e, length, tile: (b, e) if b < e else (0, 0))),
    ("inclusive", by_range(lambda begin, end, length, tile: (begin, end - (begin < end)))),
    ("inclusive", by_range(lambda begin, end, length, tile: (begin, end - 1))),
    ("counts", by_range(lambda begin, end, length, tile: (begin, end - begin))),
    ("in_tiles", by_range(lambda begin, end, length, tile: (begin // tile, -(-end // tile)))),
)


def bounds_arguments(spec: Spec) -> tuple[Any, ...]:
    """length, n_splits, tile."""
    if min(spec["n_splits"], spec["tile"]) < 1:
        raise Unfit
    return spec["length"], spec["n_splits"], spec["tile"]


def bounds_specs(rng: random.Random, least: int, most: int, ends: tuple[int, ...]) -> list[Spec]:
    """Rows of least to most times as many tiles as splits, / 4; ends: tokens past the last whole tile."""
    found = []
    for n_splits in (2, 3, rng.randrange(4, 6), rng.randrange(6, 10)):
        tile, n_tiles = rng.choice([3, 4, 16]), max(n_splits * rng.randrange(least, most) // 4, 1)
        found += [{"length": n_tiles * tile + end, "n_splits": n_splits, "tile": tile} for end in ends]
    return found


def by_hand(*cases: tuple[int, int]) -> list[Spec]:
    """Cases (length, n_splits) of tiles of 16."""
    return [{"length": length, "n_splits": n_splits, "tile": 16} for length, n_splits in cases]


EX02_1 = Task(
    id="ex02_1",
    title="bounds of one row",
    function="row_bounds",
    lines=5,
    arguments=bounds_arguments,
    right=row_bounds,
    axes=("split", "bound"),
    shortcuts=("pkv",),
    properties=(
        Property(
            "a row of more tiles than splits is cut at n * s // n_splits",
            lambda rng: by_hand((40, 2), (208, 5), (112, 4), (61 * 16, 7), (480, 22)) + bounds_specs(rng, 5, 20, (0,)),
        ),
        Property(
            "the last range ends at the row's last token",
            lambda rng: by_hand((47, 2), (49, 2)) + bounds_specs(rng, 6, 12, (-1, 0, 1)),
        ),
        Property(
            "a row of fewer tiles than splits: a tile for each split, then the empty ones",
            lambda rng: by_hand((5, 2), (33, 5), (48, 5)) + bounds_specs(rng, 1, 3, (-1, 0)),
        ),
        Property("an empty row has n_splits empty ranges", lambda rng: by_hand((0, 1), (0, 2), (0, 5))),
    ),
    mistakes=(
        *(Mistake(name, SAYS[name], rule) for name, rule in RULES),
        Mistake("empty_dropped", "leaves out the empty ranges: every split has one",
                lambda *a: [(begin, end) for begin, end in row_bounds(*a) if begin < end]),
        Mistake("empty_row", "fails for a row without tokens: it has no tile, and all its ranges are (0, 0)",
                shows=lambda case, got: case.spec["length"] == 0 and fails_for_lack(got)),
    ),
)  # fmt: skip

"""How the third task of exercise 01 is judged: the splits of a row, cut like the longest."""

import functools
import random
from collections.abc import Callable
from typing import Any

from pkv.course.tasks import Mistake, Property, Spec, Task, Unfit


def cut(
    longest: int, length: int, n_splits: int, tile: int, *,
    of: Callable[[int, int, int], int] = lambda n, split, n_splits: n * split // n_splits,
    n_tiles: int | None = None, clip: str = "begin",
) -> list[tuple[int, int]]:  # fmt: skip
    """The splits of a row; the options are mistakes. of: the tile at which a split begins."""
    n = -(-longest // tile) if n_tiles is None else n_tiles
    bounds = []
    for split in range(n_splits):
        begin, end = of(n, split, n_splits) * tile, of(n, split + 1, n_splits) * tile
        end = end if clip == "nothing" else min(end, length)
        if clip in ("begin", "end of row"):
            end = max(begin, end)
        bounds.append((min(begin, length), min(end, length)) if clip == "end of row" else (begin, end))
    return bounds


def cut_arguments(spec: Spec) -> tuple[int, ...]:
    """As the task's function takes them."""
    if spec["length"] > spec["longest"] or min(spec["n_splits"], spec["tile"]) < 1:
        raise Unfit
    return tuple(spec[name] for name in ("longest", "length", "n_splits", "tile"))


def uneven_specs() -> list[Spec]:
    """Cuts that float arithmetic gets wrong: 14 / 22 * 22 is below 14, and 30 / 22 * 11 below 15."""
    return [{"longest": n * 16, "length": n * 16, "n_splits": s, "tile": 16} for n, s in ((22, 22), (90, 10), (30, 22))]


def cut_specs(rng: random.Random, rows: list[tuple[int, int]]) -> list[Spec]:
    """Rows (longest, length) cut in two, in as many splits as drawn, and in more than there are tiles."""
    return [
        {"longest": longest, "length": length, "n_splits": n_splits, "tile": tile}
        for longest, length in rows
        for tile, n_splits in ((16, 2), (16, rng.randrange(3, 6)), (8, 7), (rng.choice([32, 64]), 4))
    ]


def with_length(**made: Any) -> Callable[..., Any]:
    """A wrong cut that takes n_tiles(longest, length, tile) for the longest row's tiles."""
    n_tiles = made.pop("n_tiles")
    return lambda longest, length, n_splits, tile: cut(
        longest, length, n_splits, tile, n_tiles=n_tiles(longest, length, tile), **made
    )


EX01_3 = Task(
    id="ex01_3",
    title="a row cut like the longest",
    function="split_bounds",
    lines=6,
    arguments=cut_arguments,
    right=cut,
    axes=("split", "begin, end"),
    shortcuts=("split_items", "stages", "plan"),
    properties=(
        Property("tiles of the longest row, shared out evenly",
                 lambda rng: cut_specs(rng, [(n := rng.randrange(60, 90), n), (n - 1, n - 1), (40, 40), (160, 160)])
                 + uneven_specs()),
        Property("as far as a shorter row reaches: later splits have no token",
                 lambda rng: cut_specs(rng, [(40, 10), (100, 1), (100, 32), (rng.randrange(90, 130), 33)])),
        Property("a row without tokens, and a batch without any", lambda rng: cut_specs(rng, [(40, 0), (0, 0)])),
    ),
    mistakes=(
        Mistake("own_length", "cuts the row by its own tiles: all rows are cut like the longest",
                with_length(n_tiles=lambda longest, length, tile: -(-length // tile))),
        Mistake("tail_dropped", "drops the longest row's part-filled last tile: n is longest / tile, rounded up",
                with_length(n_tiles=lambda longest, length, tile: longest // tile)),
        Mistake("one_tile_more", "counts a tile too many where the longest row's last tile is full",
                with_length(n_tiles=lambda longest, length, tile: longest // tile + 1)),
        Mistake("cut_in_tokens", "cuts by tokens: a split begins at a tile's first token",
                lambda longest, length, n, tile: cut(longest, length, n, 1)),
        *(Mistake("cut_in_tokens", "cuts by tokens: a split begins at a tile's first token",
                  lambda longest, length, n, tile, clip=clip: cut(
                      longest, length, n, 1, clip=clip, of=lambda n, s, k: -(-n // k) * s))
          for clip in ("begin", "end of row")),
        Mistake("rounded_up", "gives every split ceil(n / S) tiles, so that the last ones get few or none",
                lambda *a: cut(*a, of=lambda n, split, n_splits: min(-(-n // n_splits) * split, n))),
        Mistake("rounded_up", "gives every split ceil(n / S) tiles, so that the last ones get few or none",
                lambda *a: cut(*a, of=lambda n, split, n_splits: -(-n // n_splits) * split)),
        Mistake("rounded_up", "rounds the bounds up: split s begins at tile n * s // S, rounded down",
                lambda *a: cut(*a, of=lambda n, split, n_splits: -(-n * split // n_splits))),
        Mistake("rest_last", "gives every split n // S tiles, and the rest to the last one",
                lambda *a: cut(*a, of=lambda n, split, n_splits: n if split == n_splits else n // n_splits * split)),
        Mistake("rest_dropped", "gives every split n // S tiles: the rest is nobody's",
                lambda *a: cut(*a, of=lambda n, split, n_splits: n // n_splits * split)),
        Mistake("rest_first", "gives the rest of the tiles to the first splits",
                lambda *a: cut(*a, of=lambda n, split, n_splits: n // n_splits * split + min(split, n % n_splits))),
        Mistake("rest_last_ones", "gives the rest of the tiles to the last splits, one each: split s begins at tile "
                "n * s // S", lambda *a: cut(*a, of=lambda n, split, n_splits: (
                    n // n_splits * split + max(split - n_splits + n % n_splits, 0)))),
        *(Mistake("float_share", "multiplies a rounded share: n / S * s may be just below a whole tile; use // on ints",
                  functools.partial(cut, of=of)) for of in (
                      lambda n, split, n_splits: int(n / n_splits * split),
                      lambda n, split, n_splits: int(split / n_splits * n))),
        *(Mistake("rounded", "rounds bounds to the nearest tile: split s begins at tile n * s // S, rounded down",
                  functools.partial(cut, of=of)) for of in (
                      lambda n, split, n_splits: round(n * split / n_splits),
                      lambda n, split, n_splits: int(n * split / n_splits + 0.5))),
        Mistake("not_clipped", "goes past the row's last token", lambda *a: cut(*a, clip="nothing")),
        Mistake("negative", "ends an empty split before it begins: it is (begin, begin)",
                lambda *a: cut(*a, clip="end")),
        Mistake("begin_clipped", "moves an empty split to the row's end: it stays where its tiles begin",
                lambda *a: cut(*a, clip="end of row")),
        Mistake("empty_left_out", "leaves out splits without tokens: every split has its entry, (begin, begin) too",
                lambda *a: [(begin, end) for begin, end in cut(*a) if begin < end]),
        Mistake("inclusive", "gives the last token for the end: a range stops before its end",
                lambda *a: [(begin, max(begin, end - 1)) for begin, end in cut(*a)]),
        Mistake("inclusive", "gives the last token for the end: a range stops before its end",
                lambda *a: [(begin, end - 1) for begin, end in cut(*a)]),
        Mistake("in_tiles", "gives tiles, not tokens: multiply by tile",
                lambda *a: [(begin // a[3], -(-end // a[3])) for begin, end in cut(*a)]),
        Mistake("in_tiles", "gives tiles, not tokens: multiply by tile",
                lambda *a: [(begin // a[3], end // a[3]) for begin, end in cut(*a, clip="nothing")]),
        Mistake("sizes", "gives (begin, number of tokens): it is (begin, end)",
                lambda *a: [(begin, end - begin) for begin, end in cut(*a)]),
    ),
)  # fmt: skip

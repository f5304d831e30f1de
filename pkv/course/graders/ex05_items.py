"""How exercise 05 is judged, second part: the items of a run."""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from pkv.course.graders.batches import rounded_up
from pkv.course.tasks import Case, Mistake, Property, Spec, Task, Unfit

Items = list[list[int]]


def down(length: int, tile: int) -> int:
    """Full tiles of a row."""
    return length // tile


def run_arguments(spec: Spec) -> tuple[Any, ...]:
    """A run that lies on the line."""
    begin, end, lengths, tile = (spec[name] for name in ("begin", "end", "lengths", "tile"))
    if tile < 1 or not lengths or not 0 <= begin <= end <= sum(rounded_up(length, tile) for length in lengths):
        raise Unfit
    return begin, end, list(lengths), tile


def items(
    begin: int, end: int, lengths: list[int], tile: int, *,
    count: Callable[[int, int], int] = rounded_up, inclusive: bool = False,
) -> Items:  # fmt: skip
    """What the run has of each row. The options are mistakes: another count of tiles, rows that begin at their ends."""
    found, before = [], 0
    for row, length in enumerate(lengths):
        n_tiles = count(length, tile)
        before += n_tiles if inclusive else 0
        first, stop = max(begin - before, 0), min(end - before, n_tiles)
        if first < stop:
            found.append([row, first * tile, min(stop * tile, length)])
        before += 0 if inclusive else n_tiles
    return found


def changed(change: Callable[..., list[int]]) -> Callable[..., Items]:
    """Each right item, changed: change(row, begin, end, length, tile)."""
    return lambda begin, end, lengths, tile: [
        change(*item, lengths[item[0]], tile) for item in items(begin, end, lengths, tile)
    ]


def has_empty_items(case: Case, got: Any) -> bool:
    """Right but for items without tokens."""
    return isinstance(got, list) and [item for item in got if item[1] != item[2]] == case.right


def cut_at_first_row(begin: int, end: int, lengths: list[int], tile: int) -> Items:
    """Every item cut at the length of the run's first row."""
    right = items(begin, end, lengths, tile)
    return [[row, first, min(rounded_up(last, tile) * tile, lengths[right[0][0]])] for row, first, last in right]


def on_the_line(begin: int, end: int, lengths: list[int], tile: int) -> Items:
    """Tokens counted from the start of the line."""
    before = [sum(rounded_up(length, tile) for length in lengths[:row]) * tile for row in range(len(lengths))]
    return [[row, before[row] + first, before[row] + last] for row, first, last in items(begin, end, lengths, tile)]


def tile_by_tile(begin: int, end: int, lengths: list[int], tile: int) -> Items:
    """One item for each tile."""
    return [
        [row, token, min(token + tile, last)]
        for row, first, last in items(begin, end, lengths, tile)
        for token in range(first, last, tile)
    ]


def padded(begin: int, end: int, lengths: list[int], tile: int) -> Items:
    """All rows take as many tiles as the longest."""
    found = items(begin, end, lengths, tile, count=lambda length, tile: rounded_up(max(lengths), tile))
    return [item for item in found if item[1] < item[2]]


def runs_of(lengths: list[int], tile: int, n_programs: int) -> list[Spec]:
    """Every run of a line that is cut for so many programs."""
    n_tiles = sum(rounded_up(length, tile) for length in lengths)
    cuts = [n_tiles * program // n_programs for program in range(n_programs + 1)]
    return [{"begin": begin, "end": end, "lengths": lengths, "tile": tile} for begin, end in pairwise(cuts)]


def drawn(rng: random.Random, tile: int, n_rows: int) -> list[int]:
    """Lengths around whole tiles, some of them 0."""
    return [
        rng.choice([0, 1, tile, tile * rng.randrange(1, 6) + rng.choice([-1, 0, 1, tile // 2])]) for _ in range(n_rows)
    ]


EX05_3 = Task(
    id="ex05_3",
    title="what a run has of which rows",
    function="items_of_run",
    lines=8,
    arguments=run_arguments,
    right=items,
    axes=("item", "number"),
    properties=(
        Property("a run inside one row", lambda rng: runs_of([40], 16, 3) + runs_of([9 * 8 - 3], 8, 4)),
        Property("a run crosses rows", lambda rng: [
            *runs_of([5, 40], 16, 2), *runs_of([5, 40, 20], 16, 1), *runs_of([30, 7, 3, 50, 17], 8, 3)]),
        Property("empty rows are in no item", lambda rng: [
            *runs_of([0, 5, 0, 0, 40, 0], 16, 2), *runs_of([0, 16, 0, 0, 33], 16, 4)]),
        Property("a run without tiles has no items", lambda rng: [
            *runs_of([5], 16, 3), *runs_of([0, 0], 4, 1), {"begin": 2, "end": 2, "lengths": [5, 0, 40], "tile": 16}]),
        Property("the runs of a ragged batch", lambda rng: [
            spec for tile in (4, rng.randrange(5, 30)) for spec in runs_of(drawn(rng, tile, 9), tile, 5)]),
    ),
    mistakes=(
        Mistake("not_cut", "goes on past the end of a row: its last tile ends where the row does",
                changed(lambda row, first, last, length, tile: [row, first, rounded_up(last, tile) * tile])),
        Mistake("cut_at_wrong_row", "cuts every item at the length of the run's first row, not of its own row",
                cut_at_first_row),
        Mistake("first_row_only", "stops at the end of the first row: a run goes on in the next one",
                lambda *a: items(*a)[:1]),
        Mistake("rows_between_lost", "loses the rows between the first and the last one of the run",
                lambda *a: items(*a)[:1] + items(*a)[1:][-1:]),
        Mistake("empty_row", "has items without tokens: a row that the run has nothing of is left out",
                shows=has_empty_items),
        Mistake("stops_at_empty_row", "stops at an empty row: the run goes on after it", lambda *a: [
            item for n, item in enumerate(items(*a)) if item[0] - n == items(*a)[0][0]]),
        Mistake("empty_not_counted", "does not count empty rows: the numbers of the rows after them are too small",
                lambda begin, end, lengths, tile: items(begin, end, [length for length in lengths if length], tile)),
        Mistake("rows_from_1", "counts rows from 1: the first one is row 0",
                changed(lambda row, first, last, length, tile: [row + 1, first, last])),
        Mistake("rows_of_run", "counts rows from the first one of the run, not of the batch",
                lambda *a: [[item[0] - items(*a)[0][0], *item[1:]] for item in items(*a)]),
        Mistake("rows_of_run", "numbers items: a row's number is its place in lengths",
                lambda *a: [[n, *item[1:]] for n, item in enumerate(items(*a))]),
        Mistake("begun_row_lost", "loses the row that began before the run",
                lambda *a: [item for item in items(*a) if item[1] == 0]),
        Mistake("in_tiles", "counts tiles of the row, not tokens",
                changed(lambda row, first, last, length, tile: [row, first // tile, rounded_up(last, tile)])),
        Mistake("on_the_line", "counts tokens from the start of the line, not of the row", on_the_line),
        Mistake("whole_rows", "gives each row whole, also where the run has a part of it",
                changed(lambda row, first, last, length, tile: [row, 0, length])),
        Mistake("from_token_0", "begins every item at token 0, also of a row that began before the run",
                changed(lambda row, first, last, length, tile: [row, 0, last])),
        Mistake("to_row_end", "ends every item with its row, also of a row that goes on after the run",
                changed(lambda row, first, last, length, tile: [row, first, length])),
        Mistake("tile_by_tile", "gives an item for each tile: neighbouring tiles of a row are one item", tile_by_tile),
        Mistake("last_token", "gives the last token: an item is half-open, its end is one more",
                changed(lambda row, first, last, length, tile: [row, first, last - 1])),
        Mistake("n_tokens", "gives how many tokens an item has, not where it ends",
                changed(lambda row, first, last, length, tile: [row, first, last - first])),
        Mistake("floor", "rounds a row's tiles down: its part-filled last tile is lost, and all rows after it move",
                lambda *a: items(*a, count=down)),
        Mistake("tiles_cross_rows", "cuts tiles across rows: each row begins with a new tile",
                lambda begin, end, lengths, tile: items(begin * tile, end * tile, lengths, 1)),
        Mistake("one_tile_more", "takes the tile `end` too: a run is half-open",
                lambda begin, end, *rest: items(begin, end + 1, *rest)),
        Mistake("one_tile_less", "leaves out the last tile of the run",
                lambda begin, end, *rest: items(begin, end - 1, *rest)),
        Mistake("padded", "takes as many tiles for every row as the longest one has", padded),
        Mistake("ends_for_begins", "takes where rows end on the line for where they begin",
                lambda *a: items(*a, inclusive=True)),
    ),
)  # fmt: skip

"""How exercise 05 is judged, third part: the slots of partial states."""

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from pkv.course.graders.batches import rounded_up
from pkv.course.graders.ex05_items import down, drawn
from pkv.course.tasks import Mistake, Property, Spec, Task, Unfit

Slots = list[list[int]]


def line_arguments(spec: Spec) -> tuple[Any, ...]:
    """Lengths, a tile, programs."""
    if min(spec["tile"], spec["n_programs"]) < 1 or not spec["lengths"]:
        raise Unfit
    return list(spec["lengths"]), spec["tile"], spec["n_programs"]


def even_run(tile_index: int, n_tiles: int, n_programs: int) -> int:
    """The program that has a tile: the last one that begins at it or before."""
    return ((tile_index + 1) * n_programs - 1) // n_tiles


def up_run(tile_index: int, n_tiles: int, n_programs: int) -> int:
    """The same where the share is rounded up."""
    return tile_index // rounded_up(n_tiles, n_programs)


def first_run(tile_index: int, n_tiles: int, n_programs: int) -> int:
    """The same where the first programs have a tile more."""
    share, larger = divmod(n_tiles, n_programs)
    in_larger = larger * (share + 1)
    return tile_index // (share + 1) if tile_index < in_larger else larger + (tile_index - in_larger) // share


def share_run(tile_index: int, n_tiles: int, n_programs: int) -> int:
    """Not quite the program that has a tile."""
    return tile_index * n_programs // n_tiles


def programs_of_rows(
    lengths: list[int], tile: int, n_programs: int, run: Any = even_run, count: Any = rounded_up
) -> Slots:
    """Of each row the programs that have tiles of it."""
    counts = [count(length, tile) for length in lengths]
    found, first, total = [], 0, sum(counts)
    for n_tiles in counts:
        found.append(sorted({run(index, total, n_programs) for index in range(first, first + n_tiles)}))
        first += n_tiles
    return found


def slots(
    lengths: list[int], tile: int, n_programs: int, *, slot: Any = lambda p, is_first, is_last: 2 * p + is_first,
    whole: bool = False, gaps: bool = False, **other: Any,
) -> Slots:  # fmt: skip
    """Of each row the slots of its states. The options are mistakes."""
    found = []
    for programs in programs_of_rows(lengths, tile, n_programs, **other):
        mine = list(range(programs[0], programs[-1] + 1)) if gaps and programs else programs
        is_merged = len(programs) > (0 if whole else 1)
        found.append([slot(p, p == mine[0], p == mine[-1]) for p in mine] if is_merged else [])
    return found


def last_of_run(lengths: list[int], tile: int, n_programs: int) -> Slots:
    """Slot 2p + 1 for the last row of a run, 2p for others."""
    rows = programs_of_rows(lengths, tile, n_programs)
    last_row = {program: row for row, programs in enumerate(rows) for program in programs}
    return [[2 * p + (last_row[p] == row) for p in mine] if len(mine) > 1 else [] for row, mine in enumerate(rows)]


def touched(lengths: list[int], tile: int, n_programs: int) -> Slots:
    """A row that ends at a cut is given to the next run too."""
    counts = [rounded_up(length, tile) for length in lengths]
    cuts = [sum(counts) * program // n_programs for program in range(n_programs + 1)]
    found, first = [], 0
    for n_tiles in counts:
        end = first + n_tiles
        mine = [p for p, (a, b) in enumerate(pairwise(cuts)) if a < b and n_tiles and a <= end and b > first]
        found.append([2 * p + (p == mine[0]) for p in mine] if len(mine) > 1 else [])
        first = end
    return found


def numbered(of: Callable[..., Slots], *arguments: Any) -> Slots:
    """States numbered one after another, as far as a row has several."""
    found, n = [], 0
    for row in of(*arguments):
        found.append(list(range(n, n + len(row))) if len(row) > 1 else [])
        n += len(row)
    return found


def batches(*some: tuple[list[int], int, int]) -> list[Spec]:
    """Specs of (lengths, tile, programs)."""
    return [dict(zip(("lengths", "tile", "n_programs"), one)) for one in some]


EX05_4 = Task(
    id="ex05_4",
    title="the slots of partial states",
    function="slots_of_rows",
    lines=8,
    arguments=line_arguments,
    right=slots,
    axes=("row", "state"),
    properties=(
        Property("a row in two runs: it goes on after the first, and began before the second", lambda rng: batches(
            ([40], 16, 2), ([5, 40, 70], 16, 3), ([20, 20, 20], 4, 2))),
        Property("a row that passes through whole runs", lambda rng: batches(
            ([100], 16, 4), ([9, 200, 5], 16, 5), ([64], 4, rng.randrange(5, 9)))),
        Property("rows that one run has whole, and empty rows, are not merged", lambda rng: batches(
            ([5], 16, 1), ([16, 16], 16, 2), ([0, 5, 0, 40, 0, 16, 3], 16, 2), ([32, 0, 32, 32, 0, 32], 16, 4))),
        Property("more programs than tiles", lambda rng: batches(([10], 4, 7), ([5, 0, 9], 4, 11), ([0], 16, 3))),
        Property("a ragged batch", lambda rng: batches(*(
            (drawn(rng, tile, 8), tile, rng.randrange(3, 9)) for tile in (4, rng.randrange(5, 20), 16)))),
    ),
    mistakes=(
        Mistake("one_slot", "gives one slot to each program: of a run that begins and ends inside rows, the second "
                "state overwrites the first", lambda *a: slots(*a, slot=lambda p, is_first, is_last: p)),
        Mistake("always_2p", "puts every state into slot 2p: the row that goes on has slot 2p + 1",
                lambda *a: slots(*a, slot=lambda p, is_first, is_last: 2 * p)),
        Mistake("always_2p_1", "puts every state into slot 2p + 1: the row that began before the run has slot 2p",
                lambda *a: slots(*a, slot=lambda p, is_first, is_last: 2 * p + 1)),
        Mistake("swapped", "swaps the two slots: 2p is for the row that began before the run, 2p + 1 for the one that "
                "begins in it", lambda *a: slots(*a, slot=lambda p, is_first, is_last: 2 * p + (not is_first))),
        Mistake("by_end", "chooses the slot by whether the row goes on: a row that passes through the whole run "
                "began before it, so it has slot 2p",
                lambda *a: slots(*a, slot=lambda p, is_first, is_last: 2 * p + (not is_last))),
        Mistake("last_of_run", "gives slot 2p + 1 to the last row of a run, also where that began before the run",
                last_of_run),
        Mistake("whole_rows", "merges rows that one program has whole: it writes their result, and leaves no state",
                lambda *a: slots(*a, whole=True)),
        Mistake("whole_rows", "merges rows that one program has whole: it writes their result, and leaves no state",
                lambda *a: slots(*a, whole=True, slot=lambda p, is_first, is_last: 2 * p + (is_first and not is_last))),
        Mistake("item_index", "numbers items, as the queue does: but a program knows no more than its own number",
                lambda *a: numbered(programs_of_rows, *a)),
        Mistake("numbered", "numbers the states one after another: but a program knows no more than its own number",
                lambda *a: numbered(slots, *a)),
        Mistake("empty_runs", "counts on states of runs without tiles: they leave none",
                lambda *a: slots(*a, gaps=True)),
        Mistake("touched", "gives a row that ends at a cut to the next run too: a run is half-open", touched),
        Mistake("rounded_up", "cuts runs with a share that is rounded up, as the library does: here runs are those of "
                "ex05_2", lambda *a: slots(*a, run=up_run)),
        Mistake("remainder_first", "gives the first runs a tile more: here runs are those of ex05_2",
                lambda *a: slots(*a, run=first_run)),
        *(Mistake("share_of_tile", "takes tile * n_programs // n_tiles for a tile's program: bounds are rounded "
                  "down, so a later program may begin at it", functools.partial(slots, run=share_run, gaps=gaps))
          for gaps in (False, True)),
        Mistake("tokens", "cuts the line of tokens into runs, not the line of tiles",
                lambda lengths, tile, n_programs: slots(lengths, 1, n_programs)),
        Mistake("turned_round", "gives a row's slots in the wrong order: the state of its first tokens comes first",
                lambda *a: [row[::-1] for row in slots(*a)]),
        Mistake("middle_lost", "loses the states between a row's first and its last one",
                lambda *a: [row[:1] + row[1:][-1:] for row in slots(*a)]),
        Mistake("floor", "rounds a row's tiles down", lambda *a: slots(*a, count=down)),
        Mistake("first_lost", "loses the state of the row that goes on: its beginning is merged too",
                lambda *a: [row[1:] for row in slots(*a)]),
        Mistake("merged_only", "leaves out rows that are not merged: there is a list for each row",
                lambda *a: [row for row in slots(*a) if row]),
        Mistake("flat", "gives one list for all rows: there is a list for each row",
                lambda *a: [slot for row in slots(*a) for slot in row]),
    ),
)  # fmt: skip

"""How ex03_1 is judged, the queue itself: each token of a row in exactly one item, by the rule, and no item empty."""

import random
from collections import Counter
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch

from pkv.course.tasks import Case, Mistake, Property, Spec, Task, Unfit
from pkv.wording.counts import count_of, verb

Item = tuple[int, int, int]  # row, begin, end
Bounds = Callable[[int, int], list[tuple[int, int]]]  # of tiles, for each split


def by_rule(n: int, n_splits: int) -> list[tuple[int, int]]:
    """The tiles of each split of a row of n tiles."""
    cuts = [n * s // n_splits for s in range(n_splits + 1)]
    return list(pairwise(cuts))


def cut(
    lengths: list[int], n_splits: int, tile: int, bounds: Bounds = by_rule, of_longest: bool = False,
    keep_empty: bool = False,
) -> list[Item]:  # fmt: skip
    """The items of all rows that hold tokens; the options are mistakes, or of other stages."""
    items = []
    for row, length in enumerate(lengths):
        for first, last in bounds(-(-(max(lengths) if of_longest else length) // tile), n_splits):
            begin, end = first * tile, min(last * tile, length)
            items += [(row, begin, end)] if begin < end or keep_empty else []
    return items


def items_in(got: Any) -> list[Item] | None:
    """An answer as items; None where it is none."""
    got = got.tolist() if isinstance(got, torch.Tensor) else got
    if not isinstance(got, list) or not all(isinstance(item, list) and len(item) == 3 for item in got):
        return None
    return [(row, begin, end) for row, begin, end in got] if all(type(n) is int for i in got for n in i) else None


def queue_specs(rng: random.Random, *batches: tuple[list[int], int]) -> list[Spec]:
    """Each batch (lengths, splits) in tiles of 16, and in tiles of another size."""
    other = rng.choice([6, 9, 24])
    return [
        {"lengths": lengths, "n_splits": n_splits, "tile": tile}
        for tile in (16, other)
        for lengths, n_splits in batches
    ]


def around_tiles(rng: random.Random) -> list[Spec]:
    """Lengths of some tiles, of one token less and of one more."""
    return [
        {"lengths": [n], "n_splits": n_splits, "tile": tile}
        for tile, n_splits, tiles in ((16, 2, 3), (rng.randrange(5, 30), rng.randrange(2, 5), rng.randrange(4, 9)))
        for n in (tile - 1, tile, tile + 1, tiles * tile - 1, tiles * tile, tiles * tile + 1)
    ]


def queue_arguments(spec: Spec) -> tuple[Any, ...]:
    """lengths, n_splits, tile."""
    if min(spec["n_splits"], spec["tile"]) < 1:
        raise Unfit
    return list(spec["lengths"]), spec["n_splits"], spec["tile"]


def queue_right(lengths: list[int], n_splits: int, tile: int) -> list[Item]:
    """The rule of the statement."""
    return cut(lengths, n_splits, tile)


def fault_of_cover(case: Case, got: Any) -> tuple[str, str]:
    """(kind, what is wrong) of a list of items: the first row of which tokens are lost, done twice or made up."""
    items = items_in(got)
    if items is None:
        return "", ""
    lengths, n_splits, tile = case.arguments
    n_rows = f"there {verb(len(lengths), 'are')} {count_of(len(lengths), 'row')}"
    for row, begin, end in items:
        if not 0 <= row < len(lengths):
            return "no_such_row", f"an item is of row {row}: {n_rows}, counted from 0"
        if begin < 0 or end > lengths[row]:
            return "past_end", f"row {row} has {count_of(lengths[row], 'token')}, and an item of it is {begin}:{end}"
    for row, length in enumerate(lengths):
        mine = Counter(token for owner, begin, end in items if owner == row for token in range(begin, end))
        wrong = next((token for token in range(length) if mine[token] != 1), None)
        if wrong is not None and mine[wrong]:
            return "token_twice", f"token {wrong} of row {row} lies in {count_of(mine[wrong], 'item')}"
        if wrong is not None:
            return "token_lost", f"token {wrong} of row {row} lies in no item"
    if sorted(items) != items:
        return "order", "items are not ordered by row, then by begin"
    if any(begin >= end for _, begin, end in items):
        return "empty_kept", "keeps items without tokens"
    right = cut(lengths, n_splits, tile)
    if items == right:
        return "", ""
    row = next(a[0] for a, b in zip(right, [*items, None]) if a != b)
    shares = ", ".join(f"{first}:{last}" for first, last in by_rule(-(-lengths[row] // tile), n_splits))
    return "other_cut", f"cuts elsewhere than the rule: the splits of row {row} take the tiles {shares}"


def covers(kind: str) -> Mistake:
    """The mistake of that kind, by what is wrong with the list itself."""
    return Mistake(
        kind,
        lambda case, got: fault_of_cover(case, got)[1],
        shows=lambda case, got: fault_of_cover(case, got)[0] == kind,
    )


def ceil_share(n: int, n_splits: int) -> list[tuple[int, int]]:
    """Every split takes ceil(n / n_splits) tiles, until there are none left."""
    share = -(-n // n_splits)
    return [(min(s * share, n), min((s + 1) * share, n)) for s in range(n_splits)]


def last_takes_rest(n: int, n_splits: int) -> list[tuple[int, int]]:
    """Every split takes n // n_splits tiles, the last one what is left."""
    share = n // n_splits
    return [(s * share, (s + 1) * share if s < n_splits - 1 else n) for s in range(n_splits)]


def first_take_more(n: int, n_splits: int) -> list[tuple[int, int]]:
    """The first n % n_splits splits take one tile more than the others."""
    share, more = divmod(n, n_splits)
    ends = list(accumulate(share + (s < more) for s in range(n_splits)))
    return list(zip([0, *ends], ends))


def rounded_share(n: int, n_splits: int) -> list[tuple[int, int]]:
    """Split s begins at s shares, each a float."""
    return list(pairwise(int(n / n_splits * s) for s in range(n_splits + 1)))


def through_all_rows(lengths: list[int], n_splits: int, tile: int) -> list[Item]:
    """begin and end counted through the tokens of all rows."""
    firsts = [0, *accumulate(lengths)]
    return [(r, firsts[r] + begin, firsts[r] + end) for r, begin, end in cut(lengths, n_splits, tile)]


def renumbered(lengths: list[int], n_splits: int, tile: int) -> list[Item]:
    """Rows numbered without the empty ones."""
    return cut([length for length in lengths if length], n_splits, tile)


EX03_1 = Task(
    id="ex03_1",
    title="a queue of the items that hold tokens",
    function="build_queue",
    lines=8,
    arguments=queue_arguments,
    right=queue_right,
    axes=("item",),
    properties=(
        Property("each token of a row lies in exactly one item, by the rule", lambda rng: queue_specs(
            rng, ([40], 2), ([480], 22), ([144], 4), ([176], 4), ([rng.randrange(100, 400)], rng.randrange(3, 8)))),
        Property("the last tile may be part-filled", around_tiles),
        Property("no item is empty: a row may have fewer tiles than splits, or no tokens", lambda rng: queue_specs(
            rng, ([5], 2), ([0], 3), ([], 2), ([5, 40, 0], 2), ([0, 0, 20, 0, 1], rng.randrange(4, 9)))),
        Property("each row is cut by its own length, and rows stay in order", lambda rng: queue_specs(
            rng, ([90, 40], 2), ([33, 200, 17], 3), ([rng.randrange(50, 300) for _ in range(4)], 4))),
    ),
    mistakes=(
        Mistake("longest_row", "cuts every row at the bounds of the longest one: count the row's own tiles",
                lambda n, s, tile: cut(n, s, tile, of_longest=True)),
        Mistake("equal_tokens", "cuts in tokens: splits begin at whole tiles", lambda n, s, tile: cut(n, s, 1)),
        Mistake("not_cut", "makes one item of each row, whatever n_splits", lambda n, s, tile: cut(n, 1, tile)),
        Mistake("not_clipped", "ends at a whole tile, past the row's last token: min(..., length)",
                lambda n, s, tile: [(r, a, -(-b // tile) * tile) for r, a, b in cut(n, s, tile)]),
        Mistake("tail_lost", "rounds the number of tiles down: the tokens of a part-filled last tile are lost",
                lambda n, s, tile: cut([length // tile * tile for length in n], s, tile)),
        Mistake("ceil_share", "gives every split ceil(n / n_splits) tiles: by the rule, split s begins at tile "
                "n * s // n_splits", lambda n, s, tile: cut(n, s, tile, bounds=ceil_share)),
        Mistake("last_takes_rest", "gives every split n // n_splits tiles and the last one what is left: by the rule, "
                "split s begins at tile n * s // n_splits", lambda n, s, tile: cut(n, s, tile, bounds=last_takes_rest)),
        Mistake("first_take_more", "gives the first splits one tile more: by the rule, split s begins at tile "
                "n * s // n_splits", lambda n, s, tile: cut(n, s, tile, bounds=first_take_more)),
        Mistake("float_share", "multiplies a rounded share: n / S * s may be just below a whole tile; use // on ints",
                lambda n, s, tile: cut(n, s, tile, bounds=rounded_share)),
        Mistake("in_tiles", "gives bounds in tiles: begin and end count tokens",
                lambda n, s, tile: [(r, a // tile, -(-b // tile)) for r, a, b in cut(n, s, tile)]),
        Mistake("end_included", "takes end for the last token: it is the first one that is not in the item",
                lambda *a: [(r, begin, end - 1) for r, begin, end in cut(*a)]),
        Mistake("through_all_rows", "counts tokens through all rows: begin and end count the row's own",
                through_all_rows),
        Mistake("renumbered", "numbers rows anew without the empty ones: row stays its number in the batch",
                renumbered),
        Mistake("not_triples", "gives something else than triples: an item is (row, begin, end)",
                shows=lambda case, got: isinstance(got, list) and bool(got) and items_in(got) is None),
        *map(covers, ("no_such_row", "past_end", "token_lost", "token_twice", "order", "empty_kept", "other_cut")),
    ),
)  # fmt: skip

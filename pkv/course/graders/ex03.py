"""How exercise 03 is judged: where the states of a queue lie and the order of its items; ex03_*.py have the rest."""

import random
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from pkv.course.graders.batches import fails_for_lack
from pkv.course.graders.ex03_counters import EX03_5
from pkv.course.graders.ex03_kernels import EX03_4
from pkv.course.graders.ex03_makespan import EX03_6
from pkv.course.graders.ex03_queues import EX03_1, Item, cut
from pkv.course.tasks import Case, Mistake, Property, Spec, Task, Unfit


def offset_arguments(spec: Spec) -> tuple[Any, ...]:
    """Items of 16 tokens, the last of a row of fewer, as many per row as the spec says; the number of rows."""
    counts = spec["items_per_row"]
    items = [(r, 16 * i, 16 * i + (16 if i < n - 1 else 5 + r)) for r, n in enumerate(counts) for i in range(n)]
    return items, len(counts)


def offset_specs(rng: random.Random, *counts: list[int]) -> list[Spec]:
    """Items per row, those given and some drawn."""
    drawn = [rng.choice([0, 1, 1, 2, 5]) for _ in range(9)]
    return [{"items_per_row": n} for n in (*counts, drawn)]


def row_counts(items: list[Item], n_rows: int) -> list[int]:
    """How many items each row has."""
    return [[row for row, _, _ in items].count(r) for r in range(n_rows)]


def offsets_right(items: list[Item], n_rows: int) -> list[int]:
    """Sums of the rows' counts."""
    return [0, *accumulate(row_counts(items, n_rows))]


def by_counts(changed: Callable[[list[int]], list[int]]) -> Callable[..., Any]:
    """A wrong answer: the sums of other counts."""
    return lambda items, n_rows: [0, *accumulate(changed(row_counts(items, n_rows)))]


EX03_2 = Task(
    id="ex03_2",
    title="where each row's states begin",
    function="partial_offsets",
    lines=4,
    points=2,
    arguments=offset_arguments,
    right=offsets_right,
    properties=(
        Property("row r's items lie at offsets[r] : offsets[r + 1]", lambda rng: offset_specs(rng, [1], [2, 1, 3])),
        Property("rows without items have an empty range, wherever they stand", lambda rng: offset_specs(
            rng, [1, 0, 2], [1, 2, 0], [0, 1], [0, 0, 3, 0, 0])),
        Property("a batch without items, or without rows", lambda rng: [{"items_per_row": n} for n in ([0, 0], [])]),
    ),
    mistakes=(
        Mistake("last_missing", "lacks the last entry, where the states of the last row end",
                lambda *a: offsets_right(*a)[:-1]),
        Mistake("first_missing", "gives where states end; begin with 0, where row 0 begins",
                lambda *a: offsets_right(*a)[1:]),
        Mistake("ends", "gives where states end, one row too early: offsets[r] is where row r begins",
                lambda *a: [*offsets_right(*a)[1:], len(a[0])]),
        Mistake("rows_missing", "has no range for rows without items: there are n_rows + 1 entries, and a row without "
                "items begins where it ends", by_counts(lambda counts: [n for n in counts if n])),
        Mistake("last_rows_missing", "ends with the last row that has an item: there are n_rows + 1 entries",
                by_counts(lambda counts: counts[: max((r + 1 for r, n in enumerate(counts) if n), default=0)])),
        Mistake("only_split_rows", "leaves out rows of one item: item i belongs to index i, merged or not",
                by_counts(lambda counts: [n if n > 1 else 0 for n in counts])),
        Mistake("rectangle", "gives every row as many indices as the row with the most items has",
                by_counts(lambda counts: [max(counts, default=0)] * len(counts))),
        Mistake("one_at_least", "gives rows without items an index", by_counts(lambda n: [max(k, 1) for k in n])),
        Mistake("counts", "gives how many items a row has: offsets are their sums", row_counts),
        Mistake("counts", "gives how many items a row has: offsets are their sums",
                lambda *a: [*row_counts(*a), len(a[0])]),
        Mistake("counts", "gives how many items a row has: offsets are their sums", lambda *a: [0, *row_counts(*a)]),
        Mistake("summed_twice", "adds up sums: an offset is the number of items before the row, once",
                by_counts(lambda counts: [*accumulate(counts)])),
        Mistake("tokens", "counts tokens: an item leaves one state, however many tokens it has",
                lambda items, n: [sum(b - a for r, a, b in items if r < row) for row in range(n + 1)]),
        Mistake("empty_row_at_0", "lets rows without items begin at 0: they begin where the next row does",
                lambda items, n: [next((i for i, item in enumerate(items) if item[0] == r), 0) for r in range(n)]
                + [len(items)]),
        Mistake("empty_row_at_0", "marks rows without items by -1: they begin where the next row does",
                lambda items, n: [next((i for i, item in enumerate(items) if item[0] == r), -1) for r in range(n)]
                + [len(items)]),
        Mistake("no_rows", "fails without items, or without rows: then all offsets are 0",
                shows=lambda case, got: not case.arguments[0] and fails_for_lack(got)),
    ),
)  # fmt: skip


def order_arguments(spec: Spec) -> tuple[Any, ...]:
    """The items of a queue."""
    if min(spec["n_splits"], spec["tile"]) < 1:
        raise Unfit
    return (cut(spec["lengths"], spec["n_splits"], spec["tile"]),)


def order_specs(rng: random.Random, *lengths: list[int], n_splits: tuple[int, ...] = (1, 2, 3)) -> list[Spec]:
    """Queues of those lengths, in tiles of 16."""
    return [{"lengths": n, "n_splits": s, "tile": 16} for n in lengths for s in n_splits]


def tokens(item: Item) -> int:
    """How many it has."""
    return item[2] - item[1]


def sorted_by(key: Callable[[Item], int], reverse: bool = False) -> Callable[[list[Item]], list[int]]:
    """The order of items by a key, equal ones as listed; reverse: that order from behind, equal ones too."""

    def order(items: list[Item]) -> list[int]:
        found = sorted(range(len(items)), key=lambda i: key(items[i]))
        return found[::-1] if reverse else found

    return order


order_right = sorted_by(lambda item: -tokens(item))


def by_row(items: list[Item]) -> list[int]:
    """The items of the longest row first."""
    return sorted(range(len(items)), key=lambda i: -sum(tokens(item) for item in items if item[0] == items[i][0]))


def ranks(items: list[Item]) -> list[int]:
    """For each item, as which number it starts."""
    order = order_right(items)
    return [order.index(i) for i in range(len(items))]


def is_order(case: Case, got: Any) -> bool:
    """Every index once."""
    got = got.tolist() if hasattr(got, "tolist") else got
    return isinstance(got, list) and all(type(i) is int for i in got) and sorted(got) == list(range(len(case.right)))


def is_unstable(case: Case, got: Any) -> bool:
    """By falling number of tokens, equal ones in another order than listed."""
    (items,) = case.arguments
    return is_order(case, got) and [tokens(items[int(i)]) for i in got] == [tokens(items[i]) for i in case.right]


EX03_3 = Task(
    id="ex03_3",
    title="longest items first",
    function="longest_first",
    lines=2,
    points=2,
    arguments=order_arguments,
    right=order_right,
    properties=(
        Property("items start by falling number of tokens", lambda rng: order_specs(
            rng, [5, 40], [40, 5, 100], [rng.randrange(300) for _ in range(5)])),
        Property("equal items start as listed", lambda rng: order_specs(
            rng, [16, 16], [32, 5, 64, 5, 32], [rng.choice([5, 32, 64]) for _ in range(20)], n_splits=(1, 2))),
        Property("no items", lambda rng: order_specs(rng, [0], [], n_splits=(2,))),
    ),
    mistakes=(
        Mistake("shortest_first", "starts the shortest first", sorted_by(tokens)),
        Mistake("shortest_first", "starts the shortest first, and equal ones from behind",
                sorted_by(lambda item: -tokens(item), reverse=True)),
        Mistake("by_end", "sorts by where items end: what counts is how many tokens they have, end - begin",
                sorted_by(lambda item: -item[2])),
        Mistake("by_end", "sorts by where items end: what counts is how many tokens they have, end - begin",
                sorted_by(lambda item: item[2], reverse=True)),
        Mistake("by_row", "starts the items of the longest row first: each item counts by itself", by_row),
        Mistake("as_listed", "leaves the items as they are listed", lambda items: list(range(len(items)))),
        Mistake("ranks", "gives for each item when it starts: order[e] is the item that starts as number e", ranks),
        Mistake("items", "gives the items themselves: the order names them by their indices",
                lambda items: [list(items[i]) for i in order_right(items)]),
        Mistake("tokens", "gives numbers of tokens: the order names items by their indices",
                lambda items: sorted(map(tokens, items), reverse=True)),
        Mistake("unstable", "does not keep equal items as they are listed (a stable sort does)",
                shows=is_unstable),
        Mistake("no_order", "does not name every item exactly once",
                shows=lambda case, got: isinstance(got, list) and bool(case.right) and not is_order(case, got)),
        Mistake("no_items", "fails without items: the order is then empty",
                shows=lambda case, got: not case.arguments[0] and fails_for_lack(got)),
    ),
)  # fmt: skip


TASKS = (EX03_1, EX03_2, EX03_3, EX03_4, EX03_5, EX03_6)

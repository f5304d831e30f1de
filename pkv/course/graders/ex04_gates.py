"""How exercise 04 is judged: the paper's gates."""

import random
import statistics
from collections.abc import Callable

from pkv.course.graders.batches import fails_for_lack
from pkv.course.tasks import Mistake, Property, Spec, Task

STAGES = ("flashinfer", "length_buckets", "workqueue")


def route(
    lengths: list[int], group: int, *,
    count: Callable[[list[int]], int] = len,
    size: Callable[[list[int]], float] = lambda rows: max(rows, default=0),
    from_tokens: int = 16384, many: int = 8, between: str = "flashinfer",
    groups: Callable[[int], bool] = lambda group: group == 4, few_first: bool = False,
) -> str:  # fmt: skip
    """The gates, over rows with tokens; the options are mistakes."""
    rows = [length for length in lengths if length]
    is_long, n_rows = size(rows) >= from_tokens, count(rows)
    if not groups(group) or not (is_long or (few_first and n_rows <= 1)):
        return "flashinfer"
    return "length_buckets" if n_rows <= 1 else "workqueue" if n_rows >= many else between


def swapped(lengths: list[int], group: int) -> str:
    """The queue for one row, buckets for many."""
    right = route(lengths, group)
    return {"length_buckets": "workqueue", "workqueue": "length_buckets"}.get(right, right)


def steps(group: int, *found: list[int]) -> list[Spec]:
    """Specs of paper_policy."""
    return [{"lengths": lengths, "group": group} for lengths in found]


def by_rows(rng: random.Random) -> list[Spec]:
    """Long steps of 1 to 9 rows, most of them short, some alike."""
    drawn = [[rng.randrange(20000, 90000)] + [rng.randrange(100, 9000) for _ in range(n - 1)] for n in (3, 5, 12)]
    return steps(4, *([20000, *[3000] * (n - 1)] for n in (1, 2, 7, 8, 9)), [20000] * 8, *drawn)


def by_longest(rng: random.Random) -> list[Spec]:
    """Around 16,384 tokens, for one row and for many."""
    edges = [16384, 16383, rng.randrange(16001, 16384), rng.randrange(16385, 17000)]
    long = [[2000, n, *[3000] * 7] for n in (*edges, rng.randrange(150000, 250000))]
    return steps(4, *([n] for n in edges), *long, [100], [12000] * 8)


def padded(rng: random.Random) -> list[Spec]:
    """Rows without tokens beside others."""
    one, two = rng.randrange(16384, 40000), rng.randrange(16384, 40000)
    return steps(4, [one, 0], [100000, 0], [0, one, 0, 0], [one, two, *[0] * 6], [0] * 3 + [two] * 7, [0, *[one] * 8])


EX04_2 = Task(
    id="ex04_2",
    title="the paper's gates",
    function="paper_policy",
    lines=8,
    points=2,
    arguments=lambda spec: (list(spec["lengths"]), spec["group"]),
    right=route,
    fixed=("group",),
    shortcuts=("pkv",),
    properties=(
        Property("of long steps one row takes buckets, 8 or more the queue, those between FlashInfer", by_rows),
        Property("a step is long by its longest row, from 16,384 tokens on", by_longest),
        Property("rows without tokens do not count", padded),
        Property("groups other than 4 are FlashInfer's",
                 lambda rng: [s for group in (1, 2, 3, 5, 8) for s in steps(group, [20000], [20000] * 8)]),
        Property("a step without tokens is FlashInfer's", lambda rng: steps(4, [0], [], [0] * 8)),
    ),
    mistakes=(
        Mistake("padding_counts", "counts rows without tokens: only those with tokens count",
                lambda lengths, group: route(lengths, group, count=lambda rows: len(lengths))),
        Mistake("first_long_out", "takes 16,384 tokens for too short: only what is below is",
                lambda *a: route(*a, from_tokens=16385)),
        Mistake("16000", "draws the line at 16,000 tokens, not at 16,384", lambda *a: route(*a, from_tokens=16000)),
        Mistake("8_is_few", "does not give 8 rows to the queue: at least 8 includes 8", lambda *a: route(*a, many=9)),
        Mistake("sum", "adds up all rows: the longest alone decides", lambda *a: route(*a, size=sum)),
        Mistake("mean", "takes the mean length: the longest row decides",
                lambda *a: route(*a, size=lambda rows: statistics.fmean(rows or [0]))),
        Mistake("mean_with_padding", "takes the mean length: the longest row decides",
                lambda lengths, group: route(lengths, group, size=lambda rows: sum(rows) / max(len(lengths), 1))),
        Mistake("shortest", "asks that all rows be long: the longest decides",
                lambda *a: route(*a, size=lambda rows: min(rows, default=0))),
        Mistake("first_row", "takes the first row for the longest",
                lambda lengths, group: route(lengths, group, size=lambda rows: lengths[0] if lengths else 0)),
        Mistake("length_ignored", "has no gate for short steps: longest row below 16,384 is FlashInfer's",
                lambda *a: route(*a, from_tokens=0)),
        Mistake("few_first", "asks for few rows before it asks for a long one: the first gate that holds decides",
                lambda *a: route(*a, few_first=True)),
        Mistake("group_ignored", "does not look at the group", lambda *a: route(*a, groups=lambda group: True)),
        Mistake("groups_above", "takes groups above 4 too: only 4 passes",
                lambda *a: route(*a, groups=lambda group: group >= 4)),
        Mistake("groups_below", "takes groups below 4 too: only 4 passes",
                lambda *a: route(*a, groups=lambda group: group <= 4)),
        Mistake("no_hand_over", "gives 2 to 7 rows to the queue: they are FlashInfer's",
                lambda *a: route(*a, between="workqueue")),
        Mistake("buckets_below_8", "gives 2 to 7 rows to the buckets: they are FlashInfer's",
                lambda *a: route(*a, between="length_buckets")),
        Mistake("long_rows", "counts only the long rows: all with tokens count, once one of them is long",
                lambda *a: route(*a, count=lambda rows: sum(row >= 16384 for row in rows))),
        Mistake("distinct", "counts rows of one length once", lambda *a: route(*a, count=lambda rows: len(set(rows)))),
        Mistake("swapped", "gives one row to the queue and many to the buckets", swapped),
        Mistake("no_rows", "fails where no row has tokens: no row is long, so it is FlashInfer's",
                shows=lambda case, got: fails_for_lack(got) and not any(case.spec["lengths"])),
        Mistake("other_name", lambda case, got: f"gives {got!r}: the names are {', '.join(STAGES)}",
                shows=lambda case, got: isinstance(got, str) and got not in STAGES),
    ),
)  # fmt: skip

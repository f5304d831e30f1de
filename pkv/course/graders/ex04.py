"""How exercise 04 is judged. Here FlashInfer's splits; the other tasks are in ex04_gates.py, ex04_costs.py, ..."""

import bisect
import random
from collections.abc import Callable
from typing import Any

from pkv.course.graders.batches import fails_for_lack
from pkv.course.graders.ex04_cheapest import EX04_5
from pkv.course.graders.ex04_costs import EX04_3
from pkv.course.graders.ex04_fit import EX04_4
from pkv.course.graders.ex04_gates import EX04_2
from pkv.course.graders.ex04_regret import EX04_6
from pkv.course.tasks import Mistake, Property, Spec, Task, Unfit


def split_size(
    n_pages: list[int], page_size: int, n_kv_heads: int, n_sms: int, *,
    room: Callable[[int, int], int] = lambda heads, sms: 2 * sms // heads,
    least: Callable[[int], int] = lambda page_size: max(128 // page_size, 1),
    items: Callable[[int, int], int] = lambda pages, size: max(-(-pages // size), 1),
    sizes: Callable[[int, int], Any] = range,
) -> int | None:  # fmt: skip
    """The shortest of `sizes` whose items fit, found by bisection; the options are mistakes."""
    longest = max(n_pages, default=0)
    tried = sizes(least(page_size), longest)
    places = room(n_kv_heads, n_sms)
    at = bisect.bisect_left(tried, True, key=lambda size: sum(items(pages, size) for pages in n_pages) <= places)
    return tried[at] if at < len(tried) else None


def even_size(n_pages: list[int], page_size: int, n_kv_heads: int, n_sms: int, n_items: int, pages: int) -> int | None:
    """All pages dealt to so many items, as if no row ended between."""
    size = max(-(-pages // n_items), 128 // page_size, 1) if n_items > 0 else max(n_pages, default=0)
    return size if size < max(n_pages, default=0) else None


def split_specs(*found: tuple[list[int], int, int, int]) -> list[Spec]:
    """Specs of split_pages."""
    return [dict(zip(("n_pages", "page_size", "n_kv_heads", "n_sms"), spec)) for spec in found]


def ragged(rng: random.Random) -> list[Spec]:
    """Fewer rows than there is room for items; n_kv_heads divides the programs, or does not."""
    full = rng.randrange(9, 40)  # pages in a split, of which rows hold a whole number
    some = [([10, 100], 16, 8, 28), ([7 * full], 16, 8, 28), ([9, 25], 128, 3, 5), ([30, 60], 16, 8, 28)]
    some.append(([5 * full, 8 * full], 16, 4, 26))
    for page_size, n_kv_heads, n_sms in ((16, 8, 28), (64, 8, 132), (16, 5, 28), (32, 1, 13), (16, 3, 10)):
        n_rows = rng.randrange(2, max(2 * n_sms // n_kv_heads, 4) // 2 + 1)
        some.append(([rng.randrange(20, 400) for _ in range(n_rows)], page_size, n_kv_heads, n_sms))
    return split_specs(*some)


def short(rng: random.Random) -> list[Spec]:
    """Much room, so that the least size decides; pages of 1 to 256 tokens."""
    some = [([9], 16, 8, 132), ([300], 1, 2, 132), ([3, 2], 128, 2, 132), ([3], 256, 1, 28), ([5, 2], 64, 4, 132)]
    return split_specs(*some, *(([8 * 16 // p + rng.randrange(1, 9), 2], p, 1, 132) for p in (4, 8, 16, 32)))


def with_empty_rows(rng: random.Random) -> list[Spec]:
    """Rows without pages among others."""
    return split_specs(([100, 0], 16, 8, 28), ([0, 10, 100, 0], 16, 8, 28), ([rng.randrange(99, 200), 0, 0], 16, 4, 13))


def unsplit(rng: random.Random) -> list[Spec]:
    """As many rows as there is room for and more; rows that are short; no rows."""
    long = [rng.randrange(40, 300) for _ in range(9)]
    some = [([8], 16, 8, 28), ([3], 16, 8, 132), ([0, 0], 16, 8, 28), (long[:7], 16, 8, 28), (long[:8], 16, 8, 28)]
    return split_specs(*some, (long, 16, 8, 28), ([100], 16, 8, 3), ([1], 256, 8, 28), ([], 16, 8, 28))


def split_arguments(spec: Spec) -> tuple[Any, ...]:
    """As they are."""
    if min(spec["n_kv_heads"], spec["n_sms"]) < 1:
        raise Unfit
    return list(spec["n_pages"]), spec["page_size"], spec["n_kv_heads"], spec["n_sms"]


def doubled(least: int, longest: int) -> list[int]:
    """least, twice least, ... below longest."""
    return [size for size in (least << i for i in range(20)) if size < longest]


EX04_1 = Task(
    id="ex04_1",
    title="the size of FlashInfer's splits",
    function="split_pages",
    lines=6,
    arguments=split_arguments,
    right=split_size,
    fixed=("page_size",),
    shortcuts=("pkv",),
    properties=(
        Property("the shortest size for which all programs find room", ragged),
        Property("at least 128 tokens, in whole pages", short),
        Property("a row without pages takes room too", with_empty_rows),
        Property("None where no row is split", unsplit),
    ),
    mistakes=(
        Mistake("one_less", "does not fill the last place: as many items as there is room for do fit",
                lambda *a: split_size(*a, room=lambda heads, sms: 2 * sms // heads - 1)),
        Mistake("one_per_sm", "counts one program per SM: there is room for 2",
                lambda *a: split_size(*a, room=lambda heads, sms: sms // heads)),
        Mistake("heads_forgotten", "lets an item take one program: it takes one per KV head",
                lambda *a: split_size(*a, room=lambda heads, sms: 2 * sms)),
        Mistake("room_rounded_up", "rounds the room for items up: the last one finds no room for all its KV heads",
                lambda *a: split_size(*a, room=lambda heads, sms: -(-2 * sms // heads))),
        Mistake("no_least", "makes splits of fewer than 128 tokens", lambda *a: split_size(*a, least=lambda page: 1)),
        Mistake("least_in_pages", "takes 128 for pages: a split has at least 128 tokens",
                lambda *a: split_size(*a, least=lambda page: 128)),
        Mistake("more_than_128", "refuses splits of just 128 tokens: at least 128 includes them",
                lambda *a: split_size(*a, least=lambda page: 128 // page + 1)),
        Mistake("empty_is_free", "gives a row without pages no item: every row takes one at least",
                lambda *a: split_size(*a, items=lambda pages, size: -(-pages // size))),
        Mistake("rest_forgotten", "forgets a row's last, shorter split: divide rounding up",
                lambda *a: split_size(*a, items=lambda pages, size: max(pages // size, 1))),
        Mistake("one_too_many", "counts an item more where a row's last split is just full",
                lambda *a: split_size(*a, items=lambda pages, size: pages // size + 1)),
        Mistake("doubled", "doubles the size until it fits: sizes between are tried too",
                lambda *a: split_size(*a, sizes=doubled)),
        Mistake("longest", "takes the longest size that splits a row at all: the shortest that fits is asked for",
                lambda n, *a: None if split_size(n, *a) is None else max(n) - 1),
        Mistake("evenly", "deals all pages evenly to the items: each row's last split is shorter, so more are needed",
                lambda n, p, h, s: even_size(n, p, h, s, 2 * s // h, sum(n))),
        Mistake("equal_shares", "gives each row the same number of items: all splits have one size",
                lambda n, p, h, s: even_size(n, p, h, s, 2 * s // h // max(len(n), 1), max(n, default=0))),
        Mistake("longest_alone", "cuts the longest row alone: all rows are cut in splits of that size",
                lambda n, p, h, s: even_size(n, p, h, s, 2 * s // h - len(n) + 1, max(n, default=0))),
        Mistake("in_tokens", "gives tokens, not pages", lambda n, p, *a: (split_size(n, p, *a) or 0) * p or None),
        Mistake("page_over_128", "fails where a page has more than 128 tokens: a split has one page at least",
                shows=lambda case, got: fails_for_lack(got) and case.spec["page_size"] > 128),
        Mistake("no_rows", "fails where there are no rows: nothing is split, so the answer is None",
                shows=lambda case, got: fails_for_lack(got) and not case.spec["n_pages"]),
        Mistake("not_none", "gives a size where no row is split: the answer is None there",
                shows=lambda case, got: case.right is None and isinstance(got, int)),
    ),
)  # fmt: skip

TASKS = (EX04_1, EX04_2, EX04_3, EX04_4, EX04_5, EX04_6)

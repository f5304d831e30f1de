"""How exercise 00 is judged: page arithmetic and intensity; ex00_rows.py has the tasks with tensors."""

import random
from typing import Any

from pkv.course.graders.asking import MANY, asked, loop_mistake
from pkv.course.graders.ex00_rows import EX00_3, EX00_4
from pkv.course.tasks import Mistake, Property, Raised, Spec, Task, Unfit

PAGES = (
    Property("a part-filled last page counts", lambda rng: [
        *sizes(rng, [(3, 4), (5, 4), (10, 4)], (-1, 1)), {"length": 2**21 + 1, "page_size": 2**21}]),
    Property("a full page counts once", lambda rng: sizes(rng, [(4, 4), (8, 4), (1, 1), (3, 1)], (0,))),
    Property("an empty row", lambda rng: sizes(rng, [(0, 4), (0, 1), (0, 16)], ())),
    Property("no loop: a long row takes as many steps as a short one", lambda rng: [
        {"length": rng.randrange(5 * MANY, 9 * MANY), "page_size": 1}], of_steps=True),
)  # fmt: skip
# loops of millions of steps are told by shorter rows
one_step = asked(fewer=lambda length, page_size: (1, page_size) if 5 * MANY <= length < 9 * MANY else None)


NEARLY_1 = (0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)


def sizes(rng: random.Random, first: list[tuple[int, int]], ends: tuple[int, ...]) -> list[Spec]:
    """Lengths and page sizes: those given, and some drawn, which end so many tokens past whole pages."""
    drawn = [rng.randrange(2, 40) for _ in range(4)]
    some = [(pages * size + end, size) for size in drawn for pages in (1, rng.randrange(2, 9)) for end in ends]
    return [{"length": length, "page_size": page_size} for length, page_size in [*first, *some]]


def numbers(*names: str) -> Any:
    """arguments(spec) of a function of plain numbers, all of them at least 1 but for a length."""

    def arguments(spec: Spec) -> tuple[Any, ...]:
        if any(spec[name] < (name != "length") for name in names):
            raise Unfit
        return tuple(spec[name] for name in names)

    return arguments


def pages_needed(length: int, page_size: int) -> int:
    """A division that rounds up."""
    return -(-length // page_size)


def last_page_len(length: int, page_size: int) -> int:
    """The last token's slot, plus one."""
    return (length - 1) % page_size + 1 if length else 0


EX00_1 = Task(
    id="ex00_1",
    title="pages that a row takes",
    function="pages_needed",
    lines=1,
    points=2,
    arguments=numbers("length", "page_size"),
    right=pages_needed,
    call=one_step,
    properties=PAGES,
    mistakes=(
        loop_mistake("tokens or pages"),
        Mistake("floor", "rounds down: tokens in a part-filled last page have no page", lambda n, p: n // p),
        Mistake("constant", "gives 1, whatever the length", lambda n, p: 1),
        Mistake("empty_takes_one", "gives an empty row a page", lambda n, p: max(pages_needed(n, p), 1)),
        Mistake("one_too_many", "adds a page where no page is part-filled: n // p + 1", lambda n, p: n // p + 1),
        *(Mistake("float_share", "adds nearly 1 to a float, and rounds down: use // on ints",
                  lambda n, p, nearly_1=nearly_1: int(n / p + nearly_1)) for nearly_1 in NEARLY_1),
        Mistake("float", "gives a float: a number of pages is an int, so use //", lambda n, p: Raised("float"),
                lambda case, got: isinstance(got, float)),
    ),
)  # fmt: skip

EX00_2 = Task(
    id="ex00_2",
    title="tokens in a row's last page",
    function="last_page_len",
    lines=2,
    points=2,
    arguments=numbers("length", "page_size"),
    right=last_page_len,
    call=one_step,
    properties=PAGES,
    mistakes=(
        loop_mistake("tokens or pages"),
        Mistake("constant", "gives 1, whatever the length", lambda n, p: 1),
        Mistake("remainder", "gives 0 where the last page is full: length % page_size", lambda n, p: n % p),
        Mistake("empty_is_full", "takes an empty row for a full page", lambda n, p: (n - 1) % p + 1),
        Mistake(
            "one_is_none", "takes a row of one token for an empty one", lambda n, p: last_page_len(n, p) if n > 1 else 0
        ),
        Mistake("free_slots", "counts the free slots, not the tokens", lambda n, p: -n % p),
        Mistake("free_slots", "gives the free slots, below 0, not the tokens", lambda n, p: -(-n % p)),
        Mistake(
            "off_by_one", "is one short: (length - 1) % page_size counts from 0", lambda n, p: (n - 1) % p if n else 0
        ),
    ),
)


def intensity(n_q_heads: int, n_kv_heads: int, head_dim: int, bytes_per_number: int) -> float:
    """head_dim cancels."""
    return 2 * n_q_heads / (n_kv_heads * bytes_per_number)


def intensity_specs(*some: tuple[int, int, int, int]) -> list[Spec]:
    """Specs of heads, sizes and bytes."""
    return [dict(zip(("n_q_heads", "n_kv_heads", "head_dim", "bytes_per_number"), sizes)) for sizes in some]


EX00_5 = Task(
    id="ex00_5",
    title="flop per byte",
    function="flop_per_byte",
    lines=3,
    points=2,
    arguments=numbers("n_q_heads", "n_kv_heads", "head_dim", "bytes_per_number"),
    right=intensity,
    properties=(
        Property("flop of query heads over bytes of KV heads", lambda rng: intensity_specs(
            (4, 2, 8, 2), (32, 8, 128, 2), (rng.randrange(2, 9) * 3, 3, rng.randrange(8, 99), 2))),
        Property("bytes of any dtype", lambda rng: intensity_specs((8, 2, 64, 4), (12, 3, rng.randrange(8, 99), 1))),
        Property("a KV head for each query head, and one for all", lambda rng: intensity_specs(
            (8, 8, 64, 4), (rng.randrange(2, 40), 1, 64, 2))),
    ),
    mistakes=(
        Mistake("per_query_head", "counts as many query heads as KV heads: K and V are read once per KV head, and each "
                "query head has its own flop", lambda h, kv, d, b: 2.0 / b),
        Mistake("k_only", "counts the bytes of K, or of V, but not of both", lambda *a: 2 * intensity(*a)),
        Mistake("one_product", "counts half: q . k and weight * v are two products, and a multiply and an add two flop",
                lambda *a: intensity(*a) / 2),
        Mistake("query_read", "counts bytes of query heads too: K and V alone grow with the tokens",
                lambda h, kv, d, b: 2 * h / (h + kv) / b),
        Mistake("exp_counted", "counts a flop for exp: only the two products count",
                lambda h, kv, d, b: (4 * d + 1) * h / (2 * kv * d * b)),
        Mistake("rounded", "rounds down: flop per byte is a float", lambda *a: int(intensity(*a))),
        Mistake("fp16_assumed", "takes 2 bytes per number, whatever the dtype",
                lambda h, kv, d, b: intensity(h, kv, d, 2)),
        Mistake("inverse", "gives bytes per flop", lambda *a: 1 / intensity(*a)),
        Mistake("bytes_forgotten", "counts numbers, not bytes", lambda h, kv, d, b: intensity(h, kv, d, 1)),
    ),
)  # fmt: skip

TASKS = (EX00_1, EX00_2, EX00_3, EX00_4, EX00_5)

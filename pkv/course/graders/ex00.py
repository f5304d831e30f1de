"""How exercise 00 is judged: page arithmetic, a gather through the block table, attention of one row, intensity."""

import random
from typing import Any

import torch

from pkv.course.graders.batches import attend, heads_say, paged_row, row_of
from pkv.course.tasks import Case, Mistake, Property, Raised, Spec, Task, Unfit

PAGES = (
    Property("a part-filled last page counts", lambda rng: sizes(rng, [(3, 4), (5, 4), (10, 4)], (-1, 1))),
    Property("a full page counts once", lambda rng: sizes(rng, [(4, 4), (8, 4), (1, 1), (3, 1)], (0,))),
    Property("an empty row", lambda rng: sizes(rng, [(0, 4), (0, 1), (0, 16)], ())),
)


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
    properties=PAGES,
    mistakes=(
        Mistake("floor", "rounds down: tokens in a part-filled last page have no page", lambda n, p: n // p),
        Mistake("one_too_many", "adds a page where the last one is just full: n // p + 1", lambda n, p: n // p + 1),
        Mistake("empty_takes_one", "gives an empty row a page", lambda n, p: max(pages_needed(n, p), 1)),
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
    properties=PAGES,
    mistakes=(
        Mistake("remainder", "gives 0 where the last page is full: length % page_size", lambda n, p: n % p),
        Mistake("empty_is_full", "takes an empty row for a full page", lambda n, p: (n - 1) % p + 1),
        Mistake("free_slots", "counts the free slots, not the tokens", lambda n, p: -n % p),
        Mistake(
            "off_by_one", "is one short: (length - 1) % page_size counts from 0", lambda n, p: (n - 1) % p if n else 0
        ),
    ),
)


def gather_right(pages: torch.Tensor, table: torch.Tensor, row: int, length: int) -> torch.Tensor:
    """The row's pages, flattened and cut."""
    return row_of(pages, table[row], length)


def gather_specs(rng: random.Random, lengths: list[int]) -> list[Spec]:
    """Rows of some lengths, those from 100 on in whole pages, on two page sizes."""
    return [
        {"length": n, "page_size": p, "n_rows": 3, "n_kv_heads": 2, "seed": rng.randrange(1000)}
        for p in (4, rng.choice([3, 5, 8]))
        for n in (min(n if n < 100 else p * (n - 100), 24) for n in lengths)
    ]


def gather_arguments(spec: Spec) -> tuple[Any, ...]:
    """A pool, a table of some rows, the last row's number, its length."""
    if min(spec["page_size"], spec["n_rows"], spec["n_kv_heads"]) < 1:
        raise Unfit
    pages, table, row = paged_row(spec)
    return pages, table, row, spec["length"]


EX00_3 = Task(
    id="ex00_3",
    title="a row gathered through the block table",
    function="gather_row",
    lines=4,
    arguments=gather_arguments,
    right=gather_right,
    axes=("token", "KV head", "dim"),
    properties=(
        Property("tokens come in order, from the pages of the table", lambda rng: gather_specs(rng, [102, 103])),
        Property("a part-filled last page", lambda rng: gather_specs(rng, [1, 3, 6, 9])),
        Property("an empty row", lambda rng: gather_specs(rng, [0])),
    ),
    mistakes=(
        Mistake("logical_pages", "takes logical page numbers for pages of the pool: look them up in block_table",
                lambda pages, table, row, n: pages.flatten(0, 1)[:n]),
        Mistake("wrong_row", "reads row 0 of the block table, whatever the row",
                lambda pages, table, row, n: row_of(pages, table[0], n)),
        Mistake("tail_unmasked", "gives whole pages: slots past the row's tokens belong to nobody",
                lambda pages, table, row, n: row_of(pages, table[row], -(-n // pages.shape[1]) * pages.shape[1])),
        Mistake("tail_dropped", "drops the part-filled last page",
                lambda pages, table, row, n: row_of(pages, table[row], n // pages.shape[1] * pages.shape[1])),
        Mistake("sorted_pages", "sorts the row's pages: the order of the table is the order of the tokens",
                lambda pages, table, row, n: row_of(pages, table[row, : pages_needed(n, pages.shape[1])].sort()[0], n)),
        Mistake("whole_table", "looks up entries past the row's pages: they hold anything",
                lambda pages, table, row, n: pages[table[row].long()].flatten(0, 1)[:n]),
        Mistake("slots_turned", "mixes up slots and heads: keep [page, slot] together when you flatten",
                lambda pages, table, row, n: row_of(pages.transpose(1, 2), table[row], n).transpose(0, 1)),
    ),
)  # fmt: skip


def attend_specs(rng: random.Random, lengths: list[int], size: float = 1.0, group: int = 2) -> list[Spec]:
    """One row of each length; size: how large scores get."""
    return [
        {"length": n, "n_kv_heads": 3, "group": group, "head_dim": 8, "size": size, "seed": rng.randrange(1000)}
        for n in lengths
    ]


def attend_arguments(spec: Spec) -> tuple[Any, ...]:
    """q, k, v of one row, and a scale that is not the usual one."""
    if min(spec["n_kv_heads"], spec["group"], spec["head_dim"]) < 1:
        raise Unfit
    generator = torch.Generator().manual_seed(spec["seed"])
    n_q_heads, d = spec["n_kv_heads"] * spec["group"], spec["head_dim"]
    q = torch.randn(n_q_heads, d, generator=generator) * spec["size"]
    k, v = torch.randn(2, spec["length"], spec["n_kv_heads"], d, generator=generator)
    if spec.get("below"):  # every score
        q, k = -q.abs() - 1, k.abs() + 1
    return q, k, v + torch.arange(spec["n_kv_heads"])[:, None], 0.3


def overflows(case: Case, got: Any) -> bool:
    """Not a number, or infinite, where scores are large."""
    return case.spec.get("size", 1.0) > 1 and isinstance(got, list) and not all(part.isfinite().all() for part in got)


EX00_4 = Task(
    id="ex00_4",
    title="attention of one row",
    function="attend_row",
    lines=8,
    arguments=attend_arguments,
    right=attend,
    axes=("query head", "dim"),
    tolerance=1e-4,
    fixed=("head_dim", "size"),
    shortcuts=("reference",),
    properties=(
        Property("out and lse of a few tokens", lambda rng: attend_specs(rng, [1, 2, 7], group=1)),
        Property("query head i reads KV head i // G", lambda rng: attend_specs(rng, [3, 6], group=rng.choice([2, 4]))),
        Property("scores of a few hundred, or all far below 0", lambda rng: attend_specs(rng, [5, 9], size=300.0)
                 + [spec | {"below": True} for spec in attend_specs(rng, [3, 6], size=300.0)]),
        Property("a row without tokens", lambda rng: attend_specs(rng, [0])),
    ),
    mistakes=(
        Mistake("head_map", heads_say, lambda *a: attend(*a, head_map="modulo")),
        Mistake("no_max", "overflows: exp of a large score is infinite; subtract the largest score first",
                shows=overflows),
        Mistake("one_max", "subtracts one largest score for all heads: each head needs its own, or its sum is 0",
                lambda *a: attend(*a, one_max=True)),
        Mistake("no_scale", "does not multiply scores by scale", lambda q, k, v, scale: attend(q, k, v, 1.0)),
        Mistake("own_scale", "scales by 1 / sqrt(head_dim), not by the scale given",
                lambda q, k, v, scale: attend(q, k, v, q.shape[1] ** -0.5)),
        Mistake("lse_without_max", "lse lacks the largest score that was subtracted",
                lambda *a: attend(*a, lse_of="sums")),
        Mistake("lse_base_2", "lse is in base 2: it is the natural logarithm", lambda *a: attend(*a, lse_of="log2")),
        Mistake("lse_is_sum", "gives the sum of exp, not its logarithm", lambda *a: attend(*a, lse_of="exp")),
        Mistake("not_divided", "does not divide by the sum of the weights", lambda *a: attend(*a, divided=False)),
        Mistake("empty_row", "fails for a row without tokens: its out is 0, its lse -inf",
                shows=lambda case, got: case.spec["length"] == 0),
    ),
)  # fmt: skip


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
        Mistake("fp16_assumed", "takes 2 bytes per number, whatever the dtype",
                lambda h, kv, d, b: intensity(h, kv, d, 2)),
        Mistake("inverse", "gives bytes per flop", lambda *a: 1 / intensity(*a)),
        Mistake("bytes_forgotten", "counts numbers, not bytes", lambda h, kv, d, b: intensity(h, kv, d, 1)),
    ),
)  # fmt: skip

TASKS = (EX00_1, EX00_2, EX00_3, EX00_4, EX00_5)

"""How exercise 00 is judged, the tasks with tensors: a gather through the block table, attention of one row."""

import functools
import random
from typing import Any

import torch

from pkv.course.comparing import agree
from pkv.course.graders.asking import MANY, asked, dtype_mistake, loop_mistake
from pkv.course.graders.batches import attend, fails_for_lack, heads_say, paged_row, rounded_up, row_of
from pkv.course.tasks import Case, Mistake, Property, Raised, Spec, Task, Unfit

EXP_IS_0 = 80.0  # exp of less than -80 has lost digits, or is 0


def gather_right(pages: torch.Tensor, table: torch.Tensor, row: int, length: int) -> torch.Tensor:
    """The row's pages, flattened and cut."""
    return row_of(pages, table[row], length)


def gather_specs(rng: random.Random, lengths: list[int], pages: tuple[int, ...] = (), **more: Any) -> list[Spec]:
    """Rows of some lengths, those from 100 on in whole pages. pages: their sizes, two where none is named."""
    return [
        {"length": n, "page_size": p, "n_rows": 3, "n_kv_heads": 2, **more, "seed": rng.randrange(1000)}
        for p in pages or (4, rng.choice([3, 5, 8]))
        for n in (min(n if n < 100 else p * (n - 100), 24) for n in lengths)
    ]


def is_of_nothing(got: Any) -> bool:
    """No number at all, whatever the shape."""
    return got == [] or (isinstance(got, torch.Tensor) and got.numel() == 0)


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
    call=asked(lambda pages, table, row, length: pages.dtype if pages.dtype == torch.float16 or not length else None),
    fixed=("turned", "dtype"),
    axes=("token", "KV head", "dim"),
    properties=(
        Property("tokens come in order, from the pages of the table", lambda rng: gather_specs(rng, [102, 103])
                 + gather_specs(rng, [101, 106], (1,))),
        Property("a part-filled last page", lambda rng: gather_specs(rng, [1, 3, 6, 9])),
        Property("an empty row", lambda rng: gather_specs(rng, [0])),
        Property("a pool of any strides and dtype", lambda rng: gather_specs(rng, [7, 102], turned=True)
                 + gather_specs(rng, [0, 6], dtype="float16")),
    ),
    mistakes=(
        dtype_mistake("gives another dtype than that of pages"),
        Mistake("strides", "takes the pool for contiguous, by .view: its strides are any, use .flatten or .reshape",
                shows=lambda case, got: isinstance(got, Raised) and "view size" in got.text),
        Mistake("empty_row", "fails for a row without tokens: it has no page, and the answer is of shape [0, ...]",
                shows=lambda case, got: case.spec["length"] == 0 and (fails_for_lack(got) or is_of_nothing(got))),
        Mistake("logical_pages", "takes logical page numbers for pages of the pool: look them up in block_table",
                lambda pages, table, row, n: pages.flatten(0, 1)[:n]),
        Mistake("wrong_row", "reads row 0 of the block table, whatever the row",
                lambda pages, table, row, n: row_of(pages, table[0], n)),
        Mistake("tail_unmasked", "gives whole pages: slots past the row's tokens belong to nobody",
                lambda pages, table, row, n: row_of(pages, table[row], -(-n // pages.shape[1]) * pages.shape[1])),
        Mistake("full_page_lost", "drops a full last page: length % page_size is 0 there",
                lambda pages, table, row, n: row_of(pages, table[row], n if n % pages.shape[1] else max(
                    n - pages.shape[1], 0))),
        Mistake("tail_dropped", "drops the part-filled last page",
                lambda pages, table, row, n: row_of(pages, table[row], n // pages.shape[1] * pages.shape[1])),
        Mistake("sorted_pages", "sorts the row's pages: the order of the table is the order of the tokens",
                lambda pages, table, row, n: row_of(pages, table[row, : rounded_up(n, pages.shape[1])].sort()[0], n)),
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


def is_state(case: Case, got: Any) -> bool:
    """A pair of tensors of the right shapes."""
    return isinstance(got, list) and [getattr(part, "shape", None) for part in got] == [x.shape for x in case.right]


def has_one_max(case: Case, got: Any) -> bool:
    """Wrong only in heads whose own largest score is so far below that of all that exp of the difference is 0."""
    q, k, _, scale = case.arguments
    if not is_state(case, got) or not len(k):
        return False
    group = len(q) // k.shape[1]
    largest = (scale * torch.einsum("kgd,tkd->tkg", q.unflatten(0, (-1, group)), k)).amax(0).flatten()
    off = [~torch.isclose(mine, yours, 1e-3, 1e-3) for mine, yours in zip(case.right, got)]
    heads = off[0].any(1) | off[1]
    return bool((heads <= (largest < largest.max() - EXP_IS_0)).all()) and not got[0].isfinite().all()


def mixes_heads(case: Case, got: Any) -> bool:
    """out is so, whatever the lse."""
    q, k, v, scale = case.arguments
    group = len(q) // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    wrong = torch.einsum("th,thd->hd", (scale * torch.einsum("hd,thd->th", q, k)).softmax(1), v)
    return len(k) > 0 and agree(wrong, got[0], 1e-3)


def scaled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, by: str) -> Any:
    """Scaled once more."""
    return attend(q, k, v, scale * (scale if by == "scale" else q.shape[1] ** -0.5))


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
    call=asked(
        dtype=lambda q, k, v, scale: None if len(k) else q.dtype,
        fewer=lambda q, k, v, scale: (q, k[:2], v[:2], scale) if len(k) >= 2 * MANY else None,
    ),
    axes=("query head", "dim"),
    tolerance=1e-4,
    fixed=("head_dim", "size", "below"),
    shortcuts=("reference",),
    properties=(
        Property("out and lse of a few tokens", lambda rng: attend_specs(rng, [1, 2, 7], group=1)),
        Property("query head i reads KV head i // G", lambda rng: attend_specs(rng, [3, 6], group=rng.choice([2, 4]))),
        Property("scores of a few hundred, or all far below 0", lambda rng: attend_specs(rng, [5, 9], size=300.0)
                 + [spec | {"below": True} for spec in attend_specs(rng, [3, 6], size=300.0)]),
        Property("a row without tokens", lambda rng: attend_specs(rng, [0])),
        Property("no loop over tokens: many take as many steps as two", lambda rng: attend_specs(
            rng, [rng.randrange(2 * MANY, 3 * MANY)]), of_steps=True),
    ),
    mistakes=(
        loop_mistake("tokens"),
        dtype_mistake("gives another dtype than that of q where there are no tokens"),
        Mistake("head_map", heads_say, lambda *a: attend(*a, head_map="modulo")),
        Mistake("one_max", "subtracts one largest score for all heads: each head needs its own, or its sum is 0",
                shows=has_one_max),
        Mistake("no_scale", "does not multiply scores by scale", lambda q, k, v, scale: attend(q, k, v, 1.0)),
        *(Mistake("scaled_twice", "scales twice", functools.partial(scaled, by=by)) for by in ("scale", "head_dim")),
        Mistake("heads_mixed", "takes softmax over heads: each head's weights sum to 1 over the tokens",
                shows=mixes_heads),
        Mistake("lse_is_max", "gives the largest score for lse", lambda *a: attend(*a, lse_of="max")),
        Mistake("own_scale", "scales by 1 / sqrt(head_dim), not by the scale given",
                lambda q, k, v, scale: attend(q, k, v, q.shape[1] ** -0.5)),
        *(Mistake("lse_without_max", "lse lacks the largest score that was subtracted: add it back",
                  functools.partial(attend, lse_of="sums", one_max=one_max)) for one_max in (False, True)),
        Mistake("max_from_0", "subtracts 0 where all scores are below 0: exp of what is left is then 0",
                shows=lambda case, got: case.spec.get("below", False) and is_state(case, got)),
        Mistake("max_too_large", "subtracts more than a head's largest score: exp of all that is left is then 0",
                shows=lambda case, got: len(case.arguments[1]) > 0 and is_state(case, got) and bool(
                    (got[1] == -torch.inf).any() and (got[1] < torch.inf).all())),
        Mistake("no_max", "overflows: exp of a large score is infinite; subtract the largest score first",
                shows=overflows),
        Mistake("lse_base_2", "lse is in base 2: it is the natural logarithm", lambda *a: attend(*a, lse_of="log2")),
        Mistake("lse_mixed", "lse mixes bases: the largest score is natural, log2 of the sum is not",
                lambda *a: attend(*a, lse_of="mixed")),
        Mistake("lse_is_sum", "gives the sum of exp, not its logarithm", lambda *a: attend(*a, lse_of="exp")),
        Mistake("not_divided", "does not divide by the sum of the weights", lambda *a: attend(*a, divided=False)),
        Mistake("empty_row", "fails for a row without tokens: its out is 0, its lse -inf",
                shows=lambda case, got: case.spec["length"] == 0 and (fails_for_lack(got) or is_state(case, got))),
    ),
)  # fmt: skip

"""How task 4 of exercise 02 is judged: the states of a batch merged row by row, where some are empty."""

import functools
import random
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch

from pkv.course.comparing import agree
from pkv.course.graders.asking import asked, dtype_mistake
from pkv.course.graders.batches import fails_for_lack
from pkv.course.graders.ex02_merges import even_rows, hidden, merge_rows, mistake, one_max
from pkv.course.graders.ex02_states import has_nan, is_state, overflows, parts_of
from pkv.course.tasks import Case, Mistake, Property, Spec, Task, Unfit

LARGE = 100.0  # exp of minus so much is 0
MINUS_INF = "makes NaN of -inf - -inf: where no item has had tokens yet, subtract 0 instead"
JUNK = {"numbers": 100.0, "NaN": torch.nan, "inf": torch.inf}


def specs(rng: random.Random, *rows: list[int], **more: Any) -> list[Spec]:
    """Numbers of items of each row; more: empty (which items are), junk (what these hold), size (of lse)."""
    return [
        {"n_items": n_items, "n_q_heads": rng.choice([2, 3]), "head_dim": 4, **more, "seed": rng.randrange(1000)}
        for n_items in rows
    ]


def drawn(rng: random.Random, least: int = 1) -> list[int]:
    """Some rows of some items."""
    return [rng.randrange(least, 7) for _ in range(rng.randrange(3, 6))]


def is_empty_item(spec: Spec) -> list[bool]:
    """Which items hold no token: none, some of each row, or all those of every other row."""
    rules: dict[str, Callable[[int, int], bool]] = {
        "none": lambda row, item: False,
        "some": lambda row, item: item % 3 == (row + 1) % 2,
        "whole rows": lambda row, item: row % 2 == 0,
        "heads": lambda row, item: True,  # each for some of its heads
    }
    is_empty = rules[spec.get("empty", "none")]
    return [is_empty(row, item) for row, n_items in enumerate(spec["n_items"]) for item in range(n_items)]


def arguments(spec: Spec) -> tuple[Any, ...]:
    """outs, lses, offsets."""
    counts, n_q_heads, d = spec["n_items"], spec["n_q_heads"], spec["head_dim"]
    if min(n_q_heads, d) < 1:
        raise Unfit
    generator = torch.Generator().manual_seed(spec["seed"])
    n_items = sum(counts)
    outs = torch.randn(n_items, n_q_heads, d, generator=generator) + torch.arange(n_items)[:, None, None]
    lses = torch.randn(n_items, n_q_heads, generator=generator) * 2 + 3
    if "size" in spec:  # a row's lses are all large, or all far below 0
        signs = torch.tensor([1.0, -1.0]).repeat(len(counts))[: len(counts)]
        lses += spec["size"] * signs.repeat_interleave(torch.tensor(counts))[:, None]
    is_empty = torch.tensor(is_empty_item(spec), dtype=torch.bool)
    if spec.get("empty") == "heads":
        is_empty = (torch.arange(n_items)[:, None] + torch.arange(n_q_heads)) % 2 == 0
    outs[is_empty], lses[is_empty] = JUNK[spec.get("junk", "NaN")], -torch.inf
    return outs, lses, torch.tensor([0, *accumulate(counts)], dtype=torch.int32)


def multiplies_junk(case: Case, got: Any) -> bool:
    """out is not a number, but lse is, where what an empty item holds is not."""
    is_junk = case.spec.get("junk") != "numbers" and any(is_empty_item(case.spec))
    return is_junk and has_nan(got) and not bool(parts_of(got)[-1].isnan().any())


def nan_of_junk(case: Case, got: Any) -> bool:
    """Is an out not a number whose lse is one, and whose head has tokens?"""
    parts = parts_of(got)
    has_tokens = case.right[1] > -torch.inf
    return len(parts) == 2 and bool((parts[0].isnan().any(-1) & has_tokens & ~parts[1].isnan()).any())


def multiplies_and_subtracts(case: Case, got: Any) -> bool:
    """Not a number, where items are empty: wherever what they hold is multiplied, and where no item has tokens."""
    if not subtracts_infinities(case, got):
        return False
    outs, lses, offsets = case.arguments
    parts, is_junk = parts_of(got), ((lses == -torch.inf)[..., None] & ~outs.isfinite()).any(-1)
    rows = [is_junk[first:last].any(0) for first, last in pairwise(offsets.tolist())]
    has_tokens = case.right[1] > -torch.inf
    multiplied = torch.stack(rows) & has_tokens
    return bool((parts[0].isnan().any(-1) >= multiplied).all()) and not bool(parts[1][has_tokens].isnan().any())


def says_which_nan(case: Case, got: Any) -> str:
    """Of who does both: what makes NaN in this case."""
    if nan_of_junk(case, got):
        return "multiplies what empty items hold by 0, which gives NaN for NaN and inf: replace it first"
    return MINUS_INF


def subtracts_infinities(case: Case, got: Any) -> bool:
    """Not a number, where items are empty."""
    return any(is_empty_item(case.spec)) and has_nan(got)


def divides_by_zero(case: Case, got: Any) -> bool:
    """lse is right everywhere; out is not a number in rows without tokens."""
    parts = parts_of(got)
    if not fails_without_tokens(case, got) or len(parts) != 2 or not agree(case.right[1], parts[1], 1e-3):
        return False
    return bool(parts[0][(case.right[1] == -torch.inf).all(1)].isnan().all())


def fails_far_below(case: Case, got: Any) -> bool:
    """Wrong only in rows whose lses are all far below 0."""
    parts = parts_of(got)
    if "size" not in case.spec or not is_state(case, got) or len(parts) != 2:
        return False
    far = (case.right[1] < -LARGE).all(1)
    return bool(far.any()) and all(agree(mine[~far], yours[~far], 1e-3) for mine, yours in zip(case.right, parts))


def fails_without_tokens(case: Case, got: Any) -> bool:
    """Fails where a row has no item with tokens, or is wrong in such rows only."""
    has_tokens = (case.right[1] > -torch.inf).all(1)
    if has_tokens.all() or not is_state(case, got):
        return False
    pairs = list(zip(case.right, parts_of(got)))
    are_right = all(agree(mine[has_tokens], yours[has_tokens], 1e-3) for mine, yours in pairs)
    return not pairs or (are_right and not all(agree(m[~has_tokens], y[~has_tokens], 0.0) for m, y in pairs))


EX02_4 = Task(
    id="ex02_4",
    title="states merged row by row",
    function="merge_rows",
    lines=11,
    arguments=arguments,
    right=merge_rows,
    call=asked(lambda outs, lses, offsets: outs.dtype if (lses == -torch.inf).all() else None),
    tolerance=2e-4,
    axes=("row", "query head", "dim"),
    fixed=("empty", "junk", "size", "head_dim"),
    shortcuts=("pkv",),
    properties=(
        Property("rows of one item, and of many", lambda rng: specs(rng, [1], [2], [3, 1, 2], drawn(rng), drawn(rng))),
        Property(
            "empty states are neutral, whatever their memory holds",
            lambda rng: [
                spec for junk in JUNK for spec in specs(rng, [2], [3, 2, 5], drawn(rng, 2), empty="some", junk=junk)
            ]
            + [spec for junk in JUNK for spec in specs(rng, [1], [2, 1], empty="heads", junk=junk)],
        ),
        Property(
            "a row without items, or of empty ones only; no rows",
            lambda rng: (
                specs(rng, [0], [1, 0], [0, 2, 0, 0, 3], [])
                + specs(rng, [1], [2, 1, 1], empty="whole rows", junk="numbers")
                + specs(rng, [1], drawn(rng), empty="whole rows", junk="NaN")
            ),
        ),
        Property("lse of a few hundred", lambda rng: specs(rng, [2], [1, 3], drawn(rng), size=200.0)
                 + specs(rng, [2], size=-200.0)),
    ),
    mistakes=(
        dtype_mistake("gives another dtype where there are no tokens: out and lse are fp32, as outs and lses"),
        Mistake("average", "averages outs: each weighs exp(lse)", mistake(weigh="equal", replaces=False)),
        Mistake("average", "averages the outs of items with tokens: each weighs exp(lse)",
                mistake(weigh="equal_of_filled")),
        Mistake("lse_as_weight", "weighs by lse: the weight is exp(lse)", mistake(weigh="lse", replaces=False)),
        Mistake("lse_as_weight", "weighs by lse: the weight is exp(lse)", mistake(weigh="lse")),
        Mistake("base_2", "takes lse for base 2: it is the natural logarithm", mistake(weigh="exp2", lse_of="sum2")),
        Mistake("base_2", "takes lse for base 2: it is the natural logarithm", mistake(weigh="exp2")),
        Mistake("lse_mixed", "lse mixes bases: the largest lse is natural, log2 of the sum is not",
                mistake(lse_of="mixed")),
        Mistake("not_divided", "does not divide by the sum of the weights", mistake(divided=False)),
        Mistake("lse_without_max", "lse lacks the largest one that was subtracted", mistake(lse_of="shifted")),
        Mistake("lse_largest", "takes the largest lse: it is ln of the sum of exp(lse)", mistake(lse_of="largest")),
        Mistake("lse_added", "adds lses: their exps add", mistake(lse_of="added")),
        Mistake("lse_mean", "averages lses: their exps add", mistake(lse_of="mean")),
        Mistake("offsets_are_counts", "takes offsets[r + 1] for a number of items: it is where the next row begins",
                mistake(items_of=lambda first, last: slice(first, first + last))),
        Mistake("next_row_too", "merges the next row's first item too: a row's items end before offsets[r + 1]",
                mistake(items_of=lambda first, last: slice(first, last + 1))),
        Mistake("last_left_out", "leaves out each row's last item: offsets[r + 1] is half-open already",
                mistake(items_of=lambda first, last: slice(first, last - 1))),
        Mistake("rows_before", "merges the items of the rows before too: a row begins at offsets[r]",
                mistake(items_of=lambda first, last: slice(last))),
        Mistake("all_items", "merges the items of all rows in each", mistake(items_of=lambda first, last: slice(None))),
        Mistake("even_rows", "gives each row as many items: offsets say how many it has", even_rows),
        Mistake("hidden", "makes NaN 0 after merging, and loses the row's other items: replace it before", hidden),
        *(Mistake("one_max", "subtracts one largest lse in all rows: each row and head needs its own, or its sum is 0",
                  functools.partial(one_max, of_all=of_all, guards=guards))
          for of_all in (False, True) for guards in (False, True)),
        Mistake("max_from_0", "subtracts 0 where the largest lse is below 0: exp of what is left is then 0",
                shows=fails_far_below),
        Mistake("no_rows", "fails where there are no rows: out and lse have none then, either",
                shows=lambda case, got: not case.spec["n_items"] and (fails_for_lack(got) or bool(parts_of(got)))),
        Mistake("no_max", "exp of a large lse is infinite: subtract the largest of the row and head first",
                shows=overflows),
        Mistake("junk", "multiplies what empty items hold by 0, which gives NaN for NaN and inf: replace it first",
                shows=multiplies_junk),
        Mistake("divided_by_zero", "makes NaN where a head has no tokens, by 0 / 0 or -inf - -inf: its out is 0",
                shows=divides_by_zero),
        Mistake("junk_and_minus_inf", says_which_nan, shows=multiplies_and_subtracts),
        Mistake("minus_inf", MINUS_INF, shows=subtracts_infinities),
        Mistake("empty_row", "a row without tokens must have out 0 and lse -inf",
                shows=fails_without_tokens),
        Mistake("one_head", "takes an item for empty, or not, by one of its heads: each head has its own lse",
                shows=lambda case, got: case.spec.get("empty") == "heads" and is_state(case, got)),
    ),
)  # fmt: skip

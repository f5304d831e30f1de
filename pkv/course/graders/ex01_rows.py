"""How the fifth task of exercise 01 is judged: the merge of all rows, in Triton."""

import functools
import random
from collections.abc import Callable
from typing import Any

import torch

from pkv.course.graders.addresses import OUT_OF_BOUNDS, in_bounds
from pkv.course.graders.asking import kernel_mistake, launched
from pkv.course.graders.ex01_shows import (
    TOLERANCE,
    emptiness,
    leaves_one_filled,
    lse_missing,
    no_number,
    nothing_written,
    only,
    out_is,
    overflows,
    with_counts,
)
from pkv.course.graders.ex01_states import (
    INTERPRETER_AND,
    KEPT,
    first_block,
    from_zero,
    merge_rows,
    merge_states,
    padded,
    rows_of,
    uncorrected,
)
from pkv.course.tasks import Case, Mistake, Property, Raised, Spec, Task

BEYOND = "writes past the end of out or lse: only dims below head_dim are there"
RETURNS = "returns something: it writes into out and lse, and returns nothing"


def in_place(function: Callable[..., Any], *given: torch.Tensor) -> list[torch.Tensor]:
    """out and lse after the call, which gets copies of them, each with some room behind it that must stay as it is."""
    copies = []
    for tensor in given[3:]:
        room = torch.full((tensor.numel() + 64,), KEPT, dtype=tensor.dtype, device=tensor.device)
        copies.append((room, room.as_strided(tensor.size(), tensor.stride()).copy_(tensor)))
    returned = launched(function, *given[:3], *(copy for _, copy in copies))
    if any((room[-64:] != KEPT).any() for room, _ in copies):
        raise IndexError(BEYOND)
    if returned is not None:
        raise TypeError(RETURNS)
    return [copy for _, copy in copies]


def raises(text: str) -> Callable[[Case, Any], bool]:
    """shows: that exception of in_place."""
    return lambda case, got: isinstance(got, Raised) and got.text == text


def row_mistake(name: str, says: str, **made: Any) -> Mistake:
    """A mistake of which merge_rows has an option."""
    return Mistake(name, says, lambda *given: merge_rows(*given, **made))


def state_mistake(name: str, says: str, **made: Any) -> Mistake:
    """A mistake of which merge_states has an option."""
    return row_mistake(name, says, merge=functools.partial(merge_states, **made))


def specs(rng: random.Random, *cases: dict[str, Any]) -> list[Spec]:
    """Specs; cases: what differs from the usual one."""
    usual = {"n_heads": 2, "head_dim": 8, "size": 2, "empty": "none", "dtype": "float32"}
    return [{"counts": [], **usual, **case, "seed": rng.randrange(1000)} for case in cases]


EX01_5 = Task(
    id="ex01_5",
    title="the merge of all rows, in Triton",
    function="merge_rows",
    kernel="merge_rows_kernel",
    lines=22,
    points=6,
    arguments=rows_of,
    right=merge_rows,
    call=in_bounds(in_place),
    axes=("row", "query head", "dim"),
    tolerance=TOLERANCE,
    fixed=("dtype", "size", "turned", "alone"),
    shortcuts=("merge_items", "launch_merge", "merge_states", "merge_many", "merge_two", "merge_many_spec", "merge"),
    seconds=60.0,
    properties=(
        Property("a state weighs exp(lse)", lambda rng: specs(
            rng, {"counts": [2]}, {"counts": [3, 5], "head_dim": 16, "n_heads": 3})),
        Property("a row's states are those from offsets[r] to offsets[r + 1]", lambda rng: specs(
            rng, {"counts": [2, 4]}, {"counts": [rng.randrange(5, 9), 2, 3]})),
        Property("any number of states", lambda rng: specs(
            rng, {"counts": [40, 2], "n_heads": 1}, {"counts": [rng.randrange(135, 150)], "n_heads": 1, "rise": 0.5})),
        Property("an lse of several hundred, either way", lambda rng: specs(
            rng, {"counts": [3, 2], "size": rng.randrange(300, 900)},
            *({"counts": [40], "n_heads": 1, "rise": by} for by in (20.0, -20.0)))),
        Property("a state of no tokens changes nothing, whatever it holds", lambda rng: specs(
            rng, {"counts": [2, 3], "empty": 0}, {"counts": [7, 20], "empty": "some"},
            {"counts": [18, 2], "empty": "front", "n_heads": 1})),
        Property("no tokens, or no states: out 0, lse -inf", lambda rng: specs(
            rng, {"counts": [0, 2]}, {"counts": [3, 2], "empty": "all"}, {"counts": [2, 0, 0, 3]})),
        Property("a row of one state is left alone", lambda rng: specs(
            rng, {"counts": [1, 2]}, {"counts": [2, 1, 3, 1, 1]})),
        Property("any head_dim, dtype and strides of out; nothing is read behind the last state", lambda rng: specs(
            rng, {"counts": [2, 3], "head_dim": 5}, {"counts": [3, 2], "head_dim": 12, "dtype": "float16"},
            {"counts": [2, 2], "head_dim": 6, "n_heads": 3, "turned": True},
            {"counts": [2], "head_dim": 5, "alone": True}, {"counts": [17, 2], "head_dim": 12, "alone": True})),
    ),
    mistakes=(
        kernel_mistake("merge_rows_kernel"),
        Mistake("nothing_written", "writes nothing: is the kernel written, and does it store?", shows=nothing_written),
        Mistake("lse_missing", "does not write lse", shows=lse_missing),
        INTERPRETER_AND,
        Mistake("beyond", BEYOND, shows=raises(BEYOND)),
        OUT_OF_BOUNDS,
        Mistake("returns", RETURNS, shows=raises(RETURNS)),
        Mistake("row_of_none", "leaves out rows of no states: their out is 0, their lse -inf",
                shows=only(with_counts(0))),
        Mistake("all_empty", "gives no neutral state where there are no tokens: out is 0, lse -inf",
                shows=only(lambda case: emptiness(case)[0])),
        Mistake("average", "averages the outs: a state weighs exp(lse)", shows=out_is(weights="equal")),
        Mistake("average", "averages the outs of all states with tokens: a state weighs exp(lse)",
                shows=out_is(weights="equal if not empty")),
        Mistake("weighs_by_lse", "weighs a state by lse: it weighs exp(lse)", shows=out_is(weights="lse")),
        Mistake("heaviest_only", "keeps the heaviest state only", shows=out_is(weights="heaviest")),
        Mistake("base_2", "weighs a state by 2 ** lse: lse is natural, so it weighs exp(lse)",
                shows=out_is(weights="exp2")),
        Mistake("not_divided", "does not divide by the sum of the weights", shows=out_is(divides=False)),
        state_mistake("lse_base_2", "lse is in base 2: it is the natural logarithm", lse="log2"),
        state_mistake("lse_mixed", "lse mixes bases: the largest lse is natural, log2 of the sum is not", lse="mixed"),
        state_mistake("lse_without_max", "lse lacks the largest lse that was subtracted", lse="shifted"),
        state_mistake("lse_max", "gives the largest lse for that of all", lse="max"),
        state_mistake("lse_sum", "adds up the lses: add up exp of them, then take ln", lse="sum"),
        *(
            row_mistake("not_corrected", "adds up weights that refer to different maxima: when one grows, "
                        "multiply the sums so far by exp(old - new)", merge=functools.partial(uncorrected, block=block))
            for block in (1, 2, 4, 8, 16, 32, 64, 128)
        ),
        *(
            row_mistake(f"{kept}_not_corrected", says,
                        merge=functools.partial(uncorrected, block=block, corrects=other))
            for block in (1, 2, 4, 8, 16, 32, 64, 128)
            for kept, other, says in (
                ("acc", "sums", "corrects the sum of weights, not the weighted sum of outs, when the maximum grows"),
                ("sum", "acc", "corrects the weighted sum of outs, not the sum of weights, when the maximum grows"),
            )
        ),
        *(
            row_mistake("first_block", f"merges {block} states at most: a row may have any number",
                        merge=functools.partial(first_block, block=block))
            for block in (1, 2, 4, 8, 16, 32, 64, 128)
        ),
        *(
            row_mistake("padding_counts", "counts states that are not there as lse 0: their lse is -inf",
                        merge=functools.partial(padded, block=block))
            for block in (2, 4, 8, 16, 32, 64, 128)
        ),
        row_mistake("last_dropped", "drops a row's last state", states="all but the last"),
        row_mistake("first_dropped", "drops a row's first state", states="all but the first"),
        row_mistake("one_more", "reads the first state of the next row: offsets[r + 1] is where they end",
                    states="one more"),
        row_mistake("offsets_ignored", "takes as many states for each row: offsets says which",
                    states="as many for each row"),
        row_mistake("heads_mixed", "reads the states of query head 0 for every head", states="of head 0"),
        *(row_mistake("by_head", "looks for state s of a head at head * n_heads + s: it lies at s * n_heads + head",
                      by_head=by_head) for by_head in ("lses", "outs")),
        *(row_mistake("lse_at", f"stores every head's lse at {at}: it belongs at row * n_heads + head", lse_at=lse_at)
          for at, lse_at in (("row", "row"), ("row * n_heads", "first head"))),
        row_mistake("strides_ignored", "takes out for contiguous: use its strides", turned=False),
        Mistake("single_row", "overwrites a row of one state, of which the partials hold nothing",
                shows=only(with_counts(1))),
        Mistake("counts_filled", "tells a row of one state by its states with tokens: offsets says how many it has",
                shows=leaves_one_filled),
        Mistake("empty_read", "makes NaN of empty states: do not read what they hold (0 * NaN and 0 * inf are "
                "NaN), and mind that -inf - -inf is NaN, where all so far are empty",
                shows=lambda case, got: no_number(case, got) and only(lambda case: emptiness(case)[1])(case, got)),
        row_mistake("max_from_0", "subtracts 0 where the largest lse is below 0: exp of what is left is then 0",
                    merge=from_zero),
        Mistake("max_not_carried", "takes the largest lse of some states, not the largest so far: what was larger "
                "overflows", shows=lambda case, got: case.spec.get("rise", 0) < -1 and no_number(case, got)),
        Mistake("max_of_first", "subtracts the lse of the first states: when the largest grows, take that",
                shows=lambda case, got: case.spec.get("rise", 0) > 1 and no_number(case, got)),
        Mistake("no_max", "overflows: exp of a large lse is infinite; subtract the largest lse first", shows=overflows),
    ),
)  # fmt: skip

"""How exercise 01 is judged: two states merged, and many; and in ex01_cuts, ex01_kernels and ex01_rows the rest."""

import functools
import random
from collections.abc import Callable
from typing import Any

import torch

from pkv.course.comparing import agree, plain
from pkv.course.graders.asking import MANY, asked, dtype_mistake, loop_mistake
from pkv.course.graders.ex01_cuts import EX01_3
from pkv.course.graders.ex01_kernels import EX01_4
from pkv.course.graders.ex01_rows import EX01_5
from pkv.course.graders.ex01_states import LARGE, from_zero, merge_states, states_of, weighs_dims, what_is_multiplied
from pkv.course.tasks import Case, Mistake, Property, Raised, Spec, Task, Unfit

TOLERANCE = 3e-4  # an lse of a thousand has steps of 6e-5, and exp of it shows them


def state_specs(
    rng: random.Random,
    sizes: list[tuple[int, int, int]],
    size: int = 2,
    empty: tuple[Any, ...] = ("none",),
    **more: Any,
) -> list[Spec]:
    """Specs of states: (n_states, n_heads, head_dim), with each kind of empty ones."""
    return [
        {
            "n_states": n,
            "n_heads": heads,
            "head_dim": d,
            "size": size,
            "empty": kind,
            "seed": rng.randrange(1000),
            **more,
        }
        for n, heads, d in sizes
        for kind in empty
    ]


def two_of(spec: Spec) -> tuple[torch.Tensor, ...]:
    """out_a, lse_a, out_b, lse_b."""
    outs, lses = states_of(spec)
    if len(lses) != 2:
        raise Unfit
    return outs[0], lses[0], outs[1], lses[1]


def many_of(spec: Spec) -> tuple[torch.Tensor, ...]:
    """outs, lses, of one state at least."""
    if spec["n_states"] < 1:
        raise Unfit
    return states_of(spec)


def two(merge: Callable[..., Any]) -> Callable[..., Any]:
    """A merge of many, of two."""

    def merge_two(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> Any:
        return merge(torch.stack([out_a, out_b]), torch.stack([lse_a, lse_b]))

    return merge_two


def stacked(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The states of a case, of two or of many."""
    given = case.arguments
    return (given[0], given[1]) if len(given) == 2 else (torch.stack(given[::2]), torch.stack(given[1::2]))


def heads_off(case: Case, got: Any) -> torch.Tensor | None:
    """Which heads [n_heads] are wrong; None where the answer is no state of the right shape."""
    right = plain(list(case.right))
    if not isinstance(got, list) or len(got) != 2 or not all(isinstance(part, torch.Tensor) for part in got):
        return None
    if any(mine.shape != yours.shape for mine, yours in zip(right, got)):
        return None
    off = [~torch.isclose(mine.double(), yours.double(), 1e-3, 1e-3) for mine, yours in zip(right, got)]
    return off[0].any(-1) | off[1]


def only_where(heads: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[Case, Any], bool]:
    """shows: heads are wrong only where heads(outs, lses) says so."""

    def shows(case: Case, got: Any) -> bool:
        off = heads_off(case, got)
        return off is not None and bool(off.any()) and bool((heads(*stacked(case)) | ~off).all())

    return shows


def out_is(**made: Any) -> Callable[[Case, Any], bool]:
    """shows: out is wrong, and what merge_states(..., **made) gives, whatever the lse."""

    def shows(case: Case, got: Any) -> bool:
        wrong = merge_states(*stacked(case), **made)[0]
        return agree(wrong, got[0], 4 * TOLERANCE) and not agree(case.right[0], got[0], TOLERANCE)

    return shows


def multiplies_dims(case: Case, got: Any) -> bool:
    """What comes of weights that lack an axis, often an exception; lse is right."""
    try:
        wrong = weighs_dims(*stacked(case), len(case.arguments) == 2)
    except RuntimeError:
        return isinstance(got, Raised) and "size of tensor" in got.text
    return agree(wrong, got[0], TOLERANCE)


def averages_far_below(case: Case, got: Any) -> bool:
    """Wrong only in heads whose lses are all far below 0, where outs are averaged."""
    outs, lses = stacked(case)
    off = heads_off(case, got)
    if off is None or not off.any() or bool((off & (lses.amax(0) > -LARGE)).any()):
        return False
    return agree(outs.mean(0)[off], got[0][off], TOLERANCE)


def overflows(case: Case, got: Any) -> bool:
    """Infinite, or no number, or no tokens at all, where every lse is large."""
    off = heads_off(case, got)
    if off is None or case.spec["size"] < LARGE:
        return False
    return not (got[0].isfinite().all() and got[1][off].isfinite().all())


def merge_mistakes(of: Callable[[Callable[..., Any]], Callable[..., Any]]) -> tuple[Mistake, ...]:
    """What people get wrong; of: makes a merge of many into the task's function."""

    def wrong(**made: Any) -> Callable[..., Any]:
        return of(functools.partial(merge_states, **made))

    def neutral(case: Case, got: Any) -> str:
        outs, lses = stacked(case)
        why = what_is_multiplied(got[0], outs, lses == -torch.inf)
        return f"an empty state's out holds anything: replace it before you multiply, because {why}"

    return (
        dtype_mistake("gives another dtype where all states are empty: out and lse are fp32, as those given"),
        Mistake("both_empty", "gives no neutral state where all states are empty: out is 0 and lse -inf there",
                shows=only_where(lambda outs, lses: (lses == -torch.inf).all(0))),
        Mistake("average", "averages the outs: a state weighs exp(lse)", shows=out_is(weights="equal")),
        Mistake("average", "averages the outs of all states with tokens: a state weighs exp(lse)",
                shows=out_is(weights="equal if not empty")),
        Mistake("weighs_by_lse", "weighs a state by lse: it weighs exp(lse)", shows=out_is(weights="lse")),
        Mistake("heaviest_only", "keeps the heaviest state only: the others count too",
                shows=out_is(weights="heaviest")),
        Mistake("base_2", "weighs a state by 2 ** lse: lse is natural, so it weighs exp(lse)",
                shows=out_is(weights="exp2")),
        Mistake("turned", "weighs states by exp(-lse), or swaps their weights: the larger lse weighs more",
                shows=out_is(weights="turned")),
        Mistake("heads_mixed", "divides by a sum over heads: each head has weights of its own, which sum to 1",
                shows=out_is(weights="over heads")),
        Mistake("dims_weighted", "multiplies dims by the weights of heads: weights need an axis more, [..., None]",
                shows=multiplies_dims),
        Mistake("not_divided", "does not divide by the sum of the weights", shows=out_is(divides=False)),
        Mistake("lse_sum", "adds up the lses: add up exp of them, then take ln", wrong(lse="sum")),
        Mistake("lse_max", "gives the largest lse for that of all", wrong(lse="max")),
        Mistake("lse_mean", "averages the lses", wrong(lse="mean")),
        Mistake("lse_without_max", "lse lacks the largest lse that was subtracted", wrong(lse="shifted")),
        Mistake("lse_is_sum", "gives the sum of exp(lse), not its logarithm", wrong(lse="exp")),
        Mistake("lse_base_2", "lse is in base 2: it is the natural logarithm", wrong(lse="log2")),
        Mistake("lse_mixed", "lse mixes bases: the largest lse is natural, log2 of the sum is not", wrong(lse="mixed")),
        Mistake("empty_multiplied", neutral, shows=only_where(lambda outs, lses: (lses == -torch.inf).any(0))),
        Mistake("max_from_0", "subtracts 0 where the largest lse is below 0: exp of what is left is then 0",
                of(from_zero)),
        Mistake("clamped", "clamps what is far below 0: states of an lse below the bound then weigh alike",
                shows=averages_far_below),
        Mistake("one_max", "subtracts one largest lse from all heads: each head needs its own",
                shows=only_where(lambda outs, lses: lses.amax(0) < lses.max() - LARGE)),
        Mistake("no_max", "overflows: exp of a large lse is infinite; subtract the largest lse first", shows=overflows),
    )  # fmt: skip


def all_empty(*lses: torch.Tensor) -> torch.dtype | None:
    """The dtype of states none of which has tokens."""
    return lses[0].dtype if all((lse == -torch.inf).all() for lse in lses) else None


AXES = ("query head", "dim")
EX01_1 = Task(
    id="ex01_1",
    title="two states merged",
    function="merge_two",
    lines=6,
    arguments=two_of,
    right=two(merge_states),
    call=asked(lambda out_a, lse_a, out_b, lse_b: all_empty(lse_a, lse_b)),
    axes=AXES,
    tolerance=TOLERANCE,
    shortcuts=("merge", "merge_many_spec"),
    properties=(
        Property("a state weighs exp(lse)", lambda rng: state_specs(rng, [(2, 1, 1), (2, 3, 2), (2, 4, 4)])),
        Property("an lse of several hundred, either way",
                 lambda rng: state_specs(rng, [(2, 2, 2), (2, 3, 5)], rng.randrange(1000, 1020))
                 + state_specs(rng, [(2, 2, 3)], rng.randrange(300, 900), not_below=True)),
        Property("a state of no tokens changes nothing, whatever it holds",
                 lambda rng: state_specs(rng, [(2, 4, 3)], 2, (0, 1, "some"))),
        Property("two states of no tokens: out 0, lse -inf",
                 lambda rng: state_specs(rng, [(2, 3, 4)], 2, ("all", "heads"))),
    ),
    mistakes=merge_mistakes(two),
)  # fmt: skip

EX01_2 = Task(
    id="ex01_2",
    title="many states merged",
    function="merge_many",
    lines=5,
    arguments=many_of,
    right=merge_states,
    call=asked(
        dtype=lambda outs, lses: all_empty(lses),
        fewer=lambda outs, lses: (outs[:2], lses[:2]) if len(outs) >= 2 * MANY else None,
    ),
    axes=AXES,
    tolerance=TOLERANCE,
    shortcuts=("merge", "merge_two_spec"),
    properties=(
        Property("any number of states", lambda rng: state_specs(rng, [(1, 1, 1), (3, 3, 3), (3, 4, 2), (40, 2, 5)])),
        Property("an lse of several hundred, either way",
                 lambda rng: state_specs(rng, [(3, 2, 2), (5, 4, 3)], rng.randrange(1000, 1020))
                 + state_specs(rng, [(4, 2, 3)], rng.randrange(300, 900), not_below=True)),
        Property("a state of no tokens changes nothing, whatever it holds",
                 lambda rng: state_specs(rng, [(2, 3, 3), (7, 4, 2)], 2, (0, 1, "some"))),
        Property("no tokens at all: out 0, lse -inf",
                 lambda rng: state_specs(rng, [(1, 2, 3), (4, 3, 3)], 2, ("all", "heads"))),
        Property("no loop over states: many take as many steps as two",
                 lambda rng: state_specs(rng, [(rng.randrange(2 * MANY, 3 * MANY), 1, 2)]), of_steps=True),
    ),
    mistakes=(
        loop_mistake("states"),
        *merge_mistakes(lambda merge: merge),
        Mistake("last_dropped", "drops the last state", lambda outs, lses: merge_states(outs[:-1], lses[:-1])),
        Mistake("first_dropped", "drops the first state", lambda outs, lses: merge_states(outs[1:], lses[1:])),
        Mistake("two_only", "merges two states, however many there are",
                lambda outs, lses: merge_states(outs[:2], lses[:2])),
    ),
)  # fmt: skip

TASKS = (EX01_1, EX01_2, EX01_3, EX01_4, EX01_5)

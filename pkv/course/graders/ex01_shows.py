"""What wrong merges of all rows show, of which the whole answer cannot be known beforehand."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from pkv.course.comparing import agree, plain
from pkv.course.graders.ex01_states import LARGE, merge_rows, merge_states
from pkv.course.tasks import Case, Raised

TOLERANCE = 1e-3  # out may be fp16


def off(case: Case, got: Any) -> torch.Tensor | None:
    """Which (row, head) are wrong; None where the answer is an exception."""
    if isinstance(got, Raised):
        return None
    wrong = [~torch.isclose(mine.double(), yours.double(), 5e-3, 5e-3) for mine, yours in zip(plain(case.right), got)]
    return wrong[0].any(-1) | wrong[1]


def emptiness(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Of which (row, head) every state is empty, and of which any; rows of one state have none."""
    _, lses, offsets, _, lse = (x.cpu() for x in case.arguments)
    every, some = torch.zeros_like(lse, dtype=torch.bool), torch.zeros_like(lse, dtype=torch.bool)
    for row, (first, last) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:])):
        if last - first != 1:
            every[row] = (lses[first:last] == -torch.inf).all(0)
            some[row] = (lses[first:last] == -torch.inf).any(0) | every[row]
    return every, some


def only(where: Callable[[Case], torch.Tensor]) -> Callable[[Case, Any], bool]:
    """shows: wrong only where where(case) [n_rows, n_heads or 1] says so."""

    def shows(case: Case, got: Any) -> bool:
        wrong = off(case, got)
        return wrong is not None and bool(wrong.any()) and bool((where(case) | ~wrong).all())

    return shows


def leaves_one_filled(case: Case, got: Any) -> bool:
    """Wrong in rows of one state, or left alone where several are, of which one at most has tokens."""
    wrong = off(case, got)
    if wrong is None:
        return False
    _, lses, offsets, *given = (x.cpu() for x in case.arguments)
    bounds = zip(offsets.tolist(), offsets.tolist()[1:])
    n_filled = torch.stack([(lses[first:last] > -torch.inf).sum(0) for first, last in bounds])
    is_left = (got[0] == given[0]).all(-1) & (got[1] == given[1]) & (n_filled <= 1)
    return bool(wrong.any()) and bool((is_left | with_counts(1)(case) | ~wrong).all())


def with_counts(count: int) -> Callable[[Case], torch.Tensor]:
    """Rows of that many states."""
    return lambda case: torch.tensor(case.spec["counts"])[:, None] == count


def out_is(**made: Any) -> Callable[[Case, Any], bool]:
    """shows: out is wrong, and what that wrong merge gives, whatever the lse."""

    def shows(case: Case, got: Any) -> bool:
        wrong = merge_rows(*case.arguments, merge=functools.partial(merge_states, **made))
        return agree(wrong[0], got[0], 4 * TOLERANCE) and not agree(case.right[0], got[0], TOLERANCE)

    return shows


def nothing_written(case: Case, got: Any) -> bool:
    """out and lse are as they were."""
    return not isinstance(got, Raised) and all(agree(*pair, 0.0) for pair in zip(plain(list(case.arguments[3:])), got))


def lse_missing(case: Case, got: Any) -> bool:
    """out is right, lse as it was."""
    if isinstance(got, Raised):
        return False
    return agree(plain(case.right[0]), got[0], TOLERANCE) and agree(plain(case.arguments[4]), got[1], 0.0)


def no_number(case: Case, got: Any) -> bool:
    """Infinite, or no number, where it is wrong."""
    wrong = off(case, got)
    return wrong is not None and not (got[0][wrong].isfinite().all() and got[1][wrong].isfinite().all())


def overflows(case: Case, got: Any) -> bool:
    """Infinite, or no number, where lses are large."""
    return bool(case.spec["size"] > LARGE or case.spec.get("rise", 0) > 1) and no_number(case, got)

"""How exercise 04 is judged: costs fitted to measured times."""

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import torch

from pkv.course.tasks import Mistake, Property, Spec, Task, Unfit

MOST_CONDITION = 300.0  # of columns of one size, so that fp32 is exact enough, too


def fitted(
    features: torch.Tensor,
    times: torch.Tensor,
    weight: Callable[[torch.Tensor], torch.Tensor] = lambda times: 1 / times,
) -> torch.Tensor:
    """Least squares of weighted equations, by an orthogonal basis; other weights are mistakes."""
    weights = weight(times)
    basis, triangle = torch.linalg.qr(features * weights[:, None])
    return torch.linalg.solve_triangular(triangle, (basis.T @ (times * weights))[:, None], upper=True)[:, 0]


def with_constant(features: torch.Tensor, times: torch.Tensor, relative: bool) -> torch.Tensor:
    """A cost more, for nothing, is fitted and dropped; relative: it is added to relative errors."""
    weights = 1 / times[:, None]
    constant = torch.ones_like(weights)
    columns = [features * weights, constant if relative else constant * weights]
    return torch.linalg.lstsq(torch.cat(columns, 1), torch.ones_like(times)).solution[:-1]


def at_least_zero(features: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """The best of all fits of some of the costs, the others 0, in which none is negative."""
    best, least = torch.zeros_like(features[0]), torch.inf
    for used in itertools.product([False, True], repeat=features.shape[1]):
        found = torch.zeros_like(best)
        if any(used):
            found[list(used)] = fitted(features[:, list(used)], times)
        error = (features @ found / times - 1).square().sum().item()
        if found.min() >= 0 and error < least:
            best, least = found, error
    return best


def one_by_one(features: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """Each cost as if it alone explained the times."""
    return torch.cat([fitted(column[:, None], times) for column in features.T])


def log_ratios(features: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """The least sum of squares of log(predicted / measured), by Gauss and Newton's steps."""
    costs = fitted(features, times)
    for _ in range(50):
        predicted = features @ costs
        costs = costs - torch.linalg.lstsq(features / predicted[:, None], (predicted / times).log()).solution
    return costs


def solved(features: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """What lstsq gives for these two."""
    return torch.linalg.lstsq(features, right).solution


def truncated(features: torch.Tensor, times: torch.Tensor, rtol: float) -> torch.Tensor:
    """Without the singular values that are small beside the largest."""
    return torch.linalg.pinv(features / times[:, None], rtol=rtol) @ torch.ones_like(times)


def damped(features: torch.Tensor, times: torch.Tensor, ridge: float) -> torch.Tensor:
    """With something on the diagonal of the normal equations, so that large costs cost, too."""
    relative = features / times[:, None]
    square = relative.T @ relative + ridge * torch.eye(len(relative.T), dtype=relative.dtype)
    return torch.linalg.solve(square, relative.sum(0))


def as_tensor(numbers: list[Any]) -> torch.Tensor:
    """In fp64."""
    return torch.tensor(numbers, dtype=torch.float64)


def times_of(spec: Spec) -> list[float]:
    """Those of the spec, or those that its costs give."""
    if "times" in spec:
        return list(spec["times"])
    return [sum(feature * cost for feature, cost in zip(row, spec["costs"])) for row in spec["features"]]


def is_fit(spec: Spec) -> bool:
    """Times above 0 of at least as many steps as costs, which can be told apart."""
    rows, times = spec["features"], times_of(spec)
    if not rows or len(rows) != len(times) or len({len(row) for row in rows}) != 1 or min(times) <= 0:
        return False
    if len(spec.get("costs", rows[0])) != len(rows[0]):
        return False
    if not 0 < len(rows[0]) <= len(rows):
        return False
    relative = as_tensor(rows) / as_tensor(times)[:, None]
    if not relative.any(0).all():
        return False
    return torch.linalg.cond(relative / relative.norm(dim=0)).item() <= MOST_CONDITION


def fit_arguments(spec: Spec) -> tuple[Any, ...]:
    """The features of each step, and its time."""
    if not is_fit(spec):
        raise Unfit
    return as_tensor(spec["features"]), as_tensor(times_of(spec))


def draw_fit(draw: Callable[[int], tuple[list[int], int]], n_steps: int) -> Spec:
    """Draw (features, time) of some steps, until the costs can be told apart."""
    while True:
        rows, times = zip(*(draw(step) for step in range(n_steps)))
        spec = {"features": list(rows), "times": list(times)}
        if is_fit(spec):
            return spec


def exact(rng: random.Random) -> list[Spec]:
    """Times that the costs explain without an error; some of as many steps as costs."""

    def spec(n_steps: int, *costs: int) -> Spec:
        def draw(step: int) -> tuple[list[int], int]:
            row = [rng.randrange(1, 60) for _ in costs]
            return row, sum(feature * cost for feature, cost in zip(row, costs))

        return {"features": draw_fit(draw, n_steps)["features"], "costs": list(costs)}

    first, second, third = rng.sample(range(2, 20), 3)
    by_hand = {"features": [[2], [5]], "costs": [3]}
    # much of one thing and little of another, which is no reason to drop it
    rows = [[rng.randrange(4000, 20000), n_launches] for n_launches in (1, 4, 2, 1, 3)]
    unequal = {"features": rows, "costs": [2, 8]}
    return [
        by_hand,
        spec(2, first, second),
        spec(3, third, first),
        spec(3, first, second, third),
        spec(6, 9, first, 2),
        unequal,
    ]


def noisy(rng: random.Random) -> list[Spec]:
    """Times from a few us to some thousand, each up to 30% off."""

    def draw(step: int) -> tuple[list[int], int]:
        row = [3**step + rng.randrange(9), 2 * rng.randrange(1, 9), rng.randrange(1, 9)]
        exact = 4 * row[0] + 8 * row[1] + 3 * row[2]
        return row, exact * rng.choice([75, 90, 115, 130]) // 100

    by_hand = [([[1], [1]], [1, 2]), ([[1, 2], [4, 2], [99, 2]], [20, 40, 400])]
    return [{"features": rows, "times": times} for rows, times in by_hand] + [draw_fit(draw, n) for n in (5, 7)]


def negative(rng: random.Random) -> list[Spec]:
    """Steps that only a negative cost explains best."""
    some = [[[10, 2], [20, 2], [40, 9]], [[10, 2, 5], [30, 2, 1], [70, 8, 3], [90, 3, 7]]]
    return [{"features": rows, "times": [5 * row[0] - rng.choice([8, 9]) * row[1] for row in rows]} for rows in some]


NEGATIVE = "allows no cost below 0: the fit says so where the steps want one"
WITH_CONSTANT = "adds a constant to the model, which has none"

EX04_4 = Task(
    id="ex04_4",
    title="costs fitted to measured times",
    function="fit_costs",
    lines=2,
    arguments=fit_arguments,
    right=fitted,
    axes=("cost",),
    tolerance=1e-4,
    shortcuts=("pkv",),
    properties=(
        Property("exact times give back their costs", exact),
        Property("short and long steps weigh alike", noisy),
        Property("a cost may be negative", negative),
    ),
    mistakes=(
        Mistake("absolute", "fits absolute errors, so that long steps decide: divide each equation by its time",
                lambda x, t: fitted(x, t, lambda times: torch.ones_like(times))),
        Mistake("half_way", "divides by the root of the time: divide each equation by its time",
                lambda x, t: fitted(x, t, lambda times: times**-0.5)),
        Mistake("squared", "divides by the time twice: squares of (predicted / measured - 1) add up",
                lambda x, t: fitted(x, t, lambda times: times**-2)),
        Mistake("times_time", "multiplies each equation by its time: divide",
                lambda x, t: fitted(x, t, lambda times: times)),
        Mistake("features_alone", "divides the features and not the times: both sides of an equation",
                lambda features, times: solved(features / times[:, None], times)),
        Mistake("times_alone", "divides the times and not the features: both sides of an equation",
                lambda features, times: solved(features, torch.ones_like(times))),
        Mistake("logarithms", "fits logarithms of features: that is a product of powers, and the model is a sum",
                lambda features, times: solved(features.log(), times.log())),
        Mistake("log_ratios", "fits log(predicted / measured): the error asked for is predicted / measured - 1",
                log_ratios),
        Mistake("one_by_one", "fits each cost alone: together they explain a time", one_by_one),
        Mistake("one_by_one", "fits each cost alone: together they explain a time",
                lambda x, t: (t[:, None] / x).mean(0)),
        Mistake("some_steps", "uses as many steps as there are costs: all steps count",
                lambda x, t: torch.linalg.solve(x[: x.shape[1]], t[: x.shape[1]])),
        Mistake("constant", WITH_CONSTANT, lambda x, t: with_constant(x, t, relative=False)),
        Mistake("constant", WITH_CONSTANT, lambda x, t: with_constant(x, t, relative=True)),
        *(Mistake("little_dropped", "drops a thing of which there is little, as if it followed from the others",
                  functools.partial(truncated, rtol=rtol)) for rtol in (1e-2, 1e-3)),
        *(Mistake("damped", "adds something to the diagonal, which makes costs smaller: nothing is added to the model",
                  functools.partial(damped, ridge=10.0**power)) for power in range(-10, 1)),
        Mistake("clamped", NEGATIVE, lambda *a: fitted(*a).clamp(min=0)),
        Mistake("clamped", NEGATIVE, at_least_zero),
        Mistake("shapes", "mixes up shapes: features are [n_steps, n_costs], not always square, and times [n_steps]",
                lambda features, times: solved((features / times[:, None]).T, torch.ones_like(times))),
        Mistake("whole_result", "gives all that lstsq returns: the costs are its .solution",
                shows=lambda case, got: isinstance(got, list) and len(got) == 4),
    ),
)  # fmt: skip

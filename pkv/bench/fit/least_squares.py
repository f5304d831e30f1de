"""Least squares, and what fits of costs share.

>>> x = np.array([0.0, 1.0, 2.0])
>>> least_squares(lambda point: point[0] * x - [0.0, 3.0, 6.0], np.array([1.0])).round(3).tolist()
[3.0]
"""

import functools
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
DIGITS = 4  # significant ones that are stored
STEP = 0.03  # to a point's neighbours
REACH = 3.0  # from the start: of logs, a factor of 20


def least_squares(residuals: Callable[[Floats], Floats], start: Floats, far: float | None = None) -> Floats:
    """The point near `start`, of its size, where the sum of squared residuals is least.

    Squares of residuals beyond `far` count only as the residuals do; None: all are squared.

    The times of a simulated schedule jump a little wherever a cost makes two programs change places, so that there are
    many small valleys, and which one a fit ends in would be chance. So a point is judged by the mean of its neighbours,
    STEP away along each axis, and the slopes are those between them: jumps count as what they are on the whole.
    """
    from scipy import optimize  # here: who only plans need not have it, nor wait for it

    steps = STEP * np.eye(len(start))

    @functools.cache
    def seen(point: tuple[float, ...]) -> tuple[Floats, Floats]:
        """The mean and the slopes of the residuals around a point."""
        above, below = (np.stack([residuals(point + step) for step in side]) for side in (steps, -steps))
        return (above + below).mean(axis=0) / 2, ((above - below) / (2 * STEP)).T

    found = optimize.least_squares(
        lambda point: seen(tuple(point))[0],
        start,
        lambda point: seen(tuple(point))[1],
        bounds=(start - REACH, start + REACH),
        loss="linear" if far is None else "soft_l1",
        f_scale=1.0 if far is None else far,
        ftol=1e-5,
        xtol=1e-4,
    )
    best: Floats = found.x
    return best


def rounded(value: float) -> float:
    """To as many significant digits as are stored.

    >>> rounded(305.87234)
    305.9
    """
    return round(value, DIGITS - 1 - math.floor(math.log10(value))) if value else 0.0

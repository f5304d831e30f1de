"""Least squares, and what fits of costs share.

>>> x = np.array([0.0, 1.0, 2.0])
>>> least_squares(lambda point: point[0] * x - [0.0, 3.0, 6.0], np.array([1.0])).round(3).tolist()
[3.0]
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
DIGITS = 4  # significant ones that are stored


def least_squares(residuals: Callable[[Floats], Floats], start: Floats) -> Floats:
    """Levenberg and Marquardt's method: Gauss-Newton steps, held back where they would not improve."""
    point, damping = start, 1e-2
    at = residuals(point)
    for _ in range(30):
        slopes = np.stack([(residuals(point + step) - at) / 0.01 for step in 0.01 * np.eye(len(point))], axis=1)
        square = slopes.T @ slopes
        for _ in range(8):
            scaled = square + damping * np.diag(np.diag(square) + 1e-6)
            tried = point + np.clip(np.linalg.solve(scaled, -slopes.T @ at), -0.5, 0.5)
            there = residuals(tried)
            if there @ there < at @ at:
                break
            damping *= 4
        else:
            return point
        gain = 1 - (there @ there) / (at @ at)
        point, at, damping = tried, there, damping / 4
        if gain < 1e-4:
            return point
    return point


def rounded(value: float) -> float:
    """To as many significant digits as are stored.

    >>> rounded(305.87234)
    305.9
    """
    return round(value, DIGITS - 1 - math.floor(math.log10(value))) if value else 0.0

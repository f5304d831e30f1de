"""Spans: which tokens of a row a decode step reads. Plain attention reads all; a window only the last ones.

Length 100, window 40: the span is 60:100. Work is done in tiles, which begin at multiples of the tile, so in tiles of
16 the row is read from token 48 on, and the kernel masks the 12 tokens before the span.
"""

import numpy as np
import numpy.typing as npt

from pkv.plans.features import PLAIN, Features


def spans_of(lengths: npt.NDArray[np.integer], features: Features = PLAIN) -> npt.NDArray[np.int64]:
    """Return the span of each row, int64 [n_rows, 2]: begin and end, in tokens.

    >>> spans_of(np.array([100, 30]), Features(window=40)).tolist()
    [[60, 100], [0, 30]]
    """
    ends = lengths.astype(np.int64)
    begins = np.zeros_like(ends) if features.window is None else np.maximum(ends - features.window, 0)
    return np.stack([begins, ends], axis=1)


def visible_tiles(
    lengths: npt.NDArray[np.integer], tile: int, features: Features = PLAIN
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the first tile and the number of tiles that each row's span touches, both int64 [n_rows].

    The kernels find the same by `visible_tiles_of` of kernels/masks.py.

    >>> [x.tolist() for x in visible_tiles(np.array([100, 30, 0]), 16, Features(window=40))]
    [[3, 0, 0], [4, 2, 0]]
    """
    begins, ends = spans_of(lengths, features).T
    first = begins // tile
    return first, -(-ends // tile) - first

"""Masks: which tokens of a row a query sees, and what becomes of their scores. Features of kernels live here.

A kernel gets `cache.masks`. An entry that is None is a feature that is off: it is known when the kernel is compiled, so
the kernel is the same, instruction by instruction, as if the feature did not exist.
"""

from typing import Any, NamedTuple

from pkv._triton import tl, triton


class Masks(NamedTuple):
    """What kernels need of a Shape's Features. window: int32, in tokens. soft_cap: fp32, times log2(e)."""

    window: Any = None
    soft_cap: Any = None


NO_MASKS = Masks()


@triton.jit
def first_visible(length, masks):
    """Return the first token that the query of a row of `length` tokens sees."""
    return tl.maximum(length - masks.window, 0)


@triton.jit
def visible_tiles_of(length, masks, SHAPE: tl.constexpr):
    """Return the first tile, and the number of tiles, that the query of a row of `length` tokens sees.

    The planners find the same by `visible_tiles` of plans/spans.py.
    """
    first = 0
    n_tiles = tl.cdiv(length, SHAPE.BLOCK_N)
    if masks.window is not None:
        first = first_visible(length, masks) // SHAPE.BLOCK_N
        n_tiles -= first
    return first, n_tiles


@triton.jit
def scores_of(products, qk_scale, masks):
    """Return the scores, times log2(e), of the products q . k."""
    scores = products * qk_scale
    if masks.soft_cap is not None:
        scores = masks.soft_cap * tanh(scores / masks.soft_cap)
    return scores


@triton.jit
def tanh(x):
    """tanh(x), also where it is so near to x that 1 - 2 / (exp(2x) + 1) would lose its digits."""
    square = x * x
    near = x * (1 - square * (0.3333333333333333 - square * 0.13333333333333333))
    far = 1 - 2 / (tl.exp2(x * 2.8853900817779268) + 1)
    return tl.where(square < 0.01, near, far)

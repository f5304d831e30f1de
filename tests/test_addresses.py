"""Where kernels are interpreted, those of an answer read and write nothing outside of their arguments' memory."""

import pytest
import torch

from pkv._triton import INTERPRETED, tl, triton
from pkv.course.answering import simply
from pkv.course.graders.addresses import OutOfBounds, in_bounds

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="on a GPU nobody watches")
watched = in_bounds(simply)


@triton.jit
def copy_kernel(tensors, first, n_read, n_written, ROOM: tl.constexpr):
    source, target = tensors
    at = first + tl.arange(0, ROOM)
    values = tl.load(source + at, mask=at < n_read, other=-1.0)
    tl.store(target + at, values, mask=at < n_written)


def copied(n_read, n_written, first=0):
    """Three numbers copied, by a kernel that takes the tensors in a tuple."""
    target = torch.zeros(3)
    copy_kernel[(1,)]((torch.arange(3.0) + 5, target), first, n_read, n_written, ROOM=4)
    return target.tolist()


def innermost(error):
    """What was raised in the kernel; the interpreter wraps it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def test_what_masks_hold_back_is_not_read_and_not_written():
    assert watched(copied, 3, 3) == copied(3, 3) == [5, 6, 7]
    assert watched(copied, 2, 3) == [5, 6, -1]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((4, 3), "reads past the end of tensors"),
        ((3, 4), "writes past the end of tensors"),
        ((3, 3, -1), "reads"),
    ],
    ids=["read-behind", "written-behind", "read-before"],
)
def test_what_lies_outside_is_neither_read_nor_written(given, says):
    with pytest.raises(Exception, match=r"past the end|before its arguments") as caught:
        watched(copied, *given)
    error = innermost(caught.value)
    assert isinstance(error, OutOfBounds)
    assert str(error).startswith(says)


def test_nobody_watches_afterwards():
    with pytest.raises(Exception, match="past the end"):
        watched(copied, 4, 3)
    assert copied(4, 3) == [5, 6, 7]

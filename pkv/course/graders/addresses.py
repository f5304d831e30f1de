"""Does an interpreted kernel read and write only the memory that its arguments lie in?

What lies behind it may not exist, or be another's; where a mask or a later choice hides what was read, no answer shows
it. On a GPU nobody watches.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pkv._triton import INTERPRETED, tl
from pkv.course.graders.asking import is_raised
from pkv.course.tasks import Case, Mistake
from pkv.course.watching import replaced

Extent = tuple[int, int, str]  # first byte, the one after the last, whose


class OutOfBounds(IndexError):
    """A kernel reads or writes memory that none of its arguments lies in."""


def in_bounds(call: Callable[..., Any]) -> Callable[..., Any]:
    """A task's call in which an interpreted kernel raises OutOfBounds, before it reads or writes there."""

    def watched(function: Callable[..., Any], *arguments: Any) -> Any:
        if not INTERPRETED:
            return call(function, *arguments)
        interpreter: Any = sys.modules[type(tl.sum).__module__]
        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
        extents: list[Extent] = []  # of the launch under way

        def noting(executor: Any, given: Any, named: Any) -> Any:
            made = take(executor, given, named)
            extents[:] = [*extents_of(executor.arg_names, made[0]), *extents_of(made[1], made[1].values())]
            return made

        def loads(builder: Any, addresses: Any, mask: Any, *others: Any) -> Any:
            must_be_inside(addresses.data, mask.data, extents, "reads")
            return load(builder, addresses, mask, *others)

        def stores(builder: Any, addresses: Any, value: Any, mask: Any, *others: Any) -> Any:
            must_be_inside(addresses.data, mask.data, extents, "writes")
            return store(builder, addresses, value, mask, *others)

        take, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store
        with (
            replaced(executor, _init_args_hst=noting),
            replaced(builder, create_masked_load=loads, create_masked_store=stores),
        ):
            return call(function, *arguments)

    return watched


def extents_of(names: Any, values: Any) -> Iterator[Extent]:
    """Where the tensors of some arguments lie, those in tuples too."""
    for name, value in zip(names, values, strict=False):
        if isinstance(value, tuple):
            yield from extents_of([name] * len(value), value)
        elif hasattr(value, "untyped_storage"):
            storage = value.untyped_storage()
            yield storage.data_ptr(), storage.data_ptr() + storage.nbytes(), name


def must_be_inside(addresses: Any, mask: Any, extents: list[Extent], verb: str) -> None:
    """Raise OutOfBounds if an address that the mask lets through lies in no extent; it names the nearest before it."""
    lanes = np.broadcast_to(np.asarray(mask, dtype=bool), np.shape(addresses))
    asked = np.asarray(addresses)[lanes].astype(np.uint64)
    outside = np.ones(asked.shape, dtype=bool)
    for begin, end, _ in extents:
        outside &= (asked < np.uint64(begin)) | (asked >= np.uint64(end))
    if outside.any():
        first = int(asked[outside][0])
        before = max(((end, name) for _, end, name in extents if end <= first), default=(0, ""))[1]
        raise OutOfBounds(f"{verb} past the end of {before}" if before else f"{verb} before its arguments begin")


def is_alone(tensor: Any) -> bool:
    """Does its memory end where it ends?"""
    return bool(tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size())


def says_where(case: Case, got: Any) -> str:
    """What is wrong, and what to do about it."""
    return f"{got.text}: nothing of the arguments lies there, so mask what is not there, also in tl.load"


OUT_OF_BOUNDS = Mistake("out_of_bounds", says_where, shows=is_raised(OutOfBounds))

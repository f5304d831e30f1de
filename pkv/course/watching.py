"""Is a kernel launched, and does its host do without the numbers that lie on the GPU?

On a CPU nothing else tells: PyTorch answers there without a kernel, and a tensor's numbers are always at hand.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pkv._triton import tl

READS = ("tolist", "item", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__index__")
SHOWS = ("__repr__", "__format__")  # a printed tensor is not read


class HostReads(RuntimeError):
    """The host has looked at a tensor's numbers: on a GPU it waits for them."""


class NoLaunch(RuntimeError):
    """There is an answer, and no kernel was launched."""


def launched_blindly(function: Callable[..., Any], *given: Any) -> Any:
    """function(*given). Raises HostReads where it reads a tensor outside a kernel, NoLaunch where it launches none."""
    launches = paused = 0

    def pausing(old: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            nonlocal paused
            paused += 1
            try:
                return old(*args, **options)
            finally:
                paused -= 1

        return run

    def counting(old: Callable[..., Any]) -> Callable[..., Any]:
        def launcher(kernel: Any, grid: Any) -> Callable[..., Any]:
            nonlocal launches
            launches += 1
            return pausing(old(kernel, grid))  # the interpreter reads tensors to run a kernel

        return launcher

    def refusing(old: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            if not paused:
                raise HostReads(f"Tensor.{old.__name__} on the host")
            return old(tensor, *args, **options)

        return read

    with contextlib.ExitStack() as replacements:
        kind = type(tl.sum)  # kernels are of that type too
        replacements.enter_context(replaced(kind, __getitem__=counting(kind.__getitem__)))
        for names, make in ((READS, refusing), (SHOWS, pausing)):
            changed = {name: make(getattr(torch.Tensor, name)) for name in names}
            replacements.enter_context(replaced(torch.Tensor, **changed))
        answer = function(*given)
    if not launches:
        raise NoLaunch("no kernel was launched")
    return answer


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of a class or a module, replaced as long as the context lasts."""
    own = {name: vars(owner)[name] for name in values if name in vars(owner)}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in values:
            if name in own:
                setattr(owner, name, own[name])
            else:  # inherited
                delattr(owner, name)

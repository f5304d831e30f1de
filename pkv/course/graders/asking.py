"""How functions are called of which more is asked than their answer: its dtype, no loop, a kernel that is launched.

What is wrong in such a way is raised in the place of the answer, and named by a mistake that `shows` it.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from pkv._triton import tl
from pkv.course.tasks import Case, Mistake, Raised
from pkv.course.watching import NoLaunch, replaced

MANY = 100  # so many rows, tokens or states show a loop over them
Asked = Callable[..., Any]


class OtherDtype(TypeError):
    """The numbers are right, but of another dtype than asked for."""


class Loops(RuntimeError):
    """There is a loop where there should be none."""


def asked(dtype: Asked | None = None, fewer: Asked | None = None) -> Asked:
    """A task's call. dtype(*arguments): what every tensor of the answer is of; None where that is not asked.

    fewer(*arguments): the same question of fewer rows, tokens or states, which takes as many steps; None where that is
    not asked.
    """

    def call(function: Asked, *arguments: Any) -> Any:
        less = fewer(*arguments) if fewer else None
        if less is None:
            answer = function(*arguments)
        else:
            answer, n_steps = counted(function, *arguments)
            if n_steps - counted(function, *less)[1] >= MANY:
                raise Loops("there is a loop")
        wanted = dtype(*arguments) if dtype else None
        for part in answer if isinstance(answer, tuple | list) else [answer]:
            if wanted is not None and isinstance(part, torch.Tensor) and part.dtype != wanted:
                raise OtherDtype(f"expected {wanted}, got {part.dtype}".replace("torch.", ""))
        return answer

    return call


def counted(function: Asked, *arguments: Any) -> tuple[Any, int]:
    """What a function gives, and how many steps of Python are done in its file."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    n_steps = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal n_steps
        if code is None or frame.f_code.co_filename != code.co_filename:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        n_steps += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return function(*arguments), n_steps
    finally:
        sys.settrace(before)


def launched(function: Asked, *arguments: Any) -> Any:
    """A task's call: raises NoLaunch where the answer launches no kernel."""
    n_launches, kind = 0, type(tl.sum)  # of every kernel
    run = kind.run

    def run_and_count(*given: Any, **options: Any) -> Any:
        nonlocal n_launches
        n_launches += 1
        return run(*given, **options)

    with replaced(kind, run=run_and_count):
        answer = function(*arguments)
    must_launch(n_launches)
    return answer


def must_launch(n_launches: int) -> None:
    """Refuse an answer without a kernel."""
    if not n_launches:
        raise NoLaunch("no kernel was launched")


def is_raised(kind: type[Exception]) -> Callable[[Case, Any], bool]:
    """shows: that exception of a call."""
    return lambda case, got: isinstance(got, Raised) and got.kind == kind.__name__


def loop_mistake(over: str) -> Mistake:
    """A right answer with a loop in it."""
    return Mistake("loop", f"loops over {over}: the task is to do without", shows=is_raised(Loops))


def dtype_mistake(says: str) -> Mistake:
    """A right answer of a wrong dtype."""
    return Mistake("dtype", says, shows=is_raised(OtherDtype))


def kernel_mistake(kernel: str) -> Mistake:
    """An answer without a kernel."""
    says = f"launches no kernel: {kernel} is to find the answer, not PyTorch"
    return Mistake("no_kernel", says, shows=is_raised(NoLaunch))

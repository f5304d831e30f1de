"""What an exercise's task is to those that judge it: cases, the right answer, and the mistakes that people make.

A task is judged by **properties**, each one sentence that holds or does not. A property has **cases**; a case is made
from a **spec**, a small dict of numbers and lists, such as {"length": 9, "page_size": 4, "seed": 1}. So a case can be
made again anywhere, and be shrunk: smaller numbers, shorter lists.

A **mistake** is a wrong answer with a name. Who makes it answers as `wrong(*arguments)` does, or `shows` tells it from
the answer. That is how a report says what is wrong, and not only that something is.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]
CPU, GPU_OPTIONAL = "cpu", "gpu-optional"
# What no task may be solved with: the attention of others, our own, the answers; and what hides a name from a reader.
ATTENTION = (
    "scaled_dot_product_attention", "flex_attention", "multi_head_attention_forward", "MultiheadAttention", "decode",
)  # fmt: skip
EVASIVE = ("eval", "exec", "globals", "__import__", "importlib", "_getframe", "gc", "ctypes")
SHORTCUTS = (*ATTENTION, *EVASIVE, "solutions", "course")


class Unfit(ValueError):
    """A spec from which no case can be made: a shrunk one that went too far."""


@dataclass(frozen=True)
class Case:
    """One question: the arguments and the right answer to them."""

    spec: Spec
    arguments: tuple[Any, ...]
    right: Any


@dataclass(frozen=True)
class Property:
    """One sentence about a right answer, and the cases that show it. specs(rng) -> specs, the smallest first.

    of_steps: it speaks of how many steps the answer takes, and not of its numbers.
    """

    name: str
    specs: Callable[[random.Random], list[Spec]]
    of_steps: bool = False


@dataclass(frozen=True)
class Mistake:
    """A wrong answer with a name.

    says: what is wrong, in the task's words, or a function (case, got) -> that. wrong: what is answered by whoever
    makes it. shows: for mistakes whose answer cannot be known beforehand: (case, got) -> does this answer come of it,
    `got` being a value, or an exception's name as Raised.
    """

    name: str
    says: str | Callable[[Case, Any], str]
    wrong: Callable[..., Any] | None = None
    shows: Callable[[Case, Any], bool] | None = None


@dataclass(frozen=True)
class Raised:
    """An exception in place of an answer. means: what that means there."""

    kind: str
    text: str = ""
    line: int | None = None
    means: str = ""


@dataclass(frozen=True, eq=False)  # a task is itself: some of its specs are dicts, which have no hash
class Task:
    """One task of an exercise file.

    id: "ex00_1". function: the name in the exercise file. kernel: the Triton kernel to write, where the function, which
    is given, only launches it. lines: about how many to write. arguments(spec) -> what it is called with; `right` gives
    the answer to the same. axes: what the axes of a tensor in the answer are, by which a difference is located.
    tolerance: the largest difference of floats, relative to the largest right value. fixed: keys of a spec that are not
    shrunk. call(function, *arguments): where the function is not simply called.
    shortcuts: names it may not use, besides SHORTCUTS. tag: GPU_OPTIONAL tasks count only where there is a GPU.
    race: a larger case, on which a correct answer is timed beside the solution, on a GPU only. race_call: how it is
    called there, None: as everywhere.
    """

    id: str
    title: str
    function: str
    lines: int
    arguments: Callable[[Spec], tuple[Any, ...]]
    right: Callable[..., Any]
    properties: tuple[Property, ...]
    mistakes: tuple[Mistake, ...]
    points: int = 4
    axes: tuple[str, ...] = ()
    tolerance: float = 1e-5
    fixed: tuple[str, ...] = ()
    call: Callable[..., Any] | None = None
    shortcuts: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    tag: str = CPU
    seconds: float = 30.0
    kernel: str = ""
    race: Spec | None = None
    race_call: Callable[..., Any] | None = None

    @property
    def about(self) -> str:
        """How much is to be written."""
        return f"about {self.lines} line{'' if self.lines == 1 else 's'}"

    @property
    def exercise(self) -> str:
        """The exercise that it belongs to, "ex00"."""
        return self.id.partition("_")[0]

    @property
    def writes(self) -> str:
        """What the learner writes."""
        return self.kernel or self.function

    @property
    def forbidden(self) -> set[str]:
        """Names that an answer may not use: whoever calls the specification has written nothing."""
        return ({*SHORTCUTS, *self.shortcuts, f"{self.function}_spec", f"{self.writes}_spec"}) - {*self.allowed}

    def case(self, spec: Spec) -> Case:
        """The question that a spec stands for; its arguments are made anew at every call. Unfit where there is none."""
        return Case(spec, self.arguments(spec), self.right(*self.arguments(spec)))

    def specs(self, seed: int) -> list[tuple[Property, Spec]]:
        """Every case of every property; another seed gives other numbers."""
        return [
            (prop, spec)
            for index, prop in enumerate(self.properties)
            for spec in prop.specs(random.Random(f"{self.id} {index} {seed}"))
        ]

"""Which known mistake do wrong answers come of?

One that explains every answer of the task is the diagnosis. Else each property has its own: of those that explain all
of its answers, the one that explains the most wrong answers of the whole task, because a small input may show several
mistakes alike.
"""

import functools
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from pkv.course.answering import Answer, Stop
from pkv.course.comparing import agree, brief, difference, plain
from pkv.course.tasks import Case, Mistake, Property, Raised, Spec, Task

LAZY = {f"<{name}>" for name in ("generator", "map", "zip", "filter", "reversed", "enumerate", "chain", "accumulate")}
AGREE = 4.0  # two ways to the same wrong answer round otherwise: so many tolerances apart at most


def case_of(task: Task, spec: Spec) -> Case:
    """A case. What a right answer warns of on its way is no news."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return task.case(spec)


def is_shortcut(value: Any) -> bool:
    """Has a call of something ready-made been refused?"""
    return isinstance(value, Raised) and value.kind == "Shortcut"


def is_lazy(value: Any) -> bool:
    """Is it what would give values, one after another, to who asks?"""
    return isinstance(value, str) and value in LAZY


def exception_text(raised: Raised) -> str:
    """What is said of an exception, but for what it means."""
    return f"raises {brief(raised)}{f', line {raised.line}' if raised.line else ''}"


def fault_of(task: Task, case: Case, answer: Answer | Stop | None) -> str | None:
    """What is wrong with one answer; None where it is right."""
    if answer is None or isinstance(answer, Stop):
        return answer.text if answer else "no answer"
    if isinstance(answer.value, Raised):
        return exception_text(answer.value) + (f": {answer.value.means}" if answer.value.means else "")
    if answer.value is None and plain(case.right) is not None:
        return "returns None: is a `return` missing?"
    if is_lazy(answer.value):
        kind = "tensor" if isinstance(case.right, torch.Tensor) else type(case.right).__name__
        return (
            f"gives a {answer.value[1:-1]}, whose values nobody has asked for: return a{'n' * (kind == 'int')} {kind}"
        )
    fault = difference(plain(case.right), answer.value, task.tolerance, task.axes)
    if fault is None and answer.changed:
        return f"overwrites its argument {answer.changed}: make a new one, others still need it"
    return fault


def explains(task: Task, mistake: Mistake, case: Case, answer: Answer | Stop) -> bool:
    """Would who makes this mistake have answered so?"""
    if isinstance(answer, Stop) or is_shortcut(answer.value):
        return False
    fault, right = fault_of(task, case, answer), plain(case.right)
    if fault and agree(right, answer.value, task.tolerance):
        return False  # the value is right: an argument is overwritten
    if mistake.shows is not None:
        try:
            return fault is None or bool(mistake.shows(case, answer.value))
        except Exception:  # an answer of a form that nobody thought of
            return False
    wrong = wrong_answer(task, mistake, case)
    if fault and agree(right, wrong, task.tolerance):
        return False  # here the mistake makes no difference
    return agree(wrong, answer.value, task.tolerance * AGREE)


def wrong_answer(task: Task, mistake: Mistake, case: Case) -> Any:
    """What is answered by whoever makes a mistake; an exception is an answer."""
    assert mistake.wrong is not None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return plain(mistake.wrong(*task.arguments(case.spec)))
    except Exception as error:
        return Raised(type(error).__name__, str(error))


def suspects(task: Task, case: Case, answer: Answer | Stop) -> set[str]:
    """The names of all mistakes that a wrong answer could come of."""
    return {mistake.name for mistake in task.mistakes if explains(task, mistake, case, answer)}


@dataclass(frozen=True)
class Answers:
    """The cases of a task, and what was answered: as many answers as came. owners: the property of each case.

    known: what explain() has found, which takes its time.
    """

    task: Task
    owners: list[Property]
    cases: list[Case]
    given: list[Answer | Stop]
    faults: list[str | None]
    known: dict[tuple[Mistake, int], bool] = field(default_factory=dict)

    def of(self, prop: Property) -> list[int]:
        """The cases of a property."""
        return [index for index, owner in enumerate(self.owners) if owner is prop]

    def wrong(self, prop: Property) -> list[int]:
        """Those that are answered wrongly, or not at all."""
        return [index for index in self.of(prop) if self.faults[index]]

    @functools.cached_property
    def of_all(self) -> Mistake | None:
        """The first mistake that explains every answer; None where one is missing, or none does."""
        if not any(self.faults) or len(self.given) < len(self.cases):
            return None
        return next((one for one in self.task.mistakes if self.explain(one, range(len(self.cases)))), None)

    def diagnosis(self, prop: Property) -> Mistake | None:
        """The mistake that the answers to a property's cases come of; None where all are right, too."""
        mine = [index for index in self.of(prop) if index < len(self.given)]
        if not any(self.faults[index] for index in mine):
            return None
        if self.of_all:
            return self.of_all
        exceptions = {self.exception(index) for index in mine} - {None}  # not the mistake's if others raise it, too
        all_mine = [i for i in range(len(self.given)) if i in mine or self.exception(i) in exceptions]
        found = [mistake for mistake in self.task.mistakes if self.explain(mistake, all_mine)]
        return self.heaviest(found)

    def exception(self, index: int) -> tuple[str, int | None] | None:
        """Which exception is the answer, if it is one: its kind, and where it comes from."""
        answer = self.given[index]
        if isinstance(answer, Stop) or not isinstance(answer.value, Raised):
            return None
        return answer.value.kind, answer.value.line

    def explain(self, mistake: Mistake, indices: Iterable[int]) -> bool:
        """Does a mistake explain each of these answers?"""

        def explained(index: int) -> bool:
            if (mistake, index) not in self.known:
                found = explains(self.task, mistake, self.cases[index], self.given[index])
                self.known[mistake, index] = found
            return self.known[mistake, index]

        return all(map(explained, indices))

    def suspects(self, index: int) -> set[str]:
        """The names of all mistakes that a wrong answer could come of."""
        return {mistake.name for mistake in self.task.mistakes if self.explain(mistake, [index])}

    def heaviest(self, mistakes: list[Mistake]) -> Mistake | None:
        """The one that explains the most wrong answers of the whole task, the first of several."""

        def weight(mistake: Mistake) -> int:
            return sum(self.explain(mistake, [i]) for i, fault in enumerate(self.faults[: len(self.given)]) if fault)

        different = [*dict.fromkeys(mistakes)]
        return different[0] if len(different) == 1 else max(different, key=weight, default=None)

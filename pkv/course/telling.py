"""What is said of a property that does not hold: the mistake if it is known, an input, expected and got.

The input is the smallest on which the answer still fails: one that the property speaks of, and on which the answer can
come of no other mistake than before. What has been said of one property is not said again of the next.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pkv.course.answering import Answer, Stop
from pkv.course.comparing import brief
from pkv.course.diagnosing import Answers, case_of, explains, fault_of, suspects
from pkv.course.glossary import words_of
from pkv.course.likeness import Likeness
from pkv.course.shrinking import SECONDS, shrink
from pkv.course.tasks import Case, Mistake, Property, Raised, Spec, Task, Unfit

Ask = Callable[[list[Spec]], list[Answer | Stop]]
# What no input shows: the same one is answered rightly by itself.
KEPT = Mistake(
    "kept",
    "answers otherwise than when it is asked for this alone, which is right: it keeps something from call to call, "
    "such as a list that is a default argument, or gives memory that it has not written",
    shows=lambda case, got: True,
)
MOST_LOOKED_AT = 6  # wrong answers of a property, for one that shows its mistake and no other


@dataclass(frozen=True)
class Line:
    """One property: does it hold, and if not, what is wrong. diagnosis: the known mistake's name.

    words: what those of the input mean.
    """

    name: str
    holds: bool
    text: str = ""
    diagnosis: str | None = None
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shown:
    """A wrong answer as it is shown."""

    case: Case
    answer: Answer | Stop
    fault: str

    @property
    def is_value(self) -> bool:
        """Is there something to compare?"""
        return not isinstance(self.answer, Stop) and not isinstance(self.answer.value, Raised)


class Telling:
    """Lines about the properties of one task, in order. again: asks one input by itself; shrinks: also smaller ones."""

    def __init__(self, answers: Answers, again: Ask, shrinks: bool) -> None:
        self.answers, self.again, self.shrinks = answers, again, shrinks
        self.first = self.shown(0)  # what is shown first: the first case, where all is right
        self.told: dict[Any, str] = {}  # of which property it was
        self.mistakes: list[Mistake] = []
        self.keeps = self.is_right_alone()
        self.n_failing = len({owner.name for owner, fault in zip(answers.owners, answers.faults) if fault})

    def shown(self, index: int) -> Shown:
        """One answer."""
        return Shown(self.answers.cases[index], self.answers.given[index], str(self.answers.faults[index]))

    def is_right_alone(self) -> bool:
        """Is the first wrong answer right where nothing is asked before it?"""
        index = next((index for index, fault in enumerate(self.answers.faults) if fault), 0)
        if not 0 < index < len(self.answers.given) or self.answers.of_all:
            return False
        shown = self.shown(index)
        if isinstance(shown.answer, Stop):
            return False
        (alone, *_) = self.again([shown.case.spec])
        return fault_of(self.answers.task, shown.case, alone) is None

    def line_of(self, prop: Property) -> Line:
        """What there is to say of one property."""
        wrong = self.answers.wrong(prop)
        if not wrong:
            return Line(prop.name, True)
        mistake = KEPT if self.keeps else self.answers.diagnosis(prop)
        name = mistake.name if mistake else None
        self.mistakes += [mistake] if mistake else []
        is_answered = wrong[0] < len(self.answers.given)
        kind = mistake.name if mistake else self.kind_of(wrong[0])
        if kind in self.told:
            same = f'the same as under "{self.told[kind]}"' if is_answered else "not asked any more"
            return Line(prop.name, False, same, name)
        is_first = not self.told
        self.told[kind or prop.name] = prop.name
        if not is_answered:
            return Line(prop.name, False, f"not asked any more: {self.answers.faults[wrong[0]]}")
        shown = self.shown(wrong[0]) if self.keeps else self.clearest(wrong, mistake)
        if self.shrinks and shown.is_value and not self.keeps:
            like, seconds = Likeness(prop, shown.case.spec), SECONDS / self.n_failing
            shown = smallest(self.answers.task, shown, mistake, like, self.again, seconds)
        self.first = shown if is_first else self.first
        return Line(prop.name, False, text_of(shown, mistake), name, words_of(self.answers.task, shown.case.spec))

    def kind_of(self, index: int) -> Any:
        """What two properties may fail in alike; None where what differs is to be shown of each."""
        fault = self.answers.faults[index]
        if index >= len(self.answers.given):
            return fault
        answer = self.answers.given[index]
        if isinstance(answer, Stop) or answer.value is None or answer.changed:
            return fault
        return self.answers.exception(index)

    def clearest(self, wrong: list[int], mistake: Mistake | None) -> Shown:
        """The first wrong answer that can come of no other mistake, or else of the fewest."""

        def others(index: int) -> int:
            return len(self.answers.suspects(index) - {mistake.name if mistake else ""})

        if not self.shown(wrong[0]).is_value:
            return self.shown(wrong[0])
        looked_at = [index for index in wrong if index < len(self.answers.given)][:MOST_LOOKED_AT]
        return self.shown(next((index for index in looked_at if not others(index)), min(looked_at, key=others)))


def text_of(shown: Shown, mistake: Mistake | None) -> str:
    """What is said of a wrong answer."""
    text = f"for {show(shown.case.spec)}: {shown.fault}"
    if mistake is None or isinstance(shown.answer, Stop):
        return text
    says = mistake.says if isinstance(mistake.says, str) else mistake.says(shown.case, shown.answer.value)
    return f"{says}; {text}"


def smallest(task: Task, shown: Shown, mistake: Mistake | None, like: Likeness, ask: Ask, seconds: float) -> Shown:
    """The smallest case that still fails, and shows no less; the best that `seconds` allow."""
    case = shown.case
    found = {str(case.spec): shown}
    at_first = suspects(task, case, shown.answer)

    def fails(spec: Spec) -> bool:
        if not like.has(spec):
            return False
        try:
            smaller = case_of(task, spec)
        except Unfit:
            return False
        if (smaller.right is None) != (case.right is None):  # another question: is there an answer at all
            return False
        (answer, *_) = ask([spec])
        fault = fault_of(task, smaller, answer)
        if fault is None or isinstance(answer, Stop) or isinstance(answer.value, Raised):
            return False
        if mistake and not explains(task, mistake, smaller, answer):
            return False
        found[str(spec)] = Shown(smaller, answer, fault)
        return suspects(task, smaller, answer) <= at_first

    return found[str(shrink(case.spec, fails, task.fixed, seconds))]


def show(spec: Spec) -> str:
    """A spec as a message shows it."""
    return ", ".join(f"{key} = {brief(value)}" for key, value in spec.items() if key != "seed")

"""What is said of a property that does not hold: the mistake if it is known, an input, expected and got.

The input is the smallest on which the answer still fails: one that the property speaks of, and on which the answer can
come of no other mistake than before. What has been said of one property is not said again of the next.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pkv.course.answering import Answer, Stop
from pkv.course.comparing import brief, difference, plain
from pkv.course.diagnosing import Answers, case_of, exception_text, explains, fault_of, is_lazy, is_shortcut, suspects
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
MOST_LETTERS, MOST_AXES = 60, 8  # of an input that is shown once more; of an answer


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
        self.is_stopped = isinstance(answers.given[-1], Stop)
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
        if self.is_stopped and len(self.answers.given) - 1 in wrong:
            wrong = [len(self.answers.given) - 1]  # why the next properties are not asked
        unseen = self.unseen(prop, wrong[0])
        if unseen:
            return Line(prop.name, False, unseen, name)
        kind = mistake.name if mistake else self.kind_of(wrong[0])
        if kind in self.told:
            return Line(prop.name, False, f'the same as under "{self.told[kind]}"', name)
        is_first = not self.told
        self.told[kind or prop.name] = prop.name
        shown = self.shown(wrong[0]) if self.keeps else self.clearest(wrong, mistake)
        if self.shrinks and shown.is_value and not self.keeps:
            like, seconds = Likeness(prop, shown.case.spec), SECONDS / self.n_failing
            shown = smallest(self.answers.task, shown, mistake, like, self.again, seconds)
        if is_first:
            self.first = shown
        elif mistake is None and shown.is_value:
            return self.in_short(prop, shown)
        return Line(prop.name, False, text_of(shown, mistake), name, words_of(self.answers.task, shown.case.spec))

    def unseen(self, prop: Property, first: int) -> str:
        """Why of a property that fails no answer is shown; "" where one is. first: its first wrong answer."""
        if first >= len(self.answers.given):
            return "not asked any more" if self.is_stopped else str(self.answers.faults[first])
        answer = self.answers.given[first]
        if isinstance(answer, Answer) and is_shortcut(answer.value):
            return "not judged: it is not your own work, as the last line says"
        if prop.of_steps and self.shown(first).is_value and self.others_fail(prop):
            return "not judged until the numbers are right"
        return ""

    def others_fail(self, prop: Property) -> bool:
        """Does any other property?"""
        return any(fault and owner is not prop for owner, fault in zip(self.answers.owners, self.answers.faults))

    def in_short(self, prop: Property, shown: Shown) -> Line:
        """One more wrong answer without a name: in what its input is another than the first one, and one number."""
        task, spec = self.answers.task, shown.case.spec
        other = {key: value for key, value in spec.items() if self.first.case.spec.get(key) != value and key != "seed"}
        is_long = 0 < len(other) < len(spec) - 1 and len(show(spec)) > MOST_LETTERS
        where = f"{show(other)} (else as above)" if is_long else show(spec)
        right, got = plain(shown.case.right), getattr(shown.answer, "value", None)
        fault = difference(right, got, task.tolerance, task.axes or ("entry",) * MOST_AXES) or shown.fault
        return Line(prop.name, False, f"for {where}: {fault}", None, words_of(task, other if is_long else spec))

    def kind_of(self, index: int) -> Any:
        """What two properties may fail in alike; None where what differs is to be shown of each."""
        fault, answer = self.answers.faults[index], self.answers.given[index]
        if isinstance(answer, Stop) or answer.value is None or answer.changed or is_lazy(answer.value):
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
    where = f"for {show(shown.case.spec)}"
    if mistake is None or isinstance(shown.answer, Stop):
        return f"{where}: {shown.fault}"
    says = mistake.says if isinstance(mistake.says, str) else mistake.says(shown.case, shown.answer.value)
    fault = fault_beside(says, shown.answer.value) if isinstance(shown.answer.value, Raised) else shown.fault
    return f"{says}; {where}{fault and f': {fault}'}"


def fault_beside(says: str, raised: Raised) -> str:
    """What an exception adds to the mistake that is named. One of the judge's own, of no line, says the same."""
    if raised.line is None:
        return raised.text if raised.text.startswith("expected") else ""
    return "" if raised.text and raised.text in says else exception_text(raised)


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

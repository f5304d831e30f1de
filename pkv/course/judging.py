"""Is an answer right, and if not, what is the mistake?

Every property's cases are compared with the right answers. If any differs, each known mistake is tried: one that
explains every answer is the diagnosis; else, property by property, one that explains the answers there. What no known
mistake explains is shrunk to the smallest input that still fails.

ask(specs) gives the answers, in this process or in another (forks.py); what is compared is made here.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pkv.course.answering import BROKEN, NOT_STARTED, Answer, Stop
from pkv.course.comparing import agree, brief, difference, plain
from pkv.course.shrinking import SECONDS, shrink
from pkv.course.tasks import Case, Mistake, Property, Raised, Spec, Task, Unfit

Ask = Callable[[list[Spec]], list[Answer | Stop]]
AGREE = 4.0  # two ways to the same wrong answer round otherwise: so many tolerances apart at most
SHORTCUT = "shortcut"  # the diagnosis of what is not one's own work
RUNS, CORRECT = "runs", "correct"
OWN_WORK = "it is your own work: no ready-made attention, and not the task's own specification"


@dataclass(frozen=True)
class Line:
    """One property: does it hold, and if not, what is wrong. diagnosis: the known mistake's name."""

    name: str
    holds: bool
    text: str = ""
    diagnosis: str | None = None


@dataclass(frozen=True)
class Report:
    """What a task's answer is worth. diagnosis: the known mistake's name; seed repeats the cases.

    stop: why there is no answer, or not to every question.
    """

    task: Task
    state: str
    lines: tuple[Line, ...]
    seed: int
    diagnosis: str | None = None
    text: str = ""
    stop: Stop | None = None

    @property
    def is_correct(self) -> bool:
        return self.state == CORRECT


def judge(
    task: Task, ask: Ask, seed: int, used: set[str], *,
    cases: list[Case] | None = None, again: Ask | None = None, shrinks: bool = True,
) -> Report:  # fmt: skip
    """Judge the answers that `ask` gives. used: the names in the answer's source.

    cases: those of task.specs(seed), where they are known already. again: asks the smaller inputs, if not as `ask`;
    shrinks: whether any are asked.
    """
    asked = task.specs(seed)
    given = ask([spec for _, spec in asked])
    stop = next((answer for answer in given if isinstance(answer, Stop)), None)
    if stop is None and len(given) < len(asked):
        stop = Stop(BROKEN, "some answers are missing")
    if stop is not None and (stop.state == NOT_STARTED or len(given) <= 1):
        return stopped(task, stop, seed)
    cases = cases or [case_of(task, spec) for _, spec in asked]
    faults = [fault_of(task, case, answer) for case, answer in zip(cases, [*given, *[stop] * len(cases)], strict=False)]
    whole = None if stop else explain(task, cases, given, faults)
    n_failing = len({id(owner) for (owner, _), fault in zip(asked, faults) if fault})
    judged: list[Line] = []
    for prop in task.properties:
        mine = [index for index, (owner, _) in enumerate(asked) if owner is prop]
        seconds = SECONDS / n_failing if shrinks and n_failing else 0.0
        judged.append(line_of(task, prop, mine, cases, given, faults, whole, again or ask, seconds))
    judged.append(own_work(task, used, given))
    state = CORRECT if all(line.holds for line in judged) else RUNS
    named = next((line.diagnosis for line in judged[:-1] if line.diagnosis), None)
    diagnosis = judged[-1].diagnosis or (whole.name if whole else named)
    return Report(task, state, tuple(judged), seed, diagnosis, stop=stop)


def stopped(task: Task, stop: Stop, seed: int) -> Report:
    """The report of a task that gives no answer."""
    lines = tuple(Line(prop.name, False, stop.text) for prop in task.properties)
    return Report(task, stop.state, lines, seed, text=stop.text, stop=stop)


def case_of(task: Task, spec: Spec) -> Case:
    """A case. What a right answer warns of on its way is no news."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return task.case(spec)


def own_work(task: Task, used: set[str], given: list[Answer | Stop]) -> Line:
    """Is it the author's own work, by the names that it uses, and by what it has called?"""
    shortcuts = sorted(used & task.forbidden)
    if shortcuts:
        return Line(OWN_WORK, False, f"{task.function} uses {', '.join(shortcuts)}: write it yourself", SHORTCUT)
    called = next((one.value for one in given if isinstance(one, Answer) and is_shortcut(one.value)), None)
    return Line(OWN_WORK, False, called.text, SHORTCUT) if called else Line(OWN_WORK, True)


def is_shortcut(value: Any) -> bool:
    """Has a call of something ready-made been refused?"""
    return isinstance(value, Raised) and value.kind == "Shortcut"


def fault_of(task: Task, case: Case, answer: Answer | Stop | None) -> str | None:
    """What is wrong with one answer; None where it is right."""
    if answer is None or isinstance(answer, Stop):
        return answer.text if answer else "no answer"
    if isinstance(answer.value, Raised):
        line = f", line {answer.value.line}" if answer.value.line else ""
        return f"raises {brief(answer.value)}{line}"
    if answer.value is None and plain(case.right) is not None:
        return "returns None: is a `return` missing?"
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


def explain(task: Task, cases: list[Case], given: list[Answer | Stop], faults: list[str | None]) -> Mistake | None:
    """The first known mistake that explains every one of these answers; None where all are right, or none does."""
    if not given or not any(faults):
        return None
    return next((m for m in task.mistakes if all(explains(task, m, *pair) for pair in zip(cases, given))), None)


def line_of(
    task: Task, prop: Property, mine: list[int], cases: list[Case], given: list[Answer | Stop],
    faults: list[str | None], whole: Mistake | None, again: Ask, seconds: float,
) -> Line:  # fmt: skip
    """What there is to say of one property."""
    wrong = [index for index in mine if faults[index]]
    if not wrong:
        return Line(prop.name, True)
    first = wrong[0]
    case, fault = cases[first], str(faults[first])
    if first >= len(given):
        return Line(prop.name, False, f"not asked any more: {fault}")
    answer = given[first]
    if isinstance(answer, Stop):
        return Line(prop.name, False, f"for {show(case.spec)}: {fault}")
    answered = [index for index in mine if index < len(given)]
    known = whole or explain(
        task, [cases[i] for i in answered], [given[i] for i in answered], [faults[i] for i in answered]
    )
    if known is None and not isinstance(answer.value, Raised) and seconds:
        case, fault = smallest(task, case, fault, again, seconds)
    shown = f"for {show(case.spec)}: {fault}"
    if known is None:
        return Line(prop.name, False, shown)
    says = known.says if isinstance(known.says, str) else known.says(case, answer.value)
    return Line(prop.name, False, f"{says}; {shown}", known.name)


def smallest(task: Task, case: Case, fault: str, ask: Ask, seconds: float) -> tuple[Case, str]:
    """The smallest case that still fails, and what is wrong there; the best that `seconds` allow."""
    found = {str(case.spec): (case, fault)}

    def fails(spec: Spec) -> bool:
        try:
            smaller = case_of(task, spec)
        except Unfit:
            return False
        if (smaller.right is None) != (case.right is None):  # another question: is there an answer at all
            return False
        (answer, *_) = ask([spec])
        if isinstance(answer, Stop):
            return False
        text = fault_of(task, smaller, answer)
        if text:
            found[str(spec)] = smaller, text
        return text is not None

    return found[str(shrink(case.spec, fails, task.fixed, seconds))]


def show(spec: Spec) -> str:
    """A spec as a message shows it."""
    return ", ".join(f"{key} = {brief(value)}" for key, value in spec.items() if key != "seed")

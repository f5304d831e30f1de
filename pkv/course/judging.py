"""Is an answer right, and if not, what is the mistake?

Every property's cases are compared with the right answers. Where they differ, diagnosing.py names the mistake, and
telling.py says it.

ask(specs) gives the answers, in a fork of this process (children.py) or of another (forks.py); what is compared is
made here.
"""

from dataclasses import dataclass

from pkv.course.answering import BROKEN, NOT_STARTED, Answer, Stop
from pkv.course.diagnosing import Answers, case_of, fault_of, is_shortcut
from pkv.course.glossary import words_of
from pkv.course.tasks import Case, Spec, Task
from pkv.course.telling import Ask, Line, Telling, show

SHORTCUT = "shortcut"  # the diagnosis of what is not one's own work
RUNS, CORRECT = "runs", "correct"
OWN_WORK = "it is your own work: no ready-made attention, and not the task's own specification"


@dataclass(frozen=True)
class Report:
    """What a task's answer is worth. diagnosis: the known mistake's name; seed repeats the cases.

    stop: why there is no answer, or not to every question. shown: the input that is shown first, and printed: what was
    printed for it.
    """

    task: Task
    state: str
    lines: tuple[Line, ...]
    seed: int
    diagnosis: str | None = None
    text: str = ""
    stop: Stop | None = None
    shown: Spec | None = None
    printed: str = ""

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
    given = ask([spec for _, spec in asked])[: len(asked)]
    stop = next((answer for answer in given if isinstance(answer, Stop)), None)
    if stop is None and len(given) < len(asked):
        stop = Stop(BROKEN, "some answers are missing")
    if stop is not None and (stop.state == NOT_STARTED or not given or given[0] is stop):
        return stopped(task, stop, seed, asked[0][1] if stop.asked else None)
    cases = cases or [case_of(task, spec) for _, spec in asked]
    faults = [fault_of(task, case, answer) for case, answer in zip(cases, [*given, *[stop] * len(cases)], strict=False)]
    answers = Answers(task, [owner for owner, _ in asked], cases, given, faults)
    telling = Telling(answers, again or ask, shrinks)
    lines = (*(telling.line_of(prop) for prop in task.properties), own_work(task, used, given))
    worst = answers.heaviest(telling.mistakes)
    return Report(
        task, CORRECT if all(line.holds for line in lines) else RUNS, lines, seed,
        diagnosis=lines[-1].diagnosis or (worst.name if worst else None), stop=stop,
        shown=telling.first.case.spec, printed=telling.first.answer.printed,
    )  # fmt: skip


def stopped(task: Task, stop: Stop, seed: int, asked: Spec | None = None) -> Report:
    """The report of a task that gives no answer. asked: the question at which that shows."""
    text = f"for {show(asked)}: {stop.text}" if asked and stop.state == BROKEN else stop.text
    words = words_of(task, asked) if asked else ()
    lines = tuple(Line(prop.name, False, text, words=words) for prop in task.properties)
    return Report(task, stop.state, lines, seed, text=text, stop=stop, shown=asked, printed=stop.printed)


def folded(said: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """(property, text) of each; in the place of those of which the same is said, how many they are.

    >>> folded([("one", "wrong"), ("two", ""), ("three", ""), ("four", "wrong")])
    [('2 properties', 'wrong'), ('two', ''), ('three', '')]
    """
    alike: dict[str, list[tuple[str, str]]] = {}
    for name, text in said:
        alike.setdefault(text or name, []).append((name, text))
    return [same[0] if len(same) == 1 else (f"{len(same)} properties", same[0][1]) for same in alike.values()]


def own_work(task: Task, used: set[str], given: list[Answer | Stop]) -> Line:
    """Is it the author's own work, by the names that it uses, and by what it has called?"""
    shortcuts = sorted(used & task.forbidden)
    if shortcuts:
        return Line(OWN_WORK, False, f"{task.function} uses {', '.join(shortcuts)}: write it yourself", SHORTCUT)
    called = next((one.value for one in given if isinstance(one, Answer) and is_shortcut(one.value)), None)
    return Line(OWN_WORK, False, called.text, SHORTCUT) if called else Line(OWN_WORK, True)

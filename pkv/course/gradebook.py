"""Submissions graded: every task of every one, each asked in a process of its own, some of them at a time."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from pkv.course.answering import BROKEN, Answer, Stop
from pkv.course.catalogue import all_tasks
from pkv.course.diagnosing import case_of
from pkv.course.forks import Source, ask_source, close_server, names_of_source
from pkv.course.judging import Report, judge
from pkv.course.points import NO_GPU, counts_here
from pkv.course.submissions import Submission
from pkv.course.tasks import Case, Spec, Task

MISSING, NOT_COUNTED = "missing", "no GPU"
MOST_NOTES = 4


@dataclass(frozen=True)
class Mark:
    """What one task of a submission has earned. state: as in progress, or "missing", or "no GPU"."""

    task: Task
    state: str
    points: int = 0
    diagnosis: str | None = None
    text: str = ""

    @property
    def most(self) -> int:
        """The points that there are; none where the task does not count."""
        return 0 if self.state == NOT_COUNTED else self.task.points


@dataclass(frozen=True)
class Line:
    """What a submission has earned, task by task, and what its author or the teacher should look at."""

    name: str
    marks: tuple[Mark, ...]
    note: str

    @property
    def points(self) -> int:
        return sum(mark.points for mark in self.marks)

    @property
    def most(self) -> int:
        return sum(mark.most for mark in self.marks)

    @property
    def solved(self) -> int:
        return sum(mark.points > 0 for mark in self.marks)


class Grader:
    """Grades with one seed: everyone gets the same numbers, and right answers are made once."""

    def __init__(self, seed: int, seconds: float | None = None) -> None:
        self.seed, self.seconds = seed, seconds
        self.cases: dict[str, list[Case]] = {}
        self.turn = threading.Lock()  # judging takes turns: Triton's interpreter is one for all threads
        self.is_over = False

    def grade(self, submission: Submission) -> Line:
        """All tasks of one submission. Where a file does not run, its other tasks are not asked."""
        marks: list[Mark] = []
        notes = [submission.note] if submission.note else []
        dead: dict[str, Stop] = {}
        for task in all_tasks():
            source = submission.files.get(task.exercise)
            if not counts_here(task):
                marks.append(Mark(task, NOT_COUNTED, text=NO_GPU))
            elif source is None:
                marks.append(Mark(task, MISSING))
            elif isinstance(source, Stop) or task.exercise in dead:
                stop = source if isinstance(source, Stop) else dead[task.exercise]
                marks.append(Mark(task, BROKEN, text=stop.text))
                notes.append(stop.text)
            elif not self.is_over:
                report = self.report(task, source)
                if report.stop and report.stop.of_file:
                    dead[task.exercise] = report.stop
                if report.stop and report.stop.state == BROKEN:
                    notes.append(report.stop.text if report.stop.of_file else f"{task.id}: {report.stop.text}")
                marks.append(mark_of(report))
        return Line(submission.name, tuple(marks), said(notes))

    def report(self, task: Task, source: Source) -> Report:
        """Judge one task. Others judge while this one's answers are made."""
        with self.turn:
            if task.id not in self.cases:
                self.cases[task.id] = [case_of(task, spec) for _, spec in task.specs(self.seed)]

            def ask(specs: list[Spec]) -> list[Answer | Stop]:
                self.turn.release()
                try:
                    return ask_source(task, source, specs, self.seconds)
                finally:
                    self.turn.acquire()

            used = names_of_source(task, source)
            return judge(task, ask, self.seed, used, cases=self.cases[task.id], shrinks=False)


def mark_of(report: Report) -> Mark:
    """What a report is worth; the text of the first property that does not hold."""
    text = next((f"{line.name}: {line.text}" for line in report.lines if not line.holds), "")
    points = report.task.points if report.is_correct else 0
    return Mark(report.task, report.state, points, report.diagnosis, report.text or text)


def said(notes: list[str]) -> str:
    """Notes in one line, each once, not too many."""
    different = list(dict.fromkeys(notes))
    more = f"; and {len(different) - MOST_NOTES} more" if len(different) > MOST_NOTES else ""
    return "; ".join(different[:MOST_NOTES]) + more


def grade_all(
    submissions: list[Submission], grader: Grader, n_jobs: int, begins: Callable[[str], None] = lambda name: None
) -> list[Line]:
    """The line of each submission, in their order. begins(name) is told of each, as its turn comes."""
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    lines: dict[int, Line] = {}
    faults: list[BaseException] = []
    for number in range(len(submissions)):
        todo.put(number)

    def work() -> None:
        try:
            while not grader.is_over:
                number = todo.get_nowait()
                begins(submissions[number].name)
                lines[number] = grader.grade(submissions[number])
        except queue.Empty:
            pass
        except BaseException as fault:
            faults.append(fault)
            grader.is_over = True
        finally:
            close_server()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(n_jobs, len(submissions)))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        grader.is_over = True
        raise
    if faults:
        raise faults[0]
    return [lines[number] for number in range(len(submissions))]

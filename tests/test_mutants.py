"""Every plausible wrong answer fails, and its mistake is named.

`make test` asks a slice, one of each task's at least; `make test-all` asks a quarter of the others, and
`make test-nightly` the rest. Each ends with a table.
"""

import sys
from collections import Counter
from pathlib import Path

import pytest

from pkv.course.catalogue import all_tasks, find_task
from pkv.course.checking import as_text, report_apart
from pkv.course.judging import SHORTCUT
from pkv.course.telling import KEPT
from tests.conftest import TABLE_ROW

sys.path.append(str(Path(__file__).parent / "mutants"))
from mutants import all_mutants

MUTANTS = all_mutants()
TASKS = all_tasks()
LEAST_PER_TASK, LEAST = 4, 100
SLICE = 40
QUARTER = 4


def slice_of(mutants):
    """One in SLICE of each task's, the first one always."""
    seen = Counter()
    chosen = []
    for mutant in mutants:
        if seen[mutant.task] % SLICE == 0:
            chosen.append(mutant)
        seen[mutant.task] += 1
    return chosen


def judged(mutant, folder):
    """The report of a mutant, asked in a fork of the preloaded process."""
    name, text = mutant.source()
    (folder / name).write_text(text, encoding="utf-8")
    return report_apart(find_task(mutant.task), folder, seed=1)


def marks_of(number, mutant):
    """Which of the three asks it."""
    if mutant.id in IN_SLICE:
        return []
    return [pytest.mark.slow] if number % QUARTER == 0 else [pytest.mark.slow, pytest.mark.nightly]


IN_SLICE = {mutant.id for mutant in slice_of(MUTANTS)}
each_mutant = pytest.mark.parametrize(
    "mutant",
    [pytest.param(mutant, id=mutant.id, marks=marks_of(number, mutant)) for number, mutant in enumerate(MUTANTS)],
)


@each_mutant
def test_a_wrong_answer_fails_and_its_mistake_is_named(mutant, tmp_path, record_property):
    report = judged(mutant, tmp_path)
    row = {"mutants": 1, "killed": not report.is_correct, "diagnosed": report.diagnosis == mutant.diagnosis}
    row["named"] = mutant.diagnosis is not None
    record_property(TABLE_ROW, ("wrong answers to the exercises", mutant.task, row))
    assert not report.is_correct, "it passes"
    assert report.diagnosis == mutant.diagnosis, as_text(report)


def test_each_task_has_its_mutants():
    counts = {task.id: sum(mutant.task == task.id for mutant in MUTANTS) for task in TASKS}
    assert {task_id: n for task_id, n in counts.items() if n < LEAST_PER_TASK} == {}
    assert {mutant.task for mutant in MUTANTS} == {*counts}
    assert len({mutant.id for mutant in MUTANTS}) == len(MUTANTS)


def test_there_are_a_hundred_and_most_kinds_have_names():
    assert len(MUTANTS) >= LEAST
    assert sum(mutant.diagnosis is not None for mutant in MUTANTS) >= 0.9 * len(MUTANTS)


def test_each_mutant_is_another_text_and_names_a_mistake_that_there_is():
    texts = {}
    for mutant in MUTANTS:
        known = {mistake.name for mistake in find_task(mutant.task).mistakes} | {SHORTCUT, KEPT.name, None}
        assert mutant.diagnosis in known, mutant.id
        texts.setdefault(mutant.source(), []).append(mutant.id)
    assert [ids for ids in texts.values() if len(ids) > 1] == []


def test_the_slice_has_some_of_each_task():
    assert {mutant.task for mutant in slice_of(MUTANTS)} == {mutant.task for mutant in MUTANTS}
    assert len(slice_of(MUTANTS)) <= len(MUTANTS) / SLICE + len(TASKS)

"""Every plausible wrong answer fails, and its mistake is named."""

import sys
from pathlib import Path

import pytest

from pkv.course.checking import as_text, report_apart
from pkv.course.tasks import all_tasks, find_task

sys.path.append(str(Path(__file__).parent / "mutants"))
from mutants import all_mutants

MUTANTS = all_mutants()
TASKS = all_tasks()
LEAST_PER_TASK = 4


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_a_wrong_answer_fails_and_its_mistake_is_named(mutant, tmp_path):
    name, text = mutant.source()
    (tmp_path / name).write_text(text, encoding="utf-8")
    report = report_apart(find_task(mutant.task), tmp_path, seed=1)
    assert not report.is_correct, "it passes"
    assert report.diagnosis == mutant.diagnosis, as_text(report)


def test_each_task_has_its_mutants():
    counts = {task.id: sum(mutant.task == task.id for mutant in MUTANTS) for task in TASKS}
    assert {task_id: n for task_id, n in counts.items() if n < LEAST_PER_TASK} == {}
    assert len({mutant.id for mutant in MUTANTS}) == len(MUTANTS)

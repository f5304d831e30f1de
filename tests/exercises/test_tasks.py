"""The graders: one test for each property of each task; pkv.course.grading says how to choose what is graded."""

import pytest

from pkv.course.checking import failure
from pkv.course.points import NO_GPU, counts_here


def test_property(task, index, grading):
    if not counts_here(task):
        pytest.skip(NO_GPU)
    report = grading.report(task)
    line = report.lines[min(index, len(report.lines) - 1)]
    if not line.holds:
        pytest.fail(failure(report, line), pytrace=False)

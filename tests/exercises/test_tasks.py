"""The graders: one test for each property of each task; pkv.course.grading says how to choose what is graded."""

import pytest

from pkv._triton import GPU_VISIBLE
from pkv.course.points import NO_GPU
from pkv.course.tasks import GPU_OPTIONAL


def test_property(task, index, grading):
    if task.tag == GPU_OPTIONAL and not GPU_VISIBLE:
        pytest.skip(NO_GPU)
    report = grading.report(task)
    line = report.lines[index] if index < len(report.lines) else report.lines[-1]
    if not line.holds:
        from pkv.course.checking import failure

        pytest.fail(failure(report, line), pytrace=False)
    assert report.is_correct or report.state == "runs", report.text

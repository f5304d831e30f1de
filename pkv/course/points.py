"""Points: what tasks have earned, as a table, and as Gradescope's results.json."""

from dataclasses import dataclass
from typing import Any

from pkv._triton import GPU_VISIBLE
from pkv.course.tasks import GPU_OPTIONAL, Task

NO_GPU = "needs a GPU, and there is none here: it does not count"


def counts_here(task: Task) -> bool:
    """Tasks for a GPU count only where there is one."""
    return task.tag != GPU_OPTIONAL or GPU_VISIBLE


@dataclass(frozen=True)
class Graded:
    """A task, whether it is solved, and what there is to say if not."""

    task: Task
    is_correct: bool
    texts: tuple[str, ...] = ()

    @property
    def counts(self) -> bool:
        return counts_here(self.task)

    @property
    def points(self) -> int:
        return self.task.points if self.is_correct and self.counts else 0

    @property
    def most(self) -> int:
        return self.task.points if self.counts else 0


def table(graded: list[Graded]) -> str:
    """Task by task, and the sum."""
    lines = [
        f"{one.task.id:8}{one.points:3} of {one.most:<3} {one.task.title}{'' if one.counts else f' ({NO_GPU})'}"
        for one in graded
    ]
    total, most = sum(one.points for one in graded), sum(one.most for one in graded)
    return "\n".join([*lines, f"{'sum':8}{total:3} of {most}"])


def results_json(graded: list[Graded], facts: dict[str, Any] | None = None) -> dict[str, Any]:
    """Gradescope's results.json: a score, a test for each task, and facts that only teachers see."""
    tests = [
        {
            "name": f"{one.task.id} {one.task.title}",
            "number": f"{number}",
            "score": one.points,
            "max_score": one.most,
            "output": NO_GPU if not one.counts else "\n".join(one.texts) or ("" if one.is_correct else "not graded"),
            "output_format": "text",
            "tags": [one.task.tag],
            "visibility": "visible",
        }
        | ({"status": "passed" if one.is_correct else "failed"} if one.counts else {})
        for number, one in enumerate(graded, 1)
    ]
    return {"score": sum(one.points for one in graded), "tests": tests, "extra_data": facts or {}}

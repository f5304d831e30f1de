"""What a learner has written, as parts of the library: a tile loop, a merge, a queue.

    parts = learner_parts("attend_tokens", "merge")
    pkv.decode(q, cache, stage="split_kv", parts=parts)

What is not started, or not correct, is not run: the solution is, and a line says so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pkv.course.answering import BROKEN, NOT_STARTED, function_of
from pkv.course.catalogue import find_task
from pkv.course.checking import report_here
from pkv.course.coursefiles import material
from pkv.course.home import learners_folder
from pkv.course.tasks import Task
from pkv.kernels.parts import Parts
from pkv.plans.gpu import DEFAULT_TILE
from pkv.plans.shape import Shape
from pkv.stages.s1_split_kv import default_splits
from pkv.stages.sizing import sizes_for


@dataclass(frozen=True)
class Offer:
    """A task whose answer can be a part. part_of makes that of the task's function; name: what it is called."""

    task: str
    name: str
    part_of: Callable[[Any], Any]


def as_plan(build_queue: Callable[..., Any]) -> Callable[[list[int], Shape], Any]:
    """A queue of as many splits per row as split_kv takes on the GPU at hand."""

    def plan(lengths: list[int], shape: Shape) -> Any:
        gpu, tile, resident = sizes_for(None, DEFAULT_TILE, shape, "workqueue")
        n_splits = default_splits(len(lengths), shape, -(-max(lengths, default=0) // tile), gpu.n_sms, resident)
        return build_queue(lengths, n_splits, tile)

    return plan


OFFERS = {
    "attend_tokens": Offer("ex01_4", "tile loop", lambda own_loop: own_loop().attend_tokens),
    "merge": Offer("ex01_5", "merge", lambda merge_rows: merge_rows),
    "plan": Offer("ex03_1", "queue", as_plan),
}


def learner_parts(*names: str) -> Parts:
    """pkv.Parts of your own answers: "attend_tokens" (ex01_4), "merge" (ex01_5), "plan" (ex03_1); no names: all three.

    Each is checked first, as check() does it, and a line says whose is taken: yours, or where yours is not started or
    not correct the solution's. Progress is not changed.
    """
    for name in names:
        if name not in OFFERS:
            raise ValueError(f"part {name!r} is in no exercise; choose from {', '.join(OFFERS)}")
    return Parts(**{name: taken(OFFERS[name]) for name in names or OFFERS})


def taken(offer: Offer) -> Any:
    """The learner's part if it is right, else the solution's."""
    task = find_task(offer.task)
    function, fault = answer_of(task)
    if fault:
        print(f"{task.id} is {fault}: the solution's {offer.name} runs here")
        function = function_of(task, material("solutions"))
    else:
        print(f"{task.id}: your own {offer.name} runs here")
    return offer.part_of(function)


def answer_of(task: Task) -> tuple[Any, str]:
    """The learner's function, and what keeps it from being used; "" if nothing does."""
    report = report_here(task)
    if report.is_correct:
        return function_of(task, learners_folder() / "exercises"), ""
    if report.state == BROKEN:
        return None, f"broken ({report.text})"
    return None, report.state if report.state == NOT_STARTED else f"not correct (check({task.id!r}) says why)"

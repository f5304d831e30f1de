"""The smallest input that still fails: numbers made smaller, lists made shorter, as long as the fault stays."""

import time
from collections.abc import Callable, Iterator

from pkv.course.tasks import Spec

SECONDS = 1.0  # a reader waits for it


def shrink(spec: Spec, fails: Callable[[Spec], bool], fixed: tuple[str, ...] = (), seconds: float = SECONDS) -> Spec:
    """A spec that fails and of which no smaller neighbour does, or the best that `seconds` allow.

    >>> too_long = lambda spec: max(spec["lengths"], default=0) > spec["page_size"]
    >>> shrink({"lengths": [7, 30, 2], "page_size": 8}, too_long)
    {'lengths': [2], 'page_size': 1}
    """
    end = time.monotonic() + seconds
    tried = {str(spec)}
    while True:
        for smaller in neighbours(spec, fixed):
            if time.monotonic() > end:
                return spec
            if str(smaller) in tried:
                continue
            tried.add(str(smaller))
            if fails(smaller):
                spec = smaller
                break
        else:
            return spec


def neighbours(spec: Spec, fixed: tuple[str, ...]) -> Iterator[Spec]:
    """Specs with one thing smaller, the boldest first."""
    for key, value in spec.items():
        if key in fixed or key == "seed":
            continue
        for smaller in smaller_values(value):
            yield {**spec, key: smaller}


def smaller_values(value: object) -> Iterator[object]:
    """Smaller values of an int, or a list of them; never 0 or []: nothing at all is a case of its own."""
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        fewer = (1, value // 2, value - 1, value - 2)  # two less: one less may be another question
        yield from dict.fromkeys(x for x in fewer if 0 < x < value)
    elif isinstance(value, list):
        for index in range(len(value)) if len(value) > 1 else ():
            yield value[:index] + value[index + 1 :]
        for index, item in enumerate(value):
            for smaller in smaller_values(item):
                yield [*value[:index], smaller, *value[index + 1 :]]

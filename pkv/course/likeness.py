"""Is a spec still one that a property speaks of? A property says so in words only; its own cases say it in numbers.

A smaller spec belongs to a property if none of its numbers is smaller than in all of the property's own cases, and if
they compare with one another as they do in some of these: a row that ends inside a page, more programs than tiles. Of
the property's cases those count that have the same words in them (empty = "some") as the spec that is made smaller.

>>> full = Property("a full page", lambda rng: [{"length": 4 * n, "page_size": 4} for n in (1, 2, 5)])
>>> [Likeness(full, {"length": 20, "page_size": 4}).has({"length": n, "page_size": 4}) for n in (12, 11, 0)]
[True, False, False]
"""

import random
from collections.abc import Iterator
from typing import Any

from pkv.course.tasks import Property, Spec

DRAWN = 8  # times that a property's cases are made
SIGNS = {-1: "<", 0: "=", 1: ">"}


class Likeness:
    """What the cases of a property that are like `one` have in common."""

    def __init__(self, prop: Property, one: Spec) -> None:
        drawn = [spec for seed in range(DRAWN) for spec in prop.specs(random.Random(seed))]
        self.seen: set[tuple[str, str, str]] = set()
        self.least: dict[str, float] = {}
        for spec in (one, *(spec for spec in drawn if wording(spec) == wording(one))):
            self.seen |= set(comparisons(spec))
            for name, number in numbers_of(spec).items():
                self.least[name] = min(number, self.least.get(name, number))

    def has(self, spec: Spec) -> bool:
        """Is it one of them?"""
        numbers = numbers_of(spec)
        return (
            all(number >= self.least.get(name, number) for name, number in numbers.items())
            and set(comparisons(spec)) <= self.seen
        )


def wording(spec: Spec) -> dict[str, Any]:
    """What in a spec is no number."""
    return {key: value for key, value in spec.items() if isinstance(value, str | bool)}


def items_of(value: Any) -> list[float]:
    """The numbers in a value of a spec, however deep in lists."""
    if isinstance(value, list):
        return [number for item in value for number in items_of(item)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def numbers_of(spec: Spec) -> dict[str, float]:
    """The numbers of a spec by name; of a list how many there are, the least and the largest of them."""
    found: dict[str, float] = {}
    for key, value in spec.items():
        items = items_of(value)
        if isinstance(value, list):
            found[f"number of {key}"] = len(value)
            found[f"zeros in {key}"] = items.count(0)
        if items and key != "seed":
            found[f"least of {key}"], found[f"largest of {key}"] = min(items), max(items)
    return found


def comparisons(spec: Spec) -> Iterator[tuple[str, str, str]]:
    """How its numbers compare: (one, "<", other), and by how many units of another number its items take, or end in."""
    numbers = numbers_of(spec)
    units = {key: value for key, value in spec.items() if type(value) is int and value > 0 and key != "seed"}
    for key, value in spec.items():
        items = [item for item in items_of(value) if type(item) is int] if key != "seed" else []
        for unit, size in units.items():
            if unit != key and items:
                ends = sum(item % size == 0 for item in items)
                yield key, "end in a whole", f"{unit}: {'all' if ends == len(items) else 'some' if ends else 'none'}"
                taken = sum(-(-item // size) for item in items)
                yield from ((f"{key} / {unit}", sign(taken, number), name) for name, number in numbers.items())
    for name, number in numbers.items():
        yield from ((name, sign(number, other), its_name) for its_name, other in numbers.items() if its_name > name)


def sign(one: float, other: float) -> str:
    """How one number compares with another."""
    return SIGNS[(one > other) - (one < other)]

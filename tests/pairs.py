"""Of all combinations of a test's parameters as few as show every two values together.

@pytest.mark.pairs on a test with three parameters or more: `make test` runs such a few, and the others are slow, so
that `make test-all` runs them. A fault that needs two things at once (this stage, that dtype) shows at every commit.

>>> cover_pairs([(a, b, c) for a in "12" for b in "12" for c in "12"])
[('1', '1', '1'), ('1', '2', '2'), ('2', '1', '2'), ('2', '2', '1')]
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations

import pytest

Combination = tuple[Hashable, ...]


def pairs_of(combination: Combination) -> set[tuple[tuple[int, Hashable], ...]]:
    """Every two of its values, each with its place."""
    return set(combinations(enumerate(combination), 2))


def cover_pairs(all_of_them: Sequence[Combination]) -> list[Combination]:
    """Some of the combinations, which hold every pair that there is: in turn the first that adds most."""
    pairs = {combination: pairs_of(combination) for combination in all_of_them}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        chosen.append(max(pairs, key=lambda combination: len(missing & pairs[combination])))
        missing -= pairs[chosen[-1]]
    return chosen


def mark_the_others_slow(items: Sequence[pytest.Item]) -> None:
    """Of each test that is marked `pairs`; what is slow already, or needs a GPU, is left out of account."""
    tests: dict[str, dict[Combination, pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("pairs") and not any(map(item.get_closest_marker, ("slow", "gpu"))):
            values = tuple(map(repr, item.callspec.params.values()))
            tests.setdefault(item.nodeid.split("[")[0], {})[values] = item
    for combinations_of_it in tests.values():
        for values in set(combinations_of_it) - set(cover_pairs(list(combinations_of_it))):
            combinations_of_it[values].add_marker(pytest.mark.slow)

"""The few combinations that `make test` runs hold every pair, and the others are run by `make test-all`."""

import itertools

import pytest
from cases import CASES, DTYPES, ON_CPU
from pairs import cover_pairs, pairs_of

SIZES = [(2, 2, 2), (len(CASES), len(DTYPES), len(ON_CPU)), (6, 4, 8), (3, 3, 3, 3), (5, 1, 2), (4, 4), (3,)]

CONFTEST = """
import pytest
from pairs import mark_the_others_slow

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    mark_the_others_slow(items)
"""
TESTS = """
import pytest

@pytest.mark.pairs
@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("c", [1, 2])
def test_it(a, b, c): pass

@pytest.mark.slow
def test_other(): pass
"""


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_pair_is_there_in_few_combinations(sizes):
    everything = list(itertools.product(*map(range, sizes)))
    chosen = cover_pairs(everything)
    assert set(chosen) <= set(everything)
    found = set().union(*map(pairs_of, chosen))
    assert found == set().union(*map(pairs_of, everything))
    least = max((a * b for a, b in itertools.combinations(sizes, 2)), default=0)
    assert least <= len(chosen) <= 1.6 * least
    assert cover_pairs(everything) == chosen


def test_pairs_that_do_not_exist_are_not_missed():
    everything = [(a, b, c) for a, b, c in itertools.product(range(4), repeat=3) if a != b]
    found = set().union(*map(pairs_of, cover_pairs(everything)))
    assert found == set().union(*map(pairs_of, everything))


def test_what_is_not_chosen_is_slow(chosen_by):
    fast, slow = (chosen_by(mark) for mark in ("not slow", "slow"))
    assert (len(fast), len(slow)) == (4, 5)
    assert not fast & slow


@pytest.fixture
def chosen_by(tmp_path, fresh):
    """The tests that a mark chooses of one with 2 x 2 x 2 combinations, and of one that is slow anyhow."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)

    def chosen(mark):
        words = ["--collect-only", "-q", "-p", "no:cacheprovider", "-W", "ignore", "-m", mark, str(tmp_path)]
        out = fresh(f"import pytest; pytest.main({words!r})").out
        return {line for line in out.splitlines() if "::" in line}

    return chosen

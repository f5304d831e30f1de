"""How exercise 05 is judged, first part: the line of all tiles, and its equal runs."""

import random
from collections.abc import Callable
from typing import Any

import torch

from pkv.course.graders.asking import MANY, Asked, asked, dtype_mistake, loop_mistake
from pkv.course.graders.batches import rounded_up
from pkv.course.graders.ex05_capture import EX05_6
from pkv.course.graders.ex05_items import EX05_3
from pkv.course.graders.ex05_kernels import EX05_5
from pkv.course.graders.ex05_slots import EX05_4
from pkv.course.tasks import Case, Mistake, Property, Spec, Task, Unfit


def rows_arguments(spec: Spec) -> tuple[Any, ...]:
    """lengths as a tensor, and a tile."""
    if spec["tile"] < 1:
        raise Unfit
    return torch.tensor(spec["lengths"], dtype=torch.int32, device="cpu"), spec["tile"]


def line(lengths: torch.Tensor, tile: int) -> torch.Tensor:
    """Where each row begins, and where the line ends."""
    return summed([rounded_up(length, tile) for length in lengths.tolist()])


def summed(counts: list[int]) -> torch.Tensor:
    """Prefix sums with a 0 before them."""
    sums = [sum(counts[:n]) for n in range(len(counts) + 1)]
    return torch.tensor(sums, dtype=torch.int64, device="cpu").int()


def line_with(count: Callable[[int, int], int]) -> Callable[..., torch.Tensor]:
    """The line of whoever counts a row's tiles otherwise."""
    return lambda lengths, tile: summed([count(length, tile) for length in lengths.tolist()])


def is_rounded(case: Case, got: Any) -> bool:
    """Off by a rounding of fp32, in numbers that have more than its 24 bits."""
    if not isinstance(got, torch.Tensor) or got.shape != case.right.shape:
        return False
    off = (got.long() - case.right.long()).abs()
    return bool((off <= case.right.long() >> 22).all()) and int(case.right[-1]) >= 2**24


def ragged(rng: random.Random, tile: int, n_rows: int) -> list[int]:
    """Lengths around whole tiles, of one tile to five."""
    return [tile * rng.randrange(1, 6) + rng.choice([-1, 0, 1, tile // 2]) for _ in range(n_rows)]


def asked_before(call: Asked) -> Asked:
    """A call with a tensor that was asked for before, when it held half of these lengths."""

    def again(function: Asked, lengths: torch.Tensor, tile: int) -> Any:
        now = lengths.clone()
        function(lengths.copy_(now // 2), tile)
        return call(function, lengths.copy_(now), tile)

    return again


EX05_1 = Task(
    id="ex05_1",
    title="the tiles of all rows on one line",
    function="tile_line",
    lines=2,
    points=2,
    arguments=rows_arguments,
    right=line,
    call=asked_before(asked(
        dtype=lambda lengths, tile: None if lengths.all() and len(lengths) else torch.int32,
        fewer=lambda lengths, tile: (lengths[:2], tile) if len(lengths) >= 2 * MANY else None,
    )),
    axes=("entry",),
    properties=(
        Property("a part-filled tile counts, a full one once", lambda rng: [
            {"lengths": [3], "tile": 4}, {"lengths": [4, 5], "tile": 4}, {"lengths": [5, 40], "tile": 16},
            *({"lengths": ragged(rng, tile, 5), "tile": tile} for tile in (3, 16, rng.randrange(5, 99)))]),
        Property("empty rows take no tile, and no rows are a line without tiles", lambda rng: [
            {"lengths": [0], "tile": 4}, {"lengths": [], "tile": 16}, {"lengths": [5, 0, 40], "tile": 16},
            {"lengths": [0, 0, *ragged(rng, 8, 3), 0], "tile": 8}]),
        Property("rows of up to 2**31 - 64 tokens", lambda rng: [
            {"lengths": [2**20, 2**20 + 1, 2**20 - 1], "tile": 32},
            {"lengths": [2**25 + 4 * rng.randrange(1, 99) + 1, 7], "tile": 2},
            {"lengths": [2**31 - 64, 2**31 - 64, 1], "tile": 128}]),
        Property("no loop: many rows take as many steps as two", lambda rng: [
            {"lengths": ragged(rng, 16, 2 * MANY), "tile": 16}], of_steps=True),
    ),
    mistakes=(
        loop_mistake("rows"),
        dtype_mistake("gives another dtype: the line is int32"),
        Mistake("kept", "answers for lengths that the same tensor held before: they change in place between calls",
                lambda lengths, tile: line(lengths // 2, tile)),
        Mistake("floor", "rounds down: tokens of a part-filled last tile are in no tile",
                line_with(lambda n, t: n // t)),
        Mistake("one_too_many", "adds a tile where the last one is just full: n // tile + 1",
                line_with(lambda n, t: n // t + 1)),
        Mistake("empty_takes_one", "gives an empty row a tile", line_with(lambda n, t: max(rounded_up(n, t), 1))),
        Mistake("no_start", "lacks the 0 that row 0 begins at: there are n_rows + 1 entries", lambda *a: line(*a)[1:]),
        Mistake("no_end", "lacks the end of the line: there are n_rows + 1 entries", lambda *a: line(*a)[:-1]),
        Mistake("begins_twice", "has the 0 at the start twice, and not the end of the line: put a 0 before sums that "
                "have a row's own tiles in them", lambda *a: torch.cat([line(*a)[:1], line(*a)[:-1]])),
        Mistake("not_summed", "gives the tiles of each row, not their prefix sums", lambda *a: line(*a).diff()),
        Mistake("not_summed", "gives the tiles of each row, not their prefix sums",
                lambda *a: torch.cat([line(*a)[:1], line(*a).diff()])),
        Mistake("tokens", "sums tokens, not tiles", line_with(lambda n, t: n)),
        Mistake("tokens", "gives the line in tokens, not in tiles", line_with(lambda n, t: rounded_up(n, t) * t)),
        Mistake("rows_share_tiles", "rounds up after summing: then a tile has tokens of two rows",
                lambda n, t: (summed(n.tolist()).long() + t - 1) // t),
        Mistake("longest_row", "gives every row the tiles of the longest one",
                lambda n, t: summed([rounded_up(max(n.tolist(), default=0), t)] * len(n))),
        Mistake("overflow", "overflows: length + tile - 1 does not fit into 32 bits for the longest rows",
                lambda n, t: summed(((n + t - 1) // t).tolist())),
        Mistake("float32", "divides in fp32, which has 24 bits: use // on ints",
                shows=is_rounded),
        Mistake("start_units", "adds start units, as the library does: this line has tiles only",
                line_with(lambda n, t: rounded_up(n, t) + 4 if n else 0)),
    ),
)  # fmt: skip


def runs_arguments(spec: Spec) -> tuple[Any, ...]:
    """n_tiles and n_programs."""
    if spec["n_programs"] < 1:
        raise Unfit
    return spec["n_tiles"], spec["n_programs"]


def bounds(n: int, programs: int) -> list[int]:
    """The rule."""
    return [n * p // programs for p in range(programs + 1)]


def bounds_with(bound: Callable[[int, int, int], Any]) -> Callable[[int, int], list[Any]]:
    """The bounds of whoever puts bound p elsewhere: bound(tiles, programs, p)."""
    return lambda n, programs: [bound(n, programs, p) for p in range(programs + 1)]


def wrapped(number: int) -> int:
    """What 32 bits make of a number."""
    return (number + 2**31) % 2**32 - 2**31


def has_fractions(case: Case, got: Any) -> bool:
    """A bound inside a tile."""
    numbers = got.tolist() if isinstance(got, torch.Tensor) else got
    return isinstance(numbers, list) and any(isinstance(number, float) and number % 1 > 0 for number in numbers)


RUNS = [(10, 4), (30, 11), (122, 14), (29, 3), (12, 4), (7, 1), (1, 1)]
FEW = [(2, 3), (1, 7), (3, 8), (0, 3)]

EX05_2 = Task(
    id="ex05_2",
    title="equal runs of tiles",
    function="run_bounds",
    lines=1,
    points=2,
    arguments=runs_arguments,
    right=bounds,
    axes=("entry",),
    properties=(
        Property("runs differ by one tile at most, the larger ones spread", lambda rng: [
            {"n_tiles": n, "n_programs": p}
            for n, p in [*RUNS, *((rng.randrange(20, 300), rng.randrange(3, 20)) for _ in range(6))]]),
        Property("more programs than tiles", lambda rng: [{"n_tiles": n, "n_programs": p} for n, p in FEW]),
        Property("a long line on a large card", lambda rng: [
            {"n_tiles": 1000, "n_programs": 132}, {"n_tiles": 132 * rng.randrange(90, 999) + 5, "n_programs": 132},
            {"n_tiles": 2**31 - 1 - rng.randrange(999), "n_programs": 132 * rng.randrange(1, 5)}]),
    ),
    mistakes=(
        Mistake("rounded_up", "rounds the share up: the last runs have what is left, or nothing (the library's rule, "
                "where the next cut is found by a division)", bounds_with(lambda n, s, p: min(-(-n // s) * p, n))),
        Mistake("past_the_end", "rounds the share up, and does not stop at the end of the line",
                bounds_with(lambda n, s, p: -(-n // s) * p)),
        Mistake("remainder_last", "leaves the whole remainder to the last program",
                bounds_with(lambda n, s, p: n if p == s else n // s * p)),
        Mistake("remainder_first", "gives the first n_tiles % n_programs programs a tile more: the rule spreads them",
                bounds_with(lambda n, s, p: n // s * p + min(p, n % s))),
        Mistake("remainder_last_ones", "gives the last programs a tile more: the rule spreads them",
                bounds_with(lambda n, s, p: n // s * p + max(p - s + n % s, 0))),
        Mistake("remainder_lost", "drops the remainder: n_tiles // n_programs tiles for each leave tiles to nobody",
                bounds_with(lambda n, s, p: n // s * p)),
        Mistake("at_least_one", "gives every run at least a tile, so that the last ones are short or empty",
                bounds_with(lambda n, s, p: n if p == s else min(max(n // s, 1) * p, n))),
        Mistake("all_to_one", "gives all tiles to the last program", bounds_with(lambda n, s, p: n if p == s else 0)),
        Mistake("all_to_one", "gives all tiles to the first program", bounds_with(lambda n, s, p: n if p else 0)),
        Mistake("fewer_programs", "leaves out programs where there are fewer tiles: their runs are empty",
                lambda n, s: bounds(n, min(n, s)) if n else [0]),
        Mistake("sizes", "gives how many tiles each run has, not where it begins",
                lambda n, s: [(n * (p + 1) // s) - n * p // s for p in range(s)]),
        Mistake("no_end", "lacks the end of the last run: there are n_programs + 1 bounds", lambda *a: bounds(*a)[:-1]),
        Mistake("no_start", "lacks the start of the first run: there are n_programs + 1 bounds",
                lambda *a: bounds(*a)[1:]),
        Mistake("pairs", "gives pairs (begin, end): a run ends where the next begins, so one list of bounds is enough",
                lambda *a: [[*pair] for pair in zip(bounds(*a), bounds(*a)[1:])]),
        Mistake("rounded", "rounds to the nearest tile: the rule rounds down",
                bounds_with(lambda n, s, p: round(n * p / s))),
        Mistake("rounded", "rounds to the nearest tile: the rule rounds down",
                bounds_with(lambda n, s, p: (2 * n * p + s) // (2 * s))),
        Mistake("bounds_up", "rounds bounds up: the rule rounds down", bounds_with(lambda n, s, p: -(-n * p // s))),
        Mistake("float_share", "multiplies a rounded share: p * (n_tiles / n_programs) may be just below a whole one",
                bounds_with(lambda n, s, p: int(p * (n / s)))),
        Mistake("float_share", "multiplies a rounded share: p * (n_tiles / n_programs) may be just below a whole one",
                bounds_with(lambda n, s, p: n if p == s else int(p * (n / s)))),
        Mistake("float_share", "computes in fp32, which has 24 bits",
                lambda n, s: torch.linspace(0, n, s + 1, device="cpu").int()),
        Mistake("floats", "does not round: a bound is a whole number of tiles", shows=has_fractions),
        Mistake("overflow", "overflows: n_tiles * program does not fit into 32 bits",
                bounds_with(lambda n, s, p: wrapped(n * p) // s)),
    ),
)  # fmt: skip

TASKS = (EX05_1, EX05_2, EX05_3, EX05_4, EX05_5, EX05_6)

"""How task 5 of exercise 02 is judged: a kernel that finds every split's bounds from lengths on the GPU."""

import functools
import random
from typing import Any

import numpy as np
import torch

from pkv.course.graders.addresses import OUT_OF_BOUNDS, OutOfBounds, in_bounds, is_alone
from pkv.course.graders.asking import is_raised, kernel_mistake
from pkv.course.graders.batches import DEVICE, fails_for_lack
from pkv.course.graders.ex02_bounds import RULES, SAYS, Rule, by_cuts, row_bounds
from pkv.course.tasks import Case, Mistake, Property, Spec, Task, Unfit
from pkv.course.watching import HostReads, launched_blindly

BEYOND = 21  # what lies in memory after the lengths
LONG = 2_000_000_000


def batched(rule: Rule) -> Any:
    """The bounds [n_rows, n_splits, 2] of rows cut by a rule."""

    def bounds(lengths: torch.Tensor, n_splits: int, tile: int) -> torch.Tensor:
        rows = [rule(length, n_splits, tile) for length in lengths.tolist()]
        return torch.tensor(rows, dtype=torch.int64).int()

    return bounds


bounds_on_gpu = batched(row_bounds)


def right(lengths: torch.Tensor, n_splits: int, tile: int) -> torch.Tensor:
    """The library's own items."""
    found: torch.Tensor = bounds_on_gpu(lengths, n_splits, tile)
    return found


def in_32_bits(lengths: torch.Tensor, n_splits: int, tile: int, sides: str = "both") -> torch.Tensor:
    """As the right rule, where n * s wraps around: for both sides, or for one; "ends alone": also before the begin."""
    of_rows = lengths.cpu()
    n_tiles = (-(-of_rows // tile))[:, None]
    n_cuts = n_tiles.clamp(1, n_splits)
    products = n_tiles * torch.arange(n_splits + 1, dtype=torch.int32).minimum(n_cuts)
    cuts = torch.div(products, n_cuts, rounding_mode="trunc") * tile
    made = right(lengths, n_splits, tile).cpu()
    if sides in ("both", "begins"):
        made[..., 0] = cuts[:, :-1]
    if sides != "begins":
        made[..., 1] = cuts[:, 1:].minimum(of_rows[:, None])
    if sides in ("both", "ends"):
        made[..., 1] = made[..., 1].maximum(made[..., 0])
    return made


def in_floats(lengths: torch.Tensor, n_splits: int, tile: int) -> torch.Tensor:
    """As the right rule, where n * s / c is fp32, then rounded down."""
    n_tiles = (-(-lengths.cpu().long() // tile))[:, None]
    n_cuts = n_tiles.clamp(1, n_splits)
    products = n_tiles * torch.arange(n_splits + 1).minimum(n_cuts)
    cuts = (products.float() / n_cuts.float()).long() * tile
    ends = cuts[:, 1:].minimum(lengths.cpu()[:, None]).maximum(cuts[:, :-1])
    return torch.stack([cuts[:, :-1], ends], dim=2).int()


def of_rows(row_of: Any) -> Any:
    """Programs that load another row's length: row_of(program, n_splits, n_rows) -> (row, split)."""

    def bounds(lengths: torch.Tensor, n_splits: int, tile: int) -> torch.Tensor:
        n_rows = len(lengths)
        memory = lengths.tolist() + [BEYOND] * (n_rows * n_splits)
        found = []
        for program in range(n_rows * n_splits):
            row, split = row_of(program, n_splits, n_rows)
            if row >= n_rows and is_alone(lengths):
                raise OutOfBounds
            end_of_tiles = -(-memory[row] // tile) * tile
            found.append(([*row_bounds(memory[row], n_splits, tile)] + [(end_of_tiles,) * 2] * n_rows)[split])
        return torch.tensor(found, dtype=torch.int64).int().reshape(n_rows, n_splits, 2)

    return bounds


def like_longest(lengths: torch.Tensor, n_splits: int, tile: int) -> torch.Tensor:
    """split_kv's bounds."""
    n_tiles = -(-int(lengths.max()) // tile)
    cut = by_cuts(lambda n, s: [n_tiles * split // s for split in range(s + 1)])
    found: torch.Tensor = batched(cut)(lengths, n_splits, tile)
    return found


def stored(place: str) -> Any:
    """The right bounds, stored elsewhere; what nobody writes is -1."""

    def bounds(*arguments: Any) -> torch.Tensor:
        found = right(*arguments)
        made, flat = torch.full_like(found, -1), found.reshape(-1, 2)
        if place == "overlapping":
            made.view(-1)[: len(flat)] = flat[:, 0]
            made.view(-1)[len(flat)] = flat[-1, 1]
        elif place == "planes":
            made.view(-1)[:] = flat.T.reshape(-1)
        elif place == "begins":
            made[..., 0] = found[..., 0]
        elif place == "ends":
            made[..., 1] = found[..., 1]
        elif place == "filled":
            is_filled = found[..., 0] < found[..., 1]
            made[is_filled] = found[is_filled]
        elif place == "turned":
            made = found.flip(2)
        return made

    return bounds


def arguments(spec: Spec) -> tuple[Any, ...]:
    """lengths, after which other numbers lie in memory if not "alone"; n_splits, tile."""
    lengths, n_splits, tile = spec["lengths"], spec["n_splits"], spec["tile"]
    if min(n_splits, tile) < 1 or not lengths:
        raise Unfit
    memory = torch.full((len(lengths) * (n_splits + 1),), BEYOND, dtype=torch.int32)
    memory[: len(lengths)] = torch.tensor(lengths)
    given = memory.to(DEVICE)[: len(lengths)]
    return given.clone() if spec.get("alone") else given, n_splits, tile


def specs(*cases: tuple[list[int], int], tile: int = 16) -> list[Spec]:
    """Cases (lengths, n_splits)."""
    return [{"lengths": lengths, "n_splits": n_splits, "tile": tile} for lengths, n_splits in cases]


def rows(rng: random.Random, n: int, n_splits: int, least: int, most: int) -> list[int]:
    """Rows of least to most times as many tiles of 4 as splits, / 4, about."""
    return [n_splits * rng.randrange(least, most) + rng.randrange(-1, 2) for _ in range(n)]


def launched(function: Any, *arguments: Any) -> Any:
    """The answer of a kernel, which plans by itself; interpreted, it fails where it divides by 0, as no GPU does."""
    with np.errstate(divide="raise"):
        return launched_blindly(function, *arguments)


def where_too_long(case: Case, got: Any) -> str:
    """The row whose product does not fit."""
    n_splits, tile = case.spec["n_splits"], case.spec["tile"]
    tiles = [-(-length // tile) for length in case.spec["lengths"]]
    row = max(range(len(tiles)), key=tiles.__getitem__)
    return (
        f"multiplies in 32 bits: row {row} has {tiles[row]:,} tiles, and times {n_splits} splits that is "
        f"{tiles[row] * n_splits:,}, beyond {2**31 - 1:,}: make one of them int64 first"
    )


EX02_5 = Task(
    id="ex02_5",
    title="bounds found on the GPU",
    function="bounds_on_gpu",
    kernel="bounds_kernel",
    lines=10,
    points=6,
    arguments=arguments,
    right=right,
    axes=("row", "split", "bound"),
    call=in_bounds(launched),
    fixed=("alone",),
    shortcuts=("bounds_on_gpu_spec", "row_bounds_spec", "own_items", "stages"),
    properties=(
        Property(
            "each row is cut by its own length",
            lambda rng: specs(([40], 2), ([208], 5), ([480], 22), ([200, 40, 97], 2))
            + specs((rows(rng, 4, 3, 5, 20), 3), tile=4),
        ),
        Property(
            "a row of fewer tiles than splits: a tile for each split, then the empty ones",
            lambda rng: specs(([33], 5), ([5, 40, 16], 4)) + specs((rows(rng, 3, 6, 1, 4), 6), tile=4),
        ),
        Property("rows without tokens", lambda rng: specs(([0], 2), ([0, 40, 0], 3))),
        Property(
            "rows of up to two billion tokens",
            lambda rng: specs(([LONG], 5), ([33, LONG - rng.randrange(10**6)], 7), tile=4),
        ),
        Property(
            "nothing is read that lies behind the last length",
            lambda rng: [spec | {"alone": True} for spec in specs(([40], 2), ([5, 97, 33], 3))],
        ),
    ),
    mistakes=(
        Mistake("int32", where_too_long, in_32_bits),
        *(Mistake("int32", where_too_long, functools.partial(in_32_bits, sides=sides))
          for sides in ("begins", "ends", "ends alone")),
        Mistake("float", "divides with /, in fp32, which is exact only up to 2**24: use //", in_floats),
        Mistake("like_longest", "cuts every row like the longest: a program looks at the length of its own row",
                like_longest),
        Mistake("unwritten", "nothing is stored: bounds are still -1 everywhere", stored("nowhere")),
        Mistake("empty_unwritten", "stores nothing for empty splits: who reads bounds finds what lay there",
                stored("filled")),
        Mistake("overlapping", "stores at elements p and p + 1: a program has two numbers, so 2 * p and 2 * p + 1",
                stored("overlapping")),
        Mistake("planes", "stores all begins, then all ends: a program's two numbers lie side by side",
                stored("planes")),
        Mistake("begin_only", "stores only begin", stored("begins")),
        Mistake("end_only", "stores only end", stored("ends")),
        Mistake("turned", "stores (end, begin)", stored("turned")),
        Mistake("wrong_row", "takes p % n_splits for the row: a row's splits lie side by side, so it is p // n_splits",
                of_rows(lambda p, s, n: (p % s, p // s))),
        Mistake("wrong_row", "loads lengths[p]: program p belongs to row p // n_splits",
                of_rows(lambda p, s, n: (p, p % s))),
        Mistake("wrong_row", "loads lengths[split]: the row is p // n_splits", of_rows(lambda p, s, n: (p % s, p % s))),
        Mistake("first_row", "loads the first length in every program: row p // n_splits has its own",
                of_rows(lambda p, s, n: (0, p % s))),
        *(Mistake(name, SAYS[name], batched(rule)) for name, rule in RULES),
        Mistake("host_reads", "reads a tensor's numbers on the host, which waits for the GPU then: only the kernel may",
                shows=is_raised(HostReads)),
        kernel_mistake("bounds_kernel"),
        OUT_OF_BOUNDS,
        Mistake("empty_row", "fails for a row without tokens: it has no tile, and all its ranges are (0, 0)",
                shows=lambda case, got: 0 in case.spec["lengths"] and fails_for_lack(got)),
    ),
)  # fmt: skip

"""How exercise 05 is judged, fourth part: the plan found on the GPU."""

import functools
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from pkv.course.comparing import agree, plain
from pkv.course.graders.addresses import OUT_OF_BOUNDS, OutOfBounds, in_bounds, is_alone
from pkv.course.graders.batches import DEVICE, rounded_up
from pkv.course.graders.ex05_items import drawn
from pkv.course.graphs import record
from pkv.course.tasks import Case, Mistake, Property, Raised, Spec, Task, Unfit

BLOCK = 128  # lengths that the exercise's kernel looks at at a time
BEYOND = 40  # what lies in memory after the lengths


def plan_arguments(spec: Spec) -> tuple[Any, ...]:
    """lengths, before other numbers if not "alone"; n_programs, tile; the lengths of a replay, if there is one."""
    lengths, later = spec["lengths"], spec.get("later", [])
    if min(spec["tile"], spec["n_programs"]) < 1 or not lengths or len(later) not in (0, len(lengths)):
        raise Unfit
    around = torch.full((len(lengths) + 2 * BLOCK,), BEYOND, dtype=torch.int32, device="cpu")
    around[: len(lengths)] = torch.tensor(lengths, dtype=torch.int32, device="cpu")
    given = around.to(DEVICE)[: len(lengths)]
    given = given.clone() if spec.get("alone") else given
    return given, spec["n_programs"], spec["tile"], list(later)


def ask_plan(function: Any, lengths: torch.Tensor, n_programs: int, tile: int, later: list[int]) -> Any:
    """The plan that is found at once; or the one that a replay finds for later lengths."""
    if not later:
        return read_part(function(lengths, n_programs, tile))
    before = lengths.clone()
    plan, replay = record(function, lengths, n_programs, tile, guarded=lengths)
    if torch.equal(before, lengths):  # else it overwrites them, and the judge will say so
        lengths.copy_(torch.tensor(later, dtype=torch.int32, device="cpu"))
        replay()
        lengths.copy_(before)
    return read_part(plan)


def read_part(plan: Any) -> Any:
    """A plan in which row and token of runs without tiles are 0: whatever they are, nobody reads them."""
    if plan is not None and not isinstance(plan, torch.Tensor):
        raise TypeError(f"plan_on_gpu gave {type(plan).__name__}, not a tensor")
    plan = plain(plan)
    if plan is not None and plan.dim() == 2 and plan.shape[1] == 3:
        plan[plan[:, 2] == 0] = 0
    return plan


def find(
    lengths: list[int], n_programs: int, tile: int, *,
    cut: Callable[[int, int, int], int] = lambda n, s, p: n * p // s,
    is_before: Callable[[int, int, int], bool] = lambda first, end, begin: end <= begin,
    look: Callable[[list[int]], list[int]] = lambda tiles: tiles,
    written: Callable[..., list[int]] = lambda row, tile_of_row, n, *rest: [row, tile_of_row, n],
) -> torch.Tensor:  # fmt: skip
    """The first row, token and number of tiles of each run. The options are mistakes: cut(tiles, programs, p) is where
    run p begins; is_before(first tile of a row, tile after it, begin) counts rows and tiles before a run."""
    tiles = look([rounded_up(length, tile) for length in lengths])
    ends = list(accumulate(tiles))
    plan = []
    for program in range(n_programs):
        begin, end = (cut(sum(tiles), n_programs, p) for p in (program, program + 1))
        rows = [is_before(last - n, last, begin) for n, last in zip(tiles, ends)]
        first_tile = begin - sum(n for n, before in zip(tiles, rows) if before)
        row, first_tile, n = written(sum(rows), first_tile, end - begin, begin, end, tiles)
        plan.append([row, first_tile * tile, n] if n else [0, 0, 0])
    return torch.tensor(plan, dtype=torch.int64, device="cpu")


def found(lengths: torch.Tensor, n_programs: int, tile: int, later: list[int], **mistake: Any) -> torch.Tensor:
    """The plan of the lengths that there are when the kernel runs."""
    return find(later or lengths.tolist(), n_programs, tile, **mistake)


def by(**mistake: Any) -> Callable[..., torch.Tensor]:
    """found() with a mistake in it."""
    return lambda *arguments: found(*arguments, **mistake)


def by_block(
    lengths: torch.Tensor, n_programs: int, tile: int, later: list[int], *, forgets: str, pads: bool = True
) -> torch.Tensor:
    """Of whoever scans blocks of rows, and forgets to go on from the last one: its sums, its row, or with the next."""
    tiles = [rounded_up(length, tile) for length in later or lengths.tolist()]
    n_tiles, plan = sum(tiles), []
    tiles += [0] * (-len(tiles) % BLOCK if pads else 0)  # a block's lanes past the last row
    for program in range(n_programs):
        begin, end = n_tiles * program // n_programs, n_tiles * (program + 1) // n_programs
        row = before = scanned = 0
        for first in range(0, len(tiles), BLOCK):
            ends = list(accumulate(tiles[first : first + BLOCK], initial=scanned))[1:]
            is_before = [last <= begin for last in ends]
            row = sum(is_before) + (row if forgets != "row" else 0)
            before = sum(n for n, b in zip(tiles[first:], is_before) if b) + (before if forgets != "before" else 0)
            if forgets == "ends":  # the largest end of this block alone
                before = max([0, *(last for last, b in zip(ends, is_before) if b)])
            scanned = ends[-1] if forgets != "sums" else 0
            if forgets == "next":
                break
        plan.append([row, (begin - before) * tile, end - begin] if end > begin else [0, 0, 0])
    return torch.tensor(plan, dtype=torch.int64, device="cpu")


def old_plan(case: Case, got: Any) -> bool:
    """A replay that gives the plan of the lengths before: the host has read them. Or it said so."""
    if isinstance(got, Raised):
        return got.kind == "ReadByHost"
    lengths, n_programs, tile, later = case.arguments
    return bool(later) and agree(find(lengths.tolist(), n_programs, tile), got, 0.0)


def narrow(n_tiles: int, n_programs: int, program: int) -> int:
    """A cut in 32 bits; division rounds towards 0."""
    product = (n_tiles * program + 2**31) % 2**32 - 2**31
    return int(product / n_programs)


def fp32(number: float) -> float:
    """As fp32 holds it."""
    return torch.tensor(number, dtype=torch.float32, device="cpu").item()


def rounded_total(n_tiles: int, n_programs: int, program: int) -> int:
    """A cut where the tiles are added up in fp32."""
    return int(fp32(n_tiles)) * program // n_programs


def reads_beyond(lengths: torch.Tensor, n_programs: int, tile: int, later: list[int]) -> torch.Tensor:
    """The plan where numbers behind the last length count."""
    if is_alone(lengths):
        raise OutOfBounds
    return find((later or lengths.tolist()) + [BEYOND] * (-len(lengths) % BLOCK), n_programs, tile)


def rounded_product(n_tiles: int, n_programs: int, program: int) -> int:
    """A cut where tiles * program is divided in fp32."""
    return int(fp32(fp32(n_tiles * program) / n_programs))


def rounded_share(n_tiles: int, n_programs: int, program: int) -> int:
    """A cut where all is in fp32."""
    return int(fp32(fp32(fp32(n_tiles) / n_programs) * program))


def plans(*some: tuple[list[int], int, int], later: list[int] | None = None) -> list[Spec]:
    """Specs of (lengths, tile, programs)."""
    specs = [dict(zip(("lengths", "tile", "n_programs"), one)) for one in some]
    return [{**spec, "later": later} for spec in specs] if later else specs


EX05_5 = Task(
    id="ex05_5",
    title="a plan found on the GPU",
    function="plan_on_gpu",
    kernel="plan_kernel",
    lines=16,
    points=6,
    arguments=plan_arguments,
    right=found,
    call=in_bounds(ask_plan),
    fixed=("alone",),
    axes=("program", "number"),
    shortcuts=("stages",),
    properties=(
        Property("each program finds the row, the token and the tiles of its run", lambda rng: plans(
            ([40], 16, 1), ([40], 16, 3), ([5, 40], 16, 2), ([33, 20, 70, 9], 16, 3))),
        Property("empty rows, and rows that end where a run begins", lambda rng: plans(
            ([0, 5, 0, 40, 0], 16, 2), ([32, 0, 32], 16, 2), (drawn(rng, 8, 7), 8, 3))),
        Property("more programs than tiles", lambda rng: plans(([5, 0, 9], 4, 6), ([0, 0], 16, 2))),
        Property("more rows than are looked at at a time", lambda rng: plans(
            (drawn(rng, 4, 2 * BLOCK + rng.randrange(3, 40)), 4, 5), (drawn(rng, 4, BLOCK), 4, 3))),
        Property("tiles * programs beyond 32 bits", lambda rng: plans(
            ([2**30 + rng.randrange(999), 7, 2**30 - 2000], 1, 5))),
        Property("a replay of the launch finds the plan of other lengths", lambda rng: plans(
            ([5, 40, 3], 16, 2), later=[70, 0, 20 + rng.randrange(20)])),
        Property("nothing is read that lies behind the last length", lambda rng: [
            spec | {"alone": True} for spec in plans(([5, 40, 3], 16, 2), (drawn(rng, 4, BLOCK + 9), 4, 3))]),
    ),
    mistakes=(
        Mistake("host", "makes the plan on the host: a replay has that of the lengths before, and the host waits",
                shows=old_plan),
        Mistake("torch_reads", "lets PyTorch read the lengths: each of its operations is a kernel more; do it in yours",
                shows=lambda case, got: isinstance(got, Raised) and got.kind == "ReadByTorch"),
        Mistake("nothing", "writes nothing but zeros: does the kernel store its row, token and number of tiles?",
                lambda n, s, t, later: torch.zeros(s, 3, device="cpu")),
        Mistake("row_each", "gives each program a row: runs are cut from the line of all rows",
                lambda n, s, t, later: torch.tensor([
                    [p, 0, rounded_up(length, t)] if length else [0, 0, 0]
                    for p, length in enumerate([*(later or n.tolist()), *[0] * s][:s])], device="cpu")),
        Mistake("ended_row", "takes a row that ends where the run begins, or an empty one: count the rows whose end "
                "is at the begin or before it, <=", by(is_before=lambda first, end, begin: end < begin)),
        Mistake("empty_first_row", "begins the first run with row 0, also if that is empty: count the rows that end at "
                "the begin or before it, <=",
                by(is_before=lambda first, end, begin: begin > 0 and end <= begin)),
        Mistake("begins_not_ends", "counts rows that begin before the run, its own among them: count those that end",
                by(is_before=lambda first, end, begin: first <= begin)),
        Mistake("begins_not_ends", "counts rows that begin before the run, its own among them: count those that end",
                by(is_before=lambda first, end, begin: first < begin)),
        Mistake("row_before", "gives the last row that ends before the run: the one after it is the run's first",
                by(written=lambda row, first, n, *rest: [max(row - 1, 0), first, n])),
        Mistake("on_the_line", "gives the token on the line, not in its row: subtract the tiles of the rows before",
                by(written=lambda row, first, n, begin, *rest: [row, begin, n])),
        Mistake("in_tiles", "counts tiles of the row, not tokens", lambda n, s, t, later: torch.where(
            torch.tensor([False, True, False], device="cpu"), found(n, s, t, later) // t, found(n, s, t, later))),
        Mistake("end_not_count", "gives where the run ends, not how many tiles it has",
                by(written=lambda row, first, n, begin, end, tiles: [row, first, end])),
        Mistake("first_item", "gives the tiles that the run has of its first row: a run crosses rows",
                by(written=lambda row, first, n, begin, end, tiles: [
                    row, first, min(n, tiles[row] - first) if n else 0])),
        Mistake("rounded_up", "rounds the share up, as the library does: here runs are cut as in ex05_2",
                by(cut=lambda n, s, p: min(-(-n // s) * p, n))),
        Mistake("remainder_last", "leaves the whole remainder to the last program: cut at total * p // n_programs",
                by(cut=lambda n, s, p: n if p == s else n // s * p)),
        *(Mistake("remainder_shared", f"gives the {which} programs a tile more: cut at total * p // n_programs",
                  by(cut=cut)) for which, cut in (
                      ("first", lambda n, s, p: n // s * p + min(p, n % s)),
                      ("last", lambda n, s, p: n // s * p + max(p - s + n % s, 0)))),
        Mistake("remainder_lost", "drops the remainder: multiply by the program first, then divide",
                by(cut=lambda n, s, p: n // s * p)),
        Mistake("next_program", "finds the run of the next program", by(cut=lambda n, s, p: n * (p + 1) // s)),
        *(Mistake("float32", "computes in fp32, which has 24 bits: keep tiles in whole numbers", by(cut=cut))
          for cut in (rounded_total, rounded_product, rounded_share)),
        Mistake("overflow", "overflows: tiles * program does not fit into 32 bits", by(cut=narrow)),
        Mistake("first_block", f"looks at the first {BLOCK} lengths only", lambda n, s, t, later: found(
            n[:BLOCK], s, t, later[:BLOCK])),
        Mistake("first_block", f"looks for the row among the first {BLOCK} only",
                lambda *a: by_block(*a, forgets="next")),
        Mistake("sums_begin_anew", "begins the sums anew in each block of rows: tiles of the blocks before are missing",
                lambda *a: by_block(*a, forgets="sums")),
        Mistake("sums_begin_anew", "begins the sums anew in each block of rows: tiles of the blocks before are missing",
                lambda *a: by_block(*a, forgets="sums", pads=False)),
        *(Mistake("before_of_block", "forgets the tiles before the run that were counted in earlier blocks: keep "
                  "what a block adds up, also where the next one adds nothing",
                  functools.partial(by_block, forgets=forgets))
          for forgets in ("before", "ends")),
        Mistake("row_of_block", "gives the number of the row in its block: rows of the blocks before it are missing",
                lambda *a: by_block(*a, forgets="row")),
        Mistake("beyond", "reads numbers after the last length: mask the load", reads_beyond),
        OUT_OF_BOUNDS,
    ),
)  # fmt: skip

"""Stage stream_k: its kernels find the runs that are planned, and wherever rows are cut, the answer is right.

What is compiled for its launches, and how often, is in test_launch_keys.py.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from cases import DEVICE, Case, assert_ramp, batch, paged, ramp, randn
from hypothesis import given, settings
from hypothesis import strategies as st

import pkv
from pkv._triton import tl, triton
from pkv.bench.accuracy import Yardstick
from pkv.kernels.launching import strided
from pkv.kernels.masks import Masks
from pkv.kernels.tile import RowArgs
from pkv.plans.features import PLAIN, Features
from pkv.plans.gpu import GpuProfile
from pkv.stages import s5_stream_k
from pkv.stages.s5_stream_k_runs import (
    MOST_NARROW,
    RULES,
    Rules,
    cut_runs,
    find_item,
    find_row,
    find_share,
    rules_for,
)
from pkv.wording.checks import LONGEST_ROW

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

HALF = torch.float16
TILE = 16
FINEST = Rules(START_UNITS=0, LEAST_UNITS=1)  # a run of one tile is allowed


def planned(lengths, shape, n_programs, **options):
    """A plan of n_programs per KV head, whatever the card would have."""
    with mock.patch.object(s5_stream_k, "reading_programs", return_value=n_programs * shape.grid_heads):
        plan = pkv.plan(lengths, shape, stage="stream_k", gpu=GpuProfile("one SM", 86, 1), **options)
    assert plan.n_programs == n_programs
    return plan


def decoded(q, cache, n_programs, rules=None, out=None, **options):
    """Out and lse. With rules, those are the kernel's: the plan is then an upper bound, of which no item is read."""
    lengths = cache.lengths.tolist()
    if rules is None:
        return pkv.run(q, cache, planned(lengths, pkv.Shape.of(q, cache), n_programs, **options), out=out, check=True)
    plan = planned(lengths, pkv.Shape.of(q, cache), n_programs, dynamic=True, **options)
    with mock.patch.object(s5_stream_k, "rules_for", return_value=rules):
        return pkv.run(q, cache, plan, out=out, check=True)


def assert_accurate(q, cache, out, lse):
    accuracy = Yardstick(q, cache).measure(out, lse)
    assert accuracy.ok, accuracy


def assert_equal(want, got):
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b)


def as_int32(lengths):
    return np.array(lengths, dtype=np.int32)


# --- how the line is cut ---


def by_hand(lengths, n_programs, tile, rules):
    """Items as (program, row, begin, end), from the line itself, unit by unit."""
    line = []
    for row, length in enumerate(lengths):
        n_tiles = -(-length // tile)
        line += [(row, None)] * (rules.START_UNITS if n_tiles else 0) + [(row, index) for index in range(n_tiles)]
    share = max(-(-len(line) // n_programs), rules.LEAST_UNITS)
    items = []
    for program, begin in enumerate(range(0, len(line), share)):
        run = [unit for unit in line[begin : begin + share] if unit[1] is not None]
        for row in dict.fromkeys(row for row, _ in run):
            tiles = [index for r, index in run if r == row]
            items.append((program, row, tiles[0] * tile, min((tiles[-1] + 1) * tile, lengths[row])))
    return items, share


def by_plan(lengths, n_programs, tile, rules, features=PLAIN):
    """The same of cut_runs."""
    items, program_items, row_items = cut_runs(as_int32(lengths), n_programs, tile, rules, features)
    assert len(program_items) == n_programs
    assert row_items.tolist() == np.bincount(items[:, 0], minlength=len(lengths)).tolist()
    programs = np.repeat(np.arange(n_programs), program_items)
    return [(program, *item) for program, item in zip(programs.tolist(), items.tolist(), strict=True)]


LISTS = st.lists(st.one_of(st.just(0), st.integers(0, 40), st.integers(0, 900)), min_size=1, max_size=10)
ANY_RULES = st.builds(Rules, START_UNITS=st.integers(0, 6), LEAST_UNITS=st.integers(1, 9))


@settings(deadline=None, max_examples=200)
@given(lengths=LISTS, n_programs=st.integers(1, 30), tile=st.sampled_from([16, 32, 64]), rules=ANY_RULES)
def test_runs_are_those_of_the_line(lengths, n_programs, tile, rules):
    want, share = by_hand(lengths, n_programs, tile, rules)
    items = by_plan(lengths, n_programs, tile, rules)
    assert items == want
    for row, length in enumerate(lengths):  # every token once, items in order
        mine = [(begin, end) for _, r, begin, end in items if r == row]
        assert [begin for begin, _ in mine] == [0, *(end for _, end in mine)][: len(mine)]
        assert (mine[-1][1] if mine else 0) == length
    assert items == sorted(items)
    for program in range(n_programs):
        mine = [item for item in items if item[0] == program]
        n_tiles = sum(-(-(end - begin) // tile) for _, _, begin, end in mine)
        assert n_tiles <= share
        began_before = [item for item in mine if item[2] > 0]
        end_after = [item for item in mine if item[2] == 0 and item[3] < lengths[item[1]]]
        assert len(began_before) <= 1, "a second row that began before this run"
        assert len(end_after) <= 1, "a second row that ends after this run"


def test_the_example_of_the_text():
    """Lengths [5, 40], START_UNITS 1: program 0 ends with a start, so row 1 is whole in program 1."""
    items, program_items, row_items = cut_runs(as_int32([5, 40]), 2, 16, Rules(1, 1))
    assert (items.tolist(), program_items.tolist(), row_items.tolist()) == ([[0, 0, 5], [1, 0, 40]], [1, 1], [1, 1])


def test_no_rows_and_no_tokens():
    for lengths, n_programs in (([], 0), ([], 3), ([0, 0], 3)):
        items, program_items, row_items = cut_runs(as_int32(lengths), n_programs, 16)
        assert items.shape == (0, 3)
        assert (program_items.tolist(), row_items.tolist()) == ([0] * n_programs, [0] * len(lengths))


# --- the kernels find what is planned ---


class Sizes(NamedTuple):
    """All that finding a run needs of a KernelShape."""

    BLOCK_N: int


@triton.jit(do_not_specialize=["n_rows", "n_programs", "most"])
def walk_kernel(rows, found, counts, n_rows, n_programs, most, SHAPE: tl.constexpr, RULES: tl.constexpr):
    """Walks as stream_k_kernel does, and writes down (row, begin, end) of at most `most` items per program."""
    program = tl.program_id(0)
    total, share = find_share(rows, n_rows, n_programs, SHAPE, RULES)
    unit = program * share
    stop = tl.minimum(unit + share, total)
    count = 0
    if unit < stop:
        row, before = find_row(rows, n_rows, unit, SHAPE, RULES)
        while unit < stop:
            first, end, _, seen, length, after = find_item(rows, row, before, unit, stop, SHAPE, RULES)
            if first < end:
                item = found + (program * most + count) * 3
                tl.store(item, row)
                tl.store(item + 1, (seen + first) * SHAPE.BLOCK_N)
                tl.store(item + 2, tl.minimum((seen + end) * SHAPE.BLOCK_N, length))
                count += 1
            unit = tl.maximum(unit, after)
            before = after
            row += 1
    tl.store(counts + program, count)


def by_kernel(lengths, n_programs, tile, rules, window=None):
    """Items as (program, row, begin, end), found by the kernel; lengths lie two apart in memory."""
    most = len(lengths) + 1
    apart = torch.full((len(lengths), 2), 77, dtype=torch.int32, device=DEVICE)
    apart[:, 0] = torch.tensor(lengths, dtype=torch.int32)
    found = torch.full((n_programs, most, 3), -1, dtype=torch.int32, device=DEVICE)
    counts = torch.full((n_programs,), -1, dtype=torch.int32, device=DEVICE)
    args = (
        RowArgs(strided(apart[:, 0]), Masks(window)),
        found,
        counts,
        len(lengths),
        n_programs,
        most,
        Sizes(tile),
        rules,
    )
    walk_kernel[(n_programs,)](*args)
    return [
        (program, *item)
        for program, (n, items) in enumerate(zip(counts.tolist(), found.tolist(), strict=True))
        for item in items[:n]
    ]


KINDS = {
    "few": lambda rng: [rng.randrange(200) for _ in range(rng.randrange(1, 5))],
    "one": lambda rng: [rng.randrange(1, 2000)],
    "with-empty": lambda rng: [rng.choice([0, 0, rng.randrange(1, 90)]) for _ in range(rng.randrange(1, 12))],
    "all-empty": lambda rng: [0] * rng.randrange(1, 6),
    "one-long": lambda rng: [rng.choice([1, 16, 17]) for _ in range(rng.randrange(9))] + [rng.randrange(500, 900)],
    "more-rows-than-are-read-at-once": lambda rng: [rng.choice([0, 1, 33]) for _ in range(rng.randrange(9, 30))],
}
SOME_RULES = {
    "usual": Rules(SCAN_ROWS=8), "wide": Rules(SCAN_ROWS=4, WIDE=True), "no-starts": Rules(0, 1, 8),
    "long-runs": Rules(1, 9, 4),
}  # fmt: skip


def a_list(kind, seed):
    rng = random.Random(f"{kind} {seed}")
    return KINDS[kind](rng), rng.choice([1, 2, 3, 5, 11]), rng.choice([16, 32])


@pytest.mark.parametrize("rules", SOME_RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_finds_the_planned_items(kind, rules):
    for seed in range(2):
        case = *a_list(kind, seed), SOME_RULES[rules]
        assert by_kernel(*case) == by_plan(*case), case
        assert by_kernel(*case, window=20) == by_plan(*case, Features(20)), case


@pytest.mark.gpu
@pytest.mark.parametrize("rules", [*SOME_RULES, "default"])
def test_the_kernel_finds_the_planned_items_of_a_thousand_lists(rules):
    rng = random.Random(rules)
    for seed in range(1000):
        lengths, n_programs, tile = a_list(rng.choice(list(KINDS)), seed)
        if seed % 5 == 0:  # as many as a card runs
            lengths, n_programs = [rng.choice([0, rng.randrange(1, 70_000)]) for _ in range(300)], 1184
        case = lengths, n_programs, tile, SOME_RULES.get(rules, RULES)
        window = rng.choice([None, 1, 16, 100, 4096])
        assert by_kernel(*case, window) == by_plan(*case, Features(window)), (case, window)


HUGE = [LONGEST_ROW] * 15  # 2,013,265,876 units of a tile each
TOO_HUGE = [LONGEST_ROW, 0, 5, *[LONGEST_ROW] * 16]


@pytest.mark.parametrize("n_programs", [1, 3])
def test_as_many_units_as_32_bits_count(n_programs):
    assert rules_for(len(HUGE), LONGEST_ROW, TILE) == RULES
    case = HUGE, n_programs, TILE, RULES
    assert by_kernel(*case) == by_plan(*case)


@pytest.mark.parametrize("n_programs", [2, 3])
def test_more_units_than_32_bits_count(n_programs):
    """In 64 bits they are right. In 32 they would not be, or WIDE would be for nothing."""
    wide = rules_for(len(TOO_HUGE), LONGEST_ROW, TILE)
    assert wide == RULES._replace(WIDE=True)
    assert by_kernel(TOO_HUGE, n_programs, TILE, wide) == by_plan(TOO_HUGE, n_programs, TILE, wide)
    if pkv.INTERPRETED:  # numpy sees the overflow, a GPU does not
        with pytest.raises(triton.runtime.errors.InterpreterError, match="out of bounds for int32"):
            by_kernel(TOO_HUGE, n_programs, TILE, RULES)
    else:
        assert by_kernel(TOO_HUGE, n_programs, TILE, RULES) != by_plan(TOO_HUGE, n_programs, TILE, RULES)


@pytest.mark.parametrize("n_rows", [1, 2**12])
@pytest.mark.parametrize("tile", [16, 64])
def test_where_counting_gets_wide(n_rows, tile):
    """Exactly where the rows' tiles and starts exceed the bound: one token more is one tile more for each row."""
    tiles = MOST_NARROW // n_rows - RULES.START_UNITS
    assert n_rows * (tiles + RULES.START_UNITS) == MOST_NARROW
    assert rules_for(n_rows, tiles * tile, tile) == RULES
    assert rules_for(n_rows, tiles * tile + 1, tile) == RULES._replace(WIDE=True)
    largest_card, most_programs_per_sm = 1000, 32
    assert MOST_NARROW + largest_card * most_programs_per_sm < 2**31, "the last run may end beyond all units"


@triton.jit
def show_range(query, cache, row, grid_head, begin, end, qk_scale, SHAPE: tl.constexpr):
    """Stands for attend_tokens: a program's token range as its state."""
    begins = tl.zeros([SHAPE.BLOCK_D, SHAPE.BLOCK_H], tl.float32) + begin
    return begins, tl.zeros([SHAPE.BLOCK_H], tl.float32) + end


class Kept:
    """Stands for a kernel: keeps what it was launched with."""

    def __init__(self):
        self.args = []

    def __getitem__(self, grid):
        return lambda *args, **options: self.args.append((grid, args))


@pytest.mark.skipif(not pkv.INTERPRETED, reason="tl.zeros([SHAPE.BLOCK_D, ...]) does not compile")
@pytest.mark.parametrize("n_programs", [1, 2, 5, 12])
def test_each_state_lies_where_the_merge_looks_for_it(n_programs, monkeypatch, nan_memory):
    """Whole rows in the result. Of program p: in slot 2p a row that began before it, in 2p + 1 one that ends after."""
    merges = Kept()
    monkeypatch.setattr(s5_stream_k, "merge_runs_kernel", merges)
    lengths = [0, 200, 5, 0, 33, 400, 16, 0]
    q, cache = batch(Case("ranges", lengths, n_q_heads=2, n_kv_heads=1, head_dim=16), torch.float32)
    plan = planned(lengths, pkv.Shape.of(q, cache), n_programs, dynamic=True)
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:2], math.nan)
    s5_stream_k.launch(q, cache, plan, 1.0, out, lse, pkv.Parts(attend_tokens=show_range))
    ((_, args),) = merges.args
    partials = args[1]
    want, want_lse = torch.full_like(out, math.nan), torch.full_like(lse, math.nan)
    slots, slot_lses = torch.full_like(partials.out.ptr, math.nan), torch.full_like(partials.lse.ptr, math.nan)
    for program, row, begin, end in by_plan(lengths, n_programs, TILE, RULES):
        if begin == 0 and end == lengths[row]:
            want[row], want_lse[row] = begin, end
        else:
            slots[2 * program + (begin == 0)], slot_lses[2 * program + (begin == 0)] = begin, end
    pairs = [(out, want), (lse, want_lse), (partials.out.ptr, slots), (partials.lse.ptr, slot_lses)]
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


# --- the workspace ---


def test_the_workspace_depends_on_the_number_of_programs_alone(monkeypatch):
    """Not on lengths and not on the number of rows: a graph that was captured keeps it."""
    sizes = set()
    monkeypatch.setattr(s5_stream_k, "stream_k_kernel", Kept())
    for lengths in ([1], [4000], [0, 5], [16] * 40, [4000] * 3 + [0] * 100):
        q, cache = batch(Case("workspace", lengths, n_kv_heads=1, head_dim=16))
        for dynamic in (True, False):
            monkeypatch.setattr(s5_stream_k, "merge_runs_kernel", kept := Kept())
            plan = planned(lengths, pkv.Shape.of(q, cache), 7, dynamic=dynamic)
            s5_stream_k.launch(q, cache, plan, 1.0, torch.empty_like(q), torch.empty(q.shape[:2]))
            grids = {grid for grid, _ in kept.args}
            assert all(n_programs <= 7 * plan.shape.grid_heads for (n_programs,) in grids)
            sizes |= {tuple(x.ptr.nbytes for x in args[1]) for _, args in kept.args}
    assert sizes == {(2 * 7 * 4 * 16 * 4, 2 * 7 * 4 * 4)}


# --- the answer ---

RAMPS = {
    "ragged": ([300, 0, 17, 5, 64], [1, 3, 8]),
    "one-row": ([260], [1, 2, 15]),
    "more-programs-than-tiles": ([20, 5], [40]),
    "all-rows-cut-among-empty-ones": ([0, 0, 120, 0, 133, 0], [6]),
    "cuts-at-starts-of-rows": ([32, 32, 32], [3]),  # 18 units, of which 6 in a run
    "cut-between-start-and-first-tile": ([32, 32, 64], [2]),  # 6 + 4 of 20 units
    "cuts-inside-starts": ([32, 32, 32, 32], [2, 5]),  # after 12 and 5 units
    "rows-of-nothing-but-a-start": ([1] * 9, [4]),
    "more-rows-than-are-read-at-once": ([1] * 127 + [0, 40, 3, 0, 60], [2]),
}


@pytest.mark.parametrize(("lengths", "counts"), RAMPS.values(), ids=RAMPS)
def test_ramp(lengths, counts, nan_memory):
    q, cache = ramp(lengths, n_q_heads=2, n_kv_heads=1, head_dim=16)
    for n_programs in counts:
        assert_ramp(*decoded(q, cache, n_programs), lengths)


@pytest.mark.parametrize(
    ("name", "n_programs"), [("cuts-at-starts-of-rows", 3), ("cut-between-start-and-first-tile", 2)], ids=str
)
def test_cuts_that_need_no_merge(name, n_programs, nan_memory):
    """A plan of these lengths merges nothing. A dynamic one launches the merge, which finds nothing to do."""
    lengths, _ = RAMPS[name]
    q, cache = ramp(lengths, n_q_heads=2, n_kv_heads=1, head_dim=16)
    plan = planned(lengths, pkv.Shape.of(q, cache), n_programs)
    assert plan.n_items == len(lengths)
    assert [launch.kernel for launch in plan.launches] == ["decode"]
    assert_ramp(*decoded(q, cache, n_programs, rules=RULES), lengths)


def test_a_cut_before_the_first_tile_of_a_row_that_is_cut_again(nan_memory):
    """40 units, 10 in a run: the first cut lies at tile 0 of row 1, and two more inside of it."""
    q, cache = ramp([32, 480], n_q_heads=2, n_kv_heads=1, head_dim=16)
    assert_ramp(*decoded(q, cache, 4), [32, 480])


def test_all_rows_may_be_cut_or_empty():
    plan = planned(RAMPS["all-rows-cut-among-empty-ones"][0], pkv.Shape(2, 1, 16, 16, "float16"), 6)
    assert (np.diff(plan.partial_offsets) != 1).all()


@pytest.mark.parametrize("page_size", [1, 3, 48, 544])
def test_page_sizes(page_size, nan_memory):
    q, cache = ramp([100, 33], page_size=page_size, n_q_heads=2, n_kv_heads=1)
    assert_ramp(*decoded(q, cache, 4), [100, 33])


@pytest.mark.parametrize(
    ("n_q_heads", "n_kv_heads", "dtype"),
    [(6, 3, HALF), (12, 1, torch.bfloat16), (40, 2, HALF), (71, 1, HALF), (6, 3, torch.float32), (5, 1, torch.float32)],
    ids=str,
)
def test_head_probe(n_q_heads, n_kv_heads, dtype, nan_memory):
    """V of KV head h is h, so query head i gets i // group, of rows that are cut and of rows that are not."""
    k = randn(2, 90, n_kv_heads, 16, dtype=dtype)
    v = torch.arange(n_kv_heads, dtype=dtype).view(1, 1, -1, 1).expand(k.shape)
    q = randn(2, n_q_heads, 16, seed=3, dtype=dtype).to(DEVICE)
    cache = paged(k, v, [90, 20])
    out, lse = decoded(q, cache, 3)
    want = torch.arange(n_q_heads) // (n_q_heads // n_kv_heads)
    torch.testing.assert_close(out.cpu().float(), want.float()[None, :, None].expand(out.shape), atol=5e-3, rtol=0)
    assert_accurate(q, cache, out, lse)


@pytest.mark.parametrize(("head_dim", "tile"), [(13, 16), (80, 32), (128, 64), (256, 16), (256, 32)])
def test_sizes(head_dim, tile, nan_memory):
    q, cache = batch(Case("sizes", [150, 7, 66], n_q_heads=3, n_kv_heads=1, head_dim=head_dim))
    assert_accurate(q, cache, *decoded(q, cache, 3, tile=tile))


def test_layouts_and_strides(nan_memory):
    case = Case("layouts", [90, 7, 33], n_q_heads=4, n_kv_heads=2)
    q, cache = batch(case)
    want = decoded(q, cache, 4)
    assert_accurate(q, cache, *want)
    assert_equal(want, decoded(q, batch(case, layout="HND")[1], 4))
    for view in (q.permute(1, 2, 0).contiguous().permute(2, 0, 1), q.permute(2, 0, 1).contiguous().permute(1, 2, 0)):
        assert not view.is_contiguous()
        assert_equal(want, decoded(view, cache, 4))
    wide = torch.full((3, 8, 128), 7.0, dtype=q.dtype, device=DEVICE)
    out = wide[:, ::2, ::2]
    assert_equal(want, decoded(q, cache, 4, out=out))
    out.fill_(7.0)
    assert (wide == 7.0).all(), "written outside of out"


def test_counting_in_64_bits_changes_no_bit(nan_memory):
    q, cache = batch(Case("wide", [90, 0, 7, 66], n_q_heads=2, n_kv_heads=1))
    assert_equal(decoded(q, cache, 5, rules=RULES), decoded(q, cache, 5, rules=RULES._replace(WIDE=True)))


# --- the merge ---


@pytest.mark.parametrize("n_items", [2, 3, 4, 5, 32, 33, 257])
def test_a_row_of_so_many_items(n_items, nan_memory):
    """In blocks of 4, of 32, and of as many as there are programs, 256 at most: 257 items take two turns.

    One tile to an item. The last tokens count by far the most, so that the second turn changes the maximum.
    """
    length = TILE * n_items - 3
    k, v = (randn(1, length, 1, 16, seed=seed, dtype=HALF) for seed in (1, 2))
    k[:, -9:] += 4.0
    q, cache = randn(1, 2, 16, seed=3, dtype=HALF).abs().to(DEVICE), paged(k, v, [length])
    assert len(by_plan([length], n_items, TILE, FINEST)) == n_items
    out, lse = decoded(q, cache, n_items, rules=FINEST)
    assert_accurate(q, cache, out, lse)
    last = v[0, -9:].float().mean().item()
    assert abs(out.float().mean().item() - last) < 0.2, "the last tokens do not count the most"


@pytest.mark.parametrize(
    ("n_q_heads", "n_kv_heads", "head_dim", "n_items"),
    [
        *((*heads, n_items) for heads in [(3, 1, 256), (24, 2, 13)] for n_items in (3, 20)),
        (40, 1, 80, 3),
        (3, 1, 256, 40),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(24, 2, 13, 40), (40, 1, 80, 20), (40, 1, 80, 40)]),
    ],
)
def test_blocks_of_the_merge(n_q_heads, n_kv_heads, head_dim, n_items, nan_memory):
    """Slices of heads and dims that exist, of groups that end inside a block; an empty and a whole row beside."""
    case = Case("slices", [0, TILE * (n_items - 1), 16], n_q_heads=n_q_heads, n_kv_heads=n_kv_heads, head_dim=head_dim)
    q, cache = batch(case)
    wide = torch.full((3, 2 * n_q_heads, head_dim + 3), 7.0, dtype=q.dtype, device=DEVICE)
    out = wide[:, ::2, :head_dim]
    assert_accurate(q, cache, *decoded(q, cache, n_items, rules=FINEST, out=out))
    out.fill_(7.0)
    assert (wide == 7.0).all(), "written outside of out"


# --- plans ---


@pytest.mark.parametrize("n_programs", [3, 5])
def test_a_dynamic_plan_serves_lengths_that_change(n_programs, nan_memory):
    """Even where it cuts no row itself, as 3 programs do."""
    q, cache = batch(Case("capacity", [96, 96, 96], n_q_heads=2, n_kv_heads=1, head_dim=16))
    plan = planned([96, 96, 96], pkv.Shape.of(q, cache), n_programs, dynamic=True)
    for lengths in ([96, 96, 96], [95, 0, 3], [0, 17, 33], [1, 1, 1], [0, 96, 0], [0, 0, 0]):
        cache.lengths.copy_(torch.tensor(lengths))
        assert_accurate(q, cache, *pkv.run(q, cache, plan, check=True))


CHANGES = {
    "another-cut": ({"items": [[0, 0, 80], [0, 80, 120], [1, 0, 33]]}, "not the equal runs that the kernel cuts"),
    "another-program": ({"program_offsets": [0, 2, 2, 3]}, "do not have the items of their runs"),
    "an-order": ({"item_order": [1, 0, 2]}, "do not have the items of their runs, in order"),
    "no-splits": ({"launches": "more splits"}, "its launches must be one of all programs"),
}


@pytest.mark.parametrize(("changes", "why"), CHANGES.values(), ids=CHANGES)
def test_items_that_the_kernel_would_not_find_are_refused(changes, why):
    lengths = [120, 33]
    q, cache = batch(Case("refused", lengths, n_q_heads=2, n_kv_heads=1, head_dim=16))
    plan = planned(lengths, pkv.Shape.of(q, cache), 3)
    assert plan.items.tolist() == [[0, 0, 48], [0, 48, 120], [1, 0, 33]]
    assert_accurate(q, cache, *pkv.run(q, cache, pkv.Plan.from_json(plan.to_json())))
    if "launches" in changes:
        decode, merge = plan.launches
        changes = {"launches": (decode, dataclasses.replace(merge, n_splits=merge.n_splits + 1))}
    other = dataclasses.replace(plan, **changes)
    with pytest.raises(ValueError, match=f"plan of stage 'stream_k': .*{why}"):
        pkv.run(q, cache, other)


# --- CUDA graphs ---


def lengths_of_a_service(n_steps, n_rows, capacity, seed):
    """int32 [n_steps, n_rows]: rows grow by a token a step; some end and stay empty, some are replaced by new ones."""
    rng = random.Random(seed)
    rows = [rng.randrange(capacity) for _ in range(n_rows)]
    steps = []
    for _ in range(n_steps):
        for row, length in enumerate(rows):
            if length == 0:
                rows[row] = rng.randrange(1, capacity) if rng.random() < 0.05 else 0
            else:
                rows[row] = 0 if length == capacity or rng.random() < 0.02 else length + 1
        steps.append(list(rows))
    return torch.tensor(steps, dtype=torch.int32)


def test_a_service_has_rows_that_grow_come_go_and_are_empty():
    steps = lengths_of_a_service(2000, 6, 3000, seed=1)
    before, after = steps[:-1], steps[1:]
    for kind in (after == before + 1, (before == 0) & (after > 0), (before > 0) & (after == 0), after == 0):
        assert kind.any()
    assert (steps.min(), steps.max() <= 3000) == (0, True)


@pytest.mark.gpu
@pytest.mark.parametrize("n_rows", [1, 6, 200])
def test_a_graph_captured_once_replays_every_step(n_rows):
    """Each of 2,000 replays equals an eager call bit for bit, and some of them fp64."""
    capacity = 3000
    q, cache = batch(Case("service", [capacity] * n_rows, n_q_heads=8, n_kv_heads=2))
    steps = lengths_of_a_service(2000, n_rows, capacity, seed=n_rows).to(DEVICE)
    out = torch.empty_like(q)
    pkv.decode(q, cache, stage="stream_k", out=out)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = pkv.decode(q, cache, stage="stream_k", out=out, return_lse=True)
    for number, lengths in enumerate(steps):
        cache.lengths.copy_(lengths)
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        assert_equal((out, lse), pkv.decode(q, cache, stage="stream_k", return_lse=True))
        if number % 400 == 0:
            assert_accurate(q, cache, out, lse)

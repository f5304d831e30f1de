"""Somebody else's parts: equal ones give what ours give, wrong ones show, what is no part is refused beforehand."""

from __future__ import annotations

import gc
import itertools
import json
import math
import textwrap
import weakref

import numpy as np
import pytest
import torch
from cases import DEVICE, SMALL_CARD, Case, batch

import pkv
from pkv import _triton
from pkv._triton import INTERPRETED, tl, triton
from pkv.bench.accuracy import Yardstick
from pkv.bench.engines.registry import find_engines
from pkv.bench.measuring import parts as engines_parts
from pkv.cli import main
from pkv.kernels import parts
from pkv.stages import TAKES
from pkv.tile import attend_tile, attend_tokens

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
OPTIONS = {
    "split_kv": {"splits": 2}, "length_buckets": {"splits": 2}, "row_local": {"splits": 3}, "workqueue": {"splits": 2},
    "stream_k": {"gpu": SMALL_CARD},
}  # fmt: skip
MERGED = [stage for stage in OPTIONS if stage != "stream_k"]
CASE = Case("parts", [5, 40, 0, 70])


# --- parts of others ---


@triton.jit
def copied(query, cache, row, grid_head, begin, end, qk_scale, SHAPE: tl.constexpr):
    """Ours, copied."""
    BLOCK_H: tl.constexpr = SHAPE.BLOCK_H
    BLOCK_D: tl.constexpr = SHAPE.BLOCK_D
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    acc = tl.zeros([BLOCK_D, BLOCK_H], tl.float32)
    running_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_N, BLOCK_H], tl.float32)
    kv_head = grid_head // SHAPE.HEAD_BLOCKS
    full_end = begin + tl.maximum(end - begin, 0) // BLOCK_N * BLOCK_N
    for start in tl.range(begin, full_end, BLOCK_N, num_stages=SHAPE.STAGES):
        acc, running_max, sums = attend_tile(
            query, cache, row, kv_head, start, end, qk_scale, acc, running_max, sums, SHAPE, False,
        )  # fmt: skip
    if full_end < end:
        acc, running_max, sums = attend_tile(
            query, cache, row, kv_head, full_end, end, qk_scale, acc, running_max, sums, SHAPE, True,
        )  # fmt: skip
    running_sum = tl.sum(sums, 0)
    is_empty = running_sum == 0.0
    total = tl.where(is_empty, 1.0, running_sum)
    lse = tl.where(is_empty, float("-inf"), (running_max + tl.log2(total)) / 1.4426950408889634)
    return acc / total[None, :], lse


@triton.jit
def load_masked(side, pages, slots, kv_head, mask, SHAPE: tl.constexpr):
    """K or V of one token each, [BLOCK_N, BLOCK_D] in fp32."""
    stride_page, stride_token, stride_head, stride_dim = side.strides
    begins = pages * stride_page + slots * stride_token + kv_head * stride_head
    offsets = begins[:, None] + (tl.arange(0, SHAPE.BLOCK_D) * stride_dim)[None, :]
    return tl.load(side.ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def written_anew(query, cache, row, grid_head, begin, end, qk_scale, SHAPE: tl.constexpr):
    """From the contract alone: every token through the table, every load masked, no tensor core.

    Its output is the negative of what is right: a mark that every merge keeps, and that ours cannot leave.
    """
    BLOCK_H: tl.constexpr = SHAPE.BLOCK_H
    BLOCK_D: tl.constexpr = SHAPE.BLOCK_D
    query = query.to(tl.float32)
    kv_head = grid_head // SHAPE.HEAD_BLOCKS
    acc = tl.zeros([BLOCK_D, BLOCK_H], tl.float32)
    largest = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    for start in range(begin, end, SHAPE.BLOCK_N):
        tokens = start + tl.arange(0, SHAPE.BLOCK_N)
        entries = row * cache.table.strides[0] + tokens // SHAPE.PAGE_SIZE * cache.table.strides[1]
        pages = tl.load(cache.table.ptr + entries, mask=tokens < end, other=0).to(tl.int64)
        mask = (tokens < end)[:, None] & (tl.arange(0, SHAPE.BLOCK_D) < SHAPE.HEAD_DIM)[None, :]
        k = load_masked(cache.k, pages, tokens % SHAPE.PAGE_SIZE, kv_head, mask, SHAPE)
        v = load_masked(cache.v, pages, tokens % SHAPE.PAGE_SIZE, kv_head, mask, SHAPE)
        scores = tl.sum(k[:, :, None] * query[None, :, :], 1) * qk_scale  # [BLOCK_N, BLOCK_H]
        scores = tl.where((tokens < end)[:, None], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 0))
        weights = tl.exp2(scores - new_largest[None, :])
        correction = tl.exp2(largest - new_largest)
        acc = acc * correction[None, :] + tl.sum(v[:, :, None] * weights[:, None, :], 0)
        total = total * correction + tl.sum(weights, 0)
        largest = new_largest
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    lse = tl.where(is_empty, float("-inf"), (largest + tl.log2(total)) * 0.6931471805599453)
    return -acc / total[None, :], lse


@triton.jit
def halved(query, cache, row, grid_head, begin, end, qk_scale, SHAPE: tl.constexpr):
    """Wrong: half of the output."""
    out, lse = attend_tokens(query, cache, row, grid_head, begin, end, qk_scale, SHAPE)
    return out * 0.5, lse


def merge_in_torch(partial_out, partial_lse, offsets, out, lse):
    """Row by row, by the formula."""
    bounds = offsets.tolist()
    for row, (first, end) in enumerate(itertools.pairwise(bounds)):
        if end - first == 1:
            continue
        out[row], lse[row] = 0.0, -math.inf
        full = partial_lse[first:end] > -math.inf  # [n_states, n_q_heads]
        if full.any():
            lse[row] = torch.logsumexp(partial_lse[first:end], 0)
            weights = torch.exp(partial_lse[first:end] - lse[row])[..., None]
            out[row] = torch.where(full[..., None], partial_out[first:end] * weights, 0.0).sum(0)


@triton.jit
def merge_row_kernel(partial_out, partial_lse, offsets, out, lse, strides, n_heads, HEAD_DIM: tl.constexpr):
    """One program per (row, head): state after state."""
    row, head = tl.program_id(0) // n_heads, tl.program_id(0) % n_heads
    first, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    dims = tl.arange(0, HEAD_DIM)
    acc, largest, total = tl.zeros([HEAD_DIM], tl.float32), float("-inf"), 0.0
    for state in range(first, end):
        mine = tl.load(partial_lse + state * n_heads + head)
        if mine > float("-inf"):
            new_largest = tl.maximum(largest, mine)
            weight, correction = tl.exp(mine - new_largest), tl.exp(largest - new_largest)
            acc = acc * correction + weight * tl.load(partial_out + (state * n_heads + head) * HEAD_DIM + dims)
            total = total * correction + weight
            largest = new_largest
    if end - first != 1:
        safe = tl.where(total > 0.0, total, 1.0)
        lse_of_row = tl.where(total > 0.0, largest + tl.log(safe), float("-inf"))
        result = acc / safe
        tl.store(lse + row * n_heads + head, lse_of_row)
        tl.store(out + row * strides[0] + head * strides[1] + dims * strides[2], result.to(out.dtype.element_ty))


def merge_in_triton(partial_out, partial_lse, offsets, out, lse):
    """A kernel of one's own."""
    n_rows, n_heads, head_dim = out.shape
    grid = (n_rows * n_heads,)
    merge_row_kernel[grid](partial_out, partial_lse, offsets, out, lse, out.stride(), n_heads, head_dim)


def merge_averages(partial_out, partial_lse, offsets, out, lse):
    """Wrong: outputs averaged without weights."""
    merge_in_torch(partial_out, partial_lse, offsets, out, lse)
    bounds = offsets.tolist()
    for row, (first, end) in enumerate(itertools.pairwise(bounds)):
        if end - first > 1:
            out[row] = partial_out[first:end].nanmean(0)


def by_thirty_two(lengths, shape):
    """Items of two tiles."""
    return [(row, b, min(b + 32, length)) for row, length in enumerate(lengths) for b in range(0, length, 32)]


def decode(q, cache, stage, own=None, **options):
    return pkv.decode(q, cache, stage=stage, return_lse=True, check=True, parts=own, **(OPTIONS[stage] | options))


def assert_equal(want, got):
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b)


def assert_accurate(q, cache, out, lse):
    accuracy = Yardstick(q, cache).measure(out, lse)
    assert accuracy.ok, accuracy


def in_turn(stages):
    """(stage, dtype) for all of both; fast are each stage with one dtype, and each dtype with one stage or two: parts
    see the dtype in the tile loop and the merge, which the stages share.
    """
    slow, dtypes = pytest.mark.slow, list(DTYPES)
    return [
        pytest.param(stage, dtype, marks=[] if number % len(dtypes) == place else [slow], id=f"{stage}-{dtype}")
        for number, stage in enumerate(stages)
        for place, dtype in enumerate(dtypes)
    ]


# --- the tile loop ---


@pytest.mark.parametrize(("stage", "dtype"), in_turn(OPTIONS))
def test_a_copy_of_our_tile_loop_gives_the_same_bits(stage, dtype, nan_memory):
    q, cache = batch(CASE, DTYPES[dtype])
    assert_equal(decode(q, cache, stage), decode(q, cache, stage, pkv.Parts(attend_tokens=copied)))


@pytest.mark.parametrize(("stage", "dtype"), in_turn(OPTIONS))
def test_a_tile_loop_written_anew_is_right(stage, dtype, nan_memory):
    assert_anew_is_right(stage, batch(CASE, DTYPES[dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tile_loop_written_anew_is_right_for_odd_head_dims_and_pages(dtype, nan_memory):
    assert_anew_is_right("split_kv", batch(Case("head-dim-20-page-4", [37, 0, 3], 4, 6, 2, 20), DTYPES[dtype]))


def assert_anew_is_right(stage, inputs):
    q, cache = inputs
    negative, lse = decode(q, cache, stage, pkv.Parts(attend_tokens=written_anew))
    assert_accurate(q, cache, -negative, lse)


@pytest.mark.parametrize("stage", OPTIONS)
def test_a_wrong_tile_loop_changes_every_row(stage):
    q, cache = batch(CASE)
    want, lse = decode(q, cache, stage)
    out, same_lse = decode(q, cache, stage, pkv.Parts(attend_tokens=halved))
    assert torch.equal(lse, same_lse)
    for row, length in enumerate(CASE.lengths):
        torch.testing.assert_close(out[row], want[row] * 0.5, rtol=2e-3, atol=1e-6)
        assert torch.equal(out[row], want[row]) == (length == 0)


def test_ours_is_back_as_soon_as_no_part_is_named():
    q, cache = batch(CASE)
    want = decode(q, cache, "split_kv")
    decode(q, cache, "split_kv", pkv.Parts(attend_tokens=halved, merge=merge_averages))
    assert_equal(want, decode(q, cache, "split_kv"))


# --- the merge ---


@pytest.mark.parametrize(("stage", "dtype"), in_turn(MERGED))
def test_a_merge_of_ones_own_is_right(stage, dtype, nan_memory):
    assert_merge_is_right(stage, merge_in_torch, dtype)


@pytest.mark.parametrize("stage", MERGED)
def test_a_merge_that_is_a_kernel_of_ones_own_is_right(stage, nan_memory):
    assert_merge_is_right(stage, merge_in_triton, "fp16")


def assert_merge_is_right(stage, merge, dtype):
    q, cache = batch(CASE, DTYPES[dtype])
    target = torch.full((q.shape[1], *q.shape[::2]), math.nan, dtype=q.dtype, device=DEVICE).movedim(0, 1)  # strided
    out, lse = decode(q, cache, stage, pkv.Parts(merge=merge), out=target)
    assert out is target
    assert_accurate(q, cache, out, lse)
    ours = decode(q, cache, stage)
    torch.testing.assert_close(lse, ours[1], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("stage", MERGED)
def test_a_wrong_merge_changes_the_rows_that_are_split(stage):
    q, cache = batch(CASE)
    want, _ = decode(q, cache, stage)
    out, _ = decode(q, cache, stage, pkv.Parts(merge=merge_averages))
    row = CASE.lengths.index(70)
    assert (out[row] - want[row]).abs().max() > 0.01


@pytest.mark.parametrize("stage", MERGED)
def test_a_merge_is_called_once_with_the_states_of_the_plan(stage):
    """However many merge launches ours would take: length_buckets has one for each length."""
    q, cache = batch(CASE)
    plan = pkv.plan(CASE.lengths, pkv.Shape.of(q, cache), stage=stage, **OPTIONS[stage])
    calls = []

    def merge(*arrays):
        calls.append([array.clone() for array in arrays])
        merge_in_torch(*arrays)

    out, lse = pkv.run(q, cache, plan, parts=pkv.Parts(merge=merge))
    assert_accurate(q, cache, out, lse)
    ((partial_out, partial_lse, offsets, out_before, lse_before),) = calls
    assert offsets.tolist() == plan.partial_offsets.tolist()
    assert offsets.dtype == torch.int32
    assert partial_out.shape == (plan.n_items, q.shape[1], q.shape[2])
    assert partial_lse.shape == partial_out.shape[:2]
    assert partial_out.dtype == partial_lse.dtype == lse_before.dtype == torch.float32
    n_states = np.diff(plan.partial_offsets)
    for index, (row, begin, end) in enumerate(plan.items.tolist()):
        if n_states[row] > 1:
            assert (partial_lse[index] > -math.inf).all() == (begin < end)
    for row in range(4):
        if n_states[row] == 1:  # is done
            assert torch.equal(out_before[row], out[row])
            assert torch.equal(lse_before[row], lse[row])
        elif INTERPRETED:
            assert out_before[row].isnan().all(), "what is left out must not look right by chance"
    assert (1 in n_states) == (stage in ("workqueue", "length_buckets"))


def test_the_last_launch_need_not_be_a_merge():
    """The longest row alone, in one item, behind rows of two items."""
    q, cache = batch(Case("buckets", [33, 33, 48]))
    shape = pkv.Shape.of(q, cache)
    own = pkv.plan([33, 33, 48], shape, "length_buckets", splits=2)
    one = pkv.plan([48], shape, "length_buckets", splits=1)
    items = np.concatenate([own.items[:4], np.add(one.items, [[2, 0, 0]])])
    launches = (*own.launches[:2], pkv.plans.fields.Launch("decode", (2,), 4, 5, 1))
    plan = pkv.Plan(
        "length_buckets", shape, own.lengths, items, np.arange(6), np.array([0, 2, 4, 5]), launches, 16, own.gpu, 4,
        item_order=np.arange(5),
    )  # fmt: skip
    assert [launch.kernel for launch in plan.launches] == ["decode", "merge", "decode"]
    out, lse = pkv.run(q, cache, plan, parts=pkv.Parts(merge=merge_in_torch))
    assert_accurate(q, cache, out, lse)


@pytest.mark.skipif(not INTERPRETED, reason="memory is poisoned in the interpreter only")
def test_a_row_that_a_merge_leaves_out_is_nan():
    q, cache = batch(CASE)

    def forgets_empty_rows(partial_out, partial_lse, offsets, out, lse):
        out_there, lse_there = out.clone(), lse.clone()
        merge_in_torch(partial_out, partial_lse, offsets, out_there, lse_there)
        rows = offsets.diff() > 1
        out[rows], lse[rows] = out_there[rows], lse_there[rows]

    out, lse = decode(q, cache, "workqueue", pkv.Parts(merge=forgets_empty_rows))
    assert out[2].isnan().all()
    assert lse[2].isnan().all()
    assert not out[[0, 1, 3]].isnan().any()


def test_a_merge_is_not_called_where_every_row_has_one_state():
    q, cache = batch(CASE)

    def never(*arrays):
        raise AssertionError("nothing to merge")

    assert_equal(decode(q, cache, "split_kv", splits=1), decode(q, cache, "split_kv", pkv.Parts(merge=never), splits=1))


def test_a_merge_that_returns_its_result_is_told_to_write_it():
    q, cache = batch(CASE)
    own = pkv.Parts(merge=lambda partial_out, partial_lse, offsets, out, lse: (out, lse))
    with pytest.raises(TypeError, match=r"parts\.merge returned tuple: it must write out and lse in place"):
        decode(q, cache, "split_kv", own)


# --- the schedule ---


FORMS = {
    "lists": lambda items: [list(item) for item in items],
    "generator": iter,
    "numpy": lambda items: np.array(items),
    "torch": lambda items: torch.tensor(items),
    "numpy-ints": lambda items: [tuple(np.int32(value) for value in item) for item in items],
}


@pytest.mark.parametrize("form", FORMS)
def test_our_items_listed_by_somebody_else_give_the_same_bits(form):
    q, cache = batch(CASE)
    shape, asked = pkv.Shape.of(q, cache), []
    plan = pkv.plan(CASE.lengths, shape, "workqueue", splits=2)

    def cut(lengths, of_shape):
        asked.append((lengths, of_shape))
        return FORMS[form](plan.items.tolist())

    own = pkv.Parts(plan=cut)
    assert_equal(decode(q, cache, "workqueue"), decode(q, cache, "workqueue", own, splits=None))
    assert asked == [(CASE.lengths, shape)]
    assert all(type(length) is int for length in asked[0][0])
    made = pkv.plan(CASE.lengths, shape, "workqueue", parts=own)
    assert made.validate().items.tolist() == plan.items.tolist()
    assert made.launches == plan.launches
    assert made.partial_offsets.tolist() == plan.partial_offsets.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_items_of_ones_own_are_right(dtype, nan_memory):
    q, cache = batch(CASE, DTYPES[dtype])
    for stage in (None, "workqueue"):
        got = pkv.decode(q, cache, stage=stage, return_lse=True, parts=pkv.Parts(plan=by_thirty_two))
        assert_accurate(q, cache, *got)


def test_items_without_tokens_are_no_fault():
    q, cache = batch(CASE)
    items = [(0, 0, 0), (0, 0, 5), (1, 0, 16), (1, 16, 16), (1, 16, 40), (2, 0, 0), (3, 0, 64), (3, 64, 70)]
    assert_accurate(q, cache, *decode(q, cache, "workqueue", pkv.Parts(plan=lambda *_: items), splits=None))


def test_tile_and_ordering_are_options():
    q, cache = batch(CASE)
    shape, own = pkv.Shape.of(q, cache), pkv.Parts(plan=by_thirty_two)
    made = pkv.plan(CASE.lengths, shape, "workqueue", parts=own, tile=32, ordering="longest_first")
    assert made.tile == 32
    assert made.item_order.tolist() == [1, 3, 4, 2, 5, 0]  # of 5, 32 + 8, 32 + 32 + 6 tokens
    assert_accurate(q, cache, *pkv.run(q, cache, made))
    assert_accurate(q, cache, *pkv.run(q, cache, made, parts=own))
    on_card = pkv.plan(CASE.lengths, shape, "workqueue", parts=own, gpu=pkv.GpuProfile("tile 64", 90, 132, tile=64))
    assert on_card.tile == 16, "whoever wrote it knew of no card"


@pytest.mark.parametrize(
    ("stage", "options"), [("row_local", {"splits": 3}), ("split_kv", {"splits": 2}), ("workqueue", {"tile": 32})]
)
def test_a_plan_may_be_returned_in_place_of_items(stage, options):
    """It is run by the queue's kernel, which gives the same bits."""
    q, cache = batch(CASE)
    shape = pkv.Shape.of(q, cache)
    own = pkv.Parts(plan=lambda lengths, of_shape: pkv.plan(lengths, of_shape, stage, **options))
    want = pkv.run(q, cache, pkv.plan(CASE.lengths, shape, stage, **options))
    assert_equal(want, decode(q, cache, "workqueue", own, splits=None))
    assert pkv.plan(CASE.lengths, shape, "workqueue", parts=own).stage == "workqueue"


def test_no_rows_and_rows_without_tokens():
    for lengths in ([], [0, 0]):
        q, cache = batch(Case("empty", lengths))
        out, lse = pkv.decode(q, cache, return_lse=True, parts=pkv.Parts(copied, merge_in_torch, by_thirty_two))
        assert out.shape == q.shape
        assert (out == 0).all()
        assert (lse == -math.inf).all()


BAD_ITEMS = {  # for lengths [5, 40]
    "twice": ([(0, 0, 5), (1, 0, 32), (1, 16, 40)], r"tokens 16:32 of row 1 are done twice"),
    "missing": ([(0, 0, 5), (1, 0, 16), (1, 32, 40)], r"tokens 16:32 of row 1 are lost"),
    "missing-end": ([(0, 0, 5), (1, 0, 32)], r"row 1 has 40 tokens, its items end at 32"),
    "missing-row": ([(0, 0, 5)], r"row 1 has 40 tokens, its items end at 0"),
    "too-long": ([(0, 0, 16), (1, 0, 40)], r"row 0 has 5 tokens, its items end at 16"),
    "rows-out-of-order": ([(1, 0, 40), (0, 0, 5)], r"item 1, tokens 0:5 of row 0, comes after one of row 1"),
    "tokens-out-of-order": ([(0, 0, 5), (1, 16, 40), (1, 0, 16)], r"tokens 0:16 of row 1 are lost at item 1"),
    "not-at-a-tile": ([(0, 0, 5), (1, 0, 20), (1, 20, 40)], r"item 2 of row 1 begins at 20, .* the tile 16"),
    "no-such-row": ([(0, 0, 5), (2, 0, 40)], r"item 1 is of row 2, tokens 0:40; rows are 0:2"),
    "negative-row": ([(-1, 0, 5), (1, 0, 40)], r"item 0 is of row -1"),
    "negative-begin": ([(0, -16, 5), (1, 0, 40)], r"item 0 of row 0 has the tokens -16:5"),
    "backwards": ([(0, 0, 5), (1, 16, 0), (1, 0, 40)], r"item 1 of row 1 has the tokens 16:0"),
    "beyond-32-bits": ([(0, 0, 5), (1, 0, 2**40)], r"item 1 of row 1 has the tokens 0:1099511627776"),
    "floats": ([(0, 0, 5), (1, 0, 40.0)], r"item 1 is \(1, 0, 40.0\), not three ints"),
    "bools": ([(0, 0, 5), (True, 0, 40)], r"item 1 is \(True, 0, 40\), not three ints"),
    "pairs": ([(0, 5), (1, 40)], r"item 0 is \(0, 5\), not three ints"),
    "numbers": ([0, 5], r"item 0 is 0, not three ints"),
    "float-tensor": (torch.tensor([[0.0, 0.0, 5.0]]), r"item 0 is .* not three ints"),
}


@pytest.mark.parametrize("name", BAD_ITEMS)
def test_bad_items_are_named_before_any_launch(name, launched):
    q, cache = batch(Case("bad", [5, 40]))
    items, words = BAD_ITEMS[name]
    own = pkv.Parts(plan=lambda lengths, shape: items)
    for stage in (None, "workqueue"):
        with pytest.raises(ValueError, match=r"parts\.plan: " + words):
            pkv.decode(q, cache, stage=stage, parts=own)
    with pytest.raises(ValueError, match=r"parts\.plan: " + words):
        pkv.plan([5, 40], pkv.Shape.of(q, cache), "workqueue", parts=own)
    assert launched == []


SHAPE = pkv.Shape(4, 2, 64, 16, "float16")
BAD_PLANS = {
    "other-shape": (lambda: pkv.plan([5, 40], pkv.Shape(8, 2, 64, 16, "float16"), "workqueue"), {}, "another shape"),
    "other-lengths": (lambda: pkv.plan([5, 39], SHAPE, "workqueue"), {}, "row 1 has 40 tokens, in its plan 39"),
    "other-rows": (lambda: pkv.plan([5], SHAPE, "workqueue"), {}, "lengths has 2 rows, its plan 1"),
    "other-tile": (lambda: pkv.plan([5, 40], SHAPE, "workqueue", tile=32), {"tile": 64}, "tiles of 32, but tile = 64"),
    "no-tile-of-ours": (lambda: pkv.plan([5, 40], SHAPE, "reference"), {}, "'reference' that the queue cannot run"),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_a_plan_for_something_else_is_refused(name):
    make, options, words = BAD_PLANS[name]
    with pytest.raises(ValueError, match=rf"parts\.plan returned a plan .*{words}"):
        pkv.plan([5, 40], SHAPE, "workqueue", parts=pkv.Parts(plan=lambda lengths, shape: make()), **options)


def test_what_is_no_list_of_items_is_refused():
    for found in (None, 5):
        with pytest.raises(TypeError, match=rf"parts\.plan returned {type(found).__name__}: it must return items"):
            pkv.plan([5], SHAPE, "workqueue", parts=pkv.Parts(plan=lambda lengths, shape, found=found: found))
    with pytest.raises(ValueError, match=r"splits= has no effect because parts\.plan cuts the rows"):
        pkv.plan([5], SHAPE, "workqueue", splits=2, parts=pkv.Parts(plan=by_thirty_two))


def test_run_takes_only_the_plan_that_parts_plan_made():
    q, cache = batch(CASE)
    shape, own = pkv.Shape.of(q, cache), pkv.Parts(plan=by_thirty_two)
    with pytest.raises(ValueError, match=r"plan was not made by parts\.plan: make it with pkv\.plan"):
        pkv.run(q, cache, pkv.plan(CASE.lengths, shape, "workqueue"), parts=own)
    with pytest.raises(ValueError, match=r"stage 'split_kv' does not take parts\.plan .*one of workqueue"):
        pkv.run(q, cache, pkv.plan(CASE.lengths, shape, "split_kv"), parts=own)


# --- several parts ---


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_three_together(dtype, nan_memory):
    q, cache = batch(CASE, DTYPES[dtype])
    own = pkv.Parts(written_anew, merge_in_triton, by_thirty_two)
    assert own.given == ("attend_tokens", "merge", "plan")
    made = pkv.plan(CASE.lengths, pkv.Shape.of(q, cache), "workqueue", parts=own)
    assert made.items.tolist() == [list(item) for item in by_thirty_two(CASE.lengths, made.shape)]
    for negative, lse in (pkv.decode(q, cache, return_lse=True, parts=own), pkv.run(q, cache, made, parts=own)):
        assert_accurate(q, cache, -negative, lse)


BEST = "row_local" if pkv.INTERPRETED else "stream_k"


@pytest.mark.parametrize(
    ("own", "stage"),
    [
        (pkv.Parts(attend_tokens=copied), BEST),
        (pkv.Parts(merge=merge_in_torch), "row_local"),
        (pkv.Parts(copied, merge_in_torch), "row_local"),
        (pkv.Parts(plan=by_thirty_two), "workqueue"),
        (pkv.Parts(), BEST),
    ],
    ids=["attend", "merge", "attend-merge", "plan", "none"],
)
def test_no_stage_named_is_the_best_that_takes_the_parts(own, stage, launched):
    q, cache = batch(CASE)
    pkv.decode(q, cache, parts=own, gpu=SMALL_CARD)
    assert launched == [stage]


def test_no_parts_in_parts_are_ours_everywhere():
    q, cache = batch(Case("plain", [5, 20]))
    for stage in ("reference", "split_kv"):
        want, got = (pkv.decode(q, cache, stage=stage, parts=own) for own in (None, pkv.Parts()))
        assert torch.equal(want, got)


# --- what is refused ---

ALL_OF_THEM = {"attend_tokens": copied, "merge": merge_in_torch, "plan": by_thirty_two}


def test_every_stage_says_what_it_takes():
    wanted = {stage: ("attend_tokens", "merge") for stage in ("split_kv", "length_buckets", "row_local")}
    wanted |= {"workqueue": ("attend_tokens", "merge", "plan"), "stream_k": ("attend_tokens",)}
    assert {stage: TAKES[stage] for stage in wanted} == wanted
    assert list(TAKES) == list(pkv.STAGES)


@pytest.mark.parametrize("part", ALL_OF_THEM)
@pytest.mark.parametrize("stage", pkv.STAGES)
def test_a_stage_refuses_what_it_has_no_place_for(stage, part, launched):
    if part in TAKES[stage]:
        return
    q, cache = batch(CASE)
    own = pkv.Parts(**{part: ALL_OF_THEM[part]})
    able = ", ".join(other for other, names in TAKES.items() if part in names)
    with pytest.raises(ValueError, match=rf"stage '{stage}' does not take parts\.{part} \(.+\); .* one of {able}$"):
        pkv.decode(q, cache, stage=stage, parts=own)
    if stage not in ("adaptive", "flashinfer"):
        with pytest.raises(ValueError, match=rf"does not take parts\.{part}"):
            pkv.run(q, cache, pkv.plan(CASE.lengths, pkv.Shape.of(q, cache), stage), parts=own)
    assert launched == []


def test_a_plan_that_adaptive_made_takes_the_parts_of_the_winner():
    own = pkv.Parts(attend_tokens=halved)
    q, cache = batch(Case("flashinfer has no kernel", CASE.lengths, head_dim=60))
    made = pkv.plan(CASE.lengths, pkv.Shape.of(q, cache), "adaptive", policy="cost", gpu="rtx3060")
    assert made.stage == "workqueue"
    out, _ = pkv.run(q, cache, made, parts=own)
    torch.testing.assert_close(out, pkv.run(q, cache, made)[0] * 0.5, rtol=2e-3, atol=1e-6)
    q, cache = batch(CASE)
    made = pkv.plan(CASE.lengths, pkv.Shape.of(q, cache), "adaptive", policy="paper")
    assert made.stage == "flashinfer"
    with pytest.raises(ValueError, match="stage 'flashinfer' does not take"):
        pkv.run(q, cache, made, parts=own)


def test_unknown_stages_are_named_as_ever():
    q, cache = batch(CASE)
    with pytest.raises(ValueError, match="stage = 'splitkv' does not exist"):
        pkv.decode(q, cache, stage="splitkv", parts=pkv.Parts(attend_tokens=copied))


def plain(query, cache, row, grid_head, begin, end, qk_scale, SHAPE):
    """No decorator."""


@triton.jit
def too_few(query, cache, row, begin, end, qk_scale, SHAPE: tl.constexpr):
    return query, row


@triton.jit
def renamed(q, cache, row, grid_head, begin, end, qk_scale, SHAPE: tl.constexpr):
    return q, row


@triton.jit
def no_constexpr(query, cache, row, grid_head, begin, end, qk_scale, SHAPE):
    return query, row


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"attend_tokens": plain}, r"parts\.attend_tokens must be a Triton function .*@triton\.jit"),
        ({"attend_tokens": 5}, r"parts\.attend_tokens must be a Triton function .*got int"),
        (
            {"attend_tokens": too_few},
            r"takes \(query, cache, row, begin, .*it must take exactly \(query, cache, row, gri",
        ),
        ({"attend_tokens": renamed}, r"takes \(q, cache, .*it must take exactly \(query, cache"),
        ({"attend_tokens": no_constexpr}, r"SHAPE must be annotated, as SHAPE: tl\.constexpr"),
        ({"merge": 5}, r"parts\.merge must be a Python function \(partial_out, .*got int"),
        ({"merge": merge_row_kernel}, r"parts\.merge is a @triton\.jit function: pass a Python function"),
        ({"merge": lambda states: states}, r"parts\.merge takes \(states\); it is called with \(partial_out, partial_"),
        ({"plan": [(0, 0, 5)]}, r"parts\.plan must be a Python function \(lengths, shape\), got list"),
        ({"plan": lambda lengths: []}, r"parts\.plan takes \(lengths\); it is called with \(lengths, shape\)"),
        ({"plan": lambda a, b, c: []}, r"parts\.plan takes \(a, b, c\); it is called with \(lengths, shape\)"),
    ],
)
def test_what_is_no_part_is_refused_when_parts_are_made(given, words):
    with pytest.raises(TypeError, match=words):
        pkv.Parts(**given)


def test_a_function_for_the_other_way_to_run_kernels_is_refused():
    other = type("JITFunction" if INTERPRETED else "InterpretedFunction", (), {})()
    with pytest.raises(TypeError, match="TRITON_INTERPRET was changed between two imports"):
        pkv.Parts(attend_tokens=other)


def test_what_is_no_parts_is_refused():
    q, cache = batch(CASE)
    plan = pkv.plan(CASE.lengths, pkv.Shape.of(q, cache), "split_kv")
    for call in (
        lambda own: pkv.decode(q, cache, parts=own),
        lambda own: pkv.decode(q, cache, stage="split_kv", parts=own),
        lambda own: pkv.run(q, cache, plan, parts=own),
        lambda own: pkv.plan(CASE.lengths, plan.shape, "workqueue", parts=own),
    ):
        for own in (copied, {"attend_tokens": copied}, False):
            with pytest.raises(TypeError, match=r"parts must be a pkv\.Parts, got"):
                call(own)


# --- whose fault it is ---


@triton.jit
def misspelt(query, cache, row, grid_head, begin, end, qk_scale, SHAPE: tl.constexpr):
    return cache.keys, qk_scale


@triton.jit
def only_out(query, cache, row, grid_head, begin, end, qk_scale, SHAPE: tl.constexpr):
    out, lse = attend_tokens(query, cache, row, grid_head, begin, end, qk_scale, SHAPE)  # noqa: RUF059
    return out


def broken(*arguments):
    raise KeyError("mine")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"attend_tokens": misspelt, "merge": merge_in_torch}, "Raised in parts.attend_tokens, `misspelt` ("),
        ({"attend_tokens": only_out}, "Running instead of pkv's own function: parts.attend_tokens, `only_out` ("),
        ({"attend_tokens": copied, "merge": broken}, "Raised in parts.merge, `broken` ("),
        ({"attend_tokens": copied, "plan": broken}, "Raised in parts.plan, `broken` ("),
    ],
    ids=["in-it", "after-it", "in-the-merge", "in-the-plan"],
)
def test_an_error_says_which_part_raised_it(given, said):
    q, cache = batch(CASE)
    options = {} if "plan" in given else {"splits": 2}
    with pytest.raises(Exception) as caught:  # noqa: PT011
        pkv.decode(q, cache, stage="workqueue", parts=pkv.Parts(**given), **options)
    (note,) = caught.value.__notes__
    if INTERPRETED or "attend" not in said:
        assert note.startswith(said)
        assert __file__ in note
    want = decode(q, cache, "workqueue")
    assert_accurate(q, cache, *want)  # an error leaves nothing behind


# --- what is remembered between launches ---


class Kernel:
    """Stands for an entry kernel: counts what is compiled."""

    def __init__(self):
        self.n_compiled = 0

    def __getitem__(self, grid):
        def compiled(*args, **options):
            self.n_compiled += 1
            return type("Compiled", (), {"run": lambda *args: None, "function": None, "packed_metadata": None})()

        return compiled


class Function:
    """Stands for a jit function: equal hashes, as those of two versions of one source may be."""

    def __hash__(self):
        return 7


@pytest.fixture
def memo(monkeypatch):
    """What is remembered, as on a GPU; empty."""
    monkeypatch.setattr(_triton, "INTERPRETED", False)
    monkeypatch.setattr(_triton, "_compiled", {})
    driver = type("Driver", (), {"active": type("Active", (), {"get_current_stream": staticmethod(lambda device: 0)})})
    runtime = type("Runtime", (), {"driver": driver})
    monkeypatch.setattr(_triton, "triton", type("Triton", (), {"runtime": runtime}))
    return _triton._compiled


def launch(kernel, part, **options):
    _triton.launch_kernel(kernel, 1, (), (), (0, part), **options)


def test_every_function_is_compiled_once(memo):
    kernel, one, two = Kernel(), Function(), Function()
    for part in (None, one, two, one, None, two):
        launch(kernel, part)
    assert kernel.n_compiled == 3


def test_of_functions_that_are_made_anew_again_and_again_few_are_kept(memo):
    kernel, alive = Kernel(), weakref.WeakSet()
    launch(kernel, None)
    for _ in range(10 * _triton.MOST_PARTS):
        part = Function()
        alive.add(part)
        for other in (kernel, Kernel()):
            launch(other, part)
        del part
    gc.collect()
    assert len(alive) == _triton.MOST_PARTS
    assert len(memo) == 1 + 2 * _triton.MOST_PARTS
    before = kernel.n_compiled
    launch(kernel, None)
    assert kernel.n_compiled == before, "ours are never forgotten for theirs"


# --- compiled, in processes of their own: here Triton may be interpreting ---

COMPILE = """
import dataclasses, json
import test_parts
from pkv.bench.fit.compiled import KERNELS, compile_entry
from pkv.kernels.configs import choose_config
from pkv.plans.gpu import GpuProfile
from pkv.plans.shape import Shape

for dtype in {dtypes}:
    shape = Shape(32, 8, 64, 16, dtype)
    for kernel in KERNELS:
        found = []
        for attend in (test_parts.attend_tokens, test_parts.copied, test_parts.written_anew):
            config = choose_config(shape, GpuProfile("", {arch}, 1), 16)
            found.append(compile_entry(shape, config, {arch}, kernel=kernel, attend=attend))
        print(json.dumps([dtype, kernel, *map(dataclasses.asdict, found)]))
"""


@pytest.mark.parametrize(
    ("arch", "dtypes"),
    [
        (86, ("float16",)),
        pytest.param(86, ("float32",), marks=pytest.mark.slow),
        pytest.param(90, ("float16",), marks=pytest.mark.slow),
    ],
)
def test_entry_kernels_compile_with_another_tile_loop(fresh, arch, dtypes):
    done = fresh(COMPILE.format(arch=arch, dtypes=dtypes), TRITON_INTERPRET="0", timeout=280)
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert len(lines) == 5 * len(dtypes)
    for dtype, kernel, ours, copy, anew in lines:
        assert copy == ours, (dtype, kernel)
        assert anew["async_copies"] == anew["tensor_ops"] == 0, "it does without both, so ours is not in there"
        assert ours["async_copies"] > 0
        assert (ours["tensor_ops"] > 0) == (dtype == "float16")


VERSIONS = """
import sys
from pathlib import Path
from triton.runtime.jit import compute_cache_key
from pkv.bench.fit.compiled import compile_entry
from pkv.bench.measuring.parts import read_parts
from pkv.kernels.configs import choose_config
from pkv.plans.gpu import GpuProfile
from pkv.plans.shape import Shape

file = Path(sys.argv[1] if len(sys.argv) > 1 else "{file}")
shape = Shape(32, 8, 64, 16, "float16")
config = choose_config(shape, GpuProfile("", 86, 1), 16)
text, found = file.read_text(), []
for half in ("0.5", "0.25", "0.5"):
    file.write_text(text.replace("0.5", half))
    attend = read_parts(file)["parts"].attend_tokens
    found.append((attend, compute_cache_key({{}}, [("constexpr", attend)], {{}}), attend.cache_key))
    compile_entry(shape, config, 86, attend=attend)
(first, key, source), (second, other_key, other_source), (third, third_key, third_source) = found
print(len({{first, second, third}}), key != other_key, source != other_source, source == third_source)
"""

MINE = """\
import triton
import triton.language as tl

import pkv
from pkv.tile import attend_tokens


@triton.jit
def mine(query, cache, row, grid_head, begin, end, qk_scale, SHAPE: tl.constexpr):
    out, lse = attend_tokens(query, cache, row, grid_head, begin, end, qk_scale, SHAPE)
    return out * 0.5, lse


parts = pkv.Parts(attend_tokens=mine)
"""


def test_triton_tells_two_versions_of_one_file_apart(fresh, tmp_path):
    """One name, one line, another number: neither its cache in memory nor that on disk takes one for the other."""
    (tmp_path / "mine.py").write_text(MINE)
    done = fresh(VERSIONS.format(file=tmp_path / "mine.py"), TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path / "c"))
    assert done.out.split() == ["3", "True", "True", "True"]
    kernels = [path for path in (tmp_path / "c").rglob("split_kv_kernel.ptx")]
    assert len({path.read_text() for path in kernels}) == len(kernels) == 2


@pytest.mark.parametrize("edit", ["0.25", "(0.5 * 0.5)"])
def test_a_file_that_is_edited_and_read_again_is_another_part(tmp_path, edit):
    file = tmp_path / "mine.py"
    q, cache = batch(CASE)
    want, _ = decode(q, cache, "split_kv")
    for text, factor in ((MINE, 0.5), (MINE.replace("0.5", edit), 0.25), (MINE, 0.5)):
        file.write_text(text)
        out, _ = decode(q, cache, "split_kv", engines_parts.read_parts(file)["parts"])
        torch.testing.assert_close(out, want * factor, rtol=2e-3, atol=1e-4)


# --- pkv bench --parts ---

SEVERAL = MINE + textwrap.dedent(
    """
    def merge(partial_out, partial_lse, offsets, out, lse):
        for row, (first, end) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:])):
            if end - first != 1:
                states = [(partial_out[i], partial_lse[i]) for i in range(first, end)]
                state = pkv.merge([*states, (partial_out[0] * 0, partial_lse[0] * 0 - float("inf"))])
                out[row], lse[row] = state

    merging = pkv.Parts(merge=merge)
    ours = pkv.Parts()
    _hidden = pkv.Parts
    """
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_parts_are_read_by_the_names_of_their_variables(file):
    file.write_text(SEVERAL)
    found = engines_parts.read_parts(file)
    assert list(found) == ["parts", "merging"]
    assert found["parts"].given == ("attend_tokens",)
    again = engines_parts.read_parts(file)
    assert again["parts"].attend_tokens is not found["parts"].attend_tokens


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("parts = 1", r"has no variable that is a pkv\.Parts: write parts = pkv\.Parts\("),
        ("1 / 0", r"does not run: ZeroDivisionError: division by zero"),
        ("parts = (", r"does not run: SyntaxError"),
        ("import pkv\nparts = pkv.Parts(merge=3)", r"does not run: TypeError: parts\.merge must be a Python function"),
    ],
)
def test_a_file_without_parts_says_so(file, text, words, capsys):
    file.write_text(text)
    with pytest.raises(ValueError, match=words):
        engines_parts.read_parts(file)
    assert main(["bench", "--parts", str(file)]) == 2
    assert "mine.py" in capsys.readouterr().err


def test_a_file_that_is_not_there_or_no_python_says_so(tmp_path, capsys):
    assert main(["bench", "--parts", str(tmp_path / "none.py")]) == 2
    assert "none.py does not run: FileNotFoundError" in capsys.readouterr().err
    assert main(["bench", "--parts", str(tmp_path / "mine.txt")]) == 2
    assert "its name must end in .py" in capsys.readouterr().err


def test_engines_with_parts_stand_beside_ours():
    own = {"mine": pkv.Parts(attend_tokens=copied), "all": pkv.Parts(copied, merge_in_torch, by_thirty_two)}
    names = engines_parts.beside(["split_kv", "vllm", "workqueue:tile=32", "stream_k:mine", "adaptive"], own)
    assert names == [
        "split_kv", "split_kv:mine", "vllm", "workqueue:tile=32", "workqueue:mine,tile=32", "workqueue:all,tile=32",
        "stream_k:mine", "adaptive",
    ]  # fmt: skip
    assert [engine.name for engine in find_engines(names, own)] == names
    assert {engine.family for engine in find_engines(["split_kv:mine"], own)} == {"pkv"}
    assert engines_parts.beside(["split_kv:mine", "split_kv"], own) == ["split_kv:mine", "split_kv"]
    assert engines_parts.beside(["vllm", "vllm"], {}) == ["vllm", "vllm"], "which find_engines refuses"
    with pytest.raises(
        ValueError, match=r"none of the engines takes these parts; name one of split_kv, length_buckets"
    ):
        engines_parts.beside(["vllm"], own)
    for name, words in (
        ("flashinfer:mine", r"stage 'flashinfer' does not take parts\.attend_tokens"),
        ("split_kv:yours", "'yours' is no option of it"),
        ("split_kv:mine,splits=0", "splits = 0 is too small"),
        ("split_kv:mine,mine", "'mine' is no option of it"),
        ("vllm:mine", "vllm takes no options"),
    ):
        with pytest.raises(ValueError, match=words):
            find_engines([name], own)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what it does where there is no GPU")
def test_without_a_gpu_parts_are_checked(file, capsys):
    file.write_text(SEVERAL)
    assert main(["bench", "--parts", str(file), "--engines", "split_kv,workqueue", "--json"]) == 1
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["timed"] is False
    checked = {(entry["engine"], entry["dtype"]): entry for entry in found["checked"]}
    assert {engine for engine, _ in checked} == {
        "split_kv:parts", "split_kv:merging", "workqueue:parts", "workqueue:merging",
    }  # fmt: skip
    assert {dtype for _, dtype in checked} == {"float16", "bfloat16", "float32"}
    for (engine, _), entry in checked.items():
        if engine.endswith(":parts"):
            assert "out is off by" in entry["wrong"]
        else:
            assert entry["max_err"] <= entry["tolerance"]
            assert "wrong" not in entry
    assert "split_kv:parts float16: out is off by" in said.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="what it does where there is no GPU")
def test_without_a_gpu_a_part_that_raises_is_named(file, capsys):
    file.write_text(MINE.replace("out * 0.5", "out * half"))
    assert main(["bench", "--parts", str(file), "--engines", "stream_k"]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("no GPU: your parts are checked, nothing is timed\n")
    assert "stream_k:parts" in said.out
    assert "half" in said.err
    assert "Raised in parts.attend_tokens, `mine`" in said.err


def test_with_parts_nothing_is_recorded(file, tmp_path, capsys):
    for words in (["--record", str(tmp_path / "r.jsonl")], ["--resume", str(tmp_path / "r.jsonl")]):
        assert main(["bench", "--parts", str(file), *words]) == 2
        assert "leave out --record and --resume, or --parts" in capsys.readouterr().err
        assert not (tmp_path / "r.jsonl").exists()


@pytest.mark.gpu
def test_on_a_gpu_parts_are_timed_beside_ours(file, capsys):
    file.write_text(MINE.replace("out * 0.5", "out"))
    words = ["--engines", "split_kv", "--only", "equal(1", "--rounds", "3", "--json"]
    assert main(["bench", "--parts", str(file), *words]) == 0
    (load,) = json.loads(capsys.readouterr().out)["loads"]
    assert [entry["engine"] for entry in load["engines"]] == ["split_kv", "split_kv:parts"]
    assert all(entry["gpu_us"] > 0 for entry in load["engines"])


def test_the_documented_parameters_are_those_of_our_own():
    import inspect

    assert tuple(inspect.signature(attend_tokens.fn).parameters) == parts.ATTEND_PARAMETERS

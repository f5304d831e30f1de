"""Every stage, every case: right against fp64, exact where algebra says equal, blind to whatever lies around a row.

Numbers in test names (A2, A3, ...) are those of the faults that met systems like this one.
"""

from __future__ import annotations

import ctypes
import math
import mmap

import pytest
import torch
from cases import (
    CASES,
    DEVICE,
    DTYPES,
    ON_CPU,
    SMALL_CARD,
    Case,
    assert_ramp,
    batch,
    decode,
    known,
    launching,
    named,
    options_of,
    paged,
    ramp,
    randn,
    stage_params,
    stages,
)

import pkv
from pkv._triton import tl, triton
from pkv.bench.accuracy import Yardstick
from pkv.kernels import launching as kernel_arguments
from pkv.kernels import merging
from pkv.kernels.launching import strided
from pkv.kernels.merging import launch_merge
from pkv.kernels.tile import KernelShape, StateArgs
from pkv.stages import s1_split_kv
from pkv.wording.checks import LONGEST_ROW

# -inf - -inf and 0 * NaN are silent on a GPU; the interpreter leaves a numpy warning.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

SPLITS = [{}, {"splits": 1}, {"splits": 3}]
KERNELS_OF_ITS_OWN = [stage for stage in ON_CPU if stage != "adaptive"]  # which runs the others', and can wait
# Tests that start a process without a GPU, or stand in for kernels, show nothing more on a machine that has one.
only_on_cpu = pytest.mark.skipif(DEVICE.type != "cpu", reason="shows the same on any machine: `make test` runs it")


def assert_accurate(q, cache, out, lse, scale=None, largest_score=0.0, stage=""):
    """Within the computed tolerance. A score of 1e4 is itself rounded by 1e-3 in fp32, and so is its weight."""
    yardstick = Yardstick(q, cache, scale)
    eps, largest_v = torch.finfo(torch.float32).eps, max(float(abs(x).max()) for x in (yardstick.out, torch.ones(1)))
    yardstick.tolerance += 4 * eps * largest_score * largest_v
    accuracy = yardstick.measure(out, lse, rounds_weights=stage in ("flashinfer", "adaptive"))
    assert accuracy.ok, accuracy


def assert_same(stage, want, got):
    """Bit for bit; only torch may add up a strided tensor in another order than a contiguous one."""
    for a, b in zip(want, got, strict=True):
        if stage == "reference":
            torch.testing.assert_close(b, a)
        else:
            assert torch.equal(a, b)


def may_hand_over(stage):
    """On a GPU adaptive hands some layouts to FlashInfer, and others that it refuses to a stage of ours."""
    return stage == "adaptive" and DEVICE.type != "cpu"


def split_stages(splits=3):
    return stage_params({"splits": splits}, only={"splits"})


# --- the grid of cases ---


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", named(CASES))
@pytest.mark.parametrize("stage", stages())
def test_stage(stage, case, dtype, nan_memory, launched):
    q, cache = batch(case, DTYPES[dtype])
    want_plan = pkv.plan(case.lengths, pkv.Shape.of(q, cache), stage=stage, **known(stage, case.options))
    out = torch.full_like(q, math.nan)
    got, lse = decode(q, cache, stage, out=out, **case.options)
    assert launched == [launching(want_plan)]
    assert got is out
    assert lse.dtype == torch.float32
    assert_accurate(q, cache, out, lse, stage=stage)
    assert want_plan.validate() is want_plan


# --- exact where algebra says equal ---


@pytest.mark.parametrize(("stage", "options"), stage_params(*SPLITS))
def test_page_ids_do_not_matter(stage, options):
    case = Case("permuted", [40, 7, 33])
    q, cache = batch(case)
    k, v = (torch.zeros(3, 40, 2, 64, dtype=q.dtype) for _ in "kv")
    for row, length in enumerate(case.lengths):
        k[row, :length], v[row, :length] = (x.cpu() for x in cache.gather(row))
    want = decode(q, cache, stage, **options)
    for seed in (5, 6):
        other = paged(k, v, case.lengths, seed=seed)
        assert not torch.equal(other.block_table, cache.block_table)
        for a, b in zip(want, decode(q, other, stage, **options), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("splits", [1, 2, 3, 8])
def test_buckets_of_equal_lengths_are_split_kv(splits):
    q, cache = batch(Case("equal", [41, 41, 41]))
    for a, b in zip(*(decode(q, cache, s, splits=splits) for s in ("split_kv", "length_buckets")), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("stage", "options"), stage_params({"splits": 1}, {"splits": 3}, only={"splits"}))
def test_a_row_does_not_depend_on_the_others(stage, options):
    q, cache = batch(Case("together", [48, 23, 7, 48]))
    out, lse = decode(q, cache, stage, **options)
    for rows in ([0, 1], [2, 3], [3, 1, 0], [0, 3]):
        part = pkv.PagedKVCache(cache.k_pages, cache.v_pages, cache.block_table[rows], cache.lengths[rows])
        got, got_lse = decode(q[rows], part, stage, **options)
        assert torch.equal(got, out[rows])
        assert torch.equal(got_lse, lse[rows])


@pytest.mark.parametrize("stage", stages())
def test_rows_may_share_pages(stage):
    k = randn(1, 40, 2, 64, dtype=torch.float16)
    cache = pkv.PagedKVCache.from_dense(k, -k, [40], n_pages=8, max_rows=2, max_pages=4)
    fork = cache.fork(0)
    cache.append(*(randn(2, 2, 64, seed=s, dtype=torch.float16) for s in (3, 4)))
    assert cache.block_table[0, 0] == cache.block_table[fork, 0]
    q = randn(2, 4, 64, seed=9, dtype=torch.float16).to(DEVICE)
    cache = cache.to(DEVICE)
    out, lse = decode(q, cache, stage)
    assert_accurate(q, cache, out, lse, stage=stage)
    assert not torch.equal(out[0], out[1])


@pytest.mark.parametrize(("stage", "options"), stage_params({"splits": 1}, {"splits": 3}, {}, only={"dynamic"}))
def test_a_dynamic_plan_serves_shorter_lengths(stage, options, nan_memory):
    q, cache = batch(Case("capacity", [64, 64, 64], n_kv_heads=1))
    shape = pkv.Shape.of(q, cache)
    card = {"gpu": SMALL_CARD} if DEVICE.type == "cpu" else {}
    plan = pkv.plan([64, 64, 64], shape, stage=stage, dynamic=True, **card, **options)
    for lengths in ([64, 64, 64], [64, 0, 3], [0, 17, 33], [1, 1, 1], [0, 0, 0]):
        cache.lengths.copy_(torch.tensor(lengths))
        out, lse = pkv.run(q, cache, plan, check=True)
        assert_accurate(q, cache, out, lse, stage=stage)


@pytest.mark.parametrize("where", [0, 130], ids=["first", "last"])
@pytest.mark.parametrize(("stage", "options"), split_stages(1))
def test_the_longest_row_is_found_among_many(stage, options, where, nan_memory):
    """Rows are searched 128 at a time, so the longest one lies in a block of its own: before or after an empty one."""
    lengths = [0] * 131
    lengths[where] = 33
    q, cache = ramp(lengths, n_q_heads=1, n_kv_heads=1, head_dim=16)
    assert_ramp(*decode(q, cache, stage, **options), lengths)


# --- A2: rows of length 0 ---


@pytest.mark.parametrize(("stage", "options"), stage_params({}, *({"splits": s} for s in (1, 2, 3, 5))))
def test_a2_an_empty_row_inside_a_batch(stage, options, nan_memory):
    q, cache = ramp([5, 0, 17])
    out, lse = decode(q, cache, stage, **options)
    assert_ramp(out, lse, [5, 0, 17])


@pytest.mark.parametrize(("stage", "options"), split_stages())
def test_a2_an_empty_row_changes_no_bit_of_the_others(stage, options):
    q, cache = batch(Case("with-empty", [5, 0, 17]))
    out, lse = decode(q, cache, stage, **options)
    rows = [0, 2]
    without = pkv.PagedKVCache(cache.k_pages, cache.v_pages, cache.block_table[rows], cache.lengths[rows])
    got, got_lse = decode(q[rows], without, stage, **options)
    assert torch.equal(got, out[rows])
    assert torch.equal(got_lse, lse[rows])


# --- A3, A6: memory around a row ---


@pytest.mark.pairs
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "minus-inf"])
@pytest.mark.parametrize("page_size", [16, 4, 3, 48])
@pytest.mark.parametrize(("stage", "options"), stage_params({}, {"splits": 2}))
def test_a3_poison_in_the_last_page(stage, options, page_size, poison):
    q, cache = ramp([13], page_size=page_size, poison=poison)
    assert_ramp(*decode(q, cache, stage, **options), [13])


@pytest.mark.pairs
@pytest.mark.parametrize(
    "junk", [[-1], [2**31 - 1], [-(2**31)], "nan page"], ids=["minus-one", "largest", "smallest", "nan-page"]
)
@pytest.mark.parametrize("page_size", [16, 8, 48])
@pytest.mark.parametrize("stage", stages())
def test_a6_junk_in_unused_table_entries(stage, page_size, junk):
    q, cache = ramp([17, 1], page_size=page_size, junk=[0], spare_columns=6)
    want = decode(q, cache, stage)
    assert_ramp(*want, [17, 1])
    used = -(-torch.tensor([17, 1]) // page_size)
    nan_pages = [p for p in range(cache.n_pages) if cache.k_pages[p].isnan().all()]
    value = nan_pages[0] if junk == "nan page" else junk[0]
    for row in range(2):
        cache.block_table[row, used[row] :] = value
    got = decode(q, cache, stage)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    # the same table buffer again, for a smaller batch
    smaller = pkv.PagedKVCache(cache.k_pages, cache.v_pages, cache.block_table[1:], cache.lengths[1:])
    assert_ramp(*decode(q[1:], smaller, stage), [1])


def guarded(x, end):
    """A copy of x whose last (or first) element touches memory that must not be read: doing so ends the process."""
    page = mmap.PAGESIZE
    n_pages = -(-x.nbytes // page) + 2
    region = mmap.mmap(-1, n_pages * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(region))
    for guard in (0, n_pages - 1):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + guard * page), page, 0) == 0
    offset = (n_pages - 1) * page - x.nbytes if end else page
    copy = torch.frombuffer(region, dtype=x.dtype, count=x.numel(), offset=offset).view(x.shape).copy_(x)
    assert copy.data_ptr() == address + offset
    return copy


def decode_guarded(stage, end):
    """Nothing beyond the end (or before the beginning) of any tensor is touched."""
    heads = {"n_q_heads": 3, "n_kv_heads": 1}
    cases = [
        Case("page-16", [33, 17], **heads), Case("page-8", [17, 9], page_size=8, **heads),
        Case("page-3", [17], page_size=3, **heads), Case("page-48", [50, 1], page_size=48, **heads),
        Case("page-64", [65], page_size=64, **heads), Case("page-1", [17], page_size=1, **heads),
        Case("head-dim-13", [17], head_dim=13, **heads), Case("empty-last", [5, 0], **heads),
    ]  # fmt: skip
    for case in cases:
        q, cache = batch(
            case, torch.float32 if case.name == "page-8" else torch.float16, spare_pages=0, spare_columns=0
        )
        tensors = (cache.k_pages, cache.v_pages, cache.block_table, cache.lengths)
        inside = pkv.PagedKVCache(*(guarded(x, end) for x in tensors))
        out = guarded(torch.full_like(q, math.nan), end)
        assert_same(stage, decode(q, cache, stage, splits=2), decode(guarded(q, end), inside, stage, splits=2, out=out))
        print("inside", stage, case.name, flush=True)  # the last such line says where the process ended


@only_on_cpu
@pytest.mark.parametrize(
    ("end", "names"),
    [
        pytest.param(True, KERNELS_OF_ITS_OWN, id="end"),
        pytest.param(True, ["adaptive"], marks=pytest.mark.slow, id="end-adaptive"),
        pytest.param(False, ON_CPU, marks=pytest.mark.slow, id="beginning"),
    ],
)
def test_nothing_outside_the_tensors_is_touched(end, names, fresh):
    done = fresh(f"import test_stages\nfor stage in {names}: test_stages.decode_guarded(stage, {end})")
    assert done.out.count("inside") == 8 * len(names)


# --- A5: strides ---


def both(k, v):
    """K and V as a split of one [n_pages, 2, page_size, n_kv_heads, head_dim] buffer."""
    buffer = torch.stack([k, v], dim=1)
    return buffer.unbind(1)


def permuted(order):
    def view(x):
        inverse = [order.index(axis) for axis in range(4)]
        return x.permute(order).contiguous().permute(inverse)

    return lambda k, v: (view(k), view(v))


def shifted(k, v):
    """Base addresses that are no multiple of 16 bytes."""

    def view(x):
        buffer = torch.full((x.numel() + 1,), math.nan, dtype=x.dtype, device=x.device)
        buffer[1:] = x.flatten()
        return buffer[1:].view(x.shape)

    return view(k), view(v)


def odd_rows(k, v):
    """Token strides that are no multiple of 16 bytes, NaN between the rows."""

    def view(x):
        buffer = torch.full((*x.shape[:3], x.shape[3] + 3), math.nan, dtype=x.dtype, device=x.device)
        buffer[..., : x.shape[3]] = x
        return buffer[..., : x.shape[3]]

    return view(k), view(v)


def every_other_dim(k, v):
    def view(x):
        buffer = torch.full((*x.shape[:3], 2 * x.shape[3]), math.nan, dtype=x.dtype, device=x.device)
        buffer[..., ::2] = x
        return buffer[..., ::2]

    return view(k), view(v)


def k_only(change):
    return lambda k, v: (change(k, v)[0], v)


LAYOUTS = {
    "unbind": both,
    "head-major": permuted([0, 2, 1, 3]),
    "heads-outermost": permuted([2, 0, 1, 3]),
    "dims-before-tokens": permuted([0, 2, 3, 1]),
    "dims-outermost": permuted([3, 0, 1, 2]),
    "odd-address": shifted,
    "odd-stride": odd_rows,
    "every-other-dim": every_other_dim,
    "only-k-odd-address": k_only(shifted),
    "only-k-dims-outermost": k_only(permuted([3, 0, 1, 2])),
}
FLASHINFERS_LAYOUTS = ("unbind", "head-major", "heads-outermost")  # the others it refuses by name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stage", stages())
def test_a5_strided_pages_equal_contiguous_ones(stage, layout):
    q, cache = batch(Case("strided", [20, 7], n_kv_heads=2))
    k_pages, v_pages = LAYOUTS[layout](cache.k_pages, cache.v_pages)
    assert torch.equal(k_pages.nan_to_num(), cache.k_pages.nan_to_num())
    strided = pkv.PagedKVCache(k_pages, v_pages, cache.block_table, cache.lengths)
    if stage == "flashinfer" and layout not in FLASHINFERS_LAYOUTS:
        with pytest.raises(RuntimeError, match="cannot be read along head_dim in aligned vectors of 16 bytes"):
            decode(q, strided, stage)
        return
    if may_hand_over(stage):
        assert_accurate(q, cache, *decode(q, strided, stage), stage=stage)
    else:
        assert_same(stage, decode(q, cache, stage), decode(q, strided, stage))


@pytest.mark.parametrize("stage", stages())
def test_a5_hnd_equals_nhd(stage):
    case = Case("layouts", [20, 7, 33])
    q, cache = batch(case)
    hnd = batch(case, layout="HND")[1]
    view = pkv.PagedKVCache(
        hnd.k_pages.transpose(1, 2), hnd.v_pages.transpose(1, 2), hnd.block_table, hnd.lengths, layout="NHD"
    )
    want = decode(q, cache, stage)
    for other in (hnd, view):
        got = decode(q, other, stage)
        if may_hand_over(stage):
            assert_accurate(q, cache, *got, stage=stage)
        else:
            assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize(("stage", "options"), stage_params({}, {"splits": 2}))
def test_a5_packed_query_and_strided_out(stage, options):
    """q as the first part of a packed QKV row; out in every other head, every other dim of a wider buffer."""
    q, cache = batch(Case("packed", [20, 1], n_q_heads=4, n_kv_heads=2))
    n_rows, n_q_heads, head_dim = q.shape
    packed = torch.full((n_rows, (n_q_heads + 4) * head_dim), math.nan, dtype=q.dtype, device=DEVICE)
    packed[:, : n_q_heads * head_dim] = q.flatten(1)
    views = [
        packed[:, : n_q_heads * head_dim].view(q.shape),
        q.permute(1, 2, 0).contiguous().permute(2, 0, 1),
        q.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    ]
    want, want_lse = decode(q, cache, stage, **options)
    for view in views:
        assert not view.is_contiguous()
        got, lse = decode(view, cache, stage, **options)
        assert_same(stage, (want, want_lse), (got, lse))
        assert got.is_contiguous()
    wide = torch.full((n_rows, 2 * n_q_heads, 2 * head_dim), 7.0, dtype=q.dtype, device=DEVICE)
    for out in (wide[:, ::2, ::2], wide[:, 1::2, :head_dim]):
        wide.fill_(7.0)
        out.fill_(math.nan)
        assert decode(q, cache, stage, out=out, **options)[0] is out
        assert torch.equal(out, want)
        out.fill_(7.0)
        assert (wide == 7.0).all(), "written outside of out"


@pytest.mark.parametrize("stage", stages())
def test_a5_strided_table_and_lengths(stage):
    q, cache = batch(Case("tables", [20, 7, 33]))
    want = decode(q, cache, stage)
    wide_table = torch.full((3, 2 * cache.max_pages + 1), -1, dtype=torch.int32, device=DEVICE)
    wide_table[:, 1::2] = cache.block_table
    tables = [wide_table[:, 1::2], cache.block_table.t().contiguous().t()]
    wide_lengths = torch.full((3, 4), -5, dtype=torch.int32, device=DEVICE)
    wide_lengths[:, 2] = cache.lengths
    for table in tables:
        other = pkv.PagedKVCache(cache.k_pages, cache.v_pages, table, wide_lengths[:, 2])
        assert not other.lengths.is_contiguous()
        assert all(torch.equal(a, b) for a, b in zip(want, decode(q, other, stage), strict=True))


@pytest.mark.parametrize(("stage", "options"), stage_params({}, {"splits": 2}))
def test_out_may_be_q_itself(stage, options):
    q, cache = batch(Case("in-place", [20, 40]))
    want, _ = decode(q.clone(), cache, stage, **options)
    got, _ = decode(q, cache, stage, out=q, **options)
    assert torch.equal(got, want)


# --- A7, A8, A9, A10: sizes ---


@pytest.mark.pairs
@pytest.mark.parametrize("pad", [256, 8])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("head_dim", [13, 16, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("stage", stages())
def test_a7_head_dims_with_nan_right_after_the_row(stage, head_dim, dtype, pad):
    q, cache = batch(Case("head-dims", [19, 5], head_dim=head_dim, n_q_heads=2, n_kv_heads=1), DTYPES[dtype])

    def wide(x):
        buffer = torch.full((*x.shape[:-1], x.shape[-1] + pad), math.nan, dtype=x.dtype, device=DEVICE)
        buffer[..., : x.shape[-1]] = x
        return buffer

    pages = [wide(x)[..., :head_dim] for x in (cache.k_pages, cache.v_pages)]
    padded = pkv.PagedKVCache(*pages, cache.block_table, cache.lengths)
    wide_out = torch.full((2, 2, head_dim + pad), 7.0, dtype=q.dtype, device=DEVICE)
    out, lse = decode(wide(q)[..., :head_dim], padded, stage, out=wide_out[..., :head_dim], splits=2)
    assert_accurate(q, cache, out, lse, stage=stage)
    assert (wide_out[..., head_dim:] == 7.0).all(), "written past a row of out"


HEADS = [(5, 1), (28, 4), (24, 4), (12, 1), (32, 2), (3, 3), (40, 1), (71, 1)]


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads[0]}-over-{heads[1]}")
@pytest.mark.parametrize("stage", stages())
def test_a8_each_query_head_reads_its_kv_head(stage, heads, dtype):
    """The head probe: v of KV head h is h, so query head i returns i // group."""
    n_q_heads, n_kv_heads = heads
    k = randn(1, 20, n_kv_heads, 64, dtype=DTYPES[dtype])
    v = torch.arange(n_kv_heads, dtype=k.dtype).view(1, 1, -1, 1).expand(k.shape)
    q = randn(1, n_q_heads, 64, seed=3, dtype=k.dtype).to(DEVICE)
    cache = paged(k, v, [20])
    out, lse = decode(q, cache, stage)
    want = torch.arange(n_q_heads) // (n_q_heads // n_kv_heads)
    torch.testing.assert_close(out.cpu().float(), want.float()[None, :, None].expand(out.shape), atol=5e-3, rtol=0)
    assert_accurate(q, cache, out, lse, stage=stage)


@pytest.mark.pairs
@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 48, 64, 256, 544])
@pytest.mark.parametrize(("stage", "options"), stage_params({}, {"tile": 32}, {"tile": 64}, {"splits": 3}))
def test_a9_page_sizes(stage, options, page_size):
    q, cache = ramp([50], page_size=page_size)
    assert_ramp(*decode(q, cache, stage, **options), [50])
    q, cache = batch(Case("pages", [50], page_size=page_size, n_kv_heads=1, n_q_heads=2))
    assert_accurate(q, cache, *decode(q, cache, stage, **options), stage=stage)


@pytest.mark.parametrize("page_size", [16, 8, 48])
@pytest.mark.parametrize("stage", stages())
def test_a10_lengths_around_a_multiple_of_the_page(stage, page_size):
    lengths = [1, 15, 16, 17, 31, 32, 33]
    q, cache = ramp(lengths, n_kv_heads=1, page_size=page_size)
    assert_ramp(*decode(q, cache, stage), lengths)
    if page_size == 16:
        assert cache.to_csr()[2].tolist() == [1, 15, 16, 1, 15, 16, 1]


# --- A11: natural logarithm ---


@pytest.mark.parametrize("stage", stages())
def test_a11_parts_computed_apart_merge(stage):
    """3 tokens of v = 1 and 1 token of v = 0: 0.75 and ln 4. Base 2 taken for base e would give 0.830."""
    states = []
    for length, value in ((3, 1.0), (1, 0.0)):
        k = randn(1, length, 2, 64, dtype=torch.float16)
        cache = paged(k, torch.full_like(k, value), [length])
        states.append(decode(torch.zeros(1, 4, 64, dtype=torch.float16, device=DEVICE), cache, stage))
    out, lse = pkv.merge(states)
    torch.testing.assert_close(out, torch.full_like(out, 0.75), atol=1e-3, rtol=0)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(4)), atol=1e-5, rtol=0)


# --- A12: nothing to do ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", stages())
def test_a12_no_rows(stage, dtype, launched):
    full_q, full_cache = batch(Case("two", [5, 17]), DTYPES[dtype])
    full = decode(full_q, full_cache, stage)
    assert len(launched) == 1
    q, cache = batch(Case("none", []), DTYPES[dtype])
    out, lse = decode(q, cache, stage)
    assert (out.shape, out.dtype, out.device.type) == ((0, 4, 64), q.dtype, DEVICE.type)
    assert (lse.shape, lse.dtype) == ((0, 4), torch.float32)
    assert len(launched) == 1, "launched for nothing"
    plan = pkv.plan([], pkv.Shape.of(q, cache), stage=stage)
    assert (plan.n_rows, plan.n_items) == (0, 0)
    assert plan.counters.programs == plan.counters.launches == 0
    assert "0 rows" in str(plan)
    assert pkv.Plan.from_json(plan.to_json()) == plan
    assert pkv.run(q, cache, plan)[0].shape == (0, 4, 64)
    assert pkv.merge([(out, lse), (out, lse)])[0].shape == (0, 4, 64)
    again = decode(full_q, full_cache, stage)
    assert all(torch.equal(a, b) for a, b in zip(full, again, strict=True))


@pytest.mark.parametrize("stage", stages())
def test_a12_all_rows_empty(stage, launched, nan_memory):
    q, cache = batch(Case("all-empty", [0, 0, 0]))
    out = torch.full_like(q, math.nan)
    got, lse = decode(q, cache, stage, out=out)
    if DEVICE.type == "cpu" or "dynamic" not in options_of(stage):  # on a GPU the lengths are not known before a launch
        assert launched == []
    assert (got == 0).all()
    assert (lse == -math.inf).all()
    assert pkv.plan([0, 0, 0], pkv.Shape.of(q, cache), stage=stage).validate().counters.useful_kv_mib == 0


# --- A13: grids ---


class Grids:
    """Stands for a kernel: remembers grids, runs nothing."""

    def __init__(self):
        self.seen = []

    def __getitem__(self, grid):
        self.seen.append(grid)
        return lambda *args, **kwargs: None


@only_on_cpu
@pytest.mark.parametrize(("stage", "options"), split_stages(2))
def test_a13_only_the_first_grid_axis_grows(stage, options, monkeypatch):
    """Axes 1 and 2 end at 65,535 blocks: 2,050 rows of 32 KV heads are already too many."""
    grids = Grids()
    kernels = (type(s1_split_kv.split_kv_kernel), type(merging.merge_kernel))
    for kind in set(kernels):  # whatever kernels the stage has
        monkeypatch.setattr(kind, "__getitem__", lambda kernel, grid: grids[grid])
    lengths = torch.ones(2050, dtype=torch.int32, device=DEVICE)
    pages = torch.zeros(1, 1, 32, 16, dtype=torch.float16, device=DEVICE)
    cache = pkv.PagedKVCache(pages, pages, torch.zeros(2050, 1, dtype=torch.int32, device=DEVICE), lengths)
    q = torch.zeros(2050, 32, 16, dtype=torch.float16, device=DEVICE)
    decode(q, cache, stage, **options)
    assert grids.seen
    for grid in grids.seen:
        grid = grid({}) if callable(grid) else grid
        assert all(size <= 65535 for size in grid[1:]), grid
    assert max(math.prod(g) for g in grids.seen) >= 2050 * 32


# --- scales and scores ---


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, -0.125, 0.5, 1, 1e-30])
@pytest.mark.parametrize("stage", stages())
def test_scale(stage, scale, dtype):
    q, cache = batch(Case("scaled", [20, 0, 33], n_q_heads=2, n_kv_heads=1), DTYPES[dtype])
    out, lse = decode(q, cache, stage, scale=scale, splits=2)
    assert_accurate(q, cache, out, lse, scale, largest_score=abs(scale) * 40, stage=stage)
    default, _ = decode(q, cache, stage, splits=2)
    assert not torch.equal(out, default), "scale was ignored"


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [30, 1e4])
@pytest.mark.parametrize("stage", stages())
def test_huge_scores(stage, size, dtype):
    """Scores of +-size: exp of either over- or underflows, and 1e4 in base 2 has few bits left below the point."""
    signs = (torch.arange(40) % 5 == 0).to(DTYPES[dtype]) * 2 - 1
    k = torch.zeros(1, 40, 2, 64, dtype=DTYPES[dtype])
    k[0, :, :, 0] = signs[:, None]
    v = randn(1, 40, 2, 64, seed=2, dtype=DTYPES[dtype])
    for sign in (1, -1):
        q = torch.zeros(1, 4, 64, dtype=DTYPES[dtype], device=DEVICE)
        q[..., 0] = sign * size
        cache = paged(k, v, [40])
        out, lse = decode(q, cache, stage, scale=1.0, splits=3)
        assert_accurate(q, cache, out, lse, 1.0, largest_score=size, stage=stage)
        winners = signs == sign
        torch.testing.assert_close(out[0, 0].float().cpu(), v[0, winners, 0].float().mean(0), atol=2e-2, rtol=0)


@pytest.mark.parametrize("stage", stages())
def test_scores_beyond_the_range_of_fp16(stage):
    """40 * 40 * 64 = 102,400 is infinity in fp16; the sums must be fp32."""
    k = torch.full((1, 20, 2, 64), 40.0, dtype=torch.float16)
    k[0, ::2] = -40.0
    v = randn(1, 20, 2, 64, seed=2, dtype=torch.float16)
    cache = paged(k, v, [20])
    q = torch.full((1, 4, 64), 40.0, dtype=torch.float16, device=DEVICE)
    for scale in (None, 1.0, -1.0):
        out, lse = decode(q, cache, stage, scale=scale, splits=2)
        assert torch.isfinite(lse).all()
        assert_accurate(q, cache, out, lse, scale, largest_score=float(lse.abs().max()), stage=stage)


# --- A4: offsets beyond 2**31 elements ---
# In a process of its own, because a wrong offset kills it; memory beyond the few elements used is never touched.


def far(x, axis):
    """A copy of x whose last index along `axis` lies beyond 2**31 elements, at a stride that itself fits 32 bits."""
    steps = max(x.shape[axis] - 1, 1)
    step = -(-(2**31) // steps // 16) * 16 + 16
    strides = list(torch.empty([n for a, n in enumerate(x.shape) if a != axis]).stride())
    strides.insert(axis, step)
    n_elements = sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True)) + 1
    view = torch.empty(n_elements, dtype=x.dtype, device=x.device).as_strided(x.shape, strides)
    assert step < 2**31 <= steps * step, "a larger stride is a 64-bit argument, and its products are right by chance"
    return view.copy_(x)


def decode_far(stage, whats):
    """Decode with one axis of one argument stretched beyond 2**31 elements; the answer must not change."""
    n_kv_heads = 3 if "pages-head" in whats else 1  # as many as a far axis needs: each is a program
    case = Case("far", [19, 9, 5], page_size=9, n_q_heads=3, n_kv_heads=n_kv_heads, head_dim=16)
    q, near = batch(case, spare_columns=0)
    wanted = {splits: decode(q, near, stage, splits=splits) for splits in (1, 2)}
    for what in whats:
        decode_one_far(stage, what, q, near, wanted)
        print("as near", stage, what, flush=True)


def decode_one_far(stage, what, q, near, wanted):
    argument, *axis = what.split("-")
    if argument == "pages":
        axes = {"page": 0, "token": 1, "head": 2, "dim": 3}
        k, v = (far(x, axes[axis[0]]) for x in (near.k_pages, near.v_pages))
        cache = pkv.PagedKVCache(k, v, near.block_table, near.lengths)
    elif argument == "table":
        table = far(near.block_table, {"row": 0, "column": 1}[axis[0]])
        cache = pkv.PagedKVCache(near.k_pages, near.v_pages, table, near.lengths)
    elif argument == "lengths":
        cache = pkv.PagedKVCache(near.k_pages, near.v_pages, near.block_table, far(near.lengths, 0))
    else:
        cache = near
    stretched = far(q, {"row": 0, "head": 1, "dim": 2}[axis[0]]) if argument in ("q", "out") else q
    for splits, want in wanted.items():
        if splits == 1 and argument != "out":
            continue  # out is written by the tile loop or by the merge, all else is read by the one tile loop
        if argument == "out":
            got = decode(q, near, stage, splits=splits, out=stretched)
        else:
            got = decode(stretched, cache, stage, splits=splits)
        assert_same(stage, want, got)


FAR = [f"pages-{axis}" for axis in ("page", "token", "head", "dim")]
FAR += [f"{x}-{axis}" for x in ("q", "out") for axis in ("row", "head", "dim")]
FAR += ["table-row", "table-column", "lengths"]
OFTEN = ["pages-page", "pages-dim", "q-row", "q-dim", "out-row", "out-dim", "table-row", "table-column", "lengths"]


@only_on_cpu
def test_a4_offsets_beyond_int32(fresh):
    done = fresh(
        f"""
        import test_stages
        for stage in {KERNELS_OF_ITS_OWN}:
            test_stages.decode_far(stage, {OFTEN})
            for page in (32767, 32768):
                test_stages.decode_at_page(stage, page)
        """
    )
    lines = [[*(f"as near {stage} {what}" for what in OFTEN), "as page 0", "as page 0"] for stage in KERNELS_OF_ITS_OWN]
    assert done.out.splitlines() == [line for of_stage in lines for line in of_stage]


@only_on_cpu
@pytest.mark.slow
def test_a4_offsets_of_every_axis_beyond_int32(fresh):
    seldom = {stage: FAR if stage == "adaptive" else [what for what in FAR if what not in OFTEN] for stage in ON_CPU}
    done = fresh(f"import test_stages\nfor stage, whats in {seldom}.items(): test_stages.decode_far(stage, whats)")
    assert done.out.splitlines() == [f"as near {stage} {what}" for stage, whats in seldom.items() for what in whats]


def decode_at_page(stage, page):
    """P 64, 8 KV heads, D 128: a page takes 65,536 elements, so page 32,768 is the first beyond int32."""
    k, v = (torch.empty(2**31 + 131072, dtype=torch.float16).view(-1, 64, 8, 128) for _ in "kv")
    results = []
    for where in (0, page):
        k[where, :20], v[where, :20] = (randn(20, 8, 128, seed=s, dtype=torch.float16) for s in (1, 2))
        k[where, 20:], v[where, 20:] = math.nan, math.nan
        table = torch.tensor([[where]], dtype=torch.int32)
        cache = pkv.PagedKVCache(k, v, table, torch.tensor([20], dtype=torch.int32))
        results.append(decode(randn(1, 8, 128, dtype=torch.float16), cache, stage, splits=2))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    print("as page 0")


def decode_with_far_partials():
    """The states of two rows kept where items 174,082 and up would keep theirs; the stage reads where they lie."""
    first, n_items = 2**31 // (48 * 257) + 1, 8
    states = torch.empty(first + n_items, 48 * 257)  # of an item, so that out and lse both lie far
    buffer, lse_buffer = states[:, : 48 * 256].unflatten(1, (48, 256)), states[:, 48 * 256 :]

    class FarArgs(kernel_arguments.KernelArgs):
        def __init__(self, *args):
            super().__init__(*args)
            out, lse = (type(self.q)(x, x.stride()) for x in (buffer, lse_buffer))
            self.partials = StateArgs(out, lse)

    def far_uploads(plan, device, uploaded=s1_split_kv.uploaded):
        there = uploaded(plan, device)
        there.arrays = there.arrays | {"partial_offsets": there.arrays["partial_offsets"] + first}
        return there

    q, cache = batch(Case("far", [40, 17], n_q_heads=48, n_kv_heads=2, head_dim=256))
    want = decode(q, cache, "length_buckets", splits=3)
    kernel_arguments.KernelArgs, s1_split_kv.uploaded = FarArgs, far_uploads
    got = decode(q, cache, "length_buckets", splits=3)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert buffer[first, 0].abs().sum() > 0, "the far buffer was not used"
    print("as near")


MERGED = KernelShape(
    GROUP=3, N_KV_HEADS=1, HEAD_DIM=16, PAGE_SIZE=16, HEAD_BLOCKS=1, BLOCK_H=8, BLOCK_D=16, BLOCK_N=16, STAGES=1,
    ALIGNED=True, WHOLE_TILES=True, EARLY_MERGE=False, INTERPRETED=True,
)  # fmt: skip


def merge_far(what):
    """Three rows, the second of 67 items; the states of one side stretched beyond 2**31 elements."""
    side, name = what.split("-")
    n_heads, offsets = 3, torch.tensor([0, 0, 67, 67], dtype=torch.int32)
    sides = {
        "partials": [randn(67, n_heads, 16, seed=1), randn(67, n_heads, seed=2)],
        "result": [torch.full((3, n_heads, 16), math.nan), torch.full((3, n_heads), math.nan)],
    }

    def merged():
        args = [StateArgs(strided(out), strided(lse)) for out, lse in sides.values()]
        launch_merge(*args, offsets, None, 3, 67, MERGED)
        return [x.clone() for x in sides["result"]]

    want = merged()
    part = ["out", "lse"].index(name)
    sides[side][part] = far(sides[side][part], 0)
    for a, b in zip(want, merged(), strict=True):
        assert torch.equal(a, b)
    print("as near", what)


MERGE_FAR = ["partials-out", "partials-lse", "result-out", "result-lse"]


@only_on_cpu
def test_a4_partial_states_beyond_int32(fresh):
    done = fresh(
        f"""
        import test_stages
        test_stages.decode_with_far_partials()
        for what in {MERGE_FAR}:
            test_stages.merge_far(what)
        """
    )
    assert done.out.splitlines() == ["as near"] + [f"as near {what}" for what in MERGE_FAR]


@triton.jit
def show_range(query, cache, row, grid_head, begin, end, qk_scale, SHAPE: tl.constexpr):
    """Stands for attend_tokens: a program's token range as its state."""
    begins = tl.zeros([SHAPE.BLOCK_D, SHAPE.BLOCK_H], tl.float32) + begin
    return begins, tl.zeros([SHAPE.BLOCK_H], tl.float32) + end


@pytest.mark.skipif(not pkv.INTERPRETED, reason="tl.zeros([SHAPE.BLOCK_D, ...]) does not compile")
def test_splits_of_the_longest_row_there_can_be(monkeypatch):
    """Its 2**27 tiles, nearly, times 64 splits exceed 32 bits: the kernel finds the items that were planned."""
    monkeypatch.setattr("pkv.kernels.launching.launch_merge", lambda partials, *rest: seen.append(partials))
    seen = []
    q, cache = batch(Case("short", [5, 5], n_q_heads=1, n_kv_heads=1, head_dim=16))
    lengths = [LONGEST_ROW, 5]
    cache.lengths.copy_(torch.tensor(lengths))
    plan = pkv.plan(lengths, pkv.Shape.of(q, cache), stage="split_kv", splits=64)
    parts = pkv.Parts(attend_tokens=show_range)
    s1_split_kv.launch(q, cache, plan, 1.0, torch.empty_like(q), torch.empty(2, 1), parts)
    _, begins, ends = torch.from_numpy(plan.items.copy()).float().T
    assert torch.equal(seen[0].out.ptr[:, 0, 0], begins)
    full = ends > begins  # a program that finds no tokens may hold its end before its begin
    assert torch.equal(seen[0].lse.ptr[full, 0], ends[full])
    assert (seen[0].lse.ptr[~full, 0] <= begins[~full]).all()

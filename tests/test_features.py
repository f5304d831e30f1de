"""Features against an independent fp64: a window, a soft-cap, both; in every stage, at every door."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
import torch
from cases import DEVICE, JUNK, Case, marks_of, randn
from hypothesis import given, settings
from hypothesis import strategies as st

import pkv
from pkv.bench.accuracy import Yardstick
from pkv.plans.features import NO_VALUES, PLAIN, Features, Values, features_and_values
from pkv.plans.spans import spans_of, visible_tiles
from pkv.stages import LAUNCHED

ALL = [pytest.param(stage, marks=marks_of(stage)) for stage in pkv.STAGES]
WINDOWS = (1, 7, 16, 100, 4096)
LENGTHS = [100, 0, 7, 140, 64, 1]
FEATURES = [(1, None), (7, 3.0), (16, None), (100, None), (4096, None), (None, 2.0), (None, 1e4)]


def batch(
    lengths, page_size=16, dtype=torch.float32, window=None, n_q_heads=4, n_kv_heads=2, head_dim=32, whole_pages=False
):
    """(q, cache, k, v). Before the window lie pages that are gone: their table entries are junk, their memory NaN.

    whole_pages: tokens before the window in a page that it touches stay as they were; else they are NaN too.
    """
    k, v = (randn(len(lengths), max(lengths), n_kv_heads, head_dim, seed=seed, dtype=dtype) for seed in (1, 2))
    q = randn(len(lengths), n_q_heads, head_dim, seed=3, dtype=dtype)
    cache = pkv.PagedKVCache.from_dense(k, v, lengths, page_size, seed=4)
    k_pages, v_pages, table = cache.k_pages.clone(), cache.v_pages.clone(), cache.block_table.clone()
    for row, length in enumerate(lengths if window else []):
        n_gone = max(0, length - window)
        for token in range(n_gone // page_size * page_size if whole_pages else n_gone):
            for pages in (k_pages, v_pages):
                pages[cache.block_table[row, token // page_size], token % page_size] = torch.nan
        table[row, : n_gone // page_size] = JUNK[row % 2]
    tensors = (x.to(DEVICE) for x in (k_pages, v_pages, table, cache.lengths))
    return q.to(DEVICE), pkv.PagedKVCache(*tensors, host_lengths=lengths), k, v


def by_hand(q, k, v, lengths, window=None, soft_cap=None):
    """out and lse in fp64, from the dense k and v, without a line of pkv's."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    group = q.shape[1] // k.shape[2]
    for row, length in enumerate(lengths):
        seen = range(max(0, length - (window or length)), length)
        for head in range(q.shape[1] if seen else 0):
            keys, values = (x[row, seen.start : length, head // group].double() for x in (k, v))
            scores = keys @ q[row, head].cpu().double() / math.sqrt(q.shape[2])
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            lse[row, head] = torch.logsumexp(scores, 0)
            out[row, head] = torch.softmax(scores, 0) @ values
    return out, lse


def assert_close(got, want, tolerance=2e-5):
    out, lse = (x.cpu().double() for x in got)
    assert (out - want[0]).abs().max() < tolerance
    assert torch.equal(torch.isinf(lse), torch.isinf(want[1]))
    assert torch.where(torch.isinf(lse), 0.0, lse - torch.where(torch.isinf(want[1]), 0.0, want[1])).abs().max() < tolerance  # fmt: skip # noqa: E501


@pytest.mark.pairs
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize(("window", "soft_cap"), FEATURES)
@pytest.mark.parametrize("stage", [pytest.param(stage, marks=marks_of(stage)) for stage in pkv.STAGES if stage != "flashinfer"])  # fmt: skip # noqa: E501
def test_against_fp64(stage, window, soft_cap, page_size):
    q, cache, k, v = batch(LENGTHS, page_size, window=window)
    got = pkv.decode(q, cache, stage=stage, window=window, soft_cap=soft_cap, return_lse=True, check=True)
    assert_close(got, by_hand(q, k, v, LENGTHS, window, soft_cap))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("stage", ALL)
def test_in_half_precision(stage, dtype):
    theirs = stage in ("flashinfer", "adaptive")
    soft_cap = None if theirs else 4.0  # FlashInfer's tanh is an approximation: see below
    q, cache, _, _ = batch(LENGTHS, dtype=dtype, window=33, head_dim=64 if theirs else 80, whole_pages=theirs)
    stick = Yardstick(q, cache, window=33, soft_cap=soft_cap)
    got = pkv.decode(q, cache, stage=stage, window=33, soft_cap=soft_cap, return_lse=True, check=True)
    accuracy = stick.measure(*got, rounds_weights=theirs)
    assert accuracy.ok, accuracy


@pytest.mark.gpu
def test_flashinfer_caps_scores_too():
    """Its tanh is good to 2**-11, relative: so are scores, and with them the logarithm of each weight."""
    q, cache, _, _ = batch(LENGTHS, dtype=torch.float16, window=33, head_dim=64, whole_pages=True)
    want, want_lse = pkv.decode(q, cache, stage="reference", window=33, soft_cap=4.0, return_lse=True)
    out, lse = pkv.decode(q, cache, stage="flashinfer", window=33, soft_cap=4.0, return_lse=True)
    torch.testing.assert_close(out, want, atol=2 * 4 * 2**-11 * 4, rtol=0)
    torch.testing.assert_close(lse, want_lse, atol=2 * 4 * 2**-11, rtol=0)


@pytest.mark.parametrize("stage", LAUNCHED)
def test_a_window_that_no_row_reaches_changes_no_bit(stage):
    """But for the order of a row's tiles, of which the last comes last in both."""
    q, cache, _, _ = batch(LENGTHS)
    plain = pkv.decode(q, cache, stage=stage, return_lse=True)
    wide = pkv.decode(q, cache, stage=stage, return_lse=True, window=max(LENGTHS))
    assert all(torch.equal(a, b) for a, b in zip(plain, wide, strict=True))


@pytest.mark.parametrize("stage", LAUNCHED)
def test_tiles_and_splits_of_other_sizes(stage):
    """A head tile, a tail tile and one that is both; windows that begin at, before and after a tile's edge."""
    lengths = [31, 32, 33, 95, 96, 97]
    for tile, window in ((32, 32), (32, 31), (32, 33), (64, 5), (64, 64), (16, 17)):
        q, cache, k, v = batch(lengths, 4, window=window)
        for splits in (1, 3) if stage != "stream_k" else (None,):
            options = {} if splits is None else {"splits": splits}
            got = pkv.decode(q, cache, stage=stage, window=window, tile=tile, return_lse=True, **options)
            assert_close(got, by_hand(q, k, v, lengths, window))


# --- plans ---


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 2000)), min_size=1, max_size=9),
    window=st.one_of(st.none(), st.integers(1, 300)),
    tile=st.sampled_from([16, 32, 64]),
    stage=st.sampled_from(sorted(LAUNCHED)),
)
def test_a_plan_covers_what_is_seen_and_nothing_else(lengths, window, tile, stage):
    shape = pkv.Shape(8, 2, 64, 16, "float16", features=Features(window))
    plan = pkv.plan(lengths, shape, stage, tile=tile, gpu="rtx3060").validate()
    assert pkv.Plan.from_json(plan.to_json()) == plan
    seen = [min(length, window or length) for length in lengths]
    assert np.bincount(plan.items[:, 0], plan.item_tokens, len(lengths)).tolist() == seen
    begins = plan.items[plan.item_tokens > 0, 1]
    assert (begins % tile == 0).all()
    assert plan.counters.useful_kv_mib == sum(seen) * shape.kv_bytes_per_token / 2**20


@pytest.mark.parametrize("lengths", [[], [0], [5, 100, 0, 48, 1000]])
def test_spans_and_tiles(lengths):
    for window in (None, 1, 16, 40, 4096):
        features = Features(window)
        spans = [(max(0, n - (window or n)), n) for n in lengths]
        assert spans_of(np.array(lengths, dtype=np.int32), features).tolist() == [list(span) for span in spans]
        first, n_tiles = visible_tiles(np.array(lengths, dtype=np.int32), 16, features)
        touched = [{token // 16 for token in range(*span)} for span in spans]
        assert n_tiles.tolist() == [len(tiles) for tiles in touched]
        assert [f for f, tiles in zip(first.tolist(), touched, strict=True) if tiles] == [min(t) for t in touched if t]


def test_the_window_of_a_plan_is_in_its_json_and_its_text():
    plan = pkv.plan([100, 7], pkv.Shape(8, 2, 64, 16, "float16"), "row_local", window=20, soft_cap=30.0, gpu="rtx3060")
    assert plan.shape.features == Features(20, True)
    assert json.loads(plan.to_json())["shape"]["features"] == {"window": 20, "soft_cap": True}
    assert "window 20, soft_cap" in str(plan)
    plain = pkv.plan([100, 7], pkv.Shape(8, 2, 64, 16, "float16"), "row_local", gpu="rtx3060")
    assert "features" not in plain.to_json()


def test_items_beside_the_window_are_refused():
    shape = pkv.Shape(8, 2, 64, 16, "float16", features=Features(20))
    for items, said in (
        ([(0, 0, 100)], "item 0 of row 0 begins at 0, before the first tile of its window, 80"),
        ([(0, 96, 100)], "tokens 80:96 of row 0 are lost"),
    ):
        with pytest.raises(ValueError, match=said):
            pkv.plan([100], shape, "workqueue", parts=pkv.Parts(plan=lambda lengths, shape, items=items: items))
    good = pkv.Parts(plan=lambda lengths, shape: [(0, 80, 96), (0, 96, 100)])
    assert pkv.plan([100], shape, "workqueue", parts=good).item_tokens.tolist() == [16, 4]


def test_the_simulator_and_the_paper_policy_count_what_is_seen():
    shape = pkv.Shape(32, 8, 128, 16, "float16")
    for stage in ("split_kv", "workqueue", "stream_k", "flashinfer"):
        short, window = (
            pkv.simulate(pkv.plan([n] * 8, shape, stage, gpu="rtx3060", **options)).gpu_ms
            for n, options in ((1024, {}), (65536, {"window": 1024}))
        )
        assert window == pytest.approx(short, rel=0.1)
    assert pkv.explain([65536] * 8, shape, gpu="rtx3060").chosen == "workqueue"
    assert pkv.explain([65536] * 8, shape, window=1024, gpu="rtx3060").chosen == "flashinfer"


# --- bad input ---


@pytest.mark.parametrize(
    ("features", "error", "said"),
    [
        ({"window": 0}, ValueError, "window = 0 is too small: pass 1 or more"),
        ({"window": -1}, ValueError, "window = -1 is too small"),
        ({"window": 3.0}, TypeError, "window must be an int, got float"),
        ({"window": True}, TypeError, "window must be an int, got bool"),
        ({"soft_cap": 0}, ValueError, "soft_cap = 0 must be a number above 0"),
        ({"soft_cap": -3.0}, ValueError, r"soft_cap = -3\.0 must be a number above 0"),
        ({"soft_cap": True}, ValueError, "soft_cap = True must be a number above 0"),
        ({"soft_cap": math.nan}, ValueError, "soft_cap = nan must be"),
        ({"soft_cap": math.inf}, ValueError, "soft_cap = inf must be"),
        ({"soft_cap": "30"}, ValueError, "soft_cap = '30' must be"),
    ],
)
def test_values_that_make_no_sense(features, error, said):
    q, cache, _, _ = batch([5])
    for call in (
        lambda: pkv.decode(q, cache, **features),
        lambda: pkv.prepare(q, cache, **features),
        lambda: pkv.plan([5], pkv.Shape.of(q, cache), **features),
        lambda: pkv.run(q, cache, pkv.plan([5], pkv.Shape.of(q, cache), "row_local"), **features),
    ):
        with pytest.raises(error, match=said):
            call()


def test_a_plan_of_other_features_is_refused_by_name():
    q, cache, _, _ = batch([100, 5])
    shape = pkv.Shape.of(q, cache)
    plain, windowed = (pkv.plan([100, 5], shape, "row_local", window=window) for window in (None, 20))
    with pytest.raises(ValueError, match="plan was made with window = 20, but the call has no features: pass the same"):
        pkv.run(q, cache, windowed)
    with pytest.raises(ValueError, match="plan was made with window = 20, but the call has window = 21"):
        pkv.run(q, cache, windowed, window=21)
    with pytest.raises(ValueError, match="plan was made with no features, but the call has window = 20 and soft_cap"):
        pkv.run(q, cache, plain, window=20, soft_cap=3.0)
    capped = pkv.plan([100, 5], shape, "row_local", soft_cap=3.0)
    assert torch.equal(
        pkv.run(q, cache, capped, soft_cap=9.0)[0], pkv.decode(q, cache, stage="row_local", soft_cap=9.0)
    )
    with pytest.raises(ValueError, match=r"shape has Features\(window=20\), and the call Features\(window=21\)"):
        pkv.plan([100, 5], windowed.shape, window=21)


def test_a_tile_loop_of_the_users_does_not_know_features():
    from pkv.tile import attend_tokens

    q, cache, _, _ = batch([100, 5])
    parts = pkv.Parts(attend_tokens=attend_tokens)
    plan = pkv.plan([100, 5], pkv.Shape.of(q, cache), "row_local", window=20)
    for call in (
        lambda: pkv.decode(q, cache, parts=parts, window=20),
        lambda: pkv.plan([100, 5], pkv.Shape.of(q, cache), "row_local", parts=parts, window=20),
        lambda: pkv.run(q, cache, plan, parts=parts, window=20),
    ):
        with pytest.raises(ValueError, match=r"parts\.attend_tokens computes plain attention, without window"):
            call()


def test_features_are_facts_only():
    assert features_and_values(None, None) == (PLAIN, NO_VALUES)
    assert features_and_values(5, 3) == (Features(5, True), Values(3.0))
    assert len({Features(5), Features(5), Features(6), PLAIN}) == 3
    with pytest.raises(TypeError, match=r"Features\.soft_cap must be True or False, got 30\.0"):
        Features(soft_cap=30.0)
    with pytest.raises(TypeError, match=r"features must be a pkv\.Features, got dict"):
        pkv.Shape(8, 2, 64, 16, "float16", features={})


# --- the cache ---


def test_what_lies_before_a_window_is_not_looked_at():
    q, cache, k, v = batch([100, 30], window=20)
    with pytest.raises(ValueError, match=r"block_table\[0, 0\] = -1 is outside the pool"):
        cache.validate()
    cache.validate(20)
    with pytest.raises(ValueError, match=r"block_table\[0, 0\] = -1 is outside the pool"):
        pkv.decode(q, cache, stage="row_local", check=True)
    with pytest.raises(ValueError, match=r"block_table\[0, 4\] = -1 is outside the pool"):
        pkv.decode(q, cache, stage="row_local", window=36, check=True)
    for row, length in enumerate([100, 30]):
        for mine, theirs in zip(cache.gather(row, 20), (k, v), strict=True):
            assert torch.equal(mine.cpu(), theirs[row, length - 20 : length])
    assert [len(x) for x in cache.gather(1, 20)] == [20, 20]


def owning(lengths=(40, 9, 33), n_pages=12):
    k, v = (randn(len(lengths), max(lengths), 2, 32, seed=seed) for seed in (1, 2))
    return pkv.PagedKVCache.from_dense(k, v, lengths, 8, n_pages=n_pages, max_rows=4), k, v


def test_pages_that_no_window_reaches_are_given_back():
    """By the example: pages of 8; 40 tokens of which the last 20 are seen have two pages to give."""
    cache, k, v = owning()
    assert cache.n_free_pages == 0
    cache.release_before([0, 2], [20, 15])
    assert cache.n_free_pages == 3
    assert cache.block_table[0, :3].tolist() == [-1, -1, cache.block_table[0, 2]]
    assert cache.block_table[2, 0] == -1
    cache.validate()
    q = randn(4, 4, 32, seed=3)
    for stage in ("reference", *LAUNCHED):
        got = pkv.decode(q, cache, stage=stage, window=20, return_lse=True)
        assert_close([x[:3] for x in got], by_hand(q[:3], k, v, [40, 9, 33], 20))
        with pytest.raises(ValueError, match=r"row 0 has released its first 16 tokens of 40: pass window=24 or less"):
            pkv.decode(q, cache, stage=stage)
        with pytest.raises(ValueError, match=r"row 0 has released its first 16 tokens of 40: pass window=24 or less"):
            pkv.decode(q, cache, stage=stage, window=25)
    assert torch.equal(cache.gather(0, 20)[0], k[0, 20:40])
    with pytest.raises(ValueError, match="row 0 has released its first 16 tokens of 40"):
        cache.gather(0)
    assert torch.equal(cache.gather(1)[0], k[1, :9])
    indptr, indices, _ = cache.to_csr()
    assert indices[indptr[0] : indptr[0] + 3].tolist() == [-1, -1, cache.block_table[0, 2]]


def test_a_row_that_has_released_pages_grows_forks_and_goes():
    cache, k, _ = owning(n_pages=14)
    cache.release_before([0], [40])  # five whole pages: none is left
    assert cache.n_free_pages == 14 - 7
    token = torch.ones(1, 2, 32)
    for _ in range(10):
        cache.append(token, token, rows=[0])
    assert torch.equal(cache.gather(0, 10)[0], torch.ones(10, 2, 32))
    child = cache.fork(0)
    assert cache.block_table[child, :5].tolist() == [-1] * 5
    cache.append(2 * token, token, rows=[child])
    assert cache.gather(child, 11)[0][-1, 0, 0] == 2
    assert torch.equal(cache.gather(0, 10)[0], torch.ones(10, 2, 32))
    cache.release_before([0, child], [48, 49])  # the page that both share becomes free when both have given it back
    n_free = cache.n_free_pages
    cache.free(child), cache.free(0)
    assert cache.n_free_pages == n_free + 2
    row = cache.add(k[2, :33], k[2, :33])
    assert torch.equal(cache.gather(row)[0], k[2, :33])
    pkv.decode(randn(4, 4, 32), cache, stage="row_local")  # no row has released anything any more


@pytest.mark.parametrize(
    ("rows", "positions", "said"),
    [
        ([0, 0], [1, 2], "rows names row 0 more than once"),
        ([3], [0], "row 3 is not active"),
        ([9], [0], r"row = 9 is outside \[0, 4\)"),
        ([0], [41], r"position 41 of row 0 is outside \[0, 40\]"),
        ([0], [-1], r"position -1 of row 0 is outside"),
        ([0], [1, 2], "positions has 2 entries, rows 1: pass one per row"),
    ],
)
def test_releases_that_make_no_sense_change_nothing(rows, positions, said):
    cache, k, _ = owning()
    version = cache.version
    with pytest.raises(ValueError, match=said):
        cache.release_before(rows, positions)
    assert (cache.version, cache.n_free_pages) == (version, 0)
    assert torch.equal(cache.gather(0)[0], k[0, :40])


def test_giving_back_is_always_as_if_the_pages_were_new():
    """Against lists of tokens, over random steps of a server with a window."""
    rng = random.Random(1)
    window, cache = 11, pkv.PagedKVCache.empty(24, 4, 1, 16, max_rows=4, dtype=torch.float32)
    rows, number = {}, 0
    for _ in range(400):
        what = rng.choice(["add", "append", "append", "append", "release", "fork", "free"])
        try:
            if what == "add":
                n = rng.randrange(20)
                new = torch.arange(number, number + n).view(n, 1, 1).expand(n, 1, 16).float()
                rows[cache.add(new, -new)] = list(range(number, number + n))
                number += n
            elif what == "fork" and rows:
                row = rng.choice(list(rows))
                rows[cache.fork(row)] = list(rows[row])
            elif what == "free" and rows:
                row = rng.choice(list(rows))
                cache.free(row)
                del rows[row]
            elif what == "append" and rows:
                row = rng.choice(list(rows))
                cache.append(torch.full((1, 1, 16), float(number)), torch.full((1, 1, 16), -float(number)), [row])
                rows[row].append(number)
                number += 1
            elif what == "release" and rows:
                cache.release_before(list(rows), [max(0, len(tokens) + 1 - window) for tokens in rows.values()])
        except ValueError as error:
            assert "free" in str(error) or "rows are in use" in str(error)  # noqa: PT017
        cache.validate()
        for row, tokens in rows.items():
            seen = [float(token) for token in tokens[max(0, len(tokens) - (window - 1)) :]]
            k, v = cache.gather(row, window - 1)
            assert (k[:, 0, 0].tolist(), (-v[:, 0, 0]).tolist()) == (seen, seen)
    assert number > 100
    for row in list(rows):
        cache.free(row)
    assert cache.n_free_pages == 24


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("stage", ["reference", *LAUNCHED])
def test_any_batch_any_window(stage):
    """Against the yardstick, which the tests above hold to fp64 by hand."""
    rng = random.Random(stage)
    bad = []
    for number in range(24):  # most of its time goes into compiling
        dtype = rng.choice([torch.float16, torch.bfloat16, torch.float32])
        page_size, window = rng.choice([1, 4, 16, 64]), rng.choice([None, 1, 7, 16, 100, 1000, 4096])
        soft_cap = rng.choice([None, None, 5.0, 50.0])
        lengths = [rng.choice([0, 1, rng.randrange(200), rng.randrange(6000)]) for _ in range(rng.randrange(1, 12))]
        heads = rng.choice([(4, 4), (8, 2), (32, 8), (16, 1)])
        case = Case(str(number), lengths)
        if max(lengths) == 0:
            continue
        q, cache, _, _ = batch(lengths, page_size, dtype, window, *heads, head_dim=rng.choice([64, 128]))
        got = pkv.decode(q, cache, stage=stage, window=window, soft_cap=soft_cap, return_lse=True, check=True)
        accuracy = Yardstick(q, cache, window=window, soft_cap=soft_cap).measure(*got)
        if not accuracy.ok:
            bad.append((case, dtype, page_size, window, soft_cap, heads, accuracy))
    assert not bad

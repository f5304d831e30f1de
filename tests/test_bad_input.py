"""Bad input gets a ValueError or TypeError that names argument, row and remedy, and nothing was launched."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from cases import DEVICE, Case, batch, options_of, stages

import pkv
from pkv.decoding import RUN_ARGUMENTS
from pkv.stages.options import NONE, OURS, OWN_WORDS, WHAT_HOLDS

LENGTHS = [5, 40, 17]
HALF = torch.float16


@pytest.fixture
def ready(launched):
    """q, a cache, and at the end the proof that an error left everything alone."""
    q, cache = batch(Case("bad-input", LENGTHS))
    before = [x.clone() for x in (q, cache.k_pages, cache.v_pages)]
    version = cache.version
    yield q, cache
    assert launched == []
    for old, new in zip(before, (q, cache.k_pages, cache.v_pages), strict=True):
        assert torch.equal(old.nan_to_num(), new.nan_to_num())
    assert cache.version == version


def rebuilt(cache, **changes):
    parts = {"k_pages": cache.k_pages, "v_pages": cache.v_pages, "block_table": cache.block_table}
    return pkv.PagedKVCache(**(parts | {"lengths": cache.lengths.clone()} | changes))


# --- q, cache and out ---

BAD_ARRAYS = {
    "q-a-list": (lambda q: q.tolist(), ValueError, r"q must be a tensor \[n_rows, n_q_heads, head_dim\], got list"),
    "q-rank-2": (lambda q: q[0], ValueError, r"q must be .*got \[4, 64\].*one token per row"),
    "q-rank-4": (lambda q: q[:, None], ValueError, r"q must be .*got \[3, 1, 4, 64\]; one decode step has one token"),
    "q-too-few-rows": (lambda q: q[:2], ValueError, r"q has 2 rows, the cache 3"),
    "q-too-many-rows": (lambda q: torch.cat([q, q]), ValueError, r"q has 6 rows, the cache 3"),
    "q-heads-no-multiple": (lambda q: q[:, :3], ValueError, r"q has 3 query heads, not a multiple of the cache's 2 KV"),
    "q-no-heads": (lambda q: q[:, :0], ValueError, r"q has 0 query heads"),
    "q-head-dim": (lambda q: q[..., :32], ValueError, r"q has head_dim 32, the cache 64"),
    "q-fp32": (lambda q: q.float(), TypeError, r"q is torch.float32, the cache torch.float16: .*q.to\(torch.float16\)"),
    "q-bf16": (lambda q: q.bfloat16(), TypeError, r"q is torch.bfloat16, the cache torch.float16"),
    "q-int": (lambda q: q.int(), TypeError, r"q is torch.int32, the cache torch.float16"),
    "q-device": (lambda q: q.to("meta"), ValueError, r"q lies on meta, the cache on \w+(:\d)?: move one, e.g. q.to\("),
}


@pytest.mark.parametrize(("change", "error", "message"), BAD_ARRAYS.values(), ids=BAD_ARRAYS)
@pytest.mark.parametrize("stage", stages())
def test_bad_q(ready, stage, change, error, message):
    q, cache = ready
    out = torch.full_like(q, math.nan)
    with pytest.raises(error, match=message):
        pkv.decode(change(q), cache, stage=stage, out=out)
    plan = pkv.plan(LENGTHS, pkv.Shape.of(q, cache), stage=stage)
    with pytest.raises(error, match=message):
        pkv.run(change(q), cache, plan, out=out)
    assert out.isnan().all()


BAD_OUT = {
    "rows": (lambda q: q[:2].clone(), r"out is \[2, 4, 64\].*must be like q: \[3, 4, 64\] torch.float16"),
    "heads": (lambda q: q[:, :2].clone(), r"out is \[3, 2, 64\].*must be like q"),
    "dtype": (lambda q: q.float(), r"out is .*torch.float32.*must be like q: .*torch.float16"),
    "device": (lambda q: q.to("meta"), r"out is .* on meta, must be like q"),
    "type": (lambda q: [1], r"out must be a tensor like q, got list"),
    "expanded": (lambda q: q[:1, :, :1].clone().expand(q.shape), r"out has elements that share memory.*empty_like"),
}


@pytest.mark.parametrize(("change", "message"), BAD_OUT.values(), ids=BAD_OUT)
@pytest.mark.parametrize("stage", stages())
def test_bad_out(ready, stage, change, message):
    q, cache = ready
    with pytest.raises((ValueError, TypeError), match=message):
        pkv.decode(q, cache, stage=stage, out=change(q))


@pytest.mark.parametrize("bad", [None, "cache", (1, 2)])
@pytest.mark.parametrize("stage", stages())
def test_bad_cache(ready, stage, bad):
    q, _ = ready
    with pytest.raises(TypeError, match=r"cache must be a pkv.PagedKVCache, got \w+"):
        pkv.decode(q, bad, stage=stage)


# --- tables ---

BAD_TABLES = {
    "int64-table": ({"block_table": torch.int64}, TypeError, r"block_table is torch.int64, expected torch.int32: pass"),
    "int64-lengths": ({"lengths": torch.int64}, TypeError, r"lengths is torch.int64, expected torch.int32: pass"),
    "float-lengths": ({"lengths": torch.float32}, TypeError, r"lengths is torch.float32, expected torch.int32"),
    "table-device": ({"block_table": "meta"}, ValueError, r"block_table is on meta, .*pass block_table.to\("),
    "lengths-device": ({"lengths": "meta"}, ValueError, r"lengths is on meta, .*pass lengths.to\("),
    "v-dtype": ({"v_pages": torch.bfloat16}, TypeError, r"v_pages is torch.bfloat16, expected torch.float16"),
    "v-device": ({"v_pages": "meta"}, ValueError, r"v_pages is on meta"),
}


@pytest.mark.parametrize(("changes", "error", "message"), BAD_TABLES.values(), ids=BAD_TABLES)
def test_bad_tables(ready, changes, error, message):
    _, cache = ready
    converted = {name: getattr(cache, name).to(target) for name, target in changes.items()}
    with pytest.raises(error, match=message):
        rebuilt(cache, **converted)


BAD_SHAPES = {
    "table-rank": (
        {"block_table": lambda x: x.flatten()},
        r"block_table has shape \[\d+\], expected \[n_rows, max_pages",
    ),
    "lengths-rank": ({"lengths": lambda x: x[:, None]}, r"lengths has shape \[3, 1\], expected \[3\]"),
    "lengths-rows": ({"lengths": lambda x: x[:2]}, r"lengths has shape \[2\], expected \[3\]"),
    "pages-rank": (
        {"k_pages": lambda x: x[0]},
        r"k_pages has shape .*expected \[n_pages, page_size, n_kv_heads, head_dim",
    ),
    "v-pages": ({"v_pages": lambda x: x[:-1]}, r"v_pages has shape"),
    "v-head-dim": ({"v_pages": lambda x: x[..., :32]}, r"v_pages has shape .*32\], expected .*64\]"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_SHAPES.values(), ids=BAD_SHAPES)
def test_bad_shapes(ready, changes, message):
    _, cache = ready
    with pytest.raises(ValueError, match=message):
        rebuilt(cache, **{name: change(getattr(cache, name)) for name, change in changes.items()})


def test_bad_layout(ready):
    _, cache = ready
    with pytest.raises(ValueError, match=r'layout = \'NDH\' is unknown: pass "NHD" or "HND"'):
        rebuilt(cache, layout="NDH")


# --- values: on the CPU always checked, on a GPU with check=True ---


@pytest.mark.parametrize("stage", stages())
@pytest.mark.parametrize(
    ("row", "length", "message"),
    [
        (1, -3, r"lengths\[1\] = -3"),
        (0, -(2**31), r"lengths\[0\] = -2147483648"),
        (2, 81, r"lengths\[2\] = 81 needs 6 pages of 16, block table has 5: give it 6 columns or shorten the row"),
        (0, 2**31 - 1, r"lengths\[0\] = 2147483647 must lie in 0 .. 2147483584"),
    ],
    ids=["negative", "smallest", "one-too-long", "largest"],
)
def test_bad_lengths(ready, stage, row, length, message):
    q, cache = ready
    cache = rebuilt(cache)
    cache.lengths[row] = length
    out = torch.full_like(q, math.nan)
    with pytest.raises(ValueError, match=message):
        pkv.decode(q, cache, stage=stage, check=True, out=out)
    assert out.isnan().all()


@pytest.mark.parametrize("stage", stages())
@pytest.mark.parametrize("page", [-1, 8, 2**31 - 1, -(2**31)])
def test_table_entry_outside_the_pool(ready, stage, page):
    q, cache = ready
    assert cache.n_pages == 8
    cache = rebuilt(cache, block_table=cache.block_table.clone())
    cache.block_table[1, 2] = page
    out = torch.full_like(q, math.nan)
    message = rf"block_table\[1, 2\] = {page} is outside the pool of 8 pages: row 1 uses 3 entries"
    with pytest.raises(ValueError, match=message):
        pkv.decode(q, cache, stage=stage, check=True, out=out)
    assert out.isnan().all()


def test_an_unused_table_entry_is_not_checked(ready):
    _, cache = ready
    cache.block_table[0, 1] = 10_000
    cache.validate()


@pytest.mark.parametrize("stage", stages())
def test_host_lengths_that_disagree(ready, stage):
    q, cache = ready
    with pytest.raises(ValueError, match=r"host_lengths\[1\] = 41 differs from lengths\[1\] = 40: pass equal"):
        pkv.decode(q, rebuilt(cache, host_lengths=[5, 41, 17]), stage=stage, check=True)
    with pytest.raises(ValueError, match=r"host_lengths has 2 entries, expected 3"):
        rebuilt(cache, host_lengths=[5, 40])


# --- stages, options, plans ---


@pytest.mark.parametrize("name", ["nonsense", "", "Split_KV", 3])
def test_unknown_stage(ready, name):
    q, cache = ready
    message = rf"stage = {name!r} does not exist; choose one of {', '.join(pkv.STAGES)}"
    with pytest.raises(ValueError, match=message):
        pkv.decode(q, cache, stage=name)
    with pytest.raises(ValueError, match=message):
        pkv.plan(LENGTHS, pkv.Shape.of(q, cache), stage=name)


@pytest.mark.parametrize("splits", [0, -1, -(10**9)])
@pytest.mark.parametrize("stage", [stage for stage in pkv.STAGES if "splits" in options_of(stage)])
def test_splits_below_one(ready, stage, splits):
    q, cache = ready
    with pytest.raises(ValueError, match=rf"splits = {splits} .*(at least 1|1 or more)"):
        pkv.decode(q, cache, stage=stage, splits=splits)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"splits": 2.0}, TypeError, r"splits must be an int, got"),
        ({"splits": "2"}, TypeError, r"splits must be an int, got"),
        ({"splits": 10**10}, ValueError, r"splits"),
        ({"tile": 17}, ValueError, r"tile = 17 must be one of 16, 32, 64"),
        ({"tile": 0}, ValueError, r"tile = 0 "),
        ({"tile": 16.0}, TypeError, r"tile must be an int"),
        ({"gpu": "rtx9999"}, ValueError, r"gpu = 'rtx9999' is not a known profile; choose one of .*h200.*rtx3060"),
        ({"gpu": 3}, TypeError, r"gpu must be .*got 3"),
        (
            {"split": 3},
            TypeError,
            r"stage 'split_kv' has no option 'split'; it has splits, tile, gpu.*called splits here",
        ),
        ({"splitz": 3}, TypeError, r"has no option 'splitz'.*Did you mean splits\?"),
        ({"ordering": "longest"}, TypeError, r"stage 'split_kv' has no option 'ordering'; it has splits, tile, gpu"),
    ],
    ids=lambda value: "-".join(map(str, *value.items())) if isinstance(value, dict) else None,
)
def test_bad_options(ready, options, error, message):
    q, cache = ready
    with pytest.raises(error, match=message):
        pkv.decode(q, cache, stage="split_kv", **options)
    with pytest.raises(error, match=message):
        pkv.plan(LENGTHS, pkv.Shape.of(q, cache), stage="split_kv", **options)


@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ([5, -1], ValueError, r"lengths\[1\] = -1"),
        ([5, 2**31], ValueError, r"lengths\[1\] = 2147483648"),
        ([5.0, 1.0], TypeError, r"lengths must be .*int.*got float64"),
        ([[5], [1]], (TypeError, ValueError), r"lengths .*\[2, 1\]"),
        ([[5], [1, 2]], (TypeError, ValueError), r"lengths .*"),
        ([True, False], TypeError, r"lengths must be .*int.*got bool"),
        (["5"], TypeError, r"lengths\[0\] must be an int, got str"),
        ([5, None], TypeError, r"lengths\[1\] must be an int, got NoneType"),
        ([5, True], TypeError, r"lengths must be integers, got bool"),
        (np.array([5, 1], dtype=bool), TypeError, r"lengths must be integers, got bool"),
        (np.float32([5, 1]), TypeError, r"lengths must be integers, got float32"),
        ([np.float64(5), 1], TypeError, r"lengths must be integers, got float64"),
        (torch.ones(2, dtype=torch.bfloat16), TypeError, r"lengths must be integers, got bfloat16"),
        ([5, 10**30], ValueError, rf"lengths\[1\] = {10**30} does not fit into 64 bits"),
        ([-(10**30)], ValueError, rf"lengths\[0\] = -{10**30} does not fit into 64 bits"),
        ([2**63, -1], ValueError, rf"lengths\[0\] = {2**63} does not fit into 64 bits"),
        (
            np.array([5, 2**64 - 1], dtype=np.uint64),
            ValueError,
            rf"lengths\[1\] = {2**64 - 1} does not fit into 64 bits",
        ),
        (np.array([2**40], dtype=np.uint64), ValueError, rf"lengths\[0\] = {2**40} must lie in 0 .. "),
        ("540", TypeError, r"lengths must be a flat list of ints, one per row, got a str"),
        ({5, 40}, TypeError, r"lengths must be a flat list of ints, one per row, got a set"),
        ({5: 40}, TypeError, r"lengths must be a flat list of ints, one per row, got a dict"),
        (iter([5, -1]), ValueError, r"lengths\[1\] = -1 must lie in 0"),
        (iter([5, 1.0]), TypeError, r"lengths must be integers, got float64"),
        (5, (TypeError, ValueError), r"lengths .*"),
        (torch.tensor([[5]]), (TypeError, ValueError), r"lengths .*\[1, 1\]"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Iterator) else str(value),
)
def test_bad_lengths_of_a_plan(lengths, error, message):
    with pytest.raises(error, match=message):
        pkv.plan(lengths, pkv.Shape(4, 2, 64, 16, HALF))


def test_bad_shape_of_a_plan():
    with pytest.raises(TypeError, match=r"shape must be a pkv.Shape, got tuple; pkv.Shape.of\(q, cache\) makes one"):
        pkv.plan([5], (4, 2, 64, 16, HALF))


@pytest.mark.parametrize("stage", [stage for stage in pkv.STAGES if stage not in ("reference", "flashinfer")])
def test_what_only_the_reference_can_do(ready, stage):
    with pytest.raises(ValueError, match=r"head_dim = 257 is above 256.*use stage='reference'"):
        pkv.plan([5], pkv.Shape(4, 2, 257, 16, HALF), stage=stage)
    with pytest.raises(TypeError, match=r"float64 has no kernel.*use stage='reference'"):
        pkv.plan([5], pkv.Shape(4, 2, 64, 16, torch.float64), stage=stage)


def test_what_the_reference_can_do():
    for case, dtype in ((Case("wide", [5, 0, 33], head_dim=300), HALF), (Case("fp64", [5, 0, 33]), torch.float64)):
        q, cache = batch(case, dtype)
        out, lse = pkv.decode(q, cache, stage="reference", return_lse=True)
        assert out.dtype == dtype
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert out.isfinite().all()


TOO_LARGE = {
    "decode": ([1], pkv.Shape(2**20, 2**20, 16, 16, HALF), 2048),  # splits x heads, each a program
    "merge": ([1] * 512, pkv.Shape(2**20, 1, 16, 16, HALF), 1),  # rows x query heads x blocks of dims
}


@pytest.mark.parametrize(("lengths", "shape", "splits"), TOO_LARGE.values(), ids=TOO_LARGE)
def test_more_programs_than_a_grid_can_have(lengths, shape, splits):
    message = (
        rf"rows x query heads x splits = {len(lengths)} x {shape.n_q_heads} x {splits}: "
        r"\d+ programs exceed a grid of 2\*\*31 - 1: "
        "use fewer splits, or decode the rows in parts"
    )
    with pytest.raises(ValueError, match=message):
        pkv.plan(lengths, shape, stage="row_local", splits=splits)
    fewer = (lengths[1:], splits) if len(lengths) > 1 else (lengths, splits - 1)
    assert pkv.plan(fewer[0], shape, stage="row_local", splits=fewer[1]).n_rows == len(fewer[0])


# --- scale ---


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, 1e39, -1e39, 10**400, True, "1", 1j], ids=str)
@pytest.mark.parametrize("stage", stages())
def test_bad_scale(ready, stage, scale):
    q, cache = ready
    with pytest.raises((ValueError, TypeError), match=r"scale = .* must be a finite number"):
        pkv.decode(q, cache, stage=stage, scale=scale)


def test_on_another_device_than_the_current_one():
    """A14 without a second GPU: tensors on different devices are refused by name."""
    q, cache = batch(Case("mixed", [5]))
    assert cache.device.type == DEVICE.type
    with pytest.raises(ValueError, match=r"q lies on meta, the cache on"):
        pkv.decode(q.to("meta"), cache)


# --- words of other libraries ---

FOREIGN = {
    "sm_scale": "called scale here",
    "softmax_scale": "called scale here",
    "scaling": "called scale here",
    "scales": "Did you mean scale\\?",
    "causal": "pkv has no causal: .*nothing to mask: leave it out",
    "is_causal": "pkv has no is_causal: .*nothing to mask",
    "window_size": "called window here",
    "sliding_window": "called window here",
    "window_left": "called window here",
    "attn_mask": "pkv has no attn_mask: every cached token of a row counts",
    "kv_cache_dtype": "pkv has no kv_cache_dtype: the cache has one dtype",
    "k_scale": "pkv has no k_scale: the cache has one dtype",
    "block_tables": "pkv has no block_tables: the cache holds it: pass it to pkv.PagedKVCache",
    "cache_seqlens": "pkv has no cache_seqlens: the cache holds it",
    "logits_soft_cap": "called soft_cap here",
    "sinks": "pkv has no sinks: scores are scaled, windowed and capped",
    "alibi_slopes": "pkv has no alibi_slopes: ",
    "enable_gqa": "pkv has no enable_gqa: it follows from q and the cache",
    "dropout_p": "pkv has no dropout_p: ",
    "pos_encoding_mode": "pkv has no pos_encoding_mode: rotate q and k yourself",
    "num_splits": "called splits here",
    "return_softmax_lse": "called return_lse here.*an argument of pkv.decode",
}


@pytest.mark.parametrize("word", FOREIGN)
@pytest.mark.parametrize("door", ["decode", "plan", "run"])
def test_a_word_of_another_library_is_translated(ready, door, word):
    q, cache = ready
    shape = pkv.Shape.of(q, cache)
    plan = pkv.plan(LENGTHS, shape, stage="row_local")
    call = {
        "decode": lambda **word: pkv.decode(q, cache, **word),
        "plan": lambda **word: pkv.plan(LENGTHS, shape, stage="row_local", **word),
        "run": lambda **word: pkv.run(q, cache, plan, **word),
    }[door]
    if door == "decode" and word == "num_splits":
        word = "n_splits"
    with pytest.raises(
        TypeError, match=rf"has no (option|argument) '{word}'.*{FOREIGN.get(word, 'called splits here')}"
    ):
        call(**{word: 0.3})


@pytest.mark.parametrize("name", ["scale", "out", "check", "parts", "splits", "tile", "gpu", "stage"])
def test_a_word_of_another_of_our_functions_is_sent_there(ready, name):
    """pkv.plan takes no scale, pkv.run no splits."""
    q, cache = ready
    shape = pkv.Shape.of(q, cache)
    if name in ("scale", "out", "check"):
        with pytest.raises(
            TypeError, match=rf"has no option '{name}'.*\({name} is an argument of pkv.run and pkv.decode\)"
        ):
            pkv.plan(LENGTHS, shape, **{name: 1})
    elif name != "parts":
        plan = pkv.plan(LENGTHS, shape, stage="row_local")
        with pytest.raises(TypeError, match=rf"pkv.run has no argument '{name}'.*{name} is an argument of pkv.plan"):
            pkv.run(q, cache, plan, **{name: 1})


def test_no_word_of_others_is_one_of_ours():
    """Else an option of a stage would be refused, or two tables would disagree."""
    ours = {*RUN_ARGUMENTS, "return_lse", "stage", *(name for stage in pkv.STAGES for name in options_of(stage))}
    assert not ours & {*OWN_WORDS, *WHAT_HOLDS}
    assert not {*OWN_WORDS} & {*WHAT_HOLDS}
    assert len(OWN_WORDS) == sum(len(words.split()) for words in OURS.values())
    assert len(WHAT_HOLDS) == sum(len(words.split()) for words in NONE.values())


# --- numbers and dtypes in other clothes ---


@pytest.mark.parametrize(
    "lengths",
    [
        np.array([5, 40], np.uint64), np.array([5, 40], np.int8), np.array([5, 40], object), (5, 40), [np.int16(5), 40],
        deque([5, 40]), (n for n in (5, 40)), map(int, ["5", "40"]), range(5, 41, 35), {"a": 5, "b": 40}.values(),
        torch.tensor([5, 40], dtype=torch.uint8), torch.tensor([5, 40], dtype=torch.uint64), [torch.tensor(5), 40],
    ],
    ids=lambda lengths: f"{type(lengths).__name__}-{getattr(lengths, 'dtype', '')}",
)  # fmt: skip
def test_ints_of_any_make_are_lengths(lengths):
    assert pkv.plan(lengths, pkv.Shape(4, 2, 64, 16, HALF)).lengths.tolist() == [5, 40]


@pytest.mark.parametrize(
    "dtype",
    [HALF, "float16", "torch.float16", "half", "fp16", np.float16, np.dtype("float16"), np.dtype(np.float16)],
    ids=repr,
)
def test_a_dtype_is_spelt_in_any_clear_way(dtype):
    assert pkv.Shape(4, 2, 64, 16, dtype) == pkv.Shape(4, 2, 64, 16, HALF, kv_dtype=dtype)
    assert pkv.PagedKVCache.empty(2, 4, 1, 16, 1, dtype=dtype).to(dtype=dtype).dtype == HALF


@pytest.mark.parametrize(
    "dtype", [None, int, "int8", np.int32, torch.int32, "float17", "Tensor", object, 16, torch.Tensor]
)
def test_what_is_no_dtype_of_floats_is_refused(dtype):
    with pytest.raises(TypeError, match=r"dtype = .* must be a floating-point dtype of torch: torch.float16, or "):
        pkv.Shape(4, 2, 64, 16, dtype)


def test_a_row_may_have_2_to_the_16_splits_and_no_more():
    shape = pkv.Shape(4, 2, 64, 16, HALF)
    assert pkv.plan([5], shape, stage="split_kv", splits=2**16).n_items == 2**16
    with pytest.raises(ValueError, match="splits = 65537 is above 65536"):
        pkv.plan([5], shape, stage="split_kv", splits=2**16 + 1)


def test_a_page_may_have_2_to_the_30_tokens_and_no_more():
    assert pkv.plan([5], pkv.Shape(4, 2, 64, 2**30, HALF), stage="workqueue").n_items > 0
    with pytest.raises(ValueError, match="page_size = 1073741825 is above 1073741824, the most the kernels take"):
        pkv.plan([5], pkv.Shape(4, 2, 64, 2**30 + 1, HALF), stage="workqueue")


@pytest.mark.parametrize(
    ("value", "got"),
    [(2.0, "float"), (np.float64(2), "float64"), (True, "bool"), (np.True_, "bool"), ("2", "str"), (None, "NoneType"),
     (torch.tensor(2.5), "a Tensor of torch.float32"), (torch.tensor(True), "a Tensor of torch.bool"), ([2], "list")],
)  # fmt: skip
def test_what_is_no_int_is_named(value, got):
    with pytest.raises(TypeError, match=rf"page_size must be an int, got {got}"):
        pkv.Shape(4, 2, 64, value, HALF)
    for fine in (np.uint8(4), torch.tensor(4)):
        assert pkv.Shape(4, 2, 64, fine, HALF).page_size == 4

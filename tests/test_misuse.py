"""What a caller may do by accident: overlapping memory, negated views, threads, autocast, failing writes, pickles."""

import copy
import dataclasses
import json
import pickle
import re
import threading
import warnings

import numpy as np
import pytest
import torch
from cases import DEVICE, Case, batch, decode, paged, stages
from cases import randn as randn_on_cpu

import pkv
from pkv import decoding
from pkv.bench.accuracy import Yardstick


def randn(*shape, seed):
    return randn_on_cpu(*shape, seed=seed).to(DEVICE)


STAGES = pytest.mark.parametrize("stage", stages())


@pytest.fixture
def ready():
    return batch(Case("misuse", [5, 40, 0, 17], n_q_heads=4, n_kv_heads=2, head_dim=64))


# --- memory that overlaps ---


@STAGES
def test_out_may_be_q_or_overlap_it(ready, stage):
    q, cache = ready
    want, _ = decode(q, cache, stage)
    buffer = torch.zeros(5, 4, 64, dtype=q.dtype, device=q.device)
    buffer[:4] = q
    assert torch.equal(pkv.decode(buffer[:4], cache, stage=stage, out=buffer[1:]), want)  # one row further
    square = q.clone()
    assert torch.equal(pkv.decode(square, cache, stage=stage, out=square.transpose(0, 1)), want)
    same = q.clone()
    assert torch.equal(pkv.decode(same, cache, stage=stage, out=same), want)
    packed = torch.cat([q, torch.zeros_like(q)], dim=-1)  # interleaved, without sharing an element
    assert torch.equal(pkv.decode(packed[..., :64], cache, stage=stage, out=packed[..., 64:]), want)
    assert torch.equal(packed[..., :64], q)


@STAGES
def test_out_in_the_memory_of_the_cache_is_refused(ready, stage):
    q, cache = ready
    before = cache.k_pages.clone()
    inside = cache.k_pages.flatten()[: q.numel()].view(q.shape)
    with pytest.raises(
        ValueError, match=r"out overlaps the memory of cache.k_pages: pass a tensor with memory of its own"
    ):
        pkv.decode(q, cache, stage=stage, out=inside)
    assert torch.equal(cache.k_pages.isnan(), before.isnan())
    assert torch.equal(cache.k_pages.nan_to_num(), before.nan_to_num())


@STAGES
def test_out_whose_elements_share_memory_is_refused(ready, stage):
    q, cache = ready
    shared = torch.zeros(1000, dtype=q.dtype, device=q.device).as_strided(q.shape, (64, 64, 1))
    with pytest.raises(ValueError, match=r"out has elements that share memory"):
        pkv.decode(q, cache, stage=stage, out=shared)


# --- tensors that are not what their memory says ---


@STAGES
def test_a_lazily_negated_query_is_read_with_its_sign(stage):
    q = torch.complex(randn(1, 4, 64, seed=1).half(), randn(1, 4, 64, seed=2).half()).conj().imag
    assert q.is_neg()
    cache = paged(*(randn_on_cpu(1, 20, 2, 64, seed=seed, dtype=torch.float16) for seed in (3, 4)), [20])
    want, _ = decode(q.resolve_neg(), cache, stage)
    assert torch.equal(pkv.decode(q, cache, stage=stage), want)


def test_lazily_negated_or_sparse_pages_are_refused():
    pages = torch.complex(torch.zeros(3, 4, 1, 16), torch.ones(3, 4, 1, 16)).conj().imag
    table, lengths = torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"k_pages is lazily negated, .*pass k_pages.resolve_neg\(\)"):
        pkv.PagedKVCache(pages, pages, table, lengths)
    cache = pkv.PagedKVCache.empty(4, 4, 1, 16, max_rows=2, dtype=torch.float32)
    dense = torch.ones(3, 1, 16)
    with pytest.raises(ValueError, match=r"k is sparse, .*pass k.to_dense\(\)"):
        cache.add(dense.to_sparse(), dense)


@STAGES
def test_an_out_that_requires_grad_is_refused(ready, stage):
    q, cache = ready
    with pytest.raises(ValueError, match=r"out requires grad"):
        pkv.decode(q, cache, stage=stage, out=torch.empty_like(q).requires_grad_())


@STAGES
@pytest.mark.filterwarnings("ignore:.*carries no gradient")
def test_no_result_carries_a_gradient(ready, stage):
    q, cache = ready
    cache.k_pages.requires_grad_()
    out, lse = pkv.decode(q.clone().requires_grad_(), cache, stage=stage, return_lse=True)
    assert not out.requires_grad
    assert not lse.requires_grad


@pytest.mark.parametrize("wanted_by", ["q", "k_pages", "v_pages"])
def test_one_warning_says_that_there_is_no_gradient(ready, wanted_by, monkeypatch):
    """To who could expect one: not under no_grad, and once per process."""
    q, cache = ready
    monkeypatch.setattr(decoding, "_said", set())
    q = q.clone()
    plan = pkv.plan(cache.lengths, pkv.Shape.of(q, cache), "row_local")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pkv.decode(q, cache)
        (q if wanted_by == "q" else getattr(cache, wanted_by)).requires_grad_()
        for without_gradients in (torch.no_grad(), torch.inference_mode()):
            with without_gradients:
                pkv.decode(q, cache)
        assert told == []
        pkv.decode(q, cache)
        pkv.run(q, cache, plan)
        pkv.decode(q, cache)
    assert [warning.filename for warning in told] == [__file__]  # where the caller is
    assert re.search(r"carries no gradient.*torch.no_grad.*scaled_dot_product_attention", str(told[0].message))
    decoding._said.clear()
    with pytest.warns(UserWarning, match="carries no gradient"):
        pkv.run(q, cache, plan)


@STAGES
def test_a_row_that_is_not_in_use_is_an_empty_row(stage):
    """It was never added, or freed since: out 0, lse -inf."""
    k, v = (randn(3, 20, 2, 64, seed=seed).half() for seed in (1, 2))
    cache = pkv.PagedKVCache.from_dense(k, v, [5, 20, 17], n_pages=8, max_rows=5)
    q = randn(5, 4, 64, seed=3).half()
    full, full_lse = decode(q, cache, stage)
    cache.free(1)
    out, lse = decode(q, cache, stage)
    assert (out[[1, 3, 4]] == 0).all()
    assert (lse[[1, 3, 4]] == -torch.inf).all()
    assert Yardstick(q, cache).measure(out, lse).ok
    torch.testing.assert_close(out[[0, 2]], full[[0, 2]], atol=2e-3, rtol=0)
    torch.testing.assert_close(lse[[0, 2]], full_lse[[0, 2]], atol=1e-4, rtol=0)
    cache.free(0)
    cache.free(2)
    assert (decode(q, cache, stage)[0] == 0).all()


# --- surroundings ---


def test_autocast_changes_neither_the_reference_nor_the_yardstick():
    q = randn(1, 4, 64, seed=1)
    cache = paged(*(randn_on_cpu(1, 40, 2, 64, seed=seed) for seed in (2, 3)), [40])
    want, yardstick = decode(q, cache, "reference"), Yardstick(q, cache)
    with torch.autocast(q.device.type, torch.bfloat16):
        got, again = decode(q, cache, "reference"), Yardstick(q, cache)
    assert torch.equal(want[0], got[0])
    assert again.tolerance == yardstick.tolerance


@STAGES
def test_threads_may_decode_at_once(stage):
    q, cache = batch(Case("threads", [5, 40], n_q_heads=2, n_kv_heads=1, head_dim=16))
    want, results = decode(q, cache, stage), []
    threads = [threading.Thread(target=lambda: results.append(decode(q, cache, stage))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(torch.equal(out, want[0]) and torch.equal(lse, want[1]) for out, lse in results)


@pytest.mark.skipif(not pkv.INTERPRETED, reason="interprets only where there is no GPU")
def test_a_failure_of_the_interpreter_points_to_the_doctor(ready, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("only 0-dimensional arrays can be converted to Python scalars")

    monkeypatch.setattr(pkv.STAGES["split_kv"], "launch", fail)
    with pytest.raises(RuntimeError, match="0-dimensional") as caught:
        pkv.decode(*ready, stage="split_kv")
    assert any("pkv doctor" in note for note in caught.value.__notes__)


# --- scores of -inf ---


@STAGES
@pytest.mark.parametrize("n_hidden", [16, 20, 40])
def test_tokens_hidden_by_scores_of_minus_infinity(stage, n_hidden):
    """A whole first tile may score -inf: the tokens after it count, and if there are none, the row is as if empty."""
    dtype = torch.float16 if stage == "flashinfer" else torch.float32  # of fp16, numpy warns about padded heads
    k, v = torch.zeros(1, 40, 1, 64, dtype=dtype), torch.ones(1, 40, 1, 64, dtype=dtype)
    k[:, :n_hidden, :, 0] = -torch.inf
    q = torch.zeros(1, 1, 64, dtype=dtype)
    q[..., 0] = 1.0
    cache = paged(k, v, [40])
    for splits in (1, 3):
        out, lse = decode(q.to(DEVICE), cache, stage, scale=1.0, splits=splits)
        assert (out == (1.0 if n_hidden < 40 else 0.0)).all()
        assert torch.allclose(lse, torch.tensor(40.0 - n_hidden, device=DEVICE).log())


# --- a plan from elsewhere ---


@pytest.mark.parametrize(("stage", "why"), [("split_kv", "has no splits"), ("row_local", "must name .* their splits")])
def test_items_that_the_kernel_would_not_cut_are_refused(ready, stage, why):
    q, cache = ready
    plan = pkv.plan([5, 40, 0, 17], pkv.Shape.of(q, cache), stage=stage, splits=2, gpu="rtx3060")
    data = json.loads(plan.to_json())
    data["items"][2], data["items"][3] = [1, 0, 32], [1, 32, 40]  # covers the row, but cut elsewhere
    other = pkv.Plan.from_json(json.dumps(data))
    with pytest.raises(ValueError, match=r"row 1 is planned as \[\[0, 32\], \[32, 40\]\], the kernel cuts"):
        pkv.run(q, cache, other)
    decode, merge = plan.launches
    unsplit = (dataclasses.replace(decode, n_splits=0), merge)
    with pytest.raises(ValueError, match=rf"a decode launch {why}"):
        pkv.run(q, cache, dataclasses.replace(plan, launches=unsplit))


def test_a_replaced_plan_runs_as_it_says(ready):
    q, cache = ready
    shape = pkv.Shape.of(q, cache)
    two, three = (pkv.plan([5, 40, 0, 17], shape, stage="row_local", splits=n, gpu="rtx3060") for n in (2, 3))
    pkv.run(q, cache, two)
    fields = ("items", "program_offsets", "partial_offsets", "launches")
    made = dataclasses.replace(two, **{name: getattr(three, name) for name in fields})
    assert made == three
    assert torch.equal(pkv.run(q, cache, made)[0], pkv.run(q, cache, three)[0])


def test_a_plan_keeps_its_own_copy_of_the_arrays():
    lengths = np.array([5, 40], dtype=np.int32)
    plan = dataclasses.replace(pkv.plan([5, 40], pkv.Shape(4, 2, 64, 16, "float16")), lengths=lengths)
    lengths[0] = 7
    assert plan.lengths.tolist() == [5, 40]


@pytest.mark.parametrize("wrong", [None, "split_kv", {}])
def test_run_names_a_plan_that_is_none(ready, wrong):
    with pytest.raises(TypeError, match=r"plan must be a pkv.Plan, got"):
        pkv.run(*ready, wrong)


# --- writes that fail, pickles ---


def owned():
    k = randn(2, 10, 1, 16, seed=1)
    return pkv.PagedKVCache.from_dense(k, k + 1, [3, 10], page_size=4, n_pages=8, max_rows=4, seed=2)


def state_of(cache):
    pool = cache._pool
    return (cache.lengths.tolist(), cache.active_rows, sorted(pool.free_pages), pool.ref_counts.tolist(), cache.version)


@pytest.mark.parametrize("change", ["add", "append", "fork"])
def test_a_write_that_fails_changes_nothing(change, monkeypatch):
    cache = owned()
    before, row = state_of(cache), cache.gather(1)

    def fail(*_):
        raise MemoryError("no memory for the copy")

    monkeypatch.setattr(type(cache), "k_nhd", property(fail))
    token = torch.ones(4, 1, 16, device=DEVICE)
    with pytest.raises(MemoryError):
        {
            "add": lambda: cache.add(token, token),
            "append": lambda: cache.append(token, token),
            "fork": lambda: cache.fork(1),
        }[change]()
    monkeypatch.undo()
    assert state_of(cache) == before
    assert torch.equal(cache.gather(1)[0], row[0])
    cache.append(token, token)  # and goes on as if nothing had been
    assert cache.lengths.tolist() == [4, 11, 0, 0]


def test_a_page_of_the_cache_can_be_added_as_a_row():
    cache = owned()
    page = int(cache.block_table[1, 0])
    row = cache.add(cache.k_pages[page], cache.v_pages[page])
    assert torch.equal(cache.gather(row)[0], cache.gather(1)[0][:4])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=["copy", "pickle"]
)
def test_a_copy_of_a_cache_stands_alone(layout, duplicate):
    k = randn(2, 10, 1, 16, seed=1)
    cache = pkv.PagedKVCache.from_dense(k, k, [3, 10], page_size=4, n_pages=8, layout=layout)
    cache.append(k[:, 0], k[:, 0])
    twin = duplicate(cache)
    assert twin.host_lengths.tolist() == [4, 11]
    q = randn(2, 2, 16, seed=3)
    assert torch.equal(pkv.decode(q, twin), pkv.decode(q, cache))
    twin.k_pages.zero_()
    twin.v_pages.zero_()
    assert not pkv.decode(q, twin).any()
    assert pkv.decode(q, cache).any()
    twin.append(k[:, 0], k[:, 0])
    assert (twin.lengths.tolist(), cache.lengths.tolist()) == ([5, 12], [4, 11])


@pytest.mark.parametrize("row", [True, False])
def test_a_bool_is_no_row(row):
    cache = owned()
    before = state_of(cache)
    for call in (cache.free, cache.fork, cache.gather):
        with pytest.raises(TypeError, match="row must be an int, got bool"):
            call(row)
    assert state_of(cache) == before


# --- the yardstick and the merge ---


def test_the_yardstick_measures_only_results_of_its_shape(ready):
    q, cache = ready
    out, lse = decode(q, cache, "reference")
    yardstick = Yardstick(q, cache)
    for wrong in (out[:1, :1, :1], out[0, 0, 0], out[:2]):
        with pytest.raises(ValueError, match=r"out .* must be \[4, 4, 64\]"):
            yardstick.measure(wrong, lse)
    with pytest.raises(ValueError, match="q has 2 rows, the cache 4"):
        Yardstick(q[:2], cache)


@pytest.mark.parametrize(
    "state", [([1.0], [0.0]), (torch.ones(1, 1).int(), torch.zeros(1)), (torch.ones(1, 1),)], ids=str
)
def test_a_state_is_a_pair_of_floating_point_tensors(state):
    good = (torch.ones(1, 1), torch.zeros(1))
    with pytest.raises(TypeError, match=r"states\[1\] must be a pair \(out, lse\)"):
        pkv.merge([good, state])
    with pytest.raises(TypeError, match=r"states\[1\]: out is torch.float64"):
        pkv.merge([good, (torch.ones(1, 1).double(), torch.zeros(1))])

"""FlashInfer as a stage: its rules mirrored, and its library called. A stand-in proves the calls without a GPU.

What the real library answers is tested where there is a GPU and FlashInfer 0.7 (`make test-gpu`).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import math
import sys
import threading
from types import SimpleNamespace

import fake_flashinfer
import numpy as np
import pytest
import torch
from cases import CASES, DEVICE, DTYPES, Case, assert_ramp, batch, named, paged, ramp, randn
from fake_flashinfer import BatchDecodeWithPagedKVCacheWrapper as FakeWrapper
from hypothesis import given, settings
from hypothesis import strategies as st

import pkv
from pkv.bench.accuracy import Yardstick
from pkv.cards.known import gpu_of, load_gpu
from pkv.plans.gpu import GpuProfile
from pkv.stages import x_flashinfer as stage
from pkv.stages import x_flashinfer_rules as rules

LLAMA = pkv.Shape(32, 8, 128, 16, "float16")
KERNELS = list(rules.KERNELS)
SPLIT_ON_TWO_SMS = GpuProfile("two SMs", 86, 2)  # so small a GPU that few rows are cut in few pieces
FITTING = [case for case in CASES if case.head_dim in rules.HEAD_DIMS]


def planned(lengths, shape=LLAMA, gpu="rtx3060", **options):
    return stage.plan(np.array(lengths, dtype=np.int32), shape, gpu=gpu, **options).validate()


def ranges(plan):
    return [tuple(item) for item in plan.items.tolist()]


# --- the rules ---


def test_tensor_cores_split_seven_rows_of_the_papers_shape_but_not_eight():
    """28 SMs x 2 programs / 8 KV heads: 7 items of 6 rows and a long one; with 8 rows the longest stays whole."""
    seven, eight = ([65536] + [1024] * n for n in (6, 7))
    assert planned(seven, kernel="tensor-core").n_items == 7
    assert planned([65536] + [1024] * 5, kernel="tensor-core").n_items == 7  # one row less: the long one gets two
    plan = planned(eight, kernel="tensor-core")
    assert ranges(plan)[0] == (0, 0, 65536)
    assert [launch.kernel for launch in plan.launches] == ["decode"]


def test_cuda_cores_split_until_the_rows_fill_the_gpu():
    """8 programs on each of 28 SMs, 8 KV heads: room for 28 items, so 28 rows are not split, and 27 are."""
    assert rules.resident(LLAMA, load_gpu("rtx3060"), "cuda-core") == 8
    assert planned([65536] + [128] * 26, kernel="cuda-core").n_items == 28
    assert planned([65536] + [128] * 27, kernel="cuda-core").n_items == 28
    assert ranges(planned([65536] + [128] * 27, kernel="cuda-core"))[0] == (0, 0, 65536)


@pytest.mark.parametrize(
    ("lengths", "kernel", "pages"),
    [
        ([16 * 10, 16 * 100], "tensor-core", 17),  # 16 pages: 1 + 7 items, 17: 1 + 6
        ([16 * 10, 16 * 100, 0], "tensor-core", 20),  # an empty row takes a place: 17 pages make 8 items, 20: 7
        ([16 * 10, 16 * 4000], "cuda-core", 149),  # room for 28: 148 pages make 1 + 28 items, 149: 1 + 27
        ([16 * 10, 16 * 4000, 0], "cuda-core", 149),  # here it takes none
        ([16 * 4000] + [0] * 27, "cuda-core", None),  # yet 28 rows, of whatever length, are enough
        ([16 * 4000] + [0] * 26, "cuda-core", 143),
        ([16 * 9], "tensor-core", 8),  # never below 128 tokens
        ([16 * 8], "tensor-core", None),
        ([16 * 8 + 1], "tensor-core", 8),  # a page begun is a page
        ([1] * 7 + [99999], "tensor-core", None),
        ([0, 0], "tensor-core", None),
        ([0, 0], "cuda-core", None),
        ([], "tensor-core", None),
        ([], "cuda-core", None),
    ],
)
def test_pages_per_split_worked_by_hand(lengths, kernel, pages):
    assert rules.pages_per_split(np.array(lengths, dtype=np.int32), LLAMA, load_gpu("rtx3060"), kernel) == pages


@pytest.mark.parametrize(("page_size", "least"), [(1, 128), (3, 42), (16, 8), (100, 1), (128, 1), (256, 1)])
def test_least_split_in_pages(page_size, least):
    shape = dataclasses.replace(LLAMA, page_size=page_size)
    few = np.array([page_size * (least + 1)], dtype=np.int32)
    assert rules.pages_per_split(few, shape, GpuProfile("big", 90, 1000), "tensor-core") == least


def test_more_kv_heads_than_programs_split_nothing():
    shape = pkv.Shape(64, 64, 128, 16, "float16")  # 2 SMs: 2 * 2 // 64 = 0 items of room
    plan = planned([5000, 0, 70], shape, gpu=SPLIT_ON_TWO_SMS, kernel="tensor-core")
    assert ranges(plan) == [(0, 0, 5000), (1, 0, 0), (2, 0, 70)]


def test_wide_groups_take_several_programs_on_tensor_cores():
    """A tile holds 16, 64 or 128 query heads (64 at head_dim 256), so wide groups leave room for fewer items."""
    tiles = [rules.query_tiles(pkv.Shape(group, 1, 128, 16, "float16")) for group in (1, 16, 17, 64, 65, 128, 129)]
    assert tiles == [1, 1, 1, 1, 1, 1, 2]
    assert rules.query_tiles(pkv.Shape(128, 1, 256, 16, "float16")) == 2
    wide = pkv.Shape(256, 1, 128, 16, "float16")
    assert rules.pages_per_split(np.array([16 * 280]), wide, load_gpu("rtx3060"), "tensor-core") == 10  # 28, not 56


@pytest.mark.parametrize(
    ("group", "head_dim", "arch", "programs"),
    # threads, bytes of shared memory (+ 1024 reserved), registers -> what runs out first
    [
        (4, 128, 86, 8),  # 128 x 60 registers: 8 programs
        (4, 128, 90, 9),  # 56 registers
        (1, 128, 86, 2),  # 4 tokens per thread row: 36,864 bytes
        (1, 128, 90, 6),
        (6, 256, 86, 6),  # 192 threads
        (16, 256, 90, 2),  # 512 threads x 64 registers
        (3, 128, 86, 8),  # 96 threads work, 128 are counted
    ],
)
def test_resident_programs_of_the_cuda_core_kernel(group, head_dim, arch, programs):
    shape = pkv.Shape(8 * group, 8, head_dim, 16, "float16")
    assert rules.resident(shape, GpuProfile("", arch, 28), "cuda-core") == programs
    assert rules.resident(shape, GpuProfile("", arch, 28), "tensor-core") == 2


def test_registers_are_known_for_every_shape_and_card():
    for arch in (75, 80, 86, 87, 89, 90, 100, 103, 120, 999):
        for dtype in rules.DTYPES:
            for head_dim in rules.HEAD_DIMS:
                for group in rules.CUDA_CORE_GROUPS:
                    shape = pkv.Shape(group, 1, head_dim, 16, dtype)
                    assert 1 <= rules.resident(shape, GpuProfile("", arch, 28), "cuda-core") <= 14


@given(
    lengths=st.lists(st.integers(0, 3000) | st.integers(0, 200_000), max_size=40),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (32, 8), (64, 8), (6, 6), (40, 8)]),
    page_size=st.sampled_from([1, 3, 16, 128, 256]),
    kernel=st.sampled_from(KERNELS),
    n_sms=st.integers(1, 132),
)
@settings(max_examples=150, deadline=None)
def test_every_token_is_read_once_whatever_the_lengths(lengths, heads, page_size, kernel, n_sms):
    shape = pkv.Shape(*heads, 128, page_size, "float16")
    if rules.why_not(shape, kernel):
        kernel = "tensor-core"
    gpu = GpuProfile("some", 86, n_sms)
    plan = planned(lengths, shape, gpu=gpu, kernel=kernel)
    assert plan.variant == kernel
    assert plan.needs_partials == (np.diff(plan.partial_offsets) > 1).any()
    assert stage.fault_of_items(plan) is None
    assert pkv.Plan.from_json(plan.to_json()) == plan
    n_places = n_sms * rules.resident(shape, gpu, kernel)
    if plan.needs_partials:  # a split step fits the GPU at once; cuda-core forgets the empty rows
        n_empty = lengths.count(0) if kernel == "cuda-core" else 0
        assert (plan.n_items - n_empty) * shape.n_kv_heads <= n_places
    sizes = {end - begin for (row, begin, end) in ranges(plan) if end < lengths[row]}
    assert len(sizes) <= 1, "one size for all rows"


def brute_force(lengths, shape, gpu, kernel):
    """Pages per split by trying every size from the least: the definition, without a search."""
    pages = [-(-length // shape.page_size) for length in lengths]
    n_places = gpu.n_sms * rules.resident(shape, gpu, kernel)
    if kernel == "cuda-core" and len(lengths) * shape.n_kv_heads >= n_places:
        return None
    least = max(128 // shape.page_size, 1)
    counted = pages if kernel == "cuda-core" else [max(n, 1) for n in pages]
    for size in range(least, max(pages, default=0)):
        if sum(-(-n // size) for n in counted) * shape.n_kv_heads <= n_places:
            return size
    return None


@given(
    lengths=st.lists(st.integers(0, 4000), min_size=1, max_size=12),
    kernel=st.sampled_from(KERNELS),
    n_sms=st.integers(1, 40),
)
@settings(max_examples=100, deadline=None)
def test_the_search_finds_what_trying_every_size_finds(lengths, kernel, n_sms):
    gpu = GpuProfile("some", 86, n_sms)
    found = rules.pages_per_split(np.array(lengths, dtype=np.int32), LLAMA, gpu, kernel)
    assert found == brute_force(lengths, LLAMA, gpu, kernel)


def test_default_kernel_follows_the_group():
    kernels = [rules.default_kernel(pkv.Shape(group, 1, 128, 16, "float16")) for group in (1, 3, 4, 8, 40)]
    assert kernels == ["cuda-core", "cuda-core", "tensor-core", "tensor-core", "tensor-core"]
    assert planned([100]).variant == "tensor-core"


# --- what it refuses ---


@pytest.mark.parametrize(
    ("shape", "kernel", "reason"),
    [
        (pkv.Shape(32, 8, 128, 16, "float32"), None, "float16 or bfloat16 throughout, not float32"),
        (pkv.Shape(32, 8, 128, 16, "float64"), "cuda-core", "float16 or bfloat16"),
        (pkv.Shape(32, 8, 128, 16, "float16", "bfloat16"), None, "float16 / bfloat16"),
        (pkv.Shape(32, 8, 80, 16, "float16"), "tensor-core", "head_dim of 64, 128 or 256, not 80"),
        (pkv.Shape(40, 8, 128, 16, "float16"), "cuda-core", "1, 2, 3, 4, 6, 8 or 16 query heads per KV head, not 5"),
        (LLAMA, "magic", "no kernel 'magic', only tensor-core and cuda-core"),
    ],
)
def test_shapes_that_it_cannot_decode(shape, kernel, reason):
    assert reason in rules.why_not(shape, kernel)
    with pytest.raises(ValueError, match=r"stage 'flashinfer' cannot decode this: .*; use ") as error:
        planned([5], shape, kernel=kernel)
    assert reason in str(error.value)


def test_the_remedy_is_the_other_kernel_where_that_would_do():
    with pytest.raises(ValueError, match="use kernel='tensor-core'"):
        planned([5], pkv.Shape(40, 8, 128, 16, "float16"), kernel="cuda-core")
    with pytest.raises(ValueError, match=r"use another stage, e\.g\. stage='split_kv'"):
        planned([5], pkv.Shape(32, 8, 96, 16, "float16"))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 12, 16, 71])
def test_the_default_kernel_takes_every_group(group):
    assert rules.why_not(pkv.Shape(2 * group, 2, 128, 16, "bfloat16")) is None


def test_more_tokens_than_it_can_count():
    with pytest.raises(ValueError, match=r"3 rows use pages of .* tokens in all, and FlashInfer counts in 32 bits"):
        planned([2**31 - 64] * 3)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_plan_that_flashinfer_would_not_make_is_found(kernel):
    plan = planned([5000, 70], kernel=kernel)
    whole = dataclasses.replace(
        plan,
        items=[[0, 0, 5000], [1, 0, 70]],
        program_offsets=[0, 1, 2],
        partial_offsets=[0, 1, 2],
        launches=(pkv.plans.fields.Launch("decode", (0, 1), 0, 2),),
    ).validate()
    assert "its items are not those that FlashInfer's" in stage.fault_of_items(whole)
    assert "it has no kernel ''" in stage.fault_of_items(dataclasses.replace(plan, variant=""))


# --- launching, with a stand-in for the library ---


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(pkv.STAGES, "flashinfer", stage)
    stage.imported.cache_clear()
    yield
    stage.imported.cache_clear()


@pytest.fixture
def fake(registered, monkeypatch):
    """The list of the stand-in's wrappers, in the order of their making."""
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(stage, "require_gpu", lambda device: None)
    monkeypatch.setattr(FakeWrapper, "made", [])
    return FakeWrapper.made


def run(q, cache, *, kernel=None, gpu=SPLIT_ON_TWO_SMS, **options):
    lengths = cache.lengths if cache.host_lengths is None else cache.host_lengths
    plan = pkv.plan(lengths, pkv.Shape.of(q, cache), "flashinfer", kernel=kernel, gpu=gpu)
    return pkv.run(q, cache, plan, **options)


def assert_accurate(q, cache, result, scale=None, kernel="cuda-core"):
    accuracy = Yardstick(q, cache, scale).measure(*result, rounds_weights=kernel == "tensor-core")
    assert accuracy.ok, accuracy


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("case", named(FITTING))
def test_named_cases(fake, nan_memory, case, dtype, layout):
    q, cache = batch(case, DTYPES[dtype], layout=layout)
    assert_accurate(q, cache, run(q, cache))
    (wrapper,) = fake
    assert (wrapper.layout, wrapper.backend) == (layout, "fa2")
    assert wrapper.use_tensor_cores == (case.n_q_heads // case.n_kv_heads >= 4)


@pytest.mark.parametrize("page_size", [1, 3, 16, 48])
@pytest.mark.parametrize("kernel", KERNELS)
def test_ramp_over_the_ends_of_pages(fake, kernel, page_size):
    """Case A10: a full last page has page_size tokens, not 0."""
    lengths = [1, 15, 16, 17, 31, 32, 33, 48, 0]
    q, cache = ramp(lengths, page_size=page_size)
    assert_ramp(*run(q, cache, kernel=kernel), lengths)


def test_last_page_lengths(fake):
    lengths = [1, 15, 16, 17, 31, 32, 33, 0]
    run(*ramp(lengths))
    assert fake[0].last_page_len == [1, 15, 16, 1, 15, 16, 1, 1]  # of the empty row: any in range
    assert fake[0].indptr == [0, 1, 2, 3, 5, 7, 9, 12, 12]
    want = ramp(lengths)[1].to_csr()
    assert fake[0].indptr == want[0].tolist()
    assert fake[0]._paged_kv_indices_buf.tolist() == want[1].tolist()
    assert fake[0].last_page_len[:-1] == want[2].tolist()[:-1]


def test_four_tokens_give_ln_4(fake):
    """Case A11: 2.0 would be its base 2."""
    q, cache = ramp([4])
    _, lse = run(q, cache)
    torch.testing.assert_close(lse.cpu(), torch.full((1, 4), math.log(4)))


@pytest.mark.parametrize("ours", ["split_kv", "length_buckets"])
def test_parts_of_both_engines_merge_to_the_whole(fake, ours):
    """Case A11: three tokens from one engine, one from the other; and a part that is empty."""
    v = torch.tensor([1.0, 1.0, 1.0, 0.0]).half().view(1, 4, 1, 1).expand(1, 4, 2, 64)
    q, k = torch.zeros(1, 4, 64, dtype=torch.float16, device=DEVICE), randn(1, 4, 2, 64, dtype=torch.float16)
    empty = paged(k, v, [0])
    for begin in (3, 1, 0):
        first, second = paged(k[:, :begin], v[:, :begin], [begin]), paged(k[:, begin:], v[:, begin:], [4 - begin])
        mine = pkv.decode(q, first, stage=ours, return_lse=True)
        out, lse = pkv.merge([mine, run(q, second), run(q, empty)])
        torch.testing.assert_close(out.cpu().float(), torch.full((1, 4, 64), 0.75))
        torch.testing.assert_close(lse.cpu(), torch.full((1, 4), math.log(4)))


def test_rows_without_tokens(fake, nan_memory):
    """Case A12: what the library leaves in such rows is never seen; without any token it is not called."""
    q, cache = ramp([0, 40, 0, 0, 7])
    assert_ramp(*run(q, cache), [0, 40, 0, 0, 7])
    fake.clear()
    for lengths in ([], [0, 0, 0]):
        q, cache = ramp(lengths)
        out, lse = run(q, cache)
        assert (out.shape, out.dtype, lse.shape) == (q.shape, q.dtype, q.shape[:2])
        assert (out == 0).all()
        assert (lse == -math.inf).all()
    assert not fake


@pytest.mark.parametrize("scale", [None, 0.0, -0.0, 0.3, -0.3, 2])
@pytest.mark.parametrize("kernel", KERNELS)
def test_scales(fake, kernel, scale):
    """Below and at 0, its kernels would let masked tokens in."""
    q, cache = batch(Case("", [40, 0, 17]))
    assert_accurate(q, cache, run(q, cache, kernel=kernel, scale=scale), scale)
    assert fake[0].sm_scale > 0


def test_scale_zero_with_keys_of_any_size(fake):
    q, cache = ramp([20])
    assert_ramp(*run(torch.full_like(q, 100.0), cache, scale=0.0), [20])


def test_query_and_out_of_any_strides(fake, nan_memory):
    case = Case("", [40, 17, 0, 5])
    q, cache = batch(case)
    want = run(q, cache)
    packed = torch.zeros(case.n_rows, 9, case.head_dim + 8, dtype=q.dtype, device=q.device)
    packed[:, 2:6, 8:] = q  # rows and heads apart, aligned: read in place
    odd = torch.zeros(case.n_rows, 4, case.head_dim + 1, dtype=q.dtype, device=q.device)
    odd[..., 1:] = q  # not aligned
    by_column = q.transpose(1, 2).contiguous().transpose(1, 2)  # last axis not contiguous
    by_head = q.transpose(0, 1).contiguous().transpose(0, 1)
    shifted, out_shifted = (torch.zeros(q.numel() + 1, dtype=q.dtype, device=q.device)[1:].view(q.shape) for _ in "qo")
    shifted.copy_(q)  # packed, not aligned
    wide = torch.full((case.n_rows, 5, case.head_dim + 3), 7.0, dtype=q.dtype, device=q.device)
    apart = torch.zeros_like(packed)[:, 2:6, 8:]  # aligned, not packed
    outs = (out_shifted, wide[:, 1:, 1:-2], apart, torch.empty_like(by_column), torch.empty_like(by_head))
    for view in (packed[:, 2:6, 8:], odd[..., 1:], by_column, by_head, shifted):
        for out in (None, *outs):
            got, lse = run(view, cache, out=out)
            assert out is None or got is out
            assert torch.equal(got, want[0])
            assert torch.equal(lse, want[1])
    assert (wide[:, 0] == 7).all()
    assert (wide[..., 0] == 7).all()
    assert (wide[..., -2:] == 7).all()


def test_pages_that_are_views(fake):
    """Case A5: K and V interleaved, and HND pages as a permuted view of NHD storage, are read in place."""
    case = Case("", [40, 17])
    q, cache = batch(case)
    want = run(q, cache)
    both = torch.stack([cache.k_pages, cache.v_pages], dim=1)
    table = (cache.block_table, cache.lengths)
    for pages, layout in (
        (both.unbind(1), "NHD"),
        ([x.transpose(1, 2) for x in both.unbind(1)], "HND"),
        ([x.transpose(1, 2).contiguous().transpose(1, 2) for x in (cache.k_pages, cache.v_pages)], "NHD"),
    ):
        got = run(q, pkv.PagedKVCache(*pages, *table, layout=layout))
        assert torch.equal(got[0], want[0])


def test_pages_that_it_cannot_read_are_refused_with_a_reason(fake):
    q, cache = batch(Case("", [40, 17]))
    k, v, table = cache.k_pages, cache.v_pages, (cache.block_table, cache.lengths)
    wide = torch.zeros(*k.shape[:3], 65, dtype=k.dtype, device=k.device)
    by_column = k.transpose(2, 3).contiguous().transpose(2, 3)
    spread = torch.zeros(*k.shape, 8, dtype=k.dtype, device=k.device)[..., 0]
    for pages, reason in (
        ((wide[..., 1:], v), "k_pages with strides"),
        ((k, wide[..., 1:]), "v_pages with strides"),
        ((spread, spread), "k_pages with strides"),
        ((by_column, by_column), "cannot be read along head_dim in aligned vectors of 16 bytes"),
    ):
        for kernel in KERNELS:
            with pytest.raises(stage.BackendError, match=reason):
                run(q, pkv.PagedKVCache(*pages, *table), kernel=kernel)
    apart = torch.zeros(*k.shape[:3], 128, dtype=k.dtype, device=k.device)[..., :64]
    apart.copy_(v)
    assert not fake
    with pytest.raises(stage.BackendError, match="equal strides"):
        run(q, pkv.PagedKVCache(k, apart, *table), kernel="cuda-core")
    unequal = run(q, pkv.PagedKVCache(k, apart, *table), kernel="tensor-core")
    assert torch.equal(unequal[0], run(q, cache, kernel="tensor-core")[0])
    far = SimpleNamespace(stride=lambda axis=None: 1 if axis else (2**32, 64, 64, 1), itemsize=2, data_ptr=lambda: 0)
    assert "counts elements in 32 bits" in rules.unfit(far, far, "tensor-core")


def test_one_plan_serves_many_launches_and_follows_the_block_table(fake):
    """A plan knows lengths, not pages: other pages for a row, or another layer's table, need no new plan."""
    case = Case("", [40, 0, 17])
    q, cache = batch(case, seed=1)
    plan = pkv.plan(cache.lengths, pkv.Shape.of(q, cache), "flashinfer")
    want = pkv.run(q, cache, plan)
    other_q, other = batch(case, seed=2)
    assert_accurate(other_q, other, pkv.run(other_q, other, plan))
    # the same tokens on other pages, in place
    order = torch.randperm(cache.n_pages, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    place = torch.argsort(order)
    cache.k_pages.copy_(cache.k_pages[order].clone())
    cache.v_pages.copy_(cache.v_pages[order].clone())
    used = cache.block_table.clamp(0, cache.n_pages - 1).long()
    is_used = (cache.block_table >= 0) & (cache.block_table < cache.n_pages)
    cache.block_table.copy_(torch.where(is_used, place[used].to(torch.int32), cache.block_table))
    for got, wanted in zip(pkv.run(q, cache, plan), want, strict=True):
        assert torch.equal(got, wanted)
    assert [wrapper.n_runs for wrapper in fake] == [3], "planned once"
    # a table of another width has its entries elsewhere
    wide = torch.full((3, cache.max_pages + 5), -1, dtype=torch.int32, device=DEVICE)
    wide[:, : cache.max_pages] = cache.block_table
    wider = pkv.PagedKVCache(cache.k_pages, cache.v_pages, wide, cache.lengths)
    strided = pkv.PagedKVCache(cache.k_pages, cache.v_pages, wide.repeat(1, 2)[:, : wide.shape[1]], cache.lengths)
    for same in (wider, strided):
        assert torch.equal(pkv.run(q, same, plan)[0], want[0])
    assert [wrapper.n_runs for wrapper in fake] == [3, 2]


def test_two_plans_alive_do_not_disturb_each_other(fake):
    batches = [batch(Case("", lengths), seed=seed) for seed, lengths in enumerate([[40, 3], [5, 0, 33], [40, 3]])]
    plans = [pkv.plan(cache.lengths, pkv.Shape.of(q, cache), "flashinfer") for q, cache in batches]
    first = [pkv.run(*both, plan) for both, plan in zip(batches, plans, strict=True)]
    again = [pkv.run(*both, plan) for both, plan in zip(batches, plans, strict=True)]
    for (q, cache), one, two in zip(batches, first, again, strict=True):
        assert_accurate(q, cache, one)
        assert torch.equal(one[0], two[0])
    assert [wrapper.n_runs for wrapper in fake] == [2, 2, 2]
    assert len({wrapper.workspace.data_ptr() for wrapper in fake}) == 1, "128 MiB once, not per plan"


def test_each_scale_and_layout_is_planned_once(fake):
    case = Case("", [40, 17])
    q, cache = batch(case)
    _, hnd = batch(case, layout="HND")
    plan = pkv.plan(cache.lengths, pkv.Shape.of(q, cache), "flashinfer")
    for _ in range(2):
        for which in (cache, hnd):
            for scale in (None, 0.5):
                assert_accurate(q, which, pkv.run(q, which, plan, scale=scale), scale)
    assert [(wrapper.layout, wrapper.n_runs) for wrapper in fake] == [("NHD", 2)] * 2 + [("HND", 2)] * 2


def test_threads_share_a_plan(fake):
    """Page ids are gathered for the launch that follows: no other thread's may come in between."""
    case = Case("", [100, 17])
    batches = [batch(case, seed=seed) for seed in range(4)]
    plan = pkv.plan(case.lengths, pkv.Shape.of(*batches[0]), "flashinfer")
    scale = 1 / 8
    prepared = [torch.empty(0)] * len(batches)

    def work(index):
        q, cache = batches[index]
        for _ in range(20):
            out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=q.device)
            stage.launch(q, cache, plan, scale, out, lse)
            if not Yardstick(q, cache, scale).measure(out, lse).ok:
                return
        prepared[index] = out

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(out) for out in prepared)


def test_inference_mode(fake):
    q, cache = batch(Case("", [40, 0]))
    plan = pkv.plan(cache.lengths, pkv.Shape.of(q, cache), "flashinfer")
    with torch.inference_mode():
        inside = pkv.run(q, cache, plan)
    assert torch.equal(pkv.run(q, cache, plan)[0], inside[0])


def test_decode_plans_and_runs(fake):
    q, cache = ramp([40, 0, 17])
    out, lse = pkv.decode(q, cache, stage="flashinfer", kernel="cuda-core", return_lse=True, check=True)
    assert_ramp(out, lse, [40, 0, 17])
    assert not fake[0].use_tensor_cores


# --- a library that is missing, or broken ---


def fail(error):
    def method(self, *args, **kwargs):
        raise error

    return method


def test_cpu_tensors_are_refused_before_anything(registered):
    if DEVICE.type == "cuda":
        pytest.skip("tensors lie on the GPU here")
    with pytest.raises(stage.BackendError, match=r"runs on a CUDA GPU only, and q lies on cpu: move .* or choose"):
        run(*ramp([5]))


def test_not_installed(fake, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    remedy = r"stage 'flashinfer': FlashInfer is not installed: pip install flashinfer-python; or choose another stage"
    with pytest.raises(stage.BackendError, match=remedy):
        run(*ramp([5]))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('no driver\\nmore')", "RuntimeError: no driver"),  # case C2
        ("[][0]", "IndexError: list index out of range"),
        ("raise OSError", "OSError"),
        ("import a_module_that_is_missing", "ModuleNotFoundError: No module named 'a_module_that_is_missing'"),
        ("", "is not FlashInfer 0.7"),
    ],
)
def test_an_install_that_does_not_import_is_a_reason(registered, monkeypatch, tmp_path, source, reason):
    (tmp_path / "flashinfer.py").write_text(f"open({str(tmp_path / 'count')!r}, 'a').write('x')\n{source}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setattr(stage, "require_gpu", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert reason in stage.unavailable()
    for _ in range(2):
        with pytest.raises(stage.BackendError, match="or choose another stage") as error:
            run(*ramp([5]), gpu="rtx3060")
        assert reason in str(error.value)
    assert (tmp_path / "count").read_text() == "x", "tried once"
    assert planned([5, 400]).n_items > 2, "planning needs no FlashInfer"
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)


def test_unavailable(fake, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a CUDA GPU" in stage.unavailable()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert stage.unavailable() is None


@pytest.mark.parametrize("method", ["__init__", "plan", "run"])
@pytest.mark.parametrize("error", [RuntimeError("Ninja build failed.\nlog"), FileNotFoundError("nvcc"), ValueError()])
def test_a_failure_inside_is_told_with_its_cause(fake, monkeypatch, method, error):
    """Case C1: no nvcc, no ninja, which shows at the first plan()."""
    q, cache = ramp([5])
    plan = pkv.plan([5], pkv.Shape.of(q, cache), "flashinfer")
    with monkeypatch.context() as broken:
        broken.setattr(FakeWrapper, method, fail(error))
        step = "run" if method == "run" else "plan"
        with pytest.raises(stage.BackendError, match=rf"FlashInfer's {step}\(\) failed.*`pkv doctor`") as raised:
            pkv.run(q, cache, plan)
    assert raised.value.__cause__ is error
    assert type(error).__name__ in str(raised.value)
    assert "log" not in str(raised.value)
    assert_ramp(*pkv.run(q, cache, plan), [5])  # nothing broken stays with the plan


def test_a_version_that_keeps_a_copy_of_the_page_indices(fake, monkeypatch):
    """The wrapper's own tensor is the one that is filled; if it has another form, that is an error, not old pages."""
    plain = FakeWrapper.plan

    def keep(change):
        def plan(self, indptr, indices, *args, **kwargs):
            plain(self, indptr, indices, *args, **kwargs)
            self._paged_kv_indices_buf = change(indices)

        return plan

    monkeypatch.setattr(FakeWrapper, "plan", keep(torch.clone))
    q, cache = ramp([40, 5])
    assert_ramp(*run(q, cache), [40, 5])
    monkeypatch.setattr(FakeWrapper, "plan", keep(torch.Tensor.long))
    with pytest.raises(stage.BackendError, match="keeps the page indices in another form"):
        run(q, cache)


def test_the_stand_in_has_the_real_signatures():
    try:
        version = importlib.metadata.version("flashinfer-python")
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper as RealWrapper
    except Exception as error:
        pytest.skip(f"FlashInfer cannot be imported: {error!r}")
    for name in ("__init__", "plan", "_plan_impl", "run"):
        real, mine = (inspect.signature(getattr(x, name)).parameters for x in (RealWrapper, FakeWrapper))
        facts = [[(p.name, p.kind, p.default) for p in parameters.values()] for parameters in (real, mine)]
        assert facts[0] == facts[1], f"{name} of FlashInfer {version}"
    source = inspect.getsource(RealWrapper._plan_impl)
    assert "self._paged_kv_indices_buf = indices.to(" in source, "which keeps a tensor that is on the device"


# --- with FlashInfer, on a GPU ---


@pytest.fixture
def real(registered):
    reason = stage.unavailable()
    if reason is not None:
        pytest.skip(reason)
    import flashinfer

    return flashinfer


HERE = {"gpu": None}  # the card at hand


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("page_size", [1, 16, 32])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_real_results(real, layout, page_size, kernel):
    for lengths in ([9000], [3000, 0, 1, 700, 16, 33], [257] * 40):
        for dtype in ("fp16", "bf16"):
            case = Case("", lengths, page_size=page_size, n_q_heads=32, n_kv_heads=8, head_dim=128)
            q, cache = batch(case, DTYPES[dtype], layout=layout)
            assert_accurate(q, cache, run(q, cache, kernel=kernel, **HERE), kernel=kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_real_ramp_over_the_ends_of_pages(real, kernel):
    lengths = [1, 15, 16, 17, 31, 32, 33, 0, 1000]
    q, cache = ramp(lengths, n_q_heads=32, n_kv_heads=8, head_dim=128)
    assert_ramp(*run(q, cache, kernel=kernel, **HERE), lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_real_scales(real, kernel):
    q, cache = batch(Case("", [400, 0, 17], n_q_heads=32, n_kv_heads=8, head_dim=128))
    for scale in (None, 0.0, -0.3, 2.0):
        assert_accurate(q, cache, run(q, cache, kernel=kernel, scale=scale, **HERE), scale, kernel=kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_real_parts_of_both_engines_merge_to_the_whole(real, kernel):
    lengths, cut = [700, 40, 300], [300, 40, 0]
    shape = (3, max(lengths), 8, 128)
    k, v = (randn(*shape, seed=seed, dtype=torch.float16) for seed in (1, 2))
    q = randn(3, 32, 128, dtype=torch.float16).to(DEVICE)
    tails = [torch.stack([x[row].roll(-cut[row], 0) for row in range(3)]) for x in (k, v)]
    ours = pkv.decode(q, paged(k, v, cut), return_lse=True)
    rest = paged(*tails, [length - done for length, done in zip(lengths, cut, strict=True)])
    theirs = run(q, rest, kernel=kernel, **HERE)
    assert_accurate(q, paged(k, v, lengths), pkv.merge([ours, theirs]), kernel=kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_real_launches_follow_the_block_table_without_waiting(real, kernel):
    case = Case("", [900, 0, 170], n_q_heads=32, n_kv_heads=8, head_dim=128)
    batches = [batch(case, seed=seed) for seed in (1, 2)]
    plan = pkv.plan(case.lengths, pkv.Shape.of(*batches[0]), "flashinfer", kernel=kernel)
    pkv.run(*batches[0], plan)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [pkv.run(*both, plan) for both in batches]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for both, result in zip(batches, results, strict=True):
        assert_accurate(*both, result, kernel=kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_real_plan_per_step_while_the_gpu_lags_behind(real, kernel):
    """A plan dropped after its step must stay in pinned memory until the GPU has copied it."""
    steps = [
        batch(Case("", [n, 3000 - n], n_q_heads=32, n_kv_heads=8, head_dim=128), seed=n) for n in range(1, 1500, 99)
    ]
    run(*steps[0], kernel=kernel, **HERE)
    torch.cuda._sleep(1_000_000_000)
    results = [run(*both, kernel=kernel, **HERE) for both in steps]
    for both, result in zip(steps, results, strict=True):
        assert_accurate(*both, result, kernel=kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_real_streams_have_their_own_buffers(real, kernel):
    case = Case("", [9000, 100], n_q_heads=32, n_kv_heads=8, head_dim=128)
    batches = [batch(case, seed=seed) for seed in range(4)]
    plan = pkv.plan(case.lengths, pkv.Shape.of(*batches[0]), "flashinfer", kernel=kernel)
    streams = [torch.cuda.Stream() for _ in batches]
    torch.cuda.synchronize()
    results = []
    for _ in range(5):
        results = []
        for both, stream in zip(batches, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(pkv.run(*both, plan))
    torch.cuda.synchronize()
    for both, result in zip(batches, results, strict=True):
        assert_accurate(*both, result, kernel=kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_real_graph_capture(real, kernel):
    case = Case("", [9000, 0, 100], n_q_heads=32, n_kv_heads=8, head_dim=128)
    (q, cache), (_, other) = batch(case, seed=1), batch(case, seed=2)
    plan = pkv.plan(case.lengths, pkv.Shape.of(q, cache), "flashinfer", kernel=kernel)
    pkv.run(q, cache, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = pkv.run(q, cache, plan)
    for name in ("k_pages", "v_pages", "block_table"):
        getattr(cache, name).copy_(getattr(other, name))
    graph.replay()
    torch.cuda.synchronize()
    assert_accurate(q, other, result, kernel=kernel)


@pytest.mark.gpu(n=2)
@pytest.mark.parametrize("kernel", KERNELS)
def test_real_second_gpu_while_the_first_is_current(real, kernel):
    """Case A14."""
    q, cache = batch(Case("", [900, 0, 170], n_q_heads=32, n_kv_heads=8, head_dim=128))
    there = cache.to("cuda:1")
    out, lse = run(q.to("cuda:1"), there, kernel=kernel, **HERE)
    assert torch.cuda.current_device() == 0
    assert (out.device, lse.device) == (torch.device("cuda:1"), torch.device("cuda:1"))
    assert_accurate(q, cache, (out.to(q.device), lse.to(q.device)), kernel=kernel)


@dataclasses.dataclass
class Decision:
    """What FlashInfer's plan() has decided: see DecodePlanInfo and PrefillPlanInfo in its attention/scheduler.cuh."""

    is_split: bool
    n_programs: int  # per KV head
    tokens_per_split: int

    @classmethod
    def of(cls, wrapper, kernel):
        info = [int(number) for number in wrapper._plan_info]
        assert len(info) == {"cuda-core": 10, "tensor-core": 15}[kernel]
        offset = info[7 if kernel == "cuda-core" else 9]
        tokens = wrapper._pin_memory_int_workspace_buffer[offset : offset + 4].view(torch.int32)
        return cls(bool(info[-1]), info[0], int(tokens))


def real_wrapper(real, kernel, **options):
    workspace = torch.zeros(stage.WORKSPACE, dtype=torch.uint8, device=DEVICE)
    tensor_cores = kernel == "tensor-core"
    return real.BatchDecodeWithPagedKVCacheWrapper(workspace, use_tensor_cores=tensor_cores, backend="fa2", **options)


def plan_really(wrapper, lengths, shape):
    lengths = np.array(lengths)
    indptr = np.concatenate([[0], np.cumsum(-(-lengths // shape.page_size))]).astype(np.int32)
    last = ((np.maximum(lengths, 1) - 1) % shape.page_size + 1).astype(np.int32)
    indices = torch.zeros(int(indptr[-1]), dtype=torch.int32, device=DEVICE)
    torch.cuda.synchronize()  # its pinned memory is written again
    wrapper.plan(
        torch.from_numpy(indptr), indices, torch.from_numpy(last), shape.n_q_heads, shape.n_kv_heads, shape.head_dim,
        shape.page_size, q_data_type=shape.dtype, kv_data_type=shape.kv_dtype,
    )  # fmt: skip


def random_lengths(seed):
    generator = np.random.default_rng(seed)
    n_rows = int(generator.integers(1, generator.choice([4, 12, 40, 300]) + 1))
    lengths = generator.integers(0, generator.choice([200, 3000, 40_000]) + 1, n_rows)
    lengths[generator.random(n_rows) < 0.15] = 0
    lengths[generator.integers(n_rows)] += int(generator.choice([1, 5000, 100_000]))
    return lengths.astype(np.int32)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 8), (8, 8), (64, 8), (16, 1), (40, 8)], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_mirrored_splits_are_the_real_ones(real, kernel, heads):
    n_split = 0
    for page_size in (1, 16, 64):
        shape = pkv.Shape(*heads, 128, page_size, "float16")
        if rules.why_not(shape, kernel):
            pytest.skip(rules.why_not(shape, kernel))
        wrapper = real_wrapper(real, kernel)
        for seed in range(70):
            lengths = random_lengths(seed)
            mine = stage.plan(lengths, shape, kernel=kernel, gpu=gpu_of(DEVICE))
            plan_really(wrapper, lengths, shape)
            decision = Decision.of(wrapper, kernel)
            size = rules.pages_per_split(lengths, shape, gpu_of(DEVICE), kernel)
            assert decision.is_split == (size is not None) == mine.needs_partials, (seed, decision, size)
            assert decision.n_programs == mine.n_items * (rules.query_tiles(shape) if kernel == "tensor-core" else 1)
            if size is not None:
                assert decision.tokens_per_split == size * page_size, (seed, decision, size)
                n_split += 1
    assert n_split > 20


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", rules.HEAD_DIMS)
def test_the_derived_residency_is_the_drivers(real, head_dim, dtype):
    """Planned for a CUDA graph, the cuda-core kernel's grid is all programs that the driver says are resident."""
    gpu, wrong = gpu_of(DEVICE), {}
    for group in rules.CUDA_CORE_GROUPS:
        shape = pkv.Shape(group, 1, head_dim, 16, DTYPES[dtype])
        buffers = [torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in (2, 4096, 1)]
        names = ["paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"]
        wrapper = real_wrapper(real, "cuda-core", use_cuda_graph=True, **dict(zip(names, buffers, strict=True)))
        plan_really(wrapper, [50_000], shape)
        found = Decision.of(wrapper, "cuda-core").n_programs / gpu.n_sms
        if found != rules.resident(shape, gpu, "cuda-core"):
            wrong[group] = (found, rules.resident(shape, gpu, "cuda-core"))
    assert not wrong, f"(found, derived) by group: {wrong}"

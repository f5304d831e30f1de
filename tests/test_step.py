"""A Step launches what the first call of its kind launched, and looks anew wherever that call would be refused.

Without a GPU, kernels that only remember stand for those on one, and the CPU's tensors count as a GPU's.
"""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref

import pytest
import torch
from cases import DEVICE, DTYPES, ON_CPU, Case, batch, marks_of
from test_launch_keys import CHANGES, kernels

import pkv
from pkv import decoding, step
from pkv.bench.accuracy import Yardstick
from pkv.kernels import launching
from pkv.kernels.launching import CACHES, kind_of
from pkv.plans.features import NO_VALUES, PLAIN, Features, Values
from pkv.stages import LAUNCHED, s5_stream_k
from pkv.step import STEPS, Step, kind_of_call

kernels = kernels  # the fixture
CASE = Case("ready", [70, 0, 300])
HOST_PLANNED = [stage for stage in LAUNCHED if pkv.STAGES[stage].PLANNED_ON == "host"]


@pytest.fixture
def as_on_a_gpu(kernels, monkeypatch):
    """The kernels; this process's tensors are a GPU's, and it is the current one."""
    for module in (step, launching):
        monkeypatch.setattr(module, "INTERPRETED", False)
    monkeypatch.setattr(launching, "merges_early", lambda device: True)
    monkeypatch.setattr(step, "GPU", DEVICE.type)
    monkeypatch.setattr(step, "STEPS", {})
    monkeypatch.setattr(decoding, "STEPS", step.STEPS)
    current = torch.empty(0, device=DEVICE).device.index
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    return kernels


def prepared(q, cache, stage="stream_k", values=NO_VALUES, **features):
    """A Step as pkv.prepare makes one on a GPU; the long way launches too, so that the kernels are compiled."""
    shape = pkv.Shape.of(q, cache, Features(**features))
    dynamic = {"dynamic": True} if pkv.STAGES[stage].PLANNED_ON == "gpu" else {}

    def plan_for(cache):
        lengths = [cache.capacity] * cache.n_rows if dynamic else cache.host_lengths
        return pkv.plan(lengths, shape, stage, gpu="rtx3060", **dynamic)

    def run(q, cache, plan, out):
        result, lse = torch.empty_like(q) if out is None else out, torch.empty(q.shape[:2], device=q.device)
        pkv.STAGES[stage].launch(q, cache, plan, 0.125, result, lse, values=values)
        return result, lse

    return Step(q, cache, plan_for, run, 0.125, values)


def launches_of(monkeypatch, stage=s5_stream_k):
    """The launches from now on: (kernel, programs, arguments, ...)."""
    launched = []
    launch_kernel = stage.launch_kernel
    monkeypatch.setattr(
        stage, "launch_kernel", lambda *args, **options: launched.append(args) or launch_kernel(*args, **options)
    )
    return launched


# --- what a later call does ---


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_a_later_call_launches_the_same(as_on_a_gpu, dtype, monkeypatch):
    q, cache = batch(CASE, dtype)
    ready = prepared(q, cache)
    ready(q, cache)
    assert [kernel.n_launches for kernel in as_on_a_gpu.values()] == [0] * 6, "the first call compiles"
    launched = launches_of(monkeypatch)
    other = torch.randn_like(q)
    out, lse = ready.repeat(other, cache, None)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, q.shape[:2], torch.float32)
    assert out.is_contiguous()
    decode, merge = launched
    assert decode[2][0].ptr is other
    assert decode[2][2].out.ptr is merge[2][2].out.ptr is out
    assert decode[2][3].out.ptr is merge[2][1].out.ptr, "both have the same partial states"
    for side in decode[2][0], decode[2][2].out, decode[2][3].out:
        assert side.strides == side.ptr.stride()
    names = ("stream_k_kernel", "merge_runs_kernel")
    assert [as_on_a_gpu[name].n_launches for name in names] == [1, 1]
    assert all(len(as_on_a_gpu[name].made) == 1 and len(as_on_a_gpu[name].grids) == 1 for name in names)


@pytest.mark.parametrize("stage", LAUNCHED)
def test_another_layer_is_read_from_its_own_memory(as_on_a_gpu, stage, monkeypatch):
    q, cache = batch(CASE)
    layer = pkv.PagedKVCache(cache.k_pages.clone(), cache.v_pages.clone(), cache.block_table, cache.lengths)
    ready = prepared(q, cache, stage, Values(30.0), window=40, soft_cap=True)
    ready(q, cache)
    launched = launches_of(monkeypatch, LAUNCHED["split_kv" if stage == "length_buckets" else stage])
    assert ready.repeat(q, layer, None) is not None
    read = launched[0][2][1]
    assert (read.k.ptr.data_ptr(), read.v.ptr.data_ptr()) == (layer.k_pages.data_ptr(), layer.v_pages.data_ptr())
    assert read.masks.window == 40
    assert read.masks.soft_cap == pytest.approx(30.0 / torch.log(torch.tensor(2.0)).item())


def test_partial_states_are_each_calls_own(as_on_a_gpu, monkeypatch):
    """Two calls may be on two streams of a GPU at once."""
    q, cache = batch(CASE)
    ready = prepared(q, cache)
    ready(q, cache)
    launched = launches_of(monkeypatch)
    for _ in range(2):
        ready(q, cache)
    first, _, second, _ = launched
    assert first[2][3].out.ptr.data_ptr() != second[2][3].out.ptr.data_ptr()
    assert first[2][3].lse.ptr.data_ptr() != second[2][3].lse.ptr.data_ptr()


@pytest.mark.parametrize("stage", LAUNCHED)
def test_no_tensor_of_the_caller_is_held(as_on_a_gpu, stage):
    q, cache = batch(CASE)
    out = torch.empty_like(q)
    ready = prepared(q, cache, stage)
    ready(q, cache, out)
    alive = [weakref.ref(x.untyped_storage()) for x in (q, out, cache.k_pages, cache.block_table, cache.lengths)]
    del q, out, cache
    gc.collect()
    assert [storage() for storage in alive] == [None] * 5
    assert ready.plan.stage == stage


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_memory_that_a_cache_left_is_held_no_longer(as_on_a_gpu, layout):
    q, full = batch(CASE)
    pages = [x if layout == "NHD" else x.transpose(1, 2).contiguous() for x in (full.k_pages, full.v_pages)]
    cache = pkv.PagedKVCache(*(x.clone() for x in pages), full.block_table, full.lengths, layout)
    storage = cache.k_pages.untyped_storage()
    old = weakref.ref(storage)
    del storage
    ready = prepared(q, cache)
    ready(q, cache)
    cache.k_pages.set_(cache.k_pages.clone())
    assert ready.repeat(q, cache, None) is not None
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_of_a_cache_is_found_out_again(as_on_a_gpu, duplicate):
    q, cache = batch(CASE)
    prepared(q, cache)(q, cache)
    assert not CACHES.known(duplicate(cache))


# --- what is of another kind ---


def test_whatever_a_check_or_a_kernel_looks_at_makes_another_kind(as_on_a_gpu):
    q, _ = batch(CASE)
    kinds = {change: kind_of(make(q)) for change, make in CHANGES.items()}
    same = {"as-it-is", "eight-elements-further", "far-rows"}  # 16 bytes further: aligned alike
    for change, kind in kinds.items():
        alike = same if change in same else {change}
        assert {other for other, theirs in kinds.items() if theirs == kind} == alike


def test_what_decode_keeps_a_step_by(as_on_a_gpu):
    q, cache = batch(CASE)
    base = kind_of_call(q, cache, None, None, PLAIN, NO_VALUES)
    wide = pkv.PagedKVCache(cache.k_pages, cache.v_pages, cache.block_table.repeat(1, 2), cache.lengths)
    others = [
        kind_of_call(q, cache, "stream_k", None, PLAIN, NO_VALUES),
        kind_of_call(q, cache, None, 0.5, PLAIN, NO_VALUES),
        kind_of_call(q.float(), cache, None, None, PLAIN, NO_VALUES),
        kind_of_call(q[:1], cache, None, None, PLAIN, NO_VALUES),
        kind_of_call(q, wide, None, None, PLAIN, NO_VALUES),
        kind_of_call(q, cache, None, None, Features(7), NO_VALUES),
        kind_of_call(q, cache, None, None, Features(8), NO_VALUES),
        kind_of_call(q, cache, None, None, Features(soft_cap=True), Values(3.0)),
        kind_of_call(q, cache, None, None, Features(soft_cap=True), Values(4.0)),
    ]
    assert len({base, *others}) == 1 + len(others)
    layer = pkv.PagedKVCache(cache.k_pages.clone(), cache.v_pages.clone(), cache.block_table, cache.lengths)
    assert kind_of_call(q, layer, None, None, PLAIN, NO_VALUES) == base, "layers share a step"


@pytest.mark.parametrize(
    "call",
    [
        lambda q, cache: (q, cache, None, 1),  # a scale of type int or bool equals a float
        lambda q, cache: (q, cache, None, True),
        lambda q, cache: (q, cache, ["stream_k"], None),
        lambda q, cache: (torch.complex(q.float(), q.float()).conj().imag, cache, None, None),
        lambda q, cache: (torch.nn.Parameter(q), cache, None, None),
        lambda q, cache: (q.to_sparse(), cache, None, None),
        lambda q, cache: (q.cpu().numpy(), cache, None, None),
        lambda q, cache: (q, object(), None, None),
        lambda q, cache: (None, cache, None, None),
    ],
    ids=["int", "bool", "stage", "negated", "subclass", "sparse", "numpy", "no-cache", "none"],
)
def test_what_must_be_looked_at_has_no_kind(as_on_a_gpu, call):
    assert kind_of_call(*call(*batch(CASE)), PLAIN, NO_VALUES) is None


CHANGED = {
    "q has shape": lambda q, cache: (q[:, :2], cache),
    "q has strides": lambda q, cache: (CHANGES["rows-3-longer"](q), cache),
    "q has address modulo 16": lambda q, cache: (CHANGES["an-element-further"](q), cache),
    "k_pages has strides": lambda q, cache: (q, replaced(cache, k_pages=CHANGES["rows-3-longer"](cache.k_pages))),
    "v_pages has address": lambda q, cache: (q, replaced(cache, v_pages=CHANGES["an-element-further"](cache.v_pages))),
    "k_pages has shape": lambda q, cache: (q, replaced(cache, k_pages=cache.k_pages[1:], v_pages=cache.v_pages[1:])),
    "block_table has shape": lambda q, cache: (q, replaced(cache, block_table=cache.block_table.repeat(1, 2))),
    "lengths has strides": lambda q, cache: (q, replaced(cache, lengths=cache.lengths.repeat_interleave(2)[::2])),
}


def replaced(cache, **tensors):
    names = ("k_pages", "v_pages", "block_table", "lengths")
    return pkv.PagedKVCache(*(tensors.get(name, getattr(cache, name)) for name in names), cache.layout)


@pytest.mark.parametrize("said", CHANGED)
def test_a_step_says_what_differs(said):
    q, cache = batch(CASE)
    ready = pkv.prepare(q, cache, stage="row_local")
    with pytest.raises(ValueError, match=rf"{said}.* this step was prepared for .*: prepare another by pkv\.prepare"):
        ready(*CHANGED[said](q, cache))
    with pytest.raises(TypeError, match=r"cache must be a pkv\.PagedKVCache, got tuple"):
        ready(q, (cache,))
    with pytest.raises(TypeError, match=r"q is torch\.float64, the cache torch\.float16"):
        ready(q.double(), cache)
    other_layout = pkv.PagedKVCache(cache.k_pages.transpose(1, 2), cache.v_pages.transpose(1, 2), cache.block_table,
                                    cache.lengths, "HND")  # fmt: skip
    with pytest.raises(ValueError, match=r"k_pages has shape .* this step was prepared for|another layout"):
        ready(q, other_layout)


# --- what is looked at in every call ---


def test_out_over_q_or_in_the_cache_goes_the_long_way(as_on_a_gpu):
    q, cache = batch(CASE)
    elements = q.numel()
    room = torch.zeros(3 * elements, dtype=q.dtype, device=q.device)
    places = [room[begin : begin + elements].view(q.shape) for begin in (0, elements // 2, elements, 2 * elements)]
    ready = prepared(places[0], cache)
    ready(places[0], cache, places[2])
    assert ready.repeat(places[0], cache, places[2]) is not None
    assert ready.repeat(places[0], cache, places[1]) is None
    assert ready.repeat(places[1], cache, places[0]) is None
    assert ready.repeat(places[3], cache, places[3]) is None
    inside = cache.k_pages.flatten()[:elements].view(q.shape)
    assert ready.repeat(places[0], cache, inside) is None
    with pytest.raises(ValueError, match=r"out overlaps the memory of cache\.k_pages"):
        ready(places[0], cache, inside)


def test_another_current_gpu_goes_the_long_way(as_on_a_gpu, monkeypatch):
    q, cache = batch(CASE)
    ready = prepared(q, cache)
    ready(q, cache)
    assert ready.repeat(q, cache, None) is not None
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 7)
    assert ready.repeat(q, cache, None) is None


def test_a_gradient_that_is_wanted_goes_the_long_way(as_on_a_gpu):
    """There the caller is warned that none flows."""
    q, cache = batch(CASE)
    ready = prepared(q, cache)
    ready(q, cache)
    q.requires_grad_()
    assert ready.repeat(q, cache, None) is None
    with torch.no_grad():
        assert ready.repeat(q, cache, None) is not None
    q.requires_grad_(False)
    cache.k_pages.requires_grad_()
    assert ready.repeat(q, cache, None) is None


@pytest.mark.parametrize("stage", [pytest.param(stage, marks=marks_of(stage)) for stage in pkv.STAGES])
def test_a_plan_of_the_host_is_for_the_lengths_it_was_started_with(stage):
    q, cache = batch(CASE)
    cache = pkv.PagedKVCache.from_dense(*(torch.zeros(3, 300, 2, 64, dtype=q.dtype, device=DEVICE) for _ in "kv"),
                                        CASE.lengths, n_pages=60)  # fmt: skip
    layer = pkv.PagedKVCache(cache.k_pages, cache.v_pages, cache.block_table, cache.lengths)
    ready = pkv.prepare(q, cache, stage=stage)
    ready(q, cache), ready(q, layer)
    token = torch.ones(3, 2, 64, dtype=q.dtype, device=DEVICE)
    cache.append(token, token)
    if not ready.plan.dynamic:
        for changed in (cache, layer):
            if changed.host_lengths is not None:
                with pytest.raises(ValueError, match=r"row 0 has 71 tokens, it was planned for 70: make a new plan"):
                    ready(q, changed)
    ready.start(cache)
    out, lse = ready(q, cache, return_lse=True)
    assert Yardstick(q, cache).measure(out, lse, rounds_weights=True).ok


@pytest.mark.parametrize("stage", HOST_PLANNED)
def test_lengths_that_only_the_gpu_knows_have_a_step_started_anew(as_on_a_gpu, stage):
    q, cache = batch(CASE)
    ready = prepared(q, cache, stage)
    ready(q, cache)
    assert ready.repeat(q, cache, None) is not None
    cache.lengths += 1
    assert ready.repeat(q, cache, None) is None


def test_a_kind_that_goes_the_long_way_again_is_not_found_out_again(as_on_a_gpu):
    """As each step of a loop does whose `out` is q itself."""
    q, cache = batch(CASE)
    ready = prepared(q, cache)
    ready(q, cache, q)
    kept = ready._ready.args[kind_of(q)]
    assert ready.repeat(q, cache, q) is None
    ready(q, cache, q)
    assert ready._ready.args[kind_of(q)] is kept


def test_tensors_without_an_address_have_no_kind(as_on_a_gpu):
    """torch.func's wrappers are of type torch.Tensor, even when their transform is over."""
    q, cache = batch(CASE)
    kept = []
    torch.func.grad(lambda x: (kept.append(x), x.float().sum())[1])(q)
    assert kind_of_call(kept[0], cache, None, None, PLAIN, NO_VALUES) is None
    assert prepared(q, cache).repeat(kept[0], cache, None) is None
    for stage in (None, "reference"):
        with pytest.raises(TypeError, match="q is a Tensor, which has no memory of its own: pass the plain"):
            pkv.decode(kept[0], cache, stage=stage)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_tracer_is_refused_though_the_kind_is_known():
    q, cache = batch(CASE)
    ready = pkv.prepare(q, cache)
    for call in (lambda q: pkv.decode(q, cache), lambda q: ready(q, cache)):
        call(q)
        with pytest.raises(TypeError, match=r"cannot be used inside of torch\.jit\.trace"):
            torch.jit.trace(call, (q,))


# --- what decode() keeps ---


class AlwaysKnown:
    """A Step that decode() finds: its result is `known`."""

    def __init__(self, known):
        self.known = known

    def repeat(self, q, cache, out):
        return self.known


@pytest.mark.parametrize("parts", [{}, (), 0, False, ""])
def test_parts_that_are_none_are_refused_whether_the_kind_is_known_or_not(as_on_a_gpu, parts):
    q, cache = batch(CASE)
    known = torch.empty_like(q), torch.empty(q.shape[:2])
    step.STEPS[kind_of_call(q, cache, None, None, PLAIN, NO_VALUES)] = AlwaysKnown(known)
    assert pkv.decode(q, cache) is known[0]
    with pytest.raises(TypeError, match=r"parts must be a pkv\.Parts"):
        pkv.decode(q, cache, parts=parts)


def test_steps_and_kinds_of_out_are_bounded(as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(step, "MOST_STEPS", 5)
    for number in range(20):
        step.keep(number, None)
    assert list(step.STEPS) == [15, 16, 17, 18, 19]
    q, cache = batch(CASE)
    ready = prepared(q, cache)
    for extra in range(3 * step.MOST_OUTS):
        wide = torch.zeros(*q.shape[:2], q.shape[2] + 8 * extra, dtype=q.dtype, device=q.device)[..., : q.shape[2]]
        ready(q, cache, wide)
    assert 0 < len(ready._ready.args) <= step.MOST_OUTS


# --- the real thing ---


@pytest.mark.parametrize("stage", [pytest.param(stage, marks=marks_of(stage)) for stage in ON_CPU])
def test_a_step_decodes_every_layer_as_decode_does(stage):
    q, cache = batch(CASE)
    layers = [replaced(cache, k_pages=cache.k_pages.roll(n, 3), v_pages=cache.v_pages.roll(n, 3)) for n in range(2)]
    ready = pkv.prepare(q, layers[0], stage=stage, window=50, scale=0.3)
    for layer in layers:
        out = torch.empty_like(q)
        assert ready(q, layer, out) is out
        assert torch.equal(out, pkv.decode(q, layer, stage=stage, window=50, scale=0.3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_on_a_gpu_later_calls_give_the_same_bits(dtype):
    q, cache = batch(CASE, dtype)
    outs = [None, torch.empty_like(q), torch.empty_like(q.transpose(0, 1).contiguous()).transpose(0, 1)]
    for out, scale, features in itertools.product(outs, (None, 0.5, 0.0), ({}, {"window": 33, "soft_cap": 5.0})):
        first = [x.clone() for x in pkv.decode(q, cache, out=out, scale=scale, return_lse=True, **features)]
        n_steps = len(STEPS)
        for _ in range(3):
            again = pkv.decode(q, cache, out=out, scale=scale, return_lse=True, **features)
            assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
            assert out is None or again[0] is out
        assert len(STEPS) == n_steps
    cache.lengths.copy_(torch.tensor([3, 0, 290], dtype=torch.int32))  # row 1 has no pages
    again = pkv.decode(q, cache, return_lse=True)
    wanted = pkv.decode(q, replaced(cache), return_lse=True, check=True)
    assert all(torch.equal(x, y) for x, y in zip(again, wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("stage", LAUNCHED)
def test_on_a_gpu_a_step_is_repeated(stage, monkeypatch):
    """Of a second call nothing is checked again."""
    q, cache = batch(CASE)
    want = pkv.decode(q, cache, stage=stage, return_lse=True)
    ready = pkv.prepare(q, cache, stage=stage)
    ready(q, cache)
    monkeypatch.setattr(step, "check_arrays", lambda *_: pytest.fail("the long way"))
    assert all(torch.equal(x, y) for x, y in zip(want, ready(q, cache, return_lse=True), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("features", [{}, {"window": 100}], ids=["plain", "window"])
def test_32_layers_on_one_step_inside_one_captured_graph(features):
    """Replayed 1,000 times while rows grow, come and go."""
    case = Case("layers", [70, 0, 500, 1])
    q, cache = batch(case)
    table = torch.arange(4 * 100, device=DEVICE, dtype=torch.int32).view(4, 100)
    lengths = cache.lengths.clone()
    shape = 400, 16, 2, 64
    layers = [
        pkv.PagedKVCache(*(torch.randn(shape, device=DEVICE, dtype=q.dtype) for _ in "kv"), table, lengths)
        for _ in range(32)
    ]
    outs = [torch.empty_like(q) for _ in layers]
    ready = pkv.prepare(q, layers[0], **features)
    ready(q, layers[0], outs[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer, out in zip(layers, outs, strict=True):
            ready(q, layer, out)
    bad = 0
    for replay in range(1000):
        lengths.copy_(torch.tensor([70 + replay, replay % 3, 1600 - replay, 1 + replay // 2], dtype=torch.int32))
        graph.replay()
        if replay % 100 == 99:
            for layer, out in zip(layers, outs, strict=True):
                want = pkv.decode(q, layer, stage="reference", **features)
                bad += not torch.allclose(out.double(), want.double(), atol=4e-3)
    assert bad == 0

"""A call of a kind that came before launches what the first one launched, and is refused wherever that one would be.

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
from cases import DEVICE, DTYPES, Case, batch
from test_launch_keys import CHANGES, kernels

import pkv
from pkv import decoding, step
from pkv.kernels import launching
from pkv.kernels.launching import ARGUMENTS
from pkv.stages import s2_row_local, s5_stream_k
from pkv.step import KINDS, kind_of_call, remember_call, repeat_call

kernels = kernels  # the fixture
CASE = Case("ready", [70, 0, 300])


@pytest.fixture
def as_on_a_gpu(kernels, monkeypatch):
    """The kernels; this process's tensors are a GPU's, and it is the current one."""
    for module in (step, launching):
        monkeypatch.setattr(module, "INTERPRETED", False)
    monkeypatch.setattr(launching, "merges_early", lambda device: True)
    monkeypatch.setattr(step, "GPU", DEVICE.type)
    current = torch.empty(0, device=DEVICE).device.index
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    return kernels


def first_call(q, cache, out=None, stage=s5_stream_k, **options):
    """A call the long way, but for its checks: launch, then remember. Returns the kind."""
    kind = kind_of_call(q, cache, None, None, out)
    plan = pkv.plan([cache.capacity] * cache.n_rows, pkv.Shape.of(q, cache), stage.__name__.partition("_")[2],
                    gpu="rtx3060", dynamic=True, **options)  # fmt: skip
    result = torch.empty_like(q) if out is None else out
    lse = torch.empty(q.shape[:2], device=q.device)
    stage.launch(q, cache, plan, 0.125, result, lse)
    remember_call(kind, q, cache, plan, 0.125, result, lse)
    return kind


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_a_later_call_launches_the_same(as_on_a_gpu, dtype, monkeypatch):
    q, cache = batch(CASE, dtype)
    kind = first_call(q, cache)
    assert [kernel.n_launches for kernel in as_on_a_gpu.values()] == [0] * 6, "the first call compiles"
    launched = []
    launch_kernel = s5_stream_k.launch_kernel
    monkeypatch.setattr(
        s5_stream_k, "launch_kernel", lambda *args, **options: launched.append(args) or launch_kernel(*args, **options)
    )
    other = torch.randn_like(q)
    out, lse = repeat_call(kind, other, cache, None)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, q.shape[:2], torch.float32)
    assert out.is_contiguous()
    decode, merge = launched
    assert decode[2][0].ptr is other
    assert decode[2][2].out.ptr is merge[2][2].out.ptr is out
    assert decode[2][3].out.ptr is merge[2][1].out.ptr, "both have the same partial states"
    names = ("stream_k_kernel", "merge_runs_kernel")
    assert [as_on_a_gpu[name].n_launches for name in names] == [1, 1]
    assert all(len(as_on_a_gpu[name].made) == 1 and len(as_on_a_gpu[name].grids) == 1 for name in names)


def test_partial_states_are_each_calls_own(as_on_a_gpu, monkeypatch):
    """Two calls may be on two streams of a GPU at once."""
    q, cache = batch(CASE)
    kind, kept = first_call(q, cache), []
    launch_kernel = s5_stream_k.launch_kernel
    monkeypatch.setattr(
        s5_stream_k, "launch_kernel", lambda *args, **options: kept.append(args[2]) or launch_kernel(*args, **options)
    )
    for _ in range(2):
        repeat_call(kind, q, cache, None)
    assert kept[0][3].out.ptr.data_ptr() != kept[2][3].out.ptr.data_ptr()
    assert kept[0][3].lse.ptr.data_ptr() != kept[2][3].lse.ptr.data_ptr()


def test_nothing_but_the_cache_is_held(as_on_a_gpu):
    q, cache = batch(CASE)
    out = torch.empty_like(q)
    kind = first_call(q, cache, out)
    args = KINDS.known(cache)[kind].args
    held = [args.q.ptr, args.result.out.ptr, args.result.lse.ptr, args.partials.out.ptr, args.partials.lse.ptr]
    assert held == [None] * 5


# --- what is another kind ---


def kinds_of_changed(q, cache):
    """{change: kind} for q, out and the cache's own tensors changed one by one."""
    found = {}
    for change, make in CHANGES.items():
        found["q", change] = kind_of_call(make(q), cache, None, None, None)
        found["out", change] = kind_of_call(q, cache, None, None, make(q))
    return found


def test_whatever_a_check_or_a_kernel_looks_at_makes_another_kind(as_on_a_gpu):
    q, cache = batch(CASE)
    found = kinds_of_changed(q, cache)
    same = {("q", "as-it-is"), ("q", "eight-elements-further"), ("q", "far-rows")}  # 16 bytes further: aligned alike
    same_out = {("out", change) for _, change in same}
    for key, kind in found.items():
        alike = same if key in same else same_out if key in same_out else {key}
        assert {other for other, theirs in found.items() if theirs == kind} == alike
    base = kind_of_call(q, cache, None, None, None)
    others = [
        kind_of_call(q, cache, "stream_k", None, None),
        kind_of_call(q, cache, None, 0.5, None),
        kind_of_call(q.float(), cache, None, None, None),
        kind_of_call(q[:1], cache, None, None, None),
        kind_of_call(q.clone().requires_grad_(), cache, None, None, None),
        kind_of_call(q, batch(CASE)[1], None, None, None),
        kind_of_call(q, cache, None, None, q.clone().requires_grad_()),
    ]
    assert len({base, *others}) == 1 + len(others)


@pytest.mark.parametrize(
    "call",
    [
        lambda q, cache: (q, cache, None, 1, None),  # a scale of type int or bool equals a float
        lambda q, cache: (q, cache, None, True, None),
        lambda q, cache: (q, cache, ["stream_k"], None, None),
        lambda q, cache: (torch.complex(q.float(), q.float()).conj().imag, cache, None, None, None),
        lambda q, cache: (q, cache, None, None, torch.complex(q.float(), q.float()).conj().imag),
        lambda q, cache: (torch.nn.Parameter(q), cache, None, None, None),
        lambda q, cache: (q.to_sparse(), cache, None, None, None),
        lambda q, cache: (q.cpu().numpy(), cache, None, None, None),
        lambda q, cache: (q, object(), None, None, None),
        lambda q, cache: (None, cache, None, None, None),
    ],
    ids=["int", "bool", "stage", "negated", "negated-out", "subclass", "sparse", "numpy", "no-cache", "none"],
)
def test_what_must_be_looked_at_has_no_kind(as_on_a_gpu, call):
    assert kind_of_call(*call(*batch(CASE))) is None


# --- what goes the long way ---


def test_out_over_q_or_in_the_cache_goes_the_long_way(as_on_a_gpu):
    q, cache = batch(CASE)
    elements = q.numel()
    room = torch.zeros(3 * elements, dtype=q.dtype, device=q.device)
    places = [room[begin : begin + elements].view(q.shape) for begin in (0, elements // 2, elements, 2 * elements)]
    kind = first_call(places[0], cache, places[2])
    assert repeat_call(kind, places[0], cache, places[2]) is not None
    assert repeat_call(kind, places[0], cache, places[1]) is None
    assert repeat_call(kind, places[1], cache, places[0]) is None
    assert repeat_call(kind, places[3], cache, places[3]) is None
    inside = cache.k_pages.flatten()[:elements].view(q.shape)
    assert kind_of_call(places[0], cache, None, None, inside) == kind
    assert repeat_call(kind, places[0], cache, inside) is None


def test_another_current_gpu_goes_the_long_way(as_on_a_gpu, monkeypatch):
    q, cache = batch(CASE)
    kind = first_call(q, cache)
    assert repeat_call(kind, q, cache, None) is not None
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 7)
    assert repeat_call(kind, q, cache, None) is None


def test_a_kind_that_is_not_known_goes_the_long_way(as_on_a_gpu):
    q, cache = batch(CASE)
    assert repeat_call(None, q, cache, None) is None
    assert repeat_call(kind_of_call(q, cache, None, None, None), q, cache, None) is None
    first_call(q, cache)
    assert repeat_call(kind_of_call(q, batch(CASE)[1], None, None, None), q, cache, None) is None


def test_a_kind_that_goes_the_long_way_again_is_not_found_out_again(as_on_a_gpu, monkeypatch):
    """As each step of a loop does whose `out` is q itself."""
    q, cache = batch(CASE)
    kind = first_call(q, cache, q)
    kept = KINDS.known(cache)[kind]
    assert repeat_call(kind, q, cache, q) is None
    first_call(q, cache, q)
    assert KINDS.known(cache)[kind] is kept


def test_tensors_without_an_address_have_no_kind(as_on_a_gpu):
    """torch.func's wrappers are of type torch.Tensor, even when their transform is over."""
    q, cache = batch(CASE)
    kept = []
    torch.func.grad(lambda x: (kept.append(x), x.float().sum())[1])(q)
    assert kind_of_call(kept[0], cache, None, None, None) is None
    for stage in (None, "reference"):
        with pytest.raises(TypeError, match="q is a Tensor, which has no memory of its own: pass the plain"):
            pkv.decode(kept[0], cache, stage=stage)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_tracer_is_refused_though_the_kind_is_known(as_on_a_gpu, monkeypatch):
    q, cache = batch(CASE)
    known = torch.empty_like(q), torch.empty(q.shape[:2])
    monkeypatch.setattr(decoding, "repeat_call", lambda kind, *args: None if kind is None else known)
    assert pkv.decode(q, cache) is known[0]
    with pytest.raises(TypeError, match=r"cannot be used inside of torch\.jit\.trace"):
        torch.jit.trace(lambda q: pkv.decode(q, cache), (q,))


def test_whether_a_gradient_is_wanted_is_part_of_the_kind(as_on_a_gpu):
    """Else the first call under no_grad would hide what a later one is to be warned of."""
    q, cache = batch(CASE)
    q.requires_grad_()
    with torch.no_grad():
        silent = kind_of_call(q, cache, None, None, None)
    assert silent != kind_of_call(q, cache, None, None, None)


@pytest.mark.parametrize("parts", [{}, (), 0, False, ""])
def test_parts_that_are_none_are_refused_whether_the_kind_is_known_or_not(as_on_a_gpu, parts, monkeypatch):
    q, cache = batch(CASE)
    known = torch.empty_like(q), torch.empty(q.shape[:2])
    monkeypatch.setattr(decoding, "repeat_call", lambda kind, *args: None if kind is None else known)
    assert pkv.decode(q, cache) is known[0]
    with pytest.raises(TypeError, match=r"parts must be a pkv\.Parts"):
        pkv.decode(q, cache, parts=parts)


# --- what is kept ---


def test_only_what_needs_no_host_and_launches_is_kept(as_on_a_gpu, monkeypatch):
    q, cache = batch(CASE)
    first_call(q, cache, stage=s2_row_local)
    assert not KINDS.known(cache), "it has no launcher"
    plan = pkv.plan(CASE.lengths, pkv.Shape.of(q, cache), "stream_k", gpu="rtx3060")
    lse = torch.empty(q.shape[:2], device=q.device)
    remember_call("a kind", q, cache, plan, 1.0, q, lse)
    assert not KINDS.known(cache), "the plan is of these lengths only"
    monkeypatch.setattr(step, "INTERPRETED", True)
    first_call(q, cache)
    assert not KINDS.known(cache), "the interpreter gains nothing"


def test_kinds_are_bounded(as_on_a_gpu):
    q, cache = batch(CASE)
    for extra in range(2 * step.MOST_KINDS):
        wide = torch.zeros(*q.shape[:2], q.shape[2] + 8 * extra, dtype=q.dtype, device=q.device)[..., : q.shape[2]]
        first_call(wide, cache)
    assert 0 < len(KINDS.known(cache)) <= step.MOST_KINDS


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_memory_that_a_cache_left_is_held_no_longer(as_on_a_gpu, layout):
    q, full = batch(CASE)
    pages = [x if layout == "NHD" else x.transpose(1, 2).contiguous() for x in (full.k_pages, full.v_pages)]
    cache = pkv.PagedKVCache(*(x.clone() for x in pages), full.block_table, full.lengths, layout)
    storage = cache.k_pages.untyped_storage()
    old = weakref.ref(storage)
    del storage
    first_call(q, cache)
    assert old() is not None
    cache.k_pages.set_(cache.k_pages.clone())
    kind = first_call(q, cache)
    assert list(KINDS.known(cache)) == [kind]
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_of_a_cache_finds_it_out_again(as_on_a_gpu, duplicate):
    q, cache = batch(CASE)
    first_call(q, cache)
    copy_of_it = duplicate(cache)
    assert not KINDS.known(copy_of_it)
    assert not ARGUMENTS.known(copy_of_it)


# --- the real thing ---


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_on_a_gpu_later_calls_give_the_same_bits(dtype):
    q, cache = batch(CASE, dtype)
    outs = [None, torch.empty_like(q), torch.empty_like(q.transpose(0, 1).contiguous()).transpose(0, 1)]
    for out, scale in itertools.product(outs, (None, 0.5, 0.0)):
        first = [x.clone() for x in pkv.decode(q, cache, out=out, scale=scale, return_lse=True)]
        for _ in range(3):
            again = pkv.decode(q, cache, out=out, scale=scale, return_lse=True)
            assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
            assert out is None or again[0] is out
    assert len(KINDS.known(cache)) == 9
    cache.lengths.copy_(torch.tensor([3, 0, 290], dtype=torch.int32))  # row 1 has no pages
    again = pkv.decode(q, cache, return_lse=True)
    wanted = pkv.decode(q, pkv.PagedKVCache(cache.k_pages, cache.v_pages, cache.block_table, cache.lengths), return_lse=True)  # fmt: skip # noqa: E501
    assert all(torch.equal(x, y) for x, y in zip(again, wanted, strict=True))


@pytest.mark.gpu
def test_on_a_gpu_what_is_refused_once_is_refused_again():
    q, cache = batch(CASE)
    pkv.decode(q, cache, scale=1.0)
    for wrong, error in (({"scale": True}, "scale = True"), ({"scale": float("nan")}, "scale = nan"),
                         ({"stage": "no"}, "does not exist"), ({"splits": 2}, "has no option")):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=error):
            pkv.decode(q, cache, **wrong)
    room = torch.zeros(2, *q.shape, dtype=q.dtype, device=q.device)
    pkv.decode(room[0], cache, out=room[1])
    inside = cache.k_pages.flatten()[: q.numel()].view(q.shape)
    with pytest.raises(ValueError, match=r"out overlaps the memory of cache\.k_pages"):
        pkv.decode(room[0], cache, out=inside)
    same = q.clone()
    wanted = pkv.decode(q, cache)
    assert torch.equal(pkv.decode(same, cache, out=same), wanted)
    assert torch.equal(same, wanted)

"""What wants to see into the library's functions: torch.compile goes around them, all else is refused by name."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch
from cases import DEVICE, SMALL_CARD, known, stages
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import pkv

LENGTHS = [5, 40]
FASTEST = "row_local"  # in the interpreter


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(shape, generator=generator).to(DEVICE) for shape in [(2, 4, 16), *[(2, 40, 2, 16)] * 2])
    return q, k, v


@pytest.fixture
def ready():
    q, k, v = tensors()
    return q, pkv.PagedKVCache.from_dense(k, v, LENGTHS, n_pages=12, max_rows=2)


@pytest.fixture(autouse=True)
def anew():
    torch._dynamo.reset()


# --- torch.compile ---


def compiled(function):
    """The function compiled, and the backend that counts graphs and their operations."""
    counter = CompileCounter()
    return torch.compile(function, backend=counter), counter


@pytest.mark.parametrize("stage", stages())
@pytest.mark.parametrize("door", ["decode", pytest.param("plan and run", marks=pytest.mark.slow)])
def test_decoding_breaks_the_graph_and_nothing_else(ready, door, stage):
    """What comes before and after it is compiled: two graphs of two operations each."""
    q, cache = ready
    options = known(stage, {"gpu": SMALL_CARD} if stage == "stream_k" else {})

    def step(q):
        q = (q * 2).sin()
        if door == "decode":
            out = pkv.decode(q, cache, stage=stage, **options)
        else:
            plan = pkv.plan(cache.lengths, pkv.Shape.of(q, cache), stage, **options)
            out, _ = pkv.run(q, cache, plan)
        return (out + 1).cos()

    function, counter = compiled(step)
    for scale in (1.0, 1.5, 2.0):  # no call compiles anything of ours, nor the same again
        assert torch.equal(function(q * scale), step(q * scale))
    assert (counter.frame_count, counter.op_count) == (2, 4)


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",  # all of the default one but its C++, which takes half a minute
        pytest.param(
            "inductor",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile's default backend wants g++"),
            ],
        ),
    ],
)
def test_decoding_under_backends_that_trace_what_is_around_it(ready, backend, tmp_path, monkeypatch):
    # torch's cache may hold code that was made for other instructions (ATEN_CPU_CAPABILITY), and takes it again
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    q, cache = ready
    # no product of floats, whose rounding a compiler may change by fusing it with a sum
    step = lambda q: torch.relu(pkv.decode(torch.neg(q), cache, stage=FASTEST)) + 1  # noqa: E731
    assert torch.equal(torch.compile(step, backend=backend)(q), step(q))


def test_decode_itself_may_be_compiled(ready):
    q, cache = ready
    assert torch.equal(torch.compile(pkv.decode, backend="eager")(q, cache), pkv.decode(q, cache))


def test_a_graph_without_breaks_is_refused_with_our_reason(ready):
    q, cache = ready
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"pkv's functions run eagerly.*compile without fullgraph"):
        torch.compile(lambda q: pkv.decode(q, cache), backend="eager", fullgraph=True)(q)


def test_a_cache_changes_inside_of_a_compiled_function():
    def steps(q, k, v):
        cache = pkv.PagedKVCache.from_dense(k, v, LENGTHS, n_pages=24, max_rows=4)
        row = cache.add(k[0, :7] + 1, v[0, :7])
        cache.append(k[:, 0] + 2, v[:, 1], rows=[0, row])
        cache.append(k[[0, 1, 0, 1], 0] + 3, v[[0, 1, 0, 1], 0])
        child = cache.fork(1)
        cache.free(0)
        copies = [side + 1 for side in cache.gather(child)]
        plan = pkv.plan(cache.host_lengths, pkv.Shape.of(q, cache), FASTEST, splits=2, gpu="rtx3060")
        text = f"{plan}{cache}{cache!r}{pkv.Shape(4, 2, 16, 16, 'float32')}{plan.counters.launches}{plan.to_json()}"
        facts = cache.active_rows, cache.n_free_pages, cache.version, cache.host_lengths.tolist(), text
        cache.validate()
        states = pkv.run(q, cache.to(), plan)
        return [*copies, *cache.to_csr(), *pkv.merge([states, states])], facts, pkv.simulate(plan, "rtx3060").gpu_ms

    q, k, v = tensors()
    q = torch.cat([q, q])
    wanted, facts, ms = steps(q, k, v)
    function, _ = compiled(steps)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got, got_facts, got_ms = function(q, k, v)
    assert (got_facts, got_ms) == (facts, ms)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


def test_merge_is_plain_torch_and_compiles_whole():
    states = [(torch.randn(3, 4, 16, device=DEVICE), torch.randn(3, 4, device=DEVICE)) for _ in range(3)]
    whole = torch.compile(lambda states: pkv.merge(states), backend="eager", fullgraph=True)
    for got, want in zip(whole(states), pkv.merge(states), strict=True):
        assert torch.equal(got, want)


def test_importing_pkv_does_not_import_the_compiler(fresh):
    """It takes seconds."""
    code = """
    import sys, torch, pkv
    k = torch.zeros(1, 20, 1, 16)
    pkv.decode(torch.zeros(1, 2, 16), pkv.PagedKVCache.from_dense(k, k, [20]))
    print("torch._dynamo" in sys.modules)
    """
    assert fresh(code).out.strip() == "False"


# --- what records calls, or transforms tensors ---


class Wrapped(torch.Tensor):
    """A tensor that holds another one, as DTensor does."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    @classmethod
    def __torch_dispatch__(cls, *_):
        raise AssertionError("nothing may be computed with it")


def faked(function):
    def under_fake_tensors(q):
        with FakeTensorMode() as mode:
            return function(mode.from_tensor(q))

    return under_fake_tensors


class Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, q):
        return self.function(q)


TRACERS = {
    "vmap": (lambda f: torch.vmap(lambda q: f(q[0])[None]), "torch.vmap: pass the batch as rows"),
    "grad": (
        lambda f: torch.func.grad(lambda q: f(q).sum()),
        "torch.func.grad or its like: .*scaled_dot_product_attention",
    ),
    "jvp": (
        lambda f: lambda q: torch.func.jvp(f, (q,), (q,)),
        "torch.func.grad or its like: .*scaled_dot_product_attention",
    ),
    "functionalize": (torch.func.functionalize, "torch.func.functionalize: .*call it outside"),
    "jit.trace": (lambda f: lambda q: torch.jit.trace(f, (q,)), "torch.jit.trace: .*as constants: call it outside"),
    "make_fx": (make_fx, "make_fx: .*as constants: call it outside"),
    "make_fx-fake": (lambda f: make_fx(f, tracing_mode="fake"), "make_fx: .*call it outside"),
    "make_fx-symbolic": (lambda f: make_fx(f, tracing_mode="symbolic"), "make_fx: .*call it outside"),
    "symbolic_trace": (lambda f: lambda q: torch.fx.symbolic_trace(f), "torch.fx.symbolic_trace: .*call it outside"),
    "FakeTensorMode": (faked, "FakeTensorMode: fake tensors hold no numbers: pkv.plan"),
    "export": (lambda f: lambda q: torch.export.export(Module(f), (q,)), "torch.export: .*export what comes before it"),
    "wrapper": (lambda f: lambda q: f(Wrapped(q)), "is a Wrapped, which has no memory of its own: pass the plain"),
}


@pytest.fixture(params=TRACERS)
def tracer(request):
    return TRACERS[request.param]


@pytest.mark.parametrize("stage", [None, "reference"])
def test_decoding_inside_of_a_tracer_is_refused_by_name(ready, tracer, stage):
    q, cache = ready
    trace, message = tracer
    with pytest.raises(TypeError, match=message):
        trace(lambda q: pkv.decode(q, cache, stage=stage))(q)
    assert pkv.decode(q, cache, stage=stage).shape == q.shape  # and nothing is left behind


def test_run_inside_of_a_tracer_is_refused_by_name(ready, tracer):
    q, cache = ready
    plan = pkv.plan(LENGTHS, pkv.Shape.of(q, cache), FASTEST, gpu="rtx3060")
    trace, message = tracer
    with pytest.raises(TypeError, match=message):
        trace(lambda q: pkv.run(q, cache, plan)[0])(q)


@pytest.mark.parametrize("method", ["add", "append", "from_dense", "a cache of pages"])
def test_what_is_stored_comes_from_no_tracer(ready, tracer, method):
    _, cache = ready
    trace, message = tracer
    shape = (2, 2, 16) if method in ("add", "append") else (2, 1, 2, 16)
    tokens = torch.zeros(shape, device=DEVICE)

    def store(q):
        if method == "from_dense":
            pkv.PagedKVCache.from_dense(q, q, [1, 1])
        elif method == "a cache of pages":
            pkv.PagedKVCache(q, q, cache.block_table, cache.lengths)
        else:
            getattr(cache, method)(q, q)
        return q

    version = cache.version
    with pytest.raises(TypeError, match=message):
        trace(store)(tokens)
    assert (cache.version, cache.host_lengths.tolist()) == (version, LENGTHS)


RECORDERS = ("jit.trace", "make_fx", "make_fx-fake", "FakeTensorMode", "export", "grad", "vmap")


@pytest.mark.parametrize("name", RECORDERS)
@pytest.mark.parametrize("call", ["gather", "to_csr", "validate", "host_lengths", "fork", "free", "plan"])
def test_what_a_cache_holds_is_recorded_nowhere(ready, name, call):
    """A recording would keep the lengths of today for ever."""
    q, cache = ready
    trace, message = TRACERS[name]

    def read(q):
        {
            "gather": lambda: cache.gather(0), "to_csr": cache.to_csr, "validate": cache.validate,
            "host_lengths": lambda: cache.host_lengths, "fork": lambda: cache.fork(0), "free": lambda: cache.free(0),
            "plan": lambda: pkv.plan(cache.lengths, pkv.Shape(4, 2, 16, 16, "float32")),
        }[call]()  # fmt: skip
        return q

    with pytest.raises(TypeError, match=message):
        trace(read)(q)
    assert cache.active_rows == [0, 1]


def test_a_mode_that_only_watches_is_no_tracer(ready):
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    q, cache = ready
    want = pkv.decode(q, cache)
    for mode in (Watching(), FlopCounterMode(display=False)):
        with mode:
            assert torch.equal(pkv.decode(q, cache), want)


def test_subclasses_with_memory_of_their_own_are_tensors_like_others(ready):
    q, cache = ready
    want = pkv.decode(q, cache)
    assert torch.equal(pkv.decode(torch.nn.Parameter(q, requires_grad=False), cache), want)
    assert torch.equal(pkv.decode(q.as_subclass(type("Own", (torch.Tensor,), {})), cache), want)


def test_merge_is_right_under_every_transform():
    out = torch.randn(3, 4, 16)
    lse = torch.randn(3, 4)
    want = pkv.merge([(out, lse), (out + 1, lse)])[0]
    merged = lambda out: pkv.merge([(out, lse), (out + 1, lse)])[0]  # noqa: E731
    assert torch.equal(torch.vmap(lambda o, s: pkv.merge([(o, s), (o + 1, s)])[0])(out, lse), want)
    assert torch.allclose(torch.func.grad(lambda out: merged(out).sum())(out), torch.ones_like(out))
    assert torch.equal(make_fx(merged)(out)(out), want)
    assert torch.equal(torch.jit.trace(merged, (out + 3,))(out), want)
    assert faked(lambda out: pkv.merge([(out, out[..., 0]), (out, out[..., 1])])[0])(out).shape == want.shape

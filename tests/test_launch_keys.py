"""What a launch is looked up by tells apart all that Triton compiles apart, and nothing that changes from step to step.

Triton's own rule says what it would compile for the arguments of a launch; kernels that remember it stand for those on
a GPU, which then need none.
"""

from __future__ import annotations

import inspect
import itertools
import random
import types

import pytest
import torch
from cases import DEVICE, Case, batch

import pkv
from pkv import _triton
from pkv._triton import triton
from pkv.kernels import merging
from pkv.kernels.tile import attend_tokens
from pkv.plans.features import Values
from pkv.stages import s1_split_kv, s2_row_local, s3_workqueue, s5_stream_k

MODULES = (s1_split_kv, s2_row_local, s3_workqueue, s5_stream_k, merging)
KERNELS = {
    name: kernel
    for module in MODULES
    for name, kernel in vars(module).items()
    if name in ("split_kv_kernel", "row_local_kernel", "workqueue_kernel", "stream_k_kernel", "merge_runs_kernel",
                "merge_kernel")
}  # fmt: skip


class OnceCompiled:
    """Stands for what Triton compiled: may be launched with nothing that Triton would compile anew."""

    function = packed_metadata = None

    def __init__(self, kernel, made_for):
        self.kernel, self.made_for = kernel, made_for

    def run(self, x, y, z, stream, function, metadata, launch, enter, leave, *args):
        self.kernel.grids.add((x, y, z))
        self.kernel.n_launches += 1
        made_for = self.kernel.specialization(args)
        assert made_for == self.made_for, f"{self.kernel.name}: compiled for {self.made_for}, launched with {made_for}"


class Remembering:
    """Stands for a kernel: remembers what it was compiled for, and computes nothing."""

    def __init__(self, name, kernel):
        self.name, self.options = name, None
        self.parameters = inspect.signature(kernel.fn).parameters
        self.unspecialized = getattr(kernel, "do_not_specialize", None) or kernel.kwargs.get("do_not_specialize") or ()
        self.made, self.grids, self.n_launches = [], set(), 0

    def specialization(self, args):
        """What Triton compiles apart, by its own function: types, divisible by 16 or not, ones, constants, options."""
        from triton._C.libtriton import native_specialize_impl
        from triton.backends.nvidia.compiler import CUDABackend

        kinds = [
            arg if "constexpr" in str(parameter.annotation)
            else native_specialize_impl(CUDABackend, arg, False, name not in self.unspecialized, True)
            for (name, parameter), arg in zip(self.parameters.items(), args, strict=True)
        ]  # fmt: skip
        return kinds, self.options

    def __getitem__(self, grid):
        def compiled(*args, **options):
            assert options == self.options
            self.grids.add((*grid, 1, 1)[:3])
            self.made.append(self.specialization(args))
            return OnceCompiled(self, self.made[-1])

        return compiled


@pytest.fixture
def kernels(monkeypatch):
    """{name: kernel that remembers}, in the place of all kernels, as if on a GPU; nothing is compiled so far."""
    monkeypatch.setattr(_triton, "INTERPRETED", False)
    monkeypatch.setattr(s5_stream_k, "INTERPRETED", False)
    monkeypatch.setattr(_triton, "_compiled", {})
    driver = types.SimpleNamespace(active=types.SimpleNamespace(get_current_stream=lambda device: 0))
    monkeypatch.setattr(_triton, "triton", types.SimpleNamespace(runtime=types.SimpleNamespace(driver=driver)))
    stand_ins = {name: Remembering(name, kernel) for name, kernel in KERNELS.items()}
    launch_kernel = _triton.launch_kernel

    def launch(kernel, n_programs, args, constants, signature, **options):
        kernel.options = options
        launch_kernel(kernel, n_programs, args, constants, CUT[0](signature), **options)

    for module in MODULES:
        monkeypatch.setattr(module, "launch_kernel", launch)
        for name in stand_ins:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stand_ins[name])
    yield stand_ins
    CUT[0] = whole


def whole(signature):
    return signature


CUT = [whole]  # what of a signature is looked up


# --- arguments that Triton compiles apart ---


def moved(x, elements):
    """x, so many elements further in memory."""
    buffer = torch.zeros(x.numel() + elements, dtype=x.dtype, device=x.device)
    return buffer[elements:].view(x.shape)


def spread(x, axis, step):
    """x with one axis `step` times as wide in memory."""
    wide = torch.zeros([n * step if a == axis else n for a, n in enumerate(x.shape)], dtype=x.dtype, device=x.device)
    return wide[tuple(slice(None, None, step) if a == axis else slice(None) for a in range(x.ndim))]


def longer(x, extra):
    """Rows of x, `extra` elements apart."""
    return torch.zeros(*x.shape[:-1], x.shape[-1] + extra, dtype=x.dtype, device=x.device)[..., : x.shape[-1]]


def far_rows(x):
    """A row stride beyond 32 bits. There is only one row, so that no memory lies there."""
    return x.as_strided(x.shape, (2**32, *x.stride()[1:])) if x.shape[0] == 1 else x


CHANGES = {
    "as-it-is": lambda x: x,
    "an-element-further": lambda x: moved(x, 1),
    "eight-elements-further": lambda x: moved(x, 8),
    "rows-3-longer": lambda x: longer(x, 3),
    "rows-16-longer": lambda x: longer(x, 16),
    "spread-dims": lambda x: spread(x, x.ndim - 1, 2),
    "spread-heads": lambda x: spread(x, max(x.ndim - 2, 0), 3),
    "columns-first": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "far-rows": far_rows,
}  # fmt: skip
ARRAYS = ("q", "k", "v", "table", "lengths", "out")
STEPS = [
    ("split_kv", {"splits": 1}), ("split_kv", {"splits": 3}), ("length_buckets", {"splits": 2}),
    ("row_local", {"splits": 1}), ("row_local", {"splits": 3}), ("row_local", {"splits": 40}),
    ("workqueue", {"ordering": "as_listed"}), ("workqueue", {"ordering": "longest_first", "splits": 3}),
    ("stream_k", {}), ("stream_k", {"dynamic": True}),
]  # fmt: skip


FEATURES = [(1, False), (16, False), (17, True), (None, True)]  # a window of 1 is a constant, 16 has a factor 16


def every_call():
    """(stage, options, q, cache, out): each array changed by itself, in several shapes, dtypes and plans."""
    cases = [
        (Case("three", [70, 0, 300]), torch.float16), (Case("one", [40]), torch.float16),
        (Case("bf16", [70, 0, 300]), torch.bfloat16), (Case("fp32", [70, 5, 300]), torch.float32),
    ]  # fmt: skip
    for case, dtype in cases:
        q, cache = batch(case, dtype)
        for array, change in itertools.product(ARRAYS, CHANGES):
            arrays = {
                "q": q, "k": cache.k_pages, "v": cache.v_pages, "table": cache.block_table, "lengths": cache.lengths,
                "out": q,
            }  # fmt: skip
            arrays[array] = CHANGES[change](arrays[array])
            tensors = [arrays[name] for name in ("k", "v", "table", "lengths")]
            other = pkv.PagedKVCache(*tensors)
            for stage, options in STEPS if array == "q" else STEPS[-2:]:
                plan = pkv.plan(case.lengths, pkv.Shape.of(q, other), stage=stage, gpu="rtx3060", **options)
                yield arrays["q"], other, plan, arrays["out"]
        for window, soft_cap in FEATURES:
            shape = pkv.Shape.of(q, cache, pkv.Features(window, soft_cap))
            for stage, options in STEPS:
                yield q, cache, pkv.plan(case.lengths, shape, stage=stage, gpu="rtx3060", **options), q


def launch_all(calls):
    for q, cache, plan, out in calls:
        lse = torch.empty(q.shape[:2], device=q.device)
        values = Values(30.0 if plan.shape.features.soft_cap else None)
        pkv.STAGES[plan.stage].launch(q, cache, plan, 1.0, out, lse, values=values)


@pytest.mark.parametrize("seed", [1, 2])
def test_no_launch_takes_what_was_compiled_for_other_arguments(kernels, seed):
    calls = list(every_call())
    random.Random(seed).shuffle(calls)
    launch_all(calls + calls)
    assert all(kernel.n_launches for kernel in kernels.values()), "what was compiled is not found again"
    for name in ("split_kv_kernel", "row_local_kernel", "workqueue_kernel", "merge_kernel"):
        assert len(kernels[name].made) > 20


def parts_of(signature):
    """Paths to the parts of a signature; strides and alignments of several arrays are one part."""
    if not isinstance(signature, tuple) or all(type(part) is int for part in signature):
        return [()]
    return [(index, *path) for index, part in enumerate(signature) for path in parts_of(part)]


def without(signature, dropped):
    """A signature with None in the place of what is dropped."""
    if dropped == ():
        return None
    return tuple(without(part, dropped[1:]) if index == dropped[0] else part for index, part in enumerate(signature))


@pytest.mark.parametrize("known", [True, False], ids=["told-apart", "not-told-apart"])
def test_tile_loops_of_others_are_never_taken_for_ours_or_each_other(kernels, known):
    """pkv.Parts(attend_tokens=...), in every stage that takes it; two of them are versions of one function."""
    q, cache = batch(Case("three", [70, 0, 300]))
    versions = [triton.jit(attend_tokens.fn) for _ in range(2)]  # as when a file is read again
    assert versions[0] is not versions[1]
    if not known:
        CUT[0] = lambda signature: (signature[0], None, *signature[2:])
    stages = [(stage, options) for stage, options in STEPS if options != {"dynamic": True}]
    plans = [
        pkv.plan([70, 0, 300], pkv.Shape.of(q, cache), stage, gpu="rtx3060", **options) for stage, options in stages
    ]
    calls = [(plan, own) for plan in plans for own in (None, *(pkv.Parts(attend_tokens=one) for one in versions))]
    random.Random(1).shuffle(calls)

    def launch_them():
        for plan, own in calls + calls[::-1]:
            lse = torch.empty(q.shape[:2], device=q.device)
            pkv.STAGES[plan.stage].launch(q, cache, plan, 1.0, torch.empty_like(q), lse, own)

    if not known:
        with pytest.raises(AssertionError, match="launched with"):
            launch_them()
        return
    launch_them()
    for name in ("split_kv_kernel", "row_local_kernel", "workqueue_kernel", "stream_k_kernel"):
        kernel = kernels[name]
        attends = [kinds[list(kernel.parameters).index("ATTEND")] for kinds, _ in kernel.made]
        assert {id(attend) for attend in attends} == {id(attend) for attend in (attend_tokens, *versions)}
        assert kernel.n_launches >= len(attends), "what was compiled is not found again"


def test_every_part_of_a_signature_is_needed(kernels):
    """But for the dtypes, each of which follows from the others, and the device, of which there is one here.

    So a part that was forgotten would show in the test above.
    """
    calls = list(every_call())
    signatures = []
    CUT[0] = lambda signature: signatures.append(signature) or signature
    launch_all(calls[:1])
    parts = parts_of(signatures[0])
    unneeded = []
    for part in parts:
        _triton._compiled.clear()
        CUT[0] = lambda signature, part=part: without(signature, part)
        try:
            launch_all(calls + calls[::-1])
        except AssertionError:
            continue
        unneeded.append(part)
    said = [get(signatures[0], part) for part in unneeded]
    assert len(parts) - len(unneeded) >= 8
    assert all(value is None or isinstance(value, torch.dtype) for value in said), said


def get(signature, path):
    for index in path:
        signature = signature[index]
    return signature


# --- a decode loop ---


@pytest.mark.parametrize("stage", ["split_kv", "row_local", "workqueue", "stream_k"])
def test_d2_a_decode_loop_compiles_a_few_variants(kernels, stage):
    """1 to 256 rows, 1 to 4,096 tokens: what changes in a decode loop is neither a constant nor specialized."""
    q, full = batch(Case("loop", [1] * 256, n_q_heads=8, head_dim=16))
    table = torch.zeros(256, 4096 // 16, dtype=torch.int32, device=DEVICE)
    for n_rows in [*range(1, 20), *range(20, 257, 13), 256]:
        cache = pkv.PagedKVCache(full.k_pages, full.v_pages, table[:n_rows], full.lengths[:n_rows])
        for length in (1, 16, 17, 300, 4096):
            lengths = [length] * n_rows
            lengths[n_rows // 2] = 1
            for options in ({"dynamic": True}, {}) if stage != "workqueue" else ({},):
                plan = pkv.plan(lengths, pkv.Shape.of(q, cache), stage=stage, gpu="rtx3060", **options)
                out = torch.empty_like(q[:n_rows])
                pkv.STAGES[stage].launch(q[:n_rows], cache, plan, 1.0, out, torch.empty(out.shape[:2], device=DEVICE))
    made = {name: len(kernel.made) for name, kernel in kernels.items()}
    launched = {name: kernel.n_launches for name, kernel in kernels.items() if kernel.n_launches}
    assert len(launched) == 2
    assert min(launched.values()) > 50
    assert max(made.values()) <= 6, made
    if stage == "stream_k":
        assert made["stream_k_kernel"] == made["merge_runs_kernel"] == 1
        assert kernels["stream_k_kernel"].grids == kernels["merge_runs_kernel"].grids
        assert len(kernels["stream_k_kernel"].grids) == 1


@pytest.mark.gpu
def test_d2_triton_compiles_a_few_variants():
    """The same on a GPU, as Triton counts; and no more are looked up."""
    kernels = (s5_stream_k.stream_k_kernel, s5_stream_k.merge_runs_kernel)

    def n_variants():
        return [sum(len(entry[0]) for entry in kernel.device_caches.values()) for kernel in kernels]

    q, full = batch(Case("loop", [4096] * 256, n_q_heads=8, n_kv_heads=1))
    before, looked_up = n_variants(), len(_triton._compiled)
    for n_rows in [*range(1, 20), *range(20, 257, 13), 256]:
        cache = pkv.PagedKVCache(full.k_pages, full.v_pages, full.block_table[:n_rows], full.lengths[:n_rows])
        for length in (1, 16, 17, 300, 4096):
            cache.lengths.fill_(length)
            cache.lengths[n_rows // 2] = 1
            pkv.decode(q[:n_rows], cache, stage="stream_k")
    assert all(now - old <= 6 for now, old in zip(n_variants(), before, strict=True))
    assert len(_triton._compiled) - looked_up <= 12

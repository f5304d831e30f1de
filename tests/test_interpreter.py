"""Kernels without a GPU: Triton's interpreter is chosen in time, honest about what it cannot do, and right (B1 to B4).

What is decided at import is tried in fresh processes.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from cases import DEVICE, Case, batch, decode, stages

import pkv
from pkv._triton import tl, triton
from pkv.bench.accuracy import Yardstick
from pkv.kernels.launching import KernelArgs
from pkv.kernels.tile import attend_tokens, find_pages, load_tile

REMEDY = "restart the kernel and import pkv first"
DECODE = """
def attempt(stage="split_kv"):
    '''What decoding a ramp of 40 tokens gives: its middle, or the error.'''
    v = torch.arange(40.0).view(1, 40, 1, 1).expand(1, 40, 1, 16).contiguous()
    cache = pkv.PagedKVCache.from_dense(torch.zeros_like(v), v, [40])
    try:
        return round(pkv.decode(torch.zeros(1, 2, 16), cache, stage=stage)[0, 0, 0].item(), 3)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""
KERNEL = """
import torch
import pkv
from pkv._triton import tl, triton


@triton.jit
def double(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr) * 2)


def doubled():
    x = torch.tensor([3.0])
    double[(1,)](x)
    return x.item()
"""
START = "import torch\nimport pkv\n" + DECODE
ON_CPU = pytest.mark.skipif(DEVICE.type != "cpu", reason="interprets only where there is no GPU")


# --- B3, B4: when is the interpreter chosen ---


def test_without_a_gpu_importing_pkv_is_enough(fresh):
    """Torch may have been at work before."""
    done = fresh("import torch\ntorch.zeros(3).sum()\n" + START + "print(pkv.INTERPRETED, attempt())")
    assert done.out.split() == ["True", "19.5"]
    assert done.err == ""


@pytest.mark.parametrize(("value", "has_triton"), [(None, True), (None, False), ("true", True)])
def test_the_environment_is_left_as_the_user_had_it(fresh, value, has_triton):
    """A process started from this one may have a GPU: it chooses for itself."""
    code = (
        ("" if has_triton else "import sys\nsys.modules['triton'] = None\n")
        + START
        + "import os\nprint(os.environ.get('TRITON_INTERPRET'), attempt('reference'))"
    )
    assert fresh(code, TRITON_INTERPRET=value).out.split() == [str(value), "19.5"]


def test_kernels_written_after_pkv_are_interpreted_too(fresh, tmp_path):
    """And so are those of a child of this process without a GPU, by its own choice."""
    (tmp_path / "kernels.py").write_text(KERNEL)
    code = "import torch, pkv, sys\n" + f"sys.path.insert(0, {str(tmp_path)!r})\n"
    code += "import kernels\nprint(kernels.doubled())\n"
    code += "import multiprocessing\n"
    code += "print(multiprocessing.get_context('spawn').Pool(1).apply(kernels.doubled))"
    assert fresh(code).out.split() == ["6.0", "6.0"]


def test_where_it_runs_decides_what_a_decode_without_a_stage_takes(launched):
    q, cache = batch(Case("default", [5, 40]))
    pkv.decode(q, cache)
    pkv.decode(q, cache, parts=pkv.Parts(attend_tokens=attend_tokens))
    assert launched == ["row_local" if pkv.INTERPRETED else "stream_k"] * 2
    launched.clear()
    assert pkv.plan([5, 40], pkv.Shape.of(q, cache)).stage == "stream_k"  # plans are made for a GPU, wherever


@pytest.mark.parametrize("value", ["1", "true", "0"])
def test_a_setting_of_the_user_is_honoured(fresh, value):
    code = START + "import os\nprint(os.environ['TRITON_INTERPRET'], attempt(), attempt('reference'), sep='|')"
    kept, got, reference = fresh(code, TRITON_INTERPRET=value).out.strip().split("|")
    assert kept == value
    assert reference == "19.5"
    if value == "0":
        assert got.startswith("RuntimeError: there is no GPU, and TRITON_INTERPRET was set to '0'")
        assert "unset it (or set it to 1)" in got
        assert REMEDY in got
        assert "active drivers" not in got
    else:
        assert got == "19.5"


@pytest.mark.parametrize("late", [False, True], ids=["never-set", "set-after-triton"])
def test_triton_imported_before_pkv(fresh, late):
    setting = "import os\nos.environ['TRITON_INTERPRET'] = '1'\n" if late else ""
    code = (
        "import triton\nimport triton.language\n" + setting + START + "print(attempt(), attempt('reference'), sep='|')"
    )
    got, reference = fresh(code).out.strip().split("|")
    assert got.startswith("RuntimeError: ")
    assert f"{REMEDY} (or set TRITON_INTERPRET=1 before triton is imported)" in got
    assert "active drivers" not in got
    assert reference == "19.5"


def test_a_variable_set_after_pkv_changes_nothing(fresh):
    code = START + "import os\nos.environ['TRITON_INTERPRET'] = '1'\nprint(attempt())"
    assert fresh(code).out.strip() == "19.5"


def test_a_variable_changed_after_pkv_changes_nothing(fresh):
    code = START + "import os\nos.environ['TRITON_INTERPRET'] = '0'\nprint(attempt(), attempt('reference'))\n"
    code += "del os.environ['TRITON_INTERPRET']\nprint(attempt())"
    assert fresh(code, TRITON_INTERPRET="1").out.split() == ["19.5"] * 3


def test_a_setting_of_triton_changed_after_pkv_is_named(fresh):
    change = "import triton\ntriton.knobs.runtime.interpret = False\n"
    got = fresh(START + f"{change}print(attempt())\nprint(attempt('reference'))").out.splitlines()
    assert got[0].startswith("RuntimeError: triton.knobs.runtime.interpret was changed after pkv was imported")
    assert "set it back to True, or restart" in got[0]
    assert got[1] == "19.5"


def test_without_triton(fresh):
    blocked = "import sys\nsys.modules['triton'] = None\n"
    code = """
print(pkv.INTERPRETED)
print(pkv.plan([5, 40], pkv.Shape(4, 2, 64, 16, "float16"), stage="split_kv", splits=2, gpu="h200").n_items)
print(pkv.plan([5, 40], pkv.Shape(4, 2, 64, 16, "float16"), stage="length_buckets").counters.launches)
print(attempt("reference"))
print(attempt())
"""
    interpreted, n_items, launches, reference, got = fresh(blocked + START + code).out.splitlines()
    assert (interpreted, n_items, launches, reference) == ("False", "4", "2", "19.5")
    assert got.startswith("RuntimeError: pkv's kernels need Triton")
    assert "pip install triton" in got
    assert "WSL2" in got
    assert "stage='reference'" in got


def test_a_triton_that_breaks_at_import(fresh, tmp_path):
    """Not every broken install raises ImportError."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
    code = (
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n" + START + "print(attempt('reference'))\nprint(attempt())"
    )
    reference, got = fresh(code).out.splitlines()
    assert reference == "19.5"
    assert "OSError: libcuda.so.1" in got


def test_cpu_tensors_beside_a_gpu(fresh):
    """torch sees a GPU, so kernels are compiled for it; CPU tensors are refused with the remedy."""
    pretend = "import torch\ntorch.cuda.is_available = lambda: True\n"
    code = "import os\nfrom pkv.decoding import DEFAULTS\n"
    code += "print('TRITON_INTERPRET' in os.environ, pkv.INTERPRETED, DEFAULTS[0], sep='\\n')\n"
    code += "print(attempt('reference'))\nprint(attempt())"
    *setting, reference, got = fresh(pretend + START + code).out.splitlines()
    assert setting == ["False", "False", "stream_k"]
    assert reference == "19.5"
    assert got.startswith("TypeError: the tensors lie on 'cpu', but kernels are compiled for the GPU")
    assert "stage='reference'" in got
    assert "TRITON_INTERPRET=1 before Triton is imported" in got


def test_a_user_may_interpret_beside_a_gpu(fresh):
    pretend = "import torch\ntorch.cuda.is_available = lambda: True\n"
    code = pretend + START + "from pkv.decoding import DEFAULTS\nprint(attempt(), DEFAULTS[0])"
    assert fresh(code, TRITON_INTERPRET="1").out.split() == ["19.5", "row_local"]


# --- B1: bfloat16 ---


@ON_CPU
@pytest.mark.parametrize("stage", stages())
def test_b1_bf16_is_right(stage):
    q, cache = batch(Case("bf16", [20]), torch.bfloat16)
    out, lse = decode(q, cache, stage, splits=2)
    yardstick = Yardstick(q, cache)
    assert yardstick.measure(out, lse).ok
    relative = (out.double() - yardstick.out).abs().max() / yardstick.out.abs().max()
    assert relative < 2e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_b1_loads_are_widened_exactly_where_they_are_interpreted(dtype):
    q, cache = batch(Case("widen", [20]), dtype)
    plan = pkv.plan([20], pkv.Shape.of(q, cache))
    args = KernelArgs(q, cache, plan, 1.0, torch.empty_like(q), torch.empty(1, 4, device=DEVICE))
    assert args.shape.INTERPRETED == pkv.INTERPRETED
    assert (DEVICE.type == "cpu") == pkv.INTERPRETED


@triton.jit
def tile_probe(cache, out_ptr, SHAPE: tl.constexpr):
    """2 * K + V of the first tile, by find_pages and load_tile alone."""
    pages, slots = find_pages(cache.table.ptr, cache.table.strides[1], 0, 13, SHAPE, True)
    k = load_tile(pages, slots, tl.program_id(0), 13, cache.k, SHAPE, True, False)  # [BLOCK_N, BLOCK_D]
    v = load_tile(pages, slots, tl.program_id(0), 13, cache.v, SHAPE, True, True)  # [BLOCK_D, BLOCK_N]
    offsets = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out_ptr + offsets, (k * 2.0 + tl.trans(v)).to(tl.float32))


@pytest.mark.parametrize("page_size", [16, 4, 48, 3], ids="page-{}".format)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_b1_arithmetic_on_loaded_tiles(dtype, page_size):
    """Sums and products of bf16 bits are nonsense in the interpreter; of what load_tile returns they are right.

    Pages that hold a tile, that divide it, that it divides, and that do neither.
    """
    q, cache = batch(Case("probe", [13], page_size, n_kv_heads=1, head_dim=16), dtype, spare_pages=0)
    plan = pkv.plan([13], pkv.Shape.of(q, cache))
    args = KernelArgs(q, cache, plan, 1.0, torch.empty_like(q), torch.empty(1, 4, device=DEVICE))
    got = torch.full((16, 16), -7.0, device=DEVICE)
    tile_probe[(1,)](args.cache, got, args.shape)
    want = torch.zeros(16, 16)
    k, v = (x.float().cpu() for x in cache.gather(0))
    want[:13] = (2 * k + v)[:, 0]
    torch.testing.assert_close(got.cpu(), want, atol=0.05 if dtype == torch.bfloat16 else 2e-3, rtol=1e-2)


# --- what the interpreter replaces in triton.language ---


@pytest.fixture
def looked_through(monkeypatch):
    """What the interpreter has looked through for builtins: modules and classes of triton.language."""
    seen, interpreter = [], sys.modules[type(tl.sum).__module__]
    patch = interpreter._patch_builtin
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda owner, *rest: (seen.append(owner), patch(owner, *rest)))
    return seen


@triton.jit
def misspelt_inside(x_ptr):
    tl.store(x_ptr, tl.lode(x_ptr))


@triton.jit
def misspelt_kernel(x_ptr):
    tl.store(x_ptr, tl.max(tl.load(x_ptr + tl.arange(0, 1)), 0))
    misspelt_inside(x_ptr)


@ON_CPU
def test_a_launch_looks_through_the_language_once(looked_through):
    """However many programs it has, and calls in each: that would be half of its time."""
    n_looked = []
    for n_rows in (1, 1, 5):  # a function's first call gives its file names of the interpreter's own
        looked_through.clear()
        decode(*batch(Case("equal", [40] * n_rows)), "split_kv", splits=1)
        n_looked.append(len(looked_through))
    assert n_looked[1] == n_looked[2] > 0


@ON_CPU
def test_after_a_launch_the_language_is_as_it_was():
    before = {name: getattr(tl, name) for name in ("load", "store", "range", "reduce", "static_assert")}
    cpu = torch.ones(1)
    for kernel in (misspelt_kernel, copy_kernel, misspelt_kernel):
        if kernel is copy_kernel:
            copy_kernel[(1,)](cpu, cpu, 1, 2)
        else:
            with pytest.raises(Exception, match="lode"):
                kernel[(1,)](cpu)
        assert {name: getattr(tl, name) for name in before} == before


@ON_CPU
def test_a_launch_readies_what_was_imported_late(fresh, tmp_path):
    """As in a notebook, where a later cell imports triton.language.core, in the globals of all cells before."""
    (tmp_path / "cells.py").write_text(
        """
import torch, pkv, triton, triton.language as tl

@triton.jit
def doubled(x): return x * 2.0

@triton.jit
def first(x_ptr): tl.store(x_ptr, doubled(tl.load(x_ptr)))

x = torch.ones(1)
first[(1,)](x)
import triton.language.core as core

@triton.jit
def redoubled(x_ptr): return doubled(core.load(x_ptr))

@triton.jit
def second(x_ptr): tl.store(x_ptr, redoubled(x_ptr))

second[(1,)](x)
first[(1,)](x)
print(x.item())
"""
    )
    assert fresh(f"import runpy; runpy.run_path({str(tmp_path / 'cells.py')!r}, run_name='__main__')").out == "8.0\n"


# --- B2: the interpreter and numpy at hand ---


@triton.jit
def copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + index, tl.load(x_ptr + index, mask=index < n), mask=index < n)


@triton.jit
def sum_until_kernel(x_ptr, bound_ptr, y_ptr, n):
    """Sums of x up to a loaded bound, and up to a bound that is the maximum of a block."""
    total = 0.0
    for index in range(0, tl.load(bound_ptr)):
        total += tl.load(x_ptr + index)
    tl.store(y_ptr, total)
    bounds = tl.load(bound_ptr + tl.arange(0, 4), mask=tl.arange(0, 4) < n, other=0)
    total = 0.0
    for index in range(0, tl.max(bounds, 0)):
        total += tl.load(x_ptr + index)
    tl.store(y_ptr + 1, total)


def test_b2_a_copy_kernel():
    x = torch.arange(1.0, 7.0, device=DEVICE)
    y = torch.zeros_like(x)
    copy_kernel[(3,)](x, y, 6, 2)
    assert torch.equal(x, y), f"triton {triton.__version__}, numpy {np.__version__}, torch {torch.__version__}"


def test_b2_loops_with_loaded_and_reduced_bounds():
    x = torch.arange(1.0, 7.0, device=DEVICE)
    y = torch.zeros(2, device=DEVICE)
    sum_until_kernel[(1,)](x, torch.tensor([3, 5, 2], dtype=torch.int32, device=DEVICE), y, 3)
    assert y.tolist() == [6.0, 15.0], f"triton {triton.__version__}, numpy {np.__version__}, torch {torch.__version__}"


# --- B4: nothing here is tuned at run time ---


def test_b4_no_kernel_is_autotuned():
    """Launching an autotuned kernel with two configurations fails in the interpreter."""
    from pkv import stages, tile
    from pkv.kernels import merging

    modules = [merging, tile, *vars(stages).values()]
    kernels = [
        k for module in modules if hasattr(module, "__dict__") for k in vars(module).values() if hasattr(k, "fn")
    ]
    assert len(kernels) > 8
    assert not [k for k in kernels if type(k).__name__ in ("Autotuner", "Heuristics")]


def test_b4_importing_compiles_and_launches_nothing(fresh, tmp_path):
    fresh(
        START + "pkv.plan([5], pkv.Shape(4, 2, 64, 16, 'float16'))",
        TRITON_CACHE_DIR=str(tmp_path),
        TRITON_INTERPRET="0",
    )
    assert list(tmp_path.iterdir()) == []

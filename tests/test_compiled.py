"""Every configuration compiles for every card, without the card: no spills, within shared memory, K and V copied
asynchronously 16 bytes at a time (B5).

Compiling happens in processes of their own, because here Triton may be interpreting. The figures appear at the end of
the run; `pytest -s` shows them at once.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cases import Case, batch

import pkv
from pkv._triton import triton
from pkv.kernels.configs import (
    TABLE,
    WARP_THREADS,
    ConfigKey,
    choose_config,
    compiled_figures,
    config_key,
    every_key,
    programs_per_sm,
    resident_programs,
)
from pkv.kernels.launching import KernelArgs, is_aligned
from pkv.plans.gpu import ARCH_LIMITS, DEFAULT_TILE, TILES, GpuProfile
from tests.conftest import TABLES

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "pkv" / "data" / "compiled.json"
BASELINE = ROOT / "tests" / "data" / "ptx.json"
OTHER_CODE = "other instructions than those measured: measure before and after, then renew tests/data/ptx.json"
ARCHITECTURES = (80, 86, 89, 90, 120)
HOME = 86  # of the paper's card; make test-all compiles for the others
KERNELS_OF_PLANNING = ("split_kv", "row_local", "workqueue", "stream_k")
COPY_BYTES = 16
# Of 32 heads of head_dim 256, q alone takes half of a thread's registers, and more warps do not help. So a loop over
# rows spills a few bytes, and on sm_120 every kernel does.
LARGEST_PROGRAM = (32, 256)
MAY_SPILL = {("stream_k", 120): 152, ("stream_k", 80): 96, ("stream_k", 86): 40, ("stream_k", 89): 40}
MAY_SPILL |= {(kernel, 120): 24 for kernel in ("split_kv", "row_local", "workqueue")}
COMPILE = """
import dataclasses, json
from pkv.bench.fit.compiled import compile_entry, compile_key
from pkv.kernels.configs import ConfigKey, choose_config
from pkv.plans.gpu import GpuProfile
from pkv.plans.shape import Shape

arch, jobs = json.loads('''{jobs}''')
for job in jobs:
    if "key" in job:
        made = compile_key(ConfigKey(*job["key"]), arch, job["aligned"], job["kernel"])
    else:
        shape = Shape(**job["shape"])
        config = choose_config(shape, GpuProfile("", arch, 1), job["tile"], job["aligned"])
        made = compile_entry(shape, config, arch, aligned=job["aligned"])
    print(json.dumps(dataclasses.asdict(made)))
"""


class Figures(dict):
    """registers, shared, spilled, async_copies, global_loads, tensor_ops, ptx of one kernel."""

    __getattr__ = dict.__getitem__


def compiled(fresh, arch, jobs):
    """The figures of each job: {"key": a ConfigKey's fields} or {"shape", "tile", "aligned"}."""
    done = fresh(COMPILE.format(jobs=json.dumps([arch, jobs])), TRITON_INTERPRET="0", timeout=900)
    return [Figures(json.loads(line)) for line in done.out.splitlines()]


def shape_job(shape, tile=DEFAULT_TILE, aligned=True):
    return {"shape": shape.to_dict(), "tile": tile, "aligned": aligned}


def key_job(key, kernel="split_kv"):
    return {"key": [key.itemsize, key.block_h, key.block_d, key.tile], "aligned": True, "kernel": kernel}


def warps_and_stages(key):
    column = TABLE[key.itemsize, key.block_h]
    return column[min(d for d, tile in column if tile == key.tile and d >= key.block_d), key.tile]


def copies_needed(key):
    """Copies of 16 bytes that a thread makes for one tile of K and of V."""
    num_warps, _ = warps_and_stages(key)
    return 2 * -(-key.tile * key.block_d * key.itemsize // (COPY_BYTES * WARP_THREADS * num_warps))


def fault_of(key, arch, made, kernel="split_kv"):
    """What is wrong with one compiled configuration, or None."""
    needed = copies_needed(key)
    is_largest = (key.block_h, key.block_d) == LARGEST_PROGRAM
    if made.spilled > (MAY_SPILL.get((kernel, arch), 0) if is_largest else 0):
        return f"spills {made.spilled} bytes"
    if made.shared > ARCH_LIMITS[arch].shared_per_program:
        return f"takes {made.shared} bytes of shared memory, sm_{arch} has {ARCH_LIMITS[arch].shared_per_program}"
    if made.async_copies < 2 * needed:  # tiles are copied before the loop and in it
        return f"{made.async_copies} cp.async, {needed} a tile are needed: K and V are not copied asynchronously"
    if made.async_copies > 4 * needed + 8:
        return f"{made.async_copies} cp.async where {needed} a tile would do: they move fewer than 16 bytes"
    if made.global_loads > 2 * needed + 16:  # the masked tile, and a few scalars
        return f"{made.global_loads} ld.global, at most {2 * needed + 16} expected: they move fewer than 16 bytes"
    if (made.tensor_ops > 0) != (key.block_h > 1):
        return f"{made.tensor_ops} mma instructions with {key.block_h} heads"
    return None


def line_of(key, arch, made):
    num_warps, num_stages = warps_and_stages(key)
    resident = resident_programs(made.registers, made.shared, num_warps, ARCH_LIMITS[arch])
    return (
        f"sm_{arch:<3} {key!s:<45} {num_warps} warps {num_stages} stages {made.registers:>4} registers "
        f"{made.shared:>6} B shared {resident:>3} programs/SM {made.async_copies:>3} cp.async "
        f"{made.global_loads:>3} ld.global"
    )


def check_keys(fresh, arch, keys, record_property, kernel="split_kv"):
    made = compiled(fresh, arch, [key_job(key, kernel) for key in keys])
    assert len(made) == len(keys) > 0
    lines = [line_of(key, arch, figures) for key, figures in zip(keys, made, strict=True)]
    print("", *lines, sep="\n")
    usual = [(64, 16), (128, 16), (256, 16)]
    shown = [text for key, text in zip(keys, lines, strict=True) if (key.block_d, key.block_h) in usual]
    record_property(TABLES, "\n".join(shown))
    faults = [f"{key}: {fault_of(key, arch, figures, kernel)}" for key, figures in zip(keys, made, strict=True)]
    assert not [fault for fault in faults if not fault.endswith(": None")]
    return dict(zip(map(str, keys), made, strict=True))


def stored(file):
    """The figures in a file; skips where they come from another Triton."""
    found = json.loads(file.read_text())
    if triton.__version__ != found["triton"]:
        pytest.skip(
            f"{file.name} comes from triton {found['triton']}, this is {triton.__version__}; all else is checked"
        )
    return found["figures"]


def check_against_files(made, arch, kernel="split_kv"):
    """Registers, shared memory and instructions as stored, where this is the Triton that they were stored with."""
    figures = stored(FIGURES)[str(arch)]
    different = {name: (figures[name][kernel], [one.registers, one.shared]) for name, one in made.items()}
    assert not {name: pair for name, pair in different.items() if pair[0] != pair[1]}, (
        "python -m pkv.bench.fit.compiled --write"
    )
    check_instructions(made, arch, kernel)


def check_instructions(made, arch, kernel):
    """Those of the baseline, where it has the architecture."""
    if hashes := stored(BASELINE).get(str(arch)):
        assert not [name for name, one in made.items() if hashes[name][kernel] != one.ptx], OTHER_CODE


@pytest.mark.parametrize(
    "arch",
    [pytest.param(arch, marks=[] if arch == HOME else [pytest.mark.slow], id=f"sm_{arch}") for arch in ARCHITECTURES],
)
def test_every_default_configuration(fresh, arch, record_property):
    keys = [key for key in every_key() if key.tile == DEFAULT_TILE]
    check_against_files(check_keys(fresh, arch, keys, record_property), arch)


@pytest.mark.parametrize(
    "kernel", [*(pytest.param(kernel, marks=pytest.mark.slow) for kernel in ("row_local", "workqueue")), "stream_k"]
)
def test_the_other_kernels(fresh, kernel, record_property):
    keys = [key for key in every_key() if key.tile == DEFAULT_TILE]
    check_against_files(check_keys(fresh, 86, keys, record_property, kernel), 86, kernel)


REST = [  # sm_89 compiles like sm_86, so that one kernel stands for all there; sm_120 likewise
    (kernel, arch, tile)
    for kernel in KERNELS_OF_PLANNING
    for arch in (ARCHITECTURES if kernel in ("split_kv", "stream_k") else (80, 86, 90))
    for tile in TILES
    if tile != DEFAULT_TILE or (kernel != "split_kv" and arch != 86)  # those are compiled by the two tests before
]


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("kernel", "arch", "tile"),
    [pytest.param(*each, marks=[] if each[2] == DEFAULT_TILE else [pytest.mark.nightly]) for each in REST],
)
def test_every_other_configuration(fresh, arch, tile, kernel, record_property):
    keys = [key for key in every_key() if key.tile == tile]
    check_against_files(check_keys(fresh, arch, keys, record_property, kernel), arch, kernel)


OTHERS = """
import json
from pkv.bench.fit.compiled import MERGES, compile_key, jobs_of_baseline, name_of

for key, arch, aligned, kernel, page_size in jobs_of_baseline():
    if arch == {arch} and (kernel in MERGES or (aligned, page_size) != (True, 16)):
        made = compile_key(key, arch, aligned, kernel, page_size)
        print(json.dumps([name_of(key, aligned, page_size), kernel, made.ptx]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("arch", [HOME, pytest.param(90, marks=pytest.mark.nightly)], ids="sm_{}".format)
def test_instructions_of_merges_and_of_other_pages(fresh, arch):
    """Those of the baseline that no test above compiles."""
    hashes = stored(BASELINE)[str(arch)]
    done = fresh(OTHERS.format(arch=arch), TRITON_INTERPRET="0", timeout=900)
    found = [json.loads(line) for line in done.out.splitlines()]
    assert len(found) > 40
    assert [(name, kernel) for name, kernel, ptx in found if ptx != hashes[name][kernel]] == [], OTHER_CODE


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 86, 90])
def test_programs_of_several_items_do_not_spill_either(fresh, arch):
    """But for 32 heads of head_dim 256, whose programs have as many warps as help: a few bytes, and no plan of ours."""
    keys = [key for key in every_key() if key.tile == DEFAULT_TILE and (key.block_h, key.block_d) != LARGEST_PROGRAM]
    jobs = [key_job(key, "workqueue, several items") for key in keys]
    made = dict(zip(map(str, keys), compiled(fresh, arch, jobs), strict=True))
    assert not {name: one.spilled for name, one in made.items() if one.spilled}
    check_instructions(made, arch, "workqueue, several items")


VARIANTS = {
    "page-1": shape_job(pkv.Shape(32, 8, 128, 1, "float16")),
    "page-8": shape_job(pkv.Shape(32, 8, 128, 8, "float16")),
    "page-48": shape_job(pkv.Shape(32, 8, 128, 48, "float16")),
    "page-64": shape_job(pkv.Shape(32, 8, 128, 64, "float16")),
    "page-544": shape_job(pkv.Shape(32, 8, 128, 544, "float16")),
    "page-48-head-dim-256": shape_job(pkv.Shape(32, 8, 256, 48, "float16")),
    "head-dim-80": shape_job(pkv.Shape(32, 8, 80, 16, "float16")),
    "head-dim-96": shape_job(pkv.Shape(32, 8, 96, 16, "float16")),
    "head-dim-192-bf16": shape_job(pkv.Shape(32, 8, 192, 16, "bfloat16")),
    "head-dim-256-bf16": shape_job(pkv.Shape(32, 8, 256, 16, "bfloat16")),
    "head-dim-64-bf16": shape_job(pkv.Shape(32, 8, 64, 16, "bfloat16")),
    "group-1": shape_job(pkv.Shape(8, 8, 128, 16, "float16")),
    "group-7": shape_job(pkv.Shape(28, 4, 128, 16, "float16")),
    "group-71": shape_job(pkv.Shape(71, 1, 64, 16, "float16")),
}


def test_page_sizes_and_head_dims_that_differ(fresh):
    """Fast copies need no power of two: only the promise that rows start at multiples of 16 bytes."""
    faults = {}
    for (name, job), made in zip(VARIANTS.items(), compiled(fresh, 86, list(VARIANTS.values())), strict=True):
        key = config_key(pkv.Shape(**job["shape"]), job["tile"])
        if job["shape"]["head_dim"] != key.block_d:  # padded dims are masked, and masked loads of them are narrower
            made["global_loads"] = 0
        faults[name] = fault_of(key, 86, made)
    assert not {name: fault for name, fault in faults.items() if fault}


def test_without_the_promise(fresh):
    """aligned=False, or head_dim 13, compiles without spills too. And it shows what the promise buys."""
    shapes = [pkv.Shape(32, 8, d, 16, dtype) for dtype in ("float16", "float32") for d in (64, 128, 256)]
    odd = [pkv.Shape(32, 8, 13, 16, dtype) for dtype in ("float16", "bfloat16", "float32")]
    odd.append(pkv.Shape(32, 8, 80, 48, "float16"))
    jobs = [shape_job(shape, aligned=aligned) for shape in shapes for aligned in (True, False)]
    made = compiled(fresh, 86, jobs + [shape_job(shape, aligned=False) for shape in odd])
    assert [figures for figures in made if figures.spilled or figures.shared > 101_376] == []
    for index, shape in enumerate(shapes):
        promised, without = made[2 * index : 2 * index + 2]
        if shape.dtype == torch.float16:  # copies of 2 bytes do not exist: scalar loads instead
            assert without.async_copies <= promised.async_copies / 4, shape
            assert without.global_loads >= promised.global_loads * 4, shape
        else:  # copies of 4 bytes do: four times as many
            fewer = 1 if shape.head_dim < 128 else 2  # from there on twice the warps share them
            assert without.async_copies >= promised.async_copies * 3 / fewer, shape


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("arch", [86, 90], ids="sm_{}".format)
def test_no_tile_spills_without_the_promise(fresh, arch, tile):
    keys = [key for key in every_key() if key.tile == tile and key.block_d >= 64]
    jobs = [key_job(key) | {"aligned": False} for key in keys]
    faults = [
        (str(key), made)
        for key, made in zip(keys, compiled(fresh, arch, jobs), strict=True)
        if made.spilled or made.shared > ARCH_LIMITS[arch].shared_per_program
    ]
    assert faults == []


def test_b5_what_does_not_fit_is_refused_before_a_launch():
    fp32 = pkv.Shape(32, 8, 256, 16, "float32")
    assert 64 in TILES
    with pytest.raises(
        ValueError, match=r"tile = 64 does not fit registers and shared memory with 4 bytes.*take a smaller tile"
    ):
        pkv.plan([40], fp32, tile=64)
    assert choose_config(fp32, GpuProfile("", 86, 28), 16).tile == 16


# --- the promise is made only where it holds ---

EVEN = {
    "nhd": lambda x: x,
    "hnd": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "unbind": lambda x: torch.stack([x, x], 1).unbind(1)[1],
    "heads-outermost": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "later-page": lambda x: x[1:],
    "later-head": lambda x: x[:, :, 1:],
    "wider-row": lambda x: torch.cat([x, x[..., :8]], -1)[..., :64],
    "later-dims": lambda x: x[..., 8:],
}
ODD = {
    "odd-stride": lambda x: torch.cat([x, x[..., :3]], -1)[..., :64],
    "stride-of-8-bytes": lambda x: torch.cat([x, x[..., :4]], -1)[..., :64],
    "odd-address": lambda x: x.flatten()[1 : 1 + x[1:].numel()].view(x[1:].shape),
    "address-of-8-bytes": lambda x: x[..., 4:],
    "every-other-dim": lambda x: x[..., ::2],
    "dims-outermost": lambda x: x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    "odd-page-stride": lambda x: (
        x.flatten()[: 2 * 1000].view(2, 1000)[:, :999].as_strided((2, 4, 2, 64), (999, 128, 64, 1))
    ),
    "odd-token-stride": lambda x: x.flatten().as_strided((2, 4, 2, 64), (1024, 130, 64, 1)),
    "odd-head-stride": lambda x: x.flatten().as_strided((2, 4, 2, 64), (1024, 160, 66, 1)),
}


@pytest.mark.parametrize(("view", "expected"), [(v, True) for v in EVEN.values()] + [(v, False) for v in ODD.values()],
                         ids=[*EVEN, *ODD])  # fmt: skip
def test_alignment(view, expected):
    pages = torch.zeros(3, 16, 2, 64, dtype=torch.float16)
    assert pages.data_ptr() % 16 == 0
    assert is_aligned(view(pages)) == expected


@pytest.mark.parametrize(
    ("head_dim", "dtype", "expected"),
    [
        (13, torch.float16, False), (80, torch.float16, True), (96, torch.bfloat16, True), (112, torch.float16, True),
        (20, torch.float16, False), (20, torch.float32, True), (13, torch.float32, False), (4, torch.float32, True),
        (4, torch.bfloat16, False), (8, torch.bfloat16, True),
    ],
)  # fmt: skip
def test_alignment_of_head_dims(head_dim, dtype, expected):
    assert is_aligned(torch.zeros(3, 16, 2, head_dim, dtype=dtype)) == expected


@pytest.mark.parametrize("side", ["k", "v", "both", "none"])
def test_one_side_unaligned_is_enough_to_drop_the_promise(side):
    """Kernel arguments of a cache whose K, V, both or none start at an odd address."""
    q, cache = batch(Case("sides", [20]))

    def shifted(x):
        return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)

    k = shifted(cache.k_pages) if side in ("k", "both") else cache.k_pages
    v = shifted(cache.v_pages) if side in ("v", "both") else cache.v_pages
    other = pkv.PagedKVCache(k, v, cache.block_table, cache.lengths)
    plan = pkv.plan([20], pkv.Shape.of(q, other))
    args = KernelArgs(q, other, plan, 1.0, torch.empty_like(q), torch.empty(1, 4))
    assert (side == "none") == args.shape.ALIGNED


# --- occupancy ---


@pytest.mark.parametrize(
    ("registers", "shared", "num_warps", "arch", "resident"),
    [
        (194, 20488, 1, 86, 4),  # shared memory: 102,400 / (20,488 + 1,024, rounded up)
        (194, 20488, 1, 90, 10),  # registers: 65,536 / (32 * 200, in units of 256)
        (128, 0, 1, 86, 16),  # registers again: 65,536 / (32 * 128)
        (32, 0, 1, 86, 16),  # the card holds no more programs
        (32, 0, 1, 89, 24),
        (32, 0, 1, 90, 32),
        (32, 10_353, 1, 86, 8),  # shared memory comes in units of 128 bytes: else it were 9
        (32, 1024, 16, 86, 3),  # 1,536 threads
        (255, 0, 8, 80, 1),  # 65,536 / 65,536
        (255, 0, 16, 80, 1),  # never 0
        (32, 99_000, 1, 86, 1),
    ],
)
def test_programs_that_reside_on_an_sm(registers, shared, num_warps, arch, resident):
    assert resident_programs(registers, shared, num_warps, ARCH_LIMITS[arch]) == resident


def test_planning_uses_the_card_at_hand():
    llama = pkv.Shape(32, 8, 128, 16, "float16")
    for kernel in KERNELS_OF_PLANNING:  # shared memory: 102,400 / (18,440 + 1,024, rounded up)
        assert programs_per_sm(llama, pkv.cards.known.load_gpu("rtx3060"), 16, kernel) == 5
    assert pkv.plan([40], llama, gpu="rtx3060").programs_per_sm == 5
    assert pkv.plan([40], llama, gpu="h200").programs_per_sm > 4
    unknown = GpuProfile("of tomorrow", 130, 100)
    assert programs_per_sm(llama, unknown, 16) >= 1
    older = GpuProfile("of yesterday", 75, 40)
    assert programs_per_sm(llama, older, 16) >= 1


def test_figures_are_stored_for_every_configuration():
    for arch in ARCHITECTURES:
        figures = compiled_figures()[str(arch)]
        assert set(figures) == {str(key) for key in every_key()}
        assert all(set(kernels) == set(KERNELS_OF_PLANNING) for kernels in figures.values())


def test_every_shape_has_a_stored_configuration():
    """Whatever head_dim, group and dtype: its key is one of those compiled above."""
    keys = set(every_key())
    for dtype in ("float16", "bfloat16", "float32"):
        for group in (1, 2, 3, 7, 16, 17, 32, 33, 71, 128):
            for head_dim in (1, 13, 16, 17, 64, 80, 128, 192, 256):
                key = config_key(pkv.Shape(group, 1, head_dim, 16, dtype), DEFAULT_TILE)
                assert isinstance(key, ConfigKey)
                assert key in keys, (dtype, group, head_dim)

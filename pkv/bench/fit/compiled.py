"""Compile the kernels for any NVIDIA card, without one, and read what they take.

TRITON_INTERPRET=0 python -m pkv.bench.fit.compiled          # print the table
TRITON_INTERPRET=0 python -m pkv.bench.fit.compiled --write  # and store it in pkv/data/compiled.json
TRITON_INTERPRET=0 python -m pkv.bench.fit.compiled --ptx tests/data/ptx.json  # store hashes of all instructions

A kernel whose hash stays needs no new measurement; who stores new hashes says how its times changed.
"""

import argparse
import hashlib
import json
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pkv.kernels.configs import ConfigKey, TileConfig, choose_config, every_key
from pkv.kernels.launching import kernel_shape
from pkv.kernels.masks import Masks
from pkv.kernels.merging import merge_kernel, merge_sizes
from pkv.kernels.tile import CacheArgs, RowArgs, StateArgs, Strided, attend_tokens
from pkv.plans.features import PLAIN, Features
from pkv.plans.gpu import DEFAULT_TILE, GpuProfile
from pkv.plans.shape import Shape
from pkv.stages.s1_split_kv import split_kv_kernel
from pkv.stages.s2_row_local import row_local_kernel
from pkv.stages.s3_workqueue import warps_of_several, workqueue_kernel
from pkv.stages.s5_stream_k import merge_runs_kernel, stream_k_kernel
from pkv.stages.s5_stream_k_runs import RULES

TRITON_TYPES = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}

OFFSETS: dict[str, Any] = {"partial_offsets": "*i32"}
# The entry kernels, and the arguments of each between those that all take. None: an optional array left out.
OWN_ARGUMENTS: dict[str, dict[str, Any]] = {
    "split_kv": {"partial_offsets": None, "row_ids": None, "n_rows": "i32", "n_splits": "i32"},
    "row_local": {"n_splits": "i32"},
    "workqueue": OFFSETS | {"items": "*i32", "program_offsets": None, "item_order": "*i32", "first_program": "i32"},
    "workqueue, several items": OFFSETS | {
        "items": "*i32", "program_offsets": "*i32", "item_order": "*i32", "first_program": "i32",
    },
    "stream_k": {"n_rows": "i32", "n_programs": "i32"},
}  # fmt: skip
KERNELS = {
    "split_kv": split_kv_kernel,
    "row_local": row_local_kernel,
    "workqueue": workqueue_kernel,
    "workqueue, several items": workqueue_kernel,
    "stream_k": stream_k_kernel,
}
MERGES = ("merge", "merge of runs")
KERNELS_OF_PLANNING = ("split_kv", "row_local", "workqueue", "stream_k")  # their figures are stored
LENGTHS = Strided("*i32", ("constexpr",))
UNSPECIALIZED = {"n_rows", "n_splits", "first_program", "n_programs"}
STATES = 64  # of a row that is merged, in what is compiled
ARCHITECTURES = (80, 86, 89, 90, 120)
ARCHITECTURES_OF_BASELINE = (86, 90)
FIGURES = Path(__file__).parents[2] / "data" / "compiled.json"


@dataclass(frozen=True)
class Compiled:
    """What the compiler reports of one kernel: per thread, per program, counts in the PTX, and a hash of it."""

    registers: int
    shared: int
    spilled: int
    async_copies: int
    global_loads: int
    tensor_ops: int
    ptx: str


def compile_entry(
    shape: Shape, config: TileConfig, arch: int, *, aligned: bool = True, kernel: str = "split_kv",
    attend: Any = attend_tokens,
) -> Compiled:  # fmt: skip
    """Compile one of KERNELS for compute capability `arch`, as a launch on contiguous NHD pages would.

    attend: the tile loop, see pkv.Parts.
    """
    sizes = kernel_shape(shape, config, aligned, False, arch >= 90)
    pages = Strided(TRITON_TYPES[shape.dtype], ("i32", "i32", "i32", "constexpr"))
    q, result, partials = rows_of(shape)
    arguments = {
        "q": q,
        "cache": CacheArgs(pages, pages, Strided("*i32", ("i32", "constexpr")), LENGTHS, mask_types(shape)),
        "result": result,
        "partials": partials,
        **OWN_ARGUMENTS[kernel],
        "qk_scale": "fp32",
    }
    constants = {"ATTEND": attend, "SHAPE": sizes, **({"RULES": RULES} if kernel == "stream_k" else {})}
    several = kernel == "workqueue, several items"
    num_warps = warps_of_several(config.num_warps, sizes.BLOCK_H) if several else config.num_warps
    odd = () if aligned else ("cache",)
    return compile_kernel(KERNELS[kernel], arguments, constants, arch, odd, num_warps=num_warps)


def compile_merge(shape: Shape, config: TileConfig, arch: int, kernel: str) -> Compiled:
    """Compile one of MERGES for compute capability `arch`, as for rows of up to STATES states."""
    sizes = kernel_shape(shape, config, True, False, arch >= 90)
    _, result, partials = rows_of(shape)
    if kernel == "merge":
        block_s, dim_blocks, num_warps = merge_sizes(STATES, sizes)
        arguments = {"partials": partials, "result": result, **OFFSETS, "row_ids": None, "n_splits": "i32"}
        constants = {"SHAPE": sizes, "BLOCK_S": block_s, "DIM_BLOCKS": dim_blocks}
        return compile_kernel(merge_kernel, arguments, constants, arch, num_warps=num_warps)
    arguments = {
        "rows": RowArgs(LENGTHS, mask_types(shape)),
        "partials": partials,
        "result": result,
        "n_rows": "i32",
        "n_programs": "i32",
    }
    constants = {"SHAPE": sizes, "RULES": RULES, "MOST_ITEMS": STATES}
    return compile_kernel(merge_runs_kernel, arguments, constants, arch, num_warps=1)


def rows_of(shape: Shape) -> tuple[Strided, StateArgs, StateArgs]:
    """q, result and partials, as types."""
    rows = Strided(TRITON_TYPES[shape.dtype], ("i32", "i32", "constexpr"))
    lse = Strided("*fp32", ("i32", "constexpr"))
    return rows, StateArgs(rows, lse), StateArgs(Strided("*fp32", ("i32", "i32", "constexpr")), lse)


def mask_types(shape: Shape) -> Masks:
    """The masks of the shape's features, as types."""
    features = shape.features
    return Masks(None if features.window is None else "i32", "fp32" if features.soft_cap else None)


def compile_kernel(
    kernel: Any, arguments: dict[str, Any], constants: dict[str, Any], arch: int, odd: tuple[str, ...] = (),
    **options: Any,
) -> Compiled:  # fmt: skip
    """Compile for compute capability `arch`. arguments: types by name, None for an array left out.

    odd: arguments whose addresses and strides are no multiples of 16.
    """
    names = [*arguments, *constants]
    known: dict[tuple[int, ...], object] = {(names.index(name),): value for name, value in constants.items()}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}

    def visit(path: tuple[int, ...], entry: object, divisible: bool) -> None:
        if isinstance(entry, tuple):
            for index, part in enumerate(entry):
                visit((*path, index), part, divisible)
        elif entry is None or entry == "constexpr":
            known[path] = 1 if entry else None
        elif divisible and entry != "fp32":
            attributes[path] = [["tt.divisibility", 16]]

    for index, (name, entry) in enumerate(arguments.items()):
        visit((index,), entry, name not in UNSPECIALIZED and name not in odd)
    signature = {name: typed(entry) for name, entry in arguments.items()} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, known, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = made.asm["ptx"]
    registers, stack = resource_usage(made.asm["cubin"])
    return Compiled(
        registers=registers,
        shared=made.metadata.shared,
        spilled=stack,
        async_copies=len(re.findall(r"cp\.async\.c[ag]", ptx)),
        global_loads=len(re.findall(r"ld\.global", ptx)),
        tensor_ops=len(re.findall(r"mma\.sync|wgmma\.mma", ptx)),
        ptx=hash_of(ptx, kernel.fn.__name__),
    )


def typed(entry: Any) -> Any:
    """Return an argument's type, in which Triton takes what is left out for a constant."""
    if isinstance(entry, tuple):
        return type(entry)(*map(typed, entry)) if hasattr(entry, "_fields") else tuple(map(typed, entry))
    return entry or "constexpr"


def hash_of(ptx: str, name: str) -> str:
    """A hash of a kernel's instructions: the same wherever its source lies, whatever it is called.

    Left out are the version of PTX, and all that is there for debuggers: files, lines, labels of both, comments.

    >>> code = ".version 8.7\\n.visible .entry mine(\\n) {\\n.loc 1 20 3 // mine.py:20\\n$L__tmp1:\\nret; // done\\n}"
    >>> hash_of(code, "mine") == hash_of(code.replace("mine", "other").replace("20", "7"), "other")
    True
    >>> hash_of(code, "mine") == hash_of(code.replace("ret", "trap"), "mine")
    False
    """
    code = ptx.partition(".section")[0].replace(name, "kernel")
    lines = (line.partition("//")[0].strip() for line in code.splitlines())
    kept = [line for line in lines if line and not re.match(r"\.(version|file|loc)\b|\$L__(tmp|func)\w*:", line)]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers per thread and bytes of stack and local memory (spills), by the cuobjdump that Triton brings."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def representative(key: ConfigKey, page_size: int = 16, features: Features = PLAIN) -> Shape:
    """A shape whose configuration has this key; figures depend on nothing else."""
    dtype = {2: torch.float16, 4: torch.float32}[key.itemsize]
    group = {1: 4, 8: 4, 16: 16, 32: 32}[key.block_h]
    return Shape(8 * group, 8, key.block_d, page_size, dtype, features=features)


def compile_key(
    key: ConfigKey, arch: int, aligned: bool = True, kernel: str = "split_kv", page_size: int = 16,
    features: Features = PLAIN,
) -> Compiled:  # fmt: skip
    """Compile the configuration that planning chooses for `key` on compute capability `arch`."""
    shape = representative(key, page_size, features)
    config = choose_config(shape, GpuProfile("", arch, 1), key.tile, aligned)
    if kernel in MERGES:
        return compile_merge(shape, config, arch, kernel)
    return compile_entry(shape, config, arch, aligned=aligned, kernel=kernel)


Job = tuple[ConfigKey, int, bool, str, int]  # the arguments of compile_key


def jobs_of_planning() -> list[Job]:
    """What figures are stored of."""
    return [
        (key, arch, True, name, 16) for arch in ARCHITECTURES for key in every_key() for name in KERNELS_OF_PLANNING
    ]


def jobs_of_baseline() -> list[Job]:
    """What hashes are stored of: every kernel and key, and of one key other pages, and pages that are not aligned."""
    usual = ConfigKey(2, 8, 128, DEFAULT_TILE)
    return [
        job
        for arch in ARCHITECTURES_OF_BASELINE
        for job in (
            *((key, arch, True, name, 16) for key in every_key() for name in KERNELS),
            *((key, arch, True, name, 16) for key in every_key() if key.tile == DEFAULT_TILE for name in MERGES),
            *((usual, arch, True, name, page_size) for name in KERNELS for page_size in (1, 8, 48)),
            *((usual, arch, False, name, 16) for name in KERNELS),
        )
    ]


def name_of(key: ConfigKey, aligned: bool = True, page_size: int = 16) -> str:
    """Of a configuration, in a file."""
    return f"{key}{'' if page_size == 16 else f', pages of {page_size}'}{'' if aligned else ', unaligned'}"


def main() -> None:
    """The commands above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"store the figures in {FIGURES.name}")
    parser.add_argument("--ptx", type=Path, metavar="FILE", help="compile all that has a hash, and store the hashes")
    arguments = parser.parse_args()
    jobs = jobs_of_baseline() if arguments.ptx else jobs_of_planning()
    figures: dict[str, dict[str, dict[str, list[int] | str]]] = {}
    with ProcessPoolExecutor() as pool:
        for job, made in zip(jobs, pool.map(compile_key, *zip(*jobs, strict=True)), strict=True):
            key, arch, aligned, kernel, page_size = job
            name = name_of(key, aligned, page_size)
            print(f"sm_{arch}  {name}, {kernel}: {made}", flush=True)
            found = made.ptx if arguments.ptx else [made.registers, made.shared]
            figures.setdefault(str(arch), {}).setdefault(name, {})[kernel] = found
    file = arguments.ptx or (FIGURES if arguments.write else None)
    if file:
        text = json.dumps({"triton": triton.__version__, "figures": figures}, indent=1) + "\n"
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

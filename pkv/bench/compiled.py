"""Compile the kernels for any NVIDIA card, without one, and read what they take.

TRITON_INTERPRET=0 python -m pkv.bench.compiled          # print the table
TRITON_INTERPRET=0 python -m pkv.bench.compiled --write  # and store it in pkv/data/compiled.json
"""

import argparse
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

from pkv.configs import ConfigKey, TileConfig, choose_config, every_key
from pkv.gpus import GpuProfile
from pkv.launching import kernel_shape
from pkv.shapes import Shape
from pkv.stages.s1_split_kv import split_kv_kernel
from pkv.stages.s2_row_local import row_local_kernel
from pkv.stages.s3_workqueue import warps_of_several, workqueue_kernel
from pkv.stages.s5_stream_k import stream_k_kernel
from pkv.stages.s5_stream_k_runs import RULES
from pkv.tile import CacheArgs, StateArgs, Strided, attend_tokens

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
RULED = ("stream_k",)  # take RULES, too
KERNELS = {
    "split_kv": split_kv_kernel,
    "row_local": row_local_kernel,
    "workqueue": workqueue_kernel,
    "workqueue, several items": workqueue_kernel,
    "stream_k": stream_k_kernel,
}
KERNELS_OF_PLANNING = ("split_kv", "row_local", "workqueue", "stream_k")  # their figures are stored
ARCHITECTURES = (80, 86, 89, 90, 120)
FIGURES = Path(__file__).parents[1] / "data" / "compiled.json"


@dataclass(frozen=True)
class Compiled:
    """What the compiler reports of one kernel: per thread, per program, and counts in the PTX."""

    registers: int
    shared: int
    spilled: int
    async_copies: int
    global_loads: int
    tensor_ops: int


def compile_entry(
    shape: Shape, config: TileConfig, arch: int, *, aligned: bool = True, kernel: str = "split_kv",
    attend: Any = attend_tokens,
) -> Compiled:  # fmt: skip
    """Compile one of KERNELS for compute capability `arch`, as a launch on contiguous NHD pages would.

    attend: the tile loop, see pkv.Parts.
    """
    sizes = kernel_shape(shape, config, aligned, False, arch >= 90)
    element = TRITON_TYPES[shape.dtype]
    unit = "constexpr"
    pages = Strided(element, ("i32", "i32", "i32", unit))
    rows = Strided(element, ("i32", "i32", unit))
    signature = {
        "q": rows,
        "cache": CacheArgs(pages, pages, Strided("*i32", ("i32", unit)), Strided("*i32", (unit,))),
        "result": StateArgs(rows, Strided("*fp32", ("i32", unit))),
        "partials": StateArgs(Strided("*fp32", ("i32", "i32", unit)), Strided("*fp32", ("i32", unit))),
        **{name: entry or "constexpr" for name, entry in OWN_ARGUMENTS[kernel].items()},
        "qk_scale": "fp32",
        "ATTEND": "constexpr",
        "SHAPE": "constexpr",
        **({"RULES": "constexpr"} if kernel in RULED else {}),
    }
    unspecialized = {"n_rows", "n_splits", "first_program", "n_programs"}
    constants: dict[tuple[int, ...], object] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}

    def visit(path: tuple[int, ...], entry: object, divisible: bool) -> None:
        if isinstance(entry, tuple):
            for index, part in enumerate(entry):
                visit((*path, index), part, divisible)
        elif entry == "constexpr":
            constants[path] = 1
        elif divisible and entry != "fp32":
            attributes[path] = [["tt.divisibility", 16]]

    for index, (name, entry) in enumerate(signature.items()):
        visit((index,), entry, name not in unspecialized and (aligned or name != "cache"))
    names = list(signature)
    constants |= {(names.index(name),): None for name, entry in OWN_ARGUMENTS[kernel].items() if entry is None}
    constants[(names.index("ATTEND"),)] = attend
    constants[(names.index("SHAPE"),)] = sizes
    if kernel in RULED:
        constants[(names.index("RULES"),)] = RULES
    source = ASTSource(KERNELS[kernel], signature, constants, attributes)
    several = kernel == "workqueue, several items"
    num_warps = warps_of_several(config.num_warps, sizes.BLOCK_H) if several else config.num_warps
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": num_warps})
    ptx = made.asm["ptx"]
    registers, stack = resource_usage(made.asm["cubin"])
    return Compiled(
        registers=registers,
        shared=made.metadata.shared,
        spilled=stack,
        async_copies=len(re.findall(r"cp\.async\.c[ag]", ptx)),
        global_loads=len(re.findall(r"ld\.global", ptx)),
        tensor_ops=len(re.findall(r"mma\.sync|wgmma\.mma", ptx)),
    )


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers per thread and bytes of stack and local memory (spills), by the cuobjdump that Triton brings."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def representative(key: ConfigKey) -> Shape:
    """A shape whose configuration has this key; figures depend on nothing else."""
    dtype = {2: torch.float16, 4: torch.float32}[key.itemsize]
    group = {1: 4, 8: 4, 16: 16, 32: 32}[key.block_h]
    return Shape(8 * group, 8, key.block_d, 16, dtype)


def compile_key(key: ConfigKey, arch: int, aligned: bool = True, kernel: str = "split_kv") -> Compiled:
    """Compile the configuration that planning chooses for `key` on compute capability `arch`."""
    shape = representative(key)
    config = choose_config(shape, GpuProfile("", arch, 1), key.tile, aligned)
    return compile_entry(shape, config, arch, aligned=aligned, kernel=kernel)


def main() -> None:
    """The command above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"store the figures in {FIGURES.name}")
    arguments = parser.parse_args()
    jobs = [
        (key, arch, True, kernel) for arch in ARCHITECTURES for key in every_key() for kernel in KERNELS_OF_PLANNING
    ]
    figures: dict[str, dict[str, dict[str, list[int]]]] = {}
    with ProcessPoolExecutor() as pool:
        for (key, arch, _, kernel), made in zip(jobs, pool.map(compile_key, *zip(*jobs, strict=True)), strict=True):
            print(f"sm_{arch}  {key}, {kernel}: {made}", flush=True)
            figures.setdefault(str(arch), {}).setdefault(str(key), {})[kernel] = [made.registers, made.shared]
    if arguments.write:
        text = json.dumps({"triton": triton.__version__, "figures": figures}, indent=1) + "\n"
        FIGURES.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

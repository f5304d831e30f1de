"""Launch configurations: tokens per tile, warps and pipeline stages of a program, and how many programs an SM holds.

A program always has the same form: few query heads, a tile of 16 tokens, and one warp, so that its softmax needs no
traffic between warps. Many such programs reside on an SM. The table below adds warps only where registers would not
suffice. If another tile is faster on a card, its profile says so (`pkv calibrate` finds out).

The registers and the shared memory of a configuration are known without the card, by compiling for it.
`data/compiled.json` keeps these figures (`python -m pkv.bench.fit.compiled --write`). Planning turns them into the
number of programs that reside on one SM.
"""

import functools
import json
from dataclasses import dataclass
from importlib import resources

import torch

from pkv.plans.gpu import DEFAULT_TILE, TILES, ArchLimits, GpuProfile
from pkv.plans.shape import Shape

SMALLEST_DOT = 16  # the smallest inner dimension of tl.dot on a GPU
FEWEST_HEADS = 8  # the columns of a tensor core's product
LARGEST_HEAD_DIM = 256
MOST_WARPS = 8  # 16 would halve the registers per thread, and spill
LARGEST_QUERY = 32 * 256  # elements of q that one program holds, in half of its threads' registers
WARP_THREADS = 32
REGISTER_UNIT = 256  # an SM allocates registers per warp, in units of 256
SHARED_UNIT = 128  # bytes


@dataclass(frozen=True)
class TileConfig:
    """A launch configuration: tokens per tile (a power of two >= 16), and Triton's options num_warps and num_stages."""

    tile: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class ConfigKey:
    """What a configuration depends on: bytes per element, padded query heads per program, padded head_dim, tile."""

    itemsize: int
    block_h: int
    block_d: int
    tile: int

    def __str__(self) -> str:
        return f"{self.itemsize} bytes, {self.block_h} heads, head_dim {self.block_d}, tile {self.tile}"


def every_key() -> list[ConfigKey]:
    """List every key that choose_config accepts."""
    return [
        ConfigKey(itemsize, block_h, block_d, tile)
        for (itemsize, block_h), column in TABLE.items()
        for block_d in (16, 32, 64, 128, 256)
        for tile in TILES
        if any(t == tile and block_d <= largest for largest, t in column)
    ]


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n.

    >>> next_power_of_two(66)
    128
    """
    return 1 << max(n - 1, 0).bit_length()


def block_of(size: int) -> int:
    """Pad head_dim to a size that tl.dot accepts: a power of two, at least 16.

    >>> block_of(4), block_of(80)
    (16, 128)
    """
    return max(SMALLEST_DOT, next_power_of_two(size))


def block_heads(shape: Shape) -> int:
    """Return the query heads per program, padded to a power of two >= 8; 1 in fp32, which uses no tensor cores."""
    heads = -(-shape.group // shape.head_blocks)
    return 1 if shape.dtype == torch.float32 else max(FEWEST_HEADS, next_power_of_two(heads))


def config_key(shape: Shape, tile: int) -> ConfigKey:
    """Return the key of a shape and a tile (in tokens)."""
    return ConfigKey(shape.dtype.itemsize, block_heads(shape), block_of(shape.head_dim), tile)


# (largest block_d, tile) -> (num_warps, num_stages), for each (itemsize, block_h): the fewest warps that spill no
# registers and fit shared memory on every architecture. tests/test_compiled.py compiles all of them. Tiles of 64 exist
# for few heads only: with 16 heads Triton 3.6 reads past its shared memory on an H200 (compute-sanitizer).
TABLE: dict[tuple[int, int], dict[tuple[int, int], tuple[int, int]]] = {
    (2, 8): {
        (128, 16): (1, 5), (128, 32): (1, 5), (128, 64): (4, 2),
        (256, 16): (2, 5), (256, 32): (4, 3),
    },
    (2, 16): {
        (128, 16): (2, 5), (128, 32): (2, 5),
        (256, 16): (4, 3), (256, 32): (8, 3),
    },
    (2, 32): {
        (128, 16): (4, 5), (128, 32): (4, 3),
        (256, 16): (8, 3), (256, 32): (8, 3),
    },
    (4, 1): {
        (128, 16): (1, 3), (128, 32): (2, 2), (64, 64): (4, 2), (128, 64): (8, 2),
        (256, 16): (2, 3), (256, 32): (4, 2),
    },
}  # fmt: skip


@functools.lru_cache(maxsize=1024)
def choose_config(shape: Shape, gpu: GpuProfile, tile: int, aligned: bool = True) -> TileConfig:
    """Return the configuration of a shape and tile. `gpu` has no effect yet: the table holds on every architecture."""
    key = config_key(shape, tile)
    column = TABLE[key.itemsize, key.block_h]
    largest = next((d for d, t in sorted(column) if t == tile and key.block_d <= d), None)
    if largest is None:
        raise ValueError(f"tile = {tile} does not fit registers and shared memory with {key}: take a smaller tile")
    num_warps, num_stages = column[largest, tile]
    if not aligned:
        num_warps, num_stages = unaligned(key, num_warps, num_stages)
    return TileConfig(tile, num_warps, num_stages)


def unaligned(key: ConfigKey, num_warps: int, num_stages: int) -> tuple[int, int]:
    """Return (num_warps, num_stages) for K and V that are not aligned, and so pass through registers on their way."""
    twice = min(2 * num_warps, MOST_WARPS)
    if key.itemsize == 4:
        return twice if key.block_d > 64 else num_warps, num_stages
    # Copies of 2 bytes are never asynchronous, so a deep pipeline of them would only occupy registers.
    num_stages = 1 if key.block_h * key.block_d >= LARGEST_QUERY else 2
    return twice if key.tile > DEFAULT_TILE and key.block_d > 32 else num_warps, num_stages


def choose_tile(tile: int | None, shape: Shape, gpu: GpuProfile) -> int:
    """Resolve the option `tile=` to one of TILES. None: the GPU's own tile for shapes it was measured with, else 16.

    >>> card = GpuProfile("some", 90, 132, tile=32)
    >>> [choose_tile(None, Shape(32, 8, d, 16, "float16"), card) for d in (64, 128, 256)]
    [32, 32, 16]
    """
    if tile is None:
        key = config_key(shape, gpu.tile)
        return gpu.tile if (key.itemsize, key.block_h) == (2, FEWEST_HEADS) and key.block_d <= 128 else DEFAULT_TILE
    if tile not in TILES:
        raise ValueError(f"tile = {tile!r} must be one of {', '.join(map(str, TILES))} (tokens per tile)")
    return tile


@functools.cache
def compiled_figures() -> dict[str, dict[str, dict[str, list[int]]]]:
    """Read {architecture: {key: {kernel: [registers per thread, bytes of shared memory]}}} from data/compiled.json."""
    return json.loads((resources.files("pkv") / "data" / "compiled.json").read_text(encoding="utf-8"))["figures"]


def resident_programs(registers: int, shared: int, num_warps: int, limits: ArchLimits) -> int:
    """Return how many programs fit on one SM at once, at least 1. shared: bytes per program.

    >>> from pkv.plans.gpu import ARCH_LIMITS
    >>> resident_programs(registers=194, shared=20488, num_warps=1, limits=ARCH_LIMITS[86])
    4
    """
    per_warp = -(-registers * WARP_THREADS // REGISTER_UNIT) * REGISTER_UNIT
    shared = -(-(shared + limits.shared_reserved) // SHARED_UNIT) * SHARED_UNIT
    return max(
        1,
        min(
            limits.registers_per_sm // (per_warp * num_warps),
            limits.shared_per_sm // shared,
            limits.threads_per_sm // (WARP_THREADS * num_warps),
            limits.programs_per_sm,
        ),
    )


@functools.lru_cache(maxsize=1024)
def programs_per_sm(shape: Shape, gpu: GpuProfile, tile: int, kernel: str = "split_kv") -> int:
    """Return how many programs of a kernel (split_kv, row_local, workqueue or stream_k) reside on one SM of `gpu`."""
    config = choose_config(shape, gpu, tile)
    figures = compiled_figures()
    arch = max((int(known) for known in figures if int(known) <= gpu.arch), default=min(map(int, figures)))
    registers, shared = figures[str(arch)][str(config_key(shape, tile))][kernel]
    return resident_programs(registers, shared, config.num_warps, gpu.limits)

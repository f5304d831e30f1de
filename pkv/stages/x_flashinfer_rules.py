"""FlashInfer's published rules, without FlashInfer: how it plans a decode step, and which steps it can decode.

Both of its decode kernels use one split size, in whole pages, for all rows of the step: the shortest of at least 128
tokens that makes no more items than there is room for. They differ in the room:

    cuda-core     the programs that reside on the GPU at once. As many rows x KV heads as that: nothing is split.
    tensor-core   2 programs per SM. More rows x KV heads than that: nothing is split, the longest row stays whole.

Example: 28 SMs and 8 KV heads have room for 2 * 28 // 8 = 7 items per KV head on tensor cores. Rows of 10 and 100 pages
of 16 tokens: splits of 16 pages make 1 + 7 items, too many, so splits get 17 pages and make 1 + 6. With an eighth row
nothing would be split.

The rules are those of FlashInfer 0.7 (`attention/scheduler.cuh`; for decode, 0.2.5 has the same). Lengths are counted
in pages: a row of 17 tokens in pages of 16 is as long as one of 32.
"""

import bisect
import functools
import json
from importlib import resources

import numpy as np
import numpy.typing as npt
import torch

from pkv.kernels.configs import WARP_THREADS, resident_programs
from pkv.plans.fields import Int32Array, Launch
from pkv.plans.gpu import GpuProfile
from pkv.plans.shape import Shape
from pkv.plans.spans import visible_tiles
from pkv.wording.counts import count_of, verb

KERNELS = ("tensor-core", "cuda-core")
LEAST_SPLIT = 128  # tokens; a page may be longer
TENSOR_CORE_PROGRAMS = 2  # per SM, by FlashInfer's rule; its choice of shared memory aims at this number
TENSOR_CORE_GROUP = 4  # serving engines use tensor cores from this many query heads per KV head
DTYPES = (torch.float16, torch.bfloat16)
MOST_SLOTS = 2**32  # tokens of all used pages
HEAD_DIMS = (64, 128, 256)  # the head_dims that FlashInfer itself tests
CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8, 16)  # compiled one by one; the tensor-core kernel takes any
LEAST_THREADS = 128  # per program of the cuda-core kernel
TILES_IN_FLIGHT = 2  # tiles of K, and as many of V, that the cuda-core kernel holds in shared memory
ALIGNMENT = 16  # bytes: both kernels read and write vectors


def default_kernel(shape: Shape) -> str:
    """Choose tensor cores if enough query heads share a KV head; FlashInfer leaves the choice to its caller."""
    return "tensor-core" if shape.group >= TENSOR_CORE_GROUP else "cuda-core"


def why_not(shape: Shape, kernel: str | None = None) -> str | None:
    """Say why FlashInfer cannot decode this shape with `kernel` (None: default_kernel's); None if it can."""
    kernel = default_kernel(shape) if kernel is None else kernel
    if kernel not in KERNELS:
        return f"it has no kernel {kernel!r}, only {' and '.join(KERNELS)}"
    if shape.dtype not in DTYPES or shape.kv_dtype != shape.dtype:
        return f"its kernels take float16 or bfloat16 throughout, not {_words(shape.dtype)} / {_words(shape.kv_dtype)}"
    if shape.head_dim not in HEAD_DIMS:
        return f"its kernels take a head_dim of {_listed(HEAD_DIMS)}, not {shape.head_dim}"
    if kernel == "cuda-core" and shape.group not in CUDA_CORE_GROUPS:
        return f"its cuda-core kernel takes {_listed(CUDA_CORE_GROUPS)} query heads per KV head, not {shape.group}"
    return None


def fault_of_lengths(lengths: Int32Array, shape: Shape) -> str | None:
    """Say why FlashInfer cannot decode rows of these lengths at once; None if it can."""
    n_slots = int((-(-lengths.astype(np.int64) // shape.page_size)).sum()) * shape.page_size
    if n_slots >= MOST_SLOTS:
        rows = f"{count_of(len(lengths), 'row')} {verb(len(lengths), 'use')}"
        return f"lengths: {rows} pages of {n_slots} tokens in all, and FlashInfer counts in 32 bits"
    return None


def resident(shape: Shape, gpu: GpuProfile, kernel: str) -> int:
    """Return the programs per SM that FlashInfer counts on.

    For the cuda-core kernel FlashInfer asks the driver. Here the number is computed from the kernel's shared memory and
    registers, as nvcc compiles it (data/flashinfer.json).

    >>> resident(Shape(32, 8, 128, 16, "float16"), GpuProfile("rtx3060", 86, 28), "cuda-core")
    8
    """
    if kernel == "tensor-core":
        return TENSOR_CORE_PROGRAMS
    itemsize, group, head_dim = shape.dtype.itemsize, shape.group, shape.head_dim
    lanes = head_dim // max(16 // itemsize, head_dim // WARP_THREADS)  # threads that share a token's K
    n_threads = max(LEAST_THREADS, lanes * group)
    n_tokens = n_threads // (lanes * group) * group * (4 if group == 1 else 1)  # in a tile
    states = 2 * n_threads // (lanes * group) * group * 4
    offsets = n_threads * (4 if group == 1 else 1) * 8
    shared = 2 * TILES_IN_FLIGHT * n_tokens * head_dim * itemsize + max(offsets, states)
    registers = _registers()
    arch = max((int(known) for known in registers if int(known) <= gpu.arch), default=min(map(int, registers)))
    used = registers[str(arch)][_words(shape.dtype)][str(head_dim)][str(group)]
    return resident_programs(used, shared, -(-n_threads // WARP_THREADS), gpu.limits)


def query_tile(shape: Shape) -> int:
    """Return the query heads that one program serves on tensor cores."""
    if shape.group <= 16:
        return 16
    return 128 if shape.group > 64 and shape.head_dim < 256 else 64


def query_tiles(shape: Shape) -> int:
    """Return the programs that share one KV head's group on tensor cores."""
    return -(-shape.group // query_tile(shape))


def pages_per_split(lengths: Int32Array, shape: Shape, gpu: GpuProfile, kernel: str) -> int | None:
    """Return the pages in every split of every row; None if no row is split.

    >>> pages = np.array([10, 100])
    >>> pages_per_split(16 * pages, Shape(32, 8, 128, 16, "float16"), GpuProfile("rtx3060", 86, 28), "tensor-core")
    17
    """
    n_pages = -(-lengths.astype(np.int64) // shape.page_size)
    if shape.features.window is not None and kernel == "tensor-core":
        n_pages = np.minimum(n_pages, -(-(shape.features.window - 1 + query_tile(shape)) // shape.page_size))
    n_places = gpu.n_sms * resident(shape, gpu, kernel)
    room = n_places // shape.n_kv_heads
    if kernel == "cuda-core":
        if len(lengths) * shape.n_kv_heads >= n_places:
            return None
    else:
        room //= query_tiles(shape)
        n_pages = np.maximum(n_pages, 1)  # only here does an empty row take room
    longest = int(n_pages.max(initial=1))
    least = max(LEAST_SPLIT // shape.page_size, 1)
    # Fewer items the longer the split; where even whole rows are too many, the search ends at the longest row.
    sizes = range(least, longest)
    size = least + bisect.bisect_left(sizes, True, key=lambda size: n_items(n_pages, size) <= room)
    return size if size < longest else None


def n_items(n_pages: npt.NDArray[np.int64], size: int) -> int:
    """Return how many items rows of n_pages [n_rows] make in splits of `size` pages."""
    return int((-(-n_pages // size)).sum())


def split_items(lengths: Int32Array, shape: Shape, gpu: GpuProfile, kernel: str) -> Int32Array:
    """Return FlashInfer's items, int32 [n_items, 3]: every row in splits of the same size, at least one item per row.

    >>> gpu = GpuProfile("rtx3060", 86, 28)
    >>> split_items(np.array([5, 300, 0]), Shape(32, 8, 128, 16, "float16"), gpu, "tensor-core").tolist()
    [[0, 0, 5], [1, 0, 128], [1, 128, 256], [1, 256, 300], [2, 0, 0]]
    """
    skipped = visible_tiles(lengths, shape.page_size, shape.features)[0] * shape.page_size
    lengths = lengths.astype(np.int64) - skipped  # FlashInfer is not given pages before the window
    size = pages_per_split(lengths, shape, gpu, kernel)
    n_tokens = max(int(lengths.max(initial=1)), 1) if size is None else size * shape.page_size
    row_items = np.maximum(-(-lengths // n_tokens), 1)
    rows = np.repeat(np.arange(len(lengths)), row_items)
    first = np.cumsum(row_items) - row_items
    begins = (np.arange(len(rows)) - first[rows]) * n_tokens
    ends = np.minimum(begins + n_tokens, lengths[rows])
    return np.stack([rows, begins + skipped[rows], ends + skipped[rows]], axis=1).astype(np.int32)


def launches_of(row_items: npt.NDArray[np.int64]) -> tuple[Launch, ...]:
    """Make one decode launch, and a merge launch if a row is split."""
    decode = Launch("decode", tuple(range(len(row_items))), 0, int(row_items.sum()))
    merge = Launch("merge", tuple(np.flatnonzero(row_items > 1).tolist()), n_splits=int(row_items.max(initial=0)))
    return tuple(launch for launch in (decode, merge) if launch.rows)


def fits(x: torch.Tensor) -> bool:
    """True if FlashInfer can address x: its last axis is contiguous, and every vector is aligned."""
    steps = [stride * x.itemsize for stride in x.stride()[:-1]]
    return x.stride(-1) == 1 and x.data_ptr() % ALIGNMENT == 0 and all(step % ALIGNMENT == 0 for step in steps)


def unfit(k_pages: torch.Tensor, v_pages: torch.Tensor, kernel: str) -> str | None:
    """Say why FlashInfer cannot read these pages as they lie in memory; None if it can. Pages are never copied."""
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        strides = list(pages.stride())
        if not fits(pages):
            return (
                f"{name} with strides {strides} cannot be read along head_dim in aligned vectors of {ALIGNMENT} bytes"
            )
        if max(strides) >= 2**32:
            return f"{name} has strides {strides}, and FlashInfer counts elements in 32 bits"
    if kernel == "cuda-core" and k_pages.stride() != v_pages.stride():
        both = f"{list(k_pages.stride())} and {list(v_pages.stride())}"
        return f"its cuda-core kernel takes k_pages and v_pages of equal strides, not {both}"
    return None


@functools.cache
def _registers() -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    """Read the cuda-core kernel's {architecture: {dtype: {head_dim: {group: registers per thread}}}}."""
    figures = json.loads((resources.files("pkv") / "data" / "flashinfer.json").read_text(encoding="utf-8"))
    registers: dict[str, dict[str, dict[str, dict[str, int]]]] = figures["registers"]
    return registers


def _words(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"

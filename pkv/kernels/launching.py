"""Kernel arguments made from tensors: the only file that reads strides, pointers and alignment for kernels."""

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pkv._triton import INTERPRETED, Signature
from pkv.cache.paged import PagedKVCache
from pkv.kernels.configs import TileConfig, block_heads, block_of, choose_config
from pkv.kernels.masks import NO_MASKS, Masks
from pkv.kernels.merging import launch_merge, merge_by_part
from pkv.kernels.parts import Parts
from pkv.kernels.tile import LOG2_E, CacheArgs, KernelShape, StateArgs, Strided, attend_tokens
from pkv.kernels.uploads import uploaded
from pkv.plans.facts import Merging
from pkv.plans.features import NO_VALUES, PLAIN, Features, Values
from pkv.plans.fields import Launch
from pkv.plans.plan import Plan
from pkv.plans.shape import Shape
from pkv.runtime.memory import Memory

SIZES = Memory()  # for each plan: {(are all rows aligned, device): (sizes of its kernels, warps)}
CACHES = Memory()  # for each cache: {"made": its KernelCache}
TensorKind = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, int]  # shape, strides, ..., alignment
COPY_BYTES = 16  # an asynchronous copy (cp.async) moves 16 bytes from a multiple of 16


def strided(tensor: torch.Tensor) -> Strided:
    """Return a tensor with its strides, as kernels take it."""
    return Strided(tensor, tensor.stride())


def stride_kinds(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Reduce strides to what Triton specialises on: whether each is 1, a multiple of 16, or beyond 32 bits.

    >>> stride_kinds((1, 48, 49, 2**35))
    (1, 16, 0, 48)
    """
    return tuple([s if s == 1 else 16 * (s % 16 == 0) + 32 * (not -(2**31) <= s < 2**31) for s in strides])


def is_aligned(pages: torch.Tensor) -> bool:
    """True if every (page, token, head) vector of K or V is contiguous and starts at a multiple of 16 bytes."""
    *row_strides, dim_stride = pages.stride()
    return (
        dim_stride == 1
        and pages.data_ptr() % COPY_BYTES == 0
        and all(stride * pages.itemsize % COPY_BYTES == 0 for stride in row_strides)
    )


def kernel_shape(shape: Shape, config: TileConfig, aligned: bool, interpreted: bool, early_merge: bool) -> KernelShape:
    """Return the compile-time sizes of a launch."""
    return KernelShape(
        GROUP=shape.group,
        N_KV_HEADS=shape.n_kv_heads,
        HEAD_DIM=shape.head_dim,
        PAGE_SIZE=shape.page_size,
        HEAD_BLOCKS=shape.head_blocks,
        BLOCK_H=block_heads(shape),
        BLOCK_D=block_of(shape.head_dim),
        BLOCK_N=config.tile,
        STAGES=config.num_stages,
        ALIGNED=aligned,
        WHOLE_TILES=shape.page_size % config.tile == 0,
        EARLY_MERGE=early_merge,
        INTERPRETED=interpreted,
    )


@functools.cache
def merges_early(device: torch.device) -> bool:
    """True if a merge can be launched before its decode kernel ends (programmatic dependent launch, from sm_90 on)."""
    return not INTERPRETED and torch.cuda.get_device_capability(device)[0] >= 9


class KernelArgs:
    """All arguments with which the entry kernels and the merge of one step are launched.

    n_partials: the partial states that there is room for. attend: the tile loop, from `parts` or pkv's own. values:
    what the plan's features need. signature: what Triton's choice of a compiled kernel depends on, besides the kernel
    and its constants.
    """

    def __init__(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        plan: Plan,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor,
        parts: Parts | None = None,
        values: Values = NO_VALUES,
    ) -> None:
        self.plan, self.device, self.parts = plan, q.device, parts
        part = None if parts is None else parts.attend_tokens
        self.attend = attend_tokens if part is None else part
        known = kernel_cache(cache)
        self.masks = masks_of(plan.shape.features, values)
        self.cache = known.args_with(self.masks)
        self.q = strided(q)
        self.result = StateArgs(strided(out), strided(lse))
        self.qk_scale = scale * LOG2_E
        sizes_of = SIZES.of(plan)
        if (known.aligned, q.device) not in sizes_of:
            config = choose_config(plan.shape, plan.gpu, plan.tile, known.aligned)
            sizes = kernel_shape(plan.shape, config, known.aligned, INTERPRETED, merges_early(q.device))
            sizes_of[known.aligned, q.device] = sizes, config.num_warps
        self.shape, self.num_warps = sizes_of[known.aligned, q.device]
        self.n_partials = states_of(plan)
        self.partials = self.room_for_partials(q) if self.n_partials else self.result
        if self.n_partials and INTERPRETED and parts is not None and parts.merge is not None:
            for tensor in (out, lse, self.partials.out.ptr, self.partials.lse.ptr):
                tensor.fill_(torch.nan)  # a row that the part leaves out must not look right by chance
        alignment = q.data_ptr() % COPY_BYTES, out.data_ptr() % COPY_BYTES
        dtypes = q.dtype, out.dtype, lse.dtype, self.n_partials > 0
        self.signature = Signature((
            q.device.index, part, dtypes, stride_kinds(self.q.strides), stride_kinds(self.result.out.strides),
            alignment, known.signature, signature_of(self.masks),
        ))  # fmt: skip

    def room_for_partials(self, q: torch.Tensor) -> StateArgs:
        """Allocate n_partials states of q's heads, fp32: out [n_partials, n_q_heads, head_dim] and their lse."""
        n_q_heads, head_dim = q.shape[1:]
        empty = fp32_on(q.device)
        return StateArgs(
            Strided(empty.new_empty((self.n_partials, n_q_heads, head_dim)), (n_q_heads * head_dim, head_dim, 1)),
            Strided(empty.new_empty((self.n_partials, n_q_heads)), (n_q_heads, 1)),
        )

    def with_tensors(self, q: torch.Tensor, cache: "KernelCache", out: torch.Tensor, lse: torch.Tensor) -> "KernelArgs":
        """Return a copy for tensors of the same sizes, strides, types and alignment, with partials of its own."""
        partials = self.room_for_partials(q) if self.n_partials else None
        return self._holding(q, cache.args_with(self.masks), out, lse, partials)

    def without_tensors(self) -> "KernelArgs":
        """Return a copy to keep, which holds no tensor."""
        return self._holding(None, None, None, None, None)

    def _holding(self, q: Any, cache: Any, out: Any, lse: Any, partials: StateArgs | None) -> "KernelArgs":
        """Return a copy that holds these; partials None: the result's memory, as where nothing is merged."""
        result = StateArgs(Strided(out, self.result.out.strides), Strided(lse, self.result.lse.strides))
        other = object.__new__(KernelArgs)
        other.__dict__ = {
            **self.__dict__,
            "q": Strided(q, self.q.strides),
            "cache": cache,
            "result": result,
            "partials": result if partials is None else partials,
        }
        return other

    @property
    def offsets_of_rows(self) -> torch.Tensor:
        """The plan's partial_offsets, int32 [n_rows + 1], on the device."""
        return uploaded(self.plan, self.device).arrays["partial_offsets"]

    def merge(self, step: Launch, partial_offsets: torch.Tensor | None, row_ids: torch.Tensor | None) -> None:
        """Launch the plan's merge `step`; partial_offsets, row_ids: see launch_merge.

        A user's merge runs once, in place of the last of these steps: then all states are there.
        """
        if self.parts is not None and self.parts.merge is not None:
            if step is [launch for launch in self.plan.launches if launch.kernel == "merge"][-1]:
                merge_by_part(self.parts.merge, self.partials, self.result, self.offsets_of_rows)
            return
        launch_merge(
            self.partials, self.result, partial_offsets, row_ids, len(step.rows), step.n_splits, self.shape,
            self.signature,
        )  # fmt: skip


def launch_by(launcher: Callable[[Plan, int], Callable[[KernelArgs], None]]) -> Callable[..., None]:
    """Return a stage's launch(), which runs a plan once by the stage's launcher()."""

    def launch(
        q: torch.Tensor, cache: PagedKVCache, plan: Plan, scale: float, out: torch.Tensor, lse: torch.Tensor,
        parts: Parts | None = None, values: Values = NO_VALUES,
    ) -> None:  # fmt: skip
        """Run the plan once; see launcher."""
        launcher(plan, cache.capacity)(KernelArgs(q, cache, plan, scale, out, lse, parts, values))

    return launch


@functools.cache
def fp32_on(device: torch.device) -> torch.Tensor:
    """Return an empty fp32 tensor on `device`: its new_empty() takes half the time of torch.empty()."""
    return torch.empty(0, dtype=torch.float32, device=device)


def states_of(plan: Plan) -> int:
    """Return the partial states that a launch of the plan needs room for: one for each item, or two for each program.

    A plan without a merge needs none.
    """
    if plan.merging is Merging.BY_CUT:
        return 2 * plan.n_programs
    return plan.n_items if plan.needs_partials else 0


def masks_of(features: Features, values: Values) -> Masks:
    """Return what kernels need of the features; NO_MASKS if all are off."""
    if features == PLAIN:
        return NO_MASKS
    return Masks(features.window, None if values.soft_cap is None else values.soft_cap * LOG2_E)


def signature_of(masks: Masks) -> tuple[Any, ...] | None:
    """Return what Triton specialises on: which masks are there, and what kind of number the window is."""
    if masks is NO_MASKS:
        return None
    return None if masks.window is None else stride_kinds((masks.window,)), masks.soft_cap is None


@dataclass(frozen=True, eq=False)
class CacheKind:
    """The sizes, strides, type, device and alignment of a cache's tensors, by name. Equal ones are one object."""

    tensors: dict[str, TensorKind]


_kinds: "weakref.WeakValueDictionary[tuple[Any, ...], CacheKind]" = weakref.WeakValueDictionary()


class KernelCache(NamedTuple):
    """A cache as kernels get it: made once, as long as its tensors stay where they are.

    addresses: of its tensors. aligned: see is_aligned. signature: its part of KernelArgs.signature. memory: the bytes
    that its tensors span, (begin, end) each.
    """

    addresses: tuple[int, ...]
    args: CacheArgs
    aligned: bool
    signature: tuple[Any, ...]
    kind: CacheKind
    memory: tuple[tuple[int, int], ...]

    def args_with(self, masks: Masks) -> CacheArgs:
        """Return the arguments with these masks."""
        return self.args if masks is NO_MASKS else self.args._replace(masks=masks)


TENSORS_OF_CACHE = ("k_pages", "v_pages", "block_table", "lengths")


def kind_of(x: torch.Tensor) -> TensorKind | None:
    """Return all that checks and kernel arguments depend on; None for a tensor that is not plain memory.

    RuntimeError for a tensor that has no address.
    """
    if type(x) is not torch.Tensor or x.layout != torch.strided or x.is_neg():
        return None
    return _kind(x)


def _kind(x: torch.Tensor) -> TensorKind:
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % COPY_BYTES


def tensors_of_cache(cache: PagedKVCache) -> tuple[torch.Tensor, ...]:
    """Return all tensors of a cache that kernels read; `out` must not overlap them."""
    return cache.k_pages, cache.v_pages, cache.block_table, cache.lengths


def addresses_of_cache(cache: PagedKVCache) -> tuple[int, ...]:
    """Return the addresses of those tensors. A cache keeps its tensors, but torch can give a tensor other memory."""
    return tuple([tensor.data_ptr() for tensor in tensors_of_cache(cache)])


def kernel_cache(cache: PagedKVCache) -> KernelCache:
    """Return the cache as kernels get it."""
    addresses = addresses_of_cache(cache)
    known = CACHES.of(cache)
    found: KernelCache | None = known.get("made")
    if found is not None and found.addresses == addresses:
        return found
    tensors = tensors_of_cache(cache)
    k, v, table, lengths = map(strided, (cache.k_nhd, cache.v_nhd, cache.block_table, cache.lengths))
    strides = tuple(stride_kinds(side.strides) for side in (k, v, table, lengths))
    alignment = tuple(address % COPY_BYTES for address in addresses)
    kinds = tuple(map(_kind, tensors))
    kind = _kinds.setdefault((cache.layout, *kinds), CacheKind(dict(zip(TENSORS_OF_CACHE, kinds, strict=True))))
    known["made"] = made = KernelCache(
        addresses,
        CacheArgs(k, v, table, lengths),
        is_aligned(k.ptr) and is_aligned(v.ptr),
        (cache.dtype, strides, alignment),
        kind,
        tuple(map(address_range, tensors)),
    )
    return made


def overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """True if two half-open ranges (begin, end) overlap."""
    return a[0] < b[1] and b[0] < a[1]


def address_range(x: torch.Tensor) -> tuple[int, int]:
    """Return the addresses (begin, end) of a tensor's memory in bytes; (0, 0) if it has no elements."""
    begin, size = x.data_ptr(), x.nbytes
    if not size:
        return 0, 0
    if x.is_contiguous():
        return begin, begin + size
    return begin, begin + (sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1) * x.itemsize

"""Kernel arguments made from tensors: the only file that reads strides, pointers and alignment for kernels."""

import functools
from typing import Any

import torch

from pkv._triton import INTERPRETED
from pkv.cache.paged import PagedKVCache
from pkv.kernels.configs import TileConfig, block_heads, block_of, choose_config
from pkv.kernels.merging import launch_merge, merge_by_part
from pkv.kernels.parts import Parts
from pkv.kernels.tile import LOG2_E, CacheArgs, KernelShape, StateArgs, Strided, attend_tokens
from pkv.kernels.uploads import uploaded
from pkv.plans.fields import Launch
from pkv.plans.plan import Plan
from pkv.plans.shape import Shape
from pkv.runtime.memory import Memory

SIZES = Memory()  # for each plan: {(are all rows aligned, device): (sizes of its kernels, warps)}
ARGUMENTS = Memory()  # for each cache: {"made": (the addresses of its tensors then, its arguments)}
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

    n_partials: the partial states that there is room for; by default one for each item if the plan has a merge, else
    none. attend: the tile loop, from `parts` or pkv's own. signature: what Triton's choice of a compiled kernel depends
    on, besides the kernel and its constants.
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
        n_partials: int | None = None,
    ) -> None:
        self.plan, self.device, self.parts = plan, q.device, parts
        part = None if parts is None else parts.attend_tokens
        self.attend = attend_tokens if part is None else part
        self.cache, aligned, cache_signature = cache_args(cache)
        self.q = strided(q)
        self.result = StateArgs(strided(out), strided(lse))
        self.qk_scale = scale * LOG2_E
        sizes_of = SIZES.of(plan)
        if (aligned, q.device) not in sizes_of:
            config = choose_config(plan.shape, plan.gpu, plan.tile, aligned)
            sizes = kernel_shape(plan.shape, config, aligned, INTERPRETED, merges_early(q.device))
            sizes_of[aligned, q.device] = sizes, config.num_warps
        self.shape, num_warps = sizes_of[aligned, q.device]
        self.options = {"num_warps": num_warps}
        if n_partials is None:
            n_partials = plan.n_items if plan.needs_partials else 0
        self.n_partials = n_partials
        self.partials = self.room_for_partials(q) if n_partials else self.result
        if n_partials and INTERPRETED and parts is not None and parts.merge is not None:
            for tensor in (out, lse, self.partials.out.ptr, self.partials.lse.ptr):
                tensor.fill_(torch.nan)  # a row that the part leaves out must not look right by chance
        alignment = q.data_ptr() % COPY_BYTES, out.data_ptr() % COPY_BYTES
        dtypes = q.dtype, out.dtype, lse.dtype, n_partials > 0
        self.signature = (
            q.device.index, part, dtypes, stride_kinds(self.q.strides), stride_kinds(self.result.out.strides),
            alignment, cache_signature,
        )  # fmt: skip

    def room_for_partials(self, q: torch.Tensor) -> StateArgs:
        """Allocate n_partials states of q's heads, fp32: out [n_partials, n_q_heads, head_dim] and their lse."""
        n_q_heads, head_dim = q.shape[1:]
        partial_out = torch.empty(self.n_partials, n_q_heads, head_dim, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(self.n_partials, n_q_heads, dtype=torch.float32, device=q.device)
        return StateArgs(strided(partial_out), strided(partial_lse))

    def with_tensors(self, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> "KernelArgs":
        """Return a copy for tensors of the same sizes, strides, types and alignment, with partials of its own."""
        again = self._holding(q, out, lse)
        if self.n_partials:
            again.partials = self.room_for_partials(q)
        return again

    def without_tensors(self) -> "KernelArgs":
        """Return a copy to keep: it holds no memory but the cache's."""
        return self._holding(None, None, None)

    def _holding(self, q: torch.Tensor | None, out: torch.Tensor | None, lse: torch.Tensor | None) -> "KernelArgs":
        """Return a copy that holds these tensors, without partials."""
        other = object.__new__(KernelArgs)
        other.__dict__.update(self.__dict__)
        other.q = Strided(q, self.q.strides)
        other.result = StateArgs(Strided(out, self.result.out.strides), Strided(lse, self.result.lse.strides))
        other.partials = other.result
        return other

    def merge(self, step: Launch, partial_offsets: torch.Tensor | None, row_ids: torch.Tensor | None) -> None:
        """Launch the plan's merge `step`; partial_offsets, row_ids: see launch_merge.

        A user's merge runs once, in place of the last of these steps: then all states are there.
        """
        if self.parts is not None and self.parts.merge is not None:
            if step is [launch for launch in self.plan.launches if launch.kernel == "merge"][-1]:
                merge_by_part(self.parts.merge, self.partials, self.result, self.partial_offsets)
            return
        launch_merge(
            self.partials, self.result, partial_offsets, row_ids, len(step.rows), step.n_splits, self.shape,
            self.signature,
        )  # fmt: skip

    @property
    def partial_offsets(self) -> torch.Tensor:
        """The plan's partial_offsets int32 [n_rows + 1], on the device."""
        return uploaded(self.plan, "partial_offsets", self.device)


def tensors_of_cache(cache: PagedKVCache) -> tuple[torch.Tensor, ...]:
    """Return all tensors of a cache that kernels read; `out` must not overlap them."""
    return cache.k_pages, cache.v_pages, cache.block_table, cache.lengths


def addresses_of_cache(cache: PagedKVCache) -> tuple[int, ...]:
    """Return the addresses of those tensors. A cache keeps its tensors, but torch can give a tensor other memory."""
    return tuple([tensor.data_ptr() for tensor in tensors_of_cache(cache)])


def cache_args(cache: PagedKVCache) -> tuple[CacheArgs, bool, tuple[Any, ...]]:
    """Return (arguments, are all rows aligned, part of the signature) of a cache; made once while its memory stays."""
    places = addresses_of_cache(cache)
    known = ARGUMENTS.of(cache)
    if (found := known.get("made")) is not None and found[0] == places:
        made: tuple[CacheArgs, bool, tuple[Any, ...]] = found[1]
        return made
    k, v, table, lengths = map(strided, (cache.k_nhd, cache.v_nhd, cache.block_table, cache.lengths))
    aligned = is_aligned(k.ptr) and is_aligned(v.ptr)
    strides = tuple(stride_kinds(side.strides) for side in (k, v, table, lengths))
    alignment = tuple(place % COPY_BYTES for place in places)
    made = CacheArgs(k, v, table, lengths), aligned, (cache.dtype, strides, alignment)
    known["made"] = places, made  # at once: another thread may come between two assignments
    return made

"""From tensors to kernel arguments: the only place that reads strides, pointers and alignment."""

import functools

import torch

from pkv._triton import INTERPRETED
from pkv.cache import PagedKVCache
from pkv.configs import TileConfig, block_heads, block_of, choose_config
from pkv.plans import Plan
from pkv.shapes import Shape
from pkv.tile import LOG2_E, CacheArgs, KernelShape, StateArgs, Strided

COPY_BYTES = 16  # an asynchronous copy (cp.async) moves 16 bytes from a multiple of 16


def strided(tensor: torch.Tensor) -> Strided:
    """A tensor as a kernel takes it."""
    return Strided(tensor, tensor.stride())


def is_aligned(pages: torch.Tensor) -> bool:
    """True where every (page, token, head) row of K or V starts at a multiple of 16 bytes and is contiguous."""
    *row_strides, dim_stride = pages.stride()
    return (
        dim_stride == 1
        and pages.data_ptr() % COPY_BYTES == 0
        and all(stride * pages.itemsize % COPY_BYTES == 0 for stride in row_strides)
    )


@functools.lru_cache(maxsize=256)
def kernel_shape(shape: Shape, config: TileConfig, aligned: bool, widen: bool) -> KernelShape:
    """The compile-time sizes of a launch."""
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
        WIDEN=widen,
    )


class KernelArgs:
    """Everything the entry kernels and the merge of one step are launched with."""

    def __init__(
        self, q: torch.Tensor, cache: PagedKVCache, plan: Plan, scale: float, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        k, v = cache.k_nhd, cache.v_nhd
        self.q = strided(q)
        self.cache = CacheArgs(strided(k), strided(v), strided(cache.block_table), strided(cache.lengths))
        self.result = StateArgs(strided(out), strided(lse))
        self.qk_scale = scale * LOG2_E
        aligned = is_aligned(k) and is_aligned(v)
        config = choose_config(plan.shape, plan.gpu, plan.tile, aligned)
        self.shape = kernel_shape(plan.shape, config, aligned, INTERPRETED)
        self.options = {"num_warps": config.num_warps}
        self.partial_offsets = plan.tensor("partial_offsets", q.device)
        self.partials = self.result
        if plan.needs_partials:
            n_q_heads, head_dim = q.shape[1:]
            partial_out = torch.empty(plan.n_items, n_q_heads, head_dim, dtype=torch.float32, device=q.device)
            partial_lse = torch.empty(plan.n_items, n_q_heads, dtype=torch.float32, device=q.device)
            self.partials = StateArgs(strided(partial_out), strided(partial_lse))

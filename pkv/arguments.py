"""Checks of q, cache, out, scale and plan, each made once per call and before any launch.

Each error names the argument, the row where there is one, and what to do.
"""

import math
import numbers

import numpy as np
import torch

from pkv.cache.paged import PagedKVCache
from pkv.kernels.configs import LARGEST_HEAD_DIM
from pkv.kernels.launching import TENSORS_OF_CACHE, address_range, overlap
from pkv.plans.features import PLAIN, Features
from pkv.plans.fields import int_lengths
from pkv.plans.plan import Plan
from pkv.plans.shape import Shape
from pkv.runtime.tracers import refuse_tracers
from pkv.wording.counts import count_of

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_PAGE = 2**30  # tokens
LARGEST_SCALE = 1e38  # multiplied by log2(e) it must still fit fp32


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """Return the scale as a float: None means 1 / sqrt(head_dim), while 0.0 is a scale like any other."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real) or not abs(scale) <= LARGEST_SCALE:
        limits = f"a finite number up to {LARGEST_SCALE:.0e}"
        raise ValueError(f"scale = {scale!r} must be {limits} (None = 1 / sqrt(head_dim))")
    return float(scale)


def check_kernel_shape(shape: Shape) -> None:
    """Raise for a shape that the kernels cannot decode, though stage reference can."""
    if shape.head_dim > LARGEST_HEAD_DIM:
        raise ValueError(
            f"head_dim = {shape.head_dim} is above {LARGEST_HEAD_DIM}, the most the kernels take; use stage='reference'"
        )
    if shape.page_size > LARGEST_PAGE:
        raise ValueError(f"page_size = {shape.page_size} is above {LARGEST_PAGE}, the most the kernels take")
    if shape.dtype not in KERNEL_DTYPES:
        raise TypeError(f"dtype {shape.dtype} has no kernel (float16, bfloat16, float32 have); use stage='reference'")


def check_arrays(q: torch.Tensor, cache: PagedKVCache, out: torch.Tensor | None) -> None:
    """Raise unless q, cache and out fit each other in type, rank, size, dtype and device."""
    if not isinstance(cache, PagedKVCache):
        raise TypeError(f"cache must be a pkv.PagedKVCache, got {type(cache).__name__}")
    refuse_tracers("decoding", q=q, out=out, k_pages=cache.k_pages, v_pages=cache.v_pages, lengths=cache.lengths)
    if not isinstance(q, torch.Tensor) or q.ndim != 3:
        found = list(q.shape) if isinstance(q, torch.Tensor) else type(q).__name__
        raise ValueError(
            f"q must be a tensor [n_rows, n_q_heads, head_dim], got {found}; one decode step has one token per row"
        )
    n_rows, n_q_heads, head_dim = q.shape
    if n_rows != cache.n_rows:
        raise ValueError(
            f"q has {count_of(n_rows, 'row')}, the cache {cache.n_rows}: one query token per row of the cache"
        )
    if head_dim != cache.head_dim:
        raise ValueError(f"q has head_dim {head_dim}, the cache {cache.head_dim}")
    if n_q_heads == 0 or n_q_heads % cache.n_kv_heads:
        raise ValueError(
            f"q has {count_of(n_q_heads, 'query head')}, not a multiple of the cache's "
            f"{count_of(cache.n_kv_heads, 'KV head')}"
        )
    if q.dtype != cache.dtype:
        raise TypeError(f"q is {q.dtype}, the cache {cache.dtype}: convert one, e.g. q.to({cache.dtype})")
    if q.device != cache.device:
        raise ValueError(
            f"q lies on {q.device}, the cache on {cache.device}: move one, e.g. q.to({str(cache.device)!r})"
        )
    if q.device.type not in ("cpu", "cuda"):
        raise ValueError(f"q lies on {q.device}: decoding runs on a CUDA GPU, or on the CPU")
    if out is not None:
        if not isinstance(out, torch.Tensor):
            raise TypeError(f"out must be a tensor like q, got {type(out).__name__}")
        if out.shape != q.shape or out.dtype != q.dtype or out.device != q.device:
            raise ValueError(
                f"out is {list(out.shape)} {out.dtype} on {out.device}, "
                f"must be like q: {list(q.shape)} {q.dtype} on {q.device}"
            )
        check_writable(out, cache)


def check_writable(out: torch.Tensor, cache: PagedKVCache) -> None:
    """Raise unless `out` is plain memory of its own, whose elements overlap neither each other nor the cache."""
    if out.requires_grad or out.is_neg():
        kind = "requires grad" if out.requires_grad else "is a lazily negated view"
        raise ValueError(
            f"out {kind}, but kernels write its memory directly: pass a plain tensor, e.g. torch.empty_like(q)"
        )
    reach = 0
    axes = () if out.is_contiguous() else zip(out.shape, out.stride(), strict=True)
    for size, stride in sorted(axes, key=lambda axis: axis[1]):
        if size > 1 and stride <= reach:
            raise ValueError(
                "out has elements that share memory, as in an expanded tensor: pass a tensor with memory of its own, "
                "e.g. torch.empty_like(q)"
            )
        reach += (size - 1) * stride
    mine = address_range(out)
    for name in TENSORS_OF_CACHE:
        if overlap(mine, address_range(getattr(cache, name))):
            raise ValueError(
                f"out overlaps the memory of cache.{name}: pass a tensor with memory of its own, "
                "e.g. torch.empty_like(q)"
            )


def may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if the address ranges of two tensors on one device overlap. Interleaved views count as overlapping."""
    return overlap(address_range(a), address_range(b))


def check_plan(q: torch.Tensor, cache: PagedKVCache, plan: Plan, check: bool, features: Features = PLAIN) -> None:
    """Raise unless the plan is of these sizes and features and, as far as the host can tell, of these lengths."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a pkv.Plan, got {type(plan).__name__}")
    shape = Shape.of(q, cache, plan.shape.features)
    if plan.shape.features != features:
        raise ValueError(
            f"plan was made with {_listed(plan.shape.features)}, but the call has {_listed(features)}: pass the same "
            "to both"
        )
    if plan.shape != shape:
        mine, theirs = plan.shape.to_dict(), shape.to_dict()
        differing = [f"{name} {mine[name]} against {theirs[name]}" for name in mine if mine[name] != theirs[name]]
        raise ValueError(
            f"plan was made for another shape than q and cache have ({', '.join(differing)}): "
            "make a new plan for pkv.Shape.of(q, cache)"
        )
    if plan.n_rows != cache.n_rows:
        raise ValueError(f"plan has {count_of(plan.n_rows, 'row')}, the cache {cache.n_rows}: make a new plan")
    if plan.dynamic and plan.least_bound >= cache.capacity:
        return
    lengths = cache.host_lengths
    if lengths is None and check:
        lengths = int_lengths(cache.lengths)
    if lengths is None:
        return
    wrong = np.flatnonzero(lengths > plan.lengths if plan.dynamic else lengths != plan.lengths)
    if len(wrong):
        row = wrong[0]
        raise ValueError(
            f"plan is stale or of another cache: row {row} has {count_of(lengths[row], 'token')}, "
            + (
                f"it was planned for at most {plan.lengths[row]}: plan for more tokens"
                if plan.dynamic
                else f"it was planned for {plan.lengths[row]}: make a new plan for each step"
            )
        )


def _listed(features: Features) -> str:
    """Name the features that are on, in words."""
    words = [name if value is True else f"{name} = {value}" for name, value in features.to_dict().items()]
    return " and ".join(words) or "no features"

"""plan, run, decode: the door. Every argument is checked here, once, before any launch.

q, cache -> stage.plan(lengths, shape) -> Plan -> stage.launch(q, cache, plan, ...) -> out, lse
"""

import functools
import inspect
import math
import numbers
from typing import Any

import numpy as np
import torch

from pkv._triton import require_launchable
from pkv.cache import PagedKVCache
from pkv.checks import Ints, at_least
from pkv.configs import LARGEST_HEAD_DIM
from pkv.gpus import GpuProfile, gpu_of
from pkv.merging import MOST_DIM_BLOCKS
from pkv.plans import LONGEST_ROW, Plan, int_lengths
from pkv.shapes import Shape
from pkv.stages import STAGES

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DEFAULT_STAGE = "split_kv"  # the best stage that needs nothing from the host
LARGEST_GRID = 2**31 - 1
MOST_SPLITS = 2**16


def plan(
    lengths: Ints,
    shape: Shape,
    stage: str = DEFAULT_STAGE,
    **options: Any,
) -> Plan:
    """Decide who does which tiles, without a GPU.

    lengths: tokens per row, ints or an int tensor (a GPU tensor is copied to the host once). shape: see Shape, or
    Shape.of(q, cache). Options by stage, e.g. split_kv: splits= (per row), tile= (tokens), gpu= (a profile's name or a
    GpuProfile: decides default splits; default the GPU at hand, else "rtx3060").
    Raises ValueError / TypeError for an unknown stage or option, bad lengths, splits < 1.

    >>> print(plan([5, 40], Shape(4, 2, 64, 4, "float16"), splits=2, gpu="rtx3060").items.tolist())
    [[0, 0, 5], [0, 16, 16], [1, 0, 16], [1, 16, 40]]
    """
    module = find_stage(stage)
    options = checked_options(stage, options)
    if not isinstance(shape, Shape):
        raise TypeError(f"shape must be a pkv.Shape, got {type(shape).__name__}; pkv.Shape.of(q, cache) makes one")
    if stage != "reference":
        check_kernel_shape(shape)
    row_lengths = int_lengths(lengths)
    n_rows, splits = len(row_lengths), options.get("splits", 1)
    if n_rows * max(splits * shape.grid_heads, shape.n_q_heads * MOST_DIM_BLOCKS) > LARGEST_GRID:
        raise ValueError(
            f"{n_rows} rows x {splits} splits x {shape.grid_heads} heads exceed a grid of 2**31 - 1 programs: "
            "use fewer splits, or decode the rows in parts"
        )
    made: Plan = module.plan(row_lengths, shape, **options)
    return made


def run(
    q: torch.Tensor,
    cache: PagedKVCache,
    plan: Plan,
    *,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    check: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Execute a plan: attention of one token per row over the row's cached tokens.

    q [n_rows, n_q_heads, head_dim] in the cache's dtype. scale: of the scores, None = 1 / sqrt(head_dim). out: where to
    write the result, any strides, q's shape and dtype. check: also check values that lie on a GPU (lengths, block
    table), which waits for the GPU; values on the CPU are always checked.
    Returns out [n_rows, n_q_heads, head_dim] and lse [n_rows, n_q_heads] (fp32, natural log). A row without tokens
    gives 0 and -inf. Raises ValueError / TypeError, naming the argument and the row, before any launch.
    """
    module = find_stage(plan.stage)
    check_arrays(q, cache, out)
    check_plan(q, cache, plan, check)
    if check or q.device.type == "cpu":
        cache.validate()
    scale = resolve_scale(scale, q.shape[-1])
    if plan.stage != "reference":
        require_launchable(q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    lse = torch.empty(q.shape[:2], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32, device=q.device)
    if not plan.lengths.any():  # nothing to read: no launch
        return out.zero_(), lse.fill_(-torch.inf)
    if q.device.type == "cuda" and q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            module.launch(q, cache, plan, scale, out, lse)
    else:
        module.launch(q, cache, plan, scale, out, lse)
    return out, lse


def decode(
    q: torch.Tensor,
    cache: PagedKVCache,
    *,
    stage: str | None = None,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    check: bool = False,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one token per row over a paged KV cache: plan and run in one call.

    q [n_rows, n_q_heads, head_dim]; see run() for scale, out and check, plan() for options. stage None: the best stage
    that needs nothing from the host, so no synchronisation and safe to capture in a CUDA graph (call once before
    capture, so that kernels are compiled). Stages planned on the host use cache.host_lengths, or copy the lengths from
    the GPU once per call. Returns out, or (out, lse) with return_lse.
    """
    check_arrays(q, cache, out)
    shape = Shape.of(q, cache)
    name = DEFAULT_STAGE if stage is None else stage
    options = {"gpu": gpu_of(q.device), **(checked_options(name, options) if options else {})}
    if options.pop("dynamic", find_stage(name).PLANNED_ON == "gpu" and q.device.type == "cuda"):
        made = _capacity_plan(cache.n_rows, cache.capacity, shape, name, **options)
    else:
        lengths = cache.host_lengths
        made = plan(cache.lengths if lengths is None else lengths, shape, stage=name, **options)
    result, lse = run(q, cache, made, scale=scale, out=out, check=check)
    return (result, lse) if return_lse else result


@functools.lru_cache(maxsize=256)
def _capacity_plan(n_rows: int, capacity: int, shape: Shape, stage: str, **options: Any) -> Plan:
    """A plan for rows of any length up to the table's capacity; the kernels read the true lengths."""
    return plan([min(capacity, LONGEST_ROW)] * n_rows, shape, stage=stage, dynamic=True, **options)


def checked_options(stage: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options, provided that the stage has them and their types are right; what is None is left out."""
    parameters = inspect.signature(find_stage(stage).plan).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    checked = {}
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"stage {stage!r} has no option {name!r}; it has {', '.join(known)}")
        if value is None:
            continue
        if name in ("splits", "tile"):
            value = at_least(1, name, value)
        if name == "splits" and value > MOST_SPLITS:
            raise ValueError(f"splits = {value} is above {MOST_SPLITS}: a row rarely gains from more than a hundred")
        if name == "dynamic" and not isinstance(value, bool):
            raise TypeError(f"dynamic must be True or False, got {value!r}")
        if name == "gpu" and not isinstance(value, (str, GpuProfile)):
            raise TypeError(f"gpu must be a profile's name or a pkv.GpuProfile, got {value!r}")
        checked[name] = value
    return checked


def find_stage(name: str) -> Any:
    """The module of a stage; ValueError lists the names there are."""
    if name not in STAGES:
        raise ValueError(f"stage = {name!r} does not exist; choose one of {', '.join(STAGES)}")
    return STAGES[name]


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """None means 1 / sqrt(head_dim); 0.0 is a scale."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real) or not math.isfinite(scale):
        raise ValueError(f"scale = {scale!r} must be a finite number (None = 1 / sqrt(head_dim))")
    return float(scale)


def check_kernel_shape(shape: Shape) -> None:
    """What the kernels cannot do, though the reference can."""
    if shape.head_dim > LARGEST_HEAD_DIM:
        raise ValueError(
            f"head_dim = {shape.head_dim} is above {LARGEST_HEAD_DIM}, the most the kernels take; use stage='reference'"
        )
    if shape.dtype not in KERNEL_DTYPES:
        raise TypeError(f"dtype {shape.dtype} has no kernel (float16, bfloat16, float32 have); use stage='reference'")


def check_arrays(q: torch.Tensor, cache: PagedKVCache, out: torch.Tensor | None) -> None:
    """q, cache and out fit each other: types, ranks, sizes, dtypes, devices."""
    if not isinstance(cache, PagedKVCache):
        raise TypeError(f"cache must be a pkv.PagedKVCache, got {type(cache).__name__}")
    if not isinstance(q, torch.Tensor) or q.ndim != 3:
        found = list(q.shape) if isinstance(q, torch.Tensor) else type(q).__name__
        raise ValueError(
            f"q must be a tensor [n_rows, n_q_heads, head_dim], got {found}; one decode step has one token per row"
        )
    n_rows, n_q_heads, head_dim = q.shape
    if n_rows != cache.n_rows:
        raise ValueError(f"q has {n_rows} rows, the cache {cache.n_rows}: one query token per row of the cache")
    if head_dim != cache.head_dim:
        raise ValueError(f"q has head_dim {head_dim}, the cache {cache.head_dim}")
    if n_q_heads == 0 or n_q_heads % cache.n_kv_heads:
        raise ValueError(f"q has {n_q_heads} query heads, not a multiple of the cache's {cache.n_kv_heads} KV heads")
    if q.dtype != cache.dtype:
        raise TypeError(f"q is {q.dtype}, the cache {cache.dtype}: convert one, e.g. q.to({cache.dtype})")
    if q.device != cache.device:
        raise ValueError(
            f"q lies on {q.device}, the cache on {cache.device}: move one, e.g. q.to({str(cache.device)!r})"
        )
    if out is not None:
        if out.shape != q.shape or out.dtype != q.dtype or out.device != q.device:
            raise ValueError(
                f"out is {list(out.shape)} {out.dtype} on {out.device}, "
                f"must be like q: {list(q.shape)} {q.dtype} on {q.device}"
            )
        if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
            raise ValueError("out is an expanded tensor whose elements share memory; pass a tensor of its own")


def check_plan(q: torch.Tensor, cache: PagedKVCache, plan: Plan, check: bool) -> None:
    """The plan was made for these sizes and, as far as the host can know, for these lengths."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a pkv.Plan, got {type(plan).__name__}")
    shape = Shape.of(q, cache)
    if plan.shape != shape:
        raise ValueError(f"plan was made for another shape ({plan.shape}), q and cache have {shape}: make a new plan")
    if plan.n_rows != cache.n_rows:
        raise ValueError(f"plan has {plan.n_rows} rows, the cache {cache.n_rows}: make a new plan")
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
            f"plan is stale or of another cache: row {row} has {lengths[row]} tokens, "
            + (
                f"it was planned for at most {plan.lengths[row]}: plan for more tokens"
                if plan.dynamic
                else f"it was planned for {plan.lengths[row]}: make a new plan for each step"
            )
        )

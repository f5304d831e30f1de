"""FlashInfer as a stage: its own kernels and schedule, on the same cache, to compare with.

`plan()` does not need FlashInfer: it makes its items by FlashInfer's published rules (x_flashinfer_rules.py).
`launch()` calls the library, which plans once more by itself. The wrapper that it planned is kept with the plan, so a
plan that serves every layer of a step pays for it once.

FlashInfer takes the page table as CSR. Lengths [3, 10], page size 4, table [[0, -, -], [1, 2, 3]]: indptr [0, 1, 4],
indices [0, 1, 2, 3], last_page_len [3, 2] (a full page counts 4, not 0). Lengths belong to the plan, page ids do not:
rows may get other pages while a plan is in use, so each launch gathers the indices again, on the GPU.

With a window, FlashInfer gets only the pages that it touches. In the first of them FlashInfer gives the tokens before
the window a weight of 0, but multiplies: a NaN or an infinity there reaches the result, as it does in no stage of
pkv's.
"""

import functools
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch

from pkv.cache.paged import PagedKVCache, upload
from pkv.cache.pool import csr_positions, last_page_lengths
from pkv.cards.known import resolve_gpu
from pkv.plans.facts import Facts, Family, GridOrder
from pkv.plans.features import NO_VALUES, Values
from pkv.plans.fields import Int32Array, offsets_of
from pkv.plans.gpu import GpuProfile
from pkv.plans.plan import Plan
from pkv.plans.shape import Shape
from pkv.plans.spans import visible_tiles
from pkv.runtime.graphs import is_capturing, keep_for_replays
from pkv.runtime.memory import Memory
from pkv.stages.x_flashinfer_rules import (
    KERNELS,
    default_kernel,
    fault_of_lengths,
    fits,
    launches_of,
    resident,
    split_items,
    unfit,
    why_not,
)

PLANNED_ON = "host"
FACTS = Facts(family=Family.FLASHINFER, grid_order=GridOrder.ITEMS_FIRST)
PARTS: tuple[str, ...] = ()
WORKSPACE = 128 * 2**20  # bytes for partial states, as FlashInfer's documentation recommends
WRAPPERS = Memory()  # for each plan: {(device, layout, columns, scale, values): {stream: Prepared}}
ENQUEUE = threading.Lock()  # held from gathering the page ids to the kernel that reads them


class BackendError(RuntimeError):
    """Raised if FlashInfer is missing, fails here, or refuses these tensors; the message says why, and what to do."""


def plan(
    lengths: Int32Array, shape: Shape, *, kernel: str | None = None, gpu: "str | GpuProfile | None" = None
) -> Plan:
    """Plan the items that FlashInfer will make; ValueError if it cannot decode this shape.

    kernel: "tensor-core" or "cuda-core" (default: by query heads per KV head). gpu: the card to make items for.
    FlashInfer itself always plans for the card that it runs on.
    """
    profile = resolve_gpu(gpu)
    kernel = default_kernel(shape) if kernel is None else kernel
    reason = why_not(shape, kernel)
    if reason is not None:
        others = [f"kernel={other!r}" for other in KERNELS if why_not(shape, other) is None]
        remedy = others[0] if others else "another stage, e.g. stage='split_kv'"
        raise ValueError(f"stage 'flashinfer' cannot decode this: {reason}; use {remedy}")
    fault = fault_of_lengths(lengths, shape)
    if fault is not None:
        raise ValueError(f"{fault}; decode the rows in parts, or use another stage")
    items = split_items(lengths, shape, profile, kernel)
    row_items = np.bincount(items[:, 0], minlength=len(lengths))
    return Plan(
        stage="flashinfer",
        shape=shape,
        lengths=lengths,
        items=items,
        program_offsets=np.arange(len(items) + 1, dtype=np.int32),
        partial_offsets=offsets_of(row_items),
        launches=launches_of(row_items),
        tile=shape.page_size,
        gpu=profile,
        programs_per_sm=resident(shape, profile, kernel),
        variant=kernel,
    )


def fault_of_items(plan: Plan) -> str | None:
    """Say where the plan's items differ from those that FlashInfer will make; None if they agree."""
    reason = why_not(plan.shape, plan.variant)
    if reason is not None:
        return reason
    if not np.array_equal(plan.items, split_items(plan.lengths, plan.shape, plan.gpu, plan.variant)):
        return f"its items are not those that FlashInfer's {plan.variant} kernel gets"
    return None


@torch.no_grad()
def launch(
    q: torch.Tensor, cache: PagedKVCache, plan: Plan, scale: float, out: torch.Tensor, lse: torch.Tensor,
    values: Values = NO_VALUES,
) -> None:  # fmt: skip
    """Run FlashInfer on the plan's rows. BackendError if it is missing, refuses the tensors, or fails."""
    require_gpu(q.device)
    if (fault := unfit(cache.k_pages, cache.v_pages, plan.variant)) is not None:
        raise BackendError(f"stage 'flashinfer': {fault}; copy the pages, or choose another stage")
    if scale <= 0:  # its softmax takes the maximum before scaling, and masks with -inf: both need a scale above 0
        q, scale = (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)
    if not fits(q):
        q = q.clone(memory_format=torch.contiguous_format)
    target = out if out.is_contiguous() and fits(out) and out.dtype == q.dtype else q.new_empty(q.shape)
    ready = prepare(plan, cache, scale, values)
    with ENQUEUE, explained("run"):
        torch.take(cache.block_table, ready.positions, out=ready.indices)
        result, lse_base_2 = ready.wrapper.run(q, (cache.k_pages, cache.v_pages), out=target, return_lse=True)
        if result.data_ptr() != target.data_ptr() or lse_base_2.shape != lse.shape:
            raise ValueError(f"this version returns out elsewhere, or lse {list(lse_base_2.shape)}")
    torch.mul(lse_base_2, math.log(2), out=lse)
    if target is not out:
        out.copy_(target)
    if ready.empty_rows is not None:  # what FlashInfer leaves there depends on its kernel and version
        out.index_fill_(0, ready.empty_rows, 0)
        lse.index_fill_(0, ready.empty_rows, -torch.inf)


@dataclass(frozen=True)
class Prepared:
    """A wrapper that FlashInfer has planned, and the page ids that it reads.

    positions int64 [n_used]: where the page ids stand in the flattened block table. indices int32 [n_used]: the page
    ids, the wrapper's own tensor. empty_rows int64 [n_empty]: rows without tokens, None if there are none.
    """

    wrapper: Any
    positions: torch.Tensor
    indices: torch.Tensor
    empty_rows: torch.Tensor | None


def prepare(plan: Plan, cache: PagedKVCache, scale: float, values: Values) -> Prepared:
    """Return the plan's wrapper for caches like this one: made at the first launch, then kept with the plan.

    Each stream has its own wrapper, because a wrapper's buffers hold one launch at a time. A captured graph takes one
    that was made before.
    """
    device = cache.device
    by_stream = WRAPPERS.of(plan).setdefault((device, cache.layout, cache.max_pages, scale, values), {})
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    if is_capturing(device):
        if not by_stream:
            raise RuntimeError(
                "FlashInfer has not planned this step yet, and cannot while a CUDA graph is captured: make the plan "
                "with pkv.plan, run it once with pkv.run, then capture pkv.run with it"
            )
        made = by_stream.get(stream, next(iter(by_stream.values())))
        keep_for_replays(made, device)
        return cast(Prepared, made)
    if stream not in by_stream:
        with torch.inference_mode(False):  # tensors made in inference mode cannot be written outside of it
            by_stream[stream] = _prepared(plan, cache, scale, values, stream)
    return cast(Prepared, by_stream[stream])


def _prepared(plan: Plan, cache: PagedKVCache, scale: float, values: Values, stream: int) -> Prepared:
    shape, device, window = plan.shape, cache.device, plan.shape.features.window
    skipped, n_pages = visible_tiles(plan.lengths, shape.page_size, shape.features)  # it gets none before the window
    lengths = plan.lengths - skipped * shape.page_size
    module = imported()
    if isinstance(module, str):
        raise BackendError(f"stage 'flashinfer': {module}; or choose another stage")
    indptr, rows, columns = csr_positions(n_pages)
    last_page_len = last_page_lengths(lengths, shape.page_size)  # FlashInfer takes none below 1; indptr says empty
    # on the host, where FlashInfer plans: it would have to wait for tensors on the GPU
    host_indptr, host_last = (torch.from_numpy(x.astype(np.int32)) for x in (indptr, last_page_len))
    positions = upload(rows * cache.max_pages + columns + skipped[rows], device)
    indices = torch.zeros(len(positions), dtype=torch.int32, device=device)
    with explained("plan"):
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
            workspace(device, stream), cache.layout, use_tensor_cores=plan.variant == "tensor-core",
            backend="fa2",  # the backend that the rules describe, on every GPU
        )  # fmt: skip
        wrapper.plan(
            host_indptr, indices, host_last, shape.n_q_heads, shape.n_kv_heads, shape.head_dim, shape.page_size,
            q_data_type=shape.dtype, kv_data_type=shape.kv_dtype, sm_scale=scale,
            window_left=-1 if window is None else window - 1, logits_soft_cap=values.soft_cap,
        )  # fmt: skip
        held = wrapper._paged_kv_indices_buf  # pkv's tensor, or in a later version a copy of it
        if held.shape != indices.shape or held.dtype != indices.dtype or held.device != device:
            raise ValueError("this version keeps the page indices in another form")
    keep_until_copied(wrapper, device)
    empty_rows = np.flatnonzero(lengths == 0)
    return Prepared(wrapper, positions, held, upload(empty_rows, device) if len(empty_rows) else None)


@functools.cache
def workspace(device: torch.device, stream: int) -> torch.Tensor:
    """Allocate FlashInfer's room for partial states, which a stream's plans share.

    A wrapper itself holds what its plan must keep.
    """
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)


_IN_FLIGHT: list[tuple[torch.cuda.Event, Any]] = []


def keep_until_copied(wrapper: Any, device: torch.device) -> None:
    """Hold a wrapper until the GPU has read its plan from the host.

    FlashInfer copies the plan from pinned memory without telling torch. If the wrapper were dropped with its plan,
    after one step, torch would give that memory to the next wrapper while the copy still waits in the stream.
    """
    if device.type == "cuda":
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        _IN_FLIGHT[:] = [(copied, held) for copied, held in _IN_FLIGHT if not copied.query()]
        _IN_FLIGHT.append((event, wrapper))


def require_gpu(device: torch.device) -> None:
    """Raise BackendError unless `device` is a CUDA GPU."""
    if device.type != "cuda":
        raise BackendError(
            f"stage 'flashinfer' runs on a CUDA GPU only, and q lies on {device}: "
            "move q and the cache to a GPU, or choose another stage"
        )


@functools.cache
def imported() -> ModuleType | str:
    """Import FlashInfer, or return the reason why that fails. A broken install may raise anything on import."""
    try:
        import flashinfer

        is_known = hasattr(flashinfer, "BatchDecodeWithPagedKVCacheWrapper")
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "flashinfer":
            return "FlashInfer is not installed: pip install flashinfer-python"
        return f"importing FlashInfer fails ({_told(error)}): `pkv doctor` says what to do"
    if not is_known:
        return "what imports as flashinfer is not FlashInfer 0.7: pip install flashinfer-python"
    return cast(ModuleType, flashinfer)


def unavailable() -> str | None:
    """Say why FlashInfer cannot be used here, as far as is known without building its kernels; None if it can."""
    if not torch.cuda.is_available():
        return "FlashInfer needs a CUDA GPU, and torch sees none"
    module = imported()
    return module if isinstance(module, str) else None


@contextmanager
def explained(step: str) -> Iterator[None]:
    """Turn whatever FlashInfer raises into a BackendError that says where, and where to look."""
    try:
        yield
    except Exception as error:
        raise BackendError(
            f"stage 'flashinfer': FlashInfer's {step}() failed ({_told(error)}): `pkv doctor` says whether it lacks "
            "something to build its kernels with; or choose another stage"
        ) from error


def _told(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

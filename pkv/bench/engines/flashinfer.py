"""FlashInfer's engines, called as its documentation shows; wherever there is a choice, the one that is faster for it.

Of lengths [5, 40] and pages of 16 it is given, on the host, indptr [0, 1, 4] and last_page_len [5, 8]; page ids lie on
the GPU beforehand. Its wrappers plan once a step. xqa is the kernel of TensorRT-LLM that FlashInfer serves: it plans
nothing, and takes the lengths and the page table as they are.

No engine here is asked for lse: a model does not need it, and storing it would be time. FlashInfer's lse is in base 2.
A row without tokens is refused: what the kernels leave there depends on kernel and version.
"""

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import cast

import numpy as np
import torch

from pkv.bench.engines.engine import Batch, Engine, Ready
from pkv.bench.engines.rivals import Staging, has_empty_rows, not_half, not_on_gpu, page_counts, staging
from pkv.cache.pool import last_page_lengths
from pkv.stages import x_flashinfer
from pkv.stages.x_flashinfer_rules import fault_of_lengths, fits, unfit
from pkv.stages.x_flashinfer_rules import why_not as why_not_shape

WORKSPACE = 128 * 2**20  # bytes, as its documentation recommends
XQA_PAGES = (16, 32, 64, 128)
XQA_MOST_GROUP = 32
XQA_ARCHS = (9, 10, 12)  # compute capability, the part before the dot


def why_not(name: str, batch: Batch) -> str | None:
    """Why FlashInfer's engine `name` cannot do the batch here, or None."""
    kernel = "cuda-core" if name == "fa2-cuda-core" else "tensor-core"
    cache, lengths = batch.cache, np.array(batch.lengths, dtype=np.int32)
    reason = x_flashinfer.unavailable() or not_on_gpu(batch) or not_half(batch)
    if reason is None and name == "xqa":
        reason = why_not_xqa(batch)
    elif reason is None:
        reason = why_not_shape(batch.shape, kernel)
    if reason is None and name == "fa3" and batch.gpu.arch != 90:
        reason = f"FlashAttention-3 is written for compute capability 9.0, and this GPU has {batch.gpu.arch / 10}"
    if reason is None and name == "batch-attention" and not hasattr(flashinfer(), "BatchAttention"):
        reason = "this version of FlashInfer has no BatchAttention"
    if reason is None and not (batch.q.is_contiguous() and fits(batch.q)):
        reason = "q is not contiguous, or not aligned to 16 bytes"
    return (
        reason
        or unfit(cache.k_pages, cache.v_pages, kernel)
        or fault_of_lengths(lengths, batch.shape)
        or has_empty_rows(batch)
    )


def why_not_xqa(batch: Batch) -> str | None:
    """The limits of TensorRT-LLM's kernel."""
    shape, cache = batch.shape, batch.cache
    if not hasattr(flashinfer().decode, "xqa_batch_decode_with_kv_cache"):
        return "this version of FlashInfer has no xqa"
    if batch.gpu.arch // 10 not in XQA_ARCHS:
        return f"its kernel is built for compute capability 9, 10 and 12, and this GPU has {batch.gpu.arch / 10}"
    if shape.page_size not in XQA_PAGES:
        return f"its kernel takes pages of 16, 32, 64 or 128 tokens, not {shape.page_size}"
    if shape.head_dim % 16 or shape.head_dim > 256:
        return f"its kernel takes a head_dim of 16, 32, ... 256, not {shape.head_dim}"
    if shape.group > XQA_MOST_GROUP:
        return f"its kernel takes up to {XQA_MOST_GROUP} query heads per KV head, not {shape.group}"
    if cache.k_pages.stride() != cache.v_pages.stride():
        return "its kernel takes k_pages and v_pages of equal strides"
    return None


def prepare_wrapper(tensor_cores: bool, backend: str, batch: Batch) -> Ready:
    """BatchDecodeWithPagedKVCacheWrapper."""
    cache, shape, device = batch.cache, batch.shape, batch.q.device
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
    wrapper = flashinfer().BatchDecodeWithPagedKVCacheWrapper(
        workspace, cache.layout, use_tensor_cores=tensor_cores, backend=backend
    )
    ends, last, indices = staging(len(batch.lengths) + 1, device), staging(len(batch.lengths), device), csr(batch)
    pages, out = (cache.k_pages, cache.v_pages), torch.empty_like(batch.q)

    def plan() -> None:
        host_ends, host_last = (
            ends_of_pages(batch, ends),
            last.fill(last_page_lengths(np.array(batch.lengths, dtype=np.int64), shape.page_size)),
        )
        wrapper.plan(
            host_ends, indices, host_last, shape.n_q_heads, shape.n_kv_heads, shape.head_dim, shape.page_size,
            q_data_type=shape.dtype, kv_data_type=shape.kv_dtype,
        )  # fmt: skip

    def run(_: None) -> tuple[torch.Tensor, None]:
        return wrapper.run(batch.q, pages, out=out), None

    return Ready(plan, run, {"workspace_mb": WORKSPACE / 2**20, "backend": backend, "tensor_cores": tensor_cores})


def prepare_batch_attention(batch: Batch) -> Ready:
    """BatchAttention: prefill and decode in one persistent kernel, here one query token per row."""
    cache, shape, device = batch.cache, batch.shape, batch.q.device
    n_rows = len(batch.lengths)
    wrapper = flashinfer().BatchAttention(kv_layout=cache.layout, device=str(device))
    queries = torch.arange(n_rows + 1, dtype=torch.int32)
    ends, lengths, indices = staging(n_rows + 1, device), staging(n_rows, device), csr(batch)
    pages, out = (cache.k_pages, cache.v_pages), torch.empty_like(batch.q)
    lse = torch.empty(batch.q.shape[:2], dtype=torch.float32, device=device)  # without it, run() would make one

    def plan() -> None:
        # numbers lie on the host, where it plans: given on the GPU, they would be copied back first
        wrapper.plan(
            queries, ends_of_pages(batch, ends), indices, lengths.fill(batch.lengths), shape.n_q_heads,
            shape.n_kv_heads, shape.head_dim, shape.head_dim, shape.page_size,
            q_data_type=shape.dtype, kv_data_type=shape.kv_dtype,
        )  # fmt: skip

    def run(_: None) -> tuple[torch.Tensor, None]:
        return wrapper.run(batch.q, pages, out=out, lse=lse)[0], None

    return Ready(plan, run)


def prepare_xqa(batch: Batch) -> Ready:
    """TensorRT-LLM's xqa."""
    cache, device = batch.cache, batch.q.device
    decode = flashinfer().decode.xqa_batch_decode_with_kv_cache
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)  # its semaphores must begin at 0
    table, lengths = cache.block_table.contiguous(), staging(len(batch.lengths), device)
    pages, out = (cache.k_pages, cache.v_pages), torch.empty_like(batch.q)
    scale = 1 / math.sqrt(batch.shape.head_dim)

    def plan() -> torch.Tensor:
        return lengths.send(batch.lengths)

    def run(there: torch.Tensor) -> tuple[torch.Tensor, None]:
        decode(
            batch.q, pages, workspace, table, there, cache.capacity, bmm1_scale=scale, bmm2_scale=1.0, out=out,
            kv_layout=cache.layout,
        )  # fmt: skip
        return out, None

    return Ready(plan, run, {"workspace_mb": WORKSPACE / 2**20})


def csr(batch: Batch) -> torch.Tensor:
    """Page ids, row after row: int32 on the GPU."""
    return batch.cache.to_csr()[1]


def ends_of_pages(batch: Batch, ends: Staging) -> torch.Tensor:
    """Where each row's page ids begin, and where the last row's end; on the host."""
    ends.host.numpy()[1:] = np.cumsum(page_counts(batch))
    return ends.host


def flashinfer() -> ModuleType:
    """The library; only where unavailable() has nothing to say."""
    return cast(ModuleType, x_flashinfer.imported())


def engine(name: str, what: str, prepare: Callable[[Batch], Ready]) -> Engine:
    """One of FlashInfer's engines."""
    return Engine(name, what, "flashinfer", functools.partial(why_not, name), prepare)


FLASHINFER = (
    engine(
        "fa2-tensor-core", "FlashInfer's decode on tensor cores", functools.partial(prepare_wrapper, True, "fa2")
    ),
    engine(
        "fa2-cuda-core", "FlashInfer's decode as it is by default", functools.partial(prepare_wrapper, False, "fa2")
    ),
    engine("fa3", "FlashAttention-3, made for prefill", functools.partial(prepare_wrapper, True, "fa3")),
    engine("batch-attention", "FlashInfer's persistent kernel, BatchAttention", prepare_batch_attention),
    engine("xqa", "TensorRT-LLM's kernel, served by FlashInfer", prepare_xqa),
)  # fmt: skip

"""The Triton kernels that people decode with today: vLLM's and SGLang's, dispatched as those servers dispatch them.

vLLM cuts every row into 16 segments while there are few rows, and into none otherwise. SGLang cuts each row by its
length, up to a cap, 8 unless its user sets another: `sglang-32` and `sglang-64` are such users. Lengths [16384, 1024]
on 132 SMs, 32 query heads, 8 KV heads: SGLang gives the rows 8 and 1 splits, or 32 and 2.

Both are found where they are installed, or where their kernels lie on PYTHONPATH. Neither gives lse.
"""

import functools
import math
from typing import Any

import torch

from pkv._triton import why_not_launchable
from pkv.bench.engines.engine import Batch, Engine, Ready
from pkv.bench.engines.rivals import entry_point, has_empty_rows, not_half, staging
from pkv.plans.shape import Shape

VLLM_SEGMENTS = 16
VLLM_PROGRAMS = 128  # rows x KV heads up to which vLLM cuts rows
VLLM_PAGES = 16  # its pages hold a multiple of so many tokens
VLLM_SPARE_PAGES = 2  # a tile of 32 tokens may begin in a row's last page of 16
SGLANG_CAPS = {"sglang": 8, "sglang-32": 32, "sglang-64": 64}


def vllm() -> Any:
    """Its function, or why there is none."""
    module = "vllm.v1.attention.ops.triton_unified_attention"
    return entry_point(module, "unified_attention", "seq_threshold_3D", "vLLM")


def why_not_vllm(batch: Batch) -> str | None:
    """Why vLLM cannot do the batch here, or None."""
    shape, found = batch.shape, vllm()
    reason = why_not_launchable(batch.q.device) or (found if isinstance(found, str) else None) or not_half(batch)
    reason = reason or has_empty_rows(batch)
    if reason is None and shape.page_size % VLLM_PAGES:
        return f"vLLM's pages hold a multiple of {VLLM_PAGES} tokens, not {shape.page_size}"
    if reason is None and shape.head_dim < 32:
        return f"vLLM takes a head_dim of 32 or more, not {shape.head_dim}"
    return reason


def prepare_vllm(batch: Batch) -> Ready:
    """Its kernel for few rows and for many, as vLLM chooses."""
    unified_attention, cache, shape = vllm(), batch.cache, batch.shape
    n_rows, n_q_heads, head_dim = batch.q.shape
    device, scale = batch.q.device, 1 / math.sqrt(head_dim)
    most_rows = VLLM_PROGRAMS // shape.n_kv_heads
    room = (most_rows, n_q_heads, VLLM_SEGMENTS)
    padded_dim = 2 ** (head_dim - 1).bit_length()
    segments = torch.empty(*room, padded_dim, dtype=torch.float32, device=device)
    largest, sums = (torch.empty(room, dtype=torch.float32, device=device) for _ in range(2))
    table = torch.nn.functional.pad(cache.block_table, (0, VLLM_SPARE_PAGES))
    queries = torch.arange(n_rows + 1, dtype=torch.int32, device=device)
    lengths, out = staging(n_rows, device), torch.empty_like(batch.q)

    def plan() -> torch.Tensor:
        return lengths.send(batch.lengths)

    def run(there: torch.Tensor) -> tuple[torch.Tensor, None]:
        unified_attention(
            q=batch.q, k=cache.k_nhd, v=cache.v_nhd, out=out, cu_seqlens_q=queries, max_seqlen_q=1, seqused_k=there,
            max_seqlen_k=cache.capacity, softmax_scale=scale, causal=True, window_size=(-1, -1), block_table=table,
            softcap=0, q_descale=None, k_descale=None, v_descale=None, seq_threshold_3D=most_rows,
            num_par_softmax_segments=VLLM_SEGMENTS, softmax_segm_output=segments, softmax_segm_max=largest,
            softmax_segm_expsum=sums,
        )  # fmt: skip
        return out, None

    return Ready(plan, run, {"segments": VLLM_SEGMENTS if n_rows <= most_rows else 1})


def sglang() -> Any:
    """Its function, or why there is none."""
    module = "sglang.srt.layers.attention.triton_ops.decode_attention"
    return entry_point(module, "decode_attention_fwd", "v_scale", "SGLang")


def why_not_sglang(batch: Batch) -> str | None:
    """Why SGLang cannot do the batch here, or None."""
    found, cache = sglang(), batch.cache
    reason = why_not_launchable(batch.q.device) or (found if isinstance(found, str) else None) or not_half(batch)
    for name, pages in (("k_pages", cache.k_nhd), ("v_pages", cache.v_nhd)):
        page_step, token_step, _, dim_step = pages.stride()
        if reason is None and (dim_step != 1 or page_step != token_step * cache.page_size):
            reason = f"SGLang finds tokens one by one: {name} must be a contiguous list of them, as in layout NHD"
    return reason or has_empty_rows(batch)


def prepare_sglang(cap: int, batch: Batch) -> Ready:
    """Page ids in its form, an index of every token, are made here: SGLang itself makes them once a step."""
    decode_attention, cache, shape = sglang(), batch.cache, batch.shape
    n_rows, n_q_heads, head_dim = batch.q.shape
    device, scale = batch.q.device, 1 / math.sqrt(head_dim)
    k, v = (pages.flatten(0, 1) for pages in (cache.k_nhd, cache.v_nhd))  # [n_slots, n_kv_heads, head_dim]
    states = torch.empty(n_rows, n_q_heads, cap, head_dim, dtype=torch.float32, device=device)
    lses = torch.empty(n_rows, n_q_heads, cap, dtype=torch.float32, device=device)
    indices, out = token_indices(batch), torch.empty_like(batch.q)
    ends, splits = staging(n_rows + 1, device), staging(n_rows, device)

    def plan() -> tuple[torch.Tensor, torch.Tensor]:
        begins = [0]
        for length in batch.lengths:
            begins.append(begins[-1] + length)
        return ends.send(begins), splits.send(sglang_splits(batch.lengths, shape, batch.gpu.n_sms, cap))

    def run(planned: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, None]:
        row_ends, row_splits = planned
        decode_attention(
            batch.q, k, v, out, row_ends, indices, states, lses, row_splits, cap, scale, k_scale=1.0, v_scale=1.0
        )
        return out, None

    return Ready(plan, run, {"splits": max(sglang_splits(batch.lengths, shape, batch.gpu.n_sms, cap)), "cap": cap})


def token_indices(batch: Batch) -> torch.Tensor:
    """Where each token lies, row after row, as an index of all slots: int64 [n_tokens]."""
    lengths = torch.tensor(batch.lengths)
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    tokens = torch.arange(len(rows)) - (torch.cumsum(lengths, 0) - lengths)[rows]
    rows, tokens = rows.to(batch.q.device), tokens.to(batch.q.device)
    page_size = batch.shape.page_size
    pages = batch.cache.block_table[rows, tokens // page_size].long()
    return pages * page_size + tokens % page_size


def sglang_splits(lengths: list[int], shape: Shape, n_sms: int, cap: int) -> list[int]:
    """Splits of each row by SGLang's rule: the more of two, by how ragged the rows are and by how empty the GPU is.

    >>> sglang_splits([16384, 1024], Shape(32, 8, 128, 16, "float16"), n_sms=132, cap=32)
    [32, 2]
    """
    longest, shortest = max(lengths), min(lengths)
    if 8 * longest < 10 * shortest:  # about equal
        shortest = longest
    by_raggedness = min(-(-longest // shortest), cap)
    n_places = int(n_sms * max(math.log2(longest / 64), 1.0))
    n_programs = len(lengths) * -(-shape.n_q_heads // (1 if shape.group == 1 else min(16, shape.group)))
    by_room = min(-(-n_places // n_programs), cap)
    shares = -(-longest // by_raggedness), -(-longest // by_room)
    return [max(-(-length // share) for share in shares) for length in lengths]


TRITON = (
    Engine("vllm", "vLLM's unified attention in Triton", "triton", why_not_vllm, prepare_vllm),
    *(
        Engine(
            name, f"SGLang's decode in Triton, up to {cap} splits", "triton", why_not_sglang,
            functools.partial(prepare_sglang, cap),
        )
        for name, cap in SGLANG_CAPS.items()
    ),
)  # fmt: skip

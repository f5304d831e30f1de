"""FlashInfer's decode wrapper for machines without it: the same signatures, its conventions, plain PyTorch inside.

Where the real one is unforgiving, so is this one: it writes `out` as packed memory, reads vectors of 16 bytes, keeps
the page indices that plan() is given, returns lse in base 2, and leaves rubbish in rows without tokens.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor


class BatchDecodeWithPagedKVCacheWrapper:
    made: ClassVar[list[BatchDecodeWithPagedKVCacheWrapper]] = []

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        assert kv_layout in ("NHD", "HND")
        assert not use_cuda_graph
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.numel() >= 2**27
        self.layout, self.use_tensor_cores, self.backend = kv_layout, use_tensor_cores, backend
        self.workspace, self.n_runs = float_workspace_buffer, 0
        self.made.append(self)

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        **kwargs: Any,
    ) -> None:
        assert not deprecated_positional_args
        self._plan_impl(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **kwargs)

    def _plan_impl(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        is_causal: bool | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        assert {indptr.dtype, indices.dtype, last_page_len.dtype} == {torch.int32}
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all(), "a full page counts page_size, not 0"
        assert (indptr[0], indptr[-1], len(indptr)) == (0, len(indices), len(last_page_len) + 1)
        self.indptr, self.last_page_len = indptr.tolist(), last_page_len.tolist()
        self._paged_kv_indices_buf = indices
        self.sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self.dtypes, self.sm_scale = (q_data_type, kv_data_type or q_data_type), sm_scale

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert out is not None
        assert return_lse
        self.n_runs += 1
        k_pages, v_pages = paged_kv_cache
        if self.layout == "HND":
            k_pages, v_pages = k_pages.transpose(1, 2), v_pages.transpose(1, 2)
        n_rows, n_q_heads, head_dim = q.shape
        assert self.sizes == (n_q_heads, k_pages.shape[2], head_dim, k_pages.shape[1])
        assert (*self.dtypes, n_rows) == (q.dtype, k_pages.dtype, len(self.last_page_len))
        assert out.dtype == q.dtype
        for x in (q, k_pages, v_pages, out):
            assert (x.stride(-1), x.data_ptr() % 16) == (1, 0)
            assert all(stride * x.itemsize % 16 == 0 for stride in x.stride()[:-1])
        assert self.use_tensor_cores or k_pages.stride() == v_pages.stride()
        packed = out.as_strided(q.shape, (n_q_heads * head_dim, head_dim, 1))  # out's own strides are never read
        lse_base_2 = torch.full((n_rows, n_q_heads), torch.nan, device=q.device)
        for row in range(n_rows):
            pages = self._paged_kv_indices_buf[self.indptr[row] : self.indptr[row + 1]].long()
            if not len(pages):
                packed[row] = torch.nan
                continue
            length = (len(pages) - 1) * self.sizes[3] + self.last_page_len[row]
            k, v = (x[pages].flatten(0, 1)[:length].float() for x in (k_pages, v_pages))
            group = n_q_heads // k.shape[1]
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
            products = torch.einsum("hd,thd->ht", q[row].float(), k)
            masked = torch.cat([products, torch.full((n_q_heads, 1), -torch.inf, device=q.device)], dim=1)
            scores = masked * self.sm_scale * math.log2(math.e)  # as in its kernel: masked first, then scaled
            largest = masked.amax(1, keepdim=True) * self.sm_scale * math.log2(math.e)
            weights = torch.exp2(scores - largest)
            total = weights.sum(1, keepdim=True)
            packed[row] = torch.einsum("ht,thd->hd", weights[:, :-1] / total, v).to(out.dtype)
            lse_base_2[row] = (largest + torch.log2(total))[:, 0]
        return out, lse_base_2

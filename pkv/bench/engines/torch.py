"""Attention by PyTorch alone: copy every row's pages to one dense tensor, padded to the longest, and attend to that.

Lengths [5, 40], pages of 16: K and V are copied to [2, n_kv_heads, 48, head_dim] each, and a mask hides 43 tokens of
row 0 and 8 of row 1. Read, written and read again: three times the traffic of paged attention, and the padding besides.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from pkv.bench.engines.engine import Batch, Engine, Ready
from pkv.bench.engines.rivals import has_empty_rows, page_counts, staging
from pkv.bench.engines.stream import EMPTY, STREAM

MOST_DENSE_BYTES = 4 * 10**9
MULTIPLE = 16  # tokens: a mask of such a length needs no copy before torch's kernel takes it


def n_columns(batch: Batch) -> int:
    """Pages of every row's dense copy."""
    longest = max(batch.lengths, default=0)
    return -(-(-(-longest // MULTIPLE) * MULTIPLE) // batch.shape.page_size)


def dense_bytes(batch: Batch) -> int:
    """Of the padded copies of K and V."""
    return len(batch.lengths) * n_columns(batch) * batch.shape.page_size * batch.shape.kv_bytes_per_token


def why_not(batch: Batch) -> str | None:
    """Why the copies cannot be made or attended to, or None."""
    needed = dense_bytes(batch)
    if needed > MOST_DENSE_BYTES:
        limit = MOST_DENSE_BYTES / 1e9
        return f"padded to the longest row, K and V take {needed / 1e9:.1f} GB, more than the {limit:.0f} GB allowed"
    return has_empty_rows(batch)


def prepare(batch: Batch) -> Ready:
    """A KV head's group of query heads stands where query tokens do: so torch needs no copy of K for each of them."""
    cache, shape, device = batch.cache, batch.shape, batch.q.device
    n_rows, columns = len(batch.lengths), n_columns(batch)
    n_tokens = columns * shape.page_size
    is_used = torch.arange(columns, device=device) < torch.from_numpy(page_counts(batch)).to(device)[:, None]
    page_ids = torch.zeros(n_rows, columns, dtype=torch.int64, device=device)  # what is unused copies page 0
    table = cache.block_table[:, :columns].long()
    page_ids[:, : table.shape[1]] = torch.where(is_used[:, : table.shape[1]], table, 0)
    ids = page_ids.flatten()
    pools = (cache.k_nhd, cache.v_nhd)
    copies = [
        torch.empty(len(ids), shape.page_size, shape.n_kv_heads, shape.head_dim, dtype=pool.dtype, device=device)
        for pool in pools
    ]
    k, v = (copy.view(n_rows, n_tokens, shape.n_kv_heads, shape.head_dim).transpose(1, 2) for copy in copies)
    q = batch.q.view(n_rows, shape.n_kv_heads, shape.group, shape.head_dim)
    lengths, tokens = staging(n_rows, device), torch.arange(n_tokens, device=device)
    hidden = torch.tensor(-torch.inf, dtype=shape.dtype, device=device)
    seen = torch.zeros((), dtype=shape.dtype, device=device)

    def plan() -> torch.Tensor:
        is_token = tokens < lengths.send(batch.lengths)[:, None]
        mask = torch.where(is_token, seen, hidden)  # of q's dtype: torch would convert one of bools in every layer
        return mask[:, None, None].expand(n_rows, shape.n_kv_heads, shape.group, n_tokens)

    def run(mask: torch.Tensor) -> tuple[torch.Tensor, None]:
        for pool, copy in zip(pools, copies, strict=True):
            torch.index_select(pool, 0, ids, out=copy)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask).view(batch.q.shape), None

    return Ready(plan, run, {"dense_mb": dense_bytes(batch) / 2**20})


TORCH = (
    Engine("gather-sdpa", "pages copied to a padded tensor, then torch's attention", "torch", why_not, prepare),
    STREAM,
    EMPTY,
)

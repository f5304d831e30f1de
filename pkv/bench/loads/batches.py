"""Ragged batches to try kernels on: shuffled pages, and NaN (or another value) wherever a kernel must not look.

Lengths [5, 0], page size 4: row 0 has 2 of 5 pages, in any order; slots 1..3 of its second page, the three pages that
no row has, and what the table's unused entries point at are NaN.
"""

import numpy as np
import torch

from pkv.cache.paged import PagedKVCache
from pkv.cache.pool import last_page_lengths
from pkv.plans.shape import Shape

UNMAPPED = 3  # pages that no row has


def poisoned_batch(
    lengths: list[int], shape: Shape, seed: int, device: torch.device, unused: float = torch.nan
) -> tuple[torch.Tensor, PagedKVCache]:
    """q [n_rows, n_q_heads, head_dim] and a cache of random tokens, made on `device`; `unused` where no token lies."""
    generator = torch.Generator(device).manual_seed(seed)
    known = np.array(lengths, dtype=np.int64)
    n_used = -(-known // shape.page_size)
    n_pages = int(n_used.sum()) + UNMAPPED
    size = (n_pages, shape.page_size, shape.n_kv_heads, shape.head_dim)
    k, v = (torch.randn(size, generator=generator, dtype=shape.dtype, device=device) for _ in range(2))
    q = torch.randn(
        len(lengths), shape.n_q_heads, shape.head_dim, generator=generator, dtype=shape.dtype, device=device
    )

    page_ids = np.random.default_rng(seed).permutation(n_pages)
    is_used = np.arange(n_used.max(initial=0) + 1) < n_used[:, None]
    table = np.full(is_used.shape, page_ids[-1], dtype=np.int32)  # unused entries: a page full of NaN
    table[is_used] = page_ids[:-UNMAPPED]
    last_pages = table[np.arange(len(lengths)), np.maximum(n_used - 1, 0)]
    n_filled = np.where(known > 0, last_page_lengths(known, shape.page_size), shape.page_size)
    filled = np.full(n_pages, shape.page_size)
    filled[last_pages] = n_filled
    filled[page_ids[-UNMAPPED:]] = 0
    is_unused = torch.from_numpy(np.arange(shape.page_size) >= filled[:, None]).to(device)  # [n_pages, page_size]
    for pages in (k, v):
        pages[is_unused] = unused

    block_table = torch.from_numpy(table).to(device)
    lengths_there = torch.from_numpy(known.astype(np.int32)).to(device)
    return q, PagedKVCache(k, v, block_table, lengths_there, host_lengths=lengths)


def bytes_needed(lengths: list[int], shape: Shape) -> int:
    """Memory for such a batch and for measuring results against fp64, which copies a row at a time, and widens it."""
    elements = shape.n_kv_heads * shape.head_dim
    a_row = max(lengths, default=0) * elements * (2 * 8 + 4 * 4 * shape.group + 4 * shape.dtype.itemsize)
    return sum(lengths) * shape.kv_bytes_per_token + a_row

"""The paged KV cache: K and V live in a pool of fixed-size pages, and a block table says which pages make up a row.

Example, page size 4, lengths 3 and 10 (`PagedKVCache.from_dense(k, v, [3, 10], page_size=4)`):

    block_table              pages
    row 0: [0, -, -]         0: tokens 0..2 of row 0, one unused slot
    row 1: [1, 2, 3]         1: tokens 0..3 of row 1    2: tokens 4..7    3: tokens 8 and 9, two unused slots

Token 9 of row 1 lies in page `block_table[1, 9 // 4]` = 3, slot `9 % 4` = 1. Unused slots and table entries past a
row's pages may hold anything and never reach a result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from pkv.checks import Ints, at_least, check_tensor, host_ints
from pkv.pagedtensors import PagedTensors, upload
from pkv.paging import PagePool


class PagedKVCache(PagedTensors):
    """K and V of a batch of rows in pages, with the table that finds them.

    k_pages, v_pages: [n_pages, page_size, n_kv_heads, head_dim] for layout "NHD", [n_pages, n_kv_heads, page_size,
    head_dim] for "HND"; float16, bfloat16 or float32 (float64 for the reference); any strides. block_table: int32
    [n_rows, max_pages], page ids. lengths: int32 [n_rows], tokens. All on one device; nothing is copied.

    host_lengths: the same lengths where Python can read them, for planning without waiting for a GPU. Pass them if you
    know them; `validate()` checks that they agree.

    A cache built here reads tensors that someone else manages. `empty` and `from_dense` build one that owns its pages
    and can `add`, `append`, `fork` and `free` rows. Each of these succeeds, or raises ValueError with nothing changed;
    it does not wait for a GPU, and adds 1 to `version`. They run on the host: do not capture them in a CUDA graph.

    Raises TypeError or ValueError naming the argument and the remedy. Values are checked by `validate()`.
    """

    @classmethod
    def empty(
        cls,
        n_pages: int,
        page_size: int,
        n_kv_heads: int,
        head_dim: int,
        max_rows: int,
        *,
        max_pages: int | None = None,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str = "cpu",
        layout: str = "NHD",
    ) -> PagedKVCache:
        """A cache that owns `n_pages` free pages, and `max_rows` rows that are inactive (length 0) until added.

        max_pages: table columns, so a row holds at most max_pages * page_size tokens; by default a row may take the
        whole pool.
        """
        n_pages, page_size = at_least(1, "n_pages", n_pages), at_least(1, "page_size", page_size)
        n_kv_heads, head_dim = at_least(1, "n_kv_heads", n_kv_heads), at_least(1, "head_dim", head_dim)
        max_pages = n_pages if max_pages is None else at_least(1, "max_pages", max_pages)
        pool = PagePool(n_pages, page_size, at_least(0, "max_rows", max_rows), max_pages)
        return cls._owning(pool, n_kv_heads, head_dim, dtype, torch.device(device), layout)

    @classmethod
    def from_dense(
        cls,
        k: Tensor,
        v: Tensor,
        lengths: Ints,
        page_size: int = 16,
        seed: int | None = None,
        *,
        layout: str = "NHD",
        n_pages: int | None = None,
        max_pages: int | None = None,
        max_rows: int | None = None,
    ) -> PagedKVCache:
        """An owned cache with the first lengths[i] tokens of row i of k, v [n_rows, max_len, n_kv_heads, head_dim].

        seed: shuffle the page ids with it (torch's global generator is untouched). By default there are exactly as many
        pages, columns and rows as needed. More of them leave room for `append`, `add` and `fork`; free pages bring as
        many columns unless max_pages says otherwise. Lengths on a GPU are copied to the host first.
        """
        known = host_ints("lengths", lengths)
        check_tensor("k", k, (known.size, "max_len", "n_kv_heads", "head_dim"))
        check_tensor("v", v, k.shape, k.dtype, k.device)
        n_rows, max_len, n_kv_heads, head_dim = k.shape
        page_size = at_least(1, "page_size", page_size)
        bad = np.flatnonzero((known < 0) | (known > max_len))
        if bad.size:
            raise ValueError(f"lengths[{bad[0]}] = {known[bad[0]]} is outside [0, {max_len}], the tokens in a row of k")
        n_used = -(-known // page_size)
        min_pages, min_columns = max(1, int(n_used.sum())), max(1, int(n_used.max(initial=0)))
        n_pages = min_pages if n_pages is None else at_least(min_pages, "n_pages", n_pages)
        max_pages = min_columns + n_pages - min_pages if max_pages is None else max_pages
        max_rows = n_rows if max_rows is None else at_least(n_rows, "max_rows", max_rows)
        order = None
        if seed is not None:
            order = torch.randperm(n_pages, generator=torch.Generator().manual_seed(seed), device="cpu").tolist()
        pool = PagePool(n_pages, page_size, max_rows, at_least(min_columns, "max_pages", max_pages), order)
        for length in known.tolist():
            pool.open(length)
        cache = cls._owning(pool, n_kv_heads, head_dim, k.dtype, k.device, layout)
        rows, tokens = np.nonzero(np.arange(max_len) < known[:, None])
        row_ids, token_ids = upload(np.stack([rows, tokens]), k.device)
        pages, slots = pool.table[rows, tokens // page_size], tokens % page_size
        cache._write(pages, slots, k[row_ids, token_ids], v[row_ids, token_ids])
        return cache

    def add(self, k: Tensor, v: Tensor) -> int:
        """Store a new row, k and v [len, n_kv_heads, head_dim] (len 0 is a row too), and return its number.

        Raises ValueError if there is no free row, or too few free pages or table columns.
        """
        pool = self._owned_pool("add")
        self._check_new_tokens(k, v, "len")
        row, tokens = pool.open(len(k)), np.arange(len(k))
        with _undoing(lambda: pool.close(row)):
            self._write(pool.table[row, tokens // self.page_size], tokens % self.page_size, k, v)
        self._publish(pool, [row])
        return row

    def append(self, k: Tensor, v: Tensor, rows: Ints | None = None) -> None:
        """Add one token to each of `rows`, k and v [len(rows), n_kv_heads, head_dim], in place.

        Without `rows`: k and v [n_rows, n_kv_heads, head_dim], and inactive rows are skipped. Raises ValueError if a
        row repeats, is inactive or is full, or if there are too few free pages. `rows` on a GPU are copied to the host.
        """
        pool = self._owned_pool("append")
        if rows is None:
            self._check_new_tokens(k, v, self.n_rows)
            wanted = np.flatnonzero(pool.active)
            if wanted.size < self.n_rows:
                k, v = (x[upload(wanted, self.device)] for x in (k, v))
        else:
            wanted = np.array([self._check_row(row) for row in host_ints("rows", rows)], dtype=np.int64)
            repeated = wanted[np.bincount(wanted)[wanted] > 1]
            if repeated.size:
                raise ValueError(f"rows names row {repeated[0]} more than once: append one token to it at a time")
            self._check_new_tokens(k, v, wanted.size)
        if wanted.size:
            pages, slots, growing = pool.extend(wanted)
            with _undoing(lambda: pool.retract(wanted, growing)):
                self._write(pages, slots, k, v)
            self._publish(pool, growing)

    def fork(self, row: int) -> int:
        """Copy `row` to a new row and return its number: full pages are shared, a partial last page is copied.

        Raises ValueError if `row` is inactive, or no row or page is free.
        """
        pool = self._owned_pool("fork")
        row = self._check_row(row)
        child = pool.fork(row)
        n_full, n_partial = divmod(int(pool.lengths[row]), self.page_size)
        if n_partial:
            source, target = pool.table[row, n_full], pool.table[child, n_full]
            with _undoing(lambda: pool.close(child)), torch.no_grad():
                for x in (self.k_nhd, self.v_nhd):
                    x[target, :n_partial] = x[source, :n_partial]
        self._publish(pool, [child])
        return child

    def free(self, row: int) -> None:
        """Give `row` and its pages back; pages that a fork shares stay. Raises ValueError if `row` is inactive."""
        pool = self._owned_pool("free")
        pool.close(self._check_row(row))
        self._publish(pool, [row])

    @classmethod
    def _owning(
        cls, pool: PagePool, n_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, layout: str
    ) -> PagedKVCache:
        inner = (n_kv_heads, pool.page_size) if layout == "HND" else (pool.page_size, n_kv_heads)
        with torch.inference_mode(False):  # tensors made in inference mode cannot be written outside of it
            shape = (pool.n_pages, *inner, head_dim)
            k_pages, v_pages = (torch.zeros(shape, dtype=dtype, device=device) for _ in "kv")
            cache = cls(k_pages, v_pages, upload(pool.table, device), upload(pool.lengths, device), layout)
        cache._pool = pool
        return cache

    def _owned_pool(self, method: str) -> PagePool:
        """The pool, provided that there is one and that nobody has edited the tables it keeps."""
        pool, edits = self._pool, self._count_edits()
        if pool is None:
            raise ValueError(
                f"{method}: this cache was built from tensors and does not own its pages: write pages, block_table and "
                "lengths yourself, or build the cache with PagedKVCache.empty or PagedKVCache.from_dense"
            )
        # numpy can edit CPU tensors uncounted; on a GPU only a counted edit is worth waiting for the values.
        if self.device.type == "cpu" or edits != self._seen_edits:
            row = pool.edited_row(self.block_table.cpu().numpy(), self.lengths.cpu().numpy())
            if row is not None:
                raise ValueError(
                    f"{method}: row {row} of lengths or block_table was edited in place, so its pages are unknown: "
                    "undo the edit, or pass the tensors to PagedKVCache(...) and manage them yourself"
                )
            self._seen_edits = edits
        return pool

    def _write(self, pages: np.ndarray, slots: np.ndarray, k: Tensor, v: Tensor) -> None:
        page_ids, slot_ids = upload(np.stack([pages, slots]).astype(np.int64), self.device)
        with torch.no_grad():
            # what is a view of the pages, such as a page to copy, is copied first
            k, v = (x.clone() if self._shares_pages(x) else x for x in (k, v))
            self.k_nhd[page_ids, slot_ids] = k
            self.v_nhd[page_ids, slot_ids] = v

    def _shares_pages(self, x: Tensor) -> bool:
        pools = [pages.untyped_storage().data_ptr() for pages in (self.k_pages, self.v_pages)]
        return self.device.type != "meta" and x.untyped_storage().data_ptr() in pools

    def _publish(self, pool: PagePool, rows: Sequence[int] | np.ndarray) -> None:
        """Bring the table of `rows` and all lengths to the device, in place and without waiting for it."""
        if len(rows):
            self.block_table[upload(np.asarray(rows), self.device)] = upload(pool.table[rows], self.device)
        self.lengths.copy_(upload(pool.lengths, self.device))
        self._seen_edits = self._count_edits()
        self.version += 1

    def _check_new_tokens(self, k: Tensor, v: Tensor, n_tokens: int | str) -> None:
        check_tensor("k", k, (n_tokens, self.n_kv_heads, self.head_dim), self.dtype, self.device)
        check_tensor("v", v, k.shape, self.dtype, self.device)


@contextmanager
def _undoing(undo: Callable[[], None]) -> Iterator[None]:
    """Undo what the pool has noted already if writing the pages fails, for want of memory, say."""
    try:
        yield
    except BaseException:
        undo()
        raise

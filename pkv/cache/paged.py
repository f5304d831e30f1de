"""The paged KV cache: a pool of fixed-size pages holds K and V, and a block table lists the pages of each row.

Example, page size 4, lengths 3 and 10 (`PagedKVCache.from_dense(k, v, [3, 10], page_size=4)`):

    block_table              pages
    row 0: [0, -, -]         0: tokens 0..2 of row 0, one unused slot
    row 1: [1, 2, 3]         1: tokens 0..3 of row 1    2: tokens 4..7    3: tokens 8 and 9, two unused slots

Token 9 of row 1 lies in page `block_table[1, 9 // 4]` = 3, slot `9 % 4` = 1. Unused slots and table entries past a
row's pages may hold anything and never reach a result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from pkv.cache.pool import (
    PagePool,
    check_agreement,
    csr_positions,
    last_page_lengths,
    pages_before,
    pages_used,
    undone_on_error,
)
from pkv.runtime.tracers import refuse_tracers
from pkv.wording.checks import LONGEST_ROW, Ints, at_least, check_tensor, dtype_named, host_ints
from pkv.wording.counts import count_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # float64 is for the reference only
NOBODY_CHANGES_IT = nullcontext()  # a cache that does not own its pages
FIXED = ("k_pages", "v_pages", "block_table", "lengths", "layout")
NOT_OWNED = """this cache was built from tensors and does not own its pages: write pages, block_table and lengths \
yourself, or build the cache with PagedKVCache.empty or PagedKVCache.from_dense"""


class PagedKVCache:
    """K and V of a batch of rows, stored in pages, with the block table that finds them.

    k_pages, v_pages: [n_pages, page_size, n_kv_heads, head_dim] for layout "NHD", [n_pages, n_kv_heads, page_size,
    head_dim] for "HND"; float16, bfloat16 or float32 (float64 for the reference); any strides. block_table: int32
    [n_rows, max_pages], page ids. lengths: int32 [n_rows], tokens. All on one device; nothing is copied.

    host_lengths: int [n_rows], the same lengths on the host, so that planning need not wait for a GPU. Pass them if you
    know them; `validate()` checks that they agree.

    This constructor makes a cache over tensors that someone else manages. `empty` and `from_dense` make one that owns
    its pages and can `add`, `append`, `fork`, `release_before` and `free` rows. Each of these methods either succeeds
    or raises ValueError with nothing changed. It does not wait for a GPU, and it adds 1 to `version`. All run on the
    host: do not capture them in a CUDA graph. They store values only: no gradient flows back through them.

    Several threads may change, read and decode one cache; each waits for its turn. On a GPU a turn ends when its work
    has been launched: the caller orders the streams. To make several reads agree, or to pickle or copy the cache, keep
    changes out by `with cache.unchanged():`. If a process forks while another thread changes the cache, the child
    refuses to use it.

    The time of a change depends on what it changes, not on the size of the pool. A change is refused if the tables were
    edited in place. Every edit that torch counts (`cache.lengths += 1`) is noticed. On a CPU so are edits that torch
    does not see (by `.numpy()`, or a kernel of your own), if they lie in any length, in the last page of a row that
    `append` extends, or in any page of the row that `fork` or `free` is given.

    Raises TypeError or ValueError naming the argument and the remedy. Values are checked by `validate()`.
    """

    _pool: PagePool | None = None  # the pages, table and lengths of a cache that owns them

    def __init__(
        self,
        k_pages: Tensor,
        v_pages: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        layout: str = "NHD",
        host_lengths: Ints | None = None,
    ) -> None:
        _check_arguments(k_pages, v_pages, block_table, lengths, layout)
        self.k_pages, self.v_pages, self.layout = k_pages, v_pages, layout
        self.block_table, self.lengths = block_table, lengths
        self.n_pages, self.page_size, self.n_kv_heads, self.head_dim = self.k_nhd.shape
        self.n_rows, self.max_pages = block_table.shape
        self.capacity = self.max_pages * self.page_size  # tokens that one row can hold
        self.dtype, self.device = k_pages.dtype, k_pages.device
        self.version = 0
        self._seen_edits = self._count_edits()
        self._given_lengths: np.ndarray | None = None
        if host_lengths is not None:
            self._given_lengths = known = host_ints("host_lengths", host_lengths)
            if known.size != self.n_rows:
                raise ValueError(
                    f"host_lengths has {count_of(known.size, 'entry')}, expected {self.n_rows}: pass one per row"
                )
            pages_used(known, self.page_size, self.max_pages, name="host_lengths")
            if self.device.type == "cpu":
                check_agreement(known, lengths.numpy())

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
        """Make a cache that owns `n_pages` free pages and `max_rows` rows, each inactive (length 0) until it is added.

        max_pages: columns of the block table. A row holds at most max_pages * page_size tokens; by default a row may
        take the whole pool.
        """
        n_pages, page_size = at_least(1, "n_pages", n_pages), at_least(1, "page_size", page_size)
        n_kv_heads, head_dim = at_least(1, "n_kv_heads", n_kv_heads), at_least(1, "head_dim", head_dim)
        max_pages = n_pages if max_pages is None else at_least(1, "max_pages", max_pages)
        pool = PagePool(n_pages, page_size, at_least(0, "max_rows", max_rows), max_pages)
        return cls._owning(pool, n_kv_heads, head_dim, dtype_named(dtype), torch.device(device), layout)

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
        """Make an owning cache from k, v [n_rows, max_len, n_kv_heads, head_dim]: of row i the first lengths[i] tokens.

        seed: shuffles the page ids (torch's global generator is not touched). By default the cache has exactly as many
        pages, columns and rows as it needs. More of them leave room for `append`, `add` and `fork`; the table gets one
        more column for each free page unless max_pages is given. Lengths on a GPU are copied to the host first.
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
        """Store k and v [len, n_kv_heads, head_dim] as a new row and return its number; len may be 0.

        Raises ValueError if no row is free, or if pages or table columns are too few.
        """
        with self._changing("add") as pool:
            self._check_new_tokens(k, v, "len")
            row, tokens = pool.open(len(k)), np.arange(len(k))
            with undone_on_error(lambda: pool.close(row)):
                self._write(pool.table[row, tokens // self.page_size], tokens % self.page_size, k, v)
            self._publish(pool, row, pool.columns_of(row))
            return row

    def append(self, k: Tensor, v: Tensor, rows: Ints | None = None) -> None:
        """Append one token to each of `rows`, in place: k and v [len(rows), n_kv_heads, head_dim].

        Without `rows`, k and v are [n_rows, n_kv_heads, head_dim], and inactive rows are skipped. Raises ValueError if
        a row repeats, is inactive or is full, or if free pages are too few. `rows` on a GPU are copied to the host.
        """
        with self._changing("append") as pool:
            if rows is None:
                self._check_new_tokens(k, v, self.n_rows)
                wanted = np.flatnonzero(pool.active)
                if wanted.size < self.n_rows:
                    k, v = (x[upload(wanted, self.device)] for x in (k, v))
            else:
                wanted = np.array([self._check_row(row) for row in host_ints("rows", rows)], dtype=np.int64)
                self._refuse_repeated(wanted, "append one token to it at a time")
                self._check_new_tokens(k, v, wanted.size)
            if wanted.size:
                begun = wanted[pool.lengths[wanted] > 0]
                self._check_entries_of("append", pool, begun, (pool.lengths[begun] - 1) // self.page_size)
                pages, slots, growing = pool.extend(wanted)
                with undone_on_error(lambda: pool.retract(wanted, growing)):
                    self._write(pages, slots, k, v)
                self._publish(pool, growing, (pool.lengths[growing] - 1) // self.page_size)

    def fork(self, row: int) -> int:
        """Copy `row` to a new row and return its number. Full pages are shared; a partial last page is copied.

        Raises ValueError if `row` is inactive, or no row or page is free.
        """
        with self._changing("fork") as pool:
            row = self._check_row(row)
            self._check_entries_of("fork", pool, row, pool.columns_of(row))
            child = pool.fork(row)
            n_full, n_partial = divmod(int(pool.lengths[row]), self.page_size)
            if n_partial:
                source, target = pool.table[row, n_full], pool.table[child, n_full]
                with undone_on_error(lambda: pool.close(child)), torch.no_grad():
                    for x in (self.k_nhd, self.v_nhd):
                        x[target, :n_partial] = x[source, :n_partial]
            self._publish(pool, child, pool.columns_of(child))
            return child

    def free(self, row: int) -> None:
        """Free `row` and its pages, except pages that a fork shares. Raises ValueError if `row` is inactive."""
        with self._changing("free") as pool:
            row = self._check_row(row)
            columns = pool.columns_of(row)
            self._check_entries_of("free", pool, row, columns)
            pool.close(row)
            self._publish(pool, row, columns)

    def release_before(self, rows: Ints, positions: Ints) -> None:
        """Give back the pages of each of `rows` that hold only tokens before its entry of `positions`.

        With a window, no later query sees the tokens before length + 1 - window. Their pages become free, except pages
        that a fork shares, and their table entries become -1. Afterwards the row can only be decoded, or gathered, with
        a window that does not reach them. Raises ValueError if a row repeats or is inactive, or if a position is
        outside of its row.
        """
        with self._changing("release_before") as pool:
            wanted = np.array([self._check_row(row) for row in host_ints("rows", rows)], dtype=np.int64)
            before = host_ints("positions", positions)
            if before.size != wanted.size:
                raise ValueError(
                    f"positions has {count_of(before.size, 'entry')}, rows {wanted.size}: pass one per row"
                )
            self._refuse_repeated(wanted, "release_before takes one position for a row")
            for row, position in zip(wanted.tolist(), before.tolist(), strict=True):
                if not 0 <= position <= pool.lengths[row]:
                    raise ValueError(
                        f"position {position} of row {row} is outside [0, {pool.lengths[row]}]: pass the number of its "
                        "tokens that no query will see"
                    )
                self._check_entries_of("release_before", pool, row, pool.columns_of(row))
            self._publish(pool, *pool.release(wanted, before // self.page_size))

    def check_window(self, window: int | None, row: int | None = None) -> None:
        """Raise ValueError if a query with this window would see tokens that release_before gave back.

        row: the only row that is asked; None: all.
        """
        pool, asked = self._pool, LONGEST_ROW if window is None else window
        if pool is None or asked <= pool.narrowest:
            return
        widest = pool.widest_windows()
        pool.narrowest = widest.min(initial=LONGEST_ROW)
        bad = np.flatnonzero(np.minimum(pool.lengths, asked) > widest)
        for first in bad[:1] if row is None else bad[bad == row]:
            gone = count_of(int(pool.released[first]) * self.page_size, "token")
            raise ValueError(
                f"row {first} has released its first {gone} of {pool.lengths[first]}: "
                f"pass window={widest[first]} or less"
            )

    @property
    def k_nhd(self) -> Tensor:
        """k_pages as a view in NHD order, whatever the layout. Kernels too take shapes and strides from it."""
        return self.k_pages if self.layout == "NHD" else self.k_pages.transpose(1, 2)

    @property
    def v_nhd(self) -> Tensor:
        """v_pages as a view in NHD order, whatever the layout."""
        return self.v_pages if self.layout == "NHD" else self.v_pages.transpose(1, 2)

    def __getstate__(self) -> dict[str, Any]:
        in_step = self._count_edits() == self._seen_edits
        return {**self.__dict__, "_seen_edits": None if in_step else (-1, -1)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if state["_seen_edits"] is None:  # a copy counts its edits anew
            self._seen_edits = self._count_edits()

    @property
    def n_free_pages(self) -> int | None:
        """Number of free pages, for `add`, `append` and `fork`; None for a cache that does not own its pages."""
        return None if self._pool is None else len(self._pool.free_pages)

    @property
    def active_rows(self) -> list[int]:
        """Rows in use, which `append` extends by default; every row of a cache that does not own its pages."""
        return list(range(self.n_rows)) if self._pool is None else np.flatnonzero(self._pool.active).tolist()

    @property
    def host_lengths(self) -> np.ndarray | None:
        """The lengths as a read-only int32 copy [n_rows], or None if only the GPU knows them. Never waits for a GPU.

        On a CPU they are read from `lengths`. On a GPU they are the ones that were given, or that this cache's own
        methods keep, until `lengths` is edited in place. An edit that torch does not count goes unnoticed: an edit by a
        replayed CUDA graph, by a kernel of your own, or of a tensor made in inference mode. Do not pass host_lengths if
        you edit lengths that way.
        """
        refuse_tracers("host_lengths", lengths=self.lengths)
        with self.unchanged():
            known = self._given_lengths if self._pool is None else self._pool.lengths
            if self.device.type == "cpu":
                known = self.lengths.numpy()
            elif known is None or self._count_edits()[1] != self._seen_edits[1]:
                return None
            copy = np.array(known, dtype=np.int32)
        copy.flags.writeable = False
        return copy

    def unchanged(self) -> AbstractContextManager[None]:
        """Keep the rows as they are: inside `with cache.unchanged():`, other threads wait before they change a row.

        Only a cache that owns its pages can be changed.
        """
        return NOBODY_CHANGES_IT if self._pool is None else self._pool.unchanged()

    def validate(self, window: int | None = None) -> None:
        """Check the values of lengths, host_lengths and the used entries of the block table; waits for a GPU.

        window: entries of pages that lie before each row's last `window` tokens may hold anything. Raises ValueError
        such as "lengths[3] = 70 needs 5 pages of 16, block table has 4: ...".
        """
        with self.unchanged():
            known, lengths = self.host_lengths, self.lengths.cpu().numpy()
            if known is not None:
                check_agreement(known, lengths)
            n_used = pages_used(lengths, self.page_size, self.max_pages)
            self._check_entries(n_used, first=pages_before(lengths, self.page_size, window))

    def gather(self, row: int, window: int | None = None) -> tuple[Tensor, Tensor]:
        """Return copies of the row's k and v [len, n_kv_heads, head_dim], in token order.

        window: only the last `window` tokens, or all if the row has no more. Waits for the GPU if `host_lengths` is
        None.
        """
        with self.unchanged():
            row = self._check_row(row)
            self.check_window(window, row)
            length, n_used = self._lengths_and_pages(row, row + 1, window)
            first = pages_before(length, self.page_size, window)[0]
            n_seen = int(length[0]) if window is None else min(int(length[0]), window)
            pages, end = self.block_table[row, first : n_used[0]].long(), int(length[0]) - first * self.page_size
            k, v = (x[pages].flatten(0, 1)[end - n_seen : end] for x in (self.k_nhd, self.v_nhd))
            return k, v

    def to_csr(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return FlashInfer's CSR form of the table: indptr [n_rows + 1], indices [indptr[-1]], last_page_len [n_rows].

        All are int32. Row i has the pages indices[indptr[i]:indptr[i + 1]]. A full last page has last_page_len
        page_size; an empty row has no pages and last_page_len 0. Lengths 3 and 10 with page size 4 give ([0, 1, 4],
        [0, 1, 2, 3], [3, 2]). Waits for the GPU if `host_lengths` is None.
        """
        with self.unchanged():
            lengths, n_used = self._lengths_and_pages(0, self.n_rows)
            indptr, rows, columns = csr_positions(n_used)
            last_page_len = np.where(lengths > 0, last_page_lengths(lengths, self.page_size), 0)
            row_ids, column_ids = upload(np.stack([rows, columns]), self.device)
            ends, last = (upload(x.astype(np.int32), self.device) for x in (indptr, last_page_len))
            return ends, self.block_table[row_ids, column_ids], last

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Return a cache over converted tensors, which does not own its pages; unconverted tensors are shared."""
        dtype = None if dtype is None else dtype_named(dtype)
        k_pages, v_pages = (x.to(device=device, dtype=dtype) for x in (self.k_pages, self.v_pages))
        block_table, lengths = (x.to(device=device) for x in (self.block_table, self.lengths))
        return type(self)(k_pages, v_pages, block_table, lengths, self.layout, self.host_lengths)

    def __repr__(self) -> str:
        n_free = self.n_free_pages
        pages = "not owned" if n_free is None else f"{self.n_pages - n_free} used, {n_free} free"
        return (
            f"{type(self).__name__}({count_of(self.n_rows, 'row')}, {count_of(self.n_pages, 'page')} of "
            f"{self.page_size} ({pages}), {count_of(self.n_kv_heads, 'KV head')} x {self.head_dim}, "
            f"{self.layout}, {self.dtype}, {self.device})"
        )

    def __str__(self) -> str:
        lengths, lines = self.host_lengths, [repr(self)]
        if lengths is None:
            return lines[0]
        table = None if self._pool is None else self._pool.table
        if self.device.type == "cpu":
            table = self.block_table.numpy()
        for row in self.active_rows[:8]:
            n_used = max(0, -(-int(lengths[row]) // self.page_size))
            pages = "" if table is None else f", pages {', '.join(map(str, table[row, :n_used][:12]))}"
            lines.append(f"  row {row}: {count_of(lengths[row], 'token')}{pages}{', ...' if n_used > 12 else ''}")
        return "\n".join([*lines, "  ..."] if len(self.active_rows) > 8 else lines)

    def __setattr__(self, name: str, value: Any) -> None:
        # `cache.lengths += 1` assigns the same tensor again. A different one would escape checks and captured graphs.
        if name in FIXED and self.__dict__.get(name, value) is not value:
            raise AttributeError(f"cache.{name} cannot be replaced: write into it, or build a new PagedKVCache")
        super().__setattr__(name, value)

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

    @contextmanager
    def _changing(self, method: str) -> Iterator[PagePool]:
        """Hold the pool for this thread alone until the change is done; ValueError if it must not be changed."""
        refuse_tracers(method)
        pool = self._pool
        if pool is None:
            raise ValueError(f"{method}: {NOT_OWNED}")
        with self.unchanged():
            edits = self._count_edits()
            is_counted = edits != self._seen_edits
            if is_counted or self.device.type == "cpu":  # reading values waits for a GPU: only after a counted edit
                table = self.block_table.cpu().numpy() if is_counted else None
                pool.check(method, self.lengths.cpu().numpy(), table)
                self._seen_edits = edits
            with pool.changing():
                yield pool

    def _check_entries_of(self, method: str, pool: PagePool, rows: int | np.ndarray, columns: np.ndarray) -> None:
        if self.device.type == "cpu":  # numpy may have edited them, which torch does not count
            pool.check_entries(method, self.block_table.numpy(), rows, columns)

    def _write(self, pages: np.ndarray, slots: np.ndarray, k: Tensor, v: Tensor) -> None:
        page_ids, slot_ids = upload(np.stack([pages, slots]).astype(np.int64), self.device)
        if self.device.type != "meta":  # k and v that are views of the pages are copied first
            pools = [x.untyped_storage().data_ptr() for x in (self.k_pages, self.v_pages)]
            k, v = (x.clone() if x.untyped_storage().data_ptr() in pools else x for x in (k, v))
        with torch.no_grad():
            self.k_nhd[page_ids, slot_ids] = k
            self.v_nhd[page_ids, slot_ids] = v

    def _publish(self, pool: PagePool, rows: int | np.ndarray, columns: np.ndarray) -> None:
        """Copy these entries of the table and all lengths to the device, in place and without waiting for it."""
        if columns.size:
            entries = [np.broadcast_to(rows, columns.shape), columns, pool.table[rows, columns]]
            row_ids, column_ids, pages = upload(np.stack(entries).astype(np.int64), self.device)
            self.block_table[row_ids, column_ids] = pages.int()
        self.lengths.copy_(upload(pool.lengths, self.device))
        self._seen_edits = self._count_edits()
        self.version += 1

    def _check_new_tokens(self, k: Tensor, v: Tensor, n_tokens: int | str) -> None:
        check_tensor("k", k, (n_tokens, self.n_kv_heads, self.head_dim), self.dtype, self.device)
        check_tensor("v", v, k.shape, self.dtype, self.device)

    def _count_edits(self) -> tuple[int, int]:
        table, lengths = (0 if x.is_inference() else x._version for x in (self.block_table, self.lengths))
        return table, lengths

    def _lengths_and_pages(self, begin: int, end: int, window: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return lengths and page counts of rows [begin, end); wait for a GPU if the host does not know the lengths."""
        refuse_tracers("reading a row's pages", lengths=self.lengths, k_pages=self.k_pages, v_pages=self.v_pages)
        known = self.host_lengths
        lengths = (self.lengths.cpu().numpy() if known is None else known)[begin:end]
        n_used = pages_used(lengths, self.page_size, self.max_pages, begin)
        if self.device.type == "cpu":
            self._check_entries(n_used, begin, pages_before(lengths, self.page_size, window))
        return lengths, n_used

    def _check_entries(self, n_used: np.ndarray, begin: int = 0, first: np.ndarray | int = 0) -> None:
        """Raise if a used table entry of the rows from `begin` on is not a page of the pool; waits for a GPU.

        first: of each row, the first entry that must be one.
        """
        if self._pool is not None:
            first = np.maximum(first, self._pool.released[begin : begin + len(n_used)])
        table = self.block_table[begin : begin + len(n_used), : int(n_used.max(initial=0))]
        bounds = upload(np.stack([np.broadcast_to(first, n_used.shape), n_used]), self.device)[:, :, None]
        columns = torch.arange(table.shape[1], device=self.device)
        used = (columns >= bounds[0]) & (columns < bounds[1])
        bad = (used & ((table < 0) | (table >= self.n_pages))).nonzero()
        if len(bad):
            row, column = bad[0].tolist()
            raise ValueError(
                f"block_table[{begin + row}, {column}] = {int(table[row, column])} is outside the pool "
                f"of {count_of(self.n_pages, 'page')}: row {begin + row} uses {count_of(n_used[row], 'entry')}, all in "
                f"[0, {self.n_pages})"
            )

    def _refuse_repeated(self, rows: np.ndarray, remedy: str) -> None:
        repeated = rows[np.bincount(rows)[rows] > 1]
        if repeated.size:
            raise ValueError(f"rows names row {repeated[0]} more than once: {remedy}")

    def _check_row(self, row: int) -> int:
        row = at_least(0, "row", row)
        if row >= self.n_rows:
            raise ValueError(f"row = {row} is outside [0, {self.n_rows}): pass a row of this cache")
        if self._pool is not None and not self._pool.active[row]:
            raise ValueError(f"row {row} is not active: pass a row that was added or forked and not freed since")
        return row


def _check_arguments(k_pages: Tensor, v_pages: Tensor, block_table: Tensor, lengths: Tensor, layout: str) -> None:
    if layout not in ("NHD", "HND"):
        raise ValueError(f'layout = {layout!r} is unknown: pass "NHD" or "HND"')
    inner = ("page_size", "n_kv_heads") if layout == "NHD" else ("n_kv_heads", "page_size")
    check_tensor("k_pages", k_pages, ("n_pages", *inner, "head_dim"))
    if k_pages.dtype not in DTYPES:
        raise TypeError(f"k_pages is {k_pages.dtype}: pages hold float16, bfloat16, float32 or float64")
    if 0 in k_pages.shape[1:]:
        raise ValueError(f"k_pages has shape {list(k_pages.shape)}: only the number of pages may be 0")
    check_tensor("v_pages", v_pages, k_pages.shape, k_pages.dtype, k_pages.device)
    # A table that needs converting is refused: the copy would miss its owner's later edits in place.
    check_tensor("block_table", block_table, ("n_rows", "max_pages"), torch.int32, k_pages.device)
    check_tensor("lengths", lengths, (len(block_table),), torch.int32, k_pages.device)


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy `array` to `device` without waiting for a GPU."""
    copy = torch.from_numpy(np.array(array))
    if device.type == "cuda":
        copy = copy.pin_memory()  # torch waits for the GPU on every copy from pageable memory
    return copy.to(device, non_blocking=True)

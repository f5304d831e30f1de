"""K and V in pages, as tensors that somebody manages: what every reader of a paged KV cache needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from pkv.cache.pool import PagePool, check_agreement, csr_positions, last_page_lengths, pages_used
from pkv.checks import Ints, at_least, check_tensor, host_ints
from pkv.plans.shape import dtype_named
from pkv.runtime.tracers import refuse_tracers
from pkv.wording import count_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # float64 serves the reference only
FIXED = ("k_pages", "v_pages", "block_table", "lengths", "layout")
FOUND_OUT = ("_kernel_args", "_ready")  # by calls that came before; a copy finds it out again


class PagedTensors:
    """Pages, block table and lengths, checked. PagedKVCache, which documents them, adds the owning of pages."""

    _pool: PagePool | None = None  # keeps pages, table and lengths of a cache that owns them

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

    @property
    def k_nhd(self) -> Tensor:
        """k_pages in NHD order whatever the layout: everybody, kernels too, takes shapes and strides from this view."""
        return self.k_pages if self.layout == "NHD" else self.k_pages.transpose(1, 2)

    @property
    def v_nhd(self) -> Tensor:
        """v_pages in NHD order."""
        return self.v_pages if self.layout == "NHD" else self.v_pages.transpose(1, 2)

    def __getstate__(self) -> dict[str, Any]:
        in_step = self._count_edits() == self._seen_edits
        kept = {name: value for name, value in self.__dict__.items() if name not in FOUND_OUT}
        return {**kept, "_seen_edits": None if in_step else (-1, -1)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if state["_seen_edits"] is None:  # a copy counts its edits anew
            self._seen_edits = self._count_edits()

    @property
    def n_free_pages(self) -> int | None:
        """Pages left for `add`, `append` and `fork`; None for a cache that does not own its pages."""
        return None if self._pool is None else len(self._pool.free_pages)

    @property
    def active_rows(self) -> list[int]:
        """Rows in use, those that `append` extends; every row of a cache that does not own its pages."""
        return list(range(self.n_rows)) if self._pool is None else np.flatnonzero(self._pool.active).tolist()

    @property
    def host_lengths(self) -> np.ndarray | None:
        """The lengths as a read-only int32 copy, or None where only the GPU knows them. Never waits for a GPU.

        On a CPU they are read from `lengths`. On a GPU they are those given, or kept by this cache's own methods, until
        `lengths` is edited in place. An edit that torch does not count goes unnoticed: by a replayed CUDA graph, by a
        kernel of your own, or to a tensor made in inference mode. Give no host_lengths for lengths edited that way.
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

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """`with cache.unchanged():` other threads wait before they change the rows of a cache that owns its pages."""
        pool = self._pool
        if pool is None:
            yield
            return
        with pool.lock:
            if pool.is_changing:
                raise ValueError(
                    "this process was forked while another thread was changing the cache, so what its rows hold is "
                    "unknown here: build it anew, or fork while no thread changes it"
                )
            yield

    def validate(self) -> None:
        """Check the values of lengths, host_lengths and used table entries; waits for a GPU.

        Raises ValueError such as "lengths[3] = 70 needs 5 pages of 16, block table has 4: ...".
        """
        with self.unchanged():
            known, lengths = self.host_lengths, self.lengths.cpu().numpy()
            if known is not None:
                check_agreement(known, lengths)
            self._check_entries(pages_used(lengths, self.page_size, self.max_pages))

    def gather(self, row: int) -> tuple[Tensor, Tensor]:
        """Copies of the row's k and v [len, n_kv_heads, head_dim], in token order.

        On a GPU this waits for it if `host_lengths` is None.
        """
        with self.unchanged():
            row = self._check_row(row)
            length, n_used = self._lengths_and_pages(row, row + 1)
            pages = self.block_table[row, : n_used[0]].long()
            k, v = (x[pages].flatten(0, 1)[: length[0]] for x in (self.k_nhd, self.v_nhd))
            return k, v

    def to_csr(self) -> tuple[Tensor, Tensor, Tensor]:
        """The table in FlashInfer's form: int32 (indptr [n_rows + 1], indices [indptr[-1]], last_page_len [n_rows]).

        Row i has pages indices[indptr[i]:indptr[i + 1]]. A full last page has last_page_len page_size, an empty row no
        pages and 0. Lengths 3 and 10 with page size 4: ([0, 1, 4], [0, 1, 2, 3], [3, 2]). On a GPU this waits for it
        if `host_lengths` is None.
        """
        with self.unchanged():
            lengths, n_used = self._lengths_and_pages(0, self.n_rows)
            indptr, rows, columns = csr_positions(n_used)
            last_page_len = np.where(lengths > 0, last_page_lengths(lengths, self.page_size), 0)
            row_ids, column_ids = upload(np.stack([rows, columns]), self.device)
            ends, last = (upload(x.astype(np.int32), self.device) for x in (indptr, last_page_len))
            return ends, self.block_table[row_ids, column_ids], last

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """A cache over converted pages that owns none of them; what needs no conversion is shared, not copied."""
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
        # `cache.lengths += 1` assigns the same tensor again; another one would escape the checks and captured graphs.
        if name in FIXED and self.__dict__.get(name, value) is not value:
            raise AttributeError(f"cache.{name} cannot be replaced: write into it, or build a new PagedKVCache")
        super().__setattr__(name, value)

    def _count_edits(self) -> tuple[int, int]:
        table, lengths = (0 if x.is_inference() else x._version for x in (self.block_table, self.lengths))
        return table, lengths

    def _lengths_and_pages(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Lengths and page counts of rows [begin, end); waits for a GPU if the host does not know the lengths."""
        refuse_tracers("reading a row's pages", lengths=self.lengths, k_pages=self.k_pages, v_pages=self.v_pages)
        known = self.host_lengths
        lengths = (self.lengths.cpu().numpy() if known is None else known)[begin:end]
        n_used = pages_used(lengths, self.page_size, self.max_pages, begin)
        if self.device.type == "cpu":
            self._check_entries(n_used, begin)
        return lengths, n_used

    def _check_entries(self, n_used: np.ndarray, begin: int = 0) -> None:
        """Raise if a used table entry of the rows from `begin` on is no page of the pool; waits for a GPU."""
        table = self.block_table[begin : begin + len(n_used), : int(n_used.max(initial=0))]
        used = torch.arange(table.shape[1], device=self.device) < upload(n_used, self.device)[:, None]
        bad = (used & ((table < 0) | (table >= self.n_pages))).nonzero()
        if len(bad):
            row, column = bad[0].tolist()
            raise ValueError(
                f"block_table[{begin + row}, {column}] = {int(table[row, column])} is outside the pool "
                f"of {count_of(self.n_pages, 'page')}: row {begin + row} uses {count_of(n_used[row], 'entry')}, all in "
                f"[0, {self.n_pages})"
            )

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
    # Converting a table would copy it, and its owner's later edits in place would be lost: refuse.
    check_tensor("block_table", block_table, ("n_rows", "max_pages"), torch.int32, k_pages.device)
    check_tensor("lengths", lengths, (len(block_table),), torch.int32, k_pages.device)


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of `array` on `device`, without waiting for a GPU."""
    copy = torch.from_numpy(np.array(array))
    if device.type == "cuda":
        copy = copy.pin_memory()  # torch waits for the GPU on every copy from pageable memory
    return copy.to(device, non_blocking=True)

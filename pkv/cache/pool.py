"""The page pool, in numpy on the host: which pages a row uses, and which rows own a page.

Nothing here needs the device, so a cache on a GPU can change its rows without waiting for it. Every method of
`PagePool` checks before it changes anything, so an error leaves everything as it was.

Example: 4 pages of 4 tokens. `open(10)` gives row 0 pages 0, 1, 2. `fork(0)` gives row 1 pages 0, 1, 3: the two full
pages are shared (`ref_counts` 2), and page 3 is to receive the 2 tokens of page 2. The pool is now full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from pkv.runtime.locks import Lock
from pkv.wording.checks import LONGEST_ROW
from pkv.wording.counts import count_of, verb

UNUSED = -1  # held by unused table entries of an owning cache; never read, but visible when printed


def pages_used(
    lengths: np.ndarray, page_size: int, max_pages: int, begin: int = 0, name: str = "lengths"
) -> np.ndarray:
    """Return the pages that each row uses, int64 [n_rows]; ValueError for a length that is negative or does not fit.

    Errors number the rows from `begin`.
    """
    lengths = lengths.astype(np.int64)
    n_used = -(-lengths // page_size)
    bad = np.flatnonzero((lengths < 0) | (n_used > max_pages) | (lengths > LONGEST_ROW))
    if bad.size:
        length, n, entry = lengths[bad[0]], n_used[bad[0]], f"{name}[{begin + bad[0]}]"
        if length < 0:
            raise ValueError(f"{entry} = {length} is negative: a row holds 0 tokens or more")
        if n <= max_pages:
            raise ValueError(f"{entry} = {length} is above {LONGEST_ROW}, the most tokens a row can hold")
        raise ValueError(
            f"{entry} = {length} needs {count_of(n, 'page')} of {page_size}, block table has {max_pages}: "
            f"give it {count_of(n, 'column')} or shorten the row"
        )
    return n_used


def pages_before(lengths: np.ndarray, page_size: int, window: int | None) -> np.ndarray:
    """Return the pages of each row that hold none of its last `window` tokens, int64 [n_rows]; None: all are in it.

    >>> pages_before(np.array([100, 30]), page_size=16, window=40).tolist()
    [3, 0]
    """
    lengths = lengths.astype(np.int64)
    return np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0) // page_size


def csr_positions(n_used: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return indptr [n_rows + 1], and the row and column of each used table entry [indptr[-1]], row after row."""
    indptr = np.concatenate([[0], np.cumsum(n_used)])
    rows = np.repeat(np.arange(n_used.size), n_used)
    return indptr, rows, np.arange(indptr[-1]) - indptr[rows]


def last_page_lengths(lengths: np.ndarray, page_size: int) -> np.ndarray:
    """Return the tokens in each row's last page, in [1, page_size]: page_size for a full page, 1 for an empty row.

    >>> last_page_lengths(np.array([3, 8, 0]), page_size=4).tolist()
    [3, 4, 1]
    """
    return (np.maximum(lengths, 1) - 1) % page_size + 1


class PagePool:
    """The free list, the reference counts, and the host's copy of the block table and the lengths.

    lock: held by code that changes the pool, or that needs it unchanged. is_changing: True while a change is under way;
    the holder of the lock finds it True only in a child that was forked during a change.
    """

    def __init__(
        self, n_pages: int, page_size: int, n_rows: int, max_pages: int, order: Iterable[int] | None = None
    ) -> None:
        self.n_pages, self.page_size, self.n_rows, self.max_pages = n_pages, page_size, n_rows, max_pages
        self.free_pages: deque[int] = deque(range(n_pages) if order is None else order)
        self.ref_counts = np.zeros(n_pages, np.int32)
        self.table = np.full((n_rows, max_pages), UNUSED, np.int32)
        self.lengths = np.zeros(n_rows, np.int32)
        self.active = np.zeros(n_rows, bool)
        self.released = np.zeros(n_rows, np.int64)  # pages at the beginning of each row that were given back
        self.narrowest = LONGEST_ROW  # at most the widest window that every row can still serve
        self.lock, self.is_changing = Lock(), False

    def columns_of(self, row: int) -> np.ndarray:
        """Return the table columns in which `row` has pages."""
        return np.arange(self.released[row], -(-self.lengths[row] // self.page_size))

    def open(self, length: int) -> int:
        """Activate the lowest free row, with pages for `length` tokens, and return its number."""
        row, n_used = self._free_row(), -(-length // self.page_size)
        tokens = f"{count_of(length, 'token')} {verb(length, 'need')}"
        need = f"row {row}: {tokens} {count_of(n_used, 'page')} of {self.page_size}"
        if n_used > self.max_pages:
            raise ValueError(
                f"{need}, block table has {self.max_pages}: "
                f"pass fewer tokens or build the cache with max_pages >= {n_used}"
            )
        self._require_pages(n_used, need)
        self.table[row, :n_used] = self._take(n_used)
        self.lengths[row], self.active[row] = length, True
        return row

    def extend(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Lengthen each of `rows` (distinct, active) by one token; return its page, its slot, and the rows that grew.

        A row grows if it gets a new page.
        """
        columns, slots = np.divmod(self.lengths[rows], self.page_size)
        overfull = rows[columns == self.max_pages]
        if overfull.size:
            row, n_tokens = overfull[0], self.lengths[overfull[0]] + 1
            raise ValueError(
                f"row {row}: {count_of(n_tokens, 'token')} {verb(n_tokens, 'need')} "
                f"{count_of(self.max_pages + 1, 'page')} of {self.page_size}, block table has {self.max_pages}: "
                f"free the row or build the cache with max_pages > {self.max_pages}"
            )
        # Only full pages are ever shared, so a row may write its partial page.
        starting = slots == 0
        growing, n_free = rows[starting], len(self.free_pages)
        if growing.size > n_free:
            need = f"{count_of(growing.size, 'row')} {verb(growing.size, 'need')} a new page each"
            self._require_pages(growing.size, f"row {growing[n_free]}: {need}")
        self.table[growing, columns[starting]] = self._take(growing.size)
        self.lengths[rows] += 1
        return self.table[rows, columns], slots, growing

    def retract(self, rows: np.ndarray, growing: np.ndarray) -> None:
        """Undo one `extend` of `rows`, in which the rows `growing` got a new page."""
        self.lengths[rows] -= 1
        columns = self.lengths[growing] // self.page_size
        pages = self.table[growing, columns]
        self.ref_counts[pages] = 0
        self.free_pages.extendleft(reversed(pages.tolist()))
        self.table[growing, columns] = UNUSED

    def fork(self, row: int) -> int:
        """Activate a free row that shares the full pages of `row`, with a new page for a partial last one."""
        child, length = self._free_row(), self.lengths[row]
        n_full, n_partial = length // self.page_size, int(length % self.page_size > 0)
        self._require_pages(n_partial, f"row {row}: its fork needs {n_partial} page for the partial last page")
        shared = self.table[row, self.released[row] : n_full]
        self.ref_counts[shared] += 1
        self.table[child, self.released[row] : n_full] = shared
        self.released[child] = self.released[row]
        self.table[child, n_full : n_full + n_partial] = self._take(n_partial)
        self.lengths[child], self.active[child] = length, True
        return child

    def close(self, row: int) -> None:
        """Deactivate `row`; its pages become free unless a fork still holds them."""
        self._give_back(row, self.columns_of(row))
        self.lengths[row], self.active[row], self.released[row] = 0, False, 0

    def release(self, rows: np.ndarray, n_pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Give back the first n_pages pages of each of `rows` (distinct, active); return the (rows, columns) of all."""
        columns = [np.arange(self.released[row], n) for row, n in zip(rows, n_pages, strict=True)]
        for row, mine in zip(rows, columns, strict=True):
            self._give_back(row, mine)
        self.released[rows] = np.maximum(self.released[rows], n_pages)
        self.narrowest = self.widest_windows().min(initial=LONGEST_ROW)
        return np.repeat(rows, [mine.size for mine in columns]), np.concatenate([*columns, np.zeros(0, np.int64)])

    def _give_back(self, row: int, columns: np.ndarray) -> None:
        """Free the pages in these columns of a row, unless a fork still holds them."""
        pages = self.table[row, columns]
        self.ref_counts[pages] -= 1
        self.free_pages.extend(pages[self.ref_counts[pages] == 0].tolist())
        self.table[row, columns] = UNUSED

    def widest_windows(self) -> np.ndarray:
        """Return the widest window that each row can still serve, int64 [n_rows]."""
        left = self.lengths - self.released * self.page_size
        return np.where(self.released > 0, left, LONGEST_ROW)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Mark the pool as being changed, inside a `with` block."""
        self.is_changing = True
        try:
            yield
        finally:
            self.is_changing = False

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Hold the lock, inside a `with` block; ValueError if a change was cut short by a fork."""
        with self.lock:
            if self.is_changing:
                raise ValueError(
                    "this process was forked while another thread was changing the cache, so what its rows hold is "
                    "unknown here: build it anew, or fork while no thread changes it"
                )
            yield

    def check(self, method: str, lengths: np.ndarray, table: np.ndarray | None) -> None:
        """Raise ValueError if `lengths`, or a used entry of `table` (if it is given), differs from the pool's own."""
        edited = lengths != self.lengths
        if table is not None:
            columns = slice(-(-self.lengths.max(initial=0) // self.page_size))
            used = np.arange(columns.stop) * self.page_size < self.lengths[:, None]
            edited |= ((table[:, columns] != self.table[:, columns]) & used).any(axis=1)
        self._refuse_edited(method, edited)

    def check_entries(self, method: str, table: np.ndarray, rows: int | np.ndarray, columns: np.ndarray) -> None:
        """Raise ValueError if one of these entries of `table` differs from the pool's own."""
        self._refuse_edited(method, table[rows, columns] != self.table[rows, columns], rows)

    def _refuse_edited(self, method: str, edited: np.ndarray, rows: int | np.ndarray | None = None) -> None:
        """Raise ValueError naming the first row that was edited. edited: bool [n], for `rows`, by default for all."""
        if edited.any():
            row = np.broadcast_to(np.arange(self.n_rows) if rows is None else rows, edited.shape)[edited.argmax()]
            raise ValueError(
                f"{method}: row {row} of lengths or block_table was edited in place, so its pages are unknown: "
                "undo the edit, or pass the tensors to PagedKVCache(...) and manage them yourself"
            )

    def _free_row(self) -> int:
        if self.active.all():
            raise ValueError(
                f"all {self.n_rows} rows are in use: free(row) one or build the cache with max_rows > {self.n_rows}"
            )
        return int(np.argmin(self.active))

    def _require_pages(self, n_needed: int, need: str) -> None:
        n_free = len(self.free_pages)
        n_missing = n_needed - n_free
        if n_missing > 0:
            raise ValueError(
                f"{need}, {n_free} of {count_of(self.n_pages, 'page')} {verb(n_free or self.n_pages, 'are')} free: "
                f"free(row) one or build the cache with n_pages >= {self.n_pages + n_missing}"
            )

    def _take(self, n: int) -> list[int]:
        pages = [self.free_pages.popleft() for _ in range(n)]
        self.ref_counts[pages] = 1
        return pages


def check_agreement(known: np.ndarray, lengths: np.ndarray) -> None:
    """Raise ValueError naming the first row whose length on the host differs from the one in the cache."""
    bad = np.flatnonzero(known != lengths)
    if bad.size:
        row = bad[0]
        raise ValueError(
            f"host_lengths[{row}] = {known[row]} differs from lengths[{row}] = {lengths[row]}: "
            "pass equal lengths, or host_lengths=None"
        )


@contextmanager
def undone_on_error(undo: Callable[[], None]) -> Iterator[None]:
    """Undo a change of the pool if writing the pages fails, for example for lack of memory."""
    try:
        yield
    except BaseException:
        undo()
        raise

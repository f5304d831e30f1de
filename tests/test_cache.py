"""PagedKVCache: every layout finds the right tokens, changes are atomic, host_lengths is right or None.

The meta device stands for a GPU: its values cannot be read, so a hidden wait for them is an error.
"""

from __future__ import annotations

import copy
import re
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pkv.cache.paged import PagedKVCache

PAGE_SIZES = (1, 3, 8, 16, 48)
HEADS, DIM = 2, 4


def numbered(*shape: int, start: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Every element different, so that a token, head or dim in the wrong place shows."""
    return (torch.arange(start, start + int(np.prod(shape))) + 1).reshape(shape).to(dtype)


def dense(lengths: list[int], max_len: int | None = None) -> tuple[Tensor, Tensor]:
    shape = (len(lengths), max(lengths, default=0) if max_len is None else max_len, HEADS, DIM)
    k = numbered(*shape)
    return k, -k


def edge_lengths(page_size: int) -> list[int]:
    return [0, 1, page_size - 1, page_size, page_size + 1, 3 * page_size + page_size // 2]


def assert_rows_equal(cache: PagedKVCache, k: Tensor, v: Tensor, lengths: list[int]) -> None:
    for row, length in enumerate(lengths):
        got_k, got_v = cache.gather(row)
        assert torch.equal(got_k, k[row, :length])
        assert torch.equal(got_v, v[row, :length])


def by_hand(cache: PagedKVCache, row: int, token: int) -> tuple[Tensor, Tensor]:
    """One token read by the definition of the layout, without the code under test."""
    page, slot = int(cache.block_table[row, token // cache.page_size]), token % cache.page_size
    if cache.layout == "NHD":
        return cache.k_pages[page, slot], cache.v_pages[page, slot]
    return cache.k_pages[page, :, slot], cache.v_pages[page, :, slot]


def tables(lengths: list[int], page_size: int, max_pages: int | None = None) -> tuple[Tensor, Tensor]:
    """Consecutive page ids, unused entries 0."""
    n_used = [-(-length // page_size) for length in lengths]
    table = torch.zeros(len(lengths), max_pages or max([1, *n_used]), dtype=torch.int32)
    for row, n in enumerate(n_used):
        table[row, :n] = sum(n_used[:row]) + torch.arange(n)
    return table, torch.tensor(lengths, dtype=torch.int32)


def borrowed(lengths: list[int], page_size: int = 4, max_pages: int | None = None, **options: object) -> PagedKVCache:
    """A cache over the caller's own tensors."""
    table, lengths_tensor = tables(lengths, page_size, max_pages)
    pages = numbered(table.numel(), page_size, HEADS, DIM)
    return PagedKVCache(pages, -pages, table, lengths_tensor, **options)  # type: ignore[arg-type]


def snapshot(cache: PagedKVCache) -> dict[str, object]:
    """All that a failed call must leave alone."""
    pool = cache._pool
    return {
        "k": cache.k_pages.tolist(),
        "v": cache.v_pages.tolist(),
        "table": cache.block_table.tolist(),
        "lengths": cache.lengths.tolist(),
        "version": cache.version,
        "pool": None
        if pool is None
        else {name: np.array(value).tolist() for name, value in vars(pool).items() if name != "lock"},
    }


# --- layouts and strides ---


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("seed", [None, 7])
def test_from_dense_puts_each_token_in_its_slot(page_size: int, layout: str, seed: int | None) -> None:
    lengths = edge_lengths(page_size)
    k, v = dense(lengths, max_len=4 * page_size)
    cache = PagedKVCache.from_dense(k, v, lengths, page_size, seed, layout=layout)
    cache.validate()
    for row, length in enumerate(lengths):
        for token in range(length):
            got_k, got_v = by_hand(cache, row, token)
            assert torch.equal(got_k, k[row, token])
            assert torch.equal(got_v, v[row, token])
    assert_rows_equal(cache, k, v, lengths)
    used = np.concatenate([cache.block_table[i, : -(-n // page_size)].numpy() for i, n in enumerate(lengths)])
    assert sorted(used) == list(range(cache.n_pages))  # exactly the pages that are needed, none twice
    assert (used.tolist() == sorted(used)) == (seed is None)


def test_worked_example_of_the_docstring() -> None:
    k, v = dense([3, 10])
    cache = PagedKVCache.from_dense(k, v, [3, 10], page_size=4)
    assert cache.block_table.tolist() == [[0, -1, -1], [1, 2, 3]]
    assert torch.equal(cache.k_pages[3, 1], k[1, 9])
    assert [x.tolist() for x in cache.to_csr()] == [[0, 1, 4], [0, 1, 2, 3], [3, 2]]
    assert str(cache) == (
        "PagedKVCache(2 rows, 4 pages of 4 (4 used, 0 free), 2 KV heads x 4, NHD, torch.float32, cpu)\n"
        "  row 0: 3 tokens, pages 0\n"
        "  row 1: 10 tokens, pages 1, 2, 3"
    )


def test_sizes_are_read_off_the_layout() -> None:
    table, lengths = tables([5, 0], page_size=8, max_pages=3)
    nhd = PagedKVCache(numbered(6, 8, 2, 5), numbered(6, 8, 2, 5), table, lengths)
    hnd = PagedKVCache(numbered(6, 2, 8, 5), numbered(6, 2, 8, 5), table, lengths, "HND")
    for cache in (nhd, hnd):
        sizes = (cache.n_pages, cache.page_size, cache.n_kv_heads, cache.head_dim, cache.n_rows, cache.max_pages)
        assert sizes == (6, 8, 2, 5, 2, 3)
        assert cache.capacity == 24
        assert (cache.dtype, cache.device) == (torch.float32, torch.device("cpu"))
        assert cache.k_nhd.data_ptr() == cache.k_pages.data_ptr()  # a view, so kernels write where the owner reads
        assert cache.k_nhd.shape == (6, 8, 2, 5)
    assert hnd.v_nhd.stride() == (80, 5, 40, 1)


def test_strided_and_permuted_pages_equal_contiguous_ones() -> None:
    lengths, page_size = [7, 0, 4], 4
    k, v = dense(lengths)
    want = PagedKVCache.from_dense(k, v, lengths, page_size)
    table, lengths_tensor = want.block_table, want.lengths
    kv = torch.full((want.n_pages, 2, page_size, HEADS, DIM), torch.nan)
    kv[:, 0], kv[:, 1] = want.k_pages, want.v_pages
    by_head = want.k_pages.transpose(1, 2).contiguous(), want.v_pages.transpose(1, 2).contiguous()
    wide = torch.full((want.n_pages, page_size, HEADS, 3 * DIM), torch.nan)
    wide[..., DIM : 2 * DIM], wide[..., :DIM] = want.k_pages, want.v_pages
    for pages, layout in (
        (kv.unbind(1), "NHD"),
        (by_head, "HND"),
        ([x.transpose(1, 2) for x in by_head], "NHD"),  # stored by head, shown by token
        ((want.k_pages.transpose(1, 2), want.v_pages.transpose(1, 2)), "HND"),
        ((wide[..., DIM : 2 * DIM], wide[..., :DIM]), "NHD"),
    ):
        cache = PagedKVCache(pages[0], pages[1], table, lengths_tensor, layout)
        assert_rows_equal(cache, k, v, lengths)
    strided = torch.full((3, 2 * want.max_pages), 99, dtype=torch.int32)
    strided[:, ::2] = table
    cache = PagedKVCache(want.k_pages, want.v_pages, strided[:, ::2], lengths_tensor)
    assert_rows_equal(cache, k, v, lengths)
    assert [x.tolist() for x in cache.to_csr()] == [x.tolist() for x in want.to_csr()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_are_stored_bit_for_bit(dtype: torch.dtype) -> None:
    k = torch.randn(2, 9, HEADS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    cache = PagedKVCache.from_dense(k, -k, [9, 4], page_size=4)
    assert cache.dtype == dtype
    assert_rows_equal(cache, k, -k, [9, 4])


def test_dense_strides_and_padding_do_not_matter() -> None:
    k = numbered(HEADS, 2, DIM, 9).permute(1, 3, 0, 2)
    cache = PagedKVCache.from_dense(k, -k, [9, 4], page_size=4)
    assert_rows_equal(cache, k, -k, [9, 4])
    k = numbered(2, 9, HEADS, DIM)
    k[1, 4:] = torch.nan  # past the row's length: never copied
    assert not PagedKVCache.from_dense(k, k, [9, 4], page_size=4).k_pages.isnan().any()


def test_lengths_may_be_list_array_or_tensor() -> None:
    k, v = dense([3, 10])
    for lengths in ([3, 10], (3, 10), np.array([3, 10], dtype=np.uint8), torch.tensor([3, 10])):
        cache = PagedKVCache.from_dense(k, v, lengths, page_size=4)
        assert cache.lengths.tolist() == [3, 10]
        assert cache.lengths.dtype == torch.int32


def test_seed_fixes_the_shuffle_and_spares_the_global_generator() -> None:
    k, v = dense([30, 20])
    torch.manual_seed(5)
    before = torch.get_rng_state()
    tables_by_seed = [PagedKVCache.from_dense(k, v, [30, 20], 2, seed).block_table.tolist() for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert tables_by_seed[0] == tables_by_seed[1] != tables_by_seed[2]


def test_spare_pages_columns_and_rows() -> None:
    k, v = dense([3, 10])
    cache = PagedKVCache.from_dense(k, v, [3, 10], 4, n_pages=9)
    assert (cache.n_pages, cache.n_free_pages, cache.max_pages) == (9, 5, 8)
    for step in range(22):  # row 1 can take every spare page: 10 + 22 = 32 tokens in 8 pages
        cache.append(k[:1, step % 3], v[:1, step % 3], rows=[1])
    assert cache.n_free_pages == 0
    assert PagedKVCache.from_dense(k, v, [3, 10], 4, n_pages=9, max_pages=3).max_pages == 3
    cache = PagedKVCache.from_dense(k, v, [3, 10], 4, max_rows=4, n_pages=5)
    assert cache.active_rows == [0, 1]
    assert cache.lengths.tolist() == [3, 10, 0, 0]
    assert cache.fork(1) == 2


def test_junk_in_unused_columns_and_slots_never_shows() -> None:
    lengths = [17, 1]
    k, v = dense(lengths)
    clean = PagedKVCache.from_dense(k, v, lengths, page_size=16)
    nan_page = clean.n_pages
    pages = torch.full((nan_page + 1, 16, HEADS, DIM), torch.nan)
    for row, length in enumerate(lengths):
        for token in range(length):
            pages[clean.block_table[row, token // 16], token % 16] = k[row, token]
    for junk in (-1, 2**31 - 1, nan_page):
        table = torch.full((2, 8), junk, dtype=torch.int32)
        table[0, :2], table[1, :1] = clean.block_table[0, :2], clean.block_table[1, :1]
        cache = PagedKVCache(pages, -pages, table, clean.lengths)
        cache.validate()
        assert_rows_equal(cache, k, -k, lengths)
        assert [x.tolist() for x in cache.to_csr()] == [x.tolist() for x in clean.to_csr()]
        smaller = PagedKVCache(pages, -pages, table[:1], clean.lengths[:1])  # the same buffers, a smaller batch
        assert [x.tolist() for x in smaller.to_csr()] == [[0, 2], clean.block_table[0, :2].tolist(), [1]]


def test_page_offsets_beyond_int32() -> None:
    # 32768 * 65536 = 2**31 elements: the pages are views of memory that is reserved but never touched elsewhere
    storage = torch.empty(2**31 + 2 * 65536, dtype=torch.float16)
    pages = storage.as_strided((32769, 16, HEADS, DIM), (65536, HEADS * DIM, DIM, 1))
    pages[32768] = numbered(16, HEADS, DIM, dtype=torch.float16)
    pages[0] = 0
    table = torch.tensor([[32768]], dtype=torch.int32)
    cache = PagedKVCache(pages, pages, table, torch.tensor([16], dtype=torch.int32))
    assert torch.equal(cache.gather(0)[0], numbered(16, HEADS, DIM, dtype=torch.float16))


# --- CSR ---


def test_csr_of_lengths_around_a_page() -> None:
    lengths = [1, 15, 16, 17, 31, 32, 33]
    cache = PagedKVCache.from_dense(*dense(lengths), lengths, page_size=16, seed=3)
    indptr, indices, last_page_len = cache.to_csr()
    assert last_page_len.tolist() == [1, 15, 16, 1, 15, 16, 1]
    assert indptr.tolist() == [0, 1, 2, 3, 5, 7, 9, 12]
    pages = [cache.block_table[row, : -(-length // 16)] for row, length in enumerate(lengths)]
    assert torch.equal(indices, torch.cat(pages))
    assert {x.dtype for x in (indptr, indices, last_page_len)} == {torch.int32}


def test_csr_of_empty_rows() -> None:
    lengths = [0, 16, 0, 5, 0]
    cache = PagedKVCache.from_dense(*dense(lengths), lengths, page_size=16)
    assert [x.tolist() for x in cache.to_csr()] == [[0, 0, 1, 1, 2, 2], [0, 1], [0, 16, 0, 5, 0]]


# --- empty batches ---


def test_no_rows_and_all_rows_empty() -> None:
    k = torch.zeros(0, 5, HEADS, DIM)
    for cache in (PagedKVCache.from_dense(k, k, []), PagedKVCache.empty(1, 16, HEADS, DIM, 0, dtype=torch.float32)):
        cache.validate()
        cache.append(k[:, 0], k[:, 0])
        cache.append(k[:, 0], k[:, 0], rows=[])
        assert [x.tolist() for x in cache.to_csr()] == [[0], [], []]
        assert cache.host_lengths is not None
        assert cache.host_lengths.tolist() == cache.active_rows == []
        assert "0 rows" in str(cache.to(dtype=torch.float64))
        with pytest.raises(ValueError, match=r"all 0 rows are in use"):
            cache.add(k[0:0, 0], k[0:0, 0])
    k, v = dense([0, 0, 0])
    cache = PagedKVCache.from_dense(k, v, [0, 0, 0], page_size=4)
    cache.validate()
    assert (cache.n_pages, cache.n_free_pages, cache.active_rows) == (1, 1, [0, 1, 2])
    assert [x.tolist() for x in cache.to_csr()] == [[0, 0, 0, 0], [], [0, 0, 0]]
    assert_rows_equal(cache, k, v, [0, 0, 0])
    pages = torch.zeros(0, 4, HEADS, DIM)  # a pool of no pages serves rows of no tokens
    cache = PagedKVCache(pages, pages, torch.zeros(2, 0, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    cache.validate()
    assert [x.tolist() for x in cache.to_csr()] == [[0, 0, 0], [], [0, 0]]
    assert cache.gather(1)[0].shape == (0, HEADS, DIM)


# --- add, append, fork, free ---


def test_rows_and_pages_are_reused() -> None:
    cache = PagedKVCache.empty(3, 4, HEADS, DIM, 2, dtype=torch.float32)
    k, v = dense([12])
    for _ in range(5):
        row = cache.add(k[0], v[0])
        assert row == 0
        assert cache.n_free_pages == 0
        cache.free(row)
        assert cache.n_free_pages == 3
    assert cache.add(k[0, :0], v[0, :0]) == 0  # a row of no tokens is active and takes no page
    assert cache.n_free_pages == 3
    cache.append(k[:, 0].expand(2, -1, -1), v[:, 0].expand(2, -1, -1))
    assert cache.lengths.tolist() == [1, 0]
    assert torch.equal(cache.gather(0)[1], v[0, :1])


def test_append_without_rows_takes_each_rows_own_token() -> None:
    cache = PagedKVCache.empty(8, 2, HEADS, DIM, 4, dtype=torch.float32)
    for _ in range(4):
        cache.add(torch.zeros(1, HEADS, DIM), torch.zeros(1, HEADS, DIM))
    cache.free(1)
    k = numbered(4, HEADS, DIM)
    cache.append(k, -k)
    for row in (0, 2, 3):
        assert torch.equal(cache.gather(row)[0][1], k[row])
        assert torch.equal(cache.gather(row)[1][1], -k[row])
    cache.append(k[:2], -k[:2], rows=torch.tensor([3, 0]))  # in the order given
    assert torch.equal(cache.gather(3)[0][2], k[0])
    assert torch.equal(cache.gather(0)[0][2], k[1])
    assert cache.lengths.tolist() == [3, 0, 2, 3]


def test_fork_shares_full_pages_and_copies_the_last() -> None:
    k, v = dense([10])
    cache = PagedKVCache.from_dense(k, v, [10], 4, n_pages=6, max_rows=3)
    child = cache.fork(0)
    parent_pages, child_pages = cache.block_table[:2, :3].tolist()
    assert parent_pages[:2] == child_pages[:2]
    assert parent_pages[2] != child_pages[2]
    assert cache.n_free_pages == 2
    new = numbered(1, HEADS, DIM, start=500)
    cache.append(new, -new, rows=[child])
    cache.append(new + 50, -new - 50, rows=[0])
    assert torch.equal(cache.gather(child)[0], torch.cat([k[0], new]))
    assert torch.equal(cache.gather(0)[1], torch.cat([v[0], -new - 50]))
    cache.free(0)
    assert cache.n_free_pages == 3  # only the parent's own last page came back
    other = numbered(12, HEADS, DIM, start=900)
    cache.add(other, -other)
    assert torch.equal(cache.gather(child)[0], torch.cat([k[0], new]))
    cache.free(child)
    cache.free(0)
    assert cache.n_free_pages == 6


def test_fork_of_full_pages_needs_no_page() -> None:
    k, v = dense([8])
    cache = PagedKVCache.from_dense(k, v, [8], 4, max_rows=2)
    assert cache.n_free_pages == 0
    assert_rows_equal(cache, torch.stack([k[0], k[0]]), torch.stack([v[0], v[0]]), [8, 8][: cache.fork(0) + 1])
    with pytest.raises(ValueError, match=r"row 0: 9 tokens need 3 pages of 4, block table has 2"):
        cache.append(k[:, 0].expand(2, -1, -1), v[:, 0].expand(2, -1, -1))


class AgainstListsOfTokens(RuleBasedStateMachine):
    """Random changes to a cache and to a dict of token lists; after each step both hold the same."""

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 8]), layout=st.sampled_from(["NHD", "HND"]), n_pages=st.integers(1, 12)
    )
    def start(self, page_size: int, layout: str, n_pages: int) -> None:
        self.cache = PagedKVCache.empty(n_pages, page_size, 1, 2, 4, max_pages=4, dtype=torch.float32, layout=layout)
        self.cache.k_pages.fill_(torch.nan)
        self.cache.v_pages.fill_(torch.nan)
        self.rows: dict[int, list[int]] = {}
        self.n_tokens, self.version = 0, 0

    def new_tokens(self, n: int) -> tuple[list[int], Tensor, Tensor]:
        tokens = list(range(self.n_tokens + 1, self.n_tokens + n + 1))
        self.n_tokens += n
        k = torch.tensor(tokens, dtype=torch.float32).reshape(n, 1, 1).expand(n, 1, 2)
        return tokens, k, -k

    def pages(self, tokens: list[int]) -> int:
        return -(-len(tokens) // self.cache.page_size)

    @rule(n=st.integers(0, 20))
    def add(self, n: int) -> None:
        tokens, k, v = self.new_tokens(n)
        fits = len(self.rows) < 4 and self.pages(tokens) <= min(4, self.cache.n_free_pages or 0)
        if not fits:
            with pytest.raises(ValueError, match=r"rows are in use|block table has|pages? (is|are) free"):
                self.cache.add(k, v)
            return
        self.rows[self.cache.add(k, v)] = tokens
        self.version += 1

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        active = sorted(self.rows)
        every = data.draw(st.booleans())
        rows = active if every else data.draw(st.lists(st.sampled_from(active), unique=True, min_size=1))
        tokens, k, v = self.new_tokens(4 if every else len(rows))
        token_of = {row: tokens[row if every else i] for i, row in enumerate(rows)}
        growing = [row for row in rows if len(self.rows[row]) % self.cache.page_size == 0]
        full = any(len(self.rows[row]) == self.cache.capacity for row in rows)
        if full or len(growing) > (self.cache.n_free_pages or 0):
            with pytest.raises(ValueError, match=r"row \d.*(block table has|pages? (is|are) free)"):
                self.cache.append(k, v, None if every else rows)
            return
        self.cache.append(k, v, None if every else rows)
        for row in rows:
            self.rows[row] = [*self.rows[row], token_of[row]]
        self.version += 1

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        partial = len(self.rows[row]) % self.cache.page_size > 0
        if len(self.rows) == 4 or partial > (self.cache.n_free_pages or 0):
            with pytest.raises(ValueError, match=r"rows are in use|pages? (is|are) free"):
                self.cache.fork(row)
            return
        self.rows[self.cache.fork(row)] = list(self.rows[row])
        self.version += 1

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        self.cache.free(row)
        del self.rows[row]
        self.version += 1
        with pytest.raises(ValueError, match=rf"row {row} is not active"):
            self.cache.free(row)

    @invariant()
    def same_tokens_and_books_balance(self) -> None:
        cache = self.cache
        cache.validate()
        assert cache.active_rows == sorted(self.rows)
        assert cache.lengths.tolist() == [len(self.rows.get(row, [])) for row in range(4)]
        assert cache.version == self.version
        held = set()
        for row, tokens in self.rows.items():
            k, v = cache.gather(row)
            assert k[:, 0].tolist() == [[token] * 2 for token in tokens]
            assert torch.equal(v, -k)
            held |= set(cache.block_table[row, : self.pages(tokens)].tolist())
        assert cache.n_free_pages == cache.n_pages - len(held)  # no page leaks, none is held and free
        assert held.isdisjoint(cache._pool.free_pages)  # type: ignore[union-attr]


TestAgainstListsOfTokens = AgainstListsOfTokens.TestCase
TestAgainstListsOfTokens.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def test_writes_reach_tensors_in_place_and_under_every_grad_mode() -> None:
    with torch.inference_mode():
        cache = PagedKVCache.empty(4, 4, HEADS, DIM, 2, dtype=torch.float32)
        tensors = (cache.k_pages, cache.v_pages, cache.block_table, cache.lengths)
        pointers = [x.data_ptr() for x in tensors]
        cache.add(numbered(3, HEADS, DIM), numbered(3, HEADS, DIM))
    learned = numbered(1, HEADS, DIM).requires_grad_()
    cache.append(learned, learned, rows=[0])  # outside inference mode, and with a token that asks for gradients
    assert [x.data_ptr() for x in tensors] == pointers
    assert not cache.k_pages.requires_grad
    assert torch.equal(cache.gather(0)[0], torch.cat([numbered(3, HEADS, DIM), learned.detach()]))


# --- atomicity ---


def full_cache() -> PagedKVCache:
    """Rows 0 (4 tokens, full), 1 (3 tokens) of page size 2; row 2 free; 1 page free; 3 columns."""
    k, v = dense([4, 3])
    return PagedKVCache.from_dense(k, v, [4, 3], 2, n_pages=5, max_pages=3, max_rows=3)


TOKENS = numbered(3, HEADS, DIM, start=700)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.add(TOKENS, TOKENS), r"row 2: 3 tokens need 2 pages of 2, 1 of 5 pages is free: .*n_pages >= 6"),
        (
            lambda c: c.add(TOKENS.repeat(3, 1, 1), TOKENS.repeat(3, 1, 1)),
            r"row 2: 9 tokens need 5 pages of 2, block table has 3: .*max_pages >= 5",
        ),
        (lambda c: [c.append(TOKENS[:1], TOKENS[:1], [0]), c.append(TOKENS[:1], TOKENS[:1], [1])], None),
        (lambda c: c.append(TOKENS[:2], TOKENS[:2], [1, 1]), r"rows names row 1 more than once"),
        (lambda c: c.append(TOKENS[:2], TOKENS[:2], [1, 2]), r"row 2 is not active"),
        (lambda c: c.append(TOKENS[:2], TOKENS[:2], [1, 3]), r"row = 3 is outside \[0, 3\)"),
        (lambda c: c.append(TOKENS[:2], TOKENS[:2], [1, -1]), r"row = -1 is too small"),
        (lambda c: c.append(TOKENS[:2], TOKENS[:2], [0.0, 1.0]), r"rows must be integers, got float64"),
        (lambda c: c.append(TOKENS[:2], TOKENS[:2]), r"k has shape \[2, 2, 4\], expected \[3, 2, 4\]"),
        (lambda c: c.append(TOKENS, TOKENS, [0, 1]), r"k has shape \[3, 2, 4\], expected \[2, 2, 4\]"),
        (lambda c: c.append(TOKENS, TOKENS[:2]), r"v has shape \[2, 2, 4\], expected \[3, 2, 4\]"),
        (lambda c: c.append(TOKENS, TOKENS.double()), r"v is torch.float64, expected torch.float32: pass v.to\("),
        (lambda c: c.add(TOKENS.half(), TOKENS), r"k is torch.float16, expected torch.float32: pass k.to\("),
        (lambda c: c.add(TOKENS[..., :3], TOKENS), r"k has shape \[3, 2, 3\], expected \[len, 2, 4\]"),
        (lambda c: c.add(TOKENS, TOKENS[:2]), r"v has shape \[2, 2, 4\], expected \[3, 2, 4\]"),
        (lambda c: c.add(TOKENS[0], TOKENS[0]), r"k has shape \[2, 4\], expected \[len, 2, 4\]"),
        (lambda c: c.add(TOKENS.tolist(), TOKENS), r"k must be a torch tensor, got list"),
        (lambda c: c.add(TOKENS.to("meta"), TOKENS), r"k is on meta, the others on cpu: pass k.to\('cpu'\)"),
        (lambda c: c.fork(2), r"row 2 is not active"),
        (lambda c: c.free(2), r"row 2 is not active"),
        (lambda c: c.free(3), r"row = 3 is outside \[0, 3\)"),
        (lambda c: c.free("a"), r"row must be an int, got str"),
        (lambda c: c.gather(2), r"row 2 is not active"),
        (lambda c: c.gather(-1), r"row = -1 is too small"),
    ],
)
def test_a_refused_change_changes_nothing(call: object, message: str | None) -> None:
    cache = full_cache()
    if message is None:  # the calls that fit, so that the refusals above are not refusals of everything
        call(cache)  # type: ignore[operator]
        assert cache.lengths.tolist() == [5, 4, 0]
        return
    before = snapshot(cache)
    with pytest.raises((ValueError, TypeError), match=message):
        call(cache)  # type: ignore[operator]
    assert snapshot(cache) == before


def test_append_names_the_first_row_left_without_a_page() -> None:
    k, v = dense([2, 2, 2])
    cache = PagedKVCache.from_dense(k, v, [2, 2, 2], 2, n_pages=4)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=r"row 1: 3 rows need a new page each, 1 of 4 pages is free: .*n_pages >= 6"):
        cache.append(k[:, 0], v[:, 0])
    assert snapshot(cache) == before


def test_no_free_row_and_no_page_for_a_fork() -> None:
    cache = full_cache()
    cache.fork(0)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=r"all 3 rows are in use: free\(row\) one or build .* max_rows > 3"):
        cache.add(TOKENS[:0], TOKENS[:0])
    assert snapshot(cache) == before
    cache.free(2)
    cache.append(TOKENS[:1], TOKENS[:1], [0])
    before = snapshot(cache)
    with pytest.raises(ValueError, match=r"row 1: its fork needs 1 page .* 0 of 5 pages are free"):
        cache.fork(1)
    assert snapshot(cache) == before


@pytest.mark.parametrize("method", ["add", "append", "fork", "free"])
def test_borrowed_pages_are_not_managed(method: str) -> None:
    for cache in (borrowed([3, 6]), full_cache().to(dtype=torch.float64)):
        with pytest.raises(ValueError, match=rf"{method}: .*does not own its pages.*PagedKVCache.empty"):
            getattr(cache, method)(*((0,) if method in ("fork", "free") else (TOKENS, TOKENS)))
        assert cache.n_free_pages is None
        assert "not owned" in repr(cache)


# --- host_lengths and version ---


def on_meta(host_lengths: object = None) -> PagedKVCache:
    pages = torch.empty(8, 4, HEADS, DIM, device="meta")
    table = torch.empty(2, 4, dtype=torch.int32, device="meta")
    return PagedKVCache(pages, pages, table, torch.empty(2, dtype=torch.int32, device="meta"), "NHD", host_lengths)  # type: ignore[arg-type]


def known(cache: PagedKVCache) -> list[int] | None:
    return None if cache.host_lengths is None else cache.host_lengths.tolist()


def test_host_lengths_on_a_cpu_follow_every_edit() -> None:
    cache = borrowed([3, 6], host_lengths=[3, 6])
    assert known(cache) == [3, 6]
    cache.lengths += 1
    assert known(cache) == [4, 7]
    cache.lengths.numpy()[0] = 2  # an edit that torch does not count
    assert known(cache) == [2, 7]
    assert cache.version == 0


def test_host_lengths_are_a_copy() -> None:
    for cache in (borrowed([3, 6]), full_cache(), on_meta([3, 6])):
        lengths = cache.host_lengths
        assert lengths is not None
        assert lengths.dtype == np.int32
        with pytest.raises(ValueError, match="read-only"):
            lengths[0] = 9
        before = lengths.tolist()
        lengths.flags.writeable = True
        lengths[0] = 9
        assert known(cache) == before
    mine = np.array([3, 6])
    cache = on_meta(mine)
    mine[0] = 1
    assert known(cache) == [3, 6]


@pytest.mark.parametrize("edit", ["lengths", "base", "replaced values"])
def test_an_edit_on_the_device_makes_host_lengths_unknown(edit: str) -> None:
    assert known(on_meta()) is None
    buffer = torch.zeros(5, dtype=torch.int32, device="meta")
    pages = torch.empty(8, 4, HEADS, DIM, device="meta")
    table = torch.empty(2, 4, dtype=torch.int32, device="meta")
    cache = PagedKVCache(pages, pages, table, buffer[:2], host_lengths=torch.tensor([3, 6]))
    cache.k_pages.zero_()
    table[0, 0] = 1  # the table says nothing about lengths
    assert known(cache) == [3, 6]
    if edit == "lengths":
        cache.lengths += 1
    elif edit == "base":
        buffer.add_(1)
    else:
        cache.lengths.copy_(torch.tensor([3, 7]))
    assert known(cache) is None


def test_inference_tensors_have_no_edit_counter() -> None:
    with torch.inference_mode():
        cache = on_meta([3, 6])
        cache.lengths += 1
    assert known(cache) == [3, 6]  # documented: an edit that torch does not count goes unnoticed


def test_changes_on_the_device_never_read_from_it() -> None:
    cache = PagedKVCache.empty(8, 4, HEADS, DIM, 3, dtype=torch.float32, device="meta")
    k = torch.empty(6, HEADS, DIM, device="meta")
    assert known(cache) == [0, 0, 0]
    assert cache.add(k, k) == 0
    cache.append(k[:3], k[:3])
    cache.append(k[:1], k[:1], rows=[0])
    assert cache.fork(0) == 1
    cache.append(k[:1], k[:1], rows=[1])
    assert (known(cache), cache.version) == ([8, 9, 0], 5)
    indptr, indices, last_page_len = cache.to_csr()
    assert (indptr.shape, indices.shape, last_page_len.shape) == ((4,), (5,), (3,))
    assert cache.gather(1)[0].shape == (9, HEADS, DIM)
    assert "row 1: 9 tokens, pages 0, 1, 2" in str(cache)
    cache.free(0)
    assert (known(cache), cache.version, cache.n_free_pages) == ([0, 9, 0], 6, 5)
    cache.lengths += 1
    assert known(cache) is None
    assert str(cache) == repr(cache)
    with pytest.raises(NotImplementedError, match="meta"):  # only now are the values asked for
        cache.free(1)


def test_version_counts_successful_changes_only() -> None:
    cache = full_cache()
    assert cache.version == 0
    cache.append(TOKENS[:1], TOKENS[:1], [1])
    cache.append(TOKENS[:0], TOKENS[:0], [])
    cache.free(0)
    with pytest.raises(ValueError, match="not active"):
        cache.free(0)
    cache.validate()
    cache.gather(1)
    assert cache.version == 2


def test_an_owned_table_edited_by_hand_is_refused_until_undone() -> None:
    cache = full_cache()
    cache.lengths[1] += 1
    assert known(cache) == [4, 4, 0]  # reading follows the edit
    with pytest.raises(ValueError, match=r"append: row 1 of lengths or block_table was edited in place.*undo"):
        cache.append(TOKENS, TOKENS)
    cache.lengths[1] -= 1
    cache.append(TOKENS[:0], TOKENS[:0], [])
    cache.block_table.numpy()[0, 0] = 3  # an edit that torch does not count
    for change in (cache.fork, cache.free):
        with pytest.raises(ValueError, match=r"row 0 of lengths or block_table was edited in place"):
            change(0)
    cache.block_table.numpy()[0] += 1
    with pytest.raises(ValueError, match=r"append: row 0 of lengths or block_table was edited in place"):
        cache.append(TOKENS, TOKENS)
    cache.block_table.numpy()[0] -= 1
    cache.block_table.numpy()[0, 0] = 0
    cache.lengths.numpy()[2] = 1  # any length, though of a row that nothing is asked of
    with pytest.raises(ValueError, match=r"append: row 2 of lengths or block_table was edited in place"):
        cache.append(TOKENS[:1], TOKENS[:1], [1])
    cache.lengths.numpy()[2] = 0
    cache.block_table[1, 0] += 1  # one that torch counts is noticed anywhere
    with pytest.raises(ValueError, match=r"append: row 1 of lengths or block_table was edited in place"):
        cache.append(TOKENS[:1], TOKENS[:1], [0])
    cache.block_table[1, 0] -= 1
    cache.block_table[0, 2] = 2**31 - 1  # unused: junk is fine
    cache.append(TOKENS, TOKENS)
    assert cache.lengths.tolist() == [5, 4, 0]
    assert torch.equal(cache.gather(0)[0][4], TOKENS[0])


def test_tensors_cannot_be_replaced() -> None:
    cache = full_cache()
    for name in ("k_pages", "v_pages", "block_table", "lengths", "layout"):
        with pytest.raises(AttributeError, match=rf"cache.{name} cannot be replaced: write into it"):
            setattr(cache, name, copy.copy(getattr(cache, name)) if name != "layout" else "HND")


def test_to_shares_what_it_need_not_convert() -> None:
    cache = full_cache()
    exact = cache.to(dtype=torch.float64)
    assert exact.dtype == torch.float64
    assert exact.block_table is cache.block_table
    assert torch.equal(exact.gather(1)[0], cache.gather(1)[0].double())
    cache.append(TOKENS[:1], TOKENS[:1], [1])
    assert known(exact) == [4, 4, 0]
    assert cache.to().k_pages is cache.k_pages
    assert known(cache.to("meta")) == [4, 4, 0]
    hnd = PagedKVCache.from_dense(*dense([5]), [5], 4, layout="HND").to(dtype=torch.float64)
    assert torch.equal(hnd.gather(0)[0], dense([5])[0][0].double())
    assert known(on_meta().to(dtype=torch.float16)) is None


def test_a_deep_copy_is_independent() -> None:
    cache = full_cache()
    twin = copy.deepcopy(cache)
    twin.append(TOKENS[:1], TOKENS[:1], [1])
    assert cache.lengths.tolist() == [4, 3, 0]
    assert torch.equal(twin.gather(1)[0][3], TOKENS[0])
    assert cache._pool is not twin._pool


# --- work ---


def bytes_allocated(do: Callable[[], object]) -> int:
    """By numpy, at most at once, and by all of torch's operations, while `do` runs."""
    by_torch = 0

    class Weighing(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal by_torch
            result = function(*args, **(kwargs or {}))
            given = [x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)]
            if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
                by_torch += result.nbytes
            return result

    tracemalloc.start()
    try:
        with Weighing():
            do()
        return by_torch + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


NEW = torch.zeros(20, 1, 1)
WORK: dict[str, tuple[int, Callable[[PagedKVCache], object]]] = {  # rows before, and what is done, twice
    "append": (20, lambda cache: cache.append(NEW[:1], NEW[:1], [3])),
    "append to all, with a new page each": (20, lambda cache: cache.append(NEW, NEW)),
    "add": (18, lambda cache: cache.add(NEW[:8], NEW[:8])),
    "fork": (18, lambda cache: cache.fork(3)),
    "free": (20, lambda cache: cache.free(cache.active_rows[-1])),
    "gather": (20, lambda cache: cache.gather(3)),
    "to_csr": (20, lambda cache: cache.to_csr()),
    "validate": (20, lambda cache: cache.validate()),
    "an edit undone": (20, lambda cache: (cache.lengths.add_(0), cache.append(NEW, NEW))),
}


@pytest.mark.parametrize("name", WORK)
def test_work_is_in_proportion_to_what_is_done(name: str) -> None:
    """And not to the pool, or to the width of the table: 20 rows of 100 and of 50,000 columns."""
    n_rows, do = WORK[name]
    few_and_many = []
    for n_pages in (100, 50_000):
        cache = PagedKVCache.empty(n_pages, 4, 1, 1, 20, dtype=torch.float32)
        for _ in range(n_rows):
            cache.add(NEW[:7], NEW[:7])
        do(cache)  # what is done first imports things
        few_and_many.append(bytes_allocated(lambda cache=cache: do(cache)))  # type: ignore[misc]
    few, many = few_and_many
    assert many < few + 20_000  # a byte for each entry of a row would be 50,000


# --- bad arguments ---


def arguments(**changes: object) -> dict[str, object]:
    table, lengths = tables([3, 6], page_size=4)
    good: dict[str, object] = {
        "k_pages": numbered(3, 4, HEADS, DIM),
        "v_pages": numbered(3, 4, HEADS, DIM),
        "block_table": table,
        "lengths": lengths,
    }
    assert good.keys() | {"layout", "host_lengths"} >= changes.keys()
    return good | changes


BAD_ARGUMENTS = [
    ({"k_pages": numbered(3, 4, DIM)}, ValueError, r"k_pages has shape \[3, 4, 4\], expected \[n_pages, page_size"),
    ({"k_pages": numbered(3, 4, DIM), "layout": "HND"}, ValueError, r"expected \[n_pages, n_kv_heads, page_size"),
    ({"k_pages": [[1]]}, TypeError, r"k_pages must be a torch tensor, got list"),
    ({"k_pages": numbered(3, 4, HEADS, DIM, dtype=torch.int32)}, TypeError, r"k_pages is torch.int32: pages hold"),
    ({"k_pages": torch.zeros(3, 0, HEADS, DIM)}, ValueError, r"only the number of pages may be 0"),
    ({"v_pages": numbered(3, 4, HEADS, 5)}, ValueError, r"v_pages has shape \[3, 4, 2, 5\], expected \[3, 4, 2, 4\]"),
    ({"v_pages": numbered(3, 4, HEADS, DIM).half()}, TypeError, r"v_pages is torch.float16, expected torch.float32"),
    ({"v_pages": torch.empty(3, 4, HEADS, DIM, device="meta")}, ValueError, r"v_pages is on meta, the others on cpu"),
    (
        {"block_table": torch.zeros(2, 2, dtype=torch.int64)},
        TypeError,
        r"block_table is torch.int64.*\.to\(torch.int32\)",
    ),
    ({"block_table": torch.zeros(4, dtype=torch.int32)}, ValueError, r"block_table has shape \[4\], expected \[n_rows"),
    ({"block_table": np.zeros((2, 2), np.int32)}, TypeError, r"block_table must be a torch tensor, got ndarray"),
    ({"lengths": torch.tensor([3, 6])}, TypeError, r"lengths is torch.int64.*: pass lengths.to\(torch.int32\)"),
    ({"lengths": torch.zeros(3, dtype=torch.int32)}, ValueError, r"lengths has shape \[3\], expected \[2\]"),
    ({"lengths": [3, 6]}, TypeError, r"lengths must be a torch tensor, got list"),
    ({"layout": "nhd"}, ValueError, r"layout = 'nhd' is unknown: pass \"NHD\" or \"HND\""),
    ({"host_lengths": [3]}, ValueError, r"host_lengths has 1 entry, expected 2"),
    ({"host_lengths": [3, 9]}, ValueError, r"host_lengths\[1\] = 9 needs 3 pages of 4, block table has 2"),
    ({"host_lengths": [-1, 6]}, ValueError, r"host_lengths\[0\] = -1 is negative"),
    ({"host_lengths": [3, 5]}, ValueError, r"host_lengths\[1\] = 5 differs from lengths\[1\] = 6: pass equal"),
    ({"host_lengths": [3.0, 6.0]}, TypeError, r"host_lengths must be integers, got float64"),
    ({"host_lengths": [[3, 6]]}, ValueError, r"host_lengths has shape \[1, 2\], expected a flat list"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD_ARGUMENTS, ids=[message for *_, message in BAD_ARGUMENTS])
def test_constructor_refuses(changes: dict[str, object], error: type[Exception], message: str) -> None:
    PagedKVCache(**arguments()).validate()  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        PagedKVCache(**arguments(**changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["block_table", "lengths"])
def test_cpu_tables_beside_pages_on_a_gpu_are_refused(name: str) -> None:
    on_device = {key: value.to("meta") for key, value in arguments().items()}  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=rf"{name} is on cpu, the others on meta: pass {name}.to\('meta'\)"):
        PagedKVCache(**(on_device | {name: arguments()[name]}))


def test_validate_names_row_column_value_and_pool() -> None:
    cache = borrowed([5, 5, 5, 5], page_size=16, max_pages=4)
    cache.validate()
    cache.lengths[3] = 70
    message = re.escape("lengths[3] = 70 needs 5 pages of 16, block table has 4: give it 5 columns or shorten the row")
    for check in (cache.validate, cache.to_csr, lambda: cache.gather(3)):
        with pytest.raises(ValueError, match=message):
            check()
    cache.lengths[3] = 64
    cache.validate()
    cache.lengths[2] = -2
    for check in (cache.validate, cache.to_csr, lambda: cache.gather(2)):
        with pytest.raises(ValueError, match=r"lengths\[2\] = -2 is negative: a row holds 0 tokens or more"):
            check()
    cache.lengths[2] = 33
    for entry in (-1, cache.n_pages, 2**31 - 1):
        cache.block_table[2, 2] = entry
        message = rf"block_table\[2, 2\] = {entry} is outside the pool of 16 pages: row 2 uses 3 entries"
        for check in (cache.validate, cache.to_csr, lambda: cache.gather(2)):
            with pytest.raises(ValueError, match=message):
                check()
    cache.lengths[2] = 32  # the same entry, no longer used
    cache.validate()
    cache.lengths[0] = 2**31 - 1
    with pytest.raises(ValueError, match=r"lengths\[0\] = 2147483647 needs 134,217,728 pages of 16"):
        cache.validate()


K, V = dense([3, 10])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PagedKVCache.from_dense(K, V, [3, 11]), r"lengths\[1\] = 11 is outside \[0, 10\]"),
        (lambda: PagedKVCache.from_dense(K, V, [-1, 10]), r"lengths\[0\] = -1 is outside \[0, 10\]"),
        (lambda: PagedKVCache.from_dense(K, V, [3]), r"k has shape \[2, 10, 2, 4\], expected \[1, max_len, n_kv_heads"),
        (lambda: PagedKVCache.from_dense(K[0], V[0], [3, 10]), r"k has shape \[10, 2, 4\], expected \[2, max_len"),
        (lambda: PagedKVCache.from_dense(K, V[:, :9], [3, 9]), r"v has shape \[2, 9, 2, 4\], expected \[2, 10, 2, 4\]"),
        (lambda: PagedKVCache.from_dense(K, V.half(), [3, 10]), r"v is torch.float16, expected torch.float32"),
        (lambda: PagedKVCache.from_dense(K.int(), V.int(), [3, 10]), r"is torch.int32: pages hold float16"),
        (lambda: PagedKVCache.from_dense(K, V, [3.0, 10.0]), r"lengths must be integers, got float64"),
        (lambda: PagedKVCache.from_dense(K, V, torch.tensor([True, True])), r"lengths must be integers, got bool"),
        (lambda: PagedKVCache.from_dense(K, V, 3), r"lengths has shape \[\], expected a flat list"),
        (lambda: PagedKVCache.from_dense(K, V, [3, 10], 0), r"page_size = 0 is too small: pass 1 or more"),
        (lambda: PagedKVCache.from_dense(K, V, [3, 10], 4, n_pages=3), r"n_pages = 3 is too small: pass 4 or more"),
        (lambda: PagedKVCache.from_dense(K, V, [3, 10], 4, max_pages=2), r"max_pages = 2 is too small: pass 3 or"),
        (lambda: PagedKVCache.from_dense(K, V, [3, 10], 4, max_rows=1), r"max_rows = 1 is too small: pass 2 or more"),
        (lambda: PagedKVCache.from_dense(K, V, [3, 10], 4, layout="DHN"), r"layout = 'DHN' is unknown"),
        (lambda: PagedKVCache.empty(0, 4, 1, 1, 1), r"n_pages = 0 is too small: pass 1 or more"),
        (lambda: PagedKVCache.empty(1, 4, 1, 1, -1), r"max_rows = -1 is too small: pass 0 or more"),
        (lambda: PagedKVCache.empty(1, 4, 1, 1, 1, max_pages=0), r"max_pages = 0 is too small"),
        (lambda: PagedKVCache.empty(1, 4, 0, 1, 1), r"n_kv_heads = 0 is too small"),
        (lambda: PagedKVCache.empty(1, 4, 1, 1.5, 1), r"head_dim must be an int, got float"),
        (
            lambda: PagedKVCache.empty(1, 4, 1, 1, 1, dtype=torch.int8),
            r"dtype = torch.int8 must be a floating-point dtype",
        ),
        (lambda: PagedKVCache.empty(1, 4, 1, 1, 1, layout="hnd"), r"layout = 'hnd' is unknown"),
    ],
)
def test_building_refuses(call: object, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()  # type: ignore[operator]


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_gpu_is_never_waited_for(layout: str) -> None:
    lengths = [0, 1, 15, 16, 17, 40]
    k, v = (x.cuda() for x in dense(lengths))
    new = k[:, 0] + 1000
    torch.cuda.set_sync_debug_mode("error")
    try:
        cache = PagedKVCache.from_dense(k, v, lengths, 16, seed=1, layout=layout, n_pages=20, max_rows=7)
        child = cache.fork(4)
        cache.append(new[:2], -new[:2], rows=[4, child])
        cache.free(1)
        row = cache.add(k[5, :33], v[5, :33])
        cache.append(torch.cat([new, new[:1]]), torch.cat([new, new[:1]]).neg())
        csr = cache.to_csr()
        got = [cache.gather(row)[0] for row in range(7)]
        host_lengths = cache.host_lengths
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (child, row) == (6, 1)
    assert host_lengths is not None
    assert host_lengths.tolist() == cache.lengths.tolist() == [1, 34, 16, 17, 19, 41, 19]
    cache.validate()
    on_cpu = cache.to("cpu")
    assert [x.tolist() for x in csr] == [x.tolist() for x in on_cpu.to_csr()]
    assert torch.equal(got[1], torch.cat([k[5, :33], new[1:2]]))
    assert torch.equal(got[4], torch.cat([k[4, :17], new[:1], new[4:5]]))
    assert torch.equal(got[6], torch.cat([k[4, :17], new[1:2], new[:1]]))
    cache.lengths[0] -= 1
    assert cache.host_lengths is None
    assert cache.gather(1)[0].shape[0] == 34  # known again by waiting
    with pytest.raises(ValueError, match="row 0 of lengths or block_table was edited in place"):
        cache.free(1)
    cache.lengths[0] += 1
    cache.free(1)
    assert known(cache) == cache.lengths.tolist()
    with pytest.raises(ValueError, match=r"lengths is on cpu, the others on cuda:0"):
        PagedKVCache(cache.k_pages, cache.v_pages, cache.block_table, cache.lengths.cpu(), layout)
    stale = PagedKVCache(cache.k_pages, cache.v_pages, cache.block_table, cache.lengths, layout, [1, 1, 1, 1, 1, 1, 1])
    with pytest.raises(ValueError, match=r"host_lengths\[1\] = 1 differs from lengths\[1\] = 0"):
        stale.validate()

"""What the pages of a cache hold, counted: a page that several rows share is one page.

Page size 16, one row of 17 tokens, forked: the rows share one full page, and each has a page with one token. So three
pages hold 34 tokens in 18 slots, and 30 of their 48 slots are unused.
"""

import operator
from typing import TypeAlias

import numpy as np

from pkv.cache.paged import PagedKVCache
from pkv.wording.counts import count_of, verb

Holders: TypeAlias = dict[int, list[tuple[int, int]]]  # page of the pool: the (row, logical page) that lie there


def checked_highlight(highlight: tuple[int, int] | None, lengths: np.ndarray) -> tuple[int, int] | None:
    """The row and token to highlight; ValueError says which rows and tokens there are."""
    if highlight is None:
        return None
    try:
        row, token = map(operator.index, highlight)
    except (TypeError, ValueError):
        raise ValueError(f"highlight = {highlight!r} must be (row, token), two whole numbers") from None
    where = f"highlight = ({row}, {token}):"
    if not 0 <= row < len(lengths):
        raise ValueError(f"{where} row {row} is outside [0, {len(lengths)}), the rows of this cache")
    if not 0 <= token < lengths[row]:
        raise ValueError(f"{where} token {token} is outside [0, {lengths[row]}), the tokens of row {row}")
    return row, token


def holders_of(lengths: np.ndarray, table: np.ndarray, n_used: np.ndarray, size: int) -> Holders:
    """For each page in use the (row, logical page) that lie there, first the one that fills most of its slots."""
    holders: Holders = {}
    for row in range(len(lengths)):
        for column, page in enumerate(table[row, : n_used[row]].tolist()):
            holders.setdefault(page, []).append((row, column))
    for found in holders.values():
        found.sort(key=lambda holder: -n_filled_by(lengths, size, *holder))
    return holders


def n_filled_by(lengths: np.ndarray, size: int, row: int, column: int) -> int:
    """Slots of its page that a row's logical page fills."""
    return min(size, int(lengths[row]) - column * size)


def claim(cache: PagedKVCache, lengths: np.ndarray, holders: Holders) -> str:
    """What is stored where, counted in pages and slots of the pool: a page that rows share counts once."""
    size, n_held, n_tokens = cache.page_size, len(holders), int(lengths.sum())
    n_filled = sum(n_filled_by(lengths, size, *found[0]) for found in holders.values())
    rows, tokens = count_of(cache.n_rows, "row"), count_of(n_tokens, "token")
    unused = f"{count_of(n_held * size - n_filled, 'slot')} of {n_held * size} unused"
    if n_filled < n_tokens:
        pages = f"{count_of(n_held, 'page')} of {size} {verb(n_held, 'hold')}"
        slots = count_of(n_filled, "slot")
        return f"{rows} {verb(cache.n_rows, 'share')} pages: {pages} {tokens} in {slots}, {unused}"
    return f"{rows}, {tokens}: {n_held} of {count_of(cache.n_pages, 'page')} {verb(n_held, 'hold')} them, {unused}"

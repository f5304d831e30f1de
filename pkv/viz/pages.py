"""A paged cache drawn: each row's logical pages above, the pool of physical pages below, the block table as lines.

Page size 4, lengths 3 and 10: row 0 has one page with one unused slot, row 1 has three pages, the last of them with two
unused slots. Token t of a row lies in pool page block_table[row, t // page_size], slot t % page_size.
"""

import numpy as np

from pkv.cache import PagedKVCache
from pkv.viz.svg import GREY, INK, PALETTE, WIDTH, Picture, Sheet, count_of, text_width

MOST_ROWS = 6
MOST_PAGES_OF_A_ROW = 12
MOST_POOL_PAGES = 32
LEFT = 132


def draw_pages(cache: PagedKVCache, highlight: tuple[int, int] | None = None) -> Picture:
    """The block table and the pool. highlight: (row, token), whose way through the table is shown and spelled out."""
    size = cache.page_size
    lengths = cache.lengths.cpu().numpy() if cache.host_lengths is None else cache.host_lengths
    table = cache.block_table.cpu().numpy()
    n_used = -(-lengths.astype(np.int64) // size)
    pages_held = {int(page) for row in range(cache.n_rows) for page in table[row, : n_used[row]]}
    n_slots, n_tokens = len(pages_held) * size, int(lengths.sum())
    title = (
        f"{count_of(cache.n_rows, 'row')}, {count_of(n_tokens, 'token')}: {len(pages_held)} of {cache.n_pages} pages "
        f"hold them, {count_of(n_slots - n_tokens, 'slot')} of {n_slots} unused"
    )
    if n_tokens > n_slots:
        title = f"{count_of(cache.n_rows, 'row')} share pages: {len(pages_held)} pages of {size} hold {n_tokens} tokens"
    notes = [
        f"Above: each row's tokens in order, cut into pages of {size}, with the block table's entry after the arrow. "
        "Below: the pool, a box per slot. Grey: an unused slot. Dashed: a free page."
    ]
    if highlight:
        notes.append(_lookup_in_words(table, size, *highlight))
    shown_rows, shown_pages = min(cache.n_rows, MOST_ROWS), min(cache.n_pages, MOST_POOL_PAGES)
    if shown_rows < cache.n_rows or shown_pages < cache.n_pages or n_used.max(initial=0) > MOST_PAGES_OF_A_ROW:
        notes.append(
            f"Drawn: the first {shown_rows} of {cache.n_rows} rows, {MOST_PAGES_OF_A_ROW} pages of a row at most, "
            f"and the first {shown_pages} of {cache.n_pages} pages."
        )
    sheet = Sheet()
    sheet.heading(title, notes)
    ports = _logical_pages(sheet, lengths[:shown_rows], table, size, highlight)
    sheet.y += 58
    under_pool = len(sheet.shapes)
    targets = _pool(sheet, lengths, table, n_used, size, shown_pages, highlight)
    pool, sheet.shapes = sheet.shapes[under_pool:], sheet.shapes[:under_pool]
    for row, page, x, y, looked_up in ports:
        if page in targets:
            x2, y2 = targets[page]
            d = f"M{x:.5g} {y:.5g}C{x:.5g} {y + 40:.5g} {x2:.5g} {y2 - 40:.5g} {x2:.5g} {y2:.5g}"
            sheet.path(d, INK if looked_up else PALETTE[row % len(PALETTE)], 2.2 if looked_up else 1.2)
    sheet.shapes += pool
    return sheet.finish(f"{title}. {' '.join(notes)}")


def _lookup_in_words(table: np.ndarray, size: int, row: int, token: int) -> str:
    page = int(table[row, token // size])
    return (
        f"Bold: token {token} of row {row} lies in page block_table[{row}, {token} // {size}] = {page}, "
        f"slot {token} % {size} = {token % size}."
    )


def _logical_pages(
    sheet: Sheet, lengths: np.ndarray, table: np.ndarray, size: int, highlight: tuple[int, int] | None
) -> list[tuple[int, int, float, float, bool]]:
    """Draw the rows; return (row, page, x, y, looked up?) of the point under each logical page."""
    ports = []
    width = min(
        150.0,
        max(44.0, (WIDTH - LEFT - 20) / max(1, min(MOST_PAGES_OF_A_ROW, -(-int(lengths.max(initial=0)) // size)))),
    )
    for row, length in enumerate(lengths.tolist()):
        sheet.row_name(LEFT - 8, sheet.y + 17, f"row {row}: {count_of(length, 'token')}")
        n_pages = -(-length // size)
        for column in range(min(n_pages, MOST_PAGES_OF_A_ROW)):
            begin, end = column * size, min(length, (column + 1) * size)
            page, x = int(table[row, column]), LEFT + column * width
            looked_up = highlight is not None and highlight[0] == row and begin <= highlight[1] < begin + size
            sheet.box(x, sheet.y, width - 6, 24, row)
            long, short = f"{begin}:{end} → {page}", f"→ {page}"
            text = long if text_width(long, 12) < width - 8 else short
            sheet.text(
                x + (width - 6) / 2,
                sheet.y + 16,
                text,
                anchor="middle",
                halo=True,
                weight="bold" if looked_up else "normal",
            )
            if looked_up:
                sheet.frame(x, sheet.y, width - 6, 24)
            ports.append((row, page, x + (width - 6) / 2, sheet.y + 24, looked_up))
        if n_pages == 0:
            sheet.text(LEFT, sheet.y + 17, "no page", fill=GREY)
        if n_pages > MOST_PAGES_OF_A_ROW:
            sheet.text(LEFT + MOST_PAGES_OF_A_ROW * width, sheet.y + 17, "…")
        sheet.y += 38
    return ports


def _pool(
    sheet: Sheet, lengths: np.ndarray, table: np.ndarray, n_used: np.ndarray, size: int, n_shown: int,
    highlight: tuple[int, int] | None,
) -> dict[int, tuple[float, float]]:  # fmt: skip
    """Draw the pool's pages with their slots; return the point above each page."""
    holders: dict[int, list[tuple[int, int]]] = {}
    for row in range(len(lengths)):
        for column, page in enumerate(table[row, : n_used[row]].tolist()):
            holders.setdefault(page, []).append((row, column))
    per_line = min(n_shown, 12 if size <= 4 else 8)
    width = (WIDTH - 16) / max(per_line, 4)
    width = min(width, 26.0 * size + 14)
    targets = {}
    for page in range(n_shown):
        x = 8 + page % per_line * width
        y = sheet.y + page // per_line * 72
        slot = (width - 14) / size
        targets[page] = (x + (width - 14) / 2, y)
        rows = holders.get(page, [])
        names = f"page {page}" + (f": row {', '.join(str(r) for r, _ in rows)}" if rows else ": free")
        names = names if text_width(names, 11) < width else f"{page}"
        sheet.text(x + (width - 14) / 2, y + 44, names, size=11, anchor="middle", fill=INK if rows else GREY)
        if not rows:
            sheet.hollow(x, y, width - 14, 28)
            continue
        row, column = rows[0]
        n_filled = min(size, int(lengths[row]) - column * size)
        if slot < 8:
            sheet.box(x, y, slot * n_filled, 28, row)
            if n_filled < size:
                sheet.unused(x + slot * n_filled, y, slot * (size - n_filled), 28)
            continue
        for index in range(size):
            if index >= n_filled:
                sheet.unused(x + index * slot, y, slot, 28)
                continue
            sheet.box(x + index * slot, y, slot, 28, row)
            token = column * size + index
            bold = highlight == (row, token)
            if text_width(f"{token}", 10) < slot:
                sheet.text(
                    x + (index + 0.5) * slot,
                    y + 18,
                    f"{token}",
                    size=10,
                    anchor="middle",
                    halo=True,
                    weight="bold" if bold else "normal",
                )
            if bold:
                sheet.frame(x + index * slot, y, slot, 28)
    sheet.y += -(-n_shown // max(per_line, 1)) * 72 - 20
    return targets

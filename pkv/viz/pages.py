"""A paged cache drawn: each row's logical pages above, the pool of physical pages below, the block table as lines.

Page size 4, lengths 3 and 10: row 0 has one page with one unused slot, row 1 has three pages, the last of them with two
unused slots. Token t of a row lies in pool page block_table[row, t // page_size], slot t % page_size. A line never
crosses a box or a label: it runs through the gaps beside them.
"""

from typing import NamedTuple

import numpy as np

from pkv.cache.paged import PagedKVCache
from pkv.viz.holding import Holders, checked_highlight, claim, holders_of, n_filled_by
from pkv.viz.svg import GREY, INK, PALETTE, SMALL, WIDTH, Picture, Sheet, text_width
from pkv.wording.counts import count_of

MOST_ROWS = 6
MOST_PAGES_OF_A_ROW = 8
MOST_POOL_PAGES = 32
LEFT = 132
ROW, POOL_LINE = 38, 62  # from one row, or one line of the pool, to the next
BOX, POOL_BOX = 24, 28  # heights
POOL_LEFT, POOL_GAP = 20, 16
LANE = 4  # between neighbouring lines in a gap


class Port(NamedTuple):
    """Where a line leaves the rows: from x, y down to `below`, through the gap at `lane` if boxes are in the way."""

    row: int
    page: int
    x: float
    y: float
    lane: float
    below: float
    looked_up: bool


class Target(NamedTuple):
    """Where a line enters a page of the pool: at x, y; pages of later lines are reached through the gap at `lane`."""

    x: float
    y: float
    lane: float | None


def draw_pages(cache: PagedKVCache, highlight: tuple[int, int] | None = None) -> Picture:
    """The block table and the pool. highlight: (row, token), whose way through the table is shown and spelled out."""
    cache.validate()
    size = cache.page_size
    lengths = cache.lengths.cpu().numpy() if cache.host_lengths is None else cache.host_lengths
    table = cache.block_table.cpu().numpy()
    n_used = -(-lengths.astype(np.int64) // size)
    highlight = checked_highlight(highlight, lengths)
    holders = holders_of(lengths, table, n_used, size)
    title = claim(cache, lengths, holders)
    notes = [
        f"Above: each row's tokens begin:end in order, cut into pages of {size}, with the block table's entry after "
        "the arrow. Below: the pool, a box per slot. Grey: an unused slot. Dashed: a free page.",
        f"Block table: {count_of(cache.n_rows, 'row')} x {count_of(table.shape[1], 'column')} = "
        f"{count_of(table.size, 'entry')}, {int(n_used.sum()):,} of them used.",
    ]
    shown_rows, shown_pages = min(cache.n_rows, MOST_ROWS), min(cache.n_pages, MOST_POOL_PAGES)
    if highlight is not None:
        row, column, page = highlight[0], highlight[1] // size, int(table[highlight[0], highlight[1] // size])
        is_drawn = (row < shown_rows and column < MOST_PAGES_OF_A_ROW) or page < shown_pages
        notes.append(f"{'Bold' if is_drawn else 'Not drawn'}: {_lookup_in_words(page, size, *highlight)}")
    drawn = [
        f"the first {shown_rows} of {cache.n_rows} rows" if shown_rows < cache.n_rows else "",
        f"{MOST_PAGES_OF_A_ROW} pages of a row at most" if n_used.max(initial=0) > MOST_PAGES_OF_A_ROW else "",
        f"the first {shown_pages} of the pool's {cache.n_pages} pages" if shown_pages < cache.n_pages else "",
    ]
    if any(drawn):
        notes.append(f"Drawn: {', '.join(filter(None, drawn))}.")
    sheet = Sheet()
    sheet.heading(title, notes)
    ports = _logical_pages(sheet, lengths[:shown_rows], table, size, highlight)
    sheet.y += 50 + min(40, 2 * len(ports))  # many lines cross more steeply
    under_pool = len(sheet.shapes)
    targets = _pool(sheet, lengths, holders, size, shown_pages, highlight)
    pool, sheet.shapes = sheet.shapes[under_pool:], sheet.shapes[:under_pool]
    pool_y = min((target.y for target in targets.values()), default=0.0)
    for port in ports:
        if port.page in targets:
            colour, thick = (INK, 2.4) if port.looked_up else (PALETTE[port.row % len(PALETTE)], 1.4)
            sheet.path(_way(port, targets[port.page], pool_y), colour, thick)
    sheet.shapes += pool
    return sheet.finish(f"{title}. {' '.join(notes)}")


def _way(port: Port, target: Target, pool_y: float) -> str:
    """The line from a logical page to its page of the pool: down a gap, across between rows and pool, down a gap."""
    d, x, y = f"M{port.x:.5g} {port.y:.5g}", port.x, port.y
    if port.lane != port.x:
        d += f"C{x:.5g} {y + 9:.5g} {port.lane:.5g} {y + 5:.5g} {port.lane:.5g} {y + 14:.5g}"
        x = port.lane
    d += f"V{port.below:.5g}"
    if target.lane is None:
        end_x, end_y = target.x, target.y
    else:
        end_x, end_y = target.lane, pool_y - 2
    middle = (port.below + end_y) / 2
    d += f"C{x:.5g} {middle + 8:.5g} {end_x:.5g} {middle - 8:.5g} {end_x:.5g} {end_y:.5g}"
    if target.lane is not None:
        y = target.y - 13
        d += f"V{y:.5g}C{end_x:.5g} {y + 9:.5g} {target.x:.5g} {y + 2:.5g} {target.x:.5g} {target.y:.5g}"
    return d


def _lookup_in_words(page: int, size: int, row: int, token: int) -> str:
    return (
        f"token {token} of row {row} lies in page block_table[{row}, {token} // {size}] = {page}, "
        f"slot {token} % {size} = {token % size}."
    )


def _logical_pages(
    sheet: Sheet, lengths: np.ndarray, table: np.ndarray, size: int, highlight: tuple[int, int] | None
) -> list[Port]:
    """Draw the rows; return for each logical page where its line leaves."""
    n_pages = [min(MOST_PAGES_OF_A_ROW, -(-length // size)) for length in lengths.tolist()]
    width = min(140.0, (WIDTH - LEFT - 20) / max([1, *n_pages]))
    gap = 8 + LANE * max(0, len(lengths) - 1)
    below, ports = sheet.y + ROW * len(lengths) - 8, []
    for row, length in enumerate(lengths.tolist()):
        name = f"row {row}: {count_of(length, 'token')}"
        name = name if text_width(name, 12) < LEFT - 8 else f"row {row}: {length:,}"
        sheet.row_name(LEFT - 8, sheet.y + 17, name)
        for column in range(n_pages[row]):
            begin, end = column * size, min(length, (column + 1) * size)
            page, x, box = int(table[row, column]), LEFT + column * width, width - gap
            middle = x + box / 2
            looked_up = highlight is not None and highlight[0] == row and begin <= highlight[1] < begin + size
            sheet.box(x, sheet.y, box, BOX, row)
            long, short = f"{begin}:{end} → {page}", f"→ {page}"
            text = long if text_width(long, 12) < box else short
            weight = "bold" if looked_up else "normal"
            sheet.text(middle, sheet.y + 16, text, anchor="middle", halo=True, weight=weight)
            if looked_up:
                sheet.frame(x, sheet.y, box, BOX)
            in_the_way = any(column < n for n in n_pages[row + 1 :])
            lane = x + box + 5 + LANE * row if in_the_way else middle
            ports.append(Port(row, page, middle, sheet.y + BOX, lane, below, looked_up))
        if length == 0:
            sheet.text(LEFT, sheet.y + 17, "no page", fill=GREY)
        if -(-length // size) > MOST_PAGES_OF_A_ROW:
            sheet.text(LEFT + MOST_PAGES_OF_A_ROW * width, sheet.y + 17, "…")
        sheet.y += ROW
    return ports


def _pool(
    sheet: Sheet, lengths: np.ndarray, holders: Holders, size: int, n_shown: int, highlight: tuple[int, int] | None
) -> dict[int, Target]:
    """Draw the pool's pages with their slots; return where a line enters each page."""
    room = WIDTH - POOL_LEFT
    per_line = max(4, min(16, n_shown, int(room / (20 * size + POOL_GAP))))
    box = min(30.0 * size, room / per_line - POOL_GAP)
    targets = {}
    for page in range(n_shown):
        line, column = divmod(page, per_line)
        x, y = POOL_LEFT + column * (box + POOL_GAP), sheet.y + line * POOL_LINE
        lane = x - POOL_GAP / 2 + LANE * ((line - 1) % 3 - 1)
        targets[page] = Target(x + box / 2, y, lane if line else None)
        _pool_page(sheet, x, y, box, page, holders.get(page, []), lengths, size, highlight)
    sheet.y += -(-n_shown // per_line) * POOL_LINE - 14
    return targets


def _pool_page(
    sheet: Sheet, x: float, y: float, box: float, page: int, holders: list[tuple[int, int]], lengths: np.ndarray,
    size: int, highlight: tuple[int, int] | None,
) -> None:  # fmt: skip
    """One page: its slots, filled, unused or free, and whose it is."""
    rows = ", ".join(map(str, sorted({row for row, _ in holders})))
    long = f"page {page}: row {rows}" if rows else f"page {page}: free"
    names = (long, long.removeprefix("page "), f"{page}")
    name = next((name for name in names if text_width(name, SMALL) < box + 2), f"{page}")
    sheet.text(x + box / 2, y + POOL_BOX + 13, name, size=SMALL, anchor="middle", fill=INK if holders else GREY)
    if not holders:
        sheet.hollow(x, y, box, POOL_BOX)
        return
    row, column = holders[0]
    slot, n_filled = box / size, n_filled_by(lengths, size, row, column)
    is_held = highlight is not None and (highlight[0], highlight[1] // size) in holders
    bold = highlight[1] % size if highlight is not None and is_held else None
    if slot < 8:
        sheet.box(x, y, slot * n_filled, POOL_BOX, row)
        if n_filled < size:
            sheet.unused(x + slot * n_filled, y, slot * (size - n_filled), POOL_BOX)
        if bold is not None:
            sheet.frame(x + bold * slot, y, slot, POOL_BOX)
        return
    labelled = text_width(f"{column * size + n_filled - 1}", SMALL) < slot
    for index in range(size):
        if index >= n_filled:
            sheet.unused(x + index * slot, y, slot, POOL_BOX)
            continue
        sheet.box(x + index * slot, y, slot, POOL_BOX, row)
        token = column * size + index
        if labelled:
            sheet.text(x + (index + 0.5) * slot, y + 18, f"{token}", size=SMALL, anchor="middle", halo=True,
                       weight="bold" if index == bold else "normal")  # fmt: skip
        if index == bold:
            sheet.frame(x + index * slot, y, slot, POOL_BOX)

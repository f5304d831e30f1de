"""The tile loop of split-KV in plain PyTorch, with switches for what people get wrong, and inputs that show it."""

from typing import Any

import torch

from pkv.cache.paged import PagedKVCache
from pkv.course.graders.batches import attend, paged_batch, rounded_up, row_of
from pkv.course.graders.ex01_states import LN_2, merge_states
from pkv.course.tasks import Spec, Unfit
from pkv.plans.shape import HEADS_PER_PROGRAM


def loop_batch(spec: Spec) -> tuple[torch.Tensor, PagedKVCache, int, int, float]:
    """q, a cache, splits, tile, scale: as paged_batch(spec), with values spec["values"] times as large.

    scores: "any", all "below 0", or by far "rising" or "falling" from tile to tile. Entries of the table past a row's
    pages name a page of NaN, which is nobody's: a kernel that reads it is wrong, but no process dies of it.
    """
    if min(spec["splits"], spec["values"]) < 1 or not any(spec["lengths"]):
        raise Unfit
    q, cache = paged_batch(spec)
    k, v = (torch.cat([side, torch.full_like(side[:1], torch.nan)]) for side in (cache.k_pages, cache.v_pages))
    nobodys = len(k) - 1
    table = torch.where(cache.block_table < nobodys, cache.block_table, nobodys)
    if spec["scores"] != "any":
        q, k = q.abs() * (-1 if spec["scores"] == "below 0" else 1), k.abs()
    if spec["scores"] in ("rising", "falling"):
        slots = torch.arange(spec["page_size"], device=k.device)[:, None, None]
        for number in range(cache.block_table.shape[1]):
            factor = 1 + (number * spec["page_size"] + slots) // spec["tile"]
            k[table[:, number].long()] *= factor / 2 if spec["scores"] == "rising" else 1 / factor
    table = torch.nn.functional.pad(table, (0, 2 * spec["tile"]), value=nobodys)
    cache = PagedKVCache(k, v * spec["values"], table, cache.lengths, host_lengths=list(spec["lengths"]))
    return q, cache, spec["splits"], spec["tile"], 0.3


def whole_rows(q: torch.Tensor, cache: PagedKVCache, splits: int, tile: int, scale: float) -> Any:
    """out and lse, row by row, all tokens at once; cuts change nothing."""
    q, k, v, table = (x.cpu() for x in (q.float(), cache.k_nhd.float(), cache.v_nhd.float(), cache.block_table))
    states = [
        attend(mine, row_of(k, table[row], length), row_of(v, table[row], length), scale)
        for row, (mine, length) in enumerate(zip(q, cache.lengths.tolist()))
    ]
    return torch.stack([out for out, _ in states]), torch.stack([lse for _, lse in states])


def cut_row(longest: int, length: int, splits: int, tile: int) -> list[tuple[int, int]]:
    """The splits of a row."""
    n = -(-longest // tile)
    return [(n * s // splits * tile, min(n * (s + 1) // splits * tile, length)) for s in range(splits)]


def tile_loop(q: torch.Tensor, cache: PagedKVCache, splits: int, tile: int, scale: float, **made: Any) -> Any:
    """out and lse, tile by tile, in fp32 as on a GPU; made: options of one_state, which are mistakes."""
    q, k, v = (x.cpu() for x in (q, cache.k_nhd, cache.v_nhd))
    lengths, table = cache.lengths.tolist(), cache.block_table.cpu()
    outs, lses = torch.empty(q.shape), torch.empty(q.shape[:2])
    for row, length in enumerate(lengths):
        states = [
            one_state(q[row], k, v, table, row, length, begin, end, tile, scale, **made)
            for begin, end in cut_row(max(lengths), length, splits, tile)
        ]
        out, lse = (torch.stack(parts) for parts in zip(*states))
        outs[row], lses[row] = (out[0], lse[0]) if splits == 1 else merge_states(out, lse)
    return outs, lses


def grid_heads_of(q: torch.Tensor, n_kv_heads: int) -> torch.Tensor:
    """The grid_head of each query head. In fp32 each has its own program, else up to 32 share one."""
    heads, group = torch.arange(len(q)), len(q) // n_kv_heads
    per_program = 1 if q.dtype == torch.float32 else HEADS_PER_PROGRAM
    return heads // group * rounded_up(group, per_program) + heads % group // per_program


def largest_of_program(largest: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """One for all heads of a program; where these are fewer than its block has room for, scores of 0 are among them."""
    room = max(8, 1 << (min(len(grid) // (int(grid[-1]) + 1), HEADS_PER_PROGRAM) - 1).bit_length())
    mine = [largest[grid == program] for program in grid.tolist()]
    return torch.stack([some.amax().clamp(min=0.0) if len(some) < room else some.amax() for some in mine])


def kv_heads_of(q: torch.Tensor, n_kv_heads: int, head_map: str) -> torch.Tensor:
    """The KV head that each query head reads."""
    group, grid = len(q) // n_kv_heads, grid_heads_of(q, n_kv_heads)
    heads = torch.arange(len(q))
    return {
        "grid": heads // group,
        "modulo": grid % n_kv_heads,
        "program": grid,
        "group": grid // group,
        "first": 0 * grid,
    }[head_map]


def one_state(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, row: int, length: int, begin: int, end: int,
    tile: int, scale: float, *, head_map: str = "grid", pages: str = "table", begins: str = "begin", ends: str = "end",
    step: str = "tile", tail: str = "-inf", largest: str = "running", corrects: str = "both", keeps: str = "all",
    divides: str = "end", factor: float = 1.0, lse: str = "natural",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The state of one split, all query heads; the options are mistakes, but for their defaults."""
    _, page_size, n_kv_heads, head_dim = k.shape
    heads = kv_heads_of(q, n_kv_heads, head_map)
    ids = {"table": table[row], "row 0": table[0], "logical": torch.arange(table.shape[1])}[pages].long()
    begin = 0 if begins == "0" else begin
    end = {
        "row": length,
        "whole tiles": max(begin, end // tile * tile),
        "last token": end - 1,
        "first tile": min(end, begin + tile),
    }.get(ends, end)
    acc, sums, n_tiles = torch.zeros(len(q), head_dim), torch.zeros(len(q)), 0
    running = torch.full([len(q)], 0.0 if largest == "from 0" else -torch.inf)
    for start in range(begin, end, page_size if step == "page" else tile):
        tokens = torch.arange(start, start + tile)
        exists = tokens < end
        at = (ids[tokens.clamp(max=end - 1) // page_size] * page_size + tokens % page_size)[:, None] * n_kv_heads
        at = (at + heads).clamp(max=k[..., 0].numel() - 1)
        k_tile, v_tile = (torch.where(exists[:, None, None], x.reshape(-1, head_dim)[at].float(), 0.0) for x in (k, v))
        counts = {"-inf": exists, "0": exists | True, "from 0": tokens - start < end}[tail]
        if ends == "one more":
            counts = counts | (tokens == end)
        scores = torch.einsum("hd,thd->th", q.float(), k_tile) * (scale / LN_2 * factor)
        unmasked = scores.amax(0)  # a token that is not there has score 0
        scores = scores.masked_fill(~counts[:, None], -torch.inf)
        new = unmasked if largest.startswith("unmasked") else scores.amax(0)
        if largest == "over heads" and q.dtype != torch.float32:
            new = largest_of_program(new, grid_heads_of(q, n_kv_heads))
        if largest != "tile":
            new = running if largest == "first" and start > begin else torch.maximum(running, new)
        weights, correction = torch.exp2(scores - new), torch.exp2(running - new)
        shares = (scores * LN_2).softmax(0) if divides == "tiles" else weights
        values = torch.einsum("th,thd->hd", shares, v_tile)
        if corrects in ("both", "sums"):
            sums = sums * correction
        if corrects in ("both", "acc"):
            acc = acc * correction[:, None]
        sums = weights.sum(0) + (sums if keeps == "all" else 0.0)
        acc = values + (0.0 if keeps == "last tile" else acc)
        if divides == "each time":
            acc = acc / sums[:, None]
        running, n_tiles = new, n_tiles + 1
    empty = sums == 0.0
    total = sums.masked_fill(empty, 1.0)
    logs = {
        "natural": (running + total.log2()) * LN_2,
        "log2": running + total.log2(),
        "multiplied": (running + total.log2()) / LN_2,
        "mixed": running + total.log(),
        "without max": total.log(),
        "max": running * LN_2,
    }[lse]
    if divides in ("end", "tiles"):
        acc = acc / (total[:, None] if divides == "end" else max(n_tiles, 1))
    return acc, logs if largest == "unmasked, and lse" else logs.masked_fill(empty, -torch.inf)

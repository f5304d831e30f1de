"""Kernels of a queue in plain Python, program by program: what comes of one that is right but for one thing."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from pkv.cache.paged import PagedKVCache
from pkv.course.graders.batches import attend
from pkv.course.graders.ex03_queues import Item

ZEROS = 4096  # numbers, or states, that a wrong index finds behind those that are used
State = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Program:
    """What one program does: query_row's query over begin:end of a row, for one KV head; stored as the result of row
    `at`, or as partial state `at`.
    """

    query_row: int
    row: int
    begin: int
    end: int
    kv_head: int
    at: int
    is_result: bool


@dataclass(frozen=True)
class Memory:
    """What programs read, flat, with zeros behind it."""

    offsets: list[int]
    items: list[int]
    order: list[int]
    lengths: list[int]
    n_kv_heads: int

    def index(self, number: int) -> int:
        """Of a program's item."""
        return self.order[number // self.n_kv_heads]

    def columns(self, index: int) -> list[int]:
        """row, begin, end of an item."""
        return self.items[3 * index : 3 * index + 3]


def right_program(
    number: int, memory: Memory, *, entry: int | None = None, index: int | None = None,
    columns: list[int] | None = None, row: int | None = None, counted: int | None = None,
) -> Program:  # fmt: skip
    """Program `number`; the options are mistakes. counted: the row whose items are counted."""
    entry = number // memory.n_kv_heads if entry is None else entry
    index = memory.order[entry] if index is None else index
    listed, begin, end = memory.columns(index) if columns is None else columns
    row = listed if row is None else row
    counted = row if counted is None else counted
    is_result = memory.offsets[counted + 1] - memory.offsets[counted] == 1
    return Program(row, row, begin, end, number % memory.n_kv_heads, row if is_result else index, is_result)


def state_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> State:
    """out and lse of query heads [group, d] over tokens [n, d] of one KV head, in fp32."""
    return attend(q.float(), k.float()[:, None], v.float()[:, None], q.shape[-1] ** -0.5)


def tokens_of(rows: list[State], one: Program) -> State:
    """k and v of a program's tokens and KV head, NaN where the row has none."""
    n_heads, d = rows[0][0].shape[1:]
    nothing = torch.full((max(one.end, 0), n_heads, d), torch.nan)
    k, v = rows[one.row] if one.row < len(rows) else (nothing[:0], nothing[:0])
    both = [torch.cat([side, nothing])[one.begin : max(one.begin, one.end), one.kv_head] for side in (k, v)]
    return both[0], both[1]


def play(program_of: Callable[[int, Memory], Program]) -> Callable[..., State]:
    """The answer of a kernel that does what program_of(number, memory) says, one program after the other."""

    def answer(q: torch.Tensor, cache: PagedKVCache, items: list[Item], offsets: list[int], order: list[int]) -> State:
        n_rows, n_q_heads, d = q.shape
        zeros, group = [0] * ZEROS, n_q_heads // cache.n_kv_heads
        flat = [number for item in items for number in item]
        memory = Memory(offsets + zeros, flat + zeros, order + zeros, cache.lengths.tolist(), cache.n_kv_heads)
        rows = [(k.float().cpu(), v.float().cpu()) for k, v in map(cache.gather, range(n_rows))]
        results, partials = (
            (torch.zeros(ZEROS, n_q_heads, d), torch.full((ZEROS, n_q_heads), -torch.inf)) for _ in range(2)
        )
        queries = torch.cat([q.float().cpu(), torch.zeros(ZEROS, n_q_heads, d)])
        for number in range(len(order) * cache.n_kv_heads):
            one = program_of(number, memory)
            heads = slice(one.kv_head * group, (one.kv_head + 1) * group)
            out, lse = results if one.is_result else partials
            k, v = tokens_of(rows, one)
            out[one.at, heads], lse[one.at, heads] = state_of(queries[one.query_row, heads], k, v)
        for row, (first, last) in enumerate(pairwise(offsets)):
            if last - first > 1:
                lses = partials[1][first:last]
                results[1][row] = lses.logsumexp(0)
                weights = (lses - results[1][row]).exp().nan_to_num()  # -inf - -inf: no tokens at all
                results[0][row] = (partials[0][first:last] * weights[..., None]).sum(0)
        return results[0][:n_rows].to(q.dtype), results[1][:n_rows]

    return answer


def changed(**change: Callable[[int, Memory, Program], Any]) -> Callable[..., State]:
    """The answer of a kernel that is right but for some fields of its programs."""

    def program_of(number: int, memory: Memory) -> Program:
        right = right_program(number, memory)
        return Program(**{**vars(right), **{name: value(number, memory, right) for name, value in change.items()}})

    return play(program_of)

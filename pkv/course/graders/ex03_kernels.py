"""How ex03_4 is judged, the queue's kernel. ex03_programs.py plays what wrong kernels do.

Memory behind q, the block table and the pages is spare, and holds what is harmless to read: a kernel with a wrong index
gives a wrong answer, and does not end the process that asks it.
"""

import random
from typing import Any

import torch

from pkv.cache.paged import PagedKVCache
from pkv.course.graders.asking import kernel_mistake, launched
from pkv.course.graders.batches import attend, paged_batch
from pkv.course.graders.ex03_programs import Memory, Program, State, changed, play, right_program
from pkv.course.graders.ex03_queues import Item, cut
from pkv.course.tasks import Case, Mistake, Property, Spec, Task, Unfit

TILE = 16
SPARE_ROWS = 128


def queue_arguments(spec: Spec) -> tuple[Any, ...]:
    """q, cache, items, offsets, order."""
    if spec["n_splits"] < 1:
        raise Unfit
    q, cache = paged_batch({**spec, "dtype": "float16"})
    items = cut(spec["lengths"], spec["n_splits"], TILE)
    offsets = [sum(row < r for row, _, _ in items) for r in range(len(q) + 1)]
    order = sorted(range(len(items)), key=lambda i: items[i][1] - items[i][2])
    if spec["order"] == "from behind":
        order = list(range(len(items)))[::-1]
    if spec["order"] == "every second":
        order = order[::-1][::2]
    return with_spare(q), guarded(cache), items, offsets, order


def with_spare(rows: torch.Tensor) -> torch.Tensor:
    """The same rows, with room behind them: of zeros."""
    return torch.cat([rows, rows.new_zeros(SPARE_ROWS, *rows.shape[1:])])[: len(rows)]


def guarded(cache: PagedKVCache) -> PagedKVCache:
    """The same cache; table entries past a row's pages, and rows past the last, name a page of NaN that no row owns."""
    table, n_pages = cache.block_table, len(cache.k_pages)
    nobodys = next(page for page in range(n_pages) if not (table == page).any())
    table = torch.cat([table, table.new_full((SPARE_ROWS, table.shape[1]), nobodys)])
    table[table >= n_pages] = nobodys
    n_rows = len(cache.lengths)
    return PagedKVCache(
        cache.k_pages, cache.v_pages, table[:n_rows], cache.lengths, host_lengths=cache.lengths.tolist()
    )


def queue_right(
    q: torch.Tensor, cache: PagedKVCache, items: list[Item], offsets: list[int], order: list[int]
) -> State:  # fmt: skip
    """Each row's attention over the tokens of its items that the order names, at once."""
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf)
    for row in range(len(q)):
        k, v = cache.gather(row)
        tokens = [t for i in order if items[i][0] == row for t in range(items[i][1], items[i][2])]
        state = attend(q[row].float(), k[tokens].float(), v[tokens].float(), q.shape[2] ** -0.5)
        out[row], lse[row] = state[0].to(q.dtype), state[1]
    return out, lse


def with_kernel(function: Any, *arguments: Any) -> Any:
    """The answer; by a kernel, where there is an item to do."""
    order = arguments[-1]
    return launched(function, *arguments) if order else function(*arguments)


def batch(rng: random.Random, lengths: list[int], n_splits: int, order: str = "longest first", **others: Any) -> Spec:
    """A batch with pages of 4 or 8 tokens, 2 or 3 KV heads."""
    sizes = {"page_size": rng.choice([4, 8]), "n_kv_heads": 2, "group": rng.choice([3, 4]), "head_dim": 16}
    return {"lengths": lengths, "n_splits": n_splits, "order": order, **sizes, "seed": rng.randrange(1000), **others}


def beside(number: int, memory: Memory, program: Program) -> bool:
    """Is an item of the same row listed before or after a program's item? Behind the last one there are zeros."""
    index = memory.index(number)
    before = index > 0 and memory.columns(index - 1)[0] == program.row
    return before or memory.columns(index + 1)[0] == program.row


def unwritten(case: Case, got: Any) -> str | None:
    """Which rows, or query heads of one, have tokens and no result."""
    right = case.right[1]
    if not isinstance(got, list) or len(got) != 2 or getattr(got[1], "shape", None) != right.shape:
        return None
    lost = (right.isfinite() & got[1].isneginf()).nonzero()
    if not len(lost):
        return None
    if len(lost) == right.isfinite().sum():
        return "no row has a result: the state of a row's only item goes there, others into the partials"
    row, heads = int(lost[0, 0]), [int(head) for r, head in lost if r == lost[0, 0]]
    return f"nothing is stored for query heads {heads} of row {row}: was that item done, for that KV head?"


def is_nan(case: Case, got: Any) -> bool:
    """lse is NaN where there are tokens: none of the inputs that may be read is."""
    right, lse = case.right[1], got[1] if isinstance(got, list) and len(got) == 2 else None
    return isinstance(lse, torch.Tensor) and lse.shape == right.shape and bool((lse.isnan() & right.isfinite()).any())


EX03_4 = Task(
    id="ex03_4",
    title="the queue's kernel",
    function="decode_queue",
    kernel="queue_kernel",
    lines=10,
    points=6,
    arguments=queue_arguments,
    right=queue_right,
    call=with_kernel,
    axes=("row", "query head", "dim"),
    tolerance=2e-3,
    fixed=("order", "head_dim", "size"),
    shortcuts=("run", "plan", "stages", "attend_item", "workqueue_kernel", "attend_row", "reference"),
    properties=(
        Property("the only item of a row is its result, for every KV head", lambda rng: [
            batch(rng, [5], 1), batch(rng, [16, 3], 1), batch(rng, [3, 17, 20], 1, n_kv_heads=3, group=2),
            batch(rng, [5], 1, group=40)]),
        Property("states of a split row lie at their items' indices, whatever the order", lambda rng: [
            batch(rng, [40], 2), batch(rng, [5, 40, 0], 2), batch(rng, [20, 33, 2], 3, order="from behind")]),
        Property("rows without tokens, before and between others", lambda rng: [
            batch(rng, [0], 2), batch(rng, [0, 5, 0, 20], 2), batch(rng, [0, 0, 18], 1)]),
        Property("only what the order names is done", lambda rng: [
            batch(rng, [5, 3], 1, order="every second"), batch(rng, [20, 40], 2, order="every second"),
            batch(rng, [3, 40, 0, 18], 3, order="every second")]),
        Property("scores of a few hundred", lambda rng: [
            batch(rng, [7, 35], 2, size=100.0), batch(rng, [20, 3], 2, "from behind", size=100.0)]),
    ),
    mistakes=(
        kernel_mistake("queue_kernel"),
        Mistake("kv_heads_forgotten", "takes the program's number for its entry: GRID_HEADS programs share an entry",
                play(lambda n, m: right_program(n, m, entry=n))),
        Mistake("order_unread", "takes the entry for the item: entry e is the item order[e]",
                play(lambda n, m: right_program(n, m, index=n // m.n_kv_heads))),
        Mistake("state_at_entry", "stores the state at its entry: the merge reads it at its item's index",
                changed(at=lambda n, m, p: p.at if p.is_result else n // m.n_kv_heads)),
        Mistake("next_in_list", "counts a row's items by those beside it in the list: behind the last one there are "
                "zeros, which look like items of row 0; offsets say how many items a row has",
                changed(at=lambda n, m, p: m.index(n) if beside(n, m, p) else p.row,
                        is_result=lambda n, m, p: not beside(n, m, p))),
        Mistake("no_partials", "stores no partial state: where a row has several items, each state is one of them",
                changed(at=lambda n, m, p: p.row, is_result=lambda n, m, p: True)),
        Mistake("no_results", "stores no result: where a row has one item, its state is the result, and is not merged",
                changed(at=lambda n, m, p: m.index(n), is_result=lambda n, m, p: False)),
        Mistake("first_is_result", "takes the item that begins at token 0 for the row's only one",
                changed(at=lambda n, m, p: m.index(n) if p.begin else p.row,
                        is_result=lambda n, m, p: p.begin == 0)),
        Mistake("last_is_result", "takes the item that ends the row for the row's only one",
                changed(at=lambda n, m, p: p.row if p.end == m.lengths[p.row] else m.index(n),
                        is_result=lambda n, m, p: p.end == m.lengths[p.row])),
        Mistake("result_at_item", "stores a result at its item's index: results lie by rows",
                changed(at=lambda n, m, p: m.index(n))),
        Mistake("result_at_entry", "stores a result at its entry: results lie by rows",
                changed(at=lambda n, m, p: n // m.n_kv_heads if p.is_result else p.at)),
        Mistake("partial_at_row", "stores partial states at their row, not at their item's index",
                changed(at=lambda n, m, p: p.row)),
        Mistake("partial_at_first", "stores all states of a row at offsets[row]: each overwrites the last",
                changed(at=lambda n, m, p: p.row if p.is_result else m.offsets[p.row])),
        Mistake("query_of_item", "loads the query at the item's index: queries lie by rows",
                changed(query_row=lambda n, m, p: m.index(n))),
        Mistake("query_of_entry", "loads the query at the entry: queries lie by rows",
                changed(query_row=lambda n, m, p: n // m.n_kv_heads)),
        Mistake("row_at_entry", "reads the row at the entry, and begin and end at the item",
                play(lambda n, m: right_program(n, m, row=m.columns(n // m.n_kv_heads)[0]))),
        Mistake("bounds_at_entry", "reads begin and end at the entry, and the row at the item",
                changed(begin=lambda n, m, p: m.columns(n // m.n_kv_heads)[1],
                        end=lambda n, m, p: m.columns(n // m.n_kv_heads)[2])),
        Mistake("whole_row", "attends to the whole row, not to the item's tokens",
                changed(begin=lambda n, m, p: 0, end=lambda n, m, p: m.lengths[p.row])),
        Mistake("from_first_token", "attends from token 0 on: the item begins at `begin`",
                changed(begin=lambda n, m, p: 0)),
        Mistake("to_last_token", "attends to the end of the row: the item ends at `end`",
                changed(end=lambda n, m, p: m.lengths[p.row])),
        Mistake("offsets_at_item", "reads offsets at the item's index: they belong to rows",
                play(lambda n, m: right_program(n, m, counted=m.index(n)))),
        Mistake("offsets_at_entry", "reads offsets at the entry: they belong to rows",
                play(lambda n, m: right_program(n, m, counted=n // m.n_kv_heads))),
        Mistake("offsets_of_row_0", "counts the items of row 0 only: offsets + row, and the next one",
                play(lambda n, m: right_program(n, m, counted=0))),
        Mistake("item_is_row", "takes the item's index for its row: a row may have several items, or none",
                play(lambda n, m: right_program(n, m, row=m.index(n)))),
        Mistake("kv_head_0", "serves KV head 0 only", changed(kv_head=lambda n, m, p: 0)),
        Mistake("three_forgotten", "reads the item at items + index: each item is three numbers",
                play(lambda n, m: right_program(n, m, columns=m.items[m.index(n) :][:3]))),
        Mistake("foreign_tokens", "reads slots that hold no token of the row: NaN stands there",
                shows=lambda case, got: is_nan(case, got)),
        Mistake("unwritten", lambda case, got: unwritten(case, got) or "",
                shows=lambda case, got: unwritten(case, got) is not None),
    ),
)  # fmt: skip

"""How ex03_5 and ex03_6 are judged: what a queue costs, counted without running it, and when its last program ends."""

import functools
import math
import random
from collections import Counter
from collections.abc import Callable
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from pkv.bench.loads.traces import make_trace, steps_of
from pkv.course.comparing import agree
from pkv.course.graders.ex03_queues import Item, cut
from pkv.course.tasks import Case, Mistake, Property, Spec, Task, Unfit

MIB, MB = 2**20, 10**6
SIZES = ("n_q_heads", "n_kv_heads", "head_dim", "bytes_per_number", "n_sms", "programs_per_sm")
PAPERS = dict(zip(SIZES, (32, 8, 128, 2, 28, 2)))
# Means over the steps of a trace (eight rows, 48 steps, seed 20260623, tiles of 32), as the paper prints them.
PUBLISHED = {
    ("bimodal", 20): {"launches": 2.00, "cta_per_sm": 45.7, "useful_kv_mib": 550.5, "merge_state_mib": 2.54},
    ("uniform", 24): {"launches": 2.00, "cta_per_sm": 54.9, "useful_kv_mib": 671.0, "merge_state_mib": 3.05},
    ("zipf", 28): {"launches": 2.00, "cta_per_sm": 64.0, "useful_kv_mib": 672.2, "merge_state_mib": 3.55},
}
DIGITS = {"launches": 2, "cta_per_sm": 1, "useful_kv_mib": 1, "merge_state_mib": 2}
Counts = dict[str, float]


class Steps(list[Any]):
    """What there is of each step of a trace; run: its key in PUBLISHED."""

    run: tuple[str, int]


@functools.cache
def trace_lengths(trace: str) -> list[list[int]]:
    """The row lengths of the paper's steps."""
    return steps_of(make_trace(trace, 20260623, 24, 8), 8, 48)


def counter_arguments(spec: Spec) -> tuple[Any, ...]:
    """items, lengths, and the sizes; of a trace, the items and the lengths of all steps."""
    sizes = tuple(spec[name] for name in SIZES)
    if min(spec["n_splits"], spec["tile"], *sizes) < 1:
        raise Unfit
    if "trace" not in spec:
        items = cut(spec["lengths"], spec["n_splits"], spec["tile"], keep_empty=spec["stage"] == "row_local")
        return items, list(spec["lengths"]), *sizes
    run = spec["trace"], spec["n_splits"]
    if run not in PUBLISHED or (spec["tile"], *sizes) != (32, *PAPERS.values()):
        raise Unfit
    lengths = Steps(list(step) for step in trace_lengths(spec["trace"]))
    of_steps = Steps(cut(step, spec["n_splits"], spec["tile"]) for step in lengths)
    of_steps.run = run
    return of_steps, lengths, *sizes


def over_steps(count: Callable[..., Any], items: Any, lengths: Any, *sizes: int) -> Any:
    """What `count` gives; of a trace the means over its steps, with the paper's digits."""
    if not isinstance(items, Steps):
        return count(items, lengths, *sizes)
    each = [count(*step, *sizes) for step in zip(items, lengths)]
    if not all(isinstance(counts, dict) and counts.keys() == each[0].keys() for counts in each):
        return each[0]
    return {key: round(fmean(c[key] for c in each), n) for key, n in DIGITS.items() if key in each[0]}


def count_right(
    items: list[Item], lengths: list[int], n_q_heads: int, n_kv_heads: int, head_dim: int, bytes_per_number: int,
    n_sms: int, programs_per_sm: int,
) -> Counts:  # fmt: skip
    """The definitions; of a trace, what the paper has published."""
    if isinstance(items, Steps):
        return PUBLISHED[items.run]
    n_full = sum(begin != end for _, begin, end in items)
    return {
        "launches": bool(items) + any(n != 1 for n in items_of_rows(items, lengths)),
        "programs": n_kv_heads * len(items),
        "empty_programs": n_kv_heads * (len(items) - n_full),
        "waves": n_kv_heads * len(items) / programs_per_sm / n_sms,
        "cta_per_sm": n_kv_heads * n_full / n_sms,
        "useful_kv_mib": sum(lengths) * n_kv_heads * head_dim * bytes_per_number * 2 / MIB,
        "merge_state_mib": n_full * n_q_heads * (head_dim + 2) * 4 / MIB,
    }


def items_of_rows(items: list[Item], lengths: list[int]) -> list[int]:
    """How many items each row has."""
    counts = Counter(row for row, _, _ in items)
    return [counts[row] for row in range(len(lengths))]


def about(key: str, name: str, says: str, value: Callable[[list[Item], list[int], Any], float]) -> Mistake:
    """The first counter that is wrong is `key`, and it is what `value` gives."""

    def wrong(items: list[Item], lengths: list[int], *sizes: int) -> Counts:
        return {key: value(items, lengths, SimpleNamespace(**dict(zip(SIZES, sizes))))}

    def shows(case: Case, got: Any) -> bool:
        if not isinstance(got, dict) or got.keys() != case.right.keys():
            return False
        first = next((k for k, right in case.right.items() if not agree(right, got[k], 1e-5)), None)
        return first == key and agree(over_steps(wrong, *case.arguments)[key], got[key], 1e-5)

    return Mistake(name, f"{key} {says}", shows=shows)


def full(items: list[Item]) -> int:
    """Items with tokens."""
    return sum(begin < end for _, begin, end in items)


def in_split_rows(items: list[Item], lengths: list[int]) -> int:
    """Items with tokens of rows with several items."""
    counts = items_of_rows(items, lengths)
    return sum(begin < end and counts[row] > 1 for row, begin, end in items)


def kv_bytes(s: Any) -> int:
    """Of a token."""
    return 2 * s.n_kv_heads * s.head_dim * s.bytes_per_number


def state_bytes(s: Any) -> int:
    """Of an item."""
    return 4 * s.n_q_heads * (2 + s.head_dim)


def counter_specs(rng: random.Random, *batches: tuple[list[int], int], stage: str = "workqueue") -> list[Spec]:
    """Batches (lengths, splits), with sizes of their own."""
    sizes = ((8, 2, 64, 2, 28, 2), (12, 3, 80, 1, rng.randrange(5, 99), 3), (10, 5, 128, 4, 132, rng.randrange(4, 9)))
    return [
        {"lengths": lengths, "n_splits": n_splits, "tile": 16, "stage": stage, **dict(zip(SIZES, some))}
        for (lengths, n_splits), some in zip(batches, sizes * len(batches))
    ]


def paper_specs(rng: random.Random) -> list[Spec]:
    """One run of the paper, and another one."""
    runs = [("bimodal", 20), rng.choice([("uniform", 24), ("zipf", 28)])]
    return [{"trace": trace, "n_splits": n_splits, "tile": 32, **PAPERS} for trace, n_splits in runs]


# (counter, name, what is wrong with it, what it then is for items i, lengths n, sizes s)
WRONG: tuple[tuple[str, str, str, Callable[[list[Item], list[int], Any], float]], ...] = (
    ("launches", "always_two", "are always 2: rows of one item each need no merge", lambda i, n, s: 2),
    ("launches", "empty_rows_not_merged", "leave out a merge that rows without items need: somebody must "
     "write their result", lambda i, n, s: bool(i) + (max(items_of_rows(i, n), default=0) > 1)),
    ("launches", "empty_rows_not_merged", "leave out a merge that rows without items need: somebody must "
     "write their result", lambda i, n, s: 1 + (max(items_of_rows(i, n), default=0) > 1)),
    ("launches", "empty_items_not_merged", "leave out a merge that empty items need: their row has several states",
     lambda i, n, s: bool(i) + any(k != 1 for k in items_of_rows([item for item in i if item[1] < item[2]], n))),
    ("launches", "as_many_as_rows", "leave out a merge where there are as many items as rows: one row may have two, "
     "and another none", lambda i, n, s: bool(i) + (len(i) != len(n))),
    ("launches", "decodes_nothing", "count a decode launch where there are no items",
     lambda i, n, s: 1 + any(k != 1 for k in items_of_rows(i, n))),
    ("launches", "per_length", "are those of length_buckets, two per distinct length: the queue has one list "
     "for all rows", lambda i, n, s: 2 * len({*n})),
    ("launches", "no_merge", "lack the merge", lambda i, n, s: bool(i)),
    ("programs", "kv_heads_forgotten", "lack the KV heads: one program for each item and KV head",
     lambda i, n, s: len(i)),
    ("programs", "query_heads", "count one for each query head: one serves all that share a KV head",
     lambda i, n, s: len(i) * s.n_q_heads),
    ("programs", "full_only", "leave out empty items: their programs are launched, too",
     lambda i, n, s: full(i) * s.n_kv_heads),
    ("programs", "rectangle", "are a rectangle of rows and splits: count the items there are",
     lambda i, n, s: len(n) * max(items_of_rows(i, n), default=0) * s.n_kv_heads),
    ("empty_programs", "kv_heads_forgotten", "lack the KV heads: one program for each item and KV head",
     lambda i, n, s: len(i) - full(i)),
    ("empty_programs", "full_counted", "are programs with tokens", lambda i, n, s: full(i) * s.n_kv_heads),
    ("empty_programs", "none", "are always 0", lambda i, n, s: 0),
    ("waves", "rounded", "are rounded up", lambda i, n, s: math.ceil(
        len(i) * s.n_kv_heads / (s.n_sms * s.programs_per_sm))),
    ("waves", "rounded", "are rounded down", lambda i, n, s: len(i) * s.n_kv_heads // (s.n_sms * s.programs_per_sm)),
    ("waves", "one_per_sm", "take one program per SM: programs_per_sm run at once",
     lambda i, n, s: len(i) * s.n_kv_heads / s.n_sms),
    ("waves", "kv_heads_forgotten", "lack the KV heads", lambda i, n, s: len(i) / s.n_sms / s.programs_per_sm),
    ("waves", "full_only", "leave out empty programs: they take a place, too",
     lambda i, n, s: full(i) * s.n_kv_heads / s.n_sms / s.programs_per_sm),
    ("cta_per_sm", "empty_counted", "counts empty programs", lambda i, n, s: len(i) * s.n_kv_heads / s.n_sms),
    ("cta_per_sm", "kv_heads_forgotten", "lacks the KV heads", lambda i, n, s: full(i) / s.n_sms),
    ("cta_per_sm", "resident", "is divided by programs_per_sm: it counts all programs that an SM gets",
     lambda i, n, s: full(i) * s.n_kv_heads / s.n_sms / s.programs_per_sm),
    ("useful_kv_mib", "longest_row", "counts every row as long as the longest: only its own tokens are useful",
     lambda i, n, s: len(n) * max(n, default=0) * kv_bytes(s) / MIB),
    ("useful_kv_mib", "mb_for_mib", "is in MB: a MiB has 2**20 bytes", lambda i, n, s: sum(n) * kv_bytes(s) / MB),
    ("useful_kv_mib", "k_only", "counts K or V, not both", lambda i, n, s: sum(n) * kv_bytes(s) / 2 / MIB),
    ("useful_kv_mib", "query_heads", "counts K and V once per query head: they are read once per KV head",
     lambda i, n, s: sum(n) * kv_bytes(s) // s.n_kv_heads * s.n_q_heads / MIB),
    ("useful_kv_mib", "kv_heads_forgotten", "is that of one KV head",
     lambda i, n, s: sum(n) * kv_bytes(s) / s.n_kv_heads / MIB),
    ("useful_kv_mib", "fp16_assumed", "takes 2 bytes per number, whatever bytes_per_number",
     lambda i, n, s: sum(n) * kv_bytes(s) // s.bytes_per_number * 2 / MIB),
    ("useful_kv_mib", "bytes_forgotten", "counts numbers, not bytes",
     lambda i, n, s: sum(n) * kv_bytes(s) / s.bytes_per_number / MIB),
    ("useful_kv_mib", "in_bytes", "is in bytes", lambda i, n, s: sum(n) * kv_bytes(s)),
    ("useful_kv_mib", "whole_tiles", "counts whole tiles",
     lambda i, n, s: sum(-(-k // 16) * 16 for k in n) * kv_bytes(s) / MIB),
    ("merge_state_mib", "all_pairs", "counts the states of empty items: only items with tokens leave one that counts",
     lambda i, n, s: len(i) * state_bytes(s) / MIB),
    ("merge_state_mib", "rectangle", "counts as many states for each row as for the one with the most items",
     lambda i, n, s: len(n) * max(items_of_rows(i, n), default=0) * state_bytes(s) / MIB),
    ("merge_state_mib", "split_rows_only", "leaves out rows of one item: the paper counts the states of all items",
     lambda i, n, s: in_split_rows(i, n) * state_bytes(s) / MIB),
    ("merge_state_mib", "twice", "counts states twice, written and read: the paper counts them once",
     lambda i, n, s: 2 * full(i) * state_bytes(s) / MIB),
    ("merge_state_mib", "mb_for_mib", "is in MB: a MiB has 2**20 bytes", lambda i, n, s: full(i) * state_bytes(s) / MB),
    ("merge_state_mib", "kv_heads", "counts a state per KV head: each query head has its own",
     lambda i, n, s: full(i) * state_bytes(s) / s.n_q_heads * s.n_kv_heads / MIB),
    ("merge_state_mib", "one_number", "counts 1 + head_dim numbers: the paper keeps two, maximum and sum, beside out",
     lambda i, n, s: full(i) * s.n_q_heads * (1 + s.head_dim) * 4 / MIB),
    ("merge_state_mib", "out_only", "counts out alone: 2 + head_dim numbers",
     lambda i, n, s: full(i) * s.n_q_heads * s.head_dim * 4 / MIB),
    ("merge_state_mib", "cache_bytes", "takes bytes_per_number of the cache: numbers of a state have 4 bytes",
     lambda i, n, s: full(i) * state_bytes(s) / 4 * s.bytes_per_number / MIB),
    ("merge_state_mib", "per_row", "counts one state per row", lambda i, n, s: len(n) * state_bytes(s) / MIB),
    ("merge_state_mib", "in_bytes", "is in bytes", lambda i, n, s: full(i) * state_bytes(s)),
)  # fmt: skip

EX03_5 = Task(
    id="ex03_5",
    title="what a step costs, counted",
    function="counters",
    lines=14,
    arguments=counter_arguments,
    right=count_right,
    call=over_steps,
    fixed=("stage", "trace", *SIZES),
    properties=(
        Property("launches: a merge where some row has not exactly one item", lambda rng: counter_specs(
            rng, ([5], 1), ([5, 40], 1), ([5, 40], 2), ([40, 0], 2), ([5, 0], 1), ([0], 2), ([], 2))),
        Property("K, V and states are those of the tokens, whatever the sizes", lambda rng: counter_specs(
            rng, ([5, 40, 0], 2), ([5000, 12, 300], 4), ([rng.randrange(9000) for _ in range(4)], 7))),
        Property("empty items take programs, and nothing else", lambda rng: counter_specs(
            rng, ([5, 40, 0], 2), ([0, 1, 300], 4), ([5, 400, 16, 17], rng.randrange(5, 9)), ([5], 2), ([0], 1),
            stage="row_local")),
        Property("the paper's runs give the paper's numbers", paper_specs),
    ),
    mistakes=tuple(about(*row) for row in WRONG),
)  # fmt: skip

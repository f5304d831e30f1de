"""How exercise 04 is judged: the paper's cost model."""

import math
import random
from collections.abc import Callable
from typing import Any

from pkv.course.graders.batches import fails_for_lack
from pkv.course.tasks import Mistake, Property, Spec, Task, Unfit

RATE = 302_000.0  # bytes per us


def cost_us(
    lengths: list[int], n_items: int, n_launches: int, n_q_heads: int, n_kv_heads: int, head_dim: int, n_sms: int, *,
    tokens: Callable[[list[int]], int] = sum, read_heads: str = "kv", token_bytes: int = 4,
    state_numbers: Callable[[int], int] = lambda head_dim: head_dim + 2, state_bytes: float = 4, merge_heads: str = "q",
    programs: Callable[[int, int, int], float] = lambda items, heads, n_sms: items * heads / n_sms,
    slower: Callable[[float], float] = lambda per_sm: max(1.0, 4 / per_sm),
    slow_merge: bool = False, launch_us: float = 8.0, launches: Callable[[int], int] = lambda n: n, rate: float = RATE,
) -> float:  # fmt: skip
    """The paper's three terms; the options are mistakes."""
    heads = {"q": n_q_heads, "kv": n_kv_heads, "one": 1}
    read = tokens(lengths) * heads[read_heads] * head_dim * token_bytes / rate
    merge = n_items * heads[merge_heads] * state_numbers(head_dim) * state_bytes / rate
    factor = slower(programs(n_items, heads["kv"], n_sms)) if n_items else 1.0
    return (read + merge * slow_merge) * factor + merge * (not slow_merge) + launches(n_launches) * launch_us


NAMES = ("lengths", "n_items", "n_launches", "n_q_heads", "n_kv_heads", "head_dim", "n_sms")


def cost_specs(*found: tuple[Any, ...]) -> list[Spec]:
    """Specs of paper_cost."""
    return [dict(zip(NAMES, spec)) for spec in found]


def enough(rng: random.Random) -> list[Spec]:
    """At least 4 programs on each SM, long rows."""
    n = rng.randrange(8, 20)
    long = [rng.randrange(9000, 90000) for _ in range(5)]
    some = [([900, 300], 8, 2, 4, 2, 64, 4), ([700, 0, 810], 12, 2, 4, 1, 100, 3), (long, 5 * n, 2, 32, 8, 128, 10)]
    return cost_specs(*some, ([2000, *long], 6 * n, 4, 9, 3, 80, 11), (long, 70, 2, 8, 8, 128, 28))


def too_few(rng: random.Random) -> list[Spec]:
    """Fewer than 4 programs on each SM, also fewer than one, and no whole numbers of them."""
    tokens = [rng.randrange(9000, 90000) for _ in range(3)]
    some = [([700, 0, 810], 6, 2, 4, 1, 100, 3), ([900], 1, 1, 4, 2, 64, 7), ([8192], 12, 2, 32, 8, 128, 28)]
    return cost_specs(*some, (tokens, rng.choice([4, 5, 6, 8]), 2, 12, 3, 96, 10), (tokens, 3, 2, 8, 8, 128, 28))


def small(rng: random.Random) -> list[Spec]:
    """Few tokens in many items and launches, so that these decide."""
    some = [([40], 40, 2, 4, 1, 4, 3), ([30, 50], 80, 4, 32, 8, 128, 28), ([0, 70, 10], 80, 16, 12, 3, 96, 10)]
    return cost_specs(*some, ([rng.randrange(99, 300)], 90, rng.randrange(3, 20), 64, 4, 64, 28))


def without_items(rng: random.Random) -> list[Spec]:
    """No tokens."""
    return cost_specs(
        ([0], 0, 2, 4, 2, 64, 4), ([], 0, 0, 32, 8, 128, 28), ([0, 0], 0, rng.randrange(2, 9), 8, 2, 64, 28)
    )


def cost_arguments(spec: Spec) -> tuple[Any, ...]:
    """Heads in whole groups, and an item at least for each row with tokens."""
    n_rows = sum(length > 0 for length in spec["lengths"])
    n_q_heads, n_kv_heads, head_dim, n_sms = (spec[name] for name in NAMES[3:])
    if min(n_kv_heads, head_dim, n_sms) < 1 or n_q_heads % n_kv_heads or not n_q_heads:
        raise Unfit
    if not n_rows <= spec["n_items"] <= sum(spec["lengths"]):
        raise Unfit
    return tuple(list(spec[name]) if name == "lengths" else spec[name] for name in NAMES)


def wrong(**options: Any) -> Callable[..., Any]:
    """The paper's cost with an option of cost_us() that is a mistake."""
    return lambda *arguments: cost_us(*arguments, **options)


EX04_3 = Task(
    id="ex04_3",
    title="the paper's cost model",
    function="paper_cost",
    lines=6,
    arguments=cost_arguments,
    right=cost_us,
    shortcuts=("pkv",),
    properties=(
        Property("enough programs read at the memory's rate", enough),
        Property("fewer than 4 programs per SM read slower", too_few),
        Property("launches and states cost what they cost, however little is read", small),
        Property("without items only launches take time", without_items),
    ),
    mistakes=(
        Mistake("seconds", "is in seconds: us are asked for", lambda *a: cost_us(*a) / 1e6),
        Mistake("milliseconds", "is in ms: us are asked for", lambda *a: cost_us(*a) / 1e3),
        Mistake("launches_in_us", "adds us of launches to seconds, or ms, of bytes", wrong(rate=RATE * 1e6)),
        Mistake("launches_in_us", "adds us of launches to seconds, or ms, of bytes", wrong(rate=RATE * 1e3)),
        Mistake("bytes_in_ns", "takes 302 GB/s for 302 bytes per us: it is 302,000", wrong(rate=302.0)),
        Mistake("gib", "takes a GB for 2 ** 30 bytes: it is 1e9", wrong(rate=302 * 2**30 / 1e6)),
        Mistake("per_query_head", "reads K and V once per query head: they are read once per KV head",
                wrong(read_heads="q")),
        Mistake("one_head", "reads one KV head's bytes: all of them are read", wrong(read_heads="one")),
        Mistake("k_only", "counts the bytes of K, or of V, but not of both; or a byte a number", wrong(token_bytes=2)),
        Mistake("fp32_kv", "takes 4 bytes for a number of K and V: fp16 has 2", wrong(token_bytes=8)),
        Mistake("numbers", "counts numbers of K and V, not bytes", wrong(token_bytes=1)),
        Mistake("longest", "reads every row up to the longest one's length: a row has only its own tokens",
                wrong(tokens=lambda lengths: len(lengths) * max(lengths, default=0))),
        Mistake("no_floor", "reads faster than the memory where there are more than 4 programs per SM: max(1, ...)",
                wrong(slower=lambda per_sm: 4 / per_sm)),
        Mistake("never_slower", "reads at the full rate however few programs there are",
                wrong(slower=lambda per_sm: 1.0)),
        Mistake("c_at_least_1", "takes C for 1 at least: fewer programs than SMs read slower still",
                wrong(slower=lambda per_sm: max(1.0, 4 / max(per_sm, 1)))),
        Mistake("min", "takes min for max: too few programs read slower, not faster",
                wrong(slower=lambda per_sm: min(1.0, 4 / per_sm))),
        Mistake("inverse", "has C / 4 for 4 / C", wrong(slower=lambda per_sm: max(1.0, per_sm / 4))),
        Mistake("heads_not_programs", "counts items for programs: each item takes one program per KV head",
                wrong(programs=lambda items, heads, n_sms: items / n_sms)),
        Mistake("not_per_sm", "compares all programs with 4: C is those on each SM",
                wrong(programs=lambda items, heads, n_sms: items * heads)),
        Mistake("whole_programs", "rounds C up: it need not be whole",
                wrong(programs=lambda items, heads, n_sms: -(-items * heads // n_sms))),
        Mistake("whole_programs", "rounds C down: it need not be whole",
                wrong(programs=lambda items, heads, n_sms: items * heads // n_sms)),
        Mistake("whole_factor", "rounds 4 / C up: it need not be whole",
                wrong(slower=lambda per_sm: max(1, math.ceil(4 / per_sm)))),
        Mistake("rows_not_items", "counts rows for items: a row may be cut in many",
                lambda *a: cost_us(*a, programs=lambda items, heads, n_sms: len(a[0]) * heads / n_sms)),
        Mistake("query_heads", "counts each query head as a program: an item takes one program per KV head",
                lambda *a: cost_us(*a, programs=lambda items, heads, n_sms: items * a[3] / n_sms)),
        Mistake("slow_merge", "slows the merge down too: 4 / C is for reading K and V", wrong(slow_merge=True)),
        Mistake("slow_launches", "slows launches down too: 4 / C is for reading K and V",
                lambda *a: cost_us(*a) + a[2] * 8 * (max(1, 4 * a[6] / (a[1] * a[4])) - 1 if a[1] else 0)),
        Mistake("no_merge", "leaves the merge out", wrong(state_bytes=0)),
        Mistake("fp16_states", "takes 2 bytes for a number of a state: fp32 has 4", wrong(state_bytes=2)),
        Mistake("both_ways", "counts states twice, written and read: merge bytes are their size",
                wrong(state_bytes=8)),
        Mistake("out_alone", "counts head_dim numbers of a state: the largest score and the sum belong to it",
                wrong(state_numbers=lambda head_dim: head_dim)),
        Mistake("out_and_lse", "counts one number beside head_dim: the largest score and the sum are two",
                wrong(state_numbers=lambda head_dim: head_dim + 1)),
        Mistake("states_of_kv_heads", "counts states of KV heads: each query head has its own",
                wrong(merge_heads="kv")),
        Mistake("one_state", "counts one state per item: each query head has its own", wrong(merge_heads="one")),
        Mistake("no_launches", "leaves the launches out", wrong(launch_us=0.0)),
        Mistake("two_launches", "takes 2 launches, whatever n_launches says", wrong(launches=lambda n: 2)),
        Mistake("one_launch", "charges one launch, not n_launches", wrong(launches=lambda n: 1)),
        Mistake("max_of_terms", "takes the largest term: they add up",
                lambda *a: max(cost_us(*a, state_bytes=0, launch_us=0.0), a[2] * 8.0,
                               cost_us(*a, token_bytes=0, launch_us=0.0))),
        Mistake("no_items", "fails without items: nothing is read then, and C = 0 divides nothing",
                shows=lambda case, got: fails_for_lack(got) and not case.spec["n_items"]),
    ),
)  # fmt: skip

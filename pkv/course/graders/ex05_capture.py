"""How exercise 05 is judged, last part: a decode that is captured once and replayed.

Where there is no GPU, graphs.py stands in for CUDA graphs: what it finds wrong is wrong on a GPU too.
"""

import random
from typing import Any

import torch

from pkv.cache.paged import PagedKVCache
from pkv.course.comparing import agree
from pkv.course.graders.batches import DEVICE, attend, paged_batch, rounded_up
from pkv.course.graphs import Watch
from pkv.course.tasks import GPU_OPTIONAL, Case, Mistake, Property, Raised, Spec, Task, Unfit

ANOTHER = "replay() gave another tensor than before"
SIZES = {"page_size": 4, "n_kv_heads": 1, "group": 2, "head_dim": 16, "size": 3.0, "dtype": "float16"}


def capture_arguments(spec: Spec) -> tuple[Any, ...]:
    """q, a cache whose lengths only the device knows, and the lengths at each replay."""
    first, steps = spec["lengths"], spec["steps"]
    if not steps or not max(first, default=0) or any(len(step) != len(first) for step in steps):
        raise Unfit
    most = [max(of_row) for of_row in zip(first, *steps)]
    q, full = paged_batch({**SIZES, "lengths": most, "seed": spec["seed"]})
    lengths = torch.tensor(first, dtype=torch.int32, device="cpu").to(DEVICE)
    return q, PagedKVCache(full.k_pages, full.v_pages, full.block_table, lengths), [list(step) for step in steps]


def ask_replays(function: Any, q: torch.Tensor, cache: PagedKVCache, steps: list[list[int]]) -> torch.Tensor:
    """Out of every replay. Before each, q is turned round and the lengths are written anew, in place."""
    before, watch, place = (q.clone(), cache.lengths.clone()), Watch(), 0
    outs: list[torch.Tensor] = []
    try:
        with watch.watching():
            replay = function(q, cache)
            if not callable(replay):
                raise TypeError(f"capture gave {type(replay).__name__}, not a function replay()")
            watch.is_replaying = True
            for step in steps:
                q.neg_()
                cache.lengths.copy_(torch.tensor(step, dtype=torch.int32, device="cpu"))
                out = replay()
                if not isinstance(out, torch.Tensor):
                    raise TypeError(f"replay() gave {type(out).__name__}, not the tensor out")
                if outs and out.data_ptr() != place:
                    raise TypeError(f"{ANOTHER}: every replay writes the same one")
                place = out.data_ptr()
                outs.append(out.clone())
    finally:
        q.copy_(before[0])
        cache.lengths.copy_(before[1])
    return torch.stack(outs)


def replayed(
    q: torch.Tensor, cache: PagedKVCache, steps: list[list[int]], *, new_q: bool = True, new_lengths: bool = True
) -> torch.Tensor:
    """What each replay should give; the options are mistakes."""
    q, page_size = q.cpu(), cache.k_pages.shape[1]
    k_pages, v_pages, table, first = (x.cpu() for x in (cache.k_pages, cache.v_pages, cache.block_table, cache.lengths))
    outs = []
    for index, step in enumerate(steps):
        turned = q if index % 2 or not new_q else -q
        for row, length in enumerate(step if new_lengths else first.tolist()):
            pages = table[row, : rounded_up(length, page_size)].long()
            k, v = (x[pages].flatten(0, 1)[:length].float() for x in (k_pages, v_pages))
            outs.append(attend(turned[row].float(), k, v, q.shape[2] ** -0.5)[0])
    return torch.stack(outs).reshape(len(steps), *q.shape)


def has_old_lengths(case: Case, got: Any) -> bool:
    """Out for the lengths of the capture; or what the driver says of a host that reads them while it captures."""
    if isinstance(got, Raised):
        return got.kind != "NotCompiled" and "captur" in got.text
    return agree(replayed(*case.arguments, new_lengths=False), got, 4e-2)


def replays(rng: random.Random, lengths: list[int], *steps: list[int]) -> list[Spec]:
    """One capture, some replays."""
    return [{"lengths": lengths, "steps": [*steps], "seed": rng.randrange(1000)}]


EX05_6 = Task(
    id="ex05_6",
    title="decode captured in a CUDA graph",
    function="capture",
    lines=8,
    tag=GPU_OPTIONAL,
    arguments=capture_arguments,
    right=replayed,
    call=ask_replays,
    axes=("replay", "row", "query head", "dim"),
    tolerance=1e-2,
    allowed=("decode",),
    properties=(
        Property("new queries in the same place", lambda rng: replays(rng, [9], [9], [9])),
        Property("rows that grow by a token", lambda rng: replays(rng, [1, 4], [2, 5], [3, 6])),
        Property("rows that grow by pages, become empty, and come", lambda rng: replays(
            rng, [3, 0, 20], [33, 7, 0], [0, 0, 40])),
    ),
    mistakes=(
        Mistake("host_work", "decodes anew at every call: replay() should do no more than replay the graph",
                shows=lambda case, got: isinstance(got, Raised) and got.kind == "HostWork"),
        Mistake("another_tensor", "gives another tensor at every replay: return the one that the graph writes",
                shows=lambda case, got: isinstance(got, Raised) and got.text.startswith(ANOTHER)),
        Mistake("not_compiled", "captures the first call: kernels are compiled then; call pkv.decode once before",
                shows=lambda case, got: isinstance(got, Raised) and got.kind == "NotCompiled"),
        Mistake("old_lengths", "replays for the lengths of the capture: the graph has a copy of them, or a plan that "
                "the host made from them", shows=has_old_lengths),
        Mistake("old_queries", "replays for the queries of the capture: the graph has a copy of q",
                lambda *a: replayed(*a, new_q=False)),
        Mistake("old_result", "gives the result of the capture at every replay: return the tensor that the graph "
                "writes, after the replay", lambda *a: replayed(*a, new_q=False, new_lengths=False)),
    ),
)  # fmt: skip

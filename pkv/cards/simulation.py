"""Simulate a plan on a GPU's SMs: which program runs where, and when. No kernel runs; the clock is a model.

A launch's programs go, in grid order, to the first free slot. An SM has as many slots as programs reside on it. A
program does its items one after another: each waits item_us, then reads its bytes. All programs that read share the
memory equally, and none draws more than program_gb_per_s. If costs name sm_gb_per_s, SMs share the memory equally
instead; an SM gets at most sm_gb_per_s, and its programs share that equally. A launch begins launch_us after the last
program of the launch before it has ended.

Example: two items of 100 kB on one SM with two slots, memory 40 GB/s, a program at most 25 GB/s. Both start up for
item_us, then read at 20 GB/s each, for 5 us. Alone, an item reads at 25 GB/s, for 4 us.

An item's bytes are the K and V of its tokens, read once by each of its programs: the model has no caches. A merge
program reads the states of its row's items, or in stream_k an equal part of them. Writing the states is charged to it
too. In the grid heads run fastest; in FlashInfer's kernels items do. Costs are those of pkv.plans.gpu.Costs.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pkv.cards.clock import Played, Rules, Work, play
from pkv.cards.costs import (
    before_us,
    costs_for,
    heads_of_merge,
    item_bytes,
    item_us_of,
    merge_programs,
    merged_bytes,
    program_gb_per_s,
    slots_per_sm,
)
from pkv.cards.known import resolve_gpu
from pkv.cards.shares import Floats
from pkv.plans.facts import GridOrder
from pkv.plans.fields import Launch
from pkv.plans.gpu import DEFAULT_GPU, GpuProfile
from pkv.plans.plan import Plan
from pkv.runtime.locks import renew_properties
from pkv.wording.counts import count_of

SPAN = np.dtype(
    [
        ("launch", "i4"),  # index in plan.launches
        ("program", "i4"),  # number on the plan's program axis; in a merge: place in costs.merge_programs
        ("head", "i4"),  # grid head; in a merge: query head, or grid head in stream_k's
        ("item", "i4"),  # index in plan.items; -1 for a merge
        ("row", "i4"),
        ("sm", "i4"),
        ("slot", "i4"),  # which of the SM's slots
        ("begin_us", "f8"),
        ("end_us", "f8"),
    ]
)


@renew_properties
@dataclass(frozen=True, eq=False)
class Timeline:
    """The result of simulate(): when and where each item ran. Times are in us; time 0 is the first launch call.

    plan, gpu: the plan that was played, and the card. work, played: one entry per launch. launch_us [n_launches, 2]:
    begin and end of each launch. fixed_us: the cost of the step before the first launch. gpu_ms: the whole step, in ms.
    """

    plan: Plan
    gpu: GpuProfile
    work: tuple[Work, ...]
    played: tuple[Played, ...]
    launch_us: npt.NDArray[np.float64]
    fixed_us: float

    @cached_property
    def spans(self) -> npt.NDArray[np.void]:
        """Spans [n_spans] of dtype SPAN: one per item and grid head, or per merge program, in the order they start.

        A span includes its start-up. Spans are computed on first use: only drawing or inspecting a step needs them.
        """
        found = [_spans_of(self, index) for index in range(len(self.played))]
        spans = np.concatenate(found) if found else np.zeros(0, dtype=SPAN)
        return spans[np.argsort(spans["begin_us"], kind="stable")]

    @property
    def has_work(self) -> bool:
        """True if some launch has work; False if nothing is launched, or no launch has anything to do."""
        return any(len(played.begin_us) for played in self.played)

    @property
    def makespan_us(self) -> float:
        """The us from the first launch call to the end of the last launch; 0 if there is none."""
        return float(self.launch_us[-1, 1]) if len(self.launch_us) else 0.0

    @property
    def gpu_ms(self) -> float:
        return (self.fixed_us + self.makespan_us) / 1000

    @cached_property
    def busy_us(self) -> npt.NDArray[np.float64]:
        """The us in which at least one program reads, for each SM [n_sms]. A start-up does not count."""
        busy = np.zeros(self.gpu.n_sms)
        item_us = item_us_of(self.plan, self.gpu.needed_costs())
        for played in self.played:
            n_sms = self.gpu.n_sms // played.alike
            busy += np.repeat(union_us(played.begin_us + item_us, played.end_us, played.sm, n_sms), played.alike)
        return busy

    @property
    def tail_idle(self) -> float:
        """The share of SMs x makespan in which an SM reads nothing, between 0 and 1; 0 if nothing is launched."""
        whole = self.gpu.n_sms * self.makespan_us
        return 1.0 - float(self.busy_us.sum()) / whole if whole else 0.0

    def __str__(self) -> str:
        """Return the step in a few lines: for each launch its times, its number of spans, and its last span."""
        plan = self.plan
        lines = [
            f"Timeline of stage {plan.stage} on {self.gpu.name}: {self.gpu_ms:.4g} ms, of which {self.fixed_us:.4g} us "
            f"before the first launch; {count_of(self.gpu.n_sms, 'SM')}, {self.tail_idle:.1%} idle",
            f"  {'launch':>8} {'begin us':>10} {'end us':>10} {'spans':>7}  ends last",
        ]
        for index, (begin, end) in enumerate(self.launch_us.tolist()):
            mine = self.spans[self.spans["launch"] == index]
            last = ""
            if len(mine):
                span = mine[int(np.argmax(mine["end_us"]))]
                last = f"row {span['row']}, head {span['head']}, on SM {span['sm']}"
            lines.append(f"  {plan.launches[index].kernel:>8} {begin:>10.1f} {end:>10.1f} {len(mine):>7}  {last}")
        return "\n".join(lines)


def simulate(plan: Plan, gpu: "str | GpuProfile" = DEFAULT_GPU) -> Timeline:
    """Play `plan` on `gpu`, a profile with costs or the name of one; the same plan always gives the same Timeline.

    The SMs and the costs are gpu's. So is the number of programs that reside on an SM, if the costs name it; else it is
    the plan's. A plan without launches (no rows) takes no time. ValueError for a profile without costs, and for a plan
    of stage reference, which has no kernel.
    """
    profile = resolve_gpu(gpu)
    costs = costs_for(plan, profile)
    clock = 0.0
    works: list[Work] = []
    played: list[Played] = []
    launch_us = np.zeros((len(plan.launches), 2))
    sizes, merged = item_bytes(plan), merged_bytes(plan)
    for index, launch in enumerate(plan.launches):
        work = _merge_work(plan, launch, merged) if launch.kernel == "merge" else _decode_work(plan, launch, sizes)
        rules = Rules(
            item_us=item_us_of(plan, costs),
            most=program_gb_per_s(plan, launch, costs) * 1000,
            most_of_sm=None if costs.sm_gb_per_s is None else costs.sm_gb_per_s * 1000,
            memory=costs.memory_gb_per_s * 1000,
        )
        n_slots = profile.n_sms * slots_per_sm(plan, launch, profile)
        works.append(work)
        played.append(play(work, n_slots, profile.n_sms, rules, clock + costs.launch_us))
        launch_us[index] = clock + costs.launch_us, played[-1].last_us
        clock = played[-1].last_us
    return Timeline(plan, profile, tuple(works), tuple(played), launch_us, sum(before_us(plan, costs)))


def _decode_work(plan: Plan, launch: Launch, sizes: Floats) -> Work:
    """Return the work of a decode launch: a program of each head does its items in order. sizes [n_items]: bytes."""
    heads = plan.shape.grid_heads
    offsets = plan.program_offsets[launch.begin : launch.end + 1].astype(np.int64)
    items = slice(offsets[0], offsets[-1])
    n_bytes = sizes[items] if plan.item_order is None else sizes[plan.item_order[items]]
    if plan.grid_order is GridOrder.ITEMS_FIRST:  # the copies are programs of their own
        n_items = np.tile(np.diff(offsets), heads)
        return Work(np.tile(n_bytes, heads), np.concatenate([[0], np.cumsum(n_items)]))
    return Work(n_bytes, offsets - offsets[0], heads)


def _merge_work(plan: Plan, launch: Launch, merged: Floats) -> Work:
    """Return the work of a merge launch: each program merges its part of a row at once.

    A row of one item moves nothing: its decode program has written it.
    """
    _, n_bytes = merge_programs(plan, launch, merged)
    return Work(n_bytes, np.arange(len(n_bytes) + 1), heads_of_merge(plan))


def _spans_of(timeline: Timeline, index: int) -> npt.NDArray[np.void]:
    """Return the spans of one launch, in the order of its grid."""
    plan, work, played = timeline.plan, timeline.work[index], timeline.played[index]
    launch = plan.launches[index]
    program, copy, place = work.spans()
    spans = np.zeros(len(place), dtype=SPAN)
    of = played.of_copies(copy, program, place, work)
    spans["launch"], spans["program"], spans["head"] = index, program, copy
    if launch.kernel == "merge":
        rows, _ = merge_programs(plan, launch, merged_bytes(plan))
        spans["item"], spans["row"] = -1, rows[place]
    else:
        if plan.grid_order is GridOrder.ITEMS_FIRST:  # the copies are programs of their own
            spans["head"], spans["program"] = np.divmod(program, launch.end - launch.begin)
            place = place % max(len(work.bytes) // plan.shape.grid_heads, 1)
        position = place + plan.program_offsets[launch.begin]
        item = position if plan.item_order is None else plan.item_order[position]
        spans["program"] += launch.begin
        spans["item"], spans["row"] = item, plan.items[item, 0]
    spans["sm"] = played.alike * played.sm[of] + copy % played.alike
    spans["slot"], spans["begin_us"], spans["end_us"] = played.slot[of], played.begin_us[of], played.end_us[of]
    return spans


def union_us(begin: Floats, end: Floats, sm: npt.NDArray[np.int64], n_sms: int) -> Floats:
    """Return, for each SM [n_sms], how long at least one of its ranges [begin, end) lasts.

    >>> union_us(np.array([0.0, 1.0, 5.0, 0.0]), np.array([2.0, 3.0, 6.0, 1.0]), np.array([0, 0, 0, 1]), 3).tolist()
    [4.0, 1.0, 0.0]
    """
    order = np.lexsort((begin, sm))
    begin, end, sm = begin[order], end[order], sm[order]
    counts = np.bincount(sm, minlength=n_sms)
    nth = np.arange(len(sm)) - (np.cumsum(counts) - counts)[sm]  # of the SM's ranges
    ends = np.zeros((n_sms, int(counts.max(initial=0)) + 1))
    ends[sm, nth + 1] = end
    covered = np.maximum.accumulate(ends, axis=1)[sm, nth]  # what earlier ranges have reached
    return np.bincount(sm, np.maximum(end - np.maximum(begin, covered), 0.0), n_sms).astype(np.float64)

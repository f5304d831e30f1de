"""Play a plan on a GPU's SMs: who runs what, and when. No kernel runs; the clock is a model.

Each launch's programs go, in the order of its grid, to the first free slot; an SM has as many slots as programs reside
on it. A program does its items one after another: each waits item_us, then reads its bytes. All programs that read
share the memory equally, and none draws more than program_gb_per_s. Where costs name sm_gb_per_s, SMs share the memory
equally instead, and the programs of an SM its share, which is sm_gb_per_s at most. The next launch begins launch_us
after the last program of the one before has ended.

Two items of 100 kB on one SM with two slots, memory 40 GB/s, a program at most 25 GB/s: both start up for item_us, then
read at 20 GB/s each, for 5 us. Alone, an item reads at 25 GB/s, for 4 us.

An item's bytes are the K and V of its tokens, read once by each of its programs: the model knows no cache. A merge
program reads the states of its row's items, of stream_k's an equal part of them; their writing is charged to it as
well. In the grid heads run fastest, and items in FlashInfer's kernels. Costs are those of pkv.gpus.Costs.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pkv.costs import before_us, costs_for, item_bytes, item_us_of, merge_programs, program_gb_per_s, slots_per_sm
from pkv.gpus import DEFAULT_GPU, GpuProfile, resolve_gpu
from pkv.plans import Plan
from pkv.playing import Rules, Work, play

SPAN = np.dtype(
    [
        ("launch", "i4"),  # index in plan.launches
        ("program", "i4"),  # number on the plan's program axis; of a merge: place in costs.merge_programs
        ("head", "i4"),  # grid head; of a merge: query head, of stream_k's grid head
        ("item", "i4"),  # index in plan.items; -1 for a merge
        ("row", "i4"),
        ("sm", "i4"),
        ("slot", "i4"),  # which of the SM's places for a program
        ("begin_us", "f8"),
        ("end_us", "f8"),
    ]
)


@dataclass(frozen=True, eq=False)
class Timeline:
    """What simulate() saw. Time 0 is when the first launch is asked for; times in us.

    plan, gpu: what was played, and on which card. spans [n_spans] of dtype SPAN: one entry per item and grid head, or
    per merge program, in the order in which they start; a span holds its start-up. launch_us [n_launches,
    2]: begin and end of each launch. fixed_us: what the step costs before the first launch. gpu_ms: the whole step.
    """

    plan: Plan
    gpu: GpuProfile
    spans: npt.NDArray[np.void]
    launch_us: npt.NDArray[np.float64]
    fixed_us: float

    @property
    def makespan_us(self) -> float:
        """From the first launch asked for to the end of the last; 0 where there is none."""
        return float(self.launch_us[-1, 1]) if len(self.launch_us) else 0.0

    @property
    def gpu_ms(self) -> float:
        return (self.fixed_us + self.makespan_us) / 1000

    @cached_property
    def busy_us(self) -> npt.NDArray[np.float64]:
        """Per SM [n_sms]: the time with at least one program that reads. A start-up is not busy."""
        begins = self.spans["begin_us"] + item_us_of(self.plan, self.gpu.needed_costs())
        busy = np.zeros(self.gpu.n_sms)
        for sm in np.unique(self.spans["sm"]):
            mine = self.spans["sm"] == sm
            begin, end = begins[mine], self.spans["end_us"][mine]
            order = np.argsort(begin, kind="stable")
            begin, end = begin[order], end[order]
            covered = np.concatenate([[0.0], np.maximum.accumulate(end)[:-1]])
            busy[sm] = np.maximum(end - np.maximum(begin, covered), 0.0).sum()
        return busy

    @property
    def tail_idle(self) -> float:
        """The share of SMs x makespan in which an SM reads nothing, between 0 and 1; 0 where nothing is launched."""
        whole = self.gpu.n_sms * self.makespan_us
        return 1.0 - float(self.busy_us.sum()) / whole if whole else 0.0

    def __str__(self) -> str:
        """The step in a few lines: each launch, when, how many programs, and who ends it."""
        plan = self.plan
        lines = [
            f"Timeline of stage {plan.stage} on {self.gpu.name}: {self.gpu_ms:.4g} ms, of which {self.fixed_us:.4g} us "
            f"before the first launch; {self.gpu.n_sms} SMs, {self.tail_idle:.1%} idle",
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

    SMs and costs are gpu's, and so is the number of programs that reside on an SM, where the costs name it; else it is
    the plan's. A plan without launches (no rows) takes no time. ValueError for a profile without costs, and for a plan
    of stage reference, which has no kernel.
    """
    profile = resolve_gpu(gpu)
    costs = costs_for(plan, profile)
    clock = 0.0
    played: list[npt.NDArray[np.void]] = []
    launch_us = np.zeros((len(plan.launches), 2))
    for index, launch in enumerate(plan.launches):
        work = _merge_work(plan, index) if launch.kernel == "merge" else _decode_work(plan, index)
        n_slots = profile.n_sms * slots_per_sm(plan, launch, profile)
        begin = clock + costs.launch_us
        rules = Rules(
            item_us=item_us_of(plan, costs),
            most=program_gb_per_s(plan, launch, costs) * 1000,
            most_of_sm=None if costs.sm_gb_per_s is None else costs.sm_gb_per_s * 1000,
            memory=costs.memory_gb_per_s * 1000,
        )
        places, clock = play(work, n_slots, profile.n_sms, rules, begin)
        work.spans["sm"], work.spans["slot"] = places % profile.n_sms, places // profile.n_sms
        launch_us[index] = begin, clock
        played.append(work.spans)
    spans = np.concatenate(played) if played else np.zeros(0, dtype=SPAN)
    in_time = np.argsort(spans["begin_us"], kind="stable")
    return Timeline(plan, profile, spans[in_time], launch_us, sum(before_us(plan, costs)))


def _decode_work(plan: Plan, index: int) -> Work:
    """Each program of a head does all the items of its number, in order."""
    launch, heads = plan.launches[index], plan.shape.grid_heads
    offsets = plan.program_offsets[launch.begin : launch.end + 1].astype(np.int64)
    n_items = np.diff(offsets)
    position = np.repeat(np.arange(offsets[0], offsets[-1]), heads)
    program = np.repeat(np.arange(launch.begin, launch.end), n_items * heads)
    head = np.tile(np.arange(heads), int(n_items.sum()))
    if plan.stage == "flashinfer":
        grid_order = np.lexsort((position, head))
        sizes = np.tile(n_items, heads)
    else:
        grid_order = np.lexsort((position, head, program))
        sizes = np.repeat(n_items, heads)
    item = position[grid_order] if plan.item_order is None else plan.item_order[position[grid_order]]
    spans = np.zeros(len(item), dtype=SPAN)
    spans["launch"], spans["item"], spans["row"] = index, item, plan.items[item, 0]
    spans["program"], spans["head"] = program[grid_order], head[grid_order]
    return Work(spans, item_bytes(plan)[item], np.concatenate([[0], np.cumsum(sizes)]))


def _merge_work(plan: Plan, index: int) -> Work:
    """Each program does its part of a row at once; a row of one item has been written by its decode program."""
    rows, n_bytes, heads = merge_programs(plan, plan.launches[index])
    spans = np.zeros(len(rows) * heads, dtype=SPAN)
    spans["launch"], spans["item"] = index, -1
    spans["program"], spans["row"] = np.repeat(np.arange(len(rows)), heads), np.repeat(rows, heads)
    spans["head"] = np.tile(np.arange(heads), len(rows))
    return Work(spans, np.repeat(n_bytes, heads), np.arange(len(spans) + 1))

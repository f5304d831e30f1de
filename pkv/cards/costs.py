"""Predict a plan's time from its sizes alone: the model of pkv.cards.simulation, without its clock.

This file defines what each piece of work costs, for both. simulate() plays the pieces. predict() deals a launch's
programs to slots, each to the slot with the least work so far, and adds up:

    u       a slot's time if no other slot read: item_us + bytes / program_gb_per_s for each of its items
    launch  launch_us + item_us + integral over u of max(1, demand(u) / room)

demand(u) is the rate that the slots still busy at u draw together, and room the rate that they can get:
memory_gb_per_s. So a launch takes its longest slot's time if there is room, and bytes / memory_gb_per_s if there is
none. If costs name sm_gb_per_s, it takes at least the time of its slowest SM. Example: two slots of 100 and 200 kB take
4 and 8 us at 25 GB/s, and the memory gives 40 GB/s. In the first 4 us they ask for 50 GB/s, so these 4 us take 5; the
other 4 us take 4.

The error against simulate(), with the RTX 3060's costs: on the steps of the paper's traces 0.4% in the median and 1.8%
at worst (tests hold it to 1% and 2%), on random plans of all stages 0.00% and 11% (tests: 0.2% and 15%). It is worst if
programs start together and read so little that starting them takes as long. It is rough if one program can draw much of
the memory's rate: in 500 random plans up to 16% off at a tenth of the rate, up to 72% at all of it. On 28 SMs of an
H200, where SMs are the limit, a tenth of the random plans is 4% off or more, and the worst 24%.
"""

import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from pkv.cards.known import resolve_gpu
from pkv.cards.shares import Floats, deal, longest_and_bytes_by_sm, mean_of_at_least_one, n_alike, slowest_sm_us
from pkv.plans.facts import Family, GridOrder, Merging
from pkv.plans.fields import Launch
from pkv.plans.gpu import DEFAULT_GPU, Costs, GpuProfile
from pkv.plans.plan import Plan


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a step, in ms, as terms that add up to gpu_ms.

    plan: FlashInfer's own planning, if the step's time includes it. step: the cost that each step pays once. launches:
    launch_us of each launch. start_up: the first item of each decode launch. reading: K and V at the memory's full
    rate, which no schedule beats. tail: the time that decode launches lose because too few programs read, or because
    slots are uneven. merge: merge launches.
    """

    plan: float
    step: float
    launches: float
    start_up: float
    reading: float
    tail: float
    merge: float

    @property
    def gpu_ms(self) -> float:
        return sum(self.terms.values())

    @property
    def kernels_ms(self) -> float:
        """The time of the kernels, in ms: gpu_ms without FlashInfer's planning, which serves every layer of a step."""
        return self.gpu_ms - self.plan

    @property
    def terms(self) -> dict[str, float]:
        """The terms as {name: ms}, in the order of their definition."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        terms = " + ".join(f"{name.replace('_', '-')} {ms:.3f}" for name, ms in self.terms.items() if ms > 0)
        return f"{self.gpu_ms:.3f} ms = {terms}" if terms else "0 ms: nothing is launched"


def predict(plan: Plan, gpu: "str | GpuProfile" = DEFAULT_GPU) -> Prediction:
    """Predict the time of `plan` on `gpu`, a profile with costs or the name of one.

    ValueError for a profile without costs, and for a plan of stage reference, which has no kernel. A plan without
    launches (no rows) takes no time.
    """
    profile = resolve_gpu(gpu)
    costs = costs_for(plan, profile)
    start_up = decode = merge = 0.0
    item_us = item_us_of(plan, costs)
    sizes, merged = item_bytes(plan), merged_bytes(plan)
    read_before = np.cumsum(np.append(0.0, sizes if plan.item_order is None else sizes[plan.item_order]))
    known: dict[tuple[str, bytes], float] = {}  # launches with equal sizes take equal time
    for launch in plan.launches:
        programs = program_sizes(plan, launch, read_before, merged)
        key = launch.kernel, b"".join(array.tobytes() for array in programs)
        if key not in known:
            known[key] = launch_us(plan, launch, profile, costs, *programs)
        us = known[key]
        if launch.kernel == "merge":
            merge += us
        elif us:
            start_up, decode = start_up + item_us, decode + us - item_us
    reading = float(sizes.sum()) * plan.shape.grid_heads / (costs.memory_gb_per_s * 1000)
    planning, step = before_us(plan, costs)
    launches = len(plan.launches) * costs.launch_us
    terms = (planning, step, launches, start_up, reading, max(decode - reading, 0.0), merge)
    return Prediction(*(us / 1000 for us in terms))


def costs_for(plan: Plan, profile: GpuProfile) -> Costs:
    """Return the profile's costs; ValueError if it has none, or if the plan has no kernel."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a pkv.Plan, got {type(plan).__name__}")
    if plan.family is Family.TORCH:
        raise ValueError("a plan of stage 'reference' has no kernel, so it takes no GPU time: plan another stage")
    return profile.needed_costs()


def before_us(plan: Plan, costs: Costs) -> tuple[float, float]:
    """Return the costs of a step before its first launch, in us: (FlashInfer's planning, the rest)."""
    if not plan.launches:
        return 0.0, 0.0
    return costs.flashinfer_plan_us if plan.family is Family.FLASHINFER else 0.0, costs.step_us


def program_gb_per_s(plan: Plan, launch: Launch, costs: Costs) -> float:
    """Return the most that one program of the launch reads, in GB/s."""
    theirs = costs.flashinfer_program_gb_per_s if plan.family is Family.FLASHINFER else None
    merges = costs.merge_gb_per_s if launch.kernel == "merge" and plan.family is not Family.FLASHINFER else None
    most = theirs or merges or costs.program_gb_per_s
    return min(most, costs.memory_gb_per_s, costs.sm_gb_per_s or most)


def item_us_of(plan: Plan, costs: Costs) -> float:
    """Return the start-up of one item of the plan, in us."""
    theirs = costs.flashinfer_item_us
    return costs.item_us if theirs is None or plan.family is not Family.FLASHINFER else theirs


def slots_per_sm(plan: Plan, launch: Launch, profile: GpuProfile) -> int:
    """Return how many programs reside on one SM: the number measured with the costs, if there is one, else the plan's.

    A merge launch has as many as the SM can hold.
    """
    if launch.kernel == "merge":
        return profile.limits.programs_per_sm
    measured = None if profile.costs is None or plan.family is Family.FLASHINFER else profile.costs.programs_per_sm
    return measured or plan.programs_per_sm


def item_bytes(plan: Plan) -> Floats:
    """Return the bytes of K and V that a program reads for each item [n_items]."""
    return plan.item_tokens.astype(np.float64) * (plan.shape.kv_bytes_per_token / plan.shape.n_kv_heads)


def merged_bytes(plan: Plan) -> Floats:
    """Return the bytes of states that the merge of one query head moves, for each row [n_rows].

    Each item with tokens writes out and lse in fp32, and the merge reads them. A row with one item moves none.
    """
    full = np.bincount(plan.items[plan.item_tokens > 0, 0], minlength=plan.n_rows)
    n_states = np.where(np.diff(plan.partial_offsets) > 1, full, 0)
    return n_states * (2.0 * 4 * (plan.shape.head_dim + 1))


def heads_of_merge(plan: Plan) -> int:
    """Return how many programs of a merge do the same, one per head: query heads by row, grid heads by cut."""
    return plan.shape.grid_heads if plan.merging is Merging.BY_CUT else plan.shape.n_q_heads


def merge_programs(plan: Plan, launch: Launch, merged: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
    """Return (rows, bytes) of the programs of a merge launch, in order and per head; see heads_of_merge().

    merged [n_rows]: merged_bytes(plan). By row, each row has one program per query head. By cut, as in stream_k, each
    cut has one program per grid head: the n - 1 cuts between a row's n items move equal parts of its states. A row
    without a cut has one program too, with nothing to move. The remaining programs of the grid do nothing.
    """
    rows = np.array(launch.rows, dtype=np.int64)
    n_bytes = merged[rows]
    if plan.merging is Merging.BY_CUT:
        n_programs = np.maximum(np.diff(plan.partial_offsets)[rows] - 1, 1)
        n_bytes = n_bytes * (plan.shape.n_q_heads / plan.shape.grid_heads) / n_programs
        rows, n_bytes = np.repeat(rows, n_programs), np.repeat(n_bytes, n_programs)
    return rows, n_bytes


def program_sizes(plan: Plan, launch: Launch, read_before: Floats, merged: Floats) -> tuple[Floats, Floats]:
    """Return (bytes, items) of each program of a launch that has items, per head, in order.

    read_before [n_items + 1]: the bytes of all items before each item, in the order of programs. merged [n_rows]:
    merged_bytes(plan).
    """
    if launch.kernel == "merge":
        _, n_bytes = merge_programs(plan, launch, merged)
        return n_bytes, np.ones(len(n_bytes))
    offsets = plan.program_offsets[launch.begin : launch.end + 1]
    n_bytes, n_items = np.diff(read_before[offsets]), np.diff(offsets).astype(np.float64)
    return n_bytes[n_items > 0], n_items[n_items > 0]  # a program without items takes no time


def launch_us(plan: Plan, launch: Launch, profile: GpuProfile, costs: Costs, n_bytes: Floats, n_items: Floats) -> float:
    """Return the us from a launch's first program to the end of its last; n_bytes, n_items: its program_sizes()."""
    if not len(n_items):
        return 0.0
    item_us = item_us_of(plan, costs)
    n_slots = profile.n_sms * slots_per_sm(plan, launch, profile)
    heads = plan.shape.grid_heads if launch.kernel == "decode" else heads_of_merge(plan)
    if plan.grid_order is GridOrder.ITEMS_FIRST and launch.kernel == "decode":
        n_bytes, n_items, heads = np.tile(n_bytes, heads), np.tile(n_items, heads), 1
    # The heads of an item are alike and start together, so they are dealt in groups whose size divides the slots.
    as_one = math.gcd(n_slots, heads)
    n_bytes, n_items, heads = np.repeat(n_bytes, heads // as_one), np.repeat(n_items, heads // as_one), as_one
    most, memory = program_gb_per_s(plan, launch, costs) * 1000, costs.memory_gb_per_s * 1000  # bytes per us
    slots, slot_bytes = deal(n_items, n_bytes, n_slots // heads, item_us, most)
    slots = slots - item_us  # all first items start up together
    draws = np.divide(slot_bytes, slots, out=np.zeros_like(slots), where=slots > 0)
    order = np.argsort(slots, kind="stable")
    widths, draws = np.diff(slots[order], prepend=0.0), draws[order]
    # Programs of equal size that follow one another start up together again, and the memory idles meanwhile. With time
    # they drift apart: about half of such a run stays together.
    n_runs = 1 + np.count_nonzero(np.diff(n_bytes))
    together = heads * min(len(n_bytes) / n_runs, len(slots)) / 2
    demand = heads * np.cumsum(draws[::-1])[::-1]
    spread = together * heads * np.cumsum((draws * (most - draws).clip(0.0))[::-1])[::-1]
    used = widths > 0
    widths, demand, spread = widths[used], demand[used], np.sqrt(spread[used])
    room = memory if costs.sm_gb_per_s is None else min(memory, costs.sm_gb_per_s * 1000 * profile.n_sms)
    longest = float((widths * mean_of_at_least_one(demand / room, spread / room)).sum())
    if costs.sm_gb_per_s is not None:
        alike = n_alike(heads, profile.n_sms)  # number of neighbouring SMs that have the same work
        each = np.repeat(slots, heads // alike), np.repeat(slot_bytes, heads // alike)
        alone, sm_bytes = longest_and_bytes_by_sm(*each, profile.n_sms // alike)
        longest = max(longest, slowest_sm_us(alone, sm_bytes, costs.sm_gb_per_s * 1000, memory / alike))
    return item_us + longest

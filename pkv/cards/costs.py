"""How long a plan will take, from its sizes alone: the model of pkv.cards.simulation, without its clock.

What each piece of work costs is said here once, for both. simulate() plays the pieces; predict() deals a launch's
programs to slots, each to the one with the least so far, and adds up:

    u       a slot's time if nobody else read: item_us + bytes / program_gb_per_s for each of its items
    launch  launch_us + item_us + integral over u of max(1, demand(u) / room)

demand(u) is what the slots that are still busy at u draw together, and room what they can get: memory_gb_per_s. So a
launch takes its longest slot's time where there is room, and bytes / memory_gb_per_s where there is none; or what its
slowest SM takes, where costs name sm_gb_per_s. Two slots of 100 and 200 kB at 25 GB/s, 4 and 8 us, and 40 GB/s of
memory: 50 are asked for in the first 4 us, which take 5; the other 4 take 4.

Against simulate() the error is 0.4% in the median and 1.8% at worst on the steps of the paper's traces, 0.00% and 11%
on random plans of all stages, with the RTX 3060's costs; tests hold it to 1% and 2%, 0.2% and 15%. It is worst where
programs read so little that starting them takes as long, and start together; and it is rough where one program can draw
much of the memory's rate: in 500 random plans up to 16% off at a tenth of it, up to 72% at all of it. On 28 SMs
of an H200, where SMs are the limit, a tenth of the random plans is 4% off or more, and the worst 24%.
"""

import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from pkv.cards.known import resolve_gpu
from pkv.cards.shares import Floats, deal, longest_and_bytes_by_sm, mean_of_at_least_one, n_alike, slowest_sm_us
from pkv.plans.fields import Family, GridOrder, Launch, Merging
from pkv.plans.gpu import DEFAULT_GPU, Costs, GpuProfile
from pkv.plans.plan import Plan


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a step, in ms, as terms that add up to gpu_ms.

    plan: FlashInfer's own planning, where the step's time holds it. step: once per step. launches: launch_us of each.
    start_up: the first item of each decode launch. reading: K and V at the memory's full rate, which no schedule
    beats. tail: what decode launches lose because too few programs read, or unevenly many. merge: merge launches.
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
        """What the GPU's kernels take: gpu_ms without FlashInfer's planning, which serves every layer of a step."""
        return self.gpu_ms - self.plan

    @property
    def terms(self) -> dict[str, float]:
        """{name: ms}, in the order of the definitions."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        terms = " + ".join(f"{name.replace('_', '-')} {ms:.3f}" for name, ms in self.terms.items() if ms > 0)
        return f"{self.gpu_ms:.3f} ms = {terms}" if terms else "0 ms: nothing is launched"


def predict(plan: Plan, gpu: "str | GpuProfile" = DEFAULT_GPU) -> Prediction:
    """The time of `plan` on `gpu`, a profile with costs or the name of one.

    ValueError for a profile without costs, and for a plan of stage reference, which has no kernel. A plan without
    launches (no rows) takes no time.
    """
    profile = resolve_gpu(gpu)
    costs = costs_for(plan, profile)
    start_up = decode = merge = 0.0
    item_us = item_us_of(plan, costs)
    sizes, merged = item_bytes(plan), merged_bytes(plan)
    read_before = np.cumsum(np.append(0.0, sizes if plan.item_order is None else sizes[plan.item_order]))
    known: dict[tuple[str, bytes], float] = {}  # merges of rows that are cut alike take as long
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
    """The profile's costs; ValueError where it has none, or the plan no kernel."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a pkv.Plan, got {type(plan).__name__}")
    if plan.family is Family.TORCH:
        raise ValueError("a plan of stage 'reference' has no kernel, so it takes no GPU time: plan another stage")
    return profile.needed_costs()


def before_us(plan: Plan, costs: Costs) -> tuple[float, float]:
    """What a step costs before its first launch, in us: (FlashInfer's planning, the rest)."""
    if not plan.launches:
        return 0.0, 0.0
    return costs.flashinfer_plan_us if plan.family is Family.FLASHINFER else 0.0, costs.step_us


def program_gb_per_s(plan: Plan, launch: Launch, costs: Costs) -> float:
    """The most that one of the launch's programs reads."""
    theirs = costs.flashinfer_program_gb_per_s if plan.family is Family.FLASHINFER else None
    merges = costs.merge_gb_per_s if launch.kernel == "merge" and plan.family is not Family.FLASHINFER else None
    most = theirs or merges or costs.program_gb_per_s
    return min(most, costs.memory_gb_per_s, costs.sm_gb_per_s or most)


def item_us_of(plan: Plan, costs: Costs) -> float:
    """The start-up of one of the plan's items, in us."""
    theirs = costs.flashinfer_item_us
    return costs.item_us if theirs is None or plan.family is not Family.FLASHINFER else theirs


def slots_per_sm(plan: Plan, launch: Launch, profile: GpuProfile) -> int:
    """Programs on an SM: as many as when costs were measured, else as the plan says; of a merge as many as it takes."""
    if launch.kernel == "merge":
        return profile.limits.programs_per_sm
    measured = None if profile.costs is None or plan.family is Family.FLASHINFER else profile.costs.programs_per_sm
    return measured or plan.programs_per_sm


def item_bytes(plan: Plan) -> Floats:
    """Bytes of K and V that a program reads for each item [n_items]."""
    tokens = plan.items[:, 2].astype(np.int64) - plan.items[:, 1]
    return tokens.astype(np.float64) * (plan.shape.kv_bytes_per_token / plan.shape.n_kv_heads)


def merged_bytes(plan: Plan) -> Floats:
    """Bytes of states that the merge of one query head moves, for each row [n_rows].

    Each item with tokens has written out and lse in fp32, and they are read; none where the row has one item.
    """
    full = np.bincount(plan.items[plan.items[:, 2] > plan.items[:, 1], 0], minlength=plan.n_rows)
    n_states = np.where(np.diff(plan.partial_offsets) > 1, full, 0)
    return n_states * (2.0 * 4 * (plan.shape.head_dim + 1))


def heads_of_merge(plan: Plan) -> int:
    """How many programs of a merge do the same, each for its head: by row a query head, by cut a grid head."""
    return plan.shape.grid_heads if plan.merging is Merging.BY_CUT else plan.shape.n_q_heads


def merge_programs(plan: Plan, launch: Launch, merged: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
    """(rows, bytes): what each program of a merge launch works on, in order; see heads_of_merge().

    merged [n_rows]: merged_bytes(plan). By row, each row has one program per query head. By cut, as in stream_k, each
    cut has one per grid head: the n - 1 cuts between a row's n items move equal parts of its states. A row without a
    cut has one program there too, with nothing to move; the rest of the grid comes and goes.
    """
    rows = np.array(launch.rows, dtype=np.int64)
    n_bytes = merged[rows]
    if plan.merging is Merging.BY_CUT:
        n_programs = np.maximum(np.diff(plan.partial_offsets)[rows] - 1, 1)
        n_bytes = n_bytes * (plan.shape.n_q_heads / plan.shape.grid_heads) / n_programs
        rows, n_bytes = np.repeat(rows, n_programs), np.repeat(n_bytes, n_programs)
    return rows, n_bytes


def program_sizes(plan: Plan, launch: Launch, read_before: Floats, merged: Floats) -> tuple[Floats, Floats]:
    """(bytes, items) of each program of a launch that has any, per head, in order.

    read_before [n_items + 1]: the bytes of all items before each, in the order of programs; merged: merged_bytes(plan).
    """
    if launch.kernel == "merge":
        _, n_bytes = merge_programs(plan, launch, merged)
        return n_bytes, np.ones(len(n_bytes))
    offsets = plan.program_offsets[launch.begin : launch.end + 1]
    n_bytes, n_items = np.diff(read_before[offsets]), np.diff(offsets).astype(np.float64)
    return n_bytes[n_items > 0], n_items[n_items > 0]  # a program without items only comes and goes


def launch_us(plan: Plan, launch: Launch, profile: GpuProfile, costs: Costs, n_bytes: Floats, n_items: Floats) -> float:
    """From a launch's first program to the end of its last, in us; n_bytes, n_items: its program_sizes()."""
    if not len(n_items):
        return 0.0
    item_us = item_us_of(plan, costs)
    n_slots = profile.n_sms * slots_per_sm(plan, launch, profile)
    heads = plan.shape.grid_heads if launch.kernel == "decode" else heads_of_merge(plan)
    if plan.grid_order is GridOrder.ITEMS_FIRST and launch.kernel == "decode":
        n_bytes, n_items, heads = np.tile(n_bytes, heads), np.tile(n_items, heads), 1
    # the heads of an item are alike and start together, so as many as divide the slots are dealt as one
    as_one = math.gcd(n_slots, heads)
    n_bytes, n_items, heads = np.repeat(n_bytes, heads // as_one), np.repeat(n_items, heads // as_one), as_one
    most, memory = program_gb_per_s(plan, launch, costs) * 1000, costs.memory_gb_per_s * 1000  # bytes per us
    slots, slot_bytes = deal(n_items, n_bytes, n_slots // heads, item_us, most)
    slots = slots - item_us  # all first items start up together
    draws = np.divide(slot_bytes, slots, out=np.zeros_like(slots), where=slots > 0)
    order = np.argsort(slots, kind="stable")
    widths, draws = np.diff(slots[order], prepend=0.0), draws[order]
    # Programs of one size that follow one another start up together again, and leave the memory idle for that long.
    # They come apart in time: about half of such a run stays together.
    n_runs = 1 + np.count_nonzero(np.diff(n_bytes))
    together = heads * min(len(n_bytes) / n_runs, len(slots)) / 2
    demand = heads * np.cumsum(draws[::-1])[::-1]
    spread = together * heads * np.cumsum((draws * (most - draws).clip(0.0))[::-1])[::-1]
    used = widths > 0
    widths, demand, spread = widths[used], demand[used], np.sqrt(spread[used])
    room = memory if costs.sm_gb_per_s is None else min(memory, costs.sm_gb_per_s * 1000 * profile.n_sms)
    longest = float((widths * mean_of_at_least_one(demand / room, spread / room)).sum())
    if costs.sm_gb_per_s is not None:
        alike = n_alike(heads, profile.n_sms)  # so many SMs, side by side, have the same to do
        each = np.repeat(slots, heads // alike), np.repeat(slot_bytes, heads // alike)
        alone, sm_bytes = longest_and_bytes_by_sm(*each, profile.n_sms // alike)
        longest = max(longest, slowest_sm_us(alone, sm_bytes, costs.sm_gb_per_s * 1000, memory / alike))
    return item_us + longest

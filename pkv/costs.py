"""How long a plan will take, from its sizes alone: the model of pkv.simulation, without its clock.

What each piece of work costs is said here once, for both. simulate() plays the pieces; predict() deals a launch's
programs to slots, each to the one with the least so far, and adds up:

    u       a slot's time if nobody else read: item_us + bytes / program_gb_per_s for each of its items
    launch  launch_us + item_us + integral over u of max(1, demand(u) / room(u))

demand(u) is what the slots that are still busy at u draw together, and room(u) what they can get: memory_gb_per_s, or
less, see room_for(). So a launch takes its longest slot's time where there is room, and bytes / memory_gb_per_s where
there is none. Two slots of 100 and 200 kB at 25 GB/s, 4 and 8 us, and 40 GB/s of memory: 50 are asked for in the first
4 us, which take 5; the other 4 take 4.

Against simulate() the error is 0.4% in the median and 1.8% at worst on the steps of the paper's traces, 0.01% and 8% on
random plans of all stages, with the RTX 3060's costs; tests hold it to 1% and 2%, 0.2% and 15%. It is worst where
programs read so little that starting them takes as long, and start together; and it is rough where one program can draw
much of the memory's rate: in 500 random plans up to 16% off at a tenth of it, up to 72% at all of it. On a slice of a
large card, where SMs are the limit, a tenth of the random plans is 8% off or more.
"""

import heapq
import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from pkv.gpus import DEFAULT_GPU, Costs, GpuProfile, resolve_gpu
from pkv.plans import Launch, Plan

Floats = npt.NDArray[np.float64]


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
    start_up = decode = merge = read = 0.0
    item_us = item_us_of(plan, costs)
    for launch in plan.launches:
        us = launch_us(plan, launch, profile, costs, read)
        if launch.kernel == "merge":
            merge += us
        elif us:
            start_up, decode = start_up + item_us, decode + us - item_us
            read += float(program_sizes(plan, launch)[0].sum()) * plan.shape.grid_heads
    reading = float(item_bytes(plan).sum()) * plan.shape.grid_heads / (costs.memory_gb_per_s * 1000)
    planning, step = before_us(plan, costs)
    launches = len(plan.launches) * costs.launch_us
    terms = (planning, step, launches, start_up, reading, max(decode - reading, 0.0), merge)
    return Prediction(*(us / 1000 for us in terms))


def costs_for(plan: Plan, profile: GpuProfile) -> Costs:
    """The profile's costs; ValueError where it has none, or the plan no kernel."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a pkv.Plan, got {type(plan).__name__}")
    if plan.stage == "reference":
        raise ValueError("a plan of stage 'reference' has no kernel, so it takes no GPU time: plan another stage")
    return profile.needed_costs()


def before_us(plan: Plan, costs: Costs) -> tuple[float, float]:
    """What a step costs before its first launch, in us: (FlashInfer's planning, the rest)."""
    if not plan.launches:
        return 0.0, 0.0
    return costs.flashinfer_plan_us if plan.stage == "flashinfer" else 0.0, costs.step_us


def program_gb_per_s(plan: Plan, costs: Costs) -> float:
    """The most that one of the plan's programs reads."""
    theirs = costs.flashinfer_program_gb_per_s
    most = costs.program_gb_per_s if theirs is None or plan.stage != "flashinfer" else theirs
    return min(most, costs.memory_gb_per_s, costs.sm_gb_per_s or most)


def item_us_of(plan: Plan, costs: Costs) -> float:
    """The start-up of one of the plan's items, in us."""
    theirs = costs.flashinfer_item_us
    return costs.item_us if theirs is None or plan.stage != "flashinfer" else theirs


def slots_per_sm(plan: Plan, launch: Launch, profile: GpuProfile) -> int:
    """Programs on an SM: as many as when costs were measured, else as the plan says; of a merge as many as it takes."""
    if launch.kernel == "merge":
        return profile.limits.programs_per_sm
    measured = None if profile.costs is None or plan.stage == "flashinfer" else profile.costs.programs_per_sm
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


def program_sizes(plan: Plan, launch: Launch) -> tuple[Floats, Floats]:
    """(bytes, items) of each program of a decode launch, per head, in order."""
    offsets = plan.program_offsets[launch.begin : launch.end + 1]
    n_bytes = item_bytes(plan)
    if plan.item_order is not None:
        n_bytes = n_bytes[plan.item_order]
    return np.diff(np.concatenate([[0.0], np.cumsum(n_bytes)])[offsets]), np.diff(offsets).astype(np.float64)


def launch_us(plan: Plan, launch: Launch, profile: GpuProfile, costs: Costs, read: float = 0.0) -> float:
    """From a launch's first program to the end of its last, in us; the launches before it have read so many bytes."""
    item_us = item_us_of(plan, costs)
    n_slots = profile.n_sms * slots_per_sm(plan, launch, profile)
    if launch.kernel == "merge":
        n_bytes, heads = merged_bytes(plan)[list(launch.rows)], plan.shape.n_q_heads
        n_items = np.ones(len(n_bytes))
    else:
        (n_bytes, n_items), heads = program_sizes(plan, launch), plan.shape.grid_heads
    if not n_items.any():
        return 0.0
    if plan.stage == "flashinfer" and launch.kernel == "decode":  # in its grid items run fastest
        n_bytes, n_items, heads = np.tile(n_bytes, heads), np.tile(n_items, heads), 1
    elif n_slots % heads:
        n_bytes, n_items, heads = np.repeat(n_bytes, heads), np.repeat(n_items, heads), 1
    most, memory = program_gb_per_s(plan, costs) * 1000, costs.memory_gb_per_s * 1000  # bytes per us
    # the heads of an item are alike and start together, so they are dealt as one
    slots, slot_bytes = deal(item_us * n_items + n_bytes / most, n_bytes, n_slots // heads)
    slots = slots - item_us  # all first items start up together
    draws = np.divide(slot_bytes, slots, out=np.zeros_like(slots), where=slots > 0)
    order = np.argsort(slots)
    widths, draws = np.diff(slots[order], prepend=0.0), draws[order]
    # Programs of one size that follow one another start up together again, and leave the memory idle for that long.
    # They come apart in time: about half of such a run stays together.
    n_runs = 1 + np.count_nonzero(np.diff(n_bytes))
    together = heads * min(len(n_bytes) / n_runs, len(slots)) / 2
    demand = heads * np.cumsum(draws[::-1])[::-1]
    spread = together * heads * np.cumsum((draws * (most - draws).clip(0.0))[::-1])[::-1]
    used = widths > 0
    widths, demand, spread = widths[used], demand[used], np.sqrt(spread[used])
    n_busy = heads * np.arange(len(slots), 0, -1)[used]
    room = room_for(n_busy, profile, costs) * 1000
    us = widths * at_least_one(demand / room, spread / room)
    to_write = (costs.write_back_mb or 0.0) * 1e6 - read
    if to_write > 0:
        room, served = np.minimum(room, memory / 2), widths * demand
        begun = np.cumsum(served) - served
        part = np.divide(to_write - begun, served, out=np.zeros_like(us), where=served > 0).clip(0.0, 1.0)
        us += part * (widths * at_least_one(demand / room, spread / room) - us)
    return item_us + float(us.sum())


def room_for(n_busy: npt.NDArray[np.int64], profile: GpuProfile, costs: Costs) -> Floats:
    """What so many programs can read together, in GB per second: the memory's rate, or what their SMs let through.

    They lie evenly over the SMs, as far as their number allows, and none is faster than those of the fullest SM.

    >>> room_for(np.array([1, 4, 5]), GpuProfile("two", 86, 2), Costs(300, 60, 1, 1, sm_gb_per_s=90))
    array([ 90., 180., 150.])
    """
    if costs.sm_gb_per_s is None:
        return np.full(len(n_busy), costs.memory_gb_per_s)
    return np.minimum(costs.memory_gb_per_s, costs.sm_gb_per_s * n_busy / np.ceil(n_busy / profile.n_sms))


def deal(us: Floats, n_bytes: Floats, n_slots: int) -> tuple[Floats, Floats]:
    """(us, bytes) of each slot when programs go, in order, each to the slot with the least us so far.

    >>> deal(np.array([3.0, 1.0, 1.0]), np.array([30.0, 10.0, 10.0]), 2)
    (array([3., 2.]), array([30., 20.]))
    """
    if len(us) <= n_slots:
        return us, n_bytes
    least = [(0.0, slot) for slot in range(n_slots)]  # a heap
    slot_bytes = [0.0] * n_slots
    for more_us, more_bytes in zip(us.tolist(), n_bytes.tolist(), strict=True):
        busy, slot = least[0]
        slot_bytes[slot] += more_bytes
        heapq.heapreplace(least, (busy + more_us, slot))
    return np.array([busy for busy, _ in sorted(least, key=lambda entry: entry[1])]), np.array(slot_bytes)


def at_least_one(mean: Floats, deviation: Floats) -> Floats:
    """The expected max(1, x) of normally distributed x."""
    z = np.divide(mean - 1, deviation, out=np.where(mean > 1, 9.0, -9.0), where=deviation > 1e-9)
    above = np.array([math.erfc(-x / math.sqrt(2)) / 2 for x in z.tolist()])
    return 1 + (mean - 1) * above + deviation * np.exp(-z * z / 2) / math.sqrt(2 * math.pi)

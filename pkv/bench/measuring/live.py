"""A few engines on one step, timed here and now: what the lessons show where there is a GPU.

    >>> from pkv.bench.loads.grids import SHAPE
    >>> print(time_engines([9000, 300], SHAPE, ["row_local", "stream"]))  # doctest: +SKIP
    2 rows, 9,300 tokens on NVIDIA H200, 132 SMs
      row_local      16.6 us   2,295 GB/s   79% of a plain read
      stream         13.1 us   2,908 GB/s  100% of a plain read

Each engine is checked against fp64 first, and timed as `pkv bench` times it; one that cannot, or is wrong, says why.
"""

from collections.abc import Sequence

import torch

from pkv._triton import INTERPRETED
from pkv.bench.engines.registry import find_engines
from pkv.bench.loads.grids import Load, Step
from pkv.bench.measuring.measurement import ROUNDS, measure
from pkv.bench.timing import Stopwatch
from pkv.cards.known import gpu_of
from pkv.plans.shape import Shape
from pkv.wording.counts import count_of

STREAM = "stream"


def can_time() -> bool:
    """Whether kernels run on a GPU here; Triton's interpreter takes time that says nothing."""
    return torch.cuda.is_available() and not INTERPRETED


def time_engines(lengths: Sequence[int], shape: Shape, engines: Sequence[str], rounds: int = ROUNDS) -> str:
    """GPU time of one layer, planning not counted; engines by the names of pkv.bench.engines.registry.

    RuntimeError without a GPU; ValueError for an engine that does not exist.
    """
    if not can_time():
        raise RuntimeError("nothing can be timed here: there is no GPU, or TRITON_INTERPRET is set")
    device = torch.device("cuda", torch.cuda.current_device())
    load = Load("this step", shape, (Step(tuple(int(length) for length in lengths)),))
    wanted = find_engines(engines)
    with torch.device("cpu"):  # a notebook's default may be the GPU, where engines' host tensors would then be made
        found = measure(load, wanted, device, "here", Stopwatch(device), rounds)
    us = {timing.engine: timing.gpu_us[0] for timing in found.timings if timing.refused is None}
    why = {timing.engine: timing.refused for timing in found.timings if timing.refused is not None} | found.wrong
    card = f"{torch.cuda.get_device_name(device)}, {count_of(gpu_of(device).n_sms, 'SM')}"
    lines = [f"{count_of(len(lengths), 'row')}, {count_of(sum(lengths), 'token')} on {card}"]
    width = max(len(engine.name) for engine in wanted)
    for engine in wanted:
        name = engine.name.ljust(width)
        if engine.name in us:
            taken = us[engine.name]
            part = f"  {us[STREAM] / taken:4.0%} of a plain read" if STREAM in us else ""
            lines.append(f"  {name} {taken:8.1f} us  {load.kv_bytes / taken / 1000:6,.0f} GB/s{part}")
        else:
            lines.append(f"  {name} left out: {why[engine.name]}")
    return "\n".join(lines)

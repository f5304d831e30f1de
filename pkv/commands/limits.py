"""What this machine cannot do in reasonable time or memory, said before it begins."""

import os

import torch

from pkv.bench.loads.batches import bytes_needed
from pkv.commands import CommandError
from pkv.plans.plan import Plan
from pkv.plans.shape import Shape

SECONDS_PER_PROGRAM, SECONDS_PER_TILE = 0.005, 0.003  # in Triton's interpreter
MOST_SECONDS = 120.0
GIB = 2**30


def refuse_what_does_not_fit(lengths: list[int], shape: Shape, device: torch.device, remedy: str) -> None:
    """Say that memory is too small, before something is killed for it."""
    if device.type == "cpu":
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    else:
        there = torch.cuda.mem_get_info(device)[0]
    needed = bytes_needed(lengths, shape)
    if there is not None and needed > there:
        raise CommandError(
            f"--lengths of {sum(lengths):,} tokens need {needed / GIB:.0f} GiB to check, and {device.type} has "
            f"{there / GIB:.0f}: {remedy}"
        )


def refuse_what_takes_long(plans: dict[str, Plan], remedy: str) -> None:
    """Triton's interpreter is slow: say how slow, before it begins."""
    seconds = {name: interpreted_seconds(made) for name, made in plans.items()}
    if sum(seconds.values()) > MOST_SECONDS:
        each = ", ".join(f"{name} {minutes_of(value)}" for name, value in seconds.items() if value >= 1)
        raise CommandError(
            f"--lengths of {int(next(iter(plans.values())).lengths.sum()):,} tokens would take about "
            f"{minutes_of(sum(seconds.values()))} in Triton's interpreter ({each}): {remedy}"
        )


def interpreted_seconds(plan: Plan) -> float:
    """What the plan's tiles and programs cost in Triton's interpreter."""
    if not plan.launches:
        return 0.0
    n_tiles = int((-(-(plan.items[:, 2] - plan.items[:, 1]) // plan.tile)).sum())
    return plan.shape.grid_heads * (n_tiles * SECONDS_PER_TILE + plan.n_programs * SECONDS_PER_PROGRAM)


def minutes_of(seconds: float) -> str:
    """A rough time in words.

    >>> minutes_of(70), minutes_of(3300)
    ('70 s', '55.0 min')
    """
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"

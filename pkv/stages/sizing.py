"""Sizing: the card, the tile and the number of programs that a stage plans for, from its options `gpu=` and `tile=`."""

from pkv.cards.known import resolve_gpu
from pkv.kernels.configs import choose_tile, programs_per_sm
from pkv.plans.gpu import GpuProfile
from pkv.plans.shape import Shape

SCHEDULERS = 4  # per SM
FEW_READERS = 6  # programs per SM, see reading_programs


def sizes_for(
    gpu: "str | GpuProfile | None", tile: int | None, shape: Shape, kernel: str = "split_kv"
) -> tuple[GpuProfile, int, int]:
    """Resolve the options `gpu=` and `tile=`: return (card, tokens per tile, programs that reside on one SM)."""
    profile = resolve_gpu(gpu)
    tile = choose_tile(tile, shape, profile)
    return profile, tile, programs_per_sm(shape, profile, tile, kernel)


def even_programs(resident: int) -> int:
    """Return how many programs per SM to plan for, so that the SM's four schedulers get equally many.

    A warp stays with one scheduler. If ten programs of one warp reside on an SM, two schedulers get three each and end
    last. On 28 SMs of an H200, cuts for 8 programs per SM beat those for 12 or 4 (data/results/default_cuts.json). More
    than 8 pay if rows are many; the queue then takes a multiple.

    >>> even_programs(10), even_programs(4), even_programs(3)
    (8, 4, 3)
    """
    return min(8, resident // SCHEDULERS * SCHEDULERS) or resident


def reading_programs(gpu: GpuProfile, resident: int) -> int:
    """Return the programs per SM of a fixed grid: see even_programs, but six if three per SM saturate the memory.

    Twice the programs that saturate the memory keep it busy while some of them start up; more programs only make more
    partial states. On an H200, 6 per SM beat 8 by 1% in the mean; on 28 of its SMs, each of which could read more, 8
    beat 6 by 2.5%.
    """
    most = even_programs(resident)
    if gpu.costs is None:
        return most
    needed = gpu.costs.memory_gb_per_s / (gpu.n_sms * gpu.costs.program_gb_per_s)
    return min(most, FEW_READERS) if 2 * needed <= FEW_READERS else most

"""How many programs a stage plans for: what its options `gpu=` and `tile=` come to, and what an SM shares evenly."""

from pkv.cards.known import resolve_gpu
from pkv.kernels.configs import choose_tile, programs_per_sm
from pkv.plans.gpu import GpuProfile
from pkv.plans.shape import Shape

SCHEDULERS = 4  # of an SM
FEW_READERS = 6  # programs per SM, see reading_programs


def sizes_for(
    gpu: "str | GpuProfile | None", tile: int | None, shape: Shape, kernel: str = "split_kv"
) -> tuple[GpuProfile, int, int]:
    """(card, tile, programs that reside on one of its SMs): what a stage's options `gpu=` and `tile=` come to."""
    profile = resolve_gpu(gpu)
    tile = choose_tile(tile, shape, profile)
    return profile, tile, programs_per_sm(shape, profile, tile, kernel)


def even_programs(resident: int) -> int:
    """How many of the programs that reside on one SM to count on, so that its four schedulers share them evenly.

    A warp stays with one scheduler: of ten programs of one warp, two schedulers get three, and are the last to end. On
    28 SMs of an H200, cuts for 8 programs per SM beat those for 12 or 4 (data/results/default_cuts.json). More than 8
    gain where rows are many; the queue takes a multiple then.

    >>> even_programs(10), even_programs(4), even_programs(3)
    (8, 4, 3)
    """
    return min(8, resident // SCHEDULERS * SCHEDULERS) or resident


def reading_programs(gpu: GpuProfile, resident: int) -> int:
    """How many programs per SM a fixed grid launches: as many as share it evenly, or six where three read all there is.

    Twice as many as draw all that the memory gives keep it busy while some start up; more only make more partial
    states. On an H200, 6 per SM beat 8 by 1% in the mean; on 28 of its SMs, each of which could read more, 8 beat 6 by
    2.5%.
    """
    most = even_programs(resident)
    if gpu.costs is None:
        return most
    needed = gpu.costs.memory_gb_per_s / (gpu.n_sms * gpu.costs.program_gb_per_s)
    return min(most, FEW_READERS) if 2 * needed <= FEW_READERS else most

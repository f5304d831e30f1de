"""A GPU as a value: how many programs it holds at once, and, where somebody has measured it, what things cost there."""

import numbers
from dataclasses import asdict, dataclass

from pkv.wording.checks import at_least

DEFAULT_GPU = "rtx3060"
TILES = (16, 32, 64)
DEFAULT_TILE = 16
MAY_BE_NONE = ("flashinfer_program_gb_per_s", "flashinfer_item_us", "merge_gb_per_s", "sm_gb_per_s")  # of costs
SLOWEST, LARGEST = 1e-6, 1e9  # of costs: beyond, a simulation would lose its digits


@dataclass(frozen=True)
class ArchLimits:
    """Limits of one compute capability, from the CUDA C++ Programming Guide's table of technical specifications."""

    shared_per_sm: int  # bytes
    shared_per_program: int  # bytes, the most one program (thread block) may ask for
    threads_per_sm: int
    programs_per_sm: int
    registers_per_sm: int = 65536
    shared_reserved: int = 1024  # bytes the driver keeps for itself in every program


ARCH_LIMITS = {
    80: ArchLimits(shared_per_sm=167_936, shared_per_program=166_912, threads_per_sm=2048, programs_per_sm=32),
    86: ArchLimits(shared_per_sm=102_400, shared_per_program=101_376, threads_per_sm=1536, programs_per_sm=16),
    89: ArchLimits(shared_per_sm=102_400, shared_per_program=101_376, threads_per_sm=1536, programs_per_sm=24),
    90: ArchLimits(shared_per_sm=233_472, shared_per_program=232_448, threads_per_sm=2048, programs_per_sm=32),
    100: ArchLimits(shared_per_sm=233_472, shared_per_program=232_448, threads_per_sm=2048, programs_per_sm=32),
    120: ArchLimits(shared_per_sm=102_400, shared_per_program=101_376, threads_per_sm=1536, programs_per_sm=24),
}


def limits_of(arch: int) -> ArchLimits:
    """Limits of compute capability `arch` (86 = 8.6); an unknown one gets those of the newest older card listed."""
    older = [known for known in ARCH_LIMITS if known <= arch]
    return ARCH_LIMITS[max(older, default=min(ARCH_LIMITS))]


@dataclass(frozen=True)
class Costs:
    """What things cost on one card: all that pkv.cards.simulation and pkv.cards.costs know of its speed.

    memory_gb_per_s: the most that all programs together read, in GB (10**9 bytes) per second.
    program_gb_per_s: the most that one program reads, whatever the memory has left: its bytes in flight over the
        memory's latency. flashinfer_program_gb_per_s: the same of FlashInfer's programs, None where it is equal.
    merge_gb_per_s: the same of the programs of a merge, whose states lie in the L2 cache, None: equal.
    sm_gb_per_s: the most that the programs of one SM read together. Where it is known, SMs have equal shares of the
        memory; None: programs have. What lies unevenly on the SMs then takes longer.
    item_us: start-up of an item, in us, before its first byte: find the item, load the query, wait for the first page.
        A program without a token costs this and no more. flashinfer_item_us: the same of FlashInfer's, None: equal.
    launch_us: from the end of one kernel to the first program of the next, in us.
    step_us: what a step costs once, in us, whatever it launches.
    flashinfer_plan_us: what FlashInfer's own plan() adds to a step, in us, where the step's time holds it.
    programs_per_sm: programs that resided on an SM when these were measured; None: as many as the plan says. Of
        FlashInfer's it is always the plan that says it.
    """

    memory_gb_per_s: float
    program_gb_per_s: float
    item_us: float
    launch_us: float
    step_us: float = 0.0
    flashinfer_plan_us: float = 0.0
    flashinfer_program_gb_per_s: float | None = None
    programs_per_sm: int | None = None
    flashinfer_item_us: float | None = None
    sm_gb_per_s: float | None = None
    merge_gb_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.programs_per_sm is not None:
            object.__setattr__(self, "programs_per_sm", at_least(1, "programs_per_sm", self.programs_per_sm))
        for name, value in asdict(self).items():
            if name == "programs_per_sm" or (value is None and name in MAY_BE_NONE):
                continue
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise TypeError(f"{name} must be a number, got {type(value).__name__}")
            is_rate = name.endswith("gb_per_s")
            least = SLOWEST if is_rate else 0.0
            if not (least <= value <= LARGEST):  # type: ignore[operator]
                raise ValueError(f"{name} = {value} must lie in {least:g} .. {LARGEST:g}")
            object.__setattr__(self, name, float(value))


@dataclass(frozen=True)
class GpuProfile:
    """One card. `arch` is the compute capability without its dot (86), `n_sms` the SMs that a program may use.

    costs: what simulation and prediction need; None where nobody has measured the card. tile: tokens per tile that
    serve it best, of pkv.plans.gpu.TILES; see pkv.kernels.configs.choose_tile for where it is taken.
    """

    name: str
    arch: int
    n_sms: int
    costs: Costs | None = None
    tile: int = DEFAULT_TILE

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name must be a str, got {type(self.name).__name__}")
        if self.costs is not None and not isinstance(self.costs, Costs):
            raise TypeError(f"costs must be a pkv.plans.gpu.Costs, got {type(self.costs).__name__}")
        object.__setattr__(self, "arch", at_least(1, "arch", self.arch))
        object.__setattr__(self, "n_sms", at_least(1, "n_sms", self.n_sms))
        if self.tile not in TILES or isinstance(self.tile, bool):
            raise ValueError(f"tile = {self.tile!r} must be one of {', '.join(map(str, TILES))} (tokens per tile)")

    def __hash__(self) -> int:
        return hash((self.name, self.n_sms))  # profiles are hashed in every call of decode

    @property
    def limits(self) -> ArchLimits:
        return limits_of(self.arch)

    def needed_costs(self) -> Costs:
        """The costs; ValueError with the remedy where the profile has none."""
        if self.costs is None:
            raise ValueError(
                f"gpu = {self.name!r} has no costs, so no time can be predicted: pass gpu={DEFAULT_GPU!r}, measure "
                "the card with `pkv calibrate`, or pass a GpuProfile with costs=pkv.plans.gpu.Costs(...)"
            )
        return self.costs

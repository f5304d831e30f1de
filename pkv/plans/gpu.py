"""A GPU as a value: its limits, its number of SMs and, if the card has been measured, the costs of work on it."""

import numbers
from dataclasses import asdict, dataclass

from pkv.wording.checks import at_least

DEFAULT_GPU = "rtx3060"
TILES = (16, 32, 64)
DEFAULT_TILE = 16
MAY_BE_NONE = ("flashinfer_program_gb_per_s", "flashinfer_item_us", "merge_gb_per_s", "sm_gb_per_s")  # among the costs
SLOWEST, LARGEST = 1e-6, 1e9  # bounds of the costs: outside them a simulation would lose digits


@dataclass(frozen=True)
class ArchLimits:
    """Limits of one compute capability, from the CUDA C++ Programming Guide's table of technical specifications."""

    shared_per_sm: int  # bytes
    shared_per_program: int  # bytes, the most that one program (thread block) may request
    threads_per_sm: int
    programs_per_sm: int
    registers_per_sm: int = 65536
    shared_reserved: int = 1024  # bytes that the driver keeps for itself in every program


ARCH_LIMITS = {
    80: ArchLimits(shared_per_sm=167_936, shared_per_program=166_912, threads_per_sm=2048, programs_per_sm=32),
    86: ArchLimits(shared_per_sm=102_400, shared_per_program=101_376, threads_per_sm=1536, programs_per_sm=16),
    89: ArchLimits(shared_per_sm=102_400, shared_per_program=101_376, threads_per_sm=1536, programs_per_sm=24),
    90: ArchLimits(shared_per_sm=233_472, shared_per_program=232_448, threads_per_sm=2048, programs_per_sm=32),
    100: ArchLimits(shared_per_sm=233_472, shared_per_program=232_448, threads_per_sm=2048, programs_per_sm=32),
    120: ArchLimits(shared_per_sm=102_400, shared_per_program=101_376, threads_per_sm=1536, programs_per_sm=24),
}


def limits_of(arch: int) -> ArchLimits:
    """Return the limits of compute capability `arch` (86 = 8.6), or of the next older one if `arch` is not listed."""
    older = [known for known in ARCH_LIMITS if known <= arch]
    return ARCH_LIMITS[max(older, default=min(ARCH_LIMITS))]


@dataclass(frozen=True)
class Costs:
    """The costs of work on one card: all that pkv.cards.simulation and pkv.cards.costs know of its speed.

    memory_gb_per_s: the most that all programs together read, in GB (10**9 bytes) per second.
    program_gb_per_s: the most that one program reads, however idle the memory is: its bytes in flight over the memory's
        latency. flashinfer_program_gb_per_s: the same for FlashInfer's programs, None if it is equal.
    merge_gb_per_s: the same for the programs of a merge, whose states lie in the L2 cache, None if it is equal.
    sm_gb_per_s: the most that the programs of one SM read together. If it is given, SMs get equal shares of the memory,
        so work that lies unevenly on the SMs takes longer. None: programs get equal shares.
    item_us: start-up of an item, in us, before its first byte: find the item, load the query, wait for the first page.
        A program without a token costs this and no more. flashinfer_item_us: the same for FlashInfer, None if equal.
    launch_us: from the end of one kernel to the first program of the next, in us.
    step_us: the cost of a step that is paid once, in us, whatever it launches.
    flashinfer_plan_us: the time that FlashInfer's own plan() adds to a step, in us, if the step's time includes it.
    programs_per_sm: programs that resided on an SM when these costs were measured; None: as many as the plan says. For
        FlashInfer's kernels the plan always says it.
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
    """One card. `arch` is its compute capability without the dot (86), `n_sms` the number of SMs a launch may use.

    costs: needed for simulation and prediction; None if the card has not been measured. tile: the tokens per tile that
    are fastest on this card, one of pkv.plans.gpu.TILES; pkv.kernels.configs.choose_tile says for which shapes.
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
        """Return the costs; ValueError with the remedy if the profile has none."""
        if self.costs is None:
            raise ValueError(
                f"gpu = {self.name!r} has no costs, so no time can be predicted: pass gpu={DEFAULT_GPU!r}, measure "
                "the card with `pkv calibrate`, or pass a GpuProfile with costs=pkv.plans.gpu.Costs(...)"
            )
        return self.costs

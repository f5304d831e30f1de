"""What planning must know of a GPU: how many programs it holds at once, and, to predict times, what things cost.

>>> load_gpu("rtx3060").n_sms
28
"""

import functools
import numbers
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pkv.cards.files import broken, cache_folder, name_for, own_file, own_names, read_own, read_shipped, shipped_names
from pkv.checks import at_least

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
    serve it best, of pkv.kernels.configs.TILES; see pkv.kernels.configs.choose_tile for where it is taken.
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
            raise TypeError(f"costs must be a pkv.cards.known.Costs, got {type(self.costs).__name__}")
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
                "the card with `pkv calibrate`, or pass a GpuProfile with costs=pkv.cards.known.Costs(...)"
            )
        return self.costs


def gpu_names() -> list[str]:
    """Names of all profiles, in order: those that ship with pkv, and the user's own."""
    return sorted({*shipped_names(), *own_names()})


def load_gpu(name: str) -> GpuProfile:
    """The profile `name`, the user's own before the shipped one. ValueError lists the names there are.

    A file of the user's own that cannot be read is a ValueError too, which names it and says what to do.
    """
    if not isinstance(name, str) or name not in gpu_names():
        raise ValueError(
            f"gpu = {name!r} is no shipped profile; choose one of {', '.join(gpu_names())}, pass a GpuProfile, or "
            "measure a card with `pkv calibrate`"
        )
    return (_own(name, cache_folder()) if name in own_names() else _shipped(name))[0]


def forget_profiles() -> None:
    """Read profiles anew: a file has changed."""
    for known in (_own, _warn_once, _gpu_of_index):
        known.cache_clear()


@functools.cache
def _shipped(name: str) -> tuple[GpuProfile, str]:
    """(profile, title of its card)."""
    return profile_of(name, fields := read_shipped(name)), fields["title"]


@functools.cache
def _own(name: str, folder: Path) -> tuple[GpuProfile, str]:
    """The same of the user's own; folder: where it lies, on which the answer depends."""
    fields = read_own(name)
    try:
        return profile_of(name, fields), str(fields["title"])
    except (KeyError, TypeError, ValueError) as error:
        raise broken(own_file(name), name, f"{type(error).__name__}: {error}") from None


def profile_of(name: str, fields: dict[str, Any]) -> GpuProfile:
    """The profile that a file's fields say."""
    costs = Costs(**fields["costs"]) if fields.get("costs") is not None else None
    return GpuProfile(name, fields["arch"], fields["n_sms"], costs, fields.get("tile", DEFAULT_TILE))


def gpu_for(title: str, arch: int, n_sms: int) -> GpuProfile:
    """The profile of a card that calls itself `title`, with so many SMs; without costs where there is none.

    The user's own comes before the shipped one; of several the first by name. One that cannot be read is passed over,
    with one warning: which card it is of is not known, and decoding must not fail by it.
    """
    readable = {}
    for name in own_names():
        try:
            readable[name] = _own(name, cache_folder())
        except ValueError as error:
            _warn_once(f"passed over when the profile of {title} was looked for: {error}")
    shipped = {name: _shipped(name) for name in shipped_names() if name not in readable}
    for known, of in (readable | shipped).values():
        if f"{of} ".startswith(f"{title} ") and (known.arch, known.n_sms) == (arch, n_sms):
            return known
    return GpuProfile(name_for(title), arch, n_sms)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)


@functools.cache
def _gpu_of_index(index: int) -> GpuProfile:
    card = torch.cuda.get_device_properties(index)
    return gpu_for(card.name, card.major * 10 + card.minor, card.multi_processor_count)


def gpu_of(device: torch.device | None) -> GpuProfile:
    """The card that `device` lies on (None: the current one), see gpu_for(); without a GPU the home card, rtx3060."""
    if device is None:
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    if device.type != "cuda":
        return load_gpu(DEFAULT_GPU)
    return _gpu_of_index(torch.cuda.current_device() if device.index is None else device.index)


def resolve_gpu(gpu: "str | GpuProfile | None") -> GpuProfile:
    """What the option `gpu=` means: a profile, the name of one, or None for the card at hand."""
    if gpu is None:
        return gpu_of(None)
    if not isinstance(gpu, str | GpuProfile):
        raise TypeError(f"gpu must be a profile's name or a pkv.GpuProfile, got {gpu!r}")
    return load_gpu(gpu) if isinstance(gpu, str) else gpu

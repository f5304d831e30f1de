"""Look-up of GPU profiles: by name, by the device that torch sees, and by the option `gpu=`.

>>> load_gpu("rtx3060").n_sms
28
"""

import functools
import warnings
from pathlib import Path
from typing import Any

import torch

from pkv.cards.files import broken, cache_folder, name_for, own_file, own_names, read_own, read_shipped, shipped_names
from pkv.plans.gpu import DEFAULT_GPU, DEFAULT_TILE, Costs, GpuProfile


def gpu_names() -> list[str]:
    """Return the names of all profiles, in order: those that ship with pkv, and the user's own."""
    return sorted({*shipped_names(), *own_names()})


def load_gpu(name: str) -> GpuProfile:
    """Return the profile `name`, the user's own before the shipped one. ValueError lists the known names.

    If the user's own file cannot be read, ValueError names it and says what to do.
    """
    if not isinstance(name, str) or name not in gpu_names():
        raise ValueError(
            f"gpu = {name!r} is not a known profile; choose one of {', '.join(gpu_names())}, pass a pkv.GpuProfile, or "
            "measure a card with `pkv calibrate`"
        )
    return (_own(name, cache_folder()) if name in own_names() else _shipped(name))[0]


def forget_profiles() -> None:
    """Forget the profiles that were read, because a file has changed; they are read again when they are needed."""
    for known in (_own, _warn_once, _gpu_of_index):
        known.cache_clear()


@functools.cache
def _shipped(name: str) -> tuple[GpuProfile, str]:
    """Read a shipped profile: (profile, title of its card)."""
    return profile_of(name, fields := read_shipped(name)), fields["title"]


@functools.cache
def _own(name: str, folder: Path) -> tuple[GpuProfile, str]:
    """Read one of the user's own profiles: (profile, title of its card). folder: where it lies, for the cache's key."""
    fields = read_own(name)
    try:
        return profile_of(name, fields), str(fields["title"])
    except (KeyError, TypeError, ValueError) as error:
        raise broken(own_file(name), name, f"{type(error).__name__}: {error}") from None


def profile_of(name: str, fields: dict[str, Any]) -> GpuProfile:
    """Make a profile from a file's fields."""
    costs = Costs(**fields["costs"]) if fields.get("costs") is not None else None
    return GpuProfile(name, fields["arch"], fields["n_sms"], costs, fields.get("tile", DEFAULT_TILE))


def gpu_for(title: str, arch: int, n_sms: int) -> GpuProfile:
    """Return the profile of the card with this title, arch and number of SMs; if there is none, one without costs.

    The user's own profiles come before the shipped ones; among several the first by name is taken. A file that cannot
    be read is skipped with one warning: its card is unknown, and decoding must not fail because of it.
    """
    readable = {}
    for name in own_names():
        try:
            readable[name] = _own(name, cache_folder())
        except ValueError as error:
            _warn_once(f"skipped a file while looking for the profile of {title}: {error}")
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
    """Return the profile of `device` (None: the current one), see gpu_for(); without a GPU the home card, rtx3060."""
    if device is None:
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    if device.type != "cuda":
        return load_gpu(DEFAULT_GPU)
    return _gpu_of_index(torch.cuda.current_device() if device.index is None else device.index)


def resolve_gpu(gpu: "str | GpuProfile | None") -> GpuProfile:
    """Resolve the option `gpu=`: a profile, the name of one, or None for the card at hand."""
    if gpu is None:
        return gpu_of(None)
    if not isinstance(gpu, str | GpuProfile):
        raise TypeError(f"gpu must be a profile's name or a pkv.GpuProfile, got {gpu!r}")
    return load_gpu(gpu) if isinstance(gpu, str) else gpu

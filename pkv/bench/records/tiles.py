"""Which tile serves a card best, from records of stages that were timed with several.

Which tile a time was taken with, the record's settings say. A stage's bare name does not: there the profile that the
card had at that time chose. So tiles are compared by settings, and "row_local" of a card whose profile says 32 is a
time of tile 32.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from pkv.bench.records.records import Records, Timing
from pkv.plans.gpu import DEFAULT_TILE, TILES
from pkv.stages.s4_adaptive import OWN

TILED = ("row_local", "workqueue")  # the stages that tiles are compared on


def named(engine: str) -> tuple[str, dict[str, Any]]:
    """(stage, options) of an engine's name.

    >>> named("workqueue:splits=20,tile=32")
    ('workqueue', {'splits': 20, 'tile': 32})
    """
    stage, _, words = engine.partition(":")
    options = (word.partition("=") for word in words.split(",") if word)
    return stage, {name: int(value) if value.isdecimal() else value for name, _, value in options}


def is_usual(engine: str) -> bool:
    """Whether the engine is a stage of ours that cuts rows by default, whatever its tile."""
    stage, options = named(engine)
    return stage in OWN and set(options) <= {"tile"}


def tile_of(timing: Timing) -> int:
    """The tile that a stage of ours ran with: of its settings, else of its name, else the default.

    ValueError where no stage can have run with it.
    """
    tile = timing.settings.get("tile", named(timing.engine)[1].get("tile", DEFAULT_TILE))
    if type(tile) is not int or tile not in TILES:
        allowed = ", ".join(map(str, TILES))
        raise ValueError(f"{timing.engine} on {timing.load}: its tile = {tile!r} must be one of {allowed}")
    return tile


def best_tile(records: Records) -> tuple[int, dict[int, float], float]:
    """(tile, {tile: time over the default's}, noise): another than the default only where it gains more than noise."""
    timings: dict[tuple[str, str], dict[int, Timing]] = {}
    for (name, engine), timing in records.latest().items():
        stage = named(engine)[0]
        if stage in TILED and is_usual(engine) and timing.refused is None:
            timings.setdefault((name, stage), {})[tile_of(timing)] = timing
    ratios: dict[int, list[float]] = {}
    noises: list[float] = []
    for tiles in timings.values():
        usual = tiles.pop(DEFAULT_TILE, None)
        if usual is None:
            continue
        for tile, timing in tiles.items():
            ratios.setdefault(tile, []).append(records.mean(timing) / records.mean(usual))
            noises += [timing.noise or 0.0, usual.noise or 0.0]
    times = {DEFAULT_TILE: 1.0} | {tile: float(np.exp(np.mean(np.log(ratios[tile])))) for tile in sorted(ratios)}
    noise = float(np.median(noises)) if noises else 0.0
    fastest = min(times, key=times.__getitem__)
    return (fastest if times[fastest] < 1 - noise else DEFAULT_TILE), times, noise


def as_served(records: Records, tile: int) -> Records:
    """The records as a profile with this tile makes them: a stage's bare name means its times with the tile."""
    timings = []
    for timing in records.timings:
        if is_usual(timing.engine):
            if tile_of(timing) != tile:
                continue
            timing = replace(timing, engine=named(timing.engine)[0])
        timings.append(timing)
    return replace(records, timings=tuple(timings))

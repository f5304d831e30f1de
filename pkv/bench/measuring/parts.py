"""Engines that run somebody else's parts, beside our own: `pkv bench --parts FILE`.

FILE is Python, and each variable in it that is a pkv.Parts names an engine for every stage that takes it: with
`parts = pkv.Parts(attend_tokens=mine)`, split_kv:parts runs beside split_kv. Options stand behind the name:
workqueue:parts,splits=20.
"""

import importlib.util
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from pkv.bench.engines.engine import Engine
from pkv.bench.loads.grids import Load, Step
from pkv.bench.measuring.checking import Judge, WrongResult, first_sentence
from pkv.bench.measuring.measurement import Times, first_run
from pkv.kernels.parts import Parts
from pkv.plans.shape import Shape
from pkv.stages import TAKES

# Rows of several tiles, of one, of none, of whole tiles only: little enough for an interpreter.
LENGTHS = (70, 5, 0, 32)
LOADS = tuple(
    Load(dtype, Shape(8, 2, 64, 16, dtype), (Step(LENGTHS),))  # type: ignore[arg-type]
    for dtype in ("float16", "bfloat16", "float32")
)
_numbers = itertools.count()


def read_parts(file: Path) -> dict[str, Parts]:
    """The Parts in a Python file, by the names of their variables; ValueError where it has none, or does not run."""
    module_name = f"pkv_parts_{next(_numbers)}_{file.stem}"  # its own each time: two versions never mix
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is no Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(file.parent.absolute()))  # as for a script
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{file} does not run: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(file.parent.absolute()))
    found = {name: value for name, value in vars(module).items() if isinstance(value, Parts) and value.given}
    if not found:
        raise ValueError(f"{file} has no variable that is a pkv.Parts: write parts = pkv.Parts(attend_tokens=...)")
    return found


def beside(names: Sequence[str], parts: Mapping[str, Parts]) -> list[str]:
    """The names of engines, and behind each stage of ours those that run the parts in it.

    ValueError where there is none.

    >>> beside(["split_kv", "vllm", "workqueue:splits=20"], {"mine": Parts(merge=lambda *arguments: None)})
    ['split_kv', 'split_kv:mine', 'vllm', 'workqueue:splits=20', 'workqueue:mine,splits=20']
    """
    found: list[str] = []
    for name in names:
        stage, _, words = name.partition(":")
        found.append(name)
        if not runs(parts, name):
            suffix = f",{words}" if words else ""
            added = [f"{stage}:{own}{suffix}" for own, made in parts.items() if takes(stage, made)]
            found += [other for other in added if other not in names]
    if parts and not any(runs(parts, name) for name in found):
        able = [stage for stage in TAKES if any(takes(stage, made) for made in parts.values())]
        raise ValueError(f"none of the engines takes these parts; name one of {', '.join(able)}")
    return found


def runs(parts: Mapping[str, Parts], engine: str) -> bool:
    """Does the engine of that name run one of the parts?"""
    return engine.partition(":")[2].partition(",")[0] in parts


def takes(stage: str, parts: Parts) -> bool:
    """Has the stage a place for all these parts?"""
    return set(parts.given) <= set(TAKES.get(stage, ()))


def check_small(engine: Engine, load: Load, device: torch.device) -> tuple[Times | None, str | None]:
    """Run an engine on one of LOADS and hold it against fp64: (its errors, what is wrong)."""
    judge = Judge(load, load.steps[0], device)
    reason = engine.why_not(judge.batch)
    if reason is not None:
        return None, reason
    try:
        return first_run(engine, judge)[1], None
    except WrongResult as error:
        return None, str(error)
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", ()))  # which part it was
        return None, f"raised {type(error).__name__}: {first_sentence(error)} {notes}".strip()

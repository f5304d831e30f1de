"""The engines that a benchmark compares: every stage of pkv, and what others decode with.

find_engines(["row_local", "workqueue:splits=20,tile=32", "vllm"])    three engines, in this order
find_engines(["split_kv:mine"], {"mine": parts})                      a stage with somebody else's parts
"""

from collections.abc import Iterable, Mapping

from pkv.bench.engines.engine import Engine
from pkv.bench.engines.flashinfer import FLASHINFER
from pkv.bench.engines.pkv import PKV, stage_engine
from pkv.bench.engines.torch import TORCH
from pkv.bench.engines.triton import TRITON
from pkv.decoding import plan as plan_step
from pkv.kernels.parts import Parts, checked_parts
from pkv.plans.shape import Shape
from pkv.stages import STAGES, TAKES
from pkv.stages.options import checked_options, options_of

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (*PKV, *FLASHINFER, *TRITON, *TORCH)}
DEFAULT_ENGINES = tuple(name for name in ENGINES if name not in ("reference", "empty"))
OF_THE_BATCH = ("gpu", "dynamic")  # options of stages that a benchmark sets itself
ANY_SHAPE = Shape(n_q_heads=8, n_kv_heads=2, head_dim=64, page_size=16, dtype="float16")  # type: ignore[arg-type]


def find_engines(names: Iterable[str], parts: Mapping[str, Parts] | None = None) -> list[Engine]:
    """The engines of these names: those of ENGINES, and stages with options, NAME:OPTION=VALUE,OPTION=VALUE.

    parts: somebody else's, by the names that stand before the options, NAME:PARTS,OPTION=VALUE.
    ValueError lists the engines there are, or says what is wrong with an option; TypeError for a str in place of names.

    >>> [engine.name for engine in find_engines(["vllm", "workqueue:tile=32,splits=20"])]
    ['vllm', 'workqueue:splits=20,tile=32']
    """
    if isinstance(names, str):
        raise TypeError(f"engines must be a list of names, got one str: pass [{names!r}]")
    found = [find_engine(name, parts or {}) for name in names]
    seen: set[str] = set()
    for engine in found:
        if engine.name in seen:
            raise ValueError(f"engine {engine.name!r} is named twice: name it once")
        seen.add(engine.name)
    return found


def find_engine(name: str, parts: Mapping[str, Parts]) -> Engine:
    """One engine by its name; see find_engines."""
    if name in ENGINES:
        return ENGINES[name]
    stage, _, words = name.partition(":")
    if stage in ENGINES and stage not in STAGES:
        raise ValueError(f"engine {name!r}: {stage} takes no options; only stages of pkv do, {', '.join(STAGES)}")
    if stage not in STAGES:
        raise ValueError(f"engine {name!r} does not exist; choose of {', '.join(ENGINES)}")
    known = [option for option in options_of(stage) if option not in OF_THE_BATCH]
    options: dict[str, int | str] = {}
    given, own = words.split(","), None
    if given[0].strip() in parts:
        name_of_parts = given.pop(0).strip()
        own = name_of_parts, parts[name_of_parts]
        checked_parts(own[1], stage, TAKES)
    for word in given:
        option, is_given, value = word.strip().partition("=")
        if option not in known or not is_given or not value:
            takes = f"takes {', '.join(f'{option}=VALUE' for option in known)}" if known else "takes no options"
            raise ValueError(f"engine {name!r}: {word!r} is no option of it; {stage} {takes}")
        if option in options:
            raise ValueError(f"engine {name!r}: {option} is given twice")
        options[option] = int(value) if value.isdecimal() else value
    try:
        # what a stage has against a value shows when it plans, whatever the batch
        plan_step([1], ANY_SHAPE, stage=stage, gpu="rtx3060", **checked_options(stage, options))
    except (ValueError, TypeError) as error:
        raise ValueError(f"engine {name!r}: {error}") from None
    return stage_engine(stage, own, **options)

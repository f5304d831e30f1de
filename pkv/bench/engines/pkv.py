"""pkv's own engines: every stage, with its own defaults or with options.

    workqueue:splits=20,tile=32    is pkv.plan(..., stage="workqueue", splits=20, tile=32)
    workqueue:mine,splits=20       the same with somebody else's parts, which are called `mine` (measuring/parts.py)

Stages planned on the GPU are timed as users call them: `decode`, which has nothing to plan. Of those planned on the
host, a step's plan is made and copied to the GPU once, and run for every layer.
"""

import functools
from typing import Any

import torch

from pkv._triton import why_not_launchable
from pkv.arguments import resolve_scale
from pkv.bench.engines.engine import Batch, Engine, Ready, nothing_to_plan
from pkv.cards.known import gpu_of
from pkv.decoding import decode, run
from pkv.decoding import plan as plan_step
from pkv.kernels.parts import Parts
from pkv.kernels.uploads import uploaded
from pkv.plans.facts import Family
from pkv.plans.features import NO_VALUES
from pkv.plans.plan import Plan
from pkv.stages import STAGES, x_flashinfer
from pkv.stages.options import options_of
from pkv.stages.x_flashinfer_rules import unfit

WHAT = {"flashinfer": "FlashInfer as a stage: fa2, and two small kernels around it"}


def stage_engine(stage: str, own: tuple[str, Parts] | None = None, **options: Any) -> Engine:
    """The engine of a stage; options as for pkv.plan, their types right (see pkv.stages.options.checked_options).

    own: somebody else's parts to run it with, and what they are called.
    """
    ordered = {name: options[name] for name in options_of(stage) if name in options}
    suffix = ",".join([*([own[0]] if own else []), *(f"{name}={value}" for name, value in ordered.items())])
    parts = own[1] if own else None
    return Engine(
        name=f"{stage}:{suffix}" if suffix else stage,
        what=WHAT.get(stage) or (STAGES[stage].__doc__ or "").partition(":")[0],
        family="pkv",
        why_not=functools.partial(why_not, stage, ordered),
        prepare=functools.partial(prepare, stage, ordered, parts),
    )


def why_not(stage: str, options: dict[str, Any], batch: Batch) -> str | None:
    """Why the stage cannot do the batch here, or None."""
    device = batch.q.device
    if STAGES[stage].FACTS.family is Family.TORCH:
        return "it is the fp64 specification that others are checked against" if device.type == "cuda" else None
    reason = why_not_launchable(device)
    if reason is not None:
        return reason
    try:
        made = planned(stage, options, batch)
    except (ValueError, TypeError) as error:
        return str(error)
    if made.family is not Family.FLASHINFER:
        return None
    reason = x_flashinfer.unavailable() or unfit(batch.cache.k_pages, batch.cache.v_pages, made.variant)
    return reason if reason is None or stage == made.stage else f"it chose flashinfer, and {reason}"


def prepare(stage: str, options: dict[str, Any], parts: Parts | None, batch: Batch) -> Ready:
    """Compile; plan() and run() then do what pkv.decode, or pkv.plan and pkv.run, do."""
    q, cache, out = batch.q, batch.cache, torch.empty_like(batch.q)
    settings = settings_of(planned(stage, options, batch, parts))

    # a user names no card
    named = options if batch.gpu == gpu_of(q.device) else {"gpu": batch.gpu, **options}

    def decode_once(_: None) -> tuple[torch.Tensor, torch.Tensor]:
        return decode(q, cache, stage=stage, out=out, return_lse=True, parts=parts, **named)  # type: ignore[return-value]

    if STAGES[stage].PLANNED_ON == "gpu":
        del settings["items"]  # on a GPU it plans for rows of any length
        return Ready(plan=nothing_to_plan, run=decode_once, settings=settings)
    return Ready(
        plan=lambda: with_its_arrays_there(planned(stage, options, batch, parts), batch),
        run=lambda made: run(q, cache, made, out=out, parts=parts),
        settings=settings,
        rounds_weights=settings.get("kernel") == "tensor-core",
    )


def planned(stage: str, options: dict[str, Any], batch: Batch, parts: Parts | None = None) -> Plan:
    """A plan of the step for the batch's GPU."""
    return plan_step(batch.lengths, batch.shape, stage=stage, parts=parts, gpu=batch.gpu, **options)


def with_its_arrays_there(made: Plan, batch: Batch) -> Plan:
    """The plan, when what its kernels read of it is on the GPU: else the first layer would wait for that."""
    if made.family is Family.FLASHINFER:
        x_flashinfer.prepare(made, batch.cache, resolve_scale(None, batch.shape.head_dim), NO_VALUES)
    else:
        uploaded(made, batch.q.device)
    return made


def settings_of(made: Plan) -> dict[str, Any]:
    """What a plan chose, for the record."""
    return {
        "stage": made.stage,
        "tile": made.tile,
        "items": made.n_items,
        "launches": len(made.launches),
        "programs_per_sm": made.programs_per_sm,
    } | ({"kernel": made.variant} if made.variant else {})


PKV = (*(stage_engine(stage) for stage in STAGES), stage_engine("adaptive", policy="cost"))

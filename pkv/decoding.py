"""plan, run, decode: the door, and the only dispatch to stages.

q, cache -> stage.plan(lengths, shape) -> Plan -> stage.launch(q, cache, plan, ...) -> out, lse
"""

import functools
import inspect
import threading
from typing import Any

import torch

from pkv._triton import INTERPRETED, require_launchable
from pkv.arguments import check_arrays, check_kernel_shape, check_plan, may_overlap, resolve_scale
from pkv.cache import PagedKVCache
from pkv.captures import is_capturing
from pkv.checks import LONGEST_ROW, MOST_SPLITS, Ints, at_least
from pkv.gpus import GpuProfile, gpu_of
from pkv.merging import MOST_DIM_BLOCKS
from pkv.parts import Parts, first_to_take, taken
from pkv.plans import Plan, int_lengths
from pkv.ready import decode_again, kind_of, remember
from pkv.shapes import Shape
from pkv.stages import STAGES, TAKES
from pkv.stages.s3_own_items import check_made_by, plan_by
from pkv.stages.s4_adaptive import OWN

DEFAULT_STAGE = "stream_k"  # the best stage that needs nothing from the host
DEFAULTS_WITH_PARTS = (DEFAULT_STAGE, "row_local", "workqueue")  # of these the first that takes them
LARGEST_GRID = 2**31 - 1
INTERPRETER_LOCK = threading.Lock()


def plan(
    lengths: Ints,
    shape: Shape,
    stage: str = DEFAULT_STAGE,
    *,
    parts: Parts | None = None,
    **options: Any,
) -> Plan:
    """Decide who does which tiles, without a GPU.

    lengths: tokens per row, ints or an int tensor (a GPU tensor is copied to the host once). shape: see Shape, or
    Shape.of(q, cache). Options by stage, e.g. split_kv: splits= (per row), tile= (tokens), gpu= (a profile's name or a
    GpuProfile: decides default splits; default the GPU at hand, else "rtx3060"). parts: whose `plan` to ask in the
    place of stage workqueue's own.
    Raises ValueError / TypeError for an unknown stage or option, bad lengths, splits < 1.

    >>> print(plan([5, 40], Shape(4, 2, 64, 4, "float16"), "row_local", splits=2, gpu="rtx3060").items.tolist())
    [[0, 0, 5], [0, 16, 16], [1, 0, 16], [1, 16, 40]]
    """
    module = find_stage(stage)
    options = checked_options(stage, options)
    parts = taken(parts, stage, TAKES)
    if not isinstance(shape, Shape):
        raise TypeError(f"shape must be a pkv.Shape, got {type(shape).__name__}; pkv.Shape.of(q, cache) makes one")
    if stage != "reference":
        check_kernel_shape(shape)
    row_lengths = int_lengths(lengths)
    n_rows, splits = len(row_lengths), options.get("splits", 1)
    n_programs = n_rows * max(splits * shape.grid_heads, shape.n_q_heads * MOST_DIM_BLOCKS)
    if n_programs > LARGEST_GRID:
        raise ValueError(
            f"rows x query heads x splits = {n_rows} x {shape.n_q_heads} x {splits}: {n_programs} programs "
            "exceed a grid of 2**31 - 1: use fewer splits, or decode the rows in parts"
        )
    made: Plan
    if parts is None or parts.plan is None:
        made = module.plan(row_lengths, shape, **options)
    else:
        with parts.blamed("plan"):
            made = plan_by(parts.plan, row_lengths, shape, **options)
    object.__setattr__(made, "_is_sound", True)
    return made


def run(
    q: torch.Tensor,
    cache: PagedKVCache,
    plan: Plan,
    *,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    check: bool = False,
    parts: Parts | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Execute a plan: attention of one token per row over the row's cached tokens.

    q [n_rows, n_q_heads, head_dim] in the cache's dtype. scale: of the scores, None = 1 / sqrt(head_dim). out: where to
    write the result, any strides, q's shape and dtype. check: also check values that lie on a GPU (lengths, block
    table), which waits for the GPU; values on the CPU are always checked. parts: somebody else's functions in the place
    of ours; one with a `plan` must have made this plan, by pkv.plan(..., parts=parts).
    Returns out [n_rows, n_q_heads, head_dim] and lse [n_rows, n_q_heads] (fp32, natural log). A row without tokens
    gives 0 and -inf. Raises ValueError / TypeError, naming the argument and the row, before any launch.
    """
    check_arrays(q, cache, out)
    check_plan(q, cache, plan, check)
    if not plan._is_sound:
        check_items(plan)
    parts = taken(parts, plan.stage, TAKES)
    if parts is not None and parts.plan is not None:
        check_made_by(parts.plan, plan)
    return _run(q, cache, plan, scale, out, check, parts)


def _run(
    q: torch.Tensor, cache: PagedKVCache, plan: Plan, scale: float | None, out: torch.Tensor | None, check: bool,
    parts: Parts | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """run(), with arguments that fit each other."""
    if check or q.device.type == "cpu":
        cache.validate()
    launch = find_stage("adaptive" if plan.fallback else plan.stage).launch
    if parts is not None:
        launch = parts.passed_to(launch)
    scale = resolve_scale(scale, q.shape[-1])
    if plan.stage != "reference":
        require_launchable(q.device)
    if q.is_neg() or (out is not None and may_overlap(q, out)):
        q = q.clone()  # plain memory, which no program reads after another has written it
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    lse = torch.empty(q.shape[:2], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32, device=q.device)
    if not plan.has_tokens:  # nothing to read: no launch
        return out.zero_(), lse.fill_(-torch.inf)
    if INTERPRETED:
        _launch_interpreted(launch, q, cache, plan, scale, out, lse)
    elif q.device.type == "cuda" and q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            launch(q, cache, plan, scale, out, lse)
    else:
        launch(q, cache, plan, scale, out, lse)
    return out, lse


@torch.no_grad()
def _launch_interpreted(
    launch: Any, q: torch.Tensor, cache: PagedKVCache, plan: Plan, scale: float, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Triton's interpreter keeps global state, and rounds to bfloat16 wrongly: one thread at a time, torch rounds."""
    target = torch.empty_like(out, dtype=torch.float32) if out.dtype == torch.bfloat16 else out
    try:
        with INTERPRETER_LOCK:
            launch(q, cache, plan, scale, target, lse)
    except Exception as error:
        if not getattr(error, "__notes__", None):  # else a part is to blame
            error.add_note("`pkv doctor` tests Triton's interpreter, and names versions that do not go together.")
        raise
    if target is not out:
        out.copy_(target)


def check_items(plan: Plan) -> None:
    """A plan from elsewhere (JSON, dataclasses.replace) is sound, and its items are those that the kernel will find."""
    plan.validate()
    module = find_stage(plan.stage)
    fault: str | None
    if plan.stage == "adaptive":
        fault = "a plan carries the stage that was chosen, never adaptive itself"
    elif plan.fallback is not None and (plan.stage != "flashinfer" or plan.fallback not in OWN):
        fault = f"fallback = {plan.fallback!r} must be None, or a stage of ours for a plan of flashinfer"
    elif plan.dynamic and (plan.fallback or "dynamic" not in options_of(plan.stage)):
        fault = "it is dynamic, but its kernel reads the planned lengths, not those of the cache"
    else:
        fault = module.fault_of_items(plan) if hasattr(module, "fault_of_items") else None
    if fault:
        raise ValueError(f"plan of stage {plan.stage!r}: {fault}; make it with pkv.plan")
    object.__setattr__(plan, "_is_sound", True)


def decode(
    q: torch.Tensor,
    cache: PagedKVCache,
    *,
    stage: str | None = None,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    check: bool = False,
    parts: Parts | None = None,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one token per row over a paged KV cache: plan and run in one call.

    q [n_rows, n_q_heads, head_dim]; see run() for scale, out and check, plan() for options. stage None: the best stage
    that needs nothing from the host, so no synchronisation and safe to capture in a CUDA graph (call once before
    capture, so that kernels are compiled). Stages planned on the host use cache.host_lengths, or copy the lengths from
    the GPU once per call. parts: somebody else's tile loop, merge or schedule in the place of ours (see pkv.Parts);
    stage None is then the best stage that takes them. Returns out, or (out, lse) with return_lse.
    """
    kind = None if check or options or parts is not None else kind_of(q, cache, stage, scale, out)
    if (again := decode_again(kind, q, cache, out)) is not None:
        return again if return_lse else again[0]
    check_arrays(q, cache, out)
    shape, name = Shape.of(q, cache), DEFAULT_STAGE if stage is None else stage
    if parts is not None:
        name = first_to_take(parts, DEFAULTS_WITH_PARTS, TAKES) if stage is None else stage
        parts = taken(parts, name, TAKES)
    options = {"gpu": gpu_of(q.device), **checked_options(name, options)} if options else {"gpu": gpu_of(q.device)}
    if options.pop("dynamic", find_stage(name).PLANNED_ON == "gpu" and q.device.type == "cuda"):
        made = _capacity_plan(cache.n_rows, rounded_up(cache.capacity), shape, name, **options)
    else:
        lengths = cache.host_lengths
        if is_capturing(q.device):
            raise RuntimeError(
                f"decode() plans stage {name!r} on the host at each call, and a captured CUDA graph would replay this "
                "step's plan for ever: capture a stage that is planned on the GPU, such as stream_k, or pkv.run with a "
                "plan of pkv.plan that ran once before"
            )
        made = plan(cache.lengths if lengths is None else lengths, shape, stage=name, parts=parts, **options)
        check_plan(q, cache, made, check)
    result, lse = _run(q, cache, made, scale, out, check, parts)
    if kind is not None:
        remember(kind, find_stage(name), q, cache, made, resolve_scale(scale, q.shape[-1]), result, lse)
    return (result, lse) if return_lse else result


def rounded_up(capacity: int) -> int:
    """Above 1,024 tokens, to one of 16 sizes between a power of two and the next.

    So tables that are wider at each step of a server share a few plans.

    >>> rounded_up(1000), rounded_up(65_536), rounded_up(65_552)
    (1000, 65536, 69632)
    """
    step = max(1, 2 ** (capacity.bit_length() - 5)) if capacity > 1024 else 1
    return -(-capacity // step) * step


@functools.lru_cache(maxsize=256)
def _capacity_plan(n_rows: int, capacity: int, shape: Shape, stage: str, **options: Any) -> Plan:
    """A plan for rows of any length up to the table's capacity; the kernels read the true lengths."""
    return plan([min(capacity, LONGEST_ROW)] * n_rows, shape, stage=stage, dynamic=True, **options)


def checked_options(stage: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options, provided that the stage has them and their types are right; what is None is left out."""
    find_stage(stage)
    known = options_of(stage)
    checked = {}
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"stage {stage!r} has no option {name!r}; it has {', '.join(known)}")
        if value is None:
            continue
        if name in ("splits", "tile"):
            value = at_least(1, name, value)
        if name == "splits" and value > MOST_SPLITS:
            raise ValueError(f"splits = {value} is above {MOST_SPLITS}: a row rarely gains from more than a hundred")
        if name == "dynamic" and not isinstance(value, bool):
            raise TypeError(f"dynamic must be True or False, got {value!r}")
        if name == "gpu" and not isinstance(value, (str, GpuProfile)):
            raise TypeError(f"gpu must be a profile's name or a pkv.GpuProfile, got {value!r}")
        checked[name] = value
    return checked


@functools.cache
def options_of(stage: str) -> list[str]:
    """The options that a stage's plan() takes."""
    parameters = inspect.signature(find_stage(stage).plan).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def find_stage(name: str) -> Any:
    """The module of a stage; ValueError lists the names there are."""
    if not isinstance(name, str) or name not in STAGES:
        raise ValueError(f"stage = {name!r} does not exist; choose one of {', '.join(STAGES)}")
    return STAGES[name]

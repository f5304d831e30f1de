"""plan, run and decode: the library's entry points, and the only place that picks a stage.

q, cache -> stage.plan(lengths, shape) -> Plan -> stage.launch(q, cache, plan, ...) -> out, lse
"""

import functools
import warnings
from typing import Any

import torch

from pkv._triton import INTERPRETED, require_launchable
from pkv.arguments import check_arrays, check_kernel_shape, check_plan, may_overlap, resolve_scale
from pkv.cache.paged import PagedKVCache
from pkv.cards.known import gpu_of
from pkv.kernels.interpreter import launch_interpreted
from pkv.kernels.merging import MOST_DIM_BLOCKS
from pkv.kernels.parts import Parts, checked_parts, first_stage_taking
from pkv.plans.facts import Family
from pkv.plans.features import Features, Values, features_and_values
from pkv.plans.fields import int_lengths
from pkv.plans.plan import Plan
from pkv.plans.shape import Shape, with_features
from pkv.runtime.graphs import is_capturing
from pkv.runtime.memory import Memory
from pkv.runtime.tracers import is_traced, refuse_tracers
from pkv.stages import TAKES
from pkv.stages.options import checked_options, find_stage, options_of, unknown_argument
from pkv.stages.s3_own_items import check_made_by, plan_of_items_by
from pkv.stages.s4_adaptive import OWN
from pkv.step import STEPS, Step, keep, kind_of_call
from pkv.wording.checks import LONGEST_ROW, Ints

DEFAULT_STAGE = "stream_k"  # the best stage that needs nothing from the host
# For decode(). The interpreter runs programs one after another, and stream_k has a GPU's number, each with a search.
DEFAULTS = ("row_local", "workqueue") if INTERPRETED else (DEFAULT_STAGE, "row_local", "workqueue")
LARGEST_GRID = 2**31 - 1
RUN_ARGUMENTS = ("scale", "window", "soft_cap", "out", "check", "parts")
NO_GRADIENT = (
    "q or the cache requires grad, but what pkv computes carries no gradient. Call it under torch.no_grad() if none is "
    "needed; where one is, use torch.nn.functional.scaled_dot_product_attention."
)
SOUND = Memory()  # plans that pkv.plan made, or pkv.run has checked
_said: set[str] = set()  # warnings that were given already: each is given once per process


def plan(
    lengths: Ints,
    shape: Shape,
    stage: str = DEFAULT_STAGE,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    parts: Parts | None = None,
    **options: Any,
) -> Plan:
    """Decide which program does which tiles. Needs no GPU.

    lengths [n_rows]: tokens per row, ints or an int tensor (a GPU tensor is copied to the host once). shape: see Shape;
    Shape.of(q, cache) makes one. stage: stream_k by default, the best on a GPU, wherever this runs. Options depend on
    the stage. split_kv, for example, takes splits= (per row), tile= (tokens) and gpu= (a profile's name or a
    GpuProfile, which decides the default splits; by default the GPU at hand, else "rtx3060"). window, soft_cap: see
    run(), which needs them too; of the cap a plan only keeps that there is one. parts: its `plan`, if it has one,
    replaces stage workqueue's own.
    Raises ValueError / TypeError for an unknown stage or option, bad lengths, splits < 1.

    >>> print(plan([5, 40], Shape(4, 2, 64, 4, "float16"), "row_local", splits=2, gpu="rtx3060").items.tolist())
    [[0, 0, 5], [0, 16, 16], [1, 0, 16], [1, 16, 40]]
    """
    module = find_stage(stage)
    options = checked_options(stage, options)
    if not isinstance(shape, Shape):
        raise TypeError(f"shape must be a pkv.Shape, got {type(shape).__name__}; pkv.Shape.of(q, cache) makes one")
    shape = with_features(shape, features_and_values(window, soft_cap)[0])
    parts = checked_parts(parts, stage, TAKES, shape.features)
    if module.FACTS.family is not Family.TORCH:
        check_kernel_shape(shape)
    row_lengths = int_lengths(lengths)
    n_rows, splits = len(row_lengths), options.get("splits", 1)
    n_programs = n_rows * max(splits * shape.grid_heads, shape.n_q_heads * MOST_DIM_BLOCKS)
    if n_programs > LARGEST_GRID:
        raise ValueError(
            f"rows x query heads x splits = {n_rows} x {shape.n_q_heads} x {splits}: {n_programs} programs "
            "exceed a grid of 2**31 - 1: use fewer splits, or decode the rows in parts"
        )
    if parts is None or parts.plan is None:
        made = module.plan(row_lengths, shape, **options)
    else:
        with parts.blamed("plan"):
            made = plan_of_items_by(parts.plan, row_lengths, shape, **options)
    SOUND.of(made)["made by"] = "pkv.plan"
    return made


def run(
    q: torch.Tensor,
    cache: PagedKVCache,
    plan: Plan,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    out: torch.Tensor | None = None,
    check: bool = False,
    parts: Parts | None = None,
    **unknown: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Execute a plan: attention of one query token per row over the row's cached tokens.

    q [n_rows, n_q_heads, head_dim] in the cache's dtype. scale: the factor of the scores, None = 1 / sqrt(head_dim).
    window: the query sees only the last `window` tokens of its row; pages before them are not read, and their table
    entries may hold anything. soft_cap: scores become soft_cap * tanh(score / soft_cap). The plan must be of the same
    window, and of a soft_cap if there is one. out: a tensor to write the result to, of q's shape and dtype, with any
    strides. check: also check values that lie on a GPU (lengths, block table), which waits for the GPU; values on the
    CPU are always checked. parts: your functions, which replace pkv's own. If they include a `plan`, pkv.plan(...,
    parts=parts) must have made this plan.
    Returns out [n_rows, n_q_heads, head_dim] and lse [n_rows, n_q_heads] (fp32, natural log). A row without tokens
    gives out 0 and lse -inf. Neither carries a gradient, even if an input requires one. If the cache owns its pages,
    another thread that wants to change its rows waits until this call returns.
    Raises ValueError / TypeError, naming the argument and the row, before any launch.
    """
    for name in unknown:
        raise unknown_argument(
            f"pkv.run has no argument {name!r}; it has {', '.join(RUN_ARGUMENTS)}", name, RUN_ARGUMENTS
        )
    check_arrays(q, cache, out)
    features, values = features_and_values(window, soft_cap)
    with cache.unchanged():
        check_plan(q, cache, plan, check, features)
        if not SOUND.known(plan):
            check_items(plan)
        parts = checked_parts(parts, plan.stage, TAKES, features)
        if parts is not None and parts.plan is not None:
            check_made_by(parts.plan, plan)
        return _run(q, cache, plan, scale, values, out, check, parts)


def _run(
    q: torch.Tensor, cache: PagedKVCache, plan: Plan, scale: float | None, values: Values, out: torch.Tensor | None,
    check: bool, parts: Parts | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Do the work of run(), with arguments that have been checked against each other."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, cache.k_pages, cache.v_pages)):
        _say_once(NO_GRADIENT)
    cache.check_window(plan.shape.features.window)
    if check or q.device.type == "cpu":
        cache.validate(plan.shape.features.window)
    launch = find_stage("adaptive" if plan.fallback else plan.stage).launch
    if parts is not None:
        launch = parts.passed_to(launch)
    scale = resolve_scale(scale, q.shape[-1])
    if plan.family is not Family.TORCH:
        require_launchable(q.device)
    if q.is_neg() or (out is not None and may_overlap(q, out)):
        q = q.clone()  # into plain memory that `out` does not share: no program reads what another has overwritten
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    lse = torch.empty(q.shape[:2], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32, device=q.device)
    if not plan.has_tokens:  # nothing to read: no launch
        return out.zero_(), lse.fill_(-torch.inf)
    if INTERPRETED:
        launch_interpreted(launch, q, cache, plan, scale, out, lse, values)
    elif q.device.type == "cuda" and q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            launch(q, cache, plan, scale, out, lse, values=values)
    else:
        launch(q, cache, plan, scale, out, lse, values=values)
    return out, lse


def _say_once(text: str) -> None:
    """Warn the caller of run() or decode(), once per process."""
    if text not in _said:
        _said.add(text)
        warnings.warn(text, stacklevel=4)


def check_items(plan: Plan) -> None:
    """Raise ValueError unless a plan from elsewhere (JSON, dataclasses.replace) is valid and fits its kernel.

    It fits if its items are the ones that the kernel will find.
    """
    plan.validate()
    fault: str | None
    if plan.fallback is not None and (plan.family is not Family.FLASHINFER or plan.fallback not in OWN):
        fault = f"fallback = {plan.fallback!r} must be None, or a stage of ours for a plan of flashinfer"
    elif plan.dynamic and (plan.fallback or "dynamic" not in options_of(plan.stage)):
        fault = "it is dynamic, but its kernel reads the planned lengths, not those of the cache"
    else:
        fault = find_stage(plan.stage).fault_of_items(plan)
    if fault:
        raise ValueError(f"plan of stage {plan.stage!r}: {fault}; make it with pkv.plan")
    SOUND.of(plan)["checked by"] = "pkv.run"


def decode(
    q: torch.Tensor,
    cache: PagedKVCache,
    *,
    stage: str | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    check: bool = False,
    parts: Parts | None = None,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query token per row over a paged KV cache: plan and run in one call.

    q [n_rows, n_q_heads, head_dim]; see run() for scale, window, soft_cap, out and check, plan() for options. stage
    None: the best stage for the device, stream_k on a GPU and row_local in Triton's interpreter. stream_k needs nothing
    from the host, so it does not synchronise, and it is safe to capture in a CUDA graph (call once before capture, so
    that kernels are compiled). Stages planned on the host use cache.host_lengths, or copy the lengths from the GPU once
    per call. parts: your tile loop, merge or schedule, which replaces pkv's own (see pkv.Parts); stage None is then the
    best stage that takes them. Returns out [n_rows, n_q_heads, head_dim], or (out, lse [n_rows, n_q_heads]) with
    return_lse; neither carries a gradient, even if an input requires one. For many layers, prepare() is faster.

    torch.compile breaks its graph here and calls this function eagerly. Several threads may call it at once, also while
    others change the cache. Tools that record or transform torch's calls (jit.trace, make_fx, export, vmap, grad) are
    refused by name.
    """
    if is_traced():
        refuse_tracers("decoding")
    features, values = features_and_values(window, soft_cap)
    kind = step = None
    if not check and not options and parts is None:
        kind = kind_of_call(q, cache, stage, scale, features, values)
        step = STEPS.get(kind)
    if step is not None and (again := step.repeat(q, cache, out)) is not None:
        return again if return_lse else again[0]
    check_arrays(q, cache, out)
    with cache.unchanged():
        made, parts = _plan_for(q, cache, stage, features, check, parts, options)
        result, lse = _run(q, cache, made, scale, values, out, check, parts)
        if kind is not None and made.dynamic:
            if step is None:
                step = _step(q, cache, made.stage, scale, features, values, {})
                keep(kind, step)
            step.remember(q, cache, out, result, lse)
    return (result, lse) if return_lse else result


def prepare(
    q: torch.Tensor,
    cache: PagedKVCache,
    *,
    stage: str | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    **options: Any,
) -> Step:
    """Make a decode step ready, so that each layer's call only launches: see Step.

    q [n_rows, n_q_heads, head_dim] and cache are those of any layer; only their sizes, strides, types, device and
    alignment count, and nothing of them is kept. The other arguments are those of decode(). The step is started for the
    cache's present lengths.

    >>> import torch, pkv
    >>> k = v = torch.zeros(2, 10, 2, 64)
    >>> layers = [pkv.PagedKVCache.from_dense(k, v, lengths=[3, 10], page_size=4) for _ in range(2)]
    >>> q = torch.zeros(2, 8, 64)
    >>> step = pkv.prepare(q, layers[0])
    >>> [step(q, cache).shape for cache in layers]
    [torch.Size([2, 8, 64]), torch.Size([2, 8, 64])]
    """
    if is_traced():
        refuse_tracers("decoding")
    check_arrays(q, cache, None)
    features, values = features_and_values(window, soft_cap)
    return _step(q, cache, stage, scale, features, values, options)


def _step(
    q: torch.Tensor, cache: PagedKVCache, stage: str | None, scale: float | None, features: Features, values: Values,
    options: dict[str, Any],
) -> Step:  # fmt: skip
    """Make the Step of a call whose arrays have been checked."""
    shape = Shape.of(q, cache, features)

    def plan_for(cache: PagedKVCache) -> Plan:
        return _plan_of(shape, cache, stage, None, options)

    def run(
        q: torch.Tensor, cache: PagedKVCache, made: Plan, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with cache.unchanged():
            check_plan(q, cache, made, False, features)
            return _run(q, cache, made, scale, values, out, False, None)

    return Step(q, cache, plan_for, run, resolve_scale(scale, shape.head_dim), values)


def _plan_for(
    q: torch.Tensor, cache: PagedKVCache, stage: str | None, features: Features, check: bool, parts: Parts | None,
    options: dict[str, Any],
) -> tuple[Plan, Parts | None]:  # fmt: skip
    """Make the plan for a decode() whose arguments have been checked, and return it with the parts its stage takes."""
    if parts is not None:
        stage = first_stage_taking(parts, DEFAULTS, TAKES) if stage is None else stage
        parts = checked_parts(parts, stage, TAKES, features)
    made = _plan_of(Shape.of(q, cache, features), cache, stage, parts, options)
    if not made.dynamic:
        check_plan(q, cache, made, check, features)
    return made, parts


def _plan_of(
    shape: Shape, cache: PagedKVCache, stage: str | None, parts: Parts | None, options: dict[str, Any]
) -> Plan:
    """Make the plan of a step: for the cache's present lengths, or for any if the GPU finds its work itself."""
    name = DEFAULTS[0] if stage is None else stage
    options = {"gpu": gpu_of(cache.device), **(checked_options(name, options) if options else {})}
    if options.pop("dynamic", find_stage(name).PLANNED_ON == "gpu" and cache.device.type == "cuda"):
        return _capacity_plan(cache.n_rows, rounded_up(cache.capacity), shape, name, **options)
    lengths = cache.host_lengths
    if is_capturing(cache.device):
        raise RuntimeError(
            f"stage {name!r} is planned on the host, and a captured CUDA graph would replay this step's plan for ever: "
            "capture a stage that is planned on the GPU, such as stream_k, or pkv.run with a plan of pkv.plan that ran "
            "once before"
        )
    return plan(cache.lengths if lengths is None else lengths, shape, stage=name, parts=parts, **options)


def rounded_up(capacity: int) -> int:
    """Round a capacity above 1,024 tokens up to one of the 16 sizes between a power of two and the next.

    A server's table may grow at each step; rounded capacities let it share a few plans.

    >>> rounded_up(1000), rounded_up(65_536), rounded_up(65_552)
    (1000, 65536, 69632)
    """
    step = max(1, 2 ** (capacity.bit_length() - 5)) if capacity > 1024 else 1
    return -(-capacity // step) * step


@functools.lru_cache(maxsize=256)
def _capacity_plan(n_rows: int, capacity: int, shape: Shape, stage: str, **options: Any) -> Plan:
    """Make a plan for rows of any length up to the table's capacity (in tokens); the kernels read the true lengths."""
    return plan([min(capacity, LONGEST_ROW)] * n_rows, shape, stage=stage, dynamic=True, **options)

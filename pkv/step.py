"""Step: one decode step made ready, so that each layer's call only launches.

Most of what a call of decode() works out on the host depends on the kind of its tensors alone: their sizes, strides,
types, device and alignment. That takes longer than many steps take on the GPU. A Step works it out once. Then it
decodes any layer whose tensors are of that kind:

    step = pkv.prepare(q, cache)
    for each step of the model:
        step.start(cache)              # a new plan, if the stage is planned on the host
        for each layer:
            out = step(q, cache)       # that layer's query and cache

Steps hold no tensor of the caller's. decode() keeps Steps too, one for each kind that it has met.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from pkv._triton import INTERPRETED
from pkv.arguments import check_arrays
from pkv.cache.paged import PagedKVCache
from pkv.cards.known import gpu_of
from pkv.kernels.launching import (
    KernelArgs,
    TensorKind,
    address_range,
    fp32_on,
    kernel_cache,
    kind_of,
    overlap,
)
from pkv.kernels.uploads import uploaded
from pkv.plans.features import Features, Values
from pkv.plans.plan import Plan
from pkv.runtime.tracers import is_traced, refuse_tracers
from pkv.stages import LAUNCHED

Result = tuple[torch.Tensor, torch.Tensor]  # out, lse
WORDS_OF_KIND = ("shape", "strides", "dtype", "device", "address modulo 16")
MOST_OUTS = 16  # kinds of `out` that a Step remembers
STEPS: dict[Hashable, "Step"] = {}  # decode()'s own, by kind of call
MOST_STEPS = 256
GPU = "cuda"  # calls are repeated on devices of this type only


class Ready(NamedTuple):
    """What a Step has since its last start. state: of the cache, if the plan is of its lengths only.

    launch: launches the plan's kernels; None if they are not pkv's, or interpreted. args: the arguments of its kernels
    without tensors, by kind of `out` (None: new memory), each with the bytes that q and out span.
    """

    plan: Plan
    state: tuple[int, int] | None
    launch: Callable[[KernelArgs], None] | None
    args: dict[TensorKind | None, tuple[KernelArgs, int, int]]


class Step:
    """One decode step, made ready by pkv.prepare for tensors of one kind. One thread at a time may start it.

    `plan` is the plan that it runs.
    """

    def __init__(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        plan_for: Callable[[PagedKVCache], Plan],
        run: Callable[[torch.Tensor, PagedKVCache, Plan, torch.Tensor | None], Result],
        scale: float,
        values: Values,
    ) -> None:
        """q, cache: those of any layer; the step is started for the lengths of `cache`.

        plan_for: makes a plan for a cache as it is. run: runs one, with all checks. scale, values: as for launch.
        """
        self._of_q, self._of_cache = kind_of_plain(q), kernel_cache(cache).kind
        self._plan_for, self._run, self._scale, self._values = plan_for, run, scale, values
        self._ready = self._made_ready(cache)

    @property
    def plan(self) -> Plan:
        """The plan that the step runs."""
        return self._ready.plan

    def start(self, cache: PagedKVCache) -> None:
        """Begin a step: if the stage is planned on the host, plan for the lengths that `cache` has now.

        The plan holds for every cache of the step's layers. A plan that the GPU makes itself holds for all steps; then
        this does nothing. ValueError if the cache is of another kind than the step was prepared for.
        """
        if self._ready.state is not None:
            self._check_kind(None, cache)
            self._ready = self._made_ready(cache)

    def _made_ready(self, cache: PagedKVCache) -> Ready:
        with cache.unchanged():
            plan = self._plan_for(cache)
            state = None if plan.dynamic else state_of(cache)
        stage = None if INTERPRETED or not plan.has_tokens else LAUNCHED.get(plan.stage)
        launch = None if stage is None or cache.device.type != GPU else stage.launcher(plan, cache.capacity)
        if launch is not None and state is not None:
            uploaded(plan, cache.device)  # now, not in the first layer
        return Ready(plan, state, launch, {})

    def __call__(
        self, q: torch.Tensor, cache: PagedKVCache, out: torch.Tensor | None = None, return_lse: bool = False
    ) -> torch.Tensor | Result:
        """Decode one layer: q [n_rows, n_q_heads, head_dim] over the rows of `cache`.

        out: a tensor to write the result to, of q's shape and dtype, with any strides. Returns out, or with return_lse
        (out, lse [n_rows, n_q_heads]). ValueError names what differs from the tensors that the step was prepared for,
        or the row whose length has changed since start().
        """
        if is_traced():
            refuse_tracers("decoding")
        found = None
        if type(cache) is PagedKVCache:
            found = self.repeat(q, cache, out)
        if found is None:
            found = self._run_checked(q, cache, out)
        return found if return_lse else found[0]

    def repeat(self, q: torch.Tensor, cache: PagedKVCache, out: torch.Tensor | None) -> Result | None:
        """Launch what was launched before and return (out, lse); None, with nothing launched, if checks are needed.

        Besides the kinds of the tensors, four things may differ between calls, so every call looks at them: the current
        GPU, whether a gradient is wanted, whether `out` overlaps other memory, and whether the lengths are those of the
        plan.
        """
        ready = self._ready
        if ready.launch is None or wants_gradient(q, cache):
            return None
        try:
            known, of_out = kernel_cache(cache), None if out is None else kind_of(out)
            if kind_of(q) != self._of_q or known.kind is not self._of_cache or (of_out is None and out is not None):
                return None
        except RuntimeError:  # a tensor that has outlived a torch.func.grad, for example, has no address
            return None
        found = ready.args.get(of_out)
        if found is None or q.device.index != torch.cuda.current_device():
            return None
        if ready.state is not None and state_of(cache) != ready.state:
            return None
        args, q_bytes, out_bytes = found
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        else:
            begin, of_query = out.data_ptr(), q.data_ptr()
            mine = begin, begin + out_bytes
            if overlap(mine, (of_query, of_query + q_bytes)) or any([overlap(mine, theirs) for theirs in known.memory]):
                return None
        lse = fp32_on(q.device).new_empty(q.shape[:2])
        with cache.unchanged():
            cache.check_window(ready.plan.shape.features.window)
            ready.launch(args.with_tensors(q, known, out, lse))
        return out, lse

    def remember(
        self, q: torch.Tensor, cache: PagedKVCache, out: torch.Tensor | None, result: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Keep the kernel arguments of a successful call with this `out`, whose results these are."""
        ready = self._ready
        if ready.launch is None:
            return
        of_out = None if out is None else kind_of(out)
        if (out is not None and of_out is None) or of_out in ready.args:
            return
        if len(ready.args) >= MOST_OUTS:
            ready.args.clear()
        args = KernelArgs(q, cache, ready.plan, self._scale, result, lse, values=self._values).without_tensors()
        ready.args[of_out] = args, n_bytes_spanned(q), n_bytes_spanned(result)

    def _run_checked(self, q: torch.Tensor, cache: PagedKVCache, out: torch.Tensor | None) -> Result:
        check_arrays(q, cache, out)
        self._check_kind(q, cache)
        result, lse = self._run(q, cache, self._ready.plan, out)
        self.remember(q, cache, out, result, lse)
        return result, lse

    def _check_kind(self, q: torch.Tensor | None, cache: PagedKVCache) -> None:
        """Raise ValueError naming the first tensor that is of another kind than the step was prepared for."""
        if not isinstance(cache, PagedKVCache):
            raise TypeError(f"cache must be a pkv.PagedKVCache, got {type(cache).__name__}")
        of_cache = kernel_cache(cache).kind
        found, wanted = dict(of_cache.tensors), dict(self._of_cache.tensors)
        if q is not None:
            found["q"], wanted["q"] = kind_of_plain(q), self._of_q
        for name, kind in wanted.items():
            for word, mine, theirs in zip(WORDS_OF_KIND, kind, found[name], strict=True):
                if mine != theirs:
                    raise ValueError(
                        f"{name} has {word} {shown(theirs)}, and this step was prepared for {shown(mine)}: "
                        "prepare another by pkv.prepare"
                    )
        if of_cache is not self._of_cache:
            raise ValueError("the cache has another layout than this step was prepared for: prepare another")


def kind_of_plain(x: torch.Tensor) -> TensorKind:
    """Return the kind of a tensor, or of the plain copy that is launched in the place of another sort of tensor."""
    found = kind_of(x) or kind_of(x.clone())
    assert found is not None
    return found


def shown(value: Any) -> str:
    """Write one entry of a TensorKind for people."""
    return str(list(value)) if isinstance(value, tuple) else str(value)


def state_of(cache: PagedKVCache) -> tuple[int, int]:
    """Return what changes whenever the host can know that the cache's lengths have changed."""
    return cache.version, 0 if cache.lengths.is_inference() else cache.lengths._version


def wants_gradient(q: torch.Tensor, cache: PagedKVCache) -> bool:
    """True if the caller is to be warned that no gradient flows."""
    return torch.is_grad_enabled() and (q.requires_grad or cache.k_pages.requires_grad or cache.v_pages.requires_grad)


def n_bytes_spanned(x: torch.Tensor) -> int:
    """Return the bytes that a tensor spans, from its first to its last."""
    begin, end = address_range(x)
    return end - begin


def kind_of_call(
    q: torch.Tensor, cache: PagedKVCache, stage: str | None, scale: float | None, features: Features, values: Values
) -> Hashable | None:
    """Return what decode() keeps a Step by; None if the call must go through the checks."""
    if (
        type(cache) is not PagedKVCache
        or type(scale) not in (float, type(None))
        or type(stage) not in (str, type(None))
    ):
        return None
    try:
        of_q = kind_of(q)
        if of_q is None or q.device.type != GPU:
            return None
        return stage, scale, features, values, gpu_of(q.device), of_q, kernel_cache(cache).kind
    except RuntimeError:  # see Step.repeat
        return None


def keep(kind: Hashable, step: Step) -> None:
    """Keep a Step of decode()'s; the oldest go when there are too many."""
    while len(STEPS) >= MOST_STEPS:
        STEPS.pop(next(iter(STEPS)), None)
    STEPS[kind] = step

"""Stage 4, adaptive: no schedule is best for every step, so this stage chooses one per step, and says why.

policy="paper" is exactly the published rule, for a step of B rows with tokens and G query heads per KV head:

    G != 4               flashinfer            longest row < 16,384     flashinfer
    B <= 1               length_buckets        B >= 8                   workqueue            otherwise  flashinfer

policy="cost" plans the step with every stage, FlashInfer included, predicts each plan's time (cards/costs.py), and
takes the plan with the least. Predictions within 1% of the least cannot be told apart, so among those plans the first
of PREFERRED is taken. The times include neither planning on the host nor this choice, which takes some ms of Python at
8 rows: it pays if a plan serves many layers. Both policies are pure functions of lengths, shape and GPU: the same step
gets the same plan everywhere.

The resulting plan is the winner's own. Whether FlashInfer is installed and takes this cache shows only when the plan
runs. If it does not, stage `fallback` runs in its place, with one warning that says why.
"""

import dataclasses
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pkv.arguments import check_kernel_shape
from pkv.cache.paged import PagedKVCache
from pkv.cards.costs import Prediction, predict
from pkv.cards.known import resolve_gpu
from pkv.plans.facts import Facts
from pkv.plans.features import NO_VALUES, Values, features_and_values
from pkv.plans.fields import Int32Array, int_lengths
from pkv.plans.gpu import GpuProfile
from pkv.plans.plan import Plan
from pkv.plans.shape import Shape, with_features
from pkv.plans.spans import spans_of
from pkv.runtime.memory import Memory
from pkv.stages import s1_length_buckets, s1_split_kv, s2_row_local, s3_workqueue, s5_stream_k, x_flashinfer
from pkv.stages.x_flashinfer import BackendError
from pkv.stages.x_flashinfer_rules import fault_of_lengths, why_not
from pkv.wording.checks import Ints

PLANNED_ON = "host"
FACTS = Facts()
PARTS: tuple[str, ...] = ()
POLICIES = ("paper", "cost")
PAPER_GROUP, PAPER_LONGEST, PAPER_FEW_ROWS, PAPER_MANY_ROWS = 4, 16384, 1, 8
PAPER_SPLITS = {"length_buckets": 32, "workqueue": 24}  # the queue's: 20, 24 or 28, by trace; a policy cannot know it

OWN = {
    "split_kv": s1_split_kv,
    "length_buckets": s1_length_buckets,
    "row_local": s2_row_local,
    "workqueue": s3_workqueue,
    "stream_k": s5_stream_k,
}
CANDIDATES: dict[str, Any] = {**OWN, "flashinfer": x_flashinfer}
# Among stages with like predictions the queue was measured the fastest. stream_k must find its runs and takes up to
# 2.3 us (6%) more for one row on 28 SMs; buckets and split_kv take more for many rows. Time to plan does not count.
PREFERRED = ("workqueue", "stream_k", "row_local", "length_buckets", "split_kv", "flashinfer")
ALIKE = 1.01  # a difference below the median error of predictions there


@dataclass(frozen=True)
class Candidate:
    """One stage's plan of the step. prediction: None without the GPU's costs; why_not: why the stage cannot run."""

    stage: str
    plan: Plan | None
    prediction: Prediction | None
    why_not: str | None = None


@dataclass(frozen=True)
class Explanation:
    """The choice of a policy, and its candidates. rule: the reason in words; fallback: the best of pkv's own stages."""

    policy: str
    gpu: GpuProfile
    chosen: str
    rule: str
    fallback: str
    candidates: tuple[Candidate, ...]

    @property
    def plan(self) -> Plan:
        """The chosen stage's plan, with this explanation as text."""
        found = next(candidate.plan for candidate in self.candidates if candidate.stage == self.chosen)
        assert found is not None
        fallback = self.fallback if self.chosen == "flashinfer" else None
        return dataclasses.replace(found, explanation=str(self), fallback=fallback)

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as a dict of JSON's types; times in ms."""
        return {
            "policy": self.policy,
            "gpu": self.gpu.name,
            "chosen": self.chosen,
            "rule": self.rule,
            "fallback": self.fallback,
            "candidates": [
                {
                    "stage": candidate.stage,
                    "why_not": candidate.why_not,
                    "kernels_ms": None if candidate.prediction is None else candidate.prediction.kernels_ms,
                    "gpu_ms": None if candidate.prediction is None else candidate.prediction.gpu_ms,
                    "terms_ms": None if candidate.prediction is None else candidate.prediction.terms,
                }
                for candidate in self.candidates
            ],
        }

    def __str__(self) -> str:
        """Return a line for the choice, and one for each candidate, the cheapest first."""
        lines = [f"Policy {self.policy!r} on {self.gpu.name}: {self.chosen}, because {self.rule}"]
        known = [(candidate.stage, candidate.prediction) for candidate in self.candidates if candidate.prediction]
        for stage, prediction in sorted(known, key=lambda pair: pair[1].kernels_ms):
            terms = " + ".join(
                f"{name} {ms * 1000:.1f}" for name, ms in prediction.terms.items() if ms and name != "plan"
            )
            planning = f" (its own planning: {prediction.plan * 1000:.0f})" if prediction.plan else ""
            lines.append(f"  {stage:<15}{prediction.kernels_ms * 1000:9.1f} us = {terms or 'nothing to do'}{planning}")
        lines += [
            f"  {candidate.stage:<15} cannot: {candidate.why_not}" for candidate in self.candidates if candidate.why_not
        ]
        if self.gpu.costs is None:
            lines.append(f"  no predictions: {self.gpu.name} has no costs")
        if self.chosen == "flashinfer":
            lines.append(
                f"  Where FlashInfer does not work, {self.fallback} runs in its place, by its own default cut."
            )
        return "\n".join(lines)


def plan(
    lengths: Int32Array, shape: Shape, *, policy: str | None = None, gpu: "str | GpuProfile | None" = None
) -> Plan:
    """Plan with the stage that wins, named in `stage`. policy: "paper" (default) or "cost", which needs GPU costs."""
    policy, profile = choose_policy(policy), resolve_gpu(gpu)
    return (by_paper if policy == "paper" else by_cost)(lengths, shape, profile, compare=False).plan


def explain(
    lengths: Ints, shape: Shape, *, window: int | None = None, soft_cap: float | None = None,
    policy: str | None = None, gpu: "str | GpuProfile | None" = None,
) -> Explanation:  # fmt: skip
    """Explain which stage adaptive takes for these lengths, and why: the rule, and every candidate's predicted times.

    lengths, shape, window, soft_cap: as for pkv.plan; policy: "paper" (default) or "cost"; gpu: a profile or its name.
    ValueError for an unknown policy, and for policy="cost" on a GPU without costs.
    """
    policy, profile = choose_policy(policy), resolve_gpu(gpu)
    if not isinstance(shape, Shape):
        raise TypeError(f"shape must be a pkv.Shape, got {type(shape).__name__}; pkv.Shape.of(q, cache) makes one")
    check_kernel_shape(shape)
    shape = with_features(shape, features_and_values(window, soft_cap)[0])
    return (by_paper if policy == "paper" else by_cost)(int_lengths(lengths), shape, profile, compare=True)


def by_paper(lengths: Int32Array, shape: Shape, gpu: GpuProfile, compare: bool) -> Explanation:
    """Choose by policy "paper". compare: also plan the stages that it did not choose."""
    n_rows = int((lengths > 0).sum())
    longest = int(np.diff(spans_of(lengths, shape.features)).max(initial=0))
    what = "the longest row" if shape.features.window is None else "the most that a query sees"
    chosen, rule = paper_route(n_rows, longest, shape.group, what)
    fallback = "length_buckets" if n_rows <= PAPER_FEW_ROWS else "workqueue"
    reason = cannot(lengths, shape) if chosen == "flashinfer" else None
    if reason is not None:
        chosen, rule = fallback, f"{rule}, and FlashInfer cannot do this: {reason}"
    names = CANDIDATES if compare else [chosen]
    candidates = tuple(candidate_of(name, lengths, shape, gpu, PAPER_SPLITS.get(name), compare) for name in names)
    return Explanation("paper", gpu, chosen, rule, fallback, candidates)


def by_cost(lengths: Int32Array, shape: Shape, gpu: GpuProfile, compare: bool) -> Explanation:
    """Choose by policy "cost", which plans every stage, whatever `compare` says."""
    gpu.needed_costs()
    candidates = tuple(candidate_of(name, lengths, shape, gpu, None, True) for name in CANDIDATES)
    times = {entry.stage: entry.prediction.kernels_ms for entry in candidates if entry.prediction is not None}
    chosen, fallback = cheapest(times), cheapest({stage: times[stage] for stage in OWN})
    is_least = times[chosen] == min(times.values())
    rule = "its predicted time is the least" if is_least else "its predicted time is within 1% of the least"
    return Explanation("cost", gpu, chosen, rule, fallback, candidates)


def cheapest(times: dict[str, float]) -> str:
    """Return the stage with the least time; among stages that are ALIKE, the first of PREFERRED.

    >>> cheapest({"split_kv": 65.0, "workqueue": 65.3, "flashinfer": 90.2})
    'workqueue'
    """
    least = min(times.values())
    return next(stage for stage in PREFERRED if stage in times and times[stage] <= ALIKE * least)


def choose_policy(policy: str | None) -> str:
    """Resolve the option `policy=`: None means "paper"; ValueError lists the known policies."""
    if policy is None:
        return POLICIES[0]
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ValueError(f"policy = {policy!r} does not exist; choose one of {', '.join(POLICIES)}")
    return policy


def paper_route(n_rows: int, longest: int, group: int, what: str = "the longest row") -> tuple[str, str]:
    """The published gates: the stage for n_rows rows with tokens, and the gate that decides, in words.

    what: what has `longest` tokens.

    >>> paper_route(8, 16384, 4)
    ('workqueue', '8 rows are at least 8')
    """
    if group != PAPER_GROUP:
        return "flashinfer", f"query heads per KV head are {group}, not {PAPER_GROUP}"
    if longest < PAPER_LONGEST:
        return "flashinfer", f"{what}, {longest:,} tokens, is below {PAPER_LONGEST:,}"
    if n_rows <= PAPER_FEW_ROWS:
        return "length_buckets", f"{n_rows} row is at most {PAPER_FEW_ROWS}"
    if n_rows >= PAPER_MANY_ROWS:
        return "workqueue", f"{n_rows} rows are at least {PAPER_MANY_ROWS}"
    return "flashinfer", f"{n_rows} rows lie between {PAPER_FEW_ROWS} and {PAPER_MANY_ROWS}"


def cannot(lengths: Int32Array, shape: Shape) -> str | None:
    """Say why FlashInfer cannot decode these rows; None if it can."""
    return why_not(shape) or fault_of_lengths(lengths, shape)


def candidate_of(
    name: str, lengths: Int32Array, shape: Shape, gpu: GpuProfile, splits: int | None, timed: bool
) -> Candidate:
    """Plan the step with one stage; timed: with its predicted time, if the GPU's costs are known."""
    reason = cannot(lengths, shape) if name == "flashinfer" else None
    if reason is not None:
        return Candidate(name, None, None, reason)
    made = CANDIDATES[name].plan(lengths, shape, gpu=gpu, **({} if splits is None else {"splits": splits}))
    return Candidate(name, made, predict(made, gpu) if timed and gpu.costs is not None else None)


def fault_of_items(plan: Plan) -> str:
    """Say what is wrong with a plan whose stage is adaptive itself."""
    return "a plan carries the stage that was chosen, never adaptive itself"


IN_ITS_PLACE = Memory()  # for each plan whose winner does not work here: {"plan": the fallback's}
_failed: dict[Any, str] = {}  # what did not work here, and why; it is not tried again
_warned: set[str] = set()


def launch(
    q: torch.Tensor, cache: PagedKVCache, plan: Plan, scale: float, out: torch.Tensor, lse: torch.Tensor,
    values: Values = NO_VALUES,
) -> None:  # fmt: skip
    """Run a plan whose winner is FlashInfer; if FlashInfer does not work here, run the fallback in its place."""
    key = (plan.shape, plan.variant, q.device, cache.k_pages.stride(), cache.v_pages.stride())  # it may refuse these
    if key not in _failed:
        try:
            return x_flashinfer.launch(q, cache, plan, scale, out, lse, values)
        except BackendError as error:
            reason = str(error)
            if not isinstance(error.__cause__, torch.OutOfMemoryError):  # a lack of memory may pass
                _failed[key] = reason
    else:
        reason = _failed[key]
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"stage 'adaptive' takes {plan.fallback} in place of flashinfer: {reason}", stacklevel=4)
    assert plan.fallback is not None
    made = IN_ITS_PLACE.of(plan)
    if not made:
        made["plan"] = OWN[plan.fallback].plan(np.array(plan.lengths), plan.shape, gpu=plan.gpu)
    OWN[plan.fallback].launch(q, cache, made["plan"], scale, out, lse, values=values)

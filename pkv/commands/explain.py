"""`pkv explain`: which stage adaptive takes for some row lengths, and why; of a trace, what each choice costs.

Regret is that of pkv.bench.records.regret: a route's simulated time over the best route's of the same step, less 1,
planning on the host left out.
"""

import argparse
from collections import Counter
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pkv.bench.records.regret import routes_of
from pkv.cards.known import resolve_gpu
from pkv.commands import CommandError, arguments
from pkv.commands.means import StepProgress, shape_from
from pkv.commands.output import print_json, say, table
from pkv.commands.steps import Steps, add_steps, steps_from
from pkv.plans.shape import Shape
from pkv.stages.s4_adaptive import CANDIDATES, POLICIES, Explanation, explain
from pkv.wording.counts import count_of, verb

HELP = "say which stage adaptive takes for some row lengths, and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_steps(parser)
    arguments.add_policy(parser, f"{POLICIES[0]}; of a trace: all")
    arguments.add_gpu(parser, None)
    arguments.add_shape(parser)
    arguments.add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Print why, or how well the policies choose on a trace."""
    steps = steps_from(args)
    shape = shape_from(args)
    if not steps.trace:
        (lengths,) = steps.lengths
        found = explained(lengths, shape, args.policy, args.gpu)
        if args.json:
            print_json({"lengths": lengths} | found.to_dict())
        else:
            say(str(found))
        return 0
    profile = resolve_gpu(args.gpu)
    policies = [args.policy] if args.policy else list(POLICIES if profile.costs else POLICIES[:1])
    judged = judge_all(steps, shape, policies, args.gpu)
    facts: dict[str, Any] = steps.trace | {"gpu": profile.name, "steps_with_tokens": len(judged)}
    if args.json:
        chosen = {policy: dict(Counter(step.chosen[policy] for step in judged)) for policy in policies}
        by_stage = {name: numbers_of(f"always {name}", judged) for name in CANDIDATES}
        by_policy = {name: {"chosen": chosen[name]} | numbers_of(f"policy {name}", judged) for name in policies}
        print_json(facts | {"stages": by_stage, "policies": by_policy})
    else:
        say(as_text(steps, profile.name, policies, judged))
    return 0


@dataclass(frozen=True)
class Judged:
    """One step. chosen: by each policy; predicted_ms, simulated_ms: of each route, where the GPU's costs are known."""

    chosen: dict[str, str]
    predicted_ms: dict[str, float]
    simulated_ms: dict[str, float]

    def regret(self, route: str) -> float:
        """See the module's text."""
        return self.simulated_ms[route] / min(self.simulated_ms.values()) - 1


def explained(lengths: list[int], shape: Shape, policy: str | None, gpu: str | None) -> Explanation:
    """pkv.explain, with its complaints as the command's."""
    try:
        return explain(lengths, shape, policy=policy, gpu=gpu)
    except (ValueError, TypeError) as error:
        raise CommandError(str(error)) from None


def judge(lengths: list[int], shape: Shape, policies: list[str], gpu: str | None) -> Judged:
    """What each policy takes, and what each route would have taken."""
    profile = resolve_gpu(gpu)
    if profile.costs is None:
        return Judged({policy: explained(lengths, shape, policy, gpu).chosen for policy in policies}, {}, {})
    try:
        routes = routes_of(lengths, shape, profile)
    except (ValueError, TypeError) as error:
        raise CommandError(str(error)) from None
    chosen = {policy: routes[f"policy {policy}"].plan.stage for policy in policies}
    predicted = {route: found.predicted_ms for route, found in routes.items()}
    return Judged(chosen, predicted, {route: found.simulated_ms for route, found in routes.items()})


def judge_all(steps: Steps, shape: Shape, policies: list[str], gpu: str | None) -> list[Judged]:
    """The steps that have tokens: in the others nothing is chosen."""
    progress = StepProgress(len(steps.lengths))
    judged = []
    try:
        for lengths in steps.lengths:
            progress.step()
            if any(lengths):
                judged.append(judge(lengths, shape, policies, gpu))
    finally:
        progress.end()
    return judged


def numbers_of(route: str, judged: list[Judged]) -> dict[str, float]:
    """Of one route: its mean times, its mean and worst regret; NaN where they are not known."""
    known = [step for step in judged if route in step.simulated_ms]
    if not known:
        return dict.fromkeys(("predicted_ms", "simulated_ms", "mean_regret", "worst_regret"), float("nan"))
    regrets = [step.regret(route) for step in known]
    return {
        "predicted_ms": fmean(step.predicted_ms[route] for step in known),
        "simulated_ms": fmean(step.simulated_ms[route] for step in known),
        "mean_regret": fmean(regrets),
        "worst_regret": max(regrets),
    }


def as_text(steps: Steps, gpu: str, policies: list[str], judged: list[Judged]) -> str:
    """A line for each route, and what the policies chose."""
    rows = []
    for route in [*(f"always {name}" for name in CANDIDATES), *(f"policy {name}" for name in policies)]:
        numbers = numbers_of(route, judged)
        times = [f"{numbers[name]:.3f}" for name in ("predicted_ms", "simulated_ms")]
        regrets = [f"{numbers[name]:.1%}" for name in ("mean_regret", "worst_regret")]
        rows.append([route, *("-" if "nan" in cell else cell for cell in times + regrets)])
    n_steps = len(steps.lengths)
    lines = [
        f"{steps}",
        f"{len(judged)} of {count_of(n_steps, 'step')} {verb(len(judged) or n_steps, 'have')} tokens; "
        f"means over those, on {gpu}",
        "",
        table(["route", "predicted ms", "simulated ms", "mean regret", "worst regret"], rows),
        "",
    ]
    for policy in policies:
        counts = Counter(step.chosen[policy] for step in judged).most_common()
        lines.append(
            f"policy {policy} takes {', '.join(f'{name} {times_in_words(n)}' for name, n in counts) or 'nothing'}"
        )
    if any(step.simulated_ms for step in judged):
        lines.append("times: of the kernels; FlashInfer's planning on the host is left out")
        lines.append("regret: the route's time over the best route's of the same step, less 1, by the simulator")
    else:
        lines.append(f"no times: the costs of {gpu} are not known, or no step has tokens")
    return "\n".join(lines)


def times_in_words(n: int) -> str:
    """How often.

    >>> times_in_words(1), times_in_words(2)
    ('once', '2 times')
    """
    return "once" if n == 1 else f"{n} times"

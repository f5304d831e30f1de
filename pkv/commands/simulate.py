"""`pkv simulate`: what a stage would cost on a GPU that need not be there. The clock is a model, no kernel runs."""

import argparse
from typing import Any

from pkv.cards.simulation import simulate
from pkv.commands import CommandError, arguments
from pkv.commands.means import GLOSSARY, PLANNING, TIME_GLOSSARY, as_lines, means_of, numbers_of, plan_of, planning_ms
from pkv.commands.output import print_json, say
from pkv.commands.steps import add_steps, steps_from
from pkv.plans.gpu import DEFAULT_GPU

HELP = "play a stage's plan on a GPU that need not be there, and say how long it takes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_steps(parser)
    arguments.add_stage(parser)
    arguments.add_policy(parser)
    arguments.add_gpu(parser, DEFAULT_GPU)
    arguments.add_shape(parser)
    arguments.add_json(parser)
    arguments.add_epilog(parser, GLOSSARY + TIME_GLOSSARY)


def execute(args: argparse.Namespace) -> int:
    """Print what one step costs, and when each launch runs; of a trace, the means of its steps."""
    steps = steps_from(args)
    made = plan_of(steps.lengths[0] if steps.lengths else [], args)
    try:
        timeline = simulate(made, args.gpu)  # also finds out whether it can
    except ValueError as error:
        reason, in_python, _ = str(error).partition(": pass gpu=")
        raise CommandError(f"{reason}: take --gpu {DEFAULT_GPU}" if in_python else reason) from None
    title = f"stage {args.stage} on {steps}\nsimulated on {args.gpu}"
    if steps.trace:
        means = means_of(steps, args)
        if args.json:
            print_json({"stage": args.stage} | steps.trace | {"gpu": args.gpu} | means)
        else:
            say(f"{title}\n\n{as_text(means, 'mean of a step')}")
        return 0
    numbers = numbers_of(made, timeline)
    if planning := planning_ms(timeline):
        numbers[PLANNING] = planning
    if args.json:
        head = {"stage": made.stage, "lengths": args.lengths, "items": made.n_items, "gpu": args.gpu}
        print_json(head | numbers | {"plan": made.to_dict()})
    else:
        say(f"{title}\n\n{as_text(numbers, 'one step')}\n\n{timeline}")
    return 0


def as_text(numbers: dict[str, Any], heading: str) -> str:
    """The table, and below it how much of gpu_ms FlashInfer plans, if it does."""
    lines = as_lines({name: value for name, value in numbers.items() if name != PLANNING}, heading)
    return f"{lines}\nof this, {numbers[PLANNING]:.3f} ms FlashInfer's planning" if PLANNING in numbers else lines

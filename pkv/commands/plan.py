"""`pkv plan`: print who does which tiles of one decode step, and what that costs. Runs nothing, needs no GPU.

Of a trace it prints the means of all steps.
"""

import argparse

from pkv.cards.known import resolve_gpu
from pkv.commands import arguments
from pkv.commands.means import GLOSSARY, PLANNING, as_lines, means_of, numbers_of, plan_of, timeline_of
from pkv.commands.output import print_json, say
from pkv.commands.steps import add_steps, steps_from

HELP = "print a stage's plan for some row lengths, and what it costs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_steps(parser)
    arguments.add_stage(parser)
    arguments.add_policy(parser)
    arguments.add_gpu(parser, None)
    arguments.add_shape(parser)
    arguments.add_json(parser)
    arguments.add_epilog(parser, GLOSSARY)


def execute(args: argparse.Namespace) -> int:
    """Print the plan, or the means of a trace's plans."""
    steps = steps_from(args)
    if steps.trace:
        means = means_of(steps, args)
        del means["gpu_ms"]
        means.pop(PLANNING, None)
        gpu = resolve_gpu(args.gpu).name
        if args.json:
            print_json({"stage": args.stage} | steps.trace | {"gpu": gpu} | means)
        else:
            say(f"stage {args.stage} on {steps}\nplanned for {gpu}\n\n{as_lines(means, 'mean of a step')}")
        return 0
    (lengths,) = steps.lengths
    made = plan_of(lengths, args)
    numbers = numbers_of(made, timeline_of(made))
    del numbers["gpu_ms"]
    if args.json:
        head = {"stage": made.stage, "lengths": lengths, "items": made.n_items, "gpu": made.gpu.name}
        print_json(head | numbers | {"plan": made.to_dict()})
    else:
        idle = numbers["tail_idle"]
        say(str(made) + ("" if idle != idle else f"\n  tail_idle {idle:.3g}, simulated on {made.gpu.name}"))
    return 0

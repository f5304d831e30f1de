"""`pkv plan`: print who does which tiles of one decode step, and what that costs. Runs nothing, needs no GPU."""

import argparse
import dataclasses

from pkv.commands import CommandError
from pkv.commands.arguments import DTYPES, add_json, at_least_1, heads_of, lengths_of
from pkv.commands.output import print_json, say
from pkv.configs import DEFAULT_TILE
from pkv.decoding import DEFAULT_STAGE, plan
from pkv.gpus import gpu_names
from pkv.shapes import Shape
from pkv.stages import STAGES

HELP = "print a stage's plan for some row lengths, and what it costs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--lengths", type=lengths_of, required=True, metavar="N,N,...", help="tokens of each row")
    parser.add_argument(
        "--stage",
        choices=list(STAGES),
        default=DEFAULT_STAGE,
        metavar="NAME",
        help=f"{', '.join(STAGES)} (default {DEFAULT_STAGE})",
    )
    parser.add_argument("--splits", type=at_least_1, metavar="N", help="splits of a row (default: fill the GPU once)")
    parser.add_argument(
        "--tile", type=at_least_1, metavar="N", help=f"tokens per tile: 16, 32 or 64 (default {DEFAULT_TILE})"
    )
    parser.add_argument(
        "--gpu", choices=gpu_names(), metavar="NAME",
        help=f"GPU to plan for: {', '.join(gpu_names())} (default: the one at hand, else rtx3060)",
    )  # fmt: skip
    parser.add_argument(
        "--heads", type=heads_of, default=(32, 8), metavar="Q,KV", help="query, KV heads (default 32,8)"
    )
    parser.add_argument("--head-dim", type=at_least_1, default=128, metavar="N", help="default 128")
    parser.add_argument("--page-size", type=at_least_1, default=16, metavar="N", help="tokens per page (default 16)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default=DTYPES[0], metavar="NAME", help=f"{', '.join(DTYPES)} (default {DTYPES[0]})"
    )
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Print the plan."""
    options = {name: getattr(args, name) for name in ("splits", "tile", "gpu") if getattr(args, name) is not None}
    n_q_heads, n_kv_heads = args.heads
    try:
        shape = Shape(n_q_heads, n_kv_heads, args.head_dim, args.page_size, args.dtype)
        made = plan(args.lengths, shape, args.stage, **options)
    except (ValueError, TypeError) as error:
        raise CommandError(str(error)) from None
    except MemoryError:
        raise CommandError("the plan does not fit this machine's memory: take fewer --splits or rows") from None
    if args.json:
        head = {"stage": made.stage, "lengths": args.lengths, "items": made.n_items}
        print_json(head | dataclasses.asdict(made.counters) | {"plan": made.to_dict()})
    else:
        say(str(made))
    return 0

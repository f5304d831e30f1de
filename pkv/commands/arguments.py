"""Arguments that several commands take, and what their words mean.

>>> lengths_of("5,40,1000")
[5, 40, 1000]
"""

import argparse
import re

from pkv.cards.known import gpu_names
from pkv.decoding import DEFAULT_STAGE
from pkv.plans.gpu import DEFAULT_TILE
from pkv.stages import STAGES
from pkv.stages.s3_workqueue import ORDERINGS
from pkv.stages.s4_adaptive import POLICIES

DTYPES = ("float16", "bfloat16", "float32")
MOST_TOKENS = 2**31 - 1  # lengths are int32
MOST_HEADS = 2**16  # far more than any model has; one row's programs still fit a grid
LARGEST = 2**31 - 1  # of any size
OPTIONS = ("splits", "tile", "ordering", "policy", "gpu")  # of planning; those that were given are passed on
GPU_AT_HAND = "the one at hand, else rtx3060"

FASTEST = 1_000_000  # steps a second: a microsecond each
DECIMAL = re.compile(r"(-?)0*([0-9]{1,30})[0-9]*")
RATE = re.compile(r"[0-9]{1,9}(\.[0-9]{0,9})?|\.[0-9]{1,9}")


def whole(text: str) -> int:
    """A plain decimal: int() also takes 1_000 and digits of other scripts. Of a huge one the first 30 digits are kept.

    >>> whole("-05"), whole("9" * 5000) > 2**63
    (-5, True)
    """
    found = DECIMAL.fullmatch(text)
    if found is None:
        raise ValueError(text)
    return int(found[1] + found[2])


def quoted(text: str) -> str:
    """The text in an error, cut where it is long.

    >>> quoted("5" * 99)
    "'5555555555555555555555555555555555555555...'"
    """
    return repr(text if len(text) <= 60 else f"{text[:40]}...")


def lengths_of(text: str) -> list[int]:
    """Tokens per row, from "5,40,1000"; the error names the bad entry."""
    lengths = []
    for number, entry in enumerate(text.split(","), 1):
        where = f"{quoted(entry.strip())} (entry {number} of {quoted(text)})"
        try:
            length = whole(entry.strip(" "))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{where} is not a whole number of tokens; write one per row, no spaces, such as 5,40,1000"
            ) from None
        if not 0 <= length <= MOST_TOKENS:
            raise argparse.ArgumentTypeError(f"{where} must lie in 0 .. 2**31 - 1 tokens")
        lengths.append(length)
    return lengths


def heads_of(text: str) -> tuple[int, int]:
    """Query heads and KV heads, from "32,8"."""
    try:
        n_q_heads, n_kv_heads = (whole(entry.strip(" ")) for entry in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{quoted(text)} is not QUERY,KV; write two whole numbers, such as 32,8"
        ) from None
    if max(n_q_heads, n_kv_heads) > MOST_HEADS:
        raise argparse.ArgumentTypeError(f"{quoted(text)}: at most {MOST_HEADS} heads, such as 32,8")
    if n_q_heads < 1 or n_kv_heads < 1 or n_q_heads % n_kv_heads:
        raise argparse.ArgumentTypeError(
            f"{quoted(text)}: both must be at least 1, and the query heads a multiple of the KV heads, such as 32,8"
        )
    return n_q_heads, n_kv_heads


def in_range(text: str, least: int, most: int, rule: str) -> int:
    """A whole number from `least` to `most`; an error tells the rule."""
    try:
        value = whole(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a whole number, such as 12") from None
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{quoted(text)} {rule}")
    return value


def at_least_1(text: str) -> int:
    """A whole number, 1 or more."""
    return in_range(text, 1, LARGEST, "must be at least 1, and at most 2**31 - 1")


def seed_of(text: str) -> int:
    """A seed that both torch and numpy take."""
    return in_range(text, 0, 2**63 - 1, "must lie in 0 .. 2**63 - 1")


def rate_of(text: str) -> float:
    """How many of something a second has: a plain decimal above 0."""
    if RATE.fullmatch(text) is None or not 0 < float(text) <= FASTEST:
        raise argparse.ArgumentTypeError(f"{quoted(text)} must be a number above 0, at most {FASTEST:,}, such as 20")
    return float(text)


def add_stage(parser: argparse.ArgumentParser) -> None:
    """Which stage, and how it cuts."""
    parser.add_argument(
        "--stage", choices=list(STAGES), default=DEFAULT_STAGE, metavar="NAME",
        help=f"{', '.join(STAGES)} (default {DEFAULT_STAGE})",
    )  # fmt: skip
    parser.add_argument(
        "--splits", type=at_least_1, metavar="N", help="splits of a row (default: the stage's own choice)"
    )
    parser.add_argument(
        "--tile", type=at_least_1, metavar="N", help=f"tokens per tile: 16, 32 or 64 (default {DEFAULT_TILE})"
    )
    parser.add_argument(
        "--ordering", choices=list(ORDERINGS), metavar="NAME",
        help=f"which program takes which item: {', '.join(ORDERINGS)} (default: longest_first if programs must wait)",
    )  # fmt: skip


def add_policy(parser: argparse.ArgumentParser, default: str = POLICIES[0]) -> None:
    """How stage adaptive chooses; `default` is what the help says."""
    parser.add_argument(
        "--policy", choices=POLICIES, metavar="NAME",
        help=f"how stage adaptive chooses: {', '.join(POLICIES)} (default {default})",
    )  # fmt: skip


def add_gpu(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Which GPU; None stands for the one at hand."""
    parser.add_argument(
        "--gpu", choices=gpu_names(), default=default, metavar="NAME",
        help=f"GPU to plan for: {', '.join(gpu_names())} (default {default or GPU_AT_HAND})",
    )  # fmt: skip


def add_shape(parser: argparse.ArgumentParser) -> None:
    """The model's sizes."""
    parser.add_argument(
        "--heads", type=heads_of, default=(32, 8), metavar="Q,KV", help="query, KV heads (default 32,8)"
    )
    parser.add_argument("--head-dim", type=at_least_1, default=128, metavar="N", help="default 128")
    parser.add_argument("--page-size", type=at_least_1, default=16, metavar="N", help="tokens per page (default 16)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default=DTYPES[0], metavar="NAME", help=f"{', '.join(DTYPES)} (default {DTYPES[0]})"
    )
    parser.add_argument(
        "--window", type=at_least_1, metavar="N", help="each query sees only its row's last N tokens (default all)"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json, which every command that prints has."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def add_epilog(parser: argparse.ArgumentParser, text: str) -> None:
    """Text below the options in --help, line by line as it is."""
    parser.epilog, parser.formatter_class = text, argparse.RawDescriptionHelpFormatter

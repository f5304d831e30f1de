"""Arguments that several commands take, and what their words mean.

>>> lengths_of("5,40,1000")
[5, 40, 1000]
"""

import argparse

DTYPES = ("float16", "bfloat16", "float32")
MOST_TOKENS = 2**31 - 1  # lengths are int32


def lengths_of(text: str) -> list[int]:
    """Tokens per row, from "5,40,1000"; the error names the bad entry."""
    lengths = []
    for number, entry in enumerate(text.split(","), 1):
        where = f"{entry.strip()!r} (entry {number} of {text!r})"
        try:
            length = int(entry)
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
        n_q_heads, n_kv_heads = (int(entry) for entry in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not QUERY,KV; write two whole numbers, such as 32,8") from None
    if n_q_heads < 1 or n_kv_heads < 1 or n_q_heads % n_kv_heads:
        raise argparse.ArgumentTypeError(
            f"{text!r}: both must be at least 1, and the query heads a multiple of the KV heads, such as 32,8"
        )
    return n_q_heads, n_kv_heads


def at_least_1(text: str) -> int:
    """A whole number, 1 or more."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def seed_of(text: str) -> int:
    """A seed that both torch and numpy take."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{value} must lie in 0 .. 2**63 - 1")
    return value


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json, which every command that prints has."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")

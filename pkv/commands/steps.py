"""Which batches a command plans: one step's row lengths, or the steps of a trace.

`--lengths 5,40` is one step of two rows. `--trace bimodal` is drawn (pkv.bench.loads.traces), `--trace FILE` is read.
Of a long trace `--every 10` takes each tenth step: a sample whose means come ten times as soon.
"""

import argparse
import difflib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pkv.bench.loads.tracefiles import read_trace
from pkv.bench.loads.traces import TRACES, Request, make_trace, never_active, steps_of
from pkv.commands import CommandError
from pkv.commands.arguments import at_least_1, in_range, lengths_of, quoted, rate_of, seed_of
from pkv.wording.counts import count_of, verb

# The paper's main runs; a trace from a file has its own requests, and ends with the last of them.
DEFAULTS = {"seed": 20260623, "requests": 24, "max_active": 8, "steps": 48}
MOST = 100_000  # requests or steps: minutes of planning


@dataclass(frozen=True)
class Steps:
    """lengths: of each step's rows. trace: what they were drawn from, by the options' names; empty for --lengths.

    trace also has never_active, how many of the requests are in no step; note says so in words, and what to raise.
    Where only every N-th step is taken, trace has `every`, and lengths the steps that were taken.
    """

    lengths: list[list[int]]
    trace: dict[str, Any]
    note: str = ""

    @property
    def sampled(self) -> str:
        """How many of the trace's steps there are, in words; "" where it is all of them."""
        return f"one of every {self.trace['every']} steps: {len(self.lengths):,}" if "every" in self.trace else ""

    def __str__(self) -> str:
        if not self.trace:
            (lengths,) = self.lengths
            return f"{count_of(len(lengths), 'row')}, {count_of(sum(lengths), 'token')}"
        seed = "" if self.trace["seed"] is None else f"seed {self.trace['seed']}, "
        requests, steps = (count_of(self.trace[f"{word}s"], word) for word in ("request", "step"))
        counts = f"{requests}, at most {self.trace['max_active']} active, {steps}"
        return "\n".join(filter(None, [f"trace {self.trace['trace']} ({seed}{counts})", self.sampled, self.note]))


def add_steps(parser: argparse.ArgumentParser) -> None:
    """--lengths or --trace, and what a trace takes."""
    batch = parser.add_mutually_exclusive_group(required=True)
    batch.add_argument("--lengths", type=lengths_of, metavar="N,N,...", help="one step: tokens of each row")
    batch.add_argument(
        "--trace", metavar="NAME|FILE",
        help=f"many steps: {', '.join(TRACES)}, or a CSV or JSON file with prompt_len, decode_len and arrival (a "
        "step) or seconds",
    )  # fmt: skip
    up_to_most = partial(in_range, least=1, most=MOST, rule=f"must lie in 1 .. {MOST}")
    parser.add_argument(
        "--seed", type=seed_of, metavar="N", help=f"of the trace's random numbers (default {DEFAULTS['seed']})"
    )
    parser.add_argument(
        "--requests", type=up_to_most, metavar="N",
        help=f"how many of the trace's requests (default {DEFAULTS['requests']}; of a file: all)",
    )  # fmt: skip
    parser.add_argument(
        "--max-active", type=at_least_1, metavar="N",
        help="most rows of a step; further live requests are left out, they do not wait. Of a drawn trace, so many "
        f"requests also arrive together (default {DEFAULTS['max_active']})",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=up_to_most, metavar="N",
        help=f"how many of the trace's steps (default {DEFAULTS['steps']}; of a file: all)",
    )  # fmt: skip
    parser.add_argument(
        "--steps-per-second", type=rate_of, metavar="R",
        help="of a file with a column seconds in the place of arrival: steps a server decodes in a second (no default)",
    )  # fmt: skip
    parser.add_argument(
        "--every",
        type=up_to_most,
        metavar="N",
        help="only every N-th of the trace's steps, from the first on (default 1)",
    )


def steps_from(args: argparse.Namespace) -> Steps:
    """The steps that the arguments mean."""
    given = {name: getattr(args, name) for name in DEFAULTS if getattr(args, name) is not None}
    sample = {} if args.every is None else {"every": args.every}
    rate = {} if args.steps_per_second is None else {"steps_per_second": args.steps_per_second}
    if args.trace is None:
        for name in given | rate | sample:
            option = f"--{name.replace('_', '-')}"
            raise CommandError(f"{option} belongs to a trace, and --lengths is one step: drop it, or give --trace")
        return Steps([args.lengths], {})
    if args.trace in TRACES:
        if rate:
            raise CommandError(
                f"--steps-per-second belongs to a file with seconds, and trace {args.trace} counts steps: drop it"
            )
        used = DEFAULTS | given
        try:
            requests = make_trace(args.trace, used["seed"], used["requests"], used["max_active"], args.page_size)
        except ValueError as error:
            raise CommandError(f"--trace {args.trace}: {error}") from None
    else:
        requests = requests_of_file(args.trace, given, args.steps_per_second)
        end = max((request.arrival + request.decode_len for request in requests), default=1)
        used = DEFAULTS | {"seed": None, "requests": len(requests), "steps": end} | given
        if used["steps"] > MOST:
            raise CommandError(f"--trace {args.trace} lasts {end} steps: say how many with --steps, at most {MOST}")
    left_out, late = never_active(requests, used["max_active"], used["steps"])
    note = note_of(left_out, late, len(requests))
    facts = {"trace": args.trace} | used | rate | sample | {"never_active": left_out + late}
    return Steps(steps_of(requests, used["max_active"], used["steps"])[:: sample.get("every", 1)], facts, note)


def note_of(left_out: int, late: int, n_requests: int) -> str:
    """Which requests are in no step, and the option that would bring them in.

    >>> note_of(1, 0, 3)
    '1 of 3 requests was never active: raise --max-active'
    """
    remedies = ["--max-active"] * (left_out > 0) + ["--steps"] * (late > 0)
    n_never = left_out + late
    never = f"{n_never} of {count_of(n_requests, 'request')} {verb(n_never, 'were')} never active"
    return f"{never}: raise {' and '.join(remedies)}" if remedies else ""


def is_there(path: Path) -> bool:
    """Is there anything of that name? A name that nothing can have is none."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def requests_of_file(name: str, given: dict[str, int], steps_per_second: float | None) -> tuple[Request, ...]:
    """The first --requests of a file, all without that option."""
    path = Path(name)
    if not is_there(path):
        similar = difflib.get_close_matches(name, TRACES, n=1)
        hint = f": did you mean {similar[0]}?" if similar else ""
        raise CommandError(f"--trace {quoted(name)} is neither a file nor one of {', '.join(TRACES)}{hint}")
    if "seed" in given:
        raise CommandError(f"--seed means nothing where --trace is a file ({name}): drop it")
    try:
        requests = read_trace(path, steps_per_second)
    except OSError as error:
        raise CommandError(f"--trace {name} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CommandError(f"--trace {error}") from None
    n_wanted = given.get("requests", len(requests))
    if n_wanted > len(requests):
        raise CommandError(f"--requests {n_wanted}: {name} has {len(requests)}")
    return requests[:n_wanted]

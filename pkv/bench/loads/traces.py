"""Traces: which requests a server decodes together, step by step, and how long each of their rows is.

A request has a prompt, decodes some tokens, and arrives at a step. In the steps arrival .. arrival + decode_len - 1 it
is live, and its row has the prompt and one more token for each step of its age. Of the live requests, the first
`max_active` in order are the step's rows. A request that has to stand back ages all the same: there is no queue, and
one that stands back all its life is never active.

Two requests (prompt 32, decodes 2, arrives at 0) and (prompt 48, decodes 3, arrives at 1), at most 8 active:
steps [32], [33, 48], [49], [50], [].

The five traces of the paper are drawn as it draws them, and `one_long` is ours: one row of 64k tokens among short ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from pkv.wording.checks import LONGEST_ROW, at_least

LARGEST_SEED = 2**63 - 1
Draw = Callable[[int, int], int]  # a whole number from `first` to `last`, both included, each as likely


@dataclass(frozen=True)
class Request:
    """One sequence: prompt_len tokens in the cache when it arrives, then decode_len steps, from step `arrival` on."""

    prompt_len: int
    decode_len: int
    arrival: int

    def __post_init__(self) -> None:
        for name, minimum in (("prompt_len", 0), ("decode_len", 1), ("arrival", 0)):
            value = at_least(minimum, name, getattr(self, name))
            if value > LONGEST_ROW:
                raise ValueError(f"{name} = {value} is too large: pass {LONGEST_ROW} or less")
            object.__setattr__(self, name, value)
        if self.prompt_len + self.decode_len > LONGEST_ROW:
            total = f"prompt_len + decode_len = {self.prompt_len + self.decode_len}"
            raise ValueError(f"{total} tokens make too long a row: at most {LONGEST_ROW}")


FIELDS = [field.name for field in fields(Request)]


def uniform(index: int, max_active: int, draw: Draw) -> tuple[int, int]:
    """Any prompt from 4k to 32k."""
    return draw(4096, 32768), draw(16, 96)


def bimodal(index: int, max_active: int, draw: Draw) -> tuple[int, int]:
    """Every fourth prompt is long, the others short."""
    if index % 4 == 0:
        return draw(24576, 65536), draw(32, 128)
    return draw(2048, 12288), draw(8, 64)


def zipf(index: int, max_active: int, draw: Draw) -> tuple[int, int]:
    """A few prompts are long and many middling: 64k / sqrt(rank), give or take half a k."""
    prompt_len = int(2048 + 65536 / math.sqrt(draw(1, 32)))
    return max(1024, prompt_len + draw(-512, 512)), draw(8, 128)


def bucketed(index: int, max_active: int, draw: Draw) -> tuple[int, int]:
    """8k, 16k, 32k, 64k, and again."""
    return (8192, 16384, 32768, 65536)[index % 4], draw(32, 96)


def homogeneous(index: int, max_active: int, draw: Draw) -> tuple[int, int]:
    """Every prompt has 32k."""
    return 32768, draw(32, 96)


def one_long(index: int, max_active: int, draw: Draw) -> tuple[int, int]:
    """64k for the first of the max_active requests that arrive together, 512 for the others."""
    return 65536 if index % max_active == 0 else 512, draw(32, 96)


# (prompt_len, decode_len) of request `index`; what is drawn first is on the left
TRACES: dict[str, Callable[[int, int, Draw], tuple[int, int]]] = {
    "uniform": uniform,
    "bimodal": bimodal,
    "zipf": zipf,
    "bucketed": bucketed,
    "homogeneous": homogeneous,
    "one_long": one_long,
}


def make_trace(name: str, seed: int, n_requests: int, max_active: int, page_size: int = 16) -> tuple[Request, ...]:
    """The requests of a trace of TRACES; the same seed gives the same ones, on every machine.

    max_active: how many arrive together, one group a step. Prompts are rounded up to whole pages of page_size tokens.
    ValueError / TypeError name the argument. torch's own random numbers go on as if nothing had been drawn.

    >>> make_trace("homogeneous", seed=0, n_requests=2, max_active=1)[1]
    Request(prompt_len=32768, decode_len=86, arrival=1)
    """
    if not isinstance(name, str) or name not in TRACES:
        raise ValueError(f"trace = {name!r} does not exist; choose one of {', '.join(TRACES)}")
    seed, n_requests = at_least(0, "seed", seed), at_least(0, "n_requests", n_requests)
    max_active, page_size = at_least(1, "max_active", max_active), at_least(1, "page_size", page_size)
    if seed > LARGEST_SEED:
        raise ValueError(f"seed = {seed} is too large: pass 2**63 - 1 or less")
    generator = torch.Generator("cpu").manual_seed(seed)

    def draw(first: int, last: int) -> int:
        return int(torch.randint(first, last + 1, (1,), generator=generator, device="cpu"))

    requests = []
    for index in range(n_requests):
        prompt_len, decode_len = TRACES[name](index, max_active, draw)
        whole_pages = -(-prompt_len // page_size) * page_size
        requests.append(Request(whole_pages, decode_len, index // max_active))
    return tuple(requests)


def steps_of(requests: Sequence[Request], max_active: int, n_steps: int) -> list[list[int]]:
    """The row lengths of each of the first n_steps steps; a step without a live request has no rows.

    >>> steps_of([Request(32, 2, 0), Request(48, 3, 1)], max_active=8, n_steps=5)
    [[32], [33, 48], [49], [50], []]
    """
    return [lengths for _, lengths in _active_rows(requests, max_active, n_steps)]


def never_active(requests: Sequence[Request], max_active: int, n_steps: int) -> tuple[int, int]:
    """How many requests are a row of none of the first n_steps steps: (those that stand back, those too late).

    Too late: they arrive after the last of the steps.

    >>> never_active([Request(32, 2, 0), Request(32, 2, 0), Request(32, 2, 9)], max_active=1, n_steps=5)
    (1, 1)
    """
    n_late = sum(request.arrival >= n_steps for request in requests)
    seen = {index for active, _ in _active_rows(requests, max_active, n_steps) for index in active}
    return len(requests) - n_late - len(seen), n_late


def _active_rows(requests: Sequence[Request], max_active: int, n_steps: int) -> Iterator[tuple[list[int], list[int]]]:
    """Of each step: which requests are its rows, and how long those are."""
    max_active, n_steps = at_least(1, "max_active", max_active), at_least(0, "n_steps", n_steps)
    prompts, decodes, arrivals = (np.array([getattr(r, name) for r in requests], dtype=np.int64) for name in FIELDS)
    for step in range(n_steps):
        ages = step - arrivals
        active = np.flatnonzero((ages >= 0) & (ages < decodes))[:max_active]
        yield active.tolist(), (prompts[active] + ages[active]).tolist()

"""What the sliders of schedules show: from a few numbers to a batch, its plan, and the picture.

8 rows, "one long", longest 16,384: one row of 16,384 tokens and seven of 512. Everything is planned and played for an
RTX 3060, or for one with another number of SMs.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch

from pkv.cards.known import load_gpu
from pkv.cards.simulation import simulate
from pkv.decoding import plan
from pkv.kernels.configs import programs_per_sm
from pkv.plans.gpu import GpuProfile
from pkv.plans.shape import Shape
from pkv.stages import STAGES
from pkv.stages.s4_adaptive import POLICIES, explain
from pkv.stages.sizing import reading_programs
from pkv.viz.choices import draw_choice
from pkv.viz.runs import draw_runs
from pkv.viz.svg import Picture
from pkv.viz.timelines import draw_timeline

LLAMA3_8B = Shape(n_q_heads=32, n_kv_heads=8, head_dim=128, page_size=16, dtype=torch.float16)
SHORT = 512  # tokens of the short rows beside one long one
CUT = ("stream_k", "workqueue", "row_local")  # whose programs are drawn as parts of one line
PLAYED = tuple(name for name in STAGES if name not in ("reference", "adaptive"))


def ragged_lengths(n_rows: int, longest: int) -> list[int]:
    """Row lengths that differ: the longest, a half, a third, ... of it.

    >>> ragged_lengths(4, 12)
    [12, 6, 4, 3]
    """
    return [longest // (index + 1) for index in range(n_rows)]


def equal_lengths(n_rows: int, longest: int) -> list[int]:
    """Rows of one length."""
    return [longest] * n_rows


def one_long_lengths(n_rows: int, longest: int) -> list[int]:
    """One long row, the others short.

    >>> one_long_lengths(3, 16384)
    [16384, 512, 512]
    """
    return [longest] + [min(SHORT, longest)] * (n_rows - 1)


RAGGEDNESS: dict[str, Callable[[int, int], list[int]]] = {
    "equal": equal_lengths,
    "ragged": ragged_lengths,
    "one long": one_long_lengths,
}


def lengths_of(rows: int, longest: int, raggedness: str) -> list[int]:
    """The lengths of a batch; raggedness: one of RAGGEDNESS."""
    if raggedness not in RAGGEDNESS:
        raise ValueError(f"raggedness = {raggedness!r} must be one of {', '.join(map(repr, RAGGEDNESS))}")
    return RAGGEDNESS[raggedness](rows, longest)


def card_with(sms: int) -> GpuProfile:
    """An RTX 3060 with so many SMs; its memory stays as fast as it is."""
    return dataclasses.replace(load_gpu("rtx3060"), n_sms=sms)


def schedule_of(rows: int, longest: int, raggedness: str, splits: int, sms: int, stage: str) -> list[Picture]:
    """One step of a batch, planned by a stage and played. Stages that choose their own splits ignore `splits`."""
    card = card_with(sms)
    takes_splits = "splits" in inspect.signature(STAGES[stage].plan).parameters
    options: dict[str, Any] = {"splits": splits} if takes_splits else {}
    made = plan(lengths_of(rows, longest, raggedness), LLAMA3_8B, stage=stage, gpu=card, **options)
    return [draw_timeline(simulate(made, card))]


def policy_of(rows: int, longest: int, raggedness: str, policy: str) -> list[Picture]:
    """What each stage is predicted to take for a batch, and which one a policy chooses."""
    if policy not in POLICIES:
        raise ValueError(f"policy = {policy!r} must be one of {', '.join(map(repr, POLICIES))}")
    lengths = lengths_of(rows, longest, raggedness)
    return [draw_choice(explain(lengths, LLAMA3_8B, policy=policy, gpu=load_gpu("rtx3060")))]


def runs_of(rows: int, longest: int, raggedness: str, programs: int, stage: str) -> list[Picture]:
    """A batch dealt out to so many programs, as lanes; other stages fill as many places their own way."""
    card = load_gpu("rtx3060")
    per_sm = reading_programs(card, programs_per_sm(LLAMA3_8B, card, card.tile, "stream_k"))
    card = dataclasses.replace(card, n_sms=-(-programs * LLAMA3_8B.grid_heads // per_sm))
    return [draw_runs(plan(lengths_of(rows, longest, raggedness), LLAMA3_8B, stage=stage, gpu=card))]

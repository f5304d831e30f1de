"""The merge of a batch's states, row by row, in PyTorch, with switches for what people get wrong."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

State = tuple[torch.Tensor, torch.Tensor]


def merge_rows(
    outs: torch.Tensor, lses: torch.Tensor, offsets: torch.Tensor, *,
    weigh: str = "exp", replaces: bool = True, divided: bool = True, lse_of: str = "sum",
    items_of: Callable[[int, int], slice] = slice,
) -> State:  # fmt: skip
    """Row by row, in fp64, then as outs; the options are mistakes."""
    n_rows = len(offsets) - 1
    out, lse = outs.new_zeros(n_rows, *outs.shape[1:]), lses.new_full((n_rows, lses.shape[1]), -torch.inf)
    for row, (first, last) in enumerate(pairwise(offsets.tolist())):
        mine, values = lses[items_of(first, last)].double(), outs[items_of(first, last)].double()
        if len(mine) == 0:
            continue
        is_empty = mine == -torch.inf
        if replaces:
            values = values.masked_fill(is_empty[..., None], 0.0)
        largest = mine.amax(0)
        base = largest.masked_fill(largest == -torch.inf, 0.0)
        weights = {
            "exp": (mine - base).exp(),
            "exp2": (mine - base).exp2(),
            "equal": torch.ones_like(mine),
            "equal_of_filled": (~is_empty).double(),
            "lse": mine,
        }[weigh]
        total = weights.sum(0)
        safe = total.masked_fill(total == 0.0, 1.0)[:, None]
        out[row] = (weights[..., None] * values).sum(0) / (safe if divided else 1.0)
        lse[row] = {
            "sum": base + (mine - base).exp().sum(0).log(),
            "mixed": base + (mine - base).exp().sum(0).log2(),
            "sum2": base + (mine - base).exp2().sum(0).log2(),
            "shifted": (mine - base).exp().sum(0).log(),
            "largest": largest,
            "added": mine.sum(0),
            "mean": mine.mean(0),
        }[lse_of]
    return out, lse


def mistake(**options: Any) -> Callable[..., State]:
    """merge_rows with these mistakes."""
    return lambda *arguments: merge_rows(*arguments, **options)


def hidden(*arguments: torch.Tensor) -> State:
    """What is not a number is made 0 at the end."""
    out, lse = merge_rows(*arguments, replaces=False)
    return out.nan_to_num(), lse


def one_max(outs: torch.Tensor, lses: torch.Tensor, offsets: torch.Tensor, of_all: bool, guards: bool) -> State:
    """The largest lse of all rows, of each head or of_all, is subtracted in every row; guards: 0 / 0 is made 0."""
    out, lse = merge_rows(outs, lses, offsets)
    if not len(lses):
        return out, lse
    largest = (lses.amax() if of_all else lses.amax(0)).expand(lses.shape[1])
    base = largest.masked_fill(largest == -torch.inf, 0.0)
    total = (lse - base).exp()  # 0 where all of a row is far below
    lost = ((total == 0.0) & (lse > -torch.inf))[..., None]
    return out.masked_fill(lost, 0.0 if guards else torch.nan), base + total.log()


def even_rows(outs: torch.Tensor, lses: torch.Tensor, offsets: torch.Tensor) -> State:
    """The same number of items for each row, whatever the offsets."""
    n_rows = len(offsets) - 1
    return merge_rows(outs, lses, torch.arange(n_rows + 1) * (len(outs) // n_rows))

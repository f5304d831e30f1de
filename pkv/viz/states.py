"""The merge of partial states drawn, step by step, in any order and in the wrong ways.

A part is the state of the tokens begin:end of one row, for one head and one dimension: its `out` and its `lse`. Parts
are merged one after another; the union of their tokens is drawn with the merged state. With equal scores and values
0 .. 9 the parts 0:4, 4:8 and 8:10 have out 1.5, 5.5 and 8.5, and every order ends at 4.5, the mean of 0 .. 9.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from pkv.merging import merge
from pkv.viz.svg import FAINT, GREY, INK, WIDTH, Picture, Sheet, count_of

LEFT, RIGHT = 132, 220


class Part(NamedTuple):
    """The state of the tokens begin:end."""

    begin: int
    end: int
    out: float
    lse: float


def merge_exactly(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """The library's own merge, on two states of one number each."""
    out, lse = merge(
        [(torch.tensor([[out]], dtype=torch.float64), torch.tensor([lse], dtype=torch.float64)) for out, lse in (a, b)]
    )
    return float(out), float(lse)


def average_outs(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """Wrong: every state counts the same, however many tokens it stands for."""
    return (a[0] + b[0]) / 2, merge_exactly(a, b)[1]


def read_log2_as_ln(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """Wrong: the second state's lse comes in base 2 and is taken for a natural logarithm."""
    return merge_exactly(a, (b[0], b[1] / math.log(2)))


def multiply_empty(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """Wrong: an empty state's out, whatever memory holds, is multiplied by its weight 0, and 0 * NaN = NaN."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    largest = max(lse_a, lse_b)
    weight_a, weight_b = math.exp(lse_a - largest), math.exp(lse_b - largest)
    total = weight_a + weight_b
    return (weight_a * out_a + weight_b * out_b) / total, largest + math.log(total)


WAYS: dict[str, Callable[[tuple[float, float], tuple[float, float]], tuple[float, float]]] = {
    "exact merge": merge_exactly,
    "average of the outs": average_outs,
    "log2 read as ln": read_log2_as_ln,
    "empty state multiplied": multiply_empty,
}


def merge_steps(
    parts: Sequence[Part], order: Sequence[int], way: str = "exact merge"
) -> list[tuple[list[int], float, float]]:
    """After each step: which parts are in, and the state's out and lse."""
    combine = WAYS[way]
    state = parts[order[0]].out, parts[order[0]].lse
    steps = [([order[0]], *state)]
    for position, index in enumerate(order[1:], 2):
        state = combine(state, (parts[index].out, parts[index].lse))
        steps.append((list(order[:position]), *state))
    return steps


def draw_merge(
    parts: Sequence[Part], orders: Sequence[Sequence[int]], way: str = "exact merge", n_steps: int | None = None
) -> Picture:
    """Merge `parts` in each of `orders`, compare the ends with the state of all tokens; the first n_steps are drawn."""
    parts, orders = list(parts), [list(order) for order in orders]
    n_steps = len(parts) if n_steps is None else max(1, min(n_steps, len(parts)))
    filled = [part for part in parts if part.begin < part.end]
    want = merge_steps(filled, range(len(filled)))[-1][1:]
    ends = [merge_steps(parts, order, way)[-1][1:] for order in orders]
    right = [_close(end[0], want[0]) and _close(end[1], want[1]) for end in ends]
    found = ", ".join(f"{end[0]:.4g}" for end in ends)
    one = len(orders) == 1
    title = f"{way.capitalize()}, {count_of(len(orders), 'order')}: " + (
        f"{'the end is' if one else 'all end at'} out {want[0]:.4g}, lse {want[1]:.4g}" if all(right)
        else f"{'the end is' if one else 'the ends are'} out {found}; all tokens at once have {want[0]:.4g}"
    )  # fmt: skip
    notes = ["Top: the parts on their tokens. Each line below: the tokens merged so far, and their state."]
    sheet = Sheet()
    sheet.heading(title, notes)
    longest = max((part.end for part in parts), default=1)
    scale = (WIDTH - LEFT - RIGHT) / max(longest, 1)
    _draw_line(sheet, "parts", parts, list(range(len(parts))), scale, "")
    for part_index, part in enumerate(parts):
        x = LEFT + part.begin * scale + 4
        sheet.text(
            x,
            sheet.y + 8,
            f"out {part.out:.4g}, lse {part.lse:.4g}",
            size=11,
            fill=INK if part_index % 2 == 0 else GREY,
        )
    sheet.y += 22
    for order, is_right in zip(orders, right):
        sheet.line(8, sheet.y, WIDTH - 8, sheet.y, FAINT)
        sheet.y += 8
        for number, (members, out, lse) in enumerate(merge_steps(parts, order, way)[:n_steps], 1):
            name = f"take {order[0]}" if number == 1 else f"+ {members[-1]}"
            _draw_line(sheet, name, parts, members, scale, f"out {out:.4g}, lse {lse:.4g}")
        if n_steps == len(parts):
            verdict = f"{'✓' if is_right else '✗ not'} the state of all tokens"
            sheet.text(WIDTH - 8, sheet.y + 6, verdict, anchor="end", weight="bold")
            sheet.y += 16
    return sheet.finish(f"{title}. {' '.join(notes)}")


def _draw_line(sheet: Sheet, name: str, parts: Sequence[Part], members: list[int], scale: float, result: str) -> None:
    sheet.text(LEFT - 8, sheet.y + 16, name, anchor="end")
    for index, part in enumerate(parts):
        x, width = LEFT + part.begin * scale, (part.end - part.begin) * scale
        if part.begin == part.end:
            if index in members:
                sheet.hollow(x + 2, sheet.y + 6, 12, 12)
        elif index in members:
            sheet.box(x + 1, sheet.y, width - 2, 23, index)
            name_inside = f"{index}: tokens {part.begin}:{part.end}" if width > 110 else f"{index}"
            sheet.text(x + width / 2, sheet.y + 16, name_inside, size=11, anchor="middle", halo=True)
    if result:
        sheet.text(WIDTH - 8, sheet.y + 16, result, anchor="end")
    sheet.y += 28


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)

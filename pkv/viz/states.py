"""The merge of partial states drawn, step by step, in any order and in the wrong ways.

A part is the state of the tokens begin:end of one row, for one head and one dimension: its `out` and its `lse`. Parts
are merged one after another; the union of their tokens is drawn with the merged state. With equal scores and values
0 .. 9 the parts 0:4, 4:8 and 8:10 have out 1.5, 5.5 and 8.5, and every order ends at 4.5, the mean of 0 .. 9.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from pkv.kernels.merging import merge
from pkv.viz.svg import FAINT, GREY, INK, SMALL, WIDTH, Picture, Sheet, text_width
from pkv.wording.counts import count_of

LEFT, RIGHT = 68, 152
State = tuple[float, float]  # out, lse


class Part(NamedTuple):
    """The state of the tokens begin:end."""

    begin: int
    end: int
    out: float
    lse: float


def merge_exactly(a: State, b: State) -> State:
    """The library's own merge, on two states of one number each."""
    out, lse = merge(
        [(torch.tensor([[out]], dtype=torch.float64), torch.tensor([lse], dtype=torch.float64)) for out, lse in (a, b)]
    )
    return float(out), float(lse)


def average_outs(a: State, b: State) -> State:
    """Wrong: every state counts the same, however many tokens it stands for."""
    return (a[0] + b[0]) / 2, merge_exactly(a, b)[1]


def as_it_is(state: State) -> State:
    """Right: the state as its program wrote it."""
    return state


def in_base_2(state: State) -> State:
    """Wrong: the lse comes in base 2 and is taken for a natural logarithm, of which it is 1.44 times as much."""
    return state[0], state[1] / math.log(2)


def multiply_empty(a: State, b: State) -> State:
    """Wrong: an empty state's out, whatever memory holds, is multiplied by its weight 0, and 0 * NaN = NaN."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    largest = max(lse_a, lse_b)
    weight_a, weight_b = math.exp(lse_a - largest), math.exp(lse_b - largest)
    total = weight_a + weight_b
    return (weight_a * out_a + weight_b * out_b) / total, largest + math.log(total)


class Way(NamedTuple):
    """How each state is read, how two of them are combined, and what is wrong with it."""

    read: Callable[[State], State]
    combine: Callable[[State, State], State]
    fault: str = ""


WAYS = {
    "exact merge": Way(as_it_is, merge_exactly),
    "average of the outs": Way(
        as_it_is, average_outs, "Each step averages two outs, however many tokens they stand for."
    ),
    "log2 read as ln": Way(
        in_base_2,
        merge_exactly,
        "Every lse comes in base 2, 1.44 times its ln, and is read as ln: weight w counts w^1.44.",
    ),
    "empty state multiplied": Way(as_it_is, multiply_empty, "An empty state's out is read: weight 0 times NaN is NaN."),
}


def way_named(name: str) -> Way:
    """One of WAYS; ValueError lists the names there are."""
    if name not in WAYS:
        raise ValueError(f"way = {name!r} must be one of {', '.join(map(repr, WAYS))}")
    return WAYS[name]


def filled_parts(parts: Sequence[Part]) -> list[Part]:
    """The parts with tokens; ValueError if there is none, or if two hold the same token."""
    for index, (begin, end, *_) in enumerate(parts):
        if not 0 <= begin <= end:
            raise ValueError(f"parts[{index}] has the tokens {begin}:{end}: pass 0 <= begin <= end")
    filled = [part for part in parts if part.begin < part.end]
    if not filled:
        raise ValueError("parts hold no token: pass at least one with begin < end, such as Part(0, 4, 1.5, 1.39)")
    for before, after in itertools.pairwise(sorted(filled, key=lambda part: part.begin)):
        if after.begin < before.end:
            raise ValueError(
                f"parts {before.begin}:{before.end} and {after.begin}:{after.end} share a token, which would count "
                "twice: pass parts that do not overlap"
            )
    return filled


def merge_steps(
    parts: Sequence[Part], order: Sequence[int], way: str = "exact merge"
) -> list[tuple[list[int], float, float]]:
    """After each step: which parts are in, and the state's out and lse."""
    read, combine, _ = way_named(way)
    known = range(len(parts))
    if not len(order) or len(set(order)) < len(order) or any(index not in known for index in order):
        raise ValueError(
            f"order = {list(order)} must name one or more of the {count_of(len(parts), 'part')}, each once: "
            f"{', '.join(map(str, known)) or 'there is none'}"
        )
    states = [read((part.out, part.lse)) for part in parts]
    state = states[order[0]]
    steps = [([order[0]], *state)]
    for position, index in enumerate(order[1:], 2):
        state = combine(state, states[index])
        steps.append((list(order[:position]), *state))
    return steps


def draw_merge(
    parts: Sequence[Part], orders: Sequence[Sequence[int]], way: str = "exact merge", n_steps: int | None = None
) -> Picture:
    """Merge `parts` in each of `orders`, n_steps of them or all; all are compared with the state of all tokens."""
    parts, orders = list(parts), [list(order) for order in orders]
    fault = way_named(way).fault
    filled = filled_parts(parts)
    n_steps = len(parts) if n_steps is None else n_steps
    if not 1 <= n_steps <= len(parts):
        raise ValueError(f"n_steps = {n_steps} must lie in 1 .. {len(parts)}, the number of parts")
    if not orders or any(sorted(order) != list(range(len(parts))) for order in orders):
        example = [tuple(range(len(parts)))]
        raise ValueError(f"orders = {orders} must hold one or more orders of all parts, such as {example}")
    want = merge_steps(filled, range(len(filled)))[-1][1:]
    ends = [merge_steps(parts, order, way)[n_steps - 1][1:] for order in orders]
    right = [_close(end[0], want[0]) and _close(end[1], want[1]) for end in ends]
    found = ", ".join(f"{end[0]:.4g}" for end in ends)
    one = len(orders) == 1
    title = f"{way.capitalize()}, {count_of(len(orders), 'order')}: " + (
        f"{'the end is' if one else 'all end at'} out {want[0]:.4g}, lse {want[1]:.4g}" if all(right)
        else f"{'the end is' if one else 'the ends are'} out {found}; all tokens at once have {want[0]:.4g}"
    )  # fmt: skip
    if n_steps < len(parts):
        so_far = ", ".join(f"out {out:.4g}, lse {lse:.4g}" for out, lse in ends)
        title = f"{way.capitalize()}, {n_steps} of {count_of(len(parts), 'state')} taken: so far {so_far}"
    notes = ["Top: the parts on their tokens. Each line below: the tokens merged so far, and their state."]
    notes += filter(None, [fault])
    sheet = Sheet()
    sheet.heading(title, notes)
    scale = (WIDTH - LEFT - RIGHT) / max(part.end for part in parts)
    _draw_line(sheet, "parts", parts, list(range(len(parts))), scale, "")
    _name_states(sheet, parts, scale)
    for order, is_right in zip(orders, right):
        sheet.line(8, sheet.y, WIDTH - 8, sheet.y, FAINT)
        sheet.y += 8
        for number, (members, out, lse) in enumerate(merge_steps(parts, order, way)[:n_steps], 1):
            name = f"take {order[0]}" if number == 1 else f"+ {members[-1]}"
            _draw_line(sheet, name, parts, members, scale, f"out {out:.4g}, lse {lse:.4g}")
        if n_steps == len(parts):
            verdict = f"{'✓' if is_right else '✗ not'} the state of all tokens"
            sheet.text(WIDTH - 8, sheet.y + 10, verdict, anchor="end", weight="bold")
            sheet.y += 20
    return sheet.finish(f"{title}. {' '.join(notes)}")


def _name_states(sheet: Sheet, parts: Sequence[Part], scale: float) -> None:
    """Each part's state below it, a line lower where it would run into its neighbour's."""
    line_ends: list[float] = []
    for index, part in enumerate(parts):
        x, text = LEFT + part.begin * scale + 2, f"{index}: out {part.out:.4g}, lse {part.lse:.4g}"
        line = next((number for number, end in enumerate(line_ends) if end < x), len(line_ends))
        line_ends[line : line + 1] = [x + text_width(text, SMALL) + 8]
        sheet.text(x, sheet.y + 8 + 16 * line, text, size=SMALL, fill=INK if index % 2 == 0 else GREY)
    sheet.y += 6 + 16 * len(line_ends)


def _draw_line(sheet: Sheet, name: str, parts: Sequence[Part], members: list[int], scale: float, result: str) -> None:
    sheet.text(LEFT - 8, sheet.y + 16, name, anchor="end")
    for index, part in enumerate(parts):
        x, width = LEFT + part.begin * scale, (part.end - part.begin) * scale
        if part.begin == part.end:
            if index in members:
                sheet.hollow(x + 2, sheet.y + 6, 12, 12)
        elif index in members:
            sheet.box(x + 1, sheet.y, width - 2, 23, index)
            long = f"{index}: tokens {part.begin}:{part.end}"
            name_inside = long if text_width(long, SMALL) < width else f"{index}"
            sheet.text(x + width / 2, sheet.y + 16, name_inside, size=SMALL, anchor="middle", halo=True)
    if result:
        sheet.text(WIDTH - 8, sheet.y + 16, result, anchor="end")
    sheet.y += 28


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)

"""Partial states that make mistakes visible, and merges of them in PyTorch with switches for what people get wrong."""

from collections.abc import Callable
from typing import Any

import torch

from pkv.course.graders.addresses import OutOfBounds
from pkv.course.graders.batches import DEVICE
from pkv.course.tasks import Case, Mistake, Raised, Spec, Unfit

LARGE = 100  # an lse above it: exp of it overflows fp32
KEPT = 100.0  # what a row of one state holds before the merge, and after it
UNWRITTEN = -77.0
LN_2 = 0.6931471805599453


def interpreter_refuses(case: Case, got: Any) -> bool:
    """What Triton's interpreter says of a block of booleans & a comparison of two single floats."""
    return isinstance(got, Raised) and "bitwise_and" in got.text


INTERPRETER_AND = Mistake(
    "interpreter_and",
    "combines a block of booleans and a comparison of single floats by &, which a GPU can, but Triton's interpreter "
    "cannot: use `if`, or tl.where",
    shows=interpreter_refuses,
)


def states_of(spec: Spec) -> tuple[torch.Tensor, torch.Tensor]:
    """outs [n_states, n_heads, head_dim] and lses [n_states, n_heads], fp32, on the CPU.

    spec: these sizes, seed, and size: above LARGE, the lses of one head are about size, those of the next about -size
    (with not_below about 0). rise: by how much each state's lse is above that of the one before, about. empty: "none",
    "all", the number of one state that is empty for all heads, "some": each state for some heads, or "heads": every
    state for every other head. What an empty state holds is NaN, infinite, or looks like any other.
    """
    n_states, n_heads, head_dim, size = (spec[name] for name in ("n_states", "n_heads", "head_dim", "size"))
    if min(n_heads, head_dim) < 1 or n_states < 0:
        raise Unfit
    generator = torch.Generator().manual_seed(spec["seed"])
    outs = torch.randn(n_states, n_heads, head_dim, generator=generator)
    outs += 4 * torch.arange(n_states)[:, None, None] + torch.arange(n_heads)[:, None]
    lses = torch.randn(n_states, n_heads, generator=generator) * min(size, 2)
    lses += spec.get("rise", 0) * torch.arange(n_states)[:, None]
    if size > LARGE:
        lses += size * (1 - (1 if spec.get("not_below") else 2) * (torch.arange(n_heads) % 2))
    states, heads = torch.arange(n_states)[:, None], torch.arange(n_heads)
    kinds = {"none": states < 0, "all": states >= 0, "some": (states + heads) % 3 == 0, "heads": heads % 2 == 0}
    kinds["front"] = states < 16  # whole blocks of them
    empty = kinds[spec["empty"]] if spec["empty"] in kinds else states == spec["empty"]
    empty = empty.expand(n_states, n_heads)
    held = torch.tensor([torch.nan, 7.0, torch.inf])[(heads[:, None] + torch.arange(head_dim)) % 3]
    return torch.where(empty[..., None], held, outs), torch.where(empty, -torch.inf, lses)


def merge_states(
    outs: torch.Tensor, lses: torch.Tensor, *, weights: str = "exp", divides: bool = True, lse: str = "natural"
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [n_heads, head_dim] and lse [n_heads] of any number of states, in fp64, then as outs; empty ones are neutral.

    The options are mistakes, but for their defaults.
    """
    wide, empty = lses.double(), lses == -torch.inf
    largest = wide.amax(0) if len(wide) else wide.new_full(wide.shape[1:], -torch.inf)
    base = largest.masked_fill(largest == -torch.inf, 0.0)
    shifted = (wide - base).exp()
    total = shifted.sum(0)
    natural = base + total.log()
    one = torch.ones_like(wide)
    given = {
        "exp": shifted,
        "equal": one,
        "equal if not empty": one.masked_fill(empty, 0.0),
        "lse": wide,
        "heaviest": (wide == largest).double(),
        "exp2": ((wide - base) * LN_2).exp(),
        "turned": (base - wide).exp().masked_fill(empty, 0.0),
        "over heads": wide.softmax(-1),
    }[weights]
    if weights != "equal":  # who averages does not ask which of them are empty
        outs = outs.masked_fill(empty[..., None], 0.0)
    if divides and weights != "over heads":
        given = given / given.sum(0).masked_fill(total == 0.0, 1.0)
    made = {
        "natural": natural,
        "sum": wide.sum(0),
        "max": largest,
        "mean": wide.mean(0),
        "shifted": total.log(),
        "exp": natural.exp(),
        "log2": natural / LN_2,
        "mixed": base + total.log2(),
    }[lse]
    return (given[..., None] * outs.double()).sum(0).to(outs.dtype), made.to(outs.dtype)


def from_zero(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A merge in fp32 that subtracts the largest lse, but never less than 0: exp of what is far below 0 is 0."""
    base = lses.amax(0).clamp(min=0.0) if len(lses) else torch.zeros(lses.shape[1:])
    weights = (lses - base).exp()
    total = weights.sum(0)
    outs = outs.masked_fill((lses == -torch.inf)[..., None], 0.0)
    return (weights[..., None] * outs).sum(0) / total.masked_fill(total == 0.0, 1.0)[:, None], base + total.log()


def what_is_multiplied(got: torch.Tensor, outs: torch.Tensor, empty: torch.Tensor) -> str:
    """Which product of an empty state's out makes NaN: got [n_heads, dim], of outs [n_states, n_heads, dim]."""
    held_nan = (outs.isnan() & empty[..., None]).any(0)
    is_inf = bool(got.isnan().any()) and not bool((got.isnan() & held_nan).any())
    return "0 * inf is NaN" if is_inf else "0 * NaN is NaN"


def weighs_dims(outs: torch.Tensor, lses: torch.Tensor, at_once: bool) -> torch.Tensor:
    """out, where the weights of heads multiply dims, of which there are as many; at_once: and those of states heads."""
    lse = lses.logsumexp(0)
    weights = (lses - lse.masked_fill(lse == -torch.inf, 0.0)).exp()
    outs = outs.masked_fill((lses == -torch.inf)[..., None], 0.0)
    return ((weights if at_once else weights[:, None]) * outs).sum(0)


def rows_of(spec: Spec) -> tuple[torch.Tensor, ...]:
    """partial_out, partial_lse, offsets, out, lse, of spec["counts"] states a row; if not "alone", one is nobody's.

    Partials that nobody has written hold NaN, as those of a row of one state; out and lse hold UNWRITTEN.
    """
    counts, n_heads, head_dim = spec["counts"], spec["n_heads"], spec["head_dim"]
    if not counts or min(n_heads, head_dim) < 1:
        raise Unfit
    outs, lses = states_of({**spec, "n_states": sum(counts) + 1})
    offsets = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    shape = (len(counts), head_dim, n_heads) if spec.get("turned") else (len(counts), n_heads, head_dim)
    out, lse = torch.full(shape, UNWRITTEN), torch.full((len(counts), n_heads), UNWRITTEN)
    out = (out.transpose(1, 2) if spec.get("turned") else out).to(getattr(torch, spec["dtype"]))
    for row, count in enumerate(counts):
        if count == 1:
            out[row], lse[row] = KEPT + row, KEPT - row
            outs[offsets[row]] = lses[offsets[row]] = torch.nan
    outs[-1] = lses[-1] = torch.nan
    if spec.get("alone"):
        outs, lses = outs[:-1].clone(), lses[:-1].clone()
    return tuple(x.to(DEVICE) for x in (outs, lses, offsets, out, lse))


def merge_rows(
    partial_out: torch.Tensor, partial_lse: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    *, merge: Callable[..., Any] = merge_states, states: str = "all", turned: bool = True, by_head: str = "",
    lse_at: str = "",
) -> list[torch.Tensor]:  # fmt: skip
    """What out and lse are after the merge; the options are mistakes, but for their defaults.

    by_head: "lses" are looked for as if those of a head lay side by side, or outs, too. lse_at: where each lse goes.
    """
    partial_out, partial_lse, out, lse = (x.cpu().clone() for x in (partial_out, partial_lse, out, lse))
    bounds, n_rows = offsets.tolist(), len(out)
    flat = out.as_strided((out.numel(),), (1,))
    for row in range(n_rows):
        first, last = bounds[row], bounds[row + 1]
        if states == "as many for each row":
            first, last = (bounds[-1] // n_rows * row, bounds[-1] // n_rows * (row + 1))
        if last - first == 1:
            continue
        first += states == "all but the first" and last > first
        last += {"all but the last": -1 if last > first else 0, "one more": 1}.get(states, 0)
        heads = 1 if states == "of head 0" else partial_out.shape[1]
        mine, of = partial_out[first:last, :heads], partial_lse[first:last, :heads]
        if by_head and last > first:
            of = taken_by_head(partial_lse, first, last)
            mine = taken_by_head(partial_out, first, last) if by_head == "outs" else mine
        made_out, made_lse = merge(mine, of)
        if lse_at:  # whatever its head: the last one's remains
            lse.view(-1)[{"row": row, "first head": row * lse.shape[1]}[lse_at]] = made_lse[-1]
        else:
            lse[row] = made_lse
        if turned:
            out[row] = made_out.to(out.dtype)
        else:
            flat[row * out[row].numel() : (row + 1) * out[row].numel()] = made_out.to(out.dtype).flatten()
    return [out, lse]


def taken_by_head(of: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """[last - first, n_heads, ...]: what lies at head * n_heads + state."""
    n_heads = of.shape[1]
    at = torch.arange(n_heads) * n_heads + torch.arange(first, last)[:, None]
    if int(at.max()) >= of.shape[0] * n_heads:
        raise OutOfBounds
    return of.flatten(0, 1)[at]


def uncorrected(
    outs: torch.Tensor, lses: torch.Tensor, block: int, corrects: str = "nothing"
) -> tuple[torch.Tensor, torch.Tensor]:
    """A merge of blocks of states which adds up weights that refer to different maxima."""
    acc, sums = torch.zeros(outs.shape[1:]), torch.zeros(lses.shape[1:])
    largest = torch.full_like(sums, -torch.inf)
    for begin in range(0, len(lses), block):
        some = lses[begin : begin + block]
        new = torch.maximum(largest, some.amax(0))
        base = new.masked_fill(new == -torch.inf, 0.0)
        weights, correction, largest = (some - base).exp(), (largest - base).exp(), new
        if corrects == "acc":
            acc = acc * correction[:, None]
        if corrects == "sums":
            sums = sums * correction
        mine = outs[begin : begin + block].masked_fill((some == -torch.inf)[..., None], 0.0)
        acc, sums = acc + (weights[..., None] * mine).sum(0), sums + weights.sum(0)
    return acc / sums.masked_fill(sums == 0.0, 1.0)[:, None], largest + sums.log()


def padded(outs: torch.Tensor, lses: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A merge that takes the states which a last block lacks for ones of lse 0 and out 0."""
    n = -len(lses) % block
    return merge_states(*(torch.cat([x, x.new_zeros(n, *x.shape[1:])]) for x in (outs, lses)))


def first_block(outs: torch.Tensor, lses: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A merge of some states only."""
    return merge_states(outs[:block], lses[:block])

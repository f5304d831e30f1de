"""A plan as text for the terminal."""

import numpy as np

from pkv.plans.counters import count
from pkv.plans.fields import PlanFields
from pkv.wording.counts import count_of

MOST_ROWS_SHOWN = 12
MOST_ITEMS_SHOWN = 4


def as_table(plan: PlanFields) -> str:
    """Return the plan as text: a head line, its counters, one line per row."""
    counters = count(plan)
    n_tokens = count_of(int(plan.lengths.sum(dtype=np.int64)), "token")
    bound = "at most " if plan.dynamic else ""
    kernel = f" ({plan.variant})" if plan.variant else ""
    each = "programs" if plan.n_items == plan.n_programs else "items"  # the paper's cta_per_sm counts those with tokens
    lines = [
        f"Plan of stage {plan.stage}{kernel}: {count_of(plan.n_rows, 'row')}, {bound}{n_tokens}, "
        f"{count_of(plan.n_items, 'item')} x {count_of(plan.shape.n_kv_heads, 'KV head')}, tiles of {plan.tile}",
        f"  {plan.shape}",
        f"  planned for {plan.gpu.name}: {count_of(plan.gpu.n_sms, 'SM')}, "
        f"{count_of(plan.programs_per_sm, 'program')} each",
        f"  launches {counters.launches} | programs {counters.programs} ({counters.empty_programs} empty) | "
        f"waves {counters.waves:.3g} | {each} with tokens per SM {counters.cta_per_sm:.3g}",
        *([f"  {plan.explanation.splitlines()[0]}"] if plan.explanation else []),
        f"  useful KV {size(counters.useful_kv_mib)} | partial states moved {size(counters.merge_moved_mib)}",
        f"  {'row':>5} {'tokens':>8} {'items':>6}  token ranges",
    ]
    for row in range(min(plan.n_rows, MOST_ROWS_SHOWN)):
        begin, end = plan.partial_offsets[row], plan.partial_offsets[row + 1]
        ranges = [f"{b}:{e}" if b < e else "empty" for _, b, e in plan.items[begin:end].tolist()]
        if len(ranges) > MOST_ITEMS_SHOWN:
            ranges = [*ranges[: MOST_ITEMS_SHOWN - 1], "...", ranges[-1]]
        lines.append(f"  {row:>5} {plan.lengths[row]:>8} {end - begin:>6}  {' '.join(ranges)}")
    if plan.n_rows > MOST_ROWS_SHOWN:
        lines.append(f"  ... and {count_of(plan.n_rows - MOST_ROWS_SHOWN, 'more row')}")
    return "\n".join(lines)


def size(mib: float) -> str:
    """Write a size (in MiB) for people: in MiB, or in KiB if it is below 0.1 MiB.

    >>> size(32.05), size(0.01)
    ('32.05 MiB', '10.24 KiB')
    """
    return f"{mib:.2f} MiB" if mib >= 0.1 else f"{mib * 1024:.4g} KiB"

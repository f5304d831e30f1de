"""Sliders. The only file that imports ipywidgets; without it the first picture shows, and a line says what to install.

Each explorer's pictures are plain outputs of the cell, and moving a slider updates these outputs. So a saved notebook
holds the last pictures, also where the sliders are gone because their kernel is. What a slider calls is a plain
function from numbers to pictures, tested as such.
"""

import html
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pkv.cache.paged import PagedKVCache
from pkv.decoding import plan
from pkv.stages.s4_adaptive import POLICIES
from pkv.viz.pages import draw_pages
from pkv.viz.plandrawing import draw_plan
from pkv.viz.programs import draw_programs
from pkv.viz.schedules import CUT, LLAMA3_8B, PLAYED, RAGGEDNESS, policy_of, ragged_lengths, runs_of, schedule_of
from pkv.viz.states import WAYS, Part, draw_merge
from pkv.viz.svg import Picture
from pkv.wording.checks import host_ints

try:
    from IPython.display import display as show

    display: Any = show
except ImportError:
    display = None  # a lesson run as a plain script: there is nothing to draw on
try:
    import ipywidgets
except ImportError:
    ipywidgets = None

MISSING = (
    "The sliders of this cell need ipywidgets, which this kernel does not find. Install it into the environment of the "
    "kernel, and into JupyterLab's: pip install 'ipywidgets>=8.1,<9'. The picture above shows the starting values."
)
NOT_LIVE = "Here the sliders show once this cell has run, in a JupyterLab that has ipywidgets."
CUTS = (0, 4, 7, 9, 10)
ORDERS: dict[str, tuple[int, ...]] = {
    "0, 1, 2, 3": (0, 1, 2, 3),
    "3, 2, 1, 0": (3, 2, 1, 0),
    "2, 0, 3, 1": (2, 0, 3, 1),
}


def pages_of(rows: int, longest: int, page_size: int) -> list[Picture]:
    """The pages of a ragged batch, shuffled, with two free ones."""
    lengths = ragged_lengths(rows, longest)
    n_pages = [-(-length // page_size) for length in lengths]
    zeros = torch.zeros(rows, longest, 1, 1)
    cache = PagedKVCache.from_dense(
        zeros, zeros, lengths, page_size, seed=0, n_pages=sum(n_pages) + 2, max_pages=max(n_pages)
    )
    return [draw_pages(cache)]


def plan_of(rows: int, longest: int, splits: int, stage: str) -> list[Picture]:
    """A plan for a ragged batch of Llama-3-8B's shape on an RTX 3060, and its programs over the SMs."""
    made = plan(ragged_lengths(rows, longest), LLAMA3_8B, stage=stage, splits=splits, gpu="rtx3060")
    return [draw_plan(made), draw_programs(made)]


def part_of(begin: int, end: int) -> Part:
    """The state of the tokens begin:end where all scores are 0 and the values are the tokens' numbers."""
    if begin == end:
        return Part(begin, end, math.nan, -math.inf)
    return Part(begin, end, (begin + end - 1) / 2, math.log(end - begin))


def merge_of(cuts: Sequence[int], order: str, way: str, steps: int) -> list[Picture]:
    """One merge of four states, as far as `steps` of them; where an empty state matters, the last one is empty."""
    cuts = four_states(cuts)
    if order not in ORDERS:
        raise ValueError(f"order = {order!r} must be one of {', '.join(map(repr, ORDERS))}")
    if way == "empty state multiplied":
        cuts = [*cuts[:3], cuts[4], cuts[4]]
    return [draw_merge([part_of(b, e) for b, e in itertools.pairwise(cuts)], [ORDERS[order]], way, steps)]


def four_states(cuts: Sequence[int]) -> list[int]:
    """The cuts, if they are the bounds of four states; some of these may be empty."""
    found = host_ints("cuts", cuts).tolist()
    if len(found) != len(CUTS) or found != sorted(found) or not 0 <= found[0] < found[-1]:
        raise ValueError(
            f"cuts = {found} must be the bounds of four states: {len(CUTS)} token numbers from 0 on, none smaller than "
            f"the one before, and with a token between first and last, such as {list(CUTS)}"
        )
    return found


def explore_pages(rows: int = 3, longest: int = 12, page_size: int = 4) -> None:
    """Sliders: rows, longest row, page size. Picture: block table and pool."""
    ranges = {"rows": (1, 6), "longest": (1, 40), "page_size": [1, 2, 3, 4, 8, 16]}
    _explore(pages_of, ranges, {"rows": rows, "longest": longest, "page_size": page_size})


def explore_plan(rows: int = 4, longest: int = 8192, splits: int = 4, stage: str = "split_kv") -> None:
    """Sliders: rows, longest row, splits; stage. Pictures: the plan, and its programs over 28 SMs."""
    ranges = {
        "rows": (1, 16),
        "longest": [256, 1024, 4096, 8192, 16384, 65536],
        "splits": (1, 32),
        "stage": ["split_kv", "length_buckets"],
    }
    _explore(plan_of, ranges, {"rows": rows, "longest": longest, "splits": splits, "stage": stage})


def explore_merge(cuts: Sequence[int] = CUTS) -> None:
    """Four states, of the tokens between `cuts`; choices: the order, the way, right or wrong, how many are taken."""
    cuts = four_states(cuts)

    def draw(order: str, way: str, states: int) -> list[Picture]:
        return merge_of(cuts, order, way, states)

    first = {"order": next(iter(ORDERS)), "way": next(iter(WAYS)), "states": 4}
    _explore(draw, {"order": list(ORDERS), "way": list(WAYS), "states": (1, 4)}, first)


def explore_schedule(
    rows: int = 8,
    longest: int = 16384,
    raggedness: str = "one long",
    splits: int = 8,
    sms: int = 28,
    stage: str = "split_kv",
) -> None:
    """Sliders: rows, longest row, splits, SMs; raggedness, stage. Picture: the step as the SMs would run it."""
    ranges = {
        "rows": (1, 16),
        "longest": [256, 1024, 4096, 8192, 16384, 65536],
        "raggedness": list(RAGGEDNESS),
        "splits": (1, 32),
        "sms": [4, 14, 28, 56, 132],
        "stage": list(PLAYED),
    }
    first = {"rows": rows, "longest": longest, "raggedness": raggedness, "splits": splits, "sms": sms, "stage": stage}
    _explore(schedule_of, ranges, first)


def explore_policy(rows: int = 8, longest: int = 16384, raggedness: str = "ragged", policy: str = "cost") -> None:
    """Sliders: rows, longest row; raggedness, policy. Picture: what each stage is predicted to take, and the choice."""
    ranges = {
        "rows": [1, 2, 4, 8, 16, 32, 64],
        "longest": [256, 1024, 4096, 8192, 16384, 65536],
        "raggedness": list(RAGGEDNESS),
        "policy": list(POLICIES),
    }
    _explore(policy_of, ranges, {"rows": rows, "longest": longest, "raggedness": raggedness, "policy": policy})


def explore_runs(
    rows: int = 8, longest: int = 4096, raggedness: str = "ragged", programs: int = 14, stage: str = "stream_k"
) -> None:
    """Sliders: rows, longest row, programs; raggedness, stage. Picture: what each program has of the line."""
    ranges = {
        "rows": (1, 16),
        "longest": [16, 64, 256, 1024, 4096, 16384, 65536],
        "raggedness": list(RAGGEDNESS),
        "programs": (1, 32),
        "stage": list(CUT),
    }
    first = {"rows": rows, "longest": longest, "raggedness": raggedness, "programs": programs, "stage": stage}
    _explore(runs_of, ranges, first)


def _explore(draw: Callable[..., list[Picture]], ranges: Mapping[str, Any], first: dict[str, Any]) -> None:
    """Show draw(**first), then controls. A range is (least, most) for a slider or a list of choices."""
    ranges = {name: _checked_range(name, values, first[name]) for name, values in ranges.items()}
    if display is None:
        print(*[picture.alt for picture in draw(**first)], sep="\n")
        return
    outputs = [display(picture, display_id=True) for picture in draw(**first)]
    if ipywidgets is None:
        print(MISSING)
        return
    controls = {name: _control(name, values, first[name]) for name, values in ranges.items()}

    def redraw(change: Any = None) -> None:
        values = {name: control.value for name, control in controls.items()}
        for output, bundle in zip(outputs, bundles(draw, values, len(outputs))):
            output.update(bundle, raw=True)

    for control in controls.values():
        control.observe(redraw, names="value")
    # what a page shows that knows the sliders only from a saved notebook
    display(ipywidgets.VBox(list(controls.values()))._repr_mimebundle_() | {"text/plain": NOT_LIVE}, raw=True)


def bundles(draw: Callable[..., list[Picture]], values: dict[str, Any], n_outputs: int) -> list[dict[str, str]]:
    """What the outputs show: pictures, or the error in words. An exception in a slider's callback would vanish."""
    try:
        return [picture._repr_mimebundle_() for picture in draw(**values)]
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        blank = {"text/html": "", "text/plain": ""}
        return [{"text/html": f"<pre>{html.escape(words)}</pre>", "text/plain": words}] + [blank] * (n_outputs - 1)


def _checked_range(name: str, values: Any, start: Any) -> Any:
    """The range if `start` lies in it; among numbers to choose from, it becomes one more."""
    if isinstance(values[0], str):
        if start not in values:
            raise ValueError(f"{name} = {start!r} must be one of {', '.join(map(repr, values))}")
        return values
    least, most = min(values), max(values)
    if isinstance(start, bool) or not hasattr(start, "__index__"):
        raise TypeError(f"{name} must be an int in {least} .. {most}, got {type(start).__name__}")
    if not least <= start <= most:
        raise ValueError(f"{name} = {start} must lie in {least} .. {most}")
    return sorted({*values, int(start)}) if isinstance(values, list) else values


def _control(name: str, values: Any, start: Any) -> Any:
    label = name.replace("_", " ")
    style = {"description_width": "90px"}
    if isinstance(values, list):
        kind = ipywidgets.SelectionSlider if isinstance(start, int) else ipywidgets.Dropdown
        return kind(description=label, options=values, value=start, style=style)
    least, most = values
    return ipywidgets.IntSlider(description=label, min=least, max=most, value=start, style=style)

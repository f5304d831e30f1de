"""Sliders. The only file that imports ipywidgets; without it the first picture shows, and a line says what to install.

Each explorer shows its picture at the starting values first, as an output of its own, so a saved notebook has it too.
Moving a slider replaces that picture by the live one in the same place. What a slider calls is a plain function from
numbers to pictures, tested as such.
"""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pkv.cache import PagedKVCache
from pkv.decoding import plan
from pkv.shapes import Shape
from pkv.viz.pages import draw_pages
from pkv.viz.plandrawing import draw_plan
from pkv.viz.programs import draw_programs
from pkv.viz.states import WAYS, Part, draw_merge
from pkv.viz.svg import Picture

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
LLAMA3_8B = Shape(n_q_heads=32, n_kv_heads=8, head_dim=128, page_size=16, dtype=torch.float16)
ORDERS: dict[str, tuple[int, ...]] = {
    "0, 1, 2, 3": (0, 1, 2, 3),
    "3, 2, 1, 0": (3, 2, 1, 0),
    "2, 0, 3, 1": (2, 0, 3, 1),
}


def ragged_lengths(n_rows: int, longest: int) -> list[int]:
    """Row lengths that differ: the longest, a half, a third, ... of it.

    >>> ragged_lengths(4, 12)
    [12, 6, 4, 3]
    """
    return [longest // (index + 1) for index in range(n_rows)]


def pages_of(rows: int, longest: int, page_size: int) -> list[Picture]:
    """The pages of a ragged batch, shuffled, with two free ones."""
    lengths = ragged_lengths(rows, longest)
    n_pages = sum(-(-length // page_size) for length in lengths)
    zeros = torch.zeros(rows, longest, 1, 1)
    return [
        draw_pages(PagedKVCache.from_dense(zeros, zeros, lengths, page_size=page_size, seed=0, n_pages=n_pages + 2))
    ]


def plan_of(rows: int, longest: int, splits: int, stage: str) -> list[Picture]:
    """A plan for a ragged batch of Llama-3-8B's shape on an RTX 3060, and its programs over the SMs."""
    made = plan(ragged_lengths(rows, longest), LLAMA3_8B, stage=stage, splits=splits, gpu="rtx3060")
    return [draw_plan(made), draw_programs(made)]


def merge_of(parts: Sequence[Part], order: str, way: str, steps: int) -> list[Picture]:
    """The first steps of one merge of four parts; where an empty state matters, there is one at the end."""
    members = ORDERS[order]
    if way == "empty state multiplied":
        end = max(part.end for part in parts)
        parts, members, steps = [*parts, Part(end, end, math.nan, -math.inf)], (*members, len(parts)), steps + 1
    return [draw_merge(parts, [members], way, steps)]


def explore_pages(rows: int = 3, longest: int = 12, page_size: int = 4) -> None:
    """Sliders: rows, longest row, page size. Picture: block table and pool."""
    ranges = {"rows": (1, rows, 6), "longest": (1, longest, 40), "page_size": [1, 2, 3, 4, 8, 16]}
    _explore(pages_of, ranges, {"rows": rows, "longest": longest, "page_size": page_size})


def explore_plan(rows: int = 4, longest: int = 8192, splits: int = 4, stage: str = "split_kv") -> None:
    """Sliders: rows, longest row, splits; stage. Pictures: the plan, and its programs over 28 SMs."""
    ranges = {
        "rows": (1, rows, 16),
        "longest": [256, 1024, 4096, 8192, 16384, 65536],
        "splits": (1, splits, 32),
        "stage": ["split_kv", "length_buckets"],
    }
    _explore(plan_of, ranges, {"rows": rows, "longest": longest, "splits": splits, "stage": stage})


def explore_merge(parts: Sequence[Part]) -> None:
    """Four non-empty parts; choices: the order, the way, right or wrong, and how many steps are drawn."""

    def draw(order: str, way: str, steps: int) -> list[Picture]:
        return merge_of(parts, order, way, steps)

    first = {"order": next(iter(ORDERS)), "way": next(iter(WAYS)), "steps": len(parts)}
    _explore(draw, {"order": list(ORDERS), "way": list(WAYS), "steps": (1, len(parts), len(parts))}, first)


def _explore(draw: Callable[..., list[Picture]], ranges: Mapping[str, Any], first: dict[str, Any]) -> None:
    """Show draw(**first), then controls. A range is (least, start, most) for a slider or a list of choices."""
    if display is None:
        print(*[picture.alt for picture in draw(**first)], sep="\n")
        return
    still = [display(picture, display_id=True) for picture in draw(**first)]
    if ipywidgets is None:
        print(MISSING)
        return
    live = ipywidgets.HTML()
    controls = {name: _control(name, values, first[name]) for name, values in ranges.items()}

    def redraw(change: Any = None) -> None:
        live.value = as_html(draw, {name: control.value for name, control in controls.items()})
        while still:  # the live picture takes the place of the first one
            still.pop().update({"text/html": "", "text/plain": ""}, raw=True)

    for control in controls.values():
        control.observe(redraw, names="value")
    display(ipywidgets.VBox([live, *controls.values()]))


def as_html(draw: Callable[..., list[Picture]], values: dict[str, Any]) -> str:
    """The pictures, or the error in words: an exception in a slider's callback would vanish."""
    try:
        return "".join(picture.html() for picture in draw(**values))
    except Exception as error:
        return f"<pre>{html.escape(f'{type(error).__name__}: {error}')}</pre>"


def _control(name: str, values: Any, start: Any) -> Any:
    label = name.replace("_", " ")
    style = {"description_width": "90px"}
    if isinstance(values, list):
        kind = ipywidgets.SelectionSlider if isinstance(start, int) else ipywidgets.Dropdown
        return kind(description=label, options=values, value=start, style=style)
    least, _, most = values
    return ipywidgets.IntSlider(description=label, min=least, max=most, value=start, style=style)

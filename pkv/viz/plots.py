"""Figures with axes: the only file that imports matplotlib, and only when something is drawn.

Decode attention on a roofline. One token of one row costs 4 * n_q_heads * head_dim flop (q . k, then weight * v, each a
multiply and an add) and kv_bytes_per_token bytes, so flop per byte do not depend on the length at all. With 32 query
heads, 8 KV heads and 2-byte elements they are 4, the group G: K and V are read once for G heads.
"""

import contextlib
import io
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from pkv.cards.known import load_gpu
from pkv.plans.shape import Shape
from pkv.viz.svg import FONT, GREY, INK, PALETTE, Picture

MISSING = "this figure needs matplotlib: pip install matplotlib, into the environment of this kernel"
MEASURED_IN = "DejaVu Sans"  # comes with matplotlib; the reader's browser may draw in a similar one
STYLE: Any = {
    "svg.hashsalt": "pkv",  # the same ids, so the same text, every time
    "svg.fonttype": "none",
    "font.family": MEASURED_IN,
    "font.size": 11,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@contextlib.contextmanager
def new_figure(width: float, height: float, title: str) -> Iterator[Any]:
    """A matplotlib Figure of so many inches, to be drawn on inside `with`; it belongs to no window and no pyplot."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(MISSING) from error
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.suptitle(
            "\n".join(textwrap.wrap(title, 78)), x=0.01, ha="left", fontsize=11.5, fontweight="bold", color=INK
        )
        yield figure


def add_boxes(axes: Any, boxes: Sequence[tuple[float, float, float, float]], **look: Any) -> None:
    """All boxes (x, y, width, height) in one look, as one shape with one entry in the legend."""
    from matplotlib.collections import PolyCollection

    corners = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h)] for x, y, w, h in boxes]
    axes.add_collection(PolyCollection(corners, **look))


def name_below(figure: Any) -> None:
    """A legend below the figure, each name once."""
    handles, names = figure.axes[0].get_legend_handles_labels()
    for axes in figure.axes[1:]:
        handles, names = (a + b for a, b in zip((handles, names), axes.get_legend_handles_labels(), strict=True))
    once = dict(zip(reversed(names), reversed(handles), strict=True))
    names = list(dict.fromkeys(names))
    if names:
        figure.legend(
            [once[name] for name in names], names, loc="outside lower center", ncols=4, frameon=False, fontsize=8
        )


@dataclass(frozen=True)
class Roofs:
    """What a card can do at most, by its data sheet."""

    title: str
    gb_per_s: float
    tflop_per_s: float  # fp16 or bf16, tensor cores, dense

    @property
    def ridge(self) -> float:
        """Flop per byte from which on arithmetic, not memory, is the limit."""
        return self.tflop_per_s * 1e3 / self.gb_per_s

    def attainable(self, flop_per_byte: float) -> float:
        """TFLOP/s under both roofs."""
        return min(self.tflop_per_s, flop_per_byte * self.gb_per_s / 1e3)


def roofs_of(name: str) -> Roofs:
    """The roofs of a shipped profile.

    >>> round(roofs_of("h200").ridge)
    206
    """
    load_gpu(name)  # an unknown name is refused
    fields = json.loads((resources.files("pkv") / "data" / "gpus" / f"{name}.json").read_text(encoding="utf-8"))
    return Roofs(fields["title"], fields["nominal_gb_per_s"], fields["nominal_fp16_tflop_per_s"])


def flop_per_token(shape: Shape) -> int:
    """Arithmetic for one cached token of one row, all query heads."""
    return 4 * shape.n_q_heads * shape.head_dim


def flop_per_byte(shape: Shape) -> float:
    """The arithmetic intensity of decode attention; q and the result are small beside K and V.

    >>> flop_per_byte(Shape(32, 8, 128, 16, "float16"))
    4.0
    """
    return flop_per_token(shape) / shape.kv_bytes_per_token


def draw_roofline(shapes: Mapping[str, Shape], gpus: Sequence[str] = ("rtx3060", "h200")) -> Picture:
    """Where decode attention with these shapes lies under the roofs of these cards."""
    gpus = [gpus] if isinstance(gpus, str) else gpus
    if not shapes or not gpus:
        raise ValueError(
            f"{'gpus' if shapes else 'shapes'} is empty: pass at least one, such as "
            + ('gpus=["h200"]' if shapes else '{"Llama 3 8B": Shape(32, 8, 128, 16, "float16")}')
        )
    cards = [roofs_of(name) for name in gpus]
    points = {name: flop_per_byte(shape) for name, shape in shapes.items()}
    far = max(card.ridge / max(points.values()) for card in cards)
    near = min(card.ridge / max(points.values()) for card in cards)
    title = f"Decode attention is bound by memory: {near:.0f} to {far:.0f} times left of the ridge at best"
    if near < 1:
        reached = sum(card.ridge < max(points.values()) for card in cards)
        title = f"Right of the ridge of {reached} of {len(cards)} cards, where arithmetic is the limit, not memory"
    with new_figure(7.2, 4.8, title) as figure:
        axes = figure.add_subplot()
        _draw_roofs(axes, cards)
        _draw_points(axes, cards, points)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    ridges = "; ".join(
        f"{card.title}: {card.gb_per_s:g} GB/s, {card.tflop_per_s:g} TFLOP/s, ridge at {card.ridge:.0f} flop/byte"
        for card in cards
    )
    marks = ", ".join(f"{name}: {value:g} flop/byte" for name, value in points.items())
    svg = buffer.getvalue().decode().replace(f"'{MEASURED_IN}'", FONT)
    return Picture(svg, f"{title}. {marks}. {ridges}.")


def _draw_roofs(axes: Any, cards: Sequence[Roofs]) -> None:
    left, right = 0.5, 2048.0
    for index, card in enumerate(cards):
        style = ("-", "--", "-.")[index % 3]
        xs = [left, card.ridge, right]
        axes.plot(xs, [card.attainable(x) for x in xs], style, color=PALETTE[index % len(PALETTE)], linewidth=2)
        axes.annotate(
            f"{card.title}\n{card.gb_per_s:g} GB/s, {card.tflop_per_s:g} TFLOP/s fp16",
            (right, card.tflop_per_s), xytext=(0, 5), textcoords="offset points", ha="right", va="bottom", fontsize=10,
        )  # fmt: skip
        axes.annotate(
            f"ridge: {card.ridge:.0f} flop/byte", (card.ridge, card.tflop_per_s),
            xytext=(6, -16), textcoords="offset points", fontsize=10, color=GREY,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    ticks = [2**power for power in range(-1, 12, 1)]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks(values := [0.1, 1, 10, 100, 1000], [f"{value:g}" for value in values])
    axes.set_ylim(0.1, 3000)
    axes.minorticks_off()
    axes.set_xlabel("arithmetic intensity: flop per byte read")
    axes.set_ylabel("attainable TFLOP/s")
    axes.grid(color="#e6e6e6")


def _draw_points(axes: Any, cards: Sequence[Roofs], points: Mapping[str, float]) -> None:
    for number, (name, value) in enumerate(points.items()):
        heights = [card.attainable(value) for card in cards]
        axes.plot([value] * len(cards), heights, linestyle="", marker="osD^v"[number % 5], color=INK, markersize=7)
        axes.plot([value, value], [0.1, max(heights)], ":", color=GREY, linewidth=1)
        axes.annotate(
            name, (value, 0.1), xytext=(4, 6), textcoords="offset points", fontsize=10, rotation=90, va="bottom",
            parse_math=False,
        )  # fmt: skip

"""The few shapes that every picture is made of, and the picture itself: SVG text with an alternative in words.

Nothing here needs matplotlib. The same input gives the same text, byte for byte, so a picture in a notebook, behind a
slider and in a test is one string.
"""

import base64
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

WIDTH = 700  # JupyterLab's output area in a window of 1150 pixels: wider pictures would shrink there, text and all
SMALL = 11  # pixels: the smallest text anywhere
FONT = "Verdana, DejaVu Sans, sans-serif"
INK, GREY, FAINT, EDGE = "#1a1a1a", "#595959", "#d5d5d5", "#6e6e6e"
# Okabe and Ito's colours, which colour-blind readers tell apart; black is left to text. Never without a label or hatch.
NO_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # not even escaped
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")


@dataclass(frozen=True, repr=False)
class Picture:
    """An SVG and the same in words. In a notebook it is an <img>, because inline SVG is dropped from saved outputs."""

    svg: str
    alt: str

    def __post_init__(self) -> None:
        for name in ("svg", "alt"):
            object.__setattr__(self, name, NO_XML.sub("\ufffd", getattr(self, name)))

    def html(self) -> str:
        """An <img> element that carries the whole picture."""
        data = base64.b64encode(self.svg.encode()).decode()
        size = re.search(r'width="\d+" height="\d+"', self.svg)  # known before it loads, so that the page does not jump
        return (
            f'<img alt={quoteattr(self.alt)} {size[0] + " " if size else ""}style="max-width:100%;height:auto" '
            f'src="data:image/svg+xml;base64,{data}"/>'
        )

    def save(self, path: "str | Path") -> None:
        """Write the SVG to a file."""
        Path(path).write_text(self.svg, encoding="utf-8")

    def __repr__(self) -> str:
        return f"Picture({self.alt!r})"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.html(), "text/plain": self.alt}


def text_width(text: str, size: float = 12) -> float:
    """A little more than the text takes, in pixels; the reader's font is not known."""
    return len(text) * size * 0.62


@dataclass
class Sheet:
    """Collects shapes from the top down. `y` is where the next one goes."""

    width: int = WIDTH
    y: float = 8
    shapes: list[str] = field(default_factory=list)

    def heading(self, title: str, notes: list[str]) -> None:
        """One claim in bold, then what the reader must know to read the picture."""
        for line in textwrap.wrap(title, int((self.width - 16) / (15 * 0.64))):
            self.y += 20
            self.text(8, self.y, line, size=15, weight="bold")
        for note in notes:
            for line in textwrap.wrap(note, int((self.width - 16) / (12 * 0.6))):
                self.y += 18
                self.text(8, self.y, line, size=12, fill=GREY)
        self.y += 18

    def text(self, x: float, y: float, text: str, *, size: float = 12, fill: str = INK, anchor: str = "start",
             weight: str = "normal", halo: bool = False) -> None:  # fmt: skip
        """Text with its baseline at y; a halo keeps it legible on a hatch."""
        extra = ' stroke="#fff" stroke-width="3" paint-order="stroke" stroke-linejoin="round"' if halo else ""
        if anchor != "start":
            extra += f' text-anchor="{anchor}"'
        if weight != "normal":
            extra += f' font-weight="{weight}"'
        self.shapes.append(
            f'<text x="{x:.4g}" y="{y:.4g}" font-size="{size:g}" fill="{fill}"{extra}>{escape(text)}</text>'
        )

    def row_name(self, x: float, y: float, text: str) -> None:
        """A row's name, ending at x; smaller, then in two lines, where it would not fit."""
        if text_width(text, SMALL) < x:
            self.text(x, y, text, size=12 if text_width(text, 12) < x else SMALL, anchor="end")
            return
        for part, line in zip(text.split(": ", 1), (y - 6, y + 6)):
            self.text(x, line, part, size=SMALL, anchor="end")

    def box(self, x: float, y: float, width: float, height: float, index: int) -> None:
        """A filled box in colour `index`; after each round of colours, and for odd ones, the hatch changes."""
        colour = PALETTE[index % len(PALETTE)]
        hatch = (index + index // len(PALETTE)) % 2
        place = f'x="{x:.5g}" y="{y:.5g}" width="{max(width, 0.5):.5g}" height="{height:.5g}"'
        edge = f' stroke="{EDGE}"' if width > 4 else ""  # thin boxes would be edge and nothing else
        self.shapes.append(f'<rect {place} fill="{colour}" fill-opacity=".5"{edge}/>')
        if hatch and width > 5 and height > 5:
            self.shapes.append(f'<rect {place} fill="url(#hatch)"/>')

    def hollow(self, x: float, y: float, width: float, height: float) -> None:
        """A dashed outline: something that is there and holds nothing."""
        place = f'x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}"'
        self.shapes.append(f'<rect {place} fill="#fff" stroke="{GREY}" stroke-dasharray="3 2"/>')

    def unused(self, x: float, y: float, width: float, height: float) -> None:
        """A grey cross-hatched box: memory that belongs to something and is not used."""
        place = f'x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}"'
        self.shapes.append(f'<rect {place} fill="url(#unused)" stroke="{GREY}"/>')

    def frame(self, x: float, y: float, width: float, height: float) -> None:
        """A bold outline around what the reader should look at."""
        place = f'x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}"'
        self.shapes.append(f'<rect {place} fill="none" stroke="{INK}" stroke-width="2.4"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str = FAINT, dash: str = "") -> None:
        extra = f' stroke-dasharray="{dash}"' if dash else ""
        self.shapes.append(f'<path d="M{x1:.5g} {y1:.5g}L{x2:.5g} {y2:.5g}" stroke="{colour}" fill="none"{extra}/>')

    def halo_line(self, x1: float, x2: float, y: float) -> None:
        """A thick level line with white on both sides, which stands out from any pattern below it."""
        for colour, width in (("#fff", 4.6), (INK, 2.2)):
            self.path(f"M{x1:.5g} {y:.5g}H{x2:.5g}", colour, width)

    def path(self, d: str, colour: str = INK, width: float = 1.0) -> None:
        self.shapes.append(f'<path d="{d}" stroke="{colour}" stroke-width="{width:g}" fill="none"/>')

    def finish(self, alt: str) -> Picture:
        """The picture, on white paper, so that it reads on a dark page too."""
        height = round(self.y + 10)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{height}" '
            f'viewBox="0 0 {self.width} {height}" font-family="{FONT}" role="img" aria-label={quoteattr(alt)}>'
            f"<title>{escape(alt)}</title><defs>"
            '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            '<path d="M0 0V6" stroke="#000" stroke-opacity=".35" stroke-width="1.6"/></pattern>'
            '<pattern id="unused" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)">'
            '<rect width="6" height="6" fill="#f4f4f4"/>'
            '<path d="M0 0V6M0 3H6" stroke="#999" stroke-width=".8"/></pattern>'
            f'</defs><rect width="{self.width}" height="{height}" fill="#fff"/>'
        )
        return Picture(head + "\n".join(["", *self.shapes, "</svg>"]) + "\n", alt)


def token_ticks(longest: int, n_most: int = 8) -> list[int]:
    """Round token counts from 0 to `longest`, at most n_most steps apart; powers of two, as pages and tiles are.

    >>> token_ticks(40, 5)
    [0, 8, 16, 24, 32, 40]
    """
    step = 1
    while step * n_most < longest:
        step *= 2
    return list(range(0, longest + 1, step))


def stack(pictures: Sequence[Picture]) -> Picture:
    """Pictures below one another, as one."""
    shapes, y = [], 0
    for picture in pictures:
        height = int(picture.svg.split('height="', 1)[1].split('"', 1)[0])
        shapes.append(picture.svg.replace("<svg ", f'<svg y="{y}" ', 1))
        y += height
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}" role="img">'
    return Picture(f"{head}\n{''.join(shapes)}</svg>\n", " ".join(picture.alt for picture in pictures))

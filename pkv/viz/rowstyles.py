"""How rows look in pictures of schedules: a colour each, and a texture, so that they differ without colour too.

In grey the palette has three shades: blue, green and vermilion are dark, orange, pink and sky light, yellow is pale.
So rows 0 and 2 (blue, green) look alike in grey, and row 2 is striped. That makes 14 styles. Of more rows, those of
about the same length share one: rows of 4,097 to 8,192 tokens look alike, and the longest come first.

All pieces of one style are one path, so that a picture of a thousand pieces stays small. `data-key` names the style.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pkv.viz.svg import GREY, INK, PALETTE, SMALL, Sheet, text_width
from pkv.wording.counts import count_of

MERGE, EMPTY = -1, -2  # keys beside the rows' own
OPACITY = 0.8
# slanted, since upright stripes would look like the bounds of items, and level ones are lost where pieces are low
SLANTS = {"sparse": "M-2 2L2 -2M0 8L8 0M6 10L10 6", "dense": "M-2 2L2 -2M-2 6L6 -2M0 8L8 0M2 10L10 2M6 10L10 6"}
CHECKS = "".join(f"M{x} {y}h2v2h-2z" for y in range(0, 8, 2) for x in range(y % 4, 8, 4))
TEXTURES = {
    "plain": "",
    "sparse": f'<path d="{SLANTS["sparse"]}" stroke="#000" stroke-opacity=".6" stroke-width="1.1"/>',
    "dense": f'<path d="{SLANTS["dense"]}" stroke="#000" stroke-opacity=".6" stroke-width="1"/>',
    "checked": f'<path d="{CHECKS}"/>',
    "white": f'<path d="{SLANTS["dense"]}" stroke="#fff" stroke-opacity=".85" stroke-width="1.2"/>',
}


class Style(NamedTuple):
    """A colour and one of TEXTURES."""

    colour: str
    texture: str


# shades alike in grey get different textures
FIRST_ROUND = ("plain", "plain", "sparse", "sparse", "dense", "dense", "plain")
SECOND_ROUND = ("white", "white", "dense", "dense", "sparse", "sparse", "dense")
STYLES = tuple(Style(*pair) for textures in (FIRST_ROUND, SECOND_ROUND) for pair in zip(PALETTE, textures, strict=True))


def keys_of(lengths: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int64], list[tuple[int, str]]]:
    """A key for each row, which style_of turns into its look, and for each key in use what it stands for.

    >>> keys_of(np.array([40, 5], dtype=np.int32))[1]
    [(0, 'row 0: 40'), (1, 'row 1: 5')]
    """
    if len(lengths) <= len(STYLES):
        return np.arange(len(lengths)), [(row, f"row {row}: {length:,}") for row, length in enumerate(lengths.tolist())]
    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)  # each holds lengths up to 2 ** power
    keys = np.minimum(powers.max() - powers, len(STYLES) - 1)
    names = []
    for key in np.unique(keys).tolist():
        most = 2 ** int(powers.max() - key)
        least = f"{most // 2 + 1:,} to " if key < len(STYLES) - 1 and most > 1 else "up to "
        names.append((key, f"{least}{count_of(most, 'token')}"))
    return keys, names


def style_of(key: int) -> Style:
    """The look of a key; MERGE is black, EMPTY checked, so that no row looks like it in grey.

    >>> style_of(0)
    Style(colour='#0072B2', texture='plain')
    """
    return STYLES[key] if key >= 0 else Style(INK, "plain") if key == MERGE else Style("#ffffff", "checked")


class Patches:
    """Rectangles of a sheet, collected by key; `draw` adds one path per key, with white edges or without."""

    def __init__(self) -> None:
        self.paths: dict[int, list[str]] = {}

    def add(self, key: int, x: float, y: float, width: float, height: float) -> None:
        width = max(width, 0.3)
        self.paths.setdefault(key, []).append(f"M{x:.5g} {y:.5g}h{width:.4g}v{height:.4g}h-{width:.4g}z")

    def draw(self, sheet: Sheet, edges: bool = True) -> None:
        for key, paths in sorted(self.paths.items(), key=lambda entry: (entry[0] < 0, entry)):
            style = style_of(key)
            fill = style.colour
            if style.texture != "plain":
                name = f"key{key}"
                fill = f"url(#{name})"
                sheet.shapes.append(
                    f'<defs><pattern id="{name}" width="8" height="8" patternUnits="userSpaceOnUse">'
                    f'<rect width="8" height="8" fill="{style.colour}"/>{TEXTURES[style.texture]}</pattern></defs>'
                )
            look = f' fill-opacity="{OPACITY:g}"' if key >= 0 else ""
            look += ' stroke="#fff" stroke-width=".5"' if edges and key != MERGE else ""
            sheet.shapes.append(f'<path data-key="{key}" d="{"".join(paths)}" fill="{fill}"{look}/>')


def draw_legend(sheet: Sheet, entries: Sequence[tuple[int, str]], right: float) -> None:
    """A swatch and words for each (key, words), in lines that end before `right`."""
    patches, x = Patches(), 8.0
    for key, words in entries:
        width = 24 + text_width(words, SMALL) + 10
        if x + width > right and x > 8:
            x = 8.0
            sheet.y += 18
        patches.add(key, x, sheet.y, 18, 11)
        sheet.text(x + 23, sheet.y + 10, words, size=SMALL, fill=GREY)
        x += width
    patches.draw(sheet)
    sheet.y += 18 if entries else 0

"""Draw the README's picture again: python -m pkv.viz docs/plan.svg"""

import sys
from pathlib import Path

import torch

from pkv.decoding import plan
from pkv.shapes import Shape
from pkv.viz.plandrawing import draw_plan
from pkv.viz.svg import Picture, stack

LENGTHS = [900, 120, 70, 300, 600]


def draw_readme() -> Picture:
    """Two stages, the same rows: all cut like the longest, or in shares of equal length that all hold tokens."""
    shape = Shape(n_q_heads=32, n_kv_heads=8, head_dim=128, page_size=16, dtype=torch.float16)
    like_the_longest = plan(LENGTHS, shape, stage="split_kv", splits=4, gpu="rtx3060")
    equal_shares = plan(LENGTHS, shape, stage="workqueue", gpu="rtx3060")
    return stack([draw_plan(like_the_longest), draw_plan(equal_shares)])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m pkv.viz FILE.svg")
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    draw_readme().save(target)

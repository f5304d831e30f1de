"""Draw one of the README's pictures again, or write a page of docs and its figure, from records and data.

python -m pkv.viz docs/plan.svg         # or docs/results.svg
python -m pkv.viz docs/machines.md      # and docs/machines.svg
"""

import sys
from pathlib import Path

import torch

from pkv.bench.shipped import shipped_records
from pkv.decoding import plan
from pkv.shapes import Shape
from pkv.viz.figures import draw_recorded
from pkv.viz.machinespage import page_of
from pkv.viz.plandrawing import draw_plan
from pkv.viz.svg import Picture, stack

LENGTHS = [900, 120, 70, 300, 600]


def draw_readme() -> Picture:
    """Two stages, the same rows: all cut like the longest, or in shares of equal length that all hold tokens."""
    shape = Shape(n_q_heads=32, n_kv_heads=8, head_dim=128, page_size=16, dtype=torch.float16)
    like_the_longest = plan(LENGTHS, shape, stage="split_kv", splits=4, gpu="rtx3060")
    equal_shares = plan(LENGTHS, shape, stage="workqueue", gpu="rtx3060")
    return stack([draw_plan(like_the_longest), draw_plan(equal_shares)])


def draw_results() -> Picture:
    """Every engine over the best of FlashInfer on the paper's traces: an H200, and 28 of its SMs."""
    return stack([draw_recorded("ratios", n_sms=132), draw_recorded("ratios", n_sms=28)])


README_PICTURES = {"plan.svg": draw_readme, "results.svg": draw_results}
PAGE = "machines.md"

if __name__ == "__main__":
    if len(sys.argv) != 2 or Path(sys.argv[1]).name not in (*README_PICTURES, PAGE):
        sys.exit(f"usage: python -m pkv.viz DIR/NAME, with NAME one of {', '.join((*README_PICTURES, PAGE))}")
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.name == PAGE:
        page, picture = page_of(shipped_records())
        target.write_text(page, encoding="utf-8")
        picture.save(target.with_suffix(".svg"))
    else:
        README_PICTURES[target.name]().save(target)

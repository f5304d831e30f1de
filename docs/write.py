"""Draw one of the README's pictures again, or write a page of docs and its figure, from records and data.

python -m pkv.viz docs/plan.svg         # or docs/results.svg
python -m pkv.viz docs/machines.md      # and docs/machines.svg
python -m pkv.viz docs/goals.md
"""

import sys
from pathlib import Path

import goalspage
import machinespage
import torch
from goals import goals

from pkv.bench.records.results import results_of, sound
from pkv.bench.records.shipped import shipped_part, shipped_records
from pkv.decoding import plan
from pkv.plans.shape import Shape
from pkv.viz.figures import draw_recorded
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


def write_machines(target: Path) -> None:
    """The page, and its figure beside it."""
    page, picture = machinespage.page_of(shipped_records())
    target.write_text(page, encoding="utf-8")
    picture.save(target.with_suffix(".svg"))


def write_goals(target: Path) -> None:
    """The page."""
    target.write_text(goals_page(), encoding="utf-8")


def goals_page() -> str:
    """docs/goals.md, from the records that ship."""
    grids = [shipped_part("full", 132), shipped_part("paper", 132), shipped_part("paper", 28)]
    runs = [run for records in grids for run in records.runs.values()]
    return goalspage.page_of(goals(*(results_of(sound(records)) for records in grids)), runs)


README_PICTURES = {"plan.svg": draw_readme, "results.svg": draw_results}
PAGES = {"machines.md": write_machines, "goals.md": write_goals}

if __name__ == "__main__":
    if len(sys.argv) != 2 or Path(sys.argv[1]).name not in (*README_PICTURES, *PAGES):
        sys.exit(f"usage: python -m pkv.viz DIR/NAME, with NAME one of {', '.join((*README_PICTURES, *PAGES))}")
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.name in PAGES:
        PAGES[target.name](target)
    else:
        README_PICTURES[target.name]().save(target)

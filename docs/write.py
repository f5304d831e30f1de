"""Write the pages of docs and the README's pictures again, from the records and data that ship.

    python docs/write.py                 # all
    python docs/write.py machines.md     # one; docs/machines.svg comes with it

A tool of the project's own pages, and no part of the library: whoever installs pkv has no pages to renew.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # this clone's pkv

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

DOCS = Path(__file__).resolve().parent
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


def write(name: str) -> None:
    """The picture or page of that name, and what comes with it."""
    if name in PAGES:
        PAGES[name](DOCS / name)
    else:
        README_PICTURES[name]().save(DOCS / name)
    print(f"docs/{name}")


if __name__ == "__main__":
    names = (*README_PICTURES, *PAGES)
    if unknown := [name for name in sys.argv[1:] if name not in names]:
        sys.exit(f"{unknown[0]} is none of {', '.join(names)}")
    for name in sys.argv[1:] or names:
        write(name)

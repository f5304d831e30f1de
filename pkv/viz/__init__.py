"""Pictures of plans, pages, programs, states, timelines and choices: functions from values to a Picture, without state.

>>> from pkv import Shape, plan, viz
>>> picture = viz.draw_plan(plan([5, 40], Shape(4, 2, 64, 4, "float16"), "row_local", splits=2, gpu="rtx3060"))
>>> picture.alt.split(";")[0]
'row_local: 2 rows become 4 items, 8 programs, 2 launches (1 decode, 1 merge)'
"""

from pkv.viz.bars import Bar, draw_candidates, draw_regret
from pkv.viz.choices import draw_choice
from pkv.viz.figures import FIGURES, draw_recorded
from pkv.viz.notebook import plan_mimebundle, register
from pkv.viz.pages import draw_pages
from pkv.viz.plandrawing import draw_plan, plan_svg
from pkv.viz.plots import draw_roofline, flop_per_byte, flop_per_token, roofs_of
from pkv.viz.programs import draw_programs
from pkv.viz.queue import draw_queue
from pkv.viz.rectangles import draw_rectangle
from pkv.viz.regimes import Cell, draw_regimes
from pkv.viz.runs import draw_runs
from pkv.viz.scheduleplots import plot_regimes, plot_regret, plot_timeline
from pkv.viz.states import WAYS, Part, draw_merge, merge_steps
from pkv.viz.svg import Picture
from pkv.viz.timelines import draw_timeline, draw_timelines

__all__ = [
    "FIGURES",
    "WAYS",
    "Bar",
    "Cell",
    "Part",
    "Picture",
    "draw_candidates",
    "draw_choice",
    "draw_merge",
    "draw_pages",
    "draw_plan",
    "draw_programs",
    "draw_queue",
    "draw_recorded",
    "draw_rectangle",
    "draw_regimes",
    "draw_regret",
    "draw_roofline",
    "draw_runs",
    "draw_timeline",
    "draw_timelines",
    "flop_per_byte",
    "flop_per_token",
    "merge_steps",
    "plan_mimebundle",
    "plan_svg",
    "plot_regimes",
    "plot_regret",
    "plot_timeline",
    "register",
    "roofs_of",
]

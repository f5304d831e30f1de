"""Plans and caches draw themselves in a notebook, once IPython knows how.

`import pkv` calls `register()` where IPython is loaded. Nothing is imported for it, and nothing is drawn before the
notebook asks.
"""

import sys
from typing import Any

from pkv.plans.plan import Plan


def register() -> bool:
    """Teach the running IPython to draw a Plan; True if there is one. Printing a plan still gives its table."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None and hasattr(module, "get_ipython") else None
    if shell is None:
        return False
    shell.display_formatter.mimebundle_formatter.for_type(Plan, plan_mimebundle)
    return True


def plan_mimebundle(plan: Plan, include: Any = None, exclude: Any = None) -> dict[str, str]:
    """The picture for a page that can show it, the table for one that cannot."""
    from pkv.viz.plandrawing import draw_plan

    return {"text/html": draw_plan(plan).html(), "text/plain": str(plan)}

"""A launch in Triton's interpreter, which is one for all threads, and does not round to bfloat16 as a GPU does."""

from typing import Any

import torch

from pkv.cache.paged import PagedKVCache
from pkv.plans.plan import Plan
from pkv.runtime.locks import Lock

# A launch replaces functions of triton.language by interpreted ones, and puts them back at its end. In a child of a
# fork that came in between they stay replaced. That does no harm: nothing is compiled there, and each launch replaces
# them anew.
INTERPRETER = Lock()


@torch.no_grad()
def launch_interpreted(
    launch: Any, q: torch.Tensor, cache: PagedKVCache, plan: Plan, scale: float, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """launch(...) for one thread at a time; torch rounds to bfloat16."""
    target = torch.empty_like(out, dtype=torch.float32) if out.dtype == torch.bfloat16 else out
    try:
        with INTERPRETER:
            launch(q, cache, plan, scale, target, lse)
    except Exception as error:
        if not getattr(error, "__notes__", None):  # else a part is to blame
            error.add_note("`pkv doctor` tests Triton's interpreter, and names versions that do not go together.")
        raise
    if target is not out:
        out.copy_(target)

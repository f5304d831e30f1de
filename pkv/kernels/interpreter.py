"""Launches in Triton's interpreter: one thread at a time, with bfloat16 results rounded by torch, as on a GPU."""

from typing import Any

import torch

from pkv.cache.paged import PagedKVCache
from pkv.plans.features import Values
from pkv.plans.plan import Plan
from pkv.runtime.locks import Lock

# A launch replaces functions of triton.language by interpreted ones, and restores them at its end. If the process forks
# in between, they stay replaced in the child. That does no harm: nothing is compiled there, and each launch replaces
# them again.
INTERPRETER = Lock()


@torch.no_grad()
def launch_interpreted(
    launch: Any, q: torch.Tensor, cache: PagedKVCache, plan: Plan, scale: float, out: torch.Tensor, lse: torch.Tensor,
    values: Values,
) -> None:  # fmt: skip
    """Call launch(...), one thread at a time; a bfloat16 result is computed in fp32, and torch rounds it."""
    target = torch.empty_like(out, dtype=torch.float32) if out.dtype == torch.bfloat16 else out
    try:
        with INTERPRETER:
            launch(q, cache, plan, scale, target, lse, values=values)
    except Exception as error:
        if not getattr(error, "__notes__", None):  # a note says that a user's part is to blame
            error.add_note("`pkv doctor` tests Triton's interpreter, and names versions that do not go together.")
        raise
    if target is not out:
        out.copy_(target)

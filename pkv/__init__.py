"""pkv: paged decode attention for long contexts, as a library and as a course.

>>> import torch, pkv
>>> k = v = torch.zeros(2, 10, 2, 64)  # 2 rows, up to 10 tokens, 2 KV heads, head_dim 64
>>> cache = pkv.PagedKVCache.from_dense(k, v, lengths=[3, 10], page_size=4)
>>> pkv.decode(torch.zeros(2, 8, 64), cache).shape
torch.Size([2, 8, 64])
"""

import sys

from pkv._triton import INTERPRETED  # first: chooses the interpreter where there is no GPU
from pkv.cache.paged import PagedKVCache
from pkv.cards.simulation import Timeline, simulate
from pkv.decoding import decode, plan, prepare, run
from pkv.kernels.merging import merge
from pkv.kernels.parts import Parts
from pkv.plans.counters import Counters
from pkv.plans.features import Features
from pkv.plans.gpu import GpuProfile
from pkv.plans.plan import Plan
from pkv.plans.shape import Shape
from pkv.runtime.tracers import uncompiled
from pkv.stages import STAGES
from pkv.stages.s4_adaptive import explain
from pkv.step import Step

__version__ = "0.1.0"
__all__ = [
    "INTERPRETED", "STAGES", "Counters", "Features", "GpuProfile", "PagedKVCache", "Parts", "Plan", "Shape", "Step",
    "Timeline",
    "decode", "explain", "merge", "plan", "prepare", "run", "simulate",
]  # fmt: skip

# What is plain torch may be compiled; all else runs kernels, or computes with numpy on the host.
uncompiled(decode, explain, plan, prepare, run, simulate, *(x for x in globals().values() if isinstance(x, type)))

if "IPython" in sys.modules:  # in a notebook a plan draws itself
    from pkv.viz.notebook import register

    register()

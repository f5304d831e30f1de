"""Tracers and transforms of torch's calls, which cannot see kernels that are launched without torch.

torch.compile must not enter pkv's functions. `uncompiled` tells it so in advance, without importing its compiler, which
takes seconds, and at no cost per call. Recorders (jit.trace, make_fx, export) would keep the numbers of one call as
constants. Tensors under a transform (vmap, grad) or in FakeTensorMode have no memory. All of these are refused by name.
"""

from functools import cached_property
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame

WHY_UNCOMPILED = "pkv's functions run eagerly, between two graphs: compile without fullgraph"
OUTSIDE = "its numbers would be recorded as constants: call it outside of what is recorded"
REMEDIES = {
    "torch.jit.trace": OUTSIDE,
    "make_fx": OUTSIDE,
    "torch.export": "its kernels cannot be exported: export what comes before it and what comes after it",
    "FakeTensorMode": "fake tensors hold no numbers: pkv.plan(lengths, pkv.Shape(...)) needs none, all else does",
    "torch.func.functionalize": OUTSIDE,
    "torch.vmap": "pass the batch as rows: q [n_rows, n_q_heads, head_dim], and a cache of as many rows",
    "torch.func.grad or its like": "it has no gradients; torch.nn.functional.scaled_dot_product_attention has some",
}
TRANSFORMS = {"Vmap": "torch.vmap", "Functionalize": "torch.func.functionalize"}  # all other transforms differentiate


def uncompiled(*things: Any) -> None:
    """Make torch.compile break its graph where it meets one of these functions, or methods of these classes.

    The function then runs eagerly, with everything that it calls.
    """
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for thing in things:
        if isinstance(thing, type):
            own = [base for base in thing.__mro__ if base.__module__.split(".")[0] == __name__.split(".")[0]]
            uncompiled(*(attribute for base in own for attribute in vars(base).values()))
        elif isinstance(thing, (classmethod, staticmethod)):
            uncompiled(thing.__func__)
        elif isinstance(thing, property):
            uncompiled(thing.fget)
        elif isinstance(thing, cached_property):
            uncompiled(thing.func)
        elif isinstance(thing, FunctionType) and not hasattr(thing, "__wrapped__"):  # else its code is a decorator's
            thing.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=WHY_UNCOMPILED)
            eval_frame.set_code_exec_strategy(thing.__code__, skip)


def is_traced() -> bool:
    """True if something may be recording or transforming torch's calls, or faking tensors. Called in every decode()."""
    return bool(
        torch._C._len_torch_dispatch_stack() or torch._C._is_tracing() or torch._C._functorch.peek_interpreter_stack()
    )


def refuse_tracers(what: str, **tensors: Any) -> None:
    """Raise TypeError if `what`, which accesses memory itself, is used under a tracer or with a tracer's tensors."""
    if is_traced() and (tracer := _tracer()):
        raise TypeError(f"{what} cannot be used inside of {tracer}: {REMEDIES[tracer]}")
    for name, tensor in tensors.items():
        kind = type(tensor)
        if kind.__module__ == "torch.fx.proxy":
            raise TypeError(f"{what} cannot be used inside of torch.fx.symbolic_trace: {OUTSIDE}")
        if not isinstance(tensor, Tensor):
            continue
        left_over = torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # of a transform that has ended
        if left_over or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise TypeError(
                f"{what}: {name} is a {kind.__name__}, which has no memory of its own: pass the plain tensor it wraps"
            )


def _tracer() -> str | None:
    """Return the name of the active tracer or None; modes that only watch, such as an operation counter, are none."""
    if torch._C._is_tracing():
        return "torch.jit.trace"
    keys = torch._C._TorchDispatchModeKey
    fake, proxy, functional = (torch._C._get_dispatch_mode(key) for key in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL))
    if torch.compiler.is_exporting() and (fake or proxy or functional):
        return "torch.export"
    if proxy or functional:
        return "make_fx"
    if fake:
        return "FakeTensorMode"
    stack = torch._C._functorch.peek_interpreter_stack()
    return TRANSFORMS.get(stack.key().name, "torch.func.grad or its like") if stack else None

"""Repeated decode steps: a call of a kind that was seen before skips the checks and goes straight to the kernels.

The kind of a call is its sizes, strides, types, devices and alignment. The checks, the plan, the scale and most kernel
arguments depend on the kind alone, not on what the tensors hold. The first call of a kind works them out on the host,
which takes longer than many steps take on the GPU, and they are kept here. Later calls of the kind launch the kernels
from here. Two things may still differ between calls of one kind, so every call looks at them: which GPU is the current
one, and whether `out` overlaps other memory.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch

from pkv._triton import INTERPRETED
from pkv.arguments import address_range, overlap
from pkv.cache.paged import PagedKVCache
from pkv.cards.known import gpu_of
from pkv.kernels.launching import COPY_BYTES, KernelArgs, addresses_of_cache, tensors_of_cache
from pkv.plans.plan import Plan
from pkv.runtime.memory import Memory
from pkv.stages import REPEATED

KINDS = Memory()  # for each cache: {kind of a call: RepeatedCall}
MOST_KINDS = 64  # kept for one cache
GPU = "cuda"  # calls are kept for devices of this type only


class RepeatedCall(NamedTuple):
    """What all calls of one kind share. q_bytes, out_bytes: the bytes from a tensor's first to its last."""

    launch: Callable[[KernelArgs], None]
    args: KernelArgs
    q_bytes: int
    out_bytes: int
    cache_memory: tuple[tuple[int, int], ...]


def kind_of_call(
    q: torch.Tensor, cache: PagedKVCache, stage: str | None, scale: float | None, out: torch.Tensor | None
) -> Hashable | None:
    """Return all that the checks and the kernel arguments depend on; None if the call must go through the checks."""
    if (
        type(cache) is not PagedKVCache
        or type(scale) not in (float, type(None))
        or type(stage) not in (str, type(None))
    ):
        return None
    of_tensors = []
    try:
        for x in (q,) if out is None else (q, out):
            if type(x) is not torch.Tensor or x.device.type != GPU or x.layout != torch.strided or x.is_neg():
                return None
            alignment = x.data_ptr() % COPY_BYTES
            of_tensors.append((x.shape, x.stride(), x.dtype, x.device, alignment, x.requires_grad))
        places = addresses_of_cache(cache)
    except RuntimeError:  # a tensor that has outlived a torch.func.grad, for example, has no address
        return None
    wants_grad = q.requires_grad and torch.is_grad_enabled()  # the caller is warned of it
    return stage, scale, gpu_of(q.device), places, wants_grad, *of_tensors


def remember_call(
    kind: Hashable, q: torch.Tensor, cache: PagedKVCache, plan: Plan, scale: float, out: torch.Tensor,
    lse: torch.Tensor,
) -> None:  # fmt: skip
    """Keep what a successful call has worked out, with the cache, if its stage's launch can be repeated."""
    stage = REPEATED.get(plan.stage)
    if INTERPRETED or stage is None or not (plan.dynamic and plan.has_tokens):
        return
    calls = KINDS.of(cache)
    if kind in calls:  # known, but this call could not use it: `out` overlaps q, for example
        return
    args = stage.arguments(q, cache, plan, scale, out, lse).without_tensors()
    moved = any(known.args.cache is not args.cache for known in list(calls.values()))  # then release the old memory
    if moved or len(calls) >= MOST_KINDS:  # full, as when strides differ at every step
        calls.clear()
    calls[kind] = RepeatedCall(
        stage.launcher(plan, cache.capacity),
        args,
        n_bytes_spanned(q),
        n_bytes_spanned(out),
        tuple(address_range(tensor) for tensor in tensors_of_cache(cache)),
    )


def n_bytes_spanned(x: torch.Tensor) -> int:
    """Return the bytes that a tensor spans, from its first to its last."""
    begin, end = address_range(x)
    return end - begin


def repeat_call(
    kind: Hashable | None, q: torch.Tensor, cache: PagedKVCache, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Decode a call of a known kind and return (out, lse); None, with nothing launched, if it must be checked anew."""
    known: RepeatedCall | None = None if kind is None else KINDS.known(cache).get(kind)
    if known is None or q.device.index != torch.cuda.current_device():
        return None
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    else:
        begin, of_q = out.data_ptr(), q.data_ptr()
        mine = begin, begin + known.out_bytes
        if overlap(mine, (of_q, of_q + known.q_bytes)) or any([overlap(mine, theirs) for theirs in known.cache_memory]):
            return None
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    known.launch(known.args.with_tensors(q, out, lse))
    return out, lse

"""A decode step of a kind that came before: what its first call found out is not found out again.

Checks, plan, scale and most arguments of the kernels depend on the kind of a call: sizes, strides, types, devices,
alignment. They do not depend on what the tensors hold. decode() finds it all out in its first call, on the host, which
takes longer than many steps take on the GPU. Later calls of the same kind go from here to the kernels. What may differ
between two calls of a kind is looked at in each: which GPU is the current one, and what lies where `out` does.
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

KINDS = Memory()  # of a cache: {kind of a call: RepeatedCall}
MOST_KINDS = 64  # of calls with one cache
GPU = "cuda"  # the type of devices for which anything is kept


class RepeatedCall(NamedTuple):
    """What calls of a kind have in common. q_bytes, out_bytes: from a tensor's first byte to its last."""

    launch: Callable[[KernelArgs], None]
    args: KernelArgs
    q_bytes: int
    out_bytes: int
    cache_memory: tuple[tuple[int, int], ...]


def kind_of_call(
    q: torch.Tensor, cache: PagedKVCache, stage: str | None, scale: float | None, out: torch.Tensor | None
) -> Hashable | None:
    """All that the checks and the kernels' arguments depend on; None for what must be looked at more closely."""
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
    except RuntimeError:  # what outlived a torch.func.grad, say, has no address
        return None
    wants_grad = q.requires_grad and torch.is_grad_enabled()  # of which the caller is warned
    return stage, scale, gpu_of(q.device), places, wants_grad, *of_tensors


def remember_call(
    kind: Hashable, q: torch.Tensor, cache: PagedKVCache, plan: Plan, scale: float, out: torch.Tensor,
    lse: torch.Tensor,
) -> None:  # fmt: skip
    """Keep with the cache what a call that went well has found out, where its stage's launch can be repeated."""
    stage = REPEATED.get(plan.stage)
    if INTERPRETED or stage is None or not (plan.dynamic and plan.has_tokens):
        return
    ready = KINDS.of(cache)
    if kind in ready:  # it went the long way all the same: `out` lies over q, say
        return
    args = stage.arguments(q, cache, plan, scale, out, lse).without_tensors()
    moved = any(known.args.cache is not args.cache for known in list(ready.values()))  # the old memory is let go
    if moved or len(ready) >= MOST_KINDS:  # or strides differ at every step
        ready.clear()
    ready[kind] = RepeatedCall(
        stage.launcher(plan, cache.capacity),
        args,
        n_bytes_spanned(q),
        n_bytes_spanned(out),
        tuple(address_range(tensor) for tensor in tensors_of_cache(cache)),
    )


def n_bytes_spanned(x: torch.Tensor) -> int:
    """Bytes from a tensor's first to its last."""
    begin, end = address_range(x)
    return end - begin


def repeat_call(
    kind: Hashable | None, q: torch.Tensor, cache: PagedKVCache, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """out and lse of a call of a kind that is known; None where it must go the long way. Nothing is launched then."""
    ready: RepeatedCall | None = None if kind is None else KINDS.known(cache).get(kind)
    if ready is None or q.device.index != torch.cuda.current_device():
        return None
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    else:
        begin, of_q = out.data_ptr(), q.data_ptr()
        mine = begin, begin + ready.out_bytes
        if overlap(mine, (of_q, of_q + ready.q_bytes)) or any([overlap(mine, theirs) for theirs in ready.cache_memory]):
            return None
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    ready.launch(ready.args.with_tensors(q, out, lse))
    return out, lse

"""Is a result attention? Each engine is held against fp64 before it is timed, and again after.

Three ways to look fast without being right are shut out: a result that is off, a buffer that is handed back without
work (results are wiped once they were judged), and inputs that are written to (q, K and V are summed before and after).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from pkv.bench.accuracy import Accuracy, Yardstick
from pkv.bench.engines.engine import Batch, Ready
from pkv.bench.loads.batches import poisoned_batch
from pkv.bench.loads.grids import Load, Step
from pkv.cache.paged import PagedKVCache
from pkv.cards.known import gpu_of

UNUSED = 1000.0  # in slots without a token: large enough to show in a result, and a score of it no infinity
Result = tuple[torch.Tensor, torch.Tensor | None]


class WrongResult(Exception):
    """A result that is not attention, to within its rounding, or that was not come by honestly."""


@dataclass
class Verdicts:
    """Why engines have no times: what they refuse, and what was wrong with them."""

    refused: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)

    def __contains__(self, engine: str) -> bool:
        return engine in self.refused or engine in self.wrong

    @contextmanager
    def of(self, engine: str) -> Iterator[None]:
        """What is raised in here is this engine's own affair: the others still run."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.refused[engine] = f"needs more memory than the GPU has left: {first_sentence(error)}"
        except WrongResult as error:
            self.wrong[engine] = str(error)
        except Exception as error:
            self.wrong[engine] = f"raised {type(error).__name__}: {first_sentence(error)}"


def first_sentence(error: Exception) -> str:
    """What an error says, in one short line."""
    return " ".join(str(error).split()).partition(". ")[0][:300]


class Judge:
    """The inputs of one step, its result in fp64, and judgement on results."""

    def __init__(self, load: Load, step: Step, device: torch.device) -> None:
        self.load, self.step = load, step
        q, cache = self._made(device)
        self.batch = Batch(q, cache, list(step.lengths), load.shape, gpu_of(device))
        self.yardstick = Yardstick(q, cache)
        self.sums = self._sums()
        self.has_tokens = torch.tensor([length > 0 for length in step.lengths], dtype=torch.bool, device=device)

    def check(self, ready: Ready, result: Result) -> Accuracy:
        """How far a result is off; WrongResult where that is too far, or the engine wrote to its inputs.

        Then the result is wiped, but for rows without a token, which an engine may leave as they are.
        """
        accuracy = self._accuracy(ready, result)
        is_changed = self._sums() != self.sums
        if is_changed:
            self._restore()
        if not accuracy.ok:
            raise WrongResult(in_words(accuracy))
        if is_changed:
            raise WrongResult("it writes to q, or to the pages, table or lengths of the cache, which are not its own")
        for tensor in result:
            if tensor is not None and ready.check is None:
                tensor[self.has_tokens] = torch.nan
            elif tensor is not None:
                tensor.zero_()
        return accuracy

    def _accuracy(self, ready: Ready, result: Result) -> Accuracy:
        if ready.check is not None:
            return ready.check(result)
        out, lse = result
        known = self.yardstick.lse if lse is None else lse  # an engine without lse is judged by out alone
        return self.yardstick.measure(out, known, ready.rounds_weights)

    def _made(self, device: torch.device) -> tuple[torch.Tensor, PagedKVCache]:
        return poisoned_batch(list(self.step.lengths), self.load.shape, self.load.seed, device, unused=UNUSED)

    def _inputs(self) -> list[torch.Tensor]:
        cache = self.batch.cache
        return [self.batch.q, cache.k_pages, cache.v_pages, cache.block_table, cache.lengths]

    def _sums(self) -> list[int]:
        """Numbers that change when a value of the inputs does, or its place."""
        return [self.batch.lengths == list(self.step.lengths), *(placed_sum(tensor) for tensor in self._inputs())]

    def _restore(self) -> None:
        """Make the inputs again, in place: engines hold on to them."""
        self.batch.lengths[:] = self.step.lengths
        q, cache = self._made(self.batch.q.device)
        fresh = (q, cache.k_pages, cache.v_pages, cache.block_table, cache.lengths)
        for old, new in zip(self._inputs(), fresh, strict=True):
            old.copy_(new)


def placed_sum(tensor: torch.Tensor) -> int:
    """A sum of a tensor's bits, in which each part along its first axis, and each place in a part, weighs its own."""
    words = tensor.unsqueeze(-1).view(torch.int16).flatten(1)  # [parts, places]
    weighed = 0
    for axis in (0, 1):
        sums = words.sum(axis, dtype=torch.int64)
        weighed += (axis + 1) * int((sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum())
    return weighed


def in_words(accuracy: Accuracy) -> str:
    """By how much a wrong result is off."""
    off = f"out is off by {accuracy.max_err:.2e} from fp64, {accuracy.tolerance:.2e} allowed"
    if not accuracy.max_err_lse <= accuracy.tolerance_lse:
        off += f"; lse by {accuracy.max_err_lse:.2e}, {accuracy.tolerance_lse:.2e} allowed"
    return off

"""What a decode step cannot beat: reading as many bytes once, and what it costs to launch anything at all.

`stream` reads the first half of a step's bytes from the K pages and the other half from the V pages, from beginning to
end, without a page table. Its programs are as many as reside at once; each sums the 32-bit words of its blocks, modulo
2**32, and stores one number: the sum of them all shows, exactly, that every byte was read. 10 blocks and 4 programs:
program 1 reads the blocks 1, 5 and 9.
"""

import functools
import itertools
import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pkv._triton import INTERPRETED, tl, triton, why_not_launchable
from pkv.bench.accuracy import Accuracy
from pkv.bench.engines.engine import Batch, Engine, Ready, nothing_to_plan
from pkv.bench.timing import Stopwatch

WORD = 4  # bytes
ROUNDS = 7


@dataclass(frozen=True)
class StreamConfig:
    """block: words of K, and as many of V, that a program has in flight."""

    block: int
    warps: int
    programs_per_sm: int


INTERPRETED_CONFIG = StreamConfig(block=1024, warps=4, programs_per_sm=1)
CONFIGS = [
    StreamConfig(block, warps, programs)
    for block, warps, programs in itertools.product((1024, 2048, 4096, 8192), (2, 4, 8), (1, 2, 4, 8, 16))
    if 16 <= block // (32 * warps) <= 64 and 8 <= warps * programs <= 64  # words per thread, warps per SM
]


@triton.jit(do_not_specialize=["n_words"])
def stream_kernel(k_ptr, v_ptr, sums_ptr, n_words, BLOCK: tl.constexpr):
    """Read n_words words of each pool: whole blocks in turns, and the rest by the program whose turn it would be."""
    program = tl.program_id(0)
    n_programs = tl.num_programs(0)
    n_blocks = n_words // BLOCK
    within = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.int32)
    begin = program.to(tl.int64) * BLOCK
    for _ in range(program, n_blocks, n_programs):
        k = tl.load(k_ptr + begin + within, eviction_policy="evict_first")
        v = tl.load(v_ptr + begin + within, eviction_policy="evict_first")
        total += k + v
        begin += n_programs * BLOCK
    if n_blocks % n_programs == program:  # its next block is the one that is not whole
        is_left = begin + within < n_words
        total += tl.load(k_ptr + begin + within, mask=is_left, other=0)
        total += tl.load(v_ptr + begin + within, mask=is_left, other=0)
    tl.store(sums_ptr + program, tl.sum(total.to(tl.int64)))


@triton.jit
def empty_kernel(out_ptr):
    """Nothing."""
    pass


def why_not_stream(batch: Batch) -> str | None:
    """Why there are no such bytes to read."""
    reason = why_not_launchable(batch.q.device)
    for name, pages in (("k_pages", batch.cache.k_pages), ("v_pages", batch.cache.v_pages)):
        if reason is None and not pages.is_contiguous():
            reason = f"{name} is not one piece of memory"
        if reason is None and pages.nbytes < batch.kv_bytes // 2:
            reason = f"rows share pages: {name} has {pages.nbytes:,} bytes, fewer than half of those of all rows"
    if reason is None and n_words_of(batch) == 0:
        reason = "the batch has no tokens"
    return reason


def n_words_of(batch: Batch) -> int:
    """Words to read from each of the two pools."""
    return batch.kv_bytes // 2 // WORD


def prepare_stream(batch: Batch) -> Ready:
    """Take the fastest of CONFIGS for this many bytes."""
    n_words = n_words_of(batch)
    # views of n_words words: the type of the pages does not matter
    k, v = (pages.view(-1).view(torch.int32)[:n_words] for pages in (batch.cache.k_pages, batch.cache.v_pages))
    configs = [INTERPRETED_CONFIG] if INTERPRETED else CONFIGS
    n_sms = batch.gpu.n_sms
    sums = {
        config: torch.zeros(n_sms * config.programs_per_sm, dtype=torch.int64, device=k.device) for config in configs
    }

    def read(config: StreamConfig) -> tuple[torch.Tensor, None]:
        there = sums[config]
        stream_kernel[(len(there),)](k, v, there, n_words, BLOCK=config.block, num_warps=config.warps)
        return there, None

    times: dict[StreamConfig, list[float]] = {config: [] for config in configs}
    if not INTERPRETED:
        watch = stopwatch(k.device)
        for config in configs:
            read(config)  # compiles
        for _ in range(ROUNDS):
            for config in configs:
                times[config].append(watch.gpu_us(lambda config=config: read(config))[0])  # type: ignore[misc]
    best = min(configs, key=lambda config: statistics.median(times[config] or [0.0]))
    return Ready(
        plan=nothing_to_plan,
        run=lambda _: read(best),
        settings=asdict(best) | {"tried": len(configs)},
        check=lambda result: compare_sums(result[0], k, v),
    )


@functools.cache
def stopwatch(device: torch.device) -> Stopwatch:
    """One for all batches: to be made, it times a hundred calls of nothing."""
    return Stopwatch(device)


def compare_sums(found: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Accuracy:
    """The programs' sums against torch's of the same words, both modulo 2**32; nothing else but equal will do."""
    wanted = sum(int(words.sum(dtype=torch.int32)) for words in (k, v))
    difference = (int(found.sum()) - wanted) % 2**32
    return Accuracy(float(min(difference, 2**32 - difference)), 0.0, 0.0, 0.0)


def prepare_empty(batch: Batch) -> Ready:
    """One program that does nothing."""
    out = torch.zeros_like(batch.q)

    def run(_: Any) -> tuple[torch.Tensor, None]:
        empty_kernel[(1,)](out)
        return out, None

    return Ready(plan=nothing_to_plan, run=run, check=lambda result: Accuracy(0.0, 0.0, 0.0, 0.0))


STREAM = Engine("stream", "as many bytes, read once", "torch", why_not_stream, prepare_stream)
EMPTY = Engine(
    "empty", "a kernel that does nothing", "torch", lambda batch: why_not_launchable(batch.q.device), prepare_empty
)

"""Does a kernel run here, and count right: a tiny one, whose loop bounds are loaded and reduced.

Some versions of numpy break Triton's interpreter just there, and quietly. Eight values, small whole numbers in fp32, so
that the right answer is exact: program p gets  sum(values[: bound[p]]) + 100 * sum(values[bound[p] : max(bound)]).
"""

from dataclasses import dataclass

import torch

from pkv._triton import GPU_VISIBLE, INTERPRETED, tl, triton, why_not_launchable

N = 8


@triton.jit
def two_sums_kernel(values_ptr, bounds_ptr, result_ptr, N: tl.constexpr):
    """See the text above."""
    bound = tl.load(bounds_ptr + tl.program_id(0))
    largest = tl.max(tl.load(bounds_ptr + tl.arange(0, N)), 0)
    total = 0.0
    for i in range(0, bound):
        total += tl.load(values_ptr + i)
    for i in range(bound, largest):
        total += 100 * tl.load(values_ptr + i)
    tl.store(result_ptr + tl.program_id(0), total)


@dataclass(frozen=True)
class SelfTest:
    """What the kernel gave, or why it did not run; refused: pkv did not try, and `error` says what to do."""

    ok: bool
    expected: list[float]
    got: list[float] | None
    error: str | None = None
    refused: bool = False


def kernel_device() -> torch.device:
    """Where kernels run here: the GPU, or the CPU in Triton's interpreter."""
    return torch.device("cuda" if GPU_VISIBLE and not INTERPRETED else "cpu")


def run_self_test() -> SelfTest:
    """Launch the kernel once and compare, exactly."""
    values = [float(i * i + 1) for i in range(N)]
    bounds = [(3 * i + 1) % N for i in range(N)]
    expected = [sum(values[:bound]) + 100 * sum(values[bound : max(bounds)]) for bound in bounds]
    device = kernel_device()
    reason = why_not_launchable(device)
    if reason:
        return SelfTest(False, expected, None, reason, refused=True)
    try:
        result = torch.full((N,), torch.nan, device=device)
        arguments = (torch.tensor(values, device=device), torch.tensor(bounds, dtype=torch.int32, device=device))
        two_sums_kernel[(N,)](*arguments, result, N)
        got = result.tolist()
    except Exception as error:  # whatever it is, it is what the user must hear of
        return SelfTest(False, expected, None, f"{type(error).__name__}: {error}")
    return SelfTest(got == expected, expected, got)

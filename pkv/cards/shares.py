"""Shares of slots, SMs and memory among programs, in closed form: the terms that pkv.cards.costs adds up.

Programs of 3, 1 and 1 us on two slots: the third goes to the slot that is free first, so the slots take 3 and 2 us.
"""

import heapq
import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def deal(n_items: Floats, n_bytes: Floats, n_slots: int, item_us: float, most: float) -> tuple[Floats, Floats]:
    """Deal programs to slots, each in order to the slot with the least us so far; return (us, bytes) of each slot.

    n_items, n_bytes [n_programs]: a program's work, at item_us per item and at `most` bytes per us. A slot's us are
    computed from its counts, which add up exactly in any order. So slots with equal work tie, and the first of them is
    next. Sums of us would differ in their last bits, and rounding would decide which slot is next.

    >>> deal(np.array([1.0, 1.0, 1.0]), np.array([20.0, 0.0, 0.0]), 2, item_us=1.0, most=10.0)
    (array([3., 2.]), array([20.,  0.]))
    """
    if len(n_items) > n_slots:
        items, read = [0.0] * n_slots, [0.0] * n_slots
        least = [(0.0, slot) for slot in range(n_slots)]  # a heap
        for more_items, more_bytes in zip(n_items.tolist(), n_bytes.tolist(), strict=True):
            slot = least[0][1]
            items[slot] += more_items
            read[slot] += more_bytes
            heapq.heapreplace(least, (item_us * items[slot] + read[slot] / most, slot))
        n_items, n_bytes = np.array(items), np.array(read)
    return item_us * n_items + n_bytes / most, n_bytes


def n_alike(copies: int, n_sms: int) -> int:
    """Return how many copies of a program do the same at the same time, so that one of them stands for all.

    Such copies go to neighbouring slots, on SMs whose other programs are alike too. This holds for all groups of a size
    that divides both the copies and the SMs. The size is a power of two, so that dividing the memory's rate by it does
    not round.

    >>> n_alike(8, 132), n_alike(8, 28), n_alike(6, 33)
    (4, 4, 1)
    """
    common = math.gcd(copies, n_sms)
    return common & -common


def mean_of_at_least_one(mean: Floats, deviation: Floats) -> Floats:
    """Return the expectation of max(1, x) for normally distributed x of this mean and deviation."""
    z = np.divide(mean - 1, deviation, out=np.where(mean > 1, 9.0, -9.0), where=deviation > 1e-9)
    above = np.array([math.erfc(-x / math.sqrt(2)) / 2 for x in z.tolist()])
    return 1 + (mean - 1) * above + deviation * np.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def longest_and_bytes_by_sm(us: Floats, n_bytes: Floats, n_sms: int) -> tuple[Floats, Floats]:
    """Return (longest us, sum of bytes) [n_sms] of the slots on each SM; slot s lies on SM s % n_sms.

    >>> longest_and_bytes_by_sm(np.array([4.0, 8.0, 2.0]), np.array([100.0, 200.0, 50.0]), 2)
    (array([4., 8.]), array([150., 200.]))
    """
    sm = np.arange(len(us)) % n_sms
    longest = np.zeros(n_sms)
    np.maximum.at(longest, sm, us)
    return longest, np.bincount(sm, n_bytes, n_sms).astype(np.float64)


def slowest_sm_us(alone_us: Floats, n_bytes: Floats, most: float, memory: float) -> float:
    """Return the us until the last SM has read all its bytes, if SMs share the memory equally; rates in bytes per us.

    alone_us, n_bytes [n_sms]: the least time that an SM takes alone, and the bytes that it reads. most: the highest
    rate of an SM. SMs that have read all their bytes leave their shares to the others.

    >>> slowest_sm_us(np.array([4.0, 8.0]), np.array([100e3, 200e3]), most=50e3, memory=40e3)
    9.0
    """
    order = np.argsort(n_bytes, kind="stable")
    n_bytes, alone_us = n_bytes[order], alone_us[order]
    least = np.divide(alone_us, n_bytes, out=np.zeros(len(n_bytes)), where=n_bytes > 0)
    least = np.maximum(least, 1 / most)[:, None]  # us per byte, of each SM alone
    # the SMs end one after another; between two ends, n_reading SMs read
    steps, n_reading = np.diff(n_bytes, prepend=0.0), np.arange(len(n_bytes), 0.0, -1.0)
    us = np.maximum(n_reading / memory, least)  # per byte of each SM: [n_sms, n_steps]
    return float(np.tril(steps * us).sum(axis=1).max())

"""The clock of pkv.simulation: the programs of one launch go to slots, start up, and share what there is to read from.

Slot s is on SM s % n_sms, so the first programs go to one SM each, breadth first.

>>> spans = np.zeros(2, dtype=[("begin_us", "f8"), ("end_us", "f8")])
>>> work = Work(spans, bytes=np.array([100e3, 100e3]), first=np.array([0, 1, 2]))
>>> rules = Rules(item_us=2.0, most=25e3, most_of_sm=None, memory=40e3, to_write=0.0)
>>> play(work, n_slots=2, n_sms=1, rules=rules, begin_us=0.0)
(array([0, 1]), 7.0)
>>> spans["end_us"].tolist()
[7.0, 7.0]
"""

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Work:
    """A launch's work in grid order: program p does the spans [first[p], first[p + 1]), each of so many bytes."""

    spans: npt.NDArray[np.void]
    bytes: npt.NDArray[np.float64]
    first: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rules:
    """What costs say of one launch, in us and bytes per us. to_write: bytes that the memory has yet to write back."""

    item_us: float
    most: float
    most_of_sm: float | None
    memory: float
    to_write: float


class Readers:
    """How many programs read on each SM, and on the fullest."""

    def __init__(self, n_sms: int) -> None:
        self.on_sm, self.n_sms_with, self.fullest = [0] * n_sms, [n_sms], 0

    def add(self, sm: int, n: int) -> None:
        """n: 1 or -1"""
        before = self.on_sm[sm]
        self.on_sm[sm] = after = before + n
        if after == len(self.n_sms_with):
            self.n_sms_with.append(0)
        self.n_sms_with[before] -= 1
        self.n_sms_with[after] += 1
        if after > self.fullest or not self.n_sms_with[self.fullest]:
            self.fullest = after


def play(work: Work, n_slots: int, n_sms: int, rules: Rules, begin_us: float) -> tuple[npt.NDArray[np.int64], float]:
    """Fill in when each span runs; returns the slot of each, and when the last one ends.

    All programs that read do so at one rate. So one number, the bytes that a program would have read since the launch
    began, says how far each is: one that starts to read at `served` ends when `served` has grown by its bytes.
    """
    n_bytes, first = work.bytes.tolist(), work.first.tolist()
    n_programs = len(first) - 1
    begin, end, place = [0.0] * len(n_bytes), [0.0] * len(n_bytes), [0] * len(n_bytes)
    free = list(range(min(n_slots, n_programs)))[::-1]
    starting: deque[tuple[float, int, int, int]] = deque()  # (ready, span, the program's last + 1, slot), by time
    reading: list[tuple[float, int, int, int]] = []  # (served at its end, ...), a heap
    readers = None if rules.most_of_sm is None else Readers(n_sms)
    now, served, program, to_write = begin_us, 0.0, 0, rules.to_write
    while True:
        while free and program < n_programs:
            if first[program] < first[program + 1]:  # one without items only comes and goes
                span, slot = first[program], free.pop()
                begin[span], place[span] = now, slot
                starting.append((now + rules.item_us, span, first[program + 1], slot))
            program += 1
        rate = rules.most
        if reading:
            rate = min(rate, rules.memory / len(reading) / (2 if to_write > 0 else 1))
            if rules.most_of_sm is not None and readers is not None:
                rate = min(rate, rules.most_of_sm / readers.fullest)
        read_at = now + max(reading[0][0] - served, 0.0) / rate if reading else np.inf
        next_at = min(read_at, starting[0][0] if starting else np.inf)
        if to_write > 0 and reading:
            written_at = now + to_write / (rate * len(reading))
            if written_at < next_at:
                served, now, to_write = served + (written_at - now) * rate, written_at, 0.0
                continue
            to_write -= (next_at - now) * rate * len(reading)
        if starting and starting[0][0] <= read_at:
            ready, span, last, slot = starting.popleft()
            served += (ready - now) * rate
            now = ready
            if n_bytes[span]:
                heapq.heappush(reading, (served + n_bytes[span], span, last, slot))
                if readers is not None:
                    readers.add(slot % n_sms, 1)
                continue
        elif reading:
            served, span, last, slot = heapq.heappop(reading)
            now = read_at
            if readers is not None:
                readers.add(slot % n_sms, -1)
        else:
            break
        end[span] = now
        if span + 1 < last:
            begin[span + 1], place[span + 1] = now, slot
            starting.append((now + rules.item_us, span + 1, last, slot))
        else:
            free.append(slot)
    work.spans["begin_us"], work.spans["end_us"] = begin, end
    return np.array(place, dtype=np.int64), now

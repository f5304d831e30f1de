"""The clock of pkv.simulation: the programs of one launch go to slots, start up, and share what there is to read from.

Slot s is on SM s % n_sms, so the first programs go to one SM each, breadth first.

>>> spans = np.zeros(2, dtype=[("begin_us", "f8"), ("end_us", "f8")])
>>> work = Work(spans, bytes=np.array([100e3, 100e3]), first=np.array([0, 1, 2]))
>>> rules = Rules(item_us=2.0, most=25e3, most_of_sm=None, memory=40e3)
>>> play(work, n_slots=2, n_sms=1, rules=rules, begin_us=0.0)
(array([0, 1]), 7.0)
>>> spans["end_us"].tolist()
[7.0, 7.0]
"""

import heapq
import math
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
    """What costs say of one launch, in us and bytes per us."""

    item_us: float
    most: float
    most_of_sm: float | None
    memory: float


Entry = tuple[int, int, int]  # span, the program's last + 1, slot


class EvenPrograms:
    """Programs that read, all at one rate.

    So one number, the bytes that a program would have read since the launch began, says how far each is: one that
    starts to read at `served` ends when `served` has grown by its bytes.
    """

    def __init__(self, rules: Rules) -> None:
        self.most, self.served, self.rate = rules.most, 0.0, 0.0
        self.ends: list[tuple[float, Entry]] = []  # (served at its end, ...), a heap

    def add(self, n_bytes: float, sm: int, entry: Entry) -> None:
        """One more begins to read."""
        heapq.heappush(self.ends, (self.served + n_bytes, entry))

    def outlook(self, room: float) -> float:
        """The us until the first has read all, as `room` bytes per us are there."""
        if not self.ends:
            return math.inf
        self.rate = min(self.most, room / len(self.ends))
        return max(self.ends[0][0] - self.served, 0.0) / self.rate

    def advance(self, us: float) -> None:
        """All read on for so long, at the rate of the last outlook."""
        self.served += us * self.rate

    def pop(self) -> Entry:
        """The first has read all."""
        self.served, entry = heapq.heappop(self.ends)
        return entry


class EvenSms:
    """Programs that read where SMs have equal shares of what there is, and the programs of one SM equal shares of that.

    An SM takes no more than most_of_sm, or than its programs can read; what it leaves is for the others.
    """

    def __init__(self, rules: Rules, most_of_sm: float, n_sms: int) -> None:
        self.most, self.most_of_sm = rules.most, most_of_sm
        self.ends: list[list[tuple[float, Entry]]] = [[] for _ in range(n_sms)]
        self.served, self.rates, self.n_reading = np.zeros(n_sms), np.zeros(n_sms), np.zeros(n_sms)
        self.first = np.full(n_sms, np.inf)  # served at the first end on each SM
        self.next_sm = 0

    def add(self, n_bytes: float, sm: int, entry: Entry) -> None:
        """One more begins to read."""
        heapq.heappush(self.ends[sm], (float(self.served[sm]) + n_bytes, entry))
        self._changed(sm)

    def outlook(self, room: float) -> float:
        """As of EvenPrograms."""
        wanted = np.minimum(self.most_of_sm, self.n_reading * self.most)
        shares = np.minimum(wanted, level(wanted, room))
        busy = self.n_reading > 0
        np.divide(shares, self.n_reading, out=self.rates, where=busy)
        left = np.divide((self.first - self.served).clip(0.0), self.rates, out=np.full(len(busy), np.inf), where=busy)
        self.next_sm = int(left.argmin())
        return float(left[self.next_sm])

    def advance(self, us: float) -> None:
        """As of EvenPrograms."""
        self.served += us * self.rates

    def pop(self) -> Entry:
        """As of EvenPrograms."""
        self.served[self.next_sm], entry = heapq.heappop(self.ends[self.next_sm])
        self._changed(self.next_sm)
        return entry

    def _changed(self, sm: int) -> None:
        ends = self.ends[sm]
        self.n_reading[sm] = len(ends)
        self.first[sm] = ends[0][0] if ends else np.inf
        if not ends:
            self.rates[sm] = 0.0


def level(wanted: npt.NDArray[np.float64], room: float) -> float:
    """The equal share that uses up `room`, where those who want less leave the rest to the others.

    >>> level(np.array([1.0, 4.0, 9.0]), 9.0), level(np.array([1.0, 2.0]), 5.0)
    (4.0, inf)
    """
    if wanted.sum() <= room:
        return math.inf
    ordered = np.sort(wanted)
    shares = (room - np.cumsum(ordered) + ordered) / np.arange(len(ordered), 0, -1)
    return float(shares[np.argmax(shares <= ordered)])


def play(work: Work, n_slots: int, n_sms: int, rules: Rules, begin_us: float) -> tuple[npt.NDArray[np.int64], float]:
    """Fill in when each span runs; returns the slot of each, and when the last one ends."""
    n_bytes, first = work.bytes.tolist(), work.first.tolist()
    n_programs = len(first) - 1
    begin, end, place = [0.0] * len(n_bytes), [0.0] * len(n_bytes), [0] * len(n_bytes)
    free = list(range(min(n_slots, n_programs)))[::-1]
    starting: deque[tuple[float, Entry]] = deque()  # (ready, ...), by time
    reading = EvenPrograms(rules) if rules.most_of_sm is None else EvenSms(rules, rules.most_of_sm, n_sms)
    now, program = begin_us, 0
    while True:
        while free and program < n_programs:
            if first[program] < first[program + 1]:  # one without items only comes and goes
                span, slot = first[program], free.pop()
                begin[span], place[span] = now, slot
                starting.append((now + rules.item_us, (span, first[program + 1], slot)))
            program += 1
        to_end = reading.outlook(rules.memory)
        to_start = starting[0][0] - now if starting else math.inf
        us = min(to_end, to_start)
        if us == math.inf:
            break
        if to_start <= to_end:
            now, (span, last, slot) = starting.popleft()
            reading.advance(us)
            if n_bytes[span]:
                reading.add(n_bytes[span], slot % n_sms, (span, last, slot))
                continue
        else:
            reading.advance(us)
            now, (span, last, slot) = now + us, reading.pop()
        end[span] = now
        if span + 1 < last:
            begin[span + 1], place[span + 1] = now, slot
            starting.append((now + rules.item_us, (span + 1, last, slot)))
        else:
            free.append(slot)
    work.spans["begin_us"], work.spans["end_us"] = begin, end
    return np.array(place, dtype=np.int64), now

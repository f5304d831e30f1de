"""The simulator's clock: the programs of one launch go to slots, start up, and share what there is to read from.

Slot s is on SM s % n_sms, so the first programs go to one SM each, breadth first.

>>> work = Work(bytes=np.array([100e3, 100e3]), first=np.array([0, 1, 2]))
>>> rules = Rules(item_us=2.0, most=25e3, most_of_sm=None, memory=40e3)
>>> played = play(work, n_slots=2, n_sms=1, rules=rules, begin_us=0.0)
>>> played.end_us.tolist(), played.last_us
([7.0, 7.0], 7.0)

Programs that read at the same time share the memory: two of 100 and 200 bytes have 20 each of 40 bytes per us, so the
first ends after 5 us; then the other reads at its own most, say 25, and ends 4 us later.

>>> reading = EvenPrograms(most=25.0)
>>> reading.add(100, 0, (0, 1, 0)), reading.add(200, 0, (1, 2, 1))
(None, None)
>>> reading.outlook(40.0)
5.0
>>> reading.advance(5.0), reading.pop(one_only=False), reading.outlook(40.0)
(None, [(0, 1, 0)], 4.0)
"""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pkv.cards.shares import Floats, n_alike

Ints = npt.NDArray[np.int64]
Entry = tuple[int, int, int]  # span, the program's last + 1, slot
AS_ONE = 1e-11  # us: ends that are nearer to one another than that differ by rounding only


class EvenPrograms:
    """Programs that read, all at one rate, each at `most` bytes per us at most.

    So one number, the bytes that a program would have read since the launch began, says how far each is: one that
    starts to read at `served` ends when `served` has grown by its bytes.
    """

    def __init__(self, most: float) -> None:
        self.most, self.served, self.rate = most, 0.0, 0.0
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

    def pop(self, one_only: bool) -> list[Entry]:
        """Those that have read all, now that the time of the last outlook has passed; one_only: the first of them."""
        self.served, first = heapq.heappop(self.ends)
        ended = [first]
        while self.ends and self.ends[0][0] == self.served and not one_only:
            ended.append(heapq.heappop(self.ends)[1])
        return ended


class EvenSms:
    """Programs that read where SMs have equal shares of what there is, and the programs of one SM equal shares of that.

    An SM takes no more than most_of_sm, or than its programs can read; what it leaves is for the others. Programs that
    end within `as_one` us end together: 0 where somebody waits for their places, because who ends first, be it by
    rounding, decides who gets which.
    """

    def __init__(self, most: float, most_of_sm: float, n_sms: int, n_places: int, as_one: float) -> None:
        self.as_one = as_one
        self.wanted = [min(most_of_sm, n * most) for n in range(n_places + 1)]  # by an SM with n programs that read
        self.n_sms_with = [n_sms] + [0] * n_places  # so many programs that read
        self.n_reading = np.zeros(n_sms, dtype=np.intp)
        self.ends: list[list[tuple[float, Entry]]] = [[] for _ in range(n_sms)]  # a heap for each SM
        self.first = np.full(n_sms, np.inf)  # served at the first end on each SM
        self.served, self.rates, self.left = np.zeros(n_sms), np.zeros(n_sms), np.zeros(n_sms)  # left: bytes, then us
        self.next_sm = 0
        self.changed: set[int] = set()  # SMs whose heap has changed since the last outlook

    def add(self, n_bytes: float, sm: int, entry: Entry) -> None:
        """One more begins to read."""
        heapq.heappush(self.ends[sm], (self.served.item(sm) + n_bytes, entry))
        self.changed.add(sm)

    def outlook(self, room: float) -> float:
        """As of EvenPrograms."""
        for sm in self.changed:
            n_before, ends = self.n_reading.item(sm), self.ends[sm]
            self.n_sms_with[n_before] -= 1
            self.n_sms_with[len(ends)] += 1
            self.n_reading[sm] = len(ends)
            self.first[sm] = ends[0][0] if ends else math.inf
        self.changed.clear()
        rates_of(self.n_sms_with, self.wanted, room).take(self.n_reading, out=self.rates, mode="clip")
        np.subtract(self.first, self.served, out=self.left)
        np.maximum(self.left, 0.0, out=self.left)
        np.divide(self.left, self.rates, out=self.left)  # infinite where nobody reads: so is `first` there
        self.next_sm = int(self.left.argmin())
        return self.left.item(self.next_sm)

    def advance(self, us: float) -> None:
        """As of EvenPrograms."""
        if us:
            self.served += us * self.rates

    def pop(self, one_only: bool) -> list[Entry]:
        """As of EvenPrograms: the first of all, and then, SM by SM, all others that have read all by now."""
        ended = [self._pop(self.next_sm)]
        if one_only:
            return ended
        for sm in (self.first - self.served <= self.as_one * self.rates).nonzero()[0].tolist():
            ends, slack = self.ends[sm], self.as_one * self.rates.item(sm)
            while ends and ends[0][0] - self.served.item(sm) <= slack:
                ended.append(self._pop(sm))
        return ended

    def _pop(self, sm: int) -> Entry:
        self.served[sm], entry = heapq.heappop(self.ends[sm])
        self.changed.add(sm)
        return entry


def rates_of(n_sms_with: Sequence[int], wanted: Sequence[float], room: float) -> npt.NDArray[np.float64]:
    """At what rate each of n programs of an SM reads, for n from 0 to the most that an SM has now.

    n_sms_with[n] SMs have n programs that read, and want wanted[n], which grows with n.

    >>> rates_of([1, 1, 2], [0.0, 4.0, 9.0], 12.0).tolist()
    [0.0, 4.0, 2.0]
    """
    most = len(n_sms_with) - 1
    while most and not n_sms_with[most]:
        most -= 1
    share = level(n_sms_with[: most + 1], wanted, room)
    return np.array([0.0, *[min(wanted[n], share) / n for n in range(1, most + 1)]])


def level(n_sms_with: Sequence[int], wanted: Sequence[float], room: float) -> float:
    """The equal share that uses up `room`, where those who want less leave the rest to the others.

    n_sms_with[n] SMs want wanted[n] each, which is 0 for n = 0 and grows with n.

    >>> level([0, 1, 1, 1], [0.0, 1.0, 4.0, 9.0], 9.0), level([5, 1, 1], [0.0, 1.0, 2.0], 5.0)
    (4.0, inf)
    """
    n_left, taken = sum(n_sms_with[1:]), 0.0
    if n_left * wanted[len(n_sms_with) - 1] <= room:
        return math.inf
    for n in range(1, len(n_sms_with)):
        want, n_sms = wanted[n], n_sms_with[n]
        if n_sms:
            share = (room - (taken + want) + want) / n_left
            if share <= want:
                return share
            n_left -= n_sms
            for _ in range(n_sms):  # one by one: a product would round otherwise, and who ends first may hang on that
                taken += want
    return math.inf


@dataclass(frozen=True)
class Work:
    """A launch's work in grid order: program p does the items [first[p], first[p + 1]), each of so many bytes.

    Each program comes `copies` times, one after another, once per head say. A span is one item of one copy; copies of a
    program do all its items each, so spans are ordered by program, then copy, then item.
    """

    bytes: Floats
    first: Ints
    copies: int = 1

    def spans(self) -> tuple[Ints, Ints, Ints]:
        """(program, copy, item) of each span."""
        n_items = np.diff(self.first)
        sizes = np.repeat(n_items, self.copies)
        grid_program = np.repeat(np.arange(len(sizes)), sizes)
        program, copy = np.divmod(grid_program, self.copies)
        before = np.cumsum(sizes) - sizes  # spans before each program of the grid
        return program, copy, self.first[program] + np.arange(len(program)) - before[grid_program]


@dataclass(frozen=True)
class Rules:
    """What costs say of one launch, in us and bytes per us."""

    item_us: float
    most: float
    most_of_sm: float | None
    memory: float


@dataclass(frozen=True)
class Played:
    """When and where each span ran; each stands for `alike` copies, on as many SMs from alike * sm on.

    begin_us, end_us, sm, slot [n_spans]: of the spans of work with copies / alike copies. slot: which of the SM's
    places. last_us: when the last one ends, or the launch began.
    """

    begin_us: Floats
    end_us: Floats
    sm: Ints
    slot: Ints
    alike: int
    last_us: float

    def of_copies(self, copies: Ints, program: Ints, item: Ints, work: Work) -> Ints:
        """Which of the spans stands for each of some spans of `work`, given by program, copy and item."""
        n_items = np.diff(work.first)
        sizes = n_items * (work.copies // self.alike)
        before = np.cumsum(sizes) - sizes
        return before[program] + copies // self.alike * n_items[program] + item - work.first[program]


def play(work: Work, n_slots: int, n_sms: int, rules: Rules, begin_us: float) -> Played:
    """Say when each span runs, and where."""
    must_wait = np.count_nonzero(np.diff(work.first)) * work.copies > n_slots
    # Who waits takes the place of who ends first. Among programs that end together, SMs decide, one by one, or where
    # some have nothing to read, a start at the same moment may: then each copy is played.
    together = not must_wait or (rules.most_of_sm is None and bool(work.bytes.all()))
    alike = n_alike(work.copies, n_sms) if together else 1
    work = Work(work.bytes, work.first, work.copies // alike)
    _, _, item = work.spans()
    sizes = np.repeat(np.diff(work.first), work.copies)
    n_slots, n_sms, room = n_slots // alike, n_sms // alike, rules.memory / alike
    if rules.most_of_sm is None:
        reading: EvenPrograms | EvenSms = EvenPrograms(rules.most)
    else:
        reading = EvenSms(rules.most, rules.most_of_sm, n_sms, -(-n_slots // n_sms), 0.0 if must_wait else AS_ONE)
    n_bytes, first = work.bytes[item].tolist(), [0, *np.cumsum(sizes).tolist()]
    begin, end, place = [begin_us] * len(n_bytes), [begin_us] * len(n_bytes), [0] * len(n_bytes)
    programs = np.flatnonzero(sizes).tolist()[::-1]  # those without items only come and go; the next one is the last
    free = deque(range(min(n_slots, len(programs))))
    starting: deque[tuple[float, Entry]] = deque()  # (ready, ...), by time
    now = begin_us
    while True:
        while free and programs:
            program, slot = programs.pop(), free.popleft()
            span = first[program]
            begin[span], place[span] = now, slot
            starting.append((now + rules.item_us, (span, first[program + 1], slot)))
        to_end = reading.outlook(room)
        to_start = starting[0][0] - now if starting else math.inf
        us = min(to_end, to_start)
        if us == math.inf:
            break
        reading.advance(us)
        if to_start <= to_end:
            now, ended = starting[0][0], []
            while starting and starting[0][0] == now:
                _, entry = starting.popleft()
                if n_bytes[entry[0]]:
                    reading.add(n_bytes[entry[0]], entry[2] % n_sms, entry)
                else:
                    ended.append(entry)
        else:
            now += us
            ended = reading.pop(one_only=bool(starting) and starting[0][0] <= now)  # a start comes before other ends
        for span, last, slot in ended:
            end[span] = now
            if span + 1 < last:
                begin[span + 1], place[span + 1] = now, slot
                starting.append((now + rules.item_us, (span + 1, last, slot)))
            else:
                free.append(slot)
    places = np.array(place, dtype=np.int64)
    return Played(np.array(begin), np.array(end), places % n_sms, places // n_sms, alike, now)

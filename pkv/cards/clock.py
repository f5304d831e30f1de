"""The simulator's clock: the programs of one launch go to slots, start up, and share the memory while they read.

Slot s is on SM s % n_sms, so the first programs go to one SM each, breadth first.

>>> work = Work(bytes=np.array([100e3, 100e3]), first=np.array([0, 1, 2]))
>>> rules = Rules(item_us=2.0, most=25e3, most_of_sm=None, memory=40e3)
>>> played = play(work, n_slots=2, n_sms=1, rules=rules, begin_us=0.0)
>>> played.end_us.tolist(), played.last_us
([7.0, 7.0], 7.0)

Programs that read at the same time share the memory. Two programs of 100 and 200 bytes get 20 each of 40 bytes per us,
so the first ends after 5 us. Then the other reads at its own maximum, 25 here, and ends 4 us later.

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
AS_ONE = 1e-11  # us: ends that are closer than this differ by rounding only


class EvenPrograms:
    """Programs that read at one common rate, of at most `most` bytes per us each.

    One number is enough for all of them: `served`, the bytes that a program would have read since the launch began. A
    program that starts to read at some `served` ends when `served` has grown by its bytes.
    """

    def __init__(self, most: float) -> None:
        self.most, self.served, self.rate = most, 0.0, 0.0
        self.ends: list[tuple[float, Entry]] = []  # (served at its end, ...), a heap

    def add(self, n_bytes: float, sm: int, entry: Entry) -> None:
        """Add a program that begins to read."""
        heapq.heappush(self.ends, (self.served + n_bytes, entry))

    def outlook(self, room: float) -> float:
        """Return the us until the first program has read all its bytes, if the memory gives `room` bytes per us."""
        if not self.ends:
            return math.inf
        self.rate = min(self.most, room / len(self.ends))
        return max(self.ends[0][0] - self.served, 0.0) / self.rate

    def advance(self, us: float) -> None:
        """Let all programs read on for `us`, at the rate of the last outlook."""
        self.served += us * self.rate

    def pop(self, one_only: bool) -> list[Entry]:
        """Remove and return the programs that end at the time of the last outlook; one_only: only the first."""
        self.served, first = heapq.heappop(self.ends)
        ended = [first]
        while self.ends and self.ends[0][0] == self.served and not one_only:
            ended.append(heapq.heappop(self.ends)[1])
        return ended


class EvenSms:
    """Programs that read where each SM has an equal share of the bandwidth, and its programs equal parts of that.

    An SM takes at most most_of_sm, and at most what its programs can read; the other SMs get the rest. Programs that
    end within `as_one` us end together. as_one is 0 if other programs wait for their places, because the first to end,
    even by rounding, decides which program gets which place.
    """

    def __init__(self, most: float, most_of_sm: float, n_sms: int, n_places: int, as_one: float) -> None:
        self.as_one = as_one
        self.wanted = [min(most_of_sm, n * most) for n in range(n_places + 1)]  # by an SM on which n programs read
        self.n_sms_with = [n_sms] + [0] * n_places  # number of SMs on which n programs read
        self.n_reading = np.zeros(n_sms, dtype=np.intp)
        self.ends: list[list[tuple[float, Entry]]] = [[] for _ in range(n_sms)]  # a heap for each SM
        self.first = np.full(n_sms, np.inf)  # for each SM, `served` at its first end
        self.served, self.rates, self.left = np.zeros(n_sms), np.zeros(n_sms), np.zeros(n_sms)  # left: bytes, then us
        self.next_sm = 0
        self.changed: set[int] = set()  # SMs whose heap has changed since the last outlook

    def add(self, n_bytes: float, sm: int, entry: Entry) -> None:
        """Add a program that begins to read on `sm`."""
        heapq.heappush(self.ends[sm], (self.served.item(sm) + n_bytes, entry))
        self.changed.add(sm)

    def outlook(self, room: float) -> float:
        """Do the same as EvenPrograms.outlook."""
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
        np.divide(self.left, self.rates, out=self.left)  # infinite where no program reads, as `first` is there
        self.next_sm = int(self.left.argmin())
        return self.left.item(self.next_sm)

    def advance(self, us: float) -> None:
        """Do the same as EvenPrograms.advance."""
        if us:
            self.served += us * self.rates

    def pop(self, one_only: bool) -> list[Entry]:
        """Do the same as EvenPrograms.pop: the first program to end, then, SM by SM, the others that have ended."""
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
    """Return the rate at which each of n programs of one SM reads, for n from 0 to the most that an SM has now.

    On n_sms_with[n] SMs, n programs read. Such an SM wants the rate wanted[n], which grows with n.

    >>> rates_of([1, 1, 2], [0.0, 4.0, 9.0], 12.0).tolist()
    [0.0, 4.0, 2.0]
    """
    most = len(n_sms_with) - 1
    while most and not n_sms_with[most]:
        most -= 1
    share = level(n_sms_with[: most + 1], wanted, room)
    return np.array([0.0, *[min(wanted[n], share) / n for n in range(1, most + 1)]])


def level(n_sms_with: Sequence[int], wanted: Sequence[float], room: float) -> float:
    """Return the equal share per SM that uses up `room`, if SMs that want less leave the rest to the others.

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
            for _ in range(n_sms):  # one by one: a product would round differently, which may decide who ends first
                taken += want
    return math.inf


@dataclass(frozen=True)
class Work:
    """A launch's work in grid order: program p does the items [first[p], first[p + 1]); bytes [n_items] is their size.

    Each program comes `copies` times in a row, for example once per head, and each copy does all its items. A span is
    one item of one copy. So spans are ordered by program, then copy, then item.
    """

    bytes: Floats
    first: Ints
    copies: int = 1

    def spans(self) -> tuple[Ints, Ints, Ints]:
        """Return (program, copy, item) of each span, [n_spans] each."""
        n_items = np.diff(self.first)
        sizes = np.repeat(n_items, self.copies)
        grid_program = np.repeat(np.arange(len(sizes)), sizes)
        program, copy = np.divmod(grid_program, self.copies)
        before = np.cumsum(sizes) - sizes  # spans before each program of the grid
        return program, copy, self.first[program] + np.arange(len(program)) - before[grid_program]


@dataclass(frozen=True)
class Rules:
    """The costs that apply to one launch: a start-up in us, and the rates of a program, an SM and the memory.

    Rates are in bytes per us. most_of_sm None: programs share the memory equally, not SMs.
    """

    item_us: float
    most: float
    most_of_sm: float | None
    memory: float


@dataclass(frozen=True)
class Played:
    """When and where each span ran. Each span stands for `alike` copies, on as many SMs from SM alike * sm on.

    begin_us, end_us, sm, slot [n_spans]: one entry per span of the work with copies / alike copies. slot: which place
    of the SM. last_us: when the last span ends; if there is none, when the launch began.
    """

    begin_us: Floats
    end_us: Floats
    sm: Ints
    slot: Ints
    alike: int
    last_us: float

    def of_copies(self, copies: Ints, program: Ints, item: Ints, work: Work) -> Ints:
        """Return the played span for each given span of `work`; copies, program and item [n] name the given spans."""
        n_items = np.diff(work.first)
        sizes = n_items * (work.copies // self.alike)
        before = np.cumsum(sizes) - sizes
        return before[program] + copies // self.alike * n_items[program] + item - work.first[program]


def play(work: Work, n_slots: int, n_sms: int, rules: Rules, begin_us: float) -> Played:
    """Play one launch and return when and where each span runs."""
    must_wait = np.count_nonzero(np.diff(work.first)) * work.copies > n_slots
    # A waiting program takes the place of the first that ends. If several end together, their order matters: it goes by
    # SM, and if some programs have nothing to read, by starts at the same moment. In these cases each copy is played.
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
    programs = np.flatnonzero(sizes).tolist()[::-1]  # without those that have no items; the next program comes last
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
            ended = reading.pop(one_only=bool(starting) and starting[0][0] <= now)  # a start now precedes further ends
        for span, last, slot in ended:
            end[span] = now
            if span + 1 < last:
                begin[span + 1], place[span + 1] = now, slot
                starting.append((now + rules.item_us, (span + 1, last, slot)))
            else:
                free.append(slot)
    places = np.array(place, dtype=np.int64)
    return Played(np.array(begin), np.array(end), places % n_sms, places // n_sms, alike, now)

"""The simulator's clock: the programs of one launch go to slots, start up, and share what there is to read from.

Slot s is on SM s % n_sms, so the first programs go to one SM each, breadth first.

>>> work = Work(bytes=np.array([100e3, 100e3]), first=np.array([0, 1, 2]))
>>> rules = Rules(item_us=2.0, most=25e3, most_of_sm=None, memory=40e3)
>>> played = play(work, n_slots=2, n_sms=1, rules=rules, begin_us=0.0)
>>> played.end_us.tolist(), played.last_us
([7.0, 7.0], 7.0)
"""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pkv.cards.readers import AS_ONE, Entry, EvenPrograms, EvenSms
from pkv.cards.shares import Floats, n_alike

Ints = npt.NDArray[np.int64]


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

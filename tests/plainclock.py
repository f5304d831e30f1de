"""pkv.cards.clock's clock as plainly as it can be said: every copy of a program by itself, one event after another."""

import heapq
import math
from collections import deque

import numpy as np


def level(wanted: np.ndarray, room: float) -> float:
    """The equal share that uses up `room`, where those who want less leave the rest to the others."""
    if wanted.sum() <= room:
        return math.inf
    ordered = np.sort(wanted)
    shares = (room - np.cumsum(ordered) + ordered) / np.arange(len(ordered), 0, -1)
    return float(shares[np.argmax(shares <= ordered)])


def play_plainly(work, n_slots, n_sms, rules, begin_us):
    """(begin_us, end_us, place of each span, when the last one ends); a place is slot * n_sms + SM.

    Where SMs share the memory, `served` of an SM is what each of its programs would have read since the launch began;
    else there is one `served`, as if all programs were on one SM.
    """
    _, _, item = work.spans()
    n_bytes = work.bytes[item].tolist()
    first = np.concatenate([[0], np.cumsum(np.repeat(np.diff(work.first), work.copies))]).tolist()
    n_programs, n_groups = len(first) - 1, 1 if rules.most_of_sm is None else n_sms
    begin, end, place = [0.0] * len(n_bytes), [0.0] * len(n_bytes), [0] * len(n_bytes)
    free, starting = list(range(min(n_slots, n_programs)))[::-1], deque()
    ends, served = [[] for _ in range(n_groups)], np.zeros(n_groups)
    rates = np.zeros(n_groups)
    now, program = begin_us, 0
    while True:
        while free and program < n_programs:
            if first[program] < first[program + 1]:
                span, slot = first[program], free.pop()
                begin[span], place[span] = now, slot
                starting.append((now + rules.item_us, (span, first[program + 1], slot)))
            program += 1
        n_reading = np.array([len(group) for group in ends])
        busy = n_reading > 0
        each = np.maximum(n_reading, 1)
        if rules.most_of_sm is None:  # while nobody reads, the rate stays: it moves no end but by rounding
            rates = np.where(busy, np.minimum(rules.most, rules.memory / each), rates)
        else:
            wanted = np.minimum(rules.most_of_sm, n_reading * rules.most)
            rates = np.minimum(wanted, level(wanted, rules.memory)) / each
        left = np.full(n_groups, np.inf)
        firsts = np.array([group[0][0] for group in ends if group])
        left[busy] = (firsts - served[busy]).clip(0.0) / rates[busy]
        group, to_end = int(left.argmin()), float(left.min())
        to_start = starting[0][0] - now if starting else math.inf
        us = min(to_end, to_start)
        if us == math.inf:
            return np.array(begin), np.array(end), np.array(place, dtype=np.int64), now
        served += us * rates
        if to_start <= to_end:
            now, (span, last, slot) = starting.popleft()
            if n_bytes[span]:
                home = slot % n_groups
                heapq.heappush(ends[home], (float(served[home]) + n_bytes[span], (span, last, slot)))
                continue
        else:
            now += us
            served[group], (span, last, slot) = heapq.heappop(ends[group])
        end[span] = now
        if span + 1 < last:
            begin[span + 1], place[span + 1] = now, slot
            starting.append((now + rules.item_us, (span + 1, last, slot)))
        else:
            free.append(slot)

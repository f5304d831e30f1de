"""A timeline's spans as the pieces that a picture of SMs shows, without a word on how they are drawn.

A lane is an SM, and its slots lie in it one above the other. Spans of one row that follow each other in a slot, without
a gap that could be seen, are one piece: eight spans of 1 us each become one of 8 us. Merges of one launch are one piece
over all slots. Where pieces are still too many, or an SM runs more programs at once than could be told apart, a lane
shows how many run, not which.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pkv.cards.simulation import Timeline
from pkv.viz.rowstyles import EMPTY, MERGE, keys_of

MOST_LANES = 28
MOST_SLOTS = 16
MOST_PIECES = 5000
N_STEPS = 150  # of the time axis, where a lane shows how many programs run
Floats = npt.NDArray[np.float64]


class Piece(NamedTuple):
    """Work of one key (a row, MERGE, EMPTY) without a gap, in one slot of the `of_slots` that its launch uses."""

    lane: int
    slot: int
    of_slots: int
    key: int
    begin_us: float
    end_us: float
    n_spans: int


def shown_sms(timeline: Timeline, most: int = MOST_LANES) -> list[int]:
    """All SMs, or `most` of them: evenly spaced, and instead of its nearest neighbour the one that reads last.

    Numbers as in the timeline, ascending. Of 132 SMs it takes 0, 4, 9, 14, ...
    """
    n_sms = timeline.gpu.n_sms
    if n_sms <= most:
        return list(range(n_sms))
    chosen = [index * n_sms // most for index in range(most)]
    decode = timeline.spans[timeline.spans["item"] >= 0]
    if len(decode):
        last = int(decode["sm"][decode["end_us"].argmax()])
        chosen[min(range(most), key=lambda index: abs(chosen[index] - last))] = last
    return sorted(chosen)


def span_keys(timeline: Timeline) -> npt.NDArray[np.int64]:
    """What each span is drawn as: its row's key, MERGE, or EMPTY where its item has no token."""
    spans, items = timeline.spans, timeline.plan.items
    if not len(spans):
        return np.zeros(0, dtype=np.int64)
    keys = keys_of(timeline.plan.lengths)[0][spans["row"]]
    keys[items[spans["item"], 1] >= items[spans["item"], 2]] = EMPTY
    keys[spans["item"] < 0] = MERGE
    return keys


def slots_in_use(timeline: Timeline) -> list[int]:
    """For each launch how many slots its busiest SM uses; of a merge launch 1, for its slots are drawn as one."""
    spans, launches = timeline.spans, timeline.plan.launches
    used = [int(spans["slot"][spans["launch"] == number].max(initial=0)) + 1 for number in range(len(launches))]
    return [1 if launch.kernel == "merge" else n_slots for launch, n_slots in zip(launches, used, strict=True)]


def pieces_of(timeline: Timeline, sms: list[int], gap_us: float, most: int = MOST_PIECES) -> list[Piece] | None:
    """The pieces of these SMs, joined over gaps up to gap_us; None where more than `most`, or too many at once."""
    used = slots_in_use(timeline)
    if max(used, default=1) > MOST_SLOTS:
        return None
    lanes = {sm: lane for lane, sm in enumerate(sms)}
    spans = timeline.spans
    slots = np.where(spans["item"] < 0, 0, spans["slot"])
    order = np.lexsort((spans["begin_us"], slots, spans["launch"], spans["sm"]))
    columns = (spans["sm"], spans["launch"], slots, span_keys(timeline), spans["begin_us"], spans["end_us"])
    pieces: list[Piece] = []
    before: tuple[int, ...] = ()
    for sm, launch, slot, key, begin, end in zip(*(column[order].tolist() for column in columns), strict=True):
        if sm not in lanes:
            continue
        place = (sm, launch, slot, key)
        if place == before and begin - pieces[-1].end_us <= gap_us:
            last = pieces[-1]
            pieces[-1] = last._replace(end_us=max(end, last.end_us), n_spans=last.n_spans + 1)
        else:
            pieces.append(Piece(lanes[sm], slot, used[launch], key, begin, end, 1))
        before = place
        if len(pieces) > most:
            return None
    return pieces


def running(timeline: Timeline, sm: int, end_us: float) -> Floats:
    """Mean number of programs that decode on this SM in each of N_STEPS steps up to end_us."""
    edges = np.linspace(0.0, end_us, N_STEPS + 1)
    mine = timeline.spans[(timeline.spans["sm"] == sm) & (timeline.spans["item"] >= 0)]
    run = np.zeros(len(edges))  # at each edge: the time that all spans have run so far
    for name, sign in (("begin_us", 1.0), ("end_us", -1.0)):
        times = np.sort(mine[name])
        n_before = np.searchsorted(times, edges)
        run += sign * (n_before * edges - np.concatenate([[0.0], np.cumsum(times)])[n_before])
    return np.diff(run) / (edges[1] - edges[0])

"""The default cuts against the times that they were chosen by: pkv/data/results/default_cuts.json."""

from __future__ import annotations

import json
import math
from importlib import resources
from itertools import product

import numpy as np
import pytest

import pkv
from pkv.stages.s1_split_kv import MIN_TILES_PER_SPLIT
from pkv.stages.s2_row_local import LEAST_SPLITS, OVERSUBSCRIPTION

RECORD = json.loads((resources.files("pkv") / "data" / "results" / "default_cuts.json").read_text())
SHAPE = pkv.Shape(32, 8, 128, 16, "float16")
CELLS = [(int(n_sms), load) for n_sms, loads in RECORD["sms"].items() for load in loads]


def times(n_sms, load):
    return RECORD["sms"][str(n_sms)][load]["us"]


def lengths(n_sms, load):
    return RECORD["sms"][str(n_sms)][load]["lengths"]


def card(n_sms):
    return pkv.GpuProfile("h200", 90, n_sms)


def row_local_loss(n_sms, load, splits):
    """What row_local with the measured number of splits next to this one loses to the best of all cuts."""
    us = times(n_sms, load)
    measured = [int(name.split()[1]) for name in us if name.startswith("row_local ")]
    nearest = min(measured, key=lambda n: abs(math.log(n / splits)))
    return us[f"row_local {nearest}"] / min(us.values())


def mean_loss(factor, least):
    """Over all batches: the geometric mean of row_local's loss, cut `factor` times as fine as fills the GPU once."""
    losses = []
    for n_sms, load in CELLS:
        rows = lengths(n_sms, load)
        once = max(1, n_sms * 8 // (8 * len(rows)))
        most = max(1, -(-max(rows) // 16) // MIN_TILES_PER_SPLIT)
        losses.append(row_local_loss(n_sms, load, once if len(rows) == 1 else min(max(factor * once, least), most)))
    return float(np.exp(np.mean(np.log(losses))))


def test_row_local_is_cut_as_finely_as_measured_best():
    tried = {
        (factor, least): mean_loss(factor, least) for factor, least in product((1, 2, 3, 4), (1, 4, 8, 12, 16, 24))
    }
    assert tried[OVERSUBSCRIPTION, LEAST_SPLITS] <= 1.01 * min(tried.values())
    assert tried[1, 1] > 1.2 * tried[OVERSUBSCRIPTION, LEAST_SPLITS], "one fill loses where rows are ragged"


def test_the_queues_default_cut_is_near_the_best_that_was_tried():
    losses = {cell: times(*cell)["workqueue longest_first"] / min(times(*cell).values()) for cell in CELLS}
    assert max(losses.values()) <= 1.15, max(losses, key=losses.get)
    assert np.exp(np.mean(np.log(list(losses.values())))) <= 1.04


def test_no_batch_of_the_record_is_faster_with_flashinfer_than_with_the_queue():
    """Kernels alone, planning charged to neither: within 3% where the queue is behind."""
    ratios = {cell: min(t for name, t in times(*cell).items() if name.startswith("flashinfer"))
              / times(*cell)["workqueue longest_first"] for cell in CELLS}  # fmt: skip
    assert min(ratios.values()) >= 0.97, min(ratios, key=ratios.get)
    assert max(ratios.values()) > 3, "one row kept whole among eight, on 28 SMs"


@pytest.mark.parametrize(("n_sms", "load"), CELLS)
def test_the_queue_still_cuts_as_it_was_measured(n_sms, load):
    """8 programs per SM, twice as many where rows would not leave two items each, and so on: one of the shares."""
    rows = lengths(n_sms, load)
    made = pkv.plan(rows, SHAPE, stage="workqueue", gpu=card(n_sms))
    room = n_sms * 8 // 8
    while room < 2 * len(rows):
        room *= 2
    assert made.n_items <= room
    assert made.n_items > 0.5 * room or made.n_items == sum(-(-n // 32) for n in rows)

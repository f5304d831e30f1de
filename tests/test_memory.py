"""What is remembered of plans and caches between calls goes when they go, and their copies begin without it."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref

import pytest
import torch
from cases import ON_CPU, Case, batch

import pkv
import pkv.bench.engines.registry
from pkv import decoding
from pkv.kernels import launching, uploads
from pkv.runtime.memory import Memory
from pkv.stages import TAKES, s3_own_items, s4_adaptive, x_flashinfer

MEMORIES = {
    "sound": decoding.SOUND,
    "sizes": launching.SIZES,
    "caches": launching.CACHES,
    "uploads": uploads.UPLOADS,
    "made by": s3_own_items.MADE_BY,
    "in its place": s4_adaptive.IN_ITS_PLACE,
    "wrappers": x_flashinfer.WRAPPERS,
}


class Thing:
    pass


def test_it_is_of_one_object_and_goes_with_it():
    memory, one, other = Memory(), Thing(), Thing()
    memory.of(one)["a"] = 1
    assert (memory.known(one), memory.known(other)) == ({"a": 1}, {})
    for twin in (copy.copy(one), copy.deepcopy(one)):
        assert memory.known(twin) == {}
    memory.of(other)["b"] = 2
    memory.forget(other)
    assert memory.known(other) == {}
    del one
    gc.collect()
    assert memory._of == {}


def test_an_object_in_the_place_of_one_that_is_gone_has_nothing():
    memory = Memory()
    for _ in range(1000):  # most of them lie where the one before lay
        thing = Thing()
        assert memory.known(thing) == {}
        memory.of(thing)["a"] = 1


def test_threads_that_come_at_once_share_it(monkeypatch):
    memory, thing, first = Memory(), Thing(), []
    make = weakref.ref

    def slow(*args):  # another thread comes while this one makes its entry
        if not first:
            first.append(None)
            first[0] = memory.of(thing)
        return make(*args)

    monkeypatch.setattr("pkv.runtime.memory.weakref.ref", slow)
    assert memory.of(thing) is first[0] is memory.of(thing)


def test_every_memory_is_looked_at_here():
    modules = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "pkv"]
    found = {id(value) for module in modules for value in vars(module).values() if type(value) is Memory}
    assert found == {id(memory) for memory in MEMORIES.values()}


def remembered():
    return {name: set(memory._of) for name, memory in MEMORIES.items()}


@pytest.mark.parametrize("stage", [*(name for name in ON_CPU if TAKES[name]), "parts.plan"])
def test_a_plan_and_a_cache_that_ran_go_when_they_are_dropped(stage):
    """And what is remembered of them: nothing that is kept holds the object that it is kept of."""
    gc.collect()
    before, held = remembered(), {}

    def cut(lengths, shape, held=held):  # it holds the plan that it made
        return [(row, 0, length) for row, length in enumerate(lengths)]

    q, cache = batch(Case("kept", [20, 0, 40]))
    parts, stage = (pkv.Parts(plan=cut), "workqueue") if stage == "parts.plan" else (None, stage)
    plan = pkv.plan([20, 0, 40], pkv.Shape.of(q, cache), stage, parts=parts)
    held["plan"] = plan
    pkv.run(q, cache, plan, parts=parts)
    pkv.decode(q, cache, stage=stage, parts=parts)
    for name in ("sound", "sizes", "caches"):
        assert remembered()[name] - before[name]
    assert pickle.loads(pickle.dumps(plan)) == plan
    kept = weakref.ref(plan), weakref.ref(cache)
    decoding._capacity_plan.cache_clear()
    del plan, cache, q, cut, parts, held
    gc.collect()
    assert [reference() for reference in kept] == [None, None]
    assert {name: now - before[name] for name, now in remembered().items()} == {name: set() for name in MEMORIES}


def test_a_plan_from_elsewhere_is_checked_once(monkeypatch):
    q, cache = batch(Case("kept", [20, 40]))
    plan = pkv.Plan.from_json(pkv.plan([20, 40], pkv.Shape.of(q, cache), "row_local").to_json())
    n_checks, check = [], decoding.check_items
    monkeypatch.setattr(decoding, "check_items", lambda plan: (n_checks.append(1), check(plan)))
    first, again = (pkv.run(q, cache, plan)[0] for _ in range(2))
    assert len(n_checks) == 1
    assert torch.equal(first, again)

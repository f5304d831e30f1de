"""A plan covers every token exactly once, survives JSON, is refused where it does not fit, and counts right."""

from __future__ import annotations

import collections
import copy
import dataclasses
import json
import pickle
import re

import numpy as np
import pytest
import torch
from cases import DEVICE, Case, batch, known, launching, options_of, stage_params, stages
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pkv
from pkv.kernels.uploads import UPLOADS, uploaded
from pkv.plans.facts import Facts, Family, GridOrder, Merging
from pkv.plans.fields import Launch
from pkv.plans.gpu import TILES
from pkv.stages.s3_workqueue import requeue
from pkv.stages.x_flashinfer_rules import why_not

SHAPE = pkv.Shape(4, 2, 64, 16, torch.float16)
LLAMA = pkv.Shape(32, 8, 128, 16, "float16")

LENGTH = st.one_of(st.integers(0, 70), st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 1000, 5000]))
LENGTHS = st.lists(LENGTH, max_size=9)
MANY_LENGTHS = st.one_of(LENGTHS, st.lists(LENGTH, min_size=1, max_size=300))
SHAPES = st.builds(
    lambda group, heads, head_dim, page_size, dtype: pkv.Shape(group * heads, heads, head_dim, page_size, dtype),
    st.sampled_from([1, 3, 4, 8, 32, 40]),
    st.integers(1, 8),
    st.sampled_from([13, 64, 80, 128, 256]),
    st.sampled_from([1, 3, 16, 64, 544]),
    st.sampled_from(["float16", "bfloat16", "float32"]),
)


# --- properties ---


def check_plan(stage, lengths, shape, options):
    if stage == "adaptive" and options.get("policy") == "cost":
        options = {**options, "gpu": "rtx3060"}  # the card whose costs are known
    try:
        plan = pkv.plan(lengths, shape, stage=stage, **known(stage, options))
    except ValueError as error:  # a large tile with a large head_dim does not fit shared memory
        if re.search(r"tile = \d+ does not fit registers and shared memory", str(error)):
            return
        raise
    assert plan.stage == stage or stage == "adaptive"
    assert (plan.n_rows, plan.lengths.tolist()) == (len(lengths), lengths)
    assert plan.validate() is plan

    done = [np.zeros(length, dtype=int) for length in lengths]  # independent of validate(): count every token
    order = list(range(plan.n_items)) if plan.item_order is None else plan.item_order.tolist()
    items, visited = plan.items.tolist(), []
    for program in range(plan.n_programs):
        for item in order[plan.program_offsets[program] : plan.program_offsets[program + 1]]:
            row, begin, end = items[item]
            visited.append(item)
            assert plan.partial_offsets[row] <= item < plan.partial_offsets[row + 1]
            assert 0 <= begin <= end, (begin, end)
            done[row][begin:end] += 1
            assert begin % plan.tile == 0
    assert sorted(visited) == list(range(plan.n_items))
    for launch in plan.launches:  # a merge has room for every state of its rows
        if launch.kernel == "merge":
            assert np.diff(plan.partial_offsets)[list(launch.rows)].max(initial=0) <= launch.n_splits
    assert all((tokens == 1).all() for tokens in done)

    again = pkv.Plan.from_json(plan.to_json())
    assert again == plan
    assert not again.diff(plan)
    for field in dataclasses.fields(plan):  # not by to_json, which might leave one out of both
        if field.compare and not field.name.startswith("_"):
            assert np.array_equal(getattr(again, field.name), getattr(plan, field.name)), field.name
    assert again.counters == plan.counters
    assert hash(again) == hash(plan)
    assert str(plan).count("\n") <= 20
    check_counters(plan)


def check_counters(plan):
    """The definitions, item by item, in Python."""
    shape, counters = plan.shape, plan.counters
    items = plan.items.tolist()
    full = [(row, begin, end) for row, begin, end in items if end > begin]
    items_of = collections.Counter(row for row, _, _ in items)
    tokens_of = []
    order = list(range(plan.n_items)) if plan.item_order is None else plan.item_order.tolist()
    for program in range(plan.n_programs):
        mine = order[plan.program_offsets[program] : plan.program_offsets[program + 1]]
        tokens_of.append(sum(items[i][2] - items[i][1] for i in mine))
    heads, mib = shape.n_kv_heads, 2**20
    assert counters.launches == len(plan.launches)
    blocks = shape.group if shape.dtype == torch.float32 else -(-shape.group // 32)
    assert counters.programs == plan.n_programs * heads * blocks
    assert counters.empty_programs == sum(tokens == 0 for tokens in tokens_of) * heads * blocks
    assert counters.waves == pytest.approx(counters.programs / (plan.gpu.n_sms * plan.programs_per_sm))
    assert counters.cta_per_sm == pytest.approx(len(full) * heads / plan.gpu.n_sms)
    elements = sum(plan.lengths.tolist()) * 2 * heads * shape.head_dim
    assert counters.useful_kv_mib == pytest.approx(elements * (4 if shape.dtype == torch.float32 else 2) / mib)
    assert counters.merge_state_mib == pytest.approx(len(full) * shape.n_q_heads * (2 + shape.head_dim) * 4 / mib)
    moved = sum(items_of[row] > 1 for row, _, _ in full)
    assert counters.merge_moved_mib == pytest.approx(2 * moved * shape.n_q_heads * (1 + shape.head_dim) * 4 / mib)
    assert counters.padded_kv_mib == 0


PLANNED = st.tuples(
    MANY_LENGTHS,
    SHAPES,
    st.fixed_dictionaries(
        {},
        optional={
            "splits": st.integers(1, 40),
            "tile": st.sampled_from(TILES),
            "gpu": st.sampled_from(["rtx3060", "h200"]),
            "dynamic": st.booleans(),
            "ordering": st.sampled_from(["as_listed", "longest_first"]),
            "policy": st.sampled_from(["paper", "cost"]),
            "kernel": st.sampled_from(["tensor-core", "cuda-core"]),
        },
    ),
)


@pytest.mark.parametrize("n_lists", [200, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", pkv.STAGES)
def test_random_plans(stage, n_lists):
    """Lists of up to 300 rows, with zeros, ones, and the edges of tiles and pages."""

    @settings(deadline=None, max_examples=n_lists, database=None, suppress_health_check=list(HealthCheck))
    @given(PLANNED.filter(lambda planned: stage != "flashinfer" or has_kernel(planned[1], planned[2])))
    def check(planned):
        check_plan(stage, *planned)

    check()


def has_kernel(shape, options):
    """Does FlashInfer decode this shape?"""
    return why_not(shape, options.get("kernel")) is None


# --- by hand ---


def test_split_kv_by_hand():
    plan = pkv.plan([5, 40], SHAPE, stage="split_kv", splits=2, tile=16, gpu="rtx3060")
    assert plan.items.tolist() == [[0, 0, 5], [0, 16, 16], [1, 0, 16], [1, 16, 40]]
    assert plan.partial_offsets.tolist() == [0, 2, 4]
    assert plan.program_offsets.tolist() == [0, 1, 2, 3, 4]
    assert [(launch.kernel, launch.rows) for launch in plan.launches] == [("decode", (0, 1)), ("merge", (0, 1))]
    counters = plan.counters
    assert counters.launches == 2
    assert (counters.programs, counters.empty_programs) == (8, 2)  # 4 items, 2 KV heads
    assert counters.cta_per_sm == pytest.approx(3 * 2 / 28)
    assert counters.useful_kv_mib == 45 * 2 * 2 * 64 * 2 / 2**20
    assert counters.merge_state_mib == 3 * 4 * 66 * 4 / 2**20
    assert counters.merge_moved_mib == 2 * 3 * 4 * 65 * 4 / 2**20
    assert counters.waves == pytest.approx(8 / (28 * plan.programs_per_sm))


def test_length_buckets_by_hand():
    plan = pkv.plan([40, 5, 40, 0], SHAPE, stage="length_buckets", splits=2, gpu="rtx3060")
    assert plan.items.tolist() == [
        [0, 0, 16], [0, 16, 40], [1, 0, 0], [1, 0, 5], [2, 0, 16], [2, 16, 40], [3, 0, 0],
    ]  # fmt: skip
    assert plan.partial_offsets.tolist() == [0, 2, 4, 6, 7]
    decodes = [launch.rows for launch in plan.launches if launch.kernel == "decode"]
    assert decodes == [(3,), (1,), (0, 2)]
    assert [launch.rows for launch in plan.launches if launch.kernel == "merge"] == [(1,), (0, 2)]
    assert plan.item_order.tolist() == [6, 2, 3, 0, 1, 4, 5]
    assert plan.counters.merge_moved_mib == 2 * 5 * 4 * 65 * 4 / 2**20


def test_reference_by_hand():
    plan = pkv.plan([5, 0, 40], SHAPE, stage="reference")
    assert plan.items.tolist() == [[0, 0, 5], [1, 0, 0], [2, 0, 40]]
    assert plan.launches == ()
    assert plan.counters.launches == 0


def test_the_papers_bucketed_row():
    """One row of 8,192 tokens, 32 splits of 32-token tiles on 28 SMs: 32 MiB, 9.1 items per SM, 0.51 MiB of states."""
    plan = pkv.plan([8192], LLAMA, stage="length_buckets", splits=32, tile=32, gpu="rtx3060")
    counters = plan.counters
    assert counters.useful_kv_mib == 32.0
    assert counters.launches == 2
    assert round(counters.cta_per_sm, 1) == 9.1
    assert round(counters.merge_state_mib, 2) == 0.51
    assert {tuple(item) for item in plan.items.tolist()} == {(0, 256 * s, 256 * (s + 1)) for s in range(32)}


def test_default_splits_fill_the_gpu_at_hand():
    def n_items(lengths, gpu):
        return pkv.plan(lengths, LLAMA, stage="split_kv", gpu=gpu).n_items

    small, large = (n_items([65536], gpu) for gpu in ("rtx3060", "h200"))
    assert (small, large) == (28 * 4 // 8, 132 * 8 // 8)  # programs that the four schedulers of an SM share evenly
    assert n_items([65536], pkv.GpuProfile("one-sm", 86, 1)) == 1
    assert n_items([1], "h200") == 1
    assert n_items([32768] * 256, "rtx3060") == 256  # many rows fill it without splits
    assert n_items([0, 0], "rtx3060") == 2


def test_default_splits_are_no_shorter_than_pays():
    """A split of fewer than 2 tiles of 16 costs more in its partial state than it saves."""
    for stage in ("split_kv", "row_local"):
        made = [pkv.plan([n], LLAMA, stage=stage, gpu="h200").n_items for n in (1, 16, 48, 49, 64, 112, 640)]
        assert made == [1, 1, 1, 2, 2, 3, 20]


def test_row_local_cuts_several_rows_finer_as_they_may_be_ragged():
    def splits(lengths, gpu="h200"):
        made = pkv.plan(lengths, LLAMA, stage="row_local", gpu=gpu)
        return made.n_items // made.n_rows

    assert splits([65536]) == 132
    assert splits([65536] * 8) == 3 * 16
    assert splits([65536] * 64) == 12
    assert splits([200] * 64) == 6  # 13 tiles: splits of 2 at least
    assert splits([200, 65536], gpu="rtx3060") == 3 * 7


def test_the_longest_row_there_can_be():
    longest = 2**31 - 64
    plan = pkv.plan([longest, 5], SHAPE, stage="row_local", splits=3)
    assert plan.validate().items[2].tolist() == [0, (longest // 16 * 2 // 3) * 16, longest]
    assert plan.counters.useful_kv_mib == pytest.approx((longest + 5) * 512 / 2**20)
    with pytest.raises(ValueError, match=r"lengths\[1\] = 2147483585 must lie in 0 .. 2147483584 \(tokens of row 1\)"):
        pkv.plan([5, longest + 1], SHAPE)


@pytest.mark.parametrize(
    "lengths", [[5, 40], (5, 40), np.array([5, 40]), np.array([5, 40], dtype=np.uint8), torch.tensor([5, 40])], ids=str
)
def test_lengths_of_any_kind(lengths):
    plan = pkv.plan(lengths, SHAPE)
    assert plan.lengths.tolist() == [5, 40]
    assert plan.lengths.dtype == np.int32


# --- a plan is a value ---


def test_arrays_cannot_be_written():
    plan = pkv.plan([5, 40], SHAPE, stage="row_local", splits=2)
    for name in ("lengths", "items", "program_offsets", "partial_offsets"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(plan, name)[0] = 7
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.tile = 3


def test_the_callers_array_stays_the_callers():
    lengths = np.array([5, 40], dtype=np.int32)
    plan = pkv.plan(lengths, SHAPE, stage="row_local", splits=2)
    lengths[1] = 3
    assert plan.lengths.tolist() == [5, 40]
    assert plan.validate() is plan


def test_equality_and_diff():
    a, b = (pkv.plan([5, n], SHAPE, stage="row_local", splits=2, gpu="rtx3060") for n in (40, 41))
    assert a == pkv.plan([5, 40], SHAPE, stage="row_local", splits=2, gpu="rtx3060")
    assert a != b
    assert a != "a plan"
    assert a.diff(b) == ["lengths[1]: 40 against 41", "items[3]: [1, 16, 40] against [1, 16, 41]"]
    other_gpu = pkv.plan([5, 40], SHAPE, stage="row_local", splits=2, gpu="h200")
    assert any(line.startswith("gpu: ") and "rtx3060" in line and "h200" in line for line in a.diff(other_gpu))
    fewer = pkv.plan([5, 40], SHAPE, stage="row_local", splits=1, gpu="rtx3060")
    assert "items: 4 against 2 entries" in a.diff(fewer)


def test_a_plan_prints_as_a_table():
    text = str(pkv.plan([5, 40, 0], SHAPE, stage="split_kv", splits=2, gpu="rtx3060"))
    assert "split_kv" in text
    assert "4 query heads, 2 KV heads, head_dim 64, pages of 16, float16" in text
    assert "28 SMs" in text
    rows = [line.split(maxsplit=3) for line in text.splitlines() if re.match(r"\s+\d+\s+\d+\s+\d+\s", line)]
    assert rows == [["0", "5", "2", "0:5 empty"], ["1", "40", "2", "0:16 16:40"], ["2", "0", "2", "empty empty"]]
    assert max(map(len, text.splitlines())) <= 120
    many = str(pkv.plan([50_000] * 300, LLAMA, stage="row_local", splits=64))
    assert len(many.splitlines()) < 30
    assert "and 288 more rows" in many
    assert "at most" in str(pkv.plan([5, 40], SHAPE, dynamic=True))
    assert "| programs with tokens per SM 0.214" in text, "3 items, 2 KV heads, 28 SMs: each item is a program"
    runs = pkv.plan([500] * 30, LLAMA, stage="stream_k", gpu="rtx3060")
    assert runs.n_items > runs.n_programs
    assert f"| items with tokens per SM {runs.n_items * 8 / 28:.3g}" in str(runs)


# --- JSON ---


def test_json_is_plain_json():
    data = json.loads(pkv.plan([5, 40], SHAPE, stage="row_local", splits=2).to_json())
    assert data["format"] == 1
    assert data["items"] == [[0, 0, 5], [0, 16, 16], [1, 0, 16], [1, 16, 40]]
    assert data["shape"]["dtype"] == "float16"


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "{}", '{"format": 1}', '"plan"'])
def test_from_json_refuses_garbage(text):
    with pytest.raises(ValueError, match="not the JSON of a plan"):
        pkv.Plan.from_json(text)


def edited(**changes):
    data = json.loads(pkv.plan([5, 40], SHAPE, stage="row_local", splits=2, gpu="rtx3060").to_json())
    data.update(changes)
    return json.dumps(data)


@pytest.mark.parametrize("found", [2, 0, "1", None, 99])
def test_from_json_refuses_another_format(found):
    with pytest.raises(ValueError, match=rf"plan format {found}, this pkv reads 1: update pkv"):
        pkv.Plan.from_json(edited(format=found))


@pytest.mark.parametrize(
    "changes",
    [
        {"items": None},
        {"items": [[0, 0]]},
        {"lengths": "five"},
        {"shape": {}},
        {"shape": {"n_q_heads": 4}},
        {"gpu": "rtx3060"},
        {"launches": [{"kernel": "decode"}]},
        {"launches": [7]},
        {"unknown": 1},
        {"lengths": [5, 2**31]},
        {"lengths": [5, 41]},
        {"partial_offsets": [0, 2]},
        {"tile": "x"},
        {"tile": None},
        {"tile": True},
        {"programs_per_sm": None},
        {"items": [[0, 0, 5.5], [0, 16, 16], [1, 0, 16], [1, 16, 40]]},
        {"dynamic": 3},
        {"stage": 7},
        {"lengths": [[5], [40]]},
        {"gpu": {"name": "x", "arch": "a", "n_sms": 1}},
        {"gpu": {"name": "x", "arch": 86, "n_sms": "1"}},
        {"launches": [{"kernel": "decode", "rows": ["a"], "begin": 0, "end": 4, "n_splits": 2}]},
        {"launches": [{"kernel": "decode", "rows": [0, 1], "begin": "a", "end": 4, "n_splits": 2}]},
    ],
    ids=lambda changes: next(iter(changes)) + "-" + str(next(iter(changes.values())))[:20],
)
def test_from_json_refuses_a_broken_plan(changes):
    with pytest.raises(ValueError):  # noqa: PT011  many faults, each with its own words
        pkv.Plan.from_json(edited(**changes))


# --- validate catches tampering ---


def test_a_changed_plan_uploads_its_own_arrays():
    plan = pkv.plan([5, 40], SHAPE, stage="row_local", splits=2)
    uploaded(plan, torch.device("cpu"))
    other = dataclasses.replace(plan, items=plan.items[::-1])
    for made in (plan, other):
        for name in ("items", "program_offsets", "partial_offsets"):
            there = uploaded(made, torch.device("cpu")).arrays[name]
            assert there.tolist() == getattr(made, name).tolist()
            assert there.data_ptr() % 16 == 0


def tampered(**changes):
    plan = pkv.plan([5, 40], SHAPE, stage="split_kv", splits=2, gpu="rtx3060")
    return dataclasses.replace(plan, **{k: np.array(v) if isinstance(v, list) else v for k, v in changes.items()})


DECODE, MERGE = Launch("decode", (0, 1), 0, 4, 2), Launch("merge", (0, 1), n_splits=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"items": [[0, 0, 5], [0, 16, 16], [1, 0, 16], [1, 16, 39]]}, r"row 1 has 40 tokens, its items end at 39"),
        ({"items": [[0, 0, 5], [0, 16, 16], [1, 0, 16], [1, 16, 41]]}, r"row 1 has 40 tokens, its items end at 41"),
        ({"items": [[0, 0, 5], [0, 16, 16], [1, 0, 16], [1, 32, 40]]}, r"tokens 16:32 of row 1 are lost at item 3"),
        ({"items": [[0, 0, 5], [0, 16, 16], [1, 0, 32], [1, 16, 40]]}, r"tokens 16:32 of row 1 are done twice"),
        (
            {"items": [[0, 0, 5], [0, 16, 16], [1, 0, 10], [1, 10, 40]]},
            r"begins at 10, not at a multiple of the tile 16",
        ),
        ({"items": [[0, 0, 5], [1, 16, 16], [1, 0, 16], [1, 16, 40]]}, r"item 1 belongs to row 1.* of row 0"),
        ({"items": [[0, 0, 5], [0, 16, 3], [1, 0, 16], [1, 16, 40]]}, r"item 1 of row 0 ends before it begins"),
        ({"items": [[0, 0, 5], [0, 16, 16], [2, 0, 16], [2, 16, 40]]}, r"item 2 belongs to row 2"),
        ({"items": [[1, 0, 16], [1, 16, 40], [0, 0, 5], [0, 16, 16]]}, r"item 0 belongs to row 1"),
        ({"items": [0, 5]}, r"items \(2,\).*\[n_items, 3\]"),
        ({"lengths": [5, 41]}, r"row 1 has 41 tokens"),
        ({"lengths": [-5, 40]}, r"lengths\[0\] = -5"),
        ({"lengths": [5]}, r"partial_offsets has shape \(3,\), expected \(2,\)"),
        ({"partial_offsets": [0, 3, 2]}, r"partial_offsets must rise from 0 to n_items = 4"),
        ({"partial_offsets": [1, 2, 4]}, r"partial_offsets must rise"),
        ({"partial_offsets": [0, 2, 3]}, r"partial_offsets must rise"),
        ({"program_offsets": [0, 1, 3, 2, 4]}, r"program_offsets must rise"),
        ({"program_offsets": [0, 1, 2, 3]}, r"program_offsets must rise"),
        ({"program_offsets": []}, r"program_offsets has shape"),
        ({"item_order": [0, 1, 2, 2]}, r"item_order must name every item exactly once"),
        ({"item_order": [0, 1, 2]}, r"item_order must name every item"),
        ({"item_order": [0, 1, 2, 4]}, r"item_order must name every item"),
        ({"launches": (DECODE,)}, r"row 0 is split but never merged"),
        ({"launches": (DECODE, Launch("merge", (0,), n_splits=2))}, r"row 1 is split but never merged"),
        ({"launches": (DECODE, MERGE, MERGE)}, r"row 0 is merged twice"),
        (
            {"launches": (Launch("decode", (0, 1), 0, 3, 2), MERGE)},
            r"programs 0:3 must have 4 programs, n_splits = 2 for each of its 2 rows",
        ),
        ({"launches": (Launch("decode", (0, 1), 2, 4, 2), MERGE)}, r"programs 2:4 must begin at program 0"),
        ({"launches": (Launch("decode", (0, 2), 0, 4, 2), MERGE)}, r"names rows twice, or outside 0:2"),
        ({"launches": (Launch("encode", (0, 1), 0, 4, 2), DECODE, MERGE)}, r"unknown kernel 'encode'"),
        ({"launches": ()}, r"decode launches cover the programs 0:0 of 0:4"),
        (
            {"launches": (Launch("decode", (0, 1), 0, 4, 1), MERGE)},
            r"row 0 has 2 items, but its decode launch has 1 split",
        ),
        (
            {"launches": (Launch("decode", (0, 1), 0, 4, 4), MERGE)},
            r"row 0 has 2 items, but its decode launch has 4 splits",
        ),
        (
            {"launches": (Launch("decode", (0,), 0, 4, 2), MERGE)},
            r"programs 0:4 must have 2 programs, n_splits = 2 for each of its 1 row$",
        ),
        ({"launches": (Launch("decode", (0, 0), 0, 4, 2), MERGE)}, r"names rows twice"),
        (
            {"launches": (Launch("decode", (0,), 0, 4), MERGE)},
            r"programs 0:4 has items of row 1, which it does not name",
        ),
        (
            {"launches": (Launch("decode", (0,), 0, 2), MERGE, Launch("decode", (1,), 2, 4))},
            r"row 1 is merged before it",
        ),
        (
            {"launches": (Launch("decode", (0, 1), 0, 2), MERGE, Launch("decode", (), 2, 4))},
            r"row 1 is merged before it",
        ),
        ({"launches": (Launch("decode", (0, 1), 0, 5), MERGE)}, r"programs 0:5 ends outside 0:4"),
        ({"launches": (Launch("decode", (0, 1), 0, 6), Launch("decode", (0, 1), 6, 4), MERGE)}, r"ends outside 0:4"),
        ({"launches": (MERGE, DECODE)}, r"row 0 is merged before it is decoded"),
        (
            {"launches": (DECODE, Launch("merge", (0, 1), n_splits=1))},
            r"row 0 has 2 items, but its merge launch reads at most 1",
        ),
        ({"tile": 0}, r"tile 0"),
        ({"programs_per_sm": 0}, r"programs_per_sm 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_validate_catches(changes, message):
    plan = tampered(**changes)
    with pytest.raises(ValueError, match=rf"plan of stage 'split_kv': .*{message}"):
        plan.validate()


def test_validate_accepts_another_order():
    assert tampered(item_order=[3, 1, 0, 2]).validate()


# --- a plan is refused where it does not fit ---


def run_with(plan, lengths=(5, 40), **shape):
    q, cache = batch(Case("run", list(lengths), **shape))
    return pkv.run(q, cache, plan)


@pytest.mark.parametrize("stage", stages())
def test_a_plan_serves_any_cache_of_its_lengths_and_shape(stage):
    plan = pkv.plan([5, 40], SHAPE, stage=stage)
    a = run_with(plan)
    b = run_with(pkv.Plan.from_json(plan.to_json()))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("stage", "options"), stage_params({}, {"splits": 2}))
def test_a_stale_plan_is_refused(stage, options, launched):
    k = torch.zeros(2, 41, 2, 64, dtype=torch.float16, device=DEVICE)
    cache = pkv.PagedKVCache.from_dense(k, k, [5, 40], n_pages=8)
    q = torch.zeros(2, 4, 64, dtype=torch.float16, device=DEVICE)
    plan = pkv.plan(cache.host_lengths, pkv.Shape.of(q, cache), stage=stage, **options)
    pkv.run(q, cache, plan)
    cache.append(k[:, 0], k[:, 0])
    with pytest.raises(ValueError, match=r"plan is stale.*row 0 has 6 tokens.*planned for 5: make a new plan"):
        pkv.run(q, cache, plan)
    assert launched == [launching(plan)]


@pytest.mark.parametrize(("stage", "options"), stage_params({}, {"splits": 2}))
def test_a_plan_is_stale_once_a_row_was_freed(stage, options, launched):
    k = torch.zeros(2, 40, 2, 64, dtype=torch.float16, device=DEVICE)
    cache = pkv.PagedKVCache.from_dense(k, k, [5, 40])
    q = torch.zeros(2, 4, 64, dtype=torch.float16, device=DEVICE)
    plan = pkv.plan(cache.host_lengths, pkv.Shape.of(q, cache), stage=stage, **options)
    cache.free(1)
    with pytest.raises(ValueError, match=r"plan is stale.*row 1 has 0 tokens.*planned for 40: make a new plan"):
        pkv.run(q, cache, plan)
    assert launched == []


@pytest.mark.parametrize(
    ("lengths", "shape", "message"),
    [
        ((40, 5), {}, r"plan is stale or of another cache: row 0 has 40 tokens, it was planned for 5"),
        ((5, 39), {}, r"plan is stale or of another cache: row 1 has 39 tokens, it was planned for 40: make"),
        ((0, 40), {}, r"plan is stale or of another cache: row 0 has 0 tokens, it was planned for 5"),
        ((5, 40, 1), {}, r"plan has 2 rows, the cache 3"),
        (
            (5, 40),
            {"page_size": 8},
            r"plan was made for another shape than q and cache have \(page_size 16 against 8\): make a new plan",
        ),
        ((5, 40), {"n_q_heads": 8}, r"another shape than .* \(n_q_heads 4 against 8\)"),
        ((5, 40), {"head_dim": 128}, r"another shape than .* \(head_dim 64 against 128\)"),
    ],
    ids=["lengths", "a-token-fewer", "an-empty-row", "rows", "page-size", "heads", "head-dim"],
)
@pytest.mark.parametrize("stage", stages())
def test_a_plan_of_another_cache_is_refused(stage, lengths, shape, message, launched):
    plan = pkv.plan([5, 40], SHAPE, stage=stage)
    with pytest.raises(ValueError, match=message):
        run_with(plan, lengths, **shape)
    assert launched == []


@pytest.mark.parametrize("stage", [stage for stage in pkv.STAGES if "dynamic" in options_of(stage)])
def test_a_dynamic_plan_is_refused_beyond_its_capacity(stage, launched):
    plan = pkv.plan([32, 32], SHAPE, stage=stage, dynamic=True)
    with pytest.raises(ValueError, match=r"row 1 has 40 tokens, it was planned for at most 32"):
        run_with(plan)
    assert launched == []


# --- shapes ---


def test_shape_of_tensors():
    q, cache = batch(Case("shape", [5], n_q_heads=6, n_kv_heads=3, head_dim=80, page_size=8), torch.bfloat16)
    shape = pkv.Shape.of(q, cache)
    assert shape == pkv.Shape(6, 3, 80, 8, torch.bfloat16)
    assert shape == pkv.Shape(6, 3, 80, 8, "bfloat16", "torch.bfloat16")
    assert hash(shape) == hash(pkv.Shape(6, 3, 80, 8, "bfloat16"))
    assert shape != pkv.Shape(6, 3, 80, 8, "bfloat16", "float16")
    assert (shape.group, shape.kv_bytes_per_token) == (2, 2 * 3 * 80 * 2)


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ((5, 2, 64, 16, "float16"), ValueError, r"n_q_heads = 5 is not a multiple of n_kv_heads = 2"),
        ((0, 1, 64, 16, "float16"), ValueError, r"n_q_heads = 0"),
        ((4, 0, 64, 16, "float16"), ValueError, r"n_kv_heads = 0"),
        ((4, 2, -1, 16, "float16"), ValueError, r"head_dim = -1"),
        ((4, 2, 64, 0, "float16"), ValueError, r"page_size = 0"),
        ((4, 2, 64.0, 16, "float16"), TypeError, r"head_dim must be an int, got float"),
        ((True, 1, 64, 16, "float16"), TypeError, r"n_q_heads must be an int"),
        ((4, 2, 64, 16, "float17"), TypeError, r"dtype = 'float17'"),
        ((4, 2, 64, 16, torch.int32), TypeError, r"dtype = torch.int32"),
        ((4, 2, 64, 16, "tensor"), TypeError, r"dtype = 'tensor'"),
    ],
    ids=str,
)
def test_bad_shapes(sizes, error, message):
    with pytest.raises(error, match=message):
        pkv.Shape(*sizes)


def test_copies_are_without_what_running_made_and_stay_read_only():
    plan = pkv.plan([5, 40], SHAPE, stage="row_local", splits=2)
    uploaded(plan, torch.device("cpu"))
    for other in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert other == plan
        assert UPLOADS.known(plan)
        assert not UPLOADS.known(other)
        with pytest.raises(ValueError, match="read-only"):
            other.items[0] = 1


def test_a_plan_of_the_first_format_is_still_read():
    data = json.loads(pkv.plan([5, 40], SHAPE, stage="row_local", splits=2).to_json())
    for name in ("variant", "explanation", "fallback"):
        del data[name]
    assert pkv.Plan.from_json(json.dumps(data)) == pkv.plan([5, 40], SHAPE, stage="row_local", splits=2)
    for wrong in (True, 1.0, 2):
        with pytest.raises(ValueError, match="plan format"):
            pkv.Plan.from_json(json.dumps({**data, "format": wrong}))


@pytest.mark.parametrize("wrong", [5, b"rtx3060", True, {}])
def test_a_gpu_that_is_none_is_named(wrong):
    plan = pkv.plan([5], SHAPE)
    for ask in (lambda: pkv.simulate(plan, gpu=wrong), lambda: pkv.explain([5], SHAPE, gpu=wrong)):
        with pytest.raises(TypeError, match=r"gpu must be a profile's name or a pkv.GpuProfile"):
            ask()
    with pytest.raises(TypeError, match=r"plan must be a pkv.Plan, got int"):
        pkv.simulate(5)
    with pytest.raises(TypeError, match=r"other must be a pkv.Plan, got str"):
        plan.diff("x")


# --- facts ---


def test_facts_follow_from_the_stage_whatever_way_a_plan_came_about():
    wanted = dict.fromkeys(pkv.STAGES, Facts()) | {
        "reference": Facts(family=Family.TORCH),
        "flashinfer": Facts(family=Family.FLASHINFER, grid_order=GridOrder.ITEMS_FIRST),
        "stream_k": Facts(merging=Merging.BY_CUT),
    }
    for stage, facts in wanted.items():
        plan = pkv.plan([5, 40], LLAMA, stage="stream_k")
        for made in (pkv.plan([5, 40], LLAMA, stage=stage), dataclasses.replace(plan, stage=stage)):
            if made.stage == stage:  # not the winner's, of adaptive
                assert (made.family, made.grid_order, made.merging) == pkv.Plan.from_json(made.to_json()).facts == facts
    assert dataclasses.replace(plan, stage="somebody's").facts == Facts()
    assert requeue(pkv.plan([5, 40], LLAMA, stage="flashinfer")).facts == Facts()


@pytest.mark.parametrize("stage", ["workqueue", "row_local", "split_kv"])
def test_a_plan_without_launches_is_refused_where_kernels_are_needed(stage):
    """Under another name a plan of the reference would leave `out` as it was."""
    k = torch.zeros(2, 40, 2, 64)
    cache, q = pkv.PagedKVCache.from_dense(k, k, [5, 40]), torch.zeros(2, 4, 64)
    plan = pkv.plan([5, 40], pkv.Shape.of(q, cache), stage="reference")
    out = torch.full_like(q, 7.0)
    with pytest.raises(ValueError, match="decode launches cover the programs 0:0"):
        pkv.run(q, cache, dataclasses.replace(plan, stage=stage, tile=16), out=out)
    assert (out == 7.0).all()

"""Stage adaptive: the published gates to the letter, the cheapest by prediction, and life without FlashInfer."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pytest
import torch
from cases import Case, batch

import pkv
from pkv.bench.accuracy import Yardstick
from pkv.cards.known import load_gpu
from pkv.plans.gpu import Costs, GpuProfile
from pkv.stages import s3_workqueue, s4_adaptive, x_flashinfer
from pkv.stages.s4_adaptive import CANDIDATES, OWN, PREFERRED, cheapest, paper_route
from pkv.stages.x_flashinfer import BackendError

LLAMA = pkv.Shape(32, 8, 128, 16, "float16")
KEPT, GATE = 16384, 16383


# --- policy "paper" ---


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("longest", [1, GATE, KEPT, 65536])
@pytest.mark.parametrize("n_rows", [1, 2, 4, 7, 8, 9, 64])
def test_the_published_gates(n_rows, longest, group):
    """G != 4 or a longest row below 16,384: FlashInfer; 1 row: buckets; 8 or more: the queue; else FlashInfer."""
    want = "flashinfer"
    if group == 4 and longest >= 16384:
        want = {1: "length_buckets", 8: "workqueue", 9: "workqueue", 64: "workqueue"}.get(n_rows, "flashinfer")
    assert paper_route(n_rows, longest, group)[0] == want
    shape = pkv.Shape(8 * group, 8, 128, 16, "float16")
    lengths = [longest] + [min(100, longest)] * (n_rows - 1)
    explanation = pkv.explain(lengths, shape, policy="paper", gpu="rtx3060")
    assert explanation.chosen == want
    assert explanation.fallback in ("length_buckets", "workqueue"), "the paper has no other stage"
    made = pkv.plan(lengths, shape, stage="adaptive", gpu="rtx3060").validate()
    assert made.stage == want
    assert made.fallback == (explanation.fallback if want == "flashinfer" else None)
    assert explanation.rule in made.explanation


def test_a_row_without_tokens_is_not_active():
    """7 rows with tokens and 3 without are 7 rows to the gates, not 10."""
    assert pkv.explain([20000] * 7 + [0] * 3, LLAMA, gpu="rtx3060").chosen == "flashinfer"
    assert pkv.explain([20000] * 8 + [0] * 3, LLAMA, gpu="rtx3060").chosen == "workqueue"
    assert pkv.explain([20000, 0], LLAMA, gpu="rtx3060").chosen == "length_buckets"


@pytest.mark.parametrize(("lengths", "n_items"), [([20000], 32), ([20000] * 8, 8 * 24)])
def test_the_published_split_counts(lengths, n_items):
    assert pkv.plan(lengths, LLAMA, stage="adaptive", gpu="rtx3060").n_items == n_items


def test_a_shape_that_flashinfer_refuses_goes_to_a_stage_of_ours():
    shape = pkv.Shape(8, 2, 80, 16, "float16")
    explanation = pkv.explain([100] * 9, shape, gpu="rtx3060")
    assert (explanation.chosen, explanation.plan.fallback) == ("workqueue", None)
    assert "head_dim of 64, 128 or 256, not 80" in explanation.rule
    assert "cannot: its kernels take a head_dim" in str(explanation)
    assert pkv.plan([100] * 9, shape, stage="adaptive", policy="cost", gpu="rtx3060").stage in OWN


# --- policy "cost" ---


@pytest.mark.parametrize(
    "lengths", [[8192], [65536], [30000, 4000, 9000, 100], [500] * 8, [16384] + [900] * 7, [0, 5, 0], [4000] * 40]
)
def test_the_cheapest_is_taken(lengths):
    explanation = pkv.explain(lengths, LLAMA, policy="cost", gpu="rtx3060")
    times = {entry.stage: entry.prediction.kernels_ms for entry in explanation.candidates}
    assert set(times) == set(CANDIDATES)
    for taken, among in ((explanation.chosen, CANDIDATES), (explanation.fallback, OWN)):
        least = min(times[name] for name in among)
        alike = [name for name in PREFERRED if name in among and times[name] <= 1.01 * least]
        assert taken == alike[0], "of those within 1% of the least"
    is_least = times[explanation.chosen] == min(times.values())
    assert explanation.rule == f"its predicted time is {'' if is_least else 'within 1% of '}the least"
    made = pkv.plan(lengths, LLAMA, stage="adaptive", policy="cost", gpu="rtx3060")
    assert (made.stage, made.explanation) == (explanation.chosen, str(explanation))
    assert pkv.Plan.from_json(made.to_json()) == made


def test_times_within_one_percent_are_alike():
    assert set(PREFERRED) == set(CANDIDATES)
    assert cheapest({"workqueue": 100.9, "stream_k": 100.0}) == "workqueue", "measured faster with the same items"
    assert cheapest({"split_kv": 100.0, "length_buckets": 100.5, "workqueue": 100.9}) == "workqueue"
    assert cheapest({"split_kv": 100.0, "length_buckets": 100.5, "workqueue": 101.1}) == "length_buckets"
    assert cheapest({"flashinfer": 100.0, "row_local": 100.9, "workqueue": 102.0}) == "row_local"
    assert cheapest({"flashinfer": 100.0, "row_local": 102.0, "workqueue": 102.0}) == "flashinfer"
    assert cheapest(dict.fromkeys(CANDIDATES, 0.0)) == PREFERRED[0]


def test_planning_is_charged_to_nobody():
    """FlashInfer's planning within the step makes its published times longer, and must not decide."""
    card = load_gpu("rtx3060")
    dear = dataclasses.replace(card, costs=dataclasses.replace(card.costs, flashinfer_plan_us=1e6))
    lengths = [20000, 3000, 4000, 5000]
    assert pkv.explain(lengths, LLAMA, policy="cost", gpu=card).chosen == "flashinfer"
    assert pkv.explain(lengths, LLAMA, policy="cost", gpu=dear).chosen == "flashinfer"


def test_costs_decide():
    """Where a launch costs a second, one launch wins; where a program reads slowly, many programs do."""
    lengths = [30000, 2000, 500]
    slow_launch = GpuProfile("slow launch", 86, 28, Costs(300, 300, item_us=1, launch_us=1e6))
    slow_program = GpuProfile("slow program", 86, 28, Costs(300, 1, item_us=0, launch_us=0))
    few = pkv.explain(lengths, LLAMA, policy="cost", gpu=slow_launch)
    assert len(few.plan.launches) == min(len(entry.plan.launches) for entry in few.candidates)
    assert pkv.explain(lengths, LLAMA, policy="cost", gpu=slow_program).chosen not in ("split_kv", "flashinfer")


def test_a_gpu_without_costs_is_refused_with_a_remedy():
    unknown = GpuProfile("of tomorrow", 130, 100)
    for ask in (lambda: pkv.explain([5], LLAMA, policy="cost", gpu=unknown),
                lambda: pkv.plan([5], LLAMA, stage="adaptive", policy="cost", gpu=unknown)):  # fmt: skip
        with pytest.raises(ValueError, match=r"gpu = 'of tomorrow' has no costs.*pass gpu='rtx3060'"):
            ask()
    assert "no predictions: of tomorrow has no costs" in str(pkv.explain([5], LLAMA, gpu=unknown))


@pytest.mark.parametrize("wrong", ["papers", 3, True, ["cost"]])
def test_an_unknown_policy_is_named(wrong):
    with pytest.raises(ValueError, match=r"policy = .* does not exist; choose one of paper, cost"):
        pkv.plan([5], LLAMA, stage="adaptive", policy=wrong)
    with pytest.raises(ValueError, match=r"policy = .* does not exist"):
        pkv.explain([5], LLAMA, policy=wrong)


def test_explain_says_it_in_json_and_in_words():
    explanation = pkv.explain([20000] * 8, LLAMA, policy="cost", gpu="rtx3060")
    told, text = explanation.to_dict(), str(explanation)
    assert (told["policy"], told["gpu"], told["chosen"]) == ("cost", "rtx3060", explanation.chosen)
    for entry, candidate in zip(told["candidates"], explanation.candidates, strict=True):
        assert entry["gpu_ms"] == pytest.approx(sum(entry["terms_ms"].values()))
        assert f"{candidate.prediction.kernels_ms * 1000:.1f} us" in text
    with pytest.raises(TypeError, match=r"shape must be a pkv.Shape, got dict"):
        pkv.explain([5], {})
    with pytest.raises(ValueError, match=r"lengths\[1\] = -1"):
        pkv.explain([5, -1], LLAMA)
    with pytest.raises(ValueError, match=r"head_dim = 512 is above 256"):
        pkv.explain([5], pkv.Shape(4, 2, 512, 16, "float16"))


@pytest.mark.parametrize("policy", ["paper", "cost"])
@pytest.mark.parametrize("lengths", [[], [0, 0, 0]])
def test_a12_nothing_to_do(policy, lengths):
    made = pkv.plan(lengths, LLAMA, stage="adaptive", policy=policy, gpu="rtx3060").validate()
    assert made.counters.useful_kv_mib == 0
    assert "Policy" in made.explanation


# --- FlashInfer missing, refusing, failing ---


@pytest.fixture
def forgetful(monkeypatch):
    """As in a new process: nothing has failed, nobody was warned."""
    monkeypatch.setattr(s4_adaptive, "_failed", {})
    monkeypatch.setattr(s4_adaptive, "_warned", set())


def asked(monkeypatch, answer):
    """Let FlashInfer's launch answer so; returns the plans that it was asked to run."""
    plans = []

    def launch(q, cache, plan, scale, out, lse, values=None):
        plans.append(plan)
        if isinstance(answer, Exception):
            raise answer
        answer(out, lse)

    monkeypatch.setattr(x_flashinfer, "launch", launch)
    return plans


def test_flashinfer_runs_where_it_works(monkeypatch, forgetful):
    def fill(out, lse):
        out.fill_(3)
        lse.fill_(2)

    plans = asked(monkeypatch, fill)
    q, cache = batch(Case("works", [40, 7]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, lse = pkv.decode(q, cache, stage="adaptive", return_lse=True)
    assert [made.stage for made in plans] == ["flashinfer"]
    assert ((out == 3).all(), (lse == 2).all()) == (True, True)


def test_what_fails_once_is_replaced_with_one_warning_and_not_tried_again(monkeypatch, forgetful):
    plans = asked(monkeypatch, BackendError("stage 'flashinfer': FlashInfer's plan() failed: no nvcc"))
    q, cache = batch(Case("fails", [40, 0, 7]))
    yardstick = Yardstick(q, cache)
    with pytest.warns(UserWarning, match=r"takes workqueue in place of flashinfer: .*no nvcc") as caught:
        assert yardstick.measure(*pkv.decode(q, cache, stage="adaptive", return_lse=True)).ok
    assert (len(caught), len(plans)) == (1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert yardstick.measure(*pkv.decode(q, cache, stage="adaptive", return_lse=True)).ok
    assert len(plans) == 1
    made = pkv.plan([40, 0, 7], pkv.Shape.of(q, cache), stage="adaptive")
    for _ in range(2):
        assert yardstick.measure(*pkv.run(q, cache, made)).ok
    assert (made.stage, made.fallback, len(plans)) == ("flashinfer", "workqueue", 1)


def test_by_cost_the_cheapest_stage_of_ours_takes_the_place(monkeypatch, forgetful):
    asked(monkeypatch, BackendError("not here"))
    q, cache = batch(Case("by cost", [64, 64]))
    made = pkv.plan([64, 64], pkv.Shape.of(q, cache), stage="adaptive", policy="cost", gpu="rtx3060")
    assert (made.stage, made.fallback) == ("flashinfer", "stream_k")
    with pytest.warns(UserWarning, match="takes stream_k in place of flashinfer: not here"):
        assert Yardstick(q, cache).measure(*pkv.run(q, cache, made)).ok


def test_another_shape_or_layout_is_tried_for_itself(monkeypatch, forgetful):
    plans = asked(monkeypatch, BackendError("no"))
    cases = ((Case("a", [40]), {}), (Case("b", [40], n_q_heads=2), {}), (Case("a", [40]), {"layout": "HND"}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case, options in cases:
            pkv.decode(*batch(case, **options), stage="adaptive")
    assert len(plans) == 3


def test_a_half_written_result_is_written_again(monkeypatch, forgetful):
    def launch(q, cache, plan, scale, out, lse, values=None):
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        raise BackendError("fell over at run")

    monkeypatch.setattr(x_flashinfer, "launch", launch)
    q, cache = batch(Case("half", [40, 0, 7]))
    with pytest.warns(UserWarning, match="fell over at run"):
        result = pkv.decode(q, cache, stage="adaptive", return_lse=True)
    assert Yardstick(q, cache).measure(*result).ok


def test_other_errors_are_not_swallowed(monkeypatch, forgetful):
    asked(monkeypatch, ZeroDivisionError("a fault of ours"))
    with pytest.raises(ZeroDivisionError, match="a fault of ours"):
        pkv.decode(*batch(Case("fault", [40])), stage="adaptive")


def test_an_explicit_stage_never_falls_back(monkeypatch, forgetful):
    asked(monkeypatch, BackendError("not here"))
    with pytest.raises(BackendError, match="not here"):
        pkv.decode(*batch(Case("explicit", [40])), stage="flashinfer")


def test_a_plan_read_from_json_falls_back_too(monkeypatch, forgetful):
    asked(monkeypatch, BackendError("not here"))
    q, cache = batch(Case("json", [40, 7]))
    made = pkv.Plan.from_json(pkv.plan([40, 7], pkv.Shape.of(q, cache), stage="adaptive").to_json())
    with pytest.warns(UserWarning, match="takes workqueue"):
        assert Yardstick(q, cache).measure(*pkv.run(q, cache, made)).ok


def test_a_winner_of_ours_runs_as_itself(launched):
    q, cache = batch(Case("ours", [40, 7], head_dim=80))
    made = pkv.plan([40, 7], pkv.Shape.of(q, cache), stage="adaptive", policy="cost", gpu="rtx3060")
    assert made.stage in OWN
    want = pkv.run(q, cache, s3_workqueue.requeue(made))
    assert all(torch.equal(a, b) for a, b in zip(want, pkv.run(q, cache, made), strict=True))
    assert launched == ["workqueue", made.stage]
    assert np.array_equal(made.items, pkv.plan([40, 7], made.shape, stage=made.stage, gpu="rtx3060").items)


def test_what_may_pass_is_tried_again(monkeypatch, forgetful):
    short = BackendError("FlashInfer's plan() failed")
    short.__cause__ = torch.OutOfMemoryError("out of memory")
    plans = asked(monkeypatch, short)
    q, cache = batch(Case("short-of-memory", [40]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            assert Yardstick(q, cache).measure(*pkv.decode(q, cache, stage="adaptive", return_lse=True)).ok
    assert len(plans) == 2


def test_lengths_that_flashinfer_cannot_count_go_to_a_stage_of_ours():
    longest = 2**31 - 64
    for policy in ("paper", "cost"):
        found = pkv.explain([longest] * 3, LLAMA, policy=policy, gpu="rtx3060")
        assert found.chosen in OWN
        assert "counts in 32 bits" in str(found)
        assert pkv.plan([longest] * 3, LLAMA, stage="adaptive", policy=policy, gpu="rtx3060").stage in OWN
    assert pkv.explain([longest] * 8, LLAMA, gpu="rtx3060").chosen == "workqueue"


def test_the_explanation_of_a_plan_says_nothing_untrue():
    made = pkv.plan([5, 40], LLAMA, stage="adaptive", gpu="rtx3060")
    assert "no costs" not in made.explanation
    assert made.explanation.splitlines()[0] in str(made), "and the plan's table has the reason"
    assert "(tensor-core)" in str(made)


def test_candidates_are_listed_by_their_time():
    found = pkv.explain([16384] + [900] * 7, LLAMA, policy="cost", gpu="rtx3060")
    listed = [line.split()[0] for line in str(found).splitlines()[1:] if " us = " in line]
    times = {entry.stage: entry.prediction.kernels_ms for entry in found.candidates}
    assert listed == sorted(times, key=times.__getitem__)


@pytest.mark.parametrize(
    ("stage", "changes", "message"),
    [
        ("flashinfer", {"fallback": "nonsense"}, r"fallback = 'nonsense' must be None, or a stage of ours"),
        ("flashinfer", {"fallback": "adaptive"}, r"fallback = 'adaptive' must be None, or a stage of ours"),
        ("flashinfer", {"fallback": "workqueue", "dynamic": True}, r"it is dynamic, but its kernel reads"),
        ("flashinfer", {"dynamic": True}, r"it is dynamic, but its kernel reads the planned lengths"),
        ("flashinfer", {"variant": "x"}, r"no kernel 'x'"),
        ("workqueue", {"fallback": "workqueue"}, r"fallback = 'workqueue' must be None"),
        ("workqueue", {"dynamic": True}, r"it is dynamic, but its kernel reads the planned lengths"),
        ("length_buckets", {"dynamic": True}, r"it is dynamic, but its kernel reads the planned lengths"),
        ("workqueue", {"stage": "adaptive"}, r"a plan carries the stage that was chosen, never adaptive itself"),
    ],
)
def test_a_plan_that_was_tampered_with_is_refused(stage, changes, message, launched):
    q, cache = batch(Case("tampered", [5, 40, 100], n_q_heads=8))
    made = pkv.plan([5, 40, 100], pkv.Shape.of(q, cache), stage=stage, gpu="rtx3060")
    for other in (
        dataclasses.replace(made, **changes),
        pkv.Plan.from_json(dataclasses.replace(made, **changes).to_json()),
    ):
        with pytest.raises(ValueError, match=message):
            pkv.run(q, cache, other)
    assert launched == []


def test_a_requeued_plan_is_the_queues_own(launched):
    q, cache = batch(Case("requeued", [40, 7]))
    made = s3_workqueue.requeue(pkv.plan([40, 7], pkv.Shape.of(q, cache), stage="adaptive"))
    assert (made.stage, made.variant, made.explanation, made.fallback) == ("workqueue", "", "", None)
    pkv.run(q, cache, made)
    assert launched == ["workqueue"]


def test_the_card_at_hand_brings_its_shipped_costs(monkeypatch):
    from types import SimpleNamespace

    from pkv.cards import known

    def of(name, major, minor, n_sms):
        properties = SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=n_sms)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        return known._gpu_of_index.__wrapped__(0)

    assert of("NVIDIA GeForce RTX 3060", 8, 6, 28) == load_gpu("rtx3060")
    assert of("NVIDIA H200", 9, 0, 132) == load_gpu("h200")
    assert of("NVIDIA H200", 9, 0, 28) == load_gpu("h200-28sm")  # a slice of it is another card
    assert of("NVIDIA H200", 9, 0, 60) == GpuProfile("nvidia-h200", 90, 60)
    assert of("NVIDIA GeForce RTX 3060 Ti", 8, 6, 38).costs is None

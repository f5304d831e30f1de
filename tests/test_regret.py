"""Regret: by hand on one step, and of the policies on traces that nothing was calibrated on."""

from __future__ import annotations

import pytest

import pkv
from pkv.bench.loads.traces import make_trace, steps_of
from pkv.bench.records import regret
from pkv.bench.records.regret import held_out, kernels_ms, regrets, routes_of, splits_for
from pkv.cards.known import load_gpu

LLAMA = pkv.Shape(32, 8, 128, 16, "float16")
CARD = load_gpu("rtx3060")


def test_regret_of_one_step_by_hand():
    lengths = [16384] + [900] * 7
    routes = routes_of(lengths, LLAMA, CARD, splits=20)
    times = {route: kernels_ms(found.plan, CARD) for route, found in routes.items()}
    assert times == {route: found.simulated_ms for route, found in routes.items()}
    found = regrets([lengths], LLAMA, splits=20)
    assert {entry.route for entry in found} == set(times)
    for entry in found:
        assert entry.mean == entry.worst == pytest.approx(times[entry.route] / min(times.values()) - 1)
        assert entry.ms == pytest.approx(times[entry.route])
    assert found[0].mean == 0
    assert [entry.mean for entry in found] == sorted(entry.mean for entry in found)


def test_what_routes_share_is_planned_predicted_and_played_once(monkeypatch):
    counts = dict.fromkeys(("plan_step", "predict", "simulate"), 0)
    for name in counts:
        called = getattr(regret, name)

        def counted(*arguments, name=name, called=called, **options):
            counts[name] += 1
            return called(*arguments, **options)

        monkeypatch.setattr(regret, name, counted)
    for longest, n_routes in [(900, 6), (20_000, 7)]:  # of the long one the paper's policy takes a queue of its own
        counts.update(dict.fromkeys(counts, 0))
        routes = routes_of([longest] + [900] * 39, LLAMA, CARD)
        assert len(routes) == 8
        assert set(counts.values()) == {n_routes}, counts
        assert routes["policy cost"] is routes[f"always {routes['policy cost'].plan.stage}"]


@pytest.mark.parametrize("shape", [LLAMA, pkv.Shape(32, 32, 128, 16, "float16"), pkv.Shape(8, 2, 64, 16, "float32")])
@pytest.mark.parametrize("lengths", [[5], [0, 0, 7], [16384] * 3, [16384] + [900] * 7, [2000] * 20])
def test_policies_take_what_explain_says(lengths, shape):
    routes = routes_of(lengths, shape, CARD)
    for policy in ("paper", "cost"):
        found = pkv.explain(lengths, shape, policy=policy, gpu=CARD)
        route = routes[f"policy {policy}"]
        assert route.plan.stage == found.chosen
        assert route.plan.items.tolist() == found.plan.items.tolist()
        assert route.predicted_ms == next(c.prediction.kernels_ms for c in found.candidates if c.stage == found.chosen)


def test_steps_weigh_alike_however_they_are_grouped():
    """Three steps of a growing row stand as one run of three, and a step of other rows as one."""
    steps = [[5000], [5001], [5002], [], [0], [900] * 8]
    together = {entry.route: entry for entry in regrets(steps, LLAMA)}
    runs = [{entry.route: entry for entry in regrets([step], LLAMA)} for step in ([5001], [900] * 8)]
    # [0] has no tokens and [] no rows: nobody could regret anything there
    for route, entry in together.items():
        assert entry.mean == pytest.approx((3 * runs[0][route].mean + runs[1][route].mean) / 4)
        assert entry.worst == max(run[route].worst for run in runs)
        assert sum(entry.taken.values()) == 4


def test_planning_is_charged_to_nobody():
    plan = pkv.plan([5000] * 4, LLAMA, stage="flashinfer", gpu=CARD)
    assert kernels_ms(plan, CARD) == pytest.approx(
        pkv.simulate(plan, CARD).gpu_ms - CARD.costs.flashinfer_plan_us / 1000
    )


def test_calibrated_splits_are_the_best_on_their_own_seed():
    steps = steps_of(make_trace("bimodal", regret.CALIBRATION_SEED, 24, 8), 8, 16)

    def mean_ms(splits):
        return next(e.ms for e in regrets(steps, LLAMA, splits=splits) if e.route == "workqueue, calibrated splits")

    best = splits_for("bimodal", LLAMA, 24, 8, 16)
    assert mean_ms(best) == min(mean_ms(splits) for splits in regret.SPLITS)


@pytest.mark.parametrize(
    ("trace", "n_requests", "max_active", "n_steps"),
    [("bimodal", 24, 8, 48), ("uniform", 24, 8, 48), ("zipf", 24, 8, 48), ("bimodal", 24, 4, 48),
     ("bucketed", 16, 1, 64), ("one_long", 24, 8, 48)],
)  # fmt: skip
def test_policy_cost_regrets_little_on_seeds_it_has_not_seen(trace, n_requests, max_active, n_steps):
    found = {entry.route: entry for entry in held_out(trace, LLAMA, n_requests, max_active, n_steps)}
    assert found["policy cost"].mean <= 0.03
    fixed = [entry.mean for route, entry in found.items() if route.startswith("always")]
    assert found["policy cost"].mean <= min(fixed) + 0.01
    assert {"policy paper", "always flashinfer", "always workqueue"} <= set(found)

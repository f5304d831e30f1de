"""The yardstick itself: fp64 by another route, a budget neither too wide nor too narrow, and NaN never passes."""

from __future__ import annotations

import math

import pytest
import torch
from cases import DTYPES, Case, batch, decode, paged, stages

import pkv
from pkv.bench.accuracy import Accuracy, Yardstick

RAGGED = Case("ragged", [40, 0, 1, 17])


def softmax_in_fp64(q, cache, scale):
    """torch's own attention over the gathered rows."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    group = q.shape[1] // cache.n_kv_heads
    for row in range(len(q)):
        k, v = (x.double().cpu().repeat_interleave(group, dim=1).transpose(0, 1) for x in cache.gather(row))
        if k.shape[1]:
            query = q[row].double().cpu()[:, None]
            out[row] = torch.nn.functional.scaled_dot_product_attention(query, k, v, scale=scale)[:, 0]
            lse[row] = torch.logsumexp((query @ k.transpose(1, 2))[:, 0] * scale, dim=-1)
    return out, lse


@pytest.mark.parametrize("scale", [None, 0.3, 0.0, -1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_yardstick_is_attention(dtype, scale):
    q, cache = batch(RAGGED, DTYPES[dtype])
    yardstick = Yardstick(q, cache, scale)
    out, lse = softmax_in_fp64(q, cache, 1 / 8 if scale is None else scale)
    torch.testing.assert_close(yardstick.out.cpu(), out, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(yardstick.lse.cpu(), lse, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("dtype", "least", "most"), [("fp16", 1e-4, 1e-2), ("bf16", 1e-3, 6e-2), ("fp32", 1e-7, 1e-5)])
def test_the_tolerance_follows_the_dtype(dtype, least, most):
    yardstick = Yardstick(*batch(RAGGED, DTYPES[dtype]))
    assert least < yardstick.tolerance < most
    assert 1e-7 < yardstick.tolerance_lse < 1e-4


def measured(change, dtype=torch.float16):
    """The accuracy of the fp64 result, rounded to dtype, after change(out, lse)."""
    q, cache = batch(RAGGED, dtype)
    yardstick = Yardstick(q, cache)
    out, lse = yardstick.out.to(dtype), yardstick.lse.float()
    change(out, lse)
    return yardstick.measure(out, lse)


def set_to(where, value):
    def change(out, lse):
        (out if len(where) == 3 else lse)[where] = value

    return change


def test_the_rounded_truth_is_ok():
    for dtype in DTYPES.values():
        accuracy = measured(lambda out, lse: None, dtype)
        assert accuracy.ok
        assert accuracy.max_err <= accuracy.tolerance / 2


@pytest.mark.parametrize(
    "change",
    [
        set_to((0, 0, 0), math.nan),
        set_to((3, 3, 63), math.inf),
        set_to((1, 0, 0), 0.5),  # an empty row must be 0
        set_to((1, 2), 0.0),  # and its lse -inf
        set_to((1, 2), math.inf),
        set_to((1, 2), math.nan),
        set_to((0, 0), -math.inf),
        set_to((0, 0), math.nan),
        lambda out, lse: out.add_(0.02),
        lambda out, lse: lse.mul_(1.001),
        lambda out, lse: lse.mul_(math.log2(math.e)),
        lambda out, lse: out.copy_(out.roll(1, 0)),
        lambda out, lse: out.copy_(out.roll(1, 1)),
        lambda out, lse: out.copy_(out.roll(1, 2)),
    ],
    ids=[
        "nan", "inf", "empty-row-not-zero", "lse-not-empty", "lse-inf", "lse-nan", "lse-empty", "lse-full-nan",
        "out-off", "lse-off", "lse-base-2", "rows-swapped", "heads-swapped", "dims-swapped",
    ],
)  # fmt: skip
def test_a_wrong_result_is_not_ok(change):
    assert not measured(change).ok


@pytest.mark.parametrize("lost", [0, 16, 39])
def test_one_lost_token_is_not_ok(lost):
    q, cache = batch(Case("lost", [40]))
    k, v = cache.gather(0)
    keep = [t for t in range(40) if t != lost]
    fewer = pkv.PagedKVCache.from_dense(k[None, keep], v[None, keep], [39])
    assert not Yardstick(q, cache).measure(*decode(q, fewer, "reference")).ok


@pytest.mark.parametrize("mainly", ["the-result", "the-weights"])
def test_the_budget_is_twice_what_plain_arithmetic_is_off_by(mainly):
    """What is rounded: the result, and the weights, which shows where nearly equal weights meet values that cancel."""
    q, cache = batch(Case("budget", [40]))
    if mainly == "the-weights":
        k, _ = cache.gather(0)
        v = torch.full_like(k, 30.0)
        v[::2] *= -1
        q, cache = q / 16, paged(k.cpu()[None], v.cpu()[None], [40])
    eager = torch.zeros(4, 64)
    k, v = (x.cpu().float() for x in cache.gather(0))
    for head in range(4):
        weights = torch.softmax(k[:, head // 2] @ q[0, head].cpu().float() / 8, 0).half().float()
        eager[head] = (weights @ v[:, head // 2]).half().float()
    yardstick = Yardstick(q, cache)
    truth = yardstick.out[0].cpu()
    error = float((eager - truth).abs().max())
    band = torch.finfo(torch.float16).eps / 2 * float(truth.abs().max())
    assert yardstick.tolerance == pytest.approx(2 * (error + band), rel=0.2)
    assert (error > 3 * band) == (mainly == "the-weights")


def test_no_rows():
    q, cache = batch(Case("none", []))
    accuracy = Yardstick(q, cache).measure(torch.zeros(0, 4, 64), torch.zeros(0, 4))
    assert accuracy.ok
    assert accuracy.max_err == 0


def test_nan_is_never_ok():
    assert not Accuracy(math.nan, 1.0, 0.0, 1.0).ok
    assert not Accuracy(0.0, 1.0, math.nan, 1.0).ok
    assert not Accuracy(0.0, math.nan, 0.0, 1.0).ok
    assert Accuracy(0.0, 0.0, 0.0, 0.0).ok


@pytest.mark.parametrize("stage", stages())
def test_every_stage_is_far_below_a_fixed_bound(stage):
    """A budget computed from a broken eager path would pass anything; so compare with plain numbers once."""
    for dtype, bound in (("fp16", 2e-3), ("bf16", 1.6e-2), ("fp32", 5e-6)):
        q, cache = batch(RAGGED, DTYPES[dtype])
        out, _ = decode(q, cache, stage, splits=2)
        truth, _ = softmax_in_fp64(q, cache, 1 / 8)
        assert float((out.cpu().double() - truth).abs().max()) < bound, dtype

"""The exact merge: torch's and the kernel's agree, in any order, and empty states are neutral whatever they hold."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from cases import DEVICE, Case, batch
from hypothesis import given, settings
from hypothesis import strategies as st

import pkv
from pkv.kernels import merging
from pkv.kernels.configs import WARP_THREADS, block_of
from pkv.kernels.launching import strided
from pkv.kernels.merging import LARGEST_BLOCK_S, launch_merge
from pkv.kernels.tile import KernelShape, StateArgs

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

INF = math.inf


def state(value, lse, head_dim=64, dtype=torch.float32):
    """One (row, head) whose out is constant."""
    return torch.full((1, head_dim), value, dtype=dtype), torch.tensor([lse])


def states_of(n, shape=(3, 4), head_dim=16, seed=0, empty=(), dtype=torch.float64):
    """n random states; those numbered in `empty` hold NaN and lse -inf."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(n):
        out = torch.randn(*shape, head_dim, generator=generator, dtype=dtype)
        lse = 5 * torch.randn(shape, generator=generator, dtype=dtype)
        made.append((out * math.nan, lse - INF) if index in empty else (out, lse))
    return made


def by_formula(states):
    """The definition in fp64, over the non-empty states of each (row, head) one by one."""
    out, lse = torch.zeros_like(states[0][0]), torch.full_like(states[0][1], -INF)
    for where in itertools.product(*(range(n) for n in lse.shape)):
        full = [(o[where], s[where].item()) for o, s in states if s[where] != -INF]
        if full:
            lse[where] = torch.logsumexp(torch.tensor([s for _, s in full], dtype=torch.float64), 0)
            out[where] = sum(math.exp(s - lse[where].item()) * o for o, s in full)
    return out, lse


def merge_shape(n_heads, head_dim):
    return KernelShape(
        GROUP=n_heads, N_KV_HEADS=1, HEAD_DIM=head_dim, PAGE_SIZE=16, HEAD_BLOCKS=1, BLOCK_H=8,
        BLOCK_D=block_of(head_dim), BLOCK_N=16, STAGES=1, ALIGNED=True, WHOLE_TILES=True, EARLY_MERGE=False,
        INTERPRETED=pkv.INTERPRETED,
    )  # fmt: skip


def kernel_merge(states, most_items=None, equal=False):
    """The Triton kernel on states (out [n_rows, n_heads, D], lse [n_rows, n_heads]); each is one item of every row.

    equal: it is told that all rows have as many, and not where each row's begin.
    """
    n_rows, n_heads, head_dim = states[0][0].shape
    n = len(states)
    out = torch.stack([o for o, _ in states], 1).flatten(0, 1).float().to(DEVICE)  # item = row * n + state
    lse = torch.stack([s for _, s in states], 1).flatten(0, 1).float().to(DEVICE)
    result = torch.full((n_rows, n_heads, head_dim), math.nan, device=DEVICE)
    result_lse = torch.full((n_rows, n_heads), math.nan, device=DEVICE)
    offsets = torch.arange(n_rows + 1, dtype=torch.int32, device=DEVICE) * n
    args = (StateArgs(strided(out), strided(lse)), StateArgs(strided(result), strided(result_lse)))
    offsets = None if equal else offsets
    launch_merge(*args, offsets, None, n_rows, most_items or n, merge_shape(n_heads, head_dim))
    return result.cpu(), result_lse.cpu()


# --- A1: empty states ---


def test_a1_two_empty_states():
    out, lse = pkv.merge([state(0.0, -INF), state(0.0, -INF)])
    assert (out == 0).all()
    assert (lse == -INF).all()


@pytest.mark.parametrize("held", [0.0, math.nan, INF, -INF, 5.0])
def test_a1_an_empty_state_is_neutral_bit_for_bit(held):
    full, empty = state(2.0, 0.7), state(held, -INF)
    for states in ([empty, full], [full, empty], [empty, full, empty], [full]):
        out, lse = pkv.merge(states)
        assert torch.equal(out, full[0])
        assert torch.equal(lse, full[1])


@pytest.mark.parametrize("held", [0.0, math.nan])
def test_a1_an_empty_state_between_two_full_ones(held):
    first, last = state(2.0, 0.7), state(-1.0, 3.0)
    want = pkv.merge([first, last])
    got = pkv.merge([first, state(held, -INF), last])
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("empty", [(), (0,), (2,), (0, 1, 2), (1,)], ids=str)
def test_a1_in_the_kernel(empty):
    states = states_of(3, empty=empty)
    want, want_lse = by_formula(states)
    out, lse = kernel_merge(states)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)
    if len(empty) == 3:
        assert (out == 0).all()
        assert (lse == -INF).all()


def test_a1_exact_in_the_kernel():
    states = [
        (torch.full((1, 1, 16), value), torch.full((1, 1), lse)) for value, lse in ((math.nan, -INF), (2.0, 0.75))
    ]
    for order in (states, states[::-1]):
        out, lse = kernel_merge(order)
        assert (out == 2.0).all()
        assert lse.item() == 0.75


# --- exact, associative, in any order ---


@pytest.mark.parametrize("n", [1, 2, 17, 200])
def test_many_states(n):
    states = states_of(n, empty=range(3, n, 7))
    want, want_lse = by_formula(states)
    out, lse = pkv.merge(states)
    torch.testing.assert_close(out, want, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, want_lse, atol=1e-12, rtol=1e-12)


# 1 is left out: a row of one item was written directly, and its kernel program returns at once.
@pytest.mark.parametrize("most_items", [None, 2], ids=["at-once", "in-a-loop"])
@pytest.mark.parametrize("n", [2, 15, 16, 17, 40, 200])
@pytest.mark.parametrize("head_dim", [16, 80, 13, 256])
def test_many_states_in_the_kernel(n, head_dim, most_items):
    states = states_of(n, shape=(2, 3), head_dim=head_dim, empty=range(1, n, 5))
    want, want_lse = by_formula(states)
    out, lse = kernel_merge(states, most_items)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), n=st.integers(2, 9))
def test_any_order_and_grouping(data, n):
    empty = data.draw(st.sets(st.integers(0, n - 1)))
    states = states_of(n, empty=empty, seed=data.draw(st.integers(0, 99)))
    want, want_lse = pkv.merge(states)
    grouped = [states[i] for i in data.draw(st.permutations(range(n)))]
    while len(grouped) > 1:
        begin = data.draw(st.integers(0, len(grouped) - 2))
        end = data.draw(st.integers(begin + 2, len(grouped)))
        grouped[begin:end] = [pkv.merge(grouped[begin:end])]
    torch.testing.assert_close(grouped[0][0], want, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(grouped[0][1], want_lse, atol=1e-12, rtol=1e-12)


def test_lse_far_apart_and_large():
    states = [state(1.0, 1e4), state(-1.0, -1e4), state(5.0, 1e4)]
    out, lse = pkv.merge(states)
    assert (out == 3.0).all()
    assert lse.item() == pytest.approx(1e4 + math.log(2))


def test_an_lse_of_plus_infinity_marks_an_empty_state():
    """FlashAttention's mark, with an out of 0; any number of them, in any place, beside ours."""
    empties = [state(0.0, INF), state(math.nan, -INF), state(0.0, INF)]
    for full in ([state(2.0, 0.7)], [state(2.0, 0.7), state(4.0, 0.7)]):
        want, want_lse = pkv.merge(full)
        for states in itertools.permutations([*empties, *full]):
            out, lse = pkv.merge(states)
            torch.testing.assert_close(out, want, atol=1e-6, rtol=0)
            torch.testing.assert_close(lse, want_lse, atol=1e-6, rtol=0)
    for only in ([empties[0]], empties):
        out, lse = pkv.merge(only)
        assert ((out == 0).all(), lse.item()) == (True, -INF)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [state(2.0, INF), state(math.nan, INF), state(2.0, math.nan), state(0.0, math.nan)])
def test_an_overflow_is_not_taken_for_an_empty_state(bad):
    """Elsewhere, other rows are as they were."""
    good = state(3.0, 0.5)
    both = [torch.cat(sides) for sides in zip(bad, good, strict=True)]
    for states in ([both, [torch.cat([x, x]) for x in good]], [[torch.cat([x, x]) for x in good], both]):
        out, lse = pkv.merge(states)
        assert out[0].isnan().all()
        assert lse[0].isnan()
        assert torch.equal(out[1], good[0][0])
        assert lse[1].item() == pytest.approx(0.5 + math.log(2))


def test_tokens_one_by_one():
    """Ten states of one token each are the state of ten tokens."""
    q, cache = batch(Case("ten", [10]), torch.float32)
    k, v = (x.cpu() for x in cache.gather(0))
    scores = torch.einsum("jgd,tjd->jgt", q[0].cpu().view(2, 2, 64).double(), k.double()).reshape(4, 10) / 8
    tokens = [(v[t].double().repeat_interleave(2, 0)[None], scores[None, :, t]) for t in range(10)]
    out, lse = pkv.merge(tokens)
    want, want_lse = pkv.decode(q.double(), cache.to(dtype=torch.float64), stage="reference", return_lse=True)
    torch.testing.assert_close(out, want.cpu(), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, want_lse.cpu(), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("splits", [2, 5, 18])
def test_split_kv_merges_what_it_wrote(splits, monkeypatch, nan_memory):
    """The same partials through pkv.merge: what the kernel's merge wrote, to rounding."""

    seen = {}

    def keep(partials, *rest):
        seen.update(out=partials.out.ptr, lse=partials.lse.ptr)
        launch_merge(partials, *rest)

    monkeypatch.setattr("pkv.kernels.launching.launch_merge", keep)
    q, cache = batch(Case("ragged", [70, 0, 5, 33]), torch.float32)
    out, lse = pkv.decode(q, cache, stage="split_kv", splits=splits, return_lse=True)
    assert seen["out"].shape == (4 * splits, 4, 64)
    for row in range(4):
        items = range(row * splits, (row + 1) * splits)
        want, want_lse = pkv.merge([(seen["out"][item], seen["lse"][item]) for item in items])
        torch.testing.assert_close(out[row], want, atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(lse[row], want_lse, atol=2e-6, rtol=2e-6)


def test_rows_of_any_number_of_items():
    """A row of one item was written by its decode program: the merge leaves it as it is. 300 items take two turns."""
    counts, n_heads, head_dim = [2, 1, 0, 300, 17, 1], 2, 16
    assert max(counts) > LARGEST_BLOCK_S
    offsets = [sum(counts[:row]) for row in range(len(counts) + 1)]
    states = states_of(offsets[-1], shape=(n_heads,), empty=range(5, 300, 7))
    out, lse = (torch.stack(parts).float().to(DEVICE) for parts in zip(*states, strict=True))
    result = torch.full((len(counts), n_heads, head_dim), 7.0, device=DEVICE)
    result_lse = torch.full((len(counts), n_heads), 7.0, device=DEVICE)
    for row, count in enumerate(counts):
        if count == 1:  # not where its state lies
            out[offsets[row]], lse[offsets[row]] = math.nan, math.nan
    args = (StateArgs(strided(out), strided(lse)), StateArgs(strided(result), strided(result_lse)))
    on_device = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    launch_merge(*args, on_device, None, len(counts), max(counts), merge_shape(n_heads, head_dim))
    for row, count in enumerate(counts):
        mine = states[offsets[row] : offsets[row + 1]]
        want, want_lse = by_formula(mine) if mine else (torch.zeros(n_heads, head_dim), torch.full((n_heads,), -INF))
        if count == 1:
            want, want_lse = torch.full((n_heads, head_dim), 7.0), torch.full((n_heads,), 7.0)
        torch.testing.assert_close(result[row].cpu().double(), want.double(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(result_lse[row].cpu().double(), want_lse.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("n", [2, 3, 300])
def test_rows_of_as_many_items_each_need_no_offsets(n):
    states = states_of(n, shape=(3, 2), empty=range(1, n, 7))
    for with_offsets, without in zip(kernel_merge(states), kernel_merge(states, equal=True), strict=True):
        assert torch.equal(with_offsets, without)


@pytest.mark.parametrize("head_dim", [16, 80, 128, 256])
@pytest.mark.parametrize("most_items", [1, 2, 16, 66, 256, 300, 65_536])
def test_a_block_of_states_fits_registers(most_items, head_dim, monkeypatch):
    """The states a program loads at once take at most half of the 255 registers that a thread can have."""
    seen = []

    def launched(*args, num_warps):
        seen.append((args[-2], args[-1], num_warps))

    monkeypatch.setattr(merging, "merge_kernel", {(3 * 2 * n,): launched for n in range(1, 9)})
    launch_merge(None, None, None, None, 3, most_items, merge_shape(2, head_dim))
    ((block_s, dim_blocks, num_warps),) = seen
    assert block_s >= min(most_items, LARGEST_BLOCK_S), "the states fit, and yet they are read in turns"
    assert block_s * block_of(head_dim) // dim_blocks <= 128 * WARP_THREADS * num_warps
    assert (block_s & (block_s - 1), block_of(head_dim) % dim_blocks) == (0, 0)


# --- dtypes and errors ---


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype):
    states = [(out.to(dtype), lse.to(dtype if dtype.itemsize > 2 else torch.float32)) for out, lse in states_of(3)]
    out, lse = pkv.merge(states)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    want, _ = by_formula([(o.double(), s.double()) for o, s in states])
    torch.testing.assert_close(out.double(), want, atol=2 * torch.finfo(dtype).eps, rtol=2 * torch.finfo(dtype).eps)


def test_a_generator_of_states_will_do():
    states = states_of(3)
    for a, b in zip(pkv.merge(states), pkv.merge(x for x in states), strict=True):
        assert torch.equal(a, b)


def test_inputs_are_left_alone():
    states = states_of(3, empty=(1,))
    copies = [(out.clone(), lse.clone()) for out, lse in states]
    pkv.merge(states)
    for (out, lse), (old, old_lse) in zip(states, copies, strict=True):
        assert torch.equal(out.nan_to_num(), old.nan_to_num())
        assert torch.equal(lse, old_lse)


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([], r"states is empty: merge needs at least one"),
        ([state(1.0, 0.0), state(1.0, 0.0, head_dim=32)], r"states\[1\]: out \[1, 32\].*every out must be \[1, 64\]"),
        ([(torch.zeros(2, 64), torch.zeros(3))], r"states\[0\]: .*lse \[3\] do not fit.*every lse \[2\]"),
        ([(torch.zeros(2, 64), torch.zeros(2, 1))], r"states\[0\]: .*lse \[2, 1\] do not fit"),
        (
            [state(1.0, 0.0), (torch.zeros(1, 64, device="meta"), torch.zeros(1, device="meta"))],
            r"states\[1\] lies on meta",
        ),
    ],
    ids=["none", "head-dims", "rows", "rank", "device"],
)
def test_bad_states(states, message):
    with pytest.raises(ValueError, match=message):
        pkv.merge(states)

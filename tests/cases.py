"""Named batches, and builders of poisoned caches: tests take their inputs from here, so a case has one name everywhere.

Everything outside a row's tokens is poison: unused slots and unmapped pages hold NaN, unused table entries -1 or
2**31 - 1. On a machine with a GPU the same cases run there.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import pkv
from pkv.cards.known import load_gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
NEEDS_GPU = {"flashinfer"}
ON_CPU = [stage for stage in pkv.STAGES if stage not in NEEDS_GPU]
JUNK = (-1, 2**31 - 1)


@dataclass(frozen=True)
class Case:
    name: str
    lengths: Sequence[int]
    page_size: int = 16
    n_q_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 64
    options: dict[str, Any] = field(default_factory=dict)  # those a stage knows are passed to it

    @property
    def n_rows(self) -> int:
        return len(self.lengths)


# The interpreter takes about 3 ms a tile, whatever its width: few tiles, so that every stage runs every case.
CASES = [
    Case("edges-of-tile-and-page", [0, 1, 15, 16, 17, 31, 32, 33], n_q_heads=2, n_kv_heads=1),
    Case("one-long-15-short", [300] + [1] * 15, n_q_heads=2, n_kv_heads=1),
    Case("one-row", [260], n_q_heads=8, n_kv_heads=1),
    Case("empty-row-inside", [5, 0, 17]),
    Case("empty-rows-around", [0, 40, 0, 0]),
    Case("equal-rows", [40, 40, 40], options={"splits": 2}),
    Case("two-splits", [5, 40], options={"splits": 2}),
    Case("more-splits-than-tiles", [50, 7], options={"splits": 11}),
    Case("split-of-one-tile-each", [80], options={"splits": 5}),
    Case("tile-32", [31, 32, 33, 70], options={"tile": 32, "splits": 2}, n_kv_heads=1),
    Case("tile-64", [63, 64, 65, 129], options={"tile": 64, "splits": 2}, n_kv_heads=1),
    Case("page-4", [3, 4, 5, 37], page_size=4),
    Case("page-48", [47, 48, 49, 100], page_size=48, n_kv_heads=1),
    Case("one-kv-head-many-queries", [33], n_q_heads=16, n_kv_heads=1),
    Case("as-many-kv-heads-as-queries", [33, 2], n_q_heads=3, n_kv_heads=3),
    Case("head-dim-80", [20, 33], head_dim=80),
    Case("head-dim-256", [20], head_dim=256, n_q_heads=2, n_kv_heads=1),
]


def named(items: Sequence[Case]) -> list[Any]:
    return [pytest.param(case, id=case.name) for case in items]


def options_of(stage: str) -> set[str]:
    """The options that a stage's plan() knows."""
    parameters = inspect.signature(pkv.STAGES[stage].plan).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def known(stage: str, options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in options_of(stage)}


def stage_params(*wanted: dict[str, Any], only: set[str] = frozenset()) -> list[Any]:  # type: ignore[assignment]
    """(stage, options) for each stage and each of the wanted options that it knows; `only`: stages with these options.

    Ids: split_kv, split_kv-splits3.
    """
    params = []
    for stage in pkv.STAGES:
        if not only <= options_of(stage):
            continue
        for options in wanted or ({},):
            if set(options) <= options_of(stage):
                suffix = "".join(f"-{name}{value}" for name, value in options.items())
                params.append(pytest.param(stage, options, id=stage + suffix, marks=marks_of(stage)))
    return params


def stages() -> list[Any]:
    return [pytest.param(name, marks=marks_of(name)) for name in pkv.STAGES]


def marks_of(stage: str) -> list[Any]:
    """On a CPU adaptive runs the kernels of other stages, which are tested by themselves: there it can wait."""
    if stage in NEEDS_GPU:
        return [pytest.mark.gpu]
    return [pytest.mark.slow] if stage == "adaptive" and DEVICE.type == "cpu" else []


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Made in the target dtype, so that quantising the inputs is not counted as an error of the kernel."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def paged(
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    page_size: int = 16,
    *,
    seed: int = 0,
    poison: float = math.nan,
    junk: Sequence[int] = JUNK,
    layout: str = "NHD",
    spare_pages: int = 2,
    spare_columns: int = 2,
) -> pkv.PagedKVCache:
    """A cache with the first lengths[r] tokens of row r of k, v [n_rows, max_len, n_kv_heads, head_dim], on DEVICE.

    Built here slot by slot, without the library's own builder. Page ids are shuffled by `seed`; `poison` fills unused
    slots and `spare_pages` unmapped pages, `junk` (in turn) the unused table entries, `spare_columns` columns at least.
    """
    n_used = [-(-length // page_size) for length in lengths]
    n_pages = sum(n_used) + spare_pages
    ids = torch.randperm(n_pages, generator=torch.Generator().manual_seed(seed)).tolist()
    n_columns = max(n_used, default=0) + spare_columns
    n_entries = len(lengths) * n_columns
    table = torch.tensor(junk, dtype=torch.int32).repeat(n_entries)[:n_entries].view(len(lengths), n_columns)
    k_pages, v_pages = (torch.full((n_pages, page_size, *x.shape[2:]), poison, dtype=x.dtype) for x in (k, v))
    for row, length in enumerate(lengths):
        table[row, : n_used[row]] = torch.tensor([ids.pop() for _ in range(n_used[row])], dtype=torch.int32)
        tokens = torch.arange(length)
        pages, slots = table[row, tokens // page_size].long(), tokens % page_size
        k_pages[pages, slots], v_pages[pages, slots] = k[row, :length], v[row, :length]
    if layout == "HND":
        k_pages, v_pages = (x.transpose(1, 2).contiguous() for x in (k_pages, v_pages))
    on_device = [x.to(DEVICE) for x in (k_pages, v_pages, table, torch.tensor(lengths, dtype=torch.int32))]
    return pkv.PagedKVCache(*on_device, layout=layout, host_lengths=lengths)


def batch(case: Case, dtype: torch.dtype = torch.float16, seed: int = 0, **options: Any) -> tuple[Tensor, Any]:
    """Random q and a poisoned cache for a case, on DEVICE."""
    shape = (case.n_rows, max(case.lengths, default=0), case.n_kv_heads, case.head_dim)
    k, v = randn(*shape, seed=seed + 1, dtype=dtype), randn(*shape, seed=seed + 2, dtype=dtype)
    q = randn(case.n_rows, case.n_q_heads, case.head_dim, seed=seed, dtype=dtype)
    return q.to(DEVICE), paged(k, v, case.lengths, case.page_size, seed=seed, **options)


def ramp(
    lengths: Sequence[int],
    n_q_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float16,
    page_size: int = 16,
    **options: Any,
) -> tuple[Tensor, Any]:
    """The ramp probe: q = 0 and v of token t is t, so the right answer is (L - 1) / 2 and ln L, whatever K is."""
    shape = (len(lengths), max(lengths, default=0), n_kv_heads, head_dim)
    v = torch.arange(shape[1], dtype=dtype).view(1, -1, 1, 1).expand(shape)
    q = torch.zeros(len(lengths), n_q_heads, head_dim, dtype=dtype, device=DEVICE)
    return q, paged(randn(*shape, dtype=dtype), v, lengths, page_size, **options)


def assert_ramp(out: Tensor, lse: Tensor, lengths: Sequence[int]) -> None:
    """A token lost, counted twice or read beyond the end moves the answer by 0.5 or more per row of any length."""
    want = torch.tensor([(length - 1) / 2 if length else 0.0 for length in lengths])
    want_lse = torch.tensor([math.log(length) if length else -math.inf for length in lengths])
    torch.testing.assert_close(out.cpu().float(), want[:, None, None].expand(out.shape), atol=0.02, rtol=1e-3)
    torch.testing.assert_close(lse.cpu(), want_lse[:, None].expand(lse.shape), atol=1e-5, rtol=1e-5)
    if 0 in lengths:
        empty = [row for row, length in enumerate(lengths) if not length]
        assert (out[empty] == 0).all()


def launching(plan: pkv.Plan) -> str:
    """The stage whose launch() runs the plan: adaptive's where FlashInfer was chosen and may turn out not to work."""
    return "adaptive" if plan.fallback else plan.stage


# stream_k cuts as many runs as a card holds programs, for any batch: an interpreter takes some ms for each.
SMALL_CARD = dataclasses.replace(load_gpu("rtx3060"), name="two SMs", n_sms=2)


def decode(q: Tensor, cache: Any, stage: str, **options: Any) -> tuple[Tensor, Tensor]:
    """Out and lse of a checked decode, the options that the stage knows passed on."""
    if stage == "stream_k" and DEVICE.type == "cpu":
        options = {"gpu": SMALL_CARD} | options
    run_options = {name: options.pop(name) for name in ("scale", "out") if name in options}
    return pkv.decode(q, cache, stage=stage, return_lse=True, check=True, **run_options, **known(stage, options))

"""The paper's own counters, digit by digit: our generator, planners and counters agree with its published logs."""

from __future__ import annotations

import csv
import functools
import json
from importlib import resources
from statistics import fmean

import pytest

import pkv
from pkv.bench.loads.traces import make_trace, steps_of
from pkv.cli import main

B8 = "--requests 24 --max-active 8 --steps 48"
B1 = "--requests 16 --max-active 1 --steps 64"
# As printed: useful KV MiB, launches, programs with tokens per SM, merge state MiB; means of a step.
GOLDEN = [
    ("bimodal", B8, "length_buckets", 32, "550.5", "16.00", "73.1", "4.06"),
    ("bimodal", B8, "workqueue", 20, "550.5", "2.00", "45.7", "2.54"),
    ("uniform", B8, "workqueue", 24, "671.0", "2.00", "54.9", "3.05"),
    ("zipf", B8, "workqueue", 28, "672.2", "2.00", "64.0", "3.55"),
    ("bucketed", B1, "length_buckets", 32, "32.1", "2.00", "9.1", "0.51"),
]


@pytest.mark.parametrize(("trace", "sizes", "stage", "splits", "useful", "launches", "per_sm", "state"), GOLDEN)
def test_the_command_prints_the_golden_counters(trace, sizes, stage, splits, useful, launches, per_sm, state, capsys):
    words = f"plan --trace {trace} --seed 20260623 {sizes} --stage {stage} --splits {splits} --tile 32 --gpu rtx3060"
    assert main([*words.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert f"{found['useful_kv_mib']:.1f}" == useful
    assert f"{found['launches']:.2f}" == launches
    assert f"{found['cta_per_sm']:.1f}" == per_sm
    assert f"{found['merge_state_mib']:.2f}" == state
    assert found["stage"] == stage
    assert found["empty_programs"] == 0, "the shortest row has more tiles than splits"


def published() -> list[dict[str, str]]:
    """The paper's log lines, as shipped."""
    text = (resources.files("pkv") / "data" / "paper" / "rtx3060_published.csv").read_text()
    return list(csv.DictReader(text.splitlines()))


@functools.cache
def steps_of_run(trace: str, seed: int, requests: int, max_active: int, steps: int) -> list[list[int]]:
    return steps_of(make_trace(trace, seed, requests, max_active), max_active, steps)


@functools.cache
def counted(run: tuple[str, int, int, int, int], heads: tuple[int, int], stage: str, splits: int) -> dict[str, str]:
    """Means of a step of one run, printed as the logs print them."""
    shape = pkv.Shape(*heads, 128, 16, "float16")
    plans = [
        pkv.plan(lengths, shape, stage, splits=splits, tile=32, gpu="rtx3060").counters
        for lengths in steps_of_run(*run)
    ]
    return {
        "launches": f"{fmean(counters.launches for counters in plans):.2f}",
        "cta_per_sm": f"{fmean(counters.cta_per_sm for counters in plans):.1f}",
        "merge_mib": f"{fmean(counters.merge_state_mib for counters in plans):.2f}",
    }


def test_every_published_run_has_the_published_counters():
    rows = published()
    assert len(rows) == 47
    assert {row["engine"] for row in rows} == {"flashinfer", "length_buckets", "workqueue"}
    for row in rows:
        run = (row["trace"], *(int(row[name]) for name in ("seed", "requests", "max_active", "steps")))
        heads = int(row["q_heads"]), int(row["kv_heads"])
        shape = pkv.Shape(*heads, 128, 16, "float16")
        tokens = fmean(sum(lengths) for lengths in steps_of_run(*run))
        assert f"{tokens * shape.kv_bytes_per_token / 2**20:.1f}" == row["useful_kv_mib"], row["log"]
        if row["engine"] != "flashinfer":  # whose logs count nothing else
            expected = {name: row[name] for name in ("launches", "cta_per_sm", "merge_mib")}
            assert counted(run, heads, row["engine"], int(row["splits"])) == expected, row["log"]


def test_the_generator_matters_to_the_digit():
    """The digits above can tell the paper's draws from near misses: unrounded prompts, and another order of draws."""
    exact = steps_of(make_trace("zipf", 20260623, 24, 8, page_size=1), 8, 48)
    shape = pkv.Shape(32, 8, 128, 16, "float16")
    assert f"{fmean(map(sum, exact)) * shape.kv_bytes_per_token / 2**20:.1f}" == "672.0"

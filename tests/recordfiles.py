"""Files of made-up records, which several tests read: what each engine takes follows from the load by a formula."""

from dataclasses import replace

from pkv.bench.loads.grids import Load, grid
from pkv.bench.records.records import Run, Timing, append

H200, SLICE, OLD = ("NVIDIA H200", 132), ("NVIDIA H200", 28), ("NVIDIA GeForce RTX 3060", 28)
# engine: (family, GPU us per MB, GPU us of start-up, host plan us, workspace bytes per row)
ENGINES = {
    "split_kv": ("pkv", 0.32, 6.0, 0.0, 40_000),
    "length_buckets": ("pkv", 0.33, 14.0, 60.0, 9_000),
    "row_local": ("pkv", 0.27, 6.0, 0.4, 9_000),
    "workqueue": ("pkv", 0.26, 7.0, 45.0, 8_000),
    "adaptive": ("pkv", 0.26, 7.5, 70.0, 8_000),
    "flashinfer": ("pkv", 0.30, 6.0, 330.0, 16_000),
    "fa2-tensor-core": ("flashinfer", 0.30, 6.0, 300.0, 16_000),
    "fa2-cuda-core": ("flashinfer", 0.36, 5.0, 240.0, 12_000),
    "batch-attention": ("flashinfer", 0.29, 8.0, 210.0, 0),
    "vllm": ("triton", 0.52, 30.0, 12.0, 5_000),
    "gather-sdpa": ("torch", 1.9, 40.0, 20.0, 900_000),
    "stream": ("torch", 0.24, 4.0, 0.0, 0),
}


def run_of(name="one", grid_name="smoke", machine=H200, **changes):
    title, n_sms = machine
    gpu = {
        "title": title,
        "arch": 90 if "H200" in title else 86,
        "n_sms": n_sms,
        "memory_gb": 150.0,
        "peak_gb_per_s": None,
    }
    versions = {"python": "3.12.3", "torch": "2.11.0", "triton": "3.6.0", "flashinfer": "0.7.4", "vllm": None}
    settings = {"engines": list(ENGINES), "rounds": 30, "only": ""}
    made = Run(
        name, grid_name, "2026-11-30T08:00:00Z", gpu, versions, "5b9849f", False, 2.2, settings, "a CPU", "Linux"
    )
    return replace(made, **changes)


def timing_of(load: Load, engine: str, run="one", slower=1.0, **changes):
    family, per_mb, start_us, plan_us, _ = ENGINES[engine]
    megabytes = [sum(step.lengths) * load.shape.kv_bytes_per_token / 1e6 for step in load.steps]
    ragged = [1 + 0.05 * (engine == "split_kv") * len(set(step.lengths)) for step in load.steps]
    gpu_us = tuple(slower * r * (start_us + per_mb * mb) for mb, r in zip(megabytes, ragged, strict=True))
    plans = tuple(plan_us * (1 + len(step.lengths) / 64) for step in load.steps)
    made = Timing(
        run, load.name, engine, family, plans, gpu_us,
        tuple(0.98 * us for us in gpu_us), tuple(1.03 * us for us in gpu_us), tuple(9.0 for _ in gpu_us),
        tuple(us + plan + 25 for us, plan in zip(gpu_us, plans, strict=True)),
        noise=0.01, max_err=1e-4, tolerance=1e-3, workspace_bytes=ENGINES[engine][4] * load.n_rows,
    )  # fmt: skip
    return replace(made, **changes)


def refusal_of(load: Load, engine: str, reason: str, run="one"):
    return Timing(run, load.name, engine, "flashinfer", refused=reason)


def write_records(path, run=None, loads=None, slower=None, engines=ENGINES):
    """All engines on all loads, xqa refusing the first; slower: {engine: factor}."""
    run = run or run_of()
    loads = grid(run.grid) if loads is None else loads
    append(path, [run], run.run)
    for number, load in enumerate(loads):
        timings = [timing_of(load, engine, run.run, (slower or {}).get(engine, 1.0)) for engine in engines]
        if number == 0:
            timings.append(refusal_of(load, "xqa", "needs pages of 32 tokens", run.run))
        append(path, [load, *timings], run.run)
    return path

"""Where and with what something is measured: GPU, clocks, versions, commit. What cannot be read is None."""

import importlib.metadata
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from pkv._triton import triton
from pkv.bench.records.records import RecordError, Run

PACKAGES = {"flashinfer": "flashinfer-python", "vllm": "vllm", "sglang": "sglang", "numpy": "numpy"}
COMMIT = "PKV_COMMIT"  # environment variable: the commit of a copy that has no .git
PATIENCE = 120  # seconds for another program's answer
READINGS = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "most_sm_mhz": "clocks.max.sm",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
    "driver": "driver_version",
}  # ours: nvidia-smi's


def run_of(grid: str, device: torch.device, floor_us: float, settings: dict[str, Any]) -> Run:
    """The head of a sweep that begins now on `device`."""
    now = datetime.now(UTC)
    commit, changed = commit_of(Path(__file__).parents[3])
    return Run(
        run=f"{now:%Y%m%dT%H%M%S}-{uuid4().hex[:6]}",
        grid=grid,
        date=f"{now:%Y-%m-%dT%H:%M:%SZ}",
        gpu=gpu_facts(device),
        versions=versions(),
        commit=commit,
        changed=changed,
        floor_us=round(floor_us, 2),
        settings=settings,
        cpu=cpu_model(),
        platform=platform.platform(terse=True),
    )


def gpu_facts(device: torch.device) -> dict[str, Any]:
    """Title, architecture, SMs that a program may use, memory; the clocks as they are now, under load or not."""
    card = torch.cuda.get_device_properties(device)
    facts: dict[str, Any] = {
        "title": card.name,
        "arch": card.major * 10 + card.minor,
        "n_sms": card.multi_processor_count,
        "memory_gb": round(card.total_memory / 1e9, 1),
        "peak_gb_per_s": peak_gb_per_s(card),
    }
    query = ",".join(READINGS.values())
    answer = answer_of(
        "nvidia-smi", f"--id={smi_index(device)}", f"--query-gpu={query}", "--format=csv,noheader,nounits"
    )
    return facts | readings_of(answer)


def readings_of(answer: str) -> dict[str, float | str | None]:
    """What nvidia-smi said of READINGS, in their order; nothing where that was something else.

    A version is text, whatever it looks like. What it cannot tell has many words, such as "[N/A]" or "ERR!": None.

    >>> readings_of("1980, 2619, [N/A], 700.00, ERR!, 580.10")["driver"]
    '580.10'
    """
    values = [value.strip() for value in answer.split(",")]
    if len(values) != len(READINGS):
        return {}
    found = dict(zip(READINGS, values, strict=True))
    return {name: version(value) if name == "driver" else number(value) for name, value in found.items()}


def peak_gb_per_s(card: Any) -> float | None:
    """The memory's own rate, from its clock and width: two bits a clock on each wire."""
    clock_khz, width = (getattr(card, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return round(2 * clock_khz * 1000 * width / 8 / 1e9, 1) or None


def smi_index(device: torch.device) -> str:
    """How nvidia-smi knows the device: torch counts only those that CUDA_VISIBLE_DEVICES names."""
    index = torch.cuda.current_device() if device.index is None else device.index
    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
    return f"GPU-{uuid}" if uuid else str(index)


def versions() -> dict[str, str | None]:
    """Versions of all that takes part; None where it is missing."""
    return core_versions() | {name: version_of(name, package) for name, package in PACKAGES.items()}


def core_versions() -> dict[str, str | None]:
    """Versions of what pkv itself runs on."""
    return {
        "python": platform.python_version(),
        "pkv": str(importlib.import_module("pkv").__version__),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": getattr(triton, "__version__", None),
    }


def version_of(module: str, package: str) -> str | None:
    """Of an installed package, or of a module that is on the path without one; None where it has neither."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        found = getattr(importlib.import_module(module), "__version__", None)
        return None if found is None else str(found)
    except Exception:  # a broken install may raise anything
        return None


def commit_of(folder: Path) -> tuple[str | None, bool]:
    """(the commit of a clone, whether files of pkv differ from it); COMMIT tells where there is no .git."""
    told = os.environ.get(COMMIT, "")
    if told and not re.fullmatch("[0-9a-f]{7,64}", told):
        raise RecordError(f"{COMMIT} = {told!r} is no commit: set it to a hash, such as `git rev-parse HEAD` prints")
    if told:
        return told, False
    folder = folder.resolve()
    top = answer_of("git", "-C", str(folder), "rev-parse", "--show-toplevel").strip()
    if not top or Path(top).resolve() != folder:
        return None, False
    commit = answer_of("git", "-C", str(folder), "rev-parse", "HEAD").strip()
    changes = answer_of("git", "-C", str(folder), "status", "--porcelain", "--", "pkv").strip()
    return commit or None, bool(changes)


def cpu_model() -> str:
    """As Linux names it; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def answer_of(*command: str) -> str:
    """What a program prints, paths as Python has them; nothing where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, errors="surrogateescape", timeout=PATIENCE, check=True)
        return done.stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def number(text: str) -> float | None:
    """A plain decimal, or None."""
    return float(text) if re.fullmatch(r"-?[0-9]+(\.[0-9]*)?", text) else None


def version(text: str) -> str | None:
    """Text that begins with a number, such as 580.159.04, as it is, or None."""
    return text if re.match(r"[0-9]+(\.|$)", text) else None

"""What there is on this machine: versions, GPU, compilers, optional packages. It only looks; diagnosis.py judges."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from pkv._triton import GPU_VISIBLE, INTERPRETED
from pkv.bench.records.provenance import PATIENCE, answer_of, core_versions
from pkv.bench.timing import launches_block
from pkv.commands.selftest import SelfTest, kernel_device, run_self_test

DEFAULT_CUDA = "/usr/local/cuda"
WSL_LIBRARIES = "/usr/lib/wsl/lib"
# In a process of its own, so that an import that aborts or never returns is a reason shown, like any other.
PROBE = "import sys; sys.path[:] = {path!r}; import flashinfer"


@dataclass(frozen=True)
class Gpu:
    """The current card; arch is the compute capability without its dot."""

    name: str
    arch: int
    n_sms: int


@dataclass(frozen=True)
class FlashInfer:
    """Can it be imported and is there a GPU for it; reason: why not, or what it will lack."""

    available: bool
    version: str | None
    reason: str | None


@dataclass(frozen=True)
class Machine:
    """Facts. A tool's value is its path or version, None where it is missing."""

    platform: str  # as sys.platform: linux, win32, darwin
    is_wsl: bool
    versions: dict[str, str | None]
    torch_cuda: str | None  # the CUDA version that torch is built for; None: a CPU-only build
    gpu: Gpu | None
    driver_lists_gpu: bool  # nvidia-smi shows a card, whatever torch says
    visible_devices: str | None  # CUDA_VISIBLE_DEVICES
    launches_block: bool  # CUDA_LAUNCH_BLOCKING
    interpreted: bool
    tools: dict[str, str | None]
    libcuda: list[str]  # the driver's library, by every name it is found under
    flashinfer: FlashInfer
    self_test: SelfTest


def look() -> Machine:
    """This machine."""
    gpu = visible_gpu()
    tools = find_tools()
    return Machine(
        platform=sys.platform,
        is_wsl="microsoft" in platform.uname().release.lower(),
        versions=core_versions() | {"numpy": version_of("numpy")},
        torch_cuda=torch.version.cuda,
        gpu=gpu,
        driver_lists_gpu=gpu is not None or "GPU 0" in answer_of("nvidia-smi", "-L"),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        launches_block=launches_block(),
        interpreted=INTERPRETED,
        tools=tools,
        libcuda=find_libcuda(answer_of("/sbin/ldconfig", "-p"), WSL_LIBRARIES),
        flashinfer=probe_flashinfer(gpu, [name for name in ("nvcc", "ninja", "cxx_compiler") if not tools[name]]),
        self_test=run_self_test(),
    )


def visible_gpu() -> Gpu | None:
    """The card that kernels would run on."""
    if not GPU_VISIBLE:
        return None
    card = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Gpu(card.name, card.major * 10 + card.minor, card.multi_processor_count)


def device_label() -> str:
    """Where kernels run, in words: "NVIDIA H200 (sm_90, 132 SMs)", or "cpu"."""
    gpu = visible_gpu()
    if gpu is None or kernel_device().type == "cpu":
        return "cpu"
    return f"{gpu.name} (sm_{gpu.arch}, {gpu.n_sms} SMs)"


def find_tools() -> dict[str, str | None]:
    """Compilers by path, packages of the lessons by version."""
    python_h = Path(sysconfig.get_path("include")) / "Python.h"
    return {
        "c_compiler": found("CC", "gcc", "clang"),
        "cxx_compiler": found("CXX", "g++", "clang++"),
        "python_h": str(python_h) if python_h.is_file() else None,
        "nvcc": find_nvcc(),
        "ninja": shutil.which("ninja"),
        **{name: version_of(name) for name in ("jupyterlab", "ipywidgets", "jupyterlab_widgets", "matplotlib")},
    }


def found(variable: str, *programs: str) -> str | None:
    """The program that an environment variable names, else the first of `programs` on PATH."""
    named = os.environ.get(variable)
    return shutil.which(named) if named else next(filter(None, map(shutil.which, programs)), None)


def find_nvcc() -> str | None:
    """nvcc where FlashInfer looks: in CUDA_HOME or CUDA_PATH and nowhere else if one is set, else on PATH."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    on_path = None if home else shutil.which("nvcc")
    return on_path or shutil.which(f"{home or DEFAULT_CUDA}/bin/nvcc")


def find_libcuda(ldconfig: str, *folders: str) -> list[str]:
    """Every file named libcuda.so or libcuda.so.1 that the linker's cache or `folders` hold."""
    cached = [line.split()[-1] for line in ldconfig.splitlines() if line.strip().startswith("libcuda.so")]
    there = [f"{folder}/{name}" for folder in folders for name in ("libcuda.so", "libcuda.so.1")]
    return sorted({*cached, *filter(os.path.exists, there)})


def version_of(package: str) -> str | None:
    """The installed version; the package is not imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def probe_flashinfer(gpu: Gpu | None, missing_tools: list[str]) -> FlashInfer:
    """FlashInfer's state: import it, once, in another process."""
    version = version_of("flashinfer-python")
    try:
        spec = importlib.util.find_spec("flashinfer")
    except Exception as error:  # an import hook may raise anything
        return FlashInfer(False, version, f"importing it fails: {type(error).__name__}: {error}")
    if spec is None:
        return FlashInfer(False, version, "not installed")
    try:
        command = [sys.executable, "-c", PROBE.format(path=sys.path)]
        done = subprocess.run(command, capture_output=True, errors="replace", timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return FlashInfer(False, version, f"importing it takes more than {PATIENCE} s")
    if done.returncode:
        said = done.stderr.strip().splitlines()
        reason = f"killed by signal {-done.returncode}" if done.returncode < 0 else said[-1] if said else "no message"
        return FlashInfer(False, version, f"importing it fails: {reason}")
    if gpu is None:
        return FlashInfer(False, version, "installed, but it needs a GPU, and none is visible")
    if missing_tools and importlib.util.find_spec("flashinfer_jit_cache") is None:
        needed = ", ".join(name.replace("cxx_compiler", "g++") for name in missing_tools)
        return FlashInfer(True, version, f"cannot build kernels that it has not built yet: {needed} missing")
    return FlashInfer(True, version, None)

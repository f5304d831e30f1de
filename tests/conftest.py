"""Fixtures of all tests: a GPU or the reason why not, memory that starts as NaN, launches counted, fresh processes."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import Forks
from pairs import mark_the_others_slow

import pkv
from pkv.cards import known
from pkv.stages import x_flashinfer

ROOT = Path(__file__).resolve().parents[1]
# No test reads or writes what this user has measured: profiles of their own would change plans. Set before test modules
# are imported, and handed on to the processes that they start.
os.environ["PKV_CACHE"] = tempfile.mkdtemp(prefix="pkv-cache-")
atexit.register(shutil.rmtree, os.environ["PKV_CACHE"], ignore_errors=True)
TABLES = "table for the summary"  # record_property(TABLES, text) prints text at the end of the run
GPU_FAULTS: list[str] = []  # what the GPU says since a kernel of this process has faulted
TABLE_ROW = "row for a table of the summary"  # record_property(TABLE_ROW, (title, row, {column: number})) adds to one


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_the_others_slow(items)
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    missing = x_flashinfer.unavailable() if n_gpus else None
    for item in items:
        if missing and takes_flashinfer(item):
            item.add_marker(pytest.mark.skip(reason=missing))
        marker = item.get_closest_marker("gpu")
        if marker and n_gpus < (wanted := marker.kwargs.get("n", 1)):
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} CUDA GPU(s), torch sees {n_gpus}"))


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: no search for garbage need look through them again, as one before each timing
    would, for half a second.
    """
    gc.collect()
    gc.freeze()


def takes_flashinfer(item: pytest.Item) -> bool:
    """A test of every stage, and this is its turn with FlashInfer."""
    return "flashinfer" in getattr(getattr(item, "callspec", None), "params", {}).values()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """A test of every stage, with a shape that FlashInfer has no kernel for: its reason is all there is to see."""
    try:
        return (yield)
    except ValueError as error:
        if takes_flashinfer(item) and str(error).startswith("stage 'flashinfer' cannot decode this"):
            pytest.skip(str(error))
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.failed and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            GPU_FAULTS.append(str(error).splitlines()[0])
    return report


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish(nodeid: str) -> None:
    """A fault of the GPU fails all later tests of its process. So it ends, and pytest-xdist goes on in a new one."""
    if GPU_FAULTS and "PYTEST_XDIST_WORKER" in os.environ:
        os._exit(1)
    if GPU_FAULTS:
        pytest.exit(f"{nodeid} has left the GPU unusable for this process ({GPU_FAULTS[0]}); with -n 1 the rest runs")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for group in terminalreporter.stats.values() for report in group]
    called = [report for report in reports if getattr(report, "when", "") == "call"]
    properties = [entry for report in called for entry in report.user_properties]
    for title, lines in tables_of_rows([row for name, row in properties if name == TABLE_ROW]).items():
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)
    tables = [text for name, text in properties if name == TABLES]
    if tables and terminalreporter.verbosity > 0:
        terminalreporter.section("what the compiler makes of the usual tiles, for each card (no GPU was used)")
        for text in tables:
            terminalreporter.write_line(text)


def tables_of_rows(rows: list[tuple[str, str, dict[str, int]]]) -> dict[str, list[str]]:
    """Rows of one name added up, in a table for each title, with a sum at its end."""
    tables: dict[str, dict[str, dict[str, int]]] = {}
    for title, name, numbers in rows:
        for row in (name, "sum"):
            sums = tables.setdefault(title, {}).setdefault(row, dict.fromkeys(numbers, 0))
            for column, number in numbers.items():
                sums[column] += number
    lines: dict[str, list[str]] = {}
    for title, table in tables.items():
        table["sum"] = table.pop("sum")  # last
        columns = list(table["sum"])
        lines[title] = ["".join(f"{word:>12}" for word in ["", *columns])]
        lines[title] += ["".join(f"{word:>12}" for word in [name, *sums.values()]) for name, sums in table.items()]
    return lines


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Help is wrapped as on a terminal of 80 columns, whatever this one has."""
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the user's own, yet empty."""
    monkeypatch.setenv("PKV_CACHE", str(tmp_path / "cache"))
    known.forget_profiles()
    yield tmp_path / "cache"
    known.forget_profiles()


@pytest.fixture
def nan_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory holds NaN, as it may on a GPU: what is read before it is written shows."""

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return empty

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    assert torch.empty(3).isnan().all()
    assert torch.ones(1).new_empty(3).isnan().all()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the stages that run() has launched so far; what those launch in turn is not among them."""
    names: list[str] = []
    inside: list[str] = []
    for name, module in pkv.STAGES.items():

        def launch(*args: Any, _name: str = name, _launch: Any = module.launch, **kwargs: Any) -> None:
            if not inside:
                names.append(_name)
            inside.append(_name)
            try:
                _launch(*args, **kwargs)
            finally:
                inside.pop()

        monkeypatch.setattr(module, "launch", launch)
    return names


class Steps:
    """What the interpreter does: programs, and the tiles (blocks of two axes) that each loads."""

    def __init__(self) -> None:
        self.tiles: list[int] = []

    @property
    def count(self) -> int:
        """K and V of a tile are a step; so is a program of a task whose programs load no tile at all."""
        return -(-sum(self.tiles) // 2) or len(self.tiles)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """What is counted in place of time, which says more of the machine than of the work."""
    from triton.runtime import interpreter

    counted, builder = Steps(), interpreter.InterpreterBuilder
    set_index, load_block = builder.set_grid_idx, builder.create_masked_load

    def set_grid_idx(self: Any, *index: int) -> None:
        counted.tiles.append(0)
        set_index(self, *index)

    def create_masked_load(self: Any, pointers: Any, *rest: Any) -> Any:
        counted.tiles[-1] += pointers.data.ndim >= 2 and min(pointers.data.shape) > 1
        return load_block(self, pointers, *rest)

    monkeypatch.setattr(builder, "set_grid_idx", set_grid_idx)
    monkeypatch.setattr(builder, "create_masked_load", create_masked_load)
    return counted


class Fresh:
    """What a new Python process printed."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.out, self.err, self.code = done.stdout, done.stderr, done.returncode


@pytest.fixture(scope="session")
def forks() -> Forks:
    return Forks()


@pytest.fixture
def fresh(forks: Forks) -> Callable[..., Fresh]:
    """fresh(code, **env) runs code in a new process without a GPU and without TRITON_INTERPRET; env None unsets.

    torch is imported there already (forks.py).
    """

    def run(code: str, *, ok: bool = True, timeout: float = 240, **env: str | None) -> Fresh:
        variables = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        variables |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
        for key, value in env.items():
            variables.pop(key, None)
            if value is not None:
                variables[key] = value
        result = Fresh(forks.run(textwrap.dedent(code), variables, timeout))
        assert not ok or result.code == 0, f"exit code {result.code}\n{result.out}\n{result.err}"
        return result

    return run

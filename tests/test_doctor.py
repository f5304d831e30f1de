"""`pkv doctor` on machines that lack things: real ones as far as one can be stubbed, else a Machine put together."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from pkv.bench.records import provenance
from pkv.cli import main
from pkv.commands import doctor, machine, selftest
from pkv.commands.diagnosis import problems_of, why_cpu
from pkv.commands.machine import FlashInfer, Gpu, Machine
from pkv.commands.selftest import SelfTest

TOOLS = {
    "c_compiler": "/usr/bin/gcc",
    "cxx_compiler": "/usr/bin/g++",
    "python_h": "/usr/include/python3.11/Python.h",
    "nvcc": "/usr/local/cuda/bin/nvcc",
    "ninja": "/usr/bin/ninja",
    "jupyterlab": "4.4.0",
    "ipywidgets": "8.1.9",
    "jupyterlab_widgets": "3.0.17",
    "matplotlib": "3.10.0",
}
VERSIONS = {
    "python": "3.11.7",
    "pkv": "0.1.0",
    "torch": "2.13.0+cu130",
    "cuda": "13.0",
    "triton": "3.7.1",
    "numpy": "2.4.6",
}
DOCTOR = "from pkv.cli import main; raise SystemExit(main(['doctor', '--json']))"
PASSED = SelfTest(True, [1.0], [1.0])
WITH_GPU = Machine(
    platform="linux",
    is_wsl=False,
    versions=VERSIONS,
    torch_cuda="13.0",
    gpu=Gpu("NVIDIA GeForce RTX 3060", 86, 28),
    driver_lists_gpu=True,
    visible_devices=None,
    launches_block=False,
    interpreted=False,
    tools=TOOLS,
    libcuda=["/lib/x86_64-linux-gnu/libcuda.so.1"],
    flashinfer=FlashInfer(True, "0.7.4", None),
    self_test=PASSED,
)
WITHOUT_GPU = replace(
    WITH_GPU,
    versions={**VERSIONS, "torch": "2.13.0+cpu", "cuda": None},
    torch_cuda=None,
    gpu=None,
    driver_lists_gpu=False,
    interpreted=True,
    flashinfer=FlashInfer(False, None, "not installed"),
)


def without(base: Machine, *tools: str) -> Machine:
    return replace(base, tools={name: None if name in tools else value for name, value in base.tools.items()})


def told(base: Machine) -> str:
    """Everything said of a machine's problems, as a user reads it."""
    problems = problems_of(base)
    assert all(problem.what and problem.remedy for problem in problems)
    text = doctor.as_text(base, "somewhere", problems)
    assert max(map(len, text.splitlines())) <= 100
    return "\n".join(f"{problem.what} -> {problem.remedy}" for problem in problems)


@pytest.fixture(scope="module")
def looked() -> Machine:
    return machine.look()


@pytest.fixture
def stubbed(monkeypatch, looked):
    """stubbed(**changes) makes `pkv doctor` see this machine with those changes."""
    return lambda **changes: monkeypatch.setattr(doctor, "look", lambda: replace(looked, **changes))


@pytest.mark.parametrize("base", [WITH_GPU, WITHOUT_GPU], ids=["gpu", "cpu"])
def test_nothing_is_wrong_where_nothing_is_missing(base):
    assert problems_of(base) == []
    assert "Kernels run here; nothing that this machine could use is missing." in doctor.as_text(base, "cpu", [])


def test_launches_that_block_are_named_where_there_is_a_gpu():
    assert "CUDA_LAUNCH_BLOCKING is set" in told(replace(WITH_GPU, launches_block=True))
    assert told(replace(WITHOUT_GPU, launches_block=True)) == ""


def test_this_machine_as_json(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) >= {"device", "versions", "interpreter", "flashinfer", "tools", "self_test", "problems"}
    assert set(found["versions"]) == set(VERSIONS)
    assert set(found["tools"]) == set(TOOLS)
    assert set(found["flashinfer"]) == {"available", "version", "reason"}
    assert found["interpreter"] == selftest.INTERPRETED
    assert found["self_test"]["ok"]
    assert found["self_test"]["got"] == found["self_test"]["expected"]
    assert len(found["self_test"]["got"]) == 8
    assert all(set(problem) == {"what", "remedy"} for problem in found["problems"])
    if found["interpreter"]:
        assert found["device"] == "cpu"
        assert found["device_reason"]


def test_this_machine_as_text(capsys, stubbed):
    stubbed()
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    tools = [doctor.NAMES.get(name, name) for name in TOOLS]
    for label in ("device", "self-test", "pkv", "python", "numpy", "triton", "torch", "flashinfer", *tools):
        assert f"\n{label} " in f"\n{out}"


# The self-test (case B2)


def test_the_self_test_is_exact_and_sees_both_kinds_of_bound():
    test = selftest.run_self_test()
    assert test.ok, test
    values, bounds = [1.0, 2, 5, 10, 17, 26, 37, 50], [1, 4, 7, 2, 5, 0, 3, 6]
    assert test.expected == [sum(values[:b]) + 100 * sum(values[b:7]) for b in bounds]


@pytest.mark.parametrize(
    ("visible", "interpreted", "device"), [(True, False, "cuda"), (True, True, "cpu"), (False, True, "cpu")]
)
def test_kernels_run_on_a_gpu_that_is_seen_unless_they_are_interpreted(visible, interpreted, device, monkeypatch):
    monkeypatch.setattr(selftest, "GPU_VISIBLE", visible)
    monkeypatch.setattr(selftest, "INTERPRETED", interpreted)
    assert selftest.kernel_device().type == device


class Miscounting:
    """In the place of the kernel: fills in what it is told to."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __getitem__(self, grid):
        return lambda values, bounds, result, n: result.fill_(self.value)


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_a_kernel_that_counts_wrong_fails_with_the_tested_versions_as_remedy(monkeypatch, capsys, value):
    monkeypatch.setattr(selftest, "two_sums_kernel", Miscounting(value))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out
    assert "do NOT run" in out
    assert "numpy " in out  # versions are printed
    assert "constraints.txt" in out
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["self_test"]["ok"]
    assert found["problems"]


class Failing:
    def __getitem__(self, grid):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC " + "x" * 500)


def test_a_kernel_that_does_not_compile_is_a_problem_not_a_crash(monkeypatch, capsys):
    monkeypatch.setattr(selftest, "two_sums_kernel", Failing())
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert "Failed to find C compiler" in found["self_test"]["error"]
    assert len(found["problems"][0]["what"]) < 400


def test_a_numpy_too_new_for_the_interpreter():
    error = "InterpreterError: TypeError('only 0-dimensional arrays can be converted to Python scalars')"
    said = told(replace(WITHOUT_GPU, self_test=SelfTest(False, [1.0], None, error)))
    assert "pip install 'numpy<2.5'" in said


def test_a_kernel_that_pkv_refuses_to_launch_gives_its_remedy(fresh):
    done = fresh(f"import triton; {DOCTOR}", ok=False)
    assert done.code == 1
    found = json.loads(done.out)
    assert "import pkv first" in found["problems"][0]["remedy"]


def test_without_triton(fresh):
    done = fresh(f"import sys; sys.modules['triton'] = None; {DOCTOR}", ok=False)
    assert done.code == 1
    found = json.loads(done.out)
    assert found["versions"]["triton"] is None
    assert "pip install triton" in found["problems"][0]["remedy"]


@pytest.mark.parametrize(
    ("missing", "remedy"), [("c_compiler", "gcc"), ("python_h", "python3-dev")], ids=["compiler", "Python.h"]
)
def test_a_first_compile_that_fails_names_the_missing_piece(missing, remedy):
    failed = SelfTest(False, [1.0], None, "CalledProcessError: Command gcc returned 1")
    assert remedy in told(replace(without(WITH_GPU, missing), self_test=failed)).splitlines()[0]


# FlashInfer (cases C1, C2)


@pytest.fixture
def fake_flashinfer(tmp_path, monkeypatch):
    """fake_flashinfer(source) puts a package of that name before all others."""

    def make(source: str) -> None:
        (tmp_path / "flashinfer").mkdir()
        (tmp_path / "flashinfer" / "__init__.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))

    return make


def test_flashinfer_not_installed(monkeypatch):
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    assert machine.probe_flashinfer(None, []) == FlashInfer(
        False, machine.version_of("flashinfer-python"), "not installed"
    )
    assert "in pkv's clone: pip install -e '.[gpu]'" in told(
        replace(WITH_GPU, flashinfer=FlashInfer(False, None, "not installed"))
    )


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('no CUDA device found')", "RuntimeError: no CUDA device found"),
        ("[][0]", "IndexError"),
        ("import os; os.abort()", "killed by signal 6"),
        ("raise SystemExit(3)", "no message"),
    ],
    ids=["RuntimeError", "IndexError", "abort", "exit"],
)
def test_flashinfer_that_does_not_import_is_a_reason_shown(fake_flashinfer, capsys, source, reason):
    fake_flashinfer(source)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["flashinfer"]["available"]
    assert reason in found["flashinfer"]["reason"]
    assert any(reason in problem["what"] for problem in found["problems"])


def test_flashinfer_that_never_comes_back(fake_flashinfer, monkeypatch):
    fake_flashinfer("import time; time.sleep(60)")
    monkeypatch.setattr(machine, "PATIENCE", 1)
    state = machine.probe_flashinfer(None, [])
    assert not state.available
    assert "more than 1 s" in state.reason


def test_an_import_hook_that_raises(monkeypatch):
    def find_spec(name):
        raise RuntimeError("blocked")

    monkeypatch.setattr(machine.importlib.util, "find_spec", find_spec)
    assert "RuntimeError: blocked" in machine.probe_flashinfer(None, []).reason


def test_flashinfer_that_imports_needs_a_gpu_and_something_to_build_with(fake_flashinfer):
    fake_flashinfer("print('chatter')")
    gpu = WITH_GPU.gpu
    assert "needs a GPU" in machine.probe_flashinfer(None, []).reason
    assert machine.probe_flashinfer(gpu, []) == FlashInfer(True, machine.version_of("flashinfer-python"), None)
    state = machine.probe_flashinfer(gpu, ["nvcc", "cxx_compiler"])
    assert state.available
    assert "nvcc, g++ missing" in state.reason
    said = told(replace(without(WITH_GPU, "nvcc", "ninja"), flashinfer=state))
    assert "cuda-nvcc" in said
    assert "pip install ninja" in said


# Tools (cases B6, C1)


def test_an_empty_path_has_no_compilers(monkeypatch, tmp_path):
    for variable in ("CC", "CXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "DEFAULT_CUDA", str(tmp_path))
    tools = machine.find_tools()
    assert [tools[name] for name in ("c_compiler", "cxx_compiler", "nvcc", "ninja")] == [None] * 4


def program(path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_nvcc_is_sought_where_flashinfer_seeks_it(monkeypatch, tmp_path):
    on_path = program(tmp_path / "path" / "nvcc")
    in_home = program(tmp_path / "home" / "bin" / "nvcc")
    by_default = program(tmp_path / "default" / "bin" / "nvcc")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(machine, "DEFAULT_CUDA", str(tmp_path / "default"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert machine.find_nvcc() == on_path
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert machine.find_nvcc() == in_home
    monkeypatch.setenv("CUDA_HOME", f":{tmp_path / 'home'}")  # as a careless export makes it
    assert machine.find_nvcc() is None
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", os.devnull)
    assert machine.find_nvcc() == by_default


def test_a_compiler_named_by_cc_is_the_one(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    assert machine.found("CC", "gcc", "clang") is None


@pytest.mark.parametrize("name", ["c_compiler", "cxx_compiler", "python_h", "nvcc", "ninja"])
def test_compilers_matter_only_with_a_gpu(name):
    flashinfer = FlashInfer(True, "0.7.4", "cannot build kernels")
    assert "is missing" in told(replace(without(WITH_GPU, name), flashinfer=flashinfer))
    assert told(without(WITHOUT_GPU, name)) == ""
    label = doctor.NAMES.get(name, name)
    assert f"\n{label:<20}missing: " in doctor.as_text(without(WITHOUT_GPU, name), "cpu", [])


@pytest.mark.parametrize("name", ["jupyterlab", "ipywidgets", "jupyterlab_widgets", "matplotlib"])
@pytest.mark.parametrize("base", [WITH_GPU, WITHOUT_GPU], ids=["gpu", "cpu"])
def test_what_lessons_need_matters_everywhere(base, name):
    assert "in pkv's clone: pip install -e '.[lessons]'" in told(without(base, name))


def test_a_missing_package_has_no_version():
    assert machine.version_of("no-such-package") is None


@pytest.mark.parametrize(
    ("kernel", "lab", "fit"),
    [
        ("8.1.9", "3.0.17", True),
        ("8.1.9", "1.1.11", False),
        ("7.8.5", "3.0.17", False),
        ("7.8.5", "1.1.11", True),
        ("9.0.0", "4.0.0", True),
    ],
)
def test_widgets_of_one_generation(kernel, lab, fit):
    said = told(replace(WITHOUT_GPU, tools={**TOOLS, "ipywidgets": kernel, "jupyterlab_widgets": lab}))
    assert ("sliders stay blank" in said) != fit


# Torch and the GPU (case C5)


def test_a_cpu_build_of_torch_and_no_visible_gpu_are_two_different_things():
    cpu_build = why_cpu(WITHOUT_GPU)
    no_gpu = why_cpu(replace(WITH_GPU, gpu=None, interpreted=True))
    hidden = why_cpu(replace(WITH_GPU, gpu=None, interpreted=True, visible_devices=""))
    assert "CPU-only torch installed" in cpu_build
    assert "no GPU visible" not in cpu_build
    assert "no GPU visible" in no_gpu
    assert "CPU-only" not in no_gpu
    assert "CUDA 13.0" in no_gpu
    assert "CUDA_VISIBLE_DEVICES is ''" in hidden
    assert why_cpu(WITH_GPU) is None
    assert "TRITON_INTERPRET" in why_cpu(replace(WITH_GPU, interpreted=True))


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"torch_cuda": None}, "CUDA build"),
        ({"visible_devices": ""}, "unset CUDA_VISIBLE_DEVICES"),
        ({}, "update the NVIDIA driver"),
    ],
    ids=["cpu-build", "hidden", "driver"],
)
def test_a_gpu_that_torch_does_not_use_is_a_problem(changes, remedy):
    assert remedy in told(replace(WITH_GPU, gpu=None, interpreted=True, **changes))


def test_no_gpu_at_all_is_no_problem():
    assert told(replace(WITH_GPU, gpu=None, driver_lists_gpu=False, interpreted=True)) == ""


# Platforms (case B6)


@pytest.mark.parametrize(("platform", "words"), [("win32", ["Windows", "WSL2"]), ("darwin", ["macOS", "container"])])
def test_systems_without_triton(platform, words):
    failed = SelfTest(False, [1.0], None, "needs Triton", refused=True)
    base = replace(WITHOUT_GPU, platform=platform, versions={**VERSIONS, "triton": None}, self_test=failed)
    said = told(base)
    assert all(word in said for word in words)
    assert said.count("\n") == 0, "one cause, one problem"


def test_doctor_on_windows(stubbed, looked, capsys):
    failed = replace(looked.self_test, ok=False, got=None, error="needs Triton", refused=True)
    stubbed(platform="win32", versions={**looked.versions, "triton": None}, self_test=failed)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "WSL2" in out
    assert "Triton is missing" in out


@pytest.mark.parametrize(
    ("libcuda", "words"),
    [
        (["/usr/lib/wsl/lib/libcuda.so.1"], "sudo ln -s /usr/lib/wsl/lib/libcuda.so.1 /usr/lib/wsl/lib/libcuda.so"),
        ([], "driver on Windows"),
        (["/usr/lib/wsl/lib/libcuda.so", "/usr/lib/wsl/lib/libcuda.so.1"], ""),
    ],
    ids=["only-so-1", "none", "both"],
)
def test_the_drivers_library_under_wsl(libcuda, words):
    said = told(replace(WITH_GPU, is_wsl=True, libcuda=libcuda))
    assert words in said
    assert bool(said) == bool(words)
    assert told(replace(WITH_GPU, libcuda=libcuda)) == ""  # elsewhere libcuda.so.1 is enough


def test_libcuda_is_found_in_the_linkers_cache_and_in_folders(tmp_path):
    (tmp_path / "libcuda.so.1").touch()
    cache = "\tlibcudart.so.12 (libc6) => /a/libcudart.so.12\n\tlibcuda.so.1 (libc6,x86-64) => /b/libcuda.so.1\n"
    assert machine.find_libcuda(cache, str(tmp_path)) == sorted(["/b/libcuda.so.1", f"{tmp_path}/libcuda.so.1"])


def test_a_driver_library_that_triton_does_not_find():
    failed = SelfTest(False, [1.0], None, "AssertionError: libcuda.so cannot found!")
    assert "TRITON_LIBCUDA_PATH" in told(replace(WITH_GPU, self_test=failed))


@pytest.mark.parametrize(
    "command", [["no-such-program"], ["false"], ["sleep", "60"]], ids=["missing", "fails", "hangs"]
)
def test_programs_that_do_not_answer(command, monkeypatch):
    monkeypatch.setattr(provenance, "PATIENCE", 1)
    assert machine.answer_of(*command) == ""


def test_what_a_program_prints_need_not_be_of_this_locale():
    """A path of Latin-1 letters, say; it is a path again when it is used as one."""
    assert os.fsencode(machine.answer_of("printf", r"/tmp/Gr\374\303\274")) == b"/tmp/Gr\xfc\xc3\xbc"

"""The project's own files agree with one another, and its wheel works outside the clone."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import write
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import pkv
from pkv import cli
from pkv.cli import COMMANDS
from tests.conftest import TABLES, pytest_terminal_summary

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONDA_EXTRAS = ["lessons", "gpu", "test"]
MATERIAL = "pkv/course/material"  # in a wheel
PROSE = ["README.md", "CONTRIBUTING.md", *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md"))]
WORKFLOW = ".github/workflows/ci.yml"


def by_name(lines: list[str]) -> dict[str, Requirement]:
    requirements = [Requirement(line) for line in lines]
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def conda() -> tuple[list[str], list[str]]:
    """The conda packages and the pip lines of environment.yml."""
    document = yaml.safe_load((ROOT / "environment.yml").read_text())
    sections = [entry["pip"] for entry in document["dependencies"] if isinstance(entry, dict)]
    assert len(sections) == 1, "one pip section"
    return [entry for entry in document["dependencies"] if isinstance(entry, str)], sections[0]


def test_environment_asks_for_what_pyproject_asks_for():
    _, pip_lines = conda()
    assert pip_lines[0] == "--constraint constraints.txt"
    assert pip_lines[-1] == f"-e .[{','.join(CONDA_EXTRAS)}]"
    listed = by_name(pip_lines[1:-1])
    wanted = by_name(PROJECT["dependencies"] + [line for extra in CONDA_EXTRAS for line in EXTRAS[extra]])
    assert sorted(listed) == sorted(wanted)
    different = [name for name in wanted if listed[name].specifier != wanted[name].specifier]
    assert not different, f"environment.yml and pyproject.toml give other ranges for {different}"


def test_environment_takes_python_and_compilers_from_conda_forge_only():
    document = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert document["channels"] == ["conda-forge", "nodefaults"]
    packages = {entry.split("=")[0]: entry for entry in conda()[0]}
    assert {"python", "pip", "cxx-compiler", "cuda-nvcc", "ninja", "make", "git"} == set(packages)
    assert packages["python"].removeprefix("python=") + ".0" in SpecifierSet(PROJECT["requires-python"])


def test_constraints_pin_every_dependency_within_its_range():
    pins = constraints()
    wanted = by_name(PROJECT["dependencies"] + [line for lines in EXTRAS.values() for line in lines])
    assert not [name for name in wanted if name not in pins]
    outside = [f"{name}=={pins[name]}" for name in wanted if pins[name] not in wanted[name].specifier]
    assert not outside


def test_constraints_hold_on_other_machines():
    pins = constraints()
    assert not [name for name, version in pins.items() if "+" in version], "a local version exists on one machine"
    assert not [name for name in pins if name.startswith(("nvidia-", "cuda-"))], "only a CUDA build brings these"
    assert "pkv" not in pins


def test_every_make_command_in_the_prose_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name in [*PROSE, "Dockerfile", "environment.yml", ".ci/run", WORKFLOW]:
        text = (ROOT / name).read_text()
        named = set(re.findall(r"(?:`|^\s*|\"|RUN |run: |&& )make ([a-z][a-z-]*)", text, re.MULTILINE))
        assert named <= targets, f"{name}: {named - targets}"
    assert {"lab", "test"} <= set(re.findall(r"make ([a-z-]+)", (ROOT / "README.md").read_text()))


def test_the_public_workflow_runs_what_ci_runs():
    """Make's targets, the same and no others, on every Python that pkv supports; nothing secret is asked for."""
    text = (ROOT / WORKFLOW).read_text()
    workflow = yaml.safe_load(text)
    jobs = workflow["jobs"]
    typed = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert typed == re.findall(r"^make .+", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    (job,) = [job for job in jobs.values() if "strategy" in job]
    assert {"run": "make test"} in job["steps"]
    pythons = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if " :: Python :: " in line]
    assert job["strategy"]["matrix"]["python-version"] == pythons
    assert {job["runs-on"] for job in jobs.values()} == {"ubuntu-latest"}
    assert "secrets." not in text
    assert workflow["permissions"] == {"contents": "read"}
    assert re.search(r"ifneq \(\$\(TORCH_INDEX\),\)", (ROOT / "Makefile").read_text()), "make reads it"
    assert workflow["env"]["TORCH_INDEX"] in (ROOT / "README.md").read_text()


def test_make_alone_lists_the_commands():
    out = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, timeout=30).stdout
    for target in ["lab", "test", "test-all", "test-nightly", "test-gpu", "demo", "setup", "clean"]:
        assert re.search(rf"^ +make {target} ", out, re.MULTILINE), out


def test_make_without_a_usable_python_says_what_to_do(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ["pyproject.toml", "constraints.txt"]:
        (tmp_path / name).touch()
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ["make", "sh"]:
        (tools / tool).symlink_to(shutil.which(tool))
    done = subprocess.run(
        ["make", "test"], cwd=tmp_path, env={"PATH": str(tools)}, capture_output=True, text=True, timeout=30
    )
    assert done.returncode != 0
    assert "needs Python 3.11, 3.12 or 3.13" in done.stderr
    assert not (tmp_path / ".venv").exists()


def bare_python(folder: Path) -> Path:
    """A Python with its standard library and nothing else."""
    path = folder / "bare-python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("target", ["lab", "demo", "test", "test-gpu"])
def test_make_with_a_python_that_lacks_torch_says_what_to_do(target, tmp_path):
    environment = {
        key: value for key, value in os.environ.items() if key != "PYTHONPATH" and not key.startswith("MAKE")
    }
    done = subprocess.run(
        ["make", target, f"PY={bare_python(tmp_path)}"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stdout == ""
    said = [line for line in done.stderr.splitlines() if not line.startswith("make: ")]
    assert len(said) == 1, done.stderr
    assert "torch or numpy is missing. Leave out PY=" in said[0]


def test_what_changed_names_modules_that_are_there():
    """And on the left those that are gone, unless a folder has the name now."""
    rows = re.findall(r"^\| (`pkv\..*?) \| (`pkv\..*?) \|$", (ROOT / "docs/changes.md").read_text(), re.MULTILINE)
    assert len(rows) > 50
    for row in rows:
        for cell, is_there in zip(row, (False, True), strict=True):
            for name in re.findall(r"`(pkv[\w.]*)`", cell):
                assert (ROOT / name.replace(".", "/")).with_suffix(".py").is_file() == is_there, name


def blocks_of(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("page", "n_blocks", "said"),
    [
        ("README.md", 2, ["torch.Size([3, 8, 64])", "split_kv", "Timeline of stage workqueue on rtx3060"]),
        pytest.param(
            "docs/library.md",
            8,
            [
                "torch.Size([3, 8, 64])",
                "[0, 105, 0]",  # a pool after five steps, a fork and a free
                str(list(pkv.STAGES)),
                "Timeline of stage workqueue on rtx3060",
                "Policy 'cost' on rtx3060",
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param("docs/exercises.md", 1, ["ex01_4"], marks=pytest.mark.slow),
        ("docs/changes.md", 1, []),
    ],
)
def test_readme_and_docs_examples_run_one_after_the_other(page, n_blocks, said, tmp_path):
    script = tmp_path / "mine.py"
    blocks = blocks_of(page, "python")
    assert len(blocks) == n_blocks
    script.write_text("".join(blocks))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert not [words for words in said if words not in done.stdout], done.stdout


def test_every_page_with_examples_has_a_test_that_runs_them():
    """Those of records.md are run by test_records.py, those of traces.md by test_traces.py."""
    with_examples = {page for page in PROSE if blocks_of(page, "python")}
    here = {"README.md", "docs/library.md", "docs/exercises.md", "docs/changes.md"}
    assert with_examples == here | {"docs/records.md", "docs/traces.md"}


def test_the_library_page_names_every_stage_in_order():
    named = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/library.md").read_text(), re.MULTILINE)
    assert named == list(pkv.STAGES)


@pytest.mark.parametrize("name", PROSE)
def test_every_pkv_command_in_the_prose_is_understood(name):
    """Its command and its options exist, and have such values; files are not looked for."""
    text = (ROOT / name).read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    typed = [line for block in blocks for line in block.splitlines()]
    for line in [*typed, *re.findall(r"`([^`\n]+)`", text)]:
        found = re.match(r"(?:[A-Z_]+=\S+ )*(?:\S*bin/)?pkv (.+)", line)
        words = shlex.split(found[1], comments=True) if found else []
        if words and not words[0].startswith("-"):
            names = [word for word in words if word.startswith("--")]
            assert words[0] in COMMANDS, line
            assert set(names) <= {"--help", *cli.make_parser()[1][words[0]]._option_string_actions}, line
            if line in typed and "--help" not in names:
                cli.parse(words)


@pytest.mark.parametrize("name", sorted({*PROSE} - {"CONTRIBUTING.md"}))
def test_a_command_that_can_be_copied_has_no_gap_to_fill(name):
    """A word in capitals would stand for something that is said elsewhere, or nowhere."""
    for block in re.findall(r"^```sh\n(.*?)^```", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL):
        commands = "\n".join(line.partition(" #")[0] for line in block.splitlines())
        assert not re.findall(r"(?<![\w$])[A-Z]{3,}(?![\w=])", commands), block


@pytest.mark.parametrize("name", PROSE)
def test_modules_that_the_prose_runs_exist(name):
    for module in re.findall(r"python -m (pkv[\w.]*)", (ROOT / name).read_text()):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


@pytest.mark.parametrize("name", PROSE)
def test_scripts_that_the_prose_runs_exist(name):
    for script in re.findall(r"python ([\w/]+\.py)", (ROOT / name).read_text()):
        assert (ROOT / script).is_file(), script


def test_the_pages_and_pictures_are_what_their_command_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "DOCS", tmp_path)
    for name in (*write.README_PICTURES, *write.PAGES):
        write.write(name)
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"goals.md", "machines.md"} | {path.name for path in (ROOT / "docs").glob("*.svg")}
    different = [name for name in written if (tmp_path / name).read_bytes() != (ROOT / "docs" / name).read_bytes()]
    assert not different, "run: python docs/write.py"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_prose_writes_commands_as_they_can_be_typed(name):
    """make puts pkv into .venv/bin, which is on no PATH."""
    words = "--help|--version|doctor|demo|plan|simulate|explain|lab|check|hint|progress|start|reset"
    assert not re.findall(rf"(?<![\w/.-])pkv (?:{words})\S*", (ROOT / name).read_text())


def test_lint_reads_all_python_of_the_project_and_none_of_a_reader():
    printed = subprocess.run(["make", "-n", "lint"], cwd=ROOT, capture_output=True, text=True, timeout=30).stdout
    of_ruff = [line.split(" --check ")[-1].split(" check ")[-1] for line in printed.splitlines() if " ruff " in line]
    assert len(of_ruff) == 2
    for words in of_ruff:
        assert set(words.split()) == {
            "pkv", "tests", "docs/*.py", "lessons/src", "lessons/build.py", "solutions", "conftest.py"
        }  # fmt: skip
    elsewhere = [*ROOT.glob("[!c]*.py"), *(ROOT / "docs").glob("*/**/*.py")]
    outside = [path for path in elsewhere if is_tracked(path)]
    assert not outside, "lint does not read it"


def is_tracked(path: Path) -> bool:
    return subprocess.run(["git", "ls-files", "--error-unmatch", path], cwd=ROOT, capture_output=True).returncode == 0


class Reporter:
    """pytest's, as far as the summary asks it."""

    def __init__(self, verbosity: int) -> None:
        report = SimpleNamespace(when="call", user_properties=[(TABLES, "sm_80 2 bytes, 16 heads")])
        self.verbosity, self.stats, self.said = verbosity, {"passed": [report]}, []

    def section(self, title: str) -> None:
        self.said.append(title)

    def write_line(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize("verbosity", [-1, 0, 1])
def test_compile_figures_are_listed_when_asked_for_and_under_a_heading(verbosity):
    reporter = Reporter(verbosity)
    pytest_terminal_summary(reporter)
    if verbosity < 1:
        assert reporter.said == []
    else:
        heading, figures = reporter.said
        assert "compiler" in heading
        assert "each card" in heading
        assert figures == "sm_80 2 bytes, 16 heads"


def headings_of(page: Path) -> set[str]:
    """As a link names them after its #."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", [*PROSE, "CHANGELOG.md"])
def test_readme_and_docs_links_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text()):
        if not target.startswith("https:"):
            path, _, heading = target.partition("#")
            page = (ROOT / name).parent / path if path else ROOT / name
            assert page.exists(), target
            assert not heading or heading in headings_of(page), target


def test_readme_shows_a_picture_and_links_every_page():
    targets = {target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())}
    assert [target for target in targets if target.endswith(".svg")]
    assert not {*PROSE, "CHANGELOG.md"} - {"README.md"} - targets


def test_the_map_is_the_tree():
    """Each path of the map exists, and each module of the library is on it."""
    lines, listed, folder = [], set(), ""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for line in re.search(r"^```text\n(pkv/\n.*?)^```", text, re.DOTALL | re.MULTILINE)[1].splitlines():
        found = re.match(r"^( *)([\w./*-]+)", line)
        if not found:
            continue
        indent, name = len(found[1]), found[2]
        if indent == 0:
            folder = name if name.endswith("/") else ""
            listed.add(name)
        else:
            listed.add(folder + name)
        lines.append(folder * (indent > 0) + name)
    assert len(lines) == len(set(lines)), "listed twice"
    missing = [path for path in listed if not list(ROOT.glob(path.rstrip("/")))]
    assert not missing, f"on the map, not in the tree: {missing}"
    on_map = {path.relative_to(ROOT) for name in listed for path in ROOT.glob(name.rstrip("/"))}
    off_map = [
        path
        for path in sorted(p.relative_to(ROOT) for p in (ROOT / "pkv").rglob("*.py"))
        if path.name != "__main__.py" and path not in on_map and not {*path.parents} & (on_map - {Path("pkv")})
    ]
    assert not off_map, f"in the tree, not on the map: {[str(path) for path in off_map]}"


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """A folder with the sdist, and the wheel made from that."""
    pytest.importorskip("build", reason="the dev extra builds the wheel")
    # From a copy, so that building leaves nothing in the clone.
    source = tmp_path_factory.mktemp("source") / "pkv"
    keep_out = shutil.ignore_patterns(".git", ".venv", ".gpu", ".whl", ".scratch", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, source, ignore=keep_out)
    for name in ("lessons/Untitled.ipynb", "solutions/notes.txt", "exercises/mine.py"):  # a reader's own
        (source / name).touch()
    target = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", target, source],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.fixture(scope="module")
def wheel(dist) -> Path:
    (path,) = dist.glob("*.whl")
    return path


def test_sdist_and_container_hold_what_learners_need(dist):
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    needed = [path for part in ("exercises", "solutions") for path in (ROOT / part).glob("ex*.py")]
    needed += (ROOT / "lessons").glob("[0-9]*.ipynb")
    assert not [path for path in needed if path.relative_to(ROOT).as_posix() not in inside]
    assert "COPY --chown=learner . ." in (ROOT / "Dockerfile").read_text()
    assert not {"exercises", "solutions", "lessons", "*"} & set((ROOT / ".dockerignore").read_text().split())


def test_wheel_holds_the_package_and_its_data_only(wheel):
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tree = [path for path in (ROOT / "pkv").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    brought = {f"{MATERIAL}/lessons/{path.stem}.ipynb" for path in (ROOT / "lessons" / "src").glob("[0-9]*.py")}
    brought |= {f"{MATERIAL}/solutions/{path.name}" for path in (ROOT / "solutions").glob("ex*.py")}
    assert files == {path.relative_to(ROOT).as_posix() for path in tree} | brought
    assert "pkv/py.typed" in files
    assert [name for name in files if name.startswith("pkv/data/") and name.endswith(".json")]
    inside = {name.rsplit("/", 1)[-1] for name in zipfile.ZipFile(wheel).namelist()}
    assert {"LICENSE", "NOTICE"} <= inside


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """A folder with what the wheel installs."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel]
    subprocess.run(pip, check=True, timeout=120)
    return target


def environment_of(site: Path) -> dict[str, str]:
    """Python's environment with the installed pkv: the clone's editable install must not answer."""
    environment = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "PKV_HOME")}
    return environment | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(site), "PYTHONUTF8": "1"}


def run_installed(site: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Python in a folder, with the installed pkv and not the clone's."""
    return subprocess.run(
        [sys.executable, "-P", *words],  # -P leaves the working folder off the path
        cwd=folder, env=environment_of(site), capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_wheel_works_outside_the_clone(site, tmp_path):
    script = """
import sys
from importlib import metadata, resources
import torch
import pkv

assert pkv.__file__.startswith(sys.argv[1]), pkv.__file__
assert metadata.version("pkv") == pkv.__version__
assert (resources.files("pkv") / "py.typed").is_file()
assert list((resources.files("pkv") / "data" / "gpus").iterdir())
k = v = torch.arange(20.0).reshape(1, 20, 1, 1).expand(1, 20, 1, 16)
cache = pkv.PagedKVCache.from_dense(k, v, [20], page_size=16)
for stage in ("reference", "split_kv"):
    print(stage, pkv.decode(torch.zeros(1, 2, 16), cache, stage=stage)[0, 0, 0].item())
"""
    done = run_installed(site, tmp_path, "-c", script, str(site))
    assert done.returncode == 0, done.stderr
    values = dict(line.split() for line in done.stdout.splitlines())
    assert float(values["reference"]) == pytest.approx(9.5, abs=1e-5)
    assert float(values["split_kv"]) == pytest.approx(9.5, abs=1e-5)


def test_a_learner_works_without_the_clone(site, tmp_path):
    """From the wheel: start, check, hint, reset; solutions are there, and the learner's folder holds none."""
    folder = tmp_path / "mine"
    done = run_installed(site, tmp_path, "-m", "pkv", "start", "mine", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["folder"] == str(folder)
    name = "ex00_paged_kv_cache.py"
    assert not [path for path in folder.rglob("*") if "solutions" in path.parts]
    script = f"""
import shutil
from pathlib import Path
from pkv import cli
from pkv.course import check, hint
from pkv.course.home import learners_folder, unsolved
from pkv.course.coursefiles import material

assert learners_folder() == Path({str(folder)!r})
assert material("solutions").is_relative_to({str(site)!r})
assert Path("../exercises/{name}").read_text() == unsolved()["{name}"]
check("ex00_1")
for _ in range(4):
    hint("ex00_1")
shutil.copy(material("solutions") / "{name}", "../exercises")
assert cli.main(["check", "ex00"]) == 0
assert cli.main(["reset", "ex00"]) == 0
"""
    done = run_installed(site, folder / "lessons", "-c", script)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    for words in ("ex00_1: not started", "hint 1 of 3", "5 of 5 correct", f"kept in {name}.1"):
        assert words in said, words
    assert f"A solution is pages_needed in {site / MATERIAL / 'solutions' / name}" in said
    done = run_installed(site, tmp_path, "-m", "pkv", "progress")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"no exercises in {tmp_path} or above: `pkv start DIR`" in done.stderr


@pytest.fixture(scope="module")
def solved(site, tmp_path_factory) -> Path:
    """A learner's folder outside the clone, as `pkv start` makes it, with every exercise solved."""
    outside = tmp_path_factory.mktemp("outside")
    done = run_installed(site, outside, "-m", "pkv", "start", "mine")
    assert done.returncode == 0, done.stderr
    for path in (site / MATERIAL / "solutions").glob("ex*.py"):
        assert (outside / "mine" / "exercises" / path.name).is_file()
        shutil.copy(path, outside / "mine" / "exercises")
    return outside / "mine"


# A lesson's first cell and its last. An editable install has put the clone at the end of sys.path: what a wheel lacks
# must not be found there.
WITHOUT_A_CLONE = """
import sys
from pathlib import Path
sys.path[:] = [entry for entry in sys.path if not Path(entry, "pyproject.toml").exists()]
"""
WHERE_FROM = """
import json
import sys
files = {name: module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "pkv"}
print(json.dumps([sys.path, files]))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "lessons" / "src").glob("[0-9]*.py")))
def test_each_lesson_runs_from_the_wheel_without_the_clone(name, site, solved):
    """To its end, with its exercises solved: all that it imports and reads is in the wheel."""
    nbformat = pytest.importorskip("nbformat", reason="the test extra brings nbformat")
    nbclient = pytest.importorskip("nbclient", reason="the test extra brings nbclient")
    notebook = nbformat.read(solved / "lessons" / f"{name}.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    first, last = map(nbformat.v4.new_code_cell, (WITHOUT_A_CLONE, WHERE_FROM))
    notebook.cells = [first, *notebook.cells, last]
    lesson = nbclient.NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=120,
        resources={"metadata": {"path": str(solved / "lessons")}},
        extra_arguments=["--log-level=ERROR"],
    )
    lesson.execute(env=environment_of(site))  # raises where a cell does
    (printed,) = last.outputs
    path, files = json.loads(printed.text)
    assert str(site) in path
    assert str(ROOT) not in path
    assert Path(files["pkv"]).parent == site / "pkv"
    assert not [file for file in files.values() if not Path(file).is_relative_to(site)]
    checked = [cell for cell in code if re.search(r"^check\(", cell.source, re.MULTILINE)]
    assert checked
    for cell in checked:
        said = "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
        assert len(re.findall(r"^  correct\b", said, re.MULTILINE)) == cell.source.count("check("), said


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None and not subprocess.run(["nvidia-smi"], capture_output=True).returncode


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_pip_section_of_the_environment_installs(tmp_path):
    """As conda does it: the section becomes a requirements file beside environment.yml, and pip installs it.

    Without a GPU the gpu extra is left out, as `make` does: nothing could use it, and its wheels are gigabytes.
    """
    source = tmp_path / "pkv"
    keep_out = shutil.ignore_patterns(".git", ".venv", ".gpu", ".whl", ".scratch", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, source, ignore=keep_out)
    _, lines = conda()
    if not has_gpu():
        gpu_only = by_name(EXTRAS["gpu"])
        without = [line for line in lines[1:-1] if canonicalize_name(Requirement(line).name) not in gpu_only]
        assert len(without) == len(lines) - 2 - len(gpu_only)
        # The torch that is here stays the torch that is installed: a CPU build is not in every index.
        lines = [lines[0], *without, lines[-1].replace("gpu,", "")]
    requirements = source / "from-environment.txt"
    requirements.write_text("\n".join(lines) + "\n")
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True, timeout=120)
    python = venv / "bin" / "python"
    done = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "-r", requirements.name],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=1300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check = subprocess.run([python, "-m", "pip", "check"], capture_output=True, text=True, timeout=120)
    assert check.returncode == 0, check.stdout
    tried = subprocess.run(
        [venv / "bin" / "pkv", "doctor", "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert '"versions"' in tried.stdout, tried.stdout + tried.stderr

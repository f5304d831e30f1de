"""Each lesson runs from top to bottom in a fresh kernel, and what is committed is what that run gives.

A notebook that its reader has edited is the reader's: lessonfiles.py says which text is judged.
"""

import importlib.util
import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from lessonfiles import judged_text, without_source

import pkv
from pkv.stages.s5_stream_k_runs import cut_runs
from pkv.viz import schedules

nbformat = pytest.importorskip("nbformat", reason="the test extra brings nbformat")
jupytext = pytest.importorskip("jupytext", reason="the test extra brings jupytext")
pytest.importorskip("nbclient", reason="the test extra brings nbclient")

ROOT = Path(__file__).resolve().parents[1]
LARGEST = 600_000  # bytes
SOLVED = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "solutions").glob("ex*.py")}


def load_build():
    spec = importlib.util.spec_from_file_location("build_lessons", ROOT / "lessons" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load_build()
NAMES = build.lesson_names()
per_lesson = pytest.mark.parametrize("name", NAMES)
# Each takes a quarter of a minute. Lesson 00 is read first, and no other draws, decodes and checks as much as 03.
FAST_LESSONS = ("00_paged_kv_cache", "03_workqueue")


@pytest.fixture
def lesson():
    """lesson(name) is the notebook to judge."""
    return lambda name: nbformat.reads(judged_text(ROOT, name), as_version=4)


@pytest.fixture
def built(tmp_path, monkeypatch):
    """built(name) is a new notebook from the source, with the ids of the notebook to judge."""

    def make(name):
        folder = tmp_path / "lessons"
        (folder / "src").mkdir(parents=True)
        (folder / "src" / f"{name}.py").write_bytes((ROOT / "lessons" / "src" / f"{name}.py").read_bytes())
        (folder / f"{name}.ipynb").write_text(judged_text(ROOT, name), encoding="utf-8")
        with monkeypatch.context() as patch:
            patch.setattr(build, "LESSONS", folder)
            return build.notebook_of(name)

    return make


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def in_words(cell):
    """A cell's outputs as text: streams, and every picture by its words."""
    words = []
    for output in cell.outputs:
        if output.output_type == "stream":
            words.append((output.name, output.text))
        else:
            data = output.get("data", {})
            words.append(
                (output.output_type, data.get("text/plain"), re.findall(r'alt="([^"]*)"', data.get("text/html", "")))
            )
    return words


def test_each_source_has_its_notebook():
    assert {*FAST_LESSONS} < {*NAMES}
    assert not without_source(ROOT, NAMES)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST_LESSONS else [pytest.mark.slow]) for name in NAMES]
)
@pytest.mark.timeout(240)
def test_lesson_runs_and_its_outputs_are_the_committed_ones(name, lesson, built, tmp_path_factory):
    committed = lesson(name)
    folder = tmp_path_factory.mktemp("run")
    fresh = build.execute(built(name), folder)  # raises where a cell does
    assert [cell.execution_count for cell in code_cells(fresh)] == list(range(1, len(code_cells(fresh)) + 1))
    for old, new in zip(code_cells(committed), code_cells(fresh), strict=True):
        assert not [output for output in new.outputs if output.get("name") == "stderr"], new.source
        assert in_words(old) == in_words(new), f"run python lessons/build.py {name}:\n{new.source}"
    assert not list(folder.iterdir()), "a lesson leaves files behind"


@per_lesson
def test_notebook_and_source_agree(name, lesson):
    source = jupytext.read(ROOT / "lessons" / "src" / f"{name}.py")
    assert [(cell.cell_type, cell.source) for cell in lesson(name).cells] == [
        (cell.cell_type, cell.source) for cell in source.cells
    ]


@per_lesson
def test_committed_notebook_is_fit_to_read(name):
    check_fit_to_read(judged_text(ROOT, name))


def check_fit_to_read(text):
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    assert len(text.encode()) < LARGEST
    assert notebook.metadata.kernelspec.name == "python3"
    assert "widgets" not in notebook.metadata
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert cells[0].source.splitlines()[0] == "import pkv"
    assert any("alt=" in str(cell.outputs) for cell in cells[:2]), "a picture within the first two code cells"
    for cell in cells:
        said = str(in_words(cell))
        assert not re.search(r"0x[0-9a-f]{6,}|/home/|/root/|/tmp/|/work/|site-packages", said), said
        assert build.WIDGET not in str(cell.outputs), "a saved slider shows an error where its kernel is gone"


@per_lesson
def test_reader_predicts_and_links_lead_somewhere(name, lesson):
    prose = [cell.source for cell in lesson(name).cells if cell.cell_type == "markdown"]
    assert sum(text.count("**Predict.**") for text in prose) >= 5
    for target in re.findall(r"\]\(([^)#]+)\)", "\n".join(prose)):
        assert (ROOT / "lessons" / target).exists(), target


@per_lesson
def test_code_fits_a_notebook_cell(name, lesson):
    long = [line for cell in code_cells(lesson(name)) for line in cell.source.splitlines() if len(line) > 94]
    assert not long, "a reader would have to scroll sideways"


def test_the_answer_of_lesson_03_is_right():
    """16 ragged rows of up to 256 tokens, in 1 to 32 splits."""
    card, lengths = schedules.card_with(28), schedules.lengths_of(16, 256, "ragged")
    assert len(lengths) * schedules.LLAMA3_8B.n_kv_heads == 128
    assert card.n_sms * card.costs.programs_per_sm == 56
    options = [{"splits": splits, "gpu": card} for splits in range(1, 33)]
    queue, grid = (
        [pkv.simulate(pkv.plan(lengths, schedules.LLAMA3_8B, stage, **o), card).gpu_ms for o in options]
        for stage in ("workqueue", "row_local")
    )
    assert min(queue) == queue[0]
    assert min(grid) == grid[0]
    assert queue[14] < queue[15]
    assert len(set(queue[15:])) == 1
    assert grid[15:] == sorted(set(grid[15:]))


def test_the_answer_of_lesson_04_is_right():
    """Equal rows of 65,536 tokens: FlashInfer loses with 8 only; how many of its programs come last, and how late."""
    shape, card = schedules.LLAMA3_8B, schedules.card_with(28)

    def choice(rows, policy):
        return pkv.explain(schedules.lengths_of(rows, 65536, "equal"), shape, policy=policy, gpu=card)

    sizes = (1, 2, 4, 8, 16, 32, 64)
    assert [rows for rows in sizes if choice(rows, "cost").chosen != "flashinfer"] == [8]
    assert {choice(rows, "paper").chosen for rows in (8, 16, 32, 64)} == {"workqueue"}
    places = card.n_sms * 2
    assert places == 56
    assert [rows * shape.n_kv_heads % places for rows in (8, 16, 64)] == [8, 16, 8]
    assert 64 * shape.n_kv_heads // places == 9
    busy = card.costs.memory_gb_per_s / card.costs.flashinfer_program_gb_per_s
    assert 8 < busy < 16


def test_the_answer_of_lesson_05_is_right():
    """Eight equal rows of 4,096 tokens: for which numbers of programs no row is cut, and when every row is."""
    n_cut = {}
    for n_programs in range(1, 33):
        row_items = cut_runs(np.full(8, 4096, dtype=np.int32), n_programs, 16)[2]
        n_cut[n_programs] = int((row_items > 1).sum())
    assert [n for n, cut in n_cut.items() if cut == 0] == [1, 2, 4, 8]
    assert {cut for n, cut in n_cut.items() if n > 8} == {8}


@per_lesson
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_lesson_runs_with_its_exercises_solved(name, built, tmp_path_factory):
    fresh = build.execute(built(name), tmp_path_factory.mktemp("run"), SOLVED)  # raises where a cell does
    for cell in code_cells(fresh):
        for task_id in re.findall(r'^check\("(\w+)"\)', cell.source, re.MULTILINE):
            said = "".join(text for name, text in in_words(cell) if name == "stdout")
            assert f"{task_id} " in said
            assert len(re.findall(r"^  correct\b", said, re.MULTILINE)) == cell.source.count("check("), said


@pytest.mark.parametrize(
    ("exercises", "said"), [(None, "not started"), pytest.param("solved", "correct", marks=pytest.mark.slow)]
)
def test_check_in_a_lesson_reads_no_file_of_the_builder_and_notes_nothing(exercises, said, tmp_path, monkeypatch):
    mine = tmp_path / "mine"
    mine.mkdir()
    build.write_exercises(mine, {name: "1 / 0\n" for name in SOLVED})
    monkeypatch.setenv("PKV_HOME", str(mine))
    folder = tmp_path / "run"
    folder.mkdir()
    cell = nbformat.v4.new_code_cell('from pkv.course import check\n\ncheck("ex00_1")')
    fresh = build.execute(nbformat.v4.new_notebook(cells=[cell]), folder, SOLVED if exercises else None)
    assert said in str(in_words(fresh.cells[0]))
    assert os.environ["PKV_HOME"] == str(mine)
    assert [path.name for path in (*mine.iterdir(), *folder.iterdir())] == ["exercises"]


def test_a_rebuilt_notebook_keeps_its_ids(lesson, built):
    assert [cell.id for cell in built(NAMES[0]).cells] == [cell.id for cell in lesson(NAMES[0]).cells]


def test_pieces_of_a_stream_are_joined():
    def piece(name, text):
        return nbformat.v4.new_output("stream", name=name, text=text)

    joined = build.join_streams(
        [piece("stdout", "a"), piece("stdout", "b"), piece("stderr", "c"), piece("stdout", "d")]
    )
    assert [(output.name, output.text) for output in joined] == [("stdout", "ab"), ("stderr", "c"), ("stdout", "d")]


# --- a reader's edits are the reader's ---

COMMITTED, EDITED = "committed\n", "edited\n"


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A git repository with lessons a and b. clone.git(...) runs git there; clone / path is a path in it."""
    for variable in [name for name in os.environ if name.startswith("GIT_")]:  # a hook's own repository
        monkeypatch.delenv(variable)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    for name in ("a", "b"):
        for path in (f"lessons/{name}.ipynb", f"lessons/src/{name}.py"):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(COMMITTED)
    run_git(tmp_path, "init", "--quiet")
    run_git(tmp_path, "add", ".")
    run_git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "--quiet", "--message", "lessons")
    return tmp_path


def run_git(folder, *words):
    subprocess.run(["git", "-C", folder, *words], check=True, timeout=60)


def test_an_untouched_lesson_is_judged_in_silence(clone, recwarn):
    assert judged_text(clone, "a") == COMMITTED
    assert not recwarn.list


def test_a_readers_edits_are_not_judged_and_that_is_said(clone, recwarn):
    (clone / "lessons/a.ipynb").write_text(EDITED)
    with pytest.warns(UserWarning, match=r"lessons/a.ipynb holds your own edits.*git checkout lessons/a.ipynb"):
        assert judged_text(clone, "a") == COMMITTED
    assert judged_text(clone, "b") == COMMITTED
    assert not recwarn.list, "b is untouched"


def test_a_deleted_lesson_is_the_committed_one(clone):
    (clone / "lessons/a.ipynb").unlink()
    with pytest.warns(UserWarning, match="own edits"):
        assert judged_text(clone, "a") == COMMITTED


@pytest.mark.parametrize("staged", [False, True])
def test_with_its_source_changed_the_file_is_judged(staged, clone, recwarn):
    (clone / "lessons/a.ipynb").write_text(EDITED)
    (clone / "lessons/src/a.py").write_text(EDITED)
    if staged:
        run_git(clone, "add", "lessons/src/a.py")
    assert judged_text(clone, "a") == EDITED
    assert not recwarn.list


def test_a_staged_notebook_is_judged(clone, recwarn):
    """Its outputs follow pkv too, and change where no source does; and a hook must see what will be committed."""
    (clone / "lessons/a.ipynb").write_text(EDITED)
    run_git(clone, "add", "lessons/a.ipynb")
    assert judged_text(clone, "a") == EDITED
    assert not recwarn.list
    (clone / "lessons/a.ipynb").write_text("edited again")
    with pytest.warns(UserWarning, match="own edits"):
        assert judged_text(clone, "a") == EDITED


def test_without_git_the_file_is_judged(clone, monkeypatch, recwarn):
    (clone / "lessons/a.ipynb").write_text(EDITED)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        assert judged_text(clone, "a") == EDITED
    (clone / ".git").rename(clone / "not-git")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(clone.parent))
    assert judged_text(clone, "a") == EDITED
    assert without_source(clone, ["a"]) == []
    assert not recwarn.list


def test_a_readers_own_notebook_needs_no_source_a_committed_one_does(clone):
    (clone / "lessons/Untitled.ipynb").write_text(EDITED)
    assert without_source(clone, ["a", "b"]) == []
    assert without_source(clone, ["a"]) == ["b"]


@per_lesson
def test_saving_in_jupyterlab_breaks_nothing(name, lesson):
    """Where git cannot tell: a save adds to the metadata, and changes no cell."""
    document = json.loads(nbformat.writes(lesson(name)))
    document["metadata"]["language_info"] |= {
        "codemirror_mode": {"name": "ipython", "version": 3},
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "nbconvert_exporter": "python",
        "pygments_lexer": "ipython3",
        "version": "3.11.7",
    }
    check_fit_to_read(json.dumps(document, indent=1))

"""Each lesson runs from top to bottom in a fresh kernel, and what is committed is what that run gives."""

import importlib.util
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="the test extra brings nbformat")
jupytext = pytest.importorskip("jupytext", reason="the test extra brings jupytext")
pytest.importorskip("nbclient", reason="the test extra brings nbclient")

ROOT = Path(__file__).resolve().parents[1]
LESSONS = sorted((ROOT / "lessons").glob("*.ipynb"))
LARGEST = 600_000  # bytes


def load_build():
    spec = importlib.util.spec_from_file_location("build_lessons", ROOT / "lessons" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load_build()
per_lesson = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)


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
    assert build.lesson_names() == [path.stem for path in LESSONS]
    assert LESSONS


@per_lesson
@pytest.mark.timeout(240)
def test_lesson_runs_and_its_outputs_are_the_committed_ones(path, tmp_path):
    committed = nbformat.read(path, as_version=4)
    fresh = build.execute(build.notebook_of(path.stem), tmp_path)  # raises where a cell does
    assert [cell.execution_count for cell in code_cells(fresh)] == list(range(1, len(code_cells(fresh)) + 1))
    for old, new in zip(code_cells(committed), code_cells(fresh), strict=True):
        assert not [output for output in new.outputs if output.get("name") == "stderr"], new.source
        assert in_words(old) == in_words(new), f"run python lessons/build.py {path.stem}:\n{new.source}"
    assert not list(tmp_path.iterdir()), "a lesson leaves files behind"


@per_lesson
def test_notebook_and_source_agree(path):
    notebook = nbformat.read(path, as_version=4)
    source = jupytext.read(ROOT / "lessons" / "src" / f"{path.stem}.py")
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in source.cells
    ]


@per_lesson
def test_committed_notebook_is_fit_to_read(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < LARGEST
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
def test_reader_predicts_and_links_lead_somewhere(path):
    notebook = nbformat.read(path, as_version=4)
    prose = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    assert sum(text.count("**Predict.**") for text in prose) >= 5
    for target in re.findall(r"\]\(([^)#]+)\)", "\n".join(prose)):
        assert (path.parent / target).exists(), target


@per_lesson
def test_code_fits_a_notebook_cell(path):
    notebook = nbformat.read(path, as_version=4)
    long = [line for cell in code_cells(notebook) for line in cell.source.splitlines() if len(line) > 94]
    assert not long, "a reader would have to scroll sideways"


def test_a_rebuilt_notebook_keeps_its_ids():
    name = LESSONS[0].stem
    before = [cell.id for cell in nbformat.read(LESSONS[0], as_version=4).cells]
    assert [cell.id for cell in build.notebook_of(name).cells] == before


def test_pieces_of_a_stream_are_joined():
    def piece(name, text):
        return nbformat.v4.new_output("stream", name=name, text=text)

    joined = build.join_streams(
        [piece("stdout", "a"), piece("stdout", "b"), piece("stderr", "c"), piece("stdout", "d")]
    )
    assert [(output.name, output.text) for output in joined] == [("stdout", "ab"), ("stderr", "c"), ("stdout", "d")]

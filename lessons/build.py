"""Build the lessons: write each notebook from its source in lessons/src, run it, keep its outputs.

    python lessons/build.py                      # all
    python lessons/build.py 00_paged_kv_cache    # one

Runs on the CPU, whatever the machine has, so that the outputs are the same everywhere. Cell ids stay as they were.
check() finds exercises that nobody has solved, in a folder that is thrown away: a lesson reads none of the builder's own.
"""

import os
import sys
import tempfile
from pathlib import Path

import jupytext
import nbformat
from jupytext.combine import combine_inputs_with_outputs
from nbclient import NotebookClient

LESSONS = Path(__file__).resolve().parent
sys.path.insert(0, str(LESSONS.parent))  # this clone's pkv, as in the kernel

from pkv.course.home import unsolved

CELL_SECONDS = 120
WIDGET = "application/vnd.jupyter.widget-view+json"
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


def lesson_names() -> list[str]:
    return sorted(path.stem for path in (LESSONS / "src").glob("[0-9]*.py"))


def notebook_of(name: str) -> nbformat.NotebookNode:
    """The notebook that the source describes, with the ids of the one that is there."""
    notebook = jupytext.read(LESSONS / "src" / f"{name}.py")
    there = LESSONS / f"{name}.ipynb"
    if there.exists():
        notebook = combine_inputs_with_outputs(notebook, nbformat.read(there, as_version=4))
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def execute(
    notebook: nbformat.NotebookNode, folder: Path, exercises: dict[str, str] | None = None
) -> nbformat.NotebookNode:
    """Run it in a fresh kernel without a GPU, whose working folder is `folder`, and drop what is not for keeping.

    exercises: {file name: text} of what check() reads; None: as the course brings them.
    """
    before = dict(os.environ)
    try:
        with tempfile.TemporaryDirectory(prefix="pkv-home-") as home:
            write_exercises(Path(home), unsolved() if exercises is None else exercises)
            os.environ.update({"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(LESSONS.parent), "PKV_HOME": home})
            NotebookClient(
                notebook,
                kernel_name="python3",
                timeout=CELL_SECONDS,
                resources={"metadata": {"path": str(folder)}},
                extra_arguments=["--log-level=ERROR"],  # not its warning that the kernel's sockets are not encrypted
            ).execute()
    finally:
        os.environ.clear()
        os.environ.update(before)
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            # a slider without its kernel shows an error; its picture is an output of its own
            cell.outputs = join_streams([out for out in cell.outputs if WIDGET not in out.get("data", {})])
    return notebook


def write_exercises(home: Path, exercises: dict[str, str]) -> None:
    """A learner's folder with these exercises."""
    (home / "exercises").mkdir()
    for name, text in exercises.items():
        (home / "exercises" / name).write_text(text, encoding="utf-8")


def join_streams(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Neighbouring pieces of one stream as one output: where a kernel cuts them depends on its timing."""
    joined: list[nbformat.NotebookNode] = []
    for output in outputs:
        if joined and output.output_type == "stream" == joined[-1].output_type and output.name == joined[-1].name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def build(name: str) -> None:
    notebook = execute(notebook_of(name), LESSONS)
    nbformat.validate(notebook)
    nbformat.write(notebook, LESSONS / f"{name}.ipynb")
    print(f"lessons/{name}.ipynb: {len(notebook.cells)} cells")


if __name__ == "__main__":
    for lesson in sys.argv[1:] or lesson_names():
        build(lesson)

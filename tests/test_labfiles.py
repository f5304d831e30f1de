"""Notebooks on their way to JupyterLab and back; test_browser.py opens them in a real one."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from lessonfiles import judged_text
from test_lessons import NAMES, ROOT


@pytest.fixture(scope="module")
def lab():
    """What these tests alone need of Jupyter: its import takes seconds, which every process would spend to collect."""
    pytest.importorskip("jupyter_server", reason="the lessons extra brings it")
    from ipykernel.ipkernel import IPythonKernel

    from pkv.course.labfiles import STORED, LessonFiles

    return SimpleNamespace(LessonFiles=LessonFiles, stored=STORED, language=IPythonKernel.language_info)


@pytest.fixture
def files(lab, tmp_path, monkeypatch):
    """The files of tmp_path as JupyterLab sees them; what a server has signed is in there too."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    return lab.LessonFiles(root_dir=str(tmp_path))


def language_of(model):
    return model["content"]["metadata"]["language_info"]


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_reads_as_its_kernel_would_complete_it_and_is_saved_as_it_was(lab, files, tmp_path, name):
    path = tmp_path / "lesson.ipynb"
    path.write_text(judged_text(ROOT, name), encoding="utf-8")
    before = path.read_bytes()
    model = asyncio.run(files.get("lesson.ipynb"))
    assert language_of(model) == lab.language
    asyncio.run(files.save(json.loads(json.dumps(model, default=str)), "lesson.ipynb"))
    assert path.read_bytes() == before


def test_a_notebook_that_says_more_goes_on_saying_it(lab, files, tmp_path):
    others = {"name": "python", "version": "2.7.18"}
    for stored in (others, dict(lab.language), {"name": "julia"}):
        text = json.dumps({"cells": [], "metadata": {"language_info": stored}, "nbformat": 4, "nbformat_minor": 5})
        (tmp_path / "mine.ipynb").write_text(text)
        model = asyncio.run(files.get("mine.ipynb"))
        assert language_of(model) == stored
        asyncio.run(files.save({"type": "notebook", "content": model["content"]}, "mine.ipynb"))
        assert json.loads((tmp_path / "mine.ipynb").read_text())["metadata"]["language_info"] == stored


def test_files_that_are_no_notebook_and_new_ones_are_as_ever(lab, files, tmp_path):
    (tmp_path / "mine.py").write_text("1\n")
    assert asyncio.run(files.get("mine.py"))["content"] == "1\n"
    assert asyncio.run(files.get("", content=False))["type"] == "directory"
    asyncio.run(files.save({"type": "file", "format": "text", "content": "2\n"}, "mine.py"))
    assert (tmp_path / "mine.py").read_text() == "2\n"
    content = {"cells": [], "metadata": {"language_info": lab.stored}, "nbformat": 4, "nbformat_minor": 5}
    asyncio.run(files.save({"type": "notebook", "content": content}, "new.ipynb"))
    assert json.loads((tmp_path / "new.ipynb").read_text())["metadata"]["language_info"] == lab.stored

"""Pictures: deterministic and legible, on paper, in a notebook and in the README."""

import itertools
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from drawings import PICTURES, PLANS, SVG, texts
from write import README_PICTURES

from pkv import viz
from pkv.viz.svg import SMALL, WIDTH

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_deterministic_sound_and_small(name):
    picture = PICTURES[name]()
    assert picture == PICTURES[name]()
    root = ElementTree.fromstring(picture.svg)
    assert root.tag == f"{SVG}svg"
    assert picture.alt
    assert root.find(f"{SVG}title").text == picture.alt
    assert len(picture.svg) < 250_000
    assert not re.search(r'"(nan|inf|-inf)"', picture.svg), "a coordinate is not a number"


@pytest.mark.parametrize("name", PICTURES)
def test_texts_stay_inside_and_apart(name):
    picture = PICTURES[name]()
    height = float(ElementTree.fromstring(picture.svg).get("height"))
    lines: dict[float, list[tuple[float, float, str]]] = {}
    for left, right, y, text in texts(picture):
        assert left > -2, f"cut on the left: {text}"
        assert right < WIDTH + 2, f"cut on the right: {text}"
        assert 0 < y < height, f"below the picture: {text}"
        lines.setdefault(y, []).append((left, right, text))
    for line in lines.values():
        for (_, right, text), (left, _, following) in itertools.pairwise(sorted(line)):
            assert left > right - 4, f"{text!r} runs into {following!r}"


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_is_small(name):
    assert min(map(float, re.findall(r'font-size="([\d.]+)"', PICTURES[name]().svg))) >= SMALL


def test_picture_is_an_image_with_words():
    bundle = viz.draw_plan(PLANS["toy"])._repr_mimebundle_()
    assert sorted(bundle) == ["text/html", "text/plain"]
    assert re.fullmatch(
        r'<img alt="[^"]+" [^>]*src="data:image/svg\+xml;base64,[A-Za-z0-9+/=]+"/>', bundle["text/html"]
    )


def test_plan_draws_itself_in_a_notebook(monkeypatch):
    formatters = pytest.importorskip("IPython.core.formatters", reason="the lessons extra brings IPython")
    shell = SimpleNamespace(display_formatter=formatters.DisplayFormatter())
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    assert viz.register()
    data, _ = shell.display_formatter.format(PLANS["toy"])
    assert data["text/plain"] == str(PLANS["toy"])
    assert data["text/html"] == viz.draw_plan(PLANS["toy"]).html()


def test_outside_a_notebook_nothing_is_registered(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert not viz.register()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not viz.register()


def test_drawing_needs_no_optional_package():
    """Plans, pages and merges are plain text; only the roofline asks for matplotlib, and says so."""
    code = """
import sys
sys.modules.update(dict.fromkeys(["matplotlib", "ipywidgets", "IPython", "flashinfer"]))
import torch, pkv
from pkv import viz
shape = pkv.Shape(8, 2, 64, 4, torch.float16)
plan = pkv.plan([3, 10], shape, gpu="rtx3060")
print(viz.draw_plan(plan).alt[:18], "|", len(viz.draw_programs(plan).svg) > 500)
try:
    viz.draw_roofline({"G = 4": shape})
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "stream_k: 2 rows b | True"
    assert "pip install matplotlib" in done.stdout


@pytest.mark.parametrize("name", README_PICTURES)
def test_readme_pictures_are_those_that_the_command_draws(name):
    saved = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert saved == README_PICTURES[name]().svg, f"run: python docs/write.py {name}"
    ElementTree.fromstring(saved)
    assert f"(docs/{name})" in (ROOT / "README.md").read_text()

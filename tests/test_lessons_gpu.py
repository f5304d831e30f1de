"""The lessons on a GPU, run as plain scripts: no Jupyter needed. Their last cell measures, after a check."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pkv.course import home

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "lessons" / "src").glob("[0-9]*.py"))

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_lesson_runs_and_measures(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PKV_HOME", str(tmp_path))  # check() reads no exercise of this clone's reader
    home.start(tmp_path)
    if "draw_roofline" in path.read_text():
        pytest.importorskip("matplotlib", reason="this lesson draws a roofline: pip install matplotlib")
    script = f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); runpy.run_path({str(path)!r})"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "Kernels run compiled, on the GPU." in done.stdout
    measured = r"\d+ microseconds, +\d+ GB/s|\d us +[\d,]+ GB/s +\d+% of a plain read"
    assert re.search(measured, done.stdout), done.stdout[-500:]

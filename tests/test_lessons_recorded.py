"""Pictures of records in the lessons: byte for byte what `pkv plot` writes of the records that ship with pkv."""

import argparse
import base64
import json
import re
from pathlib import Path

import pytest
from lessonfiles import judged_text

from pkv.commands import plot

ROOT = Path(__file__).resolve().parents[1]
NAMES = sorted(path.stem for path in (ROOT / "lessons" / "src").glob("[0-9]*.py"))
CALL = "draw_recorded("


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """{the bytes of every figure that `pkv plot --out DIR` writes: its file}."""
    folder = tmp_path_factory.mktemp("figures")
    parser = argparse.ArgumentParser()
    plot.add_arguments(parser)
    assert plot.execute(parser.parse_args(["--out", str(folder)])) == 0
    return {path.read_bytes(): path.name for path in folder.iterdir()}


def cells_with_records(text):
    """(source, [the bytes of each picture]) of every cell of a notebook that draws records."""
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and CALL in source:
            found = re.findall(r"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)", json.dumps(cell["outputs"]))
            yield source, [base64.b64decode(data) for data in found]


@pytest.mark.slow  # all figures of all records, a quarter of a minute
@pytest.mark.parametrize("name", NAMES)
def test_recorded_pictures_are_those_that_plot_writes(name, written):
    cells = list(cells_with_records(judged_text(ROOT, name)))
    if name != NAMES[0]:
        assert cells, f"{name} shows no record"
    for source, pictures in cells:
        assert len(pictures) == source.count(CALL), source
        strangers = [picture for picture in pictures if picture not in written]
        assert not strangers, f"python -m pkv plot writes no such file; run python lessons/build.py {name}:\n{source}"


@pytest.mark.parametrize("name", NAMES)
def test_no_picture_of_records_is_saved_twice(name):
    pictures = [picture for _, of_cell in cells_with_records(judged_text(ROOT, name)) for picture in of_cell]
    assert len(set(pictures)) == len(pictures)

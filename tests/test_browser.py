"""The lessons in real JupyterLab: run all cells, move a slider, see the drawing change, save it, see it again."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lessonfiles import judged_text

from pkv.course.home import unsolved

ROOT = Path(__file__).resolve().parents[1]
LESSONS = sorted(path.stem for path in (ROOT / "lessons" / "src").glob("[0-9]*.py"))
CHROMIUM = os.environ.get("PKV_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="needs Chromium: apt install chromium, or set PKV_CHROMIUM"),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a copy of the lessons."""
    folder = tmp_path_factory.mktemp("jupyter")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def lab(home):
    """The address of a JupyterLab over them."""
    with serve(home) as address:
        yield address


def prepare(home: Path) -> None:
    """A copy of the lessons, exercises that nobody has solved, and settings that ask nothing."""
    shutil.copytree(ROOT / "lessons", home / "lessons")
    for source in (ROOT / "lessons" / "src").glob("[0-9]*.py"):
        (home / "lessons" / f"{source.stem}.ipynb").write_text(judged_text(ROOT, source.stem), encoding="utf-8")
    (home / "exercises").mkdir()
    for name, text in unsolved().items():
        (home / "exercises" / name).write_text(text, encoding="utf-8")
    quiet = home / "settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    quiet.parent.mkdir(parents=True)
    quiet.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))


@contextmanager
def serve(home: Path) -> Iterator[str]:
    """JupyterLab over `home` as `pkv lab` starts it, with no settings of the user's. Yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
        "PKV_HOME": str(home),
        "JUPYTER_CONFIG_DIR": f"{home}/config",
        "JUPYTER_DATA_DIR": f"{home}/data",
        "JUPYTERLAB_SETTINGS_DIR": f"{home}/settings",
        "JUPYTERLAB_WORKSPACES_DIR": f"{home}/workspaces",
    }
    options = [
        "--no-browser",
        "--ip=127.0.0.1",
        f"--port={port}",
        "--ServerApp.port_retries=0",
        "--IdentityProvider.token=",
        "--ServerApp.password=",
        "--LabApp.expose_app_in_browser=True",
    ]
    log = home / "lab.log"
    with log.open("w") as stream:
        server = subprocess.Popen(
            [sys.executable, "-m", "pkv", "lab", "--", *options], env=environment, stdout=stream, stderr=stream
        )
    try:
        wait_for(f"http://127.0.0.1:{port}", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(20)


def wait_for(url: str, server: subprocess.Popen, log: Path) -> None:
    end = time.time() + 90
    while True:
        try:
            urllib.request.urlopen(url + "/api/status", timeout=1)
            return
        except OSError:
            assert server.poll() is None, log.read_text()[-2000:]
            assert time.time() < end, log.read_text()[-2000:]
            time.sleep(0.3)


@pytest.fixture
def page():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser.new_page(viewport={"width": 1280, "height": 1600})
        browser.close()


def open_lesson(page, lab: str, name: str):
    page.goto(f"{lab}/lab/tree/lessons/{name}.ipynb?reset")
    panel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
    panel.wait_for(timeout=60_000)
    # Running earlier opens a dialog that asks for a kernel.
    page.wait_for_function(
        """() => { const session = window.jupyterapp?.shell.currentWidget?.sessionContext;
                   return session?.isReady && session.session?.kernel?.status === 'idle'; }""",
        timeout=60_000,
    )
    return panel


def run_all(page) -> list[str]:
    """Run every cell; the texts of all errors and of everything on stderr."""
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells').then(() => null)")
    return page.evaluate(
        """() => [...window.jupyterapp.shell.currentWidget.content.model.cells]
                 .filter(cell => cell.type === 'code').flatMap(cell => cell.outputs.toJSON())
                 .filter(output => output.output_type === 'error' || output.name === 'stderr')
                 .map(output => JSON.stringify(output).slice(0, 500))"""
    )


def find_cell(page, panel, text: str):
    """The code cell that contains `text`, scrolled to: cells far away are not rendered."""
    page.evaluate(
        """text => { const notebook = window.jupyterapp.shell.currentWidget.content;
                     const index = [...notebook.model.cells].findIndex(
                         cell => cell.type === 'code' && cell.sharedModel.getSource().includes(text));
                     notebook.activeCellIndex = index;
                     return notebook.scrollToItem(index, 'start'); }""",
        text,
    )
    return panel.locator(".jp-CodeCell", has_text=text)


def pictures(cell) -> list[str]:
    """The alternative texts of the cell's pictures; each of them must have been drawn."""
    images = cell.locator("img")
    images.first.wait_for(timeout=30_000)
    drawn = images.evaluate_all("images => images.map(i => i.complete && i.naturalWidth > 0)")
    assert all(drawn), "a picture is broken"
    return images.evaluate_all("images => images.map(i => i.alt)")


@pytest.mark.parametrize("name", ["00_paged_kv_cache", "01_split_kv", "02_row_local", "03_workqueue", "04_adaptive"])
def test_saved_lesson_shows_its_pictures_without_a_run(lab, page, name, tmp_path):
    panel = open_lesson(page, lab, name)
    assert pictures(find_cell(page, panel, "import torch"))
    assert pictures(find_cell(page, panel, "widgets.explore_"))
    assert "Error displaying widget" not in str(panel.locator(".jp-OutputArea").all_inner_texts())
    page.screenshot(path=tmp_path / "saved.png")


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_that_is_only_opened_stays_as_it_is(home, lab, page, name):
    """JupyterLab completes what a notebook says of its language by what the kernel says; then it is a changed one."""
    path = home / f"lessons/{name}.ipynb"
    before = path.read_bytes()
    open_lesson(page, lab, name)
    told, shown, is_changed = page.evaluate(
        """async () => { const { context, sessionContext } = window.jupyterapp.shell.currentWidget;
                         const { language_info } = await sessionContext.session.kernel.info;
                         await new Promise(done => setTimeout(done, 1000));
                         return [language_info, context.model.getMetadata('language_info'), context.model.dirty]; }"""
    )
    assert told == shown
    assert not is_changed
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save').then(() => null)")
    assert path.read_bytes() == before


def test_lesson_00_runs_and_its_slider_draws(lab, page, tmp_path):
    panel = open_lesson(page, lab, "00_paged_kv_cache")
    assert run_all(page) == []
    cell = find_cell(page, panel, "widgets.explore_pages")
    before = pictures(cell)
    assert before[0].startswith("3 rows")
    move(page, cell, 0, 2)
    expect_picture(page, cell, "5 rows")
    assert len(pictures(cell)) == len(before), "the new picture takes the place of the first one"
    cell.screenshot(path=tmp_path / "slider.png")


def test_the_last_picture_is_saved(page, tmp_path):
    """Move a slider, save, stop the server with its kernels, start another, open the notebook again, and look."""
    prepare(tmp_path)
    with serve(tmp_path) as lab:
        panel = open_lesson(page, lab, "01_split_kv")
        cell = find_cell(page, panel, "widgets.explore_plan")
        n_pictures = len(pictures(cell))
        page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-cell').then(() => null)")
        move(page, cell, 2, 1)  # the cell ran alone
        expect_picture(page, cell, "split_kv: 4 rows become 20 items")
        page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save').then(() => null)")
    with serve(tmp_path) as lab:
        cell = find_cell(page, open_lesson(page, lab, "01_split_kv"), "widgets.explore_plan")
        plan, programs = pictures(cell)
        assert n_pictures == 2
        assert plan.startswith("split_kv: 4 rows become 20 items")
        assert programs.startswith("split_kv: 160 programs")
        cell.screenshot(path=tmp_path / "reopened.png")


def test_text_of_a_picture_is_legible_in_a_small_window(lab, page):
    """At 1150 pixels a picture is not shrunk, so its smallest text has 11 pixels, as drawn."""
    page.set_viewport_size({"width": 1150, "height": 900})
    cell = find_cell(page, open_lesson(page, lab, "01_split_kv"), "unsplit = pkv.plan")
    assert pictures(cell)
    shown, drawn = cell.locator("img").first.evaluate(
        "image => [image.getBoundingClientRect().width, image.naturalWidth]"
    )
    assert shown > 0.99 * drawn


def test_lesson_01_runs_and_its_sliders_draw(lab, page, tmp_path):
    panel = open_lesson(page, lab, "01_split_kv")
    assert run_all(page) == []
    cell = find_cell(page, panel, "widgets.explore_plan")
    assert pictures(cell)[0].startswith("split_kv: 4 rows become 16 items")
    move(page, cell, 2, 1)
    expect_picture(page, cell, "split_kv: 4 rows become 20 items")
    assert len(pictures(cell)) == 2
    cell.locator("select").select_option("length_buckets")
    expect_picture(page, cell, "length_buckets: 4 rows become 20 items")
    cell.screenshot(path=tmp_path / "plan.png")

    cell = find_cell(page, panel, "widgets.explore_merge")
    assert pictures(cell)[0].startswith("Exact merge")
    cell.locator("select").nth(1).select_option("average of the outs")
    expect_picture(page, cell, "Average of the outs")
    cell.screenshot(path=tmp_path / "merge.png")


def test_lesson_02_runs_and_its_sliders_play_the_schedule(lab, page, tmp_path):
    from pkv.viz.schedules import schedule_of

    def claim(splits: int, stage: str) -> str:
        return schedule_of(8, 16384, "one long", splits, 28, stage)[0].alt.split(";")[0]

    panel = open_lesson(page, lab, "02_row_local")
    assert run_all(page) == []
    cell = find_cell(page, panel, "widgets.explore_schedule")
    assert pictures(cell)[0].startswith(claim(8, "row_local"))
    move(page, cell, 2, 1)
    expect_picture(page, cell, claim(9, "row_local"))
    cell.locator("select").nth(1).select_option("split_kv")
    expect_picture(page, cell, claim(9, "split_kv"))
    assert len(pictures(cell)) == 1
    cell.screenshot(path=tmp_path / "schedule.png")


def test_lesson_03_runs_and_its_sliders_play_the_queue(lab, page, tmp_path):
    from pkv.viz.schedules import schedule_of

    def claim(rows: int, raggedness: str, splits: int, stage: str) -> str:
        return schedule_of(rows, 16384, raggedness, splits, 28, stage)[0].alt.split(";")[0]

    panel = open_lesson(page, lab, "03_workqueue")
    assert run_all(page) == []
    cell = find_cell(page, panel, "widgets.explore_schedule")
    assert pictures(cell)[0].startswith(claim(8, "one long", 8, "workqueue"))
    cell.locator("select").first.select_option("ragged")
    move(page, cell, 0, 2)
    expect_picture(page, cell, claim(10, "ragged", 8, "workqueue"))
    cell.locator("select").nth(1).select_option("flashinfer")
    expect_picture(page, cell, claim(10, "ragged", 8, "flashinfer"))
    assert len(pictures(cell)) == 1
    cell.screenshot(path=tmp_path / "queue.png")


def test_lesson_04_runs_and_its_sliders_choose(lab, page, tmp_path):
    from pkv.viz.schedules import policy_of

    def claim(rows: int, raggedness: str, policy: str) -> str:
        return policy_of(rows, 16384, raggedness, policy)[0].alt.split(". ")[0]

    panel = open_lesson(page, lab, "04_adaptive")
    assert run_all(page) == []
    cell = find_cell(page, panel, "widgets.explore_policy")
    assert pictures(cell)[0].startswith(claim(8, "ragged", "cost"))
    move(page, cell, 0, 1)
    expect_picture(page, cell, claim(16, "ragged", "cost"))
    cell.locator("select").nth(0).select_option("equal")
    expect_picture(page, cell, claim(16, "equal", "cost"))
    cell.locator("select").nth(1).select_option("paper")
    expect_picture(page, cell, claim(16, "equal", "paper"))
    assert len(pictures(cell)) == 1
    cell.screenshot(path=tmp_path / "policy.png")


def move(page, cell, number: int, steps: int) -> None:
    """Move the cell's slider by key presses."""
    handle = cell.locator(".noUi-handle").nth(number)
    handle.wait_for(timeout=30_000)
    handle.focus()
    for _ in range(steps):
        page.keyboard.press("ArrowRight")


def expect_picture(page, cell, start: str) -> None:
    from playwright.sync_api import expect

    expect(cell.locator(f'img[alt^="{start}"]').first).to_be_visible(timeout=20_000)

"""A learner's work: the folder, check() and hint(), progress, the commands, exercises as the course brings them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import linecache
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lessonfiles import judged_exercise

from pkv import PagedKVCache, course, decode
from pkv.cli import main
from pkv.commands import lab, learning
from pkv.course import answering, checking, coursefiles, entries, home, progress, racing, telling
from pkv.course.catalogue import all_tasks, file_of, find_task
from pkv.course.coursefiles import file_names, material
from pkv.course.home import PROGRESS, learners_folder, unsolved
from pkv.course.points import counts_here
from pkv.course.tasks import GPU_OPTIONAL

ROOT = Path(__file__).resolve().parents[1]
TASKS = all_tasks()
FIRST = "ex00_paged_kv_cache.py"
NOT_WRITTEN = re.compile(r'    raise NotImplementedError\("ex00_1: .*\n')
RIGHT, FLOOR = "    return -(-length // page_size)\n", "    return length // page_size\n"


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """No folder of this machine's reader, and nothing said or kept by an earlier test."""
    monkeypatch.delenv("PKV_HOME", raising=False)
    monkeypatch.setattr(entries, "_said", set())
    monkeypatch.setattr(entries, "_unwritten", {})


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A learner's own folder, in which we are; its name is no easy one."""
    folder = tmp_path / "my cöpy"
    home.start(folder)
    monkeypatch.chdir(folder / "lessons")
    return folder


def write(folder, body, name=FIRST):
    """Solve ex00_1 by some lines."""
    file = folder / "exercises" / name
    text, n = NOT_WRITTEN.subn(body, unsolved()[FIRST])
    assert n == 1
    file.write_text(text, encoding="utf-8")
    return file


def solve(folder, exercise, more=""):
    """The solution as the learner's file, and lines after it."""
    name = file_names()[exercise]
    text = (material("solutions") / name).read_text(encoding="utf-8")
    (folder / "exercises" / name).write_text(f"{text}\n\n{more}", encoding="utf-8")


def said(capsys, task_id="ex00_1", *arguments, **options):
    course.check(task_id, *arguments, **options)
    return capsys.readouterr().out


def states():
    return {task_id: entry.state for task_id, entry in progress.read().items()}


def error_of(capsys, *argv):
    """The one line that bad input gives."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def json_of(capsys, *argv, code=0):
    assert main([*argv, "--json"]) == code
    return json.loads(capsys.readouterr().out)


# --- what the course brings ---


@pytest.mark.parametrize("name", list(unsolved()))
def test_exercises_are_made_from_solutions(name):
    assert judged_exercise(ROOT, name) == unsolved()[name], "run python -m pkv.course.skeletons"


@pytest.mark.parametrize("name", list(unsolved()))
def test_exercises_are_formatted_and_linted(name):
    pytest.importorskip("ruff", reason="the dev extra brings ruff")
    for words in (["format", "--check"], ["check"]):
        command = [sys.executable, "-m", "ruff", *words, "--stdin-filename", f"exercises/{name}", "-"]
        done = subprocess.run(command, cwd=ROOT, input=unsolved()[name], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_task_has_its_exercise_and_three_hints():
    from pkv.course.hints import LEVELS, hints_of

    for task in TASKS:
        assert f'raise NotImplementedError("{task.id}: ' in unsolved()[file_names()[task.exercise]]
        assert len(hints_of(task.id)) == LEVELS, task.id


def test_pytest_is_imported_by_graders_only(fresh):
    code = "import sys, pkv.cli, pkv.course; print({'pytest', 'pkv.course.grading'} & set(sys.modules))"
    assert fresh(code).out == "set()\n"


# --- start ---


def test_start_makes_a_folder_and_says_what_next(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(learning.shutil, "which", lambda name: str(Path(sys.executable).parent / name))
    assert main(["start", "some where/mine"]) == 0
    folder = tmp_path / "some where" / "mine"
    out = capsys.readouterr().out
    assert f"\n  cd {shlex.quote(str(folder))}\n  pkv lab\n" in out
    assert f"{len(unsolved())} exercises" in out
    assert sorted(path.name for path in folder.iterdir()) == [PROGRESS, "exercises", "lessons"]
    assert json.loads((folder / PROGRESS).read_text()) == {}
    assert {path.name: path.read_text() for path in (folder / "exercises").iterdir()} == unsolved()
    lessons = {path.stem for path in (ROOT / "lessons" / "src").glob("[0-9]*.py")}
    assert {path.stem for path in (folder / "lessons").iterdir()} == lessons
    monkeypatch.chdir(folder)
    assert learners_folder() == folder


def test_where_the_shell_finds_no_pkv_or_another_one_python_is_named(monkeypatch):
    for found in (None, "/usr/bin/pkv"):
        monkeypatch.setattr(learning.shutil, "which", lambda name, found=found: found)
        assert learning.as_typed() == f"{shlex.quote(sys.executable)} -m pkv"


def test_start_as_json(tmp_path, capsys):
    found = json_of(capsys, "start", str(tmp_path / "mine"))
    assert found["folder"] == str(tmp_path / "mine")
    assert all((tmp_path / "mine" / name).is_file() for name in found["files"])
    assert f"exercises/{FIRST}" in found["files"]


@pytest.mark.parametrize("part", ["lessons", "exercises"])
def test_start_refuses_a_folder_that_holds_them(part, tmp_path, capsys):
    (tmp_path / part).mkdir()
    assert f"holds {part} already: name another folder" in error_of(capsys, "start", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [part]


def test_start_beside_the_progress_of_earlier_work_leaves_it(tmp_path):
    (tmp_path / PROGRESS).write_text('{"ex00_1": {"state": "correct", "hints": 1}}')
    home.start(tmp_path)
    assert entries.read(tmp_path) == {"ex00_1": entries.Entry("correct", 1)}


def test_start_refuses_what_is_no_folder(tmp_path, capsys):
    (tmp_path / "file").touch()
    for name in ("file", "file/below"):
        assert "name another folder" in error_of(capsys, "start", str(tmp_path / name))


def test_a_start_that_fails_leaves_nothing(tmp_path, monkeypatch, capsys):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        assert "No space left on device" in error_of(capsys, "start", str(tmp_path / "mine"))
    assert list((tmp_path / "mine").iterdir()) == []
    assert main(["start", str(tmp_path / "mine")]) == 0, "once there is room"


def test_start_says_that_pkv_home_goes_first(mine, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PKV_HOME", str(mine))
    assert main(["start", str(tmp_path / "second")]) == 0
    assert f"PKV_HOME names {mine}" in capsys.readouterr().out


def test_a_clone_with_solved_exercises_gives_unsolved_ones(tmp_path, monkeypatch):
    clone = tmp_path / "clone"
    for part in ("pkv", "lessons", "exercises"):
        (clone / part).mkdir(parents=True)
    (clone / "solutions").symlink_to(ROOT / "solutions")
    monkeypatch.setattr(coursefiles, "PACKAGE", clone / "pkv")
    with pytest.raises(FileNotFoundError, match="brings no lessons"):
        home.start(tmp_path / "mine")
    for name in ("00_first.ipynb", "Untitled.ipynb", "build.py"):
        (clone / "lessons" / name).touch()
    write(clone, RIGHT)
    assert home.start(tmp_path / "mine") == ["lessons/00_first.ipynb", *(f"exercises/{name}" for name in unsolved())]
    assert "raise NotImplementedError" in (tmp_path / "mine" / "exercises" / FIRST).read_text()
    assert (clone / "exercises" / FIRST).read_text().count(RIGHT) == 1


# --- the learner's folder ---


def test_the_folder_is_the_nearest_one_with_exercises_of_this_course(mine, monkeypatch):
    other = mine / "other project"
    (other / "exercises" / "deeper").mkdir(parents=True)
    (other / "exercises" / "ex01.py").touch()
    for inside in (mine, mine / "exercises", mine / "lessons", other, other / "exercises" / "deeper"):
        monkeypatch.chdir(inside)
        assert learners_folder() == mine
    home.start(mine / "second")
    monkeypatch.chdir(mine / "second" / "lessons")
    assert learners_folder() == mine / "second"


def test_outside_of_all_folders_it_is_the_clone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert learners_folder() == ROOT


def test_a_folder_without_its_files_is_still_the_learners(mine):
    for path in (mine / "exercises").iterdir():
        path.unlink()
    assert learners_folder() == mine, "and not the clone, whose files would be restored"


def test_without_any_exercises_it_is_said_how_to_get_some(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(home, "PACKAGE", tmp_path / "site-packages" / "pkv")  # where learners_folder() looks last
    monkeypatch.chdir(tmp_path)
    for words in ("check", "hint ex00_1", "progress", "reset ex00"):
        assert "`pkv start DIR`" in error_of(capsys, *words.split())
    with pytest.raises(FileNotFoundError, match="pkv start DIR"):
        course.check("ex00_1")


def test_pkv_home_goes_first(mine, tmp_path, monkeypatch):
    home.start(tmp_path / "second")
    monkeypatch.setenv("PKV_HOME", str(tmp_path / "second"))
    assert learners_folder() == tmp_path / "second"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PKV_HOME", "~/second")
    assert learners_folder() == tmp_path / "second"
    monkeypatch.setenv("PKV_HOME", "")
    assert learners_folder() == mine


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("nowhere", "which is no folder"),
        ("mine/lessons", "which has no folder exercises"),
        ("mine/exercises", "whose parent"),
        (f"mine/exercises/{FIRST}", "which is no folder"),
    ],
)
def test_a_pkv_home_that_will_not_do_is_an_error(given, words, tmp_path, monkeypatch, capsys):
    home.start(tmp_path / "mine")
    monkeypatch.setenv("PKV_HOME", str(tmp_path / given))
    for command in ("check", "progress", "lab"):
        error = error_of(capsys, command)
        assert f"PKV_HOME is {tmp_path / given}, {words}" in error
        assert "unset it" in error


def test_a_copy_beside_an_exercise_is_not_taken_for_it(mine, capsys):
    write(mine, FLOOR)
    write(mine, RIGHT, "ex00_paged_kv_cache-Copy1.py")
    assert "✗" in said(capsys)
    (mine / "exercises" / FIRST).unlink()
    assert "correct" in said(capsys), "renamed, it is"


# --- check ---


def test_a_check_says_whether_the_file_is_right_and_notes_it(mine, capsys):
    assert said(capsys).startswith(f"ex00_1: not started. Open exercises/{FIRST} and write pages_needed (about 1 line)")
    assert states() == {"ex00_1": "not started"}
    write(mine, FLOOR)
    out = said(capsys)
    assert "✗ a part-filled last page counts: rounds down" in out
    assert "✓ an empty row" in out
    assert "hint('ex00_1') helps" in out
    assert states() == {"ex00_1": "runs"}
    write(mine, RIGHT)
    assert said(capsys).endswith("\n  correct\n")
    assert states() == {"ex00_1": "correct"}
    assert "not started" in said(capsys, "ex00_2"), "of the same file"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def pages_needed(:", f"{FIRST}, line 1: "),
        ("1 / 0", f"{FIRST} does not import: ZeroDivisionError: division by zero (line 1)"),
        ("import sys\nsys.exit(0)", f"{FIRST} does not import: SystemExit: 0 (line 2)"),
        ("def pages(): pass", f"{FIRST} has no function pages_needed"),
        (None, f"{FIRST} is not there: `pkv reset ex00` restores it"),
    ],
)
def test_a_file_that_does_not_run_is_broken(text, words, mine, capsys):
    file = mine / "exercises" / FIRST
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    assert f"ex00_1: {words}" in said(capsys)
    assert main(["check", "ex00_1"]) == 1
    assert words in capsys.readouterr().out
    assert states() in ({"ex00_1": "broken"}, {})


def test_what_was_saved_within_the_same_second_is_seen(mine, monkeypatch, capsys):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # as it usually is
    wrong, right = "    return -(length // page_size) \n", "    return -(-length // page_size)\n"
    file = write(mine, wrong)
    before = file.stat()
    assert "✗" in said(capsys)
    write(mine, right)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    assert "correct" in said(capsys)


def test_so_is_a_kernel(mine):
    file = mine / "exercises" / "ex99_kernel.py"
    for number in (3, 4):
        file.write_text(
            "import torch\nfrom pkv._triton import tl, triton\n\n\n"
            f"@triton.jit\ndef fill(ptr):\n    tl.store(ptr, {number})\n\n\n"
            "def filled():\n    out = torch.zeros(1)\n    fill[(1,)](out)\n    return out.item()\n"
        )
        os.utime(file, (0, 0))
        assert answering.load(file).filled() == number


def test_a_function_of_the_notebook_is_tried_and_does_not_count(mine, capsys):
    out = said(capsys, "ex00_1", lambda length, page_size: -(-length // page_size))
    assert f"correct\nKeep it: write it into exercises/{FIRST}, then check('ex00_1'). Only the file counts." in out
    out = said(capsys, "ex00_1", lambda length, page_size: length // page_size)
    assert "rounds down" in out
    assert "Keep it" not in out
    assert states() == {}
    with pytest.raises(TypeError, match="function to try in place of pages_needed, got 5"):
        course.check("ex00_1", 5)
    with pytest.raises(ValueError, match="'ex00_9' does not exist; choose one of ex00_1, "):
        course.check("ex00_9")


CELL = "from pkv.course import check, hint\n\n{}\n\ncheck('ex00_1', mine, seed=1)\nhint('ex00_2')\n"
OWN = "def mine(length, page_size):\n    return {}\n"
CELLS = {
    "a_function": (OWN.format("-(-length // page_size)"), ""),
    "a_lambda": ("mine = lambda length, page_size: -(-length // page_size)", ""),
    "a_function_of_a_function": (
        "import functools\n\ndef maker():\n    @functools.cache\n    def inner(length, page_size):\n"
        "        return -(-length // page_size)\n    return inner\n\nmine = maker()", ""),
    "a_shortcut": (OWN.format("pkv.course") + "import pkv", "mine uses course"),
    "by_another_name": ("from pkv import course as it\n" + OWN.format("it.graders"), "mine uses course"),
    "by_another_function": ("import pkv\nhelper = lambda: pkv.decode\n" + OWN.format("helper()"), "mine uses decode"),
    "a_method_of_numpy": ("import numpy\n" + OWN.format("int(numpy.ceil(length / page_size))"), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CELLS)
def test_a_function_of_the_notebook_uses_what_it_uses_and_not_what_its_cell_does(name, mine, capsys):
    body, words = CELLS[name]
    cell = CELL.format(body)
    linecache.cache[name] = (len(cell), None, cell.splitlines(True), name)  # as IPython does
    exec(compile(cell, name, "exec"), {})
    out = capsys.readouterr().out
    assert ("✗ it is your own work" in out) == bool(words)
    assert words.replace("mine", "pages_needed") in out


def test_a_kernel_is_tried_by_the_function_that_launches_it(mine):
    for task_id, name in (("ex01_4", "attend_split"), ("ex02_5", "bounds_kernel"), ("ex00_1", "load_kv")):
        exercise = "ex02" if task_id == "ex02_5" else "ex01"
        kernel = getattr(answering.load(material("solutions") / file_names()[exercise]), name)
        function = find_task(task_id).function
        with pytest.raises(TypeError, match=re.escape(f"pass what launches it, check('{task_id}', {function})")):
            course.check(task_id, kernel)


def test_a_seed_repeats_the_numbers(mine, tmp_path, monkeypatch, capsys):
    asked = tmp_path / "asked"  # of another process
    monkeypatch.setattr(telling, "SECONDS", 60.0)  # so that on a slow machine the smallest input is found too

    def spy(length, page_size):
        with asked.open("a") as file:
            file.write(f"{length} {page_size}\n")
        return 0 if page_size > 16 and length % page_size == 1 else -(-length // page_size)

    def numbers(**options):
        asked.unlink(missing_ok=True)
        out = said(capsys, "ex00_1", spy, **options)
        return asked.read_text().split("\n")[:20], out

    assert numbers(seed=5) == numbers(seed=5)
    assert numbers(seed=5)[0] != numbers(seed=6)[0]
    drawn = iter([5, 6])
    monkeypatch.setattr(checking, "new_seed", lambda: next(drawn))
    assert numbers() == numbers(seed=5)
    assert numbers()[0] == numbers(seed=6)[0], "fresh ones each time"
    assert re.search(r"seed=5 repeats these numbers", numbers(seed=5)[1])


def test_a_lessons_default_device_does_no_harm(mine, monkeypatch, capsys):
    torch.set_default_device("meta")  # as lessons set a GPU
    try:
        solve(mine, "ex01")
        monkeypatch.setattr(checking, "GPU_VISIBLE", True)  # kernels are asked in another way there
        kernel = answering.function_of(find_task("ex01_5"), material("solutions"))
        assert "  correct" in said(capsys, "ex01_5")
        assert "  correct" in said(capsys, "ex01_5", kernel)
        out = said(capsys, "ex00_4", torch.ones)
        solution = answering.function_of(find_task("ex00_4"), material("solutions"))
        assert "correct" in said(capsys, "ex00_4", solution)
    finally:
        torch.set_default_device(None)
    assert "generator" not in out


# --- the commands ---


def test_the_command_checks_like_the_notebook(mine, capsys):
    write(mine, FLOOR)
    notebook = said(capsys, seed=7).splitlines()
    assert main(["check", "ex00_1", "--seed", "7"]) == 1
    shell = capsys.readouterr().out.splitlines()
    assert shell[:-1] == notebook[:-1]
    assert shell[-1] == "  `pkv hint ex00_1` helps; --seed 7 repeats these numbers"
    write(mine, RIGHT)
    assert main(["check", "ex00_1"]) == 0
    assert capsys.readouterr().out.endswith("correct\n")
    assert states() == {"ex00_1": "correct"}


def test_the_command_takes_tasks_exercises_or_nothing(mine, capsys):
    write(mine, RIGHT)
    for words, code in [("", 1), ("ex00", 1), ("ex00_1 ex00_1", 0), ("ex00_2 ex00", 1)]:
        found = json_of(capsys, "check", *words.split(), code=code)
        of_exercise = [task.id for task in TASKS if task.exercise == "ex00"]
        wanted = {
            "": [task.id for task in TASKS],
            "ex00": of_exercise,
            "ex00_1 ex00_1": ["ex00_1"],
            "ex00_2 ex00": ["ex00_2", *(task_id for task_id in of_exercise if task_id != "ex00_2")],
        }[words]
        assert [task["task"] for task in found["tasks"]] == wanted
        assert found["correct"] == 1 or words == "ex00_2"
        assert found["folder"] == str(mine)
    assert main(["check", "ex00"]) == 1
    assert capsys.readouterr().out.endswith(f"\n1 of {len(of_exercise)} correct\n")
    for name in ("ex00_9", "ex77", "pages_needed"):
        assert f"task {name!r} does not exist; choose one of ex00_1" in error_of(capsys, "check", name)


def test_the_command_takes_each_task_and_exercise_by_name():
    for task in TASKS:
        assert learning.tasks_of([task.id, task.id]) == [task]
        assert len({*learning.tasks_of([task.exercise, task.id])}) == len(learning.tasks_of([task.exercise]))


def test_the_commands_facts(mine, capsys):
    file = write(mine, FLOOR)
    file.write_text('print("hello")\n' + file.read_text())
    found = json_of(capsys, "check", "ex00_1", "--seed", "3", code=1)
    (task,) = found["tasks"]
    assert (found["seed"], task["state"], task["diagnosis"], task["race"]) == (3, "runs", "floor", None)
    assert [line["holds"] for line in task["properties"]] == [False, True, True, True, True]
    assert task["properties"][0]["text"].startswith("rounds down")


def test_hints_come_one_by_one_and_are_counted(mine, capsys):
    course.hint("ex00_1")
    assert capsys.readouterr().out.startswith("hint 1 of 3: ")
    assert main(["hint", "ex00_1"]) == 0
    assert capsys.readouterr().out.startswith("hint 2 of 3: ")
    found = json_of(capsys, "hint", "ex00_1")
    assert (found["task"], found["level"], found["of"], found["solution"]) == ("ex00_1", 3, 3, None)
    for _ in range(2):
        course.hint("ex00_1")
        out = capsys.readouterr().out
        assert out.startswith(f"hint 3 of 3: {found['text']}\nThere are no more hints. A solution is pages_needed in ")
        assert Path(out.split(" in ")[-1].strip()) == ROOT / "solutions" / FIRST
    assert progress.entry_of("ex00_1") == entries.Entry(hints=3)
    assert progress.entry_of("ex00_2") == entries.Entry()
    assert "'ex00' does not exist; choose one of ex00_1" in error_of(capsys, "hint", "ex00")


def test_in_a_clone_the_solution_is_named_from_its_root(tmp_path, monkeypatch):
    from pkv.course.hints import solution_file

    monkeypatch.chdir(tmp_path)
    assert solution_file("ex00_1") == f"solutions/{FIRST}"


def test_progress_shows_what_checks_and_hints_have_noted(mine, capsys):
    course.show_progress()
    out = capsys.readouterr().out
    assert f"0 of {len(TASKS)} solved; next: ex00_1, pages that a row takes (about 1 line of pages_needed in " in out
    write(mine, RIGHT)
    course.check("ex00_1")
    course.hint("ex00_2")
    capsys.readouterr()
    course.show_progress()
    table = capsys.readouterr().out
    assert re.search(r"^ex00_1 +correct +-  pages that a row takes$", table, re.MULTILINE)
    assert re.search(r"^ex00_2 +not started +1  ", table, re.MULTILINE)
    assert main(["progress"]) == 0
    assert capsys.readouterr().out == f"{mine}\n\n{table}"
    found = json_of(capsys, "progress")
    assert (found["folder"], found["solved"]) == (str(mine), 1)
    assert found["next"].startswith("next: ex00_2, ")
    assert [task["task"] for task in found["tasks"]] == [task.id for task in TASKS]
    first = find_task("ex00_1")
    assert found["tasks"][0] == {
        "task": "ex00_1", "title": first.title, "points": first.points, "tag": first.tag,
        "state": "correct", "hints": 0,
    }  # fmt: skip


def test_a_legend_says_what_the_states_of_the_table_mean(mine, capsys):
    legends = [f"\n{state}: {means}\n" for state, means in progress.MEANS.items()]
    assert not any(legend in progress.as_text() for legend in legends)
    write(mine, FLOOR)
    said(capsys)
    assert [legend in progress.as_text() for legend in legends] == [False, True, False]
    write(mine, "    import os\n    os._exit(3)\n")
    said(capsys)
    assert [legend in progress.as_text() for legend in legends] == [True, False, False]
    assert json_of(capsys, "progress")["tasks"][0]["state"] == "broken"


def test_the_next_step_at_the_end(mine, monkeypatch):
    for task in TASKS:
        progress.note(task.id, state="correct")
    assert progress.next_step(progress.read()) == "all is done"
    raced = dataclasses.replace(TASKS[0], race={"length": 1})
    others = [dataclasses.replace(task, race=None) for task in TASKS[1:]]
    monkeypatch.setattr(progress, "in_lessons", lambda: [raced, *others])
    assert progress.next_step(progress.read()) == "all is done"
    monkeypatch.setattr(progress, "GPU_VISIBLE", True)
    assert progress.next_step(progress.read()) == "next: make ex00_1 fast enough, on this GPU"
    progress.note("ex00_1", state="fast enough")
    assert progress.next_step(progress.read()) == "all is done"


def test_the_next_step_follows_the_lessons(mine):
    sources = sorted((ROOT / "lessons" / "src").glob("[0-9]*.py"))
    asked = [found for path in sources for found in re.findall(r'^check\("(ex\w+)"\)$', path.read_text(), re.MULTILINE)]
    proposed = []
    for _ in TASKS:
        step = progress.next_step(progress.read())
        if "needs a GPU" in step:
            break
        proposed.append(re.match(r"next: (\w+),", step)[1])
        progress.note(proposed[-1], state="correct")
    assert proposed == [task_id for task_id in asked if counts_here(find_task(task_id))]


def test_a_kernel_that_no_gpu_has_compiled_is_said_to_be_one(mine, monkeypatch, capsys):
    for exercise in ("ex00", "ex01"):
        solve(mine, exercise)
    monkeypatch.setattr(checking, "ON_GPU", False)
    assert said(capsys, "ex01_5").endswith("\n  correct (in the interpreter; a GPU has not compiled it yet)\n")
    assert said(capsys, "ex00_1").endswith("\n  correct\n")
    table = progress.as_text()
    assert re.search(r"^ex01_5 +correct \(interpreter\) +-  ", table, re.MULTILINE)
    assert re.search(r"^ex00_1 +correct +-  ", table, re.MULTILINE)
    progress.note("ex01_5", state="correct on GPU")
    assert re.search(r"^ex01_5 +correct on GPU +-  ", progress.as_text(), re.MULTILINE)


def test_a_check_reads_progress_once_and_so_does_a_hint(mine, monkeypatch):
    reads, read_bytes = [], Path.read_bytes

    def counted(path):
        reads.append(path.name)
        return read_bytes(path)

    write(mine, RIGHT)
    monkeypatch.setattr(Path, "read_bytes", counted)
    course.check("ex00_1")
    assert reads.count(PROGRESS) == 1
    course.hint("ex00_1")
    assert reads.count(PROGRESS) == 2


def test_a_task_for_a_gpu_is_tried_without_one_and_does_not_count(mine, monkeypatch, capsys):
    tasks = tuple(dataclasses.replace(task, tag=GPU_OPTIONAL) if task.id == "ex00_1" else task for task in TASKS)
    for module in (progress, learning):
        monkeypatch.setattr(module, "all_tasks", lambda: tasks)
    monkeypatch.setattr(progress, "in_lessons", lambda: tasks)
    monkeypatch.setattr(learning, "find_tasks", lambda name: [tasks[0]])
    monkeypatch.setattr(checking, "find_task", lambda name: tasks[0])
    write(mine, FLOOR)
    assert "rounds down" in said(capsys)
    found = json_of(capsys, "check", "ex00_1")
    assert (found["of"], found["tasks"][0]["correct"], found["tasks"][0]["counts"]) == (0, False, False)
    write(mine, RIGHT)
    verdict = "  correct, as far as a CPU can tell; it needs a GPU, and there is none here: it does not count\n"
    assert said(capsys).endswith(verdict)
    assert states() == {"ex00_1": "runs"}
    assert "next: ex00_2" in progress.as_text()
    assert re.search(r"^ex00_1 +needs a GPU +-", progress.as_text(), re.MULTILINE)
    for task in tasks[1:]:
        progress.note(task.id, state="correct")
    assert progress.next_step(progress.read()) == "all is done but what needs a GPU"


def test_reset_restores_one_file_and_keeps_what_was_in_it(mine, capsys):
    other = mine / "exercises" / "ex98_other.py"
    other.write_text("mine\n")
    file = write(mine, RIGHT)
    text = file.read_text()
    course.check("ex00_1")
    course.hint("ex00_1")
    capsys.readouterr()
    assert main(["reset", "ex00"]) == 0
    assert capsys.readouterr().out == f"{file} is as at the beginning. Your text is kept in {FIRST}.1, beside it.\n"
    assert file.read_text() == unsolved()[FIRST]
    assert (mine / "exercises" / f"{FIRST}.1").read_text() == text
    assert progress.entry_of("ex00_1") == entries.Entry("not started", hints=1)
    file.write_bytes(b"\xff not even text")
    assert json_of(capsys, "reset", "ex00") == {"file": str(file), "kept": f"{file}.2"}
    assert (mine / "exercises" / f"{FIRST}.2").read_bytes() == b"\xff not even text"
    assert (mine / "exercises" / f"{FIRST}.1").read_text() == text
    assert json_of(capsys, "reset", "ex00")["kept"] is None, "there was nothing to keep"
    file.unlink()
    assert "no text of yours" in (main(["reset", "ex00"]), capsys.readouterr().out)[1]
    assert file.read_text() == unsolved()[FIRST]
    assert other.read_text() == "mine\n"
    assert file_of(mine / "exercises", "ex00") == file


def test_reset_leaves_the_progress_of_other_exercises(mine, monkeypatch):
    for task_id in ("ex00_1", "ex01_1"):
        progress.note(task_id, state="correct", hints=2)
    assert main(["reset", "ex00"]) == 0
    assert progress.read()["ex01_1"] == entries.Entry("correct", 2)
    assert progress.read()["ex00_1"] == entries.Entry("not started", 2)


def test_reset_takes_a_renamed_file_for_the_exercise(mine, capsys):
    file = mine / "exercises" / FIRST
    file.rename(mine / "exercises" / "ex00_mine.py")
    assert main(["reset", "ex00"]) == 0
    names = sorted(path.name for path in file.parent.glob("ex00*"))
    assert names == ["ex00_mine.py.1", FIRST]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ex77", "choose one of ex00"),
        ("", "choose one of ex00"),
        ("../ex00", "choose one of ex00"),
        ("ex00_1", "a whole file is restored, such as ex00"),
        (FIRST, "a whole file is restored, such as ex00"),
    ],
)
def test_reset_refuses_other_names(name, words, mine, capsys):
    assert words in error_of(capsys, "reset", name)


def test_lab_opens_the_lessons_of_the_learners_folder(mine, monkeypatch):
    commands = []
    monkeypatch.setattr(lab, "find_spec", lambda name: name)
    monkeypatch.setattr(os, "execv", lambda program, command: commands.append(command))
    main(["lab"])
    assert f"--ServerApp.root_dir={mine}" in commands[0]
    (mine / lab.FIRST_LESSON).unlink()
    main(["lab"])
    assert f"--ServerApp.root_dir={ROOT}" in commands[1], "a folder with exercises only"


# --- progress, kept ---


def test_a_state_reached_on_a_gpu_stays_until_a_check_fails(mine):
    task = find_task("ex00_1")
    for state, then in [
        ("correct", "correct"),
        ("correct on GPU", "correct on GPU"),
        ("correct", "correct on GPU"),
        ("fast enough", "fast enough"),
        ("correct", "fast enough"),
        ("correct on GPU", "correct on GPU"),
        ("runs", "runs"),
        ("correct", "correct"),
        ("broken", "broken"),
    ]:
        progress.reached(task, state)
        assert progress.entry_of(task.id).state == then


DAMAGED = {
    "cut": b'{"ex00_1": {"state": "correct", "hi',
    "empty": b"",
    "bytes": b"\xff\xfe\x00garbage",
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "a state of tomorrow": b'{"ex00_1": {"state": "superb", "hints": 1}}',
    "hints below 0": b'{"ex00_1": {"state": "correct", "hints": -1}}',
    "hints in words": b'{"ex00_1": {"state": "correct", "hints": "two"}}',
    "hints true": b'{"ex00_1": {"state": "correct", "hints": true}}',
    "no entry": b'{"ex00_1": 5}',
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("first", ["read", "write"])
def test_a_damaged_file_is_kept_and_that_is_said_once(first, content, mine, capsys):
    file = mine / PROGRESS
    file.write_bytes(content)
    if first == "read":
        assert states() == {}
    progress.note("ex00_2", hints=1)
    progress.note("ex00_2", hints=2)
    assert progress.read() == {"ex00_2": entries.Entry(hints=2)}
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"{PROGRESS}.damaged.1" in err
    assert (mine / f"{PROGRESS}.damaged.1").read_bytes() == content
    assert sorted(path.name for path in mine.glob(".pkv*")) == [PROGRESS, f"{PROGRESS}.damaged.1"]


def test_what_can_be_read_of_a_damaged_file_goes_on(mine, capsys):
    file = mine / PROGRESS
    content = '{"ex00_1": {"state": "correct", "hints": 2}, "ex00_2": null}'
    for number in (1, 2):
        file.write_text(content)
        assert progress.read() == {"ex00_1": entries.Entry("correct", 2)}
        assert (mine / f"{PROGRESS}.damaged.{number}").read_text() == content
    assert progress.read() == {"ex00_1": entries.Entry("correct", 2)}
    json_of(capsys, "progress")  # what is said leaves stdout to the JSON


def test_a_file_that_cannot_be_read_is_not_overwritten(mine, monkeypatch, capsys):
    progress.note("ex00_1", hints=3)
    before = (mine / PROGRESS).read_text()

    def refuse(file):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        for _ in range(2):
            progress.note("ex00_2", state="correct")
            assert states() == {"ex00_2": "correct"}, "in this process"
    assert (mine / PROGRESS).read_text() == before
    err = capsys.readouterr().err
    assert err.count("progress is not kept: Permission denied") == 1
    assert err.count("progress cannot be read: Permission denied") == 1
    assert set(progress.read()) == {"ex00_1", "ex00_2"}


def test_a_folder_that_cannot_be_written_to_costs_the_progress_only(mine, monkeypatch, capsys):
    write(mine, RIGHT)
    progress.note("ex00_2", hints=2)

    def refuse(file, *arguments, **options):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", refuse)
        for _ in range(2):
            course.check("ex00_1")
            course.hint("ex00_1")
        out, err = capsys.readouterr()
        assert out.count("\n  correct\n") == 2
        assert "hint 1 of 3" in out
        assert "hint 2 of 3" in out, "as long as this notebook runs"
        assert err == f"pkv: progress is not kept: Permission denied: {mine}\n"
        assert progress.read() == {"ex00_1": entries.Entry("correct", 2), "ex00_2": entries.Entry(hints=2)}
    assert set(json.loads((mine / PROGRESS).read_text())) == {"ex00_2"}
    progress.note("ex00_3", hints=1)
    assert set(json.loads((mine / PROGRESS).read_text())) == {"ex00_1", "ex00_2", "ex00_3"}, "kept, once it can be"


def test_two_notebooks_at_once_lose_nothing(mine):
    def work(task_id):
        for _ in range(30):
            progress.note(task_id, hints=progress.entry_of(task_id).hints + 1)

    threads = [threading.Thread(target=work, args=(f"ex00_{number}",)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {task_id: entry.hints for task_id, entry in progress.read().items()} == {
        f"ex00_{number}": 30 for number in range(1, 5)
    }
    assert [path.name for path in mine.glob(".pkv*")] == [PROGRESS]


# --- a learner's answers as parts of the library ---

OFFERED = {"ex01_4": "tile loop", "ex01_5": "merge", "ex03_1": "queue"}


def decodes_right(parts):
    torch.manual_seed(0)
    k, v = torch.randn(2, 3, 70, 2, 16)
    cache = PagedKVCache.from_dense(k, v, [70, 0, 33], page_size=4, seed=1)
    q = torch.randn(3, 4, 16)
    out = decode(q, cache, stage="workqueue", parts=parts)
    return torch.allclose(out, decode(q, cache, stage="reference"), atol=1e-4)


def test_parts_that_are_not_started_are_the_solutions(mine, capsys):
    parts = course.learner_parts()
    lines = [f"{task_id} is not started: the solution's {name} runs here" for task_id, name in OFFERED.items()]
    assert capsys.readouterr().out.splitlines() == lines
    assert parts.given == ("attend_tokens", "merge", "plan")
    assert Path(parts.attend_tokens.fn.__code__.co_filename).parent == material("solutions")
    assert decodes_right(parts)
    assert progress.read() == {}, "nobody has checked anything"


def test_parts_that_are_right_are_the_learners(mine, capsys):
    solve(mine, "ex01")
    solve(mine, "ex03")
    parts = course.learner_parts()
    lines = [f"{task_id}: your own {name} runs here" for task_id, name in OFFERED.items()]
    assert capsys.readouterr().out.splitlines() == lines
    assert Path(parts.attend_tokens.fn.__code__.co_filename).parent == mine / "exercises"
    assert Path(parts.merge.__code__.co_filename).parent == mine / "exercises"
    assert decodes_right(parts)


@pytest.mark.parametrize(
    ("name", "exercise", "more", "words"),
    [
        ("merge", "ex01", "def merge_rows(partial_out, partial_lse, offsets, out, lse): out.zero_()",
         "ex01_5 is not correct (check('ex01_5') says why): the solution's merge runs here"),
        ("merge", "ex01", "1 / 0", "ex01_5 is broken (ex01_split_kv.py does not import: ZeroDivisionError: "),
        ("plan", "ex03", "def build_queue(lengths, n_splits, tile): return []",
         "ex03_1 is not correct (check('ex03_1') says why): the solution's queue runs here"),
    ],
)  # fmt: skip
def test_a_part_that_is_wrong_does_not_run(name, exercise, more, words, mine, capsys):
    solve(mine, exercise, more)
    parts = course.learner_parts(name)
    out = capsys.readouterr().out
    assert words in out
    assert out.count("\n") == 1
    assert parts.given == (name,)
    assert decodes_right(parts)


def test_a_part_in_no_exercise_is_refused():
    with pytest.raises(ValueError, match=r"part 'attend' is in no exercise; choose from attend_tokens, merge, plan"):
        course.learner_parts("attend")


# --- fast enough (a stand-in for the clock: there is a GPU in few places) ---

RACED = dataclasses.replace(
    find_task("ex00_4"), race={"length": 40, "n_kv_heads": 2, "group": 2, "head_dim": 8, "size": 1.0, "seed": 1}
)


def clock(mine_us, solutions_us):
    """Times in turn, ours first, the first round an outlier."""
    times = iter([9999.0, 9999.0, *[mine_us, solutions_us] * 99])

    def time_us(call):
        call()
        return next(times)

    return time_us


def right_row(q, k, v, scale):
    return answering.function_of(RACED, material("solutions"))(q, k, v, scale)


@pytest.mark.parametrize(
    ("mine_us", "verdict"),
    [
        (40.0, "fast enough: 40.0 us, the solution 40.0 us"),
        (60.0, "fast enough: 60.0 us, the solution 40.0 us"),
        (60.1, "not fast enough yet: 60.1 us, the solution 40.0 us; 1.5 times that is enough"),
    ],
)
def test_one_and_a_half_times_the_solutions_time_is_enough(mine_us, verdict):
    raced = racing.race(RACED, right_row, clock(mine_us, 40.0))
    assert raced.text == verdict
    assert raced.is_fast_enough == verdict.startswith("fast")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            lambda q, k, v, scale: right_row(q[:, :], k[:30], v[:30], scale),
            "on a larger case it is wrong: out: query head 0",
        ),
        (lambda q, k, v, scale: 1 // 0, "on a larger case it is wrong: ZeroDivisionError"),
    ],
)
def test_what_is_wrong_on_the_larger_case_is_not_timed(function, words):
    raced = racing.race(RACED, function, clock(1.0, 40.0))
    assert words in raced.text
    assert not raced.is_fast_enough


def test_without_a_gpu_or_a_larger_case_nothing_is_timed():
    assert racing.race(RACED, right_row) is None or racing.ON_GPU
    assert racing.race(find_task("ex00_1"), right_row, clock(1.0, 1.0)) is None


def test_the_tile_loop_races():
    """On a smaller case than on a GPU: its arguments can be made, and the solution is right where it is timed."""
    task = find_task("ex01_4")
    small = task.race | {"lengths": [40, 5], "splits": 2, "n_kv_heads": 1, "head_dim": 16}
    task, calls = dataclasses.replace(task, race=small), []
    raced = racing.race(
        task, answering.function_of(task, material("solutions")), lambda call: calls.append(call) or 1.0
    )
    assert (raced.fault, raced.is_fast_enough, len(calls)) == (None, True, 2 * racing.ROUNDS)


@pytest.mark.parametrize(("mine_us", "state"), [(50.0, "fast enough"), (70.0, "correct on GPU")])
def test_a_race_is_said_and_noted(mine_us, state, mine, monkeypatch, capsys):
    (mine / "exercises" / FIRST).write_text((ROOT / "solutions" / FIRST).read_text())
    timed = clock(mine_us, 40.0)
    monkeypatch.setattr(checking, "ON_GPU", True)
    monkeypatch.setattr(checking, "race", lambda task, function: racing.race(task, function, timed))
    monkeypatch.setattr(checking, "find_task", lambda name: RACED)
    assert f"{mine_us:.1f} us, the solution 40.0 us" in said(capsys, "ex00_4")
    assert states() == {"ex00_4": state}
    said(capsys, "ex00_4", right_row)  # tried only
    report = SimpleNamespace(state="runs", is_correct=False, task=RACED)
    checking.keep(report)
    assert states() == {"ex00_4": "runs"}


# --- what an answer does to its process, and what it prints ---

CRASH = "    import ctypes\n    print('to the edge')\n    return ctypes.string_at(0)\n"
CRASHED = "its process ended before it answered (killed by SIGSEGV: maybe it reads or writes outside of its arrays: "


def crash(length, page_size):
    import ctypes

    print("to the edge")
    return ctypes.string_at(0)


def test_an_answer_that_crashes_ends_its_own_process(mine, capsys):
    write(mine, CRASH)
    for given in ((), (crash,)):
        out = said(capsys, "ex00_1", *given)
        assert f"ex00_1: for length = 3, page_size = 4: {CRASHED}" in out
        assert out.endswith("  printed, for length = 3, page_size = 4:\n    to the edge\n  hint('ex00_1') helps\n")
    assert states() == {"ex00_1": "broken"}
    (mine / "exercises" / FIRST).write_text("import os\nos._exit(3)\n")
    assert f"importing {FIRST} ended its process (exit code 3)" in said(capsys)
    assert "helps" not in said(capsys)


def test_so_does_a_kernel_that_reads_outside_of_its_arrays(mine, capsys):
    solve(mine, "ex01")
    file = mine / "exercises" / file_names()["ex01"]
    text = file.read_text()
    line = "        k, v = load_kv("
    assert text.count(line) == 1
    file.write_text(text.replace(line, f"        tl.load(cache.lengths.ptr + (1 << 44))\n{line}"))
    assert CRASHED in said(capsys, "ex01_4")
    assert said(capsys, "ex01_2").endswith("correct\n")
    parts = course.learner_parts("attend_tokens")
    assert "ex01_4 is broken (for lengths = [7, 16], " in capsys.readouterr().out
    assert decodes_right(parts)


def test_where_it_is_watched_it_is_told_and_does_not_crash(mine, capsys):
    solve(mine, "ex01")
    file = mine / "exercises" / file_names()["ex01"]
    text = file.read_text()
    assert text.count("tl.load(offsets + row),") == 1
    file.write_text(text.replace("tl.load(offsets + row),", "tl.load(offsets + row + (1 << 44)),"))
    found = said(capsys, "ex01_5")
    assert "reads past the end of" in found
    assert CRASHED not in found


def test_a_check_does_not_change_the_notebook(mine, capsys):
    """What a fork changes is gone with it, in whichever thread it was asked, with whatever threads torch has."""
    torch.randn(800, 800) @ torch.randn(800, 800)
    notebook = []

    def changes(length, page_size):
        notebook.append(torch.randn(300, 300) @ torch.randn(300, 300))
        return -(-length // page_size)

    reports = []
    thread = threading.Thread(target=lambda: reports.append(checking.report_here(find_task("ex00_1"), 1, changes)))
    thread.start()
    thread.join()
    assert reports[0].is_correct
    assert notebook == []


def test_what_an_answer_prints_is_shown(mine, capsys):
    body = "    for number in range(50):\n        print(number, length)\n    return {}\n"
    lines = "".join(f"    {number} 3\n" for number in range(30, 50))
    write(mine, body.format("[length][page_size]"))
    assert f"\n  printed, for length = 3, page_size = 4:\n    ...\n{lines}  hint(" in said(capsys)
    write(mine, body.format("-(-length // page_size)"))
    assert main(["check", "ex00_1", "--seed", "7"]) == 0
    assert capsys.readouterr().out.endswith(f"printed, for length = 3, page_size = 4:\n    ...\n{lines}  correct\n")
    found = json_of(capsys, "check", "ex00_1")["tasks"][0]["printed"]
    assert found == ["...", *(f"{number} 3" for number in range(30, 50))]


def test_the_input_whose_prints_are_shown_is_the_one_that_is_shown(mine, capsys):
    def wrong(length, page_size):
        print("asked of", length, page_size, file=sys.stderr)
        return 99 if length > 30 else -(-length // page_size)

    out = said(capsys, "ex00_1", wrong, seed=5)
    shown = re.search(r"for length = (\d+), page_size = (\d+): expected", out)
    assert f"for length = {shown[1]}, page_size = {shown[2]}:\n    asked of {shown[1]} {shown[2]}\n" in out
    assert int(shown[1]) > 30


def test_what_is_printed_is_shown_as_text_and_not_without_end(mine, capsys):
    def loud(length, page_size):
        print("x" * 10**7, end="")
        print("\x1b[2J\ttab\r\n", end="")
        return -(-length // page_size)

    out = said(capsys, "ex00_1", loud)
    assert "\x1b" not in out
    assert len(out) < 10_000
    assert re.search(r"xxx  *\[2J +tab\n", out)


def test_graders_do_not_mix_prints_with_verdicts(mine):
    write(mine, "    print('mine alone')\n    return length // page_size\n")
    task = find_task("ex00_1")
    report = checking.report_apart(task, mine / "exercises", 1)
    assert report.printed == "mine alone\n"
    assert "mine alone" not in "".join(checking.failure(report, line) for line in report.lines)


def test_an_answer_that_never_ends_is_ended(mine):
    def endless(length, page_size):
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(0.01)

    report = checking.report_here(find_task("ex00_1"), 1, endless, seconds=0.3)
    assert "for length = 3, page_size = 4: no answer within 0.3 s: does a loop ever end?" in checking.as_text(report)
    assert checking.as_text(report, in_shell=True).endswith("\n  `pkv hint ex00_1` helps")

"""`pkv grade FOLDER`: the points of every submission in a folder, as CSV. docs/grading.md says what a submission is.

Exit code 0 where all were graded, however badly.
"""

import argparse
import csv
import io
import os
import threading
from pathlib import Path
from typing import Any

from pkv.commands import CommandError
from pkv.commands.arguments import add_json, at_least_1, seed_of
from pkv.commands.output import Progress, print_json, say
from pkv.course.catalogue import all_tasks
from pkv.course.checking import new_seed
from pkv.course.gradebook import Grader, Line, Mark, grade_all
from pkv.course.submissions import submissions_in

HELP = "grade a folder of submissions: one line of CSV for each"
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet would compute


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="holds submissions: folders, zips or .py files")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the CSV there (default: to stdout)")
    parser.add_argument("--seed", type=seed_of, metavar="N", help="repeat the numbers of an earlier run")
    parser.add_argument(
        "--seconds", type=at_least_1, metavar="N", help="that a task may take (default: the task's own, mostly 30)"
    )
    parser.add_argument(
        "--jobs",
        type=at_least_1,
        metavar="N",
        help="submissions at a time (default: one for each processor, at most 8)",
    )
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Grade every submission; one line each."""
    if not args.folder.is_dir():
        raise CommandError(f"{args.folder} is no folder: name one that holds submissions")
    if args.out and not args.out.absolute().parent.is_dir():
        raise CommandError(f"--out {args.out}: there is no such folder to write it into")
    try:
        submissions = submissions_in(args.folder)
    except OSError as error:
        raise CommandError(f"{args.folder} cannot be read: {error.strerror}") from None
    if not submissions:
        raise CommandError(f"{args.folder} holds no submission: a folder, a zip or a .py file for each")
    seed = new_seed() if args.seed is None else args.seed
    progress, one_by_one = Progress(len(submissions)), threading.Lock()

    def begins(name: str) -> None:
        with one_by_one:
            progress.step(name)

    try:
        lines = grade_all(submissions, Grader(seed, args.seconds), args.jobs or default_jobs(), begins)
    finally:
        progress.end()
    text = as_csv(lines)
    if args.out:
        try:
            args.out.write_text(text, encoding="utf-8", newline="")
        except OSError as error:
            raise CommandError(f"--out {args.out}: {error.strerror}") from None
    if args.json:
        print_json({"folder": str(args.folder), "seed": seed, "submissions": [as_dict(line) for line in lines]})
    elif not args.out:
        say(text, end="")
    return 0


def default_jobs() -> int:
    """As many as there are processors for this process."""
    return min(len(os.sched_getaffinity(0)), 8)


def as_csv(lines: list[Line]) -> str:
    """Name, points, most, tasks solved, what each task has earned or its state, and a note."""
    stream = io.StringIO()
    rows = csv.writer(stream, lineterminator="\n")
    rows.writerow(["name", "points", "most", "solved", *(task.id for task in all_tasks()), "note"])
    for line in lines:
        marks = [cell_of(mark) for mark in line.marks]
        rows.writerow([harmless(line.name), line.points, line.most, line.solved, *marks, harmless(line.note)])
    return stream.getvalue()


def cell_of(mark: Mark) -> int | str:
    """Points where it is solved, else its state."""
    return mark.points or mark.state


def harmless(text: str) -> str:
    """A text that no spreadsheet takes for a formula.

    >>> harmless("=HYPERLINK(1)"), harmless("Ada")
    ("'=HYPERLINK(1)", 'Ada')
    """
    return f"'{text}" if text.startswith(FORMULA) else text


def as_dict(line: Line) -> dict[str, Any]:
    """A line as plain values."""
    facts = ("points", "most", "state", "diagnosis", "text")
    tasks = {mark.task.id: {name: getattr(mark, name) for name in facts} for mark in line.marks}
    return {
        "name": line.name, "points": line.points, "most": line.most, "solved": line.solved, "note": line.note,
        "tasks": tasks,
    }  # fmt: skip

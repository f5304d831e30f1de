"""`pkv check`: is the answer in an exercise file right, and if not, what is wrong? As check() says it in a notebook."""

import argparse
from dataclasses import asdict
from typing import Any

from pkv.commands.arguments import add_json, seed_of
from pkv.commands.learning import folder, tasks_of
from pkv.commands.output import print_json, say
from pkv.course.checking import as_text, keep, new_seed, race_of, report_here
from pkv.course.judging import Report
from pkv.course.points import counts_here
from pkv.course.printed import last_lines
from pkv.course.racing import Race

HELP = "check the answers in your exercise files, and note your progress"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("names", nargs="*", metavar="ID", help="tasks, ex03_2, or exercises, ex03 (default: all)")
    parser.add_argument(
        "--seed", type=seed_of, metavar="N", help="repeat the numbers of an earlier check (default: fresh ones)"
    )
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Check task by task; 1 if any answer that counts is not correct."""
    home, tasks = folder(), tasks_of(args.names)
    seed = new_seed() if args.seed is None else args.seed
    found: list[dict[str, Any]] = []
    for task in tasks:
        report = report_here(task, seed)
        raced = race_of(report)
        keep(report, raced)
        found.append(facts(report, raced))
        if not args.json:
            say(as_text(report, in_shell=True) + (f"\n  {raced.text}" if raced else ""))
    that_count = [task["correct"] for task in found if task["counts"]]
    n_correct = sum(that_count)
    if args.json:
        print_json({"folder": str(home), "seed": seed, "correct": n_correct, "of": len(that_count), "tasks": found})
    elif len(tasks) > 1:
        say(f"{n_correct} of {len(that_count)} correct")
    return 0 if n_correct == len(that_count) else 1


def facts(report: Report, raced: Race | None) -> dict[str, Any]:
    """A report as plain values."""
    return {
        "task": report.task.id, "title": report.task.title, "state": report.state, "correct": report.is_correct,
        "counts": counts_here(report.task),
        "diagnosis": report.diagnosis, "text": report.text, "properties": [asdict(line) for line in report.lines],
        "printed": last_lines(report.printed),
        "race": raced and asdict(raced) | {"is_fast_enough": raced.is_fast_enough},
    }  # fmt: skip

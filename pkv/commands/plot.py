"""`pkv plot`: figures and tables of records, from files or from those that ship with pkv. Runs nothing on a GPU."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from pkv.bench.records.records import RecordError, Records
from pkv.bench.records.results import parts
from pkv.bench.records.shipped import shipped_files
from pkv.commands import CommandError, arguments
from pkv.commands.output import print_json, say
from pkv.commands.tables import as_table, records_of
from pkv.viz.figures import FIGURES, OF_ALL_MACHINES
from pkv.viz.needs import Missing
from pkv.viz.svg import Picture

HELP = "draw what records of `pkv bench` say, or print it as tables"
OUT = Path("figures")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="records, as pkv bench writes them (default: pkv's own)"
    )
    parser.add_argument(
        "--out", type=Path, default=OUT, metavar="DIR", help=f"folder for the SVG files (default {OUT})"
    )
    parser.add_argument(
        "--figure", choices=list(FIGURES), metavar="NAME", help=f"only one of {', '.join(FIGURES)} (default: all)"
    )
    parser.add_argument("--table", action="store_true", help="print tables, and draw nothing")
    arguments.add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Write every figure that the records allow, or print their tables."""
    if args.table and (args.figure or args.json):
        raise CommandError("--table prints all tables as text: leave --figure and --json out, or leave --table out")
    try:
        records = records_of(args.files or shipped_files())
    except RecordError as error:
        raise CommandError(str(error)) from None
    if args.table:
        say(as_table(records))
        return 0
    drawn, missing = drawn_of(records, [args.figure] if args.figure else list(FIGURES))
    if not drawn:
        raise CommandError(f"nothing can be drawn of these records: {'; '.join(missing.values())}")
    written = {name: write(args.out / f"{name}.svg", picture) for name, picture in drawn.items()}
    if args.json:
        claims = {str(written[name]): picture.alt for name, picture in drawn.items()}
        print_json({"written": claims, "missing": missing})
        return 0
    for name, picture in drawn.items():
        say(f"{written[name]}\n  {picture.alt.split('. ')[0]}")
    for words in missing.values():
        say(f"not drawn: {words}")
    return 0


def drawn_of(records: Records, names: list[str]) -> tuple[dict[str, Picture], dict[str, str]]:
    """Pictures by file name, without its end, and for the figures that nothing allows what they need."""
    drawn: dict[str, Picture] = {}
    missing: dict[str, str] = {}
    for name in names:
        n_before = len(drawn)
        for end, of in allowed(records, name).items():
            try:
                drawn[f"{name}{end}"] = FIGURES[name](of)
            except Missing as error:
                missing[name] = str(error)
        if len(drawn) > n_before:
            missing.pop(name, None)
        elif name not in missing:
            missing[name] = f"{name} needs loads of another grid than growth: pkv bench --grid full --record FILE"
    return drawn, missing


def allowed(records: Records, name: str) -> Mapping[str, Records]:
    """What a figure may be drawn of, by what its file's name says of it: each machine and grid, or all together."""
    if name in OF_ALL_MACHINES:
        return {"": records}
    found: dict[str, Records] = {}
    for (machine, grid), of in parts(records).items():
        if grid != "growth" or name == "growth":  # loads of equal short rows say little else
            end = f"-{slug(grid)}-{slug(machine)}"
            while end in found:  # two names may have one slug
                end += "-other"
            found[end] = of
    return found


def slug(words: str) -> str:
    """Words as part of a file's name.

    >>> slug("NVIDIA H200, 132 SMs")
    'nvidia-h200-132-sms'
    """
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def write(path: Path, picture: Picture) -> Path:
    """Write the SVG, in a folder that is made if need be; where it was written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
    except OSError as error:
        raise CommandError(f"cannot write {path} ({error.strerror}): pass --out DIR") from None
    return path

"""Does a selection of tests notice faults? One-line faults in pkv/, each in a copy of the tree, tested until one fails.

    python tests/faults.py list                                       # the 40 faults of seed 1
    python tests/faults.py run new.json --jobs 14                     # which of them `make test` kills
    python tests/faults.py run rest.json --ids left_out.txt --survivors-of new.json

A tool, which pytest does not collect. --seed and --count choose other faults. --ids: a file of test ids, one a line, in
the place of what `make test` selects. Two checkouts' selections are compared so:

    python -m pytest tests --collect-only -q -m "not gpu and not slow and not browser" | grep :: | sort > new.txt
    (the same in the other checkout)                                                                    > old.txt
    python -m pytest tests --collect-only -q                                           | grep :: | sort > all.txt
    comm -12 old.txt all.txt | comm -23 - new.txt > left_out.txt

What the new selection kills and shares with the old one, the old one kills too; only the survivors are asked again.
Tests that fail without any fault, as those do that a machine cannot run, are found first and left out. Results are
written after each fault; started again, it goes on where it ended. A fault that takes longer than --minutes is killed.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAST = "not gpu and not slow and not browser"
ROOMS_OF_DECODING = ["cache", "cards", "kernels", "plans", "runtime", "stages", "wording"]
DECODING = ["pkv/*.py", *(f"pkv/{room}/*.py" for room in ROOMS_OF_DECODING)]
AROUND = ["pkv/bench/**/*.py", "pkv/commands/*.py", "pkv/course/*.py", "pkv/viz/*.py"]
COMPARISONS = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}
OPPOSITES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "amin": "amax", "amax": "amin"}
NOT_COPIED = (".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "build", "dist")


@dataclass(frozen=True)
class Fault:
    kind: str
    path: str  # from the root
    line: int  # counted from 1
    function: str
    before: str  # the whole line
    after: str

    def __str__(self) -> str:
        change = f"  - {self.before.strip()}\n  + {self.after.strip()}"
        return f"{self.path}:{self.line} ({self.function}) {self.kind}\n{change}"


# --- faults ---


def replaced(line: str, begin: int, end: int, old: str, new: str) -> str:
    """The first `old` in these bytes of the line becomes `new`."""
    text = line.encode()
    return (text[:begin] + text[begin:end].replace(old.encode(), new.encode(), 1) + text[end:]).decode()


def edits_of(node: ast.AST, line: str) -> Iterator[tuple[str, str]]:
    """(kind, the line with this node changed) for what can be done to it."""
    begin, end = node.col_offset, node.end_col_offset
    text = line.encode()[begin:end].decode()

    def with_text(new: str) -> str:
        return replaced(line, begin, end, text, new)

    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            yield "comparison", replaced(line, left.end_col_offset, right.col_offset, *COMPARISONS[type(op)])
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            signs = ("+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
            yield "sign", replaced(line, left.end_col_offset, right.col_offset, *signs)
        case ast.BinOp(op=ast.FloorDiv(), left=left):
            yield (
                "rounding",
                with_text(f"-(-{text})" if isinstance(left, ast.Name | ast.Attribute) else f"({text} + 1)"),
            )
        case ast.BoolOp(values=[first, second, *_]):
            words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield "and or", replaced(line, first.end_col_offset, second.col_offset, *words)
        case ast.Constant(value=bool()):
            yield "boolean", with_text(str(not node.value))
        case ast.Constant(value=int()):
            yield "off by one", with_text(str(node.value + 1))
        case ast.UnaryOp(op=ast.Not()):
            yield "no not", with_text(text.removeprefix("not "))
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in OPPOSITES:
            yield "min max", replaced(line, node.func.col_offset, node.func.end_col_offset, name, OPPOSITES[name])
        case ast.keyword(arg="mask"):
            yield "no mask", with_text(f"mask=({text.removeprefix('mask=')}) | True")


def faults_in(path: Path) -> Iterator[Fault]:
    """Every fault of one line; nothing in what is said to people, in annotations or in decorators."""
    lines = path.read_text(encoding="utf-8").split("\n")

    def visit(node: ast.AST, function: str) -> Iterator[Fault]:
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            function = node.name
        if hasattr(node, "lineno") and node.lineno == node.end_lineno:
            line = lines[node.lineno - 1]
            for kind, after in edits_of(node, line):
                if after != line and compiles([*lines[: node.lineno - 1], after, *lines[node.lineno :]]):
                    yield Fault(kind, path.relative_to(ROOT).as_posix(), node.lineno, function, line, after)
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns", "decorator_list", "msg"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from visit(child, function)

    yield from visit(ast.parse("\n".join(lines)), "")


def compiles(lines: list[str]) -> bool:
    try:
        ast.parse("\n".join(lines))
    except SyntaxError:
        return False
    return True


def choose(seed: int, count: int) -> list[Fault]:
    """As many of each kind and of each half of the library as there may be, none twice in one function."""
    chance = random.Random(seed)
    halves = [[path for pattern in half for path in sorted(ROOT.glob(pattern))] for half in (DECODING, AROUND)]
    pools = []
    for half in halves:
        kinds: dict[str, list[list[Fault]]] = {}  # each kind's faults, file by file, so that no long file has most
        for path in half:
            of_file: dict[str, list[Fault]] = {}
            for fault in faults_in(path):
                of_file.setdefault(fault.kind, []).append(fault)
            for kind, found in of_file.items():
                kinds.setdefault(kind, []).append(found)
        pools.append(kinds)
    chosen: dict[tuple[str, str], Fault] = {}
    turn = 0
    while len(chosen) < count:
        kinds = pools[turn % 2]
        kind = sorted(kinds)[turn // 2 % len(kinds)]
        fault = chance.choice(chance.choice(kinds[kind]))
        chosen.setdefault((fault.path, fault.function), fault)
        turn += 1
    return list(chosen.values())


# --- tests ---


def copy_tree(folder: Path, fault: Fault | None) -> None:
    """The tree with the fault in it, as a repository of its own where there is git: tests ask it."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)
    if fault is not None:
        path = folder / fault.path
        lines = path.read_text(encoding="utf-8").split("\n")
        assert lines[fault.line - 1] == fault.before, f"{fault.path} is not as it was"
        lines[fault.line - 1] = fault.after
        path.write_text("\n".join(lines), encoding="utf-8")
    if shutil.which("git"):
        for words in (
            ["init", "-q"],
            ["add", "-A"],
            ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "tree"],
        ):
            subprocess.run(["git", *words], cwd=folder, check=True)


def likely_first(fault: Fault) -> list[str]:
    """All test files: those that name the fault's function, then by how many of its module's names they name."""
    tree = ast.parse((ROOT / fault.path).read_text(encoding="utf-8"))
    kinds = ast.FunctionDef | ast.ClassDef
    names = {node.name for node in ast.walk(tree) if isinstance(node, kinds)} | {Path(fault.path).stem}

    def unlikely(path: Path) -> tuple[bool, int]:
        words = re.findall(r"\w+", path.read_text(encoding="utf-8"))
        return fault.function not in words, -len(names.intersection(words))

    files = sorted((ROOT / "tests").glob("test_*.py"), key=unlikely)
    return [path.relative_to(ROOT).as_posix() for path in files]


def pytest_in(folder: Path, words: list[str], minutes: float) -> tuple[int | None, str, float]:
    """Exit code (None: it took too long), output, seconds."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=200", *words]
    begin, log = time.time(), folder / "faults.log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=stream, stderr=stream, start_new_session=True
        )
        try:
            code = process.wait(minutes * 60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            code = None
    return code, log.read_text(errors="replace"), time.time() - begin


def failed_tests(output: str) -> list[str]:
    return re.findall(r"^(?:FAILED|ERROR) (\S+::\S+(?:\[.*?\])?|\S+)", output, re.MULTILINE)


def selection(args: argparse.Namespace, files: list[str]) -> list[str]:
    return [f"@{args.ids.resolve()}"] if args.ids else ["-m", FAST, *files]


def fail_without_fault(args: argparse.Namespace) -> list[str]:
    with tempfile.TemporaryDirectory() as parent:
        copy_tree(folder := Path(parent) / "tree", None)
        _, output, seconds = pytest_in(folder, ["-n", str(args.jobs), *selection(args, ["tests"])], 10 * args.minutes)
    print(f"without a fault: {output.splitlines()[-1]} ({seconds:.0f} s)", flush=True)
    return failed_tests(output)


def tested(fault: Fault, args: argparse.Namespace, left_out: list[str]) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as parent:
        copy_tree(folder := Path(parent) / "tree", fault)
        words = ["-x", *(f"--deselect={test}" for test in left_out), *selection(args, likely_first(fault))]
        code, output, seconds = pytest_in(folder, words, args.minutes)
    by = "time" if code is None else next(iter(failed_tests(output)), output[-300:]) if code else ""
    return {"killed": code != 0, "by": by, "seconds": round(seconds), "fault": asdict(fault)}


def run(args: argparse.Namespace, faults: list[Fault]) -> None:
    known = json.loads(args.results.read_text()) if args.results.exists() else {}
    if "fail without a fault" not in known:
        known["fail without a fault"] = fail_without_fault(args)
    if args.survivors_of:
        others = json.loads(args.survivors_of.read_text())
        faults = [fault for fault in faults if not others[str(fault)]["killed"]]
    missing = [fault for fault in faults if str(fault) not in known]
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = {pool.submit(tested, fault, args, known["fail without a fault"]): fault for fault in missing}
        for done in as_completed(runs):
            fault, result = runs[done], done.result()
            known[str(fault)] = result
            args.results.write_text(json.dumps(known, indent=1))
            print(
                f"{'killed' if result['killed'] else 'SURVIVES'}, {result['seconds']} s {result['by']}\n{fault}",
                flush=True,
            )
    n_killed = sum(known[str(fault)]["killed"] for fault in faults)
    print(f"{n_killed} of {len(faults)} killed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["list", "run"])
    parser.add_argument("results", nargs="?", type=Path, help="JSON, written after each fault and read at the start")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree tested at once")
    parser.add_argument("--minutes", type=float, default=20, help="the most for one fault")
    parser.add_argument("--ids", type=Path, help="test ids, one a line, in the place of what `make test` selects")
    parser.add_argument("--survivors-of", type=Path, help="only those faults that these results have as survivors")
    args = parser.parse_args()
    faults = choose(args.seed, args.count)
    if args.what == "list":
        print("\n".join(f"{number:2} {fault}" for number, fault in enumerate(faults)))
    elif args.results is None:
        parser.error("run needs a file for its results")
    else:
        run(args, faults)


if __name__ == "__main__":
    main()

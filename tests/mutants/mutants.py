"""Plausible wrong answers: each is the solution with one thing changed, or a function written anew, and the name of the
mistake to be found.

Mutants are data, a file for each exercise (ex00.py, ...), and are never imported by pkv.
"""

import ast
import importlib.util
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Mutant:
    """edits: text of the solution's file, found exactly once in it, or "def NAME" for all of that function's body after
    its docstring -> what stands there instead. diagnosis: the name of the task's Mistake, "shortcut", or None for a
    kind without a name.
    """

    task: str
    name: str
    diagnosis: str | None
    edits: dict[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.task}-{self.name}"

    def source(self) -> tuple[str, str]:
        """The file's name, and its text with the edits made, inside the task's function where it stands there."""
        exercise = self.task.partition("_")[0]
        (file,) = (ROOT / "solutions").glob(f"{exercise}_*.py")
        text = file.read_text(encoding="utf-8")
        for old, new in self.edits.items():
            if old.startswith("def ") and old.removeprefix("def ").isidentifier():
                text = with_body(text, old.removeprefix("def "), new)
                continue
            n = text.count(old)
            assert n == 1, f"{self.id}: {old!r} stands {n} times in {file.name}"
            text = text.replace(old, new)
        compile(text, file.name, "exec")
        return file.name, text


def with_body(text: str, name: str, body: str) -> str:
    """A file's text with another body of a function, below its docstring."""
    node = next(one for one in ast.parse(text).body if isinstance(one, ast.FunctionDef) and one.name == name)
    lines = text.splitlines(keepends=True)
    new = textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")
    return "".join(lines[: node.body[1].lineno - 1]) + new + "\n" + "".join(lines[node.end_lineno :])


def all_mutants() -> list[Mutant]:
    """The mutants of every exercise."""
    found: list[Mutant] = []
    for path in sorted(HERE.glob("ex[0-9][0-9].py")):
        spec = importlib.util.spec_from_file_location(f"mutants_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found += [Mutant(*row) for row in module.MUTANTS]
    return found

"""Plausible wrong answers: each is the solution with one thing changed, and the name of the mistake to be found.

Mutants are data, a file for each exercise (ex00.py, ...), and are never imported by pkv.
"""

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Mutant:
    """edits: text of the solution's file -> what stands there instead, each found exactly once in it (or `within` the
    function named). diagnosis: the name of the task's Mistake, "shortcut", or None for a kind without a name.
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
            n = text.count(old)
            assert n == 1, f"{self.id}: {old!r} stands {n} times in {file.name}"
            text = text.replace(old, new)
        compile(text, file.name, "exec")
        return file.name, text


def all_mutants() -> list[Mutant]:
    """The mutants of every exercise."""
    found: list[Mutant] = []
    for path in sorted(HERE.glob("ex[0-9][0-9].py")):
        spec = importlib.util.spec_from_file_location(f"mutants_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found += [Mutant(*row) for row in module.MUTANTS]
    return found

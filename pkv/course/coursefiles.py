"""The files that the course brings: lessons and solutions, in a clone or in the folder of an installed pkv."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
SOLUTIONS, LESSONS = "ex[0-9][0-9]_*.py", "[0-9][0-9]_*.ipynb"


def material(part: str) -> Path:
    """The folder of what the course brings: "lessons", "solutions", or in a clone "exercises", where learners write."""
    brought = PACKAGE / "course" / "material" / part
    return brought if brought.is_dir() else PACKAGE.parent / part


def file_names() -> dict[str, str]:
    """Every exercise and its file's name: {"ex00": "ex00_paged_kv_cache.py", ...}."""
    return {path.name.partition("_")[0]: path.name for path in sorted(material("solutions").glob(SOLUTIONS))}

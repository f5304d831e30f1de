"""A package that `import pkv` needs is missing: the command says so in one line, where a program gets the exception.

Called by pkv/__init__.py, which runs before any command can. So nothing is imported here that could be missing too.
"""

import sys
from pathlib import Path


def is_command(argv: list[str], words: list[str]) -> bool:
    """Is `pkv` or `python -m pkv` being started? Of sys.argv, and of sys.orig_argv, which names the module.

    >>> is_command(["/home/me/.venv/bin/pkv", "demo"], ["python", "/home/me/.venv/bin/pkv", "demo"])
    True
    >>> is_command(["mine.py"], ["python", "mine.py"])
    False
    """
    if argv[:1] == ["-m"] and "-m" in words:  # so it is called until the module is found
        return words[words.index("-m") + 1].split(".")[0] == "pkv"
    return Path(argv[0]).stem == "pkv" if argv else False


def end_command(error: ModuleNotFoundError) -> None:
    """End the command with exit code 2; return where pkv is imported by a program, for which `error` is right."""
    missing = (error.name or "").split(".")[0]
    if missing in ("", "pkv") or not is_command(sys.argv, sys.orig_argv):
        return
    print(
        f"pkv: error: {sys.executable} has no {missing}, which pkv needs: use a Python that has it (in a clone, "
        f"`make lab` without PY= puts one into .venv), or install it: {sys.executable} -m pip install {missing}",
        file=sys.stderr,
    )
    raise SystemExit(2)

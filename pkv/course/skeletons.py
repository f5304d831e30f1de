"""Exercises made from solutions, so that both have the same names, signatures, statements and specifications.

    python -m pkv.course.skeletons            # write every exercises/*.py anew from solutions/*.py

A function whose docstring begins with a task's id, as in "ex01_4: ...", loses its body. What is given to the learner
stands between the comments `# given` and `# yours`. A plain function then raises NotImplementedError with the task's
id; a kernel cannot raise, so its launcher has the same id and does.
"""

import ast
import re
import sys
from pathlib import Path

from pkv.course.catalogue import find_task
from pkv.course.coursefiles import material

TASK_ID = re.compile(r"(ex\d\d_\d+): ")
GIVEN, YOURS = "# given", "# yours"


def skeleton(source: str) -> str:
    """The exercise of a solution's source."""
    lines = source.splitlines()
    made: list[str] = []
    done = 0
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        found = TASK_ID.match(ast.get_docstring(node) or "")
        if found is None:
            continue
        first = node.body[0]
        assert first.end_lineno is not None
        assert node.end_lineno is not None
        made += lines[done : first.end_lineno]
        made += body_of(found[1], node, lines[first.end_lineno : node.end_lineno])
        done = node.end_lineno
    return "\n".join([*made, *lines[done:]]) + "\n"


def body_of(task_id: str, node: ast.FunctionDef, lines: list[str]) -> list[str]:
    """What stands in place of a task's body."""
    task = find_task(task_id)
    is_kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    says = f"{node.name} is not written yet ({task.about})"
    if task.kernel:
        says = f"write {task.kernel} ({task.about}), then delete this line"
    made = [] if is_kernel else [f'    raise NotImplementedError("{task_id}: {says}")']
    is_given = says_yours = False
    for line in lines:
        if line.strip() in (GIVEN, YOURS):
            is_given = line.strip() == GIVEN
        elif is_given:
            made.append(line)
        elif is_kernel and not says_yours:
            indent = line[: len(line) - len(line.lstrip())] or "    "
            made += [f"{indent}# {task_id}: yours, {task.about}"]
            says_yours = True
    if is_kernel and all(line.strip().startswith("#") or not line.strip() for line in made):
        made.append("    pass")
    return made


def main() -> None:
    """Write every exercise."""
    for path in sorted(material("solutions").glob("ex*.py")):
        target = material("exercises") / path.name
        target.write_text(skeleton(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(Path("exercises") / path.name, file=sys.stderr)


if __name__ == "__main__":
    main()

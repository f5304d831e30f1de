"""What an answer is made of: every name that it uses, read from its source, without running it.

>>> sorted(names_in("import pkv as p\\nrun = p.decode\\ndef answer(q):\\n    return run(q)\\n", "answer"))
['decode', 'p', 'pkv', 'run']
"""

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from typing import Any

from pkv.course.tasks import SHORTCUTS

WORD = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
IMPORTS = (ast.Import, ast.ImportFrom)
# With these a statement of the file can change any of its functions.
FAR_REACHING = {"exec", "eval", "globals", "vars", "locals", "setattr", "modules", "__import__", "__dict__", "__code__"}


def names_used(function: Any, name: str | None = None) -> set[str]:
    """names_in() the source of a function; none where there is no source. name: the one that it is known by.

    What else stands in its cell, such as a check() of it, is not its own.
    """
    while isinstance(function, functools.partial) or hasattr(function, "__wrapped__") or hasattr(function, "fn"):
        function = function.func if isinstance(function, functools.partial) else unwrapped(function)
    try:
        lines, _ = inspect.findsource(function)
        return names_in("".join(lines), name or function.__name__, function.__code__.co_firstlineno)
    except (OSError, TypeError, SyntaxError, AttributeError):
        return set()


def unwrapped(function: Any) -> Any:
    """What a decorator has wrapped: a kernel's function, say."""
    return getattr(function, "fn", None) or function.__wrapped__


def names_in(source: str, name: str, line: int | None = None) -> set[str]:
    """Every name that stands in the definition of `name`, and in those of its file that it uses, and what they import.

    A text that could be a name, as in getattr(pkv, "decode"), counts too, but not a function of the file's own that has
    the name of what no task may use: another `decode`. A copy of the specification counts as its name. line: where the
    function itself begins, of which only that counts which it uses; None: whatever the file does to it counts, too.
    """
    tree = ast.parse(source)
    found = list(statements(tree.body))
    bound: dict[str, list[ast.AST]] = {}  # what gives a name its meaning, or changes it
    defined = {one for statement in found if not isinstance(statement, IMPORTS) for one in defines(statement)}
    for statement in found:
        for one in defines(statement) | (changes(statement) if line is None else set()):
            bound.setdefault(one, []).append(statement)
    if name not in bound:  # made in some other way: all of the file is suspect
        bound[name] = [node for node in ast.walk(tree) if line is not None and line == first_line(node)] or [*found]
    if line is None:
        bound[name] += [
            one for one in found if not isinstance(one, FUNCTIONS) and FAR_REACHING & set().union(*names_of(one))
        ]
    used: set[str] = set()
    todo, done = [name], set[str]()
    while todo:
        word = todo.pop()
        if word in done:
            continue
        done.add(word)
        for part in bound.get(word, ()):
            names, parts = names_of(part)
            todo += names | parts
            used |= parts | (names - (defined & {*SHORTCUTS}))
    if is_copy(bound, name):
        used.add(f"{name}_spec")
    return used - {name}


def first_line(node: ast.AST) -> int | None:
    """Where a function begins, with its decorators; None of anything else."""
    if isinstance(node, (*FUNCTIONS, ast.Lambda)):
        return min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))
    return None


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module that run when it is imported, those inside of if, for, with and try too."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If) and "__main__" in ast.unparse(statement.test):
            continue
        for part in ("body", "orelse", "finalbody", "handlers"):
            if not isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
                for inner in getattr(statement, part, ()):
                    yield from statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def defines(statement: ast.stmt) -> set[str]:
    """The names that a statement gives a meaning to."""
    if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, IMPORTS):
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def changes(statement: ast.stmt) -> set[str]:
    """The names whose value a statement may change: x.y = z, x[y] = z, change(x)."""
    if isinstance(statement, (*FUNCTIONS, ast.ClassDef, *IMPORTS)):
        return set()
    found: set[str] = set()
    for node in ast.walk(statement):
        is_target = isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load)
        if is_target or (isinstance(statement, ast.Expr) and isinstance(node, ast.Call)):
            found |= {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return found


def names_of(statement: ast.AST) -> tuple[set[str], set[str]]:
    """The names that a statement looks up, a function's own left out; and attributes, imports, words in quotes."""
    own = own_names(statement)
    docstrings = {id(node.value) for node in ast.walk(statement) if isinstance(node, ast.Expr)}
    names: set[str] = set()
    parts: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            names |= {node.id} - own
        elif isinstance(node, ast.Attribute):
            parts.add(node.attr)
        elif isinstance(node, IMPORTS):
            parts.update(part for alias in node.names for part in alias.name.split("."))
            parts.update((getattr(node, "module", None) or "").split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            parts.update(node.value.split(".") if WORD.fullmatch(node.value) else ())
    if isinstance(statement, FUNCTIONS):  # what stands in its head is not inside of it
        args = statement.args
        heads = [head for head in (*statement.decorator_list, *args.defaults, *args.kw_defaults) if head]
        names |= {node.id for head in heads for node in ast.walk(head) if isinstance(node, ast.Name)}
    return names, parts - {""}


def own_names(statement: ast.AST) -> set[str]:
    """Parameters and variables of a function."""
    if not isinstance(statement, (*FUNCTIONS, ast.Lambda)):
        return set()
    shared = {
        name for node in ast.walk(statement) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names
    }
    found = {node.arg for node in ast.walk(statement) if isinstance(node, ast.arg)}
    found |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return found - shared


def is_copy(bound: dict[str, list[ast.AST]], name: str) -> bool:
    """Is a function its own specification, word by word, but for the names of its variables?"""
    bodies = [body_of(statement) for one in (name, f"{name}_spec") for statement in bound.get(one, ())]
    return len(bodies) == 2 and bodies[0] is not None and bodies[0] == bodies[1]


def body_of(statement: ast.AST) -> str | None:
    """A function's body without its docstring, with numbers in place of its own names; None of anything else."""
    if not isinstance(statement, FUNCTIONS):
        return None
    body = statement.body[1:] if ast.get_docstring(statement) is not None else statement.body
    own, numbers = own_names(statement), dict[str, str]()

    def numbered(found: re.Match[str]) -> str:
        return f"{found[1]}'{numbers.setdefault(found[2], str(len(numbers))) if found[2] in own else found[2]}'"

    return re.sub(r"(id=|arg=)'(\w+)'", numbered, "".join(map(ast.dump, body)))

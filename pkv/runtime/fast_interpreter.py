"""A faster interpreter: what Triton's does at every operation, this one does once.

When an interpreted kernel calls tl.load, it must reach the interpreter's own load. So a launch first looks through
triton.language, replaces the builtins there, and restores them at its end. Triton (3.6 to 3.8) looks through it again
whenever one jit function calls another, and finds nothing left to replace. That was half of the time of a decode; a
decode without it is twice as fast. And Triton builds a table of numpy's types to look up each one, a tenth of the rest.
"""

from collections.abc import Callable
from typing import Any


class _NothingToRestore:
    """The scope of a call inside a kernel, which has replaced nothing."""

    def restore(self) -> None: ...


def make_faster(interpreter: Any, language: Any) -> None:
    """Make the interpreter look through triton.language once per launch, and look up each of numpy's types once.

    interpreter: the module triton.runtime.interpreter. language: triton.language. A second call changes nothing.
    """
    if not all(hasattr(interpreter, name) for name in ("_LangPatchScope", "_get_np_dtype")):
        return  # a version of Triton that works otherwise
    look_through = interpreter._patch_lang
    if look_through.__module__ == __name__:
        return
    modules = {id(language), id(language.core)}
    ready: set[int] = set()  # the modules that the launch in progress has patched

    def ready_language(function: Any) -> Any:
        seen = modules.intersection(map(id, function.__globals__.values()))
        if seen and seen <= ready:
            return _NothingToRestore()
        scope = look_through(function)
        restore = scope.restore

        def restore_and_forget() -> None:
            ready.clear()
            restore()

        scope.restore = restore_and_forget
        ready.update(seen)
        return scope

    interpreter._patch_lang = ready_language
    interpreter._get_np_dtype = _kept_dtypes(interpreter._get_np_dtype)


def _kept_dtypes(look_up: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that looks up numpy's type of each of Triton's once; a block has that of its elements."""
    known: dict[str, Any] = {}

    def dtype_of(type_of_triton: Any) -> Any:
        scalar = type_of_triton.scalar
        if scalar.name not in known:
            known[scalar.name] = look_up(scalar)
        return known[scalar.name]

    return dtype_of

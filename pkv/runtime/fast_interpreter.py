"""Triton's interpreter, twice as fast: it readies triton.language once a launch, not at every call inside a kernel.

A kernel that calls tl.load means the interpreter's own load, so that a launch first looks through triton.language and
replaces what is a builtin there, and puts everything back at its end. Triton (3.6 to 3.8) does the first half again
whenever one jit function calls another, and finds nothing left to replace: that was half of the time of a decode.
"""

from typing import Any


class _NothingToRestore:
    """What a call inside a kernel has replaced."""

    def restore(self) -> None: ...


def replace_builtins_once_a_launch(interpreter: Any, language: Any) -> None:
    """From now on what a launch has readied is not looked through again until it ends.

    interpreter: the module triton.runtime.interpreter. language: triton.language. Called twice, it does what it did.
    """
    if not hasattr(interpreter, "_LangPatchScope"):  # another Triton, with other ways
        return
    look_through = interpreter._patch_lang
    if look_through.__module__ == __name__:
        return
    modules = {id(language), id(language.core)}
    ready: set[int] = set()  # those of them that the launch in progress has readied

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

"""Memory: a place beside plans and caches for what modules remember about them between calls.

Each module that remembers something has a Memory of its own, under a name. The entry of an object is dropped with the
object, and a copy or a pickle of the object begins without one.
"""

import weakref
from typing import Any


class Memory:
    """A dict for each object, kept as long as the object lives. Objects are compared by identity.

    The dict must not hold the object itself, which would then live for ever.

    >>> class Plan: ...
    >>> uploads, plan = Memory(), Plan()
    >>> uploads.of(plan)["items"] = [1, 2]
    >>> uploads.known(plan)
    {'items': [1, 2]}
    >>> uploads.forget(plan)
    >>> uploads.known(plan)
    {}
    """

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[Any], dict[Any, Any]]] = {}

    def of(self, thing: Any) -> dict[Any, Any]:
        """Return the dict of `thing`, to be changed; make it if there is none."""
        key = id(thing)
        entry = self._of.get(key)
        if entry is None:  # setdefault, because another thread may have been faster
            reference = weakref.ref(thing, lambda _: self._of.pop(key, None))
            entry = self._of.setdefault(key, (reference, {}))
        return entry[1]

    def known(self, thing: Any) -> dict[Any, Any]:
        """Return the dict of `thing`, to be read only; empty if there is none."""
        entry = self._of.get(id(thing))
        return {} if entry is None else entry[1]

    def forget(self, thing: Any) -> None:
        """Drop the dict of `thing`."""
        self._of.pop(id(thing), None)

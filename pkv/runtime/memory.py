"""What is remembered of plans and caches between calls: beside them, not in them.

Each module that remembers something has a Memory of its own, by name. What it holds of an object goes when the object
does, and a copy or a pickle of the object begins without it.
"""

import weakref
from typing import Any


class Memory:
    """Things remembered of objects, as long as these live. An object is told from another by identity.

    What is remembered must not hold the object itself, which would then live for good.

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
        """What is remembered of `thing`, to be added to."""
        key = id(thing)
        entry = self._of.get(key)
        if entry is None:  # setdefault: another thread may have come before
            reference = weakref.ref(thing, lambda _: self._of.pop(key, None))
            entry = self._of.setdefault(key, (reference, {}))
        return entry[1]

    def known(self, thing: Any) -> dict[Any, Any]:
        """What is remembered of `thing`, to be read only."""
        entry = self._of.get(id(thing))
        return {} if entry is None else entry[1]

    def forget(self, thing: Any) -> None:
        """Remember nothing of `thing` any more."""
        self._of.pop(id(thing), None)

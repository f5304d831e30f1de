"""Locks that survive os.fork(): in the child, a lock that a missing thread held is free.

A child of os.fork() has one thread, the one that forked, and a copy of all memory. An ordinary lock that another thread
held would be held in the child for ever. So these locks are renewed there, unless the forking thread itself holds them.
(Torch's own threads are missing in the child too, and torch waits for them: call torch.set_num_threads(1) there.)
"""

import contextlib
import functools
import importlib
import os
import sys
import threading
import weakref
from typing import Any

IMPORT_LATE = ("importlib", "numpy", "pkv", "triton")
_known: "weakref.WeakSet[Lock]" = weakref.WeakSet()
_properties: list[functools.cached_property[Any]] = []


class Lock:
    """A reentrant lock for `with lock:`, one thread at a time. A copy or a pickle of it is a new lock."""

    def __init__(self) -> None:
        self._of_threads = threading.RLock()
        _known.add(self)

    def __enter__(self) -> None:
        self._of_threads.acquire()

    def __exit__(self, *_: object) -> None:
        self._of_threads.release()

    def __reduce__(self) -> tuple[type["Lock"], tuple[()]]:
        return Lock, ()

    def _renew(self) -> None:
        """Free the lock after a fork, unless this thread holds it."""
        if self._of_threads.acquire(blocking=False):
            self._of_threads.release()
        else:
            self._of_threads = threading.RLock()


def renew_properties(of: type) -> type:
    """Decorate a class so that the locks of its cached properties are renewed after a fork.

    Python 3.11 computes a cached_property under a lock, one for all objects of the class.
    """
    _properties.extend(x for x in vars(of).values() if isinstance(x, functools.cached_property) and hasattr(x, "lock"))
    return of


def _renew_all() -> None:
    for lock in list(_known):
        lock._renew()
    for cached in _properties:
        cached.lock = threading.RLock()  # type: ignore[attr-defined]


def _finish_imports() -> None:
    """Before a fork, wait for modules that another thread is importing: in the child their import would never end.

    A first launch imports modules late.
    """
    for name in list(sys.modules):
        if name.partition(".")[0] in IMPORT_LATE:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


if hasattr(os, "register_at_fork"):  # where a process can fork
    os.register_at_fork(before=_finish_imports, after_in_child=_renew_all)

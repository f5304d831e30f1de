"""Locks that a fork of the process does not inherit in the hands of threads that it does not have.

A child of os.fork() has one thread, the one that forked, and a copy of all memory: a lock that another thread held is
held in the child for ever. So each of these is renewed there, unless the thread that forked holds it itself. (Torch's
own threads are not there, either, and it waits for them: call torch.set_num_threads(1) in the child.)
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
    """`with lock:` for one thread at a time, which may enter it again. A copy or a pickle of it is another lock."""

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
        """After a fork: free, unless this thread holds it."""
        if self._of_threads.acquire(blocking=False):
            self._of_threads.release()
        else:
            self._of_threads = threading.RLock()


def renew_properties(of: type) -> type:
    """A class decorator: Python 3.11 computes a cached_property under a lock, one for all objects of the class."""
    _properties.extend(x for x in vars(of).values() if isinstance(x, functools.cached_property) and hasattr(x, "lock"))
    return of


def _renew_all() -> None:
    for lock in list(_known):
        lock._renew()
    for cached in _properties:
        cached.lock = threading.RLock()  # type: ignore[attr-defined]


def _finish_imports() -> None:
    """Wait for modules that another thread is importing, as first launches do: in the child they never come about."""
    for name in list(sys.modules):
        if name.partition(".")[0] in IMPORT_LATE:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


if hasattr(os, "register_at_fork"):  # where a process can fork
    os.register_at_fork(before=_finish_imports, after_in_child=_renew_all)

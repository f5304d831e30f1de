"""Memory for CUDA graphs: this module keeps the tensors that a captured graph reads as long as the graph may replay.

A graph holds addresses, not tensors. A plan that was made on the host has its arrays in GPU memory, and its kernels
read them at each replay too. If they were dropped, torch would reuse that memory, and replays would read other numbers.
So the tensors that a captured launch reads are kept here until the graph is gone. The graph itself says when: CUDA lets
it own a **user object**, and calls that object's destructor once no graph and no executable holds it any more.

The destructor may run on a thread of the driver, which must not enter Python. So the destructor is `sem_post` of the C
library, and the semaphores are polled whenever something else is kept. If the driver has no user objects, what is kept
stays for good.
"""

import ctypes
import functools
import threading
from typing import Any, NamedTuple

import torch

SEMAPHORE_BYTES = 64  # of a sem_t, which takes 32
NO_DESTRUCTOR_SYNC, MOVE = 1, 1  # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, CU_GRAPH_USER_OBJECT_MOVE


class _OfGraph(NamedTuple):
    """The objects that one graph reads, by id; semaphore: address of a sem_t that is posted when the graph is gone."""

    semaphore: int | None
    objects: dict[int, Any]


_kept: dict[int | None, _OfGraph] = {}  # by CUDA's number of the capture; None: graphs that cannot say they are gone
_lock = threading.Lock()


def is_capturing(device: torch.device) -> bool:
    """True while a CUDA graph is captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def keep_for_replays(what: Any, device: torch.device) -> None:
    """Keep `what` as long as the graph that is now captured on `device`'s current stream may replay."""
    with _lock:
        forget_graphs_that_are_gone()
        capture, graph = _capture_on(torch.cuda.current_stream(device).cuda_stream)
        if capture not in _kept:
            semaphore = None if graph is None else _owned_by(graph)
            capture = None if semaphore is None else capture
            _kept.setdefault(capture, _OfGraph(semaphore, {}))
        _kept[capture].objects[id(what)] = what


def forget_graphs_that_are_gone() -> None:
    """Release the objects of graphs that have been destroyed."""
    for capture, (semaphore, _) in list(_kept.items()):
        if semaphore is not None and _libc().sem_trywait(semaphore) == 0:
            del _kept[capture]
            _libc().free(semaphore)


def _capture_on(stream: int) -> tuple[int | None, int | None]:
    """Return (number of the capture under way on a stream, its graph); (None, None) if the driver does not tell."""
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    driver = _driver()
    for name, n_more in (("cuStreamGetCaptureInfo_v2", 2), ("cuStreamGetCaptureInfo_v3", 3)):
        if ask := getattr(driver, name, None):
            found = ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph)
            if ask(ctypes.c_void_p(stream), *found, *[None] * n_more) == 0 and graph.value:
                return number.value, graph.value
    return None, None


def _owned_by(graph: int) -> int | None:
    """Make a semaphore that is posted once `graph` and everything made from it is destroyed; None if that fails."""
    libc, driver, user_object = _libc(), _driver(), ctypes.c_void_p()
    semaphore: int = libc.calloc(1, SEMAPHORE_BYTES)  # not Python's: a graph may outlive it
    libc.sem_init(semaphore, 0, 0)
    post = ctypes.cast(libc.sem_post, ctypes.c_void_p)
    made = driver.cuUserObjectCreate(ctypes.byref(user_object), ctypes.c_void_p(semaphore), post, 1, NO_DESTRUCTOR_SYNC)
    if made != 0 or driver.cuGraphRetainUserObject(ctypes.c_void_p(graph), user_object, 1, MOVE) != 0:
        return None
    return semaphore


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.calloc.argtypes, libc.calloc.restype = [ctypes.c_size_t, ctypes.c_size_t], ctypes.c_void_p
    libc.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
    for name in ("sem_trywait", "free"):
        getattr(libc, name).argtypes = [ctypes.c_void_p]
    return libc


@functools.cache
def _driver() -> Any:
    """Load CUDA's driver; None if there is none, as with ROCm, or if it is too old for user objects."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if hasattr(driver, "cuUserObjectCreate") and hasattr(driver, "cuGraphRetainUserObject") else None

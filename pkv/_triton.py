"""Triton, or a stand-in that fails only when a kernel is launched.

Every kernel file starts with `from pkv._triton import tl, triton`. So `import pkv`, planning and drawing work without
Triton, and a stage keeps its plan and its kernel in one file.

Triton decides at import time whether to compile kernels for a GPU or to interpret them on the CPU. This module decides
before it does: without a visible GPU it chooses the interpreter. It honours a `TRITON_INTERPRET` that the user has set.
If it sets the variable itself, it removes it once Triton has read it, so that a child process chooses for itself.
"""

import os
import sys
from typing import Any

import torch

from pkv.runtime.fast_interpreter import make_faster

__all__ = [
    "GPU_VISIBLE",
    "INTERPRETED",
    "MISSING",
    "Signature",
    "launch_kernel",
    "require_launchable",
    "tl",
    "triton",
    "why_not_launchable",
]

_IMPORTED_BEFORE = "triton" in sys.modules
_VARIABLE = "TRITON_INTERPRET"
_SET_BY_USER = os.environ.get(_VARIABLE)
GPU_VISIBLE = torch.cuda.is_available()

if not GPU_VISIBLE and _SET_BY_USER is None and not _IMPORTED_BEFORE:
    os.environ[_VARIABLE] = "1"

MISSING: str | None = None
try:
    import triton
    import triton.language as tl
except Exception as error:  # a broken install raises more than ImportError
    MISSING = f"{type(error).__name__}: {error}"

    class _StandIn:
        """Accepts every decorator and attribute, and fails when a kernel is launched."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _StandIn()

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return _StandIn()

        def __getitem__(self, grid: Any) -> Any:
            raise RuntimeError(why_not_launchable(torch.device("cuda")))

    triton = tl = _StandIn()


def _interpreted() -> bool:
    if MISSING:
        return False
    # How Triton's own library (tl.sum, tl.max, ...) was decorated decides, not the variable's present value.
    return type(tl.sum).__name__ == "InterpretedFunction"


INTERPRETED = _interpreted()
if INTERPRETED:
    make_faster(sys.modules[type(tl.sum).__module__], tl)
    triton.knobs.runtime.interpret = True  # later kernels are interpreted too; this line also sets the variable
if _SET_BY_USER is None:
    os.environ.pop(_VARIABLE, None)
else:
    os.environ[_VARIABLE] = _SET_BY_USER


class Signature(tuple[Any, ...]):
    """What Triton's choice of a compiled kernel depends on, see launch_kernel. Its hash is computed once."""

    def __new__(cls, entries: tuple[Any, ...]) -> "Signature":
        made = super().__new__(cls, entries)
        made._hash, made._longer = tuple.__hash__(made), {}
        return made

    _hash: int
    _longer: "dict[Any, Signature]"

    def __hash__(self) -> int:
        return self._hash

    def plus(self, entry: Any) -> "Signature":
        """Return the signature with one more entry, the same object each time."""
        found = self._longer.get(entry)
        return self._longer.setdefault(entry, Signature((*self, entry))) if found is None else found


MOST_COMPILED = 4096
MOST_PARTS = 16  # users' functions; a learner's file makes a new one each time it is read
_compiled: dict[Any, Any] = {}  # (id of a kernel, signature, constants) -> what Triton compiled, and the kernel


def launch_kernel(
    kernel: Any, n_programs: int, args: tuple[Any, ...], constants: tuple[Any, ...], signature: Any, **options: Any
) -> None:
    """Launch kernel[(n_programs,)](*args, *constants, **options) on the current device.

    At every launch Triton works out, argument by argument, which compiled kernel fits: some 20 us of the host's time.
    Its choice depends on `signature` alone (see KernelArgs): the device first, then a user's function among the
    arguments, or None, then the rest. So Triton is asked once per signature. Later launches take the compiled kernel
    directly, without profilers' hooks. With signature None Triton is asked each time. options must follow from the
    other arguments.
    """
    if INTERPRETED or signature is None:
        kernel[(n_programs,)](*args, *constants, **options)
        return
    key = id(kernel), signature, constants  # a kernel's own hash takes a lock
    known = _compiled.get(key)
    if known is None:
        compiled = kernel[(n_programs,)](*args, *constants, **options)
        if len(_compiled) >= MOST_COMPILED:  # as when strides differ at every step
            _compiled.clear()
        forget_parts_beyond(signature[1])
        _compiled[key] = compiled.run, compiled.function, compiled.packed_metadata, kernel
    else:
        run, function, metadata, _ = known
        stream = triton.runtime.driver.active.get_current_stream(signature[0])
        run(n_programs, 1, 1, stream, function, metadata, None, None, None, *args, *constants)


def forget_parts_beyond(part: Any) -> None:
    """Make room for `part`, a user's function or None: only the last MOST_PARTS of these are remembered.

    Functions are compared by identity, and each lives as long as it is remembered. So two versions of one file are
    never confused, however alike their names.
    """
    if part is None:
        return
    keys = list(_compiled)  # a copy, because other threads launch too
    others = [one for one in dict.fromkeys(signature[1] for _, signature, _ in keys) if one not in (None, part)]
    if len(others) >= MOST_PARTS:
        for key in keys:
            if key[1][1] is others[0]:
                _compiled.pop(key, None)


def why_not_launchable(device: torch.device) -> str | None:
    """Say why a kernel cannot run on tensors of `device`, and the remedy; None if it can."""
    if MISSING:
        return (
            f"pkv's kernels need Triton, and importing it failed ({MISSING}). Install it with `pip install triton` "
            "(Linux; on Windows use WSL2, on macOS a container). stage='reference' runs without it."
        )
    if INTERPRETED and not triton.knobs.runtime.interpret:
        return (
            "triton.knobs.runtime.interpret was changed after pkv was imported, and Triton cannot leave its "
            "interpreter any more: set it back to True, or restart the kernel with TRITON_INTERPRET=0."
        )
    if device.type == "cuda" or INTERPRETED:
        return None
    if GPU_VISIBLE:
        return (
            f"the tensors lie on '{device}', but kernels are compiled for the GPU here. Move q and the cache to the "
            "GPU, use stage='reference', or set TRITON_INTERPRET=1 before Triton is imported to interpret kernels."
        )
    if _IMPORTED_BEFORE:
        return (
            "there is no GPU, and Triton was imported before pkv, so it cannot switch to its interpreter any more: "
            "restart the kernel and import pkv first (or set TRITON_INTERPRET=1 before triton is imported)."
        )
    return (
        f"there is no GPU, and TRITON_INTERPRET was set to {_SET_BY_USER!r} when pkv was imported, which switches the "
        "interpreter off: unset it (or set it to 1), then restart the kernel and import pkv first."
    )


def require_launchable(device: torch.device) -> None:
    """Raise an error with the remedy if a kernel cannot run on tensors of `device`."""
    reason = why_not_launchable(device)
    if reason is not None:
        raise (TypeError if GPU_VISIBLE and not MISSING else RuntimeError)(reason)

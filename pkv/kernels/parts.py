"""Parts: your own tile loop, merge or schedule, which replaces pkv's in any stage that has such a part.

    parts = pkv.Parts(attend_tokens=mine)        # a @triton.jit function
    pkv.decode(q, cache, stage="split_kv", parts=parts)

Three functions can be replaced; `Parts` states the contract of each. Everything else stays: the page table, the grid,
the launches, the checks. So you can write one part, compare it with pkv's and time it by itself.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch

from pkv._triton import INTERPRETED, MISSING
from pkv.kernels.tile import attend_tokens
from pkv.plans.features import PLAIN, Features
from pkv.plans.shape import Shape

Takes = Mapping[str, tuple[str, ...]]  # {stage: names of the parts that it takes}
Merge = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
Cut = Callable[[list[int], Shape], Any]
ATTEND_PARAMETERS = ("query", "cache", "row", "grid_head", "begin", "end", "qk_scale", "SHAPE")
MERGE_PARAMETERS = ("partial_out", "partial_lse", "offsets", "out", "lse")
PLAN_PARAMETERS = ("lengths", "shape")
MUST = {
    "attend_tokens": "help(pkv.Parts); it returns out [BLOCK_D, BLOCK_H] and lse [BLOCK_H]",
    "merge": "help(pkv.Parts); it writes out and lse in place",
    "plan": "help(pkv.Parts); it returns items (row, begin, end)",
}


@dataclass(frozen=True)
class Parts:
    """Your functions in place of pkv's; None keeps pkv's. TypeError for a function of the wrong kind.

    attend_tokens(query, cache, row, grid_head, begin, end, qk_scale, SHAPE: tl.constexpr) -> (out, lse)
        A @triton.jit function of these eight parameters: the tile loop of one program, which replaces
        `pkv.tile.attend_tokens`. It returns the state of the tokens [begin, end) of `row` for the program's query
        heads: out [BLOCK_D, BLOCK_H], their softmax-weighted mean of V, and lse [BLOCK_H], the natural log of the sum
        of exp(score); both fp32. No tokens (begin >= end, which happens) give (0, -inf).

        query [BLOCK_D, BLOCK_H]: the program's query heads, zero where padded. begin is a multiple of BLOCK_N, and end
        is at most the row's length. qk_scale = scale * log2(e), so that exp2(qk_scale * q . k) = exp(scale * q . k).
        The KV head is grid_head // SHAPE.HEAD_BLOCKS. SHAPE is a `pkv.tile.KernelShape`: BLOCK_D, BLOCK_H, BLOCK_N
        (tokens per tile), HEAD_DIM, PAGE_SIZE and others. Name a size before it goes into a list, as in
        `BLOCK_D: tl.constexpr = SHAPE.BLOCK_D`: the interpreter takes tl.zeros([SHAPE.BLOCK_D]), the compiler does not.
        cache.k and cache.v are pointers with strides (page, token, head, dim): `cache.k.ptr`, `cache.k.strides`.
        cache.table (strides: row, column) holds the page ids of the row, int32; entries past its last page may hold
        anything. Slots past the row's length may hold anything too, even NaN. A page id times a stride may exceed 32
        bits: widen it first. Under Triton's interpreter (SHAPE.INTERPRETED) query is fp32; convert bfloat16 values to
        fp32 right after you load them. You may call find_pages, load_tile and attend_tile of `pkv.tile`.
        Stages: split_kv, length_buckets, row_local, workqueue, stream_k.

    merge(partial_out, partial_lse, offsets, out, lse) -> None
        A plain Python function that launches kernels or uses torch. It is called once per layer, after all states are
        there, unless every row has exactly one state.
        partial_out fp32 [n_partials, n_q_heads, head_dim], partial_lse fp32 [n_partials, n_q_heads] (natural log): the
        states. offsets int32 [n_rows + 1]: row r has the states offsets[r] : offsets[r + 1]. A state of no tokens has
        lse -inf, and its out may hold anything, even NaN: do not read it.
        It writes out [n_rows, n_q_heads, head_dim] and lse fp32 [n_rows, n_q_heads] in place, for each row that has no
        state or several. A row with no state, or with empty states only, gets out 0 and lse -inf. Leave a row with
        exactly one state alone: its decode program writes the result, and the partials hold nothing of it. out has q's
        dtype (in Triton's interpreter fp32 instead of bfloat16) and may have any strides. All tensors lie on q's
        device. In the interpreter, memory that may hold anything holds NaN, so that a row you leave out shows.
        Stages: split_kv, length_buckets, row_local, workqueue.

    plan(lengths, shape) -> items, or a Plan
        A plain Python function of the lengths (list of int, tokens per row) and a `pkv.Shape`. It returns any iterable
        of items (row, begin, end): token ranges that together hold every token of every row exactly once, ordered by
        row and by token. Each begins at a multiple of the tile, which is 16 tokens, or the option tile= of decode() and
        plan(). Items without tokens (begin == end) are allowed, and a row without tokens may have no item. The queue's
        kernel runs the items, one program per item and KV head, in the order listed, or by the option ordering=. The
        function may return a `pkv.Plan` for these lengths instead of items, with its own tile and order. Any fault is a
        ValueError that names `parts.plan`, row and token, before any launch.
        Stage: workqueue.

    Arguments are passed by position, so merge and plan may name their parameters as they like.

    >>> halves = Parts(plan=lambda lengths, shape: [(0, 0, 16), (0, 16, lengths[0])])
    >>> halves.given
    ('plan',)
    """

    attend_tokens: Any = None
    merge: Merge | None = None
    plan: Cut | None = None

    def __post_init__(self) -> None:
        if self.attend_tokens is not None:
            check_jit_function(self.attend_tokens)
        for name, parameters in (("merge", MERGE_PARAMETERS), ("plan", PLAN_PARAMETERS)):
            if getattr(self, name) is not None:
                check_python_function(name, getattr(self, name), parameters)

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the parts that are given."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) is not None)

    def passed_to(self, launch: Callable[..., None]) -> Callable[..., None]:
        """Return a stage's launch() with these parts."""

        def launch_with_parts(*args: Any, **values: Any) -> None:
            with self.blamed("attend_tokens", "merge"):
                launch(*args, parts=self, **values)

        return launch_with_parts

    @contextmanager
    def blamed(self, *running: str) -> Iterator[None]:
        """Add a note to any exception raised inside: which of the running parts raised it, or which were running."""
        try:
            yield
        except Exception as error:
            here = {name: getattr(self, name) for name in running if name in self.given}
            guilty = [name for name, part in here.items() if passes_through(error, code_of(part))]
            for name in guilty or here:
                said = "Raised in parts." if guilty else "Running instead of pkv's own function: parts."
                error.add_note(f"{said}{name}, {place_of(here[name])}: see {MUST[name]}.")
            raise


def check_jit_function(function: Any) -> None:
    """Raise TypeError unless it is a @triton.jit function of ATTEND_PARAMETERS, compiled or interpreted like pkv's."""
    if MISSING:
        return  # nothing can be launched, and the launch will say so
    wanted = f"({', '.join(ATTEND_PARAMETERS)}: tl.constexpr)"
    if not isinstance(function, type(attend_tokens)):
        kind = type(function).__name__
        if kind in ("JITFunction", "InterpretedFunction"):
            way = "in Triton's interpreter" if INTERPRETED else "compiled"
            raise TypeError(
                f"parts.attend_tokens is a {kind}, but pkv's kernels are {way} here: TRITON_INTERPRET was changed "
                "between two imports; start Python anew, and import pkv before your part"
            )
        raise TypeError(
            f"parts.attend_tokens must be a Triton function {wanted}, got {kind}: decorate it with @triton.jit alone"
        )
    parameters = inspect.signature(function.fn).parameters
    if tuple(parameters) != ATTEND_PARAMETERS:
        raise TypeError(f"parts.attend_tokens takes ({', '.join(parameters)}); it must take exactly {wanted}")
    if "constexpr" not in str(parameters["SHAPE"].annotation):
        raise TypeError("parts.attend_tokens: SHAPE must be annotated, as SHAPE: tl.constexpr")


def check_python_function(name: str, function: Any, parameters: tuple[str, ...]) -> None:
    """Raise TypeError unless the function can be called with these parameters, by position."""
    wanted = f"({', '.join(parameters)})"
    if not MISSING and isinstance(function, type(attend_tokens)):
        raise TypeError(f"parts.{name} is a @triton.jit function: pass a Python function {wanted} that launches it")
    if not callable(function):
        raise TypeError(f"parts.{name} must be a Python function {wanted}, got {type(function).__name__}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some built-in functions have no signature
    try:
        signature.bind(*parameters)
    except TypeError:
        raise TypeError(f"parts.{name} takes {signature}; it is called with {wanted}, by position") from None


NO_PARTS = {
    "reference": "it is PyTorch's, the specification",
    "adaptive": "it chooses by the times of pkv's own parts, and may choose FlashInfer",
    "flashinfer": "its kernels are FlashInfer's",
}


def first_stage_taking(parts: Parts, stages: Iterable[str], takes: Takes) -> str:
    """Return the first of these stages that takes all the parts."""
    return next(stage for stage in stages if set(names_given(parts)) <= set(takes[stage]))


def checked_parts(parts: Parts | None, stage: str, takes: Takes, features: Features = PLAIN) -> Parts | None:
    """Return the parts, or None if none is given; ValueError if the stage, or a feature, does not take one of them."""
    names = () if parts is None else names_given(parts)
    for name in names:
        if name in takes.get(stage, names):
            continue
        able = ", ".join(other for other, names in takes.items() if name in names)
        ways = {"merge": "it merges its states by the cuts between runs", "plan": "its kernel finds its items itself"}
        why = NO_PARTS.get(stage) or ways[name]
        raise ValueError(f"stage {stage!r} does not take parts.{name} ({why}); pass stage= one of {able}")
    if features != PLAIN and "attend_tokens" in names:
        raise ValueError(
            f"parts.attend_tokens computes plain attention, without {' and '.join(features.to_dict())}: leave out the "
            "part, or the feature"
        )
    return parts if names else None


def names_given(parts: Parts) -> tuple[str, ...]:
    """Return the names of the given parts; TypeError unless `parts` is a pkv.Parts."""
    if not isinstance(parts, Parts):
        raise TypeError(
            f"parts must be a pkv.Parts, got {type(parts).__name__}: pkv.Parts(attend_tokens=...) makes one"
        )
    return parts.given


def code_of(function: Any) -> Any:
    """Return the code object of a Python or Triton function; None if it has none."""
    return getattr(getattr(function, "fn", function), "__code__", None)


def place_of(function: Any) -> str:
    """Return a function's name, file and line, for people."""
    code = code_of(function)
    return repr(function) if code is None else f"`{code.co_name}` ({code.co_filename}:{code.co_firstlineno})"


def passes_through(error: BaseException | None, code: Any) -> bool:
    """True if an error, or one that caused it, was raised while `code` ran.

    Code is compared by name and file, because the interpreter runs a copy.
    """
    while error is not None and code is not None:
        trace = error.__traceback__
        while trace is not None:
            running = trace.tb_frame.f_code
            if (running.co_name, running.co_filename) == (code.co_name, code.co_filename):
                return True
            trace = trace.tb_next
        error = error.__cause__ or error.__context__
    return False

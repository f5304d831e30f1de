"""How task 3 of exercise 02 is judged: the partial state of a range of tokens."""

import random
from typing import Any

import torch

from pkv.course.graders.asking import asked, dtype_mistake
from pkv.course.graders.batches import attend, fails_for_lack, heads_say
from pkv.course.tasks import Case, Mistake, Property, Spec, Task, Unfit

State = tuple[torch.Tensor, torch.Tensor]
ROUNDED_APART = 0.03  # of the largest number: what fp16 may be off by


def state_of_range(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, begin: int, end: int, scale: float, **mistakes: Any
) -> State:
    """The attention of exercise 00 over these tokens, in fp64, then fp32."""
    out, lse = attend(q.float(), k[begin:end].float(), v[begin:end].float(), scale, **mistakes)
    return out, lse


def moved(begin: int, end: int) -> Any:
    """The state of other tokens: the range's begin and end are so many further."""
    return lambda q, k, v, a, b, scale: state_of_range(q, k, v, max(a + begin, 0), b + end, scale)


def range_specs(rng: random.Random, ranges: list[tuple[int, int, int]], **more: Any) -> list[Spec]:
    """(length, begin, end) each; more: size (how large scores get), dtype, outside (what the other slots hold)."""
    return [
        {"length": length, "begin": begin, "end": end, "n_kv_heads": rng.choice([2, 3]), "group": rng.choice([2, 4]),
         "head_dim": 8, **more, "seed": rng.randrange(1000)}
        for length, begin, end in ranges
    ]  # fmt: skip


def drawn(rng: random.Random, n: int) -> list[tuple[int, int, int]]:
    """Ranges somewhere in rows of 6 to 40 tokens."""
    found = []
    for _ in range(n):
        length = rng.randrange(6, 40)
        begin = rng.randrange(1, length - 3)
        found.append((length, begin, rng.randrange(begin + 2, length)))
    return found


def range_arguments(spec: Spec) -> tuple[Any, ...]:
    """q, k, v of one row, a range, and a scale that is not the usual one."""
    length, begin, end = spec["length"], spec["begin"], spec["end"]
    n_kv_heads, d = spec["n_kv_heads"], spec["head_dim"]
    if min(n_kv_heads, spec["group"], d) < 1 or begin > end or (begin < end and end > length):
        raise Unfit
    generator = torch.Generator().manual_seed(spec["seed"])
    q = torch.randn(n_kv_heads * spec["group"], d, generator=generator) * spec.get("size", 1.0)
    k, v = torch.randn(2, length, n_kv_heads, d, generator=generator)
    if spec.get("below"):  # every score
        q, k = -q.abs() - 1, k.abs() + 1
    v += torch.arange(length)[:, None, None] / 4 + torch.arange(n_kv_heads)[:, None]
    if spec.get("outside") == "NaN":
        is_outside = torch.ones(length, dtype=torch.bool)
        is_outside[begin:end] = False
        k[is_outside] = v[is_outside] = torch.nan
    dtype = getattr(torch, spec.get("dtype", "float32"))
    return q.to(dtype), k.to(dtype), v.to(dtype), begin, end, 0.3


def parts_of(got: Any) -> list[torch.Tensor]:
    """The tensors of an answer."""
    return [part for part in got if isinstance(part, torch.Tensor)] if isinstance(got, list) else []


def has_nan(got: Any) -> bool:
    """Is something in it not a number?"""
    return any(bool(part.isnan().any()) for part in parts_of(got))


def reads_outside(case: Case, got: Any) -> bool:
    """Not a number, where slots outside a range of some tokens are none."""
    return case.spec.get("outside") == "NaN" and case.spec["begin"] < case.spec["end"] and has_nan(got)


def overflows(case: Case, got: Any) -> bool:
    """Not a number, or infinite, where scores are large."""
    return case.spec.get("size", 1.0) > 1 and not all(part.isfinite().all() for part in parts_of(got))


def is_rounded(case: Case, got: Any) -> bool:
    """Right but for a rounding of fp16."""
    if "dtype" not in case.spec or len(parts_of(got)) != 2:
        return False
    return all(
        mine.shape == yours.shape
        and bool((mine - yours).abs().max() <= ROUNDED_APART * mine.abs().max().clamp(min=1.0))
        for mine, yours in zip(case.right, got, strict=True)
    )


def is_state(case: Case, got: Any) -> bool:
    """Is it a state of the right shapes, or an exception of who takes the largest of none?"""
    return fails_for_lack(got) or [part.shape for part in parts_of(got)] == [part.shape for part in case.right]


EX02_3 = Task(
    id="ex02_3",
    title="the state of a range of tokens",
    function="state_of_range",
    lines=9,
    points=2,
    arguments=range_arguments,
    right=state_of_range,
    call=asked(lambda q, k, v, begin, end, scale: None if begin < end else torch.float32),
    axes=("query head", "dim"),
    tolerance=1e-4,
    fixed=("head_dim", "size", "below", "dtype", "outside"),
    shortcuts=("pkv",),
    properties=(
        Property(
            "the tokens of the range, and no others",
            lambda rng: range_specs(rng, [(3, 0, 1), (6, 2, 6), (8, 3, 5), (5, 0, 5), *drawn(rng, 3)]),
        ),
        Property(
            "slots outside the range may hold NaN",
            lambda rng: range_specs(rng, [(4, 1, 3), *drawn(rng, 2)], outside="NaN"),
        ),
        Property(
            "scores of a few hundred, or all far below 0",
            lambda rng: range_specs(rng, [(6, 2, 6), *drawn(rng, 1)], size=300.0)
            + range_specs(rng, [(5, 1, 4), *drawn(rng, 1)], size=300.0, below=True),
        ),
        Property(
            "fp16 in, fp32 out",
            lambda rng: range_specs(rng, [(6, 1, 5), *drawn(rng, 2)], dtype="float16"),
        ),
        Property(
            "an empty range gives the neutral state",
            lambda rng: range_specs(rng, [(4, 2, 2), (33, 48, 48), (0, 0, 0)], outside="NaN")
            + range_specs(rng, [(4, 2, 2), (0, 0, 0)], dtype="float16"),
        ),
    ),
    mistakes=(
        dtype_mistake("an empty range gives another dtype: a state is fp32, whatever q, k and v are"),
        Mistake("outside", "reads slots outside the range, and 0 * NaN is NaN: take k[begin:end], v[begin:end] first",
                shows=reads_outside),
        Mistake("head_map", heads_say, lambda *a: state_of_range(*a, head_map="modulo")),
        Mistake("whole_row", "attends to the whole row, whatever the range",
                lambda q, k, v, begin, end, scale: state_of_range(q, k, v, 0, len(k), scale)),
        Mistake("from_the_start", "begins at token 0, whatever `begin` is",
                lambda q, k, v, begin, end, scale: state_of_range(q, k, v, 0, end, scale)),
        Mistake("to_the_end", "goes on to the row's last token, whatever `end` is",
                lambda q, k, v, begin, end, scale: state_of_range(q, k, v, begin, len(k), scale)),
        Mistake("end_is_count", "takes `end` for a number of tokens: the range is begin:end",
                lambda q, k, v, begin, end, scale: state_of_range(q, k, v, begin, begin + end, scale)),
        Mistake("end_included", "reads token `end`: the range is half-open",
                lambda q, k, v, begin, end, scale: state_of_range(q, k, v, begin, end + 1, scale)),
        Mistake("last_left_out", "leaves out the range's last token", moved(0, -1)),
        Mistake("first_left_out", "leaves out the range's first token", moved(1, 0)),
        Mistake("no_scale", "does not multiply scores by scale",
                lambda q, k, v, begin, end, scale: state_of_range(q, k, v, begin, end, 1.0)),
        Mistake("own_scale", "scales by 1 / sqrt(head_dim), not by the scale given",
                lambda q, k, v, begin, end, scale: state_of_range(q, k, v, begin, end, q.shape[1] ** -0.5)),
        Mistake("lse_without_max", "lse lacks the largest score that was subtracted",
                lambda *a: state_of_range(*a, lse_of="sums")),
        Mistake("lse_base_2", "lse is in base 2: it is the natural logarithm",
                lambda *a: state_of_range(*a, lse_of="log2")),
        Mistake("lse_mixed", "lse mixes bases: the largest score is natural, log2 of the sum is not",
                lambda *a: state_of_range(*a, lse_of="mixed")),
        Mistake("lse_is_sum", "gives the sum of exp, not its logarithm", lambda *a: state_of_range(*a, lse_of="exp")),
        Mistake("not_divided", "does not divide by the sum of the weights: a state's out is a mean",
                lambda *a: state_of_range(*a, divided=False)),
        Mistake("max_from_0", "subtracts 0 where all scores are below 0: exp of what is left is then 0",
                shows=lambda case, got: case.spec.get("below", False) and is_state(case, got)),
        Mistake("no_max", "exp of a large score is infinite: subtract each head's own largest score first",
                shows=overflows),
        Mistake("half", "computes in fp16: make q, k and v fp32 first", shows=is_rounded),
        Mistake("not_neutral", "an empty range must change no merge: out 0, lse -inf",
                shows=lambda case, got: case.spec["begin"] == case.spec["end"] and is_state(case, got)),
    ),
)  # fmt: skip

"""How the fourth task of exercise 01 is judged: the tile loop, which runs as a part of the library."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch

from pkv.cache.paged import PagedKVCache
from pkv.course.comparing import agree, plain
from pkv.course.graders.ex01_loop import grid_heads_of, loop_batch, tile_loop, whole_rows
from pkv.course.graders.ex01_states import INTERPRETER_AND, LARGE, LN_2, merge_states
from pkv.course.tasks import Case, Mistake, Property, Raised, Spec, Task
from pkv.decoding import decode
from pkv.kernels import tile as library
from pkv.kernels.parts import Parts

TOLERANCE = 1e-3  # weights and out in fp16 are off by 2 ** -11 each


def merge_on_host(
    partial_out: torch.Tensor, partial_lse: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """The contract of pkv.Parts.merge, in PyTorch."""
    for row, (first, last) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:])):
        if last - first != 1:
            out[row], lse[row] = merge_states(partial_out[first:last], partial_lse[first:last])


def decode_with(
    function: Callable[[], Any], q: torch.Tensor, cache: PagedKVCache, splits: int, tile: int, scale: float
) -> list[torch.Tensor]:
    """out and lse of a decode whose programs run the learner's tile loop; states are merged in PyTorch."""
    parts = function()
    if not isinstance(parts, Parts) or parts.attend_tokens is None:
        raise TypeError("own_loop must return pkv.Parts(attend_tokens=attend_split)")
    if parts.attend_tokens is library.attend_tokens:
        raise TypeError("own_loop returns the library's tile loop, not yours")
    parts = dataclasses.replace(parts, merge=merge_on_host, plan=None)
    return list(
        decode(
            q, cache, stage="split_kv", splits=splits, tile=tile, scale=scale, return_lse=True, parts=parts
        )
    )  # fmt: skip


def decode_as_models_do(
    function: Callable[[], Any], q: torch.Tensor, cache: PagedKVCache, splits: int, tile: int, scale: float
) -> list[torch.Tensor]:
    """The same with the library's merge: nothing waits for the GPU, so what the GPU takes can be timed."""
    parts = Parts(attend_tokens=function().attend_tokens)
    return list(
        decode(q, cache, stage="split_kv", splits=splits, tile=tile, scale=scale, return_lse=True, parts=parts)
    )  # fmt: skip


def loop_specs(rng: random.Random, *cases: dict[str, Any]) -> list[Spec]:
    """Specs of small batches; cases: what differs from the usual one."""
    usual = {
        "splits": 1, "page_size": 4, "n_kv_heads": 2, "group": 2, "head_dim": 16, "dtype": "float16", "size": 3,
        "values": 1, "tile": 16, "scores": "any",
    }  # fmt: skip
    return [{"lengths": [], **usual, **case, "seed": rng.randrange(1000)} for case in cases]


def rows_off(case: Case, got: Any) -> torch.Tensor | None:
    """Which rows [n_rows] are wrong; None where the answer is no state of the right shape."""
    right = plain(list(case.right))
    if not isinstance(got, list) or len(got) != 2 or not all(isinstance(part, torch.Tensor) for part in got):
        return None
    if any(mine.shape != yours.shape for mine, yours in zip(right, got)):
        return None
    off = [~torch.isclose(mine.double(), yours.double(), 5e-3, 5e-3) for mine, yours in zip(right, got)]
    return (off[0].any(-1) | off[1]).flatten(1).any(1)


def nan_in_rows(case: Case, got: Any, rows: list[bool]) -> bool:
    """Are those rows, and no others, wrong, because they hold what is no number?"""
    off = rows_off(case, got)
    if off is None or not off.any():
        return False
    return not got[0][off].isfinite().all() and bool((torch.tensor(rows) | ~off).all())


def has_tail(case: Case, got: Any) -> bool:
    """NaN in rows whose last tile is part-filled."""
    return nan_in_rows(case, got, [length % case.spec["tile"] > 0 for length in case.spec["lengths"]])


def has_empty(case: Case, got: Any) -> bool:
    """Wrong in rows of no tokens, or of which a split has none."""
    off, lengths = rows_off(case, got), case.spec["lengths"]
    begin = -(-max(lengths) // case.spec["tile"]) * (case.spec["splits"] - 1) // case.spec["splits"] * case.spec["tile"]
    empty = torch.tensor([length <= begin for length in lengths])
    return off is not None and bool(off.any()) and bool((empty | ~off).all())


def overflows(case: Case, got: Any) -> bool:
    """Infinite, or no number, where scores are large."""
    if case.spec["size"] < LARGE or rows_off(case, got) is None:
        return False
    return not (got[0].isfinite().all() and got[1].isfinite().all())


def sums_in_fp16(case: Case, got: Any) -> bool:
    """Infinite, or no number, where values are large; elsewhere off by little."""
    off = rows_off(case, got)
    return off is not None and (not off.any() or (case.spec["values"] > 1 and not got[0].isfinite().all()))


def takes_exp(case: Case, got: Any) -> bool:
    """out is so, whatever the lse."""
    wrong = tile_loop(*case.arguments, factor=1 / LN_2)[0]
    return agree(wrong, got[0], 4 * TOLERANCE) and not agree(case.right[0], got[0], TOLERANCE)


def returns_nothing(case: Case, got: Any) -> bool:
    """What the calling kernel says of it: no line of the answer's own is to blame."""
    return isinstance(got, Raised) and "NoneType" in got.text and got.line is None


def ignores_head_blocks(case: Case, got: Any) -> bool:
    """Wrong only in query heads whose program has another number than their KV head."""
    if rows_off(case, got) is None:
        return False
    right, (q, cache, *_) = plain(list(case.right)), case.arguments
    n_kv_heads = cache.k_nhd.shape[2]
    grid = grid_heads_of(q[0], n_kv_heads)
    other = grid != torch.arange(len(grid)) // (len(grid) // n_kv_heads)
    off = [~torch.isclose(mine.double(), yours.double(), 5e-3, 5e-3) for mine, yours in zip(right, got)]
    return bool(((off[0].any(-1) | off[1]) <= other).all())


def loop_mistake(name: str, says: str, **made: Any) -> Mistake:
    """A mistake of which the tile loop in PyTorch has an option."""
    return Mistake(name, says, lambda *given: tile_loop(*given, **made))


EX01_4 = Task(
    id="ex01_4",
    title="the tile loop, in Triton",
    function="own_loop",
    kernel="attend_split",
    lines=18,
    points=6,
    arguments=loop_batch,
    right=whole_rows,
    call=decode_with,
    axes=("row", "query head", "dim"),
    tolerance=TOLERANCE,
    fixed=("head_dim", "dtype", "size", "values", "tile"),
    shortcuts=("attend_tokens", "attend_tile"),
    seconds=60.0,
    race={
        "lengths": [16384, 5000, 900, 33], "splits": 32, "page_size": 16, "n_kv_heads": 8, "group": 4, "head_dim": 128,
        "dtype": "float16", "size": 1, "values": 1, "tile": 16, "scores": "any", "seed": 0,
    },
    race_call=decode_as_models_do,
    properties=(
        Property("tile after tile, to the row's last token", lambda rng: loop_specs(
            rng, {"lengths": [7, 16], "n_kv_heads": 1}, {"lengths": [17]}, {"lengths": [rng.randrange(33, 48), 32]})),
        Property("pages of any size, in any order", lambda rng: loop_specs(
            rng, *({"lengths": [9, 27], "page_size": size, "n_kv_heads": 1, "head_dim": 24} for size in (3, 16, 32)))),
        Property("each split from its first token to its last", lambda rng: loop_specs(
            rng, {"lengths": [40, 20], "splits": 2}, {"lengths": [rng.randrange(33, 48), 3], "splits": 3})),
        Property("the KV head that belongs to the program", lambda rng: loop_specs(
            rng, {"lengths": [5], "n_kv_heads": 3, "group": 3},
            {"lengths": [5, 21], "n_kv_heads": 2, "group": 3, "dtype": "float32"}, {"lengths": [5], "group": 40})),
        Property("scores of several hundred", lambda rng: loop_specs(
            rng, {"lengths": [16, 9], "size": 300, "scores": "below 0"},
            *({"lengths": [40, 20], "size": 300, "n_kv_heads": 1, "scores": way} for way in ("rising", "falling")))),
        Property("no tokens: out 0, lse -inf", lambda rng: loop_specs(
            rng, {"lengths": [0, 5]}, {"lengths": [40, 0, 3], "splits": 3, "n_kv_heads": 1})),
        Property("sums in fp32, however large the values", lambda rng: loop_specs(
            rng, {"lengths": [33], "n_kv_heads": 1, "size": 0, "values": 3000})),
    ),
    mistakes=(
        Mistake("returns_nothing", "attend_split returns nothing: is it written, and does it `return out, lse`?",
                shows=returns_nothing),
        INTERPRETER_AND,
        loop_mistake("head_map", "takes grid_head % N_KV_HEADS for the KV head: it is grid_head // HEAD_BLOCKS",
                     head_map="modulo"),
        loop_mistake("head_map", "takes grid_head for the KV head: it is grid_head // HEAD_BLOCKS", head_map="program"),
        loop_mistake("head_map", "takes grid_head // GROUP for the KV head: it is grid_head // HEAD_BLOCKS",
                     head_map="group"),
        loop_mistake("head_map", "reads KV head 0 in every program: it is grid_head // HEAD_BLOCKS", head_map="first"),
        Mistake("head_map", "reads another KV head where several programs share one: it is grid_head // HEAD_BLOCKS",
                shows=ignores_head_blocks),
        loop_mistake("logical_pages", "takes logical page numbers for pages of the pool", pages="logical"),
        loop_mistake("wrong_row", "reads row 0 of the block table, whatever the row", pages="row 0"),
        loop_mistake("begin_ignored", "reads from token 0: a split begins at `begin`", begins="0"),
        loop_mistake("end_ignored", "reads on to the row's last token: a split ends at `end`", ends="row"),
        loop_mistake("tail_dropped", "drops the part-filled last tile", ends="whole tiles"),
        loop_mistake("last_token", "drops the last token: `end` is the first that is not read", ends="last token"),
        *(loop_mistake("max_unmasked", "takes the 0 of a token that is not there into the maximum: give it the score "
                       "-inf first", largest=largest) for largest in ("unmasked", "unmasked, and lse")),
        loop_mistake("one_more", "counts the token at `end`, which is not read any more", ends="one more"),
        loop_mistake("step_by_page", "goes on by a page, not by a tile of BLOCK_N tokens", step="page"),
        loop_mistake("tail_unmasked", "scores of tokens that are not there count as 0: set them to -inf", tail="0"),
        loop_mistake("mask_from_0", "compares 0, 1, 2, ... with `end`: the tokens of a tile are start, start + 1, ...",
                     tail="from 0"),
        loop_mistake("nothing_corrected", "adds up weights that refer to different maxima: when the maximum grows, "
                     "multiply the sums so far by exp2(old - new)", corrects="none"),
        loop_mistake("acc_not_corrected", "corrects the sum of weights, not the weighted sum of v", corrects="sums"),
        loop_mistake("sum_not_corrected", "corrects the weighted sum of v, but not the sum of weights", corrects="acc"),
        loop_mistake("first_tile_only", "reads the first tile only: loop from begin to end", ends="first tile"),
        loop_mistake("last_tile_only", "keeps the last tile only: add to what was summed before", keeps="last tile"),
        loop_mistake("sum_overwritten", "divides by the weights of the last tile only", keeps="last sum"),
        loop_mistake("divided_each_time", "divides in every tile: divide once, after the last", divides="each time"),
        loop_mistake("tiles_averaged", "averages tiles: each counts by its sum of weights", divides="tiles",
                     corrects="sums"),
        loop_mistake("not_divided", "does not divide by the sum of the weights", divides="never"),
        Mistake("scaled_twice", "scales twice: qk_scale holds the scale already",
                lambda q, *rest: tile_loop(q, *rest, factor=q.shape[2] ** -0.5)),
        Mistake("scaled_twice", "scales twice: qk_scale holds the scale already",
                lambda *given: tile_loop(*given, factor=given[-1] / LN_2)),
        Mistake("own_scale", "scales by 1 / sqrt(head_dim): qk_scale is another number",
                lambda q, *rest: tile_loop(q, *rest, factor=q.shape[2] ** -0.5 / rest[-1])),
        Mistake("not_scaled", "does not multiply scores by qk_scale",
                lambda *given: tile_loop(*given, factor=LN_2 / given[-1])),
        Mistake("exp_for_exp2", "takes exp of scores that are in base 2: it is exp2", shows=takes_exp),
        loop_mistake("lse_base_2", "lse is in base 2: divide it by log2(e)", lse="log2"),
        loop_mistake("lse_multiplied", "multiplies lse by log2(e): divide by it", lse="multiplied"),
        loop_mistake("lse_mixed", "lse mixes bases: the largest score is in base 2, tl.log in base e", lse="mixed"),
        loop_mistake("lse_without_max", "lse lacks the largest score", lse="without max"),
        loop_mistake("lse_max", "gives the largest score for lse", lse="max"),
        loop_mistake("max_from_0", "begins with a maximum of 0, which is no score: begin with -inf", largest="from 0"),
        loop_mistake("max_of_first", "subtracts the largest score of the first tile: when the largest grows, take that",
                     largest="first"),
        loop_mistake("max_over_heads", "takes one largest score for all heads: each has its own, tl.max(scores, 0)",
                     largest="over heads"),
        loop_mistake("max_not_carried", "takes the largest score of a tile, not the largest so far: an earlier, larger "
                     "one then overflows", largest="tile"),
        Mistake("no_max", "overflows: exp2 of a large score is infinite; subtract the largest score first",
                shows=overflows),
        Mistake("fp16_sums", "adds up in fp16, which ends at 65504: keep the weighted sum in fp32", shows=sums_in_fp16),
        Mistake("no_tokens", "gives no neutral state where a split has no tokens: out is 0, lse -inf",
                shows=has_empty),
        Mistake("tail_read", "reads slots past the row's last token, which hold NaN", shows=has_tail),
    ),
)  # fmt: skip

"""Exercise 04: choose a stage for every step. Lesson 04 explains it; check("ex04_1") in a notebook judges it.

Write the functions that raise NotImplementedError, where the lesson names them. Each says what it takes and gives, with
an example worked by hand. Below it stands its specification, NAME_spec: short, plain and slow. Yours must give the same
without using it.
"""

import math
import statistics

import torch

MEMORY_GB_PER_S = 302.0  # what the paper measured on an RTX 3060; 1 GB is 1e9 bytes
LAUNCH_US = 8.0  # per launch
ENOUGH_PER_SM = 4  # so many programs on each SM read at the memory's full rate


def split_pages(n_pages: list[int], page_size: int, n_kv_heads: int, n_sms: int) -> int | None:
    """ex04_1: how many pages FlashInfer's tensor-core rule puts in a split; None where no row is split. About 6 lines.

    n_pages: the pages of each row. All rows are cut in splits of one size, a row's last split being shorter. Each split
    is an item, a row without pages has one item too, and an item takes one program per KV head. There is room for 2
    programs per SM. The size is the shortest, in whole pages and of at least 128 tokens, for which all programs find
    room. page_size is a power of two, and may be more than 128. No row is split where the longest row is no longer than
    that size, where even whole rows find no room, and where there are no rows.

    By hand, page_size 16, 8 KV heads, 28 SMs: 56 programs have room, so 7 items. Rows of 10 and 100 pages make 1 + 7
    items in splits of 16 pages, one too many, and 1 + 6 in splits of 17: the answer is 17. Of 8 rows none is split.
    """
    raise NotImplementedError("ex04_1: split_pages is not written yet (about 6 lines)")


def split_pages_spec(n_pages: list[int], page_size: int, n_kv_heads: int, n_sms: int) -> int | None:
    """Cut the rows in splits of every size, count the programs, and take the least of the sizes that fit."""
    fitting = []
    for size in range(1, max(n_pages, default=0)):
        items = [begin for pages in n_pages for begin in range(0, max(pages, 1), size)]
        if size * page_size >= 128 and len(items) * n_kv_heads <= 2 * n_sms:
            fitting.append(size)
    return min(fitting, default=None)


def paper_policy(lengths: list[int], group: int) -> str:
    """ex04_2: the stage that the paper's gates choose for a step. About 8 lines.

    lengths: tokens of each row; group: query heads per KV head. Returns "flashinfer", "length_buckets" or "workqueue".
    The first gate that holds decides, and only rows with tokens count as rows:

        group other than 4                     flashinfer
        longest row below 16,384 tokens        flashinfer, also where no row has tokens, or where there are no rows
        at most 1 row                          length_buckets
        at least 8 rows                        workqueue
        else                                   flashinfer

    By hand, group 4: [20000, 0, 0] has one row with tokens, a long one: length_buckets. Eight rows of 2,000 tokens:
    flashinfer, since none is long; make one of them 16,384 long, and it is workqueue.
    """
    raise NotImplementedError("ex04_2: paper_policy is not written yet (about 8 lines)")


def paper_policy_spec(lengths: list[int], group: int) -> str:
    """From the other side: which steps does FlashInfer not get?"""
    rows = [length for length in lengths if length]
    is_ours = group == 4 and any(length >= 16384 for length in rows)
    takes = {"length_buckets": is_ours and len(rows) == 1, "workqueue": is_ours and len(rows) > 7}
    return next((stage for stage in takes if takes[stage]), "flashinfer")


def paper_cost(
    lengths: list[int], n_items: int, n_launches: int, n_q_heads: int, n_kv_heads: int, head_dim: int, n_sms: int
) -> float:
    """ex04_3: how long a step takes by the paper's cost model, in us. About 6 lines.

        time = KV bytes / memory rate * max(1, 4 / C)  +  n_launches * 8 us  +  merge bytes / memory rate

    KV bytes: K and V of all tokens in fp16. Merge bytes: the states of all n_items items of the step, whether or not
    their rows are merged; per query head, a state is a largest score, a sum and head_dim numbers, each in fp32. C: the
    programs on each SM, one per item and KV head, shared out evenly, so that C need not be whole. Without items nothing
    is read or merged, and only launches take time; a batch may have no rows. The card's costs are the constants at the
    top of this file.

    By hand, lengths [700, 0, 810], 6 items, 2 launches, 4 query heads, 1 KV head, head_dim 100, 3 SMs. 1,510 tokens of
    400 bytes are 604,000 bytes, 2 us at 302,000 bytes per us; C = 6 / 3 = 2, so they take 4 us. Launches: 16 us. Merge:
    6 * 4 * 102 * 4 = 9,792 bytes, 0.0324 us. All together 20.0324 us.
    """
    raise NotImplementedError("ex04_3: paper_cost is not written yet (about 6 lines)")


def paper_cost_spec(
    lengths: list[int], n_items: int, n_launches: int, n_q_heads: int, n_kv_heads: int, head_dim: int, n_sms: int
) -> float:
    """Byte by byte, in seconds; a memory that too few programs read gives only a part of its rate."""
    rate = MEMORY_GB_PER_S * 1e9
    programs, enough = n_items * n_kv_heads, ENOUGH_PER_SM * n_sms
    reached = rate * min(programs, enough) / enough
    read = sum(length * head_dim * 2 for length in lengths for _head in range(n_kv_heads) for _side in "kv")
    merged = sum(4 + 4 + 4 * head_dim for _item in range(n_items) for _head in range(n_q_heads))
    seconds = (read / reached if read else 0.0) + n_launches * LAUNCH_US / 1e6 + merged / rate
    return seconds * 1e6


def fit_costs(features: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """ex04_4: the costs that explain measured times best, by relative error. About 2 lines.

    features [n_steps, n_costs], float64: how much of each thing a step needs, such as MB to read and launches; times
    [n_steps], float64, in us. The model: a step's time is the sum of feature * cost. Returns the costs [n_costs] for
    which the sum over steps of (predicted / measured - 1) ** 2 is the least, so that 10% of a short step weigh as much
    as 10% of a long one. Nothing is added to the model, and a cost may come out negative. There are at least as many
    steps as costs, and no column of features follows from the others.

    By hand, one cost: features [[1], [1]], times [1, 2]. 1/1 - 1 and 1/2 - 1 are the errors of cost 1; the best is 1.2,
    with 1.2/1 - 1 = 0.2 and 1.2/2 - 1 = -0.4. (By absolute error it would be 1.5, the mean.)
    """
    raise NotImplementedError("ex04_4: fit_costs is not written yet (about 2 lines)")


def fit_costs_spec(features: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """The least sum of squares has slope 0 along each cost: as many equations as costs, written out and solved."""
    n_steps, n_costs = features.shape
    square, right = torch.zeros(n_costs, n_costs, dtype=features.dtype), torch.zeros(n_costs, dtype=features.dtype)
    for step in range(n_steps):
        for one in range(n_costs):
            right[one] += features[step, one] / times[step]
            for other in range(n_costs):
                square[one, other] += features[step, one] * features[step, other] / times[step] ** 2
    return torch.linalg.solve(square, right)


def cheapest(times: dict[str, float], alike: float) -> str | None:
    """ex04_5: the stage to take, by predicted times; None where there is none. About 5 lines.

    times: {stage: time}, the preferred stages first; nan or inf: the stage cannot run here, and is never taken; 0 is a
    time like others. Stages whose time is at most (1 + alike) times the least are alike, and of these the first is
    taken.

    By hand, alike 0.25: {"workqueue": 5.0, "stream_k": 4.0, "flashinfer": 5.5} gives "workqueue": up to 5.0 is alike.
    With alike 0.1 it is "stream_k", since only up to 4.4 is.
    """
    raise NotImplementedError("ex04_5: cheapest is not written yet (about 5 lines)")


def cheapest_spec(times: dict[str, float], alike: float) -> str | None:
    """One after the other: is it as good as alike to each that can run?"""
    for stage, time in times.items():
        others = [other for other in times.values() if math.isfinite(other)]
        if math.isfinite(time) and all(time <= (1 + alike) * other for other in others):
            return stage
    return None


def regret(times: list[dict[str, float]], chosen: list[str]) -> float:
    """ex04_6: the mean regret of a policy. About 4 lines.

    times: for each step {stage: time}; nan, or no entry: the stage could not run at that step. chosen: the stage that
    the policy took at each step; it always has a time. A step's regret is the time of what was taken over the least
    time of that step, less 1; the mean of these counts every step alike. No steps: 0.

    By hand: {"workqueue": 100, "flashinfer": 110} where flashinfer is taken: 0.1. {"workqueue": 30, "flashinfer": 20}
    where workqueue is taken: 0.5. The mean is 0.3, that is 30%.
    """
    raise NotImplementedError("ex04_6: regret is not written yet (about 4 lines)")


def regret_spec(times: list[dict[str, float]], chosen: list[str]) -> float:
    """Against each stage that could run; what was lost to the best is the most."""
    lost = [
        max(step[stage] / time - 1 for time in step.values() if not math.isnan(time))
        for step, stage in zip(times, chosen)
    ]
    return statistics.fmean(lost) if lost else 0.0

# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 01 Split-KV and the exact merge
#
# **One program per KV head leaves most of a GPU without work. So we cut rows into splits, give each split a program, and merge what they find. The merge is exact.**
#
# [Lesson 00](00_paged_kv_cache.ipynb) ended with one program per row and KV head. This lesson changes nothing in the arithmetic. It changes who reads which tokens.
#
# As there: before you begin, clear the saved outputs (**Edit → Clear Outputs of All Cells**), and decide at each **Predict** before you run the cell.

# %%
import pkv

where = "in Triton's interpreter, on the CPU" if pkv.INTERPRETED else "compiled, on the GPU"
print(f"Kernels run {where}.")

# %% [markdown]
# ## Few programs, many SMs
#
# A GPU runs programs on its streaming multiprocessors, the **SMs**. The RTX 3060 has 28. A program runs on one SM from start to end, and an SM holds several programs at once, so that some compute while others wait for memory. How many depends on the registers and the shared memory that one program takes. With head_dim 128 an SM of the RTX 3060 holds fewer than with the 64 of lesson 00.
#
# **Predict.** One row of 65,536 tokens, 8 KV heads, one program per KV head. How many of the 28 SMs have anything to do?

# %%
import itertools
import math

import torch

from pkv import viz

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
llama = pkv.Shape(
    n_q_heads=32, n_kv_heads=8, head_dim=128, page_size=16, dtype=torch.float16
)
unsplit = pkv.plan([65536], llama, stage="split_kv", splits=1, gpu="rtx3060")
viz.draw_programs(unsplit)

# %% [markdown]
# The picture shows assignment, not time. But no luck in timing gives work to an SM that has no program.
#
# ## Cut the row
#
# **Split-KV** cuts a row's tokens into ranges, the **splits**. Each split of each KV head is a program of its own.
#
# **Predict.** How many splits of this row give each of the 28 SMs exactly 4 programs?

# %%
split = pkv.plan([65536], llama, stage="split_kv", gpu="rtx3060")
viz.draw_programs(split)

# %% [markdown]
# So many splits the plan takes when you do not ask for a number. What does it take for an H200, which has 132 SMs?

# %%
from pkv.stages.sizing import even_programs

for gpu in ("rtx3060", "h200"):
    split = pkv.plan([65536], llama, stage="split_kv", gpu=gpu)
    n_sms, holds = split.gpu.n_sms, split.programs_per_sm
    used = even_programs(holds)
    print(f"{gpu}: {n_sms} SMs x {used} programs / {llama.n_kv_heads} KV heads", end="")
    print(f" = {split.n_items} splits (an SM could hold {holds} programs)")

# %% [markdown]
# An SM has four schedulers, and a program of ours lives on one of them. Five programs would give one scheduler two and the others one, and that one ends last. So the plan counts on four or on eight, the same number for each. And it never cuts the longest row into splits of less than two tiles.
#
# ## All rows are cut like the longest
#
# The grid of stage `split_kv` is rows x KV heads x splits. So every row gets as many splits as the longest row, and the longest row sets the bounds. With n tiles and S splits, split s covers the tiles from n · s // S to n · (s + 1) // S. A shorter row's later splits have no token: **empty items**.
#
# Toy table: lengths 3, 10 and 40, tiles of 16 tokens, 2 splits. The longest row has 3 tiles, so the splits cover tiles 0:1 and 1:3, that is tokens 0:16 and 16:48, as far as a row reaches.
#
# **Predict.** Write down the six items (row, begin, end). Which are empty?

# %%
toy = pkv.Shape(n_q_heads=8, n_kv_heads=2, head_dim=64, page_size=4, dtype=torch.float16)
plan = pkv.plan([3, 10, 40], toy, stage="split_kv", splits=2, tile=16, gpu="rtx3060")
print(plan.items.tolist())

# %%
plan

# %% [markdown]
# An empty item is not nothing. Its programs are launched, look up their bounds, find no token, and leave. A later stage gets rid of them. Here they stay visible.
#
# **Exercise ex01_3.** Now cut rows yourself: in `exercises/ex01_split_kv.py`, write `split_bounds`, which gives the token range of each split of one row. (The numbers follow the file, not the lesson. Write, save, run the cell: it reads the file afresh. `hint("ex01_3")` helps.)

# %%
from pkv.course import check, hint

check("ex01_3")

# %% [markdown]
# ## What a split leaves behind
#
# Each program writes a **partial state** of its tokens: out and lse, as in lesson 00, but over its tokens only.
#
# To check by hand: one row of 10 tokens, values 0 .. 9, all scores 0, cut at 4 and at 8.
#
# **Predict.** What are the three states? What is the state of all ten tokens?


# %%
def state_of(begin, end):
    """Out [1, 1] and lse [1] of the tokens begin:end: scores 0, values their own numbers."""
    values = torch.arange(begin, end, dtype=torch.float64)
    return values.mean()[None, None], torch.full((1,), math.log(end - begin)).double()


parts = [state_of(0, 4), state_of(4, 8), state_of(8, 10)]
for out, lse in [*parts, state_of(0, 10)]:
    print(f"out {out.item():.4g}   lse ln {lse.exp().item():.4g}")

# %% [markdown]
# ## The merge
#
# The lse says how heavy a state weighs: exp(lse) is the sum of its tokens' weights. So the states of disjoint tokens combine to
#
# - lse = ln of the sum of exp(lse[i])
# - out = the sum of exp(lse[i] - lse) · out[i]
#
# This is no approximation. Put the definitions in, and it is the state of all tokens at once.
#
# **Predict.** The plain average of the three outs is not 4.5. Why?

# %%
out, lse = pkv.merge(parts)
print(f"merged:  out {out.item():.4g}   lse ln {lse.exp().item():.4g}")
print(f"average: out {sum(part_out.item() for part_out, _ in parts) / 3:.4g}")

# %% [markdown]
# The last split has two tokens, the others four. The average counts it like the others. The merge weighs it by exp(ln 2) = 2 against exp(ln 4) = 4.
#
# **Exercise ex01_1.** Write these two sums: `merge_two`, in the same file, merges two states in PyTorch. It must not overflow, as in lesson 00. The check also brings states of no tokens: why those need care is shown below, so its lines about them can wait until then.

# %%
check("ex01_1")

# %% [markdown]
# ## Any order, any grouping
#
# The sums do not care about order. So no program has to wait for another before it writes, and the merge may take states as they lie.
#
# Below: the three states merged one after another, in three orders.


# %%
def part_of(begin, end):
    return viz.Part(begin, end, *map(float, state_of(begin, end)))


drawn = [part_of(0, 4), part_of(4, 8), part_of(8, 10)]
viz.draw_merge(drawn, [(0, 1, 2), (2, 1, 0), (0, 2, 1)])

# %% [markdown]
# **Predict.** Now random states, of very unequal weight: all 24 orders of four, one after another, and in pairs. How far apart are the results, in fp64?

# %%
torch.manual_seed(0)
outs, lses = torch.randn(4, 8, 64).double(), 10 * torch.randn(4, 8).double()
states, worst = list(zip(outs, lses)), 0.0
at_once, _ = pkv.merge(states)
for a, b, c, d in itertools.permutations(states):
    one_by_one, _ = pkv.merge([pkv.merge([pkv.merge([a, b]), c]), d])
    in_pairs, _ = pkv.merge([pkv.merge([a, b]), pkv.merge([c, d])])
    for way in (one_by_one, in_pairs):
        worst = max(worst, (way - at_once).abs().max().item())
print("48 ways, all within 1e-14:", worst < 1e-14)

# %% [markdown]
# Only the rounding of the sums is left. ("Exact" means this: no term is dropped or approximated. Rounding is everywhere.)
#
# ## Three ways to get it wrong
#
# **Averaging.** The result now depends on the order too: a sure sign.

# %%
viz.draw_merge(drawn, [(0, 1, 2), (2, 1, 0), (0, 2, 1)], "average of the outs")

# %% [markdown]
# **The wrong logarithm.** Kernels compute in base 2, because exp2 is one instruction. FlashInfer, a library of attention kernels that servers use, returns its lse in base 2; ours is natural. Take one for the other, and a heavy state counts too much: log2(w) is 1.44 · ln(w), so a state of weight w counts as w to the power of 1.44.
#
# **Predict.** Part A: 3 tokens of value 1. Part B: 1 token of value 0. What is right, and what comes out if both lse are in base 2 and are read as natural ones?

# %%
a = torch.ones(1, 1), torch.tensor([math.log(3)])
b = torch.zeros(1, 1), torch.tensor([math.log(1)])
print(f"right: {pkv.merge([a, b])[0].item():.3f}")
a2, b2 = ((out, lse / math.log(2)) for out, lse in (a, b))  # the same, in base 2
print(f"wrong: {pkv.merge([a2, b2])[0].item():.3f}   (log2 read as ln)")

# %%
viz.draw_merge(drawn, [(0, 1, 2), (2, 1, 0)], "log2 read as ln")

# %% [markdown]
# The picture does the same to all three states of our row. Both orders agree, and both are wrong: that the order does not matter is not yet a proof.
#
# **Reading an empty state.** An empty state has lse -inf, so its weight is exp(-inf) = 0. Its out was never written: memory may hold anything there, also NaN. And 0 · NaN is NaN. So an empty state's out must not be read, or must be replaced before it is multiplied.

# %%
empty = torch.tensor([[torch.nan]]).double(), torch.tensor([-torch.inf]).double()
print(f"ours:  out {pkv.merge([*parts, empty])[0].item():.4g}")
weights = [lse.exp() for _, lse in [*parts, empty]]
wrong = sum(w * out for w, (out, _) in zip(weights, [*parts, empty])) / sum(weights)
print(f"wrong: out {wrong.item():.4g}")

# %%
with_empty = [*drawn, viz.Part(10, 10, math.nan, -math.inf)]
viz.draw_merge(with_empty, [(0, 1, 2, 3), (3, 2, 1, 0)], "empty state multiplied")

# %% [markdown]
# And two empty states: the largest lse is -inf, and -inf minus -inf is NaN before any guard sees it. Ours gives the empty state again.

# %%
out, lse = pkv.merge([empty, empty])
print("out", out.item(), "lse", lse.item())

# %% [markdown]
# **Exercise ex01_2.** A merge launch finds all states of a row at once. `merge_many` merges any number of them, without a loop over states, and none of the three ways above leads astray.

# %%
check("ex01_2")

# %% [markdown]
# ## The kernel
#
# Now the real thing, with our two kernels: decode writes partial states, merge combines them. The first lines of the decode kernel are all that this stage adds (`pkv/stages/s1_split_kv.py`): who am I, which tokens are mine.
#
# **Predict.** Does the number of splits change the result, beyond the tolerance? Which of these plans need a merge launch?

# %%
from pkv.bench.accuracy import Yardstick

lengths = [3, 10, 40]
torch.manual_seed(1)
q = torch.randn(3, 8, 64).half()  # [n_rows, n_q_heads, head_dim]
k, v = torch.randn(2, 3, 40, 2, 64).half()  # each [n_rows, max_len, n_kv_heads, head_dim]
cache = pkv.PagedKVCache.from_dense(k, v, lengths, page_size=4, seed=5)
yardstick = Yardstick(q, cache)
for splits in (1, 2, 3, 5):
    plan = pkv.plan(lengths, toy, stage="split_kv", splits=splits, gpu="rtx3060")
    ok = yardstick.measure(*pkv.run(q, cache, plan)).ok
    launches = plan.counters.launches
    print(f"splits={splits}: {plan.n_items:2} items, launches={launches}, right: {ok}")

# %% [markdown]
# The number of splits does not matter to the result. It matters to the launches, of which we count both kinds, decode and merge. With splits=1 each row is a single item, and the decode kernel writes its result. In all other plans the decode kernel leaves partial states, and a merge launch must follow.
#
# ## How a kernel is written
#
# Before you write one, here is a small one, whole. It gives the mean of each row of a matrix, and one program takes one row.
#
# - A tensor arrives as the **address** of its first number. `x + 3` is the address of the fourth. `tl.load` reads what is there, `tl.store` writes.
# - A program works on **blocks**, many numbers at once. `tl.arange(0, BLOCK)` is the block 0, 1, 2, ..., and an address plus a block is a block of addresses. A block's size is a power of two and known when the kernel is compiled: `tl.constexpr`.
# - A row rarely fills its last block. A **mask** says which numbers exist. The others are not read, and `other` stands in their place.
# - `tl.sum(block, 0)` and `tl.max(block, 0)` run along the first axis. `tl.where(condition, a, b)` chooses number by number. Of a block [M], `block[:, None]` makes a column [M, 1], and `block[None, :]` a line [1, M].
# - A kernel cannot call torch, and has no `@`. What it can call begins with `tl.`, or is another kernel's function with `@triton.jit`.
#
# **Predict.** The matrix holds 0 .. 19 in two rows of 10. BLOCK is 4. How often does the loop turn, how many numbers does its last turn mask out, and what are the means?

# %%
import triton
import triton.language as tl


@triton.jit
def mean_kernel(x, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)  # who am I
    sums = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, n, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        sums += tl.load(x + row * n + index, mask=index < n, other=0.0)
    tl.store(out + row, tl.sum(sums, 0) / n)


matrix, means = torch.arange(20.0).reshape(2, 10), torch.empty(2)
mean_kernel[(2,)](matrix, means, 10, BLOCK=4)  # two programs
print(means.tolist())

# %% [markdown]
# Three turns, and the last one masks out two. Without a GPU this ran in Triton's interpreter, as all our kernels do.
#
# **Exercise ex01_4.** What each program does with its tokens, once it knows them, is a loop over tiles. It is the merge again, with tiles for states. Write it in Triton: `attend_split`. The check runs your kernel inside `split_kv`, where every program calls it in the place of ours.

# %%
check("ex01_4")

# %% [markdown]
# ## The rules of this stage, and what breaks
#
# | rule | without it |
# |---|---|
# | 1. Every token lies in exactly one item | a token lost, or counted twice: a wrong mean |
# | 2. An item begins at a tile's first token | the kernel, which looks up whole pages, reads the wrong slots |
# | 3. A row that is split is merged | the row is never written |
# | 4. States are weighed by exp(lse), lse natural | the wrong means above |
# | 5. An empty state is neutral, whatever it holds | NaN in one row, for no visible reason |
# | 6. A plan serves the lengths that it was made for | new tokens are not read |
#
# A plan is data, so rules 1 to 3 can be checked before anything runs. We break a good plan in four ways:

# %%
import dataclasses

plan = pkv.plan([3, 10, 40], toy, stage="split_kv", splits=2, gpu="rtx3060").validate()


def why_not(**changes):
    try:
        dataclasses.replace(plan, **changes).validate()
    except ValueError as error:
        return error


# %%
for end_of_first, begin_of_second in [(16, 32), (16, 0), (20, 20)]:
    items = plan.items.copy()
    items[-2, 2], items[-1, 1] = end_of_first, begin_of_second  # the two items of row 2
    print(why_not(items=items))
print(why_not(launches=plan.launches[:1]))

# %% [markdown]
# The last complaint names row 0, which has one item with tokens and one without. A row counts as split as soon as it has two items, empty or not: then its state lies with the partial states, and only a merge launch writes its result.
#
# What would have happened? We take the probe of lesson 00 for row 2 (q = 0, values 0 .. 39), and read what the items name: the good ones, those that lose tokens, those that read some twice.

# %%
for items in ([(0, 16), (16, 40)], [(0, 16), (32, 40)], [(0, 16), (0, 40)]):
    print(items, f"-> out {pkv.merge([state_of(b, e) for b, e in items])[0].item():.4g}")

# %% [markdown]
# Rules 4 and 5 you have seen break. Rule 6: the cache grows by one token per row, and somebody runs yesterday's plan.

# %%
growing = pkv.PagedKVCache.from_dense(k, v, lengths, page_size=4, n_pages=20)
growing.append(torch.zeros(3, 2, 64).half(), torch.zeros(3, 2, 64).half())
try:
    pkv.run(q, growing, plan)
except ValueError as error:
    print(error)

# %% [markdown]
# **Exercise ex01_5.** Rules 3 to 5 are for the merge launch to keep. Write its kernel, `merge_rows_kernel`: one program merges the states of one row, for one query head. `offsets` says which states are the row's.

# %%
check("ex01_5")

# %% [markdown]
# ## Your kernels in the library
#
# The tile loop and the merge are **parts** of the library, and `pkv.decode` takes others in their place. `learner_parts` brings yours. Where yours is not there yet, or not right, it says so, and brings the solution's: its text lies in `solutions/ex01_split_kv.py`.

# %%
from pkv.course import learner_parts

parts = learner_parts("attend_tokens", "merge")
out, lse = pkv.decode(q, cache, stage="split_kv", splits=3, parts=parts, return_lse=True)
print("within the tolerance of fp64:", yardstick.measure(out, lse).ok)

# %% [markdown]
# `pkv bench --parts FILE` times them beside ours: write into that file the lines that import `learner_parts` and set `parts`, as above.

# %% [markdown]
# ## Another cut: length buckets
#
# Most empty items come from cutting short rows like long ones. Stage `length_buckets` does not do that: rows of equal length share a decode launch of their own, with bounds of their own, and a merge launch. The kernels are the same. Only a row with fewer tiles than splits still has empty items, because one tile is never cut.
#
# **Predict.** Eight rows of eight different lengths. How many launches does `split_kv` need, decode and merge together, and how many does `length_buckets`?

# %%
eight = [4096, 9000, 2100, 12000, 700, 5000, 30000, 1500]
stages = ("split_kv", "length_buckets")
plans = [pkv.plan(eight, llama, stage=stage, splits=8, gpu="rtx3060") for stage in stages]
for plan in plans:
    count = plan.counters
    print(f"{plan.stage:15} {count.launches:3} launches", end="")
    print(f" {count.programs:4} programs {count.empty_programs:4} empty")

# %%
plans[0]

# %%
plans[1]

# %% [markdown]
# Two launches with empty programs, or two launches for every distinct length. Launches run one after another. Each must wait for the last program of the one before, and each alone may be too small for the GPU. We see it with 2 splits per row in place of 8, so that a decode launch has 2 · 8 programs:

# %%
viz.draw_programs(pkv.plan(eight, llama, stage="length_buckets", splits=2, gpu="rtx3060"))

# %% [markdown]
# Neither cut is good for all batches. A later stage gets exact bounds in two launches.
#
# ## Try it
#
# Run these cells in JupyterLab. They need no cell above them.
#
# In the first, set 2 rows, the longest of 8,192 tokens. How many splits does `split_kv` need at least, so that every SM gets a token to read? How many of its programs are then empty? And what does `length_buckets` need for it, in splits and in launches?

# %%
from pkv.viz import widgets

widgets.explore_plan(rows=4, longest=8192, splits=4)

# %% [markdown]
# **Answer.** `split_kv` needs 3 splits, and 8 of its 48 programs are empty. `length_buckets` needs 4 splits, because each of its decode launches must fill the SMs alone, and 4 launches; no program is empty.
#
# In the second, ten tokens are cut at 4, 7 and 9. Break the merge. In which of the wrong ways does the order matter?

# %%
from pkv.viz import widgets

widgets.explore_merge([0, 4, 7, 9, 10])

# %% [markdown]
# **Answer.** Only averaging depends on the order. With the wrong logarithm, and with an empty state that is read, all orders end at the same wrong result.

# %% [markdown]
# ## Measure it
#
# The records that ship with the course were taken on an NVIDIA H200: once with all its 132 SMs, once with 28 of them, as many as an RTX 3060 has (but with faster memory). Each result was checked against fp64, then timed: GPU time of one layer, caches emptied before each call, the median, planning not counted.
#
# First, one row of 65,536 tokens in more and more splits. (The stage was `row_local`, which cuts a single row as `split_kv` does; lesson 02.)
#
# **Predict.** With 4 splits there are 32 programs. How much longer does the slice take than the whole card? And with 32 splits?

# %%
import json
from importlib import resources

file = resources.files("pkv") / "data" / "results" / "default_cuts.json"
splits = (4, 8, 16, 24, 32, 48, 64)
print("splits     ", *[f"{n:5}" for n in splits])
for n_sms, loads in json.loads(file.read_text())["sms"].items():
    us = loads["B1_64k"]["us"]
    print(f"{n_sms:>3} SMs, us", *[f"{us[f'row_local {n}']:5.0f}" for n in splits])
print("28 SMs held", 28 * 9, "programs at once: 9 of that day's kernel on each")

# %% [markdown]
# With 4 splits, a hundred SMs more are worth nothing: nobody gives them work. The whole card still gains at 48 splits. The slice does not: 24 splits are 192 programs, 32 are 256, a few more than it held, and the whole step waits for those. (The times are older than those below. Today's kernel takes fewer registers, so more of its programs fit; it has no such list of times.)
#
# Now what people decode with, on one row, against a plain read of its bytes. The rows are those of the paper's traces. The kernels that begin with `fa2`, `batch-attention` and `xqa` come with FlashInfer. `vllm` cuts a row into 16 segments, whatever its length. `sglang` cuts it into 8 at most, unless its user allows more, here 32 and 64.
#
# **Predict.** On 132 SMs: which of SGLang's three gets nearest to a plain read? Does `split_kv` come nearer with long rows or with short ones?

# %%
viz.draw_recorded("one_row")

# %% [markdown]
# A cap of 8 splits leaves most of the card without work, and the longer the row, the more that costs. But 64 do not fill it either: `split_kv` takes as many as we printed above for the H200. No kernel comes near a plain read with short rows, because starting programs, and merging what they leave, takes as long as with long ones.
#
# **Predict.** And on 28 SMs? Do 8 splits cost as much there? Does `split_kv` keep its lead?

# %%
viz.draw_recorded("one_row", n_sms=28)

# %% [markdown]
# 8 splits cost less there, and 64 gain little over 32: more splits help as long as SMs are left over. `split_kv` keeps its lead, and it is a larger one.
#
# The paper has times for one of these traces, `bucketed`, with `length_buckets` for the stage, on the RTX 3060. FlashInfer's time over that stage's, there, in the simulator, and in our records (published and simulated times of FlashInfer hold its planning, the measured ones do not):

# %%
from pkv.bench.records.beside import RIVAL_HERE, RIVAL_PUBLISHED, published_beside
from pkv.bench.records.results import results_of
from pkv.bench.records.shipped import shipped_part

for n_sms in (132, 28):
    groups, ms = published_beside(results_of(shipped_part("paper", n_sms)))
    of = groups["bucketed B1"]
    ratio = of[RIVAL_HERE].gpu_us / of["length_buckets"].gpu_us
    print(f"H200, {n_sms} SMs".ljust(20), f"{ratio:.2f}")
ours, theirs = (ms["bucketed B1", name] for name in ("length_buckets", RIVAL_PUBLISHED))
for words, our_ms, their_ms in zip(("published", "simulated"), ours, theirs):
    print(f"RTX 3060, {words}".ljust(20), f"{their_ms / our_ms:.2f}")

# %% [markdown]
# All four are above 1. But about half of FlashInfer's published time on this trace is its planning, says the simulator; lesson 04 takes that apart.
#
# On a GPU, this cell times one row of 65,536 tokens on yours: unsplit, split, and FlashInfer's decode on tensor cores (the GPU's units for small matrix products, which our kernels use too), if it is installed.

# %%
from pkv.bench.measuring import live

engines = ["split_kv:splits=1", "split_kv", "fa2-tensor-core", "stream"]
if live.can_time():
    print(live.time_engines([65536], llama, engines))
else:
    print("No GPU here: this cell would check these against fp64, then time them:")
    print(engines)

# %% [markdown]
# ## What to remember
#
# - Fewer programs than SMs waste SMs. Splits make more programs out of few rows.
# - A state is out and lse. States of disjoint tokens merge exactly, in any order; an empty state is neutral and is never read.
# - `split_kv` cuts all rows like the longest: two launches, and empty programs where rows are short.
# - `length_buckets` has two launches for every distinct length, and no empty programs as long as each row has at least as many tiles as splits.

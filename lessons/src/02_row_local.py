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
# # 02 Row-local bounds
#
# **`split_kv` cuts all rows like the longest, so short rows get splits without a token. Cut each row by its own length, and every split has tokens, as long as the row has a tile for it. The grid, the two launches and the arithmetic stay as they were.**
#
# [Lesson 01](01_split_kv.ipynb) ended with a choice: two launches with empty programs, or two launches for every distinct length. This lesson gets exact bounds in two launches. It also shows what that is worth: sometimes a good deal, sometimes nothing.
#
# As there: before you begin, clear the saved outputs (**Edit → Clear Outputs of All Cells**), and decide at each **Predict** before you run the cell.

# %%
import pkv

where = "in Triton's interpreter, on the CPU" if pkv.INTERPRETED else "compiled, on the GPU"
print(f"Kernels run {where}.")

# %% [markdown]
# ## The rectangle
#
# The grid of `split_kv` is a rectangle of rows x splits, launched once for each KV head. Its cells are the items. Our batch has one row of 16,384 tokens and seven of 200 to 2,000.
#
# **Predict.** We take 6 splits. How many of the 48 cells hold a token?

# %%
import torch

from pkv import viz

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
llama = pkv.Shape(
    n_q_heads=32, n_kv_heads=8, head_dim=128, page_size=16, dtype=torch.float16
)
batch = [16384, 200, 500, 800, 1100, 1400, 1700, 2000]
split = pkv.plan(batch, llama, stage="split_kv", splits=6, gpu="rtx3060")
viz.draw_rectangle([split])

# %% [markdown]
# A sixth of the longest row is longer than any of the other rows. So each of these lies in its first split, whole, and its other five find nothing. Two things are wrong with that: programs start for nothing, and a row that six could share is read by one.
#
# ## What each row would need
#
# **Row-local bounds** are the rule of lesson 01, with one word changed. A row of n tiles in S splits: split s covers the tiles from n · s // S to n · (s + 1) // S, and n counts the tiles of *the row itself*, not of the longest one.
#
# Toy table: lengths 5, 40 and 200, tiles of 16 tokens, 2 splits. The rows have 1, 3 and 13 tiles.
#
# **Predict.** Write down the items of each row, under both rules. For which rows do the rules agree?

# %%
toy = pkv.Shape(n_q_heads=8, n_kv_heads=2, head_dim=64, page_size=4, dtype=torch.float16)
print("          ", *[f"row of {length:<6}" for length in (5, 40, 200)])
for stage in ("split_kv", "row_local"):
    plan = pkv.plan([5, 40, 200], toy, stage=stage, splits=2, tile=16, gpu="rtx3060")
    ranges = [f"{begin}:{end}" for _, begin, end in plan.items.tolist()]
    rows = [ranges[first : first + 2] for first in (0, 2, 4)]
    print(f"{stage:10}", *[f"{', '.join(row):13}" for row in rows])

# %% [markdown]
# They agree for the longest row, which is its own measure in both. They agree for the row of one tile, because a tile is never cut: its second item is empty in both. They differ for the row in between, and that is where something is to be gained.
#
# ## A row of fewer tiles than splits
#
# **Predict.** A row of 33 tokens has 3 tiles. It gets 5 splits. Which items does the rule above give?

# %%
n, S, length = 3, 5, 33
bounds = [(16 * (n * s // S), min(16 * (n * (s + 1) // S), length)) for s in range(S)]
print("the rule ", *[f"{begin:>2}:{end:<2}" for begin, end in bounds])
plan = pkv.plan([33], toy, stage="row_local", splits=5, tile=16, gpu="rtx3060")
print("row_local", *[f"{begin:>2}:{end:<2}" for _, begin, end in plan.items.tolist()])

# %% [markdown]
# The items with tokens are the same. The rule scatters the empty ones between them; the stage puts them last. It counts one split per tile as long as there are tiles, and the rest are empty. So a program knows at once that it has nothing: its split's number is not below the number of tiles.
#
# **Exercise ex02_1.** That is the whole rule, so write it down: in `exercises/ex02_row_local.py`, `row_bounds` gives the range of every split of one row, the empty ones last. Save the file, then run this cell. (`hint("ex02_1")` helps.)

# %%
from pkv.course import check, hint

check("ex02_1")

# %% [markdown]
# ## The same grid, the same two launches
#
# **Predict.** Back to the batch, in 6 splits, by row-local bounds. Which of these change: launches, programs, empty programs, waves, programs with tokens per SM, bytes of K and V, bytes of partial states?

# %%
local = pkv.plan(batch, llama, stage="row_local", splits=6, gpu="rtx3060")
viz.draw_rectangle([split, local])

# %%
names = ("launches", "programs", "empty_programs", "waves", "cta_per_sm")
sizes = ("useful_kv_mib", "padded_kv_mib", "merge_moved_mib")
print(f"{'':16}{'split_kv':>10}{'row_local':>10}")
for name in names + sizes:
    old, new = (getattr(plan.counters, name) for plan in (split, local))
    print(f"{name:16}{old:10.4g}{new:10.4g}")

# %% [markdown]
# Launches, programs and waves stay, because the grid does. The empty programs are gone. `cta_per_sm`, the programs with tokens per SM, has grown. (CTA is CUDA's word for a program.)
#
# Not one byte of K and V is saved. A program of `split_kv` without a token reads none: `padded_kv_mib`, what is read beyond the rows' ends, is 0 in both. What row-local bounds avoid is programs without work. The price is the last line: each split with tokens leaves a state, which is written, read again and merged.
#
# **Exercise ex02_2.** How many programs a batch would save can be known beforehand, without a plan. Write `empty_items`: it counts the cells that hold no token, under each of the two rules.

# %%
check("ex02_2")

# %% [markdown]
# ## The kernel
#
# To cut a row like the longest, a program must know the longest row. So each program of `split_kv` looks through all lengths.
#
# **Predict.** How many lengths must a program of `row_local` read?
#
# Below is all that differs between the two kernels, after a program has found its row, its split and its KV head. Lines that begin with `-` are those of `split_kv`, lines with `+` those of `row_local`.

# %%
import difflib
import inspect

from pkv.stages.s1_split_kv import split_kv_kernel
from pkv.stages.s2_row_local import row_local_kernel


def body(kernel):
    """The kernel's lines from there on, without comments and indentation."""
    source = inspect.getsource(kernel.fn).split("// n_splits\n")[1]
    lines = [line.strip() for line in source.splitlines()]
    return [line.split("  #")[0] for line in lines if not line.startswith("#")]


changes = difflib.ndiff(body(split_kv_kernel), body(row_local_kernel))
print(*[line for line in changes if line[0] in "+-"], sep="\n")

# %% [markdown]
# One length, its own. `first_tile(s, S, n)` is n · s // S. `n_cuts` is how many splits get a tile: all of them, or one per tile of a short row. `row_ids` and `partial_offsets` are there for `length_buckets`, which shares the kernel of `split_kv`: a launch of all rows, of S splits each, finds row r's states at r · S. The `if` is new too: a program without a token leaves early. It does not load its query. (Not so where rows are unsplit: then it must write the row's result.)
#
# ## What an empty split leaves behind
#
# It may leave early, but not without a word, here as in `split_kv`. The merge launch knows nothing of lengths: it reads the states of all splits of a row. So an empty split writes the **neutral state**, the one that changes no merge: lse is -inf, and its weight exp(-inf) is 0. Its out is neither written nor read.
#
# We watch it. The row of 33 tokens in 5 splits, with q = 0 and values 0 .. 32, as in lesson 00. We fill the memory of the states with NaN, then launch the decode kernel alone, as the stage does. (`KernelArgs` turns tensors into what kernels take.)
#
# **Predict.** What do the five states hold afterwards?

# %%
from pkv.kernels.launching import KernelArgs

plan = pkv.plan([33], toy, stage="row_local", splits=5, tile=16, gpu="rtx3060")
ramp = torch.arange(33, dtype=torch.float16)[None, :, None, None].expand(1, 33, 2, 64)
probe = pkv.PagedKVCache.from_dense(ramp, ramp, [33], page_size=4)
probe_q = torch.zeros(1, 8, 64, dtype=torch.float16)  # [n_rows, n_q_heads, head_dim]
args = KernelArgs(probe_q, probe, plan, 1.0, torch.empty(1, 8, 64), torch.empty(1, 8))
outs, lses = args.partials.out.ptr, args.partials.lse.ptr
print("out", list(outs.shape), "lse", list(lses.shape))

# %%
for memory in (outs, lses):
    memory.fill_(torch.nan)
given = args.q, args.cache, args.result, args.partials
constants = args.attend, args.shape
grid = (plan.n_programs * toy.n_kv_heads,)
options = {"num_warps": args.num_warps}
row_local_kernel[grid](*given, plan.n_items, args.qk_scale, *constants, **options)
for (_, begin, end), out, lse in zip(plan.items.tolist(), outs[:, 0, 0], lses[:, 0]):
    words = f"lse ln {lse.exp():.3g}" if begin < end else f"lse {lse:g}"
    print(f"split {begin:>2}:{end:<2}  out {out:<5g}  {words}")

# %% [markdown]
# The three with tokens hold a mean, and the ln of how many they are. In the two empty ones out is the NaN that we put there.
#
# **Exercise ex02_3.** Five programs, five ranges, five states. Write what each of them does, in PyTorch: `state_of_range` attends to the tokens of one range and to no others, and gives the neutral state where there are none.

# %%
check("ex02_3")

# %% [markdown]
# What about that NaN? The merge does not touch it:

# %%
states = list(zip(outs, lses))
out, lse = pkv.merge(states)
print(f"out {out[0, 0]:g}  lse ln {lse[0].exp():.3g}")

# %% [markdown]
# **Exercise ex02_4.** `pkv.merge` takes the states of one row. The merge launch takes those of the whole batch, which lie in memory row after row. Write `merge_rows`, which merges each row's states, and lets no NaN of an empty one through.

# %%
check("ex02_4")

# %% [markdown]
# ## The other rows do not matter
#
# A row's bounds follow from its own length and the number of splits. Nothing else in the batch can move them. In `split_kv` they move with the longest row.
#
# Three rows of 40, 100 and 33 tokens, in 4 splits. We decode them together, then each alone, in fp32 (4 bytes), where out shows more of its last bits.
#
# **Predict.** Under which rule does a row get the same result alone, to the last bit? Which row does under both?

# %%
lengths = [40, 100, 33]
fine = pkv.Shape(n_q_heads=2, n_kv_heads=2, head_dim=64, page_size=4, dtype=torch.float32)
torch.manual_seed(1)
q = torch.randn(3, 2, 64)  # [n_rows, n_q_heads, head_dim]
k, v = torch.randn(2, 3, 100, 2, 64)  # each [n_rows, max_len, n_kv_heads, head_dim]


def decoded(stage, first, last):
    """Out and lse of the rows first:last, as a batch of their own."""
    rows, mine = slice(first, last), lengths[first:last]
    cache = pkv.PagedKVCache.from_dense(k[rows], v[rows], mine, page_size=4)
    plan = pkv.plan(mine, fine, stage=stage, splits=4, tile=16, gpu="rtx3060")
    return pkv.run(q[rows], cache, plan)


# %%
for stage in ("split_kv", "row_local"):
    together = decoded(stage, 0, 3)
    for row, length in enumerate(lengths):
        alone = decoded(stage, row, row + 1)
        equal = all(
            torch.equal(part[0], whole[row]) for part, whole in zip(alone, together)
        )
        close = (alone[0][0] - together[0][row]).abs().max() < 1e-5
        print(f"{stage:9} row of {length:3}: within 1e-5 {close}, every bit equal {equal}")

# %% [markdown]
# No result is wrong. `split_kv` has cut the shorter rows elsewhere, so it has added the same numbers in another order, and the last bits differ. But a server puts a request beside whichever others there are. With row-local bounds the answer does not depend on them, as long as the number of splits stays: where you count on it, pass `splits=`, for the default number looks at the batch.
#
# ## What is it worth? First, nothing
#
# No GPU is needed to ask. `pkv.simulate` plays a plan on a model of a card: a program takes the first free place on an SM, starts up, then reads its bytes, and all that read share the memory. What a start-up costs on an RTX 3060, and how fast it reads, was fitted to times that a paper published, the one that this course follows: M. Ahmed, *PersistentKV*, arXiv 2606.26666. It is a model: it charges an empty program the same start-up as any other, and does not know that ours leave early.

# %%
from pkv.cards.known import load_gpu

card = load_gpu("rtx3060")
places = card.n_sms * card.costs.programs_per_sm
print(f"{card.n_sms} SMs x {card.costs.programs_per_sm} places = {places} programs at once")
print(f"(of our kernel an SM holds {local.programs_per_sm})")
print(f"start-up of a program {card.costs.item_us:.2g} us")
print(f"a program reads up to {card.costs.program_gb_per_s:.3g} GB/s", end=", ")
print(f"all together up to {card.costs.memory_gb_per_s:.0f} GB/s")

# %% [markdown]
# The costs come from the paper's kernels. Two of those reside on an SM, so each simulated SM has two places. The counter `waves` above goes by our own kernel.
#
# **Predict.** The batch in 4 splits. Which row ends last under `split_kv`? Is the step shorter under `row_local`?


# %%
def played(splits, lengths=batch):
    """The batch in so many splits, by both rules, on the simulated card."""
    stages = ("split_kv", "row_local")
    plans = [
        pkv.plan(lengths, llama, stage, splits=splits, gpu="rtx3060") for stage in stages
    ]
    return [pkv.simulate(plan) for plan in plans]


viz.draw_timelines(played(4))

# %% [markdown]
# Row 0 ends last, in both. It is the longest row, so its cuts are the same under both rules, and so are its shares. The short rows end earlier than before, but nobody waits for them. The few microseconds that `row_local` loses go to the merge, which has more states to read.
#
# **Equal splits, equal shares of the longest row: where all wait for that row, row-local bounds gain nothing.**
#
# ## Then, a good deal
#
# **Predict.** Now 6 splits. The long row takes 6 · 8 = 48 of the 56 places, so most short rows begin late. How many programs read row 7, the last, under each rule?

# %%
viz.draw_timelines(played(6))

# %% [markdown]
# One for each KV head under `split_kv`. Rows 5 to 7 whole are not much less than a sixth of row 0, and they begin when row 0 is done. So 24 programs go on alone, then 16, then the 8 of row 7, and each reads at the speed of a single program: most of what the memory could do is left unused. Under `row_local` six times as many programs share the row, and nearly all SMs have work to the end.
#
# ## And sometimes a loss
#
# **Predict.** Does `row_local` win from 6 splits on? And does it matter where in the batch the long row stands? Programs start in the order of the grid, row by row.

# %%
print("           long row first        long row last")
print("splits  split_kv row_local   split_kv row_local   (us, simulated)")
for splits in (2, 4, 6, 8, 12, 16, 24, 32):
    first, last = played(splits), played(splits, sorted(batch))
    us = [timeline.gpu_ms * 1000 for timeline in first + last]
    print(f"{splits:6}  {us[0]:8.0f} {us[1]:9.0f}   {us[2]:8.0f} {us[3]:9.0f}")

# %% [markdown]
# Neither rule wins everywhere. With few splits, all wait for the long row. With many, `row_local` cuts short rows into crumbs: a crumb takes a start-up, as an empty program does, and leaves a state as well. And with the long row last and 8 splits, `row_local` even loses clearly. Look:

# %%
viz.draw_timelines(played(8, sorted(batch)))

# %% [markdown]
# The long row has 64 programs, for 56 places. Under `row_local` the short rows are shared so evenly that all places come free at about the same time. The long row's programs fill them together, and the last eight wait a whole round. Under `split_kv` places come free one after another, so these eight start sooner.
#
# That is bad luck with one number, but it shows a limit: *when* a program starts matters as much as *what* it reads, and a grid cannot choose that. A queue can, and lesson 03 builds one.
#
# ## More splits than fill the GPU
#
# Left alone, `split_kv` takes as many splits as fill the GPU once. `row_local` takes several times as many, if there are several rows and tiles enough. It has to guess: one row may be far longer than the others, and nobody knows before. With few splits, its programs would be busy long after all others.
#
# **Predict.** Four batches, each stage with its default. In which one does the guess cost time?

# %%
from pkv.stages.s2_row_local import LEAST_SPLITS, OVERSUBSCRIPTION

print(
    f"row_local: {OVERSUBSCRIPTION} times what fills the GPU, and at least {LEAST_SPLITS}"
)
batches = {
    "1 long, 7 short": batch,
    "8 of 4,096": [4096] * 8,
    "1 of 16,384, 63 of 512": [16384] + [512] * 63,
    "64 of 2,048": [2048] * 64,
}
for name, lengths_of_batch in batches.items():
    print(f"{name:22}", end="")
    for stage in ("split_kv", "row_local"):
        plan = pkv.plan(lengths_of_batch, llama, stage, gpu="rtx3060")
        us = pkv.simulate(plan).gpu_ms * 1000
        print(f"  {stage} {plan.launches[0].n_splits:2} splits {us:5.0f} us", end="")
    print()

# %% [markdown]
# In the last one: 64 rows of one length share the card well without any cut, and what is added are start-ups and states. That costs a few percent. Where one row is far longer than the others, the guess saves a third of the step, or far more. And with 8 equal rows, 64 programs on 56 places were too few to end together.
#
# In fairness, this is a gain of more splits, not of row-local bounds: `split_kv` has nearly all of it if you ask it for 12 splits, as the table before shows. But in `split_kv` most of those would be empty. And one number of splits cannot suit a long row and 63 short ones alike; that, too, is for the queue.
#
# ## One plan for all steps
#
# A program finds its bounds from the length that lies on the GPU when it starts. So nothing in the launch depends on lengths, and the grid only on the numbers of rows and of splits. (`split_kv` finds its longest row in the same way.) With `dynamic=True` the lengths that you plan for are upper bounds, and one plan serves every step.
#
# **Predict.** Three steps, each row grows by a token a step. How far is the one plan's result from that of a plan made for the step?

# %%
new = torch.randn(3, 2, 64)  # [n_rows, n_kv_heads, head_dim]
growing = pkv.PagedKVCache.from_dense(k, v, lengths, page_size=4, n_pages=60)
once = pkv.plan([43, 103, 36], fine, "row_local", splits=4, dynamic=True, gpu="rtx3060")
for _ in range(3):
    growing.append(new, new)
    fresh = pkv.plan(growing.lengths, fine, "row_local", splits=4, gpu="rtx3060")
    equal = torch.equal(pkv.run(q, growing, once)[0], pkv.run(q, growing, fresh)[0])
    print(growing.lengths.tolist(), "every bit equal:", equal)

# %% [markdown]
# **Exercise ex02_5.** This works because no program asks the host. Write one that plans by itself: `bounds_kernel` finds the range of every split of every row from the lengths on the GPU, a program for each. Its launch is given.

# %%
check("ex02_5")

# %% [markdown]
# A plan that is not dynamic is refused as soon as a length has changed, and a dynamic one as soon as a row outgrows its bound:


# %%
def complaint(call, *arguments):
    try:
        call(*arguments)
    except ValueError as error:
        return error


stale = fresh
growing.append(new, new)
print(complaint(pkv.run, q, growing, stale))
print(complaint(pkv.run, q, growing, once))

# %% [markdown]
# On a GPU this is worth more than a saved call. The host need not know the lengths, so it need not wait for the GPU to tell them, and the launches can be recorded once, in a *CUDA graph*, and replayed. Stages that find their bounds on the GPU need nothing from the host. `pkv.decode` takes one of these when you name no stage.

# %%
for name, stage in pkv.STAGES.items():
    print(f"{name:15} planned on the {stage.PLANNED_ON}")

# %% [markdown]
# ## The rules of this stage, and what breaks
#
# | rule | without it |
# |---|---|
# | 1. A row's bounds come from its own length | last bits that depend on the other rows; programs without work |
# | 2. An empty split writes lse -inf | the merge takes what lay there, perhaps a state of an earlier step |
# | 3. A split begins at a tile's first token | some tokens read twice, others never |
# | 4. A row's splits cover each of its tiles once | tokens lost, a wrong mean |
# | 5. A plan serves its lengths, a dynamic one its bounds | new tokens are not read |
#
# **Rule 1** you have seen. The kernel cuts by itself and never reads the plan's items. So a plan that says something else is refused, here the cuts of `split_kv`:

# %%
import dataclasses

cache = pkv.PagedKVCache.from_dense(k, v, lengths, page_size=4)
plan = pkv.plan(lengths, fine, "split_kv", splits=2, tile=16, gpu="rtx3060")
print(complaint(pkv.run, q, cache, dataclasses.replace(plan, stage="row_local")))

# %% [markdown]
# **Rule 2.** Someone saves the store as well: an empty split just leaves. In the memory of split 3 there is still a state of an earlier step, 16 tokens with mean 100.

# %%
earlier = torch.full((8, 64), 100.0), torch.full((8,), 16.0).log()
print(f"right: {pkv.merge(states)[0][0, 0]:g}")
print(f"wrong: {pkv.merge([*states[:3], earlier, states[4]])[0][0, 0]:.4g}")

# %% [markdown]
# No NaN, no error, only a wrong number, and another one in every step.
#
# **Rule 3.** Someone cuts by tokens rather than by tiles, and a split begins at token 6. The kernel looks up the pages of a tile, and takes every page from its first slot:

# %%
page_size, begin = 4, 6
first_tokens = [(begin + i) // page_size * page_size for i in range(0, 16, page_size)]
tokens = [first + slot for first in first_tokens for slot in range(page_size)]
print("right:", list(range(begin, begin + 16)))
print("wrong:", tokens)

# %% [markdown]
# Tokens 4 and 5 belong to the split before, which reads them too. Tokens 20 and 21 are read by nobody.
#
# **Rule 4.** Someone gives each split n // S tiles, and forgets the remainder: 13 tiles in 5 splits. Both rules can be checked on the plan, before anything runs.

# %%
plan = pkv.plan([200], toy, "row_local", splits=5, tile=16, gpu="rtx3060")
share = 13 // 5 * 16
short = [[0, share * s, share * (s + 1)] for s in range(5)]  # (row, begin, end)
by_tokens = [[0, 40 * s, 40 * (s + 1)] for s in range(5)]  # and rule 3 again
for items in (short, by_tokens):
    print(complaint(dataclasses.replace(plan, items=items).validate))

# %% [markdown]
# **Rule 5** you have seen: both refusals under *One plan for all steps*.
#
# ## Try it
#
# Run this cell in JupyterLab. It needs no cell above it. The batch is one row of 16,384 tokens and seven of 512.
#
# The picture starts with 8 splits. Take one away. What happens to the time, and why? Does `split_kv` do better? Which of the two ends sooner with 4 splits, and which with 12?

# %%
from pkv.viz import widgets

widgets.explore_schedule(
    rows=8, longest=16384, raggedness="one long", splits=8, sms=28, stage="row_local"
)

# %% [markdown]
# **Answer.**

# %%
for splits in (4, 6, 7, 8, 12):
    us = [timeline.gpu_ms * 1000 for timeline in played(splits, [16384] + [512] * 7)]
    print(
        f"{splits:2} splits: split_kv {us[0]:3.0f} us, row_local {us[1]:3.0f} us", end="; "
    )
    print(f"the long row has {llama.n_kv_heads * splits} programs for {places} places")

# %% [markdown]
# With 7 splits the programs of the long row just fill the card. With 8, eight of them must wait until others end, and are then nearly alone: one split more, and more than a quarter more time, under both rules. With 4 splits all wait for the long row, and `row_local` is behind by the states that it has to merge. With 12 it is ahead: no program is empty, and the shares that fill the gaps are small.
#
# ## Published and simulated
#
# The paper's times for one of its traces: 8 rows, some of 24K to 64K tokens, most of 2K to 12K, over 48 steps, on an RTX 3060. None of these was used in the fit. The times of FlashInfer, the library that it compares with, hold its own planning, those of the paper's kernels do not. The paper has no time for row-local bounds alone, so there is only the simulator's. (`workqueue` comes in lesson 03.)

# %%
from pkv.bench.loads.published import plans_of, published, simulated_ms

rows = [row for row in published() if row.log == "seed_20260624_bimodal_b8.txt"]
times = {row.configuration: f"{row.gpu_ms:.2f} ms" for row in rows}
queue = rows[-1].configuration
times |= {
    dataclasses.replace(queue, engine=stage): "" for stage in ("row_local", "split_kv")
}
print(f"{'':14} splits  published  simulated  empty programs, at most")
for step, time in times.items():
    empty = max(plan.counters.empty_programs for plan, _ in plans_of(step))
    simulated = f"{simulated_ms(step, card):.2f} ms"
    print(f"{step.engine:14} {step.splits or '':6}  {time:>9}  {simulated:>9}  {empty:5}")

# %% [markdown]
# The simulator is off by about a twentieth for FlashInfer, and less for the paper's kernels. No row of this trace is so short that one of its splits stays empty, so `row_local` and `workqueue` run the same items, in nearly the same time. `split_kv` is a few percent behind.
#
# ## Measure it
#
# Records of an NVIDIA H200. First of 28 of its SMs, as many as the simulated card has (but with faster memory): five batches, each stage with the number of splits that it takes by itself, GPU time of one layer, caches emptied before each call, the median, planning not counted. `one_long(64,64k)` is one row of 65,536 tokens and 63 of 512. `short(128)` is 128 rows of 256 to 2,048 tokens. `zipf(8,64k)` is eight rows of 65,536, a half of that, a third, and so on. In the `bimodal` ones every fourth row has 16,384 tokens, the others an eighth.
#
# **Predict.** On which batch is `row_local` worth most, and on which does it lose to `split_kv`? The triangle is the queue of lesson 03: where is it ahead of both?

# %%
viz.draw_recorded("bounds", grid="smoke", n_sms=28)

# %% [markdown]
# The more rows, the fewer splits fill the GPU, so `split_kv` hardly cuts any row, and all wait for the longest. `row_local` guesses that one row may be long and cuts more, but all rows alike: that is still too little for one row among 64, and far too much for 128 short ones, where the start-ups and states that the simulator charged for are real. The queue gives each row as many items as it needs. It is ahead of both on three of the five. On `zipf(8,64k)` it is a little behind `row_local`, and on `short(128)` `split_kv`, which cuts no row there, stays ahead of both.
#
# **Predict.** The paper's traces, means over five seeds: on how many of the ten is `row_local` ahead? (With one row live there is nothing to compare: the cuts are the same.)

# %%
viz.draw_recorded("bounds", n_sms=28)

# %% [markdown]
# **Predict.** And with all 132 SMs, where `split_kv` cuts several times as often by itself?

# %%
viz.draw_recorded("bounds")

# %% [markdown]
# With that many splits of its own `split_kv` leaves little to gain, and on more than half of the traces the further cuts of `row_local` are a loss. The queue is behind on none.
#
# The paper's trace of the section before, on the H200. The memory is faster, so compare the order, not the times; and no time here holds planning, not even FlashInfer's (`fa2-tensor-core`, the kernel that the paper timed).

# %%
from pkv.bench.records.results import results_of
from pkv.bench.records.shipped import shipped_part

load = "trace bimodal B8 seed 20260624"
measured = [results_of(shipped_part("paper", n_sms))[load] for n_sms in (28, 132)]
print(f"{'us a step':15}  28 SMs  132 SMs")
for engine in ("fa2-tensor-core", "length_buckets", "workqueue", "row_local", "split_kv"):
    print(f"{engine:15}", *[f"{results[engine].gpu_us:7.0f} " for results in measured])

# %% [markdown]
# The order is not the same everywhere. On the whole card buckets come last, as on the RTX 3060, and the others lie close together. On the slice it is FlashInfer and `split_kv` that come last, far behind. There, memory is fast and programs are few, so nothing hides a program that is left alone with a long row: the slice shows more of what schedules are worth than an RTX 3060 would.
#
# On a GPU, this cell times the batch of this lesson on yours: `split_kv` and `row_local` in 12 splits, `row_local` left alone, and FlashInfer, if it is installed.

# %%
from pkv.bench.measuring import live

engines = [
    "split_kv:splits=12",
    "row_local:splits=12",
    "row_local",
    "fa2-tensor-core",
    "stream",
]
if live.can_time():
    print(live.time_engines(batch, llama, engines))
else:
    print("No GPU here: this cell would check these against fp64, then time them:")
    print(engines)

# %% [markdown]
# ## What to remember
#
# - Row-local bounds cut each row by its own tiles. Grid and launches stay; the empty programs go, as far as rows have tiles.
# - They save programs without work, not bytes of K and V. A split with no tile writes the neutral state, lse -inf, and leaves early.
# - A row's bits depend on its own length and on the number of splits, not on its neighbours.
# - The longest row's shares are those of `split_kv`. Where all wait for it, only more splits help, so the default takes more than fill the GPU.
# - The bounds are found on the GPU, so one dynamic plan serves every step.
# - A grid still starts a program for every cell, in a fixed order. [Lesson 03](03_workqueue.ipynb) does without both.

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
# # 03 A compact queue
#
# **Write the items down in a list, and let each program read which one is its own. Then no program is launched for nothing, any cut of the rows will do, and a step takes two launches. How much that saves depends on the rows. You will count it.**
#
# [Lesson 01](01_split_kv.ipynb) ended with a choice: two launches with empty programs (`split_kv`), or none that is empty, at two launches for every distinct length (`length_buckets`). [Lesson 02](02_row_local.ipynb)'s stage `row_local` keeps the two launches, and cuts each row by the row's own length. But a row of fewer tiles than splits still has empty items.
#
# As before: clear the saved outputs first (**Edit → Clear Outputs of All Cells**), and decide at each **Predict** before you run the cell.

# %%
import pkv

where = "in Triton's interpreter, on the CPU" if pkv.INTERPRETED else "compiled, on the GPU"
print(f"Kernels run {where}.")

# %% [markdown]
# ## From a rectangle to a list
#
# `split_kv` and `row_local` launch a rectangle: rows x splits, for each KV head. A program computes from its number which row and which split are its own. That works only if every row has the same number of splits, whether it has tokens for them or not.
#
# The toy batch of this lesson: rows of 5, 40 and 0 tokens, tiles of 16, 2 splits per row. A row of 0 tokens has just been freed, and still stands in the batch. `row_local` deals out a row's tiles as evenly as it can; if a row has fewer tiles than splits, its last splits are empty.
#
# **Predict.** The rectangle has six items. How many hold no token?

# %%
import dataclasses
import inspect
import itertools
import statistics

import numpy as np
import torch

from pkv import viz

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
toy = pkv.Shape(n_q_heads=8, n_kv_heads=2, head_dim=64, page_size=4, dtype=torch.float16)
lengths = [5, 40, 0]
rectangle = pkv.plan(lengths, toy, stage="row_local", splits=2, tile=16, gpu="rtx3060")
viz.draw_queue(rectangle)

# %% [markdown]
# Row 0 has one tile, so its second split is empty. Row 2 has none. Now leave out what is dashed. That is all that stage `workqueue` does here:

# %%
queue = pkv.plan(lengths, toy, stage="workqueue", splits=2, tile=16, gpu="rtx3060")
print(queue.items.tolist())
viz.draw_queue(queue)

# %% [markdown]
# **Exercise ex03_1.** You have seen the items and the rule that cuts them. Open `exercises/ex03_workqueue.py` and write `build_queue`: the list of all items that hold tokens, for any lengths. `hint("ex03_1")` in a cell of your own helps.

# %%
from pkv.course import check, hint

check("ex03_1")

# %% [markdown]
# ## Three small arrays
#
# In the rectangle, split s of row r was item r · 2 + s. In the list it is not: rows have as many items as they need. So a plan says where things are, in three arrays:
#
# - `partial_offsets`: the states of row r lie at partial_offsets[r] : partial_offsets[r + 1]. Item i leaves its state at i.
# - `program_offsets`: program p takes the entries program_offsets[p] : program_offsets[p + 1] of the list. Here each program takes one.
# - `item_order`: entry e is item item_order[e]. None means: as listed.
#
# **Predict.** The three items are (0, 0:5), (1, 0:16) and (1, 16:40). Write down `partial_offsets`, four numbers for three rows. Which rows must be merged?

# %%
print("partial_offsets", queue.partial_offsets.tolist())
print("program_offsets", queue.program_offsets.tolist())
print("item_order     ", queue.item_order)
for launch in queue.launches:
    print(f"{launch.kernel:6} rows {launch.rows}")

# %% [markdown]
# Row 1 has two states, at 1:3, so it is merged. Row 0 has one item, and one is no split: its program writes the result itself. Row 2 has none: its range is 3:3, and no program decodes it. It stands in the merge launch all the same. A merge of no states writes out 0 and lse -inf, which is the result of a row without tokens (lesson 00). Somebody must write it.
#
# **Exercise ex03_2.** Rows without items are what goes wrong here most easily. In `exercises/ex03_workqueue.py`, write `partial_offsets`: where each row's states begin.

# %%
check("ex03_2")

# %% [markdown]
# ## The kernel only reads who it is
#
# This is the queue's kernel, for one entry of the list (`pkv/stages/s3_workqueue.py`):

# %%
from pkv.stages.s3_workqueue import attend_item

print(inspect.getsource(attend_item.fn))

# %% [markdown]
# Lesson 01's kernel asked for the longest row and for the number of splits, and divided. This one does four loads: which item, its row, its begin, its end. The rest is the same in all stages: attend, and store a state. Two more loads, of `partial_offsets`, tell whether the item is its row's only one. If so, it is stored as the result.
#
# The same in Python, for the probe of lesson 00: q is 0, and the values of a row are 0, 1, 2, ... The memory for the states is not cleared before a step. It may hold anything, and here that is NaN.


# %%
def state_of(begin, end):
    """Out [1, 1] and lse [1] of the tokens begin:end: scores 0, values their own numbers."""
    values = torch.arange(begin, end).double()
    return values.mean()[None, None], torch.tensor([end - begin]).double().log()


def by_hand(items, partial_offsets, order):
    """Out of each row, by the list."""
    never_written = torch.tensor([[torch.nan]]).double(), torch.tensor([torch.nan]).double()
    states = [never_written] * len(items)
    for index in order:  # a program each
        _, begin, end = items[index]
        states[index] = state_of(begin, end)
    ranges = itertools.pairwise(partial_offsets)
    return [pkv.merge(states[i:j])[0].item() if i < j else 0.0 for i, j in ranges]


# %% [markdown]
# **Predict.** What is the out of each row, for 5, 40 and 0 tokens?

# %%
ramp = torch.arange(40, dtype=torch.float16)[None, :, None, None].expand(3, 40, 2, 64)
cache = pkv.PagedKVCache.from_dense(ramp, ramp, lengths, page_size=4, seed=1)
out, lse = pkv.run(torch.zeros(3, 8, 64).half(), cache, queue)
print("the kernel:", out[:, 0, 0].tolist())
print(
    "by hand:   ", by_hand(queue.items.tolist(), queue.partial_offsets.tolist(), [0, 1, 2])
)

# %% [markdown]
# ## Any plan runs through it
#
# The kernel reads its list and asks nothing else. So the items of any stage can be handed to it. `requeue` does that, with the empty items or without them.
#
# **Predict.** Random numbers, 5 splits, so that many items are empty. We take `row_local`'s items through `row_local`'s own kernel, through the queue's, and through the queue's without the empty ones. Which of the results agree in every bit?

# %%
from pkv.stages.s3_workqueue import requeue

lengths = [5, 40, 0, 100]
torch.manual_seed(2)
q = torch.randn(4, 8, 64).half()  # [n_rows, n_q_heads, head_dim]
k, v = torch.randn(2, 4, 100, 2, 64).half()  # each [n_rows, max_len, n_kv_heads, head_dim]
cache = pkv.PagedKVCache.from_dense(k, v, lengths, page_size=4, seed=5, n_pages=60)
cut = pkv.plan(lengths, toy, stage="row_local", splits=5, gpu="rtx3060")
own = pkv.run(q, cache, cut)
for plan in (requeue(cut), requeue(cut, drop_empty=True)):
    same = all(torch.equal(a, b) for a, b in zip(pkv.run(q, cache, plan), own))
    print(f"{plan.n_items:2} of {cut.n_items} items, every bit equal: {same}")

# %% [markdown]
# All of them. The same items mean the same arithmetic, whoever does it. And a dropped item changes nothing, because it added nothing: an empty state weighs exp(-inf) = 0, so the merge added 0 for it, and x + 0 is x in every bit. This is not rounding that happens to be small.
#
# It works for every stage. `length_buckets` has a launch or two for each distinct length; in the list they become two in all:

# %%
for stage in ("split_kv", "length_buckets", "row_local"):
    theirs = pkv.plan(lengths, toy, stage=stage, splits=3, gpu="rtx3060")
    listed = requeue(theirs, drop_empty=True)
    want, got = pkv.run(q, cache, theirs), pkv.run(q, cache, listed)
    same = all(torch.equal(a, b) for a, b in zip(want, got))
    print(f"{stage:14} launches {len(theirs.launches)} -> {len(listed.launches)},", end=" ")
    print(f"items {theirs.n_items:2} -> {listed.n_items}, every bit equal: {same}")

# %% [markdown]
# ## The order of the list
#
# An SM holds only so many programs. The GPU starts them in the order of the list, and when one ends, the next one starts in its place. So the list decides who starts last. An ordering is a plain function from items to their order:

# %%
from pkv.stages.s3_workqueue import ORDERINGS, longest_first

print(list(ORDERINGS))

# %% [markdown]
# **Predict.** What is `longest_first` of the three items (0, 0:5), (1, 0:16), (1, 16:40)?

# %%
print(longest_first(queue.items).tolist())

# %% [markdown]
# **Exercise ex03_3.** The order is a list of indices, and the items stay where they are. In `exercises/ex03_workqueue.py`, write `longest_first`.

# %%
check("ex03_3")

# %% [markdown]
# To see time, we *play* plans on a GPU that you need not have. `pkv.simulate` deals a plan's programs to the SMs of an RTX 3060. Each program waits for its start-up and then reads its tokens; all programs share the memory. No kernel runs, and all times below are simulated, until the section that says how far they are from measured ones.
#
# The costs of this RTX 3060 come from the paper that this course follows. Of its programs an SM held 2.
#
# Eight rows, not split: seven of 1,000 tokens, and last in the list one of 8,000. There are 8 KV heads.

# %%
from pkv.cards.known import load_gpu

llama = pkv.Shape(
    n_q_heads=32, n_kv_heads=8, head_dim=128, page_size=16, dtype=torch.float16
)
card = load_gpu("rtx3060")
places = card.n_sms * card.costs.programs_per_sm
print(f"{card.n_sms} SMs have places for {places} programs: {places // 8} items at a time")

# %% [markdown]
# **Predict.** Which item has to wait? By how much is the step longer as listed than longest first?

# %%
last_long = [1000] * 7 + [8000]


def play(lengths, gpu=card, stage="workqueue", **options):
    return pkv.simulate(pkv.plan(lengths, llama, stage=stage, gpu=gpu, **options), gpu)


orders = [play(last_long, splits=1, ordering=name) for name in ORDERINGS]
viz.draw_timelines(orders, list(ORDERINGS))

# %% [markdown]
# As listed, the long row is the eighth item and waits until a short one has ended. Longest first, a short one waits instead, and hides behind the long row. What starts last should be short.
#
# But no order makes a step shorter than its longest item. In both pictures most SMs are idle, and only a cut can change that.
#
# **Predict.** The same eight rows on 32 SMs of this kind. What does the order do there?

# %%
larger = dataclasses.replace(card, n_sms=32)
for name in ORDERINGS:
    timeline = play(last_long, larger, splits=1, ordering=name)
    print(f"{name:13} {timeline.gpu_ms * 1000:.1f} microseconds")

# %% [markdown]
# Nothing: 64 places for 64 programs, so all start at once. Then the plan leaves `item_order` out, and the kernel has one load less. If you do not ask for an order, `pkv.plan` decides by this rule: as listed if all items can start at once, longest first otherwise. (It counts on as many of *our* programs as fit on an SM, which may be more than 2.)
#
# **Exercise ex03_4.** Items, offsets, order: now you have all that the kernel reads. In `exercises/ex03_workqueue.py`, write `queue_kernel`: which entry and which KV head are mine, which item is that, and where does its state belong? The launcher `decode_queue` is given, but for its first line, which you delete.

# %%
check("ex03_4")

# %% [markdown]
# The queue that you have written can plan for the library, and your tile loop of lesson 01 can do what it plans. Where one of them is not there yet, or not right, the solution's runs in its place.

# %%
from pkv.bench.accuracy import Yardstick
from pkv.course import learner_parts

parts = learner_parts("plan", "attend_tokens")
out, lse = pkv.decode(q, cache, parts=parts, return_lse=True)
plan = pkv.plan(lengths, pkv.Shape.of(q, cache), "workqueue", parts=parts, gpu="rtx3060")
print(
    plan.n_items,
    "items; within the tolerance of fp64:",
    Yardstick(q, cache).measure(out, lse).ok,
)

# %% [markdown]
# ## Cut by an equal share
#
# A list takes any number of splits per row. Which should it be? Programs that all read the same number of tokens end together. So not each row gets the same number of *splits*, but each program gets the same **share** of tiles, and a long row gets more programs. `equal_splits` looks for the shortest share whose items still have places.
#
# **Predict.** Rows of 4, 40 and 0 tiles, and places for 11 items. What is the share, and how many splits does each row get? And with 22 places?

# %%
from pkv.stages.s3_workqueue import equal_splits

n_tiles = np.array([4, 40, 0])
for n_places in (11, 22):
    print(f"{n_places} places: splits {equal_splits(n_tiles, n_places).tolist()}")

# %% [markdown]
# A share of 4 tiles: 1 + 10 items. With 22 places a share of 2: 2 + 20. Ten times the tiles, ten times the splits. (If there are many rows for the places, the list is made for twice the places, four times, and so on, until it has room for two items per row. The GPU then fills its places more than once.)
#
# (Two numbers of places occur in this lesson. A plan counts on *our* kernel, of which more programs fit on an SM. The pictures play the *paper's*, 2 per SM. The next cell prints what the plan counts on.)
#
# Now a batch that comes back until the end of this lesson: one row of 16,384 tokens, and seven of 200 to 2,000.
#
# **Predict.** With 4 splits for every row there are 32 items. Without `splits=`, the queue makes how many? More, or fewer?

# %%
from pkv.stages.sizing import even_programs

ragged = [16384, 2000, 1500, 1000, 700, 500, 300, 200]
shared = pkv.plan(ragged, llama, stage="workqueue", gpu="rtx3060")
counts = np.diff(shared.partial_offsets)
for row, (length, n_items) in enumerate(zip(ragged, counts)):
    print(
        f"row {row}: {length:6,} tokens in {n_items:2} items of about {length / n_items:4.0f}"
    )
print(f"{shared.n_items} items for {llama.n_kv_heads} KV heads:", end=" ")
places = card.n_sms * even_programs(shared.programs_per_sm)
print(f"{shared.n_items * llama.n_kv_heads / places:g} times the {places} places")

# %%
pair = [play(ragged, splits=4), pkv.simulate(shared, card)]
viz.draw_timelines(pair, ["4 splits each", "equal share"])

# %% [markdown]
# With 4 splits each, row 0's four items (for 8 KV heads, 32 programs) go on reading when the others have long ended. Few SMs count as idle then, because each still has a program that reads. But so few programs cannot read as fast as the memory could:

# %%
most = 32 * card.costs.program_gb_per_s
print(
    f"32 programs read at most {most:.0f} GB/s, the memory {card.costs.memory_gb_per_s:.0f}"
)

# %% [markdown]
# With an equal share there are fewer items, and no program has much more to read than the others.
#
# Is an equal share always better? No. We try every equal number of splits up to 32, on five batches, and print the best of them beside the queue's own cut. (The best equal number can only be found by trying. The equal share is computed.)
#
# **Predict.** In which of these batches can the equal share hardly win anything?

# %%
batches = {
    "one of 16,384, seven of 200 to 2,000": ragged,
    "one of 65,536, seven of 512": [65536] + [512] * 7,
    "one of 32,768, 31 of 512": [32768] + [512] * 31,
    "two of 65,536": [65536] * 2,
    "eight of 16,384": [16384] * 8,
}
print("simulated microseconds                 best equal number      own cut")
for name, rows in batches.items():
    best, splits = min((play(rows, splits=s).gpu_ms * 1000, s) for s in range(1, 33))
    own_cut = play(rows).gpu_ms * 1000
    print(f"{name:38} {best:5.0f} with {splits:2} splits {own_cut:12.0f}")

# %% [markdown]
# In our batch the right equal number is even a little ahead, if one knows it. With one very long row among short ones, the equal share is ahead of all equal numbers. With eight equal rows it is clearly behind: equal splits *are* an equal share there, and what counts is only how well the last programs fill the SMs.
#
# **Predict.** Lesson 01's `split_kv` cuts all rows at the bounds of the longest. Take its plan with as many splits as row 0 got above, and drop what is empty. How many items has each row?

# %%
like_longest = pkv.plan(
    ragged, llama, stage="split_kv", splits=int(counts[0]), gpu="rtx3060"
)
listed = requeue(like_longest, drop_empty=True)
print(f"split_kv: {like_longest.n_items} items, without the empty ones {listed.n_items}")
print("items per row", np.diff(listed.partial_offsets).tolist())
print("queue's own  ", counts.tolist())
for name, plan in (("split_kv's bounds", listed), ("queue's own", shared)):
    begin, end = plan.partial_offsets[1:3]
    row_1 = (plan.items[begin:end, 2] - plan.items[begin:end, 1]).tolist()
    us = pkv.simulate(plan, card).gpu_ms * 1000
    print(f"{name:17} row 1 in items of {row_1}: {us:.0f} microseconds")
in_order = dataclasses.replace(listed, item_order=longest_first(listed.items))
print(f"split_kv's, longest first: {pkv.simulate(in_order, card).gpu_ms * 1000:.0f}")

# %% [markdown]
# The same numbers of items. Bounds at equal distances are nearly an equal share, too. But not quite: there each row ends in a rest, which may be short, as row 1 shows. The queue deals out the tiles of a row evenly, so that its longest items of that row are shorter. That is the difference between the two times. (The list of `split_kv` is not sorted, either. The last line says that sorting changes nothing here.) What `split_kv` lacked most was the list: without it, it launches the whole rectangle.
#
# ## What the paper counts
#
# The queue is the idea of a paper (M. Ahmed, *PersistentKV*, arXiv 2606.26666). It counts what its schedules do over **traces**: requests that come and go, step by step. The draws are published, so the same requests can be drawn again. Here `steps` gives the row lengths of each step, and `count` the means over the steps.

# %%
from pkv.bench.loads.traces import make_trace, steps_of


def steps(trace, seed=20260623, max_active=8):
    n_requests, n_steps = (16, 64) if max_active == 1 else (24, 48)
    return steps_of(make_trace(trace, seed, n_requests, max_active), max_active, n_steps)


def count(trace, stage, splits, max_active=8):
    """Useful KV in MiB, launches, programs with tokens per SM, states in MiB."""
    options = {"stage": stage, "splits": splits, "tile": 32, "gpu": "rtx3060"}
    plans = [
        pkv.plan(rows, llama, **options) for rows in steps(trace, max_active=max_active)
    ]
    names = ("useful_kv_mib", "launches", "cta_per_sm", "merge_state_mib")
    return [
        statistics.fmean(getattr(plan.counters, name) for plan in plans) for name in names
    ]


# %% [markdown]
# The paper's five main runs. (A CTA is a program.)

# %%
print("trace     rows  stage          splits   KV MiB  launches  CTA per SM  states MiB")
for trace, rows, stage, splits in [
    ("bimodal", 8, "length_buckets", 32),
    ("bimodal", 8, "workqueue", 20),
    ("uniform", 8, "workqueue", 24),
    ("zipf", 8, "workqueue", 28),
    ("bucketed", 1, "length_buckets", 32),
]:
    kv, launches, ctas, states = count(trace, stage, splits, rows)
    print(f"{trace:9} {rows:4}  {stage:14} {splits:6} {kv:8.1f}", end="")
    print(f" {launches:9.2f} {ctas:11.1f} {states:11.2f}")

# %% [markdown]
# Each of these numbers is the published one, to the last digit (a test of pkv compares them with the paper's logs).
#
# **Exercise ex03_5.** No kernel has run for them: they are counted from items and lengths. In `exercises/ex03_workqueue.py`, write `counters`. The last property that is checked is this table.

# %%
check("ex03_5")

# %% [markdown]
# From the first two lines the paper draws two conclusions. Look closely at what is compared.
#
# **"16 → 2 launches".** **Predict.** How many launches do `split_kv` and `row_local` take for the same steps?

# %%
for stage in ("length_buckets", "split_kv", "row_local", "workqueue"):
    print(f"{stage:14} {count('bimodal', stage, 20)[1]:5.2f} launches per step")

# %% [markdown]
# The sixteen are those of the buckets, with eight rows of eight lengths. The queue does not save them against `row_local`, which has two as well.
#
# **"Merge state −37%".** That compares 32 splits in buckets with 20 in the queue. **Predict.** What is left of it at equal splits?

# %%
for in_buckets, in_queue in [(32, 20), (20, 20), (32, 32)]:
    buckets = count("bimodal", "length_buckets", in_buckets)[3]
    queued = count("bimodal", "workqueue", in_queue)[3]
    print(f"{in_buckets} against {in_queue} splits: {queued / buckets - 1:+.1%}")

# %% [markdown]
# Nothing. Fewer splits leave fewer states, in any stage.
#
# **And what does the queue drop?** Splits without tokens. In `row_local`, a row has those only if it has fewer tiles than splits. **Predict.** The paper's shortest prompts have 2,048 tokens. How many of `row_local`'s items does the queue drop on these traces, in tiles of 32 tokens and with 32 splits? We count the steps of the paper's five seeds.

# %%
seeds = range(20260623, 20260628)
for trace in ("uniform", "bimodal", "zipf", "bucketed", "homogeneous", "one_long"):
    n_empty, n_items, shortest, same = 0, 0, 2**31, True
    for rows in (rows for seed in seeds for rows in steps(trace, seed)):
        cut, queued = (
            pkv.plan(rows, llama, stage, splits=32, tile=32, gpu="rtx3060")
            for stage in ("row_local", "workqueue")
        )
        n_empty, n_items = n_empty + cut.n_items - queued.n_items, n_items + cut.n_items
        shortest = min(shortest, *rows)
        same = same and np.array_equal(cut.items, queued.items)
    print(f"{trace:12} shortest row {shortest:6,} = {-(-shortest // 32):5,} tiles,", end="")
    print(f" dropped {n_empty:6,} of {n_items:,} items, same items: {same}")

# %% [markdown]
# On the five traces of the paper the queue drops nothing, at no seed: it has the very items of `row_local`. The last trace is ours: one row of 64k tokens among rows of 512. There more than a third are empty.
#
# ## Where dropping pays: short rows
#
# Rows of 200, 16, 40, 5 and 3,000 tokens, tiles of 16, 20 splits. **Predict.** How many of the 100 items hold tokens?

# %%
short = [200, 16, 40, 5, 3000]
cut = pkv.plan(short, llama, stage="row_local", splits=20, gpu="rtx3060")
kept = requeue(cut, drop_empty=True)
viz.draw_queue(cut)

# %%
viz.draw_queue(kept)

# %% [markdown]
# Now the time. An empty program costs its start-up in this model: it takes a place, and gives it back. (`row_local`'s empty programs do not even load the query, so they may cost less than that. On a GPU the last cell measures it.)
#
# **Predict.** Three batches, `row_local` at 20 splits, and then the same items without the empty ones. In which does the step get shorter? And is it better still to let the queue cut by itself (the last column)?

# %%
trace_step = steps("bimodal")[0]
rows_of = {
    "a step of the paper's trace": trace_step,
    "the five rows above": short,
    "64 rows of 5 to 200": [16, 40, 5, 200] * 16,
}
print(f"start-up of a program: {card.costs.item_us:.1f} microseconds")
print("simulated microseconds         dropped   row_local   dropped out   own cut")
for name, rows in rows_of.items():
    cut = pkv.plan(rows, llama, stage="row_local", splits=20, gpu="rtx3060")
    kept = requeue(cut, drop_empty=True)
    before, after = (pkv.simulate(plan, card).gpu_ms * 1000 for plan in (cut, kept))
    gone = f"{cut.n_items - kept.n_items} of {cut.n_items}"
    print(f"{name:28} {gone:>12} {before:9.0f} {after:11.0f}", end="")
    print(f" {play(rows).gpu_ms * 1000:11.0f}")

# %% [markdown]
# Where nothing is dropped, nothing is gained. With short rows it is much. The last column says that the better answer to short rows is not to drop splits but not to make them: a row of three tiles has no use for 20.
#
# ## Who decides: all at equal splits
#
# Four schedules of our ragged batch, 20 splits where a stage lets us choose. FlashInfer, a library that many servers use, decides for itself. Stage `flashinfer` plans as it does ([lesson 04](04_adaptive.ipynb) has the rule).
#
# **Predict.** Order these four by time: `split_kv`, `row_local`, `workqueue`, `flashinfer`. Which of them are close together?

# %%
timelines = [
    play(ragged, stage=name, splits=20) for name in ("split_kv", "row_local", "workqueue")
]
timelines.append(play(ragged, stage="flashinfer"))
viz.draw_timelines(timelines)

# %%
full = pkv.plan(ragged, llama, stage="split_kv", splits=20, gpu="rtx3060")
without = pkv.simulate(requeue(full, drop_empty=True), card)
names = ["split_kv", "row_local", "workqueue", "flashinfer", "split_kv, requeued"]
for name, timeline in zip(names, [*timelines, without]):
    counters = timeline.plan.counters
    print(
        f"{name:18} {timeline.gpu_ms * 1000:3.0f}: {counters.programs:5} programs", end=""
    )
    print(f" ({counters.empty_programs:4} empty), us:", end="")
    for launch, (begin, end) in zip(timeline.plan.launches, timeline.launch_us):
        print(f" {launch.kernel} {end - begin:4.0f}", end="")
    print(f", planning {timeline.fixed_us:3.0f}" if timeline.fixed_us else "")

# %% [markdown]
# At equal splits our three stages are within a few per cent of each other, although most programs of `split_kv` are empty. Are empty programs free, then? No. The last line is the plan of `split_kv` through the queue's kernel, with the empty ones dropped: 331 microseconds instead of 363. Each program that starts costs its start-up, with tokens or without. The first lines do not show it, because there all three start about as many programs: where `split_kv` has empty ones, `row_local` and the queue cut short rows into up to 20 crumbs each. Each crumb costs a start-up too, and leaves a state to merge.
#
# FlashInfer makes 8 items of the 8 rows. For 8 KV heads these are 64 programs without any split. Its rule counts on 2 per SM, 56 in all, and splits nothing where there are more from the start. So the longest row stays whole, and 8 programs read it alone. The hatched part is FlashInfer's planning, which the published measurements count in each step. Without it, FlashInfer is still last here.
#
# So two things count. *The cut*: with 1 item of the long row FlashInfer is far behind. And *how many programs start*, empty ones and crumbs alike. The list serves both: it makes every cut possible, and starts no program that the cut does not need.
#
# **Exercise ex03_6.** FlashInfer's 64 programs find 56 places: how long do they take together, if all are equal, and if they are not? In `exercises/ex03_workqueue.py`, write `makespan`: when the last program has ended, if programs start in the order of the list. (Unlike `pkv.simulate`, it is told how long each program takes.) Then try it on the durations [1, 1, 1, 1, 1, 1, 1, 8] and 7 places, as listed and longest first.

# %%
check("ex03_6")

# %% [markdown]
# ## The price: somebody has to write the list
#
# `split_kv` and `row_local` find their bounds on the GPU, from the lengths that lie there. The list is made on the host, whenever a length changes: at every step. One list then serves all layers of the model.

# %%
for name, stage in pkv.STAGES.items():
    if name in ("split_kv", "length_buckets", "row_local", "workqueue"):
        print(f"{name:14} planned on: {stage.PLANNED_ON}")

# %% [markdown]
# **Predict.** How long does `pkv.plan` take for our batch: about 5 microseconds, 50, or 500? And how many bytes must be copied to the GPU?

# %%
from pkv.bench.records.results import results_of
from pkv.bench.records.shipped import shipped_part

trace = results_of(shipped_part("paper", 132))["trace bimodal B8 seed 20260623"]
print(f"recorded: {trace['workqueue'].plan_us:.0f} microseconds to plan 8 rows")
names = ("items", "program_offsets", "partial_offsets", "item_order")
print(f"{sum(getattr(shared, name).nbytes for name in names)} bytes in one copy")
for n_layers in (1, 32):
    ms = n_layers * play(ragged).gpu_ms
    print(f"{n_layers:2} layers of this step, simulated: {ms:5.2f} milliseconds")

# %% [markdown]
# That is a time from a record, of eight rows like ours, copying included. Other work ran between two plans and had emptied the processor's caches, as a model would; called again and again, `pkv.plan` is quicker. Beside one layer that is a lot. Beside the 32 layers of Llama-3-8B, which all use the same list, it is little. And the host must know the lengths. If they lie on the GPU only, it has to wait for them.
#
# ## Measured: the paper's RTX 3060
#
# The paper's logs hold the mean time of a step for each trace. They are the only RTX 3060 measurements of these schedules that there are, so the simulator is checked against them. Its costs were fitted to logs of seed 20260623 (*fit*). Seed 20260624 it has never seen (*judge*).
#
# **Predict.** How far off is the simulator, in the median, on the seed that it has not seen? Which of the three engines has the shortest published time?

# %%
from pkv.bench.loads.published import published, simulated_ms

engines = ("length_buckets", "workqueue", "flashinfer")
logs, errors = {}, {"fit": [], "judge": []}
for row in published():
    run = row.configuration
    if row.log.startswith("seed_") and run.max_active == 8:
        simulated = simulated_ms(run, card)
        logs.setdefault((run.seed, run.trace, row.role), {})[run.engine] = row, simulated
        errors[row.role].append(abs(simulated / row.gpu_ms - 1))

print("ms per step, 8 rows, RTX 3060: published / simulated")
print(" " * 23, "".join(f"{engine:>17}" for engine in engines))
for (seed, trace, role), found in logs.items():
    pairs = [f"{found[name][0].gpu_ms:.3f} / {found[name][1]:.3f}" for name in engines]
    print(f"{seed} {trace:8} {role:5}", "".join(f"{pair:>17}" for pair in pairs))
for role, found in errors.items():
    print(f"{role:5}: median error {statistics.median(found):.1%}, worst {max(found):.1%}")

# %% [markdown]
# The errors are those of these six logs. Lesson 04 has them for all published rows.
#
# In all six lines the queue has the shortest published time. It has it against buckets, with other splits and 16 launches, and against a FlashInfer that plans inside each timed step, while the queue's lists had been made beforehand. Neither compares like with like. So we look at two more numbers: FlashInfer's published time less its planning, and `row_local` at the queue's splits. That one only the simulator knows.
#
# **Predict.** Is the queue still first everywhere?

# %%
planning = card.costs.flashinfer_plan_us / 1000
print(f"FlashInfer's planning, fitted: {planning:.3f} ms per step")
print("                      published, ms           simulated, ms")
print("                   flashinfer*  workqueue    workqueue  row_local")
for (seed, trace, _), found in logs.items():
    queue_row, queue_ms = found["workqueue"]
    alone = found["flashinfer"][0].gpu_ms - planning
    as_row_local = dataclasses.replace(queue_row.configuration, engine="row_local")
    print(f"{seed} {trace:8} {alone:11.3f} {queue_row.gpu_ms:10.3f}", end="")
    print(f" {queue_ms:12.3f} {simulated_ms(as_row_local, card):10.3f}")
print("* less its planning")

# %% [markdown]
# Against FlashInfer it is first in five lines of six, and by less. Against `row_local` about one per cent is left: on these traces the two have the same items, and differ in their order alone. Lesson 04 takes up who should run when.
#
# ## The rules of this stage, and what breaks
#
# | rule | without it |
# |---|---|
# | 1. Every token of a row lies in exactly one of its items | tokens lost, or counted twice: a wrong mean |
# | 2. Row r's states lie at partial_offsets[r] : partial_offsets[r + 1] | a row takes its neighbour's state |
# | 3. The order names every item exactly once | a state is merged that nobody has written |
# | 4. A row without an item stands in the merge launch | its result is whatever the memory held |
# | 5. A list serves the lengths that it was made for | new tokens are not read |
#
# The kernel believes its list. So the list must be checked before, and that is possible because it is data. We break the toy plan:

# %%
good = queue.validate()


def why_not(**changes):
    try:
        dataclasses.replace(good, **changes).validate()
    except ValueError as error:
        return str(error).removeprefix("plan of stage 'workqueue': ")


# %%
decode, merge = good.launches
lost, twice = good.items.copy(), good.items.copy()
lost[1, 2] = 8  # row 1's first item ends too early
twice[2, 1] = 0  # its second one begins at 0
one_less = dataclasses.replace(decode, end=2)
dropped = {"items": good.items[:2], "program_offsets": [0, 1, 2]}
dropped |= {"partial_offsets": [0, 1, 2, 2], "launches": (one_less, merge)}
print("1 an item dropped:   ", why_not(**dropped))
print("1 a token lost:      ", why_not(items=lost))
print("1 tokens twice:      ", why_not(items=twice))
print("2 offsets off by one:", why_not(partial_offsets=[0, 2, 3, 3]))
print("3 an item twice:     ", why_not(item_order=[2, 1, 1]))
print(
    "4 row 2 not merged:  ",
    why_not(launches=(decode, dataclasses.replace(merge, rows=(1,)))),
)

# %% [markdown]
# **Predict.** What would have happened? We give the same broken lists to `by_hand`. Right is 2, 19.5, 0. Which mistake leaves a number that looks like a result, and which leaves NaN?

# %%
items, offsets, order = good.items.tolist(), [0, 1, 3, 3], [0, 1, 2]
print("right:               ", by_hand(items, offsets, order))
wrong = {
    "1 an item dropped:   ": (items[:2], [0, 1, 2, 2], [0, 1]),
    "1 tokens twice:      ": (twice.tolist(), offsets, order),
    "2 offsets off by one:": (items, [0, 2, 3, 3], order),
    "3 an item twice:     ": (items, offsets, [2, 1, 1]),
}
for name, broken in wrong.items():
    print(name, [round(out, 2) for out in by_hand(*broken)])

# %% [markdown]
# An item done twice in the *order* does no harm by itself: it writes the same state again. The harm is that another item is never done. Here that shows as NaN. In memory that held yesterday's states, it would show as a plausible number. That is why rule 3 is checked, and not left to luck.
#
# Rule 5. The cache grows by one token per row, and somebody takes yesterday's list:

# %%
yesterday = pkv.plan(lengths, toy, stage="workqueue", splits=5, gpu="rtx3060")
cache.append(torch.zeros(4, 2, 64).half(), torch.zeros(4, 2, 64).half())
try:
    pkv.run(q, cache, yesterday)
except ValueError as error:
    print(error)

# %% [markdown]
# ## Try it
#
# Run this cell in JupyterLab. It needs no cell above it. It plays one step of a batch on an RTX 3060, or on one with another number of SMs. Here `splits` is the same for all rows.
#
# Set 16 rows, *ragged*, the longest of 256 tokens, 28 SMs. (Ragged rows have a half, a third, a quarter, ... of the longest.) Now raise the splits from 1 to 32, first with `row_local`, then with `workqueue`. From which number on does the queue's time no longer change, and why? What does `row_local` do there? And which number is best?

# %%
from pkv.viz import widgets

widgets.explore_schedule(stage="workqueue")

# %% [markdown]
# **Answer.** From 16 splits on: 256 tokens are 16 tiles, and no row has more items than tiles. `row_local` goes on launching more programs for nothing, and its time goes on growing. The best number is 1, for both: 16 short rows already are 128 programs for 56 places (the paper's kernel, 2 per SM), and every split costs a start-up.

# %% [markdown]
# ## Measure it
#
# The pictures of this section are not simulated. `pkv bench --record FILE` writes what it times as **records**, and some ship with pkv, so you need no GPU to see them. They are of an NVIDIA H200: once with all its 132 SMs, and once with 28 of them, which is what an RTX 3060 has. (Its memory is then still that of an H200, so each SM has far more bandwidth than one of an RTX 3060.)
#
# Decoded are steps of the paper's traces with eight rows, on five seeds, by pkv's own kernels with their own cuts. Every result was held against fp64 first. A time is what the GPU takes for one layer, with cold caches. Planning is not counted, on either side. `fa2-tensor-core` is the kernel of FlashInfer that the paper compares with.
#
# **Predict.** On 28 SMs, which of our stages is the fastest, and which one the slowest? Does *homogeneous*, with rows of nearly one length, change the order?

# %%
viz.draw_recorded("ladder", n_sms=28)

# %% [markdown]
# `split_kv` cuts all rows like the longest, so many of its programs are empty, and it has room for few splits. FlashInfer has room for 7 items by its rule, fewer than there are rows, and splits nothing. In *homogeneous* our stages make nearly the same cut, and little is left to gain; `row_local` cuts further, and loses some per cent by it. FlashInfer's 64 programs find 56 places there, and everybody waits for the other 8. (`stream_k` is the stage of lesson 05. It deals out equal shares too, even more equal ones, and needs no list. Here it is ahead of the queue.)
#
# **Predict.** FlashInfer's room is 2 programs per SM, at 8 KV heads. For how many items is that on 132 SMs? What becomes of the queue's lead?

# %%
viz.draw_recorded("ladder", n_sms=132)

# %% [markdown]
# Room for 33: now it splits the long rows, as we do. The queue and `stream_k` lie close together, and a few per cent before FlashInfer, which on four of the five traces is itself ahead of `row_local` and `split_kv`. The buckets lose most where rows have many lengths: each of their launches has one row or two then, and should fill 132 SMs with them.
#
# **Predict.** Now the paper's own comparison: its published times, the simulator's, and both records. Where does the queue gain most? (For one row the paper takes buckets.)

# %%
viz.draw_recorded("machines")

# %% [markdown]
# The queue is an answer to *few SMs*. The slice of 28 has few, and more bandwidth for each than the RTX 3060, so there the SMs are the limit and the cut counts most. On a whole H200 the paper's niche has nearly closed. And its list, which the host must write, is not in these times: [lesson 04](04_adaptive.ipynb) charges it.
#
# If you have a GPU, the last cell times both batches of this lesson on it, the ragged one and the 64 short rows, in the same way.

# %%
from pkv.bench.measuring import live

engines = ["row_local:splits=20", "workqueue:splits=20", "row_local", "workqueue"]
engines += ["fa2-tensor-core", "stream"]  # stream: a plain read of as many bytes
if live.can_time():
    for rows in (ragged, rows_of["64 rows of 5 to 200"]):
        print(live.time_engines(rows, llama, engines))
else:
    print(f"No GPU here. On one, this cell times {', '.join(engines)}.")

# %% [markdown]
# ## What to remember
#
# - A list of items replaces the rectangle. Three arrays say where things are, and the kernel only reads them.
# - Any stage's items run through the list, bit for bit. An empty item added nothing, so nothing is missing without it.
# - Two launches per step, like `split_kv` and `row_local`. The 16 launches that it is compared with are those of buckets.
# - What counts is the cut, and how many programs start. The list allows every cut, and starts no empty program. `row_local`'s cut has empty items only where a row has fewer tiles than splits; `split_kv`'s has them in every row that is clearly shorter than the longest.
# - Equal shares of tokens for all programs, longest first where not all can start at once.
# - The price: the host writes the list at every step, and the kernel believes it. So a plan is checked before it runs.
# - No schedule is best for all batches. Next: [04 No schedule is best everywhere](04_adaptive.ipynb).

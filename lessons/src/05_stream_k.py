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
# # 05 Planned on the GPU
#
# **Put the tiles of all rows in one line, and cut the line into as many equal runs as there are programs. Each program finds its run by itself, from the lengths. Then all end together, the host has nothing to plan, and a recorded step can be replayed while the rows grow.**
#
# [Lesson 03](03_workqueue.ipynb)'s queue deals out equal shares, but the host must write its list at every step. Its shares are not quite equal either, since each row is cut for itself. This lesson's stage, `stream_k`, goes beyond the paper that the course follows. The words that you need from before:
#
# - A **tile** is 16 tokens of a row. A program reads its tiles one after another, and leaves a **state**: the output so far, and lse.
# - A row that several programs read is **merged** from their partial states, exactly (lesson 01).
# - A **plan** says which program does which **items**: (row, begin, end).
#
# As before: clear the saved outputs first (**Edit → Clear Outputs of All Cells**), and decide at each **Predict** before you run the cell.

# %%
import pkv

where = "in Triton's interpreter, on the CPU" if pkv.INTERPRETED else "compiled, on the GPU"
print(f"Kernels run {where}.")

# %% [markdown]
# ## One line, cut into equal runs
#
# The ragged batch of lesson 03: one row of 16,384 tokens and seven of 200 to 2,000, for an RTX 3060. First as `row_local` cuts it, with 4 splits for each row. A lane of the picture is what one program reads.
#
# **Predict.** How much longer than the mean lane is the longest? And what will it be for `stream_k`, which cuts the same line of tiles into equal parts?

# %%
import torch

from pkv import viz

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
llama = pkv.Shape(
    n_q_heads=32, n_kv_heads=8, head_dim=128, page_size=16, dtype=torch.float16
)
ragged = [16384, 2000, 1500, 1000, 700, 500, 300, 200]
viz.draw_runs(pkv.plan(ragged, llama, stage="row_local", splits=4, gpu="rtx3060"))

# %%
runs = pkv.plan(ragged, llama, stage="stream_k", gpu="rtx3060")
viz.draw_runs(runs)

# %% [markdown]
# A run ends where it is full, be it in the middle of a row, and the next one goes on from there. So a program may have the end of one row, some whole rows, and the beginning of another. (The last run has what is left. A hollow piece stands for the start of a row, which takes time too; we come to it.)
#
# As many runs as there are programs, and as many programs as the card holds at once: nobody waits for a place, and nobody is left over.
#
# **Exercise ex05_1.** Make this line yourself: in `exercises/ex05_stream_k.py`, write `tile_line`, which says where each row begins on it. (The exercises keep to the plain rule, in which only tiles count.)

# %%
from pkv.course import check, hint

check("ex05_1")

# %% [markdown]
# ## The price of a list
#
# Why not let the host write this down, as it writes the queue? Because it must do so at every step. The records that ship with pkv hold what that takes.
#
# **Predict.** Eight rows on an H200. Which takes longer: to plan the step on the host, or to run one layer of it on the GPU?

# %%
from pkv.bench.records.results import grouped, results_of, sound
from pkv.bench.records.shipped import shipped_part

measured = {n: results_of(sound(shipped_part("paper", n))) for n in (28, 132)}
step = measured[132]["trace bimodal B8 seed 20260623"]
for engine in ("length_buckets", "workqueue", "fa2-tensor-core", "batch-attention"):
    if engine in step:
        plan_us, gpu_us = step[engine].plan_us, step[engine].gpu_us
        print(f"{engine:16} plan {plan_us:5.0f} us, a layer {gpu_us:4.0f} us: ", end="")
        print(
            f"{plan_us / gpu_us:.1f} layers' time, {plan_us / gpu_us / 32:.0%} of 32 layers"
        )

# %% [markdown]
# The last two are FlashInfer's, planned in C++, and not free either. Three things make planning on the host dear:
#
# - The plan is made while the GPU has nothing to do, unless somebody overlaps the two.
# - The host must know the lengths. If they lie on the GPU only, it waits for them.
# - The list is copied to the GPU, for these lengths. A **CUDA graph** is a recorded step that the GPU replays without the host: the same kernels, the same addresses. A list that is written into it is still the old one when the rows have grown.
#
# So a stage that is planned on the host refuses to be replayed for other lengths:

# %%
try:
    pkv.plan([64] * 8, llama, stage="workqueue", dynamic=True, gpu="rtx3060")
except TypeError as error:
    print(error)
print({name: stage.PLANNED_ON for name, stage in pkv.STAGES.items() if name != "reference"})

# %% [markdown]
# **Predict.** How does planning grow with the number of rows? The next picture has 1 to 1,024 rows of 1,024 tokens, and three planes: planning on the host, plan and one layer together, and memory for states.

# %%
viz.draw_recorded("growth", grid="growth")

# %% [markdown]
# ## What the kernel knows
#
# A program of `stream_k` knows the lengths of all rows, for they lie on the GPU anyway. It knows how many programs there are, and which one it is. That is enough, if all programs compute the same thing:
#
# 1. All units of the line, added up, and divided by the number of programs, rounded up: the **share**.
# 2. Program p has the units p · share to (p + 1) · share.
# 3. The row in which its first unit lies: count the rows that end before it.
#
# By hand: rows of 5 and 40 tokens, tiles of 16, 2 programs. Suppose that a unit is a tile and nothing else.
#
# **Predict.** How many units has the line, and which items does each program get?

# %%
import dataclasses
import inspect
import math

import numpy as np

from pkv.stages.s5_stream_k_runs import RULES, Rules, cut_runs

toy_lengths = np.array([5, 40], dtype=np.int32)
only_tiles = Rules(START_UNITS=0, LEAST_UNITS=1)
items, program_items, row_items = cut_runs(toy_lengths, 2, 16, only_tiles)
print("items", items.tolist())
print("of each program", program_items.tolist(), "of each row", row_items.tolist())

# %% [markdown]
# **Exercise ex05_2.** Cut the line: write `run_bounds` in `exercises/ex05_stream_k.py`. Its rule is still more even than step 1 above, for it rounds every cut and not the share.

# %%
check("ex05_2")

# %% [markdown]
# Four units, two for each. But is this cut any good? The first program reads two tiles, the second too, yet the first has to *start* two rows: load a query each, ask the table for pages, wait for the memory. And row 1 must be merged now. That a row is begun costs about as much as some tiles do. So each row's tiles are preceded by start units:

# %%
print(RULES)

# %% [markdown]
# **Predict.** With 4 start units for each row: how long is the line now, and where does the cut between 2 programs fall?

# %%
items, program_items, row_items = cut_runs(toy_lengths, 2, 16, RULES)
print("items", items.tolist())
print("of each program", program_items.tolist(), "of each row", row_items.tolist())

# %% [markdown]
# 5 + 7 = 12 units. The cut at 6 falls among the start units of row 1, before its first tile. So no row is cut: each program does one of them, and there is nothing to merge. No run is shorter than `LEAST_UNITS`, for the same reason: what it saves would be less than its state costs.
#
# Now a longer row between the two, and 4 programs. (We pretend to have a card with one SM. It holds 8 programs, 4 for each of 2 KV heads.)
#
# **Predict.** The line is 5 + 13 + 7 units. Which row is cut, and how many partial states are there?

# %%
from pkv.cards.known import load_gpu

toy = pkv.Shape(n_q_heads=8, n_kv_heads=2, head_dim=64, page_size=4, dtype=torch.float16)
one_sm = dataclasses.replace(load_gpu("rtx3060"), n_sms=1)
lengths = [5, 140, 40]
plan = pkv.plan(lengths, toy, stage="stream_k", tile=16, gpu=one_sm)
print(plan.items.tolist())
viz.draw_runs(plan)

# %% [markdown]
# ## The walk
#
# From its first unit a program walks along the line, row by row, until its run is full. Here is the walk in Python:


# %%
def walk(lengths, program, n_programs, tile=16):
    """The items (row, begin, end) of one program."""
    n_tiles = [-(-length // tile) for length in lengths]
    units = [n + RULES.START_UNITS if n else 0 for n in n_tiles]
    share = max(-(-sum(units) // n_programs), RULES.LEAST_UNITS)
    unit, stop = program * share, min((program + 1) * share, sum(units))
    row, before = 0, 0  # units before the row
    while row < len(units) and before + units[row] <= unit:
        row, before = row + 1, before + units[row]
    while unit < stop:
        first_tile = before + RULES.START_UNITS
        first, end = max(unit - first_tile, 0), min(stop - first_tile, n_tiles[row])
        if first < end:
            yield row, first * tile, min(end * tile, lengths[row])
        row, before = row + 1, before + units[row]
        unit = max(unit, before)


# %% [markdown]
# **Exercise ex05_3.** The same walk for the plain rule: in `exercises/ex05_stream_k.py`, write `items_of_run`, which says what a run has of which rows.

# %%
check("ex05_3")

# %% [markdown]
# And in the kernel (`pkv/stages/s5_stream_k_runs.py`), the part that says what a run has of a row. (`seen` is the row's first tile; only a window makes it more than 0.)

# %%
from pkv.stages.s5_stream_k_runs import find_item, find_row, find_share

print(inspect.getsource(find_item.fn))

# %% [markdown]
# Are they the same? A small kernel of our own asks the same three functions, and writes down what they answer. (`stream_k_kernel` has the same loop, and reads the tiles instead of writing the item.)
#
# **Predict.** For the three rows above, what does program 0 write, and what program 2?

# %%
from typing import NamedTuple

from pkv._triton import tl, triton
from pkv.kernels.launching import strided
from pkv.kernels.tile import RowArgs


class Tile(NamedTuple):
    """All that these functions ask of a kernel's shape."""

    BLOCK_N: int = 16


@triton.jit
def list_items(rows, found, n_rows, n_programs, SHAPE: tl.constexpr, RULES: tl.constexpr):
    program = tl.program_id(0)
    total, share = find_share(rows, n_rows, n_programs, SHAPE, RULES)
    unit = program * share
    stop = tl.minimum(unit + share, total)
    if unit < stop:
        row, before = find_row(rows, n_rows, unit, SHAPE, RULES)
        while unit < stop:
            first, end, _, _, length, after = find_item(
                rows, row, before, unit, stop, SHAPE, RULES
            )
            place = found + (program * n_rows + row) * 2
            tl.store(place, first * SHAPE.BLOCK_N, mask=first < end)
            tl.store(place + 1, tl.minimum(end * SHAPE.BLOCK_N, length), mask=first < end)
            unit = tl.maximum(unit, after)
            before = after
            row += 1


def by_kernel(lengths, n_programs):
    """The items of each program, as the kernel's functions find them."""
    n_rows = len(lengths)
    found = torch.full((n_programs, n_rows, 2), -1, dtype=torch.int32)
    on_gpu = RowArgs(strided(torch.tensor(lengths, dtype=torch.int32)))
    list_items[(n_programs,)](on_gpu, found, n_rows, n_programs, Tile(), RULES)
    return [
        [(row, *found[p, row].tolist()) for row in range(n_rows) if found[p, row, 0] >= 0]
        for p in range(n_programs)
    ]


for program, found in enumerate(by_kernel(lengths, 4)):
    print(f"program {program}: {found}")

# %%
for batch, n_programs in ((lengths, 4), ([0, 700, 0, 3, 90], 5), ([2000, 16, 17, 1], 9)):
    walked = [list(walk(batch, program, n_programs)) for program in range(n_programs)]
    in_all = cut_runs(np.array(batch, dtype=np.int32), n_programs, 16)[0]
    same = walked == by_kernel(batch, n_programs)
    as_plan = [list(item) for of_program in walked for item in of_program]
    print(f"{batch}, {n_programs} programs: kernel as walked: {same}", end=", ")
    print(f"plan as walked: {as_plan == in_all.tolist()}")

# %% [markdown]
# So `pkv.plan` only *says* what the kernel will find: for pictures, simulation and predictions. The kernel does not read it. The price is that every program looks at all lengths, 128 at a time. They lie close together, and soon in the GPU's cache.
#
# ## Two partial states at most
#
# A program writes the result of a row that it has whole. What else may it have? A row that began before its run, and one that goes on after it. Those in between it has whole. So a program leaves two partial states at most, and program p's place for them can be fixed: slot 2p for the row that began before, 2p + 1 for the one that goes on.
#
# **Predict.** An RTX 3060, rows of 1,024 tokens. How many slots does `stream_k` need for 1 row, how many for 1,024? And how many states are really written?

# %%
print("rows   programs   slots   states written   the queue's states")
for n_rows in (1, 8, 64, 1024):
    plans = [
        pkv.plan([1024] * n_rows, llama, stage=stage, gpu="rtx3060")
        for stage in ("stream_k", "workqueue")
    ]
    counts = [np.diff(plan.partial_offsets) for plan in plans]
    states, queued = (int(count[count > 1].sum()) for count in counts)
    n_programs = plans[0].n_programs
    print(f"{n_rows:4} {n_programs:10} {2 * n_programs:7} {states:16} {queued:20}")

# %% [markdown]
# The number of slots depends on the card and not on the batch. Whoever reserves memory for states once has enough for any lengths. The other stages need more of it as rows get more or longer.
#
# **Exercise ex05_4.** Which slots does the merge read for which row? In `exercises/ex05_stream_k.py`, write `slots_of_rows`, with the help of your `run_bounds` and `items_of_run`.

# %%
check("ex05_4")

# %% [markdown]
# ## The merge is cut as evenly
#
# One long row on a large card leaves many states, and somebody has to read them all. If one program per head does that, it may take longer than it should, and most SMs look on. But a row in n runs has n - 1 cuts. Let each cut merge an equal slice of the row's result: it reads *all* states of the row, but only its slice of each.
#
# **Predict.** Merging is exact. Is it still, bit for bit, if two programs merge one half of the columns each?

# %%
torch.manual_seed(0)
states = [(torch.randn(8, 64).double(), torch.randn(8).double()) for _ in range(3)]
whole, _ = pkv.merge(states)
halves = [
    pkv.merge([(out[:, begin : begin + 32], lse) for out, lse in states])[0]
    for begin in (0, 32)
]
print("equal in every bit:", torch.equal(torch.cat(halves, dim=1), whole))

# %% [markdown]
# The columns of a state have nothing to do with each other, and their weights come from lse alone. In the picture of the ragged batch, *slice 1 of 9* says which part a cut takes.
#
# **Predict.** One row of 65,536 tokens on an H200: how many programs merge it in the queue, where each query head has one? How many in `stream_k`?

# %%
for stage in ("workqueue", "stream_k"):
    long_row = pkv.plan([65536], llama, stage=stage, gpu="h200")
    n_states = long_row.n_items
    n_merging = (n_states - 1) * llama.n_kv_heads if stage == "stream_k" else 32
    print(
        f"{stage:10} {n_states:4} states for each head, {n_merging:4} programs merge them"
    )

# %% [markdown]
# ## No last wave
#
# Lesson 03 found a batch where the queue was clearly behind: eight equal rows. Now we play eight rows of 8,192 tokens on the paper's card. (As always: the simulator knows the costs of the paper's kernels there, 2 programs per SM. It compares schedules.)
#
# **Predict.** The queue must cut eight equal rows alike, and 56 places are not a multiple of 64. What will you see at the end of its step, and what at the end of `stream_k`'s?

# %%
equal = [8192] * 8
played = [
    pkv.simulate(pkv.plan(equal, llama, stage=stage, gpu="rtx3060"), "rtx3060")
    for stage in ("workqueue", "stream_k")
]
viz.draw_timelines(played)

# %%
for timeline in played:
    programs = timeline.plan.n_programs * llama.n_kv_heads
    print(
        f"{timeline.plan.stage:10} {programs:4} programs, {programs / 56:.2f} rounds",
        end=", ",
    )
    print(f"{timeline.gpu_ms * 1000:.0f} us, {timeline.tail_idle:.0%} idle")

# %% [markdown]
# The queue's programs come in waves, and its last wave is not full. `stream_k` starts no more programs than the card has places for, all of one length. (It counts on our kernel; of the paper's half as many fit here, so it has two waves, and both are full.) Nothing has to be chosen for that, no number of splits, no order.
#
# ## One plan for lengths that change
#
# The kernel reads the lengths when it runs. So what it is launched with need not change when they do. `dynamic=True` makes such a plan; its lengths are upper bounds.
#
# The probe of lesson 00: q is 0, and the values of a row are 0, 1, 2, ..., so that out is (length - 1) / 2. One plan object, and four steps: rows grow, one leaves, a new one comes.
#
# **Predict.** What is out for lengths 1, 17 and 64?

# %%
ramp = torch.arange(64, dtype=torch.float16)[None, :, None, None].expand(3, 64, 2, 64)
pool = pkv.PagedKVCache.from_dense(ramp, ramp, [64] * 3, page_size=4, seed=1)
now = torch.zeros(3, dtype=torch.int32)  # the lengths, where the kernel reads them
cache = pkv.PagedKVCache(pool.k_pages, pool.v_pages, pool.block_table, now)
any_lengths = pkv.plan([64] * 3, toy, stage="stream_k", dynamic=True, gpu=one_sm)
q = torch.zeros(3, 8, 64).half()  # [n_rows, n_q_heads, head_dim]
for step in ([1, 17, 64], [2, 18, 0], [3, 19, 40], [0, 0, 0]):
    now.copy_(torch.tensor(step))
    out, lse = pkv.run(q, cache, any_lengths)
    print(
        f"{step!s:12} out {out[:, 0, 0].tolist()}  tokens", lse[:, 0].exp().round().tolist()
    )

# %% [markdown]
# **Exercise ex05_5.** Nothing was planned between the steps: the programs found their runs in the lengths of the moment. Now write the kernel that does so, `plan_kernel` in `exercises/ex05_stream_k.py`. It is launched once and replayed for other lengths, so neither the host nor PyTorch may read them.

# %%
check("ex05_5")

# %% [markdown]
# Nothing is planned between the steps: on a GPU this is what a CUDA graph needs. There `pkv.decode` without a stage takes `stream_k`, and is captured as it is. Below it is captured once and replayed 47 times, while every row grows by a token a step. Each result is checked.

# %%
if torch.cuda.is_available() and not pkv.INTERPRETED:
    from pkv.bench.accuracy import Yardstick

    grown = torch.tensor([1, 17, 3], dtype=torch.int32)
    cache = pkv.PagedKVCache(pool.k_pages, pool.v_pages, pool.block_table, grown)
    q, out = torch.randn(3, 8, 64).half(), torch.empty(3, 8, 64).half()
    pkv.decode(q, cache, out=out)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = pkv.decode(q, cache, out=out, return_lse=True)
    right = 0
    for _ in range(47):
        graph.replay()
        right += Yardstick(q, cache).measure(out, lse, True).ok
        grown.add_(1)
    print(f"{right} of 47 replays right, up to {grown.max().item() - 1} tokens")
else:
    print("No GPU here. On one, this cell captures a graph and replays it while rows grow.")

# %% [markdown]
# **Exercise ex05_6.** Capture a step yourself: in `exercises/ex05_stream_k.py`, write `capture`, which gives a function `replay()`. It counts only where there is a GPU; without one, the check replays the launches that you record in Triton's interpreter.

# %%
check("ex05_6")

# %% [markdown]
# ## The rules of this stage, and what breaks
#
# | rule | without it |
# |---|---|
# | 1. All programs compute the share from the same lengths | two programs read the same tiles, or nobody does |
# | 2. A row's start counts, and no run is too short | many programs that only start up, many states of nothing |
# | 3. Two slots for each program | one state overwrites another: a wrong mean |
# | 4. A row without tokens is in no run, so the merge writes it | its result is whatever the memory held |
# | 5. Units are counted in 64 bits where 32 do not suffice | a very large batch is cut at negative places |
#
# A step in Python, from the walk and the states of lesson 03's probe, to break rules 1, 3 and 4:


# %%
def by_hand(lengths, n_programs, n_slots=2, seen=None, writes_empty=True):
    """Out of each row. seen: the lengths that program 0 takes for true."""
    slots, of_row, result = {}, {}, [math.nan] * len(lengths)
    for program in range(n_programs):
        known = seen if seen is not None and program == 0 else lengths
        for row, begin, end in walk(known, program, n_programs):
            values = torch.arange(begin, end).double()
            state = values.mean()[None, None], torch.tensor([end - begin]).double().log()
            if (begin, end) == (0, lengths[row]):
                result[row] = state[0].item()
            else:
                slot = n_slots * program + (begin == 0 and n_slots == 2)
                slots[slot] = state
                of_row.setdefault(row, []).append(slot)
    for row, length in enumerate(lengths):
        if row in of_row:
            merged, _ = pkv.merge([slots[slot] for slot in of_row[row]])
            result[row] = round(merged.item(), 2)
        elif length == 0 and writes_empty:
            result[row] = 0.0
    return result


# %% [markdown]
# **Predict.** Rows of 300, 0 and 200 tokens, 3 programs. Right is 149.5, 0, 99.5. Which mistake leaves a number that looks like a result, and which leaves NaN?

# %%
batch = [300, 0, 200]
for program in range(3):
    print(f"program {program}:", list(walk(batch, program, 3)))
print("right:               ", by_hand(batch, 3))
print("1 an older length:   ", by_hand(batch, 3, seen=[200, 0, 200]))
print("3 one slot a program:", by_hand(batch, 3, n_slots=1))
print("4 nobody writes row 1:", by_hand(batch, 3, writes_empty=False))

# %% [markdown]
# With one slot, program 1's state of row 2 takes the place of its state of row 0. Row 0 is then merged with a part of row 2, and the mean looks like any other. An older length makes one program's share smaller: tokens between its end and the next one's begin are never read. That is why all programs read the lengths themselves, and nobody hands them a share.
#
# **Rule 2.** Of 98 programs, how many would work on the two toy rows, if only tiles counted? **Rule 5.** How many rows of 100,000 tokens fill 32 bits?

# %%
items, program_items, _ = cut_runs(toy_lengths, 98, 16, only_tiles)
print(f"only tiles: {len(items)} items for {(program_items > 0).sum()} programs")
items, program_items, _ = cut_runs(toy_lengths, 98, 16, RULES)
print(f"by the rules: {len(items)} items for {(program_items > 0).sum()} programs")
print(f"{2**31 // (100_000 // 16 + RULES.START_UNITS):,} rows of 100,000 tokens")

# %% [markdown]
# ## Try it
#
# Run this cell in JupyterLab, and move the sliders. Take 8 *equal* rows of 4,096 tokens. For which numbers of programs is no row cut? Then look at *one long*, and compare `stream_k` with `workqueue` and `row_local`.

# %%
from pkv.viz import widgets

widgets.explore_runs(rows=8, longest=4096, raggedness="ragged", programs=14)

# %% [markdown]
# **Answer.** For 1, 2, 4 and 8. Then each run has a whole number of rows. With any other number some run ends inside a row. With more than 8 every row is cut, since no run has room for a whole one.
#
# ## Measure it
#
# The records of the NVIDIA H200, whole and sliced to 28 SMs, as in the lessons before. For each trace and number of rows, every stage of this course is held against the best of FlashInfer's engines there. The attention is the same in all our stages, and differs only in who does which tiles. A loss is drawn like a win, and what lies within the noise of the times is neither.
#
# **Predict.** On 28 SMs, does each stage gain over the one before? Where is the largest step?

# %%
viz.draw_recorded("gains", n_sms=28)

# %% [markdown]
# **Predict.** On 132 SMs the memory decides more, and the schedule less. Who is still ahead of FlashInfer's best?

# %%
viz.draw_recorded("gains", n_sms=132)

# %% [markdown]
# The last column is part of the answer. A stage that is planned on the host has its kernels' time *and* that, once for all layers of a step.
#
# Where does it not win? We ask the records: the paper's traces, on 28 SMs six loads that differ more from each other, and on 132 SMs the `full` grid, of 1 to 256 rows and up to 131,072 tokens. At most three of the loads that it loses are named: in `equal(2,4k)` 2 rows have 4,096 tokens each, in `zipf(64,4k)` 64 rows have 4,096, a half of that, a third, and so on. Noise is respected: a load counts only if the times differ by more than two measurements of one engine do.

# %%
from pkv.viz.ladder import counts_of
from pkv.viz.ladderfigures import gain_of

ours = "stream_k" if any("stream_k" in of for of in measured[132].values()) else "workqueue"
print(f"{ours}, by GPU time")
for n_sms, grid in ((28, "paper"), (28, "smoke"), (132, "paper"), (132, "full")):
    loads = grouped(results_of(sound(shipped_part(grid, n_sms))))
    for rival in (None, "workqueue", "row_local", "adaptive"):
        gains = {name: gain_of(of, ours, rival) for name, of in loads.items()}
        known = {name: gain for name, gain in gains.items() if gain is not None}
        lost = sorted((gain.ratio, name) for name, gain in known.items() if gain.is_loss)
        words = f"{n_sms} SMs, {grid}, over {rival or 'FlashInfer'}: "
        if known and rival != ours:
            named = [f"{name} {ratio:.2f}" for ratio, name in lost[:3]]
            print(f"{words}{counts_of(list(known.values()))}", *named, sep="; ")

# %% [markdown]
# One loss is worth a look. `adaptive` follows the paper's gates, and with 8 rows on 28 SMs it is a little faster: there it runs the queue with 24 splits a row, many more items than programs fit. On 132 SMs the same cut is slower. The other stages cut by rules of their own, which were chosen with an older kernel; so equal runs are not the last word on few SMs.
#
# These are times of the GPU for one layer. Planning comes on top for whoever plans on the host. `stream_k` has none: the few microseconds that its records hold, a plain read's hold too.
#
# ### Four rows, again
#
# The paper hands steps with 2 to 7 rows over to FlashInfer, and [lesson 04](04_adaptive.ipynb) asked whether that is right. Now there is one more stage to choose.
#
# **Predict.** With 4 rows, on how many of the 25 recorded traces is FlashInfer's best engine faster than our best stage? And what does `policy="cost"` take?

# %%
from collections import Counter

from pkv.bench.loads.grids import grid as loads_of
from pkv.bench.records.results import over_flashinfer

four = {load.name: load for load in loads_of("paper") if " B4 " in load.name}
stages = ("split_kv", "length_buckets", "row_local", "workqueue", "stream_k")
for n_sms, card in ((28, "h200-28sm"), (132, "h200")):
    ratios, first = [], Counter()
    for name in four:
        of_load = measured[n_sms][name]
        over = {
            stage: over_flashinfer(of_load, stage) for stage in stages if stage in of_load
        }
        over = {stage: ratio for stage, ratio in over.items() if ratio is not None}
        ratios.append(max(over.values()))
        first[max(over, key=over.get) if ratios[-1] > 1 else "FlashInfer"] += 1
    taken = Counter(
        pkv.explain(load.steps[0].lengths, llama, policy="cost", gpu=card).chosen
        for load in four.values()
    )
    print(f"{n_sms:3} SMs, measured: first are {dict(first)};", end=" ")
    print(
        f"our best is {min(ratios):.2f} to {max(ratios):.2f} times as fast as FlashInfer's"
    )
    print(f"         policy cost takes {dict(taken)}")

# %% [markdown]
# The paper's gates take FlashInfer in all 25. Where the first line counts no FlashInfer, each hand-over gives time away, by at least the smaller of the two numbers.
#
# On the paper's own card nobody has measured 4 rows. There the simulator must do, with the paper's kernels, which read more slowly than FlashInfer's:

# %%
taken = Counter(
    pkv.explain(load.steps[0].lengths, llama, policy="cost", gpu="rtx3060").chosen
    for load in four.values()
)
print("RTX 3060, predicted with the costs of the paper's kernels:", dict(taken))

# %% [markdown]
# ### On four machines
#
# The traces that the paper published, on the machines that this course has numbers of: the RTX 3060 as published and as simulated, 28 SMs of an H200, and all of it. Each number is the time of FlashInfer's tensor-core kernel over the stage's. In brackets, published less FlashInfer's planning, as it was fitted; simulated and recorded are the kernels alone.
#
# **Predict.** With eight rows, in which column are the ratios largest? And with one row, what is left of the published gain without FlashInfer's planning?

# %%
from pkv.bench.records.fourmachines import four_machines
from pkv.bench.records.shipped import shipped_records

machines = four_machines(sound(shipped_records()))
print(" " * 27, *(f"{machine.name:>19}" for machine in machines))
for load in machines[0].ratios:
    for stage in ("length_buckets", "workqueue", "stream_k"):
        cells = []
        for machine in machines:
            ratio = machine.ratios.get(load, {}).get(stage)
            less = machine.less_planning.get(load, {}).get(stage)
            words = "-" if ratio is None else f"{ratio:.2f}"
            cells.append(f"{words} ({less:.2f})" if less is not None else words)
        print(f"{load:12} {stage:14}", *(f"{cell:>19}" for cell in cells))

# %% [markdown]
# With eight rows it is the slice: it has few SMs and fast memory, so there a bad cut costs most. With one row the published gain is the planning's; lesson 04 has that story. [docs/machines.md](../docs/machines.md) has all fifteen loads, every stage, and what can be compared between these columns and what cannot.
#
# If you have a GPU, the last cell times three batches of this lesson on it: the ragged one, eight equal rows, and one long row.

# %%
from pkv.bench.measuring import live

engines = ["row_local", "workqueue", "stream_k"]
engines += ["fa2-tensor-core", "batch-attention", "stream"]  # stream: a plain read
if live.can_time():
    for rows in (ragged, equal, [65536]):
        print(live.time_engines(rows, llama, engines))
else:
    print(f"No GPU here. On one, this cell times {', '.join(engines)}.")

# %% [markdown]
# ## What to remember
#
# - All rows' tiles in one line, cut into as many equal runs as programs: no last wave, no number of splits to choose.
# - A row's start counts as some tiles. So short rows stay whole, and a cut is made only where it pays.
# - Lengths, the number of programs and one's own number are all that a program needs. The host plans nothing.
# - Two partial states at most for each program, so memory does not depend on the batch; and the merge is cut as evenly as the reading.
# - One plan serves all lengths up to the bounds, so a CUDA graph can be replayed while rows grow, come and go.
# - What it gains depends on the machine. Ask records, respect their noise, and show the losses too.

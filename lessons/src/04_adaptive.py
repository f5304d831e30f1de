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
# # 04 No schedule is best everywhere
#
# **Which schedule is best depends on the batch, and which one looks best depends on what you count. So a policy chooses a stage for every step, says why, and is judged on batches that it was not made for.**
#
# [Lesson 01](01_split_kv.ipynb), [02](02_row_local.ipynb) and [03](03_workqueue.ipynb) gave you stages. This one changes no kernel. It compares our stages with a rival, predicts times, chooses, and then asks how good the choices are. The words that you need from before:
#
# - `split_kv` cuts all rows like the longest. `length_buckets` has two launches for every distinct length.
# - `row_local` cuts each row by its own length. `workqueue` lists the items that hold tokens, and each program takes one from the list. Both need two launches, decode and merge.
# - **FlashInfer** is a library of attention kernels that serving engines use. It brings its own kernels and its own schedule.
#
# As before: clear the saved outputs first (**Edit → Clear Outputs of All Cells**), and decide at each **Predict** before you run the cell.

# %%
import pkv

where = "in Triton's interpreter, on the CPU" if pkv.INTERPRETED else "compiled, on the GPU"
print(f"Kernels run {where}.")

# %% [markdown]
# ## Two batches, and two ways to count
#
# The paper behind this course measured schedules on **traces**: requests drawn at random, which a server decodes together, step by step. In its *bimodal* trace every fourth prompt is long and the others are short. Below is one step of it with 8 rows. `simulate` plays a plan on the SMs of an RTX 3060, as far as its costs are known. It is a model and not a measurement; how good a model, we shall see.
#
# **Predict.** FlashInfer against the queue with 20 splits per row, which is the paper's number for this trace. Which is done first, and what makes the other one late?

# %%
import torch

from pkv import viz
from pkv.bench.loads.traces import make_trace, steps_of

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
llama = pkv.Shape(
    n_q_heads=32, n_kv_heads=8, head_dim=128, page_size=16, dtype=torch.float16
)
steps = {n: steps_of(make_trace("bimodal", 20260623, 24, n), n, 48) for n in (4, 8)}


def counted(number, word):
    ending = "" if number == 1 else "es" if word.endswith("ch") else "s"
    return f"{number} {word}{ending}"


def play(lengths, splits):
    """FlashInfer and the paper's queue (tiles of 32 tokens) on the SMs of an RTX 3060."""
    rival = pkv.plan(lengths, llama, stage="flashinfer", gpu="rtx3060")
    queue = pkv.plan(
        lengths, llama, stage="workqueue", splits=splits, tile=32, gpu="rtx3060"
    )
    return [pkv.simulate(plan, "rtx3060") for plan in (rival, queue)]


eight = play(steps[8][24], splits=20)
viz.draw_timelines(eight)

# %% [markdown]
# **Predict.** The same with 4 rows, and 28 splits. (The 28 is our choice: for 4 rows the paper gives no number that we know of.) Who is first now, if you count only from the end of the hatched part on?

# %%
four = play(steps[4][24], splits=28)
viz.draw_timelines(four)

# %%
for n_rows, timelines in ((8, eight), (4, four)):
    for played in timelines:
        step_us, before, kernels = played.gpu_ms * 1e3, played.fixed_us, played.makespan_us
        print(f"{n_rows} rows, {played.plan.stage:10} {step_us:5.0f} us = ", end="")
        print(f"{before:3.0f} before + {kernels:5.0f} kernels, {played.tail_idle:.0%} idle")

# %% [markdown]
# With 8 rows the queue wins: for a long time FlashInfer reads only row 0. With 4 rows the kernels of FlashInfer are faster, and the hatched part before them takes that away again. Two questions follow. Why does FlashInfer fall behind with 8 rows? And does the hatched part belong to the step?
#
# ## FlashInfer's schedule is a plan like any other
#
# FlashInfer publishes its rules, so pkv makes the same plan without FlashInfer. For its kernel with tensor cores the rule is short:
#
# - There is **room** for 2 programs per SM. Each item costs one per KV head.
# - All rows are cut in splits of one size, in whole pages: the shortest size, of at least 128 tokens, that makes no more items than there is room for.
# - Where even whole rows are too many, nothing is split.
#
# By hand: 28 SMs hold 56 programs, and with 8 KV heads that is room for 7 items. Take two rows, of 10 and of 100 pages. Splits of 16 pages make 1 + 7 items, one too many. Splits of 17 pages make 1 + 6, and fit.
#
# **Predict.** One row of 65,536 tokens, that is 4,096 pages, and 0, 1, 3, 6 or 7 short rows beside it. Into how many items is the long row cut?

# %%
for n_short in (0, 1, 3, 6, 7):
    rival = pkv.plan([65536] + [4096] * n_short, llama, stage="flashinfer", gpu="rtx3060")
    n_long, n_launches = int(rival.partial_offsets[1]), len(rival.launches)
    print(
        f"{counted(1 + n_short, 'row')}: {counted(rival.n_items, 'item')},",
        f"{n_long} of the long row: ",
        end="",
    )
    print(f"{n_long * 8:2} programs read it; {counted(n_launches, 'launch')}")

# %% [markdown]
# Every row takes one item at least. So the more rows there are, the fewer items are left for the long one. With 7 rows all room is used, and from 8 rows on the rule does not split at all: the longest row is read by 8 programs, one per KV head, while the other SMs wait for them. With 8 rows there are 64 programs and only 56 places, so that in the first picture one of these eight even has to wait before it starts. On a card with more SMs there is more room, and the same happens with more rows.
#
# The rule is short enough to write it down. **Exercise ex04_1.** In `exercises/ex04_adaptive.py`, write `split_pages`: how many pages FlashInfer puts in a split. Save the file, then run the cell.

# %%
from pkv.course import check, hint

check("ex04_1")

# %% [markdown]
# Idle SMs alone are no loss: memory is the limit, not SMs. What counts is whether the programs that are left can keep the memory busy. The simulator knows two rates for that:

# %%
from pkv.cards.known import load_gpu

card = load_gpu("rtx3060")
costs = card.costs
one, memory = costs.flashinfer_program_gb_per_s, costs.memory_gb_per_s
print(f"one program of FlashInfer reads {one} GB/s at most, the memory gives {memory} GB/s")

# %% [markdown]
# **Predict.** How many such programs use all of the memory? How much do the last 8 use?

# %%
print(f"{memory / one:.1f} programs use all of it; 8 read {8 * one:.0f} GB/s")

# %% [markdown]
# So at the end of the first picture, for as long as only the long row is read, the memory works at little more than half its rate. That is the loss. With 4 rows, 4 of 7 items belong to the long row, and 32 programs use all of the memory.
#
# Is it so on a real card? The paper published its times for 8 rows. For 4 rows it says that its queue loses and hands the step to FlashInfer, but it published no log of that. So below, 8 rows have a published number next to the simulated one, and 4 rows have only the simulator's. Each is the mean of 48 steps. (On another card 4 rows have been measured; we come to that.)
#
# **Predict.** For 4 rows, with FlashInfer's planning in the step and without: who is ahead?

# %%
from pkv.bench.fit.paper import beyond
from pkv.bench.loads.published import published

logs = {row.configuration: row for row in published() if row.log.startswith("seed_")}
for run in beyond(card):
    c, log = run.configuration, logs.get(run.configuration)
    print(f"{c.max_active} rows, {c.engine:10} published", end=" ")
    print("    -   " if log is None else f"{log.gpu_ms:.3f} ms", end="")
    print(f", simulated {run.gpu_ms:.3f} ms, its kernels {run.kernels_ms:.3f}", end="")
    print(f", {run.idle:.0%} idle")

# %% [markdown]
# With 8 rows the simulator is close to the card. (Its costs were fitted to these very rows; others judge it below.) With 4 rows it says: a tie, if FlashInfer's planning is part of the step; a clear loss of the queue, on the kernels alone. The paper's hand-over at 4 rows is right by the second count.
#
# ## The paper's gates, as code
#
# The paper's **policy** is a handful of **gates**: comparisons, from top to bottom, and the first that holds decides.
#
# | gate | stage |
# |---|---|
# | query heads per KV head other than 4 | `flashinfer` |
# | longest row below 16,384 tokens | `flashinfer` |
# | at most 1 row with tokens | `length_buckets` |
# | at least 8 rows with tokens | `workqueue` |
# | else | `flashinfer` |
#
# **Exercise ex04_2.** Write `paper_policy`, these gates as code. Its edges are where policies go wrong: 16,384 tokens, 8 rows, rows without tokens.

# %%
check("ex04_2")

# %% [markdown]
# Here is how pkv writes them:

# %%
import inspect

from pkv.stages.s4_adaptive import paper_route

source = inspect.getsource(paper_route)
print(source[source.index("    if group") :].rstrip())

# %% [markdown]
# `PAPER_GROUP` is 4, `PAPER_LONGEST` 16,384, `PAPER_FEW_ROWS` 1 and `PAPER_MANY_ROWS` 8. `n_rows` are those with tokens.
#
# **Predict.** Where does each of these steps go?

# %%
edges = [
    (1, 16384, 4),
    (1, 16383, 4),
    (2, 65536, 4),
    (7, 65536, 4),
    (8, 65536, 4),
    (8, 16383, 4),
    (8, 65536, 1),
    (8, 65536, 8),
]
for n_rows, longest, group in edges:
    chosen, gate = paper_route(n_rows, longest, group)
    step = f"{counted(n_rows, 'row')}, longest {longest:,}, G = {group}"
    print(f"{step:30} {chosen:14} since {gate}")

# %% [markdown]
# The paper measured 1, 4 and 8 rows, and put its gate at 8. What about the numbers between?
#
# **Predict.** From which number of rows on does the queue win on the kernels? (The queue has 24 splits here, the number that the policy uses.) Use the last two numbers of programs that you computed: how many use all of the memory, and how many read the long row.

# %%
from pkv.bench.records.regret import kernels_ms

for n_rows in range(4, 10):
    lengths = [65536] + [4096] * (n_rows - 1)
    rival, queue = (kernels_ms(played.plan, card) * 1000 for played in play(lengths, 24))
    print(f"{n_rows} rows: FlashInfer {rival:5.0f} us, queue {queue:5.0f}, kernels alone")

# %% [markdown]
# The simulator would put the gate at 7. With 6 rows the long row still has 2 items, and 16 programs are just enough. With 7 it has one.
#
# Gates are easy to read and quick. But they say nothing about how much is at stake, they were found on one card, and one token can change the route: 16,383 and 16,384 are nearly the same work.
#
# ## A cost model in closed form
#
# The other way is to predict each stage's time, and to take the least. That needs a few **costs** of the card. Six of them were fitted to the paper's published times; the others are given:

# %%
from pkv.bench.fit.paper import START

units = {"gb_per_s": "GB/s", "us": "us", "sm": "programs per SM"}
known = {name: value for name, value in vars(costs).items() if value is not None}
for name, value in known.items():
    unit = next(words for end, words in units.items() if name.endswith(end))
    print(f"{name:28} {value:6g} {unit:15}", "fitted" if name in START else "given")
n_programs = card.n_sms * costs.programs_per_sm
print(f"{n_programs} of the paper's read {n_programs * costs.program_gb_per_s:.0f} GB/s")

# %% [markdown]
# They are the costs of the *paper's* kernels on that card, of which 2 programs fit an SM, and of FlashInfer's. One by one, FlashInfer's programs read four times as fast as the paper's. But as long as all SMs have work, both use nearly all of the memory. (pkv also has costs of *its own* kernels, on an H200. They come further down, with measured times.)
#
# `predict` puts a step's time together from named terms. No clock runs; it is a sum.
#
# - **reading**: all bytes of K and V at the memory's rate. No schedule beats it.
# - **tail**: what is lost because too few programs read, or unevenly many.
# - **launches** and **start_up**: what each launch and the first item of each decode launch cost before a byte is read.
# - **merge**: the merge launches.
# - **plan**: FlashInfer's own planning, and **step**, a cost per step, which is 0 here.
#
# **Predict.** The 8 rows of above. Which term is the same for both? Which one decides?

# %%
from pkv.cards.costs import predict

for played in eight:
    print(f"{played.plan.stage:10} simulated {played.gpu_ms:.3f} ms, predicted")
    print("   ", predict(played.plan, card))
n_bytes = sum(steps[8][24]) * llama.kv_bytes_per_token
print(f"reading, by hand: {n_bytes / costs.memory_gb_per_s / 1e6:.3f} ms")

# %% [markdown]
# The paper prints a shorter formula, with three terms: reading, launches, and moving the states. Where fewer than 4 programs per SM read, it takes the reading to be slower in proportion; rows of unequal lengths it does not see.
#
# **Exercise ex04_3.** Write `paper_cost`, the time of a step by that formula. Mind the units: bytes, GB/s, us.

# %%
check("ex04_3")

# %% [markdown]
# Our closed form comes close to the simulator, which plays every program. But how far is the simulator from the real card? The published rows were dealt out before any fit: some to **fit** the costs, some only to **judge** them. A few more time a fitted configuration **again**, and so show how far two measurements of one thing lie apart.
#
# **Predict.** Which of the three has the smallest error?

# %%
from pkv.bench.fit.paper import clear_orders, errors, simulated

rows = published()
times = simulated(rows, costs)
for role, found in errors(rows, times).items():
    words = f"{found['median']:.1%} in the median, {found['worst']:.1%} at worst"
    print(f"{role:6}{found['rows']:3} rows, error {words}")
orders = clear_orders(rows, times)
in_order = sum(right for *_, right in orders)
print(f"pairs more than 5% apart: {in_order} of {len(orders)} in order")

# %% [markdown]
# The fitted rows, of course. That is why they are no proof, and why the rows that judge are kept apart. But *again* lies about as far off as *judge*: a fitted configuration, measured once more, is missed by as much as one that the model has never seen. So the model is about as exact as measurements repeat. The last line is what a policy needs: where two engines clearly differ, the simulator puts them in the right order. Where they differ by less than its error, it cannot know.
#
# And how does one fit costs? Where a time is a sum of costs, each times how often it is paid, every measured step is an equation, and least squares finds the costs that fit all of them best. But best by which error? By absolute error the longest steps decide alone: 1% of 2 ms is more than half of a step of 30 us. So take each error in proportion to its time. (pkv's model is not a plain sum, because of the tail, so its fit has to iterate. It squares the logarithms of predicted over measured; for small errors that is nearly the same.)
#
# **Exercise ex04_4.** Write `fit_costs`, least squares by relative error.

# %%
check("ex04_4")

# %% [markdown]
# ## Let the predictions choose
#
# `policy="cost"` plans the step with every stage, FlashInfer included, predicts all of them, and takes the least. Stages within 1% of it no prediction can tell apart; of those it takes the queue first, which was measured the fastest where stages are alike, and then `stream_k`, whose programs must find their runs before they read. Planning on the host is charged to nobody; we come to that. `pkv.explain` shows what it sees.
#
# `stream_k` is one that you have not met: all programs get equal shares, which may begin in one row and end in another. A later lesson builds it. Here it is one more stage to choose.
#
# **Predict.** One row of 65,536 tokens and seven of 2,048. Which stage is worst, and by which term?

# %%
one_long = [65536] + [2048] * 7
choice = pkv.explain(one_long, llama, policy="cost", gpu="rtx3060")
print(choice)
for entry in choice.candidates:
    print(f"{entry.stage:15} counts on {entry.plan.programs_per_sm} programs per SM")

# %%
viz.draw_choice(choice)

# %% [markdown]
# All have the same bytes to read. `split_kv` has a program for each of 8 rows and 8 KV heads, finds no room for twice as many, and does not cut (it counts on our kernel, of which more fit on an SM than the 2 of the paper's): 8 slow programs read the long row. FlashInfer does not cut it either, but its programs are faster one by one.
#
# Below the paper's policy, on the same step: it takes its gate's stage, with the paper's splits. For the queue the paper has 20, 24 or 28, by trace; a policy does not know the trace, so here it is always 24. All candidates of this picture for which the paper has a number are cut with it, the buckets too. So their times differ from those above.

# %%
viz.draw_choice(pkv.explain(one_long, llama, policy="paper", gpu="rtx3060"))

# %% [markdown]
# The picture says so where a policy leaves something on the table.
#
# **Exercise ex04_5.** Write `cheapest`, the choice itself: of the stages that can run and are alike, the preferred one.

# %%
check("ex04_5")

# %% [markdown]
# ## Where is which stage best?
#
# Now the whole map, from predictions: rows upwards, the longest row to the right, and three kinds of batches. *Equal*: all rows as long as the longest. *Ragged*: the longest, a half of it, a third, and so on. *One long*: one long row, and the others of at most 512 tokens. Kernels alone are counted.
#
# **Predict.** Where does FlashInfer lose? Use its rule.

# %%
import itertools

from pkv.viz.schedules import RAGGEDNESS

sizes = (1, 2, 4, 8, 16, 32), (1024, 4096, 16384, 65536)  # rows, longest


def map_of(charge_planning):
    """The best stage of each cell, and how much slower the second best is."""
    cells = []
    for kind, n_rows, longest in itertools.product(RAGGEDNESS, *sizes):
        lengths, ms = RAGGEDNESS[kind](n_rows, longest), {}
        found = pkv.explain(lengths, llama, policy="cost", gpu="rtx3060")
        for entry in found.candidates:
            uncharged = 0 if charge_planning else entry.prediction.plan
            ms[entry.stage] = round(entry.prediction.gpu_ms - uncharged, 6)
        best, second = sorted(ms, key=ms.get)[:2]
        cells.append((n_rows, longest, kind, best, ms[second] / ms[best] - 1))
    return cells


kernels = map_of(charge_planning=False)
viz.draw_regimes(kernels, "Predicted, kernels alone.")

# %% [markdown]
# In the *ragged* and *one long* batches, where one row outlasts the others: from 8 rows and 4K tokens on. It loses to `stream_k` in all of them. With fewer rows its splits reach enough SMs, and with many equal rows there is always enough left to read. (With exactly 8 equal rows it loses too; the question at the end asks why.) Short batches are FlashInfer's as well: its programs read faster one by one, and there are too few of ours to make up for that.
#
# The map goes beyond what was measured, which is 1 and 8 rows of the paper's traces. And its costs are those of the paper's kernels, 2 to an SM, while our stages cut their rows for kernels of which more fit. Take it as a map of reasons and not of percentages.
#
# How do the paper's gates do on this map?

# %%
right = always = 0
for n_rows, longest, _, best, _ in kernels:
    right += paper_route(n_rows, longest, llama.group)[0] == best
    always += best == "flashinfer"
print(f"right in {len(kernels)} cells: gates {right}, always FlashInfer {always}")

# %% [markdown]
# No better than a constant. (The gates cannot take `stream_k`, which the paper does not have.) But the count is harsh: in a cell that `stream_k` wins by 1%, the queue counts as wrong, just as a stage that takes twice as long. So count what a wrong choice costs, and not how many are wrong. Further down that is called regret.

# %% [markdown]
# ## Who pays for planning?
#
# FlashInfer's `plan()` runs on the host: it finds the size of the splits, writes its lists and copies them to the GPU. The published times of FlashInfer hold it in every step. The paper's own lists were made beforehand, and its times do not hold that. Whoever charges FlashInfer's planning inside each step and builds his own lists beforehand compares unlike things.
#
# How much is it? One of the six fitted costs: `flashinfer_plan_us`. Here is the same map with that counted, as the published times count.
#
# **Predict.** Which cells change hands first, those of short steps or of long ones?

# %%
viz.draw_regimes(map_of(charge_planning=True), "Predicted, FlashInfer's planning charged.")

# %% [markdown]
# The same kernels, and another winner in most cells. What FlashInfer keeps are long steps: they take so long that the planning hardly counts. (Where our stages make the same plan, as with one row, the map names the first, and says =.)
#
# Which count is right? A plan depends on the lengths, and these are the same in all layers of the model. So one plan serves every layer of a step, and its cost is shared by them. A benchmark with one layer charges it to that one.
#
# **Predict.** One row of the *bucketed* trace (8,192 tokens and a few), where the paper reports its largest win. From how many layers on is FlashInfer ahead, if its planning is charged and ours is free?

# %%
planning = costs.flashinfer_plan_us
one_row = {
    row.configuration.engine: times[row.configuration] * 1000  # simulated us
    for row in published()
    if row.log == "seed_20260623_bucketed_b1.txt"
}
rival, buckets = one_row["flashinfer"] - planning, one_row["length_buckets"]
for layers in (1, 8, 32, 80):
    shared = planning / layers
    print(f"{layers:2} layers: {shared:5.1f} us of planning in each, FlashInfer", end="")
    print(f" {rival + shared:.0f} us a layer, buckets {buckets:.0f}")
print(f"equal at {planning / (buckets - rival):.1f} layers")

# %% [markdown]
# Real models have more layers than that. But this rests on a fitted number. Is there a measurement? In another table the paper timed single rows without FlashInfer's `plan()` (8,192 tokens with its kernel for CUDA cores, the others with tensor cores):

# %%
from pkv.bench.loads.published import table

alone = table("rtx3060_isolated.csv")
for tokens in ("8192", "32768", "65536"):
    ms = {
        line["method"].split(" ")[0]: float(line["ms"])
        for line in alone
        if line["context"] == tokens and not line["splits"]
    }
    ours, theirs = ms["persistentkv"], ms["flashinfer-0.2.5"]
    print(f"{tokens:>5} tokens, published: FlashInfer {theirs:.4f} ms", end="")
    print(f", the paper's {ours:.4f}, {ours / theirs - 1:.0%} more")

# %% [markdown]
# So with one row and without planning FlashInfer is ahead by the paper's own measurements. (They were taken on a pool of pages with holes, so the numbers do not compare with those of the traces.) The largest win is one of accounting. The wins with 8 rows are wins of the schedule, and smaller than reported.
#
# Our own lists are not free either. How much do they cost? The paper does not say, and the simulator does not know. But it has been measured: pkv ships **records** that `pkv bench` made on an NVIDIA H200, with all its 132 SMs, and with 28 of them, which is what an RTX 3060 has ([lesson 03](03_workqueue.ipynb) says more about them). They hold three times of every engine: its planning on the host, copies included; the GPU's time for one layer; both together. FlashInfer's kernel with tensor cores is called directly there, and named `fa2-tensor-core`.
#
# **Predict.** The paper's schedules over that kernel, on 28 SMs, in a model of one layer. Count FlashInfer's plan alone, as the paper does; then both plans; then none. What is left of the win in each?

# %%
viz.draw_recorded("charges", n_sms=28)

# %% [markdown]
# For one row the way to count is worth far more than the schedule: with both plans, the win is a loss. With eight rows the schedule wins by every count. But how much it wins, the count decides. Our lists are not cheaper than FlashInfer's, since Python writes them. (How long that takes depends on the host; a record names its processor.)
#
# One layer is the hardest case for whoever plans on the host. `split_kv`, `row_local` and `stream_k` do not: their kernels find the bounds on the GPU.
#
# **Predict.** Which engine is the cheapest with 1 layer, and which with 80? Whose plan is the dearest?

# %%
viz.draw_recorded("layers", n_sms=28)

# %% [markdown]
# With one layer `row_local` is done before the queue's list is written. Its cut is worse, but even 80 layers do no more than pay for that list: there the two are level. `stream_k` has cuts as good as the queue's, and no list, so it is the cheapest throughout. The dearest plan is that of `adaptive:policy=cost`: it plans with every stage, and predicts all of them, in Python.
#
# **Predict.** On 132 SMs the cut gains a few per cent, as lesson 03 has shown. After how many layers is the queue ahead of `row_local` there?

# %%
viz.draw_recorded("layers", n_sms=132)

# %% [markdown]
# Not even after 80; FlashInfer's tensor-core kernel it passes between 8 and 32. On this card a stage that is planned on the GPU is the better choice, although the queue's kernels are the faster ones.
#
# ## Judge on what was not used
#
# The **regret** of a choice is its time over the time of the best choice for the same step, less 1. The best is known only afterwards. Regret says what choosing badly costs, and in how many percent.
#
# **Exercise ex04_6.** Write `regret`, its mean over steps, from the time of every stage and what a policy took.

# %%
check("ex04_6")

# %% [markdown]
# A policy that is tuned on some steps looks good on those. So tune on one seed and judge on others. The paper found its gates and split counts on seed 20260622; the costs were fitted to seed 20260623; here four other seeds judge, 20260624 to 20260627. We tune one thing ourselves, on the paper's calibration seed: how many splits a queue should make, the same for all rows. And to *always* take one stage is a policy too, and the one to beat. *One long* is a trace of ours; the others are the paper's.
#
# **Predict.** Which of "always FlashInfer" and "always the queue" has the larger regret with 8 rows? And with 4?

# %%
from pkv.bench.records.regret import held_out

traces = {
    "bimodal, 8 rows": ("bimodal", llama, 24, 8, 48),
    "uniform, 8 rows": ("uniform", llama, 24, 8, 48),
    "one long, 8 rows": ("one_long", llama, 24, 8, 48),
    "bimodal, 4 rows": ("bimodal", llama, 24, 4, 48),
    "bucketed, 1 row": ("bucketed", llama, 16, 1, 64),
}
judged = {name: held_out(*trace) for name, trace in traces.items()}
shown = {
    "policy cost": "policy cost",
    "policy paper": "policy paper",
    "always flashinfer": "always flashinfer",
    "always workqueue": "always workqueue",
    "always stream_k": "always stream_k",
    "workqueue, calibrated splits": "queue, tuned splits",
}
viz.draw_regret(
    (shown[found.route], name, found.mean, found.worst)
    for name, all_found in judged.items()
    for found in all_found
    if found.route in shown
)

# %%
for name, all_found in judged.items():
    cost = next(found for found in all_found if found.route == "policy cost")
    print(f"{name}: policy cost takes", end=" ")
    print(*(f"{stage} {n} times" for stage, n in cost.taken.items()), sep=", ")
paper = next(found for found in judged["bucketed, 1 row"] if found.route == "policy paper")
print("bucketed, 1 row: policy paper takes", paper.taken, f"worst {paper.worst:.1%}")

# %% [markdown]
# No fixed stage is good in all five. Tuning the queue's splits helps where its own cut is poor, and does not make it right for few rows. The gates do well on the traces that they were found for, and less so with one long row among short ones. The predictions are nearly always right.
#
# Why is the worst step of *policy paper* so bad on *bucketed*? At one of the four seeds a row of 16,384 tokens comes within the 64 steps. There the gates switch to buckets, and FlashInfer would be faster. That happens in few steps, so the mean hides it.
#
# Be careful with the sentence about the predictions. **The truth here is the simulator**, and the predictions are its closed form. So the picture shows that the formula is good enough to stand in for the simulator, and what a perfect knowledge of the costs would be worth. It cannot show that the simulator is right. For that, judge on measurements.
#
# There are few. We take the logs that no cost was fitted to, and that hold three engines. Each policy takes one engine for a whole log. Its regret is now against the best of the three by **published** times: once as they are, once with FlashInfer's times less its planning (the fitted number, as the logs do not tell it apart).
#
# **Predict.** The *bucketed* log has one row, of 8,192 tokens and a few. What do the paper's gates take there, and what does that cost by each count?

# %%
from pkv.bench.loads.published import mean_of_steps

judges = {}
for row in published():
    if row.role == "judge":
        judges.setdefault(row.log, []).append(row)
judges = {log: found for log, found in judges.items() if len(found) == 3}


def by_gates(c):
    """What the paper's gates take, by the longest row of the log."""
    requests = make_trace(c.trace, c.seed, c.requests, c.max_active)
    longest = max(map(max, steps_of(requests, c.max_active, c.steps)))
    return paper_route(c.max_active, longest, c.shape.group)[0]


def by_cost(found, uncharged):
    """The engine with the least predicted time, less its `uncharged` ms."""
    guess = {}
    for c in (row.configuration for row in found):
        predicted_ms = mean_of_steps(c, lambda plan: predict(plan, card).gpu_ms)
        guess[c.engine] = predicted_ms - uncharged.get(c.engine, 0)
    return min(guess, key=guess.get)


# %%
for words, uncharged in (
    ("FlashInfer's planning charged", {}),
    ("kernels alone", {"flashinfer": planning / 1000}),
):
    print(words)
    for log, found in judges.items():
        ms = {row.configuration.engine: row.gpu_ms for row in found}
        ms = {engine: time - uncharged.get(engine, 0) for engine, time in ms.items()}
        cost, gates = by_cost(found, uncharged), by_gates(found[0].configuration)
        regret = {engine: time / min(ms.values()) - 1 for engine, time in ms.items()}
        print(f"  {log[:-4]:31} cost: {cost:10} {regret[cost]:5.1%}", end="")
        print(f"   gates: {gates:10} {regret[gates]:5.1%}")

# %% [markdown]
# Read it slowly.
#
# - With planning charged, the gates send the one row to FlashInfer, and pay dearly: that is the step where the paper reports its largest win, with buckets. Its longest row is below the published gate.
# - On the kernels alone, the gates are right in every log. The predictions are not: in two logs the engines are closer together than the model's worst error, and it takes the wrong one.
#
# So `policy="cost"` is no oracle. It is as good as its costs; what it has over gates is that it also knows cards, shapes and batches that nobody has written a gate for, and that it says by how much it decides.
#
# ### Judged on a card
#
# The records allow what the logs did not. Every stage was timed at every step, with 1, 4 and 8 rows, so the best of each step is known, and the regret is measured. `policy="cost"` needs the costs of the card. `pkv calibrate` fits them to measured times, on a card of yours too; those of the H200, whole and sliced, come from seed 20260623. So that seed does not judge. (One thing was read off all seeds: that the queue comes before the stages of lessons 01 and 02 where predictions are alike.)
#
# The stage `flashinfer` here is pkv's. It calls the kernel with tensor cores, fetches page numbers before and turns lse into ours after, in every call. That takes some microseconds, which count against it.
#
# **Predict.** On 28 SMs, for which numbers of rows are the paper's gates good? Does the choice by cost beat every fixed stage?

# %%
viz.draw_recorded("regret", n_sms=28)

# %% [markdown]
# **Predict.** And on 132 SMs, for which nobody tuned the gates?

# %%
viz.draw_recorded("regret", n_sms=132)

# %% [markdown]
# With 8 rows the gates take the queue, with the paper's 24 splits a row. On 28 SMs that is right: no stage with its own cut is as fast. On 132 SMs the same cut costs some per cent. With 4 rows they hand over to FlashInfer, on either machine, and with one row they do so below 16,384 tokens. For the paper's kernels that was right, by its own account. For pkv's it is wrong.
#
# The choice by cost is good here. On 28 SMs it has the least regret over all numbers of rows, though not with 8: it chooses among stages with their own cuts, and there the paper's cut is better. On 132 SMs it has more than *always the queue*: with one row it takes `stream_k`, whose programs must find their runs first. And *always the queue* or *always stream_k* lose little in the mean, with any number of rows, as the pictures say; they need no costs, and choosing takes no milliseconds. A policy is worth its trouble where no stage is good everywhere. On the simulated RTX 3060 none was; on this card, with these traces and kernels, two are. And what a list costs the host, no policy here asks. You have seen above that it can decide.
#
# ## What else to ask the paper
#
# The paper is honest work with public logs; without them none of this could be asked. Here are its other weak points, counted live.
#
# **Predict.** The trace for one row is called "8K to 64K". How long are the rows in the 64 steps that were timed, and what would the gates take?

# %%
requests = make_trace("bucketed", 20260623, 16, 1)
one_row_steps = steps_of(requests, 1, 64)
print("prompts", sorted({request.prompt_len for request in requests}))
print("rows at once", {len(step) for step in one_row_steps}, end=", ")
print(f"of {min(one_row_steps)[0]} to {max(one_row_steps)[0]} tokens")
print("the gates take", {paper_route(len(step), max(step), 4)[0] for step in one_row_steps})
for seed in range(20260622, 20260628):
    of_seed = [max(step) for step in steps_of(make_trace("bucketed", seed, 16, 1), 1, 64)]
    buckets = sum(paper_route(1, longest, 4)[0] == "length_buckets" for longest in of_seed)
    print(
        f"{seed}: up to {max(of_seed):6,} tokens, the gates take buckets in {buckets} steps"
    )

# %% [markdown]
# One request is live at a time, and here the first one outlives the measurement: the longer ones never come. It is so in the two seeds whose one-row logs are published, 20260623 and 20260624. It is not so in all: at 20260626, and at the seed of the paper's calibration, 20260622, longer ones come.
#
# **Predict.** The paper reports less merge state and far fewer launches for its queue. Against what? Below are the eight rows of the first picture, at several splits per row.

# %%
for stage, splits in (
    ("length_buckets", 32),
    ("row_local", 20),
    ("workqueue", 20),
    ("workqueue", 32),
):
    plan = pkv.plan(steps[8][24], llama, stage=stage, splits=splits, tile=32, gpu="rtx3060")
    count = plan.counters
    print(f"{stage:14} {splits} splits: {count.merge_state_mib:.2f} MiB of states", end="")
    print(f", {count.launches:2} launches, {count.empty_programs} empty programs")
print(f"20 splits against 32: {20 / 32 - 1:.1%}")

# %% [markdown]
# | what the paper says or does | what we find | shown in |
# |---|---|---|
# | FlashInfer's `plan()` is timed, its own lists are not | one row: the win is the planning; 8 rows: in the judged logs a win remains, but a smaller one | Who pays for planning? |
# | its trace for one row covers 8K to 64K | 8K only, in the two seeds whose one-row logs are published; and its own gate would hand those steps to FlashInfer | the count above |
# | less merge state with the queue | fewer splits; at equal splits no difference | the count above |
# | from 16 launches to 2 | against buckets; bounds from each row's own length also need 2 | the count above |
# | the queue drops empty items | on this step there are none, because its rows are long | the count above; it pays with short rows, see [lesson 03](03_workqueue.ipynb) |
# | FlashInfer has one launch and no merge | with 8 rows; with one row it splits and merges | FlashInfer's plans above |
# | at 4 rows FlashInfer is better | the model agrees on the kernels; with planning charged it sees a tie. There is no published log. With pkv's kernels on an H200 the queue is faster | Two batches, and two ways to count; Judged on a card |
# | results were checked on one step | each result is held against fp64 before it is timed | all records |
# | FlashInfer got a copy of the pages in another layout | both sides run on the same cache | all records |
# | nothing about FlashInfer's newer scheduler | the stronger rival on few SMs: `batch-attention` | Measure it |
#
# ## When FlashInfer is missing, or refuses
#
# A policy looks at lengths, shape and card, and at nothing else. It does not look whether FlashInfer is installed. So the same step gets the same plan on every machine. Only when the plan runs does it turn out whether FlashInfer works here. If not, a stage of ours takes its place, and a warning says so, once per reason.
#
# **Predict.** Three short rows, `stage="adaptive"`, without a GPU. Who runs? How many warnings do two calls give?

# %%
import textwrap
import warnings

from pkv.bench.accuracy import Yardstick

torch.manual_seed(0)
q = torch.randn(3, 8, 64).half()  # [n_rows, n_q_heads, head_dim]
k, v = torch.randn(2, 3, 40, 2, 64).half()  # each [n_rows, max_len, n_kv_heads, head_dim]
cache = pkv.PagedKVCache.from_dense(k, v, [3, 10, 40], page_size=16)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    results = [pkv.decode(q, cache, stage="adaptive", return_lse=True) for _ in range(2)]
print(counted(len(caught), "warning"), "in 2 calls; right:", end=" ")
print(all(Yardstick(q, cache).measure(*result, True).ok for result in results))
for warning in caught:
    print(textwrap.fill(str(warning.message), 90))

# %% [markdown]
# If you name FlashInfer yourself, nothing takes its place. Whoever measures an engine must get that engine or an error.

# %%
try:
    pkv.decode(q, cache, stage="flashinfer")
    print("FlashInfer works here")
except RuntimeError as error:
    print(textwrap.fill(f"{type(error).__name__}: {error}", 90))

# %% [markdown]
# Some shapes FlashInfer cannot do anywhere. That is known from the shape alone, so the policy knows it before it chooses.

# %%
exact = pkv.Shape(32, 8, 128, 16, torch.float32)
print(textwrap.fill(pkv.explain([65536] * 4, exact, gpu="rtx3060").rule, 90))

# %% [markdown]
# ## States of two engines merge, in one base
#
# A row may even be shared: its first tokens read by FlashInfer, the others by us. States merge, whoever made them, as long as both lse have the same base. FlashInfer's is log2, ours is ln. `stage="flashinfer"` multiplies by ln 2 before it hands over.
#
# By hand: a row of 4 tokens, scores 0. Part A has 3 tokens of value 1, part B one of value 0. Suppose that FlashInfer read part A. Its lse is log2 3.
#
# **Predict.** The mean of all four is 0.75. Which error counts part A too heavily: to forget the conversion, or to do it twice?

# %%
import math

values = torch.tensor([0.0, 1.0, 1.0, 1.0]).half()[None, :, None, None].expand(1, 4, 2, 64)
part_b = pkv.PagedKVCache.from_dense(torch.zeros_like(values), values, [1], page_size=4)
out_b, lse_b = pkv.decode(q[:1] * 0, part_b, stage="split_kv", return_lse=True)
out_a = torch.ones_like(out_b)  # what FlashInfer returns for part A
lse_a = torch.full_like(lse_b, math.log2(3))
for words, factor in (
    ("right", math.log(2)),
    ("forgotten", 1),
    ("twice", math.log(2) ** 2),
):
    out, lse = pkv.merge([(out_a, lse_a * factor), (out_b, lse_b)])
    print(f"{words:9} out {out[0, 0, 0].item():.3f}   lse ln {lse[0, 0].exp().item():.3g}")

# %% [markdown]
# ## The rules of this stage, and what breaks
#
# | rule | without it |
# |---|---|
# | 1. A choice follows from lengths, shape and card alone | two machines of one service choose differently, and no test can say which is right |
# | 2. Only rows with tokens count | padding rows change the route |
# | 3. All sides are charged alike | the accounting wins |
# | 4. What was used to tune does not judge | the error looks smaller than it is |
# | 5. Costs belong to one card and its kernels | a wrong choice, with full confidence |
# | 6. A fallback is announced, and a named stage never falls back | somebody measures the wrong engine |
# | 7. States meet in one base | the wrong means above |
#
# Rules 3, 4, 6 and 7 you have seen. **Rule 1:** this machine may have no FlashInfer, and the plan is FlashInfer's all the same, with a stand-in named.

# %%
plan = pkv.plan(steps[4][24], llama, stage="adaptive", gpu="rtx3060")
print(f"stage {plan.stage}, {plan.variant}, fallback {plan.fallback}")

# %% [markdown]
# **Rule 2.** A server pads its batch to 8 rows; only two of them hold tokens.

# %%
padded = [32768, 32768] + [0] * 6
print("right:", pkv.explain(padded, llama, gpu="rtx3060").chosen)
print("wrong:", paper_route(len(padded), max(padded), llama.group)[0], "(all rows counted)")

# %% [markdown]
# **Rule 5.** Somebody takes the costs of the paper's programs for FlashInfer's too. The model does not complain; it chooses.

# %%
import dataclasses

wrong_costs = dataclasses.replace(costs, flashinfer_program_gb_per_s=None)
wrong_card = dataclasses.replace(card, costs=wrong_costs)
right = pkv.explain(steps[4][24], llama, policy="cost", gpu=card)
wrong = pkv.explain(steps[4][24], llama, policy="cost", gpu=wrong_card)
predictions = {entry.stage: entry.prediction for entry in right.candidates}
ms = {stage: found.gpu_ms - found.plan for stage, found in predictions.items()}
print(f"right costs: {right.chosen}, {ms[right.chosen] * 1000:.0f} us")
print(f"wrong costs: {wrong.chosen}, {ms[wrong.chosen] * 1000:.0f} us by the right ones")

# %% [markdown]
# And where nobody has measured a card, there is no prediction, rather than that of another card. (On a card of your own, `pkv calibrate` measures it, in a minute or two.)

# %%
unmeasured = pkv.GpuProfile("a new card", arch=90, n_sms=132)
try:
    pkv.explain([65536], llama, policy="cost", gpu=unmeasured)
except ValueError as error:
    print(textwrap.fill(str(error), 90))

# %% [markdown]
# ## Try it
#
# Run this cell in JupyterLab, and move the sliders. Take *equal* rows, the longest of 65,536 tokens, policy *cost*. For which number of rows does FlashInfer lose, and why not for twice as many? Then take policy *paper*.

# %%
from pkv.viz import widgets

widgets.explore_policy(rows=8, longest=16384, raggedness="ragged", policy="cost")

# %% [markdown]
# **Answer.** For 8 rows only. They make 64 programs of FlashInfer, one per row and KV head, and 56 fit. The other 8 come last and read alone, too few to use all of the memory. Of 16 rows, 16 programs come last, and they are enough. Of 64 rows it is 8 again, but after nine full rounds, so that the loss hardly counts. The paper's gates take the queue from 8 rows on, whatever the lengths are, and the picture says what FlashInfer would take.
#
# ## Measure it
#
# At last all engines of the records, on all 75 loads of the paper's traces: pkv's stages, what FlashInfer offers, the Triton kernels of vLLM and SGLang, and PyTorch's attention on pages that are first copied together. Each is held against the *best* of FlashInfer's four engines on that load, by GPU time. That is a harder rival than the paper's. One of the four, `batch-attention`, is FlashInfer's newer scheduler, which deals equal work to programs that stay. (`fa2-cuda-core` is what FlashInfer does by default, `xqa` is TensorRT-LLM's kernel.)
#
# **Predict.** On 28 SMs, which of the four is the best in the mean? Is one of our stages faster on every load?

# %%
viz.draw_recorded("ratios", n_sms=28)

# %% [markdown]
# **Predict.** On 132 SMs, which engines change places?

# %%
viz.draw_recorded("ratios", n_sms=132)

# %% [markdown]
# On few SMs the newer scheduler is FlashInfer's best in the mean, and on most loads with 4 or 8 rows; the paper's rival is far behind on some of those, and ahead on all with one row. On many SMs the paper's rival is the best on nearly all loads, and six engines lie within about a tenth of each other in the mean: there the memory decides. Losses are here as well as wins. `split_kv` falls far behind FlashInfer on ragged loads and few SMs, the buckets on many SMs. And `adaptive`, which follows the paper's gates, pays for every hand-over. (`adaptive:policy=cost` ran with earlier costs than those that pkv ships.)
#
# If you have a GPU, this cell times one, four and eight rows of this lesson on it.

# %%
from pkv.bench.measuring import live

engines = ["length_buckets", "row_local", "workqueue", "adaptive"]
engines += ["fa2-tensor-core", "batch-attention", "stream"]  # stream: a plain read
if live.can_time():
    for lengths in ([65536], steps[4][24], steps[8][24]):
        print(live.time_engines(lengths, llama, engines))
else:
    print(f"No GPU here. On one, this cell times {', '.join(engines)}.")

# %% [markdown]
# ## What to remember
#
# - No schedule is best everywhere. Which one is follows from rows, lengths and the card, so it can be predicted.
# - FlashInfer's tensor-core schedule stops splitting where rows x KV heads outnumber 2 programs per SM. Then one long row is read by few programs, and what counts is whether they can keep the memory busy.
# - Charge planning to all sides or to none. A plan serves all layers of a step.
# - Tune on some seeds, judge on others, and say what your truth is: a simulator, or measurements.
# - A policy says why. It announces a fallback, and never hides one.
# - Plans that the host makes cost time, and serve one step. Next: [05 Planned on the GPU](05_stream_k.ipynb).

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
# # 00 The paged KV cache
#
# **To write one token, a language model reads everything it has kept of the tokens before.** That store is the KV cache: for each token a key K and a value V. Each of the model's **KV heads** has its own K and V, vectors of **head_dim** numbers. The arithmetic on them is small. The bytes are many.
#
# A GPU runs a **kernel**, a function, as many **programs** side by side. (CUDA calls them thread blocks; we write kernels in Triton, which says programs.) Each program has a number, and finds out from it which work is its own. So this course asks one question again and again: which program reads which bytes?
#
# This lesson shows where the bytes lie, what is computed from them, and why memory sets the speed.
#
# Each step has a claim, a picture or a short cell, and its result. Where you read **Predict**, decide first, then run the cell. The outputs are saved with the lesson, so that it can be read without running anything. So clear them before you begin, or you will see each answer beside its question: **Edit → Clear Outputs of All Cells**.
#
# No GPU is needed: without one, our Triton kernels run in Triton's interpreter, slowly and correctly.

# %%
import pkv

where = "in Triton's interpreter, on the CPU" if pkv.INTERPRETED else "compiled, on the GPU"
print(f"Kernels run {where}.")

# %% [markdown]
# ## A row's tokens lie in pages
#
# A **row** is one sequence of the batch. Its tokens are kept in **pages** of equal size, here 4 tokens. A page has one **slot** per token. All pages come from one **pool**, and a row takes a new page only when it needs one. So a row's pages may lie anywhere in the pool. In the order of the row's tokens we count them as its **logical pages** 0, 1, 2, ...
#
# Below are two rows, of 3 and of 10 tokens. To make things checkable by hand, every key and value of token *t* is the number *t*. A range begin:end holds begin and stops before end, as in Python: 0:3 are the tokens 0, 1 and 2.

# %%
import torch

from pkv import viz

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
tokens = torch.arange(10, dtype=torch.float16)
k = v = tokens[None, :, None, None].expand(
    2, 10, 2, 64
)  # [n_rows, max_len, n_kv_heads, head_dim]
cache = pkv.PagedKVCache.from_dense(k, v, lengths=[3, 10], page_size=4, seed=3, n_pages=6)
viz.draw_pages(cache)

# %% [markdown]
# The **block table** is what connects the two halves of the picture: one line per row, one page number per logical page. Here it has more columns than any row has pages: the pool has free pages, and either row may still take them all. Entries that a row does not use hold -1 here, but may hold anything.

# %%
print("block table", cache.block_table.tolist())
print("lengths    ", cache.lengths.tolist())
print(
    "pool       ", list(cache.k_pages.shape), "= [n_pages, page_size, n_kv_heads, head_dim]"
)

# %% [markdown]
# **Predict.** In which page, and in which slot of it, does token 9 of row 1 lie? Use the printed table and the page size 4.

# %%
row, token = 1, 9
page, slot = int(cache.block_table[row, token // 4]), token % 4
print(
    f"page {page}, slot {slot}, which holds the value {cache.v_pages[page, slot, 0, 0]:g}"
)

# %%
viz.draw_pages(cache, highlight=(row, token))

# %% [markdown]
# Division gives the logical page, the remainder gives the slot, and the table gives the page. That is the whole of paging. Our kernel does the same (`find_pages` in `pkv/tile.py`). The tokens of a page share their page number, so it looks up each page once, not each token.

# %% [markdown]
# **Exercise ex00_1.** Which page its last token lies in also says how many pages a row takes. Open [exercises/ex00_paged_kv_cache.py](../exercises/ex00_paged_kv_cache.py), write `pages_needed`, and save. The next cell reads the file and says whether it is right; `hint("ex00_1")` helps, in three steps. All exercises go like this, and no lesson waits for them.

# %%
from pkv.course import check, hint

check("ex00_1")

# %% [markdown]
# ## A row grows without moving
#
# **Predict.** Each row gets two more tokens, the same number for both. Which row needs a new page, and for its first new token or its second?

# %%
for token in (3, 4):
    new = torch.full(
        (2, 2, 64), float(token), dtype=torch.float16
    )  # [n_rows, n_kv_heads, head_dim]
    cache.append(new, new)
    print("lengths", cache.lengths.tolist(), "free pages", cache.n_free_pages)

# %%
viz.draw_pages(cache)

# %% [markdown]
# Row 0 had one slot left, so only its second token took a page. Row 1 had two slots left. Nothing that was there has moved. A dense tensor would have had to reserve the longest possible row for everybody; pages waste at most one part-filled page per row.

# %% [markdown]
# **Exercise ex00_2.** How many slots of it are left depends on how many tokens its last page holds. Write `last_page_len` in the same file.

# %%
check("ex00_2")

# %% [markdown]
# ## What is computed
#
# Each row brings one **query** vector q per query head, for the token to come. For a row with L tokens:
#
# - score[t] = scale · (q · k[t]), for each of its tokens t. q · k[t] is a dot product of head_dim numbers. The **scale** is 1 / sqrt(head_dim) unless you give another; without it, scores would grow with head_dim
# - **out** = the mean of v[t], weighted by exp(score[t])
# - **lse** = ln of the sum of exp(score[t]), the *log-sum-exp*: how heavy the whole row weighs. Lesson 01 needs it.
#
# `stage="reference"` computes this in PyTorch, row by row. It is the specification of all later stages.
#
# **Predict.** Let q be 0. Then all scores are 0 and all tokens weigh the same. What are out and lse of rows with 3 and with 10 tokens, whose values are 0, 1, 2, ...?

# %%
cache = pkv.PagedKVCache.from_dense(k, v, lengths=[3, 10], page_size=4, seed=3, n_pages=6)
q = torch.zeros(2, 8, 64, dtype=torch.float16)  # [n_rows, n_q_heads, head_dim]
out, lse = pkv.decode(q, cache, stage="reference", return_lse=True)
print("out", list(out.shape), "of head 0:", out[:, 0, 0].tolist())
print(
    "lse", list(lse.shape), "of head 0:", [f"ln {x:.4g}" for x in lse[:, 0].exp().tolist()]
)

# %% [markdown]
# The mean of 0 .. L - 1 is (L - 1) / 2, and L weights of exp(0) = 1 sum to L. With q = 0 one can see at a glance whether a token was lost, or read twice. We shall use this often.
#
# ## Several query heads share a KV head
#
# The batch above has 8 query heads and 2 KV heads. Models do this to keep the cache small (*grouped-query attention*, GQA). **G** is the number of query heads per KV head. Query head i reads KV head i // G.
#
# **Predict.** Let all values of KV head h be the number h. What do the 8 query heads return?

# %%
heads = torch.arange(2, dtype=torch.float16)[None, None, :, None].expand(2, 10, 2, 64)
head_cache = pkv.PagedKVCache.from_dense(k, heads, lengths=[3, 10], page_size=4)
print(pkv.decode(q, head_cache, stage="reference")[1, :, 0].tolist())

# %% [markdown]
# ## Our kernel reads the block table
#
# Now the same through our own Triton kernel. One **program** takes one KV head of one row, and serves all G query heads of its group: each key and each value is read once for G heads. `splits=1` says that no row is cut; lesson 01 changes that.
#
# A **plan** says which program reads which tokens. It is a value: print it, draw it, run it. At the end of a cell it draws itself. The words in it:
#
# - An **item** is a token range of one row.
# - A **tile** is what a program reads at a time, 16 tokens.
# - A **launch** is the start of one kernel.
# - An **SM**, a *streaming multiprocessor*, is a part of the GPU that runs programs. It holds several at once; how many depends on the registers and the shared memory that one program takes, and so on head_dim.
#
# A good plan depends on the GPU. So that your pictures are those of this text, we plan for an RTX 3060, which has 28 SMs, whatever you have. Leave out `gpu=`, and `pkv.plan` takes the GPU at hand, or the RTX 3060 if there is none.

# %%
shape = pkv.Shape.of(q, cache)
plan = pkv.plan([3, 10], shape, stage="split_kv", splits=1, gpu="rtx3060")
plan

# %%
print(plan)

# %% [markdown]
# Each row is one item here. **Waves** counts how often the GPU is filled: programs, divided by all that its SMs hold at once. Far below 1, most of it has nothing to do.
#
# We run the plan on random numbers in fp16 (2 bytes each) and compare with the same formula in fp64 (8 bytes), whose rounding is too small to matter. `Yardstick` computes that, and a tolerance. The tolerance is not chosen by us: it is twice what a plain fp16 computation of the same formula is off by, plus rounding.

# %%
from pkv.bench.accuracy import Yardstick

torch.manual_seed(0)
q, k, v = (
    torch.randn(size).half() for size in [(2, 8, 64), (2, 10, 2, 64), (2, 10, 2, 64)]
)
cache = pkv.PagedKVCache.from_dense(k, v, lengths=[3, 10], page_size=4, seed=3)
out, lse = pkv.run(q, cache, plan)
print(
    list(out.shape),
    "within the tolerance of fp64:",
    Yardstick(q, cache).measure(out, lse).ok,
)

# %% [markdown]
# **Predict.** We shuffle the pool differently (another `seed`). Does the result change by rounding, or not at all?

# %%
for seed in (None, 1, 2):
    shuffled = pkv.PagedKVCache.from_dense(k, v, lengths=[3, 10], page_size=4, seed=seed)
    again, _ = pkv.run(q, shuffled, plan)
    print(
        "pages of row 1:",
        shuffled.block_table[1].tolist(),
        "every bit equal:",
        torch.equal(again, out),
    )

# %% [markdown]
# Not at all. The order of the *tokens* is the order of the arithmetic, and the table restores it.

# %% [markdown]
# **Exercise ex00_3.** Restore it yourself: write `gather_row`, which copies a row's tokens out of a shuffled pool.

# %%
check("ex00_3")

# %% [markdown]
# ## Five rules, and what breaks without them
#
# | rule | without it |
# |---|---|
# | 1. Unused slots never reach a result | NaN, or the tokens of a row that used the page before |
# | 2. A page number comes from the table | the tokens of some other row |
# | 3. Query head i reads KV head i // G | heads swapped, with no error anywhere |
# | 4. The largest score is subtracted before exp | inf / inf = NaN once scores are large |
# | 5. A row of no tokens has out 0, lse -inf | 0 / 0 = NaN, which then spreads |
#
# **Rule 1.** We put NaN into the unused slot of row 0. Our kernel does not notice. Reading one slot too many does.

# %%
probe_q = torch.zeros(2, 8, 64, dtype=torch.float16)
ramp = tokens[None, :, None, None].expand(2, 10, 2, 64)
poisoned = pkv.PagedKVCache.from_dense(ramp, ramp, lengths=[3, 10], page_size=4)
poisoned.k_pages[0, 3:] = poisoned.v_pages[0, 3:] = torch.nan
print("right:", pkv.decode(probe_q, poisoned)[0, 0, 0].item())
print("wrong:", poisoned.v_pages[0, :4, 0, 0].mean().item(), "(4 slots, for 3 tokens)")

# %% [markdown]
# **Rule 2.** Row 1 has 3 pages. Someone takes its logical page 0 for page 0 of the pool.

# %%
probe = pkv.PagedKVCache.from_dense(ramp, ramp + 100, lengths=[3, 10], page_size=4, seed=1)
k_ids = probe.block_table[1, :3].tolist()
print("right: pages", k_ids, "hold", probe.v_pages[k_ids, :, 0, 0].flatten()[:10].tolist())
print(
    "wrong: pages",
    [0, 1, 2],
    "hold",
    probe.v_pages[[0, 1, 2], :, 0, 0].flatten()[:10].tolist(),
)

# %% [markdown]
# **Rule 3.** The classic wrong map is i % n_kv_heads. Both maps give each KV head the same number of query heads, so no shape is wrong and no error is raised.

# %%
group, n_kv_heads = shape.group, shape.n_kv_heads
print("right:", [i // group for i in range(shape.n_q_heads)])
print("wrong:", [i % n_kv_heads for i in range(shape.n_q_heads)])
print("ours: ", pkv.decode(probe_q, head_cache)[1, :, 0].int().tolist())

# %% [markdown]
# **Rule 4.** exp of a large score overflows. Subtracting the largest score first changes nothing in the quotient, and nothing overflows.

# %%
scores, values = torch.tensor([0.0, 100.0, 200.0]), torch.tensor([0.0, 1.0, 2.0])
weights, safe = scores.exp(), (scores - scores.max()).exp()
print("right:", (safe @ values / safe.sum()).item())
print("wrong:", (weights @ values / weights.sum()).item())

# %% [markdown]
# **Rule 5.** A row that has just been freed, or not yet filled, still stands in the batch.

# %%
with_empty = pkv.PagedKVCache.from_dense(ramp, ramp, lengths=[0, 10], page_size=4)
out, lse = pkv.decode(probe_q, with_empty, return_lse=True)
print("right:", out[:, 0, 0].tolist(), "lse", [f"{x:.3f}" for x in lse[:, 0].tolist()])
print(
    "wrong:",
    (torch.zeros(()) / torch.zeros(())).item(),
    "(no values, divided by no weights)",
)

# %% [markdown]
# **Exercise ex00_4.** Rules 3, 4 and 5 are where attention goes wrong in practice. Write `attend_row`, which keeps them.

# %%
check("ex00_4")

# %% [markdown]
# ## Bytes and arithmetic
#
# Now to speed. For one token of one row, K and V are 2 · n_kv_heads · head_dim numbers, and each is read once. The arithmetic is 4 · n_q_heads · head_dim **flop** (floating-point operations): q · k and weight · v, each a multiply and an add.
#
# We take the sizes of Llama-3-8B: 32 query heads, 8 KV heads, head_dim 128, fp16, in each of its 32 layers.
#
# **Predict.** How many MiB does one layer read, to write one token after 65,536 others? And how many flop per byte is that?

# %%
llama = pkv.Shape(
    n_q_heads=32, n_kv_heads=8, head_dim=128, page_size=16, dtype=torch.float16
)
mib = 65536 * llama.kv_bytes_per_token / 2**20
print(f"{llama.kv_bytes_per_token:,} bytes per token, {mib:g} MiB for 65,536 tokens")
print(f"{viz.flop_per_token(llama):,} flop per token, G = {llama.group}")
print(f"{viz.flop_per_byte(llama):g} flop per byte")

# %% [markdown]
# The length has dropped out: flop and bytes both grow with it. In fp16 the number of flop per byte *is* G. GQA divides the bytes by G and leaves the arithmetic as it is:

# %%
shapes = {}
for n_kv_heads in (32, 8, 4):
    one = pkv.Shape(32, n_kv_heads, 128, 16, torch.float16)
    shapes[f"G = {one.group}"] = one
    mib = 65536 * one.kv_bytes_per_token / 2**20
    print(f"G = {one.group}: {mib:5g} MiB, {viz.flop_per_byte(one):g} flop per byte")

# %% [markdown]
# **Exercise ex00_5.** G came out of four sizes, one of which cancels. Write `flop_per_byte` from all four.

# %%
check("ex00_5")

# %% [markdown]
# ## The roofline
#
# A GPU can move so many bytes a second and do so many flop a second. Divide, and you get its **ridge**: with fewer flop per byte than that, memory is the limit. These are the vendors' numbers (1 TFLOP/s is 1000 GFLOP/s):

# %%
cards = [viz.roofs_of("rtx3060"), viz.roofs_of("h200")]
for card in cards:
    print(f"{card.title}: {card.gb_per_s:,g} GB/s, {card.tflop_per_s:g} TFLOP/s in fp16")

# %% [markdown]
# **Predict.** Where is each card's ridge, in flop per byte? On which side of it does decode attention with G = 4 lie, and by which factor?

# %%
viz.draw_roofline(shapes)

# %%
for card in cards:
    factor = card.ridge / viz.flop_per_byte(llama)
    print(f"{card.title}: ridge at {card.ridge:.0f}, {factor:.0f} times G = {llama.group}")

# %% [markdown]
# Far to the left. No better arithmetic helps. What helps is to read each byte once, and to keep the memory busy all the time. From the bytes and the data sheet follows the least time that any kernel can take:

# %%
for card in cards:
    least = 65536 * llama.kv_bytes_per_token / card.gb_per_s / 1e3
    print(f"{card.title}: at least {least:.0f} microseconds a layer for 65,536 tokens")

# %% [markdown]
# ## Try it
#
# Run this cell in JupyterLab, and move the sliders. The notebook saves the picture that you saw last, but not the sliders. When you open it again, run the cell again to have them back, also where JupyterLab says *Error displaying widget*.
#
# Large pages leave slots unused. Small pages need a large block table, which must be kept up to date on the GPU. The text in the picture counts both. Say that at most 10 slots may be unused, and that the table may have at most 60 entries.
#
# - Set 4 rows, the longest of 40 tokens. Which page sizes will do?
# - Set 6 rows, the longest of 37 tokens. And now?

# %%
from pkv.viz import widgets

widgets.explore_pages(rows=3, longest=12, page_size=4)

# %% [markdown]
# **Answer.** In the first batch, page sizes 3 and 4. With 2 the table has 80 entries, with 8 there are 13 unused slots. Size 4 wastes fewer slots than 3 there: what counts is how the lengths divide, not only the size. In the second batch none will do: size 3 needs 78 entries, and size 4 leaves 11 slots unused. One of the two limits must give.

# %% [markdown]
# ## Measure it
#
# Measured times ship with this course, as **records**: what was timed, on which card, with which versions. Here on an NVIDIA H200, GPU time of one layer. `stream` only reads as many bytes, once, without a page table: the most that one can hope for. `split_kv` is our kernel with rows cut up, as in lesson 01. `gather-sdpa` copies the pages to a dense tensor and calls PyTorch's attention, which reads them again. Caches are emptied before each call.
#
# **Predict.** Which part of the data sheet's rate does each of the three reach with one row of 16,384 tokens? And with eight rows, the longest of 65,536?

# %%
from pkv.bench.records.results import machine_of, results_of
from pkv.bench.records.shipped import shipped_part

record = shipped_part("smoke", 132)
print(*{machine_of(run) for run in record.runs.values()})
for load in ("equal(1,16k)", "zipf(8,64k)"):
    print(f"{load}, {sum(record.loads[load].steps[0].lengths):,} tokens")
    for engine in ("stream", "split_kv", "gather-sdpa"):
        timed = results_of(record)[load][engine]
        rate, roof = timed.gb_per_s, viz.roofs_of("h200").gb_per_s
        print(f"  {engine:12}{timed.gpu_us:7,.0f} us {rate:6,.0f} GB/s, {rate / roof:4.0%}")

# %% [markdown]
# Even a plain read is far from the data sheet while the bytes are few: to start, and to end, takes time too. So from lesson 01 on we hold kernels against a plain read of the same bytes. A copy of the row, written and read again, should cost three reads; here it costs far more.
#
# On a GPU, the next cell times one row on yours, with one program per KV head. That is few: lesson 01 begins there.

# %%
from pkv.bench.measuring import live

engines = ["split_kv:splits=1", "gather-sdpa", "stream"]
if live.can_time():
    print(live.time_engines([16384], llama, engines))
else:
    print("No GPU here: this cell would check these against fp64, then time them:")
    print(engines)

# %% [markdown]
# ## What to remember
#
# - A token lies in page `block_table[row, token // page_size]`, slot `token % page_size`.
# - A result is a pair: out, and lse, the weight of all that it stands for.
# - Decode attention does about G flop per byte. Memory is the limit, on every card.
# - So what decides is which program reads which bytes. Next: [01 Split-KV and the exact merge](01_split_kv.ipynb).

"""Inputs that make mistakes visible, and plain answers to them with switches for what people get wrong.

Pages are shuffled, what no row owns is NaN, table entries past a row's pages name pages that do not exist, every page
and KV head has its own mean.
"""

import re
from typing import Any

import torch

from pkv._triton import GPU_VISIBLE
from pkv.cache.paged import PagedKVCache
from pkv.course.tasks import Case, Raised, Spec, Unfit

OF_NOTHING = re.compile(
    r"empty|zero|size 0|numel\(\) == 0|no identity|not enough values|at least one|out of (range|bounds)"
)
DEVICE = torch.device("cuda" if GPU_VISIBLE else "cpu")


def paged_row(spec: Spec) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A pool, the table of some rows, and the number of the row asked for (the last one), of spec["length"] tokens.

    spec["turned"]: the heads of a page lie one after the other, as in layout HND.
    """
    generator = torch.Generator().manual_seed(spec["seed"])
    n_rows, page_size, n_heads = spec["n_rows"], spec["page_size"], spec["n_kv_heads"]
    lengths = [page_size + 1] * (n_rows - 1) + [spec["length"]]
    counts = [rounded_up(length, page_size) for length in lengths]
    order = torch.randperm(sum(counts) + 2, generator=generator)  # two pages are nobody's
    pages = torch.full((len(order), page_size, n_heads, 4), torch.nan)
    table = torch.full((n_rows, max(counts) + 1), 2**31 - 1, dtype=torch.int32)
    first = 0
    for row, (length, count) in enumerate(zip(lengths, counts)):
        mine = order[first : first + count]
        table[row, :count] = mine.int()
        first += count
        values = torch.randn(count * page_size, n_heads, 4, generator=generator)
        values += torch.arange(count * page_size)[:, None, None] + 100 * row
        values[length:] = torch.nan
        pages[mine] = values.reshape(count, page_size, n_heads, 4)
    pages = pages.to(getattr(torch, spec.get("dtype", "float32")))
    if spec.get("turned"):
        pages = pages.transpose(1, 2).contiguous().transpose(1, 2)
    return pages, table, n_rows - 1


def rounded_up(length: int, size: int) -> int:
    """How many tiles, or pages, of that size a row takes."""
    return -(-length // size)


def heads_say(case: Case, got: Any) -> str:
    """Which query head used which KV head, where the map is i % n_kv_heads."""
    n_kv_heads, group = case.spec["n_kv_heads"], case.spec["group"]
    head = next((i for i in range(n_kv_heads * group) if i % n_kv_heads != i // group), 0)
    return f"query head {head} used KV head {head % n_kv_heads}, not {head // group}: i % n_kv_heads instead of i // G"


def fails_for_lack(got: Any) -> bool:
    """Is it an exception of who divides by 0, or takes the first or the largest of none?"""
    return isinstance(got, Raised) and (
        got.kind in ("IndexError", "StopIteration") or bool(OF_NOTHING.search(got.text))
    )


def row_of(pages: torch.Tensor, page_ids: torch.Tensor, length: int) -> torch.Tensor:
    """[length, ...]: the first tokens of the pages named, in that order."""
    page_size = pages.shape[1]
    return pages[page_ids[: rounded_up(length, page_size)].long()].flatten(0, 1)[:length]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *,
    head_map: str = "group", lse_of: str = "natural", divided: bool = True, one_max: bool = False,
) -> Any:  # fmt: skip
    """out [n_q_heads, head_dim] and lse [n_q_heads] of one row, in fp64, then as q; the options are mistakes."""
    n_q_heads, n_kv_heads = q.shape[0], k.shape[1]
    if len(k) == 0:
        return torch.zeros_like(q), q.new_full((n_q_heads,), -torch.inf)
    group = n_q_heads // n_kv_heads
    heads = torch.tensor([i % n_kv_heads if head_map == "modulo" else i // group for i in range(n_q_heads)])
    scores = scale * torch.einsum("hd,thd->th", q.double(), k[:, heads].double())
    largest = scores.amax().expand(n_q_heads) if one_max else scores.amax(0)
    weights = (scores - largest).exp()
    total = weights.sum(0)
    out = torch.einsum("th,thd->hd", weights, v[:, heads].double())
    lse = {
        "natural": largest + total.log(),
        "sums": total.log(),
        "max": largest,
        "mixed": largest + total.log2(),
        "log2": (largest + total.log()) / 0.6931471805599453,
        "exp": (largest + total.log()).exp(),
    }[lse_of]
    return (out / total[:, None] if divided else out).to(q.dtype), lse.to(q.dtype)


def paged_batch(spec: Spec) -> tuple[torch.Tensor, PagedKVCache]:
    """q [n_rows, n_q_heads, head_dim] and a poisoned cache, on the GPU where there is one.

    spec: lengths, page_size, n_kv_heads, group, head_dim, seed, and maybe size (of q: how large scores get, default 1)
    and dtype (a name, default "float32"). Values grow with the token and the KV head, so that each mean is its own.
    """
    sizes = [spec[name] for name in ("page_size", "n_kv_heads", "group", "head_dim")]
    lengths = spec["lengths"]
    if min(sizes) < 1 or not lengths:
        raise Unfit
    page_size, n_kv_heads, group, head_dim = sizes
    generator = torch.Generator().manual_seed(spec["seed"])
    dtype = getattr(torch, spec.get("dtype", "float32"))
    q = torch.randn(len(lengths), n_kv_heads * group, head_dim, generator=generator) * spec.get("size", 1.0)
    counts = [rounded_up(length, page_size) for length in lengths]
    order = torch.randperm(sum(counts) + 2, generator=generator)
    k_pages, v_pages = torch.full((2, len(order), page_size, n_kv_heads, head_dim), torch.nan)
    table = torch.full((len(lengths), max(counts) + 1), 2**31 - 1, dtype=torch.int32)
    first = 0
    for row, (length, count) in enumerate(zip(lengths, counts)):
        mine = order[first : first + count]
        table[row, :count] = mine.int()
        first += count
        k, v = torch.randn(2, count * page_size, n_kv_heads, head_dim, generator=generator)
        v += torch.arange(count * page_size)[:, None, None] / 8 + torch.arange(n_kv_heads)[:, None]
        k[length:] = v[length:] = torch.nan
        k_pages[mine], v_pages[mine] = (x.reshape(count, page_size, n_kv_heads, head_dim) for x in (k, v))
    k_pages, v_pages = k_pages.to(dtype).to(DEVICE), v_pages.to(dtype).to(DEVICE)
    on_device = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    cache = PagedKVCache(k_pages, v_pages, table.to(DEVICE), on_device, host_lengths=list(lengths))
    return q.to(dtype).to(DEVICE), cache

"""Exercise 00: the paged KV cache. Lesson 00 explains it; check("ex00_1") in a notebook judges it.

Write the functions that raise NotImplementedError, where the lesson names them. Each says what it takes and gives, with
an example worked by hand. Below it stands its specification, NAME_spec: short, plain and slow. Yours must give the same
without using it.
"""

import torch


def pages_needed(length: int, page_size: int) -> int:
    """ex00_1: how many pages a row of `length` tokens takes. One line; no loop.

    By hand, page_size 4: a row of 3 tokens takes 1 page, 4 tokens 1, 5 tokens 2, 10 tokens 3; an empty row takes none.
    """
    return -(-length // page_size)


def pages_needed_spec(length: int, page_size: int) -> int:
    """Count the pages that tokens 0, 1, 2, ... lie in."""
    return len({token // page_size for token in range(length)})


def last_page_len(length: int, page_size: int) -> int:
    """ex00_2: how many tokens lie in the last page of a row; 0 for an empty row. One or two lines; no loop.

    By hand, page_size 4: of 3 tokens 3 lie there, of 4 tokens 4, of 5 tokens 1, of 10 tokens 2. A full last page counts
    as page_size, not as 0: kernels read so many slots of it.
    """
    return (length - 1) % page_size + 1 if length else 0


def last_page_len_spec(length: int, page_size: int) -> int:
    """Count the tokens that lie in the same page as the last one."""
    return sum(token // page_size == (length - 1) // page_size for token in range(length))


def gather_row(pages: torch.Tensor, block_table: torch.Tensor, row: int, length: int) -> torch.Tensor:
    """ex00_3: the tokens of one row, in order, out of the pool. About 4 lines.

    pages [n_pages, page_size, n_kv_heads, head_dim], of any strides and dtype: the heads of a page may lie one after
    the other; block_table [n_rows, max_pages], int32. Returns [length, n_kv_heads, head_dim], of the same dtype.
    Entries of the table past the row's pages hold anything, also numbers of pages that do not exist, and slots past the
    row's tokens hold NaN: neither may be read.

    By hand, page_size 4, block_table[1] = [5, 0, 2, -1], length 10: tokens 0-3 are page 5, tokens 4-7 are page 0,
    tokens 8 and 9 are slots 0 and 1 of page 2.
    """
    page_size = pages.shape[1]
    n_pages = -(-length // page_size)
    page_ids = block_table[row, :n_pages].long()
    return pages[page_ids].flatten(0, 1)[:length]


def gather_row_spec(pages: torch.Tensor, block_table: torch.Tensor, row: int, length: int) -> torch.Tensor:
    """Token by token: the quotient finds the page, the remainder the slot."""
    page_size = pages.shape[1]
    out = pages.new_empty(length, *pages.shape[2:])
    for token in range(length):
        out[token] = pages[int(block_table[row, token // page_size]), token % page_size]
    return out


def attend_row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """ex00_4: attention of one row's query over its tokens, in plain PyTorch. About 8 lines; no loop over tokens.

    q [n_q_heads, head_dim]; k, v [length, n_kv_heads, head_dim]. Returns out [n_q_heads, head_dim] and lse [n_q_heads],
    of q's dtype: score[t] = scale * (q . k[t]); out is the mean of v[t] weighted by exp(score[t]); lse is ln of the sum
    of exp(score[t]). Query head i reads KV head i // G, where G = n_q_heads // n_kv_heads. Scores may be as large as a
    few hundred: exp of them is infinite, and yet the result is not. No tokens: out 0, lse -inf.

    By hand: q = 0 and v[t] = t, 3 tokens. All scores are 0, so out = (0 + 1 + 2) / 3 = 1 and lse = ln 3.
    """
    length, n_kv_heads, _ = k.shape
    if length == 0:
        return torch.zeros_like(q), q.new_full(q.shape[:1], -torch.inf)
    group = q.shape[0] // n_kv_heads
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)  # [length, n_q_heads, head_dim]
    scores = scale * torch.einsum("hd,thd->th", q, k)
    largest = scores.amax(0)
    weights = (scores - largest).exp()
    total = weights.sum(0)
    return torch.einsum("th,thd->hd", weights, v) / total[:, None], largest + total.log()


def attend_row_spec(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Head by head, with torch's own softmax and logsumexp, in fp64."""
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:1], -torch.inf)
    group = q.shape[0] // k.shape[1]
    for head in range(q.shape[0]) if len(k) else ():
        scores = scale * (k[:, head // group].double() @ q[head].double())  # [length]
        out[head] = scores.softmax(0) @ v[:, head // group].double()
        lse[head] = scores.logsumexp(0)
    return out, lse


def flop_per_byte(n_q_heads: int, n_kv_heads: int, head_dim: int, bytes_per_number: int) -> float:
    """ex00_5: the arithmetic intensity of decode attention: flop for each byte of K and V that is read. About 3 lines.

    Per token and query head, q . k takes head_dim multiplies and as many adds, and weight * v the same again. K and V
    of every KV head are read once, for all query heads that share it.

    By hand: 4 query heads, 2 KV heads, head_dim 8, fp16 (2 bytes): 4 * 8 * 4 = 128 flop and 2 * 2 * 8 * 2 = 64 bytes a
    token, so 2 flop per byte.
    """
    flop = 4 * n_q_heads * head_dim
    n_bytes = 2 * n_kv_heads * head_dim * bytes_per_number
    return flop / n_bytes


def flop_per_byte_spec(n_q_heads: int, n_kv_heads: int, head_dim: int, bytes_per_number: int) -> float:
    """Count them one by one."""
    flop = sum(2 for _ in range(n_q_heads) for _product in ("q . k", "weight * v") for _dim in range(head_dim))
    read = sum(bytes_per_number for _ in range(n_kv_heads) for _side in "kv" for _dim in range(head_dim))
    return flop / read

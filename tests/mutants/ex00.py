"""Wrong answers to exercise 00: (task, name, diagnosis, edits)."""

MUTANTS = [
    ("ex00_1", "floor", "floor", {"return -(-length // page_size)": "return length // page_size"}),
    ("ex00_1", "plus_one", "one_too_many", {"return -(-length // page_size)": "return length // page_size + 1"}),
    ("ex00_1", "at_least_one", "empty_takes_one", {"return -(-length // page_size)": "return max(1, -(-length // page_size))"}),
    ("ex00_1", "always_one", "constant", {"return -(-length // page_size)": "return 1"}),
    ("ex00_1", "true_division", "float", {"return -(-length // page_size)": "return length / page_size"}),
    ("ex00_1", "the_specification", "shortcut", {"return -(-length // page_size)": "return pages_needed_spec(length, page_size)"}),
    ("ex00_2", "remainder", "remainder", {"return (length - 1) % page_size + 1 if length else 0": "return length % page_size"}),
    ("ex00_2", "empty_is_full", "empty_is_full", {"return (length - 1) % page_size + 1 if length else 0": "return length % page_size or page_size"}),
    ("ex00_2", "always_one", "constant", {"return (length - 1) % page_size + 1 if length else 0": "return 1"}),
    ("ex00_2", "free_slots", "free_slots", {"return (length - 1) % page_size + 1 if length else 0": "return -length % page_size"}),
    ("ex00_2", "counted_from_0", "off_by_one", {"return (length - 1) % page_size + 1 if length else 0": "return (length - 1) % page_size if length else 0"}),
    ("ex00_3", "logical_pages", "logical_pages", {"page_ids = block_table[row, :n_pages].long()": "page_ids = torch.arange(n_pages)"}),
    ("ex00_3", "row_0", "wrong_row", {"page_ids = block_table[row, :n_pages].long()": "page_ids = block_table[0, :n_pages].long()"}),
    ("ex00_3", "whole_pages", "tail_unmasked", {"return pages[page_ids].flatten(0, 1)[:length]": "return pages[page_ids].flatten(0, 1)"}),
    ("ex00_3", "no_tail", "tail_dropped", {"    n_pages = -(-length // page_size)\n    page_ids": "    n_pages = length // page_size\n    page_ids"}),
    ("ex00_3", "sorted", "sorted_pages", {"page_ids = block_table[row, :n_pages].long()": "page_ids = block_table[row, :n_pages].long().sort()[0]"}),
    ("ex00_3", "whole_table", "whole_table", {"page_ids = block_table[row, :n_pages].long()": "page_ids = block_table[row].long()"}),
    ("ex00_4", "modulo", "head_map", {"k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)": "k, v = k.repeat(1, group, 1), v.repeat(1, group, 1)"}),
    ("ex00_4", "no_max", "no_max", {"largest = scores.amax(0)": "largest = torch.zeros_like(scores[0])"}),
    ("ex00_4", "no_scale", "no_scale", {'scores = scale * torch.einsum("hd,thd->th", q, k)': 'scores = torch.einsum("hd,thd->th", q, k)'}),
    ("ex00_4", "usual_scale", "own_scale", {'scores = scale * torch.einsum("hd,thd->th", q, k)': 'scores = q.shape[1] ** -0.5 * torch.einsum("hd,thd->th", q, k)'}),
    ("ex00_4", "lse_of_shifted", "lse_without_max", {"largest + total.log()\n": "total.log()\n"}),
    ("ex00_4", "log2", "lse_base_2", {"largest + total.log()\n": "(largest + total.log()) / math.log(2)\n", "import torch\n": "import math\n\nimport torch\n"}),
    ("ex00_4", "lse_mixed", "lse_mixed", {"largest + total.log()\n": "largest + total.log2()\n"}),
    ("ex00_4", "undivided", "not_divided", {' / total[:, None], largest': ', largest'}),
    ("ex00_4", "no_empty_row", "empty_row", {"    if length == 0:\n        return torch.zeros_like(q), q.new_full(q.shape[:1], -torch.inf)\n": ""}),
    ("ex00_4", "the_specification", "shortcut", {"    length, n_kv_heads, _ = k.shape\n": "    return attend_row_spec(q, k, v, scale)\n    length, n_kv_heads, _ = k.shape\n"}),
    ("ex00_5", "per_query_head", "per_query_head", {"n_bytes = 2 * n_kv_heads": "n_bytes = 2 * n_q_heads"}),
    ("ex00_5", "k_only", "k_only", {"n_bytes = 2 * n_kv_heads": "n_bytes = n_kv_heads"}),
    ("ex00_5", "multiplies", "one_product", {"flop = 4 * n_q_heads": "flop = 2 * n_q_heads"}),
    ("ex00_5", "fp16", "fp16_assumed", {"head_dim * bytes_per_number\n": "head_dim * 2\n"}),
    ("ex00_5", "inverse", "inverse", {"return flop / n_bytes": "return n_bytes / flop"}),
    # bodies written anew
    ("ex00_1", "page_by_page", "loop", {"def pages_needed": """
pages = 0
while length > 0:
    length -= page_size
    pages += 1
return pages
"""}),
    ("ex00_2", "token_by_token", "loop", {"def last_page_len": """
in_page = 0
for token in range(length):
    in_page = in_page + 1 if token % page_size else 1
return in_page
"""}),
    ("ex00_3", "view", "strides", {"def gather_row": """
n, page_size, heads, dim = pages.shape
tokens = torch.arange(length)
slots = block_table[row, tokens // page_size].long() * page_size + tokens % page_size
return pages.view(n * page_size, heads, dim)[slots]
"""}),
    ("ex00_3", "fp32_copy", "dtype", {"def gather_row": """
out = torch.empty(length, pages.shape[2], pages.shape[3])
for token in range(length):
    page = block_table[row, token // pages.shape[1]]
    out[token] = pages[page, token % pages.shape[1]]
return out
"""}),
    ("ex00_3", "cat_of_none", "empty_row", {"def gather_row": """
page_size = pages.shape[1]
parts = []
for first in range(0, length, page_size):
    page = int(block_table[row, first // page_size])
    parts.append(pages[page, : min(page_size, length - first)])
return torch.cat(parts)
"""}),
    ("ex00_3", "empty_of_no_shape", "empty_row", {"def gather_row": """
page_size = pages.shape[1]
tokens = [pages[block_table[row, t // page_size], t % page_size] for t in range(length)]
return torch.stack(tokens) if tokens else torch.tensor([])
"""}),
    ("ex00_4", "one_top_and_lost", "lse_without_max", {"def attend_row": """
if len(k) == 0:
    return torch.zeros_like(q), torch.full((len(q),), -torch.inf)
group = len(q) // k.shape[1]
k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
scores = (q * k).sum(-1) * scale
weights = torch.exp(scores - scores.max())
out = (weights[..., None] * v).sum(0) / weights.sum(0)[:, None]
return out, weights.sum(0).log()
"""}),
    ("ex00_4", "one_top", "one_max", {"def attend_row": """
if len(k) == 0:
    return torch.zeros_like(q), torch.full((len(q),), -torch.inf)
group = len(q) // k.shape[1]
k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
scores = (q * k).sum(-1) * scale
top = scores.max()
weights = torch.exp(scores - top)
out = (weights[..., None] * v).sum(0) / weights.sum(0)[:, None]
return out, top + weights.sum(0).log()
"""}),
    ("ex00_4", "a_column_of_lse", None, {"def attend_row": """
if len(k) == 0:
    return torch.zeros_like(q), torch.full((len(q), 1), -torch.inf)
group = len(q) // k.shape[1]
k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
scores = torch.einsum("hd,thd->ht", q, k) * scale
return torch.einsum("ht,thd->hd", scores.softmax(1), v), scores.logsumexp(1, keepdim=True)
"""}),
    ("ex00_4", "token_by_token", "loop", {"def attend_row": """
group = q.shape[0] // k.shape[1]
out, lse = torch.zeros_like(q), torch.full((q.shape[0],), -torch.inf)
for t in range(len(k)):
    score = scale * (q * k[t].repeat_interleave(group, 0)).sum(1)
    new = torch.logaddexp(lse, score)
    out = out * (lse - new).exp()[:, None] + v[t].repeat_interleave(group, 0) * (score - new).exp()[:, None]
    lse = new
return out, lse
"""}),
    ("ex00_4", "zeros_of_fp64", "dtype", {"def attend_row": """
if not k.shape[0]:
    return torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[:1], -torch.inf, dtype=torch.float64)
group = q.shape[0] // k.shape[1]
scores = scale * torch.einsum("kgd,tkd->tkg", q.unflatten(0, (-1, group)), k)
out = torch.einsum("tkg,tkd->kgd", scores.softmax(0), v)
return out.flatten(0, 1), scores.logsumexp(0).flatten()
"""}),
    ("ex00_4", "max_0", "max_from_0", {"def attend_row": """
if len(k) == 0:
    return torch.zeros_like(q), torch.full((len(q),), -torch.inf)
group = len(q) // k.shape[1]
k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
scores = (q * k).sum(-1) * scale
top = scores.amax(0).clamp(min=0)
weights = torch.exp(scores - top)
out = (weights[..., None] * v).sum(0) / weights.sum(0)[:, None]
return out, top + weights.sum(0).log()
"""}),
    ("ex00_2", "one", "one_is_none", {"def last_page_len": """
return (length - 1) % page_size + 1 if length > 1 else 0
"""}),
    ("ex00_1", "via_log", "float_share", {"def pages_needed": """
return int(length / page_size + 0.999999)
"""}),
    ("ex00_1", "numpy_round", "one_too_many", {"def pages_needed": """
return round(length / page_size + 0.5)
"""}),
    ("ex00_2", "negative_mod", "empty_is_full", {"def last_page_len": """
return page_size - (-length % page_size)
"""}),
    ("ex00_2", "pages_times", "free_slots", {"def last_page_len": """
n_pages = (length + page_size - 1) // page_size
return length - n_pages * page_size
"""}),
    ("ex00_3", "reshape_per_row", "empty_row", {"def gather_row": """
size = pages.shape[1]
n = (length + size - 1) // size
ids = block_table[row][:n].tolist()
return torch.stack([pages[i] for i in ids]).reshape(-1, *pages.shape[2:])[:length] if n else pages[:0]
"""}),
    ("ex00_3", "last_page_first_slots", "full_page_lost", {"def gather_row": """
size = pages.shape[1]
n = (length + size - 1) // size
parts = [pages[block_table[row, i]] for i in range(n)]
if n:
    parts[-1] = parts[-1][: length % size]
return torch.cat(parts) if parts else pages.new_empty(0, *pages.shape[2:])
"""}),
    ("ex00_4", "weights_over_heads", "heads_mixed", {"def attend_row": """
if len(k) == 0:
    return torch.zeros_like(q), torch.full((len(q),), -torch.inf)
group = len(q) // k.shape[1]
k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
scores = torch.einsum("hd,thd->th", q, k) * scale
weights = scores.softmax(1)
return torch.einsum("th,thd->hd", weights, v), scores.logsumexp(0)
"""}),
    ("ex00_4", "log_of_max_only", "lse_is_max", {"def attend_row": """
if len(k) == 0:
    return torch.zeros_like(q), torch.full((len(q),), -torch.inf)
group = len(q) // k.shape[1]
k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
scores = torch.einsum("hd,thd->th", q, k) * scale
return torch.einsum("th,thd->hd", scores.softmax(0), v), scores.amax(0)
"""}),
    ("ex00_4", "empty_lse_zero", "empty_row", {"def attend_row": """
group = len(q) // k.shape[1]
if len(k) == 0:
    return torch.zeros_like(q), torch.zeros(len(q))
k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
scores = torch.einsum("hd,thd->th", q, k) * scale
return torch.einsum("th,thd->hd", scores.softmax(0), v), scores.logsumexp(0)
"""}),
    ("ex00_4", "scaled_q_and_k", "scaled_twice", {"def attend_row": """
if len(k) == 0:
    return torch.zeros_like(q), torch.full((len(q),), -torch.inf)
group = len(q) // k.shape[1]
k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
scores = torch.einsum("hd,thd->th", q * scale, k * scale)
return torch.einsum("th,thd->hd", scores.softmax(0), v), scores.logsumexp(0)
"""}),
    ("ex00_5", "both_heads", "query_read", {"def flop_per_byte": """
flop = 4 * n_q_heads * head_dim
n_bytes = 2 * (n_q_heads + n_kv_heads) * head_dim * bytes_per_number
return flop / n_bytes
"""}),
    ("ex00_5", "softmax_flop", "exp_counted", {"def flop_per_byte": """
flop = 4 * n_q_heads * head_dim + n_q_heads
return flop / (2 * n_kv_heads * head_dim * bytes_per_number)
"""}),
    ("ex00_5", "integer", "rounded", {"def flop_per_byte": """
return 4 * n_q_heads * head_dim // (2 * n_kv_heads * head_dim * bytes_per_number)
"""}),
    ("ex00_4", "cauchy_schwarz", "max_too_large", {"def attend_row": """
# Cauchy-Schwarz: no score is larger than |q| * max |k|
n_q, n_kv = q.shape[0], k.shape[1]
if len(k) == 0:
    return torch.zeros_like(q), torch.full_like(q[:, 0], float("-inf"))
k = k.repeat_interleave(n_q // n_kv, 1)
v = v.repeat_interleave(n_q // n_kv, 1)
scores = (q[None] * k).sum(-1) * scale
top = scale * q.norm(dim=-1) * k.norm(dim=-1).amax(0)
w = torch.exp(scores - top)
return (w[:, :, None] * v).sum(0) / w.sum(0)[:, None], top + w.sum(0).log()
"""}),
]  # fmt: skip

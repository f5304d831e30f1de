"""Wrong answers to exercise 01: (task, name, diagnosis, edits)."""

TWO = "    lse = torch.logaddexp(lse_a, lse_b)\n"
TWO_OUT = "    return weight_a[:, None] * out_a + weight_b[:, None] * out_b, lse\n"
TWO_WEIGHTS = "    weight_a, weight_b = (lse_a - base).exp(), (lse_b - base).exp()\n"
TWO_BASE = "    base = lse.masked_fill(lse == -torch.inf, 0.0)  # both empty: -inf - -inf would be NaN\n"
MANY = "    lse = lses.logsumexp(0)\n"
MANY_BASE = "    base = lse.masked_fill(lse == -torch.inf, 0.0)  # all empty: -inf - -inf would be NaN\n"
BY_LARGEST = """
largest = lses.amax(0)
base = largest.masked_fill(largest == -torch.inf, 0.0)
weights = (lses - base).exp()
total = weights.sum(0)
outs = outs.masked_fill((lses == -torch.inf)[..., None], 0.0)
out = (weights[..., None] * outs).sum(0) / total.masked_fill(total == 0.0, 1.0)[:, None]
return out, base + total.log()
"""


def by_largest(old, new):
    """Another body of merge_many: the largest lse is subtracted, and the sum divided by, with one thing changed."""
    assert BY_LARGEST.count(old) == 1, old
    return {"def merge_many": BY_LARGEST.replace(old, new)}


MANY_MASK = "    outs = outs.masked_fill((lses == -torch.inf)[..., None], 0.0)  # 0 * NaN is NaN\n"
CUT = "    n_tiles = -(-longest // tile)\n"
CUT_LINE = "        begin, end = n_tiles * split // n_splits * tile, n_tiles * (split + 1) // n_splits * tile\n"
CUT_ENTRY = "        bounds.append((begin, max(begin, min(end, length))))\n"

MERGES = [
    ("ex01_1", "average", "average", {TWO: "    return (out_a + out_b) / 2, torch.logaddexp(lse_a, lse_b)\n" + TWO}),
    ("ex01_1", "average_of_both", "average", {TWO: "    return (out_a + out_b) / 2, (lse_a + lse_b) / 2\n" + TWO}),
    ("ex01_1", "weighs_by_lse", "weighs_by_lse", {TWO_WEIGHTS: "    weight_a, weight_b = lse_a / (lse_a + lse_b), lse_b / (lse_a + lse_b)\n"}),
    ("ex01_1", "winner_takes_all", "heaviest_only", {TWO: "    return torch.where((lse_a >= lse_b)[:, None], out_a, out_b), torch.maximum(lse_a, lse_b)\n" + TWO}),
    ("ex01_1", "log2_read_as_ln", "base_2", {TWO: """    largest = torch.maximum(lse_a, lse_b).clamp(min=-1e9)
    weight_a, weight_b = torch.exp2(lse_a - largest)[:, None], torch.exp2(lse_b - largest)[:, None]
    total = weight_a + weight_b
    out_a, out_b = out_a.nan_to_num(0, 0, 0), out_b.nan_to_num(0, 0, 0)
    out = (weight_a * out_a + weight_b * out_b) / total.clamp(min=1e-30)
    return out, largest + total[:, 0].log2()
""" + TWO}),
    ("ex01_1", "swapped", "turned", {TWO_OUT: "    return weight_b[:, None] * out_a + weight_a[:, None] * out_b, lse\n"}),
    ("ex01_1", "no_max", "no_max", {TWO: """    weight_a, weight_b = lse_a.exp(), lse_b.exp()
    total = weight_a + weight_b
    out_a = torch.where(weight_a[:, None] == 0, 0, out_a)
    out_b = torch.where(weight_b[:, None] == 0, 0, out_b)
    out = (weight_a[:, None] * out_a + weight_b[:, None] * out_b) / torch.where(total == 0, 1, total)[:, None]
    return out, total.log()
""" + TWO}),
    ("ex01_1", "lse_without_max", "lse_without_max", {TWO: """    largest = torch.maximum(lse_a, lse_b)
    largest = torch.where(largest == -torch.inf, 0, largest)
    weight_a, weight_b = (lse_a - largest).exp(), (lse_b - largest).exp()
    total = weight_a + weight_b
    out_a = torch.where(weight_a[:, None] == 0, 0, out_a)
    out_b = torch.where(weight_b[:, None] == 0, 0, out_b)
    out = (weight_a[:, None] * out_a + weight_b[:, None] * out_b) / torch.where(total == 0, 1, total)[:, None]
    return out, total.log()
""" + TWO}),
    ("ex01_1", "lse_sum", "lse_sum", {TWO_OUT: TWO_OUT.replace(", lse\n", ", lse_a + lse_b\n")}),
    ("ex01_1", "lse_max", "lse_max", {TWO_OUT: TWO_OUT.replace(", lse\n", ", torch.maximum(lse_a, lse_b)\n")}),
    ("ex01_1", "lse_is_sum", "lse_is_sum", {TWO_OUT: TWO_OUT.replace(", lse\n", ", lse.exp()\n")}),
    ("ex01_1", "lse_base_2", "lse_base_2", {TWO_OUT: TWO_OUT.replace(", lse\n", ", lse / 0.6931471805599453\n")}),
    ("ex01_1", "not_divided", "not_divided", {TWO_BASE: "    base = torch.maximum(lse_a, lse_b).clamp(min=-1e9)\n"}),
    ("ex01_1", "b_not_masked", "empty_multiplied", {"    out_b = out_b.masked_fill((lse_b == -torch.inf)[:, None], 0.0)\n": ""}),
    ("ex01_1", "sigmoid", "empty_multiplied", {TWO: """    share = torch.sigmoid(lse_a - lse_b)[:, None]
    return share * out_a + (1 - share) * out_b, torch.logaddexp(lse_a, lse_b)
""" + TWO}),
    ("ex01_1", "only_nan_replaced", "empty_multiplied", {"out_a.masked_fill((lse_a == -torch.inf)[:, None], 0.0)": "torch.where(out_a.isnan(), 0.0, out_a)"}),
    ("ex01_1", "whole_states", "empty_multiplied", {TWO: """    if (lse_a == -torch.inf).all():
        return torch.where((lse_b == -torch.inf)[:, None], 0.0, out_b), lse_b
    if (lse_b == -torch.inf).all():
        return out_a, lse_a
    lse = torch.logaddexp(lse_a, lse_b)
    return (lse_a - lse).exp()[:, None] * out_a + (lse_b - lse).exp()[:, None] * out_b, lse
""" + TWO}),
    ("ex01_1", "clamped_at_0", "max_from_0", {TWO: """    base = torch.maximum(lse_a, lse_b).clamp(min=0)
    weight_a, weight_b = (lse_a - base).exp(), (lse_b - base).exp()
    total = weight_a + weight_b
    out_a = torch.where(weight_a[:, None] == 0, 0, out_a)
    out_b = torch.where(weight_b[:, None] == 0, 0, out_b)
    out = (weight_a[:, None] * out_a + weight_b[:, None] * out_b) / total[:, None].clamp(min=1e-30)
    return out, base + total.log()
"""
+ TWO}),
    ("ex01_1", "base_unguarded", "both_empty", {TWO_BASE: "    base = lse\n"}),
    ("ex01_1", "weights_of_dims", "dims_weighted", {TWO_OUT: "    return weight_a * out_a + weight_b * out_b, lse\n"}),
    ("ex01_1", "if_of_heads", None, {TWO: "    if lse_a == -torch.inf:\n        return out_b, lse_b\n" + TWO}),
    ("ex01_1", "in_place", None, {"    out_b = out_b.masked_fill(": "    out_b.masked_fill_("}),
    ("ex01_1", "the_specification", "shortcut", {TWO: "    return merge_two_spec(out_a, lse_a, out_b, lse_b)\n" + TWO}),
    ("ex01_1", "the_library", "shortcut", {TWO: "    return pkv.merge([(out_a, lse_a), (out_b, lse_b)])\n" + TWO}),
    ("ex01_2", "average", "average", {MANY: "    return outs.mean(0), lses.logsumexp(0)\n" + MANY}),
    ("ex01_2", "average_of_those_with_tokens", "average", {MANY: """    has = (lses > -torch.inf)[..., None]
    return torch.where(has, outs, 0).sum(0) / has.sum(0).clamp(min=1), lses.logsumexp(0)
""" + MANY}),
    ("ex01_2", "one_by_one_average", "average", {MANY: """    out, lse = outs[0], lses[0]
    for state in range(1, len(outs)):
        out = (out * state + outs[state]) / (state + 1)
        lse = torch.logaddexp(lse, lses[state])
    return out, lse
""" + MANY}),
    ("ex01_2", "weighs_by_lse", "weighs_by_lse", {"def merge_many": """
outs = outs.masked_fill((lses == -torch.inf)[..., None], 0.0)
return (lses[..., None] * outs).sum(0) / lses.sum(0)[:, None], lses.logsumexp(0)
"""}),
    ("ex01_2", "softmax_over_heads", "heads_mixed", {MANY: """    outs = torch.where((lses == -torch.inf)[..., None], 0, outs)
    return (lses.softmax(-1)[..., None] * outs).sum(0), lses.logsumexp(0)
""" + MANY}),
    ("ex01_2", "argmax", "heaviest_only", {MANY: """    best = lses.argmax(0)
    return outs[best, torch.arange(outs.shape[1])], lses.amax(0)
""" + MANY}),
    ("ex01_2", "exp2", "base_2", by_largest("(lses - base).exp()", "torch.exp2(lses - base)")),
    ("ex01_2", "not_divided", "not_divided", by_largest(" / total.masked_fill(total == 0.0, 1.0)[:, None]", "")),
    ("ex01_2", "no_max", "no_max", by_largest("lses.amax(0)", "torch.zeros_like(lses[0])")),
    ("ex01_2", "one_max", "one_max", by_largest("lses.amax(0)", "lses.max()")),
    ("ex01_2", "lse_without_max", "lse_without_max", by_largest("base + total.log()", "total.log()")),
    ("ex01_2", "lse_log2", "lse_base_2", by_largest("base + total.log()", "(base + total.log()) / 0.6931471805599453")),
    ("ex01_2", "lse_max", "lse_max", by_largest("base + total.log()", "largest")),
    ("ex01_2", "lse_added", "lse_sum", by_largest("base + total.log()", "lses.sum(0)")),
    ("ex01_2", "lse_mean", "lse_mean", by_largest("base + total.log()", "lses.mean(0)")),
    ("ex01_2", "not_masked", "empty_multiplied", {MANY_MASK: ""}),
    ("ex01_2", "weighted_nan_sum", "empty_multiplied", {MANY: """    weights = lses.softmax(0)[..., None]
    return (weights * outs).sum(0), lses.logsumexp(0)
""" + MANY}),
    ("ex01_2", "softmax", "both_empty", {MANY: """    weights = lses.softmax(0)[..., None]
    return (weights * torch.where((lses == -torch.inf)[..., None], 0, outs)).sum(0), lses.logsumexp(0)
""" + MANY}),
    ("ex01_2", "clamped_at_0", "max_from_0", by_largest("largest.masked_fill(largest == -torch.inf, 0.0)", "largest.clamp(min=0)")),
    ("ex01_2", "base_unguarded", "both_empty", {MANY_BASE: "    base = lse\n"}),
    ("ex01_2", "weights_of_dims", "dims_weighted", {"(shares[..., None] * outs)": "(shares * outs)"}),
    ("ex01_2", "without_the_last", "last_dropped", {MANY: """    out, lse = merge_two(outs[0], lses[0], outs[0], torch.full_like(lses[0], -torch.inf))
    for state in range(1, len(outs) - 1):
        out, lse = merge_two(out, lse, outs[state], lses[state])
    return out, lse
""" + MANY}),
    ("ex01_2", "two_of_them", "two_only", {MANY: """    if len(outs) == 1:
        return merge_two(outs[0], lses[0], outs[0], torch.full_like(lses[0], -torch.inf))
    return merge_two(outs[0], lses[0], outs[1], lses[1])
""" + MANY}),
    ("ex01_2", "one_after_another", "loop", {MANY: """    out, lse = outs[0], lses[0]
    out = torch.where((lse == -torch.inf)[:, None], 0, out)
    for state in range(1, len(outs)):
        out, lse = merge_two(out, lse, outs[state], lses[state])
    return out, lse
""" + MANY}),
    ("ex01_2", "ints_where_all_are_empty", "dtype", {MANY: """    if bool((lses == -torch.inf).all()):
        return torch.zeros(outs.shape[1:], dtype=torch.int64), torch.full(lses.shape[1:], -torch.inf)
""" + MANY}),
    ("ex01_2", "the_library", "shortcut", {MANY: "    return pkv.merge(list(zip(outs, lses)))\n" + MANY}),
    ("ex01_2", "the_specification", "shortcut", {MANY: "    return merge_many_spec(outs, lses)\n" + MANY}),
]  # fmt: skip

CUTS = [
    ("ex01_3", "own_length", "own_length", {CUT: "    n_tiles = -(-length // tile)\n"}),
    ("ex01_3", "floor", "tail_dropped", {CUT: "    n_tiles = longest // tile\n"}),
    ("ex01_3", "plus_one", "one_tile_more", {CUT: "    n_tiles = longest // tile + 1\n"}),
    ("ex01_3", "in_tokens", "cut_in_tokens", {CUT: """    bounds = [longest * split // n_splits for split in range(n_splits + 1)]
    return [(begin, max(begin, min(end, length))) for begin, end in zip(bounds, bounds[1:])]
""" + CUT}),
    ("ex01_3", "ceil_per_split", "rounded_up", {CUT: """    tiles = -(-(-(-longest // tile)) // n_splits)
    bounds = []
    for split in range(n_splits):
        begin = split * tiles * tile
        bounds.append((begin, max(begin, min(begin + tiles * tile, length))))
    return bounds
""" + CUT}),
    ("ex01_3", "floor_per_split", "rest_dropped", {CUT_LINE: "        begin, end = n_tiles // n_splits * split * tile, n_tiles // n_splits * (split + 1) * tile\n"}),
    ("ex01_3", "rest_for_the_last", "rest_last", {CUT: """    n_tiles = -(-longest // tile)
    share = n_tiles // n_splits
    starts = [split * share * tile for split in range(n_splits)] + [n_tiles * tile]
    return [(begin, max(begin, min(end, length))) for begin, end in zip(starts[:-1], starts[1:])]
""" + CUT}),
    ("ex01_3", "rest_for_the_first", "rest_first", {CUT: """    n_tiles = -(-longest // tile)
    bounds, begin = [], 0
    for split in range(n_splits):
        tiles = n_tiles // n_splits + (split < n_tiles % n_splits)
        bounds.append((begin * tile, max(begin * tile, min((begin + tiles) * tile, length))))
        begin += tiles
    return bounds
""" + CUT}),
    ("ex01_3", "not_clipped", "not_clipped", {CUT_ENTRY: "        bounds.append((begin, end))\n"}),
    ("ex01_3", "negative", "negative", {CUT_ENTRY: "        bounds.append((begin, min(end, length)))\n"}),
    ("ex01_3", "empty_at_the_end", "begin_clipped", {CUT_ENTRY: "        bounds.append((min(begin, length), min(end, length)))\n"}),
    ("ex01_3", "empty_left_out", "empty_left_out", {CUT_ENTRY: "        if begin < min(end, length):\n            bounds.append((begin, min(end, length)))\n"}),
    ("ex01_3", "last_token", "inclusive", {CUT_ENTRY: "        bounds.append((begin, min(end, length) - 1 if begin < min(end, length) else begin))\n"}),
    ("ex01_3", "tiles", "in_tiles", {CUT: """    n_tiles = -(-longest // tile)
    return [(n_tiles * split // n_splits, n_tiles * (split + 1) // n_splits) for split in range(n_splits)]
""" + CUT}),
    ("ex01_3", "sizes", "sizes", {CUT_ENTRY: "        bounds.append((begin, max(0, min(end, length) - begin)))\n"}),
    ("ex01_3", "rounded_in_floats", "rounded", {CUT_LINE: "        begin, end = round(n_tiles * split / n_splits) * tile, round(n_tiles * (split + 1) / n_splits) * tile\n"}),
    ("ex01_3", "the_specification", "shortcut", {CUT: "    return split_bounds_spec(longest, length, n_splits, tile)\n" + CUT}),
    ("ex01_3", "the_library", "shortcut", {CUT: """    import numpy as np

    from pkv.stages.s1_split_kv import split_items

    return [(int(begin), int(end)) for _, begin, end in split_items(np.array([length]), longest, n_splits, tile)]
""" + CUT}),
]  # fmt: skip

KV_HEAD = "    kv_head = grid_head // SHAPE.HEAD_BLOCKS\n"
RANGE = "    for start in tl.range(begin, end, BLOCK_N, num_stages=SHAPE.STAGES):\n"
EXISTS = "        exists = start + tl.arange(0, BLOCK_N) < end\n"
SCORES = (
    '        scores = tl.where(exists[:, None], multiply(k, query) * qk_scale, float("-inf"))  # [BLOCK_N, BLOCK_H]\n'
)
NEW_MAX = "        new_max = tl.maximum(running_max, tl.max(scores, 0))\n"
CORRECTION = "        correction = tl.exp2(running_max - new_max)  # 0 in the first tile\n"
WEIGHTS = "        weights = tl.exp2(scores - new_max[None, :])\n"
SUM = "\n        running_sum = running_sum * correction + tl.sum(weights, 0)\n"
ACC = "        acc = acc * correction[None, :] + multiply(v, weights)\n"
LSE = '    lse = tl.where(is_empty, float("-inf"), (running_max + tl.log2(total)) / 1.4426950408889634)\n'
TOTAL = "    total = tl.where(is_empty, 1.0, running_sum)\n"
RETURN = "    return acc / total[None, :], lse\n"
ONE_TILE = """    k, v = load_kv(cache, row, kv_head, begin, end, SHAPE)
    exists = begin + tl.arange(0, BLOCK_N) < end
    scores = tl.where(exists[:, None], multiply(k, query) * qk_scale, -1e30)
    largest = tl.max(scores, 0)
    weights = tl.exp2(scores - largest[None, :])
    total = tl.sum(weights, 0)
    lse = tl.where(begin < end, (largest + tl.log2(total)) / 1.4426950408889634, float("-inf"))
    return multiply(v, weights) / total[None, :], lse
"""
MEAN_OF_TILES = """    out = tl.zeros([BLOCK_D, BLOCK_H], tl.float32)
    largest = tl.full([BLOCK_H], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_H], tl.float32)
    n_tiles = 0
    for start in range(begin, end, BLOCK_N):
        k, v = load_kv(cache, row, kv_head, start, end, SHAPE)
        exists = start + tl.arange(0, BLOCK_N) < end
        scores = tl.where(exists[:, None], multiply(k, query) * qk_scale, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 0))
        mine = tl.exp2(scores - tl.max(scores, 0)[None, :])
        out += multiply(v, mine) / tl.sum(mine, 0)[None, :]
        sums = sums * tl.exp2(largest - new) + tl.sum(tl.exp2(scores - new[None, :]), 0)
        largest = new
        n_tiles += 1
    if n_tiles == 0:
        return out, tl.full([BLOCK_H], float("-inf"), tl.float32)
    return out / n_tiles, (largest + tl.log2(sums)) / 1.4426950408889634
"""
NO_MAX = """    total = tl.zeros([BLOCK_H], tl.float32)
    for start in range(begin, end, BLOCK_N):
        k, v = load_kv(cache, row, kv_head, start, end, SHAPE)
        exists = start + tl.arange(0, BLOCK_N) < end
        weights = tl.where(exists[:, None], tl.exp2(multiply(k, query) * qk_scale), 0.0)
        total += tl.sum(weights, 0)
        acc += multiply(v, weights)
    lse = tl.log2(total) / 1.4426950408889634
    return acc / tl.where(total == 0.0, 1.0, total)[None, :], lse
"""
TILE_STATES = """    running_lse = tl.full([BLOCK_H], float("-inf"), tl.float32)
    for start in range(begin, end, BLOCK_N):
        k, v = load_kv(cache, row, kv_head, start, end, SHAPE)
        exists = start + tl.arange(0, BLOCK_N) < end
        scores = tl.where(exists[:, None], multiply(k, query) * qk_scale, float("-inf"))
        largest = tl.max(scores, 0)
        weights = tl.exp2(scores - largest[None, :])
        lse = (largest + tl.log2(tl.sum(weights, 0))) / 1.4426950408889634
        out = multiply(v, weights) / tl.sum(weights, 0)[None, :]
        new = tl.maximum(running_lse, lse)
        old_share, share = tl.exp2(running_lse - new), tl.exp2(lse - new)
        acc = (acc * old_share[None, :] + out * share[None, :]) / (old_share + share)[None, :]
        running_lse = new + tl.log2(old_share + share)
    return acc, running_lse
"""
OWN_PAGES = """    first = start + tl.arange(0, SHAPE.BLOCK_N)
    pages, slots = (first // SHAPE.PAGE_SIZE).to(tl.int64), (first % SHAPE.PAGE_SIZE).to(tl.int64)
    at = (pages * cache.k.strides[0] + slots * cache.k.strides[1] + kv_head * cache.k.strides[2])[:, None]
    dims, mask = tl.arange(0, SHAPE.BLOCK_D)[None, :], (first < end)[:, None]
    mask = mask & (dims < SHAPE.HEAD_DIM)
    k = tl.load(cache.k.ptr + at + dims, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(cache.v.ptr + at + dims, mask=mask, other=0.0).to(tl.float32)
    return k, tl.trans(v)
"""
LOAD_KV = "    table_row = cache.table.ptr + row.to(tl.int64) * cache.table.strides[0]\n"

LOOPS = [
    ("ex01_4", "not_written", "returns_nothing", {KV_HEAD: "    return\n" + KV_HEAD}),
    ("ex01_4", "no_return", "returns_nothing", {RETURN: ""}),
    ("ex01_4", "head_modulo", "head_map", {KV_HEAD: "    kv_head = grid_head % SHAPE.N_KV_HEADS\n"}),
    ("ex01_4", "head_of_group", "head_map", {KV_HEAD: "    kv_head = grid_head // SHAPE.GROUP\n"}),
    ("ex01_4", "none_in_the_loop", None, {"        weights = tl.exp2(scores - new_max[None, :])\n": "        weights = None\n        weights = weights + 1\n"}),
    ("ex01_4", "last_head_at_most", "head_map", {KV_HEAD: "    kv_head = tl.minimum(grid_head, SHAPE.N_KV_HEADS - 1)\n"}),
    ("ex01_4", "head_of_grid", "head_map", {KV_HEAD: "    kv_head = grid_head\n"}),
    ("ex01_4", "head_0", "head_map", {KV_HEAD: "    kv_head = grid_head * 0\n"}),
    ("ex01_4", "logical_pages", "logical_pages", {LOAD_KV: OWN_PAGES + LOAD_KV}),
    ("ex01_4", "first_row", "wrong_row", {LOAD_KV: "    table_row = cache.table.ptr + row.to(tl.int64) * 0\n"}),
    ("ex01_4", "from_token_0", "begin_ignored", {RANGE: RANGE.replace("begin, end", "0, end")}),
    ("ex01_4", "whole_tiles", "tail_dropped", {KV_HEAD: "    end = begin + tl.maximum(end - begin, 0) // BLOCK_N * BLOCK_N\n" + KV_HEAD}),
    ("ex01_4", "without_the_last_token", "last_token", {KV_HEAD: "    end = end - 1\n" + KV_HEAD}),
    ("ex01_4", "one_more", "one_more", {EXISTS: EXISTS.replace("< end", "<= end")}),
    ("ex01_4", "by_pages", "step_by_page", {RANGE: RANGE.replace("BLOCK_N", "SHAPE.PAGE_SIZE")}),
    ("ex01_4", "unmasked", "tail_unmasked", {SCORES: "        scores = multiply(k, query) * qk_scale\n"}),
    ("ex01_4", "masked_to_0", "tail_unmasked", {SCORES: SCORES.replace('float("-inf")', "0.0")}),
    ("ex01_4", "mask_from_0", "mask_from_0", {EXISTS: "        exists = tl.arange(0, BLOCK_N) < end\n"}),
    ("ex01_4", "no_correction", "nothing_corrected", {CORRECTION: "        correction = tl.full([BLOCK_H], 1.0, tl.float32)\n"}),
    ("ex01_4", "acc_uncorrected", "acc_not_corrected", {ACC: "        acc += multiply(v, weights)\n"}),
    ("ex01_4", "sum_uncorrected", "sum_not_corrected", {SUM: "\n        running_sum += tl.sum(weights, 0)\n"}),
    ("ex01_4", "one_tile", "first_tile_only", {KV_HEAD: KV_HEAD + ONE_TILE}),
    ("ex01_4", "overwritten", "last_tile_only", {SUM: "\n        running_sum = tl.sum(weights, 0)\n", ACC: "        acc = multiply(v, weights)\n"}),
    ("ex01_4", "sum_overwritten", "sum_overwritten", {SUM: "\n        running_sum = tl.sum(weights, 0)\n"}),
    ("ex01_4", "divided_each_time", "divided_each_time", {ACC: "        acc = (acc * correction[None, :] + multiply(v, weights)) / running_sum[None, :]\n", RETURN: "    return acc, lse\n"}),
    ("ex01_4", "mean_of_tiles", "tiles_averaged", {KV_HEAD: KV_HEAD + MEAN_OF_TILES}),
    ("ex01_4", "states_with_exp2", None, {"    running_max = tl.full([BLOCK_H]": TILE_STATES + "    running_max = tl.full([BLOCK_H]"}),
    ("ex01_4", "never_divided", "not_divided", {RETURN: "    return acc, lse\n"}),
    ("ex01_4", "scaled_twice", "scaled_twice", {"multiply(k, query) * qk_scale": "multiply(k, query) * qk_scale * SHAPE.HEAD_DIM**-0.5"}),
    ("ex01_4", "usual_scale", "own_scale", {"multiply(k, query) * qk_scale": "multiply(k, query) * SHAPE.HEAD_DIM**-0.5 * 1.4426950408889634"}),
    ("ex01_4", "not_scaled", "not_scaled", {"multiply(k, query) * qk_scale": "multiply(k, query)"}),
    ("ex01_4", "exp", "exp_for_exp2", {WEIGHTS: WEIGHTS.replace("exp2", "exp"), CORRECTION: CORRECTION.replace("exp2", "exp")}),
    ("ex01_4", "lse_log2", "lse_base_2", {" / 1.4426950408889634)\n    return acc / total": ")\n    return acc / total"}),
    ("ex01_4", "lse_times", "lse_multiplied", {" / 1.4426950408889634)\n    return acc / total": " * 1.4426950408889634)\n    return acc / total"}),
    ("ex01_4", "lse_mixed", "lse_mixed", {LSE: '    lse = tl.where(is_empty, float("-inf"), running_max + tl.log(total))\n'}),
    ("ex01_4", "lse_without_max", "lse_without_max", {LSE: '    lse = tl.where(is_empty, float("-inf"), tl.log(total))\n'}),
    ("ex01_4", "max_from_0", "max_from_0", {'running_max = tl.full([BLOCK_H], float("-inf"), tl.float32)': "running_max = tl.zeros([BLOCK_H], tl.float32)"}),
    ("ex01_4", "max_of_first_tile", "max_of_first", {NEW_MAX: "        new_max = tl.where(start == begin, tl.max(scores, 0), running_max)\n"}),
    ("ex01_4", "max_over_heads", "max_over_heads", {NEW_MAX: "        new_max = tl.maximum(running_max, tl.max(scores))\n"}),
    ("ex01_4", "end_of_row", "end_ignored", {KV_HEAD: "    end = tl.load(cache.lengths.ptr + row * cache.lengths.strides[0])\n" + KV_HEAD}),
    ("ex01_4", "max_of_tile", "max_not_carried", {NEW_MAX: "        new_max = tl.max(scores, 0)\n"}),
    ("ex01_4", "no_max", "no_max", {"    running_max = tl.full([BLOCK_H]": NO_MAX + "    running_max = tl.full([BLOCK_H]"}),
    ("ex01_4", "fp16_sums", "fp16_sums", {ACC: "        acc = (acc * correction[None, :] + multiply(v, weights)).to(tl.float16)\n"}),
    ("ex01_4", "divided_by_0", "no_tokens", {TOTAL: "    total = running_sum\n"}),
    ("ex01_4", "tail_of_v_read", "tail_read", {"    v = load_tile(pages, slots, kv_head, end - start, cache.v, SHAPE, True, True)\n": "    v = load_tile(pages, slots, kv_head, end - start, cache.v, SHAPE, False, True)\n"}),
    ("ex01_4", "tail_from_end", "tail_read", {"    v = load_tile(pages, slots, kv_head, end - start, ": "    v = load_tile(pages, slots, kv_head, end, "}),
    ("ex01_4", "our_tile", "shortcut", {"from pkv.tile import find_pages": "from pkv.tile import attend_tokens as ours, find_pages", KV_HEAD: "    return ours(query, cache, row, grid_head, begin, end, qk_scale, SHAPE)\n" + KV_HEAD}),
    ("ex01_4", "our_loop", "shortcut", {"    return pkv.Parts(attend_tokens=attend_split)\n": "    return pkv.Parts(attend_tokens=pkv.tile.attend_tokens)\n"}),
    ("ex01_4", "no_parts", None, {"    return pkv.Parts(attend_tokens=attend_split)\n": "    return pkv.Parts()\n"}),
]  # fmt: skip

LOADS = "    first, last = tl.load(offsets + row), tl.load(offsets + row + 1)\n"
LSES = '            lses = tl.load(partial_lse + at, mask=states < last, other=float("-inf"))  # [BLOCK_S]\n'
ROW_MASK = '            mask = (lses > float("-inf"))[:, None] & (dims < head_dim)[None, :]\n'
ROW_CORRECTION = "            correction = tl.exp(running_max - base)\n"
ROW_WEIGHTS = "            weights = tl.exp(lses - base)\n"
ROW_LSE = "        tl.store(lse + row.to(tl.int64) * n_heads + head, running_max + tl.log(total))\n"
ROW_TOTAL = "        total = tl.where(running_sum == 0.0, 1.0, running_sum)\n"
ROW_STORE = "        tl.store(target, (acc / total).to(out.dtype.element_ty), mask=dims < head_dim)\n"
LAUNCH = "    n_rows, n_heads, head_dim = out.shape\n"
COUNTS_FILLED = """    n_filled = 0
    for one in range(first, last):
        if tl.load(partial_lse + one * n_heads + head) > float("-inf"):
            n_filled += 1
    if n_filled != 1:
        acc = tl"""
ONE_BY_ONE = """    first, last = tl.load(offsets + row), tl.load(offsets + row + 1)
    if last - first != 1:
        acc, largest, total = tl.zeros([BLOCK_D], tl.float32), float("-inf"), 0.0
        for state in range(first, last):
            one_lse = tl.load(partial_lse + state * n_heads + head)
            if one_lse > float("-inf"):
                mine = tl.load(partial_out + (state * n_heads + head) * head_dim + dims, mask=dims < head_dim, other=0.0)
                new = tl.maximum(largest, one_lse)
                acc = {acc} + mine * tl.exp(one_lse - new)
                total = {total} + tl.exp(one_lse - new)
                largest = new
        target = out + row * stride_row + head * stride_head + dims * stride_dim
        tl.store(target, (acc / tl.maximum(total, 1e-30)).to(out.dtype.element_ty), mask=dims < head_dim)
        tl.store(lse + row * n_heads + head, {lse})
    return
"""
SHRUNK = {
    "acc": "acc * tl.exp(largest - new)",
    "total": "total * tl.exp(largest - new)",
    "lse": "largest + tl.log(total)",
}
IN_TORCH = """    for row in range(len(out)):
        first, last = int(offsets[row]), int(offsets[row + 1])
        if last - first == 1:
            continue
        lses = partial_lse[first:last]
        outs = torch.where((lses > -torch.inf)[..., None], partial_out[first:last], 0)
        out[row] = (lses.softmax(0).nan_to_num()[..., None] * outs).sum(0)
        lse[row] = lses.logsumexp(0)
    return
"""

ROWS = [
    ("ex01_5", "not_written", "nothing_written", {LOADS: "    return\n" + LOADS}),
    ("ex01_5", "no_lse", "lse_missing", {ROW_LSE: ""}),
    ("ex01_5", "dims_unmasked", "beyond", {ROW_STORE: "        tl.store(target, (acc / total).to(out.dtype.element_ty))\n"}),
    ("ex01_5", "dims_read_unmasked", "out_of_bounds", {ROW_MASK: ROW_MASK.replace("(dims < head_dim)", "(dims >= 0)")}),
    ("ex01_5", "returns_them", "returns", {LAUNCH: "    made = merge_rows_2(partial_out, partial_lse, offsets, out, lse)\n    return out, lse\n\n\ndef merge_rows_2(partial_out, partial_lse, offsets, out, lse):\n" + LAUNCH}),
    ("ex01_5", "average", "average", {ROW_WEIGHTS: "            weights = tl.where(states < last, 1.0, 0.0)\n", ROW_CORRECTION: "            correction = 1.0\n"}),
    ("ex01_5", "average_of_those_with_tokens", "average", {ROW_WEIGHTS: '            weights = tl.where(lses > float("-inf"), 1.0, 0.0)\n', ROW_CORRECTION: "            correction = 1.0\n"}),
    ("ex01_5", "softmax_in_base_2", "base_2", {ROW_WEIGHTS: ROW_WEIGHTS.replace("exp", "exp2"), ROW_CORRECTION: ROW_CORRECTION.replace("exp", "exp2")}),
    ("ex01_5", "heaviest", "heaviest_only", {ROW_WEIGHTS: "            weights = tl.where(lses == base, 1.0, 0.0)\n", ROW_CORRECTION: "            correction = tl.where(running_max == base, 1.0, 0.0)\n"}),
    ("ex01_5", "undivided", "not_divided", {ROW_STORE: ROW_STORE.replace("(acc / total)", "acc")}),
    ("ex01_5", "lse_log2", "lse_base_2", {ROW_LSE: ROW_LSE.replace("running_max + tl.log(total)", "(running_max + tl.log(total)) * 1.4426950408889634")}),
    ("ex01_5", "lse_without_max", "lse_without_max", {LOADS: ONE_BY_ONE.format(**SHRUNK | {"lse": "tl.log(total)"}) + LOADS}),
    ("ex01_5", "lse_max", "lse_max", {ROW_LSE: ROW_LSE.replace("running_max + tl.log(total)", "running_max")}),
    ("ex01_5", "one_by_one_uncorrected", "not_corrected", {LOADS: ONE_BY_ONE.format(**SHRUNK | {"acc": "acc", "total": "total"}) + LOADS}),
    ("ex01_5", "blocks_uncorrected", "not_corrected", {ROW_CORRECTION: "            correction = 1.0\n"}),
    ("ex01_5", "acc_uncorrected", "acc_not_corrected", {"            acc = acc * correction + tl.sum": "            acc += tl.sum"}),
    ("ex01_5", "no_loop", "first_block", {"        for begin in range(first, last, BLOCK_S):\n": "        for begin in range(first, tl.minimum(last, first + 1), BLOCK_S):\n"}),
    ("ex01_5", "last_dropped", "last_dropped", {"mask=states < last, other": "mask=states < last - 1, other"}),
    ("ex01_5", "first_dropped", "first_dropped", {"for begin in range(first, last, BLOCK_S)": "for begin in range(first + 1, last, BLOCK_S)"}),
    ("ex01_5", "one_more", "one_more", {"mask=states < last, other": "mask=states <= last, other"}),
    ("ex01_5", "equal_rows", "offsets_ignored", {LOADS: "    first = row * (tl.load(offsets + tl.num_programs(0)) // tl.num_programs(0))\n    last = first + tl.load(offsets + tl.num_programs(0)) // tl.num_programs(0)\n"}),
    ("ex01_5", "head_0", "heads_mixed", {"            at = states.to(tl.int64) * n_heads + head\n": "            at = states.to(tl.int64) * n_heads\n"}),
    ("ex01_5", "states_by_head", "by_head", {"            at = states.to(tl.int64) * n_heads + head\n": "            at = head * n_heads + states\n"}),
    ("ex01_5", "lses_by_head", "by_head", {"partial_lse + at,": "partial_lse + head * n_heads + states,"}),
    ("ex01_5", "lse_at_row", "lse_at", {ROW_LSE: ROW_LSE.replace("row.to(tl.int64) * n_heads + head", "row")}),
    ("ex01_5", "lse_at_first_head", "lse_at", {ROW_LSE: ROW_LSE.replace("row.to(tl.int64) * n_heads + head", "row * n_heads")}),
    ("ex01_5", "lse_mixed", "lse_mixed", {ROW_LSE: ROW_LSE.replace("tl.log(", "tl.log2(")}),
    ("ex01_5", "one_filled_left_alone", "counts_filled", {"    if last - first != 1:\n        acc = tl": COUNTS_FILLED}),
    ("ex01_5", "one_not_empty_left_alone", "counts_filled", {"    if last - first != 1:\n        acc = tl": COUNTS_FILLED.replace("> float", "!= float")}),
    ("ex01_5", "contiguous", "strides_ignored", {"row.to(tl.int64) * stride_row + head * stride_head + dims * stride_dim": "(row.to(tl.int64) * n_heads + head) * head_dim + dims"}),
    ("ex01_5", "single_rows_too", "single_row", {"    if last - first != 1:\n        acc = tl": "    if first <= last:\n        acc = tl"}),
    ("ex01_5", "rows_of_several_only", "row_of_none", {"    if last - first != 1:\n        acc = tl": "    if last - first > 1:\n        acc = tl"}),
    ("ex01_5", "no_guard", "all_empty", {ROW_TOTAL: "        total = running_sum\n"}),
    ("ex01_5", "base_unguarded", "empty_read", {"            base = tl.where(new_max == float(\"-inf\"), 0.0, new_max)  # all empty so far: -inf - -inf would be NaN\n": "            base = new_max\n"}),
    ("ex01_5", "empty_read", "empty_read", {ROW_MASK: "            mask = (states < last)[:, None] & (dims < head_dim)[None, :]\n"}),
    ("ex01_5", "in_pytorch", "no_kernel", {LAUNCH: IN_TORCH + LAUNCH}),
    ("ex01_5", "max_from_0", "max_from_0", {"running_max, running_sum = float(\"-inf\"), 0.0": "running_max, running_sum = 0.0, 0.0", ROW_LSE: ROW_LSE.replace("running_max + tl.log(total)", "tl.where(running_sum == 0.0, float(\"-inf\"), running_max + tl.log(total))")}),
    ("ex01_5", "max_of_first", "max_of_first", {"            new_max = tl.maximum(running_max, tl.max(lses, 0))\n": "            new_max = tl.where(begin == first, tl.max(lses, 0), running_max)\n"}),
    ("ex01_5", "padding_counts", "padding_counts", {LSES: LSES.replace('other=float("-inf")', "other=0.0"), ROW_MASK: '            mask = ((states < last) & (lses > float("-inf")))[:, None] & (dims < head_dim)[None, :]\n'}),
    ("ex01_5", "max_of_block", "max_not_carried", {"            new_max = tl.maximum(running_max, tl.max(lses, 0))\n": "            new_max = tl.max(lses, 0)\n"}),
    ("ex01_5", "no_max", "no_max", {"            new_max = tl.maximum(running_max, tl.max(lses, 0))\n            base = tl.where(new_max == float(\"-inf\"), 0.0, new_max)": "            new_max = 0.0\n            base = 0.0"}),
    ("ex01_5", "the_specification", "shortcut", {LAUNCH: "    return merge_rows_spec(partial_out, partial_lse, offsets, out, lse)\n" + LAUNCH}),
    ("ex01_5", "one_after_another", "shortcut", {LAUNCH: """    for row in range(len(out)):
        first, last = int(offsets[row]), int(offsets[row + 1])
        if last > first + 1:
            out[row], lse[row] = merge_many(partial_out[first:last], partial_lse[first:last])
        elif last == first:
            out[row], lse[row] = 0, -torch.inf
    return
""" + LAUNCH}),
    ("ex01_1", "inf_kept", "empty_multiplied", {"    out_a = out_a.masked_fill((lse_a == -torch.inf)[:, None], 0.0)  # 0 * NaN is NaN\n": "    out_a = out_a.masked_fill(out_a.isnan(), 0.0)\n", "    out_b = out_b.masked_fill((lse_b == -torch.inf)[:, None], 0.0)\n": "    out_b = out_b.masked_fill(out_b.isnan(), 0.0)\n"}),
    ("ex01_1", "log2_of_sum", "lse_mixed", {"def merge_two": """
base = torch.maximum(lse_a, lse_b)
base = base.masked_fill(base == -torch.inf, 0.0)
wa, wb = (lse_a - base).exp()[:, None], (lse_b - base).exp()[:, None]
total = wa + wb
a, b = out_a.masked_fill(wa == 0, 0.0), out_b.masked_fill(wb == 0, 0.0)
return (wa * a + wb * b) / total.masked_fill(total == 0, 1.0), base + total[:, 0].log2()
"""}),
    ("ex01_1", "both_whole", "both_empty", {"def merge_two": """
if bool((lse_a == -torch.inf).all()) and bool((lse_b == -torch.inf).all()):
    return torch.zeros_like(out_a), lse_a.clone()
lse = torch.logaddexp(lse_a, lse_b)
a = torch.where((lse_a == -torch.inf)[:, None], 0.0, out_a)
b = torch.where((lse_b == -torch.inf)[:, None], 0.0, out_b)
return (lse_a - lse).exp()[:, None] * a + (lse_b - lse).exp()[:, None] * b, lse
"""}),
    ("ex01_1", "fp64_exp", "no_max", {"def merge_two": """
wa, wb = lse_a.double().exp(), lse_b.double().exp()
total = wa + wb
a = torch.where(lse_a[:, None] == -torch.inf, 0.0, out_a).double()
b = torch.where(lse_b[:, None] == -torch.inf, 0.0, out_b).double()
out = (wa[:, None] * a + wb[:, None] * b) / torch.where(total == 0, 1.0, total)[:, None]
return out.float(), total.log().float()
"""}),
    ("ex01_1", "clamped_900", "clamped", {"def merge_two": """
lse = torch.logaddexp(lse_a, lse_b)
top = torch.maximum(lse_a, lse_b).clamp(min=-900)
wa, wb = torch.exp(lse_a.clamp(min=-900) - top), torch.exp(lse_b.clamp(min=-900) - top)
wa, wb = torch.where(lse_a == -torch.inf, 0.0, wa), torch.where(lse_b == -torch.inf, 0.0, wb)
a = torch.where(lse_a[:, None] == -torch.inf, 0.0, out_a)
b = torch.where(lse_b[:, None] == -torch.inf, 0.0, out_b)
total = wa + wb
return (wa[:, None] * a + wb[:, None] * b) / torch.where(total == 0, 1.0, total)[:, None], lse
"""}),
    ("ex01_2", "fp64_exp", "no_max", {"def merge_many": """
w = lses.double().exp()
o = torch.where((lses == -torch.inf)[..., None], 0.0, outs).double()
total = w.sum(0)
out = (w[..., None] * o).sum(0) / total.masked_fill(total == 0, 1.0)[:, None]
return out.float(), total.log().float()
"""}),
    ("ex01_3", "float_share", "float_share", {"def split_bounds": """
share = -(-longest // tile) / n_splits
bounds = []
for s in range(n_splits):
    begin, end = int(s * share) * tile, int((s + 1) * share) * tile
    bounds.append((begin, max(begin, min(end, length))))
return bounds
"""}),
    ("ex01_3", "rest_to_the_last_ones", "rest_last_ones", {"def split_bounds": """
n = -(-longest // tile)
share, rest = divmod(n, n_splits)
bounds, first = [], 0
for s in range(n_splits):
    last = first + share + (s >= n_splits - rest)
    bounds.append((first * tile, max(first * tile, min(last * tile, length))))
    first = last
return bounds
"""}),
    ("ex01_5", "correction_unguarded", "empty_read", {"def merge_rows_kernel": """
row, head = tl.program_id(0), tl.program_id(1)
dims = tl.arange(0, BLOCK_D)
first, last = tl.load(offsets + row), tl.load(offsets + row + 1)
if last - first != 1:
    acc = tl.zeros([BLOCK_D], tl.float32)
    largest, total = float("-inf"), 0.0
    for begin in range(first, last, BLOCK_S):
        states = begin + tl.arange(0, BLOCK_S)
        lses = tl.load(partial_lse + states * n_heads + head, mask=states < last, other=float("-inf"))
        has = lses > float("-inf")
        mask = has[:, None] & (dims < head_dim)[None, :]
        outs = tl.load(partial_out + ((states * n_heads + head) * head_dim)[:, None] + dims[None, :], mask=mask, other=0.0)
        new = tl.maximum(largest, tl.max(lses, 0))
        weights = tl.where(has, tl.exp(lses - new), 0.0)
        shrink = tl.exp(largest - new)
        acc = acc * shrink + tl.sum(weights[:, None] * outs, 0)
        total = total * shrink + tl.sum(weights, 0)
        largest = new
    found = total > 0.0
    acc = tl.where(found, acc / tl.where(found, total, 1.0), 0.0)
    at = out + row * stride_row + head * stride_head + dims * stride_dim
    tl.store(at, acc.to(out.dtype.element_ty), mask=dims < head_dim)
    tl.store(lse + row * n_heads + head, tl.where(found, largest + tl.log(total), float("-inf")))
"""}),
    ("ex01_1", "where_b_empty_only", "both_empty", {"def merge_two": """
lse = torch.logaddexp(lse_a, lse_b)
wa = torch.exp(lse_a - lse)[:, None]
out = wa * out_a + (1 - wa) * out_b
out = torch.where((lse_b == -torch.inf)[:, None], out_a, out)
out = torch.where((lse_a == -torch.inf)[:, None], out_b, out)
return out, lse
"""}),
    ("ex01_2", "clamped_lse", "both_empty", {"def merge_many": """
safe = lses.clamp(min=-1e4)
w = torch.softmax(safe, 0)
o = torch.where((lses == -torch.inf)[..., None], 0.0, outs)
return (w[..., None] * o).sum(0), torch.logsumexp(safe, 0)
"""}),
    ("ex01_2", "mean_of_lse", "both_empty", {"def merge_many": """
lse = torch.logsumexp(lses, 0)
w = torch.exp(lses - lses.max(0).values)
w = torch.nan_to_num(w)
o = torch.nan_to_num(outs)
return (w[..., None] * o).sum(0) / w.sum(0)[:, None], lse
"""}),
    ("ex01_3", "own_tiles_min", "own_length", {"def split_bounds": """
n = min(-(-longest // tile), -(-length // tile))
return [(n * s // n_splits * tile, min(n * (s + 1) // n_splits * tile, length)) for s in range(n_splits)]
"""}),
    ("ex01_3", "range_step", "cut_in_tokens", {"def split_bounds": """
step = -(-longest // n_splits)
return [(min(b, length), min(b + step, length)) for b in range(0, step * n_splits, step)] if step else [(0, 0)] * n_splits
"""}),
    ("ex01_4", "masks_weights_only", "max_unmasked", {"def attend_split": """
BLOCK_D: tl.constexpr = SHAPE.BLOCK_D  # a GPU wants sizes of new tensors so
BLOCK_H: tl.constexpr = SHAPE.BLOCK_H
BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
kv_head = grid_head // SHAPE.HEAD_BLOCKS
acc = tl.zeros([BLOCK_D, BLOCK_H], tl.float32)
m = tl.full([BLOCK_H], float("-inf"), tl.float32)
s = tl.zeros([BLOCK_H], tl.float32)
for start in range(begin, end, BLOCK_N):
    k, v = load_kv(cache, row, kv_head, start, end, SHAPE)
    scores = multiply(k, query) * qk_scale
    new = tl.maximum(m, tl.max(scores, 0))
    exists = start + tl.arange(0, BLOCK_N) < end
    w = tl.where(exists[:, None], tl.exp2(scores - new[None, :]), 0.0)
    shrink = tl.exp2(m - new)
    s = s * shrink + tl.sum(w, 0)
    acc = acc * shrink[None, :] + multiply(v, w)
    m = new
safe = tl.where(s == 0.0, 1.0, s)
return acc / safe[None, :], (m + tl.log2(safe)) / 1.4426950408889634
"""}),
]  # fmt: skip
MUTANTS = MERGES + CUTS + LOOPS + ROWS

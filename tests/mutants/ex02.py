"""Wrong answers to exercise 02: (task, name, diagnosis, edits)."""

ROW_BOUNDS = """    n_tiles = -(-length // tile)
    n_cuts = min(n_tiles, n_splits)
    begins = [n_tiles * split // n_cuts * tile for split in range(n_cuts)]
    empty = n_tiles * tile, n_tiles * tile
    return [*zip(begins, [*begins[1:], length]), *[empty] * (n_splits - n_cuts)]
"""
EMPTY_ITEMS = """    n_tiles = [-(-length // tile) for length in lengths]
    longest = max(n_tiles, default=0)
    cuts = [longest * split // n_splits for split in range(n_splits + 1)]
    split_kv = sum(min(n, end) <= begin for n in n_tiles for begin, end in pairwise(cuts))
    row_local = sum(max(n_splits - n, 0) for n in n_tiles)
    return split_kv, row_local
"""
STATE = """    q, k, v = q.float(), k[begin:end].float(), v[begin:end].float()
    n_q_heads, n_kv_heads = q.shape[0], k.shape[1]
    if begin >= end:
        return torch.zeros_like(q), q.new_full((n_q_heads,), -torch.inf)
    group = n_q_heads // n_kv_heads
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)  # [tokens, n_q_heads, head_dim]
    scores = scale * torch.einsum("hd,thd->th", q, k)
    largest = scores.amax(0)
    weights = (scores - largest).exp()
    total = weights.sum(0)
    return torch.einsum("th,thd->hd", weights, v) / total[:, None], largest + total.log()
"""
SLICES = "    q, k, v = q.float(), k[begin:end].float(), v[begin:end].float()\n"
NO_TOKENS = "    if begin >= end:\n        return torch.zeros_like(q), q.new_full((n_q_heads,), -torch.inf)\n"
MERGE = """    n_rows = len(offsets) - 1
    out = outs.new_zeros(n_rows, *outs.shape[1:])
    lse = lses.new_full((n_rows, lses.shape[1]), -torch.inf)
    filled = outs.masked_fill((lses == -torch.inf)[..., None], 0.0)  # 0 * NaN is NaN
    for row, (first, last) in enumerate(pairwise(offsets.tolist())):
        if first < last:
            largest = lses[first:last].amax(0)
            base = largest.masked_fill(largest == -torch.inf, 0.0)  # -inf - -inf is NaN
            weights = (lses[first:last] - base).exp()
            total = weights.sum(0)
            lse[row] = base + total.log()
            out[row] = (weights[..., None] * filled[first:last]).sum(0) / total.masked_fill(total == 0.0, 1.0)[:, None]
    return out, lse
"""
LOOP = "    for row, (first, last) in enumerate(pairwise(offsets.tolist())):\n        if first < last:\n"
KERNEL = """    program = tl.program_id(0)
    row, split = program // n_splits, program % n_splits
    length = tl.load(lengths_ptr + row).to(tl.int64)
    n_tiles = tl.cdiv(length, TILE)
    n_cuts = tl.maximum(tl.minimum(n_tiles, n_splits), 1)
    begin = n_tiles * tl.minimum(split, n_cuts) // n_cuts * TILE
    end = n_tiles * tl.minimum(split + 1, n_cuts) // n_cuts * TILE
    tl.store(bounds_ptr + 2 * program, begin)
    tl.store(bounds_ptr + 2 * program + 1, tl.maximum(begin, tl.minimum(end, length)))
"""
PLAN = KERNEL[KERNEL.index("    n_tiles") : KERNEL.index("    tl.store")]
STORES = KERNEL[KERNEL.index("    tl.store") :]
LAUNCH = """    bounds = lengths.new_full((len(lengths), n_splits, 2), -1)  # what no program writes stays -1
    bounds_kernel[(len(lengths) * n_splits,)](lengths, bounds, n_splits, tile)
    return bounds
"""

MUTANTS = [
    # ex02_1
    ("ex02_1", "lesson_01_rule", "scattered", {ROW_BOUNDS: '''
    n = (length + tile - 1) // tile
    result = []
    for s in range(n_splits):
        begin = n * s // n_splits * tile
        end = min(n * (s + 1) // n_splits * tile, length)
        result.append((begin, max(begin, end)))
    return result
'''}),
    ("ex02_1", "tokens", "by_tokens", {ROW_BOUNDS: '''
    return [(length * s // n_splits, length * (s + 1) // n_splits) for s in range(n_splits)]
'''}),
    ("ex02_1", "share", "remainder_lost", {ROW_BOUNDS: '''
    n = -(-length // tile)
    share = n // n_splits * tile
    return [(share * s, max(share * s, min(share * (s + 1), length))) for s in range(n_splits)]
'''}),
    ("ex02_1", "rest_to_the_last", "remainder_last", {"begins = [n_tiles * split // n_cuts * tile": "begins = [n_tiles // n_cuts * split * tile"}),
    ("ex02_1", "ceil_share", "rounded_up", {ROW_BOUNDS: '''
    n = -(-length // tile)
    share = -(-n // n_splits)
    cuts = [min(share * s, n) * tile for s in range(n_splits + 1)]
    return [(begin, max(begin, min(end, length))) for begin, end in pairwise(cuts)]
'''}),
    ("ex02_1", "tensor_split", "larger_first", {ROW_BOUNDS: '''
    parts = torch.arange(-(-length // tile)).tensor_split(n_splits)
    bounds = []
    for part in parts:
        if len(part):
            bounds.append((int(part[0]) * tile, min(int(part[-1] + 1) * tile, length)))
        else:
            bounds.append((-(-length // tile) * tile, -(-length // tile) * tile))
    return bounds
'''}),
    ("ex02_1", "what_is_left", "larger_last", {ROW_BOUNDS: '''
    left = n = -(-length // tile)
    begin, bounds = 0, []
    for others in range(min(n, n_splits), 0, -1):
        share = left // others
        bounds.append((begin * tile, min((begin + share) * tile, length)))
        begin, left = begin + share, left - share
    return bounds + [(n * tile, n * tile)] * (n_splits - len(bounds))
'''}),
    ("ex02_1", "rounded", "rounded", {"[n_tiles * split // n_cuts * tile for": "[round(n_tiles * split / n_cuts) * tile for"}),
    ("ex02_1", "whole_last_tile", "unclipped", {"[*begins[1:], length]": "[*begins[1:], n_tiles * tile]"}),
    ("ex02_1", "whole_tiles_only", "floor", {ROW_BOUNDS: ROW_BOUNDS.replace("-(-length // tile)", "length // tile").replace("begins[1:], length", "begins[1:], n_tiles * tile")}),
    ("ex02_1", "plus_one", "tile_too_many", {"    n_tiles = -(-length // tile)\n    n_cuts = min(n_tiles, n_splits)\n    begins": "    n_tiles = length // tile + 1\n    n_cuts = min(n_tiles, n_splits)\n    begins"}),
    ("ex02_1", "ends_before_begin", "backwards", {ROW_BOUNDS: '''
    n = -(-length // tile)
    c = max(1, min(n, n_splits))
    first = [n * min(s, c) // c * tile for s in range(n_splits + 1)]
    return [(first[s], min(first[s + 1], length)) for s in range(n_splits)]
'''}),
    ("ex02_1", "empty_at_length", "empty_at_length", {"empty = n_tiles * tile, n_tiles * tile": "empty = length, length"}),
    ("ex02_1", "empty_zero", "empty_at_zero", {"empty = n_tiles * tile, n_tiles * tile": "empty = 0, 0"}),
    ("ex02_1", "no_empty_ones", "empty_dropped", {", *[empty] * (n_splits - n_cuts)]": "]"}),
    ("ex02_1", "last_token", "inclusive", {"[*begins[1:], length]": "[*(begin - 1 for begin in begins[1:]), length - 1]"}),
    ("ex02_1", "tiles", "in_tiles", {ROW_BOUNDS: ROW_BOUNDS.replace(" * tile", "").replace("begins[1:], length", "begins[1:], n_tiles").replace("empty = n_tiles, n_tiles", "empty = n_tiles, n_tiles")}),
    ("ex02_1", "divides_by_zero", "empty_row", {"range(n_cuts)]": "range(n_cuts + 1)]", "zip(begins, [*begins[1:], length])": "zip(begins[:-1], [*begins[1:-1], length])"}),
    ("ex02_1", "the_library", "shortcut", {ROW_BOUNDS: '''
    import numpy as np

    from pkv.stages.s2_row_local import own_items as cut

    return [(begin, end) for _, begin, end in cut(np.array([length]), n_splits, tile).tolist()]
'''}),
    # ex02_2
    ("ex02_2", "both_like_the_longest", "same_rule", {"return split_kv, row_local\n\n\ndef empty_items_spec": "return split_kv, split_kv\n\n\ndef empty_items_spec"}),
    ("ex02_2", "both_by_own_tiles", "same_rule", {EMPTY_ITEMS: '''
    def count(n):
        cuts = [n * s // n_splits for s in range(n_splits + 1)]
        return sum(a == b for a, b in pairwise(cuts))

    split_kv = sum(count(-(-length // tile)) for length in lengths)
    row_local = sum(n_splits - min(n_splits, -(-length // tile)) for length in lengths)
    return split_kv, row_local
'''}),
    ("ex02_2", "swapped", "swapped", {"return split_kv, row_local\n\n\ndef empty_items_spec": "return row_local, split_kv\n\n\ndef empty_items_spec"}),
    ("ex02_2", "with_tokens", "filled", {EMPTY_ITEMS: '''
    if not lengths:
        return 0, 0
    tiles = [-(-length // tile) for length in lengths]
    longest = max(tiles)
    first = second = 0
    for n in tiles:
        for s in range(n_splits):
            begin, end = longest * s // n_splits, longest * (s + 1) // n_splits
            first += begin < min(end, n)
        second += min(n, n_splits)
    return first, second
'''}),
    ("ex02_2", "below_zero", "negative", {"max(n_splits - n, 0) for n in n_tiles": "n_splits - n for n in n_tiles"}),
    ("ex02_2", "token_cuts", "by_tokens", {EMPTY_ITEMS: '''
    longest = max(lengths, default=0)
    split_kv = 0
    for length in lengths:
        for s in range(n_splits):
            begin = longest * s // n_splits
            end = min(longest * (s + 1) // n_splits, length)
            split_kv += end <= begin
    row_local = sum(max(n_splits - -(-length // tile), 0) for length in lengths)
    return split_kv, row_local
'''}),
    ("ex02_2", "ceil_share", "rounded_up", {EMPTY_ITEMS: '''
    n_tiles = [-(-length // tile) for length in lengths]
    share = -(-max(n_tiles, default=0) // n_splits)
    split_kv = sum(n_splits - (-(-n // share) if share else 0) for n in n_tiles)
    row_local = sum(max(n_splits - n, 0) for n in n_tiles)
    return split_kv, row_local
'''}),
    ("ex02_2", "floor_share", "rounded_down", {"cuts = [longest * split // n_splits for": "cuts = [longest // n_splits * split for"}),
    ("ex02_2", "ends_at_begin", "late", {"min(n, end) <= begin for n": "min(n, end) < begin for n"}),
    ("ex02_2", "short_rows_only", "outside_only", {"min(n, end) <= begin for n": "n <= begin < end for n"}),
    ("ex02_2", "shorter_rows_only", "longest_skipped", {"min(n, end) <= begin for n in n_tiles": "min(n, end) <= begin for n in n_tiles if n < longest"}),
    ("ex02_2", "whole_tiles", "whole_tiles", {"n_tiles = [-(-length // tile) for length in lengths]": "n_tiles = [length // tile for length in lengths]"}),
    ("ex02_2", "live_rows", "empty_rows_skipped", {"n_tiles = [-(-length // tile) for length in lengths]": "n_tiles = [-(-length // tile) for length in lengths if length > 0]"}),
    ("ex02_2", "no_default", "no_rows", {"max(n_tiles, default=0)": "max(n_tiles)"}),
    ("ex02_2", "counters", "shortcut", {EMPTY_ITEMS: '''
    return empty_items_spec(lengths, n_splits, tile)
'''}),
    # ex02_3
    ("ex02_3", "modulo", "head_map", {"k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)  # [tokens": "k, v = k.repeat(1, group, 1), v.repeat(1, group, 1)  # [tokens"}),
    ("ex02_3", "whole_row", "whole_row", {SLICES: "    q, k, v = q.float(), k.float(), v.float()\n", "    if begin >= end:\n        return torch.zeros_like(q)": "    if not len(k):\n        return torch.zeros_like(q)"}),
    ("ex02_3", "from_0", "from_the_start", {SLICES: SLICES.replace("begin:end", ":end"), "    if begin >= end:\n        return torch.zeros_like(q)": "    if not len(k):\n        return torch.zeros_like(q)"}),
    ("ex02_3", "to_the_end", "to_the_end", {SLICES: SLICES.replace("begin:end", "begin:"), "    if begin >= end:\n        return torch.zeros_like(q)": "    if not len(k):\n        return torch.zeros_like(q)"}),
    ("ex02_3", "begin_and_count", "end_is_count", {SLICES: SLICES.replace("begin:end", "begin : begin + end"), "    if begin >= end:\n        return torch.zeros_like(q)": "    if not len(k):\n        return torch.zeros_like(q)"}),
    ("ex02_3", "inclusive", "end_included", {SLICES: SLICES.replace("begin:end", "begin : end + 1"), "    if begin >= end:\n        return torch.zeros_like(q)": "    if not len(k):\n        return torch.zeros_like(q)"}),
    ("ex02_3", "one_short", "last_left_out", {SLICES: SLICES.replace("begin:end", "begin : end - 1")}),
    ("ex02_3", "masked", "outside", {STATE: '''
    n_q_heads, n_kv_heads = q.shape[0], k.shape[1]
    if begin >= end:
        return torch.zeros(q.shape), torch.full((n_q_heads,), -torch.inf)
    group = n_q_heads // n_kv_heads
    k, v = k.float().repeat_interleave(group, dim=1), v.float().repeat_interleave(group, dim=1)
    scores = scale * torch.einsum("hd,thd->th", q.float(), k)
    token = torch.arange(len(k))[:, None]
    scores = scores.masked_fill((token < begin) | (token >= end), -torch.inf)
    return torch.einsum("th,thd->hd", scores.softmax(0), v), scores.logsumexp(0)
'''}),
    ("ex02_3", "no_max", "no_max", {"    largest = scores.amax(0)\n    weights": "    largest = torch.zeros(n_q_heads)\n    weights"}),
    ("ex02_3", "no_scale", "no_scale", {'scores = scale * torch.einsum("hd,thd->th", q, k)': 'scores = torch.einsum("hd,thd->th", q, k)'}),
    ("ex02_3", "usual_scale", "own_scale", {'scores = scale * torch.einsum("hd,thd->th", q, k)': 'scores = torch.einsum("hd,thd->th", q, k) / q.shape[1] ** 0.5'}),
    ("ex02_3", "lse_of_shifted", "lse_without_max", {"largest + total.log()\n": "total.log()\n"}),
    ("ex02_3", "log2", "lse_base_2", {"largest + total.log()\n": "largest / 0.6931471805599453 + total.log2()\n"}),
    ("ex02_3", "lse_mixed", "lse_mixed", {"largest + total.log()\n": "largest + total.log2()\n"}),
    ("ex02_3", "undivided", "not_divided", {"/ total[:, None], largest": ", largest"}),
    ("ex02_3", "fp16", "half", {"q, k, v = q.float(), k[begin:end].float(), v[begin:end].float()": "k, v = k[begin:end], v[begin:end]"}),
    ("ex02_3", "rounded_at_last", "half", {STATE: STATE.replace("    q, k, v", "    dtype = q.dtype\n    q, k, v").replace("    return torch.einsum(\"th,thd->hd\", weights, v) / total[:, None], largest + total.log()", "    return (torch.einsum(\"th,thd->hd\", weights, v) / total[:, None]).to(dtype), (largest + total.log()).to(dtype)")}),
    ("ex02_3", "softmax_of_nothing", "not_neutral", {STATE: '''
    heads = torch.arange(q.shape[0]) // (q.shape[0] // k.shape[1])
    k, v = k[begin:end, heads].float(), v[begin:end, heads].float()
    scores = torch.einsum("hd,thd->ht", q.float(), k) * scale
    return torch.einsum("ht,thd->hd", scores.softmax(1), v), scores.amax(1) + (scores - scores.amax(1, keepdim=True)).exp().sum(1).log()
'''}),
    ("ex02_3", "lse_zero", "not_neutral", {NO_TOKENS: "    if begin >= end:\n        return torch.zeros_like(q), q.new_zeros(n_q_heads)\n"}),
    # ex02_4
    ("ex02_4", "mean", "average", {MERGE: '''
    rows = list(pairwise(offsets.tolist()))
    out = torch.stack([outs[a:b].mean(0) if a < b else torch.zeros_like(outs[0]) if len(outs) else outs.new_zeros(outs.shape[1:]) for a, b in rows])
    lse = torch.stack([lses[a:b].logsumexp(0) if a < b else lses.new_full(lses.shape[1:], -torch.inf) for a, b in rows])
    return out, lse
'''}),
    ("ex02_4", "mean_of_filled", "average", {"weights = (lses[first:last] - base).exp()": "weights = (lses[first:last] > -torch.inf).float()", "lse[row] = base + total.log()": "lse[row] = lses[first:last].logsumexp(0)"}),
    ("ex02_4", "no_max", "divided_by_zero", {MERGE: '''
    out = outs.new_zeros(len(offsets) - 1, *outs.shape[1:])
    lse = lses.new_full((len(offsets) - 1, lses.shape[1]), -torch.inf)
    for row in range(len(offsets) - 1):
        numerator, denominator = torch.zeros_like(out[row]), torch.zeros_like(lse[row])
        for item in range(offsets[row], offsets[row + 1]):
            weight = lses[item].exp()
            numerator += torch.where((weight > 0)[:, None], outs[item] * weight[:, None], 0)
            denominator += weight
        if (denominator > 0).any():
            out[row], lse[row] = numerator / denominator[:, None], denominator.log()
    return out, lse
'''}),
    ("ex02_4", "junk_multiplied", "junk", {"* filled[first:last]).sum(0)": "* outs[first:last]).sum(0)"}),
    ("ex02_4", "einsum", "junk", {"(weights[..., None] * filled[first:last]).sum(0)": 'torch.einsum("ih,ihd->hd", weights, outs[first:last])'}),
    ("ex02_4", "nan_to_num_at_last", "hidden", {"* filled[first:last]).sum(0)": "* outs[first:last]).sum(0)", "    return out, lse\n\n\ndef merge_rows_spec": "    return out.nan_to_num(), lse\n\n\ndef merge_rows_spec"}),
    ("ex02_4", "all_empty", "minus_inf", {"base = largest.masked_fill(largest == -torch.inf, 0.0)": "base = largest"}),
    ("ex02_4", "no_items", "empty_row", {LOOP: LOOP.replace("if first < last", "if first <= last")}),
    ("ex02_4", "divided_by_zero", "divided_by_zero", {"total.masked_fill(total == 0.0, 1.0)[:, None]": "total[:, None]"}),
    ("ex02_4", "one_item_copied", "empty_row", {LOOP: LOOP.replace("        if first < last:\n", "        if last - first == 1:\n            out[row], lse[row] = outs[first], lses[first]\n        elif first < last:\n")}),
    ("ex02_4", "pair_by_pair", "minus_inf", {MERGE: '''
    out = torch.zeros(len(offsets) - 1, *outs.shape[1:])
    lse = torch.full((len(offsets) - 1, lses.shape[1]), -torch.inf)
    outs = outs.nan_to_num(posinf=0.0)
    for row in range(len(lse)):
        for item in range(offsets[row], offsets[row + 1]):
            largest = torch.maximum(lse[row], lses[item])
            old, new = (lse[row] - largest).exp(), (lses[item] - largest).exp()
            out[row] = (out[row] * old[:, None] + outs[item] * new[:, None]) / (old + new)[:, None]
            lse[row] = largest + (old + new).log()
    return out, lse
'''}),
    ("ex02_4", "logsumexp_unguarded", "junk_and_minus_inf", {"def merge_rows": """
n_rows = len(offsets) - 1
out = outs.new_zeros(n_rows, *outs.shape[1:])
lse = lses.new_full((n_rows, lses.shape[1]), -torch.inf)
for row, (first, last) in enumerate(pairwise(offsets.tolist())):
    if first < last:
        lse[row] = lses[first:last].logsumexp(0)
        out[row] = ((lses[first:last] - lse[row]).exp()[..., None] * outs[first:last]).sum(0)
return out, lse
"""}),
    ("ex02_4", "lse_mixed", "lse_mixed", {"lse[row] = base + total.log()": "lse[row] = base + total.log2()"}),
    ("ex02_4", "undivided", "not_divided", {" / total.masked_fill(total == 0.0, 1.0)[:, None]\n": "\n"}),
    ("ex02_4", "log2", "base_2", {"weights = (lses[first:last] - base).exp()": "weights = (lses[first:last] - base).exp2()", "base + total.log()": "base + total.log2()"}),
    ("ex02_4", "lse_shifted", "lse_without_max", {"lse[row] = base + total.log()": "lse[row] = total.log()"}),
    ("ex02_4", "lse_largest", "lse_largest", {"lse[row] = base + total.log()": "lse[row] = largest"}),
    ("ex02_4", "counts", "offsets_are_counts", {LOOP: LOOP.replace("        if", "        last += first\n        if")}),
    ("ex02_4", "one_more", "next_row_too", {LOOP: LOOP.replace("        if", "        last += 1\n        if")}),
    ("ex02_4", "from_0", "rows_before", {LOOP: LOOP.replace("        if", "        first = 0\n        if")}),
    ("ex02_4", "even_split", "even_rows", {MERGE: '''
    n_rows = len(offsets) - 1
    per_row = len(outs) // n_rows
    outs, lses = outs[: n_rows * per_row].unflatten(0, (n_rows, per_row)), lses[: n_rows * per_row].unflatten(0, (n_rows, per_row))
    outs = torch.where((lses == -torch.inf)[..., None], 0, outs)
    lse = lses.logsumexp(1)
    weights = (lses - lse[:, None]).exp().nan_to_num()
    return (outs * weights[..., None]).sum(1), lse
'''}),
    # ex02_5
    ("ex02_5", "reads_four_lengths", "out_of_bounds", {"    length = tl.load(lengths_ptr + row).to(tl.int64)\n": "    near = tl.arange(0, 4)\n    length = tl.sum(tl.where(near == 0, tl.load(lengths_ptr + row + near), 0), 0).to(tl.int64)\n"}),
    ("ex02_5", "int32", "int32", {"tl.load(lengths_ptr + row).to(tl.int64)": "tl.load(lengths_ptr + row)"}),
    ("ex02_5", "widened_too_late", "int32", {KERNEL: KERNEL.replace("row).to(tl.int64)", "row)").replace("begin = n_tiles * tl.minimum(split, n_cuts) //", "begin = (n_tiles * tl.minimum(split, n_cuts)).to(tl.int64) //").replace("end = n_tiles * tl.minimum(split + 1, n_cuts) //", "end = (n_tiles * tl.minimum(split + 1, n_cuts)).to(tl.int64) //")}),
    ("ex02_5", "true_division", "float", {KERNEL: KERNEL.replace("begin = n_tiles * tl.minimum(split, n_cuts) // n_cuts", "begin = (n_tiles * tl.minimum(split, n_cuts) / n_cuts).to(tl.int64)").replace("end = n_tiles * tl.minimum(split + 1, n_cuts) // n_cuts", "end = (n_tiles * tl.minimum(split + 1, n_cuts) / n_cuts).to(tl.int64)")}),
    ("ex02_5", "scattered", "scattered", {PLAN: '''
    n_tiles = tl.cdiv(length, TILE)
    begin = n_tiles * split // n_splits * TILE
    end = n_tiles * (split + 1) // n_splits * TILE
'''}),
    ("ex02_5", "tokens", "by_tokens", {PLAN: "    begin = length * split // n_splits\n    end = length * (split + 1) // n_splits\n"}),
    ("ex02_5", "share", "remainder_lost", {PLAN: '''
    share = tl.cdiv(length, TILE) // n_splits * TILE
    begin = share * split
    end = begin + share
'''}),
    ("ex02_5", "ceil_share", "rounded_up", {PLAN: '''
    n_tiles = tl.cdiv(length, TILE)
    share = tl.cdiv(n_tiles, n_splits)
    begin = tl.minimum(share * split, n_tiles) * TILE
    end = tl.minimum(share * (split + 1), n_tiles) * TILE
'''}),
    ("ex02_5", "whole_last_tile", "unclipped", {"tl.maximum(begin, tl.minimum(end, length))": "end"}),
    ("ex02_5", "backwards", "backwards", {"tl.maximum(begin, tl.minimum(end, length))": "tl.minimum(end, length)"}),
    ("ex02_5", "floor", "floor", {"n_tiles = tl.cdiv(length, TILE)": "n_tiles = length // TILE"}),
    ("ex02_5", "leaves_early", "empty_unwritten", {STORES: '''
    if begin < end:
        tl.store(bounds_ptr + 2 * program, begin)
        tl.store(bounds_ptr + 2 * program + 1, tl.minimum(end, length))
'''}),
    ("ex02_5", "one_number_each", "overlapping", {STORES: STORES.replace("2 * program", "program")}),
    ("ex02_5", "planes", "planes", {STORES: STORES.replace("2 * program + 1", "tl.num_programs(0) + program").replace("2 * program", "program")}),
    ("ex02_5", "nothing", "unwritten", {KERNEL: "    pass\n"}),
    ("ex02_5", "turned", "turned", {STORES: STORES.replace("2 * program, begin", "2 * program + 1, begin").replace("2 * program + 1, tl.max", "2 * program, tl.max")}),
    ("ex02_5", "split_before_row", "wrong_row", {"row, split = program // n_splits, program % n_splits": "row, split = program % n_splits, program // n_splits"}),
    ("ex02_5", "row_is_program", "wrong_row", {"tl.load(lengths_ptr + row)": "tl.load(lengths_ptr + program)"}),
    ("ex02_5", "first_row", "first_row", {"tl.load(lengths_ptr + row)": "tl.load(lengths_ptr)"}),
    ("ex02_5", "longest", "like_longest", {LAUNCH: LAUNCH.replace("(lengths, bounds", "(lengths.amax().expand(len(lengths)).contiguous(), lengths, bounds"), "def bounds_kernel(lengths_ptr, bounds_ptr": "def bounds_kernel(longest_ptr, lengths_ptr, bounds_ptr", PLAN: '''
    n_tiles = tl.cdiv(tl.load(longest_ptr).to(tl.int64), TILE)
    begin = n_tiles * split // n_splits * TILE
    end = n_tiles * (split + 1) // n_splits * TILE
'''}),
    ("ex02_5", "planned_on_the_host", "host_reads", {LAUNCH: '''
    bounds = [row_bounds(length, n_splits, tile) for length in lengths.tolist()]
    return torch.tensor(bounds, dtype=torch.int32, device=lengths.device)
'''}),
    ("ex02_5", "longest_on_the_host", "host_reads", {LAUNCH: LAUNCH.replace("    bounds_kernel", "    n_splits = min(n_splits, int(lengths.max()) // tile + n_splits)\n    bounds_kernel")}),
    ("ex02_5", "pytorch", "no_kernel", {LAUNCH: '''
    n_tiles = (-(-lengths.long() // tile))[:, None]
    cuts = torch.minimum(n_tiles, torch.tensor(n_splits)).clamp(min=1)
    first = n_tiles * torch.arange(n_splits + 1).minimum(cuts) // cuts * tile
    begin = first[:, :-1]
    return torch.stack([begin, first[:, 1:].minimum(lengths[:, None]).maximum(begin)], -1).int()
'''}),
    ("ex02_5", "no_tile", "empty_row", {"tl.maximum(tl.minimum(n_tiles, n_splits), 1)": "tl.minimum(n_tiles, n_splits)"}),
    ("ex02_5", "the_specification", "shortcut", {LAUNCH: LAUNCH.replace("return bounds", "return bounds_on_gpu_spec(lengths, n_splits, tile)")}),
    ("ex02_3", "fp16_zeros", "dtype", {NO_TOKENS: "    if begin >= end:\n        return half_zeros, half_zeros.new_full((n_q_heads,), -torch.inf)\n", SLICES: "    half_zeros = torch.zeros_like(q)\n" + SLICES}),
    ("ex02_1", "ones_to_last", "larger_last", {"def row_bounds": """
n = -(-length // tile)
share, rest = divmod(n, min(n, n_splits) or 1)
c = min(n, n_splits)
bounds, first = [], 0
for s in range(c):
    last = first + share + (s >= c - rest)
    bounds.append((first * tile, min(last * tile, length)))
    first = last
return bounds + [(n * tile, n * tile)] * (n_splits - c)
"""}),
    ("ex02_4", "stack_of_rows", "no_rows", {"def merge_rows": """
rows = []
for a, b in pairwise(offsets.tolist()):
    some = lses[a:b]
    lse = torch.logsumexp(some, 0) if b > a else lses.new_full((lses.shape[1],), -torch.inf)
    w = (some - lse.masked_fill(lse == -torch.inf, 0)).exp()
    o = torch.where((some == -torch.inf)[..., None], 0, outs[a:b])
    rows.append(((w[..., None] * o).sum(0), lse))
return torch.stack([out for out, _ in rows]), torch.stack([lse for _, lse in rows])
"""}),
    ("ex02_4", "max_0", "max_from_0", {"def merge_rows": """
n_rows = len(offsets) - 1
out = outs.new_zeros(n_rows, *outs.shape[1:])
lse = lses.new_full((n_rows, lses.shape[1]), -torch.inf)
for row in range(n_rows):
    first, last = int(offsets[row]), int(offsets[row + 1])
    if first == last:
        continue
    some = lses[first:last]
    top = some.amax(0).clamp(min=0)
    w = (some - top).exp()
    total = w.sum(0)
    o = torch.where((some == -torch.inf)[..., None], 0, outs[first:last])
    out[row] = (w[..., None] * o).sum(0) / total.clamp(min=1e-30)[:, None]
    lse[row] = top + total.log()
return out, lse
"""}),
    ("ex02_1", "float_share", "float_share", {"def row_bounds": """
n = -(-length // tile)
c = max(min(n, n_splits), 1)
share = n / c
cuts = [int(share * s) * tile for s in range(c)] + [length]
bounds = list(pairwise(cuts)) if n else [(0, 0)]
return bounds + [(n * tile, n * tile)] * (n_splits - c)
"""}),
    ("ex02_2", "divmod", "larger_first", {"def empty_items": """
tiles = [-(-n // tile) for n in lengths]
share, rest = divmod(max(tiles, default=0), n_splits)
cuts = [share * s + min(s, rest) for s in range(n_splits + 1)]
split_kv = 0
for n in tiles:
    for s in range(n_splits):
        if min(cuts[s + 1], n) <= cuts[s]:
            split_kv += 1
return split_kv, sum(max(0, n_splits - n) for n in tiles)
"""}),
    ("ex02_3", "scores_from_0", "max_from_0", {"def state_of_range": """
q, k, v = q.float(), k[begin:end].float(), v[begin:end].float()
if len(k) == 0:
    return torch.zeros_like(q), torch.full((q.shape[0],), -torch.inf)
G = q.shape[0] // k.shape[1]
k, v = k.repeat_interleave(G, 1), v.repeat_interleave(G, 1)
scores = (q * k).sum(-1) * scale
top = torch.clamp(scores.amax(0), min=0)
w = torch.exp(scores - top)
return (w[..., None] * v).sum(0) / w.sum(0)[:, None], top + w.sum(0).log()
"""}),
    ("ex02_1", "np_linspace", "rounded", {"def row_bounds": """
n = -(-length // tile)
c = min(n, n_splits)
cuts = torch.linspace(0, n, c + 1).round().long().tolist() if c else [0]
bounds = [(a * tile, min(b * tile, length)) for a, b in pairwise(cuts)]
return bounds + [(n * tile, n * tile)] * (n_splits - c)
"""}),
    ("ex02_2", "full_rows", "same_rule", {"def empty_items": """
n = [-(-length // tile) for length in lengths]
total = len(lengths) * n_splits
split_kv = total - sum(min(t, n_splits) for t in n)
return split_kv, sum(max(n_splits - t, 0) for t in n)
"""}),
    ("ex02_3", "scale_after_softmax", None, {"def state_of_range": """
q, k, v = q.float(), k[begin:end].float(), v[begin:end].float()
if not len(k):
    return torch.zeros_like(q), torch.full((len(q),), -torch.inf)
G = len(q) // k.shape[1]
k, v = k.repeat_interleave(G, 1), v.repeat_interleave(G, 1)
s = torch.einsum("hd,thd->th", q, k)
return torch.einsum("th,thd->hd", s.softmax(0), v) * scale, s.logsumexp(0) * scale
"""}),
    ("ex02_4", "loop_over_offsets_values", None, {"def merge_rows": """
out, lse = [], []
for first in offsets[:-1].tolist():
    some = lses[first:first + 1]
    out.append(outs[first:first + 1].sum(0)); lse.append(some.sum(0))
return torch.stack(out), torch.stack(lse)
"""}),
    ("ex02_2", "begins_only", "outside_only", {"def empty_items": """
tiles = [-(-length // tile) for length in lengths]
if not tiles:
    return 0, 0
n = max(tiles)
split_kv = sum(mine <= n * s // n_splits for mine in tiles for s in range(n_splits))
return split_kv, sum(max(0, n_splits - mine) for mine in tiles)
"""}),
    ("ex02_4", "one_max_for_the_batch", "one_max", {"def merge_rows": """
n_rows = len(offsets) - 1
out = outs.new_zeros(n_rows, *outs.shape[1:])
total = lses.new_zeros(n_rows, lses.shape[1])
counts = (offsets[1:] - offsets[:-1]).long()
row_of = torch.repeat_interleave(torch.arange(n_rows), counts)
top = lses.amax(0) if len(lses) else lses.new_zeros(lses.shape[1])
top = top.masked_fill(top == -torch.inf, 0.0)
w = (lses - top).exp()
filled = torch.where((lses == -torch.inf)[..., None], torch.zeros_like(outs), outs)
out.index_add_(0, row_of, w[..., None] * filled)
total.index_add_(0, row_of, w)
return out / torch.where(total == 0, 1.0, total)[..., None], top + total.log()
"""}),
    ("ex02_4", "empty_by_head_0", "one_head", {"def merge_rows": """
n_rows = len(offsets) - 1
out = outs.new_zeros(n_rows, *outs.shape[1:])
lse = lses.new_full((n_rows, lses.shape[1]), -torch.inf)
starts = offsets.tolist()
for row in range(n_rows):
    mine = slice(starts[row], starts[row + 1])
    full = lses[mine, 0] > -torch.inf
    if full.any():
        states, logs = outs[mine][full], lses[mine][full]
        lse[row] = logs.logsumexp(0)
        out[row] = (logs.softmax(0)[..., None] * states).sum(0)
return out, lse
"""}),
    ("ex02_5", "end_in_32_bits", "int32", {"def bounds_kernel": """
pid = tl.program_id(0)
row, split = pid // n_splits, pid % n_splits
length = tl.load(lengths_ptr + row)
n = tl.cdiv(length, TILE)
c = tl.maximum(tl.minimum(n, n_splits), 1)
begin = tl.where(split < c, n.to(tl.int64) * split // c * TILE, n * TILE)
end = tl.where(split < c, n * (split + 1) // c * TILE, n * TILE)
end = tl.where(split < c, tl.minimum(end, length), end)
tl.store(bounds_ptr + 2 * pid, begin)
tl.store(bounds_ptr + 2 * pid + 1, end)
"""}),
]  # fmt: skip

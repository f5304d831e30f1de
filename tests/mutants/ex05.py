"""Wrong answers to exercise 05: (task, name, diagnosis, edits)."""

LINE = """    n_tiles = (lengths.long() + tile - 1) // tile
    return torch.nn.functional.pad(n_tiles.cumsum(0), (1, 0)).int()
"""
COUNT = "    n_tiles = (lengths.long() + tile - 1) // tile\n"
SUMS = "    return torch.nn.functional.pad(n_tiles.cumsum(0), (1, 0)).int()\n"
BOUNDS = "    return [n_tiles * program // n_programs for program in range(n_programs + 1)]\n"
WALK = """    items, before = [], 0  # tiles before the row
    for row, length in enumerate(lengths):
        n_tiles = -(-length // tile)
        first, stop = max(begin - before, 0), min(end - before, n_tiles)  # tiles of the row
        if first < stop:
            items.append((row, first * tile, min(stop * tile, length)))
        before += n_tiles
    return items
"""
ITEM = "            items.append((row, first * tile, min(stop * tile, length)))\n"
SLOTS = """    slots: list[list[int]] = [[] for _ in lengths]
    n_tiles = sum(-(-length // tile) for length in lengths)
    for program, (begin, end) in enumerate(pairwise(run_bounds(n_tiles, n_programs))):
        for row, first_token, end_token in items_of_run(begin, end, lengths, tile):
            if (first_token, end_token) != (0, lengths[row]):
                slots[row].append(2 * program + (first_token == 0))
    return slots
"""
SLOT = "                slots[row].append(2 * program + (first_token == 0))\n"
PART = "            if (first_token, end_token) != (0, lengths[row]):\n"
LAUNCH = """    plan = torch.empty(n_programs, 3, dtype=torch.int32, device=lengths.device)
    plan_kernel[(n_programs,)](lengths, plan, len(lengths), n_programs, TILE=tile, BLOCK=128)
    return plan
"""
TOTAL = """    for first in range(0, n_rows, BLOCK):
        total += tl.sum(tiles_of(lengths, first + tl.arange(0, BLOCK), n_rows, TILE), 0)
"""
SCAN = """    for first in range(0, n_rows, BLOCK):
        tiles = tiles_of(lengths, first + tl.arange(0, BLOCK), n_rows, TILE)
        is_before = scanned + tl.cumsum(tiles, 0) <= begin  # these rows end before the run begins
        row += tl.sum(is_before.to(tl.int32), 0)
        before += tl.sum(tl.where(is_before, tiles, 0), 0)
        scanned += tl.sum(tiles, 0)
"""
IS_BEFORE = "is_before = scanned + tl.cumsum(tiles, 0) <= begin"
BEGIN = "    begin = total * program // n_programs\n    n_tiles = total * (program + 1) // n_programs - begin\n"
TOKEN = "tl.store(plan + 3 * program + 1, (begin - before) * TILE)"
NUMBER = "tl.store(plan + 3 * program + 2, n_tiles)"
CAPTURE = """    out = torch.empty_like(q)
    pkv.decode(q, cache, out=out)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pkv.decode(q, cache, out=out)

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay
"""
WARM = "    pkv.decode(q, cache, out=out)  # compiles the kernels\n"
CAPTURED = "    with torch.cuda.graph(graph):\n        pkv.decode(q, cache, out=out)\n"

MUTANTS = [
    ("ex05_1", "kept_by_tensor", "kept", {"def tile_line": """
    known = tile_line.__dict__.setdefault("known", {})
    if id(lengths) not in known:
        n_tiles = (lengths.long() + tile - 1) // tile
        known[id(lengths)] = torch.nn.functional.pad(n_tiles.cumsum(0), (1, 0)).int()
    return known[id(lengths)]
"""}),
    ("ex05_1", "floor", "floor", {COUNT: "    n_tiles = lengths.long() // tile\n"}),
    ("ex05_1", "plus_one", "one_too_many", {COUNT: "    n_tiles = lengths.long() // tile + 1\n"}),
    ("ex05_1", "at_least_one", "empty_takes_one", {COUNT: COUNT + "    n_tiles = n_tiles.clamp(min=1)\n"}),
    ("ex05_1", "inclusive", "no_start", {SUMS: "    return n_tiles.cumsum(0).int()\n"}),
    ("ex05_1", "exclusive", "no_end", {SUMS: "    return (n_tiles.cumsum(0) - n_tiles).int()\n"}),
    ("ex05_1", "zero_before_exclusive", "begins_twice", {SUMS: "    return torch.nn.functional.pad(n_tiles.cumsum(0) - n_tiles, (1, 0)).int()\n"}),
    ("ex05_1", "counts", "not_summed", {SUMS: "    return n_tiles.int()\n"}),
    ("ex05_1", "tokens", "tokens", {LINE: "    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()\n"}),
    ("ex05_1", "rounded_after_summing", "rows_share_tiles", {LINE: "    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])\n    return ((ends + tile - 1) // tile).int()\n"}),
    ("ex05_1", "longest_row", "longest_row", {LINE: "    most = -(-int(lengths.max()) // tile) if len(lengths) else 0\n    return torch.arange(len(lengths) + 1, dtype=torch.int32) * most\n"}),
    ("ex05_1", "narrow", "overflow", {COUNT: "    n_tiles = (lengths + tile - 1) // tile\n"}),
    ("ex05_1", "ceil_of_floats", "float32", {COUNT: "    n_tiles = torch.ceil(lengths / tile).long()\n"}),
    ("ex05_1", "loop_with_start_units", "start_units", {LINE: "    line = [0]\n    for length in lengths.tolist():\n        line.append(line[-1] + (-(-length // tile) + 4 if length else 0))\n    return torch.tensor(line, dtype=torch.int32)\n"}),
    ("ex05_1", "the_specification", "shortcut", {LINE: "    return tile_line_spec(lengths, tile)\n"}),
    ("ex05_2", "share_up", "rounded_up", {BOUNDS: "    share = -(-n_tiles // n_programs)\n    return [min(p * share, n_tiles) for p in range(n_programs + 1)]\n"}),
    ("ex05_2", "share_up_unclipped", "past_the_end", {BOUNDS: "    share = -(-n_tiles // n_programs)\n    return [p * share for p in range(n_programs + 1)]\n"}),
    ("ex05_2", "rest_to_the_last", "remainder_last", {BOUNDS: "    share = n_tiles // n_programs\n    return [p * share for p in range(n_programs)] + [n_tiles]\n"}),
    ("ex05_2", "divmod", "remainder_first", {BOUNDS: "    share, extra = divmod(n_tiles, n_programs)\n    bounds = [0]\n    for p in range(n_programs):\n        bounds.append(bounds[-1] + share + (p < extra))\n    return bounds\n"}),
    ("ex05_2", "share_first", "remainder_lost", {BOUNDS: "    return [n_tiles // n_programs * p for p in range(n_programs + 1)]\n"}),
    ("ex05_2", "at_least_one", "at_least_one", {BOUNDS: "    share = max(n_tiles // n_programs, 1)\n    return [min(p * share, n_tiles) for p in range(n_programs)] + [n_tiles]\n"}),
    ("ex05_2", "all_to_the_last", "all_to_one", {BOUNDS: "    return [0] * n_programs + [n_tiles]\n"}),
    ("ex05_2", "no_empty_runs", "fewer_programs", {BOUNDS: "    n_programs = max(min(n_programs, n_tiles), 1)\n    return [n_tiles * p // n_programs for p in range(n_programs + 1)] if n_tiles else [0]\n"}),
    ("ex05_2", "begins_only", "no_end", {BOUNDS: "    return [n_tiles * p // n_programs for p in range(n_programs)]\n"}),
    ("ex05_2", "pairs", "pairs", {BOUNDS: "    return [(n_tiles * p // n_programs, n_tiles * (p + 1) // n_programs) for p in range(n_programs)]\n"}),
    ("ex05_2", "nearest", "rounded", {BOUNDS: "    return [round(n_tiles * p / n_programs) for p in range(n_programs + 1)]\n"}),
    ("ex05_2", "float_share", "float_share", {BOUNDS: "    share = n_tiles / n_programs\n    return [int(p * share) for p in range(n_programs + 1)]\n"}),
    ("ex05_2", "linspace", "float_share", {BOUNDS: "    return torch.linspace(0, n_tiles, n_programs + 1).int().tolist()\n"}),
    ("ex05_2", "narrow", "overflow", {BOUNDS: "    return (torch.arange(n_programs + 1, dtype=torch.int32) * n_tiles // n_programs).tolist()\n"}),
    ("ex05_2", "sizes", "sizes", {BOUNDS: "    return [n_tiles * (p + 1) // n_programs - n_tiles * p // n_programs for p in range(n_programs)]\n"}),
    ("ex05_3", "last_tile_whole", "not_cut", {ITEM: ITEM.replace("min(stop * tile, length)", "stop * tile")}),
    ("ex05_3", "length_of_the_first_row", "cut_at_wrong_row", {ITEM: "            items.append((row, first * tile, min(stop * tile, lengths[items[0][0] if items else row])))\n"}),
    ("ex05_3", "one_row", "first_row_only", {ITEM: ITEM + "            break\n"}),
    ("ex05_3", "empty_item", "empty_row", {"        if first < stop:\n": "        if first <= stop:\n"}),
    ("ex05_3", "from_token_0", "from_token_0", {ITEM: ITEM.replace("first * tile", "0")}),
    ("ex05_3", "to_row_end", "to_row_end", {ITEM: ITEM.replace("min(stop * tile, length)", "length")}),
    ("ex05_3", "whole_rows", "whole_rows", {ITEM: "            items.append((row, 0, length))\n"}),
    ("ex05_3", "line_tokens", "on_the_line", {ITEM: "            base = before * tile\n            items.append((row, base + first * tile, base + min(stop * tile, length)))\n"}),
    ("ex05_3", "tiles", "in_tiles", {ITEM: "            items.append((row, first, stop))\n"}),
    ("ex05_3", "count_for_end", "n_tokens", {ITEM: ITEM.replace("min(stop * tile, length)", "min(stop * tile, length) - first * tile")}),
    ("ex05_3", "each_tile", "tile_by_tile", {WALK: "    line = [(r, t, min(t + tile, n)) for r, n in enumerate(lengths) for t in range(0, n, tile)]\n    return line[begin:end]\n"}),
    ("ex05_3", "floor", "floor", {"    for row, length in enumerate(lengths):\n        n_tiles = -(-length // tile)\n": "    for row, length in enumerate(lengths):\n        n_tiles = length // tile\n"}),
    ("ex05_3", "one_line_of_tokens", "tiles_cross_rows", {WALK: "    items, before = [], 0\n    for row, length in enumerate(lengths):\n        first, last = max(begin * tile - before, 0), min(end * tile - before, length)\n        if first < last:\n            items.append((row, first, last))\n        before += length\n    return items\n"}),
    ("ex05_3", "ends", "ends_for_begins", {"        n_tiles = -(-length // tile)\n        first, stop": "        n_tiles = -(-length // tile)\n        before += n_tiles\n        first, stop", "        before += n_tiles\n    return items\n": "    return items\n"}),
    ("ex05_3", "inclusive", "one_tile_more", {"min(end - before, n_tiles)": "min(end + 1 - before, n_tiles)"}),
    ("ex05_3", "longest_row", "padded", {WALK: "    most = -(-max(lengths) // tile)\n    items = []\n    for row, length in enumerate(lengths):\n        first, stop = max(begin - row * most, 0), min(end - row * most, most)\n        if first * tile < min(stop * tile, length):\n            items.append((row, first * tile, min(stop * tile, length)))\n    return items\n"}),
    ("ex05_3", "ends_of_the_run_only", "rows_between_lost", {"        before += n_tiles\n    return items\n": "        before += n_tiles\n    return items[:1] + items[-1:] if len(items) > 1 else items\n"}),
    ("ex05_3", "until_an_empty_row", "stops_at_empty_row", {"        if first < stop:\n": "        if items and not length:\n            break\n        if first < stop:\n"}),
    ("ex05_3", "rows_with_tokens", "empty_not_counted", {"    for row, length in enumerate(lengths):\n        n_tiles = -(-length // tile)\n        first": "    for row, length in enumerate(filter(None, lengths)):\n        n_tiles = -(-length // tile)\n        first"}),
    ("ex05_3", "rows_of_the_run", "rows_of_run", {ITEM: "            items.append((len(items), first * tile, min(stop * tile, length)))\n"}),
    ("ex05_3", "bisect_left", "begun_row_lost", {WALK: "    line = tile_line(torch.tensor(lengths, dtype=torch.int32), tile)\n    row = int(torch.searchsorted(line, begin))\n    items = []\n    while row < len(lengths) and line[row] < end:\n        begins = int(line[row])\n        stop = min((end - begins) * tile, lengths[row])\n        if stop > 0:\n            items.append((row, 0, stop))\n        row += 1\n    return items\n"}),
    ("ex05_4", "divmod_runs", "remainder_first", {SLOTS: SLOTS.replace("pairwise(run_bounds(n_tiles, n_programs))", "pairwise([n_tiles // n_programs * p + min(p, n_tiles % n_programs) for p in range(n_programs + 1)])")}),
    ("ex05_4", "one_slot", "one_slot", {SLOT: "                slots[row].append(program)\n"}),
    ("ex05_4", "even", "always_2p", {SLOT: "                slots[row].append(2 * program)\n"}),
    ("ex05_4", "odd", "always_2p_1", {SLOT: "                slots[row].append(2 * program + 1)\n"}),
    ("ex05_4", "swapped", "swapped", {SLOT: SLOT.replace("== 0", "!= 0")}),
    ("ex05_4", "goes_on", "by_end", {SLOT: "                slots[row].append(2 * program + (end_token < lengths[row]))\n"}),
    ("ex05_4", "merges_all", "whole_rows", {PART: "            if True:\n"}),
    ("ex05_4", "queue_index", "item_index", {SLOTS: "    bounds = run_bounds(sum(-(-n // tile) for n in lengths), n_programs)\n    items = [item for b, e in pairwise(bounds) for item in items_of_run(b, e, lengths, tile)]\n    of_row = [[i for i, item in enumerate(items) if item[0] == row] for row in range(len(lengths))]\n    return [some if len(some) > 1 else [] for some in of_row]\n"}),
    ("ex05_4", "counter", "numbered", {SLOT: "                slots[row].append(sum(map(len, slots)))\n"}),
    ("ex05_4", "range_of_programs", "empty_runs", {"    return slots\n\n\ndef slots_of_rows_spec": "    ranges = [(row[0] // 2, row[-1] // 2) if row else (0, -1) for row in slots]\n    return [[2 * p + (p == a) for p in range(a, b + 1)] for a, b in ranges]\n\n\ndef slots_of_rows_spec"}),
    ("ex05_4", "touching", "touched", {SLOTS: "    slots, first = [], 0\n    bounds = run_bounds(sum(-(-n // tile) for n in lengths), n_programs)\n    for length in lengths:\n        last = first - (-length // tile)\n        mine = [p for p, (b, e) in enumerate(pairwise(bounds)) if b < e and first < last and b <= last and first < e]\n        slots.append([2 * p + (p == mine[0]) for p in mine] if len(mine) > 1 else [])\n        first = last\n    return slots\n"}),
    ("ex05_4", "share_up", "rounded_up", {SLOTS: "    slots, first = [], 0\n    share = max(-(-sum(-(-n // tile) for n in lengths) // n_programs), 1)\n    for length in lengths:\n        n_tiles = -(-length // tile)\n        begin, end = first // share, (first + n_tiles - 1) // share\n        slots.append([2 * p + (p == begin) for p in range(begin, end + 1)] if n_tiles and end > begin else [])\n        first += n_tiles\n    return slots\n"}),
    ("ex05_4", "cut_rows_only", "merged_only", {"    return slots\n\n\ndef slots_of_rows_spec": "    return [row for row in slots if row]\n\n\ndef slots_of_rows_spec"}),
    ("ex05_4", "began_before_only", "first_lost", {PART: "            if first_token:\n"}),
    ("ex05_5", "on_the_host", "host", {LAUNCH: "    bounds = run_bounds(int(tile_line_spec(lengths.cpu(), tile)[-1]), n_programs)\n    items = [items_of_run(b, e, lengths.tolist(), tile) or [(0, 0, 0)] for b, e in pairwise(bounds)]\n    plan = [(*some[0][:2], e - b) for some, (b, e) in zip(items, pairwise(bounds))]\n    return torch.tensor(plan, dtype=torch.int32, device=lengths.device)\n"}),
    ("ex05_5", "longest_by_item", "host", {LAUNCH: LAUNCH.replace("BLOCK=128", "BLOCK=max(128, triton.next_power_of_2(lengths[0].item()))")}),
    ("ex05_5", "all_in_pytorch", "torch_reads", {LAUNCH: "    line = tile_line(lengths, tile).long()\n    cuts = line[-1] * torch.arange(n_programs + 1, device=lengths.device) // n_programs\n    rows = torch.searchsorted(line[1:], cuts[:-1], right=True)\n    return torch.stack([rows, (cuts[:-1] - line[rows]) * tile, cuts.diff()], 1).int()\n"}),
    ("ex05_5", "lengths_in_64_bits", "torch_reads", {LAUNCH: LAUNCH.replace("lengths, plan, len", "lengths.long(), plan, len")}),
    ("ex05_5", "row_for_each_program", "row_each", {SCAN + "    tl.store(plan + 3 * program, row)\n    " + TOKEN + "\n    " + NUMBER: "    tl.store(plan + 3 * program, program)\n    tl.store(plan + 3 * program + 1, 0)\n    tl.store(plan + 3 * program + 2, tiles_of(lengths, program, n_rows, TILE))"}),
    ("ex05_5", "less", "ended_row", {IS_BEFORE: IS_BEFORE.replace("<=", "<")}),
    ("ex05_5", "exclusive", "begins_not_ends", {IS_BEFORE: "is_before = scanned + tl.cumsum(tiles, 0) - tiles <= begin"}),
    ("ex05_5", "exclusive_less", "begins_not_ends", {IS_BEFORE: "is_before = scanned + tl.cumsum(tiles, 0) - tiles < begin"}),
    ("ex05_5", "line_token", "on_the_line", {TOKEN: TOKEN.replace("(begin - before)", "begin")}),
    ("ex05_5", "tile_number", "in_tiles", {TOKEN: TOKEN.replace("(begin - before) * TILE", "begin - before")}),
    ("ex05_5", "end", "end_not_count", {NUMBER: NUMBER.replace("n_tiles", "begin + n_tiles")}),
    ("ex05_5", "share_up", "rounded_up", {BEGIN: "    share = tl.cdiv(total, n_programs)\n    begin = tl.minimum(program * share, total)\n    n_tiles = tl.minimum(begin + share, total) - begin\n"}),
    ("ex05_5", "share_down", "remainder_lost", {BEGIN: "    n_tiles = total // n_programs\n    begin = program * n_tiles\n"}),
    ("ex05_5", "narrow", "overflow", {BEGIN: "    small = total.to(tl.int32)\n    begin = small * program // n_programs\n    n_tiles = small * (program + 1) // n_programs - begin\n"}),
    ("ex05_5", "one_block", "first_block", {TOTAL: "    total += tl.sum(tiles_of(lengths, tl.arange(0, BLOCK), n_rows, TILE), 0)\n", SCAN: "    tiles = tiles_of(lengths, tl.arange(0, BLOCK), n_rows, TILE)\n    is_before = tl.cumsum(tiles, 0) <= begin\n    row += tl.sum(is_before.to(tl.int32), 0)\n    before += tl.sum(tl.where(is_before, tiles, 0), 0)\n"}),
    ("ex05_5", "scan_of_one_block", "first_block", {SCAN: SCAN.replace("range(0, n_rows, BLOCK)", "range(0, BLOCK, BLOCK)")}),
    ("ex05_5", "no_carry", "sums_begin_anew", {IS_BEFORE: "is_before = tl.cumsum(tiles, 0) <= begin"}),
    ("ex05_5", "row_in_block", "row_of_block", {"        row += tl.sum(is_before": "        row = tl.sum(is_before"}),
    ("ex05_5", "masked_when_read", "out_of_bounds", {"    tokens = tl.load(lengths + rows, mask=rows < n_rows, other=0).to(tl.int64)\n": "    tokens = tl.where(rows < n_rows, tl.load(lengths + rows), 0).to(tl.int64)\n"}),
    ("ex05_5", "unmasked", "beyond", {"tl.load(lengths + rows, mask=rows < n_rows, other=0)": "tl.load(lengths + rows)"}),
    ("ex05_5", "row_by_row", "first_item", {TOTAL + BEGIN: TOTAL + BEGIN + "    left = n_tiles\n", SCAN: "    place = tl.cast(0, tl.int64)\n    for i in range(n_rows):\n        tiles = tl.cdiv(tl.load(lengths + i), TILE).to(tl.int64)\n        if place + tiles <= begin:\n            row += 1\n            before += tiles\n        elif place <= begin:\n            left = tl.minimum(n_tiles, place + tiles - begin)\n        place += tiles\n", NUMBER: NUMBER.replace("n_tiles", "left")}),
    ("ex05_6", "decodes_anew", "host_work", {CAPTURE: "    out = torch.empty_like(q)\n    return lambda: pkv.decode(q, cache, out=out)\n"}),
    ("ex05_6", "captures_anew", "host_work", {CAPTURE: "    out = torch.empty_like(q)\n    pkv.decode(q, cache, out=out)\n\n    def replay():\n        graph = torch.cuda.CUDAGraph()\n        with torch.cuda.graph(graph):\n            pkv.decode(q, cache, out=out)\n        graph.replay()\n        return out\n\n    return replay\n"}),
    ("ex05_6", "no_first_call", "not_compiled", {WARM: ""}),
    ("ex05_6", "planned_on_the_host", "old_lengths", {CAPTURED: '    with torch.cuda.graph(graph):\n        pkv.decode(q, cache, out=out, stage="workqueue")\n', WARM: '    pkv.decode(q, cache, out=out, stage="workqueue")\n'}),
    ("ex05_6", "own_lengths", "old_lengths", {"    out = torch.empty_like(q)\n": "    out = torch.empty_like(q)\n    cache = pkv.PagedKVCache(cache.k_pages, cache.v_pages, cache.block_table, cache.lengths.clone())\n"}),
    ("ex05_6", "own_queries", "old_queries", {"    out = torch.empty_like(q)\n": "    out = torch.empty_like(q)\n    q = q.clone()\n"}),
    ("ex05_6", "result_of_the_capture", "old_result", {"        graph.replay()\n        return out\n": "        graph.replay()\n        return result\n", "    def replay() -> torch.Tensor:": "    graph.replay()\n    result = out.clone()\n\n    def replay() -> torch.Tensor:"}),
    ("ex05_6", "never_replayed", "old_result", {"        graph.replay()\n        return out\n": "        return out\n"}),
    ("ex05_6", "no_result", None, {"        graph.replay()\n        return out\n": "        graph.replay()\n"}),
    ("ex05_6", "the_specification", "shortcut", {CAPTURE: "    return capture_spec(q, cache)\n"}),
    ("ex05_1", "row_by_row", "loop", {"def tile_line": """
line = [0]
for length in lengths.tolist():
    line.append(line[-1] + (length + tile - 1) // tile)
return torch.tensor(line, dtype=torch.int32)
"""}),
    ("ex05_1", "64_bits", "dtype", {SUMS: "    return torch.nn.functional.pad(n_tiles.cumsum(0), (1, 0))\n"}),
    ("ex05_3", "empty_inside", "empty_row", {"def items_of_run": """
items, before = [], 0
for row, length in enumerate(lengths):
    n = -(-length // tile)
    first, stop = max(begin - before, 0), min(end - before, n)
    if n and first <= stop and first < n:
        items.append((row, first * tile, min(stop * tile, length)))
    before += n
return items
"""}),
    ("ex05_6", "clone", "another_tensor", {"def capture": """
out = torch.empty_like(q)
pkv.decode(q, cache, out=out)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    pkv.decode(q, cache, out=out)
def replay():
    graph.replay()
    return out.clone()
return replay
"""}),
    ("ex05_1", "fp32", "float32", {"def tile_line": """
n = torch.ceil(lengths / tile)
return torch.cat([torch.zeros(1), n.cumsum(0)]).int()
"""}),
    ("ex05_1", "fp32_one_by_one", "float32", {"def tile_line": """
n = (lengths.float() / tile).ceil().int()
return torch.cat([torch.zeros(1, dtype=torch.int32), n.cumsum(0)]).int()
"""}),
    ("ex05_1", "fp32_plus", "float32", {"def tile_line": """
n = ((lengths.double() + tile - 1) / tile).float().floor()
return torch.nn.functional.pad(n.long().cumsum(0), (1, 0)).int()
"""}),
    ("ex05_5", "first_row_empty", "empty_first_row", {"def plan_kernel": """
program = tl.program_id(0)
total = tl.cast(0, tl.int64)
for first in range(0, n_rows, BLOCK):
    total += tl.sum(tiles_of(lengths, first + tl.arange(0, BLOCK), n_rows, TILE), 0)
begin = total * program // n_programs
end = total * (program + 1) // n_programs
row = 0
before, seen = tl.cast(0, tl.int64), tl.cast(0, tl.int64)
if begin > 0:
    for first in range(0, n_rows, BLOCK):
        tiles = tiles_of(lengths, first + tl.arange(0, BLOCK), n_rows, TILE)
        ended = seen + tl.cumsum(tiles, 0) <= begin
        row += tl.sum(tl.where(ended, 1, 0), 0)
        before += tl.sum(tl.where(ended, tiles, 0), 0)
        seen += tl.sum(tiles, 0)
tl.store(plan + 3 * program, row)
tl.store(plan + 3 * program + 1, (begin - before) * TILE)
tl.store(plan + 3 * program + 2, end - begin)
"""}),
    ("ex05_5", "rest_to_the_last", "remainder_last", {"def plan_kernel": """
program = tl.program_id(0)
total = tl.cast(0, tl.int64)
for first in range(0, n_rows, BLOCK):
    total += tl.sum(tiles_of(lengths, first + tl.arange(0, BLOCK), n_rows, TILE), 0)
share = total // n_programs
begin = share * program
mine = share
if program == n_programs - 1:
    mine = total - begin
row = 0
before, seen = tl.cast(0, tl.int64), tl.cast(0, tl.int64)
for first in range(0, n_rows, BLOCK):
    tiles = tiles_of(lengths, first + tl.arange(0, BLOCK), n_rows, TILE)
    ended = seen + tl.cumsum(tiles, 0) <= begin
    row += tl.sum(tl.where(ended, 1, 0), 0)
    before += tl.sum(tl.where(ended, tiles, 0), 0)
    seen += tl.sum(tiles, 0)
tl.store(plan + 3 * program, row)
tl.store(plan + 3 * program + 1, (begin - before) * TILE)
tl.store(plan + 3 * program + 2, mine)
"""}),
    ("ex05_2", "ones_to_the_last", "remainder_last_ones", {"def run_bounds": """
share, rest = divmod(n_tiles, n_programs)
bounds = [0]
for program in range(n_programs):
    bounds.append(bounds[-1] + share + (program >= n_programs - rest))
return bounds
"""}),
    ("ex05_3", "off_by_one_row", "rows_from_1", {"def items_of_run": """
items, before = [], 0
for row, length in enumerate(lengths):
    n = -(-length // tile)
    a, b = max(begin, before), min(end, before + n)
    if a < b:
        items.append((row + 1, (a - before) * tile, min((b - before) * tile, length)))
    before += n
return items
"""}),
    ("ex05_4", "slot_by_end", "last_of_run", {"def slots_of_rows": """
slots = [[] for _ in lengths]
n = sum(-(-x // tile) for x in lengths)
for p, (b, e) in enumerate(pairwise(run_bounds(n, n_programs))):
    mine = items_of_run(b, e, lengths, tile)
    for i, (row, first, last) in enumerate(mine):
        if (first, last) != (0, lengths[row]):
            slots[row].append(2 * p + (i == len(mine) - 1))
return slots
"""}),
    ("ex05_5", "store_begin_tile", "row_before", {"def plan_kernel": """
program = tl.program_id(0)
rows = tl.arange(0, BLOCK)
total = tl.cast(0, tl.int64)
for first in range(0, n_rows, BLOCK):
    total += tl.sum(tiles_of(lengths, first + rows, n_rows, TILE), 0)
begin = total * program // n_programs
n_tiles = total * (program + 1) // n_programs - begin
ended, before, seen = 0, tl.cast(0, tl.int64), tl.cast(0, tl.int64)
for first in range(0, n_rows, BLOCK):
    tiles = tiles_of(lengths, first + rows, n_rows, TILE)
    is_ended = seen + tl.cumsum(tiles, 0) <= begin
    ended += tl.sum(is_ended.to(tl.int32), 0)
    before += tl.sum(tl.where(is_ended, tiles, 0), 0)
    seen += tl.sum(tiles, 0)
row = tl.maximum(ended - 1, 0)
tl.store(plan + 3 * program, row)
tl.store(plan + 3 * program + 1, (begin - before) * TILE)
tl.store(plan + 3 * program + 2, n_tiles)
"""}),
    ("ex05_4", "program_by_share", "share_of_tile", {"def slots_of_rows": """
line = [0]
for length in lengths:
    line.append(line[-1] + -(-length // tile))
n = line[-1]
slots = []
for row in range(len(lengths)):
    if line[row] == line[row + 1]:
        slots.append([])
        continue
    first = line[row] * n_programs // n
    last = (line[row + 1] - 1) * n_programs // n
    slots.append([2 * first + 1, *(2 * p for p in range(first + 1, last + 1))] if last > first else [])
return slots
"""}),
    ("ex05_5", "end_of_this_block", "before_of_block", {"def plan_kernel": """
program = tl.program_id(0)
total = tl.cast(0, tl.int64)
for first in range(0, n_rows, BLOCK):
    total += tl.sum(tiles_of(lengths, first + tl.arange(0, BLOCK), n_rows, TILE), 0)
begin = total * program // n_programs
end = total * (program + 1) // n_programs
row = 0
before, seen = tl.cast(0, tl.int64), tl.cast(0, tl.int64)
for first in range(0, n_rows, BLOCK):
    tiles = tiles_of(lengths, first + tl.arange(0, BLOCK), n_rows, TILE)
    ends = seen + tl.cumsum(tiles, 0)
    row += tl.sum((ends <= begin).to(tl.int32), 0)
    before = tl.max(tl.where(ends <= begin, ends, 0), 0)
    seen += tl.sum(tiles, 0)
tl.store(plan + 3 * program, row)
tl.store(plan + 3 * program + 1, (begin - before) * TILE)
tl.store(plan + 3 * program + 2, end - begin)
"""}),
    ("ex05_5", "total_in_fp32", "float32", {"def plan_kernel": """
program = tl.program_id(0)
total = 0.0
for first in range(0, n_rows, BLOCK):
    total += tl.sum(tiles_of(lengths, first + tl.arange(0, BLOCK), n_rows, TILE).to(tl.float32), 0)
n = total.to(tl.int64)
begin = n * program // n_programs
end = n * (program + 1) // n_programs
row = 0
before, seen = tl.cast(0, tl.int64), tl.cast(0, tl.int64)
for first in range(0, n_rows, BLOCK):
    tiles = tiles_of(lengths, first + tl.arange(0, BLOCK), n_rows, TILE)
    ends = seen + tl.cumsum(tiles, 0)
    row += tl.sum((ends <= begin).to(tl.int32), 0)
    before += tl.sum(tl.where(ends <= begin, tiles, 0), 0)
    seen += tl.sum(tiles, 0)
tl.store(plan + 3 * program, row)
tl.store(plan + 3 * program + 1, (begin - before) * TILE)
tl.store(plan + 3 * program + 2, end - begin)
"""}),
]  # fmt: skip

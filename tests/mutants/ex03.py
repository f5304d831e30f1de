"""Wrong answers to exercise 03: (task, name, diagnosis, edits). Bodies written anew stand first."""


def body(text):
    """A function's body, as it stands in the file."""
    return "".join(f"    {line}\n" if line else "\n" for line in text.strip("\n").split("\n"))


BUILD = body("""
items = []
for row, length in enumerate(lengths):
    n_tiles = -(-length // tile)
    for split in range(n_splits):
        first, last = n_tiles * split // n_splits, n_tiles * (split + 1) // n_splits
        if first < last:
            items.append((row, first * tile, min(last * tile, length)))
return items
""")
EQUAL_TOKENS = body("""
items = []
for row, length in enumerate(lengths):
    bounds = [length * s // n_splits for s in range(n_splits + 1)]
    items += [(row, a, b) for a, b in itertools.pairwise(bounds) if a < b]
return items
""")
CHUNKS = body("""
items = []
for row, length in enumerate(lengths):
    chunk = -(-(-(-length // tile)) // n_splits) * tile
    for begin in range(0, length, max(chunk, 1)):
        items.append((row, begin, min(begin + chunk, length)))
return items
""")
DIVMOD = body("""
items = []
for row, length in enumerate(lengths):
    share, more = divmod(-(-length // tile), n_splits)
    first = 0
    for split in range(n_splits):
        last = first + share + (1 if split < more else 0)
        if last > first:
            items.append((row, first * tile, min(last * tile, length)))
        first = last
return items
""")
LAST_TAKES_REST = body("""
items = []
for row, length in enumerate(lengths):
    n_tiles = -(-length // tile)
    share = n_tiles // n_splits
    for split in range(n_splits):
        begin = split * share * tile
        end = length if split == n_splits - 1 else begin + share * tile
        if begin < end:
            items.append((row, begin, end))
return items
""")
RECTANGLE = body("""
longest = -(-max(lengths, default=0) // tile)
bounds = [longest * s // n_splits * tile for s in range(n_splits + 1)]
return [
    (row, a, min(b, length))
    for row, length in enumerate(lengths)
    for a, b in itertools.pairwise(bounds)
    if a < length and a < b
]
""")
ROUND = body("""
items = []
for row, length in enumerate(lengths):
    n_tiles = -(-length // tile)
    bounds = [round(n_tiles * s / n_splits) * tile for s in range(n_splits + 1)]
    items += [(row, a, min(b, length)) for a, b in itertools.pairwise(bounds) if a < b]
return items
""")
ONLY_LONG_ROWS = body("""
items = []
for row, length in enumerate(lengths):
    n_tiles = -(-length // tile)
    if n_tiles < n_splits:
        continue
    for split in range(n_splits):
        items.append((row, n_tiles * split // n_splits * tile, min(n_tiles * (split + 1) // n_splits * tile, length)))
return items
""")
SPLITS_OUTSIDE = body("""
n_tiles = [-(-length // tile) for length in lengths]
return [
    (row, n * s // n_splits * tile, min(n * (s + 1) // n_splits * tile, lengths[row]))
    for s in range(n_splits)
    for row, n in enumerate(n_tiles)
    if n * s // n_splits < n * (s + 1) // n_splits
]
""")
OFFSETS = body("""
counts = [0] * n_rows
for row, _, _ in items:
    counts[row] += 1
return [0, *itertools.accumulate(counts)]
""")
GROUPED = body("""
offsets = [0]
for _, mine in itertools.groupby(items, key=lambda item: item[0]):
    offsets.append(offsets[-1] + len(list(mine)))
return offsets
""")
FIRST_SEEN = body("""
offsets = [0] * n_rows + [len(items)]
for index in range(len(items) - 1, -1, -1):
    offsets[items[index][0]] = index
return offsets
""")
BINCOUNT = body("""
counts = torch.bincount(torch.tensor([item[0] for item in items], dtype=torch.int64))
return [0, *counts.cumsum(0).tolist()]
""")
BY_SEARCH = body("""
rows = torch.tensor([item[0] for item in items])
return torch.searchsorted(rows, torch.arange(n_rows + 1), right=True).tolist()
""")
PER_ROW = body("""
per_row = max((sum(item[0] == row for item in items) for row in range(n_rows)), default=0)
return [row * per_row for row in range(n_rows + 1)]
""")
MAX_ROW = body("""
n_rows = max((item[0] for item in items), default=-1) + 1
return [sum(item[0] < row for item in items) for row in range(n_rows + 1)]
""")
LONGEST = "    return sorted(range(len(items)), key=lambda index: items[index][1] - items[index][2])\n"
ARGSORT_TWICE = body("""
sizes = torch.tensor([begin - end for _, begin, end in items])
return sizes.argsort(stable=True).argsort().tolist()
""")
ROW_TOTALS = body("""
totals = {}
for row, begin, end in items:
    totals[row] = totals.get(row, 0) + end - begin
return sorted(range(len(items)), key=lambda index: -totals[items[index][0]])
""")
BY_INDEX_OF = body("""
sizes = [end - begin for _, begin, end in items]
return [sizes.index(size) for size in sorted(sizes, reverse=True)]
""")
FROM_BEHIND = body("""
order = sorted(range(len(items)), key=lambda index: items[index][2] - items[index][1])
return order[::-1]
""")
MAKESPAN = body("""
free_at = [0] * n_places
for duration in durations:
    place = free_at.index(min(free_at))
    free_at[place] += duration
return max(free_at)
""")
WAVES = body("""
end = 0
for first in range(0, len(durations), n_places):
    end += max(durations[first : first + n_places])
return end
""")
IN_TURN = body("""
free_at = [0] * n_places
for p, duration in enumerate(durations):
    free_at[p % n_places] += duration
return max(free_at)
""")
SORTED_FIRST = body("""
free_at = [0] * n_places
for duration in sorted(durations, reverse=True):
    free_at.sort()
    free_at[0] += duration
return max(free_at)
""")
IDEAL = body("""
return max(max(durations), sum(durations) / n_places) if durations else 0
""")
LAST_OF_ALL = body("""
free_at = [0] * n_places
end = 0
for duration in durations:
    place = free_at.index(min(free_at))
    end = free_at[place] + duration
    free_at[place] = end
return end
""")
SHARES = body("""
share = max(-(-len(durations) // n_places), 1)
return max((sum(durations[i : i + share]) for i in range(0, len(durations), share)), default=0)
""")

ENTRY = "    index = tl.load(order + tl.program_id(0) // GRID_HEADS)\n"
HEAD = "    kv_head = tl.program_id(0) % GRID_HEADS\n"
LOADS = """    row = tl.load(items + 3 * index)
    begin = tl.load(items + 3 * index + 1)
    end = tl.load(items + 3 * index + 2)
"""
DECIDE = "    if tl.load(offsets + row + 1) - tl.load(offsets + row) == 1:\n"
RESULT = "        store_state(result, row, kv_head, out, lse, SHAPE, False)\n    else:\n"
PARTIAL = "        store_state(partials, index, kv_head, out, lse, SHAPE, True)\n\n\ndef decode_queue("
REST = "\n\n\ndef decode_queue("
CHOICE = DECIDE + RESULT + PARTIAL
PARTIAL_OF = "        store_state(partials, {}, kv_head, out, lse, SHAPE, True)" + REST

KERNEL = (
    HEAD
    + ENTRY
    + LOADS
    + "    query = load_query(q, row, kv_head, SHAPE)\n"
    + "    out, lse = attend_tokens(query, cache, row, kv_head, begin, end, qk_scale, SHAPE)\n"
    + CHOICE
)
NEXT_ROW = (
    body("""
entry = tl.program_id(0) // GRID_HEADS
kv_head = tl.program_id(0) - entry * GRID_HEADS
item = items + tl.load(order + entry) * 3
row = tl.load(item)
out, lse = attend_tokens(
    load_query(q, row, kv_head, SHAPE), cache, row, kv_head, tl.load(item + 1), tl.load(item + 2), qk_scale, SHAPE
)
if tl.load(item + 3) != row:
    store_state(result, row, kv_head, out, lse, SHAPE, False)
else:
    store_state(partials, tl.load(order + entry), kv_head, out, lse, SHAPE, True)
""").rstrip()
    + REST
)
ROW_BY_OFFSETS = (
    body("""
kv_head = tl.program_id(0) % GRID_HEADS
index = tl.load(order + tl.program_id(0) // GRID_HEADS)
row = tl.load(items + 3 * index)
first = tl.load(offsets + row)
last = tl.load(offsets + row + 1) - 1
query = load_query(q, row, kv_head, SHAPE)
begin = tl.load(items + 3 * first + 1)
end = tl.load(items + 3 * last + 2)
out, lse = attend_tokens(query, cache, row, kv_head, begin, end, qk_scale, SHAPE)
if first == last:
    store_state(result, row, kv_head, out, lse, SHAPE, False)
else:
    store_state(partials, index, kv_head, out, lse, SHAPE, True)
""").rstrip()
    + REST
)
TWO_AXES = (
    body("""
index = tl.load(order + tl.program_id(0))
kv_head = tl.program_id(1)
row = tl.load(items + 3 * index)
query = load_query(q, row, kv_head, SHAPE)
out, lse = attend_tokens(
    query, cache, row, kv_head, tl.load(items + 3 * index + 1), tl.load(items + 3 * index + 2), qk_scale, SHAPE
)
n_items = tl.load(offsets + row + 1) - tl.load(offsets + row)
if n_items > 1:
    store_state(partials, index, kv_head, out, lse, SHAPE, True)
else:
    store_state(result, row, kv_head, out, lse, SHAPE, False)
""").rstrip()
    + REST
)
ROW_PER_PROGRAM = (
    body("""
kv_head = tl.program_id(0) % GRID_HEADS
row = tl.program_id(0) // GRID_HEADS
query = load_query(q, row, kv_head, SHAPE)
first = tl.load(offsets + row)
last = tl.load(offsets + row + 1)
for index in range(first, last):
    begin = tl.load(items + 3 * index + 1)
    end = tl.load(items + 3 * index + 2)
    out, lse = attend_tokens(query, cache, row, kv_head, begin, end, qk_scale, SHAPE)
    if last - first == 1:
        store_state(result, row, kv_head, out, lse, SHAPE, False)
    else:
        store_state(partials, index, kv_head, out, lse, SHAPE, True)
""").rstrip()
    + REST
)
QUERY_HEADS = (
    body("""
kv_head = tl.program_id(0) % GRID_HEADS * SHAPE.GROUP
index = tl.load(order + tl.program_id(0) // GRID_HEADS)
row = tl.load(items + 3 * index)
out, lse = attend_tokens(
    load_query(q, row, kv_head, SHAPE), cache, row, kv_head,
    tl.load(items + 3 * index + 1), tl.load(items + 3 * index + 2), qk_scale, SHAPE,
)
if tl.load(offsets + row + 1) - tl.load(offsets + row) == 1:
    store_state(result, row, kv_head, out, lse, SHAPE, False)
else:
    store_state(partials, index, kv_head, out, lse, SHAPE, True)
""").rstrip()
    + REST
)
BY_MASK = (
    body("""
entry = tl.program_id(0) // GRID_HEADS
kv_head = tl.program_id(0) % GRID_HEADS
columns = tl.arange(0, 4)
item = tl.load(items + 3 * entry + columns, mask=columns < 3, other=0)
row = tl.sum(tl.where(columns == 0, item, 0), 0)
begin = tl.sum(tl.where(columns == 1, item, 0), 0)
end = tl.sum(tl.where(columns == 2, item, 0), 0)
out, lse = attend_tokens(load_query(q, row, kv_head, SHAPE), cache, row, kv_head, begin, end, qk_scale, SHAPE)
if tl.load(offsets + row + 1) - tl.load(offsets + row) == 1:
    store_state(result, row, kv_head, out, lse, SHAPE, False)
else:
    store_state(partials, entry, kv_head, out, lse, SHAPE, True)
""").rstrip()
    + REST
)

COUNTED = """        "launches": (len(items) > 0) + is_merged,
        "programs": len(items) * n_kv_heads,
"""
MERGED = "    is_merged = any(rows.count(row) != 1 for row in range(len(lengths)))\n"
FULL = "    n_full = sum(begin < end for _, begin, end in items)\n"
KV = "    kv_bytes = sum(lengths) * 2 * n_kv_heads * head_dim * bytes_per_number\n"
STATES = '        "merge_state_mib": n_full * n_q_heads * (2 + head_dim) * 4 / 2**20,\n'
CTA = '        "cta_per_sm": n_full * n_kv_heads / n_sms,\n'
WAVES_LINE = '        "waves": len(items) * n_kv_heads / (n_sms * programs_per_sm),\n'
EMPTY = '        "empty_programs": (len(items) - n_full) * n_kv_heads,\n'
FROM_ITEMS = """    n_items = [0] * len(lengths)
    tokens = 0
    for row, begin, end in items:
        n_items[row] += 1
        tokens += end - begin
    most = max(n_items, default=0)
    return {
        "launches": 2 if most > 1 else 1,
        "programs": len(items) * n_kv_heads,
        "empty_programs": sum(begin == end for _, begin, end in items) * n_kv_heads,
        "waves": len(items) * n_kv_heads / n_sms / programs_per_sm,
        "cta_per_sm": sum(begin < end for _, begin, end in items) * n_kv_heads / n_sms,
        "useful_kv_mib": tokens * 2 * n_kv_heads * head_dim * bytes_per_number / 2**20,
        "merge_state_mib": sum(begin < end for _, begin, end in items) * n_q_heads * (2 + head_dim) * 4 / 2**20,
    }
"""
PER_PAIR = """    pairs = len(lengths) * max((rows.count(row) for row in range(len(lengths))), default=0)
"""

ALL_NEW = """    heads_and_items = n_kv_heads * len(items)
    states = len([item for item in items if item[2] > item[1]])
    longest = max(lengths) if lengths else 0
    return dict(
        launches=2,
        programs=heads_and_items,
        empty_programs=heads_and_items - states * n_kv_heads,
        waves=heads_and_items / n_sms / programs_per_sm,
        cta_per_sm=states * n_kv_heads / n_sms,
        useful_kv_mib=longest * len(lengths) * n_kv_heads * head_dim * 2 * bytes_per_number / 1024**2,
        merge_state_mib=states * n_q_heads * (head_dim + 2) * 4 / 1024**2,
    )
"""
RECTANGULAR = """    n_rows = len(lengths)
    n_splits = max((sum(item[0] == row for item in items) for row in range(n_rows)), default=0)
    programs = n_rows * n_splits * n_kv_heads
    n_full = sum(begin < end for _, begin, end in items)
    counts = [sum(item[0] == row for item in items) for row in range(n_rows)]
    return {
        "launches": (1 if items else 0) + (1 if set(counts) - {1} else 0),
        "programs": programs,
        "empty_programs": programs - n_full * n_kv_heads,
        "waves": programs / (n_sms * programs_per_sm),
        "cta_per_sm": n_full * n_kv_heads / n_sms,
        "useful_kv_mib": sum(lengths) * n_kv_heads * head_dim * 2 * bytes_per_number / 2**20,
        "merge_state_mib": n_full * n_q_heads * (head_dim + 2) * 4 / 2**20,
    }
"""

MUTANTS = [
    ("ex03_1", "empty_kept", "empty_kept", {"            if first < last:\n": "            if True:\n"}),
    ("ex03_1", "empty_rows_kept", "empty_kept", {BUILD: BUILD.replace("if first < last:", "if first < last or not length and not split:")}),
    ("ex03_1", "not_clipped", "not_clipped", {"min(last * tile, length)))\n    return items": "last * tile))\n    return items"}),
    ("ex03_1", "floor_tiles", "tail_lost", {BUILD: BUILD.replace("-(-length // tile)", "length // tile")}),
    ("ex03_1", "longest_row", "longest_row", {BUILD: RECTANGLE}),
    ("ex03_1", "equal_tokens", "equal_tokens", {BUILD: EQUAL_TOKENS}),
    ("ex03_1", "equal_chunks", "ceil_share", {BUILD: CHUNKS}),
    ("ex03_1", "divmod", "first_take_more", {BUILD: DIVMOD}),
    ("ex03_1", "last_takes_rest", "last_takes_rest", {BUILD: LAST_TAKES_REST}),
    ("ex03_1", "rounded_bounds", "other_cut", {BUILD: ROUND}),
    ("ex03_1", "short_rows_left_out", "token_lost", {BUILD: ONLY_LONG_ROWS}),
    ("ex03_1", "by_split", "order", {BUILD: SPLITS_OUTSIDE}),
    ("ex03_1", "longest_row_first", "order", {BUILD: BUILD.replace("    return items\n", "    return sorted(items, key=lambda item: -lengths[item[0]])\n")}),
    ("ex03_1", "last_split_dropped", "token_lost", {BUILD: BUILD.replace("range(n_splits)", "range(max(n_splits - 1, 1))")}),
    ("ex03_1", "end_included", "end_included", {BUILD: BUILD.replace("min(last * tile, length)", "min(last * tile, length) - 1")}),
    ("ex03_1", "in_tiles", "in_tiles", {BUILD: BUILD.replace("first * tile, min(last * tile, length)", "first, last")}),
    ("ex03_1", "overlap", "token_twice", {BUILD: BUILD.replace("min(last * tile, length)", "min(last * tile + 1, length)")}),
    ("ex03_1", "rows_from_1", "no_such_row", {BUILD: BUILD.replace("enumerate(lengths)", "enumerate(lengths, 1)")}),
    ("ex03_1", "rows_renumbered", "renumbered", {BUILD: BUILD.replace("enumerate(lengths)", "enumerate(filter(None, lengths))")}),
    ("ex03_1", "through_all_rows", "through_all_rows", {BUILD: BUILD.replace("items.append((row, first * tile, min(last * tile, length)))", "before = sum(lengths[:row])\n                items.append((row, before + first * tile, before + min(last * tile, length)))")}),
    ("ex03_1", "the_specification", "shortcut", {BUILD: "    return build_queue_spec(lengths, n_splits, tile)\n"}),
    ("ex03_2", "grouped", "rows_missing", {OFFSETS: GROUPED}),
    ("ex03_2", "first_seen", "empty_row_at_0", {OFFSETS: FIRST_SEEN}),
    ("ex03_2", "bincount", "last_rows_missing", {OFFSETS: BINCOUNT}),
    ("ex03_2", "last_row_with_items", "last_rows_missing", {OFFSETS: MAX_ROW}),
    ("ex03_2", "searched_right", "ends", {OFFSETS: BY_SEARCH}),
    ("ex03_2", "rectangle", "rectangle", {OFFSETS: PER_ROW}),
    ("ex03_2", "ends_only", "first_missing", {"    return [0, *itertools.accumulate(counts)]": "    return list(itertools.accumulate(counts))"}),
    ("ex03_2", "begins_only", "last_missing", {"    return [0, *itertools.accumulate(counts)]": "    return [0, *itertools.accumulate(counts[:-1])] if counts else []"}),
    ("ex03_2", "counts", "counts", {"    return [0, *itertools.accumulate(counts)]": "    return [0, *counts]"}),
    ("ex03_2", "tokens", "tokens", {"    for row, _, _ in items:\n        counts[row] += 1\n": "    for row, begin, end in items:\n        counts[row] += end - begin\n"}),
    ("ex03_2", "only_split_rows", "only_split_rows", {"    return [0, *itertools.accumulate(counts)]": "    return [0, *itertools.accumulate(n if n > 1 else 0 for n in counts)]"}),
    ("ex03_2", "at_least_one", "one_at_least", {"    return [0, *itertools.accumulate(counts)]": "    return [0, *itertools.accumulate(max(n, 1) for n in counts)]"}),
    ("ex03_2", "fails_without_items", "no_rows", {"    counts = [0] * n_rows\n    for": "    counts = [0] * n_rows\n    items[0]\n    for"}),
    ("ex03_2", "the_specification", "shortcut", {OFFSETS: "    return partial_offsets_spec(items, n_rows)\n"}),
    ("ex03_3", "shortest_first", "shortest_first", {LONGEST: LONGEST.replace("items[index][1] - items[index][2]", "items[index][2] - items[index][1]")}),
    ("ex03_3", "from_behind", "unstable", {LONGEST: FROM_BEHIND}),
    ("ex03_3", "ranks", "ranks", {LONGEST: ARGSORT_TWICE}),
    ("ex03_3", "row_totals", "by_row", {LONGEST: ROW_TOTALS}),
    ("ex03_3", "index_of", "no_order", {LONGEST: BY_INDEX_OF}),
    ("ex03_3", "by_end", "by_end", {LONGEST: "    return sorted(range(len(items)), key=lambda index: -items[index][2])\n"}),
    ("ex03_3", "items", "items", {LONGEST: "    return sorted(items, key=lambda item: item[1] - item[2])\n"}),
    ("ex03_3", "lengths_alone", "tokens", {LONGEST: "    return sorted((end - begin for _, begin, end in items), reverse=True)\n"}),
    ("ex03_3", "as_listed", "as_listed", {LONGEST: "    return list(range(len(items)))\n"}),
    ("ex03_3", "sorts_in_place", None, {LONGEST: "    order = sorted(range(len(items)), key=lambda index: items[index][1] - items[index][2])\n    items.sort(key=lambda item: item[1] - item[2])\n    return order\n"}),
    ("ex03_3", "no_items", "no_items", {LONGEST: "    import numpy as np\n\n    table = np.array(items)\n    return np.argsort(table[:, 1] - table[:, 2], kind='stable')\n"}),
    ("ex03_3", "the_specification", "shortcut", {LONGEST: "    return longest_first_spec(items)\n"}),
    ("ex03_4", "entry_without_heads", "kv_heads_forgotten", {ENTRY: "    index = tl.load(order + tl.program_id(0))\n"}),
    ("ex03_4", "order_unread", "order_unread", {ENTRY: "    index = tl.program_id(0) // GRID_HEADS\n"}),
    ("ex03_4", "state_at_entry", "state_at_entry", {PARTIAL: PARTIAL_OF.format("tl.program_id(0) // GRID_HEADS")}),
    ("ex03_4", "partial_at_row", "partial_at_row", {PARTIAL: PARTIAL_OF.format("row")}),
    ("ex03_4", "partial_at_first", "partial_at_first", {PARTIAL: PARTIAL_OF.format("tl.load(offsets + row)")}),
    ("ex03_4", "all_results", "no_partials", {CHOICE: "    store_state(result, row, kv_head, out, lse, SHAPE, False)" + REST}),
    ("ex03_4", "no_results", "no_results", {CHOICE: "    store_state(partials, index, kv_head, out, lse, SHAPE, True)" + REST}),
    ("ex03_4", "inverted", "unwritten", {DECIDE: DECIDE.replace("==", "!=")}),
    ("ex03_4", "first_is_result", "first_is_result", {DECIDE: "    if begin == 0:\n"}),
    ("ex03_4", "result_at_item", "result_at_item", {RESULT: RESULT.replace("result, row", "result, index")}),
    ("ex03_4", "result_at_entry", "result_at_entry", {RESULT: RESULT.replace("result, row", "result, tl.program_id(0) // GRID_HEADS")}),
    ("ex03_4", "query_of_item", "query_of_item", {"load_query(q, row, kv_head, SHAPE)\n    out": "load_query(q, index, kv_head, SHAPE)\n    out"}),
    ("ex03_4", "query_of_entry", "query_of_entry", {"load_query(q, row, kv_head, SHAPE)\n    out": "load_query(q, tl.program_id(0) // GRID_HEADS, kv_head, SHAPE)\n    out"}),
    ("ex03_4", "row_at_entry", "row_at_entry", {LOADS: LOADS.replace("items + 3 * index)", "items + 3 * (tl.program_id(0) // GRID_HEADS))")}),
    ("ex03_4", "bounds_at_entry", "bounds_at_entry", {LOADS: "    entry = tl.program_id(0) // GRID_HEADS\n" + LOADS.replace("3 * index + ", "3 * entry + ")}),
    ("ex03_4", "whole_row", "whole_row", {LOADS: "    row = tl.load(items + 3 * index)\n    begin = row * 0\n    end = tl.load(cache.lengths.ptr + row)\n"}),
    ("ex03_4", "from_token_0", "from_first_token", {LOADS: LOADS.replace("tl.load(items + 3 * index + 1)", "row * 0")}),
    ("ex03_4", "to_the_end", "to_last_token", {LOADS: LOADS.replace("tl.load(items + 3 * index + 2)", "tl.load(cache.lengths.ptr + row)")}),
    ("ex03_4", "offsets_at_item", "offsets_at_item", {DECIDE: DECIDE.replace("offsets + row", "offsets + index")}),
    ("ex03_4", "kv_head_0", "unwritten", {HEAD: "    kv_head = tl.program_id(0) * 0\n"}),
    ("ex03_4", "three_forgotten", "three_forgotten", {LOADS: LOADS.replace("3 * index", "index")}),
    ("ex03_4", "heads_and_entries_turned", "unwritten", {HEAD: "    kv_head = tl.program_id(0) // GRID_HEADS\n", ENTRY: "    index = tl.load(order + tl.program_id(0) % GRID_HEADS)\n"}),
    ("ex03_4", "nothing_stored", "unwritten", {CHOICE: "    pass" + REST}),
    ("ex03_4", "end_before_begin", "unwritten", {LOADS: "    row = tl.load(items + 3 * index)\n    end = tl.load(items + 3 * index + 1)\n    begin = tl.load(items + 3 * index + 2)\n"}),
    ("ex03_4", "next_items_row", "last_is_result", {KERNEL: NEXT_ROW}),
    ("ex03_4", "last_is_result", "last_is_result", {DECIDE: "    if end == tl.load(cache.lengths.ptr + row):\n"}),
    ("ex03_4", "from_first_to_last_item", "whole_row", {KERNEL: ROW_BY_OFFSETS}),
    ("ex03_4", "two_axes", "unwritten", {KERNEL: TWO_AXES}),
    ("ex03_4", "row_per_program", "unwritten", {KERNEL: ROW_PER_PROGRAM}),
    ("ex03_4", "query_heads_for_kv_heads", "unwritten", {KERNEL: QUERY_HEADS}),
    ("ex03_4", "order_unread_by_mask", "order_unread", {KERNEL: BY_MASK}),
    ("ex03_4", "in_pytorch", "no_kernel", {"def decode_queue": """
out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, device=q.device)
group = q.shape[1] // cache.n_kv_heads
for row in range(len(q)):
    k, v = cache.gather(row)
    tokens = [t for index in order if items[index][0] == row for t in range(*items[index][1:])]
    if tokens:
        k, v = (side[tokens].float().repeat_interleave(group, 1) for side in (k, v))
        scores = torch.einsum("hd,thd->th", q[row].float(), k) * q.shape[2] ** -0.5
        lse[row] = scores.logsumexp(0)
        out[row] = torch.einsum("th,thd->hd", scores.softmax(0), v).to(q.dtype)
return out, lse
"""}),
    ("ex03_4", "ready_kernel", "shortcut", {"    # given\n    GRID_HEADS": "    from pkv.stages.s3_workqueue import attend_item\n\n    # given\n    GRID_HEADS"}),
    ("ex03_4", "the_specification", "shortcut", {"    # given\n    shape = Shape.of(q, cache)\n": "    return decode_queue_spec(q, cache, items, offsets, order)\n    # given\n    shape = Shape.of(q, cache)\n"}),
    ("ex03_5", "longest_row", "longest_row", {KV: KV.replace("sum(lengths)", "len(lengths) * max(lengths, default=0)")}),
    ("ex03_5", "query_heads_read", "query_heads", {KV: KV.replace("n_kv_heads", "n_q_heads")}),
    ("ex03_5", "k_only", "k_only", {KV: KV.replace(" * 2", "")}),
    ("ex03_5", "one_kv_head", "kv_heads_forgotten", {KV: KV.replace(" * n_kv_heads", "")}),
    ("ex03_5", "fp16_assumed", "fp16_assumed", {KV: KV.replace("bytes_per_number", "2")}),
    ("ex03_5", "mb", "mb_for_mib", {"kv_bytes / 2**20": "kv_bytes / 1e6", STATES: STATES.replace("2**20", "1e6")}),
    ("ex03_5", "states_in_mb", "mb_for_mib", {STATES: STATES.replace("2**20", "1000**2")}),
    ("ex03_5", "states_of_pairs", "all_pairs", {STATES: STATES.replace("n_full", "len(items)")}),
    ("ex03_5", "states_of_rectangle", "rectangle", {FULL: FULL + "    rows = [row for row, _, _ in items]\n" + PER_PAIR, STATES: STATES.replace("n_full", "pairs")}),
    ("ex03_5", "states_of_kv_heads", "kv_heads", {STATES: STATES.replace("n_q_heads", "n_kv_heads")}),
    ("ex03_5", "states_one_number", "one_number", {STATES: STATES.replace("2 + head_dim", "1 + head_dim")}),
    ("ex03_5", "states_of_the_cache", "cache_bytes", {STATES: STATES.replace("* 4", "* bytes_per_number")}),
    ("ex03_5", "states_of_split_rows", "split_rows_only", {STATES: STATES.replace("n_full", "sum(rows.count(row) > 1 and begin < end for row, begin, end in items)")}),
    ("ex03_5", "from_the_items", "empty_rows_not_merged", {FULL + "    rows = [row for row, _, _ in items]\n" + MERGED: FROM_ITEMS + FULL + "    rows = [row for row, _, _ in items]\n" + MERGED}),
    ("ex03_5", "two_launches_and_longest", "longest_row", {FULL: ALL_NEW + FULL}),
    ("ex03_5", "as_a_rectangle", "rectangle", {FULL: RECTANGULAR + FULL}),
    ("ex03_5", "always_two", "always_two", {COUNTED: COUNTED.replace("(len(items) > 0) + is_merged", "2")}),
    ("ex03_5", "decodes_nothing", "decodes_nothing", {COUNTED: COUNTED.replace("(len(items) > 0) + is_merged", "1 + is_merged")}),
    ("ex03_5", "kv_heads_forgotten", "kv_heads_forgotten", {COUNTED: COUNTED.replace("len(items) * n_kv_heads", "len(items)"), EMPTY: EMPTY.replace(" * n_kv_heads", ""), WAVES_LINE: WAVES_LINE.replace(" * n_kv_heads", ""), CTA: CTA.replace(" * n_kv_heads", "")}),
    ("ex03_5", "empty_programs_left_out", "full_only", {COUNTED: COUNTED.replace("len(items) * n_kv_heads", "n_full * n_kv_heads"), EMPTY: '        "empty_programs": 0,\n'}),
    ("ex03_5", "no_empty_programs", "none", {EMPTY: '        "empty_programs": 0,\n'}),
    ("ex03_5", "waves_rounded", "rounded", {WAVES_LINE: '        "waves": -(-len(items) * n_kv_heads // (n_sms * programs_per_sm)),\n'}),
    ("ex03_5", "one_program_per_sm", "one_per_sm", {WAVES_LINE: WAVES_LINE.replace("(n_sms * programs_per_sm)", "n_sms")}),
    ("ex03_5", "cta_of_all", "empty_counted", {CTA: CTA.replace("n_full", "len(items)")}),
    ("ex03_5", "cta_resident", "resident", {CTA: CTA.replace("/ n_sms", "/ (n_sms * programs_per_sm)")}),
    ("ex03_5", "the_specification", "shortcut", {FULL: "    return counters_spec(\n        items, lengths, n_q_heads, n_kv_heads, head_dim, bytes_per_number, n_sms, programs_per_sm\n    )\n" + FULL}),
    ("ex03_6", "waves", "in_waves", {MAKESPAN: WAVES}),
    ("ex03_6", "in_turn", "in_turn", {MAKESPAN: IN_TURN}),
    ("ex03_6", "sorted_first", "sorted_first", {MAKESPAN: SORTED_FIRST}),
    ("ex03_6", "ideal", "even", {MAKESPAN: IDEAL}),
    ("ex03_6", "even_rounded", "even", {MAKESPAN: "    return -(-sum(durations) // n_places)\n"}),
    ("ex03_6", "last_of_the_list", "last_listed", {MAKESPAN: LAST_OF_ALL}),
    ("ex03_6", "shares", "in_shares", {MAKESPAN: SHARES}),
    ("ex03_6", "busiest_place_next", "one_place", {MAKESPAN: MAKESPAN.replace("min(free_at)", "max(free_at)")}),
    ("ex03_6", "first_free", "first_free", {MAKESPAN: MAKESPAN.replace("return max", "return min")}),
    ("ex03_6", "no_programs", "no_programs", {MAKESPAN: "    ends = [0] * n_places\n    for duration in durations:\n        ends.append(ends.pop(ends.index(min(ends))) + duration)\n    return max(ends[-min(n_places, len(durations)) :] if durations else [])\n"}),
    ("ex03_6", "the_specification", "shortcut", {MAKESPAN: "    return makespan_spec(durations, n_places)\n"}),
    ("ex03_5", "full_items_only", "empty_items_not_merged", {"def counters": """
items_with_tokens = [item for item in items if item[1] < item[2]]
per_row = [sum(item[0] == row for item in items_with_tokens) for row in range(len(lengths))]
n = len(items_with_tokens)
return {
    "launches": (len(items) > 0) + any(k != 1 for k in per_row),
    "programs": len(items) * n_kv_heads,
    "empty_programs": (len(items) - n) * n_kv_heads,
    "waves": len(items) * n_kv_heads / (n_sms * programs_per_sm),
    "cta_per_sm": n * n_kv_heads / n_sms,
    "useful_kv_mib": sum(lengths) * 2 * n_kv_heads * head_dim * bytes_per_number / 2**20,
    "merge_state_mib": n * n_q_heads * (2 + head_dim) * 4 / 2**20,
}
"""}),
    ("ex03_1", "float_share", "float_share", {"def build_queue": """
items = []
for row, length in enumerate(lengths):
    share = -(-length // tile) / n_splits
    for split in range(n_splits):
        begin, end = int(split * share) * tile, int((split + 1) * share) * tile
        if begin < min(end, length):
            items.append((row, begin, min(end, length)))
return items
"""}),
    ("ex03_4", "n_kv_heads", "unwritten", {"def queue_kernel": """
kv_head = tl.program_id(0) % SHAPE.N_KV_HEADS
index = tl.load(order + tl.program_id(0) // SHAPE.N_KV_HEADS)
row = tl.load(items + 3 * index)
begin = tl.load(items + 3 * index + 1)
end = tl.load(items + 3 * index + 2)
query = load_query(q, row, kv_head, SHAPE)
out, lse = attend_tokens(query, cache, row, kv_head, begin, end, qk_scale, SHAPE)
if tl.load(offsets + row + 1) - tl.load(offsets + row) == 1:
    store_state(result, row, kv_head, out, lse, SHAPE, False)
else:
    store_state(partials, index, kv_head, out, lse, SHAPE, True)
"""}),
    ("ex03_2", "cumulative_wrong", "summed_twice", {"def partial_offsets": """
offsets = [0]
for row in range(n_rows):
    offsets.append(offsets[-1] + len({item for item in items if item[0] <= row}))
return offsets
"""}),
    ("ex03_3", "by_begin", "unstable", {"def longest_first": """
return sorted(range(len(items)), key=lambda i: (items[i][1] - items[i][2], -i))
"""}),
    ("ex03_6", "heap_without_pop", "last_listed", {"def makespan": """
import heapq
free = [0] * n_places
heapq.heapify(free)
for d in durations:
    heapq.heappush(free, heapq.heappop(free) + d)
return free[-1]
"""}),
    ("ex03_4", "asks_the_neighbours", "next_in_list", {"def queue_kernel": """
GRID_HEADS: tl.constexpr = SHAPE.N_KV_HEADS * SHAPE.HEAD_BLOCKS  # programs per entry: a KV head each
pid = tl.program_id(0)
kv_head = pid % GRID_HEADS
i = tl.load(order + pid // GRID_HEADS)
row = tl.load(items + 3 * i)
begin, end = tl.load(items + 3 * i + 1), tl.load(items + 3 * i + 2)
query = load_query(q, row, kv_head, SHAPE)
out, lse = attend_tokens(query, cache, row, kv_head, begin, end, qk_scale, SHAPE)
# the neighbours in the list say whether the row has other items
before = tl.load(items + 3 * (i - 1), mask=i > 0, other=-1)
after = tl.load(items + 3 * (i + 1))
if (before == row) | (after == row):
    store_state(partials, i, kv_head, out, lse, SHAPE, True)
else:
    store_state(result, row, kv_head, out, lse, SHAPE, False)
"""}),
    ("ex03_1", "default_list", "kept", {"def build_queue(lengths: list[int], n_splits: int, tile: int) ->": "def build_queue(lengths: list[int], n_splits: int, tile: int, items=[]) ->", "    items = []\n    for row, length in enumerate(lengths):\n        n_tiles": "    for row, length in enumerate(lengths):\n        n_tiles"}),
    ("ex03_5", "counts_items_and_rows", "as_many_as_rows", {"def counters": """
full = [item for item in items if item[2] > item[1]]
programs = len(items) * n_kv_heads
return {
    "launches": int(len(items) > 0) + int(len(items) != len(lengths)),
    "programs": programs,
    "empty_programs": programs - len(full) * n_kv_heads,
    "waves": programs / (n_sms * programs_per_sm),
    "cta_per_sm": len(full) * n_kv_heads / n_sms,
    "useful_kv_mib": sum(lengths) * n_kv_heads * head_dim * 2 * bytes_per_number / 2**20,
    "merge_state_mib": len(full) * n_q_heads * (head_dim + 2) * 4 / 2**20,
}
"""}),
    ("ex03_6", "tick_by_tick", "ticks", {"def makespan": """
# tick by tick
waiting, running, now = list(durations), [], 0
while waiting or running:
    while waiting and len(running) < n_places:
        running.append(waiting.pop(0))
    now += 1
    running = [left - 1 for left in running if left > 1]
return now
"""}),
]  # fmt: skip

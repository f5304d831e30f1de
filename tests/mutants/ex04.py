"""Wrong answers to exercise 04: (task, name, diagnosis, edits)."""

FIRST_OF_SPLIT = "    room = 2 * n_sms // n_kv_heads\n"
SPLIT = (
    FIRST_OF_SPLIT
    + """    longest = max(n_pages, default=0)
    for size in range(max(128 // page_size, 1), longest):
        if sum(max(-(-pages // size), 1) for pages in n_pages) <= room:
            return size
    return None
"""
)
POLICY = """    n_rows = sum(length > 0 for length in lengths)
    if group != 4 or max(lengths, default=0) < 16384:
        return "flashinfer"
    if n_rows <= 1:
        return "length_buckets"
    return "workqueue" if n_rows >= 8 else "flashinfer"
"""
COST = """    bytes_per_us = MEMORY_GB_PER_S * 1000
    kv_bytes = sum(lengths) * n_kv_heads * 2 * head_dim * 2
    merge_bytes = n_items * n_q_heads * (2 + head_dim) * 4
    per_sm = n_items * n_kv_heads / n_sms
    slower = max(1.0, ENOUGH_PER_SM / per_sm) if n_items else 1.0
    return kv_bytes / bytes_per_us * slower + n_launches * LAUNCH_US + merge_bytes / bytes_per_us
"""
FIT = """    relative = features / times[:, None]  # predicted / measured, if all costs were 1
    return torch.linalg.lstsq(relative, torch.ones_like(times)).solution
"""
CHEAPEST = """    able = {stage: time for stage, time in times.items() if math.isfinite(time)}
    if not able:
        return None
    least = min(able.values())
    return next(stage for stage, time in able.items() if time <= (1 + alike) * least)
"""
REGRET = """    regrets = []
    for step, stage in zip(times, chosen):
        least = min(time for time in step.values() if not math.isnan(time))
        regrets.append(step[stage] / least - 1)
    return sum(regrets) / len(regrets) if regrets else 0.0
"""


def body(old: str, new: str) -> dict[str, str]:
    """Another body of a whole function, its lines without their indent."""
    return {old: "".join(f"    {line}\n" for line in new.strip("\n").split("\n"))}


MUTANTS = [
    ("ex04_1", "less_than_room", "one_less", {"for pages in n_pages) <= room": "for pages in n_pages) < room"}),
    ("ex04_1", "one_per_sm", "one_per_sm", {"room = 2 * n_sms // n_kv_heads": "room = n_sms // n_kv_heads"}),
    ("ex04_1", "programs_are_items", "heads_forgotten", {"room = 2 * n_sms // n_kv_heads": "room = 2 * n_sms"}),
    ("ex04_1", "room_rounded", "room_rounded_up", {"room = 2 * n_sms // n_kv_heads": "room = math.ceil(2 * n_sms / n_kv_heads)"}),
    ("ex04_1", "from_one_page", "no_least", {"range(max(128 // page_size, 1), longest)": "range(1, longest)"}),
    ("ex04_1", "128_pages", "least_in_pages", {"range(max(128 // page_size, 1), longest)": "range(128, longest)"}),
    ("ex04_1", "above_128", "more_than_128", {"range(max(128 // page_size, 1), longest)": "range(128 // page_size + 1, longest)"}),
    ("ex04_1", "no_item_for_empty", "empty_is_free", {"sum(max(-(-pages // size), 1) for": "sum(-(-pages // size) for"}),
    ("ex04_1", "whole_splits", "rest_forgotten", {"sum(max(-(-pages // size), 1) for": "sum(max(pages // size, 1) for"}),
    ("ex04_1", "plus_one", "one_too_many", {"sum(max(-(-pages // size), 1) for": "sum(pages // size + 1 for"}),
    ("ex04_1", "no_least_page", "page_over_128", {"range(max(128 // page_size, 1), longest)": "range(128 // page_size, longest)"}),
    ("ex04_1", "no_rows", "no_rows", {"max(n_pages, default=0)\n    for": "max(n_pages)\n    for"}),
    ("ex04_1", "longest_for_none", "not_none", body(SPLIT, """
room = 2 * n_sms // n_kv_heads
size = max(128 // page_size, 1)
longest = max(n_pages, default=0)
while size < longest and sum(max(math.ceil(n / size), 1) for n in n_pages) > room:
    size += 1
return size""")),
    ("ex04_1", "zero_for_none", "not_none", {"            return size\n    return None\n": "            return size\n    return 0\n"}),
    ("ex04_1", "tokens", "in_tokens", {"            return size\n    return None\n": "            return size * page_size\n    return None\n"}),
    ("ex04_1", "all_pages_dealt", "evenly", body(SPLIT, """
items = 2 * n_sms // n_kv_heads
if not items:
    return None
size = max(math.ceil(sum(n_pages) / items), 128 // page_size, 1)
return size if size < max(n_pages, default=0) else None""")),
    ("ex04_1", "same_number_of_items", "equal_shares", body(SPLIT, """
if not n_pages:
    return None
splits = 2 * n_sms // (n_kv_heads * len(n_pages))
if splits < 1:
    return None
size = max(-(-max(n_pages) // splits), 128 // page_size, 1)
return size if size < max(n_pages) else None""")),
    ("ex04_1", "others_whole", "longest_alone", body(SPLIT, """
left = 2 * n_sms // n_kv_heads - (len(n_pages) - 1)
if left < 1 or not n_pages:
    return None
longest = max(n_pages)
size = max((longest + left - 1) // left, 128 // page_size, 1)
return size if size < longest else None""")),
    ("ex04_1", "powers_of_two", "doubled", body(SPLIT, """
size = max(128 // page_size, 1)
while size < max(n_pages, default=0):
    programs = sum(n_kv_heads * max(1, (n + size - 1) // size) for n in n_pages)
    if programs <= 2 * n_sms:
        return size
    size *= 2
return None""")),
    ("ex04_1", "largest_that_fits", "longest", body(SPLIT, """
sizes = range(max(128 // page_size, 1), max(n_pages, default=0))
fitting = [s for s in sizes if sum(max(-(-n // s), 1) for n in n_pages) * n_kv_heads <= 2 * n_sms]
return max(fitting, default=None)""")),
    ("ex04_1", "the_specification", "shortcut", {FIRST_OF_SPLIT: "    return split_pages_spec(n_pages, page_size, n_kv_heads, n_sms)\n"}),
    ("ex04_2", "all_rows", "padding_counts", {"n_rows = sum(length > 0 for length in lengths)": "n_rows = len(lengths)"}),
    ("ex04_2", "up_to_16384", "first_long_out", {"max(lengths, default=0) < 16384": "max(lengths, default=0) <= 16384"}),
    ("ex04_2", "16_thousand", "16000", {"max(lengths, default=0) < 16384": "max(lengths, default=0) < 16000"}),
    ("ex04_2", "above_8", "8_is_few", {"n_rows >= 8 else": "n_rows > 8 else"}),
    ("ex04_2", "all_tokens", "sum", {"max(lengths, default=0) < 16384": "sum(lengths) < 16384"}),
    ("ex04_2", "mean_length", "mean", body(POLICY, """
rows = [n for n in lengths if n > 0]
if not rows or group != 4:
    return "flashinfer"
if sum(rows) / len(rows) < 16384:
    return "flashinfer"
if len(rows) == 1:
    return "length_buckets"
elif len(rows) < 8:
    return "flashinfer"
return "workqueue" """)),
    ("ex04_2", "mean_of_all", "mean_with_padding", {"max(lengths, default=0) < 16384": "sum(lengths) < 16384 * max(len(lengths), 1)"}),
    ("ex04_2", "every_row", "shortest", body(POLICY, """
active = [n for n in lengths if n]
if group == 4 and active and all(n >= 16384 for n in active):
    if len(active) <= 1:
        return "length_buckets"
    if len(active) >= 8:
        return "workqueue"
return "flashinfer" """)),
    ("ex04_2", "row_0", "first_row", {"max(lengths, default=0) < 16384": "(lengths or [0])[0] < 16384"}),
    ("ex04_2", "no_length", "length_ignored", {"if group != 4 or max(lengths, default=0) < 16384:": "if group != 4:"}),
    ("ex04_2", "other_order", "few_first", body(POLICY, """
active = [n for n in lengths if n > 0]
if group != 4:
    return "flashinfer"
if len(active) <= 1:
    return "length_buckets"
if max(active) < 16384:
    return "flashinfer"
if len(active) >= 8:
    return "workqueue"
return "flashinfer" """)),
    ("ex04_2", "any_group", "group_ignored", {"if group != 4 or max": "if max"}),
    ("ex04_2", "below_4", "groups_above", {"if group != 4 or": "if group < 4 or"}),
    ("ex04_2", "above_4", "groups_below", {"if group != 4 or": "if group > 4 or"}),
    ("ex04_2", "queue_from_2", "no_hand_over", {'return "workqueue" if n_rows >= 8 else "flashinfer"': 'return "workqueue"'}),
    ("ex04_2", "buckets_to_7", "buckets_below_8", {'return "workqueue" if n_rows >= 8 else "flashinfer"': 'return "workqueue" if n_rows >= 8 else "length_buckets"'}),
    ("ex04_2", "long_ones", "long_rows", {"sum(length > 0 for length in lengths)\n    if": "sum(length >= 16384 for length in lengths)\n    if"}),
    ("ex04_2", "a_set", "distinct", {"n_rows = sum(length > 0 for length in lengths)": "n_rows = len(set(lengths) - {0})"}),
    ("ex04_2", "other_way", "swapped", body(POLICY, """
n = len(list(filter(None, lengths)))
if group != 4 or n == 0 or max(lengths) < 16384:
    return "flashinfer"
return "workqueue" if n == 1 else "length_buckets" if n >= 8 else "flashinfer" """)),
    ("ex04_2", "no_default", "no_rows", {"max(lengths, default=0) < 16384": "max(lengths) < 16384"}),
    ("ex04_2", "short_name", "other_name", {'        return "length_buckets"\n    return': '        return "buckets"\n    return'}),
    ("ex04_2", "ours", "shortcut", body(POLICY, """
from pkv.stages.s4_adaptive import paper_route
return paper_route(sum(n > 0 for n in lengths), max(lengths, default=0), group)[0]""")),
    ("ex04_3", "in_seconds", "seconds", body(COST, """
beta, lam = MEMORY_GB_PER_S * 1e9, LAUNCH_US * 1e-6
kv = 4 * sum(lengths) * n_kv_heads * head_dim
c = n_items * n_kv_heads / n_sms
t = n_launches * lam + 4 * n_items * n_q_heads * (head_dim + 2) / beta
if n_items:
    t += kv / beta * max(1, ENOUGH_PER_SM / c)
return t""")),
    ("ex04_3", "in_ms", "milliseconds", {"    return kv_bytes / bytes_per_us * slower + n_launches * LAUNCH_US + merge_bytes / bytes_per_us": "    return (kv_bytes / bytes_per_us * slower + n_launches * LAUNCH_US + merge_bytes / bytes_per_us) / 1000"}),
    ("ex04_3", "seconds_and_us", "launches_in_us", {"bytes_per_us = MEMORY_GB_PER_S * 1000": "bytes_per_us = MEMORY_GB_PER_S * 1e9"}),
    ("ex04_3", "ms_and_us", "launches_in_us", {"bytes_per_us = MEMORY_GB_PER_S * 1000": "bytes_per_us = MEMORY_GB_PER_S * 1e6"}),
    ("ex04_3", "bytes_in_ns", "bytes_in_ns", {"bytes_per_us = MEMORY_GB_PER_S * 1000": "bytes_per_us = MEMORY_GB_PER_S"}),
    ("ex04_3", "powers_of_two", "gib", {"bytes_per_us = MEMORY_GB_PER_S * 1000": "bytes_per_us = MEMORY_GB_PER_S * 2**30 / 1e6"}),
    ("ex04_3", "query_heads", "per_query_head", {"sum(lengths) * n_kv_heads * 2": "sum(lengths) * n_q_heads * 2"}),
    ("ex04_3", "no_heads", "one_head", {"sum(lengths) * n_kv_heads * 2": "sum(lengths) * 2"}),
    ("ex04_3", "keys_alone", "k_only", {"n_kv_heads * 2 * head_dim * 2\n": "n_kv_heads * head_dim * 2\n"}),
    ("ex04_3", "fp32_pages", "fp32_kv", {"n_kv_heads * 2 * head_dim * 2\n": "n_kv_heads * 2 * head_dim * 4\n"}),
    ("ex04_3", "elements", "numbers", {"n_kv_heads * 2 * head_dim * 2\n": "n_kv_heads * head_dim\n"}),
    ("ex04_3", "rectangle", "longest", {"kv_bytes = sum(lengths) *": "kv_bytes = len(lengths) * max(lengths, default=0) *"}),
    ("ex04_3", "no_max", "no_floor", {"slower = max(1.0, ENOUGH_PER_SM / per_sm) if n_items else 1.0": "slower = ENOUGH_PER_SM / per_sm if n_items else 1.0"}),
    ("ex04_3", "full_rate", "never_slower", {"slower = max(1.0, ENOUGH_PER_SM / per_sm) if n_items else 1.0": "slower = 1.0"}),
    ("ex04_3", "min_for_max", "min", {"slower = max(1.0, ENOUGH": "slower = min(1.0, ENOUGH"}),
    ("ex04_3", "c_over_4", "inverse", {"max(1.0, ENOUGH_PER_SM / per_sm) if n_items else 1.0": "max(1.0, per_sm / ENOUGH_PER_SM)"}),
    ("ex04_3", "items_per_sm", "heads_not_programs", {"per_sm = n_items * n_kv_heads / n_sms": "per_sm = n_items / n_sms"}),
    ("ex04_3", "all_programs", "not_per_sm", {"per_sm = n_items * n_kv_heads / n_sms": "per_sm = n_items * n_kv_heads"}),
    ("ex04_3", "ceil", "whole_programs", {"per_sm = n_items * n_kv_heads / n_sms": "per_sm = math.ceil(n_items * n_kv_heads / n_sms)"}),
    ("ex04_3", "floor", "whole_programs", {"per_sm = n_items * n_kv_heads / n_sms": "per_sm = n_items * n_kv_heads // n_sms"}),
    ("ex04_3", "factor_rounded", "whole_factor", {"max(1.0, ENOUGH_PER_SM / per_sm) if n_items": "max(1, math.ceil(ENOUGH_PER_SM / per_sm)) if n_items"}),
    ("ex04_3", "rows_are_items", "rows_not_items", {"per_sm = n_items * n_kv_heads / n_sms": "per_sm = len(lengths) * n_kv_heads / n_sms"}),
    ("ex04_3", "query_head_programs", "query_heads", {"per_sm = n_items * n_kv_heads / n_sms": "per_sm = n_items * n_q_heads / n_sms"}),
    ("ex04_3", "all_bytes_slower", "slow_merge", body(COST, """
read = 2 * 2 * head_dim * n_kv_heads * sum(lengths)
states = 4 * (head_dim + 2) * n_q_heads * n_items
us = (read + states) / (MEMORY_GB_PER_S * 1e3)
if n_items * n_kv_heads < ENOUGH_PER_SM * n_sms and n_items > 0:
    us = us * ENOUGH_PER_SM * n_sms / (n_items * n_kv_heads)
return us + LAUNCH_US * n_launches""")),
    ("ex04_3", "everything_slower", "slow_launches", {"bytes_per_us * slower + n_launches * LAUNCH_US +": "bytes_per_us * slower + n_launches * LAUNCH_US * slower +"}),
    ("ex04_3", "no_states", "no_merge", {" + merge_bytes / bytes_per_us": ""}),
    ("ex04_3", "half_states", "fp16_states", {"(2 + head_dim) * 4": "(2 + head_dim) * 2"}),
    ("ex04_3", "written_and_read", "both_ways", {"(2 + head_dim) * 4": "(2 + head_dim) * 4 * 2"}),
    ("ex04_3", "only_acc", "out_alone", {"(2 + head_dim) * 4": "head_dim * 4"}),
    ("ex04_3", "lse", "out_and_lse", {"(2 + head_dim) * 4": "(1 + head_dim) * 4"}),
    ("ex04_3", "kv_head_states", "states_of_kv_heads", {"merge_bytes = n_items * n_q_heads": "merge_bytes = n_items * n_kv_heads"}),
    ("ex04_3", "item_states", "one_state", {"merge_bytes = n_items * n_q_heads": "merge_bytes = n_items"}),
    ("ex04_3", "free_launches", "no_launches", {"* slower + n_launches * LAUNCH_US": "* slower"}),
    ("ex04_3", "decode_and_merge", "two_launches", {"* slower + n_launches * LAUNCH_US": "* slower + 2 * LAUNCH_US"}),
    ("ex04_3", "lambda_once", "one_launch", {"* slower + n_launches * LAUNCH_US": "* slower + LAUNCH_US"}),
    ("ex04_3", "overlapped", "max_of_terms", {"return kv_bytes / bytes_per_us * slower + n_launches * LAUNCH_US + merge_bytes / bytes_per_us": "return max(kv_bytes / bytes_per_us * slower, n_launches * LAUNCH_US, merge_bytes / bytes_per_us)"}),
    ("ex04_3", "divides_by_c", "no_items", {"max(1.0, ENOUGH_PER_SM / per_sm) if n_items else 1.0": "max(1.0, ENOUGH_PER_SM / per_sm)"}),
    ("ex04_4", "absolute", "absolute", body(FIT, "return torch.linalg.lstsq(features, times).solution")),
    ("ex04_4", "normal_equations_of_absolute", "absolute", body(FIT, """
return torch.linalg.inv(features.T @ features) @ features.T @ times""")),
    ("ex04_4", "weights_not_squared", "half_way", body(FIT, """
weights = torch.diag(1 / times)
return torch.linalg.solve(features.T @ weights @ features, features.T @ weights @ times)""")),
    ("ex04_4", "weights_twice", "squared", body(FIT, """
w = times**-2
return torch.linalg.lstsq(w[:, None] * features, w * times).solution""")),
    ("ex04_4", "times_times", "times_time", {"features / times[:, None]": "features * times[:, None]", "torch.ones_like(times)": "times**2"}),
    ("ex04_4", "right_side_left", "features_alone", {"torch.ones_like(times)": "times"}),
    ("ex04_4", "left_side_left", "times_alone", {"features / times[:, None]": "features"}),
    ("ex04_4", "powers", "logarithms", body(FIT, "return torch.linalg.lstsq(features.log(), times.log()).solution")),
    ("ex04_4", "as_the_library_does", "log_ratios", body(FIT, """
costs = torch.linalg.lstsq(features / times[:, None], torch.ones_like(times)).solution
for _ in range(100):  # Gauss and Newton
    guess = features @ costs
    slopes = features / guess[:, None]
    costs = costs + torch.linalg.solve(slopes.T @ slopes, slopes.T @ (times / guess).log())
return costs""")),
    ("ex04_4", "each_alone", "one_by_one", body(FIT, """
relative = features / times[:, None]
return relative.sum(0) / relative.square().sum(0)""")),
    ("ex04_4", "intercept", "constant", body(FIT, """
features = torch.cat([features, torch.ones_like(features[:, :1])], dim=1)
return torch.linalg.lstsq(features / times[:, None], torch.ones_like(times)).solution[:-1]""")),
    ("ex04_4", "relative_intercept", "constant", body(FIT, """
one = torch.ones_like(times)
return torch.linalg.lstsq(torch.column_stack([features / times[:, None], one]), one).solution[:-1]""")),
    ("ex04_4", "relu", "clamped", {"torch.ones_like(times)).solution": "torch.ones_like(times)).solution.relu()"}),
    ("ex04_4", "not_below_0", "clamped", body(FIT, """
costs = torch.zeros_like(features[0])
relative = features / times[:, None]
for _ in range(20000):  # one cost at a time, kept above 0
    old = costs.clone()
    for i, column in enumerate(relative.T):
        rest = 1 - relative @ costs + column * costs[i]
        costs[i] = (column @ rest / (column @ column)).clamp(min=0)
    if (costs - old).abs().max() < 1e-12:
        break
return costs""")),
    ("ex04_4", "turned", "shapes", {"torch.linalg.lstsq(relative, ": "torch.linalg.lstsq(relative.T, "}),
    ("ex04_4", "all_of_it", "whole_result", {"torch.ones_like(times)).solution": "torch.ones_like(times))"}),
    ("ex04_4", "first_steps", "some_steps", body(FIT, "n = features.shape[1]\nreturn torch.linalg.solve(features[:n], times[:n])")),
    ("ex04_4", "mean_of_ratios", "one_by_one", body(FIT, "return (times[:, None] / features).mean(0)")),
    ("ex04_4", "the_specification", "shortcut", body(FIT, "return fit_costs_spec(features, times)")),
    ("ex04_5", "only_the_least", "least_alone", body(CHEAPEST, """
able = [s for s in times if math.isfinite(times[s])]
return min(able, key=times.get) if able else None""")),
    ("ex04_5", "plus", "added", {"time <= (1 + alike) * least)\n": "time <= alike + least)\n"}),
    ("ex04_5", "per_cent", "percent", {"time <= (1 + alike) * least)\n": "time <= (1 + alike / 100) * least)\n"}),
    ("ex04_5", "of_the_other", "of_its_own", {"time <= (1 + alike) * least)\n": "(time - least) / time <= alike)\n"}),
    ("ex04_5", "below", "strict", {"time <= (1 + alike) * least)\n": "time < (1 + alike) * least or time == least)\n"}),
    ("ex04_5", "no_break", "last", body(CHEAPEST, """
able = [t for t in times.values() if math.isfinite(t)]
best = None
for stage, t in times.items():
    if math.isfinite(t) and t <= min(able) * (1 + alike):
        best = stage
return best""")),
    ("ex04_5", "sorted_names", "by_name", {"for stage, time in able.items() if time <=": "for stage, time in sorted(able.items()) if time <="}),
    ("ex04_5", "most_of_alike", "slowest", body(CHEAPEST, """
able = {s: t for s, t in times.items() if not (math.isnan(t) or math.isinf(t))}
if len(able) == 0:
    return None
limit = min(able.values()) * (1 + alike)
return max((s for s in able if able[s] <= limit), key=lambda s: able[s])""")),
    ("ex04_5", "favourite_or_least", "first_or_least", body(CHEAPEST, """
able = {s: t for s, t in times.items() if math.isfinite(t)}
if not able:
    return None
favourite, best = next(iter(able)), min(able, key=able.get)
return favourite if able[favourite] <= (1 + alike) * able[best] else best""")),
    ("ex04_5", "champion", "in_passing", body(CHEAPEST, """
winner, least = None, math.inf
for stage, time in times.items():
    if not math.isnan(time) and time * (1 + alike) < least:
        winner, least = stage, time
return winner""")),
    ("ex04_5", "favourite", "first", body(CHEAPEST, "return list(times)[0] if times else None")),
    ("ex04_5", "favourite_that_can", "first", body(CHEAPEST, """
for stage in times:
    if math.isfinite(times[stage]):
        return stage
return None""")),
    ("ex04_5", "largest", "dearest", body(CHEAPEST, """
able = {s: t for s, t in times.items() if math.isfinite(t)}
return max(able, key=able.get) if able else None""")),
    ("ex04_5", "inf_is_a_time", "inf_taken", {"if math.isfinite(time)}\n": "if not math.isnan(time)}\n"}),
    ("ex04_5", "nan_is_a_time", "nan", body(CHEAPEST, """
times = {stage: time for stage, time in times.items() if time != math.inf}
least = min(times.values(), default=0)
return next((stage for stage, time in times.items() if time <= (1 + alike) * least), None)""")),
    ("ex04_5", "some_can_run", "none_able", {"    if not able:\n        return None\n": ""}),
    ("ex04_5", "the_time", "time", body(CHEAPEST, """
able = [t for t in times.values() if math.isfinite(t)]
return next((t for t in able if t <= (1 + alike) * min(able)), 0.0)""")),
    ("ex04_5", "the_specification", "shortcut", body(CHEAPEST, "spec = cheapest_spec\nreturn spec(times, alike)")),
    ("ex04_6", "of_sums", "totals", body(REGRET, """
taken = sum(step[stage] for step, stage in zip(times, chosen))
best = sum(min(t for t in step.values() if t == t) for step in times)
return taken / best - 1 if times else 0.0""")),
    ("ex04_6", "means_of_both", "totals", body(REGRET, """
if not times:
    return 0.0
taken = statistics.fmean([step[s] for step, s in zip(times, chosen)])
return taken / statistics.fmean([min(t for t in step.values() if not math.isnan(t)) for step in times]) - 1""")),
    ("ex04_6", "best_stage", "fixed_best", body(REGRET, """
if len(times) == 0:
    return 0.0
always = {}
for name in {name for step in times for name in step}:
    whole = sum(step.get(name, math.nan) for step in times)
    if whole == whole:
        always[name] = whole
best = min(sorted(always), key=always.get)
return sum(step[name] / step[best] - 1 for step, name in zip(times, chosen)) / len(times)""")),
    ("ex04_6", "no_minus_1", "ratio", {"regrets.append(step[stage] / least - 1)": "regrets.append(step[stage] / least)"}),
    ("ex04_6", "per_cent", "percent", {"regrets.append(step[stage] / least - 1)": "regrets.append(100 * (step[stage] / least - 1))"}),
    ("ex04_6", "of_what_was_taken", "of_the_taken", {"regrets.append(step[stage] / least - 1)": "regrets.append((step[stage] - least) / step[stage])"}),
    ("ex04_6", "other_way_round", "upside_down", {"regrets.append(step[stage] / least - 1)": "regrets.append(least / step[stage] - 1)"}),
    ("ex04_6", "us", "difference", {"regrets.append(step[stage] / least - 1)": "regrets.append(step[stage] - least)"}),
    ("ex04_6", "sum", "sum", {"return sum(regrets) / len(regrets) if regrets else 0.0": "return sum(regrets)"}),
    ("ex04_6", "worst", "worst", {"return sum(regrets) / len(regrets) if regrets else 0.0": "return max(regrets, default=0.0)"}),
    ("ex04_6", "median", "median", {"return sum(regrets) / len(regrets) if regrets else 0.0": "return statistics.median(regrets) if regrets else 0.0"}),
    ("ex04_6", "geometric", "geometric", body(REGRET, """
logs = [math.log(step[s] / min(t for t in step.values() if not math.isnan(t))) for step, s in zip(times, chosen)]
return math.exp(sum(logs) / len(logs)) - 1 if logs else 0.0""")),
    ("ex04_6", "share_of_wrong", "wrong_choices", body(REGRET, """
wrong = [step[s] > min(t for t in step.values() if not math.isnan(t)) for step, s in zip(times, chosen)]
return sum(wrong) / len(wrong) if wrong else 0.0""")),
    ("ex04_6", "right_ones_left_out", "only_wrong", {"    return sum(regrets) / len(regrets)": "    regrets = [r for r in regrets if r]\n    return sum(regrets) / len(regrets)"}),
    ("ex04_6", "against_the_mean", "mean_of_all", {"least = min(time for time in step.values() if not math.isnan(time))": "least = statistics.fmean(time for time in step.values() if not math.isnan(time))"}),
    ("ex04_6", "nan_first", "nan", {"least = min(time for time in step.values() if not math.isnan(time))": "least = min(step.values())"}),
    ("ex04_6", "all_stages", "missing", body(REGRET, """
names = {name for step in times for name in step} | {"workqueue", "flashinfer"}
total = 0.0
for step, stage in zip(times, chosen):
    total += step[stage] / min(step[name] for name in names if not math.isnan(step[name])) - 1
return total / len(times) if times else 0.0""")),
    ("ex04_6", "divides_by_0_steps", "no_steps", {"return sum(regrets) / len(regrets) if regrets else 0.0": "return sum(regrets) / len(regrets)"}),
    ("ex04_6", "others_alone", "others_alone", {"least = min(time for time in step.values() if not math.isnan(time))": "least = min([t for s, t in step.items() if t == t and s != stage] or [step[stage]])"}),
    ("ex04_6", "the_specification", "shortcut", body(REGRET, "return regret_spec(times, chosen)")),
    ("ex04_6", "others_only", "others_alone", {"def regret": """
lost = []
for step, stage in zip(times, chosen):
    others = [t for s, t in step.items() if s != stage and not math.isnan(t)]
    lost.append(step[stage] / min(others) - 1)
return statistics.fmean(lost) if lost else 0.0
"""}),
    ("ex04_4", "pinv", "little_dropped", {"def fit_costs": """
return torch.linalg.pinv(features / times[:, None], rtol=1e-3) @ torch.ones_like(times)
"""}),
    ("ex04_5", "falsy", "zero", {"def cheapest": """
able = {s: t for s, t in times.items() if t and math.isfinite(t)}
if not able:
    return None
least = min(able.values())
return next(s for s, t in able.items() if t <= (1 + alike) * least)
"""}),
    ("ex04_5", "ratio", "zero", {"def cheapest": """
able = {s: t for s, t in times.items() if math.isfinite(t)}
if not able:
    return None
least = min(able.values())
return next(s for s, t in able.items() if t / least <= 1 + alike)
"""}),
    ("ex04_4", "lstsq_rcond", "little_dropped", {"def fit_costs": """
relative = features / times[:, None]
u, s, vh = torch.linalg.svd(relative, full_matrices=False)
inverse = torch.where(s > 1e-2 * s[0], 1 / s, 0.0)
return vh.T @ (inverse * (u.T @ torch.ones_like(times)))
"""}),
    ("ex04_1", "ceil_pages_128", "not_none", {"def split_pages": """
room = 2 * n_sms // n_kv_heads
for size in range(max(-(-128 // page_size), 1), max(n_pages, default=0) + 1):
    if sum(max(-(-p // size), 1) for p in n_pages) <= room:
        return size
return None
"""}),
    ("ex04_2", "max_of_count", None, {"def paper_policy": """
if group != 4:
    return "flashinfer"
rows = [n for n in lengths if n >= 1]
if len(rows) == 1 and rows[0] >= 16384:
    return "length_buckets"
if len(rows) >= 8 and max(rows) > 16384:
    return "workqueue"
return "flashinfer"
"""}),
    ("ex04_3", "c_with_waves", "c_at_least_1", {"def paper_cost": """
bytes_per_us = MEMORY_GB_PER_S * 1000
kv = sum(lengths) * n_kv_heads * head_dim * 4
states = n_items * n_q_heads * (head_dim + 2) * 4
C = n_items * n_kv_heads / n_sms
slow = max(1, ENOUGH_PER_SM / max(C, 1))
return kv / bytes_per_us * slow + n_launches * LAUNCH_US + states / bytes_per_us
"""}),
    ("ex04_6", "best_of_first", "first_best", {"def regret": """
if not times:
    return 0.0
total = 0.0
for step, stage in zip(times, chosen):
    best = min(times[0][s] for s in times[0] if times[0][s] == times[0][s])
    total += step[stage] / best - 1
return total / len(times)
"""}),
    ("ex04_4", "ridge", "damped", {"def fit_costs": """
# a tiny ridge, so that the matrix can always be solved
a = features / times[:, None]
n = a.shape[1]
return torch.linalg.solve(a.T @ a + 1e-6 * torch.eye(n, dtype=a.dtype), a.T @ torch.ones(len(a), dtype=a.dtype))
"""}),
    ("ex04_4", "pinv_of_little", "little_dropped", {"def fit_costs": """
a = features / times[:, None]
return torch.linalg.pinv(a, rtol=1e-3) @ torch.ones(len(a), dtype=a.dtype)
"""}),
    ("ex04_6", "stages_of_step_0", "first_stages", {"def regret": """
if not times:
    return 0.0
stages = list(times[0])
total = 0.0
for step, stage in zip(times, chosen):
    known = [step[s] for s in stages if s in step and step[s] == step[s]]
    total += step[stage] / min([*known, step[stage]]) - 1
return total / len(times)
"""}),
]  # fmt: skip

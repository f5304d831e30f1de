"""What grows and what is shared: a layer's cost as more layers share a plan, planning and memory as rows are added.

A plan of 300 us and 90 us of GPU time a layer: 390 us in a model of one layer, 127.5 with 8, 94 with 80.
"""

from collections.abc import Mapping, Sequence

from pkv.viz.resultscales import draw_curves, points_of, room_for, some, times_in_words, us_in_words
from pkv.viz.svg import WIDTH, Picture, Sheet
from pkv.wording.counts import count_of

LEFT = 62
OWN, FLAT = "stream_k", 1.05
LEAST_US, LEAST_BYTES = 1.0, 1024.0  # below, a clock and an allocator say little


def draw_layers(costs: Mapping[str, Sequence[tuple[float, float]]], note: str = "", most: int | None = None) -> Picture:
    """What a layer costs when the step's plan serves all layers: {engine: [(layers, us a layer)]}.

    The title is about all engines. most: how many have a curve, of more than that the cheapest with many layers, and
    those that the title names.
    """
    checked = {engine: points_of(f"costs[{engine!r}]", points) for engine, points in some("costs", costs).items()}
    title, named = layers_claim(checked)
    notes = ["us a layer, with its share of the plan that the host makes once a step."]
    shown = checked
    if most is not None and len(checked) > most:
        cheapest = sorted(checked, key=lambda engine: (engine not in named, checked[engine][-1][1]))[:most]
        shown = {engine: checked[engine] for engine in sorted(cheapest, key=lambda engine: checked[engine][-1][1])}
        many = count_of(int(max(points[-1][0] for points in checked.values())), "layer")
        notes += [
            f"{len(shown)} of {count_of(len(checked), 'engine')}: the cheapest with {many}, and those named above."
        ]
    notes += [note] if note else []
    sheet = Sheet()
    sheet.heading(title, [" ".join(notes)])
    place = (LEFT, WIDTH - room_for(list(shown)), 300.0)
    counts = sorted({x for points in shown.values() for x, _ in points})
    draw_curves(sheet, shown, place, ("layers that share the plan", "us a layer"), ticks=counts)
    words = "; ".join(
        f"{engine}: " + ", ".join(f"{us_in_words(y)} with {x:g}" for x, y in points) for engine, points in shown.items()
    )
    return sheet.finish(f"{title}. {' '.join(notes)} {words}.")


def layers_claim(costs: Mapping[str, Sequence[tuple[float, float]]]) -> tuple[str, set[str]]:
    """Which engine is the cheapest with few layers and with many, and whose cost falls the most; the engines named."""
    first, last = ({engine: points[end] for engine, points in costs.items()} for end in (0, -1))
    few, many = (min(found, key=lambda engine: found[engine][1]) for found in (first, last))
    n_few, n_many = first[few][0], last[many][0]
    if few == many:
        head = f"{few} is the cheapest with {count_of(int(n_few), 'layer')} and with {n_many:,g}"
    else:
        head = f"{few} is the cheapest with {count_of(int(n_few), 'layer')}, {many} with {n_many:,g}"
    falls = {engine: first[engine][1] / last[engine][1] for engine in costs}
    most = max(falls, key=lambda engine: falls[engine])
    if falls[most] < 1.05:
        return head, {few, many}
    more = f"with {n_few:,g} {most} costs {times_in_words(falls[most])} as much as with {n_many:,g}"
    return f"{head}; {more}", {few, many, most}


def draw_growth(
    plan_us: Mapping[str, Sequence[tuple[float, float]]],
    workspace: Mapping[str, Sequence[tuple[float, float]]],
    note: str = "",
    wall_us: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> Picture:
    """How planning on the host and memory grow: {engine: [(rows, us)]} and {engine: [(rows, bytes)]}, 0 for none.

    wall_us: the same for a step of one layer from idle to idle, where it is known.
    """
    plans = _floored("plan_us", plan_us, LEAST_US)
    sizes = _floored("workspace", workspace, LEAST_BYTES)
    walls = _floored("wall_us", wall_us, LEAST_US) if wall_us else {}
    title = growth_claim(plans, sizes)
    notes = ["Lowest: 1 us or less, and 1 KiB or less."]
    notes += [note] if note else []
    sheet = Sheet()
    sheet.heading(title, [" ".join(notes)])
    order = dict.fromkeys([*plans, *sizes])  # the same engine, the same mark
    rows = [2.0**power for power in range(0, 21, 2)]
    planes = [(plans, "host plans a step, us")]
    if walls:
        planes.append((walls, "plan and one layer, from idle to idle, us"))
    planes.append((sizes, "memory beside q, cache and result, KiB"))
    for curves, name in planes:
        scaled = {engine: curves.get(engine, []) for engine in order}
        if name.endswith("KiB"):
            scaled = {engine: [(x, y / 1024) for x, y in points] for engine, points in scaled.items()}
        place = (LEFT, WIDTH - room_for(list(order)), 230.0)
        draw_curves(sheet, scaled, place, ("rows", name), ticks=rows)
        sheet.y += 10
    ends = {engine: [points[0], *points[1:][-1:]] for engine, points in plans.items()}
    words = "; ".join(
        f"{engine}: " + ", ".join(f"{us_in_words(y)} for {count_of(int(x), 'row')}" for x, y in points)
        for engine, points in ends.items()
    )
    return sheet.finish(f"{title}. {' '.join(notes)} Plans: {words}.")


def growth_claim(
    plans: Mapping[str, Sequence[tuple[float, float]]], sizes: Mapping[str, Sequence[tuple[float, float]]]
) -> str:
    """Who plans longest for the most rows, and who the least; of stream_k, where it is there, also what it needs."""
    most_rows = max(x for points in plans.values() for x, _ in points)
    there = {engine: points[-1][1] for engine, points in plans.items() if points[-1][0] == most_rows}
    long, short = max(there, key=lambda engine: there[engine]), min(there, key=lambda engine: there[engine])
    head = f"At {count_of(int(most_rows), 'row')} the host plans {us_in_words(there[long])} for {long}"
    if len(there) == 1:
        return head
    short = OWN if OWN in there else short
    least = "1 us or less" if there[short] <= LEAST_US else us_in_words(there[short])
    found = [size for _, size in sizes.get(short, ())] if short == OWN else []
    if not found:
        return f"{head}, and {least} for {short}"
    grown = found[-1] / found[0]  # between, torch may hand out a larger block that it has
    memory = "does not grow" if grown < FLAT else f"grows {times_in_words(grown)}"
    return f"{head}, and {least} for {short}, whose memory {memory}"


def _floored(
    name: str, curves: Mapping[str, Sequence[tuple[float, float]]], least: float
) -> dict[str, list[tuple[float, float]]]:
    """The curves, checked, with `least` where they are lower: a logarithm has no place for 0."""
    return {
        engine: points_of(f"{name}[{engine!r}]", [(x, max(y, least) if y >= 0 else y) for x, y in points])
        for engine, points in some(name, curves).items()
    }

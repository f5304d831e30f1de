"""One thing, two things: what is counted in a sentence has the noun and the verb of its number."""

import dataclasses
import re

import pytest
import torch
from cases import SMALL_CARD, Case, batch

import pkv
from pkv.commands.steps import note_of
from pkv.viz.pages import draw_pages
from pkv.viz.plandrawing import draw_plan
from pkv.viz.programs import draw_programs
from pkv.viz.queue import draw_queue
from pkv.viz.rectangles import draw_rectangle
from pkv.viz.runs import draw_runs
from pkv.viz.schedules import runs_of
from pkv.wording.counts import count_of, verb, with_s

WORDS = [
    "row",
    "token",
    "page",
    "item",
    "split",
    "program",
    "launch",
    "state",
    "entry",
    "column",
    "load",
    "step",
    "request",
    "stage",
    "result",
    "unit",
    "slot",
    "SM",
    "layer",
    "lesson",
    "exercise",
    "head",
    "tile",
    "run",
    "time",
    "value",
    "cell",
    "part",
    "bit",
]
OF = r"(?:(?:more|query|KV|partial) )?"
ONE_AS_MANY = re.compile(rf"(?<![\d.,])1 {OF}(?:{'|'.join(map(with_s, WORDS))})\b")
TWO_AS_ONE = re.compile(rf"(?<![\d.,])2 {OF}(?:{'|'.join(WORDS)})\b(?! of)")
ONE_DOES = re.compile(
    rf"(?<![\d.,of ])1 {OF}(?:{'|'.join(WORDS)}) (?:are|have|were|need|become|cross|hold|share|get|find)\b"
)


@pytest.mark.parametrize(
    ("plural", "singular"),
    [
        ("cross", "crosses"), ("reach", "reaches"), ("fix", "fixes"), ("push", "pushes"), ("carry", "carries"),
        ("stay", "stays"), ("become", "becomes"), ("hold", "holds"), ("are", "is"), ("have", "has"), ("were", "was"),
    ],
)  # fmt: skip
def test_a_verb_has_its_s_with_one_thing_only(plural, singular):
    assert [verb(n, plural) for n in (0, 1, 2, 1000)] == [plural, singular, plural, plural]


@pytest.mark.parametrize(
    ("word", "many"),
    [
        ("row", "rows"),
        ("entry", "entries"),
        ("day", "days"),
        ("launch", "launches"),
        ("loss", "losses"),
        ("box", "boxes"),
    ],
)
def test_a_noun_has_its_s_but_with_one(word, many):
    assert [count_of(n, word) for n in (0, 1, 2, 1000)] == [f"0 {many}", f"1 {word}", f"2 {many}", f"1,000 {many}"]


def words_of(picture):
    """What a drawing says: its alternative text, and the text in it."""
    return f"{picture.alt}\n" + re.sub(r"<[^>]*>", "\n", str(picture.svg))


def texts_about(n):
    """Plans, drawings, simulations and caches of n rows, n heads, n tokens, on a card of n SMs."""
    card = dataclasses.replace(SMALL_CARD, n_sms=n)
    shape = pkv.Shape(n, n, 64, 16, "float16")
    yield str(shape)
    for length in (n, 16 * n, 40):
        for stage in pkv.STAGES:
            plan = pkv.plan([length] * n, shape, stage, gpu=card)
            yield str(plan)
            yield str(plan.counters)
            if plan.launches and stage != "reference":
                yield from map(words_of, (draw_plan(plan), draw_programs(plan)))
                yield str(pkv.simulate(plan, card))
                yield words_of(draw_runs(plan))
        yield words_of(draw_queue(pkv.plan([length] * n, shape, "workqueue", splits=n, gpu=card)))
    yield words_of(draw_rectangle([pkv.plan([40] * n, shape, "row_local", splits=n, gpu=card)]))
    for rows in (n, 4):
        yield words_of(runs_of(rows, 64, "equal", n, "stream_k")[0])
    _, cache = batch(Case("counted", [n] * n, n_q_heads=n, n_kv_heads=n), spare_pages=0)
    yield from (repr(cache), str(cache), words_of(draw_pages(cache)))
    yield note_of(n, 0, n)


def errors_about(n):
    """What is refused about n rows, n heads, n pages."""
    x = torch.zeros(n, n, n, 16, dtype=torch.float16)
    cache = pkv.PagedKVCache.from_dense(x, x, [n] * n, n_pages=n, max_rows=n, max_pages=1, page_size=n)
    wider = pkv.PagedKVCache.from_dense(*[x.repeat(1, 1, n + 1, 1)[:, :, : n + 1]] * 2, [n] * n, page_size=n)
    full = pkv.Shape(n, n, 16, n, "float16")
    for refused in (
        lambda: cache.append(x[:, 0], x[:, 0]),
        lambda: pkv.PagedKVCache.from_dense(x, x, [n] * n, n_pages=0, page_size=n),
        lambda: pkv.decode(torch.zeros(n, n, 16, dtype=torch.float16), wider),
        lambda: pkv.decode(torch.zeros(n + 1, n, 16, dtype=torch.float16), cache),
        lambda: pkv.run(torch.zeros(n, n, 16, dtype=torch.float16), cache, pkv.plan([n] * (n + 1), full)),
        lambda: pkv.run(torch.zeros(n, n, 16, dtype=torch.float16), cache, pkv.plan([n + 1] * n, full)),
    ):
        with pytest.raises(ValueError, match=r"\d") as caught:
            refused()
        yield str(caught.value)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("texts", [texts_about, errors_about])
def test_of_one_thing_and_of_two_is_spoken_rightly(texts, n):
    said = list(texts(n))
    for text in said:
        for wrong in (ONE_AS_MANY, TWO_AS_ONE, ONE_DOES):
            assert not (found := wrong.search(text)), f"{found[0]!r} in {text[:2000]}"
    assert any(f"{n} " in text for text in said)


def test_one_run_crosses_rows():
    assert runs_of(4, 64, "equal", 1, "stream_k")[0].alt.startswith("stream_k: 1 run of 32 units crosses 4 rows")

"""What cannot be drawn is refused in words that name it, and what can be drawn is counted and worded right."""

import base64
import math
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch
from drawings import cache_of, rects, texts

import pkv
from pkv import viz
from pkv.viz import plots, widgets
from pkv.viz.svg import Picture

PARTS = [viz.Part(0, 4, 1.5, math.log(4)), viz.Part(4, 10, 6.5, math.log(6))]
NO_TOKENS = [viz.Part(3, 3, math.nan, -math.inf)]
SHAPE = pkv.Shape(32, 8, 128, 16, "float16")
SINGLE = pkv.Shape(1, 1, 64, 16, "float16")


def by_hand(lengths, table, page_size=4, n_pages=8):
    pages = torch.zeros(n_pages, page_size, 1, 16)
    return pkv.PagedKVCache(pages, pages, *(torch.tensor(x, dtype=torch.int32) for x in (table, lengths)))


def forked(length, page_size):
    cache = cache_of([length], page_size, n_pages=8, max_rows=2)
    cache.fork(0)
    return cache


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (forked(17, 16), "2 rows share pages: 3 pages of 16 hold 34 tokens in 18 slots, 30 slots of 48 unused."),
        (forked(16, 16), "2 rows share pages: 1 page of 16 holds 32 tokens in 16 slots, 0 slots of 16 unused."),
        (forked(3, 4), "2 rows, 6 tokens: 2 of 8 pages hold them, 2 slots of 8 unused."),
        (by_hand([2, 3], [[5], [5]]), "2 rows share pages: 1 page of 4 holds 5 tokens in 3 slots, 1 slot of 4 unused."),
        (by_hand([7], [[2, 2]]), "1 row shares pages: 1 page of 4 holds 7 tokens in 4 slots, 0 slots of 4 unused."),
        (by_hand([1], [[2]]), "1 row, 1 token: 1 of 8 pages holds them, 3 slots of 4 unused."),
        (by_hand([0], [[2]]), "1 row, 0 tokens: 0 of 8 pages hold them, 0 slots of 0 unused."),
    ],
)
def test_pages_and_slots_count_once_however_many_rows_share_them(cache, words):
    picture = viz.draw_pages(cache)
    assert picture.alt.startswith(words)
    unused = int(re.search(r"(\d+) slots? of", words)[1])
    if cache.page_size == 4:
        assert len(rects(picture.svg, fill="url(#unused)")) == unused


def test_one_entry_is_no_entries():
    assert "1 row x 1 column = 1 entry, 1 of them used." in viz.draw_pages(by_hand([1], [[2]])).alt


@pytest.mark.parametrize("row", [0, 1])
def test_the_slot_of_a_shared_page_is_framed_for_either_row(row):
    cache = cache_of([8], n_pages=4, max_rows=2)
    cache.fork(0)
    assert len(rects(viz.draw_pages(cache, (row, 5)).svg, fill="none")) == 2, "the logical page and the slot"


def test_the_slot_of_a_large_page_is_framed_too():
    assert len(rects(viz.draw_pages(cache_of([100], 64), (0, 70)).svg, fill="none")) == 2


def test_a_token_that_is_not_drawn_is_not_called_bold():
    cache = cache_of([4] * 40)
    assert "Bold: token 3 of row 39" not in viz.draw_pages(cache, (39, 3)).alt
    assert "Not drawn: token 3 of row 39 lies in page" in viz.draw_pages(cache, (39, 3)).alt
    assert "Bold: token 3 of row 0" in viz.draw_pages(cache, (0, 3)).alt


@pytest.mark.parametrize(
    ("highlight", "words"),
    [
        ((0, 5), "token 5 is outside [0, 5), the tokens of row 0"),
        ((0, 20), "token 20 is outside [0, 5), the tokens of row 0"),
        ((0, 2000), "token 2000 is outside [0, 5)"),
        ((0, -1), "token -1 is outside [0, 5)"),
        ((1, 0), "token 0 is outside [0, 0), the tokens of row 1"),
        ((-1, 0), "row -1 is outside [0, 2), the rows of this cache"),
        ((9, 0), "row 9 is outside [0, 2), the rows of this cache"),
        ((0,), "highlight = (0,) must be (row, token)"),
        ((), "highlight = () must be (row, token)"),
        ((0, 1.5), "highlight = (0, 1.5) must be (row, token)"),
        (3, "highlight = 3 must be (row, token)"),
    ],
)
def test_a_highlight_outside_the_cache_is_refused(highlight, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        viz.draw_pages(cache_of([5, 0]), highlight)


@pytest.mark.parametrize(
    ("lengths", "table", "words"),
    [
        ([-3], [[0, 1]], "lengths[0] = -3"),
        ([9], [[0, 1]], "lengths[0] = 9"),
        ([5], [[0, 8]], "block_table[0, 1] = 8 is outside the pool"),
        ([5], [[0, -1]], "block_table[0, 1] = -1 is outside the pool"),
    ],
)
def test_an_invalid_cache_is_refused(lengths, table, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        viz.draw_pages(by_hand(lengths, table))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([], [(0, 1)]), "parts hold no token: pass at least one"),
        ((NO_TOKENS, [(0,)]), "parts hold no token: pass at least one"),
        ((PARTS, [(0, 1)], "mean"), "way = 'mean' must be one of 'exact merge', 'average of the outs'"),
        ((PARTS, []), "orders = [] must hold one or more orders of all parts, such as [(0, 1)]"),
        ((PARTS, [(0,)]), "orders = [[0]] must"),
        ((PARTS, [(0, 0)]), "orders = [[0, 0]] must"),
        ((PARTS, [(0, 1, 2)]), "orders = [[0, 1, 2]] must"),
        ((PARTS, [(0, -1)]), "orders = [[0, -1]] must"),
        ((PARTS, [(0, 1)], "exact merge", 0), "n_steps = 0 must lie in 1 .. 2"),
        ((PARTS, [(0, 1)], "exact merge", 3), "n_steps = 3 must lie in 1 .. 2"),
        (([viz.Part(4, 2, 0.0, 0.0)], [(0,)]), "parts[0] has the tokens 4:2"),
        (([viz.Part(-4, 2, 0.0, 0.0)], [(0,)]), "parts[0] has the tokens -4:2"),
        (([*PARTS, viz.Part(9, 12, 0.0, 0.0)], [(0, 1, 2)]), "parts 4:10 and 9:12 share a token"),
    ],
)
def test_a_merge_that_makes_no_sense_is_refused(arguments, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        viz.draw_merge(*arguments)


@pytest.mark.parametrize("order", [(), (2,), (-1,), (0, 0)])
def test_steps_in_an_order_of_no_parts_are_refused(order):
    with pytest.raises(ValueError, match="must name one or more of the 2 parts, each once: 0, 1"):
        viz.merge_steps(PARTS, order)
    with pytest.raises(ValueError, match="way = 'mean' must be one of"):
        viz.merge_steps(PARTS, (0,), "mean")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (({},), 'shapes is empty: pass at least one, such as {"Llama 3 8B"'),
        (({"a": SHAPE}, []), 'gpus is empty: pass at least one, such as gpus=["h200"]'),
        (({"a": SHAPE}, ["h9000"]), "gpu = 'h9000' is not a known profile; choose one of h200, h200-28sm, rtx3060"),
        (({"a": SHAPE}, "../gpus/h200"), "gpu = '../gpus/h200' is not a known profile"),
    ],
)
def test_a_roofline_of_nothing_or_of_an_unknown_card_is_refused(arguments, words):
    pytest.importorskip("matplotlib", reason="the lessons extra draws the roofline")
    with pytest.raises(ValueError, match=re.escape(words)):
        viz.draw_roofline(*arguments)


def test_roofs_of_an_unknown_card_are_refused():
    with pytest.raises(ValueError, match="gpu = 'h9000' is not a known profile"):
        plots.roofs_of("h9000")


@pytest.mark.filterwarnings("ignore:Glyph")
def test_a_roofline_takes_any_name_and_many_cards():
    pytest.importorskip("matplotlib", reason="the lessons extra draws the roofline")
    picture = viz.draw_roofline({"a $x^ & <b> \x00": SHAPE}, ["h200"] * 8)
    assert "a $x^ & <b> \ufffd" in "".join(ElementTree.fromstring(picture.svg).itertext())
    assert viz.draw_roofline({"a": SHAPE}, "h200") == viz.draw_roofline({"a": SHAPE}, ["h200"])


def test_right_of_the_ridge_memory_is_not_called_the_limit():
    pytest.importorskip("matplotlib", reason="the lessons extra draws the roofline")
    picture = viz.draw_roofline({"a": SHAPE, "b": pkv.Shape(250, 1, 128, 16, "float16")})
    assert picture.alt.startswith("Right of the ridge of 2 of 2 cards")


class Image(HTMLParser):
    """The attributes of an <img>."""

    def handle_starttag(self, tag, attributes):
        assert tag == "img"
        self.attributes = dict(attributes)


@pytest.mark.parametrize(
    "name", ["a\x00b", "a&b", "a<b", 'a"b', "a'b", "]]>", "\x1b[1m", "\ud800", "\uffff", "a\nb", "é→"]
)
def test_any_name_of_a_gpu_gives_valid_xml(name, tmp_path):
    plan = pkv.plan([5, 40], SINGLE, gpu=pkv.GpuProfile(name, 86, 28))
    for draw in (viz.draw_plan, viz.draw_programs):
        picture = draw(plan)
        root = ElementTree.fromstring(picture.svg)
        shown = re.sub("[\x00\x1b\ud800\uffff]", "\ufffd", name)
        assert shown.split()[0] in root.get("aria-label")
        assert root.find("{http://www.w3.org/2000/svg}title").text == picture.alt
        image = Image()
        image.feed(picture.html())
        assert image.attributes["alt"] == picture.alt
        ElementTree.fromstring(base64.b64decode(image.attributes["src"].partition(",")[2]))
        picture.save(tmp_path / "picture.svg")
        ElementTree.parse(tmp_path / "picture.svg")


def test_a_picture_made_by_hand_is_cleaned_too():
    assert Picture("<svg>\x00</svg>", "\x01") == Picture("<svg>\ufffd</svg>", "\ufffd")


def test_one_of_a_thing_does_what_one_does():
    one_sm = pkv.GpuProfile("tiny", 86, 1)
    plan = pkv.plan([5], SINGLE, stage="row_local", splits=2, gpu=one_sm)
    drawn, programs = viz.draw_plan(plan), viz.draw_programs(plan)
    assert drawn.alt.startswith("row_local: 1 row becomes 2 items")
    assert "; 1 program is empty." in drawn.alt
    assert ": 1 SM holds " in drawn.alt
    assert "2 programs, 1 of them without a token: the one SM gets work." in programs.alt
    two_sms = pkv.plan([5], SINGLE, stage="row_local", gpu=pkv.GpuProfile("two", 86, 2))
    assert "1 of 2 SMs gets no token" in viz.draw_programs(two_sms).alt
    sentences = [text for *_, text in texts(drawn)] + [text for *_, text in texts(programs)]
    assert not [text for text in sentences if re.search(r"\b1 (rows|items|programs|launches|SMs|tokens|slots)\b", text)]


@pytest.mark.parametrize("way", viz.WAYS)
@pytest.mark.parametrize("cuts", [(0, 4, 7, 9, 10), (0, 0, 4, 4, 10), (0, 0, 0, 0, 3), (2, 5, 5, 5, 5)], ids=str)
def test_a_merge_of_any_four_states_is_right(cuts, way):
    for order in widgets.ORDERS:
        (picture,) = widgets.merge_of(cuts, order, way, 4)
        if way == "exact merge":
            assert f"the end is out {(cuts[0] + cuts[-1] - 1) / 2:.4g}," in picture.alt
    with pytest.raises(ValueError, match="order = 'any' must be one of '0, 1, 2, 3'"):
        widgets.merge_of(cuts, "any", way, 4)

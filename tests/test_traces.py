"""Traces: what is drawn, who is live when, and files with requests of one's own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pkv
from pkv.bench.loads.tracefiles import read_trace
from pkv.bench.loads.traces import TRACES, Request, make_trace, never_active, steps_of
from pkv.cli import main

SEED = 20260623
# Least and most of what may be drawn, of (prompt before rounding, decode length), by request.
RANGES = {
    "uniform": lambda index: ((4096, 32768), (16, 96)),
    "bimodal": lambda index: ((2048, 12288), (8, 64)) if index % 4 else ((24576, 65536), (32, 128)),
    "zipf": lambda index: ((2048 + 11585 - 512, 2048 + 65536 + 512), (8, 128)),
    "bucketed": lambda index: ((8192 << index % 4,) * 2, (32, 96)),
    "homogeneous": lambda index: ((32768, 32768), (32, 96)),
    "one_long": lambda index: ((512, 512) if index % 8 else (65536, 65536), (32, 96)),
}


@pytest.mark.parametrize("name", TRACES)
def test_what_is_drawn_lies_in_its_range_and_reaches_both_ends(name):
    requests = make_trace(name, SEED, 4000, 8, page_size=1)
    assert [request.arrival for request in requests] == [index // 8 for index in range(4000)]
    for index, request in enumerate(requests):
        (least, most), (fewest, steps) = RANGES[name](index)
        assert least <= request.prompt_len <= most
        assert fewest <= request.decode_len <= steps
    decodes = [request.decode_len for request in requests]
    ends = [RANGES[name](index)[1] for index in range(4)]
    assert (min(decodes), max(decodes)) == (min(low for low, _ in ends), max(high for _, high in ends))


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("page_size", [16, 48])
def test_pages_round_up_and_change_nothing_else(name, page_size):
    exact, paged = (make_trace(name, SEED, 40, 8, size) for size in (1, page_size))
    for mine, rounded in zip(exact, paged):
        assert 0 <= rounded.prompt_len - mine.prompt_len < page_size
        assert rounded.prompt_len % page_size == 0
        assert (rounded.decode_len, rounded.arrival) == (mine.decode_len, mine.arrival)


@pytest.mark.parametrize("name", TRACES)
def test_a_seed_is_a_trace_and_torch_goes_on_undisturbed(name):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with torch.device("meta"):  # whatever the default device, draws come from the CPU
        first = make_trace(name, SEED, 24, 8)
    assert torch.equal(torch.rand(3), expected)
    assert make_trace(name, SEED, 24, 8) == first
    assert make_trace(name, SEED, 10, 8) == first[:10], "more requests do not change the earlier ones"
    assert make_trace(name, SEED + 1, 24, 8) != first


def test_one_long_has_one_long_row_in_each_group():
    for max_active in (1, 3, 8):
        requests = make_trace("one_long", SEED, 5 * max_active, max_active)
        assert [request.prompt_len for request in requests] == 5 * ([65536] + [512] * (max_active - 1))
        assert [request.arrival for request in requests] == [index // max_active for index in range(5 * max_active)]
    assert sorted(steps_of(make_trace("one_long", SEED, 8, 8), 8, 1)[0]) == [512] * 7 + [65536]


def brute_force(requests: list[Request], max_active: int, step: int) -> list[int]:
    """Who is live, word for word as the rule has it."""
    rows: list[int] = []
    for request in requests:
        if 0 <= step - request.arrival < request.decode_len and len(rows) < max_active:
            rows.append(request.prompt_len + (step - request.arrival))
    return rows


REQUESTS = st.builds(Request, st.integers(0, 300), st.integers(1, 6), st.integers(0, 8))


@settings(max_examples=60, deadline=None)
@given(st.lists(REQUESTS, max_size=12), st.integers(1, 5), st.integers(0, 16))
def test_steps_follow_the_rule(requests, max_active, n_steps):
    steps = steps_of(requests, max_active, n_steps)
    assert steps == [brute_force(requests, max_active, step) for step in range(n_steps)]
    alone = [[other if other is request else Request(0, 1, 10**6) for other in requests] for request in requests]
    left_out, late = never_active(requests, max_active, n_steps)
    assert late == sum(not any(steps_of(others, 1, n_steps)) for others in alone)
    rows = {
        index
        for step in range(n_steps)
        for index in [i for i, r in enumerate(requests) if 0 <= step - r.arrival < r.decode_len][:max_active]
    }
    assert left_out + late == len(requests) - len(rows)
    assert all(type(length) is int for step in steps for length in step)


def test_nothing_to_do_is_no_error():
    assert make_trace("zipf", SEED, 0, 8) == ()
    assert steps_of([], 8, 3) == [[], [], []]
    assert steps_of([Request(16, 1, 2)], 8, 0) == []
    assert steps_of([Request(16, 1, 2)], 8, 4) == [[], [], [16], []]
    shape = pkv.Shape(4, 2, 64, 16, "float16")
    assert pkv.plan(steps_of([], 8, 1)[0], shape).counters.launches == 0


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("zipff", 1, 1, 1), ValueError, "trace = 'zipff' does not exist; choose one of uniform, bimodal"),
        (("zipf", -1, 1, 1), ValueError, "seed = -1 is too small"),
        (("zipf", 2**63, 1, 1), ValueError, "seed = 9223372036854775808 is too large"),
        (("zipf", 1.5, 1, 1), TypeError, "seed must be an int"),
        (("zipf", 1, -1, 1), ValueError, "n_requests = -1 is too small"),
        (("zipf", 1, 1, 0), ValueError, "max_active = 0 is too small: pass 1 or more"),
        (("zipf", 1, 1, 1, 0), ValueError, "page_size = 0 is too small"),
        (("zipf", 1, 1, 1, 2**31 - 1), ValueError, "prompt_len = 2147483647 is too large"),
    ],
)
def test_a_trace_that_cannot_be_drawn_is_refused_by_name(arguments, error, words):
    with pytest.raises(error, match=words):
        make_trace(*arguments)


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ((-1, 1, 0), ValueError, "prompt_len = -1 is too small: pass 0 or more"),
        ((1, 0, 0), ValueError, "decode_len = 0 is too small: pass 1 or more"),
        ((1, 1, -1), ValueError, "arrival = -1 is too small"),
        ((2**31 - 70, 20, 0), ValueError, "too long a row"),
        ((True, 1, 0), TypeError, "prompt_len must be an int"),
        ((16.0, 1, 0), TypeError, "prompt_len must be an int"),
    ],
)
def test_a_request_that_cannot_be_is_refused_by_name(values, error, words):
    with pytest.raises(error, match=words):
        Request(*values)


@pytest.mark.parametrize(("max_active", "n_steps", "name"), [(0, 1, "max_active"), (1, -1, "n_steps")])
def test_steps_that_cannot_be_are_refused_by_name(max_active, n_steps, name):
    with pytest.raises(ValueError, match=name):
        steps_of([], max_active, n_steps)


THREE = (Request(1000, 50, 0), Request(70, 9, 3), Request(0, 1, 3))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "prompt_len,decode_len,arrival\n1000,50,0\n70,9,3\n0,1,3\n"),
        ("columns in any order", "arrival, model ,decode_len,prompt_len\r\n0,x,50,01000\r\n\r\n3,,9, 70 \r\n3,,1,0"),
        ("byte-order mark", "\ufeffprompt_len,decode_len,arrival\n1000,50,0\n70,9,3\n0,1,3\n"),
        ("a.json", json.dumps([vars(request) for request in THREE])),
        ("A.JSON", json.dumps([vars(request) | {"model": "x"} for request in THREE])),
    ],
)
def test_a_file_is_read(name, text, tmp_path):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert read_trace(path) == THREE
    assert read_trace(str(path)) == THREE


# At 100 steps a second: 0.29 * 100 is 28.999999999999996 in floating point
BY_THE_CLOCK = [("1000", "50", "0.29"), ("70", "9", "0"), ("0", "1", "12.0049")]
AS_OBJECTS = [f'{{"prompt_len": {n}, "decode_len": {m}, "seconds": {s}, "blocks": [7]}}' for n, m, s in BY_THE_CLOCK]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "\n".join(map(",".join, [("prompt_len", "decode_len", "seconds"), *BY_THE_CLOCK]))),
        ("both.csv", "arrival,prompt_len,decode_len,seconds\n5,1000,50,0.29\n9,70,9,0.000\n9,0,1, 12.0049 "),
        ("a.json", f"[{','.join(AS_OBJECTS)}]"),
        ("a.JSONL", "\n\n".join(AS_OBJECTS) + "\n"),
    ],
)  # fmt: skip
def test_a_file_that_keeps_seconds_is_read_at_a_rate(name, text, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    assert read_trace(path, steps_per_second=100) == (Request(1000, 50, 29), Request(70, 9, 0), Request(0, 1, 1200))
    assert [request.arrival for request in read_trace(path, 0.5)] == [0, 0, 6]


def test_an_object_a_line_may_count_steps(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(vars(request)) for request in THREE))
    assert read_trace(path) == THREE


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_a_rate_that_cannot_be_is_refused(rate, tmp_path):
    with pytest.raises(ValueError, match=r"steps_per_second = .* must be above 0"):
        read_trace(tmp_path / "a.csv", rate)


HEADER = "prompt_len,decode_len,arrival"
OBJECT = '{"prompt_len": 5, "decode_len": 1, "arrival": 0}'
CLOCK = "prompt_len,decode_len,seconds"


@pytest.mark.parametrize(
    ("name", "text", "rate", "words"),
    [
        ("a.csv", f"{CLOCK}\n5,1,0.5\n", None, ["line 1: column arrival is missing", "--steps-per-second 20"]),
        ("a.csv", f"{HEADER}\n5,1,0\n", 20, ["line 1: column seconds is missing", "leave out --steps-per-second"]),
        ("a.csv", "prompt_len,decode_len,when\n5,1,0\n", 20, ["column seconds is missing", CLOCK, "found prompt_len"]),
        ("a.csv", f"{CLOCK}\n5,1,-0.5\n", 20, ["line 2: seconds = '-0.5' is not a number of seconds, 0 or more"]),
        ("a.csv", f"{CLOCK}\n5,1,1e9\n", 20, ["line 2: seconds = '1e9' is not a number of seconds"]),
        ("a.csv", f"{CLOCK}\n5,1,2023-11-16 18:15:46\n", 20, ["seconds = '2023-11-16 18:15:46' is not a number"]),
        ("a.csv", f"{CLOCK}\n5,1,9999999999\n", 20, ["line 2: arrival = 199999999980 is too large"]),
        ("a.json", '[{"prompt_len": 5, "decode_len": 1, "seconds": true}]', 20, ["entry 1: seconds = 'True' is not"]),
        ("a.json", '[{"prompt_len": 5, "decode_len": 1, "seconds": NaN}]', 20, ["entry 1: seconds = 'nan' is not"]),
        ("a.json", '[{"prompt_len": 5, "decode_len": 1, "seconds": 1}]', None, ["field arrival", "--steps-per-second"]),
        ("a.jsonl", f"{OBJECT}\n[5]", None, ["line 2: [5] must be an object"]),
        ("a.jsonl", f"{OBJECT}\n\n{OBJECT[:-1]}", None, ["line 3: not JSON", "write an object a line"]),
        ("a.jsonl", OBJECT, 20, ["line 1: field seconds is missing; arrival counts steps already"]),
    ],
)  # fmt: skip
def test_a_bad_file_of_seconds_is_refused_by_line_and_field(name, text, rate, words, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^{path}") as caught:
        read_trace(path, rate)
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 200


def test_a_trace_that_is_written_and_read_is_the_same(tmp_path):
    requests = make_trace("bimodal", SEED, 24, 8)
    (tmp_path / "a.json").write_text(json.dumps([vars(request) for request in requests]))
    lines = [f"{request.prompt_len},{request.decode_len},{request.arrival}" for request in requests]
    (tmp_path / "a.csv").write_text("\n".join(["prompt_len,decode_len,arrival", *lines]))
    assert read_trace(tmp_path / "a.json") == read_trace(tmp_path / "a.csv") == requests


def test_a_file_without_requests_is_a_trace_of_none(tmp_path):
    (tmp_path / "a.csv").write_text("prompt_len,decode_len,arrival\n")
    (tmp_path / "a.json").write_text("[]")
    assert read_trace(tmp_path / "a.csv") == read_trace(tmp_path / "a.json") == ()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "", ["line 1: column prompt_len is missing", HEADER, "it is empty"]),
        ("a.csv", "5,1,0\n", ["line 1: column prompt_len is missing", "found 5, 1, 0"]),
        ("a.csv", "prompt_len,arrival\n5,0\n", ["line 1: column decode_len is missing"]),
        ("a.csv", "prompt_len,decode_len,arrivals\n5,1,0\n", ["column arrival is missing", "arrivals"]),
        (
            "a.csv",
            "prompt_len;decode_len;arrival\n5;1;0\n",
            ["column prompt_len is missing", "found prompt_len;decode"],
        ),
        ("a.csv", f"{HEADER},arrival\n5,1,0,0\n", ["line 1: column arrival is there twice"]),
        ("a.csv", f"{HEADER}\n5,1,0\n\n7,1\n", ["line 4: 2 values, but the header has 3 columns"]),
        ("a.csv", f"{HEADER}\n5,1,0\n7,1,0,0\n", ["line 3: 4 values"]),
        ("a.csv", f"{HEADER}\n5,1,0\n-7,1,0\n", ["line 3: prompt_len = -7 is too small: pass 0 or more"]),
        ("a.csv", f"{HEADER}\n5,0,0\n", ["line 2: decode_len = 0 is too small: pass 1 or more"]),
        ("a.csv", f"{HEADER}\n5,1,-1\n", ["line 2: arrival = -1"]),
        ("a.csv", f"{HEADER}\n5,1.5,0\n", ["line 2: decode_len = '1.5' is not a whole number, such as 512"]),
        ("a.csv", f"{HEADER}\n5,1,\n", ["line 2: arrival = '' is not a whole number"]),
        ("a.csv", f"{HEADER}\n1_000,1,0\n", ["prompt_len = '1_000' is not a whole number"]),
        ("a.csv", f"{HEADER}\n\uff15,1,0\n", ["prompt_len = '\uff15' is not a whole number"]),
        ("a.csv", f"{HEADER}\n5,1,x{'y' * 999}\n", ["arrival = 'xyyyyy", "is not a whole number"]),
        ("a.csv", f"{HEADER}\n{'9' * 9999},1,0\n", ["prompt_len = 9999999999999999999 is too large"]),
        ("a.csv", f"{HEADER}\n2147483580,5,0\n", ["line 2: prompt_len + decode_len = 2147483585", "too long a row"]),
        ("a.csv", f'{HEADER}\n"{"5" * 200_000}",1,0\n', ["line 2: not CSV"]),
        ("a.json", "", ["not JSON", "such as [{"]),
        ("a.json", f"[{OBJECT}", ["not JSON", "line 1 column"]),
        ("a.json", "[" * 100_000, ["not JSON"]),
        ("a.json", OBJECT, ["must be a list of objects"]),
        ("a.json", f"[{OBJECT}, 5]", ["entry 2: 5 must be an object"]),
        ("a.json", '[{"prompt_len": 5, "arrival": 0}]', ["entry 1: field decode_len is missing"]),
        ("a.json", f"[{OBJECT}, {OBJECT.replace('5', '5.0')}]", ["entry 2: prompt_len = '5.0' is not a whole number"]),
        ("a.json", f"[{OBJECT.replace('5', 'true')}]", ["entry 1: prompt_len = 'True' is not a whole number"]),
        ("a.json", f"[{OBJECT.replace('5', 'null')}]", ["entry 1: prompt_len = 'None' is not a whole number"]),
        ("a.json", f"[{OBJECT.replace('5', 'NaN')}]", ["entry 1: prompt_len = 'nan' is not a whole number"]),
        (
            "a.json",
            f"[{OBJECT.replace('5', '-' + '5' * 4000)}]",
            ["entry 1: prompt_len = -10000000000000000000 is too"],
        ),
        ("a.json", f"[{OBJECT.replace('1', '0')}]", ["entry 1: decode_len = 0 is too small"]),
    ],
)
def test_a_bad_file_is_refused_by_line_and_field(name, text, words, tmp_path):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"^{path}") as caught:
        read_trace(path)
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 200


def test_a_file_that_is_no_text_or_not_there(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"prompt_len\xff\xfe")
    with pytest.raises(ValueError, match="UTF-8"):
        read_trace(tmp_path / "a.csv")
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "b.csv")


DOCUMENT = (Path(__file__).parents[1] / "docs" / "traces.md").read_text()
# In the form of the two public traces; the numbers are made up.
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,4\n2023-11-16 18:15:50.9951690,396,9\n"
)
MOONCAKE = "".join(
    json.dumps({"timestamp": ms, "input_length": n, "output_length": m, "hash_ids": [0, ms]}) + "\n"
    for ms, n, m in [(0, 6755, 5), (3050, 7319, 4)]
)


@pytest.mark.parametrize(
    ("number", "name", "text", "requests"),
    [
        (0, "AzureLLMInferenceTrace_conv.csv", AZURE, (Request(374, 4, 0), Request(396, 9, 86))),
        (1, "conversation_trace.jsonl", MOONCAKE, (Request(6755, 5, 0), Request(7319, 4, 61))),
    ],
)
def test_the_document_reads_public_traces_as_it_says(number, name, text, requests, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    exec(re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)[number], {})
    assert read_trace("requests.csv", 20) == requests
    (commands,) = re.findall(r"^```sh\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    for command in commands.splitlines():
        assert main(command.removeprefix(".venv/bin/pkv ").split()) == 0
        assert "2 requests, at most 256 active" in capsys.readouterr().out


def test_the_documents_example_is_a_trace(tmp_path):
    (example,) = re.findall(r"^```text\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    (tmp_path / "a.csv").write_text(example)
    assert [request.arrival for request in read_trace(tmp_path / "a.csv", 20)] == [0, 86, 90]

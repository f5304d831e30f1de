"""Traces of your own, from a file.

CSV with a header, JSON (a list of objects), or JSON Lines (an object a line). Two requests, as CSV and as JSON:

    prompt_len,decode_len,arrival        [{"prompt_len": 1000, "decode_len": 50, "arrival": 0},
    1000,50,0                             {"prompt_len": 70, "decode_len": 9, "arrival": 3}]
    70,9,3

Where a server kept the time, a file has `seconds` in the place of `arrival`, since the first request say, and it must
be said how many steps a second has: at 20 of them, a request of second 0.19 is live from step 3 on.
"""

import csv
import io
import json
import math
import re
from collections.abc import Collection
from fractions import Fraction
from pathlib import Path
from typing import Any

from pkv.bench.loads.traces import FIELDS, Request
from pkv.wording.counts import count_of

WHOLE = re.compile(r"\s*(-?)0*([0-9]{1,19})[0-9]*\s*")  # int() also takes 1_000 and the digits of other scripts
DECIMAL = re.compile(r"\s*[0-9]{1,19}(\.[0-9]{0,19})?\s*")
SIZES = FIELDS[:2]  # prompt_len, decode_len
SECONDS = "seconds"  # the field in the place of arrival
HUGE = 10**19  # what is larger is cut, so that an error stays short


def read_trace(path: str | Path, steps_per_second: float | None = None) -> tuple[Request, ...]:
    """Requests from a file: JSON (a name that ends in .json), JSON Lines (in .jsonl), else CSV with a header.

    Each has prompt_len, decode_len and arrival, whole numbers; other fields are ignored, and prompts are kept as they
    are. steps_per_second: each has `seconds` in the place of arrival, a decimal number, 0 or more; it arrives at step
    floor(seconds * steps_per_second). OSError where the file cannot be read; ValueError names the file, the line (JSON:
    the entry) and the field.
    """
    if steps_per_second is not None and not 0 < steps_per_second < math.inf:
        raise ValueError(
            f"steps_per_second = {steps_per_second} must be above 0, and finite: how many a server decodes"
        )
    when = "arrival" if steps_per_second is None else SECONDS
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file in UTF-8; write CSV or JSON") from None
    suffix = path.suffix.lower()
    if suffix == ".json":
        entries = _json_entries(path, text, when)
    else:
        entries = _jsonl_entries(path, text, when) if suffix == ".jsonl" else _csv_entries(path, text, when)
    rate = None if steps_per_second is None else Fraction(str(steps_per_second))
    return tuple(_request_of(where, entry, rate) for where, entry in entries)


def _why_missing(name: str, there: Collection[str]) -> str:
    """What to do about a field that is missing; "" where its name says all."""
    if name == "arrival" and SECONDS in there:
        return f"; for {SECONDS} say how many steps a second has: --steps-per-second 20, say"
    if name == SECONDS and "arrival" in there:
        return "; arrival counts steps already: leave out --steps-per-second"
    return ""


def _csv_entries(path: Path, text: str, when: str) -> list[tuple[str, dict[str, Any]]]:
    """Where each request stands, and its fields, as text."""
    reader = csv.reader(io.StringIO(text, newline=""))
    entries = []
    try:
        header = [name.strip() for name in next(reader, [])]
        for name in (*SIZES, when):
            if header.count(name) != 1:
                found = f"found {', '.join(header)}"[:80] if any(header) else "it is empty"
                fault = "is missing" if name not in header else "is there twice"
                remedy = _why_missing(name, header) or f"; the header must be {','.join((*SIZES, when))} ({found})"
                raise ValueError(f"{path} line 1: column {name} {fault}{remedy}")
        for row in reader:
            where = f"{path} line {reader.line_num}"
            if not any(cell.strip() for cell in row):
                continue
            if len(row) != len(header):
                raise ValueError(
                    f"{where}: {count_of(len(row), 'value')}, but the header has {count_of(len(header), 'column')}"
                )
            entries.append((where, dict(zip(header, row, strict=True))))
    except csv.Error as error:
        raise ValueError(f"{path} line {reader.line_num}: not CSV ({error})") from None
    return entries


def _json_entries(path: Path, text: str, when: str) -> list[tuple[str, dict[str, Any]]]:
    """Where each request stands, and its fields."""
    example = f"[{_example(when)}]"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error}); write a list of objects, such as {example}") from None
    if not isinstance(found, list):
        raise ValueError(f"{path}: must be a list of objects, such as {example}")
    return [_checked(f"{path} entry {number}", entry, when) for number, entry in enumerate(found, 1)]


def _jsonl_entries(path: Path, text: str, when: str) -> list[tuple[str, dict[str, Any]]]:
    """Where each request stands, and its fields."""
    entries = []
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{path} line {number}"
        if line.strip():
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: not JSON ({error}); write an object a line: {_example(when)}") from None
            entries.append(_checked(where, entry, when))
    return entries


def _example(when: str) -> str:
    return json.dumps(dict.fromkeys((*SIZES, when), 1))


def _checked(where: str, entry: Any, when: str) -> tuple[str, dict[str, Any]]:
    """What was found at a place, if it is an object with all fields."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: {json.dumps(entry)[:40]} must be an object, as in [{_example(when)}]")
    for name in (*SIZES, when):
        if name not in entry:
            remedy = _why_missing(name, entry) or f"; an object is such as {_example(when)}"
            raise ValueError(f"{where}: field {name} is missing{remedy}")
    return where, entry


def _request_of(where: str, entry: dict[str, Any], rate: Fraction | None) -> Request:
    """A request from its fields; the error says where it stands. rate: steps per second, None: it counts steps."""
    if rate is not None:
        entry = entry | {"arrival": math.floor(_seconds(where, entry[SECONDS]) * rate)}
    values = {}
    for name in FIELDS:
        value = entry[name]
        if isinstance(value, str) and (found := WHOLE.fullmatch(value)):
            value = int(found[1] + found[2])
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{where}: {name} = {str(value)[:40]!r} is not a whole number, such as 512")
        value = max(-HUGE, min(value, HUGE))
        values[name] = value
    try:
        return Request(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _seconds(where: str, value: Any) -> Fraction:
    """A time as it is written, to the last digit."""
    text = f"{value:.9f}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)
    if DECIMAL.fullmatch(text) is None:
        raise ValueError(
            f"{where}: {SECONDS} = {str(value)[:40]!r} is not a number of seconds, 0 or more, such as 12.5"
        )
    return Fraction(text.strip())

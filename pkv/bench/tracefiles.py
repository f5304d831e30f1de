"""Traces of your own, from a file.

CSV with a header, or JSON: a list of objects. Two requests, as CSV and as JSON:

    prompt_len,decode_len,arrival        [{"prompt_len": 1000, "decode_len": 50, "arrival": 0},
    1000,50,0                             {"prompt_len": 70, "decode_len": 9, "arrival": 3}]
    70,9,3
"""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

from pkv.bench.traces import FIELDS, Request

WHOLE = re.compile(r"\s*(-?)0*([0-9]{1,19})[0-9]*\s*")  # int() also takes 1_000 and the digits of other scripts
HUGE = 10**19  # what is larger is cut, so that an error stays short


def read_trace(path: str | Path) -> tuple[Request, ...]:
    """Requests from a file: JSON (a name that ends in .json: a list of objects), else CSV with a header.

    Each has prompt_len, decode_len and arrival, whole numbers; other fields are ignored, and prompts are kept as they
    are. OSError where the file cannot be read; ValueError names the file, the line (JSON: the entry) and the field.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file in UTF-8; write CSV or JSON") from None
    entries = _json_entries(path, text) if path.suffix.lower() == ".json" else _csv_entries(path, text)
    return tuple(_request_of(where, entry) for where, entry in entries)


def _csv_entries(path: Path, text: str) -> list[tuple[str, dict[str, Any]]]:
    """Where each request stands, and its fields, as text."""
    reader = csv.reader(io.StringIO(text, newline=""))
    entries = []
    try:
        header = [name.strip() for name in next(reader, [])]
        for name in FIELDS:
            if header.count(name) != 1:
                found = f"found {', '.join(header)}"[:80] if any(header) else "it is empty"
                fault = "is missing" if name not in header else "is there twice"
                raise ValueError(
                    f"{path} line 1: column {name} {fault}; the header must be {','.join(FIELDS)} ({found})"
                )
        for row in reader:
            where = f"{path} line {reader.line_num}"
            if not any(cell.strip() for cell in row):
                continue
            if len(row) != len(header):
                raise ValueError(f"{where}: {len(row)} values, but the header has {len(header)} columns")
            entries.append((where, dict(zip(header, row, strict=True))))
    except csv.Error as error:
        raise ValueError(f"{path} line {reader.line_num}: not CSV ({error})") from None
    return entries


def _json_entries(path: Path, text: str) -> list[tuple[str, dict[str, Any]]]:
    """Where each request stands, and its fields."""
    example = f"[{json.dumps(dict.fromkeys(FIELDS, 1))}]"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error}); write a list of objects, such as {example}") from None
    if not isinstance(found, list):
        raise ValueError(f"{path}: must be a list of objects, such as {example}")
    entries = []
    for number, entry in enumerate(found, 1):
        where = f"{path} entry {number}"
        if not isinstance(entry, dict):
            raise ValueError(f"{where}: {json.dumps(entry)[:40]} must be an object, as in {example}")
        for name in FIELDS:
            if name not in entry:
                raise ValueError(f"{where}: field {name} is missing; an object is such as {example[1:-1]}")
        entries.append((where, entry))
    return entries


def _request_of(where: str, entry: dict[str, Any]) -> Request:
    """A request from its fields; the error says where it stands."""
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

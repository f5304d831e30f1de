"""Answers as bytes, between the process that gives them and the one that judges them.

Numbers, texts, lists and dicts go as JSON, tensors as their bytes. Nothing in it can be code, a tensor takes as much
memory as it has bytes, and its class is torch.Tensor: whoever gives an answer has no say in how it is compared.

>>> unpacked(packed({"value": [1, 2.5, "three", None]}))
{'value': [1, 2.5, 'three', None]}
"""

import json
import math
import struct
from typing import Any

import torch

from pkv.course.comparing import COMPARED

HEAD = struct.Struct("<QQ")  # bytes of the whole, and of the JSON in it
LARGEST = 1 << 26  # bytes of one answer
DEEPEST = 20  # lists and dicts in one another: whoever judges goes through them by recursion
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in COMPARED}


class TooLarge(ValueError):
    """More bytes than any answer needs."""


def packed(value: Any) -> bytes:
    """A nest of plain values (see comparing.plain) as bytes; TooLarge where they are too many."""
    parts: list[bytes] = []
    text = json.dumps(_described(value, parts)).encode()
    size = len(text) + sum(map(len, parts))
    if HEAD.size + size > LARGEST:
        raise TooLarge(f"more than {LARGEST >> 20} MiB")
    return HEAD.pack(size, len(text)) + text + b"".join(parts)


def unpacked(data: bytes) -> Any:
    """What packed() packed; ValueError where it is nothing that packed() makes."""
    _, length = HEAD.unpack_from(data)
    end = HEAD.size + length
    try:
        value, rest = _made(json.loads(data[HEAD.size : end]), memoryview(data)[end:])
    except (LookupError, TypeError, RuntimeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if len(rest):
        raise ValueError("bytes left over")
    return value


def _described(value: Any, parts: list[bytes]) -> Any:
    """A value with a dict in place of each tensor, whose bytes are appended to `parts`."""
    if isinstance(value, torch.Tensor):
        if value.nbytes > LARGEST:
            raise TooLarge(f"more than {LARGEST >> 20} MiB")
        parts.append(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if isinstance(value, dict):
        return {"dict": [[key, _described(item, parts)] for key, item in value.items()]}
    if isinstance(value, list):
        return [_described(item, parts) for item in value]
    return value


def _made(described: Any, rest: memoryview, depth: int = 0) -> tuple[Any, memoryview]:
    """The value that was described, and the bytes that are left."""
    if depth > DEEPEST:
        raise ValueError(f"more than {DEEPEST} lists in one another")
    if isinstance(described, list):
        made = []
        for item in described:
            value, rest = _made(item, rest, depth + 1)
            made.append(value)
        return made, rest
    if not isinstance(described, dict):
        return described, rest
    if "dict" in described:
        entries = {}
        for key, item in described["dict"]:
            entries[str(key)], rest = _made(item, rest, depth + 1)
        return entries, rest
    dtype, shape = DTYPES[described["dtype"]], [int(n) for n in described["shape"]]
    n_bytes = math.prod(shape) * dtype.itemsize
    if min(shape, default=1) < 0 or n_bytes > len(rest):
        raise ValueError("a tensor without its bytes")
    if n_bytes == 0:
        return torch.empty(shape, dtype=dtype), rest
    raw = torch.frombuffer(bytearray(rest[:n_bytes]), dtype=torch.uint8)
    made_of = raw != 0 if dtype == torch.bool else raw.view(dtype)
    return made_of.reshape(shape), rest[n_bytes:]

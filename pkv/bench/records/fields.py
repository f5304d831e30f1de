"""What each field of a line of records may hold: read or written, a line that holds anything else is refused by name.

    check({"kind": "time", "gpu_us": [0.0], ...})  -> ValueError: gpu_us[0] = 0.0 must be a number above 0, ...

Fields that are not listed here are passed over: a later version may have added them.
"""

import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from pkv.wording.checks import LONGEST_ROW

GRID = re.compile("[a-z0-9_-]+")  # it becomes part of files' names
LEAST_US = 1e-6  # a GPU time of less is none, and a ratio to it no number
MOST = 1e15  # us are 30 years, GB/s and parts of 1 are not so many either: sums and ratios of more lose all digits
MOST_SIZE = 2**20  # of a shape's parts
Check = Callable[[str, Any], None]  # called with the name of a field and what it holds
shown = reprlib.Repr()
shown.maxstring = 100  # of a value in a message


def check(entry: Mapping[str, Any]) -> None:
    """ValueError names the first field of a line that holds what it cannot. Fields that are missing are not seen."""
    try:
        for name, of in CHECKS[entry["kind"]].items():
            if name in entry:
                of(name, entry[name])
    except ValueError as error:
        engine, load = (shown.repr(entry.get(name)) for name in ("engine", "load"))
        raise ValueError(f"{error} (of {engine} on {load})" if entry["kind"] == "time" else str(error)) from None


def must(is_right: bool, name: str, value: Any, what: str) -> None:
    """ValueError says what a field must be. However long the value, it is one line."""
    if not is_right:
        raise ValueError(f"{name} = {shown.repr(value)} must be {what}")


def text(name: str, value: Any) -> None:
    """Any text."""
    must(isinstance(value, str), name, value, "text")


def word(name: str, value: Any) -> None:
    """A name: it stands in tables, pictures and messages."""
    is_fit = isinstance(value, str) and value != "" and value.isprintable()
    must(is_fit, name, value, "a line of text that can be printed")


def grid(name: str, value: Any) -> None:
    """A grid's name."""
    is_fit = isinstance(value, str) and GRID.fullmatch(value) is not None
    must(is_fit, name, value, "small letters, digits, '_' and '-'")


def flag(name: str, value: Any) -> None:
    """Yes or no."""
    must(isinstance(value, bool), name, value, "true or false")


def number(name: str, value: Any, least: float = 0, what: str = "a number, 0 or more") -> None:
    """A number, finite and not below `least`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    must(is_number and value >= least, name, value, what)
    must(value <= MOST, name, value, f"at most {MOST:g}")


def gpu_time(name: str, value: Any) -> None:
    """The us of a layer: engines are divided by them."""
    number(name, value, LEAST_US, f"a number above 0, from {LEAST_US:g} on: a time of 0 is no time")


def whole(name: str, value: Any, least: int = 0, most: float = MOST) -> None:
    """A whole number."""
    must(type(value) is int and value >= least, name, value, f"a whole number, {least} or more")
    must(value <= most, name, value, f"at most {int(most):,}")


def count(name: str, value: Any) -> None:
    """How many of something that is there."""
    whole(name, value, 1)


def seed(name: str, value: Any) -> None:
    """What numpy takes as one."""
    whole(name, value, most=2**64)


def n_tokens(name: str, value: Any) -> None:
    """Tokens of a row; it may have none."""
    whole(name, value, most=LONGEST_ROW)


def fields(name: str, value: Any) -> None:
    """An object, whatever it holds."""
    must(isinstance(value, dict), name, value, "an object")


def or_none(of: Check) -> Check:
    """None, or what `of` lets pass."""

    def checked(name: str, value: Any) -> None:
        if value is not None:
            of(name, value)

    return checked


def each(of: Check, least: int = 0) -> Check:
    """A list of what `of` lets pass, with so many entries at least."""

    def checked(name: str, value: Any) -> None:
        must(isinstance(value, list | tuple), name, value, "a list")
        must(len(value) >= least, name, value, "a list that is not empty")
        for place, entry in enumerate(value):
            of(f"{name}[{place}]", entry)

    return checked


def having(**checks: Check) -> Check:
    """An object; KeyError where it lacks one of these fields. Others may be there too."""

    def checked(name: str, value: Any) -> None:
        fields(name, value)
        for part, of in checks.items():
            if part not in value:
                raise KeyError(f"{name}.{part}")
            of(f"{name}.{part}", value[part])

    return checked


def gpu(name: str, value: Any) -> None:
    """The card."""
    having(title=word, n_sms=count, arch=count)(name, value)
    for part in ("memory_gb", "peak_gb_per_s"):
        or_none(number)(f"{name}.{part}", value.get(part))


def versions(name: str, value: Any) -> None:
    """A text for each package, or none."""
    fields(name, value)
    for part, version in value.items():
        or_none(text)(f"{name}.{part}", version)


def size(name: str, value: Any) -> None:
    """A part of a shape, small enough to be multiplied; pkv.Shape checks what they are together."""
    whole(name, value, 1, MOST_SIZE)


def step(name: str, value: Any) -> None:
    """A step of a load."""
    having(lengths=each(n_tokens))(name, value)
    count(f"{name}.weight", value.get("weight", 1))


CHECKS: dict[str, dict[str, Check]] = {
    "run": {
        "run": word, "grid": grid, "date": text, "gpu": gpu, "versions": versions, "commit": or_none(text),
        "changed": flag, "floor_us": number, "settings": fields, "cpu": text, "platform": text,
    },
    "load": {
        "load": word, "seed": seed, "steps": each(step, 1),
        "shape": having(n_q_heads=size, n_kv_heads=size, head_dim=size, page_size=size, dtype=text),
    },
    "time": {
        "run": word, "load": word, "engine": word, "family": text,
        "plan_us": each(number), "gpu_us": each(gpu_time), "gpu_us_p5": each(number), "gpu_us_p95": each(number),
        "enqueue_us": each(number), "wall_us": each(number),
        "noise": or_none(number), "max_err": or_none(number), "tolerance": or_none(number),
        "workspace_bytes": or_none(whole), "flags": each(text), "settings": fields, "refused": or_none(text),
    },
}  # fmt: skip

"""A Plan as JSON, and back. JSON that is read back is checked like any other input."""

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from pkv.plans.features import Features
from pkv.plans.fields import PlanFields
from pkv.plans.gpu import DEFAULT_TILE, Costs, GpuProfile
from pkv.plans.shape import Shape

FORMAT = 1  # any other is refused


def plan_to_dict(plan: PlanFields) -> dict[str, Any]:
    """Return the plan as a dict of JSON's types."""
    return {
        "format": FORMAT,
        "stage": plan.stage,
        "shape": plan.shape.to_dict(),
        "gpu": asdict(plan.gpu),
        "programs_per_sm": plan.programs_per_sm,
        "tile": plan.tile,
        "dynamic": plan.dynamic,
        "variant": plan.variant,
        "explanation": plan.explanation,
        "fallback": plan.fallback,
        "lengths": plan.lengths.tolist(),
        "items": plan.items.tolist(),
        "program_offsets": plan.program_offsets.tolist(),
        "partial_offsets": plan.partial_offsets.tolist(),
        "item_order": None if plan.item_order is None else plan.item_order.tolist(),
        "launches": [{**vars(launch), "rows": list(launch.rows)} for launch in plan.launches],
    }


def fields_from_json(text: str) -> dict[str, Any]:
    """Read a Plan's fields from JSON, launches still as dicts; ValueError if `text` is no plan or of another format."""
    try:
        data = json.loads(text)
        found = data.pop("format")
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise no_plan(error) from None
    if type(found) is not int or found != FORMAT:
        raise ValueError(f"plan format {found}, this pkv reads {FORMAT}: update pkv, or make the plan again")
    try:
        order, fallback = data.pop("item_order"), data.pop("fallback", None)
        fields = {
            "stage": _of_type(str, "stage", data.pop("stage")),
            "shape": _shape(**data.pop("shape")),
            "gpu": _gpu(**data.pop("gpu")),
            "programs_per_sm": _of_type(int, "programs_per_sm", data.pop("programs_per_sm")),
            "tile": _of_type(int, "tile", data.pop("tile")),
            "dynamic": _of_type(bool, "dynamic", data.pop("dynamic")),
            "variant": _of_type(str, "variant", data.pop("variant", "")),
            "explanation": _of_type(str, "explanation", data.pop("explanation", "")),
            "fallback": None if fallback is None else _of_type(str, "fallback", fallback),
            "items": _array("items", data.pop("items")).reshape(-1, 3),
            "item_order": None if order is None else _array("item_order", order),
            "launches": [_launch(**launch) for launch in data.pop("launches")],
            **{name: _array(name, data.pop(name)) for name in ("lengths", "program_offsets", "partial_offsets")},
        }
        if data:
            raise KeyError(f"unknown field {next(iter(data))!r}")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise no_plan(error) from None
    return fields


def no_plan(error: Exception) -> ValueError:
    """Make the error which says that a text is not a plan's JSON, and why."""
    return ValueError(f"this is not the JSON of a plan ({type(error).__name__}: {error})")


def _of_type(wanted: type, name: str, value: Any) -> Any:
    if type(value) is not wanted:  # isinstance would take a bool for an int
        raise TypeError(f"{name} = {value!r} must be of type {wanted.__name__}")
    return value


def _array(name: str, values: Any) -> npt.NDArray[np.int32]:
    array = np.array(values)
    if array.size and (array.dtype.kind != "i" or array.min() < -(2**31) or array.max() >= 2**31):
        raise TypeError(f"{name} must hold 32-bit integers")
    return array.astype(np.int32)


def _shape(features: dict[str, Any] | None = None, **sizes: Any) -> Shape:
    return Shape(**sizes, features=Features(**(features or {})))


def _gpu(name: str, arch: int, n_sms: int, costs: dict[str, Any] | None, tile: int = DEFAULT_TILE) -> GpuProfile:
    numbers = (_of_type(int, "gpu.arch", arch), _of_type(int, "gpu.n_sms", n_sms))
    known = None if costs is None else Costs(**costs)
    return GpuProfile(_of_type(str, "gpu.name", name), *numbers, known, _of_type(int, "gpu.tile", tile))


def _launch(kernel: str, rows: list[int], begin: int, end: int, n_splits: int) -> dict[str, Any]:
    numbers = {"begin": begin, "end": end, "n_splits": n_splits}
    checked = {name: _of_type(int, f"launches.{name}", number) for name, number in numbers.items()}
    row_ids = tuple(_array("launches.rows", rows).tolist())
    return {"kernel": _of_type(str, "launches.kernel", kernel), "rows": row_ids, **checked}

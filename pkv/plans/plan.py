"""Plan: the value that pkv.plan makes, and that launching, timing, drawing and simulating only read.

fields.py defines its arrays. This file adds the methods that validate, count, compare, print and write a plan.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pkv.plans.as_json import fields_from_json, plan_to_dict
from pkv.plans.counters import Counters, count
from pkv.plans.fields import Launch, PlanFields
from pkv.plans.printing import as_table
from pkv.plans.soundness import first_fault
from pkv.runtime.locks import renew_properties
from pkv.wording.counts import count_of


@renew_properties
@dataclass(frozen=True, eq=False)
class Plan(PlanFields):
    """Which program does which tiles of one decode step. A stage's plan() makes it; pkv.plans.fields has an example.

    lengths int32 [n_rows], tokens; items int32 [n_items, 3] = (row, begin, end); program_offsets int32
    [n_programs + 1]; partial_offsets int32 [n_rows + 1]; item_order int32 [n_items], or None for the listed order;
    launches in order; tile in tokens; gpu and programs_per_sm, for which the plan was made. With `dynamic` the lengths
    are upper bounds, and the kernels read the true ones on the GPU: such a plan serves every step and can be captured
    in a CUDA graph. variant: the kernel, if the stage has several. A plan that stage adaptive chose carries the
    winner's stage, an explanation, and as `fallback` the pkv stage that run() takes if the winner does not work here.
    family, grid_order and merging: whose kernels run the plan, and how they divide the work.
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    @cached_property
    def counters(self) -> Counters:
        return count(self)

    def validate(self) -> "Plan":
        """Return self; ValueError unless each token of each row is covered exactly once and all arrays agree."""
        fault = first_fault(self)
        if fault:
            raise ValueError(f"plan of stage {self.stage!r}: {fault}")
        return self

    def diff(self, other: "Plan") -> list[str]:
        """List the differences from another plan, one readable line each; empty for equal plans."""
        if not isinstance(other, Plan):
            raise TypeError(f"other must be a pkv.Plan, got {type(other).__name__}")
        lines = []
        others = other.to_dict()
        for name, mine in self.to_dict().items():
            theirs = others[name]
            if mine == theirs:
                continue
            if isinstance(mine, list) and isinstance(theirs, list):
                if len(mine) != len(theirs):
                    lines.append(f"{name}: {len(mine)} against {count_of(len(theirs), 'entry')}")
                first = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
                if first is not None:
                    lines.append(f"{name}[{first}]: {mine[first]} against {theirs[first]}")
            else:
                lines.append(f"{name}: {mine} against {theirs}")
        return lines

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.stage, self.shape, self.items.tobytes(), self.lengths.tobytes()))

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a dict of JSON's types."""
        return plan_to_dict(self)

    def to_json(self) -> str:
        """Return the plan as JSON; from_json makes an equal plan from it."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read a plan from to_json's text; ValueError if it is no plan, has another format, or does not validate."""
        fields = fields_from_json(text)
        launches = tuple(Launch(**launch) for launch in fields.pop("launches"))
        return cls(launches=launches, **fields).validate()

    def __str__(self) -> str:
        return as_table(self)

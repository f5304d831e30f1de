"""Features: what a model's attention does beyond the plain softmax over all tokens of a row, as one value.

A Shape carries its Features, so plans, checks, drawings and costs all read them from one place. Features hold facts
only: they are compared, hashed and written as JSON. What a feature needs besides, at run time, is in Values: a plan of
Features(soft_cap=True) serves any cap.

A feature that is off costs nothing: kernels compile without it, and JSON leaves it out.
"""

import numbers
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from pkv.wording.checks import at_least

LARGEST_CAP = 1e30  # multiplied by log2(e) it must still fit fp32


@dataclass(frozen=True)
class Features:
    """The features of a model's attention; the defaults are plain attention.

    window: tokens that a query sees, the last ones of its row and itself among them; None: all. soft_cap: whether
    scores are capped, cap * tanh(score / cap).

    >>> Features(window=4096)
    Features(window=4096)
    """

    window: int | None = None
    soft_cap: bool = False

    def __post_init__(self) -> None:
        if self.window is not None:
            object.__setattr__(self, "window", at_least(1, "window", self.window))
        if type(self.soft_cap) is not bool:
            raise TypeError(
                f"Features.soft_cap must be True or False, got {self.soft_cap!r}: the cap is given to run()"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the features that are on, by name."""
        return {name: value for name, value in asdict(self).items() if value != getattr(PLAIN, name)}

    def __repr__(self) -> str:
        return f"Features({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"


PLAIN = Features()


class Values(NamedTuple):
    """What features need at run time, None if they are off. soft_cap: the cap of the scores, above 0."""

    soft_cap: float | None = None


NO_VALUES = Values()


def features_and_values(window: int | None, soft_cap: float | None) -> tuple[Features, Values]:
    """Return the arguments of plan(), run() and decode() as Features, and the values that they need at run time."""
    if window is None and soft_cap is None:
        return PLAIN, NO_VALUES
    if soft_cap is not None:
        is_number = isinstance(soft_cap, numbers.Real) and not isinstance(soft_cap, bool)
        if not is_number or not 0 < soft_cap <= LARGEST_CAP:
            raise ValueError(
                f"soft_cap = {soft_cap!r} must be a number above 0, up to {LARGEST_CAP:.0e} (None = no cap)"
            )
        soft_cap = float(soft_cap)
    return Features(window, soft_cap is not None), Values(soft_cap)

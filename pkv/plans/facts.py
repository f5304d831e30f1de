"""Facts about a stage that readers of its plans need: simulation, costs and drawings ask these, never its name."""

from enum import Enum
from typing import NamedTuple


class Family(Enum):
    """Whose kernels run a plan: PyTorch's, pkv's or FlashInfer's."""

    TORCH = "torch"  # no kernel of pkv's: PyTorch computes the result
    PKV = "pkv"
    FLASHINFER = "flashinfer"


class GridOrder(Enum):
    """The axis of a decode launch's grid that runs fastest."""

    HEADS_FIRST = "heads first"  # neighbouring programs take the heads of one item
    ITEMS_FIRST = "items first"  # neighbouring programs take the items of one head


class Merging(Enum):
    """How a merge launch divides its work among programs."""

    BY_ROW = "by row"  # one program for each query head of a row
    BY_CUT = "by cut"  # one program for each cut between two items of a row, and each grid head


class Facts(NamedTuple):
    """The facts about one stage; the defaults hold for most."""

    family: Family = Family.PKV
    grid_order: GridOrder = GridOrder.HEADS_FIRST
    merging: Merging = Merging.BY_ROW


FACTS: dict[str, Facts] = {}  # by stage; pkv/stages fills it with what each stage says of itself

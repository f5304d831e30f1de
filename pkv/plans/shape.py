"""Shape: the sizes and dtypes of a model's attention, which do not change from step to step."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from pkv.plans.features import PLAIN, Features
from pkv.wording.checks import at_least, dtype_named
from pkv.wording.counts import count_of

HEADS_PER_PROGRAM = 32  # query heads; more would not fit a program's registers


@dataclass(frozen=True)
class Shape:
    """The sizes and dtypes of a model's attention, which do not change from step to step.

    n_q_heads, n_kv_heads (a divisor of n_q_heads), head_dim (elements), page_size (tokens); dtype of q and of the
    result, kv_dtype of the cache (None: the same). A dtype may be torch's, a name as in
    Shape(32, 8, 128, 16, "float16"), or numpy's, np.float16. features: what the attention does beyond a plain softmax.
    """

    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None
    features: Features = PLAIN

    def __post_init__(self) -> None:
        for name in ("n_q_heads", "n_kv_heads", "head_dim", "page_size"):
            object.__setattr__(self, name, at_least(1, name, getattr(self, name)))
        if self.n_q_heads % self.n_kv_heads:
            raise ValueError(
                f"n_q_heads = {self.n_q_heads} is not a multiple of n_kv_heads = {self.n_kv_heads}: "
                "each KV head serves the same number of query heads"
            )
        dtype = dtype_named(self.dtype)
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "kv_dtype", dtype if self.kv_dtype is None else dtype_named(self.kv_dtype))
        if not isinstance(self.features, Features):
            raise TypeError(f"features must be a pkv.Features, got {type(self.features).__name__}")

    @staticmethod
    def of(q: torch.Tensor, cache: Any, features: Features = PLAIN) -> "Shape":
        """Return the shape of q [n_rows, n_q_heads, head_dim] and a PagedKVCache, with these features."""
        if not isinstance(q, torch.Tensor) or q.ndim != 3:
            raise ValueError("q must be a tensor [n_rows, n_q_heads, head_dim]")
        return _made(q.shape[1], cache.n_kv_heads, cache.head_dim, cache.page_size, q.dtype, cache.dtype, features)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.n_q_heads // self.n_kv_heads

    @property
    def head_blocks(self) -> int:
        """Programs that share one KV head's group: one per 32 query heads, or one per query head in fp32."""
        return self.group if self.dtype == torch.float32 else -(-self.group // HEADS_PER_PROGRAM)

    @property
    def grid_heads(self) -> int:
        """Programs per item, which is the size of the grid's head axis."""
        return self.n_kv_heads * self.head_blocks

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token, over all KV heads."""
        assert self.kv_dtype is not None
        return 2 * self.n_kv_heads * self.head_dim * self.kv_dtype.itemsize

    def to_dict(self) -> dict[str, Any]:
        return {
            "n_q_heads": self.n_q_heads,
            "n_kv_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "page_size": self.page_size,
            "dtype": str(self.dtype).removeprefix("torch."),
            "kv_dtype": str(self.kv_dtype).removeprefix("torch."),
            **({} if self.features == PLAIN else {"features": self.features.to_dict()}),
        }

    def __str__(self) -> str:
        kv = "" if self.kv_dtype == self.dtype else f" (cache {str(self.kv_dtype).removeprefix('torch.')})"
        features = self.features.to_dict().items()
        return (
            f"{count_of(self.n_q_heads, 'query head')}, {count_of(self.n_kv_heads, 'KV head')}, "
            f"head_dim {self.head_dim}, pages of {self.page_size}, {str(self.dtype).removeprefix('torch.')}{kv}"
            + "".join(f", {name} {value}" if value is not True else f", {name}" for name, value in features)
        )


def with_features(shape: Shape, features: Features) -> Shape:
    """Return the shape with these features; ValueError if it has other ones already."""
    if shape.features == features or features == PLAIN:
        return shape
    if shape.features != PLAIN:
        raise ValueError(f"shape has {shape.features}, and the call {features}: name the features in one place")
    return replace(shape, features=features)


@functools.lru_cache(maxsize=256)
def _made(*sizes: Any) -> Shape:
    """Make a shape, or return it from the cache: the same shapes recur at every step, so each is checked once."""
    return Shape(*sizes)

"""The tile loop and its pieces, by the name under which parts of others (pkv.Parts) import them."""

from pkv.kernels.tile import (
    LOG2_E,
    CacheArgs,
    KernelShape,
    StateArgs,
    Strided,
    attend_tile,
    attend_tokens,
    find_pages,
    load_query,
    load_tile,
    my_heads,
    state_pointers,
    store_empty,
    store_state,
)

__all__ = [
    "LOG2_E",
    "CacheArgs",
    "KernelShape",
    "StateArgs",
    "Strided",
    "attend_tile",
    "attend_tokens",
    "find_pages",
    "load_query",
    "load_tile",
    "my_heads",
    "state_pointers",
    "store_empty",
    "store_state",
]

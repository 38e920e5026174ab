"""Sums of different lengths in one tile, each with the bits that `halve` gives it alone.

`halve` adds the last half to the first until one summand is left, so its order depends on the length, and filling up at
the end would change it. Here a sum's summands go to places of a longer tile that are chosen so that halving the tile
brings the same two together in every round. The other places hold -0.0, which added to any number leaves its bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

#: What unused places hold: x + -0.0 is x for every x, -0.0 included.
NEUTRAL = -0.0


def rounded_up(length: int, rounds: int) -> int:
    """What is left of a sum of `length` summands after some rounds of halving."""
    return -(-length >> rounds)


def tile_size(lengths: Sequence[int]) -> int:
    """The shortest tile for sums of these lengths, each at least 1: one that is as long as each of them after some
    rounds, and even before each of those."""
    short, long, rounds = min(lengths), max(lengths), 0
    while rounded_up(short, rounds) != rounded_up(long, rounds):
        rounds += 1
    return rounded_up(long, rounds) << rounds


@lru_cache(maxsize=4096)
def places(length: int, size: int) -> NDArray[np.int64]:
    """Where the summands of a sum go in a tile of `size`, a `tile_size` of lengths among which it is; int64 `[length]`,
    read-only."""
    if length == size:
        found = np.arange(length)
    else:
        first = places(length - length // 2, size // 2)
        found = np.concatenate([first, first[: length // 2] + size // 2])
    found.flags.writeable = False
    return found

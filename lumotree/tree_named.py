"""Trees known by name, and seeded random ones. Keyword arguments go to `Tree.make`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import numpy as np

from lumotree import tree_validate as check
from lumotree.errors import TreeError
from lumotree.tree import Tree, TreeFields

# fmt: off
_HYDRA27_PARENTS = (
    -1, 0, 0, 0, 1, 1, 1, 2, 3, 4, 4, 4, 7, 8, 9, 9,
    9, 12, 13, 14, 14, 14, 17, 18, 19, 23, 24, 25, 26, 28, 29, 30,
)
# fmt: on
_HYDRA27_INACTIVE = (18, 23, 25, 27)

MAX_NAMED_ROWS = 4096
"""Most rows that `named` makes, so that a typing slip on the command line does not fill the memory."""


def hydra27(**fields: Unpack[TreeFields]) -> Tree:
    """Return the published "Hydra27": 32 physical rows, depth 11; rows 18, 23, 25 and 27 are inactive."""
    active = np.ones(len(_HYDRA27_PARENTS), np.bool_)
    active[list(_HYDRA27_INACTIVE)] = False
    return Tree.make(_HYDRA27_PARENTS, **TreeFields(**{"active": active, **fields}))


def mtp5(**fields: Unpack[TreeFields]) -> Tree:
    """Return the root and five drafts in a chain: 6 rows."""
    return chain(6, **fields)


def chain(n: int, **fields: Unpack[TreeFields]) -> Tree:
    """Return `n` rows, each the child of the one before."""
    return Tree.make(np.arange(_size("chain", n)) - 1, **fields)


def star(n: int, **fields: Unpack[TreeFields]) -> Tree:
    """Return `n` rows: the root and `n - 1` children of it."""
    return Tree.make([-1] + [0] * (_size("star", n) - 1), **fields)


def comb(n: int, **fields: Unpack[TreeFields]) -> Tree:
    """Return a spine of `n` rows, each with one side leaf: 2n rows; spine row i is row 2i, its leaf 2i + 1.

    The spine goes on at the *second* child, so that first-child shortcuts show.
    """
    parents = [parent for i in range(_size("comb", n)) for parent in (2 * i - 2, 2 * i)]
    return Tree.make([-1, *parents[1:]], **fields)


def complete_binary(depth: int, **fields: Unpack[TreeFields]) -> Tree:
    """Return the complete binary tree with 2^(depth+1) - 1 rows, level by level."""
    rows = 2 ** (check.integer("depth", depth, 0) + 1) - 1
    return Tree.make([-1, *((row - 1) // 2 for row in range(1, rows))], **fields)


def _size(name: str, n: int) -> int:
    return check.integer(f"size of {name}", n, 1)


_FIXED: dict[str, Callable[..., Tree]] = {"hydra27": hydra27, "mtp5": mtp5}
_SIZED: dict[str, tuple[Callable[..., Tree], int, int]] = {  # maker, least and largest size
    "chain": (chain, 1, MAX_NAMED_ROWS),
    "star": (star, 1, MAX_NAMED_ROWS),
    "comb": (comb, 1, MAX_NAMED_ROWS // 2),
    "binary": (complete_binary, 0, MAX_NAMED_ROWS.bit_length() - 2),
}


def named(spec: str, **fields: Unpack[TreeFields]) -> Tree:
    """Return the tree that `spec` names: "hydra27", "mtp5", "chain:N", "star:N", "comb:N" or "binary:DEPTH".

    Raises TreeError listing what is allowed if the name is unknown or its size is missing, malformed or too
    large.
    """
    name, colon, size = spec.strip().lower().partition(":")
    if name in _FIXED and not colon:
        return _FIXED[name](**fields)
    if name in _SIZED and size.isascii() and size.isdigit():
        make, least, largest = _SIZED[name]
        if len(size) <= 9 and least <= int(size) <= largest:
            return make(int(size), **fields)
    sized = (f"{name}:{least}..{largest}" for name, (_, least, largest) in _SIZED.items())
    raise TreeError(f"unknown tree {spec!r}; allowed: {', '.join((*_FIXED, *sized))}")


def random_tree(rng: np.random.Generator, n: int, inactive_fraction: float = 0.0, **fields: Unpack[TreeFields]) -> Tree:
    """Return a random tree of `n` rows whose shape is itself drawn: chain-like, bushy, or anything between.

    Exactly floor(inactive_fraction * n) rows are inactive (the root never is), closed under descendants. The
    same state of `rng` gives the same tree. Raises TreeError if `n` < 1 or the fraction is outside [0, 1).
    """
    if not 0 <= inactive_fraction < 1:
        raise TreeError(f"inactive_fraction must be in [0, 1), got {inactive_fraction}")
    straight = rng.choice((0.0, 0.3, 0.6, 0.9))  # probability of extending the newest row
    window = int(rng.choice((2, 4, max(_size("random tree", n), 4))))  # other parents: among this many rows,
    near_root = rng.random() < 0.4  # either the first ones (bushy) or the newest ones (deep)
    parents = [-1]
    for row in range(1, n):
        offset = int(rng.integers(0, min(row, window)))
        extend = rng.random() < straight or not (near_root or offset)
        parents.append(row - 1 if extend else offset if near_root else row - 1 - offset)
    active = _peel(rng, parents, int(inactive_fraction * n))
    return Tree.make(parents, **TreeFields(**{"active": active, **fields}))


def _peel(rng: np.random.Generator, parents: list[int], count: int) -> list[bool]:
    """Deactivate `count` rows one at a time, each a leaf of what is still active."""
    active = [True] * len(parents)
    live_children = [0] * len(parents)
    for parent in parents[1:]:
        live_children[parent] += 1
    for _ in range(min(count, len(parents) - 1)):
        leaves = [row for row in range(1, len(parents)) if active[row] and not live_children[row]]
        row = int(rng.choice(leaves))
        active[row] = False
        live_children[parents[row]] -= 1
    return active

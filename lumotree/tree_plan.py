"""Path plans: a tree cut into root-ward paths that a path-parallel verifier can run.

A path is a run of parent-linked active rows. All paths of a level are independent of each other: each starts
either from the committed state or from the state that a row of an *earlier* level exported (a cut).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from lumotree.errors import TreeError

PlanLevels = Literal["many", "one"]
COMMITTED = -1


@dataclass(frozen=True)
class Path:
    """`rows`, each the parent of the next; `source` is the parent of the first one, -1 = committed state."""

    source: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class PathPlan:
    """Levels run one after another, paths of a level in parallel.

    `levels[l]` holds the paths of level `l`; `cuts` are the rows, ascending, whose state some path starts
    from.
    """

    levels: tuple[tuple[Path, ...], ...]
    cuts: tuple[int, ...]

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """All paths, level by level."""
        return tuple(path for level in self.levels for path in level)

    @cached_property
    def num_rows(self) -> int:
        """Rows computed in all; with one level, a row counts once for every leaf below it."""
        return sum(len(path.rows) for path in self.paths)

    @staticmethod
    def max_levels_bound(n: int) -> int:
        """Return the largest number of levels that "many" can need for a tree of `n` active rows.

        What follows the end of a heavy path is one unbranched level, so L > 2 levels hang on a light child with
        L-1 levels of its own. That subtree is L-1 rows deep or more, and so is its heavy sibling: L levels take
        1 + (rows for L-1) + (L-1) rows, L(L+1)/2 in all. The bound is reached.
        """
        return (math.isqrt(8 * n + 1) - 1) // 2


def make_plan(children: Sequence[Sequence[int]], to_leaves: Sequence[tuple[int, ...]], levels: str) -> PathPlan:
    """Return the plan of a tree.

    `children[row]` are the active children, none for an inactive row; `to_leaves` are the root-to-leaf paths.

    "many": a path follows the heavy child (deepest active subtree, first on ties) and ends at the last
    branching row of that heavy path, at the leaf if none branches; every active child left over starts a path
    one level later. "one": a single level holding each root-to-leaf path whole, from the committed state,
    without cuts. Raises TreeError for another value of `levels`.
    """
    if levels == "one":
        return PathPlan((tuple(Path(COMMITTED, rows) for rows in to_leaves),), ())
    if levels == "many":
        return _many_levels(children)
    raise TreeError(f"unknown plan {levels!r}; allowed: 'many', 'one'")


def _many_levels(children: Sequence[Sequence[int]]) -> PathPlan:
    heavy = _heavy_children(children)
    levels: list[tuple[Path, ...]] = []
    starts = [(COMMITTED, 0)]
    while starts:
        level = tuple(Path(source, _run(row, heavy, children)) for source, row in starts)
        levels.append(level)
        starts = [start for path in level for start in _left_over(path, children)]
    cuts = {path.source for level in levels for path in level} - {COMMITTED}
    return PathPlan(tuple(levels), tuple(sorted(cuts)))


def _heavy_children(children: Sequence[Sequence[int]]) -> list[int]:
    """Return each row's child with the deepest subtree, first on ties; -1 for a leaf."""
    height = [0] * len(children)
    heavy = [-1] * len(children)
    for row in reversed(range(len(children))):  # children come after their parent
        if children[row]:
            heavy[row] = max(children[row], key=height.__getitem__)  # max keeps the first of equals
            height[row] = 1 + height[heavy[row]]
    return heavy


def _run(start: int, heavy: Sequence[int], children: Sequence[Sequence[int]]) -> tuple[int, ...]:
    rows, end, row = [], 0, start
    while row != -1:
        rows.append(row)
        if len(children[row]) > 1:
            end = len(rows)
        row = heavy[row]
    return tuple(rows[: end or len(rows)])


def _left_over(path: Path, children: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    on_path = set(path.rows)
    return [(row, child) for row in path.rows for child in children[row] if child not in on_path]

"""What is forced: which row of which tree ends the accepted path in which cycle of which schedule.

6 prefixes x 3 schedules x 7 cycles (contract section 6). The last cycle of a schedule accepts its root alone. Of the 36
other cycles of each kind of schedule, 27 end at the rows of `hydra27` below its root, each once, in an order of their
own; the rest end where live decoding ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lumotree.tree import Tree
from lumotree.tree_named import hydra27

KINDS = ("cold", "repeat", "resumed")
PREFIXES, CYCLES = 6, 7

#: Ends where live decoding ends.
LIVE = -1


@dataclass(frozen=True)
class Forced:
    """One cycle: a tree with tokens (row 0 pending), the accepted path, and the row where live decoding ended."""

    tree: Tree
    path: tuple[int, ...]
    live: int

    @property
    def end(self) -> int:
        """The last accepted row."""
        return self.path[-1]

    @property
    def tokens(self) -> list[int]:
        """Tokens that the cycle commits."""
        return [int(t) for t in self.tree.tokens[list(self.path)]]


@dataclass(frozen=True)
class Script:
    """One schedule of one request. number: of the request. kind: one of KINDS, "mixed" or "batch". prompt: tokens.
    chunk: prompt tokens fed in one cycle. cycles: in order. pending: the token that stays pending behind the last."""

    name: str
    number: int
    kind: str
    prompt: tuple[int, ...]
    chunk: int
    cycles: tuple[Forced, ...]
    pending: int

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Committed tokens after the prompt and after each cycle."""
        lengths = [len(self.prompt), *(len(c.path) for c in self.cycles)]
        return tuple(np.cumsum(lengths).tolist())

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Everything that is committed, and the last pending token."""
        return (*self.prompt, *(t for c in self.cycles for t in c.tokens), self.pending)

    def pending_after(self, cycle: int) -> int:
        """The pending token behind a cycle, or behind the prompt for -1."""
        return self.tokens[self.bounds[cycle + 1]]


def planned_ends(kind: str, seed: int, tree: Tree | None = None) -> list[list[int]]:
    """End of each cycle `[PREFIXES][CYCLES]` for a kind of schedule: rows of the tree, LIVE, and 0 at the end.

    Every active row of the tree is an end at least once. Raises ValueError for a tree with too many rows.
    """
    rows = [r for r in (tree or hydra27()).active_rows if r]
    free = PREFIXES * (CYCLES - 1)
    if len(rows) > free:
        raise ValueError(f"plan: expected at most {free} rows below the root, got {len(rows)}")
    rng = np.random.default_rng(np.random.SeedSequence([seed, 41, KINDS.index(kind)]))
    order = rng.permutation([*rows, *[LIVE] * (free - len(rows))]).tolist()
    return [[*order[p::PREFIXES], 0] for p in range(PREFIXES)]


def uncovered(scripts: Sequence[Script], tree: Tree | None = None) -> dict[str, list[int]]:
    """Kind of schedule -> active rows at which none of its cycles ends; kinds that miss none are left out."""
    rows = (tree or hydra27()).active_rows
    missing = {}
    for kind in KINDS:
        ends = {c.end for s in scripts if s.kind == kind for c in s.cycles}
        if gap := [r for r in rows if r not in ends]:
            missing[kind] = gap
    return missing

"""What a selection reads and returns: shared by the rules, their faults and their audits.

One *step* is one verified tree: a target row for every tree row, drafted tokens, and the law they were drawn from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lumotree.tree import Tree


@dataclass(frozen=True)
class Coins:
    """Uniform numbers in [0, 1), float64 `[W, N]` for W walks over a tree of N rows.

    accept[w, r]: the coin of row r as a candidate (row 0 never needs one). residual[w, r]: the coin with which a token
    is drawn at row r when the walk ends there (or, for the naive rule, at every row visited).
    """

    accept: Tensor
    residual: Tensor


@dataclass(frozen=True)
class Step:
    """One verified tree.

    tree: topology; only active rows take part; children of a row are tried in row order. `tree.tokens` are the drafted
    tokens where the draft is fixed.
    target: float64 `[N, V]`, row r = law of the token after row r (filters already applied); rows sum to 1.
    laws: float64 `[N, V]` or None. Row r = declared law of the first child of row r; each later child carries that law
    without the earlier siblings' tokens, renormalised (contract section 7). None: every child is a point mass on its
    token (deterministic draft).
    """

    tree: Tree
    target: Tensor
    laws: Tensor | None = None


@dataclass(frozen=True)
class Walks:
    """Outcome of W selections on one step, int64 `[W]` unless said otherwise.

    last: last accepted row, 0 = root alone (row 0 is always accepted). bonus: the new pending token, drawn at `last`,
    not materialised. refused: bool `[W]`, whether some child of `last` was tried and refused. tokens: int64 `[W, N]`,
    the drafted tokens of each walk, or `[1, N]` where they were fixed.
    """

    last: Tensor
    bonus: Tensor
    refused: Tensor
    tokens: Tensor


class CoinSampler(Protocol):
    """A sampler that takes its coins as an argument: a pure function."""

    def select(self, step: Step, tokens: Tensor, coins: Coins) -> Walks:
        """Select on W walks. tokens: int64 `[W, N]` or `[1, N]` drafted tokens. Raises InputError for bad rows."""
        ...


class ClosedSampler(Protocol):
    """A sampler with its own generator (and, for stochastic drafts, its own drafter)."""

    def walk(self, step: Step, walks: int, seed: int) -> Walks:
        """Draw W independent selections."""
        ...

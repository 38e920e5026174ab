"""A likelihood-ratio e-process against a known fault, walk by walk, and the log likelihood ratios that feed it.

Under the clean law the product of the ratios fault / clean is a nonnegative martingale that starts at 1, so it ever
reaches 1 / level with probability at most `level` (Ville's inequality): it may be watched and stopped at any time.
Its inverse bounds the other error in the same way: once it reaches 1 / level, the fault's law is *excluded*.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log

import numpy as np
from numpy.typing import NDArray

from audit.rule_law import RuleLaw, TokenLaw
from lumotree.errors import InputError
from lumotree.select_types import Walks

Floats = NDArray[np.float64]

Alternative = Callable[[Walks], Floats]
"""Log likelihood ratio, fault over clean, of each walk [W], in nats; +inf where the clean law forbids the outcome."""


@dataclass
class EProcess:
    """Running evidence for one fault. level: error probability of each of the two decisions.

    log_e: log of the e-value after `walks` walks, nats; accused_at, excluded_at: the walk (from 1) at which it first
    reached 1 / level or level, None before.
    """

    name: str
    level: float
    log_e: float = 0.0
    walks: int = 0
    accused_at: int | None = None
    excluded_at: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.level < 1:
            raise InputError(f"e-process {self.name!r}: expected a level in (0, 1), got {self.level}")

    def update(self, log_ratios: Floats) -> None:
        """Take in the log ratios [W] of the next walks, in their order."""
        if not len(log_ratios):
            return
        with np.errstate(invalid="ignore"):
            path = self.log_e + np.cumsum(log_ratios)
        path = np.where(np.isnan(path), -np.inf, path)  # inf - inf: a product that was 0 stays 0
        limit = log(1 / self.level)
        self.accused_at = self.accused_at or self._first(path >= limit)
        self.excluded_at = self.excluded_at or self._first(path <= -limit)
        self.log_e = float(path[-1])
        self.walks += len(path)

    def _first(self, hit: NDArray[np.bool_]) -> int | None:
        return self.walks + int(np.argmax(hit)) + 1 if hit.any() else None

    @property
    def state(self) -> str:
        """Which decision has been made: "accused", "excluded" or "open"."""
        if self.accused_at is not None:
            return "accused"
        return "open" if self.excluded_at is None else "excluded"


class LogRatio:
    """The `Alternative` of a fault whose law is known row by row.

    fault, clean: laws on one tree. Logarithms are taken of what walks showed, not of whole laws. Holds the clean law,
    which all alternatives of a step share, and the rows whose bonus law the fault changes, in 4 bytes a token (2^-24 of
    each probability off). Drafts that were refused are not looked at: they are averaged over.
    """

    def __init__(self, fault: RuleLaw, clean: RuleLaw) -> None:
        if fault.tree.parents.tolist() != clean.tree.parents.tolist() or fault.bonus.shape != clean.bonus.shape:
            raise InputError("log ratio: expected the laws of fault and clean rule on one tree and vocabulary")
        self._ancestors = clean.tree.ancestors
        self._rows = clean.tree.active_rows[1:]
        self._child = {row: _token_ratio(fault.child[row], clean.child[row]) for row in self._rows}
        self._clean = clean.bonus
        self._changed = {
            row: fault.bonus[row].astype(np.float32)
            for row in clean.tree.active_rows
            if not np.array_equal(fault.bonus[row], clean.bonus[row])
        }

    def __call__(self, walks: Walks) -> Floats:
        """Return the log ratio of each walk [W]; outcomes must lie in the tree and the vocabulary."""
        last, bonus = walks.last.numpy(), walks.bonus.numpy()
        tokens = np.broadcast_to(walks.tokens.numpy(), (len(last), walks.tokens.shape[1]))
        right = self._clean[last, bonus]
        wrong = right.copy()
        for row, law in self._changed.items():
            here = np.flatnonzero(last == row)
            wrong[here] = law[bonus[here]]
        total = log_ratio(wrong, right)
        with np.errstate(invalid="ignore"):
            for row in self._rows:
                visited = np.flatnonzero(self._ancestors[last, row])
                total[visited] += self._child[row].at(tokens[visited, row])
        return np.where(np.isnan(total), 0.0, total)


def _token_ratio(fault: TokenLaw, clean: TokenLaw) -> TokenLaw:
    tokens = np.union1d(fault.tokens, clean.tokens)
    return TokenLaw(tokens, log_ratio(fault.at(tokens), clean.at(tokens)))


def log_ratio(fault: Floats, clean: Floats) -> Floats:
    """Return log(fault / clean), 0 where both laws are 0: neither explains such an outcome."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log(fault) - np.log(clean)
    return np.where((fault == 0) & (clean == 0), 0.0, ratio)

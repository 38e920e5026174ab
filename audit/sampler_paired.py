"""A sampler with coins beside the clean rule, walk by walk on the same coins: far fewer walks than a test of its own.

If both have one law, then for every event the walks in which only the first shows it and those in which only the second
does are equally likely (McNemar, Psychometrika 12, 1947): an exact sign test on the walks that differ. A fault of total
variation d moves about n d walks, nearly all one way: n of about ln(1/level)/d is enough, not ln(1/level)/(2d^2).

Whatever the sampler does, TV is at most the probability that the two differ, so a sampler that never differs in n walks
has TV <= ln(1/level)/n with confidence 1 - level; in general the Clopper-Pearson bound of the rate (Biometrika 26,
1934). Another map from coins to tokens may differ in every walk with the right law: then the bound says nothing, and
the sign tests and Monte Carlo judge it.

Pairs are independent if the sampler treats walks apart; that is part of being right.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from audit.sampler_guard import CoinWalker
from audit.walk_tally import CLASSES as QUARTERS
from audit.walk_tally import quarters
from lumotree.select_types import CoinSampler, Step, Walks

Ints = NDArray[np.int64]

BANDS = 12
"""Bands of probability that are told apart, one for each factor of 2; the last holds the rest."""


@dataclass(frozen=True)
class PairedResult:
    """walks: pairs; differ: pairs with another outcome; upper: bound on TV at confidence 1 - level; p_value: the least
    of `tests` sign tests, times their number; event: which one; more, fewer: walks in which only the sampler, only the
    rule showed it."""

    walks: int
    differ: int
    upper: float
    level: float
    p_value: float
    tests: int
    event: str
    more: int
    fewer: int

    @property
    def rejects(self) -> bool:
        """Whether the two laws differ, at the stated level."""
        return self.p_value <= self.level


def paired(sampler: CoinSampler, rule: CoinSampler, step: Step, walks: int, level: float, seed: int) -> PairedResult:
    """Compare a sampler with the clean rule on the same drafts and coins. level: of all sign tests together."""
    source = CoinWalker(rule)
    tokens, coins = source.inputs(step, walks, seed)
    ours, clean = sampler.select(step, tokens, coins), rule.select(step, tokens, coins)
    mine, his = (_events(step, each) for each in (ours, clean))
    differ = int(_different(ours, clean).sum())
    only, other = np.zeros((2, mine.size), np.int64)
    _count(only, mine, his)
    _count(other, his, mine)
    tested = np.flatnonzero(only + other)
    less, both = np.minimum(only, other)[tested], (only + other)[tested]
    values = np.minimum(1.0, 2 * stats.binom.cdf(less, both, 0.5))  # two-sided and exact, the null being symmetric
    best = int(np.argmin(values)) if len(values) else -1
    return PairedResult(
        walks,
        differ,
        upper_rate(differ, walks, level),
        level,
        float(min(1.0, values[best] * mine.size)) if len(values) else 1.0,
        mine.size,
        mine.name(int(tested[best])) if len(values) else "",
        int(only[tested[best]]) if len(values) else 0,
        int(other[tested[best]]) if len(values) else 0,
    )


def upper_rate(hits: int, n: int, level: float) -> float:
    """Return the Clopper-Pearson upper bound, at confidence 1 - level, of a rate that showed `hits` in n."""
    return 1.0 if hits >= n else float(stats.beta.isf(level, hits + 1, n - hits))


def _different(a: Walks, b: Walks) -> NDArray[np.bool_]:
    differs = (a.last != b.last) | (a.bonus != b.bonus) | (a.refused != b.refused)
    return np.asarray(differs.cpu().numpy(), np.bool_)


@dataclass(frozen=True)
class _Events:
    """Which of `size` events each walk shows: codes [K, W], -1 = none of that kind."""

    codes: Ints
    size: int
    rows: int

    def name(self, event: int) -> str:
        """Return an event in words."""
        for kind, classes, rows in _kinds(self.rows):
            if event < classes * rows:
                place = f" at row {event // classes}" if rows > 1 else ""
                return f"{kind} {event % classes}{place}"
            event -= classes * rows
        raise IndexError(event)


def _kinds(n: int) -> tuple[tuple[str, int, int], ...]:
    """The kinds of event in order: name, classes, rows that have classes of their own (1: all rows together)."""
    kinds = (("bonus of rank class", BANDS + 1), ("bonus in quarter", QUARTERS + 1))
    split = tuple((name, classes, rows) for rows in (1, n) for name, classes in kinds)
    return ("walk ends at row", n + 1, 1), *split


def _events(step: Step, walks: Walks) -> _Events:
    """Ends: the last row, N = outside the tree. Bands: how likely the bonus is in the row it was drawn at. Quarters:
    where it lies on that row's cumulative law in order of tokens. Both over all rows, so that a small shift adds up,
    and row by row. A token outside the vocabulary has the class after the last."""
    n, vocab = step.target.shape
    last, bonus = (x.cpu().numpy().astype(np.int64) for x in (walks.last, walks.bonus))
    inside = (last >= 0) & (last < n)
    row = np.where(inside, last, 0)
    known = inside & (bonus >= 0) & (bonus < vocab)
    band, quarter = np.full(len(last), BANDS), np.full(len(last), QUARTERS)
    for r in np.unique(row[known]).tolist():
        here = np.flatnonzero(known & (row == r))
        target = step.target[r].numpy()
        mass = target[bonus[here]]
        rank = np.where(mass > 0, -np.frexp(np.where(mass > 0, mass, 1.0))[1], BANDS)
        band[here] = np.clip(rank, 0, BANDS)
        quarter[here] = quarters(target)[bonus[here]]
    ends = np.where(inside, row, n)
    codes, start = [], 0
    for (_, classes, rows), code in zip(
        _kinds(n), (ends, band, quarter, row * (BANDS + 1) + band, row * (QUARTERS + 1) + quarter), strict=True
    ):
        codes.append(start + code)
        start += classes * rows
    return _Events(np.stack(codes), start, n)


def _count(counts: Ints, mine: _Events, other: _Events) -> None:
    """Add the walks in which an event is shown by `mine` and not by `other`."""
    for ours, theirs in zip(mine.codes, other.codes, strict=True):
        counts += np.bincount(ours[ours != theirs], minlength=len(counts))

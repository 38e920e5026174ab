"""Tests of counts against a law, with p-values that hold far out in the tail and for small expected counts.

The statistic is G = 2 sum x ln(x / e), because its tail stays honest where ours lies (1e-9): for two cells the Chernoff
bound gives P(G >= g) <= 2 exp(-g / 2) at *any* expected count, whereas Pearson's X^2 overstates an upward surprise in a
cell that expects 5 by tens of orders of magnitude.

The chi-square law of G is not accurate at an expected count of 5: each such cell adds 1 + 1/30 to the mean instead of
1, which at 2,000 cells is a whole standard deviation. So the null law is a shifted gamma law with the first three
cumulants of G: those of one Poisson deviance per cell, summed, less that of the fixed total (Koehler and Larntz,
"An empirical investigation of goodness-of-fit statistics for sparse multinomials", 1980). For large expected counts it
*is* the chi-square law with K - 1 degrees of freedom. Two cells are judged by the exact binomial law instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MIN_EXPECTED = 5.0
"""Cells that expect less are pooled (published audit, contract section 6)."""

_TABLE_FROM, _TABLE_TO, _TABLE_SIZE = 0.5, 2000.0, 240


@dataclass(frozen=True)
class Outcome:
    """One test: statistic G (nats * 2; NaN where the exact law was used), p-value, degrees of freedom, sample size n,
    `worst` = the cell that adds most, with its observed and expected counts."""

    statistic: float
    p_value: float
    df: int
    n: int
    worst: int
    observed: float
    expected: float


def g_test(observed: ArrayLike, law: ArrayLike) -> Outcome | None:
    """Test counts [K] against the law [K] that they are drawn from; the law is scaled to sum to 1.

    Cells are taken as they come: pool first. Returns None if fewer than two cells or no count: nothing to test.
    A count in a cell of probability zero gives p = 0.
    """
    x, p = np.asarray(observed, np.float64), np.asarray(law, np.float64)
    possible = p > 0
    if x[~possible].any():
        worst = int(np.argmax(np.where(possible, 0, x)))
        return Outcome(np.inf, 0.0, int(possible.sum()) - 1, int(x.sum()), worst, float(x[worst]), 0.0)
    n = float(x.sum())
    if possible.sum() < 2 or n == 0:
        return None
    expected = n * p / p.sum()
    parts = _deviance(x, expected)
    worst = int(np.argmax(parts))
    df = int(possible.sum()) - 1
    statistic = float(parts.sum())
    p_value = _binomial(x[possible], p[possible]) if df == 1 else g_sf(statistic, expected[possible])
    return Outcome(statistic, p_value, df, int(n), worst, float(x[worst]), float(expected[worst]))


def g_sf(statistic: float, expected: Floats) -> float:
    """Return P(G >= statistic) for a multinomial with these expected counts [K >= 2], each at least about 1."""
    mean, variance, third = _sum_cumulants(expected)
    scale = third / (2 * variance)
    shape = variance / scale**2
    above = max(0.0, statistic - float(mean - shape * scale))  # the law has nothing below its shift
    return float(special.gammaincc(shape, above / scale))  # `stats.gamma.sf` without its checks of arguments


def independence_test(table: ArrayLike, min_expected: float = MIN_EXPECTED) -> Outcome | None:
    """Test that the rows and columns of a contingency table [R, C] are independent; margins are estimated.

    Rare categories are merged by their margins alone until every cell expects `min_expected`; Williams' correction
    (1976) brings G to chi-square. Returns None if a margin has fewer than two categories. `worst` is row * C + column
    of the merged table.
    """
    counts = _merge(np.asarray(table, np.float64), min_expected)
    rows, columns, n = counts.sum(1), counts.sum(0), float(counts.sum())
    df = (len(rows) - 1) * (len(columns) - 1)
    if df < 1:
        return None
    expected = np.outer(rows, columns) / n
    parts = _deviance(counts, expected)
    williams = 1 + (n * (1 / rows).sum() - 1) * (n * (1 / columns).sum() - 1) / (6 * n * df)
    statistic = float(parts.sum() / williams)
    worst = int(np.argmax(parts))
    return Outcome(
        statistic,
        float(special.chdtrc(df, statistic)),
        df,
        int(n),
        worst,
        float(counts.flat[worst]),
        float(expected.flat[worst]),
    )


def pool_sorted(expected: Floats, minimum: float) -> Ints:
    """Return the group [K] of each class so that consecutive classes are pooled until each group expects `minimum`.

    The last group takes what is left over. Groups are numbered from 0.
    """
    group = np.zeros(len(expected), np.int64)
    number, filled = 0, 0.0
    for index, value in enumerate(expected):
        if filled >= minimum and expected[index:].sum() >= minimum:
            number, filled = number + 1, 0.0
        group[index] = number
        filled += value
    return group


def _deviance(x: Floats, expected: Floats) -> Floats:
    """Return 2 (x ln(x / e) - x + e) per cell: never negative, and 0 where both are 0."""
    return np.asarray(2 * special.kl_div(x, expected), np.float64)


def _binomial(x: Floats, p: Floats) -> float:
    return _binomial_p(int(x[0]), int(x.sum()), float(p[0] / p.sum()))


@lru_cache(4096)
def _binomial_p(count: int, n: int, p: float) -> float:
    """Exact and two-sided; a search of scipy's, and runs of few walks ask for the same again and again."""
    return float(stats.binomtest(count, n, p).pvalue)


def _merge(table: Floats, min_expected: float) -> Floats:
    """Merge rows, then columns, whose share of the total is below sqrt(min_expected / n)."""
    n = table.sum()
    if n <= 0:
        return np.zeros((1, 1))
    share = np.sqrt(min_expected / n)
    for _ in range(2):  # the transpose turns columns into rows
        table = _merge_rows(table, float(share * n)).T
    return table


def _merge_rows(table: Floats, minimum: float) -> Floats:
    margin = table.sum(1)
    big = margin >= minimum
    small = table[~big].sum(0)
    merged: Floats = table[big]
    if small.sum() >= minimum or not len(merged):
        return np.asarray(np.vstack([merged, small]), np.float64)
    if small.sum() > 0:  # the rest is still rare: it joins the rarest of the others
        merged[np.argmin(merged.sum(1))] += small
    return merged


def _sum_cumulants(expected: Floats) -> Floats:
    total = _deviance_cumulants(np.array([expected.sum()]))[:, 0]
    cumulants: Floats = _deviance_cumulants(expected).sum(1) - total
    return cumulants


def _deviance_cumulants(expected: Floats) -> Floats:
    """Return mean, variance and third cumulant [3, K] of the deviance of a Poisson count with these means."""
    grid, table = _cumulant_table()
    inside = np.log(np.clip(expected, _TABLE_FROM, _TABLE_TO))
    values = np.stack([np.interp(inside, grid, row) for row in table])
    inverse = 1 / expected
    # Beyond the table: deviance = (1 + 1 / (6 e)) chi-square with 1 degree of freedom, up to O(1 / e^2).
    far = np.stack([1 + inverse / 6, 2 * (1 + inverse / 3), 8 * (1 + inverse / 2)])
    return np.asarray(np.where(expected > _TABLE_TO, far, values), np.float64)


@cache
def _cumulant_table() -> tuple[Floats, Floats]:
    means = np.geomspace(_TABLE_FROM, _TABLE_TO, _TABLE_SIZE)
    rows: list[Any] = []
    for mean in means:
        reach = 12 * np.sqrt(mean) + 40
        x = np.arange(max(0, int(mean - reach)), int(mean + reach) + 1, dtype=np.float64)
        weight = stats.poisson.pmf(x, mean)
        d = _deviance(x, np.full_like(x, mean))
        centre = weight @ d
        rows.append((centre, weight @ (d - centre) ** 2, weight @ (d - centre) ** 3))
    return np.log(means), np.array(rows).T

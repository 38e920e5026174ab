"""How many held-out units may exceed a calibration bound: exact, and free of any distribution.

Let n calibration and m held-out values be exchangeable under the null "the backend behaves as it did when calibrated",
and let the bound be the j-th largest calibration value. Sort all n + m values in descending order. K, the number of
held-out values above the bound, reaches k exactly if fewer than j calibration values stand among the first k + j - 1
places. Every placement of the n calibration values is equally likely, so (negative hypergeometric law)

    P(K >= k) = sum_{i < j} C(n, i) C(m, k + j - 1 - i) / C(n + m, k + j - 1),

which for j = 1 is prod_{i < k} (m - i) / (n + m - i). A value *equal* to the bound is not counted as above it. With
ties that can only lower K against any order of the tied values, so the law above stays an upper bound (conservative).

Source: Wilks, "Determination of sample sizes for setting tolerance limits" (1941); Fligner and Wolfe, "Some
applications of sample analogues to the probability integral transformation" (1976), for the exceedance counts.
"""

from __future__ import annotations

from fractions import Fraction
from math import comb

from scipy import stats

from lumotree.errors import EnvelopeError


def exceedance_tail(n: int, m: int, k: int, j: int = 1) -> Fraction:
    """Return P(K >= k), exactly.

    n, m: calibration and held-out units; j: order of the bound from the top (1 = the maximum).
    Raises EnvelopeError unless 1 <= j <= n and m >= 0.
    """
    _check_counts(n, m, j)
    if k <= 0:
        return Fraction(1)
    if k > m:
        return Fraction(0)
    places = k + j - 1
    favourable = sum(comb(n, i) * comb(m, places - i) for i in range(j))
    return Fraction(favourable, comb(n + m, places))


def allowed_exceedances(n: int, m: int, alpha: float | Fraction, j: int = 1) -> int:
    """Return the smallest c with P(K > c) <= alpha; c = m means that no outcome can reject, so the test has no power.

    alpha: false-alarm probability of this one statistic, in (0, 1). Raises EnvelopeError for anything else.
    """
    limit = exact(alpha)
    _check_counts(n, m, j)
    if not 0 < limit < 1:
        raise EnvelopeError(f"envelope: expected 0 < alpha < 1, got alpha={alpha}")
    low, high = 0, m
    while low < high:  # the tail falls with k, so bisection finds the smallest c
        middle = (low + high) // 2
        if exceedance_tail(n, m, middle + 1, j) <= limit:
            high = middle
        else:
            low = middle + 1
    return low


def bonferroni(alpha_family: float | Fraction, statistics: int) -> Fraction:
    """Return the share of the family-wise false-alarm probability that each of `statistics` tests gets."""
    if statistics < 1:
        raise EnvelopeError(f"envelope: expected at least one statistic, got {statistics}")
    return exact(alpha_family) / statistics


def detection_power(m: int, allowed: int, rate: float) -> float:
    """Return the probability of more than `allowed` exceedances among m units that each exceed with chance `rate`.

    Here the units are independent given the bound: this describes an alternative, not the null.
    """
    return float(stats.binom.sf(allowed, m, rate))


def detectable_rate(m: int, allowed: int, power: float = 0.99) -> float | None:
    """Return the smallest exceedance rate that is rejected with probability `power`; None without any power."""
    if allowed >= m:
        return None
    # P(Bin(m, p) >= c + 1) is the distribution function of Beta(c + 1, m - c) at p.
    return float(stats.beta.ppf(power, allowed + 1, m - allowed))


def exact(value: float | Fraction) -> Fraction:
    """Return the decimal that a reader sees as an exact fraction: 1e-6 is 1/1000000, not the nearest binary number."""
    return value if isinstance(value, Fraction) else Fraction(repr(float(value)))


def _check_counts(n: int, m: int, j: int) -> None:
    if not 1 <= j <= n:
        raise EnvelopeError(f"envelope: expected 1 <= order <= n={n} calibration units, got order={j}")
    if m < 0:
        raise EnvelopeError(f"envelope: expected m >= 0 held-out units, got m={m}")

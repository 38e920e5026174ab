"""The exceedance law, against enumeration, simulation and known faults."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from audit.exceedance import (
    allowed_exceedances,
    bonferroni,
    detectable_rate,
    detection_power,
    exceedance_tail,
)
from lumotree.errors import EnvelopeError


def enumerated_tail(n: int, m: int, k: int, j: int) -> Fraction:
    """P(K >= k) by placing the calibration values in every possible way among the n + m ranks."""
    placements = list(combinations(range(n + m), n))  # rank 0 is the largest value
    # The j-th largest calibration value at rank r has r - (j - 1) held-out values above it.
    return Fraction(sum(place[j - 1] - (j - 1) >= k for place in placements), len(placements))


@pytest.mark.parametrize("n", range(1, 7))
@pytest.mark.parametrize("m", range(6))
def test_tail_agrees_with_every_arrangement(n: int, m: int) -> None:
    for j in range(1, n + 1):
        for k in range(m + 2):
            assert exceedance_tail(n, m, k, j) == enumerated_tail(n, m, k, j), (j, k)


def test_tail_of_the_maximum_is_the_product_formula() -> None:
    product = Fraction(1)
    for i in range(20):
        product *= Fraction(96 - i, 96 + 96 - i)
        assert exceedance_tail(96, 96, i + 1) == product


@pytest.mark.parametrize("j", [1, 2, 5])
@pytest.mark.parametrize(("n", "m"), [(96, 96), (10, 30), (59, 1), (5, 200)])
def test_allowed_is_the_smallest_count_that_keeps_alpha(n: int, m: int, j: int) -> None:
    for alpha in (1e-6, Fraction(1, 20)):
        c = allowed_exceedances(n, m, alpha, j)
        limit = Fraction(1, 10**6) if alpha == 1e-6 else alpha
        assert exceedance_tail(n, m, c + 1, j) <= limit
        assert c == 0 or exceedance_tail(n, m, c, j) > limit


def test_alpha_is_the_decimal_that_is_written() -> None:
    assert bonferroni(1e-6, 4) == Fraction(1, 4_000_000)
    # P(K > 0) is exactly 1/10 here; the binary number nearest to 0.1 must not decide.
    assert allowed_exceedances(9, 1, 0.1) == 0
    assert allowed_exceedances(9, 1, Fraction(1, 10) - Fraction(1, 10**30)) == 1


@pytest.mark.parametrize("j", [1, 3])
def test_simulated_exchangeable_draws_follow_the_law(j: int) -> None:
    rng, n, m, runs = np.random.default_rng(7), 12, 9, 40_000
    # Exchangeable but not independent: a common shift and scale for each run.
    draws = rng.lognormal(size=(runs, n + m)) * rng.gamma(2, size=(runs, 1)) + rng.normal(size=(runs, 1))
    bound = np.sort(draws[:, :n], axis=1)[:, -j]
    exceed = (draws[:, n:] > bound[:, None]).sum(1)
    for k in range(1, m + 1):
        p = float(exceedance_tail(n, m, k, j))
        assert abs((exceed >= k).mean() - p) <= 5 * np.sqrt(p * (1 - p) / runs) + 1e-9, k


def test_ties_only_lower_the_false_alarm_rate() -> None:
    rng, n, m, runs = np.random.default_rng(8), 6, 6, 20_000
    draws = rng.integers(0, 4, size=(runs, n + m))
    exceed = (draws[:, n:] > draws[:, :n].max(1)[:, None]).sum(1)
    for k in range(1, m + 1):
        p = float(exceedance_tail(n, m, k))
        assert (exceed >= k).mean() <= p + 5 * np.sqrt(p * (1 - p) / runs)


def test_power_against_a_lehmann_shift_as_computed() -> None:
    """Held-out values distributed as the largest of r draws: the power is an integral over the bound."""
    rng, n, m, r, runs = np.random.default_rng(9), 20, 20, 40, 20_000
    c = allowed_exceedances(n, m, 1e-3)
    bound = rng.beta(n, 1, size=runs)  # quantile of the calibration maximum
    computed = np.mean([detection_power(m, c, 1 - b**r) for b in bound[:2000]])
    calibration = rng.random((runs, n)).max(1)
    held_out = rng.random((runs, m)) ** (1 / r)
    simulated = ((held_out > calibration[:, None]).sum(1) > c).mean()
    assert computed > 0.5
    assert abs(simulated - computed) < 0.03


@pytest.mark.parametrize(("m", "c"), [(96, 22), (10, 0), (5, 4)])
def test_detectable_rate_inverts_the_power(m: int, c: int) -> None:
    rate = detectable_rate(m, c, 0.99)
    assert rate is not None
    assert detection_power(m, c, rate) == pytest.approx(0.99)
    assert detectable_rate(m, m) is None


@pytest.mark.parametrize(("n", "m", "j"), [(0, 5, 1), (3, 5, 4), (3, 5, 0), (3, -1, 1)])
def test_impossible_counts_are_refused(n: int, m: int, j: int) -> None:
    with pytest.raises(EnvelopeError, match="expected"):
        exceedance_tail(n, m, 1, j)


@pytest.mark.parametrize("alpha", [0.0, 1.0, -1e-6])
def test_impossible_alpha_is_refused(alpha: float) -> None:
    with pytest.raises(EnvelopeError, match="0 < alpha < 1"):
        allowed_exceedances(3, 3, alpha)
    with pytest.raises(EnvelopeError, match="at least one statistic"):
        bonferroni(1e-6, 0)

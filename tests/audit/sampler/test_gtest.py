"""p-values of counts: right in the bulk, at small expected counts, and against chi-square where that holds."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from audit.gtest import _sum_cumulants, g_sf, g_test, independence_test, pool_sorted

RUNS = 3000


def calls(hits: int, runs: int, level: float) -> float:
    """Exact two-sided binomial p-value of a rejection count."""
    return float(stats.binomtest(hits, runs, level).pvalue)


@pytest.mark.parametrize(("cells", "expected"), [(3, 60), (10, 5), (300, 5), (300, 200)])
def test_g_is_calibrated_at_small_expected_counts(cells, expected):
    rng = np.random.default_rng(cells + expected)
    law = rng.dirichlet(np.full(cells, 50.0))
    n = int(expected / law.min())
    p = np.array([g_test(x, law).p_value for x in rng.multinomial(n, law, RUNS)])
    for level in (0.5, 0.05, 0.005):
        assert calls(int((p <= level).sum()), RUNS, level) > 1e-4


def test_plain_chi_square_would_not_be():
    """The control of the test above: 2,000 cells that expect 5 each."""
    rng = np.random.default_rng(1)
    law = np.full(2000, 1 / 2000)
    x = rng.multinomial(10_000, law, 400)
    outcomes = [g_test(row, law) for row in x]
    plain = [stats.chi2.sf(o.statistic, o.df) for o in outcomes]
    assert calls(sum(p <= 0.01 for p in plain), 400, 0.01) < 1e-4
    assert calls(sum(o.p_value <= 0.01 for o in outcomes), 400, 0.01) > 1e-4


def test_g_is_chi_square_for_large_counts():
    expected = np.full(12, 1e7)
    for x in (5.0, 20.0, 80.0):
        assert g_sf(x, expected) == pytest.approx(stats.chi2.sf(x, 11), rel=1e-4)


def test_tail_at_a_single_rare_cell_is_not_overstated():
    """Three cells, one expects 5: far upward surprises against the exact binomial tail of that cell."""
    n, law = 10_000, np.array([0.0005, 0.4995, 0.5])
    for count in (20, 25, 30):
        rest = np.round((n - count) * law[1:] / law[1:].sum())
        outcome = g_test([count, n - count - rest[1], rest[1]], law)
        assert outcome.p_value >= stats.binom.sf(count - 1, n, law[0]) / 3


def test_two_cells_are_exact():
    assert g_test([7, 13], [0.5, 0.5]).p_value == stats.binomtest(7, 20, 0.5).pvalue
    assert g_test([3, 17], [0.5, 0.5]).p_value == stats.binomtest(3, 20, 0.5).pvalue
    assert g_test([3, 17], [0.25, 0.75]).p_value == stats.binomtest(3, 20, 0.25).pvalue


@pytest.mark.parametrize("statistic", [0.0, 1e-3, 2.5, 40.0, 400.0])
def test_tails_are_those_of_the_shifted_gamma_and_of_chi_square(statistic):
    expected = np.array([5.0, 7.0, 100.0, 3e4])
    mean, variance, third = _sum_cumulants(expected)
    scale = third / (2 * variance)
    shape = variance / scale**2
    assert g_sf(statistic, expected) == stats.gamma.sf(statistic - (mean - shape * scale), shape, scale=scale)
    table = np.array([[50, 60 + statistic], [70, 80]])
    outcome = independence_test(table)
    assert outcome.p_value == stats.chi2.sf(outcome.statistic, 1)


def test_impossible_cell_rejects_outright():
    outcome = g_test([1000, 999, 1], [0.5, 0.5, 0.0])
    assert (outcome.p_value, outcome.worst, outcome.observed) == (0.0, 2, 1.0)


@pytest.mark.parametrize(("counts", "law"), [([5], [1.0]), ([0, 0], [0.5, 0.5]), ([4, 0], [1.0, 0.0])])
def test_nothing_to_test(counts, law):
    assert g_test(counts, law) is None


def test_independence_is_calibrated_and_sees_dependence():
    rng = np.random.default_rng(2)
    law = np.outer(rng.dirichlet(np.ones(5)), rng.dirichlet(np.ones(6)))
    outcomes = [independence_test(x.reshape(5, 6)) for x in rng.multinomial(3000, law.ravel(), RUNS)]
    assert calls(sum(o.p_value <= 0.01 for o in outcomes), RUNS, 0.01) > 1e-4
    sticky = 0.9 * np.full((4, 4), 1 / 16) + 0.1 * np.eye(4) / 4
    # power: noncentrality n * 0.1^2 * 3 = 90 at 9 degrees of freedom, level 1e-6
    assert stats.ncx2.sf(stats.chi2.isf(1e-6, 9), 9, 90) > 0.99
    assert independence_test(rng.multinomial(3000, sticky.ravel()).reshape(4, 4)).p_value < 1e-6


@pytest.mark.parametrize("table", [np.zeros((3, 3)), np.diag([50, 0, 0]), np.array([[40, 2], [3, 0]])])
def test_independence_without_two_categories_is_no_test(table):
    assert independence_test(table) is None


def test_pooling_leaves_no_poor_group():
    expected = np.array([9.0, 1, 1, 1, 3, 2, 7, 1])
    group = pool_sorted(expected, 5.0)
    assert group.tolist() == sorted(group)
    assert np.bincount(group, weights=expected).min() >= 5
    assert pool_sorted(np.array([1.0, 1.0]), 5.0).tolist() == [0, 0]

"""Detectable TV is detected, certificates cover, and e-processes keep their level: all by simulation."""

from __future__ import annotations

from math import log

import numpy as np
import pytest
import torch
from scipy import stats

from audit import power
from audit.evidence import EProcess, LogRatio
from audit.gtest import g_test
from audit.rule_law import multi_round_law
from lumotree.errors import InputError
from lumotree.select_types import Step

RUNS = 300


def rate_at_least(hits: int, runs: int, rate: float) -> bool:
    """Whether a count of hits is compatible with a success probability of at least `rate` (exact, 1e-4)."""
    return bool(stats.binom.cdf(hits, runs, rate) > 1e-4)


@pytest.mark.parametrize(("tv", "cells", "draws"), [(0.01, 16, 2.0e5), (0.01, 256, 5.1e5), (0.001, 16, 2.0e7)])
def test_draws_needed_agree_with_the_published_table(tv, cells, draws):
    """field/methods.md, alpha 1e-6 and power 0.99."""
    assert power.draws_needed(tv, cells - 1, 1e-6) == pytest.approx(draws, rel=0.03)


@pytest.mark.parametrize("cells", [4, 16, 200])
def test_detectable_tv_is_detected_in_the_worst_direction(cells):
    """Half of the mass is raised and the other half lowered in proportion: the direction with least noncentrality."""
    rng = np.random.default_rng(cells)
    n, level = 20_000, 1e-4
    clean = rng.dirichlet(np.full(cells // 2, 5.0)) / 2
    tv = power.detectable_tv(cells - 1, n, level)
    law = np.concatenate([clean * (1 + 2 * tv), clean * (1 - 2 * tv)])
    clean = np.concatenate([clean, clean])
    assert np.abs(law - clean).sum() / 2 == pytest.approx(tv)
    assert power.rejection_power(law, clean, n, level) == pytest.approx(power.POWER, abs=1e-6)
    hits = sum(g_test(x, clean).p_value <= level for x in rng.multinomial(n, law, RUNS))
    # The noncentral law is a limit: 0.98 instead of 0.99 is allowed for, and 0.8 of the TV must be seen less often.
    assert rate_at_least(hits, RUNS, 0.98)
    weaker = 0.8 * law + 0.2 * clean
    fewer = sum(g_test(x, clean).p_value <= level for x in rng.multinomial(n, weaker, RUNS))
    assert fewer < 0.95 * RUNS


def test_no_direction_needs_more_than_the_worst():
    rng = np.random.default_rng(1)
    n, level = 5000, 1e-4
    for _ in range(200):
        clean = rng.dirichlet(np.ones(10))
        direction = rng.dirichlet(np.ones(10)) - clean
        step = power.detectable_tv(9, n, level) / (np.abs(direction).sum() / 2)
        law = clean + step * direction
        if law.min() >= 0:
            assert power.rejection_power(law, clean, n, level) >= power.POWER - 1e-9


def test_detectable_shift_is_that_of_one_cell():
    clean, n, level = np.array([0.02, 0.18, 0.8]), 50_000, 1e-6
    mass = power.detectable_shift(2, n, level, 0.02)
    law = np.array([0.02 + mass, *(clean[1:] * (1 - mass / 0.98))])
    assert power.rejection_power(law, clean, n, level) == pytest.approx(power.POWER, abs=1e-6)
    assert mass < power.detectable_tv(2, n, level)


def test_likelihood_ratio_forms_are_inverse():
    assert power.likelihood_ratio_draws(0.01, 1e-6) == pytest.approx(log(1e6) / 2e-4)
    assert power.likelihood_ratio_tv(69_078, 1e-6) == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize("tv", [0.0, 0.05, 0.3])
def test_certificates_cover(tv):
    rng = np.random.default_rng(4)
    clean = np.full(40, 1 / 40)
    law = clean * np.repeat([1 + 2 * tv, 1 - 2 * tv], 20)
    level, n, misses = 0.1, 400, 0
    for counts in rng.multinomial(n, law, 2000):
        seen = power.empirical_tv(counts, clean)
        assert seen == pytest.approx(np.abs(counts / n - clean).sum() / 2)
        bound = power.tv_certificate(seen, n, level)
        assert bound <= power.published_certificate(seen, 40, n, level)
        misses += bound < tv
    assert stats.binom.sf(misses - 1, 2000, level) > 1e-4


def test_certificate_without_the_deviation_term_would_not_cover():
    """The control: in two cells the observed TV alone is below the true one half of the time."""
    rng = np.random.default_rng(5)
    seen = [power.empirical_tv(x, [0.5, 0.5]) for x in rng.multinomial(1000, [0.7, 0.3], 500)]
    assert stats.binom.sf(sum(s < 0.2 for s in seen) - 1, 500, 0.1) < 1e-4


@pytest.mark.parametrize(("df", "level"), [(0, 0.01), (3, 0.0), (3, 0.995)])
def test_power_refuses_nonsense(df, level):
    with pytest.raises(InputError, match="expected df >= 1"):
        power.noncentrality(df, level)


def test_e_process_keeps_its_level_at_every_moment_and_finds_its_fault(lab):
    step, level = lab.step(False), 0.05

    def warmer(p):
        return p**0.6 / (p**0.6).sum()

    warm = Step(step.tree, torch.from_numpy(np.stack([warmer(row) for row in step.target.numpy()])))
    ratio = LogRatio(multi_round_law(warm), multi_round_law(step))
    alarms = hits = 0
    draws = []
    for seed in range(RUNS):
        for sampler, expected in ((lab.Reference(), False), (lab.Reference(target=warmer), True)):
            process = EProcess("temperature", level)
            process.update(ratio(sampler.walk(step, 400, seed)))
            alarms += bool(process.accused_at) and not expected
            if expected:
                hits += process.state == "accused"
                draws.append(process.accused_at or 400)
    assert stats.binom.sf(alarms - 1, RUNS, level) > 1e-4
    assert rate_at_least(hits, RUNS, 0.99)
    divergence = np.mean(ratio(lab.Reference(target=warmer).walk(step, 20_000, 1)))
    overshoot = 4.0  # nats: the step that crosses may be a large one (Wald's identity)
    assert log(1 / level) / divergence * 0.9 < np.mean(draws) < (log(1 / level) + overshoot) / divergence


def test_e_process_by_hand():
    process = EProcess("fault", 0.1)
    process.update(np.log([2.0, 2.0]))
    assert (process.state, process.walks) == ("open", 2)
    process.update(np.log([2.0, 2.0, 0.01]))
    assert (process.state, process.accused_at, process.excluded_at) == ("accused", 4, None)
    assert process.log_e == pytest.approx(log(0.16))
    other = EProcess("fault", 0.1)
    other.update(np.array([-1.0, -np.inf, np.inf]))
    assert (other.state, other.excluded_at, other.log_e) == ("excluded", 2, -np.inf)


def test_log_ratio_is_infinite_where_only_the_fault_can_be(lab):
    step = lab.step(False)
    clean = multi_round_law(step)
    ratio = LogRatio(clean, clean)
    walks = lab.Reference().walk(step, 500, 1)
    assert (ratio(walks) == 0).all()
    certain = multi_round_law(type(step)(step.tree, step.target.clone().fill_(1 / 12)))
    walks.bonus[:] = 0  # impossible for the clean rule
    assert (LogRatio(certain, clean)(walks) == np.inf).all()

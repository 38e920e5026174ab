"""One step from end to end: level, looks, early stop, messages."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from audit import montecarlo
from audit.evidence import LogRatio
from audit.montecarlo import false_alarms, run_step, stream_seed
from audit.rule_law import multi_round_law, naive_law
from audit.sampler_steps import RECIPES, make_step
from audit.sampler_tests import battery
from audit.walk_tally import WalkTally
from lumotree.errors import InputError

OPTIONS = {"walks": 4000, "chunk": 2000, "min_visits": 200, "level": 1e-3}
RUNS = 300


class Counted:
    """A sampler that remembers how it was called."""

    def __init__(self, sampler):
        self.sampler, self.calls = sampler, []

    def walk(self, step, walks, seed):
        self.calls.append((walks, seed))
        return self.sampler.walk(step, walks, seed)


@pytest.mark.parametrize("stochastic", [False, True])
def test_clean_runs_keep_the_stated_level(lab, stochastic):
    """At most the level (Bonferroni: a bound). One exact binomial test at 1e-3 on the count."""
    step = lab.step(stochastic)
    count = false_alarms(lab.Reference(), step, RUNS, level=0.1, walks=1000, law=multi_round_law(step), min_visits=100)
    assert stats.binom.sf(count - 1, RUNS, 0.1) > 1e-3
    assert count > 0  # a battery that cannot reject keeps any level


def test_each_test_alone_rejects_at_its_own_rate(lab):
    """The slack of Bonferroni must hide nothing: p-values of every test, one by one, at 5%, exact and two-sided."""
    step = lab.step(True)
    law, hits, runs = multi_round_law(step), {}, {}
    for seed in range(RUNS):
        tally = WalkTally(step)
        tally.add(lab.Reference().walk(step, 500, 2 * seed))
        tally.add(lab.Reference().walk(step, 500, 2 * seed + 1))
        for test in battery(tally, law, 0.1, 100):
            if test.p_value is not None:
                runs[test.id] = runs.get(test.id, 0) + 1
                hits[test.id] = hits.get(test.id, 0) + (test.p_value <= 0.05)
    assert sum(runs.values()) > 20 * RUNS
    off = {name: stats.binomtest(hits[name], runs[name], 0.05).pvalue * len(runs) for name in runs}
    assert min(off.values()) > 1e-3, off


def test_a_clean_sampler_passes_at_the_first_look(lab):
    step = lab.step(True)
    result = run_step(lab.Reference(), step, law=multi_round_law(step), **OPTIONS)
    assert (result.verdict, result.walks, result.looks) == ("PASS", 4000, 1)
    assert result.messages() == []
    assert result.untested_rows == (3,)
    assert result.detectable == 1.0
    result = run_step(lab.Reference(), step, **(OPTIONS | {"min_visits": 20}))
    assert result.untested_rows == ()
    assert 0 < result.detectable < 1
    assert {c.row for c in result.certificates} == set(step.tree.active_rows)
    assert all(c.tv < c.bound <= 1 and c.bands <= c.bound for c in result.certificates)


def test_rows_without_visits_are_named_and_make_the_guarantee_void(lab):
    result = run_step(lab.Reference(), lab.step(False), **(OPTIONS | {"min_visits": 1500}))
    assert result.untested_rows
    assert result.detectable == 1.0


def test_a_fault_fails_and_is_named_by_row_test_and_token(lab):
    def moved(p):
        q = p.copy()
        q[5] += 0.2 * p[7]
        q[7] *= 0.8
        return q

    result = run_step(lab.Reference(target=moved), lab.step(False), **(OPTIONS | {"walks": 40_000, "chunk": 20_000}))
    assert result.verdict == "FAIL"
    assert result.rejected[0].name.startswith("node")
    assert any("node at row 0: p = " in line and "token " in line for line in result.messages())


def test_an_impossible_emission_fails_after_one_stream(lab):
    sampler = Counted(lab.Reference(target=lambda p: np.roll(p, 1)))
    result = run_step(sampler, lab.step(False), **OPTIONS)
    assert result.verdict == "FAIL"
    assert [walks for walks, _ in sampler.calls] == [2000]
    assert any("target probability zero: token" in line for line in result.messages())


def test_a_suspicious_run_is_doubled_and_never_drawn_again(lab, monkeypatch):
    monkeypatch.setattr(montecarlo, "SUSPICIOUS", np.inf)
    sampler = Counted(lab.Reference())
    result = run_step(sampler, lab.step(False), looks=3, **OPTIONS)
    assert (result.looks, result.walks, len(sampler.calls)) == (3, 16_000, 8)
    assert len({seed for _, seed in sampler.calls}) == 8
    assert result.test_level * len(result.tests) == pytest.approx(1e-3 / 4)


def test_the_level_is_spent_once_over_the_looks(lab, monkeypatch):
    monkeypatch.setattr(montecarlo, "SUSPICIOUS", np.inf)
    for looks in (1, 2, 4):
        spent = []
        for stop in range(1, looks + 1):
            monkeypatch.setattr(montecarlo, "battery", _stop_after(spent, stop))
        run_step(lab.Reference(), lab.step(False), looks=looks, walks=250, chunk=250, level=1e-3, min_visits=50)
        assert sum(spent) == pytest.approx(1e-3)


def _stop_after(spent, _):
    def recorded(tally, law, level, min_visits):
        spent.append(level)
        return battery(tally, law, level, min_visits)

    return recorded


def test_e_process_accuses_early_and_excludes_the_rest(lab):
    step = lab.step(True)
    clean, fault = multi_round_law(step), naive_law(step)
    options = OPTIONS | {"chunk": 500}
    alternatives = {"naive rule": LogRatio(fault, clean)}
    caught = run_step(lab.Reference(naive=True), step, law=clean, alternatives=alternatives, **options)
    assert (caught.verdict, caught.accused) == ("FAIL", ("naive rule",))
    assert caught.walks < 4000
    assert any("naive rule explains the walks" in line for line in caught.messages())
    passed = run_step(lab.Reference(), step, law=clean, alternatives=alternatives, **options)
    assert (passed.verdict, passed.open, passed.evidence[0].state) == ("PASS", (), "excluded")
    assert passed.test_level * len(passed.tests) == pytest.approx(1e-3 / 2 / 2)


def test_an_alternative_that_is_too_close_stays_open(lab):
    step = lab.step(False)
    law = multi_round_law(step)
    result = run_step(lab.Reference(), step, law=law, alternatives={"itself": LogRatio(law, law)}, looks=2, **OPTIONS)
    assert (result.verdict, result.open, result.walks) == ("PASS", ("itself",), 8000)


def test_seeds_of_streams_differ_and_repeat():
    seeds = [stream_seed(seed, start) for seed in range(3) for start in range(0, 500, 5)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert stream_seed(1, 5) == stream_seed(1, 5)


@pytest.mark.parametrize("wrong", [{"walks": 0}, {"level": 0.0}, {"level": 1.0}, {"looks": 0}, {"chunk": 0}])
def test_options_out_of_range_are_refused(lab, wrong):
    with pytest.raises(InputError, match="expected counts >= 1 and 0 < level < 1"):
        run_step(lab.Reference(), lab.step(False), **(OPTIONS | wrong))


def test_a_sampler_that_returns_too_few_walks_is_refused(lab):
    class Short:
        def walk(self, step, walks, seed):
            return lab.Reference().walk(step, walks - 1, seed)

    with pytest.raises(InputError, match="expected 2000 walks, got 1999"):
        run_step(Short(), lab.step(False), **OPTIONS)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_small_captured_like_steps_pass_with_a_clean_sampler(lab, recipe):
    step = make_step(recipe, 32)
    result = run_step(lab.Reference(), step, law=multi_round_law(step), walks=20_000, chunk=10_000, min_visits=150)
    assert result.verdict == "PASS", result.messages()
    assert result.untested_rows == ((6,) if recipe.repeats else ())  # row 6 repeats row 4's token

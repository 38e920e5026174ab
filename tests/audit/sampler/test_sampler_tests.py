"""Each statistic fails on its own negative control, whose power is computed here, and passes on a clean sampler."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from audit.gtest import g_test
from audit.power import rejection_power
from audit.rule_law import draft_marginals, multi_round_law, naive_law
from audit.sampler_tests import TestResult, adjusted, band_cells, battery, token_cells
from audit.walk_tally import WalkTally, quarters
from lumotree.select_types import Walks

N, LEVEL = 20_000, 1e-3


def run(sampler, step, law, walks=N, seeds=(1, 2)):
    """Battery after `walks` walks in two streams, as name@row -> result."""
    tally = WalkTally(step)
    for seed in seeds:
        tally.add(sampler.walk(step, walks // len(seeds), seed))
    tally.note_zero_emissions()
    results = battery(tally, law, LEVEL, min_visits=500)
    return tally, {r.id: r for r in results}, LEVEL / len(results)


def rejects(result: TestResult, share: float) -> bool:
    return result.p_value is not None and result.p_value <= share


def table_power(table, n: int, df: int, share: float) -> float:
    """Power of an independence test on n pairs from this joint law [R, C], against the product of its margins."""
    law = np.asarray(table, np.float64) / np.sum(table)
    free = np.outer(law.sum(1), law.sum(0))
    distance = float(((law - free)[free > 0] ** 2 / free[free > 0]).sum())
    return float(stats.ncx2.sf(stats.chi2.isf(share, df), df, n * distance))


def coupled(margin, share: float):
    """Joint law of two classes with this margin that are equal for certain in a part `share` of the pairs."""
    margin = margin / margin.sum()
    return (1 - share) * np.outer(margin, margin) + share * np.diag(margin)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("naive", [False, True])
def test_a_clean_sampler_passes_every_test(lab, stochastic, naive):
    step = lab.step(stochastic)
    tally, results, share = run(lab.Reference(naive=naive), step, (naive_law if naive else multi_round_law)(step))
    assert not tally.violations
    assert [r.id for r in results.values() if rejects(r, share)] == []
    names = {"node", "node bands", "outcome", "refused", "last", "joint", "lag last", "stream bonus"}
    drafted = {"within", "drafts", "first", "second", "third"} if stochastic else set()
    assert names | drafted <= {r.name for r in results.values() if r.p_value is not None}


def test_the_number_of_tests_does_not_depend_on_the_visits(lab):
    step = lab.step(True)
    law = multi_round_law(step)
    assert len(run(lab.Reference(), step, law)[1]) == len(run(lab.Reference(), step, law, walks=40)[1])


def test_node_sees_a_shift_of_one_token(lab):
    step, shift = lab.step(False), np.zeros(12)
    shift[[5, 7]] = 0.03, -0.03
    clean = step.target[0].numpy()
    _, results, share = run(lab.Reference(target=lambda p: np.maximum(p + shift * (p[0] == 0), 0)), step, None)
    changed = np.maximum(clean + shift, 0)
    assert rejection_power(changed / changed.sum(), clean, N, share) > 0.999
    assert rejects(results["node@0"], share)
    assert "token" in results["node@0"].where


def test_bands_see_a_change_of_temperature(lab):
    step = lab.step(False)

    def warmer(p):
        return p**0.85 / (p**0.85).sum()

    clean = step.target[0].numpy()
    cells = band_cells(clean, N)
    _, results, share = run(lab.Reference(target=warmer), step, None)
    law = np.bincount(cells.cell, weights=warmer(clean), minlength=len(cells.law))
    assert rejection_power(law, cells.law, N, share) > 0.99
    assert rejects(results["node-bands@0"], share)


def test_a_row_that_never_stops_has_one_impossible_cell() -> None:
    """Filters can leave a row no token but its children's; a walk that stops there all the same must show."""
    for cells in (band_cells(np.zeros(5), N), token_cells(np.zeros(5), N)):
        assert cells.law.tolist() == [0.0] and cells.count(np.array([0, 3, 0, 0, 1])).tolist() == [4.0]


def test_a_row_that_is_all_but_certain_is_tested_by_the_binomial_law() -> None:
    """What expects a fifth of a count in all has a cell of its own, without which wrong tokens would go unseen."""
    law = np.concatenate([[1 - 1e-5], np.full(20, 5e-7)])
    for cells in (token_cells(law, N), band_cells(law, N)):
        assert len(cells.law) == 3 and cells.law[1] == pytest.approx(1e-5)
        clean, wrong = (g_test([N - k, k], cells.law[:2]) for k in (0, 12))
        assert clean is not None and clean.p_value > 0.5
        assert wrong is not None and wrong.p_value < 1e-9


def test_outcome_last_and_joint_see_another_rule_that_node_cannot_see(lab):
    """The naive rule judged as multi-round: both are lossless, so only the tests of the rule's law may speak."""
    step = lab.step(True)
    law, other = multi_round_law(step), naive_law(step)
    _, results, share = run(lab.Reference(naive=True), step, law)
    ends, wrong = law.reach * law.bonus.sum(1), other.reach * other.bonus.sum(1)
    assert rejection_power(wrong, ends, N, share) > 0.99  # refining the cells can only add noncentrality
    for name in ("outcome@0", "last", "joint"):
        assert rejects(results[name], share)
    assert not any(rejects(r, share) for r in results.values() if r.name.startswith("node"))


def test_refused_sees_a_bonus_from_the_target(lab):
    """Residual taken from p: the law given a refusal is the target instead of the residual."""
    step = lab.step(False)
    law = multi_round_law(step)
    tally, results, share = run(lab.Reference(residual=lambda _, p: np.tile(p, (len(_), 1))), step, law)
    clean, n = law.bonus[0] / law.bonus[0].sum(), int(tally.refused[0].sum())
    assert rejection_power(step.target[0].numpy(), clean, n, share) > 0.99
    assert rejects(results["refused@0"], share)


def quarter_margin(step, law):
    """Law of the class of the bonus, over all rows at which a walk may end."""
    margin = np.zeros(4)
    for row in step.tree.active_rows:
        np.add.at(margin, quarters(step.target[row].numpy()), law.reach[row] * law.bonus[row])
    return margin


def sticky(coins):
    """One walk in five takes over all coins of the walk before it."""
    repeat = np.flatnonzero(np.random.default_rng(9).random(coins.shape[1]) < 0.2)
    repeat = repeat[repeat > 0]
    changed = coins.copy()
    changed[:, repeat] = coins[:, repeat - 1]
    return changed


def test_lag_sees_coins_that_are_not_advanced(lab):
    step = lab.step(False)
    law = multi_round_law(step)
    _, results, share = run(lab.Reference(coins=sticky), step, law)
    ends = law.reach * law.bonus.sum(1)
    assert table_power(coupled(ends, 0.2), N - 2, results["lag-last"].df, share) > 0.99
    assert table_power(coupled(quarter_margin(step, law), 0.2), N - 2, results["lag-bonus"].df, share) > 0.99
    assert rejects(results["lag-last"], share)
    assert rejects(results["lag-bonus"], share)


@pytest.mark.parametrize(("apart", "name"), [(2, "lag-2-last"), (32, "lag-32-last"), (N // 4, "lag-half-last")])
def test_walks_further_apart_that_share_coins_are_seen(lab, apart, name):
    """One walk in five takes over the coins of an earlier one of its stream, which its neighbours do not show."""

    def later(coins):
        repeat = np.flatnonzero(np.random.default_rng(9).random(coins.shape[1]) < 0.2)
        repeat = repeat[repeat >= apart]
        changed = coins.copy()
        changed[:, repeat] = coins[:, repeat - apart]
        return changed

    step = lab.step(False)
    law = multi_round_law(step)
    _, results, share = run(lab.Reference(coins=later), step, law)
    ends = law.reach * law.bonus.sum(1)
    assert table_power(coupled(ends, 0.2), results[name].n, results[name].df, share) > 0.99
    assert rejects(results[name], share)
    assert not any(rejects(results[other], share) for other in ("lag-last", "node@0", "stream-last"))


def test_lag_mixed_sees_a_residual_coin_used_as_the_next_accept_coin(lab):
    def reused(coins):
        changed = coins.copy()
        changed[0, 1:, 1] = coins[1, :-1, 0]
        return changed

    step = lab.step(False)
    _, results, share = run(lab.Reference(coins=reused, naive=False), step, None)
    # Where a walk ended at the root, its residual coin decides the next walk's first acceptance: about a tenth of all
    # walks, and a dependence of correlation near 1 there: noncentrality of about 0.1^2 * 3 * N.
    df = results["lag-bonus-to-last"].df
    assert stats.ncx2.sf(stats.chi2.isf(share, df), df, 0.01 * 3 * N) > 0.99
    assert rejects(results["lag-bonus-to-last"], share)


def test_streams_see_a_seed_that_is_ignored(lab):
    step = lab.step(False)
    law = multi_round_law(step)
    _, results, share = run(lab.Reference(seed=lambda _: 3), step, None)
    ends = law.reach * law.bonus.sum(1)
    assert table_power(coupled(ends, 1), N // 2, results["stream-last"].df, share) > 0.99
    assert table_power(coupled(quarter_margin(step, law), 1), N // 2, results["stream-bonus"].df, share) > 0.99
    assert rejects(results["stream-last"], share)
    assert rejects(results["stream-bonus"], share)


def test_within_and_drafts_see_one_coin_for_all_drafts(lab):
    def shared(coins):
        changed = coins.copy()
        changed[2] = coins[2, :, :1]
        return changed

    step = lab.step(True)
    _, results, share = run(lab.Reference(coins=shared), step, None)
    other, _, _ = run(lab.Reference(coins=shared), step, None, seeds=(11, 12))  # the laws of both tables, counted apart
    drafts, within = results["drafts@0"], results["within@1"]
    assert table_power(other.drafts[0], drafts.n, drafts.df, share) > 0.99
    assert table_power(other.within[1], within.n, within.df, share) > 0.99
    assert rejects(results["drafts@0"], share)
    assert rejects(results["within@1"], share)


def pairs_of(law):
    """Law of the first two siblings, drawn without replacement."""
    pairs = law[:, None] * law[None] / (1 - law)[:, None]
    np.fill_diagonal(pairs, 0.0)
    return pairs.ravel()


def test_first_second_and_third_see_drafts_from_another_law(lab):
    def other(q):
        return q**0.8 / (q**0.8).sum()

    step = lab.step(True)
    _, results, share = run(lab.Reference(law=other), step, None)
    clean = step.laws[0].numpy()
    wrong = other(clean)
    assert rejection_power(wrong, clean, N, share) > 0.99
    assert rejection_power(pairs_of(wrong), pairs_of(clean), N, share) > 0.99
    assert rejection_power(draft_marginals(wrong, 3)[2], draft_marginals(clean, 3)[2], N, share) > 0.99
    for name in ("first@0", "second@0", "third@0"):
        assert rejects(results[name], share)


def test_second_sees_siblings_that_are_right_one_by_one_but_not_together(lab):
    """Second drafts shuffled over the walks: every marginal is right, and equal siblings show at once."""
    step = lab.step(True)
    walks = lab.Reference().walk(step, N, 1)
    walks.tokens[:, 2] = walks.tokens[:, 2].roll(1)
    tally = WalkTally(step)
    tally.add(walks)
    results = {r.id: r for r in battery(tally, None, LEVEL)}
    assert [v.what for v in tally.violations if v.row == 2] == ["drafted again"]
    assert not rejects(results["first@0"], LEVEL / len(results))
    assert rejects(results["second@0"], LEVEL / len(results))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("last", -1, "outside the tree"),
        ("last", 9, "outside the tree"),
        ("bonus", -1, "outside the vocabulary"),
        ("bonus", 12, "outside the vocabulary"),
        ("bonus", 0, "probability zero: token 0 at row"),
        ("tokens", -1, "draft outside the vocabulary: token -1 at row 0, 1 times"),
        ("tokens", 1, "outside the declared law: token 1 at row 3"),
    ],
)
def test_impossible_outcomes_are_noted_outright(lab, field, value, message):
    step = lab.step(True)
    walks = lab.Reference().walk(step, 300, 1)
    getattr(walks, field)[7 if field != "tokens" else (7, 3)] = value
    tally = WalkTally(step)
    tally.add(walks)
    tally.note_zero_emissions()
    assert any(message.replace("row 0", "row 3") in str(v) for v in tally.violations)


def test_a_leak_to_a_token_of_probability_zero_is_seen_at_its_computed_rate(lab):
    """A row leaks 1 in 2,000: one emission is enough, so a run of n walks sees it with 1 - (1 - rate)^n."""
    step, leak, runs, walks = lab.step(False), 1 / 2_000, 200, 2_000

    def leaking(p):
        q = p * (1 - leak)
        q[0] = leak
        return q

    law = multi_round_law(replace(step, target=torch.from_numpy(np.stack([leaking(p) for p in step.target.numpy()]))))
    power = 1 - (1 - float(law.reach @ law.bonus[:, 0])) ** walks
    assert power > 0.6

    def noted(sampler, seed):
        tally = WalkTally(step)
        tally.add(sampler.walk(step, walks, seed))
        tally.note_zero_emissions()
        return any("probability zero: token 0" in str(v) for v in tally.violations)

    seen = sum(noted(lab.Reference(target=leaking), seed) for seed in range(runs))
    assert stats.binomtest(seen, runs, power).pvalue > 1e-4
    assert not any(noted(lab.Reference(), seed) for seed in range(20))


def test_a_fixed_draft_that_changes_is_noted(lab):
    step = lab.step(False)
    walks = lab.Reference().walk(step, 300, 1)
    walks.tokens[0, 2] += 1
    tally = WalkTally(step)
    tally.add(walks)
    assert [str(v).split(":")[0] for v in tally.violations] == ["fixed draft changed"]


def test_cells_partition_the_vocabulary():
    law = np.concatenate([[0.5, 0.0, 0.2], np.full(1000, 0.3 / 1000)])
    for n in (10, 100, 2_000, 100_000):
        for cells in (token_cells(law, n), band_cells(law, n)):
            assert cells.law.sum() == pytest.approx(1)
            assert cells.law[-1] == 0
            assert cells.cell[1] == len(cells.law) - 1
            assert set(cells.cell.tolist()) == set(range(len(cells.law)))
            assert len(cells.law) == 2 or (cells.law[:-1] * n).min() >= 4.99
    assert len(token_cells(law, 2_000).law) == 2 + 30 + 1  # 600 expected in the tail, at least 20 a block


def test_a_tail_that_is_never_emitted_shows_in_the_blocks():
    """Half of a flat tail is missing (TV 0.15), though no token of it expects 5."""
    rng = np.random.default_rng(3)
    law = np.concatenate([[0.7], np.full(4000, 0.3 / 4000)])
    faulty = law * (np.arange(4001) <= 2000)
    faulty[1:2001] *= 2
    cells = token_cells(law, 2000)
    wrong = np.bincount(cells.cell, weights=faulty, minlength=len(cells.law))
    assert rejection_power(wrong, cells.law, 2000, 1e-6) > 0.99
    assert cells.count(rng.multinomial(2000, faulty))[-6:].sum() == 0


def test_holm_by_hand():
    results = [TestResult("a", None, p, 9) for p in (0.01, 0.04, None, 0.02)]
    assert adjusted(results) == pytest.approx([0.04, 0.08, 1.0, 0.06])


def test_arrays_of_the_wrong_shape_are_refused(lab):
    step = lab.step(False)
    one = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="expected last, bonus, refused"):
        WalkTally(step).add(Walks(one, one[:2], one.bool(), torch.zeros(1, 6, dtype=torch.int64)))

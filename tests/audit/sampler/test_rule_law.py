"""The law of a walk: lossless on paper, and what the reference sampler does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from audit.gtest import g_test
from audit.rule_law import TokenLaw, draft_marginals, multi_round_law, naive_law
from lumotree.errors import InputError
from lumotree.select_types import Step
from lumotree.tree import Tree


@pytest.mark.parametrize("law_of", [multi_round_law, naive_law])
@pytest.mark.parametrize("stochastic", [False, True])
def test_emission_at_a_visited_row_follows_the_target(lab, law_of, stochastic):
    for seed in range(5):
        step = lab.step(stochastic, seed)
        law = law_of(step)
        emitted = law.bonus.copy()
        for row in range(1, step.tree.n):
            emitted[step.tree.parents[row], law.child[row].tokens] += law.child[row].mass
        np.testing.assert_allclose(emitted, step.target.numpy(), atol=1e-14)
        assert (law.reach * law.bonus.sum(1)).sum() == pytest.approx(1)


@pytest.mark.parametrize("naive", [False, True])
@pytest.mark.parametrize("stochastic", [False, True])
def test_the_reference_sampler_follows_the_law(lab, naive, stochastic):
    step = lab.step(stochastic, 3)
    law = (naive_law if naive else multi_round_law)(step)
    walks = lab.Reference(naive=naive).walk(step, 40_000, 1)
    counts = np.zeros(law.bonus.shape)
    np.add.at(counts, (walks.last.numpy(), walks.bonus.numpy()), 1)
    outcome = g_test(counts.ravel(), (law.reach[:, None] * law.bonus).ravel())
    assert outcome is not None
    assert outcome.p_value > 1e-3


def test_draft_marginals_by_hand():
    first, second = draft_marginals(np.array([0.5, 0.25, 0.25]), 2)
    assert first.tolist() == [0.5, 0.25, 0.25]
    # token 0 second: 1/4 * (2/3) twice; token 1 second: 1/2 * 1/2 + 1/4 * 1/3
    np.testing.assert_allclose(second, [1 / 3, 1 / 3, 1 / 3])


def test_a_law_with_fewer_tokens_than_children_is_refused():
    rows = torch.tensor([[1.0, 0.0]] * 3, dtype=torch.float64)
    with pytest.raises(InputError, match=r"row 0.*at least 2 tokens"):
        multi_round_law(Step(Tree.make([-1, 0, 0], vocab=2), rows, rows))


def test_token_law_looks_up_by_token():
    law = TokenLaw(np.array([2, 5]), np.array([0.25, 0.5]))
    assert law.at(np.array([5, 2, 3, 9])).tolist() == [0.5, 0.25, 0, 0]
    assert TokenLaw(np.zeros(0, np.int64), np.zeros(0)).at(np.array([1])).tolist() == [0]

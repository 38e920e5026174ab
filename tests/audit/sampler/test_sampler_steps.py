"""The captured-like steps have the shapes they claim, and their deep rows are visited."""

from __future__ import annotations

import numpy as np
import pytest

from audit.rule_law import multi_round_law
from audit.sampler_steps import RECIPES, SUPPORT, filtered, largest, logits, make_step, nucleus, penalised, small_steps
from audit.sampler_tests import MIN_VISITS
from lumotree.errors import InputError
from lumotree.sampling import SamplingParams

WALKS = 200_000


@pytest.fixture(scope="module", params=RECIPES, ids=lambda r: r.name)
def full(request):
    """One step at the full vocabulary at a time: up to 80 MB."""
    return request.param, make_step(request.param)


def test_rows_are_laws_and_every_row_is_visited_often_enough(full):
    _, step = full
    assert step.target.shape == (32, 151_936)
    np.testing.assert_allclose(step.target.sum(1).numpy(), 1, atol=1e-12)
    assert step.target.min() >= 0
    rows = [row for row in step.tree.active_rows if row not in _twins(step.tree)]
    reach = multi_round_law(step).reach[rows]
    assert (WALKS * reach - 3 * np.sqrt(WALKS * reach)).min() >= MIN_VISITS


def test_draft_laws_are_sparse_and_differ_from_the_target(full):
    recipe, step = full
    assert (step.laws is not None) == recipe.stochastic
    if step.laws is None:
        return
    laws, target = step.laws.numpy(), step.target.numpy()
    assert ((laws > 0).sum(1) == SUPPORT).all()
    np.testing.assert_allclose(laws.sum(1), 1, atol=1e-12)
    assert np.abs(laws - target).sum(1).min() / 2 > 0.05
    if recipe.params.top_k:
        assert (laws[target == 0] > 0).any()


def test_shapes(full):
    recipe, step = full
    rows = step.target.numpy()
    if recipe.name == "flat-fixed":  # tens of thousands of tokens about as likely as each other
        assert (rows[0] > 0).all()
        assert np.quantile(rows[0], 0.9) < 3 * np.quantile(rows[0], 0.1)
    if recipe.name == "tied-fixed":
        top = np.sort(rows[5])[::-1]
        assert top[0] == top[1]
        assert len(np.unique(rows[0])) < (rows[0] > 0).sum() / 2
    if recipe.params.top_k:
        values = logits(recipe)[0]
        kth = np.sort(values)[::-1][recipe.params.top_k - 1 : recipe.params.top_k + 1]
        assert kth[0] == kth[1]
        assert (rows > 0).sum(1).max() <= recipe.params.top_k
    if recipe.name == "peaked-fixed":
        assert np.sort(rows[0])[::-1][0] > 0.5
        assert any(_repeats(step.tree, row) for row in step.tree.active_rows)


def _twins(tree):
    """Rows that carry an elder sibling's token: no rule visits them."""
    elder = {child: tree.children(row)[:rank] for row in range(tree.n) for rank, child in enumerate(tree.children(row))}
    return [row for row, others in elder.items() if tree.tokens[row] in tree.tokens[list(others)]]


def _repeats(tree, row):
    """Whether a child of `row` carries a token that is on the path already: the penalty must then matter."""
    return np.isin(tree.tokens[list(tree.children(row))], tree.tokens[list(tree.path(row))[1:]]).any()


def test_siblings_differ_save_where_a_recipe_repeats_one_and_carry_probability():
    for recipe, step in small_steps(48):
        for row in step.tree.active_rows:
            tokens = step.tree.tokens[list(step.tree.active_children(row))]
            assert len(tokens) - len(set(tokens.tolist())) == (row == recipe.repeats)
            if not recipe.stochastic:
                assert (step.target[row].numpy()[tokens] > 0).all()


def test_steps_repeat():
    for recipe in RECIPES:
        a, b = make_step(recipe, 32), make_step(recipe, 32)
        assert a.tree == b.tree
        assert a.target.equal(b.target)


def test_the_sets_of_the_filters_are_those_of_a_stable_sort():
    rng = np.random.default_rng(3)
    for _ in range(300):
        law = rng.integers(0, 4, 12) / 1.0
        law[0] += 1
        order = np.argsort(-law, kind="stable")
        for k in (1, 3, 11, 12, 40):
            first = order[:k][law[order[:k]] > 0]
            assert largest(law, k).tolist() == sorted(first.tolist())
            assert largest(law, k, "all").tolist() == np.flatnonzero((law >= law[first[-1]]) & (law > 0)).tolist()
        running = np.cumsum(law[order])
        p = rng.uniform(0.01, 0.99) * running[-1]
        assert nucleus(law, p).tolist() == order[: int(np.searchsorted(running, p)) + 1].tolist()


def test_filters_by_hand():
    row = np.log([0.4, 0.1, 0.2, 0.1, 0.1, 0.1])
    np.testing.assert_allclose(filtered(row, SamplingParams(top_k=3)), np.array([4, 1, 2, 0, 0, 0]) / 7)
    np.testing.assert_allclose(filtered(row, SamplingParams(top_p=0.55)), np.array([4, 0, 2, 0, 0, 0]) / 6)
    np.testing.assert_allclose(filtered(row, SamplingParams(min_p=0.4)), np.array([4, 0, 2, 0, 0, 0]) / 6)
    np.testing.assert_allclose(filtered(row, SamplingParams(temperature=0.5))[:2], np.array([16, 1]) / 24)
    np.testing.assert_allclose(penalised(row, np.array([2, 2]), 0.5) - row, [0, 0, -0.5, 0, 0, 0])


def test_a_tiny_vocabulary_is_refused():
    with pytest.raises(InputError, match="at least 16 tokens, got vocab=8"):
        make_step(RECIPES[0], 8)

"""Conventions: exact TVs against a plain computation, and zero where nothing is set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from audit.conventions import conventions
from audit.fault_source import RecipeSource
from audit.sampler_steps import Recipe, logits, make_step, small_steps
from lumotree.sampling import Conventions, SamplingParams, target_rows

FOUND = {recipe.name: conventions(step, RecipeSource(recipe, step)) for recipe, step in small_steps(32)}


def test_what_applies_in_which_step():
    assert [c.applies for c in FOUND["peaked-fixed"]] == [False, False, False]
    assert [c.applies for c in FOUND["truncated-fixed"]] == [True, False, True]
    assert [c.applies for c in FOUND["truncated-stochastic"]] == [True, True, False]
    for found in FOUND.values():
        assert all(c.applies or c.tv == 0 for c in found)
    assert FOUND["truncated-fixed"][0].tv > 0.01
    assert FOUND["truncated-fixed"][2].tv > 0.01
    assert FOUND["truncated-stochastic"][0].tv > 0.01


@pytest.mark.parametrize("index", [0, 1, 2])
def test_rows_agree_with_the_sampling_parameters_of_lumotree(index):
    """An independent statement of the filters: `lumotree.sampling`."""
    min_p = 0.15 if index == 1 else 0.03  # after top-p 0.9 a smaller one excludes nothing
    own = SamplingParams(0.9, 12, 0.9, min_p)
    recipe = Recipe("all", "", "truncated", "truncated", False, (0.5, 0.1, 0.07), own, seed=4)
    step = make_step(recipe, 32)
    other = SamplingParams(0.9, 12, 0.9, 0.0 if index == 1 else min_p)
    conv = [Conventions(top_k_ties="all"), Conventions(), Conventions(top_k_top_p="joint")][index]
    values = torch.from_numpy(logits(recipe, 32))
    mine, theirs = target_rows(values, step.tree, own), target_rows(values, step.tree, other, conv)
    rows = list(step.tree.active_rows)
    torch.testing.assert_close(mine[rows], step.target[rows])
    found = conventions(step, RecipeSource(recipe, step))[index]
    gaps = np.abs((theirs - mine)[rows].numpy()).sum(1) / 2
    assert found.row_tv == pytest.approx(gaps.max(), abs=1e-12)
    assert gaps[rows.index(found.row)] == pytest.approx(found.row_tv, abs=1e-12)
    assert found.tv > 1e-3

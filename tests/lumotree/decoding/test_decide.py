"""Selection inside the cycle against the rules themselves."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lumotree.coins import coins_for
from lumotree.decide import Turn, decide, first_best
from lumotree.draft_types import Proposal
from lumotree.requests import Request
from lumotree.sampling import SamplingParams, target_rows
from lumotree.select import RULES
from lumotree.select_types import Step
from lumotree.slots import Lease
from lumotree.strategies import trees

VOCAB = 5


def turn(tree, request, left=99, committed=2):
    tokens = np.array([1, 2, int(tree.tokens[0])])
    return Turn(request, Lease(0, (), 0, 16, np.arange(1)), Proposal(tree), tokens, committed, 0, 3, left)


@settings(max_examples=60, deadline=None)
@given(
    tree=trees(max_rows=10, vocab=VOCAB),
    rule=st.sampled_from(sorted(RULES)),
    eos=st.sampled_from([None, 0, 1]),
    left=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_walking_along_the_argmax_is_what_every_rule_does_at_temperature_0(tree, rule, eos, left, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(3, (tree.n, VOCAB), generator=generator).float()  # with ties
    request = Request(7, (1, 2), 200, rule=rule, eos=eos, seed=seed)
    (decision,) = decide([turn(tree, request, left)], logits)
    step = Step(tree, target_rows(logits, tree, request.sampling))
    walks = replace(RULES[rule], eos=eos, budget=left).select(
        step, torch.from_numpy(tree.tokens.copy())[None], coins_for(seed, [7], 3, tree.n)
    )
    assert (decision.path[-1], decision.pending) == (int(walks.last[0]), int(walks.bonus[0]))
    assert decision.path == tree.path(decision.path[-1])


@settings(max_examples=30, deadline=None)
@given(tree=trees(max_rows=8, vocab=VOCAB), rule=st.sampled_from(["naive", "multi-round", "traversal"]),
       seed=st.integers(0, 99))  # fmt: skip
def test_sampled_turns_are_decided_by_their_rule_coins_and_counts(tree, rule, seed):
    logits = torch.randn(tree.n, VOCAB, generator=torch.Generator().manual_seed(seed))
    params = SamplingParams(temperature=0.7, repetition=1.3, presence=0.5, frequency=0.1)
    request = Request(7, (1,), 200, params, rule=rule, seed=seed)
    (decision,) = decide([turn(tree, request)], logits)
    counts = [torch.bincount(torch.tensor(t), minlength=VOCAB) for t in ([1], [2])]  # prompt 1, then 2, pending apart
    target = target_rows(logits, tree, params, prompt_counts=counts[0], output_counts=counts[1])
    rows = replace(RULES[rule], budget=99)
    walks = rows.select(Step(tree, target), torch.from_numpy(tree.tokens.copy())[None], coins_for(seed, [7], 3, tree.n))
    assert (decision.path[-1], decision.pending) == (int(walks.last[0]), int(walks.bonus[0]))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_without_a_finite_largest_value_has_no_best_token(bad):
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, bad, 0.0], [-torch.inf, 2.0, 1.0]])
    if bad == -torch.inf:
        logits[1] = bad
    assert first_best(logits) == [1, -1, 1]

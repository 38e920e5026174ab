"""Selection inside the cycle against the rules themselves."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lumotree.coins import coins_at, coins_for
from lumotree.decide import Turn, decide, first_best
from lumotree.draft_types import Proposal
from lumotree.errors import InputError
from lumotree.lazy_walk import Walk
from lumotree.requests import Request
from lumotree.sampling import SamplingParams, target_rows
from lumotree.select import RULES
from lumotree.select_types import Step
from lumotree.slots import Lease
from lumotree.strategies import trees
from lumotree.tree import Tree

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


def distinct(tree):
    """The tree with siblings that differ."""
    tokens = tree.tokens.copy()
    for row in tree.active_rows:
        for place, child in enumerate(tree.active_children(row)):
            tokens[child] = (int(tokens[row]) + place) % VOCAB
    return Tree.make(tree.parents, tokens=tokens, active=tree.active)


PARAMS = [
    SamplingParams(temperature=0.7, repetition=1.3, presence=0.5, frequency=0.1),
    SamplingParams(temperature=1.3, top_k=4, top_p=0.9),
]


@settings(max_examples=80, deadline=None)
@given(
    tree=trees(max_rows=6, vocab=VOCAB),  # at most VOCAB siblings
    rule=st.sampled_from(["naive", "multi-round", "traversal"]),
    eos=st.sampled_from([None, 2]),
    left=st.integers(1, 5),
    params=st.sampled_from(PARAMS),
    drawn=st.booleans(),
    seed=st.integers(0, 99),
)
def test_sampled_turns_are_decided_by_their_rule_coins_and_counts(tree, rule, eos, left, params, drawn, seed):
    generator = torch.Generator().manual_seed(seed)
    logits, laws = torch.randn(tree.n, VOCAB, generator=generator), None
    if drawn:
        tree = distinct(tree)
        laws = torch.softmax(torch.randn(tree.n, VOCAB, generator=generator, dtype=torch.float64), -1)
    request = Request(7, (1,), 200, params, rule=rule, seed=seed, eos=eos)
    given_turn = turn(tree, request, left)
    (decision,) = decide([replace(given_turn, proposal=Proposal(tree, laws))], logits)
    counts = [torch.bincount(torch.tensor(t), minlength=VOCAB) for t in ([1], [2])]  # prompt 1, then 2, pending apart
    target = target_rows(logits, tree, params, prompt_counts=counts[0], output_counts=counts[1])
    drafts = torch.from_numpy(tree.tokens.copy())[None]
    rows = replace(RULES[rule], eos=eos, budget=left)
    walks = rows.select(Step(tree, target, laws), drafts, coins_for(seed, [7], 3, tree.n))
    assert (decision.path[-1], decision.pending) == (int(walks.last[0]), int(walks.bonus[0]))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_without_a_finite_largest_value_has_no_best_token(bad):
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, bad, 0.0], [-torch.inf, 2.0, 1.0]])
    if bad == -torch.inf:
        logits[1] = bad
    assert first_best(logits) == [1, -1, 1]


@pytest.mark.parametrize("seed", [0, 2**40 + 3])
def test_coins_of_some_rows_are_those_of_the_whole_tree(seed):
    rows = [0, 3, 9, 200]
    accept, residual = coins_at(seed, 2**35 + 1, 17, rows)
    whole = coins_for(seed, [2**35 + 1], 17, 201)
    assert accept == whole.accept[0, rows].tolist()
    assert residual == whole.residual[0, rows].tolist()
    with pytest.raises(InputError, match="row"):
        coins_at(seed, 1, 1, [0, 1 << 24])


@pytest.mark.parametrize(
    ("tokens", "laws", "message"),
    [
        ([0, 5, 1], None, "row 1: drafted token 5 is outside the vocabulary"),
        ([0, 1, 1], [[0.2] * 5] * 3, "repeat a token"),
        ([0, 1, 2], [[0.5] * 5] * 3, "laws row 0 sums to 2.5"),
        ([0, 1, 2], [[1.0, 0, 0, 0, 0]] * 3, "gives weight to 1 tokens, fewer than the row's 2"),
    ],
)
def test_a_lazy_walk_refuses_what_the_rule_refuses(tokens, laws, message):
    tree = Tree.make([-1, 0, 0], tokens=tokens)
    laws = None if laws is None else torch.tensor(laws, dtype=torch.float64)
    walk = Walk(tree, torch.zeros(3, 5), laws, SamplingParams())
    with pytest.raises(InputError, match=message):
        walk.select(RULES["multi-round"], 0, 0, 0)
    with pytest.raises(InputError):
        RULES["multi-round"].select(
            Step(tree, torch.full((3, 5), 0.2, dtype=torch.float64), laws), torch.tensor([tokens]),
            coins_for(0, [0], 0, 3),
        )  # fmt: skip


def test_a_lazy_walk_names_the_row_of_bad_logits():
    walk = Walk(Tree.make([-1]), torch.full((1, 5), torch.nan), None, SamplingParams())
    with pytest.raises(InputError, match="logits row 0 is nan"):
        walk.select(RULES["naive"], 0, 0, 0)

"""The vectorised rules decide as the plain ones do, on the same coins, also at the breakpoints; bad input is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from lumotree.coins import coins_for
from lumotree.errors import InputError
from lumotree.select import MULTI_ROUND, NAIVE, RULES, TRAVERSAL, Rule
from lumotree.select_batch import Request, select_batch
from lumotree.select_draft import drafts_from_coins, draw_drafts
from lumotree.select_prepare import prepare
from lumotree.select_reference import draw, snap
from lumotree.select_types import Coins, Step
from lumotree.tree import Tree
from lumotree.tree_named import hydra27, random_tree, star

TOP = 1 - 2.0**-53  # the largest coin
ALL_RULES = pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)


def random_rows(rng: np.random.Generator, n: int, vocab: int, dyadic: bool, least: int = 1) -> Tensor:
    """Rows with zeros and ties; dyadic ones put coins that are multiples of 1/8 exactly on the breakpoints."""
    rows = []
    while len(rows) < n:
        row = rng.multinomial(8, rng.dirichlet(np.ones(vocab))) / 8 if dyadic else rng.dirichlet(np.full(vocab, 0.3))
        if not dyadic:
            row = np.where(row < 0.02, 0, row) if rng.random() < 0.5 else row
            row = row / row.sum()
        if (row > 0).sum() >= least:
            rows.append(row)
    return torch.tensor(np.array(rows))


def random_coins(rng: np.random.Generator, walks: int, n: int, dyadic: bool) -> Coins:
    def some() -> Tensor:
        coarse = rng.choice([*np.arange(8) / 8, TOP, 1 / 3], (walks, n))
        return torch.tensor(coarse if dyadic else np.where(rng.random((walks, n)) < 0.1, TOP, rng.random((walks, n))))

    return Coins(some(), some())


def random_case(seed: int, stochastic: bool, walks: int = 20) -> tuple[Step, Tensor, Coins]:
    rng = np.random.default_rng(seed)
    dyadic, vocab = bool(seed % 2), int(rng.integers(4, 9))
    tree = random_tree(rng, int(rng.integers(1, 9)), inactive_fraction=0.2)
    tree = Tree.make(tree.parents, tokens=rng.integers(0, vocab, tree.n), active=tree.active)
    target = random_rows(rng, tree.n, vocab, dyadic)
    if not stochastic:
        fixed = rng.random() < 0.5
        drafts = tree.tokens[None] if fixed else rng.integers(0, vocab, (walks, tree.n))
        return Step(tree, target), torch.tensor(drafts), random_coins(rng, walks, tree.n, dyadic)
    widest = max(len(tree.active_children(row)) for row in range(tree.n))
    if widest > 4:
        return random_case(seed + 100_000, stochastic, walks)
    step = Step(tree, target, random_rows(rng, tree.n, vocab, dyadic, least=max(1, widest)))
    coins = random_coins(rng, walks, tree.n, dyadic)
    drafts = drafts_from_coins(prepare(step), random_coins(rng, walks, tree.n, dyadic).accept)
    if rng.random() < 0.3:  # tokens that the declared law excludes
        drafts = torch.tensor(np.array([rng.permutation(vocab)[np.arange(tree.n) % vocab] for _ in range(walks)]))
    return step, drafts[:1] if rng.random() < 0.2 else drafts, coins


def assert_decides_as_reference(rule: Rule, step: Step, drafts: Tensor, coins: Coins) -> None:
    walks = rule.select(step, drafts, coins)
    target = step.target.tolist()
    laws = None if step.laws is None else step.laws.tolist()
    for w in range(len(coins.accept)):
        tokens = drafts[w % len(drafts)].tolist()
        one = rule.reference(step.tree, target, laws, tokens, coins.accept[w].tolist(), coins.residual[w].tolist())
        assert (one.last, one.bonus, one.refused) == (int(walks.last[w]), int(walks.bonus[w]), bool(walks.refused[w]))
        assert target[one.last][one.bonus] > 0 or rule.eos is not None or rule.budget is not None


def siblings_differ(step: Step, drafts: Tensor) -> bool:
    groups = [list(step.tree.active_children(row)) for row in step.tree.active_rows]
    return all(len(set(walk)) == len(walk) for group in groups for walk in drafts[:, group].tolist())


@ALL_RULES
@pytest.mark.parametrize("stochastic", [False, True], ids=["fixed", "drawn"])
def test_vectorised_rule_decides_as_its_reference(rule: Rule, stochastic: bool) -> None:
    checked = 0
    for seed in range(150):
        step, drafts, coins = random_case(seed, stochastic)
        if stochastic and rule.distinct and not siblings_differ(step, drafts):
            continue
        assert_decides_as_reference(rule, step, drafts, coins)
        checked += 1
    assert checked > 100


@ALL_RULES
@pytest.mark.parametrize("stochastic", [False, True], ids=["fixed", "drawn"])
@pytest.mark.parametrize("coin", [0.0, TOP])
def test_walks_that_all_accept_or_all_refuse_a_row_decide_as_the_reference(
    rule: Rule, stochastic: bool, coin: float
) -> None:
    for seed, walks in ((seed, walks) for seed in range(30) for walks in (1, 2, 5)):
        step, drafts, coins = random_case(seed, stochastic, walks)
        if stochastic and rule.distinct and not siblings_differ(step, drafts):
            continue
        assert_decides_as_reference(rule, step, drafts, replace(coins, accept=torch.full_like(coins.accept, coin)))


@ALL_RULES
def test_limits_cut_the_vectorised_walks_as_they_cut_the_reference(rule: Rule) -> None:
    for seed in range(60):
        step, drafts, coins = random_case(seed, stochastic=False)
        for eos, budget in ((0, None), (None, 2), (1, 1), (2, 3)):
            limited = replace(rule, eos=eos, budget=budget)
            assert_decides_as_reference(limited, step, drafts, coins)
            walks = limited.select(step, drafts, coins)
            depth = torch.tensor(step.tree.depth)[walks.last]
            assert budget is None or int(depth.max()) + 1 <= budget


def test_walk_stops_before_an_accepted_end_of_sequence_which_becomes_pending() -> None:
    tree = Tree.make([-1, 0, 0, 2, 3], tokens=[0, 0, 1, 2, 1])
    rows = torch.eye(3, dtype=torch.float64)[[1, 0, 2, 1, 0]]
    coins = Coins(torch.zeros(1, 5, dtype=torch.float64), torch.zeros(1, 5, dtype=torch.float64))
    for rule in RULES.values():
        whole = rule.select(Step(tree, rows), torch.tensor(tree.tokens)[None], coins)
        assert (int(whole.last), int(whole.bonus), bool(whole.refused)) == (4, 0, False)
        cut = replace(rule, eos=2).select(Step(tree, rows), torch.tensor(tree.tokens)[None], coins)
        assert (int(cut.last), int(cut.bonus), bool(cut.refused)) == (2, 2, False)
        short = replace(rule, budget=1).select(Step(tree, rows), torch.tensor(tree.tokens)[None], coins)
        assert (int(short.last), int(short.bonus), bool(short.refused)) == (0, 1, True)


@ALL_RULES
@pytest.mark.parametrize("stochastic", [False, True], ids=["fixed", "drawn"])
def test_walks_are_independent_of_each_other_and_inputs_stay_as_they_were(rule: Rule, stochastic: bool) -> None:
    step, _, _ = hydra_step(300, stochastic)
    coins = coins_for(3, range(5000), 0, 32, step.tree.active_rows)
    drafts = draw_drafts(step, 3, range(5000), 0)
    before = [x.clone() for x in (step.target, drafts, coins.accept, coins.residual)]
    whole = rule.select(step, drafts, coins)
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(1))
    mixed = rule.select(
        step, drafts if len(drafts) == 1 else drafts[order], Coins(coins.accept[order], coins.residual[order])
    )
    assert torch.equal(whole.last[order], mixed.last) and torch.equal(whole.bonus[order], mixed.bonus)
    assert all(
        torch.equal(a, b) for a, b in zip(before, (step.target, drafts, coins.accept, coins.residual), strict=True)
    )


def hydra_step(vocab: int, stochastic: bool, keep: int = 50) -> tuple[Step, Tensor, Tensor]:
    """Peaked rows; laws truncated to `keep` tokens and near the target, as a drafter's are."""
    rng = np.random.default_rng(vocab)
    logits = torch.tensor(rng.normal(size=(32, vocab)) * 2)
    drafted = logits + torch.tensor(rng.normal(size=(32, vocab)))
    best = drafted.topk(4).indices.numpy()
    tree = hydra27()
    tokens = np.zeros(32, np.int64)
    for row in range(32):
        for place, child in enumerate(tree.children(row)):
            tokens[child] = best[row, place]
    cut = drafted.masked_fill(drafted < drafted.topk(keep).values[:, -1:], -torch.inf)
    step = Step(hydra27(tokens=tokens), torch.softmax(logits, 1), torch.softmax(cut, 1) if stochastic else None)
    return step, logits, drafted


@pytest.mark.parametrize("rule", [NAIVE, MULTI_ROUND, TRAVERSAL], ids=lambda rule: rule.name)
@pytest.mark.parametrize("stochastic", [False, True], ids=["fixed", "drawn"])
def test_hydra27_over_a_truncated_law_decides_as_the_reference(rule: Rule, stochastic: bool) -> None:
    step, _, _ = hydra_step(600, stochastic)
    coins = coins_for(4, range(8), 1, 32)
    assert_decides_as_reference(rule, step, draw_drafts(step, 4, range(8), 1), coins)


@pytest.mark.parametrize("coin", [0.0, TOP])
@ALL_RULES
def test_extreme_coins_stay_on_tokens_of_positive_probability(rule: Rule, coin: float) -> None:
    target = torch.tensor([[0, 0.1, 0.2, 0.7, 0, 0]] * 3, dtype=torch.float64)
    coins = Coins(torch.full((1, 3), coin, dtype=torch.float64), torch.full((1, 3), coin, dtype=torch.float64))
    for tokens in ([0, 0, 5], [0, 3, 1], [0, 3, 3], [0, 2, 5]):
        bonus = int(rule.select(Step(star(3), target), torch.tensor([tokens]), coins).bonus)
        assert bonus in (1, 2, 3)
    if rule is NAIVE:
        assert bonus == (1 if coin == 0 else 3)


def test_largest_coin_lands_on_the_last_possible_token_of_any_row() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        row = random_rows(rng, 1, 9, dyadic=False)
        coins = Coins(*(torch.full((1, 1), TOP, dtype=torch.float64) for _ in range(2)))
        bonus = int(NAIVE.select(Step(Tree.make([-1]), row), torch.zeros(1, 1, dtype=torch.int64), coins).bonus)
        assert bonus == int(torch.nonzero(row[0])[-1])


def test_coin_of_zero_does_not_accept_a_token_of_probability_zero() -> None:
    target = torch.tensor([[0.0, 1.0]] * 2, dtype=torch.float64)
    zero = torch.zeros(1, 2, dtype=torch.float64)
    for rule in RULES.values():
        walks = rule.select(Step(star(2), target), torch.tensor([[0, 0]]), Coins(zero, zero))
        assert (int(walks.last), int(walks.bonus)) == (0, 1)


def test_drafts_follow_the_declared_law_without_replacement() -> None:
    law = torch.tensor([[0.5, 0.0, 0.3, 0.2]] * 4, dtype=torch.float64)
    step, rng = Step(star(4), law, law), np.random.default_rng(1)
    coins = torch.tensor(rng.choice([0, 0.1, 0.25, 0.375, 0.5, 0.6, 0.99, TOP], (500, 4)))
    drafts = drafts_from_coins(prepare(step), coins)
    for walk, coin in zip(drafts.tolist(), coins.tolist(), strict=True):
        weights = [snap(q) for q in law[0].tolist()]
        for row in (1, 2, 3):
            assert walk[row] == draw(weights, sum(weights), coin[row])
            weights[walk[row]] = 0.0


def test_batch_selection_depends_on_each_request_alone() -> None:
    steps = [random_case(seed, stochastic=False)[0] for seed in range(6)]
    requests = [Request(step, 10 + i, 3, MULTI_ROUND, budget=2 + i) for i, step in enumerate(steps)]
    accepted, pending = select_batch([*requests, None], seed=5)
    assert int(accepted.length[-1]) == 0 and int(pending[-1]) == -1
    for i in (3, 0, 5):
        alone, token = select_batch([None, requests[i]], seed=5, longest=accepted.rows.shape[1])
        assert torch.equal(alone.rows[1], accepted.rows[i]) and int(token[1]) == int(pending[i])
        step = steps[i]
        coins = coins_for(5, [10 + i], 3, step.tree.n)
        walks = replace(MULTI_ROUND, budget=2 + i).select(step, torch.tensor(step.tree.tokens)[None], coins)
        length = int(accepted.length[i])
        assert step.tree.path(int(walks.last)) == tuple(accepted.rows[i, :length].tolist())


def simple(rows: list[list[float]] | None = None, laws: list[list[float]] | None = None) -> Step:
    target = [[0.5, 0.25, 0.25]] * 3 if rows is None else rows
    law = None if laws is None else torch.tensor(laws, dtype=torch.float64)
    return Step(star(3), torch.tensor(target, dtype=torch.float64), law)


GOOD, NAN, INF = [0.5, 0.25, 0.25], float("nan"), float("inf")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([0.5, 0.25, 0.2], "row 1 sums to 0.95; expected 1 within 1e-06"),
        ([0.5, NAN, 0.5], "row 1 has nan at token 1; expected finite and non-negative numbers"),
        ([INF, 0, 0], "row 1 has inf at token 0"),
        ([1.25, 0, -0.25], "row 1 has -0.25 at token 2"),
        ([0, 0, 0], "row 1 is all zero; expected a sum of 1"),
    ],
)
def test_rows_that_are_no_laws_are_refused_by_row_and_value(bad: list[float], message: str) -> None:
    with pytest.raises(InputError, match=f"target {message}"):
        prepare(simple([GOOD, bad, GOOD]))
    with pytest.raises(InputError, match=f"laws {message}"):
        tree = Tree.make([-1, 0, 1])
        prepare(Step(tree, simple().target, torch.tensor([GOOD, bad, GOOD], dtype=torch.float64)))


def test_rows_of_inactive_or_childless_rows_are_not_read() -> None:
    tree = Tree.make([-1, 0, 0], active=[True, True, False])
    rows = torch.tensor([GOOD, GOOD, [NAN] * 3], dtype=torch.float64)
    laws = torch.tensor([GOOD, [NAN] * 3, [NAN] * 3], dtype=torch.float64)
    coins = Coins(torch.zeros(1, 3, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64))
    for rule in RULES.values():
        assert int(rule.select(Step(tree, rows, laws), torch.tensor([[0, 0, -1]]), coins).last) == 1


def test_law_with_fewer_tokens_than_children_is_refused() -> None:
    with pytest.raises(InputError, match="laws row 0 gives weight to 1 tokens, fewer than the row's 2 active children"):
        prepare(simple(laws=[[0, 1, 0]] * 3))


def test_shapes_and_dtypes_are_refused_by_name() -> None:
    step = simple()
    with pytest.raises(InputError, match=r"target: expected float64 \[3, V\], got torch.float32 \[3, 3\]"):
        prepare(Step(step.tree, step.target.float()))
    with pytest.raises(InputError, match=r"laws: expected the target's shape \[3, 3\], got \[3, 2\]"):
        prepare(Step(step.tree, step.target, torch.full((3, 2), 0.5, dtype=torch.float64)))
    coins = Coins(torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(InputError, match=r"tokens: expected int64 \[2, 3\] or \[1, 3\], got torch.int64 \[3, 3\]"):
        NAIVE.select(step, torch.zeros(3, 3, dtype=torch.int64), coins)
    with pytest.raises(InputError, match=r"accept coins: expected float64 \[W, 3\], got torch.float64 \[2, 2\]"):
        NAIVE.select(step, torch.zeros(1, 3, dtype=torch.int64), Coins(coins.accept[:, :2], coins.residual))
    with pytest.raises(InputError, match="coins: 2 walks of accept coins but 1 of residual coins"):
        NAIVE.select(step, torch.zeros(1, 3, dtype=torch.int64), Coins(coins.accept, coins.residual[:1]))


@ALL_RULES
@pytest.mark.parametrize("token", [-1, 3])
def test_draft_token_outside_the_vocabulary_is_refused(rule: Rule, token: int) -> None:
    coins = Coins(torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64))
    message = rf"walk 1, row 2: drafted token {token} is outside the vocabulary; allowed: 0\.\.2"
    with pytest.raises(InputError, match=message):
        rule.select(simple(), torch.tensor([[-1, 0, 1], [-1, 0, token]]), coins)


@pytest.mark.parametrize("rule", [MULTI_ROUND, TRAVERSAL], ids=lambda rule: rule.name)
def test_repeated_siblings_are_refused_where_they_are_draws_and_allowed_as_point_masses(rule: Rule) -> None:
    coins = Coins(torch.zeros(1, 3, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64))
    repeated = torch.tensor([[0, 2, 2]])
    with pytest.raises(InputError, match="walk 0, row 2: drafted token 2 repeats its sibling row 1 under row 0"):
        rule.select(simple(laws=[GOOD] * 3), repeated, coins)
    assert int(rule.select(simple(), repeated, coins).last) == 1
    assert int(NAIVE.select(simple(laws=[GOOD] * 3), repeated, coins).last) == 0


@pytest.mark.parametrize("value", [1.0, -0.25, NAN])
@pytest.mark.parametrize("name", ["accept", "residual"])
def test_coins_outside_the_unit_interval_are_refused(name: str, value: float) -> None:
    coins = {which: torch.zeros(2, 3, dtype=torch.float64) for which in ("accept", "residual")}
    coins[name][1, 2] = value
    with pytest.raises(InputError, match=rf"{name} coin of walk 1, row 2 is {value}; allowed: \[0, 1\)"):
        NAIVE.select(simple(), torch.zeros(1, 3, dtype=torch.int64), Coins(**coins))


def test_limits_out_of_range_are_refused() -> None:
    coins = Coins(torch.zeros(1, 3, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64))
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(InputError, match=r"eos 3 is outside the vocabulary; allowed: 0\.\.2"):
        replace(NAIVE, eos=3).select(simple(), tokens, coins)
    with pytest.raises(InputError, match="budget 0: at least the bonus token is emitted; allowed: >= 1"):
        replace(NAIVE, budget=0).select(simple(), tokens, coins)
    with pytest.raises(InputError, match="request 1: budget 0"):
        select_batch([None, Request(simple(), 0, 0, NAIVE, budget=0)], seed=0)

"""The plain rules, run on fractions, emit exactly the target's law. Coins are intervals that split where compared."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from lumotree import select_reference as plain
from lumotree.select import GREEDY, MULTI_ROUND, NAIVE, RULES, TRAVERSAL, Rule
from lumotree.tree import Tree

Law = dict[tuple[int, ...], Fraction]
Model = Callable[[tuple[int, ...]], Sequence[Fraction]]


class Script:
    """Depth-first enumeration of the ways a run can split: replay a prefix of choices, then always take True."""

    def __init__(self) -> None:
        self.choices: list[bool] = []
        self.position = 0
        self.probability = Fraction(1)

    def split(self, true: Fraction) -> bool:
        if self.position == len(self.choices):
            self.choices.append(True)
        choice = self.choices[self.position]
        self.position += 1
        self.probability *= true if choice else 1 - true
        return choice

    def runs(self) -> Iterator[None]:
        while True:
            self.position, self.probability = 0, Fraction(1)
            yield
            while self.choices and not self.choices[-1]:
                self.choices.pop()
            if not self.choices:
                return
            self.choices[-1] = False


class IntervalCoin:
    """A uniform coin times `scale`, known to lie in [low, high) so far; a comparison halves it where it must."""

    def __init__(self, script: Script, interval: list[Fraction] | None = None, scale: Fraction = Fraction(1)) -> None:
        self.script, self.scale = script, scale
        self.interval = [Fraction(0), Fraction(1)] if interval is None else interval

    def __mul__(self, factor: Fraction) -> IntervalCoin:
        return IntervalCoin(self.script, self.interval, self.scale * factor)

    def __lt__(self, bound: Fraction) -> bool:
        low, high = self.interval
        at = Fraction(bound) / self.scale
        if at <= low or at >= high:
            return at >= high
        below = self.script.split((at - low) / (high - low))
        self.interval[:] = (low, at) if below else (at, high)
        return below


def outcomes(rule: Rule, tree: Tree, target, laws, tokens) -> dict[plain.Outcome, Fraction]:
    law: dict[plain.Outcome, Fraction] = defaultdict(Fraction)
    script = Script()
    for _ in script.runs():
        accept, residual = ([IntervalCoin(script) for _ in range(tree.n)] for _ in range(2))
        law[rule.reference(tree, target, laws, tokens, accept, residual)] += script.probability
    return law


def drafts(tree: Tree, draft: Model | None) -> Iterator[tuple[tuple[int, ...], Fraction]]:
    """Every draft with its probability: siblings without replacement; a fixed draft where there is no law."""
    if draft is None:
        yield tuple(tree.tokens.tolist()), Fraction(1)
        return

    def grow(tokens: tuple[int, ...], weight: Fraction) -> Iterator[tuple[tuple[int, ...], Fraction]]:
        row = len(tokens)
        if row == tree.n:
            yield tokens, weight
            return
        parent = int(tree.parents[row])
        law = draft(prefix(tree, tokens, parent))
        before = [tokens[other] for other in tree.children(parent) if other < row]
        free = {token: q for token, q in enumerate(law) if q > 0 and token not in before}
        for token, q in free.items():
            yield from grow((*tokens, token), weight * q / sum(free.values()))

    yield from grow((0,), Fraction(1))


def prefix(tree: Tree, tokens: Sequence[int], row: int) -> tuple[int, ...]:
    return tuple(tokens[other] for other in tree.path(row)[1:])


def emitted_law(rule: Rule, tree: Tree, model: Model, draft: Model | None, length: int) -> Law:
    """Law of the first `length` tokens emitted, continued by the model where the selection stops earlier."""
    law: Law = defaultdict(Fraction)
    for tokens, weight in drafts(tree, draft):
        paths = [prefix(tree, tokens, row) for row in range(tree.n)]
        target = [model(path) for path in paths]
        laws = None if draft is None else [draft(path) for path in paths]
        for outcome, probability in outcomes(rule, tree, target, laws, tokens).items():
            emitted = (*paths[outcome.last], outcome.bonus)
            for whole, chance in continued(model, emitted, length, rule.eos).items():
                law[whole] += weight * probability * chance
    return {sequence: p for sequence, p in law.items() if p}


def continued(model: Model, start: tuple[int, ...], length: int, eos: int | None) -> Law:
    if len(start) >= length or eos in start:
        return {start: Fraction(1)}
    law: Law = defaultdict(Fraction)
    for token, p in enumerate(model(start)):
        for whole, chance in continued(model, (*start, token), length, eos).items() if p else ():
            law[whole] += p * chance
    return law


def random_model(rng: np.random.Generator, vocab: int, zeros: bool = True, least: int = 1) -> Model:
    table: dict[tuple[int, ...], Sequence[Fraction]] = {}

    def law(path: tuple[int, ...]) -> Sequence[Fraction]:
        while path not in table:
            weights = [int(w) for w in rng.integers(0 if zeros else 1, 5, vocab)]
            if sum(w > 0 for w in weights) >= least:
                table[path] = [Fraction(w, sum(weights)) for w in weights]
        return table[path]

    return law


TREES = [
    [-1, 0],
    [-1, 0, 0],
    [-1, 0, 1],
    [-1, 0, 0, 1],
    [-1, 0, 0, 2],
    [-1, 0, 0, 1, 1],
    [-1, 0, 0, 1, 2],
    [-1, 0, 1, 1],
]
SAMPLING = [NAIVE, MULTI_ROUND, TRAVERSAL]


@pytest.mark.parametrize("rule", SAMPLING, ids=lambda rule: rule.name)
@pytest.mark.parametrize("parents", TREES, ids=str)
@pytest.mark.parametrize("vocab", [2, 3])
def test_emitted_law_over_drawn_drafts_is_the_targets_law_exactly(rule: Rule, parents: list[int], vocab: int) -> None:
    tree, rng = Tree.make(parents), np.random.default_rng([vocab, *map(abs, parents)])
    length = tree.max_depth + 1
    for _ in range(3 if vocab == 2 else 1):
        model, draft = random_model(rng, vocab), random_model(rng, vocab, least=2)
        assert emitted_law(rule, tree, model, draft, length) == continued(model, (), length, None)


@pytest.mark.parametrize("rule", SAMPLING, ids=lambda rule: rule.name)
@pytest.mark.parametrize("parents", TREES, ids=str)
def test_emitted_law_of_any_fixed_point_mass_draft_is_the_targets_law_exactly(rule: Rule, parents: list[int]) -> None:
    rng = np.random.default_rng([7, *map(abs, parents)])
    length = Tree.make(parents).max_depth + 1
    for tokens in itertools.product(range(2), repeat=len(parents) - 1):  # repeated siblings included
        tree, model = Tree.make(parents, tokens=[0, *tokens]), random_model(rng, 2)
        assert emitted_law(rule, tree, model, None, length) == continued(model, (), length, None)


def test_traversal_accepts_more_than_multi_round_on_a_chain() -> None:
    """Shows that the bottom-up rule is not the top-down one in disguise: block verification's gain on a chain."""
    tree, rng = Tree.make([-1, 0, 1]), np.random.default_rng(5)
    model, draft = random_model(rng, 2, zeros=False), random_model(rng, 2, zeros=False)

    def accepted(rule: Rule) -> Fraction:
        total = Fraction(0)
        for tokens, weight in drafts(tree, draft):
            paths = [prefix(tree, tokens, row) for row in range(tree.n)]
            law = outcomes(rule, tree, [model(p) for p in paths], [draft(p) for p in paths], tokens)
            total += weight * sum(p * int(tree.depth[outcome.last]) for outcome, p in law.items())
        return total

    assert accepted(TRAVERSAL) > accepted(MULTI_ROUND)


@pytest.mark.parametrize("rule", [MULTI_ROUND, TRAVERSAL], ids=lambda rule: rule.name)
def test_forgetting_to_renormalise_the_draft_law_is_seen(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: q without the earlier sibling but over its old mass."""

    def draft_over_one(self: plain.RowLaw, token: int) -> list[Fraction]:
        assert self.law is not None
        return list(self.law)

    tree, rng = Tree.make([-1, 0, 0]), np.random.default_rng(3)
    models = [(random_model(rng, 3, zeros=False), random_model(rng, 3, zeros=False)) for _ in range(20)]

    def exact() -> int:
        laws = ((emitted_law(rule, tree, model, draft, 2), continued(model, (), 2, None)) for model, draft in models)
        return sum(law == want for law, want in laws)

    assert exact() == len(models)
    monkeypatch.setattr(plain.RowLaw, "draft", draft_over_one)
    assert exact() < len(models)


@pytest.mark.parametrize("rule", SAMPLING, ids=lambda rule: rule.name)
@pytest.mark.parametrize(("eos", "budget"), [(1, None), (None, 1), (None, 2), (0, 2)])
def test_end_of_sequence_and_budget_keep_the_law(rule: Rule, eos: int | None, budget: int | None) -> None:
    tree, rng = Tree.make([-1, 0, 0, 1, 3]), np.random.default_rng(11)
    model, draft = random_model(rng, 2), random_model(rng, 2, least=2)
    limited = replace(rule, eos=eos, budget=budget)
    assert emitted_law(limited, tree, model, draft, 4) == continued(model, (), 4, eos)


def test_greedy_emits_the_greedy_continuation_and_ignores_coins() -> None:
    tree = Tree.make([-1, 0, 0, 2], tokens=[0, 0, 1, 0])
    rows = [[1, 2, 2], [1, 0, 0], [3, 1, 3], [0, 0, 1]]
    target = [[Fraction(w, sum(row)) for w in row] for row in rows]
    assert outcomes(GREEDY, tree, target, None, tree.tokens.tolist()) == {plain.Outcome(3, 2, False): 1}


def test_a_token_of_draft_probability_zero_is_taken_iff_the_target_allows_it() -> None:
    tree, laws = Tree.make([-1, 0]), [[Fraction(1), Fraction(0)]] * 2
    for rule in (MULTI_ROUND, TRAVERSAL):
        possible = outcomes(rule, tree, [[Fraction(1, 2)] * 2] * 2, laws, [0, 1])
        assert {outcome.last for outcome in possible} == {1}
        impossible = outcomes(rule, tree, [[Fraction(1), Fraction(0)]] * 2, laws, [0, 1])
        assert impossible == {plain.Outcome(0, 0, True): 1}


def test_registry_names_every_rule() -> None:
    assert [rule.name for rule in RULES.values()] == list(RULES) == ["greedy", "naive", "multi-round", "traversal"]
    assert all(rule.lossless for rule in RULES.values())
